/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conversation.c - a conversation behind a document that lives on: old tokens are compressed as it grows, the bytes keep to a budget, it
 * can go back to any token, and it can be kept as a store.
 */
#include "host.h"

#include <string.h>

void akv_llama_rolling_init(akv_llama_rolling *rolling)
{
    memset(rolling, 0, sizeof *rolling);
    rolling->struct_size = sizeof *rolling;
    akv_config_init(&rolling->config);
    rolling->segment_tokens = 1024;
    rolling->keep_tokens = 256;
}

void akv_llama_memory_init(akv_llama_memory *memory)
{
    memset(memory, 0, sizeof *memory);
    memory->struct_size = sizeof *memory;
}

static bool is_hosted(const akv_llama *host, uint32_t i)
{
    return host->store->parts.layers[i].kind == AKV_LLAMA_LAYER_HOSTED;
}

static akv_segment_info info_of(const akv_segment *segment)
{
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    return info;
}

/* 16-bit bytes of one token in all hosted layers. */
static uint64_t token_bytes(const akv_llama *host)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        const akvl_layer *l = &host->tail_graph->layers[i];
        if (is_hosted(host, i))
            bytes += (uint64_t)l->num_kv_heads * (l->head_dim_k + l->head_dim_v) * 2;
    }
    return bytes;
}

akv_status akv_llama_get_memory(const akv_llama *host, akv_llama_memory *out, akv_diag *diag)
{
    if (!host || !out || out->struct_size != sizeof *out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host is NULL, or out was not filled by akv_llama_memory_init");
    if (!host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    akv_llama_memory_init(out);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = info_of(host->running.lists[i][s]);
            uint64_t *sum = &out->segments.total;
            for (size_t k = 0; k < sizeof info.bytes / sizeof *sum; k++)
                sum[k] += (&info.bytes.total)[k];
            out->num_segments++;
        }
    out->cell_bytes = token_bytes(host) * llama_n_ctx(host->tail);
    out->dense_bytes = token_bytes(host) * (uint64_t)host->tail_position;
    out->rolls = host->rolls;
    out->retargets = host->retargets;
    return AKV_OK;
}

const int32_t *akv_llama_history(const akv_llama *host)
{
    return host && host->tail ? host->history : NULL;
}

/* ------------------------------------------------------------------------------------------------------- observing */

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
    const size_t W = host->options.observation_queries, heads = (size_t)q->ne[2], dim = (size_t)q->ne[0],
                 n = (size_t)q->ne[1];
    for (size_t t = n > W ? n - W : 0; t < n; t++)
        for (size_t h = 0; h < heads; h++)
            memcpy(host->rolling.queries[number] + (h * W + (host->rolling.seen[number] + t) % W) * dim,
                   (const char *)q->data + t * q->nb[1] + h * q->nb[2], dim * sizeof(float));
    host->rolling.seen[number] += n;
}

/* --------------------------------------------------------------------------------------------------------- budget */

/* Bytes that may be exact at one time: B's cells, what waits to be compressed, and what stays exact. */
static uint64_t exact_bytes(const akv_llama *host, const akv_llama_rolling *r)
{
    const uint64_t cells = llama_n_ctx(host->tail);
    return token_bytes(host) * (cells + (uint64_t)r->segment_tokens + r->keep_tokens + 2 * (uint64_t)host->tail_limit);
}

/* Compressed bytes if every compressed segment kept this ratio, all layers; false when one cannot become so small. */
static bool bytes_at(const akv_llama *host, double keep, uint64_t *total)
{
    *total = 0;
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = info_of(host->running.lists[i][s]);
            akv_retarget_info plan;
            akv_retarget_info_init(&plan);
            if (info.kind != AKV_SEGMENT_COMPRESSED)
                continue;
            if (akv_segment_retarget_plan(host->running.lists[i][s], (uint64_t)(keep * (double)info.dense_bytes), &plan,
                                          NULL) != AKV_OK)
                return false;
            *total += plan.bytes.total;
        }
    return true;
}

