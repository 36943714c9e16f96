/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_retarget.c - segments made smaller, and cut, from their bytes alone: the plan is exact, the budget holds, the result is a
 * valid segment, what was not touched is the same bit by bit, and what the call says it lost is what the reference finds. On a
 * captured layer the result is held against compressing anew for the same bytes.
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"
#include "npz.h"

static const spec shapes[] = {
    {.name = "small", .S = 70, .H = 1, .G = 1, .dk = 8, .dv = 6, .W = 8, .rotary = 8, .seed = 1},
    {.name = "blocks",
     .S = 2300,
     .H = 2,
     .G = 2,
     .dk = 16,
     .dv = 24,
     .W = 16,
     .rotary = 8,
     .style = AKV_ROPE_INTERLEAVED,
     .seed = 2},
    {.name = "gaps",
     .S = 1025,
     .H = 3,
     .G = 1,
     .dk = 32,
     .dv = 32,
     .W = 4,
     .rotary = 32,
     .gaps = 1,
     .first_position = -40,
     .seed = 3},
    {.name = "whole block", .S = 1024, .H = 1, .G = 4, .dk = 64, .dv = 64, .W = 32, .rotary = 64, .seed = 4},
};
enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };

static void check_opens(const char *name, akv_segment *segment)
{
    size_t bytes;
    akv_diag diag = {0};
    akv_segment *copy = NULL;
    const void *data = akv_segment_data(segment, &bytes);
    CHECK_MSG(akv_segment_open(data, bytes, 1, NULL, &copy, &diag) == AKV_OK, "%s: the result is no valid segment: %s",
              name, diag.message);
    akv_segment_release(copy);
}

static uint64_t total_of(const akv_segment *segment)
{
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    return info.bytes.total;
}

/* Coded residuals of both: the same where the level stayed; sums of what was and what changed. */
static void compare_ladder(const char *name, const akv_segment *before, const akv_segment *after, int side,
                           double *energy, double *lost)
{
    const ref_view a = ref_view_of(akv_segment_data(before, NULL)), b = ref_view_of(akv_segment_data(after, NULL));
    const uint64_t S = a.header->num_tokens;
    const uint32_t coords = ref_ladder_coords(&a, side);
    double *x = must(malloc(S * coords * sizeof *x)), *y = must(malloc(S * coords * sizeof *y));
    for (uint32_t head = 0; head < a.header->num_kv_heads; head++) {
        must(ref_ladder_coded(&a, side, head, x) && ref_ladder_coded(&b, side, head, y) ? x : NULL);
        for (uint64_t t = 0; t < S; t++) {
            const uint32_t old = ref_ladder_level(&a, side, head, t), now = ref_ladder_level(&b, side, head, t);
            bool same = true;
            for (uint32_t c = 0; c < coords; c++) {
                const double p = x[t * coords + c], q = y[t * coords + c];
                *energy += p * p;
                *lost += (p - q) * (p - q);
                same &= p == q;
            }
            CHECK_MSG(now <= old, "%s: token %llu rose from level %u to %u", name, (unsigned long long)t, old, now);
            CHECK_MSG(now != old || same, "%s: token %llu kept level %u but not its codes", name, (unsigned long long)t,
                      old);
            CHECK_MSG(ref_ladder_index(&a, side, head, t) == ref_ladder_index(&b, side, head, t) &&
                          ref_ladder_coeff_code(&a, side, head, t) == ref_ladder_coeff_code(&b, side, head, t),
                      "%s: token %llu changed its anchor", name, (unsigned long long)t);
        }
    }
    free(x);
    free(y);
}

