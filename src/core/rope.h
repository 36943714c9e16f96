/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope.h - exact rotation phases. position * inv_freq is formed in double and only then reduced, so that a position of
 * a million costs 1e-10 rad, not the 0.1 rad of single precision.
 */
#ifndef AKV_ROPE_H
#define AKV_ROPE_H

#include "core/base.h"

/* cos/sin of position * inv_freq[j]; position may be negative (turns back). */
static inline void akv_rope_phase(const double *inv_freq, uint32_t planes, int64_t position, double *cos_out, double *sin_out)
{
    for (uint32_t j = 0; j < planes; j++) {
        double angle = (double)position * inv_freq[j];
        cos_out[j] = cos(angle);
        sin_out[j] = sin(angle);
    }
}

#endif
