/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Dispatch of a UDP service's requests, which selects a worker of the unmodified service for each request. Turbo
 * (Seyedroudbari et al., HPCA'23) and RingLeader (Lin et al., NSDI'23) do this in a NIC. Here the server's kernel does
 * it.
 *
 * 1. Programs. `dispatch` runs for every datagram to a group of SO_REUSEPORT sockets, one per worker, and selects the
 *    receiving socket. Without it the kernel selects by a hash of the client's address and port. `responses` runs for
 *    every IP packet that a socket of this host sends (cgroup of all sockets, egress). It passes all packets, and
 *    counts those from the service's port. User space runs `queues` ten times a second over all UDP sockets, to read
 *    the lengths of the workers' queues.
 *
 * 2. The decision (choose.h). Each loaded program has one policy. The verifier removes the others as dead code, so a
 *    decision costs only its own policy.
 *
 * 3. The ledger (state.h; Turbo, Sect. IV-B). A request in flight is one word in a table, found by client address, port
 *    and, if the protocol has one, request id. The word is added at dispatch and removed when the response leaves. So a
 *    response's second datagram, an unrequested one, or another client's response removes no entry. skb->sk is the
 *    responding worker's socket. If another socket of the service's port responds, the entry names the worker.
 *
 * 4. Repairs. `drops` subtracts datagrams that a full receive buffer drops. It does so at once, because the kernel's
 *    tracepoint follows the dispatch on the same CPU. User space abandons requests without a response (ignored, or a
 *    dead worker) that are too old and cannot be queued. `queues` adds queued requests without an entry as `surplus`,
 *    so that the outstanding number is never below the queue's length. User space disables a worker that does not read
 *    its queue, and the worker's first response enables it here.
 *
 * 5. Errors. If the selected worker has died, its empty slot is marked and the next best worker is selected. If no slot
 *    has a socket, the kernel selects. No request is rejected here.
 *
 * 6. State. User space writes sockets, bounds, order, types' weights, epoch, seed, flags, and abandoned entries
 *    (crates/dataplane/src/dispatch). A program of type sk_reuseport has no link, but lives as long as its group of
 *    sockets. All maps are pinned, so that the next version continues with them.
 *
 * 7. Cost. All state is in .bss, so there is no map look-up. A dispatch calls one helper for the client's address and
 *    another that selects the socket. Time is the number of user space's polls, and only the observation of service
 *    times reads a clock.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "choose.h"
#include "queue.h"
#include "request.h"
#include "state.h"

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd
/* Maximum number of selections per request. Each worker that died since the last poll costs one. */
#define MAX_SELECT_ATTEMPTS 4

/* Number of leading bytes of the kernel's struct sock that are read to find the network namespace. */
#define SOCK_READ_BYTES 128

/* Constants that are written before the program is loaded. */
const volatile __u16 service_port = 0; /* network byte order */
const volatile __u64 service_address[2] = {}; /* as in struct client, or 0 for any address */
const volatile __u32 network_namespace = 0; /* inode number */
const volatile bool observes_service_times = false;

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, MAX_DISPATCH_WORKERS);
	__type(key, __u32);
	__type(value, __u64);
} workers SEC(".maps");

/* Slot of each worker's socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} sockets SEC(".maps");

/* Returns `place` below `count`, a power of two. Clang cannot remove the mask, which gives the verifier a bound. */
static __always_inline __u32 bound_slot(__u32 place, __u32 count)
{
	place &= count - 1;
	asm volatile("" : "+r"(place));
	return place;
}

/*
 * Functions since Linux 6.3 that make the kernel's structs readable. The verifier replaces each access by a plain load
 * and removes the calls, which costs 10 ns less than the helper.
 */
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;
extern void *bpf_rdonly_cast(const void *address, __u32 type) __ksym __weak;

/* Reads the client's IPv4 address from the IP header, which ctx->data does not include. */
static __always_inline bool read_ipv4_client(struct sk_reuseport_md *ctx, __u64 *address)
{
	if (bpf_ksym_exists(bpf_cast_to_kern_ctx) && bpf_ksym_exists(bpf_rdonly_cast)) {
		struct sk_reuseport_kern *kernel = bpf_cast_to_kern_ctx(ctx);
		struct sk_buff *skb = kernel->skb;
		const void *header = skb->head + skb->network_header;

		*address = ((struct iphdr *)bpf_rdonly_cast(header, bpf_core_type_id_kernel(struct iphdr)))->saddr;
		return true;
	}
	return !bpf_skb_load_bytes_relative(ctx, __builtin_offsetof(struct iphdr, saddr), address, sizeof(__u32),
					    BPF_HDR_START_NET);
}

