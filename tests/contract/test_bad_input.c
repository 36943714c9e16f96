/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bad_input.c - what callers get wrong: each is the right status with a sentence, outputs stay untouched, nothing
 * leaks, and the same data works afterwards. Odd but legal input (zeros, constants, extremes) works and stays finite.
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"

#include <limits.h>

static const spec base = {.name = "bad input",
                          .S = 300,
                          .H = 2,
                          .G = 2,
                          .dk = 64,
                          .dv = 48,
                          .W = 32,
                          .rotary = 64,
                          .dtype = AKV_F16,
                          .keep = 0.5,
                          .seed = 1};

/* Every case runs once for each profile. */
static akv_profile profile;

static void make(const spec *s, fixture *f)
{
    fixture_make(s, f);
    f->config.profile = profile;
}

static void experiment_init(akv_experiment *e)
{
    if (profile == AKV_PROFILE_DEFAULT)
        akv_experiment_init_default(e);
    else
        akv_experiment_init(e);
}

static akv_segment *const untouched = (akv_segment *)(uintptr_t)64;

/* akv_compress must fail so, with a message that holds every word of the list (separated by |). */
static void expect(const fixture *f, const akv_config *config, akv_status want, const char *words, const char *what)
{
    akv_segment *out = untouched;
    akv_diag diag = {AKV_OK, ""};
    counter c;
    counter_init(&c);
    akv_config with = *config;
    with.allocator = &c.hooks;
    akv_status got = akv_compress(&f->layer, &with, &out, &diag);
    CHECK_MSG(got == want, "%s: %s instead of %s: %s", what, akv_status_str(got), akv_status_str(want), diag.message);
    if (got == AKV_OK) {
        akv_segment_release(out);
        return;
    }
    CHECK_MSG(out == untouched, "%s: the output was touched", what);
    CHECK_MSG(diag.status == got && strlen(diag.message) > 10, "%s: no message", what);
    CHECK_MSG(c.live == 0 && c.bad_free == 0, "%s: %llu allocations leaked", what, (unsigned long long)c.live);
    char list[128];
    snprintf(list, sizeof list, "%s", words);
    for (char *w = strtok(list, "|"); w != NULL; w = strtok(NULL, "|"))
        CHECK_MSG(strstr(diag.message, w) != NULL, "%s: \"%s\" is not in the message: %s", what, w, diag.message);
    CHECK_MSG(akv_compress(&f->layer, &with, &out, NULL) == want, "%s: without diag", what);
}

static void non_finite(void)
{
    const double bad[] = {NAN, INFINITY, -INFINITY};
    const char *sides[] = {"key", "value", "quer"};
    for (int dtype = 0; dtype < 3; dtype++)
        for (int side = 0; side < 3; side++)
            for (int b = 0; b < 3; b++)
                for (int place = 0; place < 3; place++) {
                    spec s = base;
                    s.dtype = (akv_dtype)dtype;
                    s.layout_k = s.layout_v = place == 0 ? LAY_TRANSPOSED : LAY_CONTIGUOUS;
                    fixture f;
                    make(&s, &f);
                    akv_tensor *t = side == 0 ? &f.layer.keys : side == 1 ? &f.layer.values : &f.layer.queries;
                    /* first, middle, last element; tokens of queries are rows of the window */
                    uint32_t dim = side == 1 ? 48 : 64, tokens = side == 2 ? 32 : 300, heads = side == 2 ? 4 : 2;
                    uint32_t head = place == 0 ? 0 : heads - 1, token = place == 0   ? 0
                                                                        : place == 1 ? tokens * 2 / 3
                                                                                     : tokens - 1;
                    uint32_t d = place == 0 ? 0 : place == 1 ? dim / 2 + 1 : dim - 1;
                    double before = akv_tensor_at(t, head, token, d);
                    tensor_set(t, head, token, d, bad[b]);
                    char words[128];
                    /* a query row may be named as a row or as the token it belongs to */
                    if (side == 2)
                        snprintf(words, sizeof words, "%s|head %u|%u", sides[side], head, d);
                    else
                        snprintf(words, sizeof words, "%s|head %u|token %u|%u", sides[side], head, token, d);
                    expect(&f, &f.config, AKV_E_NON_FINITE, words, "NaN or infinity");
                    if (side < 2) {
                        akv_segment *out = untouched;
                        akv_diag diag = {0};
                        CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &out, &diag), AKV_E_NON_FINITE, &diag);
                        CHECK(out == untouched);
                        f.config.keep_ratio = 1; /* kept dense is no excuse */
                        expect(&f, &f.config, AKV_E_NON_FINITE, words, "NaN or infinity, dense");
                        f.config.keep_ratio = 0.5;
                    }
                    /* repaired, the same data works */
                    tensor_set(t, head, token, d, before);
                    expect(&f, &f.config, AKV_OK, "", "repaired");
                    fixture_free(&f);
                }
}

