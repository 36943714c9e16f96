/* SPDX-License-Identifier: Apache-2.0 */
/* eval_html.c - the rows of `akv eval` as one page with plots: no script, no network, light and dark. */
#include "eval_plot.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char head[] =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
    "<meta name=\"color-scheme\" content=\"light dark\">\n<title>akv eval</title>\n<style>\n"
    ":root{--bg:#fff;--ink:#1c1e21;--soft:#5c6370;--line:#d8dbe0;--card:#f6f7f9;"
    "--s0:#0072b2;--s1:#d55e00;--s2:#6b7280;--s3:#008a63;--s4:#b0578f}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#15171a;--ink:#e7e9ec;--soft:#a0a7b2;--line:#363b43;--card:#1d2024;"
    "--s0:#56b4e9;--s1:#ff8f4d;--s2:#a3abb8;--s3:#2fc69b;--s4:#e79ac6}}\n"
    "body{background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;"
    "padding:0 1rem}\n"
    "h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}\n"
    "p,dd{color:var(--soft)}dt{font-weight:600}dd{margin:0 0 .4rem}.warn{color:var(--s1);font-weight:600}\n"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}\n"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.8rem}\n"
    "figcaption{font-weight:600}svg{max-width:100%;height:auto}\n"
    "svg text{fill:var(--soft);font:12px system-ui,sans-serif}.end{text-anchor:end}.middle{text-anchor:middle}\n"
    ".grid{stroke:var(--line)}.axis{stroke:var(--soft)}.rule{stroke:var(--soft);stroke-dasharray:5 4}\n"
    "polyline{fill:none;stroke:currentColor;stroke-width:2}.whisker{stroke:currentColor;stroke-width:1.5}\n"
    ".s0{color:var(--s0)}.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}\n"
    "circle,rect,svg path{fill:currentColor}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.3rem 0 0;font-size:.9rem}\n"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}\n"
    "th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right}\n"
    "th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}\n"
    "</style></head><body>\n";

/* ----------------------------------------------------------------------------------------------------------- plots */

static const char *const series_names[PLOT_MAX_SERIES] = {"akv, profile default", "akv, profile paper",
                                                          "snapkv (eviction)", "rotated quantisation",
                                                          "cache types of libllama"};

/* Place of a method among the series, or -1: the reference and the control are no curves. */
static int series_of(const eval_way *way)
{
    switch (way->kind) {
    case EVAL_AKV:
        return way->profile == AKV_PROFILE_PAPER ? 1 : 0;
    case EVAL_SNAPKV:
        return 2;
    case EVAL_ROTATED:
        return 3;
    case EVAL_CACHE:
        return 4;
    default:
        return -1;
    }
}

typedef struct figure {
    double y, low, high;
} figure;

static figure kld_of(const eval_row *r)
{
    return r->pieces == 0 ? (figure){NAN, NAN, NAN} : (figure){r->kld, r->kld - r->kld_error, r->kld + r->kld_error};
}

static figure rise_of(const eval_row *r)
{
    return r->pieces == 0 ? (figure){NAN, NAN, NAN}
                          : (figure){r->ppl_rise, r->ppl_rise - r->ppl_rise_error, r->ppl_rise + r->ppl_rise_error};
}

static figure share_of(const eval_row *r)
{
    return r->questions == 0 || !r->has_share ? (figure){NAN, NAN, NAN}
                                              : (figure){r->share, r->share_low, r->share_high};
}

static int by_ratio(const void *a, const void *b)
{
    const double x = ((const plot_point *)a)->x, y = ((const plot_point *)b)->x;
    return (x > y) - (x < y);
}

static bool draw(cli_buffer *page, plot *p, const eval_row *rows, size_t n, eval_protocol protocol,
                 figure (*of)(const eval_row *))
{
    memset(p->series, 0, sizeof p->series);
    for (size_t s = 0; s < PLOT_MAX_SERIES; s++)
        p->series[s].name = series_names[s];
    for (size_t i = 0; i < n; i++) {
        const int place = series_of(rows[i].way);
        const figure f = of(&rows[i]);
        if (rows[i].protocol != protocol || place < 0 || !isfinite(f.y) || rows[i].bytes == 0.0)
            continue;
        plot_series *s = &p->series[place];
        plot_point *q = &s->points[s->num_points++];
        *q = (plot_point){.x = rows[i].ratio, .y = f.y, .low = f.low, .high = f.high};
        snprintf(q->name, sizeof q->name, "%s", eval_name(rows[i].way));
    }
    for (size_t s = 0; s < PLOT_MAX_SERIES; s++)
        qsort(p->series[s].points, p->series[s].num_points, sizeof(plot_point), by_ratio);
    return plot_draw(page, p);
}

