/* SPDX-License-Identifier: Apache-2.0 */
/* span_keys.cuh - phases of the span kernel that make logits: residuals of keys, then anchors. */
#ifndef AKV_CUDA_SPAN_KEYS_CUH
#define AKV_CUDA_SPAN_KEYS_CUH

#include "cuda/span_block.cuh"

/* -------------------------------------------------------------------------------------------------------- residuals */

/*
 * Tables of byte permutations. They come from shared memory, or the compiler would make them anew before every use. A
 * permutation looks at three bits of each nibble and makes 0 or -1 of the one its table depends on; nibbles of 8 and
 * more repeat the byte's sign, which for 0 and -1 changes nothing. The fourth bit itself gives 1 - bit from a table of
 * ones. Here two groups of residuals at once, which share the operand of queries.
 */
template <int NT>
static __device__ __forceinline__ void bit_tiles(int acc[2][NT][4], const bit_tables &k, uint32_t w0, uint32_t w1,
                                                 const uint2 *b)
{
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const uint2 q = b[t * 32];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t w = j == 0 ? w0 : w1;
            mma_i8(acc[j][t], prmt(k.first, k.first, w), prmt(k.second, k.second, w), prmt(0u, k.minus, w),
                   prmt(k.ones, k.ones, w), q.x, q.y);
        }
    }
}

/* Two groups of one level, or one: codes and entries as far as they are fetched before they are worked on. */
struct key_pair {
    uint32_t word0[2], word1[2], half[2], byte[2], entry[2][2];
    uint32_t level, code[2]; /* where the lane's words begin, from the span's codes */
};

/*
 * Pairs of groups, those with the longest codes first, to whichever warp is free: with a fixed share for each warp a
 * sixth of the time went by waiting for the last one.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::key_residuals(const akv_packed_span *sp)
{
    const uint32_t L = p->num_levels;
    uint32_t pair_end = 0; /* of level `lane`: pairs of it and those before */
    if (lane < (int)L)
        pair_end = (sp->groups[0][lane + 1] - sp->groups[0][lane] + 1u) / 2;
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) {
        const uint32_t before = __shfl_up_sync(0xffffffffu, pair_end, o);
        pair_end += lane >= o ? before : 0;
    }
    const uint32_t all = __shfl_sync(0xffffffffu, pair_end, 15),
                   counter = (uint32_t)__cvta_generic_to_shared(keys_taken());
    const uint32_t nothing = this->nothing()[lane];
    const bit_tables k = *(bit_constants() + nothing);
    const uint8_t *codes = base + sp->codes[0] + lane * 4;
    const uint16_t *entries = (const uint16_t *)(base + sp->entries[0]) + row;
    const uint8_t *tiles = shared + at.tables + queries_at.tiles + lane * 8;
    const uint32_t out = (uint32_t)__cvta_generic_to_shared(logits() + col), beyond = p->span_tokens << 4;
    uint32_t taken = 0;
    const auto take = [&]() {
        asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; @p atom.shared.inc.u32 %0, [%1], 0xffffffff; }"
                     : "+r"(taken)
                     : "r"(counter), "r"(lane)
                     : "memory");
    };
    const auto ask = [&](uint32_t ticket) {
        key_pair x;
        const uint32_t pair = all - 1 - ticket,
                       l = __popc(__ballot_sync(0xffffffffu, lane < (int)L && pair_end <= pair)) + nothing,
                       before = __shfl_sync(0xffffffffu, pair_end, l > 0 ? l - 1 : 0);
        const span_level level = key_levels()[l];
        const uint32_t first = sp->groups[0][l], g = first + 2 * (pair - (l > 0 ? before : 0)),
                       step = g + 1 < sp->groups[0][l + 1] ? 1 : 0, units = level.tiles;
        x.level = l;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            x.code[j] = sp->key_codes[l] + (g + j * step - first) * level.group_bytes;
            const uint8_t *code = codes + x.code[j], *rest = code + units / 4 * 128;
            const uint16_t *entry = entries + (g + j * step) * 16;
            x.entry[j][0] = __ldg(entry);
            x.entry[j][1] = __ldg(entry + 8);
            x.word0[j] = units >= 4 ? __ldg((const uint32_t *)code) : 0;
            x.word1[j] = units >= 8 ? __ldg((const uint32_t *)(code + 128)) : 0;
            x.half[j] = units & 2 ? __ldg((const uint16_t *)(rest - 2 * lane)) : 0;
            x.byte[j] = units & 1 ? __ldg(rest + (units & 2) * 32 - 3 * lane) : 0;
        }
        return x;
    };
    take();
    taken = __shfl_sync(0xffffffffu, taken, 0);
    if (taken >= all)
        return;
    key_pair next = ask(taken);
    take();
