/* SPDX-License-Identifier: Apache-2.0 */
/* eigen.c - symmetric eigenvectors: LAPACK where the library is built with it, cyclic Jacobi otherwise. */
#include "codec/ladder.h"
#include "kernels/kernels.h"

#ifdef AKV_HAVE_CBLAS

void ssyev_(const char *jobz, const char *uplo, const int *n, float *a, const int *lda, float *w, float *work, const int *lwork,
            int *info);

uint64_t akv_eigen_scratch_floats(uint32_t n)
{
    return 34 * (uint64_t)n + 64; /* LAPACK asks for (block + 2) n with blocks of 32 */
}

void akv_eigen_symmetric(float *a, uint32_t n, float *values, float *vectors, float *scratch)
{
    int order = (int)n, lwork = (int)akv_eigen_scratch_floats(n), info = 0;
    akv_blas_lock();
    ssyev_("V", "U", &order, a, &order, values, scratch, &lwork, &info);
    akv_blas_unlock();
    /* Column-major eigenvectors: column i is row i of a C array. */
    memcpy(vectors, a, (size_t)n * n * sizeof *a);
    if (info == 0)
        return;
    /* Not converged (never seen): the coordinates themselves are a valid, if poorer, basis. */
    memset(vectors, 0, (size_t)n * n * sizeof *vectors);
    for (uint32_t i = 0; i < n; i++)
        vectors[(size_t)i * n + i] = 1.0f;
}

#else

uint64_t akv_eigen_scratch_floats(uint32_t n)
{
    (void)n;
    return 1;
}

void akv_eigen_symmetric(float *a, uint32_t n, float *values, float *vectors, float *scratch)
{
    (void)scratch;
    memset(vectors, 0, (size_t)n * n * sizeof *vectors);
    for (uint32_t i = 0; i < n; i++)
        vectors[(size_t)i * n + i] = 1.0f;
    for (int sweep = 0; sweep < 16; sweep++) {
        double off = 0.0, diagonal = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            diagonal += (double)a[(size_t)i * n + i] * a[(size_t)i * n + i];
            for (uint32_t j = 0; j < i; j++)
                off += (double)a[(size_t)i * n + j] * a[(size_t)i * n + j];
        }
        if (off <= 1e-12 * diagonal)
            break;
        for (uint32_t p = 0; p + 1 < n; p++)
            for (uint32_t q = p + 1; q < n; q++) {
                double apq = a[(size_t)p * n + q];
                if (apq == 0.0)
                    continue;
                double tau = ((double)a[(size_t)q * n + q] - a[(size_t)p * n + p]) / (2.0 * apq);
                double t = (tau >= 0.0 ? 1.0 : -1.0) / (fabs(tau) + sqrt(1.0 + tau * tau));
                float c = (float)(1.0 / sqrt(1.0 + t * t)), s = (float)(t / sqrt(1.0 + t * t));
                for (uint32_t i = 0; i < n; i++) {
                    float x = a[(size_t)i * n + p], y = a[(size_t)i * n + q];
                    a[(size_t)i * n + p] = c * x - s * y;
                    a[(size_t)i * n + q] = s * x + c * y;
                }
                for (uint32_t i = 0; i < n; i++) {
                    float x = a[(size_t)p * n + i], y = a[(size_t)q * n + i];
                    a[(size_t)p * n + i] = c * x - s * y;
                    a[(size_t)q * n + i] = s * x + c * y;
                }
                for (uint32_t i = 0; i < n; i++) {
                    float x = vectors[(size_t)p * n + i], y = vectors[(size_t)q * n + i];
                    vectors[(size_t)p * n + i] = c * x - s * y;
                    vectors[(size_t)q * n + i] = s * x + c * y;
                }
            }
    }
    for (uint32_t i = 0; i < n; i++)
        values[i] = a[(size_t)i * n + i];
}

#endif
