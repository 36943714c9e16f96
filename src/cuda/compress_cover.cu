/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_cover.cu - anchors for coverage, as src/codec/coverage.c: tokens drawn with probability proportional to what
 * the anchors so far leave of key and value, four times as many as stay. A round is up to 64 anchors, in 16 groups: a
 * group has 16 candidates that follow one another in the text, and the 4 best of them stay, so that a thread block can
 * choose alone. (The CPU takes the best 32 of 128; on made-up layers the output's error does not tell the two apart.)
 * All heads go through the rounds together; their number is known beforehand, so the host never waits. Where nothing is
 * left to cover, the first tokens that are no anchors fill a round up.
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define HEAD_THREADS 1024 /* kernels with one block a head */
#define GIVEN 128u        /* tokens chosen before that are looked at together */
#define BATCH AKV_COMP_BATCH
#define GROUPS AKV_COMP_GROUPS
#define GROUP 16u              /* candidates of a group */
#define KEEP (BATCH / GROUPS) /* the best of them */
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
    akv_let_next_start();
    const uint64_t first = covered_token(c, (uint64_t)blockIdx.x * AKV_COMP_COVER_TILE) + warp * 16 + lane / 4;
    const uint64_t last = c.S - 1;
    uint4 low[PAD / 32], high[PAD / 32];
    const uint16_t *rows = c.rows16[side] + (size_t)head * c.S * PAD;
    comp_row_chunks<PAD>(low, rows + (first < last ? first : last) * PAD);
    comp_row_chunks<PAD>(high, rows + (first + 8 < last ? first + 8 : last) * PAD);
    akv_wait_for_previous();
    const uint32_t n = given >= 0 ? min(c.num_given - (uint32_t)given, GIVEN) : c.cover[head].num;
    gather_units<PAD>(c, side, head, given < 0 ? c.cover[head].tokens : c.given + (size_t)head * c.k + given, n, units);
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

#define ROUND_THREADS (32u * GROUP) /* a warp a candidate */
#define MOST_TILES 1024u            /* whose cumulated weights fit into shared memory */

struct Round {
    uint16_t units[2][GROUP * comp_unit_stride<128>()]; /* candidates' rows */
    /* fp16: what a candidate would leave to a judge, of keys and of values, in units of a token's mean share */
    uint16_t leaves[GROUP][2 * JUDGES];
    uint16_t now[2 * JUDGES];           /* fp16: what is left to it */
    double cumulated[MOST_TILES];
    double sums[33], offset, step;
    float gains[2][GROUP];
    uint32_t drawn[GROUP + 1], tokens[GROUP], num, last;
};

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
 * is spread over the whole range. This block draws `count` of `all`, from candidate `first` on, and the one before.
 */
static __device__ void draw(const akv_comp &c, uint32_t head, const akv_comp_cover *state, uint32_t all, uint32_t first,
                            uint32_t count, Round &s)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const double w[2] = {state->weight[0], state->weight[1]};
    const float *tile_left[2] = {c.tile_left[0] + (size_t)head * c.cover_tiles,
                                 c.tile_left[1] + (size_t)head * c.cover_tiles};
    double *cumulated = c.cover_tiles <= MOST_TILES
                            ? s.cumulated
                            : c.cumulated + ((size_t)head * GROUPS + blockIdx.x) * c.cover_tiles;
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
        s.step = total / all;
        s.offset = s.step * ((double)(next_random(&rng) >> 11) * 0x1p-53);
    }
    if (threadIdx.x <= GROUP)
        s.drawn[threadIdx.x] = NO_TOKEN;
    __syncthreads();
    const bool something = total > 0.0 && isfinite(total);
    for (uint32_t i = warp; i <= count && something; i += ROUND_THREADS / 32) {
        if (first == 0 && i == 0)
            continue;
        const double at = s.offset + (first + i - 1) * s.step;
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
#pragma unroll
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
    if (threadIdx.x < 32) { /* tokens rise, so equal ones are neighbours; each once */
        const uint32_t token = lane < count ? s.drawn[lane + 1] : NO_TOKEN;
        const bool mine = token != NO_TOKEN && s.drawn[lane < GROUP ? lane : 0] != token;
        const uint32_t votes = __ballot_sync(0xffffffffu, mine);
        if (mine)
            s.tokens[__popc(votes & ((1u << lane) - 1))] = token;
        if (lane == 0)
            s.num = (uint32_t)__popc(votes);
    }
    __syncthreads();
}