#pragma unroll 1
    for (bool there = true; there;) {
        const key_pair now = next;
        taken = __shfl_sync(0xffffffffu, taken, 0);
        there = taken < all;
        if (there) { /* ask for the next pair before working on this one */
            next = ask(taken);
            take();
        }
        const span_level level = key_levels()[now.level];
        const uint32_t units = level.tiles;
        const uint2 *tile = (const uint2 *)(tiles + level.first);
        int acc[2][NT][4] = {};
        if (units >= 4) {
            bit_tiles<NT>(acc, k, now.word0[0], now.word0[1], tile);
            bit_tiles<NT>(acc, k, now.word0[0] >> 16, now.word0[1] >> 16, tile + NT * 32);
            tile += 2 * NT * 32;
            if (units >= 8) {
                bit_tiles<NT>(acc, k, now.word1[0], now.word1[1], tile);
                bit_tiles<NT>(acc, k, now.word1[0] >> 16, now.word1[1] >> 16, tile + NT * 32);
                tile += 2 * NT * 32;
#pragma unroll 1
                for (uint32_t i = 2; i < units / 4; i++, tile += 2 * NT * 32) {
                    const uint32_t w0 = __ldg((const uint32_t *)(codes + now.code[0] + i * 128)),
                                   w1 = __ldg((const uint32_t *)(codes + now.code[1] + i * 128));
                    bit_tiles<NT>(acc, k, w0, w1, tile);
                    bit_tiles<NT>(acc, k, w0 >> 16, w1 >> 16, tile + NT * 32);
                }
            }
        }
        if (units & 2) {
            bit_tiles<NT>(acc, k, now.half[0], now.half[1], tile);
            tile += NT * 32;
        }
        if (units & 1) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t w = now.byte[j] | now.byte[j] << 6;
#pragma unroll
                for (int t = 0; t < NT; t++)
                    mma_i8(acc[j][t], prmt(k.first, k.first, w), prmt(k.second, k.second, w), tile[t * 32].x);
            }
            tile += NT * 32;
        }
        float four[2][NT][2] = {};
        if (level.four > 0) { /* magnitudes of the positive codes less those of the negative ones */
            const uint32_t s4a = p->steps4[0], s4b = p->steps4[1];
#pragma unroll 1
            for (int j = 0; j < 2; j++) { /* rare at 20x: one after the other, for the sake of registers */
                int plus[NT][4] = {}, minus[NT][4] = {};
                const uint2 *words =
                    (const uint2 *)(codes + (j == 0 ? now.code[0] : now.code[1]) + units * 32 + lane * 4);
#pragma unroll 1
                for (uint32_t i = 0; i < level.four; i++) {
                    const uint2 w = __ldg(words + i * 32), x = make_uint2(w.x ^ 0x88888888u, w.y ^ 0x88888888u);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const uint2 q = tile[(i * NT + t) * 32];
                        mma_i8(plus[t], prmt(s4a, s4b, w.x), prmt(s4a, s4b, w.x >> 16), prmt(s4a, s4b, w.y),
                               prmt(s4a, s4b, w.y >> 16), q.x, q.y);
                        mma_i8(minus[t], prmt(s4a, s4b, x.x), prmt(s4a, s4b, x.x >> 16), prmt(s4a, s4b, x.y),
                               prmt(s4a, s4b, x.y >> 16), q.x, q.y);
                    }
                }
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float x = (float)((plus[t][2 * h] - minus[t][2 * h]) * 256 + plus[t][2 * h + 1] -
                                                minus[t][2 * h + 1]);
                        four[0][t][h] = j == 0 ? x : four[0][t][h];
                        four[1][t][h] = x;
                    }
            }
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float4 v = level_values()[now.level * NR + 4 * t + col];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t entry = now.entry[j][h];
                    const float x = (float)(acc[j][t][2 * h] * 256 + acc[j][t][2 * h + 1]) * v.x +
                                    (h == 0 ? v.y : v.z) + four[j][t][h] * v.w;
                    /* not what fills up a group, nor one group twice */
                    store_shared_if(entry < beyond && (j == 0 || now.code[0] != now.code[1]),
                                    out + (entry & 0xfff0u) * NT + t * 16, x * gains()[entry & 15]);
                }
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------- anchors */

