/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts shared by user space and dispatch.bpf.c, which dispatches a UDP service's requests. Included by intf.h. */
#ifndef COREWARD_INCLUDE_DISPATCH_H
#define COREWARD_INCLUDE_DISPATCH_H

/* Maximum number of a service's workers. A worker's slot in the array of sockets has 6 bits in a request's entry. */
#define MAX_DISPATCH_WORKERS 64
/* Maximum number of a service's priority classes. Class 0 is the highest. */
#define MAX_DISPATCH_CLASSES 4
/* Maximum number of request types. The last type in use is for requests that match no other type. */
#define MAX_DISPATCH_TYPES 32
/* Number of payload bytes that determine a request's type. */
#define DISPATCH_TYPE_BYTES 8

enum dispatch_policy {
	DISPATCH_POLICY_RANDOM, /* a worker by a hash of the client's address and port, as the kernel selects */
	DISPATCH_POLICY_RR, /* the next worker in turn */
	DISPATCH_POLICY_JSQ, /* the worker with the fewest outstanding requests */
	DISPATCH_POLICY_JLQ, /* the worker with the least expected work outstanding */
	DISPATCH_POLICY_JBSRQ, /* the worker with the fewest outstanding requests, of those that take the request's class */
	DISPATCH_POLICY_COUNT,
};

enum dispatch_counter {
	DISPATCH_COUNTER_OVER_BOUND, /* every eligible worker was at its bound, so the shortest queue got the request */
	DISPATCH_COUNTER_UNTRACKED, /* dispatched without counting it as outstanding (table full, or no client address) */
	DISPATCH_COUNTER_NO_WORKER, /* no slot had a socket, so the kernel selected one */
	DISPATCH_COUNTER_UNMATCHED, /* a sent datagram that matched no outstanding request, and had no effect */
	DISPATCH_COUNTER_COUNT,
};

/*
 * Layout of outstanding[w]. It is the number of worker w's outstanding requests, with flags in the highest bits that
 * disable the worker. So one comparison prefers eligible workers, then stalled workers, and selects an empty slot last.
 */
#define DISPATCH_COUNT_MASK 0x3fffffffu
#define DISPATCH_GONE 0x40000000u /* the slot has no socket */
#define DISPATCH_DISABLED 0x80000000u /* the worker is stalled, or gone */
#define DISPATCH_FLAGS_SHIFT 30
/* work[w] is ns with the same flags above. 2^55 ns are a year, and the word shifted by 6 bits (slot) is below 2^63. */
#define DISPATCH_WORK_FLAGS_SHIFT 55

/*
 * Entry of a request in flight. It is one word, so that one compare-and-swap adds or removes it:
 *
 *    63                36  35  34      30 29        24 23       16 15             0
 *    +-------------------+---+----------+------------+-----------+----------------+
 *    |        tag        | 1 |   type   |   worker   |   epoch   |     weight     |
 *    +-------------------+---+----------+------------+-----------+----------------+
 *
 * The tag is 28 bits of the hash of client address, port and request id. Another 11 bits select the set. If it is full,
 * the DISPATCH_PROBES - 1 sets after it are tried. The epoch is the number, modulo 256, of user space's last poll
 * (every 100 ms) before the dispatch. The weight is the request's expected work, ns = mantissa (11 bits) << exponent (5
 * bits). A word of 0 is an empty entry.
 */
#define DISPATCH_WAYS 8 /* a cache line */
#define DISPATCH_SET_BITS 11
#define DISPATCH_PROBES 4
#define DISPATCH_REQUESTS (DISPATCH_WAYS << DISPATCH_SET_BITS)
#define DISPATCH_TAG_SHIFT 36
#define DISPATCH_USED (1ull << 35)
#define DISPATCH_TYPE_SHIFT 30
#define DISPATCH_TYPE_MASK 0x1fu
#define DISPATCH_WORKER_SHIFT 24
#define DISPATCH_WORKER_MASK 0x3fu
#define DISPATCH_EPOCH_SHIFT 16
#define DISPATCH_EPOCH_MASK 0xffu
#define DISPATCH_WEIGHT_MASK 0xffffu
#define DISPATCH_MANTISSA_BITS 11

