/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* TCP packets in a tc program: parsing, the timestamp option, and rewriting one of its words. */
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
#include "state.h"
#include "timestamp.h"

#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV4_FRAGMENT_BITS 0x3fff /* "more fragments" and the offset; not "don't fragment" */
/* The longest Ethernet, IPv4 and TCP headers together. */
#define HEADERS_MAX (ETH_HLEN + 60 + 60)

/* A parsed TCP packet without pointers: helpers that write invalidate those. */
struct segment {
	__u32 source_address;
	__u32 destination_address;
	/* In the order of the TCP header: source, then destination. */
	__u32 ports;
	/* Offset of the TCP header in the frame. */
	__u32 tcp_offset;
	/* Offset of TSval in the TCP header, or NO_TIMESTAMP. */
	__u32 timestamp;
	__be32 value;
	__be32 echo;
	/* IP identification, in network byte order. */
	__be16 identification;
	__u8 syn;
	__u8 ack;
	__u8 has_payload;
};

#define NO_TIMESTAMP 0u

enum located {
	LOCATED_TCP,
	LOCATED_OTHER,
	LOCATED_MALFORMED,
	LOCATED_BEYOND_LINEAR,
};

static __always_inline __u16 high_half(__u32 ports)
{
	return ports >> 16;
}

static __always_inline __u32 swapped(__u32 ports)
{
	return ports << 16 | ports >> 16;
}

/* Finds the TCP header of a whole IPv4 packet. locate_timestamp() parses its options. */
static __always_inline enum located locate(struct __sk_buff *skb, struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct iphdr *ip = data + ETH_HLEN;
	const struct tcphdr *tcp;
	__u32 ip_length;

	if (data + ETH_HLEN + sizeof(*ip) > data_end)
		return skb->len < ETH_HLEN + sizeof(*ip) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	ip_length = ip->ihl * 4;
	if (ip->protocol != IPPROTO_TCP || ip->version != 4 || ip_length < sizeof(*ip) ||
	    (ip->frag_off & bpf_htons(IPV4_FRAGMENT_BITS)))
		return LOCATED_OTHER;
	segment->tcp_offset = ETH_HLEN + ip_length;
	segment->source_address = ip->saddr;
	segment->destination_address = ip->daddr;
	segment->identification = ip->id;

	tcp = data + segment->tcp_offset;
	if ((void *)(tcp + 1) > data_end)
		return skb->len < segment->tcp_offset + sizeof(*tcp) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	segment->ports = *(const __u32 *)tcp;
	segment->syn = tcp->syn;
	segment->ack = tcp->ack;
	segment->has_payload = skb->len > segment->tcp_offset + tcp->doff * 4;
	return LOCATED_TCP;
}

/* Reads the words of a timestamp option at `offset` of the options. */
static __always_inline void take_timestamp(struct segment *segment, __u32 offset, const void *option)
{
	segment->timestamp = sizeof(struct tcphdr) + offset + 2;
	segment->value = ((const struct timestamp_words *)(option + 2))->value;
	segment->echo = ((const struct timestamp_words *)(option + 2))->echo;
}

/* Finds the timestamp option of a segment of locate(), on a packet that may have been pulled since. */
static __always_inline enum located locate_timestamp(struct __sk_buff *skb, struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct tcphdr *tcp = data + (segment->tcp_offset & 0x7f);
	struct tcp_options options = {};
	__u32 length, words;
	int offset;

	segment->timestamp = NO_TIMESTAMP;
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
		take_timestamp(segment, OPTIONS_ALIGNED_OFFSET, (void *)(tcp + 1) + OPTIONS_ALIGNED_OFFSET);
		return LOCATED_TCP;
	}
	/* 12..40 by a mask: kernel 6.1's verifier loses the bounds when clang keeps a second copy of the length. */
	words = tcp->doff - OPTIONS_ALIGNED_LENGTH / 4 - sizeof(*tcp) / 4;
	barrier_var(words);
	length = (words & 7) * 4 + OPTIONS_ALIGNED_LENGTH;
	if (bpf_skb_load_bytes(skb, segment->tcp_offset + sizeof(*tcp), &options, length))
		return LOCATED_MALFORMED;
	offset = find_timestamp(&options, length);
	if (offset >= 0 && offset <= TCP_OPTIONS_MAX - TCP_TIMESTAMP_LENGTH)
		take_timestamp(segment, offset, &options.bytes[offset]);
	return LOCATED_TCP;
}

/* Makes all headers linear. (The caller must read skb->data again: clang must not reuse the old values.) */
static __always_inline int pull_headers(struct __sk_buff *skb)
{
	int failed = bpf_skb_pull_data(skb, skb->len < HEADERS_MAX ? skb->len : HEADERS_MAX);

	barrier();
	return failed;
}

/* Calls locate(), and pulls headers that are not linear. A packet that cannot be pulled passes. */
static __always_inline enum located locate_pulled(struct __sk_buff *skb, struct segment *segment)
{
	enum located located;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return LOCATED_OTHER;
	located = locate(skb, segment);
	if (located == LOCATED_BEYOND_LINEAR)
		located = pull_headers(skb) ? LOCATED_OTHER : locate(skb, segment);
	return located;
}

/* Calls locate_timestamp() likewise. */
static __always_inline enum located locate_timestamp_pulled(struct __sk_buff *skb, struct segment *segment)
{
	enum located located = locate_timestamp(skb, segment);

	if (located == LOCATED_BEYOND_LINEAR && !pull_headers(skb))
		located = locate_timestamp(skb, segment);
	return located;
}

/* Replaces one 32-bit word of the timestamp option and updates the checksum: both, or the packet is dropped. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct segment *segment, __u32 option_offset,
				   __be32 old, __be32 new)
{
	__u32 checksum_offset = segment->tcp_offset + __builtin_offsetof(struct tcphdr, check);

	if (bpf_skb_store_bytes(skb, segment->tcp_offset + option_offset, &new, sizeof(new), 0)) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	/* The checksum adds 16-bit words: at an odd offset each byte counts in the other half (RFC 1071, Sect. 2 B). */
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

static __always_inline struct flow_key flow_of(__u32 client_address, __u32 vip_address, __u32 client_ports)
{
	struct flow_key flow = {
		.client_address = {0, 0, bpf_htonl(0xffff), client_address},
		.vip_address = {0, 0, bpf_htonl(0xffff), vip_address},
		.client_port = client_ports,
		.vip_port = client_ports >> 16,
	};

	return flow;
}

#endif
