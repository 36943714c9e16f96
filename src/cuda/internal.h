/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - what the host files (C) and the kernels (CUDA) of the GPU back end share. Everything here is plain data.
 */
#ifndef AKV_CUDA_INTERNAL_H
#define AKV_CUDA_INTERNAL_H

#if defined(__cplusplus) && !defined(_Static_assert)
#  define _Static_assert static_assert
#endif

#include "anchorkv/akv_cuda.h"
#include "core/layout.h"
#include "cuda/packed_paper.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens of one item of the plain path: canonical blocks, dense segments, tails. */
#define AKV_CUDA_PART_TOKENS AKV_BLOCK_TOKENS
/* Of a tail: a block reads its tokens one after another, so that one of 1024 took longer than all compressed ones before it. */
#define AKV_CUDA_TAIL_TOKENS 64u
#define AKV_CUDA_PART_ROWS 8u   /* query rows (head of the group x query token) handled together there */

/* Values of code numbers and gains, filled from core/ladder.h on the host: one source for CPU and GPU. */
typedef struct akv_code_values {
    float level1[2];
    float level2[4];
    float level4[16];
    float plain[4];
    float uniform[4];
    float gain[16];
    float coeff_step;
    int coeff_self;
} akv_code_values;

enum akv_item_kind { AKV_ITEM_TAIL = 0, AKV_ITEM_DENSE = 1, AKV_ITEM_PLAIN = 2, AKV_ITEM_LADDER = 3 };

/* One piece of work for every KV head: a range of tokens of one source. */
typedef struct akv_item {
    const uint8_t *data; /* device: canonical bytes, or a packed segment; NULL for a tail */
    uint64_t begin;
    uint32_t count;
    uint32_t kind;       /* akv_item_kind */
    uint32_t sequence;
    uint32_t part;       /* its slot among the partial states */
} akv_item;

/*
 * A run of spans of one head of a packed segment, with all that a block has to know before it can ask for anything:
 * every look-up less at its start counts. A thread block works off a list of these.
 */
typedef struct akv_span_item {
    const uint8_t *packed;
    uint32_t head;
    uint32_t first_span, num_spans;
    uint32_t part; /* its slot among the partial states */
    uint32_t pool;
    uint32_t unused;
    akv_packed head_of_packed; /* what packed begins with */
} akv_span_item;

_Static_assert(sizeof(akv_span_item) % 16 == 0, "copied in pieces of 16 bytes");

#define AKV_SPAN_STATIC 512u /* a block's shared memory besides what is asked for at its launch, at most */

/* A packed segment of a sequence: all its items share prepared queries. */
typedef struct akv_pool {
    const uint8_t *packed;
    uint32_t sequence;
    uint32_t unused;
    akv_packed head_of_packed; /* what packed begins with */
} akv_pool;

_Static_assert(sizeof(akv_pool) % 16 == 0, "copied in pieces of 16 bytes");

/*
 * Queries of one (pool, KV head, chunk of rows) as queries.cu leaves them for the span kernel: byte offsets. Prepared
 * once a step, since in every block they cost a quarter of the time (18 of 74 us at 64K tokens).
 */
typedef struct akv_query_layout {
    uint32_t rows;   /* f32 [rows, dim]: in slot order, times the anchors' units, sized for fp16 */
    uint32_t norms;  /* f32 [rows]: logit of those queries to logit */
    /* float4 [levels, rows]: factor of the bits' sums, what tokens r and r + 8 add, factor of the 4-bit codes' sums */
    uint32_t levels;
    uint32_t tiles;  /* uint2 [key tiles, rows / 4, 32 lanes]: operands, 16-bit whole numbers in two bytes */
    uint32_t total;
} akv_query_layout;

#ifdef __CUDACC__
__host__ __device__
#endif
static inline akv_query_layout akv_lay_out_queries(uint32_t dim, uint32_t rows, uint32_t levels, uint32_t tiles)
{
    akv_query_layout l;
    l.rows = 0;
    l.norms = rows * dim * 4;
    l.levels = l.norms + 32;
    l.tiles = l.levels + levels * rows * 16;
    l.total = l.tiles + tiles * (rows / 4) * 256;
    return l;
}

/* A tail as kernels see it. */
typedef struct akv_tail {
    const void *keys, *values;
    int64_t stride_head[2], stride_token[2];
    const float *mask;
    int64_t mask_stride;
    uint64_t tokens;
} akv_tail;

/* Partial states of sequence b: slots [first[b], first[b + 1]). */
typedef struct akv_partials {
    float *max; /* [slots, H, rows] */
    float *sum;
    float *acc; /* [slots, H, rows, d_v], weights relative to max */
} akv_partials;

