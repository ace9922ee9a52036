/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * EMULATION of receive-side scaling (RSS) for the testbed's virtual Ethernet. No coreward process needs this program,
 * because on a real server the NIC does its work.
 *
 * It runs at tc egress of the switch's port toward one server, which is the last hop before that server. It cannot run
 * on the load balancer's own device, because XDP_TX skips tc. This is why a bridge connects load balancer and servers.
 *
 * Every frame reaches the server unchanged. For IPv4 and IPv6 the program computes the Toeplitz hash over addresses and
 * ports (TCP and UDP) or over addresses only (other protocols, and all fragments, as NICs do), looks up the indirection
 * table and stores both as a NIC's driver does: skb->hash, and queue_mapping = queue + 1 ("receive queue recorded").
 * Everything else goes to queue 0.
 *
 * Why + 2: netdev_pick_tx() (net/core/dev.c) takes queue_mapping as receive queue + 1 and makes queue_mapping - 1 the
 * port's transmit queue. veth_xmit() (drivers/net/veth.c) does not change that number, and since Linux 5.17 does not
 * call skb_record_rx_queue() itself. So the number that we write arrives reduced by 1. The port has one more transmit
 * queue than the server has receive queues, so that the last one still fits. If the server has rings
 * (TestbedOptions::has_rings), its device also has one more receive queue, because veth_xmit() takes the number for
 * that of a ring, and ring 0 is never used.
 *
 * Limits: The kernel takes a queue that the device does not have modulo the number of queues (skb_tx_hash()). While the
 * agent writes new registers, some frames may meet a mixture of old and new ones, as on a real NIC. "Registers" that
 * were never written (entry_count 0) send everything to queue 0.
 *
 * The hash is the XOR of one table entry per byte of input, which is possible because Toeplitz is linear. A loop over
 * the input's bits would make the verifier fork at every bit, beyond its limit of a million instructions.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "ipv6_header.h"
#include "server/rss_input.h"

#define TCP_FLAGS_OFFSET 13
#define TCP_SYN 0x02
#define IPV4_FRAGMENT_BITS 0x3fff /* "more fragments" and the offset, without "don't fragment" */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct emulated_rss);
} registers SEC(".maps");

/*
 * Returns the shift of a frame's table entry, which only frames of open TCP connections have. `transport` is the offset
 * of the header above IP.
 */
static __always_inline __u32 established_shift(struct __sk_buff *skb, const struct emulated_rss *rss, __u8 protocol,
					       __u32 transport)
{
	__u8 flags;

	if (!rss->established_shift || protocol != IPPROTO_TCP ||
	    bpf_skb_load_bytes(skb, transport + TCP_FLAGS_OFFSET, &flags, sizeof(flags)))
		return 0;
	return flags & TCP_SYN ? 0 : rss->established_shift;
}

static __always_inline int set_receive_queue(struct __sk_buff *skb, __u32 queue)
{
	skb->queue_mapping = queue + 2;
	return TC_ACT_OK;
}

static __always_inline bool has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP;
}

/* Sets a frame's hash and queue. Without ports the last bytes of `input` are 0, which does not affect the hash. */
static __always_inline int assign_receive_queue(struct __sk_buff *skb, const struct emulated_rss *rss, __u8 *input,
						__u32 length, __u32 shift)
{
	__u32 hash, entry;

	transform_rss_input(rss->mapping.input_transform, input, length);
	hash = toeplitz_of_input(rss->mapping.byte, input, length);
	entry = (hash + shift) & (rss->mapping.entry_count - 1) & (MAX_INDIRECTION_ENTRIES - 1);
	bpf_set_hash(skb, hash);
	return set_receive_queue(skb, rss->mapping.queue[entry]);
}

static __always_inline int receive_ipv4(struct __sk_buff *skb, const struct emulated_rss *rss)
{
	__u8 input[RSS_INPUT_IPV4_BYTES] = {};
	__u32 transport;
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
		return set_receive_queue(skb, 0);
	transport = ETH_HLEN + ip.ihl * 4;
	__builtin_memcpy(input, &ip.saddr, RSS_INPUT_IPV4_ADDRESS_BYTES);
	if (has_ports(ip.protocol) && !(ip.frag_off & bpf_htons(IPV4_FRAGMENT_BITS)) &&
	    bpf_skb_load_bytes(skb, transport, input + RSS_INPUT_IPV4_ADDRESS_BYTES, RSS_INPUT_PORT_BYTES))
		return set_receive_queue(skb, 0);
	return assign_receive_queue(skb, rss, input, sizeof(input),
				    established_shift(skb, rss, ip.protocol, transport));
}

/* NICs differ for frames with extension headers. Here such a frame counts as one without ports. */
static __always_inline int receive_ipv6(struct __sk_buff *skb, const struct emulated_rss *rss)
{
	__u8 input[RSS_INPUT_IPV6_BYTES] = {};
	__u32 shift;
	__u8 next;

	if (bpf_skb_load_bytes(skb, IPV6_FIELD_OFFSET(next_header), &next, sizeof(next)) ||
	    bpf_skb_load_bytes(skb, IPV6_FIELD_OFFSET(source), input, RSS_INPUT_IPV6_BYTES - RSS_INPUT_PORT_BYTES))
		return set_receive_queue(skb, 0);
	if (has_ports(next) &&
	    bpf_skb_load_bytes(skb, IPV6_TRANSPORT_OFFSET, input + RSS_INPUT_IPV6_BYTES - RSS_INPUT_PORT_BYTES,
			       RSS_INPUT_PORT_BYTES))
		return set_receive_queue(skb, 0);
	shift = established_shift(skb, rss, next, IPV6_TRANSPORT_OFFSET);
	return assign_receive_queue(skb, rss, input, sizeof(input), shift);
}

SEC("tc")
int rss_emulation(struct __sk_buff *skb)
{
	const struct emulated_rss *rss;
	__u32 zero = 0;

	rss = bpf_map_lookup_elem(&registers, &zero);
	if (!rss || !rss->mapping.entry_count)
		return set_receive_queue(skb, 0);
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return receive_ipv4(skb, rss);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? receive_ipv6(skb, rss) : set_receive_queue(skb, 0);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
