/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.c - a compressed document as an object: made from parts, taken apart again, shared by reference.
 */
#include "host.h"

#include <string.h>

_Static_assert(sizeof(akv_llama_fingerprint) == 96, "written to files as it is");
_Static_assert(sizeof(akv_llama_layer) == 72, "written to files as it is");

void akv_llama_store_parts_init(akv_llama_store_parts *parts)
{
    memset(parts, 0, sizeof *parts);
    parts->struct_size = sizeof *parts;
}

akv_status akv_llama_store_get_parts(const akv_llama_store *store, akv_llama_store_parts *out, akv_diag *diag)
{
    if (!store || !out || out->struct_size != sizeof *out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "store is NULL, or out was not filled by akv_llama_store_parts_init");
    *out = store->parts;
    return AKV_OK;
}

static akv_status check_layer(const akv_llama_store_parts *p, uint32_t i, uint32_t *next_segment, akv_diag *diag)
{
    const akv_llama_layer *layer = &p->layers[i];
    if (layer->kind > AKV_LLAMA_LAYER_NO_CACHE)
        return akvl_fail(diag, AKV_E_CORRUPT, "layer %u is of unknown kind %u", i, layer->kind);
    if (layer->kind != AKV_LLAMA_LAYER_HOSTED) {
        if (layer->num_segments != 0)
            return akvl_fail(diag, AKV_E_CORRUPT, "layer %u is left to libllama and yet has %u segments", i,
                             layer->num_segments);
        if (layer->kind == AKV_LLAMA_LAYER_WINDOW && p->native_state_bytes == 0)
            return akvl_fail(diag, AKV_E_CORRUPT, "layer %u has a sliding window, but its state is missing", i);
        return AKV_OK;
    }
    if (layer->num_segments == 0 || layer->first_segment != *next_segment ||
        layer->num_segments > p->num_segments - *next_segment)
        return akvl_fail(diag, AKV_E_CORRUPT, "layer %u names segments %u to %llu; segment %u of %u comes next", i,
                         layer->first_segment, (unsigned long long)layer->first_segment + layer->num_segments,
                         *next_segment, p->num_segments);
    *next_segment += layer->num_segments;
    int64_t position = -1;
    uint64_t tokens = 0;
    bool all_kept = true;
    for (uint32_t s = 0; s < layer->num_segments; s++) {
        akv_segment_info info;
        akv_segment_info_init(&info);
        const akv_segment *segment = p->segments[layer->first_segment + s];
        if (!segment || akv_segment_get_info(segment, &info, NULL) != AKV_OK)
            return akvl_fail(diag, AKV_E_CORRUPT, "layer %u: segment %u is missing", i, s);
        const akv_shape *shape = &info.shape;
        if (shape->num_kv_heads != layer->num_kv_heads || shape->gqa_group != layer->gqa_group ||
            shape->head_dim_k != layer->head_dim_k || shape->head_dim_v != layer->head_dim_v ||
            shape->rotary_dim != layer->rotary_dim)
            return akvl_fail(diag, AKV_E_CORRUPT, "layer %u: segment %u has another shape than its layer", i, s);
        if (info.first_position <= position || info.last_position >= p->next_position)
            return akvl_fail(diag, AKV_E_CORRUPT,
                             "layer %u: segment %u holds positions %d to %d, out of order or not below %d", i, s,
                             info.first_position, info.last_position, p->next_position);
        position = info.last_position;
        tokens += shape->num_tokens;
        all_kept = all_kept && info.dense_reason != AKV_DENSE_EVICTED;
    }
    if (all_kept && tokens != p->num_tokens)
        return akvl_fail(diag, AKV_E_CORRUPT, "layer %u holds %llu tokens; the document has %llu", i,
                         (unsigned long long)tokens, (unsigned long long)p->num_tokens);
    return AKV_OK;
}

