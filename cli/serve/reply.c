/* SPDX-License-Identifier: Apache-2.0 */
/* reply.c - what a job says, as server-sent events or as one JSON object, in OpenAI's form. */
#include "serve.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

serve_job *serve_job_new(void)
{
    serve_job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return NULL;
    atomic_init(&job->references, 1);
    atomic_init(&job->cancelled, false);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->changed, NULL);
    job->top_logprobs = -1;
    return job;
}

void serve_job_release(serve_documents *documents, serve_job *job)
{
    if (job == NULL || atomic_fetch_sub(&job->references, 1) != 1)
        return;
    serve_document_release(documents, job->document);
    free(job->prompt);
    for (size_t i = 0; i < job->num_stops; i++)
        free(job->stops[i]);
    cli_buffer_free(&job->pending);
    cli_buffer_free(&job->out);
    cJSON_Delete(job->pending_logprobs);
    cJSON_Delete(job->logprobs);
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

/* --------------------------------------------------------------------------------------------------------- logprobs */

static cJSON *token_entry(const akv_llama *host, int32_t token, double logprob)
{
    char text[512];
    size_t bytes = 0;
    if (akv_llama_token_text(host, token, 1, text, sizeof text, &bytes, NULL) != AKV_OK)
        bytes = 0;
    cJSON *entry = cJSON_CreateObject();
    cJSON_AddItemToObject(entry, "token", serve_json_lossy(text, bytes));
    cJSON_AddNumberToObject(entry, "logprob", logprob < -9999.0 ? -9999.0 : logprob); /* JSON has no infinity */
    cJSON *list = cJSON_AddArrayToObject(entry, "bytes");
    for (size_t i = 0; i < bytes; i++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber((unsigned char)text[i]));
    return entry;
}

cJSON *serve_reply_logprob(const akv_llama *host, const serve_job *job, const float *logits, uint32_t n, int32_t token)
{
    int32_t best[SERVE_MAX_TOP];
    int count = 0;
    double top = -INFINITY, sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        top = fmax(top, (double)logits[i]);
        int at = count;
        while (at > 0 && logits[best[at - 1]] < logits[i])
            at--;
        if (at >= job->top_logprobs)
            continue;
        const int last = count < job->top_logprobs ? count++ : job->top_logprobs - 1;
        memmove(best + at + 1, best + at, (size_t)(last - at) * sizeof *best);
        best[at] = (int32_t)i;
    }
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - top);
    const double norm = top + log(sum);
    cJSON *entry = token_entry(host, token, (double)logits[token] - norm),
          *list = cJSON_AddArrayToObject(entry, "top_logprobs");
    for (int i = 0; i < count; i++)
        cJSON_AddItemToArray(list, token_entry(host, best[i], (double)logits[best[i]] - norm));
    return entry;
}

/* The form of /v1/completions: parallel lists. Takes over `content`. */
static cJSON *legacy_logprobs(cJSON *content)
{
    cJSON *root = cJSON_CreateObject(), *tokens = cJSON_AddArrayToObject(root, "tokens"),
          *values = cJSON_AddArrayToObject(root, "token_logprobs"),
          *tops = cJSON_AddArrayToObject(root, "top_logprobs");
    for (cJSON *entry = content->child; entry != NULL; entry = entry->next) {
        cJSON_AddItemToArray(tokens, cJSON_Duplicate(cJSON_GetObjectItem(entry, "token"), 1));
        cJSON_AddItemToArray(values, cJSON_Duplicate(cJSON_GetObjectItem(entry, "logprob"), 1));
        cJSON *top = cJSON_CreateObject();
        for (cJSON *one = cJSON_GetObjectItem(entry, "top_logprobs")->child; one != NULL; one = one->next)
            cJSON_AddItemToObject(top, cJSON_GetStringValue(cJSON_GetObjectItem(one, "token")),
                                  cJSON_Duplicate(cJSON_GetObjectItem(one, "logprob"), 1));
        cJSON_AddItemToArray(tops, top);
    }
    cJSON_Delete(content);
    return root;
}

static cJSON *wrap_logprobs(const serve_job *job, cJSON *content)
{
    if (!job->chat)
        return legacy_logprobs(content);
    cJSON *root = cJSON_CreateObject();
    cJSON_AddItemToObject(root, "content", content);
    return root;
}

/* ----------------------------------------------------------------------------------------------------------- events */

static cJSON *frame(const serve_job *job)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "id", job->id);
    cJSON_AddStringToObject(root, "object",
                            !job->chat    ? "text_completion"
                            : job->stream ? "chat.completion.chunk"
                                          : "chat.completion");
    cJSON_AddNumberToObject(root, "created", (double)job->created);
    cJSON_AddStringToObject(root, "model", job->model);
    return root;
}

