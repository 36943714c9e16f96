/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill.c - context A: read the document densely, take the last queries and some sampled on the way, compress the
 * cache where it lies, free it.
 */
#include "host.h"

#include <anchorkv/akv_experimental.h>

#include <string.h>

void akvl_drop_dense(akv_llama *host)
{
    if (host->dense)
        llama_free(host->dense);
    host->dense = NULL;
    akvl_hook *hook = &host->dense_hook;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (hook->queries)
            free(hook->queries[i]);
        if (hook->sampled)
            free(hook->sampled[i]);
    }
    free(hook->queries);
    free(hook->sampled);
    free(hook->sampled_positions);
    free(hook->taken);
    memset(hook, 0, sizeof *hook);
    akvl_graph_free(host->dense_graph);
    host->dense_graph = NULL;
    free(host->tokens);
    host->tokens = NULL;
    host->num_tokens = 0;
    free(host->dense_state);
    host->dense_state = NULL;
    host->not_hostable.status = AKV_OK;
    if (!host->tail)
        host->logits_rows = 0;
}

/* ----------------------------------------------------------------------------------------- queries for the codec */

/* Half-precision zero of either sign. */
static bool is_visible(uint16_t half)
{
    return (half & 0x7fffu) == 0;
}

/* Row `from` of the query node, all heads -> row `to` of out [heads, rows, dim]. */
static void take_row(const struct ggml_tensor *q, size_t from, float *out, size_t rows, size_t to)
{
    const size_t heads = (size_t)q->ne[2], dim = (size_t)q->ne[0];
    for (size_t h = 0; h < heads; h++)
        memcpy(out + (h * rows + to) * dim, (const char *)q->data + from * q->nb[1] + h * q->nb[2], dim * sizeof(float));
}

static void take_last(akvl_hook *hook, int number, const struct ggml_tensor *q, const struct ggml_tensor *mask)
{
    const size_t rows = hook->num_queries;
    if ((size_t)q->ne[1] < rows || (uint64_t)mask->ne[0] < hook->visible) {
        akvl_fail(&hook->failure, AKV_E_UNSUPPORTED,
                  "layer %d ran %lld queries in the last batch; at least %zu are needed", number, (long long)q->ne[1],
                  rows);
        return;
    }
    /* cells must hold positions in order and all be visible: otherwise the layer attends to less than it seems to */
    const uint16_t *last = (const uint16_t *)((const char *)mask->data + (size_t)(q->ne[1] - 1) * mask->nb[1]);
    for (int64_t i = 0; i < mask->ne[0]; i++)
        if (is_visible(last[i]) != ((uint64_t)i < hook->visible))
            hook->masked = true;
    float *out = hook->queries[number];
    for (size_t t = 0; out && t < rows; t++) /* a document no longer than the window needs no queries */
        take_row(q, (size_t)q->ne[1] - rows + t, out, rows, t);
}

void akvl_capture(akvl_hook *hook, int number, const struct ggml_tensor *node)
{
    const struct ggml_tensor *q = node->src[0];
    const akvl_layer *layer = &hook->graph->layers[number];
    hook->taken[number] = true;
    if (q->ne[2] != (int64_t)layer->num_kv_heads * layer->gqa_group || q->ne[0] != (int64_t)layer->head_dim_k) {
        akvl_fail(&hook->failure, AKV_E_UNSUPPORTED, "layer %d changed its query heads while it read the document", number);
        return;
    }
    if (q->ne[1] != (int64_t)hook->batch_count) { /* rows that are not the batch's tokens: the codec does without samples */
        free(hook->sampled[number]);
        hook->sampled[number] = NULL;
    }
    for (uint32_t m = 0; hook->sampled[number] && m < hook->num_sampled; m++) {
        const int64_t row = (int64_t)hook->sampled_positions[m] - hook->batch_first;
        if (row >= 0 && row < q->ne[1])
            take_row(q, (size_t)row, hook->sampled[number], hook->num_sampled, m);
    }
    if (hook->mode == AKVL_CAPTURE)
        take_last(hook, number, q, node->src[3]);
}

