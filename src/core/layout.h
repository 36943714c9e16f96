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
 * Both codings:
 *   INV_FREQ      f64 [rotary_dim / 2]
 *   POSITIONS     i32 [S]                      only when positions are not consecutive
 *   DENSE(side)   f32/f16/bf16 [H, S, dim]     dense segments only (and nothing else); keys post-RoPE
 *
 * Coding PLAIN (profile paper):
 *   ANCHOR_TOKENS u32 [H, k]                   token index of each anchor, ascending
 *   ANCHORS(side) bf16 [H, k, dim]             keys in anchor space (pre-RoPE unless the flag says post), values as
 *   they are INDEX(side)   u8 (k <= 256) or u16 [H, S]  nearest anchor
 *   COEFF(side)   f16 [H, S]
 *   LEVELS(side)  u8 [H, ceil(S / 8)]          bit p & 7 of byte p >> 3: token p owns a residual
 *   RANKS(side)   u64 [H * blocks + 1]         residuals before each block of AKV_BLOCK_TOKENS tokens (heads in order,
 *                                              blocks = ceil(S / AKV_BLOCK_TOKENS)); the last entry is their number
 *   GAINS(side)   f16 [n]                      one scale per residual; heads in order, tokens ascending inside a head
 *   CODES(side)   u8 [n * code_bytes(dim)]     same order, grouped as below
 *
 * Coding LADDER (profile default); L = num_levels, C(side) = basis_cols + dim - basis_dim coordinates:
 *   MEAN          bf16 [H, d_k]                mean key before the rotary embedding
 *   ANCHORS(side) i8 [H, k, dim]               centred keys before the rotary embedding; values
 *   ANCHOR_SCALES(side) f16 [H, k]             coordinate i of an anchor is scale * UNITS[i] * its byte
 *   UNITS(side)   bf16 [H, dim]                typical size of each coordinate; keys: equal for the two of a RoPE plane
 *   INDEX(side)   bits [H, ceil(S * index_bits / 8)], then 4 bytes of 0: little-endian numbers of index_bits bits
 *   COEFF(side)   nibbles [H, ceil(S / 2)]     two's complement, low nibble first: coefficient = code * 2/7; -8 = this token
 *                                              is the anchor (coefficient 1)
 *   COORDS        u16 [d_k]                    the key coordinates that the basis covers, then the others
 *   BASIS(side)   i8 [H, basis_cols, basis_dim], BASIS_SCALES(side) f32 [H, basis_cols]: columns of the transform
 *   SIGMAS(side)  bf16 [H, C]                  standard deviation of each coordinate
 *   TABLES(side)  u8 [H, L, ceil(C / 4)]       bits of coordinate c at level l: 2-bit entry c (0, 1, 2, 3 = 0, 1, 2, 4 bits)
 *   LEVELS(side)  u8 [H, planes, ceil(S / 8)]  level of each token, bit-plane by bit-plane, planes = bits of L
 *   RANKS(k)      u64 [H * blocks * 2 + 1]     where the codes of (head, block, side) begin in CODES(k), in bytes
 *   CODES(k)      u8 [code_bytes]              of both sides
 *
 * Codes of PLAIN. A head's tokens are cut into blocks of AKV_BLOCK_TOKENS. The residuals of one head and block form a
 * run of n codes, n * code_bytes(dim) bytes. A run is cut into groups of AKV_GROUP_LANES residuals, the last group
 * smaller. A group of g residuals takes g * code_bytes(dim) bytes and stores its coordinates one after the other:
 * coordinate i of residual r is the 2-bit number at bit (i * g + r) * 2 of the group, least significant bits first;
 * unused bits are 0. So in a full group coordinate i is one little-endian 32-bit word and a SIMD lane is a token.
 *
 * A code c in 0..3 means gain * level[c]: Lloyd-Max -1.5104, -0.4528, 0.4528, 1.5104, or with AKV_FLAG_PLAIN_CODES
 * -1, -1/3, 1/3, 1. The coded vector is Hd(sign * r) (r itself with AKV_FLAG_PLAIN_CODES), r being the key residual
 * AFTER the rotary embedding, or the value residual. Signs come from akv_signs(seed, side); Hd is the orthonormal
 * Walsh-Hadamard transform over the greedy power-of-two blocks of the dimension, largest first (112 = 64 + 32 + 16).
 *
 * Codes of LADDER. The residuals of one (head, block, side) are sorted into runs, one per level 1..L that occurs,
 * tokens ascending inside a run. A run of n residuals is: gains, ceil(n / 2) bytes, nibbles, gain = 2^((nibble - 8) /
 * 3); then groups of up to AKV_GROUP_LANES residuals. A group of g residuals takes ceil(g * b / 8) bytes, b being the
 * level's bits per residual (the sum of its table row): coordinate by coordinate (those of 4 bits ascending, then of 2,
 * then of 1: so equal widths are neighbours and a full group's coordinates of one width are whole words), residual by
 * residual, numbers of the coordinate's bits, least significant first. A number c of n bits means gain * sigma *
 * akv_level_value(c, n), the n-bit Lloyd-Max quantiser of the unit Gaussian rounded to whole steps, ascending. The
 * coded vector is the residual in the transform's coordinates; for keys AFTER the rotary embedding.
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
    AKV_SEC_MEAN = 19,
    AKV_SEC_ANCHOR_SCALES = 20,
    AKV_SEC_COORDS = 22,
    AKV_SEC_BASIS = 23,
    AKV_SEC_BASIS_SCALES = 25,
    AKV_SEC_SIGMAS = 27,
    AKV_SEC_TABLES = 29,
    AKV_SEC_UNITS = 31,
    AKV_SEC_COUNT = 33,
    AKV_SEC_ROOM = 34 /* entries in the header; the unused ones are 0 */
};

