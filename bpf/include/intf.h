/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/*
 * Layouts and limits that BPF programs and user space share. This file includes connections.h (flow and connection
 * tables) and counters.h, and for servers server.h, dispatch.h and orchestrate.h.
 *
 * crates/intf/build.rs (bindgen) turns this file into Rust; no layout is written twice.
 *
 * Rules: only fixed-width types, no implicit padding (the Rust side derives zerocopy's IntoBytes, which rejects
 * padding), addresses and ports in network byte order, everything else in the host's order.
 *
 * THE COOKIE (Cheetah, NSDI'20, Sect. 3.2; the layout is ours, see docs/design.md, "The cookie")
 *
 *    TSval on the wire, from server to client; the client returns it in TSecr:
 *
 *    31                              16 15  14  13                       0
 *    +--------------------------------+---+---+--------------------------+
 *    |  (ms + time mask) mod 2^16     | K | k |        id or index       |
 *    +--------------------------------+---+---+--------------------------+
 *                                       |   \___________ 15 bits, hidden by a permutation that the keyed hash draws
 *                                       index of the key, not hidden
 *
 *    permutation = by SipHash-1-3(key[K], 4-tuple), hide() of cookie.h: load balancers and servers share the keys
 *    time mask = bits 0..15 of SipHash-1-3(the server's own time key, 4-tuple): it never changes during a connection,
 *                so that time goes on when the fleet's key changes (PAWS, RFC 7323 Sect. 5)
 *    k (kind)  = 0: the id of a server; 1: owner (4 bits) and index (10 bits) of an entry in the connection table of
 *                one load balancer (stateful mode)
 */
#ifndef COREWARD_INTF_H
#define COREWARD_INTF_H

#ifndef __bpf__
#include <linux/types.h>
#endif

/* ---- the cookie ------------------------------------------------------------------------------------------------ */

#define COOKIE_KEY_BIT 0x8000u
#define COOKIE_KIND_BIT 0x4000u
#define COOKIE_ID_MASK 0x3fffu
/* Bits hidden by the keyed hash: everything but the key bit. */
#define COOKIE_HIDDEN_MASK 0x7fffu
#define COOKIE_HIDDEN_BITS 15
#define COOKIE_TIME_SHIFT 16
/* Number of server ids: all that the cookie can hold. */
#define SERVER_ID_COUNT 16384

struct cookie_key {
	__u64 k0;
	__u64 k1;
	/* Odd factor that folds the VIP into the client's word (cookie.h). User space derives it from k0 and k1. */
	__u64 vip_factor;
};

/* Keys that all load balancers and servers of the fleet share. */
struct fleet_keys {
	struct cookie_key key[2];
	/* Index of the key that stamps new TSvals (0 or 1); both keys are always accepted. */
	__u32 current;
	/*
	 * On servers: the server's own TSval (ms) from which `current` stamps; earlier TSvals are stamped with the
	 * other key. The packet's TSval decides, not the time at which it passes, so that no packet has a smaller
	 * stamped TSval than an earlier packet. The agent keeps switch_ms within 2^31 ms of now.
	 */
	__u32 switch_ms;
};

/* ---- services -------------------------------------------------------------------------------------------------- */

/* Limit of services of a load balancer, and of a server. */
#define MAX_SERVICES 1024
#define MAX_SERVICES_OF_SERVER 64
/* Bytes of a service's name: UTF-8, padded with zeros. */
#define SERVICE_NAME_BYTES 64
/*
 * Services are in a perfect hash. On servers: slot = (tail * seed) >> SERVICE_SLOT_SHIFT, where user space searches a
 * seed that gives every service a different slot. One multiplication and one comparison find a service or prove that
 * the service does not exist.
 */
#define SERVICE_SLOTS 1024
#define SERVICE_SLOT_SHIFT 54
/*
 * A load balancer has too many services for one seed, and uses "hash and displace": the upper bits of tail * seed
 * select a group, and lower bits, XOR the group's displacement, the slot. Most groups have few keys, so displacements
 * that fit are found at once. A look-up costs one load more. bpf/include/service.h has the look-up,
 * crates/dataplane/src/service_slots.rs the search.
 */
