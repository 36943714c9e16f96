/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coverage.c - anchors for coverage (docs/method.md "anchors of the default profile"): like k-means++ seeding, a token is drawn with
 * probability proportional to the energy that the anchors so far leave of its centred key and of its value. Drawn in
 * batches, as k-means|| does, so that the comparison is a matrix product.
 */
#include "codec/ladder.h"
#include "core/slots.h"
#include "kernels/kernels.h"

#define BATCH AKV_COVER_BATCH
#define CANDIDATES AKV_COVER_CANDIDATES
#define MOST_JUDGES AKV_COVER_JUDGES

/* left[t] := min(left[t], energy[t] (1 - cos^2)) against the unit rows of one batch. */
static void shrink_left(const akv_job *job, int side, uint32_t head, const float *batch, uint32_t n, const float *energy,
                        akv_rope_walk *walk, akv_codec_scratch *s, float *left)
{
    const uint32_t dim = job->header->head_dim[side];
    for (uint64_t t0 = 0; t0 < job->S - job->W; t0 += AKV_TILE_TOKENS) {
        uint64_t end = job->S - job->W;
        uint32_t rows = (uint32_t)(end - t0 < AKV_TILE_TOKENS ? end - t0 : AKV_TILE_TOKENS);
        for (uint32_t i = 0; i < rows; i++)
            akv_anchor_space_row(job, side, head, t0 + i, walk, s->pre + (size_t)i * dim);
        akv_gemm_nt(rows, n, dim, s->pre, dim, batch, dim, s->sims, AKV_ANCHOR_TILE);
        for (uint32_t i = 0; i < rows; i++) {
            float best = 0.0f;
            for (uint32_t a = 0; a < n; a++) {
                float x = s->sims[(size_t)i * AKV_ANCHOR_TILE + a];
                best = x * x > best ? x * x : best;
            }
            float rest = energy[t0 + i] - best;
            left[t0 + i] = rest < left[t0 + i] ? (rest > 0.0f ? rest : 0.0f) : left[t0 + i];
        }
    }
}

/* Unit rows of tokens[0..n) -> out. */
static void unit_rows(const akv_job *job, int side, uint32_t head, const uint64_t *tokens, uint32_t n, akv_rope_walk *walk, float *out)
{
    const uint32_t dim = job->header->head_dim[side];
    for (uint32_t i = 0; i < n; i++) {
        float *x = out + (size_t)i * dim;
        akv_anchor_space_row(job, side, head, tokens[i], walk, x);
        float norm = sqrtf(akv_dot_f32(x, x, dim));
        for (uint32_t d = 0; d < dim; d++)
            x[d] = norm > 0.0f ? x[d] / norm : 0.0f;
    }
}

/* Draw up to `want` unmarked tokens, probability proportional to what is left of them: one random offset, equal steps through
 * the cumulated weights, so that no token comes twice and a batch is spread over the whole range. */
static uint32_t draw(const uint8_t *mask, uint64_t earlier, float *const left[AKV_SIDES], const double weight[AKV_SIDES],
                     uint32_t want, akv_rng *rng, uint64_t *tokens)
{
    double total = 0.0;
    uint32_t n = 0;
    for (uint64_t t = 0; t < earlier; t++)
        if (!mask[t])
            total += weight[0] * left[0][t] + weight[1] * left[1][t];
    if (total > 0.0 && isfinite(total)) {
        double step = total / want, at = step * ((double)(akv_rng_next(rng) >> 11) * 0x1p-53), sum = 0.0;
        for (uint64_t t = 0; t < earlier && n < want; t++) {
            if (mask[t])
                continue;
            sum += weight[0] * left[0][t] + weight[1] * left[1][t];
            if (sum > at) {
                tokens[n++] = t;
                while (at < sum)
                    at += step;
            }
        }
    }
    for (uint64_t t = 0; n == 0 && t < earlier; t++) /* nothing left to cover: any token */
        if (!mask[t])
            tokens[n++] = t;
    return n;
}

/*
 * Keep the `want` best of n candidates, one after the other, each judged by how much it takes away from what the ones before leave on a
 * regular sample of the tokens. tokens is reordered. cover: [sides, MOST_JUDGES, CANDIDATES], then [sides, MOST_JUDGES].
 */
