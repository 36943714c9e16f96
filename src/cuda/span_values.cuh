/* SPDX-License-Identifier: Apache-2.0 */
/*
 * span_values.cuh - phases of the span kernel behind the logits: weights and the histogram of value anchors, value
 * residuals, states.
 */
#ifndef AKV_CUDA_SPAN_VALUES_CUH
#define AKV_CUDA_SPAN_VALUES_CUH

#include "cuda/span_block.cuh"

#define UNIT_ROOM 3

/* Least n with x <= 2^n, for x > 0. */
static __device__ __forceinline__ int log2_above(float x)
{
    return (int)(__float_as_uint(x) >> 23) - 126;
}

static __device__ __forceinline__ float power_of_2(int n)
{
    return __uint_as_float((uint32_t)((n < -126 ? -126 : n > 127 ? 127 : n) + 127) << 23);
}

/* Logits to weights, relative to the first span's largest logit until one runs away. */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::soften(uint32_t count, const int *maxima, bool first)
{
    float origin[NR], span_sum[NR] = {};
#pragma unroll
    for (int r = 0; r < NR; r++) {
        const float most = unordered(maxima[r]), old = ref[r];
        top[r] = fmaxf(top[r], most);
        if (first || most > old + RUN_AWAY)
            ref[r] = most == -INFINITY ? 0.0f : most;
        shrink[r] = first || ref[r] == old ? 1.0f : akv_exp2((old - ref[r]) * LOG2E);
        origin[r] = (float)WEIGHT_SCALE_LOG2 - ref[r] * LOG2E;
    }
#pragma unroll 2
    for (uint32_t t = threadIdx.x; t < count; t += THREADS) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const float4 l = ((const float4 *)logits())[t * NT + i];
            ((float4 *)logits())[t * NT + i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); /* for the next span's residuals */
            const float x = akv_exp2(l.x * LOG2E + origin[4 * i]), y = akv_exp2(l.y * LOG2E + origin[4 * i + 1]);
            const float z = akv_exp2(l.z * LOG2E + origin[4 * i + 2]), w = akv_exp2(l.w * LOG2E + origin[4 * i + 3]);
            ((uint2 *)weights())[t * NT + i] = make_uint2(pack_halves(x, y), pack_halves(z, w));
            span_sum[4 * i] += x;
            span_sum[4 * i + 1] += y;
            span_sum[4 * i + 2] += z;
            span_sum[4 * i + 3] += w;
        }
    }
#pragma unroll
    for (int r = 0; r < NR; r++) {
        span_sum[r] = akv_warp_sum(span_sum[r]);
        if (lane == 0)
            warp_sums()[r * WARPS + warp] = span_sum[r];
    }
}

/*
 * Weights x coefficients into the histogram of value anchors, in whole numbers: sums then do not depend on the order of
 * the threads, and shared memory adds them at once (float sums are loops there). Its unit is the finest that cannot
 * overflow, so it follows the sum of all weights: were it coarser than the many small weights, these would be in the
 * softmax's sum, but not in the values.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::value_anchors(const akv_packed_span *sp, uint32_t count,
                                                                     bool first)
{
    const uint32_t k = p->num_anchors;
    constexpr int EACH = NR * WARPS / 32; /* sums that a lane adds, then over the lanes of a row */
    float part = 0.0f, most = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        part += warp_sums()[lane * EACH + i];
#pragma unroll
    for (int o = 1; o < 32 / NR; o <<= 1)
        part += __shfl_xor_sync(0xffffffffu, part, o);
#pragma unroll
    for (int r = 0; r < NR; r++) {
        sum[r] = sum[r] * shrink[r] + __shfl_sync(0xffffffffu, part, r * (32 / NR));
        most = fmaxf(most, sum[r]);
    }
    /* coefficients are at most 2: sums stay below 2^30 */
    const int room = 28 - log2_above(most > 1.0f && most < 1e30f ? most : 1.0f);
    /* with some room, or the sum that grows would mean another unit every few spans */
    const int change = first || room >= exponent ? 0 : room - UNIT_ROOM - exponent;
    exponent = first ? room - UNIT_ROOM : exponent + change;
    bool rescale = change != 0;
