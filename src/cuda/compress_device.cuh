/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_device.cuh - tiles of the cache in shared memory as the steps of compression want them, and products on the
 * tensor cores: in tf32 (bf16 and fp16 caches are exact in it) where numbers are kept, in fp16 on unit rows where only
 * the nearest is sought.
 */
#ifndef AKV_CUDA_COMPRESS_DEVICE_CUH
#define AKV_CUDA_COMPRESS_DEVICE_CUH

#include "cuda/compress.h"
#include "cuda/device.cuh"
#include "cuda/mma.cuh"

#define COMP_ARG const __grid_constant__ akv_comp c
#define NO_TOKEN 0xffffffffu

static __device__ __forceinline__ float tf32(float x)
{
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

static __device__ __forceinline__ void mma_tf32(float acc[4], const float a[4], float b0, float b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

static __device__ __forceinline__ int64_t comp_token_at(const akv_comp &c, const akv_comp_source &s, uint32_t head,
                                                        uint64_t token)
{
    if (c.pages == NULL)
        return (int64_t)head * s.stride_head + (int64_t)token * s.stride_token;
    return (int64_t)head * s.stride_head + (int64_t)c.pages[token / c.page_tokens] * s.stride_page +
           (int64_t)(token % c.page_tokens) * s.stride_token;
}

/*
 * Rows r < count of a side -> tile [count, stride] in fp32, zeros beyond dim up to pad. token_of(r) says which,
 * NO_TOKEN gives zeros. Warp w of the block owns rows w, w + warps, ...: what follows for the same rows needs
 * __syncwarp only.
 */
#define COMP_ROWS(r, count) for (uint32_t r = threadIdx.x / 32; r < (count); r += blockDim.x / 32)
#define COMP_AHEAD 4u /* rows whose loads are in flight together */

template <typename Tokens>
static __device__ __forceinline__ void comp_load(const akv_comp &c, int side, uint32_t head, uint32_t count,
                                                 float *tile, uint32_t stride, Tokens token_of)
{
    const akv_comp_source &s = c.source[side];
    const uint32_t dim = c.dim[side], pad = c.pad[side], lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (s.vectors) {
        const uint32_t d = pad == 64 ? lane * 2 : lane * 4;
        for (uint32_t r0 = threadIdx.x / 32; r0 < count; r0 += COMP_AHEAD * warps) {
            uint2 v[COMP_AHEAD];
#pragma unroll
            for (uint32_t i = 0; i < COMP_AHEAD; i++) {
                const uint32_t r = r0 + i * warps, token = r < count ? token_of(r) : NO_TOKEN;
                v[i] = make_uint2(0, 0);
                if (token == NO_TOKEN || d >= dim)
                    continue;
                const uint16_t *from = (const uint16_t *)s.data + comp_token_at(c, s, head, token) + d;
                if (pad == 64)
                    v[i].x = __ldg((const uint32_t *)from);
                else
                    v[i] = __ldg((const uint2 *)from);
            }
#pragma unroll
            for (uint32_t i = 0; i < COMP_AHEAD; i++) {
                const uint32_t r = r0 + i * warps;
                if (r >= count)
                    break;
                float *out = tile + r * stride + d;
                const bool is_f16 = s.dtype == AKV_F16;
                out[0] = is_f16 ? akv_f16((uint16_t)v[i].x) : akv_bf16((uint16_t)v[i].x);
                out[1] = is_f16 ? akv_f16((uint16_t)(v[i].x >> 16)) : akv_bf16((uint16_t)(v[i].x >> 16));
                if (pad != 64) {
                    out[2] = is_f16 ? akv_f16((uint16_t)v[i].y) : akv_bf16((uint16_t)v[i].y);
                    out[3] = is_f16 ? akv_f16((uint16_t)(v[i].y >> 16)) : akv_bf16((uint16_t)(v[i].y >> 16));
                }
            }
        }
        return;
    }
    COMP_ROWS(r, count)
    {
        const uint32_t token = token_of(r);
        const int64_t at = token != NO_TOKEN ? comp_token_at(c, s, head, token) : 0;
        for (uint32_t d = lane; d < pad; d += 32)
            tile[r * stride + d] =
                token != NO_TOKEN && d < dim ? akv_load(s.data, s.dtype, at + (int64_t)d * s.stride_dim) : 0.0f;
    }
}

/*
 * Rows turned by their positions, by the warps that own them: direction 1 forwards, -1 back; then less the mean,
 * unless it is NULL.
 */
template <typename Tokens>
static __device__ __forceinline__ void comp_turn(const akv_comp &c, uint32_t count, float *tile, uint32_t stride,
                                                 int direction, const float *mean, Tokens token_of)
{
    const float magnitude = direction > 0 ? c.magnitude : c.inverse_magnitude;
    const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (uint32_t j = lane; j < c.planes; j += 32) {
        const uint32_t a = c.style == AKV_ROPE_HALF_SPLIT ? j : 2 * j,
                       b = c.style == AKV_ROPE_HALF_SPLIT ? j + c.planes : 2 * j + 1;
        const float mean_a = mean != NULL ? mean[a] : 0.0f, mean_b = mean != NULL ? mean[b] : 0.0f;
        for (uint32_t r0 = threadIdx.x / 32; r0 < count; r0 += COMP_AHEAD * warps) {
            float2 p[COMP_AHEAD];
#pragma unroll
            for (uint32_t i = 0; i < COMP_AHEAD; i++) {
                const uint32_t r = r0 + i * warps, token = r < count ? token_of(r) : NO_TOKEN;
                p[i] = make_float2(0, 2); /* of no angle */
                if (token != NO_TOKEN)
                    p[i] = __ldg(&c.phase[(size_t)token * c.planes + j]);
            }
#pragma unroll
            for (uint32_t i = 0; i < COMP_AHEAD; i++) {
                if (p[i].y == 2.0f)
                    continue;
                float *x = tile + (r0 + i * warps) * stride;
                const float s = direction > 0 ? p[i].y : -p[i].y, x0 = x[a], x1 = x[b];
                x[a] = (x0 * p[i].x - x1 * s) * magnitude - mean_a;
                x[b] = (x0 * s + x1 * p[i].x) * magnitude - mean_b;
            }
        }
    }
    if (mean != NULL)
        COMP_ROWS(r, count)
    if (token_of(r) != NO_TOKEN)
        for (uint32_t d = 2 * c.planes + lane; d < c.dim[AKV_SIDE_K]; d += 32)
            tile[r * stride + d] -= mean[d];
}

/*
 * Rows as anchors see them: keys before the rotary embedding and centred, values as they are. The warps own their rows.
 */
template <typename Tokens>
static __device__ __forceinline__ void comp_anchor_space(const akv_comp &c, int side, uint32_t head, uint32_t count,
                                                         float *tile, uint32_t stride, Tokens token_of)
{
    comp_load(c, side, head, count, tile, stride, token_of);
    __syncwarp();
    if (side == AKV_SIDE_K)
        comp_turn(c, count, tile, stride, -1, c.mean[AKV_SIDE_K] + head * AKV_COMP_MAX_DIM, token_of);
    __syncwarp();
}

static __device__ __forceinline__ float comp_coefficient(int code)
{
    return code == -8 ? 1.0f : (float)code * (2.0f / 7.0f);
}

/* Bytes of a run of n residuals, as akv_run_bytes of core/ladder.h. */
static __device__ __forceinline__ uint64_t comp_run_bytes(uint64_t n, uint32_t bits)
{
    const uint64_t full = n / AKV_GROUP_LANES, rest = n % AKV_GROUP_LANES;
    return (n + 1) / 2 + full * (2 * (uint64_t)bits) + (rest * bits + 7) / 8;
}

/* The part of [0, n) that belongs to this thread, so that threads in order hold tokens in order. */
static __device__ __forceinline__ void comp_share_of(uint64_t n, uint64_t *begin, uint64_t *end)
{
    const uint64_t each = (n + blockDim.x - 1) / blockDim.x;
    *begin = threadIdx.x * each < n ? threadIdx.x * each : n;
    *end = *begin + each < n ? *begin + each : n;
}

/* The same for warps, whose lanes then take 32 neighbours at a time: multiples of 32 but for the last. */
static __device__ __forceinline__ void comp_warp_share_of(uint64_t n, uint64_t *begin, uint64_t *end)
{
    const uint64_t warps = blockDim.x / 32, each = ((n + 31) / 32 + warps - 1) / warps * 32, warp = threadIdx.x / 32;
    *begin = warp * each < n ? warp * each : n;
    *end = *begin + each < n ? *begin + each : n;
}

/* Sum over a block of at most 1024 threads, the same in every thread; shared holds 33 elements. */
template <typename T> static __device__ __forceinline__ T comp_block_sum(T x, T *shared)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        x = threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : T(0);
#pragma unroll
        for (int o = 16; o > 0; o >>= 1)
            x += __shfl_xor_sync(0xffffffffu, x, o);
        if (threadIdx.x == 0)
            shared[32] = x;
    }
    __syncthreads();
    return shared[32];
}

