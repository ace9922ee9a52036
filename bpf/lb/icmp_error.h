/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* ICMP and ICMPv6 errors that quote a packet which its outer header makes longer than the MTU. */
#ifndef COREWARD_LB_ICMP_ERROR_H
#define COREWARD_LB_ICMP_ERROR_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

/* Type of service or traffic class of errors, which is internetwork control (RFC 1812, Sect. 4.3.2.5). */
#define ICMP_ERROR_TRAFFIC_CLASS 0xc0

/*
 * Cuts the packet to `quoted` bytes and makes room before them for headers, so that it has `length` bytes. Returns the
 * frame of ETH_HLEN and `length` bytes, or NULL if it could not be changed.
 */
static __always_inline void *quote_packet(struct xdp_md *ctx, __u32 quoted, __u32 length)
{
	void *data = (void *)(long)ctx->data, *data_end = (void *)(long)ctx->data_end;

	if (bpf_xdp_adjust_tail(ctx, (int)(ETH_HLEN + quoted) - (int)(data_end - data)) ||
	    bpf_xdp_adjust_head(ctx, -(int)(length - quoted)))
		return NULL;
	data = (void *)(long)ctx->data;
	data_end = (void *)(long)ctx->data_end;
	return data + ETH_HLEN + length > data_end ? NULL : data;
}

#endif
