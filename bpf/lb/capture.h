/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Watching the load balancer's program at work, for `coreward capture`: what XDP forwards or drops no tcpdump on that
 * device ever sees.
 *
 * A variant of the program, like its others fixed when it is loaded: the command puts it in the place of the one at the
 * device, on the same maps and with the same constants, and at the end the old one back. So nobody pays for it who does
 * not use it. (Programs at the entry and exit of the other one, fentry and fexit, would leave it in its place; but
 * some kernels refuse them, in lockdown for instance.)
 *
 * Each frame that may be of the service that is watched goes to user space twice, by a perf buffer: as it came, and with
 * the action and the outcome that were decided. The outcome is what count_packet() stored last in the row of this
 * receive queue (or CPU), with the service or with "no service": both are cleared before, so the other one is it.
 *
 * What can go wrong: user space does not keep up, the buffer is full and a record is lost: the sequence shows it. A
 * command that was killed leaves this variant at work, whose records nobody reads, until the daemon or the next capture
 * puts another one in its place.
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
#include "parse.h"
#include "stats.h"

/* The service that is watched; address and port in network byte order. */
const volatile struct {
	__u32 vip;
	__u32 service;
	/* At most so many bytes of a frame. */
	__u32 length;
	__u16 port;
	__u8 protocol;
} capture_of;

struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} captured SEC(".maps");

/* By CPU. */
__u64 capture_sequences[MAX_CPUS] SEC(".bss.capture");

/* No enum lb_counter. */
#define NO_OUTCOME 0xffffffffu

/* Whether the frame is of the service that is watched, or may be: fragments, ICMP and broken headers have no port. */
static __always_inline bool is_watched(const void *data, const void *data_end)
{
	__u32 header_length;
	__u8 protocol;

	if (data + ETH_HLEN + sizeof(struct iphdr) > data_end)
		return false;
	if (PACKET_U16(data, ETH_HLEN - 2) != bpf_htons(ETH_P_IP) || PACKET_U32(data, IP_AT(daddr)) != capture_of.vip)
		return false;
	protocol = PACKET_U8(data, IP_AT(protocol));
	if (protocol == IPPROTO_ICMP)
		return true;
	if (protocol != capture_of.protocol)
		return false;
	header_length = (PACKET_U8(data, ETH_HLEN) & 0xf) * 4;
	if (header_length < sizeof(struct iphdr) || PACKET_U16(data, IP_AT(frag_off)) & bpf_htons(IP_FRAGMENT_OFFSET))
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

/* Before anything is decided. Returns whether the frame is watched. */
static __noinline bool capture_arrived(struct xdp_md *ctx)
{
	struct captured_packet packet = {.action = CAPTURE_ARRIVED};
	struct lb_counters *of_service, *of_none;

	if (!is_watched((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		return false;
	of_service = counters_of(ctx, capture_of.service);
	of_none = counters_of(ctx, LB_COUNTERS_NO_SERVICE);
	if (!of_service || !of_none)
		return false;
	of_service->last_outcome = of_none->last_outcome = NO_OUTCOME;
	capture_sequences[bpf_get_smp_processor_id() & (MAX_CPUS - 1)]++;
	send_captured(ctx, &packet);
	return true;
}

/* Afterwards. */
static __noinline int capture_decided(struct xdp_md *ctx, int action)
{
	struct captured_packet packet = {.action = action, .outcome = NO_OUTCOME};
	const struct lb_counters *of_service = counters_of(ctx, capture_of.service);
	const struct lb_counters *of_none = counters_of(ctx, LB_COUNTERS_NO_SERVICE);

	if (of_service && of_none)
		packet.outcome =
			of_service->last_outcome != NO_OUTCOME ? of_service->last_outcome : of_none->last_outcome;
	send_captured(ctx, &packet);
	return action;
}

#endif
