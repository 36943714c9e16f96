/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx2.c - the quad kernels for AVX2 with FMA: anchors and codes by hand, the rest as the compiler makes it. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#  else
#    pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt")
#  endif
#define AKV_ISA(name) name##_avx2
#define AKV_ISA_NAME "avx2"
#define AKV_QUAD_OWN_ANCHORS 1
#define AKV_QUAD_OWN_CODES 1
#include "kernels/quad.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes);
static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits);
static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums);
#include "kernels/quad_body.h"

/* 16 bytes to the high bytes of 16 words; those at and beyond `count` as 0. */
INLINE __m256i high_bytes(const int8_t *p, uint32_t count)
{
    __m128i b;
    if (count >= 16) {
        b = _mm_loadu_si128((const __m128i *)(const void *)p);
    } else {
        int8_t some[16] = {0};
        memcpy(some, p, count);
        b = _mm_loadu_si128((const __m128i *)(const void *)some);
    }
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(b), 8);
}

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes)
{
    akv_quad_fetch(ahead, ahead_bytes);
    const uint32_t P = shape->planes, PP = shape->padded_planes, width = akv_quad_width(shape);
    const bool half = shape->style == AKV_ROPE_HALF_SPLIT;
    const __m128 scales = _mm_loadu_ps(scale);
    _Alignas(32) int16_t x[2 * AKV_QUAD_MAX_DIM];
    for (uint32_t t = 0; t < n; t++) {
        const int8_t *a = anchors + (size_t)anchor[t] * shape->dim;
        const int16_t *turn = turn16 + (size_t)t * 2 * PP;
        for (uint32_t j = 0; j < PP; j += 16) {
            const uint32_t left = j < P ? P - j : 0;
            __m256i x0, x1;
            if (half) {
                x0 = high_bytes(a + j, left);
                x1 = high_bytes(a + P + j, left);
            } else if (left >= 16) {
                const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(a + 2 * j));
                x0 = _mm256_slli_epi16(pairs, 8);
                x1 = _mm256_and_si256(pairs, _mm256_set1_epi16((int16_t)0xff00));
            } else {
                int8_t some[32] = {0};
                memcpy(some, a + 2 * j, 2 * left);
                const __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)some);
                x0 = _mm256_slli_epi16(pairs, 8);
                x1 = _mm256_and_si256(pairs, _mm256_set1_epi16((int16_t)0xff00));
            }
            const int16_t *cs = turn + j / 32 * 64 + j % 32;
            const __m256i c = _mm256_loadu_si256((const __m256i *)(const void *)cs), s = _mm256_loadu_si256((const __m256i *)(const void *)(cs + 32));
            int16_t *at = x + j / 32 * 64 + j % 32;
            _mm256_store_si256((__m256i *)(void *)at, _mm256_sub_epi16(_mm256_mulhrs_epi16(x0, c), _mm256_mulhrs_epi16(x1, s)));
            _mm256_store_si256((__m256i *)(void *)(at + 32), _mm256_add_epi16(_mm256_mulhrs_epi16(x0, s), _mm256_mulhrs_epi16(x1, c)));
        }
        for (uint32_t i = 0; i < shape->padded_rest; i += 16)
            _mm256_store_si256((__m256i *)(void *)(x + 2 * PP + i),
                               _mm256_srai_epi16(high_bytes(a + 2 * P + i, i < shape->rest ? shape->rest - i : 0), 1));
        __asm__("" : : "r"(x) : "memory");
        /* 128-bit lanes are rows: 0 and 1, 2 and 3 */
        __m256i acc01 = _mm256_setzero_si256(), acc23 = acc01;
        for (uint32_t e = 0; e < width / 8; e++) {
            const __m256i eight = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)(x + 8 * e)));
            const int16_t *q = query16 + 32 * e;
            acc01 = _mm256_add_epi32(acc01, _mm256_madd_epi16(eight, _mm256_loadu_si256((const __m256i *)(const void *)q)));
            acc23 = _mm256_add_epi32(acc23, _mm256_madd_epi16(eight, _mm256_loadu_si256((const __m256i *)(const void *)(q + 16))));
        }
        const __m256 f01 = _mm256_cvtepi32_ps(acc01), f23 = _mm256_cvtepi32_ps(acc23);
        __m256 s = _mm256_hadd_ps(f01, f23); /* rows 0, 2 low; 1, 3 high: [p0 + p1, p2 + p3] */
        s = _mm256_hadd_ps(s, s);
        const __m128 low = _mm256_castps256_ps128(s), high = _mm256_extractf128_ps(s, 1);
        const __m128 rows = _mm_unpacklo_ps(low, high); /* rows 0, 1, 2, 3 */
        float *out = logits + (size_t)akv_quad_slot(t) * 4;
        _mm_storeu_ps(out, _mm_fmadd_ps(_mm_mul_ps(scales, _mm_set1_ps(weight[t])), rows, _mm_loadu_ps(out)));
    }
}

