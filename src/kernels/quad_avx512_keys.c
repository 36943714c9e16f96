/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512_keys.c - the key side of quad.h for AVX-512 but for the anchors: logits of the mean and of residuals. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad_avx512.h"

void akv_avx512_unpack_anchors(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales, uint32_t n,
                           uint32_t *out_anchor, float *out_weight)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i bit = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)index_bits));
    /* byte (bit >> 3) + 0..3 to each lane */
    const __m512i bytes = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_srli_epi32(bit, 3), _mm512_set1_epi32(0x01010101)),
                                           _mm512_set1_epi32(0x03020100));
    const __m512i shift = _mm512_and_si512(bit, _mm512_set1_epi32(7)), mask = _mm512_set1_epi32((int)((1u << index_bits) - 1u));
    const __m512i nibble = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512 gamma = _mm512_mul_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 3.5f, -7, -6, -5, -4, -3, -2, -1),
                                       _mm512_set1_ps(AKV_COEFF_STEP)); /* code -8 is 1 = 3.5 steps, exactly */
    for (uint32_t t = 0; t < n; t += 16) {
        const uint32_t left = n - t < 16 ? n - t : 16;
        const __mmask16 live = (__mmask16)low_bits(left);
        __m512i word = _mm512_maskz_loadu_epi8(low_bits((left * index_bits + 7) / 8), index + (size_t)t / 8 * index_bits);
        word = _mm512_and_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi8(bytes, word), shift), mask);
        const __m512 scale = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), live, word, scales, 4);
        const __m128i packed = _mm_maskz_loadu_epi8((__mmask16)low_bits((left + 1) / 2), coeff + t / 2);
        const __m512i code = _mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(packed)), nibble);
        _mm512_storeu_si512(out_anchor + t, _mm512_maskz_mov_epi32(live, word));
        _mm512_storeu_ps(out_weight + t, _mm512_mul_ps(_mm512_permutexvar_ps(code, gamma), scale)); /* scale 0 where not live */
    }
}

/* 16 doubles as floats. */
INLINE __m512 cosines(const double *p)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(p))), _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8)), 1);
}

