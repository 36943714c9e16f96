/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_rows.cu - the first looks at a layer: phases of the positions, means and typical sizes of the coordinates,
 * tokens as fp16 rows of length 1 for the searches, and the observation queries. What is not finite is found on the
 * way.
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define STAT_TOKENS 256u /* of one block's sums */
#define STRIDE (AKV_COMP_MAX_DIM + 1)

static __global__ void __launch_bounds__(THREADS) phases(COMP_ARG)
{
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < c.S * c.planes;
         i += (uint64_t)gridDim.x * THREADS) {
        const uint64_t token = i / c.planes;
        const int64_t position = c.positions != NULL ? c.positions[token] : c.first_position + (int64_t)token;
        float cosine, sine;
        akv_phase(position, c.inv_freq[i % c.planes], &cosine, &sine);
        c.phase[i] = make_float2(cosine, sine);
    }
}

/* Sums and squares of the coordinates of STAT_TOKENS tokens: block (chunk, head, side). */
static __global__ void __launch_bounds__(THREADS) statistics(COMP_ARG)
{
    __shared__ float tile[AKV_COMP_TILE * STRIDE];
    const uint32_t head = blockIdx.y, dim = c.dim[blockIdx.z], d = threadIdx.x % AKV_COMP_MAX_DIM,
                   half = threadIdx.x / AKV_COMP_MAX_DIM;
    const int side = (int)blockIdx.z;
    double sum = 0, square = 0;
    for (uint32_t first = 0; first < STAT_TOKENS; first += AKV_COMP_TILE) {
        const uint64_t t0 = (uint64_t)blockIdx.x * STAT_TOKENS + first;
        if (t0 >= c.S)
            break;
        const auto token_of = [&](uint32_t r) { return t0 + r < c.S ? (uint32_t)(t0 + r) : NO_TOKEN; };
        comp_load(c, side, head, AKV_COMP_TILE, tile, STRIDE, token_of);
        __syncwarp();
        COMP_ROWS(r, AKV_COMP_TILE)
        for (uint32_t i = threadIdx.x % 32; i < dim; i += 32)
            if (!isfinite(tile[r * STRIDE + i]))
                atomicMin(&c.found->bad[side], (unsigned long long)((head * c.S + t0 + r) * dim + i));
        if (side == AKV_SIDE_K)
            comp_turn(c, AKV_COMP_TILE, tile, STRIDE, -1, NULL, token_of);
        __syncthreads();
        if (d < dim)
            for (uint32_t r = half; r < AKV_COMP_TILE; r += THREADS / AKV_COMP_MAX_DIM) {
                const float x = tile[r * STRIDE + d]; /* zeros beyond the last token */
                sum += x;
                square += (double)x * x;
            }
        __syncthreads();
    }
    double *both = (double *)tile; /* the two halves of the tokens */
    if (half == 1) {
        both[2 * d] = sum;
        both[2 * d + 1] = square;
    }
    __syncthreads();
    if (half == 0) {
        double *out = c.stat_part + (((size_t)side * c.H + head) * c.stat_chunks + blockIdx.x) * 2 * AKV_COMP_MAX_DIM;
        out[d] = sum + both[2 * d];
        out[AKV_COMP_MAX_DIM + d] = square + both[2 * d + 1];
    }
}

