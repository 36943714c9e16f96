/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the contract of the inner loops. Kernels never allocate, lock, log or branch on models; every buffer is
 * the caller's, none overlaps another, n == 0 is a no-op. fp32 accumulation in a fixed order, so a build gives the same
 * bits on every call. "Rows" are query rows: the G heads of a group times the query tokens.
 *
 * Plane order: the key-side order in which the first halves of all RoPE planes come first, then the second halves, then
 * the coordinates without rotation. Half-split keys are in plane order already; interleaved pairs (2j, 2j+1) are taken
 * apart. Dot products do not care, and one inner loop serves both styles.
 */
#ifndef AKV_KERNELS_H
#define AKV_KERNELS_H

#include "core/base.h"
#include "core/layout.h"

/* sum_i a[i] * b[i]. */
float akv_dot_f32(const float *a, const float *b, uint32_t n);

/* y[i] += w * x[i]. */
void akv_axpy_f32(float w, const float *x, float *y, uint32_t n);

/*
 * exp(x) for x <= 0, relative error below 2e-7 down to -87; smaller x (minus infinity included) give 0. NaN stays NaN.
 * Vectorises, and is the same on every libm.
 */
void akv_exp_f32(float *x, uint32_t n);

/*
 * Turn one bf16 anchor by a table row and put it into plane order:
 *   out[j]     = a0 * cos[j] - a1 * sin[j],  out[j + r] = a0 * sin[j] + a1 * cos[j],  r = rotary_dim / 2
 * a0, a1 being the two coordinates of plane j. cos == NULL copies without turning.
 */
void akv_turn_bf16(const uint16_t *a, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const float *cos,
                   const float *sin, float *out);

/* The same for f32 with double tables and a magnitude, into plane order; sign = -1 turns back. In-place is not allowed. */
void akv_turn_f32(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *cos,
                  const double *sin, double magnitude, float *out);

/* Plane order -> the style's own order. */
void akv_from_plane_order(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, float *out);

/*
 * x := Hd x, in place: the orthonormal Walsh-Hadamard transform over the greedy power-of-two blocks of dim. Its own
 * inverse.
 */
void akv_hadamard_f32(float *x, uint32_t dim);

/*
 * Unpack a group of g <= AKV_GROUP_LANES 2-bit codes (layout.h) to levels: out[i * AKV_GROUP_LANES + r] = level of
 * coordinate i of residual r; lanes >= g are 0.
 */
void akv_unpack_group(const uint8_t *codes, uint32_t g, uint32_t dim, const float levels[4], float *out);

/* out[r] = sum_i q[i] * group[i * AKV_GROUP_LANES + r] for all lanes. */
void akv_group_dot(const float *q, const float *group, uint32_t dim, float out[AKV_GROUP_LANES]);

/* acc[i] += sum_r w[r] * group[i * AKV_GROUP_LANES + r] over all lanes. */
void akv_group_accumulate(const float w[AKV_GROUP_LANES], const float *group, uint32_t dim, float *acc);

/*
 * c[m, n] = a[m, k] . b[n, k]^T, all row-major and contiguous with row strides lda, ldb, ldc. BLAS when built with it,
 * else plain loops: equal within fp32 rounding.
 */
void akv_gemm_nt(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc);

/* c[m, n] += a[m, k] . b[k, n]. */
void akv_gemm_nn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c,
                     size_t ldc);

#endif
