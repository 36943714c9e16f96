/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder.c - attention over one range of a segment in the LADDER coding. As in compressed.c nothing is rebuilt; besides, the
 * queries are brought once into the coordinates of each level, and value residuals are summed per level there.
 */
#include "attn/attend.h"
#include "core/ladder.h"

typedef struct akv_ladder_range {
    const akv_task *task;
    const akv_header *header;
    const int32_t *positions; /* NULL: consecutive */
    const uint16_t *coords;   /* key coordinates in basis order */
    const akv_turn_table *table;
    akv_scratch *s;
    akv_ladder_view side[AKV_SIDES];
    float units[AKV_MAX_HEAD_DIM]; /* of keys, plane order */
    akv_span span;
} akv_ladder_range;

/* rows[r][i] *= units[i]. */
static void apply_units(float *rows, uint32_t num_rows, uint32_t dim, const float *units)
{
    for (uint32_t r = 0; r < num_rows; r++)
        for (uint32_t i = 0; i < dim; i++)
            rows[(size_t)r * dim + i] *= units[i];
}

/* Units in plane order, and the mean key in units (own order): anchors are bytes, and this is the origin they count from. */
static void prepare_anchors(akv_ladder_range *c, const uint16_t *mean)
{
    const akv_header *h = c->header;
    const uint32_t dk = c->side[AKV_SIDE_K].dim, planes = h->rotary_dim / 2;
    const uint16_t *units = c->side[AKV_SIDE_K].units;
    for (uint32_t i = 0; i < dk; i++)
        c->s->mean[i] = akv_bf16_to_f32(mean[i]) / akv_bf16_to_f32(units[i]);
    for (uint32_t j = 0; j < planes; j++)
        c->units[j] = c->units[j + planes] = akv_bf16_to_f32(units[h->rope_style == AKV_ROPE_HALF_SPLIT ? j : 2 * j]);
    for (uint32_t i = h->rotary_dim; i < dk; i++)
        c->units[i] = akv_bf16_to_f32(units[i]);
    if (planes == 0) { /* never turned: the queries as they are */
        memcpy(c->s->turned, c->s->query, (size_t)c->task->rows * dk * sizeof(float));
        apply_units(c->s->turned, c->task->rows, dk, c->units);
    }
}

/* Level lists of both sides, and the queries in the coordinates of each key level, sigma included. */
static void prepare_levels(akv_ladder_range *c)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const uint32_t rows = c->task->rows, levels = v->num_levels;
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint32_t l = 0; l < levels; l++)
            akv_ladder_list(&c->side[side], l + 1, &c->s->lists[side][l]);
    for (uint32_t r = 0; r < rows; r++) {
        const float *q = c->s->query + (size_t)r * v->dim;
        float ordered[AKV_MAX_HEAD_DIM], z[AKV_MAX_HEAD_DIM];
        for (uint32_t i = 0; i < v->dim; i++)
            ordered[i] = q[c->coords[i]];
        for (uint32_t i = 0; i < v->basis_cols; i++) {
            c->task->kernels->row_i8(v->basis + (size_t)i * v->basis_dim, v->basis_dim, c->s->vector);
            z[i] = akv_dot_f32(c->s->vector, ordered, v->basis_dim) * v->basis_scales[i];
        }
        for (uint32_t i = v->basis_dim; i < v->dim; i++)
            z[v->basis_cols + i - v->basis_dim] = ordered[i];
        for (uint32_t i = 0; i < v->num_coords; i++)
            z[i] *= akv_bf16_to_f32(v->sigmas[i]);
        for (uint32_t l = 0; l < levels; l++) {
            const akv_level_list *list = &c->s->lists[AKV_SIDE_K][l];
            float *out = c->s->levels[AKV_SIDE_K] + (size_t)l * rows * v->dim + (size_t)r * list->count;
            for (uint32_t i = 0; i < list->count; i++)
                out[i] = z[list->coord[i]];
        }
    }
}

