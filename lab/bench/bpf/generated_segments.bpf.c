/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * generated_packets.bpf.c for programs at tc: calls the measured program with the next connection in the frame. The
 * essay there gives the reasons.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "feed.h"
#include "floor.h"

#define NANOSECONDS_PER_MS 1000000

/* Offsets in the frame: of the ports, and of the timestamp to set. */
const volatile __u32 ports_offset;
const volatile __u32 timestamp_offset;

/* Runs the measured program. Returns only if it cannot. */
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

/* A client's segment. */
SEC("tc")
int generated_request(struct __sk_buff *skb)
{
	const struct variation *packet = take_packet();

	return call_measured(skb, packet, packet->tsecr);
}

/* A server's: TSval is the clock, or the measured program would leave it alone. */
SEC("tc")
int generated_response(struct __sk_buff *skb)
{
	return call_measured(skb, take_packet(), bpf_htonl(bpf_ktime_get_ns() / NANOSECONDS_PER_MS));
}

/* The floor: does nothing. */
SEC("tc")
int empty(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_UNSPEC;
}

/* The other floor. */
SEC("tc")
int parse_and_swap_macs(struct __sk_buff *skb)
{
	return swap_macs_of_tcp((void *)(long)skb->data, (void *)(long)skb->data_end) ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
