/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Decisions about clients' packets with `timestamps = "lb"`. lb_cookie.h has the mechanism, reply.h the replies. */
#ifndef COREWARD_LB_LB_STAMPING_H
#define COREWARD_LB_LB_STAMPING_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "lb_cookie.h"
#include "decision.h"
#include "flow_table.h"
#include "parse.h"
#include "placement.h"

/*
 * Decides about a SYN of a plain connection in the flow table. The SYN is retransmitted, of a new connection of the
 * same ports, or forged. It goes to the entry's server, because the flow table holds only one server per connection.
 */
static __always_inline bool decide_unstamped_syn(const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry entry = {};

	if (!find_unstamped_flow(decision->service, packet, &entry) ||
	    !takes_new_connections(load_server_entry(decision->service, entry.server_id)))
		return false;
	decide_server(entry.server_id, LB_COUNTER_NEW_CONNECTION, decision);
	return true;
}

/* Returns whether the packet's TSecr answers the SYN-ACK of a half-open entry. */
static __always_inline bool answers_syn_ack(const struct packet *packet, struct flow_table_entry half_open)
{
	__u32 difference = (packet->tsecr >> HALF_OPEN_TIME_SHIFT) - half_open.previous_server;

	return (difference + HALF_OPEN_TIME_TOLERANCE & HALF_OPEN_TIME_MASK) <= 2 * HALF_OPEN_TIME_TOLERANCE;
}

/*
 * Returns whether the client's packet, which is no SYN, is of a stamped connection despite its flow entry. Then its
 * SYNs reached two servers, the client has answered the stamped SYN-ACK, and the entry is changed.
 */
static __always_inline bool detect_stamped_flow(struct xdp_md *ctx, __u32 service, const struct packet *packet,
						struct flow_table_entry entry)
{
	__u32 id;

	if (!is_half_open(entry) || !packet->has_timestamp || answers_syn_ack(packet, entry))
		return false;
	id = lb_stamped_id(ctx, packet);
	if (!is_server_known(service, id))
		return false;
	store_flow(service, packet, flow_entry_word(id, STAMPED_FLOW), 0);
	return true;
}

/*
 * Decides about an established packet, or a SYN without timestamps, by the flow table or by the cookie. TSecr is
 * restored (lb_cookie.h).
 */
static __always_inline void decide_later_lb_stamped(struct xdp_md *ctx, struct service_state *state,
						    const struct packet *packet, struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	struct flow_table_entry entry = {};
	__u32 id;

	if (find_unstamped_flow(decision->service, packet, &entry) &&
	    may_receive(load_server_entry(decision->service, entry.server_id), syn) &&
	    (syn || !detect_stamped_flow(ctx, decision->service, packet, entry))) {
		decide_by_flow(entry, decision);
		if (is_half_open(entry) && !syn)
			mark_flow_open(decision->service, packet, entry);
		return;
	}
	if (!packet->has_timestamp && !(packet->flags & TCP_RST)) {
		decide_by_bucket(ctx, state, packet, decision);
		/* The SYN-ACK will store the connection. */
		if (syn && decision->outcome == LB_COUNTER_DROP_NO_ELIGIBLE_SERVER)
			decide_by_rule(ctx, state, packet, LB_COUNTER_NEW_CONNECTION, decision);
		decision->previous_server = KEEP_IDENTIFICATION;
		return;
	}
	id = lb_stamped_id(ctx, packet);
	if (!packet->has_timestamp || !is_server_known(decision->service, id)) {
		decision->outcome = LB_COUNTER_DROP_UNKNOWN_COOKIE;
		return;
	}
	decide_server(id, LB_COUNTER_ESTABLISHED, decision);
	decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	decision->tsecr = restore_lb_stamped_tsecr(ctx, decision->service, decision->destination, packet);
}

static __always_inline void decide_lb_stamped(struct xdp_md *ctx, struct service_state *state,
					      const struct packet *packet, struct decision *decision)
{
	if (!(packet->flags & TCP_SYN) || !packet->has_timestamp)
		decide_later_lb_stamped(ctx, state, packet, decision);
	else if (!decide_unstamped_syn(packet, decision))
		decide_by_rule(ctx, state, packet, LB_COUNTER_NEW_CONNECTION, decision);
}

#endif
