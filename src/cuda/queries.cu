/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queries.cu - a step's queries as the span kernel wants them, once for each (packed segment, KV head, chunk of rows):
 * in slot order for the anchors, and as operands of every level's bits for the key residuals. The chain of reads from
 * cold memory is what it takes: the list's entry, which for the first one comes with the launch, then everything else
 * at once. Blocks of the span kernel begin beside those of this one and ask for their own tables meanwhile.
 */
#include "cuda/mma.cuh"
#include "cuda/packed.h"
#include "cuda/weights.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

/* Two bytes of `w`, from number `first`, less 128, as two bf16 numbers. */
static __device__ __forceinline__ uint32_t two_bf16(uint32_t w, uint32_t first)
{
    constexpr float BIAS = 8388608.0f + 128.0f; /* 2^23: the byte is the last of its mantissa */
    const float x = __uint_as_float(prmt(w, 0x4b000000u, 0x7440u + first)) - BIAS,
                y = __uint_as_float(prmt(w, 0x4b000000u, 0x7441u + first)) - BIAS;
    return pack_bf16(x, y);
}

/* Queries in the coordinates of the key residuals: where things lie, and this warp's part of the product. */
struct query_transform {
    uint32_t cols, padded, n, depth; /* depth: operands of 16 dims each */
    uint32_t pair, step, steps;      /* a warp has a pair of tiles of columns, and every so manieth operand */
    bool works;
    const uint4 *operands;

    __device__ __forceinline__ query_transform(const akv_packed *p, const uint8_t *base, uint32_t head)
    {
        const uint32_t warp = threadIdx.x / 32;
        cols = p->basis_cols[0], n = p->basis_dim[0];
        padded = (cols + 31) / 32 * 32, depth = cols == 0 ? 0 : (n + 15) / 16;
        const uint32_t pairs = cols == 0 ? 1 : padded / 32;
        pair = warp % pairs, step = warp / pairs, steps = WARPS / pairs;
        works = step < steps;
        operands = (const uint4 *)(base + p->basis[0] + (size_t)head * depth * 16 * padded);
        operands += pair * 32 + threadIdx.x % 32;
    }
    /* Number `at` of this warp's operands. */
    __device__ __forceinline__ uint4 operand(uint32_t at) const
    {
        return works && step + at * steps < depth ? __ldg(operands + (size_t)(step + at * steps) * padded)
                                                  : make_uint4(0x80808080u, 0x80808080u, 0x80808080u, 0x80808080u);
    }

    /* Queries as two bf16 numbers each: 16 bits; what the keys' codes add to a logit is small beside the anchors'. */
    template <int NR>
    __device__ __forceinline__ void multiply(uint32_t at, uint4 w, uint32_t D, const float *natural,
                                             const uint16_t *order, float acc[2][4]) const
    {
        const uint32_t lane = threadIdx.x % 32, row = lane / 4, col = lane % 4;
        const float *q = natural + (NR == 4 ? row & 3 : row) * D;
        uint32_t high[2], low[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t i = (step + at * steps) * 16 + 8 * j + 2 * col;
            const float x = i < n ? q[order[i]] : 0.0f, y = i + 1 < n ? q[order[i + 1]] : 0.0f;
            high[j] = pack_bf16(x, y);
            low[j] = pack_bf16(x - __uint_as_float(high[j] << 16), y - __uint_as_float(high[j] & 0xffff0000u));
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint32_t a = m == 0 ? w.x : w.z, b = m == 0 ? w.y : w.w;
            const uint32_t a0 = two_bf16(a, 0), a1 = two_bf16(a, 2), a2 = two_bf16(b, 0), a3 = two_bf16(b, 2);
            if (NR == 4)
                mma_bf16(acc[m], a0, a1, a2, a3, row < 4 ? high[0] : low[0], row < 4 ? high[1] : low[1]);
            else {
                mma_bf16(acc[m], a0, a1, a2, a3, high[0], high[1]);
                mma_bf16(acc[m], a0, a1, a2, a3, low[0], low[1]);
            }
        }
    }
};

