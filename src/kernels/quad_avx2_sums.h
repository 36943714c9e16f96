/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_avx2_sums.h - what is left of quad.h for 256-bit registers (quad_avx2.h): levels, queries of a level, softmax,
 * anchors of values, tiles.
 */

/* The slots of the tokens of a byte's bits, counted from the first one's, in bytes from the lowest on. */
#define COUNT2(b) (((b)&1) + ((b) >> 1 & 1))
#define COUNT4(b) (COUNT2(b) + COUNT2((b) >> 2))
#define SLOT(b, i, slot, before) ((uint64_t)(slot) * ((b) >> (i)&1) << 8 * (before))
#define SLOTS(b)                                                                                                       \
    (SLOT(b, 1, 4, (b)&1) | SLOT(b, 2, 8, COUNT2(b)) | SLOT(b, 3, 12, COUNT2(b) + ((b) >> 2 & 1)) |                    \
     SLOT(b, 4, 1, COUNT4(b)) | SLOT(b, 5, 5, COUNT4(b) + ((b) >> 4 & 1)) |                                            \
     SLOT(b, 6, 9, COUNT4(b) + COUNT2((b) >> 4)) | SLOT(b, 7, 13, COUNT4(b) + COUNT2((b) >> 4) + ((b) >> 6 & 1)))
#define SLOTS4(b) SLOTS(b), SLOTS((b) + 1), SLOTS((b) + 2), SLOTS((b) + 3)
#define SLOTS16(b) SLOTS4(b), SLOTS4((b) + 4), SLOTS4((b) + 8), SLOTS4((b) + 12)
#define SLOTS64(b) SLOTS16(b), SLOTS16((b) + 16), SLOTS16((b) + 32), SLOTS16((b) + 48)
static const uint64_t slots_of[256] = {SLOTS64(0), SLOTS64(64), SLOTS64(128), SLOTS64(192)};

/* Eight tokens at a time. Whole eights are stored: what is too much lies where the next ones go, or in spare slots. */
static void sort_levels(const uint8_t *levels, uint64_t plane_bytes, uint32_t planes, uint32_t n, uint32_t num_levels,
                        uint16_t *slots, uint32_t *first)
{
    _Alignas(32) uint64_t plane[4][AKV_BLOCK_TOKENS / 64], of_level[AKV_BLOCK_TOKENS / 64];
    const uint32_t words = (n + 63) / 64;
    uint32_t at = 0;
    for (uint32_t p = 0; p < planes && p < 4; p++) {
        if (n < AKV_BLOCK_TOKENS)
            memset(plane[p], 0, sizeof plane[p]);
        memcpy(plane[p], levels + p * plane_bytes, (n + 7) / 8);
        if (n % 64 != 0)
            plane[p][n / 64] &= _bzhi_u64(~UINT64_C(0), n % 64);
    }
    first[0] = 0;
    for (uint32_t l = 1; l <= num_levels; l++) {
        first[l] = at;
        for (uint32_t t = 0; t < words; t += 4) { /* beyond n all planes are 0, which is no level here */
            __m256i bits = _mm256_set1_epi32(-1);
            for (uint32_t p = 0; p < planes && p < 4; p++) {
                const __m256i word = load256(plane[p] + t);
                bits = l >> p & 1 ? _mm256_and_si256(bits, word) : _mm256_andnot_si256(word, bits);
            }
            _mm256_store_si256((__m256i *)(void *)(of_level + t), bits);
        }
        for (uint32_t t = 0; t < words; t++) {
            const uint64_t bits = of_level[t];
            if (bits == 0)
                continue;
#pragma GCC unroll 8
            for (uint32_t i = 0; i < 8; i++) {
                const uint8_t eight = (uint8_t)(bits >> 8 * i);
                const __m128i offsets =
                    _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)(slots_of + eight)));
                const __m128i slot = _mm_set1_epi16((int16_t)(t * 64 + i / 2 * 16 + i % 2 * 2));
                _mm_storeu_si128((__m128i *)(void *)(slots + at), _mm_add_epi16(slot, offsets));
                at += (uint32_t)__builtin_popcount(eight);
            }
        }
    }
    first[num_levels + 1] = at;
}

