/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Parsing of TCP packets in a tc program, and rewriting of a word in their timestamp option. */
#ifndef COREWARD_SERVER_SEGMENT_H
#define COREWARD_SERVER_SEGMENT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv4_header.h"
#include "ipv6_header.h"
#include "state.h"
#include "timestamp.h"

/* Mask of TCP header offsets (14 bytes for Ethernet and 60 for IPv4, or 113 for IPv6 with extension headers). */
#define TCP_OFFSET_MASK 0x7f
/* Maximum length of all headers together. */
#define MAX_HEADER_BYTES (TCP_OFFSET_MASK + 60)

enum segment_direction {
	FROM_CLIENT,
	FROM_SERVER,
};

/*
 * A parsed TCP packet. It has no pointers, because helpers that write packets invalidate them. The flow is aligned for
 * reads of half an IPv6 address.
 */
struct segment {
	struct flow_key flow __attribute__((aligned(8)));
	/* Offset of the TCP header in the frame. */
	__u32 tcp_offset;
	/* Offset of TSval in the TCP header, or NO_TIMESTAMP. */
	__u32 timestamp_offset;
	__be32 tsval;
	__be32 tsecr;
	/* Previous server, from the IP identification or the lower 16 bits of the flow label. */
	__u16 previous_server;
	/* Address family (ADDRESS_FAMILY_*). */
	__u8 family;
	__u8 syn;
	__u8 ack;
	__u8 has_payload;
};

#define NO_TIMESTAMP 0u

enum segment_location {
	LOCATED_TCP,
	LOCATED_OTHER,
	LOCATED_MALFORMED,
	LOCATED_BEYOND_LINEAR,
};

/* Returns the word at the start of the client's TCP header, which is the client's port, then the service's. */
static __always_inline __u32 ports_of(const struct flow_key *flow)
{
	return flow->client_port | (__u32)flow->vip_port << 16;
}

static __always_inline void map_ipv4_to_ipv6(__u32 mapped[4], __u32 address)
{
	mapped[0] = 0;
	mapped[1] = 0;
	mapped[2] = bpf_htonl(0xffff);
	mapped[3] = address;
}

static __always_inline void read_tcp_header(struct __sk_buff *skb, const struct tcphdr *tcp, struct segment *segment,
					    enum segment_direction direction)
{
	segment->flow.client_port = direction == FROM_CLIENT ? tcp->source : tcp->dest;
	segment->flow.vip_port = direction == FROM_CLIENT ? tcp->dest : tcp->source;
	segment->syn = tcp->syn;
	segment->ack = tcp->ack;
	segment->has_payload = skb->len > segment->tcp_offset + tcp->doff * 4;
}

/* Finds the TCP header of a whole IPv4 packet. locate_timestamp() parses its options. */
static __always_inline enum segment_location locate_ipv4(struct __sk_buff *skb, struct segment *segment,
							 enum segment_direction direction)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct iphdr *ip = data + ETH_HLEN;
	const struct tcphdr *tcp;
	__u32 ip_length;

	if (data + ETH_HLEN + sizeof(*ip) > data_end)
		return skb->len < ETH_HLEN + sizeof(*ip) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	ip_length = ip->ihl * 4;
	if (ip->protocol != IPPROTO_TCP || ip->version != 4 || ip_length < sizeof(*ip) ||
	    (ip->frag_off & bpf_htons(IP_FRAGMENT_MASK)))
		return LOCATED_OTHER;
	segment->family = ADDRESS_FAMILY_IPV4;
	segment->tcp_offset = ETH_HLEN + ip_length;
	map_ipv4_to_ipv6(segment->flow.client_address, direction == FROM_CLIENT ? ip->saddr : ip->daddr);
	map_ipv4_to_ipv6(segment->flow.vip_address, direction == FROM_CLIENT ? ip->daddr : ip->saddr);
	segment->previous_server = bpf_ntohs(ip->id);

	tcp = data + segment->tcp_offset;
	if ((void *)(tcp + 1) > data_end)
		return skb->len < segment->tcp_offset + sizeof(*tcp) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	read_tcp_header(skb, tcp, segment, direction);
	return LOCATED_TCP;
}

/*
 * Returns the offset of the TCP header after an IPv6 header and the extension headers that the load balancer skips.
 * Returns 0 for another protocol, or a fragment. `next` is the IPv6 header's next header.
 */
static __always_inline __u32 tcp_offset_ipv6(struct __sk_buff *skb, __u32 next)
{
	struct extension_header header;
	__u32 at = IPV6_TRANSPORT_OFFSET;

	for (int i = 0; i < MAX_EXTENSION_HEADERS && is_extension_header(next); i++) {
		if (at > TCP_OFFSET_MASK || bpf_skb_load_bytes(skb, at, &header, sizeof(header)) ||
		    (next == NEXT_FRAGMENT && fragment_field(&header)))
			return 0;
		at += extension_header_length(next, &header);
		next = header.next;
	}
	return next == IPPROTO_TCP && at <= TCP_OFFSET_MASK ? at : 0;
}

