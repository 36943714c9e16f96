/* SPDX-License-Identifier: Apache-2.0 */
/*
 * needles.h - retrieval questions in the manner of RULER (its task families, our own wording): prose with fact
 * sentences at several depths, and questions about them, each with the opening of its answer.
 */
#ifndef AKV_CLI_NEEDLES_H
#define AKV_CLI_NEEDLES_H

#include "cli.h"

enum {
    NEEDLE_TASKS = 6,  /* word, number, uuid, multi_key, multi_value, multi_query */
    NEEDLE_VALUES = 4, /* most values of one question */
    NEEDLE_FACTS = 15  /* of all tasks together */
};

extern const char *const needle_task_names[NEEDLE_TASKS];

typedef struct needle_question {
    unsigned task;
    char ask[320];
    char opening[320]; /* how the answer begins; the values follow */
    char values[NEEDLE_VALUES][48];
    double depth[NEEDLE_VALUES]; /* where each value stands in the context, 0 start, 1 end */
    unsigned num_values;
} needle_question;

typedef struct needle_context {
    cli_buffer text;
    needle_question questions[NEEDLE_TASKS];
    unsigned num_questions;
} needle_context;

/* How long a context may be, in the model's tokens; false ends the building (the reason was printed). */
typedef bool (*needle_count_fn)(void *opaque, const char *text, size_t bytes, uint64_t *tokens);

typedef struct needle_request {
    uint32_t tasks; /* bit set over the tasks */
    uint64_t seed;
    uint64_t sample; /* number of this context, of num_samples: decides where in the prose it begins */
    uint64_t num_samples;
    const char *prose;
    size_t prose_bytes;
    uint64_t room;         /* tokens of the context at most, as `whole` counts them */
    needle_count_fn part;  /* tokens of a sentence */
    needle_count_fn whole; /* tokens of a whole context as the model will read it */
    void *opaque;
} needle_request;

/*
 * One context with all the facts of the tasks, spread evenly over its depth in random order, and its questions. The
 * same request gives the same context. An exit code; the reason was printed. Free the text with cli_buffer_free.
 */
int needle_build(const needle_request *request, needle_context *out);

/* Length of the next sentence at text[*at], which is moved past white space; 0 at the end. For tests. */
size_t needle_sentence(const char *text, size_t bytes, size_t *at);

/* Share of the values that occur in the answer, ignoring case; hit[] says which. */
double needle_found(const needle_question *question, const char *answer, bool hit[NEEDLE_VALUES]);

#endif
