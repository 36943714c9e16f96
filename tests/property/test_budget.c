/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_budget.c - bytes. Over random shapes and keep ratios: what akv_compress really allocates equals akv_plan's total
 * and the reference's accounting, a compressed segment never exceeds its budget, and an infeasible budget names the
 * smallest feasible one, which works while one byte less does not.
 */
#include "akv_test.h"
#include "cases.h"

/* A sanitizer build looks for bad accesses, which a tenth of the cases shows as well, and takes fifty times as long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PLANS = 20000, SMALL = 6000, LARGE = 40 };
#else
enum { PLANS = 20000, SMALL = 65000, LARGE = 400 };
#endif

static unsigned long kinds[2], infeasible, reasons[5], misnamed;

static void random_experiment(akv_rng *rng, akv_experiment *e)
{
    akv_experiment_init(e);
    e->tokens_per_anchor = 1 + (uint32_t)akv_rng_below(rng, 200);
    e->anchors_only = akv_rng_below(rng, 4) == 0;
    e->rank = (akv_rank)akv_rng_below(rng, 5);
    e->equal_head_budgets = (int)akv_rng_below(rng, 2);
    e->code_rule = (akv_code_rule)akv_rng_below(rng, 2);
    e->scale_rule = (akv_scale_rule)akv_rng_below(rng, 2);
    e->anchor_space = (akv_anchor_space)akv_rng_below(rng, 2);
    e->rho = random_unit(rng);
    e->pool_width = 1 + 2 * (uint32_t)akv_rng_below(rng, 5);
}

/* Log-uniform in [low, high]. */
static uint64_t spread(akv_rng *rng, uint64_t low, uint64_t high)
{
    double x = log((double)low) + random_unit(rng) * (log((double)high + 1) - log((double)low));
    uint64_t n = (uint64_t)exp(x);
    return n < low ? low : n > high ? high : n;
}

/* The message must hold a number which, taken as the keep ratio, is feasible and not wasteful. */
static void check_message(const akv_shape *shape, const akv_config *config, const char *message, double min_keep)
{
    int named = 0;
    for (const char *s = message; *s != 0 && !named; s++) {
        if (*s < '0' || *s > '9' || (s > message && (s[-1] == '.' || (s[-1] >= '0' && s[-1] <= '9'))))
            continue;
        double x = strtod(s, NULL);
        /* printed with few digits, rounded up: within a percent, or the last of six decimals */
        if (x >= min_keep && x <= fmin(1, 1.01 * min_keep + 2e-6)) {
            akv_config again = *config;
            akv_plan_info info;
            akv_plan_info_init(&info);
            again.budget_bytes = 0;
            again.keep_ratio = x;
            named = akv_plan(shape, &again, &info, NULL) == AKV_OK;
        }
    }
    if (!named && misnamed++ < 2)
        printf("  smallest keep ratio %.9g, the message says: %s\n", min_keep, message);
}

/* Plans and compares with the reference; an infeasible config is replaced by the smallest feasible one. False: nothing
 * to do. */
