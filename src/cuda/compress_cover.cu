/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_cover.cu - anchors for coverage, as src/codec/coverage.c: tokens drawn with probability proportional to what
 * the anchors so far leave of key and value, 128 at a time, of which the best 32 stay. All heads go through the rounds
 * together; their number is known beforehand, so the host never waits. Where nothing is left to cover, the first tokens
 * that are no anchors fill a round up.
 */
#include "cuda/compress_device.cuh"

#include <cooperative_groups.h>

#define THREADS 256
#define HEAD_THREADS 1024 /* kernels with one block a head */
#define CANDIDATES AKV_COMP_CANDIDATES
#define JUDGES AKV_COMP_JUDGES

/* 1 / energy of a side: block (head, side). */
static __global__ void __launch_bounds__(HEAD_THREADS) weigh_sides(COMP_ARG)
{
    __shared__ double shared[33];
    double sum = 0;
    for (uint64_t t = threadIdx.x; t < c.earlier; t += HEAD_THREADS)
        sum += c.energy[blockIdx.y][blockIdx.x * c.S + t];
    sum = comp_block_sum(sum, shared);
    if (threadIdx.x == 0)
        c.cover[blockIdx.x].weight[blockIdx.y] = sum > 0.0 && isfinite(sum) ? 1.0 / sum : 0.0;
}

/* The tokens that coverage looks at: every cover_step-th tile. */
static __device__ __forceinline__ uint64_t covered_token(const akv_comp &c, uint64_t i)
{
    return i / AKV_COMP_COVER_TILE * c.cover_step * AKV_COMP_COVER_TILE + i % AKV_COMP_COVER_TILE;
}

/* Unit rows of n tokens into shared memory, zeros up to a multiple of 8. */
template <int PAD>
static __device__ __forceinline__ void gather_units(const akv_comp &c, int side, uint32_t head, const uint32_t *tokens,
                                                    uint32_t n, uint16_t *out)
{
    constexpr uint32_t chunks = PAD / 8;
    for (uint32_t i = threadIdx.x; i < (n + 7) / 8 * 8 * chunks; i += blockDim.x) {
        const uint32_t r = i / chunks, at = i % chunks * 8;
        *(uint4 *)(out + r * comp_unit_stride<PAD>() + at) =
            r < n ? *(const uint4 *)(c.rows16[side] + ((size_t)head * c.S + tokens[r]) * PAD + at)
                  : make_uint4(0, 0, 0, 0);
    }
}

/*
 * What the units of this batch leave of every token: block (tile, head, side). given: batch of the tokens chosen
 * before from this one on, or -1 for the tokens kept last.
 */
template <int PAD, int UNITS>
static __global__ void __launch_bounds__(THREADS) shrink(COMP_ARG, const int64_t given, const int first_side)
{
    __shared__ __align__(16) uint16_t units[UNITS * comp_unit_stride<PAD>()];
    __shared__ float shared[33];
    const int side = first_side + (int)blockIdx.z;
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t n = given < 0                          ? c.cover[head].num
                       : c.num_given - given < CANDIDATES ? (uint32_t)(c.num_given - given)
                                                          : CANDIDATES;
    gather_units<PAD>(c, side, head, given < 0 ? c.cover[head].tokens : c.given + (size_t)head * c.k + given, n, units);
    const uint64_t first = covered_token(c, (uint64_t)blockIdx.x * AKV_COMP_COVER_TILE) + warp * 16 + lane / 4;
    const uint64_t last = c.S - 1;
    uint4 low[PAD / 32], high[PAD / 32];
    const uint16_t *rows = c.rows16[side] + (size_t)head * c.S * PAD;
    comp_row_chunks<PAD>(low, rows + (first < last ? first : last) * PAD);
    comp_row_chunks<PAD>(high, rows + (first + 8 < last ? first + 8 : last) * PAD);
    __syncthreads();
    float best[2] = {0, 0};
    for (uint32_t u = 0; u < n; u += 8) {
        float acc[4] = {0, 0, 0, 0};
        comp_products<PAD>(acc, low, high, units + (u + lane / 4) * comp_unit_stride<PAD>());
#pragma unroll
        for (int i = 0; i < 4; i++)
            best[i / 2] = fmaxf(best[i / 2], acc[i] * acc[i]);
    }
    float sum = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 1));
        best[h] = fmaxf(best[h], __shfl_xor_sync(0xffffffffu, best[h], 2));
        const uint64_t t = first + 8 * h;
        if (lane % 4 == 0 && t < c.earlier) {
            float *left = &c.left[side][head * c.S + t];
            const float x = fmaxf(0.0f, fminf(*left, c.energy[side][head * c.S + t] * (1.0f - best[h])));
            *left = x;
            sum += c.mask[head * c.S + t] ? 0.0f : x;
        }
    }
    sum = comp_block_sum(sum, shared);
    if (threadIdx.x == 0)
        c.tile_left[side][head * c.cover_tiles + blockIdx.x] = sum;
}

