/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_attend.c - akv_attend against ref_attend over a table of shapes, segments, tails and masks. The tolerance of
 * each output row is computed by the reference from that row's own norms (docs/numerics.md, "attention").
 */
#include "akv_test.h"
#include "cases.h"

typedef struct attend_case {
    const char *name;
    uint32_t H, G, dk, dv, T;
    uint64_t segment_tokens[4]; /* 0 ends */
    char segment_kind[5];       /* per segment: c compressed, l ladder, p plain codes, r anchors after the rotation, 3/h/b dense
                                   f32/f16/bf16 */
    uint32_t anchors;           /* of compressed ones */
    double density;             /* of residuals */
    uint64_t tail;
    char mask;                  /* 0 causal, m random mask with hidden tokens, a everything hidden */
    double softcap;
    int sinks;
    uint32_t rotary;
    akv_rope_style style;
    double magnitude;
    int32_t first_position;
    int gaps;
    akv_dtype dtype;            /* of queries and tail */
    int layout;
    int64_t shift;              /* segment i stands shift * (i + 1) further on than it was made for, every other one back */
    uint64_t seed;
} attend_case;

typedef struct setup {
    akv_attend_params params;
    akv_segment *segments[4];
    void *memory[4];
    float *sinks, *out, *max, *sum;
    uint64_t out_floats;
    int64_t shifts[4];
    double inv_freq[512];
    akv_rope rope;
} setup;

/*
 * A row may be off by 8 times the largest error that plain fp32 loops make anywhere in the case: the compressed form
 * sums two parts larger than their sum, and turns and transforms them. Never more than the rounding bound; and never
 * asked to be closer than a few roundings of the largest weighted value. Ladder segments may be off by the reference's
 * estimate of their rounding to 16 bits besides.
 */
#define PLAIN_FACTOR 8
/* How far an output row may be off, and the largest error of a logit: kernels of lower precision say so by macros of their own. */
#ifndef ATTEND_TOLERANCE
#  define ATTEND_TOLERANCE(params, row, plain) fmin((row)->tol_out, PLAIN_FACTOR * (plain) + 4 * REF_U + (row)->whole)
#  define ATTEND_LOGIT_TOLERANCE(params, row) ((row)->tol_logit)
#endif
/* Larger heads than this are refused, by a back end that does not cover all that segments may have. */
#ifndef ATTEND_MAX_HEAD_DIM
#  define ATTEND_MAX_HEAD_DIM UINT32_MAX
#endif
static double worst_ratio; /* largest error / tolerance seen: how much room the tolerance leaves */

static void fill(const akv_tensor *t, uint64_t heads, uint64_t tokens, uint32_t dim, double size, akv_rng *rng)
{
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t p = 0; p < tokens; p++)
            for (uint32_t i = 0; i < dim; i++)
                tensor_set(t, h, p, i, size * random_gauss(rng));
}

