/* SPDX-License-Identifier: Apache-2.0 */
/*
 * golden.h - files of format 1 that must stay readable, and broken ones that must stay refused. What is expected of
 * each is a line of v1/expected.tsv, fields separated by tabs:
 *
 *   FILE  0  KEYS VALUES ATTEND   opens; figures of what the double-precision reference reads from it
 *   FILE  STATUS  SENTENCE        refused, with exactly this status and sentence
 *
 * KEYS and VALUES are sums over all decoded numbers, ATTEND over the outputs of one attention step, each number times
 * a weight drawn from [-1, 1): no two errors cancel but by chance. A document's figures are the sums over its segments.
 *
 * Names: *.akvs one segment, *.akv a document.
 */
#ifndef AKV_GOLDEN_H
#define AKV_GOLDEN_H

#include "cases.h"

#include <anchorkv/akv_document.h>

#define GOLDEN_EXPECTED "expected.tsv"

typedef struct golden_figures {
    double keys, values, attend;
} golden_figures;

/* The bytes of a file, 64-byte aligned, free()d by the caller; exits with a message when it cannot be read. */
uint8_t *golden_read(const char *path, size_t *bytes);

/* Called with each segment of a file that opened. */
typedef void (*golden_visit)(const char *name, const akv_segment *segment, void *opaque);

/* Opens a segment or, by its name, a document (verified too), and hands its segments to visit (or NULL). */
akv_status golden_open(const char *name, const void *data, size_t bytes, golden_visit visit, void *opaque,
                       akv_diag *diag);

/* One attention step over the segment: made-up queries of all heads, out and scratch allocated; golden_attend_free. */
typedef struct golden_attend {
    akv_attend_params params;
    void *queries;
    float *out;
    uint64_t rows;
} golden_attend;
void golden_attend_make(const akv_segment *segment, const akv_segment *const *list, golden_attend *a);
void golden_attend_free(golden_attend *a);

/* Adds the reference's figures of a segment. */
void golden_add(const akv_segment *segment, golden_figures *sum);

#endif
