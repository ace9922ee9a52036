/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/*
 * Layouts and limits that the BPF programs share with user space. This file includes connections.h (flow and connection
 * tables) and counters.h, and for servers server.h, dispatch.h and orchestrate.h.
 *
 * crates/intf/build.rs generates Rust types from this file by bindgen, so that no layout is written twice.
 *
 * All integers have a fixed width, and no struct has implicit padding, because the Rust types derive zerocopy's
 * IntoBytes, which rejects padding. Addresses and ports are in network byte order, everything else in the host's order.
 *
 * THE COOKIE (Cheetah, NSDI'20, Sect. 3.2; the layout is ours, see docs/design.md, "The cookie")
 *
 * The server sends the cookie to the client in TSval, and the client returns it in TSecr:
 *
 *    31                              16 15  14  13                       0
 *    +--------------------------------+---+---+--------------------------+
 *    |  (ms + time mask) mod 2^16     | K | k |        id or index       |
 *    +--------------------------------+---+---+--------------------------+
 *                                       |   \___________ 15 bits, permuted by the keyed hash, so unreadable
 *                                       index of the key, readable
 *
 * The permutation is hide() of cookie.h with SipHash-1-3(key[K], 4-tuple), whose keys load balancers and servers share.
 *
 * The time mask is bits 0..15 of SipHash-1-3(the server's own time key, 4-tuple). It never changes during a connection,
 * so TSval does not jump when the fleet's key changes (PAWS, RFC 7323 Sect. 5).
 *
 * k (the kind) is 0 if the cookie holds a server's id. It is 1 if the cookie holds the owner (4 bits) and index (10
 * bits) of an entry in one load balancer's connection table (stateful mode).
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
/* Bits that the keyed hash hides, which are all except the key bit. */
#define COOKIE_HIDDEN_MASK 0x7fffu
#define COOKIE_HIDDEN_BITS 15
#define COOKIE_TIME_SHIFT 16
/* Number of different server ids that a cookie can hold. */
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
	/* Index (0 or 1) of the key that stamps new TSvals. Cookies of both keys are always accepted. */
	__u32 current;
	/*
	 * On servers, the first TSval (in ms, before stamping) that `current` stamps. Earlier TSvals are stamped with
	 * the other key. A packet's TSval selects the key, not the time at which the packet passes, so that a
	 * connection's stamped TSvals never decrease. The agent keeps switch_ms within 2^31 ms of now.
	 */
	__u32 switch_ms;
};

/* ---- services -------------------------------------------------------------------------------------------------- */

/* Maximum number of services at a load balancer, and on a server. */
#define MAX_SERVICES 1024
#define MAX_SERVICES_OF_SERVER 64
/* Length of a service's name in bytes. The name is UTF-8, padded with zeros. */
#define SERVICE_NAME_BYTES 64
/*
 * Services are found by a perfect hash. On servers, slot = (tail * seed) >> SERVICE_SLOT_SHIFT, where the tail is the
 * end of struct service_key. User space searches a seed that gives every service a different slot. One multiplication
 * and one comparison find a service or prove that it does not exist.
 */
#define SERVICE_SLOTS 1024
#define SERVICE_SLOT_SHIFT 54
/*
 * A load balancer has too many services for one seed, so it uses the method "hash and displace". The upper bits of tail
 * * seed select a group, and lower bits, XOR the group's displacement, select the slot. Most groups have few services,
 * so user space finds displacements without collisions quickly. A look-up costs one more load. bpf/include/service.h
 * has the look-up, crates/dataplane/src/service_slots.rs the search.
 */
#define LB_SERVICE_SLOTS 4096
#define LB_SERVICE_SLOT_SHIFT 42
#define LB_SERVICE_GROUPS 1024
#define LB_SERVICE_GROUP_SHIFT 54

/*
 * The perfect hash finds an IPv4 service by its tail. It finds an IPv6 service by the tail, XOR address[0] and
 * (address[1], address[2]) times these factors, which are GOLDEN_RATIO_64 of linux/hash.h and c2 of MurmurHash3.
 */
#define SERVICE_WORD_FIRST_FACTOR 0x61c8864680b583eb
#define SERVICE_WORD_MIDDLE_FACTOR 0x4cf5ad432745937f

/* Consistency mode of a service, which is the method by which its established packets find their server. */
enum consistency {
	CONSISTENCY_STATELESS, /* the server's id in the cookie */
	CONSISTENCY_STATEFUL, /* an index in the cookie, which names an entry of the connection table */
	CONSISTENCY_NONE, /* none, because the placement rule selects a server for each packet (`udp = "packet"`) */
	CONSISTENCY_HASH_TABLE, /* the flow table, which has every connection (`udp = "flow"`) */
	/* The bucket's server, which forwards packets of unknown connections to the bucket's previous server. */
	CONSISTENCY_BEAMER,
	CONSISTENCY_COUNT,
};

