/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Broadcast fallback, which sends a packet to the broadcast MAC address. The server that has the socket accepts it.
 *
 * Broadcasts are limited per source address (hashed buckets), per service and for the whole load balancer (struct
 * broadcast_buckets), so that they are no amplifier. Each enum limited_kind has separate rates, so that a flood of
 * forged cookies does not affect resets and ICMP errors.
 *
 * A source above its rate may still use the first half of the service's and the load balancer's burst. Otherwise
 * packets with a router's forged address would suppress that router's ICMP errors.
 */
#ifndef COREWARD_LB_BROADCAST_H
#define COREWARD_LB_BROADCAST_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "connection_table.h"

/* Rate limit, as the interval between two tokens and the maximum overdraft, both in ns. */
struct token_bucket {
	__u64 interval_ns;
	__u64 burst_ns;
};

/* Rates by enum limited_kind, fixed at load time. */
const volatile struct token_bucket broadcast_per_source[LIMITED_KIND_SLOTS];
const volatile struct token_bucket broadcast_per_service[LIMITED_KIND_SLOTS];
const volatile struct token_bucket broadcast_total[LIMITED_KIND_SLOTS];

struct broadcast_buckets broadcast SEC(".bss.broadcast");

_Static_assert(LIMITED_KIND_COUNT <= LIMITED_KIND_SLOTS, "each reason has a slot");

#define BROADCAST_MAC 0xffffffffffffull

/*
 * Takes a token by the generic cell rate algorithm (ITU-T I.371, Annex A). One word holds the time at which all taken
 * tokens will be refilled. If two CPUs compete, the CPU whose exchange fails gets no token. The burst is halved
 * `halvings` times.
 */
static __always_inline bool take_token(__u64 *paid_until_word, const volatile struct token_bucket *bucket, __u64 now,
				       __u32 halvings)
{
	__u64 paid_until_ns = *(volatile __u64 *)paid_until_word;
	__u64 start = paid_until_ns > now ? paid_until_ns : now;

	if (start - now > bucket->burst_ns >> halvings)
		return false;
	return __sync_val_compare_and_swap(paid_until_word, paid_until_ns, start + bucket->interval_ns) ==
	       paid_until_ns;
}

/* Returns whether a packet from `source` may be broadcast. This is a global function, as decide() is. */
__noinline int take_rate_tokens(__u32 service, __u32 source, __u32 reason)
{
	__u64 hash = connection_hash(service, source, reason);
	__u64 now = bpf_ktime_get_ns();
	__u32 halvings;

	/* Kernel 6.1's verifier must see the masks on the registers that become indexes. */
	barrier_var(reason);
	reason &= LIMITED_KIND_SLOTS - 1;
	barrier_var(service);
	service &= MAX_SERVICES - 1;
	halvings = !take_token(&broadcast.per_source[hash & (BROADCAST_SHARDS - 1)], &broadcast_per_source[reason], now,
			       0);
	return take_token(&broadcast.per_service[service][reason], &broadcast_per_service[reason], now, halvings) &&
	       take_token(&broadcast.total[reason], &broadcast_total[reason], now, halvings);
}

#endif
