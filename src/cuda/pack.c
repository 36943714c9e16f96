/* SPDX-License-Identifier: Apache-2.0 */
/* pack.c - the private form of a LADDER segment; see packed.h. The only place on the GPU's fast path that knows canonical bytes. */
#include "cuda/pack.h"
#include "core/ladder.h"
#include "core/rope.h"
#include "core/sizes.h"

#include <stdlib.h>

#define ALIGN 256u

bool akv_pack_covers(const akv_segment *segment)
{
    const akv_header *h = akv_header_of(segment);
    if (h->kind != AKV_SEGMENT_COMPRESSED || h->coding != AKV_CODING_LADDER || h->sections[AKV_SEC_POSITIONS].offset != 0 ||
        h->num_anchors > AKV_PACK_MAX_ANCHORS || h->head_dim[0] != h->head_dim[1])
        return false;
    const uint32_t d = h->head_dim[0];
    return d == 64 || d == 96 || d == 128 || d == 192 || d == 256;
}

/* A span is one item of work: short segments need short ones to fill a GPU, long ones waste fewer filled-up groups. */
static uint32_t span_tokens(uint64_t tokens, uint32_t dim)
{
    if (tokens <= 16384 && dim <= 128) /* wider heads prepare their queries in the room of at least 1024 tokens' logits */
        return 512;
    return tokens <= 32768 ? 1024 : AKV_PACK_MAX_SPAN;
}

static akv_level_tiles tiles_of(const akv_level_list *list)
{
    akv_level_tiles t = {0, 0, 0, 0, 0};
    const uint32_t n4 = list->by_width[0], n2 = list->by_width[1], n1 = list->by_width[2];
    t.half = n4 % 16 >= 1 && n4 % 16 <= 8;
    t.four = (uint8_t)((n4 + (t.half ? 0 : 15)) / 16);
    t.two = (uint8_t)((n2 + 15) / 16);
    const uint32_t room = t.two * 16u - n2;
    t.one = (uint8_t)(n1 > room ? (n1 - room + 15) / 16 : 0);
    t.group_bytes = 128u * t.four + 64u * t.half + 64u * t.two + 32u * t.one;
    return t;
}

/* Places of the tiles' coordinates: list entry at each of [tiles, 16], 0xffff where filled up. */
static uint32_t place_tiles(const akv_level_list *list, akv_level_tiles t, bool values, uint16_t (*place)[16])
{
    const uint32_t tiles = t.four + t.half + t.two + t.one, n4 = list->by_width[0];
    uint32_t e = 0;
    memset(place, 0xff, AKV_PACK_MAX_TILES * sizeof *place);
    for (uint32_t i = 0; i < t.four; i++)
        for (uint32_t j = 0; j < 16 && e < n4; j++)
            place[i][j] = (uint16_t)e++;
    for (uint32_t j = 0; t.half && e < n4; j++) /* eight coordinates: two of a lane's four (keys), the first eight rows (values) */
        place[t.four][values ? j : j / 2 * 4 + j % 2] = (uint16_t)e++;
    for (uint32_t i = t.four + t.half; i < tiles; i++)
        for (uint32_t j = 0; j < 16 && e < list->count; j++)
            place[i][j] = (uint16_t)e++;
    return tiles;
}

/* What one token's residual is made of, in the canonical bytes. */
typedef struct residual {
    const uint8_t *group;
    uint8_t size, lane, level, gain;
} residual;

