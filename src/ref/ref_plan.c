/* SPDX-License-Identifier: Apache-2.0 */
/* ref_plan.c - the byte accounting of section 4 over the sections of layout.h. */
#include "core/segment.h"
#include "ref/ref.h"

#include <math.h>

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

uint64_t ref_dense_bytes(const akv_shape *s, uint32_t element_bytes)
{
    uint64_t rows = (uint64_t)s->num_kv_heads * s->num_tokens;
    return 64 + 768 + padded(rows * s->head_dim_k * element_bytes) + padded(rows * s->head_dim_v * element_bytes);
}

uint64_t ref_compressed_bytes(const akv_shape *s, uint32_t k, const uint64_t residuals[2])
{
    uint64_t H = s->num_kv_heads, S = s->num_tokens;
    uint64_t total = 64 + 768;                               /* object, header */
    total += padded((uint64_t)s->rotary_dim / 2 * 8);        /* RoPE table */
    total += s->has_positions ? padded(S * 4) : 0;           /* token positions */
    total += padded(H * k * 4);                              /* anchor tokens */
    for (int side = 0; side < 2; side++) {
        uint64_t dim = side == 0 ? s->head_dim_k : s->head_dim_v;
        total += padded(H * k * dim * 2);                    /* anchors */
        total += padded(H * S * (k <= 256 ? 1 : 2));         /* index */
        total += padded(H * S * 2);                          /* coefficient */
        total += padded(H * ((S + 7) / 8));                  /* which tokens own a residual */
        total += padded((H * ((S + 1023) / 1024) + 1) * 8);  /* residuals before each block */
        total += padded(residuals[side] * 2);                /* scales */
        total += padded(residuals[side] * ((dim * 2 + 7) / 8)); /* codes */
    }
    return total;
}

uint64_t ref_ladder_bytes(const akv_shape *s, const ref_ladder_sizes *z)
{
    uint64_t H = s->num_kv_heads, S = s->num_tokens, k = z->anchors, index_bits = 1, planes = 1;
    while (k > 1ull << index_bits)
        index_bits++;
    while (z->levels >= 1u << planes)
        planes++;
    uint64_t total = 64 + 768;                               /* object, header */
    total += padded((uint64_t)s->rotary_dim / 2 * 8);        /* RoPE table */
    total += s->has_positions ? padded(S * 4) : 0;           /* token positions */
    total += padded(H * s->head_dim_k * 2);                  /* mean key */
    total += padded((uint64_t)s->head_dim_k * 2);            /* order of the key coordinates */
    total += padded((H * ((S + 1023) / 1024) * 2 + 1) * 8);  /* where each block's codes begin */
    total += padded(z->code_bytes);
    for (int side = 0; side < 2; side++) {
        uint64_t dim = side == 0 ? s->head_dim_k : s->head_dim_v, cols = z->basis_cols[side];
        uint64_t coords = cols + dim - z->basis_dim[side];
        total += padded(H * k * dim) + padded(H * k * 2);    /* anchors and their scales */
        total += padded(H * dim * 2);                        /* units */
        total += padded(H * ((S * index_bits + 7) / 8) + 4); /* index */
        total += padded(H * ((S + 1) / 2));                  /* coefficient */
        total += padded(H * cols * z->basis_dim[side]) + padded(H * cols * 4);
        total += padded(H * coords * 2);                     /* sigmas */
        total += padded(H * z->levels * ((coords + 3) / 4)); /* level tables */
        total += padded(H * planes * ((S + 7) / 8));         /* levels */
    }
    return total;
}

/* N slots: N/2 to keys, the rest to values; what a side cannot use goes to the other. */
static void split(uint64_t n, uint64_t most, uint64_t out[2])
{
    out[0] = n / 2 < most ? n / 2 : most;
    out[1] = n - out[0] < most ? n - out[0] : most;
    uint64_t left = n - out[0] - out[1];
    out[0] = out[0] + left < most ? out[0] + left : most;
}

ref_plan ref_make_plan(const akv_shape *s, double keep_ratio, uint64_t budget_bytes, const akv_experiment *experiment)
{
    ref_plan p = {0};
    uint64_t none[2] = {0, 0};
    uint32_t per_anchor = experiment != NULL ? experiment->tokens_per_anchor : 128;
    p.dense_bytes = (uint64_t)s->num_kv_heads * s->num_tokens * ((uint64_t)s->head_dim_k + s->head_dim_v) * 2;
    p.budget = budget_bytes != 0 ? budget_bytes : (uint64_t)floor(keep_ratio * (double)p.dense_bytes);
    p.num_anchors = ref_num_anchors(s->num_tokens, s->num_queries, per_anchor);
    uint64_t dense = ref_dense_bytes(s, s->dtype == AKV_F32 ? 4 : 2);
    uint64_t fixed = ref_compressed_bytes(s, p.num_anchors, none);
    p.min_bytes = dense < fixed ? dense : fixed;

    p.kind = AKV_SEGMENT_DENSE;
    p.total = dense;
    p.feasible = true;
    if (s->num_tokens <= s->num_queries)
        p.dense_reason = AKV_DENSE_WITHIN_WINDOW;
    else if (budget_bytes == 0 && keep_ratio == 1)
        p.dense_reason = AKV_DENSE_REQUESTED;
    else if (dense <= p.budget)
        p.dense_reason = AKV_DENSE_FITS;
    else {
        p.kind = AKV_SEGMENT_COMPRESSED;
        p.dense_reason = AKV_DENSE_NONE;
        p.feasible = fixed <= p.budget;
    }
    if (p.kind == AKV_SEGMENT_DENSE) {
        p.num_anchors = 0;
        return p;
    }
    if (!p.feasible)
        return p;
    /* the largest N that fits; the bytes never fall when N grows, so bisect */
    uint64_t most = s->num_kv_heads * (s->num_tokens - p.num_anchors);
    uint64_t unit = 1; /* slots are dealt out in these; equal budgets give every head the same number per side */
    if (experiment != NULL && experiment->equal_head_budgets) {
        unit = s->num_kv_heads;
        most = s->num_tokens - p.num_anchors;
    }
    uint64_t low = 0, high = 2 * most;
    if (experiment != NULL && experiment->anchors_only)
        high = 0;
    while (low < high) {
        uint64_t mid = low + (high - low + 1) / 2, r[2];
        split(mid, most, r);
        r[0] *= unit;
        r[1] *= unit;
        if (ref_compressed_bytes(s, p.num_anchors, r) <= p.budget)
            low = mid;
        else
            high = mid - 1;
    }
    split(low, most, p.residuals);
    p.residuals[0] *= unit;
    p.residuals[1] *= unit;
    p.total = ref_compressed_bytes(s, p.num_anchors, p.residuals);
    return p;
}
