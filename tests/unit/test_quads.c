/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_quads.c - every variant of the quad kernels that this machine can run, against plain loops in doubles or whole numbers
 * written from the contract (kernels/quad.h). Inputs lie in buffers of exactly their size, so that a sanitizer sees reading beyond.
 */
#include "akv_test.h"
#include "attn/attend.h"
#include "cases.h"
#include "kernels/cpu.h"
#include "kernels/quad.h"

static const akv_quad_kernels *variants[8];
static int num_variants;
#define FOR_VARIANTS(k)                   \
    for (int v_ = 0; v_ < num_variants; v_++) \
        for (const akv_quad_kernels *k = variants[v_]; k != NULL; k = NULL)

static void find_variants(void)
{
#define AKV_QUADS(isa, level)       \
    if (akv_cpu_runs(level))        \
        variants[num_variants++] = &akv_quad_##isa;
#include "kernels/kernels.def"
}

/* Exactly `bytes`, at an address that is no multiple of 64 (but of 4), with random contents. */
static void *odd_bytes(size_t bytes, void **base, akv_rng *rng)
{
    uint8_t *all = must(malloc(bytes + 4));
    *base = all;
    for (size_t i = 0; i < bytes + 4; i++)
        all[i] = (uint8_t)akv_rng_next(rng);
    return all + 4;
}

static void unpacking(void)
{
    akv_rng rng = {11};
    for (uint32_t bits = 1; bits <= 20; bits++)
        for (uint32_t n = 1; n <= 64; n += n < 18 ? 1 : 23) {
            void *b0, *b1;
            uint8_t *index = odd_bytes((n * bits + 7) / 8, &b0, &rng), *coeff = odd_bytes((n + 1) / 2, &b1, &rng);
            float *scales = must(malloc(sizeof *scales << bits));
            for (uint32_t i = 0; i < 1u << bits; i++)
                scales[i] = (float)random_gauss(&rng);
            FOR_VARIANTS(k) {
                uint32_t anchor[64], wrong = 0;
                float weight[64];
                k->unpack_anchors(index, bits, coeff, scales, n, anchor, weight);
                for (uint32_t t = 0; t < n; t++) {
                    uint32_t want = 0;
                    for (uint32_t b = 0; b < bits; b++)
                        want |= (uint32_t)(index[(t * bits + b) / 8] >> ((t * bits + b) % 8) & 1) << b;
                    int code = (coeff[t / 2] >> (t % 2 * 4) & 15) - (coeff[t / 2] >> (t % 2 * 4) & 8 ? 16 : 0);
                    double gamma = code == -8 ? 1 : code * 2.0 / 7;
                    wrong += anchor[t] != want || fabs(weight[t] - gamma * scales[want]) > 4 * REF_U * fabs(gamma * scales[want]);
                }
                for (uint32_t t = n; t < (n + 15) / 16 * 16; t++)
                    wrong += anchor[t] != 0 || weight[t] != 0;
                CHECK_MSG(wrong == 0, "%s: %u of %u anchors of %u bits wrong", k->isa, wrong, n, bits);
            }
            free(b0);
            free(b1);
            free(scales);
        }
}

