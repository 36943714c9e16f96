/* SPDX-License-Identifier: Apache-2.0 */
/* sections.c - sizes and offsets of a segment's sections from its shape, every product checked. */
#include "core/sections.h"

/* a * b * c, false on overflow. */
static bool mul3(uint64_t a, uint64_t b, uint64_t c, uint64_t *out)
{
    return akv_mul_u64(a, b, out) && akv_mul_u64(*out, c, out);
}

static bool section_bytes(const akv_header *h, bool has_positions, uint64_t *bytes)
{
    uint64_t S = h->num_tokens, H = h->num_kv_heads, k = h->num_anchors;
    memset(bytes, 0, AKV_SEC_COUNT * sizeof *bytes);
    bytes[AKV_SEC_INV_FREQ] = (uint64_t)h->rotary_dim / 2 * 8;
    if (has_positions && !akv_mul_u64(S, 4, &bytes[AKV_SEC_POSITIONS]))
        return false;
    if (h->kind == AKV_SEGMENT_DENSE) {
        for (int side = 0; side < AKV_SIDES; side++)
            if (!mul3(H, S, (uint64_t)h->head_dim[side] * akv_dtype_bytes((akv_dtype)h->dense_dtype),
                      &bytes[AKV_SEC_DENSE + side]))
                return false;
        return true;
    }
    bool ok = mul3(H, k, 4, &bytes[AKV_SEC_ANCHOR_TOKENS]);
    for (int side = 0; side < AKV_SIDES && ok; side++) {
        uint64_t dim = h->head_dim[side], n = h->num_residuals[side];
        ok = mul3(H, k, dim * 2, &bytes[AKV_SEC_ANCHORS + side]) &&
             mul3(H, S, k <= 256 ? 1 : 2, &bytes[AKV_SEC_INDEX + side]) &&
             mul3(H, S, 2, &bytes[AKV_SEC_COEFF + side]) &&
             akv_mul_u64(H, S / 8 + (S % 8 != 0), &bytes[AKV_SEC_LEVELS + side]) &&
             akv_mul_u64(n, 2, &bytes[AKV_SEC_GAINS + side]) &&
             akv_mul_u64(n, akv_code_bytes((uint32_t)dim), &bytes[AKV_SEC_CODES + side]);
    }
    return ok;
}

bool akv_sections_layout(const akv_header *h, bool has_positions, akv_section *sections, uint64_t *total_bytes)
{
    uint64_t bytes[AKV_SEC_COUNT];
    if (!section_bytes(h, has_positions, bytes))
        return false;
    uint64_t at = h->header_bytes;
    for (int id = 0; id < AKV_SEC_COUNT; id++) {
        sections[id].offset = bytes[id] != 0 ? at : 0;
        sections[id].bytes = bytes[id];
        if (bytes[id] > UINT64_MAX - AKV_ALIGN || !akv_add_u64(at, akv_round_up(bytes[id], AKV_ALIGN), &at))
            return false;
    }
    *total_bytes = at;
    return true;
}
