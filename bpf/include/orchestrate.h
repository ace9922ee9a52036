/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 OR MIT */
/* Layouts of intake.bpf.c and user space: requests that `coreward orchestrate` takes at the NIC. Included by intf.h. */
#ifndef COREWARD_INCLUDE_ORCHESTRATE_H
#define COREWARD_INCLUDE_ORCHESTRATE_H

/* Limit of listeners of a daemon, which has at most 64 services. */
#define MAX_INTAKE_LISTENERS 64
/* Limit of receive queues of the device. */
#define MAX_INTAKE_QUEUES 256
/* Maximum length of a redirected datagram with its UDP header, which an MTU of 1500 allows. */
#define MAX_INTAKE_DATAGRAM 1480

/* Address and port of requests; key of a hash map. */
struct intake_listener {
	__u32 address;
	__u16 port;
	__u16 unused; /* 0 */
};

#endif
