/* SPDX-License-Identifier: Apache-2.0 */
/* softmax.c - the online softmax, its merge, and the dense part of attention. */
#include "attn/attend.h"
#include "core/rope.h"
#include "core/sizes.h"

void akv_load_queries(const akv_task *task, akv_scratch *scratch)
{
    const akv_attend_params *p = task->params;
    for (uint32_t r = 0; r < task->rows; r++) {
        uint32_t row = task->row0 + r;
        int64_t head = (int64_t)task->kv_head * p->gqa_group + row / p->num_queries;
        akv_tensor_row(&p->queries, head, row % p->num_queries, p->head_dim_k, scratch->query + (size_t)r * p->head_dim_k);
    }
    if (task->shift == 0)
        return;
    double cosine[AKV_MAX_HEAD_DIM / 2], sine[AKV_MAX_HEAD_DIM / 2];
    akv_rope_phase(p->rope->inv_freq, p->rope->rotary_dim / 2, -task->shift, cosine, sine);
    for (uint32_t r = 0; r < task->rows; r++) {
        float *q = scratch->query + (size_t)r * p->head_dim_k;
        akv_rope_turn(q, p->head_dim_k, p->rope->rotary_dim, p->rope->style, cosine, sine, 1, 1.0, q);
    }
}

static void soft_cap(float *logits, uint32_t n, float cap)
{
    float inverse = 1.0f / cap;
    for (uint32_t i = 0; i < n; i++)
        logits[i] = cap * akv_tanhf(logits[i] * inverse);
}

static void apply_mask(const akv_attend_params *p, float *logits, uint32_t t, uint64_t b0, uint32_t n)
{
    if (p->tail_mask.data != NULL) {
        for (uint32_t i = 0; i < n; i++)
            logits[i] += akv_tensor_at(&p->tail_mask, 0, t, (int64_t)(b0 + i));
        return;
    }
    uint64_t end = p->tail_tokens + t + 1, visible = end > p->num_queries ? end - p->num_queries : 0;
    for (uint32_t i = 0; i < n; i++)
        if (b0 + i >= visible)
            logits[i] = -INFINITY;
}

float akv_softmax_logits(const akv_task *task, uint32_t r, float *logits, uint64_t b0, uint32_t n, bool masked, float max)
{
    const akv_attend_params *p = task->params;
    const akv_kernels *kernels = task->kernels;
    const float cap = (float)p->logit_softcap;
    if (cap == 0.0f && !masked)
        return kernels->scale_max(logits, n, (float)p->sm_scale, max);
    kernels->scale_max(logits, n, (float)p->sm_scale, -INFINITY);
    if (cap != 0.0f)
        soft_cap(logits, n, cap);
    if (masked)
        apply_mask(p, logits, (task->row0 + r) % p->num_queries, b0, n);
    return kernels->scale_max(logits, n, 1.0f, max);
}

void akv_softmax_block(const akv_task *task, float *logits, size_t stride, uint64_t b0, uint32_t n, bool masked, float *max, float *sum,
                       float *shrink)
{
    for (uint32_t r = 0; r < task->rows; r++) {
        float *l = logits + r * stride;
        const float m = akv_softmax_logits(task, r, l, b0, n, masked, max[r]);
        if (m == -INFINITY) { /* nothing visible yet: weights and their sum are 0 (or NaN, which must not get lost) */
            sum[r] += task->kernels->exp_sum(l, n, 0.0f);
            shrink[r] = 1.0f;
            continue;
        }
        shrink[r] = akv_softmax_shrink(max[r], m);
        sum[r] = sum[r] * shrink[r] + task->kernels->exp_sum(l, n, m);
        max[r] = m;
    }
}

void akv_shrink_rows(float *rows, uint32_t count, uint32_t width, const float *shrink)
{
    for (uint32_t r = 0; r < count; r++)
        if (shrink[r] != 1.0f)
            for (uint32_t i = 0; i < width; i++)
                rows[(size_t)r * width + i] *= shrink[r];
}

