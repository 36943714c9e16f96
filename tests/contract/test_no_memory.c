/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_no_memory.c - every allocation of the main flows fails, one after the other: that one alone, and that one with
 * all later ones. Each time the flow ends with AKV_E_NO_MEMORY and a sentence, everything it had is given back with
 * the size it was asked for, and outputs are untouched. Flows end when they run through, so every allocation has
 * failed once; how many is printed. What the library takes from libc itself (thread pools; no allocator given) fails
 * by the linker's --wrap.
 */
#include "akv_test.h"
#include "anchorkv/akv_cache.h"
#include "anchorkv/akv_document.h"
#include "anchorkv/akv_pool.h"
#include "cases.h"

#include <pthread.h>

/* -------------------------------------------------------------------------------------------- libc's own functions */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

static uint64_t libc_calls, libc_fail; /* 0: never */

static int libc_fails(void)
{
    return libc_fail != 0 && ++libc_calls == libc_fail;
}

void *__wrap_malloc(size_t bytes)
{
    return libc_fails() ? NULL : __real_malloc(bytes);
}
void *__wrap_calloc(size_t count, size_t bytes)
{
    return libc_fails() ? NULL : __real_calloc(count, bytes);
}
void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return libc_fails() ? NULL : __real_aligned_alloc(align, bytes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return libc_fails() ? 11 : __real_pthread_create(thread, attr, fn, arg);
}

/* ---------------------------------------------------------------------------------------------------------- driver */

static unsigned long injected;

/* Runs to the end with what it allocates from `allocator` given back, or says what failed. */
typedef akv_status (*flow)(const akv_allocator *allocator, akv_diag *diag);

static void every_allocation(const char *name, flow run, uint64_t at_least)
{
    uint64_t failed = 0;
    for (int once = 0; once < 2; once++)
        for (uint64_t n = 1; n < 2000; n++) {
            counter c;
            akv_diag diag = {AKV_OK, ""};
            counter_init(&c);
            c.fail_at = n;
            c.once = (uint8_t)once;
            const akv_status status = run(&c.hooks, &diag);
            CHECK_MSG(c.live == 0 && c.bad_free == 0, "%s, allocation %llu: %llu left, %llu freed with another size",
                      name, (unsigned long long)n, (unsigned long long)c.live, (unsigned long long)c.bad_free);
            if (status == AKV_OK) {
                CHECK_MSG(c.total < n, "%s: allocation %llu failed and nobody noticed", name, (unsigned long long)n);
                break;
            }
            CHECK_MSG(status == AKV_E_NO_MEMORY && diag.status == status && strlen(diag.message) > 10,
                      "%s, allocation %llu: %s, \"%s\"", name, (unsigned long long)n, akv_status_str(status),
                      diag.message);
            if (status != AKV_E_NO_MEMORY)
                break;
            failed++;
        }
    CHECK_MSG(failed >= 2 * at_least && failed < 2000, "%s: %llu allocations failed", name, (unsigned long long)failed);
    printf("  %s: %llu allocations\n", name, (unsigned long long)failed / 2);
    injected += failed;
}

/* Goes on, or cleans up and says why not. */
#define STEP(call)                                                                                                     \
    do {                                                                                                               \
        status = (call);                                                                                               \
        if (status != AKV_OK)                                                                                          \
            goto done;                                                                                                 \
    } while (0)

/* -------------------------------------------------------------------------------------------------------- segments */

static fixture layer;
static akv_segment *samples[4]; /* paper, default, dense, a drawn ladder */

static akv_status compress_with(akv_profile profile, const akv_allocator *allocator, const akv_executor *executor,
                                akv_diag *diag)
{
    akv_segment *segment = NULL;
    layer.config.profile = profile;
    layer.config.allocator = allocator;
    layer.config.executor = executor;
    const akv_status status = akv_compress(&layer.layer, &layer.config, &segment, diag);
    CHECK((status == AKV_OK) == (segment != NULL));
    akv_segment_release(segment);
    return status;
}

static akv_status compress_paper(const akv_allocator *a, akv_diag *diag)
{
    return compress_with(AKV_PROFILE_PAPER, a, NULL, diag);
}
static akv_status compress_default(const akv_allocator *a, akv_diag *diag)
{
    return compress_with(AKV_PROFILE_DEFAULT, a, NULL, diag);
}

static akv_threads *pool_of_3;
static akv_status compress_threads(const akv_allocator *a, akv_diag *diag)
{
    return compress_with(AKV_PROFILE_DEFAULT, a, akv_threads_executor(pool_of_3), diag);
}

