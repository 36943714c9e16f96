/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512.c - quad.h for AVX-512 with VBMI, VBMI2 and VNNI (Ice Lake and Zen 4 onwards). */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* The low n bits; n <= 64. */
INLINE uint64_t low_bits(uint32_t n)
{
    return _bzhi_u64(~UINT64_C(0), n);
}

static void unpack_anchors(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales, uint32_t n,
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

static void turn_rows(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes, int16_t *query16,
                      float *mean_rows)
{
    const uint32_t P = padded_planes;
    for (uint32_t j = 0; j < P; j += 16) {
        const __m512 c = _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(cosine + j))),
                                            _mm512_cvtpd_ps(_mm512_loadu_pd(cosine + j + 8)), 1);
        const __m512 s = _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_loadu_pd(sine + j))),
                                            _mm512_cvtpd_ps(_mm512_loadu_pd(sine + j + 8)), 1);
        int16_t *out = query16 + (size_t)j / 32 * 256 + j % 32 / 8 * 32;
        for (uint32_t i = j; i < j + 16; i += 8) {
            const __m512d co = _mm512_loadu_pd(cosine + i), si = _mm512_loadu_pd(sine + i);
            const __m512d sc = _mm512_loadu_pd(step + i), ss = _mm512_loadu_pd(step + P + i);
            _mm512_storeu_pd(cosine + i, _mm512_fmsub_pd(co, sc, _mm512_mul_pd(si, ss)));
            _mm512_storeu_pd(sine + i, _mm512_fmadd_pd(si, sc, _mm512_mul_pd(co, ss)));
        }
        for (uint32_t r = 0; r < 8; r++) {
            const __m512 x0 = _mm512_loadu_ps(rows + r * P + j), x1 = _mm512_loadu_ps(rows + (8 + r) * P + j);
            const __m512 y0 = _mm512_fmadd_ps(x0, c, _mm512_mul_ps(x1, s)), y1 = _mm512_fmsub_ps(x1, c, _mm512_mul_ps(x0, s));
            if (r < 4) {
                const __m256i n0 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(y0)), n1 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(y1));
                _mm_storeu_si128((__m128i *)(void *)(out + r * 8), _mm256_castsi256_si128(n0));
                _mm_storeu_si128((__m128i *)(void *)(out + 32 + r * 8), _mm256_extracti128_si256(n0, 1));
                _mm_storeu_si128((__m128i *)(void *)(out + 128 + r * 8), _mm256_castsi256_si128(n1));
                _mm_storeu_si128((__m128i *)(void *)(out + 160 + r * 8), _mm256_extracti128_si256(n1, 1));
            } else {
                _mm512_storeu_ps(mean_rows + (r - 4) * P + j, y0);
                _mm512_storeu_ps(mean_rows + r * P + j, y1);
            }
        }
    }
}

/* Four rows of 16 tokens -> four vectors of [4 tokens][4 rows], token 4 * lane128 + i in vector i: slot order. */
#define TRANSPOSE(a, b, c, d)                                                                                                  \
    do {                                                                                                                       \
        const __m512 ab0 = _mm512_unpacklo_ps(a, b), ab1 = _mm512_unpackhi_ps(a, b);                                           \
        const __m512 cd0 = _mm512_unpacklo_ps(c, d), cd1 = _mm512_unpackhi_ps(c, d);                                           \
        a = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab0), _mm512_castps_pd(cd0)));                                \
        b = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab0), _mm512_castps_pd(cd0)));                                \
        c = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab1), _mm512_castps_pd(cd1)));                                \
        d = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab1), _mm512_castps_pd(cd1)));                                \
    } while (0)

INLINE void store_tokens(float *out, __m512 a, __m512 b, __m512 c, __m512 d)
{
    TRANSPOSE(a, b, c, d);
    _mm512_storeu_ps(out, a);
    _mm512_storeu_ps(out + 16, b);
    _mm512_storeu_ps(out + 32, c);
    _mm512_storeu_ps(out + 48, d);
}

/* Sums of the lanes of four vectors. */
INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    TRANSPOSE(a, b, c, d);
    const __m512 s = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)); /* [4 parts][4 rows] */
    return _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(s), _mm512_extractf32x4_ps(s, 1)),
                      _mm_add_ps(_mm512_extractf32x4_ps(s, 2), _mm512_extractf32x4_ps(s, 3)));
}

static void mean_logits(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast, const float *moments,
                        const float *rest, float *logits)
{
    const uint32_t P = padded_planes;
    _Alignas(16) float series[6][4]; /* [k][row] */
    for (uint32_t k = 0; k < 6; k++) {
        const float *m = mean_rows + (k < 3 ? 0 : 4 * P), *by = moments + k * P;
        __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        for (uint32_t j = fast & ~15u; j < P; j += 16) { /* moments are 0 below fast */
            const __m512 x = _mm512_loadu_ps(by + j);
            s0 = _mm512_fmadd_ps(x, _mm512_loadu_ps(m + j), s0);
            s1 = _mm512_fmadd_ps(x, _mm512_loadu_ps(m + P + j), s1);
            s2 = _mm512_fmadd_ps(x, _mm512_loadu_ps(m + 2 * P + j), s2);
            s3 = _mm512_fmadd_ps(x, _mm512_loadu_ps(m + 3 * P + j), s3);
        }
        _mm_store_ps(series[k], sum4(s0, s1, s2, s3));
    }
    const __m512 d0 = _mm512_mul_ps(_mm512_setr_ps(0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f, 8.5f, 9.5f, 10.5f, 11.5f, 12.5f, 13.5f,
                                                   14.5f, 15.5f),
                                    _mm512_set1_ps(1.0f / 32.0f));
    __m512 even[4][2], odd[4][2];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512 d = i == 0 ? d0 : _mm512_add_ps(d0, _mm512_set1_ps(0.5f)), dd = _mm512_mul_ps(d, d);
            const __m512 c = _mm512_fmadd_ps(dd, _mm512_set1_ps(series[2][r]), _mm512_set1_ps(series[1][r]));
            const __m512 s = _mm512_fmadd_ps(dd, _mm512_set1_ps(series[5][r]), _mm512_set1_ps(series[4][r]));
            even[r][i] = _mm512_fmadd_ps(dd, c, _mm512_set1_ps(series[0][r] + rest[r]));
            odd[r][i] = _mm512_mul_ps(d, _mm512_fmadd_ps(dd, s, _mm512_set1_ps(series[3][r])));
        }
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

