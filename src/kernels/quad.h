/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad.h - the contract of the kernels that attend to the LADDER coding, four query rows (a quad) at a time. As in
 * kernels.h nothing here allocates, locks or logs, and buffers do not overlap.
 *
 * Where many numbers of few bits are summed, the sums are whole numbers: anchors are bytes and levels whole steps already;
 * queries, turned anchors and softmax weights are rounded to 16 bits first (docs/numerics.md derives what that costs:
 * about as much as keys stored in f16). So those results are the same bits in every variant and in any order. What is
 * float differs between variants by rounding; each variant gives the same bits on every call.
 *
 * A block is AKV_BLOCK_TOKENS tokens; its logits (later: weights) are [slots][4 rows] float. The token at place t of the
 * block has slot akv_quad_slot(t): inside every 16 tokens a 4 x 4 transpose, which is how in-register transposes of four
 * rows of 16 tokens leave them.
 */
#ifndef AKV_QUAD_H
#define AKV_QUAD_H

#include "core/base.h"
#include "core/ladder.h"
#include "kernels/cpu.h"

#define AKV_QUAD_ROWS 4u
#define AKV_QUAD_TILE 64u       /* tokens whose positions count from one base */
#define AKV_QUAD_LANES 32u      /* planes and coordinates are padded to a multiple of this */
#define AKV_QUAD_MAX_DIM 512u
#define AKV_QUAD_SPARE_SLOTS 32u
#define AKV_QUAD_TURN_BITS 14   /* cosine and sine of the tile's offsets are whole multiples of 2^-14 */
#define AKV_QUAD_SLOW 0.19      /* rad over 31.5 positions: the series' next terms are below 7e-8 */
#define AKV_QUAD_CODE_MAX 32639 /* of a query in a level's coordinates: its high byte must fit -128..127 after rounding */

static inline uint32_t akv_quad_slot(uint32_t t)
{
    return (t & ~15u) | (t & 3u) << 2 | (t >> 2 & 3u);
}

