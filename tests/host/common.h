/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - what the host's tests share: checks, stock llama.cpp runs to compare with, and divergence between logits.
 */
#ifndef AKV_TESTS_HOST_COMMON_H
#define AKV_TESTS_HOST_COMMON_H

#include <akv_llama.h>
#include <llama.h>

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* A failed check ends the test program: later checks would only repeat it. */
#define CHECK(condition, ...) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, "\n"); \
            exit(1); \
        } \
    } while (0)

#define CHECK_OK(call) \
    do { \
        akv_diag check_diag = {.status = AKV_OK}; \
        akv_diag *diag = &check_diag; \
        const akv_status check_status = (call); \
        CHECK(check_status == AKV_OK, "%s: %s", akv_status_str(check_status), check_diag.message); \
    } while (0)

/* The call must fail with `wanted` and a message that contains `text`. */
#define CHECK_FAILS(call, wanted, text) \
    do { \
        akv_diag check_diag = {.status = AKV_OK}; \
        akv_diag *diag = &check_diag; \
        const akv_status check_status = (call); \
        CHECK(check_status == (wanted), "got %s: %s", akv_status_str(check_status), check_diag.message); \
        CHECK(contains(check_diag.message, text), "message is: %s", check_diag.message); \
    } while (0)

int contains(const char *text, const char *part);

typedef struct divergence {
    double mean_kl; /* nats per token, of the second row against the first */
    double max_kl;
    double max_abs; /* logit difference */
    size_t same_top;
    size_t rows;
} divergence;

divergence compare_logits(const float *reference, const float *other, size_t rows, size_t vocab);
void print_divergence(const char *name, const divergence *d);

/* Load a model that stock runs share; logs are silenced. */
struct llama_model *stock_load(const char *path);
/*
 * Stock llama.cpp: read `document`, then `rest` one token at a time (single != 0) or in one batch, and give the logits
 * of every token of rest. flash: 0 = off, 1 = on. From malloc.
 */
float *stock_run(struct llama_model *model, int flash, const int32_t *document, size_t num_document,
                 const int32_t *rest, size_t num_rest, int single, uint32_t batch);

/* The same without flash attention, one by one and in a batch, after reading the document once; full attention only. */
void stock_run_both(struct llama_model *model, const int32_t *document, size_t num_document, const int32_t *rest,
                    size_t num_single, size_t num_batch, uint32_t batch, float **single_out, float **batch_out);

/* The hosted counterpart of the same run, on a host that is attached or prefilled; rewinds first. From malloc. */
float *hosted_run(akv_llama *host, const int32_t *rest, size_t num_rest, int single);

akv_llama *open_host(const char *path, uint32_t tail_cells, uint32_t batch);
/* Prefill, compress with everything kept exactly, free the dense cache, attach. */
akv_llama_store *host_exactly(akv_llama *host, const int32_t *document, size_t n);

/* Deterministic token ids in [0, vocab). From malloc. */
int32_t *random_tokens(size_t n, uint32_t vocab, uint64_t seed);

/* Whole file, zero-terminated, from malloc. */
char *read_file(const char *path, size_t *bytes);

#endif