INLINE __m128 fold_max(__m512 v)
{
    return _mm_max_ps(_mm_max_ps(_mm512_castps512_ps128(v), _mm512_extractf32x4_ps(v, 1)),
                      _mm_max_ps(_mm512_extractf32x4_ps(v, 2), _mm512_extractf32x4_ps(v, 3)));
}

/* Byte i / 2 to byte i. */
INLINE __m512i spread_low_half(void)
{
    return _mm512_set_epi8(31, 31, 30, 30, 29, 29, 28, 28, 27, 27, 26, 26, 25, 25, 24, 24, 23, 23, 22, 22, 21, 21, 20, 20, 19, 19, 18, 18,
                           17, 17, 16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2,
                           1, 1, 0, 0);
}

/* 32 bytes (those of the mask) to the high bytes of 32 words. */
INLINE __m512i high_bytes(const int8_t *p, uint32_t count, __m512i spread)
{
    const __m512i b = count >= 32 ? _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)p))
                                  : _mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)low_bits(count), p));
    return _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaau, spread, b);
}

/* The sums of four tokens, each 4 rows x 4 parts, -> [4 rows][4 tokens], float. */
INLINE __m512 gather_parts(const __m512i *acc)
{
    const __m512 a = _mm512_cvtepi32_ps(acc[0]), b = _mm512_cvtepi32_ps(acc[1]), c = _mm512_cvtepi32_ps(acc[2]),
                 d = _mm512_cvtepi32_ps(acc[3]);
    /* (p0 + p1) + (p2 + p3), whatever the token */
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); /* a01 a23 b01 b23 */
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xdd));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}

/*
 * One token: its anchor turned into x [width] (through memory, so that each eight can be loaded into all four 128-bit
 * lanes without a shuffle), then four rows at once. parts = padded planes / 32, rest_parts = padded rest / 32.
 */
INLINE __m512i anchor_token(const int8_t *a, const akv_quad_shape *shape, uint32_t parts, uint32_t rest_parts, bool half,
                            const int16_t *turn, const int16_t *query, __m512i spread, int16_t *x)
{
    const uint32_t P = shape->planes;
    for (uint32_t p = 0; p < parts; p++) {
        __m512i x0, x1;
        if (half) {
            x0 = high_bytes(a + 32 * p, P - 32 * p, spread);
            x1 = high_bytes(a + P + 32 * p, P - 32 * p, spread);
        } else {
            const __m512i pairs = P - 32 * p >= 32 ? _mm512_loadu_si512(a + 64 * p)
                                                   : _mm512_maskz_loadu_epi8(low_bits(2 * (P - 32 * p)), a + 64 * p);
            x0 = _mm512_slli_epi16(pairs, 8);
            x1 = _mm512_and_si512(pairs, _mm512_set1_epi16((int16_t)0xff00));
        }
        const __m512i c = _mm512_loadu_si512(turn + 64 * p), s = _mm512_loadu_si512(turn + 64 * p + 32);
        _mm512_store_si512(x + 64 * p, _mm512_sub_epi16(_mm512_mulhrs_epi16(x0, c), _mm512_mulhrs_epi16(x1, s)));
        _mm512_store_si512(x + 64 * p + 32, _mm512_add_epi16(_mm512_mulhrs_epi16(x0, s), _mm512_mulhrs_epi16(x1, c)));
    }
    for (uint32_t p = 0; p < rest_parts; p++) {
        const __m512i v = high_bytes(a + 2 * P + 32 * p, shape->rest - 32 * p, spread);
        _mm512_store_si512(x + 64 * parts + 32 * p, _mm512_srai_epi16(v, 1));
    }
    __asm__("" : : "r"(x) : "memory"); /* or the compiler takes the lanes out of registers, two shuffles each */
    __m512i acc0 = _mm512_setzero_si512(), acc1 = acc0;
    for (uint32_t e = 0; e < 8 * parts + 4 * rest_parts; e += 2) {
        acc0 = _mm512_dpwssd_epi32(acc0, _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)(x + 8 * e))),
                                   _mm512_loadu_si512(query + 32 * e));
        acc1 = _mm512_dpwssd_epi32(acc1, _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)(x + 8 * e + 8))),
                                   _mm512_loadu_si512(query + 32 * e + 32));
    }
    return _mm512_add_epi32(acc0, acc1);
}

INLINE void anchor_tile(const int8_t *anchors, const akv_quad_shape *shape, uint32_t parts, uint32_t rest_parts, bool half,
                        const int16_t *turn16, const int16_t *query16, const uint32_t *anchor, const float *weight,
                        const float *scale, uint32_t n, float *logits)
{
    const __m512i spread = spread_low_half();
    /* [row][token] -> [token][row] */
    const __m512i turn_over = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i each4 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512 row_scale = _mm512_broadcast_f32x4(_mm_loadu_ps(scale));
    const uint32_t turn_step = 2 * shape->padded_planes;
    _Alignas(64) int16_t x[2][2 * AKV_QUAD_MAX_DIM];
    for (uint32_t t0 = 0; t0 < n; t0 += 16)
        for (uint32_t i = 0; i < 4; i++) { /* tokens t0 + i, + 4, + 8, + 12: neighbours in slot order */
            __m512i acc[4];
            _Alignas(16) float w[4];
#pragma GCC unroll 4
            for (uint32_t l = 0; l < 4; l++) {
                const uint32_t t = t0 + i + 4 * l;
                w[l] = weight[t];
                acc[l] = anchor_token(anchors + (size_t)anchor[t] * shape->dim, shape, parts, rest_parts, half,
                                      turn16 + (size_t)t * turn_step, query16, spread, x[l & 1]);
            }
            float *out = logits + (t0 + 4 * i) * 4;
            const __m512 sums = _mm512_permutexvar_ps(turn_over, gather_parts(acc));
            const __m512 each = _mm512_permutexvar_ps(each4, _mm512_castps128_ps512(_mm_load_ps(w)));
            _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_mul_ps(row_scale, each), sums, _mm512_loadu_ps(out)));
        }
}

/* One anchor of 128 bytes turned into x. */
INLINE void turn_128(const int8_t *a, const int16_t *turn, __m512i spread, int16_t *x)
{
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
        const __m512i x0 = high_bytes(a + 32 * p, 32, spread), x1 = high_bytes(a + 64 + 32 * p, 32, spread);
        const __m512i c = _mm512_loadu_si512(turn + 64 * p), s = _mm512_loadu_si512(turn + 64 * p + 32);
        _mm512_store_si512(x + 64 * p, _mm512_sub_epi16(_mm512_mulhrs_epi16(x0, c), _mm512_mulhrs_epi16(x1, s)));
        _mm512_store_si512(x + 64 * p + 32, _mm512_add_epi16(_mm512_mulhrs_epi16(x0, s), _mm512_mulhrs_epi16(x1, c)));
    }
}

