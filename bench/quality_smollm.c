/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quality_smollm.c - what compression does to a language model: a real text is read densely, its first tokens are
 * compressed, and the tokens that really follow are forced through the model from the compressed form. Next to the dense
 * answer: mean KL divergence, share of equal top tokens, perplexity, bytes. docs/quality.md has figures.
 *
 *   quality_smollm MODEL.gguf TEXT [DOCUMENT-TOKENS] [CONTINUATION-TOKENS] [SAMPLED-QUERIES]
 *
 * All layers' caches are compressed in one go per row of the table; the continuation is decoded as one batch, so a step's
 * error does not come back through sampled tokens. Two threads.
 */
#include <akv_llama.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static akv_diag diag;

/* Ends the program with the library's sentence when a call failed. */
static void must(akv_status status, const char *what)
{
    if (status == AKV_OK)
        return;
    fprintf(stderr, "quality_smollm: %s: %s\n", what, diag.message);
    exit(1);
}

static char *read_text(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    long size = -1;
    char *text = NULL;
    if (file != NULL && fseek(file, 0, SEEK_END) == 0)
        size = ftell(file);
    if (size > 0 && fseek(file, 0, SEEK_SET) == 0)
        text = malloc((size_t)size);
    if (text == NULL || fread(text, 1, (size_t)size, file) != (size_t)size) {
        fprintf(stderr, "quality_smollm: cannot read %s\n", path);
        exit(1);
    }
    fclose(file);
    *bytes = (size_t)size;
    return text;
}

/* log(sum exp) of one row. */
static double log_sum(const float *row, size_t vocab)
{
    double max = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < vocab; i++)
        max = row[i] > max ? row[i] : max;
    for (size_t i = 0; i < vocab; i++)
        sum += exp(row[i] - max);
    return max + log(sum);
}

static size_t top(const float *row, size_t vocab)
{
    size_t best = 0;
    for (size_t i = 1; i < vocab; i++)
        best = row[i] > row[best] ? i : best;
    return best;
}

typedef struct quality {
    double mean_kl;
    double top1;
    double perplexity;
} quality;

/* Row t of both stands behind token t of the continuation and predicts token t + 1. */
static quality judge(const float *dense, const float *other, const int32_t *tokens, size_t rows, size_t vocab)
{
    quality q = {0.0, 0.0, 0.0};
    double nll = 0.0;
    for (size_t t = 0; t < rows; t++) {
        const float *a = dense + t * vocab, *b = other + t * vocab;
        const double za = log_sum(a, vocab), zb = log_sum(b, vocab);
        double kl = 0.0;
        for (size_t i = 0; i < vocab; i++)
            kl += exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
        q.mean_kl += kl / (double)rows;
        q.top1 += (top(a, vocab) == top(b, vocab)) / (double)rows;
        if (t + 1 < rows)
            nll -= b[tokens[t + 1]] - zb;
    }
    q.perplexity = exp(nll / (double)(rows - 1));
    return q;
}

static void decode_all(akv_llama *host, const int32_t *tokens, size_t n, size_t vocab, float *out)
{
    must(akv_llama_rewind(host, &diag), "rewind");
    must(akv_llama_decode(host, tokens, n, AKV_LLAMA_LOGITS_ALL, &diag), "decode");
    memcpy(out, akv_llama_logits(host, 0), n * vocab * sizeof *out);
}

