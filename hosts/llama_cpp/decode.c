/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - context B: attention over compressed segments and B's own cells in one softmax, the conversation's growth,
 * and the way back to "just after the document". Also decodes densely in context A.
 */
#include "host.h"

#include <string.h>

/* -------------------------------------------------------------------------------------------- running segments */

static void running_clear(akv_llama *host)
{
    akvl_running *r = &host->running;
    for (uint32_t i = 0; r->lists && r->counts && i < host->num_layers; i++)
        while (r->counts[i] > 0)
            akv_segment_release(r->lists[i][--r->counts[i]]);
}

void akvl_running_free(akv_llama *host)
{
    akvl_running *r = &host->running;
    running_clear(host);
    for (uint32_t i = 0; r->lists && i < host->num_layers; i++)
        free(r->lists[i]);
    free(r->lists);
    free(r->counts);
    free(r->capacities);
    memset(r, 0, sizeof *r);
}

/* The store's segments and nothing else. */
static void running_rewind(akv_llama *host)
{
    akvl_running *r = &host->running;
    const akv_llama_store_parts *parts = &host->store->parts;
    running_clear(host);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (r->lists[i] ? parts->layers[i].num_segments : 0); s++)
            r->lists[i][r->counts[i]++] = akv_segment_retain(parts->segments[parts->layers[i].first_segment + s]);
}

akv_status akvl_running_create(akv_llama *host, akv_diag *diag)
{
    akvl_running *r = &host->running;
    const akv_llama_store_parts *parts = &host->store->parts;
    r->lists = akvl_new(host->num_layers, sizeof *r->lists);
    r->counts = akvl_new(host->num_layers, sizeof *r->counts);
    r->capacities = akvl_new(host->num_layers, sizeof *r->capacities);
    bool ok = r->lists && r->counts && r->capacities;
    for (uint32_t i = 0; ok && i < host->num_layers; i++) {
        const akv_llama_layer *layer = &parts->layers[i];
        if (layer->kind != AKV_LLAMA_LAYER_HOSTED)
            continue;
        r->capacities[i] = layer->num_segments + 8;
        r->lists[i] = akvl_new(r->capacities[i], sizeof *r->lists[i]);
        ok = r->lists[i] != NULL;
    }
    if (!ok)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the segment lists of %u layers", host->num_layers);
    running_rewind(host);
    return AKV_OK;
}

akv_status akvl_running_reserve(akv_llama *host, uint32_t i, akv_diag *diag)
{
    akvl_running *r = &host->running;
    if (r->counts[i] < r->capacities[i])
        return AKV_OK;
    const uint32_t capacity = r->capacities[i] * 2;
    akv_segment **grown = realloc(r->lists[i], capacity * sizeof *grown);
    if (!grown)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %u segments of layer %u", capacity, i);
    r->lists[i] = grown;
    r->capacities[i] = capacity;
    return AKV_OK;
}

/* The token ids behind the document's. */
static akv_status remember(akv_llama *host, const int32_t *tokens, size_t n, akv_diag *diag)
{
    const size_t needed = (size_t)host->tail_position + n;
    if (needed > host->history_capacity) {
        int32_t *grown = realloc(host->history, (needed + needed / 2 + 64) * sizeof *grown);
        if (!grown)
            return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu tokens", needed);
        host->history = grown;
        host->history_capacity = needed + needed / 2 + 64;
    }
    memcpy(host->history + host->tail_position, tokens, n * sizeof *tokens);
    return AKV_OK;
}

/* --------------------------------------------------------------------------------------------------- attention */

void akvl_fill_params(const akv_llama *host, uint32_t number, uint32_t num_queries, uint64_t tail_tokens,
                      akv_attend_params *out)
{
    const akvl_layer *layer = &host->tail_graph->layers[number];
    akv_attend_params_init(out);
    out->num_kv_heads = layer->num_kv_heads;
    out->gqa_group = layer->gqa_group;
    out->head_dim_k = layer->head_dim_k;
    out->head_dim_v = layer->head_dim_v;
    out->num_queries = num_queries;
    out->segments = (const akv_segment *const *)host->running.lists[number];
    out->num_segments = host->running.counts[number];
    out->tail_tokens = tail_tokens;
    out->sm_scale = layer->sm_scale;
    out->logit_softcap = layer->logit_softcap;
    out->executor = akvl_gang_executor(host->gang);
}

