/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512_slow.c - akv_quad_slow for AVX-512 but for its loops over tokens: queries, and polynomials of planes that hardly turn. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad_avx512.h"

/* 16 bf16 as floats. */
INLINE __m512 bf16_16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p)), 16));
}

/*
 * A sum of anchor_logits runs over every eighth pair of coordinates of a turned anchor whose planes are at most 23171 long (128 * 128 * sqrt 2),
 * so the planes' lengths in steps may add up to (2^31 - 1) / 23171 = 92681; rounding takes a step a plane at most.
 */
static void slow_rows(const float *query, float magnitude, const uint16_t *units, const uint16_t *mean, const float *middle, float *rows,
                      float *scale)
{
    enum { P = 2 * AKV_QUAD_SLOW_PLANES, PP = AKV_QUAD_SLOW_PLANES };
    __m512 unit[4], m0[4], m1[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        unit[v] = bf16_16(units + 16 * v);
        m0[v] = bf16_16(mean + 16 * v);
        m1[v] = bf16_16(mean + P + 16 * v);
    }
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        __m512 x0[4], x1[4], length[4];
#pragma GCC unroll 4
        for (uint32_t v = 0; v < 4; v++) {
            x0[v] = _mm512_mul_ps(_mm512_loadu_ps(query + r * 128 + 16 * v), _mm512_set1_ps(magnitude));
            x1[v] = _mm512_mul_ps(_mm512_loadu_ps(query + r * 128 + P + 16 * v), _mm512_set1_ps(magnitude));
            float *out = rows + v / 2 * 16 * PP + (4 + r) * PP + v % 2 * 16;
            const __m512 e = _mm512_fmadd_ps(x0[v], m0[v], _mm512_mul_ps(x1[v], m1[v]));
            const __m512 o = _mm512_fmsub_ps(x1[v], m0[v], _mm512_mul_ps(x0[v], m1[v]));
            if (v < 2) {
                const __m512 c = _mm512_loadu_ps(middle + 16 * v), s = _mm512_loadu_ps(middle + P + 16 * v);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(e, c, _mm512_mul_ps(o, s)));
                _mm512_storeu_ps(out + 8 * PP, _mm512_fmsub_ps(o, c, _mm512_mul_ps(e, s)));
            } else {
                _mm512_storeu_ps(out, e);
                _mm512_storeu_ps(out + 8 * PP, o);
            }
            x0[v] = _mm512_mul_ps(x0[v], unit[v]);
            x1[v] = _mm512_mul_ps(x1[v], unit[v]);
            length[v] = _mm512_sqrt_ps(_mm512_fmadd_ps(x0[v], x0[v], _mm512_mul_ps(x1[v], x1[v])));
        }
        const __m512 lower = _mm512_add_ps(length[0], length[1]), upper = _mm512_add_ps(length[2], length[3]);
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lower), _mm512_extractf32x8_ps(lower, 1)); /* by plane % 8 */
        const __m256 pairs = _mm256_add_ps(eight, _mm256_permute_ps(eight, 0xb1));
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(length[0], length[1])) / 32700.0f;
        const float fit = _mm512_reduce_max_ps(_mm512_castps256_ps512(pairs)) / (92600.0f - 40.0f);
        /* the upper planes are not counted in steps; but where the lower ones are nothing beside them, so need not be the steps */
        const float beside = _mm512_reduce_max_ps(_mm512_max_ps(length[2], length[3])) * 1e-6f;
        const float all = _mm512_reduce_add_ps(_mm512_add_ps(lower, upper));
        float step = largest > fit ? largest : fit;
        step = step > beside ? step : beside;
        const bool finite = all < INFINITY; /* neither infinite nor NaN */
        const bool live = finite && step > 1e-30f;
        const __m512 inverse = _mm512_set1_ps(live ? 1.0f / step : 0.0f);
        scale[r] = !finite ? NAN : live ? step / 128.0f : 0.0f;
#pragma GCC unroll 4
        for (uint32_t v = 0; v < 4; v++) { /* masked: a product of 0 and infinity is no number */
            float *out = rows + v / 2 * 16 * PP + r * PP + v % 2 * 16;
            const __mmask16 mask = live ? 0xffffu : 0;
            _mm512_storeu_ps(out, _mm512_maskz_mul_ps(mask, x0[v], inverse));
            _mm512_storeu_ps(out + 8 * PP, _mm512_maskz_mul_ps(mask, x1[v], inverse));
        }
    }
}

