/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder_quad.c - attention over one range of a segment in the LADDER coding, four query rows at a time, in whole numbers
 * (kernels/quad.h). Nothing is rebuilt: anchor logits from the bytes of the anchors, residual logits and value residuals in
 * the coordinates of each level, value anchors through one weight per anchor.
 *
 * What goes through the loop per block of 1024 tokens is the block's logits, 16 KiB, and the tables of the range.
 */
#include "attn/attend.h"
#include "core/ladder.h"
#include "core/rope.h"
#include "kernels/quad.h"

/* Tables that all tasks of a call share (akv_turn_table). */
typedef struct quad_range {
    const akv_task *task;
    const akv_quad_kernels *kernels;
    const akv_header *header;
    const akv_turn_table *table;
    const uint16_t *coords;
    const int32_t *positions; /* NULL: consecutive */
    const double *inv_freq;
    akv_quad_scratch *s;
    akv_ladder_view side[AKV_SIDES];
    akv_quad_shape shape;
    akv_level_list *lists[AKV_SIDES]; /* [levels] */
    akv_quad_level level[AKV_SIDES][AKV_MAX_LEVELS];
    float anchor_scale[AKV_QUAD_ROWS];
    float mean_rest[AKV_QUAD_ROWS];
    uint32_t rows; /* 1..4 of the quad that exist */
    const akv_quad_slow *slow; /* the upper planes go by polynomials; or NULL */
} quad_range;

/* With fewer tokens than one in so many positions, turning the queries anew for each handful costs more than the kernels save. */
#define MOST_GAP 12

static const int32_t *positions_of(const akv_segment *segment)
{
    return akv_header_of(segment)->sections[AKV_SEC_POSITIONS].offset != 0 ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
}

bool akv_quad_fits(const akv_segment *segment)
{
    const akv_header *h = akv_header_of(segment);
    if (h->kind != AKV_SEGMENT_COMPRESSED || h->coding != AKV_CODING_LADDER || h->head_dim[0] > AKV_QUAD_MAX_DIM ||
        h->head_dim[1] > AKV_QUAD_MAX_DIM || h->index_bits > 20)
        return false;
    const int32_t *positions = positions_of(segment);
    return positions == NULL || ((int64_t)positions[h->num_tokens - 1] - positions[0]) / MOST_GAP < (int64_t)h->num_tokens;
}

void akv_quad_take(akv_arena *arena, const akv_quad_sizes *n, akv_quad_scratch *s)
{
    const uint64_t width = 2 * (uint64_t)n->padded_planes + n->padded_rest;
    s->rows = AKV_TAKE(arena, float, 16 * (uint64_t)n->padded_planes);
    s->query16 = AKV_TAKE(arena, int16_t, width * AKV_QUAD_ROWS);
    s->mean_rows = AKV_TAKE(arena, float, 8 * (uint64_t)n->padded_planes);
    s->phase = AKV_TAKE(arena, double, 2 * (uint64_t)n->padded_planes);
    s->logits = AKV_TAKE(arena, float, (uint64_t)AKV_BLOCK_TOKENS * AKV_QUAD_ROWS);
    /* neighbours: a load whose address ends like that of a store before it waits, and the histogram reads one and writes the other */
    s->anchor = AKV_TAKE(arena, uint32_t, AKV_QUAD_TILE);
    s->weight = AKV_TAKE(arena, float, AKV_QUAD_TILE);
    s->hist = AKV_TAKE(arena, float, (uint64_t)n->anchors * AKV_QUAD_ROWS);
    for (int side = 0; side < AKV_SIDES; side++)
        s->anchor_scales[side] = AKV_TAKE(arena, float, n->anchors);
    s->queries = AKV_TAKE(arena, int8_t, n->levels * (n->dim / 4 + 3) * 32); /* three widths round up */
    s->bias = AKV_TAKE(arena, int32_t, n->levels * 8);
    s->query_scale = AKV_TAKE(arena, float, n->levels * AKV_QUAD_ROWS);
    s->sums = AKV_TAKE(arena, float, n->levels * (n->dim / 4 + 3) * 64);
    s->slots = AKV_TAKE(arena, uint16_t, AKV_BLOCK_TOKENS + AKV_QUAD_SPARE_SLOTS);
    s->run = AKV_TAKE(arena, uint8_t, 24576);
    s->coords = AKV_TAKE(arena, float, (uint64_t)n->dim * AKV_QUAD_ROWS);
    s->vectors = AKV_TAKE(arena, float, (uint64_t)n->dim * AKV_QUAD_ROWS);
    s->turn16 = AKV_TAKE(arena, int16_t, AKV_QUAD_TILE * 2 * (uint64_t)n->gap_planes);
    s->terms = AKV_TAKE(arena, float, 4 * AKV_QUAD_SLOW_TERMS * (uint64_t)n->slow_anchors);
    s->mean_terms = AKV_TAKE(arena, float, n->slow_anchors != 0 ? AKV_QUAD_SLOW_TERMS * AKV_QUAD_ROWS : 0);
}

