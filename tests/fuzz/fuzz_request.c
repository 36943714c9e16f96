/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_request.c - bodies of requests from nowhere to `akv serve`: parsed, and read as a chat, a completion and a document. There is
 * no model: a request that is good so far is refused where its text would become tokens.
 */
#include "fuzz.h"
#include "cli/serve/serve.h"

/* What request.c and reply.c ask of the rest of the server. */
bool serve_documents_find(serve_documents *documents, const char *owner, const char *id, serve_document **out,
                          serve_error *error)
{
    (void)documents, (void)owner, (void)out;
    return serve_fail(error, 404, "document_not_found", "document", "there is no document \"%.64s\"", id);
}

bool serve_document_ready(serve_documents *documents, serve_document *document, serve_error *error)
{
    (void)documents, (void)document, (void)error;
    return true;
}

void serve_document_release(serve_documents *documents, serve_document *document)
{
    (void)documents, (void)document;
}

bool serve_documents_add(serve_documents *documents, const char *owner, const char *name, const char *text,
                         double keep_ratio, serve_document **out, serve_error *error)
{
    (void)documents, (void)owner, (void)out;
    HOLDS(*name != '\0' && *text != '\0' && keep_ratio > 0.0 && keep_ratio <= 1.0, "a document that was not checked");
    return serve_fail(error, 429, "queue_full", NULL, "full");
}

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static serve_options options = {.keep_ratio = 0.1, .max_tokens = 4096, .timeout = 10.0};
    static serve_server server = {.options = &options, .model_id = "m"};
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
    if (body == NULL) {
        check_error(&error);
    } else {
        for (int kind = 0; kind < 3; kind++) {
            serve_job *job = NULL;
            serve_document *document = NULL;
            memset(&error, 0, sizeof error);
            const bool ok = kind < 2 ? serve_request_job(&server, "owner", kind == 0, body, &job, &error)
                                     : serve_request_document(&server, "owner", body, &document, &error);
            HOLDS(!ok, "a prompt without a model");
            check_error(&error);
        }
        cJSON_Delete(body);
    }
    free(copy);
    return 0;
}
