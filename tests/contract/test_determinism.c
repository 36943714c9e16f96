/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_determinism.c - same input and seed, same bytes: for 1, 2, 3 threads, for tasks run backwards, for ten repeats,
 * and whatever memory held before (the allocator fills it with changing patterns, so that a read of fresh memory
 * shows).
 */
#include "akv_test.h"
#include "cases.h"

/* Under the thread sanitizer fewer repeats of a shorter prompt: it watches every access, thirty times slower. */
#if defined(__SANITIZE_THREAD__)
enum { RUNS = 5, LONG = 1300 };
#else
enum { RUNS = 14, LONG = 5000 };
#endif

static akv_profile profile; /* of the cases that run */

static void same_bytes(const spec *s, const akv_experiment *experiment)
{
    fixture f;
    fixture_make(s, &f);
    f.config.profile = profile;
    f.config.experiment = experiment;
    akv_diag diag = {0};
    akv_segment *first = NULL;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &first, &diag), AKV_OK, &diag);
    if (first == NULL) {
        fixture_free(&f);
        return;
    }
    size_t bytes;
    const void *data = akv_segment_data(first, &bytes);
    for (int run = 0; run < RUNS; run++) {
        counter c;
        counter_init(&c);
        c.fill = (uint8_t)(run * 85); /* 0x00, 0x55, 0xaa, 0xff, ... */
        f.config.allocator = &c.hooks;
        akv_threads *pool = NULL;
        f.config.executor = NULL;
        if (run >= 1 && run <= 3) {
            CHECK_STATUS(akv_threads_create((uint32_t)run, &pool, &diag), AKV_OK, &diag);
            f.config.executor = akv_threads_executor(pool);
        } else if (run == 4)
            f.config.executor = &reversed_executor;
        akv_segment *again = NULL;
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &again, &diag), AKV_OK, &diag);
        size_t n = 0;
        const void *other = akv_segment_data(again, &n);
        CHECK_MSG(other != NULL && n == bytes && memcmp(data, other, n) == 0, "%s: run %d gives other bytes", s->name,
                  run);
        akv_segment_release(again);
        CHECK(c.live == 0 && c.bad_free == 0);
        akv_threads_destroy(pool);
    }
    f.config.allocator = NULL;
    f.config.executor = NULL;
    f.config.seed++;
    akv_segment *seeded = NULL;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &seeded, &diag), AKV_OK, &diag);
    size_t n = 0;
    const void *other = akv_segment_data(seeded, &n);
    CHECK_MSG(other != NULL && n == bytes && memcmp(data, other, n) != 0, "%s: another seed gives the same bytes",
              s->name);
    akv_segment_release(seeded);
    akv_segment_release(first);
    fixture_free(&f);
}

static void shapes(void)
{
    same_bytes(&(spec){.name = "small",
                       .S = 333,
                       .H = 3,
                       .G = 2,
                       .dk = 80,
                       .dv = 64,
                       .W = 16,
                       .rotary = 80,
                       .keep = 0.3,
                       .dtype = AKV_F16,
                       .seed = 1},
               NULL);
    same_bytes(&(spec){.name = "one head",
                       .S = 2500,
                       .H = 1,
                       .G = 8,
                       .dk = 128,
                       .dv = 128,
                       .W = 32,
                       .rotary = 128,
                       .keep = 0.1,
                       .dtype = AKV_BF16,
                       .seed = 2},
               NULL);
    same_bytes(&(spec){.name = "long",
                       .S = LONG,
                       .H = 2,
                       .G = 4,
                       .dk = 64,
                       .dv = 64,
                       .W = 32,
                       .rotary = 32,
                       .keep = 0.08,
                       .dtype = AKV_F32,
                       .softcap = 30,
                       .gaps = 1,
                       .layout_v = LAY_TRANSPOSED,
                       .seed = 3},
               NULL);
}

static void switches(void)
{
    spec s = {.name = "switches",
              .S = 600,
              .H = 2,
              .G = 2,
              .dk = 64,
              .dv = 64,
              .W = 32,
              .rotary = 64,
              .keep = 0.3,
              .dtype = AKV_F16,
              .seed = 4};
    for (int rank = 0; rank < 5; rank++) {
        akv_experiment e;
        akv_experiment_init(&e);
        e.rank = (akv_rank)rank;
        e.equal_head_budgets = rank % 2;
        e.scale_rule = rank % 2 ? AKV_SCALE_LEAST_SQUARES : AKV_SCALE_ABSMAX;
        e.code_rule = rank == 3 ? AKV_CODE_PLAIN_UNIFORM : AKV_CODE_ROTATED_LLOYD_MAX;
        e.anchor_space = rank == 4 ? AKV_ANCHOR_POST_ROPE : AKV_ANCHOR_PRE_ROPE;
        same_bytes(&s, &e);
    }
}

