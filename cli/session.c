/* SPDX-License-Identifier: Apache-2.0 */
/* session.c - from a model and texts (or a .akv file) to a cache that can be asked. */
#include "session.h"
#include "document_report.h"
#include "model_shape.h"
#include "shares.h"

#include <stdlib.h>
#include <string.h>

/* The structs of host and document that are written to files have the same fields in the same order. */
_Static_assert(sizeof(akv_document_model) == sizeof(akv_llama_fingerprint), "host and file agree");
_Static_assert(sizeof(akv_document_layer) == sizeof(akv_llama_layer), "host and file agree");
_Static_assert(offsetof(akv_document_model, hash) == offsetof(akv_llama_fingerprint, hash), "host and file agree");
_Static_assert(offsetof(akv_document_layer, num_segments) == offsetof(akv_llama_layer, num_segments),
               "host and file agree");

void cli_settings_init(cli_settings *s)
{
    memset(s, 0, sizeof *s);
    cli_size_goal_init(&s->goal);
    s->profile = AKV_PROFILE_DEFAULT;
    s->method = CLI_METHOD_AKV;
    s->threads = cli_default_threads();
}

static int on_progress(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total)
{
    static const char *const names[] = {"loading", "prefill", "compress", "question"};
    static const char *const units[] = {NULL, "tokens", "layers", "tokens"};
    cli_session *s = opaque;
    /* A question is short next to the document; its progress is only worth a bar. */
    if (s->label != NULL && s->progress.terminal && stage != AKV_LLAMA_STAGE_LOAD)
        cli_progress_update(&s->progress, (int)stage, s->label, units[stage], done, total);
    else if (s->label == NULL && (stage <= AKV_LLAMA_STAGE_COMPRESS || s->progress.terminal))
        cli_progress_update(&s->progress, (int)stage, names[stage], units[stage], done, total);
    return cli_interrupted() != 0 && !s->goes_back;
}

static void on_log(void *opaque, const char *text)
{
    cli_session *s = opaque;
    size_t length = strlen(text);
    while (length > 0 && (text[length - 1] == '\n' || text[length - 1] == ' '))
        length--;
    if (length == 0 || cli_interrupted()) /* it calls an interrupted computation a failed one */
        return;
    cli_progress_end(&s->progress);
    cli_note("libllama: %.*s", (int)length, text);
}

static int fail(cli_session *s, akv_status status, const akv_diag *diag, const char *what)
{
    cli_progress_end(&s->progress);
    return cli_fail_diag(status, diag, what);
}

int cli_session_open(cli_session *s, const cli_settings *settings)
{
    akv_diag diag = {AKV_OK, ""};
    memset(s, 0, sizeof *s);
    s->settings = settings;
    s->form = settings->raw ? AKV_LLAMA_RAW : AKV_LLAMA_CHAT;
    s->system = settings->system;
    cli_progress_init(&s->progress, settings->quiet);
    akv_status status = akv_threads_create(settings->threads, &s->threads, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, NULL);

    akv_llama_options options;
    akv_llama_options_init(&options);
    options.model_path = settings->model;
    options.num_threads = settings->threads;
    options.log_level = AKV_LLAMA_LOG_ERRORS;
    options.log = on_log;
    options.log_opaque = s;
    options.progress = on_progress;
    options.progress_opaque = s;
    options.executor = akv_threads_executor(s->threads);
    if (settings->tail_cells != 0)
        options.tail_cells = settings->tail_cells;
    status = akv_llama_open(&options, &s->host, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, settings->model);
    akv_llama_model_info_init(&s->model);
    status = akv_llama_get_model_info(s->host, &s->model, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, settings->model);
    if (settings->shares == NULL)
        return CLI_OK;
    cli_progress_end(&s->progress);
    return cli_shares_load(settings->shares, s, &s->shares);
}

