/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder.h - reading the LADDER coding: typed views, scalar grids, level tables unpacked into lists of coordinates. Shared
 * by the writer, attention and decoding.
 */
#ifndef AKV_LADDER_H
#define AKV_LADDER_H

#include "core/levels.h"
#include "core/segment.h"
#include "core/sizes.h"

#define AKV_COEFF_STEP (2.0f / 7.0f)
#define AKV_COEFF_SELF (-8) /* this token is the anchor */
#define AKV_GAIN_CODES 16

/*
 * Lloyd-Max quantisers of the unit Gaussian as whole multiples of a unit, so that attention can sum levels in integers.
 * Distortion is that of the published real levels to four digits (0.11748 at 2 bits, 0.009506 against 0.009501 at 4).
 */
#define AKV_LEVEL_UNIT1 0.7979f
#define AKV_LEVEL_UNIT2 0.15104f
#define AKV_LEVEL_UNIT4 0.02622f
static const int8_t akv_level_steps1[2] = {-1, 1};
static const int8_t akv_level_steps2[4] = {-10, -3, 3, 10};
static const int8_t akv_level_steps4[16] = {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104};

/* Level of an n-bit number, n = 1, 2, 4. */
static inline float akv_level_value(uint32_t number, uint32_t width)
{
    return width == 1   ? AKV_LEVEL_UNIT1 * (float)akv_level_steps1[number]
           : width == 2 ? AKV_LEVEL_UNIT2 * (float)akv_level_steps2[number]
                        : AKV_LEVEL_UNIT4 * (float)akv_level_steps4[number];
}

/* Distortion by table entry: 0, 1, 2, 4 bits. */
static const double akv_entry_distortion[4] = {1.0, 0.3634, 0.1175, 0.009506};
static const uint8_t akv_entry_bits[4] = {0, 1, 2, 4};

/* OR a number of 1, 2 or 4 bits into zeroed code bytes. */
static inline void akv_put_bits(uint8_t *out, uint64_t bit, uint32_t value)
{
    out[bit >> 3] |= (uint8_t)(value << (bit & 7)); /* may straddle a byte in a group that is not full */
    uint32_t high = (value << (bit & 7)) >> 8;
    if (high != 0)
        out[(bit >> 3) + 1] |= (uint8_t)high;
}

static inline float akv_gain_value(uint32_t code)
{
    static const float third[3] = {1.0f, 1.2599210f, 1.5874011f};
    uint32_t c = code + 1; /* 2^((code - 8) / 3) = 2^((code + 1) / 3 - 3) */
    return third[c % 3] * (float)(1u << (c / 3)) * 0.125f;
}

typedef struct akv_ladder_view {
    uint32_t dim;
    uint32_t basis_dim;
    uint32_t basis_cols;
    uint32_t num_coords;
    uint32_t num_levels;
    uint32_t planes;
    uint32_t index_bits;
    uint32_t num_anchors;
    uint64_t plane_bytes;
    const int8_t *anchors;         /* [k, dim] */
    const uint16_t *anchor_scales; /* f16 [k] */
    const uint16_t *units;         /* bf16 [dim] */
    const uint8_t *index;
    const uint8_t *coeff;
    const uint8_t *levels;         /* [planes, plane_bytes] */
    const int8_t *basis;           /* [cols, basis_dim] */
    const float *basis_scales;     /* [cols] */
    const uint16_t *sigmas;        /* bf16 [coords] */
    const uint8_t *tables;         /* [levels, table_bytes] */
    const uint64_t *offsets;       /* of the (head, side): stride 2 over blocks */
    const uint8_t *codes;          /* of the whole segment */
} akv_ladder_view;

static inline akv_ladder_view akv_view_ladder(const akv_segment *segment, int side, uint32_t head)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t S = h->num_tokens;
    akv_ladder_view v;
    v.dim = h->head_dim[side];
    v.basis_dim = h->basis_dim[side];
    v.basis_cols = h->basis_cols[side];
    v.num_coords = akv_num_coords(h, side);
    v.num_levels = h->num_levels;
    v.planes = akv_level_planes(h->num_levels);
    v.index_bits = h->index_bits;
    v.num_anchors = h->num_anchors;
    v.plane_bytes = akv_div_up(S, 8);
    v.anchors = (const int8_t *)akv_section_of(segment, AKV_SEC_ANCHORS + side) + (uint64_t)head * v.num_anchors * v.dim;
    v.anchor_scales = (const uint16_t *)akv_section_of(segment, AKV_SEC_ANCHOR_SCALES + side) + (uint64_t)head * v.num_anchors;
    v.units = (const uint16_t *)akv_section_of(segment, AKV_SEC_UNITS + side) + (uint64_t)head * v.dim;
    v.index = (const uint8_t *)akv_section_of(segment, AKV_SEC_INDEX + side) + head * akv_div_up(S * v.index_bits, 8);
    v.coeff = (const uint8_t *)akv_section_of(segment, AKV_SEC_COEFF + side) + head * akv_div_up(S, 2);
    v.levels = (const uint8_t *)akv_section_of(segment, AKV_SEC_LEVELS + side) +
               (uint64_t)head * v.planes * v.plane_bytes;
    v.basis = (const int8_t *)akv_section_of(segment, AKV_SEC_BASIS + side) + (uint64_t)head * v.basis_cols * v.basis_dim;
    v.basis_scales = (const float *)akv_section_of(segment, AKV_SEC_BASIS_SCALES + side) + (uint64_t)head * v.basis_cols;
    v.sigmas = (const uint16_t *)akv_section_of(segment, AKV_SEC_SIGMAS + side) + (uint64_t)head * v.num_coords;
    v.tables = (const uint8_t *)akv_section_of(segment, AKV_SEC_TABLES + side) +
               (uint64_t)head * v.num_levels * akv_div_up(v.num_coords, 4);
    v.offsets = (const uint64_t *)akv_section_of(segment, AKV_SEC_RANKS) + head * akv_div_up(S, AKV_BLOCK_TOKENS) * 2 + side;
    v.codes = akv_section_of(segment, AKV_SEC_CODES);
    return v;
}

