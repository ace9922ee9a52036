/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Busy time of each CPU in ns: tasks, and the interrupts and softirqs that run while the CPU's task is idle.
 *
 * Interrupts and softirqs during a task count as its time: from one switch to the next the CPU is busy. ksoftirqd
 * and threaded NAPI are tasks. Not counted while idle: the local timer and interrupts between CPUs, which have no
 * generic tracepoint (about 1 us each), and the way into and out of the first handler.
 *
 * Sources that were not taken: /proc/stat has ticks of 10 ms, samples at the timer interrupt on most kernels and does
 * not separate a softirq in a task from one while idle; /proc/schedstat is not in every kernel.
 *
 * The tracepoints fire up to a million times a second, so each does little: one cache line of this CPU, and the clock
 * only where the CPU becomes busy or idle.
 *
 * Limits: at start a CPU counts as idle until its first switch between idle and a task. CPUs from MAX_CPUS on are not
 * counted. A virtual CPU's stolen time counts as time of the task that it interrupts.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Fields of the kernel's struct that are read here; libbpf relocates it to the running kernel's. */
struct task_struct {
	int pid;
} __attribute__((preserve_access_index));

struct cpu_busy_time cpus[MAX_CPUS] __attribute__((aligned(64)));

static __always_inline struct cpu_busy_time *this_cpu(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return cpu < MAX_CPUS ? &cpus[cpu] : NULL;
}

static __always_inline void set_busy(struct cpu_busy_time *time, __u32 busy)
{
	__u64 encoded = time->encoded_busy_ns, now;

	if ((encoded & 1) == busy)
		return;
	now = 2 * bpf_ktime_get_ns();
	/* One store, because user space reads the word at any time. */
	time->encoded_busy_ns = busy ? encoded - now + 1 : encoded + now - 1;
}

/* TP_PROTO(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state) */
SEC("tp_btf/sched_switch")
int task_switch(__u64 *arguments)
{
	struct task_struct *next = (void *)arguments[2];
	struct cpu_busy_time *time = this_cpu();
	__u32 running;

	if (!time)
		return 0;
	/* The idle tasks of all CPUs have pid 0. */
	running = next->pid != 0;
	if (time->running == running)
		return 0;
	time->running = running;
	time->depth = 0;
	set_busy(time, running);
	return 0;
}

/*
 * Interrupts nest in softirqs. `depth` changes before the account is opened and after it was read as open, so a nested
 * interrupt, which leaves `depth` as it was, leaves the account of the outer one alone.
 */
static __always_inline int begin_busy(void)
{
	struct cpu_busy_time *time = this_cpu();

	if (time && !time->running && time->depth++ == 0)
		set_busy(time, 1);
	return 0;
}

static __always_inline int end_busy(void)
{
	struct cpu_busy_time *time = this_cpu();

	/* Depth 0: the interrupt began before this program was attached. */
	if (time && !time->running && time->depth != 0 && --time->depth == 0)
		set_busy(time, 0);
	return 0;
}

SEC("tp_btf/irq_handler_entry")
int interrupt_begins(void *ctx __attribute__((unused)))
{
	return begin_busy();
}

SEC("tp_btf/irq_handler_exit")
int interrupt_ends(void *ctx __attribute__((unused)))
{
	return end_busy();
}

SEC("tp_btf/softirq_entry")
int softirq_begins(void *ctx __attribute__((unused)))
{
	return begin_busy();
}

SEC("tp_btf/softirq_exit")
int softirq_ends(void *ctx __attribute__((unused)))
{
	return end_busy();
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
