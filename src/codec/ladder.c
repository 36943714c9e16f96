/* SPDX-License-Identifier: Apache-2.0 */
/* ladder.c - layout and state of the LADDER coding, and the order of its steps. */
#include "codec/ladder.h"
#include "core/slots.h"
#include "kernels/coder.h"
#include "kernels/kernels.h"

/* Most of the budget that anchors, and each side's bases, may take: without such caps 40x did not fit at 12,000 tokens. Both
 * values were chosen, not tuned. */
#define ANCHOR_SHARE 0.3
#define BASIS_SHARE (1.0 / 6.0)

/* Bytes when every token takes the top level, 4 bits a coordinate at most: more codes than that are never needed. */
static uint64_t most_code_bytes(const akv_header *h, const akv_experiment *options)
{
    uint64_t bytes = 0;
    for (int side = 0; side < AKV_SIDES; side++) {
        uint32_t bits = options->level_bits[options->num_levels - 1];
        if (bits > 4 * h->head_dim[side])
            bits = 4 * h->head_dim[side];
        bytes += akv_run_bytes(AKV_BLOCK_TOKENS, bits) + (size_t)2 * AKV_MAX_LEVELS;
    }
    return bytes * h->num_kv_heads * akv_div_up(h->num_tokens, AKV_BLOCK_TOKENS);
}

/* Lay out with k anchors and the bases as told; returns the bytes without any codes. */
static uint64_t lay_out(akv_header *h, const akv_experiment *options, uint32_t anchors, uint32_t key_dims,
                        bool value_basis, bool has_positions)
{
    h->coding = AKV_CODING_LADDER;
    h->num_anchors = anchors;
    h->num_levels = options->num_levels;
    h->index_bits = 1;
    while ((h->num_anchors - 1) >> h->index_bits != 0)
        h->index_bits++;
    h->basis_dim[AKV_SIDE_K] = key_dims;
    h->basis_dim[AKV_SIDE_V] = value_basis ? h->head_dim[AKV_SIDE_V] : 0;
    for (int side = 0; side < AKV_SIDES; side++)
        h->basis_cols[side] = h->basis_dim[side] < options->basis_cols ? h->basis_dim[side] : options->basis_cols;
    h->code_bytes = 0;
    akv_layout_sections(h, has_positions);
    return AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
}

/* The same for whichever number of key coordinates turns out slow: akv_plan does not know the RoPE table. */
static uint64_t most_fixed(akv_header *h, const akv_experiment *options, uint32_t anchors, bool key_basis,
                           bool value_basis, bool has_positions)
{
    uint64_t most = 0;
    for (uint32_t slow = 0; slow <= (key_basis ? h->head_dim[AKV_SIDE_K] : 0); slow++) {
        uint64_t bytes = lay_out(h, options, anchors, slow, value_basis, has_positions);
        most = bytes > most ? bytes : most;
    }
    return most;
}

uint64_t akv_ladder_least_bytes(akv_header *h, const akv_experiment *options, uint32_t least_anchors,
                                bool has_positions)
{
    return lay_out(h, options, least_anchors, 0, false, has_positions);
}

void akv_ladder_layout(akv_header *h, const akv_experiment *options, uint32_t least_anchors, uint32_t anchors,
                       uint32_t slow_dims, bool has_positions, uint64_t budget)
{
    const uint64_t H = h->num_kv_heads, dk = h->head_dim[AKV_SIDE_K], dv = h->head_dim[AKV_SIDE_V];
    /*
     * What is paid once must leave room for what is paid per token. Both rules look at the shape and the budget only.
     */
    uint64_t most_anchors = (uint64_t)(ANCHOR_SHARE * (double)budget) / (H * (dk + dv + 4));
    if (anchors > most_anchors)
        anchors = most_anchors < least_anchors ? least_anchors : (uint32_t)most_anchors;
    const bool bases = options->basis_cols > 0;
    bool key_basis = bases && (double)(H * dk * dk) <= BASIS_SHARE * (double)budget;
    bool value_basis = bases && (double)(H * dv * dv) <= BASIS_SHARE * (double)budget;
    uint64_t fixed = most_fixed(h, options, anchors, key_basis, value_basis, has_positions);
    if (fixed > budget) {
        key_basis = value_basis = false;
        fixed = most_fixed(h, options, anchors, false, false, has_positions);
    }
    if (fixed > budget) {
        anchors = least_anchors;
        fixed = most_fixed(h, options, anchors, false, false, has_positions);
    }
    /* The total follows from the widest fixed part; what this RoPE table needs less goes to the codes. */
    uint64_t codes = options->anchors_only ? 0 : (budget - fixed) / AKV_ALIGN * AKV_ALIGN,
             most = most_code_bytes(h, options);
    uint64_t total = fixed + (codes < most ? codes : akv_round_up(most, AKV_ALIGN));
    h->code_bytes = total - lay_out(h, options, anchors, key_basis ? slow_dims : 0, value_basis, has_positions);
    akv_layout_sections(h, has_positions);
}

