/* SPDX-License-Identifier: Apache-2.0 */
/* tile_avx512.c - tile.h for AVX-512 with VNNI: two products of 16 bits a lane and instruction, twice what f32 has. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,fma,bmi2,prefer-vector-width=512")
#  endif
#  include "kernels/quad_avx512.h"
#  include "kernels/tile_body.h"

#  include <math.h>

#  define W AKV_TILE_WIDTH
#  define NOTHING 1e-33f /* a vector whose largest number is below counts as 0; the units of larger ones are finite */

/* Sums have to stay in registers, so every loop over them is unrolled. */
#  ifdef __clang__
#    define UNROLLED _Pragma("unroll")
#  else
#    define UNROLLED _Pragma("GCC unroll 6")
#  endif

INLINE __mmask16 lanes(uint32_t i, uint32_t n)
{
    return (__mmask16)low_bits(i >= n ? 0 : n - i < 16 ? n - i : 16);
}

/* |x| as a whole number: in this order NaN is above infinity, so that a maximum keeps it. */
INLINE __m512i size_of(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* What x is multiplied by to have at most `most` at its largest and AKV_TILE_LENGTH as its length; *scale = 1 over that, NaN for what is
 * not finite, 0 (both) for nothing. squares: sum of (x / largest)^2. */
INLINE __m512 units_of(__m512 largest, __m512 squares, float most, __m512 *scale)
{
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(NOTHING), _CMP_NLT_UQ);
    const __m512 length = _mm512_div_ps(_mm512_set1_ps(AKV_TILE_LENGTH), _mm512_sqrt_ps(squares));
    const __m512 k = _mm512_min_ps(_mm512_set1_ps(most), length); /* the second operand when it is NaN */
    *scale = _mm512_maskz_div_ps(some, largest, k);
    return _mm512_maskz_div_ps(some, k, largest);
}

/* Two vectors of numbers as pairs of words. */
INLINE __m512i pairs(__m512 even, __m512 odd)
{
    const __m512i a = _mm512_cvtps_epi32(even), b = _mm512_cvtps_epi32(odd);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
}

static void pack_queries(const float *x, uint32_t rows, uint32_t dim, int16_t *out, float *scale)
{
    const uint32_t width = dim + dim % 2;
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = x + (size_t)r * dim;
        __m512i top = _mm512_setzero_si512();
        for (uint32_t i = 0; i < dim; i += 16)
            top = _mm512_max_epu32(top, size_of(_mm512_maskz_loadu_ps(lanes(i, dim), row + i)));
        const __m512 largest = _mm512_castsi512_ps(_mm512_set1_epi32((int)_mm512_reduce_max_epu32(top)));
        __m512 squares = _mm512_setzero_ps(), units;
        for (uint32_t i = 0; i < dim; i += 16) {
            const __m512 v = _mm512_div_ps(_mm512_maskz_loadu_ps(lanes(i, dim), row + i), largest);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const __m512 k = units_of(largest, _mm512_set1_ps(_mm512_reduce_add_ps(squares)), AKV_TILE_MOST, &units);
        scale[r] = _mm512_cvtss_f32(units);
        for (uint32_t i = 0; i < width; i += 16) {
            const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes(i, dim), row + i), k));
            _mm256_mask_storeu_epi16(out + (size_t)r * width + i, lanes(i, width), _mm512_cvtepi32_epi16(v));
        }
    }
}

static void pack_keys(const float *columns, uint32_t dim, int16_t *out, float *scale)
{
    for (uint32_t t = 0; t < W; t += 16) {
        const float *x = columns + t;
        __m512i top = _mm512_setzero_si512();
        for (uint32_t i = 0; i < dim; i++)
            top = _mm512_max_epu32(top, size_of(_mm512_loadu_ps(x + (size_t)i * W)));
        const __m512 largest = _mm512_castsi512_ps(top), inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), largest);
        __m512 squares = _mm512_setzero_ps(), units;
        for (uint32_t i = 0; i < dim; i++) {
            const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + (size_t)i * W), inverse);
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const __m512 k = units_of(largest, squares, AKV_TILE_MOST, &units);
        _mm512_storeu_ps(scale + t, units);
        for (uint32_t i = 0; i < dim; i += 2) {
            const __m512 even = _mm512_mul_ps(_mm512_loadu_ps(x + (size_t)i * W), k);
            const __m512 odd = i + 1 < dim ? _mm512_mul_ps(_mm512_loadu_ps(x + (size_t)(i + 1) * W), k) : _mm512_setzero_ps();
            _mm512_storeu_si512(out + ((size_t)i / 2 * W + t) * 2, pairs(even, odd));
        }
    }
}