/* ------------------------------------------------------------------------------------------------------ a round */

#define BLOCKS                                                                                                         \
    8u /* a cluster: one head. Blocks 0..3 have a quarter of the judges on the key side, the others on the value side */
#define SHARE (2 * JUDGES / BLOCKS)
#define MOST_TILES 1024u /* whose cumulated weights fit into shared memory */

struct Round {
    uint16_t units[CANDIDATES * comp_unit_stride<128>()]; /* candidates' rows */
    uint16_t leaves[CANDIDATES *
                    SHARE]; /* fp16: what a candidate would leave to a judge, in units of a token's mean share */
    uint16_t now[SHARE];    /* fp16: what is left to it */
    float gains[2][BLOCKS][CANDIDATES]; /* of every block's judges, written by all blocks; two turns */
    double cumulated[MOST_TILES];
    double sums[33], offset, step;
    uint32_t drawn[CANDIDATES], tokens[CANDIDATES], before[5], num, best;
    uint8_t taken[CANDIDATES];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

static __device__ uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/*
 * Candidates: one random offset, equal steps through the cumulated weights, so that no token comes twice and a batch
 * is spread over the whole range. All blocks of the cluster draw the same.
 */
static __device__ void draw(const akv_comp &c, uint32_t head, const akv_comp_cover *state, uint32_t keep, Round &s)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, want = keep * (CANDIDATES / AKV_COMP_BATCH);
    const double w[2] = {state->weight[0], state->weight[1]};
    const float *tile_left[2] = {c.tile_left[0] + (size_t)head * c.cover_tiles,
                                 c.tile_left[1] + (size_t)head * c.cover_tiles};
    double *cumulated = c.cover_tiles <= MOST_TILES
                            ? s.cumulated
                            : c.cumulated + ((size_t)head * BLOCKS + blockIdx.x % BLOCKS) * c.cover_tiles;
    double sum = 0, total;
    uint64_t begin, end;
    comp_share_of(c.cover_tiles, &begin, &end);
    for (uint64_t i = begin; i < end; i++)
        sum += w[0] * tile_left[0][i] + w[1] * tile_left[1][i];
    double before = comp_block_scan(sum, s.sums, &total);
    for (uint64_t i = begin; i < end; i++) {
        before += w[0] * tile_left[0][i] + w[1] * tile_left[1][i];
        cumulated[i] = before;
    }
    if (threadIdx.x == 0) {
        uint64_t rng = state->rng;
        s.step = want > 0 ? total / want : 0.0;
        s.offset = s.step * ((double)(next_random(&rng) >> 11) * 0x1p-53);
    }
    if (threadIdx.x < CANDIDATES)
        s.drawn[threadIdx.x] = NO_TOKEN;
    __syncthreads();
    const bool something = total > 0.0 && isfinite(total);
    for (uint32_t i = warp; i < want && something; i += HEAD_THREADS / 32) {
        const double at = s.offset + i * s.step;
        uint32_t low = 0, high = c.cover_tiles - 1; /* first tile whose cumulated weight is above `at` */
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (cumulated[middle] > at)
                high = middle;
            else
                low = middle + 1;
        }
        const uint64_t t0 = covered_token(c, (uint64_t)low * AKV_COMP_COVER_TILE) + lane * 4;
        double weights[4], mine = 0, base = low > 0 ? cumulated[low - 1] : 0.0;
        uint32_t last = NO_TOKEN; /* the last that could be taken, should rounding pass them all */
#    pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint64_t t = t0 + j;
            const bool in = t < c.earlier && !c.mask[head * c.S + t];
            weights[j] = in ? w[0] * c.left[0][head * c.S + t] + w[1] * c.left[1][head * c.S + t] : 0.0;
            mine += weights[j];
            if (weights[j] > 0.0)
                last = (uint32_t)t;
        }
        double upto = mine;
        for (int o = 1; o < 32; o *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, upto, o);
            upto += lane >= (uint32_t)o ? other : 0.0;
        }
        const uint32_t above = __ballot_sync(0xffffffffu, mine > 0.0 && base + upto > at),
                       any = __ballot_sync(0xffffffffu, mine > 0.0);
        if (any == 0)
            continue;
        if (above != 0 ? lane == (uint32_t)__ffs((int)above) - 1 : lane == 31 - (uint32_t)__clz((int)any)) {
            uint32_t token = last;
            double upto_here = base + upto - mine;
            for (int j = 0; j < 4 && above != 0; j++) {
                upto_here += weights[j];
                if (weights[j] > 0.0 && upto_here > at) {
                    token = (uint32_t)(t0 + j);
                    break;
                }
            }
            s.drawn[i] = token;
        }
    }
    __syncthreads();
    /* Tokens rise, so equal ones are neighbours; each once. Then, if need be, the first that are no anchors yet. */
    bool mine = false;
    uint32_t token = NO_TOKEN, place = 0;
    if (threadIdx.x < CANDIDATES) {
        token = s.drawn[threadIdx.x];
        mine = token != NO_TOKEN && (threadIdx.x == 0 || s.drawn[threadIdx.x - 1] != token);
        const uint32_t votes = __ballot_sync(0xffffffffu, mine);
        place = __popc(votes & ((1u << lane) - 1));
        if (lane == 0)
            s.before[warp + 1] = __popc(votes);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.before[0] = 0;
        for (int i = 1; i <= 4; i++)
            s.before[i] += s.before[i - 1];
    }
    __syncthreads();
    if (mine)
        s.tokens[s.before[warp] + place] = token;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t n = s.before[4];
        for (uint64_t t = 0; n < keep && t < c.earlier; t++) {
            bool used = c.mask[head * c.S + t] != 0;
            for (uint32_t i = 0; i < n && !used; i++)
                used = s.tokens[i] == t;
            if (!used)
                s.tokens[n++] = (uint32_t)t;
        }
        s.num = n;
    }
    __syncthreads();
}

