/* SPDX-License-Identifier: Apache-2.0 */
/* fake_device.h - CUDA's functions and the kernels' launchers without a GPU: settings of the device, and what was launched. */
#ifndef AKV_FAKE_DEVICE_H
#define AKV_FAKE_DEVICE_H

#include "cuda/internal.h"

typedef struct fake_device {
    int major, shared_bytes, ordinal; /* of the device */
    uint32_t rows;                    /* rows of the kernels in the build: 4, 8, or 12 for both */
    size_t span_shared, paper_shared; /* what a block of them takes */
    cudaError_t error;                /* of the failing call */
    unsigned long fail_at, calls;     /* CUDA's call number fail_at (from 1) fails; 0: none */
    unsigned long launches;
    akv_cuda_call call; /* of the last launch */
} fake_device;

extern fake_device fake;
void fake_device_reset(void); /* compute capability 9.0, everything works */

#endif