static int8_t *level_query(const quad_range *c, uint32_t l)
{
    return c->s->queries + (size_t)l * (c->s->dim / 4 + 3) * 32;
}

static float *level_sums(const quad_range *c, uint32_t l)
{
    return c->s->sums + (size_t)l * (c->s->dim / 4 + 3) * 64;
}

/*
 * Queries in the units of the anchors' bytes, plane order, counted in steps of anchor_scale: as fine as the sums allow. A sum
 * of the kernel runs over every eighth pair of coordinates of a turned anchor whose planes are at most 23171 long (128 * 128 *
 * sqrt 2), so the planes' lengths in steps may add up to (2^31 - 1) / 23171 = 92681; rounding takes a step a plane at most.
 */
static void prepare_anchors(quad_range *c, const float *query, const uint16_t *mean)
{
    const akv_header *h = c->header;
    const akv_quad_shape *shape = &c->shape;
    const uint32_t P = shape->planes, PP = shape->padded_planes, dim = shape->dim;
    const uint16_t *units = c->side[AKV_SIDE_K].units;
    float *first = c->s->rows, *second = c->s->rows + 8 * (size_t)PP;
    const float *co = c->table->middle, *si = co + PP, magnitude = (float)h->magnitude;
    float unit[AKV_QUAD_MAX_DIM / 2], m0[AKV_QUAD_MAX_DIM / 2], m1[AKV_QUAD_MAX_DIM / 2];
    for (uint32_t j = 0; j < P; j++) {
        const uint32_t at0 = akv_plane_first(shape->style, j), at1 = akv_plane_second(shape->style, 2 * P, j);
        unit[j] = akv_bf16_to_f32(units[at0]);
        m0[j] = akv_bf16_to_f32(mean[at0]);
        m1[j] = akv_bf16_to_f32(mean[at1]);
    }
    memset(first, 0, 16 * (size_t)PP * sizeof *first);
    memset(c->s->query16, 0, (size_t)akv_quad_width(shape) * AKV_QUAD_ROWS * sizeof *c->s->query16);
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        const float *q = query + (size_t)r * dim;
        float x0[AKV_QUAD_MAX_DIM / 2], x1[AKV_QUAD_MAX_DIM / 2], sum[4] = {0}, largest = 0.0f, rest = 0.0f;
        float *restrict row0 = first + r * (size_t)PP, *restrict row1 = second + r * (size_t)PP;
        float *restrict even = first + (4 + r) * (size_t)PP, *restrict odd = second + (4 + r) * (size_t)PP;
        for (uint32_t j = 0; j < P; j++) {
            x0[j] = q[akv_plane_first(shape->style, j)] * magnitude;
            x1[j] = q[akv_plane_second(shape->style, 2 * P, j)] * magnitude;
        }
        for (uint32_t j = 0; j < P; j++) { /* loops without a branch or a call, which compilers vectorise */
            const float e = x0[j] * m0[j] + x1[j] * m1[j], o = x1[j] * m0[j] - x0[j] * m1[j];
            row0[j] = x0[j] * unit[j];
            row1[j] = x1[j] * unit[j];
            even[j] = e * co[j] + o * si[j];
            odd[j] = o * co[j] - e * si[j];
        }
        for (uint32_t j = 0; j < P; j++) {
            const float length = sqrtf(x0[j] * x0[j] + x1[j] * x1[j]) * fabsf(unit[j]);
            sum[j % 8 / 2] += length;
            largest = length > largest ? length : largest;
        }
        for (uint32_t i = 0; i < shape->rest; i++) {
            const float x = q[2 * P + i], length = fabsf(x * akv_bf16_to_f32(units[2 * P + i]));
            rest += x * akv_bf16_to_f32(mean[2 * P + i]);
            sum[i % 8 / 2] += length;
            largest = length > largest ? length : largest;
        }
        float step = largest / 32700.0f, all = 0.0f;
        for (uint32_t e = 0; e < 4; e++) {
            const float fit = sum[e] / (92600.0f - (float)(dim / 4 + 8));
            step = fit > step ? fit : step;
            all += sum[e];
        }
        const float inverse = step > 1e-30f && isfinite(all) ? 1.0f / step : 0.0f;
        c->anchor_scale[r] = !isfinite(all) ? NAN : inverse == 0.0f ? 0.0f : step / 128.0f;
        c->mean_rest[r] = rest;
        for (uint32_t j = 0; j < PP; j++) {
            first[r * PP + j] = inverse == 0.0f ? 0.0f : first[r * PP + j] * inverse;
            second[r * PP + j] = inverse == 0.0f ? 0.0f : second[r * PP + j] * inverse;
        }
        for (uint32_t i = 0; i < shape->rest && inverse != 0.0f; i++)
            c->s->query16[8 * (size_t)PP + i / 8 * 32 + r * 8 + i % 8] =
                (int16_t)rintf(q[2 * P + i] * akv_bf16_to_f32(units[2 * P + i]) * inverse);
    }
}

