/* SPDX-License-Identifier: Apache-2.0 */
/*
 * turn.c - rows of the cache as f32, and keys turned back from and to their positions. Every step of compression reads
 * the tokens again (a copy of all un-turned keys would be larger than the cache), so this has to be cheap: the phase of
 * a position is that of a multiple of 64 plus that of an offset, both exact and made once a layer. One complex product
 * per plane is left, in double.
 */
#include "codec/codec.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"

static uint64_t planes_of(const akv_job *job)
{
    return job->header->rotary_dim / 2;
}

static int64_t block_of(int64_t position)
{
    return position >= 0 ? position / AKV_TURN_TOKENS : -((AKV_TURN_TOKENS - 1 - position) / AKV_TURN_TOKENS);
}

/* Cosines, then sines. */
static void phase(const akv_job *job, int64_t position, double *out)
{
    akv_rope_phase(job->layer->rope.inv_freq, (uint32_t)planes_of(job), position, out, out + planes_of(job));
}

void akv_turn_carve(akv_job *job, akv_arena *arena)
{
    const int64_t first = block_of(akv_position_of(job->layer, 0)),
                  last = block_of(akv_position_of(job->layer, job->S - 1));
    job->first_block = first;
    job->num_blocks = (uint64_t)(last - first) + 1;
    if (job->num_blocks > 16 + job->S / 16) /* positions with wide gaps: each block when it is met */
        job->num_blocks = 0;
    job->offset_phase = AKV_TAKE(arena, double, (size_t)AKV_TURN_TOKENS * 2 * planes_of(job));
    job->block_phase = AKV_TAKE(arena, double, job->num_blocks * 2 * planes_of(job));
}

void akv_turn_begin(akv_job *job)
{
    for (int64_t i = 0; i < AKV_TURN_TOKENS; i++)
        phase(job, i, job->offset_phase + (uint64_t)i * 2 * planes_of(job));
    for (uint64_t b = 0; b < job->num_blocks; b++)
        phase(job, (job->first_block + (int64_t)b) * AKV_TURN_TOKENS, job->block_phase + b * 2 * planes_of(job));
}

akv_turner akv_turner_begin(akv_codec_scratch *s)
{
    akv_turner t = {0, false, s->phase, NULL};
    return t;
}

void akv_turn_row(const akv_job *job, akv_turner *turner, int64_t position, int direction, double magnitude,
                  const float *x, float *out)
{
    const int64_t block = block_of(position);
    const uint64_t number = (uint64_t)(block - job->first_block);
    if (!turner->known || block != turner->block) {
        turner->known = true;
        turner->block = block;
        if (block >= job->first_block && number < job->num_blocks) {
            turner->base = job->block_phase + number * 2 * planes_of(job);
        } else {
            phase(job, block * AKV_TURN_TOKENS, turner->own);
            turner->base = turner->own;
        }
    }
    akv_coder_best()->turn(x, job->dk, job->header->rotary_dim, job->layer->rope.style, turner->base,
                           job->offset_phase + (uint64_t)(position - block * AKV_TURN_TOKENS) * 2 * planes_of(job),
                           direction, magnitude, out);
}

void akv_load_rows(const akv_tensor *tensor, uint32_t head, uint64_t t0, uint32_t n, uint32_t dim, float *out)
{
    const akv_kernels *kernels = akv_kernels_best();
    for (uint32_t i = 0; i < n; i++)
        if (tensor->stride_dim == 1 && tensor->dtype != AKV_F32)
            kernels->row_f32(
                (const uint16_t *)tensor->data + head * tensor->stride_head + (int64_t)(t0 + i) * tensor->stride_token,
                tensor->dtype, dim, out + (size_t)i * dim);
        else
            akv_tensor_row(tensor, head, (int64_t)(t0 + i), dim, out + (size_t)i * dim);
}

static bool pre_rope(const akv_job *job)
{
    return job->header->rotary_dim != 0 && job->experiment->anchor_space == AKV_ANCHOR_PRE_ROPE;
}

void akv_anchor_space_rows(const akv_job *job, int side, uint32_t head, uint64_t t0, uint32_t n, akv_turner *turner,
                           float *out)
{
    const akv_layer *layer = job->layer;
    const uint32_t dk = job->dk;
    if (side == AKV_SIDE_V) {
        akv_load_rows(&layer->values, head, t0, n, job->dv, out);
        return;
    }
    akv_load_rows(&layer->keys, head, t0, n, dk, out);
    const float minus = -1.0f, *mean = job->mean[AKV_SIDE_K] != NULL ? job->mean[AKV_SIDE_K] + (size_t)head * dk : NULL;
    const akv_kernels *kernels = akv_kernels_best();
    for (uint32_t i = 0; i < n; i++) {
        float *row = out + (size_t)i * dk;
        if (pre_rope(job))
            akv_turn_row(job, turner, akv_position_of(layer, t0 + i), -1, 1.0 / layer->rope.magnitude, row, row);
        if (mean != NULL)
            kernels->rows_axpy(&minus, 1, 1, mean, dk, row);
    }
}

void akv_anchor_space_row(const akv_job *job, int side, uint32_t head, uint64_t token, akv_turner *turner, float *out)
{
    akv_anchor_space_rows(job, side, head, token, 1, turner, out);
}

void akv_turn_residual(const akv_job *job, uint64_t token, akv_turner *turner, float *r)
{
    if (pre_rope(job))
        akv_turn_row(job, turner, akv_position_of(job->layer, token), 1, job->layer->rope.magnitude, r, r);
}
