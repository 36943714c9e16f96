/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_nearest.cu - the nearest anchor of every token, and the rounds in which free anchors become directions of
 * many tokens (src/codec/centroids.c). The search is a product of fp16 unit rows with a running maximum, 32 tokens a
 * warp in registers, units through shared memory; most of the work of compression is here.
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define TILE AKV_COMP_NEAR_TILE
#define UNITS 64u /* in shared memory at once, twice */

template <int PAD> static __device__ __forceinline__ void fetch_units(const uint16_t *from, uint16_t *to)
{
    constexpr uint32_t chunks = PAD / 8;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < UNITS * chunks; i += THREADS)
        copy_async(to + i / chunks * comp_unit_stride<PAD>() + i % chunks * 8, from + i * 8);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/*
 * Block (tile, head): tokens from (first + tile * step) * TILE on. The product of largest size and the first of equal
 * ones; anchor 0 and product 0 where there is none above 0. refining: tokens that are fixed anchors get
 * AKV_COMP_NO_ANCHOR.
 */
template <int PAD>
static __global__ void __launch_bounds__(THREADS, 2)
    find_nearest(COMP_ARG, const int first_side, const int refining, const uint64_t first, const uint64_t step)
{
    const int side = first_side + (int)blockIdx.z;
    __shared__ __align__(16) uint16_t units[2][UNITS * comp_unit_stride<PAD>()];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t t0 = (first + blockIdx.x * step) * TILE + warp * 32 + lane / 4, last = c.S - 1;
    const uint16_t *all = c.unit16[side] + (size_t)head * c.k_rows * PAD,
                   *rows = c.rows16[side] + (size_t)head * c.S * PAD;
    uint4 a[4][PAD / 32]; /* rows t0, t0 + 8, t0 + 16, t0 + 24 */
    fetch_units<PAD>(all, units[0]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        comp_row_chunks<PAD>(a[i], rows + (t0 + 8 * i < last ? t0 + 8 * i : last) * PAD);
    float best[4] = {0, 0, 0, 0};
    uint32_t who[4] = {0, 0, 0, 0};
    const uint32_t rounds = c.k_rows / UNITS;
    for (uint32_t round = 0; round < rounds; round++) {
        await_copies();
        __syncthreads();
        if (round + 1 < rounds)
            fetch_units<PAD>(all + (size_t)(round + 1) * UNITS * PAD, units[(round + 1) % 2]);
        const uint16_t *unit = units[round % 2] + lane / 4 * comp_unit_stride<PAD>();
#pragma unroll 2
        for (uint32_t u = 0; u < UNITS; u += 8, unit += 8 * comp_unit_stride<PAD>()) {
            float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
            for (int s = 0; s < PAD / 32; s++) {
                const uint4 b = *(const uint4 *)(unit + s * 32 + lane % 4 * 8);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma_f16(acc[m], a[2 * m][s].x, a[2 * m + 1][s].x, a[2 * m][s].y, a[2 * m + 1][s].y, b.x, b.y);
                    mma_f16(acc[m], a[2 * m][s].z, a[2 * m + 1][s].z, a[2 * m][s].w, a[2 * m + 1][s].w, b.z, b.w);
                }
            }
            const uint32_t at = round * UNITS + u + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float x = acc[i / 2][i % 2 * 2 + j];
                    if (fabsf(x) > fabsf(best[i])) {
                        best[i] = x;
                        who[i] = at + j;
                    }
                }
        }
        __syncthreads(); /* this buffer is written again in the next round's fetch */
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int o = 1; o < 4; o *= 2) {
            const float x = __shfl_xor_sync(0xffffffffu, best[i], o);
            const uint32_t w = __shfl_xor_sync(0xffffffffu, who[i], o);
            if (fabsf(x) > fabsf(best[i]) || (fabsf(x) == fabsf(best[i]) && w < who[i])) {
                best[i] = x;
                who[i] = w;
            }
        }
        const uint64_t t = t0 + 8 * i;
        if (lane % 4 == 0 && t < c.S) {
            const size_t at = (size_t)head * c.S + t;
            const uint32_t own = refining ? c.own[at] : 0;
            c.nearest[side][at] =
                own != 0 && c.fixed[(size_t)head * c.k + own - 1] ? AKV_COMP_NO_ANCHOR : (uint16_t)who[i];
            c.cosine[side][at] = best[i];
        }
    }
}

