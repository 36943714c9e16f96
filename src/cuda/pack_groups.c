/* SPDX-License-Identifier: Apache-2.0 */
/* pack_groups.c - residual groups of the private form; see packed.h. */
#include "cuda/pack_groups.h"

/* -------------------------------------------------------------------------------------------------- levels to tiles */

static akv_key_plan plan_keys(const akv_level_list *list)
{
    akv_key_plan k;
    const uint32_t n4 = list->by_width[0], rest = n4 % 32;
    memset(&k, 0, sizeof k);
    k.level.four =
        (uint16_t)(n4 / 32 + (rest > 16)); /* half a tile costs as much as 16 coordinates in bits of their own */
    k.in_four = k.level.four * 32u < n4 ? k.level.four * 32u : n4;
    for (uint32_t e = k.in_four; e < list->count; e++)
        for (uint32_t b = 0; b < (list->width[e] == 4 ? 8u : list->width[e]); b++) {
            k.entry[k.planes] = (uint16_t)e;
            k.bit[k.planes++] = (uint8_t)b;
        }
    k.level.units = (uint16_t)((k.planes + 15) / 16);
    k.level.group_bytes = 32u * k.level.units + 256u * k.level.four;
    return k;
}

static akv_value_plan plan_values(const akv_level_list *list)
{
    akv_value_plan v;
    const uint32_t n4 = list->by_width[0], n2 = list->by_width[1], n1 = list->by_width[2];
    memset(&v, 0, sizeof v);
    memset(v.entry, 0xff, sizeof v.entry);
    v.level.four = (uint16_t)((n4 + 15) / 16);
    v.level.tiles = (uint16_t)((2 * n2 + n1 + 15) / 16);
    v.level.group_bytes = (v.level.tiles + 1u) / 2 * 64 + v.level.four * 128u;
    for (uint32_t e = 0; e < n2; e++) /* pairs of rows: r and r + 8 of a tile */
        for (uint32_t b = 0; b < 2; b++) {
            v.entry[e / 8 * 16 + e % 8 + 8 * b] = (uint16_t)(n4 + e);
            v.bit[e / 8 * 16 + e % 8 + 8 * b] = (uint8_t)(1 - b);
        }
    for (uint32_t e = 0; e < n1; e++) {
        const uint32_t place = 2 * n2 + e, pair = place / 2;
        v.entry[pair / 8 * 16 + pair % 8 + 8 * (place % 2)] = (uint16_t)(n4 + n2 + e);
    }
    return v;
}

void akv_plan_head(const akv_ladder_view v[AKV_SIDES], akv_head_plan *out)
{
    out->num_levels = v[0].num_levels;
    out->key_tiles = out->value_tiles = 0;
    for (uint32_t l = 0; l < out->num_levels; l++) {
        for (int side = 0; side < AKV_SIDES; side++)
            akv_ladder_list(&v[side], l + 1, &out->list[side][l]);
        out->keys[l] = plan_keys(&out->list[0][l]);
        out->keys[l].level.first_tile = (uint16_t)out->key_tiles;
        out->keys[l].level.first_plane = out->key_tiles * 32;
        out->key_tiles += (out->keys[l].level.units + 1u) / 2 + out->keys[l].level.four;
        out->values[l] = plan_values(&out->list[1][l]);
        out->values[l].level.first_tile = (uint16_t)out->value_tiles;
        out->value_tiles += (uint32_t)(out->values[l].level.tiles + out->values[l].level.four);
    }
}

/*
 * What a set bit adds, in steps of the coordinate's quantiser; bits of 2-bit codes: akv_pack_plan checks that they add
 * up.
 */
static float bit_weight(uint32_t width, uint32_t bit)
{
    if (width == 4)
        return AKV_LEVEL_UNIT4 * (bit == 7 ? -128.0f : (float)(1u << bit));
    if (width == 2)
        return AKV_LEVEL_UNIT2 * (float)(akv_level_steps2[1u << bit] - akv_level_steps2[0]);
    return AKV_LEVEL_UNIT1 * (float)(akv_level_steps1[1] - akv_level_steps1[0]);
}