static void setup_make(const attend_case *c, setup *s)
{
    akv_rng rng = akv_rng_stream(c->seed, 1002, 0);
    memset(s, 0, sizeof *s);
    akv_attend_params *p = &s->params;
    akv_attend_params_init(p);
    p->num_kv_heads = c->H;
    p->gqa_group = c->G;
    p->head_dim_k = c->dk;
    p->head_dim_v = c->dv;
    p->num_queries = c->T;
    p->sm_scale = 1 / sqrt((double)c->dk);
    p->logit_softcap = c->softcap;
    int32_t at = c->first_position;
    for (int i = 0; i < 4 && c->segment_tokens[i] > 0; i++) {
        spec sp = {.name = c->name,
                   .S = c->segment_tokens[i],
                   .H = c->H,
                   .G = c->G,
                   .dk = c->dk,
                   .dv = c->dv,
                   .W = 1,
                   .rotary = c->rotary,
                   .style = c->style,
                   .magnitude = c->magnitude,
                   .softcap = c->softcap,
                   .first_position = at,
                   .gaps = c->gaps,
                   .seed = c->seed + 17 * (uint64_t)i,
                   .keep = 1};
        at += (int32_t)(sp.S * (c->gaps ? 4 : 1));
        char kind = c->segment_kind[i];
        if (kind == 'c' || kind == 'p' || kind == 'r') {
            uint32_t anchors = c->anchors < sp.S ? c->anchors : (uint32_t)sp.S;
            uint32_t flags = kind == 'p' ? AKV_FLAG_PLAIN_CODES : kind == 'r' ? AKV_FLAG_ANCHORS_POST_ROPE : 0;
            s->segments[i] = random_segment(&sp, anchors, c->density, flags, sp.seed);
        } else if (kind == 'l') {
            uint32_t anchors = c->anchors < sp.S ? c->anchors : (uint32_t)sp.S;
            s->segments[i] = random_ladder_segment(&sp, anchors, c->density, sp.seed);
        } else {
            sp.dtype = kind == '3' ? AKV_F32 : kind == 'h' ? AKV_F16 : AKV_BF16;
            fixture f;
            fixture_make(&sp, &f);
            akv_diag diag = {0};
            CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &s->segments[i], &diag), AKV_OK, &diag);
            must(s->segments[i]);
            fixture_free(&f);
        }
        p->num_segments++;
    }
    p->segments = (const akv_segment *const *)s->segments;
    if (c->shift != 0) {
        for (int i = 0; i < 4; i++)
            s->shifts[i] = (i % 2 ? -1 : 1) * c->shift * (i + 1);
        for (uint32_t j = 0; j < c->rotary / 2; j++)
            s->inv_freq[j] = pow(1e4, -2.0 * j / c->rotary);
        s->rope = (akv_rope){c->rotary, c->style, 1.7, s->inv_freq}; /* lengths were scaled already: the magnitude must not matter */
        p->segment_shifts = s->shifts;
        p->rope = &s->rope;
    }
    uint64_t QH = (uint64_t)c->H * c->G;
    p->queries = tensor_make(QH, c->T, c->dk, c->dtype, c->layout, &s->memory[0]);
    fill(&p->queries, QH, c->T, c->dk, 2, &rng);
    p->tail_tokens = c->tail;
    if (c->tail > 0) {
        p->tail_keys = tensor_make(c->H, c->tail, c->dk, c->dtype, (c->layout + 1) % LAY_COUNT, &s->memory[1]);
        p->tail_values = tensor_make(c->H, c->tail, c->dv, c->dtype, (c->layout + 2) % LAY_COUNT, &s->memory[2]);
        fill(&p->tail_keys, c->H, c->tail, c->dk, 1, &rng);
        fill(&p->tail_values, c->H, c->tail, c->dv, 1, &rng);
    }
    if (c->mask != 0 && c->tail > 0) {
        p->tail_mask = tensor_make(1, c->T, (uint32_t)c->tail, c->dtype, c->layout, &s->memory[3]);
        for (uint64_t t = 0; t < c->T; t++)
            for (uint64_t j = 0; j < c->tail; j++)
                tensor_set(&p->tail_mask, 0, t, j,
                           c->mask == 'a' || random_unit(&rng) < 0.4 ? -INFINITY : -2 * random_unit(&rng));
    }
    if (c->sinks) {
        s->sinks = must(malloc(QH * sizeof *s->sinks));
        for (uint64_t h = 0; h < QH; h++)
            s->sinks[h] = (float)(3 * random_gauss(&rng));
        p->sinks = s->sinks;
    }
    /* strided output with a canary in the gaps */
    p->out_stride_token = (int64_t)c->dv + 3;
    p->out_stride_head = (int64_t)c->T * p->out_stride_token + 5;
    s->out_floats = QH * (uint64_t)p->out_stride_head;
    s->out = must(malloc(s->out_floats * sizeof *s->out));
    for (uint64_t i = 0; i < s->out_floats; i++)
        s->out[i] = 12345;
    s->max = must(malloc(QH * c->T * sizeof *s->max));
    s->sum = must(malloc(QH * c->T * sizeof *s->sum));
    p->out = s->out;
    p->state_max = s->max;
    p->state_sum = s->sum;
}

static void setup_free(setup *s)
{
    for (int i = 0; i < 4; i++) {
        akv_segment_release(s->segments[i]);
        free(s->memory[i]);
    }
    free(s->sinks);
    free(s->out);
    free(s->max);
    free(s->sum);
}

/* Runs with a workspace of exactly the size asked for, filled with garbage. */
static akv_status attend(const akv_attend_params *p, akv_diag *diag)
{
    size_t bytes = 0;
    akv_status status = akv_attend_workspace_bytes(p, &bytes, diag);
    if (status != AKV_OK)
        return status;
    uint8_t *ws = must(aligned_alloc(64, (bytes + 127) / 64 * 64));
    memset(ws, 0xa5, (bytes + 127) / 64 * 64);
    status = akv_attend(p, ws, bytes, diag);
    int intact = 1;
    for (size_t i = bytes; i < (bytes + 127) / 64 * 64; i++)
        intact &= ws[i] == 0xa5;
    CHECK_MSG(intact, "the workspace was written beyond its end");
    free(ws);
    return status;
}

