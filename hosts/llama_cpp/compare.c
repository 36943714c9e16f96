/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.c - how far each layer's attention output would be off with other stores, measured while the conversation goes on
 * from the attached one: one pass over the tokens serves all stores and all layers, and no error of an early layer reaches a
 * later one.
 */
#include "host.h"

#include <string.h>

struct akvl_comparison {
    akv_llama_store *const *others;
    size_t num_others;
    double *squared_error; /* [num_others][num_layers], added to */
    double *energy;        /* [num_layers], added to */
    float *out;            /* of one layer and batch */
    void *workspace;
    size_t workspace_bytes;
};

static void aim(const akv_llama_store *store, uint32_t number, akv_attend_params *p)
{
    const akv_llama_layer *layer = &store->parts.layers[number];
    p->segments = (const akv_segment *const *)store->parts.segments + layer->first_segment;
    p->num_segments = layer->num_segments;
}

/* Called after the attached store's attention: p->out holds its result. */
akv_status akvl_compare_layer(akv_llama *host, uint32_t number, const akv_attend_params *attached, akv_diag *diag)
{
    const struct akvl_comparison *c = host->comparison;
    const uint64_t heads = (uint64_t)attached->num_kv_heads * attached->gqa_group;
    const uint32_t dim = attached->head_dim_v;
    akv_attend_params p = *attached;
    p.out = c->out;
    p.out_stride_head = dim;
    p.out_stride_token = (int64_t)(heads * dim);
    double energy = 0.0;
    for (uint64_t t = 0; t < p.num_queries; t++)
        for (uint64_t h = 0; h < heads; h++)
            for (uint32_t i = 0; i < dim; i++) {
                const double x = attached->out[(int64_t)h * attached->out_stride_head +
                                               (int64_t)t * attached->out_stride_token + i];
                energy += x * x;
            }
    c->energy[number] += energy;
    for (size_t s = 0; s < c->num_others; s++) {
        aim(c->others[s], number, &p);
        const akv_status status = akv_attend(&p, c->workspace, c->workspace_bytes, diag);
        if (status != AKV_OK)
            return status;
        double sum = 0.0;
        for (uint64_t t = 0; t < p.num_queries; t++)
            for (uint64_t h = 0; h < heads; h++)
                for (uint32_t i = 0; i < dim; i++) {
                    const double x = attached->out[(int64_t)h * attached->out_stride_head +
                                                   (int64_t)t * attached->out_stride_token + i];
                    const double y = c->out[(t * heads + h) * dim + i] - x;
                    sum += y * y;
                }
        c->squared_error[s * host->num_layers + number] += sum;
    }
    return AKV_OK;
}

/* Both stores' layers must be attended to alike. */
static akv_status check_store(const akv_llama *host, const akv_llama_store *other, akv_diag *diag)
{
    if (!other)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "a store to compare with is NULL");
    if (other->parts.num_layers != host->num_layers || other->parts.next_position != host->store->parts.next_position)
        return akvl_fail(diag, AKV_E_MISMATCH, "a store to compare with holds another document or model");
    for (uint32_t i = 0; i < host->num_layers; i++) {
        const akv_llama_layer *a = &other->parts.layers[i], *b = &host->store->parts.layers[i];
        if (a->kind != b->kind)
            return akvl_fail(diag, AKV_E_MISMATCH, "layer %u is compressed in one store and not in the other", i);
        if (a->kind == AKV_LLAMA_LAYER_HOSTED) {
            const akv_status status = akvl_signature_compare(a, b, i, diag);
            if (status != AKV_OK)
                return status;
        }
    }
    return AKV_OK;
}

/* Room for one layer's output and for the attention of any store. */
static akv_status make_room(akv_llama *host, struct akvl_comparison *c, uint32_t queries, akv_diag *diag)
{
    size_t floats = 1, bytes = 64;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (host->store->parts.layers[i].kind != AKV_LLAMA_LAYER_HOSTED)
            continue;
        akv_attend_params p;
        akvl_fill_params(host, i, queries, (uint64_t)host->tail_limit, &p);
        const size_t wanted = (size_t)p.num_kv_heads * p.gqa_group * p.head_dim_v * queries;
        floats = wanted > floats ? wanted : floats;
        for (size_t s = 0; s < c->num_others; s++) {
            size_t needed = 0;
            aim(c->others[s], i, &p);
            const akv_status status = akv_attend_workspace_bytes(&p, &needed, diag);
            if (status != AKV_OK)
                return status;
            bytes = needed > bytes ? needed : bytes;
        }
    }
    c->out = akvl_new(floats, sizeof(float));
    c->workspace_bytes = (bytes + 63u) / 64u * 64u;
    c->workspace = aligned_alloc(64, c->workspace_bytes);
    return c->out && c->workspace ? AKV_OK
                                  : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory to compare attention: %zu bytes",
                                              c->workspace_bytes + floats * sizeof(float));
}

akv_status akv_llama_compare(akv_llama *host, akv_llama_store *const *others, size_t num_others, const int32_t *tokens,
                             size_t num_tokens, double *squared_error, double *energy, akv_diag *diag)
{
    if (!host || !others || num_others == 0 || !squared_error || !energy)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, others, squared_error and energy must not be NULL, and "
                                                       "at least one store be given");
    if (!host->store)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached to compare with; run akv_llama_attach first");
    if (num_tokens > host->tail_limit - host->tail_used)
        return akvl_fail(diag, AKV_E_NO_SPACE, "%zu tokens to compare on; the tail has room for %u (tail_cells)",
                         num_tokens, host->tail_limit - host->tail_used);
    struct akvl_comparison c = {others, num_others, squared_error, energy, NULL, NULL, 0};
    akv_status status = AKV_OK;
    for (size_t s = 0; status == AKV_OK && s < num_others; s++)
        status = check_store(host, others[s], diag);
    if (status == AKV_OK)
        status = make_room(host, &c, host->options.batch_tokens, diag);
    if (status == AKV_OK) {
        host->comparison = &c;
        status = akv_llama_decode(host, tokens, num_tokens, AKV_LLAMA_LOGITS_LAST, diag);
        host->comparison = NULL;
    }
    free(c.out);
    free(c.workspace);
    return status;
}
