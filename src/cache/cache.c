/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c - life of a cache, its tails and its readers. change.c has what rearranges segments. */
#include "cache/cache.h"

void akv_cache_config_init(akv_cache_config *config)
{
    memset(config, 0, sizeof *config);
    config->struct_size = sizeof *config;
    config->tail_dtype = AKV_F16;
    config->num_queries = 32;
    akv_config_init(&config->codec);
}

void akv_cache_stats_init(akv_cache_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    stats->struct_size = sizeof *stats;
}

static akv_status check_config(const akv_cache_config *c, akv_diag *diag)
{
    if (c == NULL || c->struct_size < sizeof *c)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "config must come from akv_cache_config_init");
    if (c->num_layers == 0 || c->layers == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_layers is %u; at least one layer must be described",
                        c->num_layers);
    if ((unsigned)c->tail_dtype > AKV_BF16)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "tail_dtype is %d; it must be AKV_F32, AKV_F16 or AKV_BF16",
                        (int)c->tail_dtype);
    if (c->codec.struct_size < sizeof c->codec || c->codec.budget_bytes != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "codec must come from akv_config_init and give a keep_ratio, not budget_bytes");
    for (uint32_t i = 0; i < c->num_layers; i++) {
        const akv_cache_layer *l = &c->layers[i];
        akv_shape s;
        akv_diag inner;
        akv_shape_init(&s);
        s.num_tokens = 1;
        s.num_kv_heads = l->num_kv_heads;
        s.gqa_group = l->gqa_group;
        s.head_dim_k = l->head_dim_k;
        s.head_dim_v = l->head_dim_v;
        s.rotary_dim = l->rope.rotary_dim;
        s.num_queries = c->num_queries;
        if (akv_check_shape(&s, &inner) != AKV_OK)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer %u: %.480s", i, inner.message);
        if (l->rope.rotary_dim != 0 && l->rope.inv_freq == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer %u: rope.inv_freq is NULL; %u frequencies are needed",
                            i, l->rope.rotary_dim / 2);
    }
    return AKV_OK;
}

static akv_status check_layer(const akv_cache *cache, uint32_t layer, akv_diag *diag)
{
    if (cache == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "cache must not be NULL");
    if (layer >= cache->config.num_layers)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer is %u; the cache has %u", layer, cache->config.num_layers);
    return AKV_OK;
}

static void *new_zeroed(const akv_allocator *allocator, size_t bytes)
{
    void *p = akv_alloc(allocator, bytes);
    if (p != NULL)
        memset(p, 0, bytes);
    return p;
}

static void free_layer(akv_cache *cache, akv_layer_state *l)
{
    const akv_allocator *a = cache->config.codec.allocator;
    for (uint32_t s = 0; s < l->num_segments; s++)
        akv_segment_release(l->segments[s]);
    if (l->segments != NULL)
        akv_free(a, l->segments, l->capacity * sizeof *l->segments);
    if (l->shifts != NULL)
        akv_free(a, l->shifts, l->capacity * sizeof *l->shifts);
    if (l->queries != NULL)
        akv_free(a, l->queries, (size_t)akv_ring_floats(cache, l) * sizeof(float));
    if (l->shape.rope.inv_freq != NULL)
        akv_free(a, (void *)(uintptr_t)l->shape.rope.inv_freq, l->shape.rope.rotary_dim / 2 * sizeof(double));
    akv_tail_release(cache, l->tail);
}

void akv_cache_destroy(akv_cache *cache)
{
    if (cache == NULL)
        return;
    for (uint32_t i = 0; cache->layers != NULL && i < cache->config.num_layers; i++)
        free_layer(cache, &cache->layers[i]);
    akv_allocator allocator = cache->allocator;
    if (cache->layers != NULL)
        akv_free(&allocator, cache->layers, cache->config.num_layers * sizeof *cache->layers);
    akv_free(&allocator, cache, sizeof *cache);
}

