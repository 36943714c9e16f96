/* SPDX-License-Identifier: Apache-2.0 */
/*
 * body.h - the inner loops, compiled once per instruction set by the files that include it with AKV_ISA(name) defined.
 * Written with the compiler's generic vectors of 16 floats: a wider machine uses fewer registers for the same lanes, and
 * since sums run over the same lanes in the same order and nothing is contracted, every variant gives the same bits.
 */
#include "core/ladder.h"
#include "kernels/kernels.h"
#include "kernels/lanes.h"

static void row_f32(const uint16_t *x, akv_dtype dtype, uint32_t n, float *out)
{
    uint32_t i = 0;
    if (dtype == AKV_F16) {
        for (; i + LANES <= n; i += LANES)
            store_f32(out + i, load_f16(x + i));
        for (; i < n; i++)
            out[i] = akv_f16_to_f32(x[i]);
    } else {
        for (; i + LANES <= n; i += LANES)
            store_f32(out + i, load_bf16(x + i));
        for (; i < n; i++)
            out[i] = akv_bf16_to_f32(x[i]);
    }
}

#ifdef AKV_OWN_SUMS
#  include "kernels/body_avx2.h"
#else
static void rows_dot(const float *rows, uint32_t num_rows, const float *x, uint32_t dim, float scale, float *out, size_t out_stride)
{
    for (uint32_t r = 0; r < num_rows; r++)
        out[r * out_stride] = scale * dot(rows + (size_t)r * dim, x, dim);
}

static void rows_axpy(const float *w, size_t w_stride, uint32_t num_rows, const float *x, uint32_t dim, float *rows)
{
    for (uint32_t r = 0; r < num_rows; r++)
        if (w[r * w_stride] != 0.0f)
            axpy(w[r * w_stride], x, rows + (size_t)r * dim, dim);
}
#endif

#include "kernels/dense_body.h" /* dense_dots, dense_sums */

/* One plane pair a0, a1 turned. */
#define TURN(a0, a1)                                                                                                   \
    do {                                                                                                               \
        f32x16 c = load_f32(cosine + j), s = load_f32(sine + j);                                                       \
        store_f32(out + j, (a0) * c - (a1) * s);                                                                       \
        store_f32(out + j + r, (a0) * s + (a1) * c);                                                                   \
    } while (0)

static void turn_bf16(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cosine,
                      const float *sine, float *out)
{
    const uint32_t r = rotary_dim / 2;
    const uint32_t step = style == AKV_ROPE_HALF_SPLIT ? 1 : 2, second = style == AKV_ROPE_HALF_SPLIT ? r : 1;
    uint32_t j = 0;
#ifdef AKV_OWN_SUMS
    for (; j + 8 <= r; j += 8)
        turn_eight(a, r, j, style == AKV_ROPE_HALF_SPLIT, cosine, sine, out);
#else
    if (style == AKV_ROPE_HALF_SPLIT)
        for (; j + LANES <= r; j += LANES) {
            f32x16 a0 = load_bf16(a + j), a1 = load_bf16(a + j + r);
            TURN(a0, a1);
        }
    else
        for (; j + LANES <= r; j += LANES) {
            u32x16 pair; /* low half even coordinate, high half odd one */
            memcpy(&pair, a + 2 * j, sizeof pair);
            f32x16 a0 = (f32x16)(pair << 16), a1 = (f32x16)(pair & 0xffff0000u);
            TURN(a0, a1);
        }
#endif
    for (; j < r; j++) {
        float a0 = akv_bf16_to_f32(a[j * step]), a1 = akv_bf16_to_f32(a[j * step + second]);
        out[j] = a0 * cosine[j] - a1 * sine[j];
        out[j + r] = a0 * sine[j] + a1 * cosine[j];
    }
    row_f32(a + rotary_dim, AKV_BF16, dim - rotary_dim, out + rotary_dim);
}

static void anchor_logits(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cosine,
                          const float *sine, float gamma, const float *rows, uint32_t num_rows, float *out, size_t out_stride)
{
    float x[AKV_KERNEL_MAX_DIM];
    turn_bf16(a, dim, rotary_dim, style, cosine, sine, x);
    rows_dot(rows, num_rows, x, dim, gamma, out, out_stride);
}

static void row_i8(const int8_t *x, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        i8x16 b;
        memcpy(&b, x + i, sizeof b);
        store_f32(out + i, __builtin_convertvector(__builtin_convertvector(b, i32x16), f32x16));
    }
    for (; i < n; i++)
        out[i] = (float)x[i];
}