void akvl_replace(akvl_hook *hook, int number, struct ggml_tensor *node)
{
    akv_llama *host = hook->host;
    const akvl_layer *layer = &host->tail_graph->layers[number];
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3],
                             *sinks = node->src[4];
    const uint64_t queries = (uint64_t)q->ne[1];
    /* cells are filled in order, so those behind the newest token are padding */
    const uint64_t visible = host->tail_used + queries;
    const int64_t half = (int64_t)sizeof(uint16_t), full = (int64_t)sizeof(float);
    if ((uint64_t)k->ne[1] < visible || (uint64_t)mask->ne[0] < visible || (uint64_t)mask->ne[1] < queries ||
        k->type != GGML_TYPE_F16 || v->type != GGML_TYPE_F16 || k->view_src != layer->k_root ||
        v->view_src != layer->v_root) {
        akvl_fail(&hook->failure, AKV_E_UNSUPPORTED, "layer %d: libllama placed %llu cells where %llu were expected",
                  number, (unsigned long long)k->ne[1], (unsigned long long)visible);
        return;
    }
    akv_attend_params p;
    akvl_fill_params(host, (uint32_t)number, (uint32_t)queries, visible, &p);
    p.queries = (akv_tensor){q->data, AKV_F32, (int64_t)q->nb[2] / full, (int64_t)q->nb[1] / full, 1};
    p.tail_keys = (akv_tensor){k->data, AKV_F16, (int64_t)k->nb[2] / half, (int64_t)k->nb[1] / half, 1};
    p.tail_values = (akv_tensor){v->data, AKV_F16, (int64_t)v->nb[2] / half, (int64_t)v->nb[1] / half, 1};
    p.tail_mask = (akv_tensor){mask->data, AKV_F16, 0, (int64_t)mask->nb[1] / half, 1};
    p.sinks = sinks ? sinks->data : NULL;
    p.out = node->data; /* f32 [d_v, H*G, T], contiguous */
    p.out_stride_head = node->ne[0];
    p.out_stride_token = node->ne[0] * node->ne[1];
    akv_diag inner = {.status = AKV_OK};
    const double start = akvl_seconds();
    akv_status status = akv_attend(&p, host->workspace, host->workspace_bytes, &inner);
    host->stats.attend_seconds += akvl_seconds() - start;
    if (status == AKV_OK && host->comparison)
        status = akvl_compare_layer(host, (uint32_t)number, &p, &inner);
    if (status != AKV_OK)
        akvl_fail(&hook->failure, status, "layer %d: %.480s", number, inner.message);
    else
        akvl_rolling_observe(host, (uint32_t)number, q);
}

/* Outside the callback, so that the callback never allocates. */
static akv_status reserve_workspace(akv_llama *host, uint32_t num_queries, akv_diag *diag)
{
    size_t needed = 0;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (host->store->parts.layers[i].kind != AKV_LLAMA_LAYER_HOSTED)
            continue;
        akv_attend_params p;
        size_t bytes = 0;
        akvl_fill_params(host, i, num_queries, host->tail_used + num_queries, &p);
        const akv_status status = akv_attend_workspace_bytes(&p, &bytes, diag);
        if (status != AKV_OK)
            return status;
        needed = bytes > needed ? bytes : needed;
    }
    if (needed <= host->workspace_bytes && host->workspace)
        return AKV_OK;
    const size_t rounded = (needed + needed / 4 + 64u) / 64u * 64u;
    void *workspace = aligned_alloc(64, rounded);
    if (!workspace)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for an attention workspace of %zu bytes", rounded);
    free(host->workspace);
    host->workspace = workspace;
    host->workspace_bytes = rounded;
    return AKV_OK;
}

/* ----------------------------------------------------------------------------------------------- attach, rewind */