/* Entry e of a row of 2 bits an entry: 32 coordinates at a time, stored by fours; coord has room for as many more. */
static void list_level(const uint8_t *row, uint32_t coords, akv_level_list *out)
{
#define FOUR(a, b, c, d) ((uint64_t)(a) | (uint64_t)(b) << 16 | (uint64_t)(c) << 32 | (uint64_t)(d) << 48)
    static const uint64_t set_bits[16] = {
        0,                0,                FOUR(1, 0, 0, 0), FOUR(0, 1, 0, 0), FOUR(2, 0, 0, 0), FOUR(0, 2, 0, 0),
        FOUR(1, 2, 0, 0), FOUR(0, 1, 2, 0), FOUR(3, 0, 0, 0), FOUR(0, 3, 0, 0), FOUR(1, 3, 0, 0), FOUR(0, 1, 3, 0),
        FOUR(2, 3, 0, 0), FOUR(0, 2, 3, 0), FOUR(1, 2, 3, 0), FOUR(0, 1, 2, 3)};
    uint32_t at = 0;
    out->bits = 0;
    for (uint32_t w = 0; w < 3; w++) {
        const uint32_t before = at;
        for (uint32_t c = 0; c < coords; c += 32) {
            const uint32_t left = coords - c < 32 ? coords - c : 32;
            uint64_t word = 0;
            if (left == 32)
                memcpy(&word, row + c / 4, 8);
            else
                memcpy(&word, row + c / 4, (left + 3) / 4);
            word = _bzhi_u64(word, 2 * left);
            const uint32_t low = (uint32_t)_pext_u64(word, 0x5555555555555555u);
            const uint32_t high = (uint32_t)_pext_u64(word, 0xaaaaaaaaaaaaaaaau);
            uint32_t mine = w == 0 ? high & low : w == 1 ? high & ~low : low & ~high;
            for (uint32_t i = 0; mine != 0; i += 4, mine >>= 4) {
                const uint64_t four = set_bits[mine & 15] + (c + i) * UINT64_C(0x0001000100010001);
                memcpy(out->coord + at, &four, 8);
                at += (uint32_t)__builtin_popcount(mine & 15);
            }
        }
        out->by_width[w] = at - before;
        out->bits += (at - before) * (4u >> w);
    }
    out->count = at;
}

