/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Lengths of the outer headers of FORWARDING_IPIP and FORWARDING_GUE. */
#ifndef COREWARD_INCLUDE_TUNNEL_H
#define COREWARD_INCLUDE_TUNNEL_H

#include <linux/ip.h>
#include <linux/udp.h>

#define IPIP_OVERHEAD sizeof(struct iphdr)
#define GUE_OVERHEAD (sizeof(struct iphdr) + sizeof(struct udphdr))

#endif
