/* SPDX-License-Identifier: Apache-2.0 */
/* softmax.c - the online softmax, its merge, and the dense part of attention. */
#include "attn/attend.h"

void akv_load_queries(const akv_task *task, akv_scratch *scratch)
{
    const akv_attend_params *p = task->params;
    for (uint32_t r = 0; r < task->rows; r++) {
        uint32_t row = task->row0 + r;
        int64_t head = (int64_t)task->kv_head * p->gqa_group + row / p->num_queries;
        akv_tensor_row(&p->queries, head, row % p->num_queries, p->head_dim_k, scratch->query + (size_t)r * p->head_dim_k);
    }
}

void akv_softcap(float *logits, uint32_t n, float cap)
{
    if (cap == 0.0f)
        return;
    float inverse = 1.0f / cap;
    for (uint32_t i = 0; i < n; i++)
        logits[i] = cap * tanhf(logits[i] * inverse);
}

void akv_softmax_block(float *logits, uint32_t rows, uint32_t n, float *max, float *sum, float *scale)
{
    for (uint32_t r = 0; r < rows; r++) {
        float *l = logits + (size_t)r * AKV_BLOCK_TOKENS;
        float m = max[r];
        bool nan = false;
        for (uint32_t i = 0; i < n; i++) {
            m = l[i] > m ? l[i] : m;
            nan |= l[i] != l[i];
        }
        if (m == -INFINITY && !nan) { /* nothing visible yet */
            memset(l, 0, n * sizeof *l);
            scale[r] = 1.0f;
            continue;
        }
        float shrink = max[r] - m; /* -inf before the first visible token */
        akv_exp_f32(&shrink, 1);
        for (uint32_t i = 0; i < n; i++)
            l[i] -= m;
        akv_exp_f32(l, n);
        float acc[16] = {0};
        uint32_t i = 0;
        for (; i + 16 <= n; i += 16)
            for (uint32_t j = 0; j < 16; j++)
                acc[j] += l[i + j];
        float total = 0.0f;
        for (; i < n; i++)
            total += l[i];
        for (uint32_t j = 0; j < 16; j++)
            total += acc[j];
        max[r] = m;
        sum[r] = sum[r] * shrink + total;
        scale[r] = shrink;
    }
}

void akv_attend_dense(const akv_task *task, const akv_tensor *keys, const akv_tensor *values, bool masked, akv_scratch *s,
                      akv_partial *out)
{
    const akv_attend_params *p = task->params;
    const uint32_t dk = p->head_dim_k, dv = p->head_dim_v, T = p->num_queries, rows = task->rows;
    const float sm_scale = (float)p->sm_scale;
    const bool causal = masked && p->tail_mask.data == NULL;

    akv_load_queries(task, s);
    for (uint64_t b0 = task->begin; b0 < task->end; b0 += AKV_BLOCK_TOKENS) {
        uint32_t n = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
        float scale[AKV_ATTEND_ROWS];
        for (uint32_t i = 0; i < n; i++) {
            akv_tensor_row(keys, task->kv_head, (int64_t)(b0 + i), dk, s->vector);
            for (uint32_t r = 0; r < rows; r++)
                s->logits[(size_t)r * AKV_BLOCK_TOKENS + i] = akv_dot_f32(s->query + (size_t)r * dk, s->vector, dk) * sm_scale;
        }
        for (uint32_t r = 0; r < rows; r++) {
            float *l = s->logits + (size_t)r * AKV_BLOCK_TOKENS;
            uint32_t t = (task->row0 + r) % T;
            akv_softcap(l, n, (float)p->logit_softcap);
            if (causal) {
                uint64_t visible = p->tail_tokens + t + 1 > T ? p->tail_tokens + t + 1 - T : 0;
                for (uint32_t i = 0; i < n; i++)
                    if (b0 + i >= visible)
                        l[i] = -INFINITY;
            } else if (masked) {
                for (uint32_t i = 0; i < n; i++)
                    l[i] += akv_tensor_at(&p->tail_mask, 0, t, (int64_t)(b0 + i));
            }
        }
        akv_softmax_block(s->logits, rows, n, out->max, out->sum, scale);
        for (uint32_t r = 0; r < rows; r++)
            if (scale[r] != 1.0f)
                for (uint32_t i = 0; i < dv; i++)
                    out->acc[(size_t)r * dv + i] *= scale[r];
        for (uint32_t i = 0; i < n; i++) {
            akv_tensor_row(values, task->kv_head, (int64_t)(b0 + i), dv, s->vector);
            for (uint32_t r = 0; r < rows; r++) {
                float w = s->logits[(size_t)r * AKV_BLOCK_TOKENS + i];
                if (w != 0.0f)
                    akv_axpy_f32(w, s->vector, out->acc + (size_t)r * dv, dv);
            }
        }
    }
}

void akv_attend_merge(uint64_t n, uint32_t dim, float *out_a, float *max_a, float *sum_a, const float *out_b,
                      const float *max_b, const float *sum_b)
{
    for (uint64_t r = 0; r < n; r++) {
        if (sum_b[r] == 0.0f && max_b[r] == -INFINITY)
            continue;
        float m = max_a[r] > max_b[r] ? max_a[r] : max_b[r];
        float wa = sum_a[r] == 0.0f && max_a[r] == -INFINITY ? 0.0f : sum_a[r] * expf(max_a[r] - m);
        float wb = sum_b[r] * expf(max_b[r] - m);
        float total = wa + wb;
        float fa = total == 0.0f ? 0.0f : wa / total, fb = total == 0.0f ? 0.0f : wb / total;
        for (uint32_t i = 0; i < dim; i++)
            out_a[r * dim + i] = out_a[r * dim + i] * fa + out_b[r * dim + i] * fb;
        max_a[r] = m;
        sum_a[r] = total;
    }
}
