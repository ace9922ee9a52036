/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * VLANs (IEEE 802.1Q), in which frames of clients and of servers may be tagged.
 *
 * The tag of a frame to this device is removed first, so that all other steps see untagged frames. The returned action
 * has the VLAN of the server, whose tag is inserted last. An action without a VLAN keeps the frame's tag. This applies
 * to packets that pass, ICMP errors to senders, and packets to other load balancers, which are in the VIPs' VLAN.
 *
 * The driver must leave tags in frames (`ethtool -K DEVICE rxvlan off`), because XDP cannot read a stripped tag.
 */
#ifndef COREWARD_LB_VLAN_H
#define COREWARD_LB_VLAN_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "parse.h"
#include "rewrite.h"
#include "state.h"
#include "stats.h"

/* Whether the VIPs or a server are in a VLAN, fixed at load time. */
const volatile bool vlans_in_use;
/* VLAN of clients' packets, or 0 for none, fixed at load time. */
const volatile __u16 vip_vlan;

#define VLAN_TAG_LENGTH 4
/* Parts of a tag (TCI): priority with drop eligibility, and the VLAN's id. */
#define VLAN_PRIORITY_MASK 0xf000u
#define VLAN_ID_MASK 0xfffu
/* Bit above the TCI that marks a tagged frame. */
#define VLAN_TAG_PRESENT 0x10000u

/* Parts of a returned action, namely the XDP action, and the sent frame's VLAN if it is not the received frame's. */
#define ACTION_MASK 0xff
#define ACTION_HAS_VLAN 0x100
#define ACTION_VLAN_SHIFT 16

static __always_inline int transmit_in_vlan(__u32 vlan)
{
	return XDP_TX | ACTION_HAS_VLAN | (vlan & VLAN_ID_MASK) << ACTION_VLAN_SHIFT;
}

static __always_inline int transmit_to_server(__u32 id)
{
	if (!vlans_in_use)
		return XDP_TX;
	barrier_var(id);
	return transmit_in_vlan(lb_state.server_vlans[id & (SERVER_ID_COUNT - 1)]);
}

static __always_inline __u64 broadcast_vlan(__u32 service)
{
	return *(const volatile __u64 *)&lb_state.services[service & (MAX_SERVICES - 1)].broadcast_vlan;
}

/* Returns whether one frame can reach all servers of the service, because they are in one VLAN. */
static __always_inline bool has_broadcast_vlan(__u32 service)
{
	return !vlans_in_use || broadcast_vlan(service) != NO_BROADCAST_VLAN;
}

static __always_inline int transmit_broadcast(__u32 service)
{
	return vlans_in_use ? transmit_in_vlan(broadcast_vlan(service)) : XDP_TX;
}

/* Tag of the current frame with VLAN_TAG_PRESENT, or 0. It is in a map because lb() has no stack left. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} frame_tag SEC(".maps");

static __always_inline __u32 *stored_frame_tag(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&frame_tag, &zero);
}

/* Removes the tag of a frame to this device. Returns the tag with VLAN_TAG_PRESENT, or 0 if the frame is unchanged. */
static __always_inline __u32 pop_vlan_tag(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *data_end = (void *)(long)ctx->data_end;
	__u32 tag, source_end;
	__u64 start;

	if (data + ETH_HLEN + VLAN_TAG_LENGTH > data_end || PACKET_U16(data, ETH_HLEN - 2) != bpf_htons(ETH_P_8021Q) ||
	    !is_for_own_mac(data))
		return 0;
	tag = VLAN_TAG_PRESENT | bpf_ntohs(PACKET_U16(data, ETH_HLEN));
	start = PACKET_U64(data, 0);
	source_end = PACKET_U32(data, 8);
	if (bpf_xdp_adjust_head(ctx, VLAN_TAG_LENGTH))
		return 0;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + ETH_HLEN > data_end)
		return 0;
	PACKET_U64(data, 0) = start;
	PACKET_U32(data, 8) = source_end;
	return tag;
}

/* Removes and stores the tag of a frame to this device. Returns whether the frame is in the VIPs' VLAN. */
static __noinline int pop_and_store_vlan_tag(struct xdp_md *ctx)
{
	__u32 *present = stored_frame_tag();
	__u32 tag;

	if (!present)
		return 0;
	tag = pop_vlan_tag(ctx);
	*present = tag;
	return (tag & VLAN_ID_MASK) == vip_vlan;
}

/* Inserts a tag. Returns false if the frame could not be extended. */
static __always_inline bool insert_tag(struct xdp_md *ctx, __u32 tag)
{
	void *data, *data_end;
	__u32 source_end;
	__u64 start;

	if (bpf_xdp_adjust_head(ctx, -VLAN_TAG_LENGTH))
		return false;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	if (data + VLAN_TAG_LENGTH + ETH_HLEN > data_end)
		return false;
	start = PACKET_U64(data, VLAN_TAG_LENGTH);
	source_end = PACKET_U32(data, VLAN_TAG_LENGTH + 8);
	PACKET_U64(data, 0) = start;
	PACKET_U32(data, 8) = source_end;
	PACKET_U16(data, ETH_HLEN - 2) = bpf_htons(ETH_P_8021Q);
	PACKET_U16(data, ETH_HLEN) = bpf_htons(tag);
	return true;
}

/*
 * Inserts the tag of the sent frame. It is that of the action's VLAN with the removed tag's priority, or else the
 * removed tag. Returns the XDP action.
 */
static __noinline int tag_frame(struct xdp_md *ctx, int action)
{
	__u32 vlan = action >> ACTION_VLAN_SHIFT & VLAN_ID_MASK;
	int xdp_action = action & ACTION_MASK;
	__u32 *present = stored_frame_tag();
	__u32 tag = present ? *present : 0;

	if (action & ACTION_HAS_VLAN)
		tag = vlan ? VLAN_TAG_PRESENT | (tag & VLAN_PRIORITY_MASK) | vlan : 0;
	if (!tag || xdp_action == XDP_DROP || insert_tag(ctx, tag))
		return xdp_action;
	return drop(ctx, LB_COUNTERS_NO_SERVICE, LB_COUNTER_DROP_INTERNAL);
}

#endif
