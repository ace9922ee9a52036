/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The decision about a packet of a service, and functions that select a server in all modes. */
#ifndef COREWARD_LB_DECISION_H
#define COREWARD_LB_DECISION_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "cookie.h"
#include "flow_table.h"
#include "parse.h"
#include "placement.h"
#include "forwarding.h"
#include "service.h"
#include "state.h"
#include "vlan.h"

/* Value of `previous_server` that leaves the packet's identification unchanged. */
#define KEEP_IDENTIFICATION 0x10000u
/* Value of `tsecr` that leaves TSecr unchanged. */
#define KEEP_TSECR 0xffffffffu

struct decision {
	enum lb_counter outcome;
	/* Index of the service, or LB_COUNTERS_NO_SERVICE. */
	__u32 service;
	__u64 destination;
	/* Server at `destination`, or NO_SERVER if that is all servers or a load balancer. */
	__u32 server_id;
	/* Previous server for the packet's IP identification, or KEEP_IDENTIFICATION. */
	__u32 previous_server;
	/* New TSecr (in a SYN SYN_TSECR_HOLDS_COOKIE or 0, else the server's own time), or KEEP_TSECR. */
	__u32 tsecr;
	/*
	 * Counts by server, for policies. Packets that may be forged must not count, which are a SYN to a bucket's or
	 * entry's server, and a FIN or RST without a cookie. (A forged SYN makes an entry.)
	 */
	bool opens; /* the placement rule has placed a new connection */
	bool closes; /* the packet ends a connection that its cookie names */
};

/* Returns whether the outcome is forwarding. enum lb_counter lists first passed, then forwarded, then dropped. */
static __always_inline bool is_forwarded(enum lb_counter outcome)
{
	return outcome > LB_COUNTER_PASSED_NOT_SERVICE && outcome < LB_COUNTER_DROP_MALFORMED_IPV4;
}

static __always_inline __u32 decode_cookie(__u32 tsecr, __u32 client_address, __u32 vip_address, __u32 ports)
{
	const struct cookie_key *key = &lb_state.keys.key[cookie_key_index(tsecr)];

	return reveal(cookie_hash(key, client_address, vip_address, ports), tsecr & COOKIE_HIDDEN_MASK,
		      COOKIE_HIDDEN_BITS);
}

/* Returns the cookie in TSecr of a packet with timestamps. */
static __always_inline __u32 packet_cookie(const struct packet *packet)
{
	if (is_ipv6(packet))
		return packet->cookie;
	return decode_cookie(packet->tsecr, packet->client_address, packet->vip_address, packet->ports);
}

static __always_inline __u32 find_packet_service(const struct packet *packet)
{
	__u64 tail = service_tail_ipv4(packet->vip_address, packet->ports >> 16, packet->protocol);

	return find_lb_service(&lb_state.directories, tail);
}

/*
 * Decides to forward to server `id`, counted as `outcome`. Without the server's MAC address the packet is dropped,
 * because no other server has the connection.
 */
static __always_inline void decide_server(__u32 id, enum lb_counter outcome, struct decision *decision)
{
	server_entry_t server = load_server_entry(decision->service, id);

	decision->outcome = has_server_flag(server, SERVER_RESOLVED) ? outcome : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = server;
	decision->server_id = id;
}

static __always_inline bool takes_new_connections(server_entry_t server)
{
	return has_server_flag(server, TAKES_NEW_CONNECTIONS) && !is_server_down(server);
}

/* Returns whether the packet may go to its connection's server, which must take new connections if it is a SYN. */
static __always_inline bool may_receive(server_entry_t server, bool syn)
{
	return syn ? takes_new_connections(server) : has_server_flag(server, SERVER_KNOWN);
}

static __always_inline bool is_server_known(__u32 service, __u32 id)
{
	return has_server_flag(load_server_entry(service, id), SERVER_KNOWN);
}

/* Decides to broadcast within the rates (broadcast.h). `over_rate` is the outcome above the rates. */
static __always_inline void decide_broadcast(enum limited_kind reason, __u32 source, enum lb_counter over_rate,
					     struct decision *decision)
{
	/* A broadcast ends at the first router, and stays in its VLAN. */
	if (service_forwarding(decision->service) != FORWARDING_L2 || !has_broadcast_vlan(decision->service)) {
		decision->outcome = LB_COUNTER_DROP_NOT_BROADCAST;
		return;
	}
	if (!take_rate_tokens(decision->service, source, reason)) {
		decision->outcome = over_rate;
		return;
	}
	decision->outcome = reason == LIMITED_OWNER_LOST ? LB_COUNTER_BROADCAST_OWNER_LOST : LB_COUNTER_BROADCAST;
	decision->destination = BROADCAST_MAC;
}

static __always_inline enum lb_counter placement_counter(bool opens)
{
	return opens ? LB_COUNTER_NEW_CONNECTION : LB_COUNTER_PER_PACKET;
}

/* Decides to forward to the server that place_connection() returned. */
static __always_inline void decide_placed(__u32 id, enum lb_counter outcome, struct decision *decision)
{
	if (id == NO_SERVER) {
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
		return;
	}
	decide_server(id, outcome, decision);
	decision->opens = outcome == placement_counter(true);
}

static __always_inline void decide_by_rule(struct xdp_md *ctx, struct service_state *state, const struct packet *packet,
					   enum lb_counter outcome, struct decision *decision)
{
	decide_placed(place_connection(ctx, state, decision->service, packet), outcome, decision);
}

static __always_inline void decide_by_flow(struct flow_table_entry entry, struct decision *decision)
{
	decide_server(entry.server_id, LB_COUNTER_FLOW_TABLE, decision);
}

/*
 * Decides to forward to the bucket's server, and returns it with the previous server. A SYN goes only to a server that
 * takes new connections. Otherwise the outcome is LB_COUNTER_DROP_NO_ELIGIBLE_SERVER.
 */
static __always_inline struct flow_table_entry decide_by_bucket(struct xdp_md *ctx, struct service_state *state,
								const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry choice = place_consistently(ctx, state, packet);

	if (choice.server_id == NO_SERVER ||
	    !may_receive(load_server_entry(decision->service, choice.server_id), packet->flags & TCP_SYN)) {
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
	} else {
		decide_server(choice.server_id, LB_COUNTER_BUCKET_HASH, decision);
		decision->previous_server = choice.previous_server;
	}
	return choice;
}

#endif