void akvl_drop_tail(akv_llama *host)
{
    if (host->current && akvl_set_aside(host, NULL) != AKV_OK) {
        host->current->lost = true;
        host->current->host = NULL;
        host->current = NULL;
    }
    if (host->spare_tail)
        llama_free(host->spare_tail);
    host->spare_tail = NULL;
    akvl_graph_free(host->spare_graph);
    host->spare_graph = NULL;
    if (host->tail)
        llama_free(host->tail);
    host->tail = NULL;
    if (host->store)
        akvl_running_free(host);
    akvl_rolling_free(host);
    free(host->history);
    host->history = NULL;
    host->history_capacity = 0;
    akv_llama_store_release(host->store);
    host->store = NULL;
    akvl_graph_free(host->tail_graph);
    host->tail_graph = NULL;
    host->logits_rows = 0;
}

akv_status akvl_reset_tail(akv_llama *host, const void *native_state, size_t native_bytes, int32_t position, akv_diag *diag)
{
    llama_memory_clear(llama_get_memory(host->tail), false);
    host->tail_used = 0;
    host->tail_first = host->tail_position = position;
    return native_bytes ? akvl_load_native(host->tail, native_state, native_bytes, diag) : AKV_OK;
}

akv_status akvl_rewind_tail(akv_llama *host, akv_diag *diag)
{
    const akv_llama_store_parts *parts = &host->store->parts;
    running_rewind(host);
    akvl_rolling_forget(host);
    akv_status status = akvl_reset_tail(host, parts->native_state, (size_t)parts->native_state_bytes, 0, diag);
    if (status == AKV_OK)
        status = remember(host, parts->tokens, (size_t)parts->num_tokens, diag);
    host->tail_first = host->tail_position = parts->next_position;
    return status;
}

akv_status akvl_check_store(const akvl_graph *graph, const akv_llama_store_parts *parts, akv_diag *diag)
{
    akv_status status = AKV_OK;
    for (uint32_t i = 0; status == AKV_OK && i < parts->num_layers; i++) {
        const akv_llama_layer *layer = &parts->layers[i];
        const akvl_layer *mine = &graph->layers[i];
        if (mine->seen != (layer->kind != AKV_LLAMA_LAYER_NO_CACHE)) {
            status = akvl_fail(diag, AKV_E_MISMATCH,
                               "layer %u %s a cache in this model, other than in the compressed document", i,
                               mine->seen ? "has" : "has not");
        } else if (layer->kind == AKV_LLAMA_LAYER_HOSTED) {
            akv_llama_layer signature;
            akvl_layer_signature(mine, &signature);
            status = akvl_signature_compare(layer, &signature, i, diag);
        }
    }
    return status;
}

/* B's own graph must attend exactly as the store's layers were learnt. */
static akv_status learn_tail(akv_llama *host, akv_diag *diag)
{
    const akv_llama_store_parts *parts = &host->store->parts;
    akvl_hook *hook = &host->tail_hook;
    akv_status status = akvl_graph_create(host->num_layers, &host->tail_graph, diag);
    if (status != AKV_OK)
        return status;
    hook->mode = AKVL_LEARN;
    hook->graph = host->tail_graph;
    hook->stage = AKV_LLAMA_STAGE_DECODE;
    status = akvl_run(host, host->tail, hook, parts->tokens, parts->num_tokens < 2 ? 1 : 2, 0, true, false, diag);
    hook->mode = AKVL_REPLACE;
    if (status == AKV_OK)
        status = akvl_graph_check(host->tail_graph, 0, diag);
    return status == AKV_OK ? akvl_check_store(host->tail_graph, parts, diag) : status;
}

