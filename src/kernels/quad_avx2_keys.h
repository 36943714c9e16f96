/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx2_keys.h - key anchors and mean key of quad.h for 256-bit registers (quad_avx2.h). */

static void unpack_anchors(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales,
                           uint32_t n, uint32_t *out_anchor, float *out_weight)
{
    /*
     * tokens 0..3 from the bytes at p, tokens 4..7 from those at p + index_bits / 2: there index_bits is odd half a
     * byte is over
     */
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3);
    const __m256i over = _mm256_setr_epi32(0, 0, 0, 0, (int)(index_bits % 2 * 4), (int)(index_bits % 2 * 4),
                                           (int)(index_bits % 2 * 4), (int)(index_bits % 2 * 4));
    const __m256i bit = _mm256_add_epi32(_mm256_mullo_epi32(lane, _mm256_set1_epi32((int)index_bits)), over);
    const __m256i bytes = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_srli_epi32(bit, 3), _mm256_set1_epi32(0x01010101)),
                                           _mm256_set1_epi32(0x03020100));
    const __m256i shift = _mm256_and_si256(bit, _mm256_set1_epi32(7)),
                  mask = _mm256_set1_epi32((int)((1u << index_bits) - 1u));
    const __m256i nibble = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256 step = _mm256_set1_ps(AKV_COEFF_STEP);
    const uint8_t *end = index + (n * index_bits + 7) / 8;
    uint8_t rest[64] = {0};
    bool in_rest = false;
    for (uint32_t t = 0; t < akv_round_up(n, 16); t += 8, index += index_bits) {
        if (t >= n) {
            store256(out_anchor + t, _mm256_setzero_si256());
            _mm256_storeu_ps(out_weight + t, _mm256_setzero_ps());
            continue;
        }
        const uint32_t left = n - t < 8 ? n - t : 8;
        if (!in_rest && end - index < 32) {
            memcpy(rest, index, (size_t)(end - index));
            index = rest;
            in_rest = true;
        }
        uint32_t packed = 0;
        if (left == 8)
            memcpy(&packed, coeff + t / 2, 4);
        else
            memcpy(&packed, coeff + t / 2, (left + 1) / 2);
        const __m256i live = left == 8 ? _mm256_set1_epi32(-1) : first_lanes(left);
        __m256i word =
            _mm256_inserti128_si256(_mm256_castsi128_si256(load128(index)), load128(index + index_bits / 2), 1);
        word =
            _mm256_and_si256(_mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(word, bytes), shift), mask), live);
        const __m256 scale = _mm256_mask_i32gather_ps(_mm256_setzero_ps(), scales, word, _mm256_castsi256_ps(live), 4);
        const __m256i code = _mm256_srli_epi32(
            _mm256_sllv_epi32(_mm256_set1_epi32((int)packed), _mm256_sub_epi32(_mm256_set1_epi32(28), nibble)), 28);
        const __m256i number = _mm256_sub_epi32(_mm256_xor_si256(code, _mm256_set1_epi32(8)), _mm256_set1_epi32(8));
        const __m256 self = _mm256_castsi256_ps(_mm256_cmpeq_epi32(number, _mm256_set1_epi32(AKV_COEFF_SELF)));
        const __m256 gamma =
            _mm256_blendv_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(number), step), _mm256_set1_ps(1.0f), self);
        store256(out_anchor + t, word);
        _mm256_storeu_ps(out_weight + t, _mm256_mul_ps(gamma, scale)); /* scale 0 where not live */
    }
}

/* 8 doubles as floats. */
INLINE __m256 cosines(const double *p)
{
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)));
}

/* Two rows of 8 planes, rounded to 16 bits, one after the other. */
INLINE __m256i two_eights(__m256 a, __m256 b)
{
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)), 0xd8);
}

