/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_attended.cu - which tokens become anchors, as src/codec/anchors.c: the window and the most attended, then
 * those for coverage (compress_cover.cu); and their numbers.
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define HEAD_THREADS 1024 /* kernels with one block a head */

/* Scores pooled along positions; the sinks come first. Grid-stride, head = blockIdx.y. */
static __global__ void __launch_bounds__(THREADS) pool_scores(COMP_ARG)
{
    const float *score = c.score + blockIdx.y * c.S;
    const int64_t n = (int64_t)c.earlier, half = c.pool_width / 2;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * THREADS) {
        const int64_t from = i - half < 0 ? 0 : i - half, to = i + half >= n ? n - 1 : i + half;
        double sum = 0;
        for (int64_t j = from; j <= to; j++)
            sum += score[j];
        sum /= c.pool_width;
        c.pooled[blockIdx.y * c.S + i] = i < c.top_sinks ? INFINITY : sum >= 0.0 ? (float)sum : 0.0f;
    }
}

/* The c.top largest of a head's pooled scores, ties to the lower token, and the window: masks, list. */
static __global__ void __launch_bounds__(HEAD_THREADS) take_attended(COMP_ARG)
{
    __shared__ uint32_t histogram[256], shared[33], prefix, left;
    const uint32_t head = blockIdx.x;
    const float *pooled = c.pooled + head * c.S;
    uint8_t *mask = c.mask + head * c.S;
    uint32_t known = 0;
    if (threadIdx.x == 0) {
        prefix = 0;
        left = c.top;
    }
    for (int shift = 24; shift >= 0; shift -= 8) { /* radix selection */
        __syncthreads();
        if (threadIdx.x < 256)
            histogram[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t so_far = prefix;
        for (uint64_t t = threadIdx.x; t < c.earlier; t += HEAD_THREADS) {
            const uint32_t key = pooled[t] > 0.0f ? __float_as_uint(pooled[t]) : 0u;
            if ((key & known) == so_far)
                atomicAdd(&histogram[(key >> shift) & 0xffu], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0 && c.top > 0) {
            uint32_t digit = 255;
            while (digit > 0 && histogram[digit] < left)
                left -= histogram[digit--];
            prefix |= digit << shift;
        }
        known |= 0xffu << shift;
    }
    __syncthreads();
    const uint32_t threshold = prefix, ties = left;
    const uint32_t lane = threadIdx.x % 32, before = (1u << lane) - 1;
    const auto key_of = [&](uint64_t t) {
        return t < c.earlier && pooled[t] > 0.0f ? __float_as_uint(pooled[t]) : 0u;
    };
    uint64_t begin, end;
    comp_warp_share_of(c.S, &begin, &end);
    uint32_t equal = 0, count = 0, total; /* of the warp */
#pragma unroll 4
    for (uint64_t t0 = begin; t0 < end; t0 += 32)
        equal += __popc(__ballot_sync(0xffffffffu, t0 + lane < c.earlier && key_of(t0 + lane) == threshold));
    uint32_t rank = comp_block_scan(lane == 0 ? equal : 0, shared, &total);
    rank = __shfl_sync(0xffffffffu, rank, 0);
#pragma unroll 4
    for (uint64_t t0 = begin; t0 < end; t0 += 32) {
        const uint64_t t = t0 + lane;
        const bool is_equal = t < c.earlier && key_of(t) == threshold;
        const uint32_t equals = __ballot_sync(0xffffffffu, is_equal);
        const bool taken =
            t < end && (t >= c.earlier ||
                        (c.top > 0 && (key_of(t) > threshold || (is_equal && rank + __popc(equals & before) < ties))));
        rank += __popc(equals);
        if (t < end)
            mask[t] = taken ? 3 : 0;
        count += __popc(__ballot_sync(0xffffffffu, taken));
    }
    uint32_t at = comp_block_scan(lane == 0 ? count : 0, shared, &total);
    at = __shfl_sync(0xffffffffu, at, 0);
    if (count > 0)
        for (uint64_t t0 = begin; t0 < end; t0 += 32) {
            const bool taken = t0 + lane < end && mask[t0 + lane] != 0;
            const uint32_t votes = __ballot_sync(0xffffffffu, taken);
            if (taken)
                c.given[(size_t)head * c.k + at + __popc(votes & before)] = (uint32_t)(t0 + lane);
            at += __popc(votes);
        }
}

/* Anchors' numbers, ascending by token. Block = head. */
static __global__ void __launch_bounds__(HEAD_THREADS) number(COMP_ARG)
{
    __shared__ uint32_t shared[33];
    const uint32_t head = blockIdx.x;
    const uint8_t *mask = c.mask + head * c.S;
    const uint32_t lane = threadIdx.x % 32;
    uint64_t begin, end;
    uint32_t count = 0, total;
    comp_warp_share_of(c.S, &begin, &end);
#pragma unroll 4
    for (uint64_t t0 = begin; t0 < end; t0 += 32)
        count += __popc(__ballot_sync(0xffffffffu, t0 + lane < end && mask[t0 + lane] != 0));
    uint32_t at = comp_block_scan(lane == 0 ? count : 0, shared, &total);
    at = __shfl_sync(0xffffffffu, at, 0);
#pragma unroll 4
    for (uint64_t t0 = begin; t0 < end; t0 += 32) {
        const uint64_t t = t0 + lane;
        const uint32_t kind = t < end ? mask[t] : 0, votes = __ballot_sync(0xffffffffu, kind != 0),
                       number = at + __popc(votes & ((1u << lane) - 1));
        if (kind != 0) {
            c.anchor_token[(size_t)head * c.k + number] = (uint32_t)t;
            c.fixed[(size_t)head * c.k + number] = kind == 3;
        }
        if (t < end)
            c.own[head * c.S + t] = kind != 0 ? (uint16_t)(number + 1) : 0;
        at += __popc(votes);
    }
}

extern "C" cudaError_t akv_comp_cover_all(const akv_comp *c, cudaStream_t stream)
{
    pool_scores<<<dim3(64, c->H), THREADS, 0, stream>>>(*c);
    take_attended<<<c->H, HEAD_THREADS, 0, stream>>>(*c);
    COMP_TRY(akv_comp_cover_rest(c, stream));
    number<<<c->H, HEAD_THREADS, 0, stream>>>(*c);
    return cudaGetLastError();
}
