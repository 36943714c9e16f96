/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_levels.cu - one multiplier for the layer, the level of every token, where the codes of each block begin, and
 * what is stored for every token (src/codec/allocate.c). Utilities are sorted block by block once; then the bytes of
 * any multiplier are a few searches, and one block of threads bisects it.
 */
#include "cuda/compress_device.cuh"

#define BLOCK AKV_BLOCK_TOKENS
#define MOST_THRESHOLDS 4096u /* of all heads and sides */

static __device__ __forceinline__ float prior_of(const akv_comp &c, int side, uint32_t head, size_t at)
{
    if (side == AKV_SIDE_V)
        return fminf(c.left[1][at], 3e38f);
    const float per_key = (float)(c.query_sq[head] / c.dim[0]) * c.scale * c.scale;
    return fminf(c.deviation[at] * c.left[0][at] * per_key, 3e38f);
}

/* Utility and prior of a block of tokens: block (block, head, side). */
static __global__ void __launch_bounds__(BLOCK) sum_utilities(COMP_ARG)
{
    __shared__ double shared[33];
    const uint32_t head = blockIdx.y;
    const int side = (int)blockIdx.z;
    const uint64_t t = (uint64_t)blockIdx.x * BLOCK + threadIdx.x;
    const size_t at = (size_t)head * c.S + t;
    const bool in = t < c.S && c.rank[side][at] >= 0.0f;
    const double utility = comp_block_sum(in ? (double)c.rank[side][at] : 0.0, shared);
    const double prior = comp_block_sum(in ? (double)prior_of(c, side, head, at) : 0.0, shared);
    if (threadIdx.x == 0) {
        double *out = c.sums + (((size_t)side * c.H + head) * c.blocks + blockIdx.x) * 2;
        out[0] = utility;
        out[1] = prior;
    }
}

static __global__ void __launch_bounds__(BLOCK) total_utilities(COMP_ARG)
{
    __shared__ double shared[33];
    const size_t n = (size_t)2 * c.H * c.blocks;
    double utility = 0, prior = 0;
    for (size_t i = threadIdx.x; i < n; i += BLOCK) {
        utility += c.sums[2 * i];
        prior += c.sums[2 * i + 1];
    }
    utility = comp_block_sum(utility, shared);
    prior = comp_block_sum(prior, shared);
    if (threadIdx.x == 0)
        c.sums[2 * n] = utility == 0.0 && prior > 0.0  ? 1.0
                        : prior > 0.0 && c.floor > 0.0 ? c.floor * utility / prior
                                                       : 0.0;
}

/* The prior added, the values' factor, and each block of tokens sorted, falling: block (block, head, side). */
static __global__ void __launch_bounds__(BLOCK) finish_ranks(COMP_ARG)
{
    __shared__ float x[BLOCK];
    const uint32_t head = blockIdx.y, i = threadIdx.x;
    const int side = (int)blockIdx.z;
    const uint64_t t = (uint64_t)blockIdx.x * BLOCK + i;
    const size_t at = (size_t)head * c.S + t;
    float rank = -1.0f;
    if (t < c.S && c.rank[side][at] >= 0.0f) {
        const double boost = side == AKV_SIDE_V ? c.value_boost : 1.0;
        const double u = (c.rank[side][at] + c.sums[(size_t)4 * c.H * c.blocks] * prior_of(c, side, head, at)) * boost;
        rank = (float)(u < 3e38 ? u : 3e38);
        c.rank[side][at] = rank;
    }
    x[i] = rank;
    for (uint32_t size = 2; size <= BLOCK; size *= 2)
        for (uint32_t gap = size / 2; gap > 0; gap /= 2) {
            __syncthreads();
            const uint32_t other = i ^ gap;
            if (other > i) {
                const float a = x[i], b = x[other];
                if ((i & size) == 0 ? a < b : a > b) {
                    x[i] = b;
                    x[other] = a;
                }
            }
        }
    __syncthreads();
    if (t < c.S)
        c.sorted[side][at] = x[i];
}

/* The largest float not above lambda / slope: comparing floats then decides as comparing doubles would. */
static __device__ __forceinline__ float threshold_of(const akv_comp_levels &l, uint32_t i, double lambda)
{
    const double exact = lambda / l.hull_slope[i + 1];
    return exact < 3.4e38 ? __double2float_rd(exact) : INFINITY;
}