/* What each of the n candidates would leave to this block's judges: warp w has 16 judges and half of the candidates. */
template <int PAD>
static __device__ void judge(const akv_comp &c, int side, uint32_t head, const akv_comp_cover *state, uint32_t n,
                             Round &s)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp % 16 * 16 + lane / 4;
    const uint32_t j0 = blockIdx.x % (BLOCKS / 2) * SHARE;
    const float size = (float)(state->weight[side] * (double)c.earlier);
    gather_units<PAD>(c, side, head, s.tokens, n, s.units);
    uint4 rows[2][PAD / 32];
    float energy[2];
#    pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t j = j0 + row + 8 * h;
        const uint64_t t = covered_token(c, (uint64_t)(j < c.judges ? j : 0) * c.judge_stride);
        comp_row_chunks<PAD>(rows[h], c.rows16[side] + ((size_t)head * c.S + t) * PAD);
        energy[h] = j < c.judges ? c.energy[side][head * c.S + t] * size : 0.0f;
        if (lane % 4 == 0 && warp < 16)
            ((__half *)s.now)[row + 8 * h] =
                __float2half_rn(j < c.judges ? fminf(c.left[side][head * c.S + t] * size, 6e4f) : 0.0f);
    }
    __syncthreads();
    for (uint32_t u = warp / 16 * (CANDIDATES / 2); u < (warp / 16 + 1) * (CANDIDATES / 2) && u < n; u += 8) {
        float acc[4] = {0, 0, 0, 0};
        comp_products<PAD>(acc, rows[0], rows[1], s.units + (u + lane / 4) * comp_unit_stride<PAD>());
#    pragma unroll
        for (int i = 0; i < 4; i++)
            ((__half *)s.leaves)[(u + lane % 4 * 2 + (i & 1)) * SHARE + row + i / 2 * 8] =
                __float2half_rn(fminf(6e4f, fmaxf(0.0f, energy[i / 2] * (1.0f - acc[i] * acc[i]))));
    }
    __syncthreads();
}

