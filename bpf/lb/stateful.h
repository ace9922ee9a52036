/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * CONSISTENCY_STATEFUL, in which the cookie holds an index into the connection table of the load balancer that placed
 * the connection.
 */
#ifndef COREWARD_LB_STATEFUL_H
#define COREWARD_LB_STATEFUL_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "connection_table.h"
#include "cookie.h"
#include "decision.h"
#include "migration.h"
#include "parse.h"
#include "parse_ipv6.h"
#include "placement.h"
#include "service_mode.h"
#include "state.h"
#include "stats.h"

static __always_inline bool is_from_owner(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 source;

	if (data + ETH_HLEN > data_end)
		return false;
	source = PACKET_U64(data, ETH_ALEN) & SERVER_MAC_MASK;
	for (__u32 i = 0; i < MAX_OWNERS; i++) {
		server_entry_t owner = *(const server_entry_t *)&lb_state.owners[i];

		if (has_server_flag(owner, SERVER_RESOLVED) && (owner & SERVER_MAC_MASK) == source)
			return true;
	}
	return false;
}

/*
 * Decides to forward the packet to the load balancer whose table has the cookie's index. If that owner is lost, or the
 * packet comes from a load balancer, the packet is broadcast, so that no packet circles.
 */
static __always_inline void forward_to_owner(struct xdp_md *ctx, const struct service *service, __u32 source,
					     __u32 owner, struct decision *decision)
{
	server_entry_t balancer = *(const server_entry_t *)&lb_state.owners[owner & (MAX_OWNERS - 1)];

	if (!has_server_flag(balancer, SERVER_KNOWN)) {
		decide_packet_of_unknown_connection(service, source, decision);
	} else if (has_server_flag(balancer, SERVER_RESOLVED) && !is_from_owner(ctx)) {
		decision->outcome = LB_COUNTER_TO_OWNER;
		decision->destination = balancer;
	} else {
		decide_broadcast(LIMITED_OWNER_LOST, source, LB_COUNTER_DROP_BROADCAST_RATE_LIMITED, decision);
	}
}

/*
 * Decides by the index in `cookie`, counted as `outcome`. Returns false if the entry is free or of another connection,
 * or its server was removed. `found` is set to the entry if this load balancer's table has the index.
 */
static __always_inline bool decide_by_cookie_index(struct xdp_md *ctx, const struct service *service, __u32 cookie,
						   const struct packet *packet, enum lb_counter outcome,
						   struct decision *decision, struct connection **found)
{
	__u64 hash = connection_hash(decision->service, packet->client_address, packet->ports);
	struct connection *connection;
	__u32 id;

	*found = NULL;
	if (cookie_owner(cookie) != lb_state.owner) {
		forward_to_owner(ctx, service, packet->client_address, cookie_owner(cookie), decision);
		return true;
	}
	connection = find_connection(hash, cookie, decision->service, &id);
	if (!connection)
		count_event(ctx, decision->service, LB_EVENT_CONNECTION_UNKNOWN);
	if (!connection || !is_server_known(decision->service, id))
		return false;
	decide_server(id, outcome, decision);
	*found = connection;
	return true;
}

struct connection_takes connection_takes SEC(".bss.takes");

/* Returns a source prefix's counter of entries (/24, in IPv6 /64). `address` is as in struct connection. */
static __always_inline __u64 *source_prefix_counter(const packet_u64 *address)
{
	bool ipv4 = !ipv6_in_use || (!address[0] && (__u32)address[1] == bpf_htonl(0xffff));
	__u32 prefix = address[1] >> 32 & bpf_htonl(0xffffff00);
	__u64 hash = connection_hash(0, ipv4 ? prefix : fold_address_ipv6(&lb_state.connection_key, address[0], 0), 0);

	return &connection_takes.entries_by_source[hash & (SOURCE_SHARDS - 1)];
}

static __always_inline __u64 *client_entry_counter(struct xdp_md *ctx, const struct packet *packet)
{
	packet_u64 address[2];

	write_client_address(ctx, packet, address);
	return source_prefix_counter(address);
}