/*
 * The same for 64 half-split planes and nothing else (d = 128): the turned queries stay in 16 registers, and while four tokens
 * are summed the next four are turned.
 */
static void anchor_tile_128(const int8_t *anchors, const int16_t *turn16, const int16_t *query16, const uint32_t *anchor,
                            const float *weight, const float *scale, uint32_t n, float *logits)
{
    const __m512i turn_over = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i each4 = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i spread = spread_low_half();
    const __m512 row_scale = _mm512_broadcast_f32x4(_mm_loadu_ps(scale));
    const uint32_t fours = (n + 15) / 16 * 4;
    _Alignas(64) int16_t x[2][4][128];
    __m512i q[16];
#pragma GCC unroll 16
    for (int e = 0; e < 16; e++)
        q[e] = _mm512_loadu_si512(query16 + 32 * e);
    for (uint32_t l = 0; l < 4; l++)
        turn_128(anchors + (size_t)anchor[4 * l] * 128, turn16 + (size_t)4 * l * 128, spread, x[0][l]);
    for (uint32_t f = 0; f < fours; f++) { /* tokens t, t + 4, t + 8, t + 12: neighbours in slot order */
        const uint32_t next = f + 1 < fours ? f + 1 : f, t1 = next / 4 * 16 + next % 4;
        const int16_t *now = x[f & 1][0];
        int16_t *then = x[~f & 1][0];
        __m512i acc[4];
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++)
            acc[l] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (uint32_t k = 0; k < 4; k++) {
            turn_128(anchors + (size_t)anchor[t1 + 4 * k] * 128, turn16 + (size_t)(t1 + 4 * k) * 128, spread, then + k * 128);
#pragma GCC unroll 16
            for (uint32_t e = 4 * k; e < 4 * k + 4; e++)
#pragma GCC unroll 4
                for (uint32_t l = 0; l < 4; l++)
                    acc[l] = _mm512_dpwssd_epi32(
                        acc[l], _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)(now + l * 128 + 8 * e))), q[e]);
            __asm__("" : : "r"(then) : "memory"); /* keeps this order, and the compiler from taking lanes out of registers */
        }
        float *out = logits + f * 16;
        const __m512 sums = _mm512_permutexvar_ps(turn_over, gather_parts(acc));
        const __m512 mine = _mm512_permutexvar_ps(_mm512_add_epi32(each4, _mm512_set1_epi32((int)(f % 4))),
                                                  _mm512_loadu_ps(weight + f / 4 * 16)); /* of the four tokens */
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_mul_ps(row_scale, mine), sums, _mm512_loadu_ps(out)));
    }
}

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits)
{
    const uint32_t parts = shape->padded_planes / 32, rest_parts = shape->padded_rest / 32;
    /* the shapes of most models with known trip counts */
    if (shape->style == AKV_ROPE_HALF_SPLIT && shape->rest == 0 && shape->planes == 64) {
        anchor_tile_128(anchors, turn16, query16, anchor, weight, scale, n, logits);
    } else if (shape->style == AKV_ROPE_HALF_SPLIT && shape->rest == 0 && shape->planes == 32) {
        anchor_tile(anchors, shape, 1, 0, true, turn16, query16, anchor, weight, scale, n, logits);
    } else {
        anchor_tile(anchors, shape, parts, rest_parts, shape->style == AKV_ROPE_HALF_SPLIT, turn16, query16, anchor, weight, scale, n,
                    logits);
    }
}

/* 64 tokens from t on: which have level l. */
INLINE uint64_t level_bits(const uint64_t *plane, uint32_t planes, uint32_t l, uint64_t live)
{
    for (uint32_t p = 0; p < planes; p++)
        live &= l >> p & 1 ? plane[p] : ~plane[p];
    return live;
}

static void sort_levels(const uint8_t *levels, uint64_t plane_bytes, uint32_t planes, uint32_t n, uint32_t num_levels,
                        uint16_t *slots, uint32_t *first)
{
    uint64_t plane[AKV_BLOCK_TOKENS / 64][8];
    uint32_t at[AKV_MAX_LEVELS + 1] = {0}, sum = 0;
    for (uint32_t t = 0; t < n; t += 64) {
        const uint32_t left = n - t < 64 ? n - t : 64;
        for (uint32_t p = 0; p < planes; p++) {
            uint64_t word = 0;
            if (left == 64)
                memcpy(&word, levels + p * plane_bytes + t / 8, 8);
            else
                memcpy(&word, levels + p * plane_bytes + t / 8, (left + 7) / 8);
            plane[t / 64][p] = word;
        }
        for (uint32_t l = 1; l <= num_levels; l++)
            at[l] += (uint32_t)__builtin_popcountll(level_bits(plane[t / 64], planes, l, low_bits(left)));
    }
    first[0] = 0;
    for (uint32_t l = 1; l <= num_levels; l++) {
        const uint32_t count = at[l];
        first[l] = at[l] = sum;
        sum += count;
    }
    first[num_levels + 1] = sum;
    const __m512i slot = _mm512_set_epi16(31, 27, 23, 19, 30, 26, 22, 18, 29, 25, 21, 17, 28, 24, 20, 16, 15, 11, 7, 3, 14, 10, 6, 2,
                                          13, 9, 5, 1, 12, 8, 4, 0);
    for (uint32_t t = 0; t < n; t += 64) {
        const uint32_t left = n - t < 64 ? n - t : 64;
        const __m512i slot0 = _mm512_add_epi16(slot, _mm512_set1_epi16((int16_t)t)), slot1 = _mm512_add_epi16(slot0, _mm512_set1_epi16(32));
        for (uint32_t l = 1; l <= num_levels; l++) {
            const uint64_t bits = level_bits(plane[t / 64], planes, l, low_bits(left));
            if (bits == 0)
                continue;
            const uint32_t low = (uint32_t)__builtin_popcount((uint32_t)bits), high = (uint32_t)__builtin_popcount((uint32_t)(bits >> 32));
            _mm512_mask_storeu_epi16(slots + at[l], (__mmask32)low_bits(low), _mm512_maskz_compress_epi16((__mmask32)bits, slot0));
            _mm512_mask_storeu_epi16(slots + at[l] + low, (__mmask32)low_bits(high),
                                     _mm512_maskz_compress_epi16((__mmask32)(bits >> 32), slot1));
            at[l] += low + high;
        }
    }
}