/* n centred 8-bit numbers -> f32. */
INLINE void centred_row(const int8_t *a, float weight, const float *mean, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        i8x16 b;
        memcpy(&b, a + i, sizeof b);
        store_f32(out + i, weight * __builtin_convertvector(__builtin_convertvector(b, i32x16), f32x16) + load_f32(mean + i));
    }
    for (; i < n; i++)
        out[i] = weight * (float)a[i] + mean[i];
}

static void centred_logits(const int8_t *a, float weight, const float *mean, uint32_t dim, uint32_t rotary_dim,
                           akv_rope_style style, const float *cosine, const float *sine, const float *rows, uint32_t num_rows,
                           float *out_logits, size_t out_stride)
{
    float x[AKV_KERNEL_MAX_DIM], out[AKV_KERNEL_MAX_DIM];
    const uint32_t r = rotary_dim / 2;
    uint32_t j = 0;
    centred_row(a, weight, mean, dim, x);
    if (style == AKV_ROPE_HALF_SPLIT)
        for (; j + LANES <= r; j += LANES) {
            f32x16 a0 = load_f32(x + j), a1 = load_f32(x + j + r);
            TURN(a0, a1);
        }
    for (; j < r; j++) {
        float a0 = style == AKV_ROPE_HALF_SPLIT ? x[j] : x[2 * j], a1 = style == AKV_ROPE_HALF_SPLIT ? x[j + r] : x[2 * j + 1];
        out[j] = a0 * cosine[j] - a1 * sine[j];
        out[j + r] = a0 * sine[j] + a1 * cosine[j];
    }
    memcpy(out + rotary_dim, x + rotary_dim, (dim - rotary_dim) * sizeof *out);
    rows_dot(rows, num_rows, out, dim, 1.0f, out_logits, out_stride);
}

static void unpack_group(const uint8_t *codes, uint32_t g, uint32_t dim, float inner, float outer, float *out)
{
    const float levels[4] = {-outer, -inner, inner, outer};
    if (g < AKV_GROUP_LANES) {
        for (uint32_t i = 0; i < dim; i++)
            for (uint32_t r = 0; r < AKV_GROUP_LANES; r++) {
                uint32_t bit = (i * g + r) * 2;
                out[i * AKV_GROUP_LANES + r] = r < g ? levels[(codes[bit / 8] >> (bit % 8)) & 3u] : 0.0f;
            }
        return;
    }
#ifdef AKV_OWN_SUMS
    unpack_full_group(codes, dim, levels, out);
#else
    for (uint32_t i = 0; i < dim * 4; i++) {
        float *o = out + i * 4;
        o[0] = levels[codes[i] & 3u];
        o[1] = levels[(codes[i] >> 2) & 3u];
        o[2] = levels[(codes[i] >> 4) & 3u];
        o[3] = levels[codes[i] >> 6];
    }
#endif
}

static void unpack_level(const uint8_t *codes, uint32_t g, const uint8_t *widths, uint32_t count, float *out)
{
    float levels16[16];
    for (uint32_t n = 0; n < 16; n++)
        levels16[n] = akv_level_value(n, 4);
    if (g < AKV_GROUP_LANES) {
        uint64_t bit = 0;
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t width = widths[i];
            for (uint32_t r = 0; r < AKV_GROUP_LANES; r++) {
                uint64_t at = bit + (uint64_t)r * width;
                float level = 0.0f;
                if (r < g) {
                    uint32_t n = codes[at >> 3] >> (at & 7);
                    if ((at & 7) + width > 8)
                        n |= (uint32_t)codes[(at >> 3) + 1] << (8 - (at & 7));
                    n &= (1u << width) - 1u;
                    level = akv_level_value(n, width);
                }
                out[i * AKV_GROUP_LANES + r] = level;
            }
            bit += (uint64_t)g * width;
        }
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        float *o = out + i * AKV_GROUP_LANES;
        if (widths[i] == 1) {
            uint32_t word = codes[0] | (uint32_t)codes[1] << 8;
            u32x16 c = ((u32x16){0} + word) >> (u32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            u32x16 negative = (~c & 1u) << 31;
            store_f32(o, (f32x16)(negative | akv_bits_f32(AKV_LEVEL_UNIT1)));
        } else if (widths[i] == 2) {
            unpack_group(codes, AKV_GROUP_LANES, 1, akv_level_value(2, 2), akv_level_value(3, 2), o);
        } else {
            for (uint32_t b = 0; b < 8; b++) {
                o[2 * b] = levels16[codes[b] & 15u];
                o[2 * b + 1] = levels16[codes[b] >> 4];
            }
        }
        codes += widths[i] * 2;
    }
}

