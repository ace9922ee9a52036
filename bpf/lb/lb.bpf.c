/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The load balancer's XDP program, on the device of clients' packets.
 *
 * 1. Packets of the load balancer are TCP and UDP to a service (VIP, port, protocol) and to the device's own MAC
 *    address. They are IPv4 and IPv6 (ipv6.h). ICMP errors about packets of a service belong to them. All others pass
 *    to the kernel unchanged (XDP_PASS). These are other protocols, UDP without a UDP service, other ICMP to a VIP, and
 *    frames of a VLAN that is not the VIPs' (vlan.h). Frames to a group address or another machine pass, too, so that
 *    no second load balancer on the wire takes the broadcasts of section 7.
 *
 * 2. Forwarding. The frame gets the MAC addresses of a server (destination) and of this device (source), and is sent by
 *    the receiving device (XDP_TX). Except for sections 5 and 6 the packet above Ethernet stays unchanged. The server
 *    holds the VIP, answers the client directly and restores stamped timestamps (server.bpf.c). No checksum is
 *    verified, and changed checksums are updated by the difference. So a damaged packet stays damaged, and its server
 *    drops it.
 *
 * 3. The fast path is for established packets. TSecr has the cookie, from which the keyed hash of the 4-tuple
 *    (cookie.h) reveals the server's id, an index into `servers`. For any number of connections this path reads the
 *    frame, one slot of the service directory, one key and one server entry, and writes one counter. These are global
 *    variables, which need no helper and no map look-up. FIN and RST leave this path, so that they are counted by
 *    server. Packets and bytes are counted by server only if a policy uses them.
 *
 * 4. New connections (SYN) follow the service's placement table (placement.h).
 *
 * 5. Packets without a cookie (decide.h, flow_table.h) are those of clients without timestamps, and of services with
 *    timestamps off. The flow table has the server. Without an entry the bucket decides, whose choice changes only with
 *    the pool. From the second packet on the flow table stores it as a hint, so a flood of SYNs does not fill the
 *    table. A SYN goes only to a server that takes new connections. Each of these packets names the bucket's previous
 *    server, or NO_SERVER, in its IP identification or IPv6 flow label. To that server a server forwards packets
 *    without a socket. The other modes (enum consistency) are HASH_TABLE (the flow table for all packets) and NONE
 *    (each packet by the placement table). BEAMER uses the bucket and its previous server, unless a SYN had to leave
 *    its bucket. The constant modes_in_use removes unused modes at load time. During a migration (SERVICE_ADOPTED,
 *    SERVICE_HANDED_OVER; docs/deployment.md) unknown packets go to the other load balancer. Packets to a server then
 *    name it as the previous server, since TSecr of a foreign connection may look like a cookie. Fragments of UDP
 *    follow the first one (fragment.h). ICMP errors go to the server whose packet they quote (icmp.h).
 *
 * 6. Stateful services (connection_table.h). A SYN with timestamps takes an entry of the connection table. Its TSecr, 0
 *    on the wire, carries the entry's index to the server. Cookies then hold the slot and the owner number (kind 1),
 *    and the entry names the server and counts packets. Established packets stay on the fast path, with a second keyed
 *    hash and one cache line more. A packet whose cookie has an index of another load balancer's table is forwarded to
 *    that load balancer, or broadcast if that one is lost. Without a free entry or an owner number a connection is
 *    treated like one of a stateless service.
 *
 * 7. Broadcast fallback (broadcast.h). Packets whose server is unknown go to the broadcast MAC address, and the server
 *    with the socket accepts them. These are bare resets and ICMP errors without a flow table entry, and cookies of no
 *    server or connection. Token buckets limit each kind per source, per service and in all.
 *
 * 8. Outcomes. Each packet has one, counted per service (enum lb_counter). A frame shorter than 34 bytes passes. A
 *    broken IP header (TCP, UDP with a UDP service, or ICMP to a VIP) gives drop_malformed_ipv4 or drop_malformed_ipv6.
 *    This covers all ports of the VIP, as the port is unknown. Too long a chain of IPv6 extension headers gives
 *    drop_extension_headers. Any fragment of TCP, and a UDP fragment before its first one, gives drop_fragment, while
 *    fragments of ICMP pass. A truncated or contradictory TCP, UDP or ICMP header gives drop_malformed_*. TCP options
 *    are read up to the timestamp. An unknown MAC address of a connection's server gives drop_server_unresolved. If a
 *    SYN's server cannot take it, 16 more members are tried before drop_no_eligible_server. Rates of section 7 give
 *    drop_unknown_cookie or drop_broadcast_rate_limited. States that cannot occur give drop_internal.
 *
 * 9. User space (crates/dataplane/src/lb.rs) writes all state through shared memory, either in whole words, or in
 *    memory that no packet reads, followed by a switch. State and link are pinned, and outlive user space.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "apply.h"