/* What a code adds when its bits are 0. */
static float zero_weight(uint32_t width)
{
    return width == 4   ? 0.0f
           : width == 2 ? AKV_LEVEL_UNIT2 * (float)akv_level_steps2[0]
                        : AKV_LEVEL_UNIT1 * (float)akv_level_steps1[0];
}

void akv_write_key_tables(const akv_head_plan *plan, const akv_ladder_view *v, akv_key_level *levels,
                          akv_key_plane *planes, float *offsets)
{
    for (uint32_t l = 0; l < plan->num_levels; l++) {
        const akv_key_plan *k = &plan->keys[l];
        const akv_level_list *list = &plan->list[0][l];
        akv_key_plane *out = planes + k->level.first_plane;
        float *offset = offsets + l * v->num_coords;
        levels[l] = k->level;
        for (uint32_t i = 0; i < k->planes; i++) {
            const uint32_t e = k->entry[i], coord = list->coord[e];
            const float sigma = akv_bf16_to_f32(v->sigmas[coord]);
            const akv_key_plane plane = {sigma * bit_weight(list->width[e], k->bit[i]), coord};
            out[i] = plane;
            offset[coord] = sigma * zero_weight(list->width[e]);
        }
        out += (k->level.units + 1u) / 2 * 32;
        for (uint32_t e = 0; e < k->in_four; e++) {
            const akv_key_plane plane = {akv_bf16_to_f32(v->sigmas[list->coord[e]]) * AKV_LEVEL_UNIT4, list->coord[e]};
            out[e] = plane;
        }
    }
}

void akv_write_value_tables(const akv_head_plan *plan, const akv_ladder_view *v, akv_value_level *levels,
                            akv_value_plane *planes)
{
    for (uint32_t l = 0; l < plan->num_levels; l++) {
        const akv_value_plan *p = &plan->values[l];
        const akv_level_list *list = &plan->list[1][l];
        levels[l] = p->level;
        for (uint32_t i = 0; i < p->level.tiles * 16u; i++, planes++)
            if (p->entry[i] != 0xffff) {
                const uint32_t e = p->entry[i], coord = list->coord[e], width = list->width[e];
                const float sigma = akv_bf16_to_f32(v->sigmas[coord]);
                /* the bit is one of a half's lower eight, a number of 2^-24 .. 2^-17 in fp16 */
                const float unit = (float)(1u << (24 - i / 16 % 2 * 4 - i % 16 / 8));
                const akv_value_plane plane = {sigma * bit_weight(width, p->bit[i]) * unit,
                                               p->bit[i] == width - 1 ? sigma * zero_weight(width) : 0.0f, coord, 0};
                *planes = plane;
            }
        for (uint32_t e = 0; e < p->level.four * 16u; e++, planes++)
            if (e < list->by_width[0]) {
                const akv_value_plane plane = {akv_bf16_to_f32(v->sigmas[list->coord[e]]) * AKV_LEVEL_UNIT4, 0.0f,
                                               list->coord[e], 0};
                *planes = plane;
            }
    }
}

/* ------------------------------------------------------------------------------------------ reading canonical codes */

/* What one token's residual is made of, in the canonical bytes. */
typedef struct residual {
    const uint8_t *group;
    uint8_t size, lane, level, gain;
} residual;

static uint32_t number_at(const residual *r, const akv_level_list *list, uint32_t entry)
{
    const uint32_t n4 = list->by_width[0], n2 = list->by_width[1], width = list->width[entry];
    const uint32_t before = entry < n4        ? 4 * entry
                            : entry < n4 + n2 ? 4 * n4 + 2 * (entry - n4)
                                              : 4 * n4 + 2 * n2 + entry - n4 - n2;
    const uint32_t bit = before * r->size + r->lane * width;
    return (r->group[bit >> 3] >> (bit & 7)) & ((1u << width) - 1u);
}

