/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * State of the load balancer that user space writes and that outlives its process (intf.h). It is a global variable,
 * which a packet reads without a map look-up.
 */
#ifndef COREWARD_LB_STATE_H
#define COREWARD_LB_STATE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct lb_state lb_state SEC(".bss.state");

#endif
