/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Steering (sk_reuseport), which selects the listening socket for a new connection at a server.
 *
 * 1. Calls. The kernel calls this program once per SYN, and once per handshake that a SYN cookie completes, to select a
 *    socket of a SO_REUSEPORT group. Without the program a hash selects, so that any worker may serve a connection
 *    whose packets RSS delivers, for example, to core 2. Then two cores work for the connection, and the load of core 2
 *    does not include all of its work.
 *
 * 2. Decision. The Toeplitz hash of the 4-tuple and the NIC's indirection table give the receive queue (rss_mapping.h,
 *    a map that server.bpf.c verifies). `socket_of_queue` gives the slot of the socket whose worker runs on the queue's
 *    CPU. The queue is computed, because ctx->hash is not the NIC's hash, and the context lacks the receive queue.
 *
 * 3. Both packets of a SYN-cookie handshake get the same answer, since it depends on the 4-tuple alone.
 *
 * 4. Errors. If the RSS configuration is unknown, the queue has no socket, or the socket was closed, the connection is
 *    counted, and the kernel selects the socket. No connection is rejected here.
 *
 * 5. The agent fills `workers` and `socket_of_queue` (crates/dataplane/src/steer.rs), and the kernel removes closed
 *    sockets from `workers`. A program of this type has no link. It lives as long as its group of sockets, even without
 *    the agent.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv6_header.h"
#include "rss_mapping.h"

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd

struct steer_state steer_state SEC(".bss.steer");

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, MAX_STEERED_SOCKETS);
	__type(key, __u32);
	__type(value, __u64);
} workers SEC(".maps");

static __always_inline __u32 queue_of_ipv4(struct sk_reuseport_md *ctx, __u32 ports)
{
	struct {
		__u32 source;
		__u32 destination;
	} addresses;
	__u32 hash;

	if (bpf_skb_load_bytes_relative(ctx, __builtin_offsetof(struct iphdr, saddr), &addresses, sizeof(addresses),
					BPF_HDR_START_NET))
		return QUEUE_UNKNOWN;
	return predict_queue_ipv4(addresses.source, addresses.destination, ports, &hash);
}

static __always_inline __u32 queue_of_ipv6(struct sk_reuseport_md *ctx, __u32 ports)
{
	struct flow_key flow = {.client_port = ports, .vip_port = ports >> 16};
	__u32 hash;

	/* Source and destination are adjacent in IPv4 and IPv6 headers. */
	if (bpf_skb_load_bytes_relative(ctx, __builtin_offsetof(struct ipv6_header, source), &flow,
					sizeof(flow.client_address) + sizeof(flow.vip_address), BPF_HDR_START_NET))
		return QUEUE_UNKNOWN;
	return predict_queue_ipv6(&flow, &hash);
}

static __always_inline __u32 predict_packet_queue(struct sk_reuseport_md *ctx)
{
	void *data = ctx->data;
	void *data_end = ctx->data_end;

	if (data + sizeof(__u32) > data_end)
		return QUEUE_UNKNOWN;
	if (ctx->eth_protocol == bpf_htons(ETHERTYPE_IPV4))
		return queue_of_ipv4(ctx, *(__u32 *)data);
	return ctx->eth_protocol == bpf_htons(ETHERTYPE_IPV6) ? queue_of_ipv6(ctx, *(__u32 *)data) : QUEUE_UNKNOWN;
}

SEC("sk_reuseport")
int steer(struct sk_reuseport_md *ctx)
{
	enum steer_counter outcome = STEER_COUNTER_NO_WORKER;
	__u32 queue = predict_packet_queue(ctx);

	if (queue < MAX_STEERED_QUEUES) {
		__u32 slot = steer_state.socket_of_queue[queue];

		/* NO_SOCKET is beyond the map, so it selects no socket. */
		if (!bpf_sk_select_reuseport(ctx, &workers, &slot, 0))
			outcome = STEER_COUNTER_STEERED;
	}
	__sync_fetch_and_add(&steer_state.counters[outcome], 1);
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
