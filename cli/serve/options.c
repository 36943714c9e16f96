/* SPDX-License-Identifier: Apache-2.0 */
/* options.c - `akv serve`: options, keys, start, and an end that lets answers finish. */
#include "serve.h"

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    OPT_HOST = 500,
    OPT_PORT,
    OPT_RATIO,
    OPT_EXACT,
    OPT_SLOTS,
    OPT_QUEUE,
    OPT_KEY,
    OPT_KEY_FILE,
    OPT_DOCUMENTS,
    OPT_BUDGET,
    OPT_MAX_BODY,
    OPT_MAX_TOKENS,
    OPT_TIMEOUT,
    OPT_DRAIN,
    OPT_SEED
};

static bool add_key(serve_options *o, const char *key, size_t bytes)
{
    char **grown = realloc(o->keys, (o->num_keys + 1) * sizeof *grown);
    if (grown == NULL || (grown[o->num_keys] = strndup(key, bytes)) == NULL) {
        o->keys = grown != NULL ? grown : o->keys;
        cli_fail(CLI_NO_MEMORY, "no memory for the keys");
        return false;
    }
    o->keys = grown;
    o->num_keys++;
    for (size_t i = 0; i < bytes; i++)
        if (key[i] < 0x21 || key[i] > 0x7e) {
            cli_fail(CLI_USAGE, "a key must be of visible ASCII characters without spaces");
            return false;
        }
    return true;
}

/* One key a line; empty lines and lines that begin with # do not count. */
static bool read_keys(serve_options *o)
{
    cli_buffer text = {NULL, 0, 0};
    if (cli_read_text(o->key_file, &text) != CLI_OK)
        return false;
    bool ok = true;
    for (size_t at = 0; ok && at < text.bytes;) {
        const char *line = text.data + at, *end = memchr(line, '\n', text.bytes - at);
        size_t n = end != NULL ? (size_t)(end - line) : text.bytes - at;
        at += n + 1;
        n -= n > 0 && line[n - 1] == '\r';
        if (n > 0 && line[0] != '#')
            ok = add_key(o, line, n);
    }
    cli_buffer_free(&text);
    if (ok && o->num_keys == 0) {
        cli_fail(CLI_USAGE, "%s has no key in it", o->key_file);
        return false;
    }
    return ok;
}

static bool set(serve_options *o, int option, const char *value)
{
    uint64_t n = 0;
    double x = 0.0;
    switch (option) {
    case 'm':
        o->model = value;
        return true;
    case 't':
        if (!cli_parse_u64("--threads", value, 1, 1024, &n))
            return false;
        o->threads = (uint32_t)n;
        return true;
    case 'q':
        o->quiet = true;
        return true;
    case OPT_HOST:
        o->host = value;
        return true;
    case OPT_PORT:
        if (!cli_parse_u64("--port", value, 0, 65535, &n))
            return false;
        o->port = (uint16_t)n;
        return true;
    case OPT_RATIO:
        if (!cli_parse_double("--ratio", value, 1.0, 1000.0, &x))
            return false;
        o->keep_ratio = 1.0 / x;
        return true;
    case OPT_EXACT:
        return cli_parse_u64("--exact", value, 1, 1u << 24, &o->exact);
    case OPT_SLOTS:
        return cli_parse_u64("--slots", value, 1, 256, &o->slots);
    case OPT_QUEUE:
        return cli_parse_u64("--queue", value, 0, 1024, &o->queue);
    case OPT_KEY:
        return add_key(o, value, strlen(value));
    case OPT_KEY_FILE:
        o->key_file = value;
        return true;
    case OPT_DOCUMENTS:
        o->folder = value;
        return true;
    case OPT_BUDGET:
        return cli_parse_bytes("--budget", value, &o->budget);
    case OPT_MAX_BODY:
        return cli_parse_bytes("--max-body", value, &o->max_body);
    case OPT_MAX_TOKENS:
        return cli_parse_u64("--max-tokens", value, 1, 1u << 24, &o->max_tokens);
    case OPT_TIMEOUT:
        return cli_parse_double("--timeout", value, 1.0, 86400.0, &o->timeout);
    case OPT_DRAIN:
        return cli_parse_double("--drain", value, 0.0, 86400.0, &o->drain);
    case OPT_SEED:
        return cli_parse_u64("--seed", value, 0, UINT64_MAX, &o->seed);
    default:
        return false;
    }
}

