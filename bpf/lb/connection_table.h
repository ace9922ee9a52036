/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Connection table of stateful mode (Cheetah, NSDI'20, Sect. 3.2, ConnTable and ConnStack), whose entries are found,
 * taken and updated here. model::connection_table::table is the same in Rust.
 * tests/integration/connection_table_loom.rs runs it against user space in every order that the memory model allows.
 *
 * 1. Layout. The table has 2^k partitions of 1024 entries. A keyed hash of the connection, whose key never changes
 *    while the table lives, gives the partition (low bits) and the tag (upper half). The slot in the partition is any
 *    free one, and is in the cookie. So a table of any size needs 10 bits of the cookie. One partition can be full
 *    while others are not, which happens to one in 2,000 at 90 % use.
 *
 * 2. States of an entry.
 *      free      the identity is 0, and the slot is on the partition's stack;
 *      taken     a new connection moved the stack's top to the next slot by compare-and-swap, fills the entry, and
 *                writes the identity last;
 *      released  user space replaced exactly this identity by 0, by compare-and-swap;
 *      free      an RCU grace period later user space pushes the slot;
 *      reused    instead of the last two, a new connection that found the stack empty replaced the identity of an
 *                expired entry by 0 and fills the entry as if it had taken it (stateful.h, reuse_connection()).
 *    User space frees an entry after a query to the server's agent (docs/design.md), which packets cannot make. So
 *    packets reuse half-open entries, which need no query, and other entries only after CONNECTION_UNSWEPT_TICKS ticks
 *    without a sweep of user space.
 *
 * 3. No slot is handed out twice or lost.
 *    - The CPU that moves the top from slot p to the next one has p. The exchange succeeds only if the top is
 *      unchanged, because the count of 48 bits above the slot grows with every change (ABA). If another CPU took the
 *      entry whose `next_free` was read, the top has changed and the exchange fails.
 *    - The thread whose compare-and-swap cleared the identity pushes the slot, once. The identity holds the tag and a
 *      generation that grows with each use.
 *    - A daemon that is killed between release and push loses the slot until the next start. Then the slot is found,
 *      because its identity is 0, it is not on the stack, and no packet is about to fill it (after a grace period).
 *
 * 4. No packet goes to another connection's server. A decision depends only on the identity, which has tag, service and
 *    server in one aligned word. After a release or reuse the tag differs. The tag has 32 bits, so a forged cookie that
 *    hits a used slot is taken for its connection once in 4 * 10^9.
 *
 * 5. Counters count the packets of one connection. A packet that has read an identity may increment counters after the
 *    release. Programs run in an RCU read-side section, and user space waits for a grace period before it pushes. A
 *    reused entry has no such wait, so a packet in processing may increment the new counters, or its FIN may shorten
 *    the new timer.
 *    Counting is not atomic, because a connection's packets arrive on one receive queue (RSS). Otherwise (generic XDP,
 *    a queue that moves) a count may be lost.
 *
 * 6. Order. The identity is written by an exchange, a full barrier in BPF. `next_free` is read at an address computed
 *    from the top, which orders the two on all machines but Alpha. User space's pushes and releases are
 *    acquire-release.
 *
 * 7. Without a free slot, or when the top changed at each of CONNECTION_TAKE_ATTEMPTS attempts, the connection is
 *    stateless, which is counted as an event. A SYN flood fills the table, affects no existing entry, and makes new
 *    connections stateless until half-open entries are freed or reused (10 s). One source prefix may hold only a part
 *    of the table (stateful.h, may_take_connection()).
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

/* Number of partitions minus 1, fixed at load time. */
const volatile __u32 connection_partition_mask;

/*
 * User space sets the sizes of both maps. Entries are ordered by slot, then by partition. Low slots are handed out
 * first, so the entries in use take few pages (TLB).
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DEFAULT_CONNECTION_TABLE_ENTRIES);
	__type(key, __u32);
	__type(value, struct connection);
} connections SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, DEFAULT_CONNECTION_TABLE_ENTRIES / CONNECTIONS_PER_PARTITION);
	__type(key, __u32);
	__type(value, struct connection_stack);
} connection_stacks SEC(".maps");

/* Tags and slots of connections with a recent SYN, by the connection's hash. */
__u32 recent_connections[RECENT_CONNECTIONS] SEC(".bss.opened") __attribute__((aligned(8)));
typedef __u64 __attribute__((may_alias)) recent_pair;
#define NOT_RECENT -1

#define NANOSECONDS_PER_TICK 100000000

