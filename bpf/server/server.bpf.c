/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Stamping at a server's NIC, which writes the cookie into packets to clients, and removes it from the packets that
 * clients return. So neither the server's TCP nor its applications see the cookie. (The bit diagram is at the head of
 * intf.h.)
 *
 * 1. Place. The programs are at tc ingress and tc egress of the Ethernet device of a service's packets. With direct
 *    server return, replies leave by the same device, not through the load balancer. The programs have tcx links from
 *    kernel 6.6 on, and are cls_bpf on a clsact qdisc before.
 *
 * 2. Egress. TCP from a service's VIP and port with a timestamp option gets TSval' = time part | cookie. This needs
 *    only TSval and the 4-tuple, so SYN-ACKs, cookie SYN-ACKs (no socket), TIME-WAIT's ACKs and RSTs are also stamped.
 *    The fleet's keys hide the id and rotate. The time part is masked with the server's own key, so time continues at a
 *    rotation. The packet's own TSval selects the stamping key (switch_ms), so packets of one millisecond are equal,
 *    and later ones are larger. A clamped value keeps the key of its millisecond. So no client sees TSval decrease.
 *
 * 3. The clock (cookie_time.h). TSecr is restored by the clock, without state per connection. The kernel's TSval is
 *    skb_mstamp_ns / 10^6 (tcp_skb_timestamp_ts(), net/ipv4/tcp.h). skb_mstamp_ns comes from ktime_get_ns(), which is
 *    CLOCK_MONOTONIC as in bpf_ktime_get_ns(). With pacing by the fq qdisc (EDT) it is the time of departure, which is
 *    ahead of now at egress, but not when TSecr arrives. The kernel adds an offset per connection, which is 0 only with
 *    net.ipv4.tcp_timestamps=2. A connection with another offset (older than the sysctl), or with microseconds (route
 *    feature tcp_usec_ts, kernel 6.7), is left alone and counted. It was never stamped, and a TSval that jumps would
 *    break it. SYN cookies hide options in the low 6 bits, so their TSvals are up to 64 ms in the past. They are
 *    restored bit by bit, as the kernel's decoding needs.
 *
 * 4. The PAWS clamp (cookie_time.h). The time part has 16 bits. A client takes a step of 2^15 ms or more for a step
 *    back and drops the packet (PAWS, RFC 7323 Sect. 5). A connection idle for longer would jump so far. The client's
 *    last TSecr is a lower bound of its ts_recent, and the kernel keeps it (tp->rx_opt.rcv_tsecr). When the server's
 *    own TSval is too far ahead of it, the largest allowed step is sent until the client returns exactly that. The
 *    returned value is then restored to the original TSval. Until the client returns something newer, rcv_tsecr is the
 *    restored value, not the client's, which is in the entry. Normal traffic pays two comparisons for this. An entry
 *    matters only when the last TSecr is older than the largest step, or when a connection of its group (clamp_group())
 *    was clamped so recently. If this connection's own clamp is older than that and was the last TSecr, then the last
 *    TSecr is old, too. Entries need no deletion, because one that does not fit the last TSecr is ignored and
 *    overwritten. Losing one (LRU) costs a wrong round-trip sample, at worst a retransmission.
 *
 * 5. Ingress. TSecr's key bit selects the key. If the cookie has this server's id, TSecr is restored. Any other TSecr
 *    stays unchanged, because its connection is older than coreward, or it was forged. SYNs carry no TSecr.
 *
 * 6. The index (index.h) is used for services with SERVER_NUMBER_STATEFUL. The load balancer writes the index of the
 *    connection's entry into the SYN's TSecr, 0 on the wire. This program removes it and keeps it in an LRU map until
 *    the connection has a socket, then with the socket (sk_storage). Stamped packets carry the index instead of the id.
 *    Without one (the table was full, or the map lost it in a flood) they carry the id, and the connection continues as
 *    a stateless one. A returned index looks like noise, so it is restored only if the socket's clock has no offset. A
 *    broadcast packet with an index shows that no load balancer has the entry. Then the index is dropped, and after one
 *    round trip the client returns the id. TSvals up to the last one stamped with the index still get it.
 *
 * 7. Broadcast packets. The load balancer broadcasts packets whose server it does not know (a bare RST has no
 *    timestamp). This program accepts such a packet, by turning it into a packet for this host, only if this host has a
 *    socket of exactly its 4-tuple. A listening socket does not count, or every server would answer. Other broadcast
 *    packets are dropped. ICMP errors are treated likewise (icmp.h), by the packet that they quote.
 *
 * 8. Daisy chaining (daisy_chain.h). Packets without a cookie follow the bucket, whose server may have changed since
 *    the connection began. The load balancer writes the previous server into the IP identification, or the IPv6 flow
 *    label. A packet without a socket here is forwarded to that server's MAC address by the same device, with NO_SERVER
 *    instead, so once at most. SYNs are never forwarded. Neither is the end of a handshake with a SYN cookie, because
 *    the kernel checks whether the cookie is its own. An unknown packet reaches the previous server, which rejects it.
 *    If that server's MAC address is unknown the packet is dropped, because a reset could end a connection that exists
 *    there. Forwarded services (forwarded.h) have their sockets not on this host, but behind DNAT or a bridge. A
 *    forwarded SYN-ACK shows this, and from then on the service's packets stay here. New connections work, and those of
 *    the previous server end. Such a connection carries the server's id instead of an index, which could neither be
 *    kept nor restored.
 *
 * 9. Stalls (stall.h). A firewall between client and server may drop stamped packets, whose TSvals look unusual.
 *    SYN-ACKs sent four times and segments sent five times are counted. The agent compares them with the handshakes.
 *
 * 10. RSS (rss.h). For each SYN, the actual queue is compared with the one that Toeplitz hash and table predict,
 *    because a NIC may not use the table that it reports.
 *
 * 11. MSS (mss.h). Packets of some services arrive with an outer header (decap.bpf.c), for which SYN-ACKs leave room.
 *
 * 12. IPv6. A dual-stack server has services of both families. Only the parser (segment.h), the hash and look-ups
 *    differ. Extension headers are skipped as at the load balancer. A packet with more of them passes, as fragments do.
 *
 * Errors. A header beyond the linear part is pulled in first. A contradictory TCP header is dropped and counted. A
 * malformed list of options ends at the fault, as in the kernel, and the packet passes. Fragments pass unchanged. A
 * rewrite changes option and checksum, or drops the packet. bpf_l4_csum_replace() without BPF_F_PSEUDO_HDR is right for
 * full, partial and hardware-verified checksums. One rewrite of a GSO packet's header covers its segments.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "cookie.h"
