/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling.c - old tokens of a conversation become compressed segments, and older segments smaller, as its bytes run out
 * and not before: a short conversation stays exact (docs/method.md "a conversation").
 */
#include "rolling.h"

#include <string.h>

/* Queries that observe. Each makes a token an anchor, and a short segment has few of those (docs/codec-log.md). */
enum { OBSERVING = 8 };

/* A new segment gets at most this share of its dense bytes: with more it would stay dense. */
#define MOST_KEEP 0.9
/* Codes take 4 of 16 bits and a gain a vector at most. The plan rounds tokens up to 1024, which would be paid for. */
#define MOST_CODES 0.26

/* Half of segment_tokens are compressed when otherwise the older segments would keep less than this share of what they
 * keep then. */
#define BALANCE 0.75

void akv_llama_rolling_init(akv_llama_rolling *rolling)
{
    memset(rolling, 0, sizeof *rolling);
    rolling->struct_size = sizeof *rolling;
    akv_config_init(&rolling->config);
    rolling->segment_tokens = 512;
    rolling->keep_tokens = 0;
    rolling->full_tokens = 2048;
    rolling->from_token = UINT32_MAX;
}

/* ------------------------------------------------------------------------------------------------------- observing */

uint32_t akvl_rolling_observing(const akv_llama *host)
{
    return host->options.observation_queries < OBSERVING ? host->options.observation_queries : OBSERVING;
}

void akvl_rolling_free(akv_llama *host)
{
    for (uint32_t i = 0; host->rolling.queries && i < host->num_layers; i++)
        free(host->rolling.queries[i]);
    free(host->rolling.queries);
    free(host->rolling.seen);
    memset(&host->rolling, 0, sizeof host->rolling);
}

void akvl_rolling_forget(akv_llama *host)
{
    if (host->rolling.seen)
        memset(host->rolling.seen, 0, host->num_layers * sizeof *host->rolling.seen);
}

void akvl_rolling_observe(akv_llama *host, uint32_t number, const struct ggml_tensor *q)
{
    if (!host->rolling.on)
        return;
    const size_t W = akvl_rolling_observing(host), heads = (size_t)q->ne[2], dim = (size_t)q->ne[0],
                 n = (size_t)q->ne[1];
    for (size_t t = n > W ? n - W : 0; t < n; t++)
        for (size_t h = 0; h < heads; h++)
            memcpy(host->rolling.queries[number] + (h * W + (host->rolling.seen[number] + t) % W) * dim,
                   (const char *)q->data + t * q->nb[1] + h * q->nb[2], dim * sizeof(float));
    host->rolling.seen[number] += n;
}

/* ---------------------------------------------------------------------------------------------------------- limits */

/* Bytes that are exact: B's cells, the conversation's dense segments, and those of the document if it is to count. */
static uint64_t exact_bytes(const akv_llama *host, bool document)
{
    uint64_t bytes = akvl_token_bytes(host) * (uint64_t)llama_n_ctx(host->tail);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = akvl_info_of(host->running.lists[i][s]);
            const bool old = info.first_position < (int64_t)host->rolling.options.from_token;
            if (info.kind == AKV_SEGMENT_DENSE && (document || !old))
                bytes += info.bytes.total;
        }
    return bytes;
}

/* The least that a budget has to hold: what may be exact when a segment is made. */
static uint64_t least_budget(const akv_llama *host)
{
    const akv_llama_rolling *r = &host->rolling.options;
    const uint64_t cells = llama_n_ctx(host->tail);
    uint64_t bytes = akvl_token_bytes(host) * (cells + r->keep_tokens + (uint64_t)host->tail_limit);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = akvl_info_of(host->running.lists[i][s]);
            if (info.kind == AKV_SEGMENT_DENSE &&
                (info.first_position < (int64_t)r->from_token || info.dense_reason == AKV_DENSE_EVICTED))
                bytes += info.bytes.total;
        }
    return bytes;
}

