/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The load balancer: XDP on the device that clients' packets arrive on.
 *
 * 1. What passes here. Every frame that the device receives. Those that are sent to the device's own MAC address and
 *    hold IPv4 TCP or UDP for a service (VIP, port and protocol) are ours, and so are ICMP errors about what a service
 *    sent. All others go on to the kernel untouched (XDP_PASS): other protocols, all UDP if no service is of UDP, other
 *    ICMP to a VIP, IPv6, VLAN-tagged frames (services live on the untagged network), frames to a group address or, on
 *    a device that does not filter, to another machine. The last two matter: what section 7 sends to all must not be
 *    taken up again by a second load balancer on the same wire.
 *
 * 2. What happens to ours. The frame gets a server's MAC address as destination and our own as source, and leaves by
 *    the device it came on (XDP_TX). Nothing above Ethernet changes (sections 5 and 6 have the two exceptions): the
 *    server holds the VIP, answers the client directly, and restores what it stamped (server.bpf.c). Hence no checksum
 *    is verified here, and where one must change it is mended by the difference: a damaged packet stays damaged, reaches
 *    some server and is dropped there.
 *
 * 3. Packets of an established connection never look at a table. The client echoes in every packet what the server
 *    stamped into its TCP timestamps; with the keyed hash of the 4-tuple (cookie.h) the echo yields the server's
 *    id, and that is an index into `servers`. This is the fast path, and it is written to touch little memory whatever
 *    the number of connections: the frame; one slot of the service directory; one key; one server entry; one counter.
 *    No helper is called and no map looked up: all of it stands in global variables. (FIN and RST leave this path, so
 *    that they can be counted by server; packets and bytes by server are counted in it only if a policy wants them.)
 *
 * 4. First packets (SYN) go where the service's placement table says: placement.h.
 *
 * 5. Packets without a cookie (decide.h, flow_table.h): of clients that do not do timestamps, and all of a
 *    service whose timestamps are off. The flow table knows the server; where it has no entry the bucket
 *    says (a choice that changes only with the pool), and from the first packet that is not a SYN on it is remembered, as a
 *    hint. So the table holds these connections and no others, and a flood of SYNs does not fill it. A SYN goes only to a server
 *    that takes new connections, whatever an entry or the bucket says (decide.h). What the table loses, or what
 *    another load balancer knew, goes by the bucket of today; so each of these packets carries in its IP identification
 *    the server that the bucket belonged to before, to whom a server hands what it has no socket for (NO_SERVER: there
 *    is none). The IP header's checksum is mended; an identification means nothing in a packet that is not a fragment.
 *    Other modes of consistency (enum consistency), by service: HASH_TABLE (the flow table for all: what a UDP service
 *    has, and TCP may have for comparison), NONE (each packet by the placement table), BEAMER (the bucket and the server
 *    before, unless a SYN had to leave its bucket). The constant modes_in_use says at load time which there are: what
 *    no service needs is not compiled in.
 *    Another load balancer may have some of a service's connections, while the service is adopted from it or handed over
 *    to it (SERVICE_ADOPTED, SERVICE_HANDED_OVER; docs/deployment.md): what nothing here knows goes there, and what goes to
 *    a server names it as "the server before", since an echo of a foreign connection may look like any cookie.
 *    Fragments of UDP follow the first one (fragment.h). ICMP errors go to the server whose packet they quote: by
 *    the cookie in the quoted timestamp, by the flow table, or to all (icmp.h).
 *
 * 6. Stateful services (connection_table.h). A SYN with timestamps takes an entry of the connection table, and its
 *    TSecr, always 0 on the wire, tells the server which: the TCP checksum is mended. From then on cookies hold the
 *    entry's place and our number among the load balancers with such a table (kind 1), and the entry names the server
 *    and counts. An established packet of such a connection stays on the fast path, with a second keyed hash and one
 *    cache line more than in section 3. A packet whose cookie names the table of another load balancer is passed
 *    to that one, and broadcast if that one is lost. Without a free entry, or before this load balancer has a number, a
 *    connection is treated like one of a stateless service.
 *
 * 7. To all (broadcast.h). An RST without timestamps (from a host that has no such socket) or an ICMP error that the
 *    flow table does not know, and a cookie that names no server and no connection (forged, or of a server that is gone, or its entry
 *    was freed) are sent to the broadcast MAC address, and the one server that has the socket takes it. Token buckets limit
 *    each of these reasons per source, per service and for all services; what is over a rate is dropped.
 *
 * 8. What can go wrong, and what then. One outcome per packet, counted per service (enum lb_counter):
 *    - fewer than 34 bytes, so that there is no address to tell whose it is: passed, the kernel drops it;
 *    - TCP, UDP (if a service is of UDP) or ICMP to a VIP with an IP header of bad version, bad or truncated length:
 *      drop_malformed_ipv4. Its port cannot be told, so this holds for all ports of a VIP;
 *    - a fragment of TCP to a VIP, the first included: drop_fragment, for all ports of a VIP (later fragments have no
 *      ports; TCP does path MTU discovery, so these are rare). The same for a later fragment of UDP whose first one did
 *      not go to a server, or has not come yet. Fragments of ICMP pass;
 *    - a TCP header truncated or with a bad data offset, an option of length 0, 1 or beyond the header (up to the
 *      timestamp; later ones are not looked at), flags that no connection of ours can have (SYN with ACK, FIN or RST;
 *      none of SYN, ACK, RST): drop_malformed_tcp;
 *    - a UDP header truncated, or a length in it below 8 or beyond the packet (of a first fragment only: below 8):
 *      drop_malformed_udp;
 *    - an ICMP header truncated, or an error that does not quote a whole IPv4 header and 8 bytes: drop_malformed_icmp;
 *    - the server that has the connection is known, but its MAC address is not: drop_server_unresolved;
 *    - the chosen server cannot take a first packet: 16 further members are tried, then drop_no_eligible_server;
 *    - a server taken out is unknown: its cookies go to all, its flows by the bucket or the placement table, later
 *      fragments nowhere;
 *    - over the rate of section 7: drop_unknown_cookie or drop_broadcast_rate_limited;
 *    - what cannot be: drop_internal.
 *
 * 9. Who else writes. User space (crates/dataplane/src/lb.rs) writes all state through shared memory: whole words, or
 *    what nobody reads yet followed by a switch. This program outlives it: state and link are pinned.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "capture.h"
