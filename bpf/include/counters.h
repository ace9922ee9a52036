/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Counters of the programs. Metrics and `coreward status` take their names from these enums. Included by intf.h. */
#ifndef COREWARD_INCLUDE_COUNTERS_H
#define COREWARD_INCLUDE_COUNTERS_H

/* ---- counters -------------------------------------------------------------------------------------------------- */

/* Outcome of a packet in lb.bpf.c. Users see the names in lower case without the prefix. */
enum lb_counter {
	LB_COUNTER_PASSED_NOT_SERVICE, /* passed to the kernel unchanged */
	LB_COUNTER_REPLY_STAMPED, /* a server's reply, passed to the kernel with a cookie */
	LB_COUNTER_REPLY_UNCHANGED, /* a server's reply, passed to the kernel unchanged (bpf/lb/lb_cookie.h) */
	LB_COUNTER_ESTABLISHED, /* forwarded by the server's id in the cookie */
	LB_COUNTER_CONNECTION_TABLE, /* forwarded by the connection table entry that the cookie names */
	LB_COUNTER_FLOW_TABLE, /* forwarded by the flow table */
	LB_COUNTER_NEW_CONNECTION, /* a new connection, forwarded by the placement rule */
	LB_COUNTER_PER_PACKET, /* forwarded by the placement rule, as every packet of a service without state */
	LB_COUNTER_BUCKET_HASH, /* forwarded to the bucket's server, for lack of a cookie */
	LB_COUNTER_ICMP_ERROR, /* an ICMP error, forwarded to the server whose packet it quotes */
	LB_COUNTER_FRAGMENT, /* a later fragment, forwarded like the first */
	LB_COUNTER_TO_OWNER, /* forwarded to the load balancer that owns the index in the cookie */
	LB_COUNTER_TO_OTHER_BALANCER, /* forwarded to the other load balancer of a service in migration */
	LB_COUNTER_BROADCAST, /* broadcast to the service's servers, rate-limited */
	LB_COUNTER_BROADCAST_OWNER_LOST, /* broadcast, because the load balancer with the connection's entry is lost */
	LB_COUNTER_DROP_MALFORMED_IPV4,
	LB_COUNTER_DROP_MALFORMED_IPV6,
	LB_COUNTER_DROP_EXTENSION_HEADERS, /* more IPv6 extension headers than the program reads */
	LB_COUNTER_DROP_MALFORMED_TCP,
	LB_COUNTER_DROP_MALFORMED_UDP,
	LB_COUNTER_DROP_MALFORMED_ICMP,
	LB_COUNTER_DROP_FRAGMENT,
	LB_COUNTER_DROP_UNKNOWN_COOKIE,
	LB_COUNTER_DROP_SERVER_UNRESOLVED,
	LB_COUNTER_DROP_EXCEEDS_MTU, /* longer than the device's MTU, including the outer header */
	LB_COUNTER_DROP_FRAGMENTATION_NEEDED, /* longer than the MTU, and reported to the sender by an ICMP error */
	LB_COUNTER_DROP_NOT_BROADCAST, /* the server is unknown, and a broadcast would not reach all servers */
	LB_COUNTER_DROP_NO_ELIGIBLE_SERVER,
	LB_COUNTER_DROP_LATE_SYN_ACK, /* a SYN-ACK that came after another server's SYN-ACK (bpf/lb/lb_cookie.h) */
	LB_COUNTER_DROP_BROADCAST_RATE_LIMITED,
	LB_COUNTER_DROP_INTERNAL,
	LB_COUNTER_COUNT,
};

/* Event of a packet, counted in addition to its outcome. */
enum lb_event {
	LB_EVENT_CONNECTION_TABLE_FULL, /* a stateless cookie, because the partition had no free or expired entry */
	LB_EVENT_CONNECTION_CONTENDED, /* a stateless cookie, because other CPUs were faster at each attempt */
	LB_EVENT_CONNECTION_SOURCE_LIMITED, /* a stateless cookie, because the source prefix is at its limit */
	LB_EVENT_CONNECTION_REUSED, /* a new connection found no free slot, and took the slot of an expired entry */
	LB_EVENT_CONNECTION_UNKNOWN, /* the entry that the cookie names is free, or belongs to another connection */
	LB_EVENT_FLOW_INSERTED,
	LB_EVENT_COUNT,
};

/* Counters of one service in one row. An established packet writes only to the first of their five cache lines. */
struct lb_counters {
	__u64 forwarded_bytes;
	__u64 packets[LB_COUNTER_COUNT];
	__u64 events[LB_EVENT_COUNT];
	/* New connections that were sent to the service's servers. */
	__u64 opened;
	/* Most recent outcome (enum lb_counter), stored only while `coreward capture` runs. */
	__u64 last_outcome;
};

_Static_assert(LB_COUNTER_COUNT + LB_EVENT_COUNT + 3 == 40, "struct lb_counters has whole cache lines");

/*
 * Maximum number of counter rows. A row has one struct lb_counters per service, and one struct server_traffic per
 * server id. Counting is not atomic. New and ended connections are counted in the row of the CPU, packets in that of
 * the receive queue (native XDP) or the CPU (generic XDP). If two CPUs serve queues with the same number, counts of
 * packets may be lost. The row count is a power of two and at least the number of CPUs, up to this limit. Further CPUs
 * share rows.
 */
#define MAX_LB_COUNTER_ROWS 256
/* Index in a row of packets without a known service. */
#define LB_COUNTERS_NO_SERVICE MAX_SERVICES
/* Index in a row of the sum over removed services whose index was reused. Only user space writes it. */
#define LB_COUNTERS_REMOVED (MAX_SERVICES + 1)
#define LB_COUNTERS_PER_ROW (MAX_SERVICES + 2)

