/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Look-up of a service's enum forwarding. emit.h writes the frame. */
#ifndef COREWARD_LB_FORWARDING_H
#define COREWARD_LB_FORWARDING_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "state.h"

/* Methods in use, as bits 1 << enum forwarding, fixed at load time. */
const volatile __u32 forwarding_in_use;

#define FORWARDING_BIT(forwarding) (1u << (forwarding))

/* Returns a service's method of forwarding. It reads no memory if all services have the same method. */
static __always_inline enum forwarding service_forwarding(__u32 service)
{
	if (forwarding_in_use == FORWARDING_BIT(FORWARDING_L2))
		return FORWARDING_L2;
	if (forwarding_in_use == FORWARDING_BIT(FORWARDING_IPIP))
		return FORWARDING_IPIP;
	if (forwarding_in_use == FORWARDING_BIT(FORWARDING_GUE))
		return FORWARDING_GUE;
	return *(const volatile __u64 *)&lb_state.services[service & (MAX_SERVICES - 1)].forwarding;
}

#endif
