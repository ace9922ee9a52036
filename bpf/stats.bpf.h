/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Counting what lb.bpf.c did, per service, without an atomic operation or a helper: see struct lb_counter_row.
 */
#ifndef COREWARD_STATS_BPF_H
#define COREWARD_STATS_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Native XDP: the receive queue is polled by one CPU at a time. Generic XDP: several CPUs may run for one queue. */
const volatile bool counters_by_cpu;

struct lb_counter_row counter_rows[LB_COUNTER_ROWS] SEC(".bss.counters");

/* `service`: an index, or LB_COUNTERS_NO_SERVICE. */
static __always_inline void count_packet(struct xdp_md *ctx, __u32 service, enum lb_counter outcome,
					 __u64 forwarded_bytes)
{
	__u32 row = (counters_by_cpu ? bpf_get_smp_processor_id() : ctx->rx_queue_index) & (LB_COUNTER_ROWS - 1);
	struct lb_counters *counters;

	if (service > LB_COUNTERS_NO_SERVICE || outcome >= LB_COUNTER_COUNT)
		return;
	counters = &counter_rows[row].service[service];
	counters->packets[outcome]++;
	counters->forwarded_bytes += forwarded_bytes;
}

#endif
