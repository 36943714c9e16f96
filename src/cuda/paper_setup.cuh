/* SPDX-License-Identifier: Apache-2.0 */
/* paper_setup.cuh - what the kernel for profile paper does once an item, or once a span before any logit. */
#ifndef AKV_CUDA_PAPER_SETUP_CUH
#define AKV_CUDA_PAPER_SETUP_CUH

#include "cuda/paper_block.cuh"

/*
 * Copies of an item in two portions, of which the first is there when this returns: tables, then the anchors. Its
 * queries meanwhile.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::set_up(const akv_paper_item &item, bool shared_anchors)
{
    const uint32_t tid = threadIdx.x, k = p->num_anchors;
    float query[D / 32];
    load_query(item.sequence, query);
    const akv_paper_span *span = spans() + item.first_span;
    if (tid < sizeof *span / 16)
        copy_async((uint8_t *)span_copy(item.first_span) + tid * 16, (const uint8_t *)span + tid * 16);
    copy(at.slots, p->slots, D * 2);
    copy(at.slot_scales, p->slot_scales, D * 4);
    copy(at.norms, p->norms, D * 4);
    copy(at.group_turns, p->group_turns, AKV_PAPER_HALF / 16 * NF * 4 * 8);
    copy(at.slow_turns, p->slow_turns, AKV_PAPER_HALF / AKV_PACK_WINDOW * NS * 4 * 8);
    copy(at.speeds, p->speeds, NS * 16);
    if constexpr (!TURNS_IN_REGISTERS)
        copy(at.row_turns, p->row_turns, NF * 16 * 4 * 8);
    close_copies();
    if (shared_anchors)
        copy(at.anchors, p->keys + (uint64_t)head * k * D * 2, k * D * 2);
    close_copies();
    fetch(p->span_turns + (uint64_t)item.first_span * (p->span_tokens / AKV_PAPER_HALF) * D * 4, D * 4);
    fetch(p->transform[1], D * D * 2);
    { /* the head's value anchors are near when the item is closed: each of its items asks for a share */
        const uint64_t bytes = (uint64_t)p->padded_anchors * D * 2,
                       each = (bytes / 128 + item.shares - 1) / item.shares * 128, from = each * item.share;
        if (from < bytes)
            fetch(p->values + head * bytes + from, bytes - from < each ? bytes - from : each);
    }
    prepare_queries(query);
    zero(at.logits, at.queries - at.logits);
    if (tid < NR) {
        small()->maxima[0][tid] = small()->maxima[1][tid] = ordered(-INFINITY);
        small()->top[0][tid] = -INFINITY;
        small()->ref[0][tid] = small()->sum[0][tid] = 0.0f;
    }
    if (tid == 32) {
        small()->bits[0] = 0xff00ff00u;
        small()->bits[1] = 0xffff0000u;
        small()->bits[2] = 0x01010101u;
        small()->bits[3] = 0xffffffffu;
    }
    exponent = 0;
    __syncthreads();
}

/* Row number `warp`, a lane's every 32nd coordinate. */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::load_query(uint32_t sequence, float x[D / 32])
{
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        x[i] = 0.0f;
    if (warp >= (int)rows)
        return;
    const int64_t from = akv_query_at(c, sequence, head, row0 + warp) + lane;
    if (c.query_dtype == AKV_F32) {
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            x[i] = __ldg((const float *)c.step.queries + from + i * 32);
        return;
    }
    uint16_t raw[D / 32]; /* all loads first */
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        raw[i] = __ldg((const uint16_t *)c.step.queries + from + i * 32);
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        x[i] = c.query_dtype == AKV_F16 ? akv_f16(raw[i]) : akv_bf16(raw[i]);
}

/*
 * The item's queries: in slot order, sized for fp16, and as operands of the key residuals. Every block does this for
 * itself: with one level it takes less than waiting for another kernel.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ void paper_block<D, NR, NF>::prepare_queries(const float x[D / 32])
{
    float *q = (float *)(shared + at.logits), *z = q + NR * D; /* where the logits are about to be */
    static_assert(NR <= WARPS, "a warp a row");
    if (warp < NR) { /* rows to about 16 at most: fp16 then has all its bits */
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            most = fmaxf(most, fabsf(x[i]));
        most = akv_warp_max(most);
        const float norm = most > 0.0f && most < INFINITY ? exp2f(4.0f - ceilf(log2f(most))) : 1.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            q[warp * D + i * 32 + lane] = x[i] * norm;
        if (lane == 0)
            small()->norm[warp] = c.sm_scale / norm;
    }
    uint4 operand[STEPS]; /* the transform is asked for before the queries are there */
    const uint4 *transform = (const uint4 *)(base + p->transform[0]) + lane;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        operand[i] = warp < STEPS ? __ldg(transform + (warp * STEPS + i) * 32) : make_uint4(0, 0, 0, 0);
    await_all_copies_but_one();
    __syncthreads();
    for (int e = threadIdx.x; e < NR * D; e += THREADS)
        queries()[e] = q[e / D * D + slots()[e % D]] * slot_scales()[e % D];
        /* in the transform's coordinates: columns 0 .. 3 are fp16 queries, columns 4 .. 7 what fp16 left of them */
