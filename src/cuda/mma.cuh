/* SPDX-License-Identifier: Apache-2.0 */
/* mma.cuh - the few instructions that the tensor-core path is made of. */
#ifndef AKV_CUDA_MMA_CUH
#define AKV_CUDA_MMA_CUH

#include "cuda/device.cuh"

static __device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

/* 16 x 32 bytes times 32 x 8 bytes. */
static __device__ __forceinline__ void mma_i8(int acc[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 16 x 16 bytes times 16 x 8 bytes. */
static __device__ __forceinline__ void mma_i8(int acc[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
        : "r"(a0), "r"(a1), "r"(b));
}

static __device__ __forceinline__ void mma_f16(float acc[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_bf16(float acc[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* A register of whatever value: for rows of operands whose products nobody reads. */
static __device__ __forceinline__ uint32_t any_value(void)
{
    uint32_t x;
    asm volatile("" : "=r"(x));
    return x;
}

/* 8 x 8 halves over a warp, lane 4r + c with columns 2c and 2c + 1 of row r: the transpose. */
static __device__ __forceinline__ uint32_t transpose8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

static __device__ __forceinline__ __half2 as_half2(uint32_t x)
{
    return *reinterpret_cast<__half2 *>(&x);
}

static __device__ __forceinline__ uint32_t as_u32(__half2 x)
{
    return *reinterpret_cast<uint32_t *>(&x);
}

static __device__ __forceinline__ uint32_t pack_halves(float x, float y)
{
    return as_u32(__floats2half2_rn(x, y));
}

static __device__ __forceinline__ uint32_t pack_bf16(float x, float y)
{
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&both);
}

/* (x, y) turned back by the angle of (cos, sin): x cos + y sin, y cos - x sin. */
static __device__ __forceinline__ void turn_back(uint2 q, uint2 turn, uint32_t *x, uint32_t *y)
{
    const __half2 c = as_half2(turn.x), s = as_half2(turn.y), a = as_half2(q.x), b = as_half2(q.y);
    *x = as_u32(__hfma2(a, c, __hmul2(b, s)));
    *y = as_u32(__hfma2(b, c, __hneg2(__hmul2(a, s))));
}

/* The other way round. */
static __device__ __forceinline__ void turn_on(__half2 a, __half2 b, uint2 turn, uint32_t *x, uint32_t *y)
{
    const __half2 c = as_half2(turn.x), s = as_half2(turn.y);
    *x = as_u32(__hfma2(a, c, __hneg2(__hmul2(b, s))));
    *y = as_u32(__hfma2(b, c, __hmul2(a, s)));
}

/* 16 bytes to shared memory, there after the next wait. */
static __device__ __forceinline__ void copy_async(void *to, const void *from)
{
    const uint32_t s = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(from) : "memory");
}

/* 4 bytes, likewise. */
static __device__ __forceinline__ void copy_word_async(void *to, const void *from)
{
    const uint32_t s = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(s), "l"(from) : "memory");
}

static __device__ __forceinline__ void await_copies(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Copies in two portions: wait for all but the last that was closed. */
static __device__ __forceinline__ void close_copies(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

static __device__ __forceinline__ void await_all_copies_but_one(void)
{
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

static __device__ __forceinline__ void fetch_line(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/* To shared memory, if `there`: a predicate, where the compiler would make a branch of it. */
static __device__ __forceinline__ void store_shared_if(bool there, uint32_t to, float x)
{
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.f32 [%1], %2; }" ::"r"((uint32_t)there), "r"(to),
                 "f"(x)
                 : "memory");
}

/* A range to L2, both ends multiples of 16, by a block of threads, or by one where there is an instruction for it. */
template <int THREADS, int WHO> static __device__ __forceinline__ void fetch_range(const uint8_t *from, uint32_t bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == WHO && bytes > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
#    pragma unroll 1
    for (uint32_t e = threadIdx.x * 64; e < bytes; e += THREADS * 64)
        fetch_line(from + e);
#endif
}

/* Floats as whole numbers of the same order, for maxima in shared memory. */
static __device__ __forceinline__ int ordered(float x)
{
    const int i = __float_as_int(x);
    return i >= 0 ? i : i ^ 0x7fffffff;
}

static __device__ __forceinline__ float unordered(int i)
{
    return __int_as_float(i >= 0 ? i : i ^ 0x7fffffff);
}

#endif
