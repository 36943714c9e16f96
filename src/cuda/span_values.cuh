/* SPDX-License-Identifier: Apache-2.0 */
/*
 * span_values.cuh - phases of the span kernel behind the logits: weights and the histogram of value anchors, value
 * residuals, states.
 */
#ifndef AKV_CUDA_SPAN_VALUES_CUH
#define AKV_CUDA_SPAN_VALUES_CUH

#include "cuda/span_block.cuh"
#include "cuda/weights.cuh"

/* Logits to weights, relative to the first span's largest logit until one runs away. */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::soften(const akv_packed_span *sp, uint32_t count, uint32_t n,
                                                              held tokens[MOST_TOKENS])
{
    float origin[NR];
    const uint16_t *words = (const uint16_t *)(base + sp->words) + p->span_tokens;
#pragma unroll
    for (int i = 0; i < MOST_TOKENS; i++)
        tokens[i].word = token_at(i) < count ? __ldg(words + place(i)) : 0;
    const float cap = c.softcap;
    if (cap > 0.0f) {
#pragma unroll 1
        for (uint32_t t = threadIdx.x; t < count * NR; t += THREADS)
            logits()[t] = akv_cap(logits()[t], cap);
        __syncthreads(); /* others weigh them */
    }
    { /* a lane finds it out for one row */
        const int r = lane % NR;
        const float old = ref(n)[r];
        float most = unordered(maxima(n)[r]);
        if (cap > 0.0f && most > -INFINITY) /* a cap keeps the order */
            most = akv_cap(most, cap);
        const float now = n > 0 && most <= old + RUN_AWAY ? old : most == -INFINITY ? 0.0f : most,
                    mine = (float)WEIGHT_SCALE_LOG2 - now * LOG2E;
#pragma unroll
        for (int i = 0; i < NR; i++)
            origin[i] = __shfl_sync(0xffffffffu, mine, i);
        if (threadIdx.x < NR) {
            top(n + 1)[r] = fmaxf(top(n)[r], most);
            ref(n + 1)[r] = now;
        }
    }
    weigh_tokens(*this, count, origin, tokens);
}

/*
 * Weights x coefficients into the histogram of value anchors, in whole numbers: sums then do not depend on the order of
 * the threads, and shared memory adds them at once (float sums are loops there). Its unit is the finest that cannot
 * overflow, so it follows the sum of all weights: were it coarser than the many small weights, these would be in the
 * softmax's sum, but not in the values.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::value_anchors(uint32_t count, uint32_t n,
                                                                     const held tokens[MOST_TOKENS])
{
    const uint32_t k = p->num_anchors;
    constexpr int EACH = NR * WARPS / 32, LANES = 32 / NR; /* sums that a lane adds, then over the lanes of a row */
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        part += warp_sums()[lane * EACH + i];
#pragma unroll
    for (int o = 1; o < LANES; o <<= 1)
        part += __shfl_xor_sync(0xffffffffu, part, o);
    const float old = ref(n)[lane / LANES], now = ref(n + 1)[lane / LANES],
                shrink = n == 0 || now == old ? 1.0f : akv_exp2((old - now) * LOG2E),
                all = sum(n)[lane / LANES] * shrink + part;
    if (warp == 0 && lane % LANES == 0)
        sum(n + 1)[lane / LANES] = all;
    const bool rescale = __any_sync(0xffffffffu, shrink != 1.0f);
    /* not negative, so they order as whole numbers do; a NaN counts as 0, or it would spoil the other rows' unit */
    const float most = __int_as_float(__reduce_max_sync(0xffffffffu, __float_as_int(fmaxf(all, 0.0f))));
    /* coefficients are at most 2: sums stay below 2^30 */
    const int room = 28 - log2_above(most > 1.0f && most < 1e30f ? most : 1.0f);
    /* with some room, or the sum that grows would mean another unit every few spans */
    const int change = n == 0 || room >= exponent ? 0 : room - UNIT_ROOM - exponent;
    exponent = n == 0 ? room - UNIT_ROOM : exponent + change;
    if (rescale || change != 0) { /* the same in every thread, and rare */
#pragma unroll
        for (int r = 0; r < NR; r++) {
            const float of_row = __shfl_sync(0xffffffffu, shrink, r * LANES), by = of_row * power_of_2(change);
#pragma unroll 1
            for (uint32_t a = threadIdx.x; a < k; a += THREADS)
                hist()[r * k + a] = __float2int_rn((float)hist()[r * k + a] * by);
#pragma unroll 1
            for (uint32_t e = lane; e < D; e += 32)
                slab(warp)[e * NR + r] *= of_row;
        }
        __syncthreads();
    }
    const float unit = power_of_2(exponent);
