/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.c - from a request's JSON to a job or a document. What the server does not do is refused, never left out in
 * silence.
 */
#include "serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* -------------------------------------------------------------------------------------------- what is not supported */

/* Members that would change the answer. At these values they change nothing. */
static bool refuse_unsupported(const cJSON *body, serve_error *error)
{
    static const char *const zero[] = {"frequency_penalty", "presence_penalty"}, *const one[] = {"n", "best_of"};
    static const char *const never[] = {"tools",      "tool_choice", "functions", "function_call",
                                        "logit_bias", "suffix",      "audio",     "modalities"};
    double number = 0.0;
    for (size_t i = 0; i < 2; i++)
        if (!serve_json_number(body, zero[i], -2.0, 2.0, false, &number, error))
            return false;
        else if (number != 0.0)
            return serve_fail(error, 400, "unsupported", zero[i], "%s other than 0 is not supported", zero[i]);
    number = 1.0;
    for (size_t i = 0; i < 2; i++)
        if (!serve_json_number(body, one[i], 1.0, 128.0, true, &number, error))
            return false;
        else if (number != 1.0)
            return serve_fail(error, 400, "unsupported", one[i], "%s other than 1 is not supported", one[i]);
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(body, never[i]);
        const bool empty =
            item == NULL || cJSON_IsNull(item) || (cJSON_IsArray(item) && item->child == NULL) ||
            (cJSON_IsObject(item) && item->child == NULL) ||
            (cJSON_IsString(item) && (item->valuestring[0] == '\0' || strcmp(item->valuestring, "none") == 0));
        if (!empty)
            return serve_fail(error, 400, "unsupported", never[i], "%s is not supported", never[i]);
    }
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(body, "response_format");
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(format, "type"));
    if (format != NULL && !cJSON_IsNull(format) && (kind == NULL || strcmp(kind, "text") != 0))
        return serve_fail(error, 400, "unsupported", "response_format",
                          "a response_format other than text is not supported");
    bool echo = false;
    if (!serve_json_bool(body, "echo", &echo, error))
        return false;
    return !echo || serve_fail(error, 400, "unsupported", "echo", "echo is not supported");
}

/* ----------------------------------------------------------------------------------------------------------- prompt */

typedef struct token_list {
    int32_t *tokens;
    size_t count;
} token_list;

/* Takes over `more`. */
static bool append(token_list *list, int32_t *more, size_t n, serve_error *error)
{
    int32_t *grown = realloc(list->tokens, (list->count + n + 1) * sizeof *grown);
    if (grown != NULL) {
        memcpy(grown + list->count, more, n * sizeof *grown);
        list->tokens = grown;
        list->count += n;
    }
    akv_llama_free_tokens(more);
    return grown != NULL || serve_fail(error, 503, "no_memory", NULL, "no memory for the prompt");
}

typedef struct message {
    char role; /* s, u, a */
    cli_buffer text;
} message;

static void free_messages(message *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        cli_buffer_free(&list[i].text);
    free(list);
}

/* A string, or a list of {"type": "text", "text": ...}. */
static bool add_content(const cJSON *content, cli_buffer *text, serve_error *error)
{
    bool ok = true;
    if (cJSON_IsString(content)) {
        ok = cli_buffer_add(text, content->valuestring, strlen(content->valuestring));
    } else if (cJSON_IsArray(content)) {
        for (const cJSON *part = content->child; ok && part != NULL; part = part->next) {
            const char *type = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(part, "type"));
            const char *piece = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(part, "text"));
            if (type == NULL || strcmp(type, "text") != 0 || piece == NULL)
                return serve_fail(error, 400, "invalid_value", "messages",
                                  "only parts of type text are supported in a message");
            ok = cli_buffer_add(text, piece, strlen(piece));
        }
    } else {
        return serve_fail(error, 400, "invalid_type", "messages",
                          "a message's content must be a string or a list of text parts");
    }
    return ok || serve_fail(error, 503, "no_memory", NULL, "no memory for the prompt");
}