/* Parts of service_slot.number at the load balancer. */
#define SERVICE_INDEX_MASK 0x3ffu
#define SERVICE_CONSISTENCY_SHIFT 10
#define SERVICE_CONSISTENCY_MASK 0x7u
/* Flag of a service whose packets carry no cookie (`timestamps = "off"`), as if clients had no timestamps. */
#define SERVICE_TIMESTAMPS_OFF 0x2000u
/* Flag of a service whose timestamps the load balancer stamps and restores, not the server (`timestamps = "lb"`). */
#define SERVICE_TIMESTAMPS_LB 0x4000u
/*
 * Id of the other load balancer while a service is migrated. That load balancer has some of the service's connections.
 * It is listed among the servers, but the placement rule gives it no new connections. ADOPTED means that the service is
 * moved from it to this one. HANDED_OVER means that it gets all new connections.
 */
#define SERVICE_OTHER_BALANCER_SHIFT 16
#define SERVICE_ADOPTED 0x40000000u
#define SERVICE_HANDED_OVER 0x80000000u

/* Method by which a service's packets are sent to its servers. */
enum forwarding {
	FORWARDING_L2, /* in a frame to the server's MAC address, on the load balancer's segment */
	FORWARDING_IPIP, /* in another IP packet (RFC 2003, RFC 2473, RFC 4213) */
	FORWARDING_GUE, /* in UDP as GUE variant 1 (draft-ietf-intarea-gue), the same bytes as FOU with protocol 4 or 41 */
	FORWARDING_COUNT,
};

/* Parts of service_slot.number on a server, which are the server's id in the service and flags. */
#define SERVER_NUMBER_ID_MASK 0x3fffu
/* Flag of a service whose cookies may hold an index (bpf/server/server.bpf.c, "The index"). */
#define SERVER_NUMBER_STATEFUL 0x4000u
/* Flag of a service whose timestamps the server neither stamps nor restores. */
#define SERVER_NUMBER_TIMESTAMPS_OFF 0x8000u
/* Flag of a service whose packets all carry the previous server's id (CONSISTENCY_BEAMER), even with timestamps. */
#define SERVER_NUMBER_CHAINED 0x10000u
/* Flag of a service whose packets have an outer header, by which the NIC chose the receive queue. */
#define SERVER_NUMBER_ENCAPSULATED 0x20000u
/* Flag of a service whose outer headers are IPv6. */
#define SERVER_NUMBER_OUTER_IPV6 0x40000u

#define ADDRESS_FAMILY_IPV4 4
#define ADDRESS_FAMILY_IPV6 6

/*
 * Key of a service. An IPv4 address is in address[3], the rest as in an IPv4-mapped IPv6 address (::ffff:a.b.c.d). The
 * last 8 bytes (address[3], port, protocol, family) are the "tail", a 64-bit word that identifies an IPv4 service.
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
 * Number of the slot that each VIP has for its address alone, with port 0 and protocol 0. By this slot a program
 * recognises a VIP in ICMP, and in packets whose ports cannot be read.
 */
#define SERVICE_ADDRESS_ONLY 0xfffffffeu

