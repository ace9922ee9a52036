/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * `timestamps = "lb"`: what clients send. lb_cookie.h has the mechanism, reply.h what servers answer.
 */
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
 * A first packet that is sent again, where the load balancer stamps itself: if its SYN-ACK was plain, the flow table has
 * the server. From another one the client would get two different SYN-ACKs, and the flow table could be right for one only.
 */
static __always_inline bool decide_half_open(const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry entry = {};

	if (!find_flow(decision->service, packet, &entry) || entry.before != HALF_OPEN_FLOW ||
	    !takes_new_connections(server_at(decision->service, entry.server_id)))
		return false;
	decide_server(entry.server_id, LB_COUNTER_NEW_CONNECTION, decision);
	return true;
}

/*
 * A packet that begins no connection that can be stamped: by the flow table, of a plain connection; or with a cookie, and
 * then TSecr becomes what the server sent (lb_cookie.h).
 */
static __always_inline void decide_later_lb_stamped(struct service_state *state, const struct packet *packet,
						    struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	struct flow_table_entry entry = {};
	__u32 id;

	if (find_flow(decision->service, packet, &entry) &&
	    may_go_to(server_at(decision->service, entry.server_id), syn)) {
		decide_by_flow(entry, decision);
		if (entry.before == HALF_OPEN_FLOW && !syn)
			open_flow(decision->service, packet, entry);
		return;
	}
	if (!packet->has_timestamp && !(packet->flags & TCP_RST)) {
		decide_by_bucket(state, packet, decision);
		/* The SYN-ACK enters it. */
		if (syn && decision->outcome == LB_COUNTER_DROP_NO_ELIGIBLE_SERVER)
			decide_by_rule(state, packet, LB_COUNTER_NEW_CONNECTION, decision);
		decision->before = KEEP_IDENTIFICATION;
		return;
	}
	id = lb_stamped_id(packet);
	if (!packet->has_timestamp || !server_is_known(decision->service, id)) {
		decision->outcome = LB_COUNTER_DROP_UNKNOWN_COOKIE;
		return;
	}
	decide_server(id, LB_COUNTER_ESTABLISHED, decision);
	decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	decision->echo = lb_stamped_echo(decision->service, decision->destination, packet);
}

static __always_inline void decide_lb_stamped(struct service_state *state, const struct packet *packet,
					      struct decision *decision)
{
	if (!(packet->flags & TCP_SYN) || !packet->has_timestamp)
		decide_later_lb_stamped(state, packet, decision);
	else if (!decide_half_open(packet, decision))
		decide_by_rule(state, packet, LB_COUNTER_NEW_CONNECTION, decision);
}

#endif
