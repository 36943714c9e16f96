/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx512_values.c - the value side of quad.h for AVX-512: anchors by histogram, residuals summed level by level. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#include "kernels/quad_avx512.h"

/* Values: byte 16 j + t. 64-bit lane u holds residuals 8 (u % 2) .. of coordinate u / 2. */
#define VALUE_GATHER4(i) ((i) / 16 * 8 + (i) / 8 % 2 * 4 + (i) % 4)
#define VALUE_GATHER2(i) ((i) / 16 * 4 + (i) / 8 % 2 * 2 + (i) % 2)
#define VALUE_GATHER1(i) ((i) / 16 * 2 + (i) / 8 % 2)
#define VALUE_PICK4(i) ((i) % 8 * 4)
#define VALUE_PICK2(i) ((i) % 8 * 2)
#define VALUE_PICK1(i) ((i) % 8)
static const uint8_t value_gather[3][64] = {BYTES64(VALUE_GATHER4), BYTES64(VALUE_GATHER2), BYTES64(VALUE_GATHER1)};
static const uint8_t value_pick[3][64] = {BYTES64(VALUE_PICK4), BYTES64(VALUE_PICK2), BYTES64(VALUE_PICK1)};
static const int8_t value_table[3][64] = {BYTES64(STEP4), BYTES64(STEP2), BYTES64(STEP1)};

/* A four of value coordinates in group `codes`, weights of the group: [4 rows][high, low][16]. */
#define VALUE_FOUR(w, codes, bytes)                                                                                            \
    do {                                                                                                                       \
        const __m512i steps = spread_codes(&s, w, codes, bytes);                                                               \
        const __m128i *u = (const __m128i *)(const void *)whole;                                                               \
        dot_bytes(&a0, _mm512_broadcast_i32x4(_mm_load_si128(u)), steps);                                                      \
        dot_bytes(&b0, _mm512_broadcast_i32x4(_mm_load_si128(u + 1)), steps);                                                  \
        dot_bytes(&a1, _mm512_broadcast_i32x4(_mm_load_si128(u + 2)), steps);                                                  \
        dot_bytes(&b1, _mm512_broadcast_i32x4(_mm_load_si128(u + 3)), steps);                                                  \
        dot_bytes(&a2, _mm512_broadcast_i32x4(_mm_load_si128(u + 4)), steps);                                                  \
        dot_bytes(&b2, _mm512_broadcast_i32x4(_mm_load_si128(u + 5)), steps);                                                  \
        dot_bytes(&a3, _mm512_broadcast_i32x4(_mm_load_si128(u + 6)), steps);                                                  \
        dot_bytes(&b3, _mm512_broadcast_i32x4(_mm_load_si128(u + 7)), steps);                                                  \
    } while (0)

INLINE void add_sums(float *out, __m512i high, __m512i low, float unit)
{
    const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(sum, _mm512_set1_ps(unit), _mm512_loadu_ps(out)));
}

/* One four of coordinates at `offset` of every group. */
INLINE void value_four(const code_spread *spread_in, int w, const uint8_t *groups, uint32_t full, uint32_t group_bytes, const uint8_t *rest,
                       uint32_t offset, uint32_t bytes, const uint8_t *whole, const float *unit, float *sums)
{
    const code_spread s = *spread_in;
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

/* Two fours in a group: the weights are loaded once for both. */
INLINE void two_fours(const code_spread *s, int w, const uint8_t *codes, uint32_t bytes, const uint8_t *whole, __m512i a[8], __m512i b[8])
{
    const __m512i steps0 = spread_codes(s, w, codes, bytes), steps1 = spread_codes(s, w, codes + bytes, bytes);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) { /* row k / 2, high and low */
        const __m512i u = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)whole + k));
        dot_bytes(&a[k], u, steps0);
        dot_bytes(&b[k], u, steps1);
    }
}

