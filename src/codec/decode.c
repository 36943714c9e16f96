/* SPDX-License-Identifier: Apache-2.0 */
/* decode.c - reconstruct tokens of a segment. For tests and tools; attention never does this. */
#include "codec/ladder.h"
#include "core/view.h"
#include "kernels/kernels.h"

/* Add the decoded residual of one token to out. residual = its number within the side, place/count = within its run. */
static void add_residual(const akv_side_view *v, const akv_header *h, int side, uint64_t run, uint32_t place,
                         uint32_t count, float *out)
{
    uint32_t group = place / AKV_GROUP_LANES, lane = place % AKV_GROUP_LANES;
    uint32_t left = count - group * AKV_GROUP_LANES, g = left < AKV_GROUP_LANES ? left : AKV_GROUP_LANES;
    const uint8_t *codes = v->codes + (run + (uint64_t)group * AKV_GROUP_LANES) * v->code_bytes;
    float gain = akv_f16_to_f32(v->gains[run + place]), x[AKV_MAX_HEAD_DIM], signs[AKV_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < v->dim; i++) {
        uint32_t bit = (i * g + lane) * 2;
        x[i] = gain * v->levels[(codes[bit / 8] >> (bit % 8)) & 3u];
    }
    if (!(h->flags & AKV_FLAG_PLAIN_CODES)) {
        akv_signs(h->seed, side, v->dim, signs);
        akv_hadamard_f32(x, v->dim);
        for (uint32_t i = 0; i < v->dim; i++)
            x[i] *= signs[i];
    }
    for (uint32_t i = 0; i < v->dim; i++)
        out[i] += x[i];
}

static void decode_side(const akv_segment *segment, int side, uint32_t head, uint64_t tok0, uint64_t n, float *out)
{
    const akv_header *h = akv_header_of(segment);
    const akv_side_view v = akv_view_side(segment, side, head);
    const uint32_t planes = h->rotary_dim / 2;
    const bool turn = side == AKV_SIDE_K && planes != 0 && !(h->flags & AKV_FLAG_ANCHORS_POST_ROPE);
    const double *inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    const int32_t *positions =
        h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    double cosine[AKV_MAX_HEAD_DIM / 2], sine[AKV_MAX_HEAD_DIM / 2];
    uint16_t owners[AKV_BLOCK_TOKENS];
    uint64_t block = UINT64_MAX;
    uint32_t count = 0, place = 0;

    for (uint64_t t = tok0; t < tok0 + n; t++) {
        float *x = out + (t - tok0) * v.dim;
        const uint16_t *anchor = v.anchors + (size_t)akv_view_index(&v, t) * v.dim;
        float gamma = akv_f16_to_f32(v.coeff[t]);
        for (uint32_t i = 0; i < v.dim; i++)
            x[i] = gamma * akv_bf16_to_f32(anchor[i]);
        if (turn) {
            int64_t position = positions ? positions[t] : (int64_t)h->first_position + (int64_t)t;
            akv_rope_phase(inv_freq, planes, position, cosine, sine);
            akv_rope_turn(x, v.dim, h->rotary_dim, (akv_rope_style)h->rope_style, cosine, sine, 1, h->magnitude, x);
        }
        if (!akv_view_owns(&v, t))
            continue;
        if (t / AKV_BLOCK_TOKENS != block) {
            block = t / AKV_BLOCK_TOKENS;
            uint64_t left = h->num_tokens - block * AKV_BLOCK_TOKENS;
            count = akv_view_owners(&v, block, left < AKV_BLOCK_TOKENS ? (uint32_t)left : AKV_BLOCK_TOKENS, owners);
            place = 0;
        }
        while (owners[place] < t % AKV_BLOCK_TOKENS)
            place++;
        add_residual(&v, h, side, v.ranks[block], place, count, x);
    }
}

/* Add the residual at place r of a group of g residuals to out [dim]. */
static void add_ladder_residual(const akv_ladder_view *v, const akv_level_list *list, const uint16_t *coords,
                                const uint8_t *group, uint32_t g, uint32_t r, float gain, float *out)
{
    uint64_t bit = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const uint32_t width = list->width[i], c = list->coord[i];
        uint64_t at = bit + (uint64_t)r * width;
        uint32_t number = group[at >> 3] >> (at & 7);
        if ((at & 7) + width > 8)
            number |= (uint32_t)group[(at >> 3) + 1] << (8 - (at & 7));
        float z = gain * akv_bf16_to_f32(v->sigmas[c]) * akv_level_value(number & ((1u << width) - 1u), width);
        if (c < v->basis_cols)
            for (uint32_t d = 0; d < v->basis_dim; d++)
                out[coords ? coords[d] : d] += z * v->basis_scales[c] * (float)v->basis[(size_t)c * v->basis_dim + d];
        else
            out[coords ? coords[v->basis_dim + c - v->basis_cols] : v->basis_dim + c - v->basis_cols] += z;
        bit += (uint64_t)g * width;
    }
}

