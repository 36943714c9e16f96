/* SPDX-License-Identifier: Apache-2.0 */
/* change.c - what rearranges the segments of a cache. Everything is made for all layers first, then put in place: all or nothing. */
#include "cache/cache.h"

akv_status akv_cache_reserve(akv_cache *cache, akv_layer_state *l, uint32_t n, akv_diag *diag)
{
    const akv_allocator *a = cache->config.codec.allocator;
    if (n <= l->capacity - l->num_segments)
        return AKV_OK;
    const uint32_t capacity = l->num_segments + n + 8;
    akv_segment **segments = akv_alloc(a, capacity * sizeof *segments);
    int64_t *shifts = akv_alloc(a, capacity * sizeof *shifts);
    if (segments == NULL || shifts == NULL) {
        if (segments != NULL)
            akv_free(a, segments, capacity * sizeof *segments);
        if (shifts != NULL)
            akv_free(a, shifts, capacity * sizeof *shifts);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %u segments", capacity);
    }
    if (l->num_segments > 0) {
        memcpy(segments, l->segments, l->num_segments * sizeof *segments);
        memcpy(shifts, l->shifts, l->num_segments * sizeof *shifts);
    }
    if (l->segments != NULL)
        akv_free(a, l->segments, l->capacity * sizeof *segments);
    if (l->shifts != NULL)
        akv_free(a, l->shifts, l->capacity * sizeof *shifts);
    l->segments = segments;
    l->shifts = shifts;
    l->capacity = capacity;
    return AKV_OK;
}

akv_status akv_cache_check_even(const akv_cache *cache, akv_diag *diag)
{
    if (cache == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "cache must not be NULL");
    for (uint32_t i = 1; i < cache->config.num_layers; i++)
        if (akv_layer_tokens(&cache->layers[i]) != akv_layer_tokens(&cache->layers[0]))
            return akv_fail(diag, AKV_E_BAD_STATE, "layer %u has %llu tokens, layer 0 has %llu; finish the step first",
                            i, (unsigned long long)akv_layer_tokens(&cache->layers[i]),
                            (unsigned long long)akv_layer_tokens(&cache->layers[0]));
    return AKV_OK;
}

/* What a layer will be. */
typedef struct akv_change {
    akv_segment *segment; /* to append, or in place of the last that stays; owned */
    akv_tail *tail;       /* owned */
} akv_change;

static akv_change *changes_new(const akv_cache *cache)
{
    const size_t bytes = cache->config.num_layers * sizeof(akv_change);
    akv_change *c = akv_alloc(cache->config.codec.allocator, bytes);
    if (c != NULL)
        memset(c, 0, bytes);
    return c;
}

/* What has not been put in place is released. */
static void changes_free(const akv_cache *cache, akv_change *c)
{
    for (uint32_t i = 0; i < cache->config.num_layers; i++) {
        akv_segment_release(c[i].segment);
        akv_tail_release(cache, c[i].tail);
    }
    akv_free(cache->config.codec.allocator, c, cache->config.num_layers * sizeof *c);
}

static void put_segment(akv_layer_state *l, akv_segment *segment, int64_t shift)
{
    l->segments[l->num_segments] = segment;
    l->shifts[l->num_segments++] = shift;
    l->segment_tokens += akv_header_of(segment)->num_tokens;
}

static void put_tail(const akv_cache *cache, akv_layer_state *l, akv_change *c, uint64_t tokens)
{
    akv_tail_release(cache, l->tail);
    l->tail = c->tail;
    l->tail_tokens = tokens;
    c->tail = NULL;
}

/* The latest W queries in order, as a view; the ring has to be turned so that the oldest comes first. */
static akv_status latest_queries(const akv_cache *cache, const akv_layer_state *l, float *out, akv_tensor *view,
                                 akv_diag *diag)
{
    const uint64_t W = cache->config.num_queries, d = l->shape.head_dim_k;
    if (l->queries_seen < W)
        return akv_fail(diag, AKV_E_BAD_STATE, "%llu queries were observed; compressing takes %llu (akv_cache_observe)",
                        (unsigned long long)l->queries_seen, (unsigned long long)W);
    for (uint32_t h = 0; h < l->shape.num_kv_heads * l->shape.gqa_group; h++)
        for (uint64_t r = 0; r < W; r++)
            memcpy(out + (h * W + r) * d, l->queries + (h * W + (l->queries_seen + r) % W) * d,
                   (size_t)d * sizeof *out);
    *view = akv_tensor_contiguous(out, AKV_F32, W, (uint32_t)d);
    return AKV_OK;
}

