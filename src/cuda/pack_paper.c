/* SPDX-License-Identifier: Apache-2.0 */
/* pack_paper.c - the private form of a PLAIN segment; see packed_paper.h. */
#include "cuda/pack_paper.h"
#include "core/view.h"
#include "cuda/pack_turns.h"

#include <math.h>
#include <stdlib.h>

#define ALIGN 256u
#define MAX_DIM 256u

bool akv_paper_covers(const akv_segment *segment)
{
    const akv_header *h = akv_header_of(segment);
    if (h->kind != AKV_SEGMENT_COMPRESSED || h->coding != AKV_CODING_PLAIN || h->flags != 0 ||
        h->sections[AKV_SEC_POSITIONS].offset != 0 || h->num_anchors > AKV_PACK_MAX_ANCHORS ||
        h->head_dim[0] != h->head_dim[1])
        return false;
    const uint32_t d = h->head_dim[0];
    return d == 64 || d == 96 || d == 128 || d == 192 || d == 256;
}

/* Tokens of block `block` of a side of a head that own a residual, and their codes. */
typedef struct block {
    uint16_t owner[AKV_BLOCK_TOKENS];
    uint32_t count;
    const uint16_t *gains;
    const uint8_t *codes;
} block;

static block read_block(const akv_side_view *v, uint64_t num_tokens, uint64_t index)
{
    block b;
    const uint64_t rest = num_tokens - index * AKV_BLOCK_TOKENS;
    b.count = akv_view_owners(v, index, rest < AKV_BLOCK_TOKENS ? (uint32_t)rest : AKV_BLOCK_TOKENS, b.owner);
    b.gains = v->gains + v->ranks[index];
    b.codes = v->codes + v->ranks[index] * v->code_bytes;
    return b;
}

static uint32_t code_at(const block *b, const akv_side_view *v, uint32_t i, uint32_t coord)
{
    const uint32_t first = i / AKV_GROUP_LANES * AKV_GROUP_LANES,
                   size = b->count - first < AKV_GROUP_LANES ? b->count - first : AKV_GROUP_LANES;
    const uint8_t *group = b->codes + (uint64_t)first * v->code_bytes;
    const uint32_t bit = (coord * size + i - first) * 2;
    return (uint32_t)(group[bit >> 3] >> (bit & 7)) & 3u;
}

/* Residuals of tokens [begin, begin + n); spans are whole blocks but the last. */
static uint32_t residuals_of(const akv_side_view *v, uint64_t begin, uint32_t n)
{
    uint32_t count = 0;
    for (uint64_t t = begin; t < begin + n; t++)
        count += akv_view_owns(v, t);
    return count;
}

static uint64_t place_span(const akv_paper *p, const akv_side_view v[AKV_SIDES], uint32_t index, uint64_t at,
                           akv_paper_span *span)
{
    const uint64_t begin = (uint64_t)index * p->span_tokens, rest = p->num_tokens - begin;
    const uint32_t n = rest < p->span_tokens ? (uint32_t)rest : p->span_tokens;
    memset(span, 0, sizeof *span);
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), 128))
    PUT(span->words, (uint64_t)p->span_tokens * 8);
    for (int side = 0; side < AKV_SIDES; side++) {
        span->groups[side] = (residuals_of(&v[side], begin, n) + 15) / 16;
        PUT(span->entries[side], span->groups[side] * 64u);
        PUT(span->codes[side], (uint64_t)span->groups[side] * p->dim * 4);
    }
#undef PUT
    span->end = at;
    return at;
}

static void view_head(const akv_segment *segment, uint32_t head, akv_side_view v[AKV_SIDES])
{
    for (int side = 0; side < AKV_SIDES; side++)
        v[side] = akv_view_side(segment, side, head);
}

