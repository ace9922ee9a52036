/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Time part of the cookie, converted from and to the server's own TSval by the clock and by the PAWS clamp
 * (server.bpf.c, "The clock" and "The PAWS clamp"). crates/model/src/tsval_clamp.rs has the same code for one
 * connection, with proofs.
 */
#ifndef COREWARD_SERVER_COOKIE_TIME_H
#define COREWARD_SERVER_COOKIE_TIME_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "state.h"

#define NANOSECONDS_PER_MS 1000000
/* Maximum age of a TSval on the plain clock in a packet without a socket. SYN cookies need 64 ms. */
#define MONOTONIC_CLOCK_WINDOW_MS 1000

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_CLAMPED_TIMESTAMPS);
	__type(key, struct flow_key);
	__type(value, struct clamped_timestamp);
} held_timestamps SEC(".maps");

/* A time part to send, and the server's own TSval for it, which selects the fleet's key. */
struct time_part {
	__u32 sent;
	__u32 original_tsval;
};

static __always_inline __u32 clock_ms(void)
{
	return bpf_ktime_get_ns() / NANOSECONDS_PER_MS;
}

/* Returns whether a packet's TSval is CLOCK_MONOTONIC in ms. Used for packets that belong to no established socket. */
static __always_inline bool is_monotonic_clock(__u32 milliseconds)
{
	return clock_ms() + RESTORE_SLACK_MS - milliseconds < MONOTONIC_CLOCK_WINDOW_MS;
}

/* Returns the connection's group by multiplicative hashing (Knuth, TAOCP 3, Sect. 6.4). A collision costs a look-up. */
static __always_inline __u32 clamp_group(const struct flow_key *flow)
{
	__u32 client = flow->client_address[1] ^ flow->client_address[3] ^ flow->client_port;

	return (client * 2654435769u) >> (32 - CLAMP_GROUP_BITS);
}

/*
 * Returns whether a packet of the group was clamped recently. Then an entry may matter although TSecr is newer than
 * MAX_STEP_MS (TSecr may have been restored to slightly after now). The comparison is signed, because another CPU's
 * clock may be a millisecond ahead.
 */
static __always_inline bool is_recently_clamped(__u32 group, __u32 milliseconds)
{
	return (__s32)(milliseconds - state.last_clamp_tsval_ms[group]) <= (__s32)(MAX_STEP_MS + RESTORE_SLACK_MS);
}

/*
 * Applies the PAWS clamp, which replaces time->sent for the server's own TSval time->original_tsval. The client's last
 * TSecr was restored to `last_tsecr`.
 */
static __noinline void apply_tsval_clamp(const struct segment *segment, __u32 last_tsecr, struct time_part *time)
{
	struct clamped_timestamp *held = bpf_map_lookup_elem(&held_timestamps, &segment->flow), next = {};
	__u32 milliseconds = time->original_tsval, group = clamp_group(&segment->flow);
	__u16 recent = last_tsecr;

	if (held && held->confirmed && held->original == last_tsecr) {
		recent = held->sent;
	} else if (held && held->original_before == last_tsecr) {
		/* The client has not returned the clamped value, or its TSecr is still between ingress and TCP. */
		time->sent = held->sent;
		time->original_tsval = held->original;
		state.last_clamp_tsval_ms[group] = milliseconds;
		count(SERVER_COUNTER_TSVAL_CLAMPED);
		return;
	}
	/* Distance from the client's value to now, including overflows of the 16 bits. */
	if ((__u16)(last_tsecr - recent) + (milliseconds - last_tsecr) < MAX_STEP_MS)
		return;
	next.sent = recent + MAX_STEP_MS;
	next.sent_before = recent;
	next.original = milliseconds;
	next.original_before = last_tsecr;
	bpf_map_update_elem(&held_timestamps, &segment->flow, &next, BPF_ANY);
	time->sent = next.sent;
	state.last_clamp_tsval_ms[group] = milliseconds;
	count(SERVER_COUNTER_TSVAL_CLAMPED);
}

/*
 * Returns the time part to send for the server's own TSval `milliseconds`. The client's last TSecr was restored to
 * `last_tsecr`, or to 0 if there is none.
 */
static __always_inline struct time_part select_time(const struct segment *segment, __u32 milliseconds, __u32 last_tsecr)
{
	struct time_part time = {.sent = milliseconds, .original_tsval = milliseconds};
	__u32 elapsed = milliseconds - last_tsecr;
	__u32 group = clamp_group(&segment->flow);

	/* A restored value is never ahead by more than the slack. A TSecr further ahead was forged and is ignored. */
	if (last_tsecr && (__s32)(elapsed + RESTORE_SLACK_MS) >= 0 &&
	    (elapsed >= MAX_STEP_MS || is_recently_clamped(group, milliseconds)))
		apply_tsval_clamp(segment, last_tsecr, &time);
	return time;
}

/* Returns the server's latest own TSval with these low 16 bits that is not later than now + RESTORE_SLACK_MS. */
static __always_inline __u32 restore_time_by_clock(__u16 time, __u32 now)
{
	__u32 reference = now + RESTORE_SLACK_MS;

	return reference - (__u16)(reference - time);
}

/* Returns the server's own TSval of a time part that may be clamped. */
static __noinline __u32 restore_time_by_clamp(const struct segment *segment, __u32 now, __u32 time_bits)
{
	struct clamped_timestamp *held = bpf_map_lookup_elem(&held_timestamps, &segment->flow);
	__u16 time = time_bits, step, behind;

	if (!held)
		return restore_time_by_clock(time, now);
	if (held->sent == time) {
		if (!held->confirmed) {
			held->confirmed = 1;
			count(SERVER_COUNTER_TSVAL_CLAMP_CONFIRMED);
		}
		return held->original;
	}
	if (held->confirmed) {
		/* The client has returned a TSval after the clamped one, so the clock decides again. */
		bpf_map_delete_elem(&held_timestamps, &segment->flow);
		return restore_time_by_clock(time, now);
	}
	/* The TSval was sent before the clamped one, so less than MAX_STEP_MS after the client's previous TSecr. */
	step = time - held->sent_before;
	behind = held->original_before - held->sent_before;
	if (step == 0)
		return held->original_before;
	if (step >= behind && step < MAX_STEP_MS)
		return held->original_before + (step - behind);
	return restore_time_by_clock(time, now);
}

/* Returns the server's own TSval of a TSecr's time part. It is never 0, which the kernel reads as "no TSecr". */
static __always_inline __u32 restore_tsval(const struct segment *segment, __u16 time)
{
	__u32 now = clock_ms(), group = clamp_group(&segment->flow);
	__u32 original = is_recently_clamped(group, now) ? restore_time_by_clamp(segment, now, time)
							 : restore_time_by_clock(time, now);

	return original ? original : -1u;
}

#endif
