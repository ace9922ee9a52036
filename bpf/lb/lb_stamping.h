/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* `timestamps = "lb"`: packets of clients. lb_cookie.h has the mechanism, reply.h the replies. */
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
 * Decides a SYN of a plain connection in the flow table: retransmitted, of a new connection of the same ports, or
 * forged. The SYN goes to the entry's server, because the flow table holds only one server per connection.
 */
static __always_inline bool decide_plain_syn(const struct packet *packet, struct decision *decision)
{
	struct flow_table_entry entry = {};

	if (!find_plain_flow(decision->service, packet, &entry) ||
	    !takes_new_connections(server_at(decision->service, entry.server_id)))
		return false;
	decide_server(entry.server_id, LB_COUNTER_NEW_CONNECTION, decision);
	return true;
}

/*
 * Decides an established packet, or a SYN of a plain connection: by the flow table, or by the cookie, with TSecr
 * restored (lb_cookie.h).
 */
static __always_inline void decide_later_lb_stamped(struct xdp_md *ctx, struct service_state *state,
						    const struct packet *packet, struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	struct flow_table_entry entry = {};
	__u32 id;

	if (find_plain_flow(decision->service, packet, &entry) &&
	    may_receive(server_at(decision->service, entry.server_id), syn)) {
		decide_by_flow(entry, decision);
		if (entry.previous_server == HALF_OPEN_FLOW && !syn)
			open_flow(decision->service, packet, entry);
		return;
	}
	if (!packet->has_timestamp && !(packet->flags & TCP_RST)) {
		decide_by_bucket(ctx, state, packet, decision);
		/* The SYN-ACK stores the connection. */
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
	decision->tsecr = lb_stamped_tsecr(ctx, decision->service, decision->destination, packet);
}

static __always_inline void decide_lb_stamped(struct xdp_md *ctx, struct service_state *state,
					      const struct packet *packet, struct decision *decision)
{
	if (!(packet->flags & TCP_SYN) || !packet->has_timestamp)
		decide_later_lb_stamped(ctx, state, packet, decision);
	else if (!decide_plain_syn(packet, decision))
		decide_by_rule(ctx, state, packet, LB_COUNTER_NEW_CONNECTION, decision);
}

#endif
