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

/* Drops a packet longer than `mtu`. Returns an XDP action: the frame may be an error to the sender then. */
static __always_inline int drop_exceeding(struct xdp_md *ctx, __u32 service, __u32 mtu)
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
 * flow, in the host's order. A global function, so that it is verified once; values and no struct, as the stacks of its
 * callers are full. Returns an XDP action.
 */
__noinline int emit_encapsulated(struct xdp_md *ctx, __u32 service, __u32 server_id, __u32 outcome, __u32 flow_port)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 bytes = data_end - data;
	enum forwarding forwarding;
	struct server_tunnel tunnel;
	server_entry_t next_hop;
	struct outer outer = {};
	__u32 overhead, length;

	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return XDP_DROP;
	forwarding = forwarding_of(service);
	overhead = overhead_of(forwarding);
	length = bpf_ntohs(PACKET_U16(data, IP_AT(tot_len))) + overhead;
	if (length > lb_state.mtu)
		return drop_exceeding(ctx, service, lb_state.mtu - overhead);
	next_hop = server_at(service, server_id);
	tunnel = tunnels[server_id & (SERVER_ID_COUNT - 1)];
	if (!tunnel.address)
		return drop(ctx, service, LB_COUNTER_DROP_SERVER_UNRESOLVED);
	outer.destination = tunnel.address;
	outer.length = length;
	outer.type_of_service = PACKET_U8(data, IP_AT(tos));
	if (bpf_xdp_adjust_head(ctx, -(int)overhead))
		return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + ETH_HLEN + GUE_OVERHEAD > data_end)
		return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
	if (forwarding == FORWARDING_IPIP)
		write_ipip(data, next_hop, &outer);
	else
		write_gue(data, next_hop, &outer, tunnel.source_port ? tunnel.source_port : bpf_htons(flow_port));
	count_traffic(ctx, server_id, bytes);
	count_packet(ctx, service, outcome, bytes);
	return XDP_TX;
}

/*
 * To the server `id`, whose word is `server`, from a client's address and ports (struct packet). Returns an XDP action.
 * Work for an outer header is behind the branch that the verifier removes where no service encapsulates.
 */
static __always_inline int emit(struct xdp_md *ctx, server_entry_t server, __u32 service, __u32 id,
				enum lb_counter outcome, __u32 client_address, __u32 ports)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (forwarding_of(service) != FORWARDING_L2)
		return emit_encapsulated(ctx, service, id, outcome, flow_port(client_address, ports));
	if (data + ETH_HLEN > data_end)
		return XDP_DROP;
	rewrite_mac(data, server);
	count_traffic(ctx, id, data_end - data);
	count_packet(ctx, service, outcome, data_end - data);
	return XDP_TX;
}

#endif
