/* SPDX-License-Identifier: Apache-2.0 */
/* test_ref.c - the reference against facts that need no other implementation: identities, hand-computed values. */
#include "akv_test.h"
#include "cases.h"

static void rope(void)
{
    double freq[3] = {1, 0.1, 0.01};
    for (int style = 0; style < 2; style++) {
        akv_rope r = {6, (akv_rope_style)style, 1.5, freq};
        double x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8];
        memcpy(y, x, sizeof x);
        ref_rope_rotate(&r, 0, y);
        CHECK(y[0] == 1.5 && y[5] == 9 && y[6] == 7 && y[7] == 8); /* only scaled, and only the rotary part */
        memcpy(y, x, sizeof x);
        ref_rope_rotate(&r, 100000.0, y);
        double before = 0, after = 0;
        for (int i = 0; i < 6; i++) {
            before += x[i] * x[i];
            after += y[i] * y[i];
        }
        CHECK_NEAR(after, before * 1.5 * 1.5, 1e-12 * after, "norm");
        ref_rope_unrotate(&r, 100000.0, y);
        for (int i = 0; i < 8; i++)
            CHECK_NEAR(y[i], x[i], 1e-14 * 10, "coordinate %d back", i);
    }
    /* a quarter turn of plane 0: (x0, x_other) -> (-x_other, x0) */
    double quarter[1] = {1.5707963267948966};
    akv_rope half = {2, AKV_ROPE_HALF_SPLIT, 1, quarter};
    double z[2] = {3, 4};
    ref_rope_rotate(&half, 1, z);
    CHECK_NEAR(z[0], -4, 1e-15 * 8, "turned");
    CHECK_NEAR(z[1], 3, 1e-15 * 8, "turned");
    /* relative: <R_p q, R_s k> depends on p - s only */
    akv_rope r = {6, AKV_ROPE_INTERLEAVED, 1, freq};
    double dots[2];
    for (int i = 0; i < 2; i++) {
        double q[6] = {1, -2, 3, 0.5, 2, 1}, k[6] = {2, 1, -1, 1, 0, 3};
        ref_rope_rotate(&r, 1000.0 * i + 17, q);
        ref_rope_rotate(&r, 1000.0 * i + 5, k);
        dots[i] = 0;
        for (int j = 0; j < 6; j++)
            dots[i] += q[j] * k[j];
    }
    CHECK_NEAR(dots[0], dots[1], 1e-11, "relative position");
}

static void rounding(void)
{
    /* the reference's rounding by definition against the bit tricks of core/base.h, over all f16 and the midpoints
     * between */
    unsigned wrong = 0;
    for (uint32_t h = 0; h < 0x7bffu; h++) {
        double a = akv_f16_to_f32((uint16_t)h), b = akv_f16_to_f32((uint16_t)(h + 1));
        double points[5] = {a, a + (b - a) * 0.25, (a + b) / 2, a + (b - a) * 0.75, b};
        for (int i = 0; i < 5; i++)
            for (int sign = -1; sign <= 1; sign += 2) {
                double x = sign * points[i];
                if ((double)(float)x == x && ref_round_f16(x) != akv_f16_to_f32(akv_f32_to_f16((float)x)))
                    wrong++;
            }
    }
    CHECK_MSG(wrong == 0, "%u f16 roundings differ", wrong);
    CHECK(ref_round_f16(1e6) == 65504 && ref_round_f16(-1e6) == -65504 &&
          akv_f16_to_f32(akv_f32_to_f16(1e6f)) == 65504);
    akv_rng rng = {5};
    for (int i = 0; i < 200000; i++) {
        float x = akv_f32_bits((uint32_t)akv_rng_next(&rng));
        if (!isfinite(x))
            continue;
        wrong += ref_round_bf16(x) != akv_bf16_to_f32(akv_f32_to_bf16(x));
        if (fabsf(x) < 1e30f && fabsf(x) > 1e-30f)
            wrong += fabs(ref_round_f16(x) - x) > ref_half_ulp_f16(x) && fabsf(x) < 65504;
    }
    CHECK_MSG(wrong == 0, "%u bf16 roundings differ", wrong);
}

