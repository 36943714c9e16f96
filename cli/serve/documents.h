/* SPDX-License-Identifier: Apache-2.0 */
/* documents.h - what documents.c and reader.c share. */
#ifndef AKV_CLI_SERVE_DOCUMENTS_H
#define AKV_CLI_SERVE_DOCUMENTS_H

#include "serve.h"

struct serve_documents {
    const serve_options *options;
    akv_llama *host;   /* texts */
    akv_llama *reader; /* the thread's */
    akv_threads *threads;
    serve_turn *turn;
    akv_pool *pool;
    uint32_t context;
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    serve_document *first; /* newest first; one reference each */
    serve_document *current;
    uint64_t waiting;
    bool stop;
    uint64_t tokens_read;
    double read_seconds;
};

/* One reference less. With the lock. */
void serve_document_unref(serve_document *document);

/* The thread, and what its host calls inside long steps. */
void *serve_reader_run(void *documents);
int serve_reader_progress(void *documents, akv_llama_stage stage, uint64_t done, uint64_t total);

#endif