/* Four rows of 32 planes, rounded to 16 bits: out [4 eights][4 rows][8]; a[r] the first sixteen of row r, b[r] the others. */
INLINE void store_eights(int16_t *out, const __m512 *a, const __m512 *b)
{
    /* fours 0, 1 of both rows, then 2, 3; of the first sixteen, of the others */
    const __m512i first = _mm512_setr_epi64(0, 2, 8, 10, 4, 6, 12, 14), other = _mm512_setr_epi64(1, 3, 9, 11, 5, 7, 13, 15);
    __m512i w[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        w[r] = _mm512_packs_epi32(_mm512_cvtps_epi32(a[r]), _mm512_cvtps_epi32(b[r]));
    const __m512i a01 = _mm512_permutex2var_epi64(w[0], first, w[1]), a23 = _mm512_permutex2var_epi64(w[2], first, w[3]);
    const __m512i b01 = _mm512_permutex2var_epi64(w[0], other, w[1]), b23 = _mm512_permutex2var_epi64(w[2], other, w[3]);
    _mm512_storeu_si512(out, _mm512_inserti64x4(a01, _mm512_castsi512_si256(a23), 1));
    _mm512_storeu_si512(out + 32, _mm512_shuffle_i64x2(a01, a23, 0xee));
    _mm512_storeu_si512(out + 64, _mm512_inserti64x4(b01, _mm512_castsi512_si256(b23), 1));
    _mm512_storeu_si512(out + 96, _mm512_shuffle_i64x2(b01, b23, 0xee));
}

void akv_avx512_turn_rows(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes, int16_t *query16,
                      float *mean_rows)
{
    const uint32_t P = padded_planes;
    for (uint32_t j = 0; j < P; j += 32) {
        const __m512 c0 = cosines(cosine + j), c1 = cosines(cosine + j + 16), s0 = cosines(sine + j), s1 = cosines(sine + j + 16);
        int16_t *out = query16 + (size_t)j * 8;
        for (uint32_t i = j; i < j + 32; i += 8) {
            const __m512d co = _mm512_loadu_pd(cosine + i), si = _mm512_loadu_pd(sine + i);
            const __m512d sc = _mm512_loadu_pd(step + i), ss = _mm512_loadu_pd(step + P + i);
            _mm512_storeu_pd(cosine + i, _mm512_fmsub_pd(co, sc, _mm512_mul_pd(si, ss)));
            _mm512_storeu_pd(sine + i, _mm512_fmadd_pd(si, sc, _mm512_mul_pd(co, ss)));
        }
#pragma GCC unroll 2
        for (uint32_t r0 = 0; r0 < 8; r0 += 4) {
            __m512 y0[4], y1[4], w0[4], w1[4];
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                const float *first = rows + (r0 + r) * P + j, *second = rows + (8 + r0 + r) * P + j;
                const __m512 x0 = _mm512_loadu_ps(first), x1 = _mm512_loadu_ps(second);
                const __m512 z0 = _mm512_loadu_ps(first + 16), z1 = _mm512_loadu_ps(second + 16);
                y0[r] = _mm512_fmadd_ps(x0, c0, _mm512_mul_ps(x1, s0));
                y1[r] = _mm512_fmsub_ps(x1, c0, _mm512_mul_ps(x0, s0));
                w0[r] = _mm512_fmadd_ps(z0, c1, _mm512_mul_ps(z1, s1));
                w1[r] = _mm512_fmsub_ps(z1, c1, _mm512_mul_ps(z0, s1));
            }
            if (r0 == 0) {
                store_eights(out, y0, w0);
                store_eights(out + 128, y1, w1);
                continue;
            }
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                _mm512_storeu_ps(mean_rows + r * P + j, y0[r]);
                _mm512_storeu_ps(mean_rows + r * P + j + 16, w0[r]);
                _mm512_storeu_ps(mean_rows + (4 + r) * P + j, y1[r]);
                _mm512_storeu_ps(mean_rows + (4 + r) * P + j + 16, w1[r]);
            }
        }
    }
}

/* extra [6][4]: what is to be added to the series, in their order. M: planes of a row of the moments. */
INLINE void mean_tile(const float *mean_rows, uint32_t P, const float *table, uint32_t fast, const float *moments, uint32_t M,
                      const __m128 *extra, float *logits)
{
    _Alignas(64) float series[8][4]; /* [k][row]; two spare ones */
    for (uint32_t half = 0; half < 2; half++) {
        const float *m = mean_rows + half * 4 * P;
        __m512 sum[3][4];
#pragma GCC unroll 12
        for (uint32_t i = 0; i < 12; i++)
            sum[i / 4][i % 4] = _mm512_setzero_ps();
        for (uint32_t j = fast & ~15u; j < P; j += 16) /* moments are 0 below fast */
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                const __m512 x = _mm512_loadu_ps(m + r * P + j);
#pragma GCC unroll 3
                for (uint32_t k = 0; k < 3; k++)
                    sum[k][r] = _mm512_fmadd_ps(x, _mm512_loadu_ps(moments + (3 * half + k) * M + j), sum[k][r]);
            }
        /* [4 parts][4 rows] each; then the parts of three at once */
        const __m512 a = row_parts(sum[0]), b = row_parts(sum[1]), c = row_parts(sum[2]);
        const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); /* a02 a13 b02 b13 */
        const __m512 cc = _mm512_add_ps(_mm512_shuffle_f32x4(c, c, 0x44), _mm512_shuffle_f32x4(c, c, 0xee));
        const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cc, 0x88), _mm512_shuffle_f32x4(ab, cc, 0xdd)); /* a b c c */
        _mm512_storeu_ps(series[3 * half], all); /* the fourth, of the first half, is overwritten */
    }
