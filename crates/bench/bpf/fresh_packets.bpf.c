/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Runs another XDP program on a fresh packet each time, so that BPF_PROG_TEST_RUN with many repetitions measures what a
 * stream of different connections costs.
 *
 * 1. Why. A test run with `repeat` gives the program the same memory again and again, as its previous run left it; a
 *    system call per packet costs more than what is measured. So fresh_packet() puts the next connection into the frame
 *    and calls the measured program by a tail call (a direct jump: the index is a constant).
 *
 * 2. What it costs is in every figure, as it is in the floors, which are called the same way: empty() and
 *    parse_and_swap_macs(). Only differences to a floor mean something.
 *
 * 3. The next connection comes from an array that is read from its start to its end: in an order drawn at random by user
 *    space, but at addresses that the CPU prefetches, as it would from a NIC's ring.
 *
 * 4. It writes whole words, those that the measured program will read: a word read that spans a smaller write before it
 *    stalls (no store forwarding), which no packet from a NIC would do.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "parse.bpf.h"

#define PACKETS (1 << 20)

/* What differs between packets, as it stands in the frame. 16 bytes, four to a cache line. */
struct variation {
	__u32 client_address;
	__u32 ports;
	/* TSecr, where NOP NOP TIMESTAMP comes first. */
	__u32 echo;
	__u32 reserved;
};

struct variation packets[PACKETS] SEC(".bss.packets");
__u64 next_packet;

/* Packets 0 .. mask are taken in turn. */
const volatile __u32 mask;
/* First 8 bytes of the frame: the destination MAC address must be restored after each run. */
const volatile __u64 first_word;
/* First packets have their timestamp elsewhere, and no echo. */
const volatile bool write_echo;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} measured SEC(".maps");

SEC("xdp")
int fresh_packet(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	const struct variation *packet = &packets[next_packet++ & mask & (PACKETS - 1)];
	__u64 ahead;

	/* Touches what is 256 packets (one page of memory) ahead: hardware prefetching stops at the end of a page. */
	asm volatile("%0 = *(u32 *)(%1 + 0)" : "=r"(ahead) : "r"(&packets[(next_packet + 256) & mask & (PACKETS - 1)]));
	if (data + USUAL_LENGTH > data_end)
		return XDP_ABORTED;
	PACKET_U64(data, 0) = first_word;
	PACKET_U32(data, IP_AT(saddr)) = packet->client_address;
	PACKET_U32(data, USUAL_TCP) = packet->ports;
	if (write_echo)
		PACKET_U32(data, USUAL_ECHO) = packet->echo;
	bpf_tail_call_static(ctx, &measured, 0);
	return XDP_ABORTED;
}

/* The floor: an XDP program that does nothing. */
SEC("xdp")
int empty(struct xdp_md *ctx)
{
	(void)ctx;
	return XDP_TX;
}

/* The other floor: what any forwarder does, without knowing where to. */
SEC("xdp")
int parse_and_swap_macs(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct ethhdr *ethernet = data;
	struct iphdr *ip = data + sizeof(*ethernet);
	struct tcphdr *tcp = (void *)(ip + 1);
	__u8 mac[ETH_ALEN];

	if ((void *)(tcp + 1) > data_end || ethernet->h_proto != bpf_htons(ETH_P_IP) || ip->ihl != 5 ||
	    ip->protocol != IPPROTO_TCP)
		return XDP_PASS;
	__builtin_memcpy(mac, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, mac, ETH_ALEN);
	return XDP_TX;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