static int parse(int argc, char **argv, serve_options *o)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"threads", required_argument, NULL, 't'},
                                            {"quiet", no_argument, NULL, 'q'},
                                            {"help", no_argument, NULL, 'h'},
                                            {"host", required_argument, NULL, OPT_HOST},
                                            {"port", required_argument, NULL, OPT_PORT},
                                            {"ratio", required_argument, NULL, OPT_RATIO},
                                            {"exact", required_argument, NULL, OPT_EXACT},
                                            {"slots", required_argument, NULL, OPT_SLOTS},
                                            {"queue", required_argument, NULL, OPT_QUEUE},
                                            {"api-key", required_argument, NULL, OPT_KEY},
                                            {"api-key-file", required_argument, NULL, OPT_KEY_FILE},
                                            {"documents", required_argument, NULL, OPT_DOCUMENTS},
                                            {"budget", required_argument, NULL, OPT_BUDGET},
                                            {"max-body", required_argument, NULL, OPT_MAX_BODY},
                                            {"max-tokens", required_argument, NULL, OPT_MAX_TOKENS},
                                            {"timeout", required_argument, NULL, OPT_TIMEOUT},
                                            {"drain", required_argument, NULL, OPT_DRAIN},
                                            {"seed", required_argument, NULL, OPT_SEED},
                                            {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "m:t:qh", options, NULL)) != -1) {
        if (option == 'h')
            return -1;
        if (!set(o, option, optarg))
            return cli_usage(&cli_cmd_serve);
    }
    if (optind < argc) {
        cli_fail(CLI_USAGE, "\"%s\" stands where no argument belongs", argv[optind]);
        return cli_usage(&cli_cmd_serve);
    }
    if (o->model == NULL) {
        cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
        return cli_usage(&cli_cmd_serve);
    }
    return o->key_file == NULL || read_keys(o) ? CLI_OK : CLI_USAGE;
}

/* ------------------------------------------------------------------------------------------------------------ serve */

typedef struct parts {
    serve_server server;
    serve_turn turn;
    akv_threads *threads;
    serve_http *http;
} parts;

/* The step that computes now was told to stop: what libllama then says of it is no news. */
static atomic_bool stopped;

void serve_stopped(bool stop)
{
    atomic_store(&stopped, stop);
}

static void on_log(void *opaque, const char *text)
{
    size_t length = strlen(text);
    (void)opaque;
    if (atomic_load(&stopped))
        return;
    while (length > 0 && (text[length - 1] == '\n' || text[length - 1] == ' '))
        length--;
    if (length > 0)
        cli_note("libllama: %.*s", (int)length, text);
}

static int on_load(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total)
{
    (void)opaque, (void)stage, (void)done, (void)total;
    return cli_interrupted() != 0;
}

/* What clients call the model: its file's name without the ending, as other servers of GGUF files do. */
static void name_model(const char *path, char *name, size_t capacity)
{
    const char *base = strrchr(path, '/');
    base = base != NULL ? base + 1 : path;
    size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    n = n < capacity - 1 ? n : capacity - 1;
    n = cli_utf8_prefix(base, n);
    memcpy(name, base, n);
    name[n] = '\0';
    if (n == 0)
        snprintf(name, capacity, "model");
}

