/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_regression.c - bytes, reconstruction error and attention error of fixed inputs, compared with results.csv, so
 * that a slip shows as a difference in review.
 *
 *   test_regression                 compares
 *   test_regression --write FILE    writes the table anew: build/release/tests/test_regression --write
 *                                   tests/regression/results.csv
 *
 * Always the generic kernels (AKV_CPU=generic is set here). Inputs: one captured layer, and layers drawn from fixed
 * seeds. Bytes are compared exactly. Errors are relative RMS of keys, of values, and of attention outputs for queries
 * that the codec was not shown, against the uncompressed layer; they may move by 0.5 %: the drawn inputs and
 * near-ties depend on the last bits of libm.
 */
#include "akv_test.h"
#include "cases.h"
#include "npz.h"

enum { MOST_ROWS = 64, QUERIES = 4 };
#define MOST_DRIFT 0.005

typedef struct row {
    char name[48];
    unsigned long long bytes;
    double error[3]; /* keys, values, attention */
} row;

static const char *const column[3] = {"key error", "value error", "attention error"};
static row rows[MOST_ROWS];
static int num_rows;

static double relative(double error, double size)
{
    return size > 0 ? sqrt(error / size) : 0;
}

static void measure_decode(const fixture *f, const akv_segment *segment, row *out)
{
    const akv_shape *s = &f->layer.shape;
    akv_diag diag = {AKV_OK, ""};
    double error[2] = {0, 0}, size[2] = {0, 0};
    float *k = must(malloc(s->num_tokens * s->head_dim_k * sizeof *k)),
          *v = must(malloc(s->num_tokens * s->head_dim_v * sizeof *v));
    for (uint32_t h = 0; h < s->num_kv_heads; h++) {
        CHECK_STATUS(akv_segment_decode(segment, h, 0, s->num_tokens, k, v, &diag), AKV_OK, &diag);
        for (int side = 0; side < 2; side++) {
            const uint32_t dim = side == 0 ? s->head_dim_k : s->head_dim_v;
            for (uint64_t i = 0; i < s->num_tokens * dim; i++) {
                const double x = akv_tensor_at(side == 0 ? &f->layer.keys : &f->layer.values, h, (int64_t)(i / dim),
                                               (uint32_t)(i % dim));
                const double y = side == 0 ? k[i] : v[i];
                error[side] += (x - y) * (x - y);
                size[side] += x * x;
            }
        }
    }
    out->error[0] = relative(error[0], size[0]);
    out->error[1] = relative(error[1], size[1]);
    free(k);
    free(v);
}

/* Queries that lean on some key, as the observed ones do, but others. */
static void measure_attend(const fixture *f, const akv_segment *exact, const akv_segment *segment, row *out)
{
    const akv_shape *s = &f->layer.shape;
    const uint64_t heads = (uint64_t)s->num_kv_heads * s->gqa_group, numbers = heads * QUERIES * s->head_dim_v;
    akv_rng rng = {31};
    akv_diag diag = {AKV_OK, ""};
    akv_attend_params p;
    void *memory;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = s->gqa_group;
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = QUERIES;
    p.sm_scale = f->layer.sm_scale;
    p.logit_softcap = f->layer.logit_softcap;
    p.queries = tensor_make(heads, QUERIES, s->head_dim_k, AKV_F32, LAY_CONTIGUOUS, &memory);
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t q = 0; q < QUERIES; q++) {
            const int64_t target = (int64_t)akv_rng_below(&rng, s->num_tokens);
            for (uint32_t i = 0; i < s->head_dim_k; i++)
                tensor_set(&p.queries, h, q, i,
                           0.5 * akv_tensor_at(&f->layer.keys, h / s->gqa_group, target, i) + random_gauss(&rng));
        }
    const akv_segment *list[1];
    float *got[2];
    for (int which = 0; which < 2; which++) {
        size_t bytes = 0;
        list[0] = which == 0 ? exact : segment;
        p.segments = list;
        p.num_segments = 1;
        p.out = got[which] = must(malloc(numbers * sizeof(float)));
        p.out_stride_token = s->head_dim_v;
        p.out_stride_head = QUERIES * (int64_t)s->head_dim_v;
        CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
        void *workspace = must(aligned_alloc(64, (bytes + 64) / 64 * 64));
        CHECK_STATUS(akv_attend(&p, workspace, bytes, &diag), AKV_OK, &diag);
        free(workspace);
    }
    double error = 0, size = 0;
    for (uint64_t i = 0; i < numbers; i++) {
        error += ((double)got[0][i] - got[1][i]) * ((double)got[0][i] - got[1][i]);
        size += (double)got[0][i] * got[0][i];
    }
    out->error[2] = relative(error, size);
    free(got[0]);
    free(got[1]);
    free(memory);
}

