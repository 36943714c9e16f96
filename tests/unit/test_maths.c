/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_maths.c - the library's own exponentials, logarithms and phases against the C library's in long double (64 bits or
 * more of mantissa on x86-64 and ARM), over sweeps and at the ends; and their bits against a checksum, which is the same
 * on every machine.
 */
#include "akv_test.h"
#include "cases.h"
#include "core/maths.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { SWEEP = 200000 };

/* [low, high), evenly or, for `powers`, evenly in the exponent; every draw by whole numbers, the same everywhere. */
static double drawn(akv_rng *rng, double low, double high)
{
    return low + (high - low) * ((double)(akv_rng_next(rng) >> 11) * 0x1p-53);
}

static double of_any_size(akv_rng *rng, int lowest, int highest)
{
    const uint64_t bits = (uint64_t)(1023 + lowest + (int)akv_rng_below(rng, (uint64_t)(highest - lowest))) << 52 |
                          akv_rng_next(rng) >> 12;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static double relative(double got, long double want)
{
    return (double)(fabsl((long double)got - want) / fabsl(want));
}

static void exponentials(void)
{
    akv_rng rng = {1};
    double worst = 0, worst2 = 0, worst_float = 0;
    for (int i = 0; i < SWEEP; i++) {
        const double x = i % 2 ? drawn(&rng, -700, 700) : drawn(&rng, -2, 2);
        worst = fmax(worst, relative(akv_exp(x), expl(x)));
        const double y = i % 2 ? drawn(&rng, -1020, 1020) : drawn(&rng, -2, 2);
        worst2 = fmax(worst2, relative(akv_exp2(y), exp2l(y)));
        const float f = (float)drawn(&rng, -87, 88);
        const double want = (double)expl(f), unit = nextafterf((float)want, INFINITY) - (double)(float)want;
        worst_float = fmax(worst_float, fabs(akv_expf(f) - want) / unit);
    }
    printf("  exp 2^%.2f, exp2 2^%.2f, expf %.8f units\n", log2(worst), log2(worst2), worst_float);
    CHECK(worst < 0x1p-51 && worst2 < 0x1p-51 && worst_float < 0.5 + 0x1p-26);
    CHECK(akv_exp(0) == 1 && akv_exp2(0) == 1 && akv_exp2(10) == 1024 && akv_exp2(-1074) == 0x1p-1074);
    CHECK(akv_exp(-INFINITY) == 0 && akv_exp(-800) == 0 && akv_exp(710) == INFINITY && akv_exp(INFINITY) == INFINITY);
    CHECK(akv_exp2(-INFINITY) == 0 && akv_exp2(-1080) == 0 && akv_exp2(1024) == INFINITY && akv_exp2(INFINITY) == INFINITY);
    CHECK(akv_exp2(1023.5) < INFINITY && akv_exp(709.7) < INFINITY && akv_exp(-745) == 0x1p-1074);
    CHECK(isnan(akv_exp(NAN)) && isnan(akv_exp2(NAN)) && isnan(akv_expf(NAN)));
    CHECK(akv_expf(-INFINITY) == 0 && akv_expf(89) == INFINITY && akv_expf(0) == 1);
}

static void logarithms(void)
{
    akv_rng rng = {2};
    double worst = 0;
    for (int i = 0; i < SWEEP; i++) {
        const double x = i % 2 ? of_any_size(&rng, -1022, 1024) : drawn(&rng, 0.5, 2);
        const long double want = log2l(x);
        worst = fmax(worst, (double)(fabsl(akv_log2(x) - want) / (1 + fabsl(want))));
    }
    printf("  log2 2^%.2f of 1 + abs\n", log2(worst));
    CHECK(worst < 0x1p-51);
    for (int k = -1074; k < 1024; k++)
        CHECK(akv_log2(ldexp(1, k)) == k);
    CHECK(akv_log2(0) == -INFINITY && akv_log2(INFINITY) == INFINITY && isnan(akv_log2(NAN)));
}

static void tangents(void)
{
    akv_rng rng = {3};
    double worst = 0, worst_float = 0;
    for (int i = 0; i < SWEEP; i++) {
        const double x = i % 3 == 0 ? drawn(&rng, -20, 20) : i % 3 == 1 ? drawn(&rng, -0.25, 0.25) : of_any_size(&rng, -60, 0);
        worst = fmax(worst, relative(akv_tanh(x), tanhl(x)));
        const float f = (float)x;
        const double want = (double)tanhl(f), unit = nextafterf((float)want, INFINITY) - (double)(float)want;
        worst_float = fmax(worst_float, fabs(akv_tanhf(f) - want) / unit);
    }
    printf("  tanh 2^%.2f, tanhf %.8f units\n", log2(worst), worst_float);
    CHECK(worst < 0x1p-50);
    CHECK(akv_tanh(0) == 0 && akv_tanh(INFINITY) == 1 && akv_tanh(-INFINITY) == -1 && isnan(akv_tanh(NAN)));
    CHECK(akv_tanh(1e-300) == 1e-300 && akv_tanhf(-3.0f) == -akv_tanhf(3.0f) && isnan(akv_tanhf(NAN)));
}

static void phases(void)
{
    akv_rng rng = {4};
    double worst = 0, s, c;
    for (int i = 0; i < SWEEP; i++) {
        const double x = i % 3 == 0 ? drawn(&rng, -10, 10) : i % 3 == 1 ? drawn(&rng, -0x1p31, 0x1p31) : of_any_size(&rng, -40, 31);
        akv_sincos(x, &s, &c);
        worst = fmax(worst, fmax((double)fabsl(s - sinl(x)), (double)fabsl(c - cosl(x))));
    }
    for (int k = 1; k < 2000; k++) { /* where one of the two vanishes or they are equal */
        const double x = nextafter(k * 0.78539816339744830962, k % 2 ? INFINITY : 0);
        akv_sincos(x, &s, &c);
        worst = fmax(worst, fmax((double)fabsl(s - sinl(x)), (double)fabsl(c - cosl(x))));
    }
    printf("  sine and cosine 2^%.2f\n", log2(worst));
    CHECK(worst < 0x1p-52);
    akv_sincos(0, &s, &c);
    CHECK(s == 0 && c == 1);
    akv_sincos(1e15, &s, &c); /* beyond the range: the C library's */
    CHECK_NEAR(s, sin(1e15), 1e-15, "sine of 1e15");
    CHECK_NEAR(c, cos(1e15), 1e-15, "cosine of 1e15");
    akv_sincos(NAN, &s, &c);
    CHECK(isnan(s) && isnan(c));
}

static void lengths(void)
{
    akv_rng rng = {5};
    double worst = 0;
    for (int i = 0; i < SWEEP; i++) {
        const double x = of_any_size(&rng, -1000, 1000), y = i % 2 ? x * drawn(&rng, -3, 3) : of_any_size(&rng, -1000, 1000);
        worst = fmax(worst, relative(akv_hypot(x, y), hypotl(x, y)));
    }
    printf("  hypot 2^%.2f\n", log2(worst));
    CHECK(worst < 0x1p-51);
    CHECK(akv_hypot(3, -4) == 5 && akv_hypot(0, 0) == 0 && akv_hypot(0, -2) == 2 && akv_hypot(1e300, 1e300) < INFINITY);
    CHECK(akv_hypot(INFINITY, 1) == INFINITY && akv_hypot(-INFINITY, 1) == INFINITY && isnan(akv_hypot(NAN, 1)));
}

/* Of 40,000 results of each function, as bits: a difference here is one that compressed bytes may have. */
static void bits(void)
{
    akv_rng rng = {6};
    uint64_t sum = 0;
    for (int i = 0; i < 40000; i++) {
        double r[9], x = drawn(&rng, -50, 50);
        r[0] = akv_exp(x);
        r[1] = akv_exp2(x);
        r[2] = akv_expf((float)x);
        r[3] = akv_log2(fabs(x));
        r[4] = akv_tanh(x * 0.02);
        r[5] = akv_tanhf((float)(x * 0.1));
        akv_sincos(x * x * x * 1000, &r[6], &r[7]);
        r[8] = akv_hypot(x, r[0]);
        sum = XXH64(r, sizeof r, sum);
    }
    CHECK_MSG(sum == 0x443d6b245470177eu, "checksum %016llx", (unsigned long long)sum);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(exponentials);
    TEST(logarithms);
    TEST(tangents);
    TEST(phases);
    TEST(lengths);
    TEST(bits);
    return TEST_DONE();
}
