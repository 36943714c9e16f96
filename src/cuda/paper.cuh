/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paper.cuh - attention over spans of a PLAIN segment (profile paper) in its private form, on the tensor cores.
 *
 * One block a processor works off a list of items; an item is (run of spans, KV head), for a chunk of at most NR
 * query rows. The head's key anchors lie in shared memory where they fit. Per span, with a barrier behind each line:
 *   1. key anchors: gathered, 16 at a time, turned in registers
 *   2. weights of the whole span at once
 *   3. histogram of value anchors in whole numbers, residuals of values; residuals of the next span's keys
 * Queries are prepared, and anchors and transform of values applied, by every item for itself: one kernel, then the
 * merge.
 *
 * Operands are fp16, sums fp32; key residuals are exact integers.
 */
#ifndef AKV_CUDA_PAPER_CUH
#define AKV_CUDA_PAPER_CUH

#include "cuda/paper_keys.cuh"
#include "cuda/paper_setup.cuh"
#include "cuda/paper_values.cuh"

template <int D, int NR, int NF>
__global__ void __launch_bounds__(paper_block<D, NR, NF>::THREADS, 1)
    akv_paper_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ __align__(16) uint8_t memory[];
    using block = paper_block<D, NR, NF>;
    akv_let_next_start();
    const uint32_t row0 = blockIdx.y * NR, rows = c.rows - row0 < (uint32_t)NR ? c.rows - row0 : (uint32_t)NR;
    const uint32_t first_item = c.paper.first_item[blockIdx.x], end_item = c.paper.first_item[blockIdx.x + 1];
    const int lane = threadIdx.x % 32;
    const bool shared_anchors = c.paper.shared_anchors != 0;
    __shared__ __align__(16) akv_paper_item item;
    for (uint32_t i = first_item; i < end_item; i++) {
        if (i > first_item)
            __syncthreads();
        if (threadIdx.x < sizeof item / 16)
            ((uint4 *)&item)[threadIdx.x] = __ldg((const uint4 *)(c.paper.items + i) + threadIdx.x);
        __syncthreads();
        const akv_paper *p = &item.paper;
        const uint8_t *packed = item.packed;
        __builtin_assume(__isGlobal(packed)); /* loads then need no look at the address's kind */
        block b = {c,
                   p,
                   packed,
                   memory,
                   block::lay_out(p->num_anchors, p->span_tokens, shared_anchors),
                   item.head,
                   row0,
                   rows,
                   __shfl_sync(0xffffffffu, (int)(threadIdx.x / 32), 0),
                   lane,
                   lane / 4,
                   lane % 4};
        b.set_up(item, shared_anchors);
        typename block::ahead keys;
        const uint32_t first_span = item.first_span, num_spans = item.num_spans;
        b.ask_keys(b.span_copy(first_span), b.warp, &keys);
        b.fetch(b.span_copy(first_span)->words, b.span_copy(first_span)->end - b.span_copy(first_span)->words);
        b.turn_queries(first_span);
        b.hide_beyond(b.tokens_of(first_span));
        b.key_residuals(b.span_copy(first_span), b.warp, block::WARPS, keys);
        await_copies();
        __syncthreads();
        for (uint32_t n = 0; n < num_spans; n++) {
            const uint32_t span = first_span + n, count = b.tokens_of(span);
            const akv_paper_span *now = b.span_copy(span), *following = b.span_copy(span + 1);
            const bool more = n + 1 < num_spans;
            if (more) {
                if (threadIdx.x < sizeof *now / 16)
                    copy_async((uint8_t *)following + threadIdx.x * 16,
                               (const uint8_t *)(b.spans() + span + 1) + threadIdx.x * 16);
                b.fetch(now->end, now->end - now->words); /* the next span lies behind this one and is about as large */
            }
            if (shared_anchors)
                b.template key_anchors<true>(now, count, b.small()->maxima[n & 1]);
            else
                b.template key_anchors<false>(now, count, b.small()->maxima[n & 1]);
            typename block::value_ahead values;
            b.ask_values(now, b.warp / block::PASSES, &values);
            await_copies();
            __syncthreads();
            typename block::held tokens[block::MOST_TOKENS];
            if (threadIdx.x < NR)
                b.small()->maxima[(n + 1) & 1][threadIdx.x] = ordered(-INFINITY);
            b.soften(now, count, n, tokens);
            __syncthreads();
            b.value_anchors(count, n, tokens);
            const uint32_t key_warp = more && b.warp >= block::WARPS - block::KEY_WARPS
                                          ? b.warp - (block::WARPS - block::KEY_WARPS)
                                          : UINT32_MAX;
            if (key_warp != UINT32_MAX)
                b.ask_keys(following, key_warp, &keys);
            b.value_residuals(now, more ? block::SOME_SHARES : block::SHARES, values);
            if (more) {
                b.turn_queries(span + 1);
                b.hide_beyond(b.tokens_of(span + 1));
                b.key_residuals(following, key_warp, block::KEY_WARPS, keys);
            }
            __syncthreads();
        }
        b.close(item.part, num_spans);
    }
}

/* What one instance file defines; paper.cu lists them. */
typedef struct akv_paper_kernel_entry {
    uint32_t dim, row_chunk, fast_steps, threads;
    const void *kernel;
    uint32_t (*shared)(uint32_t anchors, uint32_t span, bool shared_anchors);
} akv_paper_kernel_entry;

#define AKV_PAPER_INSTANCE(D, NR, NF)                                                                                  \
    static uint32_t shared_##D##_##NR##_##NF(uint32_t anchors, uint32_t span, bool shared_anchors)                     \
    {                                                                                                                  \
        return paper_block<D, NR, NF>::lay_out(anchors, span, shared_anchors).total;                                   \
    }                                                                                                                  \
    extern const akv_paper_kernel_entry akv_paper_##D##_##NR##_##NF;                                                   \
    const akv_paper_kernel_entry akv_paper_##D##_##NR##_##NF = {D,                                                     \
                                                                NR,                                                    \
                                                                NF,                                                    \
                                                                paper_block<D, NR, NF>::THREADS,                       \
                                                                (const void *)akv_paper_kernel<D, NR, NF>,             \
                                                                shared_##D##_##NR##_##NF};

#endif
