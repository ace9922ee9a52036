/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Pinned state of server.bpf.c, and its counters. */
#ifndef COREWARD_SERVER_STATE_H
#define COREWARD_SERVER_STATE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct server_state state __attribute__((aligned(64)));

/* MAC addresses of servers for daisy chaining, by id. Without SERVER_RESOLVED the address is unknown. */
struct server_entry chained_servers[SERVER_ID_COUNT] SEC(".bss.chained");

/* Increments a counter, and returns its new value on this CPU. */
static __always_inline __u64 count(enum server_counter counter)
{
	__u32 row = bpf_get_smp_processor_id() & (MAX_CPUS - 1);

	return ++state.counters[row].packets[counter];
}

#endif