static bool check_plan(const akv_shape *shape, akv_config *config, akv_plan_info *info)
{
    akv_diag diag = {0};
    akv_plan_info_init(info);
    akv_status status = akv_plan(shape, config, info, &diag);
    ref_plan ref = ref_make_plan(shape, config->keep_ratio, config->budget_bytes, config->experiment);
    const char *what = "plan";
#define SHAPE_FMT "S %llu H %u dk %u dv %u W %u rot %u pos %u dtype %d keep %.9g budget %llu"
#define SHAPE_ARGS                                                                                          \
    (unsigned long long)shape->num_tokens, shape->num_kv_heads, shape->head_dim_k, shape->head_dim_v,       \
        shape->num_queries, shape->rotary_dim, shape->has_positions, (int)shape->dtype, config->keep_ratio, \
        (unsigned long long)config->budget_bytes
    if (!CHECK_MSG(status == (ref.feasible ? AKV_OK : AKV_E_INFEASIBLE), "%s: %s: %s; " SHAPE_FMT, what,
                   akv_status_str(status), diag.message, SHAPE_ARGS))
        return false;
    CHECK_MSG(info->dense_bytes == ref.dense_bytes && info->budget_bytes == ref.budget,
              "dense bytes or budget; " SHAPE_FMT, SHAPE_ARGS);
    if (shape->num_tokens > shape->num_queries)
        CHECK_MSG(info->min_bytes == ref.min_bytes, "min_bytes %llu, reference %llu; " SHAPE_FMT,
                  (unsigned long long)info->min_bytes, (unsigned long long)ref.min_bytes, SHAPE_ARGS);
    if (status != AKV_OK) {
        infeasible++;
        /* exactly the smallest feasible: by bytes, by ratio; one byte less fails */
        akv_config edge = *config;
        edge.budget_bytes = info->min_bytes;
        akv_plan_info found;
        akv_plan_info_init(&found);
        CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_OK, "min_bytes %llu is infeasible; " SHAPE_FMT,
                  (unsigned long long)info->min_bytes, SHAPE_ARGS);
        edge.budget_bytes = info->min_bytes - 1;
        CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_E_INFEASIBLE,
                  "min_bytes - 1 = %llu is feasible; " SHAPE_FMT, (unsigned long long)edge.budget_bytes, SHAPE_ARGS);
        if (info->min_bytes <= ref.dense_bytes) {
            edge.budget_bytes = 0;
            edge.keep_ratio = info->min_keep_ratio;
            CHECK_MSG(info->min_keep_ratio > 0 && info->min_keep_ratio <= 1 &&
                          akv_plan(shape, &edge, &found, NULL) == AKV_OK,
                      "min_keep_ratio %.17g is infeasible; " SHAPE_FMT, info->min_keep_ratio, SHAPE_ARGS);
            /* a ratio whose budget is a byte less */
            edge.keep_ratio = ((double)info->min_bytes - 1) / (double)ref.dense_bytes;
            if (floor(edge.keep_ratio * (double)ref.dense_bytes) < (double)info->min_bytes && edge.keep_ratio > 0)
                CHECK_MSG(akv_plan(shape, &edge, &found, NULL) == AKV_E_INFEASIBLE,
                          "a smaller ratio is feasible; " SHAPE_FMT, SHAPE_ARGS);
            check_message(shape, config, diag.message, info->min_keep_ratio);
        }
        config->budget_bytes = info->min_bytes;
        akv_plan_info_init(info);
        status = akv_plan(shape, config, info, &diag);
        ref = ref_make_plan(shape, config->keep_ratio, config->budget_bytes, config->experiment);
        if (status != AKV_OK)
            return false;
    }
    kinds[info->kind]++;
    reasons[info->dense_reason]++;
    CHECK_MSG(info->kind == ref.kind && info->dense_reason == ref.dense_reason,
              "kind %d reason %d, reference %d %d; " SHAPE_FMT, (int)info->kind, (int)info->dense_reason, (int)ref.kind,
              (int)ref.dense_reason, SHAPE_ARGS);
    CHECK_MSG(info->bytes.total == ref.total, "total %llu, reference %llu; " SHAPE_FMT,
              (unsigned long long)info->bytes.total, (unsigned long long)ref.total, SHAPE_ARGS);
    CHECK_MSG(info->num_anchors == ref.num_anchors && info->residuals_k == ref.residuals[0] &&
                  info->residuals_v == ref.residuals[1],
              "k %u residuals %llu + %llu, reference %u, %llu + %llu; " SHAPE_FMT, info->num_anchors,
              (unsigned long long)info->residuals_k, (unsigned long long)info->residuals_v, ref.num_anchors,
              (unsigned long long)ref.residuals[0], (unsigned long long)ref.residuals[1], SHAPE_ARGS);
    if (info->kind == AKV_SEGMENT_COMPRESSED)
        CHECK_MSG(info->bytes.total <= info->budget_bytes, "%llu bytes over a budget of %llu; " SHAPE_FMT,
                  (unsigned long long)info->bytes.total, (unsigned long long)info->budget_bytes, SHAPE_ARGS);
    const akv_bytes *b = &info->bytes;
    CHECK_MSG(b->total == b->object + b->header + b->anchors + b->positions + b->index + b->coefficients +
                              b->level_maps + b->residuals + b->model + b->dense,
              "bytes by kind do not add up; " SHAPE_FMT, SHAPE_ARGS);
    return true;
}