static akv_status compress_layer(akv_cache *cache, uint32_t i, uint64_t n, akv_change *c, akv_diag *diag)
{
    const akv_layer_state *l = &cache->layers[i];
    const akv_allocator *a = cache->config.codec.allocator;
    akv_layer layer;
    akv_cache_describe_tail(cache, i, 0, n, &layer);
    const size_t bytes = (size_t)akv_ring_floats(cache, l) * sizeof(float);
    float *queries = akv_alloc(a, bytes);
    if (queries == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of queries", bytes);
    akv_status status =
        n > cache->config.num_queries ? latest_queries(cache, l, queries, &layer.queries, diag) : AKV_OK;
    if (status == AKV_OK)
        status = akv_compress(&layer, &cache->config.codec, &c->segment, diag);
    akv_free(a, queries, bytes);
    return status == AKV_OK ? akv_cache_tail_rest(cache, l, n, &c->tail, diag) : status;
}

akv_status akv_cache_compress_tail(akv_cache *cache, uint64_t keep, akv_diag *diag)
{
    AKV_TRY(akv_cache_check_even(cache, diag));
    const uint64_t have = cache->layers[0].tail_tokens;
    if (have <= keep)
        return AKV_OK;
    akv_change *changes = changes_new(cache);
    if (changes == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", cache->config.num_layers);
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        status = akv_cache_reserve(cache, &cache->layers[i], 1, diag);
        if (status == AKV_OK)
            status = compress_layer(cache, i, have - keep, &changes[i], diag);
    }
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        put_segment(&cache->layers[i], changes[i].segment, 0);
        changes[i].segment = NULL;
        put_tail(cache, &cache->layers[i], &changes[i], keep);
    }
    changes_free(cache, changes);
    return status;
}

static akv_status check_segment(const akv_cache *cache, uint32_t i, const akv_segment *segment, akv_diag *diag)
{
    const akv_cache_layer *l = &cache->layers[i].shape;
    if (segment == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the segment of layer %u is NULL", i);
    const akv_header *h = akv_header_of(segment);
    if (h->num_kv_heads != l->num_kv_heads || h->gqa_group != l->gqa_group || h->head_dim[0] != l->head_dim_k ||
        h->head_dim[1] != l->head_dim_v || h->rotary_dim != l->rope.rotary_dim ||
        (h->rotary_dim != 0 && h->rope_style != (uint32_t)l->rope.style) ||
        (h->sections[AKV_SEC_INV_FREQ].bytes != 0 &&
         memcmp(akv_section_of(segment, AKV_SEC_INV_FREQ), l->rope.inv_freq, h->sections[AKV_SEC_INV_FREQ].bytes) != 0))
        return akv_fail(diag, AKV_E_MISMATCH, "the segment of layer %u has another shape or rotation than the cache",
                        i);
    if (h->dense_reason == AKV_DENSE_EVICTED ||
        (uint64_t)((int64_t)h->last_position - h->first_position) + 1 != h->num_tokens)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "the segment of layer %u does not hold every position of its stretch",
                        i);
    return AKV_OK;
}

