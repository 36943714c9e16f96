/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cache.c - akv_cache: attention over it is akv_attend over its parts (which the reference checks), whatever was appended,
 * compressed, forked, cut, put together or made smaller before; forks are independent; what fails changes nothing.
 */
#include "akv_test.h"
#include "anchorkv/akv_cache.h"
#include "cases.h"

#include <pthread.h>

enum { LAYERS = 2, H = 2, G = 2, D = 32, W = 8, QH = H * G };

static double inv_freq[D / 2];
static akv_dtype tail_dtype = AKV_F16;

static akv_cache_config config_of(akv_cache_layer layers[LAYERS], const akv_allocator *allocator)
{
    akv_cache_config c;
    akv_cache_config_init(&c);
    for (uint32_t j = 0; j < D / 2; j++)
        inv_freq[j] = pow(1e4, -2.0 * j / D);
    for (int i = 0; i < LAYERS; i++) {
        memset(&layers[i], 0, sizeof layers[i]);
        layers[i] = (akv_cache_layer){H, G, D, D, {D, AKV_ROPE_HALF_SPLIT, 1.0, inv_freq}, 1 / sqrt((double)D), 0};
    }
    c.num_layers = LAYERS;
    c.layers = layers;
    c.num_queries = W;
    c.tail_dtype = tail_dtype;
    c.codec.keep_ratio = 0.25;
    c.codec.allocator = allocator;
    return c;
}

static akv_cache *cache_new(const akv_allocator *allocator)
{
    akv_cache_layer layers[LAYERS];
    akv_cache_config config = config_of(layers, allocator);
    akv_cache *cache = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_OK, &diag);
    return must(cache);
}

/* n tokens of noise that only depends on (seed, layer, position); queries too. Without checks: threads call it. */
static bool grow_quietly(akv_cache *cache, uint64_t n, uint64_t seed)
{
    bool ok = true;
    akv_cache_stats stats;
    akv_cache_stats_init(&stats);
    akv_cache_get_stats(cache, &stats, NULL);
    float *x = must(malloc((2 * H + QH) * n * D * sizeof *x));
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint64_t t = 0; t < n; t++) {
            akv_rng rng = akv_rng_stream(seed, l, stats.num_tokens + t);
            for (uint32_t h = 0; h < 2 * H + QH; h++)
                for (uint32_t i = 0; i < D; i++)
                    x[(h * n + t) * D + i] = (float)random_gauss(&rng) + (h < H && i % 5 == 0 ? 2.0f : 0.0f);
        }
        akv_tensor k = akv_tensor_contiguous(x, AKV_F32, n, D), v = akv_tensor_contiguous(x + H * n * D, AKV_F32, n, D);
        akv_tensor q = akv_tensor_contiguous(x + 2 * H * n * D, AKV_F32, n, D);
        ok = ok && akv_cache_append(cache, l, n, &k, &v, NULL) == AKV_OK &&
             akv_cache_observe(cache, l, n, &q, NULL) == AKV_OK;
    }
    free(x);
    return ok;
}

static void grow(akv_cache *cache, uint64_t n, uint64_t seed)
{
    CHECK(grow_quietly(cache, n, seed));
}

/* One query row per head through the cache -> out [QH, D]. */
static akv_status attend(const akv_cache *cache, uint32_t layer, uint64_t seed, float *out)
{
    float q[QH * D];
    akv_diag diag = {0};
    akv_rng rng = akv_rng_stream(seed, 99, layer);
    for (int i = 0; i < QH * D; i++)
        q[i] = (float)random_gauss(&rng);
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.queries = akv_tensor_contiguous(q, AKV_F32, 1, D);
    p.out = out;
    p.out_stride_head = p.out_stride_token = D;
    size_t bytes = 0;
    akv_status status = akv_cache_workspace_bytes(cache, layer, 1, &bytes, &diag);
    if (status != AKV_OK)
        return status;
    void *ws = must(aligned_alloc(64, bytes + 64));
    status = akv_cache_attend(cache, layer, &p, ws, bytes, &diag);
    free(ws);
    return status;
}

/* A fingerprint of what a cache answers. */
static bool answers_quietly(const akv_cache *cache, float out[LAYERS * QH * D])
{
    bool ok = true;
    for (uint32_t l = 0; l < LAYERS; l++)
        ok = attend(cache, l, 5, out + l * QH * D) == AKV_OK && ok;
    return ok;
}

