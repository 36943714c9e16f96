/* SPDX-License-Identifier: Apache-2.0 */
/* paper.cu - the kernels of paper.cuh that this build has, and their launch. Instances are files of their own. */
#include "cuda/paper.cuh"

#define AKV_PAPER_LIST_ENTRY(D, NR, NF) extern const akv_paper_kernel_entry akv_paper_##D##_##NR##_##NF;
#include "paper_instances.h"
#undef AKV_PAPER_LIST_ENTRY

static const akv_paper_kernel_entry *const kernels[] = {
#define AKV_PAPER_LIST_ENTRY(D, NR, NF) &akv_paper_##D##_##NR##_##NF,
#include "paper_instances.h"
#undef AKV_PAPER_LIST_ENTRY
};

static const akv_paper_kernel_entry *find(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    for (const akv_paper_kernel_entry *k : kernels)
        if (k->dim == dim && k->row_chunk == row_chunk && k->fast_steps == fast_steps)
            return k;
    return NULL;
}

extern "C" int akv_cuda_paper_covers(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps)
{
    return find(dim, row_chunk, fast_steps) != NULL;
}

extern "C" size_t akv_cuda_paper_shared(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps, uint32_t anchors,
                                        uint32_t span, int shared_anchors)
{
    return find(dim, row_chunk, fast_steps)->shared(anchors, span, shared_anchors != 0);
}

extern "C" cudaError_t akv_cuda_prepare_paper(uint32_t dim, uint32_t row_chunk, uint32_t fast_steps,
                                              size_t shared_bytes)
{
    return akv_cuda_allow_shared(find(dim, row_chunk, fast_steps)->kernel, shared_bytes);
}

extern "C" cudaError_t akv_cuda_launch_paper(const akv_cuda_call *call, cudaStream_t stream)
{
    const akv_cuda_paper *paper = &call->paper;
    if (paper->num_items == 0)
        return cudaSuccess;
    const akv_paper_kernel_entry *k = find(call->dim_k, paper->row_chunk, paper->fast_steps);
    const dim3 grid(paper->num_blocks, (call->rows + paper->row_chunk - 1) / paper->row_chunk);
    return akv_launch(k->kernel, grid, k->threads, paper->shared_bytes, stream, call, false);
}
