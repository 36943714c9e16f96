/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend.h - the parts of attention. One task = one KV head x one part (a range of one segment, or of the tail) and a
 * chunk of query rows; it leaves a mergeable partial state. Row r of a group is query head g = r / T, query t = r % T.
 */
#ifndef AKV_ATTEND_H
#define AKV_ATTEND_H

#include "core/arena.h"
#include "core/maths.h"
#include "core/segment.h"
#include "kernels/kernels.h"

#include <stdatomic.h>

/* Most query rows handled together by the paths that keep logits of a whole block. */
#define AKV_ATTEND_ROWS 32u
/*
 * With more rows than this a KV head's tokens are rebuilt tile by tile (tiles.c), for so many rows at a time. For LADDER segments
 * that pays late: at d = 128, 10x, rebuilding takes about 500 ns per token, a row then 2.5 ns instead of 5.8 (AVX2: 700, 6 and
 * 12), so that both take the same at 150 rows (AVX2: 130).
 */
#define AKV_TILE_ROWS 24u
#define AKV_TILE_LADDER_ROWS 144u
#define AKV_TILE_MOST_ROWS 512u
/* Positions are turned as (multiple of this) + offset; offsets have a table. */
#define AKV_TURN_SPAN 64

/* Partial softmax state of one (head, part): max, sum and unnormalised output per row. */
typedef struct akv_partial {
    float *max; /* [rows] */
    float *sum; /* [rows] */
    float *acc; /* [rows, d_v] */
} akv_partial;

/* Scratch of one running task over LADDER segments, four query rows at a time (kernels/quad.h). */
typedef struct akv_quad_scratch {
    uint32_t dim;       /* the larger of d_k and d_v, a multiple of 4 */
    float *rows;        /* [2][8][padded planes] */
    int16_t *query16;   /* [width / 8][4 rows][8] */
    float *mean_rows;   /* [2][4][padded planes] */
    double *phase;      /* [2][padded planes] cosine, sine of the tile's base */
    float *logits;      /* [AKV_BLOCK_TOKENS][4] */
    uint32_t *anchor;   /* [AKV_QUAD_TILE] of a tile */
    float *weight;      /* [AKV_QUAD_TILE] */
    float *hist;        /* [k][4] */
    float *anchor_scales[AKV_SIDES]; /* [k] */
    int8_t *queries;    /* [levels][dim / 4 + 3][32] */
    int32_t *bias;      /* [levels][8] */
    float *query_scale; /* [levels][4] */
    float *sums;        /* [levels][dim / 4 + 3][64] */
    uint16_t *slots;    /* [AKV_BLOCK_TOKENS + AKV_QUAD_SPARE_SLOTS] */
    uint8_t *run;       /* [24 KiB] of code_sums */
    float *coords;      /* [dim][4] */
    float *vectors;     /* [4][dim] */
    int16_t *turn16;    /* [64][2][padded planes], where positions have gaps */
    float *terms;       /* [slow anchors][32] of akv_quad_slow */
    float *mean_terms;  /* [8][4] */
} akv_quad_scratch;

/* Scratch of one running task of tiles.c. */
typedef struct akv_tile_scratch {
    float *keys;               /* [64, d_k] */
    float *turned_keys;        /* [d_k, 64] */
    float *values;             /* [64, d_v] */
    float *logits;             /* [rows, 64]; then weights */
    float *shrink;             /* [rows] */
    int16_t *packed_queries;   /* [rows, d_k + 1]; this and the rest for kernels/tile.h */
    int16_t *packed_keys;      /* [(d_k + 1) / 2, 64, 2], of residuals too */
    int16_t *packed_values;    /* [32, d_v, 2] */
    float *query_scale;        /* [rows] */
    float *token_scale[AKV_SIDES]; /* [64] */
    int16_t *packed_basis[AKV_SIDES]; /* [basis_dim, even basis_cols] */
    float *basis_scale[AKV_SIDES];    /* [basis_dim] */
    float *turns;              /* [planes][2][64] cosines and sines of a tile's positions from its first on */
    double *phase;             /* [4, rotary_dim / 2] */
    float *residual;           /* [dim, 64] */
    float *turned_values;      /* [d_v, 64] */
    float *coded[AKV_SIDES];   /* [16 tiles, coords, 64] residuals of a block */
    float *basis[AKV_SIDES];   /* [basis_dim, basis_cols] */
} akv_tile_scratch;

/* Largest sizes among the segments of a call. */
typedef struct akv_quad_sizes {
    uint32_t padded_planes, padded_rest, anchors, levels, dim;
    uint32_t gap_planes; /* padded planes where positions have gaps */
    uint32_t slow_anchors; /* of segments with a window */
} akv_quad_sizes;

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
    akv_quad_scratch quad;
    akv_tile_scratch tile;
} akv_scratch;

/* cos/sin of the offsets inside a span, [AKV_TURN_SPAN, rotary_dim / 2] each; shared by all tasks of a call. */
typedef struct akv_turn_table {
    const float *cos;
    const float *sin;
    const int16_t *turn16; /* for kernels/quad.h: [64][padded planes / 32][2][32] */
    const float *mean;     /* [fast][2][32] */
    const float *moments;  /* [6][padded planes] */
    const float *middle;   /* [2][padded planes] cosine, sine of 31.5 positions */
    const double *step;    /* [2][padded planes] of 64 positions */
    const double *begin;   /* [parts][2][padded planes] of each part's first position, when positions are consecutive */
    const double *turns;   /* [16][2][padded planes] of 0 to 7 positions, then 0 to 56 by eights, when they have gaps */
    uint32_t fast;         /* planes whose mean goes by table */
    uint32_t window;       /* tokens of a window of akv_quad_slow; 0: not used */
    const float *series;   /* [32][8] of the upper planes */
    const float *largest;  /* [8] */
    const float *middles;  /* [parts][windows of a part][2][32] cosine, sine of each window's middle */
    const double *lower_step; /* step of the lower 32 planes */
} akv_turn_table;

