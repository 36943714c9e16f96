/* SPDX-License-Identifier: Apache-2.0 */
/* ref_layer.c - a layer in doubles, its observation queries' attention, the anchor scores of section 3.1. */
#include "core/base.h"
#include "ref/ref.h"

#include <stdlib.h>

double ref_gamma(double n)
{
    return REF_U * (fmin(n, 6 * sqrt(n)) + 8);
}

static double *load(const akv_tensor *t, uint64_t heads, uint64_t first, uint64_t rows, uint32_t dim)
{
    double *out = malloc((heads * rows * dim + 1) * sizeof *out);
    if (out == NULL)
        return NULL;
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t r = 0; r < rows; r++)
            for (uint32_t i = 0; i < dim; i++)
                out[(h * rows + r) * dim + i] = akv_tensor_at(t, (int64_t)h, (int64_t)(first + r), i);
    return out;
}

bool ref_layer_load(const akv_layer *in, ref_layer *out)
{
    const akv_shape *s = &in->shape;
    memset(out, 0, sizeof *out);
    out->heads = s->num_kv_heads;
    out->group = s->gqa_group;
    out->dim[0] = s->head_dim_k;
    out->dim[1] = s->head_dim_v;
    out->tokens = s->num_tokens;
    out->window = s->num_queries < s->num_tokens ? s->num_queries : (uint32_t)s->num_tokens;
    out->scale = in->sm_scale;
    out->cap = in->logit_softcap;
    out->rope = in->rope;
    out->positions = malloc(s->num_tokens * sizeof(double));
    out->keys = load(&in->keys, out->heads, 0, s->num_tokens, out->dim[0]);
    out->values = load(&in->values, out->heads, 0, s->num_tokens, out->dim[1]);
    if (in->queries.data != NULL)
        out->queries = load(&in->queries, (uint64_t)out->heads * out->group, s->num_queries - out->window, out->window,
                            out->dim[0]);
    if (out->positions == NULL || out->keys == NULL || out->values == NULL ||
        (in->queries.data != NULL && out->queries == NULL)) {
        ref_layer_free(out);
        return false;
    }
    for (uint64_t p = 0; p < s->num_tokens; p++)
        out->positions[p] = in->positions != NULL ? (double)in->positions[p] : (double)in->first_position + (double)p;
    return true;
}

void ref_layer_free(ref_layer *layer)
{
    free(layer->positions);
    free(layer->keys);
    free(layer->values);
    free(layer->queries);
    memset(layer, 0, sizeof *layer);
}

void ref_layer_row(const ref_layer *layer, int side, uint32_t head, uint64_t token, double *out)
{
    const double *all = side == AKV_SIDE_K ? layer->keys : layer->values;
    uint32_t dim = layer->dim[side];
    memcpy(out, all + (head * layer->tokens + token) * dim, dim * sizeof *out);
    if (side == AKV_SIDE_K)
        ref_rope_unrotate(&layer->rope, layer->positions[token], out);
}

void ref_attention_row(const ref_layer *layer, uint32_t query_head, uint32_t row, double *weights, double *logits)
{
    uint32_t dim = layer->dim[0];
    uint32_t head = query_head / layer->group;
    uint64_t seen = layer->tokens - layer->window + row + 1; /* causal: the row's own token is the last it sees */
    const double *q = layer->queries + ((uint64_t)query_head * layer->window + row) * dim;
    double max = -INFINITY;
    for (uint64_t p = 0; p < seen; p++) {
        const double *k = layer->keys + (head * layer->tokens + p) * dim;
        double dot = 0;
        for (uint32_t i = 0; i < dim; i++)
            dot += q[i] * k[i];
        double logit = layer->scale * dot;
        if (layer->cap > 0)
            logit = layer->cap * tanh(logit / layer->cap);
        weights[p] = logit;
        if (logits != NULL)
            logits[p] = logit;
        if (logit > max)
            max = logit;
    }
    double sum = 0;
    for (uint64_t p = 0; p < seen; p++) {
        weights[p] = exp(weights[p] - max);
        sum += weights[p];
    }
    for (uint64_t p = 0; p < layer->tokens; p++)
        weights[p] = p < seen ? weights[p] / sum : 0;
    if (logits != NULL)
        for (uint64_t p = seen; p < layer->tokens; p++)
            logits[p] = -INFINITY;
}