static __device__ __forceinline__ float gain_of(uint4 now, uint4 leave)
{
    const uint32_t a[4] = {now.x, now.y, now.z, now.w}, b[4] = {leave.x, leave.y, leave.z, leave.w};
    float sum = 0;
#    pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 d = __half22float2(__hmax2(__hsub2(as_half2(a[i]), as_half2(b[i])), __float2half2_rn(0.0f)));
        sum += d.x + d.y;
    }
    return sum;
}

/*
 * One round of a head: draw candidates, keep the best of them one after the other, each judged by what it takes from
 * what the ones before leave. A cluster a head: every block asks all candidates about its own judges (eight threads a
 * candidate) and tells all blocks, each of which then finds the same best one. (One block a head that asks only those
 * whose last known gain leads, as coverage.c does, took four times as long: topics make most gains fall with every
 * choice, and what it reads does not fit into one processor.)
 */
static __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(HEAD_THREADS) cover_round(COMP_ARG)
{
    extern __shared__ float4 memory[];
    Round &s = *(Round *)memory;
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const uint32_t head = blockIdx.x / BLOCKS, rank = blockIdx.x % BLOCKS, lane = threadIdx.x % 32;
    akv_comp_cover *state = &c.cover[head];
    const uint32_t want = state->need < AKV_COMP_BATCH ? state->need : AKV_COMP_BATCH;
    const int side = rank < BLOCKS / 2 ? AKV_SIDE_K : AKV_SIDE_V;
    draw(c, head, state, want, s);
    cluster.sync(); /* before any block writes into another's memory that one must have begun */
    const uint32_t n = s.num;
    if (threadIdx.x < CANDIDATES)
        s.taken[threadIdx.x] = threadIdx.x < n && n <= want;
    if (n > want) {
        if (c.pad[side] == 64)
            judge<64>(c, side, head, state, n, s);
        else
            judge<128>(c, side, head, state, n, s);
        const uint32_t one = threadIdx.x / 8, part = threadIdx.x % 8;
        float *told[2] = {cluster.map_shared_rank(&s.gains[0][rank][one], part),
                          cluster.map_shared_rank(&s.gains[1][rank][one], part)};
        for (uint32_t kept = 0; kept < want; kept++) {
            float sum = 0;
            if (one < n)
#    pragma unroll
                for (uint32_t j = 0; j < SHARE / 64; j++)
                    sum += gain_of(((const uint4 *)s.now)[j * 8 + part],
                                   ((const uint4 *)s.leaves)[one * (SHARE / 8) + j * 8 + part]);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            *told[kept % 2] = sum;
            cluster.sync();
            if (threadIdx.x < 32) {
                float most = -1.0f;
                uint32_t best = CANDIDATES;
                for (uint32_t i = lane; i < n; i += 32) {
                    float gain = 0;
#    pragma unroll
                    for (uint32_t b = 0; b < BLOCKS; b++)
                        gain += s.gains[kept % 2][b][i];
                    gain = gain >= 0.0f ? gain : 0.0f; /* NaN of absurdly large inputs */
                    if (!s.taken[i] && gain > most) {
                        most = gain;
                        best = i;
                    }
                }
                for (int o = 16; o > 0; o >>= 1) {
                    const float other = __shfl_xor_sync(0xffffffffu, most, o);
                    const uint32_t who = __shfl_xor_sync(0xffffffffu, best, o);
                    if (other > most || (other == most && who < best)) {
                        most = other;
                        best = who;
                    }
                }
                __syncwarp();
                if (lane == 0)
                    s.taken[best] = 1;
                uint4 a = ((const uint4 *)s.now)[lane];
                const uint4 b = ((const uint4 *)s.leaves)[best * (SHARE / 8) + lane];
                a.x = as_u32(__hmin2(as_half2(a.x), as_half2(b.x)));
                a.y = as_u32(__hmin2(as_half2(a.y), as_half2(b.y)));
                a.z = as_u32(__hmin2(as_half2(a.z), as_half2(b.z)));
                a.w = as_u32(__hmin2(as_half2(a.w), as_half2(b.w)));
                ((uint4 *)s.now)[lane] = a;
            }
            __syncthreads();
        }
    }
    cluster.sync(); /* all have read the state, and nobody's memory is written any more */
    if (rank == 0 && threadIdx.x == 0) {
        uint32_t count = 0;
        (void)next_random(&state->rng);
        for (uint32_t i = 0; i < n; i++)
            if (s.taken[i]) {
                c.mask[head * c.S + s.tokens[i]] = c.all_fixed ? 3 : 1;
                state->tokens[count++] = s.tokens[i];
            }
        state->num = count;
        state->need -= count;
    }
}

