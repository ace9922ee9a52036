/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Clocks of servers with LB-side stamping (lb_cookie.h, sections 1 and 5). */
#ifndef COREWARD_LB_CLOCKS_H
#define COREWARD_LB_CLOCKS_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "connection_table.h"
#include "parse.h"
#include "placement.h"
#include "state.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_LB_STAMPED_SERVERS);
	__type(key, __u64);
	__type(value, struct lb_stamped_server);
} lb_stamped_servers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LB_STAMPED_OFFSETS);
	__type(key, __u32);
	__type(value, __u64);
} lb_stamped_offsets SEC(".maps");

#define NANOSECONDS_PER_MS 1000000

/* Returns the entry of a server by its MAC address, which is the low 48 bits of `mac`. */
static __always_inline struct lb_stamped_server *find_lb_stamped_server(__u32 service, __u64 mac)
{
	__u64 key = (mac & SERVER_MAC_MASK) | (__u64)service << LB_STAMPED_SERVICE_SHIFT;

	return bpf_map_lookup_elem(&lb_stamped_servers, &key);
}

/* Returns whether enough of the server's connections have shown one clock. */
static __always_inline bool is_clock_verified(const struct lb_stamped_server *server)
{
	return server->agreeing >= LB_STAMPING_AGREEING;
}

static __always_inline bool can_stamp_connections(const struct lb_stamped_server *server)
{
	return is_clock_verified(server) || server->steady >= LB_STAMPING_AGREEING;
}

static __always_inline bool has_different_offsets(const struct lb_stamped_server *server)
{
	return server->disagreed;
}

/* Whether lb_state.clock gives the time, as in comparisons with the model. */
const volatile bool lb_stamping_by_ticks;

static __always_inline __u32 monotonic_ms(void)
{
	if (lb_stamping_by_ticks)
		return *(volatile __u32 *)&lb_state.clock * 100;
	return bpf_ktime_get_ns() / NANOSECONDS_PER_MS;
}

static __always_inline bool are_offsets_of_one_clock(__u32 offset_ms, __u32 other_offset_ms, __u32 tolerance_ms)
{
	return offset_ms - other_offset_ms + tolerance_ms <= 2 * tolerance_ms;
}

/* TSval of a server's reply, and this load balancer's time (ms), read once per packet. */
struct reply_time {
	__u32 tsval_ms;
	__u32 now_ms;
};

/*
 * Updates the server's clock by a SYN-ACK. Concurrent updates by two CPUs may count once. The stored offset changes
 * only by more than half the tolerance, because it selects a packet's key (stamp_reply_tsval()), which must not
 * alternate.
 */
static __always_inline void learn_clock(struct lb_stamped_server *server, const struct packet *packet,
					struct reply_time answer)
{
	__u32 offset_ms = answer.tsval_ms - answer.now_ms;
	__u32 client = packet->client_address ^ packet->ports;

	if (!server->agreeing || !are_offsets_of_one_clock(offset_ms, server->newest_ms, LB_STAMPING_TOLERANCE_MS)) {
		server->disagreed += !!server->agreeing;
		server->agreeing = 1;
	} else if (!is_clock_verified(server) && client != server->newest_connection_word) {
		server->agreeing++;
	}
	server->newest_ms = offset_ms;
	server->newest_connection_word = client;
	if (is_clock_verified(server) &&
	    (!server->has_clock ||
	     !are_offsets_of_one_clock(offset_ms, server->offset_ms, LB_STAMPING_TOLERANCE_MS / 2))) {
		server->offset_ms = offset_ms;
		server->has_clock = 1;
	}
}

/* Compares two replies of one connection, neither a reset, to learn whether the server's TSval grows by 1 per ms. */
static __always_inline void sample_clock(struct lb_stamped_server *server, const struct packet *packet,
					 struct reply_time answer)
{
	__u32 client = packet->client_address ^ packet->ports;
	__u32 offset_ms = answer.tsval_ms - answer.now_ms, elapsed_ms = answer.now_ms - server->sampled_at_ms;

	if (server->sampled_connection_word && client == server->sampled_connection_word) {
		if (elapsed_ms < LB_STAMPING_SAMPLE_MS)
			return;
		server->unsteady = !are_offsets_of_one_clock(offset_ms, server->sampled_ms, elapsed_ms / 2);
		if (server->unsteady)
			server->steady /= 2;
		else if (server->steady < LB_STAMPING_MAX_STEADY)
			server->steady++;
		server->sampled_connection_word = 0;
	} else if (!server->sampled_connection_word || elapsed_ms > LB_STAMPING_SAMPLE_EXPIRES_MS) {
		server->sampled_connection_word = client;
		server->sampled_ms = offset_ms;
		server->sampled_at_ms = answer.now_ms;
	}
}

static __always_inline __u64 *find_connection_offset(__u64 hash)
{
	__u32 index = hash & (LB_STAMPED_OFFSETS - 1);

	return bpf_map_lookup_elem(&lb_stamped_offsets, &index);
}

static __always_inline __u32 connection_offset_tag(__u64 hash)
{
	return hash >> LB_STAMPED_OFFSET_TAG_SHIFT | 1;
}

/* Stores a connection's offset unless a similar one is stored. Returns the stored offset, which selects the key. */
static __always_inline __u32 learn_connection_offset(__u64 hash, __u32 offset_ms)
{
	__u64 *word = find_connection_offset(hash), known;

	if (!word)
		return offset_ms;
	known = *(volatile __u64 *)word;
	if (known >> LB_STAMPED_OFFSET_TAG_SHIFT == connection_offset_tag(hash) &&
	    are_offsets_of_one_clock(offset_ms, known, LB_STAMPING_TOLERANCE_MS / 2))
		return known;
	*(volatile __u64 *)word = (__u64)connection_offset_tag(hash) << LB_STAMPED_OFFSET_TAG_SHIFT | offset_ms;
	return offset_ms;
}

/* Returns the offset of a stamped connection by a reply of the server, and stores the offset if it is unknown. */
static __always_inline __u32 record_stamped_reply(struct lb_stamped_server *server, __u32 service,
						  const struct packet *packet, struct reply_time answer)
{
	__u32 offset_ms = answer.tsval_ms - answer.now_ms;

	if (!has_different_offsets(server) && !server->has_clock) {
		server->offset_ms = offset_ms;
		server->has_clock = 1;
	}
	if (!has_different_offsets(server) &&
	    are_offsets_of_one_clock(offset_ms, server->offset_ms, LB_STAMPING_TOLERANCE_MS))
		return server->offset_ms;
	server->disagreed += !has_different_offsets(server);
	return learn_connection_offset(connection_hash(service, packet->client_address, packet->ports), offset_ms);
}

/* Fills the offset of a stamped connection. Returns whether the offset is known. */
static __always_inline bool find_offset(const struct lb_stamped_server *server, __u32 service,
					const struct packet *packet, __u32 *offset_ms)
{
	__u64 hash, *word, known;

	*offset_ms = server->offset_ms;
	if (!has_different_offsets(server))
		return server->has_clock;
	hash = connection_hash(service, packet->client_address, packet->ports);
	word = find_connection_offset(hash);
	if (!word)
		return false;
	known = *(volatile __u64 *)word;
	*offset_ms = known;
	return known >> LB_STAMPED_OFFSET_TAG_SHIFT == connection_offset_tag(hash);
}

#endif
