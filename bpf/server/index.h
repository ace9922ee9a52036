/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Index of a connection's entry in a load balancer's connection table (server.bpf.c, "The index"). */
#ifndef COREWARD_SERVER_INDEX_H
#define COREWARD_SERVER_INDEX_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "socket.h"
#include "state.h"
#include "cookie_time.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_HALF_OPEN_INDEXES);
	__type(key, struct flow_key);
	__type(value, __u16);
} half_open_indexes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct connection_index);
} connection_indexes SEC(".maps");

/* ---- from the SYN ---------------------------------------------------------------------------------------------- */

/*
 * Removes the index from a SYN's TSecr, which TCP must read as 0 (RFC 7323, Sect. 3.2), and stores it. A SYN without
 * index removes the stored index of a former connection with the same 4-tuple.
 */
static __noinline int learn_index(struct __sk_buff *skb, const struct segment *segment)
{
	__u32 tsecr = segment->timestamp_offset == NO_TIMESTAMP ? 0 : bpf_ntohl(segment->tsecr);
	__u16 index = tsecr & COOKIE_ID_MASK;

	if ((tsecr & ~COOKIE_ID_MASK) != (SYN_TSECR_HOLDS_COOKIE | COOKIE_KIND_BIT)) {
		bpf_map_delete_elem(&half_open_indexes, &segment->flow);
		return TC_ACT_UNSPEC;
	}
	bpf_map_update_elem(&half_open_indexes, &segment->flow, &index, BPF_ANY);
	count(SERVER_COUNTER_INDEX_LEARNT);
	return rewrite_timestamp_word(skb, segment, segment->timestamp_offset + sizeof(segment->tsval), segment->tsecr,
				      0);
}

/* ---- egress ---------------------------------------------------------------------------------------------------- */

/* Returns the index in the socket's storage, which is created on first use. */
static __always_inline struct connection_index *index_of_socket(const struct flow_key *flow, struct tcp_sock *socket)
{
	struct connection_index first = {.index = NO_CONNECTION_INDEX}, *kept;
	__u16 *half_open;

	kept = bpf_sk_storage_get(&connection_indexes, socket, NULL, 0);
	if (kept)
		return kept;
	half_open = bpf_map_lookup_elem(&half_open_indexes, flow);
	if (half_open)
		first.index = *half_open;
	kept = bpf_sk_storage_get(&connection_indexes, socket, &first, BPF_SK_STORAGE_GET_F_CREATE);
	if (kept && half_open)
		bpf_map_delete_elem(&half_open_indexes, flow);
	return kept;
}

/*
 * Returns the index that stamps the server's own TSval `milliseconds`, or NO_CONNECTION_INDEX. After an index was given
 * up, it still stamps TSvals up to `newest_ms`, so that stamped TSvals do not decrease.
 */
static __always_inline __u32 select_index(const struct segment *segment, struct tcp_sock *socket, __u32 milliseconds)
{
	struct connection_index *kept = NULL;
	__u16 *half_open;

	if (socket)
		kept = index_of_socket(&segment->flow, socket);
	if (!kept) {
		half_open = bpf_map_lookup_elem(&half_open_indexes, &segment->flow);
		return half_open ? *half_open : NO_CONNECTION_INDEX;
	}
	if (kept->given_up)
		return (__s32)(milliseconds - kept->newest_ms) > 0 ? NO_CONNECTION_INDEX : kept->index;
	kept->newest_ms = milliseconds;
	return kept->index;
}

/* ---- ingress --------------------------------------------------------------------------------------------------- */

/*
 * Returns whether this host may have stamped a TSecr with an index, which does not name the server. This host has not
 * if it has no socket for the connection, or if the connection's TSval has an offset, because it is older than
 * coreward.
 */
static __noinline bool may_have_stamped_index(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock *sk = find_socket(skb, segment);
	struct tcp_sock *socket;
	bool plain;

	if (!sk)
		return false;
	/*
	 * A listening socket shows that the packet ends a handshake with a SYN cookie, or that the kernel rejects it
	 * with any TSecr.
	 */
	plain = sk->state == SOCKET_REQUEST || sk->state == SOCKET_TIME_WAIT || sk->state == SOCKET_LISTEN;
	if (!plain) {
		socket = bpf_skc_to_tcp_sock(sk);
		plain = socket && !has_other_clock(socket);
	}
	bpf_sk_release(sk);
	return plain;
}

/* Gives up an index that no load balancer has in its table, so that later packets carry the server's id. */
static __noinline void give_up_index(struct __sk_buff *skb, const struct segment *segment, __u32 index)
{
	struct connection_index first = {.index = index, .newest_ms = clock_ms()}, *kept;
	struct bpf_sock *sk = find_socket(skb, segment);
	struct tcp_sock *socket;

	bpf_map_delete_elem(&half_open_indexes, &segment->flow);
	if (!sk)
		return;
	if (sk->state != SOCKET_LISTEN) {
		socket = bpf_skc_to_tcp_sock(sk);
		if (socket) {
			kept = bpf_sk_storage_get(&connection_indexes, socket, &first, BPF_SK_STORAGE_GET_F_CREATE);
			if (kept && !kept->given_up) {
				kept->given_up = 1;
				count(SERVER_COUNTER_INDEX_GIVEN_UP);
			}
		}
	}
	bpf_sk_release(sk);
}

#endif
