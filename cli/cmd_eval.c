/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_eval.c - `akv eval`: how much quality a compressed cache costs, with the user's own model and text. */
#include "eval.h"
#include "eval_options.h"
#include "rotated.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------------- messages */

const char *eval_name(const eval_way *way)
{
    static char name[48];
    snprintf(name, sizeof name, "%s%s%s", way->method, way->kind == EVAL_AKV ? " " : "",
             way->kind == EVAL_AKV ? cli_profile_name(way->profile) : "");
    return name;
}

void eval_label(eval_run *run, const char *what, uint64_t number, uint64_t total, const eval_way *way)
{
    int n = snprintf(run->label, sizeof run->label, "%s %llu/%llu", what, (unsigned long long)number,
                     (unsigned long long)total);
    if (way != NULL && way->ratio != 0.0)
        snprintf(run->label + n, sizeof run->label - (size_t)n, "  %s %.4gx", eval_name(way), way->ratio);
    else if (way != NULL)
        snprintf(run->label + n, sizeof run->label - (size_t)n, "  %s", eval_name(way));
}

void eval_note(const eval_run *run, const char *format, ...)
{
    char line[512];
    va_list args;
    if (run->options->settings.quiet)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    cli_progress_end((cli_progress *)&run->session.progress);
    cli_note("%s", line);
}

int eval_failed(eval_run *run, eval_way *way, akv_status status, const akv_diag *diag)
{
    cli_progress_end(&run->session.progress);
    /* without the control nothing else would mean anything; a model that cannot be hosted ends here */
    if (way == NULL || way->kind == EVAL_EXACT || way->kind == EVAL_DENSE || status == AKV_E_CANCELLED ||
        status == AKV_E_NO_MEMORY || status == AKV_E_BAD_STATE)
        return cli_fail_diag(status, diag, run->label);
    snprintf(way->reason, sizeof way->reason, "%.300s", diag->message);
    cli_warn("%s: left out: %s", run->label, way->reason);
    return CLI_OK;
}

/* ------------------------------------------------------------------------------------------------------- the ways */

akv_status eval_compress(eval_run *run, eval_way *way, akv_diag *diag)
{
    static const akv_llama_method methods[] = {
        [EVAL_EXACT] = AKV_LLAMA_EXACT, [EVAL_AKV] = AKV_LLAMA_ANCHOR, [EVAL_SNAPKV] = AKV_LLAMA_SNAPKV};
    akv_llama *host = run->session.host;
    akv_llama_store *store = NULL;
    akv_config config;
    akv_config_init(&config);
    if (way->kind == EVAL_AKV)
        config.profile = way->profile;
    config.seed = run->options->settings.seed;
    config.keep_ratio = way->ratio != 0.0 ? 1.0 / way->ratio : 1.0;
    cli_rotated peer = {way->bits, config.seed, 0};
    akv_status status = way->kind == EVAL_AKV ? cli_shares_apply(&run->session.shares, host, &config, diag) : AKV_OK;
    if (status != AKV_OK)
        return status;
    status = way->kind == EVAL_ROTATED
                            ? akv_llama_compress_with(host, cli_rotated_make, &peer, &config, &store, diag)
                            : akv_llama_compress(host, methods[way->kind], &config, &store, diag);
    if (status != AKV_OK)
        return status;
    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    status = akv_llama_get_stats(host, &stats, diag);
    if (status == AKV_OK)
        status = akv_llama_attach(host, store, diag);
    akv_llama_store_release(store); /* the host holds it now */
    if (status != AKV_OK)
        return status;
    if (!run->counting)
        return AKV_OK;
    way->bytes += way->kind == EVAL_ROTATED ? peer.bytes : stats.compressed_bytes;
    way->dense_bytes += stats.dense_cache_bytes;
    way->compress_seconds += stats.compress_seconds;
    way->caches++;
    return AKV_OK;
}

static eval_way *add_way(eval_run *run, eval_kind kind, const char *method, double ratio)
{
    if (run->num_ways == EVAL_MAX_WAYS)
        return NULL; /* the limits of the lists keep it from happening */
    eval_way *way = &run->ways[run->num_ways++];
    way->kind = kind;
    way->ratio = ratio;
    snprintf(way->method, sizeof way->method, "%s", method);
    return way;
}

static void add_akv(eval_run *run, double ratio)
{
    for (size_t p = 0; p < run->options->num_profiles; p++) {
        eval_way *way = add_way(run, EVAL_AKV, "akv", ratio);
        if (way != NULL)
            way->profile = run->options->profiles[p];
    }
}

/* Dense bytes over the bytes of a method that has only one size. */
static double fixed_ratio(const eval_run *run, const eval_way *way)
{
    const akv_llama_model_info *m = &run->session.model;
    const uint64_t tokens = run->options->ctx, dims = (uint64_t)m->head_dim_k + m->head_dim_v;
    const uint64_t dense = tokens * m->num_kv_heads * dims * 2;
    const uint64_t bytes = way->kind == EVAL_CACHE
                               ? akv_llama_cache_bytes(way->cache_type, dense)
                               : cli_rotated_bytes(tokens, m->num_kv_heads, m->head_dim_k, m->head_dim_v, way->bits);
    return bytes != 0 ? (double)dense / (double)bytes : 1.0;
}