#define AKV_CUDA_BLOCKS 132u /* one on each of an H200's processors; fixed, so that items depend on shapes only */

/*
 * A run of spans of one head of a PLAIN segment, with all that a block has to know before it can ask for anything:
 * every look-up less at its start counts.
 */
typedef struct akv_paper_item {
    const uint8_t *packed;
    uint32_t head, first_span, num_spans, sequence;
    uint32_t part; /* its slot among the partial states */
    uint32_t share, shares; /* which part of the head's anchors it brings near */
    uint32_t unused;
    akv_paper paper; /* head of the packed bytes */
} akv_paper_item;

_Static_assert(sizeof(akv_paper_item) % 16 == 0, "copied in pieces of 16 bytes");

#define AKV_PAPER_STATIC 512u /* a block's shared memory besides what is asked for at its launch, at most */

typedef struct akv_cuda_paper {
    uint32_t num_blocks, num_items, row_chunk, fast_steps, shared_bytes;
    uint32_t shared_anchors; /* key anchors lie in shared memory */
    const akv_paper_item *items;
    uint32_t first_item[AKV_CUDA_BLOCKS + 1]; /* of each block */
} akv_cuda_paper;

/*
 * Kernel argument: the call as the device sees it. rows = G * T; row r is query head r / T of the group, query r % T.
 */
typedef struct akv_cuda_call {
    uint32_t H, G, T, rows, dim_k, dim_v, num_sequences, num_items;
    int query_dtype, out_dtype, tail_dtype;
    float sm_scale, softcap;
    const akv_item *items;
    const akv_tail *tails;
    const uint32_t *first_slot; /* [num_sequences + 1] */
    const int32_t *tail_lengths;
    akv_partials partials;
    uint32_t num_span_blocks, num_span_items, num_pools;
    uint32_t row_chunk;  /* query rows of a span item: 4 or 8 */
    uint32_t fast_steps; /* of all packed segments of the batch */
    uint32_t span_shared_bytes, prepare_shared_bytes;
    uint32_t early_launch;   /* the device knows programmatic dependent launch */
    uint32_t prepared_bytes; /* of one (pool, head, chunk of rows) */
    const uint32_t *first_item; /* [num_span_blocks + 1] */
    const akv_span_item *span_items;
    const akv_pool *pools;
    akv_pool first_pool;        /* pools[0]: comes with the launch, where reading it would be a wait */
    uint8_t *prepared;          /* [num_pools, H, chunks of rows, prepared_bytes] */
    akv_cuda_paper paper;
    akv_code_values values;
    akv_cuda_step step;
} akv_cuda_call;

/* Let this kernel have so much dynamic shared memory, or more; on the current device. */
cudaError_t akv_cuda_allow_shared(const void *kernel, size_t bytes);

/* Launchers; defined beside their kernels. Each returns CUDA's error of the launch. */
cudaError_t akv_cuda_prepare_parts(void);
/*
 * Span items: kernels exist for some (head_dim, row chunk, fast steps) only; prepare gives the shared memory a block
 * takes.
 */
typedef struct akv_span_shape {
    uint32_t dim, row_chunk, fast_steps, num_anchors, span_tokens, key_tiles, value_tiles, num_levels;
} akv_span_shape;
int akv_cuda_span_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps);
size_t akv_cuda_span_shared(const akv_span_shape *shape);
size_t akv_cuda_queries_shared(const akv_span_shape *shape);
cudaError_t akv_cuda_prepare_spans(const akv_span_shape *shape, size_t shared_bytes);
cudaError_t akv_cuda_prepare_queries(uint32_t row_chunk, size_t shared_bytes);
cudaError_t akv_cuda_launch_queries(const akv_cuda_call *call, cudaStream_t stream);
cudaError_t akv_cuda_launch_spans(const akv_cuda_call *call, cudaStream_t stream);
/* The same for profile paper. */
int akv_cuda_paper_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps);
size_t akv_cuda_paper_shared(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps, uint32_t anchors, uint32_t span,
                             int shared_anchors);
cudaError_t akv_cuda_prepare_paper(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps, size_t shared_bytes);
cudaError_t akv_cuda_launch_paper(const akv_cuda_call *call, cudaStream_t stream);
cudaError_t akv_cuda_launch_parts(const akv_cuda_call *call, cudaStream_t stream);
cudaError_t akv_cuda_launch_combine(const akv_cuda_call *call, cudaStream_t stream);
cudaError_t akv_cuda_launch_append(const akv_cuda_call *call, const akv_cuda_token *token, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
