/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Access ports of a switch (IEEE 802.1Q). A frame from the port's host gets the tag of the port's VLAN, and a frame to
 * the host loses its tag. The bridge ignores tags, so it is also a router between VLANs. But frames that come from a
 * trunk reach only hosts in their own VLAN.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* VLAN id of the port, or 0 for none. Fixed at load time. */
const volatile __u16 vlan;

#define MARK_FROM_TRUNK 0x7c1
#define ID_MASK 0xfff

SEC("tc")
int from_trunk(struct __sk_buff *skb)
{
	skb->mark = MARK_FROM_TRUNK;
	return TC_ACT_UNSPEC;
}

SEC("tc")
int from_host(struct __sk_buff *skb)
{
	if (vlan && bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021Q), vlan))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

SEC("tc")
int to_host(struct __sk_buff *skb)
{
	__u32 id = skb->vlan_present ? skb->vlan_tci & ID_MASK : 0;

	if (skb->mark == MARK_FROM_TRUNK && id != vlan)
		return TC_ACT_SHOT;
	if (skb->vlan_present && bpf_skb_vlan_pop(skb))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
