/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The fragment field of the IPv4 header (RFC 791, Sect. 3.1). */
#ifndef COREWARD_INCLUDE_IPV4_HEADER_H
#define COREWARD_INCLUDE_IPV4_HEADER_H

#define IP_MORE_FRAGMENTS 0x2000
#define IP_FRAGMENT_OFFSET 0x1fff
/* Bits that mark a fragment, which are all except "don't fragment" and the reserved bit. */
#define IP_FRAGMENT_MASK (IP_MORE_FRAGMENTS | IP_FRAGMENT_OFFSET)

#endif
