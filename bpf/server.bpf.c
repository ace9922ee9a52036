/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * At a server's NIC: stamps the cookie into what leaves for a client, and takes it out of what the client echoes, so
 * that neither the server's TCP nor its applications know of it. (The bit diagram is at the head of intf.h.)
 *
 * 1. Where it runs. tc ingress and tc egress of the Ethernet device on which a service's packets come and go (direct
 *    server return: answers leave by the same device, not through the load balancer). As tcx links from kernel 6.6 on,
 *    as cls_bpf on a clsact qdisc before.
 *
 * 2. Egress. TCP from a service's VIP and port with a timestamp option gets TSval' = time part | cookie. It needs only
 *    TSval and the 4-tuple, so SYN-ACKs, cookie SYN-ACKs (no socket), TIME-WAIT's ACKs and RSTs are stamped as well.
 *
 * 3. The clock. What clients echo is restored by the clock, without state per connection. The kernel's TSval is
 *    skb_mstamp_ns / 10^6 (tcp_skb_timestamp_ts(), net/ipv4/tcp.h), and skb_mstamp_ns comes from ktime_get_ns(): the
 *    CLOCK_MONOTONIC that bpf_ktime_get_ns() reads. With pacing by the fq qdisc (EDT) it is the time at which the packet
 *    will leave, which lies ahead of now at egress, but not when its echo arrives. To TSval the kernel adds an offset per
 *    connection, 0 only with net.ipv4.tcp_timestamps=2. A connection with another offset (it is older than the
 *    sysctl), or with microseconds (route feature tcp_usec_ts, kernel 6.7) is left alone and counted: it was never
 *    stamped, and a TSval that jumps would break it. SYN cookies hide options in the low 6 bits and so lie up to 64 ms
 *    in the past: restored all the same, bit by bit, which is what the kernel needs to decode them.
 *
 * 4. The hold rule. The time part has 16 bits; a client takes a step of 2^15 ms or more for a step back and drops the
 *    packet (PAWS, RFC 7323 Sect. 5). A connection idle for longer would jump so far. What the client has last echoed
 *    is its ts_recent, and the kernel keeps it (tp->rx_opt.rcv_tsecr). When the next value would lie too far ahead, the
 *    largest allowed step is sent instead, again and again until the client echoes exactly that; its echo is then
 *    restored to the TSval that it stood for. From then until the client echoes something newer, rcv_tsecr (the restored
 *    one) is not what the client has: the held entry says what it is.
 *    Normal traffic pays two compares for this. An entry can only matter when the last echo is older than 2^15 ms, or
 *    when some connection was held within the last 2^15 ms: if this connection's own hold is older than that and was
 *    the last thing echoed, then the last echo is old, too.
 *    Entries need no deletion: one that does not fit the last echo is ignored and overwritten. Losing one (LRU) costs a
 *    wrong round-trip sample, at worst a retransmission.
 *
 * 5. Ingress. The echo's key bit names the key; if the rest names this server, TSecr is restored; any other echo is left
 *    as it is (a connection that is older than coreward, or a forged one). SYNs carry no echo.
 *
 * 6. Sent to all servers. What the load balancer cannot attribute (a bare RST has no timestamp) it sends to the
 *    broadcast address. Here it is accepted, by turning it into a packet for this host, only if this host has a socket
 *    of exactly that 4-tuple; a listening socket does not count, or every server would answer. Else it is dropped.
 *
 * 7. RSS. Of each SYN the queue that Toeplitz and the table predict is compared with the one it came by: what a NIC
 *    displays is not always what is in force.
 *
 * What can go wrong: a header that lies beyond the linear part is pulled in first. A TCP header that contradicts itself
 * is dropped and counted (the kernel would do the same); a malformed list of options ends where it goes wrong, as in the
 * kernel, and the packet passes. Fragments pass untouched (the load balancer forwards none). A rewrite does both, option
 * and checksum, or drops the packet. Checksums: bpf_l4_csum_replace() without BPF_F_PSEUDO_HDR does the right
 * thing for full, partial (it leaves the pseudo-header's sum alone) and hardware-verified ones; one rewrite of a GSO
 * packet's header covers its segments, whose headers are copies of it.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "cookie.bpf.h"
#include "intf.h"
#include "rss_mapping.bpf.h"
#include "service.bpf.h"
#include "timestamp.bpf.h"

#define IPV4_FRAGMENT_BITS 0x3fff /* "more fragments" and the offset; not "don't fragment" */
#define NANOSECONDS_PER_MS 1000000
/* A packet without a socket is on the plain clock if its TSval lies no further back than this (SYN cookies: 64 ms). */
#define PLAIN_CLOCK_WINDOW_MS 1000
/* The longest Ethernet, IPv4 and TCP headers together. */
#define HEADERS_MAX (ETH_HLEN + 60 + 60)

#ifndef TCP_CLOSE
/* include/net/tcp_states.h */
#define TCP_CLOSE 7
#define TCP_LISTEN 10
#endif

/* The parts of the kernel's structs that are read here; libbpf relocates them to the running kernel's. */
struct tcp_options_received {
	__u32 rcv_tsecr;
} __attribute__((preserve_access_index));

struct tcp_sock {
	__u32 tsoffset;
	struct tcp_options_received rx_opt;
	__u8 tcp_usec_ts : 1;
} __attribute__((preserve_access_index));

/* True for `coreward agent rss`: every TCP SYN is sampled, whether or not it is for a service. */
const volatile __u8 sample_every_syn = 0;

struct server_state state __attribute__((aligned(64)));

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_HELD_TIMESTAMPS);
	__type(key, struct flow_key);
	__type(value, struct held_timestamp);
} held_timestamps SEC(".maps");

