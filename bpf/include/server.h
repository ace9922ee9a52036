/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts that the server's programs share with the agent. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_H
#define COREWARD_INCLUDE_SERVER_H

/* A connection's 4-tuple in the client's direction. Addresses are in the form of struct service_key. */
struct flow_key {
	__u32 client_address[4];
	__u32 vip_address[4];
	__u16 client_port;
	__u16 vip_port;
};

/*
 * A TSval that the PAWS clamp (docs/design.md, "Idle connections") sent instead of the server's own TSval, which the
 * clock gives. The entry matters until the client has returned this TSval and a newer one.
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
/* Maximum number of clamped connections (idle for over 32 s, without a newer TSecr yet), of about 100 bytes each. */
#define MAX_CLAMPED_TIMESTAMPS 65536
/* Largest step of the 16-bit time part (ms) that a client accepts as newer. */
#define MAX_STEP_MS 0x7fffu
/* Time (ms) by which a server's own TSval may be ahead of the clock that restores it. */
#define RESTORE_SLACK_MS 16u

/* A SYN that arrived, with its predicted and its actual receive queue. Addresses are as in struct service_key. */
struct rss_sample {
	__u32 source_address[4];
	__u32 destination_address[4];
	__u16 source_port;
	__u16 destination_port;
	__u32 hash;
	__u16 predicted_queue;
	__u16 actual_queue;
	/* Number of the sample from 1 on, or 0 if it was never written. */
	__u32 sequence;
};
/* Number of samples in the ring, a power of two. */
#define RSS_SAMPLES 256
/* Number of open connections' packets per sample (a power of two). */
#define RSS_ESTABLISHED_SAMPLING 64

/* The server's RSS configuration from the agent. No receive queue is predicted while entry_count is 0 (unknown). */
struct rss_mapping {
	__u32 entry_count;
	__u32 generation;
	/* Transform of the hash input (RSS_INPUT_*). */
	__u32 input_transform;
	__u32 reserved;
	__u16 queue[MAX_INDIRECTION_ENTRIES];
	/* Toeplitz tables by position of the input byte. IPv4 uses the first RSS_INPUT_IPV4_BYTES of them. */
	__u32 byte[RSS_INPUT_IPV6_BYTES][256];
};

/* The version grows whenever a pinned layout or its meaning changes, so that agents take over only known layouts. */
#define SERVER_LAYOUT_VERSION 6

/* Counters of one CPU, in their own cache lines (256 bytes). */
struct server_counters {
	__u64 packets[SERVER_COUNTER_COUNT];
	__u64 unused[32 - SERVER_COUNTER_COUNT];
};

/*
 * Maximum number of connections with an index from the SYN but no socket yet, which bounds the memory in a SYN flood. A
 * connection that loses its index gets cookies with the server's id.
 */
#define MAX_HALF_OPEN_INDEXES 65536
/* Value for no index. The connection's cookies then hold the server's id. */
#define NO_CONNECTION_INDEX 0xffffu

/* Connection table index of an established socket, in the socket's storage. */
struct connection_index {
	/* Owner and slot, or NO_CONNECTION_INDEX. */
	__u16 index;
	/* 1 if the connection table is lost, so that TSvals later than newest_ms carry the server's id. */
	__u16 given_up;
	/* Newest of the server's own TSvals that was stamped with the index. */
	__u32 newest_ms;
};

/*
 * Number of connection groups, whose connections share the time of the last clamp. A server with 10,000 connections of
 * which 1 % are idle for more than MAX_STEP_MS clamps in 100 groups, so that 2.4 % of the other connections look up an
 * entry. The array has 16 KiB.
 */
#define CLAMP_GROUP_BITS 12
#define CLAMP_GROUPS (1 << CLAMP_GROUP_BITS)

/* Size of an array by the hash of a service's tail (a power of two). Colliding services overwrite each other. */
#define FORWARDED_SERVICES 256
#define FORWARDED_SERVICE_SHIFT 56
/* GOLDEN_RATIO_64 of linux/hash.h. */
#define FORWARDED_SERVICE_FACTOR 0x61c8864680b583eb

/*
 * Pinned state of server.bpf.c. Fields that packets write are in other cache lines than fields that packets read.
 * `layout_version`, `keys` and `time_key` have kept their offsets since version 3, so that a version with another
 * layout can copy them and keep all stamped connections. (Version 2 stamped a cookie of another form.)
 */
struct server_state {
	__u64 layout_version;
	struct fleet_keys keys;
	/* Key that masks the time part. The agent draws it at random when it creates the maps, and never changes it. */
	struct cookie_key time_key;
	/* Directories of services. A slot's `number` is this server's id in the service, with flags. */
	struct service_directories directories;
	/* The server's own TSval (ms) of the last clamped packet in each group of connections (clamp_group()). */
	__u32 last_clamp_tsval_ms[CLAMP_GROUPS];
	/*
	 * Tails of services whose last SYN-ACK was forwarded. Their sockets are in another network namespace or machine
	 * (DNAT, a bridge), so connections may exist without a socket here.
	 */
	__u64 forwarded_services[FORWARDED_SERVICES];
	__u32 sample_sequence;
	__u32 unused[15];
	struct rss_sample samples[RSS_SAMPLES];
	/* Counters of each CPU, so that counting takes no atomic operation. */
	struct server_counters counters[MAX_CPUS];
};

/* Maximum number of load balancers whose packets decap.bpf.c accepts. */
#define MAX_DECAP_SOURCES 1024

/* Maximum number of receive queues in steering. The kernel selects sockets for connections of other queues. */
#define MAX_STEERED_QUEUES 1024
/* Maximum number of a service's listening sockets. */
#define MAX_STEERED_SOCKETS 1024
#define NO_SOCKET 0xffffffffu

/* State that steer.bpf.c shares with user space, one per service. */
struct steer_state {
	/* Slot in `workers` of the socket for each receive queue's connections, or NO_SOCKET. */
	__u32 socket_of_queue[MAX_STEERED_QUEUES];
	__u64 counters[STEER_COUNTER_COUNT];
};

/* Busy time of one CPU, written by cpu_load.bpf.c on that CPU. The struct fills a cache line. */
struct cpu_busy_time {
	/*
	 * While the CPU is idle, 2 * busy time. While it is busy, 2 * (busy time - time at which it became busy) + 1.
	 * Times are in ns (CLOCK_MONOTONIC), modulo 2^64.
	 */
	__u64 encoded_busy_ns;
	/* 1 while a task other than the idle task runs. */
	__u32 is_task_running;
	/* Number of nested interrupts and softirqs that run while the CPU is idle. */
	__u32 depth;
	__u64 unused[6];
};

#endif
