/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coder.h - the inner loops of compression besides its products (matrix.h). As in kernels.h nothing here allocates, locks or logs,
 * buffers do not overlap unless said, n == 0 is a no-op, sums run over the same 16 lanes in every variant and nothing is
 * contracted: the same bits on every instruction set.
 */
#ifndef AKV_CODER_H
#define AKV_CODER_H

#include "core/base.h"
#include "kernels/cpu.h"

/* A level's coordinates as the coder keeps them: those of 4, of 2 and of 1 bits, each kind padded to whole lanes by zeros. */
#define AKV_CODER_LANES 16u
typedef struct akv_coder_lanes {
    uint32_t by_width[3]; /* vectors of 16 coordinates of 4, 2, 1 bits */
} akv_coder_lanes;

/* What a key residual's utility needs of one observation query (docs/method.md "Utility"). */
typedef struct akv_coder_query {
    float output_sq;  /* |y|^2 */
    float scale;      /* of logits */
    float observed;   /* share of the observed logit error */
    float incoherent; /* what multiplies |r|^2 */
    float cap;        /* soft-cap, 0 = none */
} akv_coder_query;

typedef struct akv_coder_kernels {
    const char *isa;

    /*
     * x turned by the sum of two phases (cosines [planes], then sines [planes] of each), times magnitude; direction -1 turns back.
     * In the style's own coordinate order, the rest of dim copied; computed in double. out may be x.
     */
    void (*turn)(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *base, const double *offset,
                 int direction, double magnitude, float *out);

    /* out[i] = |x[i] - mean|^2 for n rows [n, dim]; mean [dim] or NULL. */
    void (*squares)(const float *x, uint32_t n, uint32_t dim, const float *mean, float *out);

    /* sum[i] += x[i], square[i] += x[i]^2. */
    void (*moments_add)(const float *x, uint32_t n, double *sum, double *square);

    /* x[i] *= scale, then to[i] += x[i]. */
    void (*scale_add)(float *x, uint32_t n, float scale, float *to);

    /* left[i] := max(0, min(left[i], energy[i] - max_r products[r * stride + i]^2)), r < rows. */
    void (*shrink_left)(const float *products, size_t stride, uint32_t rows, uint32_t n, const float *energy, float *left);

    /* x[i] := max(0, energy[i] - x[i]^2). */
    void (*leaves)(float *x, const float *energy, uint32_t n);

    /* sum_i max(0, now[i] - leaves[i]); falls (never rises) as now falls. */
    float (*coverage_gain)(const float *now, const float *leaves, uint32_t n);

    /* now[i] := min(now[i], leaves[i]). */
    void (*coverage_take)(float *now, const float *leaves, uint32_t n);

    /*
     * Squared weights a[i] of one row -> out[i - before] for i = before .. before + n - 1, those of a[0..total):
     *   a[i] + weight * (sum_{0 < j < window} decay^j a[i - j] + 0.5 a[i + 1] + 0.25 a[i + 2] + 0.1 a[i + 3]),
     * where the first `sinks` give nothing to others. total <= 512; a and out are readable resp. writable to whole lanes.
     */
    void (*spread)(const float *a, uint32_t before, uint32_t n, uint32_t total, uint32_t sinks, uint32_t window, float decay,
                   float weight, float *out);

    /*
     * Utilities of n tokens, one query's part added: weights w (squared, spread), logits (for the cap), errors q . r, cross v . y,
     *   u_k += w max(0, |v|^2 - 2 cross + |y|^2) slope^2 (observed (scale error)^2 + incoherent |r_k|^2),  u_v += w |r_v|^2.
     */
    void (*utility_add)(const akv_coder_query *q, uint32_t n, const float *w, const float *logits, const float *errors,
                        const float *cross, const float *value_sq, const float *key_residual_sq, const float *value_residual_sq,
                        float *u_k, float *u_v);

    /* counts[j] += how many of x[0..n) are above thresholds[j]. */
    void (*count_above)(const float *x, uint32_t n, const float *thresholds, uint32_t num_thresholds, uint32_t *counts);

    /*
     * x (in units of sigma, padded as akv_coder_lanes says) coded with a gain whose inverse is given: sums over all coordinates of
     * sigma_sq x^2, sigma_sq x level, sigma_sq level^2.
     */
    void (*coded_sums)(const float *x, const float *sigma_sq, const akv_coder_lanes *lanes, float inverse, float sums[3]);

    /* The numbers of the nearest levels of x * inverse, one a coordinate, padding too; at numbers[i * stride]. */
    void (*code_numbers)(const float *x, const akv_coder_lanes *lanes, float inverse, uint8_t *numbers, size_t stride);
} akv_coder_kernels;

#define AKV_CODERS(isa, level) extern const akv_coder_kernels akv_coder_##isa;
#include "kernels/kernels.def"

/* The fastest variant below the cap (cpu.h). */
const akv_coder_kernels *akv_coder_best(void);

#endif