static void answers(const akv_cache *cache, float out[LAYERS * QH * D])
{
    CHECK(answers_quietly(cache, out));
}

static bool same(const float *a, const float *b)
{
    return memcmp(a, b, LAYERS * QH * D * sizeof *a) == 0;
}

static akv_cache_stats stats_of(const akv_cache *cache)
{
    akv_cache_stats s;
    akv_cache_stats_init(&s);
    CHECK(akv_cache_get_stats(cache, &s, NULL) == AKV_OK);
    return s;
}

/* The segments of a layer decoded one after the other, where they stand now: keys [H][n][D], values. */
static uint64_t decode_all(const akv_cache *cache, uint32_t layer, float *keys, float *values, uint64_t room)
{
    akv_segment *const *segments;
    const int64_t *shifts;
    uint32_t n;
    uint64_t at = 0;
    akv_cache_get_segments(cache, layer, &segments, &shifts, &n, NULL);
    for (uint32_t s = 0; s < n; s++) {
        akv_segment_info info;
        akv_segment_info_init(&info);
        akv_segment_get_info(segments[s], &info, NULL);
        for (uint32_t h = 0; h < H; h++)
            akv_segment_decode(segments[s], h, 0, info.shape.num_tokens, keys + (h * room + at) * D,
                               values + (h * room + at) * D, NULL);
        at += info.shape.num_tokens;
    }
    return at;
}

static void rolling(void)
{
    akv_cache *cache = cache_new(NULL);
    akv_diag diag = {0};
    float out[QH * D];
    for (int turn = 0; turn < 6; turn++) {
        grow(cache, 300, 1);
        CHECK_STATUS(akv_cache_compress_tail(cache, 50, &diag), AKV_OK, &diag);
        akv_cache_stats s = stats_of(cache);
        CHECK(s.num_tokens == 300u * (turn + 1) && s.tail_tokens == 50 &&
              s.num_segments == (uint32_t)LAYERS * (turn + 1));
        const double dense = (double)(s.num_tokens - 50) * LAYERS * H * D * 4;
        CHECK_MSG((double)s.segments.total <= 0.25 * dense, "%llu bytes for a quarter of %g",
                  (unsigned long long)s.segments.total, dense);
        CHECK(s.dense_bytes == s.num_tokens * LAYERS * H * D * 4 && s.shared_bytes == 0);
    }
    /* Against the reference: the parts of the cache as parameters of their own. */
    for (uint32_t l = 0; l < LAYERS; l++) {
        akv_segment *const *segments;
        const int64_t *shifts;
        uint32_t n;
        akv_cache_get_segments(cache, l, &segments, &shifts, &n, NULL);
        akv_cache *tail = NULL;
        CHECK(akv_cache_fork(cache, &tail, NULL) == AKV_OK);
        CHECK(attend(cache, l, 7, out) == AKV_OK);
        float other[QH * D];
        CHECK(attend(tail, l, 7, other) == AKV_OK);
        CHECK(memcmp(out, other, sizeof out) == 0);
        int32_t position = 0;
        for (uint32_t s = 0; s < n; s++) {
            akv_segment_info info;
            akv_segment_info_init(&info);
            akv_segment_get_info(segments[s], &info, NULL);
            CHECK(info.first_position == position && shifts[s] == 0);
            position = info.last_position + 1;
        }
        CHECK(position == 1750);
        akv_cache_destroy(tail);
    }
    akv_cache_destroy(cache);
}

