/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paper_block.cuh - what the phases of the kernel for profile paper (paper.cuh) share: where things lie in shared
 * memory, and the block's state.
 */
#ifndef AKV_CUDA_PAPER_BLOCK_CUH
#define AKV_CUDA_PAPER_BLOCK_CUH

#include "cuda/mma.cuh"
#include "cuda/packed_paper.h"

/* Codes as bits, of which `upper` counts first: lowest + upper * (highest - inner) + lower * (inner - lowest). */
#define LOWEST (-1.5104f)
#define UPPER_BIT (0.4528f + 1.5104f)
#define LOWER_BIT (1.5104f - 0.4528f)

/* Offsets in a block's shared memory, in bytes; the host asks for the total. */
struct paper_layout {
    uint32_t logits, weights, hist, slabs, queries, tiles, turned, group_turns, slow_turns, row_turns, speeds, slots;
    uint32_t slot_scales, norms, span, small, anchors, total;
};

/* Small things in shared memory. */
template <int NR, int WARPS> struct paper_small {
    float4 level[NR]; /* factor of the bits' sums, what tokens r and r + 8 of a group add */
    float norm[NR];   /* logit of the prepared queries to logit */
    float row_max[NR], row_sum[NR];
    float inverse[NR], post[NR];
    /*
     * Largest logit so far, what weights are relative to, sum of weights: of the span at hand, and behind it. Here and
     * not in registers, which are scarce where anchors are multiplied.
     */
    float top[2][NR], ref[2][NR], sum[2][NR];
    int maxima[2][NR];
    float warp_sums[NR * WARPS];
    uint32_t bits[4]; /* span_keys.cuh says what these are: first, second, ones, minus */
};

