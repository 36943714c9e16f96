/* SPDX-License-Identifier: Apache-2.0 */
/*
 * project.c - nearest anchor, coefficient and utility of every token (paper sections 3.2 and 3.3, design section 3 steps
 * 2 and 3). Keys are compared before the rotary embedding, because turning destroys directional similarity; what a key
 * residual is worth is judged after it, because that is what the queries meet.
 */
#include "codec/codec.h"
#include "core/rope.h"
#include "core/slots.h"
#include "kernels/kernels.h"

static bool pre_rope(const akv_job *job)
{
    return job->header->rotary_dim != 0 && job->experiment->anchor_space == AKV_ANCHOR_PRE_ROPE;
}

/* Row of one side in anchor space: keys un-turned (unless projected post-RoPE), values as they are. */
static void anchor_space_row(const akv_job *job, int side, uint32_t head, uint64_t token, akv_rope_walk *walk, float *out)
{
    const akv_layer *layer = job->layer;
    if (side == AKV_SIDE_V) {
        akv_tensor_row(&layer->values, head, (int64_t)token, job->dv, out);
        return;
    }
    akv_tensor_row(&layer->keys, head, (int64_t)token, job->dk, out);
    if (!pre_rope(job))
        return;
    akv_rope_walk_to(walk, akv_position_of(layer, token));
    akv_rope_turn(out, job->dk, layer->rope.rotary_dim, layer->rope.style, walk->cosine, walk->sine, -1,
                  1.0 / layer->rope.magnitude, out);
}

/* Round the chosen tokens to bf16 anchors and keep their unit vectors for the search. Task = head * 2 + side. */
static void store_anchor_vectors(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const uint32_t dim = job->header->head_dim[side];
    const uint32_t *tokens = (const uint32_t *)akv_job_section(job, AKV_SEC_ANCHOR_TOKENS) + (size_t)head * job->k;
    uint16_t *anchors = (uint16_t *)akv_job_section(job, AKV_SEC_ANCHORS + side) + (size_t)head * job->k * dim;
    float *unit = job->unit[side] + (size_t)head * job->k * dim;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_rope_walk walk = akv_rope_walk_begin(job->layer->rope.inv_freq, job->header->rotary_dim / 2, s->phase);
    for (uint32_t a = 0; a < job->k; a++) {
        anchor_space_row(job, side, head, tokens[a], &walk, s->vector);
        double norm = 0.0;
        for (uint32_t i = 0; i < dim; i++) {
            uint16_t h = akv_f32_to_bf16(s->vector[i]);
            double x = akv_bf16_to_f32(h);
            anchors[(size_t)a * dim + i] = h;
            norm += x * x;
        }
        norm = norm > 0.0 ? 1.0 / sqrt(norm) : 0.0;
        for (uint32_t i = 0; i < dim; i++)
            unit[(size_t)a * dim + i] = (float)(akv_bf16_to_f32(anchors[(size_t)a * dim + i]) * norm);
    }
    akv_return_slot(job->slots, slot);
}

/* |x| such that x * x does not overflow: the cosine rank only. */
static float norm_of(const float *x, uint32_t dim)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < dim; i++)
        sum += (double)x[i] * x[i];
    return (float)sqrt(sum);
}

static void set_index(const akv_job *job, int side, uint32_t head, uint64_t token, uint32_t anchor)
{
    uint8_t *index = akv_job_section(job, AKV_SEC_INDEX + side);
    if (job->k <= 256)
        index[head * job->S + token] = (uint8_t)anchor;
    else
        ((uint16_t *)(void *)index)[head * job->S + token] = (uint16_t)anchor;
}

static uint32_t get_index(const akv_job *job, int side, uint32_t head, uint64_t token)
{
    const uint8_t *index = akv_job_section(job, AKV_SEC_INDEX + side);
    return job->k <= 256 ? index[head * job->S + token] : ((const uint16_t *)(const void *)index)[head * job->S + token];
}

/*
 * Nearest anchors of n rows in anchor space: index and coefficient go to the segment, the rows become residuals in anchor
 * space, |cosine| goes to best.
 */
