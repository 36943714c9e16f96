/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ladder_budget.c - bytes of the profile default. Over random shapes, settings and keep ratios: what akv_compress
 * really allocates equals akv_plan's total and the sum of the sections of layout.h, never exceeds the budget and leaves less
 * than one aligned step of it; an infeasible budget names the smallest feasible one, which works while one byte less does not.
 */
#include "akv_test.h"
#include "cases.h"

/* A sanitizer build looks for bad accesses, which a tenth of the cases shows as well, and takes fifty times as long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PLANS = 20000, SMALL = 2500, LARGE = 30 };
#else
enum { PLANS = 30000, SMALL = 60000, LARGE = 300 };
#endif

static unsigned long compressed, dense, infeasible;

static void random_experiment(akv_rng *rng, akv_experiment *e)
{
    akv_experiment_init_default(e);
    e->tokens_per_anchor = 1 + (uint32_t)akv_rng_below(rng, 100);
    e->anchors_only = akv_rng_below(rng, 8) == 0;
    e->rho = random_unit(rng);
    e->sinks = (uint32_t)akv_rng_below(rng, 10);
    e->pool_tokens = (uint32_t)akv_rng_below(rng, 40);
    e->incoherent = random_unit(rng);
    e->floor = 2 * random_unit(rng);
    e->query_mix = random_unit(rng);
    e->slow_angle = 30 * random_unit(rng);
    e->basis_cols = akv_rng_below(rng, 2) ? 1024 : (uint32_t)akv_rng_below(rng, 20);
    e->uniform_anchors = (int)akv_rng_below(rng, 2);
    e->num_levels = 1 + (uint32_t)akv_rng_below(rng, 15);
    uint32_t bits = 0;
    for (uint32_t l = 0; l < e->num_levels; l++)
        e->level_bits[l] = (uint16_t)(bits += 1 + (uint32_t)akv_rng_below(rng, 40));
}

/* Log-uniform in [low, high]. */
static uint64_t spread(akv_rng *rng, uint64_t low, uint64_t high)
{
    double x = log((double)low) + random_unit(rng) * (log((double)high + 1) - log((double)low));
    uint64_t n = (uint64_t)exp(x);
    return n < low ? low : n > high ? high : n;
}

static void random_shape(akv_rng *rng, akv_shape *s, uint64_t most_tokens, uint32_t most_heads, uint32_t most_dim,
                         uint32_t most_queries)
{
    akv_shape_init(s);
    s->num_tokens = spread(rng, 1, most_tokens);
    s->num_kv_heads = (uint32_t)spread(rng, 1, most_heads);
    s->gqa_group = 1 + (uint32_t)akv_rng_below(rng, 3);
    s->head_dim_k = 2 * (uint32_t)spread(rng, 1, most_dim / 2);
    s->head_dim_v = akv_rng_below(rng, 2) ? s->head_dim_k : 2 * (uint32_t)spread(rng, 1, most_dim / 2);
    s->rotary_dim = 2 * (uint32_t)akv_rng_below(rng, s->head_dim_k / 2 + 1);
    s->num_queries = (uint32_t)spread(rng, 1, most_queries);
    s->has_positions = akv_rng_below(rng, 4) == 0 && s->num_tokens > 1;
    s->dtype = (akv_dtype)akv_rng_below(rng, 3);
}

#define SHAPE_FMT "S %llu H %u dk %u dv %u W %u rot %u pos %u dtype %d keep %.9g budget %llu"
#define SHAPE_ARGS                                                                                          \
    (unsigned long long)shape->num_tokens, shape->num_kv_heads, shape->head_dim_k, shape->head_dim_v,       \
        shape->num_queries, shape->rotary_dim, shape->has_positions, (int)shape->dtype, config->keep_ratio, \
        (unsigned long long)config->budget_bytes

/* Smallest total: half a window of free anchors, no bases, no codes - or dense, where that is smaller. */
static uint64_t least_bytes(const akv_shape *shape, const akv_experiment *e)
{
    ref_ladder_sizes z = {0};
    uint64_t k = (uint64_t)shape->num_queries + shape->num_queries / 2;
    z.anchors = k < shape->num_tokens ? (uint32_t)k : (uint32_t)shape->num_tokens;
    z.levels = e->num_levels;
    uint64_t total = ref_ladder_bytes(shape, &z), whole = ref_dense_bytes(shape, shape->dtype == AKV_F32 ? 4 : 2);
    return total < whole ? total : whole;
}

