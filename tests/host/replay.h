/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.h - the exact keys and values of a conversation, as they were computed, and a conversation put together from
 * them without computing them again: rolled as it would have been, or kept exactly. What a compression of pieces costs
 * is told from what it costs that later tokens were computed from a compressed past (rolling.c). Looks into the host.
 */
#ifndef AKV_TESTS_HOST_REPLAY_H
#define AKV_TESTS_HOST_REPLAY_H

#include "common.h"

/* Exact cells behind an opening, cut as the host cuts them, and the latest queries behind each piece. */
typedef struct recording {
    uint32_t num_layers;
    uint32_t num_pieces;
    uint32_t *sizes;        /* [num_pieces] tokens */
    akv_segment **segments; /* [num_pieces][num_layers] */
    float **queries;        /* [num_pieces][num_layers] rings of the host, NULL where it has none */
    uint64_t *seen;         /* [num_pieces][num_layers] */
} recording;

/*
 * Says tokens [from, to) in as many turns to a host that is attached, and records what was computed. After each turn
 * `each` is called, if it is not NULL.
 */
recording *record(akv_llama *host, const int32_t *tokens, size_t from, size_t to, size_t turns,
                  void (*each)(size_t turn));
void recording_free(recording *r);

/* A host that is attached to the opening gets the recorded tokens as if they had been said; it rolls if set to. */
void replay(akv_llama *host, const recording *r, const int32_t *tokens, size_t to);

#endif
