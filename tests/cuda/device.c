/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"
#include "akv_test.h"

#include <stdlib.h>

#define GUARD 256
#define MOST_BLOCKS 4096

static struct block {
    uint8_t *memory;
    size_t bytes;
} blocks[MOST_BLOCKS];

void need_device(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0)
        return;
    printf("skipped: no CUDA device here (%s)\n", error == cudaSuccess ? "none found" : cudaGetErrorString(error));
    exit(getenv("AKV_TEST_NEED_GPU") != NULL ? 1 : EXIT_SKIPPED);
}

void *device_new(size_t bytes)
{
    uint8_t *memory = NULL;
    MUST_CUDA(cudaMalloc((void **)&memory, bytes + GUARD));
    MUST_CUDA(cudaMemset(memory, 0xa5, bytes + GUARD));
    for (int i = 0; i < MOST_BLOCKS; i++)
        if (blocks[i].memory == NULL) {
            blocks[i] = (struct block){memory, bytes};
            return memory;
        }
    exit(1);
}

void device_free(void *memory)
{
    uint8_t guard[GUARD];
    for (int i = 0; memory != NULL && i < MOST_BLOCKS; i++)
        if (blocks[i].memory == memory) {
            MUST_CUDA(cudaMemcpy(guard, blocks[i].memory + blocks[i].bytes, GUARD, cudaMemcpyDeviceToHost));
            int intact = 1;
            for (int j = 0; j < GUARD; j++)
                intact &= guard[j] == 0xa5;
            CHECK_MSG(intact, "device memory was written beyond its end");
            MUST_CUDA(cudaFree(memory));
            blocks[i].memory = NULL;
            return;
        }
}

void *device_copy(const void *host, size_t bytes)
{
    void *memory = device_new(bytes);
    MUST_CUDA(cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice));
    return memory;
}

/* [heads, tokens, dim] of a view as a contiguous device array of the same dtype (mask: always f32). */
static void *send(const akv_tensor *t, uint64_t heads, uint64_t tokens, uint64_t dim, int as_f32)
{
    const uint64_t n = heads * tokens * dim;
    float *f = must(malloc((n + 1) * sizeof *f));
    uint16_t *h = must(malloc((n + 1) * sizeof *h));
    for (uint64_t i = 0; i < n; i++) {
        int64_t head = (int64_t)(i / (tokens * dim)), token = (int64_t)(i / dim % tokens), at = (int64_t)(i % dim);
        f[i] = akv_tensor_at(t, head, token, at);
        h[i] = t->dtype == AKV_F16 ? akv_f32_to_f16(f[i]) : akv_f32_to_bf16(f[i]);
    }
    void *memory = as_f32 || t->dtype == AKV_F32 ? device_copy(f, n * sizeof *f) : device_copy(h, n * sizeof *h);
    free(f);
    free(h);
    return memory;
}

akv_status gpu_attend_workspace_bytes(const akv_attend_params *params, size_t *bytes, akv_diag *diag)
{
    (void)params;
    (void)diag;
    *bytes = 64; /* the GPU's workspace is device memory of gpu_attend's own */
    return AKV_OK;
}

