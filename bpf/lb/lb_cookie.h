/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Cookies of `timestamps = "lb"`, for servers without an agent. The load balancer stamps the servers' replies, which
 * must pass it, and restores TSecr of clients' packets. Its kernel routes the replies to the clients.
 *
 * 1. The clock. TSecr must be the TSval that the server sent, because otherwise Linux rejects the third packet of a
 *    handshake. The cookie leaves 20 bits of TSval, and the load balancer adds the other bits by the connection's
 *    clock. With net.ipv4.tcp_timestamps=2 all connections of a server show one clock (struct lb_stamped_server). New
 *    connections are stamped once SYN-ACKs of LB_STAMPING_AGREEING connections in a row agree, until one does not.
 *
 *    With 1, Linux' default, each connection has a random offset, which every reply shows. New connections are stamped
 *    once LB_STAMPING_AGREEING samples of connections have shown that TSval grows by 1 per ms. `lb_stamped_offsets`
 *    caches the offsets. Connections overwrite entries of others, and the next reply restores an entry. Without an
 *    entry the load balancer sends TSecr 0, which Linux ignores (RFC 7323, Sect. 3.2), so that the server measures no
 *    round trip by that packet.
 *
 * 2. Plain connections. A connection is stamped from its SYN-ACK on or not at all ("plain"), because TSval must not
 *    jump. The flow table has the plain connections, from the SYN-ACK or a later reply without timestamps on (a
 *    client's packet may be forged). All others are stamped. So doubts about the clock affect no open connection, and a
 *    restarted load balancer learns clocks from any reply. A later connection of the same ports stays plain while the
 *    entry exists. A SYN goes to the entry's server while that server takes new connections, and a SYN-ACK of another
 *    server is dropped then. A connection whose entry is evicted breaks, so the table should hold all connections of
 *    servers whose clocks are unknown.
 *
 *    A retransmitted SYN may reach another server than the first SYN, whose SYN-ACK was stamped and so has no entry. If
 *    the second server's clock is unknown, its SYN-ACK enters the flow table, although the client may answer the first
 *    one. The TSecr of the client's packet shows which, because an entry has bits of TSval until the client answers
 *    (HALF_OPEN_FLOW). A packet with other bits and the cookie of a known server makes the connection a stamped one
 *    (STAMPED_FLOW). A stamped connection is taken for a plain one with probability 129/16,384.
 *
 * 3. Packets to the server. The cookie holds the server's id. Packets with neither entry nor known cookie are dropped,
 *    because these servers reject broadcasts.
 *
 * 4. Limits. Clients may drop connections idle for more than 524 s (half of 2^20 ms). There are at most 2,048 server
 *    ids. Bare resets of stamped connections reach no server. A connection's replies must pass the load balancer that
 *    gets its client's packets, which learns the clock from the replies.
 *
 * 5. The source MAC address of a reply identifies the server. Its entry in `lb_stamped_servers`, which user space
 *    makes, has the clock (clocks.h). reply.h handles replies, and lb_stamping.h packets of clients.
 */
#ifndef COREWARD_LB_LB_COOKIE_H
#define COREWARD_LB_LB_COOKIE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "clocks.h"
#include "cookie.h"
#include "ipv6_header.h"
#include "parse.h"
#include "state.h"

/* Reads the addresses from the frame. Not inlined, because its stack would count in every call of decide(). */
static __noinline __u64 tuple_hash_ipv6(struct xdp_md *ctx, const struct cookie_key *key, const struct packet *packet)
{
	__u32 client_at = packet->client_offset, vip_at = client_at;
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	vip_at += client_at == IPV6_FIELD_OFFSET(source) ? IPV6_ADDRESS_BYTES : -IPV6_ADDRESS_BYTES;
	/* Clang cannot remove these masks, which bound the offsets for the verifier. */
	barrier_var(client_at);
	barrier_var(vip_at);
	client_at &= TRANSPORT_OFFSET_MASK;
	vip_at &= TRANSPORT_OFFSET_MASK;
	if (data + client_at + IPV6_ADDRESS_BYTES > data_end || data + vip_at + IPV6_ADDRESS_BYTES > data_end)
		return 0;
	return cookie_hash_ipv6(key, data + client_at, data + vip_at, packet->ports);
}

static __always_inline __u64 tuple_hash(struct xdp_md *ctx, const struct cookie_key *key, const struct packet *packet)
{
	if (is_ipv6(packet))
		return tuple_hash_ipv6(ctx, key, packet);
	return cookie_hash(key, packet->client_address, packet->vip_address, packet->ports);
}

static __always_inline __u32 lb_stamping_time_addend(struct xdp_md *ctx, __u32 service, const struct packet *packet)
{
	const struct cookie_key *key = &lb_state.services[service & (MAX_SERVICES - 1)].time_key;

	return tuple_hash(ctx, key, packet) & LB_STAMPING_TIME_MASK;
}

static __always_inline __u64 lb_stamping_hash(struct xdp_md *ctx, __u32 key_index, const struct packet *packet)
{
	/* Kernel 6.1's verifier must see the mask on the register that becomes an index. */
	barrier_var(key_index);
	return tuple_hash(ctx, &lb_state.keys.key[key_index & 1], packet);
}

/* Returns the server's id in the cookie of `packet->tsecr`. */
static __always_inline __u32 lb_stamped_id(struct xdp_md *ctx, const struct packet *packet)
{
	__u32 index = (packet->tsecr & LB_STAMPING_KEY_BIT) / LB_STAMPING_KEY_BIT;

	return reveal(lb_stamping_hash(ctx, index, packet), packet->tsecr & LB_STAMPING_ID_MASK, LB_STAMPING_ID_BITS);
}

/*
 * Returns the TSval that the server at `mac` sent. It is the latest time of the connection's clock with the cookie's 20
 * bits, or 0 ("no TSecr") if the clock is not known.
 */
static __always_inline __u32 restore_lb_stamped_tsecr(struct xdp_md *ctx, __u32 service, __u64 mac,
						      const struct packet *packet)
{
	const struct lb_stamped_server *server = find_lb_stamped_server(service, mac);
	__u32 time, latest, offset_ms;

	if (!server)
		return packet->tsecr;
	if (!find_offset(server, service, packet, &offset_ms))
		return 0;
	time = (packet->tsecr >> LB_STAMPING_TIME_SHIFT) - lb_stamping_time_addend(ctx, service, packet);
	latest = monotonic_ms() + offset_ms + LB_STAMPING_SLACK_MS;
	return latest - ((latest - time) & LB_STAMPING_TIME_MASK);
}

#endif