static void turn_rows(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes,
                      int16_t *query16, float *mean_rows)
{
    const size_t P = padded_planes;
    for (size_t j = 0; j < P; j += 8) {
        const __m256 c = cosines(cosine + j), s = cosines(sine + j);
        int16_t *out = query16 + j / 32 * 256 + j % 32 / 8 * 32;
        for (size_t i = j; i < j + 8; i += 4) {
            const __m256d co = _mm256_loadu_pd(cosine + i), si = _mm256_loadu_pd(sine + i);
            const __m256d sc = _mm256_loadu_pd(step + i), ss = _mm256_loadu_pd(step + P + i);
            _mm256_storeu_pd(cosine + i, _mm256_fmsub_pd(co, sc, _mm256_mul_pd(si, ss)));
            _mm256_storeu_pd(sine + i, _mm256_fmadd_pd(si, sc, _mm256_mul_pd(co, ss)));
        }
        __m256 y0[8], y1[8];
#pragma GCC unroll 8
        for (size_t r = 0; r < 8; r++) {
            const __m256 x0 = _mm256_loadu_ps(rows + r * P + j), x1 = _mm256_loadu_ps(rows + (8 + r) * P + j);
            y0[r] = _mm256_fmadd_ps(x0, c, _mm256_mul_ps(x1, s));
            y1[r] = _mm256_fmsub_ps(x1, c, _mm256_mul_ps(x0, s));
            if (r >= 4) {
                _mm256_storeu_ps(mean_rows + (r - 4) * P + j, y0[r]);
                _mm256_storeu_ps(mean_rows + r * P + j, y1[r]);
            } else if (r % 2 == 1) {
                store256(out + (r - 1) * 8, two_eights(y0[r - 1], y0[r]));
                store256(out + 128 + (r - 1) * 8, two_eights(y1[r - 1], y1[r]));
            }
        }
    }
}

/* Adds up, for 16 offsets and four rows, m[r * P + j] * table[j * 64 + offset]; sum [row][2]. */
INLINE void add_turns(const float *m, size_t P, const float *table, uint32_t fast, __m256 sum[4][2])
{
    for (uint32_t j = 0; j < fast; j++, m++, table += 64) {
        const __m256 c0 = _mm256_loadu_ps(table), c1 = _mm256_loadu_ps(table + 8);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            const __m256 a = _mm256_broadcast_ss(m + r * P);
            sum[r][0] = _mm256_fmadd_ps(a, c0, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(a, c1, sum[r][1]);
        }
    }
}

/* 8 tokens of a block's logits, four rows of them; t is a multiple of 8. */
INLINE void store_tokens(float *logits, uint32_t t, __m256 a, __m256 b, __m256 c, __m256 d)
{
    float *out = logits + t / 16 * 64 + t % 16;
    TRANSPOSE(a, b, c, d);
    _mm256_storeu_ps(out, a);
    _mm256_storeu_ps(out + 16, b);
    _mm256_storeu_ps(out + 32, c);
    _mm256_storeu_ps(out + 48, d);
}

static void mean_logits(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast,
                        const float *moments, const float *rest, float *logits)
{
    const size_t P = padded_planes;
    float series[6][4];
    for (size_t half = 0; half < 2; half++) {
        const float *m = mean_rows + half * 4 * P;
        __m256 sum[3][4];
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i / 4][i % 4] = _mm256_setzero_ps();
        for (size_t j = fast & ~7u; j < P; j += 8) /* moments are 0 below fast */
#pragma GCC unroll 4
            for (size_t r = 0; r < 4; r++) {
                const __m256 x = _mm256_loadu_ps(m + r * P + j);
#pragma GCC unroll 3
                for (size_t k = 0; k < 3; k++)
                    sum[k][r] = _mm256_fmadd_ps(x, _mm256_loadu_ps(moments + (3 * half + k) * P + j), sum[k][r]);
            }
#pragma GCC unroll 3
        for (size_t k = 0; k < 3; k++)
            _mm_storeu_ps(series[3 * half + k], sum4(sum[k][0], sum[k][1], sum[k][2], sum[k][3]));
    }
    const __m256 iota = _mm256_setr_ps(0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f);
    const __m256i reverse = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (uint32_t i0 = 0; i0 < 32; i0 += 16) {
        __m256 even[4][2], odd[4][2];
#pragma GCC unroll 2
        for (uint32_t i = 0; i < 2; i++) {
            const __m256 d =
                _mm256_mul_ps(_mm256_add_ps(iota, _mm256_set1_ps((float)(i0 + 8 * i))), _mm256_set1_ps(1.0f / 32.0f));
            const __m256 dd = _mm256_mul_ps(d, d);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                const __m256 c = _mm256_fmadd_ps(dd, _mm256_set1_ps(series[2][r]), _mm256_set1_ps(series[1][r]));
                const __m256 s = _mm256_fmadd_ps(dd, _mm256_set1_ps(series[5][r]), _mm256_set1_ps(series[4][r]));
                even[r][i] = _mm256_fmadd_ps(dd, c, _mm256_set1_ps(series[0][r] + rest[r]));
                odd[r][i] = _mm256_mul_ps(d, _mm256_fmadd_ps(dd, s, _mm256_set1_ps(series[3][r])));
            }
        }
        add_turns(mean_rows, P, table + i0, fast, even); /* one after the other: the registers hold eight sums */
        add_turns(mean_rows + 4 * P, P, table + 32 + i0, fast, odd);
