/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling.c - old tokens of a conversation become compressed segments as it grows, and older segments give way to newer
 * ones: what one compression of everything would spend on a token falls with its age, and so do the targets here
 * (docs/method.md "a conversation"). Making a segment smaller later costs next to nothing beside having made it so at
 * once.
 */
#include "host.h"

#include <math.h>
#include <string.h>

/* Bytes of a token go with (age + AGE_OFFSET) ^ -AGE_FALL: about how one compression of a whole text spreads them. */
#define AGE_OFFSET 256.0
#define AGE_FALL 0.3

/* Queries that observe. Each makes a token an anchor, and a short segment has few of those (docs/codec-log.md). */
enum { OBSERVING = 8 };

/* A new segment gets at most this share of its dense bytes: with more it would stay dense. */
#define MOST_KEEP 0.9

void akv_llama_rolling_init(akv_llama_rolling *rolling)
{
    memset(rolling, 0, sizeof *rolling);
    rolling->struct_size = sizeof *rolling;
    akv_config_init(&rolling->config);
    rolling->segment_tokens = 1024;
    rolling->keep_tokens = 128;
    rolling->from_token = UINT32_MAX;
}

/* ------------------------------------------------------------------------------------------------------- observing */

static uint32_t observing(const akv_llama *host)
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
    const size_t W = observing(host), heads = (size_t)q->ne[2], dim = (size_t)q->ne[0], n = (size_t)q->ne[1];
    for (size_t t = n > W ? n - W : 0; t < n; t++)
        for (size_t h = 0; h < heads; h++)
            memcpy(host->rolling.queries[number] + (h * W + (host->rolling.seen[number] + t) % W) * dim,
                   (const char *)q->data + t * q->nb[1] + h * q->nb[2], dim * sizeof(float));
    host->rolling.seen[number] += n;
}

/* --------------------------------------------------------------------------------------------------------- budget */

/*
 * Bytes that may be exact after a step: B's cells, what waits to be compressed (less than a segment), what stays exact
 * (less than a move of the cells more than asked for), and the exact segments of the document.
 */
static uint64_t exact_bytes(const akv_llama *host, const akv_llama_rolling *r)
{
    const uint64_t cells = llama_n_ctx(host->tail);
    uint64_t bytes = akvl_token_bytes(host) * (cells + (uint64_t)r->segment_tokens + r->keep_tokens + host->tail_limit);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = akvl_info_of(host->running.lists[i][s]);
            if (info.kind == AKV_SEGMENT_DENSE &&
                (info.first_position < (int64_t)r->from_token || info.dense_reason == AKV_DENSE_EVICTED))
                bytes += info.bytes.total;
        }
    return bytes;
}

/* What one segment takes, and what it should. */
typedef struct part {
    akv_segment **at; /* NULL: one that is still to be made */
    uint64_t dense, now, least;
    double weight; /* by age and layer */
    uint64_t target;
} part;

typedef struct part_list {
    part *parts;
    size_t count;
    uint64_t dense; /* of all */
} part_list;

/* Layers get what akv_llama_set_layer_shares said, brought to a mean of 1. */
static double layer_share(const akv_llama *host, uint32_t i)
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

static void add_part(const akv_llama *host, part_list *list, uint32_t layer, int32_t first, uint64_t tokens, part p)
{
    const double middle = (double)first + 0.5 * (double)tokens;
    p.weight = pow((double)host->tail_position - middle + AGE_OFFSET, -AGE_FALL) * layer_share(host, layer);
    list->parts[list->count++] = p;
    list->dense += p.dense;
}

