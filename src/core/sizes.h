/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sizes.h - what a segment's bytes must be, given its shape: one formula for planner, writers and the hostile reader.
 */
#ifndef AKV_SIZES_H
#define AKV_SIZES_H

#include "core/base.h"
#include "core/layout.h"

/* Limits that keep every product below 2^63. */
#define AKV_MAX_TOKENS (UINT64_C(1) << 40)
#define AKV_MAX_KV_HEADS (1u << 16)
#define AKV_MAX_GQA_GROUP (1u << 12)
#define AKV_MAX_HEAD_TOKENS (UINT64_C(1) << 48) /* S * H */
#define AKV_MAX_HEAD_DIM 1024u
#define AKV_MAX_QUERIES 1024u
#define AKV_MAX_ANCHORS 65535u

/* AKV_OK when the shape is within the limits above, else AKV_E_INVALID_ARGUMENT with a sentence. */
akv_status akv_check_shape(const akv_shape *shape, akv_diag *diag);

/*
 * Fill sections[] and total_bytes of a header whose kind, num_tokens, num_kv_heads, head_dim, rotary_dim, num_anchors,
 * num_residuals and dense_dtype are set. The shape must be within the limits.
 */
void akv_layout_sections(akv_header *header, bool has_positions);

/* Same as dense 16-bit keys and values: the yardstick of every ratio. */
static inline uint64_t akv_dense_bytes(uint64_t num_tokens, uint32_t num_kv_heads, uint32_t head_dim_k,
                                       uint32_t head_dim_v)
{
    return num_tokens * num_kv_heads * ((uint64_t)head_dim_k + head_dim_v) * 2;
}

#endif
