/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The decision about a packet of a service, and the ways to a server that all modes share.
 */
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

/* In the place of a decision's `before`: the packet's identification is left as it is. */
#define KEEP_IDENTIFICATION 0x10000u
/* In the place of a decision's `echo`: TSecr is left as it is. */
#define KEEP_ECHO 0xffffffffu

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
	/* New TSecr: in a first packet SYN_ECHO_HOLDS_COOKIE or 0, else the server's own time; or KEEP_ECHO. */
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
		      COOKIE_HIDDEN_BITS);
}

/* The number of the service that a packet is for (find_service()). */
static __always_inline __u32 find_service_of(const struct packet *packet)
{
	__u64 tail = service_tail_ipv4(packet->vip_address, packet->ports >> 16, packet->protocol);

	return find_lb_service(&lb_state.directories, tail);
}

/* To that server, counted as `outcome`. Dropped without its MAC address: no other server has the connection. */
static __always_inline void decide_server(__u32 id, enum lb_counter outcome, struct decision *decision)
{
	server_entry_t server = server_at(decision->service, id);

	decision->outcome = server_has(server, SERVER_RESOLVED) ? outcome : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = server;
	decision->server_id = id;
}

/* Whether a server that something else than the placement rule names takes new connections. */
static __always_inline bool takes_new_connections(server_entry_t server)
{
	return server_has(server, TAKES_FIRST_PACKETS) && !server_is_down(server);
}

/* Whether the packet may go to that server of its connection: a SYN only where new connections may go. */
static __always_inline bool may_go_to(server_entry_t server, bool syn)
{
	return syn ? takes_new_connections(server) : server_has(server, SERVER_KNOWN);
}

static __always_inline bool server_is_known(__u32 service, __u32 id)
{
	return server_has(server_at(service, id), SERVER_KNOWN);
}

/* To all servers of the service, if the rates allow it (broadcast.h). `over_rate`: the outcome if not. */
static __always_inline void decide_to_all(enum broadcast_reason reason, __u32 source, enum lb_counter over_rate,
					  struct decision *decision)
{
	/* A broadcast ends at the first router. */
	if (forwarding_of(decision->service) != FORWARDING_L2) {
		decision->outcome = LB_COUNTER_DROP_NOT_BROADCAST;
		return;
	}
	if (!may_broadcast(decision->service, source, reason)) {
		decision->outcome = over_rate;
		return;
	}
	decision->outcome = reason == BROADCAST_OWNER_LOST ? LB_COUNTER_BROADCAST_OWNER_LOST : LB_COUNTER_BROADCAST;
	decision->destination = BROADCAST_MAC;
}

/* The counter of a packet that the placement rule places. */
static __always_inline enum lb_counter placed_as(bool opens)
{
	return opens ? LB_COUNTER_NEW_CONNECTION : LB_COUNTER_PER_PACKET;
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

/* By the flow table's entry, of a server that the service knows. */
static __always_inline void decide_by_flow(struct flow_table_entry entry, struct decision *decision)
{
	decide_server(entry.server_id, LB_COUNTER_FLOW_TABLE, decision);
}

/*
 * By the bucket. The server before goes along: it may still have the connection. A SYN goes only to a server that
 * takes new connections; then the choice's server is NO_SERVER if the bucket's does not.
 */
static __always_inline struct flow_table_entry decide_by_bucket(struct service_state *state,
								const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry choice = place_consistently(state, packet);

	if (choice.server_id == NO_SERVER ||
	    !may_go_to(server_at(decision->service, choice.server_id), packet->flags & TCP_SYN)) {
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
	} else {
		decide_server(choice.server_id, LB_COUNTER_BUCKET_HASH, decision);
		decision->before = choice.before;
	}
	return choice;
}

#endif
