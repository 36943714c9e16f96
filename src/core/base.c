/* SPDX-License-Identifier: Apache-2.0 */
/* base.c - the caller's hooks with their defaults, tensor rows, sign flips. */
#include "core/base.h"
#include "core/layout.h"

#include <stdlib.h>

void *akv_alloc(const akv_allocator *allocator, size_t bytes)
{
    if (bytes == 0)
        bytes = 1;
    if (allocator != NULL && allocator->alloc != NULL)
        return allocator->alloc(allocator->opaque, bytes, AKV_ALIGN);
    if (bytes > SIZE_MAX - AKV_ALIGN)
        return NULL;
    return aligned_alloc(AKV_ALIGN, (size_t)akv_round_up(bytes, AKV_ALIGN));
}

void akv_free(const akv_allocator *allocator, void *ptr, size_t bytes)
{
    if (ptr == NULL)
        return;
    if (allocator != NULL && allocator->free != NULL)
        allocator->free(allocator->opaque, ptr, bytes == 0 ? 1 : bytes);
    else
        free(ptr);
}

void akv_parallel_for(const akv_executor *executor, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks)
{
    if (executor != NULL && executor->parallel_for != NULL && num_tasks > 1) {
        executor->parallel_for(executor->opaque, fn, arg, num_tasks);
        return;
    }
    for (size_t task = 0; task < num_tasks; task++)
        fn(arg, task);
}

akv_tensor akv_tensor_contiguous(const void *data, akv_dtype dtype, uint64_t num_tokens, uint32_t head_dim)
{
    akv_tensor t = {data, dtype, (int64_t)(num_tokens * head_dim), (int64_t)head_dim, 1};
    return t;
}

void akv_tensor_row(const akv_tensor *t, int64_t head, int64_t token, uint32_t dim, float *out)
{
    int64_t at = head * t->stride_head + token * t->stride_token;
    if (t->dtype == AKV_F32) {
        const float *x = (const float *)t->data + at;
        for (uint32_t i = 0; i < dim; i++)
            out[i] = x[(int64_t)i * t->stride_dim];
        return;
    }
    const uint16_t *x = (const uint16_t *)t->data + at;
    if (t->dtype == AKV_F16)
        for (uint32_t i = 0; i < dim; i++)
            out[i] = akv_f16_to_f32(x[(int64_t)i * t->stride_dim]);
    else
        for (uint32_t i = 0; i < dim; i++)
            out[i] = akv_bf16_to_f32(x[(int64_t)i * t->stride_dim]);
}

void akv_signs(uint64_t seed, int side, uint32_t dim, float *out)
{
    akv_rng rng = akv_rng_stream(seed, side == AKV_SIDE_K ? AKV_RNG_SIGNS_K : AKV_RNG_SIGNS_V, 0);
    uint64_t bits = 0;
    for (uint32_t i = 0; i < dim; i++) {
        if (i % 64 == 0)
            bits = akv_rng_next(&rng);
        out[i] = (bits >> (i % 64)) & 1u ? -1.0f : 1.0f;
    }
}
