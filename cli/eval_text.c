/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eval_text.c - what compressing a text's beginning does to the prediction of what follows it: perplexity,
 * Kullback-Leibler divergence and agreement of the likeliest token, against the dense cache of the same text.
 *
 * The dense logits of a piece are computed once, all methods are compared with them. Tokens are forced in batches: the
 * same batches for every method, since a quantised model's products depend a little on the batch.
 */
#include "eval.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 64, NOISE_BATCH = 16 };

/* Log-probabilities of one row; false when a logit is no number. */
static bool log_softmax(const float *logits, size_t n, float *out)
{
    float top = logits[0];
    double sum = 0.0;
    for (size_t i = 1; i < n; i++)
        top = logits[i] > top ? logits[i] : top;
    for (size_t i = 0; i < n; i++)
        sum += expf(logits[i] - top);
    if (!isfinite(sum) || !(sum > 0.0))
        return false;
    const float shift = top + (float)log(sum);
    for (size_t i = 0; i < n; i++)
        out[i] = logits[i] - shift;
    return true;
}

static size_t top_of(const float *row, size_t n)
{
    size_t top = 0;
    for (size_t i = 1; i < n; i++)
        top = row[i] > row[top] ? i : top;
    return top;
}

static double divergence(const float *reference, const float *other, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        if (reference[i] > -80.0f) /* e^-80 of anything is nothing, and -inf times 0 is no number */
            sum += (double)expf(reference[i]) * ((double)reference[i] - other[i]);
    return sum;
}

typedef struct forcing {
    const int32_t *tokens; /* [rows + 1]; row i predicts tokens[i + 1] */
    size_t rows;
    float *reference; /* [rows, vocab] log-probabilities of the dense cache */
    float *row;       /* [vocab] */
} forcing;

/* Runs the tokens behind the document and compares. With out == NULL the outcome becomes the reference. */
static akv_status force(eval_run *run, const forcing *f, size_t batch, double *dense_nll, eval_piece *out,
                        akv_diag *diag)
{
    akv_llama *host = run->session.host;
    const size_t vocab = run->session.model.vocab_tokens;
    akv_status status = akv_llama_rewind(host, diag);
    eval_piece sum = {0.0, *dense_nll, 0.0, 0.0};
    for (size_t done = 0; status == AKV_OK && done < f->rows; done += batch) {
        const size_t n = f->rows - done < batch ? f->rows - done : batch;
        status = akv_llama_decode(host, f->tokens + done, n, AKV_LLAMA_LOGITS_ALL, diag);
        for (size_t i = 0; status == AKV_OK && i < n; i++) {
            float *reference = f->reference + (done + i) * vocab, *row = out != NULL ? f->row : reference;
            if (!log_softmax(akv_llama_logits(host, (int64_t)i), vocab, row)) {
                diag->status = AKV_E_NON_FINITE;
                strcpy(diag->message, "the logits are no numbers");
                return AKV_E_NON_FINITE;
            }
            sum.nll -= row[f->tokens[done + i + 1]] / (double)f->rows;
            if (out == NULL)
                continue;
            sum.kld += divergence(reference, row, vocab) / (double)f->rows;
            sum.top1 += (top_of(reference, vocab) == top_of(row, vocab)) / (double)f->rows;
        }
    }
    if (status == AKV_OK && out != NULL)
        *out = sum;
    else if (status == AKV_OK)
        *dense_nll = sum.nll;
    return status;
}

static int measured(eval_run *run, eval_way *way, const eval_piece *piece)
{
    way->pieces[way->num_pieces++] = *piece;
    eval_note(run, "%s: KLD %.5f, top-1 %.1f %%, perplexity %.3f (dense %.3f)", run->label, piece->kld,
              100.0 * piece->top1, exp(piece->nll), exp(piece->dense_nll));
    return CLI_OK;
}

