/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Decisions about packets without a cookie, by flow table and bucket. With CONSISTENCY_BEAMER these are all packets. */
#ifndef COREWARD_LB_WITHOUT_COOKIE_H
#define COREWARD_LB_WITHOUT_COOKIE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "decision.h"
#include "flow_table.h"
#include "migration.h"
#include "parse.h"
#include "placement.h"
#include "service_mode.h"
#include "state.h"

/*
 * Places a SYN without a cookie for which the flow table has no server that takes new connections. `found` is true if
 * the flow table has an entry, whose server is `stale`. The SYN goes to the bucket's server without an entry, as later
 * packets follow the same bucket. If that server takes no new connections, the placement rule selects another server,
 * and the flow table stores it. A server with an older connection of these ports becomes the previous server.
 */
static __always_inline void decide_syn_without_cookie(struct xdp_md *ctx, struct service_state *state,
						      const struct packet *packet, bool found, __u32 stale,
						      struct decision *decision)
{
	struct flow_table_entry entry = decide_by_bucket(ctx, state, packet, decision);
	__u32 hint = FLOW_HINT;

	if (decision->outcome == LB_COUNTER_DROP_NO_ELIGIBLE_SERVER) {
		decide_by_rule(ctx, state, packet, LB_COUNTER_NEW_CONNECTION, decision);
		if (decision->outcome != LB_COUNTER_NEW_CONNECTION)
			return;
		entry.previous_server = entry.server_id;
		hint = 0;
	} else if (!found) {
		return;
	}
	if (found && is_server_known(decision->service, stale))
		entry.previous_server = stale;
	entry.server_id = decision->server_id;
	decision->previous_server = entry.previous_server;
	if (!*(volatile __u64 *)&state->has_flows)
		*(volatile __u64 *)&state->has_flows = 1;
	insert_flow(ctx, decision->service, packet, entry, hint);
}

/*
 * Decides about a packet without a cookie. The client has no timestamps, the service has them off, or it is
 * CONSISTENCY_BEAMER. With BEAMER only a SYN stores a flow (has_flows), and all else follows the bucket, even a reset.
 */
static __always_inline void decide_without_cookie(struct xdp_md *ctx, const struct service *service,
						  struct service_state *state, const struct packet *packet,
						  struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	bool by_bucket = mode_in_use(CONSISTENCY_BEAMER) && service->consistency == CONSISTENCY_BEAMER;
	struct flow_table_entry entry = {.server_id = NO_SERVER};
	bool found;

	if (!(modes_in_use & (MODES_WITH_COOKIES | 1u << CONSISTENCY_BEAMER)))
		return;
	found = (!by_bucket || *(volatile __u64 *)&state->has_flows) && find_flow(decision->service, packet, &entry);
	if (found && may_receive(load_server_entry(decision->service, entry.server_id), syn)) {
		decide_by_flow(entry, decision);
		decision->previous_server = entry.previous_server;
		return;
	}
	if (syn) {
		decide_syn_without_cookie(ctx, state, packet, found, entry.server_id, decision);
		return;
	}
	if (by_bucket) {
		decide_by_bucket(ctx, state, packet, decision);
		return;
	}
	/* A host without the connection sends a reset without timestamps, even if the connection had timestamps. */
	if (packet->flags & TCP_RST) {
		decide_broadcast(LIMITED_RESET, packet->client_address, LB_COUNTER_DROP_BROADCAST_RATE_LIMITED,
				 decision);
		decision->previous_server = NO_SERVER;
		return;
	}
	/*
	 * This load balancer's connections are in the flow table from their second packet on. All other packets must
	 * reach the other load balancer.
	 */
	if (is_handed_over(service)) {
		decide_other_balancer(service, decision);
		return;
	}
	entry = decide_by_bucket(ctx, state, packet, decision);
	/* The entry is a hint, because replies, which would prove the connection, do not pass here. */
	if (decision->outcome == LB_COUNTER_BUCKET_HASH)
		insert_flow(ctx, decision->service, packet, entry, FLOW_HINT);
}

#endif