/* As value_four, two neighbouring fours of `bytes` each. */
INLINE void value_eight(const code_spread *spread_in, int w, const uint8_t *groups, uint32_t full, uint32_t group_bytes,
                        const uint8_t *rest, uint32_t offset, uint32_t bytes, const uint8_t *whole, const float *unit, float *sums)
{
    const code_spread s = *spread_in;
    __m512i a[8], b[8];
    const uint8_t *codes = groups + offset;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        a[k] = b[k] = _mm512_setzero_si512();
    for (uint32_t i = 0; i < full; i++, codes += group_bytes, whole += 128)
        two_fours(&s, w, codes, bytes, whole, a, b);
    if (rest != NULL)
        two_fours(&s, w, rest + offset, bytes, whole, a, b);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        add_sums(sums + 16 * r, a[2 * r], a[2 * r + 1], unit[r]);
        add_sums(sums + 64 + 16 * r, b[2 * r], b[2 * r + 1], unit[r]);
    }
}

/*
 * F fours of coordinates of one bit: a mask makes their steps, and weights8 is [groups][4 rows][16]. The last four may have fewer
 * coordinates, `some`; what the others sum is nobody's.
 */
INLINE void value_bits(int F, const uint8_t *groups, uint32_t full, uint32_t group_bytes, const uint8_t *rest, uint32_t offset, uint32_t some,
                       const uint8_t *weights8, const float *unit, float *sums)
{
    const __m512i minus = _mm512_set1_epi8(-1), plus = _mm512_set1_epi8(1);
    __m512i acc[4][4]; /* [four][row] */
    const uint32_t all = full + (rest != NULL);
    const uint8_t *codes = groups + offset;
#pragma GCC unroll 16
    for (int i = 0; i < 4 * F; i++)
        acc[i / 4][i % 4] = _mm512_setzero_si512();
    for (uint32_t i = 0; i < all; i++, codes += group_bytes, weights8 += 64) {
        const uint8_t *from = i < full ? codes : rest + offset;
        __m512i w[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
            w[r] = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)(weights8 + 16 * r)));
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
            uint64_t bits = 0;
            if (some == 4)
                memcpy(&bits, from + 8 * f, 8);
            else
                memcpy(&bits, from + 8 * f, 2 * (size_t)some);
            const __m512i steps = _mm512_mask_blend_epi8((__mmask64)bits, minus, plus);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                dot_bytes(&acc[f][r], w[r], steps);
        }
    }
#pragma GCC unroll 4
    for (int f = 0; f < F; f++)
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            float *out = sums + 64 * f + 16 * r;
            _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[f][r]), _mm512_set1_ps(257.0f * unit[r]), _mm512_loadu_ps(out)));
        }
}

void akv_avx512_code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    const code_spread s = spread_of(value_gather, value_pick, value_table);
    float *gathered = (float *)(void *)scratch; /* [1024][4], 16 KiB */
    uint8_t *whole = scratch + 16384;           /* [groups][4 rows][high, low][16], 8 KiB */
    uint8_t *weights8 = scratch;                /* [groups][4 rows][16]; group i's over weights that were read before */
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
    /*
     * Packing leaves, of tokens 0..7 (8..15), in lane l the four rows of token l (+ 8), then of token l + 4 (+ 8), 16 bits each; wanted
     * are [row][high, low][16 tokens], rows 0 and 1 in one vector, 2 and 3 in the other.
     */