uint64_t akvl_ratio_limit(const akv_llama *host)
{
    const akv_llama_rolling *r = &host->rolling.options;
    const double tokens = (double)host->tail_position - (double)r->from_token, full = (double)r->full_tokens;
    const double kept = r->config.keep_ratio * (tokens > 0.0 ? tokens : 0.0);
    return (uint64_t)((kept > full ? kept : full) * (double)akvl_token_bytes(host));
}

static akv_status check_budget(const akv_llama *host, akv_diag *diag)
{
    const akv_llama_rolling *r = &host->rolling.options;
    const uint64_t least = least_budget(host);
    if (r->budget_bytes == 0 || r->budget_bytes > least)
        return AKV_OK;
    return akvl_fail(
        diag, AKV_E_INFEASIBLE,
        "a budget of %llu bytes is below the %llu that the exact tokens may take (the engine's cells, %u tokens "
        "that stay and those that wait to be compressed, and what of the document is exact)",
        (unsigned long long)r->budget_bytes, (unsigned long long)least, r->keep_tokens);
}

akv_status akv_llama_set_rolling(akv_llama *host, const akv_llama_rolling *rolling, akv_diag *diag)
{
    if (!host || (rolling && (rolling->struct_size != sizeof *rolling || rolling->segment_tokens == 0 ||
                              rolling->config.budget_bytes != 0)))
        return akvl_fail(
            diag, AKV_E_INVALID_ARGUMENT,
            "rolling must come from akv_llama_rolling_init, with at least one token a segment and a keep_ratio");
    if (!host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    akvl_rolling_free(host);
    if (!rolling)
        return AKV_OK;
    akvl_rolling *r = &host->rolling;
    r->options = *rolling;
    if (r->options.from_token == UINT32_MAX)
        r->options.from_token = (uint32_t)host->tail_position;
    r->queries = akvl_new(host->num_layers, sizeof *r->queries);
    r->seen = akvl_new(host->num_layers, sizeof *r->seen);
    bool ok = r->queries && r->seen;
    for (uint32_t i = 0; ok && i < host->num_layers; i++) {
        const akvl_layer *l = &host->tail_graph->layers[i];
        if (!akvl_is_hosted(host, i))
            continue;
        r->queries[i] = akvl_new((size_t)l->num_kv_heads * l->gqa_group * akvl_rolling_observing(host) * l->head_dim_k,
                                 sizeof(float));
        ok = r->queries[i] != NULL;
    }
    r->on = true;
    akv_status status =
        ok ? check_budget(host, diag) : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the latest queries");
    if (status == AKV_OK)
        status = akvl_roll(host, diag);
    if (status != AKV_OK)
        akvl_rolling_free(host);
    return status;
}

/* -------------------------------------------------------------------------------------------------------- rolling */

/*
 * Dense segments at the end of a layer's list; *take of them, from the first on, with *tokens tokens may be compressed.
 */
static uint32_t waiting(const akv_llama *host, uint32_t i, uint32_t *take, uint64_t *tokens)
{
    const akvl_running *r = &host->running;
    uint32_t first = r->counts[i];
    uint64_t kept = 0, all = 0;
    while (first > 0) {
        const akv_segment_info info = akvl_info_of(r->lists[i][first - 1]);
        if (info.kind != AKV_SEGMENT_DENSE || info.dense_reason == AKV_DENSE_EVICTED ||
            info.first_position < (int64_t)host->rolling.options.from_token)
            break;
        all += info.shape.num_tokens;
        first--;
    }
    *take = r->counts[i] - first;
    while (*take > 0 && kept < host->rolling.options.keep_tokens)
        kept += akvl_info_of(r->lists[i][first + --*take]).shape.num_tokens;
    *tokens = all - kept;
    return first;
}

/*
 * What may be compressed in each layer, as parts at the end of the list. *tokens: of a layer; *bytes: what they take
 * now in all layers.
 */
static akv_status list_new(const akv_llama *host, akvl_parts *list, uint64_t *tokens, uint64_t *bytes, akv_diag *diag)
{
    *tokens = *bytes = 0;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        uint32_t take = 0;
        if (!akvl_is_hosted(host, i))
            continue;
        const uint32_t first = waiting(host, i, &take, tokens);
        if (take == 0)
            break; /* the layers are alike */
        for (uint32_t s = first; s < first + take; s++)
            *bytes += akvl_info_of(host->running.lists[i][s]).bytes.total;
        akv_layer layer;
        akv_plan_info plan;
        akv_diag inner = {.status = AKV_OK};
        const int32_t position = akvl_info_of(host->running.lists[i][first]).first_position;
        akv_experiment experiment;
        akv_config config;
        akvl_piece_config(host, i, position, &experiment, &config);
        akvl_describe_layer(&host->tail_graph->layers[i], (int32_t)i, *tokens, 0, &layer);
        layer.shape.num_queries = akvl_rolling_observing(host);
        layer.shape.dtype = AKV_F32;
        akv_plan_info_init(&plan);
        config.keep_ratio = MOST_KEEP; /* the plan says how much of that the codes can use */
        const akv_status status = akv_plan(&layer.shape, &config, &plan, &inner);
        if (status != AKV_OK && status != AKV_E_INFEASIBLE)
            return akvl_fail(diag, status, "layer %u, %llu tokens of the conversation: %.400s", i,
                             (unsigned long long)*tokens, inner.message);
        if (status != AKV_OK || plan.kind != AKV_SEGMENT_COMPRESSED) { /* too few of them */
            list->count = list->old;
            *tokens = 0;
            break;
        }
        const uint64_t codes = (uint64_t)(MOST_CODES * (double)plan.dense_bytes),
                       fixed = plan.bytes.total - plan.bytes.residuals;
        const uint64_t most = fixed + codes < plan.bytes.total ? fixed + codes : plan.bytes.total;
        akvl_add_part(host, list, i, position, *tokens,
                      (akvl_part){.own = true, .dense = plan.dense_bytes, .now = most, .least = plan.min_bytes});
    }
    return AKV_OK;
}