static uint32_t number_at(const residual *r, const akv_level_list *list, uint32_t entry)
{
    const uint32_t n4 = list->by_width[0], n2 = list->by_width[1], width = list->width[entry];
    const uint32_t before = entry < n4 ? 4 * entry : entry < n4 + n2 ? 4 * n4 + 2 * (entry - n4) : 4 * n4 + 2 * n2 + entry - n4 - n2;
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

/* ----------------------------------------------------------------------------------------------------- sizes of spans */

/* Work of one group in units of a 1- or 2-bit tile, counted in executed instructions: 12 to 20 a tile, 76 to 130 a group. */
static uint32_t group_work(akv_level_tiles t)
{
    return 6u + 2u * t.four + 2u * t.half + t.two + t.one;
}

typedef struct span_side {
    uint32_t first[AKV_PACK_MAX_LEVELS + 1]; /* groups */
    uint64_t code_bytes;
} span_side;

static span_side measure_side(const uint32_t *count, const akv_level_tiles *tiles, uint32_t levels)
{
    span_side s = {{0}, 0};
    uint32_t groups = 0;
    for (uint32_t l = 0; l < levels; l++) {
        const uint32_t n = (count[l] + 15) / 16;
        s.first[l] = groups;
        groups += n;
        s.code_bytes += (uint64_t)n * tiles[l].group_bytes;
    }
    s.first[levels] = groups;
    return s;
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

static uint64_t place_span(akv_packed_span *span, const span_side sides[AKV_SIDES], uint32_t tokens, uint32_t levels, uint64_t at)
{
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), 128))
    for (int side = 0; side < AKV_SIDES; side++)
        PUT(span->index[side], (uint64_t)tokens * 2);
    PUT(span->coeff, tokens);
    for (int side = 0; side < AKV_SIDES; side++) {
        PUT(span->entries[side], (uint64_t)sides[side].first[levels] * 32);
        PUT(span->codes[side], sides[side].code_bytes);
    }
#undef PUT
    span->end = at;
    return at;
}

/* ------------------------------------------------------------------------------------------------------ slots of keys */

typedef struct plane {
    double speed;
    uint16_t x, y;
    bool turns;
} plane;

static int faster(const void *a, const void *b)
{
    const plane *p = a, *q = b;
    const double x = fabs(p->speed), y = fabs(q->speed);
    return x != y ? (x < y) - (x > y) : (p->x > q->x) - (p->x < q->x);
}

/* Planes by falling speed; returns how many steps of eight planes are fast. */
static uint32_t sort_planes(const akv_header *h, const double *inv_freq, plane *planes)
{
    const uint32_t n = h->rotary_dim / 2, all = h->head_dim[0] / 2;
    for (uint32_t j = 0; j < all; j++) {
        const bool turns = j < n;
        planes[j].turns = turns;
        planes[j].speed = turns ? inv_freq[j] : 0.0;
        planes[j].x = (uint16_t)(turns ? akv_plane_first((akv_rope_style)h->rope_style, j) : 2 * j);
        planes[j].y = (uint16_t)(turns ? akv_plane_second((akv_rope_style)h->rope_style, h->rotary_dim, j) : 2 * j + 1);
    }
    qsort(planes, all, sizeof *planes, faster);
    uint32_t fast = 0;
    while (fast < all / 8 && fabs(planes[fast * 8].speed) * (AKV_PACK_WINDOW / 2.0) > AKV_PACK_SLOW_TURN)
        fast++;
    return fast <= all / 16 ? all / 16 : all / 8;
}

/* Steps of the quantisers as kernels want them; false when a 1- or 2-bit step is no fp16 number with an empty lower byte. */
static bool level_bytes(akv_packed *p)
{
    bool exact = true;
    for (uint32_t i = 0; i < 8; i++)
        p->steps4[i / 4] |= (uint32_t)akv_level_steps4[8 + i] << (i % 4 * 8);
    for (uint32_t i = 0; i < 4; i++) {
        const uint16_t half = akv_f32_to_f16((float)akv_level_steps2[i]);
        exact &= (half & 0xff) == 0;
        p->steps2 |= (uint32_t)(uint8_t)akv_level_steps2[i] << (i * 8);
        p->halves2 |= (uint32_t)(half >> 8) << (i * 8);
    }
    for (uint32_t i = 0; i < 2; i++) {
        const uint16_t half = akv_f32_to_f16((float)akv_level_steps1[i]);
        exact &= (half & 0xff) == 0;
        p->steps1 |= (uint32_t)(uint8_t)akv_level_steps1[i] << (i * 8);
        p->halves1 |= (uint32_t)(half >> 8) << (i * 8);
    }
    return exact;
}

