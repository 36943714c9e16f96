/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_avx2_codes.h - key residuals of quad.h for 256-bit registers (quad_avx2.h). Two coordinates of a residual are
 * the two words of a lane, steps raised by the largest so that number 0 is step 0: then half-bytes between zero bytes
 * need no widening after they are looked up. Coordinates of one bit are bytes; their sums stay within 16 bits for 128
 * coordinates, 2 * 127 each.
 */

/* Steps by half-byte: of four bits; of two, the first residual's and the second's. */
static const uint8_t raised4[16] = {0, 25, 42, 56, 68, 79, 89, 99, 109, 119, 129, 140, 152, 166, 183, 208};
static const uint8_t raised2[2][16] = {{0, 7, 13, 20, 0, 7, 13, 20, 0, 7, 13, 20, 0, 7, 13, 20},
                                       {0, 0, 0, 0, 7, 7, 7, 7, 13, 13, 13, 13, 20, 20, 20, 20}};

/*
 * Two coordinates, from 16 or 8 bytes of codes: steps of the residuals 2 k, of 2 k + 1, by place. one: only the first
 * coordinate is there.
 */
INLINE void key_steps(const uint8_t *codes, int w, bool one, __m256i out[2])
{
    const __m256i low = _mm256_set1_epi32(0x000f000f);
    if (w == 0) {
        const __m256i spread = _mm256_setr_epi8(0, -1, 8, -1, 2, -1, 10, -1, 4, -1, 12, -1, 6, -1, 14, -1, 1, -1, 9, -1,
                                                3, -1, 11, -1, 5, -1, 13, -1, 7, -1, 15, -1);
        const __m256i c =
            one ? _mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)(const void *)codes)) : both128(codes);
        const __m256i x = _mm256_shuffle_epi8(c, spread), table = both128(raised4);
        out[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(x, low));
        out[1] = _mm256_shuffle_epi8(table, _mm256_srli_epi16(x, 4));
        return;
    }
    const __m256i spread = _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1, 0, -1, 4, -1, 1, -1,
                                            5, -1, 2, -1, 6, -1, 3, -1, 7, -1);
    int64_t c = 0;
    memcpy(&c, codes, one ? 4 : 8);
    const __m256i x = _mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(c), spread),
                                        _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    const __m256i half_byte = _mm256_and_si256(x, low);
    out[0] = _mm256_shuffle_epi8(both128(raised2[0]), half_byte);
    out[1] = _mm256_shuffle_epi8(both128(raised2[1]), half_byte);
}

#ifndef AKV_QUAD_VNNI
/*
 * Two coordinates of one bit from four bytes of codes: 2 where it is set. Bytes: both coordinates of residual 2 k, then
 * of 2 k + 1, by place.
 */
INLINE __m256i key_bits(const uint8_t *codes, bool one)
{
    const __m256i spread = _mm256_setr_epi8(0, 2, 0, 2, 0, 2, 0, 2, 1, 3, 1, 3, 1, 3, 1, 3, 0, 2, 0, 2, 0, 2, 0, 2, 1,
                                            3, 1, 3, 1, 3, 1, 3);
    const __m256i bit = _mm256_setr_epi8(1, 1, 2, 2, 16, 16, 32, 32, 1, 1, 2, 2, 16, 16, 32, 32, 4, 4, 8, 8, 64, 64,
                                         -128, -128, 4, 4, 8, 8, 64, 64, -128, -128);
    int32_t c = 0;
    memcpy(&c, codes, one ? 2 : 4);
    const __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(c), spread), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(mine, bit), _mm256_set1_epi8(2));
}
#endif

/*
 * A level's queries as code_dots reads them, per two coordinates and row: two words, or of one bit a byte of each
 * twice.
 */
typedef struct key_query {
    int32_t pairs[AKV_QUAD_MAX_DIM / 2 + 6][4];
    int32_t bias[4];
    const int8_t *bits; /* as they came */
} key_query;

