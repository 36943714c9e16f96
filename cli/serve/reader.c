/* SPDX-License-Identifier: Apache-2.0 */
/* reader.c - the thread that reads and compresses documents in the order of arrival. */
#include "documents.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A document of fewer tokens than this stays exact where its ratio cannot hold even what every segment needs. */
#define SHORT_TOKENS 512

/* Compression takes about a fifth of the time of reading. */
#define READ_SHARE 0.85

int serve_reader_progress(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total)
{
    serve_documents *s = opaque;
    pthread_mutex_lock(&s->lock);
    serve_document *d = s->current;
    const bool stop = s->stop || (d != NULL && d->deleted);
    if (d != NULL && stage == AKV_LLAMA_STAGE_PREFILL) {
        d->tokens_read = done < d->num_tokens ? done : d->num_tokens;
        d->progress = READ_SHARE * (double)d->tokens_read / (double)d->num_tokens;
    } else if (d != NULL && stage == AKV_LLAMA_STAGE_COMPRESS && total > 0) {
        d->state = SERVE_COMPRESSING;
        d->tokens_read = d->num_tokens;
        d->progress = READ_SHARE + (1.0 - READ_SHARE) * (double)done / (double)total;
    }
    pthread_mutex_unlock(&s->lock);
    serve_turn_yield(s->turn);
    serve_stopped(stop);
    return stop;
}

/* What a store is without its segments, so that they can be smaller, or away, when it is needed. */
static bool keep_parts(serve_document *d, const akv_llama_store_parts *parts)
{
    akv_llama_layer *layers = malloc(parts->num_layers * sizeof *layers);
    void *state = parts->native_state_bytes > 0 ? malloc((size_t)parts->native_state_bytes) : NULL;
    if (layers == NULL || (parts->native_state_bytes > 0 && state == NULL)) {
        free(layers);
        free(state);
        return false;
    }
    memcpy(layers, parts->layers, parts->num_layers * sizeof *layers);
    if (state != NULL)
        memcpy(state, parts->native_state, (size_t)parts->native_state_bytes);
    d->parts = *parts;
    d->parts.tokens = d->tokens;
    d->parts.layers = layers;
    d->parts.segments = NULL;
    d->parts.native_state = state;
    return true;
}

static akv_status compress(serve_documents *s, serve_document *d, akv_llama_store **store, akv_diag *diag)
{
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = d->keep_ratio;
    config.seed = s->options->seed;
    akv_status status = akv_llama_prefill(s->reader, d->tokens, d->num_tokens, 0, diag);
    if (status == AKV_OK)
        status = akv_llama_compress(s->reader, AKV_LLAMA_ANCHOR, &config, store, diag);
    if (status == AKV_E_INFEASIBLE && d->num_tokens < SHORT_TOKENS) /* seen in its ratio of about 1 */
        status = akv_llama_compress(s->reader, AKV_LLAMA_EXACT, &config, store, diag);
    akv_llama_free_dense(s->reader, NULL);
    return status;
}

static void read_one(serve_documents *s, serve_document *d)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store *store = NULL;
    akv_llama_store_parts parts;
    akv_llama_store_parts_init(&parts);
    uint64_t id = 0;
    const double start = cli_now();
    serve_turn_take(s->turn);
    akv_status status = compress(s, d, &store, &diag);
    serve_turn_give(s->turn);
    if (status == AKV_OK)
        status = akv_llama_store_get_parts(store, &parts, &diag);
    if (status == AKV_OK && !keep_parts(d, &parts))
        status = AKV_E_NO_MEMORY;
    if (status == AKV_OK)
        status = akv_pool_add(s->pool, parts.segments, parts.num_segments, &id, &diag);
    const bool saved = status == AKV_OK && serve_folder_save(s->options->folder, d, store);
    akv_llama_store_release(store);

    pthread_mutex_lock(&s->lock);
    s->tokens_read += d->num_tokens;
    s->read_seconds += cli_now() - start;
    s->current = NULL;
    const bool gone = d->deleted;
    if (status == AKV_OK && !gone) {
        d->pool_id = id;
        d->state = SERVE_READY;
        d->progress = 1.0;
    } else if (status != AKV_OK) {
        d->state = SERVE_FAILED;
        akv_llama_free_tokens(d->tokens);
        d->tokens = NULL;
        snprintf(d->error, sizeof d->error, "%.500s", diag.message[0] != '\0' ? diag.message : akv_status_str(status));
    }
    pthread_mutex_unlock(&s->lock);
    if (status == AKV_OK && gone) {
        akv_pool_remove(s->pool, id, NULL);
        if (saved)
            serve_folder_remove(s->options->folder, d->id);
    }
}

/* With the lock: the one that waits longest, which is the last in the list. */
static serve_document *oldest_queued(const serve_documents *s)
{
    serve_document *found = NULL;
    for (serve_document *d = s->first; d != NULL; d = d->next)
        if (d->state == SERVE_QUEUED)
            found = d;
    return found;
}

void *serve_reader_run(void *opaque)
{
    serve_documents *s = opaque;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        serve_document *d = oldest_queued(s);
        if (d == NULL) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        d->references++;
        d->state = SERVE_READING;
        s->waiting--;
        s->current = d;
        pthread_mutex_unlock(&s->lock);
        read_one(s, d);
        pthread_mutex_lock(&s->lock);
        serve_document_unref(d);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