/* Messages of one role in a row become one; they are joined by an empty line. */
static bool read_messages(const cJSON *body, message **out, size_t *count, serve_error *error)
{
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(body, "messages");
    if (!cJSON_IsArray(array) || array->child == NULL)
        return serve_fail(error, 400, array == NULL ? "missing" : "invalid_type", "messages",
                          "messages must be a list of at least one message");
    message *list = calloc((size_t)cJSON_GetArraySize(array), sizeof *list);
    size_t n = 0;
    bool ok = list != NULL || serve_fail(error, 503, "no_memory", NULL, "no memory for the messages");
    for (const cJSON *m = array->child; ok && m != NULL; m = m->next) {
        const char *role = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(m, "role"));
        const char kind = role == NULL                                                    ? 0
                          : strcmp(role, "system") == 0 || strcmp(role, "developer") == 0 ? 's'
                          : strcmp(role, "user") == 0                                     ? 'u'
                          : strcmp(role, "assistant") == 0                                ? 'a'
                                                                                          : 0;
        if (!cJSON_IsObject(m) || kind == 0)
            ok = serve_fail(error, 400, "invalid_value", "messages",
                            "a message's role must be system, developer, user or assistant");
        else if (kind == 's' && n > 0 && list[n - 1].role != 's')
            ok = serve_fail(error, 400, "unsupported", "messages", "a system message must stand before all others");
        else if (kind == 'a' && (n == 0 || list[n - 1].role == 's'))
            ok = serve_fail(error, 400, "unsupported", "messages",
                            "the first message after the system's must be the user's");
        if (!ok)
            break;
        if (n == 0 || list[n - 1].role != kind)
            list[n++].role = kind;
        else if (!cli_buffer_add(&list[n - 1].text, "\n\n", 2))
            ok = serve_fail(error, 503, "no_memory", NULL, "no memory for the messages");
        ok = ok && add_content(cJSON_GetObjectItemCaseSensitive(m, "content"), &list[n - 1].text, error);
    }
    for (size_t i = 0; ok && i < n; i++)
        if (list[i].text.bytes == 0 && list[i].role == 'u')
            ok = serve_fail(error, 400, "invalid_value", "messages", "a user's message is empty");
    if (ok && list[n - 1].role != 'u')
        ok = serve_fail(error, 400, "invalid_value", "messages", "the last message must be the user's");
    for (size_t i = 0; ok && i < n; i++) /* zero-terminated for the template */
        if (!cli_buffer_add(&list[i].text, "", 1))
            ok = serve_fail(error, 503, "no_memory", NULL, "no memory for the messages");
    if (!ok) {
        free_messages(list, n);
        return false;
    }
    *out = list;
    *count = n;
    return true;
}

/* One user's turn. A document stands first: the system's text comes before the question instead. */
static bool render_user(const akv_llama *host, bool document, bool first, const char *system, const message *m,
                        token_list *list, serve_error *error)
{
    akv_diag diag = {AKV_OK, ""};
    int32_t *tokens = NULL;
    size_t n = 0;
    akv_status status;
    const size_t bytes = m->text.bytes - 1;
    if (document && first && system != NULL) {
        cli_buffer both = {NULL, 0, 0};
        if (!cli_buffer_add(&both, system, strlen(system)) || !cli_buffer_add(&both, "\n\n", 2) ||
            !cli_buffer_add(&both, m->text.data, bytes)) {
            cli_buffer_free(&both);
            return serve_fail(error, 503, "no_memory", NULL, "no memory for the prompt");
        }
        status = akv_llama_render_question(host, AKV_LLAMA_CHAT, NULL, both.data, both.bytes, &tokens, &n, &diag);
        cli_buffer_free(&both);
    } else if (document && first) {
        status = akv_llama_render_question(host, AKV_LLAMA_CHAT, NULL, m->text.data, bytes, &tokens, &n, &diag);
    } else {
        status = akv_llama_render_turn(host, first ? AKV_LLAMA_TURN_FIRST : AKV_LLAMA_TURN_LATER,
                                       document ? NULL : system, m->text.data, bytes, &tokens, &n, &diag);
    }
    return status == AKV_OK ? append(list, tokens, n, error) : serve_fail_diag(error, status, &diag);
}

static bool render_chat(const akv_llama *host, const cJSON *body, bool document, token_list *list, serve_error *error)
{
    akv_diag diag = {AKV_OK, ""};
    message *messages = NULL;
    size_t count = 0, n = 0;
    int32_t *tokens = NULL;
    if (!read_messages(body, &messages, &count, error))
        return false;
    const char *system = messages[0].role == 's' && messages[0].text.bytes > 1 ? messages[0].text.data : NULL;
    bool ok = true, first = true;
    if (!document) {
        const akv_status status = akv_llama_render_opening(host, system, &tokens, &n, &diag);
        if (status == AKV_OK)
            ok = append(list, tokens, n, error);
        else if (status != AKV_E_UNSUPPORTED ||
                 system != NULL) /* without one: this model's chat begins with the user's text */
            ok = serve_fail_diag(error, status, &diag);
    }
    for (size_t i = messages[0].role == 's'; ok && i < count; i++) {
        if (messages[i].role == 'u') {
            ok = render_user(host, document, first, system, &messages[i], list, error);
            first = false;
            continue;
        }
        const akv_status status =
            akv_llama_tokenize(host, messages[i].text.data, messages[i].text.bytes - 1, 0, 0, &tokens, &n, &diag);
        ok = status == AKV_OK ? append(list, tokens, n, error) : serve_fail_diag(error, status, &diag);
    }
    free_messages(messages, count);
    return ok;
}

