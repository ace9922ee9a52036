/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Parser of requests and responses, for the client's address and port, a request id and the type. Address, port and id
 * are the same in both, so that a response finds its request.
 */
#ifndef COREWARD_DISPATCH_REQUEST_H
#define COREWARD_DISPATCH_REQUEST_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Constants that are written before the program is loaded, which removes unneeded code. Offsets are in the payload. */
const volatile __u32 request_id_bytes = 0; /* 0 if requests have no id */
const volatile __u32 request_id_offset = 0;
const volatile __u32 response_id_offset = 0;
const volatile __u32 type_count = 0; /* 0 if all requests have one type */
const volatile __u32 type_offset = 0;
/* Not a constant, because the verifier would then follow every type's path. Never written after loading. */
struct dispatch_match types[MAX_DISPATCH_TYPES] SEC(".data.types") = {};

/* Address and port of a client. An IPv4 address is in address[1]. */
struct client {
	__u64 address[2];
	__u16 port;
};

/*
 * Returns `bytes` bytes (1 to 8, a constant) of the packet from `offset` on, relative to ctx->data. Bytes beyond the
 * packet's end are 0. Most packets are linear, so that one load suffices.
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

/* Loads bytes by a helper, if they are at the end of a datagram or in a payload that is not linear. */
static __always_inline void load_slowly(void *ctx, __u32 offset, __u32 available, __u64 *word)
{
	__u32 last = (available < sizeof(*word) ? available : sizeof(*word)) - 1;

	/* Kernel 6.1's verifier needs a mask to bound the length, and clang must not remove the superfluous mask. */
	asm volatile("" : "+r"(last));
	last &= sizeof(*word) - 1;
	bpf_skb_load_bytes(ctx, offset, word, last + 1);
}

/* Returns the hash of client, port and request id, with a secret seed. */
static __always_inline __u64 request_hash(__u64 seed, const struct client *client, __u64 id)
{
	/* Odd constants with well mixed bits, from the golden ratio and MurmurHash3's finalizer. */
	__u64 hash = (client->address[1] << 16 | client->port) ^ seed;

	hash = (hash ^ client->address[0] * 0x9e3779b97f4a7c15ull ^ id * 0xc4ceb9fe1a85ec53ull) * 0xff51afd7ed558ccdull;
	/* The shift by 16 has removed the upper 16 bits of address[1], which only IPv6 uses. */
	hash ^= (client->address[1] >> 48) * 0x9e3779b97f4a7c15ull;
	hash ^= hash >> 32;
	hash *= 0x9e3779b97f4a7c15ull;
	return hash ^ hash >> 29;
}

/* Returns the first type that matches the payload's word, or else the type of all other requests. */
static __always_inline const struct dispatch_match *match_type(__u64 word)
{
	__u32 i;

	for (i = 0; i < MAX_DISPATCH_TYPES - 1 && i < type_count; i++) {
		if ((word & types[i].mask) == types[i].value)
			break;
	}
	return &types[i];
}

#endif
