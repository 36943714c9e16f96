/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiny.c - every kind of attention that the host supports, on tiny random models: hosted logits are stock llama.cpp's,
 * moving B's cells into segments changes nothing, rewinding forgets everything, and a store survives being taken apart.
 *
 * usage: tiny NAME SCRATCH-FOLDER
 */
#include "common.h"
#include "host.h" /* the observation queries are not visible from outside */
#include "tiny_models.h"

#include <math.h>
#include <string.h>

enum { DOCUMENT = 700, REST = 100, SINGLE = 48, UBATCH = 128 };

/* What stock llama.cpp computes for `rest` when it never saw the document. */
static float *without_document(struct llama_model *model, const int32_t *rest)
{
    return stock_run(model, 0, rest, 1, rest, SINGLE, 1, UBATCH);
}

static akv_llama_store *taken_apart(const akv_llama_store *store)
{
    akv_llama_store_parts parts;
    akv_llama_store_parts_init(&parts);
    CHECK_OK(akv_llama_store_get_parts(store, &parts, diag));
    akv_segment **segments = calloc(parts.num_segments, sizeof *segments);
    CHECK(segments, "no memory");
    for (uint32_t i = 0; i < parts.num_segments; i++) {
        size_t bytes;
        const void *data = akv_segment_data(parts.segments[i], &bytes);
        CHECK_OK(akv_segment_open(data, bytes, 1, NULL, &segments[i], diag));
    }
    parts.segments = segments;
    akv_llama_store *copy = NULL;
    CHECK_OK(akv_llama_store_create(&parts, &copy, diag));
    for (uint32_t i = 0; i < parts.num_segments; i++)
        akv_segment_release(segments[i]);
    free(segments);
    return copy;
}

static double relative_difference(const float *a, const float *b, size_t n)
{
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)a[i] * a[i];
    }
    CHECK(size > 0.0, "all queries are zero");
    return sqrt(difference / size);
}

/* Sampled queries: spread over the document, the same whatever the batches, and those of the tokens they claim to be of. */
static void test_samples(const akv_llama *host, const akv_llama *other, uint32_t l)
{
    const akvl_hook *hook = &host->dense_hook;
    const akvl_layer *layer = &host->dense_graph->layers[l];
    const size_t heads = (size_t)layer->num_kv_heads * layer->gqa_group, dim = layer->head_dim_k;
    const uint32_t M = hook->num_sampled, last = (uint32_t)hook->sampled_positions[M - 1];
    CHECK(M == 64 && other->dense_hook.num_sampled == M && !hook->unsampled && !other->dense_hook.unsampled, "%u samples", M);
    for (uint32_t m = 0; m < M; m++)
        CHECK(hook->sampled_positions[m] >= (int32_t)(m * DOCUMENT / M) &&
                  hook->sampled_positions[m] < (int32_t)((m + 1) * DOCUMENT / M + 1), "sample %u is at %d", m,
              hook->sampled_positions[m]);
    const double batches = relative_difference(hook->sampled[l], other->dense_hook.sampled[l], heads * M * dim);
    /* 5e-2 as for the observation queries */
    CHECK(batches < 5e-2, "layer %u: samples of other batches differ by %g", l, batches);
    const double shifted = relative_difference(hook->sampled[l], hook->sampled[l] + dim, (heads * M - 1) * dim);
    CHECK(shifted > 0.2, "layer %u: queries of other tokens differ by %g only, so the check above says nothing", l, shifted);
    CHECK(last >= DOCUMENT - 32, "the last sample is not in the window");
    for (size_t h = 0; h < heads; h++)
        CHECK(memcmp(hook->sampled[l] + (h * M + M - 1) * dim, hook->queries[l] + (h * 32 + last - (DOCUMENT - 32)) * dim,
                     dim * sizeof(float)) == 0, "layer %u: the last sample is not the query of token %u", l, last);
}