/* The steps of one gathered anchor that this lane feeds: [x, x, y, y] bytes of each step. */
template <int STEPS, int VEC> static __device__ __forceinline__ void gather(const uint8_t *from, uint32_t raw[STEPS])
{
#pragma unroll
    for (int i = 0; i < STEPS / VEC; i++)
        if constexpr (VEC == 4) {
            const uint4 v = __ldg((const uint4 *)(from + i * 64));
            raw[4 * i] = v.x, raw[4 * i + 1] = v.y, raw[4 * i + 2] = v.z, raw[4 * i + 3] = v.w;
        } else {
            const uint2 v = __ldg((const uint2 *)(from + i * 32));
            raw[2 * i] = v.x, raw[2 * i + 1] = v.y;
        }
}

/*
 * Entry s of a lane's turns: loaded in pairs where there is an even number, so that the compiler makes one load of two
 * calls.
 */
template <int N> static __device__ __forceinline__ uint2 turn_at(const uint2 *from, int s)
{
    if constexpr (N % 2 == 0) {
        const uint4 v = *((const uint4 *)from + s / 2);
        return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    } else
        return from[s];
}

/*
 * A warp takes windows of 64 tokens, in them pairs of groups of 16. Fast steps: anchors are turned by their place in
 * the group, queries by the pair's place in the span; even columns are turned to the pair's first group, odd ones to
 * the second, so one product of queries serves both. Slow steps: queries as they are in the window's centre (even
 * columns) and their derivative (odd columns).
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::key_anchors(const akv_packed_span *sp, uint32_t count,
                                                                   int *most_of_span)
{
    constexpr uint32_t window_tokens = AKV_PACK_WINDOW;
    const uint32_t num_windows = (count + window_tokens - 1) / window_tokens;
    const uint2 *fast_turns = this->fast_turns() + col * NF, *slow_turns = this->slow_turns() + col * (STEPS - NF);
    const uint16_t *words = (const uint16_t *)(base + sp->words) + lane;
    const uint8_t *anchors = base + p->anchors[0] + (size_t)head * p->num_anchors * D + col * (VEC * 4);
    const float *scales = (const float *)(base + p->anchor_scales[0]) + (size_t)head * p->num_anchors;
    const __half2 bias = __float2half2_rn(-ANCHOR_BIAS);
    float most[NT], norm[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        most[t] = -INFINITY;
        norm[t] = norms()[4 * t + col];
    }
    uint2 turn_rows[TURNS_IN_REGISTERS ? NF : 1][2];
    /* a lane's token of the pair: where its anchor is, what the anchor's product is multiplied by */
    uint32_t word = 0, place = 0, raw[2][2][STEPS];
    float weight = 0.0f;
    const float from_centre = ((float)row - (float)(window_tokens / 2)) * (1.0f / 1024.0f);
    if ((uint32_t)warp < num_windows) { /* the first anchors come while warps wait for each other */
        const uint32_t t1 = warp * window_tokens;
        word = __ldg(words + t1);
        if constexpr (TURNS_IN_REGISTERS)
#pragma unroll
            for (int s = 0; s < NF; s++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    turn_rows[s][i] = __ldg((const uint2 *)(base + p->row_turns) + (s * 16 + row + 8 * i) * 4 + col);
        place = (word & 4095u) * D;
        weight = __ldg(scales + (word & 4095u)) * coefficients()[word >> 12];
        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row), raw[0][0]);
        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row + 8), raw[0][1]);
        word = __ldg(words + t1 + 32);
    }
    __syncthreads();
    if ((uint32_t)warp < num_windows) {
        const auto turned_step = [&](int t, int s) {
            const uint4 v = *(const uint4 *)(turned() + ((t * (STEPS / 2) + s / 2) * 32 + lane) * 2);
            return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
        };
        for (uint32_t window = warp; window < num_windows; window += WARPS) {
            uint32_t slow[NT][STEPS - NF + 1][2];
            float start[NT][4] = {}; /* the mean's share and its slope; what takes off the bytes' bias, and its slope */
#pragma unroll
            for (int s = NF; s < STEPS; s++) {
                const uint2 turn = turn_at<STEPS - NF>(slow_turns + window * (4 * (STEPS - NF)), s - NF);
                const uint2 m = mean_slow()[(s - NF) * 4 + col];
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    turn_back(turned_step(t, s), turn, &slow[t][s - NF][0], &slow[t][s - NF][1]);
                    mma_f16(start[t], m.x, as_u32(bias), m.y, as_u32(bias), slow[t][s - NF][0], slow[t][s - NF][1]);
                }
            }
#pragma unroll 1
            for (uint32_t in_window = 0; in_window < window_tokens; in_window += 32) {
                const uint32_t t0 = window * window_tokens + in_window;
                const float from_pair = from_centre + (float)in_window * (1.0f / 1024.0f);
                float *const out_pair = logits() + (t0 + row) * NR + col;
                /* anchors of the second group now, words of the next pair, their anchors after the first group */
                gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row + 16), raw[1][0]);
                gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row + 24), raw[1][1]);
                const uint32_t next_word = word, next_place = (next_word & 4095u) * D;
                const float next_scale = __ldg(scales + (next_word & 4095u)),
                            next_coefficient = coefficients()[next_word >> 12];
                uint32_t t2 = t0 + 64; /* the pair after the next: past the window's end in the warp's next window */
                if (in_window + 64 >= window_tokens)
                    t2 += (WARPS - 1) * window_tokens;
                word = __ldg(words + t2); /* behind the span's last are the values' words: of anchors that exist */
                uint32_t fast[NT][NF][2];
                float acc[NT][4] = {}, mean[NT][4] = {};
