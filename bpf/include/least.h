/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* The least of several numbers, for places where no branch predictor knows which one it is. */
#ifndef COREWARD_INCLUDE_LEAST_H
#define COREWARD_INCLUDE_LEAST_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/*
 * The less of two numbers below 2^63, without a branch: a wrong guess of the CPU costs as much as several
 * comparisons.
 */
static __always_inline __s64 min_s64(__s64 a, __s64 b)
{
	__s64 difference = a - b, sign = difference >> 63;

	/* clang would make a branch of it. */
	barrier_var(sign);
	return b + (difference & sign);
}

#endif
