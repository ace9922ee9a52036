/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Lets all frames pass. It is attached to the switch's port toward the load balancer, which is the peer of the device
 * on which lb.bpf.c sends by XDP_TX. veth hands such frames to the peer's NAPI, and wakes that only if the peer has an
 * XDP program (veth_xdp_flush() in drivers/net/veth.c). Without this program every such frame is dropped, or waits.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SEC("xdp")
int xdp_pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