/* The middles of M equal stretches of the document: the same tokens whatever the batches. */
static akv_status choose_sampled(akv_llama *host, akv_diag *diag)
{
    akvl_hook *hook = &host->dense_hook;
    const uint64_t most = host->num_tokens - host->options.observation_queries;
    hook->num_sampled = most < AKVL_SAMPLED_QUERIES ? (uint32_t)most : AKVL_SAMPLED_QUERIES;
    hook->sampled_positions = akvl_new(hook->num_sampled, sizeof *hook->sampled_positions);
    if (!hook->sampled_positions)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %u positions", hook->num_sampled);
    for (uint32_t m = 0; m < hook->num_sampled; m++)
        hook->sampled_positions[m] =
            (int32_t)((2 * (uint64_t)m + 1) * host->num_tokens / (2 * (uint64_t)hook->num_sampled));
    return AKV_OK;
}

static akv_status prepare_capture(akv_llama *host, akv_diag *diag)
{
    akvl_hook *hook = &host->dense_hook;
    const uint32_t wanted = host->options.observation_queries;
    hook->num_queries = host->num_tokens < wanted ? (uint32_t)host->num_tokens : wanted;
    hook->visible = host->num_tokens;
    hook->taken = akvl_new(host->num_layers, sizeof *hook->taken);
    hook->queries = akvl_new(host->num_layers, sizeof *hook->queries);
    hook->sampled = akvl_new(host->num_layers, sizeof *hook->sampled);
    bool ok = hook->taken && hook->queries && hook->sampled;
    if (ok && host->num_tokens > wanted) {
        const akv_status status = choose_sampled(host, diag);
        if (status != AKV_OK)
            return status;
    }
    for (uint32_t i = 0; ok && i < host->num_layers && host->num_tokens > wanted; i++) {
        const akvl_layer *layer = &host->dense_graph->layers[i];
        if (!host->is_hosted[i])
            continue;
        const size_t row = (size_t)layer->num_kv_heads * layer->gqa_group * layer->head_dim_k;
        hook->queries[i] = akvl_new(row * hook->num_queries, sizeof(float));
        hook->sampled[i] = akvl_new(row * hook->num_sampled, sizeof(float));
        ok = hook->queries[i] && hook->sampled[i];
    }
    return ok ? AKV_OK : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the observation queries");
}

/* What the callback has to do during the batch [done, done + n). Without a sampled token in it libllama runs on its own. */
static akvl_mode batch_mode(const akv_llama *host, uint64_t done, size_t n)
{
    const akvl_hook *hook = &host->dense_hook;
    if (host->not_hostable.status != AKV_OK)
        return AKVL_IDLE;
    if (done + n == host->num_tokens)
        return AKVL_CAPTURE;
    for (uint32_t m = 0; m < hook->num_sampled; m++)
        if ((uint64_t)hook->sampled_positions[m] >= done && (uint64_t)hook->sampled_positions[m] < done + n)
            return AKVL_SAMPLE;
    return AKVL_IDLE;
}

/* ------------------------------------------------------------------------------------------------------- prefill */

static akv_status check_tokens(const akv_llama *host, const int32_t *tokens, size_t n, akv_diag *diag)
{
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= host->info.vocab_tokens)
            return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "token %zu is %d; this model has tokens 0 to %u", i,
                             tokens[i], host->info.vocab_tokens - 1);
    return AKV_OK;
}

static bool has_native(const akv_llama *host)
{
    /* a model without window or recurrent layers would answer "partial" with its whole cache */
    return host->info.sliding_window != 0 || llama_model_is_hybrid(host->model);
}

/* Layers of the dense context that can be hosted: seen, and with as many rows as the context has cells. */
static void mark_hosted(akv_llama *host)
{
    for (uint32_t i = 0; i < host->num_layers; i++) {
        const akvl_layer *layer = &host->dense_graph->layers[i];
        host->is_hosted[i] = layer->seen && layer->cells >= (int64_t)host->dense_cells;
    }
}

/* Everything that can be known before the long run. Refusals go to host->not_hostable when decoding densely remains
 * possible. */
