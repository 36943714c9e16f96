/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coverage.c - anchors for coverage (docs/method.md "anchors of the default profile"): like k-means++ seeding, a token
 * is drawn with probability proportional to the energy that the anchors so far leave of its centred key and of its
 * value. Drawn in batches, as k-means|| does, so that the comparison is a matrix product. All heads go through the
 * rounds together, so that a round's work can be cut by head, side and range.
 */
#include "codec/ladder.h"
#include "core/slots.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

#define BATCH AKV_COVER_BATCH
#define CANDIDATES AKV_COVER_CANDIDATES
#define MOST_JUDGES AKV_COVER_JUDGES

static float *units_of(const akv_job *job, uint32_t head, int side)
{
    const size_t most = job->dk > job->dv ? job->dk : job->dv;
    return job->ladder->cover_units + ((size_t)head * AKV_SIDES + (size_t)side) * CANDIDATES * most;
}

/* Memory of later steps, free until then: energies and what is left of them. */
static float *energy_of(const akv_job *job, uint32_t head, int side)
{
    return job->ladder->prior[side] + head * job->S;
}

static float *left_of(const akv_job *job, uint32_t head, int side)
{
    return (side == AKV_SIDE_K ? job->ladder->deviation : job->rank[AKV_SIDE_V]) + head * job->S;
}

static uint64_t judge_stride(const akv_job *job)
{
    return akv_div_up(job->S - job->W, MOST_JUDGES);
}

/* Task = (head * ranges + range) * 2 + side: energies of the earlier tokens. */
static void energy_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const int side = (int)(task % 2);
    uint32_t head, slot = akv_claim_slot(job->slots, job->num_slots);
    uint64_t begin, end;
    akv_range_of(job, task / 2, &head, &begin, &end);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    float *rows = side == AKV_SIDE_K ? s->pre : s->value;
    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        const uint32_t n = akv_tile_tokens(t0, end);
        akv_anchor_space_rows(job, side, head, t0, n, &turner, rows);
        akv_coder_best()->squares(rows, n, job->header->head_dim[side], NULL, energy_of(job, head, side) + t0);
        memcpy(left_of(job, head, side) + t0, energy_of(job, head, side) + t0, n * sizeof(float));
    }
    akv_return_slot(job->slots, slot);
}

/* The same tasks: what the head's units leave of them. */
static void shrink_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const int side = (int)(task % 2);
    const uint32_t dim = job->header->head_dim[side];
    uint32_t head;
    uint64_t begin, end;
    akv_range_of(job, task / 2, &head, &begin, &end);
    const akv_cover_head *state = &job->ladder->cover_heads[head];
    if (state->num_units == 0)
        return;
    const uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    float *rows = side == AKV_SIDE_K ? s->pre : s->value;
    for (uint64_t t0 = begin; t0 < end; t0 += AKV_TILE_TOKENS) {
        const uint32_t n = akv_tile_tokens(t0, end);
        akv_anchor_space_rows(job, side, head, t0, n, &turner, rows);
        akv_gemm_nt(state->num_units, n, dim, units_of(job, head, side), dim, rows, dim, s->sims, AKV_TILE_TOKENS);
        akv_coder_best()->shrink_left(s->sims, AKV_TILE_TOKENS, state->num_units, n, energy_of(job, head, side) + t0,
                                      left_of(job, head, side) + t0);
    }
    akv_return_slot(job->slots, slot);
}

/* Unit rows of the head's first n tokens. */
static void make_units(akv_job *job, uint32_t head, uint32_t n)
{
    akv_cover_head *state = &job->ladder->cover_heads[head];
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_turner turner = akv_turner_begin(&job->scratch[slot]);
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint32_t dim = job->header->head_dim[side];
        for (uint32_t i = 0; i < n; i++) {
            float *x = units_of(job, head, side) + (size_t)i * dim;
            akv_anchor_space_row(job, side, head, state->tokens[i], &turner, x);
            float norm = sqrtf(akv_dot_f32(x, x, dim));
            for (uint32_t d = 0; d < dim; d++)
                x[d] = norm > 0.0f ? x[d] / norm : 0.0f;
        }
    }
    state->num_units = n;
    akv_return_slot(job->slots, slot);
}

