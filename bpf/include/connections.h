/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of the load balancer's flow and connection tables, which user space reads and frees. Included by intf.h. */
#ifndef COREWARD_INCLUDE_CONNECTIONS_H
#define COREWARD_INCLUDE_CONNECTIONS_H

#include "counters.h"

/* ---- the flow table: connections whose packets carry no cookie -------------------------------------------------- */

/* Number of entries in a set. A connection's keyed hash gives the set and the entry's tag (bpf/lb/flow_table.h). */
#define FLOW_SET_ENTRIES 8
/* log2 of the filter's size in bits, which is one bit per set in a flow table with the default size. */
#define FLOW_FILTER_BITS 17
#define FLOW_FILTER_WORD_SHIFT 6
#define FLOW_FILTER_WORD_BITS 64
#define FLOW_FILTER_WORDS 2048
#define DEFAULT_FLOW_TABLE_ENTRIES 1048576

/*
 * `flow` is the part of an entry that decisions depend on. It is read and written as one word. A word of 0 is a free
 * entry, because tags are odd.
 *
 *    63                32 31          16 15           0
 *    +-------------------+--------------+--------------+
 *    | tag               | previous     | server id    |
 *    +-------------------+--------------+--------------+
 *
 * `use` determines which entry is evicted.
 *
 *    63       50   49   48  47           32 31                  0
 *    +----------+------+---+---------------+---------------------+
 *    | 0        | hint |UDP| service       | last packet's time  |
 *    +----------+------+---+---------------+---------------------+
 */
#define FLOW_TAG_SHIFT 32
#define FLOW_PREVIOUS_SHIFT 16
#define FLOW_SERVICE_SHIFT 32
#define FLOW_UDP_SHIFT 48
#define FLOW_HINT_SHIFT 49
/* Mark of a hint. The bucket has the same server, unless its server has changed. Hints evict only hints. */
#define FLOW_HINT 1u

/* A set of flows, in two cache lines (128 bytes), of which a look-up reads one. */
struct flow_set {
	__u64 flow[FLOW_SET_ENTRIES];
	__u64 use[FLOW_SET_ENTRIES];
};

/*
 * Idle time after which an entry counts as free, in ticks of lb_state.clock (0.1 s). It is 5 min for UDP (RFC 4787,
 * REQ-5), and 2 h 4 min for TCP (RFC 5382, REQ-5).
 */
#define FLOW_IDLE_UDP_TICKS 3000
#define FLOW_IDLE_TCP_TICKS 74400

struct flow_table_entry {
	__u16 server_id;
	/* Server to which `server_id` forwards unknown packets (previous_consistent_offset), or NO_SERVER. */
	__u16 previous_server;
};

/* Key of a fragmented datagram. It lacks the ports, which only the first fragment carries. */
struct fragment_key {
	__u32 client_address[4];
	__u32 vip_address[4];
	__u32 identification;
	__u32 protocol;
};

/* Service and server of the datagram's first fragment. */
struct fragment_entry {
	__u16 service;
	__u16 server_id;
};

#define MAX_FRAGMENTED_DATAGRAMS 4096

/*
 * The load balancer sends the previous server's id to the server in the IP identification, which is unused in an
 * unfragmented datagram (RFC 6864, Sect. 4.1). NO_SERVER means none. Fragments never carry an id.
 */

/* ---- the connection table (stateful mode; Cheetah, Sect. 3.2) --------------------------------------------------- */

/*
 * The table has 2^k partitions of 1024 entries. A keyed hash of the connection selects the partition, and a stack of
 * free slots (ConnStack) gives the slot in it. The cookie holds owner and slot, while partition and tag come from the
 * hash. So a cookie of 14 bits serves a table of any size.
 */
#define CONNECTION_SLOT_BITS 10
#define CONNECTIONS_PER_PARTITION 1024
#define CONNECTION_SLOT_MASK 0x3ffu
#define CONNECTION_OWNER_BITS 4
#define MAX_OWNERS 16
#define DEFAULT_CONNECTION_TABLE_ENTRIES 262144
#define MAX_CONNECTION_TABLE_ENTRIES 4194304

/*
 * connection.identity is the part that decisions depend on, read and written as one word. It is 0 in a free entry.
 *
 *    63            32 31 30          24 23      14 13          0
 *    +---------------+--+--------------+----------+-------------+
 *    | tag           |1 | generation   | service  | server id   |
 *    +---------------+--+--------------+----------+-------------+
 */
