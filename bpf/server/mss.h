/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * MSS in SYN-ACKs of services whose packets arrive encapsulated, because clients' segments need room for the outer
 * header. Replies have no outer header, so segments of the server are not limited.
 */
#ifndef COREWARD_SERVER_MSS_H
#define COREWARD_SERVER_MSS_H

#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "state.h"
#include "tunnel.h"

/* First bytes of the MSS option, which are kind 2 and length 4 (RFC 9293, Sect. 3.2). */
#define MSS_OPTION 0x02040000u
#define MSS_MASK 0xffffu
/* Returns the length of all headers without options, including a GUE header. `number` is the service's number. */
static __always_inline __u32 encapsulated_header_length(const struct segment *segment, __u32 number)
{
	return outer_header_length(FORWARDING_GUE, number & SERVER_NUMBER_OUTER_IPV6) +
	       ip_header_length(segment->family == ADDRESS_FAMILY_IPV6) + sizeof(struct tcphdr);
}

/*
 * Limits the MSS of a SYN-ACK by the device's MTU. Linux writes this option first (tcp_options_write(),
 * net/ipv4/tcp_output.c). A SYN-ACK with another first option stays unchanged. Returns TC_ACT_SHOT if the packet could
 * not be changed.
 */
static __always_inline int clamp_mss(struct __sk_buff *skb, const struct segment *segment, __u32 number)
{
	__u32 mtu = 0, headers = encapsulated_header_length(segment, number), option;
	__be32 old;

	if (bpf_check_mtu(skb, 0, &mtu, 0, 0) < 0 || mtu < headers ||
	    bpf_skb_load_bytes(skb, segment->tcp_offset + sizeof(struct tcphdr), &old, sizeof(old)))
		return TC_ACT_UNSPEC;
	option = bpf_ntohl(old);
	if ((option & ~MSS_MASK) != MSS_OPTION || (option & MSS_MASK) <= mtu - headers)
		return TC_ACT_UNSPEC;
	count(SERVER_COUNTER_MSS_CLAMPED);
	return rewrite_timestamp_word(skb, segment, sizeof(struct tcphdr), old,
				      bpf_htonl(MSS_OPTION | (mtu - headers)));
}

#endif
