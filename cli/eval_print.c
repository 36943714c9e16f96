/* SPDX-License-Identifier: Apache-2.0 */
/* eval_print.c - the rows of `akv eval`: a table for people, JSON for programs. */
#include "eval.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------- table */

static void print_heading(const eval_run *run)
{
    const eval_options *o = run->options;
    const akv_llama_model_info *m = &run->session.model;
    printf("%s, the cache of %llu tokens, seed %llu\n", cli_printable(m->name[0] != '\0' ? m->name : m->description),
           (unsigned long long)o->ctx, (unsigned long long)o->settings.seed);
    if (o->pieces != 0)
        printf("text     %llu pieces, %llu tokens predicted after each\n", (unsigned long long)o->pieces,
               (unsigned long long)o->continuation);
    if (o->samples != 0) {
        printf("needles  %llu contexts, each with the tasks", (unsigned long long)o->samples);
        for (unsigned t = 0; t < NEEDLE_TASKS; t++)
            if (o->tasks >> t & 1u)
                printf(" %s", needle_task_names[t]);
        printf(", asked %s\n", run->session.form == AKV_LLAMA_RAW ? "in plain text" : "through the chat template");
    }
    if (!run->complete)
        printf("INCOMPLETE: the run ended early; each row says at its end what it rests on\n");
}

static void print_text_cells(const eval_row *r)
{
    char rise[40] = "", kld[40];
    if (r->pieces == 0) {
        printf("  %9s  %-16s %-20s %7s", "-", "-", "-", "-");
        return;
    }
    const bool spread = r->pieces > 1; /* one piece says nothing about it */
    int n = r->way->kind != EVAL_DENSE ? snprintf(rise, sizeof rise, "%+.2f %%", 100.0 * r->ppl_rise) : 0;
    if (spread && n > 0)
        snprintf(rise + n, sizeof rise - (size_t)n, " +- %.2f", 100.0 * r->ppl_rise_error);
    n = snprintf(kld, sizeof kld, "%.5f", r->kld);
    if (spread)
        snprintf(kld + n, sizeof kld - (size_t)n, " +- %.5f", r->kld_error);
    printf("  %9.3f  %-16s %-20s %5.1f %%", r->way->kind == EVAL_DENSE ? r->dense_ppl : r->ppl, rise, kld,
           100.0 * r->top1);
}

static void print_needle_cells(const eval_row *r)
{
    if (r->questions == 0)
        printf("  %6s  %s", "-", "-");
    else if (r->has_share && r->way->kind != EVAL_DENSE)
        printf("  %6.3f  %3.0f %% (%.0f..%.0f)", r->retrieval, 100.0 * r->share, 100.0 * r->share_low,
               100.0 * r->share_high);
    else
        printf("  %6.3f  %s", r->retrieval, r->way->kind == EVAL_DENSE ? "" : "nothing found by dense");
}

static void print_rows(const eval_run *run, const eval_row *rows, size_t n, eval_protocol protocol, bool text)
{
    const bool needles = run->options->samples != 0;
    printf("\n%-14s %8s %11s", "method", "ratio", "bytes");
    if (text)
        printf("  %9s  %-16s %-20s %7s", "ppl", "against dense", "KLD, nats", "top-1");
    if (needles)
        printf("  %6s  %s", "found", "of dense, 90 % range");
    putchar('\n');
    for (size_t i = 0; i < n; i++) {
        const eval_row *r = &rows[i];
        if (r->protocol != protocol)
            continue;
        if (r->way->reason[0] != '\0' && r->pieces == 0 && r->questions == 0) {
            printf("%-14s %7.4gx  left out: %s\n", eval_name(r->way), r->way->ratio, cli_printable(r->way->reason));
            continue;
        }
        if (r->bytes != 0.0)
            printf("%-14s %7.2fx %11s", eval_name(r->way), r->ratio, cli_bytes((uint64_t)(r->bytes + 0.5)));
        else
            printf("%-14s %8s %11s", eval_name(r->way), "-", "-");
        if (text)
            print_text_cells(r);
        if (needles)
            print_needle_cells(r);
        if (!run->complete)
            printf("   of %zu pieces, %zu contexts", r->pieces, r->contexts);
        putchar('\n');
    }
}