uint32_t ref_num_anchors(uint64_t tokens, uint32_t window, uint32_t tokens_per_anchor)
{
    uint64_t k = tokens / tokens_per_anchor;
    if (k < (uint64_t)window + window / 2)
        k = (uint64_t)window + window / 2;
    if (k > tokens)
        k = tokens;
    return k < 65535 ? (uint32_t)k : 65535; /* an anchor index has 16 bits */
}

uint32_t ref_num_top(uint32_t num_anchors, uint32_t window, double rho)
{
    return (uint32_t)floor(rho * (double)(num_anchors - window));
}

bool ref_anchor_scores(const ref_layer *layer, uint32_t head, uint32_t pool_width, double *scores, double *tol)
{
    uint64_t n = layer->tokens - layer->window;
    double *weights = malloc(layer->tokens * sizeof *weights);
    double *raw = calloc(n + 1, sizeof *raw);
    if (weights == NULL || raw == NULL) {
        free(weights);
        free(raw);
        return false;
    }
    /* s_p = mean over the G query heads of the sum over window rows of a_p */
    for (uint32_t g = 0; g < layer->group; g++)
        for (uint32_t r = 0; r < layer->window; r++) {
            ref_attention_row(layer, head * layer->group + g, r, weights, NULL);
            for (uint64_t p = 0; p < n; p++)
                raw[p] += weights[p] / layer->group;
        }
    /* average over pool_width positions around p; positions outside [0, S - W) count as 0 */
    int64_t half = pool_width / 2;
    for (int64_t p = 0; p < (int64_t)n; p++) {
        double sum = 0;
        for (int64_t j = p - half; j <= p + half; j++)
            if (j >= 0 && j < (int64_t)n)
                sum += raw[j];
        scores[p] = sum / pool_width;
    }
    if (tol != NULL) {
        /* a weight's relative error: twice the largest logit error (numerator and denominator) + the rounding of the
         * sums */
        double qmax = 0, kmax = 0;
        for (uint64_t r = 0; r < (uint64_t)layer->group * layer->window; r++) {
            const double *q = layer->queries + ((uint64_t)head * layer->group * layer->window + r) * layer->dim[0];
            double s = 0;
            for (uint32_t i = 0; i < layer->dim[0]; i++)
                s += q[i] * q[i];
            qmax = fmax(qmax, s);
        }
        for (uint64_t p = 0; p < layer->tokens; p++) {
            const double *k = layer->keys + (head * layer->tokens + p) * layer->dim[0];
            double s = 0;
            for (uint32_t i = 0; i < layer->dim[0]; i++)
                s += k[i] * k[i];
            kmax = fmax(kmax, s);
        }
        double logit = ref_gamma(layer->dim[0]) * layer->scale * sqrt(qmax * kmax);
        double relative =
            2 * logit + ref_gamma((double)layer->tokens) + ref_gamma((double)layer->group * layer->window + pool_width);
        for (uint64_t p = 0; p < n; p++)
            tol[p] = relative * scores[p];
    }
    free(weights);
    free(raw);
    return true;
}

void ref_top(const double *scores, uint64_t n, uint64_t count, bool *chosen)
{
    memset(chosen, 0, n * sizeof *chosen);
    for (uint64_t c = 0; c < count && c < n; c++) {
        uint64_t best = n;
        for (uint64_t p = 0; p < n; p++)
            if (!chosen[p] && (best == n || scores[p] > scores[best]))
                best = p;
        chosen[best] = true;
    }
}
