/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * ICMP error "fragmentation needed" (RFC 1191) to the sender of a packet that its outer header makes longer than the
 * MTU.
 *
 * Packets without DF get the error, too, because the program cannot fragment them. Linux then sends shorter fragments.
 * The error's source is the VIP, which the sender can reach, because it may have no route to this host's address. ICMP,
 * later fragments and sources that are no host get no error (RFC 1122, Sect. 3.2.2). Errors are limited by rates like
 * broadcasts (broadcast.h).
 */
#ifndef COREWARD_LB_FRAGMENTATION_NEEDED_H
#define COREWARD_LB_FRAGMENTATION_NEEDED_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "broadcast.h"
#include "checksum.h"
#include "icmp_error.h"
#include "outer_header.h"
#include "parse.h"

#define ICMP_UNREACHABLE 3
#define ICMP_FRAGMENTATION_NEEDED 4
#define ICMP_HEADER_LENGTH 8
/* Number of quoted bytes. They hold the longest IP header and 8 bytes (RFC 792), or a TCP header with 28 of options. */
#define QUOTED_LENGTH 68
#define ICMP_ERROR_LENGTH (sizeof(struct iphdr) + ICMP_HEADER_LENGTH + QUOTED_LENGTH)
/* First octet of addresses that are multicast, reserved or broadcast. */
#define FIRST_NON_UNICAST_OCTET 224

/* Returns whether the packet may be answered by an error. */
static __always_inline bool may_send_icmp_error(const void *data, const void *data_end)
{
	__u8 network;

	if (data + ETH_HLEN + QUOTED_LENGTH > data_end)
		return false;
	network = PACKET_U8(data, IP_FIELD_OFFSET(saddr));
	return PACKET_U8(data, IP_FIELD_OFFSET(protocol)) != IPPROTO_ICMP && network &&
	       network < FIRST_NON_UNICAST_OCTET &&
	       !(PACKET_U16(data, IP_FIELD_OFFSET(frag_off)) & bpf_htons(IP_FRAGMENT_OFFSET));
}

/* Turns the frame into an error to its packet's sender. Returns false if the frame could not be resized. */
static __always_inline bool write_fragmentation_needed(struct xdp_md *ctx, __u32 mtu)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct outer_header_fields outer = {
		.length = ICMP_ERROR_LENGTH,
		.traffic_class = ICMP_ERROR_TRAFFIC_CLASS,
		.protocol = IPPROTO_ICMP,
	};
	__u32 client, vip, icmp_at = ETH_HLEN + sizeof(struct iphdr);
	__u64 sender;
	__u32 sum;

	if (data + ETH_HLEN + QUOTED_LENGTH > data_end)
		return false;
	client = PACKET_U32(data, IP_FIELD_OFFSET(saddr));
	vip = PACKET_U32(data, IP_FIELD_OFFSET(daddr));
	sender = PACKET_U64(data, ETH_ALEN) & SERVER_MAC_MASK;
	data = quote_packet(ctx, QUOTED_LENGTH, ICMP_ERROR_LENGTH);
	if (!data)
		return false;
	write_headers(data, sender, &outer, vip, client);
	PACKET_U32(data, icmp_at) = ICMP_UNREACHABLE | ICMP_FRAGMENTATION_NEEDED << 8;
	PACKET_U32(data, icmp_at + 4) = bpf_htonl(mtu);
	sum = bpf_csum_diff(0, 0, data + icmp_at, ICMP_HEADER_LENGTH + QUOTED_LENGTH, 0);
	PACKET_U16(data, icmp_at + 2) = ~fold_checksum(sum);
	return true;
}

/* Answers the packet with an error, within the rates. `mtu` is the length of the longest packet that fits. */
static __always_inline bool answer_fragmentation_needed(struct xdp_md *ctx, __u32 service, __u32 mtu)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	__u32 source;

	if (!may_send_icmp_error(data, data_end) || data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return false;
	source = PACKET_U32(data, IP_FIELD_OFFSET(saddr));
	return take_rate_tokens(service, source, LIMITED_FRAGMENTATION_NEEDED) && write_fragmentation_needed(ctx, mtu);
}

#endif
