/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Check that the NIC uses the indirection table that it reports. The predicted queue is compared with the actual one,
 * for SYNs and a few packets of open connections. NICs with a flow director (ixgbe, i40e) move open connections by
 * themselves (ATR), while their SYNs go by the table.
 */
#ifndef COREWARD_SERVER_RSS_H
#define COREWARD_SERVER_RSS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "rss_mapping.h"
#include "segment.h"
#include "state.h"

static __always_inline __u32 predict_segment_queue(const struct segment *segment, __u32 *hash)
{
	const struct flow_key *flow = &segment->flow;

	/* Many NICs hash a packet with extension headers without its ports. */
	if (segment->family == ADDRESS_FAMILY_IPV6)
		return segment->tcp_offset == IPV6_TRANSPORT_OFFSET ? predict_queue_ipv6(flow, hash) : QUEUE_UNKNOWN;
	return predict_queue_ipv4(flow->client_address[3], flow->vip_address[3], ports_of(flow), hash);
}

/* Compares the actual queue of a SYN with the predicted one (server.bpf.c, section 10). */
static __noinline void sample_rss(struct __sk_buff *skb, const struct segment *segment)
{
	__u32 hash = 0, sequence, predicted;
	struct rss_sample *sample;

	predicted = predict_segment_queue(segment, &hash);
	/* skb_record_rx_queue() stores queue + 1, so 0 means that no queue was recorded. */
	if (predicted == QUEUE_UNKNOWN || !skb->queue_mapping) {
		count(SERVER_COUNTER_RSS_UNPREDICTED);
		return;
	}
	count(predicted == skb->queue_mapping - 1 ? SERVER_COUNTER_RSS_MATCHED : SERVER_COUNTER_RSS_MISMATCHED);
	sequence = __sync_fetch_and_add(&state.sample_sequence, 1);
	sample = &state.samples[sequence & (RSS_SAMPLES - 1)];
	/* A reader ignores a sample whose number changes while it is read (crates/dataplane/src/server/rss_samples.rs). */
	__sync_lock_test_and_set(&sample->sequence, 0);
	__builtin_memcpy(sample->source_address, segment->flow.client_address, sizeof(sample->source_address));
	__builtin_memcpy(sample->destination_address, segment->flow.vip_address, sizeof(sample->destination_address));
	sample->source_port = segment->flow.client_port;
	sample->destination_port = segment->flow.vip_port;
	sample->hash = hash;
	sample->predicted_queue = predicted;
	sample->actual_queue = skb->queue_mapping - 1;
	__sync_lock_test_and_set(&sample->sequence, sequence + 1);
}

/* Compares the actual queue of a sampled packet of an open connection with the predicted one. */
static __noinline void sample_established(struct __sk_buff *skb, const struct segment *segment)
{
	__u32 hash = 0, predicted;

	predicted = predict_segment_queue(segment, &hash);
	if (predicted == QUEUE_UNKNOWN || !skb->queue_mapping)
		return;
	count(predicted == skb->queue_mapping - 1 ? SERVER_COUNTER_RSS_ESTABLISHED_MATCHED
						  : SERVER_COUNTER_RSS_ESTABLISHED_MISMATCHED);
}

static __always_inline void count_established(struct __sk_buff *skb, const struct segment *segment)
{
	if (!(count(SERVER_COUNTER_INGRESS_ESTABLISHED) % RSS_ESTABLISHED_SAMPLING))
		sample_established(skb, segment);
}

#endif