static void query_words(const akv_quad_level *level, const int8_t *query, const int32_t *bias, key_query *out)
{
    const uint32_t words = (level->by_width[0] + 3) / 4 + (level->by_width[1] + 3) / 4;
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (uint32_t i = 0; i < words; i++, query += 32) {
        const __m256i high = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(query)), 8),
                      low = _mm256_cvtepi8_epi16(load128(query + 16));
        store256(out->pairs[2 * i], _mm256_permutevar8x32_epi32(_mm256_add_epi16(high, low), order));
    }
    out->bits = query;
    for (uint32_t i = words; i < level->fours; i++, query += 32) {
        const __m256i twice = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 2, 3, 2, 3, 6, 7, 6,
                                               7, 10, 11, 10, 11, 14, 15, 14, 15);
        store256(out->pairs[2 * i], _mm256_shuffle_epi8(both128(query), twice));
    }
    for (uint32_t r = 0; r < 4; r++)
        out->bias[r] = 256 * bias[r] + bias[4 + r];
}

INLINE void add_key_steps(const uint8_t *codes, int w, bool one, const int32_t *query, __m256i acc[4][2])
{
    __m256i steps[2];
    key_steps(codes, w, one, steps);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const __m256i q = _mm256_set1_epi32(query[r]);
        dot_words(&acc[r][0], steps[0], q);
        dot_words(&acc[r][1], steps[1], q);
    }
}

/* All coordinates of one bit; the sums were 0. */
INLINE void add_key_bits(const uint8_t *codes, uint32_t count, const key_query *query, const int32_t (*q)[4],
                         __m256i acc[4][2])
{
#ifdef AKV_QUAD_VNNI
    /*
     * A bit stays at its place in a byte, which is the residual's own, and the sum is moved: to 2 * 256 times the bits'
     * sum.
     */
    const __m256i spread = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7));
    const __m256i bit0 = _mm256_setr_epi32(0x01010101, 0x10101010, 0x01010101, 0x10101010, 0x04040404, 0x40404040,
                                           0x04040404, 0x40404040);
    const __m256i bit1 = _mm256_add_epi8(bit0, bit0);
    const int8_t *four = query->bits;
    for (uint32_t i = 0; i < count; i += 4, codes += 8, four += 32) {
        int64_t c = 0;
        if (count - i >= 4)
            memcpy(&c, codes, 8);
        else
            memcpy(&c, codes, 2 * (size_t)(count - i));
        const __m256i x = _mm256_shuffle_epi8(_mm256_set1_epi64x(c), spread);
        const __m256i x0 = _mm256_and_si256(x, bit0), x1 = _mm256_and_si256(x, bit1);
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            int32_t bytes;
            memcpy(&bytes, four + 4 * r, 4);
            dot_bytes(&acc[r][0], x0, _mm256_set1_epi32(bytes));
            dot_bytes(&acc[r][1], x1, _mm256_set1_epi32(bytes));
        }
    }
#    pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        acc[r][0] = _mm256_sllv_epi32(acc[r][0], _mm256_setr_epi32(9, 5, 9, 5, 7, 3, 7, 3));
        acc[r][1] = _mm256_sllv_epi32(acc[r][1], _mm256_setr_epi32(8, 4, 8, 4, 6, 2, 6, 2));
    }
    (void)q;
#else
    for (uint32_t first = 0; first < count; first += 128) {
        const uint32_t some = count - first < 128 ? count - first : 128;
        __m256i bits[4];
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
            bits[r] = _mm256_setzero_si256();
        for (uint32_t i = 0; i + 2 <= some; i += 2, codes += 4, q++) {
            const __m256i steps = key_bits(codes, false);
#    pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                add_words(&bits[r], _mm256_maddubs_epi16(steps, _mm256_set1_epi32((*q)[r])));
        }
        if (some % 2 != 0) {
            const __m256i steps = key_bits(codes, true);
#    pragma GCC unroll 4
            for (int r = 0; r < 4; r++)
                add_words(&bits[r], _mm256_maddubs_epi16(steps, _mm256_set1_epi32((*q)[r])));
        }
#    pragma GCC unroll 4
        for (int r = 0; r < 4; r++) { /* the query's high bytes */
            dot_words(&acc[r][0], bits[r], _mm256_set1_epi32(256));
            dot_words(&acc[r][1], bits[r], _mm256_set1_epi32(256 << 16));
        }
    }
    (void)query;
