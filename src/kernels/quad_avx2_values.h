/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_avx2_values.h - value residuals of quad.h for 256-bit registers (quad_avx2.h). A half of a register is a
 * coordinate.
 */

#ifdef AKV_QUAD_VNNI
/*
 * Steps of two coordinates, from 16 or 8 bytes of codes. Bytes: of residuals 2 k by place, then of 2 k + 1. one: only
 * the first coordinate is there.
 */
INLINE __m256i value_steps(const uint8_t *codes, int w, bool one)
{
    if (w == 0) {
        const __m256i spread = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11,
                                                13, 15, 8, 10, 12, 14, 9, 11, 13, 15);
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104));
        const __m256i c =
            one ? _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)(const void *)codes)) : both128(codes);
        const __m256i x = _mm256_srlv_epi64(_mm256_shuffle_epi8(c, spread), _mm256_setr_epi64x(0, 4, 0, 4));
        return _mm256_shuffle_epi8(table, _mm256_and_si256(x, _mm256_set1_epi8(15)));
    }
    const __m256i spread = _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4,
                                            5, 6, 7, 4, 5, 6, 7);
    int64_t c = 0;
    memcpy(&c, codes, one ? 4 : 8);
    const __m256i x = _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(c), spread),
                                        _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
    return _mm256_shuffle_epi8(_mm256_set1_epi32(0x0a03fdf6),
                               _mm256_and_si256(x, _mm256_set1_epi8(3))); /* 10, 3, -3, -10 */
}
#else
/*
 * Half-bytes of two coordinates, from 16 or 8 bytes of codes, as words, by place; of two bits both residuals' numbers
 * are in each.
 */
INLINE __m256i value_words(const uint8_t *codes, int w, bool one)
{
    if (w == 0) {
        const __m256i spread = _mm256_setr_epi8(0, -1, 2, -1, 4, -1, 6, -1, 1, -1, 3, -1, 5, -1, 7, -1, 8, -1, 10, -1,
                                                12, -1, 14, -1, 9, -1, 11, -1, 13, -1, 15, -1);
        const __m256i c =
            one ? _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)(const void *)codes)) : both128(codes);
        return _mm256_shuffle_epi8(c, spread);
    }
    const __m256i spread = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1,
                                            7, -1, 4, -1, 5, -1, 6, -1, 7, -1);
    int64_t c = 0;
    memcpy(&c, codes, one ? 4 : 8);
    const __m256i x =
        _mm256_srlv_epi64(_mm256_shuffle_epi8(_mm256_set1_epi64x(c), spread), _mm256_setr_epi64x(0, 4, 0, 4));
    return _mm256_and_si256(x, _mm256_set1_epi16(15));
}
#endif

/* Two coordinates of one bit, from four bytes of codes: 1 or -1. Bytes: residuals 2 k by place, then 2 k + 1. */
INLINE __m256i value_bits(const uint8_t *codes, bool one)
{
    const __m256i spread = _mm256_setr_epi8(0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2,
                                            2, 3, 3, 2, 2, 3, 3);
    const __m256i bit =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 16, 1, 16, 4, 64, 4, 64, 2, 32, 2, 32, 8, -128, 8, -128));
    int32_t c = 0;
    memcpy(&c, codes, one ? 2 : 4);
    const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(c), spread), bit);
    return _mm256_or_si256(_mm256_cmpeq_epi8(mine, _mm256_setzero_si256()), _mm256_set1_epi8(1));
}

/* Where a run's codes are: group i of `all`, the last one perhaps rebuilt. */
typedef struct value_groups {
    const uint8_t *codes, *rest;
    uint32_t full, all, bytes;
} value_groups;

INLINE const uint8_t *group_at(const value_groups *g, uint32_t i)
{
    return i < g->full ? g->codes + (size_t)i * g->bytes : g->rest;
}

/*
 * A run's weights per group and row, those of residuals 2 k by place, then of 2 k + 1. halves: high and low bytes, for
 * AVX-VNNI. words: less 32768, otherwise; sums of the weights in four parts, by place modulo 4. bytes: akv_quad_weight8
 * of them.
 */
typedef struct value_weights {
    uint8_t (*halves)[2][4][16];
    int16_t (*words)[4][16];
    uint8_t (*bytes)[4][16];
    __m128i sums[4];
    float unit[4];
} value_weights;

/* The words of a row as bytes, words being 0..255: row a in the low half, row b in the high one. */
INLINE __m256i row_bytes(__m256i a, __m256i b)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
}

