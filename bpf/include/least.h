/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Minimum of two numbers without a branch, which a branch predictor could not predict. */
#ifndef COREWARD_INCLUDE_LEAST_H
#define COREWARD_INCLUDE_LEAST_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/*
 * Returns the lesser of two numbers below 2^63. It has no branch, because a wrong prediction costs as much as several
 * comparisons.
 */
static __always_inline __s64 min_s64(__s64 a, __s64 b)
{
	__s64 difference = a - b, sign = difference >> 63;

	/* Keeps clang from generating a branch. */
	barrier_var(sign);
	return b + (difference & sign);
}

#endif