akv_status akv_cache_create(const akv_cache_config *config, akv_cache **out, akv_diag *diag)
{
    AKV_TRY(check_config(config, diag));
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    const akv_allocator *a = config->codec.allocator;
    akv_cache *cache = new_zeroed(a, sizeof *cache);
    bool ok = cache != NULL;
    if (ok) {
        cache->config = *config;
        cache->config.layers = NULL;
        if (a != NULL) {
            cache->allocator = *a;
            cache->config.codec.allocator = &cache->allocator;
        }
        cache->layers = new_zeroed(a, config->num_layers * sizeof *cache->layers);
        ok = cache->layers != NULL;
    }
    for (uint32_t i = 0; ok && i < config->num_layers; i++) {
        akv_layer_state *l = &cache->layers[i];
        l->shape = config->layers[i];
        const size_t bytes = l->shape.rope.rotary_dim / 2 * sizeof(double);
        l->shape.rope.inv_freq = NULL;
        double *inv_freq = bytes == 0 ? NULL : akv_alloc(a, bytes);
        ok = bytes == 0 || inv_freq != NULL;
        if (inv_freq != NULL)
            memcpy(inv_freq, config->layers[i].rope.inv_freq, bytes);
        l->shape.rope.inv_freq = inv_freq;
        if (ok)
            l->queries = new_zeroed(a, (size_t)akv_ring_floats(cache, l) * sizeof(float));
        ok = ok && l->queries != NULL;
    }
    if (!ok) {
        akv_cache_destroy(cache);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a cache of %u layers", config->num_layers);
    }
    *out = cache;
    return AKV_OK;
}

akv_status akv_cache_fork(const akv_cache *cache, akv_cache **out, akv_diag *diag)
{
    if (cache == NULL || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "cache and out must not be NULL");
    const uint32_t n = cache->config.num_layers;
    akv_cache_config config = cache->config;
    akv_cache_layer *layers = akv_alloc(config.codec.allocator, n * sizeof *layers);
    if (layers == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a cache of %u layers", n);
    for (uint32_t i = 0; i < n; i++)
        layers[i] = cache->layers[i].shape;
    config.layers = layers;
    akv_cache *fork = NULL;
    akv_status status = akv_cache_create(&config, &fork, diag);
    akv_free(config.codec.allocator, layers, n * sizeof *layers);
    for (uint32_t i = 0; status == AKV_OK && i < n; i++) {
        const akv_layer_state *from = &cache->layers[i];
        akv_layer_state *to = &fork->layers[i];
        status = akv_cache_reserve(fork, to, from->num_segments, diag);
        if (status != AKV_OK)
            break;
        for (uint32_t s = 0; s < from->num_segments; s++) {
            to->segments[s] = akv_segment_retain(from->segments[s]);
            to->shifts[s] = from->shifts[s];
        }
        to->num_segments = from->num_segments;
        to->segment_tokens = from->segment_tokens;
        to->tail = from->tail;
        to->tail_tokens = from->tail_tokens;
        if (to->tail != NULL)
            atomic_fetch_add_explicit(&to->tail->refs, 1, memory_order_relaxed);
        memcpy(to->queries, from->queries, (size_t)akv_ring_floats(cache, from) * sizeof(float));
        to->queries_seen = from->queries_seen;
    }
    if (status != AKV_OK) {
        akv_cache_destroy(fork);
        return status;
    }
    *out = fork;
    return AKV_OK;
}

/* ------------------------------------------------------------------------------------------------------------------ tail */

akv_tail *akv_tail_new(const akv_cache *cache, const akv_layer_state *l, uint64_t capacity)
{
    const uint64_t H = l->shape.num_kv_heads, head = akv_round_up(sizeof(akv_tail), AKV_ALIGN);
    uint64_t bytes[AKV_SIDES], all = head;
    for (int side = 0; side < AKV_SIDES; side++) {
        bytes[side] = akv_round_up(H * capacity * akv_tail_row_bytes(cache, l, side), AKV_ALIGN);
        all += bytes[side];
    }
    uint8_t *memory = all > SIZE_MAX ? NULL : akv_alloc(cache->config.codec.allocator, (size_t)all);
    if (memory == NULL)
        return NULL;
    akv_tail *tail = (akv_tail *)(void *)memory;
    atomic_init(&tail->refs, 1);
    tail->capacity = capacity;
    tail->allocated_bytes = (size_t)all;
    tail->side[AKV_SIDE_K] = memory + head;
    tail->side[AKV_SIDE_V] = memory + head + bytes[AKV_SIDE_K];
    return tail;
}

void akv_tail_release(const akv_cache *cache, akv_tail *tail)
{
    if (tail != NULL && atomic_fetch_sub_explicit(&tail->refs, 1, memory_order_acq_rel) == 1)
        akv_free(cache->config.codec.allocator, tail, tail->allocated_bytes);
}

/* Tokens [first, first + n) of one tail to the front of another. */
static void copy_tokens(const akv_cache *cache, const akv_layer_state *l, const akv_tail *from, uint64_t first,
                        uint64_t n, akv_tail *to)
{
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t row = akv_tail_row_bytes(cache, l, side);
        for (uint32_t h = 0; h < l->shape.num_kv_heads; h++)
            memcpy(to->side[side] + h * to->capacity * row, from->side[side] + (h * from->capacity + first) * row,
                   (size_t)(n * row));
    }
}