/* Returns whether a prefix may have another entry. Concurrent CPUs may exceed the limit by their number. */
static __always_inline bool may_take_connection(const __u64 *held)
{
	__u64 limit = *(volatile __u64 *)&lb_state.entries_per_source;

	return !limit || *(const volatile __u64 *)held < limit;
}

/* Returns the event for a new connection without an entry. `taken` is CONNECTION_TABLE_FULL or another reason. */
static __always_inline enum lb_event allocation_failure_event(int taken)
{
	if (taken == CONNECTION_SOURCE_LIMITED)
		return LB_EVENT_CONNECTION_SOURCE_LIMITED;
	return taken == CONNECTION_TABLE_FULL ? LB_EVENT_CONNECTION_TABLE_FULL : LB_EVENT_CONNECTION_CONTENDED;
}

static __always_inline void count_allocation(void)
{
	__u32 row = cpu_row();

	barrier_var(row);
	connection_takes.by_row[row & (MAX_LB_COUNTER_ROWS - 1)].count++;
}

/* Returns whether the entry with that identity may be reused (connection_table.h, section 2). */
static __always_inline bool is_expired(const struct connection *connection, __u64 identity)
{
	const struct connection_timers *timers = &lb_state.timers;
	__u32 now = *(volatile __u32 *)&lb_state.clock;
	/* The difference is negative if a packet came after the clock was read. */
	__s32 idle = now - connection->last_seen;

	if (!is_server_known(identity >> CONNECTION_SERVICE_SHIFT & CONNECTION_SERVICE_MASK, identity & COOKIE_ID_MASK))
		return true;
	if (connection->packets <= 1)
		return idle >= (__s32)timers->half_open;
	if ((__s32)(now - timers->swept) < CONNECTION_UNSWEPT_TICKS)
		return false;
	return idle >= (__s32)(connection->flags & CONNECTION_CLOSING ? timers->closing : timers->idle);
}

/* Subtracts an entry from its source's count, unless that is 0 because user space has not counted the entry. */
static __always_inline void uncount_entry(const packet_u64 *client_address)
{
	__u64 *held = source_prefix_counter(client_address);

	if (*(volatile __u64 *)held)
		__sync_fetch_and_add(held, -1);
}

/*
 * Fills the slot of an expired entry in the connection's partition, and returns the slot, or CONNECTION_TABLE_FULL. The
 * search continues at `hand`, as in the CLOCK algorithm of page replacement, and examines CONNECTION_HAND_PROBES slots.
 */
static __noinline int reuse_connection(struct xdp_md *ctx, const struct packet *packet, __u64 hash, __u32 service,
				       __u32 server_id)
{
	__u32 partition = hash & connection_partition_mask;
	struct connection_stack *stack = bpf_map_lookup_elem(&connection_stacks, &partition);
	__u64 hand;

	if (!packet || !stack)
		return CONNECTION_TABLE_FULL;
	/* Not atomic, because the exchange of the identity decides if two packets find the same entry. */
	hand = *(volatile __u64 *)&stack->hand;
	for (int probe = 0; probe < CONNECTION_HAND_PROBES; probe++) {
		__u32 slot = hand & CONNECTION_SLOT_MASK;
		struct connection *connection = connection_at(hash, slot);
		packet_u64 client_address[2];
		__u64 identity;

		if (!connection)
			return CONNECTION_TABLE_FULL;
		*(volatile __u64 *)&stack->hand = ++hand;
		identity = *(volatile __u64 *)&connection->identity;
		if (!identity || !is_expired(connection, identity))
			continue;
		client_address[0] = *(packet_u64 *)&connection->client_address[0];
		client_address[1] = *(packet_u64 *)&connection->client_address[2];
		if (__sync_val_compare_and_swap(&connection->identity, identity, 0) != identity)
			continue;
		uncount_entry(client_address);
		connection->generation++;
		fill_connection(ctx, connection, packet, hash & CONNECTION_TAG_MASK,
				service << CONNECTION_SERVICE_SHIFT | server_id);
		return slot;
	}
	return CONNECTION_TABLE_FULL;
}