uint32_t akv_slow_coords(const akv_rope *rope, uint32_t dim, int64_t span, double slow_angle, uint16_t *order)
{
    uint32_t slow = 0, fast = dim;
    for (uint32_t pass = 0; pass < 2; pass++) /* slow ones first, each group ascending by plane */
        for (uint32_t j = 0; j < rope->rotary_dim / 2; j++) {
            bool is_slow = fabs(rope->inv_freq[j]) * (double)span < slow_angle;
            if (is_slow != (pass == 0))
                continue;
            uint32_t a = akv_plane_first(rope->style, j), b = akv_plane_second(rope->style, rope->rotary_dim, j);
            if (is_slow) {
                order[slow++] = (uint16_t)a;
                order[slow++] = (uint16_t)b;
            } else {
                order[--fast] = (uint16_t)b;
                order[--fast] = (uint16_t)a;
            }
        }
    for (uint32_t i = rope->rotary_dim; i < dim; i++) /* without rotation: as slow as can be */
        order[slow++] = (uint16_t)i;
    return slow;
}

akv_ladder_view akv_ladder_writer_view(const akv_job *job, int side, uint32_t head)
{
    akv_segment writing;
    memset(&writing, 0, sizeof writing);
    writing.blob = job->blob;
    return akv_view_ladder(&writing, side, head);
}

void akv_ladder_carve(akv_job *job, akv_arena *arena)
{
    akv_ladder *l = job->ladder;
    const uint64_t H = job->H, S = job->S, levels = job->header->num_levels;
    const uint32_t sampled = job->layer->sampled.data != NULL ? job->layer->num_sampled : 0;
    uint64_t most_dim = job->dk > job->dv ? job->dk : job->dv;
    l->late_rows = job->G * (sampled > 0 ? sampled : job->W);
    l->deviation = AKV_TAKE(arena, float, H * S);
    l->late = AKV_TAKE(arena, float, H * l->late_rows * job->dk);
    l->query_sq = AKV_TAKE(arena, double, H);
    l->fixed = AKV_TAKE(arena, uint8_t, H * job->k);
    l->refine = AKV_TAKE(arena, float, job->num_slots * AKV_REFINE_FLOATS(job->k, most_dim));
    l->hulls = AKV_TAKE(arena, akv_hull, H * AKV_SIDES);
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t dim = job->header->head_dim[side], coords = akv_num_coords(job->header, side);
        job->mean[side] = AKV_TAKE(arena, float, H * dim);
        job->unit_of[side] = AKV_TAKE(arena, float, H * dim);
        l->moments[side] = AKV_TAKE(arena, float, H * job->num_ranges * dim * dim);
        l->prior[side] = AKV_TAKE(arena, float, H * S);
        l->basis[side] = AKV_TAKE(arena, float, H * job->header->basis_cols[side] * job->header->basis_dim[side]);
        l->sigma[side] = AKV_TAKE(arena, float, H * coords);
        l->entries[side] = AKV_TAKE(arena, uint8_t, H * levels * coords);
        l->level_bits[side] = AKV_TAKE(arena, uint32_t, H * levels);
        l->distortion[side] = AKV_TAKE(arena, double, H * (levels + 1));
        l->level[side] = AKV_TAKE(arena, uint8_t, H * S);
    }
    l->cover_heads = AKV_TAKE(arena, akv_cover_head, H);
    l->cover = AKV_TAKE(arena, float, H * AKV_SIDES * AKV_COVER_FLOATS);
    l->cover_units = AKV_TAKE(arena, float, H * AKV_SIDES * AKV_COVER_CANDIDATES * most_dim);
    l->eigen_floats = 4 * most_dim * most_dim + most_dim + akv_eigen_scratch_floats((uint32_t)most_dim);
    l->eigen = AKV_TAKE(arena, float, job->num_slots * l->eigen_floats);
}

