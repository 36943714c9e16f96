/* SPDX-License-Identifier: Apache-2.0 */
/*
 * body_avx2.h - loops of body.h and dense_body.h for AVX2, AKV_OWN_LOOPS: the same 16 lanes as two registers, the same
 * bits. AKV_OWN_SUMS, with AVX-512: those that are faster so there, too. gcc keeps vectors of 64 bytes in memory where
 * the machine has none, which made these loops slower than plain C. Products and sums are apart: a fused one would
 * round otherwise.
 */

INLINE __m256 add_product(__m256 sum, __m256 a, __m256 b)
{
    return _mm256_add_ps(sum, _mm256_mul_ps(a, b));
}

/* The first two steps of sum_lanes. */
INLINE __m128 four_lanes(__m256 low, __m256 high)
{
    const __m256 v = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

/* The others, of four sums at once. */
INLINE __m128 sum_each(__m128 a, __m128 b, __m128 c, __m128 d)
{
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)); /* a02 b02 a13 b13 */
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

/* R rows (1 or 4) of rows_dot. */
INLINE void dot_some(int R, const float *rows, const float *x, uint32_t dim, float scale, float *out, size_t out_stride)
{
    __m256 acc[4][2];
    __m128 four[4];
    uint32_t i = 0;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (; i + LANES <= dim; i += LANES) {
        const __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + i + 8);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            acc[r][0] = add_product(acc[r][0], _mm256_loadu_ps(rows + (size_t)r * dim + i), x0);
            acc[r][1] = add_product(acc[r][1], _mm256_loadu_ps(rows + (size_t)r * dim + i + 8), x1);
        }
    }
    if (i < dim) {
        float a[LANES] = {0}, b[LANES] = {0};
        memcpy(b, x + i, (dim - i) * sizeof *b);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            memcpy(a, rows + (size_t)r * dim + i, (dim - i) * sizeof *a);
            acc[r][0] = add_product(acc[r][0], _mm256_loadu_ps(a), _mm256_loadu_ps(b));
            acc[r][1] = add_product(acc[r][1], _mm256_loadu_ps(a + 8), _mm256_loadu_ps(b + 8));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        four[r] = r < R ? four_lanes(acc[r][0], acc[r][1]) : _mm_setzero_ps();
    float sums[4];
    _mm_storeu_ps(sums, _mm_mul_ps(_mm_set1_ps(scale), sum_each(four[0], four[1], four[2], four[3])));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        out[(size_t)r * out_stride] = sums[r];
}

static void rows_dot(const float *rows, uint32_t num_rows, const float *x, uint32_t dim, float scale, float *out,
                     size_t out_stride)
{
    uint32_t r = 0;
    for (; r + 4 <= num_rows; r += 4)
        dot_some(4, rows + (size_t)r * dim, x, dim, scale, out + r * out_stride, out_stride);
    for (; r < num_rows; r++)
        dot_some(1, rows + (size_t)r * dim, x, dim, scale, out + r * out_stride, out_stride);
}

static void rows_axpy(const float *w, size_t w_stride, uint32_t num_rows, const float *x, uint32_t dim, float *rows)
{
    for (uint32_t r = 0; r < num_rows; r++, rows += dim) {
        const float weight = w[r * w_stride];
        uint32_t i = 0;
        for (; weight != 0.0f && i + 8 <= dim; i += 8)
            _mm256_storeu_ps(rows + i,
                             add_product(_mm256_loadu_ps(rows + i), _mm256_set1_ps(weight), _mm256_loadu_ps(x + i)));
        for (; weight != 0.0f && i < dim; i++)
            rows[i] += weight * x[i];
    }
}

static void group_accumulate(const float *w, uint32_t num_rows, const float *group, uint32_t dim, float *rows)
{
    for (uint32_t r = 0; r < num_rows; r++, w += AKV_GROUP_LANES, rows += dim) {
        const __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
        for (uint32_t i = 0; i < dim; i += 4) {
            __m128 four[4];
            const uint32_t left = dim - i < 4 ? dim - i : 4;
#pragma GCC unroll 4
            for (uint32_t k = 0; k < 4; k++) {
                const float *x = group + (size_t)(k < left ? i + k : i) * AKV_GROUP_LANES;
                four[k] = four_lanes(_mm256_mul_ps(w0, _mm256_loadu_ps(x)), _mm256_mul_ps(w1, _mm256_loadu_ps(x + 8)));
            }
            float sums[4];
            _mm_storeu_ps(sums, sum_each(four[0], four[1], four[2], four[3]));
            if (left == 4)
                _mm_storeu_ps(rows + i, _mm_add_ps(_mm_loadu_ps(rows + i), _mm_loadu_ps(sums)));
            for (uint32_t k = 0; left < 4 && k < left; k++)
                rows[i + k] += sums[k];
        }
    }
}

