/* SPDX-License-Identifier: Apache-2.0 */
/* matrix_generic.c - matrix.h for any machine, and the products that are built on it. */
#include "core/base.h"

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
#define VL 4
#define ROWS 4
#define SPLAT(x) ((vec){(x), (x), (x), (x)})
#define FMA(a, b, c) ((a) * (b) + (c))
#define SQUARE 4

static inline void transpose_square(const float *x, size_t ldx, float *out, size_t ldo)
{
    for (int r = 0; r < SQUARE; r++)
        for (int l = 0; l < SQUARE; l++)
            out[(size_t)l * ldo + (size_t)r] = x[(size_t)r * ldx + (size_t)l];
}

#define AKV_ISA(name) name##_generic
#define AKV_ISA_NAME "generic"
#include "kernels/matrix_body.h"

/* b is transposed a panel at a time: its columns by at most MOST_TURNED of the inner dimension. */
#define MOST_PANEL 48u
#define MOST_TURNED 256u

void akv_gemm_nt(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    const akv_matrix_kernels *kernels = akv_matrix_best();
    float turned[MOST_TURNED * MOST_PANEL];
    if (m == 0)
        return;
    for (size_t j = 0; j < n; j += MOST_PANEL) {
        const size_t columns = n - j < MOST_PANEL ? n - j : MOST_PANEL;
        size_t l = 0;
        do { /* once at least: k = 0 gives zeros */
            const size_t inner = k - l < MOST_TURNED ? k - l : MOST_TURNED;
            kernels->transpose(b + j * ldb + l, ldb, (uint32_t)columns, (uint32_t)inner, turned, MOST_PANEL);
            kernels->multiply(m, columns, inner, a + l, lda, 1, turned, MOST_PANEL, l > 0, c + j, ldc);
            l += inner;
        } while (l < k);
    }
}

void akv_gemm_nn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    akv_matrix_best()->multiply(m, n, k, a, lda, 1, b, ldb, true, c, ldc);
}

void akv_gemm_tn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    akv_matrix_best()->multiply(m, n, k, a, 1, lda, b, ldb, true, c, ldc);
}