/* The residuals of one block of 1024 tokens, by token; level 0 where there is none. */
static void read_block(const akv_ladder_view *v, const akv_level_list *lists, uint64_t block, uint32_t n, residual *out)
{
    uint16_t tokens[AKV_BLOCK_TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 2];
    const uint8_t *run = v->codes + v->offsets[block * 2];
    akv_ladder_sort(v, block, n, tokens, first);
    memset(out, 0, n * sizeof *out);
    for (uint32_t l = 1; l <= v->num_levels; l++) {
        const uint32_t count = first[l + 1] - first[l], bits = lists[l - 1].bits;
        if (count == 0)
            continue;
        for (uint32_t i = 0; i < count; i++) {
            residual *r = &out[tokens[first[l] + i]];
            const uint32_t at = i / AKV_GROUP_LANES * AKV_GROUP_LANES;
            r->group = run + (count + 1) / 2 + (uint64_t)(i / AKV_GROUP_LANES) * 2 * bits;
            r->size = (uint8_t)(count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES);
            r->lane = (uint8_t)(i % AKV_GROUP_LANES);
            r->level = (uint8_t)l;
            r->gain = (run[i / 2] >> (i % 2 * 4)) & 15u;
        }
        run += akv_run_bytes(count, bits);
    }
}

/* --------------------------------------------------------------------------------------------------- sizes of spans */

/* Work of one group of values, in units that fit what was measured: a warp mostly waits for what it did itself just before. */
static uint32_t group_work(const akv_head_plan *plan, uint32_t level)
{
    const akv_value_level v = plan->values[level].level;
    return 130u * ((v.tiles + 7u) / 8 + (v.four + 7u) / 8) + 14u * v.tiles + 45u * v.four;
}

static uint32_t group_bytes(const akv_head_plan *plan, int side, uint32_t level)
{
    return side == AKV_SIDE_K ? plan->keys[level].level.group_bytes : plan->values[level].level.group_bytes;
}

static void count_levels(const akv_ladder_view *v, uint64_t begin, uint32_t n, uint32_t *count)
{
    memset(count, 0, AKV_PACK_MAX_LEVELS * sizeof *count);
    for (uint64_t t = begin; t < begin + n; t++) {
        uint32_t l = 0;
        for (uint32_t p = 0; p < v->planes; p++)
            l |= ((uint32_t)(v->levels[p * v->plane_bytes + t / 8] >> (t % 8)) & 1u) << p;
        if (l > 0)
            count[l - 1]++;
    }
}

/* First group of each level. */
static void count_groups(const akv_head_plan *plan, int side, const uint32_t *count, akv_packed_span *span)
{
    memset(span->groups[side], 0, sizeof span->groups[side]);
    for (uint32_t l = 0; l < plan->num_levels; l++)
        span->groups[side][l + 1] = (uint16_t)(span->groups[side][l] + (count[l] + 15) / 16);
}

/* Where the codes of each level of the keys begin; returns the bytes of all. */
static uint64_t place_keys(const akv_head_plan *plan, akv_packed_span *span)
{
    uint64_t bytes = 0;
    memset(span->key_codes, 0, sizeof span->key_codes);
    for (uint32_t l = 0; l < plan->num_levels; l++) {
        span->key_codes[l] = (uint32_t)bytes;
        bytes += (uint64_t)(span->groups[AKV_SIDE_K][l + 1] - span->groups[AKV_SIDE_K][l]) * group_bytes(plan, AKV_SIDE_K, l);
    }
    return bytes;
}

/* First group of each share of the values; returns the bytes of codes. */
static uint64_t share_out(const akv_head_plan *plan, akv_packed_span *span)
{
    const uint16_t *groups = span->groups[AKV_SIDE_V];
    uint64_t total = 0, done = 0, bytes = 0;
    uint32_t share = 0, g = 0;
    memset(span->warp, 0, sizeof span->warp);
    memset(span->warp_codes, 0, sizeof span->warp_codes);
    for (uint32_t l = 0; l < plan->num_levels; l++)
        total += (uint64_t)(groups[l + 1] - groups[l]) * group_work(plan, l);
    for (uint32_t l = 0; l < plan->num_levels; l++)
        for (; g < groups[l + 1]; g++) {
            while (share < AKV_PACK_WARPS && done * AKV_PACK_WARPS >= total * share) {
                span->warp[share] = (uint16_t)g;
                span->warp_codes[share++] = (uint32_t)bytes;
            }
            done += group_work(plan, l);
            bytes += group_bytes(plan, AKV_SIDE_V, l);
        }
    for (; share <= AKV_PACK_WARPS; share++) {
        span->warp[share] = (uint16_t)g;
        if (share < AKV_PACK_WARPS)
            span->warp_codes[share] = (uint32_t)bytes;
    }
    return bytes;
}

