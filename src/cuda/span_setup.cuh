/* SPDX-License-Identifier: Apache-2.0 */
/* span_setup.cuh - what the span kernel does once an item or once a span before any logit. */
#ifndef AKV_CUDA_SPAN_SETUP_CUH
#define AKV_CUDA_SPAN_SETUP_CUH

#include "cuda/span_block.cuh"

/* Tables and state of an item. The copies are there after a wait and a barrier. */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::set_up(const akv_span_item &item, bool first)
{
    const uint32_t L = p->num_levels, tid = threadIdx.x, k = p->num_anchors;
    const akv_packed_span *span = spans() + item.first_span;
    if (tid < sizeof(akv_packed_span) / 16)
        copy_async((uint8_t *)span_copy(item.first_span) + tid * 16, (const uint8_t *)span + tid * 16);
    copy(at.mean_rows, base + p->mean_rows + (size_t)head * NF * 32 * 16, NF * 32 * 16);
    const uint32_t planes = p->value_tiles * 16 * sizeof(akv_value_plane);
    copy(at.value_planes, base + p->value_planes + (size_t)head * planes, planes);
    copy(at.fast_turns, base + p->fast_turns, p->span_tokens / 32 * NF * 4 * 8);
    copy(at.slow_turns, base + p->slow_turns, p->span_tokens / AKV_PACK_WINDOW * (STEPS - NF) * 4 * 8);
    if constexpr (!TURNS_IN_REGISTERS)
        copy(at.row_turns, base + p->row_turns, NF * 16 * 4 * 8);
    for (int e = tid; e < (STEPS - NF) * 4; e += THREADS)
        mean_slow()[e] = ((const uint2 *)(base + p->mean_slow))[head * (STEPS - NF) * 4 + e];
    if (tid < L) {
        const akv_key_level k = ((const akv_key_level *)(base + p->key_levels))[head * L + tid];
        key_levels()[tid] = {k.units, k.four, k.first_tile * NT * 256u, k.group_bytes};
    } else if (tid >= 32 && tid < 32 + L) {
        const akv_value_level *l = (const akv_value_level *)(base + p->value_levels) + head * L + tid - 32;
        value_levels()[tid - 32] = {l->tiles, l->four, l->first_tile, l->group_bytes};
    }
    if (tid >= 64 && tid < 80) {
        const int i = tid - 64, code = i < 8 ? i : i - 16;
        gains()[i] = c.values.gain[i];
        half_gains()[i] = pack_halves(c.values.gain[i], c.values.gain[i]);
        coefficients()[i] = code == c.values.coeff_self ? 1.0f : (float)code * c.values.coeff_step;
    }
    if (tid >= 128 && tid < 160)
        nothing()[tid - 128] = 0;
    if (tid == 97)
        *keys_taken() = 0;
    if (tid == 96)
        *bit_constants() = {0xff00ff00u, 0xffff0000u, 0x01010101u, 0xffffffffu};
    { /* this block's share of the head's anchors to L2, and of the spans */
        const uint32_t shares = (p->num_spans + item.num_spans - 1) / item.num_spans;
        const uint64_t bytes = (uint64_t)k * D, each = ((bytes + 127) / 128 + shares - 1) / shares * 128,
                       from = each * (item.first_span / item.num_spans);
        if (from < bytes)
            fetch<1>(p->anchors[0] + head * bytes + from, bytes - from < each ? bytes - from : each);
        fetch<0>(span->words, span->end - span->words);
        fetch<4>(p->anchor_scales[0] + (uint64_t)head * k * 4, k * 4);
    }
    zero(at.logits, at.tables - at.logits);
    if (tid < NR) {
        maxima(0)[tid] = maxima(1)[tid] = ordered(-INFINITY);
        top(0)[tid] = -INFINITY;
        ref(0)[tid] = sum(0)[tid] = 0.0f;
    }
    exponent = 0;
    if (first)
        akv_wait_for_previous(); /* for queries.cu */
    const uint32_t chunks = (c.rows + NR - 1) / NR;
    copy(at.tables, c.prepared + ((size_t)(item.pool * c.H + head) * chunks + row0 / NR) * c.prepared_bytes,
         queries_at.total);
}

