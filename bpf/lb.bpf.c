/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The load balancer: XDP on the device that clients' packets arrive on.
 *
 * 1. What passes here. Every frame that the device receives. Those that are sent to the device's own MAC address and
 *    hold IPv4 TCP for a service (VIP and port) are ours; all others go on to the kernel untouched (XDP_PASS): other
 *    protocols (ICMP to a VIP included), IPv6, VLAN-tagged frames (services live on the untagged network), frames to a
 *    group address or, on a device that does not filter, to another machine. The last two matter: what section 5 sends
 *    to all must not be taken up again by a second load balancer on the same wire.
 *
 * 2. What happens to ours. The frame gets a server's MAC address as destination and our own as source, and leaves by
 *    the device it came on (XDP_TX). Nothing above Ethernet changes: the server holds the VIP, answers the client
 *    directly, and restores what it stamped (server.bpf.c). Hence no checksum is touched or verified here: a damaged
 *    packet reaches some server and is dropped there.
 *
 * 3. Packets of an established connection never look at a table. The client echoes in every packet what the server
 *    stamped into its TCP timestamps; with the keyed hash of the 4-tuple (cookie.bpf.h) the echo yields the server's
 *    id, and that is an index into `servers`. This is the hot path, and it is written to touch little memory whatever
 *    the number of connections: the frame; one slot of the service directory; one key; one server entry; one counter.
 *    No helper is called and no map looked up: all of it stands in global variables.
 *
 * 4. First packets (SYN) go where the service's placement table says: placement.bpf.h. A SYN without timestamps
 *    announces a connection that cannot carry a cookie; all its packets take the table's `consistent` choice, which
 *    changes only with the pool (a documented limit until there is a connection table).
 *
 * 5. To all. An RST without timestamps (from a host that has no such socket), a cookie that names no server (forged, or
 *    of a server that is gone) and one of kind "table index" (there is no such table yet) are sent to the broadcast
 *    MAC address, and the one server that has the socket takes it. Rate-limited per service by a token bucket, so that
 *    nobody gains an amplifier; what is over the rate is dropped.
 *
 * 6. What can go wrong, and what then. One outcome per packet, counted per service (enum lb_counter):
 *    - fewer than 34 bytes, so that there is no address to tell whose it is: passed, the kernel drops it;
 *    - TCP to a VIP with an IP header of bad version, bad or truncated length: drop_malformed_ipv4. Its port cannot be
 *      told, so this holds for all ports of a VIP;
 *    - a fragment to a VIP, the first included: drop_fragment, for all ports of a VIP (later fragments have no ports;
 *      TCP does path MTU discovery, so these are rare);
 *    - a TCP header truncated or with a bad data offset, an option of length 0, 1 or beyond the header (up to the
 *      timestamp; later ones are not looked at), flags that no connection of ours can have (SYN with ACK, FIN or RST;
 *      none of SYN, ACK, RST): drop_malformed_tcp;
 *    - the cookie's server is known, but its MAC address is not: drop_server_unresolved;
 *    - the chosen server cannot take a first packet: 16 further members are tried, then drop_no_eligible_server;
 *    - over the rate of section 5: drop_unknown_cookie or drop_to_all_rate_limited;
 *    - what cannot be: drop_internal.
 *
 * 7. Who else writes. User space (crates/dataplane/src/lb.rs) writes all state through shared memory: whole words, or
 *    the idle half of a double buffer followed by a switch. This program outlives it: state and link are pinned.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "cookie.bpf.h"
#include "parse.bpf.h"
#include "placement.bpf.h"
#include "service.bpf.h"
#include "stats.bpf.h"
#include "toeplitz.bpf.h"

struct lb_state lb_state SEC(".bss.state");

/* Token bucket of section 5: one token per interval, and how far it may be overdrawn. Nanoseconds. */
const volatile __u64 to_all_interval_ns;
const volatile __u64 to_all_burst_ns;

#define BROADCAST_MAC 0xffffffffffffull

