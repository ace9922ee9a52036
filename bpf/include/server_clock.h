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
 *                                          which of the two keys, in clear
 *
 * More bits of time than where servers stamp: the load balancer does not know what the client has seen last, so there
 * is no PAWS clamp, and a connection may be idle for half of 2^20 ms only.
 */
#define LB_STAMPING_TIME_SHIFT 12
#define LB_STAMPING_TIME_MASK 0xfffffu
#define LB_STAMPING_KEY_BIT 0x800u
#define LB_STAMPING_ID_MASK 0x7ffu
#define LB_STAMPING_ID_BITS 11

/* Key: MAC address in the low 48 bits (as in struct server_entry), the service's index above. */
#define LB_STAMPED_SERVICE_SHIFT 48
#define MAX_LB_STAMPED_SERVERS 16384

/*
 * A server's clock, learnt from its answers. With net.ipv4.tcp_timestamps=2 all its connections show one clock; with 1
 * each has an offset of its own, and nothing can be restored.
 */
struct lb_stamped_server {
	/* TSval minus the load balancer's CLOCK_MONOTONIC in ms, modulo 2^32: what stamped connections go by. */
	__u32 offset_ms;
	/* The same by the newest SYN-ACK. */
	__u32 newest_ms;
	/* Client of that SYN-ACK, address XOR ports: a retransmission proves nothing. */
	__u32 newest_client;
	__u16 server_id;
	/*
	 * SYN-ACKs in a row that agreed, the newest included; at LB_STAMPING_AGREEING, the maximum, new connections are
	 * stamped.
	 */
	__u16 agreeing;
	/* 1: `offset_ms` is of an answer. */
	__u64 has_clock;
	/* SYN-ACKs, with timestamps or without. */
	__u64 syn_acks;
	/* Those with timestamps. */
	__u64 with_timestamps;
	/* Those that did not agree with the one before. */
	__u64 disagreed;
};
#define LB_STAMPING_AGREEING 4
/* How far SYN-ACKs of one clock may lie apart: queues, and a server that is slow to send. */
#define LB_STAMPING_TOLERANCE_MS 1000
/* How far a TSval may run ahead of the estimate: clocks drift apart between two SYN-ACKs. */
#define LB_STAMPING_SLACK_MS 60000

#endif