#include "decide.h"
#include "emit.h"
#include "fragment.h"
#include "icmp.h"
#include "parse.h"
#include "placement.h"
#include "reply.h"
#include "rewrite.h"
#include "service.h"
#include "service_mode.h"
#include "stats.h"

/* Forwards the packet to the server of the decision. */
static __always_inline int forward_to_server(struct xdp_md *ctx, const struct packet *packet,
					     const struct decision *decision)
{
	if (decision->opens)
		count_opened(decision->service, decision->server_id);
	if (decision->closes)
		count_closed(decision->server_id);
	return emit(ctx, decision->destination, decision->service, decision->server_id, decision->outcome,
		    packet->client_address, packet->ports);
}

/* Applies the decision. Returns an XDP action. */
static __always_inline int apply_decision(struct xdp_md *ctx, const struct packet *packet,
					  const struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (decision->outcome == LB_COUNTER_PASSED_NOT_SERVICE) {
		count_packet(ctx, decision->service, decision->outcome, 0);
		return XDP_PASS;
	}
	if (!is_forwarded(decision->outcome)) {
		count_packet(ctx, decision->service, decision->outcome, 0);
		return XDP_DROP;
	}
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end) {
		count_packet(ctx, decision->service, LB_COUNTER_DROP_INTERNAL, 0);
		return XDP_DROP;
	}
	if (decision->before != KEEP_IDENTIFICATION)
		rewrite_identification(data, decision->before);
	if (decision->echo != KEEP_ECHO)
		rewrite_timestamp(data, data_end, packet, packet->echo_offset, decision->echo);
	if (decision->server_id != NO_SERVER)
		return forward_to_server(ctx, packet, decision);
	rewrite_mac(data, decision->destination);
	count_packet(ctx, decision->service, decision->outcome, data_end - data);
	return XDP_TX;
}