/* The compressed segments whose tokens stand at `from` or later. */
static akv_status list_parts(const akv_llama *host, int64_t from, part_list *list, akv_diag *diag)
{
    size_t most = host->num_layers; /* room for one new segment a layer */
    for (uint32_t i = 0; i < host->num_layers; i++)
        most += akvl_is_hosted(host, i) ? host->running.counts[i] : 0;
    memset(list, 0, sizeof *list);
    list->parts = akvl_new(most, sizeof *list->parts);
    if (!list->parts)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a table of %zu segments", most);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            akv_segment **at = &host->running.lists[i][s];
            const akv_segment_info info = akvl_info_of(*at);
            akv_retarget_info plan;
            akv_retarget_info_init(&plan);
            if (info.kind != AKV_SEGMENT_COMPRESSED || info.first_position < from)
                continue;
            part p = {.at = at, .dense = info.dense_bytes, .now = info.bytes.total, .least = info.bytes.total};
            if (akv_segment_retarget_plan(*at, 1, &plan, NULL) == AKV_E_INFEASIBLE && plan.min_bytes < p.now)
                p.least = plan.min_bytes;
            add_part(host, list, i, info.first_position, info.shape.num_tokens, p);
        }
    return AKV_OK;
}

static uint64_t set_targets(part_list *list, double scale)
{
    uint64_t total = 0;
    for (size_t k = 0; k < list->count; k++) {
        part *p = &list->parts[k];
        const double wanted = scale * p->weight * (double)p->dense;
        p->target = wanted >= (double)p->now ? p->now : wanted <= (double)p->least ? p->least : (uint64_t)wanted;
        total += p->target;
    }
    return total;
}

/* The largest targets, in proportion to the weights, whose sum is `room`; false when the least is more. */
static bool fit(part_list *list, uint64_t room)
{
    double low = -60.0, high = 60.0; /* log2 of the scale */
    if (set_targets(list, exp2(high)) <= room)
        return true;
    for (int round = 0; round < 60; round++) {
        const double middle = 0.5 * (low + high);
        *(set_targets(list, exp2(middle)) > room ? &high : &low) = middle;
    }
    return set_targets(list, exp2(low)) <= room;
}

/* Segments to their targets. An error (no memory) leaves some smaller already, and all of them valid. */
static akv_status shrink(akv_llama *host, part_list *list, akv_diag *diag)
{
    akv_config config = host->rolling.options.config;
    config.executor = config.executor ? config.executor : host->options.executor;
    for (size_t k = 0; k < list->count; k++) {
        part *p = &list->parts[k];
        akv_segment *small;
        if (!p->at || p->target >= p->now)
            continue;
        const akv_status status = akv_segment_retarget(*p->at, p->target, &config, &small, NULL, diag);
        if (status != AKV_OK)
            return status;
        akv_segment_release(*p->at);
        *p->at = small;
    }
    return AKV_OK;
}

static akv_status keep_budget(akv_llama *host, akv_diag *diag)
{
    const akv_llama_rolling *r = &host->rolling.options;
    if (r->budget_bytes == 0)
        return AKV_OK;
    const uint64_t exact = exact_bytes(host, r);
    if (exact >= r->budget_bytes)
        return akvl_fail(diag, AKV_E_INFEASIBLE,
                         "a budget of %llu bytes is below the %llu that the exact tokens may take (%u waiting to be "
                         "compressed, %u that stay, the engine's cells, and what of the document is exact)",
                         (unsigned long long)r->budget_bytes, (unsigned long long)exact, r->segment_tokens,
                         r->keep_tokens);
    part_list list;
    akv_status status = list_parts(host, 0, &list, diag);
    if (status == AKV_OK) {
        uint64_t now = 0;
        for (size_t k = 0; k < list.count; k++)
            now += list.parts[k].now;
        const uint64_t room = r->budget_bytes - exact;
        if (!fit(&list, room))
            status = akvl_fail(
                diag, AKV_E_INFEASIBLE,
                "the compressed segments cannot shrink to %llu bytes, which the budget leaves beside the exact "
                "tokens",
                (unsigned long long)room);
        else if (now > room)
            status = shrink(host, &list, diag);
        host->retargets += status == AKV_OK && now > room;
    }
    free(list.parts);
    return status;
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
        r->queries[i] =
            akvl_new((size_t)l->num_kv_heads * l->gqa_group * observing(host) * l->head_dim_k, sizeof(float));
        ok = r->queries[i] != NULL;
    }
    akv_status status =
        ok ? keep_budget(host, diag) : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the latest queries");
    if (status != AKV_OK)
        akvl_rolling_free(host);
    else
        r->on = true;
    return status;
}