#define LB_SERVICE_SLOTS 4096
#define LB_SERVICE_SLOT_SHIFT 42
#define LB_SERVICE_GROUPS 1024
#define LB_SERVICE_GROUP_SHIFT 54

/*
 * The word of an IPv6 service: its tail, XOR address[0] and (address[1], address[2]) times these factors:
 * GOLDEN_RATIO_64 of linux/hash.h, and c2 of MurmurHash3. The word of an IPv4 service is its tail.
 */
#define SERVICE_WORD_FIRST_FACTOR 0x61c8864680b583eb
#define SERVICE_WORD_MIDDLE_FACTOR 0x4cf5ad432745937f

/* Consistency mode: method by which a service's established packets find their server. */
enum consistency {
	CONSISTENCY_STATELESS, /* by the server's id in the cookie */
	CONSISTENCY_STATEFUL, /* by an index in the cookie: the connection table */
	CONSISTENCY_NONE, /* none: the placement rule selects a server for each packet; `udp = "packet"` */
	CONSISTENCY_HASH_TABLE, /* by the flow table, which has every connection; `udp = "flow"` */
	/* by the bucket; the server forwards packets of unknown connections to the bucket's previous server */
	CONSISTENCY_BEAMER,
	CONSISTENCY_COUNT,
};

/* service_slot.number at the load balancer. */
#define SERVICE_INDEX_MASK 0x3ffu
#define SERVICE_CONSISTENCY_SHIFT 10
#define SERVICE_CONSISTENCY_MASK 0x7u
/* No packet of the service carries a cookie (`timestamps = "off"`), as if clients had no timestamps. */
#define SERVICE_TIMESTAMPS_OFF 0x2000u
/* The load balancer, not the server, stamps and restores timestamps (`timestamps = "lb"`). */
#define SERVICE_TIMESTAMPS_LB 0x4000u
/*
 * Id of another load balancer that has some of the service's connections. It is listed among the servers, and gets no
 * new connections from this one. ADOPTED: the service comes from it; HANDED_OVER: it gets all new connections.
 */
#define SERVICE_OTHER_BALANCER_SHIFT 16
#define SERVICE_ADOPTED 0x40000000u
#define SERVICE_HANDED_OVER 0x80000000u

/* Forwarding of a service's packets to its servers. */
enum forwarding {
	FORWARDING_L2, /* in a frame to the server's MAC address, on the load balancer's segment */
	FORWARDING_IPIP, /* in another IP packet (RFC 2003, RFC 2473, RFC 4213) */
	FORWARDING_GUE, /* in UDP: GUE variant 1 (draft-ietf-intarea-gue), the same bytes as FOU with protocol 4 or 41 */
	FORWARDING_COUNT,
};

/* service_slot.number on a server: the server's id in the service, and flags. */
#define SERVER_NUMBER_ID_MASK 0x3fffu
/* Cookies may hold an index: bpf/server/server.bpf.c, "The index". */
#define SERVER_NUMBER_STATEFUL 0x4000u
/* The program neither stamps nor restores timestamps. */
#define SERVER_NUMBER_TIMESTAMPS_OFF 0x8000u
/* All packets carry the previous server's id (CONSISTENCY_BEAMER), not only packets without timestamps. */
#define SERVER_NUMBER_CHAINED 0x10000u
/* Packets have an outer header, by which the NIC chose the receive queue. */
#define SERVER_NUMBER_ENCAPSULATED 0x20000u
/* The outer headers are IPv6. */
#define SERVER_NUMBER_OUTER_IPV6 0x40000u

#define ADDRESS_FAMILY_IPV4 4
#define ADDRESS_FAMILY_IPV6 6

/*
 * IPv4 addresses are in address[3], the rest as in an IPv4-mapped IPv6 address (::ffff:a.b.c.d). The last 8 bytes
 * (address[3], port, protocol, family) are the "tail": one 64-bit word that identifies an IPv4 service.
 */
struct service_key {
	__u32 address[4];
	__u16 port;
	__u8 protocol;
	__u8 family;
};

/* Result of find_service() if no service matches. */
#define NO_SERVICE 0xffffffffu
/*
 * The number in a slot with port 0 and protocol 0, which has a VIP's address alone: for ICMP, and for packets whose
 * ports cannot be read. Each VIP has one such slot.
 */