#pragma unroll
    for (int r = 0; r < NR; r++)
        rescale |= shrink[r] != 1.0f;
    if (rescale) { /* the same in every thread, and rare */
#pragma unroll
        for (int r = 0; r < NR; r++) {
            const float by = shrink[r] * power_of_2(change);
#pragma unroll 1
            for (uint32_t a = threadIdx.x; a < k; a += THREADS)
                hist()[r * k + a] = __float2int_rn((float)hist()[r * k + a] * by);
#pragma unroll 1
            for (uint32_t e = lane; e < D; e += 32)
                slab(warp)[e * NR + r] *= shrink[r];
        }
        __syncthreads();
    }
    const uint16_t *words = (const uint16_t *)(base + sp->words) + p->span_tokens;
    const uint32_t each = p->span_tokens / 32; /* a power of two */
    const float unit = __uint_as_float((uint32_t)(exponent + 127) << 23);
#pragma unroll 4
    for (uint32_t u = warp; u < each; u += WARPS) { /* akv_value_place */
        const uint32_t t = lane * each + ((u + lane) & (each - 1));
        if (t >= count)
            continue;
        const uint32_t word = __ldg(words + u * 32 + lane);
        const float factor = coefficients()[word >> 12] * unit;
        int *bin = hist() + (word & 4095u);
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint2 w = ((const uint2 *)weights())[t * NT + i];
            const float2 a = __half22float2(as_half2(w.x)), b = __half22float2(as_half2(w.y));
            atomicAdd(bin + (4 * i) * k, __float2int_rn(a.x * factor));
            atomicAdd(bin + (4 * i + 1) * k, __float2int_rn(a.y * factor));
            atomicAdd(bin + (4 * i + 2) * k, __float2int_rn(b.x * factor));
            atomicAdd(bin + (4 * i + 3) * k, __float2int_rn(b.y * factor));
        }
    }
}

/* -------------------------------------------------------------------------------------------------- value residuals */

/*
 * Two tiles of bits from 16 of them: one "and" makes two fp16 numbers of two tokens' bits (packed.h), 2^-24 .. 2^-17 or
 * 0.
 */
static __device__ __forceinline__ void two_value_tiles(float acc0[4], float acc1[4], uint32_t w, uint32_t b0,
                                                       uint32_t b1)
{
    mma_f16(acc0, w & 0x00010001u, w & 0x00020002u, w & 0x00040004u, w & 0x00080008u, b0, b1);
    mma_f16(acc1, w & 0x00100010u, w & 0x00200020u, w & 0x00400040u, w & 0x00800080u, b0, b1);
}

