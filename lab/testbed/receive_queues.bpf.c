/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Records on which receive queue, and with which hash, each flow arrived, so that the tests see what the emulated RSS
 * really did. Only the tests attach it, at tc ingress of a server's device, and never the demo.
 *
 * Every frame passes unchanged. Each IPv4 or IPv6 flow with ports has one entry, which describes its last frame. The
 * oldest flows are evicted when the map is full.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv6_header.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	/* Input of RSS. The input of IPv4 is shorter, and zeros follow it. */
	__type(key, __u8[RSS_INPUT_IPV6_BYTES]);
	__type(value, struct received_flow);
} received_flows SEC(".maps");

static __always_inline bool has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP;
}

/* Reads the packet's RSS input. Returns 0 or an error. */
static __always_inline long read_ipv4(struct __sk_buff *skb, __u8 *flow)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || !has_ports(ip.protocol))
		return -1;
	__builtin_memcpy(flow, &ip.saddr, 8);
	return bpf_skb_load_bytes(skb, ETH_HLEN + ip.ihl * 4, flow + 8, 4);
}

static __always_inline long read_ipv6(struct __sk_buff *skb, __u8 *flow)
{
	struct ipv6_header ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || !has_ports(ip.next_header))
		return -1;
	__builtin_memcpy(flow, ip.source, 32);
	return bpf_skb_load_bytes(skb, IPV6_TRANSPORT_OFFSET, flow + 32, 4);
}

SEC("tc")
int receive_queues(struct __sk_buff *skb)
{
	__u8 flow[RSS_INPUT_IPV6_BYTES] = {};
	struct received_flow received;

	if (skb->protocol != bpf_htons(ETH_P_IP) && skb->protocol != bpf_htons(ETH_P_IPV6))
		return TC_ACT_UNSPEC;
	if (skb->protocol == bpf_htons(ETH_P_IP) ? read_ipv4(skb, flow) : read_ipv6(skb, flow))
		return TC_ACT_UNSPEC;
	/* The kernel stores queue + 1, and 0 means that no queue was recorded. */
	received.recorded_queue = skb->queue_mapping;
	received.hash = skb->hash;
	bpf_map_update_elem(&received_flows, flow, &received, BPF_ANY);
	/* TC_ACT_OK would end the chain before programs that are attached after this one. */
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