#pragma GCC unroll 6
    for (int k = 0; k < 6; k++)
        _mm_store_ps(series[k], _mm_add_ps(_mm_load_ps(series[k]), extra[k]));
    /* the table's planes do not wait for the series, which is a long chain */
    __m512 even[4][2], odd[4][2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        even[i / 2][i % 2] = odd[i / 2][i % 2] = _mm512_setzero_ps();
    for (uint32_t j = 0; j < fast; j++) {
        const float *t = table + (size_t)j * 64, *m = mean_rows + j;
        const __m512 c0 = _mm512_loadu_ps(t), c1 = _mm512_loadu_ps(t + 16), s0 = _mm512_loadu_ps(t + 32), s1 = _mm512_loadu_ps(t + 48);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            const __m512 a = _mm512_set1_ps(m[r * P]), b = _mm512_set1_ps(m[(4 + r) * P]);
            even[r][0] = _mm512_fmadd_ps(a, c0, even[r][0]);
            even[r][1] = _mm512_fmadd_ps(a, c1, even[r][1]);
            odd[r][0] = _mm512_fmadd_ps(b, s0, odd[r][0]);
            odd[r][1] = _mm512_fmadd_ps(b, s1, odd[r][1]);
        }
    }
    const __m512 d0 = _mm512_mul_ps(_mm512_setr_ps(0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f, 8.5f, 9.5f, 10.5f, 11.5f, 12.5f, 13.5f,
                                                   14.5f, 15.5f),
                                    _mm512_set1_ps(1.0f / 32.0f));
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512 d = i == 0 ? d0 : _mm512_add_ps(d0, _mm512_set1_ps(0.5f)), dd = _mm512_mul_ps(d, d);
            const __m512 c = _mm512_fmadd_ps(dd, _mm512_set1_ps(series[2][r]), _mm512_set1_ps(series[1][r]));
            const __m512 s = _mm512_fmadd_ps(dd, _mm512_set1_ps(series[5][r]), _mm512_set1_ps(series[4][r]));
            even[r][i] = _mm512_add_ps(even[r][i], _mm512_fmadd_ps(dd, c, _mm512_set1_ps(series[0][r])));
            odd[r][i] = _mm512_fmadd_ps(d, _mm512_fmadd_ps(dd, s, _mm512_set1_ps(series[3][r])), odd[r][i]);
        }
    const __m512i reverse = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int i = 0; i < 2; i++) {
        __m512 up[4], down[4];
        for (int r = 0; r < 4; r++) {
            up[r] = _mm512_add_ps(even[r][i], odd[r][i]);
            down[r] = _mm512_permutexvar_ps(reverse, _mm512_sub_ps(even[r][i], odd[r][i]));
        }
        store_tokens(logits + 128 + 64 * i, up[0], up[1], up[2], up[3]);
        store_tokens(logits + 64 - 64 * i, down[0], down[1], down[2], down[3]);
    }
}

void akv_avx512_mean_logits(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast, const float *moments,
                            const float *rest, float *logits)
{
    const __m128 zero = _mm_setzero_ps(), extra[6] = {_mm_loadu_ps(rest), zero, zero, zero, zero, zero};
    mean_tile(mean_rows, padded_planes, table, fast, moments, padded_planes, extra, logits);
}

