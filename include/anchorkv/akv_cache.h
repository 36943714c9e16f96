/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_cache.h - the key/value cache of one conversation as an object: per layer a list of immutable, reference-counted
 * segments and a dense tail behind them.
 *
 *   akv_cache_create(&config, &cache, &diag);
 *   akv_cache_append_segments(cache, segments, &diag);                  // a packed document, shared, not copied
 *   for each step and layer {
 *       akv_cache_append(cache, layer, n, &keys, &values, &diag);       // n new tokens, keys after the rotation
 *       akv_cache_attend(cache, layer, &params, workspace, bytes, &diag);
 *       akv_cache_observe(cache, layer, n, &queries, &diag);            // the latest queries weigh what is kept
 *   }
 *   akv_cache_compress_tail(cache, 512, &diag);                         // all but the last 512 tokens -> a segment
 *   akv_cache_fork(cache, &other, &diag);                               // shares everything until one of them changes
 *   akv_cache_truncate(cache, position, &diag);                         // back to any token
 *
 * Token i of a cache stands at position i. A segment made for other positions is attended to exactly where it now
 * stands: queries are turned back by the difference (akv_attend_params.segment_shifts).
 *
 * Documents packed separately and put one behind the other do not know each other: no token of one was read with
 * another in view. Every query attends to all of them in one softmax, exactly as to one cache; what is missing is what
 * reading them together would have written into their keys and values. Each brings its own first tokens, which models
 * use as attention sinks.
 *
 * Threads: one thread at a time may change a cache (append, observe, compress_tail, append_segments, retarget,
 * truncate, destroy), and nobody may read it meanwhile; any number may read it at once (attend, workspace_bytes, fork,
 * get_stats, get_segments). Caches that share segments or tails, being forks, are independent of each other.
 */
#ifndef ANCHORKV_CACHE_H
#define ANCHORKV_CACHE_H

#include "anchorkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cache of one conversation, all layers. */
typedef struct akv_cache akv_cache;

/* How one layer attends and rotates. */
typedef struct akv_cache_layer {
    uint32_t num_kv_heads;
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    akv_rope rope;        /* inv_freq is copied */
    double sm_scale;
    double logit_softcap; /* 0 = none */
} akv_cache_layer;

/* What a cache is made for; copied by akv_cache_create. */
typedef struct akv_cache_config {
    size_t struct_size;
    uint32_t num_layers;           /* those with a cache */
    const akv_cache_layer *layers; /* [num_layers], copied */
    akv_dtype tail_dtype;          /* f16 */
    uint32_t num_queries;          /* W, observation queries of a compression; 32 */
    akv_config codec;              /* of compress_tail; budget_bytes must be 0. Its allocator and executor serve
                                      everything here */
} akv_cache_config;

AKV_API void akv_cache_config_init(akv_cache_config *config); /* codec as akv_config_init */

/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY. */
AKV_API akv_status akv_cache_create(const akv_cache_config *config, akv_cache **out, akv_diag *diag);
AKV_API void akv_cache_destroy(akv_cache *cache); /* NULL is fine */

/*
 * A second cache with the same content: segments are shared for good, the tail until one of the two appends.
 * O(segments).
 */
AKV_API akv_status akv_cache_fork(const akv_cache *cache, akv_cache **out, akv_diag *diag);

/*
 * akv_cache_append() - n tokens behind the last one of this layer.
 *
 *   keys    in  [H, n, d_k] after the rotary embedding, for positions akv_cache_stats.num_tokens and on
 *   values  in  [H, n, d_v]
 *
 * Stored in tail_dtype (rounded to nearest). Layers grow one after the other; everything but append, attend and observe
 * needs all of them at one length. Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_cache_append(akv_cache *cache, uint32_t layer, uint64_t n, const akv_tensor *keys,
                                    const akv_tensor *values, akv_diag *diag);

/* The queries [H*G, n, d_k] (after the rotary embedding) of the last n tokens of this layer; the latest W are kept. */
AKV_API akv_status akv_cache_observe(akv_cache *cache, uint32_t layer, uint64_t n, const akv_tensor *queries,
                                     akv_diag *diag);

