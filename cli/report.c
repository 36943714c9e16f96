/* SPDX-License-Identifier: Apache-2.0 */
/* report.c - the plan that was really applied: for people on standard error, for programs as JSON. */
#include "cli.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct kind {
    const char *key;
    const char *text;
    size_t offset;
} kind;

static const kind kinds[] = {
    {"anchors", "anchors", offsetof(akv_bytes, anchors)},
    {"coefficients", "coefficients", offsetof(akv_bytes, coefficients)},
    {"index", "anchor indices", offsetof(akv_bytes, index)},
    {"level_maps", "level maps", offsetof(akv_bytes, level_maps)},
    {"residuals", "residuals", offsetof(akv_bytes, residuals)},
    {"model", "means, bases, tables", offsetof(akv_bytes, model)},
    {"positions", "positions", offsetof(akv_bytes, positions)},
    {"header", "headers, padding", offsetof(akv_bytes, header)},
    {"object", "objects in memory", offsetof(akv_bytes, object)},
    {"dense", "kept dense", offsetof(akv_bytes, dense)},
};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

static uint64_t kind_bytes(const akv_bytes *bytes, size_t i)
{
    uint64_t value;
    memcpy(&value, (const char *)bytes + kinds[i].offset, sizeof value);
    return value;
}

static void add_bytes(akv_bytes *sum, const akv_bytes *bytes)
{
    sum->total += bytes->total;
    for (size_t i = 0; i < NUM_KINDS; i++) {
        uint64_t value = kind_bytes(sum, i) + kind_bytes(bytes, i);
        memcpy((char *)sum + kinds[i].offset, &value, sizeof value);
    }
}

uint64_t cli_layer_dense_bytes(const cli_report *r, const cli_layer_report *layer)
{
    const akv_segment_info *s = &layer->segment;
    if (s->dense_reason != AKV_DENSE_EVICTED)
        return s->dense_bytes;
    return r->tokens * s->shape.num_kv_heads * ((uint64_t)s->shape.head_dim_k + s->shape.head_dim_v) * 2;
}

void cli_report_sum(cli_report *r)
{
    memset(&r->bytes, 0, sizeof r->bytes);
    r->dense_bytes = r->budget_bytes = 0;
    r->hosted_layers = 0;
    for (uint32_t i = 0; i < r->num_layers; i++) {
        const cli_layer_report *layer = &r->layers[i];
        if (!layer->hosted)
            continue;
        r->hosted_layers++;
        r->dense_bytes += cli_layer_dense_bytes(r, layer);
        r->budget_bytes += layer->segment.budget_bytes;
        add_bytes(&r->bytes, &layer->segment.bytes);
    }
}

static double ratio_of(const cli_report *r)
{
    return r->bytes.total == 0 ? 1.0 : (double)r->dense_bytes / (double)r->bytes.total;
}

/* ---------------------------------------------------------------------------------------------------------- people */

void cli_print_bytes_by_kind(void *stream, const akv_bytes *bytes)
{
    for (size_t i = 0; i < NUM_KINDS; i++) {
        uint64_t value = kind_bytes(bytes, i);
        if (value != 0)
            fprintf(stream, "  %-20s %12s  %5.1f %%\n", kinds[i].text, cli_bytes(value),
                    100.0 * (double)value / (double)bytes->total);
    }
}

static uint32_t count_dense(const cli_report *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->num_layers; i++)
        n += r->layers[i].hosted && r->layers[i].segment.kind == AKV_SEGMENT_DENSE &&
             r->layers[i].segment.dense_reason != AKV_DENSE_EVICTED;
    return n;
}

