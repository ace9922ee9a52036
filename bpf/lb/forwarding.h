/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * How packets of a service reach its servers (enum forwarding). emit.h writes the frame.
 */
#ifndef COREWARD_LB_FORWARDING_H
#define COREWARD_LB_FORWARDING_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "state.h"

/* Bits 1 << enum forwarding: the kinds in use. Fixed when the program is loaded. */
const volatile __u32 forwarding_in_use;

#define ONLY(forwarding) (1u << (forwarding))

/* `service`: its index. Reads no memory where all services have one kind. */
static __always_inline enum forwarding forwarding_of(__u32 service)
{
	if (forwarding_in_use == ONLY(FORWARDING_L2))
		return FORWARDING_L2;
	if (forwarding_in_use == ONLY(FORWARDING_IPIP))
		return FORWARDING_IPIP;
	if (forwarding_in_use == ONLY(FORWARDING_GUE))
		return FORWARDING_GUE;
	return *(const volatile __u64 *)&lb_state.services[service & (MAX_SERVICES - 1)].forwarding;
}

#endif
