/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Parser of the timestamp option (RFC 7323, Sect. 3.2) in a TCP header. */
#ifndef COREWARD_INCLUDE_TIMESTAMP_H
#define COREWARD_INCLUDE_TIMESTAMP_H

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_TIMESTAMP 8
#define TCP_TIMESTAMP_LENGTH 10
/* Maximum length of the options in bytes, because `doff` has 4 bits. */
#define TCP_OPTIONS_MAX 40
/* NOP NOP TIMESTAMP 10, which are the first options of most packets other than SYNs (RFC 7323, Appendix A). */
#define OPTIONS_ALIGNED_TIMESTAMP bpf_htonl(0x0101080a)
#define OPTIONS_ALIGNED_LENGTH 12
#define OPTIONS_ALIGNED_OFFSET 2

/* The words after the option's kind and length. The struct is packed, because its offset may be odd. */
#define TIMESTAMP_WORDS_OFFSET 2
struct timestamp_words {
	__be32 tsval;
	__be32 tsecr;
} __attribute__((packed));

#define TIMESTAMP_NONE -1
#define TIMESTAMP_MALFORMED -2

/* A copy of the options. It is longer than any list of options, so that the byte after the last one can be read. */
struct tcp_options {
	__u8 bytes[48];
};

/*
 * Returns the offset of the timestamp option (its kind) among the first `length` bytes, or TIMESTAMP_NONE if there is
 * none. Returns TIMESTAMP_MALFORMED if an earlier option covers less than its first two bytes or more than the header
 * (RFC 9293, Sect. 3.1).
 *
 * The loop goes byte by byte, so that the loop counter is the only index. The verifier would follow each value of an
 * offset from the packet. This is a global function, so that it is verified once, not once per calling path.
 */
__noinline int find_timestamp(const struct tcp_options *options, __u32 length)
{
	__u32 skip = 0;

	if (!options)
		return TIMESTAMP_NONE;
	for (__u32 i = 0; i < TCP_OPTIONS_MAX && i < length; i++) {
		__u8 kind = options->bytes[i], size = options->bytes[i + 1];

		if (skip) {
			skip--;
			continue;
		}
		if (kind == TCP_OPTION_END)
			return TIMESTAMP_NONE;
		if (kind == TCP_OPTION_NOP)
			continue;
		if (size < 2 || i + size > length)
			return TIMESTAMP_MALFORMED;
		if (kind == TCP_OPTION_TIMESTAMP && size == TCP_TIMESTAMP_LENGTH)
			return i;
		skip = size - 1;
	}
	return TIMESTAMP_NONE;
}

#endif
