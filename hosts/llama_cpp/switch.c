/* SPDX-License-Identifier: Apache-2.0 */
/*
 * switch.c - several conversations in turn in one context B. One that waits keeps its segments by reference and the
 * used part of B's cells as bytes: a context for each would take 256 cells at least, and buffers for computing.
 */
#include "host.h"

#include <string.h>

akv_status akv_llama_conversation_create(const akv_llama *host, akv_llama_store *store, akv_llama_conversation **out,
                                         akv_diag *diag)
{
    if (!host || !store || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, store and out must not be NULL");
    akv_status status = akv_llama_check_fingerprint(host, &store->parts.fingerprint, diag);
    if (status != AKV_OK)
        return status;
    akv_llama_conversation *c = akvl_new(1, sizeof *c);
    if (!c)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a conversation");
    c->store = akv_llama_store_retain(store);
    *out = c;
    return AKV_OK;
}

uint64_t akv_llama_conversation_bytes(const akv_llama_conversation *c)
{
    return c && !c->host ? c->state_bytes : 0;
}

uint64_t akv_llama_conversation_segment_bytes(const akv_llama_conversation *c)
{
    const akvl_running *r = c && c->host ? &c->host->running : c ? &c->running : NULL;
    if (!c || c->lost || !(r->lists && r->counts))
        return 0;
    const akv_llama_store_parts *parts = &(c->host ? c->host->store : c->store)->parts;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < parts->num_layers; i++)
        for (uint32_t s = parts->layers[i].num_segments; s < r->counts[i]; s++) {
            akv_segment_info info;
            akv_segment_info_init(&info);
            akv_segment_get_info(r->lists[i][s], &info, NULL);
            bytes += info.bytes.total;
        }
    return bytes;
}

/* B without a conversation in it, so that everything else sees a host with nothing attached. */
static void spare(akv_llama *host)
{
    host->spare_tail = host->tail;
    host->spare_graph = host->tail_graph;
    host->tail = NULL;
    host->tail_graph = NULL;
    host->store = NULL;
    host->history = NULL;
    host->history_capacity = 0;
    memset(&host->running, 0, sizeof host->running);
    memset(&host->rolling, 0, sizeof host->rolling);
    host->logits_rows = 0;
    host->current = NULL;
}

akv_status akvl_set_aside(akv_llama *host, akv_diag *diag)
{
    akv_llama_conversation *c = host->current;
    if (host->tail_used > 0 || host->store->parts.native_state_bytes) {
        const size_t bytes = llama_state_seq_get_size_ext(host->tail, 0, 0);
        void *state = akvl_new(bytes, 1);
        if (!state)
            return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of a waiting conversation", bytes);
        if (bytes == 0 || llama_state_seq_get_data_ext(host->tail, state, bytes, 0, 0) != bytes) {
            free(state);
            return akvl_fail(diag, AKV_E_UNSUPPORTED, "libllama could not save the cells of a conversation");
        }
        c->state = state;
        c->state_bytes = bytes;
    }
    c->host = NULL;
    c->begun = true;
    c->store = host->store;
    c->running = host->running;
    c->rolling = host->rolling;
    c->history = host->history;
    c->history_capacity = host->history_capacity;
    c->rolls = host->rolls;
    c->retargets = host->retargets;
    c->tail_used = host->tail_used;
    c->tail_position = host->tail_position;
    c->tail_first = host->tail_first;
    spare(host);
    return AKV_OK;
}

/* A context B that nobody is in. */
static akv_status make_spare(akv_llama *host, akv_llama_store *store, akv_diag *diag)
{
    const akv_status status = akv_llama_attach(host, store, diag);
    if (status != AKV_OK)
        return status;
    akvl_running_free(host);
    free(host->history);
    akv_llama_store_release(host->store);
    spare(host);
    return AKV_OK;
}

static akv_status begin(akv_llama *host, akv_diag *diag)
{
    const akv_status status = akvl_running_create(host, diag);
    return status == AKV_OK ? akvl_rewind_tail(host, diag) : status;
}

static akv_status go_on(akv_llama *host, akv_llama_conversation *c, akv_diag *diag)
{
    host->running = c->running;
    host->rolling = c->rolling;
    host->history = c->history;
    host->history_capacity = c->history_capacity;
    host->tail_used = c->tail_used;
    host->tail_position = c->tail_position;
    host->tail_first = c->tail_first;
    llama_memory_clear(llama_get_memory(host->tail), false);
    if (c->state_bytes && llama_state_seq_set_data_ext(host->tail, c->state, c->state_bytes, 0, 0) != c->state_bytes)
        return akvl_fail(diag, AKV_E_CORRUPT, "libllama did not take back %zu bytes of a waiting conversation",
                         c->state_bytes);
    return AKV_OK;
}

akv_status akv_llama_switch(akv_llama *host, akv_llama_conversation *to, akv_diag *diag)
{
    if (!host || !to)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and conversation must not be NULL");
    if (to->lost || (to->host && to->host != host))
        return akvl_fail(diag, AKV_E_BAD_STATE,
                         to->lost ? "this conversation was lost: there was no memory to set it aside"
                                  : "this conversation is in another host");
    if (host->current == to)
        return AKV_OK;
    akv_status status = akv_llama_check_fingerprint(host, &to->store->parts.fingerprint, diag);
    if (status == AKV_OK && host->current)
        status = akvl_set_aside(host, diag);
    else if (status == AKV_OK && host->tail)
        akvl_drop_tail(host);
    if (status == AKV_OK && !host->spare_tail)
        status = make_spare(host, to->store, diag);
    if (status == AKV_OK)
        status = akvl_check_store(host->spare_graph, &to->store->parts, diag);
    if (status != AKV_OK)
        return status;
    host->tail = host->spare_tail;
    host->tail_graph = host->spare_graph;
    host->spare_tail = NULL;
    host->spare_graph = NULL;
    host->store = to->store;
    host->rolls = to->rolls;
    host->retargets = to->retargets;
    host->logits_rows = 0;
    status = to->begun ? go_on(host, to, diag) : begin(host, diag);
    if (status != AKV_OK) {
        if (!to->begun) { /* nothing of it is there yet; one that waits goes on waiting, with all it has */
            akvl_running_free(host);
            free(host->history);
        }
        spare(host);
        return status;
    }
    free(to->state);
    to->state = NULL;
    to->state_bytes = 0;
    to->host = host;
    host->current = to;
    akvl_note_store(host, host->store);
    return AKV_OK;
}

void akv_llama_conversation_free(akv_llama_conversation *c)
{
    if (!c)
        return;
    if (c->host) {
        akv_llama *host = c->host;
        akvl_running_free(host);
        akvl_rolling_free(host);
        free(host->history);
        akv_llama_store_release(host->store);
        spare(host);
    } else if (!c->lost) {
        akv_llama borrowed = {.num_layers = c->store->parts.num_layers, .running = c->running, .rolling = c->rolling};
        akvl_running_free(&borrowed);
        akvl_rolling_free(&borrowed);
        free(c->history);
        akv_llama_store_release(c->store);
    }
    free(c->state);
    free(c);
}