static void print_shares(const cli_report *r)
{
    double least = 1e30, most = 0.0;
    for (uint32_t i = 0; i < r->num_layers; i++) {
        const cli_layer_report *layer = &r->layers[i];
        const uint64_t dense = layer->hosted ? cli_layer_dense_bytes(r, layer) : 0;
        if (dense == 0)
            continue;
        const double keep = (double)layer->segment.budget_bytes / (double)dense / r->keep_ratio;
        least = keep < least ? keep : least;
        most = keep > most ? keep : most;
    }
    fprintf(stderr, "shares       %s: layers get %.2f to %.2f of the mean budget", r->shares, least, most);
    if (r->share_strength < 1.0)
        fprintf(stderr, " (%.0f %% of what the file asks; the smallest would not hold its fixed part)",
                100.0 * r->share_strength);
    fputc('\n', stderr);
}

static void print_answer_speed(const cli_report *r)
{
    uint64_t tokens = 0;
    double seconds = 0.0;
    for (size_t i = 0; i < r->num_answers; i++) {
        tokens += r->answers[i].answer_tokens;
        seconds += r->answers[i].decode_seconds;
    }
    if (tokens != 0 && seconds > 0.0)
        fprintf(stderr, "answers      %" PRIu64 " tokens in %.2f s, %.1f tokens/s\n", tokens, seconds,
                (double)tokens / seconds);
}

void cli_report_print(const cli_report *r)
{
    fprintf(stderr, "--- what was done ---\n");
    fprintf(stderr, "model        %s\n", cli_printable(r->model_description));
    fprintf(stderr, "document     %" PRIu64 " tokens, %" PRIu64 " evaluated now\n", r->tokens,
            r->document_tokens_evaluated);
    if (r->layers == NULL) {
        fprintf(stderr, "method       %s, all layers uncompressed, cache %s\n", r->method, cli_bytes(r->dense_bytes));
    } else {
        uint32_t dense = count_dense(r);
        fprintf(stderr, "method       %s%s%s\n", r->method, r->profile[0] != '\0' ? ", profile " : "", r->profile);
        fprintf(stderr, "layers       %u hosted, %u native", r->hosted_layers, r->num_layers - r->hosted_layers);
        if (dense != 0)
            fprintf(stderr, " (%u of the hosted kept dense)", dense);
        fputc('\n', stderr);
        if (r->shares != NULL)
            print_shares(r);
        fprintf(stderr, "dense cache  %s\n", cli_bytes(r->dense_bytes));
        fprintf(stderr, "compressed   %s", cli_bytes(r->bytes.total));
        if (r->budget_bytes != 0)
            fprintf(stderr, " of a budget of %s", cli_bytes(r->budget_bytes));
        fprintf(stderr, ": %.2fx smaller\n", ratio_of(r));
        cli_print_bytes_by_kind(stderr, &r->bytes);
        if (r->native_bytes != 0)
            fprintf(stderr, "native state %s (layers left to the engine, not counted above)\n",
                    cli_bytes(r->native_bytes));
    }
    if (r->file_bytes != 0)
        fprintf(stderr, "file         %s\n", cli_bytes(r->file_bytes));
    if (r->rss_before != 0 && r->rss_after != 0)
        fprintf(stderr, "memory       %s resident before the dense cache was freed, %s after\n",
                cli_bytes(r->rss_before), cli_bytes(r->rss_after));
    else if (r->rss_end != 0)
        fprintf(stderr, "memory       %s resident\n", cli_bytes(r->rss_end));
    if (strcmp(r->command, "repack") == 0) /* no model was run */
        return;
    fprintf(stderr, "times        load %.2f s", r->load_seconds);
    if (r->document_tokens_evaluated != 0)
        fprintf(stderr, ", prefill %.2f s (%.1f tokens/s)", r->prefill_seconds,
                r->prefill_seconds > 0.0 ? (double)r->document_tokens_evaluated / r->prefill_seconds : 0.0);
    if (r->compress_seconds > 0.0)
        fprintf(stderr, ", compress %.2f s", r->compress_seconds);
    if (r->decode_seconds > 0.0)
        fprintf(stderr, ", decode %.2f s (%.2f s of it attention)", r->decode_seconds, r->attend_seconds);
    fputc('\n', stderr);
    print_answer_speed(r);
}

/* ------------------------------------------------------------------------------------------------------------ JSON */