/* Turning to the tile, and the mean's share of the logits at the tile's 64 positions. */
static void turning(void)
{
    enum { PLANES = 50, PP = 64 };
    akv_rng rng = {12};
    float rows[16 * PP] = {0}, table[PP * 64] = {0}, moments[6 * PP] = {0}, rest[4];
    double theta[PP] = {0}, cosine[PP], sine[PP], step[2 * PP];
    uint32_t fast = 0;
    for (uint32_t j = 0; j < PP; j++) {
        theta[j] = j < PLANES ? pow(1e4, -(double)j / PLANES) : 0;
        cosine[j] = cos(1000 * theta[j]);
        sine[j] = sin(1000 * theta[j]);
        step[j] = cos(64 * theta[j]);
        step[PP + j] = sin(64 * theta[j]);
        fast = j < PLANES && 31.5 * theta[j] > AKV_QUAD_SLOW ? j + 1 : fast;
    }
    for (uint32_t j = 0; j < PLANES; j++) {
        for (uint32_t r = 0; r < 16; r++)
            rows[r * PP + j] = (float)((r % 8 < 4 ? 5000 : 1) * random_gauss(&rng));
        for (int i = 0; i < 32 && j < fast; i++) {
            table[j * 64 + (uint32_t)i] = (float)cos((i + 0.5) * theta[j]);
            table[j * 64 + 32 + (uint32_t)i] = (float)sin((i + 0.5) * theta[j]);
        }
        double x = 32 * theta[j], moment[6] = {1, -x * x / 2, pow(x, 4) / 24, x, -pow(x, 3) / 6, pow(x, 5) / 120};
        for (uint32_t m = 0; m < 6 && j >= fast; m++)
            moments[m * PP + j] = (float)moment[m];
    }
    for (int r = 0; r < 4; r++)
        rest[r] = (float)random_gauss(&rng);
    FOR_VARIANTS(k) {
        double c[PP], s[PP];
        int16_t query16[2 * PP * 4];
        float mean_rows[8 * PP], logits[256];
        memcpy(c, cosine, sizeof c);
        memcpy(s, sine, sizeof s);
        k->turn_rows(rows, c, s, step, PP, query16, mean_rows);
        for (uint32_t j = 0; j < PP; j++) {
            for (uint32_t r = 0; r < 8; r++) {
                double x0 = rows[r * PP + j], x1 = rows[(8 + r) * PP + j];
                double y[2] = {x0 * cosine[j] + x1 * sine[j], x1 * cosine[j] - x0 * sine[j]};
                for (uint32_t part = 0; part < 2; part++) {
                    if (r < 4)
                        CHECK_NEAR(query16[j / 32 * 256 + part * 128 + j % 32 / 8 * 32 + r * 8 + j % 8], y[part], 0.502,
                                   "%s: turned query", k->isa);
                    else
                        CHECK_NEAR(mean_rows[(part * 4 + r - 4) * PP + j], y[part], 8 * REF_U * (fabs(x0) + fabs(x1)), "%s: turned mean",
                                   k->isa);
                }
            }
            CHECK_NEAR(c[j], cos(1064 * theta[j]), 1e-12, "%s: next base", k->isa);
            CHECK_NEAR(s[j], sin(1064 * theta[j]), 1e-12, "%s: next base", k->isa);
        }
        k->mean_logits(mean_rows, PP, table, fast, moments, rest, logits);
        for (uint32_t t = 0; t < 64; t++)
            for (uint32_t r = 0; r < 4; r++) {
                double want = rest[r], size = fabs(want);
                for (uint32_t j = 0; j < PLANES; j++) {
                    double a = mean_rows[r * PP + j], b = mean_rows[(4 + r) * PP + j], d = (t - 31.5) * theta[j];
                    want += a * cos(d) + b * sin(d);
                    size += fabs(a) + fabs(b);
                }
                CHECK_NEAR(logits[akv_quad_slot(t) * 4 + r], want, (ref_gamma(PLANES) + 1e-7) * size, "%s: mean logit", k->isa);
            }
    }
}

static int32_t mulr(int32_t a, int32_t b)
{
    return (int32_t)floor(((double)a * b + 16384) / 32768);
}

static void anchors(void)
{
    const uint32_t shapes[][2] = {{128, 128}, {64, 64}, {80, 80}, {96, 48}, {112, 112}, {256, 256}, {192, 64}, {6, 6}, {2, 2}, {64, 0}, {10, 4}};
    akv_rng rng = {13};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int style = 0; style < 2; style++)
            for (uint32_t n = 1; n <= 64; n += n == 1 ? 16 : 15) {
                const uint32_t dim = shapes[i][0], count = 9;
                const akv_quad_shape shape = akv_quad_shape_of(dim, shapes[i][1], (akv_rope_style)style);
                const uint32_t P = shape.planes, PP = shape.padded_planes, width = akv_quad_width(&shape);
                void *b0;
                int8_t *bytes = odd_bytes((size_t)count * dim, &b0, &rng);
                int16_t *turn = must(calloc(64 * 2 * PP + 1, sizeof *turn)), *query = must(calloc(width * 4, sizeof *query));
                uint32_t anchor[64] = {0};
                float weight[64] = {0}, scale[4] = {1e-6f, -2e-6f, 0, 3e-6f};
                const int limit = 2147483647 / 23171 / (int)(width / 8 + 1); /* so that no sum leaves 32 bits */
                for (uint32_t t = 0; t < 64; t++)
                    for (uint32_t j = 0; j < P; j++) {
                        double angle = 6.3 * random_unit(&rng);
                        turn[t * 2 * PP + j / 32 * 64 + j % 32] = (int16_t)rint(16384 * cos(angle));
                        turn[t * 2 * PP + j / 32 * 64 + 32 + j % 32] = (int16_t)rint(16384 * sin(angle));
                    }
                for (uint32_t e = 0; e < width * 4; e++)
                    query[e] = (int16_t)(limit > 32767 ? (int)akv_rng_below(&rng, 65534) - 32767
                                                       : (int)akv_rng_below(&rng, (uint64_t)limit) - limit / 2);
                for (uint32_t t = 0; t < n; t++) {
                    anchor[t] = (uint32_t)akv_rng_below(&rng, count);
                    weight[t] = (float)random_gauss(&rng);
                }
                FOR_VARIANTS(k) {
                    float logits[256];
                    for (int l = 0; l < 256; l++)
                        logits[l] = 2;
                    k->anchor_logits(bytes, &shape, turn, query, anchor, weight, scale, n, logits, bytes, 128);
                    for (uint32_t t = 0; t < n; t++) {
                        const int8_t *a = bytes + anchor[t] * dim;
                        int32_t x[1024] = {0};
                        for (uint32_t j = 0; j < P; j++) {
                            int32_t x0 = 256 * a[style == 0 ? j : 2 * j], x1 = 256 * a[style == 0 ? j + P : 2 * j + 1];
                            int32_t c = turn[t * 2 * PP + j / 32 * 64 + j % 32], s = turn[t * 2 * PP + j / 32 * 64 + 32 + j % 32];
                            x[j / 32 * 64 + j % 32] = mulr(x0, c) - mulr(x1, s);
                            x[j / 32 * 64 + 32 + j % 32] = mulr(x0, s) + mulr(x1, c);
                        }
                        for (uint32_t j = 0; j < shape.rest; j++)
                            x[2 * PP + j] = 128 * a[2 * P + j];
                        for (uint32_t r = 0; r < 4; r++) {
                            double sum = 0, part[4] = {0}, size = 0;
                            for (uint32_t e = 0; e < width; e++) {
                                double product = (double)x[e] * query[e / 8 * 32 + r * 8 + e % 8];
                                sum += product;
                                part[e % 8 / 2] += product;
                            }
                            for (int e = 0; e < 4; e++)
                                size += fabs(part[e]);
                            CHECK_NEAR(logits[akv_quad_slot(t) * 4 + r], 2 + (double)scale[r] * weight[t] * sum,
                                       8 * REF_U * (2 + fabs((double)scale[r] * weight[t]) * size), "%s: dim %u rotary %u style %d n %u",
                                       k->isa, dim, shapes[i][1], style, n);
                        }
                    }
                }
                free(b0);
                free(turn);
                free(query);
            }
}