static __device__ uint16_t to_bf16(float x)
{
    uint32_t u = __float_as_uint(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    if ((r & 0x7f80u) == 0x7f80u && (u & 0x7f800000u) != 0x7f800000u)
        r = (r & 0x8000u) | 0x7f7fu;
    return (uint16_t)r;
}

#define QUARTERS 4u /* of the parts of the sums */

/* Means and units as stored: block (head, side). */
static __global__ void __launch_bounds__(QUARTERS * AKV_COMP_MAX_DIM) finish_statistics(COMP_ARG)
{
    __shared__ double squares[AKV_COMP_MAX_DIM], sums[QUARTERS][2][AKV_COMP_MAX_DIM];
    const uint32_t head = blockIdx.x, d = threadIdx.x % AKV_COMP_MAX_DIM, quarter = threadIdx.x / AKV_COMP_MAX_DIM,
                   dim = c.dim[blockIdx.y];
    const int side = (int)blockIdx.y;
    const double *part = c.stat_part + ((size_t)side * c.H + head) * c.stat_chunks * 2 * AKV_COMP_MAX_DIM;
    double sum = 0, square = 0;
#pragma unroll 4
    for (uint32_t i = quarter; i < c.stat_chunks; i += QUARTERS) {
        sum += part[(size_t)i * 2 * AKV_COMP_MAX_DIM + d];
        square += part[(size_t)i * 2 * AKV_COMP_MAX_DIM + AKV_COMP_MAX_DIM + d];
    }
    sums[quarter][0][d] = sum;
    sums[quarter][1][d] = square;
    __syncthreads();
    if (quarter > 0)
        return;
    for (uint32_t i = 1; i < QUARTERS; i++) {
        sum += sums[i][0][d];
        square += sums[i][1][d];
    }
    float mean = d < dim ? (float)(sum / (double)c.S) : 0.0f;
    if (side == AKV_SIDE_K && d < dim) {
        const uint16_t stored = to_bf16(mean);
        ((uint16_t *)(c.blob + c.section[AKV_SEC_MEAN]))[head * dim + d] = stored;
        mean = akv_bf16(stored);
        square -= sum * sum / (double)c.S;
    }
    c.mean[side][head * AKV_COMP_MAX_DIM + d] = mean;
    square = square > 0.0 ? square / (double)c.S : 0.0;
    squares[d] = square;
    asm volatile("bar.sync 1, 128;" ::: "memory"); /* the threads that are left */
    if (side == AKV_SIDE_K && d < 2 * c.planes) { /* the two coordinates of a plane share their unit */
        const uint32_t other = c.style == AKV_ROPE_HALF_SPLIT ? (d < c.planes ? d + c.planes : d - c.planes) : d ^ 1u;
        square = 0.5 * (squares[d] + squares[other]);
    }
    if (d < dim) {
        const uint16_t stored = to_bf16(square > 1e-30 ? (float)sqrt(square) : 1.0f);
        ((uint16_t *)(c.blob + c.section[AKV_SEC_UNITS + side]))[head * dim + d] = stored;
        c.unit_of[side][head * AKV_COMP_MAX_DIM + d] = akv_bf16(stored);
    }
}

/* fp16 rows of length 1 and their squared lengths: block (tile, head, side), a warp a token. */
static __global__ void __launch_bounds__(THREADS) unit_rows(COMP_ARG)
{
    __shared__ float tile[AKV_COMP_TILE * STRIDE];
    const uint32_t head = blockIdx.y, pad = c.pad[blockIdx.z], dim = c.dim[blockIdx.z], warp = threadIdx.x / 32,
                   lane = threadIdx.x % 32;
    const int side = (int)blockIdx.z;
    const uint64_t t0 = (uint64_t)blockIdx.x * AKV_COMP_TILE;
    const auto token_of = [&](uint32_t r) { return t0 + r < c.S ? (uint32_t)(t0 + r) : NO_TOKEN; };
    comp_anchor_space(c, side, head, AKV_COMP_TILE, tile, STRIDE, token_of);
    const float *mean = c.mean[AKV_SIDE_V] + head * AKV_COMP_MAX_DIM;
    for (uint32_t r = warp; r < AKV_COMP_TILE && t0 + r < c.S; r += THREADS / 32) {
        const size_t at = (size_t)head * c.S + t0 + r;
        float square = 0, deviation = 0;
        for (uint32_t d = lane; d < dim; d += 32) {
            const float x = tile[r * STRIDE + d], y = x - mean[d];
            square += x * x;
            deviation += y * y;
        }
        square = akv_warp_sum(square);
        const float inverse = square > 0.0f && square < 3e38f ? rsqrtf(square) : 0.0f;
        __half2 *out = (__half2 *)(c.rows16[side] + at * pad);
        for (uint32_t d = lane; d < pad / 2; d += 32)
            out[d] = __floats2half2_rn(tile[r * STRIDE + 2 * d] * inverse, tile[r * STRIDE + 2 * d + 1] * inverse);
        if (side == AKV_SIDE_V)
            deviation = akv_warp_sum(deviation);
        if (lane == 0) {
            c.energy[side][at] = square;
            c.left[side][at] = square;
            if (side == AKV_SIDE_V) {
                c.deviation[at] = deviation;
                c.value_sq[at] = square;
            }
        }
    }
}

/* Observation queries in fp32: block (row, head), a thread a coordinate. */
static __global__ void __launch_bounds__(AKV_COMP_MAX_DIM) load_queries(COMP_ARG)
{
    __shared__ float shared[33];
    const uint32_t row = blockIdx.x, head = blockIdx.y, d = threadIdx.x, dk = c.dim[AKV_SIDE_K];
    const uint32_t q_head = head * c.G + row / c.W, token = row % c.W;
    float x = 0.0f;
    if (d < dk) {
        x = akv_load(c.queries.data, c.queries.dtype,
                     (int64_t)q_head * c.queries.stride_head + (int64_t)token * c.queries.stride_token +
                         (int64_t)d * c.queries.stride_dim);
        if (!isfinite(x))
            atomicMin(&c.found->bad[3], (unsigned long long)(((uint64_t)q_head * c.W + token) * dk + d));
    }
    c.query[((size_t)head * c.rows + row) * AKV_COMP_MAX_DIM + d] = x;
    ((__half *)c.query16)[((size_t)head * c.rows + row) * AKV_COMP_MAX_DIM + d] =
        __float2half_rn(fminf(65504.0f, fmaxf(-65504.0f, x)));
    x = comp_block_sum(x * x, shared);
    if (d == 0)
        c.row_sq[(size_t)head * c.rows + row] = x;
}

/* Mean squared length of a head's observation queries: block = head. */
static __global__ void __launch_bounds__(THREADS) query_lengths(COMP_ARG)
{
    __shared__ double shared[33];
    const float *q = c.query + (size_t)blockIdx.x * c.rows * AKV_COMP_MAX_DIM;
    double sum = 0;
    for (uint32_t i = threadIdx.x; i < c.rows * AKV_COMP_MAX_DIM; i += THREADS)
        sum += (double)q[i] * q[i];
    sum = comp_block_sum(sum, shared);
    if (threadIdx.x == 0)
        c.query_sq[blockIdx.x] = sum / c.rows;
}

/* Queries that weight the key coordinates, turned to the segment's end, transposed: block (row, head). */
static __global__ void __launch_bounds__(AKV_COMP_MAX_DIM) late_queries(COMP_ARG)
{
    __shared__ float x[AKV_COMP_MAX_DIM];
    const uint32_t row = blockIdx.x, head = blockIdx.y, d = threadIdx.x, dk = c.dim[AKV_SIDE_K];
    const uint32_t per_head = c.late_rows / c.G, m = row % per_head, q_head = head * c.G + row / per_head;
    const akv_comp_source &s = c.num_sampled > 0 ? c.sampled : c.queries;
    float y = 0.0f;
    if (d < dk) {
        y = akv_load(s.data, s.dtype,
                     (int64_t)q_head * s.stride_head + (int64_t)m * s.stride_token + (int64_t)d * s.stride_dim);
        if (c.num_sampled > 0 && !isfinite(y))
            atomicMin(&c.found->bad[2], (unsigned long long)(((uint64_t)q_head * c.num_sampled + m) * dk + d));
    }
    x[d] = y;
    __syncthreads();
    if (c.num_sampled > 0 && d < c.planes) {
        float cosine, sine;
        akv_phase(c.last_position - c.sampled_positions[m], c.inv_freq[d], &cosine, &sine);
        const uint32_t a = c.style == AKV_ROPE_HALF_SPLIT ? d : 2 * d,
                       b = c.style == AKV_ROPE_HALF_SPLIT ? d + c.planes : 2 * d + 1;
        const float x0 = x[a], x1 = x[b];
        x[a] = x0 * cosine - x1 * sine;
        x[b] = x0 * sine + x1 * cosine;
    }
    __syncthreads();
    c.late[((size_t)head * AKV_COMP_MAX_DIM + d) * c.late_rows + row] = d < dk ? x[c.order[d]] : 0.0f;
}

extern "C" cudaError_t akv_comp_rows(const akv_comp *c, cudaStream_t stream)
{
    if (c->planes > 0)
        phases<<<1024, THREADS, 0, stream>>>(*c);
    statistics<<<dim3(c->stat_chunks, c->H, 2), THREADS, 0, stream>>>(*c);
    finish_statistics<<<dim3(c->H, 2), QUARTERS * AKV_COMP_MAX_DIM, 0, stream>>>(*c);
    unit_rows<<<dim3((uint32_t)((c->S + AKV_COMP_TILE - 1) / AKV_COMP_TILE), c->H, 2), THREADS, 0, stream>>>(*c);
    load_queries<<<dim3(c->rows, c->H), AKV_COMP_MAX_DIM, 0, stream>>>(*c);
    query_lengths<<<c->H, THREADS, 0, stream>>>(*c);
    late_queries<<<dim3(c->late_rows, c->H), AKV_COMP_MAX_DIM, 0, stream>>>(*c);
    return cudaGetLastError();
}