/* A slot has 32 bytes, so that its address is a shift and an addition. `number` is first to align the key's tail. */
struct service_slot {
	/* SERVICE_* bits at the load balancer, SERVER_NUMBER_* bits on a server. */
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

/* The load balancer's struct service_directories. */
struct lb_service_directories {
	__u64 active;
	struct lb_service_directory half[2];
};

/* ---- RSS ------------------------------------------------------------------------------------------------------- */

/* Length of the Toeplitz input of IPv4, namely source address, destination address, source port, destination port. */
#define RSS_INPUT_IPV4_BYTES 12
/* Length of the Toeplitz input of IPv6, with ports as in IPv4. */
#define RSS_INPUT_IPV6_BYTES 36
/*
 * Transform that a NIC applies to the hash input, as in input_xfrm of struct ethtool_rxfh
 * (include/uapi/linux/ethtool.h). SYMMETRIC_XOR replaces source and destination both by their XOR (RXH_XFRM_SYM_XOR).
 * SYMMETRIC_OR_XOR replaces the source by the OR of both, and the destination by their XOR (RXH_XFRM_SYM_OR_XOR, the
 * default of mlx5).
 */
#define RSS_INPUT_UNCHANGED 0
#define RSS_INPUT_SYMMETRIC_XOR 1
#define RSS_INPUT_SYMMETRIC_OR_XOR 2
#define RSS_KEY_BYTES 40
#define RSS_KEY_MAX_BYTES 52
/* Length of source address (4 or 16) and source port (2), which alone differ between packets of one service. */
#define RSS_SOURCE_BYTES 6
#define RSS_SOURCE_BYTES_IPV6 18
#define MAX_RSS_GROUPS 4
/* Maximum number of entries in an indirection table. The NICs of ice have 2048, mlx5 256, ixgbe 128 or 512. */
#define MAX_INDIRECTION_ENTRIES 2048

/*
 * Tables for the source's part of a Toeplitz hash. Toeplitz is linear over GF(2): hash(a ^ b) = hash(a) ^ hash(b). So
 * the hash of a tuple is the XOR of one table entry per input byte, and the destination's part is constant for a
 * service.
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
/* Maximum number of candidates in one table, over all groups and buckets. */
#define MAX_TABLE_CANDIDATES 16384
#define MAX_CORE_SLOTS 8192
#define MAX_MEMBERS 16384

/* Load of 1.0, in the fixed-point form of all loads. A load is a fraction of a core's capacity. */
#define LOAD_ONE_SHIFT 20
#define LOAD_ONE 1048576u

/* Method by which a new connection gets its server. */
enum placement_rule {
	PLACEMENT_RULE_TABLE = 0, /* the server of the connection's bucket, by one look-up (policies hash, crossrss) */
	PLACEMENT_RULE_LEAST_ASSIGNED =
		1, /* the bucket's candidate with the least load, including newly assigned connections (crossrss-plus) */
	PLACEMENT_RULE_ROUND_ROBIN = 2, /* the next member in turn (policy rr) */
	PLACEMENT_RULE_POWER_OF_TWO = 3, /* the less loaded of two members that a hash draws (policy pow2) */
	PLACEMENT_RULE_COUNT = 4,
};

struct candidate {
	__u32 load;
	__u16 server_id;
	/* Index of the core's counter in the table's list of assigned connections. */
	__u16 core_slot;
};

struct member {
	__u32 load;
	__u16 server_id;
	__u16 reserved;
};

/*
 * Header of a placement table, which the table's lists follow. The tables of all services share one memory, and offsets
 * count bytes from its start. User space writes a new table into free memory and switches service_state.table_at to it.
 * The old table's memory is reused after an RCU grace period, for which user space does not block. A placement decision
 * depends only on the table, so that one store replaces all of the decision's inputs.
 */
struct placement_table {
	__u64 generation;
	/* Number of buckets in a group, a power of two in 1..MAX_BUCKETS. */
	__u32 bucket_count;
	/*
	 * 1..MAX_RSS_GROUPS. Candidates of group g's bucket b start at (g * bucket_count + b) * candidates_per_bucket.
	 */
	__u32 group_count;
	__u32 candidates_per_bucket;
	/* Load that each counted connection in the list at `assigned_offset` adds to a candidate. */
	__u32 assignment_cost;
	__u32 member_count;
	__u32 rule;
	/* Part of each group's Toeplitz hash from the service's address and port, to be XORed with the source's. */
	__u32 toeplitz_destination[MAX_RSS_GROUPS];
	/*
	 * Offset of each group's struct toeplitz_source_tables (for IPv6 toeplitz_source_tables_ipv6). All placement
	 * tables with the same RSS key share it.
	 */
	__u32 toeplitz_source_offset[MAX_RSS_GROUPS];
	/* Offset of a __u16 per bucket, the server of connections without a cookie. It changes only with the pool. */
	__u32 consistent_at;
	/*
	 * Offset of a __u16 per bucket, the server before the bucket's last change, or NO_SERVER. That server may still
	 * have the bucket's older connections.
	 */
	__u32 previous_consistent_offset;
	/* Offset of a list of struct candidate. */
	__u32 candidates_at;
	/* Offset of a list of struct member. */
	__u32 members_offset;
	/* Offset of a __u32 per core slot, the number of connections assigned since the core's load was new. */
	__u32 assigned_offset;
	/* Size of the table in bytes, including this struct and all lists. */
	__u32 bytes;
};

/* Bytes after the 2^k bytes of the placement memory, so that any struct fits at an offset masked with 2^k - 1. */
#define PLACEMENT_MEMORY_SLACK 262144
#define MIN_PLACEMENT_MEMORY 4194304
#define MAX_PLACEMENT_MEMORY 268435456

#define NO_SERVER 0xffffu
/*
 * Mark in the `previous_server` of a flow with LB-side stamping (lb_cookie.h, section 2) whose SYN-ACK was not stamped,
 * while the client has sent no packet since. The other bits are those of the SYN-ACK's TSval from HALF_OPEN_TIME_SHIFT
 * on. They count in steps of 262 s if the server's clock ticks in ms, or 0.26 s if it ticks in us.
 */
#define HALF_OPEN_FLOW 0x8000u
#define HALF_OPEN_FLOW_MASK 0xc000u
#define HALF_OPEN_TIME_SHIFT 18
#define HALF_OPEN_TIME_MASK 0x3fffu
/* Maximum difference, in these steps, between a SYN-ACK's TSval and TSecr. SYN-ACKs may be retransmitted. */
#define HALF_OPEN_TIME_TOLERANCE 64
/* Value of a flow's `previous_server` if the client has answered another SYN-ACK, which was stamped. */
#define STAMPED_FLOW 0xfffeu

#define NO_BROADCAST_VLAN 0xffffu

/* State of one service. It has 64 bytes, so that each service has its own cache line. */
struct service_state {
	/* Offset of the service's placement table, or 0 without one. */
	__u32 table_at;
	__u32 reserved;
	/* Counter of choices by rule ROUND_ROBIN. */
	__u64 round_robin;
	/* Key of the time mask of `timestamps = "lb"`, which all load balancers share while connections live. */
	struct cookie_key time_key;
	/* 1 after a SYN has stored a flow. Until then a service of CONSISTENCY_BEAMER does not read the flow table. */
	__u64 has_flows;
	__u64 forwarding;
	/* VLAN of all the service's servers, 0 if they are untagged, NO_BROADCAST_VLAN if they are in several VLANs. */
	__u64 broadcast_vlan;
};

/* ---- the broadcast fallback ------------------------------------------------------------------------------------ */

/* Kinds of rate-limited packets, which are broadcasts by cause, and ICMP errors. Each kind has its own rate limit. */
enum limited_kind {
	LIMITED_UNKNOWN_COOKIE, /* a cookie that names no known server or connection */
	LIMITED_RESET, /* a reset without timestamps */
	LIMITED_ICMP_ERROR, /* an ICMP error whose quoted packet names no server */
	LIMITED_OWNER_LOST, /* a cookie with an index of a lost connection table */
	LIMITED_FRAGMENTATION_NEEDED, /* an ICMP error to a packet's sender, which is not broadcast */
	LIMITED_KIND_COUNT,
};

/* Length of arrays that are indexed by enum limited_kind. It is a power of two, so that a mask bounds the index. */
#define LIMITED_KIND_SLOTS 8

/* Number of token buckets for sources. Sources with the same hash share a bucket. */
#define BROADCAST_SHARDS 4096

/*
 * Token buckets of the broadcast fallback. Each is stored as the time (CLOCK_MONOTONIC, ns) at which all taken tokens
 * will be refilled. A packet takes tokens of its source, its service and the load balancer, in this order, so that no
 * single source uses up a service's tokens.
 */
struct broadcast_buckets {
	__u64 per_source[BROADCAST_SHARDS];
	__u64 per_service[MAX_SERVICES][LIMITED_KIND_SLOTS];
	__u64 total[LIMITED_KIND_SLOTS];
};

/* ---- servers as the load balancer sees them -------------------------------------------------------------------- */

/* The server is a member of the service. */
#define SERVER_KNOWN 1u
/* The server gets new connections. A draining or unhealthy server gets only packets of established connections. */
#define SERVER_ELIGIBLE 2u
/* This load balancer's own health checks find the server down, so the server is not ELIGIBLE. */
#define SERVER_MASKED 4u
/* The controller has decided that the server is down, and has written this into the service's placement table. */
#define SERVER_DOWN 8u
/* The server's MAC address is known. This flag is the same for all services. */
#define SERVER_RESOLVED 16u

/* Layout of the flags stored per service. A word of 64 bits has those of SERVER_MEMBERS_PER_WORD servers, by id. */
#define SERVER_MEMBER_BITS 4
#define SERVER_MEMBER_MASK (SERVER_KNOWN | SERVER_ELIGIBLE | SERVER_MASKED | SERVER_DOWN)
#define SERVER_MEMBERS_PER_WORD 16
#define MEMBERSHIP_WORDS 1024

/* A server's MAC address and flags, which are the same for all services. One load reads its 8 bytes. */
struct server_entry {
	__u8 mac_address[6];
	__u16 flags;
};

#include "server_tunnels.h"

#include "server_clock.h"

/*
 * Traffic of all services from this load balancer to a server. Each row of counters has one such struct per server id.
 */
struct server_traffic {
	/* New connections that the placement rule sent to the server. */
	__u64 opened;
	/* Packets with a cookie and FIN or RST. Without a connection table, a retransmission counts again. */
	__u64 closed;
	__u64 packets;
	__u64 bytes;
};

#include "connections.h"

/* ---- state of the load balancer that outlives its process ------------------------------------------------------ */

/* The version grows whenever a pinned layout or its meaning changes, so that daemons take over only known state. */
#define LB_LAYOUT_VERSION 17

/* `layout_version` and `counters_by_cpu` keep their offsets, because daemons of other layout versions read them. */
struct lb_state {
	__u64 layout_version;
	/* The device's MAC address, stored as the first 8 bytes of a frame to it, shifted left by 16. */
	__u64 own_mac_shifted;
	/* 1 if the program was loaded for generic XDP, so that packets are counted by CPU and not by receive queue. */
	__u64 counters_by_cpu;
	/* Source of IPv4 outer headers, which is the device's first IPv4 address. */
	__u32 own_address;
	/* Length of the longest packet that the device sends, including an outer header. */
	__u32 mtu;
	struct fleet_keys keys;
	/* Key of the connection table's hash. Only this load balancer has it, and it lives as long as the table. */
	struct cookie_key connection_key;
	/* CLOCK_MONOTONIC in 0.1 s, set by the daemon and by packets of stateful services (current_clock_ticks()). */
	__u32 clock;
	/* This load balancer's number among owners of connection tables, or MAX_OWNERS before it is assigned. */
	__u32 owner;
	/* Maximum number of connection table entries for one source prefix, or 0 (no limit) if it is not set yet. */
	__u64 entries_per_source;
	struct connection_timers timers;
	/* Value of jiffies when a packet last read the clock. */
	__u64 clock_read_jiffies;
	/* MAC addresses of connection tables' owners. Without SERVER_RESOLVED the owner is lost or unused. */
	struct server_entry owners[MAX_OWNERS];
	struct lb_service_directories directories;
	struct service_state services[MAX_SERVICES];
	/* Filter of the flow table (find_unstamped_flow()). A bit of 0 means that no such flow was ever stored. */
	__u64 flow_filter[FLOW_FILTER_WORDS];
	/* Names of services by index, for commands that read the state without daemon and controller. */
	__u8 service_names[MAX_SERVICES][SERVICE_NAME_BYTES];
	/* Source of IPv6 outer headers, which is the device's first IPv6 address that is not link-local. */
	__u64 own_address_ipv6[2];
	/* VLAN of each server by id, or 0 if it is untagged. */
	__u16 server_vlans[SERVER_ID_COUNT];
};

/*
 * Recent placements by rules with a state (LEAST_ASSIGNED, ROUND_ROBIN), so that a retransmitted SYN reaches the same
 * server while the table is active. The array is direct-mapped. An entry is one word:
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

#include "counters.h"

/* ---- capture and health checks --------------------------------------------------------------------------------- */

/* Record of a captured packet (capture.h), which the first captured_length bytes of the frame follow. */
struct captured_packet {
	/* Time at which the record was made (CLOCK_MONOTONIC, ns). */
	__u64 time_ns;
	/* Number of the packet on this CPU. The records of a packet's arrival and decision have the same number. */
	__u64 sequence;
	/* Length of the frame when the record was made. */
	__u32 length;
	__u32 captured_length;
	/* CAPTURE_ARRIVED, or the XDP action that the program returned. */
	__u32 action;
	/* The packet's enum lb_counter, only in the record of the decision. */
	__u32 outcome;
};
#define CAPTURE_ARRIVED 0xffffffffu

/* An IPv4 or IPv6 address in network byte order, in the form of struct service_key. */
struct nat_address {
	__u32 word[4];
};

/* One end of a health check's connection (health.bpf.c) before translation, in network byte order. */
struct nat_entry {
	/* The server's own address in packets to the server, or the VIP in packets from it. */
	struct nat_address address;
	/* The server's port. */
	__u16 port;
	/* The load balancer's port. */
	__u16 own_port;
};
#define MAX_NAT_ENTRIES 4096

/* Maximum number of rows in arrays by CPU. Further CPUs share rows, so that an increment may be lost now and then. */
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
	 * Number of positions by which the indirection table's entry is shifted for established connections, as if a
	 * flow director had moved them. 0 means no shift.
	 */
	__u32 established_shift;
	__u32 reserved;
};

/* A flow that testbed/receive_queues.bpf.c has recorded (tests only). */
struct received_flow {
	/* Receive queue plus 1, or 0 if none was recorded. */
	__u32 recorded_queue;
	__u32 hash;
};

#endif