/* Attention over segments and tail is what the double-precision reference says of the same keys and values. */
static void reference(void)
{
    akv_cache *cache = cache_new(NULL);
    grow(cache, 260, 3);
    CHECK(akv_cache_compress_tail(cache, 60, NULL) == AKV_OK);
    akv_cache *tail_only = cache_new(NULL), *doc = cache_new(NULL);
    grow(doc, 200, 8);
    CHECK(akv_cache_compress_tail(doc, 0, NULL) == AKV_OK);
    akv_segment *const *one, *both[LAYERS];
    const int64_t *shifts;
    uint32_t n;
    for (uint32_t l = 0; l < LAYERS; l++) {
        akv_cache_get_segments(doc, l, &one, &shifts, &n, NULL);
        both[l] = one[0];
    }
    CHECK(akv_cache_append_segments(cache, both, NULL) ==
          AKV_OK); /* behind 260 tokens, the tail becomes a dense segment */
    grow(cache, 5, 3);
    for (uint32_t l = 0; l < LAYERS; l++) {
        akv_cache_get_segments(cache, l, &one, &shifts, &n, NULL);
        CHECK(n == 3 && shifts[0] == 0 && shifts[1] == 0 && shifts[2] == 260);
        float q[QH * D], out[QH * D], x[2 * H * 5 * D];
        double want[QH * D];
        ref_row_result row[QH];
        akv_rng rng = akv_rng_stream(5, 99, l);
        for (int i = 0; i < QH * D; i++)
            q[i] = (float)random_gauss(&rng);
        for (uint64_t t = 0; t < 5; t++) { /* the tail as it was appended, through its dtype */
            akv_rng r = akv_rng_stream(3, l, 460 + t);
            for (uint32_t h = 0; h < 2 * H; h++)
                for (uint32_t i = 0; i < D; i++) {
                    const float y = (float)random_gauss(&r) + (h < H && i % 5 == 0 ? 2.0f : 0.0f);
                    x[(h * 5 + t) * D + i] = tail_dtype == AKV_F32 ? y : akv_f16_to_f32(akv_f32_to_f16(y));
                }
        }
        akv_attend_params p;
        akv_attend_params_init(&p);
        akv_rope rope = {D, AKV_ROPE_HALF_SPLIT, 1.0, inv_freq};
        p.num_kv_heads = H;
        p.gqa_group = G;
        p.head_dim_k = p.head_dim_v = D;
        p.queries = akv_tensor_contiguous(q, AKV_F32, 1, D);
        p.segments = (const akv_segment *const *)one;
        p.num_segments = n;
        p.segment_shifts = shifts;
        p.rope = &rope;
        p.tail_tokens = 5;
        p.tail_keys = akv_tensor_contiguous(x, AKV_F32, 5, D);
        p.tail_values = akv_tensor_contiguous(x + H * 5 * D, AKV_F32, 5, D);
        p.sm_scale = 1 / sqrt((double)D);
        CHECK(attend(cache, l, 5, out) == AKV_OK);
        must(ref_attend(&p, want, row) ? want : NULL);
        for (int r = 0; r < QH; r++)
            for (int i = 0; i < D; i++)
                CHECK_NEAR(out[r * D + i], want[r * D + i], row[r].tol_out, "layer %u row %d", l, r);
    }
    akv_cache_destroy(cache);
    akv_cache_destroy(doc);
    akv_cache_destroy(tail_only);
}

static void reference_f32_tail(void)
{
    tail_dtype = AKV_F32;
    reference();
    tail_dtype = AKV_F16;
}

static void forks(void)
{
    akv_cache *a = cache_new(NULL), *b = NULL, *c = NULL;
    float before[LAYERS * QH * D], x[LAYERS * QH * D], y[LAYERS * QH * D];
    grow(a, 400, 1);
    CHECK(akv_cache_compress_tail(a, 100, NULL) == AKV_OK);
    answers(a, before);
    CHECK(akv_cache_fork(a, &b, NULL) == AKV_OK && akv_cache_fork(b, &c, NULL) == AKV_OK);
    CHECK(stats_of(a).shared_bytes == stats_of(a).segments.total);
    grow(b, 30, 2); /* the shared tail is copied, not written */
    grow(c, 30, 3);
    answers(a, x);
    CHECK_MSG(same(before, x), "a fork's tokens reached the cache it came from");
    answers(b, x);
    answers(c, y);
    CHECK(!same(before, x) && !same(x, y));
    CHECK(akv_cache_truncate(b, 400, NULL) == AKV_OK);
    answers(b, x);
    CHECK_MSG(same(before, x), "truncating does not lead back");
    CHECK(akv_cache_truncate(c, 37, NULL) == AKV_OK); /* inside the shared segment */
    CHECK(akv_cache_retarget(b, stats_of(b).segments.total * 4 / 5 + stats_of(b).tail_bytes, NULL) == AKV_OK);
    answers(a, x);
    CHECK_MSG(same(before, x), "cutting or shrinking a fork changed the cache it came from");
    akv_cache_destroy(a);
    answers(c, y); /* parts live as long as somebody needs them */
    akv_cache_destroy(b);
    akv_cache_destroy(c);
}

