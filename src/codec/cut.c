/* SPDX-License-Identifier: Apache-2.0 */
/* cut.c - the first tokens of a segment as a segment of their own. */
#include "codec/codec.h"
#include "codec/ladder.h"

static akv_status cut_dense(const akv_segment *segment, akv_header *h, const akv_allocator *allocator,
                            akv_segment **out, akv_diag *diag)
{
    const akv_header *old = akv_header_of(segment);
    akv_layout_sections(h, false);
    akv_segment *cut = akv_segment_new(allocator, h->total_bytes);
    if (cut == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %llu bytes",
                        (unsigned long long)h->total_bytes);
    uint8_t *blob = (uint8_t *)cut + AKV_SEGMENT_OBJECT_BYTES;
    memcpy(blob, h, sizeof *h);
    for (int side = 0; side < AKV_SIDES; side++) {
        const size_t row = (size_t)h->head_dim[side] * akv_dtype_bytes((akv_dtype)h->dense_dtype);
        for (uint32_t head = 0; head < h->num_kv_heads; head++)
            memcpy(blob + h->sections[AKV_SEC_DENSE + side].offset + head * h->num_tokens * row,
                   (const uint8_t *)akv_section_of(segment, AKV_SEC_DENSE + side) + head * old->num_tokens * row,
                   h->num_tokens * row);
    }
    *out = cut;
    return AKV_OK;
}

akv_status akv_segment_cut(akv_segment *segment, uint64_t num_tokens, const akv_config *config, akv_segment **out,
                           akv_diag *diag)
{
    if (segment == NULL || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment and out must not be NULL");
    if (config != NULL && config->struct_size < sizeof *config)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_config has struct_size %zu; call akv_config_init first",
                        config->struct_size);
    const akv_header *old = akv_header_of(segment);
    if (num_tokens == 0 || num_tokens > old->num_tokens)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "%llu tokens are asked for; the segment has %llu and keeps at least 1",
                        (unsigned long long)num_tokens, (unsigned long long)old->num_tokens);
    if (num_tokens == old->num_tokens) {
        *out = akv_segment_retain(segment);
        return AKV_OK;
    }
    const bool compressed = old->kind == AKV_SEGMENT_COMPRESSED;
    if (compressed && old->coding != AKV_CODING_LADDER)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "a segment of profile paper cannot be cut: its tokens may lean on anchors behind the cut");
    if (old->dense_reason == AKV_DENSE_EVICTED)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "after an eviction every head holds other tokens; such a segment cannot be cut");
    const int32_t *positions =
        old->sections[AKV_SEC_POSITIONS].bytes != 0 ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    const akv_allocator *allocator = config != NULL ? config->allocator : NULL;
    akv_rewrite w = {.from = segment, .allocator = allocator, .header = *old};
    w.executor = config != NULL ? config->executor : NULL;
    w.header.num_tokens = num_tokens;
    w.header.budget_bytes = 0;
    if (positions != NULL)
        w.header.last_position = positions[num_tokens - 1];
    else if ((uint64_t)((int64_t)old->last_position - old->first_position) + 1 == old->num_tokens)
        w.header.last_position = (int32_t)(old->first_position + (int64_t)num_tokens - 1);
    else
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "a dense segment with gaps between its positions cannot be cut: they are not stored");
    if (!compressed)
        return cut_dense(segment, &w.header, allocator, out, diag);
    const uint64_t H = old->num_kv_heads;
    uint8_t *levels = akv_alloc(allocator, (size_t)(2 * H * num_tokens));
    if (levels == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %llu bytes of scratch",
                        (unsigned long long)(2 * H * num_tokens));
    for (int side = 0; side < AKV_SIDES; side++) {
        w.level[side] = levels + (uint64_t)side * H * num_tokens;
        for (uint32_t head = 0; head < H; head++)
            akv_ladder_levels(segment, side, head, num_tokens, w.level[side] + head * num_tokens);
    }
    w.header.code_bytes = akv_ladder_code_bytes(segment, num_tokens, w.level);
    const akv_status status = akv_rewrite_run(&w, out, diag);
    akv_free(allocator, levels, (size_t)(2 * H * num_tokens));
    return status;
}
