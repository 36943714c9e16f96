/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress.c - the dense cache of context A -> one segment a layer -> a store; the cache is read where it lies.
 */
#include "host.h"

#include <anchorkv/akv_experimental.h>

#include <string.h>

/* Rows [0, tokens) of a cache root as a [head, token, dim] view; cells hold positions in order (akvl_capture checked).
 */
static akv_tensor cache_view(const struct ggml_tensor *root, uint32_t dim)
{
    return (akv_tensor){.data = root->data,
                        .dtype = AKV_F16,
                        .stride_head = dim,
                        .stride_token = (int64_t)(root->nb[1] / sizeof(uint16_t)),
                        .stride_dim = 1};
}

void akvl_describe_layer(const akvl_layer *from, int32_t number, uint64_t num_tokens, int32_t first_position,
                         akv_layer *out)
{
    akv_layer_init(out);
    out->shape.num_tokens = num_tokens;
    out->shape.num_kv_heads = from->num_kv_heads;
    out->shape.gqa_group = from->gqa_group;
    out->shape.head_dim_k = from->head_dim_k;
    out->shape.head_dim_v = from->head_dim_v;
    out->shape.rotary_dim = from->rotary_dim;
    out->layer_index = number;
    out->keys = cache_view(from->k_root, from->head_dim_k);
    out->values = cache_view(from->v_root, from->head_dim_v);
    out->first_position = first_position;
    out->rope.rotary_dim = from->rotary_dim;
    out->rope.style = from->rope_style;
    out->rope.magnitude = from->magnitude;
    out->rope.inv_freq = from->inv_freq;
    out->sm_scale = from->sm_scale;
    out->logit_softcap = from->logit_softcap;
}

/* Who makes the segments of a store. */
typedef struct maker {
    akv_llama_method method;
    akv_llama_segment_fn make; /* AKV_LLAMA_CUSTOM */
    void *opaque;
} maker;

static akv_status compress_layer(akv_llama *host, uint32_t number, const maker *by, const akv_config *config,
                                 akv_segment **out, akv_diag *diag)
{
    akv_layer layer;
    const akvl_layer *from = &host->dense_graph->layers[number];
    akvl_describe_layer(from, (int32_t)number, host->num_tokens, 0, &layer);
    layer.shape.num_queries = host->options.observation_queries;
    if (host->dense_hook.queries[number])
        layer.queries = akv_tensor_contiguous(host->dense_hook.queries[number], AKV_F32, host->dense_hook.num_queries,
                                              from->head_dim_k);
    if (host->dense_hook.sampled[number]) {
        layer.num_sampled = host->dense_hook.num_sampled;
        layer.sampled =
            akv_tensor_contiguous(host->dense_hook.sampled[number], AKV_F32, layer.num_sampled, from->head_dim_k);
        layer.sampled_positions = host->dense_hook.sampled_positions;
    }
    akv_diag inner = {.status = AKV_OK};
    akv_status status;
    switch (by->method) {
    case AKV_LLAMA_ANCHOR:
        status = akv_compress(&layer, config, out, &inner);
        break;
    case AKV_LLAMA_SNAPKV:
        status = akv_evict_snapkv(&layer, config, out, &inner);
        break;
    case AKV_LLAMA_EXACT:
        status = akv_segment_create_dense(&layer, config, out, &inner);
        break;
    default:
        status = by->make(by->opaque, &layer, config, out, &inner);
    }
    if (status != AKV_OK)
        akvl_fail(diag, status, "layer %u: %.480s", number, inner.message);
    return status;
}

