/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_observe.cu - what the observation queries attend to, as src/codec/observe.c: softmax statistics over all
 * tokens, then scores and outputs. Logits are computed twice (and once more for the utilities) instead of stored: they
 * would take as much memory as the cache.
 */
#include "cuda/compress_device.cuh"

#define THREADS 512
#define ROWS AKV_COMP_ROWS
#define TILE AKV_COMP_TILE
#define STRIDE (AKV_COMP_MAX_DIM + 4) /* operands A, and B by rows */
#define V_STRIDE (AKV_COMP_MAX_DIM + 8)
#define P_STRIDE (TILE + 4)

struct Shared {
    float q[ROWS * STRIDE];
    float k[TILE * STRIDE];
    float v[TILE * V_STRIDE];
    float p[ROWS * P_STRIDE];
    float max[2][ROWS], sum[2][ROWS];
};

/*
 * Block (range, head), rows from first_row on. Warp w: rows w % 8 * 16, tokens w / 8 * 32 of a tile; then coordinates
 * w / 8 * pad / 2 of the outputs.
 */
template <bool SCORES> static __global__ void __launch_bounds__(THREADS) observe(COMP_ARG, const uint32_t first_row)
{
    extern __shared__ float4 memory[];
    Shared &s = *(Shared *)memory;
    const uint32_t range = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = warp % 8 * 16, half = warp / 8, pad_k = c.pad[0], pad_v = c.pad[1], g = lane / 4,
                   two = lane % 4 * 2;
    const uint64_t begin = range * c.range_tokens, end = begin + c.range_tokens < c.S ? begin + c.range_tokens : c.S;
    for (uint32_t i = threadIdx.x; i < ROWS * pad_k; i += THREADS) {
        const uint32_t r = i / pad_k, d = i % pad_k;
        s.q[r * STRIDE + d] = first_row + r < c.rows
                                  ? tf32(c.query[((size_t)head * c.rows + first_row + r) * AKV_COMP_MAX_DIM + d])
                                  : 0.0f;
    }
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, inverse[2] = {0, 0};
    uint64_t seen[2];
    for (int h = 0; h < 2; h++) {
        const uint32_t row = first_row + row0 + g + 8 * h;
        seen[h] = row < c.rows ? c.S - c.W + row % c.W + 1 : 0; /* up to the row's own token */
        if (SCORES && row < c.rows) {
            max[h] = c.max[(size_t)head * c.rows + row];
            inverse[h] = c.inverse[(size_t)head * c.rows + row];
        }
    }
    float out[8][4];
#pragma unroll
    for (int j = 0; j < 8; j++)
        out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.0f;
    for (uint64_t t0 = begin; t0 < end; t0 += TILE) {
        const auto token_of = [&](uint32_t r) { return t0 + r < end ? (uint32_t)(t0 + r) : NO_TOKEN; };
        __syncthreads();
        comp_load(c, AKV_SIDE_K, head, TILE, s.k, STRIDE, token_of);
        if (SCORES)
            comp_load(c, AKV_SIDE_V, head, TILE, s.v, V_STRIDE, token_of);
        __syncthreads();
        if (c.source[0].dtype == AKV_F32)
            for (uint32_t i = threadIdx.x; i < TILE * STRIDE; i += THREADS)
                s.k[i] = tf32(s.k[i]);
        if (SCORES && c.source[1].dtype == AKV_F32)
            for (uint32_t i = threadIdx.x; i < TILE * V_STRIDE; i += THREADS)
                s.v[i] = tf32(s.v[i]);
        __syncthreads();
        float acc[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
        for (uint32_t k = 0; k < pad_k; k += 8) {
            float a[4];
            load_a_tf32(a, s.q, STRIDE, row0, k);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *b = s.k + (half * 32 + n * 8 + g) * STRIDE + k + lane % 4;
                mma_tf32(acc[n], a, b[0], b[4]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint64_t token = t0 + half * 32 + n * 8 + two + (i & 1);
                const float l = akv_cap(acc[n][i] * c.scale, c.cap);
                acc[n][i] = token < seen[i / 2] && token < end ? l : -INFINITY;
            }
        if constexpr (!SCORES) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float m = max[h];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    m = fmaxf(m, fmaxf(acc[n][2 * h], acc[n][2 * h + 1]));
                if (m == -INFINITY)
                    continue;
                float add = 0;
#pragma unroll
                for (int n = 0; n < 4; n++)
                    add += __expf(acc[n][2 * h] - m) + __expf(acc[n][2 * h + 1] - m);
                sum[h] = sum[h] * (max[h] == -INFINITY ? 0.0f : __expf(max[h] - m)) + add;
                max[h] = m;
            }
        } else {
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float p = acc[n][i] == -INFINITY ? 0.0f : __expf(acc[n][i] - max[i / 2]) * inverse[i / 2];
                    s.p[(row0 + g + i / 2 * 8) * P_STRIDE + half * 32 + n * 8 + two + (i & 1)] = p;
                }
            __syncthreads();
            if (threadIdx.x < TILE * 4) { /* four threads a token, 32 rows each */
                const uint32_t t = threadIdx.x / 4, part = threadIdx.x % 4;
                float score = 0;
                for (uint32_t r = 0; r < ROWS / 4; r++)
                    score += s.p[(part * (ROWS / 4) + r) * P_STRIDE + t];
                score += __shfl_xor_sync(0xffffffffu, score, 1);
                score += __shfl_xor_sync(0xffffffffu, score, 2);
                if (part == 0 && t0 + t < end) {
                    float *to = &c.score[(size_t)head * c.S + t0 + t];
                    *to = (first_row == 0 ? 0.0f : *to) + score / (float)c.G;
                }
            }
            for (uint32_t k = 0; k < TILE; k += 8) {
                float a[4];
                load_a_tf32(a, s.p, P_STRIDE, row0, k);
                for (int i = 0; i < 4; i++)
                    a[i] = tf32(a[i]);
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    if (n * 16 >= (int)pad_v)
                        break;
                    const float *b = s.v + (k + lane % 4) * V_STRIDE + half * (pad_v / 2) + n * 8 + g;
                    mma_tf32(out[n], a, b[0], b[4 * V_STRIDE]);
                }
            }
        }
    }
    const size_t part = ((size_t)head * c.num_ranges + range) * c.rows + first_row;
    if constexpr (SCORES) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t row = row0 + g + i / 2 * 8, d = half * (pad_v / 2) + n * 8 + two + (i & 1);
                if (first_row + row < c.rows && n * 16 < (int)pad_v)
                    c.part_out[(part + row) * AKV_COMP_MAX_DIM + d] = out[n][i];
            }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            for (int o = 1; o < 4; o *= 2) {
                const float m = __shfl_xor_sync(0xffffffffu, max[h], o), x = __shfl_xor_sync(0xffffffffu, sum[h], o),
                            most = fmaxf(m, max[h]);
                if (most != -INFINITY)
                    sum[h] = sum[h] * __expf(max[h] - most) + x * __expf(m - most);
                max[h] = most;
            }
            if (lane % 4 == 0) {
                s.max[half][row0 + g + 8 * h] = max[h];
                s.sum[half][row0 + g + 8 * h] = sum[h];
            }
        }
        __syncthreads();
        if (threadIdx.x < ROWS && first_row + threadIdx.x < c.rows) {
            const float a = s.max[0][threadIdx.x], b = s.max[1][threadIdx.x], most = fmaxf(a, b);
            c.part_max[part + threadIdx.x] = most;
            c.part_sum[part + threadIdx.x] =
                most == -INFINITY ? 0.0f
                                  : s.sum[0][threadIdx.x] * __expf(a - most) + s.sum[1][threadIdx.x] * __expf(b - most);
        }
    }
}

