/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Baselines for the cost of bpf/dispatch/dispatch.bpf.c. `empty` leaves the choice of the socket for a datagram to the
 * kernel, `select_socket` always selects the same socket, and `empty_egress` lets every sent datagram pass.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("sk_reuseport")
int empty(struct sk_reuseport_md *ctx)
{
	(void)ctx;
	return SK_PASS;
}

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} only SEC(".maps");

SEC("sk_reuseport")
int select_socket(struct sk_reuseport_md *ctx)
{
	__u32 slot = 0;

	bpf_sk_select_reuseport(ctx, &only, &slot, 0);
	return SK_PASS;
}

SEC("cgroup_skb/egress")
int empty_egress(struct __sk_buff *skb)
{
	(void)skb;
	return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