/* Events that server.bpf.c counts. */
enum server_counter {
	SERVER_COUNTER_STAMPED,
	SERVER_COUNTER_RESTORED,
	SERVER_COUNTER_TSVAL_CLAMPED,
	SERVER_COUNTER_TSVAL_CLAMP_CONFIRMED,
	SERVER_COUNTER_EGRESS_WITHOUT_TIMESTAMP,
	/* Packet left unchanged, because its TSval is not in ms (the connection is older than tcp_timestamps=2). */
	SERVER_COUNTER_EGRESS_OTHER_CLOCK,
	/* EGRESS_OTHER_CLOCK of a SYN-ACK that has no socket here, but in another network namespace (a container). */
	SERVER_COUNTER_EGRESS_FOREIGN_CLOCK,
	SERVER_COUNTER_EGRESS_FORWARDED, /* a SYN-ACK from another network namespace was stamped */
	SERVER_COUNTER_INGRESS_WITHOUT_TSECR,
	/* Packet left unchanged, because its TSecr does not hold this server's id. */
	SERVER_COUNTER_INGRESS_OTHER_COOKIE,
	SERVER_COUNTER_BROADCAST_ACCEPTED, /* a broadcast packet was accepted, because this host has its socket */
	SERVER_COUNTER_BROADCAST_IGNORED, /* a broadcast packet was dropped, because this host has no socket for it */
	SERVER_COUNTER_INDEX_LEARNT, /* a SYN carried the index of the connection's entry in a connection table */
	SERVER_COUNTER_INDEX_UNKNOWN, /* a stateful service's packet left with the server's id, for lack of an index */
	SERVER_COUNTER_INDEX_GIVEN_UP, /* the connection table is lost, so later packets carry the server's id */
	SERVER_COUNTER_CHAINED, /* forwarded to the bucket's previous server, for lack of a socket here */
	SERVER_COUNTER_ICMP_BROADCAST_ACCEPTED,
	SERVER_COUNTER_ICMP_BROADCAST_IGNORED,
	SERVER_COUNTER_HANDSHAKE, /* a stamped SYN-ACK was sent for the first time, or was retransmitted once */
	SERVER_COUNTER_HANDSHAKE_STALLED, /* a stamped SYN-ACK was sent for the fourth time */
	SERVER_COUNTER_CONNECTION_STALLED, /* a segment of a stamped connection was sent for the fifth time */
	SERVER_COUNTER_RSS_MATCHED, /* a SYN arrived on the queue that Toeplitz hash and indirection table predict */
	SERVER_COUNTER_RSS_MISMATCHED,
	SERVER_COUNTER_INGRESS_ESTABLISHED, /* a packet of an open connection (one in RSS_ESTABLISHED_SAMPLING is sampled) */
	SERVER_COUNTER_RSS_ESTABLISHED_MATCHED, /* a sampled packet arrived on the predicted queue */
	SERVER_COUNTER_RSS_ESTABLISHED_MISMATCHED,
	SERVER_COUNTER_RSS_UNPREDICTED, /* the indirection table is unknown, or the device recorded no queue */
	SERVER_COUNTER_DROP_CHAIN_UNRESOLVED, /* no socket here, and the previous server's MAC address is unknown */
	SERVER_COUNTER_DROP_MALFORMED_TCP,
	SERVER_COUNTER_DROP_NO_MEMORY, /* the packet could not be made writable */
	SERVER_COUNTER_MSS_CLAMPED, /* a SYN-ACK left with a smaller MSS, to make room for the outer header */
	SERVER_COUNTER_COUNT,
};

/* Events that steer.bpf.c counts. */
enum steer_counter {
	STEER_COUNTER_STEERED,
	STEER_COUNTER_NO_WORKER, /* the receive queue has no socket, so the kernel selected one */
	STEER_COUNTER_COUNT,
};

/* Outcomes of decap.bpf.c for encapsulated packets. */
enum decap_counter {
	DECAP_COUNTER_DECAPSULATED,
	DECAP_COUNTER_DROP_DECAP_FOREIGN_SOURCE, /* the outer source is no configured load balancer */
	DECAP_COUNTER_DROP_DECAP_FOREIGN_DESTINATION, /* the inner destination is no VIP of this server */
	DECAP_COUNTER_DROP_DECAP_NESTED, /* the inner packet is encapsulated, too */
	DECAP_COUNTER_DROP_DECAP_FRAGMENT, /* the packet is a fragment of an encapsulated packet */
	DECAP_COUNTER_DROP_DECAP_TRUNCATED, /* lengths contradict each other or the frame */
	DECAP_COUNTER_DROP_DECAP_CONGESTION, /* a router marked congestion, but the inner packet does not use ECN (RFC 6040) */
	DECAP_COUNTER_COUNT,
};

/* Outcomes of intake.bpf.c for unfragmented datagrams to a listener's address. PASSED_* datagrams go to the kernel. */
enum intake_counter {
	INTAKE_COUNTER_REDIRECTED, /* redirected to the AF_XDP socket of its receive queue */
	INTAKE_COUNTER_PASSED_LENGTH, /* longer than MAX_INTAKE_DATAGRAM, or lengths contradict each other or the frame */
	INTAKE_COUNTER_PASSED_CHECKSUM, /* the checksum of the IP header or the datagram is wrong */
	INTAKE_COUNTER_PASSED_SOURCE, /* the source cannot be a client's address, or is a listener's address */
	INTAKE_COUNTER_PASSED_NO_SOCKET, /* the receive queue has no AF_XDP socket */
	INTAKE_COUNTER_COUNT,
};

#endif
