/* SPDX-License-Identifier: Apache-2.0 */
/* session.h - a model with a document behind it, as `akv ask` and `akv pack` use it. */
#ifndef AKV_CLI_SESSION_H
#define AKV_CLI_SESSION_H

#include "cli.h"

#include <akv_llama.h>

typedef struct cli_settings {
    const char *model;
    const char **files; /* [num_files] texts to read */
    size_t num_files;
    cli_size_goal goal;
    akv_profile profile;
    cli_method method;
    uint64_t seed;
    const char *shares; /* file of `akv calibrate`, or NULL */
    uint32_t threads;
    bool raw;
    bool quiet;
    const char *system; /* NULL = none */
    const char *json;   /* NULL = no JSON report */
    uint32_t tail_cells; /* 0 = the host's default */
} cli_settings;

void cli_settings_init(cli_settings *settings);

/* A store as a .akv file, complete or not at all. */
int cli_store_write(const akv_llama_store *store, const akv_document_property *properties, uint32_t num_properties, const char *path,
                    uint64_t *file_bytes);

/* What `akv calibrate` measured (shares.h). */
enum { CLI_SHARES_MAX_RATIOS = 16 };

typedef struct cli_shares {
    uint32_t num_layers; /* 0 = no file */
    uint32_t num_ratios;
    akv_profile profile;
    double ratios[CLI_SHARES_MAX_RATIOS];
    double *errors; /* [num_ratios][num_layers], -1 = a layer without segments */
} cli_shares;

typedef struct cli_session {
    const cli_settings *settings;
    cli_progress progress;
    const char
        *label; /* of the bar, in place of the stage; then nothing is printed unless there is a terminal. NULL = none */
    akv_threads *threads;
    akv_llama *host;
    akv_llama_model_info model;
    akv_llama_store *store; /* NULL when the cache stays dense */
    int32_t *tokens;        /* of the document, NULL when it comes from a .akv file */
    uint64_t num_tokens;
    uint64_t document_bytes; /* of the texts */
    cli_shares shares;       /* of settings->shares; num_layers == 0: none */
    double keep_ratio;       /* asked for, or derived from the budget; 1 when nothing is to be saved */
    char *path;          /* of the .akv file, or NULL */
    cli_image image;     /* of a .akv file; outlives the store, whose segments lie in it */
    akv_document *document;
    akv_llama_prompt form;
    const char *system;
    bool goes_back; /* to the conversation before, which a signal must not stop */
} cli_session;

/* All functions return an exit code and have printed the reason when it is not CLI_OK. */

/* Threads and model; the file of --shares. */
int cli_session_open(cli_session *session, const cli_settings *settings);
/* Texts -> tokens; refuses what does not fit the model's context together with `room` more tokens. */
int cli_session_read(cli_session *session, uint64_t room);
/* Prefill; then compress and free the dense cache unless the method is dense (reserve_cells stay free for decoding). */
int cli_session_prefill(cli_session *session, uint64_t reserve_cells);
/*
 * The same end from a .akv file, without prefill, in place of what the session has. `accept` (or NULL) is
 * asked, with `context`, once the document is attached: what is not CLI_OK refuses it. When a document cannot be had for
 * whatever reason, the session is as it was: the conversation attached before is so again (rolling compression has to be
 * set again). Only when even that fails session->store is NULL.
 */
int cli_session_load(cli_session *session, const char *path, int (*accept)(void *context), void *context);
/* Forget the document and its file; the model stays. */
void cli_session_unload(cli_session *session);
void cli_session_close(cli_session *session);

/* Fills everything but command, answers and file_bytes. report->layers comes from malloc, or is NULL. */
int cli_session_report(const cli_session *session, cli_report *report);

#endif
