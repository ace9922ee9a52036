/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Look-ups of this host's sockets, and fields of the kernel's structs that they read. */
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

/* Socket states of include/net/tcp_states.h. */
enum {
	SOCKET_TIME_WAIT = 6,
	SOCKET_CLOSE = 7,
	SOCKET_LISTEN = 10,
	SOCKET_REQUEST = 12,
};

/* Fields of the kernel's structs that are read here. libbpf relocates them to the running kernel's layouts. */
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

/* Returns whether the socket's TSval is not CLOCK_MONOTONIC in ms. */
static __always_inline bool has_other_clock(struct tcp_sock *socket)
{
	return socket->tsoffset ||
	       (bpf_core_field_exists(socket->tcp_usec_ts) && BPF_CORE_READ_BITFIELD(socket, tcp_usec_ts));
}

_Static_assert(sizeof(struct flow_key) == sizeof(((struct bpf_sock_tuple *)0)->ipv6),
	       "a client's packet has its flow as 4-tuple");

/* Returns the socket that receives a client's packet, possibly a listening socket. The caller releases the socket. */
static __always_inline struct bpf_sock *find_socket(struct __sk_buff *skb, const struct segment *segment)
{
	const struct flow_key *flow = &segment->flow;
	struct bpf_sock_tuple tuple;

	if (segment->family == ADDRESS_FAMILY_IPV6)
		return bpf_skc_lookup_tcp(skb, (struct bpf_sock_tuple *)flow, sizeof(*flow), BPF_F_CURRENT_NETNS, 0);
	tuple.ipv4.saddr = flow->client_address[3];
	tuple.ipv4.daddr = flow->vip_address[3];
	tuple.ipv4.sport = flow->client_port;
	tuple.ipv4.dport = flow->vip_port;
	return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
}

/*
 * Returns whether this host has a socket of exactly this 4-tuple, which is established, half-open or in TIME-WAIT.
 * Listening sockets do not count.
 */
static __noinline bool has_socket(struct __sk_buff *skb, const struct segment *segment)
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
 * Returns whether the segment completes a handshake that the listening socket answered with a SYN cookie, so that the
 * connection has no socket yet.
 */
static __always_inline bool completes_syn_cookie_handshake(struct __sk_buff *skb, struct bpf_sock *listener,
							   const struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	struct tcphdr *tcp = data + (segment->tcp_offset & TCP_OFFSET_MASK);
	struct ipv6_header *ipv6 = data + ETH_HLEN;
	struct iphdr *ipv4 = data + ETH_HLEN;

	if ((void *)(tcp + 1) > data_end || (void *)(ipv4 + 1) > data_end)
		return false;
	if (segment->family == ADDRESS_FAMILY_IPV4)
		return !bpf_tcp_check_syncookie(listener, ipv4, sizeof(*ipv4), tcp, sizeof(*tcp));
	return (void *)(ipv6 + 1) <= data_end &&
	       !bpf_tcp_check_syncookie(listener, ipv6, sizeof(*ipv6), tcp, sizeof(*tcp));
}

/* Returns whether this host has the segment's socket, or the segment creates it. */
static __noinline bool has_connection(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock *sk = find_socket(skb, segment);
	bool here;

	if (!sk)
		return false;
	here = sk->state != SOCKET_LISTEN || completes_syn_cookie_handshake(skb, sk, segment);
	bpf_sk_release(sk);
	return here;
}

#endif