/* Plans; an infeasible config is replaced by the smallest feasible one. */
static bool check_plan(const akv_shape *shape, akv_config *config, akv_plan_info *info)
{
    akv_experiment defaults;
    akv_experiment_init_default(&defaults);
    const akv_experiment *e = config->experiment != NULL ? config->experiment : &defaults;
    akv_diag diag = {0};
    akv_plan_info_init(info);
    akv_status status = akv_plan(shape, config, info, &diag);
    uint64_t whole = shape->num_tokens * shape->num_kv_heads * (shape->head_dim_k + shape->head_dim_v) * 2;
    uint64_t budget = config->budget_bytes != 0 ? config->budget_bytes : (uint64_t)(config->keep_ratio * (double)whole);
    bool window = shape->num_tokens <= shape->num_queries;
    uint64_t least = least_bytes(shape, e);
    CHECK_MSG(info->dense_bytes == whole && info->budget_bytes == budget, "dense bytes or budget; " SHAPE_FMT, SHAPE_ARGS);
    if (!window)
        CHECK_MSG(info->min_bytes == least, "min_bytes %llu, by layout.h %llu; " SHAPE_FMT,
                  (unsigned long long)info->min_bytes, (unsigned long long)least, SHAPE_ARGS);
    bool requested = config->budget_bytes == 0 && config->keep_ratio == 1;
    bool feasible = window || requested || budget >= least;
    if (!CHECK_MSG(status == (feasible ? AKV_OK : AKV_E_INFEASIBLE), "%s: %s; " SHAPE_FMT, akv_status_str(status),
                   diag.message, SHAPE_ARGS))
        return false;
    if (!feasible) {
        infeasible++;
        akv_config edge = *config;
        akv_plan_info found;
        akv_plan_info_init(&found);
        edge.budget_bytes = info->min_bytes - 1;
        CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_E_INFEASIBLE, "min_bytes - 1 is feasible; " SHAPE_FMT,
                  SHAPE_ARGS);
        if (info->min_bytes <= whole) {
            edge.budget_bytes = 0;
            edge.keep_ratio = info->min_keep_ratio;
            CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_OK, "min_keep_ratio %.17g is infeasible; " SHAPE_FMT,
                      info->min_keep_ratio, SHAPE_ARGS);
            /* the message names it, rounded up to six digits */
            char ratio[32];
            double up = fmin(1, ceil(info->min_keep_ratio * 1e6) * 1e-6);
            snprintf(ratio, sizeof ratio, "%.6f", up);
            CHECK_MSG(strstr(diag.message, ratio) != NULL, "%s is not in: %s", ratio, diag.message);
            edge.keep_ratio = strtod(ratio, NULL);
            CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_OK, "the printed ratio %s is infeasible; " SHAPE_FMT,
                      ratio, SHAPE_ARGS);
        }
        config->budget_bytes = info->min_bytes;
        akv_plan_info_init(info);
        if (!CHECK_MSG(akv_plan(shape, config, info, &diag) == AKV_OK, "min_bytes is infeasible; " SHAPE_FMT, SHAPE_ARGS))
            return false;
    }
    const akv_bytes *b = &info->bytes;
    CHECK_MSG(b->total == b->object + b->header + b->anchors + b->positions + b->index + b->coefficients +
                              b->level_maps + b->residuals + b->model + b->dense,
              "bytes by kind do not add up; " SHAPE_FMT, SHAPE_ARGS);
    if (info->kind == AKV_SEGMENT_COMPRESSED) {
        compressed++;
        CHECK_MSG(b->total <= info->budget_bytes, "%llu bytes over a budget of %llu; " SHAPE_FMT,
                  (unsigned long long)b->total, (unsigned long long)info->budget_bytes, SHAPE_ARGS);
        uint64_t k = shape->num_tokens / e->tokens_per_anchor, floor_k = shape->num_queries + shape->num_queries / 2;
        CHECK_MSG(info->num_anchors <= (k > floor_k ? k : floor_k) && info->num_anchors <= shape->num_tokens &&
                      info->num_anchors >= (floor_k < shape->num_tokens ? floor_k : shape->num_tokens),
                  "%u anchors; " SHAPE_FMT, info->num_anchors, SHAPE_ARGS);
    } else {
        dense++;
        CHECK_MSG(b->total == ref_dense_bytes(shape, shape->dtype == AKV_F32 ? 4 : 2), "dense total; " SHAPE_FMT, SHAPE_ARGS);
    }
    return true;
}

