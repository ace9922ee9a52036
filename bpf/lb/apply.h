/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Application of a decision to the frame, which is counted and forwarded, passed or dropped. */
#ifndef COREWARD_LB_APPLY_H
#define COREWARD_LB_APPLY_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decision.h"
#include "emit.h"
#include "parse.h"
#include "rewrite.h"
#include "stats.h"
#include "vlan.h"

static __always_inline int forward_to_server(struct xdp_md *ctx, const struct packet *packet,
					     const struct decision *decision)
{
	if (decision->opens)
		count_opened(decision->service, decision->server_id);
	if (decision->closes)
		count_closed(decision->server_id);
	return emit(ctx, decision->destination, decision->service, decision->server_id, decision->outcome,
		    packet->ports);
}

/* Applies the decision. Returns an XDP action. */
static __always_inline int apply_decision(struct xdp_md *ctx, const struct packet *packet,
					  const struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (decision->outcome == LB_COUNTER_PASSED_NOT_SERVICE) {
		count_packet(ctx, decision->service, decision->outcome, 0);
		return XDP_PASS;
	}
	if (!is_forwarded(decision->outcome)) {
		count_packet(ctx, decision->service, decision->outcome, 0);
		return XDP_DROP;
	}
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end) {
		count_packet(ctx, decision->service, LB_COUNTER_DROP_INTERNAL, 0);
		return XDP_DROP;
	}
	if (decision->previous_server != KEEP_IDENTIFICATION && is_ipv6(packet))
		rewrite_flow_label(data, decision->previous_server);
	else if (decision->previous_server != KEEP_IDENTIFICATION)
		rewrite_identification(data, decision->previous_server);
	if (decision->tsecr != KEEP_TSECR)
		rewrite_timestamp(data, data_end, packet, packet->tsecr_offset, decision->tsecr);
	if (decision->server_id != NO_SERVER)
		return forward_to_server(ctx, packet, decision);
	rewrite_mac(data, decision->destination);
	count_packet(ctx, decision->service, decision->outcome, data_end - data);
	return decision->destination == BROADCAST_MAC ? transmit_broadcast(decision->service) : XDP_TX;
}

#define UNDECIDED                                                                                                      \
	((struct decision){                                                                                            \
		.outcome = LB_COUNTER_DROP_INTERNAL,                                                                   \
		.service = LB_COUNTERS_NO_SERVICE,                                                                     \
		.server_id = NO_SERVER,                                                                                \
		.previous_server = KEEP_IDENTIFICATION,                                                                \
		.tsecr = KEEP_TSECR,                                                                                   \
	})

#endif
