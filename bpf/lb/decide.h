/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Where a packet of a service goes, by the service's mode (enum consistency) and what the packet carries. The rows of
 * "what finds the server" are those of docs/design.md, "Consistency"; where another load balancer has some of the service's
 * connections, those of docs/deployment.md.
 */
#ifndef COREWARD_LB_DECIDE_H
#define COREWARD_LB_DECIDE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "connection_table.h"
#include "correction.h"
#include "cookie.h"
#include "flow_table.h"
#include "parse.h"
#include "placement.h"
#include "service.h"
#include "service_mode.h"
#include "state.h"
#include "stats.h"

/* In the place of a decision's `before`: the packet's identification is left as it is. */
#define KEEP_IDENTIFICATION 0x10000u
/* In the place of a decision's `echo`: TSecr is left as it is. */
#define KEEP_ECHO 0xffffffffu

/* Of a server that something else than the placement table names: the table must have it, too, or it is down. */
#define TAKES_NEW_CONNECTIONS (TAKES_FIRST_PACKETS | SERVER_IN_TABLE)

struct decision {
	enum lb_counter outcome;
	/* An index, or LB_COUNTERS_NO_SERVICE. */
	__u32 service;
	/* MAC address; only if the packet is forwarded. */
	__u64 destination;
	/* Whose `destination` is; NO_SERVER: all servers', or a load balancer's. */
	__u32 server_id;
	/* The server before, which the packet's IP identification is to carry; or KEEP_IDENTIFICATION. */
	__u32 before;
	/* What TSecr becomes: in a first packet SYN_ECHO_HOLDS_COOKIE or 0, else the server's own time; or KEEP_ECHO. */
	__u32 echo;
	/*
	 * Counts by server, which policies use. Anybody can forge packets: a SYN that the bucket or an entry sends to a
	 * server of the sender's choice does not count, nor a FIN or RST without a cookie. (A forged SYN makes an entry.)
	 */
	bool opens; /* the placement rule has placed a new connection */
	bool closes; /* the packet ends a connection that its cookie names */
};

/* The outcomes of enum lb_counter stand in this order: passed, forwarded, dropped. */
static __always_inline bool is_forwarded(enum lb_counter outcome)
{
	return outcome > LB_COUNTER_PASSED_NOT_SERVICE && outcome < LB_COUNTER_DROP_MALFORMED_IPV4;
}

/* COOKIE_KIND_BIT and id in a TSecr. */
static __always_inline __u32 cookie_of(__u32 echo, __u32 client_address, __u32 vip_address, __u32 ports)
{
	const struct cookie_key *key = &lb_state.keys.key[cookie_key_index(echo)];

	return reveal(cookie_hash(key, client_address, vip_address, ports), echo & COOKIE_HIDDEN_MASK,
		      COOKIE_PERMUTATION);
}

/* The number of the service that a packet is for (find_service()). */
static __always_inline __u32 find_service_of(const struct packet *packet)
{
	__u64 tail = service_tail_ipv4(packet->vip_address, packet->ports >> 16, packet->protocol);

	return find_lb_service(&lb_state.directories, tail);
}

/* ---- to one server, or to all ---------------------------------------------------------------------------------- */

/* To that server, counted as `outcome`. No other one has the connection: without its MAC address the packet is dropped. */
static __always_inline void decide_server(__u32 id, enum lb_counter outcome, struct decision *decision)
{
	server_word server = server_at(decision->service, id);

	decision->outcome = server_has(server, SERVER_RESOLVED) ? outcome : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = server;
	decision->server_id = id;
}

static __always_inline bool server_is_known(__u32 service, __u32 id)
{
	return server_has(server_at(service, id), SERVER_KNOWN);
}

