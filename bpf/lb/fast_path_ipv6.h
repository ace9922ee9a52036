/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Fast path's frames in IPv6 without extension headers, otherwise as in is_fast_path_frame() (parse.h). */
#ifndef COREWARD_LB_FAST_PATH_IPV6_H
#define COREWARD_LB_FAST_PATH_IPV6_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>

#include "ipv6_header.h"
#include "parse.h"
#include "timestamp.h"

#define FAST_PATH_IPV6_OPTIONS_OFFSET (IPV6_TRANSPORT_OFFSET + sizeof(struct tcphdr))
#define FAST_PATH_IPV6_LENGTH (FAST_PATH_IPV6_OPTIONS_OFFSET + OPTIONS_ALIGNED_LENGTH)
#define FAST_PATH_IPV6_TSECR_OFFSET                                                                                    \
	(FAST_PATH_IPV6_OPTIONS_OFFSET + OPTIONS_ALIGNED_OFFSET + TIMESTAMP_WORDS_OFFSET +                             \
	 __builtin_offsetof(struct timestamp_words, tsecr))
/* Ethertype and version. Big-endian in the packet: 86 dd 6 (traffic class). */
#define IPV6_ETHERTYPE_VERSION_MASK 0x00f0ffffu
#define IPV6_ETHERTYPE_VERSION 0x0060dd86u

static __always_inline bool is_ipv6_frame(const void *data, const void *data_end)
{
	return data + IPV6_TRANSPORT_OFFSET <= data_end && PACKET_U16(data, ETH_HLEN - 2) == bpf_htons(ETH_P_IPV6);
}

/* Returns whether the frame, of at least FAST_PATH_IPV6_OPTIONS_OFFSET bytes, is IPv6 with a complete TCP segment. */
static __always_inline bool is_fast_path_tcp_ipv6(const void *data, const void *data_end)
{
	__u32 length, data_offset_byte;

	if ((PACKET_U32(data, ETH_HLEN - 2) & IPV6_ETHERTYPE_VERSION_MASK) != IPV6_ETHERTYPE_VERSION ||
	    PACKET_U8(data, IPV6_FIELD_OFFSET(next_header)) != IPPROTO_TCP)
		return false;
	length = bpf_ntohs(PACKET_U16(data, IPV6_FIELD_OFFSET(payload_length)));
	data_offset_byte = PACKET_U8(data, IPV6_TRANSPORT_OFFSET + TCP_FLAGS_OFFSET - 1);
	return length >= (data_offset_byte >> 4) * 4 && IPV6_TRANSPORT_OFFSET + length <= (__u64)(data_end - data);
}

static __always_inline bool is_fast_path_ipv6(const void *data, const void *data_end)
{
	if (data + FAST_PATH_IPV6_LENGTH > data_end)
		return false;
	return (PACKET_U16(data, IPV6_TRANSPORT_OFFSET + TCP_FLAGS_OFFSET - 1) & FAST_PATH_FLAGS_MASK) ==
		       FAST_PATH_FLAGS &&
	       PACKET_U32(data, FAST_PATH_IPV6_OPTIONS_OFFSET) == OPTIONS_ALIGNED_TIMESTAMP &&
	       is_fast_path_tcp_ipv6(data, data_end);
}

/* Returns the offset of TSecr in a SYN of the fast path, or 0 for any other frame. */
static __always_inline __u32 syn_tsecr_offset_ipv6(const void *data, const void *data_end)
{
	__u32 tsecr_at;

	if (data + IPV6_TRANSPORT_OFFSET + FAST_PATH_SYN_HEADER_LENGTH > data_end)
		return 0;
	tsecr_at = common_syn_tsecr_offset(data + IPV6_TRANSPORT_OFFSET);
	return tsecr_at && is_fast_path_tcp_ipv6(data, data_end) ? IPV6_TRANSPORT_OFFSET + tsecr_at : 0;
}

#endif