/* The queries in the coordinates of each key level, 16 bits each. */
static void prepare_levels(quad_range *c, const float *query)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const uint32_t dim = v->dim;
    float *z = c->s->coords, *ordered = c->s->vectors; /* [coords][4]; [4][basis_dim] */
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
        for (uint32_t i = 0; i < v->basis_dim; i++)
            ordered[(size_t)r * v->basis_dim + i] = query[(size_t)r * dim + c->coords[i]];
    c->kernels->bytes_dot(ordered, v->basis, v->basis_cols, v->basis_dim, z);
    for (uint32_t i = 0; i < v->num_coords; i++) {
        const float sigma = akv_bf16_to_f32(v->sigmas[i]) * (i < v->basis_cols ? v->basis_scales[i] : 1.0f);
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            z[i * 4 + r] = sigma * (i < v->basis_cols ? z[i * 4 + r]
                                                      : query[(size_t)r * dim + c->coords[v->basis_dim + i - v->basis_cols]]);
    }
    for (uint32_t l = 0; l < v->num_levels; l++)
        c->kernels->quantise_level(z, &c->lists[AKV_SIDE_K][l], level_query(c, l), c->s->bias + l * 8, c->s->query_scale + l * 4);
}

static void prepare_side(quad_range *c, int side)
{
    const akv_ladder_view *v = &c->side[side];
    for (uint32_t l = 0; l < v->num_levels; l++) {
        akv_level_list *list = &c->lists[side][l];
        c->kernels->list_level(akv_level_table(v, l + 1), v->num_coords, list);
        akv_quad_level *level = &c->level[side][l];
        memcpy(level->by_width, list->by_width, sizeof level->by_width);
        level->bits = list->bits;
        level->fours = akv_quad_fours(list->by_width);
    }
    for (uint32_t a = 0; a < v->num_anchors; a++)
        c->s->anchor_scales[side][a] = akv_f16_to_f32(v->anchor_scales[a]);
}

/* Anchors and weights of the tile at token t0. */
static void tile_anchors(const quad_range *c, int side, uint64_t t0, uint32_t n, uint32_t *anchor, float *weight)
{
    const akv_ladder_view *v = &c->side[side];
    c->kernels->unpack_anchors(v->index + t0 / 8 * v->index_bits, v->index_bits, v->coeff + t0 / 2, c->s->anchor_scales[side], n,
                               anchor, weight);
}

/* Bytes part / parts to (part + 1) / parts of them. */
static void fetch_share(const void *data, uint64_t bytes, uint64_t part, uint64_t parts)
{
    const uint64_t from = bytes * part / parts;
    akv_quad_fetch((const char *)data + from, (uint32_t)(bytes * (part + 1) / parts - from));
}

/*
 * What the hardware does not guess: anchors are read here and there, everything else in a dozen short streams side by side. First
 * the small tables that a task begins with, all at once instead of one after the other, and the basis.
 */
