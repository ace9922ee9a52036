/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * At a load balancer's device: lets a health check ask one server at the VIP.
 *
 * 1. Reason. Every server holds the VIP, and an application often listens on nothing else, so a check must reach the
 *    VIP at one server. A routing table and a rule per server would remain when the daemon dies, are searched for every
 *    packet of the machine, and fail if the load balancer announces the VIP from its own loopback, or if rp_filter
 *    expects the VIP elsewhere.
 *
 * 2. Method. The check connects to the server's own address. At tc egress, behind the IP layer, the destination becomes
 *    the VIP; at tc ingress the source of the answer becomes the server's own address again. Routing, neighbours,
 *    rp_filter and netfilter of the load balancer see a connection to the server's own address, the server sees one to
 *    the VIP.
 *
 * 3. Rewritten packets are those in `checked_paths`: an entry per direction, made before the check connects and removed
 *    after its socket is closed. Packets forwarded by XDP do not reach this program.
 *
 * 4. The programs are held by the daemon, and end with it.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CHECKED_PATHS);
	__type(key, struct checked_path);
	__type(value, __be32);
} checked_paths SEC(".maps");

/* The kernel's own packets have no IP options, and neither have their answers. */
#define TCP_AT (ETH_HLEN + sizeof(struct iphdr))
#define HEADERS (TCP_AT + sizeof(struct tcphdr))

/* Whether the linear part of the packet has all headers; it may have moved then. */
static __always_inline bool has_headers(struct __sk_buff *skb)
{
	return skb->data_end - skb->data >= HEADERS || !bpf_skb_pull_data(skb, HEADERS);
}

/* Replaces the server's address by the VIP, or the reverse. Never drops a packet. */
static __always_inline int redirect(struct __sk_buff *skb, bool from_server)
{
	__u32 offset = ETH_HLEN + (from_server ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	struct checked_path path = {};
	void *data, *data_end;
	struct iphdr *ip;
	struct tcphdr *tcp;
	__be32 *found, to;

	if (skb->protocol != bpf_htons(ETH_P_IP) || !has_headers(skb))
		return TC_ACT_UNSPEC;
	data = (void *)(long)skb->data;
	data_end = (void *)(long)skb->data_end;
	if (data + HEADERS > data_end)
		return TC_ACT_UNSPEC;
	ip = data + ETH_HLEN;
	tcp = data + TCP_AT;
	if (ip->ihl != sizeof(*ip) / 4 || ip->protocol != IPPROTO_TCP)
		return TC_ACT_UNSPEC;
	path.address = from_server ? ip->saddr : ip->daddr;
	path.port = from_server ? tcp->source : tcp->dest;
	path.own_port = from_server ? tcp->dest : tcp->source;
	found = bpf_map_lookup_elem(&checked_paths, &path);
	if (!found)
		return TC_ACT_UNSPEC;
	to = *found;
	bpf_l4_csum_replace(skb, TCP_AT + offsetof(struct tcphdr, check), path.address, to,
			    BPF_F_PSEUDO_HDR | sizeof(to));
	bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), path.address, to, sizeof(to));
	bpf_skb_store_bytes(skb, offset, &to, sizeof(to), 0);
	return TC_ACT_UNSPEC;
}

SEC("tc")
int health_egress(struct __sk_buff *skb)
{
	return redirect(skb, false);
}

SEC("tc")
int health_ingress(struct __sk_buff *skb)
{
	return redirect(skb, true);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
