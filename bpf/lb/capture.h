/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Capture of the program's decisions for `coreward capture`, because tcpdump does not see packets that XDP forwards or
 * drops.
 *
 * The command attaches a capturing variant in place of the present program, with the same maps and the same constants.
 * At the end it restores the former program. (fentry and fexit programs would not replace the program, but some kernels
 * reject them, for example in lockdown.)
 *
 * Each frame that may belong to the captured service goes to user space twice by a perf buffer, first on arrival, and
 * then with action and outcome. The outcome is the last one that count_packet() stored in this receive queue's (or
 * CPU's) row, for the service or for "no service". Both are cleared on arrival.
 *
 * When the buffer is full a record is lost, which the sequence shows. After a SIGKILL of the command this variant stays
 * attached until the daemon or the next capture replaces it.
 */
#ifndef COREWARD_LB_CAPTURE_H
#define COREWARD_LB_CAPTURE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "fast_path_ipv6.h"
#include "ipv6_header.h"
#include "parse.h"
#include "stats.h"

/* The captured service. Address and port are in network byte order. */
const volatile struct {
	__u32 vip;
	__u32 service;
	/* Maximum number of captured bytes per frame. */
	__u32 length;
	__u16 port;
	__u8 protocol;
	/* Address family (ADDRESS_FAMILY_*). */
	__u8 family;
	__u64 vip_ipv6[2];
} capture_of;

struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} captured SEC(".maps");

__u64 capture_sequences[MAX_CPUS] SEC(".bss.capture");
/* Whether a CPU's current frame is captured. */
__u64 is_captured[MAX_CPUS] SEC(".bss.capture");

/* Value of `last_outcome` that is no enum lb_counter. */
#define NO_OUTCOME 0xffffffffu

/* matches_capture_service() for IPv6, where extension headers may hide the port. */
static __always_inline bool matches_capture_service_ipv6(const void *data, const void *data_end)
{
	__u8 next;

	if (!is_ipv6_frame(data, data_end) ||
	    PACKET_U64(data, IPV6_FIELD_OFFSET(destination)) != capture_of.vip_ipv6[0] ||
	    PACKET_U64(data, IPV6_FIELD_OFFSET(destination) + 8) != capture_of.vip_ipv6[1])
		return false;
	next = PACKET_U8(data, IPV6_FIELD_OFFSET(next_header));
	if (next == NEXT_ICMPV6 || is_extension_header(next))
		return true;
	if (next != capture_of.protocol)
		return false;
	if (data + IPV6_TRANSPORT_OFFSET + sizeof(__u32) > data_end)
		return true;
	return PACKET_U16(data, IPV6_TRANSPORT_OFFSET + 2) == capture_of.port;
}

/* Returns whether the frame may belong to the captured service. Fragments, ICMP and broken headers have no port. */
static __always_inline bool matches_capture_service(const void *data, const void *data_end)
{
	__u32 header_length;
	__u8 protocol;

	if (capture_of.family == ADDRESS_FAMILY_IPV6)
		return matches_capture_service_ipv6(data, data_end);
	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return false;
	if (PACKET_U16(data, ETH_HLEN - 2) != bpf_htons(ETH_P_IP) ||
	    PACKET_U32(data, IP_FIELD_OFFSET(daddr)) != capture_of.vip)
		return false;
	protocol = PACKET_U8(data, IP_FIELD_OFFSET(protocol));
	if (protocol == IPPROTO_ICMP)
		return true;
	if (protocol != capture_of.protocol)
		return false;
	header_length = (PACKET_U8(data, ETH_HLEN) & 0xf) * 4;
	if (header_length < sizeof(struct iphdr) ||
	    PACKET_U16(data, IP_FIELD_OFFSET(frag_off)) & bpf_htons(IP_FRAGMENT_OFFSET))
		return true;
	data += ETH_HLEN + header_length;
	if (data + sizeof(__u32) > data_end)
		return true;
	return PACKET_U16(data, 2) == capture_of.port;
}

static __always_inline void send_captured(struct xdp_md *ctx, struct captured_packet *packet)
{
	__u32 length = ctx->data_end - ctx->data;
	__u64 flags = BPF_F_CURRENT_CPU;

	packet->time_ns = bpf_ktime_get_ns();
	packet->sequence = capture_sequences[bpf_get_smp_processor_id() & (MAX_CPUS - 1)];
	packet->length = length;
	packet->captured_length = length < capture_of.length ? length : capture_of.length;
	bpf_perf_event_output(ctx, &captured, flags | (__u64)packet->captured_length << 32, packet, sizeof(*packet));
}

/* Sends the frame to user space before the decision. Returns 0. */
static __noinline int capture_arrived(struct xdp_md *ctx)
{
	struct captured_packet packet = {.action = CAPTURE_ARRIVED};
	__u32 cpu = bpf_get_smp_processor_id() & (MAX_CPUS - 1);
	struct lb_counters *of_service, *of_none;

	is_captured[cpu] = 0;
	if (!matches_capture_service((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		return 0;
	of_service = counters_of(ctx, capture_of.service);
	of_none = counters_of(ctx, LB_COUNTERS_NO_SERVICE);
	if (!of_service || !of_none)
		return 0;
	of_service->last_outcome = of_none->last_outcome = NO_OUTCOME;
	is_captured[cpu] = 1;
	capture_sequences[cpu]++;
	send_captured(ctx, &packet);
	return 0;
}

/* Sends frame, action and outcome to user space after the decision. Returns 0. */
static __noinline int capture_decided(struct xdp_md *ctx, int action)
{
	struct captured_packet packet = {.action = action, .outcome = NO_OUTCOME};
	const struct lb_counters *of_service, *of_none;

	if (!is_captured[bpf_get_smp_processor_id() & (MAX_CPUS - 1)])
		return 0;
	of_service = counters_of(ctx, capture_of.service);
	of_none = counters_of(ctx, LB_COUNTERS_NO_SERVICE);
	if (of_service && of_none)
		packet.outcome =
			of_service->last_outcome != NO_OUTCOME ? of_service->last_outcome : of_none->last_outcome;
	send_captured(ctx, &packet);
	return 0;
}

#endif
