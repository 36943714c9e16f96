/* SPDX-License-Identifier: Apache-2.0 */
/* generic.c - the kernels for any machine, and the small ones that have no variants. */
#define AKV_ISA(name) name##_generic
#define AKV_ISA_NAME "generic"
#include "kernels/body.h"

float akv_dot_f32(const float *a, const float *b, uint32_t n)
{
    return dot(a, b, n);
}

void akv_axpy_f32(float w, const float *x, float *y, uint32_t n)
{
    axpy(w, x, y, n);
}

void akv_turn_f32(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *cosine,
                  const double *sine, double magnitude, float *out)
{
    uint32_t r = rotary_dim / 2;
    uint32_t step = style == AKV_ROPE_HALF_SPLIT ? 1 : 2, second = style == AKV_ROPE_HALF_SPLIT ? r : 1;
    for (uint32_t j = 0; j < r; j++) {
        double x0 = x[j * step], x1 = x[j * step + second];
        out[j] = (float)((x0 * cosine[j] - x1 * sine[j]) * magnitude);
        out[j + r] = (float)((x0 * sine[j] + x1 * cosine[j]) * magnitude);
    }
    for (uint32_t i = rotary_dim; i < dim; i++)
        out[i] = x[i];
}

void akv_hadamard_f32(float *x, uint32_t dim)
{
    uint32_t at = 0;
    for (uint32_t block = 1u << 30; block > 0; block >>= 1) {
        if ((dim & block) == 0)
            continue;
        float *b = x + at;
        for (uint32_t half = 1; half < block; half *= 2)
            for (uint32_t i = 0; i < block; i += 2 * half)
                for (uint32_t j = i; j < i + half; j++) {
                    float u = b[j], v = b[j + half];
                    b[j] = u + v;
                    b[j + half] = u - v;
                }
        float norm = (float)(1.0 / sqrt((double)block));
        for (uint32_t i = 0; i < block; i++)
            b[i] *= norm;
        at += block;
    }
}
