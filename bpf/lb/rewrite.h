/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Rewriting of packets. The MAC addresses always change. The IP identification or IPv6 flow label can get the bucket's
 * previous server, and TSecr the index of a connection's entry or the server's own time. Checksums are updated by the
 * difference.
 */
#ifndef COREWARD_LB_REWRITE_H
#define COREWARD_LB_REWRITE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "checksum.h"
#include "parse.h"
#include "placement.h"
#include "state.h"

/* Writes new MAC addresses by two stores. The first has all of the destination and 2 bytes of the source. */
static __always_inline void rewrite_mac(void *data, __u64 destination)
{
	__u64 own_shifted = lb_state.own_mac_shifted;

	PACKET_U64(data, 0) = (destination & SERVER_MAC_MASK) | own_shifted >> 16 << 48;
	PACKET_U32(data, 8) = own_shifted >> 32;
}

static __always_inline bool is_for_own_mac(const void *data)
{
	return PACKET_U64(data, 0) << 16 == lb_state.own_mac_shifted;
}

#define IPV6_FLOW_LABEL_MASK 0xfffffu

/* Writes a new IP identification, and updates the checksum (RFC 1624, Eqn. 3). */
static __always_inline void rewrite_identification(void *data, __u16 identification)
{
	__u16 new = bpf_htons(identification);
	__u32 sum =
		(__u16)~PACKET_U16(data, IP_FIELD_OFFSET(check)) + (__u16)~PACKET_U16(data, IP_FIELD_OFFSET(id)) + new;

	PACKET_U16(data, IP_FIELD_OFFSET(id)) = new;
	PACKET_U16(data, IP_FIELD_OFFSET(check)) = ~fold_checksum(sum);
}

/* Writes the lower 16 bits of a new flow label, with 0 above them. No checksum covers it (RFC 8200, Sect. 8.1). */
static __always_inline void rewrite_flow_label(void *data, __u16 label)
{
	__u32 first = PACKET_U32(data, ETH_HLEN);

	PACKET_U32(data, ETH_HLEN) = (first & bpf_htonl(~IPV6_FLOW_LABEL_MASK)) | bpf_htonl(label);
}

/*
 * Writes one word of the timestamp option, `offset` bytes into the frame, and updates the TCP checksum (RFC 1624, Eqn.
 * 3). At an odd offset, bytes count in the other half of the checksum's words (RFC 1071, Sect. 2).
 */
static __always_inline void rewrite_timestamp(void *data, const void *data_end, const struct packet *packet,
					      __u32 offset, __u32 word)
{
	__u32 checksum_at = (packet->transport_offset + TCP_CHECKSUM_OFFSET) & TRANSPORT_OFFSET_MASK;
	__u32 at = offset & OPTION_OFFSET_MASK;
	__u32 old, new = bpf_htonl(word), sum;

	if (data + at + sizeof(new) > data_end || data + checksum_at + sizeof(__u16) > data_end)
		return;
	old = PACKET_U32(data, at);
	PACKET_U32(data, at) = new;
	if ((offset - packet->transport_offset) & 1) {
		old = (old & 0xff00ff) << 8 | (old >> 8 & 0xff00ff);
		new = (new & 0xff00ff) << 8 | (new >> 8 & 0xff00ff);
	}
	sum = (__u16)~PACKET_U16(data, checksum_at);
	sum += (~old & 0xffff) + (~old >> 16) + (new & 0xffff) + (new >> 16);
	PACKET_U16(data, checksum_at) = ~fold_checksum(sum);
}

#endif