/* One level's groups of a share, at most PASS tiles of them. */
template <int D, int NR, int NF>
template <bool FOUR>
__device__ __forceinline__ void span_block<D, NR, NF>::value_pass(const akv_packed_span *sp, const span_level &level,
                                                                  uint32_t pass, uint32_t g, uint32_t end,
                                                                  const uint8_t *code)
{
    const uint32_t all = FOUR ? level.four : level.tiles, n = all - pass * PASS < PASS ? all - pass * PASS : PASS;
    const uint16_t *entries = (const uint16_t *)(base + sp->entries[1]) + g * 16 + row;
    const uint8_t *my_weights = (const uint8_t *)weights() + (NR == 4 ? col & 1 : col) * 4;
    const uint32_t s4a = p->steps4[0], s4b = p->steps4[1];
    /* words of four tiles, two left over as 16 bits */
    const bool two_words = n > 6, one_word = n > 2;
    const int left_at = (int)(n / 4 * 128) - lane * 2;
    code += FOUR ? (level.tiles + 1) / 2 * 64 + pass * PASS * 128 : pass * (PASS / 4) * 128;
    code += lane * 4;
    uint32_t e0 = __ldg(entries), e1 = __ldg(entries + 8), next0 = 0, next1 = 0;
    const auto fetch_words = [&]() {
        if (!FOUR) {
            next0 = one_word ? __ldg((const uint32_t *)code) : __ldg((const uint16_t *)(code + left_at));
            if (n > 4)
                next1 = two_words ? __ldg((const uint32_t *)(code + 128)) : __ldg((const uint16_t *)(code + left_at));
        }
    };
    fetch_words();
    float acc[PASS][4], total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PASS; i++)
        acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll 1
    for (; g < end; g++) {
        const uint32_t word0 = next0, word1 = next1;
        const uint8_t *mine = code;
        code += level.group_bytes;
        if (g + 1 < end)
            fetch_words();
        /* weights x gains: two heads of a lane's token, then turned into the operand, two tokens of a lane's head */
        const uint32_t w0 = *(const uint32_t *)(my_weights + (e0 >> 4) * (NR * 2)),
                       w1 = *(const uint32_t *)(my_weights + (e1 >> 4) * (NR * 2));
        const uint32_t g0 = half_gains()[e0 & 15], g1 = half_gains()[e1 & 15];
        if (g + 1 < end) {
            entries += 16;
            e0 = __ldg(entries);
            e1 = __ldg(entries + 8);
        }
        const uint32_t b0 = transpose8(as_u32(__hmul2(as_half2(w0), as_half2(g0))));
        uint32_t b1 = transpose8(as_u32(__hmul2(as_half2(w1), as_half2(g1))));
        if constexpr (FOUR) {
            uint32_t raw[PASS];
#pragma unroll
            for (int i = 0; i < PASS; i++)
                raw[i] = i < (int)n ? __ldg((const uint32_t *)(mine + i * 128)) : 0;
#pragma unroll
            for (int i = 0; i < PASS; i++) { /* magnitudes of the positive codes less those of the negative ones */
                if (i >= (int)n)
                    break;
                const uint32_t w = raw[i], x = w ^ 0x88888888u;
                const uint32_t p0 = prmt(s4a, s4b, w), n0 = prmt(s4a, s4b, x), p1 = prmt(s4a, s4b, w >> 16),
                               n1 = prmt(s4a, s4b, x >> 16);
                mma_f16(
                    acc[i],
                    as_u32(__hsub2(as_half2(prmt(p0, 0x64646464u, 0x4140u)), as_half2(prmt(n0, 0x64646464u, 0x4140u)))),
                    as_u32(__hsub2(as_half2(prmt(p0, 0x64646464u, 0x4342u)), as_half2(prmt(n0, 0x64646464u, 0x4342u)))),
                    as_u32(__hsub2(as_half2(prmt(p1, 0x64646464u, 0x4140u)), as_half2(prmt(n1, 0x64646464u, 0x4140u)))),
                    as_u32(__hsub2(as_half2(prmt(p1, 0x64646464u, 0x4342u)), as_half2(prmt(n1, 0x64646464u, 0x4342u)))),
                    b0, b1);
            }
        } else {
            mma_f16(total, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, b0, b1);
            b1 = as_u32(
                __hmul2(as_half2(b1), __float2half2_rn(0.25f))); /* the second eight tokens' bits stand two higher */
            two_value_tiles(acc[0], acc[1], prmt(word0, 0, 0x4140u), b0, b1);
            if (n > 2) {
                two_value_tiles(acc[2], acc[3], prmt(word0, 0, 0x4342u), b0, b1);
                if (n > 4) {
                    two_value_tiles(acc[4], acc[5], prmt(word1, 0, 0x4140u), b0, b1);
                    if (n > 6)
                        two_value_tiles(acc[6], acc[7], prmt(word1, 0, 0x4342u), b0, b1);
                }
            }
        }
    }
    /* the level's sums to the warp's slab, in the transform's coordinates */
    const akv_value_plane *planes = value_planes() + (level.first + (FOUR ? level.tiles : 0) + pass * PASS) * 16 + row;
    float *mine_slab = slab(warp) + 2 * col;
    __syncwarp(); /* another level gave these coordinates to other lanes */
    if (2 * col < NR) {
        uint32_t to[PASS][2];
#pragma unroll
        for (int i = 0; i < PASS;
             i++) { /* all loads first: no two rows here share a coordinate but the two bits of one */
            if (i >= (int)n)
                break;
            const akv_value_plane a = planes[i * 16], b = planes[i * 16 + 8];
            to[i][0] = a.weight != 0.0f ? a.coord * NR : UINT32_MAX; /* filled-up places have none */
            to[i][1] = b.weight != 0.0f ? b.coord * NR : UINT32_MAX;
            acc[i][0] = acc[i][0] * a.weight + total[0] * a.offset;
            acc[i][1] = acc[i][1] * a.weight + total[1] * a.offset;
            acc[i][2] = acc[i][2] * b.weight + total[0] * b.offset;
            acc[i][3] = acc[i][3] * b.weight + total[1] * b.offset;
            if (!FOUR && to[i][0] == to[i][1] && to[i][0] != UINT32_MAX) {
                acc[i][0] += acc[i][2];
                acc[i][1] += acc[i][3];
                to[i][1] = UINT32_MAX;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (to[i][h] != UINT32_MAX) {
                    const float2 old = *(const float2 *)(mine_slab + to[i][h]);
                    acc[i][2 * h] += old.x;
                    acc[i][2 * h + 1] += old.y;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PASS; i++) {
            if (i >= (int)n)
                break;
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (to[i][h] != UINT32_MAX)
                    *(float2 *)(mine_slab + to[i][h]) = make_float2(acc[i][2 * h], acc[i][2 * h + 1]);
        }
    }
}

template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::value_residuals(const akv_packed_span *sp)
{
    const uint32_t end = sp->warp[1][(warp + 1) * SHARES];
    uint32_t g = sp->warp[1][warp * SHARES], l = 0;
    const uint8_t *code = base + sp->codes[1] + sp->warp_codes[1][warp * SHARES];
#pragma unroll 1
    while (g < end) {
        while (g >= sp->groups[1][l + 1])
            l++;
        const span_level level = value_levels()[l];
        const uint32_t level_end = sp->groups[1][l + 1] < end ? sp->groups[1][l + 1] : end;
#pragma unroll 1
        for (uint32_t pass = 0; pass * PASS < level.tiles; pass++)
            value_pass<false>(sp, level, pass, g, level_end, code);
#pragma unroll 1
        for (uint32_t pass = 0; pass * PASS < level.four; pass++)
            value_pass<true>(sp, level, pass, g, level_end, code);
        code += (level_end - g) * level.group_bytes;
        g = level_end;
    }
}

/* ----------------------------------------------------------------------------------------------------------- states */

template <int D, int NR, int NF> __device__ __forceinline__ void span_block<D, NR, NF>::write_states(uint32_t part)
{
    const uint32_t k = p->num_anchors;
    float *post = warp_sums(); /* [NR] */
#pragma unroll
    for (int r = 0; r < NR; r++)
        if ((int)threadIdx.x == r && r < (int)rows) {
            const size_t slot = (size_t)part * c.rows + row0 + r;
            post[r] = top[r] == -INFINITY ? 0.0f : akv_exp2((ref[r] - top[r]) * LOG2E) * (1.0f / WEIGHT_SCALE);
            c.states.max[slot] = top[r];
            c.states.sum[slot] = sum[r] * post[r];
        }
    __syncthreads();
    const size_t first = (size_t)part * c.rows + row0;
    for (uint32_t e = threadIdx.x; e < D * NR; e += THREADS) {
        const uint32_t r = e % NR, coord = e / NR;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += slab(w)[e];
        if (r < rows)
            c.states.sums[(first + r) * D + coord] = total * post[r];
    }
#pragma unroll 1
    for (uint32_t r = 0; r < rows; r++) {
        const float unit = power_of_2(-exponent) * post[r];
        const int *from = hist() + r * k;
        float *to = c.states.hist + (first + r) * c.most_anchors;
#pragma unroll 4
        for (uint32_t a = threadIdx.x; a < k; a += THREADS)
            to[a] = (float)from[a] * unit;
    }
}

#endif
