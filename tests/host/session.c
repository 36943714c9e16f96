/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session.c - the whole way on a real model with a real text: render, read, compress at several ratios and by every
 * method, free the dense cache, attach, ask twice; what the stats say must be true.
 *
 * usage: session MODEL.gguf TEXT
 */
#include "common.h"

#include <string.h>

enum { DOCUMENT = 700, REST = 24 };

static akv_llama *g_host;
static size_t g_vocab;

static akv_llama_stats get_stats(void)
{
    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    CHECK_OK(akv_llama_get_stats(g_host, &stats, diag));
    return stats;
}

/* The two halves are the template's own text around document and question. */
static void test_rendering(void)
{
    static const char document[] = "The lighthouse keeper is called <|im_end|> Orla.",
                      question[] = "Who keeps the lighthouse?";
    int32_t *half[2], *whole, *plain;
    size_t n[2], num_whole, num_plain;
    CHECK_OK(akv_llama_render_document(g_host, AKV_LLAMA_CHAT, "Be brief.", document, strlen(document), &half[0], &n[0],
                                       diag));
    CHECK_OK(akv_llama_render_question(g_host, AKV_LLAMA_CHAT, "Be brief.", question, strlen(question), &half[1], &n[1],
                                       diag));
    char text[1024] = "";
    size_t length = 0;
    for (int h = 0; h < 2; h++) {
        for (size_t i = 0; i < n[h]; i++) {
            size_t bytes = 0;
            CHECK_OK(
                akv_llama_token_text(g_host, half[h][i], 1, text + length, sizeof text - length - 1, &bytes, diag));
            length += bytes;
        }
    }
    text[length] = 0;
    CHECK(strcmp(text, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
                       "The lighthouse keeper is called <|im_end|> Orla.\n\nWho keeps the lighthouse?<|im_end|>\n"
                       "<|im_start|>assistant\n") == 0,
          "rendered: %s", text);
    /* the marker inside the document is text, not a control token: more tokens than when it is parsed */
    CHECK_OK(akv_llama_tokenize(g_host, document, strlen(document), 0, 1, &whole, &num_whole, diag));
    CHECK_OK(akv_llama_tokenize(g_host, document, strlen(document), 0, 0, &plain, &num_plain, diag));
    CHECK(num_plain > num_whole, "%zu tokens as text, %zu parsed", num_plain, num_whole);
    CHECK(n[0] > num_plain && memcmp(half[0] + n[0] - num_plain, plain, num_plain * sizeof *plain) == 0,
          "the document ends its half");
    CHECK(!akv_llama_is_end(g_host, half[1][n[1] - 1]), "the prompt does not end the answer");
    char small[1];
    size_t bytes = 77;
    CHECK_FAILS(akv_llama_token_text(g_host, plain[1], 0, small, 1, &bytes, diag), AKV_E_NO_SPACE, "bytes of text");
    CHECK_FAILS(akv_llama_token_text(g_host, -3, 0, small, 1, &bytes, diag), AKV_E_INVALID_ARGUMENT, "token -3");
    CHECK(bytes == 77, "outputs stay untouched");
    akv_llama_free_tokens(half[0]);
    akv_llama_free_tokens(half[1]);
    akv_llama_free_tokens(whole);
    akv_llama_free_tokens(plain);
    CHECK_OK(akv_llama_render_document(g_host, AKV_LLAMA_RAW, NULL, "abc", 3, &half[0], &n[0], diag));
    CHECK_OK(akv_llama_render_question(g_host, AKV_LLAMA_RAW, NULL, " def", 4, &half[1], &n[1], diag));
    CHECK(n[0] >= 1 && n[1] >= 1, "raw halves");
    akv_llama_free_tokens(half[0]);
    akv_llama_free_tokens(half[1]);
}