static void run(const attend_case *c)
{
    setup s;
    setup_make(c, &s);
    const akv_attend_params *p = &s.params;
    uint64_t rows = (uint64_t)c->H * c->G * c->T;
    akv_diag diag = {0};
    if (c->dk > ATTEND_MAX_HEAD_DIM || c->dv > ATTEND_MAX_HEAD_DIM) {
        CHECK_STATUS(attend(p, &diag), AKV_E_UNSUPPORTED, &diag);
        setup_free(&s);
        return;
    }
    CHECK_STATUS(attend(p, &diag), AKV_OK, &diag);
    double *want = must(malloc(rows * c->dv * sizeof *want));
    ref_row_result *row = must(malloc(rows * sizeof *row));
    must(ref_attend(p, want, row) ? want : NULL);
    double plain = 0;
    for (uint64_t r = 0; r < rows; r++)
        plain = fmax(plain, row[r].plain);
    for (uint64_t h = 0; h < (uint64_t)c->H * c->G; h++)
        for (uint64_t t = 0; t < c->T; t++) {
            uint64_t r = h * c->T + t;
            double tol = ATTEND_TOLERANCE(p, &row[r], plain);
            const float *got = s.out + (int64_t)h * p->out_stride_head + (int64_t)t * p->out_stride_token;
            double worst = 0;
            for (uint32_t i = 0; i < c->dv; i++) {
                double off = fabs(got[i] - want[r * c->dv + i]);
                worst = off > worst || isnan(off) ? off : worst;
            }
            CHECK_NEAR(worst, 0, tol, "%s: out of query head %llu row %llu", c->name, (unsigned long long)h,
                       (unsigned long long)t);
            if (tol > 0 && worst / tol > worst_ratio) {
                worst_ratio = worst / tol;
                if (getenv("AKV_TEST_VERBOSE") != NULL)
                    printf("  %s: %.3g of %.3g, plain %.3g, bound %.3g\n", c->name, worst, tol, plain, row[r].tol_out);
            }
            if (row[r].lse == -INFINITY) {
                CHECK_MSG(s.max[r] == -INFINITY && s.sum[r] == 0, "%s: a row that sees nothing has state (%g, %g)",
                          c->name, s.max[r], s.sum[r]);
                continue;
            }
            CHECK_NEAR(
                s.max[r] + log(s.sum[r]), row[r].lse,
                ATTEND_LOGIT_TOLERANCE(p, &row[r]) + 4 * REF_U * (fabs(row[r].lse) + fabs(row[r].max == -INFINITY ? 0 : row[r].max)),
                "%s: log-sum-exp of query head %llu row %llu", c->name, (unsigned long long)h, (unsigned long long)t);
            /* the sink may or may not be folded into the maximum */
            double sink = c->sinks ? s.sinks[h] : -INFINITY;
            double near_max = fabs(s.max[r] - row[r].max), near_sink = fabs(s.max[r] - fmax(row[r].max, sink));
            CHECK_MSG(fmin(near_max, near_sink) <= ATTEND_LOGIT_TOLERANCE(p, &row[r]) + 4 * REF_U * fabs(s.max[r]),
                      "%s: max %.9g, largest logit %.9g", c->name, s.max[r], row[r].max);
        }
    /* nothing but the rows was written */
    uint64_t untouched = 0;
    for (uint64_t i = 0; i < s.out_floats; i++)
        untouched += s.out[i] == 12345;
    CHECK_MSG(untouched == s.out_floats - rows * c->dv, "%s: the gaps of the output were written", c->name);

    /* every executor gives the same bits */
    float *first = must(malloc(s.out_floats * sizeof *first));
    memcpy(first, s.out, s.out_floats * sizeof *first);
    for (uint32_t threads = 0; threads <= 3; threads++) {
        akv_threads *pool = NULL;
        if (threads == 0)
            s.params.executor = &reversed_executor;
        else {
            CHECK_STATUS(akv_threads_create(threads, &pool, &diag), AKV_OK, &diag);
            s.params.executor = akv_threads_executor(pool);
        }
        for (uint64_t i = 0; i < s.out_floats; i++)
            s.out[i] = 12345;
        CHECK_STATUS(attend(p, &diag), AKV_OK, &diag);
        CHECK_MSG(memcmp(first, s.out, s.out_floats * sizeof *first) == 0, "%s: %u threads give other bits", c->name,
                  threads);
        akv_threads_destroy(pool);
    }
    free(first);
    free(want);
    free(row);
    setup_free(&s);
}

#define CASE(...)       \
    run(&(attend_case){ \
        .H = 2, .G = 2, .dk = 64, .dv = 64, .T = 1, .anchors = 20, .density = 0.3, .rotary = 64, __VA_ARGS__})

static void head_dims(void)
{
    const uint32_t dims[][2] = {{64, 64},   {80, 80},   {96, 96},  {112, 112}, {128, 128}, {192, 192},
                                {256, 256}, {192, 128}, {64, 128}, {6, 10},    {2, 2}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "dk %u dv %u", dims[i][0], dims[i][1]);
        CASE(.name = name, .dk = dims[i][0], .dv = dims[i][1], .rotary = dims[i][0], .segment_tokens = {300},
             .segment_kind = "c", .seed = i);
        CASE(.name = name, .dk = dims[i][0], .dv = dims[i][1], .rotary = dims[i][0], .segment_tokens = {200, 50},
             .segment_kind = "ch", .tail = 9, .T = 5, .style = AKV_ROPE_INTERLEAVED, .seed = i + 100);
    }
}

