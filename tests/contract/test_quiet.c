/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quiet.c - attending allocates nothing and takes no lock. The program is linked with --wrap, so that every call of the
 * library's objects to these functions comes by here and is counted.
 */
#define _POSIX_C_SOURCE 200809L /* read-write and spin locks */
#include "akv_test.h"
#include "cases.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_int allocations, locks;

#define WRAP(count, type, name, params, args)                                                                         \
    type __real_##name params;                                                                                         \
    type __wrap_##name params;                                                                                         \
    type __wrap_##name params                                                                                          \
    {                                                                                                                  \
        atomic_fetch_add(&count, 1);                                                                                   \
        return __real_##name args;                                                                                     \
    }
WRAP(allocations, void *, malloc, (size_t n), (n))
WRAP(allocations, void *, calloc, (size_t n, size_t size), (n, size))
WRAP(allocations, void *, realloc, (void *p, size_t n), (p, n))
WRAP(allocations, void *, aligned_alloc, (size_t align, size_t n), (align, n))
WRAP(allocations, int, posix_memalign, (void **p, size_t align, size_t n), (p, align, n))
WRAP(allocations, void, free, (void *p), (p))
WRAP(locks, int, pthread_mutex_lock, (pthread_mutex_t * m), (m))
WRAP(locks, int, pthread_mutex_trylock, (pthread_mutex_t * m), (m))
WRAP(locks, int, pthread_rwlock_rdlock, (pthread_rwlock_t * l), (l))
WRAP(locks, int, pthread_rwlock_wrlock, (pthread_rwlock_t * l), (l))
WRAP(locks, int, pthread_spin_lock, (pthread_spinlock_t * l), (l))
WRAP(locks, int, pthread_once, (pthread_once_t * o, void (*fn)(void)), (o, fn))
WRAP(locks, int, pthread_cond_wait, (pthread_cond_t * c, pthread_mutex_t *m), (c, m))

/* What one call counts, with an executor of the caller's own that runs everything in its thread. */
static void attend(const char *name, const akv_segment *segment, uint32_t dim, uint32_t T, uint64_t tail, bool mask)
{
    akv_diag diag = {AKV_OK, ""};
    akv_attend_params p;
    akv_attend_params_init(&p);
    void *memory[4] = {NULL};
    size_t bytes = 0;
    p.num_kv_heads = 2;
    p.gqa_group = 3;
    p.head_dim_k = p.head_dim_v = dim;
    p.num_queries = T;
    p.sm_scale = 0.1;
    p.queries = tensor_make(6, T, dim, AKV_F32, LAY_CONTIGUOUS, &memory[0]);
    p.segments = &segment;
    p.num_segments = segment != NULL;
    p.tail_tokens = tail;
    if (tail > 0) {
        p.tail_keys = tensor_make(2, tail, dim, AKV_F16, LAY_CONTIGUOUS, &memory[1]);
        p.tail_values = tensor_make(2, tail, dim, AKV_F16, LAY_TRANSPOSED, &memory[2]);
    }
    if (mask)
        p.tail_mask = tensor_make(1, T, (uint32_t)tail, AKV_F32, LAY_CONTIGUOUS, &memory[3]);
    p.out = must(malloc((size_t)6 * T * dim * sizeof(float)));
    p.out_stride_head = (int64_t)T * dim;
    p.out_stride_token = dim;
    for (int e = 0; e < 2; e++) {
        p.executor = e == 0 ? NULL : &reversed_executor;
        CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
        void *workspace = must(aligned_alloc(64, (bytes + 63) / 64 * 64));
        for (int call = 0; call < 2; call++) {
            allocations = locks = 0;
            akv_status status = akv_attend_workspace_bytes(&p, &bytes, &diag);
            if (status == AKV_OK)
                status = akv_attend(&p, workspace, bytes, &diag);
            const int allocated = allocations, locked = locks;
            CHECK_STATUS(status, AKV_OK, &diag);
            CHECK_MSG(allocated == 0, "%s: %d allocations in call %d", name, allocated, call);
            CHECK_MSG(locked == 0, "%s: %d locks in call %d", name, locked, call);
        }
        free(workspace);
    }
    for (int i = 0; i < 4; i++)
        free(memory[i]);
    free(p.out);
}

static akv_segment *compressed(akv_profile profile, uint32_t dim, int gaps, akv_dtype dtype, bool dense)
{
    const spec s = {.name = "quiet", .S = 1500, .H = 2, .G = 3, .dk = dim, .dv = dim, .W = 16, .rotary = dim, .dtype = dtype,
                    .gaps = gaps, .keep = 0.2, .seed = 5};
    akv_diag diag = {AKV_OK, ""};
    akv_segment *segment = NULL;
    fixture f;
    fixture_make(&s, &f);
    f.config.profile = profile;
    if (dense)
        CHECK_STATUS(akv_segment_create_dense(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    else
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    fixture_free(&f);
    return segment;
}

static void attending(void)
{
    static const uint32_t queries[] = {1, 3, 40, 200}; /* one row group, quads, tiles of dense ones, tiles of all */
    for (uint32_t dim = 64; dim <= 128; dim += 64)
        for (int i = 0; i < 4; i++) {
            akv_segment *kinds[5] = {compressed(AKV_PROFILE_DEFAULT, dim, 0, AKV_F16, false),
                                     compressed(AKV_PROFILE_DEFAULT, dim, 1, AKV_F16, false),
                                     compressed(AKV_PROFILE_PAPER, dim, 0, AKV_F16, false),
                                     compressed(AKV_PROFILE_DEFAULT, dim, 0, AKV_F16, true), NULL};
            static const char *const names[5] = {"default", "positions with gaps", "paper", "dense", "tail alone"};
            for (int k = 0; k < 5; k++) {
                attend(names[k], kinds[k], dim, queries[i], 300, false);
                attend(names[k], kinds[k], dim, queries[i], 300, true);
                akv_segment_release(kinds[k]);
            }
        }
}

/* The counters do count: compression allocates, the library's own pool locks. */
static void counters(void)
{
    akv_diag diag = {AKV_OK, ""};
    akv_threads *pool = NULL;
    allocations = 0;
    akv_segment_release(compressed(AKV_PROFILE_DEFAULT, 64, 0, AKV_F16, false));
    CHECK(allocations > 0);
    locks = 0;
    CHECK_STATUS(akv_threads_create(2, &pool, &diag), AKV_OK, &diag);
    akv_threads_destroy(pool);
    CHECK(locks > 0);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(attending);
    TEST(counters);
    return TEST_DONE();
}
