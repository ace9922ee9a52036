/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * EMULATION of receive-side scaling (RSS) for the testbed's virtual Ethernet. No coreward process needs this program;
 * on a real server the NIC does its work.
 *
 * Runs at tc egress of the switch's port toward one server, the last hop before that server. (Not on the load
 * balancer's own device: XDP_TX skips tc. This is why a bridge connects load balancer and servers.)
 *
 * Every frame reaches the server unchanged. For IPv4 the program computes the Toeplitz hash over addresses and ports
 * (TCP and UDP) or over addresses only (other protocols, and all fragments, as NICs do), looks up the indirection table
 * and stores both as a NIC's driver does: skb->hash, and queue_mapping = queue + 1 ("receive queue recorded").
 * Everything else goes to queue 0.
 *
 * Why + 2: netdev_pick_tx() (net/core/dev.c) takes queue_mapping as receive queue + 1 and makes queue_mapping - 1 the
 * port's transmit queue; veth_xmit() (drivers/net/veth.c) leaves that number in place, and since Linux 5.17 does not
 * call skb_record_rx_queue() itself. So what we write arrives less 1. The port has one transmit queue more than the
 * server has receive queues, so that the last one still fits. Where the server has rings (TestbedOptions::rings) its device
 * has one receive queue more, too: veth_xmit() takes the number for a ring's, and ring 0 is never used.
 *
 * Limits: the kernel folds a queue that the device does not have modulo the number of queues (skb_tx_hash()). While the
 * agent writes new registers some frames may meet a mixture of old and new, as on a real NIC. "Registers" that were
 * never written (entry_count 0) send everything to queue 0.
 *
 * The hash is the XOR of one table entry per byte of input: Toeplitz is linear. A loop over the input's bits would make
 * the verifier fork at every bit, beyond its limit of a million instructions.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "server/rss_input.h"

#define TCP_FLAGS_OFFSET 13
#define TCP_SYN 0x02
#define IPV4_FRAGMENT_BITS 0x3fff /* "more fragments" and the offset; not "don't fragment" */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct emulated_rss);
} registers SEC(".maps");

/* For a frame of an open TCP connection: the shift of its entry. */
static __always_inline __u32 established_shift(struct __sk_buff *skb, const struct emulated_rss *rss,
					       const struct iphdr *ip)
{
	__u8 flags;

	if (!rss->established_shift || ip->protocol != IPPROTO_TCP ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + ip->ihl * 4 + TCP_FLAGS_OFFSET, &flags, sizeof(flags)))
		return 0;
	return flags & TCP_SYN ? 0 : rss->established_shift;
}

static __always_inline int to_queue(struct __sk_buff *skb, __u32 queue)
{
	skb->queue_mapping = queue + 2;
	return TC_ACT_OK;
}

SEC("tc")
int rss_emulation(struct __sk_buff *skb)
{
	/* Source address, destination address, source port, destination port. */
	__u8 input[RSS_INPUT_IPV4_BYTES] = {};
	struct emulated_rss *rss;
	struct iphdr ip;
	__u32 zero = 0, hash = 0, entry;
	int i;

	rss = bpf_map_lookup_elem(&registers, &zero);
	if (!rss || !rss->mapping.entry_count || skb->protocol != bpf_htons(ETH_P_IP))
		return to_queue(skb, 0);
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return to_queue(skb, 0);

	__builtin_memcpy(input, &ip.saddr, RSS_INPUT_ADDRESS_BYTES);
	if ((ip.protocol == IPPROTO_TCP || ip.protocol == IPPROTO_UDP) &&
	    !(ip.frag_off & bpf_htons(IPV4_FRAGMENT_BITS))) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + ip.ihl * 4, input + RSS_INPUT_ADDRESS_BYTES,
				       RSS_INPUT_IPV4_BYTES - RSS_INPUT_ADDRESS_BYTES))
			return to_queue(skb, 0);
	}

	/* Without ports the last four bytes are 0, and a zero byte adds nothing to the hash. */
	transform_rss_input(rss->mapping.input_transform, input);
#pragma unroll
	for (i = 0; i < RSS_INPUT_IPV4_BYTES; i++)
		hash ^= rss->mapping.byte[i][input[i]];

	entry = (hash + established_shift(skb, rss, &ip)) & (rss->mapping.entry_count - 1) &
		(MAX_INDIRECTION_ENTRIES - 1);
	bpf_set_hash(skb, hash);
	return to_queue(skb, rss->mapping.queue[entry]);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
