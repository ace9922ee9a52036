/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Decoding of a service's number (SERVICE_INDEX_MASK and others in intf.h). The verifier removes modes that no service
 * uses.
 */
#ifndef COREWARD_LB_SERVICE_MODE_H
#define COREWARD_LB_SERVICE_MODE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Modes of all services, as bits 1 << enum consistency, fixed at load time. A change reloads the program. */
const volatile __u32 modes_in_use;
const volatile bool timestamps_off_in_use;
const volatile bool timestamps_lb_in_use;
const volatile bool other_balancer_in_use;
const volatile bool udp_in_use;

#define MODES_WITH_COOKIES (1u << CONSISTENCY_STATELESS | 1u << CONSISTENCY_STATEFUL)

/* A decoded service. `flags` are not decoded further, because BPF has few registers and a small stack. */
struct service {
	/* Index in lb_state.services and in the counters. */
	__u32 index;
	enum consistency consistency;
	/* SERVICE_* bits of the service's number, such as SERVICE_TIMESTAMPS_OFF. */
	__u32 flags;
};

static __always_inline bool is_service(__u32 number)
{
	return number < SERVICE_ADDRESS_ONLY;
}

static __always_inline bool mode_in_use(enum consistency consistency)
{
	return modes_in_use & 1u << consistency;
}

static __always_inline struct service decode_service(__u32 number)
{
	return (struct service){
		.index = number & SERVICE_INDEX_MASK & (MAX_SERVICES - 1),
		.consistency = number >> SERVICE_CONSISTENCY_SHIFT & SERVICE_CONSISTENCY_MASK,
		.flags = number,
	};
}

static __always_inline bool is_lb_stamped(const struct service *service)
{
	return timestamps_lb_in_use && service->flags & SERVICE_TIMESTAMPS_LB;
}

static __always_inline bool has_other_balancer(const struct service *service)
{
	return other_balancer_in_use && service->flags & (SERVICE_ADOPTED | SERVICE_HANDED_OVER);
}

static __always_inline bool is_handed_over(const struct service *service)
{
	return other_balancer_in_use && service->flags & SERVICE_HANDED_OVER;
}

static __always_inline __u32 other_balancer_id(const struct service *service)
{
	return service->flags >> SERVICE_OTHER_BALANCER_SHIFT & (SERVER_ID_COUNT - 1);
}

_Static_assert(CONSISTENCY_STATELESS <= CONSISTENCY_STATEFUL && CONSISTENCY_STATEFUL < CONSISTENCY_NONE,
	       "modes with cookies come first");

static __always_inline bool has_cookies(const struct service *service)
{
	if (is_lb_stamped(service) || (timestamps_off_in_use && service->flags & SERVICE_TIMESTAMPS_OFF))
		return false;
	return !(modes_in_use & ~MODES_WITH_COOKIES) || service->consistency <= CONSISTENCY_STATEFUL;
}

static __always_inline bool is_stateful(const struct service *service)
{
	if (!mode_in_use(CONSISTENCY_STATEFUL))
		return false;
	return modes_in_use == 1u << CONSISTENCY_STATEFUL || service->consistency == CONSISTENCY_STATEFUL;
}

/* Returns whether the flow table has all connections of the service. */
static __always_inline bool has_all_flows(const struct service *service)
{
	return mode_in_use(CONSISTENCY_HASH_TABLE) && service->consistency == CONSISTENCY_HASH_TABLE;
}

/* Returns whether `cookie`, from a packet of the service, holds an index into a connection table. */
static __always_inline bool has_table_index(const struct service *service, __u32 cookie)
{
	return is_stateful(service) && cookie & COOKIE_KIND_BIT;
}

#endif
