/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Live traffic for the load balancer's native XDP hook (lab/bench/src/xdp/throughput.rs).
 *
 * 1. generate() runs by BPF_PROG_TEST_RUN with BPF_F_TEST_XDP_LIVE_FRAMES. The kernel takes frames from a page pool,
 *    and this program redirects each of them into one end of a veth pair. The XDP program at the other end receives
 *    them in NAPI, as from a NIC.
 *
 * 2. The kernel reuses the pages of returned frames, which keep their old contents. generate() therefore writes the
 *    whole frame.
 *
 * 3. Established packets are read from an array, which user space has shuffled. Clients of new connections never
 *    repeat, so each SYN belongs to an unknown connection.
 *
 * 4. swap_macs() is the baseline, and read_tsecr() also reads a cookie. sink() receives the returned frames.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <bpf/bpf_helpers.h>

#include "lb/parse.h"

#define FRAME_WORDS 10
#define LIVE_PACKET_COUNT (1 << 17)

enum live_packet_kind {
	LIVE_ESTABLISHED,
	LIVE_NEW,
	LIVE_PACKET_KINDS,
};

struct live_frame {
	__u64 words[FRAME_WORDS];
};

struct live_packet {
	__u32 client_address;
	/* Both ports, as at the start of the TCP header. */
	__u32 ports;
	__u32 tsecr;
	/* Value of enum live_packet_kind. */
	__u32 kind;
};

struct live_packet live_packets[LIVE_PACKET_COUNT] SEC(".bss.packets");
__u64 next_packet;

/* Frame for each enum live_packet_kind. User space sets all constants before it loads the program. */
const volatile struct live_frame frames[LIVE_PACKET_KINDS];
/* Index of the device into which frames are redirected. */
const volatile __u32 target_ifindex;

/* A TSecr that no frame has. */
#define NO_TSECR 0xffffffff

#define SOURCE_MASK ((1ull << 48) - 1)

/* Returns the address and port of client `number`. The steps are bijections on 48 bits, so that no client repeats. */
static __always_inline __u64 new_client(__u64 number)
{
	__u64 client = (number * 0x9e3779b97f4a7c15ull) & SOURCE_MASK;

	client ^= client >> 24;
	client = (client * 0xbf58476d1ce4e5b9ull) & SOURCE_MASK;
	return client ^ client >> 24;
}

SEC("xdp")
int generate(struct xdp_md *ctx)
{
	__u64 number = next_packet++;
	const struct live_packet *packet = &live_packets[number & (LIVE_PACKET_COUNT - 1)];
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 kind = packet->kind;

	if (data + sizeof(struct live_frame) > data_end || kind >= LIVE_PACKET_KINDS)
		return XDP_ABORTED;
	for (int i = 0; i < FRAME_WORDS; i++)
		PACKET_U64(data, i * sizeof(__u64)) = frames[kind].words[i];
	if (kind == LIVE_NEW) {
		__u64 client = new_client(number);

		PACKET_U32(data, IP_FIELD_OFFSET(saddr)) = client;
		PACKET_U16(data, FAST_PATH_TCP_OFFSET) = client >> 32;
	} else {
		PACKET_U32(data, IP_FIELD_OFFSET(saddr)) = packet->client_address;
		PACKET_U32(data, FAST_PATH_TCP_OFFSET) = packet->ports;
		PACKET_U32(data, FAST_PATH_TSECR_OFFSET) = packet->tsecr;
	}
	return bpf_redirect(target_ifindex, 0);
}

static __always_inline int swap_macs_and_return(struct ethhdr *ethernet)
{
	__u8 mac[ETH_ALEN];

	__builtin_memcpy(mac, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, mac, ETH_ALEN);
	return XDP_TX;
}

/* Baseline that only swaps the MAC addresses, as any forwarder must do. */
SEC("xdp")
int swap_macs(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	return data + sizeof(struct ethhdr) > data_end ? XDP_PASS : swap_macs_and_return(data);
}

/* Baseline for balancers with cookies, which also read the timestamps from the frame's second cache line. */
SEC("xdp")
int read_tsecr(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (data + sizeof(struct live_frame) > data_end || PACKET_U32(data, FAST_PATH_TSECR_OFFSET) == NO_TSECR)
		return XDP_PASS;
	return swap_macs_and_return(data);
}

SEC("xdp")
int sink(struct xdp_md *ctx)
{
	(void)ctx;
	return XDP_DROP;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