void akv_paper_plan(const akv_segment *segment, akv_paper *p)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t H = h->num_kv_heads, k = h->num_anchors, d = h->head_dim[0];
    akv_plane planes[MAX_DIM / 2];
    memset(p, 0, sizeof *p);
    p->num_tokens = h->num_tokens;
    p->num_kv_heads = h->num_kv_heads;
    p->num_anchors = h->num_anchors;
    p->padded_anchors = (uint32_t)akv_round_up(k, 16);
    p->dim = h->head_dim[0];
    p->steps = p->dim / 16;
    p->fast_steps = akv_sort_planes(h, akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    p->span_tokens = p->fast_steps < p->steps ? akv_span_tokens(h->num_tokens, h->head_dim[0]) : 1024;
    p->num_spans = (uint32_t)akv_div_up(h->num_tokens, p->span_tokens);
    p->first_position = h->first_position;
    const uint64_t slow = p->steps - p->fast_steps;
    uint64_t at = akv_round_up(sizeof *p, ALIGN);
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), ALIGN))
    PUT(p->heads, H * sizeof(akv_paper_head));
    PUT(p->keys, H * k * d * 2);
    PUT(p->values, H * p->padded_anchors * d * 2);
    PUT(p->transform[0], d * d * 2);
    PUT(p->transform[1], d * d * 2);
    PUT(p->norms, d * 4);
    PUT(p->slots, d * 2);
    PUT(p->slot_scales, d * 4);
    PUT(p->row_turns, (uint64_t)p->fast_steps * 16 * 4 * 8);
    PUT(p->group_turns, (uint64_t)p->fast_steps * (AKV_PAPER_HALF / 16) * 4 * 8);
    PUT(p->slow_turns, slow * (AKV_PAPER_HALF / AKV_PACK_WINDOW) * 4 * 8);
    PUT(p->speeds, slow * 16);
    PUT(p->span_turns, p->num_spans * (p->span_tokens / AKV_PAPER_HALF) * d * 4);
    PUT(p->spans, H * p->num_spans * sizeof(akv_paper_span));
#undef PUT
    akv_side_view v[AKV_SIDES];
    for (uint32_t head = 0; head < H; head++) {
        view_head(segment, head, v);
        for (uint32_t i = 0; i < p->num_spans; i++) {
            akv_paper_span span;
            at = place_span(p, v, i, at, &span);
        }
    }
    p->total_bytes = akv_round_up(at, ALIGN);
}

/* ----------------------------------------------------------------------------------------------------- writing */

/* Element (row, column) of a matrix of operands with `columns` tiles a row of tiles. */
static uint64_t operand_at(uint32_t columns, uint32_t row, uint32_t column)
{
    const uint32_t r = row % 16, c = column % 16;
    const uint64_t tile = (uint64_t)(row / 16) * columns + column / 16;
    return tile * 256 + (r % 8 * 4 + c % 8 / 2) * 8 + c / 8 * 4 + r / 8 * 2 + c % 2;
}

/* The least power of two, times `most`, that is not below x. */
static float unit_above(float x, float most)
{
    int e = 0;
    if (!(x > 0))
        return 1.0f;
    const float m = frexpf(x / most, &e);
    return ldexpf(1.0f, m == 0.5f ? e - 1 : e);
}

static void write_turns(const akv_paper *p, const akv_plane *planes, uint8_t *out)
{
    const uint32_t slow = p->steps - p->fast_steps;
    for (uint32_t s = 0; s < p->steps; s++)
        for (uint32_t c = 0; c < 4; c++) {
            const akv_plane *step = planes + s * 8;
            if (s < p->fast_steps) {
                for (uint32_t r = 0; r < 16; r++) {
                    const bool swap = r % 2 == 1 && akv_paper_swaps((int)s / 2, (int)p->steps, (int)p->fast_steps);
                    akv_put_turn(out + p->row_turns, (r * 4 + c) * p->fast_steps + (swap ? s ^ 2 : s), step, c, r);
                }
                for (uint32_t g = 0; g < AKV_PAPER_HALF / 16; g++)
                    akv_put_turn(out + p->group_turns, ((uint64_t)g * 4 + c) * p->fast_steps + s, step, c, 16.0 * g);
                continue;
            }
            for (uint32_t w = 0; w < AKV_PAPER_HALF / AKV_PACK_WINDOW; w++)
                akv_put_turn(out + p->slow_turns, ((uint64_t)w * 4 + c) * slow + s - p->fast_steps, step, c,
                             AKV_PACK_WINDOW * w + AKV_PACK_WINDOW / 2);
            for (uint32_t i = 0; i < 2; i++)
                akv_put_half(out + p->speeds, (c * slow + s - p->fast_steps) * 2 + i, 1024.0 * step[2 * c + i].speed);
        }
    float *turns = (float *)(void *)(out + p->span_turns);
    for (uint32_t i = 0; i < p->num_spans * (p->span_tokens / AKV_PAPER_HALF); i++)
        for (uint32_t j = 0; j < p->dim / 2; j++, turns += 2) {
            const double angle = ((double)p->first_position + (double)i * AKV_PAPER_HALF) * planes[j].speed;
            turns[0] = (float)cos(angle);
            turns[1] = (float)sin(angle);
        }
}

