/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c - many documents in one byte budget: see akv_pool.h. */
#include "anchorkv/akv_pool.h"
#include "core/segment.h"
#include "core/sizes.h"

#include <pthread.h>

typedef struct akv_pooled {
    uint64_t id;
    uint64_t used;  /* tick of the last use */
    uint64_t bytes; /* of all segments, objects included */
    uint64_t dense_bytes;
    uint32_t num_segments;
    bool at_least; /* cannot be made smaller */
    bool away;     /* spilled; segments are NULL */
    akv_segment **segments;
    size_t *blob_bytes; /* [num_segments] while away */
} akv_pooled;

struct akv_pool {
    pthread_mutex_t lock;
    akv_pool_config config;
    akv_allocator allocator;
    akv_pooled *documents;
    uint32_t count, capacity;
    uint64_t tick, next_id;
    uint64_t retargets, spills, fetches;
};

void akv_pool_config_init(akv_pool_config *config)
{
    memset(config, 0, sizeof *config);
    config->struct_size = sizeof *config;
    config->least_keep_ratio = 0.05;
}

void akv_pool_stats_init(akv_pool_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    stats->struct_size = sizeof *stats;
}

static uint64_t segment_bytes(const akv_segment *segment)
{
    return AKV_SEGMENT_OBJECT_BYTES + akv_header_of(segment)->total_bytes;
}

static uint64_t resident(const akv_pool *pool)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < pool->count; i++)
        bytes += pool->documents[i].away ? 0 : pool->documents[i].bytes;
    return bytes;
}

static akv_pooled *find(akv_pool *pool, uint64_t id)
{
    for (uint32_t i = 0; i < pool->count; i++)
        if (pool->documents[i].id == id)
            return &pool->documents[i];
    return NULL;
}

static void drop(akv_pool *pool, akv_pooled *d)
{
    if (d->away && pool->config.forget != NULL)
        pool->config.forget(pool->config.opaque, d->id);
    for (uint32_t i = 0; i < d->num_segments; i++)
        akv_segment_release(d->segments[i]);
    akv_free(pool->config.allocator, d->segments, d->num_segments * sizeof *d->segments);
    akv_free(pool->config.allocator, d->blob_bytes, d->num_segments * sizeof *d->blob_bytes);
    *d = pool->documents[--pool->count];
}

akv_status akv_pool_create(const akv_pool_config *config, akv_pool **out, akv_diag *diag)
{
    if (config == NULL || config->struct_size < sizeof *config || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "config must come from akv_pool_config_init, and out not be NULL");
    if (config->budget_bytes == 0 || !(config->least_keep_ratio > 0.0 && config->least_keep_ratio <= 1.0) ||
        (config->spill != NULL) != (config->fetch != NULL))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "budget_bytes must not be 0, least_keep_ratio be in (0, 1], and spill and fetch come together");
    akv_pool *pool = akv_alloc(config->allocator, sizeof *pool);
    if (pool == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a pool");
    memset(pool, 0, sizeof *pool);
    pool->config = *config;
    if (config->allocator != NULL) {
        pool->allocator = *config->allocator;
        pool->config.allocator = &pool->allocator;
    }
    pool->next_id = 1;
    pthread_mutex_init(&pool->lock, NULL);
    *out = pool;
    return AKV_OK;
}

void akv_pool_destroy(akv_pool *pool)
{
    if (pool == NULL)
        return;
    while (pool->count > 0)
        drop(pool, &pool->documents[0]);
    akv_allocator allocator = pool->allocator;
    if (pool->documents != NULL)
        akv_free(&allocator, pool->documents, pool->capacity * sizeof *pool->documents);
    pthread_mutex_destroy(&pool->lock);
    akv_free(&allocator, pool, sizeof *pool);
}

/* The document used longest ago that is here, can still become smaller if asked, and is not `except`. */
static akv_pooled *oldest(akv_pool *pool, bool shrinkable, uint64_t except)
{
    akv_pooled *best = NULL;
    for (uint32_t i = 0; i < pool->count; i++) {
        akv_pooled *d = &pool->documents[i];
        if (!d->away && d->id != except && !(shrinkable && d->at_least) && (best == NULL || d->used < best->used))
            best = d;
    }
    return best;
}