static void quantise_level(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    static const int32_t raise_of[3] = {104, 10, 1};
    _Alignas(32) float ordered[AKV_QUAD_MAX_DIM / 4 + 3][16]; /* [fours][coordinate][row] */
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 top = _mm256_setzero_ps(), sum = top;
    const uint16_t *coord = list->coord;
    float(*x)[16] = ordered;
    for (uint32_t w = 0; w < 3; w++) {
        const __m256 unit = _mm256_set1_ps(unit_of[w]);
        for (uint32_t n = 0; n < list->by_width[w]; n += 4, x++) {
            const uint32_t left = list->by_width[w] - n < 4 ? list->by_width[w] - n : 4;
#pragma GCC unroll 2
            for (uint32_t k = 0; k < 4; k += 2) {
                const __m128 a = k < left ? _mm_loadu_ps(z + (size_t)coord[k] * 4) : _mm_setzero_ps();
                const __m128 b = k + 1 < left ? _mm_loadu_ps(z + (size_t)coord[k + 1] * 4) : _mm_setzero_ps();
                const __m256 v = _mm256_mul_ps(_mm256_set_m128(b, a), unit);
                _mm256_store_ps(*x + 4 * k, v);
                top = _mm256_max_ps(_mm256_and_ps(v, magnitude), top);
                sum = _mm256_add_ps(sum, _mm256_and_ps(v, magnitude));
            }
            coord += left;
        }
    }
    const __m128 largest = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    const __m128 all = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 finite = _mm_cmplt_ps(all, _mm_set1_ps(INFINITY)); /* neither infinite nor NaN */
    const __m128 live = _mm_and_ps(finite, _mm_cmpgt_ps(largest, _mm_set1_ps(1e-30f)));
    const __m128 inverse4 = _mm_and_ps(live, _mm_div_ps(_mm_set1_ps((float)AKV_QUAD_CODE_MAX), largest));
    const __m256 inverse = _mm256_set_m128(inverse4, inverse4), live8 = _mm256_set_m128(live, live);
    _mm_storeu_ps(scale,
                  _mm_blendv_ps(_mm_set1_ps(NAN),
                                _mm_and_ps(live, _mm_div_ps(largest, _mm_set1_ps((float)AKV_QUAD_CODE_MAX))), finite));
    __m256i high_sum = _mm256_setzero_si256(), low_sum = high_sum;
    x = ordered;
    for (uint32_t w = 0; w < 3; w++) {
        const __m256i raise = _mm256_set1_epi32(raise_of[w]);
        for (uint32_t n = 0; n < list->by_width[w]; n += 4, x++, query += 32) {
            __m256i high[2], low[2];
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const __m256 v = _mm256_and_ps(live8, _mm256_mul_ps(_mm256_load_ps(*x + 8 * k), inverse));
                const __m256i whole =
                    w < 2 ? _mm256_cvtps_epi32(v)
                          : _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(1.0f / 256.0f))), 8);
                high[k] = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(128)), 8);
                low[k] = _mm256_sub_epi32(whole, _mm256_slli_epi32(high[k], 8));
                high_sum = _mm256_sub_epi32(high_sum, _mm256_mullo_epi32(high[k], raise));
                low_sum = _mm256_sub_epi32(low_sum, _mm256_mullo_epi32(low[k], raise));
            }
            /* [coordinate][row] -> [row][coordinate]: words of coordinates 0, 2 | 1, 3, then bytes */
            const __m256i h = _mm256_packs_epi32(high[0], high[1]), l = _mm256_packs_epi32(low[0], low[1]);
            const __m256i bytes =
                _mm256_packs_epi16(h, l); /* 0, 2 of high, of low | 1, 3 of high, of low; four rows each */
            const __m256i lanes = _mm256_permute4x64_epi64(bytes, 0xd8); /* high: 0, 2, 1, 3 | low */
            const __m256i order =
                _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15));
            store256(query, _mm256_shuffle_epi8(lanes, order));
        }
    }
    _mm_storeu_si128((__m128i *)(void *)bias,
                     _mm_add_epi32(_mm256_castsi256_si128(high_sum), _mm256_extracti128_si256(high_sum, 1)));
    _mm_storeu_si128((__m128i *)(void *)(bias + 4),
                     _mm_add_epi32(_mm256_castsi256_si128(low_sum), _mm256_extracti128_si256(low_sum, 1)));
}

static void row_max(const float *x, uint32_t n, float *max)
{
    __m256 best0 = broadcast4(max), best1 = best0;
    for (uint32_t i = 0; i < n * 4; i += 16) {
        best0 = _mm256_max_ps(_mm256_loadu_ps(x + i), best0); /* the second operand when the first is NaN */
        best1 = _mm256_max_ps(_mm256_loadu_ps(x + i + 8), best1);
    }
    best0 = _mm256_max_ps(best0, best1);
    _mm_storeu_ps(max, _mm_max_ps(_mm256_castps256_ps128(best0), _mm256_extractf128_ps(best0, 1)));
}

