/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Sockets of this host: the fields that are read, and look-ups. */
#ifndef COREWARD_SERVER_SOCKET_H
#define COREWARD_SERVER_SOCKET_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"

/* include/net/tcp_states.h */
enum {
	SOCKET_TIME_WAIT = 6,
	SOCKET_CLOSE = 7,
	SOCKET_LISTEN = 10,
	SOCKET_REQUEST = 12,
};

/* Fields of the kernel's structs that are read here; libbpf relocates them to the running kernel's. */
struct tcp_options_received {
	__u32 rcv_tsecr;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
	__u8 icsk_retransmits;
} __attribute__((preserve_access_index));

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 tsoffset;
	struct tcp_options_received rx_opt;
	__u8 tcp_usec_ts : 1;
} __attribute__((preserve_access_index));

struct request_sock {
	__u8 num_retrans;
} __attribute__((preserve_access_index));

struct inet_request_sock {
	struct request_sock req;
} __attribute__((preserve_access_index));

struct tcp_request_sock {
	struct inet_request_sock req;
} __attribute__((preserve_access_index));

/* Whether its TSvals are not the plain clock in ms. */
static __always_inline bool has_other_clock(struct tcp_sock *socket)
{
	return socket->tsoffset ||
	       (bpf_core_field_exists(socket->tcp_usec_ts) && BPF_CORE_READ_BITFIELD(socket, tcp_usec_ts));
}

/* Returns the arriving packet's 4-tuple for look-ups. */
static __always_inline struct bpf_sock_tuple tuple_of(const struct segment *segment)
{
	struct bpf_sock_tuple tuple = {
		.ipv4.saddr = segment->source_address,
		.ipv4.daddr = segment->destination_address,
		.ipv4.sport = segment->ports,
		.ipv4.dport = segment->ports >> 16,
	};

	return tuple;
}

/* Returns the receiving socket, to be released; a listening one if there is no other. */
static __always_inline struct bpf_sock *find_socket(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock_tuple tuple = tuple_of(segment);

	return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
}

/* Whether this host has a socket of exactly that 4-tuple: established, requested or in TIME-WAIT; not a listening one. */
static __noinline bool socket_is_here(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock *sk = find_socket(skb, segment);
	bool here;

	if (!sk)
		return false;
	here = sk->state != SOCKET_LISTEN;
	bpf_sk_release(sk);
	return here;
}

/*
 * Whether the segment completes a handshake that the listening socket answered with a SYN cookie, so that no other
 * socket exists yet.
 */
static __always_inline bool ends_cookie_handshake(struct __sk_buff *skb, struct bpf_sock *listener,
						  const struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct tcphdr *tcp = data + (segment->tcp_offset & 0x7f);

	if ((void *)(ip + 1) > data_end || (void *)(tcp + 1) > data_end)
		return false;
	return !bpf_tcp_check_syncookie(listener, ip, sizeof(*ip), tcp, sizeof(*tcp));
}

/* socket_is_here(), or the segment creates one. */
static __noinline bool connection_is_here(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock *sk = find_socket(skb, segment);
	bool here;

	if (!sk)
		return false;
	here = sk->state != SOCKET_LISTEN || ends_cookie_handshake(skb, sk, segment);
	bpf_sk_release(sk);
	return here;
}

#endif
