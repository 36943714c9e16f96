/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_basis.cu - the transform of each head and side (src/codec/basis.c): eigenvectors of the residuals' second
 * moments by parallel Jacobi rotations, one block a matrix, in shared memory, and the directions that they turn; those
 * in 8 bits; variances and weights, from which the host fills the tables.
 */
#include "cuda/compress_device.cuh"

#define THREADS 1024
#define DIM AKV_COMP_MAX_DIM
#define STRIDE (DIM + 1)
static_assert(AKV_COMP_ROUNDS % 8 == 0 && AKV_COMP_ROUNDS >= 12 * (DIM - 1), "room for all rotations");
#define MOST_SWEEPS 12u
/*
 * Of the squared norm: where rotations stop. Directions are orthogonal at any time; what is left beside the diagonal
 * costs a thousandth of the bits that the transform saves.
 */
#define OFF_DIAGONAL 1e-6

/* Mean second moments in basis order: block (row, head, side). */
static __global__ void __launch_bounds__(DIM) mean_moments(COMP_ARG)
{
    __shared__ double shared[33];
    const uint32_t i = blockIdx.x, head = blockIdx.y, j = threadIdx.x;
    const int side = (int)blockIdx.z;
    double anchors = 0;
    for (uint32_t a = j; a < c.k; a += DIM)
        anchors += c.fixed[(size_t)head * c.k + a] ? 1 : 0;
    const double count = (double)c.S - comp_block_sum(anchors, shared);
    float *out = c.moment[side] + ((size_t)head * DIM + i) * DIM + j;
    if (i >= c.dim[side] || j >= c.dim[side]) {
        *out = 0.0f;
        return;
    }
    const float *part = c.moment_part[side] + (size_t)head * c.num_ranges * DIM * DIM + c.order[side * DIM + i] * DIM +
                        c.order[side * DIM + j];
    double sum = 0;
    for (uint32_t r = 0; r < c.num_ranges; r++)
        sum += part[(size_t)r * DIM * DIM];
    sum = count > 0 ? sum / count : 0.0;
    *out = sum > 1e37 ? 1e37f : sum < -1e37 ? -1e37f : sum == sum ? (float)sum : 0.0f;
}

struct Matrix {
    float a[DIM * STRIDE]; /* above the diagonal and on it */
    float4 pair[DIM / 2];  /* the two indices, cosine and sine */
    double sums[33];
    float most[33];
};

/* Pair i of round r < n - 1 of a tournament of n players. */
static __device__ __forceinline__ void pair_of(uint32_t n, uint32_t r, uint32_t i, uint32_t *p, uint32_t *q)
{
    const uint32_t x = r + i, y = r + n - 1 - i;
    *p = i == 0 ? n - 1 : x >= n - 1 ? x - (n - 1) : x;
    *q = i == 0 ? r : y >= n - 1 ? y - (n - 1) : y;
}

static __device__ __forceinline__ uint32_t above(uint32_t i, uint32_t j)
{
    return min(i, j) * STRIDE + max(i, j);
}

/* Cosine and sine that bring a_pq to 0. */
static __device__ __forceinline__ float2 rotation_of(float pp, float qq, float pq)
{
    if (!(fabsf(pq) > 1e-30f))
        return make_float2(1, 0);
    const float theta = (qq - pp) / (2.0f * pq);
    const float t = (theta >= 0.0f ? 1.0f : -1.0f) / (fabsf(theta) + sqrtf(theta * theta + 1.0f));
    float cosine = rsqrtf(t * t + 1.0f);
    cosine = cosine * (1.5f - 0.5f * (t * t + 1.0f) * cosine * cosine); /* to the last bit: thousands follow */
    return make_float2(cosine, t * cosine);
}

/* Pairs `one` and `two` of the round, one <= two. */
static __device__ __forceinline__ void rotate(Matrix &s, uint32_t one, uint32_t two)
{
    const float4 x = s.pair[one], y = s.pair[two];
    const uint32_t p1 = __float_as_uint(x.x), q1 = __float_as_uint(x.y), p2 = __float_as_uint(y.x),
                   q2 = __float_as_uint(y.y);
    const uint32_t pp = above(p1, p2), pq = above(p1, q2), qp = above(q1, p2), qq = above(q1, q2);
    const float a = s.a[pp], b = s.a[pq], e = s.a[qp], d = s.a[qq];
    const float a1 = x.z * a - x.w * e, e1 = x.w * a + x.z * e, b1 = x.z * b - x.w * d, d1 = x.w * b + x.z * d;
    s.a[pp] = y.z * a1 - y.w * b1;
    s.a[qq] = y.w * e1 + y.z * d1;
    if (one == two) {
        s.a[pq] = 0.0f;
    } else {
        s.a[pq] = y.w * a1 + y.z * b1;
        s.a[qp] = y.z * e1 - y.w * d1;
    }
}

