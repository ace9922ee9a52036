/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * RSS hash of a connection at a server's NIC (Toeplitz: Microsoft, "RSS hashing types"). It takes one table look-up per
 * byte of client address and port, while VIP and port are a constant of the service.
 */
#ifndef COREWARD_INCLUDE_TOEPLITZ_H
#define COREWARD_INCLUDE_TOEPLITZ_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

/* Returns the source's part of the hash by struct toeplitz_source_tables. Arguments are in network byte order. */
static __always_inline __u32 toeplitz_source(const __u32 (*byte)[256], __u32 client_address, __u16 client_port)
{
	return byte[0][client_address & 0xff] ^ byte[1][client_address >> 8 & 0xff] ^
	       byte[2][client_address >> 16 & 0xff] ^ byte[3][client_address >> 24] ^ byte[4][client_port & 0xff] ^
	       byte[5][client_port >> 8];
}

/* toeplitz_source() for IPv6, with tables for 16 and 2 bytes. `client` is the address as in the packet. */
static __always_inline __u32 toeplitz_source_ipv6(const __u32 (*byte)[256], const void *client, __u16 client_port)
{
	__u32 hash = byte[16][client_port & 0xff] ^ byte[17][client_port >> 8];
	const __u8 *bytes = client;

	/* An unrolled loop would keep many look-ups on the stack. */
#pragma nounroll
	for (int i = 0; i < 16; i++)
		hash ^= byte[i][bytes[i]];
	return hash;
}

#endif