/* Number of last_dispatched records (a power of two). Each CPU has one, and further CPUs share them. */
#define DISPATCH_CPUS 1024

/* Pattern of a type, written before the program is loaded. The first one that matches the payload decides. */
struct dispatch_match {
	/* Masked bytes of the payload from `type_offset` on, in the payload's byte order. */
	__u64 value;
	__u64 mask;
	__u32 class;
	__u32 number;
};

struct dispatch_type {
	/* Expected service time in the form of an entry's weight. User space writes it. */
	__u64 weight;
	/* Sum (ns) and number of observed service times. The programs write them if `observes_service_times` is set. */
	__u64 observed_ns;
	__u64 observed;
};

/* Packets write the first of the two cache lines. User space writes the second, which programs rarely read. */
struct dispatch_worker {
	/* Requests without an entry (dispatched = untracked + completed + abandoned + outstanding - surplus). */
	__u64 untracked;
	/* Requests whose response was observed. */
	__u64 completed;
	/* Datagrams that the worker's socket sent from the service's port. */
	__u64 responses;
	/* Latest possible start of the request in service (CLOCK_MONOTONIC, ns), if service times are observed. */
	__u64 serving_since_ns;
	__u64 unused[4];

	/* Abandoned requests. They got no response, were dropped at a full receive buffer, or their worker died. */
	__u64 abandoned;
	/* SO_COOKIE of the worker's socket. */
	__u64 socket;
	/* Expected work (ns) of the requests in `surplus`. */
	__u64 surplus_work;
	/* Datagrams in the receive queue, and datagrams dropped since the socket's creation, at the last poll. */
	__u32 queued;
	__u32 dropped;
	/* Number of queued datagrams that count as outstanding although they have no entry. */
	__u32 surplus;
	/* Id of the process that reads the socket. */
	__u32 pid;
	__u64 reserved[3];
};

/* Version of the pinned layout. It grows whenever the layout or its meaning changes. */
#define DISPATCH_LAYOUT_VERSION 1

/* Pinned state of dispatch.bpf.c for one service. */
struct dispatch_state {
	__u32 outstanding[MAX_DISPATCH_WORKERS];
	__u64 work[MAX_DISPATCH_WORKERS];
	/*
	 * Maximum number of a worker's outstanding requests. With jbsrq there is one per class, and 0 means that the
	 * worker takes no request of the class. With jsq, bound[0][0] is the bound of all workers, and
	 * DISPATCH_COUNTER_OVER_BOUND counts requests above it.
	 */
	__u32 bound[MAX_DISPATCH_CLASSES][MAX_DISPATCH_WORKERS];
	/* Slots in the order of the rotation, for policies rr and random. */
	__u8 order[MAX_DISPATCH_WORKERS];
	__u32 order_count;
	/* Number of slots to search, which is the highest slot in use plus 1. */
	__u32 slots;
	/* Number of polls that user space has made. */
	__u64 epoch;
	/* Secret seed of the hash of requests, so that clients cannot aim requests at one set. */
	__u64 seed;
	__u64 layout_version;
	__u64 unused[4];
	/* Position in the rotation of policy rr. It has its own cache line, because every request writes it. */
	__u64 turn;
	__u64 counters[DISPATCH_COUNTER_COUNT];
	__u64 reserved[3];
	struct dispatch_type types[MAX_DISPATCH_TYPES];
	struct dispatch_worker workers[MAX_DISPATCH_WORKERS];
	/* Service and policy, for commands that read the pinned state. */
	__u32 policy;
	__u32 port;
	/* The service's address in the form of struct service_key, or all zero for any address. */
	__u32 address[4];
	/* Time of user space's last poll in ms since the epoch (CLOCK_REALTIME). */
	__u64 polled_ms;
};

#endif