#include "intf.h"
#include "daisy_chain.h"
#include "forwarded.h"
#include "icmp.h"
#include "index.h"
#include "mss.h"
#include "rss.h"
#include "segment.h"
#include "socket.h"
#include "stall.h"
#include "state.h"
#include "cookie_time.h"
#include "service.h"

typedef __u64 __attribute__((may_alias)) switch_word;
_Static_assert(__builtin_offsetof(struct server_state, keys.current) % 8 == 0, "current and switch_ms are one word");

/* Whether every TCP SYN is sampled, even without a service (for `coreward agent rss`). */
const volatile __u8 sample_every_syn = 0;

/* Not inlined, so that the code for IPv4 keeps the registers. */
static __noinline __u64 flow_hash_ipv6(const struct cookie_key *key, const struct segment *segment)
{
	const struct flow_key *flow = &segment->flow;

	return cookie_hash_ipv6(key, flow->client_address, flow->vip_address, ports_of(flow));
}

static __always_inline __u64 flow_hash(const struct cookie_key *key, const struct segment *segment)
{
	const struct flow_key *flow = &segment->flow;

	if (segment->family == ADDRESS_FAMILY_IPV6)
		return flow_hash_ipv6(key, segment);
	return cookie_hash(key, flow->client_address[3], flow->vip_address[3], ports_of(flow));
}

/* Returns the number of the segment's service, or NO_SERVICE, and the word by which it was found. */
static __always_inline __u32 find_segment_service(const struct segment *segment, __u64 *word)
{
	const struct flow_key *flow = &segment->flow;
	struct service_key_ipv6 key;

	if (segment->family == ADDRESS_FAMILY_IPV4) {
		*word = service_tail_ipv4(flow->vip_address[3], flow->vip_port, IPPROTO_TCP);
		return find_service(&state.directories, *word);
	}
	key = make_service_key_ipv6(flow->vip_address, flow->vip_port, IPPROTO_TCP);
	*word = key.hashed_word;
	return find_service_ipv6(&state.directories, &key);
}

/* ---- egress ---------------------------------------------------------------------------------------------------- */

/*
 * Returns the index of the fleet's key that stamps the server's own TSval `milliseconds` (section 2). `current` and
 * `switch_ms` are one word, which the agent writes by one store.
 */
static __always_inline __u32 stamping_key_index(__u32 milliseconds)
{
	__u64 both = *(const volatile switch_word *)&state.keys.current;
	__u32 current = both, switch_ms = both >> 32;

	if ((__s32)(milliseconds - switch_ms) < 0)
		current = ~current;
	/* Kernel 6.1's verifier must see the mask on the register that becomes an index. */
	barrier_var(current);
	return current & 1;
}

