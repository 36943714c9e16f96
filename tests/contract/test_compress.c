/* SPDX-License-Identifier: Apache-2.0 */
/* test_compress.c - akv_compress and akv_segment_decode against the reference, over shapes, dtypes, layouts, switches.
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"

/* One default, edited per case. */
#define BASE                                                                                                   \
    .H = 2, .G = 2, .dk = 64, .dv = 64, .W = 32, .rotary = 64, .style = AKV_ROPE_HALF_SPLIT, .dtype = AKV_F16, \
    .keep = 0.3

static check_stats stats;

/*
 * s->keep is the share of the residuals that the budget buys: neither none nor all of them, so that the choice matters.
 * Short prompts with few dimensions may cost more than dense; then the budget ends just below dense.
 */
static uint64_t budget_for(const spec *s, const akv_shape *shape, const akv_experiment *experiment)
{
    uint32_t k = ref_num_anchors(s->S, s->W, experiment != NULL ? experiment->tokens_per_anchor : 128);
    uint64_t none[2] = {0, 0}, all[2] = {s->H * (s->S - k), s->H * (s->S - k)};
    uint64_t low = ref_compressed_bytes(shape, k, none), high = ref_compressed_bytes(shape, k, all);
    uint64_t budget = low + (uint64_t)(s->keep * (double)(high - low)),
             dense = ref_dense_bytes(shape, akv_dtype_bytes(shape->dtype));
    return budget < dense ? budget : dense - 1;
}

static void run_with(const spec *s, const akv_experiment *experiment)
{
    fixture f;
    fixture_make(s, &f);
    f.config.experiment = experiment;
    f.config.budget_bytes = budget_for(s, &f.layer.shape, experiment);
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    akv_status status = akv_compress(&f.layer, &f.config, &segment, &diag);
    CHECK_MSG(status == AKV_OK, "%s: %s: %s", s->name, akv_status_str(status), diag.message);
    if (status == AKV_OK) {
        const akv_header *h = akv_segment_data(segment, NULL);
        if (CHECK_MSG(h->kind == AKV_SEGMENT_COMPRESSED, "%s was kept dense", s->name))
            check_compressed(s->name, &f.layer, &f.config, segment, &stats);
        check_decode(s->name, segment);
    }
    akv_segment_release(segment);
    fixture_free(&f);
}

static void head_dims(void)
{
    const uint32_t dims[][2] = {{64, 64},   {80, 80},   {96, 96},  {112, 112}, {128, 128}, {192, 192},
                                {256, 256}, {192, 128}, {64, 128}, {24, 10},   {6, 22}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "dk %u dv %u", dims[i][0], dims[i][1]);
        spec s = {.name = name, .S = 300, BASE, .seed = i};
        s.dk = s.rotary = dims[i][0];
        s.dv = dims[i][1];
        run_with(&s, NULL);
    }
}

static void groups_and_heads(void)
{
    const uint32_t group[] = {1, 2, 3, 4, 6, 8}, heads[] = {1, 2, 3, 8};
    for (size_t i = 0; i < 6; i++)
        for (size_t j = 0; j < 4; j++) {
            char name[64];
            snprintf(name, sizeof name, "G %u H %u", group[i], heads[j]);
            spec s = {.name = name, .S = 200, BASE, .seed = 10 * i + j};
            s.G = group[i];
            s.H = heads[j];
            s.W = j % 2 ? 32 : 16;
            run_with(&s, NULL);
        }
}

static void lengths(void)
{
    const uint64_t lengths[] = {33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 2049, 5000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "S %llu", (unsigned long long)lengths[i]);
        spec s = {.name = name, .S = lengths[i], BASE, .seed = i};
        s.dk = s.dv = s.rotary = 128;
        if (s.S < 200)
            s.W = 8; /* a small window leaves something to compress */
        run_with(&s, NULL);
    }
}

/* More than 256 anchors: 16-bit indices. */
static void wide_index(void)
{
    akv_experiment e;
    akv_experiment_init(&e);
    e.tokens_per_anchor = 4;
    spec s = {.name = "k 300", .S = 1200, BASE, .seed = 4};
    run_with(&s, &e);
    s.S = 1027; /* k 256, the last that fits 8 bits */
    s.name = "k 256";
    run_with(&s, &e);
}

