/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The connection table of stateful mode (Cheetah, NSDI'20, Sect. 3.2: ConnTable and ConnStack): find, take and update an
 * entry. model::connection_table::table is the same in Rust, line by line;
 * tests/integration/connection_table_loom.rs runs it against user space's side in every order that the memory model allows.
 *
 * 1. Where an entry is. 2^k partitions of 1024 entries. A connection's own keyed hash (by a key that never
 *    changes while the table lives) names its partition by the low bits and gives its tag, the upper half. The slot in
 *    the partition is any that was free, and is in the cookie. So finding is an index, and a table of any size needs 10
 *    bits of the cookie. A partition can be full while others are not: at 90 % of all entries in use, one in 2,000 is.
 *
 * 2. The life of an entry.
 *      free      identity is 0, its slot is on the partition's stack;
 *      taken     a first packet moved the stack's top to the next slot by compare-and-swap, fills the entry, and last of
 *                all writes the identity;
 *      released  user space replaced exactly this identity by 0, by compare-and-swap;
 *      free      an RCU grace period later user space pushes the slot;
 *      reused    instead of the last two: a first packet that found the stack empty replaced the identity of an
 *                expired entry by 0 and fills the entry as if it had taken it (stateful.h, reuse_connection()).
 *    User space frees by the server's word (docs/design.md), which no packet has. So packets reuse half-open entries,
 *    whose server is not asked, and others only after user space has not swept for CONNECTION_UNSWEPT.
 *
 * 3. Why no slot is handed out twice, and none is lost.
 *    - Whoever moves the top from slot p to p's next alone has p. The exchange succeeds only if the top is the very one
 *      that was read: the count above the slot grows with every change, so a stack on which p came back to the top above
 *      another slot is not taken for the old one (ABA). The count has 48 bits. The `next_free` that was read may be of an
 *      entry that somebody else took meanwhile; then the top has changed and the exchange fails.
 *    - Of all who free an entry the one whose compare-and-swap found the identity pushes it, once. The identity holds the
 *      tag and a generation that grows with each use, so it stands for one use of one entry.
 *    - A daemon killed between release and push loses the slot until the next one starts, which finds such slots:
 *      identity 0, not on the stack, and no packet about to fill them (after a grace period).
 *
 * 4. Why a packet never goes to another connection's server. All that a decision depends on is the identity: tag, service
 *    and server in one aligned word, read by one load. Freed meanwhile, or taken by somebody else: the tag differs. With
 *    32 bits of tag a forged cookie that hits a used slot is taken for its connection once in 4 * 10^9.
 *
 * 5. Why counters are the connection's own. A packet that has seen an identity may add to packets and bytes after user
 *    space released the entry. But programs run inside an RCU read-side section (NAPI's, or the test run's), and user
 *    space waits for a grace period before it pushes: nobody else has the entry by then. A reused entry has no such
 *    wait: if a packet of its last connection is under way at that moment, it may add itself to the new counters,
 *    or its FIN shorten the new timer. Counting takes no atomic
 *    operation: a connection's packets arrive on one receive queue, one CPU at a time (RSS). Where they do not (generic
 *    XDP, a queue that moves), a count may be lost now and then.
 *
 * 6. Order. The identity is written by an exchange, which is a full barrier in BPF: whoever sees it sees the rest.
 *    `next_free` is read at an address computed from the top, which orders the two on every machine that Linux runs on
 *    but Alpha. User space's pushes and releases are acquire-release.
 *
 * 7. What can go wrong. No free slot, or the top changed at each of CONNECTION_TAKE_ATTEMPTS attempts: the first packet
 *    goes to its server all the same, without an index, and the server stamps its id (the stateless kind): counted as an
 *    event. That is what a SYN flood comes to: it fills the table, whose memory was all there from the start, takes
 *    nothing from connections that have an entry, and new ones are stateless until the half-open ones are freed or
 *    reused (10 s). One source prefix may hold a part of the table only (stateful.h, may_take_connection()).
 */
#ifndef COREWARD_LB_CONNECTION_TABLE_H
#define COREWARD_LB_CONNECTION_TABLE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "cookie.h"
#include "parse.h"
#include "state.h"

_Static_assert(sizeof(struct connection) == 64 && sizeof(struct connection_stack) == 64, "a cache line each");
_Static_assert(CONNECTIONS_PER_PARTITION == 1u << CONNECTION_SLOT_BITS, "a slot fits its bits");
_Static_assert(MAX_OWNERS == 1u << CONNECTION_OWNER_BITS, "an owner fits its bits");

/* Partitions - 1. Fixed when the program is loaded: the maps below have that size. */
const volatile __u32 connection_partition_mask;