#pragma GCC unroll 2
        for (uint32_t i = 0; i < 2; i++) {
            __m256 up[4], down[4];
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                up[r] = _mm256_add_ps(even[r][i], odd[r][i]);
                down[r] = _mm256_permutevar8x32_ps(_mm256_sub_ps(even[r][i], odd[r][i]), reverse);
            }
            store_tokens(logits, 32 + i0 + 8 * i, up[0], up[1], up[2], up[3]);
            store_tokens(logits, 24 - i0 - 8 * i, down[0], down[1], down[2], down[3]);
        }
    }
}

/* 16 bytes to the high bytes of 16 words; those at and beyond `count` as 0. */
INLINE __m256i high_bytes(const int8_t *p, uint32_t count)
{
    const __m256i spread = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1, 8, -1, 9, -1,
                                            10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
    int8_t some[16] = {0};
    if (count >= 16)
        return _mm256_shuffle_epi8(both128(p), spread);
    memcpy(some, p, count);
    return _mm256_shuffle_epi8(both128(some), spread);
}

/*
 * 16 planes of an anchor from plane j on, turned: first coordinates, second ones. turn: 16 cosines and, 32 further,
 * sines.
 */
INLINE void turn_planes(const int8_t *a, uint32_t planes, uint32_t j, bool half, const int16_t *turn, __m256i y[2])
{
    const uint32_t left = j < planes ? planes - j : 0;
    __m256i x0, x1;
    if (half) {
        x0 = high_bytes(a + j, left);
        x1 = high_bytes(a + planes + j, left);
    } else {
        int8_t some[32] = {0};
        if (left < 16)
            memcpy(some, a + 2 * j, 2 * left);
        const __m256i pairs = load256(left < 16 ? some : a + 2 * j);
        x0 = _mm256_slli_epi16(pairs, 8);
        x1 = _mm256_and_si256(pairs, _mm256_set1_epi16((int16_t)0xff00));
    }
    const __m256i c = load256(turn), s = load256(turn + 32);
    y[0] = _mm256_sub_epi16(_mm256_mulhrs_epi16(x0, c), _mm256_mulhrs_epi16(x1, s));
    y[1] = _mm256_add_epi16(_mm256_mulhrs_epi16(x0, s), _mm256_mulhrs_epi16(x1, c));
}

/* Halves of a vector of each of two tokens added: [token][4]. */
INLINE __m256 two_tokens(__m256i a, __m256i b)
{
    return _mm256_cvtepi32_ps(
        _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xf0), _mm256_permute2x128_si256(a, b, 0x21)));
}

/*
 * planes and rest known when this is compiled, or not. query: [16 planes][first, second][4 rows][16], then [16 of the
 * rest][4 rows][16].
 */