/* Means of one head and side: keys before the rotary embedding, rounded as stored. Task = head * 2 + side. */
static void mean_task(void *opaque, size_t task)
{
    akv_job *job = opaque;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const uint32_t dim = job->header->head_dim[side];
    uint32_t slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    float *mean = job->mean[side] + (size_t)head * dim, *rows = side == AKV_SIDE_K ? s->pre : s->value;
    double sum[AKV_MAX_HEAD_DIM] = {0}, square[AKV_MAX_HEAD_DIM] = {0};
    memset(mean, 0, dim * sizeof *mean); /* so that the rows below are not centred yet */
    for (uint64_t t0 = 0; t0 < job->S; t0 += AKV_TILE_TOKENS) {
        const uint32_t n = akv_tile_tokens(t0, job->S);
        akv_anchor_space_rows(job, side, head, t0, n, &turner, rows);
        for (uint32_t i = 0; i < n; i++)
            akv_coder_best()->moments_add(rows + (size_t)i * dim, dim, sum, square);
    }
    uint16_t *stored = (uint16_t *)akv_job_section(job, AKV_SEC_MEAN) + (size_t)head * dim;
    for (uint32_t i = 0; i < dim; i++) {
        mean[i] = (float)(sum[i] / (double)job->S);
        if (side == AKV_SIDE_K) {
            stored[i] = akv_f32_to_bf16(mean[i]);
            mean[i] = akv_bf16_to_f32(stored[i]);
            square[i] -= sum[i] * sum[i] / (double)job->S;
        }
        square[i] = square[i] > 0.0 ? square[i] / (double)job->S : 0.0;
    }
    /* The two coordinates of a plane share their unit, so that it commutes with the rotation. */
    for (uint32_t j = 0; side == AKV_SIDE_K && j < job->header->rotary_dim / 2; j++) {
        uint32_t a = akv_plane_first(job->layer->rope.style, j),
                 b = akv_plane_second(job->layer->rope.style, job->header->rotary_dim, j);
        square[a] = square[b] = 0.5 * (square[a] + square[b]);
    }
    uint16_t *units = (uint16_t *)akv_job_section(job, AKV_SEC_UNITS + side) + (size_t)head * dim;
    for (uint32_t i = 0; i < dim; i++) {
        units[i] = akv_f32_to_bf16(square[i] > 1e-30 ? (float)sqrt(square[i]) : 1.0f);
        job->unit_of[side][(size_t)head * dim + i] = akv_bf16_to_f32(units[i]);
    }
    akv_return_slot(job->slots, slot);
}

/* The queries that weight the key coordinates, turned to the segment's end, in basis order. Task = head. */
static void late_queries(void *opaque, size_t task)
{
    akv_job *job = opaque;
    akv_ladder *l = job->ladder;
    const akv_layer *layer = job->layer;
    const uint32_t dk = job->dk, head = (uint32_t)task, planes = job->header->rotary_dim / 2;
    const bool sampled = layer->sampled.data != NULL && layer->num_sampled > 0;
    const uint32_t per_head = l->late_rows / job->G, slot = akv_claim_slot(job->slots, job->num_slots);
    akv_codec_scratch *s = &job->scratch[slot];
    akv_turner turner = akv_turner_begin(s);
    double sum = 0.0;
    for (uint32_t r = 0; r < job->rows; r++) {
        const float *q = job->queries + ((size_t)head * job->rows + r) * dk;
        sum += akv_dot_f32(q, q, dk);
    }
    l->query_sq[head] = sum / job->rows;
    for (uint32_t r = 0; r < l->late_rows; r++) {
        const uint32_t m = r % per_head;
        const int64_t q_head = (int64_t)head * job->G + r / per_head;
        float *out = l->late + ((size_t)head * l->late_rows + r) * dk;
        akv_tensor_row(sampled ? &layer->sampled : &layer->queries, q_head, m, dk, s->vector);
        if (sampled && planes > 0)
            akv_turn_row(job, &turner, (int64_t)job->header->last_position - layer->sampled_positions[m], 1, 1.0,
                         s->vector, s->vector);
        for (uint32_t i = 0; i < dk; i++)
            out[i] = s->vector[l->coords[AKV_SIDE_K][i]];
    }
    akv_return_slot(job->slots, slot);
}

void akv_ladder_queries(akv_job *job)
{
    akv_parallel_for(job->config->executor, late_queries, job, job->H);
}

void akv_ladder_begin(akv_job *job)
{
    for (int side = 0; side < AKV_SIDES; side++)
        memset(job->ladder->moments[side], 0,
               (size_t)(job->H * job->num_ranges) * job->header->head_dim[side] * job->header->head_dim[side] *
                   sizeof(float));
    memcpy(akv_job_section(job, AKV_SEC_COORDS), job->ladder->coords[AKV_SIDE_K], job->dk * sizeof(uint16_t));
    akv_parallel_for(job->config->executor, mean_task, job, (size_t)job->H * 2);
    akv_ladder_queries(job);
}

void akv_ladder_finish(akv_job *job)
{
    akv_ladder_bases(job);
    akv_ladder_allocate(job);
    akv_ladder_code(job);
}