/* To all servers of the service, if the rates allow it (broadcast.h). `over_rate`: the outcome if not. */
static __always_inline void decide_to_all(enum broadcast_reason reason, __u32 source, enum lb_counter over_rate,
					  struct decision *decision)
{
	if (!may_broadcast(decision->service, source, reason)) {
		decision->outcome = over_rate;
		return;
	}
	decision->outcome = reason == BROADCAST_OWNER_LOST ? LB_COUNTER_TO_ALL_OWNER_LOST : LB_COUNTER_TO_ALL;
	decision->destination = BROADCAST_MAC;
}

/* To the load balancer that has some of the service's connections. No server hands such a packet on again. */
static __always_inline void decide_other_balancer(__u32 number, struct decision *decision)
{
	server_word balancer = server_at(decision->service, other_balancer(number));

	/* An address that other services know counts only where it is a member. */
	decision->outcome = server_has(balancer, SERVER_KNOWN | SERVER_RESOLVED) ? LB_COUNTER_TO_OTHER_BALANCER
										 : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = balancer;
	decision->before = NO_SERVER;
}

/* Of a connection that nothing here knows. */
static __always_inline void decide_unknown(__u32 number, __u32 source, struct decision *decision)
{
	if (has_other_balancer(number))
		decide_other_balancer(number, decision);
	else
		decide_to_all(BROADCAST_UNKNOWN_COOKIE, source, LB_COUNTER_DROP_UNKNOWN_COOKIE, decision);
}

/* ---- what finds the server ------------------------------------------------------------------------------------- */

/* The counter of a packet that the placement rule places. */
static __always_inline enum lb_counter placed_as(bool opens)
{
	return opens ? LB_COUNTER_FIRST : LB_COUNTER_PLACED;
}

/* By the placement rule, counted as `outcome`. */
static __always_inline void decide_by_rule(struct service_state *state, const struct packet *packet,
					   enum lb_counter outcome, struct decision *decision)
{
	__u32 id = place(state, decision->service, packet);

	if (id == NO_SERVER) {
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
		return;
	}
	decide_server(id, outcome, decision);
	decision->opens = outcome == placed_as(true);
}

/* Whether the service's server is down: by our own checks, or it is not draining, and the placement table has been made without it. */
static __always_inline bool is_down(server_word server)
{
	if (server_has(server, SERVER_KNOWN | SERVER_DOWN))
		return true;
	return server_has(server, SERVER_KNOWN | SERVER_ELIGIBLE) && !server_has(server, SERVER_IN_TABLE);
}

/* By the flow table's entry, of a server that the service knows. */
static __always_inline void decide_by_flow(struct flow_table_entry entry, struct decision *decision)
{
	decide_server(entry.server_id, LB_COUNTER_FLOW, decision);
}

/*
 * By the bucket. The bucket's server before goes along: it may still have the connection. A SYN goes only to a server that takes
 * new connections; then the choice's server is NO_SERVER if the bucket's does not.
 */
static __always_inline struct flow_table_entry decide_by_bucket(struct service_state *state,
								const struct packet *packet, struct decision *decision)
{
	__u32 wanted = packet->flags & TCP_SYN ? TAKES_NEW_CONNECTIONS : SERVER_KNOWN;
	struct flow_table_entry choice = place_consistently(state, packet);

	if (choice.server_id == NO_SERVER || !server_has(server_at(decision->service, choice.server_id), wanted)) {
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
	} else {
		decide_server(choice.server_id, LB_COUNTER_CONSISTENT, decision);
		decision->before = choice.before;
	}
	return choice;
}

/* ---- by the index in the cookie -------------------------------------------------------------------------------- */

/* Whether another load balancer with a connection table sent the frame. */
static __always_inline bool came_from_owner(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 source;

	if (data + ETH_HLEN > data_end)
		return false;
	source = PACKET_U64(data, ETH_ALEN) & SERVER_MAC_MASK;
	for (__u32 i = 0; i < MAX_OWNERS; i++) {
		server_word owner = *(const server_word *)&lb_state.owners[i];

		if (server_has(owner, SERVER_RESOLVED) && (owner & SERVER_MAC_MASK) == source)
			return true;
	}
	return false;
}

