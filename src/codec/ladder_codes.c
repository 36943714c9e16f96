/* SPDX-License-Identifier: Apache-2.0 */
/* ladder_codes.c - the residuals of the LADDER coding: into the transform's coordinates, a gain, and the level's bits. */
#include "codec/ladder.h"

#include "core/slots.h"
#include "kernels/kernels.h"

/* Number of the nearest level of an n-bit Lloyd-Max quantiser, ascending, and the level itself. */
static uint32_t quantise(float x, uint32_t width, float *level)
{
    const uint32_t half = width == 2 ? 2 : 8;
    const float m = fabsf(x);
    uint32_t i = 0;
    if (width == 1) {
        *level = akv_level_value(x < 0.0f ? 0 : 1, 1);
        return x < 0.0f ? 0 : 1;
    }
    while (i + 1 < half && m >= 0.5f * (akv_level_value(half + i, width) + akv_level_value(half + i + 1, width)))
        i++;
    const uint32_t number = x < 0.0f ? half - 1 - i : half + i;
    *level = akv_level_value(number, width);
    return number;
}

/* Squared error of the vector x [count] (in units of sigma) coded with a gain; *best = the gain that fits its codes best. */
static double coded_error(const float *x, const float *sigma_sq, const akv_level_list *list, double gain, double *best)
{
    double xc = 0.0, cc = 0.0, xx = 0.0;
    const float inverse = (float)(1.0 / gain);
    for (uint32_t i = 0; i < list->count; i++) {
        float level;
        quantise(x[i] * inverse, list->width[i], &level);
        xx += (double)x[i] * x[i] * sigma_sq[i];
        xc += (double)x[i] * level * sigma_sq[i];
        cc += (double)level * level * sigma_sq[i];
    }
    *best = cc > 0.0 ? xc / cc : 1.0;
    return xx - gain * (2.0 * xc - gain * cc);
}

static uint32_t nearest_gain(double gain)
{
    double code = rint(3.0 * log2(gain > 1e-9 ? gain : 1e-9)) + 8.0;
    return code < 0.0 ? 0 : code > AKV_GAIN_CODES - 1 ? AKV_GAIN_CODES - 1 : (uint32_t)code;
}

/*
 * The gain code of the vector x: the one nearest to the best gain of the codes that its root mean square gives, or a neighbour
 * if that codes it better. Without the neighbours alternating between codes and gains stops beside the best of the grid
 * (0.4 to 4 % more squared error).
 */
static uint32_t gain_of(const float *x, const float *sigma_sq, const akv_level_list *list)
{
    double square = 0.0, gain, least;
    for (uint32_t i = 0; i < list->count; i++)
        square += (double)x[i] * x[i];
    coded_error(x, sigma_sq, list, akv_gain_value(nearest_gain(list->count > 0 ? sqrt(square / list->count) : 1.0)), &gain);
    const uint32_t middle = nearest_gain(gain);
    uint32_t code = middle;
    least = coded_error(x, sigma_sq, list, akv_gain_value(middle), &gain);
    for (int step = -1; step <= 1; step += 2)
        for (uint32_t next = middle + (uint32_t)step; next < AKV_GAIN_CODES; next += (uint32_t)step) {
            double error = coded_error(x, sigma_sq, list, akv_gain_value(next), &gain);
            if (!(error < least))
                break;
            least = error;
            code = next;
        }
    return code;
}

static void put_bits(uint8_t *out, uint64_t bit, uint32_t value)
{
    out[bit >> 3] |= (uint8_t)(value << (bit & 7)); /* widths 1, 2, 4 may straddle a byte in a group that is not full */
    uint32_t high = (value << (bit & 7)) >> 8;
    if (high != 0)
        out[(bit >> 3) + 1] |= (uint8_t)high;
}

/* r [dim] -> coordinates of the transform. */
static void transform(const akv_job *job, int side, uint32_t head, const float *r, float *z)
{
    const akv_ladder *l = job->ladder;
    const akv_header *h = job->header;
    const uint32_t n = h->basis_dim[side], cols = h->basis_cols[side], dim = h->head_dim[side];
    float ordered[AKV_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < dim; i++)
        ordered[i] = r[l->coords[side][i]];
    for (uint32_t c = 0; c < cols; c++)
        z[c] = akv_dot_f32(l->basis[side] + ((size_t)head * cols + c) * n, ordered, n);
    for (uint32_t i = n; i < dim; i++)
        z[cols + i - n] = ordered[i];
}

