/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_project.cu - anchors as stored, coefficient and residual of every token, second moments of the residuals,
 * and what they are worth (src/codec/project.c, moments.c).
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define TILE AKV_COMP_TILE
#define M_STRIDE (AKV_COMP_MAX_DIM + 8) /* read by columns */

static __device__ __forceinline__ uint16_t to_f16(float x) /* as akv_f32_to_f16: saturates */
{
    return __half_as_ushort(__float2half_rn(fminf(x, 65504.0f)));
}

/*
 * 8 bits with a scale in units of each coordinate's typical size; what is read back replaces the anchor. A warp an
 * anchor.
 */
static __global__ void __launch_bounds__(THREADS) store_anchors(COMP_ARG)
{
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, a = blockIdx.x * 8 + threadIdx.x / 32;
    const int side = (int)blockIdx.z;
    const uint32_t dim = c.dim[side], pad = c.pad[side];
    if (a >= c.k)
        return;
    const size_t at = (size_t)head * c.k + a;
    float *x = c.anchor[side] + at * AKV_COMP_MAX_DIM;
    const float *units = c.unit_of[side] + head * AKV_COMP_MAX_DIM;
    float most = 0;
    for (uint32_t d = lane; d < dim; d += 32)
        most = fmaxf(most, fabsf(x[d]) / units[d]);
    const uint16_t stored = to_f16(akv_warp_max(most) / 127.0f);
    const float s = akv_f16(stored);
    float square = 0;
    int8_t *out = (int8_t *)(c.blob + c.section[AKV_SEC_ANCHORS + side]) + at * dim;
    for (uint32_t d = lane; d < dim; d += 32) {
        float q = s > 0.0f ? rintf(x[d] / (s * units[d])) : 0.0f;
        q = fminf(127.0f, fmaxf(-127.0f, q));
        out[d] = (int8_t)q;
        x[d] = q * s * units[d];
        square += x[d] * x[d];
    }
    square = akv_warp_sum(square);
    const float inverse = square > 0.0f && square < 3e38f ? rsqrtf(square) : 0.0f;
    for (uint32_t d = lane; d < pad; d += 32)
        ((__half *)c.unit16[side])[((size_t)head * c.k_rows + a) * pad + d] =
            __float2half_rn(d < dim ? x[d] * inverse : 0.0f);
    if (lane == 0) {
        ((uint16_t *)(c.blob + c.section[AKV_SEC_ANCHOR_SCALES + side]))[at] = stored;
        c.anchor_sq[side][at] = square;
    }
}

/*
 * Coefficients, residuals and their second moments: block (range, head, side). Warp w sums rows 16 w .. 16 w + 15 of
 * the matrix.
 */
