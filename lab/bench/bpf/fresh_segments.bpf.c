/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * fresh_packets.bpf.c for programs at tc: calls the measured program with the next connection in the frame. The essay
 * there gives the reasons.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define SEGMENTS (1 << 20)
#define NANOSECONDS_PER_MS 1000000

/* As `struct variation` of fresh_packets.bpf.c. */
struct variation {
	__u32 client_address;
	__u32 ports;
	/* TSecr; 0 in what a server sends. */
	__u32 echo;
	__u32 unused;
};

struct variation segments[SEGMENTS] SEC(".bss.segments");
__u64 next_segment;

/* Segments 0 .. mask are taken in turn. */
const volatile __u32 mask;
/* Offsets in the frame: of the client's address, the ports, and the timestamp to set. */
const volatile __u32 client_at;
const volatile __u32 ports_at;
const volatile __u32 timestamp_at;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} measured SEC(".maps");

static __always_inline const struct variation *take_segment(void)
{
	const struct variation *segment = &segments[next_segment++ & mask & (SEGMENTS - 1)];
	__u64 ahead;

	/* Hardware prefetching stops at the end of a page: 256 segments. */
	asm volatile("%0 = *(u32 *)(%1 + 0)"
		     : "=r"(ahead)
		     : "r"(&segments[(next_segment + 256) & mask & (SEGMENTS - 1)]));
	return segment;
}

/* Runs the measured program. Returns only if it cannot. */
static __always_inline int call_measured(struct __sk_buff *skb, const struct variation *segment, __u32 timestamp)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;

	if (data + client_at + sizeof(__u32) > data_end || data + ports_at + sizeof(__u32) > data_end ||
	    data + timestamp_at + sizeof(__u32) > data_end)
		return TC_ACT_SHOT;
	*(__u32 *)(data + client_at) = segment->client_address;
	*(__u32 *)(data + ports_at) = segment->ports;
	*(__u32 *)(data + timestamp_at) = timestamp;
	bpf_tail_call_static(skb, &measured, 0);
	return TC_ACT_SHOT;
}

/* A client's segment. */
SEC("tc")
int fresh_request(struct __sk_buff *skb)
{
	const struct variation *segment = take_segment();

	return call_measured(skb, segment, segment->echo);
}

/* A server's: TSval is the clock, or the measured program would leave it alone. */
SEC("tc")
int fresh_answer(struct __sk_buff *skb)
{
	return call_measured(skb, take_segment(), bpf_htonl(bpf_ktime_get_ns() / NANOSECONDS_PER_MS));
}

/* The floor: does nothing. */
SEC("tc")
int empty(struct __sk_buff *skb)
{
	(void)skb;
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
