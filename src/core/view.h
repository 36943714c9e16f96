/* SPDX-License-Identifier: Apache-2.0 */
/* view.h - one side of one KV head of a compressed segment as typed pointers: what attention and decoding read. */
#ifndef AKV_VIEW_H
#define AKV_VIEW_H

#include "core/levels.h"
#include "core/segment.h"
#include "core/sizes.h"

typedef struct akv_side_view {
    uint32_t dim;
    uint32_t num_anchors;
    const uint16_t *anchors; /* bf16 [k, dim] */
    const uint8_t *index8;   /* [S] or NULL */
    const uint16_t *index16; /* [S] or NULL */
    const uint16_t *coeff;   /* f16 [S] */
    const uint8_t *owns;     /* bitmap, [ceil(S / 8)] */
    const uint64_t *ranks;   /* [blocks] of this head, then at least one more entry */
    const uint16_t *gains;   /* f16, of the whole side */
    const uint8_t *codes;    /* of the whole side */
    uint32_t code_bytes;
    const float *levels;     /* [4] */
} akv_side_view;

static inline akv_side_view akv_view_side(const akv_segment *segment, int side, uint32_t head)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t S = h->num_tokens, at = head * S;
    akv_side_view v;
    memset(&v, 0, sizeof v);
    v.dim = h->head_dim[side];
    v.num_anchors = h->num_anchors;
    v.anchors =
        (const uint16_t *)akv_section_of(segment, AKV_SEC_ANCHORS + side) + (uint64_t)head * h->num_anchors * v.dim;
    if (h->num_anchors <= 256)
        v.index8 = (const uint8_t *)akv_section_of(segment, AKV_SEC_INDEX + side) + at;
    else
        v.index16 = (const uint16_t *)akv_section_of(segment, AKV_SEC_INDEX + side) + at;
    v.coeff = (const uint16_t *)akv_section_of(segment, AKV_SEC_COEFF + side) + at;
    v.owns = (const uint8_t *)akv_section_of(segment, AKV_SEC_LEVELS + side) + head * akv_div_up(S, 8);
    v.ranks = (const uint64_t *)akv_section_of(segment, AKV_SEC_RANKS + side) + head * akv_div_up(S, AKV_BLOCK_TOKENS);
    v.gains = akv_section_of(segment, AKV_SEC_GAINS + side);
    v.codes = akv_section_of(segment, AKV_SEC_CODES + side);
    v.code_bytes = akv_code_bytes(v.dim);
    v.levels = h->flags & AKV_FLAG_PLAIN_CODES ? akv_levels_uniform : akv_levels_lloyd_max;
    return v;
}

static inline uint32_t akv_view_index(const akv_side_view *v, uint64_t token)
{
    return v->index8 != NULL ? v->index8[token] : v->index16[token];
}

static inline bool akv_view_owns(const akv_side_view *v, uint64_t token)
{
    return (v->owns[token >> 3] >> (token & 7)) & 1;
}

/*
 * The tokens of block `block` (of n tokens) that own a residual, as offsets from the block's start, ascending. Returns
 * their number.
 */
static inline uint32_t akv_view_owners(const akv_side_view *v, uint64_t block, uint32_t n,
                                       uint16_t out[AKV_BLOCK_TOKENS])
{
    const uint8_t *bits = v->owns + block * (AKV_BLOCK_TOKENS / 8);
    uint32_t count = 0;
    for (uint32_t b = 0; b < (n + 7) / 8; b++)
        for (uint32_t byte = bits[b]; byte != 0; byte &= byte - 1) {
            uint32_t low = byte & (0u - byte);
            uint32_t bit =
                low >= 16 ? 4 + (low >= 32) + (low >= 64) + (low >= 128) : (low >= 2) + (low >= 4) + (low >= 8);
            out[count++] = (uint16_t)(b * 8 + bit);
        }
    return count;
}

#endif