akv_status akv_cache_tail_rest(const akv_cache *cache, const akv_layer_state *l, uint64_t n, akv_tail **fresh,
                               akv_diag *diag)
{
    *fresh = NULL;
    const uint64_t rest = l->tail_tokens - n;
    if (rest == 0)
        return AKV_OK;
    *fresh = akv_tail_new(cache, l, akv_round_up(rest + 1, 64));
    if (*fresh == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a tail of %llu tokens", (unsigned long long)rest);
    copy_tokens(cache, l, l->tail, n, rest, *fresh);
    return AKV_OK;
}

/* A tail of our own with room for n more tokens. */
static akv_status own_tail(akv_cache *cache, akv_layer_state *l, uint64_t n, akv_diag *diag)
{
    const uint64_t need = l->tail_tokens + n;
    if (l->tail != NULL && need <= l->tail->capacity && atomic_load_explicit(&l->tail->refs, memory_order_acquire) == 1)
        return AKV_OK;
    akv_tail *tail = akv_tail_new(cache, l, akv_round_up(need + need / 2, 64));
    if (tail == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a tail of %llu tokens", (unsigned long long)need);
    if (l->tail != NULL)
        copy_tokens(cache, l, l->tail, 0, l->tail_tokens, tail);
    akv_tail_release(cache, l->tail);
    l->tail = tail;
    return AKV_OK;
}

static void store_row(const float *x, uint32_t dim, akv_dtype dtype, uint8_t *out)
{
    if (dtype == AKV_F32) {
        memcpy(out, x, dim * sizeof *x);
        return;
    }
    for (uint32_t i = 0; i < dim; i++) {
        const uint16_t half = dtype == AKV_F16 ? akv_f32_to_f16(x[i]) : akv_f32_to_bf16(x[i]);
        memcpy(out + (size_t)2 * i, &half, 2);
    }
}

akv_status akv_cache_append(akv_cache *cache, uint32_t layer, uint64_t n, const akv_tensor *keys,
                            const akv_tensor *values, akv_diag *diag)
{
    AKV_TRY(check_layer(cache, layer, diag));
    const akv_tensor *side[AKV_SIDES] = {keys, values};
    akv_layer_state *l = &cache->layers[layer];
    for (int i = 0; i < AKV_SIDES; i++)
        if (n > 0 && (side[i] == NULL || side[i]->data == NULL || (unsigned)side[i]->dtype > AKV_BF16))
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s must have data of a known dtype",
                            i == AKV_SIDE_K ? "keys" : "values");
    if (n > AKV_MAX_TOKENS || akv_layer_tokens(l) + n > INT32_MAX)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%llu more tokens would pass position 2^31 - 1",
                        (unsigned long long)n);
    if (n == 0)
        return AKV_OK;
    AKV_TRY(own_tail(cache, l, n, diag));
    float row[AKV_MAX_HEAD_DIM];
    for (int i = 0; i < AKV_SIDES; i++) {
        const uint32_t dim = i == AKV_SIDE_K ? l->shape.head_dim_k : l->shape.head_dim_v;
        const uint64_t bytes = akv_tail_row_bytes(cache, l, i);
        for (uint32_t h = 0; h < l->shape.num_kv_heads; h++)
            for (uint64_t t = 0; t < n; t++) {
                akv_tensor_row(side[i], h, (int64_t)t, dim, row);
                store_row(row, dim, cache->config.tail_dtype,
                          l->tail->side[i] + (h * l->tail->capacity + l->tail_tokens + t) * bytes);
            }
    }
    l->tail_tokens += n;
    return AKV_OK;
}

