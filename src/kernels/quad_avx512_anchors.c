/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512_anchors.c - key anchors of quad.h for AVX-512: turned token by token, then summed against four rows at once. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad_avx512.h"

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

/* The sums of four tokens, each 4 rows x 4 parts, -> [4 rows][4 tokens]. */
INLINE __m512 gather_parts(const __m512 *sum)
{
    const __m512 a = sum[0], b = sum[1], c = sum[2], d = sum[3];
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
                        const float *scale, uint32_t n, float *logits, const char *ahead, uint32_t lines)
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
            akv_quad_fetch(ahead, 64 * lines);
            ahead += 64 * lines;
            __m512 acc[4];
            _Alignas(16) float w[4];
#pragma GCC unroll 4
            for (uint32_t l = 0; l < 4; l++) {
                const uint32_t t = t0 + i + 4 * l;
                w[l] = weight[t];
                acc[l] = _mm512_cvtepi32_ps(anchor_token(anchors + (size_t)anchor[t] * shape->dim, shape, parts, rest_parts, half,
                                                         turn16 + (size_t)t * turn_step, query16, spread, x[l & 1]));
            }
            float *out = logits + (t0 + 4 * i) * 4;
            const __m512 sums = _mm512_permutexvar_ps(turn_over, gather_parts(acc));
            const __m512 each = _mm512_permutexvar_ps(each4, _mm512_castps128_ps512(_mm_load_ps(w)));
            _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_mul_ps(row_scale, each), sums, _mm512_loadu_ps(out)));
        }
}

/* 32 * parts planes of an anchor turned into x; its second coordinates are `second` bytes after the first ones. */
INLINE void turn_half_split(const int8_t *a, uint32_t second, const int16_t *turn, int parts, __m512i spread, int16_t *x)
{
#pragma GCC unroll 2
    for (int p = 0; p < parts; p++) {
        const __m512i x0 = high_bytes(a + 32 * p, 32, spread), x1 = high_bytes(a + second + 32 * p, 32, spread);
        const __m512i c = _mm512_loadu_si512(turn + 64 * p), s = _mm512_loadu_si512(turn + 64 * p + 32);
        _mm512_store_si512(x + 64 * p, _mm512_sub_epi16(_mm512_mulhrs_epi16(x0, c), _mm512_mulhrs_epi16(x1, s)));
        _mm512_store_si512(x + 64 * p + 32, _mm512_add_epi16(_mm512_mulhrs_epi16(x0, s), _mm512_mulhrs_epi16(x1, c)));
    }
}

/* Polynomials of the planes that are not turned (slow_terms), or terms NULL. */
typedef struct slow_planes {
    const float *terms;
    float first, step;
} slow_planes;

/* 1, u, u^2, u^3 of 16 tokens from t0 on, [slot][4], and u^4. */
INLINE void token_powers(const slow_planes *slow, uint32_t t0, float *powers, float *fourth)
{
    const __m512 lane = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 u = _mm512_fmadd_ps(_mm512_add_ps(lane, _mm512_set1_ps((float)t0)), _mm512_set1_ps(slow->step),
                                     _mm512_set1_ps(slow->first));
    const __m512 uu = _mm512_mul_ps(u, u);
    store_tokens(powers, _mm512_set1_ps(1.0f), u, uu, _mm512_mul_ps(uu, u));
    _mm512_store_ps(fourth, _mm512_mul_ps(uu, uu));
}

/*
 * The same for half-split planes and nothing else (d = 64, 128), 32 * parts of `planes`: the turned queries stay in 8 or 16 registers;
 * 16 anchors are turned, then summed eight at a time.
 */