INLINE void anchor_tile(const int8_t *anchors, uint32_t planes, uint32_t padded_planes, uint32_t rest,
                        uint32_t padded_rest, bool half, const int16_t *turn16, const __m256i *query,
                        const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                        const char *ahead, uint32_t lines)
{
    const __m256 scales = broadcast4(scale);
    const size_t dim = 2 * (size_t)planes + rest, turns = 2 * (size_t)padded_planes;
    for (uint32_t i = 0; i < (n + 15) / 16 * 8; i++, ahead += 64 * lines) {
        const uint32_t t = i / 8 * 16 + i % 8 / 4 * 8 +
                           i % 4; /* and t + 4, its neighbour in slot order; behind n anchor 0, weight 0 */
        const int8_t *a = anchors + anchor[t] * dim, *b = anchors + anchor[t + 4] * dim;
        const int16_t *turn_a = turn16 + t * turns, *turn_b = turn_a + 4 * turns;
        const __m256i *q = query;
        __m256i acc[2][4];
        akv_quad_fetch(ahead, 64 * lines);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++)
            acc[k / 4][k % 4] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (uint32_t j = 0; j < padded_planes; j += 16, q += 8) {
            __m256i x[2], y[2];
            turn_planes(a, planes, j, half, turn_a + j / 32 * 64 + j % 32, x);
            turn_planes(b, planes, j, half, turn_b + j / 32 * 64 + j % 32, y);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                dot_words(&acc[0][k % 4], x[k / 4], q[k]);
                dot_words(&acc[1][k % 4], y[k / 4], q[k]);
            }
        }
        for (uint32_t e = 0; e < padded_rest; e += 16, q += 4) {
            const uint32_t left = e < rest ? rest - e : 0;
            const __m256i x = _mm256_srai_epi16(high_bytes(a + 2 * planes + e, left), 1);
            const __m256i y = _mm256_srai_epi16(high_bytes(b + 2 * planes + e, left), 1);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                dot_words(&acc[0][r], x, q[r]);
                dot_words(&acc[1][r], y, q[r]);
            }
        }
        const __m256 sums =
            _mm256_hadd_ps(_mm256_hadd_ps(two_tokens(acc[0][0], acc[1][0]), two_tokens(acc[0][1], acc[1][1])),
                           _mm256_hadd_ps(two_tokens(acc[0][2], acc[1][2]), two_tokens(acc[0][3], acc[1][3])));
        const __m256 each = _mm256_set_m128(_mm_set1_ps(weight[t + 4]), _mm_set1_ps(weight[t]));
        float *out = logits + (size_t)akv_quad_slot(t) * 4;
        _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_mul_ps(scales, each), sums, _mm256_loadu_ps(out)));
    }
}

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16,
                          const int16_t *query16, const uint32_t *anchor, const float *weight, const float *scale,
                          uint32_t n, float *logits, const void *ahead, uint32_t ahead_bytes)
{
    const uint32_t P = shape->planes, PP = shape->padded_planes, R = shape->rest, PR = shape->padded_rest;
    const bool half = shape->style == AKV_ROPE_HALF_SPLIT;
    /* an eighth of the share of 16 tokens, rounded up: some lines behind the end do no harm */
    const uint32_t pairs = (n + 15) / 16 * 8, lines = n == 0 ? 0 : ((ahead_bytes + 63) / 64 + pairs - 1) / pairs;
    __m256i query[AKV_QUAD_MAX_DIM / 4 + 32]; /* 16 coordinates of a row side by side, padding included */
    __m256i *q = query;
    for (uint32_t j = 0; j < PP; j += 16)
        for (uint32_t k = 0; k < 8; k++) {
            const int16_t *from = query16 + j / 32 * 256 + k / 4 * 128 + j % 32 / 8 * 32 + k % 4 * 8;
            *q++ = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(from)), load128(from + 32), 1);
        }
    for (uint32_t e = 0; e < PR; e += 16)
        for (uint32_t r = 0; r < 4; r++) {
            const int16_t *from = query16 + 8 * PP + e / 8 * 32 + r * 8;
            *q++ = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(from)), load128(from + 32), 1);
        }
    /* the shapes of most models with known trip counts */
    if (half && R == 0 && P == 64)
        anchor_tile(anchors, 64, 64, 0, 0, true, turn16, query, anchor, weight, scale, n, logits, ahead, lines);
    else if (half && R == 0 && P == 32)
        anchor_tile(anchors, 32, 32, 0, 0, true, turn16, query, anchor, weight, scale, n, logits, ahead, lines);
    else
        anchor_tile(anchors, P, PP, R, PR, half, turn16, query, anchor, weight, scale, n, logits, ahead, lines);
}