static akv_status create_dense(const akv_allocator *a, akv_diag *diag)
{
    akv_segment *segment = NULL;
    layer.config.allocator = a;
    const akv_status status = akv_segment_create_dense(&layer.layer, &layer.config, &segment, diag);
    akv_segment_release(segment);
    return status;
}

static akv_status evict(const akv_allocator *a, akv_diag *diag)
{
    akv_segment *segment = NULL;
    layer.config.allocator = a;
    const akv_status status = akv_evict_snapkv(&layer.layer, &layer.config, &segment, diag);
    akv_segment_release(segment);
    return status;
}

/* Opened with and without a copy, decoded, attended to: the last two allocate nothing. */
static akv_status open_decode_attend(const akv_allocator *a, akv_diag *diag)
{
    akv_status status = AKV_OK;
    akv_segment *segment = NULL;
    void *ws = NULL;
    float k[64], v[64], q[2 * 2 * 32], out[2 * 2 * 32];
    for (int i = 0; i < 8; i++) {
        size_t bytes = 0;
        const void *data = akv_segment_data(samples[i / 2], &bytes);
        STEP(akv_segment_open(data, bytes, i % 2, a, &segment, diag));
        STEP(akv_segment_decode(segment, 0, 0, 1, k, v, diag));
        const akv_segment *list[1] = {segment};
        akv_attend_params p;
        akv_attend_params_init(&p);
        p.num_kv_heads = p.gqa_group = 2;
        p.head_dim_k = p.head_dim_v = 32;
        p.num_queries = 1;
        p.sm_scale = 0.2;
        memset(q, 0, sizeof q);
        p.queries = akv_tensor_contiguous(q, AKV_F32, 1, 32);
        p.segments = list;
        p.num_segments = 1;
        p.out = out;
        p.out_stride_head = p.out_stride_token = 32;
        STEP(akv_attend_workspace_bytes(&p, &bytes, diag));
        ws = must(aligned_alloc(64, (bytes + 64) / 64 * 64));
        STEP(akv_attend(&p, ws, bytes, diag));
        free(ws);
        ws = NULL;
        akv_segment_release(segment);
        segment = NULL;
    }
done:
    free(ws);
    akv_segment_release(segment);
    return status;
}

static akv_status smaller(const akv_allocator *a, akv_diag *diag)
{
    akv_config config;
    akv_config_init(&config);
    config.allocator = a;
    for (int i = 0; i < 4; i++) {
        akv_segment_info info;
        akv_retarget_info plan;
        akv_segment *out = NULL;
        if (i == 2)
            continue;
        akv_segment_info_init(&info);
        akv_retarget_info_init(&plan);
        akv_segment_get_info(samples[i], &info, NULL);
        CHECK(akv_segment_retarget_plan(samples[i], info.bytes.total, &plan, NULL) == AKV_OK);
        akv_status status =
            akv_segment_retarget(samples[i], (plan.min_bytes + info.bytes.total) / 2, &config, &out, NULL, diag);
        akv_segment_release(out);
        if (status == AKV_OK && i > 0) {
            out = NULL;
            status = akv_segment_cut(samples[i], info.shape.num_tokens / 2, &config, &out, diag);
            akv_segment_release(out);
        }
        if (status != AKV_OK)
            return status;
    }
    akv_segment *out = NULL;
    const akv_status status = akv_segment_cut(samples[2], 50, &config, &out, diag);
    akv_segment_release(out);
    return status;
}

static void segments(void)
{
    every_allocation("compress, profile paper", compress_paper, 2);
    every_allocation("compress, profile default", compress_default, 2);
    every_allocation("compress on three threads", compress_threads, 2);
    every_allocation("dense", create_dense, 1);
    every_allocation("evict", evict, 2);
    every_allocation("open, decode, attend", open_decode_attend, 8);
    every_allocation("retarget and cut", smaller, 5);
}

/* ------------------------------------------------------------------------------------------------------- documents */

typedef struct sink {
    uint8_t *data;
    size_t bytes;
} sink;

static akv_status to_sink(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    sink *s = opaque;
    (void)diag;
    memcpy(s->data + s->bytes, data, bytes);
    s->bytes += bytes;
    return AKV_OK;
}