/*
 * User space sets both sizes. The first slot of all partitions, then the second one of all ...: low slots are handed out
 * first, so the entries in use stand close together however large the table is, and take few pages (TLB).
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DEFAULT_CONNECTION_TABLE_ENTRIES);
	__type(key, __u32);
	__type(value, struct connection);
} connections SEC(".maps");

/* One per partition. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DEFAULT_CONNECTION_TABLE_ENTRIES / CONNECTIONS_PER_PARTITION);
	__type(key, __u32);
	__type(value, struct connection_stack);
} connection_stacks SEC(".maps");

/* By the connection's hash: tag and slot of the one whose SYN came last. */
__u32 recent_connections[RECENT_CONNECTIONS] SEC(".bss.opened");

#define NANOSECONDS_PER_TICK 100000000

#define CONNECTION_TAG_MASK (~0ull << CONNECTION_TAG_SHIFT)
/* What of an identity must be as expected: all but the generation and the server. */
#define CONNECTION_EXPECTED_MASK                                                                                       \
	(CONNECTION_TAG_MASK | CONNECTION_IN_USE | CONNECTION_SERVICE_MASK << CONNECTION_SERVICE_SHIFT)

/*
 * Service and client are 58 bits; two rounds of multiply and shift (as in MurmurHash3's finaliser) with secret odd
 * factors. This is no PRF. The claim: for a sender that knows this code, and neither key nor results, tuples of a
 * simple structure collide as often as by chance (crates/model/tests/integration/connection_hash.rs). No client sees a
 * bit of a result, since slots leave this machine in cookies only. docs/security.md has what a collision gives.
 */
static __always_inline __u64 connection_hash(__u32 service, __u32 client_address, __u32 ports)
{
	__u64 hash = (__u64)service << 48 | (__u64)(ports & 0xffff) << 32 | client_address;

	hash = (hash ^ lb_state.connection_key.k0) * (lb_state.connection_key.k1 | 1);
	hash = (hash ^ hash >> 32) * (lb_state.connection_key.k0 | 1);
	return hash ^ hash >> 29;
}

/* The entry at a slot in the connection's partition. */
static __always_inline struct connection *connection_at(__u64 hash, __u32 slot)
{
	__u32 partitions = connection_partition_mask + 1;
	__u32 index = (slot & CONNECTION_SLOT_MASK) * partitions + (hash & connection_partition_mask);

	return bpf_map_lookup_elem(&connections, &index);
}

/* The entry that a cookie of the connection names, if it is the connection's. `server_id`: where it goes. */
static __always_inline struct connection *find_connection(__u64 hash, __u32 slot, __u32 service, __u32 *server_id)
{
	__u64 expected = (hash & CONNECTION_TAG_MASK) | CONNECTION_IN_USE | service << CONNECTION_SERVICE_SHIFT;
	struct connection *connection = connection_at(hash, slot);
	__u64 identity;

	if (!connection)
		return NULL;
	identity = *(volatile __u64 *)&connection->identity;
	if ((identity ^ expected) & CONNECTION_EXPECTED_MASK)
		return NULL;
	*server_id = identity & COOKIE_ID_MASK;
	return connection;
}

/* Packets read the kernel's clock. Otherwise only user space sets lb_state.clock: for comparisons with the model. */
const volatile bool packets_read_clock;

static __noinline __u32 read_clock(__u64 jiffies)
{
	__u32 now = bpf_ktime_get_coarse_ns() / NANOSECONDS_PER_TICK;

	lb_state.clock_jiffies = jiffies;
	/* The coarse clock is up to a jiffy behind that of user space. */
	if ((__s32)(now - lb_state.clock) > 0)
		lb_state.clock = now;
	return lb_state.clock;
}

/* The time that entries keep: lb_state.clock, which goes on without a daemon while packets come. */
static __always_inline __u32 connection_time(void)
{
	/* The verifier replaces this call by a load. */
	__u64 jiffies = packets_read_clock ? bpf_jiffies64() : 0;

	if (packets_read_clock && jiffies != *(volatile __u64 *)&lb_state.clock_jiffies)
		return read_clock(jiffies);
	return *(volatile __u32 *)&lb_state.clock;
}

/* Counts a packet that is no SYN. Returns whether it is the first one that ends the connection. */
static __always_inline bool update_connection(struct connection *connection, __u8 tcp_flags, __u64 bytes)
{
	bool closes = tcp_flags & (TCP_FIN | TCP_RST) && !(connection->flags & CONNECTION_CLOSING);

	connection->packets++;
	connection->bytes += bytes;
	connection->last_seen = connection_time();
	if (closes)
		connection->flags |= CONNECTION_CLOSING;
	return closes;
}

