/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Fields of the kernel's structs that dispatch reads. libbpf relocates them to the running kernel's layouts. */
#ifndef COREWARD_DISPATCH_QUEUE_H
#define COREWARD_DISPATCH_QUEUE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	int counter;
} atomic_t;

struct sk_buff_head {
	__u32 qlen;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	possible_net_t skc_net;
};

struct numa_drop_counters {
	atomic_t drops0;
	atomic_t drops1;
};

struct sock {
	struct sock_common __sk_common;
	struct sk_buff_head sk_receive_queue;
	atomic_t sk_drops;
	struct numa_drop_counters *sk_drop_counters;
};

struct inet_sock {
	struct sock sk;
};

struct udp_sock {
	struct inet_sock inet;
	struct sk_buff_head reader_queue;
};

struct sk_buff {
	unsigned char *head;
	__u16 network_header;
};

struct sk_reuseport_kern {
	struct sk_buff *skb;
};

struct bpf_iter_meta;

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
};

#pragma clang attribute pop

/* Returns the length of both receive queues, as udp_recvmsg moves datagrams from one to the other (net/ipv4/udp.c). */
static __always_inline __u32 queued_datagrams(struct udp_sock *socket)
{
	return socket->inet.sk.sk_receive_queue.qlen + socket->reader_queue.qlen;
}

/*
 * Returns the number of datagrams that were dropped because of a full receive buffer or a wrong checksum. Since Linux
 * 6.18 UDP has two counters, for NUMA nodes with even and odd numbers.
 */
static __always_inline __u32 dropped_datagrams(struct udp_sock *socket)
{
	struct sock *sock = &socket->inet.sk;

	if (bpf_core_field_exists(sock->sk_drop_counters)) {
		struct numa_drop_counters *counters = sock->sk_drop_counters;

		if (counters)
			return counters->drops0.counter + counters->drops1.counter;
	}
	return sock->sk_drops.counter;
}

#endif