/* -------------------------------------------------------------------------------------------------------- rolling */

/* Dense segments at the end of a layer's list; *take of them, from the first on, with *tokens tokens may be compressed. */
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

/* The latest queries, oldest first; fewer when fewer were asked: the first one is repeated. */
static void order_queries(const akv_llama *host, uint32_t i, float *out)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    const size_t W = observing(host), d = l->head_dim_k, seen = (size_t)host->rolling.seen[i];
    const size_t have = seen < W ? seen : W;
    for (size_t h = 0; h < (size_t)l->num_kv_heads * l->gqa_group; h++)
        for (size_t r = 0; r < W; r++) {
            const size_t from = r < W - have ? 0 : r - (W - have);
            memcpy(out + (h * W + r) * d, host->rolling.queries[i] + (h * W + (seen - have + from) % W) * d,
                   d * sizeof *out);
        }
}

/* Segments [first, first + take) of a layer, all dense and one behind the other -> one compressed segment. */
static akv_status compress_segments(akv_llama *host, uint32_t i, uint32_t first, uint32_t take, uint64_t tokens,
                                    uint64_t bytes, akv_segment **out, akv_diag *diag)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    akv_segment **segments = host->running.lists[i] + first;
    const size_t H = l->num_kv_heads, dk = l->head_dim_k, dv = l->head_dim_v, W = observing(host);
    float *keys = akvl_new(H * (size_t)tokens, dk * sizeof *keys),
          *values = akvl_new(H * (size_t)tokens, dv * sizeof *values);
    float *queries = akvl_new(H * l->gqa_group * W, dk * sizeof *queries);
    akv_layer layer;
    akv_diag inner = {.status = AKV_OK};
    akv_status status = keys && values && queries ? AKV_OK : AKV_E_NO_MEMORY;
    if (status == AKV_OK) {
        size_t at = 0;
        for (uint32_t s = 0; s < take; s++) {
            const size_t n = (size_t)akvl_info_of(segments[s]).shape.num_tokens;
            for (size_t h = 0; h < H; h++)
                akv_segment_decode(segments[s], (uint32_t)h, 0, n, keys + (h * (size_t)tokens + at) * dk,
                                   values + (h * (size_t)tokens + at) * dv, NULL);
            at += n;
        }
        order_queries(host, i, queries);
        akvl_describe_layer(l, (int32_t)i, tokens, akvl_info_of(segments[0]).first_position, &layer);
        layer.keys = akv_tensor_contiguous(keys, AKV_F32, tokens, (uint32_t)dk);
        layer.values = akv_tensor_contiguous(values, AKV_F32, tokens, (uint32_t)dv);
        layer.queries = akv_tensor_contiguous(queries, AKV_F32, W, (uint32_t)dk);
        layer.shape.num_queries = (uint32_t)W;
        akv_config config = host->rolling.options.config;
        config.budget_bytes = bytes;
        config.executor = config.executor ? config.executor : host->options.executor;
        status = akv_compress(&layer, &config, out, &inner);
        if (status != AKV_OK)
            akvl_fail(diag, status, "layer %u, %llu tokens of the conversation: %.400s", i, (unsigned long long)tokens,
                      inner.message);
    } else {
        akvl_fail(diag, status, "no memory for %llu tokens of layer %u", (unsigned long long)tokens, i);
    }
    free(keys);
    free(values);
    free(queries);
    return status;
}