static void fetch_begin(const quad_range *c, const uint16_t *mean)
{
    for (int side = 0; side < AKV_SIDES; side++) {
        const akv_ladder_view *v = &c->side[side];
        akv_quad_fetch(v->tables, v->num_levels * (uint32_t)akv_div_up(v->num_coords, 4));
        akv_quad_fetch(v->anchor_scales, v->num_anchors * 2);
        akv_quad_fetch(v->units, v->dim * 2);
        akv_quad_fetch(v->sigmas, v->num_coords * 2);
        akv_quad_fetch(v->basis_scales, v->basis_cols * 4);
    }
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    akv_quad_fetch(mean, v->dim * 2);
    akv_quad_fetch(v->index + c->task->begin / 8 * v->index_bits, AKV_QUAD_TILE / 2 * v->index_bits);
    akv_quad_fetch(v->coeff + c->task->begin / 2, 2 * AKV_QUAD_TILE);
    akv_quad_fetch(v->basis, v->basis_cols * v->basis_dim);
}

/* The keys' anchors, by fourths between the steps of a task's beginning. */
static void fetch_anchors(const quad_range *c, uint32_t fourth)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    fetch_share(v->anchors, (uint64_t)v->num_anchors * v->dim, fourth, 4);
}

/* A tile's share of what the end of the part will want. */
static void fetch_end(const quad_range *c, uint64_t t0)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_V];
    const uint64_t tiles = akv_div_up(c->task->end - c->task->begin, AKV_QUAD_TILE), tile = (t0 - c->task->begin) / AKV_QUAD_TILE;
    fetch_share(v->anchors, (uint64_t)v->num_anchors * v->dim, tile, tiles);
    fetch_share(v->basis, (uint64_t)v->basis_cols * v->basis_dim, tile, tiles);
}

/* The anchor numbers of the values of a tile and of the keys some tiles further on; levels of the block. */
static void fetch_tile(const quad_range *c, uint64_t t0)
{
    const uint64_t tile = t0 % AKV_BLOCK_TOKENS / AKV_QUAD_TILE;
    for (int side = 0; side < AKV_SIDES; side++) {
        const akv_ladder_view *v = &c->side[side];
        const uint64_t ahead = t0 + (side == AKV_SIDE_K ? 4 * AKV_QUAD_TILE : 0);
        akv_quad_fetch(v->index + ahead / 8 * v->index_bits, AKV_QUAD_TILE / 8 * v->index_bits);
        akv_quad_fetch(v->coeff + ahead / 2, AKV_QUAD_TILE / 2);
        if (tile < v->planes)
            akv_quad_fetch(v->levels + tile * v->plane_bytes + t0 / AKV_BLOCK_TOKENS * (AKV_BLOCK_TOKENS / 8), AKV_BLOCK_TOKENS / 8);
    }
}

/*
 * A tile's share of the codes of its block, both sides. They are most of what is read, so the anchor kernel fetches them while it sums:
 * a burst would fill all the buffers in which lines wait for memory, and the loops would wait for theirs.
 */
static const uint8_t *tile_codes(const quad_range *c, uint64_t t0, uint32_t *bytes)
{
    const uint64_t block = t0 / AKV_BLOCK_TOKENS, tile = t0 % AKV_BLOCK_TOKENS / AKV_QUAD_TILE, tiles = AKV_BLOCK_TOKENS / AKV_QUAD_TILE;
    const uint64_t *offsets = c->side[AKV_SIDE_K].offsets + block * 2; /* keys, then values: neighbours */
    const uint64_t all = offsets[2] - offsets[0], from = all * tile / tiles;
    *bytes = (uint32_t)(all * (tile + 1) / tiles - from);
    return c->side[AKV_SIDE_K].codes + offsets[0] + from;
}

/* The polynomials of the window that begins with this block, if one does. */
static void window_terms(const quad_range *c, uint64_t b0)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const akv_turn_table *table = c->table;
    const uint64_t from = b0 - c->task->begin;
    if (c->slow == NULL || from % table->window != 0)
        return;
    const uint64_t part = c->task->begin / akv_part_tokens(c->header->num_tokens, c->header->num_kv_heads);
    const uint64_t windows = akv_div_up(akv_part_tokens(c->header->num_tokens, c->header->num_kv_heads), table->window);
    c->slow->terms(c->s->rows + 16 * AKV_QUAD_SLOW_PLANES, table->middles + (part * windows + from / table->window) * 64, table->series,
                   table->largest, v->anchors, v->num_anchors, c->s->terms, c->s->mean_terms);
}

