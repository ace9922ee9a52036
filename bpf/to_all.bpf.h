/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Delivery to all servers of a service: to the broadcast MAC address, and the one server that has the socket takes the
 * packet. Rate-limited per service, so that nobody gains an amplifier.
 *
 * Two buckets: packets of connections whose load balancer died come at the connections' full rate for a while, and must
 * not use up what resets and the like need, nor the other way round.
 */
#ifndef COREWARD_TO_ALL_BPF_H
#define COREWARD_TO_ALL_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* One token per interval, and how far the bucket may be overdrawn. Nanoseconds; fixed when the program is loaded. */
struct token_bucket {
	__u64 interval_ns;
	__u64 burst_ns;
};

const volatile struct token_bucket to_all;
/* For packets whose connection table is lost. */
const volatile struct token_bucket to_all_owner_lost;

#define BROADCAST_MAC 0xffffffffffffull

/*
 * The generic cell rate algorithm (ITU-T I.371, Annex A): one word holds the time until which all tokens taken are paid
 * for. Two CPUs at the same moment: the one that loses the exchange is over the rate.
 */
static __always_inline bool take_token(__u64 *paid_until_word, const volatile struct token_bucket *bucket)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 paid_until = *(volatile __u64 *)paid_until_word;
	__u64 start = paid_until > now ? paid_until : now;

	if (start - now > bucket->burst_ns)
		return false;
	return __sync_val_compare_and_swap(paid_until_word, paid_until, start + bucket->interval_ns) == paid_until;
}

#endif