/* Sum over the threads before this one; *total: over all. shared holds 33 elements. */
template <typename T> static __device__ __forceinline__ T comp_block_scan(T x, T *shared, T *total)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const T other = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= (uint32_t)o)
            sum += other;
    }
    __syncthreads();
    if (lane == 31)
        shared[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        T w = lane < blockDim.x / 32 ? shared[lane] : T(0), s = w;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const T other = __shfl_up_sync(0xffffffffu, s, o);
            if (lane >= (uint32_t)o)
                s += other;
        }
        shared[lane] = s - w;
        if (lane == 31)
            shared[32] = s;
    }
    __syncthreads();
    *total = shared[32];
    return shared[warp] + sum - x;
}

/*
 * Row of fp16 halves as a lane of operand A or B needs it: 16 bytes of every 64. The order of coordinates is the same
 * for both.
 */
template <int PAD> static __device__ __forceinline__ void comp_row_chunks(uint4 out[PAD / 32], const uint16_t *row)
{
    const uint32_t at = threadIdx.x % 4 * 8;
#pragma unroll
    for (int s = 0; s < PAD / 32; s++)
        out[s] = *(const uint4 *)(row + s * 32 + at);
}

static __device__ __forceinline__ uint32_t comp_to_halves(float x, float y)
{
    return pack_halves(fminf(65504.0f, fmaxf(-65504.0f, x)), fminf(65504.0f, fmaxf(-65504.0f, y)));
}

