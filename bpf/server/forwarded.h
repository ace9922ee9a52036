/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Services whose sockets are not on this host, but behind its DNAT or a bridge (server.bpf.c, "Forwarded services"). */
#ifndef COREWARD_SERVER_FORWARDED_H
#define COREWARD_SERVER_FORWARDED_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "state.h"

static __always_inline __u64 *forwarded_service_index(__u64 word)
{
	return &state.forwarded_services[word * FORWARDED_SERVICE_FACTOR >> FORWARDED_SERVICE_SHIFT];
}

/* Records whether this host forwarded the service's SYN-ACK, or a socket of this host sent the SYN-ACK. */
static __always_inline void record_handshake(__u64 word, bool forwarded)
{
	volatile __u64 *slot = forwarded_service_index(word);

	if (forwarded && *slot != word)
		*slot = word;
	else if (!forwarded && *slot == word)
		*slot = 0;
}

static __always_inline bool is_forwarded_service(__u64 word)
{
	return *(volatile __u64 *)forwarded_service_index(word) == word;
}

#endif