static void anchor_logits(const quad_range *c, uint64_t b0, uint32_t n)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const uint32_t PP = c->shape.padded_planes;
    uint32_t *anchor = c->s->anchor;
    float *weight = c->s->weight;
    const uint32_t planes = c->slow != NULL ? AKV_QUAD_SLOW_PLANES : PP; /* that are turned tile by tile */
    window_terms(c, b0);
    for (uint32_t t = 0; t < n; t += AKV_QUAD_TILE) {
        const uint32_t in_tile = n - t < AKV_QUAD_TILE ? n - t : AKV_QUAD_TILE;
        float *logits = c->s->logits + (size_t)t * 4;
        uint32_t bytes = 0;
        const uint8_t *codes = tile_codes(c, b0 + t, &bytes);
        fetch_tile(c, b0 + t);
        /* on to the next tile each time: a range's products in double lose less than 1e-13 */
        const double *step = c->slow != NULL ? c->table->lower_step : c->table->step;
        c->kernels->turn_rows(c->s->rows, c->s->phase, c->s->phase + PP, step, planes, c->s->query16, c->s->mean_rows);
        fetch_end(c, b0 + t);
        if (c->slow != NULL) {
            const float half = (float)(c->table->window / 2);
            const float first = ((float)((b0 + t - c->task->begin) % c->table->window) - half) / half;
            c->slow->mean_logits(c->s->mean_rows, c->table->mean, c->table->fast, c->table->moments, c->s->mean_terms,
                                 first + 31.5f / half, 32.0f / half, logits);
            tile_anchors(c, AKV_SIDE_K, b0 + t, in_tile, anchor, weight);
            c->slow->anchor_logits(v->anchors, c->table->turn16, c->s->query16, anchor, weight, c->anchor_scale, in_tile, c->s->terms,
                                   first, 1.0f / half, logits, codes, bytes);
            continue;
        }
        c->kernels->mean_logits(c->s->mean_rows, PP, c->table->mean, c->table->fast, c->table->moments, c->mean_rest, logits);
        tile_anchors(c, AKV_SIDE_K, b0 + t, in_tile, anchor, weight);
        c->kernels->anchor_logits(v->anchors, &c->shape, c->table->turn16, c->s->query16, anchor, weight, c->anchor_scale, in_tile,
                                  logits, codes, bytes);
    }
}

/* The phase of position `at` -> that of `to`. Drift below 1e-13, since every block begins with an exact one. */
static void move_phase(const quad_range *c, int64_t at, int64_t to)
{
    const uint32_t PP = c->shape.padded_planes;
    double *co = c->s->phase, *si = c->s->phase + PP;
    if (to < at || to - at >= 8 * AKV_QUAD_TILE) {
        akv_rope_phase(c->inv_freq, c->shape.planes, to, co, si);
        return;
    }
    while (at < to) {
        const uint32_t left = to - at < AKV_QUAD_TILE ? (uint32_t)(to - at) : AKV_QUAD_TILE;
        const uint32_t by = left == AKV_QUAD_TILE || left < 8 ? left : left & ~7u;
        const double *turn = by == AKV_QUAD_TILE ? c->table->step : c->table->turns + 2 * (size_t)PP * (by < 8 ? by : 8 + by / 8);
        for (uint32_t j = 0; j < PP; j++) {
            const double x = co[j] * turn[j] - si[j] * turn[PP + j];
            si[j] = si[j] * turn[j] + co[j] * turn[PP + j];
            co[j] = x;
        }
        at += by;
    }
}

/*
 * anchor_logits where positions have gaps: as many tokens at a time as lie within 64 positions from the first of them, side by side as if
 * they were a tile, each with its own row of the table of turns.
 */