/* Compressed segments into `room` bytes, all by the same ratio. Nothing is changed on failure. */
static akv_status shrink_to(akv_llama *host, uint64_t room, akv_diag *diag)
{
    double low = 0.0, high = 1.0;
    uint64_t total;
    if (bytes_at(host, 1.0, &total) && total <= room)
        return AKV_OK;
    for (int round = 0; round < 30; round++) {
        const double mid = 0.5 * (low + high);
        if (!bytes_at(host, mid, &total) || total <= room)
            low = mid;
        else
            high = mid;
    }
    if (!bytes_at(host, low, &total) || total > room)
        return akvl_fail(
            diag, AKV_E_INFEASIBLE,
            "the compressed segments cannot shrink to %llu bytes, which the budget leaves beside the exact tokens",
            (unsigned long long)room);
    akv_config config = host->rolling.options.config;
    config.executor = config.executor ? config.executor : host->options.executor;
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            akv_segment **at = &host->running.lists[i][s], *small;
            const akv_segment_info info = info_of(*at);
            if (info.kind != AKV_SEGMENT_COMPRESSED)
                continue;
            akv_status status =
                akv_segment_retarget(*at, (uint64_t)(low * (double)info.dense_bytes), &config, &small, NULL, diag);
            if (status != AKV_OK) /* out of memory: some are smaller already, all are valid */
                return status;
            akv_segment_release(*at);
            *at = small;
        }
    host->retargets++;
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
                         "compressed, %u that"
                         " stay, and the engine's cells)",
                         (unsigned long long)r->budget_bytes, (unsigned long long)exact, r->segment_tokens,
                         r->keep_tokens);
    return shrink_to(host, r->budget_bytes - exact, diag);
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
    r->queries = akvl_new(host->num_layers, sizeof *r->queries);
    r->seen = akvl_new(host->num_layers, sizeof *r->seen);
    bool ok = r->queries && r->seen;
    for (uint32_t i = 0; ok && i < host->num_layers; i++) {
        const akvl_layer *l = &host->tail_graph->layers[i];
        if (!is_hosted(host, i))
            continue;
        r->queries[i] = akvl_new(
            (size_t)l->num_kv_heads * l->gqa_group * host->options.observation_queries * l->head_dim_k, sizeof(float));
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

/* Dense segments at the end of a layer's list, and how many of their tokens may be compressed: *take segments from the first. */
static uint32_t waiting(const akv_llama *host, uint32_t i, uint32_t *take, uint64_t *tokens)
{
    const akvl_running *r = &host->running;
    uint32_t first = r->counts[i];
    uint64_t kept = 0, all = 0;
    while (first > 0) {
        const akv_segment_info info = info_of(r->lists[i][first - 1]);
        if (info.kind != AKV_SEGMENT_DENSE || info.dense_reason == AKV_DENSE_EVICTED)
            break;
        all += info.shape.num_tokens;
        first--;
    }
    *take = r->counts[i] - first;
    while (*take > 0 && kept < host->rolling.options.keep_tokens)
        kept += info_of(r->lists[i][first + --*take]).shape.num_tokens;
    *tokens = all - kept;
    return first;
}

/* The latest queries, oldest first; fewer than W when fewer were asked: the first ones are repeated. */
static void order_queries(const akv_llama *host, uint32_t i, float *out)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    const size_t W = host->options.observation_queries, d = l->head_dim_k, seen = (size_t)host->rolling.seen[i];
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
                                    akv_segment **out, akv_diag *diag)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    akv_segment **segments = host->running.lists[i] + first;
    const size_t H = l->num_kv_heads, dk = l->head_dim_k, dv = l->head_dim_v, W = host->options.observation_queries;
    float *keys = akvl_new(H * (size_t)tokens, dk * sizeof *keys),
          *values = akvl_new(H * (size_t)tokens, dv * sizeof *values);
    float *queries = akvl_new(H * l->gqa_group * W, dk * sizeof *queries);
    akv_layer layer;
    akv_diag inner = {.status = AKV_OK};
    akv_status status = keys && values && queries ? AKV_OK : AKV_E_NO_MEMORY;
    if (status == AKV_OK) {
        size_t at = 0;
        for (uint32_t s = 0; s < take; s++) {
            const size_t n = (size_t)info_of(segments[s]).shape.num_tokens;
            for (size_t h = 0; h < H; h++)
                akv_segment_decode(segments[s], (uint32_t)h, 0, n, keys + (h * (size_t)tokens + at) * dk,
                                   values + (h * (size_t)tokens + at) * dv, NULL);
            at += n;
        }
        order_queries(host, i, queries);
        akvl_describe_layer(l, (int32_t)i, tokens, info_of(segments[0]).first_position, &layer);
        layer.keys = akv_tensor_contiguous(keys, AKV_F32, tokens, (uint32_t)dk);
        layer.values = akv_tensor_contiguous(values, AKV_F32, tokens, (uint32_t)dv);
        layer.queries = akv_tensor_contiguous(queries, AKV_F32, W, (uint32_t)dk);
        layer.shape.num_queries = (uint32_t)W;
        akv_config config = host->rolling.options.config;
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

akv_status akvl_roll(akv_llama *host, akv_diag *diag)
{
    if (!host->rolling.on)
        return AKV_OK;
    akv_segment **made = NULL;
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
        uint32_t take = 0;
        uint64_t tokens = 0;
        if (!is_hosted(host, i))
            continue;
        const uint32_t first = waiting(host, i, &take, &tokens);
        if (take == 0 || tokens < host->rolling.options.segment_tokens)
            break; /* the layers are alike */
        if (!made && !(made = akvl_new(host->num_layers, sizeof(akv_segment *))))
            return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", host->num_layers);
        status = compress_segments(host, i, first, take, tokens, &made[i], diag);
    }
    for (uint32_t i = 0; made && i < host->num_layers; i++) {
        uint32_t take;
        uint64_t tokens;
        if (status != AKV_OK) {
            akv_segment_release(made[i]);
            continue;
        }
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
    host->rolls += made && status == AKV_OK;
    free(made);
    return status == AKV_OK ? keep_budget(host, diag) : status;
}

/* -------------------------------------------------------------------------------------------------------- truncate */

akv_status akv_llama_truncate(akv_llama *host, int32_t position, akv_diag *diag)
{
    if (!host || !host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    if (position < 1 || position > host->tail_position)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "position is %d; 1 to %d is possible", position,
                         host->tail_position);
    if (host->store->parts.native_state_bytes)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "the window or recurrent layers of this model cannot go back");
    if (position >= host->tail_first) { /* cells behind those that stay may hold the tokens of a decode that failed */
        if (!llama_memory_seq_rm(llama_get_memory(host->tail), 0, position, -1))
            return akvl_fail(diag, AKV_E_UNSUPPORTED, "libllama cannot forget the last tokens in this model");
        host->tail_used = (uint32_t)(position - host->tail_first);
    } else {
        akv_segment **cut = akvl_new(host->num_layers, sizeof *cut);
        uint32_t *keep = akvl_new(host->num_layers, sizeof *keep);
        akv_status status =
            cut && keep ? AKV_OK
                        : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", host->num_layers);
        for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
            if (!is_hosted(host, i))
                continue;
            while (keep[i] < host->running.counts[i] &&
                   info_of(host->running.lists[i][keep[i]]).last_position < position)
                keep[i]++;
            if (keep[i] == host->running.counts[i])
                continue;
            const akv_segment_info info = info_of(host->running.lists[i][keep[i]]);
            akv_diag inner = {.status = AKV_OK};
            if (info.first_position < position)
                status = akv_segment_cut(host->running.lists[i][keep[i]],
                                         (uint64_t)((int64_t)position - info.first_position), NULL, &cut[i], &inner);
            if (status != AKV_OK)
                akvl_fail(diag, status, "layer %u: %.480s", i, inner.message);
        }
        for (uint32_t i = 0; i < host->num_layers; i++) {
            if (status != AKV_OK) {
                if (cut)
                    akv_segment_release(cut[i]);
                continue;
            }
            if (!is_hosted(host, i))
                continue;
            while (host->running.counts[i] > keep[i])
                akv_segment_release(host->running.lists[i][--host->running.counts[i]]);
            if (cut[i])
                host->running.lists[i][host->running.counts[i]++] = cut[i];
        }
        free(cut);
        free(keep);
        if (status == AKV_OK)
            status = akvl_reset_tail(host, NULL, 0, position, diag);
        if (status != AKV_OK)
            return status;
    }
    host->tail_position = position;
    host->logits_rows = 0;
    akvl_rolling_forget(host);
    return AKV_OK;
}