/* One way on the piece whose dense cache is prefilled. */
static int measure(eval_run *run, eval_way *way, const forcing *f, double dense_nll, const int32_t *document)
{
    akv_llama *host = run->session.host;
    const size_t length = (size_t)run->options->ctx;
    eval_piece piece = {0};
    akv_diag diag = {AKV_OK, ""};
    akv_status status = AKV_OK;
    if (way->kind == EVAL_CACHE)
        status = akv_llama_prefill_cache(host, way->cache_type, document, length, f->rows, &diag);
    else if (way->kind != EVAL_DENSE)
        status = eval_compress(run, way, &diag);
    if (status == AKV_OK)
        status = force(run, f, way->kind == EVAL_DENSE ? NOISE_BATCH : BATCH, &dense_nll, &piece, &diag);
    akv_llama_detach(host, NULL);
    if (way->kind != EVAL_CACHE) { /* the dense cache stands behind the document again, whatever happened */
        const akv_status back = akv_llama_rewind(host, status == AKV_OK ? &diag : NULL);
        status = status == AKV_OK ? back : status;
    }
    return status == AKV_OK ? measured(run, way, &piece) : eval_failed(run, way, status, &diag);
}

static int one_piece(eval_run *run, uint64_t number, const int32_t *document, const int32_t *rest, forcing *f)
{
    akv_llama *host = run->session.host;
    akv_diag diag = {AKV_OK, ""};
    double dense_nll = 0.0;
    f->tokens = rest;
    eval_label(run, "text", number, run->options->pieces, NULL);
    akv_status status = akv_llama_prefill(host, document, (size_t)run->options->ctx, f->rows, &diag);
    if (status == AKV_OK)
        status = force(run, f, BATCH, &dense_nll, NULL, &diag);
    if (status == AKV_OK)
        status = akv_llama_rewind(host, &diag);
    if (status != AKV_OK)
        return eval_failed(run, NULL, status, &diag);
    /* the ways that share this dense cache first; a cache of another type takes its place */
    for (int native = 0; native < 2; native++) {
        for (size_t i = 0; i < run->num_ways; i++) {
            eval_way *way = &run->ways[i];
            if (way->reason[0] != '\0' || (way->kind == EVAL_CACHE) != (native != 0))
                continue;
            eval_label(run, "text", number, run->options->pieces, way);
            const int code = measure(run, way, f, dense_nll, document);
            if (code != CLI_OK)
                return code;
        }
    }
    return CLI_OK;
}

void eval_piece_tokens(const eval_run *run, uint64_t piece, uint64_t *random, int32_t *document, const int32_t **rest)
{
    const eval_options *o = run->options;
    const size_t plain = (size_t)o->ctx - run->num_head, needed = plain + (size_t)o->continuation + 1;
    const size_t stretch = run->num_tokens / (size_t)o->pieces;
    /* a random place in the piece's stretch: pieces do not overlap, and another seed gives others */
    const size_t from = (size_t)piece * stretch + (size_t)cli_random_below(random, stretch - needed + 1);
    memcpy(document, run->head, run->num_head * sizeof *document);
    memcpy(document + run->num_head, run->tokens + from, plain * sizeof *document);
    *rest = run->tokens + from + plain;
}

int eval_continuations(eval_run *run)
{
    const eval_options *o = run->options;
    const size_t vocab = run->session.model.vocab_tokens, length = (size_t)o->ctx;
    forcing f = {.rows = (size_t)o->continuation};
    f.reference = f.rows <= SIZE_MAX / sizeof(float) / vocab ? malloc(f.rows * vocab * sizeof(float)) : NULL;
    f.row = malloc(vocab * sizeof(float));
    int32_t *document = malloc(length * sizeof *document);
    int code = f.reference && f.row && document ? CLI_OK
                                                : cli_fail(CLI_NO_MEMORY, "no memory for the logits of %zu tokens (%s)",
                                                           f.rows, cli_bytes((uint64_t)f.rows * vocab * sizeof(float)));
    uint64_t random = o->settings.seed;
    run->counting = true;
    for (uint64_t p = 0; code == CLI_OK && p < o->pieces; p++) {
        const int32_t *rest;
        eval_piece_tokens(run, p, &random, document, &rest);
        code = one_piece(run, p + 1, document, rest, &f);
    }
    free(f.reference);
    free(f.row);
    free(document);
    return code;
}
