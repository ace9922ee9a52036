/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What of server.bpf.c outlives the agent's process, and counting there.
 */
#ifndef COREWARD_SERVER_STATE_H
#define COREWARD_SERVER_STATE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct server_state state __attribute__((aligned(64)));

/* MAC addresses of the servers that packets may be handed to, by id; without SERVER_RESOLVED: not known. */
struct server_entry chained_servers[SERVER_ID_COUNT] SEC(".bss.chained");

/* What the counter stands at on this CPU. */
static __always_inline __u64 count(enum server_counter counter)
{
	__u32 row = bpf_get_smp_processor_id() & (MAX_CPUS - 1);

	return ++state.counters[row].packets[counter];
}

#endif
