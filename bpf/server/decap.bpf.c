/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Removal of the outer header from packets of load balancers (bpf/lb/encapsulate.h), in XDP at a server's NIC.
 *
 * 1. Place. The program runs before tc, so that server.bpf.c gets packets as on a segment without routers. In native
 *    mode it also runs before GRO, which then merges inner TCP segments. In generic mode GRO runs first, and merges
 *    encapsulated segments.
 *
 * 2. Packets are IPv4 and IPv6, in IPv4 or IPv6, directly or in UDP to GUE_PORT. All other packets pass, also those
 *    with IP options or extension headers in the outer header. An encapsulated packet can carry any inner source past a
 *    firewall that reads outer addresses. So its source must be a configured load balancer, and its inner destination a
 *    VIP of this server. Other encapsulated packets are dropped and counted, as are fragments (load balancers set DF),
 *    packets whose lengths contradict each other, and packets with another tunnel inside.
 *
 * 3. Congestion experienced (CE) is copied from the outer to the inner header (RFC 6040, Sect. 4.2).
 *
 * 4. Checksums. The outer UDP checksum is 0. The kernel verifies the inner packet's checksum.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "checksum.h"
#include "ipv4_header.h"
#include "ipv6_header.h"
#include "tunnel.h"

/* An IPv4 or IPv6 address, in the layout of struct service_key. */
struct address {
	__u32 word[4];
};

/* Addresses of load balancers, which may be sources of outer headers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_DECAP_SOURCES);
	__type(key, struct address);
	__type(value, __u8);
} decap_sources SEC(".maps");

/* VIPs of this server, which may be destinations of inner headers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SERVICES_OF_SERVER);
	__type(key, struct address);
	__type(value, __u8);
} decap_vips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DECAP_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} decap_counters SEC(".maps");

/* ECN bits of the type of service or traffic class (RFC 3168, Sect. 5). */
#define ECN_MASK 3
#define ECN_CE 3

/* Mask that bounds an outer header's length for the verifier. */
#define OVERHEAD_MASK 63

struct ip_fields {
	struct address source;
	struct address destination;
	__u32 header_length;
	/* Length of the packet in bytes, header included. */
	__u32 length;
	__u16 fragment;
	__u8 traffic_class;
	__u8 protocol;
	bool ipv6;
};

static __always_inline void count(__u32 counter)
{
	__u64 *found = bpf_map_lookup_elem(&decap_counters, &counter);

	if (found)
		(*found)++;
}

static __always_inline int drop(enum decap_counter reason)
{
	count(reason);
	return XDP_DROP;
}

static __always_inline bool read_ipv4(const struct iphdr *ip, const void *data_end, struct ip_fields *fields)
{
	if ((const void *)(ip + 1) > data_end || ip->version != 4 || ip->ihl * 4 < sizeof(*ip))
		return false;
	*fields = (struct ip_fields){
		.source = {{0, 0, bpf_htonl(0xffff), ip->saddr}},
		.destination = {{0, 0, bpf_htonl(0xffff), ip->daddr}},
		.header_length = ip->ihl * 4,
		.length = bpf_ntohs(ip->tot_len),
		.fragment = bpf_ntohs(ip->frag_off) & IP_FRAGMENT_MASK,
		.traffic_class = ip->tos,
		.protocol = ip->protocol,
	};
	return fields->length >= fields->header_length;
}

/* Reads an IPv6 header. A fragment has NEXT_FRAGMENT as its protocol. */
static __always_inline bool read_ipv6(const struct ipv6_header *ip, const void *data_end, struct ip_fields *fields)
{
	__u32 first;

	if ((const void *)(ip + 1) > data_end)
		return false;
	first = bpf_ntohl(ip->version_class_label);
	*fields = (struct ip_fields){
		.header_length = sizeof(*ip),
		.length = bpf_ntohs(ip->payload_length) + sizeof(*ip),
		.traffic_class = first >> 20,
		.protocol = ip->next_header,
		.ipv6 = true,
	};
	__builtin_memcpy(&fields->source, ip->source, sizeof(ip->source));
	__builtin_memcpy(&fields->destination, ip->destination, sizeof(ip->destination));
	return first >> 28 == 6;
}

