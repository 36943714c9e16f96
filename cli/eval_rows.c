/* SPDX-License-Identifier: Apache-2.0 */
/* eval_rows.c - from single measurements to rows: means, standard errors, and a bootstrap for the share of dense. */
#include "eval.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BOOTSTRAP_ROUNDS = 1000 };

typedef struct series {
    double sum, square; /* of the values, and of their squares */
    size_t n;
} series;

static void add(series *s, double x)
{
    s->sum += x;
    s->square += x * x;
    s->n++;
}

static double mean(const series *s)
{
    return s->n != 0 ? s->sum / (double)s->n : NAN;
}

/* Standard error of the mean; 0 for one value, whose spread nobody knows. */
static double error(const series *s)
{
    if (s->n < 2)
        return 0.0;
    const double n = (double)s->n, variance = (s->square - s->sum * s->sum / n) / (n - 1.0);
    return variance > 0.0 ? sqrt(variance / n) : 0.0;
}

/*
 * Perplexities are of all tokens together, exp of the mean loss; the rise's error is taken over the pieces' own rises.
 */
static void continuations(const eval_way *way, eval_row *row)
{
    series nll = {0}, dense = {0}, rise = {0}, kld = {0}, top1 = {0};
    for (size_t i = 0; i < way->num_pieces; i++) {
        const eval_piece *p = &way->pieces[i];
        add(&nll, p->nll);
        add(&dense, p->dense_nll);
        add(&rise, exp(p->nll - p->dense_nll) - 1.0);
        add(&kld, p->kld);
        add(&top1, p->top1);
    }
    row->pieces = way->num_pieces;
    row->ppl = exp(mean(&nll));
    row->dense_ppl = exp(mean(&dense));
    row->ppl_rise = row->ppl / row->dense_ppl - 1.0;
    row->ppl_rise_error = error(&rise);
    row->kld = mean(&kld);
    row->kld_error = error(&kld);
    row->top1 = mean(&top1);
    row->top1_error = error(&top1);
}

/* ------------------------------------------------------------------------------------------------------- retrieval */

typedef struct pair {
    double mine, dense;
} pair;

typedef struct paired { /* the same questions to both caches */
    pair *list[NEEDLE_TASKS];
    size_t n[NEEDLE_TASKS];
} paired;

static const eval_answer *find(const eval_way *dense, eval_protocol protocol, unsigned task, uint64_t sample)
{
    for (size_t i = 0; i < dense->num_answers[protocol]; i++) {
        const eval_answer *a = &dense->answers[protocol][i];
        if (a->task == task && a->sample == sample)
            return a;
    }
    return NULL;
}

/* Mean over tasks of the mean over contexts, of both; `random` != NULL redraws the contexts within each task. */
static pair macro(const paired *p, uint64_t *random)
{
    pair out = {0.0, 0.0};
    unsigned tasks = 0;
    for (unsigned t = 0; t < NEEDLE_TASKS; t++) {
        if (p->n[t] == 0)
            continue;
        pair sum = {0.0, 0.0};
        for (size_t i = 0; i < p->n[t]; i++) {
            const pair *one = &p->list[t][random != NULL ? cli_random_below(random, p->n[t]) : i];
            sum.mine += one->mine;
            sum.dense += one->dense;
        }
        out.mine += sum.mine / (double)p->n[t];
        out.dense += sum.dense / (double)p->n[t];
        tasks++;
    }
    if (tasks != 0) {
        out.mine /= tasks;
        out.dense /= tasks;
    }
    return out;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void shares(const paired *p, eval_row *row)
{
    static double draws[BOOTSTRAP_ROUNDS];
    uint64_t random = 0;
    size_t n = 0;
    const pair all = macro(p, NULL);
    row->retrieval = all.mine;
    row->dense_retrieval = all.dense;
    row->has_share = all.dense > 0.0;
    if (!row->has_share)
        return;
    row->share = all.mine / all.dense;
    for (int round = 0; round < BOOTSTRAP_ROUNDS; round++) {
        const pair drawn = macro(p, &random);
        if (drawn.dense > 0.0)
            draws[n++] = drawn.mine / drawn.dense;
    }
    qsort(draws, n, sizeof draws[0], ascending);
    row->share_low = n != 0 ? draws[n / 20] : row->share;
    row->share_high = n != 0 ? draws[n - 1 - n / 20] : row->share;
}

static bool retrieval(const eval_run *run, const eval_way *way, eval_protocol protocol, eval_row *row)
{
    const eval_answer *answers = way->answers[protocol];
    const size_t n = way->num_answers[protocol];
    series task[NEEDLE_TASKS] = {{0}}, depth[EVAL_DEPTHS] = {{0}};
    paired p = {{0}, {0}};
    bool ok = true;
    for (unsigned t = 0; t < NEEDLE_TASKS; t++)
        ok = (p.list[t] = malloc((n + 1) * sizeof *p.list[t])) != NULL && ok;
    for (size_t i = 0; ok && i < n; i++) {
        const eval_answer *a = &answers[i];
        const eval_answer *dense = find(&run->ways[0], protocol, a->task, a->sample);
        if (dense == NULL)
            continue;
        p.list[a->task][p.n[a->task]++] = (pair){a->found, dense->found};
        add(&task[a->task], a->found);
        for (unsigned v = 0; v < a->num_values; v++) {
            const unsigned quarter = (unsigned)(a->depth[v] * EVAL_DEPTHS);
            add(&depth[quarter < EVAL_DEPTHS ? quarter : EVAL_DEPTHS - 1], a->hit[v]);
        }
        row->questions++;
    }
    if (ok && row->questions != 0)
        shares(&p, row);
    double variance = 0.0;
    unsigned tasks = 0;
    for (unsigned t = 0; t < NEEDLE_TASKS; t++) {
        row->by_task[t] = mean(&task[t]);
        row->contexts = p.n[t] > row->contexts ? p.n[t] : row->contexts;
        variance += error(&task[t]) * error(&task[t]);
        tasks += p.n[t] != 0;
        free(p.list[t]);
    }
    row->retrieval_error = tasks != 0 ? sqrt(variance) / tasks : 0.0;
    for (unsigned d = 0; d < EVAL_DEPTHS; d++)
        row->by_depth[d] = mean(&depth[d]);
    return ok;
}

size_t eval_rows(const eval_run *run, eval_row *rows, size_t capacity)
{
    size_t n = 0;
    for (int protocol = 0; protocol < 2; protocol++) {
        for (size_t i = 0; run->options->protocol[protocol] && i < run->num_ways && n < capacity; i++) {
            const eval_way *way = &run->ways[i];
            eval_row *row = &rows[n++];
            memset(row, 0, sizeof *row);
            row->way = way;
            row->protocol = (eval_protocol)protocol;
            if (way->caches != 0) {
                row->bytes = (double)way->bytes / (double)way->caches;
                row->dense_bytes = (double)way->dense_bytes / (double)way->caches;
                row->ratio = (double)way->dense_bytes / (double)way->bytes;
                row->compress_seconds = way->compress_seconds / (double)way->caches;
            }
            if (way->num_pieces != 0)
                continuations(way, row);
            /* libllama's own caches know no protocols: they were asked once */
            if (!retrieval(run, way, way->kind == EVAL_CACHE ? EVAL_AGNOSTIC : (eval_protocol)protocol, row))
                row->questions = row->contexts = 0;
        }
    }
    return n;
}
