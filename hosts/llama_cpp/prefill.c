/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill.c - context A: read the document densely, take the last queries and some sampled on the way, go on reading, free
 * it. compress.c takes the cache from there.
 */
#include "host.h"

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

static akv_status make_dense(akv_llama *host, enum ggml_type type, akv_diag *diag)
{
    host->dense = akvl_make_context(host, (uint32_t)host->dense_cells, type, &host->dense_hook);
    if (!host->dense)
        return akvl_fail(diag, type == GGML_TYPE_F16 ? AKV_E_NO_MEMORY : AKV_E_UNSUPPORTED,
                         "libllama cannot make a context of %llu cells with a %s cache: %s",
                         (unsigned long long)host->dense_cells, ggml_type_name(type), akvl_first_error());
    host->dense_cells = llama_n_ctx(host->dense);
    host->stats.context_a_cells = host->dense_cells;
    return AKV_OK;
}

/* Tokens [from, num_tokens) into context A; the last batch's logits are kept. */
static akv_status read_tokens(akv_llama *host, uint64_t from, akv_diag *diag)
{
    akvl_hook *hook = &host->dense_hook;
    akv_status status = AKV_OK;
    hook->stage = AKV_LLAMA_STAGE_PREFILL;
    hook->total = host->num_tokens;
    for (uint64_t done = from; status == AKV_OK && done < host->num_tokens;) {
        const size_t n = next_batch(host, host->num_tokens - done);
        const bool last = done + n == host->num_tokens;
        hook->mode = batch_mode(host, done, n);
        if (hook->taken)
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
    return status == AKV_OK ? akvl_keep_logits(host, host->dense, 1, 0, diag) : status;
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
    if (status == AKV_OK)
        status = make_dense(host, GGML_TYPE_F16, diag);

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

    if (status == AKV_OK)
        status = read_tokens(host, 0, diag);
    if (status == AKV_OK && hook->masked) {
        akvl_fail(&host->not_hostable, AKV_E_UNSUPPORTED,
                  "a layer hides part of the document from the last token although its cache"
                  " holds all of it; such attention cannot be compressed");
        if (must_host)
            status = akvl_fail(diag, AKV_E_UNSUPPORTED, "%s", host->not_hostable.message);
    }
    if (status == AKV_OK && has_native(host))
        status = akvl_save_native(host->dense, &host->dense_state, &host->dense_state_bytes, diag);
    return status;
}

/* The same in stock llama.cpp's own quantised cache: nothing is looked at, because nothing will be replaced. */
static akv_status run_native(akv_llama *host, enum ggml_type type, akv_diag *diag)
{
    akvl_fail(&host->not_hostable, AKV_E_UNSUPPORTED, "the cache is %s; only an f16 cache can be compressed",
              ggml_type_name(type));
    akv_status status = make_dense(host, type, diag);
    if (status == AKV_OK)
        status = read_tokens(host, 0, diag);
    if (status == AKV_OK && has_native(host))
        status = akvl_save_native(host->dense, &host->dense_state, &host->dense_state_bytes, diag);
    return status;
}

static enum ggml_type cache_type(akv_llama_cache_type type)
{
    static const enum ggml_type types[] = {GGML_TYPE_F16,  GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,  GGML_TYPE_Q5_0,
                                           GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};
    return (unsigned)type < sizeof types / sizeof types[0] ? types[type] : GGML_TYPE_COUNT;
}

uint64_t akv_llama_cache_bytes(akv_llama_cache_type type, uint64_t f16_bytes)
{
    const enum ggml_type t = cache_type(type);
    return t == GGML_TYPE_COUNT ? 0 : f16_bytes / 2 / (uint64_t)ggml_blck_size(t) * ggml_type_size(t);
}

static akv_status prefill(akv_llama *host, enum ggml_type type, const int32_t *tokens, size_t num_tokens,
                          size_t reserve_cells, akv_diag *diag)
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
    host->num_tokens = host->base_tokens = num_tokens;
    host->dense_cells = akvl_dense_cells(host, num_tokens + reserve_cells);
    host->dense_position = num_tokens;
    status = akvl_graph_create(host->num_layers, &host->dense_graph, diag);
    const double start = akvl_seconds();
    if (status == AKV_OK)
        status = type == GGML_TYPE_F16 ? run_prefill(host, reserve_cells == 0, diag) : run_native(host, type, diag);
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

akv_status akv_llama_prefill(akv_llama *host, const int32_t *tokens, size_t num_tokens, size_t reserve_cells,
                             akv_diag *diag)
{
    return prefill(host, GGML_TYPE_F16, tokens, num_tokens, reserve_cells, diag);
}

akv_status akv_llama_prefill_cache(akv_llama *host, akv_llama_cache_type type, const int32_t *tokens, size_t num_tokens,
                                   size_t reserve_cells, akv_diag *diag)
{
    if (cache_type(type) == GGML_TYPE_COUNT)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "cache type %d is unknown; 0 to 6 exist", (int)type);
    return prefill(host, cache_type(type), tokens, num_tokens, reserve_cells, diag);
}

akv_status akv_llama_extend(akv_llama *host, const int32_t *tokens, size_t num_tokens, akv_diag *diag)
{
    if (!host || !tokens || num_tokens == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "host and tokens must not be NULL, and at least one token be given");
    if (!host->dense || host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         host->tail ? "a compressed document is attached; run akv_llama_detach first"
                                    : "there is no dense cache; run akv_llama_prefill first");
    const uint64_t window = host->options.observation_queries, total = host->base_tokens + num_tokens;
    if (has_native(host))
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "the window or recurrent layers of this model cannot go back a few tokens;"
                         " prefill the longer document instead");
    if (host->base_tokens <= window)
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "a document of %llu tokens is no longer than the window of %llu; prefill the"
                         " longer document instead",
                         (unsigned long long)host->base_tokens, (unsigned long long)window);
    if (num_tokens > host->dense_cells || total > host->dense_cells)
        return akvl_fail(diag, AKV_E_NO_SPACE,
                         "%zu more tokens after %llu exceed the %llu cells of the dense cache; prefill"
                         " with more reserve_cells",
                         num_tokens, (unsigned long long)host->base_tokens, (unsigned long long)host->dense_cells);
    akv_status status = check_tokens(host, tokens, num_tokens, diag);
    if (status != AKV_OK)
        return status;
    int32_t *grown = realloc(host->tokens, (size_t)total * sizeof *grown);
    if (!grown)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %llu tokens", (unsigned long long)total);
    host->tokens = grown;
    memcpy(grown + host->base_tokens, tokens, num_tokens * sizeof *tokens);
    /* the last batch must hold the window's queries: some of the document's own tokens are read once more */
    const uint64_t from = total - window < host->base_tokens ? total - window : host->base_tokens;
    const double start = akvl_seconds();
    host->dense_hook.visible = host->num_tokens = host->dense_position = total;
    host->logits_rows = 0;
    if (!llama_memory_seq_rm(llama_get_memory(host->dense), 0, (llama_pos)from, -1))
        status =
            akvl_fail(diag, AKV_E_UNSUPPORTED, "libllama cannot forget the last tokens of the document in this model");
    if (status == AKV_OK)
        status = read_tokens(host, from, diag);
    if (status != AKV_OK) {
        akvl_drop_dense(host);
        return status;
    }
    host->stats.prefill_tokens += total - from;
    host->stats.prefill_seconds += akvl_seconds() - start;
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