static akv_status examine(akv_llama *host, const akvl_graph *probe, bool must_host, akv_diag *diag)
{
    akv_diag why = {.status = AKV_OK};
    akv_status status = akvl_graph_check(host->dense_graph, (int64_t)host->dense_cells, &why);
    if (status == AKV_OK) {
        mark_hosted(host);
        status = akvl_graph_compare(host->dense_graph, probe, host->is_hosted, &why);
    }
    if (status == AKV_OK)
        return AKV_OK;
    memset(host->is_hosted, 0, host->num_layers * sizeof *host->is_hosted);
    host->not_hostable = why;
    return must_host ? akvl_fail(diag, status, "%s", why.message) : AKV_OK;
}

/* Batches are full ones, but the last two share so that the last has at least W tokens. */
static size_t next_batch(const akv_llama *host, uint64_t left)
{
    const uint64_t full = host->options.batch_tokens, window = host->options.observation_queries;
    if (left <= full)
        return (size_t)left;
    return (size_t)(left - full < window ? left - window : full);
}

static akv_status run_prefill(akv_llama *host, bool must_host, akv_diag *diag)
{
    akvl_hook *hook = &host->dense_hook;
    akvl_graph *probe;
    akv_status status = akvl_probe(host, host->tokens, (size_t)host->num_tokens, &probe, diag);
    if (status != AKV_OK)
        return status;
    if (must_host) /* cheap refusals before the large cache is allocated */
        status = akvl_graph_check(probe, 0, diag);
    if (status == AKV_OK && !(host->dense = akvl_make_context(host, (uint32_t)host->dense_cells, hook)))
        status = akvl_fail(diag, AKV_E_NO_MEMORY, "libllama cannot make a context of %llu cells for the dense cache: %s",
                           (unsigned long long)host->dense_cells, akvl_first_error());
    if (status == AKV_OK) {
        host->dense_cells = llama_n_ctx(host->dense);
        host->stats.context_a_cells = host->dense_cells;
    }

    hook->stage = AKV_LLAMA_STAGE_PREFILL;
    hook->total = host->num_tokens;
    hook->mode = AKVL_LEARN;
    hook->graph = host->dense_graph;
    if (status == AKV_OK) { /* a first look at A's own graph, on two tokens that are forgotten again */
        status = akvl_run(host, host->dense, hook, host->tokens, host->num_tokens < 2 ? 1 : 2, 0, true, false, diag);
        llama_memory_clear(llama_get_memory(host->dense), false);
    }
    if (status == AKV_OK)
        status = examine(host, probe, must_host, diag);
    akvl_graph_free(probe);
    if (status == AKV_OK)
        status = prepare_capture(host, diag);

    for (uint64_t done = 0; status == AKV_OK && done < host->num_tokens;) {
        const size_t n = next_batch(host, host->num_tokens - done);
        const bool last = done + n == host->num_tokens;
        hook->mode = batch_mode(host, done, n);
        memset(hook->taken, 0, host->num_layers * sizeof *hook->taken);
        hook->done = done;
        status = akvl_run(host, host->dense, hook, host->tokens + done, n, (int32_t)done, last, false, diag);
        done += n;
        if (status == AKV_OK && host->options.progress &&
            host->options.progress(host->options.progress_opaque, AKV_LLAMA_STAGE_PREFILL, done, host->num_tokens) != 0)
            status = akvl_fail(diag, AKV_E_CANCELLED, "reading the document was cancelled after %llu of %llu tokens",
                               (unsigned long long)done, (unsigned long long)host->num_tokens);
    }
    hook->mode = AKVL_IDLE;
    if (status == AKV_OK && hook->masked) {
        akvl_fail(&host->not_hostable, AKV_E_UNSUPPORTED,
                  "a layer hides part of the document from the last token although its cache"
                  " holds all of it; such attention cannot be compressed");
        if (must_host)
            status = akvl_fail(diag, AKV_E_UNSUPPORTED, "%s", host->not_hostable.message);
    }
    if (status == AKV_OK && has_native(host))
        status = akvl_save_native(host->dense, &host->dense_state, &host->dense_state_bytes, diag);
    if (status == AKV_OK)
        status = akvl_keep_logits(host, host->dense, 1, 0, diag);
    return status;
}

