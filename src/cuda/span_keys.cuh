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
 * ones.
 */
template <int NT>
static __device__ __forceinline__ void bit_tile(int acc[NT][4], const bit_tables &k, uint32_t w, const uint2 *b)
{
    const uint32_t a0 = prmt(k.first, k.first, w), a1 = prmt(k.second, k.second, w), a2 = prmt(0u, k.minus, w),
                   a3 = prmt(k.ones, k.ones, w);
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const uint2 q = b[t * 32];
        mma_i8(acc[t], a0, a1, a2, a3, q.x, q.y);
    }
}

/* Codes of one group, as far as they are fetched a group ahead; `code` is where the lane's words are. */
struct key_codes {
    uint32_t word0, word1, half, byte;
};

static __device__ __forceinline__ key_codes fetch_key_codes(uint32_t units, const uint8_t *code, int half_at,
                                                            int byte_at)
{
    key_codes x = {0, 0, 0, 0};
    if (units >= 4)
        x.word0 = __ldg((const uint32_t *)code);
    if (units >= 8)
        x.word1 = __ldg((const uint32_t *)(code + 128));
    if (units & 2)
        x.half = __ldg((const uint16_t *)(code + half_at));
    if (units & 1)
        x.byte = __ldg(code + byte_at);
    return x;
}

