/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shared.c - dynamic shared memory of kernels above CUDA's 48 KB. The limit belongs to the kernel, not to a plan: it is only
 * ever raised, since plans made before may launch the same kernel with more.
 */
#include "cuda/internal.h"

#include <pthread.h>

cudaError_t akv_cuda_allow_shared(const void *kernel, size_t bytes)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of asking and setting; several threads may make plans */
    struct cudaFuncAttributes now;
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaFuncGetAttributes(&now, kernel);
    if (error == cudaSuccess && (size_t)now.maxDynamicSharedSizeBytes < bytes)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    pthread_mutex_unlock(&lock);
    return error;
}