#pragma unroll
    for (int i = 0; i < MOST_TOKENS; i++) {
        if (token_at(i) >= count)
            continue;
        const float factor = coefficients()[tokens[i].word >> 12] * unit;
        int *bin = hist() + (tokens[i].word & 4095u);
#pragma unroll
        for (int j = 0; j < NR / 2; j++) {
            const float2 w = __half22float2(as_half2(tokens[i].weights[j]));
            atomicAdd(bin + (2 * j) * k, __float2int_rn(w.x * factor));
            atomicAdd(bin + (2 * j + 1) * k, __float2int_rn(w.y * factor));
        }
    }
}

/* -------------------------------------------------------------------------------------------------- value residuals */

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
    /*
     * The level's sums to the warp's slab, in the transform's coordinates. Of four rows of queries, two columns of
     * lanes hold the same as the other two: they take every second tile.
     */
    constexpr int TOGETHER = NR == 4 ? 2 : 1;
    const int mine = NR == 4 ? col / 2 : 0;
    const akv_value_plane *planes =
        value_planes() + (level.first + (FOUR ? level.tiles : 0) + pass * PASS + mine) * 16 + row;
    float *mine_slab = slab(warp) + (NR == 4 ? col & 1 : col) * 2;
    __syncwarp(); /* another level gave these coordinates to other lanes */
    uint32_t to[PASS / TOGETHER][2];
    float sums[PASS / TOGETHER][4];
