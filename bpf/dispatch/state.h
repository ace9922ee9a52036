/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Requests in flight, and the outstanding requests of each worker.
 *
 * One rule keeps the counts exact under concurrency, namely that an entry in `requests` represents one outstanding
 * request. A compare-and-swap inserts the entry, and then the worker's counts grow. A compare-and-swap removes the
 * entry (after a response, or by user space), and then the entry's numbers are subtracted. Only one of several
 * concurrent removals succeeds, so no request is subtracted twice. An entry exists before its datagram is delivered.
 * Between the two steps a count may be off by one for some ns, but sums never drift. (Counts use atomic operations for
 * the same reason.)
 *
 * When four sets (32 requests) are full, a further request is dispatched but not counted, and no entry is overwritten.
 * Without request ids all requests of one client port share the same sets.
 */
#ifndef COREWARD_DISPATCH_STATE_H
#define COREWARD_DISPATCH_STATE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct dispatch_state state SEC(".bss.state") __attribute__((aligned(64)));
/* Set-associative table. User space shares it, because it abandons requests (crates/dataplane/src/dispatch). */
__u64 requests[DISPATCH_REQUESTS] SEC(".bss.requests") __attribute__((aligned(64)));

static __always_inline void count(enum dispatch_counter counter)
{
	__sync_fetch_and_add(&state.counters[counter], 1);
}

/* Returns the work in ns that an entry's or a type's weight encodes
 * (crates/model/src/dispatch/rounded_service_time.rs). */
static __always_inline __u64 weight_ns(__u64 weight)
{
	__u64 mantissa = weight & ((1 << DISPATCH_MANTISSA_BITS) - 1);

	return mantissa << ((weight & DISPATCH_WEIGHT_MASK) >> DISPATCH_MANTISSA_BITS);
}

static __always_inline __u64 request_tag(__u64 hash)
{
	return hash << DISPATCH_TAG_SHIFT | DISPATCH_USED;
}

static __always_inline __u64 *request_set(__u64 hash, __u32 probe)
{
	__u64 set = (hash >> (64 - DISPATCH_SET_BITS)) + probe;

	return &requests[(set & ((1 << DISPATCH_SET_BITS) - 1)) * DISPATCH_WAYS];
}

static __always_inline __u64 entry_age_epochs(__u64 entry, __u64 epoch)
{
	return (epoch - (entry >> DISPATCH_EPOCH_SHIFT)) & DISPATCH_EPOCH_MASK;
}

/*
 * Last dispatched request of a CPU, with the position of its entry. `entry` is 0 if the request has none. The kernel
 * queues a datagram right after it has run the program, on the same CPU with bottom halves off (net/ipv4/udp.c,
 * udp_unicast_rcv_skb). So a datagram that the queue rejects is the last dispatched one.
 */
struct last_dispatched {
	__u64 entry;
	__u32 place;
} __attribute__((aligned(64)));

struct last_dispatched dispatched[DISPATCH_CPUS] SEC(".bss.dispatched") = {};

/* Inserts an entry, and returns its position, or DISPATCH_REQUESTS if the sets are full. */
static __always_inline __u32 insert_request(__u64 hash, __u64 entry)
{
	__u32 probe, way;

	for (probe = 0; probe < DISPATCH_PROBES; probe++) {
		__u64 *set = request_set(hash, probe);

		for (way = 0; way < DISPATCH_WAYS; way++) {
			if (!set[way] && !__sync_val_compare_and_swap(&set[way], 0, entry))
				return &set[way] - requests;
		}
	}
	return DISPATCH_REQUESTS;
}

/* Removes and returns a set's oldest entry that equals `wanted` in the bits of `mask`, or returns 0 without one. */
static __always_inline __u64 take_oldest_match(__u64 *set, __u64 wanted, __u64 mask, __u64 epoch)
{
	__u64 found = 0, age = 0;
	__u32 way, place = 0;

	for (way = 0; way < DISPATCH_WAYS; way++) {
		__u64 entry = set[way];

		if ((entry ^ wanted) & mask)
			continue;
		if (!found || entry_age_epochs(entry, epoch) > age) {
			found = entry;
			age = entry_age_epochs(entry, epoch);
			place = way;
		}
	}
	/* If another CPU has removed the entry since, its request is already accounted for. */
	if (found && __sync_val_compare_and_swap(&set[place & (DISPATCH_WAYS - 1)], found, 0) != found)
		return 0;
	return found;
}

/*
 * Removes and returns the oldest entry that equals `wanted` in the bits of `mask`, or returns 0 without one. A server
 * that answers in order has answered the oldest request.
 */
static __always_inline __u64 remove_request(__u64 hash, __u64 wanted, __u64 mask)
{
	__u64 epoch = state.epoch, found;
	__u32 probe;

	for (probe = 0; probe < DISPATCH_PROBES; probe++) {
		found = take_oldest_match(request_set(hash, probe), wanted, mask, epoch);
		if (found)
			return found;
	}
	return 0;
}

#endif
