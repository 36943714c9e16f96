/* SPDX-License-Identifier: Apache-2.0 */
/* sizes.c - section sizes and shape limits; see sizes.h and layout.h. */
#include "core/sizes.h"

akv_status akv_check_shape(const akv_shape *s, akv_diag *diag)
{
    if (s == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "shape must not be NULL");
    if (s->struct_size < sizeof *s)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_shape has struct_size %zu; call akv_shape_init first",
                        s->struct_size);
    if (s->num_tokens == 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_tokens is 0; there is nothing to compress");
    if (s->num_tokens > AKV_MAX_TOKENS)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_tokens is %llu; at most 2^40 are possible",
                        (unsigned long long)s->num_tokens);
    if (s->num_kv_heads == 0 || s->num_kv_heads > AKV_MAX_KV_HEADS ||
        s->num_tokens * s->num_kv_heads > AKV_MAX_HEAD_TOKENS)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "num_kv_heads is %u; it must be 1..%u, and tokens x heads at most 2^48", s->num_kv_heads,
                        AKV_MAX_KV_HEADS);
    if (s->gqa_group == 0 || s->gqa_group > AKV_MAX_GQA_GROUP)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "gqa_group is %u; query heads per KV head must be 1..%u",
                        s->gqa_group, AKV_MAX_GQA_GROUP);
    const uint32_t dims[2] = {s->head_dim_k, s->head_dim_v};
    for (int side = 0; side < 2; side++)
        if (dims[side] < 2 || dims[side] > AKV_MAX_HEAD_DIM || dims[side] % 2 != 0)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "head_dim_%c is %u; it must be even and 2..%u",
                            side ? 'v' : 'k', dims[side], AKV_MAX_HEAD_DIM);
    if (s->rotary_dim % 2 != 0 || s->rotary_dim > s->head_dim_k)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "rotary_dim is %u; it must be even and at most head_dim_k = %u",
                        s->rotary_dim, s->head_dim_k);
    if (s->num_queries == 0 || s->num_queries > AKV_MAX_QUERIES)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "num_queries is %u; observation queries must be 1..%u (32 is usual)", s->num_queries,
                        AKV_MAX_QUERIES);
    if ((unsigned)s->dtype > AKV_BF16)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "dtype is %d; it must be AKV_F32, AKV_F16 or AKV_BF16",
                        (int)s->dtype);
    return AKV_OK;
}

void akv_layout_sections(akv_header *h, bool has_positions)
{
    uint64_t S = h->num_tokens, H = h->num_kv_heads, k = h->num_anchors;
    uint64_t bytes[AKV_SEC_ROOM] = {0};

    const uint64_t blocks = akv_div_up(S, AKV_BLOCK_TOKENS);
    const bool ladder = h->coding == AKV_CODING_LADDER;
    if (h->kind == AKV_SEGMENT_COMPRESSED) {
        bytes[AKV_SEC_INV_FREQ] = (uint64_t)h->rotary_dim / 2 * 8;
        bytes[AKV_SEC_POSITIONS] = has_positions ? S * 4 : 0;
        bytes[AKV_SEC_ANCHOR_TOKENS] = ladder ? 0 : H * k * 4;
    }
    for (int side = 0; side < AKV_SIDES; side++) {
        uint64_t dim = h->head_dim[side], n = h->num_residuals[side];
        if (h->kind == AKV_SEGMENT_DENSE) {
            bytes[AKV_SEC_DENSE + side] = H * S * dim * akv_dtype_bytes((akv_dtype)h->dense_dtype);
        } else if (!ladder) {
            bytes[AKV_SEC_ANCHORS + side] = H * k * dim * 2;
            bytes[AKV_SEC_INDEX + side] = H * S * (k <= 256 ? 1 : 2);
            bytes[AKV_SEC_COEFF + side] = H * S * 2;
            bytes[AKV_SEC_LEVELS + side] = H * akv_div_up(S, 8);
            bytes[AKV_SEC_RANKS + side] = (H * blocks + 1) * 8;
            bytes[AKV_SEC_GAINS + side] = n * 2;
            bytes[AKV_SEC_CODES + side] = n * akv_code_bytes((uint32_t)dim);
        } else {
            uint64_t cols = h->basis_cols[side], coords = akv_num_coords(h, side);
            bytes[AKV_SEC_ANCHORS + side] = H * k * dim;
            bytes[AKV_SEC_ANCHOR_SCALES + side] = H * k * 2;
            bytes[AKV_SEC_UNITS + side] = H * dim * 2;
            bytes[AKV_SEC_INDEX + side] = H * akv_div_up(S * h->index_bits, 8) + 4;
            bytes[AKV_SEC_COEFF + side] = H * akv_div_up(S, 2);
            bytes[AKV_SEC_BASIS + side] = H * cols * h->basis_dim[side];
            bytes[AKV_SEC_BASIS_SCALES + side] = H * cols * 4;
            bytes[AKV_SEC_SIGMAS + side] = H * coords * 2;
            bytes[AKV_SEC_TABLES + side] = H * h->num_levels * akv_div_up(coords, 4);
            bytes[AKV_SEC_LEVELS + side] = H * akv_level_planes(h->num_levels) * akv_div_up(S, 8);
        }
    }
    if (h->kind == AKV_SEGMENT_COMPRESSED && ladder) {
        bytes[AKV_SEC_MEAN] = H * h->head_dim[AKV_SIDE_K] * 2;
        bytes[AKV_SEC_COORDS] = (uint64_t)h->head_dim[AKV_SIDE_K] * 2;
        bytes[AKV_SEC_RANKS] = (H * blocks * 2 + 1) * 8;
        bytes[AKV_SEC_CODES] = h->code_bytes;
    }

    uint64_t at = sizeof(akv_header);
    for (int id = 0; id < AKV_SEC_ROOM; id++) {
        h->sections[id].bytes = bytes[id];
        h->sections[id].offset = bytes[id] == 0 ? 0 : at;
        at += akv_round_up(bytes[id], AKV_ALIGN);
    }
    h->total_bytes = at;
}
