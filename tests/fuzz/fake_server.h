/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_server.h - what stands behind the requests of akv serve in the fuzz targets: a tokeniser of one token a byte,
 * one document that is ready, and an engine that answers at once with what fake_say() was told. No model, no threads.
 */
#ifndef AKV_FUZZ_FAKE_SERVER_H
#define AKV_FUZZ_FAKE_SERVER_H

#include "cli/serve/serve.h"

#define FAKE_DOCUMENT "doc-0123456789abcdef01234567"

/* The text of the next answers, in pieces of so many bytes; borrowed. */
void fake_say(const char *text, size_t bytes, size_t piece);
/* All that was handed out came back. */
void fake_check_balance(void);
/* A job that a request became: what the engine relies on. */
void fake_check_job(const serve_job *job, const serve_options *options);
/* One JSON value, UTF-8, nothing behind it. */
cJSON *fake_parse(const char *text, size_t bytes);

#endif
