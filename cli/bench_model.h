/* SPDX-License-Identifier: Apache-2.0 */
/* bench_model.h - `akv bench --model`: tokens per second of a whole model, beside libllama on its own. */
#ifndef AKV_CLI_BENCH_MODEL_H
#define AKV_CLI_BENCH_MODEL_H

#include <stddef.h>
#include <stdint.h>

struct cJSON;

typedef struct bench_model_options {
    const char *model;
    const char *const *documents; /* [num_documents] .akv files of that model */
    size_t num_documents;
    uint32_t threads; /* 0 = 1, then 2 */
    uint32_t rounds;
} bench_model_options;

/* Appends rows; prints them. Returns an exit code. */
int bench_model_run(const bench_model_options *options, struct cJSON *rows);

#endif
