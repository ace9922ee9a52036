/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of intake.bpf.c, by which `coreward orchestrate` takes requests at the NIC. Included by intf.h. */
#ifndef COREWARD_INCLUDE_ORCHESTRATE_H
#define COREWARD_INCLUDE_ORCHESTRATE_H

/* Maximum number of a daemon's listeners. A daemon has at most 64 services. */
#define MAX_INTAKE_LISTENERS 64
/* Maximum number of the device's receive queues. */
#define MAX_INTAKE_QUEUES 256
/* Maximum length in bytes of a redirected datagram with its UDP header, which an MTU of 1500 allows. */
#define MAX_INTAKE_DATAGRAM 1480

/* Address and port to which clients send requests, as key of a hash map. */
struct intake_listener {
	__u32 address;
	__u16 port;
	__u16 unused; /* 0 */
};

#endif
