/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_basis.cu - the transform of each head and side (src/codec/basis.c): eigenvectors of the residuals' second
 * moments by parallel Jacobi rotations, one block a matrix, in shared memory; directions in 8 bits; variances and
 * weights, from which the host fills the tables.
 */
#include "cuda/compress_device.cuh"

#define THREADS 1024
#define DIM AKV_COMP_MAX_DIM
#define STRIDE (DIM + 1)
#define MOST_SWEEPS 12
#define OFF_DIAGONAL 1e-9f /* of the squared norm: where rotations stop */

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

struct Shared {
    float a[DIM * STRIDE], v[DIM * STRIDE];
    float cosine[DIM / 2], sine[DIM / 2];
    uint32_t first[DIM / 2], second[DIM / 2];
    double score[DIM], query[DIM];
    uint32_t by_score[DIM];
    double sums[33];
    float most[33];
};

/* Pair i of round r of a tournament of n players. */
static __device__ __forceinline__ void pair_of(uint32_t n, uint32_t r, uint32_t i, uint32_t *p, uint32_t *q)
{
    *p = i == 0 ? n - 1 : (r + i) % (n - 1);
    *q = i == 0 ? r : (r + n - 1 - i) % (n - 1);
}

/* Eigenvectors of s.a [n, n], n even, as rows of s.v; eigenvalues on the diagonal. */
static __device__ void rotate(Shared &s, uint32_t n)
{
    const uint32_t pairs = n / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t sweep = 0; sweep < MOST_SWEEPS; sweep++) {
        double off = 0, all = 0;
        for (uint32_t i = threadIdx.x; i < n * n; i += THREADS) {
            const float x = s.a[i / n * STRIDE + i % n];
            all += (double)x * x;
            off += i / n != i % n ? (double)x * x : 0.0;
        }
        all = comp_block_sum(all, s.sums);
        off = comp_block_sum(off, s.sums);
        if (!(off > OFF_DIAGONAL * all))
            return;
        for (uint32_t round = 0; round < n - 1; round++) {
            if (threadIdx.x < pairs) {
                uint32_t p, q;
                pair_of(n, round, threadIdx.x, &p, &q);
                const float pp = s.a[p * STRIDE + p], qq = s.a[q * STRIDE + q], pq = s.a[p * STRIDE + q];
                float cosine = 1, sine = 0;
                if (fabsf(pq) > 1e-30f) {
                    const float theta = (qq - pp) / (2.0f * pq);
                    const float t = (theta >= 0.0f ? 1.0f : -1.0f) / (fabsf(theta) + sqrtf(theta * theta + 1.0f));
                    cosine = rsqrtf(t * t + 1.0f);
                    cosine = cosine *
                             (1.5f - 0.5f * (t * t + 1.0f) * cosine * cosine); /* to the last bit: thousands follow */
                    sine = t * cosine;
                }
                s.first[threadIdx.x] = p;
                s.second[threadIdx.x] = q;
                s.cosine[threadIdx.x] = cosine;
                s.sine[threadIdx.x] = sine;
            }
            __syncthreads();
            /* Warp w turns pairs w and pairs - 1 - w against those after them: all warps as much. */
            for (uint32_t turn = 0; turn < 2; turn++) {
                const uint32_t one = turn == 0 ? warp : pairs - 1 - warp;
                if (one >= pairs || (turn == 1 && one <= warp) || (turn == 0 && one > pairs - 1 - one))
                    continue;
                const uint32_t p1 = s.first[one], q1 = s.second[one];
                const float c1 = s.cosine[one], s1 = s.sine[one];
                for (uint32_t two = one + lane; two < pairs; two += 32) {
                    const uint32_t p2 = s.first[two], q2 = s.second[two];
                    const float c2 = s.cosine[two], s2 = s.sine[two];
                    const float a = s.a[p1 * STRIDE + p2], b = s.a[p1 * STRIDE + q2], e = s.a[q1 * STRIDE + p2],
                                d = s.a[q1 * STRIDE + q2];
                    const float a1 = c1 * a - s1 * e, e1 = s1 * a + c1 * e, b1 = c1 * b - s1 * d, d1 = s1 * b + c1 * d;
                    const float a2 = c2 * a1 - s2 * b1, b2 = s2 * a1 + c2 * b1, e2 = c2 * e1 - s2 * d1,
                                d2 = s2 * e1 + c2 * d1;
                    s.a[p1 * STRIDE + p2] = s.a[p2 * STRIDE + p1] = a2;
                    if (one == two) {
                        s.a[p1 * STRIDE + q1] = s.a[q1 * STRIDE + p1] = 0.0f;
                    } else {
                        s.a[p1 * STRIDE + q2] = s.a[q2 * STRIDE + p1] = b2;
                        s.a[q1 * STRIDE + p2] = s.a[p2 * STRIDE + q1] = e2;
                    }
                    s.a[q1 * STRIDE + q2] = s.a[q2 * STRIDE + q1] = d2;
                }
            }
            for (uint32_t one = warp; one < pairs; one += THREADS / 32) {
                float *p = s.v + s.first[one] * STRIDE, *q = s.v + s.second[one] * STRIDE;
                const float c1 = s.cosine[one], s1 = s.sine[one];
                for (uint32_t d = lane; d < n; d += 32) {
                    const float x = p[d], y = q[d];
                    p[d] = c1 * x - s1 * y;
                    q[d] = s1 * x + c1 * y;
                }
            }
            __syncthreads();
        }
    }
}

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
    float most = 0;
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS)
        most = fmaxf(most, fabsf(moment[i / n * DIM + i % n]));
    most = akv_warp_max(most);
    if (lane == 0)
        s.most[warp] = most;
    __syncthreads();
    most = akv_warp_max(s.most[lane]);
    const float down = most > 1e-30f ? 1.0f / most : 0.0f; /* so that no square overflows */
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS) {
        s.a[i / n * STRIDE + i % n] = moment[i / n * DIM + i % n] * down;
        s.v[i / n * STRIDE + i % n] = i / n == i % n ? 1.0f : 0.0f;
    }
    __syncthreads();
    if (n > 0)
        rotate(s, n);
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
            const float value = i < n ? s.a[i * STRIDE + i] * most : 0.0f;
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
    for (uint32_t i = threadIdx.x; i < n * n; i += THREADS)
        s.a[i / n * STRIDE + i % n] = moment[i / n * DIM + i % n];
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
    COMP_TRY(comp_shared(find_bases, sizeof(Shared)));
    find_bases<<<dim3(c->H, 2), THREADS, sizeof(Shared), stream>>>(*c);
    return cudaGetLastError();
}