#define LAYER(edit, want, words)                                                                                       \
    do {                                                                                                               \
        fixture f;                                                                                                     \
        make(&base, &f);                                                                                       \
        akv_layer *l = &f.layer;                                                                                       \
        akv_config *c = &f.config;                                                                                     \
        (void)l;                                                                                                       \
        (void)c;                                                                                                       \
        edit;                                                                                                          \
        expect(&f, &f.config, want, words, #edit);                                                                     \
        fixture_free(&f);                                                                                              \
    } while (0)

static void layers(void)
{
    LAYER(l->struct_size = 0, AKV_E_INVALID_ARGUMENT, "akv_layer_init");
    LAYER(l->shape.struct_size = 0, AKV_E_INVALID_ARGUMENT, "akv_shape");
    LAYER(l->shape.num_tokens = 0, AKV_E_INVALID_ARGUMENT, "num_tokens");
    LAYER(l->shape.num_tokens = UINT64_MAX / 2, AKV_E_INVALID_ARGUMENT, "num_tokens");
    LAYER(l->shape.num_kv_heads = 0, AKV_E_INVALID_ARGUMENT, "num_kv_heads");
    LAYER(l->shape.gqa_group = 0, AKV_E_INVALID_ARGUMENT, "gqa_group");
    LAYER(l->shape.head_dim_k = 63, AKV_E_INVALID_ARGUMENT, "head_dim_k|even");
    LAYER(l->shape.head_dim_v = 47, AKV_E_INVALID_ARGUMENT, "head_dim_v|even");
    LAYER(l->shape.head_dim_k = 0, AKV_E_INVALID_ARGUMENT, "head_dim_k");
    LAYER(l->shape.head_dim_v = 1026, AKV_E_INVALID_ARGUMENT, "head_dim_v|1024");
    LAYER(l->shape.num_queries = 0, AKV_E_INVALID_ARGUMENT, "num_queries");
    LAYER(l->shape.num_queries = 1025, AKV_E_INVALID_ARGUMENT, "num_queries|1024");
    LAYER(l->shape.rotary_dim = 66, AKV_E_INVALID_ARGUMENT, "rotary_dim");
    LAYER((l->shape.rotary_dim = l->rope.rotary_dim = 33), AKV_E_INVALID_ARGUMENT, "rotary_dim|even");
    LAYER(l->rope.rotary_dim = 32, AKV_E_INVALID_ARGUMENT, "rotary_dim");
    LAYER(l->rope.inv_freq = NULL, AKV_E_INVALID_ARGUMENT, "inv_freq");
    LAYER(f.inv_freq[3] = NAN, AKV_E_INVALID_ARGUMENT, "inv_freq");
    LAYER(f.inv_freq[3] = INFINITY, AKV_E_INVALID_ARGUMENT, "inv_freq");
    LAYER(l->rope.magnitude = 0, AKV_E_INVALID_ARGUMENT, "magnitude");
    LAYER(l->rope.magnitude = -1, AKV_E_INVALID_ARGUMENT, "magnitude");
    LAYER(l->rope.magnitude = NAN, AKV_E_INVALID_ARGUMENT, "magnitude");
    LAYER(l->rope.style = (akv_rope_style)2, AKV_E_INVALID_ARGUMENT, "style");
    LAYER(l->sm_scale = NAN, AKV_E_INVALID_ARGUMENT, "sm_scale");
    LAYER(l->sm_scale = INFINITY, AKV_E_INVALID_ARGUMENT, "sm_scale");
    LAYER(l->logit_softcap = -1, AKV_E_INVALID_ARGUMENT, "softcap");
    LAYER(l->logit_softcap = NAN, AKV_E_INVALID_ARGUMENT, "softcap");
    LAYER(l->keys.data = NULL, AKV_E_INVALID_ARGUMENT, "keys");
    LAYER(l->values.data = NULL, AKV_E_INVALID_ARGUMENT, "values");
    LAYER(l->queries.data = NULL, AKV_E_INVALID_ARGUMENT, "queries");
    LAYER(l->keys.dtype = (akv_dtype)3, AKV_E_INVALID_ARGUMENT, "dtype");
    LAYER(l->queries.dtype = (akv_dtype)-1, AKV_E_INVALID_ARGUMENT, "dtype");
    LAYER(l->first_position = INT32_MAX - 298, AKV_E_INVALID_ARGUMENT, "position");
    LAYER((l->positions = f.positions, f.positions[7] = f.positions[6]), AKV_E_INVALID_ARGUMENT, "position|increas");
    LAYER((l->positions = f.positions, f.positions[299] = -5), AKV_E_INVALID_ARGUMENT, "position|increas");
    /* the last position that fits */
    LAYER(l->first_position = INT32_MAX - 299, AKV_OK, "");
    LAYER(l->first_position = INT32_MIN, AKV_OK, "");
}

static void configs(void)
{
    const double bad[] = {0, -0.1, NAN, 1.0000001, 20, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        LAYER(c->keep_ratio = bad[i], AKV_E_INVALID_ARGUMENT, "keep_ratio");
        fixture f;
        make(&base, &f);
        f.config.keep_ratio = bad[i];
        akv_plan_info info;
        akv_plan_info_init(&info);
        akv_diag diag = {0};
        CHECK_STATUS(akv_plan(&f.layer.shape, &f.config, &info, &diag), AKV_E_INVALID_ARGUMENT, &diag);
        fixture_free(&f);
    }
    LAYER(c->keep_ratio = 0.01, AKV_E_INFEASIBLE, "ratio");
    LAYER(c->keep_ratio = 1e-300, AKV_E_INFEASIBLE, "ratio");
    LAYER(c->budget_bytes = 1000, AKV_E_INFEASIBLE, "ratio|1000");
    LAYER(c->struct_size = 0, AKV_E_INVALID_ARGUMENT, "akv_config_init");
    LAYER(c->profile = (akv_profile)0, AKV_E_UNSUPPORTED, "profile");
    LAYER(c->profile = (akv_profile)77, AKV_E_UNSUPPORTED, "profile");
    akv_experiment e;
#define EXPERIMENT(edit, word)                                                                                         \
    do {                                                                                                               \
        experiment_init(&e);                                                                                       \
        edit;                                                                                                          \
        LAYER(c->experiment = &e, AKV_E_INVALID_ARGUMENT, word);                                                       \
    } while (0)
    EXPERIMENT(e.struct_size = 0, "akv_experiment");
    EXPERIMENT(e.rho = -0.1, "rho");
    EXPERIMENT(e.rho = 1.1, "rho");
    EXPERIMENT(e.rho = NAN, "rho");
    EXPERIMENT(e.pool_width = 0, "pool_width");
    EXPERIMENT(e.pool_width = 4, "pool_width");
    EXPERIMENT(e.tokens_per_anchor = 0, "tokens_per_anchor");
    EXPERIMENT(e.rank = (akv_rank)9, "akv_experiment");
    EXPERIMENT(e.scale_rule = (akv_scale_rule)9, "akv_experiment");
    EXPERIMENT(e.code_rule = (akv_code_rule)9, "akv_experiment");
    EXPERIMENT(e.anchor_space = (akv_anchor_space)9, "akv_experiment");
    if (profile != AKV_PROFILE_DEFAULT)
        return;
    EXPERIMENT(e.num_levels = 0, "levels");
    EXPERIMENT(e.num_levels = 16, "levels");
    EXPERIMENT(e.level_bits[3] = e.level_bits[2], "rising");
    EXPERIMENT(e.level_bits[0] = 0, "rising");
    EXPERIMENT(e.incoherent = NAN, "incoherent");
    EXPERIMENT(e.incoherent = 1.5, "incoherent");
    EXPERIMENT(e.query_mix = -0.5, "query_mix");
    EXPERIMENT(e.floor = INFINITY, "floor");
    EXPERIMENT(e.value_boost = 0, "value_boost");
    EXPERIMENT(e.slow_angle = NAN, "slow_angle");
    EXPERIMENT(e.pool_tokens = 1025, "pool_tokens");
    EXPERIMENT(e.basis_cols = 1025, "basis_cols");
    experiment_init(&e);
    e.anchor_space = AKV_ANCHOR_POST_ROPE;
    LAYER(c->experiment = &e, AKV_E_UNSUPPORTED, "AKV_PROFILE_PAPER");
}

static void nulls(void)
{
    fixture f;
    make(&base, &f);
    akv_segment *out = untouched;
    akv_diag diag = {0};
    CHECK_STATUS(akv_compress(NULL, &f.config, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_compress(&f.layer, NULL, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_compress(&f.layer, &f.config, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_create_dense(NULL, NULL, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(out == untouched);
    akv_plan_info info;
    akv_plan_info_init(&info);
    CHECK_STATUS(akv_plan(NULL, &f.config, &info, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_plan(&f.layer.shape, NULL, &info, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_plan(&f.layer.shape, &f.config, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    info.struct_size = 0;
    CHECK_STATUS(akv_plan(&f.layer.shape, &f.config, &info, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    akv_segment_info si;
    akv_segment_info_init(&si);
    CHECK_STATUS(akv_segment_get_info(NULL, &si, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    size_t bytes = 1;
    CHECK(akv_segment_data(NULL, &bytes) == NULL && bytes == 0);
    CHECK(akv_segment_retain(NULL) == NULL);
    akv_segment_release(NULL);
    akv_threads_destroy(NULL);
    akv_threads *pool = NULL;
    CHECK_STATUS(akv_threads_create(0, &pool, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_threads_create(2, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(strlen(akv_status_str((akv_status)12345)) > 0 && strlen(akv_version()) >= 5);
    fixture_free(&f);
}

/* Dense for a reason, and the reason is told. */
static void dense_reasons(void)
{
    struct {
        uint64_t S;
        uint32_t W;
        double keep;
        akv_dense_reason reason;
    } list[] = {{20, 32, 0.1, AKV_DENSE_WITHIN_WINDOW},
                {32, 32, 0.01, AKV_DENSE_WITHIN_WINDOW},
                {1, 32, 0.5, AKV_DENSE_WITHIN_WINDOW},
                {300, 32, 1, AKV_DENSE_REQUESTED},
                /* header and object keep dense above any ratio below 1, so it fits a budget in bytes only */
                {300, 32, 0, AKV_DENSE_FITS}};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        spec s = base;
        s.S = list[i].S;
        s.W = list[i].W;
        s.keep = list[i].keep;
        fixture f;
        make(&s, &f);
        if (s.keep == 0)
            f.config.budget_bytes = ref_dense_bytes(&f.layer.shape, 2);
        if (s.S <= s.W)
            f.layer.queries.data = NULL; /* not needed then */
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
        if (segment != NULL) {
            akv_segment_info info;
            akv_segment_info_init(&info);
            CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
            CHECK_MSG(info.kind == AKV_SEGMENT_DENSE && info.dense_reason == list[i].reason,
                      "case %zu: kind %d reason %d", i, (int)info.kind, (int)info.dense_reason);
            CHECK(info.bytes.total == ref_dense_bytes(&f.layer.shape, 2));
            check_decode("dense for a reason", segment);
        }
        akv_segment_release(segment);
        fixture_free(&f);
    }
}

/* The n-th allocation fails, for every n until none does: no leak, no crash, and the bytes of the success are the
 * usual. */
static void out_of_memory(void)
{
    fixture f;
    make(&base, &f);
    akv_diag diag = {0};
    akv_segment *plain = NULL;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &plain, &diag), AKV_OK, &diag);
    for (int mode = 0; mode < 4; mode++) { /* compress: serial, two threads, least squares; dense */
        akv_threads *pool = NULL;
        akv_experiment e;
        experiment_init(&e);
        if (mode == 1) {
            CHECK_STATUS(akv_threads_create(2, &pool, &diag), AKV_OK, &diag);
            f.config.executor = akv_threads_executor(pool);
        } else
            f.config.executor = NULL;
        e.scale_rule = AKV_SCALE_LEAST_SQUARES;
        f.config.experiment = mode == 2 ? &e : NULL;
        unsigned failures = 0;
        for (uint64_t n = 1; n < 1000; n++) {
            counter c;
            counter_init(&c);
            c.fail_at = n;
            f.config.allocator = &c.hooks;
            akv_segment *out = untouched;
            akv_status status = mode == 3 ? akv_segment_create_dense(&f.layer, &f.config, &out, &diag)
                                          : akv_compress(&f.layer, &f.config, &out, &diag);
            if (status == AKV_OK) {
                size_t a, b;
                const void *x = akv_segment_data(out, &a), *y = akv_segment_data(plain, &b);
                CHECK(mode >= 2 || (a == b && memcmp(x, y, a) == 0));
                akv_segment_release(out);
                CHECK(c.live == 0 && c.bad_free == 0);
                break;
            }
            failures++;
            CHECK_MSG(status == AKV_E_NO_MEMORY, "allocation %llu fails: %s", (unsigned long long)n,
                      akv_status_str(status));
            CHECK_MSG(out == untouched && c.live == 0 && c.bad_free == 0, "allocation %llu fails: %llu leaked",
                      (unsigned long long)n, (unsigned long long)c.live);
        }
        CHECK_MSG(failures > 0 && failures < 999, "mode %d: %u failures before success", mode, failures);
        akv_threads_destroy(pool);
    }
    akv_segment_release(plain);
    fixture_free(&f);
}

/* Legal extremes: all finite out of the decoder and out of attention. */
static void check_finite(fixture *f, const char *name)
{
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    akv_status status = akv_compress(&f->layer, &f->config, &segment, &diag);
    CHECK_MSG(status == AKV_OK, "%s: %s", name, diag.message);
    if (segment == NULL)
        return;
    size_t blob_bytes;
    const void *blob = akv_segment_data(segment, &blob_bytes);
    akv_segment *opened = NULL;
    status = akv_segment_open(blob, blob_bytes, 1, NULL, &opened, &diag);
    CHECK_MSG(status == AKV_OK, "%s: what the library wrote does not open: %s", name, diag.message);
    akv_segment_release(opened);
    const akv_shape *s = &f->layer.shape;
    float *k = must(malloc(s->num_tokens * s->head_dim_k * sizeof *k)),
          *v = must(malloc(s->num_tokens * s->head_dim_v * sizeof *v));
    for (uint32_t h = 0; h < s->num_kv_heads; h++) {
        CHECK_STATUS(akv_segment_decode(segment, h, 0, s->num_tokens, k, v, &diag), AKV_OK, &diag);
        int finite = 1;
        for (uint64_t i = 0; i < s->num_tokens * s->head_dim_k; i++)
            finite &= isfinite(k[i]) != 0;
        for (uint64_t i = 0; i < s->num_tokens * s->head_dim_v; i++)
            finite &= isfinite(v[i]) != 0;
        CHECK_MSG(finite, "%s: head %u decodes to something that is not finite", name, h);
    }
    check_decode(name, segment);
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = s->gqa_group;
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = s->num_queries;
    p.queries = f->layer.queries;
    p.segments = (const akv_segment *const *)&segment;
    p.num_segments = 1;
    p.sm_scale = f->layer.sm_scale;
    uint64_t n = (uint64_t)s->num_kv_heads * s->gqa_group * s->num_queries * s->head_dim_v;
    p.out = must(malloc(n * sizeof *p.out));
    p.out_stride_token = s->head_dim_v;
    p.out_stride_head = (int64_t)s->num_queries * s->head_dim_v;
    size_t bytes = 0;
    CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
    void *ws = must(aligned_alloc(64, (bytes + 63) / 64 * 64));
    CHECK_STATUS(akv_attend(&p, ws, bytes, &diag), AKV_OK, &diag);
    int finite = 1;
    for (uint64_t i = 0; i < n; i++)
        finite &= isfinite(p.out[i]) != 0;
    CHECK_MSG(finite, "%s: attention gives something that is not finite", name);
    free(ws);
    free(p.out);
    free(k);
    free(v);
    akv_segment_release(segment);
}

enum content {
    ZERO_KEYS,
    ZERO_VALUES,
    ZERO_ALL,
    CONSTANT,
    LARGEST_F16,
    ALTERNATING_LARGEST,
    DENORMAL_F16,
    DENORMAL_F32,
    TINY_ANCHORS,
    ZERO_WINDOW,
    ONE_HOT,
    LARGE_F32,
    LARGER_F32,
    HUGE_F32,
    ONE_HEAD_ZERO,
    LOW_RANK,
    CONSTANT_KEYS,
    CONSTANT_VALUES,
    CONTENTS
};

static void extremes(void)
{
    const char *names[] = {
        "zero keys",    "zero values",  "all zero",     "constant",    "largest f16", "alternating largest f16",
        "denormal f16", "denormal f32", "tiny anchors", "zero window", "one hot",     "large f32",
        "larger f32",   "huge f32",
        "one head zero", "rank two",    "constant keys", "constant values"};
    for (int kind = 0; kind < CONTENTS; kind++)
        for (int rotary = 0; rotary <= 64; rotary += 64) {
            spec s = base;
            s.rotary = (uint32_t)rotary;
            s.dtype = kind == DENORMAL_F32 || (kind >= TINY_ANCHORS && kind <= HUGE_F32 && kind != ZERO_WINDOW && kind != ONE_HOT) ? AKV_F32 : AKV_F16;
            fixture f;
            make(&s, &f);
            if (kind == LARGEST_F16 || kind == ALTERNATING_LARGEST || (kind >= LARGE_F32 && kind <= HUGE_F32))
                f.layer.sm_scale = 1e-9; /* keep the softmax from collapsing to one token */
            for (uint64_t h = 0; h < 2; h++)
                for (uint64_t p = 0; p < 300; p++)
                    for (uint64_t i = 0; i < 64; i++)
                        for (int side = 0; side < 2; side++) {
                            const akv_tensor *t = side == 0 ? &f.layer.keys : &f.layer.values;
                            if (side == 1 && i >= 48)
                                continue;
                            double x = akv_tensor_at(t, (int64_t)h, (int64_t)p, (int64_t)i);
                            switch (kind) {
                            case ZERO_KEYS: x = side == 0 ? 0 : x; break;
                            case ZERO_VALUES: x = side == 1 ? 0 : x; break;
                            case ZERO_ALL: x = 0; break;
                            case CONSTANT: x = 0.75; break;
                            case LARGEST_F16: x = x < 0 ? -65504 : 65504; break;
                            case ALTERNATING_LARGEST: x = (i + p) % 2 ? -65504 : 65504; break;
                            case DENORMAL_F16: x *= 0x1p-23; break;
                            case DENORMAL_F32: x *= 0x1p-140; break;
                            case TINY_ANCHORS:
                                x *= p >= 268 || p % 3 == 0 ? 1e-8 : 1e4;
                                break;                                     /* coefficients beyond 65504 */
                            case ZERO_WINDOW: x = p >= 268 ? 0 : x; break; /* anchors without direction */
                            case ONE_HOT: x = i == p % 48 ? 1 : 0; break;
                            case LARGER_F32: x *= 1e12; break;
                            case HUGE_F32: x *= 1e21; break; /* squares beyond fp32 */
                            case ONE_HEAD_ZERO: x = h == 0 ? 0 : x; break;
                            case LOW_RANK: /* every vector in one plane */
                                x = (double)(p % 17) * (i % 3 == 0) - (double)(p % 5) * (i % 3 == 1);
                                break;
                            case CONSTANT_KEYS: x = side == 0 ? 0.75 : x; break;
                            case CONSTANT_VALUES: x = side == 1 ? -3 : x; break;
                            default: x *= 1e6; break;
                            }
                            tensor_set(t, h, p, i, x);
                        }
            char name[64];
            snprintf(name, sizeof name, "%s, rotary %d", names[kind], rotary);
            check_finite(&f, name);
            /* the choices too; utilities of such sizes under- or overflow fp32, so ranks are not compared there */
            if (profile == AKV_PROFILE_PAPER && (kind == ZERO_WINDOW || kind == ONE_HOT || kind == CONSTANT || kind == ZERO_KEYS ||
                kind == ZERO_VALUES || kind == ZERO_ALL)) {
                akv_segment *segment = NULL;
                akv_diag diag = {0};
                check_stats stats = {0};
                CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
                if (segment != NULL)
                    check_compressed(name, &f.layer, &f.config, segment, &stats);
                akv_segment_release(segment);
            }
            fixture_free(&f);
        }
}

/* Short prompts: dense and said so, or compressed with what fits; every length around the window and the first anchors. */
static void short_prompts(void)
{
    for (uint64_t S = 1; S <= 80; S++)
        for (int i = 0; i < 4; i++) {
            spec s = base;
            s.S = S;
            s.keep = i == 0 ? 0.1 : i == 1 ? 0.5 : i == 2 ? 0.9 : 1;
            s.dk = i % 2 ? 16 : 64;
            s.rotary = s.dk;
            fixture f;
            make(&s, &f);
            akv_plan_info info;
            akv_plan_info_init(&info);
            akv_diag diag = {0};
            akv_status planned = akv_plan(&f.layer.shape, &f.config, &info, &diag);
            akv_segment *segment = NULL;
            CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), planned, &diag);
            CHECK(planned == AKV_OK || planned == AKV_E_INFEASIBLE);
            if (planned == AKV_E_INFEASIBLE) { /* the smallest that works, works */
                CHECK(S > 32);
                f.config.budget_bytes = info.min_bytes;
                akv_plan_info_init(&info);
                CHECK_STATUS(akv_plan(&f.layer.shape, &f.config, &info, &diag), AKV_OK, &diag);
                CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
            }
            if (segment != NULL) {
                akv_segment_info got;
                akv_segment_info_init(&got);
                CHECK_STATUS(akv_segment_get_info(segment, &got, &diag), AKV_OK, &diag);
                CHECK(got.kind == info.kind && got.dense_reason == info.dense_reason);
                CHECK(got.bytes.total == info.bytes.total);
                CHECK_MSG(S > 32 || (got.kind == AKV_SEGMENT_DENSE && got.dense_reason == AKV_DENSE_WITHIN_WINDOW),
                          "%llu tokens within the window are not dense", (unsigned long long)S);
            }
            akv_segment_release(segment);
            check_finite(&f, "short prompt");
            fixture_free(&f);
        }
}

/* Further queries of the prompt: judged like the window's, and harmless when they are zero or far away. */
static void sampled_queries(void)
{
    enum { M = 3 };
    const int32_t far[M] = {-2000000000, 0, 2000000000}, near[M] = {0, 17, 299};
    for (int kind = 0; kind < 7; kind++) {
        fixture f;
        make(&base, &f);
        void *memory;
        f.layer.sampled = tensor_make(4, M, 64, AKV_F16, LAY_TOKEN_MAJOR, &memory);
        f.layer.num_sampled = M;
        f.layer.sampled_positions = kind == 1 ? far : near;
        akv_rng rng = {5};
        for (uint64_t h = 0; h < 4 && kind != 2; h++)
            for (uint64_t m = 0; m < M; m++)
                for (uint64_t i = 0; i < 64; i++)
                    tensor_set(&f.layer.sampled, h, m, i, random_gauss(&rng));
        if (kind == 3)
            tensor_set(&f.layer.sampled, 3, 2, 63, NAN);
        if (kind == 4)
            f.layer.sampled_positions = NULL;
        if (kind == 5)
            f.layer.sampled.dtype = (akv_dtype)5;
        if (kind == 6) /* refused before any of them is read */
            f.layer.num_sampled = UINT32_MAX;
        if (kind < 3)
            check_finite(&f, "sampled queries");
        else
            expect(&f, &f.config, kind == 3 ? AKV_E_NON_FINITE : AKV_E_INVALID_ARGUMENT,
                   kind == 3   ? "sampled|head 3|63"
                   : kind == 4 ? "sampled_positions"
                   : kind == 5 ? "dtype"
                               : "num_sampled|4294967295",
                   kind == 3   ? "NaN in a sampled query"
                   : kind == 4 ? "no positions"
                   : kind == 5 ? "dtype of sampled queries"
                               : "too many sampled queries");
        free(memory);
        fixture_free(&f);
    }
}

/* References: the last release frees, through the allocator that made it. */
static void references(void)
{
    fixture f;
    make(&base, &f);
    counter c;
    counter_init(&c);
    f.config.allocator = &c.hooks;
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    CHECK(c.live == 1);
    CHECK(akv_segment_retain(segment) == segment);
    akv_segment_release(segment);
    CHECK(c.live == 1);
    akv_segment_release(segment);
    CHECK(c.live == 0 && c.bad_free == 0);
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    for (int i = 0; i < 2; i++) {
        profile = i == 0 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
        printf("profile %s\n", i == 0 ? "paper" : "default");
        TEST(non_finite);
        TEST(layers);
        TEST(configs);
        TEST(dense_reasons);
        TEST(out_of_memory);
        TEST(extremes);
        TEST(short_prompts);
        TEST(references);
    }
    TEST(nulls);
    TEST(sampled_queries);
    return TEST_DONE();
}
