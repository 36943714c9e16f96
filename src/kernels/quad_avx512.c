/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512.c - quad.h for AVX-512 with VBMI, VBMI2 and VNNI (Ice Lake and Zen 4 onwards). */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad_avx512.h"

/*
 * Level by level, 64 tokens at a time. Whole vectors are stored: what is too much lies where the next level goes (slots has room for
 * 32 more), so levels are neither counted first nor their stores masked.
 */
static void sort_levels(const uint8_t *levels, uint64_t plane_bytes, uint32_t planes, uint32_t n, uint32_t num_levels,
                        uint16_t *slots, uint32_t *first)
{
    _Alignas(64) uint64_t plane[4][AKV_BLOCK_TOKENS / 64], live[AKV_BLOCK_TOKENS / 64], of_level[AKV_BLOCK_TOKENS / 64];
    const __m512i slot = _mm512_set_epi16(31, 27, 23, 19, 30, 26, 22, 18, 29, 25, 21, 17, 28, 24, 20, 16, 15, 11, 7, 3, 14, 10, 6, 2,
                                          13, 9, 5, 1, 12, 8, 4, 0);
    const uint32_t words = (n + 63) / 64;
    uint32_t at = 0;
    for (uint32_t t = 0; t < words; t++)
        live[t] = low_bits(n - t * 64 < 64 ? n - t * 64 : 64);
    for (uint32_t p = 0; p < planes; p++) {
        if (n < AKV_BLOCK_TOKENS)
            memset(plane[p], 0, sizeof plane[p]);
        memcpy(plane[p], levels + p * plane_bytes, (n + 7) / 8);
    }
    first[0] = 0;
    for (uint32_t l = 1; l <= num_levels; l++) {
        first[l] = at;
        for (uint32_t t = 0; t < words; t += 8) {
            __m512i bits = _mm512_load_si512(live + t);
            for (uint32_t p = 0; p < planes; p++) {
                const __m512i word = _mm512_load_si512(plane[p] + t);
                bits = l >> p & 1 ? _mm512_and_si512(bits, word) : _mm512_andnot_si512(word, bits);
            }
            _mm512_store_si512(of_level + t, bits);
        }
        for (uint32_t t = 0; t < words; t++) {
            const uint64_t bits = of_level[t];
            const __m512i slot0 = _mm512_add_epi16(slot, _mm512_set1_epi16((int16_t)(t * 64)));
            const __m512i slot1 = _mm512_add_epi16(slot0, _mm512_set1_epi16(32));
            _mm512_storeu_si512(slots + at, _mm512_maskz_compress_epi16((__mmask32)bits, slot0));
            at += (uint32_t)__builtin_popcount((uint32_t)bits);
            _mm512_storeu_si512(slots + at, _mm512_maskz_compress_epi16((__mmask32)(bits >> 32), slot1));
            at += (uint32_t)__builtin_popcount((uint32_t)(bits >> 32));
        }
    }
    first[num_levels + 1] = at;
}

/* Entry e of a row of 2 bits an entry: 32 coordinates at a time. Whole vectors are stored; out->coord has room for as many more. */
static void list_level(const uint8_t *row, uint32_t coords, akv_level_list *out)
{
    const __m512i iota = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7,
                                          6, 5, 4, 3, 2, 1, 0);
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
            const uint32_t low = (uint32_t)_pext_u64(word, 0x5555555555555555u), high = (uint32_t)_pext_u64(word, 0xaaaaaaaaaaaaaaaau);
            const __mmask32 mine = (__mmask32)((w == 0 ? high & low : w == 1 ? high & ~low : low & ~high) & low_bits(left));
            _mm512_storeu_si512(out->coord + at, _mm512_maskz_compress_epi16(mine, _mm512_add_epi16(iota, _mm512_set1_epi16((int16_t)c))));
            at += (uint32_t)__builtin_popcount(mine);
        }
        out->by_width[w] = at - before;
        out->bits += (at - before) * (4u >> w);
    }
    out->count = at;
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

/* R rows (1 or 4) of bytes_dot. */
#define BYTES_DOT(R)                                                                                                           \
    do {                                                                                                                       \
        __m512 s[R][4];                                                                                                        \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            s[k][0] = s[k][1] = s[k][2] = s[k][3] = _mm512_setzero_ps();                                                       \
        for (uint32_t i = 0; i < dim; i += 16) {                                                                               \
            const __mmask16 mask = (__mmask16)low_bits(dim - i < 16 ? dim - i : 16);                                           \
            const __m512 x0 = _mm512_maskz_loadu_ps(mask, x + i), x1 = _mm512_maskz_loadu_ps(mask, x + dim + i),               \
                         x2 = _mm512_maskz_loadu_ps(mask, x + 2 * (size_t)dim + i),                                            \
                         x3 = _mm512_maskz_loadu_ps(mask, x + 3 * (size_t)dim + i);                                            \
            for (uint32_t k = 0; k < R; k++) {                                                                                 \
                const __m512 b = bytes_f32(rows + (size_t)(a + k) * dim + i, mask);                                            \
                s[k][0] = _mm512_fmadd_ps(b, x0, s[k][0]);                                                                     \
                s[k][1] = _mm512_fmadd_ps(b, x1, s[k][1]);                                                                     \
                s[k][2] = _mm512_fmadd_ps(b, x2, s[k][2]);                                                                     \
                s[k][3] = _mm512_fmadd_ps(b, x3, s[k][3]);                                                                     \
            }                                                                                                                  \
        }                                                                                                                      \
        for (uint32_t k = 0; k < R; k++)                                                                                       \
            _mm_storeu_ps(out + (a + k) * 4, sum4(s[k][0], s[k][1], s[k][2], s[k][3]));                                        \
    } while (0)

static void bytes_dot(const float *x, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    uint32_t a = 0;
    for (; a + 4 <= n; a += 4)
        BYTES_DOT(4);
    for (; a < n; a++)
        BYTES_DOT(1);
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
    "avx512",
    akv_avx512_unpack_anchors,
    akv_avx512_turn_rows,
    akv_avx512_mean_logits,
    akv_avx512_anchor_logits,
    sort_levels,
    list_level,
    akv_avx512_quantise_level,
    akv_avx512_code_dots,
    akv_avx512_code_sums,
    akv_avx512_place_sums,
    row_max,
    exp_sum,
    akv_avx512_histogram,
    akv_avx512_bytes_sum,
    bytes_dot,
    tile_dots,
    tile_sums,
    &akv_avx512_slow,
};

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512; /* a translation unit must not be empty */
#endif
