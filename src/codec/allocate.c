/* SPDX-License-Identifier: Apache-2.0 */
/*
 * allocate.c - one multiplier for the layer: every token and side takes the level that minimises
 * utility x distortion(level) + lambda x bits(level), keys and values of all heads together; lambda is bisected to the
 * bytes.
 */
#include "codec/ladder.h"
#include "kernels/coder.h"

#define GAIN_BITS 4.0

akv_hull akv_ladder_hull(const double *distortion, const uint32_t *bits, uint32_t levels)
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

/*
 * The utility above which each level of the hull pays, rising; the largest float not above it, so that comparing floats
 * decides as comparing doubles would.
 */
static uint32_t thresholds_of(const akv_hull *hull, double lambda, float *out)
{
    for (uint32_t i = 1; i < hull->count; i++) {
        const double exact = lambda / hull->slope[i];
        float below = exact < 3.4e38 ? (float)exact : INFINITY;
        if ((double)below > exact)
            below = nextafterf(below, 0.0f);
        out[i - 1] = below;
    }
    return hull->count - 1;
}

/* Bytes of all codes for a multiplier. */
static uint64_t bytes_of(akv_job *job, const akv_hull *hulls, double lambda)
{
    const uint32_t levels = job->header->num_levels;
    const akv_coder_kernels *kernels = akv_coder_best();
    uint64_t bytes = 0;
    for (uint32_t head = 0; head < job->H; head++)
        for (int side = 0; side < AKV_SIDES; side++) {
            const akv_hull *hull = &hulls[head * AKV_SIDES + side];
            float thresholds[AKV_MAX_LEVELS];
            const uint32_t n = thresholds_of(hull, lambda, thresholds);
            for (uint64_t t0 = 0; t0 < job->S; t0 += AKV_BLOCK_TOKENS) {
                const uint64_t end = job->S - t0 < AKV_BLOCK_TOKENS ? job->S : t0 + AKV_BLOCK_TOKENS;
                uint32_t above[AKV_MAX_LEVELS + 1] = {0};
                kernels->count_above(job->rank[side] + head * job->S + t0, (uint32_t)(end - t0), thresholds, n, above);
                for (uint32_t i = 0; i < n; i++)
                    if (above[i] > above[i + 1])
                        bytes += akv_run_bytes(above[i] - above[i + 1],
                                               job->ladder->level_bits[side][head * levels + hull->level[i + 1] - 1]);
            }
        }
    return bytes;
}

/* Levels of all tokens for a multiplier. Task = head * 2 + side. */
typedef struct assignment {
    akv_job *job;
    const akv_hull *hulls;
    double lambda;
} assignment;

static void assign_task(void *opaque, size_t task)
{
    const assignment *a = opaque;
    const akv_hull *hull = &a->hulls[task];
    const float *utility = a->job->rank[task % AKV_SIDES] + task / AKV_SIDES * a->job->S;
    uint8_t *level = a->job->ladder->level[task % AKV_SIDES] + task / AKV_SIDES * a->job->S;
    float thresholds[AKV_MAX_LEVELS];
    const uint32_t n = thresholds_of(hull, a->lambda, thresholds);
    for (uint64_t t = 0; t < a->job->S; t++) {
        uint32_t i = 0;
        while (i < n && utility[t] > thresholds[i])
            i++;
        level[t] = hull->level[i];
    }
}

akv_worth akv_ladder_sum_worth(const float *const rank[AKV_SIDES], const float *const prior[AKV_SIDES], uint64_t n,
                               akv_worth sums)
{
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint64_t i = 0; i < n; i++)
            if (rank[side][i] >= 0.0f) {
                sums.utility += rank[side][i];
                sums.prior += prior[side][i];
            }
    return sums;
}

void akv_ladder_add_prior(const akv_experiment *options, akv_worth sums, float *const rank[AKV_SIDES],
                          const float *const prior[AKV_SIDES], uint64_t n)
{
    double c = sums.prior > 0.0 && options->floor > 0.0 ? options->floor * sums.utility / sums.prior : 0.0;
    if (sums.utility == 0.0 && sums.prior > 0.0)
        c = 1.0;
    for (int side = 0; side < AKV_SIDES; side++) {
        double boost = side == AKV_SIDE_V ? options->value_boost : 1.0;
        for (uint64_t i = 0; i < n; i++)
            if (rank[side][i] >= 0.0f) {
                double u = (rank[side][i] + c * prior[side][i]) * boost;
                rank[side][i] = (float)(u < 3e38 ? u : 3e38);
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

void akv_ladder_hulls(const akv_job *job, akv_hull *hulls)
{
    const uint32_t levels = job->header->num_levels;
    for (uint32_t i = 0; i < job->H * AKV_SIDES; i++)
        hulls[i] = akv_ladder_hull(job->ladder->distortion[i % AKV_SIDES] + (size_t)(i / AKV_SIDES) * (levels + 1),
                                   job->ladder->level_bits[i % AKV_SIDES] + (size_t)(i / AKV_SIDES) * levels, levels);
}

void akv_ladder_allocate(akv_job *job)
{
    akv_hull *hulls = job->ladder->hulls;
    const float *const rank[AKV_SIDES] = {job->rank[0], job->rank[1]},
                       *const prior[AKV_SIDES] = {job->ladder->prior[0], job->ladder->prior[1]};
    const uint64_t n = job->H * job->S;
    akv_ladder_add_prior(job->ladder->options, akv_ladder_sum_worth(rank, prior, n, (akv_worth){0.0, 0.0}), job->rank,
                         prior, n);
    akv_ladder_hulls(job, hulls);
    double low = -300.0, high = 300.0; /* log2 of the multiplier; high always fits: nothing is coded */
    for (int round = 0; round < 50; round++) {
        double mid = 0.5 * (low + high);
        if (bytes_of(job, hulls, akv_exp2(mid)) > job->header->code_bytes)
            low = mid;
        else
            high = mid;
    }
    assignment a = {job, hulls, akv_exp2(high)};
    if (bytes_of(job, hulls, a.lambda) > job->header->code_bytes) /* only if a utility reaches 2^300 */
        a.lambda = INFINITY;
    akv_parallel_for(job->config->executor, assign_task, &a, (size_t)job->H * AKV_SIDES);
    store_levels(job);
}