akv_status akv_llama_prefill(akv_llama *host, const int32_t *tokens, size_t num_tokens, size_t reserve_cells,
                             akv_diag *diag)
{
    if (!host || !tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and tokens must not be NULL");
    if (num_tokens == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the document has no tokens; there is nothing to read");
    akv_status status = check_tokens(host, tokens, num_tokens, diag);
    if (status != AKV_OK)
        return status;
    const uint64_t limit = host->info.train_context;
    if (num_tokens > limit)
        return akvl_fail(diag, AKV_E_NO_SPACE, "the document has %zu tokens; this model's context is %llu", num_tokens,
                         (unsigned long long)limit);
    if (reserve_cells > limit - num_tokens)
        reserve_cells = (size_t)(limit - num_tokens);

    akvl_drop_tail(host);
    akvl_drop_dense(host);
    host->tokens = akvl_new(num_tokens, sizeof *host->tokens);
    if (!host->tokens)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu tokens", num_tokens);
    memcpy(host->tokens, tokens, num_tokens * sizeof *tokens);
    host->num_tokens = num_tokens;
    host->dense_cells = akvl_dense_cells(host, num_tokens + reserve_cells);
    host->dense_position = num_tokens;
    status = akvl_graph_create(host->num_layers, &host->dense_graph, diag);
    const double start = akvl_seconds();
    if (status == AKV_OK)
        status = run_prefill(host, reserve_cells == 0, diag);
    if (status != AKV_OK) {
        akvl_drop_dense(host);
        host->logits_rows = 0;
        return status;
    }
    akv_llama_stats *stats = &host->stats;
    stats->prefill_tokens = num_tokens;
    stats->prefill_seconds = akvl_seconds() - start;
    stats->decode_tokens = 0;
    stats->decode_seconds = stats->attend_seconds = 0.0;
    return AKV_OK;
}

akv_status akv_llama_free_dense(akv_llama *host, akv_diag *diag)
{
    if (!host)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host must not be NULL");
    if (!host->dense)
        return AKV_OK;
    host->stats.rss_before = akvl_resident_bytes();
    akvl_drop_dense(host);
    host->stats.rss_after = akvl_resident_bytes();
    return AKV_OK;
}

/* ------------------------------------------------------------------------------------------------------ compress */

/* Rows [0, tokens) of a cache root as a [head, token, dim] view; cells hold positions in order (akvl_capture checked).
 */
static akv_tensor cache_view(const struct ggml_tensor *root, uint32_t dim)
{
    return (akv_tensor){.data = root->data,
                        .dtype = AKV_F16,
                        .stride_head = dim,
                        .stride_token = (int64_t)(root->nb[1] / sizeof(uint16_t)),
                        .stride_dim = 1};
}

void akvl_describe_layer(const akvl_layer *from, int32_t number, uint64_t num_tokens, int32_t first_position,
                         akv_layer *out)
{
    akv_layer_init(out);
    out->shape.num_tokens = num_tokens;
    out->shape.num_kv_heads = from->num_kv_heads;
    out->shape.gqa_group = from->gqa_group;
    out->shape.head_dim_k = from->head_dim_k;
    out->shape.head_dim_v = from->head_dim_v;
    out->shape.rotary_dim = from->rotary_dim;
    out->layer_index = number;
    out->keys = cache_view(from->k_root, from->head_dim_k);
    out->values = cache_view(from->v_root, from->head_dim_v);
    out->first_position = first_position;
    out->rope.rotary_dim = from->rotary_dim;
    out->rope.style = from->rope_style;
    out->rope.magnitude = from->magnitude;
    out->rope.inv_freq = from->inv_freq;
    out->sm_scale = from->sm_scale;
    out->logit_softcap = from->logit_softcap;
}

static akv_status compress_layer(akv_llama *host, uint32_t number, akv_llama_method method, const akv_config *config,
                                 akv_segment **out, akv_diag *diag)
{
    akv_layer layer;
    const akvl_layer *from = &host->dense_graph->layers[number];
    akvl_describe_layer(from, (int32_t)number, host->num_tokens, 0, &layer);
    layer.shape.num_queries = host->options.observation_queries;
    if (host->dense_hook.queries[number])
        layer.queries = akv_tensor_contiguous(host->dense_hook.queries[number], AKV_F32, host->dense_hook.num_queries,
                                              from->head_dim_k);
    if (host->dense_hook.sampled[number]) {
        layer.num_sampled = host->dense_hook.num_sampled;
        layer.sampled = akv_tensor_contiguous(host->dense_hook.sampled[number], AKV_F32, layer.num_sampled, from->head_dim_k);
        layer.sampled_positions = host->dense_hook.sampled_positions;
    }
    akv_diag inner = {.status = AKV_OK};
    akv_status status;
    switch (method) {
    case AKV_LLAMA_ANCHOR:
        status = akv_compress(&layer, config, out, &inner);
        break;
    case AKV_LLAMA_SNAPKV:
        status = akv_evict_snapkv(&layer, config, out, &inner);
        break;
    case AKV_LLAMA_EXACT:
        status = akv_segment_create_dense(&layer, config, out, &inner);
        break;
    default:
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "method %d is unknown; 0 to 2 exist", (int)method);
    }
    if (status != AKV_OK)
        akvl_fail(diag, status, "layer %u: %.480s", number, inner.message);
    return status;
}

static akv_status build_store(akv_llama *host, akv_llama_method method, const akv_config *config,
                              akv_llama_layer *layers, akv_segment **segments, akv_llama_store **out, akv_diag *diag)
{
    const uint32_t num_layers = host->num_layers;
    uint32_t num_segments = 0;
    akv_status status = AKV_OK;
    for (uint32_t i = 0; i < num_layers && status == AKV_OK; i++) {
        const akvl_layer *layer = &host->dense_graph->layers[i];
        if (!host->is_hosted[i]) {
            layers[i].kind = layer->seen ? AKV_LLAMA_LAYER_WINDOW : AKV_LLAMA_LAYER_NO_CACHE;
            host->layer_stats[i].seconds = 0.0;
        } else {
            const double start = akvl_seconds();
            akvl_layer_signature(layer, &layers[i]);
            status = compress_layer(host, i, method, config, &segments[num_segments], diag);
            if (status != AKV_OK)
                break;
            layers[i].first_segment = num_segments++;
            layers[i].num_segments = 1;
            host->layer_stats[i].seconds = akvl_seconds() - start;
        }
        if (host->options.progress &&
            host->options.progress(host->options.progress_opaque, AKV_LLAMA_STAGE_COMPRESS, i + 1, num_layers) != 0)
            status = akvl_fail(diag, AKV_E_CANCELLED, "compression was cancelled after layer %u", i);
    }
    if (status == AKV_OK) {
        akv_llama_store_parts parts;
        akv_llama_store_parts_init(&parts);
        parts.fingerprint = host->info.fingerprint;
        parts.tokens = host->tokens;
        parts.num_tokens = host->num_tokens;
        parts.next_position = (int32_t)host->num_tokens;
        parts.method = (uint32_t)method;
        parts.num_layers = num_layers;
        parts.layers = layers;
        parts.num_segments = num_segments;
        parts.segments = segments;
        parts.native_state = host->dense_state;
        parts.native_state_bytes = host->dense_state ? host->dense_state_bytes : 0;
        status = akv_llama_store_create(&parts, out, diag);
    }
    for (uint32_t i = 0; i < num_segments; i++)
        akv_segment_release(segments[i]); /* the store holds its own references */
    return status;
}

akv_status akv_llama_compress(akv_llama *host, akv_llama_method method, const akv_config *config, akv_llama_store **out,
                              akv_diag *diag)
{
    if (!host || !config || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, config and out must not be NULL");
    if (!host->dense)
        return akvl_fail(diag, AKV_E_BAD_STATE, "there is no dense cache to compress; run akv_llama_prefill first");
    if (host->dense_position != host->num_tokens)
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         "the dense cache has gone on behind the document; run akv_llama_rewind first");
    if (host->not_hostable.status != AKV_OK)
        return akvl_fail(diag, host->not_hostable.status, "%s", host->not_hostable.message);
    akv_config own = *config;
    if (!own.executor)
        own.executor = host->options.executor;
    akv_llama_layer *layers = akvl_new(host->num_layers, sizeof *layers);
    akv_segment **segments = akvl_new(host->num_layers, sizeof *segments);
    const double start = akvl_seconds();
    akv_status status =
        layers && segments ? build_store(host, method, &own, layers, segments, out, diag)
                           : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", host->num_layers);
    free(layers);
    free(segments);
    if (status == AKV_OK) {
        host->stats.compress_seconds = akvl_seconds() - start;
        akvl_note_store(host, *out);
    }
    return status;
}