extern "C" cudaError_t akv_comp_nearest(const akv_comp *c, int refining, uint64_t first, uint64_t step,
                                        cudaStream_t stream)
{
    const uint64_t tiles = (c->S + TILE - 1) / TILE;
    if (first >= tiles)
        return cudaSuccess;
    const uint32_t sides = c->pad[0] == c->pad[1] ? 2 : 1;
    const dim3 grid((uint32_t)((tiles - first + step - 1) / step), c->H, sides);
    for (int side = 0; side < 2; side += (int)sides)
        if (c->pad[side] == 64)
            find_nearest<64><<<grid, THREADS, 0, stream>>>(*c, side, refining, first, step);
        else
            find_nearest<128><<<grid, THREADS, 0, stream>>>(*c, side, refining, first, step);
    return cudaGetLastError();
}

/*
 * Anchors as the tokens they begin with, and their units; rows beyond k are zero. Block (8 anchors, head, side), a
 * warp an anchor.
 */
static __global__ void __launch_bounds__(THREADS) begin_anchors(COMP_ARG)
{
    __shared__ float tile[8 * (AKV_COMP_MAX_DIM + 1)];
    const uint32_t head = blockIdx.y, first = blockIdx.x * 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
                   a = first + warp;
    const int side = (int)blockIdx.z;
    const uint32_t dim = c.dim[side], pad = c.pad[side];
    const auto token_of = [&](uint32_t r) {
        return first + r < c.k ? c.anchor_token[(size_t)head * c.k + first + r] : NO_TOKEN;
    };
    comp_anchor_space(c, side, head, 8, tile, AKV_COMP_MAX_DIM + 1, token_of);
    const float *x = tile + warp * (AKV_COMP_MAX_DIM + 1);
    float square = 0;
    for (uint32_t d = lane; d < dim; d += 32)
        square += x[d] * x[d];
    square = akv_warp_sum(square);
    const float inverse = square > 0.0f && square < 3e38f ? rsqrtf(square) : 0.0f;
    for (uint32_t d = lane; d < pad; d += 32) {
        if (a < c.k)
            c.anchor[side][((size_t)head * c.k + a) * AKV_COMP_MAX_DIM + d] = d < dim ? x[d] : 0.0f;
        if (a < c.k_rows)
            ((__half *)c.unit16[side])[((size_t)head * c.k_rows + a) * pad + d] =
                __float2half_rn(a < c.k && d < dim ? x[d] * inverse : 0.0f);
    }
}

/* Tokens whose anchor did not stay a token are no anchors any more. Grid-stride over [H, S]. */
static __global__ void __launch_bounds__(THREADS) forget_drawn(COMP_ARG)
{
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < c.H * c.S; i += (uint64_t)gridDim.x * THREADS) {
        const uint32_t own = c.own[i];
        if (own != 0 && !c.fixed[i / c.S * c.k + own - 1])
            c.own[i] = 0;
    }
}

extern "C" cudaError_t akv_comp_refine(const akv_comp *c, uint32_t rounds, cudaStream_t stream)
{
    begin_anchors<<<dim3(c->k_rows / 8, c->H, 2), THREADS, 0, stream>>>(*c);
    const uint64_t step = c->S >= (uint64_t)16 * TILE ? 2 : 1;
    for (uint32_t round = 0; round < rounds; round++) {
        COMP_TRY(akv_comp_nearest(c, 1, round % step, step, stream));
        COMP_TRY(akv_comp_members(c, round % step, step, stream));
    }
    if (rounds > 0)
        forget_drawn<<<1024, THREADS, 0, stream>>>(*c);
    return cudaGetLastError();
}