/* Task = head. The next anchors that are there already: the top-attended ones and the window. */
static void given_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)task;
    const uint64_t earlier = job->S - job->W;
    akv_cover_head *state = &job->ladder->cover_heads[head];
    uint32_t n = 0;
    for (; state->next < job->S && n < CANDIDATES; state->next++)
        if (state->next >= earlier || state->mask[state->next])
            state->tokens[n++] = state->next;
    make_units(job, head, n);
}

/* Draw up to `want` unmarked tokens, probability proportional to what is left of them: one random offset, equal steps through
 * the cumulated weights, so that no token comes twice and a batch is spread over the whole range. */
static uint32_t draw(akv_cover_head *state, uint64_t earlier, const float *left_k, const float *left_v, uint32_t want)
{
    const uint8_t *mask = state->mask;
    const double *weight = state->weight;
    double total = 0.0;
    uint32_t n = 0;
    for (uint64_t t = 0; t < earlier; t++)
        if (!mask[t])
            total += weight[0] * left_k[t] + weight[1] * left_v[t];
    if (total > 0.0 && isfinite(total)) {
        double step = total / want, at = step * ((double)(akv_rng_next(&state->rng) >> 11) * 0x1p-53), sum = 0.0;
        for (uint64_t t = 0; t < earlier && n < want; t++) {
            if (mask[t])
                continue;
            sum += weight[0] * left_k[t] + weight[1] * left_v[t];
            if (sum > at) {
                state->tokens[n++] = t;
                while (at < sum)
                    at += step;
            }
        }
    }
    for (uint64_t t = 0; n == 0 && t < earlier; t++) /* nothing left to cover: any token */
        if (!mask[t])
            state->tokens[n++] = t;
    return n;
}

/* Task = head. */
static void draw_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)task;
    akv_cover_head *state = &job->ladder->cover_heads[head];
    const uint64_t earlier = job->S - job->W;
    if (!state->weighed) {
        state->weighed = true;
        for (int side = 0; side < AKV_SIDES; side++) {
            double sum = 0.0;
            for (uint64_t t = 0; t < earlier; t++)
                sum += energy_of(job, head, side)[t];
            state->weight[side] = sum > 0.0 ? 1.0 / sum : 0.0;
        }
    }
    const uint32_t want = state->need < BATCH ? (uint32_t)state->need : BATCH;
    const uint32_t n = want == 0 ? 0
                                 : draw(state, earlier, left_of(job, head, AKV_SIDE_K), left_of(job, head, AKV_SIDE_V),
                                        want * (CANDIDATES / BATCH));
    if (n == 0)
        state->need = 0;
    make_units(job, head, n);
}

/*
 * Task = head * 2 + side: what each candidate would leave to the judges, a regular sample of the tokens -> [candidates,
 * judges].
 */
static void judge_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const akv_cover_head *state = &job->ladder->cover_heads[head];
    const uint32_t dim = job->header->head_dim[side], n = state->num_units;
    const uint64_t stride = judge_stride(job);
    const uint32_t judges = (uint32_t)akv_div_up(job->S - job->W, stride);
    if (n == 0)
        return;
    const uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    float *rows = side == AKV_SIDE_K ? s->pre : s->value, *leaves = job->ladder->cover + task * AKV_COVER_FLOATS;
    float *now = leaves + (size_t)CANDIDATES * MOST_JUDGES;
    for (uint32_t j0 = 0; j0 < judges; j0 += AKV_TILE_TOKENS) {
        const uint32_t count = judges - j0 < AKV_TILE_TOKENS ? judges - j0 : AKV_TILE_TOKENS;
        for (uint32_t j = 0; j < count; j++) {
            const uint64_t t = (j0 + j) * stride;
            akv_anchor_space_row(job, side, head, t, &turner, rows + (size_t)j * dim);
            now[j0 + j] = left_of(job, head, side)[t];
            s->best[j] = energy_of(job, head, side)[t];
        }
        akv_gemm_nt(n, count, dim, units_of(job, head, side), dim, rows, dim, leaves + j0, MOST_JUDGES);
        for (uint32_t c = 0; c < n; c++)
            akv_coder_best()->leaves(leaves + (size_t)c * MOST_JUDGES + j0, s->best, count);
    }
    akv_return_slot(job->slots, slot);
}

