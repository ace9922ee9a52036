/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Baseline for all measured programs, which does the work of any forwarder but makes no decision. */
#ifndef COREWARD_BENCH_FLOOR_H
#define COREWARD_BENCH_FLOOR_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "lb/fast_path_ipv6.h"
#include "lb/parse.h"

static __always_inline bool is_tcp_ipv4(const void *data, const void *data_end)
{
	const struct ethhdr *ethernet = data;
	const struct iphdr *ip = data + sizeof(*ethernet);

	return data + FAST_PATH_OPTIONS_OFFSET <= data_end && ethernet->h_proto == bpf_htons(ETH_P_IP) &&
	       ip->ihl == 5 && ip->protocol == IPPROTO_TCP;
}

static __always_inline bool is_tcp_ipv6(const void *data, const void *data_end)
{
	return data + FAST_PATH_IPV6_OPTIONS_OFFSET <= data_end && is_ipv6_frame(data, data_end) &&
	       PACKET_U8(data, IPV6_FIELD_OFFSET(next_header)) == IPPROTO_TCP;
}

/* Swaps the MAC addresses of a frame with a TCP segment. Returns false if the frame has no TCP segment. */
static __always_inline bool swap_macs_of_tcp(void *data, void *data_end)
{
	struct ethhdr *ethernet = data;
	__u8 mac[ETH_ALEN];

	if (!is_tcp_ipv4(data, data_end) && !is_tcp_ipv6(data, data_end))
		return false;
	__builtin_memcpy(mac, ethernet->h_dest, ETH_ALEN);
	__builtin_memcpy(ethernet->h_dest, ethernet->h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, mac, ETH_ALEN);
	return true;
}

#endif
