/* SPDX-License-Identifier: Apache-2.0 */
/* pack.c - the private form of a LADDER segment; see packed.h. The only place on the GPU's fast path that knows canonical bytes. */
#include "cuda/pack.h"
#include "core/sizes.h"
#include "cuda/pack_groups.h"
#include "cuda/pack_turns.h"

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

/* Steps of the quantisers as kernels want them; false when they are not what the kernels can do with. */
static bool level_bytes(akv_packed *p)
{
    const int8_t *two = akv_level_steps2;
    bool exact = two[1] - two[0] == two[3] - two[2]; /* the bits of a 2-bit code add up */
    for (uint32_t i = 0; i < 8; i++) {
        p->steps4[i / 4] |= (uint32_t)akv_level_steps4[8 + i] << (i % 4 * 8);
        exact &= akv_level_steps4[8 + i] == -akv_level_steps4[7 - i];
    }
    return exact;
}

static void view_head(const akv_segment *segment, uint32_t head, akv_ladder_view v[AKV_SIDES])
{
    for (int side = 0; side < AKV_SIDES; side++)
        v[side] = akv_view_ladder(segment, side, head);
}

akv_status akv_pack_plan(const akv_segment *segment, akv_packed *p, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t H = h->num_kv_heads, k = h->num_anchors, L = h->num_levels, dk = h->head_dim[0];
    memset(p, 0, sizeof *p);
    if (!level_bytes(p))
        return akv_fail(diag, AKV_E_UNSUPPORTED, "the level steps of this format do not fit the GPU's packed form");
    akv_head_plan *plan = malloc(sizeof *plan);
    if (plan == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for packing a segment");
    p->num_tokens = h->num_tokens;
    p->num_kv_heads = h->num_kv_heads;
    p->num_anchors = h->num_anchors;
    p->span_tokens = akv_span_tokens(h->num_tokens, h->head_dim[0]);
    p->num_spans = (uint32_t)akv_div_up(h->num_tokens, p->span_tokens);
    p->num_levels = h->num_levels;
    p->first_position = h->first_position;
    p->magnitude = (float)h->magnitude;
    p->steps = h->head_dim[0] / 16;
    akv_plane planes[AKV_PACK_MAX_DIM / 2];
    p->fast_steps = akv_sort_planes(h, akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    akv_ladder_view v[AKV_SIDES];
    for (uint32_t head = 0; head < H; head++) {
        view_head(segment, head, v);
        akv_plan_head(v, plan);
        p->key_tiles = plan->key_tiles > p->key_tiles ? plan->key_tiles : p->key_tiles;
        p->value_tiles = plan->value_tiles > p->value_tiles ? plan->value_tiles : p->value_tiles;
    }
    uint64_t at = akv_round_up(sizeof *p, ALIGN);
#define PUT(field, bytes) ((field) = at, at += akv_round_up((bytes), ALIGN))
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t d = h->head_dim[side];
        p->dim[side] = h->head_dim[side];
        p->coords[side] = akv_num_coords(h, side);
        p->basis_dim[side] = h->basis_dim[side];
        p->basis_cols[side] = h->basis_cols[side];
        const uint64_t columns = side == AKV_SIDE_V ? akv_round_up(p->basis_cols[side], 16) * d
                                                    : akv_round_up(p->basis_cols[side], 32) *
                                                          akv_round_up(p->basis_dim[side], 16);
        PUT(p->anchors[side], H * (side == AKV_SIDE_V ? akv_round_up(k, 16) : k) * d);
        PUT(p->anchor_scales[side], H * k * 4);
        PUT(p->units[side], H * d * 4);
        PUT(p->basis[side], H * columns);
        PUT(p->basis_scales[side], H * p->basis_cols[side] * 4);
    }
    PUT(p->slots, dk * 2);
    PUT(p->inv_freq, dk / 2 * 8);
    PUT(p->row_turns, (uint64_t)p->fast_steps * 16 * 4 * 8);
    PUT(p->fast_turns, (uint64_t)p->fast_steps * (p->span_tokens / 32) * 4 * 8);
    PUT(p->slow_turns, (uint64_t)(p->steps - p->fast_steps) * (p->span_tokens / AKV_PACK_WINDOW) * 4 * 8);
    PUT(p->span_turns, (uint64_t)p->num_spans * dk * 8);
    PUT(p->mean_rows, H * p->fast_steps * 32 * 16);
    PUT(p->mean_slow, H * (p->steps - p->fast_steps) * 4 * 8);
    PUT(p->coords_order, dk * 2);
    PUT(p->key_levels, H * L * sizeof(akv_key_level));
    PUT(p->key_planes, H * p->key_tiles * 32 * sizeof(akv_key_plane));
    PUT(p->key_offsets, H * L * p->coords[0] * 4);
    PUT(p->value_levels, H * L * sizeof(akv_value_level));
    PUT(p->value_planes, H * p->value_tiles * 16 * sizeof(akv_value_plane));
    PUT(p->spans, H * p->num_spans * sizeof(akv_packed_span));
#undef PUT
    for (uint32_t head = 0; head < H; head++) {
        view_head(segment, head, v);
        akv_plan_head(v, plan);
        for (uint32_t i = 0; i < p->num_spans; i++) {
            const uint64_t begin = (uint64_t)i * p->span_tokens, rest = h->num_tokens - begin;
            akv_packed_span span;
            at = akv_place_span(plan, v, begin, rest < p->span_tokens ? (uint32_t)rest : p->span_tokens, p->span_tokens, at, &span);
        }
    }
    p->total_bytes = akv_round_up(at, ALIGN);
    free(plan);
    return AKV_OK;
}

/* ------------------------------------------------------------------------------------------------------------- writing */

static void write_turns(const akv_packed *p, const akv_plane *planes, uint8_t *out)
{
    for (uint32_t s = 0; s < p->steps; s++) {
        const akv_plane *step = planes + s * 8;
        const bool fast = s < p->fast_steps;
        const uint32_t window = fast ? 32 : AKV_PACK_WINDOW, windows = p->span_tokens / window;
        for (uint32_t c = 0; c < 4; c++) {
            for (uint32_t r = 0; fast && r < 16; r++)
                akv_put_turn(out + p->row_turns, (s * 16 + r) * 4 + c, step, c, r);
            for (uint32_t w = 0; w < windows; w++)
                if (fast)
                    akv_put_turn(out + p->fast_turns, ((uint64_t)w * 4 + c) * p->fast_steps + s, step, c, 32.0 * w);
                else
                    akv_put_turn(out + p->slow_turns, ((uint64_t)w * 4 + c) * (p->steps - p->fast_steps) + s - p->fast_steps, step, c,
                             window * w + window / 2);
        }
    }
    float *turns = (float *)(void *)(out + p->span_turns);
    for (uint32_t i = 0; i < p->num_spans * 2; i++)
        for (uint32_t j = 0; j < p->dim[0] / 2; j++, turns += 2) {
            const bool slow = j / 8 >= p->fast_steps;
            const double token = slow ? 0 : i % 2 * 16,
                         angle = ((double)p->first_position + (double)(i / 2) * p->span_tokens + token) * planes[j].speed;
            const bool slope = slow && i % 2 == 1;
            turns[0] = (float)(slope ? -1024.0 * planes[j].speed * sin(angle) : cos(angle));
            turns[1] = (float)(slope ? 1024.0 * planes[j].speed * cos(angle) : sin(angle));
        }
}

/* The mean's plane i of a step, as the tensor core's operand: halves x, y of rows r and r + 8 (fast), or x, y alone (slow). */
static void write_mean(const akv_packed *p, uint32_t head, uint32_t s, uint32_t i, double speed, const double m[2], uint8_t *out)
{
    for (uint32_t r = 0; s < p->fast_steps && r < 16; r++) {
        const double c = cos(r * speed), si = sin(r * speed);
        const uint64_t lane = ((uint64_t)head * p->fast_steps + s) * 32 + r % 8 * 4 + i / 2;
        akv_put_half(out + p->mean_rows, lane * 8 + r / 8 * 2 + i % 2, m[0] * c - m[1] * si);
        akv_put_half(out + p->mean_rows, lane * 8 + 4 + r / 8 * 2 + i % 2, m[0] * si + m[1] * c);
    }
    if (s >= p->fast_steps)
        for (uint32_t y = 0; y < 2; y++)
            akv_put_half(out + p->mean_slow, (((uint64_t)head * (p->steps - p->fast_steps) + s - p->fast_steps) * 4 + i / 2) * 4 + y * 2 + i % 2, m[y]);
}

/* Anchors, scales, units, mean, basis of one head. */
static void write_head(const akv_segment *segment, const akv_packed *p, const akv_plane *planes, uint32_t head,
                       const akv_ladder_view v[AKV_SIDES], uint8_t *out)
{
    const uint16_t *mean = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (uint64_t)head * p->dim[0];
    const uint64_t k = p->num_anchors, dk = p->dim[0], vec = p->steps % 4 == 0 ? 4 : 2; /* steps that one load of a lane covers */
    for (int side = 0; side < AKV_SIDES; side++) {
        float *scales = (float *)(void *)(out + p->anchor_scales[side]) + head * k;
        float *units = (float *)(void *)(out + p->units[side]) + head * p->dim[side];
        for (uint64_t a = 0; a < k; a++)
            scales[a] = akv_f16_to_f32(v[side].anchor_scales[a]);
        if (p->basis_cols[side] > 0)
            memcpy(out + p->basis_scales[side] + (uint64_t)head * p->basis_cols[side] * 4, v[side].basis_scales, p->basis_cols[side] * 4u);
        for (uint32_t i = 0; side == AKV_SIDE_V && i < p->dim[1]; i++)
            units[i] = akv_bf16_to_f32(v[1].units[i]);
    }
    const uint32_t dv = p->dim[1], cols = p->basis_cols[1], n = p->basis_dim[1],
                   padded = (uint32_t)akv_round_up(cols, 16);
    uint8_t *values = out + p->anchors[1] + head * akv_round_up(k, 16) * dv,
            *basis = out + p->basis[1] + (uint64_t)head * padded * dv;
    for (uint32_t i = 0; i < dv; i++) {
        for (uint32_t a = 0; a < akv_round_up(k, 16); a++)
            values[akv_value_operand(dv, a, i)] =
                (uint8_t)((a < k ? v[1].anchors[(uint64_t)a * dv + i] : 0) + 128);
        for (uint32_t a = 0; a < padded; a++)
            basis[akv_value_operand(dv, a, i)] =
                (uint8_t)((a < cols && i < n ? v[1].basis[(uint64_t)a * n + i] : 0) + 128);
    }
    const uint32_t key_cols = (uint32_t)akv_round_up(p->basis_cols[0], 32), key_n = p->basis_dim[0],
                   key_dims = (uint32_t)akv_round_up(key_n, 16);
    uint8_t *key_basis = out + p->basis[0] + (uint64_t)head * key_cols * key_dims;
    for (uint32_t a = 0; a < key_cols; a++)
        for (uint32_t i = 0; i < key_dims; i++)
            key_basis[akv_value_operand(key_cols, i, a)] =
                (uint8_t)((a < p->basis_cols[0] && i < key_n ? v[0].basis[(uint64_t)a * key_n + i] : 0) + 128);
    uint8_t *anchors = out + p->anchors[0] + head * k * dk;
    for (uint32_t s = 0; s < p->steps; s++)
        for (uint32_t i = 0; i < 8; i++) {
            double m[2];
            for (uint32_t y = 0; y < 2; y++) {
                const uint32_t dim = y ? planes[s * 8 + i].y : planes[s * 8 + i].x;
                /* a row is [load][lane column][step of the load][x, x, y, y] */
                const uint64_t at = ((s / vec * 4 + i / 2) * vec + s % vec) * 4 + y * 2 + i % 2;
                for (uint64_t a = 0; a < k; a++)
                    anchors[a * dk + at] = (uint8_t)(v[0].anchors[a * dk + dim] + 128);
                const float unit = akv_bf16_to_f32(v[0].units[dim]);
                const bool turns = planes[s * 8 + i].turns; /* the magnitude belongs to the rotary embedding */
                ((float *)(void *)(out + p->units[0]))[head * dk + s * 16 + y * 8 + i] = turns ? unit * p->magnitude : unit;
                ((uint16_t *)(void *)(out + p->slots))[s * 16 + y * 8 + i] = (uint16_t)dim;
                m[y] = (double)akv_bf16_to_f32(mean[dim]) / (double)unit;
            }
            write_mean(p, head, s, i, planes[s * 8 + i].speed, m, out);
        }
}

akv_status akv_pack_write(const akv_segment *segment, const akv_packed *p, uint8_t *out, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t L = p->num_levels, span = p->span_tokens;
    akv_head_plan *plan = malloc(sizeof *plan);
    void *scratch = malloc(akv_span_scratch_bytes());
    if (plan == NULL || scratch == NULL) {
        free(plan);
        free(scratch);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for packing a segment");
    }
    akv_plane planes[AKV_PACK_MAX_DIM / 2];
    akv_sort_planes(h, akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
    memset(out, 0, p->total_bytes);
    memcpy(out, p, sizeof *p);
    write_turns(p, planes, out);
    for (uint32_t j = 0; j < p->dim[0] / 2; j++)
        ((double *)(void *)(out + p->inv_freq))[j] = planes[j].speed;
    memcpy(out + p->coords_order, akv_section_of(segment, AKV_SEC_COORDS), p->dim[0] * 2u);
    uint64_t at = p->spans + akv_round_up((uint64_t)p->num_kv_heads * p->num_spans * sizeof(akv_packed_span), ALIGN);
    for (uint32_t head = 0; head < p->num_kv_heads; head++) {
        akv_ladder_view v[AKV_SIDES];
        view_head(segment, head, v);
        akv_plan_head(v, plan);
        write_head(segment, p, planes, head, v, out);
        akv_write_key_tables(plan, &v[0], (akv_key_level *)(void *)(out + p->key_levels) + head * L,
                             (akv_key_plane *)(void *)(out + p->key_planes) + (uint64_t)head * p->key_tiles * 32,
                             (float *)(void *)(out + p->key_offsets) + head * L * p->coords[0]);
        akv_write_value_tables(plan, &v[1], (akv_value_level *)(void *)(out + p->value_levels) + head * L,
                               (akv_value_plane *)(void *)(out + p->value_planes) + (uint64_t)head * p->value_tiles * 16);
        akv_packed_span *spans = (akv_packed_span *)(void *)(out + p->spans) + (uint64_t)head * p->num_spans;
        for (uint32_t i = 0; i < p->num_spans; i++) {
            const uint64_t begin = i * span, rest = h->num_tokens - begin;
            const uint32_t n = rest < span ? (uint32_t)rest : (uint32_t)span;
            at = akv_place_span(plan, v, begin, n, (uint32_t)span, at, &spans[i]);
            akv_write_span(plan, v, h->num_tokens, begin, n, (uint32_t)span, &spans[i], out, scratch);
        }
    }
    free(plan);
    free(scratch);
    return AKV_OK;
}
