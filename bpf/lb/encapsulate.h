/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Outer headers of IP-in-IP (4in4 by RFC 2003, 6in4 by RFC 4213, 4in6 and 6in6 by RFC 2473) and GUE. The families of
 * inner and outer packet are independent. NICs choose the receive queue of IP-in-IP by the outer addresses alone, which
 * are the same for all packets from here to one server.
 */
#ifndef COREWARD_LB_ENCAPSULATE_H
#define COREWARD_LB_ENCAPSULATE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "emit_gue.h"
#include "forwarding.h"
#include "fragmentation_needed.h"
#include "outer_header.h"
#include "packet_too_big.h"
#include "parse.h"
#include "state.h"
#include "stats.h"
#include "tunnel.h"
#include "vlan.h"

/* Form of an outer header. Each call passes constants, so that the compiler generates code without branches. */
struct encapsulation {
	enum forwarding forwarding;
	bool inner_ipv6;
	bool has_ipv6_outer_header;
};

static __always_inline __u32 encapsulation_overhead(const struct encapsulation *form)
{
	return outer_header_length(form->forwarding, form->has_ipv6_outer_header);
}

/* Returns the inner packet's length. The IP header in the frame `data` has moved back by `overhead` bytes. */
static __always_inline __u32 inner_length(const void *data, __u32 overhead, bool ipv6)
{
	if (ipv6)
		return bpf_ntohs(PACKET_U16(data, overhead + IPV6_FIELD_OFFSET(payload_length))) +
		       sizeof(struct ipv6_header);
	return bpf_ntohs(PACKET_U16(data, overhead + IP_FIELD_OFFSET(tot_len)));
}

static __always_inline __u8 inner_traffic_class(const void *data, __u32 overhead, bool ipv6)
{
	if (ipv6)
		return bpf_ntohs(PACKET_U16(data, overhead + ETH_HLEN)) >> 4;
	return PACKET_U8(data, overhead + IP_FIELD_OFFSET(tos));
}

static __always_inline __u8 outer_protocol(const struct encapsulation *form)
{
	if (form->forwarding == FORWARDING_GUE)
		return IPPROTO_UDP;
	return form->inner_ipv6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
}

/* Adds the outer header. `flow` is gue_source_port(). Returns false if the frame could not be extended. */
static __always_inline bool push_outer_header(struct xdp_md *ctx, const struct encapsulation *form,
					      server_entry_t next_hop, __u32 server_id, __u32 flow)
{
	__u32 overhead = encapsulation_overhead(form);
	struct server_tunnel tunnel;
	void *data, *data_end;
	struct outer_header_fields outer;

	if (bpf_xdp_adjust_head(ctx, -(int)overhead))
		return false;
	/* Pointers are read again, because values that live across the call would need the stack. */
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + ETH_HLEN + overhead + ip_header_length(form->inner_ipv6) > data_end)
		return false;
	tunnel = load_server_tunnel(server_id);
	outer = (struct outer_header_fields){
		.length = inner_length(data, overhead, form->inner_ipv6) + overhead,
		.traffic_class = inner_traffic_class(data, overhead, form->inner_ipv6),
		.protocol = outer_protocol(form),
	};
	if (form->has_ipv6_outer_header)
		write_headers_ipv6(data, next_hop, &outer, flow, lb_state.own_address_ipv6,
				   tunnels.address_ipv6[server_id & (SERVER_ID_COUNT - 1)]);
	else
		write_headers(data, next_hop, &outer, lb_state.own_address, tunnel.address);
	if (form->forwarding == FORWARDING_GUE)
		write_udp(data + ETH_HLEN + ip_header_length(form->has_ipv6_outer_header),
			  outer.length - ip_header_length(form->has_ipv6_outer_header),
			  tunnel.source_port ? tunnel.source_port : bpf_htons(flow));
	return true;
}

/*
 * Drops a packet longer than `mtu`, or turns its frame into an ICMP error to the sender. Returns an XDP action. This is
 * a global function, so that its stack does not count in every call of lb().
 */
__noinline int drop_packet_exceeding_mtu(struct xdp_md *ctx, __u32 service, __u32 mtu)
{
	bool is_ipv6 = ipv6_in_use && is_ipv6_frame((void *)(long)ctx->data, (void *)(long)ctx->data_end);

	if (!(is_ipv6 ? answer_packet_too_big(ctx, service, mtu) : answer_fragmentation_needed(ctx, service, mtu)))
		return drop(ctx, service, LB_COUNTER_DROP_EXCEEDS_MTU);
	count_packet(ctx, service, LB_COUNTER_DROP_FRAGMENTATION_NEEDED, 0);
	return XDP_TX;
}

/* Sends the packet to the server in an outer header of this form. Returns an XDP action. */
static __always_inline int encapsulate_as(struct xdp_md *ctx, const struct encapsulation *form, __u32 service,
					  __u32 server_id, __u32 outcome, __u32 flow)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 overhead = encapsulation_overhead(form);

	if (data + ETH_HLEN + ip_header_length(form->inner_ipv6) > data_end)
		return XDP_DROP;
	if (inner_length(data, 0, form->inner_ipv6) + overhead > lb_state.mtu)
		return drop_packet_exceeding_mtu(ctx, service, lb_state.mtu - overhead);
	if (!push_outer_header(ctx, form, load_server_entry(service, server_id), server_id, flow))
		return drop(ctx, service, LB_COUNTER_DROP_INTERNAL);
	count_traffic(ctx, server_id, frame_bytes(ctx) - overhead);
	count_packet(ctx, service, outcome, frame_bytes(ctx) - overhead);
	return transmit_to_server(server_id);
}

/* encapsulate_as() in the form that the service's method of forwarding requires. */
static __always_inline int encapsulate(struct xdp_md *ctx, bool inner_ipv6, bool has_ipv6_outer_header, __u32 service,
				       __u32 server_id, __u32 outcome, __u32 flow)
{
	struct encapsulation form = {.inner_ipv6 = inner_ipv6, .has_ipv6_outer_header = has_ipv6_outer_header};

	if (!load_server_tunnel(server_id).address)
		return drop(ctx, service, LB_COUNTER_DROP_SERVER_UNRESOLVED);
	if (service_forwarding(service) == FORWARDING_IPIP) {
		form.forwarding = FORWARDING_IPIP;
		return encapsulate_as(ctx, &form, service, server_id, outcome, flow);
	}
	form.forwarding = FORWARDING_GUE;
	return encapsulate_as(ctx, &form, service, server_id, outcome, flow);
}

/*
 * Encapsulates and sends a packet, with any address families of packet and server. This is a global function, so that
 * it is verified once. For the same reason it takes values and no struct.
 */
__noinline int emit_encapsulated(struct xdp_md *ctx, __u32 service, __u32 server_id, __u32 outcome, __u32 ports)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 flow;

	if (ipv6_in_use && is_ipv6_frame(data, data_end)) {
		flow = gue_source_port_ipv6(data + IPV6_FIELD_OFFSET(source), ports);
		if (has_ipv6_tunnel(server_id))
			return encapsulate(ctx, true, true, service, server_id, outcome, flow);
		return encapsulate(ctx, true, false, service, server_id, outcome, flow);
	}
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return XDP_DROP;
	flow = gue_source_port(PACKET_U32(data, IP_FIELD_OFFSET(saddr)), ports);
	if (has_ipv6_tunnel(server_id))
		return encapsulate(ctx, false, true, service, server_id, outcome, flow);
	return encapsulate(ctx, false, false, service, server_id, outcome, flow);
}

#endif
