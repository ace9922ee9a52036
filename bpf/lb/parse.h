/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Parsing of a frame.
 *
 * is_fast_path_frame() recognises the common form of an established packet by a few masked comparisons. This form is
 * Ethernet, IPv4 without options, and TCP with ACK whose options begin with NOP NOP TIMESTAMP. It covers 98 to 99.9 %
 * of the packets that Linux, the BSDs and Windows send. parse_*() read everything else and check every field.
 *
 * Every parse_*() returns 0 to continue, or encode_parse_end() if the outcome is decided, which is -1 - enum
 * lb_counter.
 */
#ifndef COREWARD_LB_PARSE_H
#define COREWARD_LB_PARSE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv4_header.h"
#include "ipv6_header.h"
#include "timestamp.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "parse.h is written for little-endian machines");

/* Words in the packet's byte order. They may be unaligned, because the supported CPUs read them in one access. */
typedef __u64 __attribute__((may_alias)) packet_u64;
typedef __u32 __attribute__((may_alias)) packet_u32;
typedef __u16 __attribute__((may_alias)) packet_u16;
#define PACKET_U64(start, offset) (*(packet_u64 *)((__u8 *)(start) + (offset)))
#define PACKET_U32(start, offset) (*(packet_u32 *)((__u8 *)(start) + (offset)))
#define PACKET_U16(start, offset) (*(packet_u16 *)((__u8 *)(start) + (offset)))
#define PACKET_U8(start, offset) (*((__u8 *)(start) + (offset)))

#define IP_FIELD_OFFSET(field) (ETH_HLEN + __builtin_offsetof(struct iphdr, field))

/* Mask of the fragment offset (RFC 8200, Sect. 4.5), which is above the reserved bits and "more fragments". */
#define IPV6_FRAGMENT_OFFSET 0xfff8
#define IPV6_ADDRESS_BYTES 16

#define TCP_FLAGS_OFFSET 13
#define TCP_CHECKSUM_OFFSET 16
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* Masks that bound offsets for the verifier. */
#define TRANSPORT_OFFSET_MASK 0x7f
#define OPTION_OFFSET_MASK 0xff
_Static_assert(ETH_HLEN + 60 + TCP_CHECKSUM_OFFSET <= TRANSPORT_OFFSET_MASK, "60 bytes are the longest IPv4 header");
_Static_assert(TRANSPORT_OFFSET_MASK - TCP_CHECKSUM_OFFSET + 60 <= OPTION_OFFSET_MASK,
	       "60 bytes are the longest TCP header");

/* Fields of a packet for lb.bpf.c. Addresses and ports are in the packet's byte order. */
struct packet {
	/* IPv4 address, or fold_client_address_ipv6() of the IPv6 address. */
	__u32 client_address;
	union {
		/* IPv4 address of the VIP. */
		__u32 vip_address;
		/* Cookie of an IPv6 packet with timestamps. */
		__u32 cookie;
	};
	/* Source port in the low half, destination port in the high one. */
	__u32 ports;
	__u32 tsecr;
	/* TCP flags, or 0 for other protocols. */
	__u8 flags;
	__u8 has_timestamp;
	__u8 protocol;
	/* ADDRESS_FAMILY_IPV6, or 0 for IPv4. */
	__u8 family;
	union {
		/* IPv4 identification, in the packet's byte order. */
		__u16 identification;
		/* Offset in the frame of the client's IPv6 address, next to which is the VIP. */
		__u16 client_offset;
	};
	/* Fragment offset and "more fragments" as in the packet, or 0 if the packet is no fragment. */
	__u16 fragment;
	/* Offset of TSecr in the frame, or 0 without one. */
	__u16 tsecr_offset;
	/* Offsets in the frame of the transport header, and of the packet's end according to the IP header. */
	__u16 transport_offset;
	__u32 end_offset;
};

/* Whether a service has an IPv6 VIP, fixed at load time. */
const volatile bool ipv6_in_use;

static __always_inline bool is_ipv6(const struct packet *packet)
{
	return ipv6_in_use && packet->family == ADDRESS_FAMILY_IPV6;
}

static __always_inline __u64 frame_bytes(const struct xdp_md *ctx)
{
	return (void *)(long)ctx->data_end - (void *)(long)ctx->data;
}

static __always_inline int encode_parse_end(enum lb_counter outcome)
{
	return -1 - (int)outcome;
}

static __always_inline enum lb_counter decode_parse_end(int ended)
{
	return -1 - ended;
}

/* ---- frames of the fast path ------------------------------------------------------------------------------------ */