/* A TCP packet as far as it is needed, without pointers: helpers that write invalidate those. */
struct segment {
	__u32 source_address;
	__u32 destination_address;
	/* As they stand in the TCP header: source, then destination. */
	__u32 ports;
	/* Of the TCP header, from the start of the frame. */
	__u32 tcp_offset;
	/* Offset of TSval in the TCP header, or NO_TIMESTAMP. */
	__u32 timestamp;
	__be32 value;
	__be32 echo;
	__u8 syn;
	__u8 ack;
};

#define NO_TIMESTAMP 0u

enum located {
	LOCATED_TCP,
	LOCATED_OTHER,
	LOCATED_MALFORMED,
	LOCATED_BEYOND_LINEAR,
};

static __always_inline void count(enum server_counter counter)
{
	__u32 row = bpf_get_smp_processor_id() & (MAX_CPUS - 1);

	state.counters[row].packets[counter]++;
}

static __always_inline __u16 high_half(__u32 ports)
{
	return ports >> 16;
}

static __always_inline __u32 swapped(__u32 ports)
{
	return ports << 16 | ports >> 16;
}

/* The TCP header of a whole IPv4 packet. Options are looked at by locate_timestamp(). */
static __always_inline enum located locate(struct __sk_buff *skb, struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct iphdr *ip = data + ETH_HLEN;
	const struct tcphdr *tcp;
	__u32 ip_length;

	if (data + ETH_HLEN + sizeof(*ip) > data_end)
		return skb->len < ETH_HLEN + sizeof(*ip) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	ip_length = ip->ihl * 4;
	if (ip->protocol != IPPROTO_TCP || ip->version != 4 || ip_length < sizeof(*ip) ||
	    (ip->frag_off & bpf_htons(IPV4_FRAGMENT_BITS)))
		return LOCATED_OTHER;
	segment->tcp_offset = ETH_HLEN + ip_length;
	segment->source_address = ip->saddr;
	segment->destination_address = ip->daddr;

	tcp = data + segment->tcp_offset;
	if ((void *)(tcp + 1) > data_end)
		return skb->len < segment->tcp_offset + sizeof(*tcp) ? LOCATED_OTHER : LOCATED_BEYOND_LINEAR;
	segment->ports = *(const __u32 *)tcp;
	segment->syn = tcp->syn;
	segment->ack = tcp->ack;
	return LOCATED_TCP;
}

