/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Calls a measured tc program with the next connection in the frame. generated_packets.bpf.c does the same for XDP, and
 * its first comment gives the reasons.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "feed.h"
#include "floor.h"

#define NANOSECONDS_PER_MS 1000000

/* Offsets of the ports and of the timestamp that is set. */
const volatile __u32 ports_offset;
const volatile __u32 timestamp_offset;

/* Writes the packet into the frame and runs the measured program. Returns only if this is impossible. */
static __always_inline int call_measured(struct __sk_buff *skb, const struct variation *packet, __u32 timestamp)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;

	if (data + client_offset + sizeof(__u32) > data_end || data + ports_offset + sizeof(__u32) > data_end ||
	    data + timestamp_offset + sizeof(__u32) > data_end)
		return TC_ACT_SHOT;
	*(__u32 *)(data + client_offset) = packet->client_address;
	*(__u32 *)(data + ports_offset) = packet->ports;
	*(__u32 *)(data + timestamp_offset) = timestamp;
	bpf_tail_call_static(skb, &measured, 0);
	return TC_ACT_SHOT;
}

/* Generates a client's segment. */
SEC("tc")
int generated_request(struct __sk_buff *skb)
{
	const struct variation *packet = take_packet();

	return call_measured(skb, packet, packet->tsecr);
}

/* Generates a server's segment. TSval is the present time, because the measured program stamps no other value. */
SEC("tc")
int generated_response(struct __sk_buff *skb)
{
	return call_measured(skb, take_packet(), bpf_htonl(bpf_ktime_get_ns() / NANOSECONDS_PER_MS));
}

/* Baseline that does nothing. */
SEC("tc")
int empty(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_UNSPEC;
}

/* Baseline that does the work of any forwarder, but makes no decision. */
SEC("tc")
int parse_and_swap_macs(struct __sk_buff *skb)
{
	return swap_macs_of_tcp((void *)(long)skb->data, (void *)(long)skb->data_end) ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
