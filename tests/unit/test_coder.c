/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_coder.c - every variant of compression's inner loops that this machine can run, against plain loops in double: products
 * (matrix.h; AVX2 and AVX-512 the same bits) and the others (coder.h; all the same bits). Every output lies in a buffer with
 * guards on both sides, at an odd address.
 */
#include "akv_test.h"
#include "cases.h"
#include "codec/ladder.h"
#include "core/ladder.h"
#include "core/rope.h"
#include "kernels/coder.h"
#include "kernels/cpu.h"
#include "kernels/matrix.h"

enum { GUARD = 32, MOST_VARIANTS = 4 };

static const akv_matrix_kernels *matrices[MOST_VARIANTS];
static const akv_coder_kernels *coders[MOST_VARIANTS];
static int num_matrices, num_coders;

static void find_variants(void)
{
#define AKV_MATRICES(isa, level)    \
    if (akv_cpu_runs(level))        \
        matrices[num_matrices++] = &akv_matrix_##isa;
#define AKV_CODERS(isa, level)      \
    if (akv_cpu_runs(level))        \
        coders[num_coders++] = &akv_coder_##isa;
#include "kernels/kernels.def"
}

typedef struct guarded {
    float *all, *data;
    size_t n;
} guarded;

static guarded guarded_make(size_t n)
{
    guarded g = {must(malloc((n + 2 * GUARD + 1) * sizeof(float))), NULL, n};
    for (size_t i = 0; i < n + 2 * GUARD + 1; i++)
        g.all[i] = 777;
    g.data = g.all + GUARD + 1;
    return g;
}

static void guarded_free(guarded *g, const char *what)
{
    bool intact = true;
    for (size_t i = 0; i <= GUARD; i++)
        intact &= g->all[i] == 777;
    for (size_t i = 0; i < GUARD; i++)
        intact &= g->data[g->n + i] == 777;
    CHECK_MSG(intact, "%s wrote outside its buffer", what);
    free(g->all);
}

static float *random_floats(size_t n, akv_rng *rng)
{
    float *x = must(malloc((n + 1) * sizeof *x));
    for (size_t i = 0; i < n; i++)
        x[i] = (float)random_gauss(rng);
    return x;
}

static uint32_t pick(akv_rng *rng, uint32_t most)
{
    return (uint32_t)akv_rng_below(rng, most + 1);
}

static void products(void)
{
    akv_rng rng = {1};
    for (int round = 0; round < 300; round++) {
        const uint32_t m = pick(&rng, round % 3 ? 20 : 100), n = pick(&rng, round % 2 ? 130 : 50), k = pick(&rng, round % 5 ? 70 : 600);
        const size_t lda = k + pick(&rng, 3), ldb = n + pick(&rng, 3), ldc = n + pick(&rng, 3);
        const bool add = round % 2 == 0, down = round % 3 == 0; /* down: a by columns */
        float *a = random_floats(down ? (size_t)k * (m + 2) : m * lda, &rng), *b = random_floats(k * ldb, &rng);
        float *before = random_floats(m * ldc, &rng), *first = must(malloc((m * ldc + 1) * sizeof *first));
        const size_t a_row = down ? 1 : lda, a_col = down ? m + 2 : 1;
        for (int v = 0; v < num_matrices; v++) {
            guarded c = guarded_make(m * ldc);
            memcpy(c.data, before, m * ldc * sizeof *before);
            matrices[v]->multiply(m, n, k, a, a_row, a_col, b, ldb, add, c.data, ldc);
            for (uint32_t i = 0; i < m; i++)
                for (size_t j = 0; j < ldc; j++) {
                    double sum = add ? before[i * ldc + j] : 0, size = fabs(sum);
                    for (uint32_t l = 0; j < n && l < k; l++) {
                        sum += (double)a[i * a_row + l * a_col] * b[l * ldb + j];
                        size += fabs((double)a[i * a_row + l * a_col] * b[l * ldb + j]);
                    }
                    if (j < n)
                        CHECK_NEAR(c.data[i * ldc + j], sum, ref_gamma(k + 1) * size, "%s: %u x %u x %u", matrices[v]->isa, m, n, k);
                    else
                        CHECK(c.data[i * ldc + j] == before[i * ldc + j]);
                }
            if (v == 1)
                memcpy(first, c.data, m * ldc * sizeof *first);
            if (v > 1)
                CHECK_MSG(memcmp(first, c.data, m * ldc * sizeof *first) == 0, "product of %s differs from %s", matrices[v]->isa,
                          matrices[1]->isa);
            guarded_free(&c, "multiply");
        }
        free(a);
        free(b);
        free(before);
        free(first);
    }
}

