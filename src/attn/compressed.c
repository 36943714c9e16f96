/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compressed.c - attention over one range of a compressed segment. Keys and values are never rebuilt: an anchor logit is
 * coefficient x (q . turned anchor), a residual logit is gain x (Hd q . levels), value anchors are weighted through one
 * scalar per anchor, value residuals are summed in the transformed domain (docs/method.md "attention").
 */
#include "attn/attend.h"
#include "core/rope.h"
#include "core/view.h"

typedef struct akv_range {
    const akv_task *task;
    const akv_header *header;
    const int32_t *positions; /* NULL: consecutive */
    const akv_turn_table *table;
    akv_scratch *s;
    akv_side_view keys;
    akv_side_view values;
    float signs[AKV_SIDES][AKV_MAX_HEAD_DIM];
    akv_span span;
} akv_range;

akv_span akv_span_begin(const akv_task *task, const akv_header *header, const double *inv_freq, akv_scratch *scratch)
{
    akv_span span = {task, header, inv_freq, scratch, INT64_MIN};
    const uint32_t planes = header->rotary_dim / 2;
    if (planes != 0)
        akv_rope_phase(inv_freq, planes, -AKV_TURN_SPAN, scratch->phase + 2 * planes, scratch->phase + 3 * planes);
    return span;
}

bool akv_span_to(akv_span *s, int64_t position, size_t *table_row)
{
    const akv_header *h = s->header;
    const uint32_t planes = h->rotary_dim / 2, dk = h->head_dim[AKV_SIDE_K];
    const int64_t span = position >= 0 ? position / AKV_TURN_SPAN : -((AKV_TURN_SPAN - 1 - position) / AKV_TURN_SPAN);
    *table_row = (size_t)(position - span * AKV_TURN_SPAN) * planes;
    if (span == s->at)
        return false;
    double *cosine = s->scratch->phase, *sine = cosine + planes;
    const double *step_cos = sine + planes, *step_sin = step_cos + planes;
    /* One step forward is a complex product; every 16th span starts from the exact phase again (drift below 1e-14). */
    if (s->at != INT64_MIN && span == s->at + 1 && (span & 15) != 0)
        for (uint32_t j = 0; j < planes; j++) {
            double c = cosine[j];
            cosine[j] = c * step_cos[j] - sine[j] * step_sin[j];
            sine[j] = sine[j] * step_cos[j] + c * step_sin[j];
        }
    else
        akv_rope_phase(s->inv_freq, planes, -span * AKV_TURN_SPAN, cosine, sine);
    s->at = span;
    for (uint32_t r = 0; r < s->task->rows; r++)
        akv_turn_f32(s->scratch->query + (size_t)r * dk, dk, h->rotary_dim, (akv_rope_style)h->rope_style, cosine, sine,
                     h->magnitude, s->scratch->turned + (size_t)r * dk);
    return true;
}

static void anchor_logits(akv_range *c, uint64_t b0, uint32_t n)
{
    const akv_header *h = c->header;
    const akv_kernels *kernels = c->task->kernels;
    const uint32_t dk = c->keys.dim, planes = h->rotary_dim / 2, rows = c->task->rows;
    const bool turn = planes != 0 && !(h->flags & AKV_FLAG_ANCHORS_POST_ROPE);
    akv_scratch *s = c->s;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t token = b0 + i;
        const uint16_t *anchor = c->keys.anchors + (size_t)akv_view_index(&c->keys, token) * dk;
        float gamma = akv_f16_to_f32(c->keys.coeff[token]);
        if (!turn) {
            kernels->anchor_logits(anchor, dk, 0, AKV_ROPE_HALF_SPLIT, NULL, NULL, gamma, s->query, rows, s->logits + i,
                                   AKV_BLOCK_TOKENS);
            continue;
        }
        size_t offset;
        akv_span_to(&c->span, akv_token_position(h, c->positions, token), &offset);
        kernels->anchor_logits(anchor, dk, h->rotary_dim, (akv_rope_style)h->rope_style, c->table->cos + offset,
                               c->table->sin + offset, gamma, s->turned, rows, s->logits + i, AKV_BLOCK_TOKENS);
    }
}

/* Gains of one group, lanes without a residual 0. */
static void group_gains(const akv_side_view *v, uint64_t first, uint32_t g, float out[AKV_GROUP_LANES])
{
    for (uint32_t l = 0; l < AKV_GROUP_LANES; l++)
        out[l] = l < g ? akv_f16_to_f32(v->gains[first + l]) : 0.0f;
}

static void residual_logits(akv_range *c, uint64_t block, uint32_t n)
{
    uint16_t owners[AKV_BLOCK_TOKENS];
    uint32_t count = akv_view_owners(&c->keys, block, n, owners);
    uint64_t first = c->keys.ranks[block];
    const uint32_t dk = c->keys.dim;
    const akv_kernels *kernels = c->task->kernels;
    for (uint32_t at = 0; at < count; at += AKV_GROUP_LANES) {
        uint32_t g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
        float gains[AKV_GROUP_LANES], dots[AKV_ATTEND_ROWS * AKV_GROUP_LANES];
        kernels->unpack_group(c->keys.codes + (first + at) * c->keys.code_bytes, g, dk, c->keys.levels[2], c->keys.levels[3],
                              c->s->group);
        kernels->group_dot(c->s->rotated, c->task->rows, c->s->group, dk, dots);
        group_gains(&c->keys, first + at, g, gains);
        for (uint32_t r = 0; r < c->task->rows; r++) {
            float *logits = c->s->logits + (size_t)r * AKV_BLOCK_TOKENS;
            for (uint32_t l = 0; l < g; l++)
                logits[owners[at + l]] += gains[l] * dots[r * AKV_GROUP_LANES + l];
        }
    }
}

