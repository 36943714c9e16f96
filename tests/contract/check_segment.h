/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_segment.h - holds one compressed segment against the reference: every choice that the compressor made, one
 * after the other, each judged given the choices before it (so that one near-tie does not fail everything behind it).
 */
#ifndef AKV_CHECK_SEGMENT_H
#define AKV_CHECK_SEGMENT_H

#include "cases.h"

/* Near-ties decided otherwise than by the reference, for the record. */
typedef struct check_stats {
    unsigned long tokens, other_anchor, codes, other_code, residuals;
} check_stats;

void check_compressed(const char *name, const akv_layer *layer, const akv_config *config, const akv_segment *segment,
                      check_stats *stats);

/* akv_segment_decode of everything, and of some odd ranges, against ref_decode. */
void check_decode(const char *name, const akv_segment *segment);

/* AKV_LAYER's captured layer (.npz), or the one of the tree. False, and a failed check, when it is missing. */
bool captured_layer(fixture *f, ref_layer *layer);

/* Relative error of the attention outputs of observation queries first, first + 4, ..., all heads, in double. */
double output_error(const ref_layer *layer, const akv_segment *segment, uint32_t first);

#endif