akv_status gpu_attend(const akv_attend_params *p, void *workspace, size_t workspace_bytes, akv_diag *diag)
{
    (void)workspace;
    (void)workspace_bytes;
    const uint64_t QH = (uint64_t)p->num_kv_heads * p->gqa_group, T = p->num_queries, rows = QH * T;
    akv_cuda_segment *segments[16] = {0};
    void *memory[16] = {0};
    akv_status status = AKV_OK;
    for (uint32_t i = 0; i < p->num_segments && status == AKV_OK; i++) {
        size_t bytes = 0;
        status = akv_cuda_upload_bytes(p->segments[i], &bytes, diag);
        if (status == AKV_OK) {
            memory[i] = device_new(bytes);
            status = akv_cuda_upload(p->segments[i], memory[i], bytes, NULL, &segments[i], diag);
        }
    }
    akv_cuda_sequence sequence = {0};
    sequence.segments = (const akv_cuda_segment *const *)segments;
    sequence.num_segments = p->num_segments;
    sequence.tail_tokens = p->tail_tokens;
    if (p->tail_tokens > 0) {
        sequence.tail_keys = send(&p->tail_keys, p->num_kv_heads, p->tail_tokens, p->head_dim_k, 0);
        sequence.tail_values = send(&p->tail_values, p->num_kv_heads, p->tail_tokens, p->head_dim_v, 0);
        sequence.tail_stride_token[0] = p->head_dim_k;
        sequence.tail_stride_token[1] = p->head_dim_v;
        sequence.tail_stride_head[0] = (int64_t)p->tail_tokens * p->head_dim_k;
        sequence.tail_stride_head[1] = (int64_t)p->tail_tokens * p->head_dim_v;
        if (p->tail_mask.data != NULL)
            sequence.tail_mask = send(&p->tail_mask, 1, T, p->tail_tokens, 1);
        sequence.tail_mask_stride = (int64_t)p->tail_tokens;
    }
    akv_cuda_batch batch;
    akv_cuda_batch_init(&batch);
    batch.num_kv_heads = p->num_kv_heads;
    batch.gqa_group = p->gqa_group;
    batch.head_dim_k = p->head_dim_k;
    batch.head_dim_v = p->head_dim_v;
    batch.num_queries = p->num_queries;
    batch.num_sequences = 1;
    batch.sequences = &sequence;
    batch.tail_dtype = p->tail_tokens > 0 ? p->tail_keys.dtype : AKV_BF16;
    batch.query_dtype = p->queries.dtype;
    batch.out_dtype = AKV_F32;
    batch.sm_scale = p->sm_scale;
    batch.logit_softcap = p->logit_softcap;
    akv_cuda_step step;
    akv_cuda_step_init(&step);
    step.queries = send(&p->queries, QH, T, p->head_dim_k, 0);
    step.query_stride_head = (int64_t)T * p->head_dim_k;
    step.query_stride_token = p->head_dim_k;
    step.sinks = p->sinks != NULL ? device_copy(p->sinks, QH * sizeof *p->sinks) : NULL;
    step.out = device_new(rows * p->head_dim_v * sizeof(float));
    step.out_stride_head = (int64_t)T * p->head_dim_v;
    step.out_stride_token = p->head_dim_v;
    step.state_max = device_new(rows * sizeof(float));
    step.state_sum = device_new(rows * sizeof(float));
    size_t bytes = 0;
    void *ws = NULL;
    akv_cuda_plan *plan = NULL;
    if (status == AKV_OK)
        status = akv_cuda_workspace_bytes(&batch, &bytes, diag);
    if (status == AKV_OK) {
        ws = device_new(bytes);
        status = akv_cuda_plan_create(&batch, ws, bytes, NULL, &plan, diag);
    }
    float *out[2] = {NULL, NULL};
    for (int turn = 0; turn < 2 && status == AKV_OK; turn++) {
        MUST_CUDA(cudaMemset(step.out, 0xff, rows * p->head_dim_v * sizeof(float))); /* NaN: every element must be written */
        status = akv_cuda_attend(plan, &step, NULL, diag);
        MUST_CUDA(cudaDeviceSynchronize());
        out[turn] = must(malloc((rows * p->head_dim_v + 1) * sizeof(float)));
        MUST_CUDA(cudaMemcpy(out[turn], step.out, rows * p->head_dim_v * sizeof(float), cudaMemcpyDeviceToHost));
    }
    if (status == AKV_OK) {
        CHECK_MSG(memcmp(out[0], out[1], rows * p->head_dim_v * sizeof(float)) == 0, "two runs of one plan give other bits");
        for (uint64_t q = 0; q < QH; q++)
            for (uint64_t t = 0; t < T; t++)
                memcpy(p->out + (int64_t)q * p->out_stride_head + (int64_t)t * p->out_stride_token,
                       out[0] + (q * T + t) * p->head_dim_v, p->head_dim_v * sizeof(float));
        if (p->state_max != NULL)
            MUST_CUDA(cudaMemcpy(p->state_max, step.state_max, rows * sizeof(float), cudaMemcpyDeviceToHost));
        if (p->state_sum != NULL)
            MUST_CUDA(cudaMemcpy(p->state_sum, step.state_sum, rows * sizeof(float), cudaMemcpyDeviceToHost));
    }
    free(out[0]);
    free(out[1]);
    akv_cuda_plan_destroy(plan);
    void *used[] = {ws, (void *)(uintptr_t)step.queries, (void *)(uintptr_t)step.sinks, step.out, step.state_max, step.state_sum,
                    (void *)(uintptr_t)sequence.tail_keys, (void *)(uintptr_t)sequence.tail_values,
                    (void *)(uintptr_t)sequence.tail_mask};
    for (size_t i = 0; i < sizeof used / sizeof used[0]; i++)
        device_free(used[i]);
    for (uint32_t i = 0; i < p->num_segments; i++) {
        akv_cuda_segment_release(segments[i]);
        device_free(memory[i]);
    }
    return status;
}
