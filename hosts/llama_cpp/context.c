/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c - making contexts, running batches through them, and the callback that libllama calls for every node.
 */
#include "host.h"

#include <string.h>

enum { POLL_INTERVAL_US = 50000 };

/* Called by libllama on the caller's thread while a graph runs; true stops it. */
static bool on_abort(void *user)
{
    akvl_hook *hook = user;
    const akv_llama_options *options = &hook->host->options;
    if (!hook->cancelled && options->progress) {
        const int64_t now = llama_time_us();
        if (now >= hook->next_poll_us) {
            hook->next_poll_us = now + POLL_INTERVAL_US;
            hook->cancelled = options->progress(options->progress_opaque, hook->stage, hook->done, hook->total) != 0;
        }
    }
    return hook->cancelled || hook->failure.status != AKV_OK;
}

/* Always true when asked about a computed node: false would end the current split silently. */
bool akvl_eval(struct ggml_tensor *node, bool ask, void *user)
{
    akvl_hook *hook = user;
    if (hook->mode == AKVL_IDLE)
        return !ask;
    if (hook->mode == AKVL_LEARN) {
        if (ask)
            akvl_graph_learn(hook->graph, node);
        return !ask;
    }
    const int layer = akvl_node_layer(hook->graph, node);
    if (hook->mode == AKVL_REPLACE) {
        if (ask && layer >= 0 && hook->host->store->layers[layer].kind == AKV_LLAMA_LAYER_HOSTED)
            akvl_gang_take(hook->host->gang, layer, node);
        return !ask;
    }
    const bool wanted = layer >= 0 && hook->host->is_hosted[layer] && !hook->taken[layer];
    if (ask)
        return wanted;
    if (wanted && hook->failure.status == AKV_OK)
        akvl_capture(hook, layer, node);
    return true;
}

struct llama_context *akvl_make_context(akv_llama *host, uint32_t cells, enum ggml_type type, akvl_hook *hook)
{
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = cells;
    params.n_batch = host->options.batch_tokens;
    params.n_ubatch = host->options.batch_tokens;
    params.n_seq_max = 1;
    params.n_threads = (int32_t)host->options.num_threads;
    params.n_threads_batch = (int32_t)host->options.num_threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = type;
    params.type_v = type;
    params.swa_full = false; /* a full-size sliding-window cache would be mistaken for a full-attention one */
    params.offload_kqv = false;
    params.op_offload = false;
    params.cb_eval = akvl_eval;
    params.cb_eval_user_data = hook;
    params.abort_callback = on_abort;
    params.abort_callback_data = hook;
    hook->host = host;
    akvl_forget_errors();
    return llama_init_from_model(host->model, params);
}

/* Rows of a sliding-window cache as libllama sizes it: window + batch, padded to 256. */
static uint32_t window_cells(const akv_llama *host)
{
    if (host->info.sliding_window == 0)
        return 0;
    return (host->info.sliding_window + host->options.batch_tokens + 255u) / 256u * 256u;
}

uint32_t akvl_tail_cells(const akv_llama *host)
{
    /* a window layer's state from context A must fit into B's window cache, which is no larger than B itself */
    const uint32_t wanted = (host->options.tail_cells + 255u) / 256u * 256u, window = window_cells(host);
    return wanted > window ? wanted : window;
}

uint32_t akvl_dense_cells(const akv_llama *host, uint64_t tokens)
{
    /* one step more than a window cache, so that the two can be told apart by their rows */
    const uint64_t wanted = (tokens + 255u) / 256u * 256u, window = window_cells(host);
    return (uint32_t)(window && wanted <= window ? window + 256u : wanted);
}

