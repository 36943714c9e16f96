/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder_codes.c - the residuals of the LADDER coding: into the transform's coordinates, a gain, and the level's bits.
 */
#include "codec/ladder.h"

#include "core/slots.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

/* A level's coordinates in the order of the coder's lanes, padding included. */
typedef struct lane_list {
    akv_coder_lanes lanes;
    uint32_t count;                                /* lanes in all */
    uint32_t coordinates;                          /* those that are no padding */
    uint16_t lane[AKV_MAX_HEAD_DIM];               /* of the level's coordinate i */
    uint16_t coord[AKV_MAX_HEAD_DIM + 48];         /* of lane j; padding: any */
    float inverse_sigma[AKV_MAX_HEAD_DIM + 48];    /* 0 for padding */
    float sigma_sq[AKV_MAX_HEAD_DIM + 48];
} lane_list;

static void make_lanes(const akv_level_list *list, const float *sigma, lane_list *out)
{
    uint32_t at = 0;
    out->count = 0;
    out->coordinates = list->count;
    for (int kind = 0; kind < 3; kind++) {
        const uint32_t vectors = (list->by_width[kind] + AKV_CODER_LANES - 1) / AKV_CODER_LANES;
        out->lanes.by_width[kind] = vectors;
        for (uint32_t j = 0; j < vectors * AKV_CODER_LANES; j++, out->count++) {
            const bool real = j < list->by_width[kind];
            const uint32_t coord = real ? list->coord[at] : 0;
            out->coord[out->count] = (uint16_t)coord;
            out->inverse_sigma[out->count] = real ? 1.0f / sigma[coord] : 0.0f;
            out->sigma_sq[out->count] = real ? sigma[coord] * sigma[coord] : 0.0f;
            if (real)
                out->lane[at++] = (uint16_t)out->count;
        }
    }
}

/* Squared error of the vector x (in units of sigma) coded with a gain; *best = the gain that fits its codes best. */
static double coded_error(const float *x, const lane_list *list, double gain, double *best)
{
    float sums[3];
    akv_coder_best()->coded_sums(x, list->sigma_sq, &list->lanes, (float)(1.0 / gain), sums);
    const double xx = sums[0], xc = sums[1], cc = sums[2];
    *best = cc > 0.0 ? xc / cc : 1.0;
    return xx - gain * (2.0 * xc - gain * cc);
}

static uint32_t nearest_gain(double gain)
{
    double code = rint(3.0 * akv_log2(gain > 1e-9 ? gain : 1e-9)) + 8.0;
    return code < 0.0 ? 0 : code > AKV_GAIN_CODES - 1 ? AKV_GAIN_CODES - 1 : (uint32_t)code;
}

/*
 * The gain code of the vector x: the one nearest to the best gain of the codes that its root mean square gives, or a
 * neighbour if that codes it better. Without the neighbours alternating between codes and gains stops beside the best
 * of the grid (0.4 to 4 % more squared error).
 */
static uint32_t gain_of(const float *x, const lane_list *list)
{
    double gain, least;
    float square;
    akv_coder_best()->squares(x, 1, list->count, NULL, &square);
    coded_error(x, list,
                akv_gain_value(nearest_gain(list->coordinates > 0 ? sqrt((double)square / list->coordinates) : 1.0)),
                &gain);
    const uint32_t middle = nearest_gain(gain);
    uint32_t code = middle;
    least = coded_error(x, list, akv_gain_value(middle), &gain);
    for (int step = -1; step <= 1; step += 2)
        for (uint32_t next = middle + (uint32_t)step; next < AKV_GAIN_CODES; next += (uint32_t)step) {
            double error = coded_error(x, list, akv_gain_value(next), &gain);
            if (!(error < least))
                break;
            least = error;
            code = next;
        }
    return code;
}

/* Residuals of n <= AKV_TILE_TOKENS tokens -> coordinates of the transform [n, coords] in s->sims. */
static void transform(const akv_job *job, int side, uint32_t head, uint64_t t0, const uint16_t *tokens, uint32_t n,
                      akv_turner *turner, akv_codec_scratch *s)
{
    const akv_ladder *l = job->ladder;
    const akv_header *h = job->header;
    const uint32_t under = h->basis_dim[side], cols = h->basis_cols[side], dim = h->head_dim[side],
                   coords = akv_num_coords(h, side);
    float *rows = side == AKV_SIDE_K ? s->pre : s->value; /* [n, under] */
    for (uint32_t r = 0; r < n; r++) {
        akv_residual_of(job, side, head, t0 + tokens[r], turner, s->vector);
        for (uint32_t i = 0; i < under; i++)
            rows[(size_t)r * under + i] = s->vector[l->coords[side][i]];
        for (uint32_t i = under; i < dim; i++)
            s->sims[(size_t)r * coords + cols + i - under] = s->vector[l->coords[side][i]];
    }
    akv_gemm_nt(n, cols, under, rows, under, l->basis[side] + (size_t)head * cols * under, under, s->sims, coords);
}