static bool draw_plots(cli_buffer *page, const eval_run *run, const eval_row *rows, size_t n)
{
    static const char *const titles[] = {"Needles found, question-agnostic, share of the dense cache",
                                         "Needles found, question-aware, share of the dense cache"};
    plot *p = calloc(1, sizeof *p);
    if (p == NULL)
        return false;
    const bool *protocol = run->options->protocol;
    const eval_protocol first = protocol[EVAL_AGNOSTIC] ? EVAL_AGNOSTIC : EVAL_AWARE;
    p->title = "Divergence from the dense cache";
    p->y_label = "KLD, nats a token";
    p->log_y = true;
    p->rule = rows[0].pieces != 0 && rows[0].kld > 0.0 ? rows[0].kld : NAN; /* the first row is the dense cache */
    p->rule_name = "the engine's own noise";
    bool ok = page_add(page, "<div class=\"plots\">\n") && draw(page, p, rows, n, first, kld_of);
    p->title = "Rise of perplexity";
    p->y_label = "against the dense cache";
    p->log_y = false;
    p->percent = true;
    p->rule = 0.0;
    p->rule_name = "the dense cache";
    ok = ok && draw(page, p, rows, n, first, rise_of);
    p->rule = 1.0;
    p->y_label = "found / found by dense";
    for (int i = 0; ok && i < 2; i++) {
        p->title = titles[i];
        ok = !protocol[i] || draw(page, p, rows, n, (eval_protocol)i, share_of);
    }
    free(p);
    return ok && page_add(page, "</div>\n");
}

/* ---------------------------------------------------------------------------------------------------------- tables */

static bool begin_row(cli_buffer *page, const eval_row *r)
{
    return page_add(page, "<tr><td>") && page_text(page, eval_name(r->way)) && page_add(page, "</td>");
}

static bool main_row(cli_buffer *page, const eval_row *r)
{
    bool ok = begin_row(page, r);
    if (ok && r->way->reason[0] != '\0' && r->pieces == 0 && r->questions == 0)
        return page_add(page, "<td>%.4gx</td><td colspan=\"7\">left out: ", r->way->ratio) &&
               page_text(page, r->way->reason) && page_add(page, "</td></tr>\n");
    if (r->bytes != 0.0)
        ok = ok && page_add(page, "<td>%.2fx</td><td>%s</td>", r->ratio, cli_bytes((uint64_t)(r->bytes + 0.5)));
    else
        ok = ok && page_add(page, "<td>-</td><td>-</td>");
    if (r->pieces != 0)
        ok = ok &&
             page_add(page, "<td>%.3f</td><td>%+.2f %% &plusmn; %.2f</td><td>%.5f &plusmn; %.5f</td><td>%.1f %%</td>",
                      r->ppl, 100.0 * r->ppl_rise, 100.0 * r->ppl_rise_error, r->kld, r->kld_error, 100.0 * r->top1);
    else
        ok = ok && page_add(page, "<td>-</td><td>-</td><td>-</td><td>-</td>");
    if (r->questions != 0 && r->has_share)
        ok = ok && page_add(page, "<td>%.3f</td><td>%.0f %% (%.0f..%.0f)</td>", r->retrieval, 100.0 * r->share,
                            100.0 * r->share_low, 100.0 * r->share_high);
    else if (r->questions != 0)
        ok = ok && page_add(page, "<td>%.3f</td><td>-</td>", r->retrieval);
    else
        ok = ok && page_add(page, "<td>-</td><td>-</td>");
    return ok && page_add(page, "</tr>\n");
}

static bool main_table(cli_buffer *page, const eval_row *rows, size_t n, eval_protocol protocol)
{
    bool ok = page_add(
        page, "<div class=\"scroll\"><table><thead><tr><th>method</th><th>ratio</th><th>bytes</th><th>perplexity"
              "</th><th>against dense</th><th>KLD, nats</th><th>top-1</th><th>found</th><th>of dense, 90 %% range"
              "</th></tr></thead><tbody>\n");
    for (size_t i = 0; ok && i < n; i++)
        if (rows[i].protocol == protocol)
            ok = main_row(page, &rows[i]);
    return ok && page_add(page, "</tbody></table></div>\n");
}

static bool cell(cli_buffer *page, double found)
{
    if (isnan(found))
        return page_add(page, "<td>-</td>");
    return page_add(page, "<td style=\"background:color-mix(in srgb,var(--s0) %.0f%%,transparent)\">%.2f</td>",
                    45.0 * found, found);
}