static void keep_best(const akv_job *job, uint32_t head, uint64_t *tokens, uint32_t n, uint32_t want, float *const left[AKV_SIDES],
                      float *const energy[AKV_SIDES], const double weight[AKV_SIDES], akv_rope_walk *walk, akv_codec_scratch *s,
                      float *cover)
{
    const uint64_t earlier = job->S - job->W, stride = akv_div_up(earlier, MOST_JUDGES);
    const uint32_t judges = (uint32_t)akv_div_up(earlier, stride);
    float *now = cover + (size_t)AKV_SIDES * MOST_JUDGES * CANDIDATES;
    double gain[CANDIDATES];
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint32_t dim = job->header->head_dim[side];
        float *sims = cover + (size_t)side * MOST_JUDGES * CANDIDATES;
        unit_rows(job, side, head, tokens, n, walk, s->value);
        for (uint32_t j0 = 0; j0 < judges; j0 += AKV_TILE_TOKENS) {
            uint32_t rows = judges - j0 < AKV_TILE_TOKENS ? judges - j0 : AKV_TILE_TOKENS;
            for (uint32_t j = 0; j < rows; j++) {
                akv_anchor_space_row(job, side, head, (j0 + j) * stride, walk, s->pre + (size_t)j * dim);
                now[side * MOST_JUDGES + j0 + j] = left[side][(j0 + j) * stride];
            }
            akv_gemm_nt(rows, n, dim, s->pre, dim, s->value, dim, sims + (size_t)j0 * CANDIDATES, CANDIDATES);
        }
        for (uint32_t j = 0; j < judges; j++) /* what each candidate would leave */
            for (uint32_t c = 0; c < n; c++) {
                float *x = &sims[(size_t)j * CANDIDATES + c];
                *x = energy[side][j * stride] - *x * *x;
            }
    }
    for (uint32_t kept = 0; kept < want && kept < n; kept++) {
        for (uint32_t c = kept; c < n; c++)
            gain[c] = 0.0;
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint32_t j = 0; j < judges; j++) {
                const float *x = cover + ((size_t)side * MOST_JUDGES + j) * CANDIDATES;
                float have = now[side * MOST_JUDGES + j];
                for (uint32_t c = kept; c < n; c++)
                    gain[c] += weight[side] * (x[c] < have ? have - (x[c] > 0.0f ? x[c] : 0.0f) : 0.0f);
            }
        uint32_t best = kept;
        for (uint32_t c = kept + 1; c < n; c++)
            if (gain[c] > gain[best])
                best = c;
        uint64_t token = tokens[best];
        tokens[best] = tokens[kept];
        tokens[kept] = token;
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint32_t j = 0; j < judges; j++) {
                float *x = cover + ((size_t)side * MOST_JUDGES + j) * CANDIDATES, *have = &now[side * MOST_JUDGES + j];
                float swapped = x[best];
                x[best] = x[kept];
                x[kept] = swapped;
                *have = swapped < *have ? (swapped > 0.0f ? swapped : 0.0f) : *have;
            }
    }
}

void akv_cover_directions(akv_job *job, uint32_t head, uint8_t *mask, uint64_t need, akv_rng *rng)
{
    const uint64_t earlier = job->S - job->W;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_rope_walk walk = akv_rope_walk_begin(job->layer->rope.inv_freq, job->header->rotary_dim / 2, s->phase);
    /* Memory of later steps, free until then: energies and what is left of them per side. */
    float *energy[AKV_SIDES] = {job->ladder->prior[AKV_SIDE_K] + head * job->S, job->ladder->prior[AKV_SIDE_V] + head * job->S};
    float *left[AKV_SIDES] = {job->ladder->deviation + head * job->S, job->rank[AKV_SIDE_V] + head * job->S};
    float *batch = s->value; /* [BATCH, dim] */
    uint64_t tokens[CANDIDATES];
    double mean[AKV_SIDES] = {0.0, 0.0};

    for (int side = 0; side < AKV_SIDES; side++) {
        const uint32_t dim = job->header->head_dim[side];
        for (uint64_t t = 0; t < earlier; t++) {
            akv_anchor_space_row(job, side, head, t, &walk, s->vector);
            energy[side][t] = left[side][t] = akv_dot_f32(s->vector, s->vector, dim);
            mean[side] += energy[side][t];
        }
    }
    /* Anchors that are there already: the top-attended ones and the window. */
    uint32_t n = 0;
    for (uint64_t t = 0; t <= job->S; t++) {
        if (t < job->S && (t >= earlier || mask[t]))
            tokens[n++] = t;
        if (n == BATCH || (t == job->S && n > 0)) {
            for (int side = 0; side < AKV_SIDES; side++) {
                unit_rows(job, side, head, tokens, n, &walk, batch);
                shrink_left(job, side, head, batch, n, energy[side], &walk, s, left[side]);
            }
            n = 0;
        }
    }
    const double weight[AKV_SIDES] = {mean[0] > 0.0 ? 1.0 / mean[0] : 0.0, mean[1] > 0.0 ? 1.0 / mean[1] : 0.0};
    while (need > 0) {
        uint32_t want = need < BATCH ? (uint32_t)need : BATCH;
        n = draw(mask, earlier, left, weight, want * (CANDIDATES / BATCH), rng, tokens);
        if (n == 0)
            break;
        if (n > want) {
            keep_best(job, head, tokens, n, want, left, energy, weight, &walk, s, job->ladder->cover + slot * AKV_COVER_FLOATS);
            n = want;
        }
        for (uint32_t i = 0; i < n; i++)
            mask[tokens[i]] = 1;
        need -= n;
        if (need == 0)
            break;
        for (int side = 0; side < AKV_SIDES; side++) {
            unit_rows(job, side, head, tokens, n, &walk, batch);
            shrink_left(job, side, head, batch, n, energy[side], &walk, s, left[side]);
        }
    }
    akv_return_slot(job->slots, slot);
}