/*
 * The index is of another load balancer's table: the packet goes there, once. One that came from a load balancer is not
 * passed on, so that no disagreement about who is who makes it circle. An owner that is gone, or cannot be reached: to all.
 */
static __always_inline void decide_owner(struct xdp_md *ctx, __u32 number, __u32 source, __u32 owner,
					 struct decision *decision)
{
	server_word balancer = *(const server_word *)&lb_state.owners[owner & (MAX_OWNERS - 1)];

	if (!server_has(balancer, SERVER_KNOWN)) {
		decide_unknown(number, source, decision);
	} else if (server_has(balancer, SERVER_RESOLVED) && !came_from_owner(ctx)) {
		decision->outcome = LB_COUNTER_TO_OWNER;
		decision->destination = balancer;
	} else {
		decide_to_all(BROADCAST_OWNER_LOST, source, LB_COUNTER_DROP_TO_ALL_RATE_LIMITED, decision);
	}
}

/* Whether what a cookie of the service holds is an index. */
static __always_inline bool is_index(__u32 number, __u32 cookie)
{
	return mode_is(number, CONSISTENCY_STATEFUL) && cookie & COOKIE_KIND_BIT;
}

/*
 * Where the index in `cookie` says, counted as `outcome`. Returns false when the entry is free or another connection's, or
 * its server was taken out. `found`: the entry, if it is of this load balancer's table.
 */
static __always_inline bool decide_index(struct xdp_md *ctx, __u32 number, __u32 cookie, const struct packet *packet,
					 enum lb_counter outcome, struct decision *decision, struct connection **found)
{
	__u64 hash = connection_hash(decision->service, packet->client_address, packet->ports);
	struct connection *connection;
	__u32 id;

	*found = NULL;
	if (cookie_owner(cookie) != lb_state.owner) {
		decide_owner(ctx, number, packet->client_address, cookie_owner(cookie), decision);
		return true;
	}
	connection = find_connection(hash, cookie, decision->service, &id);
	if (!connection)
		count_event(ctx, decision->service, LB_EVENT_CONNECTION_UNKNOWN);
	if (!connection || !server_is_known(decision->service, id))
		return false;
	decide_server(id, outcome, decision);
	*found = connection;
	return true;
}

static __always_inline void decide_by_cookie(struct xdp_md *ctx, __u32 number, const struct packet *packet,
					     struct decision *decision)
{
	__u32 cookie = cookie_of(packet->echo, packet->client_address, packet->vip_address, packet->ports);
	struct connection *connection;

	if (is_index(number, cookie)) {
		if (!decide_index(ctx, number, cookie, packet, LB_COUNTER_CONNECTION, decision, &connection))
			decide_unknown(number, packet->client_address, decision);
		if (connection)
			decision->closes = update_connection(connection, packet->flags, frame_bytes(ctx));
	} else if (cookie & COOKIE_KIND_BIT || !server_is_known(decision->service, cookie)) {
		decide_unknown(number, packet->client_address, decision);
	} else {
		decide_server(cookie, LB_COUNTER_ESTABLISHED, decision);
		decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	}
}

struct connection_takes connection_takes SEC(".bss.takes");

/* How many entries of the connection table the source's prefix (24 bits) holds. */
static __always_inline __u64 *held_by_source(__u32 client_address)
{
	__u64 hash = connection_hash(0, client_address & bpf_htonl(0xffffff00), 0);

	return &connection_takes.held_by_source[hash & (SOURCE_SHARDS - 1)];
}

/* Whether it may hold another one. CPUs that ask at once may exceed the limit by their number. */
static __always_inline bool may_take_connection(const __u64 *held)
{
	__u64 limit = *(volatile __u64 *)&lb_state.entries_per_source;

	return !limit || *(const volatile __u64 *)held < limit;
}