/* The last W queries must be the same whatever the batches: 68 leaves 20 tokens for the last one, fewer than W. */
static void test_observation(const char *path, const int32_t *tokens)
{
    akv_llama *hosts[2] = {open_host(path, 256, 1024), open_host(path, 256, 68)};
    for (int i = 0; i < 2; i++)
        CHECK_OK(akv_llama_prefill(hosts[i], tokens, DOCUMENT, 0, diag));
    for (uint32_t l = 0; l < hosts[0]->num_layers; l++) {
        const float *one = hosts[0]->dense_hook.queries[l], *other = hosts[1]->dense_hook.queries[l];
        CHECK(!one == !other && !one == !hosts[0]->is_hosted[l], "layer %u: queries of one of the two are missing", l);
        if (!one)
            continue;
        const akvl_layer *layer = &hosts[0]->dense_graph->layers[l];
        const size_t n = (size_t)layer->num_kv_heads * layer->gqa_group * 32 * layer->head_dim_k;
        const double difference = relative_difference(one, other, n);
        /* 5e-2: half-precision sums in another order, and now and then another expert; other tokens' queries differ by
         * 1 */
        CHECK(difference < 5e-2, "layer %u: relative difference %g", l, difference);
        test_samples(hosts[0], hosts[1], l);
    }
    akv_llama_close(hosts[0]);
    akv_llama_close(hosts[1]);
}

/* The compressing method through the same pipeline. Random keys are the worst case for anchors, so only half is saved.
 */