/*
 * log2 of the multiplier bisected to the bytes, one block. A search is one (block of tokens, threshold): its place in
 * the sorted list lies between those of the multipliers that bound the bisection.
 */
static __global__ void __launch_bounds__(1024) bisect(COMP_ARG)
{
    __shared__ double sums[33];
    __shared__ float thresholds[MOST_THRESHOLDS];
    const uint32_t lists = 2 * c.H * c.blocks, n = c.num_levels;
    uint16_t *places = c.places;
    uint16_t *low_at = places, *high_at = places + lists * n, *here = places + 2 * (size_t)lists * n;
    for (uint32_t i = threadIdx.x; i < lists * n; i += 1024) {
        const uint64_t t0 = (uint64_t)(i / n % c.blocks) * BLOCK;
        low_at[i] = 0;
        high_at[i] = (uint16_t)(c.S - t0 < BLOCK ? c.S - t0 : BLOCK);
    }
    double low = -300.0, high = 300.0;
    for (int round = 0; round < 51; round++) { /* the last one looks at the result */
        const double middle = round < 50 ? 0.5 * (low + high) : high, lambda = exp2(middle);
        double bytes = 0;
        for (uint32_t i = threadIdx.x; i < 2 * c.H * n; i += 1024) {
            const akv_comp_levels &l = c.levels[i / n];
            thresholds[i] = i % n + 1 < l.hull_count ? threshold_of(l, i % n, lambda) : INFINITY;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < lists * n; i += 1024) { /* how many of a list are above a threshold */
            const uint32_t list = i / n, j = i % n, of = list / c.blocks, side = of / c.H, head = of % c.H,
                           which = (head * 2 + side) * n + j;
            const uint64_t t0 = (uint64_t)(list % c.blocks) * BLOCK;
            const float *sorted = c.sorted[side] + (size_t)head * c.S + t0;
            const float threshold = thresholds[which];
            uint32_t from = low_at[i], to = high_at[i];
            while (from < to) {
                const uint32_t at = (from + to) / 2;
                if (sorted[at] > threshold)
                    from = at + 1;
                else
                    to = at;
            }
            here[i] = (uint16_t)from;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < lists * n; i += 1024) {
            const uint32_t list = i / n, j = i % n, of = list / c.blocks;
            const akv_comp_levels &l = c.levels[of % c.H * 2 + of / c.H];
            const uint32_t next = j + 2 < l.hull_count ? here[i + 1] : 0;
            if (j + 1 < l.hull_count && here[i] > next)
                bytes += (double)comp_run_bytes(here[i] - next, l.bits[l.hull_level[j + 1] - 1]);
        }
        bytes = comp_block_sum(bytes, sums); /* whole numbers below 2^53 */
        const bool over = bytes > (double)c.code_bytes;
        if (round == 50) {
            if (threadIdx.x == 0)
                *c.lambda = over ? INFINITY : lambda;
            return;
        }
        if (over)
            low = middle;
        else
            high = middle;
        for (uint32_t i = threadIdx.x; i < lists * n; i += 1024)
            if (over)
                high_at[i] = here[i]; /* larger multipliers leave fewer */
            else
                low_at[i] = here[i];
    }
}