/* New addresses for the frame. Two stores: 6 bytes of destination and 2 of source; 4 of source. */
static __always_inline void rewrite_mac(void *data, __u64 destination)
{
	__u64 own_shifted = lb_state.own_mac_shifted;

	PACKET_U64(data, 0) = (destination & SERVER_MAC_MASK) | own_shifted >> 16 << 48;
	PACKET_U32(data, 8) = own_shifted >> 32;
}

static __always_inline bool sent_to_us(const void *data)
{
	return PACKET_U64(data, 0) << 16 == lb_state.own_mac_shifted;
}

/* What the echo says, in the clear: COOKIE_KIND_BIT and id. */
static __always_inline __u32 cookie_of(__u32 echo, __u32 client_address, __u32 vip_address, __u32 ports)
{
	const struct cookie_key *key = &lb_state.keys.key[cookie_key_index(echo)];

	return (echo ^ cookie_hash(key, client_address, vip_address, ports)) & COOKIE_HIDDEN_MASK;
}

/* ---- section 3, the usual form --------------------------------------------------------------------------------- */

/* Returns an XDP action, or -1: not for the hot path. */
static __always_inline int forward_usual(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 client_address, vip_address, ports, service, cookie;
	__u64 server;

	if (!usual_frame(data, data_end) || !sent_to_us(data))
		return -1;
	client_address = PACKET_U32(data, IP_AT(saddr));
	vip_address = PACKET_U32(data, IP_AT(daddr));
	ports = PACKET_U32(data, USUAL_TCP);
	service = find_service(&lb_state.directories, service_tail_ipv4(vip_address, ports >> 16, IPPROTO_TCP));
	if (service >= MAX_SERVICES) {
		count_packet(ctx, LB_COUNTERS_NO_SERVICE, LB_COUNTER_PASSED_NOT_SERVICE, 0);
		return XDP_PASS;
	}
	cookie = cookie_of(bpf_ntohl(PACKET_U32(data, USUAL_ECHO)), client_address, vip_address, ports);
	server = server_at(service, cookie);
	if (cookie & COOKIE_KIND_BIT || !server_has(server, SERVER_KNOWN | SERVER_RESOLVED))
		return -1;
	rewrite_mac(data, server);
	count_packet(ctx, service, LB_COUNTER_ESTABLISHED, data_end - data);
	return XDP_TX;
}

/* ---- everything else ------------------------------------------------------------------------------------------- */

/* Where a packet goes: `outcome` and, if it is forwarded, `destination`. */
struct decision {
	enum lb_counter outcome;
	__u32 service;
	__u64 destination;
};

/*
 * The generic cell rate algorithm (ITU-T I.371, Annex A): one word holds the time until which all tokens taken are paid
 * for. Two CPUs at the same moment: the one that loses the exchange is over the rate.
 */
static __always_inline bool take_token(struct service_state *state)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 paid_until = *(volatile __u64 *)&state->to_all_paid_until;
	__u64 start = paid_until > now ? paid_until : now;

	if (start - now > to_all_burst_ns)
		return false;
	return __sync_val_compare_and_swap(&state->to_all_paid_until, paid_until, start + to_all_interval_ns) ==
	       paid_until;
}

static __always_inline void decide_to_all(struct service_state *state, enum lb_counter over_rate,
					  struct decision *decision)
{
	if (!take_token(state)) {
		decision->outcome = over_rate;
		return;
	}
	decision->outcome = LB_COUNTER_TO_ALL;
	decision->destination = BROADCAST_MAC;
}

static __always_inline void decide_by_cookie(struct service_state *state, const struct tcp_packet *packet,
					     struct decision *decision)
{
	__u32 cookie = cookie_of(packet->echo, packet->client_address, packet->vip_address, packet->ports);
	server_word server = server_at(decision->service, cookie);

	if (cookie & COOKIE_KIND_BIT || !server_has(server, SERVER_KNOWN)) {
		decide_to_all(state, LB_COUNTER_DROP_UNKNOWN_COOKIE, decision);
		return;
	}
	decision->outcome =
		server_has(server, SERVER_RESOLVED) ? LB_COUNTER_ESTABLISHED : LB_COUNTER_DROP_SERVER_UNRESOLVED;
	decision->destination = server;
}

