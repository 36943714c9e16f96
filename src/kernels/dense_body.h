/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dense_body.h - attention over rows of 16-bit numbers, four tokens or 64 coordinates and up to four query rows at a time: a part of
 * body.h, which includes it after row_f32, rows_dot and rows_axpy. The bits are those of rows_dot and rows_axpy.
 */
#ifndef AKV_OWN_LOOPS /* or in body_avx2.h */
INLINE f32x16 load_16_bit(const uint16_t *p, bool is_f16)
{
    return is_f16 ? load_f16(p) : load_bf16(p);
}

/* sum_lanes of two vectors of 16, 8, 4, 2 lanes a sum at once, in the same order: halves of each are added. */
#define FOLD16(a, b)                                                                                                   \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                           \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD8(a, b)                                                                                                    \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +                         \
     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD4(a, b)                                                                                                    \
    (__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +                         \
     __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD2(a, b)                                                                                                    \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +                        \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))

/* R rows (1 to 4, known when compiling) times four vectors, whole lanes: 4 R sums of 16 lanes, folded together. */
INLINE void dots_rx4(const int R, const float *rows, const uint16_t *x, int64_t x_stride, bool is_f16, uint32_t dim, float *out,
                     size_t out_stride)
{
    f32x16 s[4][4];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < 4; t++)
            s[r][t] = (f32x16){0};
    for (uint32_t i = 0; i < dim; i += LANES) {
        const f32x16 x0 = load_16_bit(x + i, is_f16), x1 = load_16_bit(x + x_stride + i, is_f16);
        const f32x16 x2 = load_16_bit(x + 2 * x_stride + i, is_f16), x3 = load_16_bit(x + 3 * x_stride + i, is_f16);
        for (int r = 0; r < R; r++) {
            const f32x16 q = load_f32(rows + (size_t)r * dim + i);
            s[r][0] += q * x0;
            s[r][1] += q * x1;
            s[r][2] += q * x2;
            s[r][3] += q * x3;
        }
    }
    f32x16 fold[4] = {{0}, {0}, {0}, {0}}; /* of a row: 4 lanes of each token */
    for (int r = 0; r < R; r++) {
        const f32x16 a = FOLD16(s[r][0], s[r][1]), b = FOLD16(s[r][2], s[r][3]);
        fold[r] = FOLD8(a, b);
    }
    const f32x16 a = FOLD4(fold[0], fold[1]), b = FOLD4(fold[2], fold[3]);
    const f32x16 all = FOLD2(a, b);
    float sums[LANES];
    store_f32(sums, all);
    for (size_t r = 0; r < (size_t)R; r++)
        memcpy(out + r * out_stride, sums + 4 * r, 4 * sizeof *out);
}

