/* SPDX-License-Identifier: Apache-2.0 */
/*
 * matrix_body.h - matrix.h, compiled once per instruction set by the files that include it. They define VL floats in a vec,
 * ROWS rows of a block held in registers (ROWS x 3 vectors of sums, 3 of b, one of a), and FMA(a, b, c) = a * b + c.
 *
 * b is read by vectors along its rows and a one number at a time, so neither needs packing unless b lies the other way
 * round (akv_gemm_nt), which is then transposed panel by panel.
 */
#include "kernels/matrix.h"

#ifdef __GNUC__
#  pragma GCC diagnostic ignored "-Wpsabi" /* vectors never cross a function that is not inlined */
#endif
#define INLINE static inline __attribute__((always_inline))
#define VECS 3                  /* vectors of a panel */
#define PANEL (VECS * VL)
#define MOST_DIM 1024u          /* AKV_MAX_HEAD_DIM */

INLINE vec load(const float *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

#define STORE(p, v)                                                                                                    \
    do {                                                                                                               \
        vec stored_ = (v);                                                                                             \
        memcpy((p), &stored_, sizeof stored_);                                                                         \
    } while (0)

/* Sums of `rows` x `vecs` vectors over k -> s. */
#define SUMS(rows, vecs)                                                                                               \
    for (size_t l = 0; l < k; l++) {                                                                                   \
        const float *bl = b + l * ldb;                                                                                 \
        vec x[VECS];                                                                                                   \
        for (int v = 0; v < (vecs); v++)                                                                               \
            x[v] = load(bl + v * VL);                                                                                  \
        for (int r = 0; r < (rows); r++) {                                                                             \
            const vec w = SPLAT(a[(size_t)r * a_row + l * a_col]);                                                     \
            for (int v = 0; v < (vecs); v++)                                                                           \
                s[r][v] = FMA(w, x[v], s[r][v]);                                                                       \
        }                                                                                                              \
    }

INLINE void block(int rows, int vecs, size_t k, const float *a, size_t a_row, size_t a_col, const float *b, size_t ldb, bool add,
                  float *c, size_t ldc)
{
    vec s[ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            s[r][v] = add ? load(c + (size_t)r * ldc + v * VL) : SPLAT(0.0f);
    SUMS(rows, vecs)
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            STORE(c + (size_t)r * ldc + v * VL, s[r][v]);
}

/* All m rows of a panel of `vecs` vectors. */
INLINE void panel(int vecs, size_t m, size_t k, const float *a, size_t a_row, size_t a_col, const float *b, size_t ldb, bool add,
                  float *c, size_t ldc)
{
    size_t i = 0;
    for (; i + ROWS <= m; i += ROWS)
        block(ROWS, vecs, k, a + i * a_row, a_row, a_col, b, ldb, add, c + i * ldc, ldc);
    for (; ROWS > 4 && i + 4 <= m; i += 4)
        block(4, vecs, k, a + i * a_row, a_row, a_col, b, ldb, add, c + i * ldc, ldc);
    for (; i + 2 <= m; i += 2)
        block(2, vecs, k, a + i * a_row, a_row, a_col, b, ldb, add, c + i * ldc, ldc);
    if (i < m)
        block(1, vecs, k, a + i * a_row, a_row, a_col, b, ldb, add, c + i * ldc, ldc);
}

static void multiply(size_t m, size_t n, size_t k, const float *a, size_t a_row, size_t a_col, const float *b, size_t ldb, bool add,
                     float *c, size_t ldc)
{
    size_t j = 0;
    for (; j + PANEL <= n; j += PANEL)
        panel(VECS, m, k, a, a_row, a_col, b + j, ldb, add, c + j, ldc);
    if (j + 2 * VL <= n) {
        panel(2, m, k, a, a_row, a_col, b + j, ldb, add, c + j, ldc);
        j += 2 * VL;
    }
    if (j + VL <= n) {
        panel(1, m, k, a, a_row, a_col, b + j, ldb, add, c + j, ldc);
        j += VL;
    }
    if (j == n)
        return;
    /* The last columns, by one vector through the stack. */
    const size_t width = (n - j) * sizeof *c;
    for (size_t i = 0; i < m; i++) {
        float out[VL] = {0};
        if (add)
            memcpy(out, c + i * ldc + j, width);
        vec s = load(out);
        for (size_t l = 0; l < k; l++) {
            float last[VL] = {0};
            memcpy(last, b + l * ldb + j, width);
            s = FMA(SPLAT(a[i * a_row + l * a_col]), load(last), s);
        }
        STORE(out, s);
        memcpy(c + i * ldc + j, out, width);
    }
}

static void transpose(const float *x, size_t ldx, uint32_t n, uint32_t dim, float *out, size_t ldo)
{
    uint32_t i = 0;
    for (; i + SQUARE <= n; i += SQUARE) {
        uint32_t l = 0;
        for (; l + SQUARE <= dim; l += SQUARE)
            transpose_square(x + i * ldx + l, ldx, out + l * ldo + i, ldo);
        for (; l < dim; l++)
            for (uint32_t r = 0; r < SQUARE; r++)
                out[l * ldo + i + r] = x[(i + r) * ldx + l];
    }
    for (; i < n; i++)
        for (uint32_t l = 0; l < dim; l++)
            out[l * ldo + i] = x[i * ldx + l];
}

/* Nearest of `rows` units for `vecs` vectors of columns; best holds |product|, found the product, at the unit's number. */
INLINE void nearest_block(int rows, int vecs, const float *a, uint32_t k, const float *b, size_t ldb, uint32_t first, vec *best,
                          vec *found, ivec *at)
{
    const size_t a_row = k, a_col = 1;
    vec s[ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            s[r][v] = SPLAT(0.0f);
    SUMS(rows, vecs)
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) {
            const vec size = (vec)((ivec)s[r][v] & 0x7fffffff);
            const ivec more = size > best[v]; /* NaN is not */
            best[v] = (vec)((more & (ivec)size) | (~more & (ivec)best[v]));
            found[v] = (vec)((more & (ivec)s[r][v]) | (~more & (ivec)found[v]));
            at[v] = (more & (int32_t)(first + (uint32_t)r)) | (~more & at[v]);
        }
}

INLINE void nearest_panel(int vecs, const float *units, uint32_t k, uint32_t dim, const float *x, size_t ldx, uint32_t *nearest,
                          float *along)
{
    vec best[VECS], found[VECS];
    ivec at[VECS];
    for (int v = 0; v < vecs; v++) {
        best[v] = found[v] = SPLAT(0.0f);
        at[v] = (ivec)SPLAT(0.0f);
    }
    uint32_t i = 0;
    for (; i + ROWS <= k; i += ROWS)
        nearest_block(ROWS, vecs, units + (size_t)i * dim, dim, x, ldx, i, best, found, at);
    for (; ROWS > 4 && i + 4 <= k; i += 4)
        nearest_block(4, vecs, units + (size_t)i * dim, dim, x, ldx, i, best, found, at);
    for (; i + 2 <= k; i += 2)
        nearest_block(2, vecs, units + (size_t)i * dim, dim, x, ldx, i, best, found, at);
    for (; i < k; i++)
        nearest_block(1, vecs, units + (size_t)i * dim, dim, x, ldx, i, best, found, at);
    for (int v = 0; v < vecs; v++) {
        memcpy(nearest + v * VL, &at[v], sizeof at[v]);
        memcpy(along + v * VL, &found[v], sizeof found[v]);
    }
}

static void nearest(const float *units, uint32_t k, uint32_t dim, const float *x, size_t ldx, uint32_t n, uint32_t *number, float *along)
{
    uint32_t j = 0;
    for (; j + PANEL <= n; j += PANEL)
        nearest_panel(VECS, units, k, dim, x + j, ldx, number + j, along + j);
    for (; j + VL <= n; j += VL)
        nearest_panel(1, units, k, dim, x + j, ldx, number + j, along + j);
    if (j == n)
        return;
    float last[MOST_DIM * VL];
    uint32_t last_number[VL];
    float last_along[VL];
    memset(last, 0, (size_t)dim * VL * sizeof *last);
    for (uint32_t l = 0; l < dim; l++)
        memcpy(last + (size_t)l * VL, x + l * ldx + j, (n - j) * sizeof *x);
    nearest_panel(1, units, k, dim, last, VL, last_number, last_along);
    memcpy(number + j, last_number, (n - j) * sizeof *number);
    memcpy(along + j, last_along, (n - j) * sizeof *along);
}

const akv_matrix_kernels AKV_ISA(akv_matrix) = {AKV_ISA_NAME, multiply, transpose, nearest};
