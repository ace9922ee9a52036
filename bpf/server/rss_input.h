/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Transformation of addresses and ports before the NIC hashes them. */
#ifndef COREWARD_SERVER_RSS_INPUT_H
#define COREWARD_SERVER_RSS_INPUT_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Both addresses of IPv4, before both ports. */
#define RSS_INPUT_ADDRESS_BYTES 8

/* `transform`: RSS_INPUT_*; `input`: source address, destination address, source port, destination port. */
static __always_inline void transform_rss_input(__u32 transform, __u8 input[RSS_INPUT_IPV4_BYTES])
{
	int i;

	if (transform == RSS_INPUT_AS_IT_IS)
		return;
#pragma unroll
	for (i = 0; i < RSS_INPUT_IPV4_BYTES / 2; i++) {
		int source = i < 4 ? i : RSS_INPUT_ADDRESS_BYTES + i - 4;
		int destination = i < 4 ? source + 4 : source + 2;
		__u8 either = input[source] | input[destination], differing = input[source] ^ input[destination];

		input[source] = transform == RSS_INPUT_SYMMETRIC_OR_XOR ? either : differing;
		input[destination] = differing;
	}
}

#endif