/*
 * The last group of a run, g < 16 residuals, as a full group whose other residuals are 0 bits; out has room for the group and 64 bytes
 * more. Eight coordinates take g * width whole bytes, so each width's bits lie alike in every eight.
 */
static void full_group(const uint8_t *codes, uint32_t g, const akv_quad_level *level, uint8_t *out)
{
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), iota = _mm512_set1_epi64(0x0706050403020100);
    const __m512i first_byte = _mm512_set_epi8(8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0,
                                               8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0);
    const uint8_t *end = codes + (g * level->bits + 7) / 8;
    uint32_t bit = 0; /* of the width's first, within its byte: 0 or 4 where the width is 4 */
    for (uint32_t w = 0; w < 3; w++) {
        const uint32_t width = 4u >> w, count = level->by_width[w];
        const __m512i at = _mm512_add_epi64(_mm512_mul_epu32(lane, _mm512_set1_epi64(g * width)), _mm512_set1_epi64(bit));
        const __m512i bytes = _mm512_add_epi8(_mm512_shuffle_epi8(_mm512_srli_epi64(at, 3), first_byte), iota);
        const __m512i shift = _mm512_and_si512(at, _mm512_set1_epi64(7)), mask = _mm512_set1_epi64((int64_t)low_bits(g * width));
        for (uint32_t i = 0; i < count; i += 8) {
            const uint8_t *from = codes + (size_t)i / 8 * g * width;
            const uint32_t left = (uint32_t)(end - from), live = count - i < 8 ? count - i : 8;
            const __m512i c = _mm512_maskz_loadu_epi8(low_bits(left < 64 ? left : 64), from);
            const __m512i x = _mm512_and_si512(_mm512_srlv_epi64(_mm512_permutexvar_epi8(bytes, c), shift), mask);
            if (w == 0)
                _mm512_storeu_si512(out, x);
            else if (w == 1)
                _mm256_storeu_si256((__m256i *)(void *)out, _mm512_cvtepi64_epi32(x));
            else
                _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi64_epi16(x));
            out += 2 * width * live;
        }
        codes += (bit + count * g * width) / 8;
        bit = (bit + count * g * width) % 8;
    }
}

/* 16 gains from 8 bytes. */
INLINE __m512 gains16(const uint8_t *p, uint32_t bytes)
{
    const __m512i nibble = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512 gain = _mm512_setr_ps(0.15749013f, 0.19842514f, 0.25f, 0.31498026f, 0.39685026f, 0.5f, 0.62996053f, 0.79370052f, 1.0f,
                                       1.2599210f, 1.5874011f, 2.0f, 2.5198421f, 3.1748021f, 4.0f, 5.0396842f);
    const __m128i packed = _mm_maskz_loadu_epi8((__mmask16)low_bits(bytes), p);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, _mm512_castsi128_si512(packed)), nibble), gain);
}

static void quantise_level(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    static const int32_t raise_of[3] = {104, 10, 1};
    const __m128 no_sign = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
    const __m128i to_words = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128 largest = _mm_setzero_ps(), all = _mm_setzero_ps();
    for (uint32_t w = 0, i = 0; w < 3; w++)
        for (uint32_t n = 0; n < list->by_width[w]; n++, i++) {
            const __m128 x = _mm_and_ps(_mm_mul_ps(_mm_loadu_ps(z + (size_t)list->coord[i] * 4), _mm_set1_ps(unit_of[w])), no_sign);
            largest = _mm_max_ps(x, largest);
            all = _mm_add_ps(all, x);
        }
    /* all < infinity: neither infinite nor NaN */
    const __mmask8 finite = _mm_cmp_ps_mask(all, _mm_set1_ps(INFINITY), _CMP_LT_OQ);
    const __mmask8 live = finite & _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m128 inverse = _mm_maskz_div_ps(live, _mm_set1_ps((float)AKV_QUAD_CODE_MAX), largest);
    _mm_storeu_ps(scale, _mm_mask_blend_ps(finite, _mm_set1_ps(NAN),
                                           _mm_maskz_div_ps(live, largest, _mm_set1_ps((float)AKV_QUAD_CODE_MAX))));
    __m128i high_sum = _mm_setzero_si128(), low_sum = high_sum;
    for (uint32_t w = 0, i = 0; w < 3; w++) {
        const __m128 unit = _mm_set1_ps(unit_of[w]);
        __m128i highs = _mm_setzero_si128(), lows = highs;
        for (uint32_t n = 0; n < list->by_width[w]; n += 4, query += 32, i += 4) {
            __m128i high[4], low[4]; /* of one coordinate: [4 rows] */
            for (uint32_t k = 0; k < 4; k++) {
                const __m128 x = n + k < list->by_width[w] ? _mm_loadu_ps(z + (size_t)list->coord[i + k] * 4) : _mm_setzero_ps();
                const __m128i whole = _mm_cvtps_epi32(_mm_maskz_mul_ps(live, _mm_mul_ps(x, unit), inverse));
                high[k] = _mm_srai_epi32(_mm_add_epi32(whole, _mm_set1_epi32(128)), 8);
                low[k] = _mm_sub_epi32(whole, _mm_slli_epi32(high[k], 8));
                highs = _mm_add_epi32(highs, high[k]);
                lows = _mm_add_epi32(lows, low[k]);
            }
            const __m128i h = _mm_packs_epi16(_mm_packs_epi32(high[0], high[1]), _mm_packs_epi32(high[2], high[3]));
            const __m128i l = _mm_packs_epi16(_mm_packs_epi32(low[0], low[1]), _mm_packs_epi32(low[2], low[3]));
            _mm_storeu_si128((__m128i *)(void *)query, _mm_shuffle_epi8(h, to_words));
            _mm_storeu_si128((__m128i *)(void *)(query + 16), _mm_shuffle_epi8(l, to_words));
        }
        i -= (0u - list->by_width[w]) & 3u;
        high_sum = _mm_sub_epi32(high_sum, _mm_mullo_epi32(highs, _mm_set1_epi32(raise_of[w])));
        low_sum = _mm_sub_epi32(low_sum, _mm_mullo_epi32(lows, _mm_set1_epi32(raise_of[w])));
    }
    _mm_storeu_si128((__m128i *)(void *)bias, high_sum);
    _mm_storeu_si128((__m128i *)(void *)(bias + 4), low_sum);
}

/*
 * Steps of four coordinates of 16 residuals as bytes, from 8, 16 or 32 bytes of codes. gather brings to each 64-bit lane
 * the bytes that hold its numbers, pick shifts each number to the bottom of a byte, and the table has an entry for whatever
 * lies above it.
 */
