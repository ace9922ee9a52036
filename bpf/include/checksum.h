/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The Internet checksum (RFC 1071). */
#ifndef COREWARD_CHECKSUM_H
#define COREWARD_CHECKSUM_H

#include <linux/types.h>

/* Returns the ones' complement sum of the 16-bit words in `sum`, which must be below 2^32 + 0xffff. */
static inline __attribute__((always_inline)) __u16 fold_checksum(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Returns the same as fold_checksum(), for a sum of any size. */
static inline __attribute__((always_inline)) __u16 fold_long_checksum(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return fold_checksum((sum & 0xffffffff) + (sum >> 32));
}

#endif
