/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Fields of a request and of its response: the client's address and port, a request id, the type. Equal in both
 * directions, so that a response finds its request.
 */
#ifndef COREWARD_DISPATCH_REQUEST_H
#define COREWARD_DISPATCH_REQUEST_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Written before the program is loaded: unneeded parts are not compiled in. Offsets are in the payload. */
const volatile __u32 request_id_bytes = 0; /* 0: requests have no id */
const volatile __u32 request_id_offset = 0;
const volatile __u32 response_id_offset = 0;
const volatile __u32 type_count = 0; /* 0: requests are all alike */
const volatile __u32 type_offset = 0;
/* Not a constant for the verifier, which would follow every type's path. Never written after loading. */
struct dispatch_match types[MAX_DISPATCH_TYPES] SEC(".data.types") = {};

/* Address and port of a client. IPv4 addresses are in address[1]. */
struct client {
	__u64 address[2];
	__u16 port;
};

/*
 * Loads the first `bytes` (1 to 8, a constant) from `offset` of the packet on, relative to ctx->data; bytes beyond the
 * packet's end are 0. Most packets are linear, and one load does it.
 */
#define LOAD_BYTES(ctx, length, offset, bytes)                                                                         \
	({                                                                                                             \
		void *start = (void *)(long)(ctx)->data + (offset);                                                    \
		__u64 word = 0;                                                                                        \
		if (start + sizeof(word) <= (void *)(long)(ctx)->data_end)                                             \
			word = *(const __u64 *)start;                                                                  \
		else if ((length) > (offset))                                                                          \
			load_slowly((ctx), (offset), (length) - (offset), &word);                                      \
		(bytes) < 8 ? word & ((1ull << ((bytes) * 8)) - 1) : word;                                             \
	})

/* Loads a datagram's last bytes, or a payload that the driver keeps elsewhere. */
static __always_inline void load_slowly(void *ctx, __u32 offset, __u32 available, __u64 *word)
{
	__u32 last = (available < sizeof(*word) ? available : sizeof(*word)) - 1;

	/* Kernel 6.1's verifier sees 1 to 8 bytes only by a mask and a sum, and clang must not see that the mask is idle. */
	asm volatile("" : "+r"(last));
	last &= sizeof(*word) - 1;
	bpf_skb_load_bytes(ctx, offset, word, last + 1);
}

/* Hash of client, port and id, with a seed that no client knows. */
static __always_inline __u64 hash_of(__u64 seed, const struct client *client, __u64 id)
{
	/* Odd constants with well mixed bits (the golden ratio; MurmurHash3's finalizer). */
	__u64 hash = (client->address[1] << 16 | client->port) ^ seed;

	hash = (hash ^ client->address[0] * 0x9e3779b97f4a7c15ull ^ id * 0xc4ceb9fe1a85ec53ull) * 0xff51afd7ed558ccdull;
	/* The high half of an IPv6 address's low word was shifted out. */
	hash ^= (client->address[1] >> 48) * 0x9e3779b97f4a7c15ull;
	hash ^= hash >> 32;
	hash *= 0x9e3779b97f4a7c15ull;
	return hash ^ hash >> 29;
}

/* Returns the first matching type; without one that of all others. */
static __always_inline const struct dispatch_match *type_of(__u64 word)
{
	__u32 i;

	for (i = 0; i < MAX_DISPATCH_TYPES - 1 && i < type_count; i++) {
		if ((word & types[i].mask) == types[i].value)
			break;
	}
	return &types[i];
}

#endif