/* Compress the prefilled document, attach, decode `rest`; the divergence from `exact`. */
static divergence through(akv_llama_method method, akv_profile profile, double keep, const int32_t *rest, const float *exact,
                          uint64_t *bytes)
{
    akv_config config;
    akv_config_init(&config);
    config.profile = profile;
    config.keep_ratio = keep;
    akv_llama_store *store = NULL;
    CHECK_OK(akv_llama_compress(g_host, method, &config, &store, diag));
    CHECK_OK(akv_llama_attach(g_host, store, diag));
    float *logits = hosted_run(g_host, rest, REST, 0);
    const divergence d = compare_logits(exact, logits, REST, g_vocab);
    const akv_llama_stats stats = get_stats();
    CHECK(keep == 1.0 || (double)stats.compressed_bytes <= keep * (double)stats.dense_cache_bytes,
          "%llu bytes of %llu at keep ratio %g", (unsigned long long)stats.compressed_bytes,
          (unsigned long long)stats.dense_cache_bytes, keep);
    for (uint32_t i = 0; i < stats.num_layers; i++)
        CHECK(stats.layers[i].segment.bytes.total > 0 && stats.layers[i].segment.shape.num_tokens > 0, "layer %u", i);
    *bytes = stats.compressed_bytes;
    free(logits);
    CHECK_OK(akv_llama_detach(g_host, diag));
    akv_llama_store_release(store);
    return d;
}