static void sorting(void)
{
    akv_rng rng = {14};
    const uint32_t lengths[] = {1, 7, 63, 64, 65, 100, 1000, 1023, 1024};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        for (uint32_t levels = 1; levels <= 15; levels++) {
            uint32_t n = lengths[i], planes = akv_level_planes(levels), row = (n + 7) / 8;
            uint8_t *bits = must(calloc(planes * row, 1)), level[1024];
            for (uint32_t t = 0; t < n; t++) {
                level[t] = (uint8_t)akv_rng_below(&rng, levels + 1);
                for (uint32_t p = 0; p < planes; p++)
                    bits[p * row + t / 8] |= (uint8_t)((level[t] >> p & 1) << (t % 8));
            }
            FOR_VARIANTS(k) {
                uint16_t slots[1024 + AKV_QUAD_SPARE_SLOTS];
                uint32_t first[17], at = 0, wrong = 0;
                k->sort_levels(bits, row, planes, n, levels, slots, first);
                for (uint32_t l = 1; l <= levels; l++) {
                    wrong += first[l] != at;
                    for (uint32_t t = 0; t < n; t++)
                        if (level[t] == l)
                            wrong += slots[at++] != akv_quad_slot(t);
                }
                wrong += first[levels + 1] != at;
                CHECK_MSG(wrong == 0, "%s: %u wrong of %u tokens, %u levels", k->isa, wrong, n, levels);
            }
            free(bits);
        }
}

/* Level tables as lists. */
static void lists(void)
{
    akv_rng rng = {16};
    const uint32_t coords[] = {1, 2, 31, 32, 33, 64, 100, 128, 500, 512};
    for (size_t i = 0; i < sizeof coords / sizeof coords[0]; i++)
        for (int kind = 0; kind < 5; kind++) { /* all of one entry, then mixed */
            const uint32_t n = coords[i], bytes = (n + 3) / 4;
            void *b0;
            uint8_t *row = odd_bytes(bytes, &b0, &rng);
            if (kind < 4)
                memset(row, kind * 0x55, bytes);
            FOR_VARIANTS(k) {
                akv_level_list list;
                uint32_t at = 0, bits = 0, wrong = 0;
                k->list_level(row, n, &list);
                for (uint32_t w = 0; w < 3; w++) {
                    uint32_t count = 0;
                    for (uint32_t c = 0; c < n; c++)
                        if ((row[c / 4] >> (c % 4 * 2) & 3u) == 3 - w) {
                            wrong += list.coord[at++] != c;
                            bits += 4u >> w;
                            count++;
                        }
                    wrong += list.by_width[w] != count;
                }
                wrong += list.count != at || list.bits != bits;
                CHECK_MSG(wrong == 0, "%s: %u wrong of %u coordinates", k->isa, wrong, n);
            }
            free(b0);
        }
}

