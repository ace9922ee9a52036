/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of outer headers, for services that encapsulate. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_TUNNELS_H
#define COREWARD_INCLUDE_SERVER_TUNNELS_H

/* Port of GUE (IANA: gue). */
#define GUE_PORT 6080

/* Outer header of packets that are encapsulated for a server. */
struct server_tunnel {
	/* IPv4 destination of the outer header; 1 for IPv6; 0: not known. */
	__u32 address;
	/* Source port of GUE, in network byte order; 0: a hash of the flow. */
	__u16 source_port;
	/* Address family: ADDRESS_FAMILY_*. */
	__u16 family;
};

/* Outer headers by server id, for services that encapsulate. IPv4 needs the first array only, so one load. */
struct server_tunnels {
	struct server_tunnel entry[SERVER_ID_COUNT];
	/* IPv6 destinations. An address never changes while a program may read it. */
	__u64 address_ipv6[SERVER_ID_COUNT][2];
};

#endif
