/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Writes down on which receive queue, and with which hash, each flow arrived: how the tests see what the emulated RSS
 * really did. Attached at tc ingress of a server's device by the tests only, never by the demo.
 *
 * Every frame passes unchanged. IPv4 and IPv6 with ports leave one entry per flow, the last frame's; the oldest flows
 * are evicted when the map is full.
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
	/* Input of RSS; behind that of IPv4 zeros. */
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
	/* The kernel keeps queue + 1; 0 means that no queue was recorded. */
	received.recorded_queue = skb->queue_mapping;
	received.hash = skb->hash;
	bpf_map_update_elem(&received_flows, flow, &received, BPF_ANY);
	/* Not TC_ACT_OK: that would end the chain before programs attached after this one. */
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
