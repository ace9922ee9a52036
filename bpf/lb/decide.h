/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Where a packet of a service goes, by the service's mode (enum consistency) and what the packet carries. The rows of
 * "what finds the server" are those of docs/design.md, "Consistency"; where another load balancer has some of the service's
 * connections, those of docs/deployment.md.
 */
#ifndef COREWARD_LB_DECIDE_H
#define COREWARD_LB_DECIDE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decision.h"
#include "hash_table.h"
#include "lb_stamping.h"
#include "migration.h"
#include "parse.h"
#include "service_mode.h"
#include "state.h"
#include "stateful.h"
#include "stateless.h"
#include "without_cookie.h"

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