static __always_inline bool read_client(struct sk_reuseport_md *ctx, struct client *client)
{
	void *data = ctx->data;

	if (data + sizeof(struct udphdr) > ctx->data_end)
		return false;
	client->port = ((struct udphdr *)data)->source;
	client->address[0] = 0;
	client->address[1] = 0;
	if (ctx->eth_protocol == bpf_htons(ETHERTYPE_IPV4))
		return read_ipv4_client(ctx, &client->address[1]);
	if (ctx->eth_protocol == bpf_htons(ETHERTYPE_IPV6))
		return !bpf_skb_load_bytes_relative(ctx, __builtin_offsetof(struct ipv6hdr, saddr), client->address,
						    sizeof(client->address), BPF_HDR_START_NET);
	return false;
}

static __always_inline void count_untracked(__u32 slot)
{
	dispatched[bpf_get_smp_processor_id() & (DISPATCH_CPUS - 1)].entry = 0;
	count(DISPATCH_COUNTER_UNTRACKED);
	__sync_fetch_and_add(&state.workers[slot].untracked, 1);
}

static __always_inline void record_request(struct sk_reuseport_md *ctx, const struct client *client, __u32 slot,
					   __u32 type)
{
	struct dispatch_worker *worker = &state.workers[slot];
	__u64 weight = policy == DISPATCH_POLICY_JLQ ? state.types[type & DISPATCH_TYPE_MASK].weight : 0;
	struct last_dispatched *queued = &dispatched[bpf_get_smp_processor_id() & (DISPATCH_CPUS - 1)];
	__u64 id = 0, hash, entry;
	__u32 place;

	if (request_id_bytes)
		id = LOAD_BYTES(ctx, ctx->len, sizeof(struct udphdr) + request_id_offset, request_id_bytes);
	hash = request_hash(state.seed, client, id);
	entry = request_tag(hash) | (__u64)type << DISPATCH_TYPE_SHIFT | (__u64)slot << DISPATCH_WORKER_SHIFT |
		(state.epoch & DISPATCH_EPOCH_MASK) << DISPATCH_EPOCH_SHIFT | (weight & DISPATCH_WEIGHT_MASK);
	place = insert_request(hash, entry);
	if (place >= DISPATCH_REQUESTS) {
		count_untracked(slot);
		return;
	}
	queued->entry = entry;
	queued->place = place;
	if (policy == DISPATCH_POLICY_JLQ)
		__sync_fetch_and_add(&state.work[slot], weight_ns(weight));
	if (observes_service_times) {
		/* Service starts now at an idle worker, and after the previous response at a busy one. */
		if (!(__sync_fetch_and_add(&state.outstanding[slot], 1) & DISPATCH_COUNT_MASK))
			worker->serving_since_ns = bpf_ktime_get_ns();
	} else {
		__sync_fetch_and_add(&state.outstanding[slot], 1);
	}
}

static __always_inline void disable_worker(__u32 slot, __u32 flags)
{
	__sync_fetch_and_or(&state.outstanding[slot], flags);
	__sync_fetch_and_or(&state.work[slot], (__u64)(flags >> DISPATCH_FLAGS_SHIFT) << DISPATCH_WORK_FLAGS_SHIFT);
}

/* Returns the slot of the worker that got the request, or MAX_DISPATCH_WORKERS if none did. */
static __always_inline __u32 select_worker(struct sk_reuseport_md *ctx, __u32 class)
{
	bool over_bound = false;
	__u32 slot = choose_slot(class, ctx->hash, &over_bound), chosen;
	int attempt;

	for (attempt = 0; attempt < MAX_SELECT_ATTEMPTS; attempt++) {
		chosen = bound_slot(slot, MAX_DISPATCH_WORKERS);
		if (!bpf_sk_select_reuseport(ctx, &workers, &slot, 0)) {
			if (over_bound)
				count(DISPATCH_COUNTER_OVER_BOUND);
			return chosen;
		}
		disable_worker(chosen, DISPATCH_GONE | DISPATCH_DISABLED);
		slot = next_best(class) & (MAX_DISPATCH_WORKERS - 1);
	}
	return MAX_DISPATCH_WORKERS;
}