static void groups_and_heads(void)
{
    const uint32_t group[] = {1, 2, 3, 4, 6, 8}, heads[] = {1, 2, 3, 8};
    for (size_t i = 0; i < 6; i++)
        for (size_t j = 0; j < 4; j++) {
            char name[64];
            snprintf(name, sizeof name, "G %u H %u", group[i], heads[j]);
            CASE(.name = name, .G = group[i], .H = heads[j], .T = 1 + (uint32_t)(i + j) % 3,
                 .segment_tokens = {150, 40}, .segment_kind = "c3", .tail = 4, .seed = i * 10 + j);
        }
}

static void lengths(void)
{
    const uint64_t list[] = {1, 33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 2049, 5000};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "S %llu", (unsigned long long)list[i]);
        CASE(.name = name, .segment_tokens = {list[i]}, .segment_kind = "c", .dk = 128, .dv = 128, .rotary = 128,
             .seed = i);
        CASE(.name = name, .segment_tokens = {list[i]}, .segment_kind = "h", .seed = i);
        CASE(.name = name, .tail = list[i], .dtype = AKV_F16, .seed = i);
        CASE(.name = name, .tail = list[i], .T = 2, .segment_tokens = {list[i], list[i]}, .segment_kind = "cb",
             .anchors = 300, .density = i % 2 ? 1 : 0.05, .seed = i);
    }
}

static void many_queries(void)
{
    const uint32_t T[] = {1, 2, 5, 40};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++) {
            char name[64];
            snprintf(name, sizeof name, "T %u", T[i]);
            CASE(.name = name, .T = T[i], .tail = T[i] + (j == 1 ? 0 : 60), .segment_tokens = {j == 2 ? 0 : 500},
                 .segment_kind = "c", .seed = (uint64_t)i, .G = 3);
        }
    /* fewer tail tokens than queries: the first ones see no tail, and without segments nothing at all */
    CASE(.name = "T 7 over a tail of 3", .T = 7, .tail = 3, .seed = 5);
    CASE(.name = "T 7 over a tail of 3 and a segment", .T = 7, .tail = 3, .segment_tokens = {90}, .segment_kind = "c",
         .seed = 5);
    CASE(.name = "nothing at all", .T = 3, .seed = 6);
    CASE(.name = "nothing but sinks", .T = 3, .sinks = 1, .seed = 6);
}

static void masks_and_sinks(void)
{
    for (int sinks = 0; sinks < 2; sinks++)
        for (int segments = 0; segments < 2; segments++) {
            CASE(.name = "random mask", .mask = 'm', .T = 5, .tail = 90, .sinks = sinks,
                 .segment_tokens = {segments ? 200 : 0}, .segment_kind = "c", .seed = 1);
            CASE(.name = "tail all hidden", .mask = 'a', .T = 3, .tail = 30, .sinks = sinks,
                 .segment_tokens = {segments ? 200 : 0}, .segment_kind = "c", .seed = 2);
            CASE(.name = "soft-cap", .softcap = 5, .T = 2, .tail = 30, .sinks = sinks,
                 .segment_tokens = {segments ? 1100 : 0, segments ? 10 : 0}, .segment_kind = "c3", .seed = 3);
            CASE(.name = "soft-cap, mask", .softcap = 30, .mask = 'm', .T = 2, .tail = 30, .sinks = sinks,
                 .segment_tokens = {segments ? 300 : 0}, .segment_kind = "c", .seed = 4);
        }
}

static void rope_variants(void)
{
    const akv_rope_style styles[] = {AKV_ROPE_HALF_SPLIT, AKV_ROPE_INTERLEAVED};
    for (int i = 0; i < 2; i++) {
        CASE(.name = "full", .style = styles[i], .segment_tokens = {1100, 300}, .segment_kind = "cc", .seed = 1);
        CASE(.name = "partial", .style = styles[i], .rotary = 24, .segment_tokens = {1100}, .segment_kind = "c",
             .seed = 2);
        CASE(.name = "YaRN", .style = styles[i], .magnitude = 1.2, .rotary = 48, .segment_tokens = {1100},
             .segment_kind = "c", .seed = 3);
        CASE(.name = "none", .style = styles[i], .rotary = 0, .segment_tokens = {1100}, .segment_kind = "c", .seed = 4);
        CASE(.name = "late", .style = styles[i], .first_position = 100000, .segment_tokens = {1100, 70},
             .segment_kind = "cc", .seed = 5);
        CASE(.name = "very late", .style = styles[i], .first_position = 1000000, .segment_tokens = {300},
             .segment_kind = "c", .seed = 5);
        CASE(.name = "negative", .style = styles[i], .first_position = -1050, .segment_tokens = {1100},
             .segment_kind = "c", .seed = 6);
        CASE(.name = "gaps", .style = styles[i], .gaps = 1, .first_position = 99, .segment_tokens = {1100},
             .segment_kind = "c", .seed = 7);
        CASE(.name = "plain codes", .style = styles[i], .segment_tokens = {1100}, .segment_kind = "p", .seed = 8);
        CASE(.name = "anchors after the rotation", .style = styles[i], .segment_tokens = {1100}, .segment_kind = "r",
             .seed = 9);
    }
}