/* One coordinate of a full group: lanes look up their own two bits. */
INLINE void unpack_full_group(const uint8_t *codes, uint32_t dim, const float levels[4], float *out)
{
    const __m256 table = _mm256_broadcast_ps((const __m128 *)(const void *)levels);
    const __m256i low = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                  high = _mm256_add_epi32(low, _mm256_set1_epi32(16));
    for (uint32_t i = 0; i < dim; i++, codes += 4, out += AKV_GROUP_LANES) {
        int32_t word;
        memcpy(&word, codes, 4);
        const __m256i all = _mm256_set1_epi32(word);
        _mm256_storeu_ps(out, _mm256_permutevar_ps(table, _mm256_srlv_epi32(all, low)));
        _mm256_storeu_ps(out + 8, _mm256_permutevar_ps(table, _mm256_srlv_epi32(all, high)));
    }
}

/* Eight planes of turn_bf16 from plane j on, r planes in all. */
INLINE void turn_eight(const uint16_t *a, uint32_t r, uint32_t j, bool half, const float *cosine, const float *sine,
                       float *out)
{
    __m256i x0, x1;
    if (half) {
        x0 = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(a + j))), 16);
        x1 = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(a + j + r))), 16);
    } else {
        const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(a + 2 * j));
        x0 = _mm256_slli_epi32(pairs, 16);
        x1 = _mm256_and_si256(pairs, _mm256_set1_epi32((int32_t)0xffff0000));
    }
    const __m256 a0 = _mm256_castsi256_ps(x0), a1 = _mm256_castsi256_ps(x1);
    const __m256 c = _mm256_loadu_ps(cosine + j), s = _mm256_loadu_ps(sine + j);
    _mm256_storeu_ps(out + j, _mm256_sub_ps(_mm256_mul_ps(a0, c), _mm256_mul_ps(a1, s)));
    _mm256_storeu_ps(out + j + r, _mm256_add_ps(_mm256_mul_ps(a0, s), _mm256_mul_ps(a1, c)));
}

#ifdef AKV_OWN_LOOPS
INLINE __m256 eight_f32(const uint16_t *p, bool is_f16)
{
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return is_f16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/*
 * R rows times four vectors, two of them and eight lanes at a time: eight sums and what goes into them are the
 * registers.
 */
INLINE void dots_rx4(const int R, const float *rows, const uint16_t *x, int64_t x_stride, bool is_f16, uint32_t dim,
                     float *out, size_t out_stride)
{
    __m128 four[4][4]; /* [row][vector] */
#    pragma GCC unroll 2
    for (int t = 0; t < 4; t += 2) {
        const uint16_t *a = x + t * x_stride, *b = a + x_stride;
        __m256 half[2][4][2];
#    pragma GCC unroll 2
        for (uint32_t h = 0; h < 2; h++) {
            __m256 acc[4][2];
#    pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                acc[r][0] = acc[r][1] = _mm256_setzero_ps();
            for (uint32_t i = 8 * h; i < dim; i += LANES) {
                const __m256 x0 = eight_f32(a + i, is_f16), x1 = eight_f32(b + i, is_f16);
#    pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const __m256 q = _mm256_loadu_ps(rows + (size_t)r * dim + i);
                    acc[r][0] = add_product(acc[r][0], q, x0);
                    acc[r][1] = add_product(acc[r][1], q, x1);
                }
            }
#    pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                half[h][r][0] = acc[r][0];
                half[h][r][1] = acc[r][1];
            }
        }
#    pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            four[r][t] = four_lanes(half[0][r][0], half[1][r][0]);
            four[r][t + 1] = four_lanes(half[0][r][1], half[1][r][1]);
        }
    }
#    pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        _mm_storeu_ps(out + (size_t)r * out_stride, sum_each(four[r][0], four[r][1], four[r][2], four[r][3]));
}

/* R rows, 64 coordinates, 16 at a time: two registers of each row stay. */
INLINE void sums_rx64(const int R, const float *w, size_t w_stride, const uint16_t *x, int64_t x_stride, bool is_f16,
                      uint32_t n, uint32_t dim, uint32_t ahead, float *rows)
{
    for (uint32_t i = 0; i < 64; i += LANES, x += LANES, rows += LANES) {
        __m256 s[4][2];
#    pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            s[r][0] = _mm256_loadu_ps(rows + (size_t)r * dim);
            s[r][1] = _mm256_loadu_ps(rows + (size_t)r * dim + 8);
        }
        for (uint32_t t = 0; t < n; t++) {
            const uint16_t *at = x + (int64_t)t * x_stride;
            if (i == 0 && ahead > 0)
                fetch_ahead(at, x_stride, ahead);
            const __m256 x0 = eight_f32(at, is_f16), x1 = eight_f32(at + 8, is_f16);
#    pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256 weight = _mm256_broadcast_ss(w + (size_t)r * w_stride + t);
                s[r][0] = add_product(s[r][0], weight, x0);
                s[r][1] = add_product(s[r][1], weight, x1);
            }
        }
#    pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            _mm256_storeu_ps(rows + (size_t)r * dim, s[r][0]);
            _mm256_storeu_ps(rows + (size_t)r * dim + 8, s[r][1]);
        }
    }
}

