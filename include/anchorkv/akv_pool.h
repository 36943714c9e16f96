/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_pool.h - a byte budget over many documents. When it would not hold, the documents that were not used for longest
 * are made smaller (akv_segment_retarget), and when that is not enough, handed to the caller to be written away.
 * Nothing is ever dropped: what does not fit is refused.
 *
 *   akv_pool_create(&config, &pool, &diag);
 *   akv_pool_add(pool, segments, num_segments, &id, &diag);
 *   akv_pool_acquire(pool, id, segments, num_segments, &diag);    // retained; fetched back when they were away
 *   ... akv_cache_append_segments(cache, segments, &diag), or akv_attend ...
 *   for each: akv_segment_release(segments[i]);
 *
 * Counted are the segments that the pool itself refers to. A conversation that goes on with larger ones keeps them
 * alive until it releases them.
 *
 * Threads: all calls from any thread at once; they wait for each other, also while segments are written or made
 * smaller.
 */
#ifndef ANCHORKV_POOL_H
#define ANCHORKV_POOL_H

#include "anchorkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Many documents in one budget. */
typedef struct akv_pool akv_pool;

/* What a pool may use, and where it puts what does not fit. */
typedef struct akv_pool_config {
    size_t struct_size;
    uint64_t budget_bytes;          /* of the segments in memory */
    double least_keep_ratio; /* no document is made smaller than this share of its uncompressed bytes; 0.05 */
    /*
     * Keep the bytes of segment `index` of a document, give them back, forget a document. Bytes that come back are
     * checked like any file. spill NULL: documents are only made smaller. Called with the pool's lock held: they must
     * not call the pool.
     */
    akv_status (*spill)(void *opaque, uint64_t id, uint32_t index, const void *data, size_t bytes, akv_diag *diag);
    akv_status (*fetch)(void *opaque, uint64_t id, uint32_t index, void *data, size_t bytes, akv_diag *diag);
    void (*forget)(void *opaque, uint64_t id);
    void *opaque;
    const akv_allocator *allocator; /* NULL = libc */
    const akv_executor *executor;   /* NULL = serial */
} akv_pool_config;

AKV_API void akv_pool_config_init(akv_pool_config *config);

/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY. */
AKV_API akv_status akv_pool_create(const akv_pool_config *config, akv_pool **out, akv_diag *diag);
AKV_API void akv_pool_destroy(akv_pool *pool); /* forgets what was spilled; NULL is fine */

/*
 * akv_pool_add() - take a document in; its segments are retained. Others, and then this one, are made smaller for it,
 * others spilled.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_SPACE (it does not fit whatever is done; the pool has not taken it),
 * what `spill` returned (likewise), AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_pool_add(akv_pool *pool, akv_segment *const *segments, uint32_t num_segments, uint64_t *id,
                                akv_diag *diag);

/*
 * akv_pool_acquire() - the segments of a document as they are now, one reference each for the caller, and mark it used.
 * num_segments must be that of akv_pool_add. Returns AKV_OK, AKV_E_INVALID_ARGUMENT (no such document), AKV_E_NO_SPACE
 * (it was spilled and there is no room for it), what `spill` or `fetch` returned, AKV_E_CORRUPT (what came back is not
 * what went).
 */
AKV_API akv_status akv_pool_acquire(akv_pool *pool, uint64_t id, akv_segment **segments, uint32_t num_segments,
                                     akv_diag *diag);

/* Forget a document; its segments are released. Returns AKV_OK, AKV_E_INVALID_ARGUMENT (no such document). */
AKV_API akv_status akv_pool_remove(akv_pool *pool, uint64_t id, akv_diag *diag);

/* What a pool holds, and has done so far. */
typedef struct akv_pool_stats {
    size_t struct_size;
    uint64_t budget_bytes;     /* as configured */
    uint64_t resident_bytes;   /* of the segments in memory */
    uint64_t spilled_bytes;    /* of the segments given to spill */
    uint32_t documents;        /* spilled ones among them */
    uint32_t spilled_documents; /* those that are away */
    uint64_t retargets;        /* documents made smaller */
    uint64_t spills;           /* documents spilled */
    uint64_t fetches;          /* documents fetched back */
} akv_pool_stats;

AKV_API void akv_pool_stats_init(akv_pool_stats *stats);

/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT. */
AKV_API akv_status akv_pool_get_stats(akv_pool *pool, akv_pool_stats *out, akv_diag *diag);

/* One document as it is now. Asking does not mark it used and does not fetch it. */
typedef struct akv_pool_document {
    size_t struct_size;
    akv_bytes bytes;      /* of its segments; by kind only while it is here, else the total alone */
    uint64_t dense_bytes; /* uncompressed, 16 bit */
    int spilled;          /* nonzero: it was handed to the caller */
} akv_pool_document;

AKV_API void akv_pool_document_init(akv_pool_document *document);
/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT (no such document too). */
AKV_API akv_status akv_pool_get_document(akv_pool *pool, uint64_t id, akv_pool_document *out, akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