static void put_u64(cJSON *object, const char *key, uint64_t value)
{
    cJSON_AddNumberToObject(object, key, (double)value);
}

cJSON *cli_bytes_json(const akv_bytes *bytes)
{
    cJSON *object = cJSON_CreateObject();
    put_u64(object, "total", bytes->total);
    for (size_t i = 0; i < NUM_KINDS; i++)
        put_u64(object, kinds[i].key, kind_bytes(bytes, i));
    return object;
}

static const char *dense_reason(akv_dense_reason reason)
{
    static const char *const names[] = {"", "requested", "dense fits the budget", "shorter than the window", "evicted"};
    return names[(unsigned)reason <= AKV_DENSE_EVICTED ? reason : 0];
}

static cJSON *layer_json(const cli_report *r, uint32_t index)
{
    const cli_layer_report *layer = &r->layers[index];
    const akv_segment_info *s = &layer->segment;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "layer", index);
    if (!layer->hosted) {
        cJSON_AddStringToObject(object, "kind", layer->native_kind);
        return object;
    }
    cJSON_AddStringToObject(object, "kind", s->kind == AKV_SEGMENT_DENSE ? "dense" : "compressed");
    if (s->kind == AKV_SEGMENT_DENSE)
        cJSON_AddStringToObject(object, "dense_reason", dense_reason(s->dense_reason));
    else
        cJSON_AddStringToObject(object, "profile", cli_profile_name(s->profile));
    put_u64(object, "tokens", s->shape.num_tokens);
    cJSON_AddNumberToObject(object, "num_kv_heads", s->shape.num_kv_heads);
    cJSON_AddNumberToObject(object, "gqa_group", s->shape.gqa_group);
    cJSON_AddNumberToObject(object, "head_dim_k", s->shape.head_dim_k);
    cJSON_AddNumberToObject(object, "head_dim_v", s->shape.head_dim_v);
    cJSON_AddNumberToObject(object, "num_anchors", s->num_anchors);
    put_u64(object, "residuals_k", s->residuals_k);
    put_u64(object, "residuals_v", s->residuals_v);
    put_u64(object, "dense_bytes", cli_layer_dense_bytes(r, layer));
    put_u64(object, "budget_bytes", s->budget_bytes);
    cJSON_AddItemToObject(object, "bytes", cli_bytes_json(&s->bytes));
    cJSON_AddNumberToObject(object, "seconds", layer->seconds);
    return object;
}

/* JSON is UTF-8; an answer that was cut inside a character, or a model that wrote nonsense, must not break it. */
void cli_json_text(cJSON *object, const char *key, const char *text, size_t bytes)
{
    cli_buffer clean = {NULL, 0, 0};
    bool ok = cli_buffer_add(&clean, "", 0);
    while (ok && bytes != 0) {
        size_t good = cli_utf8_prefix(text, bytes);
        ok = cli_buffer_add(&clean, text, good);
        text += good;
        bytes -= good;
        if (ok && bytes != 0) {
            ok = cli_buffer_add(&clean, "\xef\xbf\xbd", 3);
            text++;
            bytes--;
        }
    }
    cJSON_AddStringToObject(object, key, ok ? clean.data : "");
    cli_buffer_free(&clean);
}

static cJSON *answer_json(const cli_answer *a)
{
    cJSON *object = cJSON_CreateObject();
    cli_json_text(object, "question", a->question, strlen(a->question));
    cli_json_text(object, "text", a->text.data != NULL ? a->text.data : "", a->text.bytes);
    put_u64(object, "question_tokens", a->question_tokens);
    put_u64(object, "answer_tokens", a->answer_tokens);
    cJSON_AddNumberToObject(object, "prompt_seconds", a->prompt_seconds);
    cJSON_AddNumberToObject(object, "decode_seconds", a->decode_seconds);
    cJSON_AddNumberToObject(object, "tokens_per_second",
                            a->decode_seconds > 0.0 ? (double)a->answer_tokens / a->decode_seconds : 0.0);
    cJSON_AddStringToObject(object, "stopped", a->stopped);
    return object;
}