#define CONNECTION_TAG_MASK (~0ull << CONNECTION_TAG_SHIFT)
/* Bits of the identity that must match, which are all except generation and server. */
#define CONNECTION_EXPECTED_MASK                                                                                       \
	(CONNECTION_TAG_MASK | CONNECTION_IN_USE | CONNECTION_SERVICE_MASK << CONNECTION_SERVICE_SHIFT)

/*
 * Hashes service and client (58 bits) by two rounds of multiply and shift (as in MurmurHash3's finaliser) with secret
 * odd factors. This is no PRF, but for a sender without key and results, tuples of a simple structure collide as often
 * as by chance (crates/model/tests/integration/connection_hash.rs). Clients see no bit of a result. docs/security.md
 * describes the effect of a collision.
 */
static __always_inline __u64 connection_hash(__u32 service, __u32 client_address, __u32 ports)
{
	__u64 hash = (__u64)service << 48 | (__u64)(ports & 0xffff) << 32 | client_address;

	hash = (hash ^ lb_state.connection_key.k0) * (lb_state.connection_key.k1 | 1);
	hash = (hash ^ hash >> 32) * (lb_state.connection_key.k0 | 1);
	return hash ^ hash >> 29;
}

static __always_inline struct connection *connection_at(__u64 hash, __u32 slot)
{
	__u32 partitions = connection_partition_mask + 1;
	__u32 index = (slot & CONNECTION_SLOT_MASK) * partitions + (hash & connection_partition_mask);

	return bpf_map_lookup_elem(&connections, &index);
}

/* Returns the entry in a cookie's slot, or NULL if it is not this connection's. */
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

/* Whether packets read the kernel's clock. Otherwise user space sets lb_state.clock, for comparisons with the model. */
const volatile bool packets_read_clock;

static __noinline __u32 advance_clock(__u64 jiffies)
{
	__u32 now = bpf_ktime_get_coarse_ns() / NANOSECONDS_PER_TICK;

	lb_state.clock_read_jiffies = jiffies;
	/* The coarse clock is up to a jiffy behind that of user space. */
	if ((__s32)(now - lb_state.clock) > 0)
		lb_state.clock = now;
	return lb_state.clock;
}

/* Returns lb_state.clock, which packets advance when the daemon does not. */
static __always_inline __u32 current_clock_ticks(void)
{
	/* The verifier replaces the call of bpf_jiffies64() by a load. */
	__u64 jiffies = packets_read_clock ? bpf_jiffies64() : 0;

	if (packets_read_clock && jiffies != *(volatile __u64 *)&lb_state.clock_read_jiffies)
		return advance_clock(jiffies);
	return *(volatile __u32 *)&lb_state.clock;
}

/* Counts a packet other than a SYN. Returns whether it is the first one that ends the connection. */
static __always_inline bool update_connection(struct connection *connection, __u8 tcp_flags, __u64 bytes)
{
	bool closes = tcp_flags & (TCP_FIN | TCP_RST) && !(connection->flags & CONNECTION_CLOSING);

	connection->packets++;
	connection->bytes += bytes;
	connection->last_seen = current_clock_ticks();
	if (closes)
		connection->flags |= CONNECTION_CLOSING;
	return closes;
}

/* ---- new connections ------------------------------------------------------------------------------------------- */

static __always_inline volatile __u32 *recent_set(__u64 hash)
{
	__u32 set = hash & (RECENT_CONNECTIONS / RECENT_WAYS - 1);

	return &recent_connections[set * RECENT_WAYS];
}

static __always_inline bool is_recent(__u32 recent, __u64 hash)
{
	return !((recent ^ hash >> CONNECTION_TAG_SHIFT) & ~CONNECTION_SLOT_MASK);
}

/* Returns the slot of the connection's entry if its set of recent SYNs has the connection, or else NOT_RECENT. */
static __always_inline int find_recent_slot(__u64 hash)
{
	const volatile __u32 *set = recent_set(hash);

	for (__u32 way = 0; way < RECENT_WAYS; way++) {
		__u32 recent = set[way];

		if (is_recent(recent, hash))
			return recent & CONNECTION_SLOT_MASK;
	}
	return NOT_RECENT;
}

static __always_inline __u32 recent_word(__u64 hash, __u32 slot)
{
	return (hash >> CONNECTION_TAG_SHIFT & ~CONNECTION_SLOT_MASK) | slot;
}

/*
 * Moves a connection to the front of its set. So a connection stays in the set until RECENT_WAYS others were inserted
 * since its latest SYN. A race with another CPU can remove a connection, whose next SYN takes another entry.
 */
