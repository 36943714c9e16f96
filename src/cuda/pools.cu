/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pools.cu - what span items left of one packed segment becomes partial states: anchor histograms times value anchors, residual
 * sums times the value transform. Once for all items of a segment, so that the anchors are read once and not by every item.
 */
#include "cuda/device.cuh"
#include "cuda/packed.h"

#define THREADS 512
#define WARPS (THREADS / 32)

/*
 * Block (chunk of anchors and of residual coordinates, KV head, pool). Few bytes, so all loads of a stage are in flight at once: that is
 * what the many threads are for (one thread a coordinate took 20 us of latency, 25 % of a step).
 */
template <int GROUP, int SLICES> /* rows at a time, dim / 32 */
__global__ void __launch_bounds__(THREADS, GROUP *SLICES <= 16 ? 2 : 1) akv_pool_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ float room[];
    const akv_pool pool = c.pools[blockIdx.z];
    __builtin_assume(__isGlobal(pool.packed));
    const akv_packed *p = (const akv_packed *)pool.packed;
    const uint32_t head = blockIdx.y, chunk = blockIdx.x, D = p->dim[1], k = p->num_anchors, coords = p->coords[1];
    const uint32_t first_part = c.first_part[blockIdx.z * c.H + head], num_parts = c.first_part[blockIdx.z * c.H + head + 1] - first_part;
    const uint32_t share = (k + gridDim.x - 1) / gridDim.x, a0 = chunk * share;
    const uint32_t n = a0 >= k ? 0 : k - a0 < share ? k - a0 : share;
    const uint32_t coord_share = (coords + gridDim.x - 1) / gridDim.x, z0 = chunk * coord_share;
    const uint32_t m = z0 >= coords ? 0 : coords - z0 < coord_share ? coords - z0 : coord_share;
    const float *scales = (const float *)(pool.packed + p->anchor_scales[1]) + (size_t)head * k + a0;
    const uint8_t *anchors = pool.packed + p->anchors[1] + ((size_t)head * k + a0) * D;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ float max[GROUP], sum[GROUP];
    float *weights = room, *merged = room + num_parts * GROUP; /* [parts, GROUP], [n + m, GROUP] */
    float *sums = merged + (size_t)(n + m) * GROUP;                 /* [WARPS / 2, GROUP, D] */

    akv_let_next_start();
    for (uint32_t e = threadIdx.x * 128; e < n * D; e += blockDim.x * 128) /* bring the anchors near while spans are at work */
        asm volatile("prefetch.global.L2 [%0];" ::"l"(anchors + e));
    akv_wait_for_previous();
    for (uint32_t row0 = 0; row0 < c.rows; row0 += GROUP) {
        const int rows = (int)(c.rows - row0 < GROUP ? c.rows - row0 : GROUP);
        __syncthreads();
        for (int r = warp; r < rows; r += WARPS) {
            float top = -INFINITY, total = 0.0f;
            for (uint32_t part = lane; part < num_parts; part += 32)
                top = fmaxf(top, c.states.max[((size_t)(first_part + part) * c.rows + row0 + r)]);
            top = akv_warp_max(top);
            const float origin = top == -INFINITY ? 0.0f : top;
            for (uint32_t part = lane; part < num_parts; part += 32) {
                const size_t slot = ((size_t)(first_part + part) * c.rows + row0 + r);
                const float w = expf(c.states.max[slot] - origin);
                weights[part * GROUP + r] = w;
                total += w * c.states.sum[slot];
            }
            total = akv_warp_sum(total);
            if (lane == 0) {
                max[r] = top;
                sum[r] = total;
            }
        }
        __syncthreads();
        for (uint32_t e = threadIdx.x; e < (n + m) * rows; e += blockDim.x) {
            const uint32_t r = e / (n + m), a = e % (n + m);
            const bool anchor = a < n;
            const size_t width = anchor ? c.most_anchors : D, step = (size_t)c.rows * width;
            const float *from = (anchor ? c.states.hist + a0 + a : c.states.sums + z0 + a - n) + ((size_t)first_part * c.rows + row0 + r) * width;
            float total = 0.0f;
#pragma unroll 16
            for (uint32_t part = 0; part < num_parts; part++)
                total += weights[part * GROUP + r] * from[part * step];
            merged[a * GROUP + r] = anchor ? total * scales[a] : total;
        }
        for (uint32_t e = threadIdx.x; e < (n + m) * (GROUP - rows); e += blockDim.x)
            merged[e / (GROUP - rows) * GROUP + rows + e % (GROUP - rows)] = 0.0f;
        __syncthreads();
        /* a warp takes every 16th anchor, a lane every 32nd coordinate; then the residuals likewise */
        float acc[SLICES][GROUP] = {};
        const float *units = (const float *)(pool.packed + p->units[1]) + (size_t)head * D;
#pragma unroll 4
        for (uint32_t a = warp; a < n; a += WARPS)
#pragma unroll
            for (int j = 0; j < SLICES; j++) {
                if (j * 32 + lane >= (int)D)
                    break;
                const float x = (float)((int)anchors[(size_t)a * D + j * 32 + lane] - 128);
#pragma unroll
                for (int r = 0; r < GROUP; r++)
                    acc[j][r] += x * merged[a * GROUP + r];
            }
#pragma unroll
        for (int j = 0; j < SLICES; j++) {
            const float unit = j * 32 + lane < (int)D ? units[j * 32 + lane] : 0.0f;
#pragma unroll
            for (int r = 0; r < GROUP; r++)
                acc[j][r] *= unit;
        }
        const uint32_t dim = p->basis_dim[1], cols = p->basis_cols[1];
        const int8_t *basis = (const int8_t *)(pool.packed + p->basis[1]) + (size_t)head * cols * dim;
        const float *basis_scales = (const float *)(pool.packed + p->basis_scales[1]) + (size_t)head * cols;
        for (uint32_t a = warp; a < m; a += WARPS) {
            const uint32_t z = z0 + a;
#pragma unroll
            for (int j = 0; j < SLICES; j++) {
                const uint32_t i = j * 32 + lane;
                if (i >= D)
                    break;
                const float x = z >= cols ? (i == dim + z - cols ? 1.0f : 0.0f) : i < dim ? (float)basis[(size_t)z * dim + i] * basis_scales[z] : 0.0f;
#pragma unroll
                for (int r = 0; r < GROUP; r++)
                    acc[j][r] += x * merged[(n + a) * GROUP + r];
            }
        }
        /* sixteen warps' sums to one, in a fixed order */
        for (int half = WARPS / 2; half >= 1; half /= 2) {
            if (warp >= half && warp < 2 * half)
#pragma unroll
                for (int j = 0; j < SLICES; j++)
                    if (j * 32 + lane < (int)D)
#pragma unroll
                        for (int r = 0; r < GROUP; r++)
                            sums[((warp - half) * GROUP + r) * D + j * 32 + lane] = acc[j][r];
            __syncthreads();
            if (warp < half)
#pragma unroll
                for (int j = 0; j < SLICES; j++)
                    if (j * 32 + lane < (int)D)
#pragma unroll
                        for (int r = 0; r < GROUP; r++)
                            acc[j][r] += sums[(warp * GROUP + r) * D + j * 32 + lane];
            __syncthreads();
        }
        if (warp == 0)
#pragma unroll
            for (int r = 0; r < GROUP; r++) {
                if (r >= rows)
                    break;
                const size_t slot = akv_slot(c, pool.first_slot + chunk, head, row0 + r);
#pragma unroll
                for (int j = 0; j < SLICES; j++)
                    if (j * 32 + lane < (int)D)
                        c.partials.acc[slot * D + j * 32 + lane] = acc[j][r];
                if (lane == 0) {
                    c.partials.max[slot] = max[r];
                    c.partials.sum[slot] = chunk == 0 ? sum[r] : 0.0f;
                }
            }
    }
}