static bool render_text(const akv_llama *host, const cJSON *body, bool document, token_list *list, serve_error *error)
{
    akv_diag diag = {AKV_OK, ""};
    const cJSON *prompt = cJSON_GetObjectItemCaseSensitive(body, "prompt");
    if (cJSON_IsArray(prompt) && cJSON_GetArraySize(prompt) == 1)
        prompt = prompt->child;
    if (!cJSON_IsString(prompt) || prompt->valuestring[0] == '\0')
        return serve_fail(
            error, 400, prompt == NULL ? "missing" : "invalid_type", "prompt",
            "prompt must be a string that is not empty; lists of prompts and of tokens are not supported");
    int32_t *tokens = NULL;
    size_t n = 0;
    const akv_status status =
        akv_llama_tokenize(host, prompt->valuestring, strlen(prompt->valuestring), !document, 0, &tokens, &n, &diag);
    return status == AKV_OK ? append(list, tokens, n, error) : serve_fail_diag(error, status, &diag);
}

/* -------------------------------------------------------------------------------------------------------------- job */

static bool read_stops(const cJSON *body, serve_job *job, serve_error *error)
{
    const cJSON *stop = cJSON_GetObjectItemCaseSensitive(body, "stop");
    if (stop == NULL || cJSON_IsNull(stop))
        return true;
    const cJSON *one = cJSON_IsArray(stop) ? stop->child : stop;
    for (; one != NULL; one = cJSON_IsArray(stop) ? one->next : NULL) {
        if (!cJSON_IsString(one))
            return serve_fail(error, 400, "invalid_type", "stop", "stop must be a string or a list of strings");
        if (one->valuestring[0] == '\0' || strlen(one->valuestring) > 256)
            return serve_fail(error, 400, "invalid_value", "stop", "a stop string must have 1 to 256 bytes");
        if (job->num_stops == SERVE_MAX_STOPS)
            return serve_fail(error, 400, "invalid_value", "stop", "at most %d stop strings are possible",
                              SERVE_MAX_STOPS);
        if ((job->stops[job->num_stops] = strdup(one->valuestring)) == NULL)
            return serve_fail(error, 503, "no_memory", NULL, "no memory for the stop strings");
        job->num_stops++;
    }
    return true;
}

static bool read_logprobs(const cJSON *body, serve_job *job, serve_error *error)
{
    double top = -1.0;
    if (!job->chat) {
        if (!serve_json_number(body, "logprobs", 0.0, SERVE_MAX_TOP, true, &top, error))
            return false;
        job->top_logprobs = (int)top;
        return true;
    }
    bool wanted = false;
    if (!serve_json_bool(body, "logprobs", &wanted, error) ||
        !serve_json_number(body, "top_logprobs", 0.0, SERVE_MAX_TOP, true, &top, error))
        return false;
    if (!wanted && top >= 0.0)
        return serve_fail(error, 400, "invalid_value", "top_logprobs", "top_logprobs needs logprobs: true");
    job->top_logprobs = !wanted ? -1 : top < 0.0 ? 0 : (int)top;
    return true;
}

static bool read_sampling(const serve_options *o, const cJSON *body, serve_job *job, serve_error *error)
{
    double tokens = -1.0, seed = -1.0;
    job->temperature = job->top_p = 1.0;
    if (!serve_json_number(body, "max_tokens", 1.0, (double)o->max_tokens, true, &tokens, error) ||
        !serve_json_number(body, "max_completion_tokens", 1.0, (double)o->max_tokens, true, &tokens, error) ||
        !serve_json_number(body, "temperature", 0.0, 2.0, false, &job->temperature, error) ||
        !serve_json_number(body, "top_p", 1e-9, 1.0, false, &job->top_p, error) ||
        !serve_json_number(body, "seed", -9007199254740992.0, 9007199254740992.0, true, &seed, error))
        return false;
    job->max_tokens = tokens < 0.0 ? o->max_tokens : (uint64_t)tokens;
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(body, "seed");
    if (given != NULL && !cJSON_IsNull(given))
        job->random = (uint64_t)(int64_t)seed;
    else if (getrandom(&job->random, sizeof job->random, 0) != (ssize_t)sizeof job->random)
        return serve_fail(error, 500, "internal_error", NULL, "the system gives no random numbers");
    return true;
}