static __global__ void __launch_bounds__(THREADS) project(COMP_ARG)
{
    __shared__ float tile[TILE * M_STRIDE];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4,
                   two = lane % 4 * 2;
    const int side = (int)blockIdx.z;
    const uint32_t dim = c.dim[side], pad = c.pad[side];
    const uint64_t begin = blockIdx.x * c.range_tokens,
                   end = begin + c.range_tokens < c.S ? begin + c.range_tokens : c.S;
    const float factor = side == AKV_SIDE_K && c.planes > 0 ? c.magnitude * c.magnitude : 1.0f;
    float acc[16][4];
#pragma unroll
    for (int n = 0; n < 16; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (uint64_t t0 = begin; t0 < end; t0 += TILE) {
        const auto token_of = [&](uint32_t r) { return t0 + r < end ? (uint32_t)(t0 + r) : NO_TOKEN; };
        __syncthreads();
        comp_anchor_space(c, side, head, TILE, tile, M_STRIDE, token_of);
        /* This warp's rows: warp, warp + 8, ...; lane i knows the anchors of the i-th. */
        const uint32_t my_token = lane < TILE / 8 ? token_of(warp + 8 * lane) : NO_TOKEN;
        uint32_t my_own = 0, my_near = 0;
        if (my_token != NO_TOKEN) {
            my_own = c.own[(size_t)head * c.S + my_token];
            my_near = my_own != 0 ? my_own - 1 : c.nearest[side][(size_t)head * c.S + my_token];
        }
        const float my_aa = c.anchor_sq[side][(size_t)head * c.k + my_near];
        float my_square = 0;
        int my_code = 0;
        for (uint32_t i0 = 0; i0 < TILE / 8; i0 += 4) {
            float values[4][4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t near = __shfl_sync(0xffffffffu, my_near, i0 + i);
                const float *a = c.anchor[side] + ((size_t)head * c.k + near) * AKV_COMP_MAX_DIM;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    values[i][j] = lane + 32 * j < dim ? a[lane + 32 * j] : 0.0f;
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                float *x = tile + (warp + 8 * (i0 + i)) * M_STRIDE, xa = 0;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    xa += lane + 32 * j < dim ? x[lane + 32 * j] * values[i][j] : 0.0f;
                xa = akv_warp_sum(xa);
                const float aa = __shfl_sync(0xffffffffu, my_aa, i0 + i);
                const uint32_t own = __shfl_sync(0xffffffffu, my_own, i0 + i);
                float gamma = aa > 0.0f ? xa / aa : 0.0f;
                if (!(fabsf(gamma) <= 65504.0f))
                    gamma = gamma > 0.0f ? 65504.0f : gamma < 0.0f ? -65504.0f : 0.0f;
                const int code = own != 0 ? -8 : (int)fminf(7.0f, fmaxf(-7.0f, rintf(gamma / (2.0f / 7.0f))));
                float square = 0;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (lane + 32 * j < dim) {
                        const float residual =
                            own != 0 ? 0.0f : fmaf(-comp_coefficient(code), values[i][j], x[lane + 32 * j]);
                        x[lane + 32 * j] = residual;
                        square += residual * residual;
                    }
                square = akv_warp_sum(square) * factor;
                if (lane == i0 + i) {
                    my_square = square;
                    my_code = code;
                }
            }
        }
        if (my_token != NO_TOKEN) {
            const size_t at = (size_t)head * c.S + my_token;
            c.nearest[side][at] = (uint16_t)my_near;
            c.coeff[side][at] = (int8_t)my_code;
            c.left[side][at] = my_square;
        }
        __syncwarp();
        if (side == AKV_SIDE_K)
            comp_turn(c, TILE, tile, M_STRIDE, 1, NULL, token_of);
        __syncwarp();
        for (uint32_t i = 0; i < TILE / 8; i++) { /* of length 1 in fp16, for the utilities and the codes */
            const uint32_t token = __shfl_sync(0xffffffffu, my_token, i);
            const float square = __shfl_sync(0xffffffffu, my_square, i);
            const float inverse = square > 0.0f && square < 3e38f ? rsqrtf(square) : 0.0f;
            float *x = tile + (warp + 8 * i) * M_STRIDE;
            for (uint32_t d = 2 * lane; d < pad; d += 64) {
                if (token != NO_TOKEN)
                    *(__half2 *)(c.rows16[side] + ((size_t)head * c.S + token) * pad + d) =
                        __floats2half2_rn(x[d] * inverse, x[d + 1] * inverse);
                x[d] = tf32(x[d]);
                x[d + 1] = tf32(x[d + 1]);
            }
        }
        __syncthreads();
        if (warp * 16 < pad)
            for (uint32_t k = 0; k < TILE; k += 8) {
                const float *p = tile + (k + lane % 4) * M_STRIDE + g;
                const float a[4] = {p[warp * 16], p[warp * 16 + 8], p[4 * M_STRIDE + warp * 16],
                                    p[4 * M_STRIDE + warp * 16 + 8]};
#pragma unroll
                for (int n = 0; n < 16; n++)
                    if (n * 8 < (int)pad)
                        mma_tf32(acc[n], a, p[n * 8], p[4 * M_STRIDE + n * 8]);
            }
    }
    float *out = c.moment_part[side] + ((size_t)head * c.num_ranges + blockIdx.x) * AKV_COMP_MAX_DIM * AKV_COMP_MAX_DIM;
    if (warp * 16 < pad)
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (n * 8 < (int)pad)
                    out[(warp * 16 + g + i / 2 * 8) * AKV_COMP_MAX_DIM + n * 8 + two + (i & 1)] = acc[n][i];
}

/* ----------------------------------------------------------------------------------------------------- utilities */

#define U_THREADS 512
#define U_ROWS 32u   /* observation rows at a time */
#define U_TOKENS 64u /* of the tile, rounded up; U_TILE of them count */
#define U_TILE AKV_COMP_UTILITY_TILE
#define U_ALL 128u /* with the neighbours before and after */
#define U_BEFORE AKV_COMP_SPREAD_BEFORE
#define L_STRIDE (U_ALL + 5)
#define E_STRIDE (U_TOKENS + 5)

struct Utility {
    float weight[U_ROWS * L_STRIDE]; /* squared attention weights, then spread */
    float error[U_ROWS * E_STRIDE], cross[U_ROWS * E_STRIDE], slope[U_ROWS * E_STRIDE];
    float observed[U_ROWS][4]; /* |y|^2, factor of |r|^2, and of the softmax: maximum, 1 / sum */
    float sums[2][U_THREADS];
};

/*
 * Utilities of U_TILE tokens: block (tile, head). A warp keeps 16 tokens in registers - of the keys with their
 * neighbours (warps 0 to 7), of the residuals (8 to 11) or of the values - and meets the rows in chunks. Squared
 * weights are spread over neighbours: 16 threads a row, 8 tokens each, geometric sums through shuffles.
 */
template <int PAD> static __global__ void __launch_bounds__(U_THREADS) utilities(COMP_ARG)
{
    extern __shared__ float4 memory[];
    Utility &s = *(Utility *)memory;
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t t0 = (int64_t)blockIdx.x * U_TILE, all0 = t0 - U_BEFORE;
    const auto token_of = [&](uint32_t r) {
        return r < U_TILE && t0 + r < (int64_t)c.S ? (uint32_t)(t0 + r) : NO_TOKEN;
    };
    const uint32_t kind = warp < 8 ? 0 : warp < 12 ? 1 : 2, column = (kind == 0 ? warp : warp % 4) * 16;
    uint4 b[2][PAD / 32];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint32_t r = column + n * 8 + lane / 4;
        const int64_t t = all0 + r;
        if (kind == 0) {
            comp_token_chunks<PAD>(c, b[n], AKV_SIDE_K, head, t >= 0 && t < (int64_t)c.S ? (uint32_t)t : NO_TOKEN);
        } else if (kind == 2) {
            comp_token_chunks<PAD>(c, b[n], AKV_SIDE_V, head, token_of(r));
        } else {
            const uint32_t token = token_of(r);
#pragma unroll
            for (int j = 0; j < PAD / 32; j++)
                b[n][j] = token != NO_TOKEN && j * 32 < (int)c.pad[0]
                              ? *(const uint4 *)(c.rows16[0] + ((size_t)head * c.S + token) * c.pad[0] + j * 32 +
                                                 lane % 4 * 8)
                              : make_uint4(0, 0, 0, 0);
        }
    }
    const uint16_t *left_side =
        (kind == 2 ? c.output16 : c.query16) + (size_t)head * c.rows * AKV_COMP_MAX_DIM + lane % 4 * 8;

    /* This thread's token for the sums: 8 threads a token, 4 rows each. */
    const uint32_t mine = threadIdx.x % U_TOKENS, group = threadIdx.x / U_TOKENS, token = token_of(mine);
    const size_t at = (size_t)head * c.S + (token != NO_TOKEN ? token : 0);
    const float value_sq = c.value_sq[at], key_residual = c.left[0][at], value_residual = c.left[1][at];
    const float error_scale = c.scale * c.scale * key_residual; /* residuals are of length 1 here */
    float u_k = 0, u_v = 0;
    for (uint32_t first = 0; first < c.rows; first += U_ROWS) {
        __syncthreads();
        if (threadIdx.x < U_ROWS) {
            const uint32_t r = threadIdx.x, row = first + r < c.rows ? first + r : c.rows - 1;
            s.observed[r][0] = c.output_sq[(size_t)head * c.rows + row];
            s.observed[r][1] =
                c.incoherent * c.row_sq[(size_t)head * c.rows + row] / (float)c.dim[0] * c.scale * c.scale;
            s.observed[r][2] = c.max[(size_t)head * c.rows + row];
            s.observed[r][3] = c.inverse[(size_t)head * c.rows + row];
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < 2; m++) { /* 16 rows times 16 tokens */
            const uint32_t r0 = first + m * 16 + lane / 4, last = c.rows - 1;
            const uint16_t *low = left_side + (size_t)(r0 < last ? r0 : last) * AKV_COMP_MAX_DIM;
            const uint16_t *high = left_side + (size_t)(r0 + 8 < last ? r0 + 8 : last) * AKV_COMP_MAX_DIM;
            float acc[2][4] = {};
#pragma unroll
            for (int j = 0; j < PAD / 32; j++) {
                const uint4 x = __ldg((const uint4 *)(low + j * 32)), y = __ldg((const uint4 *)(high + j * 32));
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    mma_f16(acc[n], x.x, y.x, x.y, y.y, b[n][j].x, b[n][j].y);
                    mma_f16(acc[n], x.z, y.z, x.w, y.w, b[n][j].z, b[n][j].w);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t r = m * 16 + lane / 4 + i / 2 * 8, col = column + n * 8 + lane % 4 * 2 + (i & 1);
                    const float x = acc[n][i];
                    if (kind == 1) {
                        s.error[r * E_STRIDE + col] = x;
                    } else if (kind == 2) {
                        s.cross[r * E_STRIDE + col] = x;
                    } else {
                        const int64_t t = all0 + col;
                        const uint32_t row = first + r;
                        const bool seen = t >= 0 && row < c.rows && t < (int64_t)(c.S - c.W + row % c.W + 1);
                        const float l = akv_cap(x * c.scale, c.cap);
                        const float a = seen ? __expf(l - s.observed[r][2]) * s.observed[r][3] : 0.0f;
                        s.weight[r * L_STRIDE + col] = a * a;
                        if (c.cap != 0.0f && col >= U_BEFORE && col < U_BEFORE + U_TOKENS) {
                            const float part = seen ? l / c.cap : 0.0f, slope = 1.0f - part * part;
                            s.slope[r * E_STRIDE + col - U_BEFORE] = slope * slope;
                        }
                    }
                }
        }
        __syncthreads();
        if (c.pooled_tokens > 0) {
            const uint32_t r = threadIdx.x / 16, part = threadIdx.x % 16;
            float *w = s.weight + r * L_STRIDE + part * 8, own[8], gives[8], sums[8], carry = 0;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                own[e] = w[e];
                gives[e] = all0 + part * 8 + e >= (int64_t)c.sinks ? own[e] : 0.0f; /* not from the sinks */
                carry = carry * c.decay + gives[e];
                sums[e] = carry;
            }
            float power = c.decay * c.decay;
            power *= power;
            power *= power; /* decay^8: of one thread's tokens */
            float upto = carry;
#pragma unroll
            for (int o = 1; o < 16; o *= 2) {
                const float other = __shfl_up_sync(0xffffffffu, upto, o, 16);
                if (part >= (uint32_t)o)
                    upto += power * other;
                power *= power;
            }
            const float before = __shfl_up_sync(0xffffffffu, upto, 1, 16);
            float scaled = part > 0 ? before : 0.0f;
            float next[3];
#pragma unroll
            for (int e = 0; e < 3; e++) {
                const float other = __shfl_down_sync(0xffffffffu, gives[e], 1, 16);
                next[e] = part < 15 ? other : 0.0f;
            }
#pragma unroll
            for (int e = 0; e < 8; e++) {
                scaled *= c.decay;
                sums[e] += scaled;
            }
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const float left = __shfl_up_sync(0xffffffffu, sums[e], 8, 16), gone = part >= 8 ? left : 0.0f;
                float others = fmaxf(0.0f, sums[e] - gives[e] - c.decay64 * gone);
                others += 0.5f * (e + 1 < 8 ? gives[(e + 1) % 8] : next[(e + 1) % 8]);
                others += 0.25f * (e + 2 < 8 ? gives[(e + 2) % 8] : next[(e + 2) % 8 % 3]);
                others += 0.1f * (e + 3 < 8 ? gives[(e + 3) % 8] : next[(e + 3) % 8 % 3]);
                w[e] = own[e] + c.pool_weight * others;
            }
            __syncthreads();
        }