static void project_tile(akv_job *job, int side, uint32_t head, uint64_t t0, uint32_t n, float *rows, akv_codec_scratch *s)
{
    const uint32_t dim = job->header->head_dim[side];
    const uint16_t *anchors = (const uint16_t *)akv_job_section(job, AKV_SEC_ANCHORS + side) + (size_t)head * job->k * dim;
    const float *unit = job->unit[side] + (size_t)head * job->k * dim;
    uint16_t *coeff = (uint16_t *)akv_job_section(job, AKV_SEC_COEFF + side) + head * job->S;
    uint32_t nearest[AKV_TILE_TOKENS];

    for (uint32_t i = 0; i < n; i++) {
        s->best[i] = -1.0f;
        nearest[i] = 0;
    }
    for (uint32_t a0 = 0; a0 < job->k; a0 += AKV_ANCHOR_TILE) {
        uint32_t na = job->k - a0 < AKV_ANCHOR_TILE ? job->k - a0 : AKV_ANCHOR_TILE;
        akv_gemm_nt(n, na, dim, rows, dim, unit + (size_t)a0 * dim, dim, s->sims, AKV_ANCHOR_TILE);
        for (uint32_t i = 0; i < n; i++) {
            const float *sims = s->sims + (size_t)i * AKV_ANCHOR_TILE;
            for (uint32_t a = 0; a < na; a++)
                if (fabsf(sims[a]) > s->best[i]) {
                    s->best[i] = fabsf(sims[a]);
                    nearest[i] = a0 + a;
                }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        float *x = rows + (size_t)i * dim;
        uint32_t own = job->anchor_of[head * job->S + t0 + i];
        float norm = norm_of(x, dim);
        s->best[i] = norm > 0.0f ? s->best[i] / norm : 1.0f;
        if (own != 0) {
            nearest[i] = own - 1;
            coeff[t0 + i] = 0x3c00; /* 1.0 */
            memset(x, 0, dim * sizeof *x);
        } else {
            const uint16_t *a = anchors + (size_t)nearest[i] * dim;
            double xa = 0.0, aa = 0.0;
            for (uint32_t d = 0; d < dim; d++) {
                double v = akv_bf16_to_f32(a[d]);
                xa += x[d] * v;
                aa += v * v;
            }
            uint16_t h = akv_f32_to_f16(aa > 0.0 ? (float)(xa / aa) : 0.0f);
            float gamma = akv_f16_to_f32(h);
            coeff[t0 + i] = h;
            for (uint32_t d = 0; d < dim; d++)
                x[d] -= gamma * akv_bf16_to_f32(a[d]);
        }
        set_index(job, side, head, t0 + i, nearest[i]);
    }
}

/*
 * Attention, value deviation and logit error of every row and token of the tile -> utilities (design section 3 step 3):
 *   U_K(p) = sum_q a^2 |v_p - y(q)|^2 e^2,  U_V(p) = sum_q a^2 |r_V|^2,  e = scale * q . R_p r_p (times the cap's slope).
 */
static void utilities(akv_job *job, uint32_t head, uint32_t n, const float *value_residual_sq, const float *value_sq,
                      akv_codec_scratch *s, float *key_rank, float *value_rank)
{
    const float scale = (float)job->layer->sm_scale, cap = (float)job->layer->logit_softcap;
    const size_t first = (size_t)head * job->rows;
    const akv_kernels *kernels = akv_kernels_best();
    double u_k[AKV_TILE_TOKENS] = {0}, u_v[AKV_TILE_TOKENS] = {0};
    for (uint32_t r = 0; r < job->rows; r++) {
        float *l = s->logits + (size_t)r * AKV_TILE_TOKENS, *e = s->errors + (size_t)r * AKV_TILE_TOKENS;
        const float *vy = s->cross + (size_t)r * AKV_TILE_TOKENS;
        float y_sq = job->output_sq[first + r], inverse = job->inverse[first + r], max = job->max[first + r];
        if (cap != 0.0f)
            for (uint32_t i = 0; i < n; i++)
                e[i] *= l[i] == -INFINITY ? 0.0f : 1.0f - (l[i] / cap) * (l[i] / cap);
        kernels->exp_sum(l, n, max);
        for (uint32_t i = 0; i < n; i++) {
            float a = l[i] * inverse, deviation = value_sq[i] - 2.0f * vy[i] + y_sq, logit_error = e[i] * scale;
            double a_sq = (double)a * a;
            u_k[i] += a_sq * (deviation > 0.0f ? deviation : 0.0f) * ((double)logit_error * logit_error);
            u_v[i] += a_sq * value_residual_sq[i];
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        key_rank[i] = (float)(u_k[i] < 3e38 ? u_k[i] : 3e38);
        value_rank[i] = (float)(u_v[i] < 3e38 ? u_v[i] : 3e38);
    }
}

static void project_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const akv_layer *layer = job->layer;
    const akv_rank rule = job->experiment->rank;
    const uint32_t head = (uint32_t)(task / job->num_ranges), dk = job->dk, dv = job->dv;
    const uint64_t begin = task % job->num_ranges * AKV_RANGE_TOKENS;
    const uint64_t end = job->S - begin < AKV_RANGE_TOKENS ? job->S : begin + AKV_RANGE_TOKENS;
    const float *queries = job->queries + (size_t)head * job->rows * dk, *outputs = job->output + (size_t)head * job->rows * dv;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_rope_walk walk = akv_rope_walk_begin(layer->rope.inv_freq, job->header->rotary_dim / 2, s->phase);
    akv_rng rng = akv_rng_stream(job->seed, AKV_RNG_RANK, task);
    float value_sq[AKV_TILE_TOKENS], residual_sq[AKV_SIDES][AKV_TILE_TOKENS], cosine[AKV_SIDES][AKV_TILE_TOKENS];

    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        uint32_t n = (uint32_t)(end - t0 < AKV_TILE_TOKENS ? end - t0 : AKV_TILE_TOKENS);
        float *rank[AKV_SIDES] = {job->rank[0] + head * job->S + t0, job->rank[1] + head * job->S + t0};
        for (uint32_t i = 0; i < n; i++) {
            akv_tensor_row(&layer->keys, head, (int64_t)(t0 + i), dk, s->post + (size_t)i * dk);
            anchor_space_row(job, AKV_SIDE_K, head, t0 + i, &walk, s->pre + (size_t)i * dk);
            akv_tensor_row(&layer->values, head, (int64_t)(t0 + i), dv, s->value + (size_t)i * dv);
            value_sq[i] = akv_dot_f32(s->value + (size_t)i * dv, s->value + (size_t)i * dv, dv);
        }
        akv_gemm_nt(job->rows, n, dv, outputs, dv, s->value, dv, s->cross, AKV_TILE_TOKENS);

        project_tile(job, AKV_SIDE_K, head, t0, n, s->pre, s);
        memcpy(cosine[AKV_SIDE_K], s->best, n * sizeof(float));
        project_tile(job, AKV_SIDE_V, head, t0, n, s->value, s);
        memcpy(cosine[AKV_SIDE_V], s->best, n * sizeof(float));
        for (uint32_t i = 0; i < n; i++) {
            float *r_k = s->pre + (size_t)i * dk, *r_v = s->value + (size_t)i * dv;
            if (pre_rope(job)) { /* the key residual as the queries meet it */
                akv_rope_walk_to(&walk, akv_position_of(layer, t0 + i));
                akv_rope_turn(r_k, dk, layer->rope.rotary_dim, layer->rope.style, walk.cosine, walk.sine, 1,
                              layer->rope.magnitude, r_k);
            }
            residual_sq[AKV_SIDE_K][i] = akv_dot_f32(r_k, r_k, dk);
            residual_sq[AKV_SIDE_V][i] = akv_dot_f32(r_v, r_v, dv);
        }

        if (rule == AKV_RANK_UTILITY) {
            akv_observed_logits(job, head, t0, n, s->post, s->logits);
            akv_gemm_nt(job->rows, n, dk, queries, dk, s->pre, dk, s->errors, AKV_TILE_TOKENS);
            utilities(job, head, n, residual_sq[AKV_SIDE_V], value_sq, s, rank[AKV_SIDE_K], rank[AKV_SIDE_V]);
        }
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint32_t i = 0; i < n; i++) {
                if (rule == AKV_RANK_COSINE)
                    rank[side][i] = cosine[side][i] < 1.0f ? 1.0f - cosine[side][i] : 0.0f;
                else if (rule == AKV_RANK_NORM)
                    rank[side][i] = residual_sq[side][i];
                else if (rule == AKV_RANK_ATTENTION)
                    rank[side][i] = job->score[head * job->S + t0 + i];
                else if (rule == AKV_RANK_RANDOM)
                    rank[side][i] = (float)(akv_rng_next(&rng) >> 40);
                if (job->anchor_of[head * job->S + t0 + i] != 0)
                    rank[side][i] = -1.0f; /* exact already */
                else if (!(rank[side][i] >= 0.0f))
                    rank[side][i] = 0.0f; /* overflow of absurdly large inputs */
            }
    }
    akv_return_slot(job->slots, slot);
}