/* A level with counts of each width: quantised queries, key residuals, value residuals. */
static void codes(void)
{
    static const double unit[3] = {0.02622, 0.15104, 0.7979};
    static const int32_t most[3] = {104, 10, 1};
    const uint32_t widths[][3] = {{4, 4, 4}, {1, 2, 3}, {0, 0, 5}, {0, 7, 0}, {9, 0, 0}, {3, 21, 41}, {128, 0, 0}, {0, 0, 1}};
    const uint32_t counts[] = {1, 2, 15, 16, 17, 31, 33, 200, 1024};
    akv_rng rng = {15};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            const uint32_t n = counts[c];
            akv_level_list list = {0};
            akv_quad_level level = {{widths[i][0], widths[i][1], widths[i][2]}, 0, 0};
            for (uint32_t w = 0; w < 3; w++)
                for (uint32_t m = 0; m < widths[i][w]; m++) {
                    list.coord[list.count] = (uint16_t)((list.count * 7 + 3) % 131);
                    list.width[list.count++] = (uint8_t)(4 >> w);
                }
            memcpy(list.by_width, level.by_width, sizeof level.by_width);
            level.bits = list.bits = 4 * widths[i][0] + 2 * widths[i][1] + widths[i][2];
            level.fours = akv_quad_fours(level.by_width);
            const size_t bytes = (n + 1) / 2 + n / 16 * 2 * level.bits + (n % 16 * level.bits + 7) / 8;
            void *b0;
            uint8_t *run = odd_bytes(bytes, &b0, &rng);
            float *z = must(malloc(131 * 4 * sizeof *z)), *start = must(malloc(1024 * 4 * sizeof *start));
            uint16_t slots[1024];
            int8_t *number = must(malloc((size_t)n * list.count)); /* step of coordinate m of residual t */
            double *gain = must(malloc(n * sizeof *gain));
            for (uint32_t t = 0; t < 1024; t++)
                slots[t] = (uint16_t)((t * 77 + 5) % 1024);
            for (uint32_t e = 0; e < 131 * 4; e++)
                z[e] = (float)random_gauss(&rng);
            for (uint32_t e = 0; e < 4096; e++)
                start[e] = (float)exp(-12 * random_unit(&rng));
            for (uint32_t t = 0; t < n; t++) {
                const uint8_t *group = run + (n + 1) / 2 + (size_t)(t / 16) * 2 * level.bits;
                uint32_t g = n - t / 16 * 16 < 16 ? n - t / 16 * 16 : 16, bit = 0;
                gain[t] = exp2(((run[t / 2] >> (t % 2 * 4) & 15) - 8.0) / 3);
                for (uint32_t m = 0; m < list.count; m++) {
                    uint32_t at = bit + t % 16 * list.width[m], x = 0, w = list.width[m] == 4 ? 0 : list.width[m] == 2 ? 1 : 2;
                    for (uint32_t b = 0; b < list.width[m]; b++)
                        x |= (uint32_t)(group[(at + b) / 8] >> ((at + b) % 8) & 1) << b;
                    number[t * list.count + m] = (int8_t)rint(ref_ladder_value(x, list.width[m]) / unit[w]);
                    bit += g * list.width[m];
                }
            }
            float *first = must(malloc(131 * 4 * sizeof *first)); /* what the first variant placed */
            FOR_VARIANTS(k) {
                int8_t *query = must(malloc(level.fours * 32));
                int32_t bias[8];
                float scale[4], *logits = must(malloc(4096 * sizeof *logits)), *sums = must(calloc(level.fours * 64, sizeof *sums));
                float *placed = must(malloc(131 * 4 * sizeof *placed));
                uint8_t *scratch = must(aligned_alloc(64, 24576));
                k->quantise_level(z, &list, query, bias, scale);
                memcpy(logits, start, 4096 * sizeof *logits);
                k->code_dots(run, n, &level, query, bias, scale, slots, logits);
                k->code_sums(run, n, &level, slots, start, scratch, sums);
                memcpy(placed, z, 131 * 4 * sizeof *placed);
                k->place_sums(sums, &list, placed);
                if (v_ == 0)
                    memcpy(first, placed, 131 * 4 * sizeof *first);
                for (uint32_t r = 0; r < 4; r++) {
                    double whole[512], largest = 0, sum_bias[2] = {0};
                    for (uint32_t w = 0, m = 0, four = 0; w < 3; four += (widths[i][w++] + 3) / 4)
                        for (uint32_t e = 0; e < widths[i][w]; e++, m++) {
                            const int8_t *q = query + (four + e / 4) * 32 + r * 4 + e % 4;
                            double want = unit[w] * z[list.coord[m] * 4 + r];
                            whole[m] = 256.0 * q[0] + q[16];
                            CHECK_NEAR(whole[m] * scale[r], want, (w == 2 ? 256 : 1) * 0.501 * scale[r] + 4 * REF_U * fabs(want),
                                       "%s: quantised query", k->isa);
                            CHECK(w < 2 || q[16] == 0);
                            largest = fmax(largest, fabs(whole[m]));
                            sum_bias[0] -= q[0] * most[w];
                            sum_bias[1] -= q[16] * most[w];
                        }
                    CHECK((largest == AKV_QUAD_CODE_MAX || largest == 127 * 256) && bias[r] == sum_bias[0] && bias[4 + r] == sum_bias[1]);
                    double top = 0;
                    for (uint32_t t = 0; t < n; t++) {
                        double sum = 0, size = 0, was = start[slots[t] * 4 + r];
                        for (uint32_t m = 0; m < list.count; m++) {
                            sum += whole[m] * number[t * list.count + m];
                            size += fabs(whole[m] * number[t * list.count + m]);
                        }
                        CHECK_NEAR(logits[slots[t] * 4 + r], was + gain[t] * scale[r] * sum,
                                   8 * REF_U * (fabs(was) + gain[t] * scale[r] * size), "%s: residual logit, n %u, widths %u %u %u",
                                   k->isa, n, widths[i][0], widths[i][1], widths[i][2]);
                        top = fmax(top, gain[t] * was);
                    }
                    for (uint32_t w = 0, m = 0, four = 0; w < 3; four += (widths[i][w++] + 3) / 4)
                        for (uint32_t e = 0; e < widths[i][w]; e++, m++) {
                            double sum = 0, size = 0;
                            for (uint32_t t = 0; t < n; t++) {
                                sum += gain[t] * start[slots[t] * 4 + r] * number[t * list.count + m];
                                size += abs(number[t * list.count + m]);
                            }
                            const uint32_t place = list.coord[m] * 4u + r;
                            CHECK_NEAR(placed[place], z[place] + unit[w] * sum,
                                       unit[w] * ((w == 2 ? 0.51 / 255 : 0.501 / 65535) + 8 * REF_U) * top * size + 4 * REF_U * fabs(z[place]),
                                       "%s: value sum, n %u", k->isa, n);
                            /* the same whole weights in all variants, 8 bits of them where they are enough */
                            CHECK_NEAR(placed[place], first[place], 8 * REF_U * (unit[w] * top * size + fabs(z[place])),
                                       "%s: value sum against %s, n %u", k->isa, variants[0]->isa, n);
                        }
                }
                /* slots of nobody are as they were */
                uint32_t touched = 0;
                for (uint32_t t = n; t < 1024; t++)
                    touched += memcmp(logits + slots[t] * 4, start + slots[t] * 4, 16) != 0;
                CHECK_MSG(touched == 0, "%s: %u logits of other tokens changed", k->isa, touched);
                const float was = z[list.coord[0] * 4 + 2];
                z[list.coord[0] * 4 + 2] = NAN; /* must come out as NaN, not as a large whole number */
                k->quantise_level(z, &list, query, bias, scale);
                CHECK(isnan(scale[2]) && !isnan(scale[1]));
                z[list.coord[0] * 4 + 2] = was;
                free(query);
                free(logits);
                free(sums);
                free(placed);
                free(scratch);
            }
            free(b0);
            free(z);
            free(first);
            free(start);
            free(number);
            free(gain);
        }
}

