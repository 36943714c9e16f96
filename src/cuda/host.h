/* SPDX-License-Identifier: Apache-2.0 */
/* host.h - what the host files of the GPU back end share. */
#ifndef AKV_CUDA_HOST_H
#define AKV_CUDA_HOST_H

#include "core/base.h"
#include "cuda/internal.h"
#include "cuda/packed.h"
#include "cuda/packed_paper.h"

/* Handle of a segment on the device. */
struct akv_cuda_segment {
    akv_header header; /* of the canonical bytes */
    const uint8_t *device;
    int ordinal;       /* of the device it lies on */
    uint32_t kind;     /* akv_item_kind */
    akv_packed packed; /* these two: total_bytes 0 unless the segment is on the device in that private form */
    akv_paper paper;
};

/* CUDA's word as a status; the sticky error, if any, is read but cannot be cleared by anyone. */
akv_status akv_cuda_fail(akv_diag *diag, cudaError_t error, const char *doing);

#define AKV_CUDA_TRY(call, doing)                                                                                      \
    do {                                                                                                               \
        cudaError_t cuda_error_ = (call);                                                                              \
        if (cuda_error_ != cudaSuccess)                                                                                \
            return akv_cuda_fail(diag, cuda_error_, doing);                                                            \
    } while (0)

#endif
