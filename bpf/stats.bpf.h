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

/* Native XDP: the receive queue is polled by one CPU at a time. Generic XDP: several CPUs may run for one queue. */
const volatile bool counters_by_cpu;

struct lb_counter_row counter_rows[LB_COUNTER_ROWS] SEC(".bss.counters");

/* `service`: an index, or LB_COUNTERS_NO_SERVICE. */
static __always_inline struct lb_counters *counters_of(struct xdp_md *ctx, __u32 service)
{
	__u32 row = (counters_by_cpu ? bpf_get_smp_processor_id() : ctx->rx_queue_index) & (LB_COUNTER_ROWS - 1);

	if (service > LB_COUNTERS_NO_SERVICE)
		return NULL;
	return &counter_rows[row].service[service];
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

/* At service index * SERVER_ID_COUNT + server id, as in `servers`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_SERVICES *SERVER_ID_COUNT);
	__type(key, __u32);
	__type(value, struct server_traffic);
} server_traffic SEC(".maps");

static __always_inline struct server_traffic *traffic_of(__u32 service, __u32 server_id)
{
	__u32 position = (service & (MAX_SERVICES - 1)) * SERVER_ID_COUNT + (server_id & (SERVER_ID_COUNT - 1));

	return bpf_map_lookup_elem(&server_traffic, &position);
}

/* A packet of `bytes` goes to a server. Several CPUs may count for the same one. */
static __always_inline void count_traffic(__u32 service, __u32 server_id, __u64 bytes)
{
	struct server_traffic *traffic;

	if (!traffic_in_use)
		return;
	traffic = traffic_of(service, server_id);
	if (!traffic)
		return;
	__sync_fetch_and_add(&traffic->packets, 1);
	__sync_fetch_and_add(&traffic->bytes, bytes);
}

static __always_inline void count_opened(__u32 service, __u32 server_id)
{
	struct server_traffic *traffic = traffic_of(service, server_id);

	if (traffic)
		__sync_fetch_and_add(&traffic->opened, 1);
}

static __always_inline void count_closed(__u32 service, __u32 server_id)
{
	struct server_traffic *traffic = traffic_of(service, server_id);

	if (traffic)
		__sync_fetch_and_add(&traffic->closed, 1);
}

#endif