/* What each of the n candidates would leave to the judges: each warp has a share of one side's, 16 at a time. */
template <int PAD>
static __device__ __forceinline__ void judge(const akv_comp &c, int side, uint32_t head, const akv_comp_cover *state,
                                             uint32_t n, uint32_t shift, Round &s)
{
    constexpr uint32_t warps = ROUND_THREADS / 32 / 2;
    const uint32_t each = c.judge_rows / warps;
    const uint32_t lane = threadIdx.x % 32, j0 = threadIdx.x / 32 % warps * each + lane / 4;
    const float size = (float)(state->weight[side] * (double)c.earlier);
#pragma unroll 2
    for (uint32_t i = 0; i < each; i += 16) {
        uint4 rows[2][PAD / 32];
        float energy[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t j = j0 + i + 8 * h;
            const uint64_t t = covered_token(c, j < c.judges ? (uint64_t)j * c.judge_stride + shift : 0);
            comp_row_chunks<PAD>(rows[h], c.rows16[side] + ((size_t)head * c.S + t) * PAD);
            energy[h] = j < c.judges ? c.energy[side][head * c.S + t] * size : 0.0f;
            if (lane % 4 == 0)
                ((__half *)s.now)[side * c.judge_rows + j] =
                    __float2half_rn(j < c.judges ? fminf(c.left[side][head * c.S + t] * size, 6e4f) : 0.0f);
        }
#pragma unroll
        for (uint32_t u = 0; u < GROUP; u += 8) {
            if (u >= n)
                break;
            float acc[4] = {0, 0, 0, 0};
            comp_products<PAD>(acc, rows[0], rows[1], s.units[side] + (u + lane / 4) * comp_unit_stride<PAD>());
#pragma unroll
            for (int e = 0; e < 4; e++)
                ((__half *)s.leaves[u + lane % 4 * 2 + (e & 1)])[side * c.judge_rows + j0 + i + e / 2 * 8] =
                    __float2half_rn(fminf(6e4f, fmaxf(0.0f, energy[e / 2] * (1.0f - acc[e] * acc[e]))));
        }
    }
}

static __device__ __forceinline__ float gain_of(uint4 now, uint4 leave)
{
    const uint32_t a[4] = {now.x, now.y, now.z, now.w}, b[4] = {leave.x, leave.y, leave.z, leave.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 d = __half22float2(__hmax2(__hsub2(as_half2(a[i]), as_half2(b[i])), __float2half2_rn(0.0f)));
        sum += d.x + d.y;
    }
    return sum;
}

static __device__ __forceinline__ uint4 smaller(uint4 a, uint4 b)
{
    return make_uint4(
        as_u32(__hmin2(as_half2(a.x), as_half2(b.x))), as_u32(__hmin2(as_half2(a.y), as_half2(b.y))),
        as_u32(__hmin2(as_half2(a.z), as_half2(b.z))), as_u32(__hmin2(as_half2(a.w), as_half2(b.w))));
}