static bool read_options(const serve_server *server, const cJSON *body, serve_job *job, serve_error *error)
{
    const char *model = NULL, *user = NULL;
    if (!refuse_unsupported(body, error) || !serve_json_string(body, "model", 256, &model, error) ||
        !serve_json_string(body, "user", 4096, &user, error) || !serve_json_bool(body, "stream", &job->stream, error))
        return false;
    if (model != NULL && strcmp(model, server->model_id) != 0)
        return serve_fail(error, 404, "model_not_found", "model",
                          "there is no model \"%.100s\"; this server has \"%s\"", model, server->model_id);
    const cJSON *options = cJSON_GetObjectItemCaseSensitive(body, "stream_options");
    if (options != NULL && !cJSON_IsNull(options)) {
        if (!cJSON_IsObject(options) || !job->stream)
            return serve_fail(error, 400, "invalid_value", "stream_options",
                              "stream_options must be an object, and needs stream: true");
        if (!serve_json_bool(options, "include_usage", &job->include_usage, error))
            return false;
    }
    return read_sampling(server->options, body, job, error) && read_stops(body, job, error) &&
           read_logprobs(body, job, error);
}

static bool find_document(serve_server *server, const char *owner, const cJSON *body, serve_job *job,
                          serve_error *error)
{
    const char *id = NULL;
    if (!serve_json_string(body, "document", 64, &id, error))
        return false;
    return id == NULL || (serve_documents_find(server->documents, owner, id, &job->document, error) &&
                          serve_document_ready(server->documents, job->document, error));
}

/* Prompt and answer into the model's context: a prompt that does not fit is refused, an answer is cut. */
static bool fit(const serve_server *server, serve_job *job, serve_error *error)
{
    const uint64_t context = server->model.train_context,
                   before = job->document != NULL ? job->document->num_tokens : 0, prompt = before + job->num_prompt;
    if (job->num_prompt == 0)
        return serve_fail(error, 400, "invalid_value", job->chat ? "messages" : "prompt", "the prompt has no tokens");
    if (prompt >= context)
        return serve_fail(error, 400, "context_length_exceeded", job->chat ? "messages" : "prompt",
                          "the prompt has %llu tokens%s; this model's context ends at %llu", (unsigned long long)prompt,
                          before != 0 ? ", those of the document included" : "", (unsigned long long)context);
    if (job->max_tokens > context - prompt)
        job->max_tokens = context - prompt;
    return true;
}

bool serve_request_job(serve_server *server, const char *owner, bool chat, const cJSON *body, serve_job **out,
                       serve_error *error)
{
    serve_job *job = serve_job_new();
    if (job == NULL)
        return serve_fail(error, 503, "no_memory", NULL, "no memory for a request");
    unsigned char random[12];
    token_list prompt = {NULL, 0};
    job->chat = chat;
    job->model = server->model_id;
    job->created = (int64_t)time(NULL);
    job->deadline = cli_now() + server->options->timeout;
    bool ok = read_options(server, body, job, error) && find_document(server, owner, body, job, error) &&
              (chat ? render_chat : render_text)(server->host, body, job->document != NULL, &prompt, error);
    job->prompt = prompt.tokens;
    job->num_prompt = prompt.count;
    ok = ok && fit(server, job, error);
    if (ok && getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        ok = serve_fail(error, 500, "internal_error", NULL, "the system gives no random numbers");
    if (!ok) {
        serve_job_release(server->documents, job);
        return false;
    }
    int at = snprintf(job->id, sizeof job->id, "%s-", chat ? "chatcmpl" : "cmpl");
    for (size_t i = 0; i < sizeof random; i++)
        at += snprintf(job->id + at, sizeof job->id - (size_t)at, "%02x", random[i]);
    *out = job;
    return true;
}

bool serve_request_document(serve_server *server, const char *owner, const cJSON *body, serve_document **out,
                            serve_error *error)
{
    const char *name = "untitled", *text = NULL;
    double ratio = 1.0 / server->options->keep_ratio;
    if (!serve_json_string(body, "name", 255, &name, error) ||
        !serve_json_string(body, "text", SIZE_MAX, &text, error) ||
        !serve_json_number(body, "ratio", 1.0, 1000.0, false, &ratio, error))
        return false;
    for (const char *c = name; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return serve_fail(error, 400, "invalid_value", "name", "name has a control character");
    if (text == NULL || *text == '\0')
        return serve_fail(error, 400, text == NULL ? "missing" : "invalid_value", "text",
                          "text must be a string that is not empty");
    return serve_documents_add(server->documents, owner, *name != '\0' ? name : "untitled", text, 1.0 / ratio, out,
                               error);
}