static long number(int argc, char **argv, int i, long otherwise)
{
    return argc > i ? strtol(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        akv_llama_method method;
        akv_profile profile;
        double ratio;
    } runs[] = {
        {"everything kept", AKV_LLAMA_EXACT, AKV_PROFILE_DEFAULT, 1.0},
        {"default", AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 10.0},
        {"paper", AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 10.0},
        {"snapkv", AKV_LLAMA_SNAPKV, AKV_PROFILE_PAPER, 10.0},
        {"default", AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 20.0},
        {"paper", AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 20.0},
    };
    const long document = number(argc, argv, 3, 4096), rest = number(argc, argv, 4, 256), sampled = number(argc, argv, 5, 64);
    if (argc < 3 || document < 64 || rest < 2 || sampled < 0) {
        fprintf(stderr, "usage: quality_smollm MODEL.gguf TEXT [DOCUMENT-TOKENS] [CONTINUATION-TOKENS] [SAMPLED-QUERIES]\n");
        return 1;
    }
    akv_threads *threads = NULL;
    akv_llama *host = NULL;
    akv_llama_options options;
    akv_llama_model_info info;
    akv_llama_options_init(&options);
    akv_llama_model_info_init(&info);
    must(akv_threads_create(2, &threads, &diag), "threads");
    options.model_path = argv[1];
    options.num_threads = 2;
    options.sampled_queries = (uint32_t)sampled;
    options.executor = akv_threads_executor(threads);
    must(akv_llama_open(&options, &host, &diag), argv[1]);
    must(akv_llama_get_model_info(host, &info, &diag), "model");

    size_t bytes, n;
    int32_t *tokens;
    char *text = read_text(argv[2], &bytes);
    must(akv_llama_render_document(host, AKV_LLAMA_RAW, NULL, text, bytes, &tokens, &n, &diag), argv[2]);
    if (n < (size_t)(document + rest)) {
        fprintf(stderr, "quality_smollm: %s has %zu tokens; %ld are needed\n", argv[2], n, document + rest);
        return 1;
    }
    const int32_t *next = tokens + document;
    const size_t vocab = info.vocab_tokens;
    float *dense = malloc((size_t)rest * vocab * sizeof *dense), *other = malloc((size_t)rest * vocab * sizeof *other);
    if (dense == NULL || other == NULL) {
        fprintf(stderr, "quality_smollm: no memory for the logits of %ld tokens\n", rest);
        return 1;
    }
    must(akv_llama_prefill(host, tokens, (size_t)document, (size_t)rest, &diag), "prefill");
    decode_all(host, next, (size_t)rest, vocab, dense);
    must(akv_llama_rewind(host, &diag), "rewind");

    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    must(akv_llama_get_stats(host, &stats, &diag), "stats");
    quality q = judge(dense, dense, next, (size_t)rest, vocab);
    printf("%s, %ld tokens + %ld, %ld sampled queries, prefill %.2f s\n", argv[2], document, rest, sampled, stats.prefill_seconds);
    printf("%-16s %6s %12s %7s %9s %7s %10s %9s\n", "method", "asked", "bytes", "really", "mean KL", "top-1", "perplexity",
           "seconds");
    printf("%-16s %6s %12llu %7s %9s %6.1f%% %10.4f\n", "dense", "", (unsigned long long)document * info.num_layers *
           info.num_kv_heads * 2 * info.head_dim_k * 2, "", "0", 100.0, q.perplexity);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        akv_config config;
        akv_llama_store *store = NULL;
        akv_config_init(&config);
        config.profile = runs[i].profile;
        config.keep_ratio = 1.0 / runs[i].ratio;
        must(akv_llama_compress(host, runs[i].method, &config, &store, &diag), "compress");
        must(akv_llama_attach(host, store, &diag), "attach");
        decode_all(host, next, (size_t)rest, vocab, other);
        must(akv_llama_get_stats(host, &stats, &diag), "stats");
        q = judge(dense, other, next, (size_t)rest, vocab);
        printf("%-16s %5gx %12llu %6.2fx %9.5f %6.1f%% %10.4f %9.2f\n", runs[i].name, runs[i].ratio,
               (unsigned long long)stats.compressed_bytes, (double)stats.dense_cache_bytes / (double)stats.compressed_bytes,
               q.mean_kl, 100.0 * q.top1, q.perplexity, stats.compress_seconds);
        fflush(stdout);
        must(akv_llama_detach(host, &diag), "detach");
        akv_llama_store_release(store);
    }
    akv_llama_close(host);
    akv_threads_destroy(threads);
    akv_llama_free_tokens(tokens);
    free(text);
    free(dense);
    free(other);
    return 0;
}
