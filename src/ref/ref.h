/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.h - the double-precision reference: plain loops that follow the method's formulas line by line. It defines the
 * truth for every faster path and is linked to tests only.
 *
 * Written from the formulas (docs/method.md) and the byte layout (core/layout.h) alone; it shares no code with the
 * codec or with attention. Besides the formulas it carries a first-order model of fp32 rounding, so that a test can
 * tell a rounding difference from a fault: see docs/numerics.md for the derivation of every `tol` below.
 *
 * Shapes as in anchorkv.h. All arrays are contiguous doubles unless said otherwise. Functions that allocate return NULL
 * or false when out of memory.
 */
#ifndef AKV_REF_H
#define AKV_REF_H

#include "anchorkv/akv_experimental.h"
#include "anchorkv/anchorkv.h"
#include "core/layout.h"

#include <stdbool.h>

/* Unit roundoff of fp32. */
#define REF_U 0x1p-24

/*
 * Relative rounding of a sum of n fp32 terms, measured against the sum of their magnitudes: n u in the worst case,
 * 6 sqrt(n) u when roundings are independent (the probability of exceeding it is below 1e-7), plus 8 u for the
 * operations around the sum (a product, an exponential, a division).
 */
double ref_gamma(double n);

/* ------------------------------------------------------------------------------------------------- rope (section 2) */

/* x := R_p x. Plane j is turned by position * inv_freq[j] and multiplied by the magnitude. */
void ref_rope_rotate(const akv_rope *rope, double position, double *x);

/* x := R_p^-1 x. */
void ref_rope_unrotate(const akv_rope *rope, double position, double *x);

/* ------------------------------------------------------------------------------------------- a layer in doubles */

typedef struct ref_layer {
    uint32_t heads;     /* H */
    uint32_t group;     /* G */
    uint32_t dim[2];    /* d_k, d_v */
    uint32_t window;    /* min(W, S) */
    uint64_t tokens;    /* S */
    double scale;
    double cap;         /* 0 = none */
    akv_rope rope;      /* borrows the caller's inv_freq */
    double *positions;  /* [S] */
    double *keys;       /* [H, S, d_k] post-RoPE */
    double *values;     /* [H, S, d_v] */
    double *queries;    /* [H*G, window, d_k] post-RoPE, row r = token S - window + r; NULL when not given */
} ref_layer;

bool ref_layer_load(const akv_layer *in, ref_layer *out);
void ref_layer_free(ref_layer *layer);

/* Key or value [head, token] before any rotation: R_p^-1 k_p, or v_p. */
void ref_layer_row(const ref_layer *layer, int side, uint32_t head, uint64_t token, double *out);

/*
 * Softmax weights a_p(q) of one observation query over the tokens it sees (j <= S - W + row); tokens it does not see
 * get 0.
 *
 *   weights  out  [S]
 *   logits   out  [S] scaled and capped, or NULL
 */
void ref_attention_row(const ref_layer *layer, uint32_t query_head, uint32_t row, double *weights, double *logits);

/* -------------------------------------------------------------------------------------------- anchors (section 3.1) */

/* k = max(S / tokens_per_anchor, W + W/2), at most S and 65535. */
uint32_t ref_num_anchors(uint64_t tokens, uint32_t window, uint32_t tokens_per_anchor);

/* Free anchors that the scores choose: floor(rho * (k - W)). */
uint32_t ref_num_top(uint32_t num_anchors, uint32_t window, double rho);

/*
 * Pooled attention scores of the positions before the window.
 *
 *   scores  out  [S - W]
 *   tol     out  [S - W] fp32 rounding of the scores, or NULL
 */
bool ref_anchor_scores(const ref_layer *layer, uint32_t head, uint32_t pool_width, double *scores, double *tol);

/* Marks the `count` largest scores of n (ties: the lower index first). */
void ref_top(const double *scores, uint64_t n, uint64_t count, bool *chosen);

/* ----------------------------------------------------------------------------------------- projection (section 3.2) */

typedef struct ref_projection {
    uint32_t index; /* anchor with the largest |cosine| among those of nonzero norm */
    double cosine;  /* that |cosine| */
    double gamma;   /* <x,a>/<a,a> before it is rounded */
} ref_projection;

/* anchors [k, dim], as stored. When x or every anchor is zero: index 0, cosine 0, gamma 0. */
ref_projection ref_project(const double *x, const double *anchors, uint32_t num_anchors, uint32_t dim);

/* |cosine| of x and a; 0 when either is zero. */
double ref_abs_cosine(const double *x, const double *a, uint32_t dim);

