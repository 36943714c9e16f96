/* SPDX-License-Identifier: Apache-2.0 */
/*
 * project.c - anchors as stored, nearest anchor and coefficient of every token, its residual, and what that is worth
 * (paper sections 3.2 and 3.3, design section 3 steps 2 and 3). Keys are compared before the rotary embedding, because
 * turning destroys directional similarity; what a key residual is worth is judged after it, because that is what the
 * queries meet.
 */
#include "codec/codec.h"
#include "codec/ladder.h"
#include "core/ladder.h"
#include "core/slots.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

/* ------------------------------------------------------------------------------------------------------- storing */

/* One vector as an anchor: bf16 (PLAIN), or 8 bits with a scale (LADDER). x becomes what is read back. */
static void store_anchor(akv_job *job, int side, uint32_t head, uint32_t a, float *x)
{
    const uint32_t dim = job->header->head_dim[side];
    const size_t at = (size_t)head * job->k + a;
    if (job->ladder == NULL) {
        uint16_t *out = (uint16_t *)akv_job_section(job, AKV_SEC_ANCHORS + side) + at * dim;
        for (uint32_t i = 0; i < dim; i++) {
            out[i] = akv_f32_to_bf16(x[i]);
            x[i] = akv_bf16_to_f32(out[i]);
        }
        return;
    }
    int8_t *out = (int8_t *)akv_job_section(job, AKV_SEC_ANCHORS + side) + at * dim;
    uint16_t *scale = (uint16_t *)akv_job_section(job, AKV_SEC_ANCHOR_SCALES + side) + at;
    const float *units = job->unit_of[side] + (size_t)head * dim;
    float absmax = 0.0f; /* in units: without them the few large coordinates of keys would cost the others their digits
                            */
    for (uint32_t i = 0; i < dim; i++)
        absmax = fabsf(x[i]) > absmax * units[i] ? fabsf(x[i]) / units[i] : absmax;
    *scale = akv_f32_to_f16(absmax / 127.0f);
    float s = akv_f16_to_f32(*scale);
    for (uint32_t i = 0; i < dim; i++) {
        float q = s > 0.0f ? rintf(x[i] / (s * units[i])) : 0.0f;
        q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
        out[i] = (int8_t)q;
        x[i] = q * s * units[i];
    }
}

static void set_index(const akv_job *job, int side, uint32_t head, uint64_t token, uint32_t anchor)
{
    uint8_t *index = akv_job_section(job, AKV_SEC_INDEX + side);
    if (job->ladder != NULL) {
        uint32_t bits = job->header->index_bits;
        uint64_t bit = token * bits;
        index += head * akv_div_up(job->S * bits, 8) + (bit >> 3);
        for (uint32_t word = anchor << (bit & 7); word != 0; word >>= 8)
            *index++ |= (uint8_t)word;
    } else if (job->k <= 256) {
        index[head * job->S + token] = (uint8_t)anchor;
    } else {
        ((uint16_t *)(void *)index)[head * job->S + token] = (uint16_t)anchor;
    }
}

static uint32_t get_index(const akv_job *job, int side, uint32_t head, uint64_t token)
{
    const uint8_t *index = akv_job_section(job, AKV_SEC_INDEX + side);
    return job->k <= 256 ? index[head * job->S + token]
                         : ((const uint16_t *)(const void *)index)[head * job->S + token];
}