uint64_t akv_place_span(const akv_head_plan *plan, const akv_ladder_view v[AKV_SIDES], uint64_t begin, uint32_t n,
                        uint32_t span_tokens, uint64_t at, akv_packed_span *span)
{
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), 128))
    PUT(span->words, (uint64_t)span_tokens * 4);
    for (int side = 0; side < AKV_SIDES; side++) {
        uint32_t count[AKV_PACK_MAX_LEVELS];
        count_levels(&v[side], begin, n, count);
        count_groups(plan, side, count, span);
        const uint64_t bytes = side == AKV_SIDE_K ? place_keys(plan, span) : share_out(plan, span);
        PUT(span->entries[side], (uint64_t)span->groups[side][plan->num_levels] * 32);
        PUT(span->codes[side], bytes);
    }
#undef PUT
    span->end = at;
    return at;
}

/* ---------------------------------------------------------------------------------------------------------- writing */

/* Bit of a plane: 4-bit codes by the two's complement of their step, the others as they are numbered. */
static uint32_t plane_bit(const residual *r, const akv_level_list *list, uint32_t entry, uint32_t bit)
{
    const uint32_t number = number_at(r, list, entry);
    return ((list->width[entry] == 4 ? (uint32_t)(uint8_t)akv_level_steps4[number] : number) >> bit) & 1u;
}

/* A 4-bit code as sign and magnitude. */
static uint32_t stored(uint32_t number)
{
    return number >= 8 ? number - 8 : 8 | (7 - number);
}

static void write_key_group(const akv_key_plan *k, const akv_level_list *list, const residual *const member[16],
                            uint8_t *out)
{
    static const uint8_t odd_bit[4] = {0, 4, 2, 6}; /* of a nibble in the byte of a last odd unit */
    const uint32_t units = k->level.units, words = units / 4;
    uint8_t *halves = out + words * 128, *bytes = halves + (units >> 1 & 1) * 64;
    for (uint32_t u = 0; u < units; u++)
        for (uint32_t i = 0; i < 16 && u * 16 + i < k->planes; i++)
            for (uint32_t token = 0; token < 16; token++) {
                const uint32_t plane = u * 16 + i, lane = token % 8 * 4 + i / 4, nibble = i % 4;
                if (member[token] == NULL || plane_bit(member[token], list, k->entry[plane], k->bit[plane]) == 0)
                    continue;
                const uint32_t bit = 4 * nibble + 2 * (u % 2) + token / 8; /* of the 16 bits of the unit's tile */
                if (u < 4 * words)
                    out[u / 4 * 128 + lane * 4 + u / 2 % 2 * 2 + bit / 8] |= (uint8_t)(1u << (bit % 8));
                else if (u < 4 * words + (units & 2))
                    halves[lane * 2 + bit / 8] |= (uint8_t)(1u << (bit % 8));
                else
                    bytes[lane] |= (uint8_t)(1u << (odd_bit[nibble] + token / 8));
            }
    uint8_t *four = bytes + (units & 1) * 32;
    for (uint32_t e = 0; e < k->in_four; e++)
        for (uint32_t token = 0; token < 16; token++)
            if (member[token] != NULL) {
                const uint32_t tile = e / 32, i = e % 32, lane = token % 8 * 4 + i % 16 / 4,
                               nibble = token / 8 * 4 + i % 4;
                four[tile * 256 + lane * 8 + i / 16 * 4 + nibble / 2] |=
                    (uint8_t)(stored(number_at(member[token], list, e)) << (nibble % 2 * 4));
            }
}

