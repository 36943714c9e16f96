/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tiles.c - every variant of the kernels for many rows that this machine can run, against plain loops in doubles written from the
 * contract (kernels/tile.h): what whole numbers may be off follows from the units that the kernels say they rounded to. Buffers have
 * exactly their size, so that a sanitizer sees reading beyond.
 */
#include "akv_test.h"
#include "cases.h"
#include "kernels/cpu.h"
#include "kernels/tile.h"

#define W AKV_TILE_WIDTH

static const akv_tile_kernels *variants[4];
static int num_variants;
#define FOR_VARIANTS(k)                       \
    for (int v_ = 0; v_ < num_variants; v_++) \
        for (const akv_tile_kernels *k = variants[v_]; k != NULL; k = NULL)
#define FOR_PRODUCTS(k, p) FOR_VARIANTS(k) for (const akv_tile_products *p = k->products; p != NULL; p = NULL)

static void find_variants(void)
{
#define AKV_TILES(isa, level)       \
    if (akv_cpu_machine() >= level) \
        variants[num_variants++] = &akv_tile_##isa;
#include "kernels/kernels.def"
}

static float *floats(size_t n)
{
    return must(malloc(n * sizeof(float) + (n == 0)));
}

static int16_t *words(size_t n)
{
    return must(malloc(n * sizeof(int16_t) + (n == 0)));
}

/* Numbers of a kind: 0 random, 1 all alike (the longest that 16 bits allow), 2 one among zeros, 3 of very different sizes, 4 zeros,
 * 5 huge, 6 tiny, 7 the largest of alternating signs. */
enum { KINDS = 8 };

static float number(int kind, uint32_t i, uint32_t at, akv_rng *rng)
{
    const float x = (float)random_gauss(rng);
    switch (kind) {
    case 1: return 3.7f;
    case 2: return i == at ? -5.0f : 0.0f;
    case 3: return x * expf(8.0f * (float)random_gauss(rng));
    case 4: return 0.0f;
    case 5: return x * 1e30f;
    case 6: return x * 1e-25f;
    case 7: return i % 2 ? -2.5f : 2.5f;
    default: return x;
    }
}

/* ------------------------------------------------------------------------------------------------------------ rebuilding */

static void anchors(void)
{
    akv_rng rng = {3};
    for (uint32_t dim = 1; dim <= 140; dim += dim < 20 ? 1 : 24) {
        float *units = floats(dim), *mean = floats(dim), *out = floats(dim);
        int8_t *a = must(malloc(dim));
        for (uint32_t i = 0; i < dim; i++) {
            units[i] = (float)random_gauss(&rng);
            mean[i] = (float)random_gauss(&rng);
            a[i] = (int8_t)(akv_rng_below(&rng, 255) - 127);
        }
        FOR_VARIANTS(k)
            for (int with = 0; with < 2; with++) {
                k->anchor_row(a, -0.37f, units, with ? mean : NULL, dim, out);
                for (uint32_t i = 0; i < dim; i++) {
                    const double more = (double)-0.37f * units[i] * a[i], want = (with ? mean[i] : 0) + more;
                    CHECK_NEAR(out[i], want, ref_gamma(3) * (fabs(more) + fabs(mean[i])), "%s: anchor_row, %u", k->isa, dim);
                }
            }
        free(units);
        free(mean);
        free(out);
        free(a);
    }
}