#pragma unroll
                for (int s = 0; s < NF; s++) {
                    const uint2 turn = turn_at<NF>(fast_turns + t0 / 32 * (4 * NF), s);
                    const uint4 m = mean_rows()[s * 32 + lane];
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        turn_back(turned_step(t, s), turn, &fast[t][s][0], &fast[t][s][1]);
                        mma_f16(mean[t], m.x, m.y, m.z, m.w, fast[t][s][0], fast[t][s][1]);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float w0 = __shfl_sync(0xffffffffu, weight, half * 16 + row),
                                w1 = __shfl_sync(0xffffffffu, weight, half * 16 + row + 8);
                    float slow_acc[NT][4];
#pragma unroll
                    for (int t = 0; t < NT; t++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            slow_acc[t][i] = start[t][2 + i % 2];
                    if (half == 1)
#pragma unroll
                        for (int t = 0; t < NT; t++)
                            acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
#pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        const uint32_t r0 = raw[half][0][s], r1 = raw[half][1][s];
                        uint32_t a0 = prmt(r0, 0x64646464u, 0x4140u), a2 = prmt(r0, 0x64646464u, 0x4342u);
                        uint32_t a1 = prmt(r1, 0x64646464u, 0x4140u), a3 = prmt(r1, 0x64646464u, 0x4342u);
                        if (s < NF) {
                            const uint2 turn0 = TURNS_IN_REGISTERS ? turn_rows[s % (TURNS_IN_REGISTERS ? NF : 1)][0]
                                                                   : row_turns()[(s * 16 + row) * 4 + col];
                            const uint2 turn1 = TURNS_IN_REGISTERS ? turn_rows[s % (TURNS_IN_REGISTERS ? NF : 1)][1]
                                                                   : row_turns()[(s * 16 + row + 8) * 4 + col];
                            turn_on(__hadd2(as_half2(a0), bias), __hadd2(as_half2(a2), bias), turn0, &a0, &a2);
                            turn_on(__hadd2(as_half2(a1), bias), __hadd2(as_half2(a3), bias), turn1, &a1, &a3);
                        }
#pragma unroll
                        for (int t = 0; t < NT; t++)
                            if (s < NF)
                                mma_f16(acc[t], a0, a1, a2, a3, fast[t][s < NF ? s : 0][0], fast[t][s < NF ? s : 0][1]);
                            else
                                mma_f16(slow_acc[t], a0, a1, a2, a3, slow[t][s < NF ? 0 : s - NF][0],
                                        slow[t][s < NF ? 0 : s - NF][1]);
                    }
                    if (half == 0) {
                        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, next_place, row), raw[0][0]);
                        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, next_place, row + 8), raw[0][1]);
                    }
                    const float d0 = from_pair + half * (16.0f / 1024.0f), d1 = d0 + 8.0f / 1024.0f;
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        float *out = out_pair + half * 16 * NR + 4 * t;
                        const float a0 = acc[t][half] + slow_acc[t][0] + d0 * slow_acc[t][1],
                                    m0 = mean[t][half] + start[t][0] + d0 * start[t][1];
                        const float a1 = acc[t][2 + half] + slow_acc[t][2] + d1 * slow_acc[t][3],
                                    m1 = mean[t][2 + half] + start[t][0] + d1 * start[t][1];
                        const float l0 = (a0 * w0 + m0) * norm[t] + out[0], l1 = (a1 * w1 + m1) * norm[t] + out[8 * NR];
                        out[0] = l0;
                        out[8 * NR] = l1;
                        most[t] = fmaxf(most[t], fmaxf(l0, l1));
                    }
                }
                place = next_place;
                weight = next_scale * next_coefficient;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
        for (int o = 4; o < 32; o <<= 1)
            most[t] = fmaxf(most[t], __shfl_xor_sync(0xffffffffu, most[t], o));
        if (lane < 4)
            atomicMax(most_of_span + 4 * t + lane, ordered(most[t]));
    }
}

#endif
