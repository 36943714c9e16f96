/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packed.h - the private form of a LADDER segment on the device. Made at upload (pack.c, the only reader of canonical bytes on
 * this path), never written to disk, free to change.
 *
 * Key dims stand in "slots": planes of the rotary embedding sorted by falling speed, eight to a step of 16 slots
 * (x of eight planes, y of the same eight); what does not turn counts as a plane of speed 0. A step whose planes turn by less
 * than SLOW_TURN over half a window of 64 tokens is slow: there the turn inside a window is taken to first order. The first half
 * of the steps counts as fast, or all of them: kernels are compiled for these two.
 *
 * Tokens are cut into spans. A span of one head has, side by side: anchor indices, coefficients, and per side the residuals
 * in groups of 16 of one level, levels ascending. A group is 16 entries and then tiles of 16 coordinates, each tile of one
 * width: 4-bit tiles (the last may be a half one, 8 coordinates), 2-bit ones (1-bit coordinates may fill the last), 1-bit
 * ones. A tile holds 8 codes for each of 32 lanes: what lane 4r + c feeds into the tensor core. Keys: tokens r and r + 8, coordinates
 * 4c .. 4c + 3. Values: coordinates r and r + 8, tokens 2c, 2c + 1, 2c + 8, 2c + 9.
 */
#ifndef AKV_CUDA_PACKED_H
#define AKV_CUDA_PACKED_H

#include <stdint.h>

#define AKV_PACK_WINDOW 64u     /* tokens for which slow steps share one turned query */
#define AKV_PACK_SLOW_TURN 0.06 /* rad over half a window: what first order leaves is below its square / 2 */
#define AKV_PACK_MAX_SPAN 2048u /* an entry names its token by 11 bits */
#define AKV_PACK_MAX_LEVELS 15u
#define AKV_PACK_MAX_TILES 20u  /* of one level: 256 / 16, one partly filled for each width */
#define AKV_PACK_WARPS 8u       /* of a thread block; residual groups are shared out by their work */
#define AKV_PACK_MAX_ANCHORS 8192u

/* Entry of a residual: token in the span, gain code, and whether there is one (groups are filled up). */
#define AKV_ENTRY(token, gain) ((uint16_t)((token) | (gain) << 11 | 0x8000u))

typedef struct akv_level_tiles {
    uint8_t four, half, two, one; /* tiles by width, in this order */
    uint32_t group_bytes;         /* of codes */
} akv_level_tiles;

/* Offsets are from the start of the packed bytes, multiples of 256. side 0 = keys, 1 = values. */
typedef struct akv_packed {
    uint64_t total_bytes;
    uint64_t num_tokens;
    uint32_t num_kv_heads, num_anchors, dim[2], coords[2], basis_dim[2], basis_cols[2];
    uint32_t span_tokens, num_spans, num_levels, steps, fast_steps;
    uint32_t most_tiles; /* tiles of all levels of a head and side together, the most of any */
    uint32_t steps4[2], steps2, steps1; /* level steps as bytes: magnitudes of 4-bit codes, 2- and 1-bit ones ascending */
    uint32_t halves2, halves1;          /* 2- and 1-bit steps as upper bytes of fp16 */
    int32_t first_position;
    float magnitude;
    uint64_t anchors[2];       /* u8 (byte + 128) [H, k, dim]; keys: in lane order of the steps; values: own order */
    uint64_t anchor_scales[2]; /* f32 [H, k] */
    uint64_t units[2];         /* f32 [H, dim]; keys in slot order, times the rotary embedding's magnitude where they turn */
    uint64_t mean;             /* f32 [H, dim_k] in slot order, over the unit */
    uint64_t slots;            /* u16 [dim_k]: key dim in each slot */
    uint64_t inv_freq;         /* f64 [dim_k / 2] by plane in slot order */
    uint64_t row_turns;        /* half2 cos, sin [fast_steps, 16 rows, 4, 2]: turns by 0..15 tokens, two planes each */
    uint64_t fast_turns;       /* half2 cos, sin [fast_steps, span / 16, 4, 2]: turns by 16 w tokens */
    uint64_t slow_turns;       /* half2 cos, sin [steps - fast_steps, span / 64, 4, 2]: turns by 64 w + 32 tokens */
    uint64_t coords_order;     /* u16 [dim_k] COORDS */
    uint64_t basis[2];         /* i8 [H, cols, basis_dim] */
    uint64_t basis_scales[2];  /* f32 [H, cols] */
    uint64_t levels[2];        /* akv_level_tiles [H, L] */
    uint64_t tile_coords[2];   /* u16 [H, L, MAX_TILES, 16]: coordinate, 0xffff = filled up */
    uint64_t tile_scales[2];   /* f32 [H, L, MAX_TILES, 16]: sigma x unit of the stored steps; 0 where filled up */
    uint64_t spans;            /* akv_packed_span [H, num_spans] */
} akv_packed;

typedef struct akv_packed_span {
    uint64_t index[2];                       /* u16 [span] */
    uint64_t coeff;                          /* u8 [span]: keys low nibble, values high */
    uint64_t entries[2];                     /* u16 [groups, 16] */
    uint64_t codes[2];
    uint64_t end;
    uint16_t groups[2][AKV_PACK_MAX_LEVELS + 1]; /* first group of each level, and their number behind the last */
    uint16_t warp[2][AKV_PACK_WARPS + 1];        /* first group of each warp */
    uint32_t warp_codes[2][AKV_PACK_WARPS];      /* where its codes begin, in bytes from codes */
} akv_packed_span;

#endif
