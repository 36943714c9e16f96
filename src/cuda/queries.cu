/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queries.cu - a step's queries as the span kernel wants them, once for each (packed segment, KV head, chunk of rows):
 * in slot order for the anchors, and as operands of every level's bits for the key residuals.
 */
#include "cuda/mma.cuh"
#include "cuda/packed.h"

#define THREADS 512
#define WARPS (THREADS / 32)

/* Queries in the coordinates of the key residuals: z [NR, D]. */
template <int NR>
static __device__ __forceinline__ void transform(const akv_packed *p, const uint8_t *base, uint32_t head,
                                                 const float *ordered, float *z)
{
    const uint32_t D = p->dim[0], n = p->basis_dim[0], cols = p->basis_cols[0], lane = threadIdx.x % 32;
    const int8_t *all = (const int8_t *)(base + p->basis[0]) + (size_t)head * cols * n;
    const float *scales = (const float *)(base + p->basis_scales[0]) + (size_t)head * cols;
    const uint32_t split = n % 16 == 0 && cols * 4 <= THREADS ? 4
                           : n % 8 == 0                       ? 2
                                                              : 1; /* threads a column, four bytes at a time */
    for (uint32_t e0 = threadIdx.x - lane; e0 < cols * split; e0 += THREADS) {
        const uint32_t e = e0 + lane, col = e / split < cols ? e / split : cols - 1, piece = e % split,
                       length = n / split;
        const int8_t *basis = all + col * n + piece * length;
        const float *q = ordered + piece * length;
        float sum[NR] = {};
        if (n % 4 == 0 && length % 4 == 0) {
#pragma unroll 8
            for (uint32_t i = 0; i < length; i += 4) {
                const char4 u = *(const char4 *)(basis + i);
#pragma unroll
                for (int r = 0; r < NR; r++)
                    sum[r] += (float)u.x * q[r * D + i] + (float)u.y * q[r * D + i + 1] +
                              (float)u.z * q[r * D + i + 2] + (float)u.w * q[r * D + i + 3];
            }
        } else
#pragma unroll 4
            for (uint32_t i = 0; i < length; i++)
#pragma unroll
                for (int r = 0; r < NR; r++)
                    sum[r] += (float)basis[i] * q[r * D + i];
#pragma unroll
        for (int r = 0; r < NR; r++) {
            for (uint32_t o = 1; o < split; o <<= 1)
                sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], o);
            if (piece == 0 && e < cols * split)
                z[r * D + col] = sum[r] * scales[col];
        }
    }
    for (uint32_t e = threadIdx.x; e < NR * (D - n); e += THREADS) {
        const uint32_t r = e / (D - n), i = e % (D - n);
        z[r * D + cols + i] = ordered[r * D + n + i];
    }
}

