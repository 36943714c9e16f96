/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paper_values.cuh - phases of the kernel for profile paper behind the logits: weights and the histogram of value
 * anchors, residuals of values, and what an item leaves.
 */
#ifndef AKV_CUDA_PAPER_VALUES_CUH
#define AKV_CUDA_PAPER_VALUES_CUH

#include "cuda/paper_block.cuh"
#include "cuda/weights.cuh"

/* Logits to weights, relative to the first span's largest logit until one runs away. */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::soften(const akv_paper_span *sp, uint32_t count, uint32_t n,
                                                               held tokens[MOST_TOKENS])
{
    float origin[NR];
    const uint32_t *words = (const uint32_t *)(base + sp->words) + p->span_tokens;
#pragma unroll
    for (int i = 0; i < MOST_TOKENS; i++) {
        tokens[i].word = token_at(i) < count ? __ldg(words + place(i)) : 0;
    }
    const float cap = c.softcap;
    if (cap > 0.0f) {
#pragma unroll 1
        for (uint32_t t = threadIdx.x; t < count * NR; t += THREADS)
            logits()[t] = akv_cap(logits()[t], cap);
        __syncthreads(); /* others weigh them */
    }
#pragma unroll
    for (int r = 0; r < NR; r++) { /* a cap keeps the order, so the largest logit is capped here too */
        const float raw = unordered(small()->maxima[n & 1][r]), old = small()->ref[n & 1][r],
                    most = cap > 0.0f && raw > -INFINITY ? akv_cap(raw, cap) : raw,
                    ref = n > 0 && most <= old + RUN_AWAY ? old
                          : most == -INFINITY             ? 0.0f
                                                          : most;
        origin[r] = (float)WEIGHT_SCALE_LOG2 - ref * LOG2E;
        if ((int)threadIdx.x == r) {
            small()->top[(n + 1) & 1][r] = fmaxf(small()->top[n & 1][r], most);
            small()->ref[(n + 1) & 1][r] = ref;
        }
    }
    weigh_tokens(*this, count, origin, tokens);
}

/*
 * Weights x coefficients into the histogram of value anchors, in whole numbers, whose unit is the finest that cannot
 * overflow: span_values.cuh says why.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::value_anchors(uint32_t count, uint32_t n,
                                                                      const held tokens[MOST_TOKENS])
{
    const uint32_t k = p->padded_anchors;
    constexpr int EACH = NR * WARPS / 32; /* sums that a lane adds, then over the lanes of a row */
    float part = 0.0f, most = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        part += warp_sums()[lane * EACH + i];
#pragma unroll
    for (int o = 1; o < 32 / NR; o <<= 1)
        part += __shfl_xor_sync(0xffffffffu, part, o);
    bool rescale = false;
    float shrink[NR];
#pragma unroll
    for (int r = 0; r < NR; r++) {
        const float old = small()->ref[n & 1][r], ref = small()->ref[(n + 1) & 1][r];
        shrink[r] = n == 0 || ref == old ? 1.0f : akv_exp2((old - ref) * LOG2E);
        const float sum = small()->sum[n & 1][r] * shrink[r] + __shfl_sync(0xffffffffu, part, r * (32 / NR));
        if ((int)threadIdx.x == r)
            small()->sum[(n + 1) & 1][r] = sum;
        most = fmaxf(most, sum);
        rescale |= shrink[r] != 1.0f;
    }
    /* sums stay below 2^30 */
    const int room = 29 - numbers()->coeff_log - log2_above(most > 1.0f && most < 1e30f ? most : 1.0f);
    /* with some room, or the sum that grows would mean another unit every few spans */
    const int change = n == 0 || room >= exponent ? 0 : room - UNIT_ROOM - exponent;
    exponent = n == 0 ? room - UNIT_ROOM : exponent + change;
    if (rescale || change != 0) { /* the same in every thread, and rare */
#pragma unroll
        for (int r = 0; r < NR; r++) {
            const float by = shrink[r] * power_of_2(change);
#pragma unroll 1
            for (uint32_t a = threadIdx.x; a < k; a += THREADS)
                hist()[r * k + a] = __float2int_rn((float)hist()[r * k + a] * by);
#pragma unroll 1
            for (uint32_t e = lane; e < 64; e += 32)
                slab(warp)[e * NR + r] *= shrink[r];
        }
        __syncthreads();
    }
    const float unit = power_of_2(exponent);
