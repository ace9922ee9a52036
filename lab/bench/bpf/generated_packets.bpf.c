/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Runs another XDP program on a new packet each time, so that BPF_PROG_TEST_RUN with many repetitions measures a stream
 * of different connections.
 *
 * 1. Reason. A test run with `repeat` passes the same memory each time, as the previous run left it; a system call per
 *    packet costs more than the measured program. So generated_packet() writes the next connection into the frame
 *    and calls the measured program by a tail call (a direct jump: the index is a constant).
 *
 * 2. Its cost is in every figure and in the floors empty() and parse_and_swap_macs(), which are called the same way.
 *    Only differences to a floor are meaningful.
 *
 * 3. The next connection is read from an array in order: the order of connections is random (by user space), but the
 *    addresses are prefetched by the CPU, as from a NIC's ring.
 *
 * 4. It writes whole words, those that the measured program will read: a word read that spans a smaller write before it
 *    stalls (no store forwarding), which no packet from a NIC would do.
 *
 * 5. Cost of a cache miss. generated_packet_with_line() also loads one line of `lines`, an array like the connection
 *    table, at the position of the packet's connection. Nothing waits for that line, so its miss overlaps the packet's
 *    work: the least cost of a miss. In generated_packet_after_line() the packet's work waits for the line: the
 *    greatest cost.
 *
 * 6. Outer headers. The measured program makes the frame longer, once more in each run. generated_packet_shortened()
 *    first calls bpf_xdp_adjust_head(), also after a program that left the frame as it was, and restores the Ethernet
 *    header. So a difference to a floor has one call of that helper, the measured program's.
 *
 * 7. A flood. generated_source() draws a new client's address and port each time.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "feed.h"
#include "floor.h"
#include "lb/parse.h"

/* All 0. As large as an entry of the connection table, and as many: user space sets the number. */
struct cache_line {
	__u64 words[8];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cache_line);
} lines SEC(".maps");

/* First 8 bytes of the frame: the destination MAC address must be restored after each run. */
const volatile __u64 first_word;
/* The next 8 bytes, and the frame's length: for generated_packet_shortened(). */
const volatile __u64 second_word;
const volatile __u32 frame_length;
/* Offset of TSecr, or of a reply's TSval. Restored each time: first packets of stateful services leave with another. */
const volatile __u32 tsecr_offset;
/* Offset of the ports. */
const volatile __u32 ports_offset;
/* Upper half of `ports` from generated_source(). */
const volatile __u32 destination_port;

/* Runs the measured program on the frame with that client. Returns only if it cannot. */
static __always_inline int call_measured(struct xdp_md *ctx, __u32 client_address, __u32 ports, __u32 tsecr)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (data + FAST_PATH_LENGTH > data_end || data + tsecr_offset + sizeof(tsecr) > data_end ||
	    data + client_offset + sizeof(client_address) > data_end || data + ports_offset + sizeof(ports) > data_end)
		return XDP_ABORTED;
	PACKET_U64(data, 0) = first_word;
	PACKET_U32(data, client_offset) = client_address;
	PACKET_U32(data, ports_offset) = ports;
	PACKET_U32(data, tsecr_offset) = tsecr;
	bpf_tail_call_static(ctx, &measured, 0);
	return XDP_ABORTED;
}

SEC("xdp")
int generated_packet(struct xdp_md *ctx)
{
	const struct variation *packet = take_packet();

	return call_measured(ctx, packet->client_address, packet->ports, packet->tsecr);
}

SEC("xdp")
int generated_packet_with_line(struct xdp_md *ctx)
{
	const struct variation *packet = take_packet();
	__u32 index = packet->line_index;
	const struct cache_line *line = bpf_map_lookup_elem(&lines, &index);
	__u64 word;

	if (!line)
		return XDP_ABORTED;
	asm volatile("%0 = *(u64 *)(%1 + 0)" : "=r"(word) : "r"(line));
	return call_measured(ctx, packet->client_address, packet->ports, packet->tsecr);
}

SEC("xdp")
int generated_packet_after_line(struct xdp_md *ctx)
{
	const struct variation *packet = take_packet();
	__u32 index = packet->line_index;
	const volatile struct cache_line *line = bpf_map_lookup_elem(&lines, &index);

	if (!line)
		return XDP_ABORTED;
	/* The line holds 0, which the CPU learns from memory only. */
	return call_measured(ctx, packet->client_address ^ line->words[0], packet->ports, packet->tsecr);
}

SEC("xdp")
int generated_packet_shortened(struct xdp_md *ctx)
{
	const struct variation *packet = take_packet();
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 length = data_end - data;

	/* Or clang subtracts 32-bit halves of pointers. */
	barrier_var(length);
	if (bpf_xdp_adjust_head(ctx, (int)length - (int)frame_length))
		return XDP_ABORTED;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + 2 * sizeof(__u64) > data_end)
		return XDP_ABORTED;
	PACKET_U64(data, sizeof(__u64)) = second_word;
	return call_measured(ctx, packet->client_address, packet->ports, packet->tsecr);
}

#define SOURCE_MASK ((1ull << 48) - 1)

/* Steps that are one to one in 48 bits: address and port repeat after 2^48 packets. */
SEC("xdp")
int generated_source(struct xdp_md *ctx)
{
	__u64 source = next_packet++;

	source = (source * 0x9e3779b97f4a7c15ull) & SOURCE_MASK;
	source ^= source >> 24;
	source = (source * 0xbf58476d1ce4e5b9ull) & SOURCE_MASK;
	source ^= source >> 24;
	return call_measured(ctx, source, (source >> 32 & 0xffff) | destination_port, 0);
}

/* The floor: an XDP program that does nothing. */
SEC("xdp")
int empty(struct xdp_md *ctx)
{
	(void)ctx;
	return XDP_TX;
}

/* The other floor: the work of any forwarder, without a decision. */
SEC("xdp")
int parse_and_swap_macs(struct xdp_md *ctx)
{
	return swap_macs_of_tcp((void *)(long)ctx->data, (void *)(long)ctx->data_end) ? XDP_TX : XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
