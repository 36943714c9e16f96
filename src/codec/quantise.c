/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantise.c - which tokens own a residual, and its code (paper sections 3.3 and 3.4, design section 3 steps 4 and 5):
 * the highest ranks of all KV heads of the layer, then random-sign Hadamard, one scale, two bits a coordinate.
 */
#include "codec/codec.h"
#include "core/levels.h"
#include "core/slots.h"
#include "core/view.h"
#include "kernels/kernels.h"

/* Bitmap and running counts of one side from the mask [H, S]. */
static void store_owners(akv_job *job, int side, const uint8_t *mask)
{
    uint8_t *bits = akv_job_section(job, AKV_SEC_LEVELS + side);
    uint64_t *ranks = akv_job_section(job, AKV_SEC_RANKS + side);
    const uint64_t row_bytes = akv_div_up(job->S, 8);
    uint64_t count = 0, at = 0;
    for (uint32_t head = 0; head < job->H; head++)
        for (uint64_t t = 0; t < job->S; t++) {
            if (t % AKV_BLOCK_TOKENS == 0)
                ranks[at++] = count;
            if (mask[head * job->S + t]) {
                bits[head * row_bytes + t / 8] |= (uint8_t)(1u << (t % 8));
                count++;
            }
        }
    ranks[at] = count;
}

void akv_select_owners(akv_job *job, uint8_t *mask)
{
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t n = job->header->num_residuals[side];
        if (job->experiment->equal_head_budgets)
            for (uint32_t head = 0; head < job->H; head++)
                akv_take_largest(job->rank[side] + head * job->S, job->S, n / job->H, mask + head * job->S);
        else
            akv_take_largest(job->rank[side], job->H * job->S, n, mask);
        store_owners(job, side, mask);
    }
}

static uint32_t code_of(float x, float inner, float outer)
{
    return x < -outer ? 0u : x < inner ? 1u : x < outer ? 2u : 3u;
}

/*
 * Lloyd's alternation from a first scale: codes for the scale, then the best scale for the codes. *gain = the energy
 * that the codes explain: larger is better.
 */
static double fit_scale(const float *x, uint32_t dim, const float *levels, float bound, double scale, double *gain)
{
    double xc = 0.0, cc = 0.0;
    for (int round = 0; round < 4; round++) {
        xc = cc = 0.0;
        for (uint32_t i = 0; i < dim; i++) {
            double c = levels[code_of(x[i], 0.0f, (float)(bound * scale))];
            xc += x[i] * c;
            cc += c * c;
        }
        scale = xc / cc;
    }
    *gain = xc * xc / cc;
    return scale;
}

/* Scale of one vector before rounding; levels and their outer boundary in units of the scale. */
static float scale_of(const float *x, uint32_t dim, akv_scale_rule rule, const float *levels, float bound)
{
    float absmax = 0.0f;
    double square = 0.0;
    for (uint32_t i = 0; i < dim; i++) {
        absmax = fabsf(x[i]) > absmax ? fabsf(x[i]) : absmax;
        square += (double)x[i] * x[i];
    }
    if (rule == AKV_SCALE_ABSMAX || absmax == 0.0f)
        return absmax / levels[3];
    /* The alternation can stop in a poor minimum, so it starts from both ends and the better one stays. */
    double gain[2], scale[2];
    scale[0] = fit_scale(x, dim, levels, bound, sqrt(square / dim), &gain[0]);
    scale[1] = fit_scale(x, dim, levels, bound, absmax / levels[3], &gain[1]);
    return (float)(gain[1] > gain[0] ? scale[1] : scale[0]);
}

/* Residuals of up to AKV_GROUP_LANES owners -> gains and one packed group. */
static void code_group(akv_job *job, int side, uint32_t head, const uint16_t *owners, uint64_t t0, uint32_t g,
                       uint64_t first, const float *signs, akv_turner *turner, akv_codec_scratch *s)
{
    const uint32_t dim = job->header->head_dim[side], code_bytes = akv_code_bytes(dim);
    const bool plain = job->experiment->code_rule == AKV_CODE_PLAIN_UNIFORM;
    const float *levels = plain ? akv_levels_uniform : akv_levels_lloyd_max;
    const float bound = plain ? 2.0f / 3.0f : AKV_LLOYD_MAX_BOUND;
    uint16_t *gains = (uint16_t *)akv_job_section(job, AKV_SEC_GAINS + side) + first;
    uint8_t *codes = (uint8_t *)akv_job_section(job, AKV_SEC_CODES + side) + first * code_bytes;
    float *x = s->vector;
    for (uint32_t r = 0; r < g; r++) {
        akv_residual_of(job, side, head, t0 + owners[r], turner, x);
        if (!plain) {
            for (uint32_t i = 0; i < dim; i++)
                x[i] *= signs[i];
            akv_hadamard_f32(x, dim);
        }
        gains[r] = akv_f32_to_f16(scale_of(x, dim, job->experiment->scale_rule, levels, bound));
        float outer = bound * akv_f16_to_f32(gains[r]);
        for (uint32_t i = 0; i < dim; i++) {
            uint32_t bit = (i * g + r) * 2;
            codes[bit / 8] |= (uint8_t)(code_of(x[i], 0.0f, outer) << (bit % 8));
        }
    }
}

/* Task = ((side * H) + head) * blocks + block. */
static void code_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint64_t blocks = akv_div_up(job->S, AKV_BLOCK_TOKENS), block = task % blocks;
    const uint32_t head = (uint32_t)(task / blocks % job->H);
    const int side = (int)(task / blocks / job->H);
    const uint64_t t0 = block * AKV_BLOCK_TOKENS;
    const uint64_t *ranks = (const uint64_t *)akv_job_section(job, AKV_SEC_RANKS + side) + head * blocks;
    const uint32_t n = (uint32_t)(job->S - t0 < AKV_BLOCK_TOKENS ? job->S - t0 : AKV_BLOCK_TOKENS);
    akv_side_view view;
    uint16_t owners[AKV_BLOCK_TOKENS];
    float signs[AKV_MAX_HEAD_DIM];

    memset(&view, 0, sizeof view);
    view.owns = (const uint8_t *)akv_job_section(job, AKV_SEC_LEVELS + side) + head * akv_div_up(job->S, 8);
    uint32_t count = akv_view_owners(&view, block, n, owners);
    if (count == 0)
        return;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    akv_signs(job->header->seed, side, job->header->head_dim[side], signs);
    for (uint32_t at = 0; at < count; at += AKV_GROUP_LANES) {
        uint32_t g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
        code_group(job, side, head, owners + at, t0, g, ranks[block] + at, signs, &turner, s);
    }
    akv_return_slot(job->slots, slot);
}

void akv_code_residuals(akv_job *job)
{
    akv_parallel_for(job->config->executor, code_task, job,
                     (size_t)AKV_SIDES * job->H * akv_div_up(job->S, AKV_BLOCK_TOKENS));
}