static void anchor_logits_gaps(const quad_range *c, uint64_t b0, uint32_t n)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const uint32_t PP = c->shape.padded_planes;
    const int32_t *positions = c->positions + b0;
    uint32_t anchor[AKV_BLOCK_TOKENS + 16] = {0};
    float weight[AKV_BLOCK_TOKENS + 16] = {0};
    float mean[AKV_QUAD_TILE * AKV_QUAD_ROWS], tile[AKV_QUAD_TILE * AKV_QUAD_ROWS] = {0};
    for (uint32_t t = 0; t < n; t += AKV_QUAD_TILE) {
        uint32_t bytes = 0;
        const uint8_t *codes = tile_codes(c, b0 + t, &bytes);
        akv_quad_fetch(codes, bytes);
        fetch_tile(c, b0 + t);
        fetch_end(c, b0 + t);
        tile_anchors(c, AKV_SIDE_K, b0 + t, n - t < AKV_QUAD_TILE ? n - t : AKV_QUAD_TILE, anchor + t, weight + t);
    }
    int64_t at = INT64_MAX; /* exact at first */
    for (uint32_t i = 0, m; i < n; i += m) {
        const int64_t base = positions[i];
        for (m = 1; m < AKV_QUAD_TILE && i + m < n && positions[i + m] - base < AKV_QUAD_TILE; m++)
            continue;
        move_phase(c, at, base);
        at = base + AKV_QUAD_TILE;
        c->kernels->turn_rows(c->s->rows, c->s->phase, c->s->phase + PP, c->table->step, PP, c->s->query16, c->s->mean_rows);
        c->kernels->mean_logits(c->s->mean_rows, PP, c->table->mean, c->table->fast, c->table->moments, c->mean_rest, mean);
        const int16_t *turn16 = c->table->turn16;
        const bool gaps = positions[i + m - 1] - base >= (int64_t)m;
        for (uint32_t k = 0; gaps && k < akv_round_up(m, 16); k++) {
            const int64_t offset = k < m ? positions[i + k] - base : 0;
            memcpy(c->s->turn16 + (size_t)k * 2 * PP, turn16 + offset * 2 * PP, 2 * (size_t)PP * sizeof *turn16);
        }
        for (uint32_t k = 0; k < m; k++)
            memcpy(tile + akv_quad_slot(k) * 4, mean + akv_quad_slot((uint32_t)(positions[i + k] - base)) * 4, 4 * sizeof *tile);
        c->kernels->anchor_logits(v->anchors, &c->shape, gaps ? c->s->turn16 : turn16, c->s->query16, anchor + i, weight + i,
                                  c->anchor_scale, m, tile, v->anchors, 0);
        for (uint32_t k = 0; k < m; k++)
            memcpy(c->s->logits + (size_t)akv_quad_slot(i + k) * 4, tile + akv_quad_slot(k) * 4, 4 * sizeof *tile);
    }
}

static void residuals(const quad_range *c, int side, uint64_t block, uint32_t n)
{
    const akv_ladder_view *v = &c->side[side];
    uint32_t first[AKV_MAX_LEVELS + 2];
    const uint8_t *run = v->codes + v->offsets[block * 2];
    c->kernels->sort_levels(v->levels + block * (AKV_BLOCK_TOKENS / 8), v->plane_bytes, v->planes, n, v->num_levels, c->s->slots, first);
    for (uint32_t l = 0; l < v->num_levels; l++) {
        const uint32_t count = first[l + 2] - first[l + 1];
        const akv_quad_level *level = &c->level[side][l];
        if (count == 0)
            continue;
        const uint16_t *slots = c->s->slots + first[l + 1];
        if (side == AKV_SIDE_K)
            c->kernels->code_dots(run, count, level, level_query(c, l), c->s->bias + l * 8, c->s->query_scale + l * 4, slots,
                                  c->s->logits);
        else
            c->kernels->code_sums(run, count, level, slots, c->s->logits, c->s->run, level_sums(c, l));
        run += akv_run_bytes(count, level->bits);
    }
}

/*
 * The running softmax of a quad. Weights are relative to base, which follows the maximum only when that has run away by
 * more than HEADROOM: then earlier sums must be multiplied, which is rare; exp(HEADROOM) times a sum fits fp32 easily.
 */
#define HEADROOM 8.0f
typedef struct quad_softmax {
    float max[AKV_QUAD_ROWS];
    float base[AKV_QUAD_ROWS]; /* finite; meaningless while max is minus infinity */
    float sum[AKV_QUAD_ROWS];
} quad_softmax;

