/* SPDX-License-Identifier: Apache-2.0 */
/*
 * centroids.c - free anchors as directions of many tokens (docs/method.md "anchors of the default profile"). A token
 * drawn for coverage explains its neighbours only as well as any one of them would. The direction that explains most of
 * the energy of all tokens nearest to it does better: gain-shape vector quantisation, one step of the power method a
 * round, each side on its own. Attended anchors, sinks and the window stay the tokens they are: those are to be exact.
 */
#include "codec/ladder.h"
#include "core/slots.h"
#include "kernels/kernels.h"

/*
 * Add the tokens of tiles first, first + step, ... to the sum of the anchor nearest to each, weighted by how far it
 * goes along; neither fixed anchors nor what they explain best.
 */
static void gather(akv_job *job, int side, uint32_t head, akv_turner *turner, akv_codec_scratch *s, uint64_t first,
                   uint64_t step, float *sum, float *energy, float *members)
{
    const uint32_t dim = job->header->head_dim[side];
    const uint8_t *fixed = job->ladder->fixed + (size_t)head * job->k;
    const uint32_t *anchor_of = job->anchor_of + head * job->S;
    float *rows = side == AKV_SIDE_K ? s->pre : s->value, along[AKV_TILE_TOKENS];
    uint32_t nearest[AKV_TILE_TOKENS];
    const akv_kernels *kernels = akv_kernels_best();
    for (uint64_t t0 = first * AKV_TILE_TOKENS; t0 < job->S; t0 += step * AKV_TILE_TOKENS) {
        const uint32_t n = (uint32_t)(job->S - t0 < AKV_TILE_TOKENS ? job->S - t0 : AKV_TILE_TOKENS);
        akv_anchor_space_rows(job, side, head, t0, n, turner, rows);
        akv_nearest_anchors(job, side, head, n, rows, s, nearest, along);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t a = nearest[i], own = anchor_of[t0 + i];
            if (fixed[a] || (own != 0 && fixed[own - 1]))
                continue;
            kernels->rows_axpy(&along[i], 1, 1, rows + (size_t)i * dim, dim, sum + (size_t)a * dim);
            energy[a] += along[i] * along[i];
            members[a] += 1.0f;
        }
    }
}

/* Task = head * 2 + side. */
static void refine_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)(task / 2), k = job->k;
    const int side = (int)(task % 2);
    const uint32_t dim = job->header->head_dim[side], most_dim = job->dk > job->dv ? job->dk : job->dv;
    const uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    const uint8_t *fixed = job->ladder->fixed + (size_t)head * k;
    const uint32_t *anchor_of = job->anchor_of + head * job->S;
    float *anchor = job->anchor[side] + (size_t)head * k * dim, *unit = job->unit[side] + (size_t)head * k * dim;
    float *sum = job->ladder->refine + slot * AKV_REFINE_FLOATS(k, most_dim), *energy = sum + (size_t)k * dim;
    float *members = energy + k;
    for (uint64_t t = 0; t < job->S; t++)
        if (anchor_of[t] != 0) {
            const size_t at = (size_t)(anchor_of[t] - 1) * dim;
            akv_anchor_space_row(job, side, head, t, &turner, anchor + at);
            akv_unit_of(anchor + at, dim, unit + at);
        }
    for (uint32_t round = 0; round < job->experiment->anchor_rounds; round++) {
        memset(sum, 0, ((size_t)k * dim + (size_t)2 * k) * sizeof *sum);
        /*
         * Long contexts: every second tile, the other half the next round. As good as all of them in half the time; a
         * quarter is not (docs/codec-log.md).
         */
        const uint64_t step = job->S >= (uint64_t)16 * AKV_TILE_TOKENS ? 2 : 1;
        gather(job, side, head, &turner, s, round % step, step, sum, energy, members);
        for (uint32_t a = 0; a < k; a++) {
            float *x = sum + (size_t)a * dim, *to = anchor + (size_t)a * dim;
            const float square = akv_dot_f32(x, x, dim);
            /*
             * An anchor without members stays what it is. Absurdly large inputs overflow the sums: so do their anchors.
             */
            if (fixed[a] || !(square > 0.0f && square < 1e37f && energy[a] < 1e37f))
                continue;
            /* As long as its members are on average, so that coefficients lie around 1 and -1. */
            const float length = sqrtf(energy[a] / members[a] / square);
            for (uint32_t d = 0; d < dim; d++)
                to[d] = x[d] * length;
            akv_unit_of(to, dim, unit + (size_t)a * dim);
        }
    }
    akv_return_slot(job->slots, slot);
}

void akv_refine_anchors(akv_job *job)
{
    if (job->experiment->anchor_rounds == 0)
        return;
    akv_parallel_for(job->config->executor, refine_task, job, (size_t)job->H * 2);
    for (uint32_t head = 0; head < job->H; head++)
        for (uint64_t t = 0; t < job->S; t++) {
            uint32_t *anchor_of = &job->anchor_of[head * job->S + t];
            if (*anchor_of != 0 && !job->ladder->fixed[(size_t)head * job->k + *anchor_of - 1])
                *anchor_of = 0;
        }
}
