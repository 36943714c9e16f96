/* SPDX-License-Identifier: Apache-2.0 */
/* document_check.c - what holds for the parts of every document, asked by writer and reader alike. */
#include "format/document_layout.h"

#define MAX_LAYERS (1u << 16)

void akv_document_parts_init(akv_document_parts *parts)
{
    memset(parts, 0, sizeof *parts);
    parts->struct_size = sizeof *parts;
}

static bool layer_is_blank(const akv_document_layer *layer)
{
    akv_document_layer blank;
    memset(&blank, 0, sizeof blank);
    blank.kind = layer->kind;
    /* bit by bit is meant: a negative zero is not blank. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-*) */
    return memcmp(&blank, layer, sizeof blank) == 0;
}

static akv_status check_layer(const akv_document_layer *layer, uint32_t index, uint32_t next_segment, akv_status status,
                              akv_diag *diag)
{
    if (layer->kind > AKV_DOCUMENT_LAYER_NO_CACHE)
        return akv_fail(diag, status, "layer %u has kind %u; 0, 1 and 2 exist", index, layer->kind);
    if (layer->kind != AKV_DOCUMENT_LAYER_SEGMENTS)
        return layer_is_blank(layer)
                   ? AKV_OK
                   : akv_fail(diag, status, "layer %u has no segments, so its other fields must be 0", index);
    if (layer->num_segments == 0 || layer->first_segment != next_segment)
        return akv_fail(diag, status, "layer %u has %u segments from number %u; it needs at least 1, from number %u",
                        index, layer->num_segments, layer->first_segment, next_segment);
    if (layer->has_sinks > 1 || layer->rope_style > AKV_ROPE_INTERLEAVED)
        return akv_fail(diag, status, "layer %u: has_sinks %u and rope_style %u must be 0 or 1", index,
                        layer->has_sinks, layer->rope_style);
    if (!isfinite(layer->rope_magnitude) || !isfinite(layer->sm_scale) || !isfinite(layer->logit_softcap))
        return akv_fail(diag, status, "layer %u: a scale is NaN or infinite", index);
    return AKV_OK;
}

akv_status akv_document_check_parts(const akv_document_parts *parts, akv_status status, akv_diag *diag)
{
    if (parts->num_tokens == 0 || parts->num_tokens > INT32_MAX || parts->tokens == NULL)
        return akv_fail(diag, status, "a document has 1..2147483647 tokens, this one has %llu",
                        (unsigned long long)parts->num_tokens);
    for (uint64_t i = 0; i < parts->num_tokens; i++)
        if (parts->tokens[i] < 0)
            return akv_fail(diag, status, "token %llu is %d; token ids are not negative", (unsigned long long)i,
                            parts->tokens[i]);
    if (parts->next_position < 0)
        return akv_fail(diag, status, "next_position is %d; it must not be negative", parts->next_position);
    if (parts->method > 2)
        return akv_fail(diag, status, "method is %u; 0, 1 and 2 exist", parts->method);
    if (parts->num_layers == 0 || parts->num_layers > MAX_LAYERS || parts->layers == NULL)
        return akv_fail(diag, status, "a document has 1..%u layers, this one has %u", MAX_LAYERS, parts->num_layers);
    uint64_t next_segment = 0;
    for (uint32_t l = 0; l < parts->num_layers; l++) {
        AKV_TRY(check_layer(&parts->layers[l], l, (uint32_t)next_segment, status, diag));
        next_segment += parts->layers[l].num_segments;
        if (next_segment > parts->num_segments)
            break;
    }
    if (next_segment != parts->num_segments)
        return akv_fail(diag, status, "the layers do not add up to the document's %u segments", parts->num_segments);
    if (memchr(parts->model.description, 0, sizeof parts->model.description) == NULL)
        return akv_fail(diag, status, "the model's description is not zero-terminated");
    return AKV_OK;
}

akv_status akv_document_check_segment(const akv_document_parts *parts, uint32_t layer, const akv_segment *segment,
                                      akv_status status, akv_diag *diag)
{
    const akv_document_layer *l = &parts->layers[layer];
    akv_segment_info info;
    akv_segment_info_init(&info);
    AKV_TRY(akv_segment_get_info(segment, &info, diag));
    if (info.shape.num_kv_heads != l->num_kv_heads || info.shape.gqa_group != l->gqa_group ||
        info.shape.head_dim_k != l->head_dim_k || info.shape.head_dim_v != l->head_dim_v)
        return akv_fail(
            diag, status,
            "a segment of layer %u has %u KV heads x %u and head_dim %u/%u, its layer has %u x %u and %u/%u", layer,
            info.shape.num_kv_heads, info.shape.gqa_group, info.shape.head_dim_k, info.shape.head_dim_v,
            l->num_kv_heads, l->gqa_group, l->head_dim_k, l->head_dim_v);
    return AKV_OK;
}