#pragma unroll
    for (int i = 0; i < PASS / TOGETHER;
         i++) { /* all loads first: no two rows here share a coordinate but the two bits of one */
        if (i * TOGETHER >= (int)n)
            break;
#pragma unroll
        for (int j = 0; j < 4; j++)
            sums[i][j] = TOGETHER == 2 && mine ? acc[(i * 2 + 1) % PASS][j] : acc[i * TOGETHER][j];
        const bool there = i * TOGETHER + mine < (int)n;
        const akv_value_plane *at_plane = planes + (there ? i * TOGETHER * 16 : 0);
        const akv_value_plane a = at_plane[0], b = at_plane[8];
        to[i][0] = there && a.weight != 0.0f ? a.coord * NR : UINT32_MAX; /* filled-up places have none */
        to[i][1] = there && b.weight != 0.0f ? b.coord * NR : UINT32_MAX;
        sums[i][0] = sums[i][0] * a.weight + total[0] * a.offset;
        sums[i][1] = sums[i][1] * a.weight + total[1] * a.offset;
        sums[i][2] = sums[i][2] * b.weight + total[0] * b.offset;
        sums[i][3] = sums[i][3] * b.weight + total[1] * b.offset;
        if (!FOUR && to[i][0] == to[i][1] && to[i][0] != UINT32_MAX) {
            sums[i][0] += sums[i][2];
            sums[i][1] += sums[i][3];
            to[i][1] = UINT32_MAX;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (to[i][h] != UINT32_MAX) {
                const float2 old = *(const float2 *)(mine_slab + to[i][h]);
                sums[i][2 * h] += old.x;
                sums[i][2 * h + 1] += old.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PASS / TOGETHER; i++) {
        if (i * TOGETHER >= (int)n)
            break;
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (to[i][h] != UINT32_MAX)
                *(float2 *)(mine_slab + to[i][h]) = make_float2(sums[i][2 * h], sums[i][2 * h + 1]);
    }
}

template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::value_residuals(const akv_packed_span *sp)
{
    const uint32_t end = sp->warp[(warp + 1) * SHARES];
    uint32_t g = sp->warp[warp * SHARES], l = 0;
    const uint8_t *code = base + sp->codes[1] + sp->warp_codes[warp * SHARES];
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

/*
 * Sums over value anchors (or directions): acc [dim x rows] of `count` of them as operands, of which this warp takes
 * every so manieth sixteen. weight(row, a) is at most about 2^10. As fp16 and, where there are columns for it, what
 * fp16 left of them: sums of many signs are small beside their parts.
 */
template <int D, int NR, int NF>
template <typename WEIGHT>
__device__ __forceinline__ void span_block<D, NR, NF>::apply(float acc[STEPS][4], const uint8_t *operands,
                                                             uint32_t count, const WEIGHT &weight)
{
    const int g = NR == 4 ? row & 3 : row;
    float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f}; /* a byte under 0x64 is 1024 + 128 + anchor */
#pragma unroll
    for (int m = 0; m < STEPS; m++)
        acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0.0f;
#pragma unroll 1
    for (uint32_t i = warp; i < (count + 15) / 16; i += WARPS) {
        uint32_t b[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t a = i * 16 + 8 * j + 2 * col;
            const float x = a < count ? weight(g, a) : 0.0f, y = a + 1 < count ? weight(g, a + 1) : 0.0f;
            const uint32_t hi = pack_halves(x, y);
            const float2 back = __half22float2(as_half2(hi));
            b[j] = NR == 8 || row < 4 ? hi : pack_halves(x - back.x, y - back.y);
        }
        constexpr uint32_t MINUS_BIAS = 0xe480e480u;
        mma_f16(bias, MINUS_BIAS, MINUS_BIAS, MINUS_BIAS, MINUS_BIAS, b[0], b[1]);
        const uint4 *from = (const uint4 *)(operands + (size_t)i * 16 * D) + lane;
#pragma unroll
        for (int m = 0; m < STEPS; m += 2) {
            const uint4 w = __ldg(from + m * 16);
            mma_f16(acc[m], prmt(w.x, 0x64646464u, 0x4140u), prmt(w.x, 0x64646464u, 0x4342u),
                    prmt(w.y, 0x64646464u, 0x4140u), prmt(w.y, 0x64646464u, 0x4342u), b[0], b[1]);
            mma_f16(acc[m + 1], prmt(w.z, 0x64646464u, 0x4140u), prmt(w.z, 0x64646464u, 0x4342u),
                    prmt(w.w, 0x64646464u, 0x4140u), prmt(w.w, 0x64646464u, 0x4342u), b[0], b[1]);
        }
    }
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            acc[m][j] += bias[j];
            if (NR == 4)
                acc[m][j] += __shfl_xor_sync(0xffffffffu, acc[m][j], 2);
        }
}

/*
 * What the item leaves in its slot: histogram times value anchors and sums of residuals times the transform, on the
 * tensor cores, relative to the largest logit. Weights are brought into the range of fp16 first.
 */