static akv_status check_parts(const akv_llama_store_parts *p, akv_diag *diag)
{
    if (p->num_tokens == 0 || p->num_tokens > INT32_MAX || p->next_position < 0 ||
        (uint64_t)p->next_position != p->num_tokens || !p->tokens)
        return akvl_fail(diag, AKV_E_CORRUPT,
                         "the document has %llu tokens and goes on at position %d; the two must agree and be at"
                         " least 1",
                         (unsigned long long)p->num_tokens, p->next_position);
    if (p->num_layers == 0 || !p->layers || p->num_layers != p->fingerprint.num_layers)
        return akvl_fail(diag, AKV_E_CORRUPT, "%u layers are given for a model of %u", p->num_layers,
                         p->fingerprint.num_layers);
    if (p->num_segments == 0 || !p->segments)
        return akvl_fail(diag, AKV_E_CORRUPT, "no segments are given; at least one layer must be compressed");
    if (p->method > AKV_LLAMA_CUSTOM)
        return akvl_fail(diag, AKV_E_CORRUPT, "method %u is unknown", p->method);
    if ((p->native_state == NULL) != (p->native_state_bytes == 0))
        return akvl_fail(diag, AKV_E_CORRUPT,
                         "the state of layers left to libllama has %llu bytes and no data, or the reverse",
                         (unsigned long long)p->native_state_bytes);
    for (uint64_t i = 0; i < p->num_tokens; i++)
        if (p->tokens[i] < 0 || (uint32_t)p->tokens[i] >= p->fingerprint.vocab_tokens)
            return akvl_fail(diag, AKV_E_CORRUPT, "token %llu is %d; the model has %u tokens", (unsigned long long)i,
                             p->tokens[i], p->fingerprint.vocab_tokens);
    uint32_t next_segment = 0;
    for (uint32_t i = 0; i < p->num_layers; i++) {
        const akv_status status = check_layer(p, i, &next_segment, diag);
        if (status != AKV_OK)
            return status;
    }
    if (next_segment != p->num_segments)
        return akvl_fail(diag, AKV_E_CORRUPT, "%u segments are given; the layers use %u", p->num_segments,
                         next_segment);
    return AKV_OK;
}

static void *copy(const void *from, size_t n, size_t element_bytes)
{
    void *to = akvl_new(n, element_bytes);
    if (to && n)
        memcpy(to, from, n * element_bytes);
    return to;
}

akv_status akv_llama_store_create(const akv_llama_store_parts *parts, akv_llama_store **out, akv_diag *diag)
{
    if (!parts || parts->struct_size != sizeof *parts || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "parts must be filled by akv_llama_store_parts_init, and out not be NULL");
    const akv_status status = check_parts(parts, diag);
    if (status != AKV_OK)
        return status;
    akv_llama_store *store = akvl_new(1, sizeof *store);
    if (store) {
        store->tokens = copy(parts->tokens, (size_t)parts->num_tokens, sizeof *parts->tokens);
        store->layers = copy(parts->layers, parts->num_layers, sizeof *parts->layers);
        store->segments = copy(parts->segments, parts->num_segments, sizeof *parts->segments);
        store->native_state = copy(parts->native_state, (size_t)parts->native_state_bytes, 1);
    }
    if (!store || !store->tokens || !store->layers || !store->segments || !store->native_state) {
        if (store) {
            free(store->tokens);
            free(store->layers);
            free(store->segments);
            free(store->native_state);
            free(store);
        }
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the tables of a document of %llu tokens",
                         (unsigned long long)parts->num_tokens);
    }
    for (uint32_t i = 0; i < parts->num_segments; i++)
        akv_segment_retain(store->segments[i]);
    store->parts = *parts;
    store->parts.tokens = store->tokens;
    store->parts.layers = store->layers;
    store->parts.segments = store->segments;
    store->parts.native_state = parts->native_state_bytes ? store->native_state : NULL;
    atomic_init(&store->references, 1);
    *out = store;
    return AKV_OK;
}

akv_llama_store *akv_llama_store_retain(akv_llama_store *store)
{
    if (store)
        atomic_fetch_add_explicit(&store->references, 1, memory_order_relaxed);
    return store;
}

void akv_llama_store_release(akv_llama_store *store)
{
    if (!store || atomic_fetch_sub_explicit(&store->references, 1, memory_order_acq_rel) != 1)
        return;
    for (uint32_t i = 0; i < store->parts.num_segments; i++)
        akv_segment_release(store->segments[i]);
    free(store->tokens);
    free(store->layers);
    free(store->segments);
    free(store->native_state);
    free(store);
}