/* Paper: what stays is as it was, and nothing that went had a larger gain than what stayed. */
static void compare_plain(const char *name, const akv_segment *before, const akv_segment *after, int side)
{
    const ref_view a = ref_view_of(akv_segment_data(before, NULL)), b = ref_view_of(akv_segment_data(after, NULL));
    double smallest_kept = INFINITY, largest_gone = 0;
    uint8_t x[1024], y[1024];
    for (uint32_t head = 0; head < a.header->num_kv_heads; head++) {
        uint64_t i = ref_view_first_residual(&a, side, head), j = ref_view_first_residual(&b, side, head);
        for (uint64_t t = 0; t < a.header->num_tokens; t++) {
            const bool had = ref_view_owns(&a, side, head, t), has = ref_view_owns(&b, side, head, t);
            CHECK_MSG(had || !has, "%s: token %llu owns a residual that was not there", name, (unsigned long long)t);
            if (!had)
                continue;
            const double gain = fabs(ref_view_gain(&a, side, i));
            if (has) {
                ref_view_codes(&a, side, head, t, x);
                ref_view_codes(&b, side, head, t, y);
                CHECK_MSG(memcmp(x, y, a.header->head_dim[side]) == 0 &&
                              ref_view_gain(&b, side, j) == ref_view_gain(&a, side, i),
                          "%s: the codes of token %llu changed", name, (unsigned long long)t);
                smallest_kept = fmin(smallest_kept, gain);
                j++;
            } else {
                largest_gone = fmax(largest_gone, gain);
            }
            i++;
        }
    }
    CHECK_MSG(largest_gone <= smallest_kept, "%s: a gain of %g went and one of %g stayed", name, largest_gone,
              smallest_kept);
}