void akv_avx512_slow_mean_logits(const float *mean_rows, const float *table, uint32_t fast, const float *moments,
                                 const float *mean_terms, float middle, float half, float *logits)
{
    /* the window's polynomial about the tile's middle; powers of half beyond the fifth are below 1e-6 */
    const __m128 u = _mm_set1_ps(middle);
    __m128 p[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        p[k] = _mm_loadu_ps(mean_terms + 4 * k);
#pragma GCC unroll 6
    for (int k = 0; k < 6; k++)
#pragma GCC unroll 7
        for (int m = 6; m >= k; m--)
            p[m] = _mm_fmadd_ps(u, p[m + 1], p[m]);
    const __m128 h = _mm_set1_ps(half), hh = _mm_mul_ps(h, h);
    const __m128 extra[6] = {p[0],
                             _mm_mul_ps(p[2], hh),
                             _mm_mul_ps(p[4], _mm_mul_ps(hh, hh)),
                             _mm_mul_ps(p[1], h),
                             _mm_mul_ps(p[3], _mm_mul_ps(hh, h)),
                             _mm_mul_ps(p[5], _mm_mul_ps(_mm_mul_ps(hh, hh), h))};
    mean_tile(mean_rows, AKV_QUAD_SLOW_PLANES, table, fast, moments, 2 * AKV_QUAD_SLOW_PLANES, extra, logits);
}

/* The sum of the four 128-bit lanes. */
INLINE void store_lane_sum(int32_t *out, __m512i v)
{
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    _mm_storeu_si128((__m128i *)(void *)out, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

void akv_avx512_quantise_level(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    static const int32_t raise_of[3] = {104, 10, 1};
    /* byte 0 of each 32 bits, [coordinate][row] -> [row][coordinate] */
    const __m512i low_bytes = _mm512_castsi128_si512(_mm_setr_epi8(0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60));
    _Alignas(64) float ordered[AKV_QUAD_MAX_DIM / 4 + 3][16]; /* [fours][coordinate][row], as `query` will lie */
    __m512 top = _mm512_setzero_ps(), sum = top;
    const uint16_t *coord = list->coord;
    float(*x)[16] = ordered;
    for (uint32_t w = 0; w < 3; w++) {
        const __m512 unit = _mm512_set1_ps(unit_of[w]);
        for (uint32_t n = 0; n < list->by_width[w]; n += 4, x++) {
            const uint32_t left = list->by_width[w] - n;
            __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(z + (size_t)coord[0] * 4));
            if (left >= 4) {
                v = _mm512_insertf32x4(v, _mm_loadu_ps(z + (size_t)coord[1] * 4), 1);
                v = _mm512_insertf32x4(v, _mm_loadu_ps(z + (size_t)coord[2] * 4), 2);
                v = _mm512_insertf32x4(v, _mm_loadu_ps(z + (size_t)coord[3] * 4), 3);
                coord += 4;
            } else {
                v = _mm512_zextps128_ps512(_mm512_castps512_ps128(v));
                if (left > 1)
                    v = _mm512_insertf32x4(v, _mm_loadu_ps(z + (size_t)coord[1] * 4), 1);
                if (left > 2)
                    v = _mm512_insertf32x4(v, _mm_loadu_ps(z + (size_t)coord[2] * 4), 2);
                coord += left;
            }
            v = _mm512_mul_ps(v, unit);
            _mm512_store_ps(*x, v);
            top = _mm512_max_ps(_mm512_abs_ps(v), top);
            sum = _mm512_add_ps(sum, _mm512_abs_ps(v));
        }
    }
    const __m128 largest = fold_max(top);
    const __m128 all = _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(sum), _mm512_extractf32x4_ps(sum, 1)),
                                  _mm_add_ps(_mm512_extractf32x4_ps(sum, 2), _mm512_extractf32x4_ps(sum, 3)));
    /* all < infinity: neither infinite nor NaN */
    const __mmask8 finite = _mm_cmp_ps_mask(all, _mm_set1_ps(INFINITY), _CMP_LT_OQ);
    const __mmask8 live = finite & _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverse = _mm512_broadcast_f32x4(_mm_maskz_div_ps(live, _mm_set1_ps((float)AKV_QUAD_CODE_MAX), largest));
    const __mmask16 live4 = (__mmask16)((live & 15) * 0x1111u);
    _mm_storeu_ps(scale, _mm_mask_blend_ps(finite, _mm_set1_ps(NAN),
                                           _mm_maskz_div_ps(live, largest, _mm_set1_ps((float)AKV_QUAD_CODE_MAX))));
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    x = ordered;
    for (uint32_t w = 0; w < 3; w++) {
        __m512i highs = _mm512_setzero_si512(), lows = highs;
        for (uint32_t n = 0; n < list->by_width[w]; n += 4, x++, query += 32) {
            const __m512 v = _mm512_maskz_mul_ps(live4, _mm512_load_ps(*x), inverse);
            const __m512i whole = w < 2 ? _mm512_cvtps_epi32(v)
                                        : _mm512_slli_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(1.0f / 256.0f))), 8);
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
            highs = _mm512_add_epi32(highs, high);
            lows = _mm512_add_epi32(lows, low);
            _mm_storeu_si128((__m128i *)(void *)query, _mm512_castsi512_si128(_mm512_permutexvar_epi8(low_bytes, high)));
            _mm_storeu_si128((__m128i *)(void *)(query + 16), _mm512_castsi512_si128(_mm512_permutexvar_epi8(low_bytes, low)));
        }
        high_sum = _mm512_sub_epi32(high_sum, _mm512_mullo_epi32(highs, _mm512_set1_epi32(raise_of[w])));
        low_sum = _mm512_sub_epi32(low_sum, _mm512_mullo_epi32(lows, _mm512_set1_epi32(raise_of[w])));
    }
    store_lane_sum(bias, high_sum);
    store_lane_sum(bias + 4, low_sum);
}

