/* SPDX-License-Identifier: Apache-2.0 */
/* generate.c - one answer: its conversation, its prompt, its tokens; where it ends; which bytes can be said already. */
#include "serve.h"
#include "cli/random.h"
#include "cli/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void forget(serve_job *job)
{
    akv_llama_conversation_free(job->conversation);
    akv_llama_store_release(job->store);
    job->conversation = NULL;
    job->store = NULL;
}

static void end(serve_job *job, const char *finish, const serve_error *error)
{
    /* what could have become a stop string has not; what could have become a character is none */
    if (error == NULL)
        serve_reply_text(job, job->pending.data, job->pending.bytes, job->pending_logprobs);
    else
        cJSON_Delete(job->pending_logprobs);
    job->pending_logprobs = NULL;
    cli_buffer_free(&job->pending);
    forget(job);
    serve_reply_end(job, finish, error);
}

static bool fail(serve_job *job, akv_status status, const akv_diag *diag)
{
    serve_error error = {0};
    serve_fail_diag(&error, status, diag);
    end(job, NULL, &error);
    return true;
}

bool serve_generate_expire(serve_job *job)
{
    serve_error error = {0};
    if (atomic_load(&job->cancelled))
        serve_fail(&error, 503, "cancelled", NULL, "the answer was cancelled");
    else if (cli_now() > job->deadline)
        serve_fail(&error, 503, "timeout", NULL, "the answer took longer than the server allows (--timeout)");
    else
        return false;
    end(job, NULL, &error);
    return true;
}

/* ------------------------------------------------------------------------------------------------------------ begin */

/* A conversation needs something to stand behind: without a document that is its own first token, kept exactly. */
static akv_status opening(serve_generator *g, int32_t token, akv_diag *diag)
{
    akv_llama_store_parts parts;
    akv_llama_store_parts_init(&parts);
    if (g->opening != NULL && akv_llama_store_get_parts(g->opening, &parts, diag) == AKV_OK && parts.tokens[0] == token)
        return AKV_OK;
    akv_config config;
    akv_config_init(&config);
    akv_llama_store *store = NULL;
    akv_status status = akv_llama_prefill(g->opener, &token, 1, 0, diag);
    const float *logits = status == AKV_OK ? akv_llama_logits(g->opener, -1) : NULL;
    if (logits != NULL)
        memcpy(g->opening_logits, logits, g->vocab_tokens * sizeof *logits);
    if (status == AKV_OK)
        status = akv_llama_compress(g->opener, AKV_LLAMA_EXACT, &config, &store, diag);
    akv_llama_free_dense(g->opener, NULL);
    if (status != AKV_OK)
        return status;
    akv_llama_store_release(g->opening);
    g->opening = store;
    return AKV_OK;
}

static bool begin(serve_generator *g, serve_job *job)
{
    akv_diag diag = {AKV_OK, ""};
    serve_error error = {0};
    if (job->document != NULL) {
        if (!serve_document_store(g->documents, job->document, &job->store, &error)) {
            end(job, NULL, &error);
            return false;
        }
    } else {
        const akv_status status = opening(g, job->prompt[0], &diag);
        if (status != AKV_OK)
            return !fail(job, status, &diag);
        job->store = akv_llama_store_retain(g->opening);
        job->prompt_done = 1;
    }
    const akv_status status = akv_llama_conversation_create(g->host, job->store, &job->conversation, &diag);
    return status == AKV_OK || !fail(job, status, &diag);
}

/* ----------------------------------------------------------------------------------------------------------- sample */

static int by_probability(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x > y ? -1 : x < y;
}

/* Nucleus sampling: the likeliest tokens that together have top_p. scratch [2 * n]: pairs of probability and index. */
static int64_t sample_top_p(double *scratch, const float *logits, uint32_t n, double temperature, double top_p,
                            uint64_t *state)
{
    double top = -INFINITY, sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return -1;
        top = fmax(top, (double)logits[i]);
    }
    if (top == -INFINITY)
        return -1;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(((double)logits[i] - top) / temperature);
    /* all tokens below this one together have less than 1 - top_p: outside the nucleus, no need to sort them */
    const double least = (1.0 - top_p) / (double)n * sum;
    size_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        const double p = exp(((double)logits[i] - top) / temperature);
        if (p >= least) {
            scratch[2 * count] = p;
            scratch[2 * count + 1] = (double)i;
            count++;
        }
    }
    qsort(scratch, count, 2 * sizeof *scratch, by_probability);
    double inside = 0.0;
    size_t kept = 0;
    while (kept < count && (kept == 0 || inside < top_p * sum))
        inside += scratch[2 * kept++];
    double left = cli_random_unit(state) * inside;
    for (size_t i = 0; i < kept; i++) {
        left -= scratch[2 * i];
        if (left < 0.0)
            return (int64_t)scratch[2 * i + 1];
    }
    return (int64_t)scratch[1];
}

static int64_t sample(serve_generator *g, serve_job *job, const float *logits)
{
    if (job->temperature > 0.0 && job->top_p < 1.0)
        return sample_top_p(g->scratch, logits, g->vocab_tokens, job->temperature, job->top_p, &job->random);
    cli_sampler sampler = {job->temperature, job->random};
    const int64_t token = cli_sample(&sampler, logits, g->vocab_tokens);
    job->random = sampler.state;
    return token;
}

/* ------------------------------------------------------------------------------------------------------------- text */