/* opens: the segment itself is one that a reader takes (random_segment gives anchors residuals, which a reader refuses). */
static void check_one(const char *name, akv_segment *segment, uint64_t budget, bool ladder, bool opens)
{
    akv_diag diag = {0};
    akv_retarget_info info, plan;
    akv_segment *out = NULL, *again = NULL;
    akv_config config;
    akv_config_init(&config);
    akv_retarget_info_init(&info);
    akv_retarget_info_init(&plan);
    config.executor = &reversed_executor;
    CHECK_STATUS(akv_segment_retarget_plan(segment, budget, &plan, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_segment_retarget(segment, budget, NULL, &out, &info, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_segment_retarget(segment, budget, &config, &again, NULL, &diag), AKV_OK, &diag);
    if (out == NULL || again == NULL)
        return;
    size_t bytes, bytes_again;
    const void *data = akv_segment_data(out, &bytes), *data_again = akv_segment_data(again, &bytes_again);
    CHECK_MSG(bytes == bytes_again && memcmp(data, data_again, bytes) == 0, "%s: another executor, other bytes", name);
    CHECK_MSG(total_of(out) == plan.bytes.total && total_of(out) == info.bytes.total,
              "%s: %llu bytes, planned were %llu", name, (unsigned long long)total_of(out),
              (unsigned long long)plan.bytes.total);
    CHECK_MSG(total_of(out) <= budget, "%s: %llu bytes in a budget of %llu", name, (unsigned long long)total_of(out),
              (unsigned long long)budget);
    if (opens)
        check_opens(name, out);
    for (int side = 0; side < 2; side++) {
        double energy = 0, lost = 0;
        if (ladder) {
            compare_ladder(name, segment, out, side, &energy, &lost);
            const double want = energy > 0 ? lost / energy : 0, have = side == 0 ? info.lost_k : info.lost_v;
            CHECK_NEAR(have, want, 1e-5 + 1e-4 * want, "%s: share lost on side %d", name, side); /* values in fp32 */
        } else {
            compare_plain(name, segment, out, side);
        }
    }
    akv_segment_release(out);
    akv_segment_release(again);
}

static void check_segment(const char *name, akv_segment *segment, bool ladder, bool opens)
{
    akv_diag diag = {0};
    akv_retarget_info info;
    akv_retarget_info_init(&info);
    akv_segment *out = NULL;
    const uint64_t total = total_of(segment);
    CHECK_STATUS(akv_segment_retarget(segment, 1, NULL, &out, &info, &diag), AKV_E_INFEASIBLE, &diag);
    CHECK(out == NULL);
    const uint64_t least = info.min_bytes;
    CHECK(least > 0 && least <= total);
    CHECK_STATUS(akv_segment_retarget(segment, least - 1, NULL, &out, NULL, &diag), AKV_E_INFEASIBLE, &diag);
    for (uint32_t i = 0; i <= 6; i++)
        check_one(name, segment, least + (total - least) * i / 6, ladder, opens);
    CHECK_STATUS(akv_segment_retarget(segment, total, NULL, &out, &info, &diag), AKV_OK, &diag);
    CHECK_MSG(out == segment, "%s: what fits already is not made anew", name);
    akv_segment_release(out);
}

static void ladder_segments(void)
{
    for (uint32_t i = 0; i < NUM_SHAPES; i++)
        for (uint64_t seed = 0; seed < 3; seed++) {
            akv_segment *segment = random_ladder_segment(&shapes[i], 20, 0.3 + 0.3 * (double)seed, seed + 10 * i);
            check_segment(shapes[i].name, segment, true, true);
            akv_segment_release(segment);
        }
}

static void plain_segments(void)
{
    for (uint32_t i = 0; i < NUM_SHAPES; i++) {
        akv_segment *segment = random_segment(&shapes[i], 20, 0.5, 0, i + 1);
        check_segment(shapes[i].name, segment, false, false);
        akv_segment_release(segment);
    }
}

/* A made segment, so that tables, bases and levels are what the codec writes. */
static void made_segments(void)
{
    spec s = {
        .name = "made", .S = 1500, .H = 2, .G = 2, .dk = 32, .dv = 32, .W = 16, .rotary = 32, .keep = 0.3, .seed = 5};
    for (int p = AKV_PROFILE_PAPER; p <= AKV_PROFILE_DEFAULT; p++) {
        fixture f;
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        fixture_make(&s, &f);
        f.config.profile = (akv_profile)p;
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
        check_segment(s.name, segment, p == AKV_PROFILE_DEFAULT, true);
        akv_segment_release(segment);
        fixture_free(&f);
    }
}

static void refusals(void)
{
    spec s = shapes[3];
    fixture f;
    akv_segment *dense = NULL, *out = NULL;
    akv_diag diag = {0};
    akv_retarget_info info = {0};
    fixture_make(&s, &f);
    CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &dense, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_segment_retarget(dense, 1000, NULL, &out, NULL, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK_STATUS(akv_segment_retarget(NULL, 1000, NULL, &out, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget(dense, 1000, NULL, NULL, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget(dense, 1000, NULL, &out, &info, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget_plan(dense, 1000, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget(dense, UINT64_MAX, NULL, &out, NULL, &diag), AKV_OK, &diag);
    CHECK(out == dense);
    akv_segment_release(out);
    akv_segment_release(dense);
    fixture_free(&f);
    for (int ladder = 0; ladder < 2; ladder++) { /* every allocation failing: an error, and nothing left behind */
        akv_segment *segment =
            ladder ? random_ladder_segment(&shapes[1], 20, 0.5, 1) : random_segment(&shapes[1], 20, 0.5, 0, 1);
        for (uint64_t fail = 1; fail <= 4; fail++) {
            counter c;
            akv_config config;
            akv_config_init(&config);
            counter_init(&c);
            c.fail_at = fail;
            config.allocator = &c.hooks;
            out = NULL;
            akv_status status = akv_segment_retarget(segment, total_of(segment) * 9 / 10, &config, &out, NULL, &diag);
            CHECK(status == AKV_OK ? c.total < fail : status == AKV_E_NO_MEMORY && out == NULL && c.live == 0);
            akv_segment_release(out);
            CHECK(c.live == 0 && c.bad_free == 0);
        }
        akv_segment_release(segment);
    }
}

/* ------------------------------------------------------------------------------------------------------------------ cut */

static void check_cut(const char *name, akv_segment *segment, uint64_t n)
{
    akv_diag diag = {0};
    akv_segment *cut = NULL;
    akv_segment_info info, old;
    akv_segment_info_init(&info);
    akv_segment_info_init(&old);
    akv_segment_get_info(segment, &old, NULL);
    CHECK_STATUS(akv_segment_cut(segment, n, NULL, &cut, &diag), AKV_OK, &diag);
    if (cut == NULL)
        return;
    akv_segment_get_info(cut, &info, NULL);
    CHECK(info.shape.num_tokens == n && info.first_position == old.first_position &&
          info.bytes.total <= old.bytes.total);
    check_opens(name, cut);
    const uint64_t dk = old.shape.head_dim_k, dv = old.shape.head_dim_v;
    float *a = must(malloc((n * (dk + dv) + 1) * sizeof *a)), *b = must(malloc((n * (dk + dv) + 1) * sizeof *b));
    for (uint32_t head = 0; head < old.shape.num_kv_heads; head++) {
        akv_segment_decode(segment, head, 0, n, a, a + n * dk, NULL);
        akv_segment_decode(cut, head, 0, n, b, b + n * dk, NULL);
        CHECK_MSG(memcmp(a, b, n * (dk + dv) * sizeof *a) == 0, "%s: %llu tokens of head %u decode differently", name,
                  (unsigned long long)n, head);
    }
    free(a);
    free(b);
    akv_segment_release(cut);
}

static void cuts(void)
{
    static const uint64_t at[] = {1,    2,    15,   16,   17,   64,   69,   70,   1000,
                                  1023, 1024, 1025, 1040, 2047, 2048, 2049, 2299, 2300};
    for (uint32_t i = 0; i < NUM_SHAPES; i++) {
        akv_segment *segment = random_ladder_segment(&shapes[i], 20, 0.6, 77 + i);
        for (size_t j = 0; j < sizeof at / sizeof *at; j++)
            if (at[j] <= shapes[i].S)
                check_cut(shapes[i].name, segment, at[j]);
        akv_segment_release(segment);
    }
    spec s = shapes[1];
    fixture f;
    akv_segment *dense = NULL, *out = NULL;
    akv_diag diag = {0};
    fixture_make(&s, &f);
    CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &dense, &diag), AKV_OK, &diag);
    check_cut("dense", dense, 1);
    check_cut("dense", dense, 1500);
    CHECK_STATUS(akv_segment_cut(dense, 0, NULL, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_cut(dense, s.S + 1, NULL, &out, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_cut(dense, s.S, NULL, &out, &diag), AKV_OK, &diag);
    CHECK(out == dense);
    akv_segment_release(out);
    akv_segment_release(dense);
    fixture_free(&f);
    akv_segment *paper = random_segment(&shapes[1], 20, 0.5, 0, 1);
    CHECK_STATUS(akv_segment_cut(paper, 100, NULL, &out, &diag), AKV_E_UNSUPPORTED, &diag);
    akv_segment_release(paper);
}

/* -------------------------------------------------------------------------------------------------- against compressing anew */

static void against_anew(void)
{
    fixture f;
    ref_layer l;
    if (!captured_layer(&f, &l))
        return;
    akv_diag diag = {0};
    static const struct {
        double from, to;
    } steps[] = {{5, 10}, {8, 12}, {10, 14}, {10, 20}};
    const uint64_t dense = l.tokens * l.heads * (l.dim[0] + l.dim[1]) * 2;
    for (int p = AKV_PROFILE_PAPER; p <= AKV_PROFILE_DEFAULT; p++)
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            akv_segment *large = NULL, *anew = NULL, *small = NULL;
            f.config.profile = (akv_profile)p;
            f.config.keep_ratio = 1 / steps[i].from;
            if (akv_compress(&f.layer, &f.config, &large, &diag) != AKV_OK)
                continue; /* too few tokens for such a ratio */
            f.config.keep_ratio = 1 / steps[i].to;
            const uint64_t budget = (uint64_t)((double)dense / steps[i].to);
            if (akv_segment_retarget(large, budget, NULL, &small, NULL, &diag) == AKV_OK &&
                akv_compress(&f.layer, &f.config, &anew, &diag) == AKV_OK) {
                const double e0 = output_error(&l, large, 0), e1 = output_error(&l, small, 0), e2 = output_error(&l, anew, 0);
                printf("  profile %d, %llu tokens, %gx -> %gx: output error %.4f -> %.4f retargeted, %.4f anew (%.2f "
                       "times)\n",
                       p, (unsigned long long)l.tokens, steps[i].from, steps[i].to, e0, e1, e2, e1 / e2);
                /* Measured: 1.0 to 1.5 for profile default. Twice is a fault. */
                CHECK_MSG(p == AKV_PROFILE_PAPER || e1 < 2 * e2, "%gx -> %gx: error %.4f, anew %.4f", steps[i].from,
                          steps[i].to, e1, e2);
                CHECK_MSG(total_of(small) <= budget, "the budget does not hold");
            } else {
                printf("  profile %d, %gx -> %gx: %s\n", p, steps[i].from, steps[i].to, diag.message);
            }
            akv_segment_release(large);
            akv_segment_release(anew);
            akv_segment_release(small);
        }
    ref_layer_free(&l);
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(ladder_segments);
    TEST(plain_segments);
    TEST(made_segments);
    TEST(refusals);
    TEST(cuts);
    TEST(against_anew);
    return TEST_DONE();
}