/* The lines of `bytes` at p towards the second-level cache. */
static inline void akv_quad_fetch(const void *p, uint32_t bytes)
{
#if defined(__GNUC__)
    for (uint32_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
#else
    (void)p, (void)bytes;
#endif
}

/* A weight of 16 bits as one of 8, in steps of 257. */
static inline uint32_t akv_quad_weight8(uint32_t w)
{
    return (w - (w >> 8) + 128) >> 8;
}

/* Fours of coordinates of a level: each width's number rounded up. */
static inline uint32_t akv_quad_fours(const uint32_t by_width[3])
{
    return (by_width[0] + 3) / 4 + (by_width[1] + 3) / 4 + (by_width[2] + 3) / 4;
}

/* Geometry of the key anchors. Padded numbers are multiples of AKV_QUAD_LANES. */
typedef struct akv_quad_shape {
    uint32_t dim;
    uint32_t planes;        /* rotary_dim / 2 */
    uint32_t padded_planes;
    uint32_t rest;          /* dim - rotary_dim */
    uint32_t padded_rest;
    akv_rope_style style;
} akv_quad_shape;

static inline akv_quad_shape akv_quad_shape_of(uint32_t dim, uint32_t rotary_dim, akv_rope_style style)
{
    akv_quad_shape s = {dim, rotary_dim / 2, (uint32_t)akv_round_up(rotary_dim / 2, AKV_QUAD_LANES), dim - rotary_dim,
                        (uint32_t)akv_round_up(dim - rotary_dim, AKV_QUAD_LANES), style};
    return s;
}

/* Coordinates of a turned anchor, padding included: first ones and second ones of 32 planes after each other, then the rest. */
static inline uint32_t akv_quad_width(const akv_quad_shape *s)
{
    return 2 * s->padded_planes + s->padded_rest;
}

/* A level of a side as the kernels read it. */
typedef struct akv_quad_level {
    uint32_t by_width[3];
    uint32_t bits;
    uint32_t fours;
} akv_quad_level;

typedef struct akv_quad_kernels {
    const char *isa;

    /*
     * n <= AKV_QUAD_TILE tokens that start at a multiple of 8: anchor numbers, and coefficient x scales[anchor] (layout.h,
     * INDEX and COEFF); up to the next multiple of 16, anchor 0 and weight 0. Reads ceil(n * index_bits / 8) and ceil(n / 2)
     * bytes; index_bits <= 20. Exact.
     */
    void (*unpack_anchors)(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales, uint32_t n,
                           uint32_t *out_anchor, float *out_weight);

    /*
     * The rows turned back by the tile's base, whose cosine and sine are given; these are then turned on by step
     * ([2][padded_planes]: cosine, sine) to the next base. rows is [2][8][padded_planes]: first
     * coordinates (of 8 rows), second ones; y0 = x0 c + x1 s, y1 = x1 c - x0 s. Rows 0..3, counted in steps, are rounded into
     * query16 [padded_planes / 32][2][4][4 rows][8] (four eights of each 32); rows 4..7 go to mean_rows [2][4][padded_planes].
     */
    void (*turn_rows)(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes, int16_t *query16,
                      float *mean_rows);

    /*
     * What the mean key adds: logits[slot of token t] = rest + sum_j a_j cos(d theta_j) + b_j sin(d theta_j), d = t - 31.5,
     * for the 64 tokens of a tile. mean_rows as turn_rows leaves it (a, then b). Planes below `fast` by table, [fast][2][32]: cosine,
     * then sine, of (i + 0.5) theta_j. The others, which hardly turn, by their Taylor series in d / 32: moments is [6][padded_planes],
     * (32 theta_j)^k / k! with the signs of cosine (k = 0, 2, 4) and sine (k = 1, 3, 5), rows in that order, 0 for j < fast and padding.
     * logits [64 slots][4], written.
     */
    void (*mean_logits)(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast, const float *moments,
                        const float *rest, float *logits);

    /*
     * What the anchors add for n <= 64 tokens of a tile: logits[slot of t][r] += scale[r] * weight[t] * whole sum. Anchor
     * coordinates are bytes; x = byte * 256 is turned by turn16[t] ([64][padded_planes / 32][2][32]: cosine, sine in
     * 2^-14), y0 = mulr(x0, c) - mulr(x1, s), y1 = mulr(x0, s) + mulr(x1, c) with mulr(a, b) = (a b + 2^14) >> 15; the rest
     * is byte * 128. query16 covers akv_quad_width() coordinates in the order of turn_rows, the rest as one more part of each 32;
     * the caller's scales see to it that no sum leaves 32 bits. anchors [k][dim], nothing beyond is read; anchor and weight are
     * as unpack_anchors leaves them, and logits up to the next multiple of 16 may be written too. ahead: what will be read soon, fetched
     * into the cache meanwhile, best a few lines at a time (akv_quad_fetch).
     */
    void (*anchor_logits)(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes);

    /*
     * Tokens of a block by level (akv_ladder_sort, but slots instead of places): slots[first[l] .. first[l + 1]) are those of
     * level l >= 1, tokens ascending; those of level 0 are not listed (first[0] = first[1] = 0). levels: first byte of the block in plane 0;
     * n <= AKV_BLOCK_TOKENS; at most 4 planes; first has num_levels + 2 entries; slots has room for AKV_BLOCK_TOKENS and
     * AKV_QUAD_SPARE_SLOTS more, which may be written. Reads ceil(n / 8) bytes of each plane.
     */
    void (*sort_levels)(const uint8_t *levels, uint64_t plane_bytes, uint32_t planes, uint32_t n, uint32_t num_levels,
                        uint16_t *slots, uint32_t *first);

    /* As akv_level_list_of, but width may be left as it is and coord be written up to 32 entries beyond count. coords <= AKV_QUAD_MAX_DIM. */
    void (*list_level)(const uint8_t *row, uint32_t coords, akv_level_list *out);

    /*
     * Queries in a level's coordinates, z [coords][4 rows], times the unit of each width, rounded to what code_dots reads: query,
     * bias, scale (NaN when a row is not finite). The largest of a row becomes AKV_QUAD_CODE_MAX; in coordinates of one bit, which are
     * known to a third of themselves only, multiples of 256 are enough.
     */
    void (*quantise_level)(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale);

    /*
     * A run of n key residuals of one level (layout.h): logits[slots[i]][r] += gain_i * scale[r] * sum_c query_c * step_c.
     * query: [fours][2][4 rows][4] signed bytes: query = 256 * first + second, padding 0, second 0 in coordinates of one bit. bias:
     * [2][4 rows], minus the sum of query * the largest step of its width. Reads the run's bytes only.
     */
    void (*code_dots)(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits);

    /*
     * A run of n value residuals: sums[four][r][c][p], added up over p, grows by the sum over tokens of w_i * step of coordinate c of
     * the four, w_i = gain_i * weights[slots[i]][r] rounded to 16 bits of the run's largest, for coordinates of one bit on to 8
     * (akv_quad_weight8). scratch has room for 24 KiB.
     */
    void (*code_sums)(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums);

    /*
     * Sums of a level to their coordinates: z[coord][r] += unit of its width * the sum over p of sums[four][r][c][p], where the
     * coordinate is number c of the four.
     */
    void (*place_sums)(const float *sums, const akv_level_list *list, float *z);

    /* max[r] := the largest of it and all x[i][r] (NaN ignored). n slots, a multiple of 16. */
    void (*row_max)(const float *x, uint32_t n, float *max);

    /* x[i][r] := exp(x[i][r] - max[r]) as akv_kernels.exp_sum, added to sum[r]. n slots, a multiple of 16. */
    void (*exp_sum)(float *x, uint32_t n, const float *max, float *sum);

    /* hist[anchor[t]][r] += weight[t] * weights[slot of t][r], n <= 64 tokens of a tile. */
    void (*histogram)(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist);

    /* out[r][i] += sum_a w[a][r] * rows[a][i]: w [n][4], rows [n][dim] bytes, out [4][dim]. */
    void (*bytes_sum)(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out);

    /* out[a][r] = sum_i x[r][i] * rows[a][i]: x [4][dim]. */
    void (*bytes_dot)(const float *x, const int8_t *rows, uint32_t n, uint32_t dim, float *out);

    /* out[r][t] = sum_i x[r][i] * columns[i][t], t < 64: x [rows][dim], columns [dim][64], out [rows][64]. */
    void (*tile_dots)(const float *x, uint32_t rows, uint32_t dim, const float *columns, float *out);

    /* out[r][i] += sum_t w[r * stride + t] * x[t][i]: x [n][dim], out [rows][dim]. */
    void (*tile_sums)(const float *w, size_t stride, uint32_t rows, const float *x, uint32_t n, uint32_t dim, float *out);

    const struct akv_quad_slow *slow; /* NULL: this variant does without */
} akv_quad_kernels;

/*
 * For keys of 64 half-split planes and nothing else, of which the upper 32 turn so little over a window of some thousand tokens that what
 * they add to a logit is a polynomial in the token's place u in the window, -1 <= u <= 1: one per anchor and row and window instead of
 * a turned anchor per token. u = 0 is the window's middle. The lower 32 planes go as in akv_quad_kernels.
 */
#define AKV_QUAD_SLOW_PLANES 32u
#define AKV_QUAD_SLOW_TERMS 8u
typedef struct akv_quad_slow {
    /*
     * Queries [4][128] times magnitude, against anchors' units and the mean key (bf16, [128] each). rows [2][2][8][32], lower planes, then upper
     * ones, each as turn_rows takes them. Lower ones: queries in units, counted in steps as fine as 16 bits and the sums of
     * anchor_logits allow; what goes with the mean, brought to the middle of a tile by the cosines and sines middle [2][64]. Upper ones:
     * the same steps, the mean not brought anywhere. scale [4]: a step / 128; NaN where a row is not finite.
     */
    void (*rows)(const float *query, float magnitude, const uint16_t *units, const uint16_t *mean, const float *middle, float *rows,
                 float *scale);

    /*
     * The polynomials of a window: n anchors of 128 bytes; upper as rows leaves it; phase [2][32] cosines, sines of the window's
     * middle; series [32][8]: by which a plane's cosine (even) and sine (odd) enter each power; largest [8]: their largest magnitudes.
     * terms [n][2][4 rows][4]: powers 0 to 3, then 4 to 7, in the units of the whole sums of anchor_logits; what multiplies the bytes is
     * rounded to 16 bits for each row and power. mean_terms [8][4 rows], what the mean key adds.
     */
    void (*terms)(const float *upper, const float *phase, const float *series, const float *largest, const int8_t *anchors, uint32_t n,
                  float *terms, float *mean_terms);

    /* mean_logits of a tile whose middle is at u = middle, a token being a 32nd of `half`; mean_rows [2][4][32], moments [6][64]. */
    void (*mean_logits)(const float *mean_rows, const float *table, uint32_t fast, const float *moments, const float *mean_terms,
                        float middle, float half, float *logits);

    /* anchor_logits of a tile; token t is at u = first + t * step. query16 covers the lower planes. */
    void (*anchor_logits)(const int8_t *anchors, const int16_t *turn16, const int16_t *query16, const uint32_t *anchor,
                          const float *weight, const float *scale, uint32_t n, const float *terms, float first, float step,
                          float *logits, const void *ahead, uint32_t ahead_bytes);
} akv_quad_slow;

#define AKV_QUADS(isa, level) extern const akv_quad_kernels akv_quad_##isa;
#include "kernels/kernels.def"

/* The fastest variant below the cap (cpu.h). */
const akv_quad_kernels *akv_quad_best(void);

#endif
