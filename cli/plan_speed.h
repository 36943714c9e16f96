/* SPDX-License-Identifier: Apache-2.0 */
/* plan_speed.h - whether attention from the compressed form will be faster than dense attention on this machine. */
#ifndef AKV_CLI_PLAN_SPEED_H
#define AKV_CLI_PLAN_SPEED_H

#include <anchorkv/anchorkv.h>

#include <stdbool.h>

/* What was measured in the nearest shape on one thread at 10x; above 1 the compressed form is faster. */
typedef struct plan_speed {
    const char *kernels;    /* that attention will run on */
    double times_dense;     /* time of the library's own dense f16 attention over ours; 0 = not measured */
    double times_ggml;      /* time of ggml's f16 flash attention (on AVX-512) over ours; 0 = not measured */
    const char *why;        /* a reason beside the shape, or NULL */
} plan_speed;

/* For `queries` query tokens at once. gaps: the segment's positions are not consecutive. */
plan_speed plan_speed_of(const akv_shape *shape, const akv_plan_info *info, akv_profile profile, uint64_t queries, bool gaps);

/* "faster", "even", "slower" (than either of the two), "unmeasured" or "dense". */
const char *plan_speed_verdict(const plan_speed *speed, const akv_plan_info *info);

#endif
