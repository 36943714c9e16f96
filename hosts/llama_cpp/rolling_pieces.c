/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling_pieces.c - one piece of a conversation becomes a compressed segment. A piece is short, and what a segment
 * pays once is much of its bytes: so it is made otherwise than a whole document (docs/method.md "a conversation").
 */
#include "rolling.h"

#include <string.h>

/* Anchors of a piece take this share of the bytes that its tokens have on average, but come to one in so many tokens. */
#define ANCHOR_SHARE 0.3
enum { MOST_PER_ANCHOR = 32, LEAST_PER_ANCHOR = 10 };

/* What a token of the layer may take on average, with what the conversation may take now. */
static double token_bytes(const akv_llama *host, uint32_t i)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    const double dense = 2.0 * (double)l->num_kv_heads * (double)(l->head_dim_k + l->head_dim_v),
                 tokens = (double)host->tail_position - (double)host->rolling.options.from_token,
                 limit = (double)akvl_ratio_limit(host) / (double)akvl_token_bytes(host);
    return (tokens > limit ? limit / tokens : 1.0) * dense * akvl_layer_share(host, i);
}

void akvl_piece_config(const akv_llama *host, uint32_t i, int64_t first_position, akv_experiment *experiment,
                       akv_config *out)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    *out = host->rolling.options.config;
    out->executor = out->executor ? out->executor : host->options.executor;
    if (out->experiment || out->profile != AKV_PROFILE_DEFAULT)
        return;
    akv_experiment_init_default(experiment);
    const double anchor = (double)l->num_kv_heads * (double)(l->head_dim_k + l->head_dim_v + 4),
                 per_anchor = anchor / (ANCHOR_SHARE * token_bytes(host, i));
    experiment->basis_cols = 0;
    experiment->tokens_per_anchor = per_anchor > MOST_PER_ANCHOR    ? MOST_PER_ANCHOR
                                    : per_anchor < LEAST_PER_ANCHOR ? LEAST_PER_ANCHOR
                                                                    : (uint32_t)per_anchor;
    if (first_position > 0) /* sinks stand at the beginning of a text */
        experiment->sinks = 0;
    out->experiment = experiment;
}

float *akvl_latest_queries(const akv_llama *host, uint32_t i)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    const size_t W = akvl_rolling_observing(host), d = l->head_dim_k, seen = (size_t)host->rolling.seen[i];
    const size_t have = seen < W ? seen : W;
    float *out = akvl_new((size_t)l->num_kv_heads * l->gqa_group * W, d * sizeof *out);
    for (size_t h = 0; out && h < (size_t)l->num_kv_heads * l->gqa_group; h++)
        for (size_t r = 0; r < W; r++) {
            const size_t from = r < W - have ? 0 : r - (W - have);
            memcpy(out + (h * W + r) * d, host->rolling.queries[i] + (h * W + (seen - have + from) % W) * d,
                   d * sizeof *out);
        }
    return out;
}

akv_status akvl_compress_piece(akv_llama *host, uint32_t i, uint32_t first, uint32_t take, uint64_t tokens,
                               uint64_t bytes, akv_segment **out, akv_diag *diag)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    akv_segment **segments = host->running.lists[i] + first;
    const size_t H = l->num_kv_heads, dk = l->head_dim_k, dv = l->head_dim_v, W = akvl_rolling_observing(host);
    float *keys = akvl_new(H * (size_t)tokens, dk * sizeof *keys),
          *values = akvl_new(H * (size_t)tokens, dv * sizeof *values);
    float *queries = akvl_latest_queries(host, i);
    akv_layer layer;
    akv_diag inner = {.status = AKV_OK};
    akv_status status = keys && values && queries ? AKV_OK : AKV_E_NO_MEMORY;
    if (status == AKV_OK) {
        size_t at = 0;
        for (uint32_t s = 0; s < take; s++) {
            const size_t n = (size_t)akvl_info_of(segments[s]).shape.num_tokens;
            for (size_t h = 0; h < H; h++)
                akv_segment_decode(segments[s], (uint32_t)h, 0, n, keys + (h * (size_t)tokens + at) * dk,
                                   values + (h * (size_t)tokens + at) * dv, NULL);
            at += n;
        }
        akvl_describe_layer(l, (int32_t)i, tokens, akvl_info_of(segments[0]).first_position, &layer);
        layer.keys = akv_tensor_contiguous(keys, AKV_F32, tokens, (uint32_t)dk);
        layer.values = akv_tensor_contiguous(values, AKV_F32, tokens, (uint32_t)dv);
        layer.queries = akv_tensor_contiguous(queries, AKV_F32, W, (uint32_t)dk);
        layer.shape.num_queries = (uint32_t)W;
        akv_experiment experiment;
        akv_config config;
        akvl_piece_config(host, i, layer.first_position, &experiment, &config);
        config.budget_bytes = bytes;
        status = akv_compress(&layer, &config, out, &inner);
        if (status != AKV_OK)
            akvl_fail(diag, status, "layer %u, %llu tokens of the conversation: %.400s", i, (unsigned long long)tokens,
                      inner.message);
    } else {
        akvl_fail(diag, status, "no memory for %llu tokens of layer %u", (unsigned long long)tokens, i);
    }
    free(keys);
    free(values);
    free(queries);
    return status;
}
