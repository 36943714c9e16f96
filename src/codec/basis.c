/* SPDX-License-Identifier: Apache-2.0 */
/*
 * basis.c - the transform of each KV head and side, and how many bits each coordinate gets at each level
 * (docs/method.md "transform"). Keys: eigenvectors over the coordinates that hardly turn within the segment, the others
 * as they are; values: eigenvectors over all. Bits by greedy water-filling on variance x how strongly queries look
 * along the coordinate.
 */
#include "codec/ladder.h"
#include "core/slots.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

/* u^T m u for a row u over the leading n coordinates of m [dim, dim]. */
static double quadratic(const float *u, const float *m, uint32_t n, uint32_t dim)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)u[i] * akv_dot_f32(u, m + (size_t)i * dim, n);
    return sum;
}

typedef struct akv_gain {
    double per_bit;
    uint32_t coord;
    uint32_t step; /* 0: 0 -> 1 bit, 1: 1 -> 2, 2: 2 -> 4 */
} akv_gain;

/* Largest gain first; ties by coordinate, then step, so that the order is total. */
static bool before(const akv_gain *a, const akv_gain *b)
{
    if (a->per_bit != b->per_bit)
        return a->per_bit > b->per_bit;
    return a->coord != b->coord ? a->coord < b->coord : a->step < b->step;
}

static const uint32_t step_bits[3] = {1, 1, 2};

/* Shell sort; nearly sorted lists take little more than a look. */
static void sort_gains(akv_gain *g, uint32_t n, uint32_t first_gap)
{
    for (uint32_t gap = first_gap; gap > 0; gap /= 2)
        for (uint32_t i = gap; i < n; i++) {
            akv_gain x = g[i];
            uint32_t j = i;
            for (; j >= gap && before(&x, &g[j - gap]); j -= gap)
                g[j] = g[j - gap];
            g[j] = x;
        }
}

/*
 * Gains of all steps of all coordinates, sorted. Those of one step are in the order of the weights, so one sort serves
 * all three, which are then merged.
 */
static void all_gains(const double *w, uint32_t coords, akv_gain *out)
{
    akv_gain lists[3][AKV_MAX_HEAD_DIM];
    uint32_t at[3] = {0, 0, 0};
    for (uint32_t step = 0; step < 3; step++) {
        for (uint32_t i = 0; i < coords; i++) {
            const uint32_t c = step == 0 ? i : lists[0][i].coord;
            lists[step][i].per_bit =
                w[c] * (akv_entry_distortion[step] - akv_entry_distortion[step + 1]) / step_bits[step];
            lists[step][i].coord = c;
            lists[step][i].step = step;
        }
        sort_gains(lists[step], coords, step == 0 ? coords / 2 : 1); /* ties by rounding may differ between steps */
    }
    for (uint32_t n = 0; n < 3 * coords; n++) {
        uint32_t best = 3;
        for (uint32_t step = 0; step < 3; step++)
            if (at[step] < coords && (best == 3 || before(&lists[step][at[step]], &lists[best][at[best]])))
                best = step;
        out[n] = lists[best][at[best]++];
    }
}

void akv_water_fill(const uint16_t *level_bits, uint32_t levels, const double *w, uint32_t coords, double total,
                    uint8_t *entries, uint32_t *bits_of, double *distortion)
{
    akv_gain gains[3 * AKV_MAX_HEAD_DIM];
    uint8_t entry[AKV_MAX_HEAD_DIM] = {0};
    const uint32_t n = 3 * coords;
    uint32_t at = 0, bits = 0;
    all_gains(w, coords, gains);
    distortion[0] = 1.0;
    for (uint32_t l = 0; l < levels; l++) {
        while (at < n && gains[at].per_bit > 0.0 && bits + step_bits[gains[at].step] <= level_bits[l]) {
            entry[gains[at].coord] = (uint8_t)(gains[at].step + 1);
            bits += step_bits[gains[at].step];
            at++;
        }
        memcpy(entries + (size_t)l * coords, entry, coords);
        bits_of[l] = bits;
        double left = total;
        for (uint32_t c = 0; c < coords; c++)
            left -= w[c] * (1.0 - akv_entry_distortion[entry[c]]);
        distortion[l + 1] = total > 0.0 ? left / total : 0.0;
    }
}