static akv_status document(const akv_allocator *a, akv_diag *diag)
{
    akv_status status = AKV_OK;
    akv_document *opened = NULL;
    akv_document_layer layers[2];
    const int32_t tokens[3] = {1, 2, 3};
    const akv_document_property properties[2] = {{"a", "b"}, {"c", ""}};
    akv_document_parts parts;
    sink s = {NULL, 0};
    akv_document_parts_init(&parts);
    memset(layers, 0, sizeof layers);
    for (uint32_t i = 0; i < 2; i++)
        layers[i] = (akv_document_layer){.num_kv_heads = 2,
                                         .gqa_group = 2,
                                         .head_dim_k = 32,
                                         .head_dim_v = 32,
                                         .rotary_dim = 32,
                                         .rope_magnitude = 1,
                                         .sm_scale = 0.2,
                                         .num_segments = 1,
                                         .first_segment = i};
    parts.num_layers = parts.model.num_layers = 2;
    parts.layers = layers;
    parts.tokens = tokens;
    parts.num_tokens = 3;
    parts.segments = samples;
    parts.num_segments = 2;
    parts.properties = properties;
    parts.num_properties = 2;
    s.data = must(aligned_alloc(64, akv_document_bytes(&parts)));
    STEP(akv_document_write(&parts, to_sink, &s, a, diag));
    STEP(akv_document_open(s.data, s.bytes, a, &opened, diag));
    STEP(akv_document_verify(opened, diag));
    for (int copy = 0; copy < 2; copy++) {
        akv_segment *segment = NULL;
        STEP(akv_document_open_segment(opened, 1, copy, a, &segment, diag));
        akv_segment_release(segment);
    }
done:
    akv_document_close(opened);
    free(s.data);
    return status;
}

static void documents(void)
{
    every_allocation("document written, opened, verified", document, 6);
}

/* ---------------------------------------------------------------------------------------------------------- caches */

static akv_status grow(akv_cache *cache, uint64_t n, akv_diag *diag)
{
    akv_status status = AKV_OK;
    float *x = must(malloc(8 * n * 32 * sizeof *x));
    akv_rng rng = {n};
    for (uint64_t i = 0; i < 8 * n * 32; i++)
        x[i] = (float)random_gauss(&rng);
    for (uint32_t l = 0; l < 2; l++) {
        const akv_tensor k = akv_tensor_contiguous(x, AKV_F32, n, 32),
                         v = akv_tensor_contiguous(x + 2 * n * 32, AKV_F32, n, 32),
                         q = akv_tensor_contiguous(x + 4 * n * 32, AKV_F32, n, 32);
        STEP(akv_cache_append(cache, l, n, &k, &v, diag));
        STEP(akv_cache_observe(cache, l, n, &q, diag));
    }
done:
    free(x);
    return status;
}

/* The whole life of a conversation. */
static akv_status cache_life(const akv_allocator *a, akv_diag *diag)
{
    akv_status status = AKV_OK;
    akv_cache *cache = NULL, *fork = NULL, *second = NULL;
    akv_cache_layer layers[2];
    akv_cache_config config;
    akv_cache_config_init(&config);
    for (int l = 0; l < 2; l++)
        layers[l] = (akv_cache_layer){2, 2, 32, 32, layer.layer.rope, 0.2, 0};
    config.num_layers = 2;
    config.layers = layers;
    config.num_queries = 8;
    config.codec.keep_ratio = 0.3;
    config.codec.allocator = a;
    STEP(akv_cache_create(&config, &cache, diag));
    STEP(grow(cache, 200, diag));
    STEP(akv_cache_compress_tail(cache, 40, diag));
    STEP(akv_cache_fork(cache, &fork, diag));
    STEP(grow(fork, 60, diag)); /* the shared tail is copied */
    STEP(akv_cache_compress_tail(fork, 20, diag));
    STEP(akv_cache_fork(fork, &second, diag));
    STEP(akv_cache_truncate(second, 100, diag)); /* a segment cut in the middle */
    akv_segment *const two[2] = {samples[1], samples[1]};
    STEP(akv_cache_append_segments(second, two, diag));
    akv_cache_stats stats;
    akv_cache_stats_init(&stats);
    STEP(akv_cache_get_stats(fork, &stats, diag));
    STEP(akv_cache_retarget(fork, (stats.segments.total + stats.tail_bytes) * 95 / 100, diag));
done:
    akv_cache_destroy(second);
    akv_cache_destroy(fork);
    akv_cache_destroy(cache);
    return status;
}

static void caches(void)
{
    every_allocation("life of a cache", cache_life, 20);
}

/* ----------------------------------------------------------------------------------------------------------- pools */

static void *kept[64];
static size_t kept_bytes[64];

static akv_status spill(void *opaque, uint64_t id, uint32_t index, const void *data, size_t bytes, akv_diag *diag)
{
    (void)opaque;
    (void)index;
    (void)diag;
    free(kept[id % 64]);
    kept[id % 64] = must(__real_malloc(bytes));
    kept_bytes[id % 64] = bytes;
    memcpy(kept[id % 64], data, bytes);
    return AKV_OK;
}