/* What will be compressed in each layer, as parts at the end of the list. */
static akv_status list_new(const akv_llama *host, part_list *list, akv_diag *diag)
{
    for (uint32_t i = 0; i < host->num_layers; i++) {
        uint32_t take = 0;
        uint64_t tokens = 0;
        if (!akvl_is_hosted(host, i))
            continue;
        const uint32_t first = waiting(host, i, &take, &tokens);
        if (take == 0 || tokens < host->rolling.options.segment_tokens)
            break; /* the layers are alike */
        akv_layer layer;
        akv_plan_info plan;
        akv_diag inner = {.status = AKV_OK};
        akvl_describe_layer(&host->tail_graph->layers[i], (int32_t)i, tokens, 0, &layer);
        layer.shape.num_queries = observing(host);
        layer.shape.dtype = AKV_F32;
        akv_plan_info_init(&plan);
        const akv_status status = akv_plan(&layer.shape, &host->rolling.options.config, &plan, &inner);
        if (status != AKV_OK && status != AKV_E_INFEASIBLE)
            return akvl_fail(diag, status, "layer %u, %llu tokens of the conversation: %.400s", i,
                             (unsigned long long)tokens, inner.message);
        const uint64_t most = (uint64_t)(MOST_KEEP * (double)plan.dense_bytes);
        add_part(
            host, list, i, akvl_info_of(host->running.lists[i][first]).first_position, tokens,
            (part){.dense = plan.dense_bytes, .now = most, .least = plan.min_bytes < most ? plan.min_bytes : most});
    }
    return AKV_OK;
}

/* The new segments take the places of those they were made from. */
static void put_new(akv_llama *host, akv_segment **made)
{
    for (uint32_t i = 0; i < host->num_layers; i++) {
        uint32_t take;
        uint64_t tokens;
        if (!made[i])
            continue;
        akv_segment **list = host->running.lists[i];
        const uint32_t first = waiting(host, i, &take, &tokens);
        for (uint32_t s = first; s < first + take; s++)
            akv_segment_release(list[s]);
        list[first] = made[i];
        memmove(list + first + 1, list + first + take, (host->running.counts[i] - first - take) * sizeof *list);
        host->running.counts[i] -= take - 1;
    }
}

/* Compress what waits into `list`'s last parts, and make the older ones smaller. */
static akv_status roll(akv_llama *host, part_list *list, size_t old, akv_diag *diag)
{
    const uint64_t room = (uint64_t)(host->rolling.options.config.keep_ratio * (double)list->dense);
    if (!fit(list, room))
        return akvl_fail(
            diag, AKV_E_INFEASIBLE,
            "segments of %u tokens cannot become %.1f times smaller: what each needs for itself is more; use a "
            "smaller ratio",
            host->rolling.options.segment_tokens, 1.0 / host->rolling.options.config.keep_ratio);
    akv_segment **made = akvl_new(host->num_layers, sizeof(akv_segment *));
    akv_status status =
        made ? AKV_OK : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a table of %u layers", host->num_layers);
    size_t k = old;
    for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
        uint32_t take = 0;
        uint64_t tokens = 0;
        if (!akvl_is_hosted(host, i))
            continue;
        const uint32_t first = waiting(host, i, &take, &tokens);
        status = compress_segments(host, i, first, take, tokens, list->parts[k++].target, &made[i], diag);
    }
    if (status == AKV_OK)
        status = shrink(host, list, diag); /* before the lists move: the parts point into them */
    for (uint32_t i = 0; made && status != AKV_OK && i < host->num_layers; i++)
        akv_segment_release(made[i]);
    if (status == AKV_OK)
        put_new(host, made);
    free(made);
    host->rolls += status == AKV_OK;
    return status;
}

akv_status akvl_roll(akv_llama *host, akv_diag *diag)
{
    if (!host->rolling.on)
        return AKV_OK;
    part_list list;
    akv_status status = list_parts(host, host->rolling.options.from_token, &list, diag);
    const size_t old = list.count;
    if (status == AKV_OK)
        status = list_new(host, &list, diag);
    if (status == AKV_OK && list.count > old)
        status = roll(host, &list, old, diag);
    free(list.parts);
    return status == AKV_OK ? keep_budget(host, diag) : status;
}
