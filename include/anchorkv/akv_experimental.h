/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_experimental.h - the ablations of the paper and eviction baselines. Nothing here is stable; segments made with
 * these switches are ordinary segments and decode with the ordinary functions.
 */
#ifndef ANCHORKV_EXPERIMENTAL_H
#define ANCHORKV_EXPERIMENTAL_H

#include "anchorkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ranks the tokens that may own a residual. */
typedef enum akv_rank {
    AKV_RANK_UTILITY = 0,   /* first-order effect on the attention output (the paper) */
    AKV_RANK_COSINE = 1,    /* worst |cosine| to the nearest anchor first */
    AKV_RANK_NORM = 2,      /* largest residual norm first */
    AKV_RANK_ATTENTION = 3, /* most attended first, both sides alike */
    AKV_RANK_RANDOM = 4
} akv_rank;

/* How a residual's gain is chosen (profile paper). */
typedef enum akv_scale_rule {
    AKV_SCALE_ABSMAX = 0,       /* largest coordinate meets the largest level (the paper) */
    AKV_SCALE_LEAST_SQUARES = 1 /* the scale with the least squared error, found by alternating fits */
} akv_scale_rule;

/* How a residual is turned into codes (profile paper). */
typedef enum akv_code_rule {
    AKV_CODE_ROTATED_LLOYD_MAX = 0, /* random-sign Hadamard, 4-level Lloyd-Max (the paper) */
    AKV_CODE_PLAIN_UNIFORM = 1      /* no rotation; 4 equally spaced levels between -absmax and +absmax */
} akv_code_rule;

/* Where key anchors and projections live (profile paper). */
typedef enum akv_anchor_space {
    AKV_ANCHOR_PRE_ROPE = 0, /* the paper */
    AKV_ANCHOR_POST_ROPE = 1 /* as the cache holds keys: an ablation */
} akv_anchor_space;

/* Every choice of a profile, to be varied one at a time. */
typedef struct akv_experiment {
    size_t struct_size;
    akv_rank rank;              /* profile paper, like the next six */
    akv_scale_rule scale_rule;  /* the gain */
    akv_code_rule code_rule;    /* the code */
    akv_anchor_space anchor_space;/* the anchors */
    int no_random_anchors;      /* all free anchors by attention score */
    int equal_head_budgets;     /* every KV head gets the same number of residuals per side */
    int anchors_only;           /* no residuals at all; the freed budget is not used */
    double rho;                 /* share of the free anchors chosen by score; 0.7 */
    uint32_t pool_width;        /* kappa, odd; 7 */
    uint32_t tokens_per_anchor; /* k = S / this; 128 */

    /* Profile default only (docs/method.md): */
    uint32_t sinks;             /* first tokens that are always anchors */
    uint32_t pool_tokens;       /* utility is spread forwards over about this many tokens; 0 = not at all */
    double incoherent;          /* share of the incoherent estimate in the squared logit error, 0..1 */
    double floor;               /* utility that is spread evenly, relative to the observed one */
    double value_boost;         /* factor on the value side's utility */
    double query_mix;           /* share of the even weight in the query weighting of key coordinates, 0..1 */
    double slow_angle;          /* a plane turning less than this over the segment (radians) is coded under the basis */
    uint32_t basis_cols;        /* most basis directions per head and side; 0: no bases, coordinates as they are */
    uint32_t num_levels;        /* 1..15 */
    uint16_t level_bits[16];    /* bits per residual of each level, rising */
    int uniform_anchors;        /* the free anchors uniformly at random instead of for coverage */
    uint32_t anchor_rounds;     /* rounds that turn free anchors into centroids; 0: they stay tokens */
    uint32_t most_attended;     /* most free anchors chosen by score, whatever rho says; 0: no limit */
    double pool_weight;         /* weight of what is spread over neighbours, 0..1 */
} akv_experiment;

AKV_API void akv_experiment_init(akv_experiment *experiment); /* the paper's settings */
AKV_API void akv_experiment_init_default(akv_experiment *experiment); /* those of the profile default */

/*
 * akv_evict_snapkv() - the SnapKV eviction baseline at equal bytes, as kvpress runs it: mean attention of the last W
 * queries, average pooling of width 5, the top n tokens of every KV head and the window kept exactly, the rest dropped.
 * n is the largest count whose bytes stay within the budget. The result is a dense segment of n tokens per head
 * (AKV_DENSE_EVICTED). Errors as akv_compress.
 */
AKV_API akv_status akv_evict_snapkv(const akv_layer *layer, const akv_config *config, akv_segment **out,
                                    akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
