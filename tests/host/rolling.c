/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling.c - measures a conversation that is compressed as it grows against one compression of all of it, at the same
 * bytes in all: bytes, and the divergence from the exact cache of the tokens that follow. A measurement
 * (docs/sessions.md), not a test: it takes minutes.
 *
 * usage: rolling MODEL.gguf TEXT [--tokens N] [--turns N] [--ratio X] [--budget X] [--segment N] [--exact N]
 *                [--offset BYTES]
 *        rolling tiny:FOLDER - [the same]
 *
 * The second form makes a small random model with a long context in FOLDER and speaks random tokens: bytes alone, which
 * do not depend on what is said. The text is spoken in equal turns. "At once" is counted in two ways: everything
 * compressed, and with as many of the last tokens exact as the conversation has.
 */
#include "common.h"
#include "tiny_models.h"

#include <string.h>

enum { CELLS = 256, BATCH = 256, REST = 128, OPENING = 32 };

static akv_llama *g_host;
static size_t g_vocab;
static int32_t *g_tokens;
static akv_threads *g_threads;

static akv_llama_memory memory_of(void)
{
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    CHECK_OK(akv_llama_get_memory(g_host, &m, diag));
    return m;
}

static float *copy_logits(void)
{
    float *copy = malloc(REST * g_vocab * sizeof *copy);
    CHECK(copy && akv_llama_logits(g_host, 0), "no logits");
    memcpy(copy, akv_llama_logits(g_host, 0), REST * g_vocab * sizeof *copy);
    return copy;
}

static float *rest_of(size_t n)
{
    CHECK_OK(akv_llama_decode(g_host, g_tokens + n, REST, AKV_LLAMA_LOGITS_ALL, diag));
    return copy_logits();
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

static void say_divergence(const char *name, const float *dense, const float *logits, double rolled)
{
    const divergence d = compare_logits(dense, logits, REST, g_vocab);
    printf("%-44s mean divergence %.5f, top %zu of %d", name, d.mean_kl, d.same_top, REST);
    if (rolled > 0.0)
        printf("; rolling has %.2f times it", rolled / d.mean_kl);
    printf("\n");
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

int main(int argc, char **argv)
{
    CHECK(argc >= 3 && argc % 2 == 1,
          "usage: %s MODEL.gguf TEXT [--tokens N] [--turns N] [--ratio X] [--budget X] [--segment N] "
          "[--exact N] [--offset BYTES]",
          argv[0]);
    const size_t N = (size_t)option(argc, argv, "--tokens", 7400), turns = (size_t)option(argc, argv, "--turns", 50);
    const size_t offset = (size_t)option(argc, argv, "--offset", 0);
    akv_llama_rolling r;
    akv_llama_rolling_init(&r);
    r.config.keep_ratio = 1.0 / option(argc, argv, "--ratio", 10);
    r.segment_tokens = (uint32_t)option(argc, argv, "--segment", r.segment_tokens);
    r.keep_tokens = (uint32_t)option(argc, argv, "--exact", r.keep_tokens);
    r.from_token = 0;

    const int tiny = strncmp(argv[1], "tiny:", 5) == 0;
    const size_t count = tiny ? open_tiny(argv[1] + 5, N + REST) : open_text(argv[1], argv[2], offset, N + REST);
    CHECK(N > OPENING + CELLS && count >= N + REST && turns > 0, "the text has %zu tokens from there", count);

    akv_llama_store_release(host_exactly(g_host, g_tokens, OPENING));
    const double smaller = option(argc, argv, "--budget", 0);
    if (smaller > 0.0) /* so many times less than all tokens take uncompressed */
        r.budget_bytes = (uint64_t)((double)(memory_of().dense_bytes / OPENING * N) / smaller);
    CHECK_OK(akv_llama_set_rolling(g_host, &r, diag));
    double worst = 0.0;
    for (size_t at = OPENING, turn = 1; turn <= turns; turn++) {
        const size_t to = OPENING + (N - OPENING) * turn / turns;
        if (to > at)
            CHECK_OK(akv_llama_decode(g_host, g_tokens + at, to - at, AKV_LLAMA_LOGITS_LAST, diag));
        at = to;
        const akv_llama_memory now = memory_of();
        const double share = (double)(now.segments.total + now.cell_bytes) / (double)now.dense_bytes;
        worst = turn + 10 > turns && share > worst ? share : worst;
    }
    const akv_llama_memory m = memory_of();
    const uint64_t token = m.dense_bytes / N;
    const size_t in_cells = (N - OPENING - 1) % CELLS + 1; /* they move when the next token comes */
    const size_t exact = in_cells + (size_t)(m.segments.dense / token);
    const uint64_t all = m.segments.total + token * in_cells;
    printf("%zu tokens in %zu turns, %u rolls: %.2f MiB in %u segments, %zu tokens exact (%zu of them in cells)\n", N,
           turns, m.rolls, (double)m.segments.total / 1048576, m.num_segments, exact, in_cells);
    printf("in all %.2f MiB of %.2f: %.2f times smaller; with the cells as allocated %.2f times\n",
           (double)all / 1048576, (double)m.dense_bytes / 1048576, (double)m.dense_bytes / (double)all,
           (double)m.dense_bytes / (double)(m.segments.total + m.cell_bytes));
    printf("of the last ten turns the one with most bytes, cells as allocated: %.2f times smaller\n", 1.0 / worst);
    fflush(stdout);
    if (tiny)
        return 0;
    CHECK_OK(akv_llama_set_rolling(g_host, NULL, diag)); /* the bytes above are those that answer */
    float *rolled = rest_of(N);
    CHECK_OK(akv_llama_detach(g_host, diag));

    CHECK_OK(akv_llama_prefill(g_host, g_tokens, N - exact, exact + REST, diag));
    attach_compressed((double)(all - token * exact) / (double)(token * (N - exact)));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + N - exact, exact, AKV_LLAMA_LOGITS_LAST, diag));
    float *with_tail = rest_of(N);
    CHECK_OK(akv_llama_detach(g_host, diag));

    CHECK_OK(akv_llama_extend(g_host, g_tokens + N - exact, exact, diag));
    attach_compressed((double)all / (double)m.dense_bytes);
    float *once = rest_of(N);
    CHECK_OK(akv_llama_detach(g_host, diag));
    float *dense = rest_of(N);
    const double kl = compare_logits(dense, rolled, REST, g_vocab).mean_kl;
    say_divergence("rolling", dense, rolled, 0.0);
    say_divergence("at once, all of it compressed", dense, once, kl);
    say_divergence("at once, the same last tokens exact", dense, with_tail, kl);
    free(rolled);
    free(with_tail);
    free(once);
    free(dense);
    akv_llama_free_tokens(g_tokens);
    akv_llama_close(g_host);
    akv_threads_destroy(g_threads);
    return 0;
}