/* Finds the TCP header of a whole IPv6 packet. It is not inlined, so that the code for IPv4 keeps the registers. */
static __noinline enum segment_location locate_ipv6(struct __sk_buff *skb, struct segment *segment,
						    enum segment_direction direction)
{
	struct ipv6_header ip;
	struct tcphdr tcp;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || bpf_ntohl(ip.version_class_label) >> 28 != 6)
		return LOCATED_OTHER;
	segment->tcp_offset = tcp_offset_ipv6(skb, ip.next_header);
	if (!segment->tcp_offset || bpf_skb_load_bytes(skb, segment->tcp_offset, &tcp, sizeof(tcp)))
		return LOCATED_OTHER;
	segment->family = ADDRESS_FAMILY_IPV6;
	__builtin_memcpy(segment->flow.client_address, direction == FROM_CLIENT ? ip.source : ip.destination,
			 sizeof(ip.source));
	__builtin_memcpy(segment->flow.vip_address, direction == FROM_CLIENT ? ip.destination : ip.source,
			 sizeof(ip.source));
	segment->previous_server = bpf_ntohl(ip.version_class_label);
	read_tcp_header(skb, &tcp, segment, direction);
	return LOCATED_TCP;
}

static __always_inline void read_timestamp(struct segment *segment, __u32 offset, const void *option)
{
	segment->timestamp_offset = sizeof(struct tcphdr) + offset + 2;
	segment->tsval = ((const struct timestamp_words *)(option + 2))->tsval;
	segment->tsecr = ((const struct timestamp_words *)(option + 2))->tsecr;
}

/* Finds the timestamp option of a segment that locate_pulled() has parsed. The packet may have been pulled since. */
static __always_inline enum segment_location locate_timestamp(struct __sk_buff *skb, struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct tcphdr *tcp = data + (segment->tcp_offset & TCP_OFFSET_MASK);
	struct tcp_options options = {};
	__u32 length, words;
	int offset;

	segment->timestamp_offset = NO_TIMESTAMP;
	segment->tsval = segment->tsecr = 0;
	if ((void *)(tcp + 1) > data_end)
		return LOCATED_BEYOND_LINEAR;
	if (tcp->doff * 4 < sizeof(*tcp) || segment->tcp_offset + tcp->doff * 4 > skb->len)
		return LOCATED_MALFORMED;
	length = tcp->doff * 4 - sizeof(*tcp);
	if (length < OPTIONS_ALIGNED_LENGTH || length > TCP_OPTIONS_MAX)
		return length < TCP_TIMESTAMP_LENGTH ? LOCATED_TCP : LOCATED_MALFORMED;
	if ((void *)(tcp + 1) + OPTIONS_ALIGNED_LENGTH > data_end)
		return LOCATED_BEYOND_LINEAR;
	if (*(const __be32 *)(tcp + 1) == OPTIONS_ALIGNED_TIMESTAMP) {
		read_timestamp(segment, OPTIONS_ALIGNED_OFFSET, (void *)(tcp + 1) + OPTIONS_ALIGNED_OFFSET);
		return LOCATED_TCP;
	}
	/* This mask gives 12..40. Kernel 6.1's verifier loses bounds when clang keeps a second copy of the length. */
	words = tcp->doff - OPTIONS_ALIGNED_LENGTH / 4 - sizeof(*tcp) / 4;
	barrier_var(words);
	length = (words & 7) * 4 + OPTIONS_ALIGNED_LENGTH;
	if (bpf_skb_load_bytes(skb, segment->tcp_offset + sizeof(*tcp), &options, length))
		return LOCATED_MALFORMED;
	offset = find_timestamp(&options, length);
	if (offset >= 0 && offset <= TCP_OPTIONS_MAX - TCP_TIMESTAMP_LENGTH)
		read_timestamp(segment, offset, &options.bytes[offset]);
	return LOCATED_TCP;
}

/* Makes all headers linear. (The caller must read skb->data again, and clang must not reuse the old values.) */
static __always_inline int pull_headers(struct __sk_buff *skb)
{
	int failed = bpf_skb_pull_data(skb, skb->len < MAX_HEADER_BYTES ? skb->len : MAX_HEADER_BYTES);

	barrier();
	return failed;
}

/* Finds the TCP header, and makes headers linear. A packet whose headers cannot be pulled passes. */
static __always_inline enum segment_location locate_pulled(struct __sk_buff *skb, struct segment *segment,
							   enum segment_direction direction)
{
	enum segment_location segment_location;

	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return locate_ipv6(skb, segment, direction);
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return LOCATED_OTHER;
	segment_location = locate_ipv4(skb, segment, direction);
	if (segment_location == LOCATED_BEYOND_LINEAR)
		segment_location = pull_headers(skb) ? LOCATED_OTHER : locate_ipv4(skb, segment, direction);
	return segment_location;
}

/* Calls locate_timestamp(), and makes headers linear. */
static __always_inline enum segment_location locate_timestamp_pulled(struct __sk_buff *skb, struct segment *segment)
{
	enum segment_location segment_location = locate_timestamp(skb, segment);

	if (segment_location == LOCATED_BEYOND_LINEAR && !pull_headers(skb))
		segment_location = locate_timestamp(skb, segment);
	return segment_location;
}

/* Replaces a word of the timestamp option and updates the checksum. The packet is dropped if either fails. */
static __always_inline int rewrite_timestamp_word(struct __sk_buff *skb, const struct segment *segment,
						  __u32 option_offset, __be32 old, __be32 new)
{
	__u32 checksum_offset = segment->tcp_offset + __builtin_offsetof(struct tcphdr, check);

	if (bpf_skb_store_bytes(skb, segment->tcp_offset + option_offset, &new, sizeof(new), 0)) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	/* The checksum adds 16-bit words, so at an odd offset a byte counts in the other half (RFC 1071, Sect. 2 B). */
	if (option_offset & 1) {
		old = old << 8 | old >> 24;
		new = new << 8 | new >> 24;
	}
	if (bpf_l4_csum_replace(skb, checksum_offset, old, new, sizeof(new))) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	return TC_ACT_UNSPEC;
}

#endif
