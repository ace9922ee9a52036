/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Counters of lb.bpf.c by service, and by server for policies. Each receive queue or CPU has its own row, so counting
 * needs no atomic operation and no cache line moves between CPUs (LB_COUNTERS_PER_ROW). New and ended connections,
 * which policies sum up for as long as the maps live, are in the row of the CPU.
 */
#ifndef COREWARD_LB_STATS_H
#define COREWARD_LB_STATS_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* True in generic XDP, where several CPUs may run for one queue. In native XDP one CPU at a time polls a queue. */
const volatile bool counters_by_cpu;

/* Whether a service is captured (capture.h), fixed at load time. */
const volatile bool capture_in_use;

/* Number of rows minus 1, fixed at load time. */
const volatile __u32 counter_row_mask;

/* Counters of services, in one row per receive queue or CPU. User space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, LB_COUNTERS_PER_ROW);
	__type(key, __u32);
	__type(value, struct lb_counters);
} lb_counters SEC(".maps");

static __always_inline __u32 counter_row(struct xdp_md *ctx)
{
	return (counters_by_cpu ? bpf_get_smp_processor_id() : ctx->rx_queue_index) & counter_row_mask;
}

/* Returns this CPU's row, which has no other writer. On a bond two CPUs may serve queues with the same number. */
static __always_inline __u32 cpu_row(void)
{
	return bpf_get_smp_processor_id() & counter_row_mask;
}

/* Returns a service's counters in a row. `service` is an index, or LB_COUNTERS_NO_SERVICE. */
static __always_inline struct lb_counters *counters_at(__u32 row, __u32 service)
{
	__u32 position = row * LB_COUNTERS_PER_ROW + service;

	return bpf_map_lookup_elem(&lb_counters, &position);
}

static __always_inline struct lb_counters *counters_of(struct xdp_md *ctx, __u32 service)
{
	return counters_at(counter_row(ctx), service);
}

static __always_inline void count_packet(struct xdp_md *ctx, __u32 service, enum lb_counter outcome,
					 __u64 forwarded_bytes)
{
	struct lb_counters *counters = counters_of(ctx, service);
	__u32 index = outcome;

	/* Linux 6.1 forgets the bound of a value that is read from the stack again. */
	barrier_var(index);
	if (!counters || index >= LB_COUNTER_COUNT)
		return;
	counters->packets[index]++;
	counters->forwarded_bytes += forwarded_bytes;
	if (capture_in_use)
		counters->last_outcome = outcome;
}

static __always_inline int drop(struct xdp_md *ctx, __u32 service, enum lb_counter reason)
{
	count_packet(ctx, service, reason, 0);
	return XDP_DROP;
}

static __always_inline void count_event(struct xdp_md *ctx, __u32 service, enum lb_event event)
{
	struct lb_counters *counters = counters_of(ctx, service);

	if (counters && event < LB_EVENT_COUNT)
		counters->events[event]++;
}

/* ---- by server ------------------------------------------------------------------------------------------------- */

/* Whether a policy uses packets and bytes per server, fixed at load time. */
const volatile bool traffic_in_use;

/* Traffic by row and server id. User space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SERVER_ID_COUNT);
	__type(key, __u32);
	__type(value, struct server_traffic);
} server_traffic SEC(".maps");

static __always_inline struct server_traffic *traffic_at(__u32 row, __u32 server_id)
{
	__u32 position = row * SERVER_ID_COUNT + server_id;

	return bpf_map_lookup_elem(&server_traffic, &position);
}

static __always_inline void count_traffic(struct xdp_md *ctx, __u32 server_id, __u64 bytes)
{
	struct server_traffic *traffic;

	if (!traffic_in_use)
		return;
	traffic = traffic_at(counter_row(ctx), server_id);
	if (!traffic)
		return;
	traffic->packets++;
	traffic->bytes += bytes;
}

static __always_inline void count_opened(__u32 service, __u32 server_id)
{
	__u32 row = cpu_row();
	struct server_traffic *traffic = traffic_at(row, server_id);
	struct lb_counters *counters = counters_at(row, service);

	if (traffic)
		traffic->opened++;
	if (counters)
		counters->opened++;
}

static __always_inline void count_closed(__u32 server_id)
{
	struct server_traffic *traffic = traffic_at(cpu_row(), server_id);

	if (traffic)
		traffic->closed++;
}

#endif