/* 16 numbers of 4, 2 or 1 bits, packed upwards. */
static void pack_numbers(const uint8_t *numbers, uint32_t width, uint8_t *out)
{
    for (int half = 0; half < 2; half++) {
        uint64_t v = 0;
        for (int b = 7; b >= 0; b--)
            v = v << 8 | numbers[half * 8 + b];
        if (width == 4) {
            v = (v | v >> 4) & 0x00ff00ff00ff00ffu;
            v = (v | v >> 8) & 0x0000ffff0000ffffu;
            v = (v | v >> 16) & 0xffffffffu;
        } else if (width == 2) {
            v = (v | v >> 6) & 0x000f000f000f000fu;
            v = (v | v >> 12) & 0x000000ff000000ffu;
            v = (v | v >> 24) & 0xffffu;
        } else {
            v = (v | v >> 7) & 0x0003000300030003u;
            v = (v | v >> 14) & 0x0000000f0000000fu;
            v = (v | v >> 28) & 0xffu;
        }
        for (uint32_t b = 0; b < width; b++)
            *out++ = (uint8_t)(v >> (8 * b));
    }
}

/* One run: tokens t0 + list[0..n) of one level -> out. */
static void code_run(akv_job *job, int side, uint32_t head, uint64_t t0, const uint16_t *tokens, uint32_t n,
                     const akv_level_list *list, akv_turner *turner, akv_codec_scratch *s, uint8_t *out)
{
    const uint32_t coords = akv_num_coords(job->header, side);
    const akv_coder_kernels *kernels = akv_coder_best();
    float x[AKV_MAX_HEAD_DIM + 48];
    uint8_t numbers[(AKV_MAX_HEAD_DIM + 48) * AKV_GROUP_LANES]; /* [lanes, residual of the group] */
    uint8_t *groups = out + (n + 1) / 2;
    lane_list lanes;
    make_lanes(list, job->ladder->sigma[side] + (size_t)head * coords, &lanes);
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES, in_tile = at % AKV_TILE_TOKENS;
        if (in_tile == 0)
            transform(job, side, head, t0, tokens + at, n - at < AKV_TILE_TOKENS ? n - at : AKV_TILE_TOKENS, turner, s);
        for (uint32_t r = 0; r < g; r++) {
            const float *z = s->sims + (size_t)(in_tile + r) * coords;
            for (uint32_t j = 0; j < lanes.count; j++)
                x[j] = z[lanes.coord[j]] * lanes.inverse_sigma[j];
            const uint32_t code = gain_of(x, &lanes);
            out[(at + r) / 2] |= (uint8_t)(code << ((at + r) % 2 * 4));
            kernels->code_numbers(x, &lanes.lanes, 1.0f / akv_gain_value(code), numbers + r, AKV_GROUP_LANES);
        }
        uint64_t bit = 0;
        for (uint32_t i = 0; i < list->count; i++) {
            const uint8_t *of = numbers + (size_t)lanes.lane[i] * AKV_GROUP_LANES;
            const uint32_t width = list->width[i];
            if (g == AKV_GROUP_LANES)
                pack_numbers(of, width, groups + bit / 8);
            else
                for (uint32_t r = 0; r < g; r++)
                    akv_put_bits(groups, bit + (uint64_t)r * width, of[r]);
            bit += (uint64_t)g * width;
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
    const uint64_t blocks = akv_div_up(job->S, AKV_BLOCK_TOKENS), block = task / 2 % blocks,
                   t0 = block * AKV_BLOCK_TOKENS;
    const uint32_t head = (uint32_t)(task / 2 / blocks);
    const int side = (int)(task % 2);
    const uint32_t n = (uint32_t)(job->S - t0 < AKV_BLOCK_TOKENS ? job->S - t0 : AKV_BLOCK_TOKENS);
    const uint64_t *offsets = akv_job_section(job, AKV_SEC_RANKS);
    if (offsets[task] == offsets[task + 1])
        return;
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
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
        code_run(job, side, head, t0, tokens + first[l], count, &list, &turner, s, out);
        out += akv_run_bytes(count, list.bits);
    }
    akv_return_slot(job->slots, slot);
}

void akv_ladder_code(akv_job *job)
{
    place_runs(job);
    akv_parallel_for(job->config->executor, code_task, job,
                     (size_t)(job->H * akv_div_up(job->S, AKV_BLOCK_TOKENS)) * 2);
}
