/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Where a connection's first packet goes: PlacementTable::choose() of crates/model/src/placement.rs, decision by
 * decision, on the half of the double buffer that is active.
 *
 * place() reads service_state.active_half once and then only that half: user space refills the other one after an RCU
 * grace period, so a decision never mixes two tables.
 */
#ifndef COREWARD_PLACEMENT_BPF_H
#define COREWARD_PLACEMENT_BPF_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.bpf.h"
#include "service_mode.bpf.h"
#include "toeplitz.bpf.h"

/*
 * The rules that any table may use, as bits. Fixed when the program is loaded: what is not in use is not compiled in,
 * and with one rule nothing is compared. A change loads the program anew.
 */
const volatile __u32 rules_in_use;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_SERVICES * 2);
	__type(key, __u32);
	__type(value, struct placement_table);
} placement_tables SEC(".maps");

struct server_entry servers[MAX_SERVICES * SERVER_ID_COUNT] SEC(".bss.servers");
__u64 recent_first_packets[RECENT_FIRST_PACKETS] SEC(".bss.recent");

/* A server_entry as one word: 48 bits of MAC address, 16 of flags. */
typedef __u64 __attribute__((may_alias)) server_word;
#define SERVER_FLAGS_SHIFT 48
#define SERVER_MAC_MASK 0xffffffffffffull

/* Members tried when the chosen server cannot take a connection; then the packet is dropped. */
#define FALLBACK_MEMBERS 16

static __always_inline server_word server_at(__u32 service, __u32 id)
{
	__u32 first = (service & (MAX_SERVICES - 1)) * SERVER_ID_COUNT;

	/* Or clang would make the sum an OR, and the verifier of kernel 6.1 loses the bounds of a 32-bit OR. */
	barrier_var(first);
	return *(const server_word *)&servers[first + (id & COOKIE_ID_MASK)];
}

static __always_inline bool server_has(server_word server, __u32 flags)
{
	return (server >> SERVER_FLAGS_SHIFT & flags) == flags;
}

#define TAKES_FIRST_PACKETS (SERVER_KNOWN | SERVER_RESOLVED | SERVER_ELIGIBLE)

static __always_inline bool rule_is(const struct placement_table *table, enum placement_rule rule)
{
	if (!(rules_in_use & 1u << rule))
		return false;
	return rules_in_use == 1u << rule || table->rule == rule;
}

