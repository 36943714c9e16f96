/* SPDX-License-Identifier: Apache-2.0 */
/* codec.h - what the files of the codec share: checks, planning, and the steps of compression in their order. */
#ifndef AKV_CODEC_H
#define AKV_CODEC_H

#include "anchorkv/akv_experimental.h"
#include "core/arena.h"
#include "core/rope.h"
#include "core/segment.h"
#include "core/sizes.h"

#include <stdatomic.h>

/* dense.c */
akv_status akv_check_layer(const akv_layer *layer, bool need_queries, akv_diag *diag);
akv_status akv_check_finite(const akv_layer *layer, const akv_tensor *tensor, const char *name, uint32_t heads,
                            uint64_t tokens, uint32_t dim, const akv_config *config, akv_diag *diag);
bool akv_positions_consecutive(const akv_layer *layer);
akv_dtype akv_layer_dtype(const akv_layer *layer); /* what the layer's cache is kept in when it stays dense */
void akv_header_from_layer(akv_header *header, const akv_layer *layer);
/* All tokens, or with kept [H, num_kept] a subset per head. The layer has been checked. */
akv_status akv_make_dense(const akv_layer *layer, const akv_config *config, akv_dense_reason reason,
                          const uint32_t *kept, uint64_t num_kept, uint64_t budget_bytes, akv_segment **out,
                          akv_diag *diag);

/* plan.c */
akv_status akv_check_config(const akv_config *config, akv_diag *diag);
/*
 * akv_plan that also leaves the laid-out header (kind, anchors, residual counts, sections); header starts zeroed.
 * slow_dims: key coordinates under the basis (LADDER).
 */
akv_status akv_plan_header(const akv_shape *shape, const akv_config *config, uint32_t slow_dims, akv_header *header,
                           akv_plan_info *info, akv_diag *diag);
/* The config's experiment, or the profile's own settings in *defaults. */
const akv_experiment *akv_experiment_of(const akv_config *config, akv_experiment *defaults);

/*
 * Tokens handled as one matrix; and the least and most of a head's ranges of tokens, one task each
 * (akv_job.range_tokens).
 */
#define AKV_TILE_TOKENS 256u
#define AKV_RANGE_TOKENS 1024u
#define AKV_MOST_RANGES 16u
/* Utility is pooled along positions: a tile also looks at this many tokens before and after it. */
#define AKV_POOL_BEFORE 64u
#define AKV_POOL_AFTER 3u
/* Row stride of [rows, tile] matrices. */
#define AKV_TILE_STRIDE 336u
#define AKV_SIMS_STRIDE 1024u /* AKV_MAX_HEAD_DIM */

/* Scratch of one running task of compression. */
typedef struct akv_codec_scratch {
    float *post;   /* [STRIDE, d_k] keys as given, with the halo of pooling */
    float *pre;    /* [TILE, d_k] keys in anchor space; later post-RoPE key residuals */
    float *value;  /* [TILE, d_v] values; later value residuals */
    float *logits; /* [rows, STRIDE] */
    float *errors; /* [rows, STRIDE] */
    float *cross;  /* [rows, STRIDE] */
    float *sims;   /* [TILE, SIMS_STRIDE]: products, transposed rows, coordinates of the transform */
    float *best;   /* [TILE] */
    float *vector; /* [AKV_MAX_HEAD_DIM] */
    double *phase; /* [rotary_dim] */
} akv_codec_scratch;

/* Positions count from a multiple of this: a phase is that of the multiple plus that of the offset, both exact. */
#define AKV_TURN_TOKENS 64

/* Turns rows of one task; begin it by akv_turner_begin. */
typedef struct akv_turner {
    int64_t block;      /* the multiple whose phase is `base`, once known */
    bool known;
    double *own;        /* scratch: the phase of a block outside the job's table */
    const double *base;
} akv_turner;

struct akv_ladder;

