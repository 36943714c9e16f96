/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handmade.h - segments written field by field, without the encoder, so that the reader is tested against the format's
 * definition and not against the encoder's habits.
 */
#ifndef AKV_TEST_HANDMADE_H
#define AKV_TEST_HANDMADE_H

#include "core/layout.h"
#include "core/sizes.h"

#include <stdlib.h>

enum { HAND_S = 37, HAND_H = 2, HAND_K = 5 };

static inline void *hand_section(uint8_t *blob, int id)
{
    return blob + ((akv_header *)(void *)blob)->sections[id].offset;
}

/* The fields that both kinds share. */
static inline akv_header hand_header(uint32_t kind)
{
    akv_header h;
    memset(&h, 0, sizeof h);
    h.magic = AKV_SEGMENT_MAGIC;
    h.major = AKV_SEGMENT_MAJOR;
    h.minor = AKV_SEGMENT_MINOR;
    h.header_bytes = sizeof h;
    h.num_tokens = HAND_S;
    h.seed = 7;
    h.sm_scale = 0.35;
    h.magnitude = 1.0;
    h.kind = kind;
    h.num_kv_heads = HAND_H;
    h.gqa_group = 3;
    h.head_dim[AKV_SIDE_K] = 8;
    h.head_dim[AKV_SIDE_V] = 6; /* not a multiple of 4: codes have unused bits */
    h.rotary_dim = 8;
    h.num_queries = 4;
    h.first_position = 10;
    h.last_position = 10 + HAND_S - 1;
    h.num_sections = AKV_SEC_COUNT;
    return h;
}

static inline uint8_t *hand_alloc(const akv_header *h)
{
    uint8_t *blob = aligned_alloc(AKV_ALIGN, h->total_bytes);
    if (blob == NULL)
        exit(2);
    memset(blob, 0, h->total_bytes);
    memcpy(blob, h, sizeof *h);
    return blob;
}

/*
 * S = 37 tokens, anchors 0, 9, 18, 27, 36 in every head, residuals at the multiples of 4 that are no anchors on the key
 * side and at the odd tokens below 23 that are no anchors on the value side. With positions: 10, 12, 14, ...
 */
static inline uint8_t *hand_compressed(bool with_positions, size_t *bytes)
{
    akv_header h = hand_header(AKV_SEGMENT_COMPRESSED);
    bool owns[AKV_SIDES][HAND_S];
    for (uint32_t p = 0; p < HAND_S; p++) {
        owns[AKV_SIDE_K][p] = p % 9 != 0 && p % 4 == 0;
        owns[AKV_SIDE_V][p] = p % 9 != 0 && p % 2 == 1 && p < 23;
        for (int side = 0; side < AKV_SIDES; side++)
            h.num_residuals[side] += owns[side][p] ? HAND_H : 0;
    }
    h.profile = AKV_PROFILE_PAPER;
    h.num_anchors = HAND_K;
    h.budget_bytes = 10000;
    if (with_positions)
        h.last_position = 10 + 2 * (HAND_S - 1);
    akv_layout_sections(&h, with_positions);
    uint8_t *blob = hand_alloc(&h);
    *bytes = h.total_bytes;

    double *inv_freq = hand_section(blob, AKV_SEC_INV_FREQ);
    for (uint32_t j = 0; j < h.rotary_dim / 2; j++)
        inv_freq[j] = 1.0 / (double)(1u << j);
    if (with_positions)
        for (int32_t p = 0; p < HAND_S; p++)
            ((int32_t *)hand_section(blob, AKV_SEC_POSITIONS))[p] = 10 + 2 * p;
    for (uint32_t i = 0; i < HAND_H * HAND_K; i++)
        ((uint32_t *)hand_section(blob, AKV_SEC_ANCHOR_TOKENS))[i] = i % HAND_K * 9;
    for (int side = 0; side < AKV_SIDES; side++) {
        uint16_t *anchors = hand_section(blob, AKV_SEC_ANCHORS + side);
        for (uint64_t i = 0; i < h.sections[AKV_SEC_ANCHORS + side].bytes / 2; i++)
            anchors[i] = akv_f32_to_bf16((float)(i % 13) - 6.0f);
        for (uint32_t i = 0; i < HAND_H * HAND_S; i++) {
            uint32_t p = i % HAND_S, head = i / HAND_S;
            ((uint8_t *)hand_section(blob, AKV_SEC_INDEX + side))[i] = (uint8_t)((p + 4) / 9 % HAND_K);
            ((uint16_t *)hand_section(blob, AKV_SEC_COEFF + side))[i] = akv_f32_to_f16(p % 9 == 0 ? 1.0f : 0.5f);
            if (owns[side][p])
                ((uint8_t *)hand_section(blob, AKV_SEC_LEVELS + side))[head * ((HAND_S + 7) / 8) + p / 8] |=
                    (uint8_t)(1u << (p % 8));
        }
        uint64_t *ranks = hand_section(blob, AKV_SEC_RANKS + side); /* one block of 1024 tokens a head */
        for (uint32_t head = 0; head <= HAND_H; head++)
            ranks[head] = h.num_residuals[side] / HAND_H * head;
        for (uint64_t i = 0; i < h.num_residuals[side]; i++)
            ((uint16_t *)hand_section(blob, AKV_SEC_GAINS + side))[i] = akv_f32_to_f16(0.25f);
        uint8_t *codes = hand_section(blob, AKV_SEC_CODES + side);
        if (side == AKV_SIDE_K) /* every bit used */
            memset(codes, 0xb1, h.sections[AKV_SEC_CODES + side].bytes);
    }
    return blob;
}

static inline uint8_t *hand_dense(akv_dtype dtype, size_t *bytes)
{
    akv_header h = hand_header(AKV_SEGMENT_DENSE);
    h.dense_reason = AKV_DENSE_REQUESTED;
    h.dense_dtype = dtype;
    akv_layout_sections(&h, false);
    uint8_t *blob = hand_alloc(&h);
    *bytes = h.total_bytes;
    for (int side = 0; side < AKV_SIDES; side++) {
        uint64_t n = h.sections[AKV_SEC_DENSE + side].bytes / akv_dtype_bytes(dtype);
        void *x = hand_section(blob, AKV_SEC_DENSE + side);
        for (uint64_t i = 0; i < n; i++)
            if (dtype == AKV_F32)
                ((float *)x)[i] = (float)(i % 7);
            else
                ((uint16_t *)x)[i] =
                    dtype == AKV_F16 ? akv_f32_to_f16((float)(i % 7)) : akv_f32_to_bf16((float)(i % 7));
    }
    return blob;
}

#endif