typedef struct spread {
    __m512i gather[3], pick[3], table[3];
} spread;

#define BYTES64(f) \
    { f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15), f(16), f(17), f(18), f(19), \
      f(20), f(21), f(22), f(23), f(24), f(25), f(26), f(27), f(28), f(29), f(30), f(31), f(32), f(33), f(34), f(35), f(36), f(37), \
      f(38), f(39), f(40), f(41), f(42), f(43), f(44), f(45), f(46), f(47), f(48), f(49), f(50), f(51), f(52), f(53), f(54), f(55), \
      f(56), f(57), f(58), f(59), f(60), f(61), f(62), f(63) }

/* Keys: byte 4 t + j of the result is coordinate j of residual t. 64-bit lane u holds residuals 2 u and 2 u + 1; its bytes 0..3 are
 * gathered from the place of residual 2 u (and 2 u + 1: the same byte) in coordinates 0..3. */
#define KEY_GATHER4(i) ((i) % 4 * 8 + (i) / 8)
#define KEY_GATHER2(i) ((i) % 4 * 4 + (i) / 16)
#define KEY_GATHER1(i) ((i) % 4 * 2 + (i) / 32)
#define KEY_PICK4(i) ((i) % 4 * 8 + (i) / 4 % 2 * 4)
#define KEY_PICK2(i) ((i) % 4 * 8 + (i) / 4 % 4 * 2)
#define KEY_PICK1(i) ((i) % 4 * 8 + (i) / 4 % 8)
static const uint8_t key_gather[3][64] = {BYTES64(KEY_GATHER4), BYTES64(KEY_GATHER2), BYTES64(KEY_GATHER1)};
static const uint8_t key_pick[3][64] = {BYTES64(KEY_PICK4), BYTES64(KEY_PICK2), BYTES64(KEY_PICK1)};
/* Values: byte 16 j + t. 64-bit lane u holds residuals 8 (u % 2) .. of coordinate u / 2. */
#define VALUE_GATHER4(i) ((i) / 16 * 8 + (i) / 8 % 2 * 4 + (i) % 4)
#define VALUE_GATHER2(i) ((i) / 16 * 4 + (i) / 8 % 2 * 2 + (i) % 2)
#define VALUE_GATHER1(i) ((i) / 16 * 2 + (i) / 8 % 2)
#define VALUE_PICK4(i) ((i) % 8 * 4)
#define VALUE_PICK2(i) ((i) % 8 * 2)
#define VALUE_PICK1(i) ((i) % 8)
static const uint8_t value_gather[3][64] = {BYTES64(VALUE_GATHER4), BYTES64(VALUE_GATHER2), BYTES64(VALUE_GATHER1)};
static const uint8_t value_pick[3][64] = {BYTES64(VALUE_PICK4), BYTES64(VALUE_PICK2), BYTES64(VALUE_PICK1)};

/* Steps by number (akv_level_steps4 and so on), magnitudes first. */
#define MAGNITUDE4(n) ((n) == 0 ? 5 : (n) == 1 ? 15 : (n) == 2 ? 25 : (n) == 3 ? 36 : (n) == 4 ? 48 : (n) == 5 ? 62 : (n) == 6 ? 79 : 104)
#define STEP4(i) ((i) % 16 < 8 ? -MAGNITUDE4(7 - (i) % 16) : MAGNITUDE4((i) % 16 - 8))
#define STEP2(i) ((i) % 4 == 0 ? -10 : (i) % 4 == 1 ? -3 : (i) % 4 == 2 ? 3 : 10)
#define STEP1(i) ((i) % 2 == 0 ? -1 : 1)
/* Keys' steps are raised by the largest, so that they are unsigned. */
#define RAISED4(i) (104 + STEP4(i))
#define RAISED2(i) (10 + STEP2(i))
#define RAISED1(i) (1 + STEP1(i))
static const int8_t value_table[3][64] = {BYTES64(STEP4), BYTES64(STEP2), BYTES64(STEP1)};
static const uint8_t key_table[3][64] = {BYTES64(RAISED4), BYTES64(RAISED2), BYTES64(RAISED1)};

INLINE spread spread_of(const uint8_t gather[3][64], const uint8_t pick[3][64], const void *table)
{
    spread s;
    for (int w = 0; w < 3; w++) {
        s.gather[w] = _mm512_loadu_si512(gather[w]);
        s.pick[w] = _mm512_loadu_si512(pick[w]);
        s.table[w] = _mm512_loadu_si512((const uint8_t *)table + 64 * w);
    }
    return s;
}

/* codes: `bytes` of them are read. */
INLINE __m512i spread_codes(const spread *s, int w, const uint8_t *codes, uint32_t bytes)
{
    const uint32_t whole = w == 0 ? 32 : w == 1 ? 16 : 8;
    __m512i c;
    if (bytes == whole && w == 0)
        c = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)codes));
    else if (bytes == whole && w == 1)
        c = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)codes));
    else if (bytes == whole)
        c = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(const void *)codes));
    else
        c = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)low_bits(bytes), codes));
    return _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(s->pick[w], _mm512_permutexvar_epi8(s->gather[w], c)), s->table[w]);
}

/* One four of key coordinates into the high and low sums of four rows. */
#define KEY_FOUR(w, bytes)                                                                                                     \
    do {                                                                                                                       \
        const __m512i steps = spread_codes(&s, w, codes, bytes);                                                               \
        const int32_t *q = (const int32_t *)(const void *)query;                                                               \
        a0 = _mm512_dpbusd_epi32(a0, steps, _mm512_set1_epi32(q[0]));                                                          \
        a1 = _mm512_dpbusd_epi32(a1, steps, _mm512_set1_epi32(q[1]));                                                          \
        a2 = _mm512_dpbusd_epi32(a2, steps, _mm512_set1_epi32(q[2]));                                                          \
        a3 = _mm512_dpbusd_epi32(a3, steps, _mm512_set1_epi32(q[3]));                                                          \
        b0 = _mm512_dpbusd_epi32(b0, steps, _mm512_set1_epi32(q[4]));                                                          \
        b1 = _mm512_dpbusd_epi32(b1, steps, _mm512_set1_epi32(q[5]));                                                          \
        b2 = _mm512_dpbusd_epi32(b2, steps, _mm512_set1_epi32(q[6]));                                                          \
        b3 = _mm512_dpbusd_epi32(b3, steps, _mm512_set1_epi32(q[7]));                                                          \
        query += 32;                                                                                                           \
    } while (0)

