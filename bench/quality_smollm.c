/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quality_smollm.c - what compressing a document does to the text that follows it: teacher-forced logits of the hosted
 * model against those from the dense cache, for both profiles and SnapKV-like eviction, several pieces of one text.
 *
 * usage: quality_smollm MODEL.gguf TEXT [DOCUMENT-TOKENS [CONTINUATION-TOKENS [PIECES [THREADS]]]]
 */
#include <akv_llama.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(call) \
    do { \
        akv_diag must_diag = {.status = AKV_OK}; \
        akv_diag *diag = &must_diag; \
        if ((call) != AKV_OK) { \
            fprintf(stderr, "%s\n", must_diag.message); \
            exit(1); \
        } \
    } while (0)

typedef struct method {
    const char *name;
    akv_llama_method method;
    akv_profile profile;
    double ratio;
} method;

static const method methods[] = {
    {"exact", AKV_LLAMA_EXACT, AKV_PROFILE_DEFAULT, 1.0},    {"default", AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 10.0},
    {"paper", AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 10.0},    {"snapkv", AKV_LLAMA_SNAPKV, AKV_PROFILE_DEFAULT, 10.0},
    {"default", AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 20.0}, {"paper", AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 20.0},
    {"snapkv", AKV_LLAMA_SNAPKV, AKV_PROFILE_DEFAULT, 20.0},
};
enum { METHODS = sizeof methods / sizeof methods[0] };

typedef struct result {
    double kl;  /* nats per token */
    double nll; /* of the true next token */
    size_t same_top;
    size_t rows;
    uint64_t bytes;
    double compress_seconds;
} result;

static void *need(void *memory)
{
    if (!memory) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return memory;
}

/* Log-probabilities of one row in place. */
static void normalise(float *row, size_t vocab)
{
    double top = row[0], sum = 0.0;
    for (size_t i = 1; i < vocab; i++)
        top = row[i] > top ? row[i] : top;
    for (size_t i = 0; i < vocab; i++)
        sum += exp(row[i] - top);
    for (size_t i = 0; i < vocab; i++)
        row[i] = (float)(row[i] - top - log(sum));
}

static size_t top_of(const float *row, size_t vocab)
{
    size_t top = 0;
    for (size_t i = 1; i < vocab; i++)
        top = row[i] > row[top] ? i : top;
    return top;
}

/* Log-probabilities after each of n tokens that follow the document. */
static void run(akv_llama *host, const int32_t *tokens, size_t n, size_t vocab, float *out)
{
    MUST(akv_llama_rewind(host, diag));
    for (size_t i = 0; i < n; i++) {
        MUST(akv_llama_decode(host, tokens + i, 1, AKV_LLAMA_LOGITS_LAST, diag));
        memcpy(out + i * vocab, akv_llama_logits(host, -1), vocab * sizeof *out);
        normalise(out + i * vocab, vocab);
    }
}

static void add(result *r, const float *reference, const float *other, const int32_t *tokens, size_t n, size_t vocab)
{
    for (size_t i = 0; i < n; i++) { /* row i predicts tokens[i + 1] */
        const float *a = reference + i * vocab, *b = other + i * vocab;
        for (size_t v = 0; v < vocab; v++)
            r->kl += exp(a[v]) * ((double)a[v] - b[v]);
        r->nll -= b[tokens[i + 1]];
        r->same_top += top_of(a, vocab) == top_of(b, vocab);
        r->rows++;
    }
}

static char *read_text(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(1);
    }
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *text = need(malloc(*bytes + 1));
    *bytes = fread(text, 1, *bytes, file);
    fclose(file);
    return text;
}