#define TOKEN_AT(t) ((t) % 4 * 16 + (t) % 8 / 4 * 8)
#define PICK0(i) (uint8_t)(TOKEN_AT((i) % 16) + (i) / 32 * 2 + 1 - (i) / 16 % 2)
#define PICK2(i) (uint8_t)(PICK0(i) + 4)
#define PICK8(i) (uint8_t)(TOKEN_AT((i) % 16) + (i) / 16 * 2 + 1)
    _Alignas(64) static const uint8_t pick_bytes[3][64] = {BYTES64(PICK0), BYTES64(PICK2), BYTES64(PICK8)};
    const __m512i pick0 = _mm512_load_si512(pick_bytes[0]), pick2 = _mm512_load_si512(pick_bytes[1]),
                  pick8 = _mm512_load_si512(pick_bytes[2]);
    const __mmask64 second = 0xff00ff00ff00ff00u; /* tokens 8..15 */
    for (uint32_t i = 0; i < groups; i++) {
        const float *p = gathered + i * 64;
        const __m512i w0 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p), inverse));
        const __m512i w1 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 16), inverse));
        const __m512i w2 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 32), inverse));
        const __m512i w3 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(p + 48), inverse));
        const __m512i w01 = _mm512_packus_epi32(w0, w1), w23 = _mm512_packus_epi32(w2, w3);
        _mm512_store_si512(whole + i * 128,
                           _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(pick0, w01), second, pick0, w23));
        _mm512_store_si512(whole + i * 128 + 64,
                           _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(pick2, w01), second, pick2, w23));
        /* akv_quad_weight8: the high bytes of these */
        const __m512i e01 = _mm512_add_epi16(_mm512_sub_epi16(w01, _mm512_srli_epi16(w01, 8)), _mm512_set1_epi16(128));
        const __m512i e23 = _mm512_add_epi16(_mm512_sub_epi16(w23, _mm512_srli_epi16(w23, 8)), _mm512_set1_epi16(128));
        _mm512_store_si512(weights8 + i * 64, _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(pick8, e01), second, pick8, e23));
    }

    const uint8_t *codes = run + (n + 1) / 2, *rest = NULL;
    if (full < groups) {
        full_group(codes + (size_t)full * 2 * level->bits, n - full * 16, level, room);
        rest = room;
    }
    uint32_t offset = 0;
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
        const uint32_t count = level->by_width[w], bytes = w == 0 ? 8 : 4;
        for (uint32_t i = 0; i < count / 8; i++, offset += 8 * bytes, sums += 128)
            value_eight(&s, w, codes, full, 2 * level->bits, rest, offset, 4 * bytes, whole, unit, sums);
        if (count % 8 >= 4) {
            value_four(&s, w, codes, full, 2 * level->bits, rest, offset, 4 * bytes, whole, unit, sums);
            offset += 4 * bytes;
            sums += 64;
        }
        if (count % 4 != 0) {
            value_four(&s, w, codes, full, 2 * level->bits, rest, offset, count % 4 * bytes, whole, unit, sums);
            offset += count % 4 * bytes;
            sums += 64;
        }
    }
    uint32_t bits = level->by_width[2];
    for (; bits >= 16; bits -= 16, offset += 32, sums += 256)
        value_bits(4, codes, full, 2 * level->bits, rest, offset, 4, weights8, unit, sums);
    for (; bits >= 4; bits -= 4, offset += 8, sums += 64)
        value_bits(1, codes, full, 2 * level->bits, rest, offset, 4, weights8, unit, sums);
    if (bits != 0)
        value_bits(1, codes, full, 2 * level->bits, rest, offset, bits, weights8, unit, sums);
}

void akv_avx512_place_sums(const float *sums, const akv_level_list *list, float *z)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    const uint16_t *coord = list->coord;
    for (uint32_t w = 0; w < 3; w++) {
        const __m512 unit = _mm512_set1_ps(unit_of[w]);
        for (uint32_t i = 0; i < list->by_width[w]; i += 4, sums += 64) {
            const uint32_t live = list->by_width[w] - i < 4 ? list->by_width[w] - i : 4;
            __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16), c = _mm512_loadu_ps(sums + 32), d = _mm512_loadu_ps(sums + 48);
            _Alignas(64) float four[4][4];
            TRANSPOSE(a, b, c, d); /* part 0..3: [4 coordinates][4 rows] */
            _mm512_store_ps(four[0], _mm512_mul_ps(unit, _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d))));
            for (uint32_t k = 0; k < live; k++) {
                float *at = z + (size_t)coord[k] * 4;
                _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), _mm_load_ps(four[k])));
            }
            coord += live;
        }
    }
}

void akv_avx512_histogram(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist)
{
    for (; n >= 16; n -= 16, anchor += 16, weight += 16, weights += 64)
#pragma GCC unroll 16
        for (uint32_t t = 0; t < 16; t++) { /* slots are known when this is compiled */
            float *at = hist + (size_t)anchor[t] * 4;
            _mm_storeu_ps(at, _mm_fmadd_ps(_mm_set1_ps(weight[t]), _mm_loadu_ps(weights + akv_quad_slot(t) * 4), _mm_loadu_ps(at)));
        }
    for (uint32_t t = 0; t < n; t++) {
        float *at = hist + (size_t)anchor[t] * 4;
        _mm_storeu_ps(at, _mm_fmadd_ps(_mm_set1_ps(weight[t]), _mm_loadu_ps(weights + akv_quad_slot(t) * 4), _mm_loadu_ps(at)));
    }
}

void akv_avx512_bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
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

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx512_values; /* a translation unit must not be empty */
#endif