int cli_session_read(cli_session *s, uint64_t room)
{
    const cli_settings *settings = s->settings;
    cli_buffer text = {NULL, 0, 0};
    akv_diag diag = {AKV_OK, ""};
    size_t num_tokens = 0;
    cli_progress_end(&s->progress);
    int code = cli_read_texts(settings->files, settings->num_files, &text);
    if (code == CLI_OK) {
        akv_status status = akv_llama_render_document(s->host, s->form, s->system, text.data, text.bytes, &s->tokens,
                                                      &num_tokens, &diag);
        if (status != AKV_OK)
            code = fail(s, status, &diag, NULL);
    }
    s->num_tokens = num_tokens;
    s->document_bytes = text.bytes;
    cli_buffer_free(&text);
    if (code == CLI_OK && s->model.train_context != 0 && s->num_tokens + room > s->model.train_context)
        code =
            cli_fail(CLI_BAD_INPUT,
                     "the document has %llu tokens%s, but this model's context ends at %u; use a shorter document or a "
                     "model with a longer context",
                     (unsigned long long)s->num_tokens, room != 0 ? " (and the question needs room too)" : "",
                     s->model.train_context);
    return code;
}

/* Exact unless some layers use a sliding window. */
static uint64_t estimate_dense_bytes(const cli_session *s)
{
    return s->num_tokens * s->model.num_layers * s->model.num_kv_heads *
           ((uint64_t)s->model.head_dim_k + s->model.head_dim_v) * 2;
}

/* --budget is for all layers together: a keep ratio, once the size of the dense cache is known. */
static int find_keep_ratio(cli_session *s, double *keep_ratio)
{
    akv_llama_stats stats;
    akv_diag diag = {AKV_OK, ""};
    akv_llama_stats_init(&stats);
    *keep_ratio = s->settings->goal.keep_ratio;
    if (s->settings->goal.budget_bytes == 0)
        return CLI_OK;
    akv_status status = akv_llama_get_stats(s->host, &stats, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, NULL);
    uint64_t dense = stats.dense_cache_bytes != 0 ? stats.dense_cache_bytes : estimate_dense_bytes(s);
    *keep_ratio = (double)s->settings->goal.budget_bytes / (double)dense;
    if (*keep_ratio > 1.0)
        *keep_ratio = 1.0;
    return CLI_OK;
}

static int compress(cli_session *s)
{
    static const akv_llama_method methods[] = {AKV_LLAMA_ANCHOR, AKV_LLAMA_SNAPKV, AKV_LLAMA_EXACT, AKV_LLAMA_EXACT};
    akv_diag diag = {AKV_OK, ""};
    akv_config config;
    akv_config_init(&config);
    config.profile = s->settings->profile;
    config.seed = s->settings->seed;
    int code = find_keep_ratio(s, &config.keep_ratio);
    if (code != CLI_OK)
        return code;
    s->keep_ratio = s->settings->method == CLI_METHOD_EXACT ? 1.0 : config.keep_ratio;
    if (s->shares.num_layers != 0 && (s->shares.profile != config.profile || s->settings->method != CLI_METHOD_AKV))
        cli_warn("%s is for profile %s: not used", s->settings->shares, cli_profile_name(s->shares.profile));
    akv_status status = cli_shares_apply(&s->shares, s->host, &config, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, s->settings->shares);
    status = akv_llama_compress(s->host, methods[s->settings->method], &config, &s->store, &diag);
    if (status == AKV_OK)
        status = akv_llama_free_dense(s->host, &diag);
    if (status == AKV_OK)
        status = akv_llama_attach(s->host, s->store, &diag);
    return status == AKV_OK ? CLI_OK : fail(s, status, &diag, NULL);
}

int cli_session_prefill(cli_session *s, uint64_t reserve_cells)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_prefill(s->host, s->tokens, (size_t)s->num_tokens, (size_t)reserve_cells, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, NULL);
    return s->settings->method == CLI_METHOD_DENSE ? CLI_OK : compress(s);
}

/* ------------------------------------------------------------------------------------------------- from a .akv file */

