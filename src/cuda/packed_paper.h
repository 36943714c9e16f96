/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packed_paper.h - the private form of a PLAIN segment (profile paper) on the device. Made at upload (pack_paper.c),
 * never written to disk, free to change. Key dims stand in slots and steps, tokens in spans as in packed.h, which
 * also says what planes of bits and their groups are; here there is one level, in which every coordinate has 2 bits.
 *
 * A row of a key anchor is cut into chunks of 64 bytes, two steps each: lane column c of the tensor core takes 16
 * bytes of a chunk, halves x x y y of its two planes in the first step, then in the second.
 *
 * Value anchors, and the transforms of both sides, stand as operands of the tensor core: tiles of 16 x 16, 32 lanes
 * of 16 bytes each (rows r and r + 8, columns 2c, 2c + 1 and 2c + 8, 2c + 9 for lane 4r + c).
 *
 * Codes. A key group is dim / 8 units: units 2t and 2t + 1 are the upper and the lower bits of coordinates 16t .. 16t
 * + 15. A value group is dim / 8 tiles: rows r and r + 8 of tile t are the upper and the lower bit of coordinate 8t +
 * r. Either is dim / 32 words of a lane, lanes next to each other.
 */
#ifndef AKV_CUDA_PACKED_PAPER_H
#define AKV_CUDA_PACKED_PAPER_H

#include "cuda/packed.h"

/* Words of tokens and of residuals: number in the lower half, fp16 coefficient or scale in the upper one. */
#define AKV_PAPER_WORD(number, half) ((uint32_t)(number) | (uint32_t)(half) << 16)

/* Queries are turned to every so many tokens in fp32; from there on tables of turns in fp16 serve all spans. */
#define AKV_PAPER_HALF 1024u

/*
 * Two rows of anchors are read at a time, and chunks of 64 bytes would meet in the same banks: odd rows take two
 * chunks of one kind, fast or slow, in the other order. Whether a chunk is one of such two; step s is then s ^ 2.
 */
#ifdef __CUDACC__
__host__ __device__ constexpr
#endif
static inline int akv_paper_swaps(int chunk, int steps, int fast_steps)
{
    return (chunk ^ 1) < steps / 2 && ((chunk & ~1) * 2 + 4 <= fast_steps || (chunk & ~1) * 2 >= fast_steps);
}

/* Numbers that belong to one head: powers of two that bring fp16 into its range. */
typedef struct akv_paper_head {
    float key_unit;    /* of the key anchors */
    float value_unit;  /* of the value anchors */
    float gain_unit;   /* of the values' residual scales */
    int32_t coeff_log; /* values' coefficients are at most two to this */
} akv_paper_head;

/* Offsets are from the start of the packed bytes, multiples of 256. side 0 = keys, 1 = values. */
typedef struct akv_paper {
    uint64_t total_bytes;
    uint64_t num_tokens;
    uint32_t num_kv_heads, num_anchors, padded_anchors, dim;
    uint32_t span_tokens, num_spans, steps, fast_steps;
    int32_t first_position;
    uint32_t unused;
    uint64_t heads;  /* akv_paper_head [H] */
    uint64_t keys;   /* fp16 [H, k, dim] in lane order */
    uint64_t values; /* fp16 [H, padded k / 16, dim / 16, 256]: operands, rows = coordinates, columns = anchors */
    /*
     * fp16 [dim / 16, dim / 16, 256]: signs of the Hadamard transform. Keys: rows = coordinates of the transform; values:
     * rows = coordinates of the head.
     */
    uint64_t transform[2];
    uint64_t norms;   /* f32 [dim]: what they are multiplied by */
    uint64_t slots;   /* u16 [dim]: key dim in each slot */
    uint64_t slot_scales; /* f32 [dim]: the rotary embedding's magnitude where it turns */
    /* half2 cos, sin [16 rows, 4, fast_steps, 2]: turns by 0..15 tokens, two planes each, steps as a row takes them */
    uint64_t row_turns;
    uint64_t group_turns; /* half2 cos, sin [64, 4, fast_steps, 2]: turns by 16 g tokens */
    uint64_t slow_turns;  /* half2 cos, sin [16, 4, steps - fast_steps, 2]: turns to the middle of a window */
    uint64_t speeds;      /* half2 [4, steps - fast_steps]: 1024 times the speed of slow planes */
    uint64_t span_turns;  /* f32 cos, sin [num_spans, span / 1024, dim / 2]: turns to every 1024th token */
    uint64_t spans;       /* akv_paper_span [H, num_spans] */
} akv_paper;

typedef struct akv_paper_span {
    /* u32 [2, span] AKV_PAPER_WORD: keys' anchors, then values' in akv_value_place; 0 beyond the last token */
    uint64_t words;
    uint64_t entries[2]; /* u32 [groups, 16] AKV_PAPER_WORD: token in the span */
    uint64_t codes[2];
    uint64_t end;
    uint32_t groups[2];
    uint32_t unused[2];
} akv_paper_span;

#endif