static void turning(void)
{
    akv_rng rng = {4};
    const uint32_t dim = 22;
    for (uint32_t planes = 0; planes <= 9; planes += 3)
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            uint16_t first[9], second[9];
            float base[2][9], *table = floats(planes * 2 * W), *keys = floats(dim * W), *was = floats(dim * W);
            for (uint32_t j = 0; j < planes; j++) {
                first[j] = (uint16_t)(interleaved ? 2 * j : j);
                second[j] = (uint16_t)(interleaved ? 2 * j + 1 : j + planes);
                base[0][j] = (float)random_gauss(&rng);
                base[1][j] = (float)random_gauss(&rng);
                for (uint32_t t = 0; t < 2 * W; t++)
                    table[j * 2 * W + t] = (float)random_gauss(&rng);
            }
            for (uint32_t i = 0; i < dim * W; i++)
                was[i] = (float)random_gauss(&rng);
            FOR_VARIANTS(k) {
                memcpy(keys, was, dim * W * sizeof *keys);
                k->turn(keys, planes, first, second, base[0], base[1], table);
                uint32_t touched = 0;
                for (uint32_t i = 2 * planes * W; i < dim * W; i++)
                    touched += keys[i] != was[i];
                CHECK_MSG(touched == 0, "%s: %u numbers without a plane were turned", k->isa, touched);
                for (uint32_t j = 0; j < planes; j++)
                    for (uint32_t t = 0; t < W; t++) {
                        const double tc = table[j * 2 * W + t], ts = table[j * 2 * W + W + t];
                        const double c = base[0][j] * tc - base[1][j] * ts, s = base[1][j] * tc + base[0][j] * ts;
                        const double x = was[first[j] * W + t], y = was[second[j] * W + t];
                        const double off = ref_gamma(4) * (fabs(x) + fabs(y)) *
                                           (fabs(base[0][j] * tc) + fabs(base[1][j] * ts) + fabs(base[1][j] * tc) + fabs(base[0][j] * ts));
                        CHECK_NEAR(keys[first[j] * W + t], x * c - y * s, off, "%s: turn", k->isa);
                        CHECK_NEAR(keys[second[j] * W + t], x * s + y * c, off, "%s: turn", k->isa);
                    }
            }
            free(table);
            free(keys);
            free(was);
        }
}

/* --------------------------------------------------------------------------------------------------------------- products */

static void dots_of(int kind, uint32_t dim, uint32_t rows, akv_rng *rng)
{
    float *x = floats(rows * dim), *columns = floats(dim * W), *out = floats(rows * W), *sx = floats(rows), sk[W];
    int16_t *q = words((size_t)rows * (dim + dim % 2)), *packed = words((size_t)(dim + 1) / 2 * 2 * W);
    for (uint32_t i = 0; i < rows * dim; i++)
        x[i] = number(kind, i % (dim + 1), dim / 2, rng);
    for (uint32_t i = 0; i < dim * W; i++)
        columns[i] = number(kind == 5 ? 6 : kind == 6 ? 0 : kind, i / W, dim / 2, rng);
    FOR_PRODUCTS(k, p) {
        p->pack_queries(x, rows, dim, q, sx);
        p->pack_keys(columns, dim, packed, sk);
        p->dots(q, sx, rows, dim, packed, sk, out);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t t = 0; t < W; t++) {
                double want = 0, sum_q = 0, sum_k = 0, square_q = 0, square_k = 0;
                for (uint32_t i = 0; i < dim; i++) {
                    const double a = x[r * dim + i], b = columns[i * W + t];
                    want += a * b;
                    sum_q += fabs(a);
                    sum_k += fabs(b);
                    square_q += a * a;
                    square_k += b * b;
                }
                /* half a unit of each, and float around the whole sum; the units are what lengths and largest numbers allow */
                const double half_q = 0.5001 * sx[r], half_k = 0.5001 * sk[t];
                const double off = half_q * sum_k + half_k * sum_q + dim * half_q * half_k + 8 * REF_U * fabs(want);
                CHECK_NEAR(out[r * W + t], want, off, "%s: dots of kind %d, %u x %u", k->isa, kind, rows, dim);
                CHECK_MSG(sx[r] <= 1.001 * fmax(sqrt(square_q) / 46000, sum_q / 32700) && sk[t] <= 1.001 * fmax(sqrt(square_k) / 46000, sum_k / 32700),
                          "%s: units of kind %d are larger than they have to be: %g, %g", k->isa, kind, sx[r], sk[t]);
            }
    }
    free(x);
    free(columns);
    free(out);
    free(sx);
    free(q);
    free(packed);
}