/*
 * Returns `cookie` (kind, and id or index) with its time part. It is never 0, which a client would read as "no TSecr"
 * (RFC 7323, Sect. 3.2).
 */
static __always_inline __u32 stamp_tsval(const struct segment *segment, __u32 cookie, struct time_part time)
{
	__u32 index = stamping_key_index(time.original_tsval);
	__u64 hash = flow_hash(&state.keys.key[index], segment);
	__u64 time_hash = flow_hash(&state.time_key, segment);
	__u32 low = hide(hash, cookie & COOKIE_HIDDEN_MASK, COOKIE_HIDDEN_BITS) | index * COOKIE_KEY_BIT;
	__u32 stamped = (time.sent + cookie_time_addend(time_hash)) << COOKIE_TIME_SHIFT | low;

	return stamped ? stamped : 1u << COOKIE_TIME_SHIFT;
}

/*
 * Returns the cookie's content for the server's own TSval `milliseconds`, which is the kind, and an id or index.
 * `number` is the service's number.
 */
static __always_inline __u32 cookie_to_send(const struct segment *segment, __u32 number, struct tcp_sock *socket,
					    __u32 milliseconds, bool forwarded)
{
	if (number & SERVER_NUMBER_STATEFUL && !forwarded) {
		__u32 index = select_index(segment, socket, milliseconds);

		if (index != NO_CONNECTION_INDEX)
			return COOKIE_KIND_BIT | (index & COOKIE_ID_MASK);
		count(SERVER_COUNTER_INDEX_UNKNOWN);
	}
	return number & SERVER_NUMBER_ID_MASK;
}

SEC("tc")
int server_egress(struct __sk_buff *skb)
{
	struct segment segment;
	struct tcp_sock *socket = NULL;
	struct bpf_sock *sk;
	__u32 milliseconds, last_tsecr = 0, number, cookie;
	struct time_part time;
	__u64 word;
	/* A SYN-ACK with a SYN cookie has no socket either, but no ingress device. */
	bool forwarded = !skb->sk && skb->ingress_ifindex;

	if (locate_pulled(skb, &segment, FROM_SERVER) != LOCATED_TCP)
		return TC_ACT_UNSPEC;
	number = find_segment_service(&segment, &word);
	if (number >= SERVICE_ADDRESS_ONLY)
		return TC_ACT_UNSPEC;
	if (segment.syn)
		record_handshake(word, forwarded);
	if (segment.syn && number & SERVER_NUMBER_ENCAPSULATED && clamp_mss(skb, &segment, number) != TC_ACT_UNSPEC)
		return TC_ACT_SHOT;
	if (number & SERVER_NUMBER_TIMESTAMPS_OFF)
		return TC_ACT_UNSPEC;
	if (locate_timestamp_pulled(skb, &segment) != LOCATED_TCP || segment.timestamp_offset == NO_TIMESTAMP) {
		count(SERVER_COUNTER_EGRESS_WITHOUT_TIMESTAMP);
		return TC_ACT_UNSPEC;
	}

	milliseconds = bpf_ntohl(segment.tsval);
	sk = skb->sk;
	/*
	 * SYN-ACKs belong to a request or to no socket. The kernel's socket for answers without one (TIME-WAIT before
	 * 6.13) has TCP as its protocol, but is raw, which only its state CLOSE shows.
	 */
	if (sk && !segment.syn && sk->state != SOCKET_CLOSE)
		socket = bpf_skc_to_tcp_sock(sk);
	if (socket) {
		if (has_other_clock(socket)) {
			count(SERVER_COUNTER_EGRESS_OTHER_CLOCK);
			return TC_ACT_UNSPEC;
		}
		last_tsecr = socket->rx_opt.rcv_tsecr;
		watch_connection(&segment, socket);
	} else if (!is_monotonic_clock(milliseconds)) {
		count(segment.syn && forwarded ? SERVER_COUNTER_EGRESS_FOREIGN_CLOCK
					       : SERVER_COUNTER_EGRESS_OTHER_CLOCK);
		return TC_ACT_UNSPEC;
	} else if (segment.syn) {
		if (sk)
			watch_handshake(sk);
		else if (forwarded)
			count(SERVER_COUNTER_EGRESS_FORWARDED);
	}
	count(SERVER_COUNTER_STAMPED);
	time = select_time(&segment, milliseconds, last_tsecr);
	cookie = cookie_to_send(&segment, number, socket, time.original_tsval, forwarded);
	return rewrite_timestamp_word(skb, &segment, segment.timestamp_offset, segment.tsval,
				      bpf_htonl(stamp_tsval(&segment, cookie, time)));
}

/* ---- ingress --------------------------------------------------------------------------------------------------- */

