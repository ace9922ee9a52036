/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Stamping of servers' replies by the load balancer (lb_cookie.h). The kernel routes the replies to the client. */
#ifndef COREWARD_LB_REPLY_H
#define COREWARD_LB_REPLY_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "lb_cookie.h"
#include "decide.h"
#include "flow_table.h"
#include "parse.h"
#include "parse_ipv6.h"
#include "rewrite.h"
#include "service_mode.h"
#include "stats.h"

typedef __u64 __attribute__((may_alias)) switch_word;

_Static_assert(__builtin_offsetof(struct lb_state, keys.current) % 8 == 0, "current and switch_ms are one word");

/*
 * Returns the index of the key that stamps a packet of this time (ms), as on servers. `current` and `switch_ms` are one
 * word, because they change together.
 */
static __always_inline __u32 stamping_key_index(__u32 milliseconds)
{
	__u64 both = *(const volatile switch_word *)&lb_state.keys.current;
	__u32 current = both, switch_ms = both >> 32;

	if ((__s32)(milliseconds - switch_ms) < 0)
		current = ~current;
	return current & 1;
}

/* Returns TSval with the cookie. It is never 0, which would mean "no TSecr" (RFC 7323, Sect. 3.2). */
static __always_inline __u32 stamp_reply_tsval(struct xdp_md *ctx, __u32 service, const struct packet *packet,
					       struct lb_stamped_server *server, struct reply_time answer)
{
	__u32 index = stamping_key_index(answer.tsval_ms - record_stamped_reply(server, service, packet, answer));
	__u32 time = (answer.tsval_ms + lb_stamping_time_addend(ctx, service, packet)) & LB_STAMPING_TIME_MASK;
	__u32 id = hide(lb_stamping_hash(ctx, index, packet), server->server_id & LB_STAMPING_ID_MASK,
			LB_STAMPING_ID_BITS);
	__u32 value = time << LB_STAMPING_TIME_SHIFT | index * LB_STAMPING_KEY_BIT | id;

	return value ? value : 1u << LB_STAMPING_TIME_SHIFT;
}

/*
 * Returns whether the connection has had a SYN-ACK of another server that takes new connections. Since SYNs go to that
 * server, this SYN-ACK is late, which means that it answers a SYN from before the load balancer's restart.
 */
static __always_inline bool is_syn_ack_of_second_server(__u32 service, const struct packet *packet, __u32 server_id)
{
	struct flow_table_entry entry = {};

	return packet->flags & TCP_SYN && find_unstamped_flow(service, packet, &entry) &&
	       entry.server_id != server_id && takes_new_connections(load_server_entry(service, entry.server_id));
}

/* Returns whether this SYN-ACK's connection will be stamped. This never changes later (lb_cookie.h, section 2). */
static __always_inline bool is_stamped_from_syn_ack(struct xdp_md *ctx, __u32 service, const struct packet *packet,
						    struct lb_stamped_server *server, struct reply_time answer)
{
	struct flow_table_entry entry = {}, half_open = {.server_id = server->server_id};
	bool plain = find_unstamped_flow(service, packet, &entry);

	server->syn_acks++;
	if (packet->has_timestamp) {
		server->with_timestamps++;
		learn_clock(server, packet, answer);
		if (can_stamp_connections(server) && !plain)
			return true;
	}
	/* A SYN-ACK without timestamps is stored, too. Its SYN may have gone to another server than the bucket's. */
	half_open.previous_server = HALF_OPEN_FLOW | answer.tsval_ms >> HALF_OPEN_TIME_SHIFT;
	if (!plain || entry.server_id != half_open.server_id || entry.previous_server != half_open.previous_server)
		insert_flow(ctx, service, packet, half_open, 0);
	return false;
}

static __always_inline bool is_reply_stamped(struct xdp_md *ctx, __u32 service, const struct packet *packet,
					     struct lb_stamped_server *server, struct reply_time answer)
{
	struct flow_table_entry entry = {};

	if (packet->flags & TCP_SYN)
		return is_stamped_from_syn_ack(ctx, service, packet, server, answer);
	/* A server with an unstamped SYN-ACK sends data once the client has answered it, or by TCP Fast Open. */
	if (find_unstamped_flow(service, packet, &entry) &&
	    (!is_half_open(entry) || entry.server_id == server->server_id))
		return false;
	if (!packet->has_timestamp) {
		/* The flow table lost the connection, and the reply proves that it exists. A reset proves nothing. */
		entry = (struct flow_table_entry){.server_id = server->server_id, .previous_server = NO_SERVER};
		if (!(packet->flags & TCP_RST))
			insert_flow(ctx, service, packet, entry, 0);
		return false;
	}
	return true;
}