/*
 * Weights times gains of the run's tokens -> products [token][4] with zeros up to a full group; the largest of each
 * row.
 */
INLINE __m128 weight_products(const uint8_t *run, uint32_t n, const uint16_t *slots, const float *weights,
                              float *products)
{
    __m128 top = _mm_setzero_ps();
    for (uint32_t i = 0; i < n; i += 16, products += 64) {
        const uint32_t live = n - i < 16 ? n - i : 16;
        __m256 gain[2];
        _Alignas(32) float by_place[2][8];
        gains16(run + i / 2, live == 16 ? 8 : (live + 1) / 2, gain);
        _mm256_store_ps(by_place[0], gain[0]);
        _mm256_store_ps(by_place[1], gain[1]);
        if (live < 16)
            memset(products, 0, 64 * sizeof *products);
#pragma GCC unroll 16
        for (uint32_t t = 0; t < 16; t++)
            if (t < live) {
                const __m128 w = _mm_mul_ps(_mm_loadu_ps(weights + (size_t)slots[i + t] * 4),
                                            _mm_set1_ps(by_place[t % 2][t / 2 % 2 * 4 + t / 4]));
                _mm_storeu_ps(products + t * 4, w);
                top = _mm_max_ps(w, top);
            }
    }
    return top;
}

INLINE void round_weights(const float *products, uint32_t groups, __m128 inverse4, bool bytes_too, value_weights *out)
{
    const __m256 inverse = _mm256_set_m128(inverse4, inverse4);
    __m256i sums[4];
    for (int r = 0; r < 4; r++)
        sums[r] = _mm256_set1_epi32((int)(groups * 2 * 32768)); /* two words each */
    for (uint32_t g = 0; g < groups; g++, products += 64) {
        /* low halves are residuals 2 k, high ones 2 k + 1 */
        __m256i v[8], row[4];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            v[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(products + 8 * k), inverse));
        const __m256i p04 = _mm256_packus_epi32(v[0], v[4]), p26 = _mm256_packus_epi32(v[2], v[6]);
        const __m256i p15 = _mm256_packus_epi32(v[1], v[5]), p37 = _mm256_packus_epi32(v[3], v[7]);
        const __m256i r02 = _mm256_unpacklo_epi16(p04, p26), r46 = _mm256_unpackhi_epi16(p04, p26);
        const __m256i r13 = _mm256_unpacklo_epi16(p15, p37), r57 = _mm256_unpackhi_epi16(p15, p37);
        const __m256i a0 = _mm256_unpacklo_epi32(r02, r46),
                      a1 = _mm256_unpackhi_epi32(r02, r46); /* rows 0 and 1, 2 and 3: places 0..3 */
        const __m256i b0 = _mm256_unpacklo_epi32(r13, r57), b1 = _mm256_unpackhi_epi32(r13, r57);
        row[0] = _mm256_unpacklo_epi64(a0, b0);
        row[1] = _mm256_unpackhi_epi64(a0, b0);
        row[2] = _mm256_unpacklo_epi64(a1, b1);
        row[3] = _mm256_unpackhi_epi64(a1, b1);
#ifdef AKV_QUAD_VNNI
#    pragma GCC unroll 2
        for (int r = 0; r < 4; r += 2) {
            const __m256i low = _mm256_set1_epi16(255);
            store256(out->halves[g][0][r], row_bytes(_mm256_srli_epi16(row[r], 8), _mm256_srli_epi16(row[r + 1], 8)));
            store256(out->halves[g][1][r], row_bytes(_mm256_and_si256(row[r], low), _mm256_and_si256(row[r + 1], low)));
        }
#else
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m256i words = _mm256_xor_si256(row[r], _mm256_set1_epi16(-32768));
            store256(out->words[g][r], words);
            dot_words(&sums[r], words, _mm256_set1_epi16(1));
        }
#endif
        if (bytes_too) {
            __m256i e[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                e[r] = _mm256_srli_epi16(
                    _mm256_add_epi16(_mm256_sub_epi16(row[r], _mm256_srli_epi16(row[r], 8)), _mm256_set1_epi16(128)),
                    8);
            store256(out->bytes[g][0], row_bytes(e[0], e[1]));
            store256(out->bytes[g][2], row_bytes(e[2], e[3]));
        }
    }
    for (int r = 0; r < 4; r++)
        out->sums[r] = _mm_add_epi32(_mm256_castsi256_si128(sums[r]), _mm256_extracti128_si256(sums[r], 1));
}

