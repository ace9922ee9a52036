/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Counters of the programs: metrics and `coreward status` name them by these enums. Included by intf.h. */
#ifndef COREWARD_INCLUDE_COUNTERS_H
#define COREWARD_INCLUDE_COUNTERS_H

/* ---- counters -------------------------------------------------------------------------------------------------- */

/* Outcome of a packet in lb.bpf.c. Users see the names in lower case without the prefix. */
enum lb_counter {
	LB_COUNTER_PASSED_NOT_SERVICE, /* to the kernel, untouched */
	LB_COUNTER_REPLY_STAMPED, /* a server's reply, to the kernel, with a cookie */
	LB_COUNTER_REPLY_UNCHANGED, /* reply forwarded unchanged (bpf/lb/lb_cookie.h) */
	LB_COUNTER_ESTABLISHED, /* by the server's id in the cookie */
	LB_COUNTER_CONNECTION_TABLE, /* by the index in the cookie: the connection table */
	LB_COUNTER_FLOW_TABLE, /* by the flow table */
	LB_COUNTER_NEW_CONNECTION, /* by the placement rule */
	LB_COUNTER_PER_PACKET, /* by the placement rule, for each packet: no state is stored */
	LB_COUNTER_BUCKET_HASH, /* without a cookie: by the bucket */
	LB_COUNTER_ICMP_ERROR, /* an ICMP error, to the server that the quoted packet names */
	LB_COUNTER_FRAGMENT, /* a later fragment, to where the first went */
	LB_COUNTER_TO_OWNER, /* to the load balancer that owns the index in the cookie */
	LB_COUNTER_TO_OTHER_BALANCER, /* to the load balancer that the service is adopted from or handed over to */
	LB_COUNTER_BROADCAST, /* to all servers of the service, rate-limited */
	LB_COUNTER_BROADCAST_OWNER_LOST, /* broadcast: the load balancer with the connection's entry is gone */
	LB_COUNTER_DROP_MALFORMED_IPV4,
	LB_COUNTER_DROP_MALFORMED_IPV6,
	LB_COUNTER_DROP_EXTENSION_HEADERS, /* IPv6: more extension headers than are read */
	LB_COUNTER_DROP_MALFORMED_TCP,
	LB_COUNTER_DROP_MALFORMED_UDP,
	LB_COUNTER_DROP_MALFORMED_ICMP,
	LB_COUNTER_DROP_FRAGMENT,
	LB_COUNTER_DROP_UNKNOWN_COOKIE,
	LB_COUNTER_DROP_SERVER_UNRESOLVED,
	LB_COUNTER_DROP_EXCEEDS_MTU, /* longer than the device's MTU with the outer header */
	LB_COUNTER_DROP_FRAGMENTATION_NEEDED, /* longer than the MTU; an ICMP error went to the sender */
	LB_COUNTER_DROP_NOT_BROADCAST, /* unknown server, and a broadcast would end at the first router */
	LB_COUNTER_DROP_NO_ELIGIBLE_SERVER,
	LB_COUNTER_DROP_LATE_SYN_ACK, /* a SYN-ACK after another server's: bpf/lb/lb_cookie.h */
	LB_COUNTER_DROP_BROADCAST_RATE_LIMITED,
	LB_COUNTER_DROP_INTERNAL,
	LB_COUNTER_COUNT,
};

/* Event of a packet in addition to its outcome. */
enum lb_event {
	LB_EVENT_CONNECTION_TABLE_FULL, /* a new connection got a cookie of the stateless kind instead */
	LB_EVENT_CONNECTION_CONTENDED, /* a stateless cookie, because other CPUs were faster at each attempt */
	LB_EVENT_CONNECTION_SOURCE_LIMITED, /* a stateless cookie, because the source prefix is at its limit */
	LB_EVENT_CONNECTION_REUSED, /* a new connection found no free slot, and took the slot of an expired entry */
	LB_EVENT_CONNECTION_UNKNOWN, /* the entry that the index names is another connection's, or free */
	LB_EVENT_FLOW_INSERTED,
	LB_EVENT_COUNT,
};

/* 320 bytes: five cache lines of its own. An established packet writes to the first only. */
struct lb_counters {
	__u64 forwarded_bytes;
	__u64 packets[LB_COUNTER_COUNT];
	__u64 events[LB_EVENT_COUNT];
	/* New connections that were sent to servers of the service. */
	__u64 opened;
	/* The newest outcome (enum lb_counter), kept while `coreward capture` watches. */
	__u64 last_outcome;
};

_Static_assert(LB_COUNTER_COUNT + LB_EVENT_COUNT + 3 == 40, "struct lb_counters has whole cache lines");

/*
 * One struct lb_counters per service in each row, and one struct server_traffic per server id. Counting is not atomic.
 * New and ended connections are counted in the row of the CPU, packets in that of the receive queue (native XDP) or the
 * CPU (generic XDP): if two CPUs serve queues of one number, counts of packets may be lost. The number of rows is a
 * power of two, at least the number of CPUs up to this limit; further CPUs share rows.
 */
#define MAX_LB_COUNTER_ROWS 256
/* Index of packets without a known service. */
#define LB_COUNTERS_NO_SERVICE MAX_SERVICES
/* Counters of removed services whose index was reused. Only user space writes it. */
#define LB_COUNTERS_REMOVED (MAX_SERVICES + 1)
#define LB_COUNTERS_PER_ROW (MAX_SERVICES + 2)