static void transform(void)
{
    const uint32_t dims[] = {2, 6, 64, 80, 96, 112, 128, 192, 256};
    akv_rng rng = {6};
    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
        uint32_t n = dims[d];
        double x[256], y[256], energy = 0, after = 0;
        for (uint32_t i = 0; i < n; i++) {
            y[i] = x[i] = random_gauss(&rng);
            energy += x[i] * x[i];
        }
        ref_transform(y, n, 7, AKV_SIDE_V);
        for (uint32_t i = 0; i < n; i++)
            after += y[i] * y[i];
        CHECK_NEAR(after, energy, 1e-12 * energy, "energy of dim %u", n);
        ref_untransform(y, n, 7, AKV_SIDE_V);
        for (uint32_t i = 0; i < n; i++)
            CHECK_NEAR(y[i], x[i], 1e-13 * 10, "dim %u back", n);
    }
    /* 80 = 64 + 16: the blocks do not mix, and a unit vector spreads evenly */
    double e[80] = {0};
    e[70] = 1;
    ref_hadamard(e, 80);
    for (int i = 0; i < 80; i++)
        CHECK_NEAR(fabs(e[i]), i < 64 ? 0 : 0.25, 1e-15, "coordinate %d", i);
    double two[2] = {3, 1};
    ref_hadamard(two, 2);
    CHECK_NEAR(two[0], 4 / sqrt(2.0), 1e-15 * 4, "sum");
    CHECK_NEAR(two[1], 2 / sqrt(2.0), 1e-15 * 4, "difference");
    CHECK(ref_code(-2, 1, false) == 0 && ref_code(-0.9, 1, false) == 1 && ref_code(0.5, 1, false) == 2 &&
          ref_code(0.99, 1, false) == 3);
    CHECK(ref_code(0.65, 1, true) == 2 && ref_code(0.67, 1, true) == 3);
    /* Lloyd-Max: a boundary is the middle of its levels; the level is the gaussian's centroid between its boundaries */
    CHECK_NEAR(ref_boundaries[2], (ref_levels[2] + ref_levels[3]) / 2, 1e-12, "boundary");
    double b = ref_boundaries[2], density = exp(-b * b / 2) / sqrt(2 * 3.14159265358979);
    CHECK_NEAR(ref_levels[3], density / (0.5 * erfc(b / sqrt(2.0))), 1e-3, "upper centroid");
}

static void projection(void)
{
    double anchors[3][2] = {{0, 0}, {1, 1}, {-2, 0}};
    double x[2] = {3, 0.5};
    ref_projection p = ref_project(x, &anchors[0][0], 3, 2);
    CHECK(p.index == 2 && p.gamma == -1.5);
    double zero[2] = {0, 0};
    p = ref_project(zero, &anchors[0][0], 3, 2);
    CHECK(p.gamma == 0 && p.cosine == 0 && p.index != 0); /* the zero anchor is never chosen */
    p = ref_project(x, &anchors[0][0], 1, 2);
    CHECK(p.gamma == 0 && p.cosine == 0);
    bool chosen[5];
    double score[5] = {1, 3, 3, 2, 3};
    ref_top(score, 5, 2, chosen);
    CHECK(!chosen[0] && chosen[1] && chosen[2] && !chosen[3] && !chosen[4]); /* ties: lower index first */
}