#include "capture.h"
#include "decide.h"
#include "emit.h"
#include "fragment.h"
#include "icmp.h"
#include "ipv6.h"
#include "parse.h"
#include "placement.h"
#include "reply.h"
#include "rewrite.h"
#include "service.h"
#include "service_mode.h"
#include "stats.h"
#include "vlan.h"

/* ---- section 3, the fast path ---------------------------------------------------------------------------------- */

/* Fills `packet` from a frame with TSecr at offset `tsecr_at`. Returns false if the frame is too short. */
static __always_inline bool read_fast_path(struct xdp_md *ctx, __u32 tsecr_at, struct packet *packet)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	*packet = (struct packet){
		.has_timestamp = 1,
		.protocol = IPPROTO_TCP,
		.tsecr_offset = tsecr_at,
		.transport_offset = FAST_PATH_TCP_OFFSET,
	};
	if (data + FAST_PATH_LENGTH > data_end)
		return false;
	packet->client_address = PACKET_U32(data, IP_FIELD_OFFSET(saddr));
	packet->vip_address = PACKET_U32(data, IP_FIELD_OFFSET(daddr));
	packet->ports = PACKET_U32(data, FAST_PATH_TCP_OFFSET);
	packet->flags = PACKET_U8(data, FAST_PATH_TCP_OFFSET + TCP_FLAGS_OFFSET);
	tsecr_at &= OPTION_OFFSET_MASK;
	if (data + tsecr_at + sizeof(packet->tsecr) <= data_end)
		packet->tsecr = bpf_ntohl(PACKET_U32(data, tsecr_at));
	return true;
}

/*
 * Forwards a packet of the fast path that needs decide(), which is a packet without a cookie, or a SYN. Not inlined,
 * because its stack would count in every call of lb(), and the kernel allows 512 bytes for a call chain.
 */
static __noinline int forward_fast_path_decided(struct xdp_md *ctx, __u32 number, __u32 tsecr_at)
{
	struct decision decision = UNDECIDED;
	struct packet packet;

	if (!read_fast_path(ctx, tsecr_at, &packet))
		return XDP_DROP;
	decide(ctx, number, &packet, &decision);
	return apply_decision(ctx, &packet, &decision);
}

/*
 * Forwards a SYN of a service with cookies, as forward_fast_path_decided() with all calls inlined. A return costs 7 ns
 * if returns are protected (retbleed, SRSO). A global function, as decide() is.
 */
__noinline int forward_new_connection(struct xdp_md *ctx, __u32 number, __u32 tsecr_at)
{
	struct decision decision = UNDECIDED;
	struct packet packet;

	if (!read_fast_path(ctx, tsecr_at, &packet))
		return XDP_DROP;
	decide_new_connection(ctx, number, &packet, &decision);
	return apply_decision(ctx, &packet, &decision);
}

/* Forwards a SYN. Returns an XDP action, or -1 if it is not of the fast path, or not for a service. */
static __always_inline int forward_fast_path_syn(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 tsecr_at = syn_tsecr_offset(data, data_end), number;
	struct service service;
	__u16 port;

	if (!tsecr_at || data + FAST_PATH_LENGTH > data_end || !is_for_own_mac(data))
		return -1;
	port = PACKET_U16(data, FAST_PATH_TCP_OFFSET + sizeof(port));
	number = find_lb_service(&lb_state.directories,
				 service_tail_ipv4(PACKET_U32(data, IP_FIELD_OFFSET(daddr)), port, IPPROTO_TCP));
	if (!is_service(number))
		return -1;
	service = decode_service(number);
	if (has_cookies(&service) && !is_handed_over(&service))
		return forward_new_connection(ctx, number, tsecr_at);
	return forward_fast_path_decided(ctx, number, tsecr_at);
}