/* The words of a timestamp option that begins at `offset` of the options. */
static __always_inline void take_timestamp(struct segment *segment, __u32 offset, const void *option)
{
	segment->timestamp = sizeof(struct tcphdr) + offset + 2;
	segment->value = ((const struct timestamp_words *)(option + 2))->value;
	segment->echo = ((const struct timestamp_words *)(option + 2))->echo;
}

/* The timestamp option of a segment that locate() has found, on a packet that may have been pulled since. */
static __always_inline enum located locate_timestamp(struct __sk_buff *skb, struct segment *segment)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end;
	const struct tcphdr *tcp = data + (segment->tcp_offset & 0x7f);
	struct tcp_options options = {};
	__u32 length, words;
	int offset;

	segment->timestamp = NO_TIMESTAMP;
	if ((void *)(tcp + 1) > data_end)
		return LOCATED_BEYOND_LINEAR;
	if (tcp->doff * 4 < sizeof(*tcp) || segment->tcp_offset + tcp->doff * 4 > skb->len)
		return LOCATED_MALFORMED;
	length = tcp->doff * 4 - sizeof(*tcp);
	if (length < OPTIONS_USUAL_LENGTH || length > TCP_OPTIONS_MAX)
		return length < TCP_TIMESTAMP_LENGTH ? LOCATED_TCP : LOCATED_MALFORMED;
	if ((void *)(tcp + 1) + OPTIONS_USUAL_LENGTH > data_end)
		return LOCATED_BEYOND_LINEAR;
	if (*(const __be32 *)(tcp + 1) == OPTIONS_USUAL_TIMESTAMP) {
		take_timestamp(segment, OPTIONS_USUAL_OFFSET, (void *)(tcp + 1) + OPTIONS_USUAL_OFFSET);
		return LOCATED_TCP;
	}
	/* 12..40 by a mask: kernel 6.1's verifier loses the bounds when clang keeps a second copy of the length. */
	words = tcp->doff - OPTIONS_USUAL_LENGTH / 4 - sizeof(*tcp) / 4;
	barrier_var(words);
	length = (words & 7) * 4 + OPTIONS_USUAL_LENGTH;
	if (bpf_skb_load_bytes(skb, segment->tcp_offset + sizeof(*tcp), &options, length))
		return LOCATED_MALFORMED;
	offset = find_timestamp(&options, length);
	if (offset >= 0 && offset <= TCP_OPTIONS_MAX - TCP_TIMESTAMP_LENGTH)
		take_timestamp(segment, offset, &options.bytes[offset]);
	return LOCATED_TCP;
}

/*
 * Makes all headers linear. (Afterwards the caller reads skb->data anew: clang must not take the old values for the new
 * ones.)
 */
static __always_inline int pull_headers(struct __sk_buff *skb)
{
	int failed = bpf_skb_pull_data(skb, skb->len < HEADERS_MAX ? skb->len : HEADERS_MAX);

	barrier();
	return failed;
}

/* Replaces one 32-bit word of the timestamp option and mends the checksum: both, or the packet is dropped. */
static __always_inline int rewrite(struct __sk_buff *skb, const struct segment *segment, __u32 option_offset,
				   __be32 old, __be32 new)
{
	__u32 checksum_offset = segment->tcp_offset + __builtin_offsetof(struct tcphdr, check);

	if (bpf_skb_store_bytes(skb, segment->tcp_offset + option_offset, &new, sizeof(new), 0)) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	/* The checksum adds 16-bit words: at an odd offset each byte counts in the other half (RFC 1071, Sect. 2 B). */
	if (option_offset & 1) {
		old = old << 8 | old >> 24;
		new = new << 8 | new >> 24;
	}
	if (bpf_l4_csum_replace(skb, checksum_offset, old, new, sizeof(new))) {
		count(SERVER_COUNTER_DROP_NO_MEMORY);
		return TC_ACT_SHOT;
	}
	return TC_ACT_UNSPEC;
}