static void dtypes_and_layouts(void)
{
    for (int dtype = 0; dtype < 3; dtype++)
        for (int lay = 0; lay < LAY_COUNT; lay++)
            CASE(.name = "layouts", .dtype = (akv_dtype)dtype, .layout = lay, .T = 4, .tail = 70,
                 .segment_tokens = {130, 20}, .segment_kind = "ch", .mask = lay % 2 ? 'm' : 0, .seed = (uint64_t)lay);
}

static void random_mixtures(void)
{
    akv_rng rng = akv_rng_stream(77, 0, 0);
    for (int i = 0; i < 150; i++) {
        attend_case c = {.name = "mixture", .seed = 1000 + (uint64_t)i};
        const uint32_t dims[] = {16, 32, 64, 80, 96, 112, 128};
        c.H = 1 + (uint32_t)akv_rng_below(&rng, 3);
        c.G = 1 + (uint32_t)akv_rng_below(&rng, 5);
        c.dk = dims[akv_rng_below(&rng, 7)];
        c.dv = dims[akv_rng_below(&rng, 7)];
        c.rotary = (uint32_t)akv_rng_below(&rng, c.dk / 2 + 1) * 2;
        c.T = 1 + (uint32_t)akv_rng_below(&rng, 4);
        uint64_t n = akv_rng_below(&rng, 5);
        for (uint64_t s = 0; s < n && s < 4; s++) {
            c.segment_tokens[s] = 1 + akv_rng_below(&rng, s == 0 ? 1500 : 200);
            c.segment_kind[s] = "cclllpr3hb"[akv_rng_below(&rng, 10)];
        }
        c.anchors = 1 + (uint32_t)akv_rng_below(&rng, 60);
        c.density = random_unit(&rng);
        c.tail = akv_rng_below(&rng, 3) == 0 ? 0 : akv_rng_below(&rng, 150);
        c.mask = akv_rng_below(&rng, 3) == 0 ? 'm' : 0;
        c.softcap = akv_rng_below(&rng, 4) == 0 ? 10 : 0;
        c.sinks = akv_rng_below(&rng, 3) == 0;
        c.style = (akv_rope_style)akv_rng_below(&rng, 2);
        c.magnitude = akv_rng_below(&rng, 4) == 0 ? 1.1 : 1;
        c.first_position = (int32_t)akv_rng_below(&rng, 20000) - 5000;
        c.gaps = akv_rng_below(&rng, 4) == 0;
        c.dtype = (akv_dtype)akv_rng_below(&rng, 3);
        c.layout = (int)akv_rng_below(&rng, LAY_COUNT);
#ifndef ATTEND_TABLE_ONLY /* the GPU back end does not move segments */
        c.shift = i % 3 == 0 ? 1 + i * 37 : 0;
#endif
        run(&c);
    }
}