/* ---- first packets --------------------------------------------------------------------------------------------- */

/* The entry of the connection whose SYN came lately: by the tuple, so a client that uses its port again gets it too. */
static __always_inline struct connection *find_recent_connection(__u64 hash, __u32 service, __u32 *slot,
								 __u32 *server_id)
{
	__u32 recent = recent_connections[hash & (RECENT_CONNECTIONS - 1)];

	*slot = recent & CONNECTION_SLOT_MASK;
	if ((recent ^ hash >> CONNECTION_TAG_SHIFT) & ~CONNECTION_SLOT_MASK)
		return NULL;
	return find_connection(hash, *slot, service, server_id);
}

static __always_inline void remember_connection(__u64 hash, __u32 slot)
{
	recent_connections[hash & (RECENT_CONNECTIONS - 1)] =
		(hash >> CONNECTION_TAG_SHIFT & ~CONNECTION_SLOT_MASK) | slot;
}

/*
 * Another SYN of the same connection. Not counted: an entry that never saw anything but SYNs stays half-open, however
 * often they come. Returns whether the connection was closing.
 */
static __always_inline bool reopen_connection(struct connection *connection)
{
	bool was_closing = connection->flags & CONNECTION_CLOSING;

	connection->last_seen = connection_time();
	connection->flags &= ~CONNECTION_CLOSING;
	return was_closing;
}

/* Fills an entry that nobody else knows, its identity last. `next_free` stays: user space may be following it. */
static __always_inline void fill_connection(struct connection *connection, const struct packet *packet, __u64 tag,
					    __u64 service_and_server, __u64 bytes)
{
	__u64 generation = connection->generation & CONNECTION_GENERATION_MASK;
	__u32 now = connection_time();

	connection->packets = 1;
	connection->bytes = bytes;
	connection->last_seen = now;
	connection->opened = now;
	connection->client_address[0] = 0;
	connection->client_address[1] = 0;
	connection->client_address[2] = bpf_htonl(0xffff);
	connection->client_address[3] = packet->client_address;
	connection->client_port = packet->ports;
	connection->flags = 0;
	__sync_lock_test_and_set(&connection->identity, tag | CONNECTION_IN_USE |
								generation << CONNECTION_GENERATION_SHIFT |
								service_and_server);
}

/* take_connection() found no free slot; others took or freed slots at each attempt. */
#define CONNECTION_TABLE_FULL -1
#define CONNECTION_CONTENDED -2
/* may_take_connection() refused. */
#define CONNECTION_SOURCE_LIMITED -3

/* A free slot in the connection's partition, filled; or one of the above. `packet`: the connection's first. */
static __noinline int take_connection(const struct packet *packet, __u64 hash, __u32 service, __u32 server_id,
				      __u64 bytes)
{
	__u32 partition = hash & connection_partition_mask;
	struct connection_stack *stack = bpf_map_lookup_elem(&connection_stacks, &partition);

	if (!packet || !stack)
		return CONNECTION_TABLE_FULL;
	for (int attempt = 0; attempt < CONNECTION_TAKE_ATTEMPTS; attempt++) {
		__u64 top = *(volatile __u64 *)&stack->top;
		__u32 slot_plus_one = top & CONNECTION_STACK_SLOT_MASK;
		struct connection *connection;
		__u64 next, new_top;

		if (!slot_plus_one)
			return CONNECTION_TABLE_FULL;
		connection = connection_at(hash, slot_plus_one - 1);
		if (!connection)
			return CONNECTION_TABLE_FULL;
		next = *(volatile __u32 *)&connection->next_free & CONNECTION_STACK_SLOT_MASK;
		new_top = ((top >> CONNECTION_STACK_COUNT_SHIFT) + 1) << CONNECTION_STACK_COUNT_SHIFT | next;
		if (__sync_val_compare_and_swap(&stack->top, top, new_top) != top)
			continue;
		fill_connection(connection, packet, hash & CONNECTION_TAG_MASK,
				service << CONNECTION_SERVICE_SHIFT | server_id, bytes);
		return slot_plus_one - 1;
	}
	return CONNECTION_CONTENDED;
}

/* ---- the cookie of kind 1 -------------------------------------------------------------------------------------- */

static __always_inline __u32 cookie_owner(__u32 cookie)
{
	return cookie >> CONNECTION_SLOT_BITS & (MAX_OWNERS - 1);
}

/* What a first packet's TSecr tells the server. */
static __always_inline __u32 syn_echo(__u32 owner, __u32 slot)
{
	return SYN_ECHO_HOLDS_COOKIE | COOKIE_KIND_BIT | owner << CONNECTION_SLOT_BITS | slot;
}

#endif
