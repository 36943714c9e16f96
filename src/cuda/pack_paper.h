/* SPDX-License-Identifier: Apache-2.0 */
/* pack_paper.h - canonical PLAIN bytes to the private form of packed_paper.h. Pure C: tests of it need no GPU. */
#ifndef AKV_CUDA_PACK_PAPER_H
#define AKV_CUDA_PACK_PAPER_H

#include "core/segment.h"
#include "cuda/packed_paper.h"

/*
 * True when the segment has this form: coding PLAIN with its Hadamard transform, anchors before the rotary embedding,
 * consecutive positions, head dims that the tensor-core kernels know.
 */
bool akv_paper_covers(const akv_segment *segment);

/* Fill the head of the packed form; total_bytes is what akv_paper_write writes. */
void akv_paper_plan(const akv_segment *segment, akv_paper *out);

/* All of packed->total_bytes; `packed` itself comes first. */
void akv_paper_write(const akv_segment *segment, const akv_paper *packed, uint8_t *out);

#endif
