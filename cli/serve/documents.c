/* SPDX-License-Identifier: Apache-2.0 */
/*
 * documents.c - what was uploaded, by key; what requests ask of it. reader.c reads it, akv_pool holds the
 * bytes.
 */
#include "documents.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

const char *const serve_state_names[SERVE_NUM_STATES] = {"queued", "reading", "compressing", "ready", "failed"};

/* What a question and the first words of its answer need behind a document. */
enum { ROOM_TOKENS = 256 };
/* Failed ones too, which no budget of bytes bounds. */
enum { MAX_DOCUMENTS = 4096 };


void serve_document_unref(serve_document *d)
{
    if (--d->references > 0)
        return;
    free(d->name);
    akv_llama_free_tokens(d->tokens);
    free((void *)(uintptr_t)d->parts.layers);
    free((void *)(uintptr_t)d->parts.native_state);
    free(d);
}

void serve_document_release(serve_documents *s, serve_document *d)
{
    if (d == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    serve_document_unref(d);
    pthread_mutex_unlock(&s->lock);
}

/* --------------------------------------------------------------------------------------------------- start and end */

static bool on_found(void *opaque, serve_document *d, akv_segment *const *segments, uint32_t num_segments)
{
    serve_documents *s = opaque;
    akv_diag diag = {AKV_OK, ""};
    if (akv_pool_add(s->pool, segments, num_segments, &d->pool_id, &diag) != AKV_OK) {
        cli_warn("%s: %s", d->id, diag.message);
        return false;
    }
    d->references = 1;
    d->state = SERVE_READY;
    d->progress = 1.0;
    d->tokens_read = d->num_tokens;
    d->next = s->first;
    s->first = d;
    return true;
}

int serve_documents_create(const serve_options *options, akv_llama *host, serve_turn *turn, serve_documents **out)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_options o;
    akv_llama_model_info model;
    akv_pool_config pool;
    serve_documents *s = calloc(1, sizeof *s);
    if (s == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the server");
    *out = s;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->options = options;
    s->host = host;
    s->turn = turn;
    akv_llama_model_info_init(&model);
    akv_llama_get_model_info(host, &model, NULL);
    s->context = model.train_context;
    akv_pool_config_init(&pool);
    pool.budget_bytes = options->budget;
    if (options->folder != NULL) {
        pool.spill = serve_folder_spill;
        pool.fetch = serve_folder_fetch;
        pool.forget = serve_folder_forget;
        pool.opaque = (void *)(uintptr_t)options->folder;
    }
    akv_status status = akv_threads_create(options->threads, &s->threads, &diag);
    akv_llama_options_init(&o);
    o.num_threads = options->threads;
    o.batch_tokens = 256; /* progress is told by batches */
    o.progress = serve_reader_progress;
    o.progress_opaque = s;
    if (status == AKV_OK) {
        o.executor = akv_threads_executor(s->threads);
        status = akv_llama_open_beside(host, &o, &s->reader, &diag);
    }
    if (status == AKV_OK)
        status = akv_pool_create(&pool, &s->pool, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    int code = serve_folder_open(options->folder);
    if (code == CLI_OK)
        code = serve_folder_load(options->folder, host, on_found, s);
    if (code == CLI_OK && pthread_create(&s->thread, NULL, serve_reader_run, s) != 0)
        code = cli_fail(CLI_IO, "the system gives no thread");
    s->has_thread = code == CLI_OK;
    return code;
}

void serve_documents_stop(serve_documents *s)
{
    if (!s->has_thread)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    serve_document *const current = s->current;
    pthread_cond_broadcast(&s->changed);
    if (current != NULL)
        current->references++;
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL); /* one that is compressed already is still saved */
    s->has_thread = false;
    pthread_mutex_lock(&s->lock);
    const uint64_t lost = s->waiting + (current != NULL && current->state == SERVE_FAILED && !current->deleted);
    if (current != NULL)
        serve_document_unref(current);
    pthread_mutex_unlock(&s->lock);
    if (lost > 0)
        cli_note("%llu documents were not ready and are lost", (unsigned long long)lost);
}

void serve_documents_destroy(serve_documents *s)
{
    if (s == NULL)
        return;
    serve_documents_stop(s);
    while (s->first != NULL) {
        serve_document *d = s->first;
        s->first = d->next;
        serve_document_unref(d);
    }
    akv_pool_destroy(s->pool);
    akv_llama_close(s->reader);
    akv_threads_destroy(s->threads);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* --------------------------------------------------------------------------------------------------------- requests */

static bool new_id(char id[SERVE_ID_BYTES])
{
    unsigned char random[12];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return false;
    memcpy(id, "doc-", 5);
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(id + 4 + 2 * i, 3, "%02x", random[i]);
    return true;
}

static bool put(serve_documents *s, serve_document *d, serve_error *error)
{
    bool ok = true;
    size_t count = 0;
    pthread_mutex_lock(&s->lock);
    for (const serve_document *other = s->first; other != NULL; other = other->next)
        count++;
    if (s->stop)
        ok = serve_fail(error, 503, "ending", NULL, "the server is ending");
    else if (s->waiting >= s->options->queue)
        ok = serve_fail(error, 429, "queue_full", NULL, "%llu documents wait to be read; try again later",
                        (unsigned long long)s->waiting);
    else if (count >= MAX_DOCUMENTS)
        ok = serve_fail(error, 429, "too_many_documents", NULL, "there are %zu documents; delete some", count);
    if (ok) {
        d->references = 2; /* the list's and the caller's */
        d->next = s->first;
        s->first = d;
        s->waiting++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return ok;
}

bool serve_documents_add(serve_documents *s, const char *owner, const char *name, const char *text, double keep_ratio,
                         serve_document **out, serve_error *error)
{
    akv_diag diag = {AKV_OK, ""};
    serve_document *d = calloc(1, sizeof *d);
    if (d == NULL || (d->name = strdup(name)) == NULL) {
        free(d);
        return serve_fail(error, 503, "no_memory", NULL, "no memory for a document");
    }
    bool ok = new_id(d->id) || serve_fail(error, 500, "internal_error", NULL, "the system gives no random numbers");
    snprintf(d->owner, sizeof d->owner, "%s", owner);
    d->created = (int64_t)time(NULL);
    d->keep_ratio = keep_ratio;
    const akv_status status =
        akv_llama_render_document(s->host, AKV_LLAMA_CHAT, NULL, text, strlen(text), &d->tokens, &d->num_tokens, &diag);
    if (ok && status != AKV_OK)
        ok = serve_fail_diag(error, status, &diag);
    if (ok && d->num_tokens + ROOM_TOKENS > s->context)
        ok = serve_fail(error, 413, "document_too_long", "text",
                        "the document has %zu tokens; this model's context of %u leaves room for %u beside a question",
                        d->num_tokens, s->context, s->context > ROOM_TOKENS ? s->context - ROOM_TOKENS : 0);
    ok = ok && put(s, d, error);
    if (ok) {
        *out = d;
    } else {
        d->references = 1;
        serve_document_release(s, d);
    }
    return ok;
}

bool serve_documents_find(serve_documents *s, const char *owner, const char *id, serve_document **out,
                          serve_error *error)
{
    pthread_mutex_lock(&s->lock);
    serve_document *d = s->first;
    while (d != NULL && (strcmp(d->id, id) != 0 || strcmp(d->owner, owner) != 0))
        d = d->next;
    if (d != NULL)
        d->references++;
    pthread_mutex_unlock(&s->lock);
    *out = d;
    return d != NULL || serve_fail(error, 404, "document_not_found", "document", "there is no document \"%.64s\"", id);
}

bool serve_documents_delete(serve_documents *s, const char *owner, const char *id, serve_error *error)
{
    serve_document *found = NULL;
    pthread_mutex_lock(&s->lock);
    for (serve_document **at = &s->first; *at != NULL; at = &(*at)->next)
        if (strcmp((*at)->id, id) == 0 && strcmp((*at)->owner, owner) == 0) {
            found = *at;
            *at = found->next;
            break;
        }
    const bool ready = found != NULL && found->state == SERVE_READY;
    if (found != NULL) {
        found->deleted = true; /* ends its being read */
        s->waiting -= found->state == SERVE_QUEUED;
    }
    pthread_mutex_unlock(&s->lock);
    if (found == NULL)
        return serve_fail(error, 404, "document_not_found", NULL, "there is no document \"%.64s\"", id);
    if (ready) { /* answers that are being made keep the segments until they are done */
        akv_pool_remove(s->pool, found->pool_id, NULL);
        serve_folder_remove(s->options->folder, found->id);
    }
    serve_document_release(s, found);
    return true;
}

bool serve_document_ready(serve_documents *s, serve_document *d, serve_error *error)
{
    pthread_mutex_lock(&s->lock);
    const serve_document_state state = d->state;
    pthread_mutex_unlock(&s->lock);
    if (state == SERVE_READY)
        return true;
    if (state == SERVE_FAILED)
        return serve_fail(error, 409, "document_failed", "document", "document %s could not be made: %.400s", d->id,
                          d->error);
    return serve_fail(error, 409, "document_not_ready", "document", "document %s is %s; ask again when it is ready",
                      d->id, serve_state_names[state]);
}

bool serve_document_store(serve_documents *s, serve_document *d, akv_llama_store **out, serve_error *error)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store_parts parts = d->parts;
    akv_segment **segments = calloc(parts.num_segments, sizeof *segments);
    if (segments == NULL)
        return serve_fail(error, 503, "no_memory", NULL, "no memory for the document's tables");
    akv_status status = akv_pool_acquire(s->pool, d->pool_id, segments, parts.num_segments, &diag);
    parts.segments = segments;
    const bool here = status == AKV_OK;
    if (here)
        status = akv_llama_store_create(&parts, out, &diag);
    for (uint32_t i = 0; here && i < parts.num_segments; i++)
        akv_segment_release(segments[i]);
    free(segments);
    pthread_mutex_lock(&s->lock);
    const bool deleted = d->deleted;
    pthread_mutex_unlock(&s->lock);
    if (!here && deleted)
        return serve_fail(error, 404, "document_not_found", "document", "document %s was deleted", d->id);
    return status == AKV_OK || serve_fail_diag(error, status, &diag);
}

/* ------------------------------------------------------------------------------------------------------------- JSON */

cJSON *serve_document_json(serve_documents *s, serve_document *d)
{
    akv_pool_document now;
    akv_pool_document_init(&now);
    pthread_mutex_lock(&s->lock);
    const serve_document_state state = d->state;
    const uint64_t tokens_read = d->tokens_read;
    const double progress = d->progress;
    pthread_mutex_unlock(&s->lock);
    const bool known = state == SERVE_READY && akv_pool_get_document(s->pool, d->pool_id, &now, NULL) == AKV_OK;
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "id", d->id);
    cJSON_AddStringToObject(root, "object", "document");
    cJSON_AddStringToObject(root, "name", d->name);
    cJSON_AddStringToObject(root, "status", serve_state_names[state]);
    cJSON_AddNumberToObject(root, "created", (double)d->created);
    cJSON_AddNumberToObject(root, "tokens", (double)d->num_tokens);
    cJSON_AddNumberToObject(root, "tokens_read", (double)tokens_read);
    cJSON_AddNumberToObject(root, "progress", progress);
    cJSON_AddNumberToObject(root, "dense_bytes", (double)now.dense_bytes);
    cJSON_AddNumberToObject(root, "bytes", (double)now.bytes.total);
    cJSON_AddNumberToObject(root, "ratio",
                            known && now.bytes.total > 0 ? (double)now.dense_bytes / (double)now.bytes.total : 0.0);
    cJSON_AddBoolToObject(root, "on_disk", now.spilled != 0);
    if (state == SERVE_FAILED)
        cJSON_AddItemToObject(root, "error", serve_json_lossy(d->error, strlen(d->error)));
    else
        cJSON_AddNullToObject(root, "error");
    return root;
}

/* With a reference on each: JSON is made without the lock. */
static serve_document **all_of(serve_documents *s, const char *owner, size_t *count)
{
    size_t n = 0;
    pthread_mutex_lock(&s->lock);
    for (serve_document *d = s->first; d != NULL; d = d->next)
        n++;
    serve_document **list = calloc(n + 1, sizeof *list);
    *count = 0;
    for (serve_document *d = s->first; list != NULL && d != NULL; d = d->next)
        if (owner == NULL || strcmp(d->owner, owner) == 0) {
            d->references++;
            list[(*count)++] = d;
        }
    pthread_mutex_unlock(&s->lock);
    return list;
}

cJSON *serve_documents_json(serve_documents *s, const char *owner)
{
    size_t n = 0;
    serve_document **list = all_of(s, owner, &n);
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "object", "list");
    cJSON *data = cJSON_AddArrayToObject(root, "data");
    for (size_t i = 0; i < n; i++) {
        cJSON_AddItemToArray(data, serve_document_json(s, list[i]));
        serve_document_release(s, list[i]);
    }
    free(list);
    return root;
}

