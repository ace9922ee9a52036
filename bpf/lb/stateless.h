/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * CONSISTENCY_STATELESS: the cookie holds the id of the server.
 */
#ifndef COREWARD_LB_STATELESS_H
#define COREWARD_LB_STATELESS_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "cookie.h"
#include "decision.h"
#include "migration.h"
#include "parse.h"
#include "placement.h"
#include "service_mode.h"

/* A packet of a stateless service. Returns false if it can have no cookie. */
static __always_inline bool decide_stateless(const struct service *service, struct service_state *state,
					     const struct packet *packet, struct decision *decision)
{
	__u32 cookie;

	if (!(modes_in_use & MODES_WITH_COOKIES) || !packet->has_timestamp || !has_cookies(service))
		return false;
	if (packet->flags & TCP_SYN) {
		decide_by_rule(state, packet, placed_as(true), decision);
		return true;
	}
	cookie = cookie_of(packet->echo, packet->client_address, packet->vip_address, packet->ports);
	if (cookie & COOKIE_KIND_BIT || !server_is_known(decision->service, cookie)) {
		decide_unknown(service, packet->client_address, decision);
	} else {
		decide_server(cookie, LB_COUNTER_ESTABLISHED, decision);
		decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	}
	return true;
}

#endif
