/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The outer IPv4 header of IP-in-IP and GUE.
 *
 * The type of service is copied: DSCP, and ECN as RFC 6040 has it (normal mode). TTL is 64: one hop for the
 * client. DF is set and the identification 0 (RFC 6864, Sect. 4.1): no fragments.
 */
#ifndef COREWARD_LB_OUTER_HEADER_H
#define COREWARD_LB_OUTER_HEADER_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.h"
#include "placement.h"
#include "rewrite.h"
#include "state.h"

/* As the kernel's own tunnels that do not inherit it. */
#define OUTER_TTL 64
#define IP_DONT_FRAGMENT 0x4000

/* By server id, for services that encapsulate. Aligned, so that an entry is one load. */
struct server_tunnel tunnels[SERVER_ID_COUNT] SEC(".bss.tunnels") __attribute__((aligned(8)));

/* Fields of an outer header that differ between packets. */
struct outer {
	/* As in the packet. */
	__u32 destination;
	/* Whole packet, in bytes. */
	__u16 length;
	__u8 type_of_service;
	__u8 protocol;
};

/* The checksum of an IPv4 header in five words, one of them zero instead of the checksum. */
static __always_inline __u16 header_checksum(__u32 first, __u32 second, __u32 third, __u32 source, __u32 destination)
{
	__u64 sum = (__u64)first + second + third + source + destination;

	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* An Ethernet header to `neighbour` and an IPv4 header. `data`: ETH_HLEN and 20 bytes are there. */
static __always_inline void write_headers(void *data, __u64 neighbour, __u32 source, const struct outer *outer)
{
	__u32 first = 0x45 | outer->type_of_service << 8 | (__u32)bpf_htons(outer->length) << 16;
	__u32 second = (__u32)bpf_htons(IP_DONT_FRAGMENT) << 16;
	__u32 third = OUTER_TTL | outer->protocol << 8;

	rewrite_mac(data, neighbour);
	PACKET_U16(data, ETH_HLEN - 2) = bpf_htons(ETH_P_IP);
	third |= (__u32)header_checksum(first, second, third, source, outer->destination) << 16;
	PACKET_U32(data, ETH_HLEN) = first;
	PACKET_U32(data, IP_AT(id)) = second;
	PACKET_U32(data, IP_AT(ttl)) = third;
	PACKET_U32(data, IP_AT(saddr)) = source;
	PACKET_U32(data, IP_AT(daddr)) = outer->destination;
}

/* The outer header of the packet that begins `overhead` bytes behind where the new one will. */
static __always_inline struct outer outer_header(const void *data, __u32 overhead, __u8 protocol, __u32 destination)
{
	return (struct outer){
		.destination = destination,
		.length = bpf_ntohs(PACKET_U16(data, overhead + IP_AT(tot_len))) + overhead,
		.type_of_service = PACKET_U8(data, overhead + IP_AT(tos)),
		.protocol = protocol,
	};
}

static __always_inline void write_outer_header(void *data, server_entry_t next_hop, const struct outer *outer)
{
	write_headers(data, next_hop, lb_state.own_address, outer);
}

#endif