static __noinline void move_recent(__u64 hash, __u32 slot)
{
	__u32 moved = recent_word(hash, slot);
	volatile __u32 *set = recent_set(hash);

	for (__u32 way = 0; way < RECENT_WAYS; way++) {
		__u32 next = set[way];

		set[way] = moved;
		if (is_recent(next, hash))
			return;
		moved = next;
	}
}

/* Inserts a connection at the front of its set, and removes the last. Writes two words at a time. */
static __always_inline void insert_recent(__u64 hash, __u32 slot)
{
	volatile recent_pair *set = (volatile recent_pair *)recent_set(hash);
	__u64 first = set[0], second = set[1];

	_Static_assert(RECENT_WAYS == 4, "two pairs");
	set[0] = first << 32 | recent_word(hash, slot);
	set[1] = second << 32 | first >> 32;
}

/*
 * Handles another SYN of the connection. It is not counted, so that an entry without other packets stays half-open.
 * Returns whether the connection was closing.
 */
static __always_inline bool reopen_connection(struct connection *connection)
{
	bool was_closing = connection->flags & CONNECTION_CLOSING;

	connection->last_seen = current_clock_ticks();
	connection->flags &= ~CONNECTION_CLOSING;
	return was_closing;
}

/* Writes both halves of the client's address in the layout of struct service_key. */
static __always_inline void write_client_address(struct xdp_md *ctx, const struct packet *packet, packet_u64 *half)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (is_ipv6(packet) && data + IPV6_FIELD_OFFSET(source) + IPV6_ADDRESS_BYTES <= data_end) {
		half[0] = PACKET_U64(data, IPV6_FIELD_OFFSET(source));
		half[1] = PACKET_U64(data, IPV6_FIELD_OFFSET(source) + sizeof(*half));
		return;
	}
	half[0] = 0;
	half[1] = (__u64)packet->client_address << 32 | bpf_htonl(0xffff);
}

/* Fills an entry, and writes its identity last. Does not write `next_free`, which user space may be reading. */
static __always_inline void fill_connection(struct xdp_md *ctx, struct connection *connection,
					    const struct packet *packet, __u64 tag, __u64 service_and_server)
{
	__u64 generation = connection->generation & CONNECTION_GENERATION_MASK;
	__u32 now = current_clock_ticks();

	connection->packets = 1;
	connection->bytes = frame_bytes(ctx);
	connection->last_seen = now;
	connection->opened = now;
	write_client_address(ctx, packet, (packet_u64 *)connection->client_address);
	connection->client_port = packet->ports;
	connection->flags = 0;
	__sync_lock_test_and_set(&connection->identity, tag | CONNECTION_IN_USE |
								generation << CONNECTION_GENERATION_SHIFT |
								service_and_server);
}

/* Failures to take a slot. None was free, other CPUs were faster at each attempt, or the source is at its limit. */
#define CONNECTION_TABLE_FULL -1
#define CONNECTION_CONTENDED -2
#define CONNECTION_SOURCE_LIMITED -3

/* Takes and fills a free slot of the partition for a SYN. Returns the slot, or one of the negative results above. */
static __always_inline int take_connection_inlined(struct xdp_md *ctx, const struct packet *packet, __u64 hash,
						   __u32 service, __u32 server_id)
{
	__u32 partition = hash & connection_partition_mask;
	struct connection_stack *stack = bpf_map_lookup_elem(&connection_stacks, &partition);

	if (!stack)
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
		fill_connection(ctx, connection, packet, hash & CONNECTION_TAG_MASK,
				service << CONNECTION_SERVICE_SHIFT | server_id);
		return slot_plus_one - 1;
	}
	return CONNECTION_CONTENDED;
}

/* take_connection_inlined() as a call, for callers with no stack left. */
static __noinline int take_connection(struct xdp_md *ctx, const struct packet *packet, __u64 hash, __u32 service,
				      __u32 server_id)
{
	return packet ? take_connection_inlined(ctx, packet, hash, service, server_id) : CONNECTION_TABLE_FULL;
}

/* ---- the cookie of kind 1 -------------------------------------------------------------------------------------- */

/* Returns the number of the load balancer that has the cookie's entry. */
static __always_inline __u32 cookie_owner(__u32 cookie)
{
	return cookie >> CONNECTION_SLOT_BITS & (MAX_OWNERS - 1);
}

/* Returns TSecr of a forwarded SYN, which gives owner and slot to the server. */
static __always_inline __u32 encode_syn_tsecr(__u32 owner, __u32 slot)
{
	return SYN_TSECR_HOLDS_COOKIE | COOKIE_KIND_BIT | owner << CONNECTION_SLOT_BITS | slot;
}

#endif
