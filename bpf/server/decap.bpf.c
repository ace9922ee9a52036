/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * At a server's NIC, in XDP: removes the outer header from packets of load balancers (bpf/lb/emit.h).
 *
 * 1. Place. Before tc, so that server.bpf.c gets the packets as on a segment without routers. In native mode also
 *    before GRO, which then merges inner TCP segments; in generic mode GRO has merged encapsulated ones.
 *
 * 2. Packets. IPv4 in IPv4, and IPv4 in UDP to GUE_PORT. All others pass. An encapsulated packet can carry any inner
 *    source past a firewall that reads outer addresses, so it must come from a configured load balancer and go to a VIP
 *    of this server. Others are dropped and counted, as are fragments (load balancers set DF), packets whose lengths
 *    contradict each other, and packets with another tunnel inside.
 *
 * 3. Congestion experienced (CE) in the outer header goes to the inner one (RFC 6040, Sect. 4.2).
 *
 * 4. Checksums. The outer UDP checksum is 0. The inner packet keeps its own, and the kernel verifies it.
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
#include "ipv4_header.h"
#include "tunnel.h"

/* Sources of outer headers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_DECAP_SOURCES);
	__type(key, __be32);
	__type(value, __u8);
} decap_sources SEC(".maps");

/* Destinations of inner headers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SERVICES_OF_SERVER);
	__type(key, __be32);
	__type(value, __u8);
} decap_vips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DECAP_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} decap_counters SEC(".maps");

/* RFC 3168, Sect. 5. */
#define ECN_MASK 3
#define ECN_CE 3

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

/* @inner: its fixed header is within the frame. */
static __always_inline bool is_tunnel(const struct iphdr *inner, void *data_end)
{
	const struct udphdr *datagram = (void *)inner + inner->ihl * 4;

	if (inner->protocol == IPPROTO_UDP)
		return !(inner->frag_off & bpf_htons(IP_FRAGMENT_OFFSET)) && (void *)(datagram + 1) <= data_end &&
		       datagram->dest == bpf_htons(GUE_PORT);
	return inner->protocol == IPPROTO_IPIP || inner->protocol == IPPROTO_IPV6 || inner->protocol == IPPROTO_GRE;
}

/* Sets CE in the inner header and updates its checksum (RFC 1624, Eqn. 3). */
static __always_inline void mark_congestion(struct iphdr *inner)
{
	__u16 *first = (__u16 *)inner;
	__u32 sum = (__u16)~inner->check + (__u16) ~*first;

	inner->tos |= ECN_CE;
	sum += *first;
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	inner->check = ~sum;
}

/* Returns the length of the outer header; 0: the packet is not encapsulated. */
static __always_inline __u32 outer_header_length(const struct iphdr *outer, void *data_end)
{
	const struct udphdr *datagram = (void *)(outer + 1);

	if (outer->ihl != sizeof(*outer) / 4)
		return 0;
	if (outer->protocol == IPPROTO_IPIP)
		return IPIP_OVERHEAD;
	/* A later fragment has no ports: the kernel waits in vain for the first one. */
	if (outer->protocol != IPPROTO_UDP || outer->frag_off & bpf_htons(IP_FRAGMENT_OFFSET) ||
	    (void *)(datagram + 1) > data_end || datagram->dest != bpf_htons(GUE_PORT))
		return 0;
	return GUE_OVERHEAD;
}

/* The lengths of both headers, and of the frame, agree. @inner: its fixed header is within the frame. */
static __always_inline bool are_lengths_valid(const struct iphdr *outer, const struct iphdr *inner, __u32 overhead,
					      void *data_end)
{
	__u32 outer_length = bpf_ntohs(outer->tot_len), inner_length = bpf_ntohs(inner->tot_len);
	const struct udphdr *datagram = (void *)(outer + 1);

	if (outer_length > (__u64)(data_end - (void *)outer) || inner_length + overhead != outer_length)
		return false;
	if (outer->protocol == IPPROTO_UDP && bpf_ntohs(datagram->len) != outer_length - sizeof(*outer))
		return false;
	return inner->ihl * 4u >= sizeof(*inner) && inner_length >= inner->ihl * 4u;
}

/* Returns 0 or the reason to drop the packet. @overhead: length of the outer header. */
static __always_inline __u32 check(const struct iphdr *outer, __u32 overhead, void *data_end)
{
	const struct iphdr *inner = (void *)outer + overhead;

	if (!bpf_map_lookup_elem(&decap_sources, &outer->saddr))
		return DECAP_COUNTER_DROP_DECAP_FOREIGN_SOURCE;
	if (outer->frag_off & bpf_htons(IP_FRAGMENT_MASK))
		return DECAP_COUNTER_DROP_DECAP_FRAGMENT;
	if ((void *)(inner + 1) > data_end || inner->version != 4 ||
	    !are_lengths_valid(outer, inner, overhead, data_end))
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	if (is_tunnel(inner, data_end))
		return DECAP_COUNTER_DROP_DECAP_NESTED;
	if (!bpf_map_lookup_elem(&decap_vips, &inner->daddr))
		return DECAP_COUNTER_DROP_DECAP_FOREIGN_DESTINATION;
	if ((outer->tos & ECN_MASK) == ECN_CE && !(inner->tos & ECN_MASK))
		return DECAP_COUNTER_DROP_DECAP_CONGESTION;
	return 0;
}

/* Moves the Ethernet header over the outer header's place. Returns 0 or the reason to drop the packet. */
static __always_inline __u32 remove_outer_header(struct xdp_md *ctx, __u32 overhead)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr header;

	if (data + sizeof(header) > data_end)
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	__builtin_memcpy(&header, data, sizeof(header));
	if (bpf_xdp_adjust_head(ctx, overhead))
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + sizeof(header) > data_end)
		return DECAP_COUNTER_DROP_DECAP_TRUNCATED;
	__builtin_memcpy(data, &header, sizeof(header));
	return 0;
}

SEC("xdp")
int decap(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *ethernet = data;
	struct iphdr *outer = data + sizeof(*ethernet), *inner;
	__u32 overhead, reason;

	if ((void *)(outer + 1) > data_end || ethernet->h_proto != bpf_htons(ETH_P_IP))
		return XDP_PASS;
	overhead = outer_header_length(outer, data_end);
	if (!overhead)
		return XDP_PASS;
	reason = check(outer, overhead, data_end);
	if (reason)
		return drop(reason);
	inner = (void *)outer + overhead;
	if ((void *)(inner + 1) <= data_end && (outer->tos & ECN_MASK) == ECN_CE)
		mark_congestion(inner);
	reason = remove_outer_header(ctx, overhead);
	if (reason)
		return drop(reason);
	count(DECAP_COUNTER_DECAPSULATED);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
