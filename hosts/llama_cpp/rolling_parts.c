/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling_parts.c - how the bytes of a conversation are split over its segments: what one compression of everything
 * would spend on a token falls with its age, and so do the targets here (docs/method.md "a conversation").
 */
#include "rolling.h"

#include <math.h>
#include <string.h>

/* Bytes of a token go with (age + AGE_OFFSET) ^ -AGE_FALL: about how one compression of a whole text spreads them. */
#define AGE_OFFSET 256.0
#define AGE_FALL 0.3

/* Two segments become one when their targets are less than so many times what they pay for themselves. */
#define MERGE_BELOW 1.6

/* Layers get what akv_llama_set_layer_shares said, brought to a mean of 1. */
double akvl_layer_share(const akv_llama *host, uint32_t i)
{
    double sum = 0.0;
    uint32_t n = 0;
    if (host->shares == NULL)
        return 1.0;
    for (uint32_t j = 0; j < host->num_layers; j++)
        if (akvl_is_hosted(host, j)) {
            sum += host->shares[j];
            n++;
        }
    return sum > 0.0 ? host->shares[i] * n / sum : 1.0;
}

void akvl_add_part(const akv_llama *host, akvl_parts *list, uint32_t layer, int32_t first, uint64_t tokens, akvl_part p)
{
    const double middle = (double)first + 0.5 * (double)tokens;
    p.layer = layer;
    p.tokens = tokens;
    p.weight = pow((double)host->tail_position - middle + AGE_OFFSET, -AGE_FALL) * akvl_layer_share(host, layer);
    list->parts[list->count++] = p;
}

akv_status akvl_list_parts(const akv_llama *host, akvl_parts *list, akv_diag *diag)
{
    size_t most = host->num_layers; /* room for one new segment a layer */
    for (uint32_t i = 0; i < host->num_layers; i++)
        most += akvl_is_hosted(host, i) ? host->running.counts[i] : 0;
    memset(list, 0, sizeof *list);
    list->merge = SIZE_MAX;
    list->parts = akvl_new(most, sizeof *list->parts);
    if (!list->parts)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a table of %zu segments", most);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0, number = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            akv_segment **at = &host->running.lists[i][s];
            const akv_segment_info info = akvl_info_of(*at);
            akv_retarget_info plan;
            akv_retarget_info_init(&plan);
            if (info.kind != AKV_SEGMENT_COMPRESSED)
                continue;
            akvl_part p = {.at = at, .dense = info.dense_bytes, .now = info.bytes.total, .least = info.bytes.total};
            p.number = number++;
            p.own = info.first_position >= (int64_t)host->rolling.options.from_token;
            if (akv_segment_retarget_plan(*at, 1, &plan, NULL) == AKV_E_INFEASIBLE && plan.min_bytes < p.now)
                p.least = plan.min_bytes;
            akvl_add_part(host, list, i, info.first_position, info.shape.num_tokens, p);
        }
    list->old = list->count;
    return AKV_OK;
}

uint64_t akvl_sum_now(const akvl_parts *list, bool own_only)
{
    uint64_t sum = 0;
    for (size_t k = 0; k < list->count; k++)
        sum += own_only && !list->parts[k].own ? 0 : list->parts[k].now;
    return sum;
}

static uint64_t set_targets(akvl_parts *list, double scale, bool own_only)
{
    uint64_t total = 0;
    for (size_t k = 0; k < list->count; k++) {
        akvl_part *p = &list->parts[k];
        if (own_only && !p->own)
            continue;
        const double wanted = scale * p->weight * (double)p->dense;
        p->target = wanted >= (double)p->most ? p->most : wanted <= (double)p->least ? p->least : (uint64_t)wanted;
        total += p->target;
    }
    return total;
}

static bool fit(akvl_parts *list, uint64_t room, bool own_only)
{
    double low = -60.0, high = 60.0; /* log2 of the scale */
    if (set_targets(list, exp2(high), own_only) <= room)
        return true;
    for (int round = 0; round < 60; round++) {
        const double middle = 0.5 * (low + high);
        *(set_targets(list, exp2(middle), own_only) > room ? &high : &low) = middle;
    }
    return set_targets(list, exp2(low), own_only) <= room;
}

