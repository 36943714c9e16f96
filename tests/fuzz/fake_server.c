/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_server.h"
#include "fuzz.h"

#include <math.h>

static struct {
    const char *text;
    size_t bytes, piece;
} say;
static serve_document document = {.id = FAKE_DOCUMENT, .owner = "owner", .name = (char[]){"d"}, .num_tokens = 100};
static long tokens_out, documents_out;
const char *const serve_state_names[SERVE_NUM_STATES] = {"queued", "reading", "compressing", "ready", "failed"};

void fake_say(const char *text, size_t bytes, size_t piece)
{
    say.text = text;
    say.bytes = bytes;
    say.piece = piece > 0 ? piece : 1;
}

void fake_check_balance(void)
{
    HOLDS(tokens_out == 0, "%ld lists of tokens were not released", tokens_out);
    HOLDS(documents_out == 0, "%ld documents were not released", documents_out);
}

void fake_check_job(const serve_job *job, const serve_options *o)
{
    HOLDS(job->num_prompt > 0 && job->prompt != NULL, "an empty prompt");
    HOLDS(job->max_tokens >= 1 && job->max_tokens <= o->max_tokens, "%llu tokens", (unsigned long long)job->max_tokens);
    HOLDS(job->temperature >= 0.0 && job->temperature <= 2.0 && job->top_p > 0.0 && job->top_p <= 1.0, "sampling");
    HOLDS(job->top_logprobs >= -1 && job->top_logprobs <= SERVE_MAX_TOP, "%d logprobs", job->top_logprobs);
    HOLDS(job->num_stops <= SERVE_MAX_STOPS, "%zu stop strings", job->num_stops);
    for (size_t i = 0; i < job->num_stops; i++)
        HOLDS(job->stops[i][0] != '\0', "an empty stop string");
    HOLDS(job->id[0] == 'c' && strlen(job->id) < sizeof job->id, "no id");
}

cJSON *fake_parse(const char *text, size_t bytes)
{
    const char *end = NULL;
    HOLDS(cli_utf8_prefix(text, bytes) == bytes, "an answer that is no UTF-8");
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes, &end, 0);
    HOLDS(root != NULL && end == text + bytes, "no JSON: %.*s", (int)(bytes < 200 ? bytes : 200), text);
    return root;
}

/* ------------------------------------------------------------------------------------------------------- the model */

static akv_status tokens_of(size_t n, int32_t **tokens, size_t *num_tokens)
{
    *tokens = malloc((n + 1) * sizeof **tokens);
    HOLDS(*tokens != NULL, "no memory");
    for (size_t i = 0; i < n; i++)
        (*tokens)[i] = (int32_t)i;
    *num_tokens = n;
    tokens_out++;
    return AKV_OK;
}

void akv_llama_free_tokens(int32_t *tokens)
{
    tokens_out -= tokens != NULL;
    free(tokens);
}

akv_status akv_llama_tokenize(const akv_llama *host, const char *text, size_t bytes, int add_special, int parse_special,
                              int32_t **tokens, size_t *num_tokens, akv_diag *diag)
{
    (void)host, (void)diag;
    HOLDS(!parse_special && cli_utf8_prefix(text, bytes) == bytes, "control tokens, or no UTF-8");
    return tokens_of(bytes + (size_t)add_special, tokens, num_tokens);
}

akv_status akv_llama_render_question(const akv_llama *host, akv_llama_prompt form, const char *system,
                                     const char *question, size_t bytes, int32_t **tokens, size_t *num_tokens,
                                     akv_diag *diag)
{
    (void)host, (void)form, (void)diag;
    HOLDS(bytes > 0 && cli_utf8_prefix(question, bytes) == bytes, "an empty question, or no UTF-8");
    return tokens_of(bytes + (system ? strlen(system) : 0) + 4, tokens, num_tokens);
}

akv_status akv_llama_render_opening(const akv_llama *host, const char *system, int32_t **tokens, size_t *num_tokens,
                                    akv_diag *diag)
{
    (void)host, (void)diag;
    return tokens_of(2 + (system ? strlen(system) : 0), tokens, num_tokens);
}

