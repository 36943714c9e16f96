/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling.c - measures a conversation that is compressed as it grows against one compression of all of it, at the same
 * bytes in all: bytes, and the divergence from the exact cache of the tokens that follow. A measurement
 * (docs/sessions.md), not a test: it takes minutes.
 *
 * usage: rolling MODEL.gguf TEXT [--tokens N] [--turns N] [--ratio X] [--budget X] [--full N] [--segment N]
 *                [--exact N] [--offset BYTES] [--rest N] [--parts 0] [--live 0]
 *                [--try segment:N,exact:N,full:N,ratio:X]...
 *        rolling tiny:FOLDER - [the same]
 *
 * The second form makes a small random model with a long context in FOLDER and speaks random tokens: bytes alone, which
 * do not depend on what is said. The text is spoken in equal turns. "At once" is counted in two ways: everything
 * compressed, and with as many of the last tokens exact as the conversation has. Where the difference comes from
 * (--parts): the same pieces made from keys and values that were computed from an exact past, and those that were
 * computed from the compressed past, kept exactly. --live 0 leaves out what has to be computed while it rolls, so that
 * other settings (--try) cost little.
 */
#include "replay.h"
#include "tiny_models.h"

#include <string.h>

enum { CELLS = 256, BATCH = 256, OPENING = 32 };

static akv_llama *g_host;
static size_t g_vocab, g_turns, g_rest;
static int32_t *g_tokens;
static akv_threads *g_threads;
static double g_worst;
static akv_llama_store *g_opening;

static akv_llama_memory memory_of(void)
{
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    CHECK_OK(akv_llama_get_memory(g_host, &m, diag));
    return m;
}

static float *copy_logits(void)
{
    float *copy = malloc(g_rest * g_vocab * sizeof *copy);
    CHECK(copy && akv_llama_logits(g_host, 0), "no logits");
    memcpy(copy, akv_llama_logits(g_host, 0), g_rest * g_vocab * sizeof *copy);
    return copy;
}

/* What rolled is left as it is: the bytes that were counted are those that answer. */
static float *rest_of(size_t n)
{
    if (akv_llama_history(g_host))
        CHECK_OK(akv_llama_set_rolling(g_host, NULL, diag));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + n, g_rest, AKV_LLAMA_LOGITS_ALL, diag));
    float *logits = copy_logits();
    CHECK_OK(akv_llama_detach(g_host, diag));
    return logits;
}

static double option(int argc, char **argv, const char *name, double standard)
{
    for (int i = 3; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0)
            return atof(argv[i + 1]);
    return standard;
}

/* Compressed to `keep` of its bytes and attached; the dense cache stays. */
static void attach_compressed(double keep)
{
    akv_llama_store *store = NULL;
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = keep;
    CHECK_OK(akv_llama_compress(g_host, AKV_LLAMA_ANCHOR, &config, &store, diag));
    CHECK_OK(akv_llama_attach(g_host, store, diag));
    akv_llama_store_release(store);
}

/* divergence, and how many times another's that is */
static double say_divergence(const char *name, const float *dense, float *logits, double other)
{
    const divergence d = compare_logits(dense, logits, g_rest, g_vocab);
    printf("%-52s mean divergence %.5f, top %zu of %zu", name, d.mean_kl, d.same_top, g_rest);
    if (other > 0.0)
        printf("; rolling has %.2f times it", other / d.mean_kl);
    printf("\n");
    fflush(stdout);
    free(logits);
    return d.mean_kl;
}

static void open_model(const char *path)
{
    akv_llama_options options;
    akv_llama_options_init(&options);
    CHECK_OK(akv_threads_create(2, &g_threads, diag));
    options.model_path = path;
    options.num_threads = 2;
    options.tail_cells = CELLS;
    options.batch_tokens = BATCH;
    options.executor = akv_threads_executor(g_threads);
    CHECK_OK(akv_llama_open(&options, &g_host, diag));
    akv_llama_model_info info;
    akv_llama_model_info_init(&info);
    CHECK_OK(akv_llama_get_model_info(g_host, &info, diag));
    g_vocab = info.vocab_tokens;
}