INLINE __m512 whole_sum(__m512i high, __m512i low, __m512 gain, float scale)
{
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    return _mm512_mul_ps(_mm512_mul_ps(gain, _mm512_set1_ps(scale)), sum);
}

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *all_query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits)
{
    const spread s = spread_of(key_gather, key_pick, key_table);
    uint8_t room[AKV_QUAD_MAX_DIM * 8 + 64];
    _Alignas(64) float token[16][4];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES;
        const uint8_t *codes = run + (n + 1) / 2 + (size_t)(at / AKV_GROUP_LANES) * 2 * level->bits;
        const int8_t *query = all_query;
        if (g < AKV_GROUP_LANES) {
            full_group(codes, g, level, room);
            codes = room;
        }
        __m512i a0 = _mm512_set1_epi32(bias[0]), a1 = _mm512_set1_epi32(bias[1]), a2 = _mm512_set1_epi32(bias[2]),
                a3 = _mm512_set1_epi32(bias[3]), b0 = _mm512_set1_epi32(bias[4]), b1 = _mm512_set1_epi32(bias[5]),
                b2 = _mm512_set1_epi32(bias[6]), b3 = _mm512_set1_epi32(bias[7]);
#pragma GCC unroll 3
        for (int w = 0; w < 3; w++) {
            const uint32_t count = level->by_width[w], bytes = w == 0 ? 8 : w == 1 ? 4 : 2;
            for (uint32_t i = 0; i < count / 4; i++, codes += 4 * bytes)
                KEY_FOUR(w, 4 * bytes);
            if (count % 4 != 0) {
                KEY_FOUR(w, count % 4 * bytes);
                codes += count % 4 * bytes;
            }
        }
        const __m512 gain = gains16(run + at / 2, (g + 1) / 2);
        store_tokens(&token[0][0], whole_sum(a0, b0, gain, scale[0]), whole_sum(a1, b1, gain, scale[1]),
                     whole_sum(a2, b2, gain, scale[2]), whole_sum(a3, b3, gain, scale[3]));
        if (g == AKV_GROUP_LANES) {
#pragma GCC unroll 16
            for (uint32_t t = 0; t < 16; t++) {
                float *out = logits + (size_t)slots[at + t] * 4;
                _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), _mm_load_ps(token[(t & 3) * 4 + t / 4])));
            }
        } else {
            for (uint32_t t = 0; t < g; t++) {
                float *out = logits + (size_t)slots[at + t] * 4;
                _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), _mm_load_ps(token[(t & 3) * 4 + t / 4])));
            }
        }
    }
}

/* A four of value coordinates in group `codes`, weights of the group: [4 rows][high, low][16]. */
#define VALUE_FOUR(w, codes, bytes)                                                                                            \
    do {                                                                                                                       \
        const __m512i steps = spread_codes(&s, w, codes, bytes);                                                               \
        const __m128i *u = (const __m128i *)(const void *)whole;                                                               \
        a0 = _mm512_dpbusd_epi32(a0, _mm512_broadcast_i32x4(_mm_load_si128(u)), steps);                                        \
        b0 = _mm512_dpbusd_epi32(b0, _mm512_broadcast_i32x4(_mm_load_si128(u + 1)), steps);                                    \
        a1 = _mm512_dpbusd_epi32(a1, _mm512_broadcast_i32x4(_mm_load_si128(u + 2)), steps);                                    \
        b1 = _mm512_dpbusd_epi32(b1, _mm512_broadcast_i32x4(_mm_load_si128(u + 3)), steps);                                    \
        a2 = _mm512_dpbusd_epi32(a2, _mm512_broadcast_i32x4(_mm_load_si128(u + 4)), steps);                                    \
        b2 = _mm512_dpbusd_epi32(b2, _mm512_broadcast_i32x4(_mm_load_si128(u + 5)), steps);                                    \
        a3 = _mm512_dpbusd_epi32(a3, _mm512_broadcast_i32x4(_mm_load_si128(u + 6)), steps);                                    \
        b3 = _mm512_dpbusd_epi32(b3, _mm512_broadcast_i32x4(_mm_load_si128(u + 7)), steps);                                    \
    } while (0)

INLINE void add_sums(float *out, __m512i high, __m512i low, float unit)
{
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(sum, _mm512_set1_ps(unit), _mm512_loadu_ps(out)));
}

