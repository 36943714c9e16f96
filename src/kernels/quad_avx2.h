/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_avx2.h - what the kernels of quad.h for 256-bit registers share; keys (quad_avx2_keys.h, quad_avx2_codes.h) and
 * values (quad_avx2_values.h) are one file each. Included, like those, once per variant by files that have asked for
 * the instruction set before; AKV_QUAD_VNNI: products and sums in one instruction (AVX-VNNI).
 *
 * Codes are taken as pairs of residuals. Pair k of a group, residuals 2 k and 2 k + 1, has the place of k in 0, 2, 4,
 * 6, 1, 3, 5, 7: half-bytes come out of memory so when there are two of two bits in each, low ones first, and the other
 * widths follow.
 */
#ifndef AKV_QUAD_AVX2_H
#define AKV_QUAD_AVX2_H

#include "kernels/quad.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

INLINE __m128i load128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

INLINE __m256i load256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

INLINE void store256(void *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)p, v);
}

/* The same 128 bits in both halves. */
INLINE __m256i both128(const void *p)
{
    return _mm256_broadcastsi128_si256(load128(p));
}

/* acc += x. As assembly, or gcc 12 makes the products of a loop first and adds them later, from memory. */
INLINE void add_dwords(__m256i *acc, __m256i x)
{
    __asm__("vpaddd %1, %0, %0" : "+x"(*acc) : "x"(x));
}

INLINE void add_words(__m256i *acc, __m256i x)
{
    __asm__("vpaddw %1, %0, %0" : "+x"(*acc) : "x"(x));
}

/*
 * acc += sums of the products of two words a lane. As assembly because gcc 12 copies accumulators of the intrinsic in
 * every turn of a loop.
 */
INLINE void dot_words(__m256i *acc, __m256i a, __m256i b)
{
#ifdef AKV_QUAD_VNNI
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(*acc) : "x"(a), "xm"(b));
#else
    add_dwords(acc, _mm256_madd_epi16(a, b));
#endif
}

#ifdef AKV_QUAD_VNNI
/* acc += sums of the products of four unsigned and four signed bytes a lane. */
INLINE void dot_bytes(__m256i *acc, __m256i u, __m256i s)
{
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(*acc) : "x"(u), "xm"(s));
}
#endif

/* Four rows of 8 tokens -> tokens i and i + 4 in vector i, four rows each. */
#define TRANSPOSE(a, b, c, d)                                                                                          \
    do {                                                                                                               \
        const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b);                                   \
        const __m256 cd0 = _mm256_unpacklo_ps(c, d), cd1 = _mm256_unpackhi_ps(c, d);                                   \
        a = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab0), _mm256_castps_pd(cd0)));                        \
        b = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab0), _mm256_castps_pd(cd0)));                        \
        c = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab1), _mm256_castps_pd(cd1)));                        \
        d = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab1), _mm256_castps_pd(cd1)));                        \
    } while (0)

/* Sums of the lanes of four vectors. */
INLINE __m128 sum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

INLINE __m256 broadcast4(const float *p)
{
    return _mm256_broadcast_ps((const __m128 *)(const void *)p);
}

/* Entries i of a table of 16, i < 16: the lower and the upper eight of it are given. */
INLINE __m256 look_up16(__m256 low, __m256 high, __m256i i)
{
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                            _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}

/* Gains of a group from its 8 bytes: of the residuals 2 k, then of 2 k + 1, by place. */
INLINE void gains16(const uint8_t *p, uint32_t bytes, __m256 out[2])
{
    const __m256 low =
        _mm256_setr_ps(0.15749013f, 0.19842514f, 0.25f, 0.31498026f, 0.39685026f, 0.5f, 0.62996053f, 0.79370052f);
    const __m256 high = _mm256_setr_ps(1.0f, 1.2599210f, 1.5874011f, 2.0f, 2.5198421f, 3.1748021f, 4.0f, 5.0396842f);
    uint64_t packed = 0;
    if (bytes == 8)
        memcpy(&packed, p, 8);
    else
        memcpy(&packed, p, bytes);
    const __m128i places = _mm_shuffle_epi8(_mm_cvtsi64_si128((int64_t)packed),
                                            _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i code = _mm256_cvtepu8_epi32(places);
    out[0] = look_up16(low, high, _mm256_and_si256(code, _mm256_set1_epi32(15)));
    out[1] = look_up16(low, high, _mm256_srli_epi32(code, 4));
}

/*
 * The last group of a run, g < 16 residuals, as a full group whose other residuals are 0 bits. A coordinate's numbers
 * are at most 60 bits that begin at a multiple of 4 bits, or 30 at a multiple of 2, or 15: eight bytes hold them.
 */
static void full_group(const uint8_t *codes, uint32_t g, const akv_quad_level *level, uint8_t *out)
{
    const uint32_t bytes = (g * level->bits + 7) / 8;
    uint32_t bit = 0;
    for (uint32_t w = 0; w < 3; w++) {
        const uint32_t width = 4u >> w, step = g * width;
        const uint64_t mask = (UINT64_C(1) << step) - 1;
        for (uint32_t i = 0; i < level->by_width[w]; i++, bit += step, out += 2 * width) {
            const uint32_t at = bit / 8;
            uint64_t x = 0;
            if (at + 8 <= bytes)
                memcpy(&x, codes + at, 8);
            else
                memcpy(&x, codes + at, bytes - at);
            x = x >> (bit & 7) & mask;
            memcpy(out, &x, 8); /* what is too much is overwritten, or lies in the room behind */
        }
    }
}
#define FULL_GROUP_ROOM (AKV_QUAD_MAX_DIM * 8 + 8)

/* Masks of loads and stores of n < 8 floats. */
INLINE __m256i first_lanes(uint32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#endif