static size_t argument(int argc, char **argv, int i, size_t otherwise)
{
    return argc > i ? (size_t)strtoull(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL.gguf TEXT [DOCUMENT [CONTINUATION [PIECES [THREADS]]]]\n", argv[0]);
        return 2;
    }
    const size_t document = argument(argc, argv, 3, 4096), rest = argument(argc, argv, 4, 256);
    const size_t pieces = argument(argc, argv, 5, 4), threads = argument(argc, argv, 6, 2);
    akv_threads *pool = NULL;
    MUST(akv_threads_create((uint32_t)threads, &pool, diag));
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = argv[1];
    options.num_threads = (uint32_t)threads;
    options.executor = akv_threads_executor(pool);
    akv_llama *host = NULL;
    MUST(akv_llama_open(&options, &host, diag));
    akv_llama_model_info info;
    akv_llama_model_info_init(&info);
    MUST(akv_llama_get_model_info(host, &info, diag));
    const size_t vocab = info.vocab_tokens;

    size_t bytes, num_tokens = 0;
    char *text = read_text(argv[2], &bytes);
    int32_t *tokens = NULL;
    MUST(akv_llama_tokenize(host, text, bytes, 0, 0, &tokens, &num_tokens, diag));
    const size_t needed = document + rest + 1;
    if (num_tokens < needed) {
        fprintf(stderr, "%s has %zu tokens; %zu are needed\n", argv[2], num_tokens, needed);
        return 1;
    }
    float *dense = need(malloc(rest * vocab * sizeof *dense)), *hosted = need(malloc(rest * vocab * sizeof *hosted));
    result results[METHODS + 1] = {{0}};
    double prefill = 0.0;
    for (size_t p = 0; p < pieces; p++) { /* pieces spread evenly over the text */
        const int32_t *from = tokens + (pieces > 1 ? (num_tokens - needed) / (pieces - 1) * p : 0);
        akv_llama_store *stores[METHODS] = {NULL};
        akv_llama_stats stats;
        akv_llama_stats_init(&stats);
        MUST(akv_llama_prefill(host, from, document, rest, diag));
        for (size_t m = 0; m < METHODS; m++) {
            akv_config config;
            akv_config_init(&config);
            config.profile = methods[m].profile;
            config.keep_ratio = 1.0 / methods[m].ratio;
            MUST(akv_llama_compress(host, methods[m].method, &config, &stores[m], diag));
            MUST(akv_llama_get_stats(host, &stats, diag));
            results[m].bytes += stats.compressed_bytes;
            results[m].compress_seconds += stats.compress_seconds;
        }
        results[METHODS].bytes += stats.dense_cache_bytes;
        prefill += stats.prefill_seconds;
        run(host, from + document, rest, vocab, dense);
        add(&results[METHODS], dense, dense, from + document, rest, vocab);
        MUST(akv_llama_free_dense(host, diag));
        for (size_t m = 0; m < METHODS; m++) {
            MUST(akv_llama_attach(host, stores[m], diag));
            akv_llama_store_release(stores[m]);
            const double before = results[m].kl;
            run(host, from + document, rest, vocab, hosted);
            add(&results[m], dense, hosted, from + document, rest, vocab);
            fprintf(stderr, "piece %zu %-8s %4.0fx  KL %.5f\n", p + 1, methods[m].name, methods[m].ratio,
                    (results[m].kl - before) / (double)rest);
        }
    }
    const double dense_nll = results[METHODS].nll / (double)results[METHODS].rows;
    printf("%s: %zu tokens, then %zu teacher-forced ones, %zu pieces of %s; prefill %.1f s each\n", argv[1], document, rest,
           pieces, argv[2], prefill / (double)pieces);
    printf("%-8s %5s %12s %9s %7s %10s %9s %11s\n", "method", "ratio", "bytes", "mean KL", "top-1", "perplexity", "vs dense",
           "compress s");
    for (size_t m = 0; m <= METHODS; m++) {
        const result *r = &results[m];
        const double rows = (double)r->rows;
        printf("%-8s %5.0f %12llu %9.5f %7.4f %10.4f %+8.2f%% %11.2f\n", m < METHODS ? methods[m].name : "dense",
               m < METHODS ? methods[m].ratio : 1.0, (unsigned long long)(r->bytes / pieces), r->kl / rows,
               (double)r->same_top / rows, exp(r->nll / rows), 100.0 * (exp(r->nll / rows - dense_nll) - 1.0),
               r->compress_seconds / (double)pieces);
    }
    free(dense);
    free(hosted);
    free(text);
    free(tokens);
    akv_llama_close(host);
    akv_threads_destroy(pool);
    return 0;
}