akv_status akv_cache_append_segments(akv_cache *cache, akv_segment *const *segments, akv_diag *diag)
{
    AKV_TRY(akv_cache_check_even(cache, diag));
    if (segments == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segments must not be NULL");
    for (uint32_t i = 0; i < cache->config.num_layers; i++) {
        AKV_TRY(check_segment(cache, i, segments[i], diag));
        if (akv_header_of(segments[i])->num_tokens != akv_header_of(segments[0])->num_tokens)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                            "the segment of layer %u has %llu tokens, that of layer 0 %llu", i,
                            (unsigned long long)akv_header_of(segments[i])->num_tokens,
                            (unsigned long long)akv_header_of(segments[0])->num_tokens);
    }
    if (akv_layer_tokens(&cache->layers[0]) + akv_header_of(segments[0])->num_tokens > INT32_MAX)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the last position would pass 2^31 - 1");
    akv_change *changes = changes_new(cache);
    if (changes == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", cache->config.num_layers);
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        akv_layer_state *l = &cache->layers[i];
        status = akv_cache_reserve(cache, l, 2, diag);
        if (status == AKV_OK && l->tail_tokens > 0) {
            akv_layer layer;
            akv_cache_describe_tail(cache, i, 0, l->tail_tokens, &layer);
            status = akv_segment_create_dense(&layer, &cache->config.codec, &changes[i].segment, diag);
        }
    }
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        akv_layer_state *l = &cache->layers[i];
        if (changes[i].segment != NULL)
            put_segment(l, changes[i].segment, 0);
        changes[i].segment = NULL;
        put_tail(cache, l, &changes[i], 0);
        put_segment(l, akv_segment_retain(segments[i]),
                    (int64_t)l->segment_tokens - akv_header_of(segments[i])->first_position);
        l->queries_seen = 0; /* they are of tokens before it */
    }
    changes_free(cache, changes);
    return status;
}

/* The segment that token `at` of a layer lies in, and where that begins. */
static uint32_t find_segment(const akv_layer_state *l, uint64_t at, uint64_t *begin)
{
    uint32_t s = 0;
    *begin = 0;
    while (s < l->num_segments && *begin + akv_header_of(l->segments[s])->num_tokens <= at)
        *begin += akv_header_of(l->segments[s++])->num_tokens;
    return s;
}

akv_status akv_cache_truncate(akv_cache *cache, uint64_t num_tokens, akv_diag *diag)
{
    AKV_TRY(akv_cache_check_even(cache, diag));
    const uint64_t have = akv_layer_tokens(&cache->layers[0]);
    if (num_tokens > have)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%llu tokens are to be kept; the cache has %llu",
                        (unsigned long long)num_tokens, (unsigned long long)have);
    if (num_tokens == have)
        return AKV_OK;
    akv_change *changes = changes_new(cache);
    if (changes == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", cache->config.num_layers);
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        const akv_layer_state *l = &cache->layers[i];
        uint64_t begin;
        const uint32_t s = find_segment(l, num_tokens, &begin);
        if (s < l->num_segments && num_tokens > begin)
            status =
                akv_segment_cut(l->segments[s], num_tokens - begin, &cache->config.codec, &changes[i].segment, diag);
    }
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++) {
        akv_layer_state *l = &cache->layers[i];
        if (num_tokens >= l->segment_tokens) {
            l->tail_tokens = num_tokens - l->segment_tokens; /* a shared tail stays shared: appending copies it */
        } else {
            uint64_t begin;
            const uint32_t s = find_segment(l, num_tokens, &begin);
            const int64_t shift = l->shifts[s];
            while (l->num_segments > s)
                akv_segment_release(l->segments[--l->num_segments]);
            l->segment_tokens = begin;
            if (changes[i].segment != NULL)
                put_segment(l, changes[i].segment, shift);
            changes[i].segment = NULL;
            put_tail(cache, l, &changes[i], 0);
        }
        l->queries_seen = 0;
    }
    changes_free(cache, changes);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------------- retarget */

static uint64_t share_of(const akv_header *h, double keep)
{
    return (uint64_t)(keep * (double)akv_dense_bytes(h->num_tokens, h->num_kv_heads, h->head_dim[0], h->head_dim[1]));
}

/* Bytes of all segments if each compressed one had to keep the ratio; false when one cannot. */
static bool bytes_at(const akv_cache *cache, double keep, uint64_t *total)
{
    *total = 0;
    for (uint32_t i = 0; i < cache->config.num_layers; i++)
        for (uint32_t s = 0; s < cache->layers[i].num_segments; s++) {
            const akv_header *h = akv_header_of(cache->layers[i].segments[s]);
            uint64_t bytes = AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
            if (h->kind == AKV_SEGMENT_COMPRESSED) {
                akv_retarget_info info;
                akv_retarget_info_init(&info);
                if (akv_segment_retarget_plan(cache->layers[i].segments[s], share_of(h, keep), &info, NULL) != AKV_OK)
                    return false;
                bytes = info.bytes.total;
            }
            *total += bytes;
        }
    return true;
}

