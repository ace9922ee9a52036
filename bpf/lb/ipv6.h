/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Fast path and slow path of IPv6 packets. lb.bpf.c has both for IPv4. */
#ifndef COREWARD_LB_IPV6_H
#define COREWARD_LB_IPV6_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "apply.h"
#include "connection_table.h"
#include "decide.h"
#include "emit.h"
#include "fragment.h"
#include "icmp_ipv6.h"
#include "parse_ipv6.h"
#include "placement.h"
#include "reply.h"
#include "service_mode.h"

/* forward_fast_path_decided() for IPv6. */
static __noinline int forward_fast_path_decided_ipv6(struct xdp_md *ctx, __u32 number, __u32 tsecr_at)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct decision decision = UNDECIDED;
	struct packet packet = {
		.family = ADDRESS_FAMILY_IPV6,
		.has_timestamp = 1,
		.protocol = IPPROTO_TCP,
		.tsecr_offset = tsecr_at,
		.transport_offset = IPV6_TRANSPORT_OFFSET,
		.client_offset = IPV6_FIELD_OFFSET(source),
	};

	if (data + FAST_PATH_IPV6_LENGTH > data_end)
		return XDP_DROP;
	packet.client_address = fold_client_address_ipv6(data + IPV6_FIELD_OFFSET(source));
	packet.ports = PACKET_U32(data, IPV6_TRANSPORT_OFFSET);
	packet.flags = PACKET_U8(data, IPV6_TRANSPORT_OFFSET + TCP_FLAGS_OFFSET);
	tsecr_at &= OPTION_OFFSET_MASK;
	if (data + tsecr_at + sizeof(packet.tsecr) <= data_end)
		packet.tsecr = bpf_ntohl(PACKET_U32(data, tsecr_at));
	decide(ctx, number, &packet, &decision);
	return apply_decision(ctx, &packet, &decision);
}

/* Forwards a SYN. Returns an XDP action, or -1 if it is not of the fast path, or not for a service. */
static __always_inline int forward_fast_path_syn_ipv6(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 tsecr_at = syn_tsecr_offset_ipv6(data, data_end), number;

	if (!tsecr_at || data + FAST_PATH_IPV6_LENGTH > data_end || !is_for_own_mac(data))
		return -1;
	number = find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(destination),
					  PACKET_U32(data, IPV6_TRANSPORT_OFFSET) >> 16, IPPROTO_TCP);
	return is_service(number) ? forward_fast_path_decided_ipv6(ctx, number, tsecr_at) : -1;
}

