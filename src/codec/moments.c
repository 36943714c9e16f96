/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moments.c - statistics of the residuals for the LADDER coding, gathered tile by tile: second moments for the bases,
 * and utilities that look ahead. What the prompt attends to now, later queries will read on from: a share (pool_weight)
 * of each squared attention weight is spread forwards, (1 - 1/pool_tokens)^j for 64 tokens, and a little backwards. Not
 * from the sinks: every query attends to them whatever it looks for, and nothing is read on from there. Spreading their
 * weight gave the 64 tokens behind them the top level: 5 times the error on some layers of a small model at 20x.
 */
#include "codec/ladder.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

void akv_ladder_value_deviation(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *values)
{
    const float *mean = job->mean[AKV_SIDE_V] + (size_t)head * job->dv;
    akv_coder_best()->squares(values, n, job->dv, mean, job->ladder->deviation + head * job->S + t0);
}

void akv_ladder_second_moments(akv_job *job, size_t range_task, uint32_t n, const float *key_residuals,
                               const float *value_residuals)
{
    const float *rows[AKV_SIDES] = {key_residuals, value_residuals};
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint32_t dim = job->header->head_dim[side];
        /* Anchors leave zero rows, which add nothing. */
        akv_gemm_tn_add(dim, dim, n, rows[side], dim, rows[side], dim,
                        job->ladder->moments[side] + range_task * dim * dim, dim);
    }
}

void akv_ladder_utilities(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *key_residual_sq,
                          const float *value_residual_sq, const float *value_sq, akv_codec_scratch *s,
                          float *key_utility, float *value_utility)
{
    const akv_ladder *ladder = job->ladder;
    const akv_kernels *kernels = akv_kernels_best();
    const akv_coder_kernels *coder = akv_coder_best();
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
    float u_k[AKV_TILE_TOKENS] = {0}, u_v[AKV_TILE_TOKENS] = {0}, logits[AKV_TILE_TOKENS] = {0};
    float weight[AKV_TILE_STRIDE], spread_out[AKV_TILE_TOKENS + AKV_CODER_LANES];

    /* Logits of the tile and its halo; s->post is free once the anchors have been compared. */
    akv_load_rows(&job->layer->keys, head, t0 - before, total, job->dk, s->post);
    akv_observed_logits(job, head, t0 - before, total, s->post, s->logits);
    for (uint32_t r = 0; r < job->rows; r++) {
        float *l = s->logits + (size_t)r * AKV_TILE_STRIDE;
        const float *e = s->errors + (size_t)r * AKV_TILE_STRIDE, *vy = s->cross + (size_t)r * AKV_TILE_STRIDE;
        const float *q = job->queries + (first + r) * job->dk;
        const float inverse = job->inverse[first + r];
        const akv_coder_query query = {job->output_sq[first + r], scale, 1.0f - mix,
                                       mix * akv_dot_f32(q, q, job->dk) / (float)job->dk * scale * scale, cap};
        if (cap != 0.0f)
            memcpy(logits, l + before, n * sizeof *logits);
        kernels->exp_sum(l, total, job->max[first + r]);
        for (uint32_t i = 0; i < total; i++) {
            float a = l[i] * inverse;
            weight[i] = a * a;
        }
        if (pooled)
            coder->spread(weight, before, n, total, sinks, AKV_POOL_BEFORE, decay, (float)ladder->options->pool_weight,
                          spread_out);
        else
            memcpy(spread_out, weight + before, n * sizeof *weight);
        coder->utility_add(&query, n, spread_out, logits, e, vy, value_sq, key_residual_sq, value_residual_sq, u_k,
                           u_v);
    }
    const float per_key = (float)(ladder->query_sq[head] / job->dk) * scale * scale;
    for (uint32_t i = 0; i < n; i++) {
        const size_t at = head * job->S + t0 + i;
        key_utility[i] = u_k[i] < 3e38f ? u_k[i] : 3e38f;
        value_utility[i] = u_v[i] < 3e38f ? u_v[i] : 3e38f;
        float prior = ladder->deviation[at] * key_residual_sq[i] * per_key;
        ladder->prior[AKV_SIDE_K][at] = prior < 3e38f ? prior : 3e38f;
        ladder->prior[AKV_SIDE_V][at] = value_residual_sq[i] < 3e38f ? value_residual_sq[i] : 3e38f;
    }
}