template <int NR> __global__ void __launch_bounds__(THREADS) akv_queries_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ __align__(16) float room[];
    akv_let_next_start();
    const uint32_t pool = blockIdx.z, head = blockIdx.y, chunk = blockIdx.x, row0 = chunk * NR, lane = threadIdx.x % 32,
                   warp = threadIdx.x / 32;
    const uint32_t rows = c.rows - row0 < (uint32_t)NR ? c.rows - row0 : (uint32_t)NR;
    const uint8_t *base = c.pools[pool].packed;
    __builtin_assume(__isGlobal(base));
    const akv_packed *p = (const akv_packed *)base;
    const uint32_t sequence = c.pools[pool].sequence, D = p->dim[0], L = p->num_levels, tiles = p->key_tiles;
    const akv_query_layout at = akv_lay_out_queries(D, NR, L, tiles);
    uint8_t *out = c.prepared + ((size_t)(pool * c.H + head) * gridDim.x + chunk) * c.prepared_bytes;
    float *natural = room, *ordered = natural + NR * D, *z = ordered + NR * D, *slotted = z + NR * D,
          *factors = slotted + NR * D; /* [2, L, NR]: of bits, of 4-bit codes */
    const uint16_t *slots = (const uint16_t *)(base + p->slots), *order = (const uint16_t *)(base + p->coords_order);
    const float *units = (const float *)(base + p->units[0]) + (size_t)head * D;
    const akv_key_level *levels = (const akv_key_level *)(base + p->key_levels) + head * L;
    __shared__ akv_key_level level[AKV_PACK_MAX_LEVELS];
    /* All tables at once: with a cold cache their latencies would add up. */
    const uint32_t C = p->coords[0], basis_bytes = p->basis_cols[0] * p->basis_dim[0];
    akv_key_plane *planes = (akv_key_plane *)(factors + 2 * L * NR);
    float *offsets = (float *)(planes + tiles * 32);
    for (uint32_t e = threadIdx.x; e < tiles * 16; e += THREADS)
        copy_async(planes + e * 2, (const akv_key_plane *)(base + p->key_planes) + (size_t)head * tiles * 32 + e * 2);
    for (uint32_t e = threadIdx.x * 128; e < basis_bytes; e += THREADS * 128)
        fetch_line(base + p->basis[0] + (size_t)head * basis_bytes + e);
    if (threadIdx.x < 4)
        fetch_line(threadIdx.x == 0   ? (const void *)slots
                   : threadIdx.x == 1 ? (const void *)order
                   : threadIdx.x == 2
                       ? (const void *)units
                       : (const void *)((const float *)(base + p->basis_scales[0]) + (size_t)head * p->basis_cols[0]));
    for (uint32_t e = threadIdx.x; e < L * C; e += THREADS)
        offsets[e] = ((const float *)(base + p->key_offsets))[head * L * C + e];
    for (uint32_t e = threadIdx.x; e < NR * D; e += THREADS) {
        const uint32_t r = e / D, i = e % D;
        natural[e] =
            r < rows ? akv_load(c.step.queries, c.query_dtype, akv_query_at(c, sequence, head, row0 + r) + i) : 0.0f;
    }
    if (threadIdx.x < L)
        level[threadIdx.x] = levels[threadIdx.x];
    await_copies();
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < NR * D; e += THREADS) {
        const uint32_t r = e / D, i = e % D;
        ordered[e] = natural[r * D + order[i]];
        slotted[e] = natural[r * D + slots[i]] * units[i];
    }
    __syncthreads();
    transform<NR>(p, base, head, ordered, z);
    for (uint32_t r = warp; r < NR; r += WARPS) { /* rows to about 16 at most: fp16 then has all its bits */
        float most = 0.0f;
        for (uint32_t i = lane; i < D; i += 32)
            most = fmaxf(most, fabsf(slotted[r * D + i]));
        most = akv_warp_max(most);
        const float norm = most > 0.0f && most < INFINITY ? exp2f(4.0f - ceilf(log2f(most))) : 1.0f;
        for (uint32_t i = lane; i < D; i += 32)
            ((float *)(out + at.rows))[r * D + i] = slotted[r * D + i] * norm;
        if (lane == 0)
            ((float *)(out + at.norms))[r] = c.sm_scale / norm;
    }
    __syncthreads();
    for (uint32_t l = warp; l < L; l += WARPS) { /* a level's largest operand, and what it adds when all bits are 0 */
        const akv_key_level k = level[l];
        const akv_key_plane *list = planes + k.first_plane;
        const uint32_t paired = k.units / 2 * 32, n = ((k.units + 1u) / 2 + k.four) * 32;
        const uint32_t bits = (k.units + 1u) / 2 * 32; /* 4-bit codes are steps up to 104: a scale of their own */
        float most[NR] = {}, most4[NR] = {}, base_sum[NR] = {}, upper[NR] = {};
#pragma unroll 4
        for (uint32_t i = lane; i < n; i += 32) {
            const akv_key_plane plane = list[i];
#pragma unroll
            for (int r = 0; r < NR; r++) {
                const float x = z[r * D + plane.coord] * plane.weight;
                most[r] = fmaxf(most[r], i < bits ? fabsf(x) : 0.0f);
                most4[r] = fmaxf(most4[r], i < bits ? 0.0f : fabsf(x));
                upper[r] += i < paired && i % 32 >= 16 ? x : 0.0f;
            }
        }
        for (uint32_t i = lane; i < C; i += 32) {
            const float offset = offsets[l * C + i];
#pragma unroll
            for (int r = 0; r < NR; r++)
                base_sum[r] += z[r * D + i] * offset;
        }
#pragma unroll
        for (int r = 0; r < NR; r++) {
            most[r] = akv_warp_max(most[r]);
            most4[r] = akv_warp_max(most4[r]);
            base_sum[r] = akv_warp_sum(base_sum[r]) * c.sm_scale;
            upper[r] = akv_warp_sum(upper[r]) * c.sm_scale;
            if (lane == 0) {
                factors[l * NR + r] = most[r] > 0.0f && most[r] < INFINITY ? -32512.0f / most[r] : 0.0f;
                factors[(L + l) * NR + r] = most4[r] > 0.0f && most4[r] < INFINITY ? 32512.0f / most4[r] : 0.0f;
                ((float4 *)(out + at.levels))[l * NR + r] =
                    make_float4(most[r] / 32512.0f * c.sm_scale, base_sum[r], base_sum[r] + upper[r],
                                most4[r] / 32512.0f * c.sm_scale);
            }
        }
    }
    __syncthreads();
    /*
     * A lane's operand words: planes 4c .. 4c + 3 and those 16 further on; columns 2g and 2g + 1 are the upper and lower
     * byte of head g. Bits of units come out as 0 or -1 (one in four as 1 - bit: span_keys.cuh), so their weights are
     * negative.
     */
    const uint32_t used = level[L - 1].first_tile + (level[L - 1].units + 1u) / 2 + level[L - 1].four,
                   column = lane / 4;
    for (uint32_t all = warp, l = 0; all < used; all += WARPS) {
        while (l + 1 < L && all >= level[l + 1].first_tile)
            l++;
        const uint32_t which = all - level[l].first_tile < (level[l].units + 1u) / 2 ? l : L + l;
        const akv_key_plane *list = planes + all * 32 + lane % 4 * 4;
#pragma unroll
        for (int t = 0; t < NR / 4; t++) {
            const uint32_t g = column / 2 + 4 * t;
            const float f = factors[which * NR + g];
            uint32_t word[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const akv_key_plane plane = list[i / 4 * 16 + i % 4];
                const int x = __float2int_rn(z[g * D + plane.coord] * plane.weight * f), hi = (x + 128) >> 8;
                word[i / 4] |= (uint32_t)((column % 2 == 0 ? hi : x - hi * 256) & 255) << (8 * (i % 4));
            }
            ((uint2 *)(out + at.tiles))[(all * (NR / 4) + t) * 32 + lane] = make_uint2(word[0], word[1]);
        }
    }
}

static const void *kernel_of(uint32_t row_chunk)
{
    return row_chunk == 4 ? (const void *)akv_queries_kernel<4> : (const void *)akv_queries_kernel<8>;
}

extern "C" size_t akv_cuda_queries_shared(const akv_span_shape *s)
{
    return (size_t)(4 * s->dim + 2 * s->num_levels) * s->row_chunk * 4 +
           (size_t)s->key_tiles * 32 * sizeof(akv_key_plane) + (size_t)s->num_levels * s->dim * 4;
}

extern "C" cudaError_t akv_cuda_prepare_queries(uint32_t row_chunk, size_t shared_bytes)
{
    return akv_cuda_allow_shared(kernel_of(row_chunk), shared_bytes);
}

extern "C" cudaError_t akv_cuda_launch_queries(const akv_cuda_call *call, cudaStream_t stream)
{
    if (call->num_pools == 0)
        return cudaSuccess;
    const dim3 grid((call->rows + call->row_chunk - 1) / call->row_chunk, call->H, call->num_pools);
    return akv_launch(kernel_of(call->row_chunk), grid, THREADS, call->prepare_shared_bytes, stream, call, false);
}