#pragma unroll
    for (int i = 0; i < MOST_TOKENS; i++) {
        if (token_at(i) >= count)
            continue;
        const float factor = akv_f16((uint16_t)(tokens[i].word >> 16)) * unit;
        int *bin = hist() + (tokens[i].word & 0xffffu);
#pragma unroll
        for (int j = 0; j < NR / 2; j++) {
            const float2 w = __half22float2(as_half2(tokens[i].weights[j]));
            atomicAdd(bin + (2 * j) * k, __float2int_rn(w.x * factor));
            atomicAdd(bin + (2 * j + 1) * k, __float2int_rn(w.y * factor));
        }
    }
}

template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::ask_values(const akv_paper_span *sp, uint32_t group,
                                                                   value_ahead *next)
{
    const uint32_t pass = warp % PASSES;
    if (group >= sp->groups[1])
        return;
    const uint32_t *code = (const uint32_t *)(base + sp->codes[1]) + (group * WORDS + 2 * pass) * 32 + lane;
    const uint32_t *entries = (const uint32_t *)(base + sp->entries[1]) + group * 16 + row;
    next->words[0] = __ldg(code);
    next->words[1] = 2 * pass + 1 < WORDS ? __ldg(code + 32) : 0;
    next->entries[0] = __ldg(entries);
    next->entries[1] = __ldg(entries + 8);
}

/* A warp's 64 coordinates (two words of a lane) of every `shares`-th group; the first one was asked for. */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::value_residuals(const akv_paper_span *sp, uint32_t shares,
                                                                        value_ahead next)
{
    const uint32_t groups = sp->groups[1], pass = warp % PASSES, first = warp / PASSES;
    if (first >= shares || first >= groups)
        return;
    const bool both = 2 * pass + 1 < WORDS;
    const uint32_t *code = (const uint32_t *)(base + sp->codes[1]) + (first * WORDS + 2 * pass) * 32 + lane;
    const uint32_t *entries = (const uint32_t *)(base + sp->entries[1]) + first * 16 + row;
    const uint8_t *my_weights = (const uint8_t *)weights() + (NR == 4 ? col & 1 : col) * 4;
    float acc[8][4] = {}, total[4] = {};
#pragma unroll 1
    for (uint32_t g = first; g < groups; g += shares) {
        const uint32_t word0 = next.words[0], word1 = next.words[1], f0 = next.entries[0], f1 = next.entries[1];
        code += shares * (WORDS * 32);
        entries += shares * 16;
        if (g + shares < groups) {
            next.words[0] = __ldg(code);
            next.words[1] = both ? __ldg(code + 32) : 0;
            next.entries[0] = __ldg(entries);
            next.entries[1] = __ldg(entries + 8);
        }
        /* weights x scales: two heads of a lane's token, then turned into the operand, two tokens of a lane's head */
        const uint32_t w0 = *(const uint32_t *)(my_weights + (f0 & 0xffffu) * (NR * 2)),
                       w1 = *(const uint32_t *)(my_weights + (f1 & 0xffffu) * (NR * 2));
        const uint32_t b0 = transpose8(as_u32(__hmul2(as_half2(w0), as_half2(prmt(f0, 0, 0x3232u)))));
        uint32_t b1 = transpose8(as_u32(__hmul2(as_half2(w1), as_half2(prmt(f1, 0, 0x3232u)))));
        mma_f16(total, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, b0, b1);
        b1 =
            as_u32(__hmul2(as_half2(b1), __float2half2_rn(0.25f))); /* the second eight tokens' bits stand two higher */
        two_value_tiles(acc[0], acc[1], prmt(word0, 0, 0x4140u), b0, b1);
        two_value_tiles(acc[2], acc[3], prmt(word0, 0, 0x4342u), b0, b1);
        if (both) {
            two_value_tiles(acc[4], acc[5], prmt(word1, 0, 0x4140u), b0, b1);
            two_value_tiles(acc[6], acc[7], prmt(word1, 0, 0x4342u), b0, b1);
        }
    }
    if (2 * col < NR) { /* to the warp's slab; a bit is one of a half's lower eight, 2^-24 .. 2^-17 in fp16 */
        float2 *mine = (float2 *)(slab(warp) + row * NR + 2 * col);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i >= 4 && !both)
                break;
            constexpr float UNIT = (float)(1 << 24);
            const float scale = i % 2 == 0 ? 1.0f : 0.0625f;
            float2 *to = mine + i * 8 * NR / 2;
            float2 x = *to;
            x.x +=
                acc[i][0] * (UPPER_BIT * UNIT * scale) + acc[i][2] * (LOWER_BIT * UNIT / 2 * scale) + total[0] * LOWEST;
            x.y +=
                acc[i][1] * (UPPER_BIT * UNIT * scale) + acc[i][3] * (LOWER_BIT * UNIT / 2 * scale) + total[1] * LOWEST;
            *to = x;
        }
    }
}