/* Where a stop string begins in the pending text, or its length. *hold: bytes at the end that may become one. */
static size_t find_stop(const serve_job *job, size_t *hold)
{
    const cli_buffer *p = &job->pending;
    size_t first = p->bytes;
    *hold = 0;
    for (size_t s = 0; s < job->num_stops; s++) {
        const size_t length = strlen(job->stops[s]);
        const char *at = p->bytes >= length ? memmem(p->data, p->bytes, job->stops[s], length) : NULL;
        if (at != NULL && (size_t)(at - p->data) < first)
            first = (size_t)(at - p->data);
        for (size_t n = length - 1 < p->bytes ? length - 1 : p->bytes; n > *hold; n--)
            if (memcmp(p->data + p->bytes - n, job->stops[s], n) == 0)
                *hold = n;
    }
    return first;
}

/* The token's text joins what is pending; what can be said is said. True: a stop string ended the answer. */
static bool say(serve_job *job, const char *piece, size_t bytes, cJSON *logprob)
{
    if (logprob != NULL && job->pending_logprobs == NULL)
        job->pending_logprobs = cJSON_CreateArray();
    if (logprob != NULL)
        cJSON_AddItemToArray(job->pending_logprobs, logprob);
    if (!cli_buffer_add(&job->pending, piece, bytes)) {
        serve_error error = {0};
        serve_fail(&error, 503, "no_memory", NULL, "no memory for the answer");
        end(job, NULL, &error);
        return true;
    }
    size_t hold, stop = find_stop(job, &hold);
    if (stop < job->pending.bytes) {
        job->pending.bytes = stop;
        end(job, "stop", NULL);
        return true;
    }
    const size_t ready = serve_utf8_whole(job->pending.data, job->pending.bytes - hold);
    if (ready > 0) {
        serve_reply_text(job, job->pending.data, ready, job->pending_logprobs);
        job->pending_logprobs = NULL;
        memmove(job->pending.data, job->pending.data + ready, job->pending.bytes - ready);
        job->pending.bytes -= ready;
    }
    return false;
}

/* The next token from these logits. True: the answer is over. */
static bool next_token(serve_generator *g, serve_job *job, const float *logits)
{
    akv_diag diag = {AKV_OK, ""};
    serve_error error = {0};
    const int64_t token = logits == NULL ? -1 : sample(g, job, logits);
    if (token < 0) {
        serve_fail(&error, 500, "internal_error", NULL, "the model gave logits that are no numbers");
        end(job, NULL, &error);
        return true;
    }
    job->generated++;
    g->generated_tokens++;
    if (akv_llama_is_end(g->host, (int32_t)token)) {
        end(job, "stop", NULL);
        return true;
    }
    char piece[512];
    size_t bytes = 0;
    const akv_status status = akv_llama_token_text(g->host, (int32_t)token, 0, piece, sizeof piece, &bytes, &diag);
    if (status != AKV_OK)
        return fail(job, status, &diag);
    cJSON *logprob =
        job->top_logprobs >= 0 ? serve_reply_logprob(g->host, job, logits, g->vocab_tokens, (int32_t)token) : NULL;
    if (say(job, piece, bytes, logprob))
        return true;
    if (job->generated >= job->max_tokens) {
        end(job, "length", NULL);
        return true;
    }
    job->token = (int32_t)token;
    job->has_token = true;
    return false;
}

/* ------------------------------------------------------------------------------------------------------------- step */

/* From the first token behind the document, or of the text, on. */
static akv_status begin_rolling(serve_generator *g, serve_job *job, akv_diag *diag)
{
    akv_llama_rolling rolling;
    akv_llama_rolling_init(&rolling);
    rolling.config.keep_ratio = g->keep_ratio;
    rolling.full_tokens = g->exact;
    rolling.from_token = job->document != NULL ? UINT32_MAX : 0;
    const akv_status status = akv_llama_set_rolling(g->host, &rolling, diag);
    job->rolls = status == AKV_OK;
    return status;
}

static bool decode(serve_generator *g, serve_job *job, const int32_t *tokens, size_t n)
{
    akv_diag diag = {AKV_OK, ""};
    const akv_status status = akv_llama_decode(g->host, tokens, n, AKV_LLAMA_LOGITS_LAST, &diag);
    if (status == AKV_OK)
        return true;
    if (status != AKV_E_CANCELLED || !serve_generate_expire(job))
        fail(job, status, &diag);
    return false;
}

bool serve_generate(serve_generator *g, serve_job *job, double seconds)
{
    akv_diag diag = {AKV_OK, ""};
    const double start = cli_now();
    if (serve_generate_expire(job))
        return true;
    if (job->conversation == NULL) {
        if (!begin(g, job))
            return true;
        if (job->prompt_done == job->num_prompt) /* a prompt of one token, which stands in the opening */
            return next_token(g, job, g->opening_logits);
    }
    akv_status status = akv_llama_switch(g->host, job->conversation, &diag);
    if (status == AKV_OK && !job->rolls)
        status = begin_rolling(g, job, &diag);
    if (status != AKV_OK)
        return fail(job, status, &diag);
    if (job->prompt_done < job->num_prompt) {
        const size_t left = job->num_prompt - job->prompt_done, n = left < g->batch_tokens ? left : g->batch_tokens;
        if (!decode(g, job, job->prompt + job->prompt_done, n))
            return true;
        job->prompt_done += n;
        g->prompt_tokens += n;
        g->prompt_seconds += cli_now() - start;
        return job->prompt_done == job->num_prompt && next_token(g, job, akv_llama_logits(g->host, -1));
    }
    bool over = false;
    do {
        over = !decode(g, job, &job->token, 1) || next_token(g, job, akv_llama_logits(g->host, -1)) ||
               serve_generate_expire(job);
    } while (!over && cli_now() - start < seconds);
    g->generate_seconds += cli_now() - start;
    return over;
}

void serve_generator_free(serve_generator *g)
{
    akv_llama_store_release(g->opening);
    akv_llama_close(g->host);
    akv_llama_close(g->opener);
    free(g->opening_logits);
    free(g->scratch);
}
