/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress.h - what the host driver (compress.c) and the kernels (compress_*.cu) of compression on the GPU share. The
 * steps and formulas are those of src/codec; what the host decides (plan, water-filling, tables, hulls) is made by its
 * functions.
 */
#ifndef AKV_CUDA_COMPRESS_H
#define AKV_CUDA_COMPRESS_H

#include "cuda/internal.h"

#ifdef __cplusplus
extern "C" {
#endif

#define AKV_COMP_LEAST_SHARED 220000 /* bytes of a block that every kernel fits into: sm_90 and newer have them */
#define AKV_COMP_MAX_DIM 128u    /* head_dim of either side */
#define AKV_COMP_RANGES 16u      /* ranges of a head's tokens, at most, where sums over all are made */
#define AKV_COMP_PARTS 32u       /* the same for the observation */
#define AKV_COMP_TILE 64u        /* tokens of a tile in fp32 */
#define AKV_COMP_ROWS 128u       /* observation rows handled together */
#define AKV_COMP_NEAR_TILE 256u  /* tokens whose nearest anchors one block finds; as AKV_TILE_TOKENS of the CPU */
#define AKV_COMP_COVER_TILE 128u /* tokens of a block of coverage */
#define AKV_COMP_BATCH 64u       /* anchors for coverage of a round, from four times as many candidates */
#define AKV_COMP_GROUPS 16u      /* that choose for themselves */
#define AKV_COMP_JUDGES 1024u    /* at most; half of the CPU's */
#define AKV_COMP_ROUNDS 1528u /* of rotations towards the eigenvectors: 12 sweeps of 127, up to a multiple of 8 */
#define AKV_COMP_NO_ANCHOR 0xffffu
#define AKV_COMP_SPREAD_BEFORE 64u /* as AKV_POOL_BEFORE */

/* One tensor of the cache as the kernels read it. */
typedef struct akv_comp_source {
    const void *data;
    int dtype;
    int vectors; /* rows can be read 16 bytes at a time */
    int64_t stride_head, stride_token, stride_dim;
    int64_t stride_page;
} akv_comp_source;

/* State of a head while anchors are chosen for coverage. */
typedef struct akv_comp_cover {
    uint64_t rng;
    uint32_t num, arrived; /* tokens of the current batch; groups that have chosen */
    uint32_t tokens[AKV_COMP_BATCH];
    double weight[2];
} akv_comp_cover;

/* Levels of one head and side, made by the host from the water-filled tables. */
typedef struct akv_comp_levels {
    uint32_t bits[AKV_MAX_LEVELS];        /* of one residual */
    uint32_t by_width[AKV_MAX_LEVELS][3]; /* coordinates of 4, 2, 1 bits */
    uint8_t coord[AKV_MAX_LEVELS][AKV_COMP_MAX_DIM];
    uint32_t hull_count;
    uint8_t hull_level[AKV_MAX_LEVELS + 1];
    double hull_slope[AKV_MAX_LEVELS + 1];
} akv_comp_levels;

/* How far the bisection of the multiplier is; two turns, since a launch reads what the one before left. */
typedef struct akv_comp_bisection {
    double low[2], high[2];
    uint32_t over[2][128]; /* nodes of a tree of rounds, 1 its root: too many bytes? */
    uint32_t end_over;     /* the same at the upper end */
} akv_comp_bisection;

/* What the device leaves for the host when the spectra are known. */
typedef struct akv_comp_found {
    unsigned long long bad[4]; /* smallest index of what is not finite in keys, values, sampled, queries; or all ones */
    unsigned long long num_residuals[2];
} akv_comp_found;

/* The argument of every kernel. Arrays per side are indexed [side][head ...]. */
typedef struct akv_comp {
    uint64_t S, earlier; /* earlier = S - W */
    uint32_t H, G, W, rows, k, dim[2], pad[2]; /* pad: 64 or 128, row length of fp16 rows */
    uint32_t planes, rotary, style, num_sampled, late_rows, num_levels, index_bits, under[2], cols[2], coords[2];
    float scale, cap, magnitude, inverse_magnitude;
    akv_comp_source source[2], queries, sampled;
    const int32_t *pages; /* [ceil(S / page_tokens)] or NULL */
    uint32_t page_tokens, k_rows; /* k_rows: k rounded up to whole blocks of units */
    int64_t first_position, last_position;
    const int32_t *positions, *sampled_positions;
    const double *inv_freq;
    const uint16_t *order; /* [2][128] coordinates under the basis, then the others */

    uint32_t num_ranges, stat_chunks, cover_tiles, cover_step, blocks; /* coverage looks at every cover_step-th tile */
    uint64_t range_tokens, part_tokens;
    uint32_t num_parts;

    float2 *phase;      /* [S, planes] */
    double *stat_part;  /* [2][H][chunks][2][128] */
    float *mean[2];     /* [H][128] */
    float *unit_of[2];  /* [H][128] */
    uint16_t *rows16[2];/* fp16 [H][S][pad] tokens in anchor space, of length 1; later residuals as they are coded */
    float *energy[2];   /* [H][S] squared lengths of them */
    float *left[2];     /* [H][S] what anchors leave; later squared lengths of residuals */
    float *deviation;   /* [H][S] */
    float *value_sq;    /* [H][S] */
    float *query;       /* [H][rows][128] */
    uint16_t *query16, *output16; /* fp16 [H][rows][128] */
    float *row_sq;      /* [H][rows] squared lengths of the queries */
    double *query_sq;   /* [H] */
    float *late;        /* [H][128][late_rows] in basis order */
    float *part_max, *part_sum; /* [H][parts][rows] */
    float *part_out;    /* [H][parts][rows][128] */
    float *max, *inverse, *output_sq; /* [H][rows] the maximum to base 2 */
    float *score;       /* [H][S] */
    float *pooled;      /* [H][S] */
    uint8_t *mask;      /* [H][S] 1: anchor, 2: and it stays this token */
    uint32_t *given;    /* [H][k] tokens chosen before coverage */
    uint32_t num_given;
    akv_comp_cover *cover; /* [H] */
    float *tile_left[2];   /* [H][cover_tiles] sums of what is left */
    double *cumulated;     /* [H][groups][cover_tiles] */
    uint32_t judges, judge_rows, judge_stride; /* tokens that judge; up to a multiple of 128 */
    uint16_t *own;         /* [H][S] own anchor + 1 of an anchor token, else 0 */
    uint8_t *fixed;        /* [H][k] */
    uint32_t *anchor_token;/* [H][k] */
    float *anchor[2];      /* [H][k][128] */
    uint16_t *unit16[2];   /* fp16 [H][k_rows][pad] */
    float *anchor_sq[2];   /* [H][k] */
    uint16_t *nearest[2];  /* [H][S] */
    float *cosine[2];      /* [H][S] */
    uint32_t *first_member[2]; /* [H][k + 1] of each anchor in the list of members */
    int8_t *coeff[2];      /* [H][S] codes */
    float *moment_part[2]; /* [H][ranges][128][128] */
    float *moment[2];      /* [H][128][128] in basis order */
    float2 *rotation;      /* [2][H][rounds][64] cosines and sines */
    uint32_t *num_rounds;  /* [2][H] */
    float *eigenvalue[2];  /* [H][128] */
    float *direction[2];   /* [H][128][128] eigenvectors as rows; where moment_part was */
    float *rank[2];        /* [H][S] */
    float *sorted[2];      /* [H][S] ranks of each block of 1024, falling; before that the members of anchors */
    float *basis[2];       /* [H][128][128] as stored */
    float *sigma[2];       /* [H][128] */
    double *weight[2];     /* [H][128 + 1] the last: weight of all coordinates */
    double *sums;          /* [2][H][blocks][2] utility, prior; then [2]: the totals */
    akv_comp_levels *levels; /* [H][2] */
    akv_comp_bisection *bisection;
    uint8_t *level[2];     /* [H][S] */
    uint32_t *block_bytes; /* [H][blocks][2] */
    akv_comp_found *found;

    /* what akv_experiment says */
    uint32_t pool_width, sinks, pooled_tokens, all_fixed;
    uint32_t top, top_sinks; /* tokens taken by attention, the first top_sinks in any case */
    float incoherent, decay, pool_weight;
    double query_mix, floor, value_boost;
    uint64_t code_bytes;

    uint8_t *blob; /* the segment's bytes, header left out; and without the codes, which are somewhere else */
    uint8_t *codes;
    uint64_t blob_bytes;
    uint64_t section[AKV_SEC_ROOM];
} akv_comp;

/* Launchers, in the order of the steps. */
cudaError_t akv_comp_rows(const akv_comp *c, cudaStream_t stream);    /* phases, means, fp16 rows, queries */
cudaError_t akv_comp_observe(const akv_comp *c, cudaStream_t stream); /* what the queries attend to */
cudaError_t akv_comp_cover_all(const akv_comp *c, cudaStream_t stream);  /* which tokens are anchors */
cudaError_t akv_comp_cover_rest(const akv_comp *c, cudaStream_t stream); /* of it: those for coverage */
cudaError_t akv_comp_refine(const akv_comp *c, uint32_t rounds, cudaStream_t stream);
cudaError_t akv_comp_nearest(const akv_comp *c, int refining, uint64_t first, uint64_t step, cudaStream_t stream);
/* Free anchors from the tokens of tiles first, first + step, ... that are nearest to them. */
cudaError_t akv_comp_members(const akv_comp *c, uint64_t first, uint64_t step, cudaStream_t stream);
cudaError_t akv_comp_project(const akv_comp *c, cudaStream_t stream); /* coefficients, moments */
cudaError_t akv_comp_bases(const akv_comp *c, cudaStream_t stream);   /* eigenvectors, spectra; utilities */
cudaError_t akv_comp_utilities(const akv_comp *c, cudaStream_t stream);
cudaError_t akv_comp_levels_of(const akv_comp *c, cudaStream_t stream); /* multiplier, levels, places */
cudaError_t akv_comp_code(const akv_comp *c, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