/* Signs of the orthonormal Walsh-Hadamard transform over greedy power-of-two blocks, and each coordinate's factor. */
static void write_transforms(const akv_segment *segment, const akv_paper *p, uint8_t *out)
{
    const uint32_t tiles = p->dim / 16;
    float sign[AKV_SIDES][MAX_DIM];
    for (int side = 0; side < AKV_SIDES; side++)
        akv_signs(akv_header_of(segment)->seed, side, p->dim, sign[side]);
    for (uint32_t base = 0, n; base < p->dim; base += n) {
        for (n = 1; n * 2 <= p->dim - base; n *= 2)
            ;
        for (uint32_t c = 0; c < n; c++) {
            ((float *)(void *)(out + p->norms))[base + c] = (float)(1 / sqrt((double)n));
            for (uint32_t i = 0; i < n; i++) {
                const double x = __builtin_popcount(c & i) % 2 ? -1 : 1;
                akv_put_half(out + p->transform[0], operand_at(tiles, base + c, base + i),
                             x * (double)sign[0][base + i]);
                akv_put_half(out + p->transform[1], operand_at(tiles, base + i, base + c),
                             x * (double)sign[1][base + i]);
            }
        }
    }
}

static float largest(const uint16_t *x, uint64_t n, float (*value)(uint16_t))
{
    float most = 0;
    for (uint64_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(value(x[i])));
    return most;
}

static float largest_gain(const akv_segment *segment, uint32_t head, int side)
{
    const akv_side_view v = akv_view_side(segment, side, head);
    const uint64_t blocks = akv_div_up(akv_header_of(segment)->num_tokens, AKV_BLOCK_TOKENS);
    return largest(v.gains + v.ranks[0], v.ranks[blocks] - v.ranks[0], akv_f16_to_f32);
}

static void write_head(const akv_segment *segment, const akv_paper *p, const akv_plane *planes, uint32_t head,
                       const akv_side_view v[AKV_SIDES], uint8_t *out)
{
    const uint64_t k = p->num_anchors, d = p->dim;
    akv_paper_head *h = (akv_paper_head *)(void *)(out + p->heads) + head;
    h->key_unit = unit_above(largest(v[0].anchors, k * d, akv_bf16_to_f32), 16);
    h->value_unit = unit_above(largest(v[1].anchors, k * d, akv_bf16_to_f32), 16);
    h->gain_unit = unit_above(largest_gain(segment, head, AKV_SIDE_V), 1);
    int e = 0;
    const float most = largest(v[1].coeff, p->num_tokens, akv_f16_to_f32);
    (void)frexpf(most, &e);
    h->coeff_log = most > 1 ? e : 0;
    uint8_t *keys = out + p->keys, *values = out + p->values;
    for (uint64_t a = 0; a < k; a++) {
        for (uint32_t s = 0; s < p->steps; s++)
            for (uint32_t i = 0; i < 16; i++) { /* x of eight planes, then y */
                const akv_plane *plane = &planes[s * 8 + i % 8];
                const float x = akv_bf16_to_f32(v[0].anchors[a * d + (i < 8 ? plane->x : plane->y)]);
                akv_put_half(keys, (head * k + a) * d + s / 2 * 32 + i % 8 / 2 * 8 + s % 2 * 4 + i / 8 * 2 + i % 2,
                             (double)(x / h->key_unit));
            }
        for (uint32_t i = 0; i < d; i++) /* rows of tiles are anchors here, so that a warp reads one after the other */
            akv_put_half(values, head * p->padded_anchors * d + (a / 16) * d * 16 + operand_at(1, i, (uint32_t)a % 16),
                         (double)(akv_bf16_to_f32(v[1].anchors[a * d + i]) / h->value_unit));
    }
}

static void write_key_code(uint8_t *group, uint32_t token, uint32_t coord, uint32_t code)
{
    for (uint32_t upper = 0; upper < 2; upper++) {
        const uint32_t u = coord / 16 * 2 + 1 - upper, i = coord % 16, lane = token % 8 * 4 + i / 4,
                       bit = 4 * (i % 4) + 2 * (u % 2) + token / 8;
        if (code >> upper & 1)
            group[u / 4 * 128 + lane * 4 + u / 2 % 2 * 2 + bit / 8] |= (uint8_t)(1u << (bit % 8));
    }
}

