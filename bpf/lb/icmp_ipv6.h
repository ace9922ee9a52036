/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * ICMPv6 errors to a VIP about a packet from a server to a client, handled as in icmp.h. They are "destination
 * unreachable", "packet too big", "time exceeded" and "parameter problem" (RFC 4443). They quote as much of the packet
 * as fits (Sect. 3), so usually the timestamp, too.
 */
#ifndef COREWARD_LB_ICMP_IPV6_H
#define COREWARD_LB_ICMP_IPV6_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decide.h"
#include "icmp.h"
#include "parse.h"
#include "parse_ipv6.h"
#include "service_mode.h"

#define QUOTED_IPV6_OFFSET (IPV6_TRANSPORT_OFFSET + sizeof(struct icmp_header))
#define QUOTED_IPV6_FIELD_OFFSET(field) (QUOTED_IPV6_OFFSET + __builtin_offsetof(struct ipv6_header, field))
#define QUOTED_IPV6_TRANSPORT_OFFSET (QUOTED_IPV6_OFFSET + sizeof(struct ipv6_header))
#define ICMPV6_ERROR_LENGTH (QUOTED_IPV6_TRANSPORT_OFFSET + MIN_QUOTED_PAYLOAD_BYTES)

static __always_inline bool is_same_address_ipv6(const void *address, const void *other)
{
	return PACKET_U64(address, 0) == PACKET_U64(other, 0) && PACKET_U64(address, 8) == PACKET_U64(other, 8);
}

/*
 * Fills `quoted` with the quoted packet, from VIP to client, as if it were the client's. Returns 0, or an outcome from
 * encode_parse_end(). A quoted packet with extension headers passes, because servers send none.
 */
static __always_inline int parse_quote_ipv6(const void *data, const void *data_end, struct packet *quoted)
{
	__u32 length, ports;

	if (data + IPV6_TRANSPORT_OFFSET + sizeof(struct icmp_header) > data_end)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	length = bpf_ntohs(PACKET_U16(data, IPV6_FIELD_OFFSET(payload_length)));
	if (length < sizeof(struct icmp_header))
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	if (!is_icmpv6_error(PACKET_U8(data, IPV6_TRANSPORT_OFFSET)))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (IPV6_TRANSPORT_OFFSET + length < ICMPV6_ERROR_LENGTH || data + ICMPV6_ERROR_LENGTH > data_end ||
	    PACKET_U8(data, QUOTED_IPV6_OFFSET) >> 4 != 6)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	quoted->protocol = PACKET_U8(data, QUOTED_IPV6_FIELD_OFFSET(next_header));
	if (!is_same_address_ipv6(data + QUOTED_IPV6_FIELD_OFFSET(source), data + IPV6_FIELD_OFFSET(destination)) ||
	    (quoted->protocol != IPPROTO_TCP && quoted->protocol != IPPROTO_UDP))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	ports = PACKET_U32(data, QUOTED_IPV6_TRANSPORT_OFFSET);
	quoted->family = ADDRESS_FAMILY_IPV6;
	quoted->client_address = fold_client_address_ipv6(data + QUOTED_IPV6_FIELD_OFFSET(destination));
	quoted->ports = ports >> 16 | ports << 16;
	quoted->client_offset = QUOTED_IPV6_FIELD_OFFSET(destination);
	quoted->transport_offset = QUOTED_IPV6_TRANSPORT_OFFSET;
	quoted->end_offset = IPV6_TRANSPORT_OFFSET + length;
	return 0;
}

/*
 * Decides about a packet of parse_ipv6() without extension headers. Returns 0, or an outcome from encode_parse_end().
 * It is not inlined, because its stack would count in every call of decide().
 */
static __noinline int parse_and_decide_icmp_ipv6(struct xdp_md *ctx, const struct packet *packet,
						 struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct packet quoted = {};
	struct service service;
	__u32 number;
	int ended;

	ended = parse_quote_ipv6(data, data_end, &quoted);
	if (ended)
		return ended;
	number = find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(destination), quoted.ports >> 16, quoted.protocol);
	if (!is_service(number))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	if (quoted.protocol == IPPROTO_TCP) {
		ended = parse_quoted_timestamp(ctx, &quoted);
		if (ended)
			return ended;
	}
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + QUOTED_IPV6_TRANSPORT_OFFSET > data_end)
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	if (quoted.has_timestamp)
		quoted.cookie = decode_cookie_ipv6(quoted.tsecr, data + QUOTED_IPV6_FIELD_OFFSET(destination),
						   data + QUOTED_IPV6_FIELD_OFFSET(source), quoted.ports);
	service = decode_service(number);
	decide_icmp_error(ctx, &service, packet->client_address, &quoted, decision);
	return 0;
}

#endif
