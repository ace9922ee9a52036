/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What a service's number says at the load balancer: its index, and how its packets find their server (intf.h,
 * SERVICE_INDEX_MASK and so on). What no service uses is not compiled in.
 */
#ifndef COREWARD_LB_SERVICE_MODE_H
#define COREWARD_LB_SERVICE_MODE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Bits 1 << enum consistency: those that any service has. Fixed when the program is loaded; a change loads it anew. */
const volatile __u32 modes_in_use;
/* A service has SERVICE_TIMESTAMPS_OFF. */
const volatile bool timestamps_off_in_use;
/* A service has SERVICE_TIMESTAMPS_LB. */
const volatile bool timestamps_lb_in_use;
/* A service has SERVICE_ADOPTED or SERVICE_HANDED_OVER. */
const volatile bool other_balancer_in_use;
/* A service is of UDP. */
const volatile bool udp_in_use;

#define MODES_WITH_COOKIES (1u << CONSISTENCY_STATELESS | 1u << CONSISTENCY_STATEFUL)

static __always_inline bool is_service(__u32 number)
{
	return number < SERVICE_ADDRESS_ONLY;
}

static __always_inline __u32 service_index(__u32 number)
{
	return number & SERVICE_INDEX_MASK & (MAX_SERVICES - 1);
}

static __always_inline bool mode_is(__u32 number, enum consistency consistency)
{
	if (!(modes_in_use & 1u << consistency))
		return false;
	return modes_in_use == 1u << consistency ||
	       (number >> SERVICE_CONSISTENCY_SHIFT & SERVICE_CONSISTENCY_MASK) == consistency;
}

/* Whether the load balancer itself stamps and restores: correction.h. */
static __always_inline bool is_corrected(__u32 number)
{
	return timestamps_lb_in_use && number & SERVICE_TIMESTAMPS_LB;
}

/* Whether another load balancer has some of the service's connections, and which: its id among the servers. */
static __always_inline bool has_other_balancer(__u32 number)
{
	return other_balancer_in_use && number & (SERVICE_ADOPTED | SERVICE_HANDED_OVER);
}

static __always_inline bool is_handed_over(__u32 number)
{
	return other_balancer_in_use && number & SERVICE_HANDED_OVER;
}

static __always_inline __u32 other_balancer(__u32 number)
{
	return number >> SERVICE_OTHER_BALANCER_SHIFT & (SERVER_ID_COUNT - 1);
}

/* Whether the timestamps of the service's packets carry a cookie that a server stamped. */
static __always_inline bool has_cookies(__u32 number)
{
	if (is_corrected(number))
		return false;
	if (timestamps_off_in_use && number & SERVICE_TIMESTAMPS_OFF)
		return false;
	if (!(modes_in_use & ~MODES_WITH_COOKIES))
		return true;
	return mode_is(number, CONSISTENCY_STATELESS) || mode_is(number, CONSISTENCY_STATEFUL);
}

#endif