/* The three forms that the codec uses, each in the best variant. */
static void forms(void)
{
    akv_rng rng = {2};
    for (int round = 0; round < 60; round++) {
        const uint32_t m = pick(&rng, 40), n = pick(&rng, 120), k = pick(&rng, round % 4 ? 80 : 700);
        float *a = random_floats((size_t)m * k, &rng), *b = random_floats((size_t)n * k, &rng);
        float *at = must(malloc(((size_t)m * k + 1) * sizeof *at)), *bt = must(malloc(((size_t)n * k + 1) * sizeof *bt));
        for (uint32_t l = 0; l < k; l++) {
            for (uint32_t i = 0; i < m; i++)
                at[l * m + i] = a[i * k + l];
            for (uint32_t j = 0; j < n; j++)
                bt[l * n + j] = b[j * k + l];
        }
        guarded nt = guarded_make((size_t)m * n), nn = guarded_make((size_t)m * n), tn = guarded_make((size_t)m * n);
        for (size_t i = 0; i < (size_t)m * n; i++)
            nn.data[i] = tn.data[i] = 1;
        akv_gemm_nt(m, n, k, a, k, b, k, nt.data, n);
        akv_gemm_nn_add(m, n, k, a, k, bt, n, nn.data, n);
        akv_gemm_tn_add(m, n, k, at, m, bt, n, tn.data, n);
        for (uint32_t i = 0; i < m; i++)
            for (uint32_t j = 0; j < n; j++) {
                double sum = 0, size = 1;
                for (uint32_t l = 0; l < k; l++) {
                    sum += (double)a[i * k + l] * b[j * k + l];
                    size += fabs((double)a[i * k + l] * b[j * k + l]);
                }
                CHECK_NEAR(nt.data[i * n + j], sum, ref_gamma(k + 2) * size, "nt");
                CHECK_NEAR(nn.data[i * n + j], sum + 1, ref_gamma(k + 2) * size, "nn");
                CHECK_NEAR(tn.data[i * n + j], sum + 1, ref_gamma(k + 2) * size, "tn");
            }
        guarded_free(&nt, "nt");
        guarded_free(&nn, "nn");
        guarded_free(&tn, "tn");
        free(a);
        free(b);
        free(at);
        free(bt);
    }
}

static void nearest(void)
{
    akv_rng rng = {3};
    for (int round = 0; round < 120; round++) {
        const uint32_t k = 1 + pick(&rng, 60), dim = 1 + pick(&rng, round % 10 ? 70 : 1023), n = pick(&rng, 110);
        float *units = random_floats((size_t)k * dim, &rng), *x = random_floats((size_t)n * dim, &rng);
        for (uint32_t i = 0; i < dim && k > 3; i++) { /* two that tie in size, and tokens without any product */
            units[2 * dim + i] = -units[dim + i];
            for (uint32_t j = 0; j < n; j += 7)
                x[(size_t)j * dim + i] = 0;
        }
        for (int v = 0; v < num_matrices; v++) {
            guarded xt = guarded_make((size_t)n * dim), along = guarded_make(n), number = guarded_make(n);
            matrices[v]->transpose(x, dim, n, dim, xt.data, n);
            for (uint32_t j = 0; j < n; j++)
                for (uint32_t i = 0; i < dim; i++)
                    CHECK(xt.data[(size_t)i * n + j] == x[(size_t)j * dim + i]);
            matrices[v]->nearest(units, k, dim, xt.data, n, n, (uint32_t *)(void *)number.data, along.data);
            for (uint32_t j = 0; j < n; j++) {
                double best = 0, size = 0, own = 0;
                const uint32_t got = akv_bits_f32(number.data[j]);
                CHECK_MSG(got < k, "%s: number %u of %u", matrices[v]->isa, got, k);
                for (uint32_t a = 0; a < k; a++) {
                    double sum = 0, sizes = 0;
                    for (uint32_t i = 0; i < dim; i++) {
                        sum += (double)units[(size_t)a * dim + i] * x[(size_t)j * dim + i];
                        sizes += fabs((double)units[(size_t)a * dim + i] * x[(size_t)j * dim + i]);
                    }
                    best = fmax(best, fabs(sum));
                    size = fmax(size, sizes);
                    own = a == got ? sum : own;
                }
                CHECK_NEAR(along.data[j], own, ref_gamma(dim) * size, "%s: along", matrices[v]->isa);
                CHECK_NEAR(fabs(own), best, 2 * ref_gamma(dim) * size, "%s: not the nearest", matrices[v]->isa);
                CHECK_MSG(got != 2 || k <= 3, "%s: the second of two equal ones", matrices[v]->isa);
                if (best == 0)
                    CHECK(got == 0 && along.data[j] == 0);
            }
            guarded_free(&xt, "transpose");
            guarded_free(&along, "nearest");
            guarded_free(&number, "nearest");
        }
        free(units);
        free(x);
    }
}