#define SERVICE_ADDRESS_ONLY 0xfffffffeu

/* 32 bytes, so that a slot's address is a shift and an addition. `number` comes first to align the key's tail. */
struct service_slot {
	/* Bits SERVICE_* at the load balancer, SERVER_NUMBER_* on a server. */
	__u32 number;
	struct service_key key;
	__u64 reserved;
};

struct service_directory {
	__u64 seed;
	struct service_slot slots[SERVICE_SLOTS];
};

/* User space fills the inactive half, activates it, and waits for an RCU grace period before the next change. */
struct service_directories {
	__u64 active;
	struct service_directory half[2];
};

struct lb_service_directory {
	__u64 seed;
	__u16 displacement[LB_SERVICE_GROUPS];
	struct service_slot slots[LB_SERVICE_SLOTS];
};

/* struct service_directories of the load balancer. */
struct lb_service_directories {
	__u64 active;
	struct lb_service_directory half[2];
};

/* ---- RSS ------------------------------------------------------------------------------------------------------- */

/* Toeplitz input of IPv4 with ports: source address, destination address, source port, destination port. */
#define RSS_INPUT_IPV4_BYTES 12
/* Toeplitz input of IPv6 with ports. */
#define RSS_INPUT_IPV6_BYTES 36
/*
 * Transform that a NIC applies to the hash input: input_xfrm of struct ethtool_rxfh (include/uapi/linux/ethtool.h).
 * UNCHANGED: none. SYMMETRIC_XOR: source and destination are both replaced by their XOR (RXH_XFRM_SYM_XOR).
 * SYMMETRIC_OR_XOR: the source is replaced by the OR of both, the destination by their XOR (RXH_XFRM_SYM_OR_XOR, the
 * default of mlx5).
 */
#define RSS_INPUT_UNCHANGED 0
#define RSS_INPUT_SYMMETRIC_XOR 1
#define RSS_INPUT_SYMMETRIC_OR_XOR 2
#define RSS_KEY_BYTES 40
#define RSS_KEY_MAX_BYTES 52
/* Source address (4 or 16) and source port (2): the bytes of the input that differ between packets of one service. */
#define RSS_SOURCE_BYTES 6
#define RSS_SOURCE_BYTES_IPV6 18
#define MAX_RSS_GROUPS 4
/* Limit of indirection table entries: ice has 2048, mlx5 256, ixgbe 128 or 512. */
#define MAX_INDIRECTION_ENTRIES 2048

/*
 * Toeplitz is linear over GF(2): hash(a ^ b) = hash(a) ^ hash(b). So the hash of a tuple is the XOR of one table entry
 * per input byte, and the part of the destination is a constant of the service.
 */
struct toeplitz_source_tables {
	__u32 byte[RSS_SOURCE_BYTES][256];
};

struct toeplitz_source_tables_ipv6 {
	__u32 byte[RSS_SOURCE_BYTES_IPV6][256];
};

/* ---- placement tables ------------------------------------------------------------------------------------------ */

#define MAX_BUCKETS 2048
#define MAX_CANDIDATES 8
/* Limit of candidates of one table, in all groups and buckets. */
#define MAX_TABLE_CANDIDATES 16384
#define MAX_CORE_SLOTS 8192
#define MAX_MEMBERS 16384

/* Loads are fractions of a core's capacity; LOAD_ONE is 1.0. */
#define LOAD_ONE_SHIFT 20
#define LOAD_ONE 1048576u

/* Method by which a new connection gets its server. */
enum placement_rule {
	PLACEMENT_RULE_TABLE = 0, /* bucket -> server, one look-up: hash, crossrss */
	PLACEMENT_RULE_LEAST_ASSIGNED =
		1, /* the bucket's candidate with the least load + connections assigned since: crossrss-plus */
	PLACEMENT_RULE_ROUND_ROBIN = 2, /* a counter: rr */
	PLACEMENT_RULE_POWER_OF_TWO = 3, /* the less loaded of two members, which a hash draws: pow2 */
	PLACEMENT_RULE_COUNT = 4,
};

struct candidate {
	__u32 load;
	__u16 server_id;
	/* Index of the core's count of connections that were assigned since the table became active. */
	__u16 core_slot;
};

