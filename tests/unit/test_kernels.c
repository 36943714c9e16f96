/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernels.c - every variant of the inner loops that this machine can run: bit-identical to the generic one, and
 * within rounding of plain double loops; nothing written outside the buffers, nothing wrong at odd sizes and addresses.
 */
#include "akv_test.h"
#include "cases.h"
#include "kernels/cpu.h"
#include "kernels/kernels.h"

enum { MOST = 1024, ROWS = 9, GUARD = 32 };

static const akv_kernels *variants[4];
static int num_variants;

static void find_variants(void)
{
#define AKV_KERNELS(isa, level)      \
    if (akv_cpu_runs(level))         \
        variants[num_variants++] = &akv_kernels_##isa;
#include "kernels/kernels.def"
}

/* A float buffer with a guard on both sides, at an odd address (4 mod 64). */
typedef struct guarded {
    float *all, *data;
    size_t n;
} guarded;

static guarded guarded_make(size_t n)
{
    guarded g = {must(aligned_alloc(64, ((n + 2 * GUARD + 1) * 4 + 63) / 64 * 64)), NULL, n};
    for (size_t i = 0; i < n + 2 * GUARD + 1; i++)
        g.all[i] = 777;
    g.data = g.all + GUARD + 1;
    return g;
}

static void guarded_free(guarded *g, const char *what)
{
    int intact = 1;
    for (size_t i = 0; i <= GUARD; i++)
        intact &= g->all[i] == 777;
    for (size_t i = 0; i + 1 < GUARD; i++)
        intact &= g->data[g->n + i] == 777;
    CHECK_MSG(intact, "%s wrote outside its buffer", what);
    free(g->all);
}

static void fill(float *x, size_t n, akv_rng *rng)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)random_gauss(rng);
}

/* Runs the body for every variant with the same input, then compares bits with the generic output `first`. */
#define FOR_VARIANTS(k)                       \
    for (int v_ = 0; v_ < num_variants; v_++) \
        for (const akv_kernels *k = variants[v_]; k != NULL; k = NULL)
#define SAME(first, now, n, what)                                                                          \
    do {                                                                                                   \
        if (v_ == 0)                                                                                       \
            memcpy(first, now, (n) * sizeof(float));                                                       \
        else                                                                                               \
            CHECK_MSG(memcmp(first, now, (n) * sizeof(float)) == 0, "%s of %s differs from generic", what, \
                      variants[v_]->isa);                                                                  \
    } while (0)

static const uint32_t dims[] = {2,  4,  6,  10, 14,  16,  18,  30,  32,  34,  48,
                                64, 66, 80, 96, 112, 128, 130, 192, 256, 512, 1024};
enum { DIMS = sizeof dims / sizeof dims[0] };

static float first[ROWS * MOST * AKV_GROUP_LANES];

static void rows_of_16_bit(void)
{
    for (int dtype = AKV_F16; dtype <= AKV_BF16; dtype++) {
        /* all 65536 patterns, in pieces of odd length */
        uint16_t x[4099];
        for (uint32_t at = 0; at < 65536; at += 4099) {
            uint32_t n = at + 4099 <= 65536 ? 4099 : 65536 - at;
            for (uint32_t i = 0; i < n; i++)
                x[i] = (uint16_t)(at + i);
            FOR_VARIANTS(k) {
                guarded out = guarded_make(n);
                k->row_f32(x, (akv_dtype)dtype, n, out.data);
                unsigned wrong = 0;
                for (uint32_t i = 0; i < n; i++) {
                    float want = dtype == AKV_F16 ? akv_f16_to_f32(x[i]) : akv_bf16_to_f32(x[i]);
                    wrong += isnan(want) ? !isnan(out.data[i]) : akv_bits_f32(want) != akv_bits_f32(out.data[i]);
                }
                CHECK_MSG(wrong == 0, "%s: %u numbers of dtype %d wrong", k->isa, wrong, dtype);
                guarded_free(&out, "row_f32");
            }
        }
    }
}

