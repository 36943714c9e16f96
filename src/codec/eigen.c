/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eigen.c - eigenvectors of a symmetric matrix: Householder's reduction to tridiagonal form, then the implicit QL
 * algorithm (Golub and Van Loan, "Matrix Computations", chapter 8), so arranged that every inner loop runs along rows.
 * A library's routine would need a lock: the serial build of OpenBLAS, for one, is not safe for two callers at once.
 */
#include "codec/ladder.h"
#include "kernels/kernels.h"

#define MOST_STEPS 60 /* of QL for one eigenvalue; 2 are usual */

uint64_t akv_eigen_scratch_floats(uint32_t n)
{
    return (uint64_t)n * n + 2 * (uint64_t)n;
}

static void identity(uint32_t n, float *m)
{
    memset(m, 0, (size_t)n * n * sizeof *m);
    for (uint32_t i = 0; i < n; i++)
        m[(size_t)i * n + i] = 1.0f;
}

/* y -= w x */
static void subtract(const akv_kernels *kernels, float w, const float *x, uint32_t n, float *y)
{
    const float minus = -w;
    kernels->rows_axpy(&minus, 1, 1, x, n, y);
}

/*
 * a -> diagonal[n], beside[n - 1]; q [n, n] the orthogonal matrix with a = q T q^T. work [2, n]. Row k of a keeps its
 * reflector in the columns after k.
 */
static void reduce(float *a, uint32_t n, double *diagonal, double *beside, float *q, float *work)
{
    const akv_kernels *kernels = akv_kernels_best();
    float factor[AKV_MAX_HEAD_DIM], *p = work, *sums = work + n;
    for (uint32_t k = 0; k + 1 < n; k++) {
        float *v = a + (size_t)k * n + k + 1, square;
        const uint32_t m = n - k - 1;
        kernels->rows_dot(v, 1, v, m, 1.0f, &square, 1);
        diagonal[k] = a[(size_t)k * n + k];
        factor[k] = 0.0f;
        beside[k] = v[0];
        if (m == 1 || square == 0.0f || square == v[0] * v[0])
            continue; /* nothing to reflect */
        const float alpha = v[0] > 0.0f ? -sqrtf(square) : sqrtf(square);
        const float beta = 1.0f / (square - alpha * v[0]); /* 2 / |v - alpha e|^2 */
        beside[k] = alpha;
        v[0] -= alpha;
        factor[k] = beta;
        float vp;
        kernels->rows_dot(v, 1, v, m, 1.0f, &square, 1);
        for (uint32_t i = 0; i < m; i++)
            kernels->rows_dot(a + (size_t)(k + 1 + i) * n + k + 1, 1, v, m, beta, &p[i], 1);
        kernels->rows_dot(v, 1, p, m, 0.5f * beta, &vp, 1);
        subtract(kernels, vp, v, m, p);
        for (uint32_t i = 0; i < m; i++) {
            float *row = a + (size_t)(k + 1 + i) * n + k + 1;
            subtract(kernels, v[i], p, m, row);
            subtract(kernels, p[i], v, m, row);
        }
    }
    diagonal[n - 1] = a[(size_t)n * n - 1];
    identity(n, q);
    for (uint32_t k = n - 1; k-- > 0;) { /* q := H_k q, which is the identity outside rows and columns after k */
        const float *v = a + (size_t)k * n + k + 1;
        const uint32_t m = n - k - 1;
        if (factor[k] == 0.0f)
            continue;
        memset(sums, 0, m * sizeof *sums);
        for (uint32_t i = 0; i < m; i++)
            kernels->rows_axpy(&v[i], 1, 1, q + (size_t)(k + 1 + i) * n + k + 1, m, sums);
        for (uint32_t i = 0; i < m; i++)
            subtract(kernels, factor[k] * v[i], sums, m, q + (size_t)(k + 1 + i) * n + k + 1);
    }
}

/* Rows x and y turned: x := c x - s y, y := s x + c y. */
static void turn_rows(float c, float s, float *x, float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const float u = x[i], v = y[i];
        x[i] = c * u - s * v;
        y[i] = s * u + c * v;
    }
}

/*
 * Diagonal d[n] and e[n - 1] beside it (e[n] scratch) -> eigenvalues in d; rows [n, n] turned along. False: did not
 * converge.
 */
static bool iterate(double *d, double *e, uint32_t n, float *rows)
{
    e[n - 1] = 0.0;
    for (uint32_t l = 0; l + 1 < n; l++)
        for (uint32_t step = 0;; step++) {
            uint32_t m = l;
            while (m + 1 < n && fabs(e[m]) > 1e-9 * (fabs(d[m]) + fabs(d[m + 1])))
                m++;
            if (m == l)
                break;
            if (step == MOST_STEPS)
                return false;
            const double half = (d[l + 1] - d[l]) / (2.0 * e[l]), root = akv_hypot(half, 1.0);
            double g = d[m] - d[l] + e[l] / (half + (half >= 0.0 ? root : -root)), s = 1.0, c = 1.0, p = 0.0;
            bool split = false;
            for (uint32_t i = m; i-- > l && !split;) {
                const double f = s * e[i], b = c * e[i], r = akv_hypot(f, g);
                e[i + 1] = r;
                split = r == 0.0;
                if (split) {
                    d[i + 1] -= p;
                } else {
                    s = f / r;
                    c = g / r;
                    g = d[i + 1] - p;
                    const double t = (d[i] - g) * s + 2.0 * c * b;
                    p = s * t;
                    d[i + 1] = g + p;
                    g = c * t - b;
                    turn_rows((float)c, (float)s, rows + (size_t)i * n, rows + (size_t)(i + 1) * n, n);
                }
            }
            if (!split) {
                d[l] -= p;
                e[l] = g;
            }
            e[m] = 0.0;
        }
    return true;
}

void akv_eigen_symmetric(float *a, uint32_t n, float *values, float *vectors, float *scratch)
{
    double d[AKV_MAX_HEAD_DIM], e[AKV_MAX_HEAD_DIM];
    float *q = scratch, most = 0.0f;
    for (size_t i = 0; i < (size_t)n * n; i++)
        most = fabsf(a[i]) > most ? fabsf(a[i]) : most;
    const float down = most > 1e-30f ? 1.0f / most : 0.0f; /* so that no square overflows */
    for (size_t i = 0; i < (size_t)n * n; i++)
        a[i] *= down;
    reduce(a, n, d, e, q, scratch + (size_t)n * n);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++)
            vectors[(size_t)i * n + j] = q[(size_t)j * n + i];
    if (!iterate(d, e, n, vectors)) /* never seen; the coordinates themselves are a valid, if poorer, basis */
        identity(n, vectors);
    for (uint32_t i = 0; i < n; i++)
        values[i] = (float)(d[i] * most);
}
