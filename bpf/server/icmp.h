/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* ICMP errors that the load balancer broadcasts (server.bpf.c, "Broadcast packets"). */
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
#include "ipv4_header.h"
#include "ipv6_header.h"
#include "segment.h"
#include "socket.h"
#include "state.h"
#include "service.h"

/* Numbers of RFC 792, because linux/icmp.h needs a libc. */
#define ICMP_DESTINATION_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12
#define ICMP_HEADER_LENGTH 8
#define QUOTED_IPV6_OFFSET (IPV6_TRANSPORT_OFFSET + ICMP_HEADER_LENGTH)

/* Returns whether this host has the socket that sent the quoted packet. `length` is that of the family's tuple. */
static __always_inline bool has_quoted_socket(struct __sk_buff *skb, __u8 protocol, struct bpf_sock_tuple *tuple,
					      __u32 length)
{
	struct bpf_sock *sk;
	bool here;

	sk = protocol == IPPROTO_TCP ? bpf_skc_lookup_tcp(skb, tuple, length, BPF_F_CURRENT_NETNS, 0)
				     : bpf_sk_lookup_udp(skb, tuple, length, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	here = protocol != IPPROTO_TCP || sk->state != SOCKET_LISTEN;
	bpf_sk_release(sk);
	return here;
}

static __always_inline int accept_if_socket_here(struct __sk_buff *skb, bool here)
{
	if (!here) {
		count(SERVER_COUNTER_ICMP_BROADCAST_IGNORED);
		return TC_ACT_SHOT;
	}
	count(SERVER_COUNTER_ICMP_BROADCAST_ACCEPTED);
	bpf_skb_change_type(skb, PACKET_HOST);
	return TC_ACT_UNSPEC;
}

/* Returns the number of the service with that address (16 bytes), or that of its VIP if port and protocol are 0. */
static __always_inline __u32 service_at(const void *address, __u16 port, __u8 protocol)
{
	struct service_key_ipv6 key = make_service_key_ipv6(address, port, protocol);

	return find_service_ipv6(&state.directories, &key);
}

/*
 * accept_icmp_error() for IPv6. An error that quotes extension headers passes, because servers send none, and the load
 * balancer does not broadcast it.
 */
static __noinline int accept_icmpv6_error(struct __sk_buff *skb)
{
	struct bpf_sock_tuple tuple;
	struct ipv6_header ip;
	__u8 type, protocol;
	__u16 ports[2];

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.next_header != NEXT_ICMPV6 ||
	    service_at(ip.destination, 0, 0) != SERVICE_ADDRESS_ONLY ||
	    bpf_skb_load_bytes(skb, IPV6_TRANSPORT_OFFSET, &type, sizeof(type)) || !is_icmpv6_error(type))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, QUOTED_IPV6_OFFSET, &ip, sizeof(ip)) ||
	    bpf_ntohl(ip.version_class_label) >> 28 != 6 ||
	    bpf_skb_load_bytes(skb, QUOTED_IPV6_OFFSET + sizeof(ip), ports, sizeof(ports)))
		return TC_ACT_UNSPEC;
	protocol = ip.next_header;
	if (service_at(ip.source, ports[0], protocol) >= SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;

	__builtin_memcpy(tuple.ipv6.saddr, ip.destination, sizeof(ip.destination));
	__builtin_memcpy(tuple.ipv6.daddr, ip.source, sizeof(ip.source));
	tuple.ipv6.sport = ports[1];
	tuple.ipv6.dport = ports[0];
	return accept_if_socket_here(skb, has_quoted_socket(skb, protocol, &tuple, sizeof(tuple.ipv6)));
}

/*
 * Accepts a broadcast ICMP error about a service if this host has the socket, and drops it otherwise. Other packets
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
	    ip.frag_off & bpf_htons(IP_FRAGMENT_MASK) ||
	    find_service(&state.directories, service_tail_ipv4(ip.daddr, 0, 0)) != SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;
	offset = ETH_HLEN + ip.ihl * 4;
	if (bpf_skb_load_bytes(skb, offset, &type, sizeof(type)) ||
	    (type != ICMP_DESTINATION_UNREACHABLE && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETER_PROBLEM))
		return TC_ACT_UNSPEC;
	offset += ICMP_HEADER_LENGTH;
	if (bpf_skb_load_bytes(skb, offset, &quoted, sizeof(quoted)) || quoted.version != 4 ||
	    quoted.frag_off & bpf_htons(IP_FRAGMENT_OFFSET))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, offset + quoted.ihl * 4, ports, sizeof(ports)) ||
	    find_service(&state.directories, service_tail_ipv4(quoted.saddr, ports[0], quoted.protocol)) >=
		    SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;

	tuple.ipv4.saddr = quoted.daddr;
	tuple.ipv4.daddr = quoted.saddr;
	tuple.ipv4.sport = ports[1];
	tuple.ipv4.dport = ports[0];
	return accept_if_socket_here(skb, has_quoted_socket(skb, quoted.protocol, &tuple, sizeof(tuple.ipv4)));
}

#endif