/* One run: tokens t0 + list[0..n) of one level -> out. */
static void code_run(akv_job *job, int side, uint32_t head, uint64_t t0, const uint16_t *tokens, uint32_t n,
                     const akv_level_list *list, akv_rope_walk *walk, akv_codec_scratch *s, uint8_t *out)
{
    const float *sigma = job->ladder->sigma[side] + (size_t)head * akv_num_coords(job->header, side);
    float z[AKV_MAX_HEAD_DIM], x[AKV_MAX_HEAD_DIM], sigma_sq[AKV_MAX_HEAD_DIM];
    uint8_t *groups = out + (n + 1) / 2;
    for (uint32_t i = 0; i < list->count; i++)
        sigma_sq[i] = sigma[list->coord[i]] * sigma[list->coord[i]];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES;
        for (uint32_t r = 0; r < g; r++) {
            akv_residual_of(job, side, head, t0 + tokens[at + r], walk, s->vector);
            transform(job, side, head, s->vector, z);
            for (uint32_t i = 0; i < list->count; i++)
                x[i] = z[list->coord[i]] / sigma[list->coord[i]];
            uint32_t code = gain_of(x, sigma_sq, list);
            out[(at + r) / 2] |= (uint8_t)(code << ((at + r) % 2 * 4));
            float inverse = 1.0f / akv_gain_value(code);
            uint64_t bit = 0;
            for (uint32_t i = 0; i < list->count; i++) {
                float level;
                uint32_t number = quantise(x[i] * inverse, list->width[i], &level);
                put_bits(groups, bit + (uint64_t)r * list->width[i], number);
                bit += (uint64_t)g * list->width[i];
            }
        }
        groups += ((uint64_t)g * list->bits + 7) / 8;
    }
}

/* Where each (head, block, side) begins. */
static void place_runs(akv_job *job)
{
    const uint64_t blocks = akv_div_up(job->S, AKV_BLOCK_TOKENS);
    const uint32_t levels = job->header->num_levels;
    uint64_t *offsets = akv_job_section(job, AKV_SEC_RANKS), at = 0;
    for (uint32_t head = 0; head < job->H; head++)
        for (uint64_t b = 0; b < blocks; b++)
            for (int side = 0; side < AKV_SIDES; side++) {
                const uint8_t *level = job->ladder->level[side] + head * job->S;
                uint64_t count[AKV_MAX_LEVELS + 1] = {0};
                uint64_t end = job->S - b * AKV_BLOCK_TOKENS < AKV_BLOCK_TOKENS ? job->S : (b + 1) * AKV_BLOCK_TOKENS;
                for (uint64_t t = b * AKV_BLOCK_TOKENS; t < end; t++)
                    count[level[t]]++;
                *offsets++ = at;
                for (uint32_t l = 1; l <= levels; l++)
                    if (count[l] > 0)
                        at += akv_run_bytes(count[l], job->ladder->level_bits[side][head * levels + l - 1]);
            }
    *offsets = at;
}

/* Task = (head * blocks + block) * 2 + side. */
static void code_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint64_t blocks = akv_div_up(job->S, AKV_BLOCK_TOKENS), block = task / 2 % blocks, t0 = block * AKV_BLOCK_TOKENS;
    const uint32_t head = (uint32_t)(task / 2 / blocks);
    const int side = (int)(task % 2);
    const uint32_t n = (uint32_t)(job->S - t0 < AKV_BLOCK_TOKENS ? job->S - t0 : AKV_BLOCK_TOKENS);
    const uint64_t *offsets = akv_job_section(job, AKV_SEC_RANKS);
    if (offsets[task] == offsets[task + 1])
        return;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_rope_walk walk = akv_rope_walk_begin(job->layer->rope.inv_freq, job->header->rotary_dim / 2, s->phase);
    akv_ladder_view view = akv_ladder_writer_view(job, side, head);
    uint16_t tokens[AKV_BLOCK_TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 2];
    uint8_t *out = (uint8_t *)akv_job_section(job, AKV_SEC_CODES) + offsets[task];
    akv_ladder_sort(&view, block, n, tokens, first);
    for (uint32_t l = 1; l <= view.num_levels; l++) {
        uint32_t count = first[l + 1] - first[l];
        if (count == 0)
            continue;
        akv_level_list list;
        akv_ladder_list(&view, l, &list);
        code_run(job, side, head, t0, tokens + first[l], count, &list, &walk, s, out);
        out += akv_run_bytes(count, list.bits);
    }
    akv_return_slot(job->slots, slot);
}

void akv_ladder_code(akv_job *job)
{
    place_runs(job);
    akv_parallel_for(job->config->executor, code_task, job, (size_t)(job->H * akv_div_up(job->S, AKV_BLOCK_TOKENS)) * 2);
}
