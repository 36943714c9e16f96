/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scalar.c - portable kernels, written so that a compiler without -ffast-math can vectorise them: sums run over
 * independent lanes, never over one chain.
 */
#include "kernels/kernels.h"

#define LANES 16

float akv_dot_f32(const float *a, const float *b, uint32_t n)
{
    float acc[LANES] = {0};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (uint32_t l = 0; l < LANES; l++)
            acc[l] += a[i + l] * b[i + l];
    for (uint32_t l = 0; i < n; i++, l++)
        acc[l] += a[i] * b[i];
    for (uint32_t half = LANES / 2; half > 0; half /= 2)
        for (uint32_t l = 0; l < half; l++)
            acc[l] += acc[l + half];
    return acc[0];
}

void akv_axpy_f32(float w, const float *x, float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] += w * x[i];
}

void akv_exp_f32(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        float v = x[i];
        float in = v < -87.0f ? -87.0f : v; /* NaN compares false and goes on */
        /* Adding 1.5 * 2^23 rounds to an integer in the low mantissa bits. */
        float shifted = in * 0x1.715476p+0f + 0x1.8p23f;
        float k = shifted - 0x1.8p23f;
        float r = in - k * 0x1.62e4p-1f;
        r = r - k * 0x1.7f7d1cp-20f; /* ln 2 in two parts, so that k * ln 2 is exact enough */
        /* Taylor to degree 7 on |r| <= 0.35: truncation 6e-9. */
        float p = 1.0f / 5040.0f;
        p = p * r + 1.0f / 720.0f;
        p = p * r + 1.0f / 120.0f;
        p = p * r + 1.0f / 24.0f;
        p = p * r + 1.0f / 6.0f;
        p = p * r + 0.5f;
        p = p * r + 1.0f;
        p = p * r + 1.0f;
        float y = p * akv_f32_bits((akv_bits_f32(shifted) << 23) + 0x3f800000u);
        x[i] = v < -87.0f ? 0.0f : y;
    }
}

void akv_turn_bf16(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cos,
                   const float *sin, float *out)
{
    uint32_t r = rotary_dim / 2;
    if (cos == NULL || r == 0) {
        for (uint32_t i = 0; i < dim; i++)
            out[i] = akv_bf16_to_f32(a[i]);
        return;
    }
    if (style == AKV_ROPE_HALF_SPLIT)
        for (uint32_t j = 0; j < r; j++) {
            float a0 = akv_bf16_to_f32(a[j]), a1 = akv_bf16_to_f32(a[j + r]);
            out[j] = a0 * cos[j] - a1 * sin[j];
            out[j + r] = a0 * sin[j] + a1 * cos[j];
        }
    else
        for (uint32_t j = 0; j < r; j++) {
            float a0 = akv_bf16_to_f32(a[2 * j]), a1 = akv_bf16_to_f32(a[2 * j + 1]);
            out[j] = a0 * cos[j] - a1 * sin[j];
            out[j + r] = a0 * sin[j] + a1 * cos[j];
        }
    for (uint32_t i = rotary_dim; i < dim; i++)
        out[i] = akv_bf16_to_f32(a[i]);
}

void akv_turn_f32(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *cos,
                  const double *sin, double magnitude, float *out)
{
    uint32_t r = rotary_dim / 2;
    uint32_t step = style == AKV_ROPE_HALF_SPLIT ? 1 : 2, second = style == AKV_ROPE_HALF_SPLIT ? r : 1;
    for (uint32_t j = 0; j < r; j++) {
        double x0 = x[j * step], x1 = x[j * step + second];
        out[j] = (float)((x0 * cos[j] - x1 * sin[j]) * magnitude);
        out[j + r] = (float)((x0 * sin[j] + x1 * cos[j]) * magnitude);
    }
    for (uint32_t i = rotary_dim; i < dim; i++)
        out[i] = x[i];
}

void akv_from_plane_order(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, float *out)
{
    uint32_t r = rotary_dim / 2;
    if (style == AKV_ROPE_HALF_SPLIT) {
        memcpy(out, x, dim * sizeof *out);
        return;
    }
    for (uint32_t j = 0; j < r; j++) {
        out[2 * j] = x[j];
        out[2 * j + 1] = x[j + r];
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

void akv_unpack_group(const uint8_t *codes, uint32_t g, uint32_t dim, const float levels[4], float *out)
{
    if (g == AKV_GROUP_LANES) {
        for (uint32_t i = 0; i < dim; i++)
            for (uint32_t b = 0; b < 4; b++) {
                uint32_t c = codes[i * 4 + b];
                float *o = out + i * AKV_GROUP_LANES + b * 4;
                o[0] = levels[c & 3u];
                o[1] = levels[(c >> 2) & 3u];
                o[2] = levels[(c >> 4) & 3u];
                o[3] = levels[c >> 6];
            }
        return;
    }
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t r = 0; r < AKV_GROUP_LANES; r++) {
            uint32_t bit = (i * g + r) * 2;
            out[i * AKV_GROUP_LANES + r] = r < g ? levels[(codes[bit / 8] >> (bit % 8)) & 3u] : 0.0f;
        }
}

void akv_group_dot(const float *q, const float *group, uint32_t dim, float out[AKV_GROUP_LANES])
{
    float acc[AKV_GROUP_LANES] = {0};
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t r = 0; r < AKV_GROUP_LANES; r++)
            acc[r] += q[i] * group[i * AKV_GROUP_LANES + r];
    memcpy(out, acc, sizeof acc);
}

void akv_group_accumulate(const float w[AKV_GROUP_LANES], const float *group, uint32_t dim, float *acc)
{
    for (uint32_t i = 0; i < dim; i++)
        acc[i] += akv_dot_f32(w, group + i * AKV_GROUP_LANES, AKV_GROUP_LANES);
}
