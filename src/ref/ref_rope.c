/* SPDX-License-Identifier: Apache-2.0 */
/* ref_rope.c - the rotary embedding in double precision, phases included. */
#include "ref/ref.h"

#include <math.h>

/* Coordinates of plane j: (j, j + rotary_dim/2) when half-split, (2j, 2j + 1) when interleaved. */
static void plane(const akv_rope *rope, uint32_t j, uint32_t *a, uint32_t *b)
{
    if (rope->style == AKV_ROPE_HALF_SPLIT) {
        *a = j;
        *b = j + rope->rotary_dim / 2;
    } else {
        *a = 2 * j;
        *b = 2 * j + 1;
    }
}

void ref_rope_rotate(const akv_rope *rope, double position, double *x)
{
    for (uint32_t j = 0; j < rope->rotary_dim / 2; j++) {
        uint32_t a, b;
        plane(rope, j, &a, &b);
        double phase = position * rope->inv_freq[j];
        double c = cos(phase), s = sin(phase);
        double u = x[a], v = x[b];
        x[a] = rope->magnitude * (c * u - s * v);
        x[b] = rope->magnitude * (s * u + c * v);
    }
}

void ref_rope_unrotate(const akv_rope *rope, double position, double *x)
{
    for (uint32_t j = 0; j < rope->rotary_dim / 2; j++) {
        uint32_t a, b;
        plane(rope, j, &a, &b);
        double phase = position * rope->inv_freq[j];
        double c = cos(phase), s = sin(phase);
        double u = x[a], v = x[b];
        x[a] = (c * u + s * v) / rope->magnitude;
        x[b] = (c * v - s * u) / rope->magnitude;
    }
}
