/* SPDX-License-Identifier: Apache-2.0 */
/* device.cuh - small device functions that several kernels need: conversions, exact phases, sums over a warp. */
#ifndef AKV_CUDA_DEVICE_CUH
#define AKV_CUDA_DEVICE_CUH

#include "cuda/internal.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ float akv_bf16(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

static __device__ __forceinline__ float akv_f16(uint16_t h)
{
    return __half2float(__ushort_as_half(h));
}

static __device__ __forceinline__ float akv_load(const void *data, int dtype, int64_t at)
{
    if (dtype == AKV_F32)
        return ((const float *)data)[at];
    const uint16_t h = ((const uint16_t *)data)[at];
    return dtype == AKV_F16 ? akv_f16(h) : akv_bf16(h);
}

static __device__ __forceinline__ void akv_store(void *data, int dtype, int64_t at, float x)
{
    if (dtype == AKV_F32)
        ((float *)data)[at] = x;
    else if (dtype == AKV_F16)
        ((__half *)data)[at] = __float2half_rn(x);
    else
        ((__nv_bfloat16 *)data)[at] = __float2bfloat16_rn(x);
}

/* cos and sin of position * inv_freq: the turn is reduced in double, so a position of a million costs nothing. */
static __device__ __forceinline__ void akv_phase(int64_t position, double inv_freq, float *c, float *s)
{
    const double turns = (double)position * (inv_freq * 0.15915494309189533577);
    sincospif(2.0f * (float)(turns - rint(turns)), s, c);
}

/* 2^x: the special-function unit alone; exp2f adds a detour for denormal results, which no weight here needs. */
static __device__ __forceinline__ float akv_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float akv_warp_sum(float x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

static __device__ __forceinline__ float akv_warp_max(float x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* NaN must not get lost in a maximum: fmaxf drops it. */
static __device__ __forceinline__ float akv_cap(float logit, float cap)
{
    return cap > 0.0f ? cap * tanhf(logit / cap) : logit;
}

/* Where query row `row` of KV head `head` of a sequence begins. */
static __device__ __forceinline__ int64_t akv_query_at(const akv_cuda_call &c, uint32_t sequence, uint32_t head, uint32_t row)
{
    return (int64_t)sequence * c.step.query_stride_sequence + (int64_t)(head * c.G + row / c.T) * c.step.query_stride_head +
           (int64_t)(row % c.T) * c.step.query_stride_token;
}

static __device__ __forceinline__ size_t akv_slot(const akv_cuda_call &c, uint32_t part, uint32_t head, uint32_t row)
{
    return ((size_t)part * c.H + head) * c.rows + row;
}

/*
 * Programmatic dependent launch (sm_90 and newer; elsewhere kernels simply follow one another). A step's kernels form a
 * chain; each may start while the one before still runs, and waits for its end, and so for all before it, where it needs to.
 */
static __device__ __forceinline__ void akv_let_next_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void akv_wait_for_previous(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Launch; early: as a dependent of the kernel before it. */
static inline cudaError_t akv_launch(const void *kernel, dim3 grid, unsigned threads, size_t shared, cudaStream_t stream,
                                     const akv_cuda_call *call, bool early)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    void *args[] = {(void *)call};
    return cudaLaunchKernelExC(&config, kernel, args);
}

#endif
