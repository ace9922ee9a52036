/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The flow table: connections that carry no cookie, and their servers. A kernel LRU hash, bounded: when it is full the
 * flow used longest ago makes room, and its next packet goes as one that was never seen.
 *
 * Who can fill it: clients whose packets carry no timestamps, and everybody at services of mode HASH_TABLE. A SYN of the
 * first kind inserts nothing (its server follows from the bucket), so that a flood of them leaves the table alone; a
 * flood of other forged packets does push out what is in there.
 *
 * An entry is one 32-bit word, read and written as one: the kernel uses evicted entries again without an RCU grace
 * period, so a reader on another CPU may find a different flow's server there, but never half of it. (So it is for every
 * user of an LRU hash; the window is some ns after an eviction.)
 */
#ifndef COREWARD_FLOW_TABLE_BPF_H
#define COREWARD_FLOW_TABLE_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.bpf.h"
#include "stats.bpf.h"

/* User space sets the size that is configured. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, DEFAULT_FLOW_TABLE_ENTRIES);
	__type(key, struct flow_table_key);
	__type(value, struct flow_table_entry);
} flow_table SEC(".maps");

_Static_assert(sizeof(struct flow_table_entry) == sizeof(__u32), "an entry is read and written as one word");
typedef __u32 __attribute__((may_alias)) flow_table_word;

static __always_inline struct flow_table_key flow_table_key_of(__u32 service, const struct packet *packet)
{
	return (struct flow_table_key){
		.client_address = {0, 0, bpf_htonl(0xffff), packet->client_address},
		.client_port = packet->ports,
		.service = service,
	};
}

/* Fills `entry` and returns true, if the flow is known. */
static __always_inline bool find_flow(__u32 service, const struct packet *packet, struct flow_table_entry *entry)
{
	struct flow_table_key key = flow_table_key_of(service, packet);
	const volatile flow_table_word *found = bpf_map_lookup_elem(&flow_table, &key);
	__u32 word;

	if (!found)
		return false;
	word = *found;
	entry->server_id = word;
	entry->before = word >> 16;
	return true;
}

static __always_inline void insert_flow(struct xdp_md *ctx, __u32 service, const struct packet *packet,
					struct flow_table_entry entry)
{
	struct flow_table_key key = flow_table_key_of(service, packet);

	if (!bpf_map_update_elem(&flow_table, &key, &entry, BPF_ANY))
		count_event(ctx, service, LB_EVENT_FLOW_INSERTED);
}

/* The client has taken the SYN-ACK that brought the entry. */
static __always_inline void open_flow(__u32 service, const struct packet *packet, struct flow_table_entry entry)
{
	struct flow_table_key key = flow_table_key_of(service, packet);

	entry.before = NO_SERVER;
	bpf_map_update_elem(&flow_table, &key, &entry, BPF_EXIST);
}

#endif