static void softmax_and_sums(void)
{
    akv_rng rng = {16};
    for (uint32_t n = 16; n <= 1024; n += n < 64 ? 16 : 320) {
        float x[4096], w[4096], max[4] = {-3, 1, -INFINITY, 0.5f};
        for (uint32_t i = 0; i < n * 4; i++)
            x[i] = i % 4 == 0 && i % 7 == 0 ? -INFINITY : (float)(40 * random_gauss(&rng));
        FOR_VARIANTS(k) {
            float top[4], sum[4] = {1, 2, 3, 4};
            double want[4] = {1, 2, 3, 4};
            memcpy(top, max, sizeof top);
            k->row_max(x, n, top);
            for (uint32_t r = 0; r < 4; r++) {
                float best = max[r];
                for (uint32_t i = r; i < n * 4; i += 4)
                    best = x[i] > best ? x[i] : best;
                CHECK(best == top[r]);
            }
            memcpy(w, x, sizeof w);
            k->exp_sum(w, n, top, sum);
            for (uint32_t i = 0; i < n * 4; i++) {
                double d = (double)(x[i] - top[i % 4]), e = d < -87 ? 0 : exp(d);
                CHECK_NEAR(w[i], e, 2.5e-7 * e, "%s: exp(%g)", k->isa, d);
                want[i % 4] += e;
            }
            for (uint32_t r = 0; r < 4; r++)
                CHECK_NEAR(sum[r], want[r], (2.5e-7 + ref_gamma(n)) * want[r], "%s: sum", k->isa);
            float nan[64] = {0}, zero[4] = {0}, total[4] = {0};
            nan[9] = NAN;
            k->exp_sum(nan, 16, zero, total);
            CHECK(isnan(nan[9]) && isnan(total[1]) && !isnan(total[0]));
        }
    }
    for (uint32_t dim = 2; dim <= 130; dim += dim < 20 ? 2 : 37)
        for (uint32_t n = 0; n < 40; n += 13) {
            void *b0;
            int8_t *rows = odd_bytes((size_t)n * dim, &b0, &rng);
            float w[160], x[4 * 130], out[4 * 130], dots[160];
            for (int i = 0; i < 160; i++)
                w[i] = (float)random_gauss(&rng);
            for (uint32_t i = 0; i < 4 * dim; i++)
                x[i] = (float)random_gauss(&rng);
            FOR_VARIANTS(k) {
                memcpy(out, x, 4 * dim * sizeof *x);
                k->bytes_sum(w, rows, n, dim, out);
                k->bytes_dot(x, rows, n, dim, dots);
                for (uint32_t r = 0; r < 4; r++) {
                    for (uint32_t i = 0; i < dim; i++) {
                        double sum = x[r * dim + i], size = fabs(sum);
                        for (uint32_t a = 0; a < n; a++) {
                            sum += (double)w[a * 4 + r] * rows[a * dim + i];
                            size += fabs((double)w[a * 4 + r] * rows[a * dim + i]);
                        }
                        CHECK_NEAR(out[r * dim + i], sum, ref_gamma(n) * size, "%s: bytes_sum", k->isa);
                    }
                    for (uint32_t a = 0; a < n; a++) {
                        double sum = 0, size = 0;
                        for (uint32_t i = 0; i < dim; i++) {
                            sum += (double)x[r * dim + i] * rows[a * dim + i];
                            size += fabs((double)x[r * dim + i] * rows[a * dim + i]);
                        }
                        CHECK_NEAR(dots[a * 4 + r], sum, ref_gamma(dim) * size, "%s: bytes_dot", k->isa);
                    }
                }
                uint32_t anchor[64];
                float hist[64] = {0}, weights[256], by[64];
                double want[64] = {0};
                for (uint32_t t = 0; t < 64; t++) {
                    anchor[t] = t * 5 % 16;
                    by[t] = w[t];
                    for (uint32_t r = 0; r < 4; r++) {
                        weights[akv_quad_slot(t) * 4 + r] = (float)(t + r) / 64;
                        if (t < 50)
                            want[anchor[t] * 4 + r] += (double)by[t] * (t + r) / 64;
                    }
                }
                k->histogram(anchor, by, 50, weights, hist);
                for (int i = 0; i < 64; i++)
                    CHECK_NEAR(hist[i], want[i], 1e-5, "%s: histogram", k->isa);
            }
            free(b0);
        }
}

