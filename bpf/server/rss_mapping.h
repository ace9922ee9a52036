/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The server's RSS, which gives the NIC's receive queue of a connection. The agent fills a map that two programs share.
 * server.bpf.c compares the predicted with the actual queue, steer.bpf.c selects a socket by the predicted queue.
 */
#ifndef COREWARD_SERVER_RSS_MAPPING_H
#define COREWARD_SERVER_RSS_MAPPING_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "rss_input.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rss_mapping);
} rss_mapping SEC(".maps");

#define QUEUE_UNKNOWN 0xffffffffu

/*
 * Returns the receive queue of a connection to this server, and fills its Toeplitz hash. Returns QUEUE_UNKNOWN while
 * the table is unknown. `input` is as in transform_rss_input(), which changes it.
 */
static __always_inline __u32 queue_of_input(__u8 *input, __u32 length, __u32 *hash)
{
	const struct rss_mapping *rss;
	__u32 zero = 0, entry;

	*hash = 0;
	rss = bpf_map_lookup_elem(&rss_mapping, &zero);
	if (!rss || !rss->entry_count)
		return QUEUE_UNKNOWN;
	transform_rss_input(rss->input_transform, input, length);
	*hash = toeplitz_of_input(rss->byte, input, length);
	entry = *hash & (rss->entry_count - 1) & (MAX_INDIRECTION_ENTRIES - 1);
	return rss->queue[entry];
}

/* Returns queue_of_input() of an IPv4 connection. `ports` is the start of the client's TCP header. */
static __always_inline __u32 predict_queue_ipv4(__u32 source_address, __u32 destination_address, __u32 ports,
						__u32 *hash)
{
	__u32 words[3] = {source_address, destination_address, ports};

	return queue_of_input((__u8 *)words, sizeof(words), hash);
}

_Static_assert(sizeof(struct flow_key) == RSS_INPUT_IPV6_BYTES, "a flow of IPv6 is the input");

/* Returns queue_of_input() of an IPv6 connection. */
static __noinline __u32 predict_queue_ipv6(const struct flow_key *flow, __u32 *hash)
{
	struct flow_key input = *flow;

	return queue_of_input((__u8 *)&input, sizeof(input), hash);
}

#endif
