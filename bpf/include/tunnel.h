/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Lengths of the outer headers of FORWARDING_IPIP and FORWARDING_GUE. */
#ifndef COREWARD_INCLUDE_TUNNEL_H
#define COREWARD_INCLUDE_TUNNEL_H

#include <stdbool.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv6_header.h"

static __always_inline __u32 ip_header_length(bool ipv6)
{
	return ipv6 ? sizeof(struct ipv6_header) : sizeof(struct iphdr);
}

static __always_inline __u32 outer_header_length(enum forwarding forwarding, bool has_ipv6_outer_header)
{
	return ip_header_length(has_ipv6_outer_header) + (forwarding == FORWARDING_GUE ? sizeof(struct udphdr) : 0);
}

#endif