/* Why a new connection has no entry. `taken`: what CONNECTION_TABLE_FULL and so on stand for. */
static __always_inline enum lb_event without_entry(int taken)
{
	if (taken == CONNECTION_SOURCE_LIMITED)
		return LB_EVENT_CONNECTION_SOURCE_LIMITED;
	return taken == CONNECTION_TABLE_FULL ? LB_EVENT_CONNECTION_TABLE_FULL : LB_EVENT_CONNECTION_CONTENDED;
}

static __always_inline void count_taken(void)
{
	__u32 row = cpu_row();

	barrier_var(row);
	connection_takes.by_row[row & (MAX_LB_COUNTER_ROWS - 1)].count++;
}

/*
 * The first packet of a stateful service: placed, and given an entry whose place its TSecr tells the server. Sent again, it
 * finds the entry again, if that server still takes first packets. Without an entry it carries none, whatever the client
 * wrote there, and the server stamps its id.
 */
static __always_inline void decide_first_stateful(struct xdp_md *ctx, struct service_state *state,
						  const struct packet *packet, struct decision *decision)
{
	__u64 hash = connection_hash(decision->service, packet->client_address, packet->ports);
	__u32 owner = lb_state.owner, place, id;
	struct connection *connection;
	__u64 *held;
	int taken;

	connection = find_recent_connection(hash, decision->service, &place, &id);
	if (connection && owner < MAX_OWNERS && server_has(server_at(decision->service, id), TAKES_NEW_CONNECTIONS)) {
		decide_server(id, LB_COUNTER_FIRST, decision);
		decision->opens = reopen_connection(connection);
		decision->echo = syn_echo(owner, place);
		return;
	}
	decide_by_rule(state, packet, LB_COUNTER_FIRST, decision);
	decision->echo = packet->echo ? 0 : KEEP_ECHO;
	if (decision->outcome != LB_COUNTER_FIRST || owner >= MAX_OWNERS)
		return;
	held = held_by_source(packet->client_address);
	taken = may_take_connection(held)
			? take_connection(packet, hash, decision->service, decision->server_id, frame_bytes(ctx))
			: CONNECTION_SOURCE_LIMITED;
	if (taken < 0) {
		count_event(ctx, decision->service, without_entry(taken));
		return;
	}
	__sync_fetch_and_add(held, 1);
	count_taken();
	remember_connection(hash, taken);
	decision->echo = syn_echo(owner, taken);
}

/* ---- the modes ------------------------------------------------------------------------------------------------- */

/*
 * A SYN without a cookie that no entry of the flow table sends to a server that takes new connections. `found`: there is an
 * entry, of `stale`. It goes by the bucket, and is not remembered: the bucket finds its server for the next packet, too. Where the
 * bucket's server takes no new connections the placement rule names another one, which only the flow table finds again. Whoever may
 * have an older connection of these ports becomes the server before.
 */
static __always_inline void decide_first_without_cookie(struct xdp_md *ctx, struct service_state *state,
							const struct packet *packet, bool found, __u32 stale,
							struct decision *decision)
{
	struct flow_table_entry entry = decide_by_bucket(state, packet, decision);
	__u32 hint = FLOW_HINT;

	if (decision->outcome == LB_COUNTER_DROP_NO_ELIGIBLE_SERVER) {
		decide_by_rule(state, packet, LB_COUNTER_FIRST, decision);
		if (decision->outcome != LB_COUNTER_FIRST)
			return;
		entry.before = entry.server_id;
		hint = 0;
	} else if (!found) {
		return;
	}
	if (found && server_is_known(decision->service, stale))
		entry.before = stale;
	entry.server_id = decision->server_id;
	decision->before = entry.before;
	if (!*(volatile __u64 *)&state->has_flows)
		*(volatile __u64 *)&state->has_flows = 1;
	insert_flow(ctx, decision->service, packet, entry, hint);
}