/* Logits of the block -> weights. True: earlier sums must be multiplied by shrink[r]. */
static bool block_weights(const quad_range *c, uint32_t n, quad_softmax *f, float *shrink)
{
    const float cap = (float)c->task->params->logit_softcap;
    const uint32_t slots = (uint32_t)akv_round_up(n, 16);
    float *x = c->s->logits;
    for (uint32_t i = 0; cap != 0.0f && i < slots * 4; i++)
        x[i] = cap * akv_tanhf(x[i] / cap);
    for (uint32_t t = n; t < slots; t++)
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            x[(size_t)akv_quad_slot(t) * 4 + r] = -INFINITY;
    bool any = false;
    float before[AKV_QUAD_ROWS];
    memcpy(before, f->max, sizeof before);
    c->kernels->row_max(x, slots, f->max);
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        shrink[r] = 1.0f;
        if (f->max[r] == -INFINITY || (before[r] != -INFINITY && f->max[r] <= f->base[r] + HEADROOM))
            continue; /* where only NaN came by, the base of 0 keeps it in the sum */
        shrink[r] = before[r] == -INFINITY ? 1.0f : akv_expf(f->base[r] - f->max[r]);
        any |= before[r] != -INFINITY;
        f->base[r] = f->max[r];
        f->sum[r] *= shrink[r];
    }
    c->kernels->exp_sum(x, slots, f->base, f->sum);
    return any;
}

static void shrink_sums(const quad_range *c, const float *shrink)
{
    float *hist = c->s->hist;
    for (uint32_t a = 0; a < c->header->num_anchors; a++)
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            hist[a * 4 + r] *= shrink[r];
    for (uint32_t l = 0; l < c->header->num_levels; l++) {
        float *sums = level_sums(c, l);
        for (uint32_t i = 0; i < c->level[AKV_SIDE_V][l].fours * 4; i++)
            for (uint32_t k = 0; k < 16; k++)
                sums[i * 16 + k] *= shrink[i % 4];
    }
}

/* Value anchors and value residuals back to the value space: acc [rows][d_v]. */
static void finish(const quad_range *c, float *acc)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_V];
    const uint32_t dv = v->dim;
    float *out = c->s->vectors, *z = c->s->coords; /* [4][dv]; [coords][4] */
    memset(out, 0, AKV_QUAD_ROWS * (size_t)dv * sizeof *out);
    c->kernels->bytes_sum(c->s->hist, v->anchors, v->num_anchors, dv, out);
    for (uint32_t r = 0; r < c->rows; r++)
        for (uint32_t i = 0; i < dv; i++)
            acc[(size_t)r * dv + i] = out[(size_t)r * dv + i] * akv_bf16_to_f32(v->units[i]);

    memset(z, 0, AKV_QUAD_ROWS * (size_t)v->num_coords * sizeof *z);
    for (uint32_t l = 0; l < v->num_levels; l++)
        c->kernels->place_sums(level_sums(c, l), &c->lists[AKV_SIDE_V][l], z);
    for (uint32_t i = 0; i < v->num_coords; i++) {
        const float sigma = akv_bf16_to_f32(v->sigmas[i]) * (i < v->basis_cols ? v->basis_scales[i] : 1.0f);
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            z[i * 4 + r] *= sigma;
    }
    memset(out, 0, AKV_QUAD_ROWS * (size_t)dv * sizeof *out);
    c->kernels->bytes_sum(z, v->basis, v->basis_cols, v->basis_dim, out); /* [4][basis_dim] */
    for (uint32_t r = 0; r < c->rows; r++) {
        for (uint32_t i = 0; i < v->basis_dim; i++)
            acc[(size_t)r * dv + i] += out[(size_t)r * v->basis_dim + i];
        for (uint32_t i = v->basis_dim; i < dv; i++) /* coordinates without a basis */
            acc[(size_t)r * dv + i] += z[(v->basis_cols + i - v->basis_dim) * 4 + r];
    }
}