/* The same of a token as the cache has it, rounded to fp16; zeros for NO_TOKEN and beyond dim. */
template <int PAD>
static __device__ __forceinline__ void comp_token_chunks(const akv_comp &c, uint4 out[PAD / 32], int side,
                                                         uint32_t head, uint32_t token)
{
    const akv_comp_source &s = c.source[side];
    const uint32_t at = threadIdx.x % 4 * 8, dim = c.dim[side];
    const int64_t from = token != NO_TOKEN ? comp_token_at(c, s, head, token) : 0;
#pragma unroll
    for (int j = 0; j < PAD / 32; j++) {
        const uint32_t d = j * 32 + at;
        out[j] = make_uint4(0, 0, 0, 0);
        if (token == NO_TOKEN || d >= dim)
            continue;
        if (s.vectors) {
            const uint4 v = __ldg((const uint4 *)((const uint16_t *)s.data + from + d));
            out[j] = v;
            if (s.dtype == AKV_BF16) {
                out[j].x = comp_to_halves(akv_bf16((uint16_t)v.x), akv_bf16((uint16_t)(v.x >> 16)));
                out[j].y = comp_to_halves(akv_bf16((uint16_t)v.y), akv_bf16((uint16_t)(v.y >> 16)));
                out[j].z = comp_to_halves(akv_bf16((uint16_t)v.z), akv_bf16((uint16_t)(v.z >> 16)));
                out[j].w = comp_to_halves(akv_bf16((uint16_t)v.w), akv_bf16((uint16_t)(v.w >> 16)));
            }
            continue;
        }
        float x[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            x[i] = d + i < dim ? akv_load(s.data, s.dtype, from + (int64_t)(d + i) * s.stride_dim) : 0.0f;
        out[j] = make_uint4(comp_to_halves(x[0], x[1]), comp_to_halves(x[2], x[3]), comp_to_halves(x[4], x[5]),
                            comp_to_halves(x[6], x[7]));
    }
}

/* 16 tokens times 8 units, all coordinates; low and high: rows lane / 4 and 8 further. */
template <int PAD>
static __device__ __forceinline__ void comp_products(float acc[4], const uint4 low[PAD / 32],
                                                     const uint4 high[PAD / 32], const uint16_t *unit)
{
    const uint32_t at = threadIdx.x % 4 * 8;
#pragma unroll
    for (int s = 0; s < PAD / 32; s++) {
        const uint4 b = *(const uint4 *)(unit + s * 32 + at);
        mma_f16(acc, low[s].x, high[s].x, low[s].y, high[s].y, b.x, b.y);
        mma_f16(acc, low[s].z, high[s].z, low[s].w, high[s].w, b.z, b.w);
    }
}

/* Halves between two units in shared memory: 64 bytes more than a row, so that 16-byte reads of 8 rows do not meet. */
template <int PAD> static __device__ __forceinline__ constexpr uint32_t comp_unit_stride()
{
    return PAD + 32;
}

/* Rows of a head's queries or outputs from first_row on into shared memory, zeros after the last. */
template <int PAD>
static __device__ __forceinline__ void comp_load_rows(const akv_comp &c, const uint16_t *from, uint32_t head,
                                                      uint32_t first_row, uint32_t count, uint16_t *to)
{
    constexpr uint32_t chunks = PAD / 8;
    for (uint32_t i = threadIdx.x; i < count * chunks; i += blockDim.x) {
        const uint32_t r = i / chunks, at = i % chunks * 8;
        *(uint4 *)(to + r * comp_unit_stride<PAD>() + at) =
            first_row + r < c.rows
                ? *(const uint4 *)(from + ((size_t)head * c.rows + first_row + r) * AKV_COMP_MAX_DIM + at)
                : make_uint4(0, 0, 0, 0);
    }
}

/* Products of 16 queries from row0 on with a tile of 64 keys, both in shared memory. */
template <int PAD>
static __device__ __forceinline__ void comp_logits(float acc[8][4], const uint16_t *query, const uint16_t *key,
                                                   uint32_t row0)
{
    const uint32_t g = threadIdx.x % 32 / 4, at = threadIdx.x % 4 * 8;
    const uint16_t *low = query + (row0 + g) * comp_unit_stride<PAD>() + at, *high = low + 8 * comp_unit_stride<PAD>();
#pragma unroll
    for (int n = 0; n < 8; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll
    for (int j = 0; j < PAD / 32; j++) {
        const uint4 x = *(const uint4 *)(low + j * 32), y = *(const uint4 *)(high + j * 32);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint4 b = *(const uint4 *)(key + (n * 8 + g) * comp_unit_stride<PAD>() + at + j * 32);
            mma_f16(acc[n], x.x, y.x, x.y, y.y, b.x, b.y);
            mma_f16(acc[n], x.z, y.z, x.w, y.w, b.z, b.w);
        }
    }
}

template <typename Kernel> static cudaError_t comp_shared(Kernel kernel, size_t bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

/* A kernel that may begin while the one before it ends. */
template <typename Kernel, typename... Args>
static cudaError_t comp_launch_early(Kernel kernel, dim3 grid, uint32_t threads, size_t shared, cudaStream_t stream,
                                     Args... args)
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
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

#define COMP_TRY(call)                                                                                                 \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess)                                                                                     \
            return error_;                                                                                             \
    } while (0)

#endif
