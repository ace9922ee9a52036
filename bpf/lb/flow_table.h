/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Flow table, which has the servers of connections without a cookie. crates/model/src/lb/flow.rs is the same in Rust.
 *
 * 1. Layout. The table is an array of sets of 8 entries (include/connections.h). The keyed hash of a connection selects
 *    the set and is the tag. A look-up reads one cache line, and a hit reads a second one for the entry's age. Two
 *    flows of one set with equal tags (31 bits) share an entry, so the second one goes to the first one's server.
 *
 * 2. Eviction is fair between services. In a full set the service with most entries, including the new flow's, loses
 *    its least recently used entry. So a flood at one service evicts only that service's entries. Hints are evicted
 *    first, and evict only hints. Then entries are evicted whose SYN-ACK the client has not acknowledged
 *    (HALF_OPEN_FLOW), as in a SYN flood.
 *
 * 3. Entries. In mode HASH_TABLE every flow is stored. With LB-side stamping every plain (unstamped) connection is
 *    stored once a reply has passed. Other connections without timestamps are stored as hints, which can be forged,
 *    because no reply passes here. If the bucket's server takes no new connections, the SYN's server is stored as a
 *    full entry, since no other state finds it.
 *
 * 4. Time. An entry unused for FLOW_IDLE_* counts as free. The daemon sets the clock.
 *
 * 5. Filter. With LB-side stamping every packet needs a look-up, and few connections are plain. Bits of the hash select
 *    a bit in 16 KiB, which stay in the cache. While the bit is 0, no flow with these hash bits was ever stored, and
 *    the set need not be read. Only a new table clears the bits.
 *
 * 6. Concurrency. A decision depends only on the word `flow`, which is replaced by compare-and-swap. If two CPUs select
 *    the same entry, one of them selects again. `use` is written after `flow`, so for some ns a new entry may look old
 *    and be evicted.
 */
#ifndef COREWARD_LB_FLOW_TABLE_H
#define COREWARD_LB_FLOW_TABLE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "connection_table.h"
#include "parse.h"
#include "state.h"
#include "stats.h"

/* Number of sets, fixed at load time. */
const volatile __u32 flow_set_count;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DEFAULT_FLOW_TABLE_ENTRIES / FLOW_SET_ENTRIES);
	__type(key, __u32);
	__type(value, struct flow_set);
} flow_table SEC(".maps");

_Static_assert(sizeof(struct flow_set) == 128, "two cache lines");
_Static_assert(DEFAULT_FLOW_TABLE_ENTRIES / FLOW_SET_ENTRIES == 1 << FLOW_FILTER_BITS, "a bit for each set");
_Static_assert(FLOW_FILTER_WORDS << FLOW_FILTER_WORD_SHIFT == 1 << FLOW_FILTER_BITS, "its words hold the filter");

static __always_inline struct flow_set *find_flow_set(__u64 hash)
{
	__u32 set = (hash & 0xffffffff) * flow_set_count >> 32;

	return bpf_map_lookup_elem(&flow_table, &set);
}

/* Loads the second cache line of a flow's set while the look-up waits for the first one. */
static __always_inline void prefetch_flow_use(__u64 hash)
{
	const struct flow_set *set = find_flow_set(hash);
	__u64 word;

	if (set)
		asm volatile("%0 = *(u64 *)(%1 + 0)" : "=r"(word) : "r"(&set->use[0]));
}

static __always_inline __u32 flow_tag(__u64 hash)
{
	return hash >> 32 | 1;
}

/* Returns 1 if a number below 2^63 is 0, else 0. The verifier would follow both paths of a branch for each entry. */
static __always_inline __u64 is_zero(__u64 number)
{
	number--;
	barrier_var(number);
	return number >> 63;
}

/* Returns the ticks since an entry's last use, or 0 if another CPU's packet has stored a later tick since. */
static __always_inline __u64 flow_age(__u64 use)
{
	__s64 age = (__s32)(lb_state.clock - (__u32)use), negative = age >> 63;

	barrier_var(negative);
	return age & ~negative;
}

static __always_inline __u64 is_flow_idle(__u64 use)
{
	__u64 limit = FLOW_IDLE_TCP_TICKS - (use >> FLOW_UDP_SHIFT & 1) * (FLOW_IDLE_TCP_TICKS - FLOW_IDLE_UDP_TICKS);

	return (limit - flow_age(use)) >> 63;
}

/*
 * Fills `entry` and returns true if the flow with this connection_hash() is known. The caller initialises `entry`,
 * because clang may spill undefined values, which the verifier rejects.
 */
