/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Decision about a packet of a service, by its mode (enum consistency) and contents. docs/design.md, "Consistency", has
 * these decisions as a table, and docs/deployment.md those during a migration.
 */
#ifndef COREWARD_LB_DECIDE_H
#define COREWARD_LB_DECIDE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "cookie.h"
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

static __always_inline bool may_have_cookie(const struct service *service, const struct packet *packet)
{
	return modes_in_use & MODES_WITH_COOKIES && packet->has_timestamp && has_cookies(service);
}

static __always_inline void decide_by_cookie(struct xdp_md *ctx, const struct service *service,
					     struct service_state *state, const struct packet *packet,
					     struct decision *decision)
{
	__u32 cookie;

	if (packet->flags & TCP_SYN) {
		if (is_stateful(service))
			decide_stateful_syn(ctx, state, packet, decision);
		else
			decide_by_rule(ctx, state, packet, placement_counter(true), decision);
		return;
	}
	cookie = packet_cookie(packet);
	if (has_table_index(service, cookie))
		decide_connection(ctx, service, cookie, packet, decision);
	else
		decide_by_id(service, cookie, packet, decision);
}

static __always_inline void decide_by_mode(struct xdp_md *ctx, const struct service *service,
					   struct service_state *state, const struct packet *packet,
					   struct decision *decision)
{
	switch (service->consistency) {
	case CONSISTENCY_NONE:
		decide_by_rule(ctx, state, packet, placement_counter(packet->flags & TCP_SYN), decision);
		break;
	case CONSISTENCY_HASH_TABLE:
		decide_by_hash_table(ctx, service, state, packet, decision);
		break;
	case CONSISTENCY_STATEFUL:
	case CONSISTENCY_STATELESS:
		if (is_lb_stamped(service)) {
			decide_lb_stamped(ctx, state, packet, decision);
			break;
		}
		if (may_have_cookie(service, packet)) {
			decide_by_cookie(ctx, service, state, packet, decision);
			break;
		}
		/* fallthrough */
	case CONSISTENCY_BEAMER:
		decide_without_cookie(ctx, service, state, packet, decision);
		break;
	default:
		break;
	}
}

/*
 * Decides about a packet of the service with that number, and sets `decision->service` to its index. This is a global
 * function, which is verified once and not per call. Otherwise kernel 6.1's verifier exceeds its instruction limit with
 * all modes.
 */
__noinline int decide(struct xdp_md *ctx, __u32 number, const struct packet *packet, struct decision *decision)
{
	struct service service = decode_service(number);

	if (!packet || !decision)
		return 0;
	decision->service = service.index;
	if (is_handed_over(&service) && packet->flags & TCP_SYN)
		decide_other_balancer(&service, decision);
	else
		decide_by_mode(ctx, &service, &lb_state.services[service.index], packet, decision);
	/* The packet may belong to the other load balancer's connection, whose TSecr can look like any cookie. */
	if (has_other_balancer(&service) && decision->server_id != NO_SERVER && !(packet->flags & TCP_SYN))
		decision->previous_server = other_balancer_id(&service);
	return 0;
}

/* Inlined decide() for a SYN with timestamps to a service with cookies that is not handed over. */
static __always_inline void decide_new_connection(struct xdp_md *ctx, __u32 number, const struct packet *packet,
						  struct decision *decision)
{
	struct service service = decode_service(number);
	struct service_state *state = &lb_state.services[service.index];
	int recent = NOT_RECENT;
	__u64 hash = 0;

	decision->service = service.index;
	if (is_stateful(&service)) {
		hash = connection_hash(service.index, packet->client_address, packet->ports);
		recent = find_recent_slot(hash);
		if (decide_repeated_syn(hash, recent, decision))
			return;
	}
	decide_placed(place_connection_inlined(ctx, state, service.index, packet), LB_COUNTER_NEW_CONNECTION, decision);
	if (is_stateful(&service))
		open_connection(ctx, packet, hash, recent, decision, true);
}

#endif
