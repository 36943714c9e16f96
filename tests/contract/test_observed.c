/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_observed.c - segments made smaller with queries that came later: the budget holds, levels only fall and what
 * stays is the same bit by bit, the executor does not matter; what the queries look at keeps its bits; and many small
 * steps cost little more than one, which guessing does not reach. Looking at the heads one after the other says the same
 * of them in less memory.
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"
#include "codec/ladder.h"
#include "npz.h"

static const spec shapes[] = {
    {.name = "small", .S = 70, .H = 1, .G = 1, .dk = 8, .dv = 6, .W = 8, .rotary = 8, .seed = 1},
    {.name = "blocks", .S = 2300, .H = 2, .G = 2, .dk = 16, .dv = 24, .W = 16, .rotary = 8,
     .style = AKV_ROPE_INTERLEAVED, .softcap = 20, .seed = 2},
    {.name = "gaps", .S = 1025, .H = 3, .G = 1, .dk = 32, .dv = 32, .W = 4, .rotary = 32, .gaps = 1,
     .first_position = -40, .magnitude = 1.2, .seed = 3},
    {.name = "no rotation", .S = 1024, .H = 1, .G = 4, .dk = 64, .dv = 64, .W = 32, .rotary = 0, .seed = 4},
};
enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };

static uint64_t total_of(const akv_segment *segment)
{
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    return info.bytes.total;
}

static void check_smaller(const char *name, const akv_segment *before, const akv_segment *after)
{
    const ref_view a = ref_view_of(akv_segment_data(before, NULL)), b = ref_view_of(akv_segment_data(after, NULL));
    const uint64_t S = a.header->num_tokens;
    for (int side = 0; side < 2; side++) {
        const uint32_t coords = ref_ladder_coords(&a, side);
        double *x = must(malloc(S * coords * sizeof *x)), *y = must(malloc(S * coords * sizeof *y));
        for (uint32_t head = 0; head < a.header->num_kv_heads; head++) {
            must(ref_ladder_coded(&a, side, head, x) && ref_ladder_coded(&b, side, head, y) ? x : NULL);
            for (uint64_t t = 0; t < S; t++) {
                const uint32_t old = ref_ladder_level(&a, side, head, t), now = ref_ladder_level(&b, side, head, t);
                CHECK_MSG(now <= old, "%s: token %llu rose from level %u to %u", name, (unsigned long long)t, old, now);
                CHECK_MSG(now != old || memcmp(x + t * coords, y + t * coords, coords * sizeof *x) == 0,
                          "%s: token %llu kept level %u but not its codes", name, (unsigned long long)t, old);
            }
        }
        free(x);
        free(y);
    }
}

static void check_budgets(const char *name, akv_segment *segment, const akv_tensor *queries, uint32_t num_queries)
{
    akv_diag diag = {0};
    akv_retarget_info info;
    akv_config config;
    akv_config_init(&config);
    akv_retarget_info_init(&info);
    config.executor = &reversed_executor;
    akv_segment *out = NULL, *again = NULL, *copy = NULL;
    const uint64_t total = total_of(segment);
    CHECK_STATUS(akv_segment_retarget_observed(segment, 1, queries, num_queries, NULL, &out, &info, &diag),
                 AKV_E_INFEASIBLE, &diag);
    CHECK(out == NULL && info.min_bytes > 1 && info.min_bytes <= total);
    const uint64_t least = info.min_bytes;
    for (uint64_t i = 0; i < 5; i++) {
        const uint64_t budget = least + (total - least) * i / 5;
        out = again = NULL;
        CHECK_STATUS(akv_segment_retarget_observed(segment, budget, queries, num_queries, NULL, &out, NULL, &diag),
                     AKV_OK, &diag);
        config.keep_ratio = 0; /* not used */
        CHECK_STATUS(akv_segment_retarget_observed(segment, budget, queries, num_queries, &config, &again, NULL, &diag),
                     AKV_OK, &diag);
        if (out == NULL || again == NULL)
            return;
        size_t bytes, bytes_again;
        const void *data = akv_segment_data(out, &bytes), *data_again = akv_segment_data(again, &bytes_again);
        CHECK_MSG(bytes == bytes_again && memcmp(data, data_again, bytes) == 0, "%s: another executor, other bytes",
                  name);
        CHECK_MSG(total_of(out) <= budget, "%s: %llu bytes in a budget of %llu", name,
                  (unsigned long long)total_of(out), (unsigned long long)budget);
        CHECK_MSG(akv_segment_open(data, bytes, 1, NULL, &copy, &diag) == AKV_OK, "%s: no valid segment: %s", name,
                  diag.message);
        check_smaller(name, segment, out);
        akv_segment_release(copy);
        akv_segment_release(out);
        akv_segment_release(again);
    }
    CHECK_STATUS(akv_segment_retarget_observed(segment, total, queries, num_queries, NULL, &out, NULL, &diag), AKV_OK,
                 &diag);
    CHECK_MSG(out == segment, "%s: what fits already is not made anew", name);
    akv_segment_release(out);
}

