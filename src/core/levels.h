/* SPDX-License-Identifier: Apache-2.0 */
/* levels.h - the reconstruction levels of 2-bit codes, shared by writer, readers and kernels. */
#ifndef AKV_LEVELS_H
#define AKV_LEVELS_H

/* Lloyd-Max quantiser of the unit Gaussian with four levels; decision boundaries are 0 and +-0.9816. */
#define AKV_LLOYD_MAX_INNER 0.4528f
#define AKV_LLOYD_MAX_OUTER 1.5104f
#define AKV_LLOYD_MAX_BOUND 0.9816f

static const float akv_levels_lloyd_max[4] = {-AKV_LLOYD_MAX_OUTER, -AKV_LLOYD_MAX_INNER, AKV_LLOYD_MAX_INNER,
                                              AKV_LLOYD_MAX_OUTER};
static const float akv_levels_uniform[4] = {-1.0f, -1.0f / 3.0f, 1.0f / 3.0f, 1.0f};

#endif
