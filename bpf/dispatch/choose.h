/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Policies of dispatch, which crates/model/src/dispatch has in Rust. Of equal workers the first slot is selected, as in
 * Turbo's comparator tree (HPCA'23, Sect. V-A).
 *
 * A scan in four independent chains finds the minimum of up to 64 numbers. It has no branches, because a branch
 * predictor cannot predict queue lengths. The counts of 16 workers are one cache line. A tree, as in Turbo's hardware,
 * would need several CPUs to agree on its inner nodes.
 */
#ifndef COREWARD_DISPATCH_CHOOSE_H
#define COREWARD_DISPATCH_CHOOSE_H

#include "state.h"
#include "least.h"

/* Policy, written before the program is loaded, so that the verifier removes the other policies. */
const volatile __u32 policy = DISPATCH_POLICY_RANDOM;

/* A rank has the slot's number in its low 6 bits, and the compared value above. Ranks are less than 2^63. */
#define RANK_SHIFT 6
#define LANES 4

/* Flags in ranks of jbsrq, which prefers workers that may take the class, and among these workers below their bound. */
#define RANK_OVER_BOUND (1ull << DISPATCH_FLAGS_SHIFT)
#define RANK_NOT_OF_CLASS (1ull << (DISPATCH_FLAGS_SHIFT + 1))
#define RANK_FLAGS_SHIFT (DISPATCH_FLAGS_SHIFT + 2)

/* Returns 1 if a < b, else 0, without a branch. Both numbers are below 2^63. */
static __always_inline __u64 is_less(__u64 a, __u64 b)
{
	return (a - b) >> 63;
}

static __always_inline __u64 slot_rank(__u32 slot, __u32 class)
{
	__u64 rank, outstanding, bound;

	switch (policy) {
	case DISPATCH_POLICY_JLQ:
		rank = state.work[slot];
		break;
	case DISPATCH_POLICY_JBSRQ:
		outstanding = state.outstanding[slot];
		bound = state.bound[class][slot];
		rank = outstanding & DISPATCH_COUNT_MASK;
		rank |= (1 - is_less(rank, bound)) * RANK_OVER_BOUND;
		rank |= is_less(bound, 1) * RANK_NOT_OF_CLASS;
		rank |= outstanding >> DISPATCH_FLAGS_SHIFT << RANK_FLAGS_SHIFT;
		break;
	default:
		rank = state.outstanding[slot];
	}
	return rank << RANK_SHIFT | slot;
}

/* Returns the least rank, with its slot in the low RANK_SHIFT bits. */
static __always_inline __u64 least_slot_rank(__u32 class)
{
	__u64 best[LANES] = {~0ull >> 1, ~0ull >> 1, ~0ull >> 1, ~0ull >> 1};
	__u32 slot, slots = state.slots;
	__u64 idle;

	/* Slots beyond `slots` are empty, and rank behind all others. */
	for (slot = 0; slot < MAX_DISPATCH_WORKERS && slot < slots; slot += LANES) {
		best[0] = min_s64(slot_rank(slot, class), best[0]);
		best[1] = min_s64(slot_rank(slot + 1, class), best[1]);
		best[2] = min_s64(slot_rank(slot + 2, class), best[2]);
		best[3] = min_s64(slot_rank(slot + 3, class), best[3]);
		/* An idle worker has the least possible rank, so the first one ends the search. */
		idle = is_less(best[0], 1 << RANK_SHIFT) | is_less(best[1], 1 << RANK_SHIFT) |
		       is_less(best[2], 1 << RANK_SHIFT) | is_less(best[3], 1 << RANK_SHIFT);
		asm volatile("" : "+r"(idle));
		if (idle)
			break;
	}
	return min_s64(min_s64(best[0], best[1]), min_s64(best[2], best[3]));
}

/* Repeats the search after the selected worker has died. It is not inlined, because this case is rare. */
static __noinline __u64 next_best(__u32 class)
{
	return least_slot_rank(class & (MAX_DISPATCH_CLASSES - 1));
}

static __always_inline __u32 worker_at(__u32 position)
{
	return state.order[position & (MAX_DISPATCH_WORKERS - 1)];
}

/*
 * Returns the slot for a request of `class`. `hash` is the kernel's hash of the client's address and port. `over_bound`
 * is set if every permitted worker is at its bound.
 */
static __always_inline __u32 choose_slot(__u32 class, __u32 hash, bool *over_bound)
{
	__u32 count = state.order_count;
	__u64 rank;

	if (policy == DISPATCH_POLICY_RANDOM && count)
		/* The selection is that of reuseport_select_sock_by_hash in net/core/sock_reuseport.c. */
		return worker_at((__u64)hash * count >> 32);
	if (policy == DISPATCH_POLICY_RR && count)
		return worker_at(__sync_fetch_and_add(&state.turn, 1) % count);
	rank = least_slot_rank(class);
	if (policy == DISPATCH_POLICY_JSQ)
		*over_bound = (rank >> RANK_SHIFT & DISPATCH_COUNT_MASK) >= state.bound[0][0];
	if (policy == DISPATCH_POLICY_JBSRQ)
		*over_bound = rank & RANK_OVER_BOUND << RANK_SHIFT;
	return rank & (MAX_DISPATCH_WORKERS - 1);
}

#endif