/*
 * Task = head. Keep the best of the candidates, one after the other, each judged by how much it takes away from what
 * the ones before leave. A candidate's gain can only fall as others are kept (in rounded sums too), so only those whose
 * last known gain leads are asked again.
 */
static void keep_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)task, judges = (uint32_t)akv_div_up(job->S - job->W, judge_stride(job));
    akv_cover_head *state = &job->ladder->cover_heads[head];
    const akv_coder_kernels *kernels = akv_coder_best();
    const uint32_t n = state->num_units, want = state->need < BATCH ? (uint32_t)state->need : BATCH;
    const float *leaves[AKV_SIDES];
    float *now[AKV_SIDES];
    double gain[CANDIDATES];
    uint32_t asked[CANDIDATES], kept = 0;
    bool taken[CANDIDATES] = {false};
    for (int side = 0; side < AKV_SIDES; side++) {
        leaves[side] = job->ladder->cover + ((size_t)head * AKV_SIDES + (size_t)side) * AKV_COVER_FLOATS;
        now[side] = job->ladder->cover + ((size_t)head * AKV_SIDES + (size_t)side) * AKV_COVER_FLOATS +
                    (size_t)CANDIDATES * MOST_JUDGES;
    }
    for (uint32_t c = 0; c < n; c++) {
        gain[c] = INFINITY;
        asked[c] = UINT32_MAX;
    }
    while (n > want && kept < want) {
        uint32_t best = UINT32_MAX;
        for (uint32_t c = 0; c < n; c++)
            if (!taken[c] && (best == UINT32_MAX || gain[c] > gain[best]))
                best = c;
        if (asked[best] != kept) {
            asked[best] = kept;
            gain[best] = 0.0;
            for (int side = 0; side < AKV_SIDES; side++)
                gain[best] += state->weight[side] *
                              kernels->coverage_gain(now[side], leaves[side] + (size_t)best * MOST_JUDGES, judges);
            continue;
        }
        taken[best] = true;
        kept++;
        for (int side = 0; side < AKV_SIDES; side++)
            kernels->coverage_take(now[side], leaves[side] + (size_t)best * MOST_JUDGES, judges);
    }
    uint32_t count = 0;
    for (uint32_t c = 0; c < n; c++) {
        if (n > want && !taken[c])
            continue;
        state->mask[state->tokens[c]] = 1;
        for (int side = 0; side < AKV_SIDES; side++) {
            const uint32_t dim = job->header->head_dim[side];
            float *units = units_of(job, head, side);
            if (c != count)
                memcpy(units + (size_t)count * dim, units + (size_t)c * dim, dim * sizeof *units);
        }
        count++;
    }
    state->num_units = count;
    state->need -= count;
}

static bool any_units(const akv_job *job)
{
    for (uint32_t head = 0; head < job->H; head++)
        if (job->ladder->cover_heads[head].num_units > 0)
            return true;
    return false;
}

static bool any_need(const akv_job *job)
{
    for (uint32_t head = 0; head < job->H; head++)
        if (job->ladder->cover_heads[head].need > 0)
            return true;
    return false;
}

void akv_cover_directions(akv_job *job)
{
    const akv_executor *executor = job->config->executor;
    const size_t tiles = (size_t)(job->H * job->num_ranges) * AKV_SIDES;
    if (!any_need(job))
        return;
    akv_parallel_for(executor, energy_task, job, tiles);
    for (;;) {
        akv_parallel_for(executor, given_task, job, job->H);
        if (!any_units(job))
            break;
        akv_parallel_for(executor, shrink_task, job, tiles);
    }
    for (;;) {
        akv_parallel_for(executor, draw_task, job, job->H);
        akv_parallel_for(executor, judge_task, job, (size_t)job->H * AKV_SIDES);
        akv_parallel_for(executor, keep_task, job, job->H);
        if (!any_need(job))
            break;
        akv_parallel_for(executor, shrink_task, job, tiles);
    }
}
