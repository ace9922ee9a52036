/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The floor under bpf/dispatch.bpf.c: asked which socket gets a datagram, and leaves it to the kernel. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("sk_reuseport")
int empty(struct sk_reuseport_md *ctx)
{
	(void)ctx;
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
