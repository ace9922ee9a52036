/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Where the timestamp option (RFC 7323, Sect. 3.2) stands in a TCP header. For XDP and tc alike: works on pointers into
 * the packet.
 */
#ifndef COREWARD_TIMESTAMP_BPF_H
#define COREWARD_TIMESTAMP_BPF_H

#include <linux/bpf.h>
#include <linux/tcp.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_TIMESTAMP 8
#define TCP_OPTION_TIMESTAMP_LENGTH 10
/* The longest list of options: doff is 4 bits. */
#define TCP_OPTIONS_MAX 40
/* Offset of TSval in the TCP header where there is none. */
#define NO_TIMESTAMP 0u

/* NOP NOP TIMESTAMP 10, as every common stack begins the options of all packets but SYNs (RFC 7323, Appendix A). */
#define OPTIONS_ALIGNED_TIMESTAMP bpf_htonl(0x0101080a)

struct timestamp_option {
	__be32 value;
	__be32 echo;
} __attribute__((packed));

/*
 * Offset of TSval from the start of the TCP header, or NO_TIMESTAMP. `header_length` is doff in bytes, 20 to 60; the
 * caller has checked that so much is there. Walks the options as tcp_parse_options() does (net/ipv4/tcp_input.c): a
 * list that is not well-formed ends where it goes wrong.
 */
static __always_inline __u32 find_timestamp(const struct tcphdr *tcp, __u32 header_length, const void *data_end)
{
	const __u8 *start = (const void *)tcp;
	__u32 offset = sizeof(*tcp), length;
	int i;

	if ((const void *)(start + sizeof(*tcp) + 12) <= data_end && header_length >= sizeof(*tcp) + 12 &&
	    *(const __be32 *)(start + sizeof(*tcp)) == OPTIONS_ALIGNED_TIMESTAMP)
		return sizeof(*tcp) + 4;

	for (i = 0; i < TCP_OPTIONS_MAX; i++) {
		const __u8 *option;

		/* Never more than 59 here; the mask says so to the verifier. */
		offset &= 63;
		option = start + offset;
		if (offset >= header_length || (const void *)(option + 1) > data_end || option[0] == TCP_OPTION_END)
			return NO_TIMESTAMP;
		if (option[0] == TCP_OPTION_NOP) {
			offset++;
			continue;
		}
		if (offset + 2 > header_length || (const void *)(option + 2) > data_end)
			return NO_TIMESTAMP;
		length = option[1];
		if (length < 2 || offset + length > header_length)
			return NO_TIMESTAMP;
		if (option[0] == TCP_OPTION_TIMESTAMP && length == TCP_OPTION_TIMESTAMP_LENGTH)
			return offset + 2;
		offset += length;
	}
	return NO_TIMESTAMP;
}

#endif