/* exp of what is at most some dozens; 0 below -87. */
INLINE __m256 exp_lanes(__m256 x)
{
    const __m256 live = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ); /* NaN lives on */
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r =
        _mm256_fnmadd_ps(k, _mm256_set1_ps(-0x1.05c61p-29f), _mm256_fnmadd_ps(k, _mm256_set1_ps(0x1.62e43p-1f), x));
    __m256 p =
        _mm256_fmadd_ps(r, _mm256_set1_ps(1.0f / 5040.0f), _mm256_set1_ps(1.0f / 720.0f)); /* Taylor to degree 7 */
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    /*
     * p is NaN or lies in 0.7 .. 1.5, k from -126 on: adding to the exponent multiplies (and leaves NaN, whose k is 0
     * after the shift)
     */
    const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(k), 23));
    return _mm256_and_ps(_mm256_castsi256_ps(scaled), live);
}

static void exp_sum(float *x, uint32_t n, const float *max, float *sum)
{
    const __m256 m = broadcast4(max);
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    for (uint32_t i = 0; i < n * 4; i += 16) {
        const __m256 y0 = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(x + i), m));
        const __m256 y1 = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8), m));
        _mm256_storeu_ps(x + i, y0);
        _mm256_storeu_ps(x + i + 8, y1);
        s0 = _mm256_add_ps(s0, y0);
        s1 = _mm256_add_ps(s1, y1);
    }
    s0 = _mm256_add_ps(s0, s1);
    _mm_storeu_ps(sum,
                  _mm_add_ps(_mm_loadu_ps(sum), _mm_add_ps(_mm256_castps256_ps128(s0), _mm256_extractf128_ps(s0, 1))));
}

INLINE void histogram_token(float *hist, uint32_t anchor, const float *weight, const float *weights)
{
    float *at = hist + (size_t)anchor * 4;
    _mm_storeu_ps(at, _mm_fmadd_ps(_mm_broadcast_ss(weight), _mm_loadu_ps(weights), _mm_loadu_ps(at)));
}

static void histogram(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist)
{
    for (; n >= 16; n -= 16, anchor += 16, weight += 16, weights += 64)
#pragma GCC unroll 16
        for (uint32_t t = 0; t < 16; t++) /* slots are known when this is compiled */
            histogram_token(hist, anchor[t], weight + t, weights + akv_quad_slot(t) * 4);
    for (uint32_t t = 0; t < n; t++)
        histogram_token(hist, anchor[t], weight + t, weights + akv_quad_slot(t) * 4);
}

INLINE __m256 bytes_f32(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

static void bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    uint32_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        __m256 acc[4][2];
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 8; k++)
            acc[k / 2][k % 2] = _mm256_loadu_ps(out + (size_t)(k / 2) * dim + i + k % 2 * 8);
        for (uint32_t a = 0; a < n; a++) {
            const __m256 x0 = bytes_f32(rows + (size_t)a * dim + i), x1 = bytes_f32(rows + (size_t)a * dim + i + 8);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                const __m256 weight = _mm256_broadcast_ss(w + a * 4 + r);
                acc[r][0] = _mm256_fmadd_ps(weight, x0, acc[r][0]);
                acc[r][1] = _mm256_fmadd_ps(weight, x1, acc[r][1]);
            }
        }
#pragma GCC unroll 8
        for (uint32_t k = 0; k < 8; k++)
            _mm256_storeu_ps(out + (size_t)(k / 2) * dim + i + k % 2 * 8, acc[k / 2][k % 2]);
    }
    for (; i < dim; i++)
        for (uint32_t r = 0; r < 4; r++) {
            float sum = out[(size_t)r * dim + i];
            for (uint32_t a = 0; a < n; a++)
                sum += w[a * 4 + r] * (float)rows[(size_t)a * dim + i];
            out[(size_t)r * dim + i] = sum;
        }
}

/* N rows (1 or 2) of bytes_dot. */
INLINE void dot_rows(int N, const float *x, const int8_t *rows, uint32_t dim, float *out)
{
    __m256 acc[2][4];
    uint32_t i = 0;
#pragma GCC unroll 8
    for (int k = 0; k < 4 * N; k++)
        acc[k / 4][k % 4] = _mm256_setzero_ps();
    for (; i + 8 <= dim; i += 8) {
        const __m256 b0 = bytes_f32(rows + i), b1 = N == 2 ? bytes_f32(rows + dim + i) : b0;
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m256 q = _mm256_loadu_ps(x + (size_t)r * dim + i);
            acc[0][r] = _mm256_fmadd_ps(b0, q, acc[0][r]);
            if (N == 2)
                acc[1][r] = _mm256_fmadd_ps(b1, q, acc[1][r]);
        }
    }