static __always_inline bool find_flow_by_hash(__u64 hash, struct flow_table_entry *entry)
{
	__u32 tag = flow_tag(hash), now = lb_state.clock;
	struct flow_set *set = find_flow_set(hash);

	if (!set)
		return false;
	for (__u32 i = 0; i < FLOW_SET_ENTRIES; i++) {
		__u64 flow = *(volatile __u64 *)&set->flow[i], use;

		if (flow >> FLOW_TAG_SHIFT != tag)
			continue;
		use = *(volatile __u64 *)&set->use[i];
		if (is_flow_idle(use))
			return false;
		/* Another CPU may have replaced the flow since it was read. */
		if ((__u32)use != now && *(volatile __u64 *)&set->flow[i] == flow)
			*(volatile __u64 *)&set->use[i] = (use >> FLOW_SERVICE_SHIFT << FLOW_SERVICE_SHIFT) | now;
		entry->server_id = flow;
		entry->previous_server = flow >> FLOW_PREVIOUS_SHIFT;
		return true;
	}
	return false;
}

static __always_inline bool find_flow(__u32 service, const struct packet *packet, struct flow_table_entry *entry)
{
	return find_flow_by_hash(connection_hash(service, packet->client_address, packet->ports), entry);
}

static __always_inline __u64 *flow_filter_word(__u64 hash)
{
	__u32 word = (hash & 0xffffffff) >> (32 - FLOW_FILTER_BITS + FLOW_FILTER_WORD_SHIFT);

	/* Kernel 6.1's verifier must see the mask on the register that becomes an index. */
	barrier_var(word);
	return &lb_state.flow_filter[word & (FLOW_FILTER_WORDS - 1)];
}

static __always_inline __u64 flow_filter_bit(__u64 hash)
{
	return 1ull << ((hash & 0xffffffff) >> (32 - FLOW_FILTER_BITS) & (FLOW_FILTER_WORD_BITS - 1));
}

static __always_inline bool is_half_open(struct flow_table_entry entry)
{
	return (entry.previous_server & HALF_OPEN_FLOW_MASK) == HALF_OPEN_FLOW;
}

/*
 * find_flow() for a service with LB-side stamping, where most connections have no entry (section 5). Returns false for
 * a connection that is stamped despite its entry.
 */
static __always_inline bool find_unstamped_flow(__u32 service, const struct packet *packet,
						struct flow_table_entry *entry)
{
	__u64 hash = connection_hash(service, packet->client_address, packet->ports);

	return *(volatile __u64 *)flow_filter_word(hash) & flow_filter_bit(hash) && find_flow_by_hash(hash, entry) &&
	       entry->previous_server != STAMPED_FLOW;
}

static __always_inline __u32 flow_use_service(__u64 use)
{
	return use >> FLOW_SERVICE_SHIFT & 0xffff;
}

/* Bits of flow_rank() in the order of replacement, from the most important on. */
#define FLOW_RANK_SAME_SHIFT 59 /* the entry is of the same flow */
#define FLOW_RANK_FREE_SHIFT 58 /* the entry is free, or has expired */
#define FLOW_RANK_HINT_SHIFT 57
#define FLOW_RANK_COUNT_SHIFT 40 /* number of its service's entries in the set */
#define FLOW_RANK_OWN_SHIFT 39 /* the entry is of the flow's service */
#define FLOW_RANK_HALF_OPEN_SHIFT 38
/* The lower bits are the entry's age and its position. */
#define FLOW_POSITION_BITS 3

_Static_assert(FLOW_SET_ENTRIES == 1 << FLOW_POSITION_BITS, "a position fits its bits");

static __always_inline bool is_set_of_service(const struct flow_set *set, __u32 service)
{
	__u32 others = 0;

	for (__u32 i = 0; i < FLOW_SET_ENTRIES; i++)
		others |= flow_use_service(*(volatile __u64 *)&set->use[i]) ^ service;
	return !others;
}

/*
 * Returns the rank of an entry for replacement by a flow of `service` with `tag`. The highest is replaced (section 2).
 * `alone` is true if all entries of the set are of that service.
 */
