/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packed.h - the private form of a LADDER segment on the device. Made at upload (pack.c, the only reader of canonical
 * bytes on this path), never written to disk, free to change.
 *
 * Key dims stand in "slots": planes of the rotary embedding sorted by falling speed, eight to a step of 16 slots (x of
 * eight planes, y of the same eight); what does not turn counts as a plane of speed 0. A step whose planes turn by less
 * than SLOW_TURN over half a window of 64 tokens is slow: there the turn inside a window is taken to first order. The
 * first half of the steps counts as fast, or all of them: kernels are compiled for these two.
 *
 * Tokens are cut into spans. A span of one head has per side one word a token (which anchor, which coefficient) and the
 * residuals in groups of 16 of one level, levels ascending: 16 entries, and codes in the order in which lanes feed
 * the tensor core.
 *
 * Keys: every code is a sum of bits, so a group is a matrix of bits, "planes" x 16 tokens, and a query's weight of a
 * plane is what the bit adds. 1 bit: -1 + 2b. 2 bits: -10, -3, 3, 10 = -10 + 13b + 7c. 4 bits: the step's eight bits in
 * two's complement, or, where there are enough of them, tiles of their own. Planes come in units of 16, one byte for
 * each of 32 lanes; two units make a tile of the tensor core. Lane 4r + c holds the planes 4c .. 4c + 3 of tokens r and
 * r + 8, in the nibbles of 16 bits: bit 0 token r, bit 1 token r + 8, bits 2 and 3 the same of the second unit. A byte
 * permutation then makes bytes of them without a mask (span_keys.cuh).
 *
 * Values: 1- and 2-bit codes as bits too, 16 planes x 16 tokens a tile, planes r and r + 8 of a tile in one lane; both
 * bits of a 2-bit code are such a pair, the upper one first. Lane 4r + c of a tile: tokens 2c, 2c + 1 are bits of a
 * lower and an upper half, so that one "and" makes two fp16 numbers of them: bit 0 plane r, bit 1 plane r + 8, bits 2
 * and 3 the same for tokens 2c + 8, 2c + 9; the next tile in bits 4 to 7. Two tiles are 16 bits a lane (the lower
 * halves' byte first), four a word. 4-bit codes are in tiles of 16 coordinates of their own: coordinates r and r + 8,
 * tokens 2c, 2c + 1, 2c + 8, 2c + 9, a word a lane.
 *
 * Value anchors and directions of the values' transform stand as operands of the tensor core: tiles of 16 coordinates
 * x 16 of them, 32 lanes of 8 bytes each (coordinates r and r + 8; 2c, 2c + 1 of r, then of r + 8, then 2c + 8, 2c +
 * 9).
 */
#ifndef AKV_CUDA_PACKED_H
#define AKV_CUDA_PACKED_H

#include <stdint.h>

#define AKV_PACK_WINDOW 64u     /* tokens for which slow steps share one turned query */
#define AKV_PACK_SLOW_TURN 0.06 /* rad over half a window: what first order leaves is below its square / 2 */
#define AKV_PACK_MAX_SPAN 2048u /* an entry names its token, or the place behind the last one, by 12 bits */
#define AKV_PACK_MAX_LEVELS 15u
#define AKV_PACK_WARPS 16u      /* shares of a span's groups of value residuals, equal by work */
#define AKV_PACK_MAX_ANCHORS 4096u

/* Byte of coordinate i of value anchor (or direction) a among the operands. */
static inline uint64_t akv_value_operand(uint32_t dim, uint32_t a, uint32_t i)
{
    const uint32_t column = a % 16, lane = i % 8 * 4 + column % 8 / 2;
    const uint32_t in_lane = i / 16 % 2 * 8 + column / 8 * 4 + i / 8 % 2 * 2 + column % 2;
    return (uint64_t)(a / 16) * 16 * dim + ((i / 32) * 32u + lane) * 16 + in_lane;
}

/* Entry of a residual: token in the span and gain code. Groups are filled up with the token behind the span's last. */
#define AKV_ENTRY(token, gain) ((uint16_t)((token) << 4 | (gain)))

/* Word of a token on one side: anchor and coefficient. */
#define AKV_TOKEN_WORD(anchor, coeff) ((uint16_t)((anchor) | (coeff) << 12))

/*
 * Place of a token's value word in its span. Tokens that a warp adds to the histogram of value anchors together are
 * span / 32 - 1 apart or more: neighbours often share an anchor, and then their additions wait for each other. A
 * warp's tokens lie in different banks of shared memory all the same.
 */
static inline uint32_t akv_value_place(uint32_t token, uint32_t span_tokens)
{
    const uint32_t each = span_tokens / 32, lane = token / each;
    return (token + each - lane) % each * 32 + lane;
}

/*
 * A level of the values. Its codes: tiles of bits, four a word of a lane, two left over as 16 bits; then 4-bit tiles.
 */
typedef struct akv_value_level {
    uint16_t tiles, four;
    uint16_t first_tile; /* of the head's list of planes: tiles of bits first */
    uint16_t unused;
    uint32_t group_bytes;
} akv_value_level;

/* What a row of a value tile adds to a coordinate of the transform. */
typedef struct akv_value_plane {
    float weight; /* for each unit of the tensor core's sum of the row; 0 where filled up */
    float offset; /* for each unit of the sum of all weights: the code whose bits are 0 */
    uint32_t coord;
    uint32_t unused;
} akv_value_plane;

/*
 * A level of the keys. Its codes: units by fours (a word a lane), by two, by one; then 4-bit tiles of 32 coordinates,
 * two words a lane.
 */
typedef struct akv_key_level {
    uint16_t units, four;
    uint16_t first_tile; /* of the head's operands; (units + 1) / 2 + four of this level */
    uint16_t unused;
    uint32_t group_bytes;
    uint32_t first_plane; /* of the head's list of planes: 32 a tile, units first */
} akv_key_level;

typedef struct akv_key_plane {
    /* what the bit, or the step of a 4-bit code, adds for each unit of the coordinate; 0 where filled up */
    float weight;
    uint32_t coord;
} akv_key_plane;

/* Offsets are from the start of the packed bytes, multiples of 256. side 0 = keys, 1 = values. */
typedef struct akv_packed {
    uint64_t total_bytes;
    uint64_t num_tokens;
    uint32_t num_kv_heads, num_anchors, dim[2], coords[2], basis_dim[2], basis_cols[2];
    uint32_t span_tokens, num_spans, num_levels, steps, fast_steps;
    uint32_t value_tiles, key_tiles; /* of all levels of a head together, the most of any */
    uint32_t steps4[2];              /* magnitudes of 4-bit codes as bytes */
    int32_t first_position;
    float magnitude;
    /*
     * u8 (byte + 128); keys: [H, k, dim] in lane order of the steps; values: operands [H, k / 16, dim / 32, 32 lanes,
     * 2 tiles, 8], filled up with zeros
     */
    uint64_t anchors[2];
    uint64_t anchor_scales[2]; /* f32 [H, k] */
    /* f32 [H, dim]; keys in slot order, times the rotary embedding's magnitude where they turn */
    uint64_t units[2];
    uint64_t slots;            /* u16 [dim_k]: key dim in each slot */
    uint64_t inv_freq;         /* f64 [dim_k / 2] by plane in slot order */
    uint64_t row_turns;        /* half2 cos, sin [fast_steps, 16 rows, 4, 2]: turns by 0..15 tokens, two planes each */
    uint64_t fast_turns;       /* half2 cos, sin [span / 32, 4, fast_steps, 2]: turns by 32 w tokens */
    /* half2 cos, sin [span / 64, 4, steps - fast_steps, 2]: turns to the middle of a window */
    uint64_t slow_turns;
    /* half2 [H, fast_steps, 32 lanes, 4]: mean key over the unit, turned by 0..15 tokens, as operand */
    uint64_t mean_rows;
    uint64_t mean_slow;        /* half2 x, y [H, steps - fast_steps, 4]: the same for slow steps, not turned */
    /*
     * f32 cos, sin [num_spans, 2, dim_k / 2]: turns to token 0 of a span and to token 16; slow planes: instead of the
     * second the first's derivative by 1024 tokens
     */
    uint64_t span_turns;
    uint64_t coords_order;     /* u16 [dim_k] COORDS */
    /*
     * operands of bytes + 128; values: as anchors, [H, cols / 16, ...]; keys: the other way round, [H, basis_dim / 16,
     * cols / 32, 32 lanes, 2 tiles, 8]
     */
    uint64_t basis[2];
    uint64_t basis_scales[2];  /* f32 [H, cols] */
    uint64_t key_levels;       /* akv_key_level [H, L] */
    uint64_t key_planes;       /* akv_key_plane [H, key_tiles, 32] */
    /* f32 [H, L, coords]: what a coordinate adds for each of its units when all its bits are 0 */
    uint64_t key_offsets;
    uint64_t value_levels;     /* akv_value_level [H, L] */
    uint64_t value_planes;     /* akv_value_plane [H, value_tiles, 16] */
    uint64_t spans;            /* akv_packed_span [H, num_spans] */
} akv_packed;

typedef struct akv_packed_span {
    /* u16 [2, span] AKV_TOKEN_WORD: keys, then values in akv_value_place; 0 beyond the last token */
    uint64_t words;
    uint64_t entries[2];                         /* u16 [groups, 16] */
    uint64_t codes[2];
    uint64_t end;
    uint16_t groups[2][AKV_PACK_MAX_LEVELS + 1]; /* first group of each level, and their number behind the last */
    uint16_t warp[AKV_PACK_WARPS + 8]; /* values: first group of each share; filled up to a multiple of 16 bytes */
    uint32_t warp_codes[AKV_PACK_WARPS];         /* where its codes begin, in bytes from codes */
    uint32_t key_codes[AKV_PACK_MAX_LEVELS + 1]; /* keys: where the codes of each level begin */
} akv_packed_span;

#endif