akv_status akv_llama_attach(akv_llama *host, akv_llama_store *store, akv_diag *diag)
{
    if (!host || !store)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and store must not be NULL");
    akv_status status = akv_llama_check_fingerprint(host, &store->parts.fingerprint, diag);
    if (status != AKV_OK)
        return status;
    akv_llama_store_retain(store); /* before the old one goes: it may be the same */
    akvl_drop_tail(host);
    memset(&host->tail_hook, 0, sizeof host->tail_hook);
    host->store = store;
    host->tail_limit = host->options.tail_cells;
    host->tail = akvl_make_context(host, akvl_tail_cells(host), GGML_TYPE_F16, &host->tail_hook);
    if (!host->tail)
        status = akvl_fail(diag, AKV_E_NO_MEMORY, "libllama cannot make a context of %u cells: %s",
                           akvl_tail_cells(host), akvl_first_error());
    if (status == AKV_OK)
        status = akvl_running_create(host, diag);
    if (status == AKV_OK)
        status = learn_tail(host, diag);
    if (status == AKV_OK)
        status = akvl_rewind_tail(host, diag);
    if (status == AKV_OK)
        status = reserve_workspace(
            host, host->options.batch_tokens < host->tail_limit ? host->options.batch_tokens : host->tail_limit, diag);
    if (status != AKV_OK) {
        akvl_drop_tail(host);
        return status;
    }
    host->stats.decode_tokens = host->stats.tail_moves = 0;
    host->rolls = host->retargets = 0;
    host->stats.decode_seconds = host->stats.attend_seconds = 0.0;
    akvl_note_store(host, store);
    return AKV_OK;
}

akv_status akv_llama_detach(akv_llama *host, akv_diag *diag)
{
    if (!host)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host must not be NULL");
    akvl_drop_tail(host);
    return AKV_OK;
}

static akv_status rewind_dense(akv_llama *host, akv_diag *diag)
{
    akv_status status = AKV_OK;
    if (host->dense_state) /* first: recurrent state cannot be cut off, only replaced */
        status = akvl_load_native(host->dense, host->dense_state, host->dense_state_bytes, diag);
    if (status == AKV_OK && !llama_memory_seq_rm(llama_get_memory(host->dense), 0, (llama_pos)host->num_tokens, -1))
        status =
            akvl_fail(diag, AKV_E_UNSUPPORTED, "libllama cannot forget the tokens after the document in this model");
    if (status == AKV_OK)
        host->dense_position = host->num_tokens;
    return status;
}

akv_status akv_llama_rewind(akv_llama *host, akv_diag *diag)
{
    if (!host || (!host->tail && !host->dense))
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         "there is no document; run akv_llama_prefill or akv_llama_attach first");
    host->logits_rows = 0;
    return host->tail ? akvl_rewind_tail(host, diag) : rewind_dense(host, diag);
}

int32_t akv_llama_next_position(const akv_llama *host)
{
    if (!host || (!host->tail && !host->dense))
        return -1;
    return host->tail ? host->tail_position : (int32_t)host->dense_position;
}

/* ------------------------------------------------------------------------------------------------------- decode */

akv_status akvl_tail_segment(akv_llama *host, uint32_t i, akv_segment **out, akv_diag *diag)
{
    akv_layer layer;
    akvl_describe_layer(&host->tail_graph->layers[i], (int32_t)i, host->tail_used, host->tail_first, &layer);
    layer.shape.num_queries = 1; /* not read for a dense segment */
    akv_config config;
    akv_config_init(&config);
    config.executor = host->options.executor;
    akv_diag inner = {.status = AKV_OK};
    const akv_status status = akv_segment_create_dense(&layer, &config, out, &inner);
    return status == AKV_OK ? AKV_OK : akvl_fail(diag, status, "layer %u: %.480s", i, inner.message);
}

/* B's cells -> one dense segment per hosted layer; B is empty afterwards and goes on at the same position. */
static akv_status move_tail(akv_llama *host, akv_diag *diag)
{
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (host->store->parts.layers[i].kind != AKV_LLAMA_LAYER_HOSTED)
            continue;
        akv_segment *segment;
        akv_status status = akvl_running_reserve(host, i, diag);
        if (status == AKV_OK)
            status = akvl_tail_segment(host, i, &segment, diag);
        if (status != AKV_OK)
            return status;
        host->running.lists[i][host->running.counts[i]++] = segment;
    }
    void *state = NULL;
    size_t bytes = 0;
    akv_status status = AKV_OK;
    if (host->store->parts.native_state_bytes)
        status = akvl_save_native(host->tail, &state, &bytes, diag);
    if (status == AKV_OK)
        status = akvl_reset_tail(host, state, bytes, host->tail_position, diag);
    free(state);
    host->stats.tail_moves++;
    return status == AKV_OK ? akvl_roll(host, diag) : status;
}

