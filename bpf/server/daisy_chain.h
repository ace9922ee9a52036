/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Daisy chaining, which forwards packets of unknown connections to the server that may have the connection
 * (server.bpf.c, "Daisy chaining").
 */
#ifndef COREWARD_SERVER_DAISY_CHAIN_H
#define COREWARD_SERVER_DAISY_CHAIN_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "segment.h"
#include "socket.h"
#include "state.h"

/* Returns whether the load balancer has written a previous server into the packet of the service `number`. */
static __always_inline bool has_previous_server(__u32 number, const struct segment *segment)
{
	return number & SERVER_NUMBER_CHAINED ||
	       (!(number & SERVER_NUMBER_TIMESTAMPS_OFF) && segment->timestamp_offset == NO_TIMESTAMP);
}

/* Replaces the previous server in the packet by NO_SERVER. Returns 0 or an error. */
static __always_inline long remove_previous_server(struct __sk_buff *skb, const struct segment *segment)
{
	__be16 before = bpf_htons(segment->previous_server), none = bpf_htons(NO_SERVER);
	long error;

	/* In IPv6 it is in the last two bytes of the flow label, which no checksum covers. */
	if (segment->family == ADDRESS_FAMILY_IPV6)
		return bpf_skb_store_bytes(skb, IPV6_FIELD_OFFSET(version_class_label) + 2, &none, sizeof(none), 0);
	error = bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, check), before, none,
				    sizeof(none));
	return error
		       ?: bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, id), &none, sizeof(none),
					      0);
}

/* Forwards a packet to its previous server, or drops it. Returns TC_ACT_UNSPEC if the packet is for this host. */
static __noinline int forward_to_previous(struct __sk_buff *skb, const struct segment *segment, __u32 own_id)
{
	__u32 before = segment->previous_server;
	__u8 addresses[2 * ETH_ALEN];
	struct server_entry *server;

	if (before >= SERVER_ID_COUNT || before == own_id || has_connection(skb, segment))
		return TC_ACT_UNSPEC;
	server = &chained_servers[before & (SERVER_ID_COUNT - 1)];
	/*
	 * The load balancer may use the bucket's new server before it knows the old server's MAC address.
	 * If the packet passed, an RST would end the connection. A dropped packet is retransmitted, and the address is
	 * known by then.
	 */
	if (!(server->flags & SERVER_RESOLVED)) {
		count(SERVER_COUNTER_DROP_CHAIN_UNRESOLVED);
		return TC_ACT_SHOT;
	}
	/* The frame's destination, this host, becomes its source. */
	if (bpf_skb_load_bytes(skb, 0, &addresses[ETH_ALEN], ETH_ALEN))
		return TC_ACT_UNSPEC;
	__builtin_memcpy(addresses, server->mac_address, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, addresses, sizeof(addresses), 0) || remove_previous_server(skb, segment)) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	count(SERVER_COUNTER_CHAINED);
	return bpf_redirect(skb->ifindex, 0);
}

#endif