/*
 * A packet without a cookie: the client does not do timestamps, the service has them switched off, or it is
 * CONSISTENCY_BEAMER. Then only a SYN enters a flow (has_flows), and all else goes by the bucket, a reset, too.
 */
static __always_inline void decide_without_cookie(struct xdp_md *ctx, __u32 number, struct service_state *state,
						  const struct packet *packet, struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	bool by_bucket = mode_is(number, CONSISTENCY_BEAMER);
	struct flow_table_entry entry = {.server_id = NO_SERVER};
	bool found =
		(!by_bucket || *(volatile __u64 *)&state->has_flows) && find_flow(decision->service, packet, &entry);

	if (found &&
	    server_has(server_at(decision->service, entry.server_id), syn ? TAKES_NEW_CONNECTIONS : SERVER_KNOWN)) {
		decide_by_flow(entry, decision);
		decision->before = entry.before;
		return;
	}
	if (syn) {
		decide_first_without_cookie(ctx, state, packet, found, entry.server_id, decision);
		return;
	}
	if (by_bucket) {
		decide_by_bucket(state, packet, decision);
		return;
	}
	/* A host that has no such connection resets without timestamps whatever the connection had. */
	if (packet->flags & TCP_RST) {
		decide_to_all(BROADCAST_RESET, packet->client_address, LB_COUNTER_DROP_TO_ALL_RATE_LIMITED, decision);
		decision->before = NO_SERVER;
		return;
	}
	/* Ours are in the flow table since their second packet; the other one must see all of its own. */
	if (is_handed_over(number)) {
		decide_other_balancer(number, decision);
		return;
	}
	entry = decide_by_bucket(state, packet, decision);
	/* Nothing proves that it is of a connection: the server's answers do not pass here. So the entry is a hint. */
	if (decision->outcome == LB_COUNTER_CONSISTENT)
		insert_flow(ctx, decision->service, packet, entry, FLOW_HINT);
}

/*
 * CONSISTENCY_HASH_TABLE: what begins a flow is placed and remembered. A datagram begins one if none is known, and if the
 * flow's server is down; a SYN, if no entry has a server that takes new connections: anybody can forge a SYN, which
 * must not move an open connection. Another TCP packet begins none, or forged ones would fill the table.
 */
static __always_inline void decide_by_hash_table(struct xdp_md *ctx, __u32 number, struct service_state *state,
						 const struct packet *packet, struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	bool udp = udp_in_use && packet->protocol == IPPROTO_UDP;
	bool first = syn || udp, known = false;
	struct flow_table_entry entry = {};

	/* A new flow reads both cache lines of the set: the second one is loaded while the look-up waits for the first one. */
	if (syn)
		touch_flow_set(decision->service, packet);
	if (find_flow(decision->service, packet, &entry)) {
		server_word server = server_at(decision->service, entry.server_id);

		known = server_has(server, syn ? TAKES_NEW_CONNECTIONS : SERVER_KNOWN);
		if (known && !(udp && is_down(server))) {
			if (syn)
				decide_server(entry.server_id, LB_COUNTER_FIRST, decision);
			else
				decide_by_flow(entry, decision);
			return;
		}
	}
	if (!first && has_other_balancer(number)) {
		decide_other_balancer(number, decision);
		return;
	}
	decide_by_rule(state, packet, placed_as(first), decision);
	if (decision->outcome == LB_COUNTER_FIRST) {
		entry = (struct flow_table_entry){.server_id = decision->server_id, .before = NO_SERVER};
		insert_flow(ctx, decision->service, packet, entry, 0);
	} else if (known) {
		/* No server takes new flows: this one may be up after all. */
		decide_by_flow(entry, decision);
	}
}

