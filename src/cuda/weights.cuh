/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.cuh - from logits to weights and to the histogram of value anchors: what the kernels of both profiles have in
 * common. It touches the block's logits, weights, histogram, slabs and sums in shared memory, through the block's functions.
 */
#ifndef AKV_CUDA_WEIGHTS_CUH
#define AKV_CUDA_WEIGHTS_CUH

#include "cuda/mma.cuh"

#define LOG2E 1.44269504f
#define WEIGHT_SCALE_LOG2 6 /* weights times 64, as fp16: small ones stay out of its subnormals */
#define RUN_AWAY 4.0f       /* weights are relative to a logit that follows the maximum when it is this far ahead */
#define UNIT_ROOM 3

/* Least n with x <= 2^n, for x > 0. */
static __device__ __forceinline__ int log2_above(float x)
{
    return (int)(__float_as_uint(x) >> 23) - 126;
}

static __device__ __forceinline__ float power_of_2(int n)
{
    return __uint_as_float((uint32_t)((n < -126 ? -126 : n > 127 ? 127 : n) + 127) << 23);
}

/* Sums over the warp of NR numbers a lane: lane l gets that of number l % NR. */
template <int NR> static __device__ __forceinline__ float row_sums(float x[NR], int lane)
{
#pragma unroll
    for (int n = NR / 2, o = 1; n >= 1; n /= 2, o *= 2) { /* half of the numbers go to the neighbour */
        const bool upper = lane & o;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float send = upper ? x[2 * i] : x[2 * i + 1], keep = upper ? x[2 * i + 1] : x[2 * i];
            x[i] = keep + __shfl_xor_sync(0xffffffffu, send, o);
        }
    }
#pragma unroll
    for (int o = NR; o < 32; o *= 2)
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], o);
    return x[0];
}

/* Weights of the thread's tokens relative to `origin` [NR]; what logits a span has are 0 behind it. */
template <class block>
static __device__ __forceinline__ void weigh_tokens(block &b, uint32_t count, const float *origin,
                                                    typename block::held *tokens)
{
    constexpr int NT = block::NT, NR = 4 * NT;
    float span_sum[NR] = {};
#pragma unroll
    for (int i = 0; i < block::MOST_TOKENS; i++) {
        const uint32_t t = b.token_at(i);
        if (t >= count)
            continue;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float4 *at_logits = (float4 *)b.logits() + t * NT + j;
            const float4 l = *at_logits;
            *at_logits = make_float4(0.0f, 0.0f, 0.0f, 0.0f); /* for the next span's residuals */
            const float x = akv_exp2(l.x * LOG2E + origin[4 * j]), y = akv_exp2(l.y * LOG2E + origin[4 * j + 1]);
            const float z = akv_exp2(l.z * LOG2E + origin[4 * j + 2]), w = akv_exp2(l.w * LOG2E + origin[4 * j + 3]);
            const uint2 packed = make_uint2(pack_halves(x, y), pack_halves(z, w));
            ((uint2 *)b.weights())[t * NT + j] = packed;
            tokens[i].weights[2 * j] = packed.x;
            tokens[i].weights[2 * j + 1] = packed.y;
            span_sum[4 * j] += x;
            span_sum[4 * j + 1] += y;
            span_sum[4 * j + 2] += z;
            span_sum[4 * j + 3] += w;
        }
    }
    const float total = row_sums<NR>(span_sum, b.lane);
    if (b.lane < NR)
        b.warp_sums()[b.lane * block::WARPS + b.warp] = total;
}

/*
 * Two tiles of bits from 16 of them: one "and" makes two fp16 numbers of two tokens' bits (packed.h), 2^-24 .. 2^-17 or
 * 0.
 */
static __device__ __forceinline__ void two_value_tiles(float acc0[4], float acc1[4], uint32_t w, uint32_t b0,
                                                       uint32_t b1)
{
    mma_f16(acc0, w & 0x00010001u, w & 0x00020002u, w & 0x00040004u, w & 0x00080008u, b0, b1);
    mma_f16(acc1, w & 0x00100010u, w & 0x00200020u, w & 0x00400040u, w & 0x00800080u, b0, b1);
}

#endif