INLINE void anchor_tile_half_split(int parts, uint32_t planes, const int8_t *anchors, const int16_t *turn16, const int16_t *query16,
                                   const uint32_t *anchor, const float *weight, const float *scale, uint32_t n,
                                   const slow_planes *slow, float *logits, const char *ahead, uint32_t lines)
{
    const __m512i turn_over = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i each4 = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i spread = spread_low_half();
    const __m512 row_scale = _mm512_broadcast_f32x4(_mm_loadu_ps(scale));
    const size_t width = 2 * (size_t)planes;
    _Alignas(64) int16_t x[16][128]; /* 64 * parts of each */
    _Alignas(64) float powers[64], fourth[16];
    __m512i q[16];
#pragma GCC unroll 16
    for (int e = 0; e < 8 * parts; e++)
        q[e] = _mm512_loadu_si512(query16 + 32 * e);
    for (uint32_t t0 = 0; t0 < n; t0 += 16, ahead += 64 * lines) {
        akv_quad_fetch(ahead, 64 * lines);
        ahead += 64 * lines;
        for (uint32_t l = 0; l < 16; l++) {
            if (l == 8) {
                akv_quad_fetch(ahead, 64 * lines);
                ahead += 64 * lines;
            }
            turn_half_split(anchors + anchor[t0 + l] * width, planes, turn16 + (t0 + l) * width, parts, spread, x[l]);
        }
        if (slow != NULL)
            token_powers(slow, t0, powers, fourth);
        __asm__("" : : "r"(x) : "memory"); /* or the compiler takes the lanes out of registers, two shuffles each */
        const __m512 weights = _mm512_loadu_ps(weight + t0);
        for (uint32_t f = 0; f < 4; f += 2) { /* tokens f, f + 4, f + 8, f + 12 are neighbours in slot order; then f + 1 and so on */
            akv_quad_fetch(ahead, 64 * lines);
            ahead += f == 0 ? 64 * lines : 0;
            __m512i acc[8];
            __m512 sum[8];
#pragma GCC unroll 8
            for (int l = 0; l < 8; l++)
                acc[l] = _mm512_setzero_si512();
#pragma GCC unroll 16
            for (uint32_t e = 0; e < 8 * (uint32_t)parts; e++)
#pragma GCC unroll 8
                for (uint32_t l = 0; l < 8; l++)
                    dot_words(&acc[l], _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)(x[f + l / 4 + l % 4 * 4] + 8 * e))),
                              q[e]);
#pragma GCC unroll 8
            for (uint32_t l = 0; l < 8; l++) {
                sum[l] = _mm512_cvtepi32_ps(acc[l]);
                if (slow == NULL)
                    continue;
                const uint32_t t = f + l / 4 + l % 4 * 4;
                const float *c = slow->terms + anchor[t0 + t] * (size_t)32;
                const __m512 both = _mm512_fmadd_ps(_mm512_loadu_ps(c + 16), _mm512_set1_ps(fourth[t]), _mm512_loadu_ps(c));
                sum[l] = _mm512_fmadd_ps(both, _mm512_broadcast_f32x4(_mm_load_ps(powers + akv_quad_slot(t) * 4)), sum[l]);
            }
#pragma GCC unroll 2
            for (uint32_t g = 0; g < 2; g++) {
                float *out = logits + t0 * 4 + (f + g) * 16;
                const __m512 sums = _mm512_permutexvar_ps(turn_over, gather_parts(sum + 4 * g));
                const __m512 mine = _mm512_permutexvar_ps(_mm512_add_epi32(each4, _mm512_set1_epi32((int)(f + g))), weights);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_mul_ps(row_scale, mine), sums, _mm512_loadu_ps(out)));
            }
        }
    }
}

/* Lines of what is ahead for each fourth of 16 tokens, rounded up: some behind the end do no harm. */
INLINE uint32_t lines_ahead(uint32_t n, uint32_t bytes)
{
    const uint32_t fours = 4 * ((n + 15) / 16);
    return n == 0 ? 0 : ((bytes + 63) / 64 + fours - 1) / fours;
}

void akv_avx512_anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes)
{
    const uint32_t parts = shape->padded_planes / 32, rest_parts = shape->padded_rest / 32;
    const uint32_t lines = lines_ahead(n, ahead_bytes);
    /* the shapes of most models with known trip counts */
    if (shape->style == AKV_ROPE_HALF_SPLIT && shape->rest == 0 && shape->planes == 64) {
        anchor_tile_half_split(2, 64, anchors, turn16, query16, anchor, weight, scale, n, NULL, logits, ahead, lines);
    } else if (shape->style == AKV_ROPE_HALF_SPLIT && shape->rest == 0 && shape->planes == 32) {
        anchor_tile_half_split(1, 32, anchors, turn16, query16, anchor, weight, scale, n, NULL, logits, ahead, lines);
    } else {
        anchor_tile(anchors, shape, parts, rest_parts, shape->style == AKV_ROPE_HALF_SPLIT, turn16, query16, anchor, weight, scale, n,
                    logits, ahead, lines);
    }
}

void akv_avx512_slow_anchor_logits(const int8_t *anchors, const int16_t *turn16, const int16_t *query16, const uint32_t *anchor,
                                   const float *weight, const float *scale, uint32_t n, const float *terms, float first, float step,
                                   float *logits, const void *ahead, uint32_t ahead_bytes)
{
    const slow_planes slow = {terms, first, step};
    anchor_tile_half_split(1, 64, anchors, turn16, query16, anchor, weight, scale, n, &slow, logits, ahead, lines_ahead(n, ahead_bytes));
}

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512_anchors; /* a translation unit must not be empty */
#endif