/* factors: of the layers' budgets, or NULL */
static akv_status build_store(akv_llama *host, const maker *by, const akv_config *config, const double *factors,
                              akv_llama_layer *layers, akv_segment **segments, akv_llama_store **out, akv_diag *diag)
{
    const uint32_t num_layers = host->num_layers;
    uint32_t num_segments = 0;
    akv_status status = AKV_OK;
    for (uint32_t i = 0; i < num_layers && status == AKV_OK; i++) {
        const akvl_layer *layer = &host->dense_graph->layers[i];
        if (!host->is_hosted[i]) {
            layers[i].kind = layer->seen ? AKV_LLAMA_LAYER_WINDOW : AKV_LLAMA_LAYER_NO_CACHE;
            host->layer_stats[i].seconds = 0.0;
        } else {
            const double start = akvl_seconds();
            akvl_layer_signature(layer, &layers[i]);
            akv_config own = *config;
            if (factors)
                akvl_share_config(config, factors[i], &own);
            status = compress_layer(host, i, by, &own, &segments[num_segments], diag);
            if (status != AKV_OK)
                break;
            layers[i].first_segment = num_segments++;
            layers[i].num_segments = 1;
            host->layer_stats[i].seconds = akvl_seconds() - start;
        }
        if (host->options.progress &&
            host->options.progress(host->options.progress_opaque, AKV_LLAMA_STAGE_COMPRESS, i + 1, num_layers) != 0)
            status = akvl_fail(diag, AKV_E_CANCELLED, "compression was cancelled after layer %u", i);
    }
    if (status == AKV_OK) {
        akv_llama_store_parts parts;
        akv_llama_store_parts_init(&parts);
        parts.fingerprint = host->info.fingerprint;
        parts.tokens = host->tokens;
        parts.num_tokens = host->num_tokens;
        parts.next_position = (int32_t)host->num_tokens;
        parts.method = (uint32_t)by->method;
        parts.num_layers = num_layers;
        parts.layers = layers;
        parts.num_segments = num_segments;
        parts.segments = segments;
        parts.native_state = host->dense_state;
        parts.native_state_bytes = host->dense_state ? host->dense_state_bytes : 0;
        status = akv_llama_store_create(&parts, out, diag);
    }
    for (uint32_t i = 0; i < num_segments; i++)
        akv_segment_release(segments[i]); /* the store holds its own references */
    return status;
}

static akv_status compress(akv_llama *host, const maker *by, const akv_config *config, akv_llama_store **out,
                           akv_diag *diag)
{
    if (!host || !config || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, config and out must not be NULL");
    if (!host->dense)
        return akvl_fail(diag, AKV_E_BAD_STATE, "there is no dense cache to compress; run akv_llama_prefill first");
    if (host->dense_position != host->num_tokens)
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         "the dense cache has gone on behind the document; run akv_llama_rewind first");
    if (host->not_hostable.status != AKV_OK)
        return akvl_fail(diag, host->not_hostable.status, "%s", host->not_hostable.message);
    akv_config own = *config;
    if (!own.executor)
        own.executor = host->options.executor;
    akv_llama_layer *layers = akvl_new(host->num_layers, sizeof *layers);
    akv_segment **segments = akvl_new(host->num_layers, sizeof *segments);
    double *factors = akvl_new(host->num_layers, sizeof *factors), strength = 0.0;
    const bool uneven = by->method == AKV_LLAMA_ANCHOR && host->shares;
    const double start = akvl_seconds();
    if (uneven && factors)
        akvl_layer_factors(host, &own, factors, &strength);
    akv_status status =
        layers && segments && factors
            ? build_store(host, by, &own, uneven ? factors : NULL, layers, segments, out, diag)
            : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", host->num_layers);
    free(layers);
    free(segments);
    free(factors);
    if (status == AKV_OK) {
        host->stats.share_strength = strength;
        host->stats.compress_seconds = akvl_seconds() - start;
        akvl_note_store(host, *out);
    }
    return status;
}

akv_status akv_llama_compress(akv_llama *host, akv_llama_method method, const akv_config *config, akv_llama_store **out,
                              akv_diag *diag)
{
    const maker by = {.method = method};
    if ((unsigned)method > AKV_LLAMA_EXACT)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "method %d is unknown; 0 to 2 exist", (int)method);
    return compress(host, &by, config, out, diag);
}

akv_status akv_llama_compress_with(akv_llama *host, akv_llama_segment_fn make, void *opaque, const akv_config *config,
                                   akv_llama_store **out, akv_diag *diag)
{
    const maker by = {AKV_LLAMA_CUSTOM, make, opaque};
    if (!make)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "make is NULL; it makes the segment of one layer");
    return compress(host, &by, config, out, diag);
}