struct member {
	__u32 load;
	__u16 server_id;
	__u16 reserved;
};

/*
 * Tables of all services share one memory, each with its own size: this struct, then the lists at its offsets (bytes
 * from the start of the memory). User space writes a new table into free memory, switches service_state.table_at, and
 * reuses the old table's memory after an RCU grace period, without waiting for it. A placement decision depends only on
 * the table, so that one store replaces all of its inputs.
 */
struct placement_table {
	__u64 generation;
	/* Power of two, 1..MAX_BUCKETS. */
	__u32 bucket_count;
	/* 1..MAX_RSS_GROUPS; group g's candidates of bucket b start at (g * bucket_count + b) * candidates_per_bucket. */
	__u32 group_count;
	__u32 candidates_per_bucket;
	/* Load that each connection assigned since the table became active adds to a candidate. */
	__u32 assignment_cost;
	__u32 member_count;
	__u32 rule;
	/* By group: share of the service's address and port in the Toeplitz hash, to be XORed. */
	__u32 toeplitz_destination[MAX_RSS_GROUPS];
	/*
	 * By group: offset of struct toeplitz_source_tables (IPv6: toeplitz_source_tables_ipv6), which all placement
	 * tables with the same key share.
	 */
	__u32 toeplitz_source_offset[MAX_RSS_GROUPS];
	/* __u16 by bucket: server of connections without a cookie, which changes only when the pool changes. */
	__u32 consistent_at;
	/*
	 * __u16 by bucket: server before the bucket's last change, which may still have the bucket's older
	 * connections; or NO_SERVER.
	 */
	__u32 previous_consistent_offset;
	/* List of struct candidate. */
	__u32 candidates_at;
	/* List of struct member. */
	__u32 members_offset;
	/* __u32 by core slot: connections assigned since the core's load was last new. */
	__u32 assigned_offset;
	/* Size of the table in bytes, this struct included. */
	__u32 bytes;
};

/* The memory has 2^k bytes and this slack, so that any struct fits at an offset masked with 2^k - 1. */
#define PLACEMENT_MEMORY_SLACK 262144
#define MIN_PLACEMENT_MEMORY 4194304
#define MAX_PLACEMENT_MEMORY 268435456

#define NO_SERVER 0xffffu
/*
 * A flow's `previous_server` with LB-side stamping (lb_cookie.h, section 2), if the SYN-ACK was not stamped, and the
 * client has sent no packet since. The other bits are those of the SYN-ACK's TSval from HALF_OPEN_TIME_SHIFT on: 262 s
 * of a clock that ticks in ms, 0.26 s if it ticks in us.
 */
#define HALF_OPEN_FLOW 0x8000u
#define HALF_OPEN_FLOW_MASK 0xc000u
#define HALF_OPEN_TIME_SHIFT 18
#define HALF_OPEN_TIME_MASK 0x3fffu
/* Maximum difference of a SYN-ACK's TSval from the client's TSecr, in the same unit: SYN-ACKs are retransmitted. */
#define HALF_OPEN_TIME_TOLERANCE 64
/* A flow's `previous_server` if the client has answered another, stamped SYN-ACK. */
#define STAMPED_FLOW 0xfffeu

#define NO_BROADCAST_VLAN 0xffffu

/* State of a service: 64 bytes, so that each service has a separate cache line. */
struct service_state {
	/* Offset of the service's placement table; 0: none. */
	__u32 table_at;
	__u32 reserved;
	/* The counter of rule ROUND_ROBIN. */
	__u64 round_robin;
	/* `timestamps = "lb"`: key of the time mask, the same at all load balancers, constant while connections live. */
	struct cookie_key time_key;
	/* 1: a SYN has stored a flow. Until then a service of CONSISTENCY_BEAMER does not read the flow table. */
	__u64 has_flows;
	/* enum forwarding. */
	__u64 forwarding;
	/* VLAN of all servers of the service; 0: untagged; NO_BROADCAST_VLAN: the servers are in several VLANs. */
	__u64 broadcast_vlan;
};

/* ---- the broadcast fallback ------------------------------------------------------------------------------------ */

