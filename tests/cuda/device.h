/* SPDX-License-Identifier: Apache-2.0 */
/* device.h - what the GPU tests share: finding a device, memory that checks its own edges, one attention call as the CPU's. */
#ifndef AKV_TEST_CUDA_DEVICE_H
#define AKV_TEST_CUDA_DEVICE_H

#include "anchorkv/akv_cuda.h"
#include "cases.h"

#include <cuda_runtime_api.h>

#define EXIT_SKIPPED 77

#define MUST_CUDA(call)                                                                                                \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) {                                                                                   \
            fprintf(stderr, "%s:%d: %s gives %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Exits with EXIT_SKIPPED and a word when there is no GPU; AKV_TEST_NEED_GPU=1 makes that a failure. */
void need_device(void);

/* Device memory filled with a pattern, with a guard behind it. */
void *device_new(size_t bytes);
void device_free(void *memory); /* checks the guard */
void *device_copy(const void *host, size_t bytes);

/* akv_attend's contract carried out by the GPU: everything is uploaded, run twice (bits must agree), copied back. */
akv_status gpu_attend(const akv_attend_params *params, void *workspace, size_t workspace_bytes, akv_diag *diag);
akv_status gpu_attend_workspace_bytes(const akv_attend_params *params, size_t *bytes, akv_diag *diag);

#endif