/*
 * Eigenvalues of the mean moments, block (head, side), and the rotations on the way. The directions are turned by
 * turn_directions, which has all processors; this one has work for a few, and lets the utilities run beside it.
 */
static __global__ void __launch_bounds__(THREADS) diagonalise(COMP_ARG)
{
    extern __shared__ float4 memory[];
    Matrix &s = *(Matrix *)memory;
    const uint32_t head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int side = (int)blockIdx.y;
    const uint32_t n = c.under[side], pairs = n / 2;
    const float *moment = c.moment[side] + (size_t)head * DIM * DIM;
    float2 *rotation = c.rotation + ((size_t)side * c.H + head) * AKV_COMP_ROUNDS * (DIM / 2);
    float *value = c.eigenvalue[side] + (size_t)head * DIM, most = 0;
    akv_let_next_start();
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS)
        most = fmaxf(most, fabsf(moment[i / n * DIM + i % n]));
    most = akv_warp_max(most);
    if (lane == 0)
        s.most[warp] = most;
    __syncthreads();
    most = akv_warp_max(s.most[lane]);
    const float down = most > 1e-30f ? 1.0f / most : 0.0f; /* so that no square overflows */
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS)
        if (i / n <= i % n)
            s.a[i / n * STRIDE + i % n] = moment[i / n * DIM + i % n] * down;
    __syncthreads();
    uint32_t rounds = 0;
    for (uint32_t sweep = 0; sweep < MOST_SWEEPS && n > 0; sweep++) {
        double off = 0, on = 0;
        for (uint32_t i = threadIdx.x; i < n * n; i += THREADS) {
            const double x = i / n <= i % n ? s.a[i / n * STRIDE + i % n] : 0.0f;
            on += i / n == i % n ? x * x : 0.0;
            off += i / n != i % n ? x * x : 0.0;
        }
        off = 2 * comp_block_sum(off, s.sums);
        on = comp_block_sum(on, s.sums);
        if (!(off > OFF_DIAGONAL * (on + off)))
            break;
        for (uint32_t round = 0; round < n - 1; round++) {
            if (threadIdx.x < pairs) {
                uint32_t p, q;
                pair_of(n, round, threadIdx.x, &p, &q);
                const float2 turn = rotation_of(s.a[p * STRIDE + p], s.a[q * STRIDE + q], s.a[above(p, q)]);
                s.pair[threadIdx.x] = make_float4(__uint_as_float(p), __uint_as_float(q), turn.x, turn.y);
                rotation[(size_t)(rounds + round) * (DIM / 2) + threadIdx.x] = turn;
            }
            __syncthreads();
            /* Warp w turns pairs w and pairs - 1 - w against those after them: all warps as much. */
            for (uint32_t w = warp; w < (pairs + 1) / 2; w += THREADS / 32) {
                const uint32_t first = pairs - w, all = w == pairs - 1 - w ? first : pairs + 1;
#pragma unroll 3
                for (uint32_t i = lane; i < all; i += 32)
                    rotate(s, i < first ? w : pairs - 1 - w, i < first ? w + i : i - 1);
            }
            __syncthreads();
        }
        rounds += n - 1;
    }
    if (threadIdx.x < n)
        value[threadIdx.x] = s.a[threadIdx.x * STRIDE + threadIdx.x] * most;
    if (threadIdx.x == 0)
        c.num_rounds[side * c.H + head] = rounds;
}

#define COLUMNS 16u /* of a block: two a warp */
#define AHEAD 8u    /* rounds whose rotations are fetched at once */