template <int NR> __global__ void __launch_bounds__(THREADS) akv_queries_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ __align__(16) akv_pool pool;
    __shared__ akv_key_level level[AKV_PACK_MAX_LEVELS];
    __shared__ float reduced[WARPS][4 * NR];
    akv_let_next_start();
    const uint32_t number = blockIdx.z, head = blockIdx.y, chunk = blockIdx.x, row0 = chunk * NR, tid = threadIdx.x,
                   lane = tid % 32, warp = tid / 32, row = lane / 4, col = lane % 4;
    const uint32_t rows = c.rows - row0 < (uint32_t)NR ? c.rows - row0 : (uint32_t)NR;
    if (tid < sizeof pool / 16)
        ((uint4 *)&pool)[tid] =
            number == 0 ? ((const uint4 *)&c.first_pool)[tid] : __ldg((const uint4 *)(c.pools + number) + tid);
    __syncthreads();
    const uint8_t *base = pool.packed;
    __builtin_assume(__isGlobal(base));
    const akv_packed *p = &pool.head_of_packed;
    const uint32_t D = p->dim[0], L = p->num_levels, tiles = p->key_tiles, C = p->coords[0];
    const akv_query_layout at = akv_lay_out_queries(D, NR, L, tiles);
    uint8_t *out = c.prepared + ((size_t)(number * c.H + head) * gridDim.x + chunk) * c.prepared_bytes;
    akv_key_plane *planes = (akv_key_plane *)memory;
    float *offsets = (float *)(planes + tiles * 32), *natural = offsets + L * C, *z = natural + NR * D,
          *sums = z + NR * D,                         /* of each warp: [NR, 32] */
        *factors = sums + WARPS * NR * 32,            /* [2, L, NR]: of bits, of 4-bit codes */
            *units = factors + 2 * L * NR, *scales = units + D;
    uint16_t *slots = (uint16_t *)(scales + D), *order = slots + D;
    const query_transform t(p, base, head);
    const uint4 first = t.operand(0), second = t.operand(1);
    for (uint32_t e = tid; e < tiles * 16; e += THREADS)
        copy_async(planes + e * 2, (const akv_key_plane *)(base + p->key_planes) + (size_t)head * tiles * 32 + e * 2);
    for (uint32_t e = tid; e < L * C; e += THREADS)
        copy_word_async(offsets + e, (const float *)(base + p->key_offsets) + (size_t)head * L * C + e);
    for (uint32_t e = tid; e < D; e += THREADS) {
        copy_word_async(units + e, (const float *)(base + p->units[0]) + (size_t)head * D + e);
        if (e < t.cols)
            copy_word_async(scales + e, (const float *)(base + p->basis_scales[0]) + (size_t)head * t.cols + e);
        const uint32_t *words = (const uint32_t *)(base + (e < D / 2 ? p->slots : p->coords_order));
        copy_word_async((uint32_t *)slots + e, words + (e < D / 2 ? e : e - D / 2));
    }
    for (uint32_t e = tid; e < NR * D; e += THREADS) {
        const uint32_t r = e / D, i = e % D;
        const int64_t from = akv_query_at(c, pool.sequence, head, row0 + r) + i;
        natural[e] = r < rows ? akv_load(c.step.queries, c.query_dtype, from) : 0.0f;
    }
    if (tid < L)
        level[tid] = ((const akv_key_level *)(base + p->key_levels))[head * L + tid];
    await_copies();
    __syncthreads();
    if (t.works && t.cols > 0) {
        float acc[2][4] = {};
        t.multiply<NR>(0, first, D, natural, order, acc);
        t.multiply<NR>(1, second, D, natural, order, acc);
#pragma unroll 1
        for (uint32_t i = 2; t.step + i * t.steps < t.depth; i++)
            t.multiply<NR>(i, t.operand(i), D, natural, order, acc);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (NR == 4)
                    acc[m][j] += __shfl_xor_sync(0xffffffffu, acc[m][j], 2);
                if (2 * col < NR)
                    sums[(warp * NR + 2 * col + j % 2) * 32 + m * 16 + j / 2 * 8 + row] = acc[m][j];
            }
    }
    if (warp >= WARPS - NR) { /* rows to about 16 at most: fp16 then has all its bits */
        const uint32_t r = warp - (WARPS - NR);
        float most = 0.0f;
        for (uint32_t i = lane; i < D; i += 32)
            most = fmaxf(most, fabsf(natural[r * D + slots[i]] * units[i]));
        most = akv_warp_max(most);
        const float norm = most > 0.0f && most < INFINITY ? exp2f(4.0f - ceilf(log2f(most))) : 1.0f;
        for (uint32_t i = lane; i < D; i += 32)
            ((float *)(out + at.rows))[r * D + i] = natural[r * D + slots[i]] * units[i] * norm;
        if (lane == 0)
            ((float *)(out + at.norms))[r] = c.sm_scale / norm;
    }
    __syncthreads();
    for (uint32_t e = tid; e < NR * D; e += THREADS) {
        const uint32_t r = e / D, i = e % D;
        float x = 0.0f;
        if (i < t.cols) {
            for (uint32_t w = i / 32; w < t.steps * (t.padded / 32); w += t.padded / 32)
                x += sums[(w * NR + r) * 32 + i % 32];
            x *= scales[i];
        } else if (i < C)
            x = natural[r * D + order[t.n + i - t.cols]]; /* coded as it is */
        z[e] = x;
    }
    __syncthreads();
    /* a level's largest operand, and what it adds when all bits are 0: by some warps each */
    const uint32_t each = WARPS / L;
    if (warp / each < L) {
        const uint32_t l = warp / each, begin = warp % each * 32 + lane;
        const akv_key_level k = level[l];
        const akv_key_plane *list = planes + k.first_plane;
        const uint32_t paired = k.units / 2 * 32, n = ((k.units + 1u) / 2 + k.four) * 32;
        const uint32_t bits = (k.units + 1u) / 2 * 32; /* 4-bit codes are steps up to 104: a scale of their own */
        float most[NR] = {}, most4[NR] = {}, sum[2 * NR] = {}; /* bits are 0; upper units */
#pragma unroll 4
        for (uint32_t i = begin; i < n; i += each * 32) {
            const akv_key_plane plane = list[i];
#pragma unroll
            for (int r = 0; r < NR; r++) {
                const float x = z[r * D + plane.coord] * plane.weight;
                most[r] = fmaxf(most[r], i < bits ? fabsf(x) : 0.0f);
                most4[r] = fmaxf(most4[r], i < bits ? 0.0f : fabsf(x));
                sum[NR + r] += i < paired && i % 32 >= 16 ? x : 0.0f;
            }
        }
#pragma unroll 2
        for (uint32_t i = begin; i < C; i += each * 32) {
            const float offset = offsets[l * C + i];
#pragma unroll
            for (int r = 0; r < NR; r++)
                sum[r] += z[r * D + i] * offset;
        }
        const float total = row_sums<2 * NR>(sum, lane);
        if (lane < 2 * NR)
            reduced[warp][2 * NR + lane] = total * c.sm_scale;
#pragma unroll
        for (int r = 0; r < NR; r++) { /* not negative: they order as whole numbers do */
            const int x = __reduce_max_sync(0xffffffffu, __float_as_int(most[r])),
                      y = __reduce_max_sync(0xffffffffu, __float_as_int(most4[r]));
            if (lane == 0) {
                reduced[warp][r] = __int_as_float(x);
                reduced[warp][NR + r] = __int_as_float(y);
            }
        }
    }
    __syncthreads();
    if (tid < L * NR) {
        const uint32_t l = tid / NR, r = tid % NR;
        float most = 0.0f, most4 = 0.0f, zero = 0.0f, upper = 0.0f;
        for (uint32_t w = l * each; w < (l + 1) * each; w++) {
            most = fmaxf(most, reduced[w][r]);
            most4 = fmaxf(most4, reduced[w][NR + r]);
            zero += reduced[w][2 * NR + r];
            upper += reduced[w][3 * NR + r];
        }
        factors[l * NR + r] = most > 0.0f && most < INFINITY ? -32512.0f / most : 0.0f;
        factors[(L + l) * NR + r] = most4 > 0.0f && most4 < INFINITY ? 32512.0f / most4 : 0.0f;
        ((float4 *)(out + at.levels))[l * NR + r] =
            make_float4(most / 32512.0f * c.sm_scale, zero, zero + upper, most4 / 32512.0f * c.sm_scale);
    }
    __syncthreads();
    /*
     * A lane's operand words: planes 4c .. 4c + 3 and those 16 further on; columns 2g and 2g + 1 are the upper and
     * lower byte of head g. Bits of units come out as 0 or -1 (one in four as 1 - bit: span_keys.cuh), so their weights
     * are negative.
     */
    const uint32_t used = level[L - 1].first_tile + (level[L - 1].units + 1u) / 2 + level[L - 1].four;
    for (uint32_t i = warp, l = 0; i < used; i += WARPS) {
        while (l + 1 < L && i >= level[l + 1].first_tile)
            l++;
        const uint32_t which = i - level[l].first_tile < (level[l].units + 1u) / 2 ? l : L + l;
        const akv_key_plane *list = planes + i * 32 + col * 4;
#pragma unroll
        for (int t4 = 0; t4 < NR / 4; t4++) {
            const uint32_t g = row / 2 + 4 * t4;
            const float f = factors[which * NR + g];
            uint32_t word[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const akv_key_plane plane = list[e / 4 * 16 + e % 4];
                const int x = __float2int_rn(z[g * D + plane.coord] * plane.weight * f), hi = (x + 128) >> 8;
                word[e / 4] |= (uint32_t)((row % 2 == 0 ? hi : x - hi * 256) & 255) << (8 * (e % 4));
            }
            ((uint2 *)(out + at.tiles))[(i * (NR / 4) + t4) * 32 + lane] = make_uint2(word[0], word[1]);
        }
    }
}

static const void *kernel_of(uint32_t row_chunk)
{
    return row_chunk == 4 ? (const void *)akv_queries_kernel<4> : (const void *)akv_queries_kernel<8>;
}

extern "C" size_t akv_cuda_queries_shared(const akv_span_shape *s)
{
    return (size_t)s->key_tiles * 32 * sizeof(akv_key_plane) +
           ((size_t)s->num_levels * s->dim + (2 * s->dim + WARPS * 32 + 2 * s->num_levels) * s->row_chunk +
            3 * s->dim) * 4;
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
