/* SPDX-License-Identifier: Apache-2.0 */
/*
 * append.cu - a new token of every sequence to its place in the tail. Where that is, is read on the device, so that a
 * graph of it stays right while the tail grows.
 */
#include "cuda/device.cuh"

#define THREADS 128

template <class T>
static __device__ __forceinline__ void put(const akv_tail &tail, const akv_cuda_token &token, uint32_t sequence,
                                           uint32_t head, uint64_t at, int side, uint32_t dim)
{
    const T *from = (const T *)(side == 0 ? token.keys : token.values) + sequence * token.stride_sequence[side] +
                    head * token.stride_head[side];
    T *to = (T *)const_cast<void *>(side == 0 ? tail.keys : tail.values) + head * tail.stride_head[side] +
            (int64_t)at * tail.stride_token[side];
    for (uint32_t i = threadIdx.x; i < dim; i += THREADS)
        to[i] = from[i];
}

static __global__ void __launch_bounds__(THREADS)
    akv_append_kernel(const akv_tail *tails, const int32_t *lengths, akv_cuda_token token, uint32_t dim_k,
                      uint32_t dim_v, int wide)
{
    const uint32_t head = blockIdx.x, sequence = blockIdx.y, side = blockIdx.z;
    const akv_tail tail = tails[sequence];
    const int32_t length = lengths[sequence];
    if (length < 1 || (uint64_t)length > tail.tokens)
        return;
    if (wide)
        put<uint32_t>(tail, token, sequence, head, (uint64_t)length - 1, (int)side, side == 0 ? dim_k : dim_v);
    else
        put<uint16_t>(tail, token, sequence, head, (uint64_t)length - 1, (int)side, side == 0 ? dim_k : dim_v);
}

extern "C" cudaError_t akv_cuda_launch_append(const akv_cuda_call *call, const akv_cuda_token *token, cudaStream_t stream)
{
    const dim3 grid(call->H, call->num_sequences, 2);
    akv_append_kernel<<<grid, THREADS, 0, stream>>>(call->tails, call->tail_lengths, *token, call->dim_k, call->dim_v,
                                                    call->tail_dtype == AKV_F32);
    return cudaGetLastError();
}
