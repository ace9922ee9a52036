/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Detection of stalled stamped connections, which a firewall may cause (server.bpf.c, "Stalls"). */
#ifndef COREWARD_SERVER_STALL_H
#define COREWARD_SERVER_STALL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "socket.h"
#include "state.h"

/*
 * Numbers of retransmissions at which a stall is counted, once. The kernel increments its number after it sends a
 * SYN-ACK (tcp_rtx_synack()), but before it sends a segment (tcp_retransmit_timer()).
 */
#define FOURTH_SYN_ACK_RETRANSMITS 2
#define FIFTH_SEGMENT_RETRANSMITS 4

/* Counts a stamped SYN-ACK of the socket `sk`. SYN-ACKs with SYN cookies have no socket, and are not retransmitted. */
static __always_inline void watch_handshake(struct bpf_sock *sk)
{
	struct tcp_request_sock *request = bpf_skc_to_tcp_request_sock(sk);
	__u32 retransmits;

	if (!request)
		return;
	retransmits = request->req.req.num_retrans;
	if (retransmits == 0)
		count(SERVER_COUNTER_HANDSHAKE);
	else if (retransmits == FOURTH_SYN_ACK_RETRANSMITS)
		count(SERVER_COUNTER_HANDSHAKE_STALLED);
}

/* Counts a stall if the stamped segment of an established connection is retransmitted too often. */
static __always_inline void watch_connection(const struct segment *segment, struct tcp_sock *socket)
{
	if (segment->has_payload && socket->inet_conn.icsk_retransmits == FIFTH_SEGMENT_RETRANSMITS)
		count(SERVER_COUNTER_CONNECTION_STALLED);
}

#endif