static void measure_layer(const char *name, fixture *f)
{
    static const double ratios[] = {3, 6, 12};
    akv_segment *exact = NULL;
    akv_diag diag = {AKV_OK, ""};
    CHECK_STATUS(akv_segment_create_dense(&f->layer, NULL, &exact, &diag), AKV_OK, &diag);
    for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++)
        for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
            row *r = &rows[num_rows];
            akv_segment *segment = NULL;
            akv_segment_info info;
            akv_segment_info_init(&info);
            f->config.profile = (akv_profile)profile;
            f->config.keep_ratio = 1 / ratios[i];
            snprintf(r->name, sizeof r->name, "%s %s %gx", name, profile == AKV_PROFILE_PAPER ? "paper" : "default",
                     ratios[i]);
            const akv_status status = akv_compress(&f->layer, &f->config, &segment, &diag);
            if (status == AKV_E_INFEASIBLE) /* a small shape: no row */
                continue;
            CHECK_MSG(status == AKV_OK, "%s: %s", r->name, diag.message);
            CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
            r->bytes = info.bytes.total;
            measure_decode(f, segment, r);
            measure_attend(f, exact, segment, r);
            num_rows++;
            akv_segment_release(segment);
        }
    akv_segment_release(exact);
}

static void measure(void)
{
    static const spec specs[] = {
        {.name = "512x2x64",
         .S = 512,
         .H = 2,
         .G = 4,
         .dk = 64,
         .dv = 64,
         .W = 32,
         .rotary = 64,
         .dtype = AKV_F16,
         .seed = 1},
        {.name = "1100x1x128",
         .S = 1100,
         .H = 1,
         .G = 4,
         .dk = 128,
         .dv = 128,
         .W = 32,
         .rotary = 128,
         .dtype = AKV_BF16,
         .seed = 2},
        {.name = "700x2x80-gaps",
         .S = 700,
         .H = 2,
         .G = 1,
         .dk = 80,
         .dv = 64,
         .W = 16,
         .rotary = 40,
         .style = AKV_ROPE_INTERLEAVED,
         .softcap = 30,
         .gaps = 1,
         .dtype = AKV_F16,
         .seed = 3},
    };
    fixture f;
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        fixture_make(&specs[i], &f);
        measure_layer(specs[i].name, &f);
        fixture_free(&f);
    }
    if (!CHECK_MSG(fixture_from_npz(AKV_TEST_DATA "/layer12_tail.npz", &f),
                   "tests/data/layer12_tail.npz cannot be read"))
        return;
    measure_layer("captured", &f);
    fixture_free(&f);
}

static bool read_row(FILE *file, row *r)
{
    char line[256];
    while (fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "%47[^,],%llu,%lf,%lf,%lf", r->name, &r->bytes, &r->error[0], &r->error[1], &r->error[2]) == 5)
            return true;
    return false;
}

static void compare(void)
{
    FILE *file = fopen(AKV_REGRESSION, "r");
    row want;
    int at = 0;
    if (!CHECK_MSG(file != NULL, AKV_REGRESSION " is missing"))
        return;
    measure();
    for (; read_row(file, &want); at++) {
        if (!CHECK_MSG(at < num_rows && strcmp(rows[at].name, want.name) == 0, "row \"%s\" was not measured here",
                       want.name))
            break;
        const row *got = &rows[at];
        CHECK_MSG(got->bytes == want.bytes, "%s: %llu bytes, were %llu (%+lld)", want.name, got->bytes, want.bytes,
                  (long long)(got->bytes - want.bytes));
        for (int i = 0; i < 3; i++)
            CHECK_MSG(fabs(got->error[i] - want.error[i]) <= MOST_DRIFT * want.error[i],
                      "%s: %s %.5f, was %.5f (%+.2f %%)", want.name, column[i], got->error[i], want.error[i],
                      100 * (got->error[i] / want.error[i] - 1));
    }
    fclose(file);
    CHECK_MSG(at == num_rows && at >= 18, "%d rows measured, %d in the table", num_rows, at);
}

int main(int argc, char **argv)
{
    setenv("AKV_CPU", "generic", 1); /* before anything asks */
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        measure();
        FILE *file = fopen(argv[2], "w");
        if (file == NULL || test_.failures != 0)
            return 1;
        fprintf(file, "layer profile ratio,bytes,key error,value error,attention error\n");
        for (int i = 0; i < num_rows; i++)
            fprintf(file, "%s,%llu,%.5f,%.5f,%.5f\n", rows[i].name, rows[i].bytes, rows[i].error[0], rows[i].error[1],
                    rows[i].error[2]);
        return fclose(file) != 0;
    }
    TEST_INIT(argc, argv);
    TEST(compare);
    return TEST_DONE();
}