static uint32_t group_of(uint32_t rows)
{
    return rows <= 4 ? 4 : 8;
}

static size_t shared_of(uint32_t parts, uint32_t anchors, uint32_t dim, uint32_t chunks, uint32_t group)
{
    return (size_t)(parts + (anchors + chunks - 1) / chunks + (dim + chunks - 1) / chunks + WARPS / 2 * dim) * group * sizeof(float);
}

static const void *kernel_of(uint32_t dim, uint32_t group)
{
#define SELECT(SLICES)                                                                                                 \
    if (dim == 32 * SLICES)                                                                                            \
        return group == 4 ? (const void *)akv_pool_kernel<4, SLICES> : (const void *)akv_pool_kernel<8, SLICES>;
    SELECT(2) SELECT(3) SELECT(4) SELECT(6) SELECT(8)
#undef SELECT
    return NULL;
}

extern "C" cudaError_t akv_cuda_prepare_pools(uint32_t most_parts, uint32_t most_anchors, uint32_t dim, uint32_t chunks, uint32_t rows)
{
    const uint32_t group = group_of(rows);
    return akv_cuda_allow_shared(kernel_of(dim, group), shared_of(most_parts, most_anchors, dim, chunks, group));
}

extern "C" cudaError_t akv_cuda_launch_pools(const akv_cuda_call *call, cudaStream_t stream)
{
    if (call->num_pools == 0)
        return cudaSuccess;
    const uint32_t group = group_of(call->rows);
    return akv_launch(kernel_of(call->dim_v, group), dim3(call->pool_chunks, call->H, call->num_pools), THREADS,
                      shared_of(call->most_parts, call->most_anchors, call->dim_v, call->pool_chunks, group), stream, call,
                      call->early_launch != 0);
}
