/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Services in migration, which another load balancer serves as well (docs/deployment.md). */
#ifndef COREWARD_LB_MIGRATION_H
#define COREWARD_LB_MIGRATION_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "decision.h"
#include "placement.h"
#include "service_mode.h"

/* Decides to forward to the migration's other load balancer. NO_SERVER prevents that this one returns the packet. */
static __always_inline void decide_other_balancer(const struct service *service, struct decision *decision)
{
	server_entry_t balancer = load_server_entry(decision->service, other_balancer_id(service));

	/* Another service may have resolved the address, but only members of this service count. */
	decision->outcome = has_server_flag(balancer, SERVER_KNOWN | SERVER_RESOLVED)
				    ? LB_COUNTER_TO_OTHER_BALANCER
				    : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = balancer;
	decision->previous_server = NO_SERVER;
}

/* Decides about a packet of an unknown connection. */
static __always_inline void decide_packet_of_unknown_connection(const struct service *service, __u32 source,
								struct decision *decision)
{
	if (has_other_balancer(service))
		decide_other_balancer(service, decision);
	else
		decide_broadcast(LIMITED_UNKNOWN_COOKIE, source, LB_COUNTER_DROP_UNKNOWN_COOKIE, decision);
}

#endif