static void dots(void)
{
    akv_rng rng = {5};
    for (int kind = 0; kind < KINDS; kind++)
        for (uint32_t rows = 1; rows <= 14; rows += rows < 7 ? 1 : 7)
            for (uint32_t dim = 1; dim <= 1024; dim = dim < 4 ? dim + 1 : dim * 4 - dim % 3)
                dots_of(kind, dim, rows, &rng);
}

static void sums_of(int kind, int logits_kind, uint32_t dim, uint32_t rows, uint32_t n, akv_rng *rng)
{
    float *values = floats(n * dim), *logits = floats(rows * W), *was = floats(rows * W), *out = floats(rows * dim), *before = floats(rows * dim);
    float sv[W], max[AKV_TILE_MOST_WEIGHED], sum[AKV_TILE_MOST_WEIGHED], sw[AKV_TILE_MOST_WEIGHED], shrink[AKV_TILE_MOST_WEIGHED];
    int16_t *packed = words((size_t)dim * W);
    for (uint32_t i = 0; i < n * dim; i++)
        values[i] = number(kind, kind == 2 ? i / dim : i, n / 2, rng);
    for (uint32_t i = 0; i < rows * W; i++)
        was[i] = logits_kind == 0 ? 4.0f * (float)random_gauss(rng) : logits_kind == 1 ? 1.5f : logits_kind == 2 ? -INFINITY
                                                                                           : -40.0f + (float)random_gauss(rng);
    for (uint32_t r = 0; r < rows; r++) {
        max[r] = logits_kind == 2 ? 0.0f : -INFINITY;
        for (uint32_t t = 0; t < n; t++)
            max[r] = fmaxf(max[r], was[r * W + t]);
        max[r] += logits_kind == 3 ? 45.0f - (float)(r % 3) : 0.0f; /* an earlier tile had much larger ones */
        shrink[r] = r % 3 == 0 ? 1.0f : 0.25f;
    }
    for (uint32_t i = 0; i < rows * dim; i++)
        before[i] = (float)random_gauss(rng);
    FOR_PRODUCTS(k, p) {
        memcpy(logits, was, rows * W * sizeof *logits);
        memcpy(out, before, rows * dim * sizeof *out);
        p->pack_values(values, n, dim, packed, sv);
        p->weigh(logits, rows, n, max, sv, sum, sw);
        p->sums(logits, sw, shrink, rows, packed, dim, out);
        for (uint32_t r = 0; r < rows; r++) {
            double e[W], total = 0, length = 0;
            for (uint32_t t = 0; t < n; t++) {
                e[t] = exp((double)was[r * W + t] - max[r]);
                total += e[t];
                length += pow(e[t] * sv[t], 2);
            }
            CHECK_NEAR(sum[r], total, (ref_gamma(n) + 4e-7) * total, "%s: weigh's sum", k->isa);
            CHECK_MSG(sw[r] <= 1.001 * sqrt(length) / 32700, "%s: units of weights: %g of a length of %g", k->isa, sw[r], sqrt(length));
            for (uint32_t i = 0; i < dim; i++) {
                double want = (double)shrink[r] * before[r * dim + i], off = 4 * REF_U * fabs(want);
                for (uint32_t t = 0; t < n; t++) {
                    const double v = values[t * dim + i], in_units = sv[t] > 0 ? fabs(v) / sv[t] : 0;
                    want += e[t] * v;
                    off += 0.5001 * sv[t] * e[t] + 0.5001 * sw[r] * (in_units + 0.5) + 1e-6 * e[t] * fabs(v);
                }
                CHECK_NEAR(out[r * dim + i], want, off + 4 * REF_U * fabs(want), "%s: sums of kinds %d, %d, %u x %u, %u tokens", k->isa, kind,
                           logits_kind, rows, dim, n);
            }
        }
        for (uint32_t t = 0; t < n; t++) {
            double largest = 0;
            for (uint32_t i = 0; i < dim; i++)
                largest = fmax(largest, fabs(values[t * dim + i]));
            CHECK_MSG(sv[t] <= 1.001 * largest * 8 / 65500, "%s: units of values: %g of %g", k->isa, sv[t], largest);
        }
    }
    free(values);
    free(logits);
    free(was);
    free(out);
    free(before);
    free(packed);
}

