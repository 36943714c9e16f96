/* SPDX-License-Identifier: Apache-2.0 */
/* paper_keys.cuh - phases of the kernel for profile paper that make logits: residuals of keys, then anchors. */
#ifndef AKV_CUDA_PAPER_KEYS_CUH
#define AKV_CUDA_PAPER_KEYS_CUH

#include "cuda/paper_block.cuh"

template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::ask_keys(const akv_paper_span *sp, uint32_t group, ahead *next)
{
    if (group >= sp->groups[0])
        return;
    const uint32_t *code = (const uint32_t *)(base + sp->codes[0]) + group * (WORDS * 32) + lane;
    const uint32_t *entries = (const uint32_t *)(base + sp->entries[0]) + group * 16 + row;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        next->words[i] = __ldg(code + i * 32);
    next->entries[0] = __ldg(entries);
    next->entries[1] = __ldg(entries + 8);
}

/* Every `step`-th group of 16 residuals from `first` on, which was asked for. */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::key_residuals(const akv_paper_span *sp, uint32_t first,
                                                                      uint32_t step, ahead next)
{
    const uint32_t groups = sp->groups[0];
    if (first >= groups)
        return;
    const uint32_t beyond = p->span_tokens;
    const uint32_t b0 = small()->bits[0], b1 = small()->bits[1], b2 = small()->bits[2], b3 = small()->bits[3];
    const uint32_t *code = (const uint32_t *)(base + sp->codes[0]) + first * (WORDS * 32) + lane;
    const uint32_t *entries = (const uint32_t *)(base + sp->entries[0]) + first * 16 + row;
    const uint2 *operands = tiles() + lane;
    float *out = logits() + col;
    float4 level[NT];
#pragma unroll
    for (int t = 0; t < NT; t++)
        level[t] = small()->level[4 * t + col];
#pragma unroll 1
    for (uint32_t g = first; g < groups; g += step) {
        uint32_t now[WORDS];
        const uint32_t f0 = next.entries[0], f1 = next.entries[1];
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            now[i] = next.words[i];
        code += step * (WORDS * 32);
        entries += step * 16;
        if (g + step < groups) { /* before working on this one */
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                next.words[i] = __ldg(code + i * 32);
            next.entries[0] = __ldg(entries);
            next.entries[1] = __ldg(entries + 8);
        }
        int acc[NT][4] = {};
#pragma unroll
        for (int i = 0; i < 2 * WORDS; i++) {
            const uint32_t w = i % 2 == 0 ? now[i / 2] : now[i / 2] >> 16;
            const uint32_t a0 = prmt(b0, b0, w), a1 = prmt(b1, b1, w), a2 = prmt(0u, b3, w), a3 = prmt(b2, b2, w);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const uint2 q = operands[(i * NT + t) * 32];
                mma_i8(acc[t], a0, a1, a2, a3, q.x, q.y);
            }
        }
        const uint32_t t0 = f0 & 0xffffu, t1 = f1 & 0xffffu;
        const float gain0 = akv_f16((uint16_t)(f0 >> 16)), gain1 = akv_f16((uint16_t)(f1 >> 16));
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float x0 = (float)(acc[t][0] * 256 + acc[t][1]), x1 = (float)(acc[t][2] * 256 + acc[t][3]);
            if (t0 < beyond) /* not what fills up a group */
                out[t0 * NR + 4 * t] = (x0 * level[t].x + level[t].y) * gain0;
            if (t1 < beyond)
                out[t1 * NR + 4 * t] = (x1 * level[t].x + level[t].z) * gain1;
        }
    }
}

/* Entry s of a lane's turns, in pairs where there is an even number, so that two entries are one load. */
template <int N> static __device__ __forceinline__ uint2 paper_turn(const uint2 *from, int s)
{
    if constexpr (N % 2 == 0) {
        const uint4 v = *((const uint4 *)from + s / 2);
        return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    } else
        return from[s];
}