static __always_inline bool is_gue_port(struct xdp_md *ctx, __u32 udp_at)
{
	__be16 port;

	return !bpf_xdp_load_bytes(ctx, udp_at + __builtin_offsetof(struct udphdr, dest), &port, sizeof(port)) &&
	       port == bpf_htons(GUE_PORT);
}

/* Returns the length of the outer header, or 0 if the packet is not encapsulated. */
static __always_inline __u32 encapsulation_overhead(struct xdp_md *ctx, const struct ip_fields *outer)
{
	if (outer->header_length != ip_header_length(outer->ipv6))
		return 0;
	if (outer->protocol == IPPROTO_IPIP || outer->protocol == IPPROTO_IPV6)
		return outer->header_length;
	/* A later fragment passes for lack of ports. This is harmless, as the kernel never gets the first fragment. */
	if (outer->protocol != IPPROTO_UDP || outer->fragment & IP_FRAGMENT_OFFSET ||
	    !is_gue_port(ctx, ETH_HLEN + outer->header_length))
		return 0;
	return outer->header_length + sizeof(struct udphdr);
}

/* Reads the inner header. Its address family follows from the outer protocol, or after UDP from its first bits. */
static __always_inline bool read_inner(const void *inner, const void *data_end, __u8 outer_protocol,
				       struct ip_fields *fields)
{
	__u8 version;

	if (inner + 1 > data_end)
		return false;
	version = *(const __u8 *)inner >> 4;
	if (version == 4 && outer_protocol != IPPROTO_IPV6)
		return read_ipv4(inner, data_end, fields);
	return version == 6 && outer_protocol != IPPROTO_IPIP && read_ipv6(inner, data_end, fields);
}

/* Returns whether the lengths agree in both packets, the datagram and the frame. */
static __always_inline bool are_lengths_valid(struct xdp_md *ctx, const struct ip_fields *outer,
					      const struct ip_fields *inner, __u32 overhead)
{
	__u32 datagram_at = ETH_HLEN + outer->header_length;
	__be16 length;

	if (outer->length + ETH_HLEN > ctx->data_end - ctx->data || inner->length + overhead != outer->length)
		return false;
	if (outer->protocol != IPPROTO_UDP)
		return true;
	return !bpf_xdp_load_bytes(ctx, datagram_at + __builtin_offsetof(struct udphdr, len), &length,
				   sizeof(length)) &&
	       bpf_ntohs(length) == outer->length - outer->header_length;
}

/* Skips the extension headers at `*at` that load balancers skip, and moves `*at` on. Returns the next protocol. */
static __always_inline __u32 skip_extension_headers(struct xdp_md *ctx, __u32 next, __u32 *at)
{
	struct extension_header header;

	for (int i = 0; i < MAX_EXTENSION_HEADERS && is_extension_header(next); i++) {
		if (bpf_xdp_load_bytes(ctx, *at, &header, sizeof(header)))
			break;
		*at += extension_header_length(next, &header);
		if (next == NEXT_FRAGMENT && fragment_field(&header) >> 3)
			break;
		next = header.next;
	}
	return next;
}

/* Returns whether the inner packet is encapsulated as well. `at` is the inner header's offset in the frame. */
static __always_inline bool is_nested_tunnel(struct xdp_md *ctx, const struct ip_fields *inner, __u32 at)
{
	__u32 protocol = inner->protocol;

	at += inner->header_length;
	if (inner->ipv6)
		protocol = skip_extension_headers(ctx, protocol, &at);
	if (protocol == IPPROTO_UDP)
		return !(inner->fragment & IP_FRAGMENT_OFFSET) && is_gue_port(ctx, at);
	return protocol == IPPROTO_IPIP || protocol == IPPROTO_IPV6 || protocol == IPPROTO_GRE;
}