bool akvl_fit_parts(akvl_parts *list, uint64_t own_room, uint64_t room)
{
    for (size_t k = 0; k < list->count; k++)
        list->parts[k].most = list->parts[k].now;
    fit(list, own_room, true);
    for (size_t k = 0; k < list->count; k++)
        if (list->parts[k].own)
            list->parts[k].most = list->parts[k].target;
    return fit(list, room, false);
}

/* Bytes without codes of a segment of both parts' tokens: what it could not go below later. */
static uint64_t least_together(const akv_llama *host, const akvl_part *p)
{
    akv_layer layer;
    akv_plan_info plan;
    akvl_describe_layer(&host->tail_graph->layers[p->layer], (int32_t)p->layer, p->tokens + p[1].tokens, 0, &layer);
    layer.shape.num_queries = akvl_rolling_observing(host);
    layer.shape.dtype = AKV_F32;
    akv_plan_info_init(&plan);
    akv_experiment experiment;
    akv_config config;
    akvl_piece_config(host, p->layer, akvl_info_of(*p->at).first_position, &experiment, &config);
    config.budget_bytes = p->target + p[1].target;
    return akv_plan(&layer.shape, &config, &plan, NULL) == AKV_OK && plan.kind == AKV_SEGMENT_COMPRESSED
               ? plan.bytes.total - plan.bytes.residuals
               : UINT64_MAX;
}

bool akvl_is_merged(const akvl_parts *list, size_t k)
{
    return k < list->old && list->merge != SIZE_MAX && list->parts[k].own &&
           (list->parts[k].number == list->merge || list->parts[k].number == list->merge + 1);
}

void akvl_choose_merge(const akv_llama *host, akvl_parts *list)
{
    double best = MERGE_BELOW;
    for (size_t number = 0;; number++) {
        uint64_t targets = 0, least = 0;
        bool any = false, fits = true;
        for (size_t k = 0; k + 1 < list->old; k++) {
            const akvl_part *p = &list->parts[k];
            if (p->number != number || p[1].layer != p->layer)
                continue;
            any = true;
            if (!p->own || p->at + 1 != p[1].at || p->tokens > 2 * p[1].tokens || p[1].tokens > 2 * p->tokens ||
                least_together(host, p) >= p->target + p[1].target)
                fits = false;
            targets += p->target + p[1].target;
            least += p->least + p[1].least;
        }
        if (!any)
            return;
        if (fits && (double)targets < best * (double)least) {
            best = (double)targets / (double)least;
            list->merge = number;
        }
    }
}

/* What a token is worth is seen again with the latest queries, where there are any yet. */
static akv_status shrink(const akv_llama *host, const akvl_part *p, const akv_config *config, akv_segment **out,
                         akv_diag *diag)
{
    if (host->rolling.seen[p->layer] == 0 || akvl_info_of(*p->at).profile != AKV_PROFILE_DEFAULT)
        return akv_segment_retarget(*p->at, p->target, config, out, NULL, diag);
    const uint32_t W = akvl_rolling_observing(host);
    float *latest = akvl_latest_queries(host, p->layer);
    if (!latest)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the latest queries of layer %u", p->layer);
    const akv_tensor queries =
        akv_tensor_contiguous(latest, AKV_F32, W, host->tail_graph->layers[p->layer].head_dim_k);
    const akv_status status =
        akv_segment_retarget_observed(*p->at, p->target, &queries, W, config, out, NULL, diag);
    free(latest);
    return status;
}

akv_status akvl_shrink_parts(akv_llama *host, const akvl_parts *list, akv_diag *diag)
{
    for (size_t k = 0; k < list->old; k++) {
        const akvl_part *p = &list->parts[k];
        akv_segment *small;
        akv_experiment experiment;
        akv_config config;
        if (p->target >= p->now || akvl_is_merged(list, k))
            continue;
        akvl_piece_config(host, p->layer, akvl_info_of(*p->at).first_position, &experiment, &config);
        const akv_status status = shrink(host, p, &config, &small, diag);
        if (status != AKV_OK)
            return status;
        akv_segment_release(*p->at);
        *p->at = small;
    }
    return AKV_OK;
}