static size_t open_text(const char *model, const char *path, size_t offset, size_t want)
{
    size_t bytes, count;
    char *text = read_file(path, &bytes);
    CHECK(offset < bytes, "the text has %zu bytes", bytes);
    const size_t some = bytes - offset < 16 * want ? bytes - offset : 16 * want;
    open_model(model);
    CHECK_OK(akv_llama_tokenize(g_host, text + offset, some, 1, 0, &g_tokens, &count, diag));
    free(text);
    return count;
}

static size_t open_tiny(const char *folder, size_t want)
{
    char path[4096];
    CHECK((size_t)snprintf(path, sizeof path, "%s/long.gguf", folder) < sizeof path, "the folder's name is too long");
    tiny_model_write(tiny_model_find("long"), path);
    open_model(path);
    g_tokens = random_tokens(want, TINY_VOCAB, 1);
    return want;
}

/* The largest share of the dense bytes in the last ten turns. */
static void after_turn(size_t turn)
{
    const akv_llama_memory now = memory_of();
    const double share = (double)(now.segments.total + now.cell_bytes) / (double)now.dense_bytes;
    g_worst = turn + 10 > g_turns && share > g_worst ? share : g_worst;
}

static void attach_opening(const akv_llama_rolling *rolling)
{
    CHECK_OK(akv_llama_attach(g_host, g_opening, diag));
    CHECK_OK(akv_llama_set_rolling(g_host, rolling, diag));
}

/* "segment:512,full:1024" */
static akv_llama_rolling parse_try(akv_llama_rolling r, const char *text)
{
    for (const char *at = text; *at; at += strcspn(at, ","), at += *at == ',') {
        char name[16];
        double value;
        CHECK(sscanf(at, "%15[a-z]:%lf", name, &value) == 2, "not understood: %s", at);
        if (strcmp(name, "segment") == 0)
            r.segment_tokens = (uint32_t)value;
        else if (strcmp(name, "exact") == 0)
            r.keep_tokens = (uint32_t)value;
        else if (strcmp(name, "full") == 0)
            r.full_tokens = (uint32_t)value;
        else if (strcmp(name, "ratio") == 0)
            r.config.keep_ratio = 1.0 / value;
        else
            CHECK(0, "there is no %s", name);
    }
    return r;
}

typedef struct footprint {
    uint64_t all, dense; /* bytes, cells as they are used */
    size_t exact;        /* tokens, those in cells among them */
} footprint;

/* replayed: what would be in cells is a dense segment */
static footprint say_bytes(size_t N, bool replayed)
{
    const akv_llama_memory m = memory_of();
    const uint64_t token = m.dense_bytes / N;
    const size_t in_cells = replayed ? 0 : (N - OPENING - 1) % CELLS + 1; /* they move when the next token comes */
    footprint f = {m.segments.total + token * in_cells, m.dense_bytes, in_cells + (size_t)(m.segments.dense / token)};
    printf("%zu tokens, %u rolls: %.2f MiB in %u segments, %zu tokens exact, %.2f MiB of %.2f, %.2f times smaller\n", N,
           m.rolls, (double)m.segments.total / 1048576, m.num_segments, f.exact, (double)f.all / 1048576,
           (double)m.dense_bytes / 1048576, (double)m.dense_bytes / (double)f.all);
    if (!replayed)
        printf("with the cells as allocated %.2f times; at the worst of the last ten turns %.2f times\n",
               (double)m.dense_bytes / (double)(m.segments.total + m.cell_bytes), 1.0 / g_worst);
    fflush(stdout);
    return f;
}