static __always_inline __u64 flow_rank(const struct flow_set *set, __u32 position, __u32 tag, __u32 service, bool alone)
{
	__u64 flow = *(volatile __u64 *)&set->flow[position];
	__u64 use = *(volatile __u64 *)&set->use[position];
	__u64 of = flow_use_service(use), own = alone ? 1 : is_zero(of ^ service), count = own;
	__u64 unused = is_zero(flow >> FLOW_TAG_SHIFT) | is_flow_idle(use);

	for (__u32 i = 0; i < FLOW_SET_ENTRIES && !alone; i++)
		count += is_zero(flow_use_service(*(volatile __u64 *)&set->use[i]) ^ of);
	return is_zero(flow >> FLOW_TAG_SHIFT ^ tag) << FLOW_RANK_SAME_SHIFT | unused << FLOW_RANK_FREE_SHIFT |
	       (use >> FLOW_HINT_SHIFT & 1) << FLOW_RANK_HINT_SHIFT | count << FLOW_RANK_COUNT_SHIFT |
	       own << FLOW_RANK_OWN_SHIFT |
	       is_zero((flow >> FLOW_PREVIOUS_SHIFT & HALF_OPEN_FLOW_MASK) ^ HALF_OPEN_FLOW)
		       << FLOW_RANK_HALF_OPEN_SHIFT |
	       flow_age(use);
}

/* Returns the highest rank in the set, with its entry's position in the lowest bits. Of equal ranks the first wins. */
static __always_inline __s64 highest_rank(const struct flow_set *set, __u32 tag, __u32 service, bool alone)
{
	__s64 highest = 0;

	for (__u32 i = 0; i < FLOW_SET_ENTRIES; i++) {
		__u64 of_entry = flow_rank(set, i, tag, service, alone);
		__s64 rank = of_entry << FLOW_POSITION_BITS | (FLOW_SET_ENTRIES - 1 - i);
		__s64 difference = rank - highest, lower = difference >> 63;

		barrier_var(lower);
		highest += difference & ~lower;
	}
	return highest;
}

#define FLOW_INSERT_ATTEMPTS 4

/*
 * Stores a flow, or changes its entry. `entry` has the server's id, and the previous server above it. `hint` is
 * FLOW_HINT or 0. Returns whether it is stored, which a hint is not if it would evict a full entry. A global function,
 * as decide() is.
 */
__noinline int store_flow(__u32 service, const struct packet *packet, __u32 entry, __u32 hint)
{
	struct flow_set *set;
	__u64 hash, use;
	__u32 tag;

	if (!packet)
		return 0;
	hash = connection_hash(service, packet->client_address, packet->ports);
	tag = flow_tag(hash);
	set = find_flow_set(hash);
	if (!set)
		return 0;
	/* The bit is set before the entry. If the entry is not stored, the superfluous bit is harmless. */
	if (!(*(volatile __u64 *)flow_filter_word(hash) & flow_filter_bit(hash)))
		__sync_fetch_and_or(flow_filter_word(hash), flow_filter_bit(hash));
	use = (__u64)(hint & FLOW_HINT) << FLOW_HINT_SHIFT |
	      (__u64)(packet->protocol == IPPROTO_UDP) << FLOW_UDP_SHIFT | (__u64)service << FLOW_SERVICE_SHIFT |
	      lb_state.clock;
	for (int attempt = 0; attempt < FLOW_INSERT_ATTEMPTS; attempt++) {
		__s64 highest = is_set_of_service(set, service) ? highest_rank(set, tag, service, true)
								: highest_rank(set, tag, service, false);
		__u32 position;
		__u64 old;

		if (hint && !(highest >> (FLOW_RANK_HINT_SHIFT + FLOW_POSITION_BITS)))
			return 0;
		position = FLOW_SET_ENTRIES - 1 - (highest & (FLOW_SET_ENTRIES - 1));
		barrier_var(position);
		position &= FLOW_SET_ENTRIES - 1;
		old = *(volatile __u64 *)&set->flow[position];
		if (__sync_val_compare_and_swap(&set->flow[position], old, (__u64)tag << FLOW_TAG_SHIFT | entry) != old)
			continue;
		*(volatile __u64 *)&set->use[position] = use;
		return 1;
	}
	return 0;
}

static __always_inline __u32 flow_entry_word(__u32 server_id, __u32 before)
{
	return before << FLOW_PREVIOUS_SHIFT | server_id;
}

static __always_inline void insert_flow(struct xdp_md *ctx, __u32 service, const struct packet *packet,
					struct flow_table_entry entry, __u32 hint)
{
	if (store_flow(service, packet, flow_entry_word(entry.server_id, entry.previous_server), hint))
		count_event(ctx, service, LB_EVENT_FLOW_INSERTED);
}

/* Marks the flow as open, because the client has acknowledged the SYN-ACK. */
static __always_inline void mark_flow_open(__u32 service, const struct packet *packet, struct flow_table_entry entry)
{
	store_flow(service, packet, flow_entry_word(entry.server_id, NO_SERVER), 0);
}

#endif
