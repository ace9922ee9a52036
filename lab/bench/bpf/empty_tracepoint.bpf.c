/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Baseline for the cost of bpf/server/cpu_load.bpf.c: a program that does nothing at each event. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("tp_btf/softirq_entry")
int empty_softirq(void *ctx __attribute__((unused)))
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