/* Adds a pair's four parts of each coordinate to those of a row. */
INLINE void add_parts(float *out, __m256 sum, float unit, bool one)
{
    const __m256 part = _mm256_fmadd_ps(sum, _mm256_set1_ps(unit), _mm256_loadu_ps(out));
    if (one)
        _mm_storeu_ps(out, _mm256_castps256_ps128(part));
    else
        _mm256_storeu_ps(out, part);
}

#ifdef AKV_QUAD_VNNI
#    define PAIRS_AT_ONCE 1u
/* A pair of coordinates (perhaps only the first is there) of four or two bits: the bytes of a weight apart. */
INLINE void value_pairs(int C, int w, bool one, const value_groups *groups, uint32_t offset,
                        const value_weights *weights, float *sums)
{
    __m256i acc[2][4];
#    pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        acc[k / 4][k % 4] = _mm256_setzero_si256();
    for (uint32_t i = 0; i < groups->all; i++) {
        const __m256i steps = value_steps(group_at(groups, i) + offset, w, one);
#    pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            dot_bytes(&acc[k / 4][k % 4], both128(weights->halves[i][k / 4][k % 4]), steps);
    }
#    pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        add_parts(sums + r * 16,
                  _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[0][r]), _mm256_set1_ps(256.0f), _mm256_cvtepi32_ps(acc[1][r])),
                  weights->unit[r], one);
    (void)C;
}
#else
#    define PAIRS_AT_ONCE 2u
/*
 * C pairs of coordinates (one or two; of the last perhaps only one coordinate) of four or two bits. With s raised steps
 * and w - 32768 the words of a weight, (step * w) = s * word + 32768 s - raise * w: the second sum is that of a fifth
 * row, the third that of the weights. The whole of each part stays within 32 bits, and what wraps in between comes
 * back.
 */
INLINE void value_pairs(int C, int w, bool one, const value_groups *groups, uint32_t offset,
                        const value_weights *weights, float *sums)
{
    const __m256i table0 = both128(w == 0 ? raised4 : raised2[0]), table1 = both128(w == 0 ? raised4 : raised2[1]);
    const __m256i low = _mm256_set1_epi16(15);
    __m256i acc[2][5];
#    pragma GCC unroll 10
    for (int k = 0; k < 5 * C; k++)
        acc[k / 5][k % 5] = _mm256_setzero_si256();
    for (uint32_t i = 0; i < groups->all; i++) {
        const uint8_t *codes = group_at(groups, i) + offset;
        __m256i even[2], odd[2];
#    pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            const __m256i x = value_words(codes + c * (w == 0 ? 16 : 8), w, one);
            even[c] = _mm256_shuffle_epi8(table0, w == 0 ? _mm256_and_si256(x, low) : x);
            odd[c] = _mm256_shuffle_epi8(table1, w == 0 ? _mm256_srli_epi16(x, 4) : x);
            dot_words(&acc[c][4], _mm256_add_epi16(even[c], odd[c]), _mm256_set1_epi16(1));
        }
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m256i u = both128(weights->words[i][r]), v = both128(weights->words[i][r] + 8);
#    pragma GCC unroll 2
            for (int c = 0; c < C; c++) {
                dot_words(&acc[c][r], even[c], u);
                dot_words(&acc[c][r], odd[c], v);
            }
        }
    }
    const __m128i raise = _mm_set1_epi32(w == 0 ? 104 : 10);
#    pragma GCC unroll 2
    for (int c = 0; c < C; c++)
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            float *out = sums + r * 16 + c * 8;
            const __m256i raised = _mm256_broadcastsi128_si256(_mm_mullo_epi32(weights->sums[r], raise));
            const __m256i sum = _mm256_sub_epi32(_mm256_add_epi32(acc[c][r], _mm256_slli_epi32(acc[c][4], 15)), raised);
            add_parts(out, _mm256_cvtepi32_ps(sum), weights->unit[r], one);
        }
}
#endif

/* C pairs of coordinates of one bit: 255 * 2 in each of 64 groups at most, which words hold. */
INLINE void value_bit_pairs(int C, bool one, const value_groups *groups, uint32_t offset, const value_weights *weights,
                            float *sums)
{
    __m256i acc[2][4];
#pragma GCC unroll 8
    for (int k = 0; k < 4 * C; k++)
        acc[k / 4][k % 4] = _mm256_setzero_si256();
    for (uint32_t i = 0; i < groups->all; i++) {
        const uint8_t *codes = group_at(groups, i) + offset;
        __m256i steps[2];
#pragma GCC unroll 2
        for (int c = 0; c < C; c++)
            steps[c] = value_bits(codes + 4 * c, one);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const __m256i u = both128(weights->bytes[i][r]);
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
#ifdef AKV_QUAD_VNNI
                dot_bytes(&acc[c][r], u, steps[c]);
#else
                add_words(&acc[c][r], _mm256_maddubs_epi16(u, steps[c]));
#endif
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; c++)
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
#ifdef AKV_QUAD_VNNI
            const __m256i sum = acc[c][r];
#else
            const __m256i sum = _mm256_madd_epi16(acc[c][r], _mm256_set1_epi16(1));
#endif
            add_parts(sums + r * 16 + c * 8, _mm256_cvtepi32_ps(sum), 257.0f * weights->unit[r], one);
        }
}