/* Make a document smaller by at least `by` bytes, or as small as it may become. */
static akv_status shrink(akv_pool *pool, akv_pooled *d, uint64_t by, akv_diag *diag)
{
    akv_config config;
    akv_config_init(&config);
    config.allocator = pool->config.allocator;
    config.executor = pool->config.executor;
    const double share = by >= d->bytes ? 0.0 : (double)(d->bytes - by) / (double)d->bytes;
    uint64_t now = 0;
    bool least = true;
    for (uint32_t i = 0; i < d->num_segments; i++) {
        akv_segment *small = NULL;
        const akv_header *h = akv_header_of(d->segments[i]);
        const uint64_t have = segment_bytes(d->segments[i]);
        if (h->kind == AKV_SEGMENT_COMPRESSED) {
            akv_retarget_info info;
            akv_retarget_info_init(&info);
            akv_segment_retarget_plan(d->segments[i], have, &info, NULL);
            const double dense =
                (double)akv_dense_bytes(h->num_tokens, h->num_kv_heads, h->head_dim[0], h->head_dim[1]);
            uint64_t floor_bytes = (uint64_t)(pool->config.least_keep_ratio * dense),
                     want = (uint64_t)(share * (double)have);
            floor_bytes = floor_bytes < info.min_bytes ? info.min_bytes : floor_bytes;
            least = least && want <= floor_bytes;
            want = want < floor_bytes ? floor_bytes : want;
            AKV_TRY(akv_segment_retarget(d->segments[i], want, &config, &small, NULL, diag));
            akv_segment_release(d->segments[i]);
            d->segments[i] = small;
        }
        now += segment_bytes(d->segments[i]);
    }
    d->at_least = least || now >= d->bytes; /* nothing moved: it will not the next time either */
    pool->retargets += now < d->bytes;
    d->bytes = now;
    return AKV_OK;
}

static akv_status spill(akv_pool *pool, akv_pooled *d, akv_diag *diag)
{
    for (uint32_t i = 0; i < d->num_segments; i++) {
        const void *data = akv_segment_data(d->segments[i], &d->blob_bytes[i]);
        akv_status status = pool->config.spill(pool->config.opaque, d->id, i, data, d->blob_bytes[i], diag);
        if (status != AKV_OK) { /* it stays here, whole */
            if (pool->config.forget != NULL)
                pool->config.forget(pool->config.opaque, d->id);
            return status;
        }
    }
    for (uint32_t i = 0; i < d->num_segments; i++) {
        akv_segment_release(d->segments[i]);
        d->segments[i] = NULL;
    }
    d->away = true;
    pool->spills++;
    return AKV_OK;
}

/* Make `room` bytes besides what the budget must hold; `except` is what the room is for. */
static akv_status make_room(akv_pool *pool, uint64_t room, uint64_t except, akv_diag *diag)
{
    const uint64_t budget = pool->config.budget_bytes;
    akv_pooled *d;
    while (resident(pool) + room > budget) {
        const uint64_t over = resident(pool) + room - budget;
        if ((d = oldest(pool, true, except)) != NULL || ((d = find(pool, except)) != NULL && !d->away && !d->at_least))
            AKV_TRY(shrink(pool, d, over, diag));
        else if (pool->config.spill != NULL && (d = oldest(pool, false, except)) != NULL)
            AKV_TRY(spill(pool, d, diag));
        else
            return akv_fail(diag, AKV_E_NO_SPACE,
                            "%llu bytes are held or asked for and nothing can give way; the budget is %llu",
                            (unsigned long long)(resident(pool) + room), (unsigned long long)budget);
    }
    return AKV_OK;
}

static akv_status add(akv_pool *pool, akv_segment *const *segments, uint32_t n, uint64_t *id, akv_diag *diag)
{
    const akv_allocator *a = pool->config.allocator;
    if (pool->count == pool->capacity) {
        const uint32_t capacity = pool->capacity * 2 + 8;
        akv_pooled *grown = akv_alloc(a, capacity * sizeof *grown);
        if (grown == NULL)
            return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %u documents", capacity);
        if (pool->count > 0)
            memcpy(grown, pool->documents, pool->count * sizeof *grown);
        if (pool->documents != NULL)
            akv_free(a, pool->documents, pool->capacity * sizeof *grown);
        pool->documents = grown;
        pool->capacity = capacity;
    }
    akv_pooled d;
    memset(&d, 0, sizeof d);
    d.segments = akv_alloc(a, n * sizeof *d.segments);
    d.blob_bytes = akv_alloc(a, n * sizeof *d.blob_bytes);
    if (d.segments == NULL || d.blob_bytes == NULL) {
        if (d.segments != NULL)
            akv_free(a, d.segments, n * sizeof *d.segments);
        if (d.blob_bytes != NULL)
            akv_free(a, d.blob_bytes, n * sizeof *d.blob_bytes);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a document of %u segments", n);
    }
    d.id = pool->next_id++;
    d.used = ++pool->tick;
    d.num_segments = n;
    for (uint32_t i = 0; i < n; i++) {
        d.segments[i] = akv_segment_retain(segments[i]);
        d.bytes += segment_bytes(segments[i]);
        const akv_header *h = akv_header_of(segments[i]);
        d.dense_bytes += akv_dense_bytes(h->num_tokens, h->num_kv_heads, h->head_dim[0], h->head_dim[1]);
    }
    pool->documents[pool->count++] = d;
    akv_status status = make_room(pool, 0, d.id, diag);
    if (status != AKV_OK)
        drop(pool, find(pool, d.id));
    else
        *id = d.id;
    return status;
}