/* Block (row, head), one warp. */
static __global__ void __launch_bounds__(32) merge_statistics(COMP_ARG)
{
    const uint32_t row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
    const size_t at = ((size_t)head * c.num_ranges + lane) * c.rows + row;
    const float m = lane < c.num_ranges ? c.part_max[at] : -INFINITY, most = akv_warp_max(m);
    const float sum = akv_warp_sum(m == -INFINITY ? 0.0f : c.part_sum[at] * expf(m - most));
    if (lane == 0) {
        c.max[(size_t)head * c.rows + row] = most;
        c.inverse[(size_t)head * c.rows + row] = 1.0f / sum;
    }
}

static __global__ void __launch_bounds__(AKV_COMP_MAX_DIM) merge_outputs(COMP_ARG)
{
    __shared__ float shared[33];
    const uint32_t row = blockIdx.x, head = blockIdx.y, d = threadIdx.x;
    float y = 0;
    if (d < c.pad[1])
        for (uint32_t i = 0; i < c.num_ranges; i++)
            y += c.part_out[(((size_t)head * c.num_ranges + i) * c.rows + row) * AKV_COMP_MAX_DIM + d];
    c.output[((size_t)head * c.rows + row) * AKV_COMP_MAX_DIM + d] = y;
    ((__half *)c.output16)[((size_t)head * c.rows + row) * AKV_COMP_MAX_DIM + d] =
        __float2half_rn(fminf(65504.0f, fmaxf(-65504.0f, y)));
    const float square = comp_block_sum(y * y, shared);
    if (d == 0)
        c.output_sq[(size_t)head * c.rows + row] = square;
}

extern "C" cudaError_t akv_comp_observe(const akv_comp *c, cudaStream_t stream)
{
    const dim3 grid(c->num_ranges, c->H);
    COMP_TRY(comp_shared(observe<false>, sizeof(Shared)));
    COMP_TRY(comp_shared(observe<true>, sizeof(Shared)));
    for (uint32_t row = 0; row < c->rows; row += ROWS)
        observe<false><<<grid, THREADS, sizeof(Shared), stream>>>(*c, row);
    merge_statistics<<<dim3(c->rows, c->H), 32, 0, stream>>>(*c);
    for (uint32_t row = 0; row < c->rows; row += ROWS)
        observe<true><<<grid, THREADS, sizeof(Shared), stream>>>(*c, row);
    merge_outputs<<<dim3(c->rows, c->H), AKV_COMP_MAX_DIM, 0, stream>>>(*c);
    return cudaGetLastError();
}
