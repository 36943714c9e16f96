/* SPDX-License-Identifier: Apache-2.0 */
/* shares.c - the file of `akv calibrate`, read, written, and turned into the layers' shares of a budget. */
#include "shares.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "anchorkv-layer-errors"

static void hash_text(const cli_session *s, char out[33])
{
    const uint64_t *hash = s->model.fingerprint.hash;
    snprintf(out, 33, "%016" PRIx64 "%016" PRIx64, hash[0], hash[1]);
}

/* ------------------------------------------------------------------------------------------------------------- read */

static const char *text_of(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    return text != NULL ? text : "";
}

static bool read_ratios(const cJSON *list, cli_shares *out)
{
    const int n = cJSON_GetArraySize(list);
    if (!cJSON_IsArray(list) || n < 1 || n > CLI_SHARES_MAX_RATIOS)
        return false;
    for (int i = 0; i < n; i++) {
        const cJSON *item = cJSON_GetArrayItem(list, i);
        if (!cJSON_IsNumber(item) || !(item->valuedouble > 1.0) || (i > 0 && !(item->valuedouble > out->ratios[i - 1])))
            return false;
        out->ratios[i] = item->valuedouble;
    }
    out->num_ratios = (uint32_t)n;
    return true;
}

static bool read_errors(const cJSON *rows, uint32_t num_layers, cli_shares *out)
{
    if (!cJSON_IsArray(rows) || cJSON_GetArraySize(rows) != (int)out->num_ratios)
        return false;
    const cJSON *row;
    double *at = out->errors;
    cJSON_ArrayForEach(row, rows)
    {
        const cJSON *item;
        uint32_t layer = 0;
        if (!cJSON_IsArray(row) || cJSON_GetArraySize(row) != (int)num_layers)
            return false;
        cJSON_ArrayForEach(item, row)
        {
            const bool number = cJSON_IsNumber(item) && item->valuedouble >= 0.0 && isfinite(item->valuedouble);
            if (!number && !cJSON_IsNull(item))
                return false;
            *at = number ? item->valuedouble : -1.0;
            if ((*at < 0.0) != (out->errors[layer++] < 0.0)) /* the same layers in every row */
                return false;
            at++;
        }
    }
    return true;
}

static int check_model(const char *path, const cJSON *root, const cli_session *s)
{
    char mine[33];
    hash_text(s, mine);
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    if (strcmp(text_of(model, "hash"), mine) == 0)
        return CLI_OK;
    return cli_fail(CLI_WRONG_MODEL, "%s was measured on another model (%s); run `akv calibrate` with this one", path,
                    cli_printable(text_of(model, "description")));
}

static int parse(const char *path, const cJSON *root, const cli_session *s, cli_shares *out)
{
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "version");
    if (strcmp(text_of(root, "format"), FORMAT) != 0)
        return cli_fail(CLI_BAD_INPUT, "%s is no file of `akv calibrate`", path);
    if (!cJSON_IsNumber(version) || version->valuedouble != 1.0)
        return cli_fail(CLI_BAD_INPUT, "%s has a version that this akv does not know; it knows 1", path);
    const int code = check_model(path, root, s);
    if (code != CLI_OK)
        return code;
    if (!cli_parse_profile(text_of(root, "profile"), &out->profile))
        return CLI_BAD_INPUT;
    const uint32_t num_layers = s->model.num_layers;
    if (!read_ratios(cJSON_GetObjectItemCaseSensitive(root, "ratios"), out))
        return cli_fail(CLI_BAD_INPUT, "%s: \"ratios\" must be 1 to %d rising numbers above 1", path,
                        CLI_SHARES_MAX_RATIOS);
    out->errors = calloc((size_t)out->num_ratios * num_layers, sizeof *out->errors);
    if (out->errors == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the errors of %u layers", num_layers);
    if (!read_errors(cJSON_GetObjectItemCaseSensitive(root, "errors"), num_layers, out))
        return cli_fail(CLI_BAD_INPUT, "%s: \"errors\" must be %u rows of %u numbers, none negative", path,
                        out->num_ratios, num_layers);
    out->num_layers = num_layers;
    return CLI_OK;
}

int cli_shares_load(const char *path, const cli_session *session, cli_shares *out)
{
    cli_buffer text = {NULL, 0, 0};
    memset(out, 0, sizeof *out);
    int code = cli_read_texts(&path, 1, &text);
    if (code != CLI_OK)
        return code;
    cJSON *root = cJSON_ParseWithLength(text.data, text.bytes);
    code = root != NULL ? parse(path, root, session, out) : cli_fail(CLI_BAD_INPUT, "%s is no JSON", path);
    cJSON_Delete(root);
    cli_buffer_free(&text);
    if (code != CLI_OK)
        cli_shares_free(out);
    return code;
}

/* ------------------------------------------------------------------------------------------------------------ write */

int cli_shares_save(const char *path, const cli_session *session, const cli_shares *shares, uint64_t tokens,
                    uint64_t pieces, uint64_t continuation)
{
    char hash[33];
    hash_text(session, hash);
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "format", FORMAT);
    cJSON_AddNumberToObject(root, "version", 1);
    cJSON *model = cJSON_AddObjectToObject(root, "model");
    cJSON_AddStringToObject(model, "hash", hash);
    const char *name = session->model.name[0] != '\0' ? session->model.name : session->model.description;
    cli_json_text(model, "description", name, strlen(name));
    cJSON_AddNumberToObject(model, "num_layers", shares->num_layers);
    cJSON_AddStringToObject(root, "profile", cli_profile_name(shares->profile));
    cJSON_AddNumberToObject(root, "tokens", (double)tokens);
    cJSON_AddNumberToObject(root, "pieces", (double)pieces);
    cJSON_AddNumberToObject(root, "continuation", (double)continuation);
    cJSON_AddItemToObject(root, "ratios", cJSON_CreateDoubleArray(shares->ratios, (int)shares->num_ratios));
    cJSON *rows = cJSON_AddArrayToObject(root, "errors");
    for (uint32_t r = 0; r < shares->num_ratios; r++) {
        cJSON *row = cJSON_CreateArray();
        for (uint32_t l = 0; l < shares->num_layers; l++) {
            const double e = shares->errors[(size_t)r * shares->num_layers + l];
            cJSON_AddItemToArray(row, e < 0.0 ? cJSON_CreateNull() : cJSON_CreateNumber(e));
        }
        cJSON_AddItemToArray(rows, row);
    }
    return cli_json_write(root, path);
}

/* ------------------------------------------------------------------------------------------------------------ apply */

akv_status cli_shares_apply(const cli_shares *shares, akv_llama *host, const akv_config *config, akv_diag *diag)
{
    if (shares->num_layers == 0 || shares->profile != config->profile || !(config->keep_ratio < 1.0))
        return akv_llama_set_layer_shares(host, NULL, 0, diag);
    double *split = calloc(shares->num_layers, sizeof *split);
    if (split == NULL) {
        diag->status = AKV_E_NO_MEMORY;
        snprintf(diag->message, sizeof diag->message, "no memory for the shares of %u layers", shares->num_layers);
        return AKV_E_NO_MEMORY;
    }
    akv_status status = akv_llama_solve_shares(shares->ratios, shares->errors, shares->num_ratios, shares->num_layers,
                                               config->keep_ratio, split, diag);
    if (status == AKV_OK)
        status = akv_llama_set_layer_shares(host, split, shares->num_layers, diag);
    free(split);
    return status;
}

void cli_shares_free(cli_shares *shares)
{
    free(shares->errors);
    memset(shares, 0, sizeof *shares);
}