akv_status akv_cache_observe(akv_cache *cache, uint32_t layer, uint64_t n, const akv_tensor *queries, akv_diag *diag)
{
    AKV_TRY(check_layer(cache, layer, diag));
    if (n == 0)
        return AKV_OK;
    if (queries == NULL || queries->data == NULL || (unsigned)queries->dtype > AKV_BF16)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "queries must have data of a known dtype");
    akv_layer_state *l = &cache->layers[layer];
    const uint64_t W = cache->config.num_queries, d = l->shape.head_dim_k, first = n > W ? n - W : 0;
    for (uint32_t h = 0; h < l->shape.num_kv_heads * l->shape.gqa_group; h++)
        for (uint64_t t = first; t < n; t++)
            akv_tensor_row(queries, h, (int64_t)t, (uint32_t)d, l->queries + (h * W + (l->queries_seen + t) % W) * d);
    l->queries_seen += n;
    return AKV_OK;
}

/* --------------------------------------------------------------------------------------------------------------- readers */

static akv_tensor tail_view(const akv_cache *cache, const akv_layer_state *l, int side, uint64_t first)
{
    const uint32_t dim = side == AKV_SIDE_K ? l->shape.head_dim_k : l->shape.head_dim_v;
    akv_tensor t = {NULL, cache->config.tail_dtype, 0, dim, 1};
    if (l->tail != NULL) {
        t.data = l->tail->side[side] + first * akv_tail_row_bytes(cache, l, side);
        t.stride_head = (int64_t)(l->tail->capacity * dim);
    }
    return t;
}

void akv_cache_describe_tail(const akv_cache *cache, uint32_t number, uint64_t first, uint64_t n, akv_layer *out)
{
    const akv_layer_state *l = &cache->layers[number];
    akv_layer_init(out);
    out->shape.num_tokens = n;
    out->shape.num_kv_heads = l->shape.num_kv_heads;
    out->shape.gqa_group = l->shape.gqa_group;
    out->shape.head_dim_k = l->shape.head_dim_k;
    out->shape.head_dim_v = l->shape.head_dim_v;
    out->shape.rotary_dim = l->shape.rope.rotary_dim;
    out->shape.num_queries = cache->config.num_queries;
    out->layer_index = (int32_t)number;
    out->keys = tail_view(cache, l, AKV_SIDE_K, first);
    out->values = tail_view(cache, l, AKV_SIDE_V, first);
    out->first_position = (int32_t)(l->segment_tokens + first);
    out->rope = l->shape.rope;
    out->sm_scale = l->shape.sm_scale;
    out->logit_softcap = l->shape.logit_softcap;
}

