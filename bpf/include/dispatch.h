/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of dispatch.bpf.c and user space: dispatch of a UDP service's requests to workers. Included by intf.h. */
#ifndef COREWARD_INCLUDE_DISPATCH_H
#define COREWARD_INCLUDE_DISPATCH_H

/* Workers of one service: slots of the array of sockets. A slot has 6 bits in a request's entry. */
#define MAX_DISPATCH_WORKERS 64
/* Priority classes of one service; 0 is the highest. */
#define MAX_DISPATCH_CLASSES 4
/* Limit of request types. The last type in use has the requests that match no other type. */
#define MAX_DISPATCH_TYPES 32
/* Number of payload bytes that determine the type. */
#define DISPATCH_TYPE_BYTES 8

enum dispatch_policy {
	DISPATCH_POLICY_RANDOM, /* by a hash of the client's address and port, as the kernel selects */
	DISPATCH_POLICY_RR, /* rotation over the workers */
	DISPATCH_POLICY_JSQ, /* fewest requests outstanding */
	DISPATCH_POLICY_JLQ, /* least expected work outstanding */
	DISPATCH_POLICY_JBSRQ, /* fewest requests outstanding, among the workers that take the request's class */
	DISPATCH_POLICY_COUNT,
};

enum dispatch_counter {
	DISPATCH_COUNTER_OVER_BOUND, /* every eligible worker was at its bound: the shortest queue got the request */
	DISPATCH_COUNTER_UNTRACKED, /* dispatched, but not counted as outstanding: table full, or no client address */
	DISPATCH_COUNTER_NO_WORKER, /* no slot had a socket: the kernel selected one */
	DISPATCH_COUNTER_UNMATCHED, /* sent datagrams that matched no outstanding request, and had no effect */
	DISPATCH_COUNTER_COUNT,
};

/*
 * outstanding[w]: the number of outstanding requests, and in the highest bits the flags that disable the worker. So one
 * comparison prefers eligible workers, then stalled workers, and selects an empty slot last.
 */
#define DISPATCH_COUNT_MASK 0x3fffffffu
#define DISPATCH_GONE 0x40000000u /* no socket in the slot */
#define DISPATCH_DISABLED 0x80000000u /* stalled; set with GONE, too */
#define DISPATCH_FLAGS_SHIFT 30
/* work[w]: ns, with the same flags above. 2^55 ns are a year. Shifted by 6 bits for the slot it is less than 2^63. */
#define DISPATCH_WORK_FLAGS_SHIFT 55

/*
 * A request in flight. It is one word, so that one compare-and-swap adds or removes it:
 *
 *    63                36  35  34      30 29        24 23       16 15             0
 *    +-------------------+---+----------+------------+-----------+----------------+
 *    |        tag        | 1 |   type   |   worker   |   epoch   |     weight     |
 *    +-------------------+---+----------+------------+-----------+----------------+
 *
 * tag: 28 bits of the hash of client address, port and request id. Another 11 bits select the set; if it is full, the
 * DISPATCH_PROBES - 1 sets after it are tried. epoch: number of user space's last poll (100 ms) before the request was
 * dispatched, modulo 256. weight: the request's expected work as mantissa (11 bits) and exponent (5 bits): ns =
 * mantissa << exponent. A word of 0 is no request.
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

/* Number of records of requests that are being queued, one per CPU; a power of two. Further CPUs share records. */
#define DISPATCH_CPUS 1024

/* Pattern of a type. The first pattern that matches the payload decides. Written before the program is loaded. */
struct dispatch_match {
	/* Bytes from `type_offset` on, in the payload's byte order. */
	__u64 value;
	__u64 mask;
	__u32 class;
	__u32 number;
};

/* State of a type of requests. */
struct dispatch_type {
	/* Expected service time as an entry's weight; written by user space. */
	__u64 weight;
	/* Sum (ns) and number of the observed service times, written by the programs if `learning` is set. */
	__u64 observed_ns;
	__u64 observed;
};

/* Two cache lines: packets write the first. User space writes the second, which programs rarely read. */
struct dispatch_worker {
	/* Requests without an entry. (Dispatched = untracked + completed + abandoned + outstanding - surplus.) */
	__u64 untracked;
	/* Requests with an observed response. */
	__u64 completed;
	/* Datagrams that the worker's socket sent from the service's port. */
	__u64 responses;
	/* Latest possible start of the request in service (CLOCK_MONOTONIC, ns); only if `learning` is set. */
	__u64 serving_since_ns;
	__u64 unused[4];

	/* Abandoned requests: no response, dropped at a full receive buffer, or the worker died. */
	__u64 abandoned;
	/* SO_COOKIE of the socket in the slot. */
	__u64 socket;
	/* Expected work of `surplus` (ns). */
	__u64 surplus_work;
	/* Datagrams in the receive queue, and drops since the socket was created, at the last poll. */
	__u32 queued;
	__u32 dropped;
	/* Number of queued datagrams without an entry that are counted as outstanding. */
	__u32 surplus;
	/* Id of the process that reads the socket. */
	__u32 pid;
	__u64 reserved[3];
};

/* Grows whenever a pinned layout or its meaning changes. */
#define DISPATCH_LAYOUT_VERSION 1

/* Pinned state of dispatch.bpf.c; one per service. */
struct dispatch_state {
	__u32 outstanding[MAX_DISPATCH_WORKERS];
	__u64 work[MAX_DISPATCH_WORKERS];
	/*
	 * jbsrq: limit of a worker's outstanding requests for the class; 0: the worker takes no request of the class.
	 * jsq: row 0 has one limit for all workers, above which DISPATCH_COUNTER_OVER_BOUND counts.
	 */
	__u32 bound[MAX_DISPATCH_CLASSES][MAX_DISPATCH_WORKERS];
	/* rr and random: slots in the order of the rotation. */
	__u8 order[MAX_DISPATCH_WORKERS];
	__u32 order_count;
	/* Number of slots to search: the highest slot in use plus 1. */
	__u32 slots;
	/* Number of user space's polls. */
	__u64 epoch;
	/* Secret seed of the requests' hash, so that clients cannot aim requests at one set. */
	__u64 seed;
	__u64 layout_version;
	__u64 unused[4];
	/* rr: position in the rotation. In its own cache line, because every request writes it. */
	__u64 turn;
	__u64 counters[DISPATCH_COUNTER_COUNT];
	__u64 reserved[3];
	struct dispatch_type types[MAX_DISPATCH_TYPES];
	struct dispatch_worker workers[MAX_DISPATCH_WORKERS];
	/* Service and policy, for readers of the pins. */
	__u32 policy;
	__u32 port;
	/* As in struct service_key; all zero: any address. */
	__u32 address[4];
	/* Time of user space's last poll in ms since the epoch (CLOCK_REALTIME). */
	__u64 polled_ms;
};

#endif