static void tiles(void)
{
    akv_rng rng = {17};
    for (uint32_t dim = 0; dim <= 130; dim += dim < 6 ? 2 : 31)
        for (uint32_t rows = 0; rows <= 13; rows++)
            for (uint32_t n = 1; n <= 64; n += 21) {
                const size_t stride = n + rows % 3;
                float *x = must(malloc((rows * dim + 1) * sizeof *x)), *columns = must(malloc((dim * 64 + 1) * sizeof *columns));
                float *w = must(malloc((rows * stride + 1) * sizeof *w)), *tokens = must(malloc((n * dim + 1) * sizeof *tokens));
                float *out = must(malloc((rows * 64 + 1) * sizeof *out)), *sums = must(malloc((rows * dim + 1) * sizeof *sums));
                for (uint32_t i = 0; i < rows * dim; i++)
                    x[i] = (float)random_gauss(&rng);
                for (uint32_t i = 0; i < dim * 64; i++)
                    columns[i] = (float)random_gauss(&rng);
                for (uint32_t i = 0; i < rows * stride; i++)
                    w[i] = (float)random_gauss(&rng);
                for (uint32_t i = 0; i < n * dim; i++)
                    tokens[i] = (float)random_gauss(&rng);
                FOR_VARIANTS(k) {
                    k->tile_dots(x, rows, dim, columns, out);
                    memcpy(sums, x, rows * dim * sizeof *x);
                    k->tile_sums(w, stride, rows, tokens, n, dim, sums);
                    for (uint32_t r = 0; r < rows; r++) {
                        for (uint32_t t = 0; t < 64; t++) {
                            double sum = 0, size = 0;
                            for (uint32_t i = 0; i < dim; i++) {
                                sum += (double)x[r * dim + i] * columns[i * 64 + t];
                                size += fabs((double)x[r * dim + i] * columns[i * 64 + t]);
                            }
                            CHECK_NEAR(out[r * 64 + t], sum, ref_gamma(dim) * size, "%s: tile_dots %u x %u", k->isa, rows, dim);
                        }
                        for (uint32_t i = 0; i < dim; i++) {
                            double sum = x[r * dim + i], size = fabs(sum);
                            for (uint32_t t = 0; t < n; t++) {
                                sum += (double)w[r * stride + t] * tokens[t * dim + i];
                                size += fabs((double)w[r * stride + t] * tokens[t * dim + i]);
                            }
                            CHECK_NEAR(sums[r * dim + i], sum, ref_gamma(n + 1) * size, "%s: tile_sums %u x %u", k->isa, rows, dim);
                        }
                    }
                }
                free(x);
                free(columns);
                free(w);
                free(tokens);
                free(out);
                free(sums);
            }
}

