/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_model.c - `akv bench --model`: how fast a whole model decodes behind a compressed document, beside libllama on its own
 * with as many cells in each of its cache types, in the same run, taking turns.
 *
 * libllama's caches need no real document: how long a token takes depends on how many cells it sees, not on what they hold.
 * So one piece of the document is read once per cache and its state put behind itself until there are enough cells, each
 * copy as a sequence, and all sequences then joined to one.
 */
#include "bench_model.h"
#include "bench.h"
#include "session.h"

#include <cjson/cJSON.h>
#include <llama.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 256, MOST_TOKENS = 4096, TURN_TOKENS = 4, WARM_TOKENS = 2, TAIL_CELLS = 1024 };

typedef struct stock_peer {
    const char *name;
    enum ggml_type type;
    enum llama_flash_attn_type flash;
    struct llama_context *context;
    llama_pos next;
    uint64_t bytes;
    double seconds[MOST_TOKENS];
} stock_peer;

/* libllama has no quantised values without flash attention. */
static stock_peer peers[] = {
    {.name = "llama f16 flash", .type = GGML_TYPE_F16, .flash = LLAMA_FLASH_ATTN_TYPE_ENABLED},
    {.name = "llama f16", .type = GGML_TYPE_F16, .flash = LLAMA_FLASH_ATTN_TYPE_DISABLED},
    {.name = "llama q8_0 flash", .type = GGML_TYPE_Q8_0, .flash = LLAMA_FLASH_ATTN_TYPE_ENABLED},
    {.name = "llama q4_0 flash", .type = GGML_TYPE_Q4_0, .flash = LLAMA_FLASH_ATTN_TYPE_ENABLED},
};
enum { NUM_PEERS = sizeof peers / sizeof peers[0] };

typedef struct stock {
    struct llama_model *model;
    uint64_t tokens; /* cells that every decoded token sees, at least */
    const int32_t *text; /* [tokens] of the document */
} stock;

static int run_batch(struct llama_context *context, const int32_t *text, int32_t n, llama_pos position, llama_seq_id sequence)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    if (batch.token == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for a batch of %d tokens", n);
    batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        batch.token[i] = text[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = i + 1 == n;
    }
    const int32_t code = llama_decode(context, batch);
    llama_batch_free(batch);
    if (code == 0 && llama_get_logits(context) != NULL)
        return CLI_OK;
    return cli_fail(CLI_INTERNAL, "libllama could not decode (code %d)", code);
}

static int fill(const stock *s, stock_peer *peer)
{
    const uint32_t copies = (uint32_t)(s->tokens / PIECE);
    const int32_t rest = (int32_t)(s->tokens % PIECE);
    struct llama_memory_i *memory = llama_get_memory(peer->context);
    int code = run_batch(peer->context, s->text, PIECE, 0, 0);
    const size_t size = code == CLI_OK ? llama_state_seq_get_size(peer->context, 0) : 0;
    uint8_t *state = malloc(size + 1);
    if (code == CLI_OK && (state == NULL || llama_state_seq_get_data(peer->context, state, size, 0) != size))
        code = cli_fail(CLI_INTERNAL, "libllama could not save %zu bytes of state", size);
    for (uint32_t i = 1; i < copies && code == CLI_OK; i++) {
        if (llama_state_seq_set_data(peer->context, state, size, 1) != size)
            code = cli_fail(CLI_INTERNAL, "libllama could not copy %zu bytes of state", size);
        llama_memory_seq_cp(memory, 1, 0, -1, -1);
        /* the cells stay sequence 0's when the next copy replaces sequence 1 */
        llama_memory_seq_rm(memory, 1, -1, -1);
    }
    free(state);
    peer->next = PIECE;
    if (code == CLI_OK && rest > 0) {
        code = run_batch(peer->context, s->text, rest, peer->next, 0);
        peer->next += rest;
    }
    peer->bytes = llama_state_seq_get_size(peer->context, 0);
    return code;
}

