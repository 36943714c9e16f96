/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_request.c - bodies of requests from nowhere to `akv serve`: parsed, and read as a chat, a completion and a
 * document; what becomes a job is answered with the same bytes, whole and as a stream. What is behind is fake_server.c.
 */
#include "fake_server.h"
#include "fuzz.h"

static void check_error(const serve_error *error)
{
    HOLDS(error->status >= 400 && error->status < 600 && error->code != NULL && error->message[0] != '\0',
          "status %u without a reason", error->status);
    cJSON *root = serve_error_json(error);
    char *text = cJSON_PrintUnformatted(root);
    HOLDS(text != NULL && cli_utf8_prefix(text, strlen(text)) == strlen(text), "an error that is no UTF-8");
    cJSON_free(text);
    cJSON_Delete(root);
}

/* Each event of a stream is one line of JSON, or [DONE]. */
static void check_stream(const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        const char *end = memmem(text + at, bytes - at, "\n\n", 2);
        HOLDS(end != NULL && bytes - at > 8 && memcmp(text + at, "data: ", 6) == 0, "no event at %zu", at);
        const char *json = text + at + 6;
        if (*json == '{')
            cJSON_Delete(fake_parse(json, (size_t)(end - json)));
        else
            HOLDS((size_t)(end - json) == 6 && memcmp(json, "[DONE]", 6) == 0, "no event at %zu", at);
        at = (size_t)(end - text) + 2;
    }
}

static void answer(serve_job *job)
{
    serve_error error = {0};
    if (!serve_engine_submit(NULL, job, &error)) {
        check_error(&error);
    } else if (job->stream) {
        check_stream(job->out.data, job->out.bytes);
    } else if (job->error.status == 0) {
        cJSON *root = serve_reply_json(job);
        char *text = cJSON_PrintUnformatted(root);
        HOLDS(text != NULL, "no memory");
        cJSON_Delete(fake_parse(text, strlen(text)));
        cJSON_free(text);
        cJSON_Delete(root);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static serve_options options = {.keep_ratio = 0.1, .max_tokens = 4096, .timeout = 10.0};
    static serve_server server = {.options = &options, .model_id = "m", .model.train_context = 2048};
    serve_error error = {0};
    if (size > 1u << 17)
        return 0;
    uint8_t *copy = fuzz_copy(data, size);
    /* any bytes can be said once their characters are whole */
    const size_t whole = serve_utf8_whole((const char *)copy, size);
    HOLDS(whole <= size && size - whole < 4, "%zu of %zu bytes", whole, size);
    cJSON *lossy = serve_json_lossy((const char *)copy, size);
    const char *said = cJSON_GetStringValue(lossy);
    HOLDS(said != NULL && cli_utf8_prefix(said, strlen(said)) == strlen(said), "no UTF-8");
    cJSON_Delete(lossy);

    cJSON *body = serve_json_parse((const char *)copy, size, &error);
    fake_say((const char *)copy, size < 64 ? size : 64, 1 + size % 9);
    if (body == NULL)
        check_error(&error);
    for (int kind = 0; body != NULL && kind < 3; kind++) {
        serve_job *job = NULL;
        serve_document *document = NULL;
        memset(&error, 0, sizeof error);
        const bool ok = kind < 2 ? serve_request_job(&server, "owner", kind == 0, body, &job, &error)
                                 : serve_request_document(&server, "owner", body, &document, &error);
        if (!ok)
            check_error(&error);
        HOLDS(ok == (kind < 2 ? job != NULL : document != NULL), "neither a result nor an error");
        if (job != NULL) {
            fake_check_job(job, &options);
            answer(job);
        }
        serve_job_release(NULL, job);
        serve_document_release(NULL, document);
    }
    cJSON_Delete(body);
    fake_check_balance();
    free(copy);
    return 0;
}
