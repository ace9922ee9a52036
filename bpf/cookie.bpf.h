/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The cookie's keyed hash: what lb.bpf.c recognises and server.bpf.c stamps. crates/model/src/cookie.rs is the same in
 * Rust; the tests compare the two.
 */
#ifndef COREWARD_COOKIE_BPF_H
#define COREWARD_COOKIE_BPF_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* The words below are read from the packet as they stand there; SipHash takes them as little-endian numbers. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "cookie.bpf.h is written for little-endian machines");

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
 * SipHash-1-3 of the 12 bytes client address, VIP, client port, VIP port, in the byte order of the packet and in the
 * order of a packet from client to VIP. `ports` is the 32-bit word at the start of the client's TCP header; the server,
 * which sees the answer, swaps its halves.
 *
 * 12 bytes are two blocks: the addresses; then the ports, with the length in the top byte. One round each, and three to
 * end: five in all.
 */
static __always_inline __u64 cookie_hash(const struct cookie_key *key, __u32 client_address, __u32 vip_address,
					 __u32 ports)
{
	__u64 k0 = key->k0, k1 = key->k1;
	__u64 v0 = k0 ^ 0x736f6d6570736575ull, v1 = k1 ^ 0x646f72616e646f6dull;
	__u64 v2 = k0 ^ 0x6c7967656e657261ull, v3 = k1 ^ 0x7465646279746573ull;
	__u64 addresses = (__u64)vip_address << 32 | client_address;
	__u64 last = 12ull << 56 | ports;

	v3 ^= addresses;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= addresses;
	v3 ^= last;
	SIP_ROUND(v0, v1, v2, v3);
	v0 ^= last;
	v2 ^= 0xff;
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	SIP_ROUND(v0, v1, v2, v3);
	return v0 ^ v1 ^ v2 ^ v3;
}

/* Added to the time part of TSval, modulo 2^16: from a hash with the server's own time key. */
static __always_inline __u16 cookie_time_mask(__u64 hash)
{
	return hash;
}

/* XORed onto kind and id: from a hash with one of the fleet's keys. */
static __always_inline __u16 cookie_id_mask(__u64 hash)
{
	return hash & COOKIE_HIDDEN_MASK;
}

/* Which of the two keys an echo was made with: its key bit, in clear. */
static __always_inline __u32 cookie_key_index(__u32 echo)
{
	return (echo & COOKIE_KEY_BIT) / COOKIE_KEY_BIT;
}

#endif
