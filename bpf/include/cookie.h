/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Keyed hash of the cookie, for lb.bpf.c and server.bpf.c. crates/model/src/cookie.rs implements the same in Rust, and
 * tests compare the two.
 */
#ifndef COREWARD_INCLUDE_COOKIE_H
#define COREWARD_INCLUDE_COOKIE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* The words below are in the packet's byte order, and SipHash takes them as little-endian numbers. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "cookie.h is written for little-endian machines");

#define ROTATE_LEFT_64(x, bits) ((x) << (bits) | (x) >> (64 - (bits)))

/* One SipRound (Aumasson and Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT'12, Fig. 2.1). */
#define SIP_ROUND(v0, v1, v2, v3)                                                                                      \
	do {                                                                                                           \
		v0 += v1;                                                                                              \
		v2 += v3;                                                                                              \
		v1 = ROTATE_LEFT_64(v1, 13) ^ v0;                                                                      \
		v3 = ROTATE_LEFT_64(v3, 16) ^ v2;                                                                      \
		v0 = ROTATE_LEFT_64(v0, 32);                                                                           \
		v2 += v1;                                                                                              \
		v0 += v3;                                                                                              \
		v1 = ROTATE_LEFT_64(v1, 17) ^ v2;                                                                      \
		v3 = ROTATE_LEFT_64(v3, 21) ^ v0;                                                                      \
		v2 = ROTATE_LEFT_64(v2, 32);                                                                           \
	} while (0)

/*
 * Returns SipHash-1-3 of 7 bytes, which are client address and port (6 bytes), XOR the upper 56 bits of VIP address and
 * port times the key's vip_factor. This is one block, which takes four rounds, while 12 bytes would take five. Folding
 * by a secret factor is a universal hash, and a PRF of it is a PRF of the whole tuple (Carter and Wegman, 1979). Two
 * tuples that fold to the same word exist, but cannot be found without the key. The hash does not wait for the
 * service's look-up.
 *
 * `ports` is the 32-bit word at the start of the client's TCP header. The server, which sees the reply, swaps its
 * halves.
 */
static __always_inline __u64 cookie_hash(const struct cookie_key *key, __u32 client_address, __u32 vip_address,
					 __u32 ports)
{
	__u64 k0 = key->k0, k1 = key->k1;
	__u64 v0 = k0 ^ 0x736f6d6570736575ull, v1 = k1 ^ 0x646f72616e646f6dull;
	__u64 v2 = k0 ^ 0x6c7967656e657261ull, v3 = k1 ^ 0x7465646279746573ull;
	__u64 vip = (__u64)(ports >> 16) << 32 | vip_address;
	__u64 client = (__u64)(ports & 0xffff) << 32 | client_address;
	__u64 word = 7ull << 56 | (client ^ vip * key->vip_factor >> 8);

	v3 ^= word;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= word;
	v2 ^= 0xff;
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	return v0 ^ v1 ^ v2 ^ v3;
}

/* Half of an IPv6 address, in a packet or on the stack. */
typedef __u64 __attribute__((may_alias)) address_half;

/*
 * Returns VIP and port folded into one word. Only the fleet's VIPs occur, and clients do not know the factor, so
 * cookies of one VIP are not valid at another VIP.
 */
static __always_inline __u64 fold_vip_ipv6(const struct cookie_key *key, const void *vip, __u16 port)
{
	const address_half *half = vip;
	__u64 folded = half[0] * key->vip_factor;

	folded = (folded ^ folded >> 32 ^ half[1]) * key->vip_factor;
	return ((folded ^ folded >> 32) + port) * key->vip_factor;
}

/*
 * Returns the hash for IPv6, which is SipHash-1-3 of 23 bytes in three blocks. They are the client's address, and its
 * port XOR the upper 56 bits of the folded VIP, which is ready when the first two blocks are done. Addresses are 16
 * bytes as in the packet. The client's whole address is hashed, because a client may choose among 2^64 addresses.
 */
