/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_levels.cu - one multiplier for the layer, the level of every token, where the codes of each block begin, and
 * what is stored for every token (src/codec/allocate.c). Utilities are sorted block by block once; then the bytes of
 * any multiplier are a few searches.
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

#define SEARCHES 4096u /* together */
#define BISECT_THREADS 1024u
#define EACH (SEARCHES / BISECT_THREADS) /* of a thread, whose reads overlap */
#define STEP_ROUNDS 7 /* rounds of bisection that one launch decides */
#define ROUNDS 50     /* as allocate.c */
#define LAST_STEP ((ROUNDS + STEP_ROUNDS - 1) / STEP_ROUNDS)

/* Bracket that `rounds` rounds leave of [*low, *high]; over(i): does node i of the tree, 1 its root, ask for more? */
template <typename Over>
static __device__ __forceinline__ void descend(double *low, double *high, int rounds, Over over)
{
    uint32_t node = 1;
    for (int i = 0; i < rounds; i++) {
        const double middle = 0.5 * (*low + *high);
        const bool more = over(node, i);
        if (more)
            *low = middle;
        else
            *high = middle;
        node = 2 * node + (more ? 1 : 0);
    }
}

/* What the launch before decided about the bracket that it began with. */
static __device__ __forceinline__ void bracket_of(const akv_comp &c, int step, double *low, double *high)
{
    *low = -300.0;
    *high = 300.0;
    if (step == 0)
        return;
    const akv_comp_bisection &b = *c.bisection;
    *low = b.low[step % 2];
    *high = b.high[step % 2];
    descend(low, high, STEP_ROUNDS, [&](uint32_t node, int) { return b.over[(step - 1) % 2][node] != 0; });
}

/*
 * log2 of the multiplier bisected to the bytes: all multipliers that the next rounds can ask for at once, a block each.
 * Block b is node b of the tree of rounds; block 0 of the first launch asks for the upper end.
 */
static __global__ void __launch_bounds__(BISECT_THREADS) bisect(COMP_ARG, const int step)
{
    __shared__ double sums[33];
    __shared__ float thresholds[MOST_THRESHOLDS];
    __shared__ uint16_t here[SEARCHES];
    const uint32_t lists = 2 * c.H * c.blocks, n = c.num_levels, node = blockIdx.x;
    double low, high, bytes = 0;
    bracket_of(c, step, &low, &high);
    if (node == 0 && threadIdx.x == 0) {
        c.bisection->low[(step + 1) % 2] = low;
        c.bisection->high[(step + 1) % 2] = high;
    }
    if (node == 0 && step > 0)
        return;
    const int depth = 31 - __clz((int)(node > 0 ? node : 1));
    descend(&low, &high, depth, [&](uint32_t, int i) { return (node >> (depth - 1 - i) & 1u) != 0; });
    const double lambda = exp2(node == 0 ? high : 0.5 * (low + high));
    for (uint32_t i = threadIdx.x; i < 2 * c.H * n; i += BISECT_THREADS) {
        const akv_comp_levels &l = c.levels[i / n];
        thresholds[i] = i % n + 1 < l.hull_count ? threshold_of(l, i % n, lambda) : INFINITY;
    }
    const uint32_t together = SEARCHES / n; /* lists; a search is one threshold of one list */
    for (uint32_t first = 0; first < lists; first += together) {
        const uint32_t count = min(together, lists - first) * n;
        const float *sorted[EACH];
        float threshold[EACH];
        uint32_t from[EACH], to[EACH]; /* how many of the list are above the threshold */
        __syncthreads();
#pragma unroll
        for (uint32_t r = 0; r < EACH; r++) {
            const uint32_t i = threadIdx.x + r * BISECT_THREADS, list = first + (i < count ? i : 0) / n,
                           of = list / c.blocks, side = of / c.H, head = of % c.H;
            const uint64_t t0 = (uint64_t)(list % c.blocks) * BLOCK;
            sorted[r] = c.sorted[side] + (size_t)head * c.S + t0;
            threshold[r] = thresholds[(head * 2 + side) * n + i % n];
            from[r] = 0;
            to[r] = i >= count ? 0 : (uint32_t)(c.S - t0 < BLOCK ? c.S - t0 : BLOCK);
        }
        for (uint32_t size = BLOCK; size > 0; size /= 2) {
            float x[EACH];
#pragma unroll
            for (uint32_t r = 0; r < EACH; r++)
                x[r] = from[r] < to[r] ? __ldg(&sorted[r][(from[r] + to[r]) / 2]) : 0.0f;
#pragma unroll
            for (uint32_t r = 0; r < EACH; r++) {
                const uint32_t at = (from[r] + to[r]) / 2;
                if (from[r] >= to[r])
                    continue;
                if (x[r] > threshold[r])
                    from[r] = at + 1;
                else
                    to[r] = at;
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < EACH; r++)
            if (threadIdx.x + r * BISECT_THREADS < count)
                here[threadIdx.x + r * BISECT_THREADS] = (uint16_t)from[r];
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += BISECT_THREADS) {
            const uint32_t of = (first + i / n) / c.blocks, j = i % n;
            const akv_comp_levels &l = c.levels[of % c.H * 2 + of / c.H];
            const uint32_t mine = here[i], next = j + 2 < l.hull_count ? here[i + 1] : 0;
            if (j + 1 < l.hull_count && mine > next)
                bytes += (double)comp_run_bytes(mine - next, l.bits[l.hull_level[j + 1] - 1]);
        }
    }
    bytes = comp_block_sum(bytes, sums); /* whole numbers below 2^53 */
    if (threadIdx.x == 0)
        *(node == 0 ? &c.bisection->end_over : &c.bisection->over[step % 2][node]) = bytes > (double)c.code_bytes;
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
    if (threadIdx.x < n) {
        const akv_comp_bisection &found = *c.bisection;
        double low = found.low[LAST_STEP % 2], high = found.high[LAST_STEP % 2];
        descend(&low, &high, ROUNDS - STEP_ROUNDS * (LAST_STEP - 1),
                [&](uint32_t node, int) { return found.over[(LAST_STEP - 1) % 2][node] != 0; });
        /* not even the largest multiplier: only if a utility reaches 2^300 */
        const double lambda = high == 300.0 && found.end_over ? INFINITY : exp2(high);
        thresholds[threadIdx.x] = threshold_of(l, threadIdx.x, lambda);
    }
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
    for (int step = 0; step < LAST_STEP; step++) {
        const int rounds = ROUNDS - step * STEP_ROUNDS;
        bisect<<<1u << (rounds < STEP_ROUNDS ? rounds : STEP_ROUNDS), BISECT_THREADS, 0, stream>>>(*c, step);
    }
    assign_levels<<<grid, BLOCK, 0, stream>>>(*c);
    place_runs<<<1, 1024, 0, stream>>>(*c);
    pack_tokens<<<dim3(32, c->H, 2), 256, 0, stream>>>(*c);
    return cudaGetLastError();
}
