/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Look-up of a packet's service: one multiplication, a load or two, one compare (the perfect hash of intf.h). No map
 * look-up: the directories are in a global variable.
 */
#ifndef COREWARD_INCLUDE_SERVICE_H
#define COREWARD_INCLUDE_SERVICE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "service.h is written for little-endian machines");
_Static_assert(__builtin_offsetof(struct service_slot, key.address[3]) % 8 == 0, "a slot's tail is one aligned word");
_Static_assert(LB_SERVICE_GROUPS == 1u << (64 - LB_SERVICE_GROUP_SHIFT),
	       "the shift leaves the bits of one group number");
_Static_assert(LB_SERVICE_SLOTS == 1u << (LB_SERVICE_GROUP_SHIFT - LB_SERVICE_SLOT_SHIFT),
	       "slots' bits are below groups'");
_Static_assert(SERVICE_SLOTS == 1u << (64 - SERVICE_SLOT_SHIFT), "the shift leaves the bits of one slot number");

typedef __u64 __attribute__((may_alias)) service_tail;

/* The last 8 bytes of a service_key. Address and port in network byte order, as the packet has them. */
static __always_inline __u64 service_tail_ipv4(__u32 address, __u16 port, __u8 protocol)
{
	return address | (__u64)port << 32 | (__u64)protocol << 48 | (__u64)ADDRESS_FAMILY_IPV4 << 56;
}

/* Returns the number of the service with that tail at the load balancer, or NO_SERVICE. */
static __always_inline __u32 find_lb_service(const struct lb_service_directories *directories, __u64 tail)
{
	const struct lb_service_directory *directory = &directories->half[directories->active & 1];
	__u64 hash = tail * directory->seed;
	__u32 displacement = directory->displacement[hash >> LB_SERVICE_GROUP_SHIFT];
	const struct service_slot *slot;

	slot = &directory->slots[(hash >> LB_SERVICE_SLOT_SHIFT ^ displacement) & (LB_SERVICE_SLOTS - 1)];
	return *(const service_tail *)&slot->key.address[3] == tail ? slot->number : NO_SERVICE;
}

/* Returns the number of the service with that tail on a server, or NO_SERVICE. */
static __always_inline __u32 find_service(const struct service_directories *directories, __u64 tail)
{
	const struct service_directory *directory = &directories->half[directories->active & 1];
	const struct service_slot *slot = &directory->slots[(tail * directory->seed) >> SERVICE_SLOT_SHIFT];

	return *(const service_tail *)&slot->key.address[3] == tail ? slot->number : NO_SERVICE;
}

#endif
