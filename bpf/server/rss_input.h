/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Transform of addresses and ports that a NIC applies before hashing. */
#ifndef COREWARD_SERVER_RSS_INPUT_H
#define COREWARD_SERVER_RSS_INPUT_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Length of both ports in bytes. */
#define RSS_INPUT_PORT_BYTES 4
#define RSS_INPUT_IPV4_ADDRESS_BYTES (RSS_INPUT_IPV4_BYTES - RSS_INPUT_PORT_BYTES)

/*
 * Applies a transform (RSS_INPUT_*) to `input`, which consists of source address, destination address, source port and
 * destination port, together `length` bytes.
 */
static __always_inline void transform_rss_input(__u32 transform, __u8 *input, __u32 length)
{
	__u32 address = (length - RSS_INPUT_PORT_BYTES) / 2, i;

	if (transform == RSS_INPUT_UNCHANGED)
		return;
#pragma unroll
	for (i = 0; i < length / 2; i++) {
		__u32 source = i < address ? i : address + i;
		__u32 destination = source + (i < address ? address : RSS_INPUT_PORT_BYTES / 2);
		__u8 either = input[source] | input[destination], differing = input[source] ^ input[destination];

		input[source] = transform == RSS_INPUT_SYMMETRIC_OR_XOR ? either : differing;
		input[destination] = differing;
	}
}

/* Returns the Toeplitz hash of the transformed input. `byte` has one table per input byte. */
static __always_inline __u32 toeplitz_of_input(const __u32 (*byte)[256], const __u8 *input, __u32 length)
{
	__u32 hash = 0, i;

	/* Unrolled, the look-ups of IPv6 would not fit the stack. */
#pragma nounroll
	for (i = 0; i < length; i++)
		hash ^= byte[i][input[i]];
	return hash;
}

#endif
