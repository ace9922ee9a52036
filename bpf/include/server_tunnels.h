/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of outer headers, for services that encapsulate. Included by intf.h. */
#ifndef COREWARD_INCLUDE_SERVER_TUNNELS_H
#define COREWARD_INCLUDE_SERVER_TUNNELS_H

/* Port of GUE (IANA: gue). */
#define GUE_PORT 6080

/* Fields of the outer header in which a server's packets are encapsulated. */
struct server_tunnel {
	/* IPv4 destination of the outer header, 1 if the destination is IPv6, or 0 if it is unknown. */
	__u32 address;
	/* Source port of GUE in network byte order, or 0 if a hash of the flow gives the port. */
	__u16 source_port;
	/* Address family (ADDRESS_FAMILY_*). */
	__u16 family;
};

/* Outer headers by server id. IPv4 needs only the first array, so that one load reads an entry. */
struct server_tunnels {
	struct server_tunnel entry[SERVER_ID_COUNT];
	/* IPv6 destinations. An address never changes while a program may read it. */
	__u64 address_ipv6[SERVER_ID_COUNT][2];
};

#endif