void serve_documents_stats_get(serve_documents *s, serve_documents_stats *out)
{
    size_t n = 0;
    memset(out, 0, sizeof *out);
    akv_pool_stats_init(&out->pool);
    akv_pool_get_stats(s->pool, &out->pool, NULL);
    serve_document **list = all_of(s, NULL, &n);
    for (size_t i = 0; i < n; i++) {
        akv_pool_document now;
        akv_pool_document_init(&now);
        pthread_mutex_lock(&s->lock);
        const serve_document_state state = list[i]->state;
        pthread_mutex_unlock(&s->lock);
        out->by_state[state]++;
        if (state == SERVE_READY && akv_pool_get_document(s->pool, list[i]->pool_id, &now, NULL) == AKV_OK) {
            out->dense_bytes += now.dense_bytes;
            out->tokens += list[i]->num_tokens;
            for (size_t k = 0; !now.spilled && k < sizeof now.bytes / sizeof(uint64_t); k++)
                (&out->bytes.total)[k] += (&now.bytes.total)[k];
        }
        serve_document_release(s, list[i]);
    }
    free(list);
    pthread_mutex_lock(&s->lock);
    out->tokens_read = s->tokens_read;
    out->read_seconds = s->read_seconds;
    pthread_mutex_unlock(&s->lock);
}