#pragma GCC unroll 2
    for (int k = 0; k < N; k++) {
        __m128 sum = sum4(acc[k][0], acc[k][1], acc[k][2], acc[k][3]);
        for (uint32_t j = i; j < dim; j++)
            sum = _mm_fmadd_ps(_mm_setr_ps(x[j], x[(size_t)dim + j], x[2 * (size_t)dim + j], x[3 * (size_t)dim + j]),
                               _mm_set1_ps((float)rows[(size_t)k * dim + j]), sum);
        _mm_storeu_ps(out + 4 * k, sum);
    }
}

static void bytes_dot(const float *x, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    uint32_t a = 0;
    for (; a + 2 <= n; a += 2)
        dot_rows(2, x, rows + (size_t)a * dim, dim, out + 4 * a);
    if (a < n)
        dot_rows(1, x, rows + (size_t)a * dim, dim, out + 4 * a);
}

/* R rows (1 or 6) of tile_dots and 16 tokens. */
INLINE void dots_16(int R, const float *x, uint32_t dim, const float *columns, float *out)
{
    __m256 acc[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < dim; i++, columns += 64) {
        const __m256 c0 = _mm256_loadu_ps(columns), c1 = _mm256_loadu_ps(columns + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m256 q = _mm256_broadcast_ss(x + (size_t)r * dim + i);
            acc[r][0] = _mm256_fmadd_ps(q, c0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(q, c1, acc[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(out + r * 64, acc[r][0]);
        _mm256_storeu_ps(out + r * 64 + 8, acc[r][1]);
    }
}

static void tile_dots(const float *x, uint32_t rows, uint32_t dim, const float *columns, float *out)
{
    for (uint32_t t = 0; t < 64; t += 16) {
        uint32_t r = 0;
        for (; r + 6 <= rows; r += 6)
            dots_16(6, x + (size_t)r * dim, dim, columns + t, out + (size_t)r * 64 + t);
        for (; r < rows; r++)
            dots_16(1, x + (size_t)r * dim, dim, columns + t, out + (size_t)r * 64 + t);
    }
}

/* R rows (1 or 6) of tile_sums and 16 coordinates. */
INLINE void sums_16(int R, const float *w, size_t stride, const float *x, uint32_t n, uint32_t dim, float *out)
{
    __m256 acc[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        acc[r][0] = _mm256_loadu_ps(out + (size_t)r * dim);
        acc[r][1] = _mm256_loadu_ps(out + (size_t)r * dim + 8);
    }
    for (uint32_t t = 0; t < n; t++, x += dim) {
        const __m256 c0 = _mm256_loadu_ps(x), c1 = _mm256_loadu_ps(x + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m256 weight = _mm256_broadcast_ss(w + (size_t)r * stride + t);
            acc[r][0] = _mm256_fmadd_ps(weight, c0, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(weight, c1, acc[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(out + (size_t)r * dim, acc[r][0]);
        _mm256_storeu_ps(out + (size_t)r * dim + 8, acc[r][1]);
    }
}

static void tile_sums(const float *w, size_t stride, uint32_t rows, const float *x, uint32_t n, uint32_t dim,
                      float *out)
{
    uint32_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        uint32_t r = 0;
        for (; r + 6 <= rows; r += 6)
            sums_16(6, w + (size_t)r * stride, stride, x + i, n, dim, out + (size_t)r * dim + i);
        for (; r < rows; r++)
            sums_16(1, w + (size_t)r * stride, stride, x + i, n, dim, out + (size_t)r * dim + i);
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t j = i; j < dim; j++)
                out[(size_t)r * dim + j] += w[r * stride + t] * x[(size_t)t * dim + j];
}