static bool needle_table(cli_buffer *page, const eval_run *run, const eval_row *rows, size_t n, eval_protocol protocol)
{
    bool ok = page_add(
        page, "<h3>Values found, by task and by depth in the context</h3>\n<div class=\"scroll\"><table><thead><tr>"
              "<th>method</th><th>ratio</th>");
    for (unsigned t = 0; ok && t < NEEDLE_TASKS; t++)
        if (run->options->tasks >> t & 1u)
            ok = page_add(page, "<th>%s</th>", needle_task_names[t]);
    for (unsigned d = 0; ok && d < EVAL_DEPTHS; d++)
        ok = page_add(page, "<th>%u..%u %%</th>", 100 * d / EVAL_DEPTHS, 100 * (d + 1) / EVAL_DEPTHS);
    ok = ok && page_add(page, "</tr></thead><tbody>\n");
    for (size_t i = 0; ok && i < n; i++) {
        const eval_row *r = &rows[i];
        if (r->protocol != protocol || r->questions == 0)
            continue;
        ok = begin_row(page, r) && page_add(page, "<td>%.2fx</td>", r->ratio);
        for (unsigned t = 0; ok && t < NEEDLE_TASKS; t++)
            if (run->options->tasks >> t & 1u)
                ok = cell(page, r->by_task[t]);
        for (unsigned d = 0; ok && d < EVAL_DEPTHS; d++)
            ok = cell(page, r->by_depth[d]);
        ok = ok && page_add(page, "</tr>\n");
    }
    return ok && page_add(page, "</tbody></table></div>\n");
}

/* ------------------------------------------------------------------------------------------------------------ page */

static bool write_head(cli_buffer *page, const eval_run *run)
{
    const eval_options *o = run->options;
    const akv_llama_model_info *m = &run->session.model;
    bool ok =
        cli_buffer_add(page, head, sizeof head - 1) && page_add(page, "<h1>") &&
        page_text(page, m->name[0] != '\0' ? m->name : m->description) && page_add(page, "</h1>\n<p>") &&
        page_text(page, m->description) &&
        page_add(page,
                 "; the cache of %llu tokens; %llu pieces of text with %llu tokens predicted after each; %llu contexts "
                 "with needles; seed %llu; akv %s, libllama ",
                 (unsigned long long)o->ctx, (unsigned long long)o->pieces, (unsigned long long)o->continuation,
                 (unsigned long long)o->samples, (unsigned long long)o->settings.seed, akv_version()) &&
        page_text(page, m->library) && page_add(page, "; text:");
    for (size_t i = 0; ok && i < o->settings.num_files; i++)
        ok = page_add(page, " ") && page_text(page, o->settings.files[i]);
    ok = ok && page_add(page, "</p>\n");
    return ok && (run->complete || page_add(page, "<p class=\"warn\">Incomplete: the run ended early.</p>\n"));
}

static const char foot[] =
    "<h2>What the columns say</h2>\n<dl>\n"
    "<dt>ratio, bytes</dt><dd>dense 16-bit bytes of keys and values / bytes of the method, everything counted</dd>\n"
    "<dt>perplexity, against dense</dt><dd>of the tokens that follow the compressed ones; its rise over the dense "
    "cache, with the "
    "standard error over the pieces</dd>\n"
    "<dt>KLD</dt><dd>mean Kullback-Leibler divergence of the next-token distribution, dense against method. In the row "
    "dense: the same "
    "cache run in other batches, which is the engine's own noise</dd>\n"
    "<dt>top-1</dt><dd>share of positions with the same likeliest token</dd>\n"
    "<dt>found, of dense</dt><dd>share of the needles' values that are in the greedy answers, mean over tasks; the "
    "same over what "
    "the dense cache found in the same questions, with the range in which 90 % of 1000 redraws of the contexts "
    "fall</dd>\n"
    "<dt>exact</dt><dd>everything kept, through the library's path: the control</dd>\n"
    "<dt>question-agnostic, question-aware</dt><dd>the context alone was compressed and the questions came later; or "
    "context, "
    "question and the opening of the answer were compressed together</dd>\n</dl>\n</body></html>\n";

int eval_write_html(const eval_run *run, const eval_row *rows, size_t num_rows, const char *path)
{
    static const char *const headings[] = {"Question-agnostic", "Question-aware"};
    cli_buffer page = {NULL, 0, 0};
    bool ok = write_head(&page, run) && draw_plots(&page, run, rows, num_rows);
    for (int p = 0; ok && p < 2; p++) {
        if (!run->options->protocol[p])
            continue;
        ok = page_add(&page, "<h2>%s</h2>\n", headings[p]) && main_table(&page, rows, num_rows, (eval_protocol)p);
        if (ok && run->options->samples != 0)
            ok = needle_table(&page, run, rows, num_rows, (eval_protocol)p);
    }
    ok = ok && cli_buffer_add(&page, foot, sizeof foot - 1);
    const int code =
        ok ? cli_write_file(path, page.data, page.bytes) : cli_fail(CLI_NO_MEMORY, "no memory for the page");
    cli_buffer_free(&page);
    return code;
}
