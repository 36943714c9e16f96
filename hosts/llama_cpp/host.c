/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.c - opening a model, describing it, and the small helpers that every other file of the host uses.
 */
#include "host.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

akv_status (akvl_fail)(akv_diag *diag, akv_status status, const char *format, ...)
{
    if (diag) {
        diag->status = status;
        va_list args;
        va_start(args, format);
        vsnprintf(diag->message, sizeof diag->message, format, args);
        va_end(args);
    }
    return status;
}

double akvl_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

uint64_t akvl_resident_bytes(void)
{
    unsigned long long total = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file)
        return 0;
    const int fields = fscanf(file, "%llu %llu", &total, &resident);
    fclose(file);
    const long page = sysconf(_SC_PAGESIZE);
    return fields == 2 && page > 0 ? (uint64_t)resident * (uint64_t)page : 0;
}

void *akvl_new(size_t n, size_t element_bytes)
{
    return calloc(n ? n : 1, element_bytes);
}

/* ----------------------------------------------------------------------------------------------- libllama's log */

/* libllama has one log hook per process; the latest opened host owns it. */
static struct {
    akv_llama_log_level level;
    akv_llama_log_fn log;
    void *opaque;
} g_log;
/* Hosts that share a model may run on several threads; each sees its own errors. */
static _Thread_local bool g_last_passed;      /* what a continuation line inherits */
static _Thread_local char g_first_error[256]; /* since akvl_forget_errors, without its line end */

void akvl_forget_errors(void)
{
    g_first_error[0] = 0;
}

const char *akvl_first_error(void)
{
    return g_first_error[0] ? g_first_error : "it gives no reason";
}

static void on_log(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level != GGML_LOG_LEVEL_CONT) {
        static const akv_llama_log_level needed[] = {
            [GGML_LOG_LEVEL_NONE] = AKV_LLAMA_LOG_INFO,    [GGML_LOG_LEVEL_DEBUG] = AKV_LLAMA_LOG_DEBUG,
            [GGML_LOG_LEVEL_INFO] = AKV_LLAMA_LOG_INFO,    [GGML_LOG_LEVEL_WARN] = AKV_LLAMA_LOG_WARNINGS,
            [GGML_LOG_LEVEL_ERROR] = AKV_LLAMA_LOG_ERRORS,
        };
        g_last_passed = (size_t)level >= sizeof needed / sizeof needed[0] || needed[level] <= g_log.level;
    }
    if (level == GGML_LOG_LEVEL_ERROR && !g_first_error[0]) {
        snprintf(g_first_error, sizeof g_first_error, "%s", text);
        g_first_error[strcspn(g_first_error, "\r\n")] = 0;
    }
    if (g_last_passed && g_log.log && g_log.level != AKV_LLAMA_LOG_NONE)
        g_log.log(g_log.opaque, text);
}

/* -------------------------------------------------------------------------------------------------- open, close */

void akv_llama_options_init(akv_llama_options *options)
{
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
    options->num_threads = 1;
    options->tail_cells = 1024;
    options->batch_tokens = 512;
    options->observation_queries = 32;
}

static bool on_load(float progress, void *user)
{
    akv_llama *host = user;
    const float clipped = progress < 0.0f ? 0.0f : progress > 1.0f ? 1.0f : progress;
    host->dense_hook.cancelled = host->options.progress(host->options.progress_opaque, AKV_LLAMA_STAGE_LOAD,
                                                        (uint64_t)(clipped * 1000.0f), 1000) != 0;
    return !host->dense_hook.cancelled;
}

static uint32_t meta_number(const akv_llama *host, const char *suffix, uint32_t otherwise)
{
    char key[160], value[64];
    snprintf(key, sizeof key, "%s.%s", host->info.architecture, suffix);
    return llama_model_meta_val_str(host->model, key, value, sizeof value) > 0 ? (uint32_t)strtoul(value, NULL, 10)
                                                                               : otherwise;
}

static void describe(akv_llama *host)
{
    akv_llama_model_info *info = &host->info;
    akv_llama_model_info_init(info);
    llama_model_meta_val_str(host->model, "general.architecture", info->architecture, sizeof info->architecture);
    llama_model_meta_val_str(host->model, "general.name", info->name, sizeof info->name);
    llama_model_desc(host->model, info->description, sizeof info->description);
    snprintf(info->library, sizeof info->library, "%s", llama_version());
    info->num_layers = (uint32_t)llama_model_n_layer(host->model);
    info->num_heads = (uint32_t)llama_model_n_head(host->model);
    info->num_kv_heads = (uint32_t)llama_model_n_head_kv(host->model);
    info->gqa_group = info->num_kv_heads ? info->num_heads / info->num_kv_heads : 0;
    const uint32_t plain = info->num_heads ? (uint32_t)llama_model_n_embd(host->model) / info->num_heads : 0;
    info->head_dim_k = meta_number(host, "attention.key_length", plain);
    info->head_dim_v = meta_number(host, "attention.value_length", plain);
    const int32_t window = llama_model_n_swa(host->model);
    info->sliding_window = window > 0 ? (uint32_t)window : 0;
    info->train_context = (uint32_t)llama_model_n_ctx_train(host->model);
    info->vocab_tokens = (uint32_t)llama_vocab_n_tokens(host->vocab);
    info->has_chat_template = llama_model_chat_template(host->model, NULL) != NULL;
    info->weight_bytes = llama_model_size(host->model);
}