/* R rows (6 or 1) of dots: 24 sums, 4 vectors of keys. */
#  define DOTS(R)                                                                                                              \
      do {                                                                                                                     \
          __m512i acc[R][4];                                                                                                   \
          UNROLLED                                                                                                             \
          for (uint32_t k = 0; k < R; k++)                                                                                     \
              acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = _mm512_setzero_si512();                                          \
          for (uint32_t i = 0; i < halves; i++) {                                                                              \
              const int16_t *c = keys + (size_t)i * 2 * W;                                                                     \
              const __m512i c0 = _mm512_loadu_si512(c), c1 = _mm512_loadu_si512(c + 32), c2 = _mm512_loadu_si512(c + 64),      \
                            c3 = _mm512_loadu_si512(c + 96);                                                                   \
              UNROLLED                                                                                                         \
              for (uint32_t k = 0; k < R; k++) {                                                                               \
                  int32_t two;                                                                                                 \
                  memcpy(&two, queries + ((size_t)(r + k) * halves + i) * 2, sizeof two);                                      \
                  const __m512i q = _mm512_set1_epi32(two);                                                                    \
                  dot_words(&acc[k][0], q, c0);                                                                                \
                  dot_words(&acc[k][1], q, c1);                                                                                \
                  dot_words(&acc[k][2], q, c2);                                                                                \
                  dot_words(&acc[k][3], q, c3);                                                                                \
              }                                                                                                                \
          }                                                                                                                    \
          UNROLLED                                                                                                             \
          for (uint32_t k = 0; k < R; k++)                                                                                     \
              UNROLLED                                                                                                         \
              for (uint32_t v = 0; v < 4; v++)                                                                                 \
                  _mm512_storeu_ps(logits + (size_t)(r + k) * W + 16 * v,                                                      \
                                   _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[k][v]), _mm512_set1_ps(query_scale[r + k])), \
                                                 _mm512_loadu_ps(key_scale + 16 * v)));                                        \
      } while (0)

static void dots(const int16_t *queries, const float *query_scale, uint32_t rows, uint32_t dim, const int16_t *keys, const float *key_scale,
                 float *logits)
{
    const uint32_t halves = (dim + 1) / 2;
    uint32_t r = 0;
    for (; r + 6 <= rows; r += 6)
        DOTS(6);
    for (; r < rows; r++)
        DOTS(1);
}

/* Tokens are brought to 1 at their largest, then all of them as far up as the longest column allows. */
static void pack_values(const float *x, uint32_t n, uint32_t dim, int16_t *out, float *scale)
{
    float factor[W];
    __m512 longest = _mm512_setzero_ps();
    for (uint32_t t = 0; t < W; t++) {
        __m512i top = _mm512_setzero_si512();
        for (uint32_t i = 0; t < n && i < dim; i += 16)
            top = _mm512_max_epu32(top, size_of(_mm512_maskz_loadu_ps(lanes(i, dim), x + (size_t)t * dim + i)));
        const uint32_t bits = _mm512_reduce_max_epu32(top);
        memcpy(&scale[t], &bits, sizeof bits);
        scale[t] = isfinite(scale[t]) ? scale[t] : NAN;
        factor[t] = scale[t] < NOTHING ? 0.0f : 1.0f / scale[t];
    }
    for (uint32_t i = 0; i < dim; i += 16) {
        __m512 squares = _mm512_setzero_ps();
        for (uint32_t t = 0; t < n; t++) {
            const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes(i, dim), x + (size_t)t * dim + i), _mm512_set1_ps(factor[t]));
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        longest = _mm512_max_ps(squares, longest); /* the second operand when the first is NaN: that token's units are NaN already */
    }
    const float square = _mm512_reduce_max_ps(longest), most = square == 0.0f ? 0.0f : AKV_TILE_COLUMN / sqrtf(square);
    const float k = most < AKV_TILE_MOST ? most : AKV_TILE_MOST;
    for (uint32_t t = 0; t < W; t++) {
        scale[t] = scale[t] < NOTHING || k == 0.0f ? scale[t] * 0.0f : scale[t] / k; /* NaN stays */
        factor[t] *= k;
    }
    for (uint32_t t = 0; t < W; t += 2)
        for (uint32_t i = 0; i < dim; i += 16) {
            const __mmask16 live = lanes(i, dim), live0 = t < n ? live : 0, live1 = t + 1 < n ? live : 0;
            const __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(live0, x + (size_t)t * dim + i), _mm512_set1_ps(factor[t]));
            const __m512 b = _mm512_mul_ps(_mm512_maskz_loadu_ps(live1, x + (size_t)(t + 1) * dim + i), _mm512_set1_ps(factor[t + 1]));
            _mm512_mask_storeu_epi32(out + ((size_t)t / 2 * dim + i) * 2, live, pairs(a, b));
        }
}