static cJSON *report_json(const cli_report *r)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", akv_version());
    cJSON_AddStringToObject(root, "command", r->command);
    cli_json_text(root, "model", r->model_description, strlen(r->model_description));
    if (r->model_path != NULL)
        cli_json_text(root, "model_path", r->model_path, strlen(r->model_path));
    if (r->document_path != NULL)
        cli_json_text(root, "document_path", r->document_path, strlen(r->document_path));
    cJSON_AddStringToObject(root, "method", r->method);
    cJSON_AddStringToObject(root, "profile", r->profile);
    put_u64(root, "tokens", r->tokens);
    put_u64(root, "document_tokens_evaluated", r->document_tokens_evaluated);
    cJSON_AddNumberToObject(root, "keep_ratio", r->keep_ratio);
    cJSON_AddNumberToObject(root, "ratio", ratio_of(r));
    if (r->shares != NULL) {
        cli_json_text(root, "shares", r->shares, strlen(r->shares));
        cJSON_AddNumberToObject(root, "share_strength", r->share_strength);
    }
    put_u64(root, "seed", r->seed);
    put_u64(root, "dense_bytes", r->dense_bytes);
    put_u64(root, "compressed_bytes", r->bytes.total != 0 ? r->bytes.total : r->dense_bytes);
    put_u64(root, "budget_bytes", r->budget_bytes != 0 ? r->budget_bytes : r->dense_bytes);
    put_u64(root, "native_bytes", r->native_bytes);
    put_u64(root, "file_bytes", r->file_bytes);
    cJSON_AddItemToObject(root, "bytes", cli_bytes_json(&r->bytes));
    put_u64(root, "rss_before", r->rss_before);
    put_u64(root, "rss_after", r->rss_after);
    put_u64(root, "rss_end", r->rss_end);
    cJSON_AddNumberToObject(root, "threads", r->threads);
    cJSON_AddNumberToObject(root, "load_seconds", r->load_seconds);
    cJSON_AddNumberToObject(root, "prefill_seconds", r->prefill_seconds);
    cJSON_AddNumberToObject(root, "compress_seconds", r->compress_seconds);
    cJSON_AddNumberToObject(root, "decode_seconds", r->decode_seconds);
    cJSON_AddNumberToObject(root, "attend_seconds", r->attend_seconds);
    put_u64(root, "decode_tokens", r->decode_tokens);
    put_u64(root, "tail_moves", r->tail_moves);
    if (strcmp(r->command, "repack") == 0) {
        cJSON_AddNumberToObject(root, "residual_energy_lost_k", r->residual_energy_lost[0]);
        cJSON_AddNumberToObject(root, "residual_energy_lost_v", r->residual_energy_lost[1]);
    }
    cJSON_AddNumberToObject(root, "hosted_layers", r->hosted_layers);
    cJSON_AddNumberToObject(root, "native_layers", r->layers == NULL ? 0 : r->num_layers - r->hosted_layers);
    cJSON *layers = cJSON_AddArrayToObject(root, "layers");
    for (uint32_t i = 0; r->layers != NULL && i < r->num_layers; i++)
        cJSON_AddItemToArray(layers, layer_json(r, i));
    cJSON *answers = cJSON_AddArrayToObject(root, "answers");
    for (size_t i = 0; i < r->num_answers; i++)
        cJSON_AddItemToArray(answers, answer_json(&r->answers[i]));
    return root;
}

int cli_json_write(cJSON *root, const char *path)
{
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    size_t bytes = text == NULL ? 0 : strlen(text);
    if (text == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the JSON report");
    text[bytes] = '\n'; /* in place of the terminator: the file ends with a line end */
    int code = cli_write_file(path, text, bytes + 1);
    cJSON_free(text);
    return code;
}

int cli_report_json(const cli_report *report, const char *path)
{
    return cli_json_write(report_json(report), path);
}
