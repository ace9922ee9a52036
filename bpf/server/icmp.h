/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* ICMP errors that the load balancer broadcast (server.bpf.c, "Sent to all servers"). */
#ifndef COREWARD_SERVER_ICMP_H
#define COREWARD_SERVER_ICMP_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "socket.h"
#include "state.h"
#include "service.h"

/* RFC 792; linux/icmp.h needs a libc. */
#define ICMP_DESTINATION_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMP_HEADER_LENGTH 8

/* Whether this host has the socket that sent the quoted packet. */
static __always_inline bool quoted_socket_is_here(struct __sk_buff *skb, __u8 protocol, struct bpf_sock_tuple *tuple)
{
	struct bpf_sock *sk;
	bool here;

	sk = protocol == IPPROTO_TCP ? bpf_skc_lookup_tcp(skb, tuple, sizeof(tuple->ipv4), BPF_F_CURRENT_NETNS, 0)
				     : bpf_sk_lookup_udp(skb, tuple, sizeof(tuple->ipv4), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	here = protocol != IPPROTO_TCP || sk->state != SOCKET_LISTEN;
	bpf_sk_release(sk);
	return here;
}

/*
 * Accepts a broadcast ICMP error about one of our services if the socket is here, and drops it otherwise. Other packets
 * that are not TCP pass.
 */
static __noinline int accept_icmp_error(struct __sk_buff *skb)
{
	struct bpf_sock_tuple tuple = {};
	struct iphdr ip, quoted;
	__u16 ports[2];
	__u32 offset;
	__u8 type;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.protocol != IPPROTO_ICMP ||
	    ip.frag_off & bpf_htons(IPV4_FRAGMENT_BITS) ||
	    find_service(&state.directories, service_tail_ipv4(ip.daddr, 0, 0)) != SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;
	offset = ETH_HLEN + ip.ihl * 4;
	if (bpf_skb_load_bytes(skb, offset, &type, sizeof(type)) ||
	    (type != ICMP_DESTINATION_UNREACHABLE && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETER_PROBLEM))
		return TC_ACT_UNSPEC;
	offset += ICMP_HEADER_LENGTH;
	if (bpf_skb_load_bytes(skb, offset, &quoted, sizeof(quoted)) || quoted.version != 4 ||
	    quoted.frag_off & bpf_htons(IPV4_FRAGMENT_BITS & ~IPV4_MORE_FRAGMENTS))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, offset + quoted.ihl * 4, ports, sizeof(ports)) ||
	    find_service(&state.directories, service_tail_ipv4(quoted.saddr, ports[0], quoted.protocol)) >=
		    SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;

	tuple.ipv4.saddr = quoted.daddr;
	tuple.ipv4.daddr = quoted.saddr;
	tuple.ipv4.sport = ports[1];
	tuple.ipv4.dport = ports[0];
	if (!quoted_socket_is_here(skb, quoted.protocol, &tuple)) {
		count(SERVER_COUNTER_ICMP_TO_ALL_IGNORED);
		return TC_ACT_SHOT;
	}
	count(SERVER_COUNTER_ICMP_TO_ALL_ACCEPTED);
	bpf_skb_change_type(skb, PACKET_HOST);
	return TC_ACT_UNSPEC;
}

#endif