/* `made` takes the place of `take` segments of a layer. */
static void put(akv_llama *host, uint32_t i, uint32_t first, uint32_t take, akv_segment *made)
{
    akv_segment **list = host->running.lists[i];
    for (uint32_t s = first; s < first + take; s++)
        akv_segment_release(list[s]);
    list[first] = made;
    memmove(list + first + 1, list + first + take, (host->running.counts[i] - first - take) * sizeof *list);
    host->running.counts[i] -= take - 1;
}

/* A segment that is made from others: in a layer, or nowhere (take 0). */
typedef struct making {
    uint32_t first, take;
    akv_segment *made;
} making;

/* What waits becomes the list's last parts, two of the older ones become one (list->merge), the others smaller. */
static akv_status make(akv_llama *host, const akvl_parts *list, making *news, making *merged, akv_diag *diag)
{
    akv_status status = AKV_OK;
    for (size_t k = list->old; status == AKV_OK && k < list->count; k++) {
        const akvl_part *p = &list->parts[k];
        uint64_t tokens = 0;
        making *m = &news[p->layer];
        m->first = waiting(host, p->layer, &m->take, &tokens);
        status = akvl_compress_piece(host, p->layer, m->first, m->take, tokens, p->target, &m->made, diag);
    }
    for (size_t k = 0; status == AKV_OK && k + 1 < list->old; k++) {
        const akvl_part *p = &list->parts[k];
        if (!akvl_is_merged(list, k))
            continue;
        making *m = &merged[p->layer];
        m->first = (uint32_t)(p->at - host->running.lists[p->layer]);
        m->take = 2;
        status = akvl_compress_piece(host, p->layer, m->first, 2, p->tokens + p[1].tokens, p->target + p[1].target,
                                   &m->made, diag);
        k++;
    }
    if (status == AKV_OK)
        status = akvl_shrink_parts(host, list, diag); /* before the lists move: the parts point into them */
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (status != AKV_OK) {
            akv_segment_release(news[i].made);
            akv_segment_release(merged[i].made);
            continue;
        }
        if (news[i].made) /* behind the merged ones */
            put(host, i, news[i].first, news[i].take, news[i].made);
        if (merged[i].made)
            put(host, i, merged[i].first, 2, merged[i].made);
    }
    return status;
}

