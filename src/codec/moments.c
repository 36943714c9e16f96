/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moments.c - statistics of the residuals for the LADDER coding, gathered tile by tile: second moments for the bases, and
 * utilities that look ahead. What the prompt attends to now, later queries will read on from: a share (pool_weight) of each
 * squared attention weight is spread forwards, (1 - 1/pool_tokens)^j for 64 tokens, and a little backwards. Not from
 * the sinks: every query attends to them whatever it looks for, and nothing is read on from there. Spreading their weight gave
 * the 64 tokens behind them the top level: 5 times the error on some layers of a small model at 20x.
 */
#include "codec/ladder.h"
#include "kernels/kernels.h"

void akv_ladder_value_deviation(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *values)
{
    const float *mean = job->mean[AKV_SIDE_V] + (size_t)head * job->dv;
    for (uint32_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (uint32_t d = 0; d < job->dv; d++) {
            float x = values[(size_t)i * job->dv + d] - mean[d];
            sum += x * x;
        }
        job->ladder->deviation[head * job->S + t0 + i] = sum;
    }
}

void akv_ladder_second_moments(akv_job *job, size_t range_task, uint32_t n, const float *key_residuals, const float *value_residuals)
{
    const float *rows[AKV_SIDES] = {key_residuals, value_residuals};
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint32_t dim = job->header->head_dim[side];
        /* Anchors leave zero rows, which add nothing. */
        akv_gemm_tn_add(dim, dim, n, rows[side], dim, rows[side], dim, job->ladder->moments[side] + range_task * dim * dim, dim);
    }
}

/*
 * a[0..total) squared weights of one row, a[before] being the first token asked for -> out[i] for n tokens:
 * a[i] + weight (sum_j a[i - j] decay^j (0 < j < AKV_POOL_BEFORE) + 0.5, 0.25, 0.1 times the next three); the first `sinks`
 * tokens give nothing to others.
 */
static void spread(const float *a, uint32_t before, uint32_t n, uint32_t total, uint32_t sinks, float decay, float weight, float *out)
{
    static const float back[AKV_POOL_AFTER] = {0.5f, 0.25f, 0.1f};
    float sum = 0.0f, last = powf(decay, (float)AKV_POOL_BEFORE);
    for (uint32_t i = 0; i < before + n; i++) {
        float own = i < sinks ? 0.0f : a[i];
        sum = sum * decay + own;
        if (i >= AKV_POOL_BEFORE + sinks)
            sum -= last * a[i - AKV_POOL_BEFORE];
        if (i < before)
            continue;
        float others = sum > own ? sum - own : 0.0f; /* cancellation may leave less */
        for (uint32_t j = 0; j < AKV_POOL_AFTER && i + 1 + j < total; j++)
            others += i + 1 + j < sinks ? 0.0f : back[j] * a[i + 1 + j];
        out[i - before] = a[i] + weight * others;
    }
}

void akv_ladder_utilities(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *key_residual_sq,
                          const float *value_residual_sq, const float *value_sq, akv_codec_scratch *s, float *key_utility,
                          float *value_utility)
{
    const akv_ladder *ladder = job->ladder;
    const akv_kernels *kernels = akv_kernels_best();
    const float scale = (float)job->layer->sm_scale, cap = (float)job->layer->logit_softcap;
    const float mix = (float)ladder->options->incoherent;
    const bool pooled = ladder->options->pool_tokens > 0;
    const float decay = pooled ? 1.0f - 1.0f / (float)ladder->options->pool_tokens : 0.0f;
    const size_t first = (size_t)head * job->rows;
    const uint64_t tile_first = t0 < AKV_POOL_BEFORE ? 0 : t0 - AKV_POOL_BEFORE; /* what the halo begins with */
    const uint32_t sinks = ladder->options->sinks > tile_first ? (uint32_t)(ladder->options->sinks - tile_first) : 0;
    const uint32_t before = t0 < AKV_POOL_BEFORE ? (uint32_t)t0 : AKV_POOL_BEFORE;
    const uint32_t after = job->S - t0 - n < AKV_POOL_AFTER ? (uint32_t)(job->S - t0 - n) : AKV_POOL_AFTER;
    const uint32_t total = before + n + after;
    double u_k[AKV_TILE_TOKENS] = {0}, u_v[AKV_TILE_TOKENS] = {0};
    float weight[AKV_TILE_STRIDE], spread_out[AKV_TILE_TOKENS];

    /* Logits of the tile and its halo; s->post is free once the anchors have been compared. */
    for (uint32_t i = 0; i < total; i++)
        akv_tensor_row(&job->layer->keys, head, (int64_t)(t0 - before + i), job->dk, s->post + (size_t)i * job->dk);
    akv_observed_logits(job, head, t0 - before, total, s->post, s->logits);
    for (uint32_t r = 0; r < job->rows; r++) {
        float *l = s->logits + (size_t)r * AKV_TILE_STRIDE;
        const float *e = s->errors + (size_t)r * AKV_TILE_STRIDE, *vy = s->cross + (size_t)r * AKV_TILE_STRIDE;
        const float *q = job->queries + (first + r) * job->dk;
        float y_sq = job->output_sq[first + r], inverse = job->inverse[first + r];
        float incoherent = mix * akv_dot_f32(q, q, job->dk) / (float)job->dk * scale * scale;
        float slope[AKV_TILE_TOKENS];
        for (uint32_t i = 0; i < n; i++) {
            float x = cap != 0.0f && l[before + i] != -INFINITY ? l[before + i] / cap : 0.0f;
            slope[i] = 1.0f - x * x;
        }
        kernels->exp_sum(l, total, job->max[first + r]);
        for (uint32_t i = 0; i < total; i++) {
            float a = l[i] * inverse;
            weight[i] = a * a;
        }
        if (pooled)
            spread(weight, before, n, total, sinks, decay, (float)ladder->options->pool_weight, spread_out);
        else
            memcpy(spread_out, weight + before, n * sizeof *weight);
        for (uint32_t i = 0; i < n; i++) {
            float deviation = value_sq[i] - 2.0f * vy[i] + y_sq, x = e[i] * scale;
            float error = slope[i] * slope[i] * ((1.0f - mix) * x * x + incoherent * key_residual_sq[i]);
            u_k[i] += (double)spread_out[i] * (deviation > 0.0f ? deviation : 0.0f) * error;
            u_v[i] += (double)spread_out[i] * value_residual_sq[i];
        }
    }
    const float per_key = (float)(ladder->query_sq[head] / job->dk) * scale * scale;
    for (uint32_t i = 0; i < n; i++) {
        const size_t at = head * job->S + t0 + i;
        key_utility[i] = (float)(u_k[i] < 3e38 ? u_k[i] : 3e38);
        value_utility[i] = (float)(u_v[i] < 3e38 ? u_v[i] : 3e38);
        float prior = ladder->deviation[at] * key_residual_sq[i] * per_key;
        ladder->prior[AKV_SIDE_K][at] = prior < 3e38f ? prior : 3e38f;
        ladder->prior[AKV_SIDE_V][at] = value_residual_sq[i] < 3e38f ? value_residual_sq[i] : 3e38f;
    }
}
