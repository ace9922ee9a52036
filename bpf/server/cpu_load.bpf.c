/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Busy time of each CPU in ns, by tasks, and by interrupts and softirqs while the CPU's task is idle.
 *
 * Interrupts and softirqs during a task count as its time, because the CPU is busy from one task switch to the next.
 * ksoftirqd and threaded NAPI are tasks. Two kinds of time are not counted while the CPU is idle. One is the local
 * timer and interrupts between CPUs (about 1 us each), which have no generic tracepoint. The other is the entry into
 * the first handler and the exit from it.
 *
 * Other sources are less exact. /proc/stat has ticks of 10 ms, samples at the timer interrupt on most kernels, and does
 * not separate softirqs during a task from softirqs while idle. /proc/schedstat is not in every kernel.
 *
 * The tracepoints fire up to a million times a second, so each program does little. It uses one cache line of this CPU,
 * and reads the clock only when the CPU becomes busy or idle.
 *
 * Limits. At start a CPU counts as idle until its first switch between idle and a task. CPUs from MAX_CPUS on are not
 * counted. A virtual CPU's stolen time counts as time of the task that it interrupts.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Fields of the kernel's struct that are read here. libbpf relocates them to the running kernel's layout. */
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
	/* The word is written by one store, because user space reads it at any time. */
	time->encoded_busy_ns = busy ? encoded - now + 1 : encoded + now - 1;
}

/* Arguments: bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state. */
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
	if (time->is_task_running == running)
		return 0;
	time->is_task_running = running;
	time->depth = 0;
	set_busy(time, running);
	return 0;
}

/*
 * Begins an interrupt or softirq while the CPU is idle. Handlers nest, and only the outermost handler changes the busy
 * time. For this, `depth` grows before the busy period begins, and a nested handler restores `depth` before it returns.
 */
static __always_inline int begin_busy(void)
{
	struct cpu_busy_time *time = this_cpu();

	if (time && !time->is_task_running && time->depth++ == 0)
		set_busy(time, 1);
	return 0;
}

static __always_inline int end_busy(void)
{
	struct cpu_busy_time *time = this_cpu();

	/* Depth 0 means that the interrupt began before this program was attached. */
	if (time && !time->is_task_running && time->depth != 0 && --time->depth == 0)
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