/* To L2: this block's share of the value anchors, and what else the item closes with. */
template <int D, int NR, int NF>
__device__ __forceinline__ void span_block<D, NR, NF>::fetch_closing(const akv_span_item &item)
{
    const uint32_t k = p->num_anchors, shares = (p->num_spans + item.num_spans - 1) / item.num_spans,
                   tiles = (k + 15) / 16, each = (tiles + shares - 1) / shares,
                   tile = each * (item.first_span / item.num_spans), most = tiles - tile < each ? tiles - tile : each,
                   cols = p->basis_cols[1], columns = (cols + 15) / 16 * 16;
    if (tile < tiles)
        fetch<2>(p->anchors[1] + ((uint64_t)head * tiles + tile) * 16 * D, most * 16 * D);
    fetch<3>(p->basis[1] + (uint64_t)head * columns * D, columns * D);
    fetch<5>(p->anchor_scales[1] + (uint64_t)head * k * 4, k * 4);
    fetch<6>(p->basis_scales[1] + (uint64_t)head * cols * 4, cols * 4);
    fetch<7>(p->units[1] + (uint64_t)head * D * 4, D * 4);
}

/*
 * A word of each sector of a span's codes and entries: by the time they are needed they are in the first-level cache,
 * which fetches no more than the 32 bytes asked for. The caller has to use what it gets, or the loads would be left
 * out.
 */
template <int D, int NR, int NF>
__device__ __forceinline__ uint32_t span_block<D, NR, NF>::touch(const akv_packed_span *sp, int side)
{
    const uint32_t codes = (uint32_t)((side == 0 ? sp->entries[1] : sp->end) - sp->codes[side]),
                   entries = (uint32_t)(sp->codes[side] - sp->entries[side]);
    const uint8_t *from = base + sp->codes[side];
    uint32_t x = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t at_byte = (threadIdx.x + i * THREADS) * 32;
        if (at_byte < codes)
            x |= __ldg((const uint32_t *)(from + at_byte));
    }
    if (threadIdx.x * 32 < entries)
        x |= __ldg((const uint32_t *)(base + sp->entries[side] + threadIdx.x * 32));
    return x;
}

/* Queries turned back to the span's first token, as operands (span_keys.cuh says what the columns are). */
template <int D, int NR, int NF> __device__ __forceinline__ void span_block<D, NR, NF>::turn_queries(uint32_t span)
{
    const float4 *turns = (const float4 *)(base + p->span_turns) + (size_t)span * (D / 2);
#pragma unroll 2
    for (int e = threadIdx.x; e < STEPS * NT * 32; e += THREADS) {
        const int s = e / 32 % STEPS, t = e / (32 * STEPS), column = e % 32 / 4, cl = e % 4;
        const float4 turn = __ldg(turns + column % 2 * (D / 4) + s * 4 + cl); /* of two planes */
        const float *from = queries() + (column / 2 + 4 * t) * D + s * 16 + 2 * cl;
        const float2 a = *(const float2 *)from, b = *(const float2 *)(from + 8);
        turned()[((t * (STEPS / 2) + s / 2) * 32 + e % 32) * 2 + s % 2] =
            make_uint2(pack_halves(a.x * turn.x + b.x * turn.y, a.y * turn.z + b.y * turn.w),
                       pack_halves(b.x * turn.x - a.x * turn.y, b.y * turn.z - a.y * turn.w));
    }
}

/* Places behind the segment's last token, as far as windows reach: their logits must not count. */
template <int D, int NR, int NF> __device__ __forceinline__ void span_block<D, NR, NF>::hide_beyond(uint32_t count)
{
    const uint32_t end = (count + AKV_PACK_WINDOW - 1) / AKV_PACK_WINDOW * AKV_PACK_WINDOW;
    for (uint32_t e = count * NR + threadIdx.x; e < end * NR; e += THREADS)
        logits()[e] = -INFINITY;
}

#endif