#ifndef ATTEND_TABLE_ONLY
/* Many rows over shifted segments: the paths that rebuild keys tile by tile. And what is refused. */
static void shifts(void)
{
    for (int kind = 0; kind < 4; kind++)
        for (uint32_t T = 1; T <= 161; T += 40)
            CASE(.name = "shifts", .T = T, .tail = 170, .segment_tokens = {300, 40}, .segment_kind = {"lcph"[kind], "hlcl"[kind]},
                 .shift = 5000 + kind, .seed = T);
    attend_case c = {.name = "refused", .H = 1, .G = 1, .dk = 32, .dv = 32, .T = 1, .rotary = 32, .anchors = 8, .density = 0.5,
                     .segment_tokens = {50}, .segment_kind = "l", .shift = 3};
    setup s;
    akv_diag diag = {0};
    setup_make(&c, &s);
    s.params.rope = NULL;
    CHECK_STATUS(attend(&s.params, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    s.params.rope = &s.rope;
    s.rope.rotary_dim = 16;
    CHECK_STATUS(attend(&s.params, &diag), AKV_E_MISMATCH, &diag);
    s.shifts[0] = 0;
    CHECK_STATUS(attend(&s.params, &diag), AKV_OK, &diag);
    setup_free(&s);
}
#endif

/* The table of cases once more for the ladder coding. */
static void ladder(void)
{
    /* as many rows as are worth rebuilding tokens for, and some more than go at once */
    CASE(.name = "ladder, 300 rows", .T = 150, .G = 2, .H = 1, .segment_tokens = {1100, 65}, .segment_kind = "lc", .tail = 160, .seed = 3);
    CASE(.name = "ladder, 520 rows", .T = 130, .G = 4, .H = 1, .dk = 80, .dv = 96, .rotary = 40, .segment_tokens = {200, 30},
         .segment_kind = "ll", .tail = 70, .mask = 'm', .softcap = 9, .style = AKV_ROPE_INTERLEAVED, .gaps = 1, .seed = 4);
    CASE(.name = "ladder, 300 rows, 1 token", .T = 300, .G = 1, .H = 2, .segment_tokens = {1}, .segment_kind = "l", .seed = 5);

    const uint32_t dims[][2] = {{64, 64},   {80, 80},   {96, 96},  {112, 112}, {128, 128}, {192, 192},
                                {256, 256}, {192, 128}, {64, 128}, {6, 10},    {2, 2}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            char name[64];
            snprintf(name, sizeof name, "ladder dk %u dv %u", dims[i][0], dims[i][1]);
            CASE(.name = name, .dk = dims[i][0], .dv = dims[i][1], .rotary = dims[i][0], .segment_tokens = {300},
                 .segment_kind = "l", .seed = i + 50 * seed);
            CASE(.name = name, .dk = dims[i][0], .dv = dims[i][1], .rotary = dims[i][0] / 4 * 2,
                 .segment_tokens = {200, 150, 50}, .segment_kind = "lch", .tail = 9, .T = 5,
                 .style = AKV_ROPE_INTERLEAVED, .seed = i + 100 * seed);
        }
    const uint32_t group[] = {1, 2, 3, 4, 6, 8}, queries[] = {1, 2, 5, 40};
    for (uint32_t i = 0; i < 6; i++)
        for (uint32_t j = 0; j < 4; j++) {
            char name[64];
            snprintf(name, sizeof name, "ladder G %u T %u", group[i], queries[j]);
            CASE(.name = name, .G = group[i], .H = 1 + (i + j) % 3, .T = queries[j], .segment_tokens = {150, 40},
                 .segment_kind = "l3", .tail = 4 + queries[j], .seed = i * 10 + j);
        }
    const uint64_t lengths[] = {1, 33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 2049, 5000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "ladder S %llu", (unsigned long long)lengths[i]);
        CASE(.name = name, .segment_tokens = {lengths[i]}, .segment_kind = "l", .dk = 128, .dv = 128, .rotary = 128,
             .seed = i);
        CASE(.name = name, .T = 2, .tail = 40, .segment_tokens = {lengths[i], lengths[i]}, .segment_kind = "ll",
             .anchors = 300, .density = i % 2 ? 1 : 0.05, .seed = i);
    }
    /* bases of the rotary embedding with which half of the planes hardly turn over 1024, 2048 and 4096 tokens (akv_quad_slow) */
    const double bases[] = {5e5, 1e6, 1e7};
    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++) {
        cases_rope_base = bases[i];
        const uint64_t list[] = {256, 1025, 2049, 9000};
        for (size_t k = 0; k < sizeof list / sizeof list[0]; k++)
            CASE(.name = "ladder slow planes", .segment_tokens = {list[k]}, .segment_kind = "l", .dk = 128, .dv = 64, .rotary = 128,
                 .H = 1, .anchors = 30, .first_position = k % 2 ? 70001 : 0, .seed = i + 10 * k);
        CASE(.name = "ladder slow planes and others", .segment_tokens = {1100, 300, 200, 400}, .segment_kind = "llll", .dk = 128,
             .dv = 128, .rotary = 128, .T = 2, .G = 3, .anchors = 50, .magnitude = 1.2, .softcap = 7, .tail = 20, .shift = 1000,
             .seed = 60 + i);
    }
    cases_rope_base = 10000;
    const akv_rope_style styles[] = {AKV_ROPE_HALF_SPLIT, AKV_ROPE_INTERLEAVED};
    for (int i = 0; i < 2; i++) {
        CASE(.name = "ladder partial", .style = styles[i], .rotary = 24, .segment_tokens = {1100}, .segment_kind = "l",
             .seed = 2);
        CASE(.name = "ladder YaRN", .style = styles[i], .magnitude = 1.2, .rotary = 48, .segment_tokens = {1100},
             .segment_kind = "l", .seed = 3);
        CASE(.name = "ladder no rotation", .style = styles[i], .rotary = 0, .segment_tokens = {1100},
             .segment_kind = "l", .seed = 4);
        CASE(.name = "ladder late", .style = styles[i], .first_position = 100000, .segment_tokens = {1100, 70},
             .segment_kind = "lc", .seed = 5);
        CASE(.name = "ladder negative", .style = styles[i], .first_position = -1050, .segment_tokens = {1100},
             .segment_kind = "l", .seed = 6);
        CASE(.name = "ladder gaps", .style = styles[i], .gaps = 1, .first_position = 99, .segment_tokens = {1100},
             .segment_kind = "l", .seed = 7);
        CASE(.name = "ladder gaps of all lengths", .style = styles[i], .gaps = 2, .first_position = -700, .T = 2,
             .segment_tokens = {2100, 70}, .segment_kind = "ll", .seed = 9);
        CASE(.name = "ladder few tokens far apart", .style = styles[i], .gaps = 3, .segment_tokens = {300}, .segment_kind = "l",
             .seed = 10);
        /* beyond the kernels of consecutive positions: far apart, or heads of more than 256 */
        for (uint64_t seed = 0; seed < 3; seed++) {
            CASE(.name = "ladder far apart, partial", .style = styles[i], .gaps = 3, .rotary = 24, .segment_tokens = {300},
                 .segment_kind = "l", .seed = 20 + seed);
            CASE(.name = "ladder far apart, no rotation", .style = styles[i], .gaps = 3, .rotary = 0, .T = 2, .segment_tokens = {150},
                 .segment_kind = "l", .seed = 30 + seed);
            CASE(.name = "ladder large heads", .style = styles[i], .dk = 320, .dv = 288, .rotary = seed == 0 ? 64 : 320, .H = 1,
                 .segment_tokens = {200}, .segment_kind = "l", .seed = 40 + seed);
        }
        CASE(.name = "ladder soft-cap, sinks", .style = styles[i], .softcap = 5, .sinks = 1, .T = 2, .tail = 30,
             .mask = 'm', .segment_tokens = {1100, 10, 300}, .segment_kind = "l3c", .seed = 8);
    }
    for (int dtype = 0; dtype < 3; dtype++)
        for (int lay = 0; lay < LAY_COUNT; lay++)
            CASE(.name = "ladder layouts", .dtype = (akv_dtype)dtype, .layout = lay, .T = 4, .tail = 70,
                 .segment_tokens = {130, 20}, .segment_kind = "lh", .mask = lay % 2 ? 'm' : 0, .seed = (uint64_t)lay);
}