static void plans(void)
{
    akv_rng rng = akv_rng_stream(1, 2002, 0);
    for (int i = 0; i < PLANS; i++) {
        akv_shape s;
        random_shape(&rng, &s, i % 50 == 0 ? 100000000 : 300000, 64, 1024, 1024);
        akv_config config;
        akv_config_init(&config);
        CHECK(config.profile == AKV_PROFILE_DEFAULT);
        config.keep_ratio = akv_rng_below(&rng, 50) == 0 ? 1
                            : akv_rng_below(&rng, 2)     ? random_unit(&rng)
                                                         : 0.3 * random_unit(&rng);
        if (config.keep_ratio <= 0)
            config.keep_ratio = 1e-9;
        if (akv_rng_below(&rng, 5) == 0)
            config.budget_bytes = spread(&rng, 1, 100000000);
        akv_experiment e;
        random_experiment(&rng, &e);
        if (akv_rng_below(&rng, 3) == 0)
            config.experiment = &e;
        akv_plan_info info;
        check_plan(&s, &config, &info);
    }
    printf("  %lu dense, %lu compressed, %lu infeasible at first\n", dense, compressed, infeasible);
    CHECK(dense > 1000 && compressed > 5000 && infeasible > 500); /* the draw really visits every outcome */
}

/* Random shapes for real: tensors look into one pool of random numbers, so that a case costs no time to prepare. */
static void compress_many(int count, uint64_t most_tokens, uint32_t most_dim, uint64_t seed)
{
    enum { POOL = 1 << 20 };
    akv_rng rng = akv_rng_stream(seed, 2003, 0);
    uint16_t *pool16[2] = {must(malloc(2 * POOL)), must(malloc(2 * POOL))};
    float *pool32 = must(malloc(4 * (size_t)POOL));
    for (int i = 0; i < POOL; i++) {
        float x = (float)random_gauss(&rng);
        pool32[i] = x;
        pool16[0][i] = akv_f32_to_f16(x);
        pool16[1][i] = akv_f32_to_bf16(x);
    }
    double freq[512];
    compressed = dense = infeasible = 0;
    for (int i = 0; i < count; i++) {
        akv_layer l;
        akv_layer_init(&l);
        random_shape(&rng, &l.shape, most_tokens, 4, most_dim, 16);
        const akv_shape *shape = &l.shape;
        /* akv_plan does not see the RoPE table, so its bytes must hold for every one: usual, all still, all fast, mixed */
        uint64_t table = akv_rng_below(&rng, 6);
        for (uint32_t j = 0; j < shape->rotary_dim / 2; j++)
            freq[j] = table < 3    ? pow(10000, -(double)j / 64.0)
                      : table == 3 ? 0
                      : table == 4 ? -1e6 * random_unit(&rng)
                      : akv_rng_below(&rng, 2) ? 1e-9
                                               : 3 * random_unit(&rng);
        l.rope = (akv_rope){shape->rotary_dim, (akv_rope_style)akv_rng_below(&rng, 2), 1, freq};
        l.sm_scale = 1 / sqrt((double)shape->head_dim_k);
        l.first_position = (int32_t)akv_rng_below(&rng, 1000);
        int32_t *positions = must(malloc(shape->num_tokens * sizeof *positions));
        for (uint64_t p = 0; p < shape->num_tokens; p++)
            positions[p] = 3 + 2 * (int32_t)p;
        if (shape->has_positions)
            l.positions = positions;
        const void *data = shape->dtype == AKV_F32 ? (const void *)pool32 : pool16[shape->dtype == AKV_BF16];
        l.keys = akv_tensor_contiguous(data, shape->dtype, shape->num_tokens, shape->head_dim_k);
        l.values = akv_tensor_contiguous(data, shape->dtype, shape->num_tokens, shape->head_dim_v);
        l.values.data = (const uint8_t *)data + 4096;
        l.queries = akv_tensor_contiguous(pool32 + 512, AKV_F32, shape->num_queries, shape->head_dim_k);

        counter c;
        counter_init(&c);
        akv_config config0, *config = &config0;
        akv_config_init(config);
        config->allocator = &c.hooks;
        config->seed = (uint64_t)i;
        config->keep_ratio = akv_rng_below(&rng, 40) == 0 ? 1 : 0.05 + 0.95 * random_unit(&rng);
        akv_experiment e;
        random_experiment(&rng, &e);
        if (akv_rng_below(&rng, 3) == 0)
            config->experiment = &e;
        akv_plan_info info;
        bool planned = check_plan(shape, config, &info);
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        akv_status status = akv_compress(&l, config, &segment, &diag);
        if (CHECK_MSG(status == AKV_OK, "case %d: %s: %s; " SHAPE_FMT, i, akv_status_str(status), diag.message, SHAPE_ARGS) &&
            planned) {
            CHECK_MSG(c.live == 1 && c.live_bytes == info.bytes.total,
                      "case %d: %llu bytes live, planned %llu, experiment %d; " SHAPE_FMT, i,
                      (unsigned long long)c.live_bytes, (unsigned long long)info.bytes.total, config->experiment != NULL,
                      SHAPE_ARGS);
            CHECK_MSG(info.kind == AKV_SEGMENT_DENSE || c.live_bytes <= info.budget_bytes,
                      "case %d: %llu bytes over the budget of %llu; " SHAPE_FMT, i, (unsigned long long)c.live_bytes,
                      (unsigned long long)info.budget_bytes, SHAPE_ARGS);
            const akv_header *h = akv_segment_data(segment, NULL);
            if (h->kind == AKV_SEGMENT_COMPRESSED) {
                ref_ladder_sizes z = {h->num_anchors, h->num_levels, {h->basis_dim[0], h->basis_dim[1]},
                                      {h->basis_cols[0], h->basis_cols[1]}, h->code_bytes};
                CHECK_MSG(ref_ladder_bytes(shape, &z) == c.live_bytes && h->num_anchors == info.num_anchors,
                          "case %d: the sections of layout.h are %llu bytes, %llu live", i,
                          (unsigned long long)ref_ladder_bytes(shape, &z), (unsigned long long)c.live_bytes);
            }
            akv_segment_info got;
            akv_segment_info_init(&got);
            CHECK(akv_segment_get_info(segment, &got, &diag) == AKV_OK);
            CHECK(got.kind == info.kind && got.dense_reason == info.dense_reason && got.bytes.total == info.bytes.total &&
                  got.dense_bytes == info.dense_bytes);
            akv_segment *opened = NULL;
            size_t bytes;
            const void *blob = akv_segment_data(segment, &bytes);
            CHECK_MSG(akv_segment_open(blob, bytes, 0, NULL, &opened, &diag) == AKV_OK, "case %d: does not open: %s", i,
                      diag.message);
            akv_segment_release(opened);
        }
        akv_segment_release(segment);
        CHECK_MSG(c.live == 0 && c.bad_free == 0 && c.misaligned_ask == 0,
                  "case %d: %llu allocations leaked, %llu freed with another size", i, (unsigned long long)c.live,
                  (unsigned long long)c.bad_free);
        free(positions);
    }
    printf("  %d compressions: %lu dense, %lu compressed, %lu infeasible at first\n", count, dense, compressed, infeasible);
    CHECK(compressed > (unsigned long)count / 3); /* the draw is not all dense */
    free(pool16[0]);
    free(pool16[1]);
    free(pool32);
}

static void small_compressions(void)
{
    compress_many(SMALL, 150, 32, 3);
    CHECK_MSG(SMALL < 60000 || compressed >= 20000, "%lu segments were really compressed, 20000 are promised", compressed);
}

static void larger_compressions(void)
{
    compress_many(LARGE, 1400, 160, 4);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(plans);
    TEST(small_compressions);
    TEST(larger_compressions);
    return TEST_DONE();
}
