/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Placement of new connections, which follows PlacementTable::choose() of crates/model/src/placement.rs step by step,
 * on the service's table.
 *
 * place_connection() reads service_state.table_at once and then only that table. User space rewrites a table only after
 * an RCU grace period, so a decision never mixes two tables.
 */
#ifndef COREWARD_LB_PLACEMENT_H
#define COREWARD_LB_PLACEMENT_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "least.h"
#include "parse.h"
#include "service_mode.h"
#include "toeplitz.h"

/* Rules of all tables, as bits, fixed at load time, so that unused ones are removed. A change reloads the program. */
const volatile __u32 rules_in_use;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	/* User space sets the size, and replaces a full map by a larger one. */
	__uint(value_size, MIN_PLACEMENT_MEMORY + PLACEMENT_MEMORY_SLACK);
} placement_memory SEC(".maps");

/* Size of the memory without PLACEMENT_MEMORY_SLACK, minus 1, fixed at load time. */
const volatile __u32 placement_memory_mask;

/* Aligned, so that one load reads an entry. */
struct server_entry servers[SERVER_ID_COUNT] SEC(".bss.servers") __attribute__((aligned(8)));
__u64 membership[MAX_SERVICES * MEMBERSHIP_WORDS] SEC(".bss.members");
__u64 recent_placements[RECENT_PLACEMENTS] SEC(".bss.recent");

/* A server's MAC address (48 bits), and its flags in a service (16 bits). */
typedef __u64 __attribute__((may_alias)) server_entry_t;
#define SERVER_FLAGS_SHIFT 48
#define SERVER_MAC_MASK 0xffffffffffffull

/* Number of members that are tried if the selected server cannot take a connection, before the packet is dropped. */
#define MAX_FALLBACK_MEMBERS 16

static __always_inline server_entry_t load_server_entry(__u32 service, __u32 id)
{
	__u32 word = (service & (MAX_SERVICES - 1)) * MEMBERSHIP_WORDS;
	__u64 flags;

	/* Otherwise clang replaces the sum by an OR, and kernel 6.1's verifier loses the bounds of a 32-bit OR. */
	barrier_var(word);
	word += (id & COOKIE_ID_MASK) / SERVER_MEMBERS_PER_WORD;
	flags = membership[word] >> id % SERVER_MEMBERS_PER_WORD * SERVER_MEMBER_BITS & SERVER_MEMBER_MASK;
	return *(const server_entry_t *)&servers[id & COOKIE_ID_MASK] | flags << SERVER_FLAGS_SHIFT;
}

static __always_inline bool has_server_flag(server_entry_t server, __u32 flags)
{
	return (server >> SERVER_FLAGS_SHIFT & flags) == flags;
}

static __always_inline bool is_server_down(server_entry_t server)
{
	return server >> SERVER_FLAGS_SHIFT & (SERVER_MASKED | SERVER_DOWN);
}

#define TAKES_NEW_CONNECTIONS (SERVER_KNOWN | SERVER_RESOLVED | SERVER_ELIGIBLE)

struct placement {
	void *memory;
	struct placement_table *table;
};

static __always_inline void *memory_at(const struct placement *placement, __u32 at)
{
	return placement->memory + (at & placement_memory_mask);
}

static __always_inline bool has_rule(const struct placement_table *table, enum placement_rule rule)
{
	if (!(rules_in_use & 1u << rule))
		return false;
	return rules_in_use == 1u << rule || table->rule == rule;
}