/* Everything that one tile of a window wants, from random queries, anchors and a mean; at the widest turn that is allowed. */
static void slow_tile(const akv_quad_kernels *k, uint32_t half, uint32_t at, uint32_t count, float magnitude, akv_rng *rng)
{
    const int64_t begin = 123457; /* of the window */
    double freq[64], step[64], cosine[32], sine[32];
    float query[512], middle[128], rows[1024], scale[4], series[256], largest[8] = {0}, phase[64], moments[384] = {0}, mean_rows[256];
    float mean_terms[32], logits[256], weight[64];
    uint16_t units[128], mean[128];
    int16_t turn16[64 * 128], query16[256];
    uint32_t anchor[64], fast = 64;
    void *b0;
    int8_t *bytes = odd_bytes((size_t)count * 128, &b0, rng);
    float *terms = must(malloc((size_t)count * 32 * sizeof *terms)), *table;
    for (uint32_t j = 0; j < 64; j++)
        freq[j] = pow(half / 1.25, -(double)j / 32);
    while (fast > 0 && 31.5 * freq[fast - 1] <= AKV_QUAD_SLOW)
        fast--;
    table = must(malloc((fast + 1) * 64 * sizeof *table));
    for (uint32_t i = 0; i < 512; i++)
        query[i] = (float)random_gauss(rng);
    for (uint32_t i = 0; i < 128; i++) {
        units[i] = akv_f32_to_bf16((float)(0.01 + random_unit(rng)));
        mean[i] = akv_f32_to_bf16((float)random_gauss(rng));
    }
    for (uint32_t j = 0; j < 64; j++) { /* the planes' units are one */
        units[64 + j] = units[j];
        middle[j] = (float)cos(31.5 * freq[j]);
        middle[64 + j] = (float)sin(31.5 * freq[j]);
        for (uint32_t t = 0; t < 64; t++) { /* what belongs to upper planes is not read */
            turn16[t * 128 + j / 32 * 64 + j % 32] = (int16_t)(j < 32 ? rint(16384 * cos(t * freq[j])) : 32767);
            turn16[t * 128 + j / 32 * 64 + 32 + j % 32] = (int16_t)(j < 32 ? rint(16384 * sin(t * freq[j])) : 32767);
        }
        const double x = 32 * freq[j], moment[6] = {1, -x * x / 2, x * x * x * x / 24, x, -x * x * x / 6, x * x * x * x * x / 120};
        for (uint32_t e = 0; e < 6 && j >= fast; e++)
            moments[e * 64 + j] = (float)moment[e];
        for (uint32_t i = 0; i < 32 && j < fast; i++) {
            table[j * 64 + i] = (float)cos((i + 0.5) * freq[j]);
            table[j * 64 + 32 + i] = (float)sin((i + 0.5) * freq[j]);
        }
    }
    for (uint32_t j = 0; j < 32; j++) {
        akv_slow_series(freq[32 + j] * half, series + j * 8);
        for (uint32_t e = 0; e < 8; e++)
            largest[e] = fmaxf(largest[e], fabsf(series[j * 8 + e]));
        phase[j] = (float)cos((double)(begin + half) * freq[32 + j]);
        phase[32 + j] = (float)sin((double)(begin + half) * freq[32 + j]);
        cosine[j] = cos((double)(begin + at) * freq[j]);
        sine[j] = sin((double)(begin + at) * freq[j]);
        step[j] = cos(64 * freq[j]);
        step[32 + j] = sin(64 * freq[j]);
    }
    for (uint32_t t = 0; t < 64; t++) {
        anchor[t] = (uint32_t)akv_rng_below(rng, count);
        weight[t] = (float)random_gauss(rng);
    }
    k->slow->rows(query, magnitude, units, mean, middle, rows, scale);
    k->slow->terms(rows + 512, phase, series, largest, bytes, count, terms, mean_terms);
    k->turn_rows(rows, cosine, sine, step, 32, query16, mean_rows);
    const float first = ((float)at - (float)half) / (float)half;
    k->slow->mean_logits(mean_rows, table, fast, moments, mean_terms, first + 31.5f / (float)half, 32.0f / (float)half, logits);
    k->slow->anchor_logits(bytes, turn16, query16, anchor, weight, scale, 64, terms, first, 1.0f / (float)half, logits, bytes, 128);
    for (uint32_t t = 0; t < 64; t++)
        for (uint32_t r = 0; r < 4; r++) {
            double want = 0, near = 0;
            for (uint32_t j = 0; j < 64; j++) {
                const double c = cos((double)(begin + at + t) * freq[j]), s = sin((double)(begin + at + t) * freq[j]);
                const double q0 = (double)query[r * 128 + j] * magnitude, q1 = (double)query[r * 128 + 64 + j] * magnitude;
                const double unit = weight[t] * akv_bf16_to_f32(units[j]), m0 = akv_bf16_to_f32(mean[j]), m1 = akv_bf16_to_f32(mean[64 + j]);
                const double a0 = unit * bytes[anchor[t] * 128 + j], a1 = unit * bytes[anchor[t] * 128 + 64 + j];
                want += c * (q0 * (a0 + m0) + q1 * (a1 + m1)) + s * (q1 * (a0 + m0) - q0 * (a1 + m1));
                /* Lower planes: an anchor's coordinates are turned by two products that are rounded to 1/128, by half a step each, of
                 * cosines known to 2^-15. Upper ones: the polynomial's 4e-6. All: half a step of the query times the bytes, upper
                 * ones once for each power, largest adding up to 3.5. The mean: phases as floats at 1e5 rad of the first plane are exact
                 * to 2^-24, the series of the tile to 7e-8 a plane, and some dozen roundings. */
                near += j < 32 ? (fabs(q0) + fabs(q1)) * (fabs(unit) / 128 + (fabs(a0) + fabs(a1)) / 32768)
                               : 4e-6 * hypot(q0, q1) * hypot(a0, a1);
                near += (j < 32 ? 0.5 : 1.75) * 128 * scale[r] * fabs(weight[t]) * (fabs(a0) + fabs(a1)) / fabs(unit);
                near += 5e-6 * hypot(q0, q1) * (hypot(m0, m1) + hypot(a0, a1));
            }
            CHECK_NEAR(logits[akv_quad_slot(t) * 4 + r], want, near, "%s: window %u, tile %u, token %u, row %u", k->isa, 2 * half, at, t, r);
        }
    free(b0);
    free(terms);
    free(table);
}