/* One four of coordinates at `offset` of every group. */
INLINE void value_four(const spread *spread_in, int w, const uint8_t *groups, uint32_t full, uint32_t group_bytes, const uint8_t *rest,
                       uint32_t offset, uint32_t bytes, const uint8_t *whole, const float *unit, float *sums)
{
    const spread s = *spread_in;
    __m512i a0 = _mm512_setzero_si512(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    const uint8_t *codes = groups + offset;
    for (uint32_t i = 0; i < full; i++, codes += group_bytes, whole += 128)
        VALUE_FOUR(w, codes, bytes);
    if (rest != NULL)
        VALUE_FOUR(w, rest + offset, bytes);
    add_sums(sums, a0, b0, unit[0]);
    add_sums(sums + 16, a1, b1, unit[1]);
    add_sums(sums + 32, a2, b2, unit[2]);
    add_sums(sums + 48, a3, b3, unit[3]);
}

static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    const spread s = spread_of(value_gather, value_pick, value_table);
    float *gathered = (float *)(void *)scratch; /* [1024][4], 16 KiB */
    uint8_t *whole = scratch + 16384;           /* [groups][4 rows][high, low][16], 8 KiB */
    uint8_t room[AKV_QUAD_MAX_DIM * 8 + 64];
    const uint32_t groups = (n + 15) / 16, full = n / 16;
    __m512 largest = _mm512_setzero_ps();

    /* weights of the run's tokens side by side */
    for (uint32_t i = 0; i < groups; i++) {
        float *out = gathered + i * 64;
        const uint16_t *slot = slots + i * 16;
        if (i < full) {
#pragma GCC unroll 16
            for (uint32_t t = 0; t < 16; t++)
                _mm_store_ps(out + t * 4, _mm_loadu_ps(weights + (size_t)slot[t] * 4));
        } else {
            for (uint32_t t = 0; t < 16; t++)
                _mm_store_ps(out + t * 4, i * 16 + t < n ? _mm_loadu_ps(weights + (size_t)slot[t] * 4) : _mm_setzero_ps());
        }
    }
    for (uint32_t i = 0; i < groups; i++) {
        const __m512 gain = gains16(run + i * 8, i < full ? 8 : (n - i * 16 + 1) / 2);
        for (int v = 0; v < 4; v++) { /* tokens 4 v .. 4 v + 3 of the group */
            const __m512i each4 = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * v));
            float *p = gathered + i * 64 + v * 16;
            const __m512 w = _mm512_mul_ps(_mm512_load_ps(p), _mm512_permutexvar_ps(each4, gain));
            _mm512_store_ps(p, w);
            largest = _mm512_max_ps(largest, w);
        }
    }
    const __m128 top = fold_max(largest);
    float unit[4];
    _mm_storeu_ps(unit, _mm_mul_ps(top, _mm_set1_ps(1.0f / 65535.0f)));
    const __m128 inverse4 = _mm_maskz_div_ps(_mm_cmp_ps_mask(top, _mm_set1_ps(1e-30f), _CMP_GT_OQ), _mm_set1_ps(65535.0f), top);
    const __m512 inverse = _mm512_broadcast_f32x4(inverse4);
    /* [16 tokens][4 rows] of 16 bits, in two vectors -> rows of high and of low bytes */
    _Alignas(64) static const uint8_t pick_bytes[2][64] = {
#define PICK(i) (uint8_t)(((i) % 16 * 4 + (i) / 32) * 2 + 1 - (i) / 16 % 2)
#define PICK2(i) (uint8_t)(((i) % 16 * 4 + (i) / 32 + 2) * 2 + 1 - (i) / 16 % 2)
        BYTES64(PICK), BYTES64(PICK2)};
    const __m512i pick0 = _mm512_load_si512(pick_bytes[0]), pick1 = _mm512_load_si512(pick_bytes[1]);
    for (uint32_t i = 0; i < groups; i++) {
        const float *p = gathered + i * 64;
        const __m256i w0 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p), inverse)));
        const __m256i w1 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 16), inverse)));
        const __m256i w2 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 32), inverse)));
        const __m256i w3 = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 48), inverse)));
        const __m512i w01 = _mm512_inserti64x4(_mm512_castsi256_si512(w0), w1, 1), w23 = _mm512_inserti64x4(_mm512_castsi256_si512(w2), w3, 1);
        _mm512_store_si512(whole + i * 128, _mm512_permutex2var_epi8(w01, pick0, w23));
        _mm512_store_si512(whole + i * 128 + 64, _mm512_permutex2var_epi8(w01, pick1, w23));
    }

    const uint8_t *codes = run + (n + 1) / 2, *rest = NULL;
    if (full < groups) {
        full_group(codes + (size_t)full * 2 * level->bits, n - full * 16, level, room);
        rest = room;
    }
    uint32_t offset = 0;
#pragma GCC unroll 3
    for (int w = 0; w < 3; w++) {
        const uint32_t count = level->by_width[w], bytes = w == 0 ? 8 : w == 1 ? 4 : 2;
        for (uint32_t i = 0; i < count / 4; i++, offset += 4 * bytes, sums += 64)
            value_four(&s, w, codes, full, 2 * level->bits, rest, offset, 4 * bytes, whole, unit, sums);
        if (count % 4 != 0) {
            value_four(&s, w, codes, full, 2 * level->bits, rest, offset, count % 4 * bytes, whole, unit, sums);
            offset += count % 4 * bytes;
            sums += 64;
        }
    }
}

static void fold_sums(const float *sums, uint32_t fours, float *out)
{
    for (uint32_t i = 0; i < fours; i++) {
        const float *p = sums + (size_t)i * 64;
        __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16), c = _mm512_loadu_ps(p + 32), d = _mm512_loadu_ps(p + 48);
        TRANSPOSE(a, b, c, d); /* part 0..3: [4 coordinates][4 rows] */
        _mm512_storeu_ps(out + (size_t)i * 16, _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
    }
}

static void row_max(const float *x, uint32_t n, float *max)
{
    __m512 best0 = _mm512_broadcast_f32x4(_mm_loadu_ps(max)), best1 = best0;
    for (uint32_t i = 0; i < n * 4; i += 32) {
        best0 = _mm512_max_ps(_mm512_loadu_ps(x + i), best0); /* the second operand when the first is NaN */
        best1 = _mm512_max_ps(_mm512_loadu_ps(x + i + 16), best1);
    }
    _mm_storeu_ps(max, fold_max(_mm512_max_ps(best0, best1)));
}

INLINE __m512 exp_lanes(__m512 x)
{
    const __mmask16 live = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ); /* NaN lives on */
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)), 8);
    const __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-0x1.05c61p-29f), _mm512_fnmadd_ps(k, _mm512_set1_ps(0x1.62e43p-1f), x));
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 5040.0f), _mm512_set1_ps(1.0f / 720.0f)); /* Taylor to degree 7 */
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(live, p, k);
}

static void exp_sum(float *x, uint32_t n, const float *max, float *sum)
{
    const __m512 m = _mm512_broadcast_f32x4(_mm_loadu_ps(max));
    __m512 s0 = _mm512_setzero_ps(), s1 = s0;
    for (uint32_t i = 0; i < n * 4; i += 32) {
        const __m512 y0 = exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(x + i), m));
        const __m512 y1 = exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(x + i + 16), m));
        _mm512_storeu_ps(x + i, y0);
        _mm512_storeu_ps(x + i + 16, y1);
        s0 = _mm512_add_ps(s0, y0);
        s1 = _mm512_add_ps(s1, y1);
    }
    s0 = _mm512_add_ps(s0, s1);
    const __m128 four = _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(s0), _mm512_extractf32x4_ps(s0, 1)),
                                   _mm_add_ps(_mm512_extractf32x4_ps(s0, 2), _mm512_extractf32x4_ps(s0, 3)));
    _mm_storeu_ps(sum, _mm_add_ps(_mm_loadu_ps(sum), four));
}

static void histogram(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist)
{
    for (uint32_t t = 0; t < n; t++) {
        float *at = hist + (size_t)anchor[t] * 4;
        _mm_storeu_ps(at, _mm_fmadd_ps(_mm_set1_ps(weight[t]), _mm_loadu_ps(weights + akv_quad_slot(t) * 4), _mm_loadu_ps(at)));
    }
}

INLINE __m512 bytes_f32(const int8_t *p, __mmask16 mask)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p)));
}

