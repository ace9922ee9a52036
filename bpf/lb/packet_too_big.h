/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * ICMPv6 error "packet too big" (RFC 4443, Sect. 3.2) to the sender of a packet that its outer header makes longer than
 * the MTU. fragmentation_needed.h has the same for IPv4.
 *
 * Only packets of more than 1280 bytes get an error, because every IPv6 link has an MTU of at least 1280 bytes (RFC
 * 8200, Sect. 5), and hosts ignore a smaller MTU (RFC 8201, Sect. 4). ICMPv6 and sources that are no host get no error
 * (RFC 4443, Sect. 2.4). The quote is shorter than allowed, because bpf_csum_diff() takes at most 512 bytes.
 */
#ifndef COREWARD_LB_PACKET_TOO_BIG_H
#define COREWARD_LB_PACKET_TOO_BIG_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "checksum.h"
#include "icmp_error.h"
#include "ipv6_header.h"
#include "outer_header.h"
#include "parse.h"
#include "parse_ipv6.h"

#define ICMPV6_PACKET_TOO_BIG 2
#define ICMPV6_HEADER_LENGTH 8
#define IPV6_MIN_MTU 1280
/* Number of quoted bytes. They hold all headers that the program reads, and a TCP header with its options. */
#define QUOTED_IPV6_LENGTH 504
#define ICMPV6_MESSAGE_LENGTH (ICMPV6_HEADER_LENGTH + QUOTED_IPV6_LENGTH)
#define ICMPV6_TOO_BIG_LENGTH (sizeof(struct ipv6_header) + ICMPV6_MESSAGE_LENGTH)
#define IPV6_MULTICAST_BYTE 0xff

/* Returns whether the packet may be answered by an error. */
static __always_inline bool may_send_icmpv6_error(const void *data, const void *data_end)
{
	const void *source = data + IPV6_FIELD_OFFSET(source);

	if (data + ETH_HLEN + QUOTED_IPV6_LENGTH > data_end)
		return false;
	return bpf_ntohs(PACKET_U16(data, IPV6_FIELD_OFFSET(payload_length))) + sizeof(struct ipv6_header) >
		       IPV6_MIN_MTU &&
	       PACKET_U8(data, IPV6_FIELD_OFFSET(next_header)) != NEXT_ICMPV6 &&
	       PACKET_U8(source, 0) != IPV6_MULTICAST_BYTE && (PACKET_U64(source, 0) || PACKET_U64(source, 8));
}

/* Writes the ICMPv6 header in front of the quoted packet. `data` has ETH_HLEN and ICMPV6_TOO_BIG_LENGTH bytes. */
static __always_inline void write_too_big_message(void *data, __u32 mtu)
{
	__u32 sum;

	PACKET_U32(data, IPV6_TRANSPORT_OFFSET) = ICMPV6_PACKET_TOO_BIG;
	PACKET_U32(data, IPV6_TRANSPORT_OFFSET + 4) = bpf_htonl(mtu < IPV6_MIN_MTU ? IPV6_MIN_MTU : mtu);
	/* The pseudo-header consists of addresses, length and next header (RFC 8200, Sect. 8.1). */
	sum = bpf_csum_diff(0, 0, data + IPV6_FIELD_OFFSET(source), 2 * IPV6_ADDRESS_BYTES,
			    bpf_htonl(ICMPV6_MESSAGE_LENGTH) + bpf_htonl(NEXT_ICMPV6));
	sum = bpf_csum_diff(0, 0, data + IPV6_TRANSPORT_OFFSET, ICMPV6_MESSAGE_LENGTH, sum);
	PACKET_U16(data, IPV6_TRANSPORT_OFFSET + 2) = ~fold_checksum(sum);
}

/* Turns the frame into an error to its packet's sender. Returns false if the frame could not be resized. */
static __always_inline bool write_packet_too_big(struct xdp_md *ctx, __u32 mtu)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct outer_header_fields outer = {
		.length = ICMPV6_TOO_BIG_LENGTH,
		.traffic_class = ICMP_ERROR_TRAFFIC_CLASS,
		.protocol = NEXT_ICMPV6,
	};
	__u64 client[2], vip[2], sender;

	if (data + ETH_HLEN + QUOTED_IPV6_LENGTH > data_end)
		return false;
	client[0] = PACKET_U64(data, IPV6_FIELD_OFFSET(source));
	client[1] = PACKET_U64(data, IPV6_FIELD_OFFSET(source) + 8);
	vip[0] = PACKET_U64(data, IPV6_FIELD_OFFSET(destination));
	vip[1] = PACKET_U64(data, IPV6_FIELD_OFFSET(destination) + 8);
	sender = PACKET_U64(data, ETH_ALEN) & SERVER_MAC_MASK;
	data = quote_packet(ctx, QUOTED_IPV6_LENGTH, ICMPV6_TOO_BIG_LENGTH);
	if (!data)
		return false;
	write_headers_ipv6(data, sender, &outer, 0, vip, client);
	write_too_big_message(data, mtu);
	return true;
}

/* Answers the packet with an error, within the rates. `mtu` is the length of the longest packet that fits. */
static __always_inline bool answer_packet_too_big(struct xdp_md *ctx, __u32 service, __u32 mtu)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	__u32 source;

	if (!may_send_icmpv6_error(data, data_end) || data + IPV6_TRANSPORT_OFFSET > data_end)
		return false;
	source = fold_client_address_ipv6(data + IPV6_FIELD_OFFSET(source));
	return take_rate_tokens(service, source, LIMITED_FRAGMENTATION_NEEDED) && write_packet_too_big(ctx, mtu);
}

#endif
