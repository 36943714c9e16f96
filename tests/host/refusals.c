/* SPDX-License-Identifier: Apache-2.0 */
/*
 * refusals.c - what the host cannot do it refuses with a sentence, before the long prefill, and stays usable:
 * unsupported models, wrong models, bad arguments, used-up contexts, cancellation, corrupt parts.
 *
 * usage: refusals SCRATCH-FOLDER
 */
#include "common.h"
#include "tiny_models.h"

#include <string.h>

enum { UBATCH = 64 };

static const char *g_folder;
static int32_t *g_tokens; /* TINY_CONTEXT of them */

static const char *model_path(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/refusal-%s.gguf", g_folder, name);
    tiny_model_write(tiny_model_find(name), path);
    return path;
}

/* Stops when `stage` has done at least `at`; counts calls. */
typedef struct stopper {
    akv_llama_stage stage;
    uint64_t at;
    uint64_t calls[4];
    int armed;
    uint64_t furthest;
} stopper;

static int on_progress(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total)
{
    stopper *s = opaque;
    CHECK(done <= total, "progress %llu of %llu", (unsigned long long)done, (unsigned long long)total);
    s->calls[stage]++;
    if (stage == s->stage && done > s->furthest)
        s->furthest = done;
    return s->armed && stage == s->stage && done >= s->at;
}

static akv_llama *open_stoppable(const char *path, stopper *s)
{
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = path;
    options.batch_tokens = UBATCH;
    options.progress = on_progress;
    options.progress_opaque = s;
    akv_llama *host = NULL;
    CHECK_OK(akv_llama_open(&options, &host, diag));
    return host;
}

/* The graph is refused before a long prefill has made any progress. */
static void refused(const char *name, const char *sentence)
{
    const char *path = model_path(name);
    stopper s = {.stage = AKV_LLAMA_STAGE_PREFILL};
    akv_llama *host = open_stoppable(path, &s);
    CHECK_FAILS(akv_llama_prefill(host, g_tokens, 2000, 0, diag), AKV_E_UNSUPPORTED, sentence);
    CHECK(s.furthest == 0, "%s was refused only after %llu tokens", name, (unsigned long long)s.furthest);
    CHECK(akv_llama_next_position(host) == -1, "nothing is kept");
    /* densely it still works, and compressing is refused with the same sentence */
    CHECK_OK(akv_llama_prefill(host, g_tokens, 200, 8, diag));
    CHECK_OK(akv_llama_decode(host, g_tokens, 3, AKV_LLAMA_LOGITS_LAST, diag));
    CHECK_OK(akv_llama_rewind(host, diag));
    akv_config config;
    akv_config_init(&config);
    akv_llama_store *store = NULL;
    if (strcmp(name, "longrope") != 0) /* 200 tokens stay below its switch */
        CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag), AKV_E_UNSUPPORTED, sentence);
    akv_llama_close(host);
    remove(path);
    printf("%-10s refused: %s\n", name, sentence);
}

static void test_models(void)
{
    refused("alibi", "ALiBi");
    refused("latent", "latent attention");
    refused("axes", "M-RoPE");
    refused("windows", "sliding window");
    refused("longrope", "LongRoPE");

    const char *path = model_path("recurrent");
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = path;
    akv_llama *host = NULL;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_UNSUPPORTED, "recurrent");
    remove(path);

    options.model_path = "/nonexistent/model.gguf";
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_IO, "/nonexistent/model.gguf");
    char wrong[512];
    snprintf(wrong, sizeof wrong, "%s/refusal-wrong.gguf", g_folder);
    FILE *file = fopen(wrong, "wb");
    CHECK(file && fputs("this is no model", file) >= 0 && fclose(file) == 0, "write");
    options.model_path = wrong;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_IO, "not a GGUF");
    file = fopen(wrong, "wb");
    CHECK(file && fwrite("GGUF\3\0\0\0\377\377\377\377\377\377\377\177", 1, 16, file) == 16 && fclose(file) == 0, "writ"
                                                                                                                  "e");
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_IO, "cannot load");
    tiny_model foreign = *tiny_model_find("llama");
    foreign.architecture = "nonesuch";
    tiny_model_write(&foreign, wrong);
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_IO, "unknown model architecture: 'nonesuch'");
    remove(wrong);
}