#define UNDECIDED                                                                                                      \
	((struct decision){                                                                                            \
		.outcome = LB_COUNTER_DROP_INTERNAL,                                                                   \
		.service = LB_COUNTERS_NO_SERVICE,                                                                     \
		.server_id = NO_SERVER,                                                                                \
		.before = KEEP_IDENTIFICATION,                                                                         \
		.echo = KEEP_ECHO,                                                                                     \
	})

/* ---- section 3, the fast path ---------------------------------------------------------------------------------- */

/*
 * A packet of the fast path for which a cookie does not suffice: one without a cookie, or a SYN. `echo_at`: offset of
 * TSecr. Not inlined: its stack would count in every call of lb(), and the kernel allows 512 bytes for a call chain.
 */
static __noinline int forward_fast_path_decided(struct xdp_md *ctx, __u32 number, __u32 echo_at)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct decision decision = UNDECIDED;
	struct packet packet = {
		.has_timestamp = 1,
		.protocol = IPPROTO_TCP,
		.echo_offset = echo_at,
		.transport = FAST_PATH_TCP,
	};

	if (data + FAST_PATH_LENGTH > data_end)
		return XDP_DROP;
	packet.client_address = PACKET_U32(data, IP_AT(saddr));
	packet.vip_address = PACKET_U32(data, IP_AT(daddr));
	packet.ports = PACKET_U32(data, FAST_PATH_TCP);
	packet.flags = PACKET_U8(data, FAST_PATH_TCP + TCP_FLAGS_OFFSET);
	echo_at &= OPTION_MASK;
	if (data + echo_at + sizeof(packet.echo) <= data_end)
		packet.echo = bpf_ntohl(PACKET_U32(data, echo_at));
	decide(ctx, number, &packet, &decision);
	return apply_decision(ctx, &packet, &decision);
}

/* A SYN. Returns an XDP action, or -1: not of the fast path, or not for a service. */
static __always_inline int forward_fast_path_syn(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 echo_at = fast_path_syn_echo(data, data_end), number;
	__u16 port;

	if (!echo_at || data + FAST_PATH_LENGTH > data_end || !sent_to_us(data))
		return -1;
	port = PACKET_U16(data, FAST_PATH_TCP + sizeof(port));
	number = find_lb_service(&lb_state.directories,
				 service_tail_ipv4(PACKET_U32(data, IP_AT(daddr)), port, IPPROTO_TCP));
	return is_service(number) ? forward_fast_path_decided(ctx, number, echo_at) : -1;
}

/* The established packet of a connection whose cookie, of kind 1, names an entry of our own connection table. */
static __always_inline int forward_fast_path_by_index(struct xdp_md *ctx, __u32 service, __u32 cookie, __u64 hash)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct connection *connection;
	server_entry_t server;
	__u32 id;

	if (cookie_owner(cookie) != lb_state.owner || data + FAST_PATH_LENGTH > data_end)
		return -1;
	connection = find_connection(hash, cookie, service, &id);
	if (!connection)
		return -1;
	server = server_at(service, id);
	if (!server_has(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	update_connection(connection, TCP_ACK, data_end - data);
	return emit(ctx, server, service, id, LB_COUNTER_CONNECTION_TABLE, PACKET_U32(data, IP_AT(saddr)),
		    PACKET_U32(data, FAST_PATH_TCP));
}

/* Returns an XDP action, or -1: not for the fast path. */
static __always_inline int forward_fast_path(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 client_address, vip_address, ports, number, cookie;
	struct service service;
	__u64 server;

	if (!is_fast_path_frame(data, data_end) || !sent_to_us(data))
		return -1;
	client_address = PACKET_U32(data, IP_AT(saddr));
	vip_address = PACKET_U32(data, IP_AT(daddr));
	ports = PACKET_U32(data, FAST_PATH_TCP);
	number = find_lb_service(&lb_state.directories, service_tail_ipv4(vip_address, ports >> 16, IPPROTO_TCP));
	if (!is_service(number)) {
		/* It may be a server's answer. */
		if (timestamps_lb_in_use)
			return -1;
		count_packet(ctx, LB_COUNTERS_NO_SERVICE, LB_COUNTER_PASSED_NOT_SERVICE, 0);
		return XDP_PASS;
	}
	service = decode_service(number);
	if (is_lb_stamped(&service) || has_other_balancer(&service))
		return -1;
	if (!has_cookies(&service))
		return forward_fast_path_decided(ctx, number, FAST_PATH_ECHO);
	cookie = cookie_of(bpf_ntohl(PACKET_U32(data, FAST_PATH_ECHO)), client_address, vip_address, ports);
	/* Read again: the hash takes all registers, and one that is spilled on the way costs more. */
	barrier_var(ctx);
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (is_index(&service, cookie))
		return forward_fast_path_by_index(ctx, service.index, cookie,
						  connection_hash(service.index, client_address, ports));
	server = server_at(service.index, cookie);
	if (cookie & COOKIE_KIND_BIT || !server_has(server, SERVER_KNOWN | SERVER_RESOLVED) ||
	    data + ETH_HLEN > data_end)
		return -1;
	return emit(ctx, server, service.index, cookie, LB_COUNTER_ESTABLISHED, client_address, ports);
}

/* ---- everything else ------------------------------------------------------------------------------------------- */

/* A TCP packet to a VIP. Returns 0, or how parsing ended. */
static __always_inline int parse_and_decide_tcp(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 number;
	int ended;

	if (packet->fragment)
		return parse_ended(LB_COUNTER_DROP_FRAGMENT);
	ended = parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_TCP, packet);
	if (ended)
		return ended;
	number = find_service_of(packet);
	if (!is_service(number))
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	ended = parse_tcp(ctx, data, data_end, packet);
	if (ended)
		return ended;
	decide(ctx, number, packet, decision);
	return 0;
}