/* Sums of the lanes of a and of b. */
INLINE void sum_both(__m512 a, __m512 b, float *sum_a, float *sum_b)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); /* a, b, a, b of each quarter */
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(ab), _mm512_extractf32x8_ps(ab, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    *sum_a = _mm_cvtss_f32(two);
    *sum_b = _mm_cvtss_f32(_mm_movehdup_ps(two));
}

/* In three passes, so that no row waits for another's sums, roots and quotients. */
static void weigh(float *logits, uint32_t rows, uint32_t n, const float *max, const float *value_scale, float *sum, float *weight_scale)
{
    float units[AKV_TILE_MOST_WEIGHED], lift[AKV_TILE_MOST_WEIGHED]; /* units: squares, then what weights are multiplied by */
    const __mmask16 live[4] = {lanes(0, n), lanes(16, n), lanes(32, n), lanes(48, n)};
    const __m512 scale[4] = {_mm512_loadu_ps(value_scale), _mm512_loadu_ps(value_scale + 16), _mm512_loadu_ps(value_scale + 32),
                             _mm512_loadu_ps(value_scale + 48)};
    for (uint32_t r = 0; r < rows; r++) {
        float *l = logits + (size_t)r * W;
        const __m512 m = _mm512_set1_ps(max[r]);
        __m512 total = _mm512_setzero_ps(), squares = total;
        UNROLLED
        for (uint32_t v = 0; v < 4; v++) {
            const __m512 e = _mm512_maskz_mov_ps(live[v], exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(l + 16 * v), m)));
            const __m512 w = _mm512_mul_ps(e, scale[v]);
            total = _mm512_add_ps(total, e);
            squares = _mm512_fmadd_ps(w, w, squares);
            _mm512_storeu_ps(l + 16 * v, w);
        }
        sum_both(total, squares, &sum[r], &units[r]);
    }
    for (uint32_t r = 0; r < rows; r++) {
        float *l = logits + (size_t)r * W;
        lift[r] = 1.0f;
        if (!(units[r] < 1e-30f || units[r] > 1e30f)) /* NaN needs nothing; above, squares that vanished are 1e-6 of the sum */
            continue;
        __m512 top = _mm512_loadu_ps(l), squares = _mm512_setzero_ps();
        UNROLLED
        for (uint32_t v = 1; v < 4; v++)
            top = _mm512_max_ps(top, _mm512_loadu_ps(l + 16 * v));
        lift[r] = _mm512_reduce_max_ps(top); /* squares may have vanished or become infinite, weights not */
        units[r] = 0.0f;
        if (!(lift[r] > NOTHING))
            continue;
        const __m512 inverse = _mm512_set1_ps(1.0f / lift[r]);
        UNROLLED
        for (uint32_t v = 0; v < 4; v++) {
            const __m512 w = _mm512_mul_ps(_mm512_loadu_ps(l + 16 * v), inverse);
            squares = _mm512_fmadd_ps(w, w, squares);
            _mm512_storeu_ps(l + 16 * v, w);
        }
        units[r] = _mm512_reduce_add_ps(squares);
    }
    for (uint32_t r = 0; r < rows; r += 16) {
        const __mmask16 of = lanes(r, rows);
        const __m512 squares = _mm512_maskz_loadu_ps(of, units + r), root = _mm512_sqrt_ps(squares);
        const __mmask16 some = _mm512_cmp_ps_mask(squares, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        const __m512 unit = _mm512_mul_ps(_mm512_mul_ps(root, _mm512_set1_ps(1.0f / AKV_TILE_MOST)), _mm512_maskz_loadu_ps(of, lift + r));
        _mm512_mask_storeu_ps(weight_scale + r, of, _mm512_maskz_mov_ps(some, unit));
        _mm512_mask_storeu_ps(units + r, of, _mm512_maskz_div_ps(some, _mm512_set1_ps(AKV_TILE_MOST), root));
    }
    for (uint32_t r = 0; r < rows; r++) {
        float *l = logits + (size_t)r * W;
        const __m512 k = _mm512_set1_ps(units[r]);
        UNROLLED
        for (uint32_t v = 0; v < 4; v++) {
            const __m512i w = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(l + 16 * v), k));
            _mm256_storeu_si256((__m256i *)(void *)l + v, _mm512_cvtepi32_epi16(w));
        }
    }
}