#else /* older devices are refused before anything is launched */
static __global__ void cover_round(COMP_ARG)
{
}
#endif

template <int PAD>
static cudaError_t shrink_sides(const akv_comp *c, int64_t given, int side, uint32_t sides, cudaStream_t stream)
{
    const dim3 grid(c->cover_tiles, c->H, sides);
    if (given >= 0)
        shrink<PAD, CANDIDATES><<<grid, THREADS, 0, stream>>>(*c, given, side);
    else
        shrink<PAD, AKV_COMP_BATCH><<<grid, THREADS, 0, stream>>>(*c, given, side);
    return cudaSuccess;
}

/* Both sides in one launch where their rows are of one length. */
static cudaError_t shrink_both(const akv_comp *c, int64_t given, cudaStream_t stream)
{
    const uint32_t sides = c->pad[0] == c->pad[1] ? 2 : 1;
    for (int side = 0; side < 2; side += (int)sides)
        COMP_TRY(c->pad[side] == 64 ? shrink_sides<64>(c, given, side, sides, stream)
                                    : shrink_sides<128>(c, given, side, sides, stream));
    return cudaSuccess;
}

extern "C" cudaError_t akv_comp_cover_rest(const akv_comp *c, cudaStream_t stream)
{
    uint32_t need = c->k - c->num_given;
    COMP_TRY(comp_shared(cover_round, sizeof(Round)));
    if (need > 0) {
        weigh_sides<<<dim3(c->H, 2), HEAD_THREADS, 0, stream>>>(*c);
        for (uint32_t i = 0; i < c->num_given; i += CANDIDATES)
            COMP_TRY(shrink_both(c, i, stream));
    }
    while (need > 0) {
        cover_round<<<c->H * BLOCKS, HEAD_THREADS, sizeof(Round), stream>>>(*c);
        need -= need < AKV_COMP_BATCH ? need : AKV_COMP_BATCH;
        if (need > 0)
            COMP_TRY(shrink_both(c, -1, stream));
    }
    return cudaGetLastError();
}