/* gamma as a f16 holds it: nearest even, clamped to +-65504. */
double ref_round_f16(double x);
double ref_round_bf16(double x);

/* Half the distance between neighbouring f16 (or bf16) numbers around x: the most that rounding moves it. */
double ref_half_ulp_f16(double x);
double ref_half_ulp_bf16(double x);

/* -------------------------------------------------------------------------------------------- utility (section 3.3) */

/*
 * U_K and U_V of every token of one KV head.
 *
 *   residual_k    in   [S, d_k] R_p r_p, the rotated key residual (0 for anchors)
 *   residual_v    in   [S, d_v]
 *   size_k        in   [S] |k_p| + |gamma| |R_p a|: what the residual was subtracted from; scales its rounding
 *   size_v        in   [S]
 *   utility[2]    out  [S] each
 *   tol[2]        out  [S] each: fp32 rounding
 */
bool ref_utilities(const ref_layer *layer, uint32_t head, const double *residual_k, const double *residual_v,
                   const double *size_k, const double *size_v, double *const utility[2], double *const tol[2]);

/* ------------------------------------------------------------------------------------------ quantiser (section 3.5) */

extern const double ref_levels[4];        /* Lloyd-Max of the unit Gaussian */
extern const double ref_boundaries[3];
extern const double ref_levels_plain[4];  /* AKV_CODE_PLAIN_UNIFORM */
extern const double ref_boundaries_plain[3];

/* Orthonormal Hadamard transform over blocks of descending powers of two (80 = 64 + 16); its own inverse. */
void ref_hadamard(double *x, uint32_t dim);

/* x := Hd (sign * x), and the inverse. */
void ref_transform(double *x, uint32_t dim, uint64_t seed, int side);
void ref_untransform(double *x, uint32_t dim, uint64_t seed, int side);

/* Code of one coordinate: how many boundaries lie below x / scale. scale 0 codes everything as if x / scale were 0. */
uint32_t ref_code(double x, double scale, bool plain);

/* -------------------------------------------------------------------------------------- bytes (section 4, layout.h) */

typedef struct ref_plan {
    bool feasible;
    akv_segment_kind kind;
    akv_dense_reason dense_reason;
    uint64_t dense_bytes;
    uint64_t budget;
    uint64_t total;         /* object and blob */
    uint64_t min_bytes;     /* of a compressed or dense segment, whichever is smaller */
    uint32_t num_anchors;
    uint64_t residuals[2];
} ref_plan;

ref_plan ref_make_plan(const akv_shape *shape, double keep_ratio, uint64_t budget_bytes,
                       const akv_experiment *experiment);

/* Object and blob of a compressed segment with that many residuals. */
uint64_t ref_compressed_bytes(const akv_shape *shape, uint32_t num_anchors, const uint64_t residuals[2]);

/* Object and blob of a dense segment whose elements take element_bytes. */
uint64_t ref_dense_bytes(const akv_shape *shape, uint32_t element_bytes);

/* What decides the sections of the LADDER coding besides the shape. */
typedef struct ref_ladder_sizes {
    uint32_t anchors, levels;
    uint32_t basis_dim[2], basis_cols[2];
    uint64_t code_bytes;
} ref_ladder_sizes;

/* Object and blob of a segment in the LADDER coding. */
uint64_t ref_ladder_bytes(const akv_shape *shape, const ref_ladder_sizes *sizes);

/* ------------------------------------------------------------------------------- reading canonical bytes (layout.h) */

/* Where things are in a blob; no copy. */
typedef struct ref_view {
    const akv_header *header;
    const uint8_t *bytes;
    akv_rope rope;
} ref_view;

ref_view ref_view_of(const void *blob);
double ref_view_position(const ref_view *view, uint64_t token);
uint32_t ref_view_anchor_token(const ref_view *view, uint32_t head, uint32_t anchor);
void ref_view_anchor(const ref_view *view, int side, uint32_t head, uint32_t anchor, double *out);
uint32_t ref_view_index(const ref_view *view, int side, uint32_t head, uint64_t token);
double ref_view_coeff(const ref_view *view, int side, uint32_t head, uint64_t token);
bool ref_view_owns(const ref_view *view, int side, uint32_t head, uint64_t token);

/* Residual number of the first residual of a head: those of earlier heads come before. */
uint64_t ref_view_first_residual(const ref_view *view, int side, uint32_t head);
double ref_view_gain(const ref_view *view, int side, uint64_t residual);

/* The codes of the residual of [head, token], which owns one. */
void ref_view_codes(const ref_view *view, int side, uint32_t head, uint64_t token, uint8_t *codes);