template <int D, int NR, int NF> struct paper_block {
    static constexpr int STEPS = D / 16, NS = STEPS - NF, CHUNKS = D / 32, NT = NR / 4, WORDS = D / 32;
    static constexpr int WARPS = NR == 4 && D <= 128 ? 16 : 8, THREADS = WARPS * 32;
    static constexpr bool TURNS_IN_REGISTERS = NF <= 4;
    /*
     * Residuals: a warp sums 64 coordinates of every so manieth group of values. While there are keys of another span
     * to be done the last warps do these; what a group of either costs says how many.
     */
    static constexpr int PASSES = (D + 63) / 64, SHARES = WARPS / PASSES, SOME_SHARES = WARPS * 5 / 8 / PASSES,
                         KEY_WARPS = WARPS - SOME_SHARES * PASSES;
    static constexpr int MOST_TOKENS = AKV_PACK_MAX_SPAN / THREADS; /* of a span for one thread */
    typedef paper_small<NR, WARPS> small_t;

    const akv_cuda_call &c;
    const akv_paper *p; /* in shared memory */
    const uint8_t *base;
    uint8_t *shared;
    paper_layout at;
    uint32_t head, row0, rows;
    int warp, lane, row, col; /* lane = 4 row + col */
    int exponent;             /* the histogram counts in 2^-exponent; the same in every thread */

    static __host__ __device__ constexpr bool swaps(int chunk)
    {
        return akv_paper_swaps(chunk, STEPS, NF) != 0;
    }

    static __host__ __device__ __forceinline__ paper_layout lay_out(uint32_t anchors, uint32_t span,
                                                                    bool shared_anchors)
    {
        paper_layout l;
        const uint32_t padded = (anchors + 15) / 16 * 16, scratch = WARPS * D * NR * 4;
        uint32_t at = 0;
        l.logits = at, at += span * NR * 4;        /* f32 [span, NR] */
        l.weights = at, at += (span + 8) * NR * 2; /* fp16 [span + 1, NR]: what fills up groups has weight 0 */
        at = at > scratch ? at : scratch;          /* sums of all warps over the two, when an item is closed */
        l.hist = at, at += NR * padded * 4;        /* int [NR, padded] */
        l.slabs = at, at += WARPS * 64 * NR * 4;   /* f32 [WARPS, 64, NR]: sums of value codes */
        l.queries = at, at += NR * D * 4;     /* f32 [NR, D] in slot order, sized for fp16; at the end: coded sums */
        l.tiles = at, at += STEPS * NT * 256; /* operands of the key residuals, 16 coordinates each */
        l.turned = at, at += span / AKV_PAPER_HALF * STEPS * NT * 256; /* queries turned back to every half's start */
        l.group_turns = at, at += AKV_PAPER_HALF / 16 * NF * 4 * 8;
        l.slow_turns = at, at += AKV_PAPER_HALF / AKV_PACK_WINDOW * NS * 4 * 8;
        l.row_turns = at, at += TURNS_IN_REGISTERS ? 0 : NF * 16 * 4 * 8;
        l.speeds = at, at += NS * 16;
        l.slots = at, at += D * 2;
        l.slot_scales = at, at += D * 4;
        l.norms = at, at += D * 4;
        l.span = at, at += 2 * sizeof(akv_paper_span);
        l.small = at, at += (sizeof(small_t) + 15) / 16 * 16;
        l.anchors = at, at += shared_anchors ? anchors * D * 2 : 0;
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
        return (float *)(shared + at.slabs) + w * 64 * NR;
    }
    __device__ __forceinline__ float *queries()
    {
        return (float *)(shared + at.queries);
    }
    __device__ __forceinline__ uint2 *tiles()
    {
        return (uint2 *)(shared + at.tiles);
    }
    __device__ __forceinline__ uint2 *turned(uint32_t half)
    {
        return (uint2 *)(shared + at.turned) + half * (STEPS * NT * 32);
    }
    __device__ __forceinline__ const uint2 *group_turns()
    {
        return (const uint2 *)(shared + at.group_turns);
    }
    __device__ __forceinline__ const uint2 *slow_turns()
    {
        return (const uint2 *)(shared + at.slow_turns);
    }
    __device__ __forceinline__ const uint2 *row_turns()
    {
        return (const uint2 *)(shared + at.row_turns);
    }
    __device__ __forceinline__ const uint32_t *speeds()
    {
        return (const uint32_t *)(shared + at.speeds);
    }
    __device__ __forceinline__ akv_paper_span *span_copy(uint32_t i)
    {
        return (akv_paper_span *)(shared + at.span) + (i & 1);
    }
    __device__ __forceinline__ const uint16_t *slots()
    {
        return (const uint16_t *)(shared + at.slots);
    }
    __device__ __forceinline__ const float *slot_scales()
    {
        return (const float *)(shared + at.slot_scales);
    }
    __device__ __forceinline__ const float *norms()
    {
        return (const float *)(shared + at.norms);
    }
    __device__ __forceinline__ small_t *small()
    {
        return (small_t *)(shared + at.small);
    }
    /* [NR, WARPS] */
    __device__ __forceinline__ float *warp_sums()
    {
        return small()->warp_sums;
    }
    __device__ __forceinline__ const akv_paper_head *numbers()
    {
        return (const akv_paper_head *)(base + p->heads) + head;
    }

    __device__ __forceinline__ void zero(uint32_t from, uint32_t bytes)
    {
#pragma unroll 1
        for (uint32_t e = threadIdx.x * 16; e < bytes; e += THREADS * 16)
            *(uint4 *)(shared + from + e) = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void copy(uint32_t to, uint64_t from, uint32_t bytes)
    {
#pragma unroll 1
        for (uint32_t e = threadIdx.x * 16; e < bytes; e += THREADS * 16)
            copy_async(shared + to + e, base + from + e);
    }

    __device__ __forceinline__ void fetch(uint64_t from, uint64_t bytes)
    {
#pragma unroll 1
        for (uint32_t e = threadIdx.x * 128; e < (uint32_t)bytes; e += THREADS * 128)
            fetch_line(base + from + e);
    }

    __device__ __forceinline__ const akv_paper_span *spans()
    {
        return (const akv_paper_span *)(base + p->spans) + (size_t)head * p->num_spans;
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
        const uint32_t each = p->span_tokens / 32, u = warp + WARPS * i;
        return u < each ? lane * each + ((u + lane) & (each - 1)) : UINT32_MAX; /* spans are powers of two */
    }

    /* A token of this thread's: weights of all rows, and the value's word. */
    struct held {
        uint32_t weights[NR / 2];
        uint32_t word;
    };

    /* Codes and entries of a warp's next group of residuals, asked for before they are needed. */
    struct ahead {
        uint32_t words[WORDS], entries[2];
    };
    struct value_ahead {
        uint32_t words[2], entries[2];
    };

    /* paper_setup.cuh, paper_keys.cuh, paper_values.cuh */
    __device__ __forceinline__ void set_up(const akv_paper_item &item, bool shared_anchors);
    __device__ __forceinline__ void prepare_queries(const float x[D / 32]);
    __device__ __forceinline__ void load_query(uint32_t sequence, float x[D / 32]);
    __device__ __forceinline__ void turn_queries(uint32_t span);
    __device__ __forceinline__ void hide_beyond(uint32_t count);
    __device__ __forceinline__ void ask_keys(const akv_paper_span *sp, uint32_t group, ahead *next);
    __device__ __forceinline__ void key_residuals(const akv_paper_span *sp, uint32_t first, uint32_t step, ahead next);
    template <bool SHARED>
    __device__ __forceinline__ void key_anchors(const akv_paper_span *sp, uint32_t count, int *maxima);
    __device__ __forceinline__ void soften(const akv_paper_span *sp, uint32_t count, uint32_t n,
                                           held tokens[MOST_TOKENS]);
    __device__ __forceinline__ void value_anchors(uint32_t count, uint32_t n, const held tokens[MOST_TOKENS]);
    __device__ __forceinline__ void ask_values(const akv_paper_span *sp, uint32_t group, value_ahead *next);
    __device__ __forceinline__ void value_residuals(const akv_paper_span *sp, uint32_t shares, value_ahead next);
    __device__ __forceinline__ void close(uint32_t slot, uint32_t n);
};

#endif