/* R rows (1 or 4) of group_dot. */
INLINE void group_dot_some(int R, const float *rows, const float *group, uint32_t dim, float *out)
{
    __m256 acc[4][2];
#    pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < dim; i++, group += AKV_GROUP_LANES) {
        const __m256 x0 = _mm256_loadu_ps(group), x1 = _mm256_loadu_ps(group + 8);
#    pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256 q = _mm256_broadcast_ss(rows + (size_t)r * dim + i);
            acc[r][0] = add_product(acc[r][0], q, x0);
            acc[r][1] = add_product(acc[r][1], q, x1);
        }
    }
#    pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(out + r * AKV_GROUP_LANES, acc[r][0]);
        _mm256_storeu_ps(out + r * AKV_GROUP_LANES + 8, acc[r][1]);
    }
}

static void group_dot(const float *rows, uint32_t num_rows, const float *group, uint32_t dim, float *out)
{
    uint32_t r = 0;
    for (; r + 4 <= num_rows; r += 4)
        group_dot_some(4, rows + (size_t)r * dim, group, dim, out + r * AKV_GROUP_LANES);
    for (; r < num_rows; r++)
        group_dot_some(1, rows + (size_t)r * dim, group, dim, out + r * AKV_GROUP_LANES);
}

INLINE __m256 plus(__m256 a, float b)
{
    return _mm256_add_ps(a, _mm256_set1_ps(b));
}

INLINE __m256 times(__m256 a, float b)
{
    return _mm256_mul_ps(a, _mm256_set1_ps(b));
}

/* exp_lanes of body.h, step by step. */
INLINE __m256 exp_eight(__m256 v)
{
    const __m256 limit = _mm256_set1_ps(-87.0f),
                 tiny = _mm256_cmp_ps(v, limit, _CMP_LT_OQ); /* NaN compares false and goes on */
    const __m256 x = _mm256_blendv_ps(v, limit, tiny);
    const __m256 shifted = plus(times(x, 0x1.715476p+0f), 0x1.8p23f), k = plus(shifted, -0x1.8p23f);
    const __m256 r = _mm256_sub_ps(_mm256_sub_ps(x, times(k, 0x1.62e4p-1f)), times(k, 0x1.7f7d1cp-20f));
    __m256 p = plus(times(r, 1.0f / 5040.0f), 1.0f / 720.0f);
    p = plus(_mm256_mul_ps(p, r), 1.0f / 120.0f);
    p = plus(_mm256_mul_ps(p, r), 1.0f / 24.0f);
    p = plus(_mm256_mul_ps(p, r), 1.0f / 6.0f);
    p = plus(_mm256_mul_ps(p, r), 0.5f);
    p = plus(_mm256_mul_ps(p, r), 1.0f);
    p = plus(_mm256_mul_ps(p, r), 1.0f);
    const __m256i power =
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(0x3f800000));
    return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

static float exp_sum(float *x, uint32_t n, float max)
{
    const __m256 m = _mm256_set1_ps(max);
    __m256 low = _mm256_setzero_ps(), high = low;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256 y0 = exp_eight(_mm256_sub_ps(_mm256_loadu_ps(x + i), m));
        const __m256 y1 = exp_eight(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8), m));
        _mm256_storeu_ps(x + i, y0);
        _mm256_storeu_ps(x + i + 8, y1);
        low = _mm256_add_ps(low, y0);
        high = _mm256_add_ps(high, y1);
    }
    if (i < n) {
        float tail[LANES];
        for (uint32_t l = 0; l < LANES; l++)
            tail[l] = i + l < n ? x[i + l] - max : -INFINITY;
        const __m256 y0 = exp_eight(_mm256_loadu_ps(tail)), y1 = exp_eight(_mm256_loadu_ps(tail + 8));
        _mm256_storeu_ps(tail, y0);
        _mm256_storeu_ps(tail + 8, y1);
        low = _mm256_add_ps(low, y0);
        high = _mm256_add_ps(high, y1);
        memcpy(x + i, tail, (n - i) * sizeof *x);
    }
    const __m128 four = four_lanes(low, high);
    return _mm_cvtss_f32(sum_each(four, four, four, four));
}

static float scale_max(float *x, uint32_t n, float scale, float max)
{
    __m256 best0 = _mm256_set1_ps(max), best1 = best0;
    float m[LANES];
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256 v0 = times(_mm256_loadu_ps(x + i), scale), v1 = times(_mm256_loadu_ps(x + i + 8), scale);
        _mm256_storeu_ps(x + i, v0);
        _mm256_storeu_ps(x + i + 8, v1);
        best0 = _mm256_max_ps(v0, best0); /* the second operand where one is NaN */
        best1 = _mm256_max_ps(v1, best1);
    }
    _mm256_storeu_ps(m, best0);
    _mm256_storeu_ps(m + 8, best1);
    for (; i < n; i++) {
        x[i] *= scale;
        max = x[i] > max ? x[i] : max;
    }
    for (uint32_t l = 0; l < LANES; l++)
        max = m[l] > max ? m[l] : max;
    return max;
}
#endif