static void dots(void)
{
    akv_rng rng = {1};
    for (int d = 0; d < DIMS; d++)
        for (uint32_t rows = 0; rows <= ROWS; rows++) {
            uint32_t dim = dims[d];
            guarded q = guarded_make((size_t)ROWS * dim), x = guarded_make(dim);
            fill(q.data, (size_t)ROWS * dim, &rng);
            fill(x.data, dim, &rng);
            FOR_VARIANTS(k) {
                size_t stride = 1 + rows % 3;
                guarded out = guarded_make(ROWS * 3);
                k->rows_dot(q.data, rows, x.data, dim, 0.37f, out.data, stride);
                for (uint32_t r = 0; r < rows; r++) {
                    double sum = 0, size = 0;
                    for (uint32_t i = 0; i < dim; i++) {
                        sum += (double)q.data[r * dim + i] * x.data[i];
                        size += fabs((double)q.data[r * dim + i] * x.data[i]);
                    }
                    CHECK_NEAR(out.data[r * stride], (double)0.37f * sum, 0.37 * ref_gamma(dim) * size, "%s: dot of %u",
                               k->isa, dim);
                }
                for (size_t i = 0; i < ROWS * 3; i++)
                    if (i % stride != 0 || i / stride >= rows)
                        CHECK_MSG(out.data[i] == 777, "rows_dot wrote between its results");
                SAME(first, out.data, ROWS * 3, "rows_dot");
                guarded_free(&out, "rows_dot");
            }
            FOR_VARIANTS(k) {
                guarded y = guarded_make((size_t)ROWS * dim);
                float w[ROWS * 2];
                for (uint32_t r = 0; r < ROWS * 2; r++)
                    w[r] = r % 5 == 4 ? 0 : (float)r - 3.25f;
                memcpy(y.data, q.data, (size_t)ROWS * dim * sizeof(float));
                k->rows_axpy(w, 2, rows, x.data, dim, y.data);
                for (uint32_t r = 0; r < ROWS; r++)
                    for (uint32_t i = 0; i < dim; i++) {
                        double want = q.data[r * dim + i] + (r < rows ? (double)w[2 * r] * x.data[i] : 0);
                        CHECK_NEAR(y.data[r * dim + i], want,
                                   2 * REF_U *
                                       (fabs((double)q.data[r * dim + i]) + 2 * fabs((double)w[2 * r] * x.data[i])),
                                   "%s: axpy", k->isa);
                    }
                SAME(first, y.data, (size_t)ROWS * dim, "rows_axpy");
                guarded_free(&y, "rows_axpy");
            }
            guarded_free(&q, "rows_dot");
            guarded_free(&x, "rows_dot");
        }
}

/* Many 16-bit rows at once: the same bits as one by one, whatever is masked. */
static void dense_rows(void)
{
    akv_rng rng = {11};
    for (int round = 0; round < 250; round++) {
        const uint32_t dim = round % 2 ? 64 * (1 + (uint32_t)akv_rng_below(&rng, 3)) : 1 + (uint32_t)akv_rng_below(&rng, 140);
        const uint32_t n = (uint32_t)akv_rng_below(&rng, 70), rows = (uint32_t)akv_rng_below(&rng, ROWS + 1);
        const akv_dtype dtype = round % 3 ? AKV_F16 : AKV_BF16;
        const int64_t stride = (round % 5 == 0 ? -1 : 1) * (int64_t)(dim + akv_rng_below(&rng, 9));
        const size_t numbers = (size_t)(n + 1) * (dim + 9), row_stride = n + 3;
        uint16_t *memory = must(malloc(numbers * 2)), *x = memory + (stride < 0 && n > 0 ? -stride * (int64_t)(n - 1) : 0);
        float *q = must(malloc((size_t)(ROWS + 1) * dim * 4)), *w = must(malloc((ROWS + 1) * row_stride * 4)), f32[MOST];
        fill(q, (size_t)ROWS * dim, &rng);
        fill(w, ROWS * row_stride, &rng);
        for (size_t i = 0; i < numbers; i++)
            memory[i] = dtype == AKV_F16 ? akv_f32_to_f16((float)random_gauss(&rng)) : akv_f32_to_bf16((float)random_gauss(&rng));
        for (uint32_t t = 0; round % 4 == 1 && t < n; t += 5) { /* masked, and not a number */
            for (uint32_t r = 0; r < ROWS; r++)
                w[r * row_stride + t] = 0;
            for (uint32_t i = 0; i < dim; i++)
                x[(int64_t)t * stride + i] = 0x7fff;
        }
        FOR_VARIANTS(k) {
            guarded dots = guarded_make(ROWS * row_stride), sums = guarded_make((size_t)ROWS * dim);
            memcpy(sums.data, q, (size_t)ROWS * dim * 4);
            k->dense_dots(q, rows, x, stride, dtype, n, dim, dots.data, row_stride);
            k->dense_sums(w, row_stride, rows, x, stride, dtype, n, dim, sums.data);
            float *want_dots = must(malloc((ROWS + 1) * row_stride * 4)), *want_sums = must(malloc((size_t)(ROWS + 1) * dim * 4));
            memcpy(want_sums, q, (size_t)ROWS * dim * 4);
            for (size_t i = 0; i < ROWS * row_stride; i++)
                want_dots[i] = 777;
            for (uint32_t t = 0; t < n; t++) {
                k->row_f32(x + (int64_t)t * stride, dtype, dim, f32);
                k->rows_dot(q, rows, f32, dim, 1, want_dots + t, row_stride);
                k->rows_axpy(w + t, row_stride, rows, f32, dim, want_sums);
            }
            unsigned wrong = 0;
            for (size_t i = 0; i < ROWS * row_stride; i++)
                wrong += !(dots.data[i] == want_dots[i] || (isnan(dots.data[i]) && isnan(want_dots[i])));
            CHECK_MSG(wrong == 0, "%s: %u dense dots differ, dim %u, %u tokens, %u rows", k->isa, wrong, dim, n, rows);
            CHECK_MSG(memcmp(sums.data, want_sums, (size_t)ROWS * dim * 4) == 0, "%s: dense sums differ, dim %u", k->isa, dim);
            free(want_dots);
            free(want_sums);
            guarded_free(&dots, "dense_dots");
            guarded_free(&sums, "dense_sums");
        }
        free(memory);
        free(q);
        free(w);
    }
}

