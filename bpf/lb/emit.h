/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The last step of a packet to a server: its frame is written by the service's kind of forwarding, and it is counted.
 * Below the decision, which is a server's id, nothing else depends on the kind.
 */
#ifndef COREWARD_LB_EMIT_H
#define COREWARD_LB_EMIT_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "emit_gue.h"
#include "emit_ipip.h"
#include "forwarding.h"
#include "fragmentation_needed.h"
#include "parse.h"
#include "placement.h"
#include "rewrite.h"
#include "state.h"
#include "stats.h"

static __always_inline int drop(struct xdp_md *ctx, __u32 service, enum lb_counter reason)
{
	count_packet(ctx, service, reason, 0);
	return XDP_DROP;
}

/*
 * Drops a packet longer than `mtu`. Returns an XDP action: the frame may be an error to the sender then. A global
 * function, so that its stack does not count in every call of lb().
 */
__noinline int drop_exceeding(struct xdp_md *ctx, __u32 service, __u32 mtu)
{
	if (!answer_fragmentation_needed(ctx, service, mtu))
		return drop(ctx, service, LB_COUNTER_DROP_EXCEEDS_MTU);
	count_packet(ctx, service, LB_COUNTER_DROP_FRAGMENTATION_NEEDED, 0);
	return XDP_TX;
}

static __always_inline __u32 overhead_of(enum forwarding forwarding)
{
	return forwarding == FORWARDING_IPIP ? IPIP_OVERHEAD : GUE_OVERHEAD;
}

/*
 * The packet, an IPv4 packet behind an Ethernet header, with an outer header. `flow_port`: source port of GUE by the
 * flow, in the host's order. Returns an XDP action.
 */
static __always_inline int encapsulate(struct xdp_md *ctx, __u32 service, __u32 server_id, __u32 outcome,
				       __u32 flow_port)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 overhead = overhead_of(forwarding_of(service));
	struct server_tunnel tunnel;

	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return XDP_DROP;
	if (bpf_ntohs(PACKET_U16(data, IP_AT(tot_len))) + overhead > lb_state.mtu)
		return drop_exceeding(ctx, service, lb_state.mtu - overhead);
	if (!tunnels[server_id & (SERVER_ID_COUNT - 1)].address)
		return drop(ctx, service, LB_COUNTER_DROP_SERVER_UNRESOLVED);
	if (bpf_xdp_adjust_head(ctx, -(int)overhead))
		return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
	/* Below everything is read again: what is kept across the call would need the stack. */
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	tunnel = tunnels[server_id & (SERVER_ID_COUNT - 1)];
	if (forwarding_of(service) == FORWARDING_IPIP) {
		if (data + ETH_HLEN + IPIP_OVERHEAD + sizeof(struct iphdr) > data_end)
			return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
		write_ipip(data, server_at(service, server_id), tunnel.address);
		data += IPIP_OVERHEAD;
	} else {
		if (data + ETH_HLEN + GUE_OVERHEAD + sizeof(struct iphdr) > data_end)
			return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
		write_gue(data, server_at(service, server_id), tunnel.address,
			  tunnel.source_port ? tunnel.source_port : bpf_htons(flow_port));
		data += GUE_OVERHEAD;
	}
	count_traffic(ctx, server_id, data_end - data);
	count_packet(ctx, service, outcome, data_end - data);
	return XDP_TX;
}

/*
 * encapsulate() for callers whose stacks are full. A global function, so that it is verified once; values and no struct
 * for the same reason.
 */
__noinline int emit_encapsulated(struct xdp_md *ctx, __u32 service, __u32 server_id, __u32 outcome, __u32 flow_port)
{
	return encapsulate(ctx, service, server_id, outcome, flow_port);
}

/* emit() on the same segment: only MAC addresses change. */
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
	return XDP_TX;
}

/*
 * To the server `id`, whose word is `server`, from a client's address and ports (struct packet). Returns an XDP action.
 * Work for an outer header is behind the branch that the verifier removes where no service encapsulates.
 */
static __always_inline int emit(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
				enum lb_counter outcome, __u32 client_address, __u32 ports)
{
	if (forwarding_of(service) != FORWARDING_L2)
		return emit_encapsulated(ctx, service, id, outcome, flow_port(client_address, ports));
	return emit_l2(ctx, server, service, id, outcome);
}

/* emit() of the fast path: without a call, whose return costs 8 ns where returns are protected (retbleed). */
static __always_inline int emit_fast_path(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
					  enum lb_counter outcome, __u32 client_address, __u32 ports)
{
	if (forwarding_of(service) != FORWARDING_L2)
		return encapsulate(ctx, service, id, outcome, flow_port(client_address, ports));
	return emit_l2(ctx, server, service, id, outcome);
}

#endif