static void bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    for (uint32_t i = 0; i < dim; i += 64) {
        __m512 acc[4][4]; /* [row][16 coordinates] */
        __mmask16 mask[4];
        for (uint32_t v = 0; v < 4; v++) {
            mask[v] = (__mmask16)low_bits(i + 16 * v >= dim ? 0 : dim - i - 16 * v < 16 ? dim - i - 16 * v : 16);
            for (uint32_t r = 0; r < 4; r++)
                acc[r][v] = _mm512_maskz_loadu_ps(mask[v], out + (size_t)r * dim + i + 16 * v);
        }
        for (uint32_t a = 0; a < n; a++) {
            const int8_t *row = rows + (size_t)a * dim + i;
            const __m512 w0 = _mm512_set1_ps(w[a * 4]), w1 = _mm512_set1_ps(w[a * 4 + 1]), w2 = _mm512_set1_ps(w[a * 4 + 2]),
                         w3 = _mm512_set1_ps(w[a * 4 + 3]);
#pragma GCC unroll 4
            for (uint32_t v = 0; v < 4; v++) {
                const __m512 x = bytes_f32(row + 16 * v, mask[v]);
                acc[0][v] = _mm512_fmadd_ps(w0, x, acc[0][v]);
                acc[1][v] = _mm512_fmadd_ps(w1, x, acc[1][v]);
                acc[2][v] = _mm512_fmadd_ps(w2, x, acc[2][v]);
                acc[3][v] = _mm512_fmadd_ps(w3, x, acc[3][v]);
            }
        }
        for (uint32_t v = 0; v < 4; v++)
            for (uint32_t r = 0; r < 4; r++)
                _mm512_mask_storeu_ps(out + (size_t)r * dim + i + 16 * v, mask[v], acc[r][v]);
    }
}

static void bytes_dot(const float *x, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    for (uint32_t a = 0; a < n; a++) {
        __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
        for (uint32_t i = 0; i < dim; i += 16) {
            const __mmask16 mask = (__mmask16)low_bits(dim - i < 16 ? dim - i : 16);
            const __m512 b = bytes_f32(rows + (size_t)a * dim + i, mask);
            s0 = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, x + i), s0);
            s1 = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, x + dim + i), s1);
            s2 = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, x + 2 * (size_t)dim + i), s2);
            s3 = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, x + 3 * (size_t)dim + i), s3);
        }
        _mm_storeu_ps(out + a * 4, sum4(s0, s1, s2, s3));
    }
}

/* R rows (1 to 6) of tile_dots: 24 accumulators at most. */
#define TILE_DOTS(R)                                                                                                           \
    do {                                                                                                                       \
        __m512 acc[R][4];                                                                                                      \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = _mm512_setzero_ps();                                               \
        for (uint32_t i = 0; i < dim; i++) {                                                                                   \
            const float *c = columns + (size_t)i * 64;                                                                         \
            const __m512 c0 = _mm512_loadu_ps(c), c1 = _mm512_loadu_ps(c + 16), c2 = _mm512_loadu_ps(c + 32),                  \
                         c3 = _mm512_loadu_ps(c + 48);                                                                         \
            for (uint32_t k = 0; k < R; k++) {                                                                                 \
                const __m512 q = _mm512_set1_ps(x[(size_t)(r + k) * dim + i]);                                                 \
                acc[k][0] = _mm512_fmadd_ps(q, c0, acc[k][0]);                                                                 \
                acc[k][1] = _mm512_fmadd_ps(q, c1, acc[k][1]);                                                                 \
                acc[k][2] = _mm512_fmadd_ps(q, c2, acc[k][2]);                                                                 \
                acc[k][3] = _mm512_fmadd_ps(q, c3, acc[k][3]);                                                                 \
            }                                                                                                                  \
        }                                                                                                                      \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            for (uint32_t v = 0; v < 4; v++)                                                                                   \
                _mm512_storeu_ps(out + (size_t)(r + k) * 64 + 16 * v, acc[k][v]);                                              \
    } while (0)

static void tile_dots(const float *x, uint32_t rows, uint32_t dim, const float *columns, float *out)
{
    uint32_t r = 0;
    for (; r + 6 <= rows; r += 6)
        TILE_DOTS(6);
    for (; r < rows; r++)
        TILE_DOTS(1);
}

/* R rows of tile_sums over 64 coordinates from i on. */
#define TILE_SUMS(R)                                                                                                           \
    do {                                                                                                                       \
        __m512 acc[R][4];                                                                                                      \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            for (uint32_t v = 0; v < 4; v++)                                                                                   \
                acc[k][v] = _mm512_maskz_loadu_ps(mask[v], out + (size_t)(r + k) * dim + i + 16 * v);                          \
        for (uint32_t t = 0; t < n; t++) {                                                                                     \
            const float *c = x + (size_t)t * dim + i;                                                                          \
            const __m512 c0 = _mm512_maskz_loadu_ps(mask[0], c), c1 = _mm512_maskz_loadu_ps(mask[1], c + 16),                  \
                         c2 = _mm512_maskz_loadu_ps(mask[2], c + 32), c3 = _mm512_maskz_loadu_ps(mask[3], c + 48);             \
            for (uint32_t k = 0; k < R; k++) {                                                                                 \
                const __m512 q = _mm512_set1_ps(w[(r + k) * stride + t]);                                                      \
                acc[k][0] = _mm512_fmadd_ps(q, c0, acc[k][0]);                                                                 \
                acc[k][1] = _mm512_fmadd_ps(q, c1, acc[k][1]);                                                                 \
                acc[k][2] = _mm512_fmadd_ps(q, c2, acc[k][2]);                                                                 \
                acc[k][3] = _mm512_fmadd_ps(q, c3, acc[k][3]);                                                                 \
            }                                                                                                                  \
        }                                                                                                                      \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            for (uint32_t v = 0; v < 4; v++)                                                                                   \
                _mm512_mask_storeu_ps(out + (size_t)(r + k) * dim + i + 16 * v, mask[v], acc[k][v]);                           \
    } while (0)

static void tile_sums(const float *w, size_t stride, uint32_t rows, const float *x, uint32_t n, uint32_t dim, float *out)
{
    for (uint32_t i = 0; i < dim; i += 64) {
        __mmask16 mask[4];
        for (uint32_t v = 0; v < 4; v++)
            mask[v] = (__mmask16)low_bits(i + 16 * v >= dim ? 0 : dim - i - 16 * v < 16 ? dim - i - 16 * v : 16);
        uint32_t r = 0;
        for (; r + 6 <= rows; r += 6)
            TILE_SUMS(6);
        for (; r < rows; r++)
            TILE_SUMS(1);
    }
}

const akv_quad_kernels akv_quad_avx512 = {
    "avx512",  unpack_anchors, turn_rows, mean_logits, anchor_logits, sort_levels, quantise_level, code_dots,
    code_sums, fold_sums,      row_max,   exp_sum,     histogram,     bytes_sum,   bytes_dot,
    tile_dots, tile_sums,
};

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512; /* a translation unit must not be empty */
#endif
