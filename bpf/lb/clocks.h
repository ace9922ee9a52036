/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Clocks of servers that the load balancer stamps for: lb_cookie.h, essay, 1 and 5. */
#ifndef COREWARD_LB_CLOCKS_H
#define COREWARD_LB_CLOCKS_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.h"
#include "placement.h"
#include "state.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_LB_STAMPED_SERVERS);
	__type(key, __u64);
	__type(value, struct lb_stamped_server);
} lb_stamped_servers SEC(".maps");

#define NANOSECONDS_PER_MS 1000000

/* `mac`: 48 bits; the others are ignored. */
static __always_inline struct lb_stamped_server *lb_stamped_server(__u32 service, __u64 mac)
{
	__u64 key = (mac & SERVER_MAC_MASK) | (__u64)service << LB_STAMPED_SERVICE_SHIFT;

	return bpf_map_lookup_elem(&lb_stamped_servers, &key);
}

static __always_inline bool is_verified(const struct lb_stamped_server *server)
{
	return server->agreeing >= LB_STAMPING_AGREEING;
}

/* True: the time is lb_state.clock, for comparisons with the model. */
const volatile bool lb_stamping_by_ticks;

static __always_inline __u32 monotonic_ms(void)
{
	if (lb_stamping_by_ticks)
		return *(volatile __u32 *)&lb_state.clock * 100;
	return bpf_ktime_get_ns() / NANOSECONDS_PER_MS;
}

/* Returns the server's present time by its known clock (ms). */
static __always_inline __u32 clock_of(const struct lb_stamped_server *server)
{
	return monotonic_ms() + server->offset_ms;
}

static __always_inline bool agree(__u32 offset_ms, __u32 other_ms, __u32 tolerance_ms)
{
	return offset_ms - other_ms + tolerance_ms <= 2 * tolerance_ms;
}

/*
 * Learns from a SYN-ACK with TSval `milliseconds`. Of two CPUs one counts. The offset changes only when it is off by
 * half the tolerance: a packet's key follows from it (lb_stamped_value()), and must not alternate.
 */
static __always_inline void learn_clock(struct lb_stamped_server *server, const struct packet *packet,
					__u32 milliseconds)
{
	__u32 offset_ms = milliseconds - monotonic_ms();
	__u32 client = packet->client_address ^ packet->ports;

	if (!server->agreeing || !agree(offset_ms, server->newest_ms, LB_STAMPING_TOLERANCE_MS)) {
		server->disagreed += !!server->agreeing;
		server->agreeing = 1;
	} else if (!is_verified(server) && client != server->newest_client) {
		server->agreeing++;
	}
	server->newest_ms = offset_ms;
	server->newest_client = client;
	if (is_verified(server) &&
	    (!server->has_clock || !agree(offset_ms, server->offset_ms, LB_STAMPING_TOLERANCE_MS / 2))) {
		server->offset_ms = offset_ms;
		server->has_clock = 1;
	}
}

/* Takes the clock from a later answer of a stamped connection, if it is unknown since this load balancer's start. */
static __always_inline void take_clock(struct lb_stamped_server *server, __u32 milliseconds)
{
	if (server->has_clock)
		return;
	server->offset_ms = milliseconds - monotonic_ms();
	server->has_clock = 1;
}

#endif
