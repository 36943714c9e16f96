/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.c - /metrics in Prometheus' text form. Sums over everything; no names, no keys. */
#include "serve.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void head(FILE *f, const char *name, const char *type, const char *help)
{
    fprintf(f, "# HELP akv_%s %s\n# TYPE akv_%s %s\n", name, help, name, type);
}

static void one(FILE *f, const char *name, const char *type, const char *help, double value)
{
    head(f, name, type, help);
    fprintf(f, "akv_%s %.17g\n", name, value);
}

static void documents(FILE *f, const serve_documents_stats *d)
{
    static const char *const kinds[] = {"total",        "object",     "header",    "anchors", "positions", "index",
                                        "coefficients", "level_maps", "residuals", "model",   "dense"};
    head(f, "documents", "gauge", "documents by state");
    for (int i = 0; i < SERVE_NUM_STATES; i++)
        fprintf(f, "akv_documents{state=\"%s\"} %" PRIu64 "\n", serve_state_names[i], d->by_state[i]);
    head(f, "document_bytes", "gauge", "bytes of documents in memory by kind");
    for (size_t k = 1; k < sizeof kinds / sizeof kinds[0]; k++)
        fprintf(f, "akv_document_bytes{kind=\"%s\"} %" PRIu64 "\n", kinds[k], (&d->bytes.total)[k]);
    one(f, "document_dense_bytes", "gauge", "what all ready documents would take uncompressed, 16 bit",
        (double)d->dense_bytes);
    one(f, "document_tokens", "gauge", "tokens of all ready documents", (double)d->tokens);
    const double held = (double)d->pool.resident_bytes + (double)d->pool.spilled_bytes;
    one(f, "compression_ratio", "gauge", "uncompressed bytes of all ready documents by their bytes now",
        held > 0.0 ? (double)d->dense_bytes / held : 0.0);
    one(f, "budget_bytes", "gauge", "most that documents in memory may take", (double)d->pool.budget_bytes);
    one(f, "spilled_bytes", "gauge", "bytes of documents that left memory", (double)d->pool.spilled_bytes);
    one(f, "retargets_total", "counter", "documents made smaller for the budget", (double)d->pool.retargets);
    one(f, "spills_total", "counter", "documents written away for the budget", (double)d->pool.spills);
    one(f, "fetches_total", "counter", "documents brought back", (double)d->pool.fetches);
    one(f, "read_tokens_total", "counter", "tokens of documents read", (double)d->tokens_read);
    one(f, "read_seconds_total", "counter", "time documents were read and compressed in", d->read_seconds);
}

static void engine(FILE *f, const serve_options *o, const serve_engine_stats *e, const serve_documents_stats *d)
{
    one(f, "slots", "gauge", "answers that can be made at the same time", (double)o->slots);
    one(f, "slots_busy", "gauge", "answers that are being made", (double)e->busy);
    one(f, "queue_length", "gauge", "requests that wait for a slot", (double)e->queued);
    one(f, "queue_limit", "gauge", "how many may wait", (double)o->queue);
    one(f, "answers_total", "counter", "answers made, or begun and ended", (double)e->requests_done);
    one(f, "prompt_tokens_total", "counter", "tokens of prompts, documents not counted", (double)e->prompt_tokens);
    one(f, "prompt_seconds_total", "counter", "time spent on them", e->prompt_seconds);
    one(f, "generated_tokens_total", "counter", "tokens of answers", (double)e->generated_tokens);
    one(f, "generate_seconds_total", "counter", "time spent on them", e->generate_seconds);
    one(f, "tokens_per_second", "gauge", "tokens of answers by the time spent on them, since the start",
        e->generate_seconds > 0.0 ? (double)e->generated_tokens / e->generate_seconds : 0.0);
    head(f, "kv_bytes", "gauge",
         "key/value cache: documents in memory, the engine's cells, waiting conversations, their segments");
    fprintf(f, "akv_kv_bytes{kind=\"documents\"} %" PRIu64 "\n", d->pool.resident_bytes);
    fprintf(f, "akv_kv_bytes{kind=\"cells\"} %" PRIu64 "\n", e->cell_bytes);
    fprintf(f, "akv_kv_bytes{kind=\"waiting\"} %" PRIu64 "\n", e->waiting_bytes);
    fprintf(f, "akv_kv_bytes{kind=\"segments\"} %" PRIu64 "\n", e->segment_bytes);
    one(f, "kv_dense_bytes", "gauge", "what running conversations would take uncompressed, each with its document",
        (double)e->dense_bytes);
}

char *serve_metrics(serve_server *server)
{
    char *text = NULL;
    size_t bytes = 0;
    serve_documents_stats d;
    serve_engine_stats e;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL)
        return NULL;
    serve_documents_stats_get(server->documents, &d);
    serve_engine_stats_get(server->engine, &e);
    documents(f, &d);
    engine(f, server->options, &e, &d);
    head(f, "http_answers_total", "counter", "by hundreds of the status");
    for (int i = 2; i < 6; i++)
        fprintf(f, "akv_http_answers_total{status=\"%dxx\"} %llu\n", i,
                (unsigned long long)atomic_load(&server->answers[i]));
    one(f, "resident_bytes", "gauge", "of the process", (double)cli_resident_bytes());
    if (fclose(f) != 0) {
        free(text);
        return NULL;
    }
    return text;
}