static void value_anchors(akv_range *c, uint64_t b0, uint32_t n)
{
    const uint32_t k = c->values.num_anchors;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = akv_view_index(&c->values, b0 + i);
        float gamma = akv_f16_to_f32(c->values.coeff[b0 + i]);
        for (uint32_t r = 0; r < c->task->rows; r++)
            c->s->hist[(size_t)r * k + a] += gamma * c->s->logits[(size_t)r * AKV_BLOCK_TOKENS + i];
    }
}

static void value_residuals(akv_range *c, uint64_t block, uint32_t n)
{
    uint16_t owners[AKV_BLOCK_TOKENS];
    uint32_t count = akv_view_owners(&c->values, block, n, owners);
    uint64_t first = c->values.ranks[block];
    const uint32_t dv = c->values.dim;
    const akv_kernels *kernels = c->task->kernels;
    for (uint32_t at = 0; at < count; at += AKV_GROUP_LANES) {
        uint32_t g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
        float gains[AKV_GROUP_LANES], weights[AKV_ATTEND_ROWS * AKV_GROUP_LANES];
        kernels->unpack_group(c->values.codes + (first + at) * c->values.code_bytes, g, dv, c->values.levels[2],
                              c->values.levels[3], c->s->group);
        group_gains(&c->values, first + at, g, gains);
        for (uint32_t r = 0; r < c->task->rows; r++) {
            const float *w = c->s->logits + (size_t)r * AKV_BLOCK_TOKENS;
            for (uint32_t l = 0; l < AKV_GROUP_LANES; l++)
                weights[r * AKV_GROUP_LANES + l] = l < g ? gains[l] * w[owners[at + l]] : 0.0f;
        }
        kernels->group_accumulate(weights, c->task->rows, c->s->group, dv, c->s->coded);
    }
}

/* Hd (sign * q) for the residual logits; with plain codes the query as it is. */
static void prepare_rows(akv_range *c)
{
    const uint32_t dk = c->keys.dim, rows = c->task->rows;
    const bool plain = c->header->flags & AKV_FLAG_PLAIN_CODES;
    memcpy(c->s->rotated, c->s->query, (size_t)rows * dk * sizeof(float));
    if (plain)
        return;
    for (uint32_t r = 0; r < rows; r++) {
        float *q = c->s->rotated + (size_t)r * dk;
        for (uint32_t i = 0; i < dk; i++)
            q[i] *= c->signs[AKV_SIDE_K][i];
        akv_hadamard_f32(q, dk);
    }
}

/* Value anchors and value residuals back to the value space, added to the partial output. */
static void finish_rows(akv_range *c, akv_partial *out)
{
    const akv_kernels *kernels = c->task->kernels;
    const uint32_t dv = c->values.dim, k = c->values.num_anchors;
    const bool plain = c->header->flags & AKV_FLAG_PLAIN_CODES;
    for (uint32_t r = 0; r < c->task->rows; r++) {
        float *acc = out->acc + (size_t)r * dv, *coded = c->s->coded + (size_t)r * dv;
        if (!plain) {
            akv_hadamard_f32(coded, dv);
            for (uint32_t i = 0; i < dv; i++)
                coded[i] *= c->signs[AKV_SIDE_V][i];
        }
        akv_axpy_f32(1.0f, coded, acc, dv);
    }
    for (uint32_t a = 0; a < k; a++) {
        kernels->row_f32(c->values.anchors + (size_t)a * dv, AKV_BF16, dv, c->s->vector);
        kernels->rows_axpy(c->s->hist + a, k, c->task->rows, c->s->vector, dv, out->acc);
    }
}

void akv_attend_compressed(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *s,
                           akv_partial *out)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t rows = task->rows, dv = h->head_dim[AKV_SIDE_V];
    akv_range c;

    c.task = task;
    c.header = h;
    c.positions = h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    c.table = table;
    c.s = s;
    c.keys = akv_view_side(segment, AKV_SIDE_K, task->kv_head);
    c.values = akv_view_side(segment, AKV_SIDE_V, task->kv_head);
    c.span = akv_span_begin(task, h, akv_section_of(segment, AKV_SEC_INV_FREQ), s);
    for (int side = 0; side < AKV_SIDES; side++)
        akv_signs(h->seed, side, h->head_dim[side], c.signs[side]);

    akv_load_queries(task, s);
    prepare_rows(&c);
    memset(s->hist, 0, (size_t)rows * h->num_anchors * sizeof(float));
    memset(s->coded, 0, (size_t)rows * dv * sizeof(float));

    for (uint64_t b0 = task->begin; b0 < task->end; b0 += AKV_BLOCK_TOKENS) {
        uint32_t n = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
        uint64_t block = b0 / AKV_BLOCK_TOKENS;
        float shrink[AKV_ATTEND_ROWS];
        anchor_logits(&c, b0, n);
        residual_logits(&c, block, n);
        akv_softmax_block(task, s->logits, AKV_BLOCK_TOKENS, 0, n, false, out->max, out->sum, shrink);
        akv_shrink_rows(s->hist, rows, h->num_anchors, shrink);
        akv_shrink_rows(s->coded, rows, dv, shrink);
        value_anchors(&c, b0, n);
        value_residuals(&c, block, n);
    }
    finish_rows(&c, out);
}
