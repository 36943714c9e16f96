/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eval_needles.c - retrieval: facts in the context, a question each, greedy answers, and whether the facts are in them.
 * One context carries the facts of all tasks and is read once; every way answers all of its questions.
 */
#include "eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXTRA_TOKENS = 16 }; /* an answer may be this much longer than its values */

typedef struct question {
    const needle_question *text;
    int32_t *tokens; /* separator, question, turn, opening of the answer */
    size_t num_tokens;
    size_t answer_tokens; /* greedy tokens at most */
} question;

typedef struct context {
    needle_context text;
    int32_t *tokens;
    size_t num_tokens;
    question questions[NEEDLE_TASKS];
    size_t longest; /* tokens of a question and its answer */
} context;

/* ------------------------------------------------------------------------------------------------------- rendering */

static bool fail(const akv_diag *diag, akv_status status)
{
    cli_fail_diag(status, diag, NULL);
    return false;
}

static bool count_part(void *opaque, const char *text, size_t bytes, uint64_t *tokens)
{
    const eval_run *run = opaque;
    char spaced[1024] = " ";
    int32_t *ids = NULL;
    size_t n = 0;
    akv_diag diag = {AKV_OK, ""};
    const bool fits = bytes < sizeof spaced - 1;
    if (fits)
        memcpy(spaced + 1, text, bytes);
    akv_status status =
        akv_llama_tokenize(run->session.host, fits ? spaced : text, fits ? bytes + 1 : bytes, 0, 0, &ids, &n, &diag);
    akv_llama_free_tokens(ids);
    *tokens = n;
    return status == AKV_OK || fail(&diag, status);
}

static bool count_whole(void *opaque, const char *text, size_t bytes, uint64_t *tokens)
{
    const eval_run *run = opaque;
    const cli_session *s = &run->session;
    int32_t *ids = NULL;
    size_t n = 0;
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_render_document(s->host, s->form, s->system, text, bytes, &ids, &n, &diag);
    akv_llama_free_tokens(ids);
    *tokens = n;
    return status == AKV_OK || fail(&diag, status);
}