static akv_status fetch(void *opaque, uint64_t id, uint32_t index, void *data, size_t bytes, akv_diag *diag)
{
    (void)opaque;
    (void)index;
    (void)diag;
    CHECK(bytes == kept_bytes[id % 64]);
    memcpy(data, kept[id % 64], bytes);
    return AKV_OK;
}

static akv_status pool_life(const akv_allocator *a, akv_diag *diag)
{
    akv_status status = AKV_OK;
    akv_pool *pool = NULL;
    akv_pool_config config;
    akv_segment_info info;
    uint64_t ids[4];
    akv_segment *back = NULL;
    akv_pool_config_init(&config);
    akv_segment_info_init(&info);
    akv_segment_get_info(samples[1], &info, NULL);
    config.budget_bytes = info.bytes.total * 17 / 10;
    config.least_keep_ratio = 0.2;
    config.spill = spill;
    config.fetch = fetch;
    config.allocator = a;
    STEP(akv_pool_create(&config, &pool, diag));
    for (int i = 0; i < 4; i++) /* made smaller, then away */
        STEP(akv_pool_add(pool, &samples[1], 1, &ids[i], diag));
    STEP(akv_pool_acquire(pool, ids[0], &back, 1, diag));
    STEP(akv_pool_remove(pool, ids[1], diag));
done:
    akv_segment_release(back);
    akv_pool_destroy(pool);
    return status;
}

static void pools(void)
{
    every_allocation("life of a pool", pool_life, 6);
    for (int i = 0; i < 64; i++) {
        free(kept[i]);
        kept[i] = NULL;
    }
}

/* ------------------------------------------------------------------------------------------------------------ libc */

/* Thread pools, and everything above without an allocator: malloc, calloc, aligned_alloc and pthread_create fail. */
static void libc(void)
{
    uint64_t failed = 0;
    for (uint64_t n = 1; n < 100; n++) {
        akv_threads *threads = NULL;
        akv_diag diag = {AKV_OK, ""};
        libc_calls = 0;
        libc_fail = n;
        const akv_status status = akv_threads_create(4, &threads, &diag);
        libc_fail = 0;
        akv_threads_destroy(threads);
        if (status == AKV_OK)
            break;
        CHECK_MSG(status == AKV_E_NO_MEMORY && threads == NULL && strlen(diag.message) > 10, "call %llu: %s",
                  (unsigned long long)n, diag.message);
        failed++;
    }
    CHECK_MSG(failed == 5, "a pool of 4 threads: %llu calls failed",
              (unsigned long long)failed); /* 2 x calloc, 3 threads */
    for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++) {
        uint64_t here = 0;
        for (uint64_t n = 1; n < 100; n++, here++) {
            akv_diag diag = {AKV_OK, ""};
            libc_calls = 0;
            libc_fail = n;
            const akv_status status = compress_with((akv_profile)profile, NULL, NULL, &diag);
            libc_fail = 0;
            if (status == AKV_OK)
                break;
            CHECK_STATUS(status, AKV_E_NO_MEMORY, &diag);
        }
        CHECK_MSG(here >= 2 && here < 99, "profile %d without an allocator: %llu calls failed", profile,
                  (unsigned long long)here);
        failed += here;
    }
    printf("  libc: %llu calls failed\n", (unsigned long long)failed);
    injected += failed;
}

int main(int argc, char **argv)
{
    const spec s = {.name = "memory",
                    .S = 200,
                    .H = 2,
                    .G = 2,
                    .dk = 32,
                    .dv = 32,
                    .W = 8,
                    .rotary = 32,
                    .keep = 0.4,
                    .dtype = AKV_F16};
    const spec drawn = {.name = "drawn", .S = 90, .H = 2, .G = 2, .dk = 32, .dv = 32, .W = 2, .rotary = 32};
    akv_diag diag = {AKV_OK, ""};
    TEST_INIT(argc, argv);
    fixture_make(&s, &layer);
    for (int i = 0; i < 3; i++) {
        layer.config.profile = i == 0 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
        must((i < 2 ? akv_compress(&layer.layer, &layer.config, &samples[i], &diag)
                    : akv_segment_create_dense(&layer.layer, NULL, &samples[i], &diag)) == AKV_OK
                 ? samples
                 : NULL);
    }
    samples[3] = random_ladder_segment(&drawn, 9, 0.5, 3);
    must(akv_threads_create(3, &pool_of_3, &diag) == AKV_OK ? samples : NULL);
    TEST(segments);
    TEST(documents);
    TEST(caches);
    TEST(pools);
    TEST(libc);
    printf("  %lu allocations failed\n", injected);
    akv_threads_destroy(pool_of_3);
    for (int i = 0; i < 4; i++)
        akv_segment_release(samples[i]);
    fixture_free(&layer);
    return TEST_DONE();
}