/* Coordinates of A anchors (upper halves of both halves) as words, [A][64]. */
INLINE void slow_words(const int8_t *anchors, int A, int16_t *words)
{
#pragma GCC unroll 8
    for (int a = 0; a < A; a++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            _mm512_store_si512(words + 64 * a + 32 * half, _mm512_cvtepi8_epi16(_mm256_loadu_si256(
                                                               (const __m256i *)(const void *)(anchors + 128 * a + 64 * half + 32))));
}

/* The terms of A anchors: query [32 pairs of coordinates][2][16 = row, power][2]. */
INLINE void slow_anchors(const int8_t *anchors, int A, const int16_t *query, __m512 unit0, __m512 unit1, float *terms)
{
    _Alignas(64) int16_t words[8 * 64];
    __m512i acc[8][2];
    slow_words(anchors, A, words);
    __asm__("" : : "r"(words) : "memory");
#pragma GCC unroll 8
    for (int a = 0; a < A; a++)
        acc[a][0] = acc[a][1] = _mm512_setzero_si512();
    for (uint32_t i = 0; i < 32; i++) {
        const __m512i q0 = _mm512_load_si512(query + 64 * i), q1 = _mm512_load_si512(query + 64 * i + 32);
#pragma GCC unroll 8
        for (int a = 0; a < A; a++) {
            int32_t pair;
            memcpy(&pair, words + 64 * a + 2 * i, sizeof pair);
            const __m512i w = _mm512_set1_epi32(pair);
            dot_words(&acc[a][0], w, q0);
            dot_words(&acc[a][1], w, q1);
        }
    }
#pragma GCC unroll 8
    for (int a = 0; a < A; a++) {
        _mm512_storeu_ps(terms + 32 * a, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[a][0]), unit0));
        _mm512_storeu_ps(terms + 32 * a + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[a][1]), unit1));
    }
}

/* What the mean adds: [power][row]. */
INLINE void slow_mean(const float *upper, const float *phase, const float *series, float *mean_terms)
{
    enum { PP = AKV_QUAD_SLOW_PLANES };
    _Alignas(64) float turned[2][PP * 4]; /* [slot of plane][4 rows] */
    __m128 sum[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        sum[k] = _mm_setzero_ps();
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; i++) {
        const __m512 c = _mm512_loadu_ps(phase + 16 * i), s = _mm512_loadu_ps(phase + PP + 16 * i);
        __m512 y0[4], y1[4];
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            const __m512 x0 = _mm512_loadu_ps(upper + (4 + r) * PP + 16 * i), x1 = _mm512_loadu_ps(upper + (12 + r) * PP + 16 * i);
            y0[r] = _mm512_fmadd_ps(x0, c, _mm512_mul_ps(x1, s));
            y1[r] = _mm512_fmsub_ps(x1, c, _mm512_mul_ps(x0, s));
        }
        store_tokens(turned[0] + 64 * i, y0[0], y0[1], y0[2], y0[3]);
        store_tokens(turned[1] + 64 * i, y1[0], y1[1], y1[2], y1[3]);
    }
    for (uint32_t j = 0; j < PP; j++) {
        const __m128 y0 = _mm_load_ps(turned[0] + akv_quad_slot(j) * 4), y1 = _mm_load_ps(turned[1] + akv_quad_slot(j) * 4);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            sum[k] = _mm_fmadd_ps(k % 2 == 0 ? y0 : y1, _mm_set1_ps(series[j * 8 + (uint32_t)k]), sum[k]);
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        _mm_storeu_ps(mean_terms + 4 * k, sum[k]);
}