#ifndef AKV_OWN_LOOPS
static void group_dot(const float *rows, uint32_t num_rows, const float *group, uint32_t dim, float *out)
{
    uint32_t r = 0;
    for (; r + 4 <= num_rows; r += 4) { /* four rows share the loads of the group */
        const float *q = rows + (size_t)r * dim;
        f32x16 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
        for (uint32_t i = 0; i < dim; i++) {
            f32x16 x = load_f32(group + i * AKV_GROUP_LANES);
            a0 += q[i] * x;
            a1 += q[dim + i] * x;
            a2 += q[2 * dim + i] * x;
            a3 += q[3 * dim + i] * x;
        }
        store_f32(out + r * AKV_GROUP_LANES, a0);
        store_f32(out + (r + 1) * AKV_GROUP_LANES, a1);
        store_f32(out + (r + 2) * AKV_GROUP_LANES, a2);
        store_f32(out + (r + 3) * AKV_GROUP_LANES, a3);
    }
    for (; r < num_rows; r++) {
        f32x16 a = {0};
        for (uint32_t i = 0; i < dim; i++)
            a += rows[(size_t)r * dim + i] * load_f32(group + i * AKV_GROUP_LANES);
        store_f32(out + r * AKV_GROUP_LANES, a);
    }
}
#endif

#ifndef AKV_OWN_SUMS
static void group_accumulate(const float *w, uint32_t num_rows, const float *group, uint32_t dim, float *rows)
{
    for (uint32_t r = 0; r < num_rows; r++) {
        f32x16 weights = load_f32(w + r * AKV_GROUP_LANES);
        float *acc = rows + (size_t)r * dim;
        for (uint32_t i = 0; i < dim; i++) {
            f32x16 products = weights * load_f32(group + i * AKV_GROUP_LANES);
            acc[i] += sum_lanes(&products);
        }
    }
}
#endif

#ifndef AKV_OWN_LOOPS
INLINE f32x16 exp_lanes(const f32x16 *in)
{
    f32x16 v = *in;
    i32x16 tiny = v < -87.0f; /* NaN compares false and goes on */
    f32x16 x = (f32x16)(((u32x16)tiny & akv_bits_f32(-87.0f)) | (~(u32x16)tiny & (u32x16)v));
    f32x16 shifted = x * 0x1.715476p+0f + 0x1.8p23f; /* rounds x / ln 2 into the low mantissa bits */
    f32x16 k = shifted - 0x1.8p23f;
    f32x16 r = x - k * 0x1.62e4p-1f - k * 0x1.7f7d1cp-20f; /* ln 2 in two parts */
    f32x16 p = r * (1.0f / 5040.0f) + 1.0f / 720.0f; /* Taylor to degree 7 on |r| <= 0.35: truncation 6e-9 */
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    u32x16 y = (u32x16)(p * (f32x16)(((u32x16)shifted << 23) + 0x3f800000u));
    return (f32x16)(y & ~(u32x16)tiny);
}

static float exp_sum(float *x, uint32_t n, float max)
{
    f32x16 acc = {0};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x16 v = load_f32(x + i) - max, y = exp_lanes(&v);
        store_f32(x + i, y);
        acc += y;
    }
    if (i < n) {
        float tail[LANES];
        for (uint32_t l = 0; l < LANES; l++)
            tail[l] = i + l < n ? x[i + l] - max : -INFINITY;
        f32x16 v = load_f32(tail), y = exp_lanes(&v);
        store_f32(tail, y);
        acc += y;
        memcpy(x + i, tail, (n - i) * sizeof *x);
    }
    return sum_lanes(&acc);
}

static float scale_max(float *x, uint32_t n, float scale, float max)
{
    float m[LANES];
    f32x16 best = (f32x16){0} + max;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32x16 v = load_f32(x + i) * scale;
        i32x16 above = v > best;
        store_f32(x + i, v);
        best = (f32x16)(((u32x16)above & (u32x16)v) | (~(u32x16)above & (u32x16)best));
    }
    store_f32(m, best);
    for (; i < n; i++) {
        x[i] *= scale;
        max = x[i] > max ? x[i] : max;
    }
    for (uint32_t l = 0; l < LANES; l++)
        max = m[l] > max ? m[l] : max;
    return max;
}
#endif

const akv_kernels AKV_ISA(akv_kernels) = {
    AKV_ISA_NAME, row_f32,      rows_dot,     rows_axpy, dense_dots, dense_sums, turn_bf16,        anchor_logits, row_i8, centred_logits,
    unpack_level, unpack_group, group_dot, group_accumulate, exp_sum,   scale_max,
};