static akv_status carry_out(akv_llama *host, const akvl_parts *list, akv_diag *diag)
{
    making *news = akvl_new(host->num_layers, sizeof *news), *merged = akvl_new(host->num_layers, sizeof *merged);
    const akv_status status =
        news && merged ? make(host, list, news, merged, diag)
                       : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a table of %u layers", host->num_layers);
    free(news);
    free(merged);
    bool smaller = false;
    for (size_t k = 0; k < list->old; k++)
        smaller = smaller || list->parts[k].target < list->parts[k].now;
    host->rolls += status == AKV_OK && list->count > list->old;
    host->retargets += status == AKV_OK && smaller;
    return status;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static uint64_t sum_old_targets(const akvl_parts *list)
{
    uint64_t sum = 0;
    for (size_t k = 0; k < list->old; k++)
        sum += list->parts[k].own ? list->parts[k].target : 0;
    return sum;
}

/* Whether there are queries to observe with: not right behind akv_llama_set_rolling. */
static bool has_observed(const akv_llama *host)
{
    for (uint32_t i = 0; i < host->num_layers; i++)
        if (host->rolling.seen[i] > 0)
            return true;
    return false;
}

/* Sets the targets of all parts, what is to be made new among them. */
static akv_status decide(akv_llama *host, akvl_parts *list, uint64_t own_limit, uint64_t budget, akv_diag *diag)
{
    const akv_llama_rolling *r = &host->rolling.options;
    const uint64_t own = exact_bytes(host, false), all = exact_bytes(host, true);
    const bool fits = own <= own_limit && all <= budget && akvl_fit_parts(list, own_limit - own, budget - all);
    const uint64_t alone = fits ? sum_old_targets(list) : 0;
    uint64_t tokens = 0, waiting_bytes = 0;
    akv_status status = AKV_OK;
    if (!fits || has_observed(host))
        status = list_new(host, list, &tokens, &waiting_bytes, diag);
    if (status != AKV_OK)
        return status;
    if (tokens > 0 && all - waiting_bytes <= budget &&
        akvl_fit_parts(list, less(own_limit, own - waiting_bytes), budget - (all - waiting_bytes)) &&
        (!fits || tokens >= r->segment_tokens ||
         (tokens >= r->segment_tokens / 2 && (double)alone < BALANCE * (double)sum_old_targets(list))))
        return AKV_OK;
    list->count = list->old;
    if (all > budget || !akvl_fit_parts(list, less(own_limit, own), budget - all))
        return akvl_fail(
            diag, AKV_E_INFEASIBLE,
            "the compressed segments cannot shrink to %llu bytes, which the budget leaves beside the exact tokens",
            (unsigned long long)less(budget, all));
    return AKV_OK;
}

/*
 * B's cells have just moved, and have room for as many tokens again: now everything must fit into what it may take
 * until then. At first nothing needs to be done; then the older segments become smaller; and when that costs them too
 * much, what waits is compressed.
 */
akv_status akvl_roll(akv_llama *host, akv_diag *diag)
{
    if (!host->rolling.on)
        return AKV_OK;
    const uint64_t limit = akvl_ratio_limit(host);
    const uint64_t budget = host->rolling.options.budget_bytes ? host->rolling.options.budget_bytes : UINT64_MAX;
    akvl_parts list;
    akv_status status = akvl_list_parts(host, &list, diag);
    if (status == AKV_OK && (exact_bytes(host, false) + akvl_sum_now(&list, true) > limit ||
                             exact_bytes(host, true) + akvl_sum_now(&list, false) > budget)) {
        status = decide(host, &list, limit, budget, diag);
        if (status == AKV_OK) {
            if (has_observed(host))
                akvl_choose_merge(host, &list);
            status = carry_out(host, &list, diag);
        }
    }
    free(list.parts);
    return status;
}
