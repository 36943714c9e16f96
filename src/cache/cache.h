/* SPDX-License-Identifier: Apache-2.0 */
/* cache.h - inside a cache: what its files share. */
#ifndef AKV_CACHE_INTERNAL_H
#define AKV_CACHE_INTERNAL_H

#include "anchorkv/akv_cache.h"
#include "core/segment.h"
#include "core/sizes.h"

/* Keys and values of a tail, [H, capacity, dim] each, in one allocation. Shared by forks; who finds others changes a copy. */
typedef struct akv_tail {
    atomic_uint refs;
    uint64_t capacity; /* tokens */
    size_t allocated_bytes;
    uint8_t *side[AKV_SIDES];
} akv_tail;

typedef struct akv_layer_state {
    akv_cache_layer shape; /* rope.inv_freq is owned */
    akv_segment **segments;
    int64_t *shifts;
    uint32_t num_segments;
    uint32_t capacity;
    uint64_t segment_tokens; /* in all of them */
    akv_tail *tail;          /* NULL = empty */
    uint64_t tail_tokens;
    float *queries;        /* [H*G, W, d_k] a ring */
    uint64_t queries_seen; /* row of the next one modulo W; how many are valid: min(this, W) */
} akv_layer_state;

struct akv_cache {
    akv_cache_config config; /* layers NULL */
    akv_allocator allocator; /* config.codec.allocator points here when the caller gave one */
    akv_layer_state *layers;
};

akv_tail *akv_tail_new(const akv_cache *cache, const akv_layer_state *layer, uint64_t capacity);
void akv_tail_release(const akv_cache *cache, akv_tail *tail);
/* Room for n more segments of a layer. */
akv_status akv_cache_reserve(akv_cache *cache, akv_layer_state *layer, uint32_t n, akv_diag *diag);
/* AKV_OK when all layers have the same number of tokens. */
akv_status akv_cache_check_even(const akv_cache *cache, akv_diag *diag);
/* Tokens [first, first + n) of the tail as the codec takes them. */
void akv_cache_describe_tail(const akv_cache *cache, uint32_t number, uint64_t first, uint64_t n, akv_layer *out);
/* Drop the first n tokens of the tail: *fresh replaces it, NULL when nothing is left. */
akv_status akv_cache_tail_rest(const akv_cache *cache, const akv_layer_state *layer, uint64_t n, akv_tail **fresh,
                               akv_diag *diag);

static inline uint64_t akv_layer_tokens(const akv_layer_state *layer)
{
    return layer->segment_tokens + layer->tail_tokens;
}

/* Of the ring of queries. */
static inline uint64_t akv_ring_floats(const akv_cache *cache, const akv_layer_state *layer)
{
    return (uint64_t)layer->shape.num_kv_heads * layer->shape.gqa_group * cache->config.num_queries *
           layer->shape.head_dim_k;
}

static inline uint64_t akv_tail_row_bytes(const akv_cache *cache, const akv_layer_state *layer, int side)
{
    return (uint64_t)(side == AKV_SIDE_K ? layer->shape.head_dim_k : layer->shape.head_dim_v) *
           akv_dtype_bytes(cache->config.tail_dtype);
}

#endif