#define CONNECTION_TAG_SHIFT 32
#define CONNECTION_IN_USE 0x80000000u
#define CONNECTION_GENERATION_SHIFT 24
#define CONNECTION_GENERATION_MASK 0x7fu
#define CONNECTION_SERVICE_SHIFT 14
#define CONNECTION_SERVICE_MASK 0x3ffu

/*
 * The connection had a FIN or RST, so the entry may be freed sooner. It is not freed at once, because either packet may
 * be forged, and a FIN closes only one direction.
 */
#define CONNECTION_CLOSING 1u

/* An entry of the connection table, which fills a cache line (64 bytes). */
struct connection {
	__u64 identity;
	__u64 packets;
	/* Bytes of frames from the client. */
	__u64 bytes;
	/* lb_state.clock at the last packet, and at the first one. */
	__u32 last_seen;
	__u32 opened;
	__u32 client_address[4];
	__u16 client_port;
	__u16 flags;
	/* In a free entry, the slot of the partition's next free entry plus 1, or 0 if this is the last free entry. */
	__u32 next_free;
	/* Generation of the entry's next use. Its low bits go into `identity`. */
	__u32 generation;
	__u32 reserved;
};

/*
 * Top of a partition's stack of free slots. The low 16 bits are the slot plus 1, or 0 if the stack is empty. The count
 * above them grows with every change, so that a compare-and-swap fails on a stack that has changed and changed back
 * (ABA). The struct fills a cache line.
 */
struct connection_stack {
	__u64 top;
	/* Slot at which the next SYN without a free slot begins its search for an expired entry. */
	__u64 hand;
	__u64 unused[6];
};
#define CONNECTION_STACK_SLOT_MASK 0xffffu
#define CONNECTION_STACK_COUNT_SHIFT 16
/* Maximum number of attempts to take a free slot. After that the connection gets a stateless cookie. */
#define CONNECTION_TAKE_ATTEMPTS 8
/*
 * Number of entries, each a cache miss, that a new connection examines if no slot is free. If a tenth of a partition
 * has expired, one new connection in three gets an entry, and 256 new connections examine the whole partition.
 */
#define CONNECTION_HAND_PROBES 4

/* Idle times after which an entry may be freed, in ticks of lb_state.clock (ConnectionTimeouts of the model). */
struct connection_timers {
	__u32 half_open;
	__u32 closing;
	__u32 idle;
	/* Value of lb_state.clock at user space's last sweep. */
	__u32 swept;
};
/* Ticks (0.1 s) without a sweep after which packets reuse expired entries. User space waits as long for an agent. */
#define CONNECTION_UNSWEPT_TICKS 600

/*
 * Entries of recent SYNs, for retransmitted SYNs. The connection's hash selects a set of RECENT_WAYS words, in which
 * the latest SYN is first. A word has the upper bits of the tag and, in the low CONNECTION_SLOT_BITS, the slot. It is
 * only a hint, because the entry's identity decides. The tag saves a new connection from reading another connection's
 * entry, which is rarely in a cache.
 *
 * The sets fit the second-level cache. At 4,000 SYN/s they lose 2 % of the connections before the first retransmission,
 * which comes after a second. A direct-mapped array of this size loses 22 %.
 */
#define RECENT_CONNECTIONS 16384
#define RECENT_WAYS 4

/* Number of counters for source prefixes (/24, in IPv6 /64). Prefixes with the same hash share a counter. */
#define SOURCE_SHARDS 4096

/* Number of allocations in one row of counters (MAX_LB_COUNTER_ROWS), in its own cache line. */
struct connection_takes_row {
	__u64 count;
	__u64 unused[7];
};

/* Number of entries per source prefix, which packets add and user space subtracts, and number of allocations by row. */
struct connection_takes {
	__u64 entries_by_source[SOURCE_SHARDS];
	struct connection_takes_row by_row[MAX_LB_COUNTER_ROWS];
};

/*
 * The load balancer sends the connection's index to the server in the SYN's TSecr, which clients always set to 0 (RFC
 * 7323, Sect. 3.2). The server's ingress program removes it. TSecr has this bit and the cookie's kind, owner and slot.
 */
#define SYN_TSECR_HOLDS_COOKIE 0x10000u

#endif