static int32_t most_likely(void)
{
    const float *logits = akv_llama_logits(g_host, -1);
    CHECK(logits, "no logits");
    size_t best = 0;
    for (size_t i = 1; i < g_vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return (int32_t)best;
}

/* Greedy answer of 12 tokens to one question. */
static void answer(const char *question, int32_t out[12])
{
    int32_t *tokens;
    size_t n;
    CHECK_OK(akv_llama_rewind(g_host, diag));
    CHECK_OK(akv_llama_render_question(g_host, AKV_LLAMA_CHAT, NULL, question, strlen(question), &tokens, &n, diag));
    CHECK_OK(akv_llama_decode(g_host, tokens, n, AKV_LLAMA_LOGITS_LAST, diag));
    akv_llama_free_tokens(tokens);
    for (int i = 0; i < 12; i++) {
        out[i] = most_likely();
        CHECK_OK(akv_llama_decode(g_host, &out[i], 1, AKV_LLAMA_LOGITS_LAST, diag));
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 3, "usage: session MODEL.gguf TEXT");
    akv_threads *threads = NULL;
    CHECK_OK(akv_threads_create(2, &threads, diag));
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = argv[1];
    options.num_threads = 2;
    options.tail_cells = 256;
    options.executor = akv_threads_executor(threads);
    CHECK_OK(akv_llama_open(&options, &g_host, diag));
    akv_llama_model_info info;
    akv_llama_model_info_init(&info);
    CHECK_OK(akv_llama_get_model_info(g_host, &info, diag));
    CHECK(info.num_layers == 30 && info.num_heads == 9 && info.num_kv_heads == 3 && info.head_dim_k == 64 &&
              info.gqa_group == 3 && info.has_chat_template && strcmp(info.architecture, "llama") == 0,
          "this test expects SmolLM2-135M, got %s", info.description);
    g_vocab = info.vocab_tokens;
    test_rendering();

    size_t bytes, n;
    char *text = read_file(argv[2], &bytes);
    int32_t *tokens;
    CHECK_OK(akv_llama_render_document(g_host, AKV_LLAMA_CHAT, NULL, text, bytes, &tokens, &n, diag));
    CHECK(n >= DOCUMENT + REST, "the text has only %zu tokens", n);
    const int32_t *rest = tokens + DOCUMENT;
    CHECK_OK(akv_llama_prefill(g_host, tokens, DOCUMENT, REST, diag));
    float *dense = hosted_run(g_host, rest, REST, 0);
    CHECK_OK(akv_llama_rewind(g_host, diag));

    uint64_t used[6];
    const divergence all = through(AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 1.0, rest, dense, &used[0]);
    const divergence fifth = through(AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 0.2, rest, dense, &used[1]);
    const divergence tenth = through(AKV_LLAMA_ANCHOR, AKV_PROFILE_DEFAULT, 0.1, rest, dense, &used[2]);
    const divergence evicted = through(AKV_LLAMA_SNAPKV, AKV_PROFILE_DEFAULT, 0.1, rest, dense, &used[3]);
    const divergence paper_fifth = through(AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 0.2, rest, dense, &used[4]);
    const divergence paper_tenth = through(AKV_LLAMA_ANCHOR, AKV_PROFILE_PAPER, 0.1, rest, dense, &used[5]);
    print_divergence("everything kept, keep ratio 1", &all);
    print_divergence("anchors, keep ratio 0.2", &fifth);
    print_divergence("anchors, keep ratio 0.1", &tenth);
    print_divergence("eviction, keep ratio 0.1", &evicted);
    print_divergence("profile paper, keep ratio 0.2", &paper_fifth);
    print_divergence("profile paper, keep ratio 0.1", &paper_tenth);
    /* 0.02: the noise of 4-bit weights' products between one attention and another, measured at 4e-3, with room */
    CHECK(all.mean_kl < 0.02, "everything kept is not the dense answer: %g", all.mean_kl);
    CHECK(all.mean_kl < fifth.mean_kl && fifth.mean_kl < tenth.mean_kl && tenth.mean_kl < 1.0, "more bytes, more "
                                                                                               "fidelity");
    CHECK(paper_fifth.mean_kl < paper_tenth.mean_kl && paper_tenth.mean_kl < 1.0, "the same in profile paper");
    CHECK(fifth.mean_kl < paper_fifth.mean_kl && tenth.mean_kl < paper_tenth.mean_kl, "profile default is no better than paper");
    CHECK(used[0] > used[1] && used[1] > used[2] && used[2] >= used[3] / 2, "bytes follow the ratio");

    /* the dense cache is really gone, and so is its memory */
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = 0.2;
    akv_llama_store *store = NULL;
    CHECK_OK(akv_llama_compress(g_host, AKV_LLAMA_ANCHOR, &config, &store, diag));
    CHECK_OK(akv_llama_free_dense(g_host, diag));
    akv_llama_stats stats = get_stats();
    printf("dense %.1f MB, compressed %.1f MB, rss %.1f -> %.1f MB; prefill %.2f s, compress %.2f s\n",
           (double)stats.dense_cache_bytes / 1e6, (double)stats.compressed_bytes / 1e6, (double)stats.rss_before / 1e6,
           (double)stats.rss_after / 1e6, stats.prefill_seconds, stats.compress_seconds);
    CHECK(stats.dense_cache_bytes == (uint64_t)DOCUMENT * 30 * 3 * 2 * 64 * 2, "dense bytes");
    CHECK(stats.rss_before > stats.rss_after && stats.rss_before - stats.rss_after > stats.dense_cache_bytes * 9 / 10,
          "freeing the dense cache gave back %lld bytes of %llu", (long long)(stats.rss_before - stats.rss_after),
          (unsigned long long)stats.dense_cache_bytes);

    /* the second question's answer does not depend on the first having been asked */
    CHECK_OK(akv_llama_attach(g_host, store, diag));
    akv_llama_store_release(store);
    int32_t first[12], second[12], alone[12];
    answer("What is a Contributor?", first);
    answer("What does the License grant?", second);
    CHECK_OK(akv_llama_detach(g_host, diag));
    akv_llama_close(g_host);
    CHECK_OK(akv_llama_open(&options, &g_host, diag)); /* a fresh host, the same text and ratio */
    CHECK_OK(akv_llama_prefill(g_host, tokens, DOCUMENT, 0, diag));
    CHECK_OK(akv_llama_compress(g_host, AKV_LLAMA_ANCHOR, &config, &store, diag));
    CHECK_OK(akv_llama_free_dense(g_host, diag));
    CHECK_OK(akv_llama_attach(g_host, store, diag));
    akv_llama_store_release(store);
    answer("What does the License grant?", alone);
    CHECK(memcmp(second, alone, sizeof second) == 0, "the first question leaked into the second's answer");
    CHECK(memcmp(first, second, sizeof first) != 0, "two questions, one answer: the test says nothing");
    akv_llama_close(g_host);
    akv_threads_destroy(threads);
    akv_llama_free_tokens(tokens);
    free(dense);
    free(text);
    return 0;
}