/* Fills `inner`, and returns 0 or the reason to drop the packet. `overhead` is the length of the outer header. */
static __always_inline __u32 check_encapsulation(struct xdp_md *ctx, const struct ip_fields *outer, __u32 overhead,
						 struct ip_fields *inner)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	__u32 inner_at = overhead;

	if (!bpf_map_lookup_elem(&decap_sources, &outer->source))
		return DECAP_COUNTER_DROP_DECAP_FOREIGN_SOURCE;
	if (outer->fragment)
		return DECAP_COUNTER_DROP_DECAP_FRAGMENT;
	/* Linux 6.1 forgets the bound of a value that is read from the stack again. */
	barrier_var(inner_at);
	inner_at &= OVERHEAD_MASK;
	if (!read_inner(data + ETH_HLEN + inner_at, data_end, outer->protocol, inner) ||
	    !are_lengths_valid(ctx, outer, inner, overhead))
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	if (is_nested_tunnel(ctx, inner, ETH_HLEN + overhead))
		return DECAP_COUNTER_DROP_DECAP_NESTED;
	if (!bpf_map_lookup_elem(&decap_vips, &inner->destination))
		return DECAP_COUNTER_DROP_DECAP_FOREIGN_DESTINATION;
	if ((outer->traffic_class & ECN_MASK) == ECN_CE && !(inner->traffic_class & ECN_MASK))
		return DECAP_COUNTER_DROP_DECAP_CONGESTION;
	return 0;
}

/* Sets CE in the inner header, and in IPv4 updates the header's checksum (RFC 1624, Eqn. 3). */
static __always_inline void mark_congestion(void *ip, bool ipv6)
{
	struct iphdr *inner = ip;
	__u16 *first = ip;
	__u32 sum;

	if (ipv6) {
		/* In IPv6 the traffic class is between version and flow label. */
		*(__u8 *)(ip + 1) |= ECN_CE << 4;
		return;
	}
	sum = (__u16)~inner->check + (__u16) ~*first;
	inner->tos |= ECN_CE;
	sum += *first;
	inner->check = ~fold_checksum(sum);
}

/* Moves the Ethernet header in front of the inner header. Returns 0 or the reason to drop the packet. */
static __always_inline __u32 remove_outer_header(struct xdp_md *ctx, __u32 overhead, bool inner_ipv6, bool congestion)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr header;

	if (data + sizeof(header) > data_end)
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	__builtin_memcpy(&header, data, sizeof(header));
	header.h_proto = bpf_htons(inner_ipv6 ? ETH_P_IPV6 : ETH_P_IP);
	if (bpf_xdp_adjust_head(ctx, overhead))
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + sizeof(header) + sizeof(struct iphdr) > data_end)
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	__builtin_memcpy(data, &header, sizeof(header));
	if (congestion)
		mark_congestion(data + sizeof(header), inner_ipv6);
	return 0;
}

/* Reads the outer header. Returns false for anything but IP. */
static __always_inline bool read_outer(struct xdp_md *ctx, struct ip_fields *outer)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *ethernet = data;

	if ((void *)(ethernet + 1) > data_end)
		return false;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return read_ipv4((void *)(ethernet + 1), data_end, outer);
	return ethernet->h_proto == bpf_htons(ETH_P_IPV6) && read_ipv6((void *)(ethernet + 1), data_end, outer);
}

SEC("xdp")
int decap(struct xdp_md *ctx)
{
	struct ip_fields outer = {}, inner = {};
	__u32 overhead, reason;

	if (!read_outer(ctx, &outer))
		return XDP_PASS;
	overhead = encapsulation_overhead(ctx, &outer);
	if (!overhead)
		return XDP_PASS;
	reason = check_encapsulation(ctx, &outer, overhead, &inner);
	if (!reason)
		reason = remove_outer_header(ctx, overhead, inner.ipv6, (outer.traffic_class & ECN_MASK) == ECN_CE);
	if (reason)
		return drop(reason);
	count(DECAP_COUNTER_DECAPSULATED);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
