/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * `timestamps = "lb"`: cookies for servers that have no agent. The load balancer stamps what the servers answer and
 * restores what clients echo; so the answers must pass it (it is the servers' way to the clients), and the kernel behind
 * it routes them on.
 *
 * 1. The clock. What a client echoes must reach the server as the server sent it: Linux rejects the third packet of a
 *    handshake otherwise. The cookie leaves 20 bits of the server's TSval; the rest is found again only if the load
 *    balancer knows the server's clock. With net.ipv4.tcp_timestamps=2 all connections of a server show one clock, and
 *    the SYN-ACKs tell which (struct lb_stamped_server). With 1 each connection has an offset of its own. So the
 *    condition is checked on the wire: only when SYN-ACKs of LB_STAMPING_AGREEING connections in a row agree are the server's new
 *    connections stamped; one that does not agree ends it, until as many agree again. The clock that the older
 *    connections go by stays as it is meanwhile.
 *
 * 2. Plain connections. A connection must be stamped from its SYN-ACK on or not at all, or time would jump. One whose
 *    SYN-ACK was not stamped is put into the flow table (a later answer without timestamps, too, should the table have lost it; a
 *    client's packet proves nothing), and that it stands there says: plain, both ways; what does not
 *    stand there is stamped. So it does not matter to an open connection whether the clock is in doubt now, and a load
 *    balancer that starts with nothing in its memory goes on stamping: it takes the clock from the first answer. A later
 *    connection of the same ports stays plain as long as the entry is there: whatever is sent again of the older one, or
 *    of the handshake, is never half of each kind. A first packet that is sent again before the client has taken such a
 *    SYN-ACK goes to the same server (HALF_OPEN_FLOW). If an entry is pushed out, the connection's answers are stamped in
 *    its midst and it breaks; the table should hold all connections of servers whose clock is not known.
 *
 * 3. Towards the server. The cookie names the server; TSecr is restored. What has neither entry nor a known cookie is
 *    dropped: these servers take nothing that comes to the broadcast address.
 *
 * 4. Limits. A connection idle for more than 524 s (half of 2^20 ms) may be dropped by the client as old; 2,048 server
 *    ids; bare resets of stamped connections reach no server; each load balancer learns the clocks from the answers that
 *    pass it, so a connection's answers must pass the one that its client's packets come to.
 *
 *    What a server answers: reply.h. What clients send: lb_stamping.h.
 *
 * 5. Where the answer comes from tells its MAC address: a look-up in `lb_stamped_servers`, which user space fills and
 *    in which this program keeps the clocks.
 */
#ifndef COREWARD_LB_LB_COOKIE_H
#define COREWARD_LB_LB_COOKIE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "cookie.h"
#include "parse.h"
#include "placement.h"
#include "state.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_LB_STAMPED_SERVERS);
	__type(key, __u64);
	__type(value, struct lb_stamped_server);
} lb_stamped_servers SEC(".maps");

#define NANOSECONDS_PER_MS 1000000

/* `mac`: 48 bits; what stands above does not count. */
static __always_inline struct lb_stamped_server *lb_stamped_server(__u32 service, __u64 mac)
{
	__u64 key = (mac & SERVER_MAC_MASK) | (__u64)service << LB_STAMPED_SERVICE_SHIFT;

	return bpf_map_lookup_elem(&lb_stamped_servers, &key);
}

static __always_inline bool is_verified(const struct lb_stamped_server *server)
{
	return server->agreeing >= LB_STAMPING_AGREEING;
}

/* The time is what the daemon last told (lb_state.clock), so that a comparison with the model knows it. */
const volatile bool lb_stamping_by_ticks;

static __always_inline __u32 monotonic_ms(void)
{
	if (lb_stamping_by_ticks)
		return *(volatile __u32 *)&lb_state.clock * 100;
	return bpf_ktime_get_ns() / NANOSECONDS_PER_MS;
}

/* The server's clock now, by what is known of it (ms). */
static __always_inline __u32 clock_of(const struct lb_stamped_server *server)
{
	return monotonic_ms() + server->offset_ms;
}

/* Whether two offsets may be of one clock. */
static __always_inline bool agree(__u32 offset_ms, __u32 other_ms, __u32 tolerance_ms)
{
	return offset_ms - other_ms + tolerance_ms <= 2 * tolerance_ms;
}

/*
 * A SYN-ACK with TSval `milliseconds`. Two CPUs at the same moment: one of the two counts. The offset stays until it is
 * half the tolerance away: a packet's key follows from it (lb_stamped_value()), and that is not to change to and fro.
 */
static __always_inline void learn_clock(struct lb_stamped_server *server, const struct packet *packet,
					__u32 milliseconds)
{
	__u32 offset_ms = milliseconds - monotonic_ms();
	__u32 client = packet->client_address ^ packet->ports;

	if (!server->agreeing || !agree(offset_ms, server->newest_ms, LB_STAMPING_TOLERANCE_MS)) {
		server->disagreed += !!server->agreeing;
		server->agreeing = 1;
	} else if (!is_verified(server) && client != server->newest_client) {
		server->agreeing++;
	}
	server->newest_ms = offset_ms;
	server->newest_client = client;
	if (is_verified(server) &&
	    (!server->has_clock || !agree(offset_ms, server->offset_ms, LB_STAMPING_TOLERANCE_MS / 2))) {
		server->offset_ms = offset_ms;
		server->has_clock = 1;
	}
}

/* A later answer of a stamped connection: from before this load balancer's start, if the clock is not known. */
static __always_inline void take_clock(struct lb_stamped_server *server, __u32 milliseconds)
{
	if (server->has_clock)
		return;
	server->offset_ms = milliseconds - monotonic_ms();
	server->has_clock = 1;
}

static __always_inline __u32 lb_stamping_time_mask(__u32 service, const struct packet *packet)
{
	const struct cookie_key *key = &lb_state.services[service & (MAX_SERVICES - 1)].time_key;

	return cookie_hash(key, packet->client_address, packet->vip_address, packet->ports) & LB_STAMPING_TIME_MASK;
}

static __always_inline __u64 lb_stamping_hash(__u32 key_index, const struct packet *packet)
{
	const struct cookie_key *key;

	/* Kernel 6.1's verifier must see the mask on the very register that becomes an index. */
	barrier_var(key_index);
	key = &lb_state.keys.key[key_index & 1];
	return cookie_hash(key, packet->client_address, packet->vip_address, packet->ports);
}

/* The server's id that the cookie in `packet->echo` names. */
static __always_inline __u32 lb_stamped_id(const struct packet *packet)
{
	__u32 index = (packet->echo & LB_STAMPING_KEY_BIT) / LB_STAMPING_KEY_BIT;

	return reveal(lb_stamping_hash(index, packet), packet->echo & LB_STAMPING_ID_MASK, LB_STAMPING_ID_BITS);
}

/* What the server at `mac` sent for that echo: the latest TSval of its clock with these 20 bits. */
static __always_inline __u32 lb_stamped_echo(__u32 service, __u64 mac, const struct packet *packet)
{
	const struct lb_stamped_server *server = lb_stamped_server(service, mac);
	__u32 time, latest;

	if (!server)
		return packet->echo;
	time = (packet->echo >> LB_STAMPING_TIME_SHIFT) - lb_stamping_time_mask(service, packet);
	latest = clock_of(server) + LB_STAMPING_SLACK_MS;
	return latest - ((latest - time) & LB_STAMPING_TIME_MASK);
}

#endif