static int stock_open(stock *s, uint64_t room)
{
    for (size_t i = 0; i < NUM_PEERS; i++) {
        struct llama_context_params params = llama_context_default_params();
        params.n_ctx = (uint32_t)((s->tokens + room + 255) / 256 * 256);
        params.n_seq_max = 2;
        params.kv_unified = true;
        params.n_batch = params.n_ubatch = PIECE;
        params.n_threads = params.n_threads_batch = (int32_t)cli_default_threads();
        params.flash_attn_type = peers[i].flash;
        params.type_k = params.type_v = peers[i].type;
        peers[i].context = llama_init_from_model(s->model, params);
        if (peers[i].context == NULL) {
            cli_note("akv: %s: not possible with this model, left out", peers[i].name);
            continue;
        }
        const int code = fill(s, &peers[i]);
        if (code != CLI_OK)
            return code;
    }
    return CLI_OK;
}

static void stock_close(stock *s)
{
    for (size_t i = 0; i < NUM_PEERS; i++) {
        if (peers[i].context != NULL)
            llama_free(peers[i].context);
        peers[i].context = NULL;
    }
    if (s->model != NULL)
        llama_model_free(s->model);
    s->model = NULL;
}

/* On one thread processor time, which a busy machine disturbs less: both sides then run in the caller. */
static int stock_token(const stock *s, stock_peer *peer, size_t i, uint32_t threads, double *seconds)
{
    const double start = bench_seconds_now(threads);
    const int code = run_batch(peer->context, s->text + i % s->tokens, 1, peer->next++, 0);
    *seconds = bench_seconds_now(threads) - start;
    return code;
}

static int our_token(cli_session *session, const stock *s, size_t i, uint32_t threads, double *seconds)
{
    akv_diag diag = {AKV_OK, ""};
    const double start = bench_seconds_now(threads);
    const akv_status status = akv_llama_decode(session->host, s->text + i % s->tokens, 1, AKV_LLAMA_LOGITS_LAST, &diag);
    *seconds = bench_seconds_now(threads) - start;
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

static void report(cJSON *rows, const stock *s, const cli_report *document, uint32_t threads, double ours, const stock_peer *peer,
                   double theirs, bool best)
{
    const double ratio = (double)document->dense_bytes / (double)document->bytes.total;
    printf("model    %u threads, %6llu tokens, %5.2fx: %7.1f tokens/s, %-16s %7.1f tokens/s, %5.2fx%s\n", threads,
           (unsigned long long)s->tokens, ratio, 1 / ours, peer->name, 1 / theirs, theirs / ours, best ? "  (their best)" : "");
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "case", "model");
    cJSON_AddStringToObject(row, "model", document->model_description);
    cJSON_AddNumberToObject(row, "tokens", (double)s->tokens);
    cJSON_AddNumberToObject(row, "ratio", ratio);
    cJSON_AddNumberToObject(row, "threads", threads);
    cJSON_AddStringToObject(row, "peer", peer->name);
    cJSON_AddNumberToObject(row, "ns_per_token", 1e9 * ours);
    cJSON_AddNumberToObject(row, "peer_ns_per_token", 1e9 * theirs);
    cJSON_AddNumberToObject(row, "tokens_per_second", 1 / ours);
    cJSON_AddNumberToObject(row, "peer_tokens_per_second", 1 / theirs);
    cJSON_AddNumberToObject(row, "speedup", theirs / ours);
    cJSON_AddBoolToObject(row, "best_peer", best);
    cJSON_AddNumberToObject(row, "bytes", (double)document->bytes.total);
    cJSON_AddNumberToObject(row, "peer_bytes", (double)peer->bytes);
    cJSON_AddItemToArray(rows, row);
}

