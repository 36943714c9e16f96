/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_avx512.h - what the AVX-512 kernels of quad.h share; keys, values and the rest are one file each. For files that have asked
 * for the instruction set before they include it.
 */
#ifndef AKV_QUAD_AVX512_H
#define AKV_QUAD_AVX512_H

#include "kernels/quad.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/*
 * acc += dot products of four unsigned and four signed bytes (two and two words) per lane. Written as assembly because gcc 12 copies the
 * accumulators of the intrinsics from register to register and back in every turn of a loop.
 */
INLINE void dot_bytes(__m512i *acc, __m512i u, __m512i s)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*acc) : "v"(u), "v"(s));
}

INLINE void dot_words(__m512i *acc, __m512i a, __m512i b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*acc) : "v"(a), "v"(b));
}

/* The low n bits; n <= 64. */
INLINE uint64_t low_bits(uint32_t n)
{
    return _bzhi_u64(~UINT64_C(0), n);
}

/* exp(x), x <= 0 (kernels.h, exp_sum). */
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

/* Lanes of four vectors summed by four: [4 parts][4 vectors]. */
INLINE __m512 row_parts(const __m512 v[4])
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])); /* a02 b02 a13 b13 */
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

/* Sums of the lanes of four vectors. */
INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    TRANSPOSE(a, b, c, d);
    const __m512 s = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)); /* [4 parts][4 rows] */
    return _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(s), _mm512_extractf32x4_ps(s, 1)),
                      _mm_add_ps(_mm512_extractf32x4_ps(s, 2), _mm512_extractf32x4_ps(s, 3)));
}

INLINE __m128 fold_max(__m512 v)
{
    return _mm_max_ps(_mm_max_ps(_mm512_castps512_ps128(v), _mm512_extractf32x4_ps(v, 1)),
                      _mm_max_ps(_mm512_extractf32x4_ps(v, 2), _mm512_extractf32x4_ps(v, 3)));
}

/*
 * The last group of a run, g < 16 residuals, as a full group whose other residuals are 0 bits; out has room for the group and 64 bytes
 * more. Eight coordinates take g * width whole bytes, so each width's bits lie alike in every eight.
 */
static inline void full_group(const uint8_t *codes, uint32_t g, const akv_quad_level *level, uint8_t *out)
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

/*
 * Steps of four coordinates of 16 residuals as bytes, from 8, 16 or 32 bytes of codes. gather brings to each 64-bit lane
 * the bytes that hold its numbers, pick shifts each number to the bottom of a byte, and the table has an entry for whatever
 * lies above it.
 */
typedef struct code_spread {
    __m512i gather[3], pick[3], table[3];
} code_spread;

#define BYTES64(f) \
    { f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15), f(16), f(17), f(18), f(19), \
      f(20), f(21), f(22), f(23), f(24), f(25), f(26), f(27), f(28), f(29), f(30), f(31), f(32), f(33), f(34), f(35), f(36), f(37), \
      f(38), f(39), f(40), f(41), f(42), f(43), f(44), f(45), f(46), f(47), f(48), f(49), f(50), f(51), f(52), f(53), f(54), f(55), \
      f(56), f(57), f(58), f(59), f(60), f(61), f(62), f(63) }

/* Steps by number (akv_level_steps4 and so on), magnitudes first. */
#define MAGNITUDE4(n) ((n) == 0 ? 5 : (n) == 1 ? 15 : (n) == 2 ? 25 : (n) == 3 ? 36 : (n) == 4 ? 48 : (n) == 5 ? 62 : (n) == 6 ? 79 : 104)
#define STEP4(i) ((i) % 16 < 8 ? -MAGNITUDE4(7 - (i) % 16) : MAGNITUDE4((i) % 16 - 8))
#define STEP2(i) ((i) % 4 == 0 ? -10 : (i) % 4 == 1 ? -3 : (i) % 4 == 2 ? 3 : 10)
#define STEP1(i) ((i) % 2 == 0 ? -1 : 1)

INLINE code_spread spread_of(const uint8_t gather[3][64], const uint8_t pick[3][64], const void *table)
{
    code_spread s;
    for (int w = 0; w < 3; w++) {
        s.gather[w] = _mm512_loadu_si512(gather[w]);
        s.pick[w] = _mm512_loadu_si512(pick[w]);
        s.table[w] = _mm512_loadu_si512((const uint8_t *)table + 64 * w);
    }
    return s;
}

/* codes: `bytes` of them are read. */
INLINE __m512i spread_codes(const code_spread *s, int w, const uint8_t *codes, uint32_t bytes)
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

INLINE __m512 bytes_f32(const int8_t *p, __mmask16 mask)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p)));
}

/* Keys (quad_avx512_keys.c, quad_avx512_anchors.c). */
void akv_avx512_unpack_anchors(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales, uint32_t n,
                               uint32_t *out_anchor, float *out_weight);
void akv_avx512_turn_rows(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes,
                          int16_t *query16, float *mean_rows);
void akv_avx512_mean_logits(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast, const float *moments,
                            const float *rest, float *logits);
void akv_avx512_anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                              const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                              const void *ahead, uint32_t ahead_bytes);
void akv_avx512_quantise_level(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale);
void akv_avx512_code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *all_query, const int32_t *bias,
                          const float *scale, const uint16_t *slots, float *logits);

/* Planes that hardly turn (quad_avx512_slow.c). */
extern const akv_quad_slow akv_avx512_slow;
void akv_avx512_slow_mean_logits(const float *mean_rows, const float *table, uint32_t fast, const float *moments,
                                 const float *mean_terms, float middle, float half, float *logits);
void akv_avx512_slow_anchor_logits(const int8_t *anchors, const int16_t *turn16, const int16_t *query16, const uint32_t *anchor,
                                   const float *weight, const float *scale, uint32_t n, const float *terms, float first, float step,
                                   float *logits, const void *ahead, uint32_t ahead_bytes);

/* Values (quad_avx512_values.c). */
void akv_avx512_code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                          uint8_t *scratch, float *sums);
void akv_avx512_place_sums(const float *sums, const akv_level_list *list, float *z);
void akv_avx512_histogram(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist);
void akv_avx512_bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out);

#endif