/* Runs the body for every variant; SAME compares an output with the first variant's. */
#define FOR_CODERS(k)                       \
    for (int v_ = 0; v_ < num_coders; v_++) \
        for (const akv_coder_kernels *k = coders[v_]; k != NULL; k = NULL)
static float first[4096];
#define SAME(out, what)                                                                                        \
    do {                                                                                                       \
        if (v_ == 0)                                                                                           \
            memcpy(first, (out).data, (out).n * sizeof(float));                                                \
        else                                                                                                   \
            CHECK_MSG(memcmp(first, (out).data, (out).n * sizeof(float)) == 0, "%s of %s differs", what, coders[v_]->isa); \
        guarded_free(&(out), what);                                                                            \
    } while (0)

static void turns(void)
{
    akv_rng rng = {4};
    for (int round = 0; round < 100; round++) {
        const uint32_t planes = pick(&rng, 64), rest = pick(&rng, 20), dim = 2 * planes + rest;
        const akv_rope_style style = round % 2 ? AKV_ROPE_HALF_SPLIT : AKV_ROPE_INTERLEAVED;
        const int direction = round % 3 ? 1 : -1;
        float *x = random_floats(dim, &rng);
        double base[128], offset[128], a[64], b[64];
        for (uint32_t j = 0; j < planes; j++) {
            a[j] = random_gauss(&rng) * 10;
            b[j] = random_gauss(&rng);
            base[j] = cos(a[j]);
            base[planes + j] = sin(a[j]);
            offset[j] = cos(b[j]);
            offset[planes + j] = sin(b[j]);
        }
        FOR_CODERS(k) {
            guarded out = guarded_make(dim);
            if (round % 4 == 0) { /* in place */
                memcpy(out.data, x, dim * sizeof *x);
                k->turn(out.data, dim, 2 * planes, style, base, offset, direction, 1.25, out.data);
            } else {
                k->turn(x, dim, 2 * planes, style, base, offset, direction, 1.25, out.data);
            }
            for (uint32_t j = 0; j < planes; j++) {
                const uint32_t p = akv_plane_first(style, j), q = akv_plane_second(style, 2 * planes, j);
                const double c = cos(a[j] + b[j]), s = direction * sin(a[j] + b[j]), size = 2 * (fabs(x[p]) + fabs(x[q]));
                CHECK_NEAR(out.data[p], 1.25 * (x[p] * c - x[q] * s), REF_U * size, "%s: turn", k->isa);
                CHECK_NEAR(out.data[q], 1.25 * (x[p] * s + x[q] * c), REF_U * size, "%s: turn", k->isa);
            }
            for (uint32_t i = 2 * planes; i < dim; i++)
                CHECK(out.data[i] == x[i]);
            SAME(out, "turn");
        }
        free(x);
    }
}

static void sums(void)
{
    akv_rng rng = {5};
    for (uint32_t n = 0; n <= 70; n++) {
        float *x = random_floats(5 * n, &rng), *mean = random_floats(n, &rng);
        FOR_CODERS(k) {
            guarded out = guarded_make(10), added = guarded_make(n), scaled = guarded_make(n);
            k->squares(x, 5, n, NULL, out.data);
            k->squares(x, 5, n, mean, out.data + 5);
            for (uint32_t t = 0; t < 5; t++) {
                double plain = 0, centred = 0;
                for (uint32_t i = 0; i < n; i++) {
                    plain += (double)x[t * n + i] * x[t * n + i];
                    centred += ((double)x[t * n + i] - mean[i]) * ((double)x[t * n + i] - mean[i]);
                }
                CHECK_NEAR(out.data[t], plain, ref_gamma(n + 2) * plain, "%s: squares", k->isa);
                CHECK_NEAR(out.data[5 + t], centred, ref_gamma(n + 4) * centred, "%s: centred squares", k->isa);
            }
            SAME(out, "squares");
            double sum[70] = {0}, square[70] = {0};
            k->moments_add(x, n, sum, square);
            k->moments_add(x + n, n, sum, square);
            memcpy(scaled.data, x, n * sizeof *x);
            memcpy(added.data, mean, n * sizeof *x);
            k->scale_add(scaled.data, n, 0.75f, added.data);
            for (uint32_t i = 0; i < n; i++) {
                CHECK(sum[i] == (double)x[i] + x[n + i] && square[i] == (double)x[i] * x[i] + (double)x[n + i] * x[n + i]);
                CHECK(scaled.data[i] == x[i] * 0.75f && added.data[i] == mean[i] + x[i] * 0.75f);
            }
            guarded_free(&added, "scale_add");
            guarded_free(&scaled, "scale_add");
        }
        free(x);
        free(mean);
    }
}