/* Steps of one coordinate of 16 residuals, from 8, 4 or 2 bytes of codes, as bytes. */
INLINE __m128i steps16(const uint8_t *codes, int w)
{
    const __m128i low = _mm_set1_epi8(15);
    if (w == 2) {
        uint16_t word;
        memcpy(&word, codes, 2);
        const __m128i bit = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 1, 2, 4, 8, 16, 32, 64, -128);
        const __m128i each = _mm_shuffle_epi8(_mm_cvtsi32_si128(word), _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
        const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(each, bit), bit); /* -1 where set */
        return _mm_sub_epi8(_mm_set1_epi8(-1), _mm_add_epi8(set, set));
    }
    if (w == 1) {
        int32_t word;
        memcpy(&word, codes, 4);
        const __m128i v = _mm_cvtsi32_si128(word);
        const __m128i two = _mm_and_si128(_mm_unpacklo_epi8(v, _mm_srli_epi16(v, 4)), low); /* two residuals each */
        const __m128i even = _mm_shuffle_epi8(_mm_setr_epi8(-10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10), two);
        const __m128i odd = _mm_shuffle_epi8(_mm_setr_epi8(-10, -10, -10, -10, -3, -3, -3, -3, 3, 3, 3, 3, 10, 10, 10, 10), two);
        return _mm_unpacklo_epi8(even, odd);
    }
    const __m128i v = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    return _mm_shuffle_epi8(_mm_setr_epi8(-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104),
                            _mm_and_si128(_mm_unpacklo_epi8(v, _mm_srli_epi16(v, 4)), low));
}

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *all_query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits)
{
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES;
        const uint8_t *codes = run + (n + 1) / 2 + (size_t)(at / AKV_GROUP_LANES) * 2 * level->bits;
        if (g < AKV_GROUP_LANES) {
            fill_group(codes, g, level, room);
            codes = room;
        }
        const int8_t *q = all_query;
        __m256i acc[4][2]; /* [row][8 residuals] */
        for (uint32_t r = 0; r < 4; r++)
            acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 3
        for (int w = 0; w < 3; w++) {
            const uint32_t bytes = 8u >> w, count = level->by_width[w];
            for (uint32_t i = 0; i < count; i += 2, codes += 2 * bytes) {
                const int8_t *p = q + i / 4 * 32 + i % 4;
                const __m128i a = steps16(codes, w), b = i + 1 < count ? steps16(codes + bytes, w) : _mm_setzero_si128();
                const __m256i s0 = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), s1 = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
#pragma GCC unroll 4
                for (uint32_t r = 0; r < 4; r++) { /* query = 256 * high + low fits 16 bits; padding is 0 */
                    const uint32_t first = (uint32_t)(256 * p[r * 4] + p[16 + r * 4]) & 0xffffu;
                    const uint32_t second = (uint32_t)(256 * p[r * 4 + 1] + p[16 + r * 4 + 1]) & 0xffffu;
                    const __m256i pair = _mm256_set1_epi32((int)(first | second << 16));
                    acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(s0, pair));
                    acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(s1, pair));
                }
            }
            codes -= (count & 1) * bytes;
            q += (count + 3) / 4 * 32;
        }
        float sum[4][16];
        for (uint32_t r = 0; r < 4; r++) {
            _mm256_storeu_ps(sum[r], _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][0]), _mm256_set1_ps(scale[r])));
            _mm256_storeu_ps(sum[r] + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][1]), _mm256_set1_ps(scale[r])));
        }
        for (uint32_t l = 0; l < g; l++) {
            float *out = logits + (size_t)slots[at + l] * 4;
            _mm_storeu_ps(out, _mm_fmadd_ps(_mm_set1_ps(gain_at(run, at + l)), _mm_setr_ps(sum[0][l], sum[1][l], sum[2][l], sum[3][l]),
                                            _mm_loadu_ps(out)));
        }
    }
    (void)bias;
}

