/* SPDX-License-Identifier: Apache-2.0 */
/*
 * identity.c - the control of the whole host on a real model: with every key and value kept exactly, the hosted logits
 * must be stock llama.cpp's, and without the replacement of attention they must not be.
 *
 * usage: identity MODEL.gguf TEXT
 */
#include "common.h"

#include <stdbool.h>
#include <string.h>

enum { DOCUMENT = 1000, SINGLE = 64, BATCH = 40, UBATCH = 512 };

/* The same model, document and tokens in a context that never saw the document: what B computes when nothing is
 * replaced. */
static float *unreplaced(struct llama_model *model, const int32_t *rest, size_t n, size_t position)
{
    const size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = params.n_threads_batch = 2;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_context *context = llama_init_from_model(model, params);
    CHECK(context, "no context");
    float *out = malloc(n * vocab * sizeof *out);
    CHECK(out, "no memory");
    struct llama_batch batch = llama_batch_init(1, 0, 1);
    for (size_t i = 0; i < n; i++) {
        batch.n_tokens = 1;
        batch.token[0] = rest[i];
        batch.pos[0] = (int32_t)(position + i);
        batch.n_seq_id[0] = 1;
        batch.seq_id[0][0] = 0;
        batch.logits[0] = 1;
        CHECK(llama_decode(context, batch) == 0, "decode");
        memcpy(out + i * vocab, llama_get_logits(context), vocab * sizeof *out);
    }
    llama_batch_free(batch);
    llama_free(context);
    return out;
}

int main(int argc, char **argv)
{
    CHECK(argc == 3, "usage: identity MODEL.gguf TEXT");
    size_t bytes, n;
    char *text = read_file(argv[2], &bytes);
    akv_llama *host = open_host(argv[1], 1024, UBATCH);
    int32_t *tokens;
    CHECK_OK(akv_llama_tokenize(host, text, bytes, 1, 0, &tokens, &n, diag));
    CHECK(n >= DOCUMENT + SINGLE, "the text has only %zu tokens", n);
    const int32_t *rest = tokens + DOCUMENT;

    akv_llama_store *store = host_exactly(host, tokens, DOCUMENT);
    float *hosted = hosted_run(host, rest, SINGLE, true), *hosted_batch = hosted_run(host, rest, BATCH, false);
    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    CHECK_OK(akv_llama_get_stats(host, &stats, diag));
    CHECK(stats.hosted_layers == stats.num_layers && stats.native_layers == 0, "every layer of this model is hosted");
    CHECK(stats.dense_cache_bytes <= stats.compressed_bytes, "everything kept costs at least the dense bytes");
    printf("prefill %.2f s, compress %.2f s, decode %.2f s (%llu tokens), attention %.2f s, rss %.1f -> %.1f MB\n",
           stats.prefill_seconds, stats.compress_seconds, stats.decode_seconds, (unsigned long long)stats.decode_tokens,
           stats.attend_seconds, (double)stats.rss_before / 1e6, (double)stats.rss_after / 1e6);
    akv_llama_store_release(store);
    akv_llama_close(host);

    struct llama_model *model = stock_load(argv[1]);
    const size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    float *stock, *stock_batch;
    stock_run_both(model, tokens, DOCUMENT, rest, SINGLE, BATCH, UBATCH, &stock, &stock_batch);
    float *control = unreplaced(model, rest, SINGLE, DOCUMENT);
    llama_model_free(model);

    const divergence single = compare_logits(stock, hosted, SINGLE, vocab);
    const divergence batch = compare_logits(stock_batch, hosted_batch, BATCH, vocab);
    const divergence noise = compare_logits(stock, stock_batch, BATCH, vocab);
    const divergence without = compare_logits(stock, control, SINGLE, vocab);
    print_divergence("hosted against stock, 64 single tokens", &single);
    print_divergence("hosted against stock, batch of 40", &batch);
    print_divergence("stock: batch against single (noise)", &noise);
    print_divergence("control: attention not replaced", &without);

    /* 1e-5 nats per token: the prefill with flash attention and the sums in another order move logits by hundredths */
    CHECK(single.mean_kl < 1e-5, "hosted attention is not stock attention: %g", single.mean_kl);
    CHECK(batch.mean_kl < noise.mean_kl + 3e-4, "a batch is further from stock than stock's own noise: %g against %g",
          batch.mean_kl, noise.mean_kl);
    CHECK(without.mean_kl > 0.1, "the control without replacement must fail: %g", without.mean_kl);
    free(stock);
    free(stock_batch);
    free(control);
    free(hosted);
    free(hosted_batch);
    akv_llama_free_tokens(tokens);
    free(text);
    return 0;
}