static void truncation(void)
{
    const uint64_t room = 700;
    float *k = must(malloc(H * room * D * 4)), *v = must(malloc(H * room * D * 4)),
          *k2 = must(malloc(H * room * D * 4)), *v2 = must(malloc(H * room * D * 4));
    akv_cache *cache = cache_new(NULL);
    akv_diag diag = {0};
    grow(cache, 330, 1);
    CHECK(akv_cache_compress_tail(cache, 30, NULL) == AKV_OK);
    grow(cache, 300, 1);
    CHECK(akv_cache_compress_tail(cache, 30, NULL) == AKV_OK);
    CHECK(decode_all(cache, 1, k, v, room) == 600);
    for (uint64_t n = 1; n <= 630; n += n < 20 || n > 590 ? 1 : 23) {
        akv_cache *fork = NULL;
        CHECK(akv_cache_fork(cache, &fork, NULL) == AKV_OK);
        CHECK_STATUS(akv_cache_truncate(fork, n, &diag), AKV_OK, &diag);
        CHECK(stats_of(fork).num_tokens == n);
        const uint64_t left = decode_all(fork, 1, k2, v2, room);
        CHECK(left == (n < 600 ? n : 600));
        for (uint32_t h = 0; h < H; h++)
            CHECK_MSG(memcmp(k + h * room * D, k2 + h * room * D, left * D * 4) == 0 &&
                          memcmp(v + h * room * D, v2 + h * room * D, left * D * 4) == 0,
                      "%llu tokens decode differently after the cut", (unsigned long long)n);
        if (n == 615) { /* queries of later tokens are forgotten, so it cannot compress before it has seen new ones */
            grow(fork, W - 1, 1);
            CHECK_STATUS(akv_cache_compress_tail(fork, 0, &diag), AKV_E_BAD_STATE, &diag);
            grow(fork, 200, 1);
            CHECK_STATUS(akv_cache_compress_tail(fork, 0, &diag), AKV_OK, &diag);
        }
        akv_cache_destroy(fork);
    }
    akv_cache *empty = NULL;
    CHECK(akv_cache_fork(cache, &empty, NULL) == AKV_OK && akv_cache_truncate(empty, 0, NULL) == AKV_OK);
    CHECK(stats_of(empty).num_tokens == 0 && stats_of(empty).num_segments == 0);
    CHECK_STATUS(akv_cache_truncate(cache, 631, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    akv_cache_destroy(empty);
    akv_cache_destroy(cache);
    free(k);
    free(v);
    free(k2);
    free(v2);
}

static void budget(void)
{
    akv_cache *cache = cache_new(NULL);
    akv_diag diag = {0};
    float before[LAYERS * QH * D], x[LAYERS * QH * D];
    grow(cache, 1500, 1);
    CHECK(akv_cache_compress_tail(cache, 100, NULL) == AKV_OK);
    akv_cache_stats s = stats_of(cache);
    const uint64_t total = s.segments.total + s.tail_bytes;
    answers(cache, before);
    CHECK_STATUS(akv_cache_retarget(cache, total, &diag), AKV_OK, &diag);
    CHECK(stats_of(cache).segments.total == s.segments.total);
    CHECK_STATUS(akv_cache_retarget(cache, s.tail_bytes + 1000, &diag), AKV_E_INFEASIBLE, &diag);
    answers(cache, x);
    CHECK_MSG(same(before, x), "an infeasible budget changed something");
    const uint64_t want = s.tail_bytes + s.segments.total * 7 / 10;
    CHECK_STATUS(akv_cache_retarget(cache, want, &diag), AKV_OK, &diag);
    s = stats_of(cache);
    CHECK(s.segments.total + s.tail_bytes <= want && s.num_tokens == 1500);
    akv_cache_destroy(cache);
}

/* Bytes of a segment made as large as `like`: with the W queries of tokens [first, first + W) of grow(1), or without. */
static void check_retargeted(akv_segment *from, const akv_segment *like, uint32_t layer, int64_t first, const char *what)
{
    float *q = must(malloc(QH * W * D * sizeof *q));
    for (uint64_t t = 0; t < W && first >= 0; t++) {
        akv_rng rng = akv_rng_stream(1, layer, (uint64_t)first + t);
        for (uint32_t h = 0; h < 2 * H + QH; h++)
            for (uint32_t i = 0; i < D; i++) {
                const float x = (float)random_gauss(&rng);
                if (h >= 2 * H)
                    q[((h - 2 * H) * W + t) * D + i] = x;
            }
    }
    const akv_tensor queries = akv_tensor_contiguous(q, AKV_F32, W, D);
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment *want = NULL;
    akv_diag diag = {0};
    CHECK(akv_segment_get_info(like, &info, NULL) == AKV_OK);
    CHECK_STATUS(first >= 0 ? akv_segment_retarget_observed(from, info.bytes.total, &queries, W, NULL, &want, NULL, &diag)
                            : akv_segment_retarget(from, info.bytes.total, NULL, &want, NULL, &diag),
                 AKV_OK, &diag);
    size_t a, b;
    const void *x = akv_segment_data(want, &a), *y = akv_segment_data(like, &b);
    CHECK_MSG(want != from && a == b && memcmp(x, y, a) == 0, "%s, layer %u: another segment", what, layer);
    akv_segment_release(want);
    free(q);
}

/* Smaller by the kept queries; by what levels say where there are none, or the segment stands elsewhere. */
static void budget_and_queries(void)
{
    for (int kind = 0; kind < 4; kind++) { /* queries, none since a cut, another position, queries of its own tokens */
        akv_cache *cache = cache_new(NULL), *before = NULL;
        akv_segment *const *now, *const *old;
        const int64_t *shifts;
        akv_diag diag = {0};
        uint32_t n;
        grow(cache, 700, 1);
        CHECK(akv_cache_compress_tail(cache, kind == 3 ? W - 1 : 100, NULL) == AKV_OK);
        if (kind == 1)
            CHECK(akv_cache_truncate(cache, 690, NULL) == AKV_OK);
        if (kind == 2) {
            akv_cache *moved = cache_new(NULL);
            grow(moved, 90, 2);
            CHECK(akv_cache_compress_tail(moved, 0, NULL) == AKV_OK);
            akv_segment *segments[LAYERS];
            for (uint32_t l = 0; l < LAYERS; l++) {
                akv_cache_get_segments(cache, l, &old, &shifts, &n, NULL);
                segments[l] = old[0];
            }
            CHECK_STATUS(akv_cache_append_segments(moved, segments, &diag), AKV_OK, &diag);
            akv_cache_destroy(cache);
            cache = moved;
            grow(cache, W, 1);
        }
        CHECK(akv_cache_fork(cache, &before, NULL) == AKV_OK);
        const akv_cache_stats s = stats_of(cache);
        CHECK_STATUS(akv_cache_retarget(cache, s.tail_bytes + s.segments.total * 4 / 5, &diag), AKV_OK, &diag);
        CHECK(stats_of(cache).segments.total <= s.segments.total * 4 / 5);
        for (uint32_t l = 0; l < LAYERS; l++) {
            akv_cache_get_segments(before, l, &old, &shifts, &n, NULL);
            akv_cache_get_segments(cache, l, &now, &shifts, &n, NULL);
            static const char *const what[] = {"queries", "no queries", "moved", "its own queries"};
            check_retargeted(old[n - 1], now[n - 1], l, kind == 0 ? 700 - W : -1, what[kind]);
        }
        akv_cache_destroy(before);
        akv_cache_destroy(cache);
    }
}

static void refusals(void)
{
    akv_cache_layer layers[LAYERS];
    akv_cache_config config = config_of(layers, NULL);
    akv_cache *cache = NULL;
    akv_diag diag = {0};
    config.num_layers = 0;
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    config = config_of(layers, NULL);
    layers[1].head_dim_k = 3;
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    config = config_of(layers, NULL);
    config.codec.budget_bytes = 5;
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    config = config_of(layers, NULL);
    config.tail_dtype = (akv_dtype)7;
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    config = config_of(layers, NULL);
    layers[1].rope.inv_freq = NULL;
    CHECK_STATUS(akv_cache_create(&config, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(strstr(diag.message, "layer 1") != NULL);
    config = config_of(layers, NULL);
    CHECK_STATUS(akv_cache_create(&config, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_create(NULL, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_fork(NULL, &cache, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_get_stats(NULL, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_truncate(NULL, 0, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(cache == NULL);
    cache = cache_new(NULL);
    float x[H * 50 * D] = {0};
    akv_tensor t = akv_tensor_contiguous(x, AKV_F32, 50, D), none = {0};
    CHECK_STATUS(akv_cache_append(NULL, 0, 1, &t, &t, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_observe(cache, 0, 1, &none, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_append(cache, 0, UINT64_C(1) << 31, &t, &t, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_append_segments(cache, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_get_segments(cache, 0, NULL, NULL, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_attend(cache, 0, NULL, NULL, 0, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_append(cache, LAYERS, 1, &t, &t, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_append(cache, 0, 1, &none, &t, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cache_append(cache, 0, 50, &t, &t, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_cache_compress_tail(cache, 0, &diag), AKV_E_BAD_STATE, &diag); /* layer 1 has nothing yet */
    CHECK_STATUS(akv_cache_truncate(cache, 0, &diag), AKV_E_BAD_STATE, &diag);
    CHECK_STATUS(akv_cache_append(cache, 1, 50, &t, &t, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_cache_compress_tail(cache, 0, &diag), AKV_E_BAD_STATE, &diag); /* no queries */
    akv_segment *wrong[LAYERS] = {NULL};
    CHECK_STATUS(akv_cache_append_segments(cache, wrong, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    spec s = {.name = "other", .S = 40, .H = 1, .G = 1, .dk = 16, .dv = 16, .W = 8, .rotary = 16, .seed = 1};
    wrong[0] = wrong[1] = random_ladder_segment(&s, 8, 0.5, 1);
    CHECK_STATUS(akv_cache_append_segments(cache, wrong, &diag), AKV_E_MISMATCH, &diag);
    akv_segment_release(wrong[0]);
    /* segments of different lengths; with gaps, which a cache does not have */
    s = (spec){.name = "lengths", .S = 40, .H = H, .G = G, .dk = D, .dv = D, .W = 8, .rotary = D, .seed = 1};
    wrong[0] = random_ladder_segment(&s, 8, 0.5, 1);
    s.S = 41;
    wrong[1] = random_ladder_segment(&s, 8, 0.5, 1);
    CHECK_STATUS(akv_cache_append_segments(cache, wrong, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(strstr(diag.message, "41 tokens") != NULL);
    akv_segment_release(wrong[1]);
    s.gaps = 1;
    wrong[1] = random_ladder_segment(&s, 8, 0.5, 1);
    CHECK_STATUS(akv_cache_append_segments(cache, wrong, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK(strstr(diag.message, "every position") != NULL);
    akv_segment_release(wrong[0]);
    akv_segment_release(wrong[1]);
    CHECK(stats_of(cache).num_tokens == 50);
    akv_cache_destroy(cache);
    akv_cache_destroy(NULL);
}

/* Every allocation failing in turn: an error, the cache answers as before, and at the end nothing is left. */
static void no_memory(void)
{
    for (int what = 0; what < 4; what++) {
        counter c;
        counter_init(&c);
        akv_cache *cache = cache_new(&c.hooks);
        float before[LAYERS * QH * D], after[LAYERS * QH * D];
        grow(cache, 300, 1);
        CHECK(akv_cache_compress_tail(cache, 100, NULL) == AKV_OK);
        answers(cache, before);
        int failed = 0;
        for (uint64_t fail = 1; fail < 200; fail++) {
            akv_diag diag = {0};
            akv_cache *fork = NULL;
            akv_segment *segments[LAYERS];
            for (uint32_t l = 0; l < LAYERS; l++) {
                akv_segment *const *list;
                const int64_t *shifts;
                uint32_t n;
                akv_cache_get_segments(cache, l, &list, &shifts, &n, NULL);
                segments[l] = list[0];
            }
            c.fail_at = c.total + fail;
            akv_status status = what == 0   ? akv_cache_fork(cache, &fork, &diag)
                                : what == 1 ? akv_cache_compress_tail(cache, 20, &diag)
                                : what == 2 ? akv_cache_truncate(cache, 50, &diag)
                                            : akv_cache_append_segments(cache, segments, &diag);
            c.fail_at = 0;
            if (status == AKV_OK) {
                akv_cache_destroy(fork);
                break;
            }
            failed++;
            CHECK_STATUS(status, AKV_E_NO_MEMORY, &diag);
            answers(cache, after);
            CHECK_MSG(same(before, after), "operation %d changed the cache although it failed", what);
        }
        CHECK_MSG(failed > 2, "operation %d made only %d allocations that could fail", what, failed);
        akv_cache_destroy(cache);
        CHECK(c.live == 0 && c.bad_free == 0);
    }
}

/* -------------------------------------------------------------------------------------------------------------- threads */

typedef struct worker {
    akv_cache *shared;
    const akv_executor *executor; /* everybody's */
    uint64_t digest[2];           /* of a layer compressed with either profile */
    uint64_t seed;
    float shared_answers[LAYERS * QH * D];
    float own[LAYERS * QH * D];
    bool ok;
} worker;

static void *work(void *opaque)
{
    worker *w = opaque;
    w->ok = true;
    const spec s = {.name = "threads", .S = 300, .H = 2, .G = 2, .dk = 32, .dv = 32, .W = 8, .rotary = 32, .keep = 0.3, .dtype = AKV_F16};
    fixture f;
    fixture_make(&s, &f);
    f.config.executor = w->executor;
    for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++) {
        akv_segment *segment = NULL;
        size_t bytes = 0;
        f.config.profile = (akv_profile)profile;
        w->ok = akv_compress(&f.layer, &f.config, &segment, NULL) == AKV_OK && w->ok;
        const uint8_t *data = akv_segment_data(segment, &bytes);
        uint64_t digest = 0;
        for (size_t i = 0; i < bytes; i++)
            digest = (digest ^ data[i]) * 0x100000001b3u;
        w->digest[profile - AKV_PROFILE_PAPER] = digest;
        akv_segment_release(segment);
    }
    fixture_free(&f);
    for (int i = 0; i < 6; i++) {
        akv_cache *fork = NULL, *second = NULL;
        w->ok = answers_quietly(w->shared, w->shared_answers) && w->ok; /* many readers of one cache */
        if (akv_cache_fork(w->shared, &fork, NULL) != AKV_OK) {
            w->ok = false;
            break;
        }
        w->ok = grow_quietly(fork, 40, w->seed) &&
                akv_cache_fork(fork, &second, NULL) == AKV_OK && /* writers of their own forks */
                akv_cache_compress_tail(fork, 10, NULL) == AKV_OK && akv_cache_truncate(second, 90, NULL) == AKV_OK &&
                answers_quietly(fork, w->own) && w->ok;
        akv_cache_destroy(fork);
        akv_cache_destroy(second);
    }
    return NULL;
}

static void threads(void)
{
    enum { N = 4 };
    akv_threads *pool = NULL; /* one executor for all: whoever comes second does its tasks itself */
    CHECK(akv_threads_create(3, &pool, NULL) == AKV_OK);
    akv_cache_layer layers[LAYERS];
    akv_cache_config config = config_of(layers, NULL);
    config.codec.executor = akv_threads_executor(pool);
    akv_cache *shared = NULL;
    CHECK(akv_cache_create(&config, &shared, NULL) == AKV_OK);
    worker w[N];
    pthread_t id[N];
    grow(shared, 200, 1);
    CHECK(akv_cache_compress_tail(shared, 64, NULL) == AKV_OK);
    for (int i = 0; i < N; i++) {
        w[i].shared = shared;
        w[i].executor = akv_threads_executor(pool);
        w[i].seed = 50 + (uint64_t)(i / 2); /* two do the same */
        must(pthread_create(&id[i], NULL, work, &w[i]) == 0 ? w : NULL);
    }
    for (int i = 0; i < N; i++)
        pthread_join(id[i], NULL);
    for (int i = 0; i < N; i++)
        CHECK(w[i].ok);
    for (int i = 1; i < N; i++)
        CHECK(same(w[0].shared_answers, w[i].shared_answers) && memcmp(w[0].digest, w[i].digest, sizeof w[0].digest) == 0);
    CHECK(same(w[0].own, w[1].own) && same(w[2].own, w[3].own) && !same(w[0].own, w[2].own));
    akv_cache_destroy(shared);
    akv_threads_destroy(pool);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(rolling);
    TEST(reference);
    TEST(reference_f32_tail);
    TEST(forks);
    TEST(truncation);
    TEST(budget);
    TEST(budget_and_queries);
    TEST(refusals);
    TEST(no_memory);
    TEST(threads);
    return TEST_DONE();
}