akv_status akv_pool_add(akv_pool *pool, akv_segment *const *segments, uint32_t num_segments, uint64_t *id,
                        akv_diag *diag)
{
    if (pool == NULL || segments == NULL || num_segments == 0 || id == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "pool, segments and id must not be NULL, and there must be a segment");
    for (uint32_t i = 0; i < num_segments; i++)
        if (segments[i] == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment %u is NULL", i);
    pthread_mutex_lock(&pool->lock);
    akv_status status = add(pool, segments, num_segments, id, diag);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

static akv_status fetch(akv_pool *pool, akv_pooled *d, akv_diag *diag)
{
    AKV_TRY(make_room(pool, d->bytes, d->id, diag));
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < d->num_segments; i++) {
        akv_segment *check = NULL;
        akv_segment *segment = akv_segment_new(pool->config.allocator, d->blob_bytes[i]);
        if (segment == NULL) {
            status = akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %zu bytes", d->blob_bytes[i]);
            break;
        }
        d->segments[i] = segment;
        uint8_t *blob = (uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES;
        status = pool->config.fetch(pool->config.opaque, d->id, i, blob, d->blob_bytes[i], diag);
        if (status == AKV_OK) /* what comes from outside is checked */
            status = akv_segment_open(blob, d->blob_bytes[i], 0, pool->config.allocator, &check, diag);
        akv_segment_release(check);
    }
    for (uint32_t i = 0; status != AKV_OK && i < d->num_segments; i++) {
        akv_segment_release(d->segments[i]);
        d->segments[i] = NULL;
    }
    if (status != AKV_OK)
        return status;
    d->away = false;
    if (pool->config.forget != NULL)
        pool->config.forget(pool->config.opaque, d->id);
    pool->fetches++;
    return AKV_OK;
}

akv_status akv_pool_acquire(akv_pool *pool, uint64_t id, akv_segment **segments, uint32_t num_segments, akv_diag *diag)
{
    if (pool == NULL || segments == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "pool and segments must not be NULL");
    pthread_mutex_lock(&pool->lock);
    akv_pooled *d = find(pool, id);
    akv_status status = AKV_OK;
    if (d == NULL || d->num_segments != num_segments)
        status = akv_fail(diag, AKV_E_INVALID_ARGUMENT, "there is no document %llu of %u segments in the pool",
                          (unsigned long long)id, num_segments);
    else if (d->away)
        status = fetch(pool, d, diag);
    if (status == AKV_OK) {
        d->used = ++pool->tick;
        for (uint32_t i = 0; i < num_segments; i++)
            segments[i] = akv_segment_retain(d->segments[i]);
    }
    pthread_mutex_unlock(&pool->lock);
    return status;
}

akv_status akv_pool_remove(akv_pool *pool, uint64_t id, akv_diag *diag)
{
    if (pool == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "pool must not be NULL");
    pthread_mutex_lock(&pool->lock);
    akv_pooled *d = find(pool, id);
    if (d != NULL)
        drop(pool, d);
    pthread_mutex_unlock(&pool->lock);
    return d != NULL ? AKV_OK
                     : akv_fail(diag, AKV_E_INVALID_ARGUMENT, "there is no document %llu in the pool",
                                (unsigned long long)id);
}

akv_status akv_pool_get_stats(akv_pool *pool, akv_pool_stats *out, akv_diag *diag)
{
    if (pool == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "pool must not be NULL, and out must come from akv_pool_stats_init");
    akv_pool_stats_init(out);
    pthread_mutex_lock(&pool->lock);
    out->budget_bytes = pool->config.budget_bytes;
    out->resident_bytes = resident(pool);
    out->documents = pool->count;
    for (uint32_t i = 0; i < pool->count; i++) {
        out->spilled_documents += pool->documents[i].away;
        out->spilled_bytes += pool->documents[i].away ? pool->documents[i].bytes : 0;
    }
    out->retargets = pool->retargets;
    out->spills = pool->spills;
    out->fetches = pool->fetches;
    pthread_mutex_unlock(&pool->lock);
    return AKV_OK;
}

void akv_pool_document_init(akv_pool_document *document)
{
    memset(document, 0, sizeof *document);
    document->struct_size = sizeof *document;
}

akv_status akv_pool_get_document(akv_pool *pool, uint64_t id, akv_pool_document *out, akv_diag *diag)
{
    if (pool == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "pool must not be NULL, and out must come from akv_pool_document_init");
    akv_pool_document_init(out);
    pthread_mutex_lock(&pool->lock);
    const akv_pooled *d = find(pool, id);
    for (uint32_t i = 0; d != NULL && !d->away && i < d->num_segments; i++) {
        akv_segment_info info;
        akv_segment_info_init(&info);
        akv_segment_get_info(d->segments[i], &info, NULL);
        for (size_t k = 0; k < sizeof info.bytes / sizeof(uint64_t); k++)
            (&out->bytes.total)[k] += (&info.bytes.total)[k];
    }
    if (d != NULL) {
        out->bytes.total = d->bytes;
        out->dense_bytes = d->dense_bytes;
        out->spilled = d->away;
    }
    pthread_mutex_unlock(&pool->lock);
    return d != NULL ? AKV_OK
                     : akv_fail(diag, AKV_E_INVALID_ARGUMENT, "there is no document %llu in the pool",
                                (unsigned long long)id);
}
