/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* CONSISTENCY_STATELESS, in which the cookie holds the server's id. */
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
#include "service_mode.h"

static __always_inline void decide_by_id(const struct service *service, __u32 cookie, const struct packet *packet,
					 struct decision *decision)
{
	if (cookie & COOKIE_KIND_BIT || !is_server_known(decision->service, cookie)) {
		decide_packet_of_unknown_connection(service, packet->client_address, decision);
		return;
	}
	decide_server(cookie, LB_COUNTER_ESTABLISHED, decision);
	decision->closes = packet->flags & (TCP_FIN | TCP_RST);
}

#endif