/* `text` behind the tokens of *list. */
static int append(eval_run *run, int32_t **list, size_t *count, const char *text)
{
    int32_t *more = NULL;
    size_t n = 0;
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_tokenize(run->session.host, text, strlen(text), 0, 0, &more, &n, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    int32_t *grown = realloc(*list, (*count + n + 1) * sizeof *grown);
    if (grown != NULL) {
        memcpy(grown + *count, more, n * sizeof *grown);
        *list = grown;
        *count += n;
    }
    akv_llama_free_tokens(more);
    return grown != NULL ? CLI_OK : cli_fail(CLI_NO_MEMORY, "no memory for a question");
}

static int render_question(eval_run *run, const needle_question *text, question *q)
{
    const cli_session *s = &run->session;
    const bool raw = s->form == AKV_LLAMA_RAW;
    char ask[768], opening[400], values[NEEDLE_VALUES * 50] = "";
    akv_diag diag = {AKV_OK, ""};
    q->text = text;
    snprintf(ask, sizeof ask, raw ? "\n\nQuestion: %s\nAnswer:" : "Question: %s", text->ask);
    snprintf(opening, sizeof opening, raw ? " %s" : "%s", text->opening);
    for (unsigned i = 0, used = 0; i < text->num_values; i++)
        used += (unsigned)snprintf(values + used, sizeof values - used, "%s%s", i == 0 ? " " : ", ", text->values[i]);
    akv_status status =
        akv_llama_render_question(s->host, s->form, s->system, ask, strlen(ask), &q->tokens, &q->num_tokens, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    int32_t *answer = NULL;
    int code = append(run, &q->tokens, &q->num_tokens, opening);
    if (code == CLI_OK)
        code = append(run, &answer, &q->answer_tokens, values);
    q->answer_tokens += EXTRA_TOKENS;
    free(answer);
    return code;
}

static void context_free(context *c)
{
    cli_buffer_free(&c->text.text);
    akv_llama_free_tokens(c->tokens);
    for (unsigned i = 0; i < NEEDLE_TASKS; i++)
        free(c->questions[i].tokens);
    memset(c, 0, sizeof *c);
}

static int context_make(eval_run *run, uint64_t sample, context *c)
{
    const eval_options *o = run->options;
    const cli_session *s = &run->session;
    const needle_request request = {.tasks = o->tasks,
                                    .seed = o->settings.seed,
                                    .sample = sample,
                                    .num_samples = o->samples,
                                    .prose = run->text.data,
                                    .prose_bytes = run->text.bytes,
                                    .room = o->ctx,
                                    .part = count_part,
                                    .whole = count_whole,
                                    .opaque = run};
    memset(c, 0, sizeof *c);
    int code = needle_build(&request, &c->text);
    akv_diag diag = {AKV_OK, ""};
    if (code == CLI_OK) {
        const akv_status status = akv_llama_render_document(s->host, s->form, s->system, c->text.text.data,
                                                            c->text.text.bytes, &c->tokens, &c->num_tokens, &diag);
        if (status != AKV_OK)
            code = cli_fail_diag(status, &diag, NULL);
    }
    for (unsigned i = 0; code == CLI_OK && i < c->text.num_questions; i++) {
        question *q = &c->questions[i];
        code = render_question(run, &c->text.questions[i], q);
        if (q->num_tokens + q->answer_tokens > c->longest)
            c->longest = q->num_tokens + q->answer_tokens;
    }
    return code;
}

/* --------------------------------------------------------------------------------------------------------- answers */

/*
 * Greedy answer to one question, behind whatever the host holds now. `first` >= 0: the question was part of the prompt,
 * and this is the first token of the answer.
 */
static akv_status answer(eval_run *run, const question *q, int64_t first, eval_answer *out, akv_diag *diag)
{
    akv_llama *host = run->session.host;
    cli_buffer text = {NULL, 0, 0};
    akv_status status = akv_llama_rewind(host, diag);
    if (status == AKV_OK && first < 0)
        status = akv_llama_decode(host, q->tokens, q->num_tokens, AKV_LLAMA_LOGITS_LAST, diag);
    out->found = 0.0;
    for (size_t n = 0; status == AKV_OK && n < q->answer_tokens && out->found < 1.0; n++) {
        const float *logits = n == 0 && first >= 0 ? NULL : akv_llama_logits(host, -1);
        int64_t token = first;
        if (logits != NULL) {
            token = 0;
            for (uint32_t i = 1; i < run->session.model.vocab_tokens; i++)
                token = logits[i] > logits[token] ? (int64_t)i : token;
        }
        char piece[256];
        size_t bytes = 0;
        if (akv_llama_is_end(host, (int32_t)token))
            break;
        if (akv_llama_token_text(host, (int32_t)token, 0, piece, sizeof piece, &bytes, NULL) == AKV_OK &&
            !cli_buffer_add(&text, piece, bytes))
            status = AKV_E_NO_MEMORY;
        out->found = text.data != NULL ? needle_found(q->text, text.data, out->hit) : 0.0;
        const int32_t fed = (int32_t)token;
        if (status == AKV_OK && out->found < 1.0 && n + 1 < q->answer_tokens)
            status = akv_llama_decode(host, &fed, 1, AKV_LLAMA_LOGITS_LAST, diag);
    }
    if (status == AKV_OK && run->options->show)
        eval_note(run, "%s: %s: wanted %s%s%s, got:%.300s", run->label, needle_task_names[q->text->task],
                  q->text->values[0], q->text->num_values > 1 ? ", " : "",
                  q->text->num_values > 1 ? q->text->values[1] : "", text.data != NULL ? cli_printable(text.data) : "");
    cli_buffer_free(&text);
    return status;
}

/* Room for the answers of one context is there; they count only when the whole context was answered. */
static eval_answer *slot(eval_way *way, eval_protocol protocol, const context *c, unsigned i, uint64_t sample)
{
    eval_answer *out = &way->answers[protocol][way->num_answers[protocol] + i];
    const needle_question *q = &c->text.questions[i];
    memset(out, 0, sizeof *out);
    out->task = q->task;
    out->sample = sample;
    out->num_values = q->num_values;
    memcpy(out->depth, q->depth, sizeof out->depth);
    return out;
}

static void count(eval_run *run, eval_way *way, eval_protocol protocol, const context *c)
{
    double sum = 0.0;
    const unsigned n = c->text.num_questions;
    for (unsigned i = 0; i < n; i++)
        sum += way->answers[protocol][way->num_answers[protocol] + i].found;
    way->num_answers[protocol] += n;
    eval_note(run, "%s: %.2f of the values found, question-%s", run->label, sum / n,
              protocol == EVAL_AWARE ? "aware" : "agnostic");
}

/* All questions to what the host holds, a context that was compressed (or not) without them. */
static int ask_all(eval_run *run, eval_way *way, const context *c, uint64_t sample)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status = AKV_OK;
    for (unsigned i = 0; status == AKV_OK && i < c->text.num_questions; i++)
        status = answer(run, &c->questions[i], -1, slot(way, EVAL_AGNOSTIC, c, i, sample), &diag);
    akv_llama_detach(run->session.host, NULL);
    if (status != AKV_OK)
        return eval_failed(run, way, status, &diag);
    count(run, way, EVAL_AGNOSTIC, c);
    return CLI_OK;
}

static bool is_stock(const eval_way *way)
{
    return way->kind == EVAL_DENSE || way->kind == EVAL_CACHE;
}

/* Agnostic; libllama's own caches, which know no protocols, are asked in any case. */
static int ask_agnostic(eval_run *run, const context *c, uint64_t sample, bool caches)
{
    akv_llama *host = run->session.host;
    for (size_t i = 0; i < run->num_ways; i++) {
        eval_way *way = &run->ways[i];
        if (way->reason[0] != '\0' || (way->kind == EVAL_CACHE) != caches ||
            (!is_stock(way) && !run->options->protocol[EVAL_AGNOSTIC]))
            continue;
        akv_diag diag = {AKV_OK, ""};
        akv_status status = akv_llama_rewind(host, &diag);
        eval_label(run, "needles", sample + 1, run->options->samples, way);
        if (way->kind == EVAL_CACHE)
            status = akv_llama_prefill_cache(host, way->cache_type, c->tokens, c->num_tokens, c->longest, &diag);
        else if (status == AKV_OK && way->kind != EVAL_DENSE)
            status = eval_compress(run, way, &diag);
        const int code = status == AKV_OK ? ask_all(run, way, c, sample) : eval_failed(run, way, status, &diag);
        if (code != CLI_OK)
            return code;
    }
    return CLI_OK;
}

/* Context and question as one document in the dense cache; the answer's first token. */
static akv_status read_question(eval_run *run, const context *c, const question *q, int64_t *first, akv_diag *diag)
{
    akv_llama *host = run->session.host;
    akv_status status = akv_llama_extend(host, q->tokens, q->num_tokens, diag);
    if (status == AKV_E_UNSUPPORTED) { /* models that cannot go back: the slow way */
        const size_t total = c->num_tokens + q->num_tokens;
        int32_t *both = malloc(total * sizeof *both);
        if (both == NULL)
            return AKV_E_NO_MEMORY;
        memcpy(both, c->tokens, c->num_tokens * sizeof *both);
        memcpy(both + c->num_tokens, q->tokens, q->num_tokens * sizeof *both);
        status = akv_llama_prefill(host, both, total, c->longest, diag);
        free(both);
    }
    const float *logits = status == AKV_OK ? akv_llama_logits(host, -1) : NULL;
    *first = 0;
    for (uint32_t i = 1; logits != NULL && i < run->session.model.vocab_tokens; i++)
        *first = logits[i] > logits[*first] ? (int64_t)i : *first;
    return status;
}

static int ask_aware(eval_run *run, const context *c, uint64_t sample)
{
    akv_llama *host = run->session.host;
    for (unsigned i = 0; i < c->text.num_questions; i++) {
        int64_t first = 0;
        akv_diag diag = {AKV_OK, ""};
        eval_label(run, "needles", sample + 1, run->options->samples, NULL);
        akv_status status = read_question(run, c, &c->questions[i], &first, &diag);
        if (status != AKV_OK)
            return eval_failed(run, NULL, status, &diag);
        for (size_t w = 0; w < run->num_ways; w++) {
            eval_way *way = &run->ways[w];
            if (way->reason[0] != '\0' || way->kind == EVAL_CACHE)
                continue;
            eval_label(run, "needles", sample + 1, run->options->samples, way);
            status = way->kind == EVAL_DENSE ? AKV_OK : eval_compress(run, way, &diag);
            if (status == AKV_OK)
                status = answer(run, &c->questions[i], first, slot(way, EVAL_AWARE, c, i, sample), &diag);
            akv_llama_detach(host, NULL);
            if (status == AKV_OK && way->kind == EVAL_DENSE)
                status = akv_llama_rewind(host, &diag);
            if (status != AKV_OK) {
                const int code = eval_failed(run, way, status, &diag);
                if (code != CLI_OK)
                    return code;
            }
        }
    }
    for (size_t w = 0; w < run->num_ways; w++) {
        eval_way *way = &run->ways[w];
        if (way->reason[0] == '\0' && way->kind != EVAL_CACHE) {
            eval_label(run, "needles", sample + 1, run->options->samples, way);
            count(run, way, EVAL_AWARE, c);
        }
    }
    return CLI_OK;
}

int eval_retrieval(eval_run *run)
{
    const eval_options *o = run->options;
    int code = CLI_OK;
    run->counting = o->pieces == 0;
    for (uint64_t sample = 0; code == CLI_OK && sample < o->samples; sample++) {
        context c;
        akv_diag diag = {AKV_OK, ""};
        eval_label(run, "needles", sample + 1, o->samples, NULL);
        code = context_make(run, sample, &c);
        if (code == CLI_OK) {
            const akv_status status = akv_llama_prefill(run->session.host, c.tokens, c.num_tokens, c.longest, &diag);
            if (status != AKV_OK)
                code = eval_failed(run, NULL, status, &diag);
        }
        if (code == CLI_OK)
            code = ask_agnostic(run, &c, sample, false);
        if (code == CLI_OK && o->protocol[EVAL_AWARE])
            code = ask_aware(run, &c, sample);
        if (code == CLI_OK)
            code = ask_agnostic(run, &c, sample, true);
        context_free(&c);
    }
    return code;
}