static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots,
                      const float *weights, uint8_t *scratch, float *sums)
{
    float *products = (float *)(void *)scratch; /* [1024][4], 16 KiB */
    value_weights whole = {(uint8_t(*)[2][4][16])(scratch + 16384),
                           (int16_t(*)[4][16])(void *)(scratch + 16384),
                           (uint8_t(*)[4][16])scratch,
                           {{0}},
                           {0}}; /* bytes lie over products that were read */
    uint8_t room[FULL_GROUP_ROOM];
    value_groups groups = {run + (n + 1) / 2, room, n / 16, (n + 15) / 16, 2 * level->bits};
    const __m128 top = weight_products(run, n, slots, weights, products);
    const __m128 live = _mm_cmpgt_ps(top, _mm_set1_ps(1e-30f));
    _mm_storeu_ps(whole.unit, _mm_mul_ps(top, _mm_set1_ps(1.0f / 65535.0f)));
    round_weights(products, groups.all, _mm_and_ps(live, _mm_div_ps(_mm_set1_ps(65535.0f), top)),
                  level->by_width[2] != 0, &whole);
    if (groups.full < groups.all)
        full_group(groups.codes + (size_t)groups.full * groups.bytes, n % 16, level, room);
    uint32_t offset = 0;
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
        const uint32_t bytes = w == 0 ? 8 : 4;
        uint32_t left = level->by_width[w];
        for (; PAIRS_AT_ONCE == 2 && left >= 4; left -= 4, offset += 4 * bytes, sums += 64)
            value_pairs(2, w, false, &groups, offset, &whole, sums);
        for (; PAIRS_AT_ONCE == 1 && left >= 4; left -= 4, offset += 4 * bytes, sums += 64) {
            value_pairs(1, w, false, &groups, offset, &whole, sums);
            value_pairs(1, w, false, &groups, offset + 2 * bytes, &whole, sums + 8);
        }
        if (left >= 2)
            value_pairs(1, w, false, &groups, offset, &whole, sums);
        if (left % 2 != 0)
            value_pairs(1, w, true, &groups, offset + left / 2 * 2 * bytes, &whole, sums + left / 2 * 8);
        offset += left * bytes;
        sums += left != 0 ? 64 : 0;
    }
    uint32_t left = level->by_width[2];
    for (; left >= 4; left -= 4, offset += 8, sums += 64)
        value_bit_pairs(2, false, &groups, offset, &whole, sums);
    if (left >= 2)
        value_bit_pairs(1, false, &groups, offset, &whole, sums);
    if (left % 2 != 0)
        value_bit_pairs(1, true, &groups, offset + left / 2 * 4, &whole, sums + left / 2 * 8);
}

static void place_sums(const float *sums, const akv_level_list *list, float *z)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    const uint16_t *coord = list->coord;
    for (uint32_t w = 0; w < 3; w++) {
        const __m256 unit = _mm256_set1_ps(unit_of[w]);
        for (uint32_t i = 0; i < list->by_width[w]; i += 4, sums += 64) {
            const uint32_t live = list->by_width[w] - i < 4 ? list->by_width[w] - i : 4;
            for (uint32_t k = 0; k < live; k += 2) { /* two coordinates: [row][coordinate][4 parts] */
                const __m256 a = _mm256_loadu_ps(sums + 4 * k), b = _mm256_loadu_ps(sums + 16 + 4 * k);
                const __m256 c = _mm256_loadu_ps(sums + 32 + 4 * k), d = _mm256_loadu_ps(sums + 48 + 4 * k);
                const __m256 two = _mm256_mul_ps(unit, _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)));
                float *at = z + (size_t)coord[k] * 4;
                _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), _mm256_castps256_ps128(two)));
                if (k + 1 < live) {
                    at = z + (size_t)coord[k + 1] * 4;
                    _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), _mm256_extractf128_ps(two, 1)));
                }
            }
            coord += live;
        }
    }
}
