/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pool.c - many documents in one budget: it holds after every call, the least recently used give way first (smaller, then away),
 * nothing is lost, and what cannot fit is refused.
 */
#include "akv_test.h"
#include "anchorkv/akv_pool.h"
#include "cases.h"

#include <pthread.h>

enum { SEGMENTS = 2, MOST = 64 };

/* A "disk" in memory. */
typedef struct disk {
    void *data[MOST][SEGMENTS];
    size_t bytes[MOST][SEGMENTS];
    int full, broken;
} disk;

static akv_status put(void *opaque, uint64_t id, uint32_t index, const void *data, size_t bytes, akv_diag *diag)
{
    disk *d = opaque;
    (void)diag;
    if (d->full && index == 1)
        return AKV_E_IO;
    free(d->data[id % MOST][index]);
    d->data[id % MOST][index] = must(malloc(bytes));
    d->bytes[id % MOST][index] = bytes;
    memcpy(d->data[id % MOST][index], data, bytes);
    return AKV_OK;
}

static akv_status get(void *opaque, uint64_t id, uint32_t index, void *data, size_t bytes, akv_diag *diag)
{
    disk *d = opaque;
    (void)diag;
    if (d->data[id % MOST][index] == NULL || d->bytes[id % MOST][index] != bytes)
        return AKV_E_IO;
    memcpy(data, d->data[id % MOST][index], bytes);
    if (d->broken)
        ((uint8_t *)data)[16] ^= 64;
    return AKV_OK;
}

static void forget(void *opaque, uint64_t id)
{
    disk *d = opaque;
    for (int i = 0; i < SEGMENTS; i++) {
        free(d->data[id % MOST][i]);
        d->data[id % MOST][i] = NULL;
    }
}

static uint64_t total_of(const akv_segment *segment)
{
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    return info.bytes.total;
}

static akv_pool *pool_new(uint64_t budget, disk *d, const akv_allocator *allocator)
{
    akv_pool_config config;
    akv_pool *pool = NULL;
    akv_diag diag = {0};
    akv_pool_config_init(&config);
    config.budget_bytes = budget;
    config.least_keep_ratio = 0.05;
    config.allocator = allocator;
    if (d != NULL) {
        config.spill = put;
        config.fetch = get;
        config.forget = forget;
        config.opaque = d;
    }
    CHECK_STATUS(akv_pool_create(&config, &pool, &diag), AKV_OK, &diag);
    return must(pool);
}

static void document(uint64_t seed, akv_segment *out[SEGMENTS])
{
    spec s = {.name = "d", .S = 700, .H = 2, .G = 1, .dk = 32, .dv = 32, .W = 8, .rotary = 32, .seed = seed};
    for (int i = 0; i < SEGMENTS; i++)
        out[i] = random_ladder_segment(&s, 20, 0.8, seed * 10 + (uint64_t)i);
}

static void release(akv_segment *segments[SEGMENTS])
{
    for (int i = 0; i < SEGMENTS; i++)
        akv_segment_release(segments[i]);
}

static akv_pool_stats stats_of(akv_pool *pool)
{
    akv_pool_stats s;
    akv_pool_stats_init(&s);
    CHECK(akv_pool_get_stats(pool, &s, NULL) == AKV_OK);
    CHECK_MSG(s.resident_bytes <= s.budget_bytes, "%llu bytes in a budget of %llu",
              (unsigned long long)s.resident_bytes, (unsigned long long)s.budget_bytes);
    return s;
}

