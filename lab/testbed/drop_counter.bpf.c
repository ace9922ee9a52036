/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Counts the datagrams that wait at a UDP socket of one port and network namespace when it is closed. They are lost
 * with a worker, and no counter of the kernel includes them. The program is only for the dispatch soak test, and lets
 * every close pass.
 *
 * Datagrams that arrive in the next few microseconds are not counted, because the socket can still be found then.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "dispatch/queue.h"

/* Larger than the kernel's struct udp_sock. */
#define SOCKET_BYTES 4096

/* Written before the program is loaded. */
const volatile __u16 port = 0; /* host byte order */
const volatile __u64 network_namespace = 0; /* SO_NETNS_COOKIE */

__u64 purged = 0;

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u8[SOCKET_BYTES]);
} copies SEC(".maps");

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* Another part of the kernel's struct than dispatch/queue.h declares. libbpf ignores the suffix from ___ on. */
struct sock_common___port {
	__u16 skc_num;
};

#pragma clang attribute pop

static __always_inline __u32 length_at(const __u8 *copy, __u32 offset)
{
	return offset <= SOCKET_BYTES - sizeof(__u32) ? *(const __u32 *)(copy + offset) : 0;
}

SEC("cgroup/sock_release")
int release(struct bpf_sock *ctx)
{
	__u32 zero = 0, end = bpf_core_field_offset(struct udp_sock, reader_queue.qlen) + sizeof(__u32);
	__u32 port_at;
	__u8 *copy;

	if (ctx->protocol != IPPROTO_UDP || bpf_get_netns_cookie(ctx) != network_namespace)
		return 1;
	copy = bpf_map_lookup_elem(&copies, &zero);
	/* The context is the kernel's own struct, which is read into the copy. */
	if (!copy || end > SOCKET_BYTES || bpf_probe_read_kernel(copy, end, ctx))
		return 1;
	/* struct sock begins with struct sock_common. */
	port_at = bpf_core_field_offset(struct sock_common___port, skc_num);
	if (port_at > SOCKET_BYTES - sizeof(__u16) || *(__u16 *)(copy + port_at) != port)
		return 1;
	__sync_fetch_and_add(&purged,
			     length_at(copy, bpf_core_field_offset(struct udp_sock, inet.sk.sk_receive_queue.qlen)) +
				     length_at(copy, bpf_core_field_offset(struct udp_sock, reader_queue.qlen)));
	return 1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
