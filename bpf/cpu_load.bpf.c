/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * How long each CPU has been busy, in ns: the time in which it ran a task other than idle. /proc/stat counts in ticks of
 * 10 ms or less well, and /proc/schedstat is not in every kernel.
 *
 * 1. What passes. Every switch from one task to another, on every CPU (tracepoint sched_switch): up to a million a
 *    second on a busy machine, so it does as little as possible: two helpers, one cache line of this CPU's own.
 *
 * 2. What it means. Interrupts and softirqs that strike while a CPU idles count as idle; with some load they run in, or
 *    after, a task's time and count as busy. So a core that does nothing but receive shows too little. (The load that
 *    coreward balances is the applications'.)
 *
 * 3. Reading. User space adds the stretch since the last switch itself, if a task is running (a CPU may run one task
 *    for seconds). It may read between two of the three stores below: it reads since_ns twice and tries again.
 *
 * What can go wrong: at start `running` is not known until a CPU's first switch, and that stretch is lost. CPUs beyond
 * MAX_CPUS are not counted.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* The part of the kernel's struct that is read here; libbpf relocates it to the running kernel's. */
struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

struct cpu_busy_time cpus[MAX_CPUS] __attribute__((aligned(64)));

/* TP_PROTO(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
SEC("tp_btf/sched_switch")
int cpu_load(__u64 *arguments)
{
	struct task_struct *next = (void *)arguments[2];
	__u32 cpu = bpf_get_smp_processor_id();
	struct cpu_busy_time *time;
	__u64 now;

	if (cpu >= MAX_CPUS)
		return 0;
	time = &cpus[cpu];
	now = bpf_ktime_get_ns();
	if (time->running)
		time->busy_ns += now - time->since_ns;
	/* The idle tasks of all CPUs have pid 0. */
	time->running = next->pid != 0;
	barrier();
	time->since_ns = now;
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