void akv_pack_tables(const uint8_t *entries, uint32_t levels, uint32_t coords, uint8_t *tables)
{
    const uint64_t row_bytes = akv_div_up(coords, 4);
    for (uint32_t l = 0; l < levels; l++)
        for (uint32_t c = 0; c < coords; c++)
            tables[l * row_bytes + c / 4] |= (uint8_t)(entries[(size_t)l * coords + c] << (c % 4 * 2));
}

/* Second moments [d_k, d_k] of the late queries; returns the mean of the squares. */
static double query_moments(const akv_job *job, uint32_t head, float *query)
{
    const akv_ladder *ladder = job->ladder;
    const uint32_t dim = job->dk;
    const float *late = ladder->late + (size_t)head * ladder->late_rows * dim;
    double mean = 0.0;
    memset(query, 0, (size_t)dim * dim * sizeof *query);
    akv_gemm_tn_add(dim, dim, ladder->late_rows, late, dim, late, dim, query, dim);
    for (uint32_t i = 0; i < dim; i++)
        mean += query[(size_t)i * dim + i] / dim;
    return mean;
}

/* Task = head * 2 + side. */
static void basis_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    akv_ladder *ladder = job->ladder;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const akv_header *h = job->header;
    const uint32_t dim = h->head_dim[side], n = h->basis_dim[side], cols = h->basis_cols[side],
                   coords = akv_num_coords(h, side);
    const uint16_t *order = ladder->coords[side];
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    float *moment = ladder->eigen + slot * ladder->eigen_floats, *query = moment + (size_t)dim * dim;
    float *a = query + (size_t)dim * dim, *vectors = a + (size_t)dim * dim, *values = vectors + (size_t)dim * dim;
    float *scratch = values + dim;
    double w[AKV_MAX_HEAD_DIM], q2[AKV_MAX_HEAD_DIM], score[AKV_MAX_HEAD_DIM];

    /* Mean second moments of the residuals, coordinates in basis order. */
    double count = 0.0;
    for (uint64_t t = 0; t < job->S; t++)
        count += job->anchor_of[head * job->S + t] == 0;
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t j = 0; j < dim; j++) {
            double sum = 0.0;
            for (uint64_t r = 0; r < job->num_ranges; r++)
                sum += ladder->moments[side][((head * job->num_ranges + r) * dim + order[i]) * dim + order[j]];
            sum = count > 0 ? sum / count : 0.0;
            /* Absurdly large inputs overflow the sums; what is stored must stay finite. */
            moment[(size_t)i * dim + j] = sum > 1e37 ? 1e37f : sum < -1e37 ? -1e37f : sum == sum ? (float)sum : 0.0f;
        }
    for (uint32_t i = 0; i < n; i++)
        memcpy(a + (size_t)i * n, moment + (size_t)i * dim, n * sizeof *a);
    if (n > 0)
        akv_eigen_symmetric(a, n, values, vectors, scratch);

    /* How strongly late queries look along each direction, relative to the mean (keys only). */
    const double mean_q2 = side == AKV_SIDE_K ? query_moments(job, head, query) : 1.0, mix = ladder->options->query_mix;
