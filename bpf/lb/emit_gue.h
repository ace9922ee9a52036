/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * FORWARDING_GUE: the packet in a UDP datagram without a header between (GUE variant 1: receivers read the version of
 * the inner IP header). The source port spreads the flows of one server over paths and receive queues: the port in the
 * server's entry, or one of the ephemeral ports by the flow's hash. The UDP checksum is 0, as IPv4 allows (RFC 768):
 * the inner packet has its own.
 */
#ifndef COREWARD_LB_EMIT_GUE_H
#define COREWARD_LB_EMIT_GUE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#include "outer_header.h"
#include "tunnel.h"

#define UDP_AT(field) (ETH_HLEN + sizeof(struct iphdr) + __builtin_offsetof(struct udphdr, field))
/* Ephemeral ports (RFC 6335, Sect. 6; RFC 8085, Sect. 5.1.1). */
#define FIRST_FLOW_PORT 0xc000u
#define FLOW_PORT_BITS 14

/*
 * The source port of a flow, in the host's order: model's forwarding::flow_port(). Fibonacci hashing: the upper bits of
 * the product depend on all of the client's address and port.
 */
static __always_inline __u16 flow_port(__u32 client_address, __u32 ports)
{
	__u64 mixed = (client_address | (__u64)ports << 32) * 0x9e3779b97f4a7c15ull;

	return FIRST_FLOW_PORT | mixed >> (64 - FLOW_PORT_BITS);
}

/*
 * `data`: where the new frame begins; the inner IPv4 header is there, too. `destination`, `source_port`: as in the
 * packet.
 */
static __always_inline void write_gue(void *data, server_entry_t next_hop, __u32 destination, __u16 source_port)
{
	struct outer outer = outer_header(data, GUE_OVERHEAD, IPPROTO_UDP, destination);

	write_outer_header(data, next_hop, &outer);
	PACKET_U16(data, UDP_AT(source)) = source_port;
	PACKET_U16(data, UDP_AT(dest)) = bpf_htons(GUE_PORT);
	PACKET_U16(data, UDP_AT(len)) = bpf_htons(outer.length - sizeof(struct iphdr));
	PACKET_U16(data, UDP_AT(check)) = 0;
}

#endif
