/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend.h - the parts of attention. One task = one KV head x one part (a range of one segment, or of the tail) and a
 * chunk of query rows; it leaves a mergeable partial state. Row r of a group is query head g = r / T, query t = r % T.
 */
#ifndef AKV_ATTEND_H
#define AKV_ATTEND_H

#include "core/arena.h"
#include "core/segment.h"
#include "kernels/kernels.h"

#include <stdatomic.h>

/* Most query rows handled together: bounds the workspace when many query tokens come at once. */
#define AKV_ATTEND_ROWS 32u
/* Positions are turned as (multiple of this) + offset; offsets have a table. */
#define AKV_TURN_SPAN 64

/* Partial softmax state of one (head, part): max, sum and unnormalised output per row. */
typedef struct akv_partial {
    float *max; /* [rows] */
    float *sum; /* [rows] */
    float *acc; /* [rows, d_v] */
} akv_partial;

/* Scratch of one running task. */
typedef struct akv_scratch {
    float *query;   /* [rows, d_k] f32 */
    float *turned;  /* [rows, d_k] plane order, turned back to the current span */
    float *rotated; /* [rows, d_k] Hd q */
    float *logits;  /* [rows, AKV_BLOCK_TOKENS] */
    float *hist;    /* [rows, k] */
    float *coded;   /* [rows, d_v] value residuals in the transformed domain */
    float *group;   /* [max(d_k, d_v), AKV_GROUP_LANES] */
    float *vector;  /* [max(d_k, d_v)] */
    float *levels[AKV_SIDES];              /* LADDER: [levels, rows, dim] queries and sums in each level's coordinates */
    struct akv_level_list *lists[AKV_SIDES]; /* LADDER: [levels] */
    float *mean;    /* LADDER: [d_k] in units */
    double *phase;  /* [4, rotary_dim / 2] cos, sin of the span; cos, sin of one span's step */
} akv_scratch;

/* cos/sin of the offsets inside a span, [AKV_TURN_SPAN, rotary_dim / 2] each; shared by all tasks of a call. */
typedef struct akv_turn_table {
    const float *cos;
    const float *sin;
} akv_turn_table;

typedef struct akv_task {
    const akv_attend_params *params;
    const akv_kernels *kernels;
    uint32_t kv_head;
    uint32_t row0;
    uint32_t rows;
    uint64_t begin; /* tokens of the part */
    uint64_t end;
} akv_task;

/* Load the task's query rows into scratch->query as f32. */
void akv_load_queries(const akv_task *task, akv_scratch *scratch);

/*
 * Fold one block of n unscaled logits per row (row stride AKV_BLOCK_TOKENS) into the running max and sum: scaled, capped,
 * and where masked is set hidden or shifted by the tail's mask. On return logits hold exp(logit - max), and shrink[r] is
 * the factor by which what row r accumulated before must be multiplied. b0 = first token of the block within the tail.
 */
void akv_softmax_block(const akv_task *task, float *logits, uint64_t b0, uint32_t n, bool masked, float *max, float *sum,
                       float *shrink);

/* rows[r][0..width) *= shrink[r]. */
void akv_shrink_rows(float *rows, uint32_t count, uint32_t width, const float *shrink);

/* One part of a compressed segment. */
void akv_attend_compressed(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *scratch,
                           akv_partial *out);

/* The same for the LADDER coding. */
void akv_attend_ladder(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *scratch,
                       akv_partial *out);

/*
 * Queries of the task turned back to the span that `position` lies in, plane order, in scratch->turned; nothing is done
 * when they are already there. Returns the position's row of the table.
 */
typedef struct akv_span {
    const akv_task *task;
    const akv_header *header;
    const double *inv_freq;
    akv_scratch *scratch;
    int64_t at; /* INT64_MIN before the first */
} akv_span;
akv_span akv_span_begin(const akv_task *task, const akv_header *header, const double *inv_freq, akv_scratch *scratch);
/* True when the queries were turned anew. */
bool akv_span_to(akv_span *span, int64_t position, size_t *table_row);

/* Position of a token of a compressed segment. */
static inline int64_t akv_token_position(const akv_header *h, const int32_t *positions, uint64_t token)
{
    return positions ? positions[token] : (int64_t)h->first_position + (int64_t)token;
}

/* One part of dense keys and values (tail, or a dense segment); masked: apply the tail's mask or causality. */
void akv_attend_dense(const akv_task *task, const akv_tensor *keys, const akv_tensor *values, bool masked, akv_scratch *scratch,
                      akv_partial *out);

#endif
