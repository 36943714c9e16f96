/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack_groups.h - residual groups of the private form (packed.h): how a level's codes become tiles, and the writing of
 * a span.
 */
#ifndef AKV_CUDA_PACK_GROUPS_H
#define AKV_CUDA_PACK_GROUPS_H

#include "core/ladder.h"
#include "cuda/packed.h"

/* Most planes of a key level: 4-bit coordinates have eight each unless they fill tiles. */
#define AKV_PACK_MAX_PLANES (2 * AKV_PACK_MAX_DIM + 16 * 8)
#define AKV_PACK_MAX_DIM 256

/* One level of the keys: which bit of which list entry each plane is, and how many list entries are in 4-bit tiles. */
typedef struct akv_key_plan {
    akv_key_level level;
    uint32_t planes; /* without filling */
    uint32_t in_four;
    uint16_t entry[AKV_PACK_MAX_PLANES];
    uint8_t bit[AKV_PACK_MAX_PLANES];
} akv_key_plan;

/* One level of the values: which bit of which list entry each row of its tiles of bits is, 0xffff where filled up. */
typedef struct akv_value_plan {
    akv_value_level level;
    uint16_t entry[AKV_PACK_MAX_PLANES];
    uint8_t bit[AKV_PACK_MAX_PLANES];
} akv_value_plan;

/* All levels of one head. */
typedef struct akv_head_plan {
    uint32_t num_levels, key_tiles, value_tiles;
    akv_level_list list[AKV_SIDES][AKV_PACK_MAX_LEVELS];
    akv_key_plan keys[AKV_PACK_MAX_LEVELS];
    akv_value_plan values[AKV_PACK_MAX_LEVELS];
} akv_head_plan;

void akv_plan_head(const akv_ladder_view v[AKV_SIDES], akv_head_plan *out);

/* Places of span number `index` behind `at`, and the shares of its groups; returns where the next span begins. */
uint64_t akv_place_span(const akv_head_plan *plan, const akv_ladder_view v[AKV_SIDES], uint64_t begin, uint32_t n,
                        uint32_t span_tokens, uint64_t at, akv_packed_span *span);

/* Scratch of akv_write_span. */
size_t akv_span_scratch_bytes(void);
void akv_write_span(const akv_head_plan *plan, const akv_ladder_view v[AKV_SIDES], uint64_t num_tokens, uint64_t begin,
                    uint32_t n, uint32_t span_tokens, const akv_packed_span *span, uint8_t *out, void *scratch);

/* Tables of one head for the kernels. */
void akv_write_key_tables(const akv_head_plan *plan, const akv_ladder_view *v, akv_key_level *levels,
                          akv_key_plane *planes, float *offsets);
void akv_write_value_tables(const akv_head_plan *plan, const akv_ladder_view *v, akv_value_level *levels,
                            akv_value_plane *planes);

#endif