/* Keys: byte 4 t + j of the result is coordinate j of residual t. 64-bit lane u holds residuals 2 u and 2 u + 1; its bytes 0..3 are
 * gathered from the place of residual 2 u (and 2 u + 1: the same byte) in coordinates 0..3. */
#define KEY_GATHER4(i) ((i) % 4 * 8 + (i) / 8)
#define KEY_GATHER2(i) ((i) % 4 * 4 + (i) / 16)
#define KEY_GATHER1(i) ((i) % 4 * 2 + (i) / 32)
#define KEY_PICK4(i) ((i) % 4 * 8 + (i) / 4 % 2 * 4)
#define KEY_PICK2(i) ((i) % 4 * 8 + (i) / 4 % 4 * 2)
#define KEY_PICK1(i) ((i) % 4 * 8 + (i) / 4 % 8)
/* One bit: any byte of the four coordinates' 64 bits can be picked at once; the number lands in bit 1, which is its raised step. */
#define KEY_PICK64(i) (((i) % 4 * 16 + (i) / 4 + 63) % 64)
static const uint8_t key_pick64[64] = BYTES64(KEY_PICK64);
static const uint8_t key_gather[3][64] = {BYTES64(KEY_GATHER4), BYTES64(KEY_GATHER2), BYTES64(KEY_GATHER1)};
static const uint8_t key_pick[3][64] = {BYTES64(KEY_PICK4), BYTES64(KEY_PICK2), BYTES64(KEY_PICK1)};

/* Keys' steps are raised by the largest, so that they are unsigned. */
#define RAISED4(i) (104 + STEP4(i))
#define RAISED2(i) (10 + STEP2(i))
#define RAISED1(i) (1 + STEP1(i))
static const uint8_t key_table[3][64] = {BYTES64(RAISED4), BYTES64(RAISED2), BYTES64(RAISED1)};

/* One four of key coordinates of G groups, a group's codes `stride` apart, into sums [row high, row low]. */
INLINE void key_four(const code_spread *s, int w, const uint8_t *codes, uint32_t stride, uint32_t bytes, const int8_t *query, int groups,
                     __m512i sum[2][8])
{
    __m512i steps[2];
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++)
        steps[g] = spread_codes(s, w, codes + g * stride, bytes);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        int32_t q;
        memcpy(&q, query + 4 * k, sizeof q);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            dot_bytes(&sum[g][k], steps[g], _mm512_set1_epi32(q));
    }
}

/* The same for one bit a coordinate: one byte of each query. some: coordinates that are there. */
INLINE void key_bits(__m512i pick, const uint8_t *codes, uint32_t stride, uint32_t some, const int8_t *query, int groups, __m512i sum[2][8])
{
    __m512i steps[2];
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
        uint64_t bits = 0;
        if (some == 4)
            memcpy(&bits, codes + g * stride, 8);
        else
            memcpy(&bits, codes + g * stride, 2 * (size_t)some);
        steps[g] = _mm512_and_si512(_mm512_multishift_epi64_epi8(pick, _mm512_set1_epi64((int64_t)bits)), _mm512_set1_epi8(2));
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        int32_t q;
        memcpy(&q, query + 4 * k, sizeof q);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            dot_bytes(&sum[g][k], steps[g], _mm512_set1_epi32(q));
    }
}