/* The last block of a head: all groups' tokens are there. Each once; what is missing, from the first that are free. */
static __device__ void close_round(const akv_comp &c, uint32_t head, akv_comp_cover *state, uint32_t want)
{
    __shared__ uint32_t tokens[BATCH];
    if (threadIdx.x < want)
        tokens[threadIdx.x] = __ldcg(&state->tokens[threadIdx.x]);
    __syncthreads();
    bool twice = false;
    for (uint32_t i = 0; i < threadIdx.x && threadIdx.x < want; i++)
        twice |= tokens[i] == tokens[threadIdx.x];
    const bool missing = threadIdx.x < want && (twice || tokens[threadIdx.x] == NO_TOKEN);
    __syncthreads();
    if (missing)
        tokens[threadIdx.x] = NO_TOKEN;
    if (__syncthreads_or(missing) && threadIdx.x == 0)
        for (uint32_t i = 0, t = 0; i < want; i++)
            for (; tokens[i] == NO_TOKEN && t < c.earlier; t++) {
                bool used = c.mask[head * c.S + t] != 0;
                for (uint32_t j = 0; j < want && !used; j++)
                    used = tokens[j] == t;
                if (!used)
                    tokens[i] = t;
            }
    __syncthreads();
    if (threadIdx.x < want) {
        c.mask[head * c.S + tokens[threadIdx.x]] = c.all_fixed ? 3 : 1;
        state->tokens[threadIdx.x] = tokens[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        (void)next_random(&state->rng);
        state->num = want;
        state->arrived = 0;
    }
}

/* One round: block (group, head). It draws its candidates and keeps the best, one after the other. */
static __global__ void __launch_bounds__(ROUND_THREADS) cover_round(COMP_ARG, const uint32_t want, const uint32_t round)
{
    extern __shared__ float4 memory[];
    Round &s = *(Round *)memory;
    const uint32_t head = blockIdx.y, group = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t first = group * KEEP, keep = min(want - first, KEEP);
    akv_comp_cover *state = &c.cover[head];
    akv_let_next_start();
    akv_wait_for_previous();
    draw(c, head, state, want * (GROUP / KEEP), first * (GROUP / KEEP), keep * (GROUP / KEEP), s);
    const uint32_t n = s.num;
    uint32_t mine = NO_TOKEN; /* what thread i < keep has found */
    if (n > keep) {
        const int side = warp < ROUND_THREADS / 64 ? AKV_SIDE_K : AKV_SIDE_V;
        const uint32_t shift = round * 7 % c.judge_stride; /* other judges every round */
        for (int i = 0; i < 2; i++)
            if (c.pad[i] == 64)
                gather_units<64>(c, i, head, s.tokens, n, s.units[i]);
            else
                gather_units<128>(c, i, head, s.tokens, n, s.units[i]);
        __syncthreads();
        if (c.pad[side] == 64)
            judge<64>(c, side, head, state, n, shift, s);
        else
            judge<128>(c, side, head, state, n, shift, s);
        __syncthreads();
        constexpr uint32_t most = 2 * JUDGES / 8 / 32;      /* chunks of 8 judges, of a lane */
        const uint32_t chunks = 2 * c.judge_rows / 8 / 32; /* every warp keeps what is left by itself */
        uint4 now[most];
#pragma unroll
        for (uint32_t i = 0; i < most; i++)
            if (i < chunks)
                now[i] = ((const uint4 *)s.now)[i * 32 + lane];
        bool taken = warp >= n;
        for (uint32_t kept = 0; kept < keep; kept++) {
            float gain = 0;
#pragma unroll
            for (uint32_t i = 0; i < most; i++)
                if (i < chunks)
                    gain += gain_of(now[i], ((const uint4 *)s.leaves[warp])[i * 32 + lane]);
            gain = akv_warp_sum(gain);
            if (lane == 0)
                s.gains[kept % 2][warp] = taken ? -1.0f : gain >= 0.0f ? gain : 0.0f; /* NaN of absurdly large inputs */
            __syncthreads();
            float top = lane < GROUP ? s.gains[kept % 2][lane] : -2.0f;
            uint32_t best = lane;
            for (int o = 16; o > 0; o >>= 1) {
                const float other = __shfl_xor_sync(0xffffffffu, top, o);
                const uint32_t who = __shfl_xor_sync(0xffffffffu, best, o);
                if (other > top || (other == top && who < best)) {
                    top = other;
                    best = who;
                }
            }
            taken |= best == warp;
            if (threadIdx.x == kept)
                mine = s.tokens[best];
#pragma unroll
            for (uint32_t i = 0; i < most; i++)
                if (i < chunks)
                    now[i] = smaller(now[i], ((const uint4 *)s.leaves[best])[i * 32 + lane]);
        }
    } else if (threadIdx.x < n) {
        mine = s.tokens[threadIdx.x];
    }
    if (threadIdx.x < keep)
        state->tokens[first + threadIdx.x] = mine;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        s.last = atomicAdd(&state->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (s.last)
        close_round(c, head, state, want);
}

template <int PAD>
static cudaError_t shrink_sides(const akv_comp *c, int64_t given, int side, uint32_t sides, cudaStream_t stream)
{
    const dim3 grid(c->cover_tiles, c->H, sides);
    return given >= 0 ? comp_launch_early(shrink<PAD, GIVEN>, grid, THREADS, 0, stream, *c, given, side)
                      : comp_launch_early(shrink<PAD, BATCH>, grid, THREADS, 0, stream, *c, given, side);
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
        COMP_TRY(cudaGetLastError());
        for (uint32_t i = 0; i < c->num_given; i += GIVEN)
            COMP_TRY(shrink_both(c, i, stream));
    }
    /* Few anchors: smaller rounds, so that later ones know what the first have covered. */
    const uint32_t usual = (need / 12 + KEEP - 1) / KEEP * KEEP;
    const uint32_t batch = usual < KEEP ? KEEP : usual < BATCH ? usual : BATCH;
    for (uint32_t round = 0; need > 0; round++) {
        const uint32_t want = need < batch ? need : batch;
        COMP_TRY(comp_launch_early(cover_round, dim3((want + KEEP - 1) / KEEP, c->H), ROUND_THREADS, sizeof(Round),
                                   stream, *c, want, round));
        need -= want;
        if (need > 0)
            COMP_TRY(shrink_both(c, -1, stream));
    }
    return cudaGetLastError();
}