#pragma unroll
        for (uint32_t j = 0; j < U_ROWS / 8; j++) {
            const uint32_t r = group * (U_ROWS / 8) + j;
            const float w = s.weight[r * L_STRIDE + U_BEFORE + mine], e = s.error[r * E_STRIDE + mine];
            const float deviation = fmaxf(0.0f, value_sq - 2.0f * s.cross[r * E_STRIDE + mine] + s.observed[r][0]);
            float error = (1.0f - c.incoherent) * e * e * error_scale + s.observed[r][1] * key_residual;
            if (c.cap != 0.0f)
                error *= s.slope[r * E_STRIDE + mine];
            u_k += w * deviation * error;
            u_v += w * value_residual;
        }
    }
    __syncthreads();
    s.sums[0][threadIdx.x] = u_k;
    s.sums[1][threadIdx.x] = u_v;
    __syncthreads();
    if (group != 0 || token == NO_TOKEN)
        return;
    u_k = u_v = 0;
    for (uint32_t i = 0; i < U_THREADS / U_TOKENS; i++) {
        u_k += s.sums[0][i * U_TOKENS + mine];
        u_v += s.sums[1][i * U_TOKENS + mine];
    }
    const bool anchor = c.own[at] != 0; /* exact already */
    c.rank[0][at] = anchor ? -1.0f : u_k >= 0.0f ? fminf(u_k, 3e38f) : 0.0f;
    c.rank[1][at] = anchor ? -1.0f : u_v >= 0.0f ? fminf(u_v, 3e38f) : 0.0f;
}

extern "C" cudaError_t akv_comp_project(const akv_comp *c, cudaStream_t stream)
{
    store_anchors<<<dim3((c->k + 7) / 8, c->H, 2), THREADS, 0, stream>>>(*c);
    COMP_TRY(akv_comp_nearest(c, 0, 0, 1, stream));
    project<<<dim3(c->num_ranges, c->H, 2), THREADS, 0, stream>>>(*c);
    const dim3 grid((uint32_t)((c->S + U_TILE - 1) / U_TILE), c->H);
    COMP_TRY(comp_shared(utilities<64>, sizeof(Utility)));
    COMP_TRY(comp_shared(utilities<128>, sizeof(Utility)));
    if (c->pad[0] == 64 && c->pad[1] == 64)
        utilities<64><<<grid, U_THREADS, sizeof(Utility), stream>>>(*c);
    else
        utilities<128><<<grid, U_THREADS, sizeof(Utility), stream>>>(*c);
    return cudaGetLastError();
}
