/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * ICMP errors to a VIP about a packet from a server to a client, such as "fragmentation needed" (RFC 1191), "port
 * unreachable" and "time exceeded". Without these errors every connection stalls on a path whose MTU is smaller than
 * client and server assume.
 *
 * The error quotes the packet's IP header and at least 8 bytes after it (RFC 792), and most routers quote more (RFC
 * 1812, Sect. 4.3.2.3). So it has VIP, client and both ports. If the quote has the TCP timestamp, the cookie in TSval
 * names the server or an entry of a connection table. Otherwise the flow table decides, or the error is broadcast, and
 * the server with the quoted connection accepts it (server.bpf.c). A quote may be forged, but the server's kernel
 * checks it against its sockets.
 *
 * Errors that quote no service pass to the kernel, as does all other ICMP.
 */
#ifndef COREWARD_LB_ICMP_H
#define COREWARD_LB_ICMP_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "decide.h"
#include "parse.h"
#include "service.h"
#include "service_mode.h"

/* Types that quote a packet (RFC 792). <linux/icmp.h> includes libc's headers, which this target lacks. */
#define ICMP_DESTINATION_UNREACHABLE 3
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER_PROBLEM 12

struct icmp_header {
	__u8 type;
	__u8 code;
	__be16 checksum;
	/* Content that depends on the type: the next hop's MTU, the position of a fault, the identifier of an echo. */
	__be32 rest_of_header;
};

/* First bytes of every ICMP error. */
struct icmp_error {
	struct icmp_header icmp;
	struct iphdr quoted;
};

/* Minimum length of the quoted payload, which includes the ports. */
#define MIN_QUOTED_PAYLOAD_BYTES 8

static __always_inline bool has_quoted_packet(__u8 type)
{
	return type == ICMP_DESTINATION_UNREACHABLE || type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETER_PROBLEM;
}

/*
 * Fills `quoted` with the quoted packet, from VIP to client, as if it were the client's, with TSval in place of TSecr.
 * Returns 0, or an outcome from encode_parse_end().
 */
static __always_inline int parse_quoted_packet(struct xdp_md *ctx, const struct packet *packet, struct packet *quoted)
{
	struct icmp_error error;
	__u32 header_length, ports;

	if (packet->transport_offset + sizeof(error.icmp) > packet->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	if (bpf_xdp_load_bytes(ctx, packet->transport_offset, &error.icmp, sizeof(error.icmp)))
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	if (!has_quoted_packet(error.icmp.type))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (packet->transport_offset + sizeof(error) > packet->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	if (bpf_xdp_load_bytes(ctx, packet->transport_offset, &error, sizeof(error)))
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	header_length = error.quoted.ihl * 4;
	quoted->transport_offset = packet->transport_offset + sizeof(error.icmp) + header_length;
	quoted->end_offset = packet->end_offset;
	if (error.quoted.version != 4 || header_length < sizeof(struct iphdr) ||
	    quoted->transport_offset + MIN_QUOTED_PAYLOAD_BYTES > quoted->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_ICMP);
	/* The quoted packet is another VIP's, or a later fragment, which has no ports. */
	if (error.quoted.saddr != packet->vip_address || error.quoted.frag_off & bpf_htons(IP_FRAGMENT_OFFSET))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (bpf_xdp_load_bytes(ctx, quoted->transport_offset, &ports, sizeof(ports)))
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	quoted->client_address = error.quoted.daddr;
	quoted->vip_address = error.quoted.saddr;
	quoted->ports = ports >> 16 | ports << 16;
	quoted->protocol = error.quoted.protocol;
	return 0;
}

/* Reads TSval of a quoted TCP packet, if the quote is long enough. Returns 0, or an outcome from encode_parse_end(). */
static __always_inline int parse_quoted_timestamp(struct xdp_md *ctx, struct packet *quoted)
{
	struct timestamp_words words = {};
	__u32 header_end;
	__u8 data_offset;
	int found;

	if (quoted->transport_offset + sizeof(struct tcphdr) >= quoted->end_offset)
		return 0;
	if (bpf_xdp_load_bytes(ctx, quoted->transport_offset + TCP_FLAGS_OFFSET - 1, &data_offset, sizeof(data_offset)))
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	header_end = quoted->transport_offset + (data_offset >> 4) * 4;
	if (header_end > quoted->end_offset)
		header_end = quoted->end_offset;
	if (header_end <= quoted->transport_offset + sizeof(struct tcphdr))
		return 0;
	/* Truncated options look malformed, and count as options without a timestamp. */
	found = load_timestamp(ctx, quoted->transport_offset + sizeof(struct tcphdr),
			       header_end - quoted->transport_offset - sizeof(struct tcphdr), &words);
	if (found < 0)
		return found == TIMESTAMP_UNREADABLE ? encode_parse_end(LB_COUNTER_DROP_INTERNAL) : 0;
	quoted->has_timestamp = 1;
	quoted->tsecr = bpf_ntohl(words.tsval);
	return 0;
}

/* Decides by the cookie in the quoted timestamp, by the flow table, or broadcasts. `source` is the error's sender. */
static __always_inline void decide_icmp_error(struct xdp_md *ctx, const struct service *service, __u32 source,
					      const struct packet *quoted, struct decision *decision)
{
	struct connection *connection;
	struct flow_table_entry entry = {};

	/* An unstamped connection's timestamp may look like any cookie, but the flow table has these connections. */
	if (quoted->has_timestamp && is_lb_stamped(service) && !find_flow(decision->service, quoted, &entry)) {
		__u32 id = lb_stamped_id(ctx, quoted);

		if (is_server_known(decision->service, id)) {
			decide_server(id, LB_COUNTER_ICMP_ERROR, decision);
			return;
		}
	}
	if (quoted->has_timestamp && has_cookies(service)) {
		__u32 cookie = packet_cookie(quoted);

		if (has_table_index(service, cookie)) {
			if (decide_by_cookie_index(ctx, service, cookie, quoted, LB_COUNTER_ICMP_ERROR, decision,
						   &connection))
				return;
		} else if (!(cookie & COOKIE_KIND_BIT) && is_server_known(decision->service, cookie)) {
			decide_server(cookie, LB_COUNTER_ICMP_ERROR, decision);
			return;
		}
	}
	if (find_flow(decision->service, quoted, &entry) && is_server_known(decision->service, entry.server_id))
		decide_server(entry.server_id, LB_COUNTER_ICMP_ERROR, decision);
	else if (has_other_balancer(service))
		decide_other_balancer(service, decision);
	else
		decide_broadcast(LIMITED_ICMP_ERROR, source, LB_COUNTER_DROP_BROADCAST_RATE_LIMITED, decision);
}

static __always_inline int parse_and_decide_icmp(struct xdp_md *ctx, const struct packet *packet,
						 struct decision *decision)
{
	struct packet quoted = {};
	struct service service;
	__u32 number;
	int ended;

	/* Errors are too short for fragments. */
	if (packet->fragment)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	ended = parse_quoted_packet(ctx, packet, &quoted);
	if (ended)
		return ended;
	number = find_packet_service(&quoted);
	if (!is_service(number))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	if (quoted.protocol == IPPROTO_TCP) {
		ended = parse_quoted_timestamp(ctx, &quoted);
		if (ended)
			return ended;
	}
	service = decode_service(number);
	decide_icmp_error(ctx, &service, packet->client_address, &quoted, decision);
	return 0;
}

#endif