INLINE __m512 whole_sum(__m512i high, __m512i low, __m512 gain, float scale)
{
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    return _mm512_mul_ps(_mm512_mul_ps(gain, _mm512_set1_ps(scale)), sum);
}

/* One or two full groups; two share the loads of the query. live = how many tokens of the last one are written. */
INLINE void key_groups(const code_spread *s, const uint8_t *codes, const akv_quad_level *level, int groups, const int8_t *query,
                       const int32_t *bias, const float *scale, const uint8_t *gains, uint32_t live, const uint16_t *slots, float *logits)
{
    const uint32_t stride = 2 * level->bits;
    __m512i sum[2][8];
    _Alignas(64) float token[16][4];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            sum[g][k] = _mm512_set1_epi32(bias[k]);
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
        const uint32_t count = level->by_width[w], bytes = w == 0 ? 8 : 4;
        for (uint32_t i = 0; i < count / 4; i++, codes += 4 * bytes, query += 32)
            key_four(s, w, codes, stride, 4 * bytes, query, groups, sum);
        if (count % 4 != 0) {
            key_four(s, w, codes, stride, count % 4 * bytes, query, groups, sum);
            codes += count % 4 * bytes;
            query += 32;
        }
    }
    const uint32_t bits = level->by_width[2];
    const __m512i pick = _mm512_loadu_si512(key_pick64);
    for (uint32_t i = 0; i < bits / 4; i++, codes += 8, query += 32)
        key_bits(pick, codes, stride, 4, query, groups, sum);
    if (bits % 4 != 0)
        key_bits(pick, codes, stride, bits % 4, query, groups, sum);
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++, gains += 8, slots += AKV_GROUP_LANES) {
        const __m512 gain = gains16(gains, live == AKV_GROUP_LANES ? 8 : (live + 1) / 2);
        store_tokens(&token[0][0], whole_sum(sum[g][0], sum[g][4], gain, scale[0]), whole_sum(sum[g][1], sum[g][5], gain, scale[1]),
                     whole_sum(sum[g][2], sum[g][6], gain, scale[2]), whole_sum(sum[g][3], sum[g][7], gain, scale[3]));
#pragma GCC unroll 16
        for (uint32_t t = 0; t < AKV_GROUP_LANES && t < live; t++) {
            float *out = logits + (size_t)slots[t] * 4;
            _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), _mm_load_ps(token[(t & 3) * 4 + t / 4])));
        }
    }
}

void akv_avx512_code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                          const float *scale, const uint16_t *slots, float *logits)
{
    const code_spread s = spread_of(key_gather, key_pick, key_table);
    const uint8_t *codes = run + (n + 1) / 2;
    uint32_t at = 0;
    for (; at + 2 * AKV_GROUP_LANES <= n; at += 2 * AKV_GROUP_LANES, codes += 4 * level->bits)
        key_groups(&s, codes, level, 2, query, bias, scale, run + at / 2, AKV_GROUP_LANES, slots + at, logits);
    if (at + AKV_GROUP_LANES <= n) {
        key_groups(&s, codes, level, 1, query, bias, scale, run + at / 2, AKV_GROUP_LANES, slots + at, logits);
        at += AKV_GROUP_LANES;
        codes += 2 * level->bits;
    }
    if (at < n) {
        uint8_t room[AKV_QUAD_MAX_DIM * 8 + 64];
        full_group(codes, n - at, level, room);
        key_groups(&s, room, level, 1, query, bias, scale, run + at / 2, n - at, slots + at, logits);
    }
}

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512_keys; /* a translation unit must not be empty */
#endif