#define FAST_PATH_TCP_OFFSET (ETH_HLEN + sizeof(struct iphdr))
#define FAST_PATH_OPTIONS_OFFSET (FAST_PATH_TCP_OFFSET + sizeof(struct tcphdr))
/* The options are NOP NOP TIMESTAMP, TSval, TSecr. */
#define FAST_PATH_LENGTH (FAST_PATH_OPTIONS_OFFSET + OPTIONS_ALIGNED_LENGTH)
#define FAST_PATH_TSECR_OFFSET                                                                                         \
	(FAST_PATH_OPTIONS_OFFSET + OPTIONS_ALIGNED_OFFSET + TIMESTAMP_WORDS_OFFSET +                                  \
	 __builtin_offsetof(struct timestamp_words, tsecr))

/* Ethertype IPv4, and version 4 with a header of five words. Big-endian in the packet: 08 00 45 (type of service). */
#define FAST_PATH_ETHERTYPE_MASK 0x00ffffffu
#define FAST_PATH_ETHERTYPE 0x00450008u
/* TCP without fragments. The packet's bytes are: (fragment, 2 bytes) (time to live) (protocol). */
#define FAST_PATH_PROTOCOL_MASK 0xff00ff3fu
#define FAST_PATH_PROTOCOL 0x06000000u
/* ACK without SYN, FIN and RST (which are counted apart), and a data offset of 8 or more, whose top bit is set. */
#define FAST_PATH_FLAGS_MASK 0x1780
#define FAST_PATH_FLAGS 0x1080

/* SYN without ACK, FIN and RST. */
#define FAST_PATH_SYN_FLAGS_MASK 0x1700
#define FAST_PATH_SYN_FLAGS 0x0200

/*
 * First options of nearly all SYNs with timestamps, in the packet's byte order. Linux sends MSS, SACK permitted,
 * timestamps. BSD and macOS send MSS, NOP, window scale, then SACK permitted or two NOPs, then timestamps.
 */
#define SYN_OPTIONS_MSS 0x0402u
#define SYN_OPTIONS_LINUX 0x0a080204u
#define SYN_OPTIONS_NOP_SCALE_MASK 0x00ffffffu
#define SYN_OPTIONS_NOP_SCALE 0x00030301u
#define SYN_OPTIONS_SACK_TIMESTAMP 0x0a080204u
#define SYN_OPTIONS_NOPS_TIMESTAMP 0x0a080101u
/* Offsets of TSecr in both lists of options, from the TCP header on. */
#define SYN_LINUX_TSECR_OFFSET (sizeof(struct tcphdr) + 12)
#define SYN_BSD_TSECR_OFFSET (sizeof(struct tcphdr) + 16)
#define FAST_PATH_SYN_HEADER_LENGTH (SYN_BSD_TSECR_OFFSET + sizeof(__u32))

/* Returns whether a frame of FAST_PATH_LENGTH bytes or more is IPv4 without options, with a whole TCP segment. */
static __always_inline bool is_fast_path_tcp(const void *data, const void *data_end)
{
	__u32 ip_length, data_offset_byte;

	if ((PACKET_U32(data, ETH_HLEN - 2) & FAST_PATH_ETHERTYPE_MASK) != FAST_PATH_ETHERTYPE)
		return false;
	if ((PACKET_U32(data, IP_FIELD_OFFSET(frag_off)) & FAST_PATH_PROTOCOL_MASK) != FAST_PATH_PROTOCOL)
		return false;
	ip_length = bpf_ntohs(PACKET_U16(data, IP_FIELD_OFFSET(tot_len)));
	data_offset_byte = PACKET_U8(data, FAST_PATH_TCP_OFFSET + TCP_FLAGS_OFFSET - 1);
	return ip_length >= sizeof(struct iphdr) + (data_offset_byte >> 4) * 4 &&
	       ETH_HLEN + ip_length <= (__u64)(data_end - data);
}

static __always_inline bool is_fast_path_frame(const void *data, const void *data_end)
{
	if (data + FAST_PATH_LENGTH > data_end)
		return false;
	if ((PACKET_U16(data, FAST_PATH_TCP_OFFSET + TCP_FLAGS_OFFSET - 1) & FAST_PATH_FLAGS_MASK) != FAST_PATH_FLAGS)
		return false;
	return PACKET_U32(data, FAST_PATH_OPTIONS_OFFSET) == OPTIONS_ALIGNED_TIMESTAMP &&
	       is_fast_path_tcp(data, data_end);
}

/*
 * Returns the offset of TSecr in the TCP header of a SYN with the first options above, or 0 for any other segment.
 * `tcp` has FAST_PATH_SYN_HEADER_LENGTH bytes.
 */