template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::key_residuals(const akv_packed_span *sp)
{
    const uint32_t end = sp->warp[0][(warp + 1) * SHARES];
    uint32_t g = sp->warp[0][warp * SHARES], l = 0;
    if (g >= end)
        return;
    constexpr uint32_t AHEAD = 4;
    const uint32_t beyond = p->span_tokens << 4;
    const bit_tables k = *bit_constants();
    const uint8_t *code = base + sp->codes[0] + sp->warp_codes[0][warp * SHARES] + lane * 4;
    const uint16_t *entries = (const uint16_t *)(base + sp->entries[0]) + g * 16 + row;
    const uint8_t *tiles = shared + at.tables + queries_at.tiles + lane * 8;
    uint8_t *out = (uint8_t *)(logits() + col);
    uint32_t e0 = __ldg(entries), e1 = __ldg(entries + 8);
#pragma unroll 1
    while (g < end) {
        while (g >= sp->groups[0][l + 1])
            l++;
        const span_level level = key_levels()[l];
        const uint32_t units = level.tiles, level_end = sp->groups[0][l + 1] < end ? sp->groups[0][l + 1] : end;
        const int half_at = (int)(units / 4 * 128) - 2 * lane,
                  byte_at = (int)(units / 4 * 128 + (units & 2) * 32) - 3 * lane;
        float4 values[NT];
#pragma unroll
        for (int t = 0; t < NT; t++)
            values[t] = level_values()[l * NR + 4 * t + col];
        key_codes next = fetch_key_codes(units, code, half_at, byte_at);
#pragma unroll 1
        for (; g < level_end; g++) {
            const key_codes now = next;
            const uint32_t f0 = e0, f1 = e1;
            const uint8_t *mine = code;
            const uint2 *tile = (const uint2 *)(tiles + level.first);
            code += level.group_bytes;
            entries += 16;
            if (g + 1 < level_end) /* ask for the next group before working on this one */
                next = fetch_key_codes(units, code, half_at, byte_at);
            if (g + 1 < end) {
                e0 = __ldg(entries);
                e1 = __ldg(entries + 8);
            }
            int acc[NT][4] = {};
            if (units >= 4) {
                bit_tile<NT>(acc, k, now.word0, tile);
                bit_tile<NT>(acc, k, now.word0 >> 16, tile + NT * 32);
                tile += 2 * NT * 32;
                if (units >= 8) {
                    bit_tile<NT>(acc, k, now.word1, tile);
                    bit_tile<NT>(acc, k, now.word1 >> 16, tile + NT * 32);
                    tile += 2 * NT * 32;
#pragma unroll 1
                    for (uint32_t i = 2; i < units / 4; i += AHEAD) { /* long groups: several loads in flight */
                        uint32_t w[AHEAD];
#pragma unroll
                        for (uint32_t j = 0; j < AHEAD; j++)
                            w[j] = i + j < units / 4 ? __ldg((const uint32_t *)(mine + (i + j) * 128)) : 0;
#pragma unroll
                        for (uint32_t j = 0; j < AHEAD; j++)
                            if (i + j < units / 4) {
                                bit_tile<NT>(acc, k, w[j], tile);
                                bit_tile<NT>(acc, k, w[j] >> 16, tile + NT * 32);
                                tile += 2 * NT * 32;
                            }
                    }
                }
            }
            if (units & 2) {
                bit_tile<NT>(acc, k, now.half, tile);
                tile += NT * 32;
            }
            if (units & 1) {
                const uint32_t w = now.byte | now.byte << 6;
                const uint32_t a0 = prmt(k.first, k.first, w), a1 = prmt(k.second, k.second, w);
#pragma unroll
                for (int t = 0; t < NT; t++)
                    mma_i8(acc[t], a0, a1, tile[t * 32].x);
                tile += NT * 32;
            }
            float four0[NT] = {}, four1[NT] = {};
            if (level.four > 0) { /* magnitudes of the positive codes less those of the negative ones */
                int plus[NT][4] = {}, minus[NT][4] = {};
                const uint32_t s4a = p->steps4[0], s4b = p->steps4[1];
                const uint2 *codes4 = (const uint2 *)(mine + units * 32 + lane * 4);
#pragma unroll 1
                for (uint32_t i = 0; i < level.four; i += AHEAD) {
                    uint2 ahead[AHEAD];
#pragma unroll
                    for (uint32_t j = 0; j < AHEAD; j++)
                        ahead[j] = i + j < level.four ? __ldg(codes4 + (i + j) * 32) : make_uint2(0, 0);
#pragma unroll 1
                    for (uint32_t j = 0; j < AHEAD && i + j < level.four; j++, tile += NT * 32) {
                        const uint2 w = ahead[0], x = make_uint2(w.x ^ 0x88888888u, w.y ^ 0x88888888u);
#pragma unroll
                        for (uint32_t m = 0; m + 1 < AHEAD; m++)
                            ahead[m] = ahead[m + 1];
                        const uint32_t a0 = prmt(s4a, s4b, w.x), a1 = prmt(s4a, s4b, w.x >> 16),
                                       a2 = prmt(s4a, s4b, w.y), a3 = prmt(s4a, s4b, w.y >> 16);
                        const uint32_t m0 = prmt(s4a, s4b, x.x), m1 = prmt(s4a, s4b, x.x >> 16),
                                       m2 = prmt(s4a, s4b, x.y), m3 = prmt(s4a, s4b, x.y >> 16);
#pragma unroll
                        for (int t = 0; t < NT; t++) {
                            const uint2 q = tile[t * 32];
                            mma_i8(plus[t], a0, a1, a2, a3, q.x, q.y);
                            mma_i8(minus[t], m0, m1, m2, m3, q.x, q.y);
                        }
                    }
                }
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    four0[t] = (float)((plus[t][0] - minus[t][0]) * 256 + plus[t][1] - minus[t][1]) * values[t].w;
                    four1[t] = (float)((plus[t][2] - minus[t][2]) * 256 + plus[t][3] - minus[t][3]) * values[t].w;
                }
            }
            const float gain0 = gains()[f0 & 15], gain1 = gains()[f1 & 15];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const float x0 = (float)(acc[t][0] * 256 + acc[t][1]), x1 = (float)(acc[t][2] * 256 + acc[t][3]);
                if (f0 < beyond) /* not what fills up a group */
                    *(float *)(out + (f0 & 0xfff0u) * NT + t * 16) =
                        (x0 * values[t].x + values[t].y + four0[t]) * gain0;
                if (f1 < beyond)
                    *(float *)(out + (f1 & 0xfff0u) * NT + t * 16) =
                        (x1 * values[t].x + values[t].z + four1[t]) * gain1;
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
    if ((uint32_t)warp < num_windows) {
        uint2 turn_rows[TURNS_IN_REGISTERS ? NF : 1][2];
        if constexpr (TURNS_IN_REGISTERS)
#pragma unroll
            for (int s = 0; s < NF; s++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    turn_rows[s][i] = __ldg((const uint2 *)(base + p->row_turns) + (s * 16 + row + 8 * i) * 4 + col);
        /* a lane's token of the pair: where its anchor is, what the anchor's product is multiplied by */
        uint32_t t1 = warp * window_tokens, word = __ldg(words + t1), place = (word & 4095u) * D;
        float weight = scales[word & 4095u] * coefficients()[word >> 12];
        uint32_t raw[2][2][STEPS];
        const float from_centre = ((float)row - (float)(window_tokens / 2)) * (1.0f / 1024.0f);
        const auto turned_step = [&](int t, int s) {
            const uint4 v = *(const uint4 *)(turned() + ((t * (STEPS / 2) + s / 2) * 32 + lane) * 2);
            return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
        };
        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row), raw[0][0]);
        gather<STEPS, VEC>(anchors + __shfl_sync(0xffffffffu, place, row + 8), raw[0][1]);
        word = __ldg(words + t1 + 32);
        for (uint32_t window = warp; window < num_windows; window += WARPS) {
            uint32_t slow[NT][STEPS - NF + 1][2];
            float start[NT][4] = {}, mean_start[NT][4] = {};
#pragma unroll
            for (int s = NF; s < STEPS; s++) { /* what the bias of the bytes adds is taken off here */
                const uint2 turn = turn_at<STEPS - NF>(slow_turns + window * (4 * (STEPS - NF)), s - NF);
                const uint2 m = mean_slow()[(s - NF) * 4 + col];
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    turn_back(turned_step(t, s), turn, &slow[t][s - NF][0], &slow[t][s - NF][1]);
                    const uint32_t b = as_u32(bias);
                    mma_f16(start[t], b, b, b, b, slow[t][s - NF][0], slow[t][s - NF][1]);
                    mma_f16(mean_start[t], m.x, m.x, m.y, m.y, slow[t][s - NF][0], slow[t][s - NF][1]);
                }
            }
#pragma unroll 1
            for (uint32_t in_window = 0; in_window < window_tokens; in_window += 32) {
                const uint32_t t0 = window * window_tokens + in_window;
                const float from_pair = from_centre + (float)in_window * (1.0f / 1024.0f);
                const bool whole = t0 + 32 <= count;
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
                word = __ldg(words + (t2 < p->span_tokens ? t2 : 0));
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
                            slow_acc[t][i] = start[t][i];
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
                                    m0 = mean[t][half] + mean_start[t][0] + d0 * mean_start[t][1];
                        const float a1 = acc[t][2 + half] + slow_acc[t][2] + d1 * slow_acc[t][3],
                                    m1 = mean[t][2 + half] + mean_start[t][2] + d1 * mean_start[t][3];
                        float l0 = (a0 * w0 + m0) * norm[t] + out[0], l1 = (a1 * w1 + m1) * norm[t] + out[8 * NR];
                        if (c.softcap > 0.0f) {
                            l0 = akv_cap(l0, c.softcap);
                            l1 = akv_cap(l1, c.softcap);
                        }
                        out[0] = l0;
                        out[8 * NR] = l1;
                        if (whole)
                            most[t] = fmaxf(most[t], fmaxf(l0, l1));
                        else { /* the segment's end */
                            const uint32_t token = t0 + half * 16 + row;
                            most[t] = fmaxf(most[t],
                                            fmaxf(token < count ? l0 : -INFINITY, token + 8 < count ? l1 : -INFINITY));
                        }
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