/* -------------------------------------------------------------------------------------------------------- snapshot */

akv_status akv_llama_snapshot(akv_llama *host, akv_llama_store **out, akv_diag *diag)
{
    if (!host || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and out must not be NULL");
    if (!host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    akv_llama_store_parts parts = host->store->parts;
    uint32_t num_segments = 0;
    for (uint32_t i = 0; i < host->num_layers; i++)
        num_segments += is_hosted(host, i) ? host->running.counts[i] + (host->tail_used > 0) : 0;
    akv_llama_layer *layers = akvl_new(host->num_layers, sizeof *layers);
    akv_segment **segments = akvl_new(num_segments, sizeof *segments);
    void *state = NULL;
    size_t bytes = 0;
    uint32_t n = 0;
    akv_status status =
        layers && segments ? AKV_OK : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %u segments", num_segments);
    if (status == AKV_OK && parts.native_state_bytes)
        status = akvl_save_native(host->tail, &state, &bytes, diag);
    for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
        layers[i] = parts.layers[i];
        if (!is_hosted(host, i))
            continue;
        layers[i].first_segment = n;
        for (uint32_t s = 0; s < host->running.counts[i]; s++)
            segments[n++] = akv_segment_retain(host->running.lists[i][s]);
        if (host->tail_used > 0)
            status = akvl_tail_segment(host, i, &segments[n], diag);
        n += status == AKV_OK && host->tail_used > 0;
        layers[i].num_segments = n - layers[i].first_segment;
    }
    parts.layers = layers;
    parts.segments = segments;
    parts.num_segments = n;
    parts.tokens = host->history;
    parts.num_tokens = (uint64_t)host->tail_position;
    parts.next_position = host->tail_position;
    parts.native_state = state;
    parts.native_state_bytes = bytes;
    if (status == AKV_OK)
        status = akv_llama_store_create(&parts, out, diag);
    for (uint32_t i = 0; segments && i < n; i++)
        akv_segment_release(segments[i]);
    free(segments);
    free(layers);
    free(state);
    return status;
}
