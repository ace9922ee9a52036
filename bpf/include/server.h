/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of the server's programs and the agent. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_H
#define COREWARD_INCLUDE_SERVER_H

/* The 4-tuple in the client's direction. Addresses as in struct service_key. */
struct flow_key {
	__u32 client_address[4];
	__u32 vip_address[4];
	__u16 client_port;
	__u16 vip_port;
};

/*
 * PAWS clamp (docs/design.md, "Idle connections"): a sent TSval that differs from the server's own clock. The entry
 * matters until the client has returned this TSval and a newer one.
 */
struct clamped_timestamp {
	/* Sent time part and time part of the client's previous TSecr, both without the time mask. */
	__u16 sent;
	__u16 sent_before;
	/* The server's own TSvals for these two time parts. */
	__u32 original;
	__u32 original_before;
	/* Whether the client has returned the clamped value. */
	__u32 confirmed;
};
/* Limit of clamped connections: idle for more than 32 s, and without a newer TSecr yet; about 100 bytes each. */
#define MAX_CLAMPED_TIMESTAMPS 65536
/* Largest step of the 16-bit time part that a client takes as newer (ms). */
#define MAX_STEP_MS 0x7fffu
/* Time by which a server's own TSval may be ahead of the clock that restores it (ms). */
#define RESTORE_SLACK_MS 16u

/* An arrived SYN, for comparing predicted and actual receive queue. Addresses as in struct service_key. */
struct rss_sample {
	__u32 source_address[4];
	__u32 destination_address[4];
	__u16 source_port;
	__u16 destination_port;
	__u32 hash;
	__u16 predicted_queue;
	__u16 actual_queue;
	/* Number of the sample, from 1; 0: never written. */
	__u32 sequence;
};
/* Number of samples in the ring; a power of two. */
#define RSS_SAMPLES 256
/* Packets of open connections per sample; a power of two. */
#define RSS_ESTABLISHED_SAMPLING 64

/* The server's RSS configuration from the agent; entry_count 0: unknown, so no receive queue is predicted. */
struct rss_mapping {
	__u32 entry_count;
	__u32 generation;
	/* RSS_INPUT_*. */
	__u32 input_transform;
	__u32 reserved;
	__u16 queue[MAX_INDIRECTION_ENTRIES];
	/* Toeplitz tables by position of the input byte; IPv4 uses the first RSS_INPUT_IPV4_BYTES. */
	__u32 byte[RSS_INPUT_IPV6_BYTES][256];
};

/* Grows whenever a pinned layout or its meaning changes: an agent never takes over another layout. */
#define SERVER_LAYOUT_VERSION 6

/* Counters of one CPU, in their own cache lines (256 bytes). */
struct server_counters {
	__u64 packets[SERVER_COUNTER_COUNT];
	__u64 unused[32 - SERVER_COUNTER_COUNT];
};

/*
 * Limit of connections with an index from the SYN but no socket yet, because of SYN floods. A connection that loses its
 * index gets the server's id.
 */
#define MAX_HALF_OPEN_INDEXES 65536
/* Value for no index: the connection's cookies hold the server's id. */
#define NO_CONNECTION_INDEX 0xffffu

/* Connection table index of an established socket, in the socket's storage. */
struct connection_index {
	/* Owner and slot, or NO_CONNECTION_INDEX. */
	__u16 index;
	/* 1: the connection table is lost, so TSvals later than newest_ms carry the server's id. */
	__u16 given_up;
	/* The newest TSval (the server's own) that was stamped with the index. */
	__u32 newest_ms;
};

/*
 * Groups of connections that share the time of the last clamp. A server with 10,000 connections of which 1 % are idle
 * for more than MAX_STEP_MS clamps in 100 groups, so that 2.4 % of the other connections look up an entry. The array
 * has 16 KiB.
 */
#define CLAMP_GROUP_BITS 12
#define CLAMP_GROUPS (1 << CLAMP_GROUP_BITS)

/* Entries of a direct-mapped array by a hash of the tail, in which a colliding service overwrites. Power of two. */
#define FORWARDED_SERVICES 256
#define FORWARDED_SERVICE_SHIFT 56
/* GOLDEN_RATIO_64 of linux/hash.h. */
#define FORWARDED_SERVICE_FACTOR 0x61c8864680b583eb

/*
 * Pinned state of server.bpf.c. Fields that packets write are in other cache lines than fields that packets read.
 * `layout_version`, `keys` and `time_key` have kept their offsets since version 3: a version with another layout copies
 * them, and with them all stamped connections. (Version 2 stamped a cookie of another form.)
 */
struct server_state {
	__u64 layout_version;
	struct fleet_keys keys;
	/* Key that masks the time part: random, drawn when the agent creates the maps, and constant from then on. */
	struct cookie_key time_key;
	/* Services. `number` of a slot is this server's id in the service, and flags. */
	struct service_directories directories;
	/* By group of connections (clamp_group()): the server's own TSval (ms) of the last clamped packet. */
	__u32 last_clamp_ms[CLAMP_GROUPS];
	/*
	 * Tails of services whose last SYN-ACK was forwarded: their sockets are in another network namespace or machine
	 * (DNAT, a bridge), so connections may exist without a socket here.
	 */
	__u64 forwarded_services[FORWARDED_SERVICES];
	__u32 sample_sequence;
	__u32 unused[15];
	struct rss_sample samples[RSS_SAMPLES];
	/* One row per CPU, so that counting takes no atomic operation. */
	struct server_counters counters[MAX_CPUS];
};

/* Limit of load balancers whose packets decap.bpf.c accepts. */
#define MAX_DECAP_SOURCES 1024

/* Limit of receive queues in steering; the kernel chooses for connections of other queues. */
#define MAX_STEERED_QUEUES 1024
/* Limit of listening sockets of one service. */
#define MAX_STEERED_SOCKETS 1024
#define NO_SOCKET 0xffffffffu

/* State of steer.bpf.c in user space: one per service. */
struct steer_state {
	/* For each receive queue the slot in `workers` of the socket for its connections, or NO_SOCKET. */
	__u32 socket_of_queue[MAX_STEERED_QUEUES];
	__u64 counters[STEER_COUNTER_COUNT];
};

/* Busy time of one CPU, written by cpu_load.bpf.c on that CPU. The struct fills a cache line. */
struct cpu_busy_time {
	/*
	 * While idle: 2 * busy time. While busy: 2 * (busy time - time at which the CPU became busy) + 1. Times in ns
	 * (CLOCK_MONOTONIC), modulo 2^64.
	 */
	__u64 encoded_busy_ns;
	/* 1: a task other than the idle task runs. */
	__u32 is_task_running;
	/* While idle: number of running interrupts and softirqs, which nest. */
	__u32 depth;
	__u64 unused[6];
};

#endif