/* One document and number of threads: every cache decodes a few tokens in turn; the median token. */
static int run_turns(cli_session *session, const stock *s, uint32_t threads, uint32_t rounds, cJSON *rows)
{
    static double ours[MOST_TOKENS];
    size_t n = 0;
    akv_diag diag = {AKV_OK, ""};
    for (size_t p = 0; p < NUM_PEERS; p++)
        if (peers[p].context != NULL)
            llama_set_n_threads(peers[p].context, (int32_t)threads, (int32_t)threads);
    akv_status status = akv_llama_rewind(session->host, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    for (uint32_t round = 0; round < rounds; round++, n += TURN_TOKENS)
        for (size_t p = 0; p <= NUM_PEERS; p++)
            for (size_t t = 0; t < WARM_TOKENS + TURN_TOKENS; t++) {
                double seconds = 0;
                if (cli_interrupted())
                    return CLI_SIGNAL + cli_interrupted();
                if (p < NUM_PEERS && peers[p].context == NULL)
                    continue;
                const int code = p == NUM_PEERS ? our_token(session, s, n + t, threads, &seconds)
                                                : stock_token(s, &peers[p], n + t, threads, &seconds);
                if (code != CLI_OK)
                    return code;
                if (t >= WARM_TOKENS)
                    (p == NUM_PEERS ? ours : peers[p].seconds)[n + t - WARM_TOKENS] = seconds;
            }
    cli_report document;
    const int code = cli_session_report(session, &document);
    if (code != CLI_OK)
        return code;
    double theirs[NUM_PEERS], best = INFINITY;
    for (size_t p = 0; p < NUM_PEERS; p++) {
        theirs[p] = peers[p].context != NULL ? bench_median(peers[p].seconds, n) : INFINITY;
        best = fmin(best, theirs[p]);
    }
    const double mine = bench_median(ours, n);
    for (size_t p = 0; p < NUM_PEERS; p++)
        if (peers[p].context != NULL)
            report(rows, s, &document, threads, mine, &peers[p], theirs[p], theirs[p] == best);
    fflush(stdout);
    free((void *)(uintptr_t)document.layers);
    return CLI_OK;
}

static void silent(enum ggml_log_level level, const char *text, void *opaque)
{
    (void)level, (void)text, (void)opaque;
}

static int run_document(const bench_model_options *o, size_t number, uint32_t threads, stock *s, cJSON *rows)
{
    cli_settings settings;
    cli_session session;
    akv_llama_store_parts parts;
    akv_diag diag = {AKV_OK, ""};
    cli_settings_init(&settings);
    settings.model = o->model;
    settings.threads = threads;
    settings.quiet = true;
    settings.tail_cells = TAIL_CELLS;
    int code = cli_session_open(&session, &settings);
    if (code == CLI_OK)
        code = cli_session_load(&session, o->documents[number], NULL, NULL);
    akv_llama_store_parts_init(&parts);
    if (code == CLI_OK && akv_llama_store_get_parts(session.store, &parts, &diag) != AKV_OK)
        code = cli_fail_diag(diag.status, &diag, NULL);
    const uint64_t decoded = (uint64_t)o->rounds * (WARM_TOKENS + TURN_TOKENS);
    if (code == CLI_OK && parts.num_tokens < PIECE)
        code = cli_fail(CLI_BAD_INPUT, "%s has %llu tokens; at least %d are needed", o->documents[number],
                        (unsigned long long)parts.num_tokens, PIECE);
    s->text = parts.tokens;
    if (code == CLI_OK && s->tokens != parts.num_tokens) { /* the first document, or one of another length */
        struct llama_model *model = s->model;
        s->model = NULL;
        stock_close(s);
        s->model = model;
        s->tokens = parts.num_tokens;
        code = stock_open(s, decoded * 2 * o->num_documents);
    }
    if (code == CLI_OK)
        code = run_turns(&session, s, threads, o->rounds, rows);
    cli_session_close(&session);
    return code;
}

int bench_model_run(const bench_model_options *o, cJSON *rows)
{
    stock s = {NULL, 0, NULL};
    struct llama_model_params params = llama_model_default_params();
    int code = CLI_OK;
    if (o->rounds * (WARM_TOKENS + TURN_TOKENS) > MOST_TOKENS)
        return cli_fail(CLI_USAGE, "--rounds %u is too much for a model", o->rounds);
    params.n_gpu_layers = 0;
    params.use_extra_bufts = !akv_llama_has_amx_buffers(); /* as in the host */
    for (uint32_t threads = o->threads == 0 ? 1 : o->threads; threads <= (o->threads == 0 ? 2 : o->threads); threads++)
        for (size_t i = 0; i < o->num_documents && code == CLI_OK; i++) {
            if (s.model == NULL) {
                llama_log_set(silent, NULL); /* until the host sets its own */
                s.model = llama_model_load_from_file(o->model, params);
            }
            code = s.model != NULL ? run_document(o, i, threads, &s, rows) : cli_fail(CLI_IO, "libllama cannot load \"%s\"", o->model);
        }
    stock_close(&s);
    return code;
}