/* The same for a UDP datagram. */
static __always_inline int parse_and_decide_udp(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 number;
	int ended;

	if (is_later_fragment(packet))
		return decide_later_fragment(packet, decision);
	ended = parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_UDP, packet);
	if (ended)
		return ended;
	number = find_service_of(packet);
	if (!is_service(number))
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	ended = parse_udp(data, data_end, packet);
	if (ended)
		return ended;
	decide(ctx, number, packet, decision);
	if (packet->fragment && is_forwarded(decision->outcome))
		remember_fragment(packet, decision);
	return 0;
}

static __always_inline bool is_looked_at(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_ICMP || (udp_in_use && protocol == IPPROTO_UDP);
}

/* Reads the packet and fills `decision`. Returns 0, or how parsing ended. */
static __always_inline int parse_and_decide(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 address_tail;
	int ended;

	ended = parse_ethernet(data, data_end);
	if (ended)
		return ended;
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end || !sent_to_us(data))
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	if (!is_looked_at(PACKET_U8(data, IP_AT(protocol))))
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	address_tail = service_tail_ipv4(PACKET_U32(data, IP_AT(daddr)), 0, 0);
	if (find_lb_service(&lb_state.directories, address_tail) != SERVICE_ADDRESS_ONLY)
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	ended = parse_ipv4(data, data_end, packet);
	if (ended)
		return ended;
	if (packet->protocol == IPPROTO_ICMP)
		return parse_and_decide_icmp(ctx, packet, decision);
	if (udp_in_use && packet->protocol == IPPROTO_UDP)
		return parse_and_decide_udp(ctx, packet, decision);
	return parse_and_decide_tcp(ctx, packet, decision);
}

static __noinline int forward_other(struct xdp_md *ctx)
{
	struct decision decision = UNDECIDED;
	struct packet packet = {};
	int ended = parse_and_decide(ctx, &packet, &decision);

	if (ended)
		decision.outcome = outcome_of(ended);
	return apply_decision(ctx, &packet, &decision);
}

static __always_inline int forward(struct xdp_md *ctx)
{
	int action = forward_fast_path(ctx);

	if (action < 0)
		action = forward_fast_path_syn(ctx);
	if (action < 0 && timestamps_lb_in_use)
		action = forward_reply(ctx);
	return action < 0 ? forward_other(ctx) : action;
}

/* A copy of its own, so that the other one keeps no register for what is captured. */
static __noinline int forward_captured(struct xdp_md *ctx)
{
	bool watched = capture_arrived(ctx);
	int action = forward(ctx);

	return watched ? capture_decided(ctx, action) : action;
}

SEC("xdp")
int lb(struct xdp_md *ctx)
{
	return capture_in_use ? forward_captured(ctx) : forward(ctx);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