static void write_value_code(uint8_t *group, uint32_t token, uint32_t coord, uint32_t code)
{
    for (uint32_t upper = 0; upper < 2; upper++) {
        const uint32_t tile = coord / 8, lane = coord % 8 * 4 + token % 8 / 2,
                       bit = tile % 2 * 4 + token / 8 * 2 + 1 - upper;
        if (code >> upper & 1)
            group[tile / 4 * 128 + lane * 4 + tile / 2 % 2 * 2 + token % 2] |= (uint8_t)(1u << bit);
    }
}

static void write_span(const akv_paper *p, const akv_side_view v[AKV_SIDES], uint32_t index, float gain_unit,
                       const akv_paper_span *span, uint8_t *out)
{
    const uint64_t begin = (uint64_t)index * p->span_tokens, rest = p->num_tokens - begin;
    const uint32_t n = rest < p->span_tokens ? (uint32_t)rest : p->span_tokens;
    for (int side = 0; side < AKV_SIDES; side++) {
        uint32_t *words = (uint32_t *)(void *)(out + span->words) + side * p->span_tokens;
        uint32_t *entries = (uint32_t *)(void *)(out + span->entries[side]), count = 0;
        for (uint32_t i = 0; i < n; i++)
            words[side == AKV_SIDE_V ? akv_value_place(i, p->span_tokens) : i] =
                AKV_PAPER_WORD(akv_view_index(&v[side], begin + i), v[side].coeff[begin + i]);
        for (uint64_t b = begin / AKV_BLOCK_TOKENS; b * AKV_BLOCK_TOKENS < begin + n; b++) {
            const block from = read_block(&v[side], p->num_tokens, b);
            for (uint32_t i = 0; i < from.count; i++, count++) {
                const uint32_t token = (uint32_t)(b * AKV_BLOCK_TOKENS - begin) + from.owner[i];
                uint16_t gain = from.gains[i];
                if (side == AKV_SIDE_V)
                    gain = akv_f32_to_f16(akv_f16_to_f32(gain) / gain_unit);
                entries[count] = AKV_PAPER_WORD(token, gain);
                uint8_t *group = out + span->codes[side] + (uint64_t)(count / 16) * p->dim * 4;
                for (uint32_t c = 0; c < p->dim; c++)
                    (side == AKV_SIDE_V ? write_value_code : write_key_code)(group, count % 16, c,
                                                                             code_at(&from, &v[side], i, c));
            }
        }
        for (; count < span->groups[side] * 16; count++) /* what fills up names the token behind the span's last */
            entries[count] = AKV_PAPER_WORD(p->span_tokens, 0);
    }
}

void akv_paper_write(const akv_segment *segment, const akv_paper *p, uint8_t *out)
{
    akv_plane planes[MAX_DIM / 2];
    akv_sort_planes(akv_header_of(segment), akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    memset(out, 0, p->total_bytes);
    memcpy(out, p, sizeof *p);
    write_turns(p, planes, out);
    write_transforms(segment, p, out);
    for (uint32_t s = 0; s < p->steps; s++)
        for (uint32_t i = 0; i < 16; i++) {
            const akv_plane *plane = &planes[s * 8 + i % 8];
            ((uint16_t *)(void *)(out + p->slots))[s * 16 + i] = i < 8 ? plane->x : plane->y;
            ((float *)(void *)(out + p->slot_scales))[s * 16 + i] =
                plane->turns ? (float)akv_header_of(segment)->magnitude : 1.0f;
        }
    uint64_t at = p->spans + akv_round_up((uint64_t)p->num_kv_heads * p->num_spans * sizeof(akv_paper_span), ALIGN);
    for (uint32_t head = 0; head < p->num_kv_heads; head++) {
        akv_side_view v[AKV_SIDES];
        view_head(segment, head, v);
        write_head(segment, p, planes, head, v, out);
        const float gain_unit = ((akv_paper_head *)(void *)(out + p->heads))[head].gain_unit;
        akv_paper_span *spans = (akv_paper_span *)(void *)(out + p->spans) + (uint64_t)head * p->num_spans;
        for (uint32_t i = 0; i < p->num_spans; i++) {
            at = place_span(p, v, i, at, &spans[i]);
            write_span(p, v, i, gain_unit, &spans[i], out);
        }
    }
}
