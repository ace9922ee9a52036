/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Packets whose timestamp carries a cookie.
 */
#ifndef COREWARD_LB_STATELESS_H
#define COREWARD_LB_STATELESS_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "connection_table.h"
#include "cookie.h"
#include "decision.h"
#include "migration.h"
#include "parse.h"
#include "stateful.h"

static __always_inline void decide_by_cookie(struct xdp_md *ctx, __u32 number, const struct packet *packet,
					     struct decision *decision)
{
	__u32 cookie = cookie_of(packet->echo, packet->client_address, packet->vip_address, packet->ports);
	struct connection *connection;

	if (is_index(number, cookie)) {
		if (!decide_index(ctx, number, cookie, packet, LB_COUNTER_CONNECTION, decision, &connection))
			decide_unknown(number, packet->client_address, decision);
		if (connection)
			decision->closes = update_connection(connection, packet->flags, frame_bytes(ctx));
	} else if (cookie & COOKIE_KIND_BIT || !server_is_known(decision->service, cookie)) {
		decide_unknown(number, packet->client_address, decision);
	} else {
		decide_server(cookie, LB_COUNTER_ESTABLISHED, decision);
		decision->closes = packet->flags & (TCP_FIN | TCP_RST);
	}
}

#endif