/* Kinds of rate-limited packets: broadcasts by cause, and ICMP errors. Each kind has a separate rate limit. */
enum limited_kind {
	LIMITED_UNKNOWN_COOKIE, /* a cookie that names no server and no connection */
	LIMITED_RESET, /* a reset without timestamps */
	LIMITED_ICMP_ERROR, /* an ICMP error whose quote names no server */
	LIMITED_OWNER_LOST, /* a cookie with an index of a connection table that is lost */
	LIMITED_FRAGMENTATION_NEEDED, /* an ICMP error to a packet's sender, which is no broadcast */
	LIMITED_KIND_COUNT,
};

/* Length of arrays by enum limited_kind: a power of two, so that a mask bounds the index. */
#define LIMITED_KIND_SLOTS 8

/* Number of buckets per source; sources share a bucket by their hash. */
#define BROADCAST_SHARDS 4096

/*
 * Token buckets, each as the time (CLOCK_MONOTONIC, ns) until which the taken tokens are paid for. A packet takes a
 * token of its source, then one of its service, then one of the load balancer, so that no single source uses up a
 * service's tokens.
 */
struct broadcast_buckets {
	__u64 per_source[BROADCAST_SHARDS];
	__u64 per_service[MAX_SERVICES][LIMITED_KIND_SLOTS];
	__u64 total[LIMITED_KIND_SLOTS];
};

/* ---- servers as the load balancer sees them -------------------------------------------------------------------- */

/* The server is a member of the service. */
#define SERVER_KNOWN 1u
/* The server gets new connections. A draining or unhealthy server gets only packets of established ones. */
#define SERVER_ELIGIBLE 2u
/* The server is down by this load balancer's own health checks, and so not ELIGIBLE. */
#define SERVER_MASKED 4u
/* The server is down by the controller's decision, which is part of the service's placement table. */
#define SERVER_DOWN 8u
/* The server's MAC address is known; the same for all services. */
#define SERVER_RESOLVED 16u

/* Flags that are stored per service: SERVER_MEMBERS_PER_WORD servers in a word of 64 bits, by id. */
#define SERVER_MEMBER_BITS 4
#define SERVER_MEMBER_MASK (SERVER_KNOWN | SERVER_ELIGIBLE | SERVER_MASKED | SERVER_DOWN)
#define SERVER_MEMBERS_PER_WORD 16
#define MEMBERSHIP_WORDS 1024

/* Entry of an array by server id, the same for all services. 8 bytes, so that an entry is one load. */
struct server_entry {
	__u8 mac_address[6];
	__u16 flags;
};

/* Outer headers. */
#include "server_tunnels.h"

/* Clocks of servers that the load balancer stamps for. */
#include "server_clock.h"

/*
 * Traffic of all services from this load balancer to a server. Each row of counters has one such struct per server id.
 */
struct server_traffic {
	/* New connections that the placement rule sent to the server. */
	__u64 opened;
	/* Packets with a cookie and FIN or RST. (Without a connection table a retransmission counts again.) */
	__u64 closed;
	__u64 packets;
	__u64 bytes;
};

/* Tables of connections. */
#include "connections.h"

/* ---- state of the load balancer that outlives its process ------------------------------------------------------ */

/* Grows whenever a pinned layout or its meaning changes, so that a daemon takes over only state that it understands. */
#define LB_LAYOUT_VERSION 17

/* `layout_version` and `counters_by_cpu` keep their offsets, because other layout versions read them. */
struct lb_state {
	__u64 layout_version;
	/* The device's MAC address: the first 8 bytes of a frame sent to it, shifted left by 16. */
	__u64 own_mac_shifted;
	/* 1: the program was loaded for generic XDP. */
	__u64 counters_by_cpu;
	/* Source of IPv4 outer headers: the device's first IPv4 address. */
	__u32 own_address;
	/* Longest packet that leaves by the device, its outer header included. */
	__u32 mtu;
	struct fleet_keys keys;
	/* Key of the connection table's hash: of this load balancer only, constant for the table's lifetime. */
	struct cookie_key connection_key;
	/* CLOCK_MONOTONIC in 0.1 s, set by the daemon and by packets of stateful services (connection_time()). */
	__u32 clock;
	/* This load balancer's number among those with a connection table; MAX_OWNERS: no number was assigned yet. */
	__u32 owner;
	/* Entries of the connection table that one source prefix may hold; 0: not set yet, any number. */
	__u64 entries_per_source;
	struct connection_timers timers;
	/* jiffies at a packet's last read of the clock. */
	__u64 clock_read_jiffies;
	/* MAC addresses of all owners. Without SERVER_RESOLVED the owner is lost, or the number is unused. */
	struct server_entry owners[MAX_OWNERS];
	struct lb_service_directories directories;
	struct service_state services[MAX_SERVICES];
	/* Bits of the flow table's filter (find_plain_flow()): 0 means that no flow with this bit was ever stored. */
	__u64 flow_filter[FLOW_FILTER_WORDS];
	/* Names by index, for commands that read the state without daemon and controller. */
	__u8 service_names[MAX_SERVICES][SERVICE_NAME_BYTES];
	/* Source of IPv6 outer headers: the device's first IPv6 address that is not link-local. */
	__u64 own_address_ipv6[2];
	/* VLAN of each server, by id; 0: untagged. */
	__u16 server_vlans[SERVER_ID_COUNT];
};

