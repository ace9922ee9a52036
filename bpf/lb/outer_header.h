/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Outer IP header of IP-in-IP and GUE, in the family of the server's address.
 *
 * The type of service or traffic class is copied, with DSCP, and ECN as RFC 6040 has it (normal mode). TTL and hop
 * limit are 64, so the tunnel is one hop for the client. IPv4 headers have DF and identification 0 (RFC 6864, Sect.
 * 4.1), so there are no fragments. The flow label of IPv6 is the flow's hash (RFC 6438).
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
#include "checksum.h"
#include "ipv6_header.h"
#include "parse.h"
#include "placement.h"
#include "rewrite.h"
#include "state.h"

/* TTL of the kernel's own tunnels that do not inherit the inner one. */
#define OUTER_TTL 64
#define IP_DONT_FRAGMENT 0x4000

/* Outer headers of servers, for services that encapsulate. They are aligned, so that one load reads an entry. */
struct server_tunnels tunnels SEC(".bss.tunnels") __attribute__((aligned(16)));

static __always_inline struct server_tunnel load_server_tunnel(__u32 server_id)
{
	return tunnels.entry[server_id & (SERVER_ID_COUNT - 1)];
}

static __always_inline bool has_ipv6_tunnel(__u32 server_id)
{
	return load_server_tunnel(server_id).family == ADDRESS_FAMILY_IPV6;
}

/* Fields of an outer header that differ between packets. */
struct outer_header_fields {
	/* Length in bytes after the Ethernet header. */
	__u16 length;
	/* Traffic class, or type of service in IPv4. */
	__u8 traffic_class;
	__u8 protocol;
};

/* Returns the checksum of an IPv4 header, given as five words with 0 in place of the checksum. */
static __always_inline __u16 header_checksum(__u32 first, __u32 second, __u32 third, __u32 source, __u32 destination)
{
	__u64 sum = (__u64)first + second + third + source + destination;

	sum = (sum & 0xffffffff) + (sum >> 32);
	return ~fold_checksum(sum);
}

/* Writes an Ethernet header to `neighbour` and an IPv4 header. `data` has room for ETH_HLEN and 20 bytes. */
static __always_inline void write_headers(void *data, __u64 neighbour, const struct outer_header_fields *outer,
					  __u32 source, __u32 destination)
{
	__u32 first = 0x45 | outer->traffic_class << 8 | (__u32)bpf_htons(outer->length) << 16;
	__u32 second = (__u32)bpf_htons(IP_DONT_FRAGMENT) << 16;
	__u32 third = OUTER_TTL | outer->protocol << 8;

	rewrite_mac(data, neighbour);
	PACKET_U16(data, ETH_HLEN - 2) = bpf_htons(ETH_P_IP);
	third |= (__u32)header_checksum(first, second, third, source, destination) << 16;
	PACKET_U32(data, ETH_HLEN) = first;
	PACKET_U32(data, IP_FIELD_OFFSET(id)) = second;
	PACKET_U32(data, IP_FIELD_OFFSET(ttl)) = third;
	PACKET_U32(data, IP_FIELD_OFFSET(saddr)) = source;
	PACKET_U32(data, IP_FIELD_OFFSET(daddr)) = destination;
}

/* write_headers() for IPv6. `data` has room for ETH_HLEN and 40 bytes. Addresses are two words each. */
static __always_inline void write_headers_ipv6(void *data, __u64 neighbour, const struct outer_header_fields *outer,
					       __u32 flow_label, const __u64 *source, const __u64 *destination)
{
	__u32 payload_length = outer->length - sizeof(struct ipv6_header);

	rewrite_mac(data, neighbour);
	PACKET_U16(data, ETH_HLEN - 2) = bpf_htons(ETH_P_IPV6);
	PACKET_U32(data, ETH_HLEN) = bpf_htonl(6u << 28 | (__u32)outer->traffic_class << 20 | flow_label);
	PACKET_U32(data, IPV6_FIELD_OFFSET(payload_length)) =
		bpf_htons(payload_length) | (__u32)outer->protocol << 16 | (__u32)OUTER_TTL << 24;
	PACKET_U64(data, IPV6_FIELD_OFFSET(source)) = source[0];
	PACKET_U64(data, IPV6_FIELD_OFFSET(source) + 8) = source[1];
	PACKET_U64(data, IPV6_FIELD_OFFSET(destination)) = destination[0];
	PACKET_U64(data, IPV6_FIELD_OFFSET(destination) + 8) = destination[1];
}

#endif
