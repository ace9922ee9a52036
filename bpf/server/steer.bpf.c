/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Steering: which of a service's listening sockets takes a new connection at a server (sk_reuseport).
 *
 * 1. What passes here. The kernel asks once per SYN, and once per handshake that a SYN cookie completes, which socket of
 *    a SO_REUSEPORT group is to take the connection. Without us it picks by a hash of its own, so that a connection whose
 *    packets RSS delivers to core 2 is served by whichever worker: two cores work for it, and the load that the
 *    controller sees at core 2 is not the load that the connection brings.
 *
 * 2. What is decided. The Toeplitz hash of the 4-tuple and the NIC's indirection table give the receive queue
 *    (rss_mapping.h; the map is the one that server.bpf.c compares with the facts); `socket_of_queue` gives the slot
 *    of the socket whose worker runs where that queue is served. ctx->hash is not the NIC's hash and no receive queue
 *    is visible here, so it is computed again.
 *
 * 3. Both packets of a SYN-cookie handshake get the same answer, since it depends on the 4-tuple alone.
 *
 * 4. What can go wrong. The RSS is not known, the queue has no socket, or the socket was closed a moment ago: counted,
 *    and the kernel picks as it would without us. No connection is refused here.
 *
 * 5. Who else writes. The agent fills `workers` and `socket_of_queue` (crates/dataplane/src/steer.rs); the kernel takes a
 *    socket out of `workers` when it is closed. A program of this type has no link: it lives with the group of sockets it
 *    was attached to, also without the agent.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "rss_mapping.h"

#define ETHERTYPE_IPV4 0x0800

struct steer_state steer_state SEC(".bss.steer");

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, MAX_STEERED_SOCKETS);
	__type(key, __u32);
	__type(value, __u64);
} workers SEC(".maps");

static __always_inline __u32 queue_of(struct sk_reuseport_md *ctx)
{
	void *data = ctx->data;
	void *data_end = ctx->data_end;
	struct {
		__u32 source;
		__u32 destination;
	} addresses;
	__u32 hash;

	if (ctx->eth_protocol != bpf_htons(ETHERTYPE_IPV4) || data + sizeof(__u32) > data_end)
		return QUEUE_UNKNOWN;
	if (bpf_skb_load_bytes_relative(ctx, __builtin_offsetof(struct iphdr, saddr), &addresses, sizeof(addresses),
					BPF_HDR_START_NET))
		return QUEUE_UNKNOWN;
	return predicted_queue(addresses.source, addresses.destination, *(__u32 *)data, &hash);
}

SEC("sk_reuseport")
int steer(struct sk_reuseport_md *ctx)
{
	enum steer_counter outcome = STEER_COUNTER_NO_WORKER;
	__u32 queue = queue_of(ctx);

	if (queue < MAX_STEERED_QUEUES) {
		__u32 slot = steer_state.socket_of_queue[queue];

		/* NO_SOCKET is beyond the map and so finds none. */
		if (!bpf_sk_select_reuseport(ctx, &workers, &slot, 0))
			outcome = STEER_COUNTER_STEERED;
	}
	__sync_fetch_and_add(&steer_state.counters[outcome], 1);
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