/* Identical tokens: every score and utility ties, which no order of execution may break otherwise. */
static void ties(void)
{
    spec s = {.name = "ties",
              .S = 400,
              .H = 2,
              .G = 2,
              .dk = 64,
              .dv = 64,
              .W = 32,
              .rotary = 0,
              .keep = 0.3,
              .dtype = AKV_F16,
              .seed = 5};
    fixture f;
    fixture_make(&s, &f);
    f.config.profile = profile;
    for (uint64_t h = 0; h < 2; h++)
        for (uint64_t p = 0; p < 400; p++)
            for (uint64_t i = 0; i < 64; i++) {
                tensor_set(&f.layer.keys, h, p, i, (double)(i % 5) + (p % 2 ? 0.25 : 0));
                tensor_set(&f.layer.values, h, p, i, (double)(i % 3) + (p % 2 ? 0.25 : 0));
            }
    akv_diag diag = {0};
    akv_segment *one = NULL;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &one, &diag), AKV_OK, &diag);
    akv_threads *pool = NULL;
    CHECK_STATUS(akv_threads_create(3, &pool, &diag), AKV_OK, &diag);
    f.config.executor = akv_threads_executor(pool);
    for (int i = 0; i < 10 && one != NULL; i++) {
        akv_segment *two = NULL;
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &two, &diag), AKV_OK, &diag);
        size_t a, b = 0;
        const void *x = akv_segment_data(one, &a), *y = akv_segment_data(two, &b);
        CHECK(a == b && memcmp(x, y, a) == 0);
        akv_segment_release(two);
    }
    akv_threads_destroy(pool);
    akv_segment_release(one);
    fixture_free(&f);
}

static void default_switches(void)
{
    spec s = {.name = "default switches",
              .S = 600,
              .H = 2,
              .G = 2,
              .dk = 64,
              .dv = 48,
              .W = 32,
              .rotary = 64,
              .keep = 0.3,
              .dtype = AKV_F16,
              .seed = 6};
    for (int i = 0; i < 4; i++) {
        akv_experiment e;
        akv_experiment_init_default(&e);
        e.uniform_anchors = i == 1;
        e.slow_angle = i == 2 ? 0.5 : 6;
        e.pool_tokens = i == 3 ? 0 : 16;
        same_bytes(&s, &e);
    }
}

/* The same answer from every executor and at every repeat, over a segment of the profile. */
static void outputs(void)
{
    spec s = {.name = "outputs",
              .S = 2300,
              .H = 3,
              .G = 4,
              .dk = 64,
              .dv = 64,
              .W = 32,
              .rotary = 64,
              .keep = 0.2,
              .dtype = AKV_F16,
              .seed = 7};
    fixture f;
    fixture_make(&s, &f);
    f.config.profile = profile;
    akv_diag diag = {0};
    akv_segment *segment = NULL;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s.H;
    p.gqa_group = s.G;
    p.head_dim_k = s.dk;
    p.head_dim_v = s.dv;
    p.num_queries = s.W;
    p.queries = f.layer.queries;
    p.segments = (const akv_segment *const *)&segment;
    p.num_segments = 1;
    p.sm_scale = f.layer.sm_scale;
    size_t n = (size_t)s.H * s.G * s.W * s.dv, bytes = 0;
    float *first = must(malloc(n * sizeof *first));
    p.out = must(malloc(n * sizeof *p.out));
    p.out_stride_token = s.dv;
    p.out_stride_head = (int64_t)s.W * s.dv;
    for (uint32_t run = 0; run < 14 && segment != NULL; run++) {
        akv_threads *pool = NULL;
        uint32_t threads = run < 11 ? 1 : run - 10; /* ten repeats, then 1, 2, 3 threads */
        CHECK_STATUS(akv_threads_create(threads, &pool, &diag), AKV_OK, &diag);
        p.executor = run < 11 ? NULL : akv_threads_executor(pool);
        CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
        void *ws = must(aligned_alloc(64, (bytes + 63) / 64 * 64));
        memset(ws, (int)(run * 85 % 256), bytes);
        CHECK_STATUS(akv_attend(&p, ws, bytes, &diag), AKV_OK, &diag);
        if (run == 0)
            memcpy(first, p.out, n * sizeof *first);
        CHECK_MSG(memcmp(first, p.out, n * sizeof *first) == 0, "run %u gives other outputs", run);
        if (run == 0) /* one byte short is refused */
            CHECK_STATUS(akv_attend(&p, ws, bytes - 1, &diag), AKV_E_NO_SPACE, &diag);
        free(ws);
        akv_threads_destroy(pool);
    }
    free(first);
    free(p.out);
    akv_segment_release(segment);
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    for (int i = 0; i < 2; i++) {
        profile = i == 0 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
        printf("profile %s\n", i == 0 ? "paper" : "default");
        TEST(shapes);
        if (profile == AKV_PROFILE_PAPER)
            TEST(switches);
        else
            TEST(default_switches);
        TEST(ties);
        TEST(outputs);
    }
    return TEST_DONE();
}
