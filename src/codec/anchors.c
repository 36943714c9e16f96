/* SPDX-License-Identifier: Apache-2.0 */
/*
 * anchors.c - which tokens become anchors (paper section 3.1): the window, the most attended earlier tokens, and a
 * seeded uniform sample of the rest, per KV head. The sample matters: attention alone does not cover the directions.
 */
#include "codec/ladder.h"
#include "kernels/kernels.h"

/* Order-preserving for floats >= 0. */
static uint32_t key_of(float x)
{
    return x > 0.0f ? akv_bits_f32(x) : 0u;
}

void akv_take_largest(const float *values, uint64_t n, uint64_t count, uint8_t *mask)
{
    memset(mask, 0, n);
    if (count == 0)
        return;
    /* Radix selection, 8 bits at a time: `threshold` is the key of the count-th largest, `ties` how many equal it. */
    uint32_t prefix = 0, known = 0;
    uint64_t left = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint64_t histogram[256] = {0};
        for (uint64_t i = 0; i < n; i++) {
            uint32_t key = key_of(values[i]);
            if (values[i] >= 0.0f && (key & known) == prefix)
                histogram[(key >> shift) & 0xffu]++;
        }
        uint32_t digit = 255;
        while (digit > 0 && histogram[digit] < left) {
            left -= histogram[digit];
            digit--;
        }
        prefix |= digit << shift;
        known |= 0xffu << shift;
    }
    uint64_t ties = left;
    for (uint64_t i = 0; i < n; i++) {
        if (!(values[i] >= 0.0f))
            continue;
        uint32_t key = key_of(values[i]);
        if (key > prefix) {
            mask[i] = 1;
        } else if (key == prefix && ties > 0) {
            mask[i] = 1;
            ties--;
        }
    }
}

/* Mark `need` of the unmarked tokens of [0, n), every subset equally likely (selection sampling). */
static void sample_rest(uint8_t *mask, uint64_t n, uint64_t taken, uint64_t need, akv_rng *rng)
{
    uint64_t left = n - taken;
    for (uint64_t i = 0; i < n && need > 0; i++) {
        if (mask[i])
            continue;
        if (akv_rng_below(rng, left) < need) {
            mask[i] = 1;
            need--;
        }
        left--;
    }
}

static void store_anchors(akv_job *job, uint32_t head, const uint8_t *mask)
{
    uint32_t *tokens =
        job->ladder == NULL ? (uint32_t *)akv_job_section(job, AKV_SEC_ANCHOR_TOKENS) + (size_t)head * job->k : NULL;
    uint32_t *anchor_of = job->anchor_of + head * job->S;
    uint32_t count = 0;
    memset(anchor_of, 0, job->S * sizeof *anchor_of);
    for (uint64_t t = 0; t < job->S; t++)
        if (mask[t]) {
            if (tokens != NULL)
                tokens[count] = (uint32_t)t;
            anchor_of[t] = ++count;
        }
}

/*
 * rank[K] is filled later; until then its memory serves as two masks of [S] bytes: anchors so far, and attended ones.
 */
static uint8_t *mask_of(const akv_job *job, uint32_t head)
{
    return (uint8_t *)(job->rank[AKV_SIDE_K] + head * job->S);
}

/* Task = head: the most attended tokens, and without coverage the others. */
static void attended_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)task;
    const uint64_t earlier = job->S - job->W, free_anchors = job->k - job->W;
    const akv_experiment *x = job->experiment;
    uint8_t *mask = mask_of(job, head), *attended = mask + job->S;
    uint64_t top = x->no_random_anchors ? free_anchors : (uint64_t)(x->rho * (double)free_anchors);
    if (job->ladder != NULL && x->most_attended > 0 && top > x->most_attended)
        top = x->most_attended;
    if (top > earlier)
        top = earlier;
    akv_pool_scores(job, head, earlier, x->pool_width);
    float *pooled = job->pooled + head * job->S;
    if (job->ladder != NULL)
        for (uint64_t t = 0; t < x->sinks && t < earlier && t < free_anchors; t++) {
            pooled[t] = INFINITY; /* the first tokens carry the sink: a small error there breaks a model */
            top = top <= t ? t + 1 : top;
        }
    akv_take_largest(pooled, earlier, top, mask);
    akv_rng rng = akv_rng_stream(job->seed, AKV_RNG_ANCHORS, head);
    memcpy(attended, mask, earlier);
    memset(attended + earlier, 1, job->W);
    if (job->ladder != NULL && !x->uniform_anchors) {
        akv_cover_head *cover = &job->ladder->cover_heads[head];
        memset(cover, 0, sizeof *cover);
        cover->rng = rng;
        cover->mask = mask;
        cover->need = free_anchors - top;
    } else {
        sample_rest(mask, earlier, top, free_anchors - top, &rng);
    }
}

/* Task = head: their numbers. */
static void number_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)task;
    uint8_t *mask = mask_of(job, head), *attended = mask + job->S;
    memset(mask + (job->S - job->W), 1, job->W);
    store_anchors(job, head, mask);
    for (uint64_t t = 0; job->ladder != NULL && t < job->S; t++)
        if (mask[t])
            job->ladder->fixed[(size_t)head * job->k + job->anchor_of[head * job->S + t] - 1] =
                attended[t] || job->experiment->anchor_rounds == 0;
}

void akv_choose_anchors(akv_job *job)
{
    akv_parallel_for(job->config->executor, attended_task, job, job->H);
    if (job->ladder != NULL && !job->experiment->uniform_anchors)
        akv_cover_directions(job);
    akv_parallel_for(job->config->executor, number_task, job, job->H);
}