/* Returns the hash mixed by MurmurHash3's 64-bit finaliser, as model's placement::mix() does. */
static __always_inline __u64 mix_hash(__u32 hash)
{
	__u64 x = hash | 0x9e3779b9ull << 32;

	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

/* Returns a number below `count` from half of a mixed hash, as model's placement::two_draws() does. */
static __always_inline __u32 draw(__u64 half, __u32 count)
{
	return (half & 0xffffffff) * count >> 32;
}

static __always_inline const struct member *member_at(const struct placement *placement, __u32 position)
{
	return memory_at(placement, placement->table->members_offset + position * sizeof(struct member));
}

/* Reads the client's IPv6 address from the frame. Not inlined, because its stack would count in place_connection(). */
static __noinline __u32 source_hash_ipv6(struct xdp_md *ctx, const void *tables, __u16 client_port)
{
	const struct toeplitz_source_tables_ipv6 *source = tables;
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (data + IPV6_FIELD_OFFSET(source) + IPV6_ADDRESS_BYTES > data_end)
		return 0;
	return toeplitz_source_ipv6(source->byte, data + IPV6_FIELD_OFFSET(source), client_port);
}

static __always_inline __u32 toeplitz_hash(struct xdp_md *ctx, const struct placement *placement, __u32 group,
					   const struct packet *packet)
{
	const struct placement_table *table = placement->table;
	__u32 at = table->toeplitz_source_offset[group], hash;
	const struct toeplitz_source_tables *source;

	if (is_ipv6(packet)) {
		hash = source_hash_ipv6(ctx, memory_at(placement, at), packet->ports);
	} else {
		source = memory_at(placement, at);
		hash = toeplitz_source(source->byte, packet->client_address, packet->ports & 0xffff);
	}
	return hash ^ table->toeplitz_destination[group];
}

_Static_assert(MAX_CANDIDATES * sizeof(struct candidate) <= PLACEMENT_MEMORY_SLACK, "a bucket fits behind the mask");
_Static_assert((1 << 16) * sizeof(__u32) <= PLACEMENT_MEMORY_SLACK, "the counts of 16 bits of core slots, too");

/* Returns the first candidate of a group's bucket. `position` is as in struct placement_table. */
static __always_inline const struct candidate *candidates_at(const struct placement *placement, __u32 position)
{
	return memory_at(placement, placement->table->candidates_at + position * sizeof(struct candidate));
}

/* Returns the assigned connections by core slot. The mask shows the verifier that atomic operations are aligned. */
static __always_inline __u32 *assigned_counts(const struct placement *placement)
{
	return memory_at(placement, placement->table->assigned_offset & ~(__u32)(sizeof(__u32) - 1));
}

/* Bits below a candidate's cost for its group and number in the bucket. Costs have 58 bits, a load of 1.0 has 20. */
#define CANDIDATE_NUMBER_BITS 3
#define CANDIDATE_RANK_BITS 5
#define MAX_COST (-1ull >> 1)
_Static_assert(MAX_CANDIDATES == 1 << CANDIDATE_NUMBER_BITS, "a candidate's number fits its bits");
_Static_assert(MAX_RSS_GROUPS *MAX_CANDIDATES == 1 << CANDIDATE_RANK_BITS, "group and number fit their bits");

/* Returns the lesser of `least` and the cost of candidate `i`, if it exists. The low bits of a cost are the number. */
static __always_inline __s64 min_candidate_cost(__s64 least, const struct candidate *candidates, __u32 i, __u32 count,
						const __u32 *assigned, __u64 cost_of_one)
{
	__u64 cost;

	if (i >= count)
		return least;
	cost = candidates[i].load + assigned[candidates[i].core_slot] * cost_of_one;
	return min_s64((__s64)(cost << CANDIDATE_RANK_BITS | i), least);
}

/*
 * Returns the least cost among a bucket's first `count` candidates, with the number of the first such candidate. Even
 * and odd candidates have separate minima, so that the CPU works on two at a time.
 */
static __always_inline __s64 least_assigned_cost(const struct candidate *candidates, __u32 count, const __u32 *assigned,
						 __u64 cost_of_one)
{
	__s64 even = MAX_COST, odd = MAX_COST;

	_Static_assert(MAX_CANDIDATES == 8, "all are compared");
	even = min_candidate_cost(even, candidates, 0, count, assigned, cost_of_one);
	odd = min_candidate_cost(odd, candidates, 1, count, assigned, cost_of_one);
	even = min_candidate_cost(even, candidates, 2, count, assigned, cost_of_one);
	odd = min_candidate_cost(odd, candidates, 3, count, assigned, cost_of_one);
	even = min_candidate_cost(even, candidates, 4, count, assigned, cost_of_one);
	odd = min_candidate_cost(odd, candidates, 5, count, assigned, cost_of_one);
	even = min_candidate_cost(even, candidates, 6, count, assigned, cost_of_one);
	odd = min_candidate_cost(odd, candidates, 7, count, assigned, cost_of_one);
	return min_s64(odd, even);
}

/*
 * Returns the candidate of least cost over all groups, the first of equals, or NULL if there is none. Rule TABLE
 * compares the first candidate of each group's bucket by load, LEAST_ASSIGNED all of them by load and assigned
 * connections.
 */
static __always_inline const struct candidate *least_candidate(struct xdp_md *ctx, const struct placement *placement,
							       __u32 first_hash, const struct packet *packet,
							       bool least_assigned)
{
	const struct placement_table *table = placement->table;
	const __u32 *assigned = assigned_counts(placement);
	__u32 starts[MAX_RSS_GROUPS];
	__s64 least = MAX_COST;

	for (__u32 group = 0; group < MAX_RSS_GROUPS; group++) {
		const struct candidate *candidates;
		__s64 of_group;
		__u32 hash;

		if (group >= table->group_count)
			break;
		hash = group ? toeplitz_hash(ctx, placement, group, packet) : first_hash;
		starts[group] = (group * table->bucket_count + (hash & (table->bucket_count - 1))) *
				table->candidates_per_bucket;
		candidates = candidates_at(placement, starts[group]);
		if (least_assigned)
			of_group = least_assigned_cost(candidates, table->candidates_per_bucket, assigned,
						       table->assignment_cost);
		else
			of_group = (__u64)candidates->load << CANDIDATE_RANK_BITS;
		least = min_s64(of_group | group << CANDIDATE_NUMBER_BITS, least);
	}
	if (least == MAX_COST)
		return NULL;
	return candidates_at(placement, starts[least >> CANDIDATE_NUMBER_BITS & (MAX_RSS_GROUPS - 1)]) +
	       (least & (MAX_CANDIDATES - 1));
}

/* Returns the server by the rule, even if it cannot take the connection, or NO_SERVER if the table is unusable. */
static __always_inline __u32 choose_by_rule(struct xdp_md *ctx, const struct placement *placement,
					    struct service_state *state, __u32 service, __u32 hash,
					    const struct packet *packet)
{
	const struct placement_table *table = placement->table;

	if (has_rule(table, PLACEMENT_RULE_TABLE)) {
		const struct candidate *candidate = least_candidate(ctx, placement, hash, packet, false);

		return candidate ? candidate->server_id : NO_SERVER;
	}
	if (has_rule(table, PLACEMENT_RULE_LEAST_ASSIGNED)) {
		const struct candidate *candidate = least_candidate(ctx, placement, hash, packet, true);

		if (!candidate)
			return NO_SERVER;
		/* The connection counts only if the server gets it. The next choices of all CPUs use the counter. */
		if (has_server_flag(load_server_entry(service, candidate->server_id), TAKES_NEW_CONNECTIONS))
			__sync_fetch_and_add(&assigned_counts(placement)[candidate->core_slot], 1);
		return candidate->server_id;
	}
	if (has_rule(table, PLACEMENT_RULE_ROUND_ROBIN)) {
		__u64 turn = __sync_fetch_and_add(&state->round_robin, 1);

		return member_at(placement, turn % table->member_count)->server_id;
	}
	if (has_rule(table, PLACEMENT_RULE_POWER_OF_TWO)) {
		__u64 mixed = mix_hash(hash);
		const struct member *first = member_at(placement, draw(mixed, table->member_count));
		const struct member *second = member_at(placement, draw(mixed >> 32, table->member_count));

		return second->load < first->load ? second->server_id : first->server_id;
	}
	return NO_SERVER;
}

/*
 * Returns whether the choice is stored, so that a retransmitted SYN finds its server. Rules with a state would select
 * another server each time. UDP needs no stored choice, because its flows are in the flow table, or each datagram is
 * placed separately.
 */
static __always_inline bool is_choice_stored(const struct placement_table *table, const struct packet *packet)
{
	if (udp_in_use && packet->protocol == IPPROTO_UDP)
		return false;
	return has_rule(table, PLACEMENT_RULE_LEAST_ASSIGNED) || has_rule(table, PLACEMENT_RULE_ROUND_ROBIN);
}

static __always_inline __u64 recent_placement_key(const struct placement_table *table, __u32 service, __u32 hash)
{
	return (__u64)hash << RECENT_HASH_SHIFT | RECENT_VALID_BIT |
	       (table->generation & RECENT_GENERATION_MASK) << RECENT_GENERATION_SHIFT |
	       service << RECENT_SERVICE_SHIFT;
}

/* Finds the service's table. Returns false if the service has no table, or a table without members. */
static __always_inline bool find_table(const struct service_state *state, struct placement *placement)
{
	__u32 at = *(const volatile __u32 *)&state->table_at, first = 0;

	placement->memory = bpf_map_lookup_elem(&placement_memory, &first);
	if (!at || !placement->memory)
		return false;
	placement->table = memory_at(placement, at);
	return placement->table->member_count;
}

/*
 * Returns the next member that can take the connection, from a position drawn by hash, with any load. It is called if
 * the selected server has no known MAC address, or was removed and the next table has not come yet. This is a global
 * function, because kernel 6.1 would otherwise verify the loop for each path into it.
 */
__noinline int choose_fallback_server(struct service_state *state, __u32 service, __u32 hash)
{
	struct placement placement;
	__u32 count, position;

	if (!state || !find_table(state, &placement))
		return NO_SERVER;
	count = placement.table->member_count;
	position = draw(mix_hash(hash), count);
	for (__u32 i = 0; i < MAX_FALLBACK_MEMBERS && i < count; i++, position++) {
		__u32 id;

		if (position >= count)
			position = 0;
		id = member_at(&placement, position)->server_id;
		if (has_server_flag(load_server_entry(service, id), TAKES_NEW_CONNECTIONS))
			return id;
	}
	return NO_SERVER;
}

/* Returns a server for a new connection, or NO_SERVER. */
static __always_inline int place_connection_inlined(struct xdp_md *ctx, struct service_state *state, __u32 service,
						    const struct packet *packet)
{
	const struct placement_table *table;
	struct placement placement;
	__u64 key, *recent;
	__u32 hash, id;

	if (!find_table(state, &placement))
		return NO_SERVER;
	table = placement.table;
	hash = toeplitz_hash(ctx, &placement, 0, packet);
	key = recent_placement_key(table, service, hash);
	recent = &recent_placements[hash & (RECENT_PLACEMENTS - 1)];
	if (is_choice_stored(table, packet)) {
		__u64 remembered = *(volatile __u64 *)recent;

		id = remembered & COOKIE_ID_MASK;
		if ((remembered & ~(__u64)COOKIE_ID_MASK) == key &&
		    has_server_flag(load_server_entry(service, id), TAKES_NEW_CONNECTIONS))
			return id;
	}
	id = choose_by_rule(ctx, &placement, state, service, hash, packet);
	if (id == NO_SERVER)
		return NO_SERVER;
	if (!has_server_flag(load_server_entry(service, id), TAKES_NEW_CONNECTIONS))
		id = choose_fallback_server(state, service, hash);
	if (is_choice_stored(table, packet) && id != NO_SERVER)
		*(volatile __u64 *)recent = key | id;
	return id;
}

/* A global function, as decide() is. */
__noinline int place_connection(struct xdp_md *ctx, struct service_state *state, __u32 service,
				const struct packet *packet)
{
	return state && packet ? place_connection_inlined(ctx, state, service, packet) : NO_SERVER;
}

/* Returns the bucket's server for a connection without a cookie, and its previous server. Each may be NO_SERVER. */
static __always_inline struct flow_table_entry place_consistently(struct xdp_md *ctx, const struct service_state *state,
								  const struct packet *packet)
{
	const struct placement_table *table;
	struct placement placement;
	__u32 offset;

	if (!find_table(state, &placement))
		return (struct flow_table_entry){.server_id = NO_SERVER, .previous_server = NO_SERVER};
	table = placement.table;
	offset = (toeplitz_hash(ctx, &placement, 0, packet) & (table->bucket_count - 1)) * sizeof(__u16);
	return (struct flow_table_entry){
		.server_id = *(const __u16 *)memory_at(&placement, table->consistent_at + offset),
		.previous_server = *(const __u16 *)memory_at(&placement, table->previous_consistent_offset + offset),
	};
}

#endif