static void coverage(void)
{
    akv_rng rng = {6};
    for (uint32_t n = 0; n <= 70; n++) {
        float *p = random_floats(3 * 70, &rng), *energy = random_floats(n, &rng), *had = random_floats(n, &rng);
        for (uint32_t i = 0; i < n; i++) {
            energy[i] = fabsf(energy[i]) + 1;
            had[i] = fabsf(had[i]);
        }
        FOR_CODERS(k) {
            guarded left = guarded_make(n), leaves = guarded_make(n), now = guarded_make(n);
            memcpy(left.data, had, n * sizeof *had);
            memcpy(now.data, had, n * sizeof *had);
            memcpy(leaves.data, p, n * sizeof *p);
            k->shrink_left(p, 70, 3, n, energy, left.data);
            k->leaves(leaves.data, energy, n);
            const float gain = k->coverage_gain(had, leaves.data, n);
            k->coverage_take(now.data, leaves.data, n);
            double want_gain = 0;
            for (uint32_t i = 0; i < n; i++) {
                float best = 0;
                for (uint32_t r = 0; r < 3; r++)
                    best = fmaxf(best, p[r * 70 + i] * p[r * 70 + i]);
                CHECK(left.data[i] == fmaxf(0, fminf(had[i], energy[i] - best)));
                const float leave = fmaxf(0, energy[i] - p[i] * p[i]);
                CHECK(leaves.data[i] == leave && now.data[i] == fminf(had[i], leave));
                want_gain += fmaxf(0, had[i] - leave);
            }
            CHECK_NEAR(gain, want_gain, ref_gamma(n + 1) * want_gain, "%s: gain", k->isa);
            CHECK(k->coverage_gain(now.data, leaves.data, n) == 0); /* taken */
            CHECK(k->coverage_gain(now.data, energy, n) <= k->coverage_gain(had, energy, n));
            SAME(left, "shrink_left");
            guarded_free(&leaves, "leaves");
            guarded_free(&now, "coverage_take");
        }
        free(p);
        free(energy);
        free(had);
    }
}

