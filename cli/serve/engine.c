/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - one thread that computes all answers: those in slots take turns of a few tokens, in one context of
 * libllama (akv_llama_switch); the others wait in a queue of bounded length.
 */
#include "serve.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How long one goes on before another may: long enough that switching does not show, short enough to seem at once. */
#define TURN_SECONDS 0.05
/* Of the one context: what libllama makes of less. Longer conversations move into segments. */
enum { CELLS = 256 };

struct serve_engine {
    const serve_options *options;
    serve_turn *turn;
    serve_documents *documents;
    serve_generator generator;
    serve_job **slots;  /* [options->slots]; the engine thread's, pointers read under the lock */
    serve_job *running; /* in serve_generate now */
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    serve_job *first, *last; /* the queue */
    uint64_t queued, busy;
    bool refusing, stop;
    serve_engine_stats stats; /* as of the last turn */
};

/* Called inside long steps: ends the running one when nobody waits for it any more. */
static int on_progress(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total)
{
    const serve_engine *e = opaque;
    (void)stage, (void)done, (void)total;
    const bool stop = e->running != NULL && (atomic_load(&e->running->cancelled) || cli_now() > e->running->deadline);
    serve_stopped(stop);
    return stop;
}

/* With the lock. Who went away, or waited too long, does not take anybody's place. */
static void tidy_queue(serve_engine *e)
{
    e->last = NULL;
    for (serve_job **at = &e->first; *at != NULL;) {
        serve_job *job = *at;
        if (serve_generate_expire(job)) {
            *at = job->next;
            e->queued--;
            serve_job_release(e->documents, job);
        } else {
            e->last = job;
            at = &job->next;
        }
    }
}

static void take_from_queue(serve_engine *e)
{
    tidy_queue(e);
    for (uint64_t i = 0; i < e->options->slots && e->first != NULL; i++) {
        if (e->slots[i] != NULL)
            continue;
        e->slots[i] = e->first;
        e->first = e->first->next;
        e->queued--;
        e->busy++;
    }
    if (e->first == NULL)
        e->last = NULL;
}

/* With the turn and without the lock: conversations are the engine thread's. */
static void count(serve_engine *e)
{
    const serve_generator *g = &e->generator;
    serve_engine_stats s = {.prompt_tokens = g->prompt_tokens,
                            .generated_tokens = g->generated_tokens,
                            .prompt_seconds = g->prompt_seconds,
                            .generate_seconds = g->generate_seconds,
                            .requests_done = e->stats.requests_done,
                            .cell_bytes = e->stats.cell_bytes};
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    uint64_t token_bytes = 0;
    if (akv_llama_get_memory(g->host, &m, NULL) == AKV_OK) {
        s.cell_bytes = m.cell_bytes;
        token_bytes = m.dense_bytes / (uint64_t)akv_llama_next_position(g->host);
    }
    for (uint64_t i = 0; i < e->options->slots; i++) {
        const serve_job *job = e->slots[i];
        if (job == NULL || job->conversation == NULL)
            continue;
        const uint64_t tokens =
            job->prompt_done + job->generated + (job->document != NULL ? job->document->num_tokens : 0);
        s.waiting_bytes += akv_llama_conversation_bytes(job->conversation);
        s.segment_bytes += akv_llama_conversation_segment_bytes(job->conversation);
        s.dense_bytes += tokens * token_bytes;
    }
    pthread_mutex_lock(&e->lock);
    e->stats = s;
    pthread_mutex_unlock(&e->lock);
}

