/* SPDX-License-Identifier: Apache-2.0 */
/* document_report.c - a report about a .akv file, from the file alone. */
#include "document_report.h"

#include <stdlib.h>
#include <string.h>

static const char *method_name(uint32_t method)
{
    static const cli_method methods[] = {CLI_METHOD_AKV, CLI_METHOD_SNAPKV, CLI_METHOD_EXACT};
    return method < 3 ? cli_method_name(methods[method]) : "unknown";
}

/* Adds b to a; shape and kind stay those of the layer's first segment. */
static void add_segment(akv_segment_info *a, const akv_segment_info *b)
{
    uint64_t *sum = &a->bytes.total;
    const uint64_t *more = &b->bytes.total;
    for (size_t i = 0; i < sizeof a->bytes / sizeof *sum; i++)
        sum[i] += more[i];
    a->shape.num_tokens += b->shape.num_tokens;
    a->last_position = b->last_position;
    a->dense_bytes += b->dense_bytes;
    a->budget_bytes += b->budget_bytes;
    a->residuals_k += b->residuals_k;
    a->residuals_v += b->residuals_v;
}

void cli_layer_of_segments(akv_segment *const *segments, uint32_t count, cli_layer_report *out)
{
    for (uint32_t i = 0; i < count; i++) {
        akv_segment_info info;
        akv_segment_info_init(&info);
        akv_segment_get_info(segments[i], &info, NULL);
        if (i == 0)
            out->segment = info;
        else
            add_segment(&out->segment, &info);
    }
}

static akv_status read_layer(const akv_document *document, const akv_document_layer *layer, cli_layer_report *out,
                             akv_diag *diag)
{
    out->hosted = layer->kind == AKV_DOCUMENT_LAYER_SEGMENTS;
    out->native_kind = layer->kind == AKV_DOCUMENT_LAYER_WINDOW ? "sliding window" : "no cache of its own";
    for (uint32_t i = 0; i < layer->num_segments; i++) {
        akv_segment *segment = NULL;
        akv_segment_info info;
        akv_segment_info_init(&info);
        akv_status status = akv_document_open_segment(document, layer->first_segment + i, 0, NULL, &segment, diag);
        if (status == AKV_OK)
            status = akv_segment_get_info(segment, &info, diag);
        akv_segment_release(segment);
        if (status != AKV_OK)
            return status;
        if (i == 0)
            out->segment = info;
        else
            add_segment(&out->segment, &info);
    }
    return AKV_OK;
}

void cli_report_of_properties(const char *path, const akv_document *document, cli_report *report)
{
    akv_document_parts parts;
    akv_document_info info;
    akv_document_parts_init(&parts);
    akv_document_info_init(&info);
    memset(report, 0, sizeof *report);
    akv_document_get_info(document, &info, NULL);
    akv_document_get_parts(document, &parts, NULL);
    const char *profile = akv_document_property_value(document, "profile", 0);
    const char *keep = akv_document_property_value(document, "keep_ratio", 0);
    const char *seed = akv_document_property_value(document, "seed", 0);
    const char *model = akv_document_property_value(document, "model", 0);
    report->model_description = model != NULL ? model : "";
    report->document_path = path;
    report->method = method_name(parts.method);
    report->profile = profile != NULL ? profile : "";
    report->keep_ratio = keep != NULL ? strtod(keep, NULL) : 0.0;
    report->seed = seed != NULL ? strtoull(seed, NULL, 10) : 0;
    report->tokens = parts.num_tokens;
    report->num_layers = parts.num_layers;
    report->native_bytes = parts.native_state_bytes;
    report->file_bytes = info.total_bytes;
}

int cli_report_of_document(const char *path, const akv_document *document, cli_report *report)
{
    akv_document_parts parts;
    akv_diag diag = {AKV_OK, ""};
    akv_document_parts_init(&parts);
    cli_report_of_properties(path, document, report);
    akv_status status = akv_document_get_parts(document, &parts, &diag);
    cli_layer_report *layers = calloc(parts.num_layers + 1, sizeof *layers);
    if (layers == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for %u layers", parts.num_layers);
    for (uint32_t l = 0; l < parts.num_layers && status == AKV_OK; l++)
        status = read_layer(document, &parts.layers[l], &layers[l], &diag);
    if (status != AKV_OK) {
        free(layers);
        return cli_fail_diag(status, &diag, path);
    }
    report->layers = layers;
    cli_report_sum(report);
    return CLI_OK;
}