/* Events in server.bpf.c. */
enum server_counter {
	SERVER_COUNTER_STAMPED,
	SERVER_COUNTER_RESTORED,
	SERVER_COUNTER_TSVAL_CLAMPED,
	SERVER_COUNTER_TSVAL_CLAMP_CONFIRMED,
	SERVER_COUNTER_EGRESS_WITHOUT_TIMESTAMP,
	/* TSval is not the clock in ms (the connection is older than tcp_timestamps=2): left unchanged. */
	SERVER_COUNTER_EGRESS_OTHER_CLOCK,
	/* EGRESS_OTHER_CLOCK of a SYN-ACK without a socket here: from another network namespace (a container). */
	SERVER_COUNTER_EGRESS_FOREIGN_CLOCK,
	SERVER_COUNTER_EGRESS_FORWARDED, /* a SYN-ACK from another network namespace was stamped */
	SERVER_COUNTER_INGRESS_WITHOUT_TSECR,
	/* TSecr does not hold this server's id: left unchanged. */
	SERVER_COUNTER_INGRESS_OTHER_COOKIE,
	SERVER_COUNTER_BROADCAST_ACCEPTED, /* sent to all servers, and the socket is here */
	SERVER_COUNTER_BROADCAST_IGNORED, /* sent to all servers, and the socket is elsewhere: dropped */
	SERVER_COUNTER_INDEX_LEARNT, /* a SYN brought the index of its entry in a connection table */
	SERVER_COUNTER_INDEX_UNKNOWN, /* a packet of a stateful service left with the server's id: no index is known */
	SERVER_COUNTER_INDEX_GIVEN_UP, /* the connection table is lost: later packets carry the server's id */
	SERVER_COUNTER_CHAINED, /* no socket on this host: forwarded to the bucket's previous server */
	SERVER_COUNTER_ICMP_BROADCAST_ACCEPTED,
	SERVER_COUNTER_ICMP_BROADCAST_IGNORED,
	SERVER_COUNTER_HANDSHAKE, /* a stamped SYN-ACK was sent for the first time (and once again, if it had to be) */
	SERVER_COUNTER_HANDSHAKE_STALLED, /* a stamped SYN-ACK was sent for the fourth time */
	SERVER_COUNTER_CONNECTION_STALLED, /* a segment of a stamped connection was sent for the fifth time */
	SERVER_COUNTER_RSS_MATCHED, /* a SYN arrived on the queue that Toeplitz and the table predict */
	SERVER_COUNTER_RSS_MISMATCHED,
	SERVER_COUNTER_INGRESS_ESTABLISHED, /* a packet of an open connection; one of RSS_ESTABLISHED_SAMPLING is sampled */
	SERVER_COUNTER_RSS_ESTABLISHED_MATCHED, /* a sampled packet arrived on the predicted queue */
	SERVER_COUNTER_RSS_ESTABLISHED_MISMATCHED,
	SERVER_COUNTER_RSS_UNPREDICTED, /* the table is not known, or the device recorded no queue */
	SERVER_COUNTER_DROP_CHAIN_UNRESOLVED, /* no socket on this host, and the previous server is unresolved */
	SERVER_COUNTER_DROP_MALFORMED_TCP,
	SERVER_COUNTER_DROP_NO_MEMORY, /* the packet could not be made writable */
	SERVER_COUNTER_MSS_CLAMPED, /* a SYN-ACK left with a smaller MSS: the outer header needs room */
	SERVER_COUNTER_COUNT,
};

/* Events in steer.bpf.c. */
enum steer_counter {
	STEER_COUNTER_STEERED,
	STEER_COUNTER_NO_WORKER, /* no socket for the core: the kernel chose */
	STEER_COUNTER_COUNT,
};

/* Outcomes of decap.bpf.c, for encapsulated packets. */
enum decap_counter {
	DECAP_COUNTER_DECAPSULATED,
	DECAP_COUNTER_DROP_DECAP_FOREIGN_SOURCE, /* the outer source is no configured load balancer */
	DECAP_COUNTER_DROP_DECAP_FOREIGN_DESTINATION, /* the inner destination is no VIP of this server */
	DECAP_COUNTER_DROP_DECAP_NESTED, /* the inner packet is another tunnel */
	DECAP_COUNTER_DROP_DECAP_FRAGMENT, /* fragment of an encapsulated packet */
	DECAP_COUNTER_DROP_DECAP_TRUNCATED, /* lengths contradict each other or the frame */
	DECAP_COUNTER_DROP_DECAP_CONGESTION, /* a router marked congestion; the inner packet forbids that (RFC 6040) */
	DECAP_COUNTER_COUNT,
};

/* Outcomes of intake.bpf.c, for unfragmented datagrams to a listener's address. What passes is the kernel's. */
enum intake_counter {
	INTAKE_COUNTER_REDIRECTED, /* to the AF_XDP socket of its receive queue */
	INTAKE_COUNTER_PASSED_LENGTH, /* longer than MAX_INTAKE_DATAGRAM, or lengths contradict each other or the frame */
	INTAKE_COUNTER_PASSED_CHECKSUM, /* the checksum of the IP header or the datagram is wrong */
	INTAKE_COUNTER_PASSED_SOURCE, /* no client can have the source, or it is a listener's */
	INTAKE_COUNTER_PASSED_NO_SOCKET, /* the receive queue has no AF_XDP socket */
	INTAKE_COUNTER_COUNT,
};

#endif