void akv_attend_ladder_quads(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *s,
                             akv_partial *out)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t dk = h->head_dim[AKV_SIDE_K], dv = h->head_dim[AKV_SIDE_V];
    const uint16_t *mean = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (size_t)task->kv_head * dk;
    quad_range c;
    c.task = task;
    c.kernels = akv_quad_best();
    c.header = h;
    c.table = table;
    c.coords = akv_section_of(segment, AKV_SEC_COORDS);
    c.positions = positions_of(segment);
    c.inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    c.s = &s->quad;
    c.slow = table->window != 0 ? c.kernels->slow : NULL;
    c.shape = akv_quad_shape_of(dk, h->rotary_dim, (akv_rope_style)h->rope_style);
    for (int side = 0; side < AKV_SIDES; side++) {
        c.side[side] = akv_view_ladder(segment, side, task->kv_head);
        c.lists[side] = s->lists[side];
    }
    fetch_begin(&c, mean);
    for (int side = 0; side < AKV_SIDES; side++)
        prepare_side(&c, side);
    fetch_anchors(&c, 0);
    akv_load_queries(task, s);
    for (size_t i = 0; i < (size_t)task->rows * dk; i++)
        s->query[i] *= (float)task->params->sm_scale;

    for (uint32_t row0 = 0; row0 < task->rows; row0 += AKV_QUAD_ROWS) {
        float query[AKV_QUAD_ROWS * AKV_QUAD_MAX_DIM];
        quad_softmax f;
        c.rows = task->rows - row0 < AKV_QUAD_ROWS ? task->rows - row0 : AKV_QUAD_ROWS;
        memset(query, 0, AKV_QUAD_ROWS * (size_t)dk * sizeof *query);
        memcpy(query, s->query + (size_t)row0 * dk, (size_t)c.rows * dk * sizeof *query);
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
            f.max[r] = -INFINITY;
            f.base[r] = f.sum[r] = 0.0f;
        }
        if (row0 == 0)
            fetch_anchors(&c, 1);
        prepare_levels(&c, query);
        if (row0 == 0)
            fetch_anchors(&c, 2);
        akv_tables_wait(task->tables);
        if (c.slow != NULL)
            c.slow->rows(query, (float)h->magnitude, c.side[AKV_SIDE_K].units, mean, table->middle, c.s->rows, c.anchor_scale);
        else
            prepare_anchors(&c, query, mean);
        if (row0 == 0)
            fetch_anchors(&c, 3);
        memset(c.s->hist, 0, AKV_QUAD_ROWS * (size_t)h->num_anchors * sizeof(float));
        for (uint32_t l = 0; l < h->num_levels; l++)
            memset(level_sums(&c, l), 0, (size_t)c.level[AKV_SIDE_V][l].fours * 64 * sizeof(float));
        memset(c.s->phase, 0, 2 * (size_t)c.shape.padded_planes * sizeof(double));
        if (c.positions == NULL)
            memcpy(c.s->phase, table->begin + 2 * (size_t)c.shape.padded_planes * task->part,
                   2 * (size_t)c.shape.padded_planes * sizeof(double));

        for (uint64_t b0 = task->begin; b0 < task->end; b0 += AKV_BLOCK_TOKENS) {
            const uint32_t n = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
            const uint64_t block = b0 / AKV_BLOCK_TOKENS;
            float shrink[AKV_QUAD_ROWS];
            if (c.positions == NULL)
                anchor_logits(&c, b0, n);
            else
                anchor_logits_gaps(&c, b0, n);
            residuals(&c, AKV_SIDE_K, block, n);
            if (block_weights(&c, n, &f, shrink))
                shrink_sums(&c, shrink);
            for (uint32_t t = 0; t < n; t += AKV_QUAD_TILE) {
                const uint32_t in_tile = n - t < AKV_QUAD_TILE ? n - t : AKV_QUAD_TILE;
                tile_anchors(&c, AKV_SIDE_V, b0 + t, in_tile, c.s->anchor, c.s->weight);
                c.kernels->histogram(c.s->anchor, c.s->weight, in_tile, c.s->logits + (size_t)t * 4, c.s->hist);
            }
            residuals(&c, AKV_SIDE_V, block, n);
        }
        finish(&c, out->acc + (size_t)row0 * dv);
        for (uint32_t r = 0; r < c.rows; r++) { /* relative to the maximum, as every part is */
            const float down = f.max[r] == -INFINITY ? 1.0f : akv_expf(f.base[r] - f.max[r]);
            out->max[row0 + r] = f.max[r];
            out->sum[row0 + r] = f.sum[r] * down;
            for (uint32_t i = 0; i < dv; i++)
                out->acc[(size_t)(row0 + r) * dv + i] *= down;
        }
    }
}
