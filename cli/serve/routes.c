/* SPDX-License-Identifier: Apache-2.0 */
/* routes.c - which request goes where. */
#include "http.h"

#include <stdlib.h>
#include <string.h>

static enum MHD_Result refuse(serve_exchange *x, unsigned status, const char *code, const char *message)
{
    serve_error error;
    serve_fail(&error, status, code, NULL, "%s", message);
    return serve_send_error(x, &error);
}

static enum MHD_Result health(serve_exchange *x)
{
    cJSON *root = cJSON_CreateObject();
    const bool ending = atomic_load(&x->server->ending);
    cJSON_AddStringToObject(root, "status", ending ? "ending" : "ok");
    return serve_send_json(x, ending ? 503 : 200, root);
}

static enum MHD_Result page(serve_exchange *x)
{
    return serve_send_text(x, "text/html; charset=utf-8", serve_page, serve_page_bytes, MHD_RESPMEM_PERSISTENT);
}

static enum MHD_Result metrics(serve_exchange *x)
{
    char *text = serve_metrics(x->server);
    if (text == NULL)
        return refuse(x, 503, "no_memory", "no memory for the metrics");
    return serve_send_text(x, "text/plain; version=0.0.4; charset=utf-8", text, strlen(text), MHD_RESPMEM_MUST_FREE);
}

static cJSON *model_json(const serve_server *server)
{
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "id", server->model_id);
    cJSON_AddStringToObject(one, "object", "model");
    cJSON_AddNumberToObject(one, "created", (double)server->started);
    cJSON_AddStringToObject(one, "owned_by", "anchorkv");
    cJSON_AddStringToObject(one, "description", server->model.description);
    cJSON_AddNumberToObject(one, "context_length", server->model.train_context);
    return one;
}

static enum MHD_Result models(serve_exchange *x)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "object", "list");
    cJSON_AddItemToArray(cJSON_AddArrayToObject(root, "data"), model_json(x->server));
    return serve_send_json(x, 200, root);
}

static enum MHD_Result one_model(serve_exchange *x, const char *id)
{
    if (strcmp(id, x->server->model_id) != 0)
        return refuse(x, 404, "model_not_found", "there is no such model");
    return serve_send_json(x, 200, model_json(x->server));
}

/* NULL: the error is in *error. */
static cJSON *body_of(serve_exchange *x, serve_error *error)
{
    const char *type = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Type");
    /* what a form of another site's page can send without being asked for leave is not JSON by its type */
    if (type == NULL || strncasecmp(type, "application/json", 16) != 0 ||
        (type[16] != '\0' && type[16] != ';' && type[16] != ' ')) {
        serve_fail(error, 400, "invalid_content_type", NULL, "the Content-Type must be application/json");
        return NULL;
    }
    return serve_json_parse(x->body.data, x->body.bytes, error);
}

static enum MHD_Result complete(serve_exchange *x, bool chat)
{
    serve_error error = {0};
    serve_job *job = NULL;
    cJSON *body = body_of(x, &error);
    bool ok = body != NULL && serve_request_job(x->server, x->owner, chat, body, &job, &error);
    cJSON_Delete(body);
    serve_drop_body(x);
    ok = ok && serve_engine_submit(x->server->engine, job, &error);
    if (!ok) {
        serve_job_release(x->server->documents, job);
        return serve_send_error(x, &error);
    }
    if (!serve_wait(x, job, job->stream)) {
        serve_job_release(x->server->documents, job);
        return MHD_NO;
    }
    pthread_mutex_lock(&job->lock);
    const bool failed = job->error.status != 0 && !(job->stream && job->said);
    error = job->error;
    pthread_mutex_unlock(&job->lock);
    if (job->stream && !failed)
        return serve_send_stream(x, job);
    const enum MHD_Result result =
        failed ? serve_send_error(x, &error) : serve_send_json(x, 200, serve_reply_json(job));
    serve_job_release(x->server->documents, job);
    return result;
}

static enum MHD_Result add_document(serve_exchange *x)
{
    serve_error error = {0};
    serve_document *d = NULL;
    cJSON *body = body_of(x, &error);
    const bool ok = body != NULL && serve_request_document(x->server, x->owner, body, &d, &error);
    cJSON_Delete(body);
    serve_drop_body(x);
    if (!ok)
        return serve_send_error(x, &error);
    const enum MHD_Result result = serve_send_json(x, 202, serve_document_json(x->server->documents, d));
    serve_document_release(x->server->documents, d);
    return result;
}

static enum MHD_Result get_document(serve_exchange *x, const char *id)
{
    serve_error error = {0};
    serve_document *d = NULL;
    if (!serve_documents_find(x->server->documents, x->owner, id, &d, &error))
        return serve_send_error(x, &error);
    const enum MHD_Result result = serve_send_json(x, 200, serve_document_json(x->server->documents, d));
    serve_document_release(x->server->documents, d);
    return result;
}

static enum MHD_Result delete_document(serve_exchange *x, const char *id)
{
    serve_error error = {0};
    if (!serve_documents_delete(x->server->documents, x->owner, id, &error))
        return serve_send_error(x, &error);
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "id", id);
    cJSON_AddStringToObject(root, "object", "document");
    cJSON_AddBoolToObject(root, "deleted", true);
    return serve_send_json(x, 200, root);
}

enum MHD_Result serve_route(serve_exchange *x)
{
    static const char documents[] = "/v1/documents/", a_model[] = "/v1/models/";
    const bool get = strcmp(x->method, "GET") == 0 || strcmp(x->method, "HEAD") == 0,
               post = strcmp(x->method, "POST") == 0, del = strcmp(x->method, "DELETE") == 0;
    const char *path = x->path;
    bool known = true;
    if (strcmp(path, "/") == 0 && get)
        return page(x);
    if (strcmp(path, "/health") == 0 && get)
        return health(x);
    if (strcmp(path, "/metrics") == 0 && get)
        return metrics(x);
    if (strcmp(path, "/v1/models") == 0 && get)
        return models(x);
    if (strncmp(path, a_model, sizeof a_model - 1) == 0 && get)
        return one_model(x, path + sizeof a_model - 1);
    if (strcmp(path, "/v1/chat/completions") == 0 && post)
        return complete(x, true);
    if (strcmp(path, "/v1/completions") == 0 && post)
        return complete(x, false);
    if (strcmp(path, "/v1/documents") == 0) {
        if (post)
            return add_document(x);
        if (get)
            return serve_send_json(x, 200, serve_documents_json(x->server->documents, x->owner));
    } else if (strncmp(path, documents, sizeof documents - 1) == 0) {
        const char *id = path + sizeof documents - 1;
        if (get)
            return get_document(x, id);
        if (del)
            return delete_document(x, id);
    } else {
        static const char *const paths[] = {
            "/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions"};
        known = false;
        for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
            known = known || strcmp(path, paths[i]) == 0;
    }
    return known ? refuse(x, 405, "method_not_allowed", "this path does not take that method")
                 : refuse(x, 404, "not_found", "there is nothing at this path");
}
