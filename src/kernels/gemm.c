/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.c - the matrix products of compression, by BLAS or by plain loops. */
#include "kernels/kernels.h"

#ifdef AKV_HAVE_CBLAS
#include <cblas.h>
#include <pthread.h>

/*
 * One call at a time. The serial build of OpenBLAS shares its packing buffers between callers: two threads inside it at
 * once gave wrong products (in 1 of about 110 layers compressed on 2 threads; never without BLAS).
 */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

void akv_blas_lock(void)
{
    pthread_mutex_lock(&turn);
}

void akv_blas_unlock(void)
{
    pthread_mutex_unlock(&turn);
}

void akv_gemm_nt(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    if (m == 0 || n == 0)
        return;
    akv_blas_lock();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)k, 1.0f, a, (int)lda, b, (int)ldb, 0.0f, c,
                (int)ldc);
    akv_blas_unlock();
}

void akv_gemm_nn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    if (m == 0 || n == 0 || k == 0)
        return;
    akv_blas_lock();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a, (int)lda, b, (int)ldb, 1.0f, c,
                (int)ldc);
    akv_blas_unlock();
}

void akv_gemm_tn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    if (m == 0 || n == 0 || k == 0)
        return;
    akv_blas_lock();
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a, (int)lda, b, (int)ldb, 1.0f, c,
                (int)ldc);
    akv_blas_unlock();
}

#else

void akv_gemm_nt(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++)
            c[i * ldc + j] = akv_dot_f32(a + i * lda, b + j * ldb, (uint32_t)k);
}

void akv_gemm_nn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    for (size_t i = 0; i < m; i++)
        for (size_t l = 0; l < k; l++)
            akv_axpy_f32(a[i * lda + l], b + l * ldb, c + i * ldc, (uint32_t)n);
}

void akv_gemm_tn_add(size_t m, size_t n, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc)
{
    for (size_t l = 0; l < k; l++)
        for (size_t i = 0; i < m; i++)
            if (a[l * lda + i] != 0.0f)
                akv_axpy_f32(a[l * lda + i], b + l * ldb, c + i * ldc, (uint32_t)n);
}

#endif