static __always_inline struct flow_key flow_of(__u32 client_address, __u32 vip_address, __u32 client_ports)
{
	struct flow_key flow = {
		.client_address = {0, 0, bpf_htonl(0xffff), client_address},
		.vip_address = {0, 0, bpf_htonl(0xffff), vip_address},
		.client_port = client_ports,
		.vip_port = client_ports >> 16,
	};

	return flow;
}

/* ---- egress ---------------------------------------------------------------------------------------------------- */

/*
 * The hold rule where it may apply (essay, 4): the time part to send for the server's own TSval `milliseconds`, when the
 * client's last echo was restored to `last_echo`.
 */
static __noinline __u32 time_to_send(const struct segment *segment, __u32 milliseconds, __u32 last_echo)
{
	struct flow_key flow = flow_of(segment->destination_address, segment->source_address, swapped(segment->ports));
	struct held_timestamp *held = bpf_map_lookup_elem(&held_timestamps, &flow), next = {};
	__u16 time = milliseconds, recent = last_echo;

	if (held && held->original == last_echo) {
		recent = held->sent;
	} else if (held && (__u16)(recent + LARGEST_STEP_MS) == held->sent &&
		   milliseconds - last_echo > LARGEST_STEP_MS) {
		/* Not echoed so far, or the echo is still on its way from ingress to TCP. */
		state.last_hold_ms = milliseconds;
		count(SERVER_COUNTER_HELD);
		return held->sent;
	}
	if ((__u16)(time - recent) <= LARGEST_STEP_MS)
		return time;
	next.sent = recent + LARGEST_STEP_MS;
	next.original = milliseconds;
	bpf_map_update_elem(&held_timestamps, &flow, &next, BPF_ANY);
	state.last_hold_ms = milliseconds;
	count(SERVER_COUNTER_HELD);
	return next.sent;
}

/* Whether a packet's TSval is CLOCK_MONOTONIC in ms, for packets that belong to no established socket. */
static __always_inline bool plain_clock(__u32 milliseconds)
{
	__u32 now = bpf_ktime_get_ns() / NANOSECONDS_PER_MS;

	return now + RESTORE_SLACK_MS - milliseconds < PLAIN_CLOCK_WINDOW_MS;
}

/* The cookie with its time part, never 0: a client would read that as "no echo" (RFC 7323, Sect. 3.2). */
static __always_inline __u32 stamp(const struct segment *segment, __u32 server_id, __u32 time)
{
	__u32 index = state.keys.current & 1;
	__u64 hash = cookie_hash(&state.keys.key[index], segment->destination_address, segment->source_address,
				 swapped(segment->ports));
	__u32 low = ((server_id & COOKIE_ID_MASK) ^ cookie_id_mask(hash)) | index * COOKIE_KEY_BIT;
	__u32 stamped = (time + cookie_time_mask(hash)) << COOKIE_TIME_SHIFT | low;

	return stamped ? stamped : 1u << COOKIE_TIME_SHIFT;
}

