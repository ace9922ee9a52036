/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The next connection's packet, and the measured program: generated_packets.bpf.c (XDP), generated_segments.bpf.c (tc).
 * The essay of generated_packets.bpf.c gives the reasons.
 */
#ifndef COREWARD_BENCH_FEED_H
#define COREWARD_BENCH_FEED_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define PACKET_COUNT (1 << 20)

/* Fields that differ between packets, as in the frame. 16 bytes, four to a cache line. */
struct variation {
	__u32 client_address;
	__u32 ports;
	/* TSecr. */
	__u32 tsecr;
	/* Index in `lines` of generated_packets.bpf.c. */
	__u32 line_index;
};

struct variation packets[PACKET_COUNT] SEC(".bss.packets");
__u64 next_packet;

/* Packets 0 .. packet_index_mask are taken in turn. */
const volatile __u32 packet_index_mask;
/* Offset of the client's address in the frame: that of the source, or of a reply's destination. */
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

	/* Touches what is 256 packets (one page of memory) ahead: hardware prefetching stops at the end of a page. */
	asm volatile("%0 = *(u32 *)(%1 + 0)"
		     : "=r"(ahead)
		     : "r"(&packets[(next_packet + 256) & packet_index_mask & (PACKET_COUNT - 1)]));
	return packet;
}

#endif