static void fill_params(const akv_cache *cache, uint32_t layer, akv_attend_params *p)
{
    const akv_layer_state *l = &cache->layers[layer];
    p->num_kv_heads = l->shape.num_kv_heads;
    p->gqa_group = l->shape.gqa_group;
    p->head_dim_k = l->shape.head_dim_k;
    p->head_dim_v = l->shape.head_dim_v;
    p->segments = (const akv_segment *const *)l->segments;
    p->num_segments = l->num_segments;
    p->segment_shifts = l->shifts;
    p->rope = &l->shape.rope;
    p->tail_tokens = l->tail_tokens;
    p->tail_keys = tail_view(cache, l, AKV_SIDE_K, 0);
    p->tail_values = tail_view(cache, l, AKV_SIDE_V, 0);
    p->sm_scale = l->shape.sm_scale;
    p->logit_softcap = l->shape.logit_softcap;
    p->executor = cache->config.codec.executor;
}

akv_status akv_cache_workspace_bytes(const akv_cache *cache, uint32_t layer, uint32_t num_queries, size_t *bytes,
                                     akv_diag *diag)
{
    AKV_TRY(check_layer(cache, layer, diag));
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_queries = num_queries;
    fill_params(cache, layer, &p);
    return akv_attend_workspace_bytes(&p, bytes, diag);
}

akv_status akv_cache_attend(const akv_cache *cache, uint32_t layer, const akv_attend_params *params, void *workspace,
                            size_t workspace_bytes, akv_diag *diag)
{
    AKV_TRY(check_layer(cache, layer, diag));
    if (params == NULL || params->struct_size < sizeof *params)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "params must come from akv_attend_params_init");
    akv_attend_params p = *params;
    fill_params(cache, layer, &p);
    return akv_attend(&p, workspace, workspace_bytes, diag);
}

akv_status akv_cache_get_segments(const akv_cache *cache, uint32_t layer, akv_segment *const **segments,
                                  const int64_t **shifts, uint32_t *num_segments, akv_diag *diag)
{
    AKV_TRY(check_layer(cache, layer, diag));
    if (segments == NULL || shifts == NULL || num_segments == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the outputs must not be NULL");
    *segments = cache->layers[layer].segments;
    *shifts = cache->layers[layer].shifts;
    *num_segments = cache->layers[layer].num_segments;
    return AKV_OK;
}

akv_status akv_cache_get_stats(const akv_cache *cache, akv_cache_stats *out, akv_diag *diag)
{
    if (cache == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "cache must not be NULL, and out must come from akv_cache_stats_init");
    akv_cache_stats_init(out);
    out->num_tokens = UINT64_MAX;
    for (uint32_t i = 0; i < cache->config.num_layers; i++) {
        const akv_layer_state *l = &cache->layers[i];
        const uint64_t H = l->shape.num_kv_heads,
                       used = H * l->tail_tokens * (akv_tail_row_bytes(cache, l, 0) + akv_tail_row_bytes(cache, l, 1));
        if (akv_layer_tokens(l) < out->num_tokens) {
            out->num_tokens = akv_layer_tokens(l);
            out->tail_tokens = l->tail_tokens;
        }
        out->dense_bytes +=
            akv_dense_bytes(akv_layer_tokens(l), l->shape.num_kv_heads, l->shape.head_dim_k, l->shape.head_dim_v);
        out->num_segments += l->num_segments;
        out->tail_bytes += used;
        out->reserve_bytes +=
            (l->tail != NULL ? l->tail->allocated_bytes - used : 0) + akv_ring_floats(cache, l) * sizeof(float);
        for (uint32_t s = 0; s < l->num_segments; s++) {
            akv_bytes bytes;
            uint64_t *sum = &out->segments.total;
            akv_header_bytes(akv_header_of(l->segments[s]), &bytes);
            for (size_t k = 0; k < sizeof bytes / sizeof *sum; k++)
                sum[k] += (&bytes.total)[k];
            if (atomic_load_explicit(&l->segments[s]->refs, memory_order_relaxed) > 1)
                out->shared_bytes += bytes.total;
        }
    }
    return AKV_OK;
}
