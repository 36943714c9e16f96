/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - the canonical bytes of a segment, the one thing that the codec, attention, the format checks and the
 * reference share. docs/format.md says the same in prose; change both together.
 *
 * A segment is one 64-byte aligned blob: header, then sections, each 64-byte aligned, offsets from the blob's start.
 * In memory the blob is preceded by struct akv_segment (segment.h), whose size is charged to the byte budget too.
 *
 * Layout of the sections (row-major, innermost last; side 0 = keys, 1 = values; dim = d_k or d_v of that side):
 *
 *   INV_FREQ      f64 [rotary_dim / 2]
 *   POSITIONS     i32 [S]                      only when positions are not consecutive
 *   ANCHOR_TOKENS u32 [H, k]                   token index of each anchor, ascending
 *   ANCHORS(side) bf16 [H, k, dim]             keys in anchor space (pre-RoPE unless the flag says post), values as they are
 *   INDEX(side)   u8 (k <= 256) or u16 [H, S]  nearest anchor
 *   COEFF(side)   f16 [H, S]
 *   LEVELS(side)  u8 [H, ceil(S / 8)]          bit p & 7 of byte p >> 3: token p owns a residual
 *   RANKS(side)   u64 [H * blocks + 1]         residuals before each block of AKV_BLOCK_TOKENS tokens (heads in order,
 *                                              blocks = ceil(S / AKV_BLOCK_TOKENS)); the last entry is their number
 *   GAINS(side)   f16 [n]                      one scale per residual; heads in order, tokens ascending inside a head
 *   CODES(side)   u8 [n * code_bytes(dim)]     same order, grouped as below
 *   DENSE(side)   f32/f16/bf16 [H, S, dim]     dense segments only; keys post-RoPE
 *
 * Codes. A head's tokens are cut into blocks of AKV_BLOCK_TOKENS. The residuals of one head and block form a run of n
 * codes, n * code_bytes(dim) bytes. A run is cut into groups of AKV_GROUP_LANES residuals, the last group smaller. A
 * group of g residuals takes g * code_bytes(dim) bytes and stores its coordinates one after the other: coordinate i of
 * residual r is the 2-bit number at bit (i * g + r) * 2 of the group, least significant bits first; unused bits are 0.
 * So in a full group coordinate i is one little-endian 32-bit word and a SIMD lane is a token.
 *
 * A code c in 0..3 means gain * level[c]: Lloyd-Max -1.5104, -0.4528, 0.4528, 1.5104, or with AKV_FLAG_PLAIN_CODES
 * -1, -1/3, 1/3, 1. The coded vector is Hd(sign * r) (r itself with AKV_FLAG_PLAIN_CODES), r being the key residual
 * AFTER the rotary embedding, or the value residual. Signs come from akv_signs(seed, side); Hd is the orthonormal
 * Walsh-Hadamard transform over the greedy power-of-two blocks of the dimension, largest first (112 = 64 + 32 + 16).
 */
#ifndef AKV_LAYOUT_H
#define AKV_LAYOUT_H

#include <stdint.h>

#define AKV_SEGMENT_MAGIC 0x53564b41u /* "AKVS" */
#define AKV_SEGMENT_MAJOR 1u
#define AKV_SEGMENT_MINOR 0u

#define AKV_BLOCK_TOKENS 1024u
#define AKV_GROUP_LANES 16u
#define AKV_ALIGN 64u

enum { AKV_SIDE_K = 0, AKV_SIDE_V = 1, AKV_SIDES = 2 };

/* Section ids; per-side ones are id + side. */
enum akv_section_id {
    AKV_SEC_INV_FREQ = 0,
    AKV_SEC_POSITIONS = 1,
    AKV_SEC_ANCHOR_TOKENS = 2,
    AKV_SEC_ANCHORS = 3,
    AKV_SEC_INDEX = 5,
    AKV_SEC_COEFF = 7,
    AKV_SEC_LEVELS = 9,
    AKV_SEC_GAINS = 11,
    AKV_SEC_CODES = 13,
    AKV_SEC_DENSE = 15,
    AKV_SEC_RANKS = 17,
    AKV_SEC_COUNT = 19,
    AKV_SEC_ROOM = 22 /* entries in the header; the unused ones are 0 */
};

/* akv_header.flags */
#define AKV_FLAG_ANCHORS_POST_ROPE 1u /* key anchors were projected after the rotation: no turn at decode */
#define AKV_FLAG_PLAIN_CODES 2u       /* uniform levels, no Hadamard rotation */
#define AKV_FLAGS_KNOWN 3u

typedef struct akv_section {
    uint64_t offset; /* from the blob's start; 0 when absent */
    uint64_t bytes;  /* without padding; 0 when absent */
} akv_section;

/* Little-endian, no implicit padding; 512 bytes. */
typedef struct akv_header {
    uint32_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t header_bytes; /* sizeof(akv_header) of the writer */
    uint32_t required;     /* feature bits a reader must know; 0 in 1.0 */
    uint64_t total_bytes;  /* of the blob, a multiple of 64 */
    uint64_t num_tokens;
    uint64_t budget_bytes; /* 0 for dense segments that no budget governed */
    uint64_t seed;         /* of the sign flips (and of the random anchors) */
    uint64_t num_residuals[AKV_SIDES];
    double sm_scale;
    double logit_softcap;
    double magnitude;
    uint32_t kind;         /* akv_segment_kind */
    uint32_t dense_reason; /* akv_dense_reason */
    uint32_t profile;      /* akv_profile, 0 for dense */
    uint32_t flags;
    uint32_t num_kv_heads;
    uint32_t gqa_group;
    uint32_t head_dim[AKV_SIDES];
    uint32_t rotary_dim;
    uint32_t rope_style;
    uint32_t num_anchors;
    uint32_t num_queries;  /* W */
    int32_t first_position;
    int32_t last_position;
    uint32_t dense_dtype;  /* akv_dtype of the DENSE sections */
    uint32_t num_sections; /* AKV_SEC_COUNT of the writer */
    uint32_t optional;     /* feature bits a reader may ignore */
    uint32_t reserved;     /* 0 */
    akv_section sections[AKV_SEC_ROOM];
} akv_header;

_Static_assert(sizeof(akv_header) == 512, "the header is part of the format");



/* Bytes of one 2-bit code of `dim` coordinates. */
static inline uint32_t akv_code_bytes(uint32_t dim)
{
    return (dim * 2u + 7u) / 8u;
}

#endif