/*
 * Recent placements by rules with a state (LEAST_ASSIGNED, ROUND_ROBIN), so that a retransmitted SYN reaches the same
 * server while the table is in force. The array is direct-mapped. An entry is one word:
 *
 *    63             32 31 30          24 23        14 13        0
 *    +----------------+--+--------------+------------+-----------+
 *    | Toeplitz hash  |1 | generation   |  service   | server id |
 *    +----------------+--+--------------+------------+-----------+
 */
#define RECENT_PLACEMENTS 4096
#define RECENT_HASH_SHIFT 32
#define RECENT_VALID_BIT 0x80000000u
#define RECENT_GENERATION_SHIFT 24
#define RECENT_GENERATION_MASK 0x7fu
#define RECENT_SERVICE_SHIFT 14

/* Counters. */
#include "counters.h"

/* ---- capture and health checks --------------------------------------------------------------------------------- */

/* Record of one packet for capture.h; the first captured_length bytes of the frame follow. */
struct captured_packet {
	/* Time of the record by CLOCK_MONOTONIC, in ns. */
	__u64 time_ns;
	/* Number of the packet on this CPU; equal in the records of arrival and decision. */
	__u64 sequence;
	/* Length of the frame at the time of the record. */
	__u32 length;
	__u32 captured_length;
	/* CAPTURE_ARRIVED, or the XDP action that was decided. */
	__u32 action;
	/* enum lb_counter; only in the record of the decision. */
	__u32 outcome;
};
#define CAPTURE_ARRIVED 0xffffffffu

/* An address in network order, IPv4 as in struct service_key. */
struct nat_address {
	__u32 word[4];
};

/* Addresses and ports in packets of one direction of a health check (health.bpf.c), in network order. */
struct nat_entry {
	/* The server's own address in packets to the server, the VIP in packets from it. */
	struct nat_address address;
	/* Port of the server. */
	__u16 port;
	/* Port of the load balancer. */
	__u16 own_port;
};
#define MAX_NAT_ENTRIES 4096

/* Number of rows in arrays by CPU. Further CPUs share rows, so that increments may be lost now and then. */
#define MAX_CPUS 512

#include "server.h"
#include "dispatch.h"
#include "orchestrate.h"

/* ---- the testbed's emulated NIC -------------------------------------------------------------------------------- */

/*
 * The "registers" of one server's emulated NIC. veth has no RSS, so testbed/rss_emulation.bpf.c computes it at tc
 * egress of the server's switch port. The struct is an entry of an array map that the testbed pins. The agent reads and
 * writes it as it does a real NIC by ETHTOOL_GRSSH and ETHTOOL_SRSSH. The writer of the key fills mapping.byte from it.
 */
struct emulated_rss {
	struct rss_mapping mapping;
	__u8 key[RSS_KEY_BYTES];
	/*
	 * Number of positions by which the table entry of established connections is shifted, as a flow director moves
	 * connections; 0: no shift.
	 */
	__u32 established_shift;
	__u32 reserved;
};

/* A flow as recorded by testbed/receive_queues.bpf.c (tests only). */
struct received_flow {
	/* Receive queue + 1; 0: none was recorded. */
	__u32 recorded_queue;
	__u32 hash;
};

#endif