static void write_value_group(const akv_value_plan *p, const akv_level_list *list, const residual *const member[16],
                              uint8_t *out)
{
    for (uint32_t i = 0; i < p->level.tiles * 16u; i++)
        for (uint32_t token = 0; token < 16 && p->entry[i] != 0xffff; token++) {
            if (member[token] == NULL || plane_bit(member[token], list, p->entry[i], p->bit[i]) == 0)
                continue;
            const uint32_t tile = i / 16, lane = i % 8 * 4 + token % 8 / 2,
                           bit = tile % 2 * 4 + token / 8 * 2 + i % 16 / 8;
            const bool word = tile / 4 < p->level.tiles / 4u || p->level.tiles % 4 == 3; /* of four tiles, or three */
            uint8_t *at = out + tile / 4 * 128 + (word ? lane * 4 + tile / 2 % 2 * 2 : lane * 2);
            at[token % 2] |= (uint8_t)(1u << bit);
        }
    out += (p->level.tiles + 1u) / 2 * 64;
    for (uint32_t e = 0; e < list->by_width[0]; e++)
        for (uint32_t token = 0; token < 16; token++)
            if (member[token] != NULL) {
                const uint32_t lane = e % 8 * 4 + token % 8 / 2, nibble = token / 8 * 4 + e % 16 / 8 * 2 + token % 2;
                out[e / 16 * 128 + lane * 4 + nibble / 2] |=
                    (uint8_t)(stored(number_at(member[token], list, e)) << (nibble % 2 * 4));
            }
}

size_t akv_span_scratch_bytes(void)
{
    return AKV_SIDES * (size_t)AKV_PACK_MAX_SPAN * sizeof(residual);
}

void akv_write_span(const akv_head_plan *plan, const akv_ladder_view v[AKV_SIDES], uint64_t num_tokens, uint64_t begin,
                    uint32_t n, uint32_t span_tokens, const akv_packed_span *span, uint8_t *out, void *scratch)
{
    for (int side = 0; side < AKV_SIDES; side++) {
        residual *rows = (residual *)scratch + side * AKV_PACK_MAX_SPAN;
        uint16_t *words = (uint16_t *)(void *)(out + span->words) + side * span_tokens;
        for (uint32_t i = 0; i < n; i++)
            words[side == AKV_SIDE_V ? akv_value_place(i, span_tokens) : i] =
                AKV_TOKEN_WORD(akv_ladder_index(&v[side], begin + i), ((uint32_t)akv_ladder_coeff(&v[side], begin + i) & 15u));
        for (uint64_t b = begin / AKV_BLOCK_TOKENS; b * AKV_BLOCK_TOKENS < begin + n; b++) {
            residual block[AKV_BLOCK_TOKENS];
            const uint64_t b0 = b * AKV_BLOCK_TOKENS, left = num_tokens - b0;
            const uint32_t m = left < AKV_BLOCK_TOKENS ? (uint32_t)left : AKV_BLOCK_TOKENS;
            read_block(&v[side], plan->list[side], b, m, block);
            for (uint32_t j = 0; j < m; j++) /* short spans read a part of a block */
                if (b0 + j >= begin && b0 + j < begin + n)
                    rows[b0 + j - begin] = block[j];
        }
        uint16_t *entries = (uint16_t *)(void *)(out + span->entries[side]);
        uint8_t *codes = out + span->codes[side];
        for (uint32_t l = 0; l < plan->num_levels; l++)
            for (uint32_t i = 0; i < n;) {
                const residual *member[16] = {NULL};
                uint32_t count = 0;
                for (; i < n && count < 16; i++)
                    if (rows[i].level == l + 1) {
                        member[count] = &rows[i];
                        entries[count++] = AKV_ENTRY(i, (uint32_t)rows[i].gain);
                    }
                if (count == 0)
                    break;
                for (; count < 16; count++)
                    entries[count] = AKV_ENTRY(span_tokens, 0u);
                if (side == AKV_SIDE_K)
                    write_key_group(&plan->keys[l], &plan->list[0][l], member, codes);
                else
                    write_value_group(&plan->values[l], &plan->list[1][l], member, codes);
                codes += group_bytes(plan, side, l);
                entries += 16;
            }
    }
}
