/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Counting what lb.bpf.c did: per service without an atomic operation or a helper (see struct lb_counter_row), and per
 * server, what policies need.
 */
#ifndef COREWARD_STATS_BPF_H
#define COREWARD_STATS_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "state.bpf.h"

/* Native XDP: the receive queue is polled by one CPU at a time. Generic XDP: several CPUs may run for one queue. */
const volatile bool counters_by_cpu;

/* Rows - 1. Fixed when the program is loaded. */
const volatile __u32 counter_row_mask;

/* A row of LB_COUNTERS_PER_ROW for each receive queue or CPU: user space sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, LB_COUNTERS_PER_ROW);
	__type(key, __u32);
	__type(value, struct lb_counters);
} lb_counters SEC(".maps");

/* `service`: an index, or LB_COUNTERS_NO_SERVICE. */
static __always_inline struct lb_counters *counters_of(struct xdp_md *ctx, __u32 service)
{
	__u32 row = (counters_by_cpu ? bpf_get_smp_processor_id() : ctx->rx_queue_index) & counter_row_mask;
	__u32 position = row * LB_COUNTERS_PER_ROW + service;

	return bpf_map_lookup_elem(&lb_counters, &position);
}

static __always_inline void count_packet(struct xdp_md *ctx, __u32 service, enum lb_counter outcome,
					 __u64 forwarded_bytes)
{
	struct lb_counters *counters = counters_of(ctx, service);

	if (!counters || outcome >= LB_COUNTER_COUNT)
		return;
	counters->packets[outcome]++;
	counters->forwarded_bytes += forwarded_bytes;
	counters->last_outcome = outcome;
}

static __always_inline void count_event(struct xdp_md *ctx, __u32 service, enum lb_event event)
{
	struct lb_counters *counters = counters_of(ctx, service);

	if (counters && event < LB_EVENT_COUNT)
		counters->events[event]++;
}

/* ---- by server ------------------------------------------------------------------------------------------------- */

/* Packets and bytes per server are wanted: a policy goes by them. Fixed when the program is loaded. */
const volatile bool traffic_in_use;

/* By server id, as `servers`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SERVER_ID_COUNT);
	__type(key, __u32);
	__type(value, struct server_traffic);
} server_traffic SEC(".maps");

static __always_inline struct server_traffic *traffic_of(__u32 server_id)
{
	return bpf_map_lookup_elem(&server_traffic, &server_id);
}

/* A packet of `bytes` goes to a server. Several CPUs may count for the same one. */
static __always_inline void count_traffic(__u32 server_id, __u64 bytes)
{
	struct server_traffic *traffic;

	if (!traffic_in_use)
		return;
	traffic = traffic_of(server_id);
	if (!traffic)
		return;
	__sync_fetch_and_add(&traffic->packets, 1);
	__sync_fetch_and_add(&traffic->bytes, bytes);
}

static __always_inline void count_opened(__u32 service, __u32 server_id)
{
	struct server_traffic *traffic = traffic_of(server_id);

	if (traffic)
		__sync_fetch_and_add(&traffic->opened, 1);
	__sync_fetch_and_add(&lb_state.services[service & (MAX_SERVICES - 1)].opened, 1);
}

static __always_inline void count_closed(__u32 server_id)
{
	struct server_traffic *traffic = traffic_of(server_id);

	if (traffic)
		__sync_fetch_and_add(&traffic->closed, 1);
}

#endif