static void plans(void)
{
    const int thin = (int)test_thin();
    akv_rng rng = akv_rng_stream(1, 2000, 0);
    for (int i = 0; i < PLANS / thin; i++) {
        akv_shape s;
        akv_shape_init(&s);
        s.num_tokens = spread(&rng, 1, i % 50 == 0 ? 100000000 : 300000);
        s.num_kv_heads = (uint32_t)spread(&rng, 1, 64);
        s.gqa_group = 1 + (uint32_t)akv_rng_below(&rng, 8);
        s.head_dim_k = 2 * (uint32_t)spread(&rng, 1, 512);
        s.head_dim_v = akv_rng_below(&rng, 2) ? s.head_dim_k : 2 * (uint32_t)spread(&rng, 1, 512);
        s.rotary_dim = 2 * (uint32_t)akv_rng_below(&rng, s.head_dim_k / 2 + 1);
        s.num_queries = (uint32_t)spread(&rng, 1, 1024);
        s.has_positions = akv_rng_below(&rng, 4) == 0;
        s.dtype = (akv_dtype)akv_rng_below(&rng, 3);
        akv_config config;
        akv_config_init(&config);
        config.profile = AKV_PROFILE_PAPER;
        config.keep_ratio = akv_rng_below(&rng, 50) == 0 ? 1
                            : akv_rng_below(&rng, 2)     ? random_unit(&rng)
                                                         : 0.3 * random_unit(&rng);
        if (config.keep_ratio <= 0)
            config.keep_ratio = 1e-9;
        if (akv_rng_below(&rng, 5) == 0)
            config.budget_bytes = spread(&rng, 1, 100000000);
        akv_experiment e;
        random_experiment(&rng, &e);
        if (akv_rng_below(&rng, 4) == 0)
            config.experiment = &e;
        akv_plan_info info;
        check_plan(&s, &config, &info);
    }
    printf("  %lu dense, %lu compressed, %lu infeasible at first; dense because: asked %lu, fits %lu, window %lu\n",
           kinds[0], kinds[1], infeasible, reasons[1], reasons[2], reasons[3]);
    CHECK_MSG(misnamed == 0, "%lu messages name no feasible keep ratio", misnamed);
    CHECK(kinds[0] > 1000u / thin && kinds[1] > 5000u / thin && infeasible > 1000u / thin); /* the draw really visits every outcome */
}