/* The same rotations of the unit matrix's rows, which become the directions: block (16 columns, head, side). */
static __global__ void __launch_bounds__(COLUMNS / 2 * 32) turn_directions(COMP_ARG)
{
    __shared__ __align__(16) float2 rotation[2][AHEAD][DIM / 2];
    __shared__ float v[COLUMNS][DIM];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, column = threadIdx.x / 32 * 2;
    const int side = (int)blockIdx.z;
    const uint32_t n = c.under[side], pairs = n / 2, first = blockIdx.x * COLUMNS,
                   rounds = c.num_rounds[side * c.H + head];
    const float2 *from = c.rotation + ((size_t)side * c.H + head) * AKV_COMP_ROUNDS * (DIM / 2);
    static_assert(sizeof rotation[0] == 16 * COLUMNS / 2 * 32, "16 bytes a thread");
    const auto fetch = [&](uint32_t round) { /* the room is a multiple of AHEAD */
        copy_async((float4 *)rotation[round / AHEAD % 2] + threadIdx.x,
                   (const float4 *)(from + (size_t)round * (DIM / 2)) + threadIdx.x);
    };
    if (rounds > 0)
        fetch(0);
    for (uint32_t i = lane; i < n; i += 32) {
        v[column][i] = i == first + column ? 1.0f : 0.0f;
        v[column + 1][i] = i == first + column + 1 ? 1.0f : 0.0f;
    }
    uint32_t of_sweep = 0; /* round of the sweep */
    for (uint32_t round0 = 0; round0 < rounds; round0 += AHEAD) {
        await_copies();
        __syncthreads();
        if (round0 + AHEAD < rounds)
            fetch(round0 + AHEAD);
        for (uint32_t r = 0; r < AHEAD && round0 + r < rounds; r++) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t i = lane + 32 * half;
                if (i >= pairs)
                    break;
                uint32_t p, q;
                pair_of(n, of_sweep, i, &p, &q);
                const float2 turn = rotation[round0 / AHEAD % 2][r][i];
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    float *x = v[column + j];
                    const float a = x[p], b = x[q];
                    x[p] = turn.x * a - turn.y * b;
                    x[q] = turn.y * a + turn.x * b;
                }
            }
            of_sweep = of_sweep + 1 == n - 1 ? 0 : of_sweep + 1;
            __syncwarp();
        }
    }
    __syncthreads();
    float *out = c.direction[side] + (size_t)head * DIM * DIM;
    for (uint32_t i = threadIdx.x; i < n * COLUMNS; i += blockDim.x)
        if (first + i % COLUMNS < n)
            out[i / COLUMNS * DIM + first + i % COLUMNS] = v[i % COLUMNS][i / COLUMNS];
}

struct Shared {
    float a[DIM * STRIDE], v[DIM * STRIDE];
    double score[DIM], query[DIM];
    uint32_t by_score[DIM];
    double sums[33];
};

