/* SPDX-License-Identifier: Apache-2.0 */
/* test_evict.c - the SnapKV baseline: as many tokens as the budget holds, the window, the highest pooled scores, all
 * exact. */
#include "akv_test.h"
#include "cases.h"

static void run(const spec *s)
{
    fixture f;
    fixture_make(s, &f);
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_evict_snapkv(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    if (segment == NULL) {
        fixture_free(&f);
        return;
    }
    akv_segment_info info;
    akv_segment_info_init(&info);
    CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
    uint64_t n = info.shape.num_tokens, dense = s->S * s->H * (s->dk + s->dv) * 2,
             budget = (uint64_t)floor(s->keep * (double)dense);
    CHECK(info.kind == AKV_SEGMENT_DENSE && info.dense_reason == AKV_DENSE_EVICTED && info.dense_dtype == s->dtype);
    akv_shape kept = f.layer.shape;
    kept.num_tokens = n;
    uint32_t element = s->dtype == AKV_F32 ? 4 : 2;
    CHECK(info.bytes.total == ref_dense_bytes(&kept, element) && info.bytes.total <= budget);
    kept.num_tokens = n + 1;
    CHECK_MSG(ref_dense_bytes(&kept, element) > budget, "one more token than %llu fits", (unsigned long long)n);

    ref_layer l;
    must(ref_layer_load(&f.layer, &l) ? &f : NULL);
    uint64_t earlier = s->S - s->W;
    double *score = must(malloc(earlier * sizeof *score)), *tol = must(malloc(earlier * sizeof *tol));
    bool *chosen = must(malloc(s->S)), *top = must(malloc(earlier));
    double *k = must(malloc(n * s->dk * sizeof *k)), *v = must(malloc(n * s->dv * sizeof *v));
    for (uint32_t h = 0; h < s->H; h++) {
        must(ref_decode(akv_segment_data(segment, NULL), AKV_SIDE_K, h, k, NULL) ? k : NULL);
        must(ref_decode(akv_segment_data(segment, NULL), AKV_SIDE_V, h, v, NULL) ? v : NULL);
        /* each row is some token's key and value, in ascending order */
        uint64_t p = 0, matched = 0;
        memset(chosen, 0, s->S);
        for (uint64_t i = 0; i < n; i++)
            for (; p < s->S; p++)
                if (memcmp(k + i * s->dk, l.keys + (h * s->S + p) * s->dk, s->dk * sizeof *k) == 0 &&
                    memcmp(v + i * s->dv, l.values + (h * s->S + p) * s->dv, s->dv * sizeof *v) == 0) {
                    chosen[p++] = true;
                    matched++;
                    break;
                }
        CHECK_MSG(matched == n, "%s: head %u: %llu of %llu kept rows are tokens in order", s->name, h,
                  (unsigned long long)matched, (unsigned long long)n);
        for (uint64_t w = earlier; w < s->S; w++)
            CHECK_MSG(chosen[w], "%s: head %u: window token %llu was dropped", s->name, h, (unsigned long long)w);
        must(ref_anchor_scores(&l, h, 5, score, tol) ? score : NULL);
        ref_top(score, earlier, n - s->W, top);
        double lowest_in = INFINITY, highest_out = -INFINITY;
        for (uint64_t t = 0; t < earlier; t++) {
            if (chosen[t])
                lowest_in = fmin(lowest_in, score[t] + tol[t]);
            else
                highest_out = fmax(highest_out, score[t] - tol[t]);
        }
        CHECK_MSG(lowest_in >= highest_out, "%s: head %u keeps a token of at most %.9g and drops one of at least %.9g",
                  s->name, h, lowest_in, highest_out);
    }
    free(score);
    free(tol);
    free(chosen);
    free(top);
    free(k);
    free(v);
    ref_layer_free(&l);
    akv_segment_release(segment);
    fixture_free(&f);
}

static void budgets(void)
{
    const double keep[] = {0.1, 0.25, 0.6, 0.9};
    for (int i = 0; i < 4; i++)
        for (int dtype = 0; dtype < 3; dtype++) {
            spec s = {.name = "evict",
                      .S = 700,
                      .H = 2,
                      .G = 3,
                      .dk = 64,
                      .dv = 48,
                      .W = 16,
                      .rotary = 64,
                      .keep = keep[i],
                      .dtype = (akv_dtype)dtype,
                      .layout_v = LAY_TRANSPOSED,
                      .seed = (uint64_t)i};
            run(&s);
        }
    run(&(spec){.name = "gaps, soft-cap",
                .S = 500,
                .H = 1,
                .G = 2,
                .dk = 80,
                .dv = 80,
                .W = 32,
                .rotary = 40,
                .keep = 0.3,
                .dtype = AKV_F16,
                .gaps = 1,
                .softcap = 20,
                .seed = 9});
}

static void failures(void)
{
    spec s = {.name = "evict",
              .S = 300,
              .H = 2,
              .G = 2,
              .dk = 64,
              .dv = 64,
              .W = 32,
              .rotary = 64,
              .keep = 0.05,
              .dtype = AKV_F16,
              .seed = 1};
    fixture f;
    fixture_make(&s, &f);
    akv_segment *const untouched = (akv_segment *)(uintptr_t)64, *out = untouched;
    akv_diag diag = {0};
    CHECK_STATUS(akv_evict_snapkv(&f.layer, &f.config, &out, &diag), AKV_E_INFEASIBLE, &diag);
    CHECK_STATUS(akv_evict_snapkv(NULL, &f.config, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_evict_snapkv(&f.layer, NULL, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_evict_snapkv(&f.layer, &f.config, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    f.config.keep_ratio = 0.5;
    tensor_set(&f.layer.values, 1, 200, 33, NAN);
    CHECK_STATUS(akv_evict_snapkv(&f.layer, &f.config, &out, &diag), AKV_E_NON_FINITE, &diag);
    CHECK(out == untouched);
    tensor_set(&f.layer.values, 1, 200, 33, 0);
    for (uint64_t n = 1; n < 100; n++) {
        counter c;
        counter_init(&c);
        c.fail_at = n;
        f.config.allocator = &c.hooks;
        akv_status status = akv_evict_snapkv(&f.layer, &f.config, &out, &diag);
        if (status == AKV_OK) {
            akv_segment_release(out);
            CHECK(n > 1 && c.live == 0 && c.bad_free == 0);
            break;
        }
        CHECK_MSG(status == AKV_E_NO_MEMORY && out == untouched && c.live == 0, "allocation %llu fails: %s",
                  (unsigned long long)n, akv_status_str(status));
    }
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(budgets);
    TEST(failures);
    return TEST_DONE();
}