/* R rows (6 or 1) of sums over 64 coordinates from i on. */
#  define SUMS(R)                                                                                                              \
      do {                                                                                                                     \
          __m512i acc[R][4];                                                                                                   \
          UNROLLED                                                                                                             \
          for (uint32_t k = 0; k < R; k++)                                                                                     \
              acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = _mm512_setzero_si512();                                          \
          for (uint32_t t = 0; t < W / 2; t++) {                                                                               \
              const int16_t *c = values + ((size_t)t * dim + i) * 2;                                                           \
              const __m512i c0 = _mm512_maskz_loadu_epi32(mask[0], c), c1 = _mm512_maskz_loadu_epi32(mask[1], c + 32),         \
                            c2 = _mm512_maskz_loadu_epi32(mask[2], c + 64), c3 = _mm512_maskz_loadu_epi32(mask[3], c + 96);    \
              UNROLLED                                                                                                         \
              for (uint32_t k = 0; k < R; k++) {                                                                               \
                  int32_t two;                                                                                                 \
                  memcpy(&two, weights + (size_t)(r + k) * W + t, sizeof two);                                                 \
                  const __m512i w = _mm512_set1_epi32(two);                                                                    \
                  dot_words(&acc[k][0], w, c0);                                                                                \
                  dot_words(&acc[k][1], w, c1);                                                                                \
                  dot_words(&acc[k][2], w, c2);                                                                                \
                  dot_words(&acc[k][3], w, c3);                                                                                \
              }                                                                                                                \
          }                                                                                                                    \
          UNROLLED                                                                                                             \
          for (uint32_t k = 0; k < R; k++)                                                                                     \
              UNROLLED                                                                                                         \
              for (uint32_t v = 0; v < 4; v++) {                                                                               \
                  float *to = out + (size_t)(r + k) * dim + i + 16 * v;                                                        \
                  const __m512 old = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask[v], to), _mm512_set1_ps(shrink[r + k]));         \
                  const __m512 more = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[k][v]), _mm512_set1_ps(weight_scale[r + k]), old); \
                  _mm512_mask_storeu_ps(to, mask[v], more);                                                                    \
              }                                                                                                                \
      } while (0)

static void sums(const float *weights, const float *weight_scale, const float *shrink, uint32_t rows, const int16_t *values, uint32_t dim,
                 float *out)
{
    uint32_t r = 0;
    for (; r + 6 <= rows; r += 6)
        for (uint32_t i = 0; i < dim; i += 64) {
            const __mmask16 mask[4] = {lanes(i, dim), lanes(i + 16, dim), lanes(i + 32, dim), lanes(i + 48, dim)};
            SUMS(6);
        }
    for (; r < rows; r++)
        for (uint32_t i = 0; i < dim; i += 64) {
            const __mmask16 mask[4] = {lanes(i, dim), lanes(i + 16, dim), lanes(i + 32, dim), lanes(i + 48, dim)};
            SUMS(1);
        }
}

static const akv_tile_products products = {pack_queries, pack_keys, dots, pack_values, weigh, sums};
const akv_tile_kernels akv_tile_avx512 = {"avx512", anchor_row, turn, &products};
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_tile_avx512; /* a translation unit must not be empty */
#endif
