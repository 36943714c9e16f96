/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_members.cu - free anchors as the directions of their members (src/codec/centroids.c). Tokens are sorted by
 * their nearest anchor first, equal ones in their own order, so that sums do not depend on anything else.
 */
#include "cuda/compress_device.cuh"

#define TILE AKV_COMP_NEAR_TILE
#define SORT_THREADS 1024
#define SORT_WARPS (SORT_THREADS / 32)
#define CHUNK 1024u /* anchors counted at once */

struct Sort {
    uint32_t count[SORT_WARPS][CHUNK]; /* of each warp's tokens; then those of the warps before */
    uint32_t start[CHUNK];
    uint32_t scan[33];
};

/*
 * Counting sort of the tokens of tiles first, first + step, ...: block (head, side), each warp has a stretch of them.
 * List in c.sorted, which is of later use; where each anchor's part begins in c.first_member.
 */
static __global__ void __launch_bounds__(SORT_THREADS) sort_members(COMP_ARG, const uint64_t first, const uint64_t step)
{
    extern __shared__ float4 memory[];
    Sort &s = *(Sort *)memory;
    const uint32_t head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int side = (int)blockIdx.y;
    const uint64_t tiles = (c.S + TILE - 1) / TILE, n = (first < tiles ? (tiles - first + step - 1) / step : 0) * TILE,
                   each = (n / 32 + SORT_WARPS - 1) / SORT_WARPS * 32, begin = warp * each < n ? warp * each : n,
                   end = begin + each < n ? begin + each : n; /* n is a multiple of 32 */
    const uint16_t *nearest = c.nearest[side] + (size_t)head * c.S;
    uint32_t *list = (uint32_t *)c.sorted[side] + (size_t)head * c.S,
             *first_member = c.first_member[side] + (size_t)head * (c.k + 1), before = 0;
    const auto token_of = [&](uint64_t i) { return (first + i / TILE * step) * TILE + i % TILE; };
    for (uint32_t a0 = 0; a0 < c.k; a0 += CHUNK) {
        const auto anchor_of = [&](uint64_t token) { /* within this chunk, or CHUNK */
            const uint32_t near = token < c.S ? nearest[token] : AKV_COMP_NO_ANCHOR;
            return near != AKV_COMP_NO_ANCHOR && near >= a0 && near - a0 < CHUNK ? near - a0 : CHUNK;
        };
        uint32_t *count = s.count[warp];
        for (uint32_t a = lane; a < CHUNK; a += 32)
            count[a] = 0;
        __syncwarp();
#pragma unroll 4
        for (uint64_t i = begin + lane; i < end; i += 32) {
            const uint32_t a = anchor_of(token_of(i)), same = __match_any_sync(0xffffffffu, a);
            if (a < CHUNK && lane == (uint32_t)__ffs((int)same) - 1)
                count[a] += (uint32_t)__popc(same);
            __syncwarp();
        }
        __syncthreads();
        uint32_t sum = 0, total;
        for (uint32_t w = 0; w < SORT_WARPS; w++) {
            const uint32_t x = s.count[w][threadIdx.x];
            s.count[w][threadIdx.x] = sum;
            sum += x;
        }
        const uint32_t start = before + comp_block_scan(sum, s.scan, &total);
        s.start[threadIdx.x] = start;
        if (a0 + threadIdx.x < c.k)
            first_member[a0 + threadIdx.x] = start;
        __syncthreads();
#pragma unroll 4
        for (uint64_t i = begin + lane; i < end; i += 32) {
            const uint64_t token = token_of(i);
            const uint32_t a = anchor_of(token), same = __match_any_sync(0xffffffffu, a),
                           at = a < CHUNK ? s.start[a] + count[a] + __popc(same & ((1u << lane) - 1)) : 0;
            __syncwarp();
            if (a < CHUNK) {
                list[at] = (uint32_t)token;
                if (lane == (uint32_t)__ffs((int)same) - 1)
                    count[a] += (uint32_t)__popc(same);
            }
            __syncwarp();
        }
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        first_member[c.k] = before;
}

#define WARPS 8u
#define ANCHORS 8u /* of a block, which shares their members out evenly: some anchors have hundreds */
#define TOGETHER 8 /* rows read at once */

/*
 * Each free anchor becomes the direction of its members' sum, as long as they are on average: block (8 anchors, head,
 * side). A warp sums a stretch of the members, then joins one anchor's sums.
 */
static __global__ void __launch_bounds__(WARPS * 32) gather_members(COMP_ARG)
{
    __shared__ float partial[WARPS][ANCHORS][AKV_COMP_MAX_DIM];
    __shared__ float energies[WARPS][ANCHORS];
    __shared__ uint32_t starts[ANCHORS + 1], has[WARPS];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, a0 = blockIdx.x * ANCHORS;
    const int side = (int)blockIdx.z;
    const uint32_t dim = c.dim[side], pad = c.pad[side], each = pad / 32;
    const uint8_t *fixed = c.fixed + (size_t)head * c.k;
    if (threadIdx.x <= ANCHORS)
        starts[threadIdx.x] = c.first_member[side][(size_t)head * (c.k + 1) + min(a0 + threadIdx.x, c.k)];
    __syncthreads();
    const uint32_t *list = (const uint32_t *)c.sorted[side] + (size_t)head * c.S;
    const uint32_t n = starts[ANCHORS] - starts[0], begin = starts[0] + (uint32_t)((uint64_t)n * warp / WARPS),
                   end = starts[0] + (uint32_t)((uint64_t)n * (warp + 1) / WARPS);
    uint32_t seen = 0;
    for (uint32_t j = 0; j < ANCHORS; j++) {
        const uint32_t from = max(starts[j], begin), to = min(starts[j + 1], end);
        if (from >= to || fixed[a0 + j])
            continue;
        float sum[4] = {0, 0, 0, 0}, energy = 0;
        for (uint32_t i0 = from; i0 < to; i0 += 32) {
            const uint32_t here = min(to - i0, 32u);
            uint32_t token = 0;
            float weight = 0; /* along x length: the row is of length 1 */
            if (lane < here) {
                token = list[i0 + lane];
                const size_t at = (size_t)head * c.S + token;
                const float cosine = c.cosine[side][at];
                weight = cosine * c.energy[side][at];
                energy += cosine * weight;
            }
            for (uint32_t i = 0; i < here; i += TOGETHER) {
                uint2 row[TOGETHER];
#pragma unroll
                for (uint32_t r = 0; r < TOGETHER; r++) {
                    const uint32_t t = __shfl_sync(0xffffffffu, token, (i + r) % 32);
                    const uint16_t *x = c.rows16[side] + ((size_t)head * c.S + t) * pad + lane * each;
                    row[r] = make_uint2(0, 0);
                    if (i + r < here)
                        row[r] = each == 4 ? *(const uint2 *)x : make_uint2(*(const uint32_t *)x, 0);
                }
#pragma unroll
                for (uint32_t r = 0; r < TOGETHER; r++) {
                    const float w = __shfl_sync(0xffffffffu, weight, (i + r) % 32);
                    const float2 p = __half22float2(as_half2(row[r].x)), q = __half22float2(as_half2(row[r].y));
                    if (i + r < here) {
                        sum[0] += w * p.x;
                        sum[1] += w * p.y;
                        sum[2] += w * q.x;
                        sum[3] += w * q.y;
                    }
                }
            }
        }
        energy = akv_warp_sum(energy);
        *(float4 *)&partial[warp][j][lane * 4] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        if (lane == 0)
            energies[warp][j] = energy;
        seen |= 1u << j;
    }
    if (lane == 0)
        has[warp] = seen;
    __syncthreads();
    const uint32_t a = a0 + warp;
    if (a >= c.k || fixed[a])
        return;
    float sum[4] = {0, 0, 0, 0}, energy = 0;
    for (uint32_t w = 0; w < WARPS; w++)
        if (has[w] >> warp & 1u) {
            const float4 x = *(const float4 *)&partial[w][warp][lane * 4];
            sum[0] += x.x;
            sum[1] += x.y;
            sum[2] += x.z;
            sum[3] += x.w;
            energy += energies[w][warp];
        }
    const float square = akv_warp_sum(sum[0] * sum[0] + sum[1] * sum[1] + sum[2] * sum[2] + sum[3] * sum[3]);
    if (!(square > 0.0f && square < 1e37f && energy < 1e37f))
        return; /* without members it stays what it is */
    const float length = sqrtf(energy / (float)(starts[warp + 1] - starts[warp]) / square), inverse = rsqrtf(square);
    for (uint32_t j = 0; j < each; j++) {
        const uint32_t d = lane * each + j;
        if (d < dim)
            c.anchor[side][((size_t)head * c.k + a) * AKV_COMP_MAX_DIM + d] = sum[j] * length;
        ((__half *)c.unit16[side])[((size_t)head * c.k_rows + a) * pad + d] = __float2half_rn(sum[j] * inverse);
    }
}

extern "C" cudaError_t akv_comp_members(const akv_comp *c, uint64_t first, uint64_t step, cudaStream_t stream)
{
    COMP_TRY(comp_shared(sort_members, sizeof(Sort)));
    sort_members<<<dim3(c->H, 2), SORT_THREADS, sizeof(Sort), stream>>>(*c, first, step);
    gather_members<<<dim3((c->k + ANCHORS - 1) / ANCHORS, c->H, 2), WARPS * 32, 0, stream>>>(*c);
    return cudaGetLastError();
}