/*
 * A warp takes windows of 64 tokens, in them groups of 16, in these tiles of 8 tokens: the columns of the products.
 * Rows 0 .. 3 are the heads for even tokens, 4 .. 7 the same for odd ones. Fast steps: anchors are turned by their
 * place in the group, queries by the group's place in the span. Slow steps: queries as they are in the window's
 * centre, and in rows 8 .. 15 their derivative, once a window.
 */
template <int D, int NR, int NF>
template <bool SHARED>
__device__ __forceinline__ void paper_block<D, NR, NF>::key_anchors(const akv_paper_span *sp, uint32_t count,
                                                                    int *most_of_span)
{
    constexpr uint32_t WINDOW = AKV_PACK_WINDOW;
    const uint32_t num_windows = (count + WINDOW - 1) / WINDOW;
    const bool odd = row % 2 == 1, lower = row >= 4; /* as a token; as a row of queries */
    const int other = lower ? 2 : 0;                 /* steps of a row of queries in the other order */
    const uint8_t *anchors =
        (SHARED ? shared + at.anchors : base + p->keys + (size_t)head * p->num_anchors * D * 2) + col * 16;
    const uint32_t *words = (const uint32_t *)(base + sp->words) + lane;
    const int result = 2 * col + lower; /* the token whose logit this lane gets */
    float most[NT], norm[NT];
    const float unit = numbers()->key_unit;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        most[t] = -INFINITY;
        norm[t] = small()->norm[4 * t + row % 4] * unit;
    }
    if ((uint32_t)warp < num_windows) {
        uint2 turn_rows[TURNS_IN_REGISTERS ? NF : 1][2];
        if constexpr (TURNS_IN_REGISTERS)
#pragma unroll
            for (int s = 0; s < NF; s++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint2 *from = (const uint2 *)(base + p->row_turns) + ((row + 8 * i) * 4 + col) * NF;
                    if constexpr (NF % 2 == 0) {
                        const uint4 v = __ldg((const uint4 *)from + s / 2);
                        turn_rows[s][i] = s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
                    } else
                        turn_rows[s][i] = __ldg(from + s);
                }
        const uint2 *queries_of_half;
        const auto turned_step = [&](int t, int s) {
            const uint4 v = *(const uint4 *)(queries_of_half + ((t * (STEPS / 2) + s / 2) * 32 + lane) * 2);
            return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
        };
        /* turns of a lane's row of queries: entry s of steps in the other order is s ^ 2 */
        const auto query_turn = [&](const uint2 *table, int s, int n, int first) {
            const int shift = !swaps(s / 2) ? 0 : s / 2 % 2 == 0 ? other : -other;
            return n % 2 == 0 && first % 2 == 0 ? paper_turn<2>(table + shift, s - first) : table[s - first + shift];
        };
        uint32_t next = __ldg(words + warp * WINDOW);
        for (uint32_t window = warp; window < num_windows; window += WARPS) {
            constexpr uint32_t PER_HALF = AKV_PAPER_HALF / WINDOW;
            queries_of_half = turned(window / PER_HALF);
            const uint2 *turns = group_turns() + (window % PER_HALF * (WINDOW / 4) + col) * NF;
            uint32_t slow[NT][NS + 1][4]; /* x, its derivative, y, its derivative */
#pragma unroll
            for (int s = NF; s < STEPS; s++) {
                const uint2 turn = query_turn(slow_turns() + (window % PER_HALF * 4 + col) * NS, s, NS, NF);
                const int shift = !swaps(s / 2) ? 0 : s / 2 % 2 == 0 ? other : -other;
                const __half2 speed = as_half2(speeds()[col * NS + s - NF + shift]);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    uint32_t *a = slow[t][s - NF];
                    turn_back(turned_step(t, s), turn, &a[0], &a[2]);
                    a[1] = as_u32(__hmul2(speed, as_half2(a[2])));
                    a[3] = as_u32(__hneg2(__hmul2(speed, as_half2(a[0]))));
                }
            }
#pragma unroll 1
            for (uint32_t in_window = 0; in_window < WINDOW; in_window += 32) {
                const uint32_t pair = window * WINDOW + in_window;
                const uint32_t place = (next & 0xffffu) * (D * 2); /* of this lane's token's anchor */
                const float coefficient = akv_f16((uint16_t)(next >> 16));
                uint32_t ahead = pair + 32; /* past the window's end in the warp's next window */
                if (in_window + 32 >= WINDOW)
                    ahead += (WARPS - 1) * WINDOW;
                next = __ldg(words + (ahead < p->span_tokens ? ahead : 0));
                const float from_centre = (float)(int)(in_window + result - WINDOW / 2) * (1.0f / 1024.0f);
#pragma unroll
                for (int group = 0; group < 2; group++) {
                    const uint32_t t0 = pair + group * 16;
                    uint4 raw[2][CHUNKS];
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        const uint8_t *from = anchors + __shfl_sync(0xffffffffu, place, group * 16 + tile * 8 + row);
                        const uint8_t *even = from + (odd ? 64 : 0), *uneven = from - (odd ? 64 : 0);
#pragma unroll
                        for (int i = 0; i < CHUNKS; i++) {
                            const uint4 *chunk = (const uint4 *)((!swaps(i)    ? from
                                                                  : i % 2 == 0 ? even
                                                                               : uneven) +
                                                                 i * 64);
                            raw[tile][i] = SHARED ? *chunk : __ldg(chunk);
                        }
                    }
                    float acc[2][NT][4] = {},
                          slopes[2][NT][4] = {}; /* of fast steps; of slow ones and their derivative */
#pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        uint32_t fast[NT][2] = {};
                        if (s < NF) {
                            const uint2 turn = query_turn(turns + (in_window / 4 + group * 4) * NF, s, NF, 0);
#pragma unroll
                            for (int t = 0; t < NT; t++)
                                turn_back(turned_step(t, s), turn, &fast[t][0], &fast[t][1]);
                        }
#pragma unroll
                        for (int tile = 0; tile < 2; tile++) {
                            const uint4 r = raw[tile][s / 2];
                            uint32_t x = s % 2 == 0 ? r.x : r.z, y = s % 2 == 0 ? r.y : r.w;
                            if (s < NF) {
                                const uint2 turn = TURNS_IN_REGISTERS
                                                       ? turn_rows[s % (TURNS_IN_REGISTERS ? NF : 1)][tile]
                                                       : row_turns()[((row + 8 * tile) * 4 + col) * NF + s];
                                turn_on(as_half2(x), as_half2(y), turn, &x, &y);
                            }
#pragma unroll
                            for (int t = 0; t < NT; t++) {
                                const uint32_t *a = slow[t][s < NF ? 0 : s - NF];
                                if (s < NF)
                                    mma_f16(acc[tile][t], fast[t][0], any_value(), fast[t][1], any_value(), x, y);
                                else
                                    mma_f16(slopes[tile][t], a[0], a[1], a[2], a[3], x, y);
                            }
                        }
                    }
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        const uint32_t token = t0 + tile * 8 + result;
                        const float distance = from_centre + (float)(group * 16 + tile * 8) * (1.0f / 1024.0f);
                        const float weight = __shfl_sync(0xffffffffu, coefficient, group * 16 + tile * 8 + result);
#pragma unroll
                        for (int t = 0; t < NT; t++) {
                            float *out = logits() + token * NR + 4 * t + row % 4;
                            const float *f = acc[tile][t], *g = slopes[tile][t];
                            const float value = (lower ? f[1] : f[0]) + (lower ? g[1] : g[0]),
                                        slope = lower ? g[3] : g[2];
                            const float l = (value + distance * slope) * (weight * norm[t]) + *out;
                            *out = l;
                            most[t] = fmaxf(most[t], l);
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
        float x = most[t];
        for (int o = 1; o < 32; o <<= 1)
            if (o != 4 && o != 8) /* lanes of the same head: all columns, both halves of the rows */
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
        if (lane % 4 == 0 && lane < 16)
            atomicMax(most_of_span + 4 * t + row, ordered(x));
    }
}

#endif
