/* SPDX-License-Identifier: Apache-2.0 */
/*
 * evict.c - the SnapKV eviction baseline at equal bytes, for comparison only. As kvpress runs it (average pooling of
 * width 5, window always kept, softmax over all columns), except that the window is the W queries at hand.
 */
#include "codec/codec.h"

#define SNAPKV_POOL 5u

akv_status akv_evict_snapkv(const akv_layer *layer, const akv_config *config, akv_segment **out, akv_diag *diag)
{
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    AKV_TRY(akv_check_config(config, diag));
    if (layer == NULL || layer->struct_size < sizeof *layer)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer must come from akv_layer_init");
    AKV_TRY(akv_check_layer(layer, layer->shape.num_tokens > layer->shape.num_queries, diag));
    const akv_shape *s = &layer->shape;
    const uint64_t dense = akv_dense_bytes(s->num_tokens, s->num_kv_heads, s->head_dim_k, s->head_dim_v);
    const uint64_t budget =
        config->budget_bytes != 0 ? config->budget_bytes : (uint64_t)(config->keep_ratio * (double)dense);
    if (s->num_tokens <= s->num_queries)
        return akv_make_dense(layer, config, AKV_DENSE_WITHIN_WINDOW, NULL, 0, budget, out, diag);

    akv_header header;
    akv_header_from_layer(&header, layer);
    header.kind = AKV_SEGMENT_DENSE;
    uint64_t low = 0, high = s->num_tokens; /* bytes are monotone in the kept tokens: bisect */
    while (low < high) {
        header.num_tokens = low + (high - low + 1) / 2;
        akv_layout_sections(&header, false);
        if (AKV_SEGMENT_OBJECT_BYTES + header.total_bytes <= budget)
            low = header.num_tokens;
        else
            high = header.num_tokens - 1;
    }
    if (low < s->num_queries)
        return akv_fail(diag, AKV_E_INFEASIBLE,
                        "a budget of %llu bytes keeps %llu tokens per head, fewer than the window of %u",
                        (unsigned long long)budget, (unsigned long long)low, s->num_queries);
    if (low == s->num_tokens)
        return akv_make_dense(layer, config, AKV_DENSE_FITS, NULL, 0, budget, out, diag);
    AKV_TRY(akv_check_input(layer, config, diag));

    akv_experiment experiment;
    akv_experiment_init(&experiment);
    akv_job job;
    akv_arena arena;
    uint8_t *mask = NULL;
    header.num_anchors = 0;
    AKV_TRY(akv_job_begin(&job, layer, config, &experiment, &header, NULL, &mask, &arena, diag));
    akv_observe(&job);
    uint32_t *kept = job.anchor_of; /* [H, low] fits into [H, S] */
    for (uint32_t head = 0; head < job.H; head++) {
        uint64_t count = 0;
        akv_pool_scores(&job, head, job.S - job.W, SNAPKV_POOL);
        akv_take_largest(job.pooled + head * job.S, job.S - job.W, low - job.W, mask);
        memset(mask + (job.S - job.W), 1, job.W);
        for (uint64_t t = 0; t < job.S; t++)
            if (mask[t])
                kept[head * low + count++] = (uint32_t)t;
    }
    akv_status status = akv_make_dense(layer, config, AKV_DENSE_EVICTED, kept, low, budget, out, diag);
    akv_job_end(&job, &arena);
    return status;
}