/* Everything one compression holds; the steps below run over it in order. rows = G * W observation rows of a head. */
typedef struct akv_job {
    const akv_layer *layer;
    const akv_config *config;
    const akv_experiment *experiment;
    akv_header *header;
    uint64_t S;
    uint32_t H, G, W, k, rows, dk, dv;
    uint64_t range_tokens; /* a multiple of AKV_TILE_TOKENS that depends on S only, so that results do not depend on
                              threads */
    uint64_t num_ranges;
    uint64_t seed; /* of this layer */
    uint8_t *blob; /* NULL in the eviction baseline */
    /*
     * Not NULL: the tokens are those of this segment as it decodes. Their anchors and coefficients are there already,
     * and the queries are of later tokens: each sees all S, not only those up to its own.
     */
    const akv_segment *again;
    uint32_t again_head; /* of it that is the job's head 0 */
    struct akv_ladder *ladder; /* NULL for the PLAIN coding */

    float *queries;   /* [H, rows, d_k] */
    float *part_max;  /* [H, ranges, rows] */
    float *part_sum;  /* [H, ranges, rows] */
    float *part_out;  /* [H, ranges, rows, d_v] */
    float *max;       /* [H, rows] softmax over all tokens */
    float *inverse;   /* [H, rows] 1 / sum */
    float *output;    /* [H, rows, d_v] attention outputs y */
    float *output_sq; /* [H, rows] |y|^2 */
    float *score;     /* [H, S] attention received, summed over W, averaged over G */
    float *pooled;    /* [H, S] the same pooled along positions; earlier positions only */
    uint32_t *anchor_of; /* [H, S] own anchor slot + 1 of an anchor token, else 0 */
    float *mean[AKV_SIDES];    /* LADDER: [H, dim] key mean as stored (pre-RoPE), value mean; NULL otherwise */
    float *unit_of[AKV_SIDES]; /* LADDER: [H, dim] typical size of each coordinate, as stored; NULL otherwise */
    float *anchor[AKV_SIDES];  /* [H, k, dim] anchors as stored */
    float *unit[AKV_SIDES];    /* [H, k, dim] the same divided by their norm (0 for a zero anchor) */
    float *rank[AKV_SIDES];    /* [H, S] what residuals compete with; < 0 for anchors */

    double *offset_phase; /* [AKV_TURN_TOKENS, 2, planes] cosines and sines of the offsets */
    double *block_phase;  /* [num_blocks, 2, planes] of the multiples from first_block on; NULL when positions are far
                             apart */
    int64_t first_block;
    uint64_t num_blocks;

    uint32_t num_slots;
    atomic_flag *slots;
    akv_codec_scratch *scratch;
} akv_job;

/* compress.c: what is known before any key or value is looked at. */
typedef struct akv_compress_planned {
    akv_shape shape;
    akv_experiment defaults;          /* experiment points here or to the caller's */
    const akv_experiment *experiment;
    akv_plan_info info;               /* info.kind dense: the rest is not filled */
    akv_header header;                /* laid out, the seed in it; counts of residuals as planned */
    uint16_t coords[AKV_SIDES][AKV_MAX_HEAD_DIM]; /* LADDER: coordinates under the basis, then the others */
} akv_compress_planned;
/* Checks the layer (not its numbers; tensors are not read) and the config, and plans. */
akv_status akv_compress_plan(const akv_layer *layer, const akv_config *config, akv_compress_planned *out,
                             akv_diag *diag);
/* A new segment with the header and what only copies the layer's description; NULL when there is no memory. */
akv_segment *akv_compress_begin(const akv_layer *layer, const akv_config *config, const akv_header *header,
                                akv_diag *diag);
void akv_compress_head(const akv_layer *layer, const akv_header *header, uint8_t *blob);
uint64_t akv_layer_seed(const akv_layer *layer, const akv_config *config);

/* compress.c: scratch of a job in one allocation (arena), mask [H, S] inside it; and the finiteness of all inputs. */
akv_status akv_job_begin(akv_job *job, const akv_layer *layer, const akv_config *config,
                         const akv_experiment *experiment, akv_header *header, struct akv_ladder *ladder,
                         uint8_t **mask, akv_arena *arena, akv_diag *diag);
void akv_job_end(akv_job *job, akv_arena *arena);
akv_status akv_check_input(const akv_layer *layer, const akv_config *config, akv_diag *diag);