SEC("sk_reuseport")
int dispatch(struct sk_reuseport_md *ctx)
{
	__u32 type = 0, class = 0, slot;
	struct client client;

	if (type_count) {
		const struct dispatch_match *match =
			match_type(LOAD_BYTES(ctx, ctx->len, sizeof(struct udphdr) + type_offset, DISPATCH_TYPE_BYTES));

		type = match->number & DISPATCH_TYPE_MASK;
		class = match->class & (MAX_DISPATCH_CLASSES - 1);
	}
	slot = select_worker(ctx, class);
	if (slot >= MAX_DISPATCH_WORKERS) {
		count(DISPATCH_COUNTER_NO_WORKER);
		return SK_PASS;
	}
	if (read_client(ctx, &client))
		record_request(ctx, &client, slot, type);
	else
		count_untracked(slot);
	return SK_PASS;
}

/* Fields of a datagram from the service's port. */
struct response {
	struct client client;
	__u64 source[2];
	/* Offset of the payload from the IP header. */
	__u32 payload_offset;
};

static __always_inline bool read_response(struct __sk_buff *skb, struct response *response)
{
	void *data = (void *)(long)skb->data;
	void *data_end = (void *)(long)skb->data_end;
	struct udphdr *udp;

	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4)) {
		struct iphdr *ip = data;

		if ((void *)(ip + 1) > data_end || ip->protocol != IPPROTO_UDP)
			return false;
		udp = data + ip->ihl * 4;
		response->client.address[0] = 0;
		response->client.address[1] = ip->daddr;
		response->source[0] = 0;
		response->source[1] = ip->saddr;
		response->payload_offset = ip->ihl * 4 + sizeof(*udp);
	} else {
		struct ipv6hdr *ip = data;

		if ((void *)(ip + 1) > data_end || ip->nexthdr != IPPROTO_UDP)
			return false;
		udp = (void *)(ip + 1);
		__builtin_memcpy(response->client.address, &ip->daddr, sizeof(response->client.address));
		__builtin_memcpy(response->source, &ip->saddr, sizeof(response->source));
		response->payload_offset = sizeof(*ip) + sizeof(*udp);
	}
	if ((void *)(udp + 1) > data_end || udp->source != service_port)
		return false;
	response->client.port = udp->dest;
	return true;
}

/* Returns whether a socket that is no worker's has the service's address, in the service's network namespace. */
static __always_inline bool has_service_address(struct bpf_sock *socket, const struct response *response)
{
	__u32 offset = bpf_core_field_offset(struct sock, __sk_common.skc_net.net), inode = 0;
	/* The verifier allows no arithmetic on a socket pointer, so the struct's beginning is copied. */
	__u64 beginning[SOCK_READ_BYTES / sizeof(__u64)];
	void *net;

	if ((service_address[0] | service_address[1]) &&
	    (service_address[0] != response->source[0] || service_address[1] != response->source[1]))
		return false;
	if (offset > sizeof(beginning) - sizeof(net) || bpf_probe_read_kernel(beginning, sizeof(beginning), socket))
		return false;
	net = *(void **)((void *)beginning + offset);
	bpf_probe_read_kernel(&inode, sizeof(inode), net + bpf_core_field_offset(struct net, ns.inum));
	return inode == network_namespace;
}

static __always_inline void learn_service_time(__u32 slot, __u32 type)
{
	struct dispatch_worker *worker = &state.workers[slot];
	__u64 now = bpf_ktime_get_ns(), since = worker->serving_since_ns;

	worker->serving_since_ns = now;
	if (since && since < now) {
		__sync_fetch_and_add(&state.types[type].observed_ns, now - since);
		__sync_fetch_and_add(&state.types[type].observed, 1);
	}
}

/* Subtracts a removed entry from its worker's counts, and returns the worker's slot. */
static __always_inline __u32 subtract_outstanding(__u64 entry)
{
	__u32 slot = entry >> DISPATCH_WORKER_SHIFT & DISPATCH_WORKER_MASK;

	__sync_fetch_and_sub(&state.outstanding[slot], 1);
	if (entry & DISPATCH_WEIGHT_MASK)
		__sync_fetch_and_sub(&state.work[slot], weight_ns(entry));
	return slot;
}

static __always_inline void complete_request(__u64 entry)
{
	__u32 slot = subtract_outstanding(entry);

	__sync_fetch_and_add(&state.workers[slot].completed, 1);
	if (observes_service_times)
		learn_service_time(slot, entry >> DISPATCH_TYPE_SHIFT & DISPATCH_TYPE_MASK);
}

