/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Redirection of requests to the AF_XDP sockets of `coreward orchestrate`, in XDP at its NIC.
 *
 * 1. Requests are frames to the device's MAC address with a UDP datagram over IPv4 to a listener's address and port,
 *    without VLAN tag, IP options or fragmentation. All other frames pass to the kernel.
 *
 * 2. Doubtful requests pass as well, and are counted by reason. The kernel delivers them to the daemon's UDP socket or
 *    drops them. A request from a listener's address is doubtful, because the daemon would answer itself.
 *
 * 3. Sockets. Each receive queue has one. A frame of a queue without a socket passes.
 *
 * 4. Checksums. A sender on this machine (the other end of a veth) leaves the datagram's checksum to a NIC. The field
 *    then has the sum of the pseudo-header, which counts as correct.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "checksum.h"
#include "ipv4_header.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_INTAKE_LISTENERS);
	__type(key, struct intake_listener);
	__type(value, __u8);
} intake_listeners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, MAX_INTAKE_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} intake_sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, INTAKE_COUNTER_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} intake_counters SEC(".maps");

/* The device's MAC address, written before the program is loaded. */
const volatile __u8 device_mac[ETH_ALEN] = {};

/* First byte of an IPv4 header without options, with version 4 and a length of five words. */
#define IPV4_WITHOUT_OPTIONS 0x45
#define IPV4_WORDS 5
#define CORRECT_CHECKSUM 0xffff
/* Number of bytes that one iteration of the checksum's loop adds. */
#define CHECKSUM_STEP_BYTES 64

static __always_inline void count(__u32 counter)
{
	__u64 *found = bpf_map_lookup_elem(&intake_counters, &counter);

	if (found)
		(*found)++;
}

static __always_inline bool is_listener(__u32 address, __u16 port)
{
	struct intake_listener key = {.address = address, .port = port};

	return bpf_map_lookup_elem(&intake_listeners, &key);
}

static __always_inline bool is_for_device(const struct ethhdr *ethernet)
{
	for (int i = 0; i < ETH_ALEN; i++)
		if (ethernet->h_dest[i] != device_mac[i])
			return false;
	return true;
}

/* Returns `sum` plus `length` bytes, at most MAX_INTAKE_DATAGRAM. The addition ends early at `data_end`. */
static __always_inline __u64 add_to_checksum(__u64 sum, const void *cursor, __u32 length, const void *data_end)
{
#pragma clang loop unroll(disable)
	for (int i = 0; i < MAX_INTAKE_DATAGRAM / CHECKSUM_STEP_BYTES; i++) {
		const __u32 *words = cursor;

		if (length < CHECKSUM_STEP_BYTES || cursor + CHECKSUM_STEP_BYTES > data_end)
			break;
		for (int word = 0; word < CHECKSUM_STEP_BYTES / 4; word++)
			sum += words[word];
		cursor += CHECKSUM_STEP_BYTES;
		length -= CHECKSUM_STEP_BYTES;
	}
#pragma clang loop unroll(disable)
	for (int i = 0; i < CHECKSUM_STEP_BYTES / 4; i++) {
		if (length < 4 || cursor + 4 > data_end)
			break;
		sum += *(const __u32 *)cursor;
		cursor += 4;
		length -= 4;
	}
	if (length & 2 && cursor + 2 <= data_end) {
		sum += *(const __u16 *)cursor;
		cursor += 2;
	}
	if (length & 1 && cursor + 1 <= data_end)
		sum += bpf_htons(*(const __u8 *)cursor << 8);
	return sum;
}

static __always_inline bool is_ip_checksum_correct(const struct iphdr *ip)
{
	const __u32 *words = (const void *)ip;
	__u64 sum = 0;

	for (int word = 0; word < IPV4_WORDS; word++)
		sum += words[word];
	return fold_long_checksum(sum) == CORRECT_CHECKSUM;
}

static __always_inline bool is_udp_checksum_correct(const struct iphdr *ip, const struct udphdr *udp,
						    const void *data_end)
{
	__u64 pseudo_header = (__u64)ip->saddr + ip->daddr + bpf_htons(IPPROTO_UDP) + udp->len;

	/* A checksum of 0 means that the sender has computed none. */
	if (!udp->check || udp->check == fold_long_checksum(pseudo_header))
		return true;
	return fold_long_checksum(add_to_checksum(pseudo_header, udp, bpf_ntohs(udp->len), data_end)) ==
	       CORRECT_CHECKSUM;
}

/* Returns whether the datagram fills the IP packet, and the frame holds it. */
static __always_inline bool is_length_valid(const struct iphdr *ip, const struct udphdr *udp, const void *data_end)
{
	__u32 datagram = bpf_ntohs(udp->len), packet = bpf_ntohs(ip->tot_len);
	__u32 available = data_end - (const void *)ip;

	return datagram >= sizeof(*udp) && datagram <= MAX_INTAKE_DATAGRAM && packet == sizeof(*ip) + datagram &&
	       packet <= available;
}

/* Returns whether a client can have the source, which excludes network 0, loopback, multicast, reserved (RFC 6890). */
static __always_inline bool is_client(const struct iphdr *ip, const struct udphdr *udp)
{
	__u32 network = bpf_ntohl(ip->saddr) >> 24;

	return network && network != IN_LOOPBACKNET && network < 224 && udp->source &&
	       !is_listener(ip->saddr, udp->source);
}

static __always_inline enum intake_counter classify_datagram(const struct iphdr *ip, const struct udphdr *udp,
							     __u32 queue, const void *data_end)
{
	if (!is_length_valid(ip, udp, data_end))
		return INTAKE_COUNTER_PASSED_LENGTH;
	if (!is_ip_checksum_correct(ip) || !is_udp_checksum_correct(ip, udp, data_end))
		return INTAKE_COUNTER_PASSED_CHECKSUM;
	if (!is_client(ip, udp))
		return INTAKE_COUNTER_PASSED_SOURCE;
	if (!bpf_map_lookup_elem(&intake_sockets, &queue))
		return INTAKE_COUNTER_PASSED_NO_SOCKET;
	return INTAKE_COUNTER_REDIRECTED;
}

SEC("xdp")
int intake(struct xdp_md *ctx)
{
	const void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;
	const struct ethhdr *ethernet = data;
	const struct iphdr *ip = (const void *)(ethernet + 1);
	const struct udphdr *datagram = (const void *)(ip + 1);
	enum intake_counter outcome;

	if ((const void *)(datagram + 1) > data_end || ethernet->h_proto != bpf_htons(ETH_P_IP) ||
	    !is_for_device(ethernet))
		return XDP_PASS;
	if (*(const __u8 *)ip != IPV4_WITHOUT_OPTIONS || ip->protocol != IPPROTO_UDP ||
	    ip->frag_off & bpf_htons(IP_FRAGMENT_MASK) || !is_listener(ip->daddr, datagram->dest))
		return XDP_PASS;
	outcome = classify_datagram(ip, datagram, ctx->rx_queue_index, data_end);
	count(outcome);
	return outcome == INTAKE_COUNTER_REDIRECTED ? bpf_redirect_map(&intake_sockets, ctx->rx_queue_index, XDP_PASS)
						    : XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