static int open_model(const serve_options *o, parts *p)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = o->model;
    options.log_level = AKV_LLAMA_LOG_ERRORS;
    options.log = on_log;
    options.progress = on_load;
    akv_status status = akv_llama_open(&options, &p->server.host, &diag);
    if (status == AKV_OK) {
        akv_llama_model_info_init(&p->server.model);
        status = akv_llama_get_model_info(p->server.host, &p->server.model, &diag);
    }
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, o->model);
    name_model(o->model, p->server.model_id, sizeof p->server.model_id);
    status = akv_threads_create(o->threads, &p->threads, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

static int start(const serve_options *o, parts *p)
{
    uint16_t port = 0;
    p->server.options = o;
    p->server.started = (int64_t)time(NULL);
    int code = open_model(o, p);
    if (code == CLI_OK)
        code = serve_documents_create(o, p->server.host, &p->turn, &p->server.documents);
    if (code == CLI_OK)
        code = serve_engine_create(o, p->server.host, akv_threads_executor(p->threads), p->server.documents, &p->turn,
                                   &p->server.engine);
    if (code == CLI_OK)
        code = serve_http_start(&p->server, &p->http, &port);
    if (code == CLI_OK)
        cli_note("serving %s at http://%s%s%s:%u", p->server.model_id, strchr(o->host, ':') ? "[" : "", o->host,
                 strchr(o->host, ':') ? "]" : "", port);
    return code;
}

/* Signals go to this thread: the others are busy with work that must not be interrupted. */
static void wait_for_end(void)
{
    while (cli_interrupted() == 0)
        usleep(50000);
}

static void finish(const serve_options *o, parts *p)
{
    atomic_store(&p->server.ending, true);
    if (!o->quiet)
        cli_note("ending: answers that are being made may take %.0f seconds more", o->drain);
    serve_documents_stop(p->server.documents);
    serve_engine_drain(p->server.engine, o->drain);
    serve_http_refuse(p->http, 5.0); /* an answer that is made is not sent yet */
}

static int serve(const serve_options *o)
{
    static parts p; /* zeroed; the server is one */
    sigset_t ending, before;
    sigemptyset(&ending);
    sigaddset(&ending, SIGINT);
    sigaddset(&ending, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ending, &before);
    serve_turn_init(&p.turn);
    int code = start(o, &p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code == CLI_OK) {
        cli_files_outlast_signal(); /* a document that is compressed already is still saved */
        wait_for_end();
        finish(o, &p);
    }
    serve_http_stop(p.http);
    serve_engine_destroy(p.server.engine);
    serve_documents_destroy(p.server.documents);
    akv_llama_close(p.server.host);
    akv_threads_destroy(p.threads);
    serve_turn_destroy(&p.turn);
    return code;
}

static int run(int argc, char **argv)
{
    serve_options o = {.host = "127.0.0.1",
                       .port = 8080,
                       .keep_ratio = 0.1,
                       .budget = 512u << 20,
                       .max_body = 16u << 20,
                       .max_tokens = 4096,
                       .exact = 2048,
                       .slots = 4,
                       .queue = 16,
                       .timeout = 300.0,
                       .drain = 30.0};
    o.threads = cli_default_threads();
    int code = parse(argc, argv, &o);
    if (code < 0)
        code = cli_help(&cli_cmd_serve);
    else if (code == CLI_OK)
        code = serve(&o);
    for (size_t i = 0; i < o.num_keys; i++)
        free(o.keys[i]);
    free(o.keys);
    return code;
}

const cli_command cli_cmd_serve = {
    "serve", "answer over HTTP, in OpenAI's form", run,
    "usage: akv serve -m MODEL [options]\n"
    "\n"
    "Answers /v1/chat/completions and /v1/completions in OpenAI's form, on this computer only unless told otherwise. "
    "Texts sent\n"
    "to /v1/documents are read once, compressed, and shared by all conversations that name them. A page at / does "
    "both.\n"
    "SIGTERM or Ctrl-C: no new requests, answers that are being made are finished. docs/serve.md has the interface.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "      --host ADDRESS   to listen at (127.0.0.1)\n"
    "      --port N         (8080); 0: any free one, which is printed\n"
    "      --ratio X        how many times smaller documents become, unless a request says otherwise (10)\n"
    "      --exact N        a conversation is compressed beyond what N tokens take uncompressed (2048)\n"
    "      --slots N        answers that are made at the same time (4)\n"
    "      --queue N        requests that may wait, and documents that may wait (16); beyond it 429\n"
    "      --api-key KEY    only who has it may ask; may be repeated. Other users of this computer can see it: better\n"
    "      --api-key-file F the same, one key a line. Each key sees its own documents only\n"
    "      --documents DIR  keep documents there, for the next start and when memory is short\n"
    "      --budget BYTES   of all documents in memory (512M); beyond it those used longest ago become smaller, then "
    "leave\n"
    "                       memory if there is a --documents, else new ones are refused\n"
    "      --max-body BYTES of a request (16M)\n"
    "      --max-tokens N   of an answer (4096)\n"
    "      --timeout S      from a request to the end of its answer (300)\n"
    "      --drain S        for answers when the server is asked to end (30)\n"
    "      --seed S         of compression (0)\n"
    "  -t, --threads N      (all processors)\n"
    "  -q, --quiet          less to say\n"
    "  -h, --help           this text\n"
    "\n"
    "examples:\n"
    "  akv serve -m model.gguf\n"
    "  akv serve -m model.gguf --ratio 20 --documents ~/akv --api-key-file keys.txt --host 0.0.0.0\n"};