static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    const uint32_t groups = (n + 15) / 16, full = n / 16;
    int16_t *whole = (int16_t *)(void *)scratch; /* [groups][4 rows][high, low][16], 16 KiB */
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    __m128 largest = _mm_setzero_ps();
    for (uint32_t i = 0; i < n; i++)
        largest = _mm_max_ps(_mm_mul_ps(_mm_set1_ps(gain_at(run, i)), _mm_loadu_ps(weights + (size_t)slots[i] * 4)), largest);
    float top[4], unit[4], inverse[4];
    _mm_storeu_ps(top, largest);
    for (uint32_t r = 0; r < 4; r++) {
        unit[r] = top[r] * (1.0f / 65535.0f);
        inverse[r] = top[r] > 1e-30f ? 65535.0f / top[r] : 0.0f;
    }
    memset(whole, 0, (size_t)groups * 256);
    for (uint32_t i = 0; i < n; i++) {
        const __m128 w = _mm_mul_ps(_mm_set1_ps(gain_at(run, i)), _mm_loadu_ps(weights + (size_t)slots[i] * 4));
        int32_t x[4];
        _mm_storeu_si128((__m128i *)(void *)x, _mm_cvtps_epi32(_mm_mul_ps(w, _mm_loadu_ps(inverse))));
        for (uint32_t r = 0; r < 4; r++) {
            whole[i / 16 * 128 + r * 32 + i % 16] = (int16_t)(x[r] >> 8 & 255);
            whole[i / 16 * 128 + r * 32 + 16 + i % 16] = (int16_t)(x[r] & 255);
        }
    }
    const uint8_t *codes = run + (n + 1) / 2;
    if (full < groups)
        fill_group(codes + (size_t)full * 2 * level->bits, n % 16, level, room);
    uint32_t offset = 0;
#pragma GCC unroll 3
    for (int w = 0; w < 3; w++) {
        const uint32_t bytes = 8u >> w, count = level->by_width[w];
        for (uint32_t i = 0; w == 2 && count != 0 && i < groups * 128; i += 32)
            for (uint32_t t = i; t < i + 16; t++) /* 257 times a byte: twice that byte */
                whole[t] = whole[t + 16] = (int16_t)akv_quad_weight8((uint32_t)(256 * whole[t] + whole[t + 16]));
        for (uint32_t i = 0; i < count; i++, offset += bytes) {
            __m256i high[4], low[4];
            for (uint32_t r = 0; r < 4; r++)
                high[r] = low[r] = _mm256_setzero_si256();
            for (uint32_t k = 0; k < groups; k++) {
                const uint8_t *at = (k < full ? codes + (size_t)k * 2 * level->bits : room) + offset;
                const __m256i s = _mm256_cvtepi8_epi16(steps16(at, w));
                const int16_t *u = whole + k * 128;
#pragma GCC unroll 4
                for (uint32_t r = 0; r < 4; r++) {
                    high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(s, _mm256_loadu_si256((const __m256i *)(const void *)(u + r * 32))));
                    low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(s, _mm256_loadu_si256((const __m256i *)(const void *)(u + r * 32 + 16))));
                }
            }
            for (uint32_t r = 0; r < 4; r++) {
                const __m128i h = _mm_add_epi32(_mm256_castsi256_si128(high[r]), _mm256_extracti128_si256(high[r], 1));
                const __m128i l = _mm_add_epi32(_mm256_castsi256_si128(low[r]), _mm256_extracti128_si256(low[r], 1));
                const __m128 sum = _mm_fmadd_ps(_mm_cvtepi32_ps(h), _mm_set1_ps(256.0f), _mm_cvtepi32_ps(l));
                float *out = sums + (size_t)(i / 4) * 64 + r * 16 + i % 4 * 4;
                _mm_storeu_ps(out, _mm_fmadd_ps(sum, _mm_set1_ps(unit[r]), _mm_loadu_ps(out)));
            }
        }
        sums += (size_t)((count + 3) / 4) * 64;
    }
}

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx2; /* a translation unit must not be empty */
#endif