/* akv_header.flags */
#define AKV_FLAG_ANCHORS_POST_ROPE 1u /* key anchors were projected after the rotation: no turn at decode */
#define AKV_FLAG_PLAIN_CODES 2u       /* uniform levels, no Hadamard rotation */
#define AKV_FLAGS_KNOWN 3u

typedef struct akv_section {
    uint64_t offset; /* from the blob's start; 0 when absent */
    uint64_t bytes;  /* without padding; 0 when absent */
} akv_section;

/* akv_header.coding */
enum akv_coding { AKV_CODING_PLAIN = 0, AKV_CODING_LADDER = 1 };

#define AKV_MAX_LEVELS 15u

/* Little-endian, no implicit padding; 768 bytes. */
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
    uint32_t coding;       /* akv_coding */
    uint64_t code_bytes;   /* LADDER only, like all that follows: bytes of CODES */
    uint32_t num_levels;   /* besides "no residual" */
    uint32_t index_bits;
    uint32_t basis_dim[AKV_SIDES];
    uint32_t basis_cols[AKV_SIDES];
    uint32_t reserved[8];  /* 0 */
    akv_section sections[AKV_SEC_ROOM];
} akv_header;

_Static_assert(sizeof(akv_header) == 768, "the header is part of the format");




/* Bytes of one PLAIN code of `dim` coordinates. */
static inline uint32_t akv_code_bytes(uint32_t dim)
{
    return (dim * 2u + 7u) / 8u;
}

/* Bit-planes that hold a level 0..num_levels. */
static inline uint32_t akv_level_planes(uint32_t num_levels)
{
    uint32_t planes = 0;
    while (num_levels >> planes != 0)
        planes++;
    return planes;
}

/* Coordinates of a LADDER side. */
static inline uint32_t akv_num_coords(const akv_header *h, int side)
{
    return h->basis_cols[side] + h->head_dim[side] - h->basis_dim[side];
}

#endif