static void anchor_logits(akv_ladder_range *c, uint64_t b0, uint32_t n)
{
    const akv_header *h = c->header;
    const akv_ladder_view *v = &c->side[AKV_SIDE_K];
    const akv_kernels *kernels = c->task->kernels;
    const uint32_t rows = c->task->rows;
    const bool turns = h->rotary_dim != 0; /* else there is no table */
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t token = b0 + i;
        const uint32_t a = akv_ladder_index(v, token);
        size_t offset = 0;
        if (turns && akv_span_to(&c->span, akv_token_position(h, c->positions, token), &offset))
            apply_units(c->s->turned, rows, v->dim, c->units);
        kernels->centred_logits(v->anchors + (size_t)a * v->dim, akv_ladder_weight(v, token, a), c->s->mean, v->dim, h->rotary_dim,
                                (akv_rope_style)h->rope_style, turns ? c->table->cos + offset : NULL,
                                turns ? c->table->sin + offset : NULL, c->s->turned, rows,
                                c->s->logits + i, AKV_BLOCK_TOKENS);
    }
}

/* Gains of one group, lanes without a residual 0. */
static void group_gains(const uint8_t *run, uint32_t at, uint32_t g, float out[AKV_GROUP_LANES])
{
    for (uint32_t l = 0; l < AKV_GROUP_LANES; l++)
        out[l] = l < g ? akv_gain_value((run[(at + l) / 2] >> ((at + l) % 2 * 4)) & 15u) : 0.0f;
}

/* One group of one run of a block: keys add to the logits, values add to their level's sums. */
static void do_group(akv_ladder_range *c, int side, uint32_t l, const uint8_t *run, const uint8_t *codes, uint32_t at, uint32_t g,
                     const uint16_t *tokens)
{
    const akv_kernels *kernels = c->task->kernels;
    const akv_level_list *list = &c->s->lists[side][l];
    const uint32_t rows = c->task->rows, dim = c->side[side].dim;
    float gains[AKV_GROUP_LANES], lanes[AKV_ATTEND_ROWS * AKV_GROUP_LANES];
    float *level_rows = c->s->levels[side] + (size_t)l * rows * dim;
    kernels->unpack_level(codes, g, list->width, list->count, c->s->group);
    group_gains(run, at, g, gains);
    if (side == AKV_SIDE_K) {
        kernels->group_dot(level_rows, rows, c->s->group, list->count, lanes);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < g; i++)
                c->s->logits[(size_t)r * AKV_BLOCK_TOKENS + tokens[i]] += gains[i] * lanes[r * AKV_GROUP_LANES + i];
        return;
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < AKV_GROUP_LANES; i++)
            lanes[r * AKV_GROUP_LANES + i] = i < g ? gains[i] * c->s->logits[(size_t)r * AKV_BLOCK_TOKENS + tokens[i]] : 0.0f;
    kernels->group_accumulate(lanes, rows, c->s->group, list->count, level_rows);
}

static void residuals(akv_ladder_range *c, int side, uint64_t block, uint32_t n)
{
    const akv_ladder_view *v = &c->side[side];
    uint16_t tokens[AKV_BLOCK_TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 2];
    const uint8_t *run = v->codes + v->offsets[block * 2];
    akv_ladder_sort(v, block, n, tokens, first);
    for (uint32_t l = 0; l < v->num_levels; l++) {
        const uint32_t count = first[l + 2] - first[l + 1], bits = c->s->lists[side][l].bits;
        if (count == 0)
            continue;
        const uint8_t *codes = run + (count + 1) / 2;
        for (uint32_t at = 0; at < count; at += AKV_GROUP_LANES) {
            uint32_t g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
            do_group(c, side, l, run, codes + (uint64_t)(at / AKV_GROUP_LANES) * 2 * bits, at, g, tokens + first[l + 1] + at);
        }
        run += akv_run_bytes(count, bits);
    }
}

static void value_anchors(akv_ladder_range *c, uint64_t b0, uint32_t n)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_V];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = akv_ladder_index(v, b0 + i);
        float weight = akv_ladder_weight(v, b0 + i, a);
        for (uint32_t r = 0; r < c->task->rows; r++)
            c->s->hist[(size_t)r * v->num_anchors + a] += weight * c->s->logits[(size_t)r * AKV_BLOCK_TOKENS + i];
    }
}