template <int D, int NR, int NF> __device__ __forceinline__ void span_block<D, NR, NF>::close(uint32_t part, uint32_t n)
{
    const uint32_t k = p->num_anchors, cols = p->basis_cols[1], basis_dim = p->basis_dim[1];
    float *post = warp_sums(); /* [NR]; behind them the largest weights, of anchors and of directions */
    int *largest = (int *)post + NR;
    float *z = logits(); /* [NR, D] */
    const float *scales = (const float *)(base + p->anchor_scales[1]) + (size_t)head * k,
                *basis_scales = (const float *)(base + p->basis_scales[1]) + (size_t)head * cols,
                *units = (const float *)(base + p->units[1]) + (size_t)head * D;
    if (threadIdx.x < NR) {
        const uint32_t r = threadIdx.x;
        const float most = top(n)[r],
                    x = most == -INFINITY ? 0.0f : akv_exp2((ref(n)[r] - most) * LOG2E) * (1.0f / (1 << WEIGHT_SCALE_LOG2));
        post[r] = x;
        largest[r] = largest[NR + r] = 0;
        if (r < rows) {
            const size_t slot = akv_slot(c, part, head, row0 + r);
            c.partials.max[slot] = most;
            c.partials.sum[slot] = sum(n)[r] * x;
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < D * NR; e += THREADS) { /* a warp holds all rows of some coordinates */
        const uint32_t r = e % NR, coord = e / NR;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += slab(w)[e];
        total *= post[r];
        if (coord < cols) {
            total *= __ldg(basis_scales + coord);
            atomicMax(largest + NR + r, __float_as_int(fabsf(total)));
        }
        z[r * D + coord] = total;
    }
    float *weights_of = (float *)hist(); /* in the histogram's place */
    const float unit = power_of_2(-exponent);
#pragma unroll
    for (int r = 0; r < NR; r++) {
        const float by = unit * post[r];
        float most = 0.0f;
#pragma unroll 4
        for (uint32_t a = threadIdx.x; a < k; a += THREADS) {
            const float x = (float)hist()[r * k + a] * by * __ldg(scales + a);
            weights_of[r * k + a] = x;
            most = fmaxf(most, fabsf(x));
        }
        most = akv_warp_max(most);
        if (lane == 0)
            atomicMax(largest + r, __float_as_int(most));
    }
    __syncthreads();
    /* powers of two that bring the largest near 2^10, and back */
    const auto size_of = [&](int r, int which) {
        const float x = __int_as_float(largest[which * NR + r]);
        return x > 0.0f && x < INFINITY ? 10 - log2_above(x) : 0;
    };
    const int g = NR == 4 ? row & 3 : row;
    float acc[STEPS][4], *mine = slab(warp); /* [D, NR] */
    const auto leave = [&](int which, bool first) {
        if (2 * col < NR) {
            const float back0 = power_of_2(-size_of(2 * col, which)), back1 = power_of_2(-size_of(2 * col + 1, which));
#pragma unroll
            for (int m = 0; m < STEPS; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t coord = m * 16 + h * 8 + row;
                    float2 *to = (float2 *)(mine + coord * NR + 2 * col);
                    const float by = first ? __ldg(units + coord) : 1.0f;
                    float2 x = make_float2(acc[m][2 * h] * back0 * by, acc[m][2 * h + 1] * back1 * by);
                    if (!first) {
                        const float2 old = *to;
                        x.x += old.x;
                        x.y += old.y;
                    }
                    *to = x;
                }
        }
    };
    const float by_anchor = power_of_2(size_of(g, 0)), by_column = power_of_2(size_of(g, 1));
    apply(acc, base + p->anchors[1] + (size_t)head * ((k + 15) / 16 * 16) * D, k,
          [&](int r, uint32_t a) { return weights_of[r * k + a] * by_anchor; });
    leave(0, true);
    apply(acc, base + p->basis[1] + (size_t)head * ((cols + 15) / 16 * 16) * D, cols,
          [&](int r, uint32_t a) { return z[r * D + a] * by_column; });
    leave(1, false);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < D * NR; e += THREADS) {
        const uint32_t coord = e % D, r = e / D;
        float total = coord >= basis_dim ? z[r * D + cols + coord - basis_dim] : 0.0f; /* coded as it is */
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += slab(w)[coord * NR + r];
        if (r < rows)
            c.partials.acc[akv_slot(c, part, head, row0 + r) * D + coord] = total;
    }
}

#endif