/* forward_fast_path_by_index() for IPv6. */
static __always_inline int forward_fast_path_by_index_ipv6(struct xdp_md *ctx, __u32 service, __u32 cookie)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct connection *connection;
	server_entry_t server;
	__u32 id, ports;
	__u64 hash;

	if (cookie_owner(cookie) != lb_state.owner || data + FAST_PATH_IPV6_LENGTH > data_end)
		return -1;
	ports = PACKET_U32(data, IPV6_TRANSPORT_OFFSET);
	hash = connection_hash(service, fold_client_address_ipv6(data + IPV6_FIELD_OFFSET(source)), ports);
	connection = find_connection(hash, cookie, service, &id);
	if (!connection)
		return -1;
	server = load_server_entry(service, id);
	if (!has_server_flag(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	update_connection(connection, TCP_ACK, data_end - data);
	return emit(ctx, server, service, id, LB_COUNTER_CONNECTION_TABLE, ports);
}

/* Forwards a packet of the fast path. Returns an XDP action, or -1 if the packet needs another path. */
static __always_inline int forward_fast_path_ipv6(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct service service;
	__u32 ports, number, cookie;
	server_entry_t server;

	if (!is_fast_path_ipv6(data, data_end) || !is_for_own_mac(data))
		return -1;
	ports = PACKET_U32(data, IPV6_TRANSPORT_OFFSET);
	number = find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(destination), ports >> 16, IPPROTO_TCP);
	if (!is_service(number))
		return -1;
	service = decode_service(number);
	if (has_other_balancer(&service))
		return -1;
	if (!has_cookies(&service))
		return forward_fast_path_decided_ipv6(ctx, number, FAST_PATH_IPV6_TSECR_OFFSET);
	cookie = decode_cookie_ipv6(bpf_ntohl(PACKET_U32(data, FAST_PATH_IPV6_TSECR_OFFSET)),
				    data + IPV6_FIELD_OFFSET(source), data + IPV6_FIELD_OFFSET(destination), ports);
	if (has_table_index(&service, cookie))
		return forward_fast_path_by_index_ipv6(ctx, service.index, cookie);
	server = load_server_entry(service.index, cookie);
	if (cookie & COOKIE_KIND_BIT || !has_server_flag(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	return emit(ctx, server, service.index, cookie, LB_COUNTER_ESTABLISHED, ports);
}

/* Reads the headers above IPv6 and decides. Returns 0, or an outcome from encode_parse_end(). */
static __always_inline int parse_and_decide_transport_ipv6(struct xdp_md *ctx, struct packet *packet,
							   struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	bool tcp = packet->protocol == IPPROTO_TCP;
	__u32 number;
	int ended;

	if (packet->fragment && tcp)
		return encode_parse_end(LB_COUNTER_DROP_FRAGMENT);
	if (is_later_fragment(packet))
		return decide_later_fragment(ctx, packet, decision);
	ended = parse_ports(data, data_end, tcp ? LB_COUNTER_DROP_MALFORMED_TCP : LB_COUNTER_DROP_MALFORMED_UDP,
			    packet);
	if (ended)
		return ended;
	if (data + IPV6_TRANSPORT_OFFSET > data_end)
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	number = find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(destination), packet->ports >> 16, packet->protocol);
	if (!is_service(number))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	ended = tcp ? parse_tcp(ctx, data, data_end, packet) : parse_udp(data, data_end, packet);
	if (ended)
		return ended;
	if (packet->has_timestamp && !(packet->flags & TCP_SYN)) {
		data = (void *)(long)ctx->data;
		data_end = (void *)(long)ctx->data_end;
		if (data + IPV6_TRANSPORT_OFFSET > data_end)
			return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
		packet->cookie = decode_cookie_ipv6(packet->tsecr, data + IPV6_FIELD_OFFSET(source),
						    data + IPV6_FIELD_OFFSET(destination), packet->ports);
	}
	decide(ctx, number, packet, decision);
	if (packet->fragment && is_forwarded(decision->outcome))
		store_server_of_first_fragment(ctx, packet, decision);
	return 0;
}

/* Reads the packet and fills `decision`. Returns 0, or an outcome from encode_parse_end(). */
static __always_inline int parse_and_decide_ipv6(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	int ended;

	if (!is_ipv6_frame(data, data_end) || !is_for_own_mac(data))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(destination), 0, 0) != SERVICE_ADDRESS_ONLY)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	ended = parse_ipv6(ctx, data, data_end, packet);
	if (ended)
		return ended;
	/* ICMPv6 errors have no extension headers in front. */
	if (packet->protocol == NEXT_ICMPV6 && packet->transport_offset == IPV6_TRANSPORT_OFFSET)
		return parse_and_decide_icmp_ipv6(ctx, packet, decision);
	if (packet->protocol != IPPROTO_TCP && (!udp_in_use || packet->protocol != IPPROTO_UDP))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	return parse_and_decide_transport_ipv6(ctx, packet, decision);
}

/* Not inlined, because its stack would count in every call of lb(). */
static __noinline int forward_slow_path_ipv6(struct xdp_md *ctx)
{
	struct decision decision = UNDECIDED;
	struct packet packet = {};
	int ended = parse_and_decide_ipv6(ctx, &packet, &decision);

	if (ended)
		decision.outcome = decode_parse_end(ended);
	return apply_decision(ctx, &packet, &decision);
}

static __always_inline int forward_ipv6(struct xdp_md *ctx)
{
	int action = forward_fast_path_ipv6(ctx);

	if (action < 0)
		action = forward_fast_path_syn_ipv6(ctx);
	if (action < 0 && timestamps_lb_in_use)
		action = forward_reply(ctx);
	return action < 0 ? forward_slow_path_ipv6(ctx) : action;
}

#endif
