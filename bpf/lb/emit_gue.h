/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * FORWARDING_GUE, in which the packet directly follows a UDP header (GUE variant 1, whose receivers read the version of
 * the inner IP header). The source port is that of the server's entry, or an ephemeral port by the flow's hash, which
 * spreads a server's flows over paths and receive queues. The UDP checksum is 0, as IPv4 (RFC 768) and tunnels over
 * IPv6 (RFC 6935) allow, because the inner packet has a checksum.
 */
#ifndef COREWARD_LB_EMIT_GUE_H
#define COREWARD_LB_EMIT_GUE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.h"
#include "parse_ipv6.h"

#define UDP_FIELD_OFFSET(field) __builtin_offsetof(struct udphdr, field)
/* Ephemeral ports (RFC 6335, Sect. 6; RFC 8085, Sect. 5.1.1). */
#define FIRST_FLOW_PORT 0xc000u
#define FLOW_PORT_BITS 14
/* 2^64 divided by the golden ratio. */
#define FLOW_FACTOR 0x9e3779b97f4a7c15ull

/*
 * Returns the source port of a flow in the host's order, as model's forwarding::flow_port() does. By Fibonacci hashing
 * the product's upper bits depend on all bits of the client's address and port.
 */
static __always_inline __u16 gue_source_port(__u32 client, __u32 ports)
{
	__u64 mixed = (client | (__u64)ports << 32) * FLOW_FACTOR;

	return FIRST_FLOW_PORT | mixed >> (64 - FLOW_PORT_BITS);
}

/* gue_source_port() for IPv6. It uses no secret of the load balancer, because `coreward explain` computes it, too. */
static __always_inline __u16 gue_source_port_ipv6(const void *client, __u32 ports)
{
	const struct cookie_key key = {.k0 = FLOW_FACTOR, .k1 = FLOW_FACTOR};

	return gue_source_port(fold_address_ipv6(&key, PACKET_U64(client, 0), PACKET_U64(client, 8)), ports);
}

/* Writes the UDP header. `length` covers header and inner packet. `source_port` is in network byte order. */
static __always_inline void write_udp(void *header, __u16 length, __u16 source_port)
{
	PACKET_U16(header, UDP_FIELD_OFFSET(source)) = source_port;
	PACKET_U16(header, UDP_FIELD_OFFSET(dest)) = bpf_htons(GUE_PORT);
	PACKET_U16(header, UDP_FIELD_OFFSET(len)) = bpf_htons(length);
	PACKET_U16(header, UDP_FIELD_OFFSET(check)) = 0;
}

#endif