/* Row [head, token] as f32: the fast way when its numbers are neighbours. */
static const float *row_of(const akv_kernels *kernels, const akv_tensor *t, uint32_t head, uint64_t token, uint32_t dim, float *buffer)
{
    int64_t at = (int64_t)head * t->stride_head + (int64_t)token * t->stride_token;
    if (t->stride_dim != 1)
        akv_tensor_row(t, head, (int64_t)token, dim, buffer);
    else if (t->dtype == AKV_F32)
        return (const float *)t->data + at;
    else
        kernels->row_f32((const uint16_t *)t->data + at, t->dtype, dim, buffer);
    return buffer;
}

/* The rows from token b0 on where they are 16-bit numbers side by side, else NULL. */
static const uint16_t *rows_16_bit(const akv_tensor *t, uint32_t head, uint64_t b0)
{
    if (t->stride_dim != 1 || t->dtype == AKV_F32)
        return NULL;
    return (const uint16_t *)t->data + (int64_t)head * t->stride_head + (int64_t)b0 * t->stride_token;
}

void akv_dense_row(const akv_kernels *kernels, const akv_tensor *t, uint32_t head, uint64_t token, uint32_t dim, float *out)
{
    const float *row = row_of(kernels, t, head, token, dim, out);
    if (row != out)
        memcpy(out, row, dim * sizeof *out);
}

void akv_attend_dense(const akv_task *task, const akv_tensor *keys, const akv_tensor *values, bool masked, akv_scratch *s,
                      akv_partial *out)
{
    const akv_attend_params *p = task->params;
    const akv_kernels *kernels = task->kernels;
    const uint32_t dk = p->head_dim_k, dv = p->head_dim_v, rows = task->rows;

    akv_load_queries(task, s);
    for (uint64_t b0 = task->begin; b0 < task->end; b0 += AKV_BLOCK_TOKENS) {
        uint32_t n = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
        float shrink[AKV_ATTEND_ROWS];
        const uint16_t *k16 = rows_16_bit(keys, task->kv_head, b0), *v16 = rows_16_bit(values, task->kv_head, b0);
        if (k16 != NULL)
            kernels->dense_dots(s->query, rows, k16, keys->stride_token, keys->dtype, n, dk, s->logits, AKV_BLOCK_TOKENS);
        for (uint32_t i = 0; k16 == NULL && i < n; i++)
            kernels->rows_dot(s->query, rows, row_of(kernels, keys, task->kv_head, b0 + i, dk, s->vector), dk, 1.0f,
                              s->logits + i, AKV_BLOCK_TOKENS);
        akv_softmax_block(task, s->logits, AKV_BLOCK_TOKENS, b0, n, masked, out->max, out->sum, shrink);
        akv_shrink_rows(out->acc, rows, dv, shrink);
        if (v16 != NULL)
            kernels->dense_sums(s->logits, AKV_BLOCK_TOKENS, rows, v16, values->stride_token, values->dtype, n, dv, out->acc);
        for (uint32_t i = 0; v16 == NULL && i < n; i++)
            kernels->rows_axpy(s->logits + i, AKV_BLOCK_TOKENS, rows,
                               row_of(kernels, values, task->kv_head, b0 + i, dv, s->vector), dv, out->acc);
    }
}

void akv_attend_merge(uint64_t n, uint32_t dim, float *out_a, float *max_a, float *sum_a, const float *out_b,
                      const float *max_b, const float *sum_b)
{
    for (uint64_t r = 0; r < n; r++) {
        if (sum_b[r] == 0.0f && max_b[r] == -INFINITY)
            continue;
        float m = max_a[r] > max_b[r] ? max_a[r] : max_b[r];
        float wa = sum_a[r] == 0.0f && max_a[r] == -INFINITY ? 0.0f : sum_a[r] * akv_expf(max_a[r] - m);
        float wb = sum_b[r] * akv_expf(max_b[r] - m);
        float total = wa + wb;
        float fa = total == 0.0f ? 0.0f : wa / total, fb = total == 0.0f ? 0.0f : wb / total;
        for (uint32_t i = 0; i < dim; i++)
            out_a[r * dim + i] = out_a[r * dim + i] * fa + out_b[r * dim + i] * fb;
        max_a[r] = m;
        sum_a[r] = total;
    }
}
