/* SPDX-License-Identifier: Apache-2.0 */
/*
 * serve.h - what the files of `akv serve` share.
 *
 *   options.c    the command: options, start, waiting for the end
 *   http.c       HTTP (libmicrohttpd): who may ask, bodies, answers, streams
 *   connections.c  connections that wait, and which of them must go
 *   routes.c     which request goes where
 *   request.c    JSON -> a job or a document, with everything checked
 *   reply.c      a job -> JSON or server-sent events
 *   engine.c     one thread that computes all answers in turn
 *   generate.c   one answer: prompt, tokens, texts, stop strings
 *   documents.c  documents by key
 *   reader.c     one thread that reads and compresses them
 *   folder.c     documents in a folder
 *   metrics.c    /metrics
 *   json.c       limits for JSON from outside, and small helpers
 *
 * Threads: one a connection (HTTP), the engine, the reader. What computes takes its turn (serve_turn), so that there
 * are never more threads at work than were asked for.
 */
#ifndef AKV_CLI_SERVE_H
#define AKV_CLI_SERVE_H

#include "cli/cli.h"
#include "cli/session.h"

#include <akv_llama.h>
#include <anchorkv/akv_pool.h>
#include <cjson/cJSON.h>

#include <pthread.h>
#include <stdatomic.h>

typedef struct serve_options {
    const char *model;
    const char *host;
    const char *folder; /* of documents, or NULL */
    const char *key_file;
    char **keys; /* [num_keys] */
    size_t num_keys;
    uint16_t port; /* 0 = any free one */
    double keep_ratio;
    uint64_t budget;     /* bytes of all documents */
    uint64_t max_body;   /* bytes of a request */
    uint64_t max_tokens; /* of an answer */
    uint64_t exact;      /* a conversation may always take as many bytes as so many tokens uncompressed */
    uint64_t slots;      /* answers at the same time */
    uint64_t queue;      /* that wait, and documents that wait */
    uint64_t seed;
    double timeout; /* seconds from a request to the end of its answer */
    double drain;   /* seconds for what runs when the server is asked to end */
    uint32_t threads;
    bool quiet;
} serve_options;

/* -------------------------------------------------------------------------------------------------------- an error */

/* What becomes {"error": {...}} with an HTTP status; status 0 = none. Types and codes are static. */
typedef struct serve_error {
    unsigned status;
    const char *type; /* NULL: of the status */
    const char *code;
    char param[40];
    char message[640];
} serve_error;