SEC("tc")
int server_egress(struct __sk_buff *skb)
{
	struct segment segment = {};
	struct tcp_sock *socket = NULL;
	struct bpf_sock *sk;
	enum located located;
	__u32 milliseconds, time, last_echo, server_id;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return TC_ACT_UNSPEC;
	located = locate(skb, &segment);
	if (located == LOCATED_BEYOND_LINEAR) {
		if (pull_headers(skb))
			return TC_ACT_UNSPEC;
		located = locate(skb, &segment);
	}
	if (located != LOCATED_TCP)
		return TC_ACT_UNSPEC;
	server_id =
		find_service(&state.directories, service_tail_ipv4(segment.source_address, segment.ports, IPPROTO_TCP));
	if (server_id >= SERVER_ID_COUNT)
		return TC_ACT_UNSPEC;
	located = locate_timestamp(skb, &segment);
	if (located == LOCATED_BEYOND_LINEAR && !pull_headers(skb))
		located = locate_timestamp(skb, &segment);
	if (located != LOCATED_TCP || segment.timestamp == NO_TIMESTAMP) {
		count(SERVER_COUNTER_EGRESS_WITHOUT_TIMESTAMP);
		return TC_ACT_UNSPEC;
	}

	milliseconds = bpf_ntohl(segment.value);
	time = milliseconds;
	sk = skb->sk;
	/*
	 * SYN-ACKs belong to a request or to no socket. The kernel's socket for answers without one (TIME-WAIT before
	 * 6.13) claims to be TCP, but is raw: only its state, CLOSE, tells.
	 */
	if (sk && !segment.syn && sk->state != TCP_CLOSE)
		socket = bpf_skc_to_tcp_sock(sk);
	if (socket) {
		if (socket->tsoffset ||
		    (bpf_core_field_exists(socket->tcp_usec_ts) && BPF_CORE_READ_BITFIELD(socket, tcp_usec_ts))) {
			count(SERVER_COUNTER_EGRESS_OTHER_CLOCK);
			return TC_ACT_UNSPEC;
		}
		last_echo = socket->rx_opt.rcv_tsecr;
		/* An echo from the future is forged: not held. */
		if (last_echo && (__s32)(milliseconds - last_echo) >= 0 &&
		    (milliseconds - last_echo > LARGEST_STEP_MS ||
		     milliseconds - state.last_hold_ms <= LARGEST_STEP_MS))
			time = time_to_send(&segment, milliseconds, last_echo);
	} else if (!plain_clock(milliseconds)) {
		count(SERVER_COUNTER_EGRESS_OTHER_CLOCK);
		return TC_ACT_UNSPEC;
	}
	count(SERVER_COUNTER_STAMPED);
	return rewrite(skb, &segment, segment.timestamp, segment.value, bpf_htonl(stamp(&segment, server_id, time)));
}

/* ---- ingress --------------------------------------------------------------------------------------------------- */

/* Compares the queue that a SYN came by with the predicted one (essay, 7). */
static __noinline void sample_rss(struct __sk_buff *skb, const struct segment *segment)
{
	__u32 hash = 0, sequence, predicted;
	struct rss_sample *sample;

	predicted = predicted_queue(segment->source_address, segment->destination_address, segment->ports, &hash);
	/* skb_record_rx_queue() keeps queue + 1; 0: none was recorded. */
	if (predicted == QUEUE_UNKNOWN || !skb->queue_mapping) {
		count(SERVER_COUNTER_RSS_UNPREDICTED);
		return;
	}
	count(predicted == skb->queue_mapping - 1 ? SERVER_COUNTER_RSS_MATCHED : SERVER_COUNTER_RSS_MISMATCHED);
	sequence = __sync_fetch_and_add(&state.sample_sequence, 1);
	sample = &state.samples[sequence & (RSS_SAMPLES - 1)];
	sample->source_address = segment->source_address;
	sample->destination_address = segment->destination_address;
	sample->source_port = segment->ports;
	sample->destination_port = high_half(segment->ports);
	sample->hash = hash;
	sample->predicted_queue = predicted;
	sample->actual_queue = skb->queue_mapping - 1;
	barrier();
	sample->sequence = sequence + 1;
}

/* Whether this host has a socket of exactly that 4-tuple: established, requested or in TIME-WAIT; not a listening one. */
static __noinline bool socket_is_here(struct __sk_buff *skb, const struct segment *segment)
{
	struct bpf_sock_tuple tuple = {
		.ipv4.saddr = segment->source_address,
		.ipv4.daddr = segment->destination_address,
		.ipv4.sport = segment->ports,
		.ipv4.dport = segment->ports >> 16,
	};
	struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	bool here;

	if (!sk)
		return false;
	here = sk->state != TCP_LISTEN;
	bpf_sk_release(sk);
	return here;
}

