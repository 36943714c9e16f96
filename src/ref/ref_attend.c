/* SPDX-License-Identifier: Apache-2.0 */
/* ref_attend.c - softmax attention over decoded segments and a dense tail, in double precision. */
#include "core/base.h"
#include "core/segment.h"
#include "ref/ref.h"

#include <stdlib.h>
#include <string.h>

static double norm(const double *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* Largest error of the same computation in plain fp32 loops over keys and values rounded to fp32. */
static double plain_error(const double *q, uint64_t n, const double *keys, uint32_t dim_k, const double *values,
                          uint32_t dim_v, const double *bias, double scale, double cap, const float *sink, double top,
                          const double *want)
{
    float out[1024] = {0}, sum = sink != NULL ? expf(*sink - (float)top) : 0;
    for (uint64_t p = 0; p < n; p++) {
        if (bias != NULL && bias[p] == -INFINITY)
            continue;
        float dot = 0;
        for (uint32_t i = 0; i < dim_k; i++)
            dot += (float)q[i] * (float)keys[p * dim_k + i];
        float l = (float)scale * dot;
        if (cap > 0)
            l = (float)cap * tanhf(l / (float)cap);
        if (bias != NULL)
            l += (float)bias[p];
        float w = expf(l - (float)top);
        sum += w;
        for (uint32_t i = 0; i < dim_v; i++)
            out[i] += w * (float)values[p * dim_v + i];
    }
    double worst = 0;
    for (uint32_t i = 0; i < dim_v && sum > 0; i++)
        worst = fmax(worst, fabs((double)(out[i] / sum) - want[i]));
    return worst;
}

bool ref_attend_row(const double *q, uint64_t n, const double *keys, const double *key_sizes, uint32_t dim_k,
                    const double *values, const double *value_sizes, uint32_t dim_v, const double *bias, double scale,
                    double cap, const float *sink, double *out, ref_row_result *result)
{
    double *logit = malloc((n + 1) * sizeof *logit);
    if (logit == NULL)
        return false;
    double q_norm = norm(q, dim_k);
    double max = -INFINITY, tol_logit = 0;
    uint64_t visible = 0;
    for (uint64_t p = 0; p < n; p++) {
        double dot = 0;
        for (uint32_t i = 0; i < dim_k; i++)
            dot += q[i] * keys[p * dim_k + i];
        double l = scale * dot;
        if (cap > 0)
            l = cap * tanh(l / cap);
        if (bias != NULL)
            l += bias[p];
        logit[p] = l;
        if (l == -INFINITY)
            continue;
        visible++;
        max = fmax(max, l);
        double size = key_sizes != NULL ? key_sizes[p] : norm(keys + p * dim_k, dim_k);
        double tol = ref_gamma(dim_k) * scale * q_norm * size + 4 * REF_U * fabs(l);
        tol_logit = fmax(tol_logit, tol);
    }
    double top = sink != NULL && *sink > max ? *sink : max;
    double sum = sink != NULL ? exp(*sink - top) : 0;
    double mass = 0; /* sum_p a_p |v_p|: scales the rounding of out */
    for (uint32_t i = 0; i < dim_v; i++)
        out[i] = 0;
    for (uint64_t p = 0; p < n; p++) {
        if (logit[p] == -INFINITY)
            continue;
        double w = exp(logit[p] - top);
        sum += w;
        for (uint32_t i = 0; i < dim_v; i++)
            out[i] += w * values[p * dim_v + i];
        mass += w * (value_sizes != NULL ? value_sizes[p] : norm(values + p * dim_v, dim_v));
    }
    for (uint32_t i = 0; i < dim_v; i++)
        out[i] = sum > 0 ? out[i] / sum : 0;
    result->max = max;
    result->lse = sum > 0 ? top + log(sum) : -INFINITY;
    result->tol_logit = tol_logit + ref_gamma((double)visible);
    /* a weight is off by tol_logit in its exponent, and so is the denominator; both sums and the products round besides
     */
    result->tol_out = sum > 0 ? mass / sum * (2 * tol_logit + 2 * ref_gamma((double)visible) + ref_gamma(dim_v)) : 0;
    result->whole = 0;
    result->plain = plain_error(q, n, keys, dim_k, values, dim_v, bias, scale, cap, sink, top, out);
    free(logit);
    return true;
}

/* x := x turned by the shift of segment s, or back. */
static void shift_by(const akv_attend_params *params, uint32_t s, int direction, double *x)
{
    if (params->segment_shifts == NULL || params->segment_shifts[s] == 0)
        return;
    akv_rope rope = *params->rope;
    rope.magnitude = 1;
    ref_rope_rotate(&rope, (double)(direction * params->segment_shifts[s]), x);
}

/* Keys or values of one KV head over all segments and the tail, one after the other; their sizes too. */
static bool gather(const akv_attend_params *params, int side, uint32_t head, double *out, double *size)
{
    uint32_t dim = side == AKV_SIDE_K ? params->head_dim_k : params->head_dim_v;
    uint64_t at = 0;
    for (uint32_t s = 0; s < params->num_segments; s++) {
        const void *blob = akv_segment_data(params->segments[s], NULL);
        if (!ref_decode(blob, side, head, out + at * dim, size + at))
            return false;
        for (uint64_t t = 0; side == AKV_SIDE_K && t < ((const akv_header *)blob)->num_tokens; t++)
            shift_by(params, s, 1, out + (at + t) * dim);
        at += ((const akv_header *)blob)->num_tokens;
    }
    const akv_tensor *tail = side == AKV_SIDE_K ? &params->tail_keys : &params->tail_values;
    for (uint64_t j = 0; j < params->tail_tokens; j++, at++) {
        for (uint32_t i = 0; i < dim; i++)
            out[at * dim + i] = akv_tensor_at(tail, head, (int64_t)j, i);
        size[at] = norm(out + at * dim, dim);
    }
    return true;
}

/* Whether attention sums whole numbers over this segment: not where tokens are few and far between, 12 positions each. */
static bool is_whole(const akv_segment *segment)
{
    const akv_header *h = akv_segment_data(segment, NULL);
    const int32_t *positions =
        h->sections[AKV_SEC_POSITIONS].offset != 0 ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    return h->kind == AKV_SEGMENT_COMPRESSED && h->coding == AKV_CODING_LADDER &&
           (positions == NULL || ((int64_t)positions[h->num_tokens - 1] - positions[0]) / 12 < (int64_t)h->num_tokens);
}

/*
 * Adds to a row's tolerances what rounding to 16 bits may do. A weight off by e in its exponent moves the output by
 * weight * e * (value - output), at first order.
 */
static bool add_whole(const akv_attend_params *params, ref_rounding *const *rounding, const double *q,
                      const double *keys, const double *values, const double *out, ref_row_result *row)
{
    const uint32_t dk = params->head_dim_k, dv = params->head_dim_v;
    const double mean = norm(out, dv), cap = params->logit_softcap;
    double scaled[1024], largest = 0, moved = 0;
    uint64_t at = 0;
    for (uint32_t i = 0; i < dk; i++)
        scaled[i] = params->sm_scale * q[i];
    for (uint32_t s = 0; s < params->num_segments; s++) {
        const uint64_t S = ((const akv_header *)akv_segment_data(params->segments[s], NULL))->num_tokens;
        double *off = rounding[s] != NULL ? malloc(2 * S * sizeof *off) : NULL, *weight = off != NULL ? off + S : NULL;
        if (rounding[s] != NULL && off == NULL)
            return false;
        if (rounding[s] != NULL) {
            double turned[1024];
            memcpy(turned, scaled, dk * sizeof *turned);
            shift_by(params, s, -1, turned); /* that is what it meets */
            ref_rounding_logits(rounding[s], turned, off);
            for (uint64_t t = 0; t < S; t++) {
                double l = 0;
                for (uint32_t i = 0; i < dk; i++)
                    l += scaled[i] * keys[(at + t) * dk + i];
                weight[t] = exp((cap > 0 ? cap * tanh(l / cap) : l) - row->lse);
                largest = fmax(largest, off[t]);
                moved += weight[t] * expm1(off[t]) * (norm(values + (at + t) * dv, dv) + mean);
            }
            moved += ref_rounding_out(rounding[s], weight);
        }
        free(off);
        at += S;
    }
    row->whole = moved;
    row->tol_out += moved;
    row->tol_logit += largest;
    return true;
}

bool ref_attend(const akv_attend_params *params, double *out, ref_row_result *rows)
{
    uint32_t dk = params->head_dim_k, dv = params->head_dim_v, T = params->num_queries;
    uint64_t before = 0; /* tokens in segments: every query sees them */
    for (uint32_t s = 0; s < params->num_segments; s++)
        before += ((const akv_header *)akv_segment_data(params->segments[s], NULL))->num_tokens;
    uint64_t n = before + params->tail_tokens;
    double *keys = malloc((n * dk + 1) * sizeof *keys);
    double *values = malloc((n * dv + 1) * sizeof *values);
    double *key_sizes = malloc((n + 1) * sizeof *key_sizes);
    double *value_sizes = malloc((n + 1) * sizeof *value_sizes);
    double *bias = malloc((n + 1) * sizeof *bias);
    double *q = malloc(dk * sizeof *q);
    ref_rounding **rounding = calloc(params->num_segments + 1, sizeof(ref_rounding *));
    bool ok = rounding != NULL && keys != NULL && values != NULL && key_sizes != NULL && value_sizes != NULL &&
              bias != NULL && q != NULL;
    for (uint32_t head = 0; ok && head < params->num_kv_heads; head++) {
        ok = gather(params, AKV_SIDE_K, head, keys, key_sizes) && gather(params, AKV_SIDE_V, head, values, value_sizes);
        for (uint32_t s = 0; ok && s < params->num_segments; s++)
            if (is_whole(params->segments[s]))
                ok = (rounding[s] = ref_rounding_of(akv_segment_data(params->segments[s], NULL), head)) != NULL;
        for (uint32_t g = 0; ok && g < params->gqa_group; g++)
            for (uint32_t t = 0; ok && t < T; t++) {
                uint32_t query_head = head * params->gqa_group + g;
                for (uint32_t i = 0; i < dk; i++)
                    q[i] = akv_tensor_at(&params->queries, query_head, t, i);
                for (uint64_t p = 0; p < before; p++)
                    bias[p] = 0;
                for (uint64_t j = 0; j < params->tail_tokens; j++) {
                    if (params->tail_mask.data != NULL)
                        bias[before + j] = akv_tensor_at(&params->tail_mask, 0, t, (int64_t)j);
                    else /* causal: j <= n - T + t */
                        bias[before + j] = (int64_t)j <= (int64_t)params->tail_tokens - (int64_t)T + t ? 0 : -INFINITY;
                }
                uint64_t row = (uint64_t)query_head * T + t;
                ok = ref_attend_row(q, n, keys, key_sizes, dk, values, value_sizes, dv, bias, params->sm_scale,
                                    params->logit_softcap, params->sinks != NULL ? &params->sinks[query_head] : NULL,
                                    out + row * dv, &rows[row]) &&
                     add_whole(params, rounding, q, keys, values, out + row * dv, &rows[row]);
            }
        for (uint32_t s = 0; rounding != NULL && s < params->num_segments; s++) {
            ref_rounding_free(rounding[s]);
            rounding[s] = NULL;
        }
    }
    free(rounding);
    free(keys);
    free(values);
    free(key_sizes);
    free(value_sizes);
    free(bias);
    free(q);
    return ok;
}