static __always_inline __u64 cookie_hash_ipv6(const struct cookie_key *key, const void *client, const void *vip,
					      __u32 ports)
{
	const address_half *half = client;
	__u64 k0 = key->k0, k1 = key->k1;
	__u64 v0 = k0 ^ 0x736f6d6570736575ull, v1 = k1 ^ 0x646f72616e646f6dull;
	__u64 v2 = k0 ^ 0x6c7967656e657261ull, v3 = k1 ^ 0x7465646279746573ull;
	__u64 first = half[0], second = half[1];
	__u64 last = 23ull << 56 | ((ports & 0xffff) ^ fold_vip_ipv6(key, vip, ports >> 16) >> 8);

	v3 ^= first;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= first;
	v3 ^= second;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= second;
	v3 ^= last;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= last;
	v2 ^= 0xff;
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	return v0 ^ v1 ^ v2 ^ v3;
}

/* Returns the number to add to TSval's time part, modulo 2^16. `hash` is made with the server's own time key. */
static __always_inline __u16 cookie_time_addend(__u64 hash)
{
	return hash;
}

/* Factor of round 1 to 3 from the hash. Products are modulo 2^bits, so the factor's higher bits do not matter. */
#define HIDING_FACTOR(hash, bits, round) ((hash) >> ((bits) * (round)) | 1)

/* Returns `x`, below 2^bits, with its upper half XORed into the lower one. */
static __always_inline __u64 fold(__u64 x, __u32 bits)
{
	return x ^ x >> bits / 2;
}

static __always_inline __u64 unfold(__u64 x, __u32 bits)
{
	return x ^ x >> bits / 2 ^ x >> bits / 2 * 2;
}

/* Returns the `plain` that hide() has turned into `hidden`. model::cookie::Permutation explains the permutation. */
static __always_inline __u32 reveal(__u64 hash, __u32 hidden, __u32 bits)
{
	__u64 mask = (1ull << bits) - 1, x = fold((hidden ^ hash) & mask, bits);

	x = fold(x * HIDING_FACTOR(hash, bits, 1) & mask, bits);
	x = fold(x * HIDING_FACTOR(hash, bits, 2) & mask, bits);
	x = fold(x * HIDING_FACTOR(hash, bits, 3) & mask, bits);
	x = (x + (hash >> (64 - bits))) & mask;
	/* Without this, clang omits the masks of indexes as superfluous, and the verifier rejects the program. */
	barrier_var(x);
	return x;
}

/*
 * Returns the inverse of an odd number modulo 2^20. Each step of Newton's method doubles the number of correct bits.
 * The first approximation 3x ^ 2 has five.
 */
static __always_inline __u64 modular_inverse(__u64 factor)
{
	__u64 x = factor * 3 ^ 2;

	x *= 2 - factor * x;
	return x * (2 - factor * x);
}

/* Returns `plain`, below 2^bits, permuted by the hash. reveal() is the inverse. */
static __always_inline __u32 hide(__u64 hash, __u32 plain, __u32 bits)
{
	__u64 mask = (1ull << bits) - 1, x = (plain - (hash >> (64 - bits))) & mask;

	x = unfold(x, bits) * modular_inverse(HIDING_FACTOR(hash, bits, 3)) & mask;
	x = unfold(x, bits) * modular_inverse(HIDING_FACTOR(hash, bits, 2)) & mask;
	x = unfold(x, bits) * modular_inverse(HIDING_FACTOR(hash, bits, 1)) & mask;
	return unfold(x, bits) ^ (hash & mask);
}

/* Returns the index of the key that stamped a TSecr, by the unhidden key bit. */
static __always_inline __u32 cookie_key_index(__u32 tsecr)
{
	return (tsecr & COOKIE_KEY_BIT) / COOKIE_KEY_BIT;
}

#endif