/* Value anchors and value residuals back to the value space, added to the partial output. */
static void finish_rows(akv_ladder_range *c, akv_partial *out)
{
    const akv_ladder_view *v = &c->side[AKV_SIDE_V];
    const akv_kernels *kernels = c->task->kernels;
    const uint32_t rows = c->task->rows, dv = v->dim;
    float *sum = c->s->coded; /* [rows, d_v] */

    memset(sum, 0, (size_t)rows * dv * sizeof *sum);
    for (uint32_t a = 0; a < v->num_anchors; a++) {
        kernels->row_i8(v->anchors + (size_t)a * dv, dv, c->s->vector);
        kernels->rows_axpy(c->s->hist + a, v->num_anchors, rows, c->s->vector, dv, sum);
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < dv; i++)
            out->acc[(size_t)r * dv + i] += sum[(size_t)r * dv + i] * akv_bf16_to_f32(v->units[i]);

    memset(sum, 0, (size_t)rows * dv * sizeof *sum); /* [rows, coords] */
    for (uint32_t l = 0; l < v->num_levels; l++) {
        const akv_level_list *list = &c->s->lists[AKV_SIDE_V][l];
        const float *level_rows = c->s->levels[AKV_SIDE_V] + (size_t)l * rows * dv;
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < list->count; i++)
                sum[(size_t)r * dv + list->coord[i]] += level_rows[(size_t)r * list->count + i];
    }
    for (uint32_t i = 0; i < v->basis_cols; i++) {
        const float scale = v->basis_scales[i] * akv_bf16_to_f32(v->sigmas[i]);
        kernels->row_i8(v->basis + (size_t)i * v->basis_dim, v->basis_dim, c->s->vector);
        for (uint32_t d = 0; d < v->basis_dim; d++)
            c->s->vector[d] *= scale;
        kernels->rows_axpy(sum + i, dv, rows, c->s->vector, dv, out->acc);
    }
    for (uint32_t r = 0; r < rows; r++) /* coordinates without a basis */
        for (uint32_t i = v->basis_dim; i < dv; i++) {
            const uint32_t coord = v->basis_cols + i - v->basis_dim;
            out->acc[(size_t)r * dv + i] += sum[(size_t)r * dv + coord] * akv_bf16_to_f32(v->sigmas[coord]);
        }
}

void akv_attend_ladder(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *s,
                       akv_partial *out)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t rows = task->rows, dv = h->head_dim[AKV_SIDE_V];
    akv_ladder_range c;

    c.task = task;
    c.header = h;
    c.positions = h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    c.coords = akv_section_of(segment, AKV_SEC_COORDS);
    c.table = table;
    c.s = s;
    for (int side = 0; side < AKV_SIDES; side++)
        c.side[side] = akv_view_ladder(segment, side, task->kv_head);
    c.span = akv_span_begin(task, h, akv_section_of(segment, AKV_SEC_INV_FREQ), s);

    akv_load_queries(task, s);
    prepare_anchors(&c, (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (size_t)task->kv_head * h->head_dim[AKV_SIDE_K]);
    prepare_levels(&c);
    memset(s->hist, 0, (size_t)rows * h->num_anchors * sizeof(float));
    memset(s->levels[AKV_SIDE_V], 0, (size_t)h->num_levels * rows * dv * sizeof(float));

    for (uint64_t b0 = task->begin; b0 < task->end; b0 += AKV_BLOCK_TOKENS) {
        const uint32_t n = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
        const uint64_t block = b0 / AKV_BLOCK_TOKENS;
        float shrink[AKV_ATTEND_ROWS];
        anchor_logits(&c, b0, n);
        residuals(&c, AKV_SIDE_K, block, n);
        akv_softmax_block(task, s->logits, AKV_BLOCK_TOKENS, 0, n, false, out->max, out->sum, shrink);
        akv_shrink_rows(s->hist, rows, h->num_anchors, shrink);
        for (uint32_t l = 0; l < h->num_levels; l++)
            akv_shrink_rows(s->levels[AKV_SIDE_V] + (size_t)l * rows * dv, rows, s->lists[AKV_SIDE_V][l].count, shrink);
        value_anchors(&c, b0, n);
        residuals(&c, AKV_SIDE_V, block, n);
    }
    finish_rows(&c, out);
}
