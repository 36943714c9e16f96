/* SPDX-License-Identifier: Apache-2.0 */
/* spans.cu - the kernels of spans.cuh that this build has, and their launch. Instances are files of their own, compiled side by side. */
#include "cuda/spans.cuh"

#define AKV_SPAN_LIST_ENTRY(D, NR, NF) extern const akv_span_kernel_entry akv_span_##D##_##NR##_##NF;
#include "span_instances.h"
#undef AKV_SPAN_LIST_ENTRY

static const akv_span_kernel_entry *const kernels[] = {
#define AKV_SPAN_LIST_ENTRY(D, NR, NF) &akv_span_##D##_##NR##_##NF,
#include "span_instances.h"
#undef AKV_SPAN_LIST_ENTRY
};

static const akv_span_kernel_entry *find(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    for (const akv_span_kernel_entry *k : kernels)
        if (k->dim == dim && k->row_chunk == row_chunk && k->fast_steps == fast_steps)
            return k;
    return NULL;
}

extern "C" int akv_cuda_span_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    return find(dim, row_chunk, fast_steps) != NULL;
}

extern "C" size_t akv_cuda_span_shared(const akv_span_shape *s)
{
    const akv_span_kernel_entry *k = find(s->dim, s->row_chunk, s->fast_steps);
    return k == NULL ? 0 : k->shared(s);
}

extern "C" cudaError_t akv_cuda_prepare_spans(const akv_span_shape *s, size_t shared_bytes)
{
    return akv_cuda_allow_shared(find(s->dim, s->row_chunk, s->fast_steps)->kernel, shared_bytes);
}

extern "C" cudaError_t akv_cuda_launch_spans(const akv_cuda_call *call, cudaStream_t stream)
{
    if (call->num_span_items == 0)
        return cudaSuccess;
    const akv_span_kernel_entry *k = find(call->dim_k, call->row_chunk, call->fast_steps);
    const dim3 grid(call->num_span_blocks, (call->rows + call->row_chunk - 1) / call->row_chunk);
    return akv_launch(k->kernel, grid, k->threads, call->span_shared_bytes, stream, call, call->early_launch != 0);
}