/* One head, one query, two tokens: everything by hand. */
static void attention_by_hand(void)
{
    double q[2] = {1, 0}, k[4] = {0, 5, log(3.0), 5}, v[4] = {1, 0, 5, 4}, out[2];
    ref_row_result r;
    must(ref_attend_row(q, 2, k, NULL, 2, v, NULL, 2, NULL, 1, 0, NULL, out, &r) ? q : NULL);
    CHECK_NEAR(out[0], 4, 1e-15 * 8, "1/4 of 1 and 3/4 of 5");
    CHECK_NEAR(out[1], 3, 1e-15 * 8, "3/4 of 4");
    CHECK_NEAR(r.lse, log(4.0), 1e-15, "log of 1 + 3");
    float sink = (float)log(4.0);
    must(ref_attend_row(q, 2, k, NULL, 2, v, NULL, 2, NULL, 1, 0, &sink, out, &r) ? q : NULL);
    CHECK_NEAR(out[0], 2, 1e-6, "the sink takes half");
    double hide[2] = {0, -INFINITY};
    must(ref_attend_row(q, 2, k, NULL, 2, v, NULL, 2, hide, 1, 0, NULL, out, &r) ? q : NULL);
    CHECK(out[0] == 1 && out[1] == 0 && r.max == 0);
    hide[0] = -INFINITY;
    must(ref_attend_row(q, 2, k, NULL, 2, v, NULL, 2, hide, 1, 0, NULL, out, &r) ? q : NULL);
    CHECK(out[0] == 0 && out[1] == 0 && r.max == -INFINITY && r.lse == -INFINITY);
}

/*
 * The utility is the first-order effect: perturbing one key (or value) by its residual moves the attention output by
 * sqrt(U) to first order. Central differences with a small multiple of the residual.
 */
static void utility_is_the_derivative(void)
{
    for (int capped = 0; capped < 2; capped++) {
        spec s = {.name = "utility",
                  .S = 40,
                  .H = 1,
                  .G = 2,
                  .dk = 8,
                  .dv = 6,
                  .W = 4,
                  .rotary = 8,
                  .softcap = capped ? 2 : 0,
                  .keep = 1,
                  .seed = 3};
        fixture f;
        fixture_make(&s, &f);
        ref_layer l;
        must(ref_layer_load(&f.layer, &l) ? &f : NULL);
        double rk[40 * 8], rv[40 * 6], size[40], u[2][40], t[2][40];
        akv_rng rng = {8};
        for (int i = 0; i < 40 * 8; i++)
            rk[i] = random_gauss(&rng);
        for (int i = 0; i < 40 * 6; i++)
            rv[i] = random_gauss(&rng);
        for (int i = 0; i < 40; i++)
            size[i] = 3;
        double *const up[2] = {u[0], u[1]}, *const tp[2] = {t[0], t[1]};
        must(ref_utilities(&l, 0, rk, rv, size, size, up, tp) ? &f : NULL);
        for (uint64_t p = 0; p < 40; p += 3) {
            double moved[2] = {0, 0}, h = 1e-4;
            for (uint32_t g = 0; g < 2; g++)
                for (uint32_t r = 0; r < 4; r++) {
                    double y[2][2][6]; /* side, sign, dim */
                    for (int side = 0; side < 2; side++)
                        for (int sign = 0; sign < 2; sign++) {
                            double step = sign ? h : -h;
                            for (int i = 0; i < 8 && side == 0; i++)
                                l.keys[p * 8 + (uint64_t)i] += step * rk[p * 8 + (uint64_t)i];
                            for (int i = 0; i < 6 && side == 1; i++)
                                l.values[p * 6 + (uint64_t)i] += step * rv[p * 6 + (uint64_t)i];
                            ref_row_result row;
                            uint64_t seen = 40 - 4 + r + 1;
                            must(ref_attend_row(l.queries + (g * 4 + r) * 8, seen, l.keys, NULL, 8, l.values, NULL, 6,
                                                NULL, l.scale, l.cap, NULL, y[side][sign], &row)
                                     ? &f
                                     : NULL);
                            for (int i = 0; i < 8 && side == 0; i++)
                                l.keys[p * 8 + (uint64_t)i] -= step * rk[p * 8 + (uint64_t)i];
                            for (int i = 0; i < 6 && side == 1; i++)
                                l.values[p * 6 + (uint64_t)i] -= step * rv[p * 6 + (uint64_t)i];
                        }
                    for (int side = 0; side < 2; side++)
                        for (int i = 0; i < 6; i++) {
                            double d = (y[side][1][i] - y[side][0][i]) / (2 * h);
                            moved[side] += d * d;
                        }
                }
            /* relative 1e-5: central differences with h = 1e-4 leave h^2 of the third derivative, about 1e-7 here */
            for (int side = 0; side < 2; side++)
                CHECK_NEAR(u[side][p], moved[side], 1e-5 * moved[side] + 1e-14, "side %d token %llu capped %d", side,
                           (unsigned long long)p, capped);
        }
        ref_layer_free(&l);
        fixture_free(&f);
    }
}

