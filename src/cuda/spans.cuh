/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spans.cuh - attention over spans of a packed LADDER segment on the tensor cores: the fast path of decode.
 *
 * One block a processor works off a list of items; an item is (run of spans, KV head), for a chunk of at most NR query
 * rows.
 * Per span, with a barrier behind each line:
 *   1. of the span before: histogram of value anchors in whole numbers, value residuals; key residuals, pairs of
 *      groups of one level, to whichever warp is free
 *   2. key anchors: gathered, 16 at a time, turned in registers
 *   3. weights of the whole span at once
 * Queries come prepared (queries.cu); each item applies anchors and transform of the values itself and leaves a partial
 * state.
 *
 * Operands are fp16, sums fp32; key residuals are exact integers. At 20x the bytes are few, so issue slots and latency
 * decide, not bandwidth: docs/speed.md has the figures, bench/cuda/log.md what was tried.
 */
#ifndef AKV_CUDA_SPANS_CUH
#define AKV_CUDA_SPANS_CUH

#include "cuda/span_keys.cuh"
#include "cuda/span_setup.cuh"
#include "cuda/span_values.cuh"

template <int D, int NR, int NF>
__global__ void __launch_bounds__(span_block<D, NR, NF>::THREADS, 1)
    akv_span_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ __align__(16) uint8_t memory[];
    using block = span_block<D, NR, NF>;
    akv_let_next_start();
    const uint32_t row0 = blockIdx.y * NR, rows = c.rows - row0 < (uint32_t)NR ? c.rows - row0 : (uint32_t)NR;
    const uint32_t first_item = c.first_item[blockIdx.x], end_item = c.first_item[blockIdx.x + 1];
    const int lane = threadIdx.x % 32;
    __shared__ __align__(16) akv_span_item item;
    for (uint32_t i = first_item; i < end_item; i++) {
        if (i > first_item)
            __syncthreads();
        if (threadIdx.x < sizeof item / 16)
            ((uint4 *)&item)[threadIdx.x] = __ldg((const uint4 *)(c.span_items + i) + threadIdx.x);
        __syncthreads();
        const akv_packed *p = &item.head_of_packed;
        const uint8_t *packed = item.packed;
        __builtin_assume(__isGlobal(packed)); /* loads then need no look at the address's kind */
        block b = {c,
                   p,
                   packed,
                   memory,
                   block::lay_out(p->num_anchors, p->span_tokens, p->key_tiles, p->value_tiles, p->num_levels),
                   akv_lay_out_queries(D, NR, p->num_levels, p->key_tiles),
                   item.head,
                   row0,
                   rows,
                   __shfl_sync(0xffffffffu, (int)(threadIdx.x / 32), 0),
                   lane,
                   lane / 4,
                   lane % 4};
        b.set_up(item, i == first_item);
        await_copies();
        __syncthreads();
        typename block::held tokens[block::MOST_TOKENS];
        uint32_t touched = 0;
        const uint32_t first_span = item.first_span, num_spans = item.num_spans;
        for (uint32_t n = 0;; n++) {
            const uint32_t span = first_span + n;
            if (n > 0) {
                b.value_anchors(b.tokens_of(span - 1), n - 1, tokens);
                asm volatile("" ::"r"(touched));
                b.value_residuals(b.span_copy(span - 1));
            }
            if (n == num_spans)
                break;
            const uint32_t count = b.tokens_of(span);
            const akv_packed_span *now = b.span_copy(span);
            const bool more = n + 1 < num_spans;
            b.turn_queries(span);
            b.hide_beyond(count);
            b.key_residuals(now);
            if (more) { /* the next span lies behind this one and is about as large */
                const uint64_t left = p->total_bytes - now->end, size = now->end - now->words;
                b.template fetch<0>(now->end, left < size ? left : size);
            } else
                b.fetch_closing(item);
            b.key_anchors(now, count, b.maxima(n)); /* begins with a barrier */
            if (more && threadIdx.x < sizeof *now / 16)
                copy_async((uint8_t *)b.span_copy(span + 1) + threadIdx.x * 16,
                           (const uint8_t *)(b.spans() + span + 1) + threadIdx.x * 16);
            await_copies();
            __syncthreads();
            touched = b.touch(now, AKV_SIDE_V) + (more ? b.touch(b.span_copy(span + 1), AKV_SIDE_K) : 0);
            if (threadIdx.x < NR)
                b.maxima(n + 1)[threadIdx.x] = ordered(-INFINITY);
            if (threadIdx.x == 32)
                *b.keys_taken() = 0;
            b.soften(now, count, n, tokens);
            __syncthreads();
        }
        __syncthreads();
        b.close(item.part, num_spans);
    }
    if (first_item == end_item)
        akv_wait_for_previous(); /* whoever waits for this kernel waits for queries.cu too */
}

/* What one instance file defines; spans.cu lists them. */
typedef struct akv_span_kernel_entry {
    uint32_t dim, row_chunk, fast_steps, threads;
    const void *kernel;
    uint32_t (*shared)(const akv_span_shape *shape);
} akv_span_kernel_entry;

#define AKV_SPAN_INSTANCE(D, NR, NF)                                                                                   \
    static uint32_t shared_##D##_##NR##_##NF(const akv_span_shape *s)                                                  \
    {                                                                                                                  \
        return span_block<D, NR, NF>::lay_out(s->num_anchors, s->span_tokens, s->key_tiles, s->value_tiles,            \
                                              s->num_levels)                                                           \
            .total;                                                                                                    \
    }                                                                                                                  \
    extern const akv_span_kernel_entry akv_span_##D##_##NR##_##NF;                                                     \
    const akv_span_kernel_entry akv_span_##D##_##NR##_##NF = {D,                                                       \
                                                              NR,                                                      \
                                                              NF,                                                      \
                                                              span_block<D, NR, NF>::THREADS,                          \
                                                              (const void *)akv_span_kernel<D, NR, NF>,                \
                                                              shared_##D##_##NR##_##NF};

#endif