/* Returns whether this host has stamped a TSecr with `cookie` (kind, and id or index). */
static __always_inline bool is_stamped_here(struct __sk_buff *skb, const struct segment *segment, __u32 number,
					    __u32 cookie)
{
	if (cookie & COOKIE_KIND_BIT)
		return number & SERVER_NUMBER_STATEFUL && may_have_stamped_index(skb, segment);
	return cookie == (number & SERVER_NUMBER_ID_MASK);
}

static __always_inline int restore_tsecr(struct __sk_buff *skb, const struct segment *segment, __u32 number,
					 bool is_broadcast)
{
	__u32 tsecr = bpf_ntohl(segment->tsecr);
	__u64 hash = flow_hash(&state.keys.key[cookie_key_index(tsecr)], segment);
	__u32 cookie = reveal(hash, tsecr & COOKIE_HIDDEN_MASK, COOKIE_HIDDEN_BITS);
	__u64 time_hash;

	if (!is_stamped_here(skb, segment, number, cookie)) {
		count(SERVER_COUNTER_INGRESS_OTHER_COOKIE);
		return TC_ACT_UNSPEC;
	}
	if (is_broadcast && cookie & COOKIE_KIND_BIT)
		give_up_index(skb, segment, cookie & COOKIE_ID_MASK);
	time_hash = flow_hash(&state.time_key, segment);
	count(SERVER_COUNTER_RESTORED);
	return rewrite_timestamp_word(
		skb, segment, segment->timestamp_offset + sizeof(segment->tsval), segment->tsecr,
		bpf_htonl(restore_tsval(segment, (tsecr >> COOKIE_TIME_SHIFT) - cookie_time_addend(time_hash))));
}

static __always_inline int accept_segment(struct __sk_buff *skb, struct segment *segment, __u64 word, __u32 number,
					  bool is_broadcast)
{
	int verdict;

	if (locate_timestamp_pulled(skb, segment) != LOCATED_TCP) {
		count(SERVER_COUNTER_DROP_MALFORMED_TCP);
		return TC_ACT_SHOT;
	}
	if (!segment->syn && !is_broadcast && has_previous_server(number, segment) && !is_forwarded_service(word)) {
		verdict = forward_to_previous(skb, segment, number & SERVER_NUMBER_ID_MASK);
		if (verdict != TC_ACT_UNSPEC)
			return verdict;
	}
	if (number & SERVER_NUMBER_TIMESTAMPS_OFF)
		return TC_ACT_UNSPEC;
	if (segment->syn || segment->timestamp_offset == NO_TIMESTAMP || !segment->tsecr) {
		count(SERVER_COUNTER_INGRESS_WITHOUT_TSECR);
		return segment->syn && number & SERVER_NUMBER_STATEFUL ? learn_index(skb, segment) : TC_ACT_UNSPEC;
	}
	return restore_tsecr(skb, segment, number, is_broadcast);
}

/* Drops a broadcast ICMP error about a connection of another server. Other packets that are not TCP pass. */
static __always_inline int filter_broadcast_icmp(struct __sk_buff *skb)
{
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? accept_icmpv6_error(skb) : accept_icmp_error(skb);
}

SEC("tc")
int server_ingress(struct __sk_buff *skb)
{
	struct segment segment;
	bool is_broadcast;
	__u32 number;
	__u64 word;

	is_broadcast = skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST;
	if (locate_pulled(skb, &segment, FROM_CLIENT) != LOCATED_TCP)
		return is_broadcast ? filter_broadcast_icmp(skb) : TC_ACT_UNSPEC;
	if (sample_every_syn && segment.syn && !segment.ack)
		sample_rss(skb, &segment);
	number = find_segment_service(&segment, &word);
	if (number >= SERVICE_ADDRESS_ONLY || skb->pkt_type == PACKET_OTHERHOST)
		return TC_ACT_UNSPEC;
	if (is_broadcast) {
		if (!has_socket(skb, &segment)) {
			count(SERVER_COUNTER_BROADCAST_IGNORED);
			return TC_ACT_SHOT;
		}
		count(SERVER_COUNTER_BROADCAST_ACCEPTED);
		bpf_skb_change_type(skb, PACKET_HOST);
	}
	/* The NIC hashed the outer header of encapsulated packets, so the inner header does not predict the queue. */
	if (!segment.syn && !(number & SERVER_NUMBER_ENCAPSULATED))
		count_established(skb, &segment);
	else if (segment.syn && !sample_every_syn && !segment.ack && !(number & SERVER_NUMBER_ENCAPSULATED))
		sample_rss(skb, &segment);
	return accept_segment(skb, &segment, word, number, is_broadcast);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