/*
 * A first packet that is sent again, where the load balancer stamps itself: if its SYN-ACK was plain, the flow table has
 * the server. From another one the client would get two different SYN-ACKs, and the flow table could be right for one only.
 */
static __always_inline bool decide_half_open(const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry entry = {};

	if (!find_flow(decision->service, packet, &entry) || entry.before != HALF_OPEN_FLOW ||
	    !server_has(server_at(decision->service, entry.server_id), TAKES_NEW_CONNECTIONS))
		return false;
	decide_server(entry.server_id, LB_COUNTER_FIRST, decision);
	return true;
}

/*
 * A packet that opens no connection, where the load balancer stamps itself: of a plain connection, by the flow table; or
 * with a cookie, and then TSecr becomes what the server sent. (correction.h)
 */
static __always_inline void decide_corrected(struct service_state *state, const struct packet *packet,
					     struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	struct flow_table_entry entry = {};
	__u32 id;

	if (find_flow(decision->service, packet, &entry) &&
	    server_has(server_at(decision->service, entry.server_id), syn ? TAKES_NEW_CONNECTIONS : SERVER_KNOWN)) {
		decide_by_flow(entry, decision);
		if (entry.before == HALF_OPEN_FLOW && !syn)
			open_flow(decision->service, packet, entry);
		return;
	}
	if (!packet->has_timestamp && !(packet->flags & TCP_RST)) {
		decide_by_bucket(state, packet, decision);
		/* The SYN-ACK enters it. */
		if (syn && decision->outcome == LB_COUNTER_DROP_NO_ELIGIBLE_SERVER)
			decide_by_rule(state, packet, LB_COUNTER_FIRST, decision);
		decision->before = KEEP_IDENTIFICATION;
		return;
	}
	id = corrected_id(packet);
	if (!packet->has_timestamp || !server_is_known(decision->service, id)) {
		decision->outcome = LB_COUNTER_DROP_UNKNOWN_COOKIE;
		return;
	}
	decide_server(id, LB_COUNTER_ESTABLISHED, decision);
	decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	decision->echo = corrected_echo(decision->service, decision->destination, packet);
}

/*
 * `number`: the service's; `decision->service` its index. A global function, so that it is verified once and not once per
 * path that leads here: with all modes in use kernel 6.1's verifier would run out of instructions.
 */
__noinline int decide(struct xdp_md *ctx, __u32 number, const struct packet *packet, struct decision *decision)
{
	struct service_state *state;

	if (!packet || !decision)
		return 0;
	state = &lb_state.services[service_index(number)];
	decision->service = service_index(number);
	if (is_handed_over(number) && packet->flags & TCP_SYN)
		decide_other_balancer(number, decision);
	else if (mode_is(number, CONSISTENCY_NONE))
		decide_by_rule(state, packet, placed_as(packet->flags & TCP_SYN), decision);
	else if (mode_is(number, CONSISTENCY_HASH_TABLE))
		decide_by_hash_table(ctx, number, state, packet, decision);
	else if (is_corrected(number) && !(packet->has_timestamp && packet->flags & TCP_SYN))
		decide_corrected(state, packet, decision);
	else if (!packet->has_timestamp || (!has_cookies(number) && !is_corrected(number)))
		decide_without_cookie(ctx, number, state, packet, decision);
	else if (!(packet->flags & TCP_SYN))
		decide_by_cookie(ctx, number, packet, decision);
	else if (mode_is(number, CONSISTENCY_STATEFUL))
		decide_first_stateful(ctx, state, packet, decision);
	else if (!is_corrected(number) || !decide_half_open(packet, decision))
		decide_by_rule(state, packet, LB_COUNTER_FIRST, decision);
	/* What says whose a packet is may err: the echo of a foreign connection looks like some server's now and then. */
	if (has_other_balancer(number) && decision->server_id != NO_SERVER && !(packet->flags & TCP_SYN))
		decision->before = other_balancer(number);
	return 0;
}

#endif