/*
 * The compressed segments of a layer at `keep`, others retained -> small, of which *made are there even on failure. With
 * the kept queries where that is possible: not for profile paper, nor at another position than a segment was made for,
 * nor where some of their tokens are the segment's own.
 */
static akv_status shrink_layer(const akv_cache *cache, const akv_layer_state *l, double keep, akv_segment **small,
                               uint32_t *made, akv_diag *diag)
{
    const akv_config *config = &cache->config.codec;
    const size_t bytes = (size_t)akv_ring_floats(cache, l) * sizeof(float);
    const uint32_t W = cache->config.num_queries;
    akv_tensor queries;
    float *room = NULL;
    uint64_t behind = akv_layer_tokens(l); /* tokens behind the segment */
    akv_status status = AKV_OK;
    if (l->num_segments > 0 && l->queries_seen >= W) {
        if ((room = akv_alloc(config->allocator, bytes)) == NULL)
            return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of queries", bytes);
        status = latest_queries(cache, l, room, &queries, diag);
    }
    for (uint32_t s = 0; status == AKV_OK && s < l->num_segments; s++) {
        akv_segment *const from = l->segments[s];
        const akv_header *h = akv_header_of(from);
        akv_retarget_info info;
        akv_retarget_info_init(&info);
        behind -= h->num_tokens;
        if (h->kind != AKV_SEGMENT_COMPRESSED) {
            small[*made] = akv_segment_retain(from);
        } else if ((status = akv_segment_retarget_plan(from, share_of(h, keep), &info, diag)) == AKV_OK) {
            const uint64_t budget = info.bytes.total; /* what the sum was made of */
            if (room != NULL && h->profile == AKV_PROFILE_DEFAULT && l->shifts[s] == 0 && behind >= W)
                status = akv_segment_retarget_observed(from, budget, &queries, W, config, &small[*made], NULL, diag);
            else
                status = akv_segment_retarget(from, budget, config, &small[*made], NULL, diag);
        }
        *made += status == AKV_OK;
    }
    akv_free(config->allocator, room, room != NULL ? bytes : 0);
    return status;
}

akv_status akv_cache_retarget(akv_cache *cache, uint64_t budget_bytes, akv_diag *diag)
{
    akv_cache_stats stats;
    akv_cache_stats_init(&stats);
    AKV_TRY(akv_cache_get_stats(cache, &stats, diag));
    if (stats.segments.total + stats.tail_bytes <= budget_bytes)
        return AKV_OK;
    double low = 0.0, high = 1.0; /* low fits or is too low */
    uint64_t total;
    for (int round = 0; round < 40; round++) {
        const double mid = 0.5 * (low + high);
        if (!bytes_at(cache, mid, &total) || total + stats.tail_bytes <= budget_bytes)
            low = mid;
        else
            high = mid;
    }
    if (!bytes_at(cache, low, &total) || total + stats.tail_bytes > budget_bytes)
        return akv_fail(
            diag, AKV_E_INFEASIBLE,
            "the segments cannot shrink into %llu bytes beside a tail of %llu; compress the tail first, or give more",
            (unsigned long long)budget_bytes, (unsigned long long)stats.tail_bytes);
    const akv_allocator *a = cache->config.codec.allocator;
    const size_t bytes = (stats.num_segments + 1) * sizeof(akv_segment *);
    akv_segment **small = akv_alloc(a, bytes);
    if (small == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %u segments", stats.num_segments);
    akv_status status = AKV_OK;
    uint32_t made = 0;
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++)
        status = shrink_layer(cache, &cache->layers[i], low, small, &made, diag);
    uint32_t n = 0;
    for (uint32_t i = 0; status == AKV_OK && i < cache->config.num_layers; i++)
        for (uint32_t s = 0; s < cache->layers[i].num_segments; s++) {
            akv_segment_release(cache->layers[i].segments[s]);
            cache->layers[i].segments[s] = small[n++];
        }
    for (uint32_t i = n; i < made; i++)
        akv_segment_release(small[i]);
    akv_free(a, small, bytes);
    return status;
}