static void add_usage(const serve_job *job, cJSON *root)
{
    const uint64_t prompt = job->num_prompt + (job->document != NULL ? job->document->num_tokens : 0);
    cJSON *usage = cJSON_AddObjectToObject(root, "usage");
    cJSON_AddNumberToObject(usage, "prompt_tokens", (double)prompt);
    cJSON_AddNumberToObject(usage, "completion_tokens", (double)job->generated);
    cJSON_AddNumberToObject(usage, "total_tokens", (double)(prompt + job->generated));
    if (job->document != NULL) { /* read when it was uploaded, not now */
        cJSON *details = cJSON_AddObjectToObject(usage, "prompt_tokens_details");
        cJSON_AddNumberToObject(details, "cached_tokens", (double)job->document->num_tokens);
    }
}

/* Takes over the tree. With the job's lock held. */
static void add_event(serve_job *job, cJSON *root)
{
    char *text = root != NULL ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    job->said = true;
    if (text == NULL || !cli_buffer_add(&job->out, "data: ", 6) || !cli_buffer_add(&job->out, text, strlen(text)) ||
        !cli_buffer_add(&job->out, "\n\n", 2))
        atomic_store(&job->cancelled, true); /* out of memory: an answer with a hole is none */
    cJSON_free(text);
}

/* Takes over `logprobs`. With the lock held. */
static void add_chunk(serve_job *job, const char *text, size_t bytes, cJSON *logprobs, const char *finish)
{
    cJSON *root = frame(job), *choice = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(root, "choices"), choice);
    cJSON_AddNumberToObject(choice, "index", 0);
    if (job->chat) {
        cJSON *delta = cJSON_AddObjectToObject(choice, "delta");
        if (!job->role_sent)
            cJSON_AddStringToObject(delta, "role", "assistant");
        if (bytes > 0 || !job->role_sent)
            cJSON_AddItemToObject(delta, "content", serve_json_lossy(text, bytes));
        job->role_sent = true;
    } else {
        cJSON_AddItemToObject(choice, "text", serve_json_lossy(text, bytes));
    }
    if (logprobs != NULL)
        cJSON_AddItemToObject(choice, "logprobs", wrap_logprobs(job, logprobs));
    else
        cJSON_AddNullToObject(choice, "logprobs");
    if (finish != NULL)
        cJSON_AddStringToObject(choice, "finish_reason", finish);
    else
        cJSON_AddNullToObject(choice, "finish_reason");
    if (job->include_usage)
        cJSON_AddNullToObject(root, "usage");
    add_event(job, root);
}

void serve_reply_text(serve_job *job, const char *text, size_t bytes, cJSON *logprobs)
{
    if (bytes == 0 && logprobs == NULL)
        return;
    pthread_mutex_lock(&job->lock);
    if (job->stream) {
        add_chunk(job, text, bytes, logprobs, NULL);
    } else {
        if (bytes > 0 && !cli_buffer_add(&job->out, text, bytes))
            atomic_store(&job->cancelled, true);
        if (logprobs != NULL && job->logprobs == NULL) {
            job->logprobs = logprobs;
        } else if (logprobs != NULL) {
            while (logprobs->child != NULL)
                cJSON_AddItemToArray(job->logprobs, cJSON_DetachItemFromArray(logprobs, 0));
            cJSON_Delete(logprobs);
        }
    }
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
}

void serve_reply_end(serve_job *job, const char *finish, const serve_error *error)
{
    pthread_mutex_lock(&job->lock);
    job->finish = finish;
    if (error != NULL)
        job->error = *error;
    if (job->stream && error != NULL && job->said) {
        add_event(job, serve_error_json(error)); /* the status line is gone: the stream says it */
    } else if (job->stream && error == NULL) {
        add_chunk(job, NULL, 0, NULL, finish);
        if (job->include_usage) {
            cJSON *root = frame(job);
            cJSON_AddArrayToObject(root, "choices");
            add_usage(job, root);
            add_event(job, root);
        }
        if (!cli_buffer_add(&job->out, "data: [DONE]\n\n", 14))
            atomic_store(&job->cancelled, true);
    }
    job->done = true;
    pthread_cond_broadcast(&job->changed);
    pthread_mutex_unlock(&job->lock);
}

cJSON *serve_reply_json(serve_job *job)
{
    pthread_mutex_lock(&job->lock);
    cJSON *root = frame(job), *choice = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(root, "choices"), choice);
    cJSON_AddNumberToObject(choice, "index", 0);
    cJSON *text = serve_json_lossy(job->out.data, job->out.bytes);
    if (job->chat) {
        cJSON *message = cJSON_AddObjectToObject(choice, "message");
        cJSON_AddStringToObject(message, "role", "assistant");
        cJSON_AddItemToObject(message, "content", text);
    } else {
        cJSON_AddItemToObject(choice, "text", text);
    }
    if (job->logprobs != NULL)
        cJSON_AddItemToObject(choice, "logprobs", wrap_logprobs(job, job->logprobs));
    else
        cJSON_AddNullToObject(choice, "logprobs");
    job->logprobs = NULL;
    cJSON_AddStringToObject(choice, "finish_reason", job->finish != NULL ? job->finish : "stop");
    add_usage(job, root);
    pthread_mutex_unlock(&job->lock);
    return root;
}