/* Counts a response of the worker, and enables the worker if it was disabled. */
static __always_inline void record_liveness(__u32 slot)
{
	__u32 flags = state.outstanding[slot] & (DISPATCH_DISABLED | DISPATCH_GONE);

	__sync_fetch_and_add(&state.workers[slot].responses, 1);
	if (flags == DISPATCH_DISABLED) {
		__sync_fetch_and_and(&state.outstanding[slot], ~DISPATCH_DISABLED);
		__sync_fetch_and_and(&state.work[slot], (1ull << DISPATCH_WORK_FLAGS_SHIFT) - 1);
	}
}

static __always_inline void process_response(struct __sk_buff *skb, const struct response *response)
{
	__u64 mask = ~0ull << DISPATCH_TAG_SHIFT | DISPATCH_USED;
	struct bpf_sock *socket = skb->sk;
	__u64 id = 0, hash, entry = 0;
	__u32 *slot;

	if (!socket)
		return;
	socket = bpf_sk_fullsock(socket);
	if (!socket)
		return;
	if (request_id_bytes)
		id = LOAD_BYTES(skb, skb->len, response->payload_offset + response_id_offset, request_id_bytes);
	hash = request_hash(state.seed, &response->client, id);
	slot = bpf_sk_storage_get(&sockets, socket, NULL, 0);
	if (slot) {
		__u32 own = *slot & DISPATCH_WORKER_MASK;

		record_liveness(own);
		entry = remove_request(hash, request_tag(hash) | (__u64)own << DISPATCH_WORKER_SHIFT,
				       mask | (__u64)DISPATCH_WORKER_MASK << DISPATCH_WORKER_SHIFT);
	} else if (!has_service_address(socket, response)) {
		return;
	}
	/* A worker may answer the request of another worker. */
	if (!entry)
		entry = remove_request(hash, request_tag(hash), mask);
	if (entry)
		complete_request(entry);
	else
		count(DISPATCH_COUNTER_UNMATCHED);
}

SEC("cgroup_skb/egress")
int responses(struct __sk_buff *skb)
{
	struct response response;

	if (read_response(skb, &response))
		process_response(skb, &response);
	return 1;
}

/*
 * Subtracts a request's counts when a UDP socket rejects its datagram, because the receive buffer or the protocol's
 * memory is full. (The second argument of the tracepoint is the socket in all kernels.)
 */
SEC("tp_btf/udp_fail_queue_rcv_skb")
int drops(__u64 *ctx)
{
	struct last_dispatched *queued = &dispatched[bpf_get_smp_processor_id() & (DISPATCH_CPUS - 1)];
	__u64 entry = queued->entry;
	__u32 *slot = bpf_sk_storage_get(&sockets, (struct sock *)ctx[1], NULL, 0);

	/* In these cases the rejected datagram was not dispatched to this socket. */
	if (!slot || !entry || (entry >> DISPATCH_WORKER_SHIFT & DISPATCH_WORKER_MASK) != *slot)
		return 0;
	queued->entry = 0;
	if (__sync_val_compare_and_swap(&requests[bound_slot(queued->place, DISPATCH_REQUESTS)], entry, 0) == entry)
		__sync_fetch_and_add(&state.workers[subtract_outstanding(entry)].abandoned, 1);
	return 0;
}

/*
 * Records the queue of each worker's socket. It runs for each UDP socket of user space's network namespace. The queue
 * is read before the count. A request is counted before it is queued and until its response, so the count is not less
 * than the queue's length.
 */
SEC("iter/udp")
int queues(struct bpf_iter__udp *ctx)
{
	struct udp_sock *socket = ctx->udp_sk;
	struct dispatch_worker *worker;
	__u32 *stored, slot, tracked, surplus;
	__u64 work;

	if (!socket)
		return 0;
	stored = bpf_sk_storage_get(&sockets, (struct sock *)socket, NULL, 0);
	if (!stored)
		return 0;
	slot = *stored & DISPATCH_WORKER_MASK;
	worker = &state.workers[slot];
	worker->queued = queued_datagrams(socket);
	worker->dropped = dropped_datagrams(socket);
	barrier();
	/* Only this program writes the surplus, and user space runs one at a time. */
	tracked = (state.outstanding[slot] & DISPATCH_COUNT_MASK) - worker->surplus;
	surplus = worker->queued > tracked ? worker->queued - tracked : 0;
	if (surplus != worker->surplus) {
		work = surplus * weight_ns(state.types[type_count & DISPATCH_TYPE_MASK].weight);
		__sync_fetch_and_add(&state.outstanding[slot], surplus - worker->surplus);
		__sync_fetch_and_add(&state.work[slot], work - worker->surplus_work);
		worker->surplus = surplus;
		worker->surplus_work = work;
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