/*
 * The tables of the reference are Lloyd-Max quantisers: every level is the mean of the unit Gaussian between the middles to
 * its neighbours. Four decimals are given, so the fixed point holds within a digit of the last one; the levels of the ladder are
 * whole steps, so it holds within half a step of theirs, and costs no more than a thousandth of the error.
 */
static void lloyd_max(void)
{
    const double *tables[4] = {ref_levels_1bit, ref_levels, ref_levels_2bit, ref_levels_4bit};
    const int sizes[4] = {2, 4, 4, 16};
    const double published[4] = {0.3634, 0.1175, 0.1175, 0.009497}; /* mean squared error left */
    const double step[4] = {0, 0, 0.00064, 0.02622};                /* 0.15104 / 0.45312 meets the ratio of 3 : 10 closely */
    for (int w = 0; w < 4; w++) {
        double error = 1;
        for (int i = 0; i < sizes[w]; i++) {
            double low = i == 0 ? -12 : (tables[w][i - 1] + tables[w][i]) / 2;
            double high = i == sizes[w] - 1 ? 12 : (tables[w][i] + tables[w][i + 1]) / 2;
            double mass = 0.5 * (erf(high / sqrt(2)) - erf(low / sqrt(2)));
            double mean = (exp(-low * low / 2) - exp(-high * high / 2)) / sqrt(2 * 3.14159265358979) / mass;
            CHECK_NEAR(tables[w][i], mean, step[w] / 2 + 2e-4, "level %d of %d", i, sizes[w]);
            error -= mass * (2 * tables[w][i] * mean - tables[w][i] * tables[w][i]);
        }
        CHECK_NEAR(error, published[w], 1e-3 * published[w] + 1e-5, "distortion of %d levels", sizes[w]);
    }
}

static void planning(void)
{
    CHECK(ref_num_anchors(12800, 32, 128) == 100 && ref_num_anchors(1000, 32, 128) == 48 &&
          ref_num_anchors(40, 32, 128) == 40);
    CHECK(ref_num_top(48, 32, 0.7) == 11 && ref_num_top(100, 32, 0.7) == 47);
    akv_shape s;
    akv_shape_init(&s);
    s.num_tokens = 8192;
    s.num_kv_heads = 8;
    s.gqa_group = 4;
    s.head_dim_k = s.head_dim_v = s.rotary_dim = 128;
    ref_plan p = ref_make_plan(&s, 0.1, 0, NULL);
    /* by hand: 8 * 8192 * 256 * 2 = 33554432 dense; k = 64; fixed = object 64 + header 768 + 64 freqs 512 + anchors
       8*64*512
       + positions 2048 + index 2 * 65536 + coefficients 2 * 131072 + bitmaps 2 * 8192 + ranks 2 * (64 + 1) * 8, padded
       to 576 */
    CHECK(p.dense_bytes == 33554432 && p.budget == 3355443 && p.num_anchors == 64 && p.feasible);
    CHECK(p.min_bytes == 64 + 768 + 512 + 262144 + 2048 + 131072 + 262144 + 16384 + 2 * 576);
    /* left 2680563 over 34 bytes a residual, less what padding four sections costs: a handful at most */
    uint64_t n = p.residuals[0] + p.residuals[1], bound = (3355443 - p.min_bytes) / 34;
    CHECK_MSG(n <= bound && n + 8 > bound && p.residuals[0] == n / 2, "%llu of %llu", (unsigned long long)n,
              (unsigned long long)bound);
    CHECK(p.total <= p.budget && p.budget - p.total < 34 + 4 * 64);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(rope);
    TEST(rounding);
    TEST(transform);
    TEST(projection);
    TEST(attention_by_hand);
    TEST(utility_is_the_derivative);
    TEST(lloyd_max);
    TEST(planning);
    return TEST_DONE();
}