static void budget_holds(void)
{
    disk d = {0};
    akv_segment *segments[SEGMENTS], *back[SEGMENTS];
    akv_diag diag = {0};
    uint64_t id[12], one = 0;
    document(1, segments);
    for (int i = 0; i < SEGMENTS; i++)
        one += total_of(segments[i]);
    akv_pool *pool = pool_new(one * 3, &d, NULL);
    for (uint64_t i = 0; i < 12; i++) {
        if (i > 0)
            document(i + 1, segments);
        CHECK_STATUS(akv_pool_add(pool, segments, SEGMENTS, &id[i], &diag), AKV_OK, &diag);
        release(segments);
        akv_pool_stats s = stats_of(pool);
        CHECK(s.documents == i + 1);
        if (i < 2)
            CHECK(s.retargets == 0 && s.spills == 0);
        if (i == 4) /* smaller first */
            CHECK(s.retargets > 0);
    }
    akv_pool_stats s = stats_of(pool);
    CHECK(s.spills > 0 && s.spilled_documents > 0 && s.documents == 12);
    /* what is said of each adds up to what is said of all, and asking moves nothing */
    uint64_t here = 0, away = 0, by_kind = 0;
    for (uint64_t i = 0; i < 12; i++) {
        akv_pool_document d1;
        akv_pool_document_init(&d1);
        CHECK_STATUS(akv_pool_get_document(pool, id[i], &d1, &diag), AKV_OK, &diag);
        CHECK(d1.dense_bytes == SEGMENTS * 700 * 2 * (32 + 32) * 2 && d1.bytes.total > 0 && d1.bytes.total < d1.dense_bytes);
        here += d1.spilled ? 0 : d1.bytes.total;
        away += d1.spilled ? d1.bytes.total : 0;
        for (size_t k = 1; k < sizeof d1.bytes / sizeof(uint64_t); k++)
            by_kind += (&d1.bytes.total)[k];
    }
    CHECK(here == s.resident_bytes && away == s.spilled_bytes && by_kind == here && stats_of(pool).fetches == s.fetches);
    akv_pool_document none;
    akv_pool_document_init(&none);
    CHECK_STATUS(akv_pool_get_document(pool, 999, &none, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    for (int round = 0; round < 3; round++)
        for (uint64_t i = 0; i < 12;
             i++) { /* every document is there, with all its tokens, and what it decodes to is stable */
            CHECK_STATUS(akv_pool_acquire(pool, id[i], back, SEGMENTS, &diag), AKV_OK, &diag);
            stats_of(pool);
            for (int k = 0; k < SEGMENTS; k++) {
                akv_segment_info info;
                akv_segment_info_init(&info);
                akv_segment_get_info(back[k], &info, NULL);
                CHECK(info.shape.num_tokens == 700);
            }
            release(back);
        }
    CHECK(stats_of(pool).fetches > 0);
    CHECK_STATUS(akv_pool_remove(pool, id[3], &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_pool_remove(pool, id[3], &diag), AKV_E_INVALID_ARGUMENT, &diag);
    akv_segment *const no_segment[1] = {NULL};
    uint64_t nowhere = 7;
    CHECK_STATUS(akv_pool_add(pool, no_segment, 1, &nowhere, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_pool_add(pool, no_segment, 0, &nowhere, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_pool_remove(NULL, 1, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_pool_get_stats(pool, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_pool_get_document(pool, id[0], NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(nowhere == 7);
    CHECK_STATUS(akv_pool_acquire(pool, id[3], back, SEGMENTS, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_pool_acquire(pool, id[4], back, 1, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(stats_of(pool).documents == 11);
    akv_pool_destroy(pool);
    for (int i = 0; i < MOST; i++)
        for (int k = 0; k < SEGMENTS; k++)
            CHECK(d.data[i][k] == NULL); /* the disk was told to forget everything */
}

/* The one used last stays as it is as long as others can give way. */
static void least_recently_used(void)
{
    disk d = {0};
    akv_segment *segments[SEGMENTS], *back[SEGMENTS];
    uint64_t id[3], one = 0, before = 0, after = 0;
    document(1, segments);
    for (int i = 0; i < SEGMENTS; i++)
        one += total_of(segments[i]);
    akv_pool *pool = pool_new(one * 21 / 10, &d, NULL);
    for (uint64_t i = 0; i < 2; i++) {
        if (i > 0)
            document(i + 1, segments);
        CHECK(akv_pool_add(pool, segments, SEGMENTS, &id[i], NULL) == AKV_OK);
        release(segments);
    }
    CHECK(akv_pool_acquire(pool, id[0], back, SEGMENTS, NULL) == AKV_OK);
    for (int i = 0; i < SEGMENTS; i++)
        before += total_of(back[i]);
    release(back);
    /* a small one, for which document 1 gives way: 0 was used after it */
    spec s = {.name = "small", .S = 100, .H = 2, .G = 1, .dk = 32, .dv = 32, .W = 8, .rotary = 32, .seed = 9};
    segments[0] = random_ladder_segment(&s, 20, 0.8, 3);
    segments[1] = random_ladder_segment(&s, 20, 0.8, 4);
    CHECK(akv_pool_add(pool, segments, SEGMENTS, &id[2], NULL) == AKV_OK);
    release(segments);
    CHECK(akv_pool_acquire(pool, id[0], back, SEGMENTS, NULL) == AKV_OK);
    for (int i = 0; i < SEGMENTS; i++)
        after += total_of(back[i]);
    release(back);
    CHECK_MSG(before == after, "the document used last shrank from %llu to %llu bytes", (unsigned long long)before,
              (unsigned long long)after);
    CHECK(stats_of(pool).retargets >= 1);
    akv_pool_destroy(pool);
}

static void refusals(void)
{
    disk d = {0};
    akv_segment *segments[SEGMENTS], *back[SEGMENTS];
    akv_diag diag = {0};
    uint64_t id[3], other = 77, one = 0;
    akv_pool_config config;
    akv_pool *pool = NULL;
    akv_pool_config_init(&config);
    CHECK_STATUS(akv_pool_create(&config, &pool, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    config.budget_bytes = 1;
    config.spill = put;
    CHECK_STATUS(akv_pool_create(&config, &pool, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    document(1, segments);
    for (int i = 0; i < SEGMENTS; i++)
        one += total_of(segments[i]);
    /* without a disk documents become smaller, then there is no room, and the ones that are there stay */
    pool = pool_new(one * 3 / 2, NULL, NULL);
    akv_status status = AKV_OK;
    uint32_t taken = 0;
    for (int i = 0; i < 20 && status == AKV_OK; i++) {
        status = akv_pool_add(pool, segments, SEGMENTS, &other, &diag);
        taken += status == AKV_OK;
        id[i < 3 ? i : 2] = other;
    }
    CHECK_MSG(status == AKV_E_NO_SPACE && taken > 1, "%u documents taken, then: %s", taken, diag.message);
    CHECK(stats_of(pool).documents == taken && akv_pool_acquire(pool, id[0], back, SEGMENTS, NULL) == AKV_OK);
    release(back);
    akv_pool_destroy(pool);
    /* a disk that is full: the error comes through, nothing is lost; later it works again */
    pool = pool_new(one * 3 / 2, &d, NULL);
    d.full = 1;
    status = AKV_OK;
    for (taken = 0; status == AKV_OK && taken < 20; taken += status == AKV_OK)
        status = akv_pool_add(pool, segments, SEGMENTS, &id[taken < 3 ? taken : 2], &diag);
    CHECK(status == AKV_E_IO && stats_of(pool).spilled_documents == 0 && stats_of(pool).documents == taken);
    d.full = 0;
    CHECK_STATUS(akv_pool_add(pool, segments, SEGMENTS, &other, &diag), AKV_OK, &diag);
    CHECK(stats_of(pool).spilled_documents > 0);
    d.broken = 1; /* what comes back is not what went */
    status = akv_pool_acquire(pool, id[0], back, SEGMENTS, &diag);
    CHECK_MSG(status == AKV_E_CORRUPT, "broken bytes give %d", (int)status);
    d.broken = 0;
    CHECK_STATUS(akv_pool_acquire(pool, id[0], back, SEGMENTS, &diag), AKV_OK, &diag);
    release(back);
    akv_pool_destroy(pool);
    akv_pool_destroy(NULL);
    release(segments);
}

static void no_memory(void)
{
    akv_segment *segments[SEGMENTS];
    document(1, segments);
    for (uint64_t fail = 1; fail < 12; fail++) {
        disk d = {0};
        counter c;
        counter_init(&c);
        c.fail_at = fail;
        akv_pool_config config;
        akv_pool *pool = NULL;
        akv_pool_config_init(&config);
        config.budget_bytes = total_of(segments[0]) * 2;
        config.allocator = &c.hooks;
        config.spill = put;
        config.fetch = get;
        config.forget = forget;
        config.opaque = &d;
        if (akv_pool_create(&config, &pool, NULL) == AKV_OK) {
            uint64_t id;
            for (int i = 0; i < 3; i++) {
                akv_status status = akv_pool_add(pool, segments, SEGMENTS, &id, NULL);
                CHECK(status == AKV_OK || status == AKV_E_NO_MEMORY);
                stats_of(pool);
            }
            akv_pool_destroy(pool);
        }
        CHECK(c.live == 0 && c.bad_free == 0);
    }
    release(segments);
}

typedef struct worker {
    akv_pool *pool;
    const uint64_t *ids;
    int ok;
} worker;

static void *work(void *opaque)
{
    worker *w = opaque;
    akv_segment *segments[SEGMENTS];
    float key[32];
    w->ok = 1;
    for (int i = 0; i < 30; i++) {
        if (akv_pool_acquire(w->pool, w->ids[i % 6], segments, SEGMENTS, NULL) != AKV_OK) {
            w->ok = 0;
            break;
        }
        w->ok = akv_segment_decode(segments[0], 0, 5, 1, key, NULL, NULL) == AKV_OK && w->ok;
        for (int k = 0; k < SEGMENTS; k++)
            akv_segment_release(segments[k]);
    }
    return NULL;
}

static void threads(void)
{
    disk d = {0};
    akv_segment *segments[SEGMENTS];
    uint64_t id[6], one = 0;
    worker w[4];
    pthread_t thread[4];
    document(1, segments);
    for (int i = 0; i < SEGMENTS; i++)
        one += total_of(segments[i]);
    akv_pool *pool = pool_new(one * 2, &d, NULL);
    for (int i = 0; i < 6; i++)
        CHECK(akv_pool_add(pool, segments, SEGMENTS, &id[i], NULL) == AKV_OK);
    release(segments);
    for (int i = 0; i < 4; i++) {
        w[i] = (worker){pool, id, 0};
        must(pthread_create(&thread[i], NULL, work, &w[i]) == 0 ? w : NULL);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < 4; i++)
        CHECK(w[i].ok);
    stats_of(pool);
    akv_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(budget_holds);
    TEST(least_recently_used);
    TEST(refusals);
    TEST(no_memory);
    TEST(threads);
    return TEST_DONE();
}
