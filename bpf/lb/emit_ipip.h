/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * FORWARDING_IPIP: the packet in another IPv4 packet (RFC 2003). NICs choose the receive queue by the outer addresses
 * alone, which are the same for all packets from here to one server.
 */
#ifndef COREWARD_LB_EMIT_IPIP_H
#define COREWARD_LB_EMIT_IPIP_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>

#include "outer_header.h"
#include "tunnel.h"

/* `data`: where the new frame begins; the inner IPv4 header is there, too. */
static __always_inline void write_ipip(void *data, server_entry_t next_hop, __u32 destination)
{
	struct outer outer = outer_header(data, IPIP_OVERHEAD, IPPROTO_IPIP, destination);

	write_outer_header(data, next_hop, &outer);
}

#endif
