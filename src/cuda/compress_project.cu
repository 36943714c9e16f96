/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress_project.cu - anchors as stored, coefficient and residual of every token, second moments of the residuals
 * (src/codec/project.c, moments.c).
 */
#include "cuda/compress_device.cuh"

#define THREADS 256
#define PROJECT_THREADS 512
#define WARPS (PROJECT_THREADS / 32)
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
 * Coefficients, residuals and their second moments: block (range, head, side). Warp w sums rows w % 8 * 16 to
 * + 15 and columns w / 8 * 64 to + 63 of the matrix.
 */
static __global__ void __launch_bounds__(PROJECT_THREADS, 2) project(COMP_ARG)
{
    __shared__ float tile[TILE * M_STRIDE];
    const uint32_t head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4,
                   two = lane % 4 * 2, row0 = warp % 8 * 16, col0 = warp / 8 * 64;
    const int side = (int)blockIdx.z;
    const uint32_t dim = c.dim[side], pad = c.pad[side];
    const uint64_t begin = blockIdx.x * c.range_tokens,
                   end = begin + c.range_tokens < c.S ? begin + c.range_tokens : c.S;
    const float factor = side == AKV_SIDE_K && c.planes > 0 ? c.magnitude * c.magnitude : 1.0f;
    float acc[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++)
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    for (uint64_t t0 = begin; t0 < end; t0 += TILE) {
        const auto token_of = [&](uint32_t r) { return t0 + r < end ? (uint32_t)(t0 + r) : NO_TOKEN; };
        __syncthreads();
        comp_anchor_space(c, side, head, TILE, tile, M_STRIDE, token_of);
        /* This warp's rows: warp, warp + WARPS, ...; lane i knows the anchors of the i-th. */
        const uint32_t my_token = lane < TILE / WARPS ? token_of(warp + WARPS * lane) : NO_TOKEN;
        uint32_t my_own = 0, my_near = 0;
        if (my_token != NO_TOKEN) {
            my_own = c.own[(size_t)head * c.S + my_token];
            my_near = my_own != 0 ? my_own - 1 : c.nearest[side][(size_t)head * c.S + my_token];
        }
        const float my_aa = c.anchor_sq[side][(size_t)head * c.k + my_near];
        float my_square = 0;
        int my_code = 0;
        for (uint32_t i0 = 0; i0 < TILE / WARPS; i0 += 4) {
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
                float *x = tile + (warp + WARPS * (i0 + i)) * M_STRIDE, xa = 0;
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
        for (uint32_t i = 0; i < TILE / WARPS; i++) { /* of length 1 in fp16, for the utilities and the codes */
            const uint32_t token = __shfl_sync(0xffffffffu, my_token, i);
            const float square = __shfl_sync(0xffffffffu, my_square, i);
            const float inverse = square > 0.0f && square < 3e38f ? rsqrtf(square) : 0.0f;
            float *x = tile + (warp + WARPS * i) * M_STRIDE;
            for (uint32_t d = 2 * lane; d < pad; d += 64) {
                if (token != NO_TOKEN)
                    *(__half2 *)(c.rows16[side] + ((size_t)head * c.S + token) * pad + d) =
                        __floats2half2_rn(x[d] * inverse, x[d + 1] * inverse);
                x[d] = tf32(x[d]);
                x[d + 1] = tf32(x[d + 1]);
            }
        }
        __syncthreads();
        if (row0 < pad)
            for (uint32_t k = 0; k < TILE; k += 8) {
                const float *p = tile + (k + lane % 4) * M_STRIDE + g;
                const float a[4] = {p[row0], p[row0 + 8], p[4 * M_STRIDE + row0], p[4 * M_STRIDE + row0 + 8]};
#pragma unroll
                for (int n = 0; n < 8; n++)
                    if (col0 + n * 8 < pad)
                        mma_tf32(acc[n], a, p[col0 + n * 8], p[4 * M_STRIDE + col0 + n * 8]);
            }
    }
    float *out = c.moment_part[side] + ((size_t)head * c.num_ranges + blockIdx.x) * AKV_COMP_MAX_DIM * AKV_COMP_MAX_DIM;
    if (row0 < pad)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (col0 + n * 8 < pad)
                    out[(row0 + g + i / 2 * 8) * AKV_COMP_MAX_DIM + col0 + n * 8 + two + (i & 1)] = acc[n][i];
}

extern "C" cudaError_t akv_comp_project(const akv_comp *c, cudaStream_t stream)
{
    store_anchors<<<dim3((c->k + 7) / 8, c->H, 2), THREADS, 0, stream>>>(*c);
    COMP_TRY(akv_comp_nearest(c, 0, 0, 1, stream));
    project<<<dim3(c->num_ranges, c->H, 2), PROJECT_THREADS, 0, stream>>>(*c);
    return cudaGetLastError();
}
