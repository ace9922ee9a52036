/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of `timestamps = "lb"`: the load balancer's cookie, and the servers' clocks. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_CLOCK_H
#define COREWARD_INCLUDE_SERVER_CLOCK_H

/*
 *    TSval on the wire, from load balancer to client:
 *
 *    31                                12 11  10            0
 *    +-----------------------------------+---+---------------+
 *    |  (ms + time mask) mod 2^20        | K |  server's id  |
 *    +-----------------------------------+---+---------------+
 *                                          |   hidden as in the cookie of 15 bits
 *                                          index of the key, not hidden
 *
 * The time has more bits than in cookies of servers: the load balancer does not know the client's last received TSval,
 * so it cannot clamp (PAWS). A connection may be idle for half of 2^20 ms only.
 */
#define LB_STAMPING_TIME_SHIFT 12
#define LB_STAMPING_TIME_MASK 0xfffffu
#define LB_STAMPING_KEY_BIT 0x800u
#define LB_STAMPING_ID_MASK 0x7ffu
#define LB_STAMPING_ID_BITS 11

/* Map key of a server: MAC address in the low 48 bits (as in struct server_entry), the service's index above. */
#define LB_STAMPED_SERVICE_SHIFT 48
#define MAX_LB_STAMPED_SERVERS 16384

/*
 * A server's clock, learned from its replies (bpf/lb/lb_cookie.h). An offset is TSval minus the load balancer's
 * CLOCK_MONOTONIC in ms, modulo 2^32.
 */
struct lb_stamped_server {
	/* Offset in ms that all connections share, if the server has one clock. */
	__u32 offset_ms;
	/* Offset in ms of the newest SYN-ACK. */
	__u32 newest_ms;
	/* Client of the newest SYN-ACK, address XOR ports: a retransmitted SYN-ACK does not count. */
	__u32 newest_connection_word;
	__u16 server_id;
	/*
	 * Number of latest SYN-ACKs in a row with one offset; at LB_STAMPING_AGREEING, the maximum, new connections
	 * are stamped.
	 */
	__u16 agreeing;
	/* Sampled connection, client address XOR ports (0: none), and offset and time of one of its replies. */
	__u32 sampled_connection_word;
	__u32 sampled_ms;
	__u32 sampled_at_ms;
	/*
	 * Number of samples whose TSval grew by 1 per ms, at most LB_STAMPING_MAX_STEADY. A sample with another rate,
	 * as after a delay, halves it. From LB_STAMPING_AGREEING on new connections are stamped, even with different
	 * offsets.
	 */
	__u16 steady;
	/* 1: the newest sample's TSval did not grow by 1 per ms. */
	__u16 unsteady;
	/* 1: a reply has set `offset_ms`. */
	__u64 has_clock;
	/* SYN-ACKs, with timestamps or without. */
	__u64 syn_acks;
	/* SYN-ACKs with timestamps. */
	__u64 with_timestamps;
	/* Replies with another offset than another connection's. From the first on, offsets are per connection. */
	__u64 disagreed;
};
#define LB_STAMPING_AGREEING 4
#define LB_STAMPING_MAX_STEADY 64
/* Maximum difference between offsets of one clock: queues and slow servers delay SYN-ACKs. */
#define LB_STAMPING_TOLERANCE_MS 1000
/* Time by which a TSval may be ahead of the estimate: clocks drift apart between two SYN-ACKs. */
#define LB_STAMPING_SLACK_MS 60000
/* Minimum time between two replies that show the clock's rate: a delay of half of this time is tolerated. */
#define LB_STAMPING_SAMPLE_MS 100
/* Silence of the sampled connection after which another connection is sampled. */
#define LB_STAMPING_SAMPLE_EXPIRES_MS 2000

/*
 * Offsets of stamped connections whose server has no shared clock: direct-mapped by connection_hash(). One word:
 *
 *    63             32 31             0
 *    +----------------+----------------+
 *    | tag (odd)      | offset         |
 *    +----------------+----------------+
 */
#define LB_STAMPED_OFFSETS 1048576
#define LB_STAMPED_OFFSET_TAG_SHIFT 32

#endif
