/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The floor under bpf/server/cpu_load.bpf.c: what each event costs with a program that does nothing. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("tp_btf/softirq_entry")
int empty_softirq(void *ctx __attribute__((unused)))
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