static void print_legend(const eval_run *run)
{
    const eval_options *o = run->options;
    printf("\nratio, bytes   dense 16-bit bytes of keys and values / bytes of the method, everything counted\n");
    if (o->pieces != 0)
        printf("ppl            perplexity of the tokens that follow; against dense: its rise, +- standard error over "
               "the pieces\n"
               "KLD            mean Kullback-Leibler divergence of the next-token distribution, dense against method\n"
               "top-1          share of positions with the same likeliest token\n"
               "dense          KLD and top-1 of the same cache run in other batches: the engine's own noise\n");
    printf("exact          everything kept, through the library's path: the control\n");
    if (o->samples != 0)
        printf("found          share of the needles' values that are in the answers, mean over tasks\n"
               "of dense       found / found by dense in the same questions; range by redrawing the contexts\n");
}

int eval_print_table(const eval_run *run, const eval_row *rows, size_t num_rows)
{
    static const char *const headings[] = {
        "question-agnostic: the context was compressed, the questions came later",
        "question-aware: context, question and opening of the answer were compressed"};
    const eval_options *o = run->options;
    const bool both = o->protocol[0] && o->protocol[1];
    print_heading(run);
    for (int p = 0; p < 2; p++) {
        if (!o->protocol[p] || (p == 1 && both && o->samples == 0))
            continue;
        if (o->samples != 0)
            printf("\n%s", headings[p]);
        /* a continuation has no question: with both protocols its figures are printed once */
        print_rows(run, rows, num_rows, (eval_protocol)p, o->pieces != 0 && !(p == 1 && both));
    }
    print_legend(run);
    printf("\n%.0f s\n", run->seconds);
    return fflush(stdout) == 0 && ferror(stdout) == 0
               ? CLI_OK
               : cli_fail(CLI_IO, "cannot write the table to standard output: %s", strerror(errno));
}

/* ------------------------------------------------------------------------------------------------------------ JSON */

/* cJSON writes NaN as null, which is what a figure that was not measured shall be. */
static void put(cJSON *object, const char *key, double value)
{
    cJSON_AddNumberToObject(object, key, value);
}

static void put_text_or_null(cJSON *object, const char *key, const char *text)
{
    if (text == NULL || text[0] == '\0')
        cJSON_AddNullToObject(object, key);
    else
        cli_json_text(object, key, text, strlen(text));
}

static double smaller(double a, double b)
{
    return a == 0.0 ? b : b == 0.0 ? a : a < b ? a : b;
}

static void put_needles(cJSON *object, const eval_row *r)
{
    const bool any = r->questions != 0, share = any && r->has_share;
    put(object, "retrieval", any ? r->retrieval : NAN);
    put(object, "retrieval_error", any ? r->retrieval_error : NAN);
    put(object, "dense_retrieval", any ? r->dense_retrieval : NAN);
    put(object, "retrieval_share", share ? r->share : NAN);
    cJSON *range = cJSON_AddArrayToObject(object, "retrieval_share_90");
    cJSON_AddItemToArray(range, cJSON_CreateNumber(share ? r->share_low : NAN));
    cJSON_AddItemToArray(range, cJSON_CreateNumber(share ? r->share_high : NAN));
    cJSON *tasks = cJSON_AddObjectToObject(object, "retrieval_by_task");
    for (unsigned t = 0; any && t < NEEDLE_TASKS; t++)
        if (!isnan(r->by_task[t]))
            put(tasks, needle_task_names[t], r->by_task[t]);
    cJSON *depths = cJSON_AddArrayToObject(object, "retrieval_by_depth");
    for (unsigned d = 0; any && d < EVAL_DEPTHS; d++)
        cJSON_AddItemToArray(depths, cJSON_CreateNumber(r->by_depth[d]));
}