static void slow_terms(const float *upper, const float *phase, const float *series, const float *largest, const int8_t *anchors, uint32_t n,
                       float *terms, float *mean_terms)
{
    enum { PP = AKV_QUAD_SLOW_PLANES };
    _Alignas(64) float turned[2][32 * 4]; /* first, second coordinates of the window's middle, [slot of plane][4 rows] */
    _Alignas(64) int16_t query[32 * 64];
    __m512 top = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; i++) {
        const __m512 c = _mm512_loadu_ps(phase + 16 * i), s = _mm512_loadu_ps(phase + 32 + 16 * i);
        __m512 y0[4], y1[4];
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            const __m512 x0 = _mm512_loadu_ps(upper + r * PP + 16 * i), x1 = _mm512_loadu_ps(upper + (8 + r) * PP + 16 * i);
            y0[r] = _mm512_fmadd_ps(x0, c, _mm512_mul_ps(x1, s));
            y1[r] = _mm512_fmsub_ps(x1, c, _mm512_mul_ps(x0, s));
        }
        store_tokens(turned[0] + 64 * i, y0[0], y0[1], y0[2], y0[3]);
        store_tokens(turned[1] + 64 * i, y1[0], y1[1], y1[2], y1[3]);
        for (uint32_t v = 0; v < 64; v += 16)
            top = _mm512_max_ps(top, _mm512_max_ps(_mm512_abs_ps(_mm512_load_ps(turned[0] + 64 * i + v)),
                                                   _mm512_abs_ps(_mm512_load_ps(turned[1] + 64 * i + v))));
    }
    /* lanes [row][power]: even powers take cosines, odd ones sines, which go with the coordinates crosswise */
    const __m512i row_of = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i first_of = _mm512_setr_epi32(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7);
    const __m512i second_of = _mm512_setr_epi32(4, 0, 4, 0, 5, 1, 5, 1, 6, 2, 6, 2, 7, 3, 7, 3);
    const __m512i odd_sign = _mm512_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0,
                                               INT32_MIN, 0, INT32_MIN);
    const __m512 row_top = _mm512_permutexvar_ps(row_of, _mm512_castps128_ps512(fold_max(top)));
    __m512 step[2], inverse[2];
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; h++) {
        step[h] = _mm512_mul_ps(_mm512_mul_ps(row_top, _mm512_broadcast_f32x4(_mm_loadu_ps(largest + 4 * h))), _mm512_set1_ps(1.0f / 32700.0f));
        inverse[h] = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(step[h], _mm512_set1_ps(1e-30f), _CMP_GT_OQ), _mm512_set1_ps(1.0f), step[h]);
        step[h] = _mm512_mul_ps(step[h], _mm512_set1_ps(128.0f));
    }
    for (uint32_t j = 0; j < 32; j += 2) {
        __m512i words[2][2][2]; /* [plane][coordinate][powers] */
#pragma GCC unroll 2
        for (uint32_t k = 0; k < 2; k++) {
            const uint32_t slot = akv_quad_slot(j + k) * 4;
            const __m512 both = _mm512_castps256_ps512(_mm256_set_m128(_mm_load_ps(turned[1] + slot), _mm_load_ps(turned[0] + slot)));
            const __m512 x0 = _mm512_permutexvar_ps(first_of, both);
            const __m512 x1 = _mm512_xor_ps(_mm512_permutexvar_ps(second_of, both), _mm512_castsi512_ps(odd_sign));
#pragma GCC unroll 2
            for (uint32_t h = 0; h < 2; h++) {
                const __m512 c = _mm512_mul_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(series + (j + k) * 8 + 4 * h)), inverse[h]);
                words[k][0][h] = _mm512_cvtps_epi32(_mm512_mul_ps(x0, c));
                words[k][1][h] = _mm512_cvtps_epi32(_mm512_mul_ps(x1, c));
            }
        }
#pragma GCC unroll 2
        for (uint32_t coordinate = 0; coordinate < 2; coordinate++)
#pragma GCC unroll 2
            for (uint32_t h = 0; h < 2; h++)
                _mm512_store_si512(query + (16 * coordinate + j / 2) * 64 + 32 * h,
                                   _mm512_mask_blend_epi16(0xaaaaaaaau, words[0][coordinate][h],
                                                           _mm512_slli_epi32(words[1][coordinate][h], 16)));
    }
    slow_mean(upper, phase, series, mean_terms);
    uint32_t a = 0;
    for (; a + 8 <= n; a += 8)
        slow_anchors(anchors + 128 * (size_t)a, 8, query, step[0], step[1], terms + 32 * (size_t)a);
    for (; a < n; a++)
        slow_anchors(anchors + 128 * (size_t)a, 1, query, step[0], step[1], terms + 32 * (size_t)a);
}

const akv_quad_slow akv_avx512_slow = {slow_rows, slow_terms, akv_avx512_slow_mean_logits, akv_avx512_slow_anchor_logits};

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512_slow; /* a translation unit must not be empty */
#endif