static int make_store(cli_session *s, const akv_document_parts *parts, const char *path)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store_parts p;
    akv_llama_store_parts_init(&p);
    akv_segment **segments = calloc(parts->num_segments + 1, sizeof(akv_segment *));
    akv_llama_layer *layers = calloc(parts->num_layers, sizeof *layers);
    akv_status status = AKV_OK;
    if (segments == NULL || layers == NULL) {
        free(segments);
        free(layers);
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    }
    for (uint32_t i = 0; i < parts->num_segments && status == AKV_OK; i++)
        status = akv_document_open_segment(s->document, i, 0, NULL, &segments[i], &diag);
    memcpy(&p.fingerprint, &parts->model, sizeof p.fingerprint);
    memcpy(layers, parts->layers, parts->num_layers * sizeof *layers);
    p.tokens = parts->tokens;
    p.num_tokens = parts->num_tokens;
    p.next_position = parts->next_position;
    p.method = parts->method;
    p.num_layers = parts->num_layers;
    p.layers = layers;
    p.num_segments = parts->num_segments;
    p.segments = segments;
    p.native_state = parts->native_state;
    p.native_state_bytes = parts->native_state_bytes;
    if (status == AKV_OK)
        status = akv_llama_store_create(&p, &s->store, &diag);
    for (uint32_t i = 0; i < parts->num_segments; i++)
        akv_segment_release(segments[i]);
    free(segments);
    free(layers);
    return status == AKV_OK ? CLI_OK : fail(s, status, &diag, path);
}

/* Read whole, opened, for this model, undamaged; the session is as it was. */
static int open_document(const cli_session *s, const char *path, cli_image *image, akv_document **document)
{
    akv_diag diag = {AKV_OK, ""};
    akv_document_parts parts;
    akv_llama_fingerprint made_with;
    akv_document_parts_init(&parts);
    int code = cli_image_read(path, image);
    if (code != CLI_OK)
        return code;
    akv_status status = akv_document_open(image->data, image->bytes, NULL, document, &diag);
    if (status == AKV_OK)
        status = akv_document_get_parts(*document, &parts, &diag);
    memcpy(&made_with, &parts.model, sizeof made_with);
    if (status == AKV_OK) /* first, since a wrong model is the likeliest mistake and the cheapest to see */
        status = akv_llama_check_fingerprint(s->host, &made_with, &diag);
    if (status == AKV_OK)
        status = akv_document_verify(*document, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, path);
}

/* What a session holds of a document: freed, and forgotten. */
static void drop_document(cli_session *s)
{
    akv_llama_store_release(s->store);
    akv_document_close(s->document);
    cli_image_free(&s->image);
    akv_llama_free_tokens(s->tokens);
    free(s->path);
    s->store = NULL;
    s->document = NULL;
    s->tokens = NULL;
    s->path = NULL;
    s->system = NULL;
    s->num_tokens = 0;
}

static void move_document(cli_session *to, cli_session *from)
{
    to->store = from->store;
    to->document = from->document;
    to->image = from->image;
    to->tokens = from->tokens;
    to->path = from->path;
    to->system = from->system;
    to->num_tokens = from->num_tokens;
    to->form = from->form;
    from->store = NULL;
    from->document = NULL;
    from->image = (cli_image){NULL, 0};
    from->tokens = NULL;
    from->path = NULL;
    from->system = NULL;
    from->num_tokens = 0;
}