static cJSON *row_json(const eval_row *r)
{
    cJSON *object = cJSON_CreateObject();
    const bool text = r->pieces != 0;
    cJSON_AddStringToObject(object, "method", r->way->method);
    put_text_or_null(object, "profile", r->way->kind == EVAL_AKV ? cli_profile_name(r->way->profile) : NULL);
    cJSON_AddStringToObject(object, "protocol", r->protocol == EVAL_AWARE ? "aware" : "agnostic");
    put(object, "ratio", r->bytes != 0.0 ? r->ratio : NAN);
    put(object, "ratio_asked", r->way->ratio != 0.0 ? r->way->ratio : NAN);
    put(object, "bytes", r->bytes != 0.0 ? r->bytes : NAN);
    put(object, "dense_bytes", r->bytes != 0.0 ? r->dense_bytes : NAN);
    put(object, "compress_seconds", r->compress_seconds);
    put(object, "ppl", text ? r->ppl : NAN);
    put(object, "dense_ppl", text ? r->dense_ppl : NAN);
    put(object, "ppl_rise", text ? r->ppl_rise : NAN);
    put(object, "ppl_rise_error", text ? r->ppl_rise_error : NAN);
    put(object, "kld", text ? r->kld : NAN);
    put(object, "kld_error", text ? r->kld_error : NAN);
    put(object, "top1", text ? r->top1 : NAN);
    put(object, "top1_error", text ? r->top1_error : NAN);
    put_needles(object, r);
    put(object, "samples", smaller((double)r->pieces, (double)r->contexts));
    put(object, "num_pieces", (double)r->pieces);
    put(object, "num_contexts", (double)r->contexts);
    put(object, "num_questions", (double)r->questions);
    cJSON *pieces = cJSON_AddArrayToObject(object, "pieces");
    for (size_t i = 0; i < r->way->num_pieces; i++) {
        const eval_piece *p = &r->way->pieces[i];
        cJSON *one = cJSON_CreateObject();
        put(one, "nll", p->nll);
        put(one, "dense_nll", p->dense_nll);
        put(one, "kld", p->kld);
        put(one, "top1", p->top1);
        cJSON_AddItemToArray(pieces, one);
    }
    put_text_or_null(object, "reason", r->way->reason);
    return object;
}

int eval_write_json(const eval_run *run, const eval_row *rows, size_t num_rows, const char *path)
{
    const eval_options *o = run->options;
    const akv_llama_model_info *m = &run->session.model;
    const char *name = m->name[0] != '\0' ? m->name : m->description;
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", akv_version());
    cJSON_AddStringToObject(root, "command", "eval");
    cJSON_AddBoolToObject(root, "complete", run->complete);
    cli_json_text(root, "model", name, strlen(name));
    cli_json_text(root, "model_path", o->settings.model, strlen(o->settings.model));
    cli_json_text(root, "libllama", m->library, strlen(m->library));
    const char *shares = run->options->settings.shares;
    if (shares != NULL)
        cli_json_text(root, "shares", shares, strlen(shares));
    else
        cJSON_AddNullToObject(root, "shares");
    cJSON *files = cJSON_AddArrayToObject(root, "files");
    for (size_t i = 0; i < o->settings.num_files; i++) {
        cJSON *holder = cJSON_CreateObject(); /* cli_json_text cleans members of objects only */
        cli_json_text(holder, "name", o->settings.files[i], strlen(o->settings.files[i]));
        cJSON_AddItemToArray(files, cJSON_DetachItemFromObject(holder, "name"));
        cJSON_Delete(holder);
    }
    put(root, "ctx", (double)o->ctx);
    put(root, "continuation", (double)o->continuation);
    put(root, "pieces", (double)o->pieces);
    put(root, "samples", (double)o->samples);
    put(root, "seed", (double)o->settings.seed);
    put(root, "threads", o->settings.threads);
    cJSON_AddStringToObject(root, "form", run->session.form == AKV_LLAMA_RAW ? "raw" : "chat");
    put(root, "seconds", run->seconds);
    cJSON *list = cJSON_AddArrayToObject(root, "rows");
    for (size_t i = 0; i < num_rows; i++)
        cJSON_AddItemToArray(list, row_json(&rows[i]));
    return cli_json_write(root, path);
}
