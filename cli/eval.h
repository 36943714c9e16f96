/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eval.h - what the files of `akv eval` share: the ways of keeping a cache that are compared, what was measured of
 * each, and the rows that tables, JSON and plots are made of.
 *
 *   cmd_eval.c      options; the list of ways; what is printed and written
 *   eval_text.c     continuations: logits of every way against the dense cache
 *   eval_needles.c  retrieval: questions about facts in the context
 *   eval_rows.c     samples -> rows with spread
 *   eval_print.c    the table, the JSON;   eval_html.c, eval_plot.c  the page
 */
#ifndef AKV_CLI_EVAL_H
#define AKV_CLI_EVAL_H

#include "needles.h"
#include "session.h"
#include "shares.h"

enum { EVAL_MAX_WAYS = 96, EVAL_MAX_LIST = 16, EVAL_DEPTHS = 4 };

typedef enum eval_protocol {
    EVAL_AGNOSTIC = 0, /* the context alone is compressed; the question comes later */
    EVAL_AWARE = 1     /* the question and the opening of its answer end the compressed prompt */
} eval_protocol;

typedef enum eval_kind {
    EVAL_DENSE = 0, /* the reference; its own figures are the engine's noise: the same cache run in other batches */
    EVAL_EXACT = 1, /* identity control: everything kept, through the library's path */
    EVAL_AKV = 2,
    EVAL_SNAPKV = 3,
    EVAL_ROTATED = 4, /* rotated.h */
    EVAL_CACHE = 5    /* a cache type of libllama, stock throughout */
} eval_kind;

/* One continuation: means over its tokens. */
typedef struct eval_piece {
    double nll; /* nats a token */
    double dense_nll;
    double kld;
    double top1;
} eval_piece;

/* One question about one context. */
typedef struct eval_answer {
    unsigned task;
    uint64_t sample;
    double found; /* share of its values */
    unsigned num_values;
    bool hit[NEEDLE_VALUES];
    double depth[NEEDLE_VALUES];
} eval_answer;

typedef struct eval_way {
    eval_kind kind;
    char method[16];     /* dense, exact, akv, snapkv, rotated3, q8_0 ... */
    akv_profile profile; /* EVAL_AKV */
    double ratio;        /* asked for; 0 = the method decides */
    uint32_t bits;       /* EVAL_ROTATED */
    akv_llama_cache_type cache_type;
    /* measured */
    uint64_t bytes, dense_bytes; /* sums over `caches` caches */
    uint64_t caches;
    double compress_seconds;
    eval_piece *pieces; /* [options.pieces] */
    size_t num_pieces;
    eval_answer *answers[2]; /* [protocol] -> [samples * tasks] */
    size_t num_answers[2];
    char reason[320]; /* why it could not be measured (further); empty = it could */
} eval_way;

/* What --method can name. */
typedef struct eval_method {
    const char *name;
    eval_kind kind;
    uint32_t bits;
    akv_llama_cache_type cache_type;
} eval_method;

typedef struct eval_options {
    cli_settings settings; /* model, files, seed, threads, raw, system, quiet, json */
    const char *html;
    uint64_t ctx;          /* tokens that are compressed */
    uint64_t continuation; /* tokens after them */
    uint64_t pieces;       /* continuations */
    uint64_t samples;      /* contexts with needles */
    bool pieces_given;
    bool protocol[2];
    uint32_t tasks; /* bit set; 0 = no needles */
    bool equal_bytes;
    bool show; /* print what every question was answered */
    double ratios[EVAL_MAX_LIST];
    size_t num_ratios;
    akv_profile profiles[EVAL_MAX_LIST];
    size_t num_profiles;
    const eval_method *methods[EVAL_MAX_LIST];
    size_t num_methods;
} eval_options;

typedef struct eval_run {
    const eval_options *options;
    cli_session session;
    cli_buffer text;
    int32_t *tokens; /* of the whole text, plain */
    size_t num_tokens;
    int32_t *head; /* what the model puts before every text (BOS), or nothing */
    size_t num_head;
    eval_way ways[EVAL_MAX_WAYS];
    size_t num_ways;
    bool counting; /* bytes and time of the caches: those of one length, the pieces' where there are any */
    bool complete;
    double seconds;
    char label[80]; /* what is being done, for the bar */
} eval_run;

/* ------------------------------------------------------------------------------------------------------- measuring */

/* Model and text; run is zeroed before. Exit code; eval_close whatever happens. o->pieces may come out smaller. */
int eval_open(eval_run *run, eval_options *o);
void eval_close(eval_run *run);
/* The p-th piece of the text: ctx tokens (with what the model puts first) to document, *rest points to what follows. */
void eval_piece_tokens(const eval_run *run, uint64_t piece, uint64_t *random, int32_t *document, const int32_t **rest);
/* Both return an exit code; a way that cannot be measured gets its reason and does not end the run. */
int eval_continuations(eval_run *run);
int eval_retrieval(eval_run *run);

/* The dense cache of the prefilled document in the manner of `way`, attached. Notes bytes and time. */
akv_status eval_compress(eval_run *run, eval_way *way, akv_diag *diag);
/*
 * After a failure: CLI_OK when only this way is out (its reason is noted), else the exit code, printed. `what` is for
 * the message, e.g. "text 2".
 */
int eval_failed(eval_run *run, eval_way *way, akv_status status, const akv_diag *diag);
/* Sets the bar's label, e.g. "text 2/4 akv default 10x". */
void eval_label(eval_run *run, const char *what, uint64_t number, uint64_t total, const eval_way *way);
/* "akv default", "snapkv" into a static buffer, one use at a time. */
const char *eval_name(const eval_way *way);
void eval_note(const eval_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ------------------------------------------------------------------------------------------------------------ rows */

typedef struct eval_row {
    const eval_way *way;
    eval_protocol protocol;
    double bytes, dense_bytes; /* means over caches */
    double ratio;              /* measured */
    double compress_seconds;   /* a cache */
    /* continuations */
    size_t pieces;
    double ppl, dense_ppl, ppl_rise,
        ppl_rise_error; /* rise: ppl / dense_ppl - 1; errors: standard errors over pieces */
    double kld, kld_error, top1, top1_error;
    /* needles */
    size_t contexts, questions;
    double retrieval, retrieval_error; /* mean over tasks of the mean over contexts */
    double dense_retrieval;
    bool has_share;
    double share, share_low, share_high; /* of dense, 90 % range */
    double by_task[NEEDLE_TASKS];        /* NAN: not asked */
    double by_depth[EVAL_DEPTHS];        /* values of the one-place depth quarters found; NAN: none there */
} eval_row;

/* One row for each way and protocol; [capacity], returns how many. */
size_t eval_rows(const eval_run *run, eval_row *rows, size_t capacity);

int eval_print_table(const eval_run *run, const eval_row *rows, size_t num_rows);
int eval_write_json(const eval_run *run, const eval_row *rows, size_t num_rows, const char *path);
int eval_write_html(const eval_run *run, const eval_row *rows, size_t num_rows, const char *path);

#endif
