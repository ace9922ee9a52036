/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Packets of all connections in turn, and the map with the measured program, for generated_packets.bpf.c (XDP) and
 * generated_segments.bpf.c (tc). The first comment of generated_packets.bpf.c gives the reasons.
 */
#ifndef COREWARD_BENCH_FEED_H
#define COREWARD_BENCH_FEED_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define PACKET_COUNT (1 << 20)

/* Fields that differ between packets, in the frame's byte order. Four of these structs fill a cache line. */
struct variation {
	__u32 client_address;
	__u32 ports;
	__u32 tsecr;
	/* Index in `lines` of generated_packets.bpf.c. */
	__u32 line_index;
};

struct variation packets[PACKET_COUNT] SEC(".bss.packets");
__u64 next_packet;

/* Index of the last packet, and mask by which indices wrap. All packets up to it are taken in turn. */
const volatile __u32 packet_index_mask;
/* Offset of the client's address in the frame, which is the source address, or the destination in a reply. */
const volatile __u32 client_offset;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} measured SEC(".maps");

static __always_inline const struct variation *take_packet(void)
{
	const struct variation *packet = &packets[next_packet++ & packet_index_mask & (PACKET_COUNT - 1)];
	__u64 ahead;

	/* Touches memory 256 packets (one page) ahead, because hardware prefetching stops at the end of a page. */
	asm volatile("%0 = *(u32 *)(%1 + 0)"
		     : "=r"(ahead)
		     : "r"(&packets[(next_packet + 256) & packet_index_mask & (PACKET_COUNT - 1)]));
	return packet;
}

#endif
