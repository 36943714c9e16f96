/* SPDX-License-Identifier: Apache-2.0 */
/* codec.h - what the files of the codec share: checks, planning, and the steps of compression in their order. */
#ifndef AKV_CODEC_H
#define AKV_CODEC_H

#include "anchorkv/akv_experimental.h"
#include "core/arena.h"
#include "core/segment.h"
#include "core/sizes.h"

#include <stdatomic.h>

/* dense.c */
akv_status akv_check_layer(const akv_layer *layer, bool need_queries, akv_diag *diag);
akv_status akv_check_finite(const akv_layer *layer, const akv_tensor *tensor, const char *name, uint32_t heads, uint64_t tokens,
                            uint32_t dim, const akv_config *config, akv_diag *diag);
bool akv_positions_consecutive(const akv_layer *layer);
akv_dtype akv_layer_dtype(const akv_layer *layer); /* what the layer's cache is kept in when it stays dense */
void akv_header_from_layer(akv_header *header, const akv_layer *layer);
/* All tokens, or with kept [H, num_kept] a subset per head. The layer has been checked. */
akv_status akv_make_dense(const akv_layer *layer, const akv_config *config, akv_dense_reason reason, const uint32_t *kept,
                          uint64_t num_kept, uint64_t budget_bytes, akv_segment **out, akv_diag *diag);

#endif
