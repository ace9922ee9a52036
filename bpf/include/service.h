/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Look-up of a packet's service in the perfect hash of intf.h, by one multiplication, one or two loads, and one
 * comparison. The directories are in a global variable, so no map look-up is needed.
 */
#ifndef COREWARD_INCLUDE_SERVICE_H
#define COREWARD_INCLUDE_SERVICE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "service.h is written for little-endian machines");
_Static_assert(__builtin_offsetof(struct service_slot, key.address[3]) % 8 == 0, "a slot's tail is one aligned word");
_Static_assert(__builtin_offsetof(struct service_slot, key.address[1]) % 8 == 0, "so are the 8 bytes before it");
_Static_assert(LB_SERVICE_GROUPS == 1u << (64 - LB_SERVICE_GROUP_SHIFT),
	       "the shift leaves the bits of one group number");
_Static_assert(LB_SERVICE_SLOTS == 1u << (LB_SERVICE_GROUP_SHIFT - LB_SERVICE_SLOT_SHIFT),
	       "slots' bits are below groups'");
_Static_assert(SERVICE_SLOTS == 1u << (64 - SERVICE_SLOT_SHIFT), "the shift leaves the bits of one slot number");

typedef __u64 __attribute__((may_alias)) service_tail;
typedef __u32 __attribute__((may_alias)) service_tail_half;

/* Returns the last 8 bytes of a service_key. Address and port are in network byte order. */
static __always_inline __u64 service_tail_ipv4(__u32 address, __u16 port, __u8 protocol)
{
	return address | (__u64)port << 32 | (__u64)protocol << 48 | (__u64)ADDRESS_FAMILY_IPV4 << 56;
}

/* Key of an IPv6 service, with the parts of struct service_key and the word by which the directory finds the slot. */
struct service_key_ipv6 {
	__u32 first;
	__u64 middle;
	__u64 tail;
	__u64 hashed_word;
};

/*
 * Returns the key of an IPv6 service. `vip` is the address as in the packet. The hashed word combines the tail with the
 * rest of the address. Two services with the same word could not have a directory, which happens by chance once in
 * 2^64.
 */
static __always_inline struct service_key_ipv6 make_service_key_ipv6(const void *vip, __u16 port, __u8 protocol)
{
	const service_tail_half *word = vip;
	struct service_key_ipv6 key = {
		.first = word[0],
		.middle = word[1] | (__u64)word[2] << 32,
		.tail = word[3] | (__u64)port << 32 | (__u64)protocol << 48 | (__u64)ADDRESS_FAMILY_IPV6 << 56,
	};

	key.hashed_word = key.tail ^ key.first * SERVICE_WORD_FIRST_FACTOR ^ key.middle * SERVICE_WORD_MIDDLE_FACTOR;
	return key;
}

static __always_inline bool is_key_ipv6(const struct service_slot *slot, const struct service_key_ipv6 *key)
{
	return *(const service_tail *)&slot->key.address[3] == key->tail &&
	       *(const service_tail *)&slot->key.address[1] == key->middle && slot->key.address[0] == key->first;
}

static __always_inline const struct service_slot *find_lb_service_slot(const struct lb_service_directories *directories,
								       __u64 word)
{
	const struct lb_service_directory *directory = &directories->half[directories->active & 1];
	__u64 hash = word * directory->seed;
	__u32 displacement = directory->displacement[hash >> LB_SERVICE_GROUP_SHIFT];

	return &directory->slots[(hash >> LB_SERVICE_SLOT_SHIFT ^ displacement) & (LB_SERVICE_SLOTS - 1)];
}

/* Returns the load balancer's number of the IPv4 service with that tail, or NO_SERVICE. */
static __always_inline __u32 find_lb_service(const struct lb_service_directories *directories, __u64 tail)
{
	const struct service_slot *slot = find_lb_service_slot(directories, tail);

	return *(const service_tail *)&slot->key.address[3] == tail ? slot->number : NO_SERVICE;
}

static __always_inline __u32 find_lb_service_ipv6(const struct lb_service_directories *directories,
						  const struct service_key_ipv6 *key)
{
	const struct service_slot *slot = find_lb_service_slot(directories, key->hashed_word);

	return is_key_ipv6(slot, key) ? slot->number : NO_SERVICE;
}

static __always_inline const struct service_slot *find_service_slot(const struct service_directories *directories,
								    __u64 word)
{
	const struct service_directory *directory = &directories->half[directories->active & 1];

	return &directory->slots[(word * directory->seed) >> SERVICE_SLOT_SHIFT];
}

/* Returns a server's number of the IPv4 service with that tail, or NO_SERVICE. */
static __always_inline __u32 find_service(const struct service_directories *directories, __u64 tail)
{
	const struct service_slot *slot = find_service_slot(directories, tail);

	return *(const service_tail *)&slot->key.address[3] == tail ? slot->number : NO_SERVICE;
}

static __always_inline __u32 find_service_ipv6(const struct service_directories *directories,
					       const struct service_key_ipv6 *key)
{
	const struct service_slot *slot = find_service_slot(directories, key->hashed_word);

	return is_key_ipv6(slot, key) ? slot->number : NO_SERVICE;
}

#endif
