/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_observe.cu - what the observation queries attend to, as src/codec/observe.c: outputs and softmax statistics
 * in one pass over all tokens, then scores. Logits are computed twice (and once more for the utilities) instead of
 * stored: they would take as much memory as the cache. Maxima are of logits to base 2.
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define ROWS AKV_COMP_ROWS
#define TILE AKV_COMP_TILE
#define LOG2E 1.442695041f
static_assert(ROWS == WARPS * 16 && TILE * 4 == THREADS, "a warp has 16 rows; four threads load a token");

template <int PAD> struct Shared {
    uint16_t query[ROWS * comp_unit_stride<PAD>()], key[TILE * comp_unit_stride<PAD>()];
    uint16_t value[TILE * (PAD + 8)]; /* read by columns */
    float sums[WARPS][TILE];
};

/* Tokens of this block. */
static __device__ __forceinline__ void part_of(const akv_comp &c, uint64_t *begin, uint64_t *end)
{
    *begin = blockIdx.x * c.part_tokens;
    *end = *begin + c.part_tokens < c.S ? *begin + c.part_tokens : c.S;
}

/* Capped logits to base 2 of 16 rows and a tile of tokens; -infinity where a row does not look. */
template <int PAD>
static __device__ __forceinline__ void logits_of(const akv_comp &c, const Shared<PAD> &s, uint32_t row0, uint64_t t0,
                                                 uint64_t end, const uint32_t seen[2], float acc[8][4])
{
    const uint32_t two = threadIdx.x % 4 * 2;
    comp_logits<PAD>(acc, s.query, s.key, row0);
    const bool all = t0 + TILE <= c.earlier && t0 + TILE <= end;
    const float factor = c.scale * LOG2E;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint64_t token = t0 + n * 8 + two + (i & 1);
            const float l = c.cap > 0.0f ? akv_cap(acc[n][i] * c.scale, c.cap) * LOG2E : acc[n][i] * factor;
            acc[n][i] = all || (token < seen[i / 2] && token < end) ? l : -INFINITY;
        }
}

static __device__ __forceinline__ void seen_of(const akv_comp &c, uint32_t row0, uint32_t seen[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = row0 + threadIdx.x % 32 / 4 + 8 * h;
        seen[h] = row < c.rows ? (uint32_t)c.earlier + row % c.W + 1 : 0; /* up to the row's own token */
    }
}

