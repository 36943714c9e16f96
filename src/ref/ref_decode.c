/* SPDX-License-Identifier: Apache-2.0 */
/* ref_decode.c - canonical bytes to doubles, straight from layout.h. The bytes are trusted: tests made them. */
#include "core/base.h"
#include "ref/ref.h"

#include <stdlib.h>

static const void *section(const ref_view *view, int id)
{
    return view->bytes + view->header->sections[id].offset;
}

static uint32_t dim_of(const ref_view *view, int side)
{
    return view->header->head_dim[side];
}

ref_view ref_view_of(const void *blob)
{
    ref_view view;
    view.header = blob;
    view.bytes = blob;
    view.rope.rotary_dim = view.header->rotary_dim;
    view.rope.style = (akv_rope_style)view.header->rope_style;
    view.rope.magnitude = view.header->magnitude;
    view.rope.inv_freq = section(&view, AKV_SEC_INV_FREQ);
    return view;
}

double ref_view_position(const ref_view *view, uint64_t token)
{
    if (view->header->sections[AKV_SEC_POSITIONS].offset == 0)
        return (double)view->header->first_position + (double)token;
    return ((const int32_t *)section(view, AKV_SEC_POSITIONS))[token];
}

uint32_t ref_view_anchor_token(const ref_view *view, uint32_t head, uint32_t anchor)
{
    const uint32_t *tokens = section(view, AKV_SEC_ANCHOR_TOKENS);
    return tokens[(uint64_t)head * view->header->num_anchors + anchor];
}

void ref_view_anchor(const ref_view *view, int side, uint32_t head, uint32_t anchor, double *out)
{
    uint32_t dim = dim_of(view, side);
    const uint16_t *a = section(view, AKV_SEC_ANCHORS + side);
    a += ((uint64_t)head * view->header->num_anchors + anchor) * dim;
    for (uint32_t i = 0; i < dim; i++)
        out[i] = akv_bf16_to_f32(a[i]);
}

uint32_t ref_view_index(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    const void *index = section(view, AKV_SEC_INDEX + side);
    uint64_t at = head * view->header->num_tokens + token;
    return view->header->num_anchors <= 256 ? ((const uint8_t *)index)[at] : ((const uint16_t *)index)[at];
}

double ref_view_coeff(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    const uint16_t *coeff = section(view, AKV_SEC_COEFF + side);
    return akv_f16_to_f32(coeff[head * view->header->num_tokens + token]);
}

bool ref_view_owns(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    const uint8_t *map = section(view, AKV_SEC_LEVELS + side);
    uint64_t row = (view->header->num_tokens + 7) / 8;
    return (map[head * row + token / 8] >> (token % 8)) & 1;
}

/* Residuals of tokens [first, last) of a head. */
static uint64_t count_owned(const ref_view *view, int side, uint32_t head, uint64_t first, uint64_t last)
{
    uint64_t n = 0;
    for (uint64_t p = first; p < last; p++)
        n += ref_view_owns(view, side, head, p);
    return n;
}

uint64_t ref_view_first_residual(const ref_view *view, int side, uint32_t head)
{
    uint64_t n = 0;
    for (uint32_t h = 0; h < head; h++)
        n += count_owned(view, side, h, 0, view->header->num_tokens);
    return n;
}

double ref_view_gain(const ref_view *view, int side, uint64_t residual)
{
    return akv_f16_to_f32(((const uint16_t *)section(view, AKV_SEC_GAINS + side))[residual]);
}

/* Codes of residual `lane` of a run of `run` residuals that begins with residual number `first`. */
static void read_codes(const ref_view *view, int side, uint64_t first, uint64_t run, uint64_t lane, uint8_t *codes)
{
    uint32_t dim = dim_of(view, side);
    uint32_t code_bytes = (dim * 2 + 7) / 8;
    uint64_t group_first = lane / AKV_GROUP_LANES * AKV_GROUP_LANES;
    uint64_t g = run - group_first < AKV_GROUP_LANES ? run - group_first : AKV_GROUP_LANES;
    uint64_t r = lane - group_first;
    const uint8_t *group = (const uint8_t *)section(view, AKV_SEC_CODES + side) + (first + group_first) * code_bytes;
    for (uint32_t i = 0; i < dim; i++) {
        uint64_t bit = (i * g + r) * 2;
        codes[i] = (group[bit / 8] >> (bit % 8)) & 3;
    }
}