static void test_options(const char *path)
{
    akv_llama *host = NULL;
    akv_llama_options options;
    akv_llama_options_init(&options);
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_INVALID_ARGUMENT, "model path");
    options.model_path = path;
    options.batch_tokens = 16;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_INVALID_ARGUMENT, "batch_tokens is 16");
    options.batch_tokens = 512;
    options.observation_queries = 0;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_INVALID_ARGUMENT, "observation_queries");
    options.observation_queries = 32;
    options.tail_cells = 0;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_INVALID_ARGUMENT, "tail_cells");
    options.tail_cells = 64;
    options.struct_size = 3;
    CHECK_FAILS(akv_llama_open(&options, &host, diag), AKV_E_INVALID_ARGUMENT, "akv_llama_options_init");
    CHECK(host == NULL, "outputs stay untouched");
}

static void test_states(const char *path)
{
    stopper s = {.stage = AKV_LLAMA_STAGE_PREFILL, .at = 300};
    akv_llama *host = open_stoppable(path, &s);
    akv_config config;
    akv_config_init(&config);
    akv_llama_store *store = NULL;
    int32_t token = 5;
    CHECK_FAILS(akv_llama_rewind(host, diag), AKV_E_BAD_STATE, "no document");
    CHECK_FAILS(akv_llama_decode(host, &token, 1, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_BAD_STATE, "no document");
    CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag), AKV_E_BAD_STATE, "prefill");
    CHECK(akv_llama_logits(host, -1) == NULL, "no logits yet");
    CHECK_OK(akv_llama_free_dense(host, diag));
    CHECK_OK(akv_llama_detach(host, diag));

    CHECK_FAILS(akv_llama_prefill(host, g_tokens, 0, 0, diag), AKV_E_INVALID_ARGUMENT, "no tokens");
    int32_t bad[3] = {1, TINY_VOCAB, 2};
    CHECK_FAILS(akv_llama_prefill(host, bad, 3, 0, diag), AKV_E_INVALID_ARGUMENT, "token 1 is 320");
    bad[1] = -1;
    CHECK_FAILS(akv_llama_prefill(host, bad, 3, 0, diag), AKV_E_INVALID_ARGUMENT, "token 1 is -1");
    int32_t *longer = random_tokens(TINY_CONTEXT + 1, TINY_VOCAB, 3);
    CHECK_FAILS(akv_llama_prefill(host, longer, TINY_CONTEXT + 1, 0, diag), AKV_E_NO_SPACE,
                "this model's context is 4096");
    free(longer);

    /* cancelled in the middle: nothing is kept, and the next attempt works */
    s.armed = 1;
    CHECK_FAILS(akv_llama_prefill(host, g_tokens, 1000, 0, diag), AKV_E_CANCELLED, "");
    CHECK(akv_llama_next_position(host) == -1 && akv_llama_logits(host, -1) == NULL, "nothing is kept");
    s.armed = 0;
    CHECK_OK(akv_llama_prefill(host, g_tokens, 1000, 50, diag));
    CHECK(akv_llama_next_position(host) == 1000 && akv_llama_logits(host, -1) && akv_llama_logits(host, 0), "prefille"
                                                                                                            "d");
    CHECK(s.calls[AKV_LLAMA_STAGE_PREFILL] >= 1000 / UBATCH, "progress was reported");
    s.stage = AKV_LLAMA_STAGE_COMPRESS;
    s.at = 2;
    s.armed = 1;
    CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag), AKV_E_CANCELLED, "layer 1");
    s.armed = 0;
    config.keep_ratio = 1e-6;
    CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_ANCHOR, &config, &store, diag), AKV_E_INFEASIBLE, "layer 0: ");
    config.keep_ratio = -1.0;
    CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_ANCHOR, &config, &store, diag), AKV_E_INVALID_ARGUMENT, "layer 0: ");
    config.keep_ratio = 0.1;
    CHECK_FAILS(akv_llama_compress(host, (akv_llama_method)9, &config, &store, diag), AKV_E_INVALID_ARGUMENT,
                "method 9");
    CHECK_OK(akv_llama_decode(host, g_tokens, 10, AKV_LLAMA_LOGITS_LAST, diag));
    CHECK_FAILS(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag), AKV_E_BAD_STATE, "akv_llama_rewind");
    CHECK_FAILS(akv_llama_decode(host, g_tokens, 1000, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_NO_SPACE, "reserve_cells");
    CHECK_OK(akv_llama_rewind(host, diag));
    CHECK(store == NULL, "outputs stay untouched");
    CHECK_OK(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag));
    CHECK_OK(akv_llama_attach(host, store, diag));
    CHECK_FAILS(akv_llama_decode(host, bad, 3, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_INVALID_ARGUMENT, "token 1 is -1");
    CHECK_FAILS(akv_llama_decode(host, g_tokens, 0, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_INVALID_ARGUMENT,
                "at least one token");
    CHECK_FAILS(akv_llama_decode(host, g_tokens, TINY_CONTEXT - 999, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_NO_SPACE,
                "context of 4096");
    s.stage = AKV_LLAMA_STAGE_DECODE;
    s.at = UBATCH;
    s.armed = 1;
    s.furthest = 0;
    const akv_status stopped = akv_llama_decode(host, g_tokens, 2000, AKV_LLAMA_LOGITS_LAST, NULL);
    CHECK(stopped == AKV_E_CANCELLED, "decoding 2000 tokens was not cancelled: %s", akv_status_str(stopped));
    s.armed = 0;
    CHECK_OK(akv_llama_rewind(host, diag));
    CHECK_OK(akv_llama_decode(host, g_tokens, 5, AKV_LLAMA_LOGITS_ALL, diag));
    CHECK(akv_llama_next_position(host) == 1005, "rewound");

    /* detaching goes back to the dense cache */
    CHECK_OK(akv_llama_detach(host, diag));
    CHECK_OK(akv_llama_decode(host, g_tokens, 5, AKV_LLAMA_LOGITS_LAST, diag));
    CHECK_OK(akv_llama_free_dense(host, diag));
    CHECK_FAILS(akv_llama_decode(host, g_tokens, 5, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_BAD_STATE, "no document");
    akv_llama_store_release(store);
    akv_llama_close(host);
}

static void test_wrong_model(const char *path)
{
    akv_llama *host = open_host(path, 64, UBATCH);
    akv_llama_store *store = host_exactly(host, g_tokens, 100);
    akv_llama_close(host);

    tiny_model other = *tiny_model_find("llama");
    other.seed = 99; /* same shape, other weights */
    char wrong[512];
    snprintf(wrong, sizeof wrong, "%s/refusal-other.gguf", g_folder);
    tiny_model_write(&other, wrong);
    host = open_host(wrong, 64, UBATCH);
    CHECK_FAILS(akv_llama_attach(host, store, diag), AKV_E_MISMATCH, "weights, tokenizer or metadata differ");
    CHECK(akv_llama_next_position(host) == -1, "not attached");
    akv_llama_close(host);
    remove(wrong);
    const char *third = model_path("qwen3");
    host = open_host(third, 64, UBATCH);
    CHECK_FAILS(akv_llama_attach(host, store, diag), AKV_E_MISMATCH, "number of layers is 4");
    akv_llama_close(host);
    remove(third);

    /* corrupt parts */
    akv_llama_store_parts parts, broken;
    akv_llama_store_parts_init(&parts);
    CHECK_OK(akv_llama_store_get_parts(store, &parts, diag));
    akv_llama_store *out = NULL;
    akv_llama_layer layers[8];
    CHECK(parts.num_layers <= 8, "layers");
    memcpy(layers, parts.layers, parts.num_layers * sizeof *layers);
#define BROKEN(change, text) \
    do { \
        broken = parts; \
        broken.layers = layers; \
        memcpy(layers, parts.layers, parts.num_layers * sizeof *layers); \
        change; \
        CHECK_FAILS(akv_llama_store_create(&broken, &out, diag), AKV_E_CORRUPT, text); \
    } while (0)
    BROKEN(broken.num_tokens = 0, "0 tokens");
    BROKEN(broken.next_position = 7, "position 7");
    BROKEN(broken.num_layers = 3, "3 layers");
    BROKEN(broken.num_segments = 3, "segment");
    BROKEN(broken.method = 77, "method 77");
    BROKEN(broken.native_state_bytes = 5, "no data");
    BROKEN(layers[1].kind = 9, "unknown kind 9");
    BROKEN(layers[1].first_segment = 0, "layer 1 names segments");
    BROKEN(layers[1].num_segments = 0xffffffffu, "layer 1 names segments");
    BROKEN(layers[2].num_kv_heads = 1, "another shape");
    BROKEN(layers[2].kind = AKV_LLAMA_LAYER_WINDOW, "segments");
    int32_t *tokens = malloc(100 * sizeof *tokens);
    CHECK(tokens, "no memory");
    memcpy(tokens, parts.tokens, 100 * sizeof *tokens);
    tokens[42] = -7;
    BROKEN(broken.tokens = tokens, "token 42 is -7");
    free(tokens);

    /* a store whose layer rotates otherwise than the model does */
    broken = parts;
    broken.layers = layers;
    memcpy(layers, parts.layers, parts.num_layers * sizeof *layers);
    layers[3].rope_hash ^= 1;
    CHECK_OK(akv_llama_store_create(&broken, &out, diag));
    host = open_host(path, 64, UBATCH);
    CHECK_FAILS(akv_llama_attach(host, out, diag), AKV_E_MISMATCH, "layer 3: the rotary embedding");
    akv_llama_store_release(out);
    layers[3].rope_hash ^= 1;
    layers[0].sm_scale *= 2.0;
    CHECK_OK(akv_llama_store_create(&broken, &out, diag));
    CHECK_FAILS(akv_llama_attach(host, out, diag), AKV_E_MISMATCH, "layer 0: the softmax scale");
    akv_llama_store_release(out);
    CHECK_OK(akv_llama_attach(host, store, diag)); /* and the host is still good */
    CHECK_OK(akv_llama_decode(host, g_tokens, 5, AKV_LLAMA_LOGITS_LAST, diag));
    akv_llama_close(host);
    akv_llama_store_release(store);
}

static void test_text(const char *path)
{
    akv_llama *host = open_host(path, 64, UBATCH);
    int32_t *tokens = NULL;
    size_t n = 0;
    CHECK_FAILS(akv_llama_tokenize(host, "text", 4, 1, 0, &tokens, &n, diag), AKV_E_UNSUPPORTED, "no tokenizer");
    CHECK_FAILS(akv_llama_render_document(host, AKV_LLAMA_CHAT, NULL, "text", 4, &tokens, &n, diag), AKV_E_UNSUPPORTED,
                "--raw");
    CHECK_FAILS(akv_llama_render_document(host, AKV_LLAMA_RAW, NULL, "", 0, &tokens, &n, diag), AKV_E_INVALID_ARGUMENT,
                "empty");
    CHECK(tokens == NULL && n == 0, "outputs stay untouched");
    akv_llama_close(host);
}

/* Documents around W and the batch size: every one must come out right, the shortest are kept dense by the core. */
static void test_short_documents(const char *path)
{
    struct llama_model *model = stock_load(path);
    static const size_t lengths[] = {1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 129};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const size_t n = lengths[i];
        float *stock = stock_run(model, 0, g_tokens, n, g_tokens + n, 8, 1, UBATCH);
        akv_llama *host = open_host(path, 64, UBATCH);
        akv_llama_store *store = host_exactly(host, g_tokens, n);
        float *hosted = hosted_run(host, g_tokens + n, 8, 1);
        const divergence d = compare_logits(stock, hosted, 8, TINY_VOCAB);
        /* 1e-4: the flash attention of the prefill against none, as measured in tiny.c, with room for unlucky short
         * documents */
        CHECK(d.mean_kl < 1e-4, "a document of %zu tokens: KL %g", n, d.mean_kl);
        akv_llama_store_release(store);
        /* and through the compressing method at a generous ratio */
        akv_config config;
        akv_config_init(&config);
        config.keep_ratio = 1.0;
        CHECK_OK(akv_llama_prefill(host, g_tokens, n, 0, diag));
        CHECK_OK(akv_llama_compress(host, AKV_LLAMA_ANCHOR, &config, &store, diag));
        CHECK_OK(akv_llama_free_dense(host, diag));
        CHECK_OK(akv_llama_attach(host, store, diag));
        float *kept = hosted_run(host, g_tokens + n, 8, 1);
        const divergence k = compare_logits(stock, kept, 8, TINY_VOCAB);
        CHECK(k.mean_kl < 1e-4, "keep ratio 1, %zu tokens: KL %g", n, k.mean_kl);
        akv_llama_store_release(store);
        akv_llama_close(host);
        free(stock);
        free(hosted);
        free(kept);
    }
    llama_model_free(model);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2, "usage: refusals SCRATCH-FOLDER");
    g_folder = argv[1];
    g_tokens = random_tokens(TINY_CONTEXT, TINY_VOCAB, 11);
    test_models();
    char path[512];
    snprintf(path, sizeof path, "%s", model_path("llama"));
    test_options(path);
    test_states(path);
    test_wrong_model(path);
    test_text(path);
    test_short_documents(path);
    remove(path);
    free(g_tokens);
    return 0;
}
