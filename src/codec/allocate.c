/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allocate.c - one multiplier for the layer: every token and side takes the level that minimises
 * utility x distortion(level) + lambda x bits(level), keys and values of all heads together; lambda is bisected to the bytes.
 */
#include "codec/ladder.h"

#define GAIN_BITS 4.0

static akv_hull make_hull(const double *distortion, const uint32_t *bits, uint32_t levels)
{
    akv_hull hull = {1, {0}, {0}};
    double at_bits = 0.0, at = distortion[0];
    uint32_t from = 0;
    for (;;) {
        double best = 0.0;
        uint32_t pick = 0;
        for (uint32_t l = from + 1; l <= levels; l++) {
            double cost = bits[l - 1] + GAIN_BITS - at_bits, slope = cost > 0.0 ? (at - distortion[l]) / cost : 0.0;
            if (bits[l - 1] > 0 && slope > best) {
                best = slope;
                pick = l;
            }
        }
        if (pick == 0)
            return hull;
        hull.level[hull.count] = (uint8_t)pick;
        hull.slope[hull.count++] = best;
        at_bits = bits[pick - 1] + GAIN_BITS;
        at = distortion[pick];
        from = pick;
    }
}

/* Levels of all tokens for a multiplier; returns the bytes of all codes. */
static uint64_t assign(akv_job *job, const akv_hull *hulls, double lambda)
{
    const uint32_t levels = job->header->num_levels;
    uint64_t bytes = 0;
    for (uint32_t head = 0; head < job->H; head++)
        for (int side = 0; side < AKV_SIDES; side++) {
            const akv_hull *hull = &hulls[head * AKV_SIDES + side];
            const float *utility = job->rank[side] + head * job->S;
            uint8_t *level = job->ladder->level[side] + head * job->S;
            double threshold[AKV_MAX_LEVELS + 1]; /* the utility from which a level pays */
            for (uint32_t i = 1; i < hull->count; i++)
                threshold[i] = lambda / hull->slope[i];
            for (uint64_t t0 = 0; t0 < job->S; t0 += AKV_BLOCK_TOKENS) {
                uint64_t end = job->S - t0 < AKV_BLOCK_TOKENS ? job->S : t0 + AKV_BLOCK_TOKENS;
                uint64_t count[AKV_MAX_LEVELS + 1] = {0};
                for (uint64_t t = t0; t < end; t++) {
                    double u = utility[t];
                    uint32_t i = 0;
                    while (i + 1 < hull->count && u > threshold[i + 1])
                        i++;
                    level[t] = hull->level[i];
                    count[level[t]]++;
                }
                for (uint32_t l = 1; l <= levels; l++)
                    if (count[l] > 0)
                        bytes += akv_run_bytes(count[l], job->ladder->level_bits[side][head * levels + l - 1]);
            }
        }
    return bytes;
}

/* The prior: a share of the layer's utility is spread as if every token were as likely to be asked for. */
static void add_prior(akv_job *job)
{
    akv_ladder *ladder = job->ladder;
    double utility = 0.0, prior = 0.0;
    const uint64_t n = job->H * job->S;
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint64_t i = 0; i < n; i++)
            if (job->rank[side][i] >= 0.0f) {
                utility += job->rank[side][i];
                prior += ladder->prior[side][i];
            }
    double c = prior > 0.0 && ladder->options->floor > 0.0 ? ladder->options->floor * utility / prior : 0.0;
    if (utility == 0.0 && prior > 0.0)
        c = 1.0;
    for (int side = 0; side < AKV_SIDES; side++) {
        double boost = side == AKV_SIDE_V ? ladder->options->value_boost : 1.0;
        for (uint64_t i = 0; i < n; i++)
            if (job->rank[side][i] >= 0.0f) {
                double u = (job->rank[side][i] + c * ladder->prior[side][i]) * boost;
                job->rank[side][i] = (float)(u < 3e38 ? u : 3e38);
            }
    }
}

static void store_levels(akv_job *job)
{
    const uint32_t planes = akv_level_planes(job->header->num_levels);
    const uint64_t plane_bytes = akv_div_up(job->S, 8);
    for (int side = 0; side < AKV_SIDES; side++) {
        uint8_t *bits = akv_job_section(job, AKV_SEC_LEVELS + side);
        for (uint32_t head = 0; head < job->H; head++)
            for (uint64_t t = 0; t < job->S; t++) {
                uint8_t l = job->ladder->level[side][head * job->S + t];
                job->header->num_residuals[side] += l != 0;
                for (uint32_t p = 0; p < planes; p++)
                    bits[(head * planes + p) * plane_bytes + t / 8] |= (uint8_t)(((l >> p) & 1u) << (t % 8));
            }
    }
}

void akv_ladder_allocate(akv_job *job)
{
    const uint32_t levels = job->header->num_levels;
    akv_hull *hulls = job->ladder->hulls;
    add_prior(job);
    for (uint32_t i = 0; i < job->H * AKV_SIDES; i++)
        hulls[i] = make_hull(job->ladder->distortion[i % AKV_SIDES] + (size_t)(i / AKV_SIDES) * (levels + 1),
                             job->ladder->level_bits[i % AKV_SIDES] + (size_t)(i / AKV_SIDES) * levels, levels);
    double low = -300.0, high = 300.0; /* log2 of the multiplier; high always fits: nothing is coded */
    for (int round = 0; round < 50; round++) {
        double mid = 0.5 * (low + high);
        if (assign(job, hulls, exp2(mid)) > job->header->code_bytes)
            low = mid;
        else
            high = mid;
    }
    if (assign(job, hulls, exp2(high)) > job->header->code_bytes) /* only if a utility reaches 2^300 */
        assign(job, hulls, INFINITY);
    store_levels(job);
}