static void rope_variants(void)
{
    const spec list[] = {
        {.name = "partial rotary", .S = 400, BASE, .seed = 1},
        {.name = "interleaved", .S = 400, BASE, .seed = 2},
        {.name = "interleaved partial YaRN", .S = 400, BASE, .magnitude = 1.2079, .seed = 3},
        {.name = "YaRN", .S = 400, BASE, .magnitude = 0.8, .seed = 4},
        {.name = "no rotation", .S = 400, BASE, .seed = 5},
        {.name = "late", .S = 400, BASE, .first_position = 100000, .seed = 6},
        {.name = "negative", .S = 400, BASE, .first_position = -200, .seed = 7},
        {.name = "gaps", .S = 400, BASE, .gaps = 1, .first_position = 7, .seed = 8},
        {.name = "gaps from below 0, interleaved", .S = 1100, BASE, .gaps = 1, .first_position = -900, .seed = 9},
        {.name = "soft-cap", .S = 400, BASE, .softcap = 5, .seed = 10},
        {.name = "soft-cap 50", .S = 400, BASE, .softcap = 50, .seed = 11},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        spec s = list[i];
        if (strstr(s.name, "partial") != NULL)
            s.rotary = 24;
        if (strstr(s.name, "nterleaved") != NULL)
            s.style = AKV_ROPE_INTERLEAVED;
        if (strstr(s.name, "no rotation") != NULL)
            s.rotary = 0;
        run_with(&s, NULL);
    }
}

static void memory_layouts(void)
{
    const char *dtypes[] = {"f32", "f16", "bf16"};
    for (int dtype = 0; dtype < 3; dtype++)
        for (int lay = 0; lay < LAY_COUNT; lay++) {
            char name[64];
            snprintf(name, sizeof name, "%s layout %d", dtypes[dtype], lay);
            spec s = {.name = name, .S = 260, BASE, .seed = 3};
            s.dtype = (akv_dtype)dtype;
            s.layout_k = lay;
            s.layout_v = (lay + 2) % LAY_COUNT;
            s.layout_q = (lay + 3) % LAY_COUNT;
            run_with(&s, NULL);
        }
}

/* Same numbers, other strides: the same bytes. */
static void layouts_do_not_matter(void)
{
    for (int dtype = 0; dtype < 3; dtype++) {
        uint8_t *first = NULL;
        size_t first_bytes = 0;
        for (int lay = 0; lay < LAY_COUNT; lay++) {
            spec s = {.name = "layouts", .S = 260, BASE, .seed = 3};
            s.dtype = (akv_dtype)dtype;
            s.layout_k = lay;
            s.layout_v = (lay + 1) % LAY_COUNT;
            s.layout_q = (lay + 2) % LAY_COUNT;
            fixture f;
            fixture_make(&s, &f);
            akv_segment *segment = NULL;
            akv_diag diag = {0};
            CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
            size_t bytes = 0;
            const void *data = akv_segment_data(segment, &bytes);
            if (first == NULL && data != NULL) {
                first = must(malloc(bytes));
                memcpy(first, data, bytes);
                first_bytes = bytes;
            } else
                CHECK_MSG(data != NULL && bytes == first_bytes && memcmp(first, data, bytes) == 0,
                          "dtype %d layout %d gives other bytes", dtype, lay);
            akv_segment_release(segment);
            fixture_free(&f);
        }
        free(first);
    }
}

static void windows(void)
{
    const uint32_t w[] = {1, 2, 7, 32, 64};
    for (size_t i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "W %u", w[i]);
        spec s = {.name = name, .S = 500, BASE, .seed = i};
        s.W = w[i];
        run_with(&s, NULL);
    }
}