/* Parts attended to one by one and merged = one softmax over all of them. */
static void merging(void)
{
    attend_case c = {.name = "merge",
                     .H = 2,
                     .G = 3,
                     .dk = 64,
                     .dv = 48,
                     .T = 3,
                     .segment_tokens = {700, 90, 1030},
                     .segment_kind = "chc",
                     .anchors = 30,
                     .density = 0.2,
                     .tail = 20,
                     .rotary = 64,
                     .sinks = 1,
                     .seed = 9};
    setup s;
    setup_make(&c, &s);
    s.params.out_stride_token = c.dv; /* contiguous, as merging wants it */
    s.params.out_stride_head = (int64_t)c.T * c.dv;
    uint64_t rows = (uint64_t)c.H * c.G * c.T;
    double *want = must(malloc(rows * c.dv * sizeof *want));
    ref_row_result *row = must(malloc(rows * sizeof *row));
    must(ref_attend(&s.params, want, row) ? want : NULL);
    float *out = must(calloc(rows * c.dv, sizeof *out)), *max = must(malloc(rows * sizeof *max)),
          *sum = must(calloc(rows, sizeof *sum));
    for (uint64_t r = 0; r < rows; r++)
        max[r] = -INFINITY; /* the empty state */
    akv_diag diag = {0};
    for (int part = 0; part < 4; part++) {
        akv_attend_params p = s.params;
        p.num_segments = part < 3;
        p.segments = s.params.segments + (part < 3 ? part : 0);
        p.tail_tokens = part < 3 ? 0 : s.params.tail_tokens;
        p.sinks = part == 1 ? s.params.sinks : NULL; /* the sink counts once */
        CHECK_STATUS(attend(&p, &diag), AKV_OK, &diag);
        akv_attend_merge(rows, c.dv, out, max, sum, s.out, s.max, s.sum);
    }
    for (uint64_t r = 0; r < rows; r++) {
        for (uint32_t i = 0; i < c.dv; i++) /* twice: each merge rescales once more */
            CHECK_NEAR(out[r * c.dv + i], want[r * c.dv + i], 2 * row[r].tol_out, "merged row %llu dim %u",
                       (unsigned long long)r, i);
        CHECK_NEAR(max[r] + log(sum[r]), row[r].lse, 2 * row[r].tol_logit + 4 * REF_U * fabs(max[r]),
                   "merged log-sum-exp of row %llu", (unsigned long long)r);
    }
    /* merging two empty states stays empty, and an empty one changes nothing */
    float before = out[0], empty_out[48] = {0}, empty_max = -INFINITY, empty_sum = 0;
    akv_attend_merge(1, c.dv, out, max, sum, empty_out, &empty_max, &empty_sum);
    CHECK(out[0] == before);
    float a_out[48] = {0}, a_max = -INFINITY, a_sum = 0;
    akv_attend_merge(1, c.dv, a_out, &a_max, &a_sum, empty_out, &empty_max, &empty_sum);
    CHECK(a_out[0] == 0 && a_max == -INFINITY && a_sum == 0);
    akv_attend_merge(0, c.dv, NULL, NULL, NULL, NULL, NULL, NULL);
    free(out);
    free(max);
    free(sum);
    free(want);
    free(row);
    setup_free(&s);
}