akv_status akv_pack_plan(const akv_segment *segment, akv_packed *p, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t H = h->num_kv_heads, k = h->num_anchors, L = h->num_levels;
    memset(p, 0, sizeof *p);
    if (!level_bytes(p))
        return akv_fail(diag, AKV_E_UNSUPPORTED, "the level steps of this format do not fit the GPU's packed form");
    p->num_tokens = h->num_tokens;
    p->num_kv_heads = h->num_kv_heads;
    p->num_anchors = h->num_anchors;
    p->span_tokens = span_tokens(h->num_tokens, h->head_dim[0]);
    p->num_spans = (uint32_t)akv_div_up(h->num_tokens, p->span_tokens);
    p->num_levels = h->num_levels;
    p->first_position = h->first_position;
    p->magnitude = (float)h->magnitude;
    p->steps = h->head_dim[0] / 16;
    plane planes[AKV_MAX_HEAD_DIM / 2];
    p->fast_steps = sort_planes(h, akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    uint64_t at = akv_round_up(sizeof *p, ALIGN);
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), ALIGN))
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t d = h->head_dim[side];
        p->dim[side] = h->head_dim[side];
        p->coords[side] = akv_num_coords(h, side);
        p->basis_dim[side] = h->basis_dim[side];
        p->basis_cols[side] = h->basis_cols[side];
        PUT(p->anchors[side], H * k * d);
        PUT(p->anchor_scales[side], H * k * 4);
        PUT(p->units[side], H * d * 4);
        PUT(p->basis[side], H * p->basis_cols[side] * p->basis_dim[side]);
        PUT(p->basis_scales[side], H * p->basis_cols[side] * 4);
        PUT(p->levels[side], H * L * sizeof(akv_level_tiles));
        PUT(p->tile_coords[side], H * L * AKV_PACK_MAX_TILES * 16 * 2);
        PUT(p->tile_scales[side], H * L * AKV_PACK_MAX_TILES * 16 * 4);
    }
    const uint64_t dk = h->head_dim[0];
    PUT(p->mean, H * dk * 4);
    PUT(p->slots, dk * 2);
    PUT(p->inv_freq, dk / 2 * 8);
    PUT(p->row_turns, (uint64_t)p->fast_steps * 16 * 4 * 8);
    PUT(p->fast_turns, (uint64_t)p->fast_steps * (p->span_tokens / 16) * 4 * 8);
    PUT(p->slow_turns, (uint64_t)(p->steps - p->fast_steps) * (p->span_tokens / 64) * 4 * 8);
    PUT(p->coords_order, dk * 2);
    PUT(p->spans, H * p->num_spans * sizeof(akv_packed_span));
#undef PUT
    for (uint32_t head = 0; head < H; head++) {
        akv_ladder_view v[AKV_SIDES];
        akv_level_tiles tiles[AKV_SIDES][AKV_PACK_MAX_LEVELS];
        for (int side = 0; side < AKV_SIDES; side++) {
            v[side] = akv_view_ladder(segment, side, head);
            for (uint32_t l = 0; l < L; l++) {
                akv_level_list list;
                akv_ladder_list(&v[side], l + 1, &list);
                tiles[side][l] = tiles_of(&list);
            }
        }
        for (int side = 0; side < AKV_SIDES; side++) {
            uint32_t all = 0;
            for (uint32_t l = 0; l < L; l++)
                all += tiles[side][l].four + tiles[side][l].half + tiles[side][l].two + tiles[side][l].one;
            p->most_tiles = all > p->most_tiles ? all : p->most_tiles;
        }
        for (uint32_t i = 0; i < p->num_spans; i++) {
            const uint64_t begin = (uint64_t)i * p->span_tokens, rest = h->num_tokens - begin;
            const uint32_t n = rest < p->span_tokens ? (uint32_t)rest : p->span_tokens;
            span_side sides[AKV_SIDES];
            akv_packed_span span;
            for (int side = 0; side < AKV_SIDES; side++) {
                uint32_t count[AKV_PACK_MAX_LEVELS];
                count_levels(&v[side], begin, n, count);
                sides[side] = measure_side(count, tiles[side], h->num_levels);
            }
            at = place_span(&span, sides, p->span_tokens, h->num_levels, at);
        }
    }
    p->total_bytes = akv_round_up(at, ALIGN);
    return AKV_OK;
}