#define QUERY_WEIGHT(energy) (side == AKV_SIDE_K && mean_q2 > 0.0 ? (1.0 - mix) * (energy) / mean_q2 + mix : 1.0)
    for (uint32_t i = 0; i < n; i++) {
        const float *u = vectors + (size_t)i * n;
        w[i] = values[i] > 0.0f ? values[i] : 0.0;
        q2[i] = QUERY_WEIGHT(quadratic(u, query, n, dim));
        score[i] = w[i] * q2[i];
    }

    /* The cols directions of most weight, in 8 bits with a scale each. */
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++)
        total += score[i];
    int8_t *stored = (int8_t *)akv_job_section(job, AKV_SEC_BASIS + side) + (size_t)head * cols * n;
    float *scales = (float *)akv_job_section(job, AKV_SEC_BASIS_SCALES + side) + (size_t)head * cols;
    double weight[AKV_MAX_HEAD_DIM], variance[AKV_MAX_HEAD_DIM];
    for (uint32_t c = 0; c < cols; c++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < n; i++)
            if (score[i] > score[best])
                best = i;
        const float *u = vectors + (size_t)best * n;
        float *kept = ladder->basis[side] + ((size_t)head * cols + c) * n, absmax = 0.0f;
        for (uint32_t i = 0; i < n; i++)
            absmax = fabsf(u[i]) > absmax ? fabsf(u[i]) : absmax;
        scales[c] = absmax / 127.0f;
        for (uint32_t i = 0; i < n; i++) {
            float q = scales[c] > 0.0f ? rintf(u[i] / scales[c]) : 0.0f;
            stored[(size_t)c * n + i] = (int8_t)q;
            kept[i] = q * scales[c];
        }
        variance[c] = quadratic(kept, moment, n, dim); /* of the direction as stored */
        weight[c] = variance[c] * q2[best];
        score[best] = -1.0;
    }
    for (uint32_t i = n; i < dim; i++) {
        uint32_t c = cols + i - n;
        variance[c] = moment[(size_t)i * dim + i];
        weight[c] = variance[c] * QUERY_WEIGHT(query[(size_t)i * dim + i]);
        total += weight[c];
    }
    uint16_t *sigmas = (uint16_t *)akv_job_section(job, AKV_SEC_SIGMAS + side) + (size_t)head * coords;
    for (uint32_t c = 0; c < coords; c++) {
        sigmas[c] = akv_f32_to_bf16((float)sqrt(variance[c] > 0.0 ? variance[c] : 0.0));
        ladder->sigma[side][(size_t)head * coords + c] = akv_bf16_to_f32(sigmas[c]);
        if (akv_bf16_to_f32(sigmas[c]) == 0.0f)
            weight[c] = 0.0;
    }
    uint8_t *entries = ladder->entries[side] + (size_t)head * h->num_levels * coords;
    akv_water_fill(ladder->options->level_bits, h->num_levels, weight, coords, total, entries,
                   ladder->level_bits[side] + (size_t)head * h->num_levels,
                   ladder->distortion[side] + (size_t)head * (h->num_levels + 1));
    akv_pack_tables(entries, h->num_levels, coords,
                    (uint8_t *)akv_job_section(job, AKV_SEC_TABLES + side) +
                        (uint64_t)head * h->num_levels * akv_div_up(coords, 4));
    akv_return_slot(job->slots, slot);
}

void akv_ladder_bases(akv_job *job)
{
    akv_parallel_for(job->config->executor, basis_task, job, (size_t)job->H * 2);
}

/* Task = head * 2 + side. Variances as they are stored: what the tokens decode to has lost some of its own. */
static void weigh_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    akv_ladder *ladder = job->ladder;
    const akv_header *h = job->header;
    const uint32_t head = (uint32_t)(task / 2), levels = h->num_levels;
    const int side = (int)(task % 2);
    const uint32_t dim = h->head_dim[side], n = h->basis_dim[side], cols = h->basis_cols[side],
                   coords = akv_num_coords(h, side);
    const uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    float *query = ladder->eigen + slot * ladder->eigen_floats;
    const double mean_q2 = side == AKV_SIDE_K ? query_moments(job, head, query) : 1.0, mix = ladder->options->query_mix;
    const float *basis = ladder->basis[side] + (size_t)head * cols * n;
    const uint8_t *entries = ladder->entries[side] + (size_t)head * levels * coords;
    double *distortion = ladder->distortion[side] + (size_t)head * (levels + 1), weight[AKV_MAX_HEAD_DIM], total = 0.0;
    for (uint32_t c = 0; c < coords; c++) {
        const double sigma = ladder->sigma[side][(size_t)head * coords + c];
        double along = 0.0; /* how strongly the queries look along it */
        if (side == AKV_SIDE_K)
            along = c < cols ? quadratic(basis + (size_t)c * n, query, n, dim)
                             : query[(size_t)(n + c - cols) * dim + (n + c - cols)];
        weight[c] = sigma * sigma * QUERY_WEIGHT(along);
        total += weight[c];
    }
    distortion[0] = 1.0;
    for (uint32_t l = 0; l < levels; l++) {
        double left = total;
        for (uint32_t c = 0; c < coords; c++)
            left -= weight[c] * (1.0 - akv_entry_distortion[entries[(size_t)l * coords + c]]);
        distortion[l + 1] = total > 0.0 ? left / total : 0.0;
    }
    akv_return_slot(job->slots, slot);
}

void akv_ladder_weigh(akv_job *job)
{
    akv_parallel_for(job->config->executor, weigh_task, job, (size_t)job->H * 2);
}
