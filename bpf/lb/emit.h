/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Last step for a packet to a server, which writes the frame by the service's method of forwarding, and counts the
 * packet. No other step after the decision depends on that method.
 */
#ifndef COREWARD_LB_EMIT_H
#define COREWARD_LB_EMIT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "emit_gue.h"
#include "encapsulate.h"
#include "forwarding.h"
#include "outer_header.h"
#include "placement.h"
#include "rewrite.h"
#include "stats.h"
#include "vlan.h"

/* emit() on the same segment, where only MAC addresses change. */
static __always_inline int emit_l2(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
				   enum lb_counter outcome)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (data + ETH_HLEN > data_end)
		return XDP_DROP;
	rewrite_mac(data, server);
	count_traffic(ctx, id, data_end - data);
	count_packet(ctx, service, outcome, data_end - data);
	return transmit_to_server(id);
}

/*
 * Sends the packet to the server `id`, whose entry is `server`. `ports` is as in struct packet. Returns an XDP action.
 * If no service encapsulates, the verifier removes the branch for outer headers.
 */
static __always_inline int emit(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
				enum lb_counter outcome, __u32 ports)
{
	if (service_forwarding(service) != FORWARDING_L2)
		return emit_encapsulated(ctx, service, id, outcome, ports);
	return emit_l2(ctx, server, service, id, outcome);
}

/* emit() for IPv4's fast path. 4in4 is inlined, because a call's return costs 8 ns if it is protected (retbleed). */
static __always_inline int emit_fast_path(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
					  enum lb_counter outcome, __u32 client_address, __u32 ports)
{
	if (service_forwarding(service) == FORWARDING_L2)
		return emit_l2(ctx, server, service, id, outcome);
	if (has_ipv6_tunnel(id))
		return emit_encapsulated(ctx, service, id, outcome, ports);
	return encapsulate(ctx, false, false, service, id, outcome, gue_source_port(client_address, ports));
}

#endif