/* Levels for the multiplier, and the bytes of each block: block (block, head, side). */
static __global__ void __launch_bounds__(BLOCK) assign_levels(COMP_ARG)
{
    __shared__ uint32_t counts[AKV_MAX_LEVELS + 1];
    __shared__ float thresholds[AKV_MAX_LEVELS];
    const uint32_t head = blockIdx.y;
    const int side = (int)blockIdx.z;
    const akv_comp_levels &l = c.levels[head * 2 + side];
    const uint32_t n = l.hull_count - 1;
    if (threadIdx.x <= AKV_MAX_LEVELS)
        counts[threadIdx.x] = 0;
    if (threadIdx.x < n)
        thresholds[threadIdx.x] = threshold_of(l, threadIdx.x, *c.lambda);
    __syncthreads();
    const uint64_t t = (uint64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (t < c.S) {
        const float rank = c.rank[side][(size_t)head * c.S + t];
        uint32_t i = 0;
        while (i < n && rank > thresholds[i])
            i++;
        const uint32_t level = l.hull_level[i];
        c.level[side][(size_t)head * c.S + t] = (uint8_t)level;
        atomicAdd(&counts[level], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t bytes = 0, residuals = 0;
        for (uint32_t level = 1; level <= c.num_levels; level++)
            if (counts[level] > 0) {
                bytes += comp_run_bytes(counts[level], l.bits[level - 1]);
                residuals += counts[level];
            }
        c.block_bytes[((size_t)head * c.blocks + blockIdx.x) * 2 + side] = (uint32_t)bytes;
        atomicAdd(&c.found->num_residuals[side], (unsigned long long)residuals);
    }
}

/* Where each (head, block, side) begins: one block. */
static __global__ void __launch_bounds__(1024) place_runs(COMP_ARG)
{
    __shared__ unsigned long long shared[33];
    unsigned long long *out = (unsigned long long *)(c.blob + c.section[AKV_SEC_RANKS]), before = 0, total;
    const size_t n = (size_t)c.H * c.blocks * 2;
    for (size_t first = 0; first < n; first += 1024) {
        const size_t i = first + threadIdx.x;
        const unsigned long long at =
            comp_block_scan(i < n ? (unsigned long long)c.block_bytes[i] : 0ull, shared, &total);
        if (i < n)
            out[i] = before + at;
        before += total;
    }
    if (threadIdx.x == 0)
        out[n] = before;
}

/* Indices, coefficients and bit-planes of levels, a thread a byte: grid-stride, (head, side) = (y, z). */
static __global__ void __launch_bounds__(256) pack_tokens(COMP_ARG)
{
    const uint32_t head = blockIdx.y;
    const int side = (int)blockIdx.z;
    const size_t row = (size_t)head * c.S;
    const uint64_t index_bytes = (c.S * c.index_bits + 7) / 8, coeff_bytes = (c.S + 1) / 2, plane_bytes = (c.S + 7) / 8;
    uint32_t planes = 0;
    while (c.num_levels >> planes != 0)
        planes++;
    uint8_t *index = c.blob + c.section[AKV_SEC_INDEX + side] + head * index_bytes;
    uint8_t *coeff = c.blob + c.section[AKV_SEC_COEFF + side] + head * coeff_bytes;
    uint8_t *levels = c.blob + c.section[AKV_SEC_LEVELS + side] + head * planes * plane_bytes;
    const uint64_t first = (uint64_t)blockIdx.x * 256 + threadIdx.x, step = (uint64_t)gridDim.x * 256;
    for (uint64_t j = first; j < index_bytes; j += step) {
        uint32_t byte = 0;
        for (uint64_t t = j * 8 / c.index_bits; t < c.S && t * c.index_bits < j * 8 + 8; t++) {
            const int64_t shift = (int64_t)(t * c.index_bits) - (int64_t)(j * 8);
            const uint32_t number = c.nearest[side][row + t];
            byte |= shift >= 0 ? number << shift : number >> -shift;
        }
        index[j] = (uint8_t)byte;
    }
    for (uint64_t j = first; j < coeff_bytes; j += step)
        coeff[j] = (uint8_t)((c.coeff[side][row + 2 * j] & 15) |
                             (2 * j + 1 < c.S ? (c.coeff[side][row + 2 * j + 1] & 15) << 4 : 0));
    for (uint64_t j = first; j < plane_bytes; j += step)
        for (uint32_t p = 0; p < planes; p++) {
            uint32_t byte = 0;
            for (uint64_t t = j * 8; t < j * 8 + 8 && t < c.S; t++)
                byte |= ((uint32_t)c.level[side][row + t] >> p & 1u) << (t % 8);
            levels[p * plane_bytes + j] = (uint8_t)byte;
        }
}

extern "C" cudaError_t akv_comp_levels_of(const akv_comp *c, cudaStream_t stream)
{
    const dim3 grid(c->blocks, c->H, 2);
    sum_utilities<<<grid, BLOCK, 0, stream>>>(*c);
    total_utilities<<<1, BLOCK, 0, stream>>>(*c);
    finish_ranks<<<grid, BLOCK, 0, stream>>>(*c);
    bisect<<<1, 1024, 0, stream>>>(*c);
    assign_levels<<<grid, BLOCK, 0, stream>>>(*c);
    place_runs<<<1, 1024, 0, stream>>>(*c);
    pack_tokens<<<dim3(32, c->H, 2), 256, 0, stream>>>(*c);
    return cudaGetLastError();
}