static void turns(void)
{
    akv_rng rng = {2};
    for (int d = 0; d < DIMS; d++)
        for (int part = 0; part < 3; part++)
            for (int style = 0; style < 2; style++) {
                uint32_t dim = dims[d], rotary = part == 0 ? 0 : part == 1 ? dim : dim / 4 * 2, planes = rotary / 2;
                uint16_t a[MOST];
                float cosine[MOST / 2], sine[MOST / 2];
                double freq[MOST / 2], want[MOST], order[MOST];
                for (uint32_t i = 0; i < dim; i++)
                    a[i] = akv_f32_to_bf16((float)random_gauss(&rng));
                for (uint32_t j = 0; j < planes; j++) {
                    freq[j] = 6 * random_unit(&rng);
                    cosine[j] = (float)cos(freq[j]);
                    sine[j] = (float)sin(freq[j]);
                }
                akv_rope rope = {rotary, (akv_rope_style)style, 1, freq};
                for (uint32_t i = 0; i < dim; i++)
                    want[i] = akv_bf16_to_f32(a[i]);
                ref_rope_rotate(&rope, 1, want);
                /* into plane order */
                memcpy(order, want, sizeof order);
                for (uint32_t j = 0; j < planes && style == AKV_ROPE_INTERLEAVED; j++) {
                    order[j] = want[2 * j];
                    order[j + planes] = want[2 * j + 1];
                }
                guarded q = guarded_make((size_t)ROWS * dim);
                fill(q.data, (size_t)ROWS * dim, &rng);
                FOR_VARIANTS(k) {
                    guarded out = guarded_make(dim);
                    k->turn_bf16(a, dim, rotary, (akv_rope_style)style, cosine, sine, out.data);
                    for (uint32_t i = 0; i < dim;
                         i++) /* two products and a sum by rounded tables; normals stay below 8 */
                        CHECK_NEAR(out.data[i], order[i], i < rotary ? 6 * 8 * REF_U : 0, "%s: turn, dim %u of %u",
                                   k->isa, i, dim);
                    SAME(first, out.data, dim, "turn_bf16");
                    guarded_free(&out, "turn_bf16");
                }
                for (uint32_t rows = 1; rows <= ROWS; rows += 4)
                    FOR_VARIANTS(k) {
                        guarded out = guarded_make((size_t)ROWS * 5);
                        k->anchor_logits(a, dim, rotary, (akv_rope_style)style, cosine, sine, -1.5f, q.data, rows,
                                         out.data, 5);
                        for (uint32_t r = 0; r < rows; r++) {
                            double sum = 0, size = 0;
                            for (uint32_t i = 0; i < dim; i++) {
                                sum += q.data[r * dim + i] * order[i];
                                size += fabs(q.data[r * dim + i]) * 8;
                            }
                            CHECK_NEAR(out.data[5 * r], -1.5 * sum, 1.5 * ref_gamma(dim) * size,
                                       "%s: anchor logit, dim %u", k->isa, dim);
                        }
                        SAME(first, out.data, (size_t)ROWS * 5, "anchor_logits");
                        guarded_free(&out, "anchor_logits");
                    }
                guarded_free(&q, "anchor_logits");
            }
}