/* ------------------------------------------------------------------------------------------------------------- writing */

static float level_step(uint32_t tile_bits, uint32_t width)
{
    if (tile_bits == 4)
        return AKV_LEVEL_UNIT4;
    if (tile_bits == 2) /* a 1-bit coordinate in a 2-bit tile is stored as the outer level */
        return width == 2 ? AKV_LEVEL_UNIT2 : AKV_LEVEL_UNIT1 / (float)akv_level_steps2[3];
    return AKV_LEVEL_UNIT1;
}

static uint32_t tile_bits(akv_level_tiles t, uint32_t tile)
{
    return tile < (uint32_t)(t.four + t.half) ? 4 : tile < (uint32_t)(t.four + t.half + t.two) ? 2 : 1;
}

/* The number as the tile stores it: 4 bits: sign and magnitude; 2 bits: ascending, 1-bit ones as the outer levels. */
static uint32_t stored(uint32_t number, uint32_t bits, uint32_t width)
{
    if (bits == 4)
        return number >= 8 ? number - 8 : 8 | (7 - number);
    return bits == 2 && width == 1 ? number * 3 : number;
}

typedef struct side_tables {
    akv_level_list list[AKV_PACK_MAX_LEVELS];
    akv_level_tiles tiles[AKV_PACK_MAX_LEVELS];
    uint16_t place[AKV_PACK_MAX_LEVELS][AKV_PACK_MAX_TILES][16];
} side_tables;

