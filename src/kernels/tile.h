/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tile.h - the contract of the kernels for many query rows at once (attn/tiles.c): 64 tokens of a compressed segment are rebuilt
 * once and used for all rows. As in kernels.h nothing here allocates, locks or logs, and buffers do not overlap.
 *
 * A tile lies either token by token, [64][dim], or turned over, [dim][64].
 */
#ifndef AKV_TILE_H
#define AKV_TILE_H

#include "core/base.h"
#include "kernels/cpu.h"

#define AKV_TILE_WIDTH 64u
/*
 * Whole numbers of 16 bits: a vector is scaled so that its length is at most so many units. Two such lengths' product is what a sum of
 * products, and every part of it, can reach (Cauchy and Schwarz): below 2^31 whatever the numbers are. Rounding adds at most half
 * a unit a coordinate (16 to the length at 1024 coordinates).
 */
#define AKV_TILE_LENGTH 46000.0f
#define AKV_TILE_MOST 32700.0f   /* of a number, and of the length of one row's weights in a tile */
#define AKV_TILE_COLUMN 65500.0f /* of the length of one coordinate of a tile's values */
#define AKV_TILE_MOST_WEIGHED 48u

/*
 * The two products of attention over a tile in whole numbers of 16 bits. What rounding costs: docs/numerics.md. A number that is not
 * finite makes all results that it belongs to NaN.
 */
typedef struct akv_tile_products {
    /* rows x dim -> [rows][even dim] of 16 bits, in what has room for rows x dim floats; units of scale[r]. */
    void (*pack_queries)(const float *x, uint32_t rows, uint32_t dim, int16_t *out, float *scale);

    /* [dim][64] -> [pairs of dim][64][2], units of scale[token]. */
    void (*pack_keys)(const float *columns, uint32_t dim, int16_t *out, float *scale);

    /* logits[r][t] = scale[r] * scale[t] * sum over dim of query x key, [rows][64]. */
    void (*dots)(const int16_t *queries, const float *query_scale, uint32_t rows, uint32_t dim, const int16_t *keys, const float *key_scale,
                 float *logits);

    /* [n <= 64][dim] -> [32 pairs of tokens][dim][2], 0 from token n on; units of scale[token], [64]. */
    void (*pack_values)(const float *x, uint32_t n, uint32_t dim, int16_t *out, float *scale);

    /*
     * For rows <= AKV_TILE_MOST_WEIGHED rows of logits [rows][64]: exp(logits[t] - max[r]) for t < n <= 64, whose sum is sum[r], times
     * value_scale[t], -> 64 whole numbers in place (the first 128 bytes of the row), 0 from n on; units of weight_scale[r]. max[r]
     * is finite, no logit above it.
     */
    void (*weigh)(float *logits, uint32_t rows, uint32_t n, const float *max, const float *value_scale, float *sum, float *weight_scale);

    /* out[r][i] = shrink[r] * out[r][i] + weight_scale[r] * sum over 64 tokens; rows of weights as weigh leaves them. */
    void (*sums)(const float *weights, const float *weight_scale, const float *shrink, uint32_t rows, const int16_t *values, uint32_t dim,
                 float *out);
} akv_tile_products;

typedef struct akv_tile_kernels {
    const char *isa;

    /* out[i] = mean[i] + weight * units[i] * a[i]; mean NULL: 0. */
    void (*anchor_row)(const int8_t *a, float weight, const float *units, const float *mean, uint32_t dim, float *out);

    /*
     * A turned-over tile of consecutive positions, turned forward: plane j, the rows first[j] and second[j] of keys, at token t by
     * the angle whose cosine and sine are base[0][j], base[1][j], and by that of table[j][0][t], table[j][1][t] (cosines, sines).
     */
    void (*turn)(float *keys, uint32_t planes, const uint16_t *first, const uint16_t *second, const float *base_cosine,
                 const float *base_sine, const float *table);

    const akv_tile_products *products; /* NULL: none that is faster than the products in f32 of quad.h */
} akv_tile_kernels;

#define AKV_TILES(isa, level) extern const akv_tile_kernels akv_tile_##isa;
#include "kernels/kernels.def"

/* The fastest variant below the cap (cpu.h). */
const akv_tile_kernels *akv_tile_best(void);

#endif