static __always_inline __u32 common_syn_tsecr_offset(const void *tcp)
{
	const void *options = tcp + sizeof(struct tcphdr);
	__u32 second, third;

	if ((PACKET_U16(tcp, TCP_FLAGS_OFFSET - 1) & FAST_PATH_SYN_FLAGS_MASK) != FAST_PATH_SYN_FLAGS ||
	    PACKET_U16(options, 0) != SYN_OPTIONS_MSS ||
	    (PACKET_U8(tcp, TCP_FLAGS_OFFSET - 1) >> 4) * 4 < FAST_PATH_SYN_HEADER_LENGTH)
		return 0;
	second = PACKET_U32(options, 4);
	if (second == SYN_OPTIONS_LINUX)
		return SYN_LINUX_TSECR_OFFSET;
	third = PACKET_U32(options, 8);
	if ((second & SYN_OPTIONS_NOP_SCALE_MASK) == SYN_OPTIONS_NOP_SCALE &&
	    (third == SYN_OPTIONS_SACK_TIMESTAMP || third == SYN_OPTIONS_NOPS_TIMESTAMP))
		return SYN_BSD_TSECR_OFFSET;
	return 0;
}

/* Returns the offset of TSecr in a SYN of the fast path, or 0 for any other frame. */
static __always_inline __u32 syn_tsecr_offset(const void *data, const void *data_end)
{
	__u32 tsecr_at;

	if (data + FAST_PATH_TCP_OFFSET + FAST_PATH_SYN_HEADER_LENGTH > data_end)
		return 0;
	tsecr_at = common_syn_tsecr_offset(data + FAST_PATH_TCP_OFFSET);
	return tsecr_at && is_fast_path_tcp(data, data_end) ? FAST_PATH_TCP_OFFSET + tsecr_at : 0;
}

/* ---- any frame ------------------------------------------------------------------------------------------------- */

/* Checks that the frame is IPv4, and has the fixed part of the IPv4 header. */
static __always_inline int parse_ethernet(const void *data, const void *data_end)
{
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	if (PACKET_U16(data, ETH_HLEN - 2) != bpf_htons(ETH_P_IP))
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	return 0;
}

/* Reads the IPv4 header of a frame that parse_ethernet() accepted. */
static __always_inline int parse_ipv4(const void *data, const void *data_end, struct packet *packet)
{
	__u32 version_ihl, header_length, ip_length;

	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return encode_parse_end(LB_COUNTER_PASSED_NOT_SERVICE);
	version_ihl = PACKET_U8(data, ETH_HLEN);
	header_length = (version_ihl & 0xf) * 4;
	ip_length = bpf_ntohs(PACKET_U16(data, IP_FIELD_OFFSET(tot_len)));
	if (version_ihl >> 4 != 4 || header_length < sizeof(struct iphdr) || ip_length < header_length ||
	    ETH_HLEN + ip_length > (__u64)(data_end - data))
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_IPV4);
	packet->client_address = PACKET_U32(data, IP_FIELD_OFFSET(saddr));
	packet->vip_address = PACKET_U32(data, IP_FIELD_OFFSET(daddr));
	packet->protocol = PACKET_U8(data, IP_FIELD_OFFSET(protocol));
	packet->identification = PACKET_U16(data, IP_FIELD_OFFSET(id));
	packet->fragment = bpf_ntohs(PACKET_U16(data, IP_FIELD_OFFSET(frag_off))) & IP_FRAGMENT_MASK;
	packet->transport_offset = ETH_HLEN + header_length;
	packet->end_offset = ETH_HLEN + ip_length;
	return 0;
}

static __always_inline __u32 bounded_transport_offset(const struct packet *packet)
{
	return packet->transport_offset & TRANSPORT_OFFSET_MASK;
}

/* Reads the ports of TCP and UDP. `malformed` is the outcome if the packet ends before the ports. */
static __always_inline int parse_ports(const void *data, const void *data_end, enum lb_counter malformed,
				       struct packet *packet)
{
	if (packet->transport_offset + sizeof(packet->ports) > packet->end_offset)
		return encode_parse_end(malformed);
	data += bounded_transport_offset(packet);
	if (data + sizeof(packet->ports) > data_end)
		return encode_parse_end(malformed);
	packet->ports = PACKET_U32(data, 0);
	return 0;
}

/* Result of load_timestamp() for unreadable options, which cannot occur. */
#define TIMESTAMP_UNREADABLE -3