/*
 * akv_cache_attend() - attention of one layer over all its segments and its tail. Of params: num_queries, queries,
 * tail_mask, sinks, out with its strides and state_* are read; the rest comes from the cache. The queries are those of
 * the last num_queries tokens appended. Errors as akv_attend.
 */
AKV_API akv_status akv_cache_workspace_bytes(const akv_cache *cache, uint32_t layer, uint32_t num_queries,
                                             size_t *bytes, akv_diag *diag);
AKV_API akv_status akv_cache_attend(const akv_cache *cache, uint32_t layer, const akv_attend_params *params,
                                    void *workspace, size_t workspace_bytes, akv_diag *diag);

/*
 * akv_cache_compress_tail() - all tokens of the tail but the last `keep` become one segment a layer, with the latest
 * queries as observation queries. Nothing happens when the tail is not longer than `keep`. All layers or none.
 * Returns AKV_OK, AKV_E_BAD_STATE (fewer than W queries observed since the cache was made or cut or segments were appended;
 * layers of different length) and what akv_compress returns.
 */
AKV_API akv_status akv_cache_compress_tail(akv_cache *cache, uint64_t keep, akv_diag *diag);

/*
 * akv_cache_append_segments() - one segment a layer [num_layers], all of the same number of tokens, behind the last
 * token. They are retained, not copied, and may stand in other caches too. A tail that is there becomes dense segments
 * first. Queries observed before are forgotten.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_MISMATCH (shape or rotation), AKV_E_UNSUPPORTED (gaps between
 * positions, or an eviction), AKV_E_BAD_STATE, AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_cache_append_segments(akv_cache *cache, akv_segment *const *segments, akv_diag *diag);

/*
 * akv_cache_truncate() - keep the first num_tokens tokens. A segment that is met in the middle is cut
 * (akv_segment_cut), exactly. Queries observed for later tokens are forgotten. All layers or none. Errors as
 * akv_segment_cut, and AKV_E_BAD_STATE.
 */
AKV_API akv_status akv_cache_truncate(akv_cache *cache, uint64_t num_tokens, akv_diag *diag);

/*
 * akv_cache_retarget() - make the compressed segments of this cache smaller until segments and tail together take at
 * most budget_bytes, all by the same keep ratio. Other caches keep theirs. Nothing happens when it fits. What a token is
 * worth is measured with the layer's kept queries (akv_segment_retarget_observed, its scratch included) if num_queries
 * of them have been observed behind the segment, for profile default at the position it was made for; otherwise inferred
 * (akv_segment_retarget).
 * Returns AKV_OK, AKV_E_INFEASIBLE, AKV_E_NO_MEMORY, AKV_E_NON_FINITE (a query); nothing is changed but by AKV_OK.
 */
AKV_API akv_status akv_cache_retarget(akv_cache *cache, uint64_t budget_bytes, akv_diag *diag);

/* What a cache holds and costs, all layers together. */
typedef struct akv_cache_stats {
    size_t struct_size;
    uint64_t num_tokens;    /* of the shortest layer */
    uint64_t tail_tokens;   /* of them in its tail */
    uint32_t num_segments;  /* all layers together */
    akv_bytes segments;     /* their bytes by kind, shared ones counted in full */
    uint64_t shared_bytes;  /* of them in segments that somebody else holds too */
    uint64_t tail_bytes;    /* tokens in the tails, tail_dtype */
    uint64_t reserve_bytes; /* room in the tails beyond their tokens, and kept queries */
    uint64_t dense_bytes;   /* what all tokens would cost uncompressed in 16 bit */
} akv_cache_stats;

AKV_API void akv_cache_stats_init(akv_cache_stats *stats);

/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT. O(segments). */
AKV_API akv_status akv_cache_get_stats(const akv_cache *cache, akv_cache_stats *out, akv_diag *diag);

/*
 * The segments of one layer and where each stands (shift against the position it was made for); borrowed until the
 * cache changes.
 */
AKV_API akv_status akv_cache_get_segments(const akv_cache *cache, uint32_t layer, akv_segment *const **segments,
                                          const int64_t **shifts, uint32_t *num_segments, akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
