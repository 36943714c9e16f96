/* SPDX-License-Identifier: Apache-2.0 */
/* json.c - JSON from outside: limits before it is parsed, types and ranges after. */
#include "serve.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A value costs 80 bytes and more once parsed: a body of commas must not become a gigabyte. */
enum { MAX_DEPTH = 32, MAX_VALUES = 50000 };

static const char *type_of(unsigned status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

bool (serve_fail)(serve_error *error, unsigned status, const char *code, const char *param, const char *format, ...)
{
    va_list args;
    memset(error, 0, sizeof *error);
    error->status = status;
    error->code = code;
    snprintf(error->param, sizeof error->param, "%s", param != NULL ? param : "");
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    return false;
}

bool (serve_fail_diag)(serve_error *error, akv_status status, const akv_diag *diag)
{
    const char *message = diag->status == status && diag->message[0] != '\0' ? diag->message : akv_status_str(status);
    switch (status) {
    case AKV_E_INVALID_ARGUMENT:
    case AKV_E_UNSUPPORTED:
    case AKV_E_INFEASIBLE:
        return serve_fail(error, 400, "unsupported", NULL, "%s", message);
    case AKV_E_NO_SPACE:
        return serve_fail(error, 503, "no_space", NULL, "%s", message);
    case AKV_E_NO_MEMORY:
        return serve_fail(error, 503, "no_memory", NULL, "%s", message);
    default:
        return serve_fail(error, 500, "internal_error", NULL, "%s", message);
    }
}

cJSON *serve_error_json(const serve_error *error)
{
    cJSON *root = cJSON_CreateObject(), *e = cJSON_AddObjectToObject(root, "error");
    /* a message may quote what was sent, cut in the middle of a character */
    cJSON_AddItemToObject(e, "message", serve_json_lossy(error->message, strlen(error->message)));
    cJSON_AddStringToObject(e, "type", error->type != NULL ? error->type : type_of(error->status));
    if (error->param[0] != '\0')
        cJSON_AddStringToObject(e, "param", error->param);
    else
        cJSON_AddNullToObject(e, "param");
    if (error->code != NULL)
        cJSON_AddStringToObject(e, "code", error->code);
    else
        cJSON_AddNullToObject(e, "code");
    return root;
}

/* ------------------------------------------------------------------------------------------------------------- text */

size_t serve_utf8_whole(const char *text, size_t bytes)
{
    size_t at = 0;
    while (at < bytes) {
        at += cli_utf8_prefix(text + at, bytes - at);
        if (at == bytes)
            break;
        /* a character that is not over yet: its lead byte, and nothing but continuations so far */
        const unsigned char lead = (unsigned char)text[at];
        const size_t needs = lead >= 0xf0 && lead <= 0xf4  ? 4
                             : lead >= 0xe0 && lead < 0xf0 ? 3
                             : lead >= 0xc2 && lead < 0xe0 ? 2
                                                           : 1;
        size_t have = 1;
        while (have < needs && at + have < bytes && ((unsigned char)text[at + have] & 0xc0) == 0x80)
            have++;
        if (have < needs && at + have == bytes)
            break;
        at++;
    }
    return at;
}

cJSON *serve_json_lossy(const char *text, size_t bytes)
{
    cli_buffer out = {NULL, 0, 0};
    bool ok = true;
    for (size_t at = 0; ok && at < bytes;) {
        const size_t good = cli_utf8_prefix(text + at, bytes - at);
        ok = cli_buffer_add(&out, text + at, good);
        at += good;
        if (ok && at < bytes) {
            ok = cli_buffer_add(&out, "\xef\xbf\xbd", 3);
            at++;
        }
    }
    cJSON *string = ok && cli_buffer_add(&out, "", 1) ? cJSON_CreateString(out.data) : NULL;
    cli_buffer_free(&out);
    return string;
}

/* ------------------------------------------------------------------------------------------------------------ parse */

static bool check(const char *text, size_t bytes, serve_error *error)
{
    unsigned depth = 0, values = 0;
    bool inside = false;
    if (cli_utf8_prefix(text, bytes) != bytes)
        return serve_fail(error, 400, "invalid_utf8", NULL, "the body is not UTF-8 from byte %zu on",
                          cli_utf8_prefix(text, bytes));
    for (size_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '\0')
            return serve_fail(error, 400, "invalid_json", NULL, "the body has a zero byte at %zu", i);
        if (inside && c == '\\') {
            if (bytes - i > 5 && memcmp(text + i, "\\u0000", 6) == 0)
                return serve_fail(error, 400, "invalid_json", NULL, "the text with \\u0000 at byte %zu cannot be used",
                                  i);
            i++; /* an escaped quote ends nothing */
            if (i < bytes && text[i] == '\0')
                return serve_fail(error, 400, "invalid_json", NULL, "the body has a zero byte at %zu", i);
        } else if (c == '"') {
            inside = !inside;
        } else if (!inside && (c == '{' || c == '[')) {
            values++;
            if (++depth > MAX_DEPTH)
                return serve_fail(error, 400, "invalid_json", NULL, "the body is nested deeper than %d levels",
                                  MAX_DEPTH);
        } else if (!inside && (c == '}' || c == ']')) {
            depth -= depth > 0;
        } else if (!inside && (c == ',' || c == ':')) {
            values++;
        }
        if (values > MAX_VALUES)
            return serve_fail(error, 400, "invalid_json", NULL, "the body has more than %d values", MAX_VALUES);
    }
    return true;
}

