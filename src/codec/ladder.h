/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder.h - the state of compressing into the LADDER coding (profile default) and its steps. docs/method.md derives
 * them.
 */
#ifndef AKV_CODEC_LADDER_H
#define AKV_CODEC_LADDER_H

#include "codec/codec.h"
#include "core/ladder.h"

/* Lower convex hull of (bits, distortion): level[0..count) with falling slopes; 0 is always first. */
typedef struct akv_hull {
    uint32_t count;
    uint8_t level[AKV_MAX_LEVELS + 1];
    double slope[AKV_MAX_LEVELS + 1]; /* slope[i]: distortion saved per bit from level[i - 1] to level[i] */
} akv_hull;

/* coverage.c: anchors drawn at once, candidates they are the best of, tokens that judge. */
#define AKV_COVER_BATCH 32u
#define AKV_COVER_CANDIDATES 128u
#define AKV_COVER_JUDGES 2048u
#define AKV_COVER_FLOATS ((size_t)AKV_COVER_JUDGES * (AKV_COVER_CANDIDATES + 1))

/* coverage.c: how far a head is. */
typedef struct akv_cover_head {
    akv_rng rng;
    uint8_t *mask;              /* [S]: earlier tokens that are anchors */
    uint64_t need;              /* anchors still to be found */
    uint64_t next;              /* given anchors before this token have been looked at */
    bool weighed;
    double weight[AKV_SIDES];   /* 1 / energy of the side */
    uint32_t num_units;         /* tokens of the current batch */
    uint64_t tokens[AKV_COVER_CANDIDATES];
} akv_cover_head;

/* centroids.c: per anchor the sum of its members [dim], their energy and their number. */
#define AKV_REFINE_FLOATS(k, dim) ((uint64_t)(k) * ((dim) + 2))

typedef struct akv_ladder {
    const akv_experiment *options;
    uint16_t coords[AKV_SIDES][AKV_MAX_HEAD_DIM]; /* coordinates under the basis, then the others */
    float *moments[AKV_SIDES];    /* [H, ranges, dim, dim] sums of r r^T over non-anchors, coords order */
    float *deviation;             /* [H, S] |v - mean v|^2 */
    float *prior[AKV_SIDES];      /* [H, S] utility if every token were as likely to be asked for */
    float *late;                  /* [H, late_rows, d_k] queries turned to the segment's end, coords order */
    uint8_t *fixed;               /* [H, k] this anchor is a token and stays one: attended, sink or window */
    float *refine;                /* per slot: AKV_REFINE_FLOATS(k, largest dim) */
    uint32_t late_rows;
    double *query_sq;             /* [H] mean |q|^2 of the observation queries */
    float *basis[AKV_SIDES];      /* [H, cols, basis_dim] as stored */
    float *sigma[AKV_SIDES];      /* [H, coords] as stored */
    uint8_t *entries[AKV_SIDES];  /* [H, levels, coords] table entries */
    uint32_t *level_bits[AKV_SIDES]; /* [H, levels] bits per residual */
    double *distortion[AKV_SIDES];   /* [H, levels + 1] share of the utility that stays */
    uint8_t *level[AKV_SIDES];    /* [H, S] chosen level */
    akv_hull *hulls;              /* [H, sides] */
    akv_cover_head *cover_heads;  /* [H] */
    float *cover;                 /* [H, sides]: AKV_COVER_FLOATS */
    float *cover_units;           /* [H, sides, candidates, largest dim] */
    float *eigen;                 /* per slot: scratch of the eigenvector solver */
    uint64_t eigen_floats;
} akv_ladder;

/* ladder.c: planning and the driver. */
/* Bytes of the smallest segment: least_anchors anchors, no bases, no codes. */
uint64_t akv_ladder_least_bytes(akv_header *header, const akv_experiment *options, uint32_t least_anchors,
                                bool has_positions);
/*
 * Fields of the header that the coding needs for a budget of at least that: anchors (at most `anchors`), levels, index
 * bits, basis sizes (slow_dims key coordinates hardly turn), and code_bytes such that the total is the largest that
 * fits.
 */
void akv_ladder_layout(akv_header *header, const akv_experiment *options, uint32_t least_anchors, uint32_t anchors,
                       uint32_t slow_dims, bool has_positions, uint64_t budget);
/* Key coordinates that hardly turn over `span` positions, then the others -> order [d_k]; returns how many are slow. */
uint32_t akv_slow_coords(const akv_rope *rope, uint32_t dim, int64_t span, double slow_angle, uint16_t *order);
void akv_ladder_carve(akv_job *job, akv_arena *arena);
void akv_ladder_begin(akv_job *job); /* means, late queries */
void akv_ladder_queries(akv_job *job); /* of these two the queries */
void akv_ladder_finish(akv_job *job); /* bases, tables, levels, codes */

/*
 * coverage.c: for every head mark cover_heads[head].need more earlier tokens (mask marks those taken already), so that
 * every direction of centred keys and of values has an anchor near it.
 */
void akv_cover_directions(akv_job *job);

