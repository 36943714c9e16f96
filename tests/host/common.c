/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.c - see common.h.
 */
#include "common.h"

#include <math.h>
#include <string.h>

int contains(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

static double log_sum_exp(const float *x, size_t n)
{
    double top = x[0], sum = 0.0;
    for (size_t i = 1; i < n; i++)
        top = x[i] > top ? x[i] : top;
    for (size_t i = 0; i < n; i++)
        sum += exp(x[i] - top);
    return top + log(sum);
}

divergence compare_logits(const float *reference, const float *other, size_t rows, size_t vocab)
{
    divergence d = {.rows = rows};
    for (size_t r = 0; r < rows; r++) {
        const float *a = reference + r * vocab, *b = other + r * vocab;
        const double za = log_sum_exp(a, vocab), zb = log_sum_exp(b, vocab);
        double kl = 0.0;
        size_t top_a = 0, top_b = 0;
        for (size_t i = 0; i < vocab; i++) {
            kl += exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
            d.max_abs = fmax(d.max_abs, fabs((double)a[i] - b[i]));
            top_a = a[i] > a[top_a] ? i : top_a;
            top_b = b[i] > b[top_b] ? i : top_b;
        }
        CHECK(isfinite(kl), "row %zu: logits are not finite", r);
        d.mean_kl += kl / (double)rows;
        d.max_kl = fmax(d.max_kl, kl);
        d.same_top += top_a == top_b;
    }
    return d;
}

void print_divergence(const char *name, const divergence *d)
{
    printf("%-52s mean KL %.3e  max KL %.3e  max |dlogit| %.4f  top-1 %zu/%zu\n", name, d->mean_kl, d->max_kl,
           d->max_abs, d->same_top, d->rows);
    fflush(stdout);
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

struct llama_model *stock_load(const char *path)
{
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(path, params);
    CHECK(model, "cannot load %s", path);
    return model;
}

static void stock_decode(struct llama_context *context, const int32_t *tokens, size_t n, size_t position, int logits)
{
    struct llama_batch batch = llama_batch_init((int32_t)n, 0, 1);
    batch.n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = (int32_t)(position + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = (int8_t)logits;
    }
    CHECK(llama_decode(context, batch) == 0, "stock decode failed at %zu", position);
    llama_batch_free(batch);
}

/* `rest` behind position `at`, in one batch or one by one; logits to out. */
static void stock_rest(struct llama_context *context, const int32_t *rest, size_t num_rest, size_t at, int single,
                       size_t vocab, float *out)
{
    for (size_t done = 0; done < num_rest;) {
        const size_t n = single ? 1 : num_rest - done;
        stock_decode(context, rest + done, n, at + done, 1);
        memcpy(out + done * vocab, llama_get_logits(context), n * vocab * sizeof *out);
        done += n;
    }
}

static float *new_rows(size_t rows, size_t vocab)
{
    float *out = malloc(rows * vocab * sizeof *out);
    CHECK(out, "no memory");
    return out;
}

static struct llama_context *stock_read(struct llama_model *model, int flash, const int32_t *document, size_t n,
                                        size_t reserve, uint32_t batch)
{
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(n + reserve);
    params.n_batch = params.n_ubatch = batch;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = 2;
    params.swa_full = false;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *context = llama_init_from_model(model, params);
    CHECK(context, "no stock context");
    for (size_t done = 0; done < n;) {
        const size_t some = n - done < batch ? n - done : batch;
        stock_decode(context, document + done, some, done, 0);
        done += some;
    }
    return context;
}

float *stock_run(struct llama_model *model, int flash, const int32_t *document, size_t num_document,
                 const int32_t *rest, size_t num_rest, int single, uint32_t batch)
{
    const size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context *context = stock_read(model, flash, document, num_document, num_rest, batch);
    float *out = new_rows(num_rest, vocab);
    stock_rest(context, rest, num_rest, num_document, single, vocab, out);
    llama_free(context);
    return out;
}

void stock_run_both(struct llama_model *model, const int32_t *document, size_t num_document, const int32_t *rest,
                    size_t num_single, size_t num_batch, uint32_t batch, float **single_out, float **batch_out)
{
    const size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_context *context = stock_read(model, 0, document, num_document, num_single, batch);
    *single_out = new_rows(num_single, vocab);
    *batch_out = new_rows(num_batch, vocab);
    stock_rest(context, rest, num_single, num_document, 1, vocab, *single_out);
    CHECK(llama_memory_seq_rm(llama_get_memory(context), 0, (int32_t)num_document, -1), "stock rewind");
    stock_rest(context, rest, num_batch, num_document, 0, vocab, *batch_out);
    llama_free(context);
}

float *hosted_run(akv_llama *host, const int32_t *rest, size_t num_rest, int single)
{
    akv_llama_model_info info;
    akv_llama_model_info_init(&info);
    CHECK_OK(akv_llama_get_model_info(host, &info, diag));
    const size_t vocab = info.vocab_tokens;
    float *out = malloc(num_rest * vocab * sizeof *out);
    CHECK(out, "no memory");
    CHECK_OK(akv_llama_rewind(host, diag));
    for (size_t done = 0; done < num_rest;) {
        const size_t n = single ? 1 : num_rest - done;
        CHECK_OK(akv_llama_decode(host, rest + done, n, AKV_LLAMA_LOGITS_ALL, diag));
        const float *logits = akv_llama_logits(host, 0);
        CHECK(logits && akv_llama_logits(host, (int64_t)n - 1) && !akv_llama_logits(host, (int64_t)n), "rows of "
                                                                                                       "logits");
        memcpy(out + done * vocab, logits, n * vocab * sizeof *out);
        done += n;
    }
    return out;
}

akv_llama *open_host(const char *path, uint32_t tail_cells, uint32_t batch)
{
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = path;
    options.num_threads = 2;
    options.tail_cells = tail_cells;
    options.batch_tokens = batch;
    akv_llama *host = NULL;
    CHECK_OK(akv_llama_open(&options, &host, diag));
    return host;
}

akv_llama_store *host_exactly(akv_llama *host, const int32_t *document, size_t n)
{
    akv_config config;
    akv_config_init(&config);
    akv_llama_store *store = NULL;
    CHECK_OK(akv_llama_prefill(host, document, n, 0, diag));
    CHECK_OK(akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &store, diag));
    CHECK_OK(akv_llama_free_dense(host, diag));
    CHECK_OK(akv_llama_attach(host, store, diag));
    return store;
}

int32_t *random_tokens(size_t n, uint32_t vocab, uint64_t seed)
{
    int32_t *out = malloc(n * sizeof *out);
    CHECK(out, "no memory");
    uint64_t x = seed * 2685821657736338717u + 1;
    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out[i] = (int32_t)((x >> 16) % vocab);
    }
    return out;
}

char *read_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    CHECK(file, "cannot open %s", path);
    CHECK(fseek(file, 0, SEEK_END) == 0, "seek");
    const long size = ftell(file);
    CHECK(size >= 0 && fseek(file, 0, SEEK_SET) == 0, "seek");
    char *text = malloc((size_t)size + 1);
    CHECK(text && fread(text, 1, (size_t)size, file) == (size_t)size, "read %s", path);
    text[size] = 0;
    fclose(file);
    *bytes = (size_t)size;
    return text;
}