/*
 * Every key (post-RoPE) or value of one head, from the bytes alone.
 *
 *   out   out  [S, dim]
 *   size  out  [S] norm of the anchor part + norm of the residual part: scales the rounding of a sum of both; or NULL
 */
bool ref_decode(const void *blob, int side, uint32_t head, double *out, double *size);

/* ------------------------------------------------------------------ reading the LADDER coding (layout.h, section 7) */

extern const double ref_levels_1bit[2];
extern const double ref_levels_2bit[4];
extern const double ref_levels_4bit[16];

/* Level `number` of the quantiser of width 1, 2 or 4 bits. */
double ref_ladder_value(uint32_t number, uint32_t width);

uint32_t ref_ladder_coords(const ref_view *view, int side); /* coordinates of the transform */
uint32_t ref_ladder_index(const ref_view *view, int side, uint32_t head, uint64_t token);
int ref_ladder_coeff_code(const ref_view *view, int side, uint32_t head, uint64_t token); /* -8..7 */
double ref_ladder_coeff(const ref_view *view, int side, uint32_t head, uint64_t token);
uint32_t ref_ladder_level(const ref_view *view, int side, uint32_t head, uint64_t token);
void ref_ladder_anchor(const ref_view *view, int side, uint32_t head, uint32_t anchor, double *out);
void ref_ladder_mean(const ref_view *view, uint32_t head, double *out);
uint32_t ref_ladder_bits(const ref_view *view, int side, uint32_t head, uint32_t level, uint32_t coord);
uint32_t ref_ladder_level_bits(const ref_view *view, int side, uint32_t head, uint32_t level); /* per residual */
double ref_ladder_sigma(const ref_view *view, int side, uint32_t head, uint32_t coord);

/* What coordinate `coord` of the transform stands for: a vector [dim]. */
void ref_ladder_direction(const ref_view *view, int side, uint32_t head, uint32_t coord, double *out);

/* Coded residuals of a head in the transform's coordinates: z [S, coords], 0 where there is none. */
bool ref_ladder_coded(const ref_view *view, int side, uint32_t head, double *z);
bool ref_ladder_gains(const ref_view *view, int side, uint32_t head, double *gain); /* [S], 0 where there is none */

/* ref_decode for this coding. size: norms of the anchor part, the mean and every coordinate's share, added up. */
bool ref_decode_ladder(const ref_view *view, int side, uint32_t head, double *out, double *size);

/* -------------------------------------------------------------------------------------------- attention (section 5) */

/*
 * One query row over n tokens: out = sum_p softmax_p(cap(scale q.k_p) + bias_p) v_p; a sink joins the denominator only.
 *
 *   bias  in   [n], -inf hides a token, or NULL
 *   sink  in   one logit, or NULL
 *   key_sizes, value_sizes  in  [n] what ref_decode gives, or NULL: the norms of the rows
 */
typedef struct ref_row_result {
    double max;       /* the largest visible logit, -inf when there is none; the sink does not count */
    double lse;       /* log of the denominator, sink included; -inf when it is 0 */
    double tol_out;   /* fp32 rounding of every coordinate of out: a bound, far above what is seen */
    double plain;     /* what is seen: the largest error of a coordinate when plain fp32 loops do the same sums */
    double tol_logit; /* fp32 rounding of max and lse */
    double whole;     /* share of tol_out, and what may come on top of plain: rounding to 16 bits (ref_rounding), or 0
                         */
} ref_row_result;

/* Rounding to 16 bits in attention over one head of a LADDER segment. Freed by ref_rounding_free. */
typedef struct ref_rounding ref_rounding;
ref_rounding *ref_rounding_of(const void *blob, uint32_t head);
void ref_rounding_free(ref_rounding *rounding);
void ref_rounding_logits(const ref_rounding *rounding, const double *q, double *off); /* q times the scale; off [S] */
double ref_rounding_out(const ref_rounding *rounding, const double *weights);         /* weights [S]: any coordinate of
                                                                                         out */

bool ref_attend_row(const double *q, uint64_t n, const double *keys, const double *key_sizes, uint32_t dim_k,
                    const double *values, const double *value_sizes, uint32_t dim_v, const double *bias, double scale,
                    double cap, const float *sink, double *out, ref_row_result *result);

/* akv_attend in doubles: segments are decoded by ref_decode. out [H*G, T, d_v], rows [H*G, T]. */
bool ref_attend(const akv_attend_params *params, double *out, ref_row_result *rows);

#endif