static void utilities(void)
{
    akv_rng rng = {7};
    static const uint32_t befores[] = {0, 64, 64, 10};
    for (int round = 0; round < 80; round++) {
        const uint32_t before = befores[round % 4], n = 1 + pick(&rng, 255), after = pick(&rng, 3), total = before + n + after;
        const uint32_t sinks = round % 5 == 0 ? 4 : 0, window = 64;
        const float decay = 11.0f / 12, weight = 0.3f;
        float a[400] = {0};
        for (uint32_t i = 0; i < total; i++)
            a[i] = (float)(random_unit(&rng) * (i % 50 == 7 ? 100 : 1));
        FOR_CODERS(k) {
            guarded out = guarded_make((n + 15) / 16 * 16);
            k->spread(a, before, n, total, sinks, window, decay, weight, out.data);
            for (uint32_t t = 0; t < n; t++) {
                static const double back[3] = {0.5, 0.25, 0.1};
                const uint32_t i = before + t;
                double others = 0, most = 0;
                for (uint32_t j = 1; j < window && j <= i; j++)
                    others += i - j < sinks ? 0 : a[i - j] * pow(decay, j);
                for (uint32_t j = 1; j <= 3 && i + j < total; j++)
                    others += i + j < sinks ? 0 : back[j - 1] * a[i + j];
                for (uint32_t j = 0; j <= i; j++)
                    most += a[j] * pow(decay, i - j);
                /* sums of up to i terms, less what left the window: each within rounding of all that was ever added */
                CHECK_NEAR(out.data[t], a[i] + weight * others, 80 * REF_U * (a[i] + others + most), "%s: spread at %u", k->isa, i);
            }
            for (uint32_t t = n; t < out.n; t++)
                out.data[t] = 0; /* lanes beyond the end may hold anything */
            SAME(out, "spread");
        }
        float *logits = random_floats(n, &rng), *errors = random_floats(n, &rng), *cross = random_floats(n, &rng);
        float *v = random_floats(n, &rng), *rk = random_floats(n, &rng), *rv = random_floats(n, &rng), *w = random_floats(n, &rng);
        for (uint32_t i = 0; i < n; i++) {
            v[i] = fabsf(v[i]);
            rk[i] = fabsf(rk[i]);
            rv[i] = fabsf(rv[i]);
            w[i] = i % 9 == 3 ? 0 : fabsf(w[i]);
            logits[i] = i % 9 == 3 ? -INFINITY : logits[i];
        }
        const akv_coder_query q = {0.5f, 0.125f, 0.4f, 0.6f, round % 2 ? 3.0f : 0.0f};
        FOR_CODERS(k) {
            guarded u_k = guarded_make(n), u_v = guarded_make(n);
            for (uint32_t i = 0; i < n; i++)
                u_k.data[i] = u_v.data[i] = 1;
            k->utility_add(&q, n, w, logits, errors, cross, v, rk, rv, u_k.data, u_v.data);
            for (uint32_t i = 0; i < n; i++) {
                const double deviation = fmax(0, (double)v[i] - 2.0 * cross[i] + q.output_sq), x = (double)errors[i] * q.scale;
                const double part = q.cap != 0 && w[i] != 0 ? (double)logits[i] / q.cap : 0, slope = 1 - part * part;
                const double error = (q.observed * x * x + q.incoherent * rk[i]) * slope * slope;
                const double rounding = (fabs(v[i]) + 2 * fabs(cross[i]) + q.output_sq) * (q.observed * x * x + q.incoherent * rk[i]) *
                                        (1 + part * part) * (1 + part * part) * w[i];
                CHECK_NEAR(u_k.data[i], 1 + w[i] * deviation * error, 16 * REF_U * (1 + rounding), "%s: key utility", k->isa);
                CHECK_NEAR(u_v.data[i], 1 + (double)w[i] * rv[i], 3 * REF_U * (1 + w[i] * rv[i]), "%s: value utility", k->isa);
            }
            SAME(u_k, "utility_add");
            guarded_free(&u_v, "utility_add");
        }
        free(logits);
        free(errors);
        free(cross);
        free(v);
        free(rk);
        free(rv);
        free(w);
    }
}

static void counts(void)
{
    akv_rng rng = {8};
    for (uint32_t n = 0; n <= 70; n++) {
        float *x = random_floats(n, &rng);
        float thresholds[3] = {-0.5f, n > 5 ? x[5] : 0.0f, INFINITY};
        FOR_CODERS(k) {
            uint32_t got[4] = {1, 1, 1, 99}, want[3] = {1, 1, 1};
            k->count_above(x, n, thresholds, 3, got);
            for (uint32_t i = 0; i < n; i++)
                for (int j = 0; j < 3; j++)
                    want[j] += x[i] > thresholds[j];
            CHECK(got[0] == want[0] && got[1] == want[1] && got[2] == want[2] && got[3] == 99);
        }
        free(x);
    }
}