/* Random shapes for real: tensors look into one pool of random numbers, so that a case costs no time to prepare. */
static void compress_many(int count, uint64_t most_tokens, uint32_t most_dim, uint64_t seed)
{
    enum { POOL = 1 << 20 };
    akv_rng rng = akv_rng_stream(seed, 2001, 0);
    uint16_t *pool16[2] = {must(malloc(2 * POOL)), must(malloc(2 * POOL))};
    float *pool32 = must(malloc(4 * (size_t)POOL));
    for (int i = 0; i < POOL; i++) {
        float x = (float)random_gauss(&rng);
        pool32[i] = x;
        pool16[0][i] = akv_f32_to_f16(x);
        pool16[1][i] = akv_f32_to_bf16(x);
    }
    double freq[512];
    for (int j = 0; j < 512; j++)
        freq[j] = pow(10000, -j / 64.0);
    memset(kinds, 0, sizeof kinds);
    memset(reasons, 0, sizeof reasons);
    infeasible = misnamed = 0;
    uint64_t allocated = 0;
    for (int i = 0; i < count; i++) {
        akv_layer l;
        akv_layer_init(&l);
        akv_shape *s = &l.shape;
        s->num_tokens = spread(&rng, 1, most_tokens);
        s->num_kv_heads = 1 + (uint32_t)akv_rng_below(&rng, 4);
        s->gqa_group = 1 + (uint32_t)akv_rng_below(&rng, 3);
        s->head_dim_k = 2 * (uint32_t)spread(&rng, 1, most_dim / 2);
        s->head_dim_v = akv_rng_below(&rng, 2) ? s->head_dim_k : 2 * (uint32_t)spread(&rng, 1, most_dim / 2);
        s->rotary_dim = 2 * (uint32_t)akv_rng_below(&rng, s->head_dim_k / 2 + 1);
        s->num_queries = (uint32_t)spread(&rng, 1, 16);
        s->has_positions = akv_rng_below(&rng, 4) == 0;
        s->dtype = (akv_dtype)akv_rng_below(&rng, 3);
        l.rope = (akv_rope){s->rotary_dim, (akv_rope_style)akv_rng_below(&rng, 2), 1, freq};
        l.sm_scale = 1 / sqrt((double)s->head_dim_k);
        l.first_position = (int32_t)akv_rng_below(&rng, 1000);
        int32_t *positions = must(malloc(s->num_tokens * sizeof *positions));
        for (uint64_t p = 0; p < s->num_tokens; p++)
            positions[p] = 3 + 2 * (int32_t)p;
        if (s->has_positions && s->num_tokens == 1)
            s->has_positions = 0; /* one position is always consecutive */
        if (s->has_positions)
            l.positions = positions;
        const void *data = s->dtype == AKV_F32 ? (const void *)pool32 : pool16[s->dtype == AKV_BF16];
        l.keys = akv_tensor_contiguous(data, s->dtype, s->num_tokens, s->head_dim_k);
        l.values = akv_tensor_contiguous(data, s->dtype, s->num_tokens, s->head_dim_v);
        l.values.data = (const uint8_t *)data + 4096;
        l.queries = akv_tensor_contiguous(pool32 + 512, AKV_F32, s->num_queries, s->head_dim_k);

        counter c;
        counter_init(&c);
        akv_config config;
        akv_config_init(&config);
        config.profile = AKV_PROFILE_PAPER;
        config.allocator = &c.hooks;
        config.seed = (uint64_t)i;
        config.keep_ratio = akv_rng_below(&rng, 40) == 0 ? 1 : 0.05 + 0.95 * random_unit(&rng);
        akv_experiment e;
        random_experiment(&rng, &e);
        if (akv_rng_below(&rng, 4) == 0)
            config.experiment = &e;
        akv_plan_info info;
        bool planned = check_plan(s, &config, &info);
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        akv_status status = akv_compress(&l, &config, &segment, &diag);
        if (CHECK_MSG(status == AKV_OK, "case %d: %s: %s; " SHAPE_FMT, i, akv_status_str(status), diag.message,
                      (unsigned long long)s->num_tokens, s->num_kv_heads, s->head_dim_k, s->head_dim_v, s->num_queries,
                      s->rotary_dim, s->has_positions, (int)s->dtype, config.keep_ratio,
                      (unsigned long long)config.budget_bytes) &&
            planned) {
            CHECK_MSG(c.live == 1 && c.live_bytes == info.bytes.total,
                      "case %d: %llu allocations of %llu bytes live, planned %llu", i, (unsigned long long)c.live,
                      (unsigned long long)c.live_bytes, (unsigned long long)info.bytes.total);
            CHECK_MSG(info.kind == AKV_SEGMENT_DENSE || c.live_bytes <= info.budget_bytes, "case %d: over the budget",
                      i);
            akv_segment_info got;
            akv_segment_info_init(&got);
            CHECK(akv_segment_get_info(segment, &got, &diag) == AKV_OK);
            CHECK_MSG(memcmp(&got.bytes, &info.bytes, sizeof got.bytes) == 0,
                      "case %d: bytes by kind of the segment and of the plan differ", i);
            CHECK(got.kind == info.kind && got.dense_reason == info.dense_reason &&
                  got.num_anchors == info.num_anchors && got.residuals_k == info.residuals_k &&
                  got.residuals_v == info.residuals_v && got.dense_bytes == info.dense_bytes);
            allocated += c.live_bytes;
        }
        akv_segment_release(segment);
        CHECK_MSG(c.live == 0 && c.bad_free == 0 && c.misaligned_ask == 0,
                  "case %d: %llu allocations leaked, %llu freed with another size", i, (unsigned long long)c.live,
                  (unsigned long long)c.bad_free);
        free(positions);
    }
    printf("  %d compressions, %llu bytes: %lu dense, %lu compressed, %lu infeasible at first\n", count,
           (unsigned long long)allocated, kinds[0], kinds[1], infeasible);
    CHECK_MSG(misnamed == 0, "%lu messages name no feasible keep ratio", misnamed);
    CHECK(kinds[1] > (unsigned long)count / 3); /* the draw is not all dense */
    free(pool16[0]);
    free(pool16[1]);
    free(pool32);
}

static void small_compressions(void)
{
    compress_many(SMALL / (int)test_thin(), 150, 32, 3);
    CHECK_MSG(SMALL < 65000 || test_thin() > 1 || kinds[1] >= 20000, "%lu segments were really compressed, 20000 are promised", kinds[1]);
}

static void larger_compressions(void)
{
    compress_many(LARGE / (int)test_thin(), 1400, 160, 4);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(plans);
    TEST(small_compressions);
    TEST(larger_compressions);
    return TEST_DONE();
}