/* *n may shrink to what fits; logits of the last token are computed when it ends the call (left == *n). */
static akv_status decode_step(akv_llama *host, const int32_t *tokens, size_t *n, size_t left, bool want_all,
                              akv_diag *diag)
{
    if (!host->tail) {
        const akv_status status = akvl_run(host, host->dense, &host->dense_hook, tokens, *n,
                                           (int32_t)host->dense_position, *n == left, want_all, diag);
        if (status == AKV_OK)
            host->dense_position += *n;
        return status;
    }
    akv_status status = host->tail_used == host->tail_limit ? move_tail(host, diag) : AKV_OK;
    if (*n > host->tail_limit - host->tail_used)
        *n = host->tail_limit - host->tail_used;
    if (status == AKV_OK)
        status = reserve_workspace(host, (uint32_t)*n, diag);
    if (status == AKV_OK)
        status =
            akvl_run(host, host->tail, &host->tail_hook, tokens, *n, host->tail_position, *n == left, want_all, diag);
    if (status == AKV_OK)
        status = remember(host, tokens, *n, diag);
    if (status == AKV_OK) {
        host->tail_used += (uint32_t)*n;
        host->tail_position += (int32_t)*n;
    }
    return status;
}

static akv_status check_decode(const akv_llama *host, const int32_t *tokens, size_t num_tokens, akv_diag *diag)
{
    if (!host || !tokens || num_tokens == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "host and tokens must not be NULL, and at least one token be given");
    if (!host->tail && !host->dense)
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         "there is no document; run akv_llama_prefill or akv_llama_attach first");
    for (size_t i = 0; i < num_tokens; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= host->info.vocab_tokens)
            return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "token %zu is %d; this model has tokens 0 to %u", i,
                             tokens[i], host->info.vocab_tokens - 1);
    const uint64_t position = host->tail ? (uint64_t)host->tail_position : host->dense_position;
    if (num_tokens > host->info.train_context || position > host->info.train_context - num_tokens)
        return akvl_fail(diag, AKV_E_NO_SPACE, "%zu more tokens after %llu exceed this model's context of %u",
                         num_tokens, (unsigned long long)position, host->info.train_context);
    if (!host->tail && (num_tokens > host->dense_cells || position > host->dense_cells - num_tokens))
        return akvl_fail(diag, AKV_E_NO_SPACE,
                         "%zu more tokens after %llu exceed the %llu cells of the dense cache; prefill with more"
                         " reserve_cells",
                         num_tokens, (unsigned long long)position, (unsigned long long)host->dense_cells);
    return AKV_OK;
}

akv_status akv_llama_decode(akv_llama *host, const int32_t *tokens, size_t num_tokens, akv_llama_logits_mode mode,
                            akv_diag *diag)
{
    akv_status status = check_decode(host, tokens, num_tokens, diag);
    if (status != AKV_OK)
        return status;
    akvl_hook *hook = host->tail ? &host->tail_hook : &host->dense_hook;
    hook->stage = AKV_LLAMA_STAGE_DECODE;
    hook->total = num_tokens;
    host->logits_rows = 0;
    const bool all = mode == AKV_LLAMA_LOGITS_ALL;
    const double start = akvl_seconds();
    for (size_t done = 0; status == AKV_OK && done < num_tokens;) {
        const size_t batch = host->options.batch_tokens, left = num_tokens - done;
        size_t n = left < batch ? left : batch;
        hook->done = done;
        status = decode_step(host, tokens + done, &n, left, all, diag);
        if (status == AKV_OK && (all || done + n == num_tokens))
            status = akvl_keep_logits(host, host->tail ? host->tail : host->dense, all ? n : 1, all ? done : 0, diag);
        done += n;
    }
    if (status != AKV_OK)
        host->logits_rows = 0;
    else
        host->stats.decode_tokens += num_tokens;
    host->stats.decode_seconds += akvl_seconds() - start;
    return status;
}