#pragma unroll 1
    for (int m = warp; m < STEPS; m += WARPS) {
        float acc[NT][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const uint4 a = m == warp ? operand[i] : __ldg(transform + (m * STEPS + i) * 32);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const float *x = q + (row % 4 + 4 * t) * D + i * 16 + 2 * col;
                uint32_t b[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float2 v = *(const float2 *)(x + 8 * j);
                    const uint32_t hi = pack_halves(v.x, v.y);
                    const float2 back = __half22float2(as_half2(hi));
                    b[j] = row < 4 ? hi : pack_halves(v.x - back.x, v.y - back.y);
                }
                mma_f16(acc[t], a.x, a.y, a.z, a.w, b[0], b[1]);
            }
        }
        const float n0 = norms()[m * 16 + row], n1 = norms()[m * 16 + row + 8];
#pragma unroll
        for (int t = 0; t < NT; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[t][i] += __shfl_xor_sync(0xffffffffu, acc[t][i], 2);
            if (col < 2)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    z[(4 * t + 2 * col + i) * D + m * 16 + row] = acc[t][i] * n0;
                    z[(4 * t + 2 * col + i) * D + m * 16 + row + 8] = acc[t][2 + i] * n1;
                }
        }
    }
    __syncthreads();
    for (int r = warp; r < NR; r += WARPS) {
        float most = 0.0f, total = 0.0f;
        for (int i = lane; i < D; i += 32) {
            most = fmaxf(most, fabsf(z[r * D + i]));
            total += z[r * D + i];
        }
        most = akv_warp_max(most) * UPPER_BIT;
        total = akv_warp_sum(total) * small()->norm[r];
        if (lane == 0) {
            small()->row_max[r] = most > 0.0f && most < INFINITY ? -32512.0f / most : 0.0f;
            small()->level[r] =
                make_float4(most / 32512.0f * small()->norm[r], total * LOWEST, total * (LOWEST + LOWER_BIT), 0.0f);
        }
    }
    __syncthreads();
    /*
     * A lane's operand words: coordinates 4c .. 4c + 3 of a tile times what the upper, then the lower bit adds;
     * columns 2g and 2g + 1 are the upper and lower byte of head g. Bits come out as 0 or -1 (one in four as 1 - bit:
     * span_keys.cuh), so their weights are negative.
     */
    for (int e = warp; e < STEPS * NT; e += WARPS) {
        const int m = e / NT, g = row / 2 + 4 * (e % NT);
        const float f = small()->row_max[g];
        uint32_t word[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float w = z[g * D + m * 16 + 4 * col + i % 4] * (i < 4 ? UPPER_BIT : LOWER_BIT);
            const int x = __float2int_rn(w * f), hi = (x + 128) >> 8;
            word[i / 4] |= (uint32_t)((row % 2 == 0 ? hi : x - hi * 256) & 255) << (8 * (i % 4));
        }
        tiles()[e * 32 + lane] = make_uint2(word[0], word[1]);
    }
    __syncthreads();
}

/*
 * Queries turned back to the first token of each half of a span, as operands: rows 0 .. 3, and with chunks in the other
 * order 4 .. 7.
 */
template <int D, int NR, int NF> __device__ __forceinline__ void paper_block<D, NR, NF>::turn_queries(uint32_t span)
{
    constexpr int EACH = STEPS * NT * 32;
    const uint32_t halves = p->span_tokens / AKV_PAPER_HALF;
    const float4 *turns = (const float4 *)(base + p->span_turns) + (size_t)span * halves * (D / 4);
    for (uint32_t all = threadIdx.x; all < halves * EACH; all += THREADS) {
        const int half = all / EACH, e = all % EACH, s = e / (NT * 32), t = e / 32 % NT, query = e % 32 / 4, cl = e % 4;
        const int step = query >= 4 && swaps(s / 2) ? s ^ 2 : s;
        const float4 turn = __ldg(turns + half * (D / 4) + step * 4 + cl); /* of two planes */
        const float *from = queries() + (query % 4 + 4 * t) * D + step * 16 + 2 * cl;
        const float2 a = *(const float2 *)from, b = *(const float2 *)(from + 8);
        turned(half)[((t * (STEPS / 2) + s / 2) * 32 + e % 32) * 2 + s % 2] =
            make_uint2(pack_halves(a.x * turn.x + b.x * turn.y, a.y * turn.z + b.y * turn.w),
                       pack_halves(b.x * turn.x - a.x * turn.y, b.y * turn.z - a.y * turn.w));
    }
}

/* Places behind the segment's last token, as far as windows reach: their logits must not count. */
template <int D, int NR, int NF> __device__ __forceinline__ void paper_block<D, NR, NF>::hide_beyond(uint32_t count)
{
    const uint32_t end = (count + AKV_PACK_WINDOW - 1) / AKV_PACK_WINDOW * AKV_PACK_WINDOW;
    for (uint32_t e = count * NR + threadIdx.x; e < end * NR; e += THREADS)
        logits()[e] = -INFINITY;
}

#endif
