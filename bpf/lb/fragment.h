/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Fragments of UDP datagrams. The first fragment has the ports and is forwarded like a whole datagram, and later
 * fragments follow it. (TCP avoids fragments, and later fragments of ICMP have no receiver.)
 *
 * A later fragment that overtakes the first is dropped and counted. User space enlarges the table by the entries that
 * CPUs reserve (crates/dataplane/src/lru_map_sizes.rs). The table is small, because an entry is needed for some ms
 * only, and a flood of first fragments affects only other fragmented datagrams.
 */
#ifndef COREWARD_LB_FRAGMENT_H
#define COREWARD_LB_FRAGMENT_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decide.h"
#include "parse.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FRAGMENTED_DATAGRAMS);
	__type(key, struct fragment_key);
	__type(value, struct fragment_entry);
} fragments SEC(".maps");

_Static_assert(sizeof(struct fragment_entry) == sizeof(__u32), "an entry is read as one word (flow_table.h)");
typedef __u32 __attribute__((may_alias)) fragment_word;

static __always_inline bool is_later_fragment(const struct packet *packet)
{
	return packet->fragment & (is_ipv6(packet) ? IPV6_FRAGMENT_OFFSET : IP_FRAGMENT_OFFSET);
}

_Static_assert(__builtin_offsetof(struct fragment_key, vip_address) == IPV6_ADDRESS_BYTES, "as in an IPv6 header");

static __always_inline struct fragment_key make_fragment_key(struct xdp_md *ctx, const struct packet *packet)
{
	struct fragment_key key = {
		.client_address = {0, 0, bpf_htonl(0xffff), packet->client_address},
		.vip_address = {0, 0, bpf_htonl(0xffff), packet->vip_address},
		.identification = packet->identification,
		.protocol = packet->protocol,
	};

	/* The fragment header, whose last word is the identification, is in front of the transport header. */
	if (is_ipv6(packet)) {
		bpf_xdp_load_bytes(ctx, IPV6_FIELD_OFFSET(source), &key, 2 * IPV6_ADDRESS_BYTES);
		bpf_xdp_load_bytes(ctx, packet->transport_offset - sizeof(key.identification), &key.identification,
				   sizeof(key.identification));
	}
	return key;
}

static __always_inline void store_server_of_first_fragment(struct xdp_md *ctx, const struct packet *packet,
							   const struct decision *decision)
{
	struct fragment_key key = make_fragment_key(ctx, packet);
	struct fragment_entry entry = {.service = decision->service, .server_id = decision->server_id};

	bpf_map_update_elem(&fragments, &key, &entry, BPF_ANY);
}

/* Decides about a later fragment. Returns 0, or an outcome from encode_parse_end(). */
static __always_inline int decide_later_fragment(struct xdp_md *ctx, const struct packet *packet,
						 struct decision *decision)
{
	struct fragment_key key = make_fragment_key(ctx, packet);
	const volatile fragment_word *found = bpf_map_lookup_elem(&fragments, &key);
	__u32 word, service, server_id;

	if (!found)
		return encode_parse_end(LB_COUNTER_DROP_FRAGMENT);
	word = *found;
	service = word & 0xffff & (MAX_SERVICES - 1);
	server_id = word >> 16;
	if (!is_server_known(service, server_id))
		return encode_parse_end(LB_COUNTER_DROP_FRAGMENT);
	decision->service = service;
	decide_server(server_id, LB_COUNTER_FRAGMENT, decision);
	return 0;
}

#endif