static akv_tensor random_queries(const spec *s, uint32_t n, akv_dtype dtype, int layout, void **memory)
{
    akv_rng rng = akv_rng_stream(s->seed, 77, 0);
    const akv_tensor q = tensor_make((uint64_t)s->H * s->G, n, s->dk, dtype, layout, memory);
    for (uint64_t h = 0; h < (uint64_t)s->H * s->G; h++)
        for (uint64_t r = 0; r < n; r++)
            for (uint64_t d = 0; d < s->dk; d++)
                tensor_set(&q, h, r, d, random_gauss(&rng));
    return q;
}

static void invariants(void)
{
    for (uint32_t i = 0; i < NUM_SHAPES; i++) {
        void *memory;
        const akv_tensor q = random_queries(&shapes[i], 1 + 3 * i, (akv_dtype)(i % 3), (int)(i % LAY_COUNT), &memory);
        akv_segment *segment = random_ladder_segment(&shapes[i], 20, 0.6, i);
        check_budgets(shapes[i].name, segment, &q, 1 + 3 * i);
        akv_segment_release(segment);
        free(memory);
    }
}

/*
 * Queries that look at one token only, so that nearly all utility of its head is that token's and, less, of those
 * behind it: hardly another value keeps more, while most fall.
 */
static void looked_at(void)
{
    const spec s = {
        .name = "made", .S = 1500, .H = 2, .G = 1, .dk = 32, .dv = 32, .W = 16, .rotary = 32, .keep = 0.3, .seed = 5};
    fixture f;
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    fixture_make(&s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    const ref_view a = ref_view_of(akv_segment_data(segment, NULL));
    float *k = must(malloc(s.S * 32 * sizeof *k)), *v = must(malloc(s.S * 32 * sizeof *v));
    akv_segment_decode(segment, 0, 0, s.S, k, v, NULL);
    uint32_t tried = 0;
    for (uint64_t from = 0; from < s.S && tried < 12; from += 29) {
        void *memory;
        akv_segment *out = NULL;
        const akv_tensor q = tensor_make(2, 1, 32, AKV_F32, LAY_CONTIGUOUS, &memory);
        double best = -INFINITY, next = -INFINITY;
        uint64_t t = 0; /* the token that a query along this key finds */
        for (uint64_t p = 0; p < s.S; p++) {
            double logit = 0;
            for (uint64_t d = 0; d < 32; d++)
                logit += f.layer.sm_scale * k[from * 32 + d] * k[p * 32 + d];
            next = logit > best ? best : fmax(next, logit);
            t = logit > best ? p : t;
            best = fmax(best, logit);
        }
        const double scale = 8 / (best - next); /* the others get e^-8 each, or less */
        const uint32_t had = ref_ladder_level(&a, 1, 0, t);
        if (had < 3 || scale * best > 60) { /* little to keep; a longer query than there are */
            free(memory);
            continue;
        }
        for (uint64_t d = 0; d < 32; d++)
            tensor_set(&q, 0, 0, d, scale * k[from * 32 + d]);
        const uint64_t budget = total_of(segment) * 55 / 100;
        CHECK_STATUS(akv_segment_retarget_observed(segment, budget, &q, 1, NULL, &out, NULL, &diag), AKV_OK, &diag);
        if (out != NULL) {
            const ref_view b = ref_view_of(akv_segment_data(out, NULL));
            const uint32_t now = ref_ladder_level(&b, 1, 0, t);
            uint64_t fell = 0, above = 0; /* what is read on from it has utility too */
            for (uint64_t p = 0; p < s.S; p++) {
                fell += ref_ladder_level(&b, 1, 0, p) < ref_ladder_level(&a, 1, 0, p);
                above += ref_ladder_level(&b, 1, 0, p) > now;
            }
            CHECK_MSG(above <= 64, "token %llu fell from level %u to %u, %llu of its head lie above it",
                      (unsigned long long)t, had, now, (unsigned long long)above);
            CHECK_MSG(fell * 2 > s.S, "only %llu tokens of the head fell", (unsigned long long)fell);
            tried++;
        }
        akv_segment_release(out);
        free(memory);
    }
    CHECK_MSG(tried >= 6, "only %u tokens had levels", tried);
    free(k);
    free(v);
    akv_segment_release(segment);
    fixture_free(&f);
}

static void refusals(void)
{
    fixture f;
    void *memory;
    akv_segment *out = NULL, *dense = NULL, *paper = random_segment(&shapes[1], 20, 0.5, 0, 1),
                *segment = random_ladder_segment(&shapes[1], 20, 0.5, 1);
    akv_diag diag = {0};
    fixture_make(&shapes[1], &f);
    CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &dense, &diag), AKV_OK, &diag);
    akv_tensor q = random_queries(&shapes[1], 4, AKV_F32, LAY_CONTIGUOUS, &memory);
    const uint64_t smaller = total_of(segment) * 9 / 10;
    CHECK_STATUS(akv_segment_retarget_observed(segment, smaller, NULL, 4, NULL, &out, NULL, &diag),
                 AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget_observed(segment, smaller, &q, 0, NULL, &out, NULL, &diag),
                 AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget_observed(segment, smaller, &q, 1025, NULL, &out, NULL, &diag),
                 AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_segment_retarget_observed(NULL, smaller, &q, 4, NULL, &out, NULL, &diag), AKV_E_INVALID_ARGUMENT,
                 &diag);
    CHECK_STATUS(akv_segment_retarget_observed(dense, 1000, &q, 4, NULL, &out, NULL, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK_STATUS(akv_segment_retarget_observed(paper, total_of(paper) * 9 / 10, &q, 4, NULL, &out, NULL, &diag),
                 AKV_E_UNSUPPORTED, &diag);
    for (uint64_t fail = 1; fail <= 8; fail++) { /* every allocation failing: an error, and nothing left behind */
        counter c;
        akv_config config;
        akv_config_init(&config);
        counter_init(&c);
        c.fail_at = fail;
        config.allocator = &c.hooks;
        out = NULL;
        const akv_status status = akv_segment_retarget_observed(segment, smaller, &q, 4, &config, &out, NULL, &diag);
        CHECK(status == AKV_OK ? c.total < fail : status == AKV_E_NO_MEMORY && out == NULL && c.live == 0);
        akv_segment_release(out);
        CHECK(c.live == 0 && c.bad_free == 0);
    }
    out = NULL;
    tensor_set(&q, 3, 2, 5, NAN);
    CHECK_STATUS(akv_segment_retarget_observed(segment, smaller, &q, 4, NULL, &out, NULL, &diag), AKV_E_NON_FINITE,
                 &diag);
    CHECK(strstr(diag.message, "head 3, token 2, dim 5") != NULL && out == NULL);
    akv_segment_release(dense);
    akv_segment_release(paper);
    akv_segment_release(segment);
    fixture_free(&f);
    free(memory);
}

/* A captured layer, 5x to 10x in steps of a tenth, by guess and with every second of its queries. */
static void small_steps(void)
{
    fixture f;
    ref_layer l;
    if (!captured_layer(&f, &l))
        return;
    akv_diag diag = {0};
    akv_segment *once = NULL, *guessed = NULL, *observed = NULL, *anew = NULL, *next = NULL;
    const double dense = (double)(l.tokens * l.heads * (l.dim[0] + l.dim[1]) * 2);
    const uint32_t W = f.layer.shape.num_queries;
    akv_tensor queries = f.layer.queries; /* rows 0, 2, 4, ... */
    queries.stride_token *= 2;
    f.config.profile = AKV_PROFILE_DEFAULT;
    f.config.keep_ratio = 0.1;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &anew, &diag), AKV_OK, &diag);
    f.config.keep_ratio = 0.2;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &guessed, &diag), AKV_OK, &diag);
    observed = akv_segment_retain(guessed);
    CHECK_STATUS(akv_segment_retarget(guessed, (uint64_t)(0.1 * dense), NULL, &once, NULL, &diag), AKV_OK, &diag);
    for (double keep = 0.18; keep > 0.09; keep = keep > 0.1 && keep * 0.9 < 0.1 ? 0.1 : keep * 0.9) {
        const uint64_t budget = (uint64_t)(keep * dense);
        CHECK_STATUS(akv_segment_retarget(guessed, budget, NULL, &next, NULL, &diag), AKV_OK, &diag);
        akv_segment_release(guessed);
        guessed = next;
        CHECK_STATUS(akv_segment_retarget_observed(observed, budget, &queries, W / 2, NULL, &next, NULL, &diag), AKV_OK,
                     &diag);
        akv_segment_release(observed);
        observed = next;
        if (keep == 0.1)
            break;
    }
    /* rows 2, 6, ...: not those that observed */
    const double e_anew = output_error(&l, anew, 2), e_once = output_error(&l, once, 2);
    const double e_guessed = output_error(&l, guessed, 2), e_observed = output_error(&l, observed, 2);
    printf("  5x -> 10x in steps: output error %.4f observed, %.4f guessed; %.4f guessed at once, %.4f anew\n",
           e_observed, e_guessed, e_once, e_anew);
    CHECK_MSG(total_of(observed) <= (uint64_t)(0.1 * dense), "the budget does not hold");
    CHECK_MSG(e_observed < 1.5 * e_anew && e_observed < 0.8 * e_guessed, "observed steps are not worth their name");
    akv_segment_release(once);
    akv_segment_release(guessed);
    akv_segment_release(observed);
    akv_segment_release(anew);
    ref_layer_free(&l);
    fixture_free(&f);
}