/* s->document and s->image are there already. */
static int attach_document(cli_session *s, const char *path)
{
    akv_diag diag = {AKV_OK, ""};
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    s->path = strdup(path);
    if (s->path == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    akv_status status = akv_document_get_parts(s->document, &parts, &diag);
    if (status != AKV_OK)
        return fail(s, status, &diag, path);
    s->num_tokens = parts.num_tokens;
    const char *form = akv_document_property_value(s->document, "form", 0);
    s->form = form != NULL && strcmp(form, "raw") == 0 ? AKV_LLAMA_RAW : AKV_LLAMA_CHAT;
    s->system = akv_document_property_value(s->document, "system", 0);
    const int code = make_store(s, &parts, path);
    if (code != CLI_OK)
        return code;
    status = akv_llama_attach(s->host, s->store, &diag);
    return status == AKV_OK ? CLI_OK : fail(s, status, &diag, path);
}

int cli_session_load(cli_session *s, const char *path, int (*accept)(void *context), void *context)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store *present = NULL; /* the conversation as it is, to go back to */
    cli_session before;
    cli_image image = {NULL, 0};
    akv_document *document = NULL;
    memset(&before, 0, sizeof before);
    cli_progress_end(&s->progress);
    int code = open_document(s, path, &image, &document);
    if (code == CLI_OK && s->store != NULL) {
        akv_status status = akv_llama_snapshot(s->host, &present, &diag);
        if (status != AKV_OK)
            code = fail(s, status, &diag, NULL);
    }
    if (code != CLI_OK) {
        akv_document_close(document);
        cli_image_free(&image);
        return code;
    }
    move_document(&before, s);
    s->image = image;
    s->document = document;
    code = attach_document(s, path);
    if (code == CLI_OK && accept != NULL)
        code = accept(context);
    if (code == CLI_OK) {
        akv_llama_store_release(present);
        drop_document(&before);
        return CLI_OK;
    }
    akv_llama_detach(s->host, NULL);
    drop_document(s);
    move_document(s, &before);
    if (present == NULL)
        return code;
    s->goes_back = true; /* what interrupted the loading must not interrupt this, or the conversation would be lost */
    akv_status status = akv_llama_attach(s->host, present, &diag);
    s->goes_back = false;
    if (status == AKV_OK) {
        akv_llama_store_release(s->store);
        s->store = present;
        return code;
    }
    akv_llama_store_release(present);
    drop_document(s);
    return fail(s, status, &diag, NULL);
}