static void write_group(const side_tables *t, uint32_t level, bool values, const residual *const member[16], uint8_t *out)
{
    static const uint8_t one_bit[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    const akv_level_list *list = &t->list[level];
    const akv_level_tiles tiles = t->tiles[level];
    for (uint32_t tile = 0; tile < (uint32_t)(tiles.four + tiles.half + tiles.two + tiles.one); tile++) {
        const uint32_t bits = tile_bits(tiles, tile);
        const bool half = tiles.half && tile == tiles.four;
        for (uint32_t lane = 0; lane < 32; lane++) {
            const uint32_t r = lane / 4, c = lane % 4;
            uint32_t word = 0;
            for (uint32_t quad = 0; quad < 2; quad++)
                for (uint32_t i = 0; i < 4; i++) {
                    const uint32_t token = values ? 2 * c + i % 2 + 8 * quad : r + 8 * quad;
                    const uint32_t coord = values ? r + i / 2 * 8 : 4 * c + i;
                    const uint32_t entry = t->place[level][tile][coord];
                    if (entry == 0xffff || member[token] == NULL)
                        continue;
                    const uint32_t x = stored(number_at(member[token], list, entry), bits, list->width[entry]);
                    if (half) /* entries sit at i 0, 1 only */
                        word |= x << (4 * (2 * quad + i));
                    else if (bits == 4)
                        word |= x << (16 * quad + 4 * i);
                    else if (bits == 2)
                        word |= x << (4 * i + 2 * quad);
                    else
                        word |= x << one_bit[quad][i];
                }
            for (uint32_t b = 0; b < (half ? 2 : bits); b++)
                *out++ = (uint8_t)(word >> (8 * b));
        }
    }
}

static void share_out(akv_packed_span *span, int side, const span_side *s, const side_tables *t, uint32_t levels)
{
    uint64_t total = 0, done = 0;
    for (uint32_t l = 0; l < levels; l++)
        total += (uint64_t)(s->first[l + 1] - s->first[l]) * group_work(t->tiles[l]);
    uint32_t g = 0, warp = 0, bytes = 0;
    for (uint32_t l = 0; l <= levels; l++)
        span->groups[side][l] = (uint16_t)s->first[l];
    for (uint32_t l = 0; l < levels; l++)
        for (; g < s->first[l + 1]; g++) {
            while (warp < AKV_PACK_WARPS && done * AKV_PACK_WARPS >= total * warp) {
                span->warp[side][warp] = (uint16_t)g;
                span->warp_codes[side][warp++] = bytes;
            }
            done += group_work(t->tiles[l]);
            bytes += t->tiles[l].group_bytes;
        }
    for (; warp <= AKV_PACK_WARPS; warp++) {
        span->warp[side][warp] = (uint16_t)g;
        if (warp < AKV_PACK_WARPS)
            span->warp_codes[side][warp] = bytes;
    }
}

static void write_span(const akv_packed *p, const akv_ladder_view v[AKV_SIDES], const side_tables t[AKV_SIDES],
                       const residual *const residuals[AKV_SIDES], uint64_t begin, uint32_t n, akv_packed_span *span, uint8_t *out)
{
    for (int side = 0; side < AKV_SIDES; side++) {
        uint16_t *index = (uint16_t *)(void *)(out + span->index[side]);
        uint16_t *entries = (uint16_t *)(void *)(out + span->entries[side]);
        uint8_t *coeff = out + span->coeff, *codes = out + span->codes[side];
        for (uint32_t i = 0; i < n; i++) {
            index[i] = (uint16_t)akv_ladder_index(&v[side], begin + i);
            coeff[i] |= (uint8_t)(((uint32_t)akv_ladder_coeff(&v[side], begin + i) & 15u) << (4 * side));
        }
        for (uint32_t l = 0; l < p->num_levels; l++)
            for (uint32_t i = 0; i < n;) {
                const residual *member[16] = {NULL};
                uint32_t count = 0;
                for (; i < n && count < 16; i++)
                    if (residuals[side][i].level == l + 1) {
                        member[count] = &residuals[side][i];
                        entries[count++] = AKV_ENTRY(i, (uint32_t)residuals[side][i].gain);
                    }
                if (count == 0)
                    break;
                write_group(&t[side], l, side == AKV_SIDE_V, member, codes);
                codes += t[side].tiles[l].group_bytes;
                entries += 16;
            }
    }
}

static void put_half(uint8_t *out, uint64_t i, double x)
{
    ((uint16_t *)(void *)out)[i] = akv_f32_to_f16((float)x);
}

/* cos, sin of `tokens` for the two planes of lane column c in a step: half2 cos, half2 sin. */
static void put_turn(uint8_t *out, uint64_t at, const plane *step, uint32_t c, double tokens)
{
    for (uint32_t i = 0; i < 2; i++) {
        const double angle = tokens * step[2 * c + i].speed;
        put_half(out, at * 4 + i, cos(angle));
        put_half(out, at * 4 + 2 + i, sin(angle));
    }
}

static void write_turns(const akv_packed *p, const plane *planes, uint8_t *out)
{
    for (uint32_t s = 0; s < p->steps; s++) {
        const plane *step = planes + s * 8;
        const bool fast = s < p->fast_steps;
        const uint32_t windows = p->span_tokens / (fast ? 16 : AKV_PACK_WINDOW);
        for (uint32_t c = 0; c < 4; c++) {
            for (uint32_t r = 0; fast && r < 16; r++)
                put_turn(out + p->row_turns, (s * 16 + r) * 4 + c, step, c, r);
            for (uint32_t w = 0; w < windows; w++)
                if (fast)
                    put_turn(out + p->fast_turns, ((uint64_t)s * windows + w) * 4 + c, step, c, 16.0 * w);
                else
                    put_turn(out + p->slow_turns, ((uint64_t)(s - p->fast_steps) * windows + w) * 4 + c, step, c,
                             (double)AKV_PACK_WINDOW * w + AKV_PACK_WINDOW / 2);
        }
    }
}

/* Anchors, scales, units, mean, basis of one head. */
static void write_head(const akv_segment *segment, const akv_packed *p, const plane *planes, uint32_t head,
                       const akv_ladder_view v[AKV_SIDES], uint8_t *out)
{
    const uint16_t *mean = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (uint64_t)head * p->dim[0];
    const uint64_t k = p->num_anchors, dk = p->dim[0], vec = p->steps % 4 == 0 ? 4 : 2; /* steps that one load of a lane covers */
    for (int side = 0; side < AKV_SIDES; side++) {
        float *scales = (float *)(void *)(out + p->anchor_scales[side]) + head * k;
        float *units = (float *)(void *)(out + p->units[side]) + head * p->dim[side];
        const uint64_t basis = (uint64_t)p->basis_cols[side] * p->basis_dim[side];
        for (uint64_t a = 0; a < k; a++)
            scales[a] = akv_f16_to_f32(v[side].anchor_scales[a]);
        if (basis > 0)
            memcpy(out + p->basis[side] + head * basis, v[side].basis, basis);
        if (p->basis_cols[side] > 0)
            memcpy(out + p->basis_scales[side] + (uint64_t)head * p->basis_cols[side] * 4, v[side].basis_scales, p->basis_cols[side] * 4u);
        for (uint32_t i = 0; side == AKV_SIDE_V && i < p->dim[1]; i++)
            units[i] = akv_bf16_to_f32(v[1].units[i]);
    }
    uint8_t *anchors = out + p->anchors[1] + head * k * p->dim[1];
    for (uint64_t i = 0; i < k * p->dim[1]; i++)
        anchors[i] = (uint8_t)(v[1].anchors[i] + 128);
    anchors = out + p->anchors[0] + head * k * dk;
    for (uint32_t s = 0; s < p->steps; s++)
        for (uint32_t i = 0; i < 8; i++)
            for (uint32_t y = 0; y < 2; y++) {
                const uint32_t dim = y ? planes[s * 8 + i].y : planes[s * 8 + i].x;
                /* a row is [load][lane column][step of the load][x, x, y, y] */
                const uint64_t at = ((s / vec * 4 + i / 2) * vec + s % vec) * 4 + y * 2 + i % 2;
                for (uint64_t a = 0; a < k; a++)
                    anchors[a * dk + at] = (uint8_t)(v[0].anchors[a * dk + dim] + 128);
                const float unit = akv_bf16_to_f32(v[0].units[dim]);
                const bool turns = planes[s * 8 + i].turns; /* the magnitude belongs to the rotary embedding */
                ((float *)(void *)(out + p->units[0]))[head * dk + s * 16 + y * 8 + i] = turns ? unit * p->magnitude : unit;
                ((float *)(void *)(out + p->mean))[head * dk + s * 16 + y * 8 + i] = akv_bf16_to_f32(mean[dim]) / unit;
                ((uint16_t *)(void *)(out + p->slots))[s * 16 + y * 8 + i] = (uint16_t)dim;
            }
}

akv_status akv_pack_write(const akv_segment *segment, const akv_packed *p, uint8_t *out, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t L = p->num_levels, span = p->span_tokens;
    side_tables *t = malloc(AKV_SIDES * sizeof *t);
    residual *residuals = malloc(AKV_SIDES * (size_t)AKV_PACK_MAX_SPAN * sizeof *residuals);
    if (t == NULL || residuals == NULL) {
        free(t);
        free(residuals);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for packing a segment");
    }
    plane planes[AKV_MAX_HEAD_DIM / 2];
    sort_planes(h, akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    memset(out, 0, p->total_bytes);
    memcpy(out, p, sizeof *p);
    write_turns(p, planes, out);
    for (uint32_t j = 0; j < p->dim[0] / 2; j++)
        ((double *)(void *)(out + p->inv_freq))[j] = planes[j].speed;
    memcpy(out + p->coords_order, akv_section_of(segment, AKV_SEC_COORDS), p->dim[0] * 2u);
    uint64_t at = p->spans + akv_round_up((uint64_t)p->num_kv_heads * p->num_spans * sizeof(akv_packed_span), ALIGN);
    for (uint32_t head = 0; head < p->num_kv_heads; head++) {
        akv_ladder_view v[AKV_SIDES];
        for (int side = 0; side < AKV_SIDES; side++) {
            v[side] = akv_view_ladder(segment, side, head);
            for (uint32_t l = 0; l < L; l++) {
                const uint64_t row = ((uint64_t)head * L + l) * AKV_PACK_MAX_TILES * 16;
                uint16_t *coords = (uint16_t *)(void *)(out + p->tile_coords[side]) + row;
                float *scales = (float *)(void *)(out + p->tile_scales[side]) + row;
                akv_ladder_list(&v[side], l + 1, &t[side].list[l]);
                t[side].tiles[l] = tiles_of(&t[side].list[l]);
                const uint32_t tiles = place_tiles(&t[side].list[l], t[side].tiles[l], side == AKV_SIDE_V, t[side].place[l]);
                memset(coords, 0xff, AKV_PACK_MAX_TILES * 16 * 2);
                for (uint32_t i = 0; i < tiles * 16; i++) {
                    const uint32_t e = t[side].place[l][i / 16][i % 16];
                    if (e == 0xffff)
                        continue;
                    coords[i] = t[side].list[l].coord[e];
                    scales[i] = akv_bf16_to_f32(v[side].sigmas[coords[i]]) * level_step(tile_bits(t[side].tiles[l], i / 16), t[side].list[l].width[e]);
                }
                ((akv_level_tiles *)(void *)(out + p->levels[side]))[(uint64_t)head * L + l] = t[side].tiles[l];
            }
        }
        write_head(segment, p, planes, head, v, out);
        for (uint32_t i = 0; i < p->num_spans; i++) {
            const uint64_t begin = (uint64_t)i * span, rest = h->num_tokens - begin;
            const uint32_t n = rest < span ? (uint32_t)rest : span;
            akv_packed_span *s = (akv_packed_span *)(void *)(out + p->spans) + (uint64_t)head * p->num_spans + i;
            span_side sides[AKV_SIDES];
            const residual *of_side[AKV_SIDES];
            for (int side = 0; side < AKV_SIDES; side++) {
                uint32_t count[AKV_PACK_MAX_LEVELS];
                count_levels(&v[side], begin, n, count);
                sides[side] = measure_side(count, t[side].tiles, L);
                residual *rows = residuals + side * AKV_PACK_MAX_SPAN;
                for (uint64_t b = begin / AKV_BLOCK_TOKENS; b * AKV_BLOCK_TOKENS < begin + n; b++) { /* spans of 512 read half a block */
                    residual block[AKV_BLOCK_TOKENS];
                    const uint64_t b0 = b * AKV_BLOCK_TOKENS, left = h->num_tokens - b0;
                    const uint32_t m = left < AKV_BLOCK_TOKENS ? (uint32_t)left : AKV_BLOCK_TOKENS;
                    read_block(&v[side], t[side].list, b, m, block);
                    for (uint32_t j = 0; j < m; j++)
                        if (b0 + j >= begin && b0 + j < begin + n)
                            rows[b0 + j - begin] = block[j];
                }
                of_side[side] = rows;
            }
            at = place_span(s, sides, span, L, at);
            for (int side = 0; side < AKV_SIDES; side++)
                share_out(s, side, &sides[side], &t[side], L);
            write_span(p, v, t, of_side, begin, n, s, out);
        }
    }
    free(t);
    free(residuals);
    return AKV_OK;
}