static void head_by_head(void)
{
    const spec s = {.name = "heads", .S = 6000, .H = 5, .G = 2, .dk = 64, .dv = 96, .W = 16, .rotary = 32, .seed = 6};
    const uint64_t n = s.H * s.S, one = s.S * (s.dk + s.dv) * sizeof(float), most[] = {UINT64_MAX, 2 * one, 1};
    uint64_t peak[3];
    float *utility[3][AKV_SIDES];
    akv_hull hulls[3][5 * AKV_SIDES];
    void *memory;
    akv_diag diag = {0};
    const akv_tensor q = random_queries(&s, 4, AKV_F16, LAY_CONTIGUOUS, &memory);
    akv_segment *segment = random_ladder_segment(&s, 40, 0.6, 1);
    memset(hulls, 0, sizeof hulls);
    for (int i = 0; i < 3; i++) {
        counter c;
        akv_config config;
        akv_config_init(&config);
        counter_init(&c);
        config.allocator = &c.hooks;
        for (int side = 0; side < AKV_SIDES; side++)
            utility[i][side] = must(malloc(n * sizeof(float)));
        CHECK_STATUS(akv_observe_again(segment, &q, 4, &config, most[i], utility[i], hulls[i], &diag), AKV_OK, &diag);
        CHECK(c.live == 0 && c.bad_free == 0);
        peak[i] = c.peak_bytes;
        CHECK_MSG(memcmp(hulls[i], hulls[0], sizeof hulls[0]) == 0, "%d: other hulls", i);
        double worst = 0; /* the sums behind the prior are added in another order */
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint64_t t = 0; t < n; t++)
                worst = fmax(worst, fabs((double)utility[i][side][t] - utility[0][side][t]));
        CHECK_MSG(worst < 1e-5, "%d: utilities differ by %.3g octaves", i, worst);
    }
    CHECK_MSG(peak[1] + 3 * one <= peak[0] && peak[2] + 4 * one <= peak[0],
              "%llu bytes at once, %llu in twos, %llu one by one; a head has %llu", (unsigned long long)peak[0],
              (unsigned long long)peak[1], (unsigned long long)peak[2], (unsigned long long)one);
    for (int i = 0; i < 3; i++)
        for (int side = 0; side < AKV_SIDES; side++)
            free(utility[i][side]);
    akv_segment_release(segment);
    free(memory);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(invariants);
    TEST(looked_at);
    TEST(refusals);
    TEST(small_steps);
    TEST(head_by_head);
    return TEST_DONE();
}