akv_status akv_llama_render_turn(const akv_llama *host, akv_llama_turn turn, const char *system, const char *text,
                                 size_t bytes, int32_t **tokens, size_t *num_tokens, akv_diag *diag)
{
    (void)host, (void)turn, (void)system;
    HOLDS(bytes > 0 && text[bytes] == '\0', "an empty turn");
    if (bytes % 64 == 63) { /* the host may refuse */
        diag->status = AKV_E_UNSUPPORTED;
        snprintf(diag->message, sizeof diag->message, "this template cannot be rendered");
        return AKV_E_UNSUPPORTED;
    }
    return tokens_of(bytes + 3, tokens, num_tokens);
}

akv_status akv_llama_token_text(const akv_llama *host, int32_t token, int special, char *text, size_t capacity,
                                size_t *bytes, akv_diag *diag)
{
    (void)host, (void)special, (void)capacity, (void)diag;
    text[0] = (char)token; /* now and then no whole character */
    *bytes = 1;
    return AKV_OK;
}

/* --------------------------------------------------------------------------------------------------- the documents */

bool serve_documents_find(serve_documents *documents, const char *owner, const char *id, serve_document **out,
                          serve_error *error)
{
    (void)documents, (void)owner;
    if (strcmp(id, FAKE_DOCUMENT) != 0)
        return serve_fail(error, 404, "document_not_found", "document", "there is no document \"%.64s\"", id);
    documents_out++;
    *out = &document;
    return true;
}

bool serve_document_ready(serve_documents *documents, serve_document *d, serve_error *error)
{
    (void)documents, (void)d, (void)error;
    return true;
}

void serve_document_release(serve_documents *documents, serve_document *d)
{
    (void)documents;
    documents_out -= d != NULL;
}

bool serve_documents_add(serve_documents *documents, const char *owner, const char *name, const char *text,
                         double keep_ratio, serve_document **out, serve_error *error)
{
    (void)documents, (void)owner;
    HOLDS(*name != '\0' && *text != '\0' && keep_ratio > 0.0 && keep_ratio <= 1.0, "a document that was not checked");
    HOLDS(cli_utf8_prefix(text, strlen(text)) == strlen(text), "a text that is no UTF-8");
    if (strlen(text) % 8 == 7)
        return serve_fail(error, 429, "queue_full", NULL, "full");
    documents_out++;
    *out = &document;
    return true;
}

bool serve_documents_delete(serve_documents *documents, const char *owner, const char *id, serve_error *error)
{
    serve_document *d = NULL;
    if (!serve_documents_find(documents, owner, id, &d, error))
        return false;
    serve_document_release(documents, d);
    return true;
}

cJSON *serve_document_json(serve_documents *documents, serve_document *d)
{
    cJSON *root = cJSON_CreateObject();
    (void)documents;
    cJSON_AddStringToObject(root, "id", d->id);
    return root;
}

cJSON *serve_documents_json(serve_documents *documents, const char *owner)
{
    (void)documents, (void)owner;
    return cJSON_CreateArray();
}

void serve_documents_stats_get(serve_documents *documents, serve_documents_stats *out)
{
    (void)documents;
    memset(out, 0, sizeof *out);
}

/* ------------------------------------------------------------------------------------------------------ the engine */

bool serve_engine_submit(serve_engine *engine, serve_job *job, serve_error *error)
{
    float logits[32];
    const serve_error late = {.status = 503, .code = "timeout", .message = "it took too long"};
    (void)engine;
    if (job->num_prompt % 32 == 31)
        return serve_fail(error, 429, "queue_full", NULL, "full");
    for (int i = 0; i < 32; i++)
        logits[i] = i % 7 == 3 ? -INFINITY : (float)(i % 13);
    for (size_t at = 0; at < say.bytes; at += say.piece) {
        const size_t n = say.bytes - at < say.piece ? say.bytes - at : say.piece;
        cJSON *entries = NULL;
        if (job->top_logprobs >= 0) {
            entries = cJSON_CreateArray();
            cJSON_AddItemToArray(entries, serve_reply_logprob(NULL, job, logits, 32, (unsigned char)say.text[at] % 32));
        }
        serve_reply_text(job, say.text + at, n, entries);
    }
    serve_reply_end(job, "stop", say.bytes % 16 == 15 ? &late : NULL);
    return true;
}

void serve_engine_stats_get(serve_engine *engine, serve_engine_stats *out)
{
    (void)engine;
    memset(out, 0, sizeof *out);
}