/*
 * What the item leaves in its slot: histogram times value anchors and coded sums times the transform, on the tensor
 * cores, relative to the largest logit. Both are first divided by the sum of weights, which brings them into the
 * range of fp16.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::close(uint32_t slot, uint32_t n)
{
    const uint32_t k = p->padded_anchors;
    /*
     * Weights as fp16 and, where there are columns for it, what fp16 left of them: sums of many signs are small beside
     * their parts.
     */
    const auto operand_of = [&](float x, float y) {
        const uint32_t hi = pack_halves(x, y);
        const float2 back = __half22float2(as_half2(hi));
        return NR == 8 || row < 4 ? hi : pack_halves(x - back.x, y - back.y);
    };
    float *z = queries(), *scratch = (float *)shared; /* [NR, D]; [WARPS, D, NR] */
    const float value_unit = numbers()->value_unit, gain_unit = numbers()->gain_unit;
    const int g = NR == 4 ? row & 3 : row;
    if (threadIdx.x < NR) {
        const int r = threadIdx.x;
        const float top = small()->top[n & 1][r], ref = small()->ref[n & 1][r], sum = small()->sum[n & 1][r];
        const float post = top == -INFINITY ? 0.0f : akv_exp2((ref - top) * LOG2E - WEIGHT_SCALE_LOG2);
        small()->inverse[r] = sum > 0.0f ? 1.0f / sum : sum == 0.0f ? 0.0f : sum;
        small()->post[r] = sum * post;
        if (r < (int)rows) {
            const size_t at_slot = akv_slot(c, slot, head, row0 + r);
            c.partials.max[at_slot] = top;
            c.partials.sum[at_slot] = sum * post;
        }
    }
    for (int e = threadIdx.x; e < D * NR; e += THREADS) {
        const int coord = e / NR, r = e % NR, pass = coord / 64;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARES; w++)
            total += slab(w * PASSES + pass)[coord % 64 * NR + r];
        z[r * D + coord] = total * norms()[coord];
    }
    __syncthreads();
    const float inverse = small()->inverse[g];
    float acc[STEPS][4];
#pragma unroll
    for (int m = 0; m < STEPS; m++)
        acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.0f;
#pragma unroll 1
    for (int i = warp; i < STEPS; i += WARPS) {
        const float *from = z + g * D + i * 16 + 2 * col;
        const uint32_t b0 = operand_of(from[0] * inverse, from[1] * inverse),
                       b1 = operand_of(from[8] * inverse, from[9] * inverse);
        const uint4 *operand = (const uint4 *)(base + p->transform[1]) + i * 32 + lane;
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            const uint4 a = __ldg(operand + m * STEPS * 32);
            mma_f16(acc[m], a.x, a.y, a.z, a.w, b0, b1);
        }
    }
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[m][i] *= gain_unit / value_unit;
    const float unit = power_of_2(-exponent) * inverse;
#pragma unroll 1
    for (uint32_t i = warp; i < k / 16; i += WARPS) {
        const int *from = hist() + g * k + i * 16 + 2 * col;
        const uint32_t b0 = operand_of((float)from[0] * unit, (float)from[1] * unit),
                       b1 = operand_of((float)from[8] * unit, (float)from[9] * unit);
        const uint4 *operand = (const uint4 *)(base + p->values) + ((size_t)head * (k / 16) + i) * (STEPS * 32) + lane;
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            const uint4 a = __ldg(operand + m * 32);
            mma_f16(acc[m], a.x, a.y, a.z, a.w, b0, b1);
        }
    }
    if (NR == 4)
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[m][i] += __shfl_xor_sync(0xffffffffu, acc[m][i], 2);
    if (2 * col < NR)
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            float2 *to = (float2 *)(scratch + (warp * D + m * 16 + row) * NR + 2 * col);
            to[0] = make_float2(acc[m][0], acc[m][1]);
            to[4 * NR] = make_float2(acc[m][2], acc[m][3]);
        }
    __syncthreads();
    for (int e = threadIdx.x; e < D * NR; e += THREADS) {
        const int coord = e % D, r = e / D;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += scratch[(w * D + coord) * NR + r];
        if (r < (int)rows)
            c.partials.acc[akv_slot(c, slot, head, row0 + r) * D + coord] = total * value_unit * small()->post[r];
    }
}

#endif
