/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conversation.c - a conversation behind a document that lives on: its bytes, the way back to any token, and keeping it
 * as a store. rolling.c compresses what has become old.
 */
#include "host.h"

#include <string.h>

void akv_llama_memory_init(akv_llama_memory *memory)
{
    memset(memory, 0, sizeof *memory);
    memory->struct_size = sizeof *memory;
}

bool akvl_is_hosted(const akv_llama *host, uint32_t i)
{
    return host->store->parts.layers[i].kind == AKV_LLAMA_LAYER_HOSTED;
}

akv_segment_info akvl_info_of(const akv_segment *segment)
{
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    return info;
}

uint64_t akvl_token_bytes(const akv_llama *host)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        const akvl_layer *l = &host->tail_graph->layers[i];
        if (akvl_is_hosted(host, i))
            bytes += (uint64_t)l->num_kv_heads * (l->head_dim_k + l->head_dim_v) * 2;
    }
    return bytes;
}

akv_status akv_llama_get_memory(const akv_llama *host, akv_llama_memory *out, akv_diag *diag)
{
    if (!host || !out || out->struct_size != sizeof *out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host is NULL, or out was not filled by akv_llama_memory_init");
    if (!host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    akv_llama_memory_init(out);
    for (uint32_t i = 0; i < host->num_layers; i++)
        for (uint32_t s = 0; s < (akvl_is_hosted(host, i) ? host->running.counts[i] : 0); s++) {
            const akv_segment_info info = akvl_info_of(host->running.lists[i][s]);
            uint64_t *sum = &out->segments.total;
            for (size_t k = 0; k < sizeof info.bytes / sizeof *sum; k++)
                sum[k] += (&info.bytes.total)[k];
            out->num_segments++;
        }
    out->cell_bytes = akvl_token_bytes(host) * llama_n_ctx(host->tail);
    out->dense_bytes = akvl_token_bytes(host) * (uint64_t)host->tail_position;
    out->rolls = host->rolls;
    out->retargets = host->retargets;
    return AKV_OK;
}

const int32_t *akv_llama_history(const akv_llama *host)
{
    return host && host->tail ? host->history : NULL;
}

/* -------------------------------------------------------------------------------------------------------- truncate */

akv_status akv_llama_truncate(akv_llama *host, int32_t position, akv_diag *diag)
{
    if (!host || !host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    if (position < 1 || position > host->tail_position)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "position is %d; 1 to %d is possible", position,
                         host->tail_position);
    if (host->store->parts.native_state_bytes)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "the window or recurrent layers of this model cannot go back");
    if (position >= host->tail_first) { /* cells behind those that stay may hold the tokens of a decode that failed */
        if (!llama_memory_seq_rm(llama_get_memory(host->tail), 0, position, -1))
            return akvl_fail(diag, AKV_E_UNSUPPORTED, "libllama cannot forget the last tokens in this model");
        host->tail_used = (uint32_t)(position - host->tail_first);
    } else {
        akv_segment **cut = akvl_new(host->num_layers, sizeof *cut);
        uint32_t *keep = akvl_new(host->num_layers, sizeof *keep);
        akv_status status =
            cut && keep ? AKV_OK
                        : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the table of %u layers", host->num_layers);
        for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
            if (!akvl_is_hosted(host, i))
                continue;
            while (keep[i] < host->running.counts[i] &&
                   akvl_info_of(host->running.lists[i][keep[i]]).last_position < position)
                keep[i]++;
            if (keep[i] == host->running.counts[i])
                continue;
            const akv_segment_info info = akvl_info_of(host->running.lists[i][keep[i]]);
            akv_diag inner = {.status = AKV_OK};
            if (info.first_position < position)
                status = akv_segment_cut(host->running.lists[i][keep[i]],
                                         (uint64_t)((int64_t)position - info.first_position), NULL, &cut[i], &inner);
            if (status != AKV_OK)
                akvl_fail(diag, status, "layer %u: %.480s", i, inner.message);
        }
        for (uint32_t i = 0; i < host->num_layers; i++) {
            if (status != AKV_OK) {
                if (cut)
                    akv_segment_release(cut[i]);
                continue;
            }
            if (!akvl_is_hosted(host, i))
                continue;
            while (host->running.counts[i] > keep[i])
                akv_segment_release(host->running.lists[i][--host->running.counts[i]]);
            if (cut[i])
                host->running.lists[i][host->running.counts[i]++] = cut[i];
        }
        free(cut);
        free(keep);
        if (status == AKV_OK)
            status = akvl_reset_tail(host, NULL, 0, position, diag);
        if (status != AKV_OK)
            return status;
    }
    host->tail_position = position;
    host->logits_rows = 0;
    akvl_rolling_forget(host);
    return AKV_OK;
}

/* -------------------------------------------------------------------------------------------------------- snapshot */

akv_status akv_llama_snapshot(akv_llama *host, akv_llama_store **out, akv_diag *diag)
{
    if (!host || !out)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and out must not be NULL");
    if (!host->tail)
        return akvl_fail(diag, AKV_E_BAD_STATE, "nothing is attached; run akv_llama_attach first");
    akv_llama_store_parts parts = host->store->parts;
    uint32_t num_segments = 0;
    for (uint32_t i = 0; i < host->num_layers; i++)
        num_segments += akvl_is_hosted(host, i) ? host->running.counts[i] + (host->tail_used > 0) : 0;
    akv_llama_layer *layers = akvl_new(host->num_layers, sizeof *layers);
    akv_segment **segments = akvl_new(num_segments, sizeof *segments);
    void *state = NULL;
    size_t bytes = 0;
    uint32_t n = 0;
    akv_status status =
        layers && segments ? AKV_OK : akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %u segments", num_segments);
    if (status == AKV_OK && parts.native_state_bytes)
        status = akvl_save_native(host->tail, &state, &bytes, diag);
    for (uint32_t i = 0; status == AKV_OK && i < host->num_layers; i++) {
        layers[i] = parts.layers[i];
        if (!akvl_is_hosted(host, i))
            continue;
        layers[i].first_segment = n;
        for (uint32_t s = 0; s < host->running.counts[i]; s++)
            segments[n++] = akv_segment_retain(host->running.lists[i][s]);
        if (host->tail_used > 0)
            status = akvl_tail_segment(host, i, &segments[n], diag);
        n += status == AKV_OK && host->tail_used > 0;
        layers[i].num_segments = n - layers[i].first_segment;
    }
    parts.layers = layers;
    parts.segments = segments;
    parts.num_segments = n;
    parts.tokens = host->history;
    parts.num_tokens = (uint64_t)host->tail_position;
    parts.next_position = host->tail_position;
    parts.native_state = state;
    parts.native_state_bytes = bytes;
    if (status == AKV_OK)
        status = akv_llama_store_create(&parts, out, diag);
    for (uint32_t i = 0; segments && i < n; i++)
        akv_segment_release(segments[i]);
    free(segments);
    free(layers);
    free(state);
    return status;
}