static void experiments(void)
{
    spec s = {.name = "", .S = 700, BASE, .seed = 21};
    s.H = 3;
    akv_experiment e;
    const char *rank_names[] = {"utility", "cosine", "norm", "attention", "random"};
    for (int rank = 0; rank < 5; rank++) {
        akv_experiment_init(&e);
        e.rank = (akv_rank)rank;
        s.name = rank_names[rank];
        run_with(&s, &e);
        e.equal_head_budgets = 1;
        run_with(&s, &e);
    }
    akv_experiment_init(&e);
    e.scale_rule = AKV_SCALE_LEAST_SQUARES;
    s.name = "least squares";
    run_with(&s, &e);
    akv_experiment_init(&e);
    e.code_rule = AKV_CODE_PLAIN_UNIFORM;
    s.name = "plain codes";
    run_with(&s, &e);
    e.scale_rule = AKV_SCALE_LEAST_SQUARES;
    s.name = "plain codes, least squares";
    run_with(&s, &e);
    akv_experiment_init(&e);
    e.anchor_space = AKV_ANCHOR_POST_ROPE;
    s.name = "anchors after the rotation";
    run_with(&s, &e);
    akv_experiment_init(&e);
    e.no_random_anchors = 1;
    s.name = "no random anchors";
    run_with(&s, &e);
    akv_experiment_init(&e);
    e.anchors_only = 1;
    s.name = "anchors only";
    run_with(&s, &e);
    akv_experiment_init(&e);
    e.rho = 0;
    s.name = "rho 0";
    run_with(&s, &e);
    e.rho = 1;
    e.pool_width = 1;
    e.tokens_per_anchor = 8;
    s.name = "rho 1, no pooling, S/8";
    run_with(&s, &e);
}

/* The random anchors are uniform over the tokens that the scores left: chi-square over many seeds. */
static void random_anchors(void)
{
    spec s = {.name = "random anchors", .S = 200, BASE, .seed = 5};
    s.H = s.G = 1;
    s.dk = s.dv = s.rotary = 16;
    s.W = 8;
    s.keep = 0.9;
    akv_experiment e;
    akv_experiment_init(&e);
    e.tokens_per_anchor = 8; /* k 25: 8 window, floor(0.7 * 17) = 11 top, 6 random */
    fixture f;
    fixture_make(&s, &f);
    f.config.experiment = &e;
    enum { SEEDS = 2000 };
    unsigned hits[200] = {0};
    for (int seed = 0; seed < SEEDS; seed++) {
        f.config.seed = (uint64_t)seed;
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
        if (segment == NULL)
            break;
        ref_view view = ref_view_of(akv_segment_data(segment, NULL));
        for (uint32_t a = 0; a < view.header->num_anchors; a++)
            hits[ref_view_anchor_token(&view, 0, a)]++;
        akv_segment_release(segment);
    }
    unsigned always = 0, cells = 0;
    double chi2 = 0, expected = SEEDS * 6.0 / (200 - 8 - 11);
    for (int p = 0; p < 200; p++) {
        if (hits[p] == SEEDS)
            always++;
        else {
            cells++;
            chi2 += (hits[p] - expected) * (hits[p] - expected) / expected;
        }
    }
    CHECK_MSG(always == 8 + 11, "%u tokens are anchors under every seed, expected 19", always);
    /* chi-square of about 181 cells (drawn without replacement, so a little less): mean <= 181, deviation <= sqrt(362)
       = 19; 300 is six deviations above; a choice that does not vary with the seed gives > 60000 */
    CHECK_MSG(chi2 < 300 && cells == 181, "chi-square of the random anchors %.1f over %u cells", chi2, cells);
    fixture_free(&f);
}

/* Layers of one document must not share their random anchors and signs blindly: layer_index goes into the seed. */
static void layer_index_matters(void)
{
    spec s = {.name = "layer index", .S = 400, BASE, .seed = 5};
    fixture f;
    fixture_make(&s, &f);
    akv_segment *one = NULL, *two = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &one, &diag), AKV_OK, &diag);
    f.layer.layer_index++;
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &two, &diag), AKV_OK, &diag);
    if (one != NULL && two != NULL) {
        size_t a, b;
        const void *x = akv_segment_data(one, &a), *y = akv_segment_data(two, &b);
        CHECK(a == b && memcmp(x, y, a) != 0);
    }
    akv_segment_release(one);
    akv_segment_release(two);
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(head_dims);
    TEST(groups_and_heads);
    TEST(lengths);
    TEST(wide_index);
    TEST(rope_variants);
    TEST(memory_layouts);
    TEST(layouts_do_not_matter);
    TEST(windows);
    TEST(experiments);
    TEST(random_anchors);
    TEST(layer_index_matters);
    printf("%lu tokens projected, %lu to another anchor than the reference's (near-ties); %lu residuals, %lu codes, "
           "%lu of them other\n",
           stats.tokens, stats.other_anchor, stats.residuals, stats.codes, stats.other_code);
    return TEST_DONE();
}
