/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Lets everything pass. Attached to the switch's port toward the load balancer, the peer of the device on which
 * lb.bpf.c answers XDP_TX: veth hands frames sent by XDP_TX to the peer's NAPI, and wakes that only with an XDP
 * program there (veth_xdp_flush() in drivers/net/veth.c). Without it every such frame is dropped, or waits.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int xdp_pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