void ref_view_codes(const ref_view *view, int side, uint32_t head, uint64_t token, uint8_t *codes)
{
    uint64_t S = view->header->num_tokens;
    uint64_t block = token / AKV_BLOCK_TOKENS * AKV_BLOCK_TOKENS;
    uint64_t block_end = block + AKV_BLOCK_TOKENS < S ? block + AKV_BLOCK_TOKENS : S;
    uint64_t first = ref_view_first_residual(view, side, head) + count_owned(view, side, head, 0, block);
    read_codes(view, side, first, count_owned(view, side, head, block, block_end),
               count_owned(view, side, head, block, token), codes);
}

static double norm(const double *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

static void decode_dense(const ref_view *view, int side, uint32_t head, double *out, double *size)
{
    uint64_t S = view->header->num_tokens;
    uint32_t dim = dim_of(view, side);
    const void *data = section(view, AKV_SEC_DENSE + side);
    for (uint64_t p = 0; p < S; p++) {
        for (uint32_t i = 0; i < dim; i++) {
            uint64_t at = (head * S + p) * dim + i;
            float x;
            if (view->header->dense_dtype == AKV_F32)
                x = ((const float *)data)[at];
            else if (view->header->dense_dtype == AKV_F16)
                x = akv_f16_to_f32(((const uint16_t *)data)[at]);
            else
                x = akv_bf16_to_f32(((const uint16_t *)data)[at]);
            out[p * dim + i] = x;
        }
        if (size != NULL)
            size[p] = norm(out + p * dim, dim);
    }
}

bool ref_decode(const void *blob, int side, uint32_t head, double *out, double *size)
{
    ref_view view = ref_view_of(blob);
    const akv_header *h = view.header;
    if (h->kind == AKV_SEGMENT_DENSE) {
        decode_dense(&view, side, head, out, size);
        return true;
    }
    if (h->coding == AKV_CODING_LADDER)
        return ref_decode_ladder(&view, side, head, out, size);
    uint32_t dim = dim_of(&view, side);
    double *part = malloc(dim * sizeof *part);
    uint8_t *codes = malloc(dim);
    if (part == NULL || codes == NULL) {
        free(part);
        free(codes);
        return false;
    }
    bool plain = (h->flags & AKV_FLAG_PLAIN_CODES) != 0;
    const double *level = plain ? ref_levels_plain : ref_levels;
    uint64_t residual = ref_view_first_residual(&view, side, head); /* number of the next residual */
    uint64_t run_first = residual, run = 0;
    for (uint64_t p = 0; p < h->num_tokens; p++) {
        if (p % AKV_BLOCK_TOKENS == 0) {
            uint64_t end = p + AKV_BLOCK_TOKENS < h->num_tokens ? p + AKV_BLOCK_TOKENS : h->num_tokens;
            run_first = residual;
            run = count_owned(&view, side, head, p, end);
        }
        /* anchor part: gamma_p R_p a_c(p), or gamma_p b_c(p) */
        ref_view_anchor(&view, side, head, ref_view_index(&view, side, head, p), part);
        if (side == AKV_SIDE_K && (h->flags & AKV_FLAG_ANCHORS_POST_ROPE) == 0)
            ref_rope_rotate(&view.rope, ref_view_position(&view, p), part);
        double gamma = ref_view_coeff(&view, side, head, p);
        for (uint32_t i = 0; i < dim; i++)
            out[p * dim + i] = gamma * part[i];
        if (size != NULL)
            size[p] = norm(out + p * dim, dim);
        /* residual part: (Hd sign)^-1 scale_p level[code_p], which is already rotated on the key side */
        if (ref_view_owns(&view, side, head, p)) {
            read_codes(&view, side, run_first, run, residual - run_first, codes);
            double scale = ref_view_gain(&view, side, residual);
            for (uint32_t i = 0; i < dim; i++)
                part[i] = scale * level[codes[i]];
            if (!plain)
                ref_untransform(part, dim, h->seed, side);
            for (uint32_t i = 0; i < dim; i++)
                out[p * dim + i] += part[i];
            if (size != NULL)
                size[p] += norm(part, dim);
            residual++;
        }
    }
    free(part);
    free(codes);
    return true;
}
