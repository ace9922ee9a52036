/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Writes down on which receive queue, and with which hash, each flow arrived: how the tests see what the emulated RSS
 * really did. Attached at tc ingress of a server's device by the tests only, never by the demo.
 *
 * Every frame passes unchanged. IPv4 with ports leaves one entry per flow, the last frame's; the oldest flows are
 * evicted when the map is full.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u8[RSS_INPUT_IPV4_BYTES]);
	__type(value, struct received_flow);
} received_flows SEC(".maps");

SEC("tc")
int receive_queues(struct __sk_buff *skb)
{
	__u8 flow[RSS_INPUT_IPV4_BYTES];
	struct received_flow received;
	struct iphdr ip;

	if (skb->protocol != bpf_htons(ETH_P_IP) || bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return TC_ACT_UNSPEC;
	if (ip.protocol != IPPROTO_TCP && ip.protocol != IPPROTO_UDP)
		return TC_ACT_UNSPEC;
	__builtin_memcpy(flow, &ip.saddr, 8);
	if (bpf_skb_load_bytes(skb, ETH_HLEN + ip.ihl * 4, flow + 8, 4))
		return TC_ACT_UNSPEC;
	/* The kernel keeps queue + 1; 0 means that no queue was recorded. */
	received.recorded_queue = skb->queue_mapping;
	received.hash = skb->hash;
	bpf_map_update_elem(&received_flows, flow, &received, BPF_ANY);
	/* Not TC_ACT_OK: that would end the chain before programs attached after this one. */
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