/* Round and store a coefficient; returns what is read back. own: the token is the anchor. */
static float store_coefficient(akv_job *job, int side, uint32_t head, uint64_t token, float gamma, bool own)
{
    if (!(fabsf(gamma) <= 65504.0f)) /* products of huge numbers overflow; what is stored stays a number of 16 bits */
        gamma = gamma > 0.0f ? 65504.0f : gamma < 0.0f ? -65504.0f : 0.0f;
    if (job->ladder == NULL) {
        uint16_t h = own ? 0x3c00 : akv_f32_to_f16(gamma);
        ((uint16_t *)akv_job_section(job, AKV_SEC_COEFF + side))[head * job->S + token] = h;
        return akv_f16_to_f32(h);
    }
    uint8_t *nibbles = (uint8_t *)akv_job_section(job, AKV_SEC_COEFF + side) + head * akv_div_up(job->S, 2);
    float code = rintf(gamma / AKV_COEFF_STEP);
    int c = own ? AKV_COEFF_SELF : code > 7.0f ? 7 : code < -7.0f ? -7 : (int)code;
    nibbles[token >> 1] |= (uint8_t)((c & 15) << ((token & 1) * 4));
    return own ? 1.0f : (float)c * AKV_COEFF_STEP;
}

void akv_unit_of(const float *anchor, uint32_t dim, float *unit)
{
    double norm = 0.0;
    for (uint32_t i = 0; i < dim; i++)
        norm += (double)anchor[i] * anchor[i];
    norm = norm > 0.0 ? 1.0 / sqrt(norm) : 0.0;
    for (uint32_t i = 0; i < dim; i++)
        unit[i] = (float)(anchor[i] * norm);
}

/* Task = head * 2 + side. */
static void store_anchors_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const uint32_t dim = job->header->head_dim[side];
    const uint32_t *anchor_of = job->anchor_of + head * job->S;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    for (uint64_t t = 0; t < job->S; t++) {
        if (anchor_of[t] == 0)
            continue;
        uint32_t a = anchor_of[t] - 1;
        float *anchor = job->anchor[side] + ((size_t)head * job->k + a) * dim;
        akv_anchor_space_row(job, side, head, t, &turner, anchor);
        store_anchor(job, side, head, a, anchor);
        akv_unit_of(anchor, dim, job->unit[side] + ((size_t)head * job->k + a) * dim);
    }
    for (uint32_t a = 0; job->ladder != NULL && a < job->k; a++) { /* those that are no token, from akv_refine_anchors
                                                                      */
        if (job->ladder->fixed[(size_t)head * job->k + a])
            continue;
        float *anchor = job->anchor[side] + ((size_t)head * job->k + a) * dim;
        store_anchor(job, side, head, a, anchor);
        akv_unit_of(anchor, dim, job->unit[side] + ((size_t)head * job->k + a) * dim);
    }
    akv_return_slot(job->slots, slot);
}

/* ---------------------------------------------------------------------------------------------------- projecting */

void akv_nearest_anchors(const akv_job *job, int side, uint32_t head, uint32_t n, const float *rows,
                         akv_codec_scratch *s, uint32_t *nearest, float *along)
{
    const uint32_t dim = job->header->head_dim[side];
    const akv_matrix_kernels *kernels = akv_matrix_best();
    kernels->transpose(rows, dim, n, dim, s->sims, AKV_TILE_TOKENS);
    kernels->nearest(job->unit[side] + (size_t)head * job->k * dim, job->k, dim, s->sims, AKV_TILE_TOKENS, n, nearest,
                     along);
}

/* The same rows of a segment that is there already: its own anchors and coefficients. */
static void project_again(akv_job *job, int side, uint32_t head, uint64_t t0, uint32_t n, float *rows)
{
    const uint32_t dim = job->header->head_dim[side];
    const akv_ladder_view v = akv_view_ladder(job->again, side, job->again_head + head);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t a = akv_ladder_index(&v, t0 + i);
        const int code = akv_ladder_coeff(&v, t0 + i);
        const float minus = code == AKV_COEFF_SELF ? -1.0f : -(float)code * AKV_COEFF_STEP;
        akv_kernels_best()->rows_axpy(&minus, 1, 1, job->anchor[side] + ((size_t)head * job->k + a) * dim, dim,
                                      rows + (size_t)i * dim);
    }
}

/*
 * Nearest anchors of n rows in anchor space: index and coefficient go to the segment, the rows become residuals in
 * anchor space, |cosine| goes to best.
 */
