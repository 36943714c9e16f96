/* SPDX-License-Identifier: Apache-2.0 */
/*
 * span_block.cuh - what the phases of the span kernel (spans.cuh) share: where things lie in shared memory, and the
 * block's state.
 */
#ifndef AKV_CUDA_SPAN_BLOCK_CUH
#define AKV_CUDA_SPAN_BLOCK_CUH

#include "cuda/mma.cuh"
#include "cuda/packed.h"

#define ANCHOR_BIAS 1152.0f /* a byte under 0x64 is 1024 + 128 + anchor in fp16 */

/* Offsets in a block's shared memory, in bytes; the host asks for the total. */
struct span_layout {
    uint32_t logits, weights, hist, slabs, tables, span, value_planes, turned, mean_rows, mean_slow, row_turns;
    uint32_t fast_turns, slow_turns, gains, reduce, levels, total;
};

/*
 * A level in shared memory. Keys: units, 4-bit tiles, where its operands begin in bytes; values: tiles of bits, 4-bit
 * tiles, its first tile.
 */
struct span_level {
    uint32_t tiles, four, first, group_bytes;
};

/* span_keys.cuh says what these are. */
struct bit_tables {
    uint32_t first, second, ones, minus;
};

template <int D, int NR, int NF> struct span_block {
    /* tiles of value residuals that are summed at once */
    static constexpr int STEPS = D / 16, NT = NR / 4, VEC = STEPS % 4 == 0 ? 4 : 2, PASS = 8;
    static constexpr int WARPS = NR == 4 && D <= 128 && NF <= 4 ? 16 : 8;
    static constexpr int THREADS = WARPS * 32, SHARES = AKV_PACK_WARPS / WARPS;
    static constexpr bool TURNS_IN_REGISTERS = NF <= 4;
    static constexpr int MOST_TOKENS = AKV_PACK_MAX_SPAN / THREADS; /* of a span for one thread */

    const akv_cuda_call &c;
    const akv_packed *p; /* in shared memory */
    const uint8_t *base;
    uint8_t *shared;
    span_layout at;
    akv_query_layout queries_at; /* in the tables */
    uint32_t head, row0, rows;
    int warp, lane, row, col; /* lane = 4 row + col */
    int exponent;             /* the histogram counts in 2^-exponent; the same in every thread */

    static __host__ __device__ __forceinline__ span_layout lay_out(uint32_t anchors, uint32_t span, uint32_t key_tiles,
                                                                   uint32_t value_tiles, uint32_t levels)
    {
        span_layout l;
        uint32_t at = 0;
        l.logits = at, at += span * NR * 4;        /* f32 [span, NR] */
        l.weights = at, at += (span + 2) * NR * 2; /* fp16 [span + 1, NR]: what fills up groups has weight 0 */
        l.hist = at, at += (NR * anchors * 4 + 15) / 16 * 16;
        l.slabs = at, at += WARPS * D * NR * 4;
        l.tables = at, at += akv_lay_out_queries(D, NR, levels, key_tiles).total;
        l.span = at, at += 2 * sizeof(akv_packed_span);
        l.value_planes = at, at += value_tiles * 16 * sizeof(akv_value_plane);
        l.turned = at, at += STEPS * NT * 32 * 8;
        l.mean_rows = at, at += NF * 32 * 16;
        l.mean_slow = at, at += (STEPS - NF + 1) / 2 * 2 * 4 * 8;
        l.row_turns = at, at += TURNS_IN_REGISTERS ? 0 : NF * 16 * 4 * 8;
        l.fast_turns = at, at += span / 32 * NF * 4 * 8;
        l.slow_turns = at, at += span / AKV_PACK_WINDOW * (STEPS - NF) * 4 * 8;
        l.gains = at, at += 3 * 64 + 16 + 128;
        l.reduce = at, at += (WARPS + 8) * NR * 4 + 16;
        l.levels = at, at += 2 * levels * 16;
        l.total = at;
        return l;
    }

    __device__ __forceinline__ float *logits()
    {
        return (float *)(shared + at.logits);
    }
    __device__ __forceinline__ __half *weights()
    {
        return (__half *)(shared + at.weights);
    }
    __device__ __forceinline__ int *hist()
    {
        return (int *)(shared + at.hist);
    }
    __device__ __forceinline__ float *slab(int w)
    {
        return (float *)(shared + at.slabs) + w * D * NR;
    }
    __device__ __forceinline__ const float *queries()
    {
        return (const float *)(shared + at.tables);
    }
    __device__ __forceinline__ const float *norms()
    {
        return (const float *)(shared + at.tables + queries_at.norms);
    }
    __device__ __forceinline__ const float4 *level_values()
    {
        return (const float4 *)(shared + at.tables + queries_at.levels);
    }
    __device__ __forceinline__ const uint2 *key_tiles()
    {
        return (const uint2 *)(shared + at.tables + queries_at.tiles);
    }
    __device__ __forceinline__ akv_packed_span *span_copy(uint32_t i)
    {
        return (akv_packed_span *)(shared + at.span) + (i & 1);
    }
    __device__ __forceinline__ const akv_value_plane *value_planes()
    {
        return (const akv_value_plane *)(shared + at.value_planes);
    }
    /* [NT, STEPS / 2, 32 lanes, 2] */
    __device__ __forceinline__ uint2 *turned()
    {
        return (uint2 *)(shared + at.turned);
    }
    __device__ __forceinline__ uint4 *mean_rows()
    {
        return (uint4 *)(shared + at.mean_rows);
    }
    __device__ __forceinline__ uint2 *mean_slow()
    {
        return (uint2 *)(shared + at.mean_slow);
    }
    __device__ __forceinline__ uint2 *row_turns()
    {
        return (uint2 *)(shared + at.row_turns);
    }
    __device__ __forceinline__ const uint2 *fast_turns()
    {
        return (const uint2 *)(shared + at.fast_turns);
    }
    __device__ __forceinline__ const uint2 *slow_turns()
    {
        return (const uint2 *)(shared + at.slow_turns);
    }
    __device__ __forceinline__ float *gains()
    {
        return (float *)(shared + at.gains);
    }
    /* fp16, twice each */
    __device__ __forceinline__ uint32_t *half_gains()
    {
        return (uint32_t *)(shared + at.gains + 64);
    }
    __device__ __forceinline__ float *coefficients()
    {
        return (float *)(shared + at.gains + 128);
    }
    __device__ __forceinline__ bit_tables *bit_constants()
    {
        return (bit_tables *)(shared + at.gains + 192);
    }
    /*
     * [32] of 0. What is read here differs from lane to lane as far as the compiler knows: numbers that are the same
     * for a warp go to uniform registers otherwise, from which tensor-core and permutation instructions have to copy
     * them back.
     */
    __device__ __forceinline__ uint32_t *nothing()
    {
        return (uint32_t *)(shared + at.gains + 208);
    }
    /* [NR, WARPS] */
    __device__ __forceinline__ float *warp_sums()
    {
        return (float *)(shared + at.reduce);
    }
    /* [NR] */
    __device__ __forceinline__ int *maxima(uint32_t i)
    {
        return (int *)(shared + at.reduce) + (WARPS + (i & 1)) * NR;
    }
    /*
     * [NR]: largest logit so far, what weights are relative to, sum of weights; as they were before span i. Here and
     * not in registers, which are scarce in every loop.
     */
    __device__ __forceinline__ float *top(uint32_t i)
    {
        return warp_sums() + (WARPS + 2 + (i & 1)) * NR;
    }
    __device__ __forceinline__ float *ref(uint32_t i)
    {
        return warp_sums() + (WARPS + 4 + (i & 1)) * NR;
    }
    __device__ __forceinline__ float *sum(uint32_t i)
    {
        return warp_sums() + (WARPS + 6 + (i & 1)) * NR;
    }
    __device__ __forceinline__ uint32_t *keys_taken()
    {
        return (uint32_t *)(shared + at.reduce) + (WARPS + 8) * NR;
    }
    __device__ __forceinline__ span_level *key_levels()
    {
        return (span_level *)(shared + at.levels);
    }
    __device__ __forceinline__ span_level *value_levels()
    {
        return (span_level *)(shared + at.levels) + p->num_levels;
    }

    __device__ __forceinline__ void zero(uint32_t from, uint32_t bytes)
    {
#pragma unroll 1
        for (uint32_t e = threadIdx.x * 16; e < bytes; e += THREADS * 16)
            *(uint4 *)(shared + from + e) = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void copy(uint32_t to, const void *from, uint32_t bytes)
    {
#pragma unroll 1
        for (uint32_t e = threadIdx.x * 16; e < bytes; e += THREADS * 16)
            copy_async(shared + to + e, (const uint8_t *)from + e);
    }

    /* A range to L2, widened to multiples of 16; warp WHO asks, so that several ranges are asked for at once. */
    template <int WHO> __device__ __forceinline__ void fetch(uint64_t from, uint64_t bytes)
    {
        const uint32_t before = (uint32_t)from & 15u;
        if (bytes > 0)
            fetch_range<THREADS, WHO * 32>(base + from - before, ((uint32_t)bytes + before + 15u) & ~15u);
    }

    __device__ __forceinline__ const akv_packed_span *spans()
    {
        return (const akv_packed_span *)(base + p->spans) + (size_t)head * p->num_spans;
    }

    __device__ __forceinline__ uint32_t tokens_of(uint32_t span)
    {
        const uint64_t rest = p->num_tokens - (uint64_t)span * p->span_tokens;
        return rest < p->span_tokens ? (uint32_t)rest : p->span_tokens;
    }

    /* Number `i` of the tokens that this thread weighs: akv_value_place. Its word is at place(i). */
    __device__ __forceinline__ uint32_t place(int i)
    {
        return (warp + WARPS * i) * 32 + lane;
    }
    __device__ __forceinline__ uint32_t token_at(int i)
    {
        const uint32_t each = p->span_tokens / 32, u = warp + WARPS * i; /* spans are powers of two */
        return u < each ? lane * each + ((u + lane) & (each - 1)) : UINT32_MAX;
    }

    /* A token of this thread's: weights of all rows, and the value's word. */
    struct held {
        uint32_t weights[NR / 2];
        uint32_t word;
    };

    /* span_setup.cuh, span_keys.cuh, span_values.cuh */
    __device__ __forceinline__ void set_up(const akv_span_item &item, bool first);
    __device__ __forceinline__ void fetch_closing(const akv_span_item &item);
    __device__ __forceinline__ uint32_t touch(const akv_packed_span *sp, int side);
    __device__ __forceinline__ void turn_queries(uint32_t span);
    __device__ __forceinline__ void hide_beyond(uint32_t count);
    __device__ __forceinline__ void key_residuals(const akv_packed_span *sp);
    __device__ __forceinline__ void key_anchors(const akv_packed_span *sp, uint32_t count, int *maxima);
    __device__ __forceinline__ void soften(const akv_packed_span *sp, uint32_t count, uint32_t n,
                                           held tokens[MOST_TOKENS]);
    __device__ __forceinline__ void value_anchors(uint32_t count, uint32_t n, const held tokens[MOST_TOKENS]);
    __device__ __forceinline__ void value_residuals(const akv_packed_span *sp);
    template <bool FOUR>
    __device__ __forceinline__ void value_pass(const akv_packed_span *sp, const span_level &level, uint32_t pass,
                                               uint32_t g, uint32_t end, const uint8_t *code);
    template <typename WEIGHT>
    __device__ __forceinline__ void apply(float acc[STEPS][4], const uint8_t *operands, uint32_t count,
                                          const WEIGHT &weight);
    __device__ __forceinline__ void close(uint32_t part, uint32_t n);
};

#endif
