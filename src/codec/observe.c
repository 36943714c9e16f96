/* SPDX-License-Identifier: Apache-2.0 */
/*
 * observe.c - what the observation queries attend to (paper section 3.1, design section 3 step 1): post-RoPE keys, causal
 * inside the window, full softmax. Attention weights are never stored for all tokens; the second pass recomputes them.
 */
#include "codec/codec.h"
#include "core/slots.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

void akv_observed_logits(const akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *keys, float *logits)
{
    const float scale = (float)job->layer->sm_scale, cap = (float)job->layer->logit_softcap;
    akv_gemm_nt(job->rows, n, job->dk, job->queries + (size_t)head * job->rows * job->dk, job->dk, keys, job->dk, logits,
                AKV_TILE_STRIDE);
    const akv_kernels *kernels = akv_kernels_best();
    for (uint32_t r = 0; r < job->rows; r++) {
        float *l = logits + (size_t)r * AKV_TILE_STRIDE;
        kernels->scale_max(l, n, scale, -INFINITY);
        if (cap != 0.0f)
            for (uint32_t i = 0; i < n; i++)
                l[i] = cap * akv_tanhf(l[i] / cap);
        /* up to the row's own token */
        const uint64_t seen = job->again != NULL ? job->S : job->S - job->W + r % job->W + 1;
        for (uint64_t i = seen > t0 ? seen - t0 : 0; i < n; i++)
            l[i] = -INFINITY;
    }
}

static void statistics_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    uint32_t head, slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    const akv_kernels *kernels = akv_kernels_best();
    uint64_t begin, end;
    akv_range_of(job, task, &head, &begin, &end);
    float *max = job->part_max + task * job->rows, *sum = job->part_sum + task * job->rows;
    for (uint32_t r = 0; r < job->rows; r++) {
        max[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        uint32_t n = akv_tile_tokens(t0, end);
        akv_load_rows(&job->layer->keys, head, t0, n, job->dk, s->post);
        akv_observed_logits(job, head, t0, n, s->post, s->logits);
        for (uint32_t r = 0; r < job->rows; r++) {
            float *l = s->logits + (size_t)r * AKV_TILE_STRIDE, m = kernels->scale_max(l, n, 1.0f, max[r]);
            if (m == -INFINITY)
                continue;
            sum[r] = (max[r] == -INFINITY ? 0.0f : sum[r] * akv_expf(max[r] - m)) + kernels->exp_sum(l, n, m);
            max[r] = m;
        }
    }
    akv_return_slot(job->slots, slot);
}

static void scores_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    uint32_t head, slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    const akv_kernels *kernels = akv_kernels_best();
    uint64_t begin, end;
    akv_range_of(job, task, &head, &begin, &end);
    const float *max = job->max + (size_t)head * job->rows, *inverse = job->inverse + (size_t)head * job->rows;
    float *out = job->part_out + task * job->rows * job->dv;
    memset(out, 0, (size_t)job->rows * job->dv * sizeof *out);
    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        uint32_t n = akv_tile_tokens(t0, end);
        float *score = job->score + head * job->S + t0;
        akv_load_rows(&job->layer->keys, head, t0, n, job->dk, s->post);
        akv_load_rows(&job->layer->values, head, t0, n, job->dv, s->value);
        akv_observed_logits(job, head, t0, n, s->post, s->logits);
        memset(score, 0, n * sizeof *score);
        for (uint32_t r = 0; r < job->rows; r++) {
            float *l = s->logits + (size_t)r * AKV_TILE_STRIDE;
            kernels->exp_sum(l, n, max[r]);
            akv_coder_best()->scale_add(l, n, inverse[r], score);
        }
        for (uint32_t i = 0; i < n; i++)
            score[i] /= (float)job->G;
        akv_gemm_nn_add(job->rows, job->dv, n, s->logits, AKV_TILE_STRIDE, s->value, job->dv, out, job->dv);
    }
    akv_return_slot(job->slots, slot);
}

void akv_observe(akv_job *job)
{
    const size_t tasks = (size_t)(job->H * job->num_ranges);
    for (uint32_t head = 0; head < job->H; head++)
        for (uint32_t r = 0; r < job->rows; r++)
            akv_tensor_row(&job->layer->queries, (int64_t)head * job->G + r / job->W, r % job->W, job->dk,
                           job->queries + ((size_t)head * job->rows + r) * job->dk);

    akv_parallel_for(job->config->executor, statistics_task, job, tasks);
    for (uint32_t head = 0; head < job->H; head++)
        for (uint32_t r = 0; r < job->rows; r++) {
            float m = -INFINITY;
            double sum = 0.0;
            const size_t first = head * job->num_ranges;
            for (uint64_t i = 0; i < job->num_ranges; i++) {
                float x = job->part_max[(first + i) * job->rows + r];
                m = x > m ? x : m;
            }
            for (uint64_t i = 0; i < job->num_ranges; i++) {
                float x = job->part_max[(first + i) * job->rows + r];
                if (x != -INFINITY)
                    sum += job->part_sum[(first + i) * job->rows + r] * akv_exp((double)x - m);
            }
            job->max[(size_t)head * job->rows + r] = m;
            job->inverse[(size_t)head * job->rows + r] = (float)(1.0 / sum);
        }

    akv_parallel_for(job->config->executor, scores_task, job, tasks);
    for (uint32_t head = 0; head < job->H; head++)
        for (uint32_t r = 0; r < job->rows; r++) {
            float *y = job->output + ((size_t)head * job->rows + r) * job->dv;
            memset(y, 0, job->dv * sizeof *y);
            for (uint64_t i = 0; i < job->num_ranges; i++)
                akv_axpy_f32(1.0f, job->part_out + ((head * job->num_ranges + i) * job->rows + r) * job->dv, y, job->dv);
            job->output_sq[(size_t)head * job->rows + r] = akv_dot_f32(y, y, job->dv);
        }
}

void akv_pool_scores(akv_job *job, uint32_t head, uint64_t n, uint32_t width)
{
    const int64_t half = width / 2;
    const float *score = job->score + head * job->S;
    float *pooled = job->pooled + head * job->S;
    for (int64_t i = 0; i < (int64_t)n; i++) {
        int64_t from = i - half < 0 ? 0 : i - half, to = i + half >= (int64_t)n ? (int64_t)n - 1 : i + half;
        double sum = 0.0;
        for (int64_t j = from; j <= to; j++)
            sum += score[j];
        sum /= width; /* also at the borders: padded with zeros */
        pooled[i] = sum >= 0.0 ? (float)sum : 0.0f; /* NaN from absurdly large inputs ranks last */
    }
}
