/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Runs another XDP program on a new packet each time, so that BPF_PROG_TEST_RUN with many repetitions measures a stream
 * of different connections.
 *
 * 1. Reason. A test run with `repeat` passes the same memory each time, as the previous run left it. A system call per
 *    packet would cost more than the measured program. Therefore generated_packet() writes the next connection into the
 *    frame and calls the measured program by a tail call (which is a direct jump, because the index is a constant).
 *
 * 2. Baselines. The generator's cost is part of every measured time. The baselines empty() and parse_and_swap_macs()
 *    are called in the same way, so only differences from a baseline are meaningful.
 *
 * 3. Order. The connections are read from an array in ascending order. User space has shuffled them, but the CPU can
 *    prefetch the array, like the ring of a NIC.
 *
 * 4. Words. The generator writes the same whole words that the measured program reads. If a read spanned several
 *    smaller writes, the CPU would stall (no store forwarding), which never happens with packets from a NIC.
 *
 * 5. Cost of a cache miss. generated_packet_with_line() also loads one line of `lines`, an array like the connection
 *    table, at the position of the packet's connection. Nothing waits for that line, so its miss overlaps the packet's
 *    work and shows the least cost of a miss. In generated_packet_after_line() the packet's work waits for the line,
 *    which shows the greatest cost.
 *
 * 6. Outer headers. The measured program makes the frame longer in each run. generated_packet_shortened() undoes this
 *    by bpf_xdp_adjust_head(), even if the frame has its old length, and restores the Ethernet header. A difference
 *    from a baseline therefore contains one call of that helper, which is the measured program's.
 *
 * 7. Flood. generated_source() generates a new client's address and port each time.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "feed.h"
#include "floor.h"
#include "lb/parse.h"

/* Zeros, as large as a connection-table entry. User space sets the number of lines to that of the entries. */
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

/* First 8 bytes of the frame, which restore the destination MAC address after each run. */
const volatile __u64 first_word;
/* The next 8 bytes, and the frame's length, which generated_packet_shortened() needs. */
const volatile __u64 second_word;
const volatile __u32 frame_length;
/* Offset of TSecr, or of a reply's TSval. It is restored each time, because stateful services change it in a SYN. */
const volatile __u32 tsecr_offset;
const volatile __u32 ports_offset;
/* Destination port that generated_source() writes, in the upper half of the ports. */
const volatile __u32 destination_port;

/* Writes the client into the frame and runs the measured program. Returns only if this is impossible. */
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
	/* The line is 0, so the XOR changes nothing, but the CPU must wait for the line to know this. */
	return call_measured(ctx, packet->client_address ^ line->words[0], packet->ports, packet->tsecr);
}

SEC("xdp")
int generated_packet_shortened(struct xdp_md *ctx)
{
	const struct variation *packet = take_packet();
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 length = data_end - data;

	/* Without this barrier, clang would subtract 32-bit halves of pointers. */
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

/* Each step is a bijection on 48 bits, so that address and port repeat only after 2^48 packets. */
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

/* Baseline that does nothing. */
SEC("xdp")
int empty(struct xdp_md *ctx)
{
	(void)ctx;
	return XDP_TX;
}

/* Baseline that does the work of any forwarder, but makes no decision. */
SEC("xdp")
int parse_and_swap_macs(struct xdp_md *ctx)
{
	return swap_macs_of_tcp((void *)(long)ctx->data, (void *)(long)ctx->data_end) ? XDP_TX : XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