static akv_status check_options(const akv_llama_options *o, akv_diag *diag)
{
    if (!o || o->struct_size != sizeof *o)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "options must be filled by akv_llama_options_init first");
    if (!o->model_path || !*o->model_path)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "no model path given; it names a GGUF file");
    if (o->observation_queries < 1 || o->observation_queries > 1024)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "observation_queries is %u; 1 to 1024 is possible, 32 is usual",
                         o->observation_queries);
    if (o->batch_tokens < 64 || o->batch_tokens < o->observation_queries || o->batch_tokens > 65536)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "batch_tokens is %u; at least 64 and at least observation_queries (%u), at"
                         " most 65536",
                         o->batch_tokens, o->observation_queries);
    if (o->tail_cells < 1 || o->tail_cells > (1u << 24))
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "tail_cells is %u; 1 to 16777216 is possible, 1024 is usual",
                         o->tail_cells);
    if (o->num_threads > 4096)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "num_threads is %u; at most 4096", o->num_threads);
    return AKV_OK;
}

/*
 * ggml's AMX buffers, where libllama was built with them: inside virtual machines that report AMX but do not let it be
 * used, the first matrix product ends the process (SIGILL or SIGSEGV at ldtilecfg or tileloadd), and nothing can catch
 * that.
 */
int akv_llama_has_amx_buffers(void)
{
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : NULL;
    ggml_backend_dev_get_extra_bufts_t get = NULL;
    if (reg) /* through the pointer's bytes: ISO C has no cast from void * to a function */
        *(void **)&get = ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *one = get ? get(cpu) : NULL; one && *one; one++)
        if (strcmp(ggml_backend_buft_name(*one), "AMX") == 0)
            return 1;
    return 0;
}

static akv_status load(akv_llama *host, akv_diag *diag)
{
    const char *path = host->options.model_path;
    FILE *file = fopen(path, "rb");
    if (!file)
        return akvl_fail(diag, AKV_E_IO, "cannot open the model file \"%s\"", path);
    char magic[4] = {0};
    const size_t got = fread(magic, 1, sizeof magic, file);
    fclose(file);
    if (got != sizeof magic || memcmp(magic, "GGUF", 4) != 0)
        return akvl_fail(diag, AKV_E_IO, "\"%s\" is not a GGUF model file", path);

    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0; /* attention is replaced in host memory */
    params.use_extra_bufts = host->options.use_amx || !akv_llama_has_amx_buffers();
    if (host->options.progress) {
        params.progress_callback = on_load;
        params.progress_callback_user_data = host;
    }
    akvl_forget_errors();
    host->model = llama_model_load_from_file(path, params);
    if (!host->model && host->dense_hook.cancelled)
        return akvl_fail(diag, AKV_E_CANCELLED, "loading \"%s\" was cancelled", path);
    if (!host->model)
        return akvl_fail(diag, AKV_E_IO, "libllama %s cannot load \"%s\": %s", llama_version(), path, akvl_first_error());
    host->shared = akvl_new(1, sizeof *host->shared);
    if (!host->shared) {
        llama_model_free(host->model);
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the host object");
    }
    atomic_init(&host->shared->references, 1);
    host->shared->llama = host->model;
    host->vocab = llama_model_get_vocab(host->model);
    if (llama_model_is_recurrent(host->model))
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "this model is recurrent: it has no key/value cache to compress");
    if (llama_model_has_encoder(host->model) || !llama_model_has_decoder(host->model) ||
        llama_model_is_diffusion(host->model))
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "only models that predict the next token can be hosted; this one has an encoder or"
                         " is a diffusion model");
    if (llama_vocab_n_tokens(host->vocab) < 1 || llama_model_n_layer(host->model) < 1)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "this model has no vocabulary or no layers");
    return AKV_OK;
}

static akv_status make_tables(akv_llama *host, akv_diag *diag)
{
    host->layer_stats = akvl_new(host->num_layers, sizeof *host->layer_stats);
    host->is_hosted = akvl_new(host->num_layers, sizeof *host->is_hosted);
    host->batch = llama_batch_init((int32_t)host->options.batch_tokens, 0, 1);
    if (!host->layer_stats || !host->is_hosted || !host->batch.token || !host->batch.seq_id)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for batches of %u tokens", host->options.batch_tokens);
    return akvl_gang_create(host, &host->gang, diag);
}