/* The finaliser of MurmurHash3 (64 bits): model's placement::mix(). */
static __always_inline __u64 mix(__u32 hash)
{
	__u64 x = hash | 0x9e3779b9ull << 32;

	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

/* A draw below `count` from half of a mixed hash: model's placement::two_draws(). */
static __always_inline __u32 draw(__u64 half, __u32 count)
{
	return (half & 0xffffffff) * count >> 32;
}

static __always_inline const struct member *member_at(const struct placement_table *table, __u32 position)
{
	return &table->members[position & (MAX_MEMBERS - 1)];
}

static __always_inline __u32 table_hash(const struct placement_table *table, __u32 group, const struct packet *packet)
{
	return toeplitz_source(table->toeplitz_source[group], packet->client_address, packet->ports & 0xffff) ^
	       table->toeplitz_destination[group];
}

#define POSITION_BITS 14
_Static_assert(MAX_TABLE_CANDIDATES == 1 << POSITION_BITS, "a candidate's position fits its bits");

/*
 * The candidate of least cost over all groups, the first of equals. Rule TABLE looks at the first one of each group's
 * bucket and at its load, LEAST_ASSIGNED at all of them and at what was assigned since the switch, too.
 *
 * Cost and position stand in one word, cost above, so that the least word is the first of the cheapest. (That leaves 49
 * bits for the cost: 1.0 of load takes 20.) The minimum is taken without a branch: which candidate wins cannot be
 * predicted, and each wrong guess would cost as much as several candidates.
 */
static __always_inline struct candidate *least_candidate(struct placement_table *table, __u32 first_hash,
							 const struct packet *packet, bool least_assigned)
{
	const __s64 none = -1ull >> 1;
	__u32 looked_at = least_assigned ? table->candidates_per_bucket : 1;
	__s64 least = none;

	for (__u32 group = 0; group < MAX_RSS_GROUPS; group++) {
		__u32 hash, start;

		if (group >= table->group_count)
			break;
		hash = group ? table_hash(table, group, packet) : first_hash;
		start = (group * table->bucket_count + (hash & (table->bucket_count - 1))) *
			table->candidates_per_bucket;
		for (__u32 i = 0; i < MAX_CANDIDATES; i++) {
			__u32 position = (start + i) & (MAX_TABLE_CANDIDATES - 1);
			const struct candidate *candidate = &table->candidates[position];
			__u64 cost = candidate->load;
			__s64 difference, smaller;

			if (i >= looked_at)
				break;
			if (least_assigned)
				cost += (__u64)table->assigned[candidate->core_slot & (MAX_CORE_SLOTS - 1)] *
					table->assignment_cost;
			difference = (__s64)(cost << POSITION_BITS | position) - least;
			smaller = difference >> 63;
			barrier_var(smaller);
			least += difference & smaller;
		}
	}
	return least == none ? NULL : &table->candidates[least & (MAX_TABLE_CANDIDATES - 1)];
}

/*
 * The chosen server cannot take the connection at this moment (its MAC address is not resolved, or it was taken out and
 * the next table is on its way): the next member that can, from a position drawn by hash, whatever its load.
 */
static __always_inline __u32 fallback(const struct placement_table *table, __u32 service, __u32 hash)
{
	__u32 count, position;

	if (!table)
		return NO_SERVER;
	count = table->member_count;
	position = draw(mix(hash), count);
	for (__u32 i = 0; i < FALLBACK_MEMBERS && i < count; i++, position++) {
		__u32 id;

		if (position >= count)
			position = 0;
		id = member_at(table, position)->server_id;
		if (server_has(server_at(service, id), TAKES_FIRST_PACKETS))
			return id;
	}
	return NO_SERVER;
}

/* The server that the rule names, without regard to whether it can take the connection; NO_SERVER: table unusable. */
static __always_inline __u32 choose(struct placement_table *table, struct service_state *state, __u32 service,
				    __u32 hash, const struct packet *packet)
{
	if (rule_is(table, PLACEMENT_RULE_TABLE)) {
		struct candidate *candidate = least_candidate(table, hash, packet, false);

		return candidate ? candidate->server_id : NO_SERVER;
	}
	if (rule_is(table, PLACEMENT_RULE_LEAST_ASSIGNED)) {
		struct candidate *candidate = least_candidate(table, hash, packet, true);

		if (!candidate)
			return NO_SERVER;
		/* Counted only if the server gets it. */
		if (server_has(server_at(service, candidate->server_id), TAKES_FIRST_PACKETS))
			__sync_fetch_and_add(&table->assigned[candidate->core_slot & (MAX_CORE_SLOTS - 1)], 1);
		return candidate->server_id;
	}
	if (rule_is(table, PLACEMENT_RULE_ROUND_ROBIN)) {
		__u64 turn = __sync_fetch_and_add(&state->round_robin, 1);

		return member_at(table, turn % table->member_count)->server_id;
	}
	if (rule_is(table, PLACEMENT_RULE_POWER_OF_TWO)) {
		__u64 mixed = mix(hash);
		const struct member *first = member_at(table, draw(mixed, table->member_count));
		const struct member *second = member_at(table, draw(mixed >> 32, table->member_count));

		return second->load < first->load ? second->server_id : first->server_id;
	}
	return NO_SERVER;
}

/*
 * Rules whose choice for the same packet is another one the next time: a SYN that is sent again must find its server. A
 * datagram is placed for its own sake each time, or its flow is remembered elsewhere.
 */
static __always_inline bool choice_is_remembered(const struct placement_table *table, const struct packet *packet)
{
	if (udp_in_use && packet->protocol == IPPROTO_UDP)
		return false;
	return rule_is(table, PLACEMENT_RULE_LEAST_ASSIGNED) || rule_is(table, PLACEMENT_RULE_ROUND_ROBIN);
}

static __always_inline __u64 recent_key(const struct placement_table *table, __u32 service, __u32 hash)
{
	return (__u64)hash << RECENT_HASH_SHIFT | RECENT_VALID_BIT |
	       (table->generation & RECENT_GENERATION_MASK) << RECENT_GENERATION_SHIFT |
	       service << RECENT_SERVICE_SHIFT;
}

/* The half of the service's double buffer that is active; NULL: the service has no members. */
static __always_inline struct placement_table *active_table(const struct service_state *state, __u32 service)
{
	__u32 position = service << 1 | (*(const volatile __u32 *)&state->active_half & 1);
	struct placement_table *table = bpf_map_lookup_elem(&placement_tables, &position);

	return table && table->member_count ? table : NULL;
}

/* The server for a first packet: an id that can take it, or NO_SERVER. A global function, as decide() is. */
__noinline int place(struct service_state *state, __u32 service, const struct packet *packet)
{
	struct placement_table *table;
	__u64 key, *recent;
	__u32 hash, id;

	if (!state || !packet)
		return NO_SERVER;
	table = active_table(state, service);
	if (!table)
		return NO_SERVER;
	hash = table_hash(table, 0, packet);
	key = recent_key(table, service, hash);
	recent = &recent_first_packets[hash & (RECENT_FIRST_PACKETS - 1)];
	if (choice_is_remembered(table, packet)) {
		__u64 remembered = *(volatile __u64 *)recent;

		id = remembered & COOKIE_ID_MASK;
		if ((remembered & ~(__u64)COOKIE_ID_MASK) == key &&
		    server_has(server_at(service, id), TAKES_FIRST_PACKETS))
			return id;
	}
	id = choose(table, state, service, hash, packet);
	if (id == NO_SERVER)
		return NO_SERVER;
	if (!server_has(server_at(service, id), TAKES_FIRST_PACKETS))
		id = fallback(table, service, hash);
	if (choice_is_remembered(table, packet) && id != NO_SERVER)
		*(volatile __u64 *)recent = key | id;
	return id;
}

/* The fixed choice for a connection that cannot carry a cookie, and whose its bucket was before; NO_SERVER: none. */
static __always_inline struct flow_table_entry place_consistently(const struct service_state *state, __u32 service,
								  const struct packet *packet)
{
	const struct placement_table *table = active_table(state, service);
	__u32 bucket;

	if (!table)
		return (struct flow_table_entry){.server_id = NO_SERVER, .before = NO_SERVER};
	bucket = table_hash(table, 0, packet) & (table->bucket_count - 1) & (MAX_BUCKETS - 1);
	return (struct flow_table_entry){
		.server_id = table->consistent[bucket],
		.before = table->consistent_before[bucket],
	};
}

#endif