static void test_compression(const char *path, const int32_t *tokens, const float *stock, const divergence *control)
{
    akv_llama *host = open_host(path, 256, UBATCH);
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = 0.5;
    akv_llama_store *store = NULL;
    CHECK_OK(akv_llama_prefill(host, tokens, DOCUMENT, 0, diag));
    CHECK_OK(akv_llama_compress(host, AKV_LLAMA_ANCHOR, &config, &store, diag));
    CHECK_OK(akv_llama_free_dense(host, diag));
    CHECK_OK(akv_llama_attach(host, store, diag));
    float *logits = hosted_run(host, tokens + DOCUMENT, SINGLE, 1);
    const divergence d = compare_logits(stock, logits, SINGLE, TINY_VOCAB);
    print_divergence("compressed to a half against stock", &d);
    CHECK(d.mean_kl < 0.5 * control->mean_kl, "compressed: %g, without the document: %g", d.mean_kl, control->mean_kl);
    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    CHECK_OK(akv_llama_get_stats(host, &stats, diag));
    CHECK(stats.compressed_bytes * 2 <= stats.dense_cache_bytes, "more than half is kept");
    akv_llama_store_release(store);
    akv_llama_close(host);
    free(logits);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3, "usage: tiny NAME SCRATCH-FOLDER");
    const tiny_model *m = tiny_model_find(argv[1]);
    CHECK(m, "no model named %s", argv[1]);
    char path[512];
    snprintf(path, sizeof path, "%s/tiny-%s.gguf", argv[2], m->name);
    tiny_model_write(m, path);
    int32_t *tokens = random_tokens(DOCUMENT + REST, TINY_VOCAB, 7);
    const int32_t *rest = tokens + DOCUMENT;

    struct llama_model *model = stock_load(path);
    float *stock = stock_run(model, 0, tokens, DOCUMENT, rest, REST, 1, UBATCH);
    float *stock_batch = stock_run(model, 0, tokens, DOCUMENT, rest, SINGLE, 0, UBATCH);
    float *stock_flash = stock_run(model, 1, tokens, DOCUMENT, rest, REST, 1, UBATCH);
    float *alone = without_document(model, rest);
    llama_model_free(model);
    const divergence noise = compare_logits(stock, stock_flash, REST, TINY_VOCAB);
    const divergence batch_noise = compare_logits(stock, stock_batch, SINGLE, TINY_VOCAB);
    const divergence control = compare_logits(stock, alone, SINGLE, TINY_VOCAB);
    print_divergence("stock: flash attention on against off (noise)", &noise);
    print_divergence("stock: batch against single (noise)", &batch_noise);
    print_divergence("control: the document never seen", &control);
    CHECK(control.mean_kl > 0.1, "the document must matter to this model: %g", control.mean_kl);

    akv_llama *host = open_host(path, 1024, UBATCH);
    akv_llama_store *store = host_exactly(host, tokens, DOCUMENT);
    float *hosted = hosted_run(host, rest, REST, 1), *again = hosted_run(host, rest, REST, 1);
    float *batch = hosted_run(host, rest, SINGLE, 0);
    const divergence single = compare_logits(stock, hosted, REST, TINY_VOCAB);
    const divergence in_batch = compare_logits(stock, batch, SINGLE, TINY_VOCAB);
    print_divergence("hosted against stock, single tokens", &single);
    print_divergence("hosted against stock, one batch", &in_batch);
    /* The host reads the document with flash attention, and layers it leaves alone go on with it: stock's own distance
     * between on and off is the yardstick, twice because the two errors are not the same ones; 1e-6 where that distance
     * vanishes. */
    const double allowed = 1e-6 + 2.0 * noise.mean_kl, allowed_batch = allowed + 2.0 * batch_noise.mean_kl;
    CHECK(single.mean_kl < allowed, "hosted: %g, stock's noise: %g", single.mean_kl, noise.mean_kl);
    CHECK(in_batch.mean_kl < allowed_batch, "hosted batch: %g", in_batch.mean_kl);
    CHECK(memcmp(hosted, again, sizeof(float) * REST * TINY_VOCAB) == 0, "rewinding left something behind");

    akv_llama_stats stats;
    akv_llama_stats_init(&stats);
    CHECK_OK(akv_llama_get_stats(host, &stats, diag));
    uint32_t hosted_layers = 0;
    for (uint32_t i = 0; i < stats.num_layers; i++)
        hosted_layers += stats.layers[i].kind == AKV_LLAMA_LAYER_HOSTED;
    CHECK(hosted_layers == stats.hosted_layers && stats.hosted_layers + stats.native_layers == m->layers &&
              hosted_layers > 0,
          "layer counts");
    CHECK((m->window || m->recurrent_every) == (stats.native_layers > 0), "%u native layers", stats.native_layers);
    CHECK((stats.native_bytes > 0) == (stats.native_layers > 0), "native state");
    akv_llama_close(host);

    /* the same store, taken apart and put together, in a host whose cells run out every 32 tokens */
    akv_llama_store *copy = taken_apart(store);
    akv_llama_store_release(store);
    host = open_host(path, 32, UBATCH);
    CHECK_OK(akv_llama_attach(host, copy, diag));
    akv_llama_store_release(copy);
    float *moved = hosted_run(host, rest, REST, 1), *moved_batch = hosted_run(host, rest, REST, 0);
    const divergence move = compare_logits(hosted, moved, REST, TINY_VOCAB);
    const divergence move_batch = compare_logits(hosted, moved_batch, REST, TINY_VOCAB);
    print_divergence("cells moved every 32 tokens against never", &move);
    print_divergence("cells moved every 32 tokens, in batches", &move_batch);
    CHECK_OK(akv_llama_get_stats(host, &stats, diag));
    CHECK(stats.tail_moves == 6, "the cells moved %llu times", (unsigned long long)stats.tail_moves);
    CHECK(move.mean_kl < allowed, "moving the cells changed the answer: %g", move.mean_kl);
    CHECK(move_batch.mean_kl < allowed_batch, "moving in batches: %g", move_batch.mean_kl);
    akv_llama_close(host);

    /* the dense peer through the same calls */
    host = open_host(path, 256, UBATCH);
    CHECK_OK(akv_llama_prefill(host, tokens, DOCUMENT, REST, diag));
    float *dense = hosted_run(host, rest, REST, 1), *dense_again = hosted_run(host, rest, REST, 1);
    const divergence dense_stock = compare_logits(stock_flash, dense, REST, TINY_VOCAB);
    const divergence dense_twice = compare_logits(dense, dense_again, REST, TINY_VOCAB);
    print_divergence("densely against stock with flash attention", &dense_stock);
    print_divergence("densely, asked twice", &dense_twice);
    /* The same operators on the same numbers; rewinding may place window cells in another order, which only moves
     * rounding. */
    CHECK(dense_stock.mean_kl < (m->window ? allowed : 1e-9), "the dense peer is not stock llama.cpp: %g",
          dense_stock.mean_kl);
    CHECK(dense_twice.mean_kl < (m->window ? allowed : 1e-9), "densely, the second answer differs: %g",
          dense_twice.mean_kl);
    akv_llama_close(host);

    test_observation(path, tokens);
    test_compression(path, tokens, stock, &control);

    float *all[] = {stock, stock_batch, stock_flash, alone, hosted,     again,
                    batch, moved,       moved_batch, dense, dense_again};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(tokens);
    remove(path);
    return 0;
}