/* The same, to be filled. */
typedef struct akv_quad_table_room {
    uint32_t from; /* the segment whose tables serve: itself, or an earlier one that turns alike */
    int16_t *turn16;
    float *mean;
    float *moments;
    float *middle;
    double *step;
    double *begin;
    double *turns; /* NULL: not wanted */
    uint32_t fast;
    uint32_t window;
    float *slow;        /* series, largest, middles */
    double *lower_step; /* [2][32] */
    bool upper_turns;   /* somebody wants turn16 of the upper planes */
} akv_quad_table_room;

/*
 * The tables of a call, in pieces. The tasks make them: a task takes pieces until there are none left, prepares what needs
 * no tables, and then waits for the pieces that others have taken. So no thread waits for the caller to make tables before
 * it begins.
 */
typedef struct akv_tables {
    const akv_attend_params *params;
    akv_turn_table *table;     /* [segments] */
    akv_quad_table_room *room; /* [segments] */
    float *floats;             /* cosines and sines of the segments that do not go through kernels/quad.h */
    float **plain;             /* [segments] where they begin; NULL: no such segment, or an earlier one's serve */
    uint32_t pieces;
    atomic_uint next;
    atomic_uint done;
} akv_tables;

typedef struct akv_task {
    const akv_attend_params *params;
    const akv_kernels *kernels;
    uint32_t kv_head;
    uint32_t row0;
    uint32_t rows;
    uint64_t begin; /* tokens of the part */
    uint64_t end;
    int64_t shift;  /* of its segment: queries are turned back by so many positions when they are loaded */
    size_t part;    /* number of the part in its segment */
    akv_tables *tables;
} akv_task;

/* Where the tables of every segment will be, and in how many pieces they are made; room and floats are there. */
void akv_tables_begin(akv_tables *tables, const akv_attend_params *params);
/* Makes the pieces that nobody has taken. */
void akv_tables_help(akv_tables *tables);
/* Until all pieces are made. */
void akv_tables_wait(akv_tables *tables);

/*
 * Tokens of a window over which the upper half of a segment's planes turns so little that they go by polynomials
 * (akv_quad_slow), or 0.
 */
uint32_t akv_slow_window(const akv_segment *segment);
/* By which cosine (even) and sine (odd) of x u, abs(u) <= 1, enter the powers 0 to 7 of u. */
void akv_slow_series(double x, float *out);
/* Floats of its tables. */
uint64_t akv_slow_floats(const akv_segment *segment, uint32_t window, uint32_t heads);

/* A part is about this many tokens (attend.c). */
uint64_t akv_part_tokens(uint64_t tokens, uint32_t heads);
size_t akv_parts_of(uint64_t tokens, uint32_t heads);

/* Load the task's query rows into scratch->query as f32. */
void akv_load_queries(const akv_task *task, akv_scratch *scratch);

/* Row r's n unscaled logits scaled, capped, and where masked is set hidden or shifted; the largest of them and of max. */
float akv_softmax_logits(const akv_task *task, uint32_t r, float *logits, uint64_t b0, uint32_t n, bool masked, float max);

/* By what a row's sums are multiplied when its largest logit becomes `max`, which is finite. */
static inline float akv_softmax_shrink(float before, float max)
{
    return before == max ? 1.0f : before == -INFINITY ? 0.0f : akv_expf(before - max);
}

/*
 * Fold one block of n unscaled logits per row (row stride in elements) into the running max and sum: scaled, capped,
 * and where masked is set hidden or shifted by the tail's mask. On return logits hold exp(logit - max), and shrink[r] is
 * the factor by which what row r accumulated before must be multiplied. b0 = first token of the block within the tail.
 */
void akv_softmax_block(const akv_task *task, float *logits, size_t stride, uint64_t b0, uint32_t n, bool masked, float *max, float *sum,
                       float *shrink);

/* rows[r][0..width) *= shrink[r]. */
void akv_shrink_rows(float *rows, uint32_t count, uint32_t width, const float *shrink);

/* One part of a compressed segment. */
void akv_attend_compressed(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *scratch,
                           akv_partial *out);

/* The same for the LADDER coding. */
void akv_attend_ladder(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *scratch,
                       akv_partial *out);

/* Many rows at once (tiles.c). */
void akv_tiles_take(akv_arena *arena, uint32_t rows, uint32_t dk, uint32_t dv, bool ladder, akv_tile_scratch *scratch);
void akv_attend_dense_tiles(const akv_task *task, const akv_tensor *keys, const akv_tensor *values, bool masked, akv_scratch *scratch,
                            akv_partial *out);
void akv_attend_ladder_tiles(const akv_task *task, const akv_segment *segment, akv_scratch *scratch, akv_partial *out);

/* Row [head, token] of a tensor as f32, copied. */
void akv_dense_row(const akv_kernels *kernels, const akv_tensor *t, uint32_t head, uint64_t token, uint32_t dim, float *out);

/* The same four rows at a time, for segments that akv_quad_fits. */
bool akv_quad_fits(const akv_segment *segment);
void akv_attend_ladder_quads(const akv_task *task, const akv_segment *segment, const akv_turn_table *table, akv_scratch *scratch,
                             akv_partial *out);
void akv_quad_take(akv_arena *arena, const akv_quad_sizes *sizes, akv_quad_scratch *scratch);

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