static __device__ uint16_t to_bf16(float x)
{
    uint32_t u = __float_as_uint(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    if ((r & 0x7f80u) == 0x7f80u && (u & 0x7f800000u) != 0x7f800000u)
        r = (r & 0x8000u) | 0x7f7fu;
    return (uint16_t)r;
}

/* Block (head, side). */
static __global__ void __launch_bounds__(THREADS) find_bases(COMP_ARG)
{
    extern __shared__ float4 memory[];
    Shared &s = *(Shared *)memory;
    const uint32_t head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int side = (int)blockIdx.y;
    const uint32_t dim = c.dim[side], n = c.under[side], cols = c.cols[side], coords = c.coords[side];
    const uint16_t *order = c.order + side * DIM;
    const float *moment = c.moment[side] + (size_t)head * DIM * DIM, *late = c.late + (size_t)head * DIM * c.late_rows;
    const float *direction = c.direction[side] + (size_t)head * DIM * DIM,
                *eigenvalue = c.eigenvalue[side] + (size_t)head * DIM;
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS) {
        s.a[i / n * STRIDE + i % n] = moment[i / n * DIM + i % n];
        s.v[i / n * STRIDE + i % n] = direction[i / n * DIM + i % n];
    }
    __syncthreads();

    /* How strongly late queries look along each direction or coordinate, relative to the mean (keys only). */
    double mean = 0;
    if (side == AKV_SIDE_K) {
        for (uint32_t i = threadIdx.x; i < dim * c.late_rows; i += THREADS)
            mean += (double)late[i] * late[i];
        mean = comp_block_sum(mean, s.sums) / dim;
    }
    for (uint32_t i = warp; i < dim; i += THREADS / 32) {
        float energy = 0;
        for (uint32_t r = lane; r < c.late_rows && side == AKV_SIDE_K; r += 32) {
            float x = 0;
            if (i < n)
                for (uint32_t j = 0; j < n; j++)
                    x += s.v[i * STRIDE + j] * late[(size_t)j * c.late_rows + r];
            else
                x = late[(size_t)i * c.late_rows + r];
            energy += x * x;
        }
        energy = akv_warp_sum(energy);
        if (lane == 0) {
            s.query[i] = side == AKV_SIDE_K && mean > 0.0 ? (1.0 - c.query_mix) * energy / mean + c.query_mix : 1.0;
            const float value = i < n ? eigenvalue[i] : 0.0f;
            s.score[i] = i < n ? (value > 0.0f ? value : 0.0) * s.query[i] : -1.0;
        }
    }
    __syncthreads();
    double total = threadIdx.x < n ? s.score[threadIdx.x] : 0.0;
    total = comp_block_sum(total, s.sums);
    if (threadIdx.x < n) { /* place by falling score */
        uint32_t place = 0;
        for (uint32_t i = 0; i < n; i++)
            place += s.score[i] > s.score[threadIdx.x] || (s.score[i] == s.score[threadIdx.x] && i < threadIdx.x);
        s.by_score[place] = threadIdx.x;
    }
    __syncthreads();
    /* The whole transform, coordinates in their own order: directions as stored, and ones for the other coordinates. */
    float *transform = c.basis[side] + (size_t)head * DIM * DIM;
    for (uint32_t i = threadIdx.x; i < DIM * DIM; i += THREADS)
        transform[i] = 0.0f;
    __syncthreads();
    double *weight = c.weight[side] + (size_t)head * (DIM + 1);
    int8_t *stored = (int8_t *)(c.blob + c.section[AKV_SEC_BASIS + side]) + (size_t)head * cols * n;
    float *scales = (float *)(c.blob + c.section[AKV_SEC_BASIS_SCALES + side]) + (size_t)head * cols;
    uint16_t *sigmas = (uint16_t *)(c.blob + c.section[AKV_SEC_SIGMAS + side]) + (size_t)head * coords;
    double fast = 0;
    for (uint32_t at = warp; at < coords; at += THREADS / 32) {
        float variance = 0;
        double q2;
        if (at < cols) {
            const uint32_t from = s.by_score[at];
            float *u = s.v + from * STRIDE, absmax = 0;
            for (uint32_t j = lane; j < n; j += 32)
                absmax = fmaxf(absmax, fabsf(u[j]));
            const float scale = akv_warp_max(absmax) / 127.0f;
            for (uint32_t j = lane; j < n; j += 32) {
                const float q = scale > 0.0f ? rintf(u[j] / scale) : 0.0f;
                stored[(size_t)at * n + j] = (int8_t)q;
                u[j] = q * scale;
                transform[(size_t)at * DIM + order[j]] = q * scale;
            }
            if (lane == 0)
                scales[at] = scale;
            __syncwarp();
            for (uint32_t j = lane; j < n; j += 32) { /* of the direction as stored */
                float x = 0;
                for (uint32_t i = 0; i < n; i++)
                    x += u[i] * s.a[i * STRIDE + j];
                variance += x * u[j];
            }
            variance = akv_warp_sum(variance);
            q2 = s.query[from];
        } else {
            const uint32_t i = at - cols + n;
            variance = moment[(size_t)i * DIM + i];
            q2 = s.query[i];
            fast += lane == 0 ? (double)variance * q2 : 0.0;
            if (lane == 0)
                transform[(size_t)at * DIM + order[i]] = 1.0f;
        }
        if (lane == 0) {
            const uint16_t sigma = to_bf16((float)sqrt(variance > 0.0f ? (double)variance : 0.0));
            sigmas[at] = sigma;
            c.sigma[side][head * DIM + at] = akv_bf16(sigma);
            weight[at] = akv_bf16(sigma) == 0.0f ? 0.0 : (double)variance * q2;
        }
    }
    fast = comp_block_sum(fast, s.sums);
    if (threadIdx.x == 0)
        weight[DIM] = total + fast;
}

extern "C" cudaError_t akv_comp_bases(const akv_comp *c, cudaStream_t stream)
{
    mean_moments<<<dim3(DIM, c->H, 2), DIM, 0, stream>>>(*c);
    COMP_TRY(comp_shared(diagonalise, sizeof(Matrix)));
    COMP_TRY(comp_shared(find_bases, sizeof(Shared)));
    diagonalise<<<dim3(c->H, 2), THREADS, sizeof(Matrix), stream>>>(*c);
    COMP_TRY(cudaGetLastError());
    COMP_TRY(akv_comp_utilities(c, stream)); /* meanwhile */
    turn_directions<<<dim3(DIM / COLUMNS, c->H, 2), COLUMNS / 2 * 32, 0, stream>>>(*c);
    find_bases<<<dim3(c->H, 2), THREADS, sizeof(Shared), stream>>>(*c);
    return cudaGetLastError();
}