static void project_tile(akv_job *job, int side, uint32_t head, uint64_t t0, uint32_t n, float *rows,
                         akv_codec_scratch *s)
{
    const uint32_t dim = job->header->head_dim[side];
    const float *anchors = job->anchor[side] + (size_t)head * job->k * dim;
    const akv_kernels *kernels = akv_kernels_best();
    if (job->again != NULL) {
        project_again(job, side, head, t0, n, rows);
        memset(s->best, 0, n * sizeof *s->best);
        return;
    }
    uint32_t nearest[AKV_TILE_TOKENS];
    float square[AKV_TILE_TOKENS];
    akv_nearest_anchors(job, side, head, n, rows, s, nearest, s->best);
    akv_coder_best()->squares(rows, n, dim, NULL, square);
    for (uint32_t i = 0; i < n; i++) {
        float *x = rows + (size_t)i * dim;
        uint32_t own = job->anchor_of[head * job->S + t0 + i];
        s->best[i] = square[i] > 0.0f ? fabsf(s->best[i]) / sqrtf(square[i]) : 1.0f;
        if (own != 0) { /* exact up to the anchor's own rounding, which residuals do not mend */
            nearest[i] = own - 1;
            store_coefficient(job, side, head, t0 + i, 1.0f, true);
            memset(x, 0, dim * sizeof *x);
        } else {
            const float *a = anchors + (size_t)nearest[i] * dim;
            float xa, aa;
            kernels->rows_dot(x, 1, a, dim, 1.0f, &xa, 1);
            kernels->rows_dot(a, 1, a, dim, 1.0f, &aa, 1);
            const float minus = -store_coefficient(job, side, head, t0 + i, aa > 0.0f ? xa / aa : 0.0f, false);
            kernels->rows_axpy(&minus, 1, 1, a, dim, x);
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
        float *l = s->logits + (size_t)r * AKV_TILE_STRIDE, *e = s->errors + (size_t)r * AKV_TILE_STRIDE;
        const float *vy = s->cross + (size_t)r * AKV_TILE_STRIDE;
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

/* Replace utilities by another rule (ablations), and take anchors and overflow out of the contest. */
static void finish_ranks(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, float *rank[AKV_SIDES],
                         float residual_sq[AKV_SIDES][AKV_TILE_TOKENS], float cosine[AKV_SIDES][AKV_TILE_TOKENS],
                         akv_rng *rng)
{
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint32_t i = 0; i < n; i++) {
            float *r = &rank[side][i];
            switch (job->experiment->rank) {
            case AKV_RANK_UTILITY: break;
            case AKV_RANK_COSINE: *r = cosine[side][i] < 1.0f ? 1.0f - cosine[side][i] : 0.0f; break;
            case AKV_RANK_NORM: *r = residual_sq[side][i]; break;
            case AKV_RANK_ATTENTION: *r = job->score[head * job->S + t0 + i]; break;
            case AKV_RANK_RANDOM: *r = (float)(akv_rng_next(rng) >> 40); break;
            }
            if (job->anchor_of[head * job->S + t0 + i] != 0)
                *r = -1.0f; /* exact already */
            else if (!(*r >= 0.0f))
                *r = 0.0f; /* overflow of absurdly large inputs */
        }
}

static void project_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const akv_layer *layer = job->layer;
    const uint32_t dk = job->dk, dv = job->dv;
    uint32_t head;
    uint64_t begin, end;
    akv_range_of(job, task, &head, &begin, &end);
    const akv_coder_kernels *kernels = akv_coder_best();
    const float *queries = job->queries + (size_t)head * job->rows * dk,
                *outputs = job->output + (size_t)head * job->rows * dv;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    akv_rng rng = akv_rng_stream(job->seed, AKV_RNG_RANK, task);
    float value_sq[AKV_TILE_TOKENS], residual_sq[AKV_SIDES][AKV_TILE_TOKENS], cosine[AKV_SIDES][AKV_TILE_TOKENS];

    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        const uint32_t n = akv_tile_tokens(t0, end);
        float *rank[AKV_SIDES] = {job->rank[0] + head * job->S + t0, job->rank[1] + head * job->S + t0};
        akv_anchor_space_rows(job, AKV_SIDE_K, head, t0, n, &turner, s->pre);
        akv_load_rows(&layer->values, head, t0, n, dv, s->value);
        kernels->squares(s->value, n, dv, NULL, value_sq);
        akv_gemm_nt(job->rows, n, dv, outputs, dv, s->value, dv, s->cross, AKV_TILE_STRIDE);
        if (job->ladder != NULL)
            akv_ladder_value_deviation(job, head, t0, n, s->value);

        project_tile(job, AKV_SIDE_K, head, t0, n, s->pre, s);
        memcpy(cosine[AKV_SIDE_K], s->best, n * sizeof(float));
        project_tile(job, AKV_SIDE_V, head, t0, n, s->value, s);
        memcpy(cosine[AKV_SIDE_V], s->best, n * sizeof(float));
        for (uint32_t i = 0; i < n; i++)
            akv_turn_residual(job, t0 + i, &turner, s->pre + (size_t)i * dk);
        kernels->squares(s->pre, n, dk, NULL, residual_sq[AKV_SIDE_K]);
        kernels->squares(s->value, n, dv, NULL, residual_sq[AKV_SIDE_V]);
        akv_gemm_nt(job->rows, n, dk, queries, dk, s->pre, dk, s->errors, AKV_TILE_STRIDE);
        if (job->ladder != NULL) {
            if (job->again == NULL)
                akv_ladder_second_moments(job, task, n, s->pre, s->value);
            akv_ladder_utilities(job, head, t0, n, residual_sq[AKV_SIDE_K], residual_sq[AKV_SIDE_V], value_sq, s,
                                 rank[AKV_SIDE_K], rank[AKV_SIDE_V]);
        } else if (job->experiment->rank == AKV_RANK_UTILITY) {
            akv_load_rows(&layer->keys, head, t0, n, dk, s->post);
            akv_observed_logits(job, head, t0, n, s->post, s->logits);
            utilities(job, head, n, residual_sq[AKV_SIDE_V], value_sq, s, rank[AKV_SIDE_K], rank[AKV_SIDE_V]);
        }
        finish_ranks(job, head, t0, n, rank, residual_sq, cosine, &rng);
    }
    akv_return_slot(job->slots, slot);
}

