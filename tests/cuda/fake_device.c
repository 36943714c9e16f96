/* SPDX-License-Identifier: Apache-2.0 */
/* fake_device.c - see fake_device.h. Copies are real, so that a memory checker watches both of their ends. */
#include "fake_device.h"

#include <string.h>

fake_device fake;

void fake_device_reset(void)
{
    memset(&fake, 0, sizeof fake);
    fake.major = 9;
    fake.shared_bytes = 232448;
    fake.rows = 12;
    fake.span_shared = fake.paper_shared = 200000;
    fake.error = cudaErrorUnknown;
}

static cudaError_t called(void)
{
    return ++fake.calls == fake.fail_at ? fake.error : cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = fake.ordinal;
    return called();
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    (void)device;
    *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? fake.shared_bytes
             : attribute == cudaDevAttrComputeCapabilityMajor     ? fake.major
                                                                  : 0;
    return called();
}

/* One kernel, whose limit of shared memory is remembered. */
static int allowed;

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    attributes->maxDynamicSharedSizeBytes = allowed;
    return called();
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    (void)function, (void)attribute;
    allowed = value;
    return called();
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const cudaError_t error = called();
    (void)kind, (void)stream;
    if (error == cudaSuccess)
        memcpy(to, from, bytes);
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return called();
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    return called();
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorUnknown ? "cudaErrorUnknown" : "cudaErrorOther";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorUnknown ? "unknown error" : "another error";
}

static cudaError_t launched(const akv_cuda_call *call)
{
    const cudaError_t error = called();
    fake.call = *call;
    fake.launches += error == cudaSuccess;
    return error;
}

#define LAUNCHER(name)                                             \
    cudaError_t name(const akv_cuda_call *call, cudaStream_t stream) \
    {                                                              \
        (void)stream;                                              \
        return launched(call);                                     \
    }
LAUNCHER(akv_cuda_launch_paper)
LAUNCHER(akv_cuda_launch_queries)
LAUNCHER(akv_cuda_launch_spans)
LAUNCHER(akv_cuda_launch_parts)
LAUNCHER(akv_cuda_launch_combine)

cudaError_t akv_cuda_launch_append(const akv_cuda_call *call, const akv_cuda_token *token, cudaStream_t stream)
{
    (void)token;
    (void)stream;
    return launched(call);
}

static int has(uint32_t dim, uint32_t rows, uint32_t fast_steps)
{
    return (dim % 64 == 0 || dim == 96) && (fake.rows == 12 || fake.rows == rows) && (fast_steps == dim / 16 || fast_steps == dim / 32);
}

int akv_cuda_span_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    return has(dim, row_chunk, fast_steps);
}

int akv_cuda_paper_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    return has(dim, row_chunk, fast_steps);
}

size_t akv_cuda_span_shared(const akv_span_shape *shape)
{
    (void)shape;
    return fake.span_shared;
}

size_t akv_cuda_queries_shared(const akv_span_shape *shape)
{
    (void)shape;
    return 60000;
}

size_t akv_cuda_paper_shared(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps, uint32_t anchors, uint32_t span, int shared_anchors)
{
    (void)dim, (void)row_chunk, (void)fast_steps, (void)anchors, (void)span;
    return fake.paper_shared - (shared_anchors ? 0 : 100000);
}

cudaError_t akv_cuda_prepare_parts(void)
{
    return akv_cuda_allow_shared(&fake, 100000);
}

cudaError_t akv_cuda_prepare_spans(const akv_span_shape *shape, size_t shared_bytes)
{
    (void)shape;
    return akv_cuda_allow_shared(&fake, shared_bytes);
}

cudaError_t akv_cuda_prepare_queries(uint32_t row_chunk, size_t shared_bytes)
{
    (void)row_chunk;
    return akv_cuda_allow_shared(&fake, shared_bytes);
}

cudaError_t akv_cuda_prepare_paper(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps, size_t shared_bytes)
{
    (void)dim, (void)row_chunk, (void)fast_steps;
    return akv_cuda_allow_shared(&fake, shared_bytes);
}