static void sums(void)
{
    akv_rng rng = {6};
    for (int kind = 0; kind < KINDS; kind++)
        for (int logits_kind = 0; logits_kind < 4; logits_kind++)
            for (uint32_t rows = 1; rows <= AKV_TILE_MOST_WEIGHED; rows = rows < 8 ? rows + 3 : rows + 37)
                for (uint32_t n = 1; n <= W; n += 21)
                    for (uint32_t dim = 2; dim <= 256; dim = dim < 8 ? dim * 3 : dim < 64 ? dim * 4 + 6 : dim + 154)
                        sums_of(kind, logits_kind, dim, rows, n, &rng);
}

/* What is not finite is not lost, and stays where it belongs. */
static void not_finite(void)
{
    akv_rng rng = {7};
    enum { DIM = 40, ROWS = 9, N = 50 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int b = 0; b < 3; b++)
        FOR_PRODUCTS(k, p) {
            float x[ROWS * DIM], columns[DIM * W], values[N * DIM], logits[ROWS * W], out[ROWS * DIM] = {0};
            float sx[ROWS], sk[W], sv[W], max[ROWS] = {0}, sum[ROWS], sw[ROWS], shrink[ROWS];
            int16_t q[ROWS * DIM], keys[DIM * W], packed[DIM * W];
            for (uint32_t i = 0; i < ROWS * DIM; i++)
                x[i] = (float)random_gauss(&rng);
            for (uint32_t i = 0; i < DIM * W; i++)
                columns[i] = (float)random_gauss(&rng);
            for (uint32_t i = 0; i < N * DIM; i++)
                values[i] = (float)random_gauss(&rng);
            x[2 * DIM + 7] = bad[b];
            columns[11 * W + 30] = bad[b];
            p->pack_queries(x, ROWS, DIM, q, sx);
            p->pack_keys(columns, DIM, keys, sk);
            p->dots(q, sx, ROWS, DIM, keys, sk, logits);
            for (uint32_t r = 0; r < ROWS; r++)
                for (uint32_t t = 0; t < W; t++)
                    CHECK_MSG(isnan(logits[r * W + t]) == (r == 2 || t == 30), "%s: dots of what is not finite", k->isa);
            for (uint32_t i = 0; i < ROWS * W; i++)
                logits[i] = -fabsf((float)random_gauss(&rng));
            logits[4 * W + 12] = NAN;
            for (uint32_t r = 0; r < ROWS; r++)
                shrink[r] = 1.0f;
            p->pack_values(values, N, DIM, packed, sv);
            p->weigh(logits, ROWS, N, max, sv, sum, sw);
            p->sums(logits, sw, shrink, ROWS, packed, DIM, out);
            for (uint32_t r = 0; r < ROWS; r++)
                CHECK_MSG(isnan(sum[r]) == (r == 4) && isnan(out[r * DIM]) == (r == 4), "%s: a logit that is no number", k->isa);
            values[3 * DIM + 5] = bad[b];
            for (uint32_t i = 0; i < ROWS * W; i++)
                logits[i] = -fabsf((float)random_gauss(&rng));
            p->pack_values(values, N, DIM, packed, sv);
            p->weigh(logits, ROWS, N, max, sv, sum, sw);
            p->sums(logits, sw, shrink, ROWS, packed, DIM, out);
            for (uint32_t r = 0; r < ROWS; r++)
                CHECK_MSG(!isnan(sum[r]) && isnan(out[r * DIM + 5]), "%s: a value that is not finite", k->isa);
        }
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    find_variants();
    bool whole = false;
    printf("variants:");
    FOR_VARIANTS(k) {
        printf(" %s%s", k->isa, k->products != NULL ? " (whole numbers)" : "");
        whole = whole || k->products != NULL;
    }
    printf("\n");
    TEST(anchors);
    TEST(turning);
    if (whole) { /* a machine without such products has nothing to check there */
        TEST(dots);
        TEST(sums);
        TEST(not_finite);
    }
    return TEST_DONE();
}