/* R rows, 64 coordinates: the rows stay in registers. No weight is 0. ahead: coordinates to fetch. */
INLINE void sums_rx64(const int R, const float *w, size_t w_stride, const uint16_t *x, int64_t x_stride, bool is_f16, uint32_t n, uint32_t dim,
                      uint32_t ahead, float *rows)
{
    f32x16 s[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++)
            s[r][v] = load_f32(rows + (size_t)r * dim + v * LANES);
    for (uint32_t t = 0; t < n; t++) {
        const uint16_t *at = x + (int64_t)t * x_stride;
        if (ahead > 0)
            fetch_ahead(at, x_stride, ahead);
        const f32x16 x0 = load_16_bit(at, is_f16), x1 = load_16_bit(at + LANES, is_f16);
        const f32x16 x2 = load_16_bit(at + 2 * LANES, is_f16), x3 = load_16_bit(at + 3 * LANES, is_f16);
        for (size_t r = 0; r < (size_t)R; r++) {
            const float weight = w[r * w_stride + t];
            s[r][0] += weight * x0;
            s[r][1] += weight * x1;
            s[r][2] += weight * x2;
            s[r][3] += weight * x3;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++)
            store_f32(rows + (size_t)r * dim + v * LANES, s[r][v]);
}
#endif

/* The next num_rows rows, four at most: how many were done. */
INLINE uint32_t dots_some(const float *rows, uint32_t num_rows, const uint16_t *x, int64_t x_stride, bool is_f16, uint32_t dim,
                          float *out, size_t out_stride)
{
    switch (num_rows) {
    case 1: dots_rx4(1, rows, x, x_stride, is_f16, dim, out, out_stride); return 1;
    case 2: dots_rx4(2, rows, x, x_stride, is_f16, dim, out, out_stride); return 2;
    case 3: dots_rx4(3, rows, x, x_stride, is_f16, dim, out, out_stride); return 3;
    default: dots_rx4(4, rows, x, x_stride, is_f16, dim, out, out_stride); return 4;
    }
}

static void dense_dots(const float *rows, uint32_t num_rows, const uint16_t *x, int64_t x_stride, akv_dtype dtype, uint32_t n,
                       uint32_t dim, float *out, size_t out_stride)
{
    uint32_t t = 0;
    for (; dim % LANES == 0 && t + 4 <= n; t += 4) {
        const uint16_t *at = x + (int64_t)t * x_stride;
        for (uint32_t k = 0; k < 4; k++)
            fetch_ahead(at + (int64_t)k * x_stride, x_stride, dim);
        for (uint32_t r = 0; r < num_rows;) {
            if (dtype == AKV_F16)
                r += dots_some(rows + (size_t)r * dim, num_rows - r, at, x_stride, true, dim, out + r * out_stride + t, out_stride);
            else
                r += dots_some(rows + (size_t)r * dim, num_rows - r, at, x_stride, false, dim, out + r * out_stride + t, out_stride);
        }
    }
    for (; t < n; t++) {
        float f32[AKV_KERNEL_MAX_DIM];
        row_f32(x + (int64_t)t * x_stride, dtype, dim, f32);
        rows_dot(rows, num_rows, f32, dim, 1.0f, out + t, out_stride);
    }
}

INLINE void sums_some(const float *w, size_t w_stride, uint32_t num_rows, const uint16_t *x, int64_t x_stride, bool is_f16, uint32_t n,
                      uint32_t dim, uint32_t ahead, float *rows)
{
    switch (num_rows) {
    case 1: sums_rx64(1, w, w_stride, x, x_stride, is_f16, n, dim, ahead, rows); break;
    case 2: sums_rx64(2, w, w_stride, x, x_stride, is_f16, n, dim, ahead, rows); break;
    case 3: sums_rx64(3, w, w_stride, x, x_stride, is_f16, n, dim, ahead, rows); break;
    default: sums_rx64(4, w, w_stride, x, x_stride, is_f16, n, dim, ahead, rows); break;
    }
}

#define DENSE_CHUNK 32u /* tokens whose second half of coordinates is still near when the first is done */

static void dense_sums(const float *w, size_t w_stride, uint32_t num_rows, const uint16_t *x, int64_t x_stride, akv_dtype dtype,
                       uint32_t n, uint32_t dim, float *rows)
{
    for (uint32_t t0 = 0; t0 < n; t0 += DENSE_CHUNK) {
        const uint32_t chunk = n - t0 < DENSE_CHUNK ? n - t0 : DENSE_CHUNK;
        const uint16_t *at = x + (int64_t)t0 * x_stride;
        uint32_t r = 0;
        for (; dim % 64 == 0 && r < num_rows; r += 4) {
            const float *weights = w + r * w_stride + t0;
            const uint32_t some = num_rows - r < 4 ? num_rows - r : 4;
            bool all = true; /* masked tokens have weight 0, and may hold anything */
            for (uint32_t k = 0; k < some; k++)
                for (uint32_t t = 0; t < chunk; t++)
                    all &= weights[k * w_stride + t] != 0.0f;
            if (!all)
                break;
            for (uint32_t i = 0; i < dim; i += 64) {
                const uint32_t ahead = i == 0 && r == 0 ? dim : 0;
                float *out = rows + (size_t)r * dim + i;
                if (dtype == AKV_F16)
                    sums_some(weights, w_stride, some, at + i, x_stride, true, chunk, dim, ahead, out);
                else
                    sums_some(weights, w_stride, some, at + i, x_stride, false, chunk, dim, ahead, out);
            }
        }
        for (uint32_t t = 0; r < num_rows && t < chunk; t++) {
            float f32[AKV_KERNEL_MAX_DIM];
            row_f32(at + (int64_t)t * x_stride, dtype, dim, f32);
            rows_axpy(w + r * w_stride + t0 + t, w_stride, num_rows - r, f32, dim, rows + (size_t)r * dim);
        }
    }
}