static void codes(void)
{
    akv_rng rng = {9};
    for (int round = 0; round < 200; round++) {
        const akv_coder_lanes lanes = {{pick(&rng, 3), pick(&rng, 3), pick(&rng, 3)}};
        const uint32_t n = 16 * (lanes.by_width[0] + lanes.by_width[1] + lanes.by_width[2]);
        float *x = random_floats(n, &rng), *sigma_sq = random_floats(n, &rng);
        const float inverse = (float)(0.3 + 2 * random_unit(&rng));
        for (uint32_t i = 0; i < n; i++) {
            sigma_sq[i] = i % 11 == 5 ? 0 : fabsf(sigma_sq[i]);
            x[i] = i % 13 == 6 ? 0 : x[i];
        }
        FOR_CODERS(k) {
            float got[3];
            double want[3] = {0};
            const size_t stride = 1 + pick(&rng, 16);
            uint8_t *numbers = must(malloc(n * stride + 1));
            memset(numbers, 255, n * stride + 1);
            k->code_numbers(x, &lanes, inverse, numbers, stride);
            for (uint32_t i = 0; i < n; i++) {
                const uint32_t width = i / 16 < lanes.by_width[0] ? 4 : i / 16 < lanes.by_width[0] + lanes.by_width[1] ? 2 : 1;
                const uint32_t number = numbers[i * stride];
                const double scaled = (double)x[i] * inverse;
                double least = INFINITY, level = 0;
                CHECK_MSG(number < 1u << width, "%s: number %u of %u bits", k->isa, number, width);
                for (uint32_t m = 0; m < 1u << width; m++)
                    if (fabs(scaled - akv_level_value(m, width)) < least) {
                        least = fabs(scaled - akv_level_value(m, width));
                        level = akv_level_value(m, width);
                    }
                CHECK_NEAR(fabs(scaled - akv_level_value(number, width)), least, 4 * REF_U * (fabs(scaled) + 3), "%s: level", k->isa);
                want[0] += (double)sigma_sq[i] * x[i] * x[i];
                want[1] += fabs(sigma_sq[i] * x[i] * level);
                want[2] += sigma_sq[i] * level * level;
                for (size_t j = 1; j < stride; j++)
                    CHECK(numbers[i * stride + j] == 255);
            }
            CHECK(numbers[n * stride] == 255);
            k->coded_sums(x, sigma_sq, &lanes, inverse, got);
            for (int j = 0; j < 3; j++)
                CHECK_NEAR(got[j], want[j], ref_gamma(n + 4) * want[j], "%s: sum %d", k->isa, j);
            free(numbers);
            guarded out = guarded_make(3);
            memcpy(out.data, got, sizeof got);
            SAME(out, "coded_sums");
        }
        free(x);
        free(sigma_sq);
    }
}

/* Bases of the transform: whatever the matrix, rows of length 1, at right angles, that the matrix stretches by their values. */
static void eigenvectors(void)
{
    akv_rng rng = {10};
    for (int round = 0; round < 60; round++) {
        const uint32_t n = round < 4 ? 1 + (uint32_t)round : round == 59 ? 300 : 1 + pick(&rng, 130), rank = round % 3 == 0 ? n / 4 : n;
        const double size = round % 7 == 1 ? 1e37 / 200 : round % 7 == 2 ? 1e-20 : 1;
        float *x = random_floats((size_t)n * n, &rng), *a = must(malloc((size_t)n * n * 4)), *vectors = must(malloc((size_t)n * n * 4));
        float *values = must(malloc(n * 4)), *scratch = must(malloc(akv_eigen_scratch_floats(n) * 4));
        double *exact = must(malloc((size_t)n * n * sizeof *exact)), most = 0;
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j <= i; j++) { /* sums of squares of falling size; sometimes diagonal */
                double sum = 0;
                for (uint32_t l = 0; l < rank && (round % 5 != 4 || i == j); l++)
                    sum += (double)x[l * n + i] * x[l * n + j] * pow(0.9, l);
                exact[i * n + j] = exact[j * n + i] = a[i * n + j] = a[j * n + i] = (float)(sum / n * size);
                most = fmax(most, fabs(exact[i * n + j]));
            }
        akv_eigen_symmetric(a, n, values, vectors, scratch);
        for (uint32_t i = 0; i < n; i++) {
            const float *u = vectors + (size_t)i * n;
            for (uint32_t j = 0; j <= i; j++) {
                double product = 0;
                for (uint32_t l = 0; l < n; l++)
                    product += (double)u[l] * vectors[(size_t)j * n + l];
                CHECK_NEAR(product, i == j, 40 * sqrt(n) * REF_U, "n %u: rows %u and %u", n, i, j); /* rotations and reflections in fp32 */
            }
            for (uint32_t j = 0; j < n; j++) {
                double product = 0;
                for (uint32_t l = 0; l < n; l++)
                    product += exact[j * n + l] * u[l];
                CHECK_NEAR(product, (double)values[i] * u[j], 40 * n * REF_U * most, "n %u: value %u", n, i);
            }
        }
        free(x);
        free(a);
        free(vectors);
        free(values);
        free(scratch);
        free(exact);
    }
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    find_variants();
    printf("variants:");
    for (int v = 0; v < num_coders; v++)
        printf(" %s", coders[v]->isa);
    printf("\n");
    TEST(products);
    TEST(forms);
    TEST(nearest);
    TEST(turns);
    TEST(sums);
    TEST(coverage);
    TEST(utilities);
    TEST(counts);
    TEST(codes);
    TEST(eigenvectors);
    return TEST_DONE();
}