void akv_project(akv_job *job)
{
    akv_parallel_for(job->config->executor, store_anchors_task, job, (size_t)job->H * 2);
    akv_parallel_for(job->config->executor, project_task, job, (size_t)(job->H * job->num_ranges));
}

void akv_residual_of(const akv_job *job, int side, uint32_t head, uint64_t token, akv_turner *turner, float *out)
{
    const uint32_t dim = job->header->head_dim[side];
    uint32_t a;
    float gamma;
    if (job->ladder != NULL) {
        akv_ladder_view v = akv_ladder_writer_view(job, side, head);
        a = akv_ladder_index(&v, token);
        gamma = (float)akv_ladder_coeff(&v, token) * AKV_COEFF_STEP;
    } else {
        a = get_index(job, side, head, token);
        gamma = akv_f16_to_f32(((const uint16_t *)akv_job_section(job, AKV_SEC_COEFF + side))[head * job->S + token]);
    }
    const float *anchor = job->anchor[side] + ((size_t)head * job->k + a) * dim;
    akv_anchor_space_row(job, side, head, token, turner, out);
    const float minus = -gamma;
    akv_kernels_best()->rows_axpy(&minus, 1, 1, anchor, dim, out);
    if (side == AKV_SIDE_K)
        akv_turn_residual(job, token, turner, out);
}