static void *run(void *opaque)
{
    serve_engine *e = opaque;
    pthread_mutex_lock(&e->lock);
    while (!e->stop || e->busy > 0 || e->first != NULL) {
        take_from_queue(e);
        if (e->busy == 0) {
            pthread_cond_wait(&e->changed, &e->lock);
            continue;
        }
        pthread_mutex_unlock(&e->lock);
        for (uint64_t i = 0; i < e->options->slots; i++) {
            serve_job *job = e->slots[i];
            if (job == NULL)
                continue;
            serve_turn_take(e->turn);
            e->running = job;
            const bool over = serve_generate(&e->generator, job, TURN_SECONDS);
            e->running = NULL;
            if (over)
                e->slots[i] = NULL;
            count(e);
            serve_turn_give(e->turn);
            if (over) {
                serve_job_release(e->documents, job);
                pthread_mutex_lock(&e->lock);
                e->busy--;
                e->stats.requests_done++;
                pthread_mutex_unlock(&e->lock);
            }
        }
        pthread_mutex_lock(&e->lock);
        if (e->busy == 0)
            pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

int serve_engine_create(const serve_options *options, akv_llama *host, const akv_executor *executor,
                        serve_documents *documents, serve_turn *turn, serve_engine **out)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_options o;
    akv_llama_model_info model;
    serve_engine *e = calloc(1, sizeof *e);
    if (e == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the server");
    *out = e;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->options = options;
    e->turn = turn;
    e->documents = documents;
    akv_llama_model_info_init(&model);
    akv_llama_get_model_info(host, &model, NULL);
    akv_llama_options_init(&o);
    o.num_threads = options->threads;
    o.tail_cells = o.batch_tokens = CELLS;
    o.executor = executor;
    o.progress = on_progress;
    o.progress_opaque = e;
    akv_status status = akv_llama_open_beside(host, &o, &e->generator.host, &diag);
    o.progress = NULL;
    if (status == AKV_OK)
        status = akv_llama_open_beside(host, &o, &e->generator.opener, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    e->generator.documents = documents;
    e->generator.vocab_tokens = model.vocab_tokens;
    e->generator.batch_tokens = o.batch_tokens;
    e->generator.keep_ratio = options->keep_ratio;
    e->generator.exact = (uint32_t)options->exact;
    e->generator.scratch = calloc(model.vocab_tokens, 2 * sizeof(double));
    e->generator.opening_logits = calloc(model.vocab_tokens, sizeof(float));
    e->slots = calloc(options->slots, sizeof(serve_job *));
    if (e->generator.scratch == NULL || e->generator.opening_logits == NULL || e->slots == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the server");
    if (pthread_create(&e->thread, NULL, run, e) != 0)
        return cli_fail(CLI_IO, "the system gives no thread");
    e->has_thread = true;
    return CLI_OK;
}

bool serve_engine_submit(serve_engine *e, serve_job *job, serve_error *error)
{
    bool ok = true;
    pthread_mutex_lock(&e->lock);
    if (e->refusing)
        ok = serve_fail(error, 503, "ending", NULL, "the server is ending");
    else if (e->busy + e->queued >= e->options->slots + e->options->queue)
        ok = serve_fail(error, 429, "queue_full", NULL,
                        "%llu answers are being made and %llu requests wait; try again later",
                        (unsigned long long)e->busy, (unsigned long long)e->queued);
    if (ok) {
        atomic_fetch_add(&job->references, 1);
        job->next = NULL;
        if (e->last != NULL)
            e->last->next = job;
        else
            e->first = job;
        e->last = job;
        e->queued++;
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    return ok;
}

void serve_engine_drain(serve_engine *e, double seconds)
{
    const double until = cli_now() + seconds;
    pthread_mutex_lock(&e->lock);
    e->refusing = true;
    while (e->busy + e->queued > 0 && cli_now() < until) {
        pthread_mutex_unlock(&e->lock);
        usleep(20000);
        pthread_mutex_lock(&e->lock);
    }
    for (serve_job *job = e->first; job != NULL; job = job->next)
        atomic_store(&job->cancelled, true);
    pthread_mutex_unlock(&e->lock);
    serve_turn_take(e->turn); /* a slot is emptied with the turn and filled with the lock */
    pthread_mutex_lock(&e->lock);
    for (uint64_t i = 0; i < e->options->slots; i++)
        if (e->slots[i] != NULL)
            atomic_store(&e->slots[i]->cancelled, true);
    pthread_mutex_unlock(&e->lock);
    serve_turn_give(e->turn);
}

void serve_engine_destroy(serve_engine *e)
{
    if (e == NULL)
        return;
    if (e->has_thread) {
        pthread_mutex_lock(&e->lock);
        e->refusing = e->stop = true;
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        pthread_join(e->thread, NULL);
    }
    serve_generator_free(&e->generator);
    free(e->slots);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

void serve_engine_stats_get(serve_engine *e, serve_engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    out->busy = e->busy;
    out->queued = e->queued;
    pthread_mutex_unlock(&e->lock);
}