int main(int argc, char **argv)
{
    CHECK(argc >= 3 && argc % 2 == 1,
          "usage: %s MODEL.gguf TEXT [--tokens N] [--turns N] [--ratio X] [--budget X] [--full N] [--segment N] "
          "[--exact N] [--offset BYTES] [--rest N] [--parts 0] [--live 0] [--try segment:N,...]...",
          argv[0]);
    const size_t N = (size_t)option(argc, argv, "--tokens", 7400), offset = (size_t)option(argc, argv, "--offset", 0);
    const bool live = option(argc, argv, "--live", 1) != 0, parts = !live || option(argc, argv, "--parts", 1) != 0;
    g_rest = (size_t)option(argc, argv, "--rest", 128);
    g_turns = (size_t)option(argc, argv, "--turns", 50);
    akv_llama_rolling r;
    akv_llama_rolling_init(&r);
    r.config.keep_ratio = 1.0 / option(argc, argv, "--ratio", 10);
    r.segment_tokens = (uint32_t)option(argc, argv, "--segment", r.segment_tokens);
    r.keep_tokens = (uint32_t)option(argc, argv, "--exact", r.keep_tokens);
    r.full_tokens = (uint32_t)option(argc, argv, "--full", r.full_tokens);
    r.from_token = 0;
    akv_llama_rolling never = r; /* nothing has to be compressed */
    never.full_tokens = 1u << 30;

    const bool tiny = strncmp(argv[1], "tiny:", 5) == 0;
    const size_t count = tiny ? open_tiny(argv[1] + 5, N + g_rest) : open_text(argv[1], argv[2], offset, N + g_rest);
    CHECK(N > OPENING + CELLS && g_rest > 0 && count >= N + g_rest && g_turns > 0, "the text has %zu tokens from there",
          count);
    g_opening = host_exactly(g_host, g_tokens, OPENING);
    const double smaller = option(argc, argv, "--budget", 0);
    if (smaller > 0.0) /* so many times less than all tokens take uncompressed */
        r.budget_bytes = (uint64_t)((double)(memory_of().dense_bytes / OPENING * N) / smaller);
    footprint f = {0};
    recording *said = NULL, *read = NULL;
    float *rolled = NULL, *pieces = NULL, *past = NULL;
    if (live) {
        CHECK_OK(akv_llama_set_rolling(g_host, &r, diag));
        said = record(g_host, g_tokens, OPENING, N, g_turns, after_turn);
        f = say_bytes(N, false);
        if (tiny)
            return 0;
        rolled = rest_of(N);
    }
    if (parts) {
        attach_opening(&never);
        read = record(g_host, g_tokens, OPENING, N, 1, NULL);
        attach_opening(&r);
        replay(g_host, read, g_tokens, N);
        const footprint again = say_bytes(N, true);
        CHECK(!live || (again.exact == f.exact && again.all < f.all + f.all / 100), "the replay took other bytes");
        f = again;
        pieces = rest_of(N);
        if (live) {
            attach_opening(NULL);
            replay(g_host, said, g_tokens, N);
            past = rest_of(N);
        }
    }
    recording_free(said);
    const uint64_t token = f.dense / N;

    CHECK_OK(akv_llama_prefill(g_host, g_tokens, N - f.exact, f.exact + g_rest, diag));
    attach_compressed((double)(f.all - token * f.exact) / (double)(token * (N - f.exact)));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + N - f.exact, f.exact, AKV_LLAMA_LOGITS_LAST, diag));
    float *with_tail = rest_of(N);
    CHECK_OK(akv_llama_extend(g_host, g_tokens + N - f.exact, f.exact, diag));
    attach_compressed((double)f.all / (double)f.dense);
    float *once = rest_of(N);
    float *dense = rest_of(N);
    double kl = 0.0;
    if (live)
        kl = say_divergence("rolling", dense, rolled, 0.0);
    if (parts)
        say_divergence("the same pieces of keys computed from an exact past", dense, pieces, kl);
    if (past)
        say_divergence("computed from a compressed past, kept exactly", dense, past, kl);
    say_divergence("at once, all of it compressed", dense, once, kl);
    say_divergence("at once, the same last tokens exact", dense, with_tail, kl);
    for (int i = 3; parts && i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--try") != 0)
            continue;
        printf("-- %s\n", argv[i + 1]);
        const akv_llama_rolling other = parse_try(r, argv[i + 1]);
        attach_opening(&other);
        replay(g_host, read, g_tokens, N);
        f = say_bytes(N, true);
        kl = say_divergence("pieces of keys computed from an exact past", dense, rest_of(N), 0.0);
        CHECK_OK(akv_llama_rewind(g_host, diag));
        attach_compressed((double)f.all / (double)f.dense);
        say_divergence("at once", dense, rest_of(N), kl);
    }
    recording_free(read);
    akv_llama_store_release(g_opening);
    free(dense);
    akv_llama_free_tokens(g_tokens);
    akv_llama_close(g_host);
    akv_threads_destroy(g_threads);
    return 0;
}
