/* SPDX-License-Identifier: Apache-2.0 */
/* http.h - one request as routes.c sees it. */
#ifndef AKV_CLI_SERVE_HTTP_H
#define AKV_CLI_SERVE_HTTP_H

#include "serve.h"

#include <microhttpd.h>

/* connections.c */
typedef struct serve_connection serve_connection;
typedef struct serve_connections {
    pthread_mutex_t lock;
    serve_connection *first, *last; /* who has waited longest first */
    unsigned count, most;
} serve_connections;

void serve_connections_init(serve_connections *connections, unsigned most);
void serve_connections_destroy(serve_connections *connections);
/* NULL: no memory. With more than `most` nothing more is read from the one that has waited longest. */
serve_connection *serve_connections_add(serve_connections *connections, int fd);
/* It said something. From a whole request to the end of its answer it is not closed. NULL is fine, here and below. */
void serve_connections_alive(serve_connections *connections, serve_connection *one, bool answering);
/* Whether it was closed for reading, so that the end of what it sends is not the client's. */
bool serve_connections_closing(serve_connections *connections, const serve_connection *one);
/* Before its descriptor is closed. */
void serve_connections_remove(serve_connections *connections, serve_connection *one);

/* From the first byte of a request to the last of its answer. */
typedef struct serve_exchange {
    serve_server *server;
    serve_http *http;
    struct MHD_Connection *connection;
    const char *method, *path; /* valid in serve_route */
    char owner[SERVE_OWNER_BYTES];
    cli_buffer body;
    uint64_t body_bytes; /* received, kept or not */
    uint64_t counted;    /* of them, in the server's sum */
    serve_error early;   /* known before the body is there */
    serve_job *job;      /* while it is streamed */
} serve_exchange;

/* Answers, or makes the answer and begins to stream it. */
enum MHD_Result serve_route(serve_exchange *x);
/* The body is not needed any more. */
void serve_drop_body(serve_exchange *x);
/* Takes over the tree. */
enum MHD_Result serve_send_json(serve_exchange *x, unsigned status, cJSON *root);
enum MHD_Result serve_send_error(serve_exchange *x, const serve_error *error);
enum MHD_Result serve_send_text(serve_exchange *x, const char *type, const void *text, size_t bytes,
                                enum MHD_ResponseMemoryMode mode);
/* The job's events as they come; takes over the job. */
enum MHD_Result serve_send_stream(serve_exchange *x, serve_job *job);
/*
 * Waits until the job is over, or with `first` until it has something to say. False: the client is gone, the job is
 * cancelled.
 */
bool serve_wait(serve_exchange *x, serve_job *job, bool first);

#endif