akv_status akvl_run(akv_llama *host, struct llama_context *context, akvl_hook *hook, const int32_t *tokens,
                    size_t num_tokens, int32_t position, bool want_last, bool want_all, akv_diag *diag)
{
    struct llama_batch *batch = &host->batch;
    batch->n_tokens = (int32_t)num_tokens;
    for (size_t i = 0; i < num_tokens; i++) {
        batch->token[i] = tokens[i];
        batch->pos[i] = position + (int32_t)i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = 0;
        batch->logits[i] = want_all || (want_last && i + 1 == num_tokens);
    }
    hook->failure.status = AKV_OK;
    hook->cancelled = false;
    hook->batch_first = position;
    hook->batch_count = (uint32_t)num_tokens;
    akvl_forget_errors();
    if (context == host->tail)
        akvl_gang_begin(host->gang);
    const int32_t code = llama_decode(context, *batch);
    if (hook->failure.status != AKV_OK)
        return akvl_fail(diag, hook->failure.status, "%s", hook->failure.message);
    if (hook->cancelled || code == 2)
        return akvl_fail(diag, AKV_E_CANCELLED, "stopped at token %lld as asked", (long long)position);
    if (code == 1)
        return akvl_fail(diag, AKV_E_NO_SPACE, "libllama found no free cells for %zu tokens", num_tokens);
    if (code != 0)
        return akvl_fail(diag, AKV_E_BAD_STATE, "libllama could not run %zu tokens at position %d: %s",
                         num_tokens, position, akvl_first_error());
    return AKV_OK;
}

akv_status akvl_keep_logits(akv_llama *host, struct llama_context *context, size_t num_rows, size_t first_row,
                            akv_diag *diag)
{
    const size_t vocab = host->info.vocab_tokens, needed = first_row + num_rows;
    if (needed > host->logits_capacity) {
        float *grown =
            needed <= SIZE_MAX / sizeof(float) / vocab ? realloc(host->logits, needed * vocab * sizeof(float)) : NULL;
        if (!grown)
            return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the logits of %zu tokens", needed);
        host->logits = grown;
        host->logits_capacity = needed;
    }
    const float *rows = llama_get_logits(context);
    if (!rows)
        return akvl_fail(diag, AKV_E_BAD_STATE, "libllama gave no logits");
    memcpy(host->logits + first_row * vocab, rows, num_rows * vocab * sizeof(float));
    host->logits_rows = needed;
    return AKV_OK;
}

const float *akv_llama_logits(const akv_llama *host, int64_t index)
{
    if (!host || host->logits_rows == 0)
        return NULL;
    const int64_t row = index == -1 ? (int64_t)host->logits_rows - 1 : index;
    if (row < 0 || (uint64_t)row >= host->logits_rows)
        return NULL;
    return host->logits + (size_t)row * host->info.vocab_tokens;
}

akv_status akvl_probe(akv_llama *host, const int32_t *tokens, size_t num_tokens, akvl_graph **out, akv_diag *diag)
{
    akvl_graph *graph;
    akv_status status = akvl_graph_create(host->num_layers, &graph, diag);
    if (status != AKV_OK)
        return status;
    akvl_hook hook = {.host = host, .mode = AKVL_LEARN, .graph = graph, .stage = AKV_LLAMA_STAGE_PREFILL};
    struct llama_context *context = akvl_make_context(host, akvl_tail_cells(host), GGML_TYPE_F16, &hook);
    if (!context) {
        akvl_graph_free(graph);
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "libllama cannot make a context of %u cells with flash attention for this model: %s",
                         akvl_tail_cells(host), akvl_first_error());
    }
    const size_t few = num_tokens < 2 ? num_tokens : 2;
    status = akvl_run(host, context, &hook, tokens, few, 0, true, false, diag);
    llama_free(context);
    for (uint32_t i = 0; i < graph->num_layers; i++)
        graph->layers[i].k_root = graph->layers[i].v_root = NULL; /* gone with the context */
    if (status != AKV_OK) {
        akvl_graph_free(graph);
        return status;
    }
    *out = graph;
    return AKV_OK;
}

/* ---------------------------------------------------------------------------- state of layers left to libllama */

akv_status akvl_save_native(struct llama_context *context, void **out, size_t *bytes, akv_diag *diag)
{
    const size_t size = llama_state_seq_get_size_ext(context, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    void *state = akvl_new(size, 1);
    if (!state)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of sliding-window or recurrent state", size);
    const size_t got = llama_state_seq_get_data_ext(context, state, size, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (size == 0 || got != size) {
        free(state);
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "libllama could not save the state of the sliding-window or recurrent layers");
    }
    *out = state;
    *bytes = size;
    return AKV_OK;
}

akv_status akvl_load_native(struct llama_context *context, const void *state, size_t bytes, akv_diag *diag)
{
    if (llama_state_seq_set_data_ext(context, state, bytes, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != bytes)
        return akvl_fail(diag, AKV_E_CORRUPT, "libllama did not accept %zu bytes of sliding-window or recurrent state",
                         bytes);
    return AKV_OK;
}
