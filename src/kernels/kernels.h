/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the contract of the inner loops. Kernels never allocate, lock, log or branch on models; every buffer is
 * the caller's, none overlaps another unless said, n == 0 is a no-op. fp32 accumulation in a fixed order: the same bits
 * on every call and in every variant of the table (same 16 lanes, no contraction).
 *
 * "Rows" are query rows, [num_rows, dim] contiguous: the G heads of a group times the query tokens.
 *
 * Plane order: the key-side order in which the first coordinates of all RoPE planes come first, then the second ones,
 * then the coordinates without rotation. Half-split keys are in plane order already; interleaved pairs (2j, 2j+1) are
 * taken apart. Dot products do not care, and one inner loop serves both styles.
 */
#ifndef AKV_KERNELS_H
#define AKV_KERNELS_H

#include "core/base.h"
#include "core/layout.h"
#include "kernels/cpu.h"

#define AKV_KERNEL_MAX_DIM 1024

typedef struct akv_kernels {
    const char *isa;

    /* n f16 or bf16 numbers -> f32, exact. */
    void (*row_f32)(const uint16_t *x, akv_dtype dtype, uint32_t n, float *out);

    /* out[r * out_stride] = scale * <rows[r], x>. */
    void (*rows_dot)(const float *rows, uint32_t num_rows, const float *x, uint32_t dim, float scale, float *out, size_t out_stride);

    /* rows[r] += w[r * w_stride] * x; a weight of 0 skips its row. */
    void (*rows_axpy)(const float *w, size_t w_stride, uint32_t num_rows, const float *x, uint32_t dim, float *rows);

    /*
     * rows_dot and rows_axpy over n f16 or bf16 vectors x_t = x + t * x_stride, the same bits:
     *   out[r * out_stride + t] = <rows[r], x_t>,  rows[r] += w[r * w_stride + t] * x_t, t rising; a weight of 0 skips its row.
     */
    void (*dense_dots)(const float *rows, uint32_t num_rows, const uint16_t *x, int64_t x_stride, akv_dtype dtype, uint32_t n,
                       uint32_t dim, float *out, size_t out_stride);
    void (*dense_sums)(const float *w, size_t w_stride, uint32_t num_rows, const uint16_t *x, int64_t x_stride, akv_dtype dtype,
                       uint32_t n, uint32_t dim, float *rows);

    /*
     * One bf16 vector turned by a table row, into plane order, r = rotary_dim / 2:
     *   out[j] = a0 cos[j] - a1 sin[j],  out[j + r] = a0 sin[j] + a1 cos[j],  the rest copied. rotary_dim 0 only copies.
     */
    void (*turn_bf16)(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cosine,
                      const float *sine, float *out);

    /* turn_bf16, then out[r * out_stride] = gamma * <rows[r], turned>: the anchor logit of one token. */
    void (*anchor_logits)(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cosine,
                          const float *sine, float gamma, const float *rows, uint32_t num_rows, float *out, size_t out_stride);

    /* n signed bytes -> f32. */
    void (*row_i8)(const int8_t *x, uint32_t n, float *out);

    /*
     * One anchor of 8 bits, centred: x = weight * a + mean, turned as turn_bf16 does, then out[r * out_stride] = <rows[r], x>.
     */
    void (*centred_logits)(const int8_t *a, float weight, const float *mean, uint32_t dim, uint32_t rotary_dim,
                           akv_rope_style style, const float *cosine, const float *sine, const float *rows, uint32_t num_rows,
                           float *out, size_t out_stride);

    /*
     * A group of g residuals of a LADDER level (layout.h), widths 1, 2 or 4 bits per coordinate -> Lloyd-Max levels:
     * out[i * AKV_GROUP_LANES + r], lanes >= g are 0.
     */
    void (*unpack_level)(const uint8_t *codes, uint32_t g, const uint8_t *widths, uint32_t count, float *out);

    /*
     * A group of g <= AKV_GROUP_LANES 2-bit codes (layout.h) -> levels -outer, -inner, inner, outer:
     * out[i * AKV_GROUP_LANES + r] is coordinate i of residual r; lanes >= g are 0.
     */
    void (*unpack_group)(const uint8_t *codes, uint32_t g, uint32_t dim, float inner, float outer, float *out);

    /* out[r * AKV_GROUP_LANES + l] = sum_i rows[r][i] * group[i * AKV_GROUP_LANES + l]. */
    void (*group_dot)(const float *rows, uint32_t num_rows, const float *group, uint32_t dim, float *out);

    /* rows[r][i] += sum_l w[r * AKV_GROUP_LANES + l] * group[i * AKV_GROUP_LANES + l]. */
    void (*group_accumulate)(const float *w, uint32_t num_rows, const float *group, uint32_t dim, float *rows);

    /*
     * x[i] := exp(x[i] - max), returns their sum. max is finite and no x above it; relative error of each below 2e-7 down
     * to exp(-87), 0 below (minus infinity included). NaN stays NaN.
     */
    float (*exp_sum)(float *x, uint32_t n, float max);

    /* x[i] *= scale; returns the largest of max and all x (NaN ignored). */
    float (*scale_max)(float *x, uint32_t n, float scale, float max);
} akv_kernels;

/* The variants of this build; those above akv_cpu_machine() must not be called. */
#define AKV_KERNELS(isa, level) extern const akv_kernels akv_kernels_##isa;
#include "kernels/kernels.def"

/* The fastest variant below the cap (cpu.h). */
const akv_kernels *akv_kernels_best(void);

/* sum_i a[i] * b[i]. */
float akv_dot_f32(const float *a, const float *b, uint32_t n);

/* y[i] += w * x[i]. */
void akv_axpy_f32(float w, const float *x, float *y, uint32_t n);

/*
 * f32 rotation with double tables and a magnitude, into plane order. In-place is not allowed.
 */
void akv_turn_f32(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *cosine,
                  const double *sine, double magnitude, float *out);

/*
 * x := Hd x, in place: the orthonormal Walsh-Hadamard transform over the greedy power-of-two blocks of dim. Its own
 * inverse.
 */
void akv_hadamard_f32(float *x, uint32_t dim);

#endif