/* The server's own TSval that an echo's time part stands for: the latest not after now (and slack) with these bits. */
static __always_inline __u32 restored(const struct segment *segment, __u16 time)
{
	__u32 now = bpf_ktime_get_ns() / NANOSECONDS_PER_MS;
	__u32 reference = now + RESTORE_SLACK_MS;
	struct held_timestamp *held;
	struct flow_key flow;

	if (now - state.last_hold_ms > LARGEST_STEP_MS)
		return reference - (__u16)(reference - time);
	flow = flow_of(segment->source_address, segment->destination_address, segment->ports);
	held = bpf_map_lookup_elem(&held_timestamps, &flow);
	if (held && held->sent == time) {
		if (!held->confirmed) {
			held->confirmed = 1;
			count(SERVER_COUNTER_HELD_CONFIRMED);
		}
		return held->original;
	}
	/* The client has gone on: from now on these 16 bits may come from the clock again. */
	if (held && held->confirmed)
		bpf_map_delete_elem(&held_timestamps, &flow);
	return reference - (__u16)(reference - time);
}

static __always_inline int restore(struct __sk_buff *skb, const struct segment *segment, __u32 server_id)
{
	__u32 echo = bpf_ntohl(segment->echo);
	__u64 hash = cookie_hash(&state.keys.key[cookie_key_index(echo)], segment->source_address,
				 segment->destination_address, segment->ports);

	if (((echo ^ cookie_id_mask(hash)) & COOKIE_HIDDEN_MASK) != server_id) {
		count(SERVER_COUNTER_INGRESS_OTHER_COOKIE);
		return TC_ACT_UNSPEC;
	}
	count(SERVER_COUNTER_RESTORED);
	return rewrite(skb, segment, segment->timestamp + sizeof(segment->value), segment->echo,
		       bpf_htonl(restored(segment, (echo >> COOKIE_TIME_SHIFT) - cookie_time_mask(hash))));
}

SEC("tc")
int server_ingress(struct __sk_buff *skb)
{
	struct segment segment = {};
	enum located located;
	__u32 server_id;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return TC_ACT_UNSPEC;
	located = locate(skb, &segment);
	if (located == LOCATED_BEYOND_LINEAR) {
		if (pull_headers(skb))
			return TC_ACT_UNSPEC;
		located = locate(skb, &segment);
	}
	if (located != LOCATED_TCP)
		return TC_ACT_UNSPEC;
	if (sample_every_syn && segment.syn && !segment.ack)
		sample_rss(skb, &segment);
	server_id = find_service(&state.directories,
				 service_tail_ipv4(segment.destination_address, high_half(segment.ports), IPPROTO_TCP));
	if (server_id >= SERVER_ID_COUNT || skb->pkt_type == PACKET_OTHERHOST)
		return TC_ACT_UNSPEC;
	if (skb->pkt_type != PACKET_HOST) {
		if (!socket_is_here(skb, &segment)) {
			count(SERVER_COUNTER_TO_ALL_IGNORED);
			return TC_ACT_SHOT;
		}
		count(SERVER_COUNTER_TO_ALL_ACCEPTED);
		bpf_skb_change_type(skb, PACKET_HOST);
	}
	if (!sample_every_syn && segment.syn && !segment.ack)
		sample_rss(skb, &segment);

	located = locate_timestamp(skb, &segment);
	if (located == LOCATED_BEYOND_LINEAR && !pull_headers(skb))
		located = locate_timestamp(skb, &segment);
	if (located != LOCATED_TCP) {
		count(SERVER_COUNTER_DROP_MALFORMED_TCP);
		return TC_ACT_SHOT;
	}
	if (segment.syn || segment.timestamp == NO_TIMESTAMP || !segment.echo) {
		count(SERVER_COUNTER_INGRESS_WITHOUT_ECHO);
		return TC_ACT_UNSPEC;
	}
	return restore(skb, &segment, server_id);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
