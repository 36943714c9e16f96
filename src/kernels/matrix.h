/* SPDX-License-Identifier: Apache-2.0 */
/*
 * matrix.h - the matrix products of compression, in one thread each: the library cuts the work into tasks itself, so that
 * results depend on shapes only. No lock, no memory but the stack, no state.
 *
 * Every sum runs over the inner dimension in order, in fp32. Machines with fused multiply-adds (AVX2, AVX-512) therefore give
 * the same bits as each other; the generic variant rounds products too and differs within fp32 rounding.
 */
#ifndef AKV_MATRIX_H
#define AKV_MATRIX_H

#include "core/base.h"
#include "kernels/cpu.h"

typedef struct akv_matrix_kernels {
    const char *isa;

    /* c[i, j] (+)= sum_l a[i * a_row + l * a_col] * b[l * ldb + j]; i < m, j < n, l < k. add: to what c holds. */
    void (*multiply)(size_t m, size_t n, size_t k, const float *a, size_t a_row, size_t a_col, const float *b, size_t ldb, bool add,
                     float *c, size_t ldc);

    /* out[l * ldo + i] = x[i * ldx + l]; i < n, l < dim. */
    void (*transpose)(const float *x, size_t ldx, uint32_t n, uint32_t dim, float *out, size_t ldo);

    /*
     * For each of n columns of x [dim, n] (row stride ldx) the row of units [k, dim] with the largest |unit . x|, the first of
     * equal ones: its number -> nearest, unit . x -> along; 0 and 0 where no product is above 0 (or NaN).
     */
    void (*nearest)(const float *units, uint32_t k, uint32_t dim, const float *x, size_t ldx, uint32_t n, uint32_t *nearest,
                    float *along);
} akv_matrix_kernels;

#define AKV_MATRICES(isa, level) extern const akv_matrix_kernels akv_matrix_##isa;
#include "kernels/kernels.def"

/* The fastest variant below the cap (cpu.h). */
const akv_matrix_kernels *akv_matrix_best(void);

/* c[m, n] = a[m, k] . b[n, k]^T, all row-major with row strides lda, ldb, ldc. */
void akv_gemm_nt(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc);

/* c[m, n] += a[m, k] . b[k, n]. */
void akv_gemm_nn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c,
                     size_t ldc);

/* c[m, n] += a[k, m]^T . b[k, n]. */
void akv_gemm_tn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c,
                     size_t ldc);

#endif
