/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What of the load balancer outlives its process, and user space writes (intf.h): in one global variable, so that a packet
 * reaches it without looking up a map.
 */
#ifndef COREWARD_LB_STATE_H
#define COREWARD_LB_STATE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct lb_state lb_state SEC(".bss.state");

#endif
