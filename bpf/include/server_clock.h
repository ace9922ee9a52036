/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of the load balancer's cookie (`timestamps = "lb"`) and of its servers' clocks. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_CLOCK_H
#define COREWARD_INCLUDE_SERVER_CLOCK_H

/*
 *    TSval on the wire, from load balancer to client:
 *
 *    31                                12 11  10            0
 *    +-----------------------------------+---+---------------+
 *    |  (ms + time mask) mod 2^20        | K |  server's id  |
 *    +-----------------------------------+---+---------------+
 *                                          |   permuted as in the cookie of 15 bits
 *                                          index of the key, readable
 *
 * The time has more bits than in cookies of servers, because the load balancer does not know the client's last received
 * TSval and so cannot clamp (PAWS). A connection may therefore be idle for half of 2^20 ms only.
 */
#define LB_STAMPING_TIME_SHIFT 12
#define LB_STAMPING_TIME_MASK 0xfffffu
#define LB_STAMPING_KEY_BIT 0x800u
#define LB_STAMPING_ID_MASK 0x7ffu
#define LB_STAMPING_ID_BITS 11

/* Map key of a server, with the MAC address (as in struct server_entry) in the low 48 bits, the service above. */
#define LB_STAMPED_SERVICE_SHIFT 48
#define MAX_LB_STAMPED_SERVERS 16384

/*
 * A server's clock, learned from its replies (bpf/lb/lb_cookie.h). An offset is TSval minus the load balancer's
 * CLOCK_MONOTONIC in ms, modulo 2^32.
 */
struct lb_stamped_server {
	/* Offset (ms) that all the server's connections share, if it has one clock. */
	__u32 offset_ms;
	/* Offset (ms) in the newest SYN-ACK. */
	__u32 newest_ms;
	/* Client of the newest SYN-ACK (address XOR ports), so that a retransmitted SYN-ACK does not count. */
	__u32 newest_connection_word;
	__u16 server_id;
	/*
	 * Number of latest consecutive SYN-ACKs with one offset. At its maximum LB_STAMPING_AGREEING, new connections
	 * are stamped.
	 */
	__u16 agreeing;
	/* Sampled connection (client address XOR ports, or 0), and the offset and time of one of its replies. */
	__u32 sampled_connection_word;
	__u32 sampled_ms;
	__u32 sampled_at_ms;
	/*
	 * Number of samples whose TSval grew by 1 per ms, at most LB_STAMPING_MAX_STEADY. A sample with another rate,
	 * as after a delay, halves it. From LB_STAMPING_AGREEING on, new connections are stamped even if their offsets
	 * differ.
	 */
	__u16 steady;
	/* 1 if the newest sample's TSval did not grow by 1 per ms. */
	__u16 unsteady;
	/* 1 after a reply has set `offset_ms`. */
	__u64 has_clock;
	/* Number of SYN-ACKs with or without timestamps. */
	__u64 syn_acks;
	/* Number of SYN-ACKs with timestamps. */
	__u64 with_timestamps;
	/* Replies whose offset differed from another connection's. After the first one, offsets are per connection. */
	__u64 disagreed;
};
#define LB_STAMPING_AGREEING 4
#define LB_STAMPING_MAX_STEADY 64
/* Maximum difference between offsets of one clock, because queues and slow servers delay SYN-ACKs. */
#define LB_STAMPING_TOLERANCE_MS 1000
/* Time by which a TSval may be ahead of the estimate, because clocks drift apart between two SYN-ACKs. */
#define LB_STAMPING_SLACK_MS 60000
/* Minimum time between two replies that show the clock's rate. A delay of half of this time is tolerated. */
#define LB_STAMPING_SAMPLE_MS 100
/* Silence of the sampled connection after which another connection is sampled. */
#define LB_STAMPING_SAMPLE_EXPIRES_MS 2000

/*
 * Offsets of stamped connections whose server has no shared clock, direct-mapped by connection_hash(). One word:
 *
 *    63             32 31             0
 *    +----------------+----------------+
 *    | tag (odd)      | offset         |
 *    +----------------+----------------+
 */
#define LB_STAMPED_OFFSETS 1048576
#define LB_STAMPED_OFFSET_TAG_SHIFT 32

#endif