static void groups(void)
{
    akv_rng rng = {3};
    const float inner = 0.4528f, outer = 1.5104f, level[4] = {-1.5104f, -0.4528f, 0.4528f, 1.5104f};
    for (int d = 0; d < DIMS; d++)
        for (uint32_t g = 1; g <= AKV_GROUP_LANES; g++) {
            uint32_t dim = dims[d], code_bytes = (dim * 2 + 7) / 8;
            /* exactly as many bytes as the group has: reading beyond shows under a sanitizer */
            uint8_t *codes = must(malloc(g * code_bytes));
            for (uint32_t i = 0; i < g * code_bytes; i++)
                codes[i] = (uint8_t)akv_rng_next(&rng);
            uint32_t lanes = AKV_GROUP_LANES;
            guarded group = guarded_make((size_t)dim * lanes);
            FOR_VARIANTS(k) {
                k->unpack_group(codes, g, dim, inner, outer, group.data);
                unsigned wrong = 0;
                for (uint32_t i = 0; i < dim; i++)
                    for (uint32_t r = 0; r < lanes; r++) {
                        uint32_t bit = (i * g + r) * 2;
                        float want = r < g ? level[(codes[bit / 8] >> (bit % 8)) & 3] : 0;
                        wrong += group.data[i * lanes + r] != want;
                    }
                CHECK_MSG(wrong == 0, "%s: %u levels of a group of %u x %u wrong", k->isa, wrong, g, dim);
            }
            uint32_t rows = 1 + g % ROWS;
            guarded q = guarded_make((size_t)rows * dim);
            fill(q.data, (size_t)rows * dim, &rng);
            FOR_VARIANTS(k) {
                guarded out = guarded_make((size_t)rows * lanes);
                k->group_dot(q.data, rows, group.data, dim, out.data);
                for (uint32_t r = 0; r < rows; r++)
                    for (uint32_t l = 0; l < lanes; l++) {
                        double sum = 0, size = 0;
                        for (uint32_t i = 0; i < dim; i++) {
                            sum += (double)q.data[r * dim + i] * group.data[i * lanes + l];
                            size += fabs((double)q.data[r * dim + i] * group.data[i * lanes + l]);
                        }
                        CHECK_NEAR(out.data[r * lanes + l], sum, ref_gamma(dim) * size, "%s: group dot", k->isa);
                    }
                SAME(first, out.data, (size_t)rows * lanes, "group_dot");
                guarded_free(&out, "group_dot");
            }
            float w[ROWS * AKV_GROUP_LANES];
            fill(w, ROWS * AKV_GROUP_LANES, &rng);
            FOR_VARIANTS(k) {
                guarded y = guarded_make((size_t)rows * dim);
                memcpy(y.data, q.data, (size_t)rows * dim * sizeof(float));
                k->group_accumulate(w, rows, group.data, dim, y.data);
                for (uint32_t r = 0; r < rows; r++)
                    for (uint32_t i = 0; i < dim; i++) {
                        double sum = q.data[r * dim + i], size = fabs(sum);
                        for (uint32_t l = 0; l < lanes; l++) {
                            sum += (double)w[r * lanes + l] * group.data[i * lanes + l];
                            size += fabs((double)w[r * lanes + l] * group.data[i * lanes + l]);
                        }
                        CHECK_NEAR(y.data[r * dim + i], sum, ref_gamma(lanes + 1) * size, "%s: group accumulate",
                                   k->isa);
                    }
                SAME(first, y.data, (size_t)rows * dim, "group_accumulate");
                guarded_free(&y, "group_accumulate");
            }
            guarded_free(&q, "group_dot");
            guarded_free(&group, "unpack_group");
            free(codes);
        }
}