akv_status akv_llama_open_beside(akv_llama *first, const akv_llama_options *options, akv_llama **out, akv_diag *diag)
{
    akv_llama_options checked;
    if (!first || !options || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, options and out must not be NULL");
    checked = *options;
    checked.model_path = "shared"; /* the model is there; the path is not read */
    akv_status status = check_options(&checked, diag);
    if (status != AKV_OK)
        return status;
    akv_llama *host = akvl_new(1, sizeof *host);
    if (!host)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the host object");
    host->options = checked;
    host->options.model_path = NULL;
    if (host->options.num_threads == 0)
        host->options.num_threads = 1;
    host->shared = first->shared;
    atomic_fetch_add_explicit(&host->shared->references, 1, memory_order_relaxed);
    host->model = first->model;
    host->vocab = first->vocab;
    host->info = first->info;
    host->num_layers = first->num_layers;
    status = make_tables(host, diag);
    if (status != AKV_OK) {
        akv_llama_close(host);
        return status;
    }
    akv_llama_stats_init(&host->stats);
    host->stats.num_layers = host->num_layers;
    *out = host;
    return AKV_OK;
}

akv_status akv_llama_open(const akv_llama_options *options, akv_llama **out, akv_diag *diag)
{
    akv_status status = check_options(options, diag);
    if (status != AKV_OK)
        return status;
    if (!out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "out is NULL; it receives the host");
    akv_llama *host = akvl_new(1, sizeof *host);
    if (!host)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the host object");
    host->options = *options;
    if (host->options.num_threads == 0)
        host->options.num_threads = 1;
    g_log.level = options->log_level;
    g_log.log = options->log;
    g_log.opaque = options->log_opaque;
    llama_log_set(on_log, NULL);
    llama_backend_init();

    const double start = akvl_seconds();
    status = load(host, diag);
    if (status == AKV_OK) {
        describe(host);
        host->num_layers = host->info.num_layers;
        status = akvl_fingerprint(host, diag);
    }
    host->options.model_path = NULL; /* the caller's string need not outlive this call */
    if (status == AKV_OK)
        status = make_tables(host, diag);
    if (status != AKV_OK) {
        akv_llama_close(host);
        return status;
    }
    akv_llama_stats_init(&host->stats);
    host->stats.load_seconds = akvl_seconds() - start;
    host->stats.num_layers = host->num_layers;
    *out = host;
    return AKV_OK;
}

void akv_llama_close(akv_llama *host)
{
    if (!host)
        return;
    akvl_drop_tail(host);
    akvl_gang_free(host->gang);
    akvl_drop_dense(host);
    if (host->batch.token)
        llama_batch_free(host->batch);
    if (host->shared && atomic_fetch_sub_explicit(&host->shared->references, 1, memory_order_acq_rel) == 1) {
        llama_model_free(host->model);
        free(host->shared);
    }
    free(host->layer_stats);
    free(host->is_hosted);
    free(host->shares);
    free(host->logits);
    free(host->workspace);
    free(host);
}

void akv_llama_model_info_init(akv_llama_model_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

akv_status akv_llama_get_model_info(const akv_llama *host, akv_llama_model_info *out, akv_diag *diag)
{
    if (!host || !out || out->struct_size != sizeof *out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "host is NULL, or out was not filled by akv_llama_model_info_init");
    *out = host->info;
    return AKV_OK;
}

/* -------------------------------------------------------------------------------------------------------- stats */

void akv_llama_stats_init(akv_llama_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    stats->struct_size = sizeof *stats;
}

akv_status akv_llama_get_stats(const akv_llama *host, akv_llama_stats *out, akv_diag *diag)
{
    if (!host || !out || out->struct_size != sizeof *out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host is NULL, or out was not filled by akv_llama_stats_init");
    *out = host->stats;
    return AKV_OK;
}

/* Seconds are only known to the host that compressed. */
void akvl_note_store(akv_llama *host, const akv_llama_store *store)
{
    akv_llama_stats *stats = &host->stats;
    const akv_llama_store_parts *parts = &store->parts;
    stats->dense_cache_bytes = stats->compressed_bytes = 0;
    stats->hosted_layers = stats->native_layers = 0;
    stats->native_bytes = parts->native_state_bytes;
    for (uint32_t i = 0; i < parts->num_layers; i++) {
        const akv_llama_layer *layer = &parts->layers[i];
        akv_llama_layer_stats *one = &host->layer_stats[i];
        one->kind = layer->kind;
        akv_segment_info_init(&one->segment);
        if (layer->kind != AKV_LLAMA_LAYER_HOSTED) {
            stats->native_layers++;
            continue;
        }
        stats->hosted_layers++;
        akv_segment_get_info(parts->segments[layer->first_segment], &one->segment, NULL);
        stats->dense_cache_bytes +=
            parts->num_tokens * layer->num_kv_heads * 2u * ((uint64_t)layer->head_dim_k + layer->head_dim_v);
        for (uint32_t s = 0; s < layer->num_segments; s++) {
            akv_segment_info info;
            akv_segment_info_init(&info);
            akv_segment_get_info(parts->segments[layer->first_segment + s], &info, NULL);
            stats->compressed_bytes += info.bytes.total;
        }
    }
    stats->layers = host->layer_stats;
}
