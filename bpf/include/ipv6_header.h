/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The IPv6 header and its extension headers (RFC 8200). */
#ifndef COREWARD_INCLUDE_IPV6_HEADER_H
#define COREWARD_INCLUDE_IPV6_HEADER_H

#include <stdbool.h>
#include <linux/if_ether.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/* IPv6 header (RFC 8200, Sect. 3). <linux/ipv6.h> would include libc's headers, which this target lacks. */
struct ipv6_header {
	__be32 version_class_label;
	__be16 payload_length;
	__u8 next_header;
	__u8 hop_limit;
	__u32 source[4];
	__u32 destination[4];
};

#define IPV6_FIELD_OFFSET(field) (ETH_HLEN + __builtin_offsetof(struct ipv6_header, field))
#define IPV6_TRANSPORT_OFFSET (ETH_HLEN + sizeof(struct ipv6_header))
_Static_assert(sizeof(struct ipv6_header) == 40, "RFC 8200, Sect. 3");

/* Next-header numbers of RFC 8200, Sect. 4.3 to 4.6, RFC 4302, Sect. 2, and RFC 4443, Sect. 1. */
#define NEXT_HOP_BY_HOP 0
#define NEXT_ROUTING 43
#define NEXT_FRAGMENT 44
#define NEXT_AUTHENTICATION 51
#define NEXT_ICMPV6 58
#define NEXT_DESTINATION_OPTIONS 60
/* Maximum number of extension headers, because destination options may occur twice, and each other header once. */
#define MAX_EXTENSION_HEADERS 6

/* Returns whether the type is one of the errors of RFC 4443, Sect. 2.1. */
static __always_inline bool is_icmpv6_error(__u8 type)
{
	return type >= 1 && type <= 4;
}

/* First bytes of an extension header, with next header and length, and in a fragment header offset and flags. */
struct extension_header {
	__u8 next;
	__u8 length;
	__u8 fragment[2];
};

static __always_inline bool is_extension_header(__u32 next)
{
	return next == NEXT_HOP_BY_HOP || next == NEXT_ROUTING || next == NEXT_FRAGMENT ||
	       next == NEXT_AUTHENTICATION || next == NEXT_DESTINATION_OPTIONS;
}

/* Returns the length in bytes. The field counts 8-byte units after the first, or in AH 4-byte units after two. */
static __always_inline __u32 extension_header_length(__u32 number, const struct extension_header *header)
{
	if (number == NEXT_FRAGMENT)
		return 8;
	return number == NEXT_AUTHENTICATION ? (header->length + 2) * 4 : (header->length + 1) * 8;
}

/* Returns fragment offset and "more fragments", or 0 if the packet is whole (RFC 6946). */
static __always_inline __u32 fragment_field(const struct extension_header *header)
{
	return header->fragment[0] << 8 | (header->fragment[1] & ~0x6);
}

#endif