void akv_project(akv_job *job)
{
    akv_parallel_for(job->config->executor, store_anchor_vectors, job, (size_t)job->H * 2);
    akv_parallel_for(job->config->executor, project_task, job, (size_t)(job->H * job->num_ranges));
}

void akv_residual_of(const akv_job *job, int side, uint32_t head, uint64_t token, akv_rope_walk *walk, float *out)
{
    const akv_layer *layer = job->layer;
    const uint32_t dim = job->header->head_dim[side];
    const uint16_t *anchor = (const uint16_t *)akv_job_section(job, AKV_SEC_ANCHORS + side) +
                             ((size_t)head * job->k + get_index(job, side, head, token)) * dim;
    const uint16_t *coeff = (const uint16_t *)akv_job_section(job, AKV_SEC_COEFF + side);
    float gamma = akv_f16_to_f32(coeff[head * job->S + token]);
    anchor_space_row(job, side, head, token, walk, out);
    for (uint32_t i = 0; i < dim; i++)
        out[i] -= gamma * akv_bf16_to_f32(anchor[i]);
    if (side == AKV_SIDE_K && pre_rope(job))
        akv_rope_turn(out, dim, layer->rope.rotary_dim, layer->rope.style, walk->cosine, walk->sine, 1, layer->rope.magnitude,
                      out);
}
