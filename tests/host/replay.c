/* SPDX-License-Identifier: Apache-2.0 */
#include "replay.h"

#include "host.h"

#include <string.h>

static size_t ring_floats(const akv_llama *host, uint32_t i)
{
    const akvl_layer *l = &host->tail_graph->layers[i];
    return (size_t)l->num_kv_heads * l->gqa_group * akvl_rolling_observing(host) * l->head_dim_k;
}

/* The cells that B holds now, as one piece. */
static void keep_piece(akv_llama *host, recording *r)
{
    const uint32_t p = r->num_pieces++, L = r->num_layers;
    r->sizes = realloc(r->sizes, r->num_pieces * sizeof *r->sizes);
    r->segments = realloc(r->segments, (size_t)r->num_pieces * L * sizeof *r->segments);
    r->queries = realloc(r->queries, (size_t)r->num_pieces * L * sizeof *r->queries);
    r->seen = realloc(r->seen, (size_t)r->num_pieces * L * sizeof *r->seen);
    CHECK(r->sizes && r->segments && r->queries && r->seen, "no memory");
    r->sizes[p] = host->tail_used;
    for (uint32_t i = 0; i < L; i++) {
        r->segments[p * L + i] = NULL;
        r->queries[p * L + i] = NULL;
        if (!akvl_is_hosted(host, i))
            continue;
        CHECK_OK(akvl_tail_segment(host, i, &r->segments[p * L + i], diag));
        if (!host->rolling.on)
            continue;
        const size_t bytes = ring_floats(host, i) * sizeof(float);
        CHECK(r->queries[p * L + i] = malloc(bytes), "no memory");
        memcpy(r->queries[p * L + i], host->rolling.queries[i], bytes);
        r->seen[p * L + i] = host->rolling.seen[i];
    }
}

recording *record(akv_llama *host, const int32_t *tokens, size_t from, size_t to, size_t turns,
                  void (*each)(size_t turn))
{
    recording *r = calloc(1, sizeof *r);
    CHECK(r, "no memory");
    r->num_layers = host->num_layers;
    for (size_t at = from, turn = 1; turn <= turns; turn++) {
        const size_t end = from + (to - from) * turn / turns;
        while (at < end) {
            const size_t room = host->tail_limit - host->tail_used;
            const size_t n = room == 0 ? (end - at < host->tail_limit ? end - at : host->tail_limit)
                                       : (end - at < room ? end - at : room);
            CHECK_OK(akv_llama_decode(host, tokens + at, n, AKV_LLAMA_LOGITS_LAST, diag));
            at += n;
            if (host->tail_used == host->tail_limit || at == to)
                keep_piece(host, r);
        }
        if (each)
            each(turn);
    }
    return r;
}

void recording_free(recording *r)
{
    for (size_t k = 0; r && k < (size_t)r->num_pieces * r->num_layers; k++) {
        akv_segment_release(r->segments[k]);
        free(r->queries[k]);
    }
    if (!r)
        return;
    free(r->sizes);
    free(r->segments);
    free(r->queries);
    free(r->seen);
    free(r);
}

void replay(akv_llama *host, const recording *r, const int32_t *tokens, size_t to)
{
    const uint32_t L = r->num_layers;
    CHECK(host->tail_used == 0 && host->num_layers == L, "not right behind the opening");
    for (uint32_t p = 0; p < r->num_pieces; p++) {
        for (uint32_t i = 0; i < L; i++) {
            if (!akvl_is_hosted(host, i))
                continue;
            CHECK_OK(akvl_running_reserve(host, i, diag));
            host->running.lists[i][host->running.counts[i]++] = akv_segment_retain(r->segments[p * L + i]);
            if (host->rolling.on && r->queries[p * L + i]) {
                memcpy(host->rolling.queries[i], r->queries[p * L + i], ring_floats(host, i) * sizeof(float));
                host->rolling.seen[i] = r->seen[p * L + i];
            }
        }
        host->tail_position += (int32_t)r->sizes[p];
        host->tail_first = host->tail_position;
        if (p + 1 < r->num_pieces) /* the last one is in the cells: it moves when the next token comes */
            CHECK_OK(akvl_roll(host, diag));
    }
    CHECK(host->tail_position == (int32_t)to, "replayed to %d", host->tail_position);
    int32_t *history = realloc(host->history, (to + 64) * sizeof *history);
    CHECK(history, "no memory");
    memcpy(history, tokens, to * sizeof *history);
    host->history = history;
    host->history_capacity = to + 64;
}