cJSON *serve_json_parse(const char *text, size_t bytes, serve_error *error)
{
    if (bytes == 0) {
        serve_fail(error, 400, "invalid_json", NULL, "the body is empty; JSON is expected");
        return NULL;
    }
    if (!check(text, bytes, error))
        return NULL;
    cli_buffer copy = {NULL, 0, 0}; /* with a zero behind it, so that what follows the value is seen */
    if (!cli_buffer_add(&copy, text, bytes) || !cli_buffer_add(&copy, "", 1)) {
        cli_buffer_free(&copy);
        serve_fail(error, 503, "no_memory", NULL, "no memory for the request");
        return NULL;
    }
    const char *end = copy.data;
    cJSON *root = cJSON_ParseWithLengthOpts(copy.data, copy.bytes, &end, 1);
    if (root == NULL)
        serve_fail(error, 400, "invalid_json", NULL, "the body is not JSON; the error is near byte %zu",
                   (size_t)(end - copy.data));
    else if (!cJSON_IsObject(root)) {
        serve_fail(error, 400, "invalid_json", NULL, "the body must be a JSON object");
        cJSON_Delete(root);
        root = NULL;
    }
    cli_buffer_free(&copy);
    return root;
}

/* ---------------------------------------------------------------------------------------------------------- members */

static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return item == NULL || cJSON_IsNull(item) ? NULL : item;
}

bool serve_json_bool(const cJSON *object, const char *name, bool *out, serve_error *error)
{
    const cJSON *item = member(object, name);
    if (item != NULL && !cJSON_IsBool(item))
        return serve_fail(error, 400, "invalid_type", name, "%s must be true or false", name);
    if (item != NULL)
        *out = cJSON_IsTrue(item);
    return true;
}

bool serve_json_number(const cJSON *object, const char *name, double min, double max, bool whole, double *out,
                       serve_error *error)
{
    const cJSON *item = member(object, name);
    if (item == NULL)
        return true;
    if (!cJSON_IsNumber(item))
        return serve_fail(error, 400, "invalid_type", name, "%s must be a number", name);
    const double value = item->valuedouble;
    if (!isfinite(value) || value < min || value > max || (whole && value != floor(value)))
        return serve_fail(error, 400, "invalid_value", name, "%s must be a %snumber from %.16g to %.16g", name,
                          whole ? "whole " : "", min, max);
    *out = value;
    return true;
}

bool serve_json_string(const cJSON *object, const char *name, size_t max_bytes, const char **out, serve_error *error)
{
    const cJSON *item = member(object, name);
    if (item == NULL)
        return true;
    if (!cJSON_IsString(item))
        return serve_fail(error, 400, "invalid_type", name, "%s must be a string", name);
    if (strlen(item->valuestring) > max_bytes)
        return serve_fail(error, 400, "invalid_value", name, "%s is longer than %zu bytes", name, max_bytes);
    *out = item->valuestring;
    return true;
}