static __always_inline void decide_first(struct service_state *state, const struct tcp_packet *packet,
					 struct decision *decision)
{
	__u32 id = place(state, decision->service, packet);

	decision->outcome = id == NO_SERVER ? LB_COUNTER_DROP_NO_ELIGIBLE_SERVER : LB_COUNTER_FIRST;
	decision->destination = server_at(decision->service, id);
}

/* The same server or none for all packets of the connection: no other one is tried. */
static __always_inline void decide_consistently(struct service_state *state, const struct tcp_packet *packet,
						struct decision *decision)
{
	__u32 id = place_consistently(state, decision->service, packet);
	server_word server = server_at(decision->service, id);

	if (id == NO_SERVER || !server_has(server, SERVER_KNOWN))
		decision->outcome = LB_COUNTER_DROP_NO_ELIGIBLE_SERVER;
	else if (!server_has(server, SERVER_RESOLVED))
		decision->outcome = LB_COUNTER_DROP_SERVER_UNRESOLVED;
	else
		decision->outcome = LB_COUNTER_CONSISTENT;
	decision->destination = server;
}

static __always_inline void decide(const struct tcp_packet *packet, struct decision *decision)
{
	struct service_state *state = &lb_state.services[decision->service & (MAX_SERVICES - 1)];

	if (packet->flags & TCP_SYN && packet->has_timestamp)
		decide_first(state, packet, decision);
	else if (packet->has_timestamp)
		decide_by_cookie(state, packet, decision);
	else if (packet->flags & TCP_RST)
		decide_to_all(state, LB_COUNTER_DROP_TO_ALL_RATE_LIMITED, decision);
	else
		decide_consistently(state, packet, decision);
}

/* Reads the packet and fills `decision`. Returns 0, or how parsing ended. */
static __always_inline int parse_and_decide(struct xdp_md *ctx, struct decision *decision)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	struct tcp_packet packet;
	__u64 address_tail;
	int ended;

	ended = parse_ethernet(data, data_end);
	if (ended)
		return ended;
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end || !sent_to_us(data))
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	address_tail = service_tail_ipv4(PACKET_U32(data, IP_AT(daddr)), 0, IPPROTO_TCP);
	if (find_service(&lb_state.directories, address_tail) != SERVICE_ADDRESS_ONLY)
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	ended = parse_ipv4(data, data_end, &packet);
	if (ended)
		return ended;
	decision->service = find_service(&lb_state.directories,
					 service_tail_ipv4(packet.vip_address, packet.ports >> 16, IPPROTO_TCP));
	if (decision->service >= MAX_SERVICES) {
		decision->service = LB_COUNTERS_NO_SERVICE;
		return parse_ended(LB_COUNTER_PASSED_NOT_SERVICE);
	}
	ended = parse_tcp(ctx, data, data_end, &packet);
	if (ended)
		return ended;
	decide(&packet, decision);
	return 0;
}

static __noinline int forward_other(struct xdp_md *ctx)
{
	struct decision decision = {.service = LB_COUNTERS_NO_SERVICE};
	int ended = parse_and_decide(ctx, &decision);
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;

	if (ended)
		decision.outcome = outcome_of(ended);
	switch (decision.outcome) {
	case LB_COUNTER_ESTABLISHED:
	case LB_COUNTER_FIRST:
	case LB_COUNTER_CONSISTENT:
	case LB_COUNTER_TO_ALL:
		if (data + ETH_HLEN > data_end)
			return XDP_DROP;
		rewrite_mac(data, decision.destination);
		count_packet(ctx, decision.service, decision.outcome, data_end - data);
		return XDP_TX;
	case LB_COUNTER_PASSED_NOT_SERVICE:
		count_packet(ctx, decision.service, decision.outcome, 0);
		return XDP_PASS;
	default:
		count_packet(ctx, decision.service, decision.outcome, 0);
		return XDP_DROP;
	}
}

SEC("xdp")
int lb(struct xdp_md *ctx)
{
	int action = forward_usual(ctx);

	return action >= 0 ? action : forward_other(ctx);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