/* observe.c: two passes over the keys: softmax statistics of the observation queries, then scores and outputs. */
void akv_observe(akv_job *job);
/* Logits of rows x n keys (row stride AKV_TILE_STRIDE), scaled, capped and causal, of tokens [t0, t0 + n). */
void akv_observed_logits(const akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *keys, float *logits);
/* Average pooling of width `width` over [0, n) of a head's score (zero padded) into pooled. */
void akv_pool_scores(akv_job *job, uint32_t head, uint64_t n, uint32_t width);

/* anchors.c */
void akv_choose_anchors(akv_job *job);
/*
 * The `count` largest of values[0..n), ties to the lower index; mask[i] = 1 for those taken. Negative values never win.
 */
void akv_take_largest(const float *values, uint64_t n, uint64_t count, uint8_t *mask);

/* turn.c: tables of phases; a range of a head (task of H * num_ranges); turning and loading rows. */
void akv_turn_carve(akv_job *job, akv_arena *arena);
void akv_turn_begin(akv_job *job);
akv_turner akv_turner_begin(akv_codec_scratch *s);
/* x [d_k] at its position -> out, direction -1 turns back; x may be out. Without rotary embedding a copy. */
void akv_turn_row(const akv_job *job, akv_turner *turner, int64_t position, int direction, double magnitude,
                  const float *x, float *out);
/* Rows [n, dim] of a tensor. */
void akv_load_rows(const akv_tensor *tensor, uint32_t head, uint64_t t0, uint32_t n, uint32_t dim, float *out);
/* Tokens as anchors see them: keys un-turned (unless projected post-RoPE) and centred, values as they are. */
void akv_anchor_space_row(const akv_job *job, int side, uint32_t head, uint64_t token, akv_turner *turner, float *out);
void akv_anchor_space_rows(const akv_job *job, int side, uint32_t head, uint64_t t0, uint32_t n, akv_turner *turner,
                           float *out);
/* A residual in anchor space -> as the queries meet it. In place. */
void akv_turn_residual(const akv_job *job, uint64_t token, akv_turner *turner, float *r);

static inline uint32_t akv_tile_tokens(uint64_t t0, uint64_t end)
{
    return (uint32_t)(end - t0 < AKV_TILE_TOKENS ? end - t0 : AKV_TILE_TOKENS);
}

static inline void akv_range_of(const akv_job *job, size_t task, uint32_t *head, uint64_t *begin, uint64_t *end)
{
    *head = (uint32_t)(task / job->num_ranges);
    *begin = task % job->num_ranges * job->range_tokens;
    *end = job->S - *begin < job->range_tokens ? job->S : *begin + job->range_tokens;
}

/* project.c: an anchor [dim] -> unit [dim], the same divided by its norm (0 for a zero anchor). */
void akv_unit_of(const float *anchor, uint32_t dim, float *unit);
/*
 * The nearest anchors by |cosine| of n <= AKV_TILE_TOKENS rows [n, dim]: their numbers -> nearest [n], row . unit ->
 * along [n] (0 and 0 for a row that no anchor explains). s->sims is used.
 */
void akv_nearest_anchors(const akv_job *job, int side, uint32_t head, uint32_t n, const float *rows,
                         akv_codec_scratch *s, uint32_t *nearest, float *along);
/*
 * project.c: means (LADDER), the anchors as stored, nearest anchor and coefficient of every token, and what its
 * residual is worth.
 */
void akv_project(akv_job *job);
/* Residual of one token as it is coded: post-RoPE for keys, f32 [dim]. */
void akv_residual_of(const akv_job *job, int side, uint32_t head, uint64_t token, akv_turner *turner, float *out);

/* quantise.c: give the slots to the highest ranks (mask is scratch, [H, S]), then code the residuals. */
void akv_select_owners(akv_job *job, uint8_t *mask);
void akv_code_residuals(akv_job *job);

static inline int64_t akv_position_of(const akv_layer *layer, uint64_t token)
{
    return layer->positions ? layer->positions[token] : (int64_t)layer->first_position + (int64_t)token;
}

static inline void *akv_job_section(const akv_job *job, int id)
{
    return job->blob + job->header->sections[id].offset;
}

#endif