static int make_ways(eval_run *run)
{
    const eval_options *o = run->options;
    add_way(run, EVAL_DENSE, "dense", 0.0);
    add_way(run, EVAL_EXACT, "exact", 0.0);
    for (size_t i = 0; i < o->num_methods; i++) {
        const eval_method *method = o->methods[i];
        if (method->kind == EVAL_AKV || method->kind == EVAL_SNAPKV) {
            for (size_t r = 0; r < o->num_ratios; r++) {
                if (method->kind == EVAL_AKV)
                    add_akv(run, o->ratios[r]);
                else
                    add_way(run, EVAL_SNAPKV, method->name, o->ratios[r]);
            }
        } else if (method->kind == EVAL_ROTATED || method->kind == EVAL_CACHE) {
            eval_way *way = add_way(run, method->kind, method->name, 0.0);
            if (way == NULL)
                break;
            way->bits = method->bits;
            way->cache_type = method->cache_type;
            if (o->equal_bytes)
                add_akv(run, fixed_ratio(run, way));
        }
    }
    const size_t answers = (size_t)o->samples * NEEDLE_TASKS + 1;
    for (size_t i = 0; i < run->num_ways; i++) {
        eval_way *way = &run->ways[i];
        way->pieces = calloc((size_t)o->pieces + 1, sizeof *way->pieces);
        way->answers[0] = calloc(answers, sizeof *way->answers[0]);
        way->answers[1] = calloc(answers, sizeof *way->answers[1]);
        if (way->pieces == NULL || way->answers[0] == NULL || way->answers[1] == NULL)
            return cli_fail(CLI_NO_MEMORY, "no memory for the samples");
    }
    return CLI_OK;
}

/* Bytes of the engine's own caches: they have no segments to count. */
static void fill_stock_bytes(eval_run *run)
{
    const eval_way *exact = &run->ways[1];
    for (size_t i = 0; i < run->num_ways && exact->caches != 0; i++) {
        eval_way *way = &run->ways[i];
        if ((way->kind != EVAL_CACHE && way->kind != EVAL_DENSE) || way->reason[0] != '\0')
            continue;
        way->caches = exact->caches;
        way->dense_bytes = exact->dense_bytes;
        way->bytes =
            way->kind == EVAL_DENSE ? exact->dense_bytes : akv_llama_cache_bytes(way->cache_type, exact->dense_bytes);
    }
}

/* ----------------------------------------------------------------------------------------------------------- text */

enum { QUESTION_ROOM = 384 }; /* tokens of the longest question and its answer, generously */

static int check_context(const eval_run *run)
{
    const eval_options *o = run->options;
    const uint64_t window = run->session.model.train_context;
    const uint64_t text = o->pieces != 0 ? o->continuation + 1 : 0, needles = o->samples != 0 ? QUESTION_ROOM : 0;
    const uint64_t room = text > needles ? text : needles;
    if (window != 0 && o->ctx + room > window)
        return cli_fail(CLI_BAD_INPUT,
                        "--ctx %llu and %llu more tokens for what follows exceed this model's context of %llu",
                        (unsigned long long)o->ctx, (unsigned long long)room, (unsigned long long)window);
    return CLI_OK;
}

/* What the model puts before a text, if anything. */
static int find_head(eval_run *run)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status =
        akv_llama_render_document(run->session.host, AKV_LLAMA_RAW, NULL, "a", 1, &run->head, &run->num_head, &diag);
    int32_t *plain = NULL;
    size_t n = 0;
    if (status == AKV_OK)
        status = akv_llama_tokenize(run->session.host, "a", 1, 0, 0, &plain, &n, &diag);
    akv_llama_free_tokens(plain);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    run->num_head -= n < run->num_head ? n : run->num_head;
    return CLI_OK;
}