/* Large logits: nothing overflows, and one token takes all of the mass. */
static void large_logits(void)
{
    attend_case c = {.name = "large logits",
                     .H = 1,
                     .G = 2,
                     .dk = 64,
                     .dv = 64,
                     .T = 2,
                     .segment_tokens = {400},
                     .segment_kind = "c",
                     .anchors = 30,
                     .density = 0.2,
                     .tail = 20,
                     .rotary = 64,
                     .seed = 11};
    setup s;
    setup_make(&c, &s);
    s.params.sm_scale = 20; /* logits in the thousands */
    akv_diag diag = {0};
    CHECK_STATUS(attend(&s.params, &diag), AKV_OK, &diag);
    for (uint64_t r = 0; r < 4; r++)
        for (uint32_t i = 0; i < 64; i++)
            CHECK(isfinite(
                s.out[(int64_t)(r / 2) * s.params.out_stride_head + (int64_t)(r % 2) * s.params.out_stride_token + i]));
    setup_free(&s);
}

#ifndef ATTEND_TABLE_ONLY /* statuses of the CPU entry point */
static void bad_calls(void)
{
    attend_case c = {.name = "bad calls",
                     .H = 2,
                     .G = 2,
                     .dk = 64,
                     .dv = 64,
                     .T = 2,
                     .segment_tokens = {100},
                     .segment_kind = "c",
                     .anchors = 30,
                     .density = 0.2,
                     .tail = 20,
                     .rotary = 64,
                     .seed = 11};
    setup s;
    setup_make(&c, &s);
    akv_diag diag = {0};
    size_t bytes = 0;
    CHECK_STATUS(akv_attend_workspace_bytes(&s.params, &bytes, &diag), AKV_OK, &diag);
    uint8_t *ws = must(aligned_alloc(64, bytes + 128));
    CHECK(bytes > 0);
    CHECK_STATUS(akv_attend(&s.params, ws, bytes - 1, &diag), AKV_E_NO_SPACE, &diag);
    char number[32];
    snprintf(number, sizeof number, "%zu", bytes);
    CHECK_MSG(strstr(diag.message, number) != NULL, "the message does not say how many bytes suffice: %s",
              diag.message);
    CHECK_STATUS(akv_attend(&s.params, ws + 1, bytes + 63, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_attend(NULL, ws, bytes, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_attend(&s.params, NULL, bytes, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_attend_workspace_bytes(NULL, &bytes, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_attend_workspace_bytes(&s.params, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_attend(&s.params, ws, bytes - 1, NULL), AKV_E_NO_SPACE, &diag); /* no diag, no crash */

#define BAD(edit, want)                                                                                                \
    do {                                                                                                               \
        akv_attend_params p = s.params;                                                                                \
        edit;                                                                                                          \
        diag.message[0] = 0;                                                                                           \
        CHECK_STATUS(akv_attend(&p, ws, bytes, &diag), want, &diag);                                                   \
        CHECK_MSG(diag.message[0] != 0, "no message after: %s", #edit);                                                \
    } while (0)
    const akv_segment *null_segment = NULL;
    BAD(p.struct_size = 0, AKV_E_INVALID_ARGUMENT);
    BAD(p.num_kv_heads = 0, AKV_E_INVALID_ARGUMENT);
    BAD(p.gqa_group = 0, AKV_E_INVALID_ARGUMENT);
    BAD(p.num_queries = 0, AKV_E_INVALID_ARGUMENT);
    BAD(p.queries.data = NULL, AKV_E_INVALID_ARGUMENT);
    BAD(p.queries.dtype = (akv_dtype)7, AKV_E_INVALID_ARGUMENT);
    BAD(p.out = NULL, AKV_E_INVALID_ARGUMENT);
    BAD(p.segments = NULL, AKV_E_INVALID_ARGUMENT);
    BAD(p.segments = &null_segment, AKV_E_INVALID_ARGUMENT);
    BAD(p.tail_keys.data = NULL, AKV_E_INVALID_ARGUMENT);
    BAD(p.tail_values.data = NULL, AKV_E_INVALID_ARGUMENT);
    BAD(p.head_dim_k = 63, AKV_E_INVALID_ARGUMENT);
    BAD(p.sm_scale = NAN, AKV_E_INVALID_ARGUMENT);
    BAD(p.logit_softcap = -1, AKV_E_INVALID_ARGUMENT);
    BAD(p.logit_softcap = NAN, AKV_E_INVALID_ARGUMENT);
    BAD(p.head_dim_v = 32, AKV_E_MISMATCH);
    BAD(p.head_dim_k = 128, AKV_E_MISMATCH);
    BAD(p.num_kv_heads = 1, AKV_E_MISMATCH);
    CHECK_STATUS(akv_attend(&s.params, ws, bytes, &diag), AKV_OK, &diag);
    free(ws);
    setup_free(&s);
}

/* the GPU's test includes this file and runs the table on its own kernels */
int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(head_dims);
    TEST(groups_and_heads);
    TEST(lengths);
    TEST(many_queries);
    TEST(masks_and_sinks);
    TEST(rope_variants);
    TEST(shifts);
    TEST(ladder);
    TEST(dtypes_and_layouts);
    TEST(random_mixtures);
    TEST(merging);
    TEST(large_logits);
    TEST(bad_calls);
    printf("largest error of an output coordinate: %.3f of its tolerance\n", worst_ratio);
    return TEST_DONE();
}
#endif
