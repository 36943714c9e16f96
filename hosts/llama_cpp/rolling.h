/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rolling.h - what the three files of rolling compression share: rolling_parts.c says how many bytes each segment gets,
 * rolling_pieces.c makes one, rolling.c says when.
 */
#ifndef AKVL_ROLLING_H
#define AKVL_ROLLING_H

#include "host.h"

#include <anchorkv/akv_experimental.h>

/* What one compressed segment takes, and what it should. */
typedef struct akvl_part {
    akv_segment **at;       /* NULL: one that is still to be made */
    uint32_t layer, number; /* its place among the compressed segments of its layer */
    bool own;               /* of the conversation; the others are of the document */
    uint64_t tokens, dense, now, least;
    double weight; /* by age and layer */
    uint64_t most; /* while targets are looked for */
    uint64_t target;
} akvl_part;

typedef struct akvl_parts {
    akvl_part *parts;
    size_t count, old; /* the first `old` are there already */
    size_t merge;      /* two of the conversation become one: number of the first in its layer, or SIZE_MAX */
} akvl_parts;

/* Every compressed segment, with room for one more a layer. parts from malloc. */
akv_status akvl_list_parts(const akv_llama *host, akvl_parts *out, akv_diag *diag);
/* One that is still to be made, of `tokens` from `first` on; p has the other fields but the weight. */
void akvl_add_part(const akv_llama *host, akvl_parts *list, uint32_t layer, int32_t first, uint64_t tokens,
                   akvl_part p);
uint64_t akvl_sum_now(const akvl_parts *list, bool own_only);
/*
 * The largest targets in proportion to the weights: those of the conversation's segments sum up to at most own_room,
 * all to at most room. Where the least does not fit into own_room each gets its least. false: that does not fit into
 * room.
 */
bool akvl_fit_parts(akvl_parts *list, uint64_t own_room, uint64_t room);
/*
 * After akvl_fit_parts: two neighbours of like length of which most would be what a segment pays for itself become one,
 * in all layers, with the targets of both.
 */
void akvl_choose_merge(const akv_llama *host, akvl_parts *list);
bool akvl_is_merged(const akvl_parts *list, size_t k); /* part k is the first or the second of the two */
/* Segments to their targets, but for the two that become one. An error (no memory) leaves some smaller already, and all
 * of them valid. */
akv_status akvl_shrink_parts(akv_llama *host, const akvl_parts *list, akv_diag *diag);

/*
 * The latest queries of a layer [H*G, akvl_rolling_observing, d_k], oldest first; when fewer were asked the first one is
 * repeated. From malloc, or NULL.
 */
float *akvl_latest_queries(const akv_llama *host, uint32_t layer);

/* What the conversation may take in all: its share of the ratio, but never less than full_tokens uncompressed. */
uint64_t akvl_ratio_limit(const akv_llama *host);
/* Of the layer, with a mean of 1. */
double akvl_layer_share(const akv_llama *host, uint32_t layer);

/*
 * How a piece of a layer that begins at first_position is compressed; *out points to *experiment. As the caller of
 * akv_llama_set_rolling said, if that has an experiment.
 */
void akvl_piece_config(const akv_llama *host, uint32_t layer, int64_t first_position, akv_experiment *experiment,
                       akv_config *out);
/* Segments [first, first + take) of a layer, one behind the other, with `tokens` in all -> one compressed segment. */
akv_status akvl_compress_piece(akv_llama *host, uint32_t layer, uint32_t first, uint32_t take, uint64_t tokens,
                               uint64_t bytes, akv_segment **out, akv_diag *diag);

#endif
