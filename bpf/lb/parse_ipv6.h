/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Parsing of IPv6 frames, as parse.h does it for IPv4.
 *
 * Later steps do not read addresses, because struct packet has a word for the client (fold_client_address_ipv6()) and,
 * for packets with timestamps, the cookie. Only the Toeplitz hash of a new connection reads the client's address again.
 *
 * Extension headers (RFC 8200, Sect. 4.1) are skipped within the frame's first TRANSPORT_OFFSET_MASK bytes. Packets
 * with longer extension headers are dropped and counted, as are fragments of TCP.
 */
#ifndef COREWARD_LB_PARSE_IPV6_H
#define COREWARD_LB_PARSE_IPV6_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "fast_path_ipv6.h"
#include "ipv6_header.h"
#include "parse.h"
#include "rewrite.h"
#include "service.h"
#include "state.h"

/* Returns an address folded into one word by two rounds of multiply and shift. Two clients share it once in 2^32. */
static __always_inline __u32 fold_address_ipv6(const struct cookie_key *key, __u64 first_half, __u64 second_half)
{
	__u64 hash = (first_half ^ key->k0) * (key->k1 | 1);

	hash = (hash ^ hash >> 32 ^ second_half) * (key->k0 | 1);
	return hash >> 32;
}

/* Returns the client's word for this load balancer's hashes (connection_hash()), made with its secret key. */
static __always_inline __u32 fold_client_address_ipv6(const void *address)
{
	return fold_address_ipv6(&lb_state.connection_key, PACKET_U64(address, 0), PACKET_U64(address, 8));
}

/*
 * Skips the extension headers, and fills protocol, transport and fragment. Returns 0, or an outcome from
 * encode_parse_end(). A fragment that is the whole packet (RFC 6946) does not count as a fragment.
 */
static __always_inline int parse_extension_headers(struct xdp_md *ctx, struct packet *packet)
{
	__u32 at = IPV6_TRANSPORT_OFFSET, next = packet->protocol;

	for (int i = 0; i < MAX_EXTENSION_HEADERS; i++) {
		struct extension_header header;

		if (!is_extension_header(next))
			break;
		if (at + sizeof(header) > packet->end_offset || bpf_xdp_load_bytes(ctx, at, &header, sizeof(header)))
			return encode_parse_end(LB_COUNTER_DROP_MALFORMED_IPV6);
		if (next == NEXT_FRAGMENT)
			packet->fragment = fragment_field(&header);
		at += extension_header_length(next, &header);
		next = header.next;
		if (at > TRANSPORT_OFFSET_MASK - TCP_CHECKSUM_OFFSET)
			return encode_parse_end(LB_COUNTER_DROP_EXTENSION_HEADERS);
		if (packet->fragment && at > packet->end_offset)
			return encode_parse_end(LB_COUNTER_DROP_MALFORMED_IPV6);
		if (packet->fragment)
			break;
	}
	packet->protocol = next;
	packet->transport_offset = at;
	return 0;
}

/* Reads the IPv6 header of a frame that is_ipv6_frame() accepted. Returns 0, or encode_parse_end() of an outcome. */
static __always_inline int parse_ipv6(struct xdp_md *ctx, const void *data, const void *data_end, struct packet *packet)
{
	__u32 length;

	if (data + IPV6_TRANSPORT_OFFSET > data_end)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	length = bpf_ntohs(PACKET_U16(data, IPV6_FIELD_OFFSET(payload_length)));
	if (PACKET_U8(data, ETH_HLEN) >> 4 != 6 || IPV6_TRANSPORT_OFFSET + length > (__u64)(data_end - data))
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_IPV6);
	packet->family = ADDRESS_FAMILY_IPV6;
	packet->client_address = fold_client_address_ipv6(data + IPV6_FIELD_OFFSET(source));
	packet->protocol = PACKET_U8(data, IPV6_FIELD_OFFSET(next_header));
	packet->fragment = 0;
	packet->client_offset = IPV6_FIELD_OFFSET(source);
	packet->end_offset = IPV6_TRANSPORT_OFFSET + length;
	return parse_extension_headers(ctx, packet);
}

/* Returns the number of a service, or that of its VIP if port and protocol are 0. */
static __always_inline __u32 find_service_at_vip_ipv6(const void *vip, __u16 port, __u8 protocol)
{
	struct service_key_ipv6 key = make_service_key_ipv6(vip, port, protocol);

	return find_lb_service_ipv6(&lb_state.directories, &key);
}

static __always_inline __u32 decode_cookie_ipv6(__u32 tsecr, const void *client, const void *vip, __u32 ports)
{
	const struct cookie_key *key = &lb_state.keys.key[cookie_key_index(tsecr)];
	__u64 hash = cookie_hash_ipv6(key, client, vip, ports);

	return reveal(hash, tsecr & COOKIE_HIDDEN_MASK, COOKIE_HIDDEN_BITS);
}

#endif