/*
 * centroids.c: after akv_choose_anchors, turn each free anchor into the direction that explains most of the tokens
 * nearest to it (options->anchor_rounds rounds). job->anchor and job->unit hold all anchors afterwards, not rounded
 * yet; anchor_of names only the tokens whose anchor is fixed. With 0 rounds every anchor stays a token.
 */
void akv_refine_anchors(akv_job *job);

/* moments.c: what project.c hands over tile by tile. */
void akv_ladder_value_deviation(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *values);
void akv_ladder_second_moments(akv_job *job, size_t range_task, uint32_t n, const float *key_residuals,
                               const float *value_residuals);
void akv_ladder_utilities(akv_job *job, uint32_t head, uint64_t t0, uint32_t n, const float *key_residual_sq,
                          const float *value_residual_sq, const float *value_sq, akv_codec_scratch *s,
                          float *key_utility, float *value_utility);

/* basis.c: eigenvectors, spectra, water-filled tables. */
void akv_ladder_bases(akv_job *job);
/* The same distortion from bases, deviations and tables that are there already, and the queries of now. */
void akv_ladder_weigh(akv_job *job);
/*
 * Table entries of all levels [levels, coords] for weights w[coords]: the best marginal gains per bit until a level is
 * full, so that levels are nested; bits of a residual [levels], distortion [levels + 1]. `total` = the weight of all
 * coordinates, also of those that can never get bits.
 */
void akv_water_fill(const uint16_t *level_bits, uint32_t levels, const double *w, uint32_t coords, double total,
                    uint8_t *entries, uint32_t *bits_of, double *distortion);
/* The same entries as the section has them -> zeroed tables [levels, ceil(coords / 4)]. */
void akv_pack_tables(const uint8_t *entries, uint32_t levels, uint32_t coords, uint8_t *tables);

/*
 * allocate.c: the prior - a share of the layer's utility, spread as if every token were as likely to be asked for -
 * joins the utilities rank[side][n], of which those below 0 do not count; and the hulls [H, sides].
 */
typedef struct akv_worth {
    double utility, prior;
} akv_worth;
akv_worth akv_ladder_sum_worth(const float *const rank[AKV_SIDES], const float *const prior[AKV_SIDES], uint64_t n,
                               akv_worth sums); /* added to the sums of what came before */
void akv_ladder_add_prior(const akv_experiment *options, akv_worth sums, float *const rank[AKV_SIDES],
                          const float *const prior[AKV_SIDES], uint64_t n);
void akv_ladder_hulls(const akv_job *job, akv_hull *hulls);
/* Both, then one multiplier for the layer. */
void akv_ladder_allocate(akv_job *job);
/* distortion [levels + 1], bits [levels] of one residual. */
akv_hull akv_ladder_hull(const double *distortion, const uint32_t *bits, uint32_t levels);

/* ladder_codes.c */
void akv_ladder_code(akv_job *job);
/*
 * rewrite.c: a LADDER segment again, with lower levels or with its first tokens only. Residuals whose level stays are
 * copied bit by bit, the others coded anew from what they decode to.
 */
typedef struct akv_rewrite {
    const akv_segment *from;
    const akv_executor *executor;
    const akv_allocator *allocator;
    akv_header header;         /* of the result: shape and budget set; akv_rewrite_run lays it out */
    uint8_t *level[AKV_SIDES]; /* [H, header.num_tokens] wanted, at most what they are */
    double energy[AKV_SIDES];  /* out: of the residuals as stored before */
    double lost[AKV_SIDES];    /* out: of what changed in them */
} akv_rewrite;
/* Levels of the first `tokens` tokens of a head. */
void akv_ladder_levels(const akv_segment *segment, int side, uint32_t head, uint64_t tokens, uint8_t *out);
/* Bits of a residual at each level -> bits [levels]. */
void akv_ladder_bits(const akv_segment *segment, int side, uint32_t head, uint32_t *bits);
/* Bytes of all codes for levels [H, tokens] a side. */
uint64_t akv_ladder_code_bytes(const akv_segment *segment, uint64_t tokens, uint8_t *const level[AKV_SIDES]);
/* header.code_bytes is what the result gets, at least akv_ladder_code_bytes. */
akv_status akv_rewrite_run(akv_rewrite *rewrite, akv_segment **out, akv_diag *diag);

/*
 * again.c: what the tokens of a segment are worth to these queries: log2 of the utilities [H, S] a side, and the hulls
 * [H, sides] of its levels. The tokens are taken as they decode: those of as many heads at a time as take most_bytes in
 * f32, or of one.
 */
akv_status akv_observe_again(const akv_segment *segment, const akv_tensor *queries, uint32_t num_queries,
                             const akv_config *config, uint64_t most_bytes, float *const utility[AKV_SIDES],
                             akv_hull *hulls, akv_diag *diag);

/* A view of the segment being written. */
akv_ladder_view akv_ladder_writer_view(const akv_job *job, int side, uint32_t head);

/* Eigenvalues and eigenvectors (rows, in the same order) of the symmetric a [n, n], n >= 1, which is overwritten. */
void akv_eigen_symmetric(float *a, uint32_t n, float *values, float *vectors, float *scratch);
uint64_t akv_eigen_scratch_floats(uint32_t n);

#endif
