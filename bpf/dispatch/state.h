/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Requests in flight, and what each worker has outstanding.
 *
 * One rule keeps the counts exact under concurrency: an entry in `requests` represents one outstanding request. Its
 * insertion by compare-and-swap adds it to its worker's counts; its removal by compare-and-swap (a response, or user
 * space) subtracts what the entry recorded. Only one of several concurrent attempts succeeds, so nothing is subtracted
 * twice, and an entry exists before its datagram is delivered. Between the two steps a count may be off by one for some
 * ns; sums never drift. (Counts use atomic operations for the same reason.)
 *
 * When four sets (32 requests) are full, a further request is dispatched without being counted, so that the response of
 * a counted one finds its entry. Without request ids all requests of one client's port share the same sets.
 */
#ifndef COREWARD_DISPATCH_STATE_H
#define COREWARD_DISPATCH_STATE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct dispatch_state state SEC(".bss.state") __attribute__((aligned(64)));
/* Set-associative. Shared with user space, which gives requests up (crates/dataplane/src/dispatch). */
__u64 requests[DISPATCH_REQUESTS] SEC(".bss.requests") __attribute__((aligned(64)));

static __always_inline void count(enum dispatch_counter counter)
{
	__sync_fetch_and_add(&state.counters[counter], 1);
}

/* ns of an entry's or a type's weight; crates/model/src/dispatch/weight.rs. */
static __always_inline __u64 weight_ns(__u64 weight)
{
	__u64 mantissa = weight & ((1 << DISPATCH_MANTISSA_BITS) - 1);

	return mantissa << ((weight & DISPATCH_WEIGHT_MASK) >> DISPATCH_MANTISSA_BITS);
}

static __always_inline __u64 tag_of(__u64 hash)
{
	return hash << DISPATCH_TAG_SHIFT | DISPATCH_USED;
}

static __always_inline __u64 *set_of(__u64 hash, __u32 probe)
{
	__u64 set = (hash >> (64 - DISPATCH_SET_BITS)) + probe;

	return &requests[(set & ((1 << DISPATCH_SET_BITS) - 1)) * DISPATCH_WAYS];
}

static __always_inline __u64 age_of(__u64 entry, __u64 epoch)
{
	return (epoch - (entry >> DISPATCH_EPOCH_SHIFT)) & DISPATCH_EPOCH_MASK;
}

/*
 * By CPU: the entry of the request that was dispatched there last, and where it is. The kernel queues a
 * datagram right after it has asked for the socket, on the same CPU with bottom halves off (net/ipv4/udp.c,
 * udp_unicast_rcv_skb), so a datagram that the queue does not take is this one. Entry 0: it has none.
 */
struct dispatched {
	__u64 entry;
	__u32 place;
} __attribute__((aligned(64)));

struct dispatched dispatched[DISPATCH_CPUS] SEC(".bss.dispatched") = {};

/* Returns the position of the new entry; DISPATCH_REQUESTS: no room. */
static __always_inline __u32 put(__u64 hash, __u64 entry)
{
	__u32 probe, way;

	for (probe = 0; probe < DISPATCH_PROBES; probe++) {
		__u64 *set = set_of(hash, probe);

		for (way = 0; way < DISPATCH_WAYS; way++) {
			if (!set[way] && !__sync_val_compare_and_swap(&set[way], 0, entry))
				return &set[way] - requests;
		}
	}
	return DISPATCH_REQUESTS;
}

/* Removes and returns the oldest entry of a set with these bits; 0: there is none. */
static __always_inline __u64 take_from(__u64 *set, __u64 wanted, __u64 mask, __u64 epoch)
{
	__u64 found = 0, age = 0;
	__u32 way, place = 0;

	for (way = 0; way < DISPATCH_WAYS; way++) {
		__u64 entry = set[way];

		if ((entry ^ wanted) & mask)
			continue;
		if (!found || age_of(entry, epoch) > age) {
			found = entry;
			age = age_of(entry, epoch);
			place = way;
		}
	}
	/* Another CPU may have taken it meanwhile: the response's request is accounted for then. */
	if (found && __sync_val_compare_and_swap(&set[place & (DISPATCH_WAYS - 1)], found, 0) != found)
		return 0;
	return found;
}

/*
 * Removes and returns the oldest entry with these bits; 0: there is none. A server that answers in order has answered
 * the oldest.
 */
static __always_inline __u64 take(__u64 hash, __u64 wanted, __u64 mask)
{
	__u64 epoch = state.epoch, found;
	__u32 probe;

	for (probe = 0; probe < DISPATCH_PROBES; probe++) {
		found = take_from(set_of(hash, probe), wanted, mask, epoch);
		if (found)
			return found;
	}
	return 0;
}

#endif
