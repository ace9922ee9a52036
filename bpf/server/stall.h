/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Connections that stall although, or because, they are stamped (server.bpf.c, "Stalls"). */
#ifndef COREWARD_SERVER_STALL_H
#define COREWARD_SERVER_STALL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "socket.h"
#include "state.h"

/*
 * The kernel counts a retransmitted SYN-ACK after sending it (tcp_rtx_synack()), and a segment before
 * (tcp_retransmit_timer()). Each is counted here once, when the number is exactly this.
 */
#define FOURTH_SYN_ACK_RETRANSMITS 2
#define FIFTH_SEGMENT_RETRANSMITS 4

/* Counts a stamped SYN-ACK; `sk`: its socket. Cookie SYN-ACKs have no socket, and are never resent. */
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

/* Counts a stamped segment of an established connection. */
static __always_inline void watch_connection(const struct segment *segment, struct tcp_sock *socket)
{
	if (segment->has_payload && socket->inet_conn.icsk_retransmits == FIFTH_SEGMENT_RETRANSMITS)
		count(SERVER_COUNTER_CONNECTION_STALLED);
}

#endif