/* Anchors of 8 bits: exact to f32; centred, turned and dotted within rounding. */
static void bytes_of_anchors(void)
{
    akv_rng rng = {6};
    for (int d = 0; d < DIMS; d++)
        for (int part = 0; part < 3; part++)
            for (int style = 0; style < 2; style++) {
                uint32_t dim = dims[d], rotary = part == 0 ? 0 : part == 1 ? dim : dim / 4 * 2, planes = rotary / 2;
                int8_t *a = must(malloc(dim)); /* exact, so that reading beyond shows under a sanitizer */
                float *mean = must(malloc(dim * sizeof *mean));
                float cosine[MOST / 2], sine[MOST / 2];
                double freq[MOST / 2], x[MOST], order[MOST];
                const float weight = d % 5 == 4 ? 0.0f : -0.37f;
                for (uint32_t i = 0; i < dim; i++)
                    a[i] = (int8_t)(i < 3 ? -128 + 127 * (int)i : (int)akv_rng_below(&rng, 256) - 128);
                fill(mean, dim, &rng);
                for (uint32_t j = 0; j < planes; j++) {
                    freq[j] = 6 * random_unit(&rng);
                    cosine[j] = (float)cos(freq[j]);
                    sine[j] = (float)sin(freq[j]);
                }
                FOR_VARIANTS(k) {
                    guarded out = guarded_make(dim);
                    k->row_i8(a, dim, out.data);
                    unsigned wrong = 0;
                    for (uint32_t i = 0; i < dim; i++)
                        wrong += out.data[i] != (float)a[i];
                    CHECK_MSG(wrong == 0, "%s: %u of %u bytes wrong", k->isa, wrong, dim);
                    guarded_free(&out, "row_i8");
                }
                double largest = 0;
                for (uint32_t i = 0; i < dim; i++) {
                    x[i] = (double)weight * a[i] + mean[i];
                    largest = fmax(largest, fabs((double)weight * a[i]) + fabs(mean[i]));
                }
                akv_rope rope = {rotary, (akv_rope_style)style, 1, freq};
                ref_rope_rotate(&rope, 1, x);
                memcpy(order, x, sizeof order);
                for (uint32_t j = 0; j < planes && style == AKV_ROPE_INTERLEAVED; j++) {
                    order[j] = x[2 * j];
                    order[j + planes] = x[2 * j + 1];
                }
                guarded q = guarded_make((size_t)ROWS * dim);
                fill(q.data, (size_t)ROWS * dim, &rng);
                for (uint32_t rows = 1; rows <= ROWS; rows += 2)
                    FOR_VARIANTS(k) {
                        guarded out = guarded_make((size_t)ROWS * 3);
                        k->centred_logits(a, weight, mean, dim, rotary, (akv_rope_style)style, cosine, sine, q.data, rows,
                                          out.data, 3);
                        for (uint32_t r = 0; r < rows; r++) {
                            double sum = 0, size = 0;
                            for (uint32_t i = 0; i < dim; i++) {
                                sum += q.data[r * dim + i] * order[i];
                                size += fabs(q.data[r * dim + i]) * largest; /* of the parts, which may cancel */
                            }
                            CHECK_NEAR(out.data[3 * r], sum, ref_gamma(dim) * size, "%s: centred logit, dim %u", k->isa, dim);
                        }
                        for (size_t i = 0; i < (size_t)ROWS * 3; i++)
                            if (i % 3 != 0 || i / 3 >= rows)
                                CHECK_MSG(out.data[i] == 777, "centred_logits wrote between its results");
                        SAME(first, out.data, (size_t)ROWS * 3, "centred_logits");
                        guarded_free(&out, "centred_logits");
                    }
                guarded_free(&q, "centred_logits");
                free(a);
                free(mean);
            }
}

/* Groups of mixed widths, from exactly their bytes. */
static void level_groups(void)
{
    akv_rng rng = {7};
    for (int d = 0; d < DIMS; d++)
        for (uint32_t g = 1; g <= AKV_GROUP_LANES; g++)
            for (int mix = 0; mix < 4; mix++) {
                static const uint8_t some[3] = {1, 2, 4};
                uint32_t count = dims[d], bits = 0, lanes = AKV_GROUP_LANES;
                uint8_t widths[MOST];
                for (uint32_t i = 0; i < count; i++)
                    bits += widths[i] = some[mix < 3 ? (uint32_t)mix : (uint32_t)akv_rng_below(&rng, 3)];
                size_t bytes = ((size_t)g * bits + 7) / 8;
                uint8_t *codes = must(malloc(bytes));
                for (size_t i = 0; i < bytes; i++)
                    codes[i] = (uint8_t)akv_rng_next(&rng);
                FOR_VARIANTS(k) {
                    guarded out = guarded_make((size_t)count * lanes);
                    k->unpack_level(codes, g, widths, count, out.data);
                    unsigned wrong = 0;
                    size_t bit = 0;
                    for (uint32_t i = 0; i < count; i++)
                        for (uint32_t r = 0; r < lanes; r++) {
                            uint32_t number = 0;
                            for (uint32_t b = 0; r < g && b < widths[i]; b++, bit++)
                                number |= (uint32_t)(codes[bit / 8] >> (bit % 8) & 1) << b;
                            double want = r < g ? ref_ladder_value(number, widths[i]) : 0; /* a unit times a whole number */
                            wrong += fabs(out.data[i * lanes + r] - want) > 2 * REF_U * fabs(want);
                        }
                    CHECK_MSG(wrong == 0, "%s: %u levels of a group of %u x %u wrong", k->isa, wrong, g, count);
                    SAME(first, out.data, (size_t)count * lanes, "unpack_level");
                    guarded_free(&out, "unpack_level");
                }
                free(codes);
            }
    FOR_VARIANTS(k) { /* a level without any coordinate */
        float out = 777;
        k->unpack_level(NULL, 16, NULL, 0, &out);
        CHECK(out == 777);
    }
}

