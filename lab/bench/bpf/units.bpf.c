/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Costs of single operations in a packet's processing. Each program repeats one of them REPEATS times, in the cache. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "cookie.h"
#include "intf.h"

#define REPEATS 64

struct cache_line {
	__u64 words[8];
};

struct cache_line cells[REPEATS] SEC(".bss.cells");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REPEATS);
	__type(key, __u32);
	__type(value, struct cache_line);
} cell_map SEC(".maps");

/* The memory clobber keeps clang from removing the call. */
static __noinline int call_target(struct xdp_md *ctx)
{
	asm volatile("" ::: "memory");
	return ctx->rx_queue_index;
}

SEC("xdp")
int unit_call(struct xdp_md *ctx)
{
#pragma unroll
	for (int i = 0; i < REPEATS; i++)
		call_target(ctx);
	return XDP_TX;
}

SEC("xdp")
int unit_atomic_add(struct xdp_md *ctx)
{
	(void)ctx;
#pragma unroll
	for (int i = 0; i < REPEATS; i++)
		__sync_fetch_and_add(&cells[i].words[0], 1);
	return XDP_TX;
}

SEC("xdp")
int unit_compare_and_swap(struct xdp_md *ctx)
{
	(void)ctx;
#pragma unroll
	for (int i = 0; i < REPEATS; i++) {
		__u64 old = *(volatile __u64 *)&cells[i].words[0];

		__sync_val_compare_and_swap(&cells[i].words[0], old, old + 1);
	}
	return XDP_TX;
}

/* Look-up in an array map, which is inlined. The index is variable, as in the load balancer's look-ups. */
SEC("xdp")
int unit_look_up(struct xdp_md *ctx)
{
#pragma unroll
	for (int i = 0; i < REPEATS; i++) {
		__u32 index = (ctx->rx_queue_index + i) & (REPEATS - 1);
		struct cache_line *cell = bpf_map_lookup_elem(&cell_map, &index);

		if (!cell)
			return XDP_ABORTED;
		cell->words[0]++;
	}
	return XDP_TX;
}

volatile struct cookie_key cookie_key = {.k0 = 1, .k1 = 2, .vip_factor = 3};

/* Decoding of a cookie's hidden part. Each result is an input of the next operation, so that they cannot overlap. */
SEC("xdp")
int unit_reveal_cookie(struct xdp_md *ctx)
{
	struct cookie_key key = cookie_key;
	__u32 cookie = ctx->rx_queue_index;

#pragma clang loop unroll(disable)
	for (int i = 0; i < REPEATS; i++) {
		__u64 hash = cookie_hash(&key, cookie, i, cookie);

		cookie = reveal(hash, cookie & COOKIE_HIDDEN_MASK, COOKIE_HIDDEN_BITS);
	}
	cells[0].words[0] = cookie;
	return XDP_TX;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
