/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sections.h - where the sections of a segment lie. The header's shape fields decide every size and offset, so the
 * planner, the writers and the checks of untrusted bytes all ask this one function.
 */
#ifndef AKV_SECTIONS_H
#define AKV_SECTIONS_H

#include "core/base.h"
#include "core/layout.h"

/*
 * akv_sections_layout() - sizes and offsets that the fields of `h` imply; h->sections itself is not read.
 *
 *   h              in   kind, num_tokens, num_kv_heads, head_dim, rotary_dim, num_anchors, num_residuals, dense_dtype
 *                       and header_bytes (a multiple of 64) are read
 *   has_positions  in   whether token positions are stored
 *   sections       out  [AKV_SEC_COUNT]; absent ones are {0, 0}
 *   total_bytes    out  end of the last section, rounded up to 64
 *
 * Sections follow each other in the order of their ids, each on the next multiple of 64. False when a size does not
 * fit 64 bits; nothing else is checked.
 */
bool akv_sections_layout(const akv_header *h, bool has_positions, akv_section *sections, uint64_t *total_bytes);

#endif