/*
 * Finds the timestamp among `length` bytes of TCP options, `offset` bytes into the frame. Returns its offset among them
 * and fills `words`, or returns TIMESTAMP_NONE, TIMESTAMP_MALFORMED or TIMESTAMP_UNREADABLE. The caller initialises
 * `words`, because clang may spill undefined values, which the verifier rejects.
 */
static __always_inline int load_timestamp(struct xdp_md *ctx, __u32 offset, __u32 length, struct timestamp_words *words)
{
	/* The options are copied to the stack, where an offset may vary freely. Only the slow path does this. */
	struct tcp_options options = {};
	__u32 last = length - 1;
	int found;

	if (length == 0)
		return TIMESTAMP_NONE;
	/* Clang cannot remove this mask. The comparison with 0 gives kernel 6.1's verifier no bound. */
	barrier_var(last);
	last &= 63;
	if (last >= TCP_OPTIONS_MAX || bpf_xdp_load_bytes(ctx, offset, &options, last + 1))
		return TIMESTAMP_UNREADABLE;
	found = find_timestamp(&options, length);
	if (found < 0)
		return found;
	if (found > TCP_OPTIONS_MAX - TCP_TIMESTAMP_LENGTH)
		return TIMESTAMP_NONE;
	*words = *(const struct timestamp_words *)&options.bytes[found + TIMESTAMP_WORDS_OFFSET];
	return found;
}

/* Reads TSecr from the options of a TCP packet. */
static __always_inline int parse_options(struct xdp_md *ctx, __u32 offset, __u32 length, struct packet *packet)
{
	struct timestamp_words words = {};
	int found = load_timestamp(ctx, offset, length, &words);

	packet->has_timestamp = 0;
	packet->tsecr = 0;
	packet->tsecr_offset = 0;
	if (found == TIMESTAMP_MALFORMED)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_TCP);
	if (found == TIMESTAMP_UNREADABLE)
		return encode_parse_end(LB_COUNTER_DROP_INTERNAL);
	if (found < 0)
		return 0;
	packet->has_timestamp = 1;
	packet->tsecr = bpf_ntohl(words.tsecr);
	packet->tsecr_offset = offset + found + TIMESTAMP_WORDS_OFFSET + sizeof(words.tsval);
	return 0;
}

/* Reads the TCP header after the ports, and accepts any flags. */
static __always_inline int parse_tcp_header(struct xdp_md *ctx, const void *data, const void *data_end,
					    struct packet *packet)
{
	__u32 header_length;

	if (packet->transport_offset + sizeof(struct tcphdr) > packet->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_TCP);
	data += bounded_transport_offset(packet);
	if (data + sizeof(struct tcphdr) > data_end)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_TCP);
	header_length = (PACKET_U8(data, TCP_FLAGS_OFFSET - 1) >> 4) * 4;
	packet->flags = PACKET_U8(data, TCP_FLAGS_OFFSET);
	if (header_length < sizeof(struct tcphdr) || packet->transport_offset + header_length > packet->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_TCP);
	return parse_options(ctx, packet->transport_offset + sizeof(struct tcphdr),
			     header_length - sizeof(struct tcphdr), packet);
}

/* Reads the TCP header of a client's packet, and checks its flags. */
static __always_inline int parse_tcp(struct xdp_md *ctx, const void *data, const void *data_end, struct packet *packet)
{
	int ended = parse_tcp_header(ctx, data, data_end, packet);

	if (ended)
		return ended;
	/* A client's SYN has no ACK, FIN or RST, and only SYN and RST packets have no ACK. */
	if (packet->flags & TCP_SYN ? packet->flags & (TCP_ACK | TCP_FIN | TCP_RST)
				    : !(packet->flags & (TCP_ACK | TCP_RST)))
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_TCP);
	return 0;
}

/*
 * Reads the UDP header after the ports. Its length may be less than that of the IP packet (padding), but not more. In a
 * first fragment it is the length of the whole datagram.
 */
static __always_inline int parse_udp(const void *data, const void *data_end, const struct packet *packet)
{
	__u32 length;

	if (packet->transport_offset + sizeof(struct udphdr) > packet->end_offset)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_UDP);
	data += bounded_transport_offset(packet);
	if (data + sizeof(struct udphdr) > data_end)
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_UDP);
	length = bpf_ntohs(PACKET_U16(data, __builtin_offsetof(struct udphdr, len)));
	if (length < sizeof(struct udphdr) ||
	    (!packet->fragment && packet->transport_offset + length > packet->end_offset))
		return encode_parse_end(LB_COUNTER_DROP_MALFORMED_UDP);
	return 0;
}

#endif