/* Always returns false. `param` may be NULL. */
bool serve_fail(serve_error *error, unsigned status, const char *code, const char *param, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool serve_fail_diag(serve_error *error, akv_status status, const akv_diag *diag);
#ifdef __clang_analyzer__ /* it does not see into the other file that both return false */
#  define serve_fail(...) (serve_fail(__VA_ARGS__), false)
#  define serve_fail_diag(...) (serve_fail_diag(__VA_ARGS__), false)
#endif
cJSON *serve_error_json(const serve_error *error);

/* ------------------------------------------------------------------------------------------------------------ turns */

/* Who computes: one at a time, in the order of asking. */
typedef struct serve_turn {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t next, now;
} serve_turn;

void serve_turn_init(serve_turn *turn);
void serve_turn_destroy(serve_turn *turn);
void serve_turn_take(serve_turn *turn);
void serve_turn_give(serve_turn *turn);
/* Lets others go first, if there are any. */
void serve_turn_yield(serve_turn *turn);

/* options.c. Whether the step that computes was told to stop; for what is logged meanwhile. */
void serve_stopped(bool stop);

/* -------------------------------------------------------------------------------------------------------- documents */

typedef enum serve_document_state {
    SERVE_QUEUED,
    SERVE_READING,
    SERVE_COMPRESSING,
    SERVE_READY,
    SERVE_FAILED,
    SERVE_NUM_STATES
} serve_document_state;
extern const char *const serve_state_names[SERVE_NUM_STATES];

enum {
    SERVE_ID_BYTES = 29,
    SERVE_OWNER_BYTES = 33
}; /* "doc-" and 24 hexadecimal digits; 32 digits; with their zeros */

typedef struct serve_document serve_document;
typedef struct serve_documents serve_documents;

struct serve_document {
    /* constant */
    char id[SERVE_ID_BYTES];
    char owner[SERVE_OWNER_BYTES];
    char *name;
    int64_t created;
    double keep_ratio;
    int32_t *tokens; /* [num_tokens], from akv_llama_render_document */
    size_t num_tokens;
    /* the registry's lock */
    unsigned references;
    bool deleted;
    serve_document_state state;
    uint64_t tokens_read;
    double progress;
    char error[512];
    /* constant once it is ready */
    uint64_t pool_id;
    akv_llama_store_parts parts; /* arrays are owned; segments NULL: they are the pool's */
    /* the registry's lock */
    serve_document *next;
};

typedef struct serve_documents_stats {
    uint64_t by_state[SERVE_NUM_STATES];
    akv_pool_stats pool;
    akv_bytes bytes;
    uint64_t dense_bytes; /* of those that are ready */
    uint64_t tokens;
    uint64_t tokens_read; /* since the start */
    double read_seconds;
} serve_documents_stats;

/* The host is used for texts and tokens only. Returns an exit code; a folder's documents are there afterwards. */
int serve_documents_create(const serve_options *options, akv_llama *host, serve_turn *turn, serve_documents **out);
/* Stops reading; a document that is not ready is lost. */
void serve_documents_stop(serve_documents *documents);
void serve_documents_destroy(serve_documents *documents);

/* A new document, queued; the caller gets one reference. Takes over nothing. */
bool serve_documents_add(serve_documents *documents, const char *owner, const char *name, const char *text,
                         double keep_ratio, serve_document **out, serve_error *error);
/* One reference, or 404. */
bool serve_documents_find(serve_documents *documents, const char *owner, const char *id, serve_document **out,
                          serve_error *error);
void serve_document_release(serve_documents *documents, serve_document *document); /* NULL is fine */
bool serve_documents_delete(serve_documents *documents, const char *owner, const char *id, serve_error *error);
cJSON *serve_document_json(serve_documents *documents, serve_document *document);
cJSON *serve_documents_json(serve_documents *documents, const char *owner);
/* 409 while it is not ready. */
bool serve_document_ready(serve_documents *documents, serve_document *document, serve_error *error);
/* The document with its segments as they are now; they come back from where they were spilled. */
bool serve_document_store(serve_documents *documents, serve_document *document, akv_llama_store **out,
                          serve_error *error);
void serve_documents_stats_get(serve_documents *documents, serve_documents_stats *out);

/* folder.c: `folder` NULL does nothing. Names are made of ids, never of what a request says. */
int serve_folder_open(const char *folder); /* an exit code; what an earlier run spilled is removed */
bool serve_folder_save(const char *folder, const serve_document *document, const akv_llama_store *store);
void serve_folder_remove(const char *folder, const char *id);
/* Calls `found` for each document of this model; what cannot be used is left there and said. */
typedef bool (*serve_folder_fn)(void *opaque, serve_document *document, akv_segment *const *segments,
                                uint32_t num_segments);
int serve_folder_load(const char *folder, const akv_llama *host, serve_folder_fn found, void *opaque);
akv_status serve_folder_spill(void *folder, uint64_t id, uint32_t index, const void *data, size_t bytes,
                              akv_diag *diag);
akv_status serve_folder_fetch(void *folder, uint64_t id, uint32_t index, void *data, size_t bytes, akv_diag *diag);
void serve_folder_forget(void *folder, uint64_t id);

/* ------------------------------------------------------------------------------------------------------------- jobs */

enum { SERVE_MAX_STOPS = 16, SERVE_MAX_TOP = 20 };

/* One answer, to its last byte. Made by an HTTP thread, filled by the engine, freed by the last of the two. */
typedef struct serve_job {
    /* constant */
    char id[40];
    const char *model; /* its name, the server's */
    int64_t created;
    bool chat, stream, include_usage;
    serve_document *document; /* NULL: the prompt is everything */
    int32_t *prompt;          /* [num_prompt], what stands behind the document; from malloc */
    size_t num_prompt;
    uint64_t max_tokens;
    double temperature, top_p;
    int top_logprobs; /* -1: no logprobs */
    char *stops[SERVE_MAX_STOPS];
    size_t num_stops;
    double deadline; /* cli_now() */

    /* the engine's */
    akv_llama_store *store;
    akv_llama_conversation *conversation;
    size_t prompt_done;
    uint64_t random;
    int32_t token; /* said, not decoded yet */
    bool has_token;
    bool rolls;         /* its old tokens are compressed as it grows */
    cli_buffer pending; /* text that may still become a stop string or a character */
    cJSON *pending_logprobs;
    struct serve_job *next; /* in the queue; its lock */

    atomic_bool cancelled; /* nobody waits for it */
    atomic_uint references;

    pthread_mutex_t lock; /* for the rest */
    pthread_cond_t changed;
    bool done;
    bool said;      /* a first event is out */
    cli_buffer out; /* stream: events; else the text */
    size_t taken;   /* of out, by the connection */
    cJSON *logprobs;
    const char *finish;
    serve_error error;
    uint64_t generated;
    bool role_sent;
} serve_job;

serve_job *serve_job_new(void);
void serve_job_release(serve_documents *documents, serve_job *job); /* NULL is fine */

typedef struct serve_engine serve_engine;

typedef struct serve_engine_stats {
    uint64_t busy, queued;
    uint64_t requests_done, prompt_tokens, generated_tokens;
    double prompt_seconds, generate_seconds;
    uint64_t cell_bytes;    /* of the one context's cells */
    uint64_t waiting_bytes; /* of cells of conversations that wait for their turn */
    uint64_t segment_bytes; /* of conversations' own segments, documents' not counted */
    uint64_t dense_bytes;   /* what the caches of all running conversations would be, each with its document */
} serve_engine_stats;

int serve_engine_create(const serve_options *options, akv_llama *host, const akv_executor *executor,
                        serve_documents *documents, serve_turn *turn, serve_engine **out);
/* Takes a reference of its own; false: the queue is full, or the server ends. */
bool serve_engine_submit(serve_engine *engine, serve_job *job, serve_error *error);
/* No new jobs from now on; waits for those that are there, at most so long, then cancels them. */
void serve_engine_drain(serve_engine *engine, double seconds);
void serve_engine_destroy(serve_engine *engine);
void serve_engine_stats_get(serve_engine *engine, serve_engine_stats *out);

/* generate.c. What one answer needs of the engine. */
typedef struct serve_generator {
    akv_llama *host;   /* the conversations' */
    akv_llama *opener; /* reads the first token of conversations without document */
    serve_documents *documents;
    uint32_t vocab_tokens;
    uint32_t batch_tokens;
    double keep_ratio; /* of the conversations, beyond what they may always take */
    uint32_t exact;    /* that, in uncompressed tokens */
    akv_llama_store *opening; /* of the last such token */
    float *opening_logits;    /* [vocab_tokens] behind it */
    double *scratch;          /* [2 * vocab_tokens] */
    uint64_t prompt_tokens, generated_tokens;
    double prompt_seconds, generate_seconds;
} serve_generator;

/* Goes on with a job for about so long, at least a batch or a token. True: it is over. */
bool serve_generate(serve_generator *generator, serve_job *job, double seconds);
/* Ends a job that nobody waits for, or whose time is over. True: it is over. */
bool serve_generate_expire(serve_job *job);
void serve_generator_free(serve_generator *generator);

/* reply.c: events or text into the job; called by the engine. */
void serve_reply_text(serve_job *job, const char *text, size_t bytes, cJSON *logprobs);
void serve_reply_end(serve_job *job, const char *finish, const serve_error *error);
cJSON *serve_reply_json(serve_job *job); /* not streamed */
/* One token of `logprobs`. */
cJSON *serve_reply_logprob(const akv_llama *host, const serve_job *job, const float *logits, uint32_t n, int32_t token);

/* ------------------------------------------------------------------------------------------------------------- JSON */

/* Checks what cJSON does not: UTF-8, \u0000 (it would cut a text), depth, number of values. Then parses all of it. */
cJSON *serve_json_parse(const char *text, size_t bytes, serve_error *error);
/* Members of an object; absent or null leaves *out. False with 400 when the type or the range is wrong. */
bool serve_json_bool(const cJSON *object, const char *name, bool *out, serve_error *error);
bool serve_json_number(const cJSON *object, const char *name, double min, double max, bool whole, double *out,
                       serve_error *error);
bool serve_json_string(const cJSON *object, const char *name, size_t max_bytes, const char **out, serve_error *error);
/* A text of bytes that may be no UTF-8: U+FFFD in their place. */
cJSON *serve_json_lossy(const char *text, size_t bytes);
/* Bytes of `text` that can be said now: whole characters. Ill-formed bytes count as characters of one byte. */
size_t serve_utf8_whole(const char *text, size_t bytes);

/* ----------------------------------------------------------------------------------------------------------- server */

typedef struct serve_server {
    const serve_options *options;
    akv_llama *host; /* for texts only, in the threads of connections */
    akv_llama_model_info model;
    char model_id[64];
    int64_t started;
    serve_documents *documents;
    serve_engine *engine;
    atomic_bool ending;
    bool check_host;          /* no key, loopback: a page of another site must not reach it by a name of its own */
    atomic_ullong answers[6]; /* by hundreds of the status */
    atomic_uint exchanges;    /* requests whose answers are not out */
    atomic_ullong body_bytes; /* of requests that are being received */
} serve_server;

/* request.c */
bool serve_request_job(serve_server *server, const char *owner, bool chat, const cJSON *body, serve_job **out,
                       serve_error *error);
bool serve_request_document(serve_server *server, const char *owner, const cJSON *body, serve_document **out,
                            serve_error *error);

/* metrics.c: text from malloc, or NULL. */
char *serve_metrics(serve_server *server);

typedef struct serve_http serve_http;
int serve_http_start(serve_server *server, serve_http **out, uint16_t *port);
/* Lets answers get out, at most so long; then no new connections. */
void serve_http_refuse(serve_http *http, double seconds);
void serve_http_stop(serve_http *http);

extern const unsigned char serve_page[];
extern const size_t serve_page_bytes;

#endif
