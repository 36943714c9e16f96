/* SPDX-License-Identifier: Apache-2.0 */
/*
 * maths.c - Taylor series after exact reductions; no tables, no libm but sqrt. Even and odd powers are summed apart, which
 * halves the chain of dependent operations.
 */
#include "core/maths.h"

/* pi / 2 = A + B + C + D: three parts of at most 22 bits, and the rest. */
#define PI_A 0x1.921fb0p0
#define PI_B 0x1.5110b0p-22
#define PI_C 0x1.184698p-44
#define PI_D 0x1.3198a2e037073p-69

/* Adding and taking away again rounds to a whole number, for magnitudes below 2^51. */
#define TO_WHOLE 0x1.8p52

static double power_of_two(int64_t k) /* -1022..1023 */
{
    const uint64_t bits = (uint64_t)(k + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* p * 2^k in two exact steps, or one rounding where the result is subnormal; k in -1076..1025. */
static double scaled(double p, double k)
{
    const int64_t whole = (int64_t)k, half = whole / 2;
    return p * power_of_two(half) * power_of_two(whole - half);
}

/* exp(r), abs(r) <= 0.3466: what degree 13 leaves out is below 2^-57. */
static double exp_near_0(double r)
{
    const double s = r * r;
    const double odd =
        ((((((1.0 / 6227020800.0) * s + 1.0 / 39916800.0) * s + 1.0 / 362880.0) * s + 1.0 / 5040.0) * s + 1.0 / 120.0) * s +
         1.0 / 6.0) * s;
    const double even =
        ((((((1.0 / 479001600.0) * s + 1.0 / 3628800.0) * s + 1.0 / 40320.0) * s + 1.0 / 720.0) * s + 1.0 / 24.0) * s + 0.5) * s;
    return 1.0 + (r + (even + r * odd));
}

double akv_exp(double x)
{
    if (!(x >= -746.0))
        return x < 0.0 ? 0.0 : x; /* not NaN */
    if (x > 710.0)
        return (double)INFINITY;
    const double k = (x * 0x1.71547652b82fep0 + TO_WHOLE) - TO_WHOLE;
    /* ln 2 in two parts, the first of 32 bits: k times it is exact */
    return scaled(exp_near_0((x - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33), k);
}

double akv_exp2(double x)
{
    if (!(x >= -1076.0))
        return x < 0.0 ? 0.0 : x;
    if (x >= 1024.0)
        return (double)INFINITY;
    const double k = (x + TO_WHOLE) - TO_WHOLE;
    return scaled(exp_near_0((x - k) * 0x1.62e42fefa39efp-1), k);
}

float akv_expf(float x)
{
    return (float)akv_exp((double)x);
}

double akv_log2(double x)
{
    if (!(x > 0.0))
        return x == 0.0 ? -(double)INFINITY : x;
    if (x > 0x1.fffffffffffffp1023)
        return x;
    double k = 0.0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54.0;
    }
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    k += (double)((int64_t)(bits >> 52) - 1023);
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    memcpy(&x, &bits, sizeof x);
    if (x > 0x1.6a09e667f3bcdp0) { /* sqrt(2): to within a factor of it around 1 */
        x *= 0.5;
        k += 1.0;
    }
    /* ln x = 2 atanh(t), t = (x - 1) / (x + 1), abs(t) <= 0.1716: what degree 21 leaves out is below 2^-60 */
    const double t = (x - 1.0) / (x + 1.0), s = t * t;
    const double sum =
        s * (1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * (1.0 / 11.0 + s * (1.0 / 13.0 +
        s * (1.0 / 15.0 + s * (1.0 / 17.0 + s * (1.0 / 19.0 + s * (1.0 / 21.0))))))))));
    return k + (t + t * sum) * 0x1.71547652b82fep1; /* 2 / ln 2 */
}

double akv_tanh(double x)
{
    const double a = fabs(x);
    double y;
    if (a < 0.12) { /* the quotient below would lose digits; degree 15 leaves out less than 2^-59 */
        const double s = x * x;
        y = a - a * s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0 - s * (1382.0 / 155925.0 -
            s * (21844.0 / 6081075.0 - s * (929569.0 / 638512875.0)))))));
    } else {
        const double e = akv_exp(-2.0 * a);
        y = (1.0 - e) / (1.0 + e);
    }
    return x < 0.0 ? -y : y;
}

float akv_tanhf(float x)
{
    return (float)akv_tanh((double)x);
}

void akv_sincos(double x, double *sine, double *cosine)
{
    if (!(fabs(x) <= 0x1p31)) {
        *sine = sin(x);
        *cosine = cos(x);
        return;
    }
    /* k has 31 bits, so its products with A, B and C are exact */
    const double k = (x * 0x1.45f306dc9c883p-1 + TO_WHOLE) - TO_WHOLE;
    const double r = (((x - k * PI_A) - k * PI_B) - k * PI_C) - k * PI_D, s = r * r; /* abs(r) <= 0.7855 */
    const double odd =
        s * (-1.0 / 6.0 + s * (1.0 / 120.0 + s * (-1.0 / 5040.0 + s * (1.0 / 362880.0 + s * (-1.0 / 39916800.0 +
        s * (1.0 / 6227020800.0 + s * (-1.0 / 1307674368000.0 + s * (1.0 / 355687428096000.0))))))));
    const double even =
        s * (1.0 / 24.0 + s * (-1.0 / 720.0 + s * (1.0 / 40320.0 + s * (-1.0 / 3628800.0 + s * (1.0 / 479001600.0 +
        s * (-1.0 / 87178291200.0 + s * (1.0 / 20922789888000.0)))))));
    const double si = r + r * odd, co = 1.0 + s * (even - 0.5);
    const uint64_t quarter = (uint64_t)(int64_t)k & 3u;
    const double first = quarter & 1u ? co : si, second = quarter & 1u ? si : co;
    *sine = quarter & 2u ? -first : first;
    *cosine = (quarter + 1u) & 2u ? -second : second;
}

double akv_hypot(double x, double y)
{
    const double square = x * x + y * y;
    if (square > 0x1p-900 && square < 0x1p1000)
        return sqrt(square);
    const double a = fabs(x), b = fabs(y), large = a > b ? a : b, small = a > b ? b : a;
    if (!(large > 0.0) || !(large <= 0x1.fffffffffffffp1023)) /* zeros, infinities; NaN through the sum */
        return a + b;
    return large * sqrt(1.0 + small / large * (small / large));
}
