/* SPDX-License-Identifier: Apache-2.0 */
/* ref_codec.c - projection, utility and quantisation (sections 3.2, 3.3, 3.5) in double precision. */
#include "core/base.h"
#include "ref/ref.h"

#include <stdlib.h>

static double dot(const double *a, const double *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* ------------------------------------------------------------------------------------------------- 16-bit rounding */

/* Distance between neighbouring floats of `digits` significant bits around x, never below that of the subnormals. */
static double spacing(double x, int digits, int min_exponent)
{
    int e;
    if (x == 0)
        return ldexp(1, min_exponent - digits);
    frexp(x, &e); /* |x| in [2^(e-1), 2^e) */
    if (e < min_exponent)
        e = min_exponent;
    return ldexp(1, e - digits);
}

/* f16: 11 significant bits, smallest normal 2^-14 = 0.5 * 2^-13. */
static double spacing_f16(double x)
{
    return spacing(x, 11, -13);
}

/* bf16: 8 significant bits, smallest normal 2^-126. */
static double spacing_bf16(double x)
{
    return spacing(x, 8, -125);
}

double ref_half_ulp_f16(double x)
{
    return 0.5 * spacing_f16(x);
}

double ref_half_ulp_bf16(double x)
{
    return 0.5 * spacing_bf16(x);
}

double ref_round_f16(double x)
{
    double step = spacing_f16(x);
    double y = rint(x / step) * step; /* rint: to nearest even; x / step is exact, step being a power of two */
    return y > 65504 ? 65504 : y < -65504 ? -65504 : y;
}

double ref_round_bf16(double x)
{
    double step = spacing_bf16(x);
    double y = rint(x / step) * step;
    double largest = 0x1.fep127;
    return y > largest ? largest : y < -largest ? -largest : y;
}

/* ------------------------------------------------------------------------------------------------------- projection */

double ref_abs_cosine(const double *x, const double *a, uint32_t dim)
{
    double xx = dot(x, x, dim), aa = dot(a, a, dim);
    if (xx == 0 || aa == 0)
        return 0;
    return fabs(dot(x, a, dim)) / (sqrt(xx) * sqrt(aa));
}

ref_projection ref_project(const double *x, const double *anchors, uint32_t num_anchors, uint32_t dim)
{
    ref_projection best = {0, 0, 0};
    bool found = false;
    for (uint32_t c = 0; c < num_anchors; c++) {
        const double *a = anchors + (uint64_t)c * dim;
        double aa = dot(a, a, dim);
        if (aa == 0)
            continue;
        double cosine = ref_abs_cosine(x, a, dim);
        if (!found || cosine > best.cosine) {
            best.index = c;
            best.cosine = cosine;
            best.gamma = dot(x, a, dim) / aa;
            found = true;
        }
    }
    return best;
}

/* ---------------------------------------------------------------------------------------------------------- utility */

bool ref_utilities(const ref_layer *layer, uint32_t head, const double *residual_k, const double *residual_v,
                   const double *size_k, const double *size_v, double *const utility[2], double *const tol[2])
{
    uint64_t S = layer->tokens;
    uint32_t dk = layer->dim[0], dv = layer->dim[1];
    const double *keys = layer->keys + head * S * dk;
    const double *values = layer->values + head * S * dv;
    double *a = malloc(S * sizeof *a);
    double *l = malloc(S * sizeof *l);
    double *y = malloc(dv * sizeof *y);
    if (a == NULL || l == NULL || y == NULL) {
        free(a);
        free(l);
        free(y);
        return false;
    }
    for (int side = 0; side < 2; side++)
        for (uint64_t p = 0; p < S; p++)
            utility[side][p] = tol[side][p] = 0;

    double kmax = 0;
    for (uint64_t p = 0; p < S; p++)
        kmax = fmax(kmax, dot(keys + p * dk, keys + p * dk, dk));
    kmax = sqrt(kmax);

    for (uint32_t g = 0; g < layer->group; g++)
        for (uint32_t r = 0; r < layer->window; r++) {
            uint32_t query_head = head * layer->group + g;
            const double *q = layer->queries + ((uint64_t)query_head * layer->window + r) * dk;
            double q_norm = sqrt(dot(q, q, dk));
            ref_attention_row(layer, query_head, r, a, l);

            /* y(q) = sum_p a_p v_p */
            double v_mean = 0; /* sum_p a_p |v_p|, scales the rounding of y */
            memset(y, 0, dv * sizeof *y);
            for (uint64_t p = 0; p < S; p++) {
                for (uint32_t i = 0; i < dv; i++)
                    y[i] += a[p] * values[p * dv + i];
                v_mean += a[p] * sqrt(dot(values + p * dv, values + p * dv, dv));
            }
            double y_norm = sqrt(dot(y, y, dv));

            /* fp32 rounding of this row (docs/numerics.md): logits, then weights, then y */
            double logit_tol = ref_gamma(dk) * layer->scale * q_norm * kmax;
            double weight_rel = 2 * logit_tol + ref_gamma((double)S);
            double y_tol = (2 * weight_rel + ref_gamma((double)S)) * v_mean;

            for (uint64_t p = 0; p < S; p++) {
                const double *rk = residual_k + p * dk, *rv = residual_v + p * dv;
                /* e_p = scale q . R_p r_p, times the derivative of the cap */
                double cap_factor = 1, cap_tol = 0;
                if (layer->cap > 0) {
                    cap_factor = 1 - (l[p] / layer->cap) * (l[p] / layer->cap);
                    cap_tol = isfinite(l[p]) ? (2 * fabs(l[p]) * logit_tol) / (layer->cap * layer->cap) + 4 * REF_U : 0;
                }
                double e = layer->scale * dot(q, rk, dk);
                double rk_norm = sqrt(dot(rk, rk, dk));
                double rk_tol = 8 * REF_U * size_k[p];
                double e_tol = layer->scale * q_norm * (ref_gamma(dk) * rk_norm + rk_tol);

                /* |v_p - y|^2 */
                double d2 = 0;
                for (uint32_t i = 0; i < dv; i++)
                    d2 += (values[p * dv + i] - y[i]) * (values[p * dv + i] - y[i]);
                double v_norm = sqrt(dot(values + p * dv, values + p * dv, dv));
                /* the square may be formed as |v|^2 - 2 v.y + |y|^2 */
                double d2_tol = ref_gamma(dv) * (v_norm + y_norm) * (v_norm + y_norm) + 2 * (v_norm + y_norm) * y_tol;

                double w = a[p] * a[p];
                double w_hi = a[p] * (1 + weight_rel) * a[p] * (1 + weight_rel);
                if (isfinite(l[p])) {
                    double f = cap_factor * e;
                    double f_hi = (fabs(cap_factor) + cap_tol) * (fabs(e) + e_tol);
                    utility[0][p] += w * d2 * f * f;
                    tol[0][p] += w_hi * (d2 + d2_tol) * f_hi * f_hi - w * d2 * f * f;
                }
                double r2 = dot(rv, rv, dv);
                double r_hi = sqrt(r2) + 8 * REF_U * size_v[p];
                utility[1][p] += w * r2;
                tol[1][p] += w_hi * r_hi * r_hi * (1 + ref_gamma(dv)) - w * r2;
            }
        }
    /* rounding of the sum over the rows */
    for (int side = 0; side < 2; side++)
        for (uint64_t p = 0; p < S; p++)
            tol[side][p] += ref_gamma((double)layer->group * layer->window) * utility[side][p];
    free(a);
    free(l);
    free(y);
    return true;
}

/* -------------------------------------------------------------------------------------------------------- quantiser */

const double ref_levels[4] = {-1.5104, -0.4528, 0.4528, 1.5104};
const double ref_boundaries[3] = {-0.9816, 0, 0.9816};
const double ref_levels_plain[4] = {-1, -1.0 / 3, 1.0 / 3, 1};
const double ref_boundaries_plain[3] = {-2.0 / 3, 0, 2.0 / 3};

void ref_hadamard(double *x, uint32_t dim)
{
    uint32_t at = 0;
    while (at < dim) {
        uint32_t n = 1;
        while (n * 2 <= dim - at)
            n *= 2;
        /* y_i = n^-1/2 sum_j (-1)^popcount(i & j) x_j, written out so that it can be read */
        double y[1024];
        for (uint32_t i = 0; i < n; i++) {
            y[i] = 0;
            for (uint32_t j = 0; j < n; j++) {
                uint32_t odd = 0;
                for (uint32_t b = i & j; b != 0; b &= b - 1)
                    odd ^= 1;
                y[i] += odd ? -x[at + j] : x[at + j];
            }
        }
        for (uint32_t i = 0; i < n; i++)
            x[at + i] = y[i] / sqrt((double)n);
        at += n;
    }
}

void ref_transform(double *x, uint32_t dim, uint64_t seed, int side)
{
    float sign[1024];
    akv_signs(seed, side, dim, sign);
    for (uint32_t i = 0; i < dim; i++)
        x[i] *= sign[i];
    ref_hadamard(x, dim);
}

void ref_untransform(double *x, uint32_t dim, uint64_t seed, int side)
{
    float sign[1024];
    akv_signs(seed, side, dim, sign);
    ref_hadamard(x, dim);
    for (uint32_t i = 0; i < dim; i++)
        x[i] *= sign[i];
}

uint32_t ref_code(double x, double scale, bool plain)
{
    const double *boundary = plain ? ref_boundaries_plain : ref_boundaries;
    double z = scale > 0 ? x / scale : 0;
    uint32_t code = 0;
    for (int b = 0; b < 3; b++)
        code += z >= boundary[b];
    return code;
}
