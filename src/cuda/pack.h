/* SPDX-License-Identifier: Apache-2.0 */
/* pack.h - canonical LADDER bytes to the private form of packed.h. Pure C: tests of it need no GPU. */
#ifndef AKV_CUDA_PACK_H
#define AKV_CUDA_PACK_H

#include "core/segment.h"
#include "cuda/packed.h"

/* True when the segment has a private form: LADDER, consecutive positions, head dims that the tensor-core kernels know. */
bool akv_pack_covers(const akv_segment *segment);

/* Fill the head of the packed form; total_bytes is what akv_pack_write writes. AKV_E_NO_MEMORY when scratch is not to be had. */
akv_status akv_pack_plan(const akv_segment *segment, akv_packed *out, akv_diag *diag);

/* All of packed->total_bytes; `packed` itself comes first. */
akv_status akv_pack_write(const akv_segment *segment, const akv_packed *packed, uint8_t *out, akv_diag *diag);

#endif