static int read_text(eval_run *run, eval_options *o)
{
    akv_diag diag = {AKV_OK, ""};
    int code = cli_read_texts(o->settings.files, o->settings.num_files, &run->text);
    if (code != CLI_OK)
        return code;
    const akv_status status = akv_llama_tokenize(run->session.host, run->text.data, run->text.bytes, 0, 0, &run->tokens,
                                                 &run->num_tokens, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    const uint64_t one = o->ctx + (o->pieces != 0 ? o->continuation + 1 : 0), fit = run->num_tokens / one;
    if (fit == 0)
        return cli_fail(CLI_BAD_INPUT,
                        "the text has %zu tokens; --ctx %llu needs at least %llu: give a longer text or a smaller "
                        "--ctx",
                        run->num_tokens, (unsigned long long)o->ctx, (unsigned long long)one);
    if (o->pieces <= fit)
        return CLI_OK;
    if (o->pieces_given)
        return cli_fail(CLI_BAD_INPUT,
                        "the text has %zu tokens, enough for %llu pieces of %llu that do not overlap; --pieces "
                        "asks for %llu",
                        run->num_tokens, (unsigned long long)fit, (unsigned long long)one,
                        (unsigned long long)o->pieces);
    cli_warn("the text has %zu tokens: %llu piece%s of %llu instead of %llu", run->num_tokens, (unsigned long long)fit,
             fit == 1 ? "" : "s", (unsigned long long)one, (unsigned long long)o->pieces);
    o->pieces = fit;
    return CLI_OK;
}

/* A model without a template that can be rendered is asked in plain text; said, because scores depend on it. */
static int choose_form(eval_run *run)
{
    int32_t *tokens = NULL;
    size_t n = 0;
    akv_diag diag = {AKV_OK, ""};
    cli_session *s = &run->session;
    if (s->form == AKV_LLAMA_RAW || run->options->samples == 0)
        return CLI_OK;
    const akv_status status = akv_llama_render_document(s->host, s->form, s->system, "a", 1, &tokens, &n, &diag);
    akv_llama_free_tokens(tokens);
    if (status == AKV_E_UNSUPPORTED) {
        cli_warn("%s; the needles' questions are asked in plain text", diag.message);
        s->form = AKV_LLAMA_RAW;
        return CLI_OK;
    }
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

/* ------------------------------------------------------------------------------------------------------------ run */

int eval_open(eval_run *run, eval_options *o)
{
    run->options = o;
    int code = cli_session_open(&run->session, &o->settings);
    cli_progress_end(&run->session.progress);
    if (code == CLI_OK)
        code = check_context(run);
    if (code == CLI_OK)
        code = find_head(run);
    return code == CLI_OK ? read_text(run, o) : code;
}

void eval_close(eval_run *run)
{
    cli_session_close(&run->session);
    cli_buffer_free(&run->text);
    akv_llama_free_tokens(run->tokens);
    akv_llama_free_tokens(run->head);
}

static int measure(eval_run *run, eval_options *o)
{
    int code = eval_open(run, o);
    if (code == CLI_OK)
        code = choose_form(run);
    if (code == CLI_OK)
        code = make_ways(run);
    if (code != CLI_OK)
        return code;
    run->session.label = run->label;
    if (o->pieces != 0)
        code = eval_continuations(run);
    if (code == CLI_OK && o->samples != 0)
        code = eval_retrieval(run);
    run->complete = code == CLI_OK;
    cli_progress_end(&run->session.progress);
    fill_stock_bytes(run);
    return code;
}

/* Whatever there is: an interrupted run shows what it has measured. */
static int show(const eval_run *run)
{
    const eval_options *o = run->options;
    const char *json = o->settings.json;
    eval_row *rows = calloc((size_t)2 * EVAL_MAX_WAYS, sizeof *rows);
    if (rows == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the table");
    const size_t n = eval_rows(run, rows, (size_t)2 * EVAL_MAX_WAYS);
    int code = json != NULL && strcmp(json, "-") == 0 ? CLI_OK : eval_print_table(run, rows, n);
    if (code == CLI_OK && json != NULL)
        code = eval_write_json(run, rows, n, json);
    if (code == CLI_OK && o->html != NULL)
        code = eval_write_html(run, rows, n, o->html);
    free(rows);
    return code;
}

static bool measured_anything(const eval_run *run)
{
    size_t n = 0;
    for (size_t i = 0; i < run->num_ways; i++)
        n += run->ways[i].num_pieces + run->ways[i].num_answers[0] + run->ways[i].num_answers[1];
    return n != 0;
}

/* A run in which nothing that was asked for could be measured has failed. */
static int all_left_out(const eval_run *run)
{
    size_t asked = 0, out = 0;
    for (size_t i = 2; i < run->num_ways; i++, asked++)
        out += run->ways[i].reason[0] != '\0';
    return asked != 0 && out == asked
               ? cli_fail(CLI_INFEASIBLE, "none of the methods could be measured; the reasons are above")
               : CLI_OK;
}

static int run_eval(int argc, char **argv)
{
    eval_options o;
    int code = eval_parse(argc, argv, &o);
    eval_run *run = code == CLI_OK ? calloc(1, sizeof *run) : NULL;
    if (code == CLI_OK && run == NULL)
        code = cli_fail(CLI_NO_MEMORY, "no memory for the samples");
    if (code == CLI_OK) {
        const double start = cli_now();
        code = measure(run, &o);
        run->seconds = cli_now() - start;
        cli_interruption_over(); /* the exit code remembers it; the results are still to be written */
        if (measured_anything(run)) {
            const int shown = show(run);
            code = code == CLI_OK ? shown : code;
        }
        if (code == CLI_OK)
            code = all_left_out(run);
    }
    if (run != NULL) {
        for (size_t i = 0; i < run->num_ways; i++) {
            free(run->ways[i].pieces);
            free(run->ways[i].answers[0]);
            free(run->ways[i].answers[1]);
        }
        eval_close(run);
        free(run);
    }
    cli_settings_free(&o.settings);
    return code < 0 ? cli_help(&cli_cmd_eval) : code;
}

const cli_command cli_cmd_eval = {"eval", "measure what compression costs, with your model and your text", run_eval,
                                  eval_help};