/* Outputs and statistics of rows from first_row on over a part of the tokens: block (part, head). */
template <int PAD> static __global__ void __launch_bounds__(THREADS, 2) outputs(COMP_ARG, const uint32_t first_row)
{
    extern __shared__ float4 memory[];
    Shared<PAD> &s = *(Shared<PAD> *)memory;
    const uint32_t part = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    uint64_t begin, end;
    uint32_t seen[2];
    part_of(c, &begin, &end);
    seen_of(c, first_row + row0, seen);
    comp_load_rows<PAD>(c, c.query16, head, first_row, ROWS, s.query);
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, out[PAD / 8][4];
#pragma unroll
    for (int n = 0; n < PAD / 8; n++)
        out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    const bool active = first_row + row0 < c.rows;
    for (uint64_t t0 = begin; t0 < end; t0 += TILE) {
        const uint32_t r = threadIdx.x / 4, token = t0 + r < end ? (uint32_t)(t0 + r) : NO_TOKEN;
        uint4 x[PAD / 32], y[PAD / 32];
        comp_token_chunks<PAD>(c, x, AKV_SIDE_K, head, token);
        comp_token_chunks<PAD>(c, y, AKV_SIDE_V, head, token);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PAD / 32; j++) {
            *(uint4 *)(s.key + r * comp_unit_stride<PAD>() + j * 32 + threadIdx.x % 4 * 8) = x[j];
            *(uint4 *)(s.value + r * (PAD + 8) + j * 32 + threadIdx.x % 4 * 8) = y[j];
        }
        __syncthreads();
        if (!active)
            continue;
        float acc[8][4];
        logits_of<PAD>(c, s, row0, t0, end, seen, acc);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = max[h];
#pragma unroll
            for (int n = 0; n < 8; n++)
                most = fmaxf(most, fmaxf(acc[n][2 * h], acc[n][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const float base = most == -INFINITY ? 0.0f : most, shrink = akv_exp2(max[h] - base);
            max[h] = most;
            sum[h] *= shrink;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                acc[n][2 * h] = akv_exp2(acc[n][2 * h] - base);
                acc[n][2 * h + 1] = akv_exp2(acc[n][2 * h + 1] - base);
                sum[h] += acc[n][2 * h] + acc[n][2 * h + 1];
            }
            if (__any_sync(0xffffffffu, shrink != 1.0f))
#pragma unroll
                for (int n = 0; n < PAD / 8; n++) {
                    out[n][2 * h] *= shrink;
                    out[n][2 * h + 1] *= shrink;
                }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t a[4] = {pack_halves(acc[2 * k][0], acc[2 * k][1]), pack_halves(acc[2 * k][2], acc[2 * k][3]),
                                   pack_halves(acc[2 * k + 1][0], acc[2 * k + 1][1]),
                                   pack_halves(acc[2 * k + 1][2], acc[2 * k + 1][3])};
            const uint16_t *from = s.value + (k * 16 + lane % 16) * (PAD + 8) + lane / 16 * 8;
#pragma unroll
            for (int n = 0; n < PAD / 8; n += 2) {
                uint32_t b[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                             : "r"((uint32_t)__cvta_generic_to_shared(from + n * 8))
                             : "memory");
                mma_f16(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_f16(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = first_row + row0 + lane / 4 + 8 * h;
        const size_t at = ((size_t)head * c.num_parts + part) * c.rows + row;
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        if (row >= c.rows)
            continue;
        if (lane % 4 == 0) {
            c.part_max[at] = max[h];
            c.part_sum[at] = sum[h];
        }
#pragma unroll
        for (int n = 0; n < PAD / 8; n++)
            *(float2 *)&c.part_out[at * AKV_COMP_MAX_DIM + n * 8 + lane % 4 * 2] =
                make_float2(out[n][2 * h], out[n][2 * h + 1]);
    }
}

/* Parts of a row joined: block (row, head), a thread a coordinate. */
static __global__ void __launch_bounds__(AKV_COMP_MAX_DIM) merge_parts(COMP_ARG)
{
    __shared__ float shared[33], factor[AKV_COMP_PARTS];
    const uint32_t row = blockIdx.x, head = blockIdx.y, d = threadIdx.x;
    const size_t at = (size_t)head * c.rows + row;
    static_assert(AKV_COMP_PARTS == 32, "a lane a part");
    if (d < 32) {
        const size_t from = ((size_t)head * c.num_parts + d) * c.rows + row;
        const float max = d < c.num_parts ? c.part_max[from] : -INFINITY, most = akv_warp_max(max),
                    weight = max == -INFINITY ? 0.0f : exp2f(max - most),
                    inverse = 1.0f / akv_warp_sum(d < c.num_parts ? c.part_sum[from] * weight : 0.0f);
        factor[d] = weight * inverse;
        if (d == 0) {
            c.max[at] = most;
            c.inverse[at] = inverse;
        }
    }
    __syncthreads();
    float y = 0;
    if (d < c.pad[1])
        for (uint32_t i = 0; i < c.num_parts; i++)
            y += factor[i] * c.part_out[(((size_t)head * c.num_parts + i) * c.rows + row) * AKV_COMP_MAX_DIM + d];
    ((__half *)c.output16)[at * AKV_COMP_MAX_DIM + d] = __float2half_rn(fminf(65504.0f, fmaxf(-65504.0f, y)));
    const float square = comp_block_sum(y * y, shared);
    if (d == 0)
        c.output_sq[at] = square;
}

/* What the rows from first_row on give to each token of a part, in all: block (part, head). */
template <int PAD> static __global__ void __launch_bounds__(THREADS, 2) scores(COMP_ARG, const uint32_t first_row)
{
    extern __shared__ float4 memory[];
    Shared<PAD> &s = *(Shared<PAD> *)memory;
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = warp * 16;
    uint64_t begin, end;
    uint32_t seen[2];
    float bias[2];
    part_of(c, &begin, &end);
    seen_of(c, first_row + row0, seen);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t row = first_row + row0 + lane / 4 + 8 * h;
        const size_t at = (size_t)head * c.rows + row;
        bias[h] = row < c.rows ? log2f(c.inverse[at]) - c.max[at] : -INFINITY;
    }
    comp_load_rows<PAD>(c, c.query16, head, first_row, ROWS, s.query);
    for (uint64_t t0 = begin; t0 < end; t0 += TILE) {
        const uint32_t r = threadIdx.x / 4, token = t0 + r < end ? (uint32_t)(t0 + r) : NO_TOKEN;
        uint4 x[PAD / 32];
        comp_token_chunks<PAD>(c, x, AKV_SIDE_K, head, token);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PAD / 32; j++)
            *(uint4 *)(s.key + r * comp_unit_stride<PAD>() + j * 32 + threadIdx.x % 4 * 8) = x[j];
        __syncthreads();
        float acc[8][4], sums[16]; /* of each of this lane's tokens */
        logits_of<PAD>(c, s, row0, t0, end, seen, acc);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                sums[2 * n + odd] = akv_exp2(acc[n][odd] + bias[0]) + akv_exp2(acc[n][2 + odd] + bias[1]);
        /* Over the 8 lanes that hold other rows: each ends up with two of the 16 sums. */
#pragma unroll
        for (int half = 8, bit = 16; bit >= 4; half /= 2, bit /= 2)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < half) {
                    const float mine = lane & bit ? sums[i + half] : sums[i],
                                other = lane & bit ? sums[i] : sums[i + half];
                    sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, bit);
                }
        const uint32_t n = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
        *(float2 *)&s.sums[warp][n * 8 + lane % 4 * 2] = make_float2(sums[0], sums[1]);
        __syncthreads();
        if (threadIdx.x < TILE && t0 + threadIdx.x < end) {
            float score = 0;
            for (uint32_t w = 0; w < WARPS; w++)
                score += s.sums[w][threadIdx.x];
            float *to = &c.score[(size_t)head * c.S + t0 + threadIdx.x];
            *to = (first_row == 0 ? 0.0f : *to) + score / (float)c.G;
        }
    }
}

template <int PAD> static cudaError_t observe(const akv_comp *c, cudaStream_t stream)
{
    const dim3 grid(c->num_parts, c->H);
    COMP_TRY(comp_shared(outputs<PAD>, sizeof(Shared<PAD>)));
    COMP_TRY(comp_shared(scores<PAD>, sizeof(Shared<PAD>)));
    for (uint32_t row = 0; row < c->rows; row += ROWS)
        outputs<PAD><<<grid, THREADS, sizeof(Shared<PAD>), stream>>>(*c, row);
    merge_parts<<<dim3(c->rows, c->H), AKV_COMP_MAX_DIM, 0, stream>>>(*c);
    for (uint32_t row = 0; row < c->rows; row += ROWS)
        scores<PAD><<<grid, THREADS, sizeof(Shared<PAD>), stream>>>(*c, row);
    return cudaGetLastError();
}

extern "C" cudaError_t akv_comp_observe(const akv_comp *c, cudaStream_t stream)
{
    return c->pad[0] == 64 && c->pad[1] == 64 ? observe<64>(c, stream) : observe<128>(c, stream);
}