static void slow_planes(void)
{
    akv_rng rng = {31};
    for (double x = 0; x <= 1.25; x += 0.125) { /* left: 1/128 of the next term (1.2e-6), the one after it (2.6e-6), fp32 */
        float series[8];
        akv_slow_series(x, series);
        for (double u = -1; u <= 1; u += 0.03125) {
            double cosine = 0, sine = 0;
            for (int e = 0; e < 8; e++)
                *(e % 2 == 0 ? &cosine : &sine) += series[e] * pow(u, e);
            CHECK_NEAR(cosine, cos(x * u), 4.2e-6, "series of %g at %g", x, u);
            CHECK_NEAR(sine, sin(x * u), 1e-6, "series of %g at %g", x, u);
        }
    }
    FOR_VARIANTS(k) {
        for (uint32_t half = 512; k->slow != NULL && half <= 2048; half *= 2)
            for (uint32_t at = 0; at < 2 * half; at += at == 0 ? half - 64 : at < half ? 64 : half - 64)
                for (uint32_t count = 1; count <= 17; count += 8)
                    slow_tile(k, half, at, count, count == 9 ? 1.3f : 1.0f, &rng);
        if (k->slow == NULL)
            continue;
        /* rows that are not finite, nothing at all, or nothing in the lower planes */
        float query[512] = {0}, middle[128], rows[1024], scale[4];
        uint16_t units[128], mean[128];
        for (uint32_t i = 0; i < 128; i++) {
            units[i] = mean[i] = akv_f32_to_bf16(1);
            middle[i] = 1;
        }
        query[0] = NAN;
        query[128 + 70] = INFINITY;
        query[3 * 128 + 40] = 2;
        k->slow->rows(query, 1, units, mean, middle, rows, scale);
        CHECK(isnan(scale[0]) && isnan(scale[1]) && scale[2] == 0 && scale[3] > 0);
        for (uint32_t i = 0; i < 32; i++)
            CHECK(rows[i] == 0 && rows[32 + i] == 0 && rows[512 + i] == 0 && rows[512 + 32 + i] == 0);
        CHECK_NEAR(rows[512 + 3 * 32 + 8] * scale[3] * 128, 2, 1e-6, "%s: an upper plane alone", k->isa);
    }
    /* which segments have windows, and how long */
    const struct {
        double base;
        uint32_t dim, anchors;
        uint64_t tokens;
        int gaps;
        akv_rope_style style;
        uint32_t window;
    } cases[] = {{1e6, 128, 40, 3000, 0, AKV_ROPE_HALF_SPLIT, 2048}, {5e5, 128, 40, 3000, 0, AKV_ROPE_HALF_SPLIT, 1024},
                 {1e7, 128, 40, 3000, 0, AKV_ROPE_HALF_SPLIT, 4096}, {1e4, 128, 40, 3000, 0, AKV_ROPE_HALF_SPLIT, 0},
                 {1e6, 128, 40, 3000, 1, AKV_ROPE_HALF_SPLIT, 0},    {1e6, 128, 40, 3000, 0, AKV_ROPE_INTERLEAVED, 0},
                 {1e6, 64, 40, 3000, 0, AKV_ROPE_HALF_SPLIT, 0},     {1e6, 128, 500, 3000, 0, AKV_ROPE_HALF_SPLIT, 0},
                 {1e6, 128, 8, 200, 0, AKV_ROPE_HALF_SPLIT, 0},      {1e6, 128, 8, 256, 0, AKV_ROPE_HALF_SPLIT, 2048}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const spec sp = {.name = "window", .S = cases[i].tokens, .H = 1, .G = 1, .dk = cases[i].dim, .dv = 64, .W = 1,
                         .rotary = cases[i].dim, .style = cases[i].style, .gaps = cases[i].gaps, .keep = 1, .seed = i};
        cases_rope_base = cases[i].base;
        akv_segment *segment = random_ladder_segment(&sp, cases[i].anchors, 0.5, i);
        CHECK(akv_slow_window(segment) == (akv_quad_best()->slow != NULL ? cases[i].window : 0));
        akv_segment_release(segment);
    }
    cases_rope_base = 10000;
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    find_variants();
    printf("variants:");
    for (int v = 0; v < num_variants; v++)
        printf(" %s", variants[v]->isa);
    printf("\n");
    TEST(unpacking);
    TEST(turning);
    TEST(anchors);
    TEST(slow_planes);
    TEST(sorting);
    TEST(lists);
    TEST(codes);
    TEST(softmax_and_sums);
    TEST(tiles);
    return TEST_DONE();
}