static inline uint32_t akv_ladder_index(const akv_ladder_view *v, uint64_t token)
{
    uint64_t bit = token * v->index_bits;
    uint32_t word;
    memcpy(&word, v->index + (bit >> 3), 4);
    return (word >> (bit & 7)) & ((1u << v->index_bits) - 1u);
}

static inline int akv_ladder_coeff(const akv_ladder_view *v, uint64_t token)
{
    uint32_t nibble = (v->coeff[token >> 1] >> ((token & 1) * 4)) & 15u;
    return (int)(nibble ^ 8u) - 8;
}

/* Coefficient times the anchor's scale: with the coordinate's unit, what multiplies the anchor's bytes. */
static inline float akv_ladder_weight(const akv_ladder_view *v, uint64_t token, uint32_t anchor)
{
    int c = akv_ladder_coeff(v, token);
    float gamma = c == AKV_COEFF_SELF ? 1.0f : (float)c * AKV_COEFF_STEP;
    return gamma * akv_f16_to_f32(v->anchor_scales[anchor]);
}

/* The coordinates of one level that have bits, in code order: those of 4 bits, then of 2, then of 1. */
typedef struct akv_level_list {
    uint32_t count;
    uint32_t bits;        /* per residual, all coordinates */
    uint32_t by_width[3]; /* how many have 4, 2, 1 bits */
    uint16_t coord[AKV_MAX_HEAD_DIM];
    uint8_t width[AKV_MAX_HEAD_DIM];
} akv_level_list;

/* row: the level's table, 2 bits a coordinate. */
static inline void akv_level_list_of(const uint8_t *row, uint32_t num_coords, akv_level_list *out)
{
    out->count = 0;
    out->bits = 0;
    uint16_t coords[4][AKV_MAX_HEAD_DIM]; /* by table entry */
    uint32_t count[4] = {0};
    for (uint32_t c = 0; c < num_coords; c++) {
        const uint32_t entry = (row[c / 4] >> (c % 4 * 2)) & 3u;
        coords[entry][count[entry]++] = (uint16_t)c;
    }
    for (uint32_t i = 0; i < 3; i++) {
        const uint32_t width = 4u >> i, n = count[3 - i];
        memcpy(out->coord + out->count, coords[3 - i], n * sizeof *out->coord);
        memset(out->width + out->count, (int)width, n);
        out->by_width[i] = n;
        out->count += n;
        out->bits += n * width;
    }
}

static inline const uint8_t *akv_level_table(const akv_ladder_view *v, uint32_t level)
{
    return v->tables + (level - 1) * akv_div_up(v->num_coords, 4);
}

static inline void akv_ladder_list(const akv_ladder_view *v, uint32_t level, akv_level_list *out)
{
    akv_level_list_of(akv_level_table(v, level), v->num_coords, out);
}

/* Bytes of a run of n residuals of `bits` bits each: gains, full groups, the last group. */
static inline uint64_t akv_run_bytes(uint64_t n, uint32_t bits)
{
    uint64_t full = n / AKV_GROUP_LANES, rest = n % AKV_GROUP_LANES;
    return (n + 1) / 2 + full * (2 * (uint64_t)bits) + (rest * bits + 7) / 8;
}

/* Tokens of a block by level: list[first[l] .. first[l + 1]) are the offsets of level l, ascending. first has 17 entries. */
static inline void akv_ladder_sort(const akv_ladder_view *v, uint64_t block, uint32_t n, uint16_t *list, uint32_t *first)
{
    const uint64_t byte0 = block * (AKV_BLOCK_TOKENS / 8);
    uint8_t level[AKV_BLOCK_TOKENS];
    uint32_t count[AKV_MAX_LEVELS + 1] = {0};
    for (uint32_t b = 0; b < (n + 7) / 8; b++) {
        uint32_t end = n - b * 8 < 8 ? n - b * 8 : 8;
        for (uint32_t i = 0; i < end; i++) {
            uint32_t l = 0;
            for (uint32_t p = 0; p < v->planes; p++)
                l |= ((uint32_t)(v->levels[p * v->plane_bytes + byte0 + b] >> i) & 1u) << p;
            level[b * 8 + i] = (uint8_t)l;
            count[l]++;
        }
    }
    uint32_t at[AKV_MAX_LEVELS + 1], sum = 0;
    for (uint32_t l = 0; l <= v->num_levels; l++) {
        first[l] = at[l] = sum;
        sum += count[l];
    }
    first[v->num_levels + 1] = sum;
    for (uint32_t i = 0; i < n; i++)
        list[at[level[i]]++] = (uint16_t)i;
}

#endif