#endif
}

/* A full group; live = how many tokens of it are written. */
INLINE void key_group(const uint8_t *codes, const akv_quad_level *level, const key_query *query, const float *scale,
                      const uint8_t *gains, uint32_t live, const uint16_t *slots, float *logits)
{
    const uint32_t n4 = level->by_width[0], n2 = level->by_width[1], n1 = level->by_width[2];
    const int32_t(*q)[4] = query->pairs + 2 * ((n4 + 3) / 4 + (n2 + 3) / 4);
    const uint8_t *at = codes + 8 * n4 + 4 * n2;
    __m256i acc[4][2];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        acc[k / 2][k % 2] = _mm256_setzero_si256();
    add_key_bits(at, n1, query, q, acc); /* first: later the eight sums need the registers */
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        add_dwords(&acc[k / 2][k % 2], _mm256_set1_epi32(query->bias[k / 2]));
    q = query->pairs;
    at = codes;
#pragma GCC unroll 2
    for (int w = 0; w < 2; w++) {
        const uint32_t count = w == 0 ? n4 : n2, bytes = w == 0 ? 16 : 8;
        for (uint32_t i = 0; i + 2 <= count; i += 2, at += bytes, q++)
            add_key_steps(at, w, false, *q, acc);
        if (count % 2 != 0) {
            add_key_steps(at, w, true, *q, acc);
            at += bytes / 2;
            q++;
        }
        q += (count + 3) / 4 * 2 - (count + 1) / 2; /* queries come by fours */
    }
    __m256 gain[2], sum[2][4];
    gains16(gains, live == AKV_GROUP_LANES ? 8 : (live + 1) / 2, gain);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        sum[k / 4][k % 4] = _mm256_mul_ps(_mm256_mul_ps(gain[k / 4], _mm256_set1_ps(scale[k % 4])),
                                          _mm256_cvtepi32_ps(acc[k % 4][k / 4]));
    TRANSPOSE(sum[0][0], sum[0][1], sum[0][2], sum[0][3]); /* vector i: pairs 2 i and 2 i + 1 */
    TRANSPOSE(sum[1][0], sum[1][1], sum[1][2], sum[1][3]);
#pragma GCC unroll 8
    for (uint32_t k = 0; k < 8; k++)
#pragma GCC unroll 2
        for (uint32_t odd = 0; odd < 2; odd++)
            if (2 * k + odd < live) {
                const __m256 two = sum[odd][k / 2];
                float *out = logits + (size_t)slots[2 * k + odd] * 4;
                _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), k % 2 == 0 ? _mm256_castps256_ps128(two)
                                                                            : _mm256_extractf128_ps(two, 1)));
            }
}

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query,
                      const int32_t *bias, const float *scale, const uint16_t *slots, float *logits)
{
    const uint8_t *codes = run + (n + 1) / 2;
    key_query words;
    uint32_t at = 0;
    query_words(level, query, bias, &words);
    for (; at + AKV_GROUP_LANES <= n; at += AKV_GROUP_LANES, codes += 2 * level->bits)
        key_group(codes, level, &words, scale, run + at / 2, AKV_GROUP_LANES, slots + at, logits);
    if (at < n) {
        uint8_t room[FULL_GROUP_ROOM];
        full_group(codes, n - at, level, room);
        key_group(room, level, &words, scale, run + at / 2, n - at, slots + at, logits);
    }
}
