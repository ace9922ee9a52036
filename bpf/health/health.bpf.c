/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Address translation at a load balancer's device, which lets a health check reach one server at the VIP.
 *
 * 1. Reason. Every server holds the VIP, and an application often listens only there, so a check must reach the VIP at
 *    one server. A routing table and a rule per server would be the alternative. But they remain when the daemon dies,
 *    and are searched for every packet of the machine. They fail if the load balancer announces the VIP from its own
 *    loopback, or if rp_filter expects the VIP at another device.
 *
 * 2. Method. The check connects to the server's own address. At tc egress, behind the IP layer, the VIP replaces this
 *    destination. At tc ingress, the server's own address replaces the reply's source. Routing, neighbours, rp_filter
 *    and netfilter of the load balancer see a connection to the server's own address, while the server sees a
 *    connection to the VIP.
 *
 * 3. Rewritten packets are those in `checked_paths`, which has an entry per direction. An entry is made before the
 *    check connects and removed after its socket is closed. Packets forwarded by XDP do not reach this program.
 *
 * 4. The daemon holds the programs, which end with it.
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
#include "ipv6_header.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_NAT_ENTRIES);
	__type(key, struct nat_entry);
	__type(value, struct nat_address);
} checked_paths SEC(".maps");

/* Offset of the TCP header. Packets of the kernel's own sockets, and the replies, have no IP options. */
#define TCP_HEADER_OFFSET (ETH_HLEN + sizeof(struct iphdr))

/* Makes the packet's first `length` bytes linear, and returns their new start, or NULL if the packet is shorter. */
static __always_inline void *pull_linear_headers(struct __sk_buff *skb, __u32 length)
{
	if (skb->data_end - skb->data < length && bpf_skb_pull_data(skb, length))
		return NULL;
	return (void *)(long)skb->data + length > (void *)(long)skb->data_end ? NULL : (void *)(long)skb->data;
}

/* Fills the ports of `path`, and returns the address that replaces the packet's, or NULL without a health check. */
static __always_inline const struct nat_address *find_address(struct nat_entry *path, const struct tcphdr *tcp,
							      bool from_server)
{
	path->port = from_server ? tcp->source : tcp->dest;
	path->own_port = from_server ? tcp->dest : tcp->source;
	return bpf_map_lookup_elem(&checked_paths, path);
}

static __always_inline void translate_ipv4(struct __sk_buff *skb, bool from_server)
{
	__u32 offset = ETH_HLEN + (from_server ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	const void *data = pull_linear_headers(skb, TCP_HEADER_OFFSET + sizeof(struct tcphdr));
	const struct iphdr *ip = data + ETH_HLEN;
	struct nat_entry path = {.address.word[2] = bpf_htonl(0xffff)};
	const struct nat_address *found;
	__be32 from, to;

	if (!data || ip->ihl != sizeof(*ip) / 4 || ip->protocol != IPPROTO_TCP)
		return;
	from = path.address.word[3] = from_server ? ip->saddr : ip->daddr;
	found = find_address(&path, data + TCP_HEADER_OFFSET, from_server);
	if (!found)
		return;
	to = found->word[3];
	bpf_l4_csum_replace(skb, TCP_HEADER_OFFSET + offsetof(struct tcphdr, check), from, to,
			    BPF_F_PSEUDO_HDR | sizeof(to));
	bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), from, to, sizeof(to));
	bpf_skb_store_bytes(skb, offset, &to, sizeof(to), 0);
}

static __always_inline void translate_ipv6(struct __sk_buff *skb, bool from_server)
{
	__u32 offset = from_server ? IPV6_FIELD_OFFSET(source) : IPV6_FIELD_OFFSET(destination);
	const void *data = pull_linear_headers(skb, IPV6_TRANSPORT_OFFSET + sizeof(struct tcphdr));
	const struct ipv6_header *ip = data + ETH_HLEN;
	const struct nat_address *found;
	struct nat_entry path = {};
	struct nat_address to;
	__s64 difference;

	if (!data || ip->next_header != IPPROTO_TCP)
		return;
	__builtin_memcpy(&path.address, from_server ? ip->source : ip->destination, sizeof(path.address));
	found = find_address(&path, data + IPV6_TRANSPORT_OFFSET, from_server);
	if (!found)
		return;
	to = *found;
	difference = bpf_csum_diff(path.address.word, sizeof(path.address), to.word, sizeof(to), 0);
	bpf_l4_csum_replace(skb, IPV6_TRANSPORT_OFFSET + offsetof(struct tcphdr, check), 0, difference,
			    BPF_F_PSEUDO_HDR);
	/*
	 * The helper has changed the NIC's packet sum (CHECKSUM_COMPLETE) as is right for IPv4, whose header has a
	 * checksum. In IPv6 the new address compensates for the new TCP checksum, so the sum is restored.
	 */
	bpf_csum_update(skb, difference);
	bpf_skb_store_bytes(skb, offset, &to, sizeof(to), 0);
}

/* Replaces the server's address by the VIP, or the VIP by the server's address. Never drops a packet. */
static __always_inline int translate_address(struct __sk_buff *skb, bool from_server)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		translate_ipv4(skb, from_server);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		translate_ipv6(skb, from_server);
	return TC_ACT_UNSPEC;
}

SEC("tc")
int health_egress(struct __sk_buff *skb)
{
	return translate_address(skb, false);
}

SEC("tc")
int health_ingress(struct __sk_buff *skb)
{
	return translate_address(skb, true);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