/* Forwards an established packet whose cookie, of kind 1, names an entry of this load balancer's table. */
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
	server = load_server_entry(service, id);
	if (!has_server_flag(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	update_connection(connection, TCP_ACK, data_end - data);
	return emit(ctx, server, service, id, LB_COUNTER_CONNECTION_TABLE, PACKET_U32(data, FAST_PATH_TCP_OFFSET));
}

/* Forwards an established packet of a service with CONSISTENCY_HASH_TABLE, if its flow is known. */
static __always_inline int forward_fast_path_by_flow(struct xdp_md *ctx, __u32 service, __u32 client_address,
						     __u32 ports)
{
	__u64 hash = connection_hash(service, client_address, ports);
	struct flow_table_entry entry = {};
	server_entry_t server;

	prefetch_flow_use(hash);
	if (!find_flow_by_hash(hash, &entry))
		return -1;
	server = load_server_entry(service, entry.server_id);
	if (!has_server_flag(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	return emit_fast_path(ctx, server, service, entry.server_id, LB_COUNTER_FLOW_TABLE, client_address, ports);
}

/* Forwards a packet of the fast path. Returns an XDP action, or -1 if the packet needs another path. */
static __always_inline int forward_fast_path(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 client_address, vip_address, ports, number, cookie;
	struct service service;
	__u64 server;

	if (!is_fast_path_frame(data, data_end) || !is_for_own_mac(data))
		return -1;
	client_address = PACKET_U32(data, IP_FIELD_OFFSET(saddr));
	vip_address = PACKET_U32(data, IP_FIELD_OFFSET(daddr));
	ports = PACKET_U32(data, FAST_PATH_TCP_OFFSET);
	number = find_lb_service(&lb_state.directories, service_tail_ipv4(vip_address, ports >> 16, IPPROTO_TCP));
	if (!is_service(number)) {
		/* The packet may be a server's reply. */
		if (timestamps_lb_in_use)
			return -1;
		count_packet(ctx, LB_COUNTERS_NO_SERVICE, LB_COUNTER_PASSED_NOT_SERVICE, 0);
		return XDP_PASS;
	}
	service = decode_service(number);
	if (is_lb_stamped(&service) || has_other_balancer(&service))
		return -1;
	if (!has_cookies(&service)) {
		int action = has_all_flows(&service)
				     ? forward_fast_path_by_flow(ctx, service.index, client_address, ports)
				     : -1;

		return action < 0 ? forward_fast_path_decided(ctx, number, FAST_PATH_TSECR_OFFSET) : action;
	}
	cookie = decode_cookie(bpf_ntohl(PACKET_U32(data, FAST_PATH_TSECR_OFFSET)), client_address, vip_address, ports);
	/* Pointers are read again, because the hash needs all registers, and a spilled pointer costs more. */
	barrier_var(ctx);
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (has_table_index(&service, cookie))
		return forward_fast_path_by_index(ctx, service.index, cookie,
						  connection_hash(service.index, client_address, ports));
	server = load_server_entry(service.index, cookie);
	if (cookie & COOKIE_KIND_BIT || !has_server_flag(server, SERVER_KNOWN | SERVER_RESOLVED) ||
	    data + ETH_HLEN > data_end)
		return -1;
	return emit_fast_path(ctx, server, service.index, cookie, LB_COUNTER_ESTABLISHED, client_address, ports);
}

/* ---- slow path ------------------------------------------------------------------------------------------------- */

static __always_inline int parse_and_decide_tcp(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 number;
	int ended;

	if (packet->fragment)
		return encode_parse_end(LB_COUNTER_DROP_FRAGMENT);
	ended = parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_TCP, packet);
	if (ended)
		return ended;
	number = find_packet_service(packet);
	if (!is_service(number))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	ended = parse_tcp(ctx, data, data_end, packet);
	if (ended)
		return ended;
	decide(ctx, number, packet, decision);
	return 0;
}

static __always_inline int parse_and_decide_udp(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 number;
	int ended;

	if (is_later_fragment(packet))
		return decide_later_fragment(ctx, packet, decision);
	ended = parse_ports(data, data_end, LB_COUNTER_DROP_MALFORMED_UDP, packet);
	if (ended)
		return ended;
	number = find_packet_service(packet);
	if (!is_service(number))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	decision->service = decode_service(number).index;
	ended = parse_udp(data, data_end, packet);
	if (ended)
		return ended;
	decide(ctx, number, packet, decision);
	if (packet->fragment && is_forwarded(decision->outcome))
		store_server_of_first_fragment(ctx, packet, decision);
	return 0;
}

static __always_inline bool is_handled_protocol(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_ICMP || (udp_in_use && protocol == IPPROTO_UDP);
}

/* Reads the packet and fills `decision`. Returns 0, or an outcome from encode_parse_end(). */
static __always_inline int parse_and_decide(struct xdp_md *ctx, struct packet *packet, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u64 address_tail;
	int ended;

	ended = parse_ethernet(data, data_end);
	if (ended)
		return ended;
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end || !is_for_own_mac(data))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (!is_handled_protocol(PACKET_U8(data, IP_FIELD_OFFSET(protocol))))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	address_tail = service_tail_ipv4(PACKET_U32(data, IP_FIELD_OFFSET(daddr)), 0, 0);
	if (find_lb_service(&lb_state.directories, address_tail) != SERVICE_ADDRESS_ONLY)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	ended = parse_ipv4(data, data_end, packet);
	if (ended)
		return ended;
	if (packet->protocol == IPPROTO_ICMP)
		return parse_and_decide_icmp(ctx, packet, decision);
	if (udp_in_use && packet->protocol == IPPROTO_UDP)
		return parse_and_decide_udp(ctx, packet, decision);
	return parse_and_decide_tcp(ctx, packet, decision);
}

static __noinline int forward_slow_path(struct xdp_md *ctx)
{
	struct decision decision = UNDECIDED;
	struct packet packet = {};
	int ended = parse_and_decide(ctx, &packet, &decision);

	if (ended)
		decision.outcome = decode_parse_end(ended);
	return apply_decision(ctx, &packet, &decision);
}

static __always_inline int forward(struct xdp_md *ctx)
{
	int action = forward_fast_path(ctx);

	if (action < 0 && ipv6_in_use && is_ipv6_frame((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		return forward_ipv6(ctx);
	if (action < 0)
		action = forward_fast_path_syn(ctx);
	if (action < 0 && timestamps_lb_in_use)
		action = forward_reply(ctx);
	return action < 0 ? forward_slow_path(ctx) : action;
}

/* Processes a frame of a VLAN other than the VIPs', which is a server's reply or a frame for the kernel. */
static __noinline int forward_from_other_vlan(struct xdp_md *ctx)
{
	int action = timestamps_lb_in_use ? forward_reply(ctx) : -1;

	if (action >= 0)
		return action;
	count_packet(ctx, LB_COUNTERS_NO_SERVICE, LB_COUNTER_PASSED_NOT_SERVICE, 0);
	return XDP_PASS;
}

/* forward() with VLANs and capture before and after it. Inlined, because its stack would count in every call. */
static __always_inline int forward_with_vlans_and_capture(struct xdp_md *ctx)
{
	bool is_ours = !vlans_in_use || pop_and_store_vlan_tag(ctx);
	int action;

	if (capture_in_use)
		capture_arrived(ctx);
	action = is_ours ? forward(ctx) : forward_from_other_vlan(ctx);
	if (capture_in_use)
		capture_decided(ctx, action & ACTION_MASK);
	return vlans_in_use ? tag_frame(ctx, action) : action;
}

/* Whether VLANs or capture are in use, fixed at load time. The fast path would load two constants separately. */
const volatile bool vlans_or_capture_in_use;

SEC("xdp")
int lb(struct xdp_md *ctx)
{
	return vlans_or_capture_in_use ? forward_with_vlans_and_capture(ctx) : forward(ctx);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
