/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* CONSISTENCY_HASH_TABLE, in which the flow table has every connection. */
#ifndef COREWARD_LB_HASH_TABLE_H
#define COREWARD_LB_HASH_TABLE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decision.h"
#include "flow_table.h"
#include "migration.h"
#include "parse.h"
#include "placement.h"
#include "service_mode.h"

/*
 * Decides about a packet with CONSISTENCY_HASH_TABLE. New flows are placed and stored. A datagram begins a new flow if
 * it has no entry, or if the entry's server is down. A SYN does if it has no entry with a server that takes new
 * connections, so that a forged SYN moves no open connection. Other TCP packets begin no flow, because forged packets
 * would fill the table.
 */
static __always_inline void decide_by_hash_table(struct xdp_md *ctx, const struct service *service,
						 struct service_state *state, const struct packet *packet,
						 struct decision *decision)
{
	bool syn = packet->flags & TCP_SYN;
	bool udp = udp_in_use && packet->protocol == IPPROTO_UDP;
	bool first = syn || udp, known = false;
	__u64 hash = connection_hash(decision->service, packet->client_address, packet->ports);
	struct flow_table_entry entry = {};

	if (!mode_in_use(CONSISTENCY_HASH_TABLE))
		return;
	prefetch_flow_use(hash);
	if (find_flow_by_hash(hash, &entry)) {
		server_entry_t server = load_server_entry(decision->service, entry.server_id);

		known = may_receive(server, syn);
		if (known && !(udp && is_server_down(server))) {
			if (syn)
				decide_server(entry.server_id, LB_COUNTER_NEW_CONNECTION, decision);
			else
				decide_by_flow(entry, decision);
			return;
		}
	}
	if (!first && has_other_balancer(service)) {
		decide_other_balancer(service, decision);
		return;
	}
	decide_by_rule(ctx, state, packet, placement_counter(first), decision);
	if (decision->outcome == LB_COUNTER_NEW_CONNECTION) {
		entry = (struct flow_table_entry){.server_id = decision->server_id, .previous_server = NO_SERVER};
		insert_flow(ctx, decision->service, packet, entry, 0);
	} else if (known) {
		/* No server takes new flows, but the flow's server may be up. */
		decide_by_flow(entry, decision);
	}
}

#endif