int cli_store_write(const akv_llama_store *from, const akv_document_property *properties, uint32_t num_properties, const char *path,
                    uint64_t *file_bytes)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store_parts store;
    akv_document_parts parts;
    cli_output *output = NULL;
    akv_llama_store_parts_init(&store);
    akv_document_parts_init(&parts);
    akv_status status = akv_llama_store_get_parts(from, &store, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    akv_document_layer *layers = calloc(store.num_layers + 1, sizeof *layers);
    if (layers == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    memcpy(layers, store.layers, store.num_layers * sizeof *layers);
    memcpy(&parts.model, &store.fingerprint, sizeof parts.model);
    parts.tokens = store.tokens;
    parts.num_tokens = store.num_tokens;
    parts.next_position = store.next_position;
    parts.method = store.method;
    parts.layers = layers;
    parts.num_layers = store.num_layers;
    parts.segments = store.segments;
    parts.num_segments = store.num_segments;
    parts.properties = properties;
    parts.num_properties = num_properties;
    parts.native_state = store.native_state;
    parts.native_state_bytes = store.native_state_bytes;
    *file_bytes = akv_document_bytes(&parts);
    int code = cli_output_open(path, &output);
    if (code == CLI_OK) {
        status = akv_document_write(&parts, cli_output_write, output, NULL, &diag);
        if (status == AKV_OK) {
            code = cli_output_commit(output);
        } else {
            cli_output_abort(output);
            code = cli_fail_diag(status, &diag, path);
        }
    }
    free(layers);
    return code;
}

void cli_session_unload(cli_session *s)
{
    akv_llama_detach(s->host, NULL);
    drop_document(s);
}

void cli_session_close(cli_session *s)
{
    cli_progress_end(&s->progress);
    akv_llama_store *store = s->store; /* its segments lie in the image: the host lets go of them first */
    s->store = NULL;
    akv_llama_close(s->host);
    akv_llama_store_release(store);
    drop_document(s);
    akv_threads_destroy(s->threads);
    cli_shares_free(&s->shares);
    memset(s, 0, sizeof *s);
}

/* ---------------------------------------------------------------------------------------------------------- report */

static cli_layer_report *layer_reports(const akv_llama_stats *stats)
{
    static const char *const native_kinds[] = {"", "sliding window", "no cache of its own"};
    cli_layer_report *layers = calloc(stats->num_layers + 1, sizeof *layers);
    for (uint32_t i = 0; layers != NULL && i < stats->num_layers; i++) {
        const akv_llama_layer_stats *l = &stats->layers[i];
        layers[i].hosted = l->kind == AKV_LLAMA_LAYER_HOSTED;
        layers[i].native_kind = native_kinds[l->kind <= AKV_LLAMA_LAYER_NO_CACHE ? l->kind : 0];
        layers[i].seconds = l->seconds;
        layers[i].segment = l->segment;
    }
    return layers;
}

int cli_session_report(const cli_session *s, cli_report *r)
{
    akv_llama_stats stats;
    akv_diag diag = {AKV_OK, ""};
    akv_llama_stats_init(&stats);
    akv_status status = akv_llama_get_stats(s->host, &stats, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    if (s->document != NULL) {
        cli_report_of_properties(s->path, s->document, r);
    } else {
        memset(r, 0, sizeof *r);
        r->method = cli_method_name(s->settings->method);
        r->profile = s->settings->method == CLI_METHOD_AKV ? cli_profile_name(s->settings->profile) : "";
        r->seed = s->settings->seed;
        r->tokens = s->num_tokens;
        r->num_layers = stats.num_layers;
        r->keep_ratio = s->store != NULL ? s->keep_ratio : 1.0;
        r->share_strength = stats.share_strength;
        r->shares = stats.share_strength > 0.0 ? s->settings->shares : NULL;
        r->dense_bytes = estimate_dense_bytes(s);
        r->native_bytes = stats.native_bytes;
    }
    if (s->store != NULL) {
        cli_layer_report *layers = stats.layers != NULL ? layer_reports(&stats) : NULL;
        if (layers == NULL)
            return cli_fail(CLI_NO_MEMORY, "no memory for the report");
        r->layers = layers;
        cli_report_sum(r);
    }
    r->model_description = s->model.name[0] != '\0' ? s->model.name : s->model.description;
    r->model_path = s->settings->model;
    r->document_tokens_evaluated = stats.prefill_tokens;
    r->rss_before = stats.rss_before;
    r->rss_after = stats.rss_after;
    r->rss_end = cli_resident_bytes();
    r->threads = s->settings->threads;
    r->load_seconds = stats.load_seconds;
    r->prefill_seconds = stats.prefill_seconds;
    r->compress_seconds = stats.compress_seconds;
    r->decode_seconds = stats.decode_seconds;
    r->attend_seconds = stats.attend_seconds;
    r->decode_tokens = stats.decode_tokens;
    r->tail_moves = stats.tail_moves;
    return CLI_OK;
}

int cli_model_shape(const char *model_path, akv_shape *shape, uint32_t *num_layers)
{
    cli_settings settings;
    cli_session session;
    cli_settings_init(&settings);
    settings.model = model_path;
    settings.quiet = true;
    settings.threads = 1;
    int code = cli_session_open(&session, &settings);
    if (code == CLI_OK) {
        shape->num_kv_heads = session.model.num_kv_heads;
        shape->gqa_group = session.model.gqa_group;
        shape->head_dim_k = session.model.head_dim_k;
        shape->head_dim_v = session.model.head_dim_v;
        shape->rotary_dim = session.model.head_dim_k;
        *num_layers = session.model.num_layers;
        if (session.model.sliding_window != 0)
            cli_warn(
                "this model has layers with a window of %u tokens, which stay native; the figures are an upper bound",
                session.model.sliding_window);
    }
    cli_session_close(&session);
    return code;
}