static void softmax(void)
{
    akv_rng rng = {4};
    for (uint32_t n = 0; n <= 70; n++)
        FOR_VARIANTS(k) {
            guarded x = guarded_make(n);
            rng.state = n;
            float max = 3.5f;
            for (uint32_t i = 0; i < n; i++)
                x.data[i] = i % 11 == 10   ? -INFINITY
                            : i % 13 == 12 ? max
                            : i % 7 == 6   ? max - 90
                                           : max - (float)(87 * random_unit(&rng));
            double want[70], sum = 0;
            for (uint32_t i = 0; i < n; i++) {
                want[i] = exp((double)(x.data[i] - max));
                if (x.data[i] - max < -87)
                    want[i] = 0;
                sum += want[i];
            }
            float got = k->exp_sum(x.data, n, max);
            for (uint32_t i = 0; i < n; i++) /* the contract: 2e-7 */
                CHECK_NEAR(x.data[i], want[i], 2e-7 * want[i], "%s: exp", k->isa);
            CHECK_NEAR(got, sum, (2e-7 + ref_gamma(n)) * sum, "%s: sum of %u", k->isa, n);
            SAME(first, x.data, n, "exp_sum");
            guarded_free(&x, "exp_sum");
        }
    /* dense sweep of the whole range */
    double worst = 0;
    for (int i = 0; i < 2000000; i++) {
        float x = -87.0f * (float)i / 2000000.0f, y = x;
        akv_kernels_best()->exp_sum(&y, 1, 0);
        worst = fmax(worst, fabs(y - exp((double)x)) / exp((double)x));
    }
    CHECK_MSG(worst <= 2e-7, "largest relative error of exp %.3g", worst);
    float nan[3] = {1, NAN, 2};
    CHECK(isnan(akv_kernels_best()->exp_sum(nan, 3, 2)) && isnan(nan[1]));
    for (uint32_t n = 0; n <= 70; n++)
        FOR_VARIANTS(k) {
            guarded x = guarded_make(n);
            rng.state = n + 1000;
            fill(x.data, n, &rng);
            if (n > 3)
                x.data[n / 2] = NAN;
            float max = n % 2 ? -INFINITY : -0.5f, want = max;
            for (uint32_t i = 0; i < n; i++)
                want = x.data[i] * 0.125f > want ? x.data[i] * 0.125f : want;
            CHECK(k->scale_max(x.data, n, 0.125f, max) == want);
            SAME(first, x.data, n, "scale_max");
            guarded_free(&x, "scale_max");
        }
}

static void small_ones(void)
{
    akv_rng rng = {5};
    for (int d = 0; d < DIMS; d++) {
        uint32_t dim = dims[d];
        float x[MOST] = {0}, y[MOST];
        double want[MOST], energy = 0;
        fill(x, dim, &rng);
        for (uint32_t i = 0; i < dim; i++) {
            want[i] = x[i];
            energy += want[i] * want[i];
        }
        memcpy(y, x, sizeof y);
        akv_hadamard_f32(y, dim);
        ref_hadamard(want, dim);
        for (uint32_t i = 0; i < dim; i++) /* log2(dim) <= 10 levels of sums, each rounding at most u of the norm */
            CHECK_NEAR(y[i], want[i], 12 * REF_U * sqrt(energy), "hadamard of %u", dim);
    }
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    find_variants();
    printf("variants:");
    for (int v = 0; v < num_variants; v++)
        printf(" %s", variants[v]->isa);
    printf("\n");
    TEST(rows_of_16_bit);
    TEST(dots);
    TEST(dense_rows);
    TEST(turns);
    TEST(groups);
    TEST(bytes_of_anchors);
    TEST(level_groups);
    TEST(softmax);
    TEST(small_ones);
    return TEST_DONE();
}