/* Takes an entry for a new connection, or returns the reason why not. With `inlined` the common case has no call. */
static __always_inline int insert_connection(struct xdp_md *ctx, const struct packet *packet, __u64 hash,
					     const struct decision *decision, bool inlined)
{
	__u32 service = decision->service, server_id = decision->server_id;
	int taken = inlined ? take_connection_inlined(ctx, packet, hash, service, server_id)
			    : take_connection(ctx, packet, hash, service, server_id);

	if (taken >= 0)
		count_allocation();
	if (taken != CONNECTION_TABLE_FULL)
		return taken;
	taken = reuse_connection(ctx, packet, hash, service, server_id);
	if (taken >= 0)
		count_event(ctx, service, LB_EVENT_CONNECTION_REUSED);
	return taken;
}

/* Decides about a retransmitted SYN by its entry in slot `recent`, if the server still takes new connections. */
static __always_inline bool decide_repeated_syn(__u64 hash, int recent, struct decision *decision)
{
	__u32 owner = lb_state.owner, id;
	struct connection *connection;

	if (recent == NOT_RECENT || owner >= MAX_OWNERS)
		return false;
	connection = find_connection(hash, recent, decision->service, &id);
	if (!connection || !takes_new_connections(load_server_entry(decision->service, id)))
		return false;
	decide_server(id, LB_COUNTER_NEW_CONNECTION, decision);
	decision->opens = reopen_connection(connection);
	decision->tsecr = encode_syn_tsecr(owner, recent);
	move_recent(hash, recent);
	return true;
}

/*
 * Takes an entry for a placed SYN, whose TSecr carries the index to the server. Without an entry TSecr becomes 0, and
 * the server stamps its id. `inlined` is as in insert_connection().
 */
static __always_inline void open_connection(struct xdp_md *ctx, const struct packet *packet, __u64 hash, int recent,
					    struct decision *decision, bool inlined)
{
	__u32 owner = lb_state.owner;
	__u64 *held;
	int taken;

	decision->tsecr = packet->tsecr ? 0 : KEEP_TSECR;
	if (decision->outcome != LB_COUNTER_NEW_CONNECTION || owner >= MAX_OWNERS)
		return;
	held = client_entry_counter(ctx, packet);
	taken = may_take_connection(held) ? insert_connection(ctx, packet, hash, decision, inlined)
					  : CONNECTION_SOURCE_LIMITED;
	if (taken < 0) {
		count_event(ctx, decision->service, allocation_failure_event(taken));
		return;
	}
	__sync_fetch_and_add(held, 1);
	if (recent == NOT_RECENT)
		insert_recent(hash, taken);
	else
		move_recent(hash, taken);
	decision->tsecr = encode_syn_tsecr(owner, taken);
}

static __always_inline void decide_stateful_syn(struct xdp_md *ctx, struct service_state *state,
						const struct packet *packet, struct decision *decision)
{
	__u64 hash = connection_hash(decision->service, packet->client_address, packet->ports);
	int recent = find_recent_slot(hash);

	if (decide_repeated_syn(hash, recent, decision))
		return;
	decide_by_rule(ctx, state, packet, LB_COUNTER_NEW_CONNECTION, decision);
	open_connection(ctx, packet, hash, recent, decision, false);
}

static __always_inline void decide_connection(struct xdp_md *ctx, const struct service *service, __u32 cookie,
					      const struct packet *packet, struct decision *decision)
{
	struct connection *connection;

	if (!decide_by_cookie_index(ctx, service, cookie, packet, LB_COUNTER_CONNECTION_TABLE, decision, &connection))
		decide_packet_of_unknown_connection(service, packet->client_address, decision);
	if (connection)
		decision->closes = update_connection(connection, packet->flags, frame_bytes(ctx));
}

#endif