/* Stamps a reply if its connection is stamped. `packet` has addresses and ports as in the client's packets. */
static __always_inline enum lb_counter stamp_reply(struct xdp_md *ctx, __u32 service, const struct packet *packet,
						   __u64 source_mac)
{
	__u32 offset = packet->tsecr_offset - sizeof(__u32), stamped;
	struct lb_stamped_server *server = find_lb_stamped_server(service, source_mac);
	struct reply_time answer;
	__be32 value = 0;

	if (!server || (packet->has_timestamp && bpf_xdp_load_bytes(ctx, offset, &value, sizeof(value))))
		return LB_COUNTER_REPLY_UNCHANGED;
	/* The client could accept either SYN-ACK, but the flow table holds only one server per connection. */
	if (is_syn_ack_of_second_server(service, packet, server->server_id))
		return LB_COUNTER_DROP_LATE_SYN_ACK;
	answer = (struct reply_time){.tsval_ms = bpf_ntohl(value), .now_ms = monotonic_ms()};
	if (packet->has_timestamp && !(packet->flags & TCP_RST))
		sample_clock(server, packet, answer);
	if (!is_reply_stamped(ctx, service, packet, server, answer))
		return LB_COUNTER_REPLY_UNCHANGED;
	stamped = stamp_reply_tsval(ctx, service, packet, server, answer);
	rewrite_timestamp((void *)(long)ctx->data, (void *)(long)ctx->data_end, packet, offset, stamped);
	return LB_COUNTER_REPLY_STAMPED;
}

/*
 * Fills `packet` from an IPv4 TCP packet of a server, with addresses and ports as in the client's packets. Returns the
 * number of the service that sent the packet, or NO_SERVICE.
 */
static __always_inline __u32 parse_reply_ipv4(const void *data, const void *data_end, struct packet *packet)
{
	__u32 vip;

	if (parse_ethernet(data, data_end) || parse_ipv4(data, data_end, packet) || packet->fragment ||
	    packet->protocol != IPPROTO_TCP || parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_TCP, packet))
		return NO_SERVICE;
	vip = packet->client_address;
	packet->client_address = packet->vip_address;
	packet->vip_address = vip;
	packet->ports = packet->ports << 16 | packet->ports >> 16;
	return find_packet_service(packet);
}

/* parse_reply_ipv4() for IPv6. `data` has IPV6_TRANSPORT_OFFSET bytes. */
static __always_inline __u32 parse_reply_ipv6(struct xdp_md *ctx, const void *data, const void *data_end,
					      struct packet *packet)
{
	if (data + IPV6_TRANSPORT_OFFSET > data_end || parse_ipv6(ctx, data, data_end, packet) || packet->fragment ||
	    packet->protocol != IPPROTO_TCP || parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_TCP, packet))
		return NO_SERVICE;
	packet->client_address = fold_client_address_ipv6(data + IPV6_FIELD_OFFSET(destination));
	packet->client_offset = IPV6_FIELD_OFFSET(destination);
	packet->ports = packet->ports << 16 | packet->ports >> 16;
	return find_service_at_vip_ipv6(data + IPV6_FIELD_OFFSET(source), packet->ports >> 16, IPPROTO_TCP);
}

/* Processes a frame that may be a service's reply. Returns an XDP action, or -1 if not. Global, as decide() is. */
__noinline int forward_reply(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct packet packet = {};
	struct service service;
	enum lb_counter outcome;
	__u64 source_mac;
	__u32 number;

	if (data + ETH_HLEN > data_end || !is_for_own_mac(data))
		return -1;
	if (ipv6_in_use && is_ipv6_frame(data, data_end))
		number = parse_reply_ipv6(ctx, data, data_end, &packet);
	else
		number = parse_reply_ipv4(data, data_end, &packet);
	if (!is_service(number))
		return -1;
	service = decode_service(number);
	if (!is_lb_stamped(&service))
		return -1;
	source_mac = PACKET_U32(data, ETH_ALEN) | (__u64)PACKET_U16(data, ETH_ALEN + 4) << 32;
	/* The kernel handles contradictory headers. */
	if (parse_tcp_header(ctx, data, data_end, &packet))
		outcome = LB_COUNTER_REPLY_UNCHANGED;
	else
		outcome = stamp_reply(ctx, service.index, &packet, source_mac);
	count_packet(ctx, service.index, outcome, 0);
	return outcome == LB_COUNTER_DROP_LATE_SYN_ACK ? XDP_DROP : XDP_PASS;
}

#endif