static void decode_ladder(const akv_segment *segment, int side, uint32_t head, uint64_t tok0, uint64_t n, float *out)
{
    const akv_header *h = akv_header_of(segment);
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    const uint32_t planes = side == AKV_SIDE_K ? h->rotary_dim / 2 : 0;
    const double *inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    const int32_t *positions =
        h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    const uint16_t *mean = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (size_t)head * v.dim;
    const uint16_t *coords = side == AKV_SIDE_K ? akv_section_of(segment, AKV_SEC_COORDS) : NULL;
    double cosine[AKV_MAX_HEAD_DIM / 2], sine[AKV_MAX_HEAD_DIM / 2];

    for (uint64_t t = tok0; t < tok0 + n; t++) {
        float *x = out + (t - tok0) * v.dim;
        const uint32_t a = akv_ladder_index(&v, t);
        const float weight = akv_ladder_weight(&v, t, a);
        for (uint32_t i = 0; i < v.dim; i++)
            x[i] = weight * akv_bf16_to_f32(v.units[i]) * (float)v.anchors[(size_t)a * v.dim + i] +
                   (side == AKV_SIDE_K ? akv_bf16_to_f32(mean[i]) : 0.0f);
        if (planes != 0) {
            int64_t position = positions ? positions[t] : (int64_t)h->first_position + (int64_t)t;
            akv_rope_phase(inv_freq, planes, position, cosine, sine);
            akv_rope_turn(x, v.dim, h->rotary_dim, (akv_rope_style)h->rope_style, cosine, sine, 1, h->magnitude, x);
        }
    }
    for (uint64_t block = tok0 / AKV_BLOCK_TOKENS; n > 0 && block * AKV_BLOCK_TOKENS < tok0 + n; block++) {
        const uint64_t t0 = block * AKV_BLOCK_TOKENS, rest = h->num_tokens - t0;
        uint16_t tokens[AKV_BLOCK_TOKENS];
        uint32_t first[AKV_MAX_LEVELS + 2];
        const uint8_t *run = v.codes + v.offsets[block * 2];
        akv_ladder_sort(&v, block, rest < AKV_BLOCK_TOKENS ? (uint32_t)rest : AKV_BLOCK_TOKENS, tokens, first);
        for (uint32_t l = 1; l <= v.num_levels; l++) {
            const uint32_t count = first[l + 1] - first[l];
            akv_level_list list;
            if (count == 0)
                continue;
            akv_ladder_list(&v, l, &list);
            const uint8_t *group = run + (count + 1) / 2;
            for (uint32_t i = 0; i < count; i++) {
                const uint32_t left = count - i / AKV_GROUP_LANES * AKV_GROUP_LANES;
                const uint32_t g = left < AKV_GROUP_LANES ? left : AKV_GROUP_LANES;
                const uint64_t t = t0 + tokens[first[l] + i];
                if (t >= tok0 && t < tok0 + n)
                    add_ladder_residual(&v, &list, coords, group + (size_t)(i / AKV_GROUP_LANES) * 2 * list.bits, g,
                                        i % AKV_GROUP_LANES, akv_gain_value((run[i / 2] >> (i % 2 * 4)) & 15u),
                                        out + (t - tok0) * v.dim);
            }
            run += akv_run_bytes(count, list.bits);
        }
    }
}

akv_status akv_segment_decode(const akv_segment *segment, uint32_t kv_head, uint64_t tok0, uint64_t n, float *keys,
                              float *values, akv_diag *diag)
{
    if (segment == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment must not be NULL");
    const akv_header *h = akv_header_of(segment);
    if (kv_head >= h->num_kv_heads)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "kv_head is %u; the segment has %u", kv_head, h->num_kv_heads);
    if (tok0 > h->num_tokens || n > h->num_tokens - tok0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "tokens %llu..%llu are asked for; the segment has %llu",
                        (unsigned long long)tok0, (unsigned long long)(tok0 + n), (unsigned long long)h->num_tokens);
    float *out[AKV_SIDES] = {keys, values};
    for (int side = 0; side < AKV_SIDES; side++) {
        if (out[side] == NULL)
            continue;
        if (h->kind == AKV_SEGMENT_COMPRESSED) {
            if (h->coding == AKV_CODING_LADDER)
                decode_ladder(segment, side, kv_head, tok0, n, out[side]);
            else
                decode_side(segment, side, kv_head, tok0, n, out[side]);
            continue;
        }
        akv_tensor t = akv_tensor_contiguous(akv_section_of(segment, AKV_SEC_DENSE + side), (akv_dtype)h->dense_dtype,
                                             h->num_tokens, h->head_dim[side]);
        for (uint64_t i = 0; i < n; i++)
            akv_tensor_row(&t, kv_head, (int64_t)(tok0 + i), h->head_dim[side], out[side] + i * h->head_dim[side]);
    }
    return AKV_OK;
}
