/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_cuda.h - compression, and decode attention on compressed segments, on an NVIDIA GPU. Library libanchorkv_cuda.
 *
 *   akv_cuda_compress(&layer, NULL, &config, workspace, ws_bytes, stream, &segment, &diag); // a layer, after the prefill
 *   akv_cuda_upload_bytes(segment, &bytes, &diag);                       // once per segment
 *   akv_cuda_upload(segment, device_memory, bytes, stream, &on_device, &diag);
 *   akv_cuda_workspace_bytes(&batch, &ws_bytes, &diag);                  // once per set of segments
 *   akv_cuda_plan_create(&batch, workspace, ws_bytes, stream, &plan, &diag);
 *   akv_cuda_append(plan, &token, stream, &diag);                        // every decode step: a new token to the tails,
 *   akv_cuda_attend(plan, &step, stream, &diag);                         // and attention; both only launch kernels
 *
 * Rules besides those of anchorkv.h:
 *   - Device memory belongs to the caller: this library never allocates or frees any.
 *   - akv_cuda_append and akv_cuda_attend neither allocate nor synchronise, and can be captured into a CUDA graph. What
 *     changes from step to step under a graph is read from device memory: the token, queries, tails, and tail lengths
 *     through `tail_lengths`. A caller may write into the tails by himself as well.
 *   - Whatever is not covered is refused with a status and a sentence. Nothing ever runs on the CPU instead.
 *   - A CUDA error (launch failure, sticky error of earlier work, out of memory) gives AKV_E_DEVICE and CUDA's own
 *     words.
 *     Errors of kernels that run later surface at the caller's synchronisation, as everywhere in CUDA.
 *   - A plan or segment handle is read-only after creation; concurrent steps of one plan on several streams would share
 *     its workspace and are the caller's fault.
 */
#ifndef AKV_CUDA_H
#define AKV_CUDA_H

#include "anchorkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The CUDA stream handle, as in cuda_runtime_api.h, without needing that header here. */
typedef struct CUstream_st *akv_cuda_stream;

#define AKV_CUDA_MAX_HEAD_DIM 256u
#define AKV_CUDA_MAX_GROUP 16u
#define AKV_CUDA_ALIGN 256u /* of every device buffer given to this library */

/* A segment on the device: a small host object that knows where its bytes are. */
typedef struct akv_cuda_segment akv_cuda_segment;

/*
 * akv_cuda_upload_bytes() - device bytes that akv_cuda_upload needs for this segment.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_UNSUPPORTED (head_dim above 256, group above 16), AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_cuda_upload_bytes(const akv_segment *segment, size_t *bytes, akv_diag *diag);

/*
 * akv_cuda_upload() - put a segment on the current device.
 *
 *   device, bytes  in   caller's device memory, AKV_CUDA_ALIGN aligned, >= akv_cuda_upload_bytes
 *   stream         in   the copy is enqueued here; it has read all of its host memory when the call returns
 *   out            out  handle; release with akv_cuda_segment_release, then free the device memory
 *
 * Segments with consecutive positions and at most 4096 anchors, head dims of 64, 96, 128, 192 or 256, are laid out anew
 * for the tensor cores (a private form, never written to disk) where the build has a kernel for them: profile default
 * always, profile paper at head_dim 64, at 96 and 128 if half of the planes turn slowly (a rotary base of 300000 or more).
 * All others are copied as they are and take a plain fp32 kernel, which is much slower. The host segment is not needed
 * afterwards.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_UNSUPPORTED, AKV_E_NO_SPACE, AKV_E_NO_MEMORY, AKV_E_DEVICE.
 */
AKV_API akv_status akv_cuda_upload(const akv_segment *segment, void *device, size_t bytes, akv_cuda_stream stream,
                                   akv_cuda_segment **out, akv_diag *diag);
AKV_API void akv_cuda_segment_release(akv_cuda_segment *segment); /* frees the host handle; NULL is fine */

/*
 * One sequence of a batch: segments whose tokens all precede every query, then a dense tail. Every segment stands at the
 * positions it was made for: what akv_attend_params.segment_shifts says on the CPU cannot be said here.
 */
typedef struct akv_cuda_sequence {
    const akv_cuda_segment *const *segments; /* host array */
    uint32_t num_segments;                   /* 0 is fine */
    uint64_t tail_tokens;                    /* n, or the most that tail_lengths will say */
    const void *tail_keys;                   /* device, [H, n, d_k] post-RoPE, inner dim contiguous */
    const void *tail_values;                 /* device, [H, n, d_v] */
    int64_t tail_stride_head[2];             /* elements; keys, values */
    int64_t tail_stride_token[2];            /* likewise */
    const float *tail_mask;                  /* device, [T, n] added to the logits, or NULL: causal, query t sees tail
                                                tokens j <= n - T + t */
    int64_t tail_mask_stride;                /* elements between two queries */
} akv_cuda_sequence;

/* What a plan is made for: shapes, segments and tails of one layer of every sequence. */
typedef struct akv_cuda_batch {
    size_t struct_size;
    uint32_t num_kv_heads;
    uint32_t gqa_group;   /* 1..16 */
    uint32_t head_dim_k;  /* even, <= 256 */
    uint32_t head_dim_v;
    uint32_t num_queries; /* T >= 1, the same for all sequences */
    uint32_t num_sequences;             /* B >= 1 */
    const akv_cuda_sequence *sequences; /* host array, read during akv_cuda_plan_create only */
    const int32_t *tail_lengths;        /* device, [num_sequences], read by every step; NULL: tail_tokens */
    akv_dtype tail_dtype;               /* of tail_keys and tail_values */
    akv_dtype query_dtype;              /* of akv_cuda_step.queries */
    akv_dtype out_dtype;                /* of akv_cuda_step.out */
    double sm_scale;
    double logit_softcap;               /* 0 = none */
} akv_cuda_batch;

AKV_API void akv_cuda_batch_init(akv_cuda_batch *batch); /* bf16 everywhere, one query, one query head per KV head */

/* One step. All pointers are device memory; inner dims are contiguous, strides in elements. */
typedef struct akv_cuda_step {
    size_t struct_size;
    const void *queries; /* [B, H*G, T, d_k] post-RoPE */
    int64_t query_stride_sequence; /* from one sequence to the next */
    int64_t query_stride_head;     /* from one query head to the next */
    int64_t query_stride_token;    /* from one query to the next */
    const float *sinks;  /* [H*G] or NULL: adds exp(sink) to the softmax's denominator */
    void *out;           /* [B, H*G, T, d_v] */
    int64_t out_stride_sequence;   /* from one sequence to the next */
    int64_t out_stride_head;       /* from one query head to the next */
    int64_t out_stride_token;      /* from one query to the next */
    float *state_max;    /* [B, H*G, T] contiguous, or NULL: as akv_attend_params.state_max */
    float *state_sum;
} akv_cuda_step;

AKV_API void akv_cuda_step_init(akv_cuda_step *step);

/* The work of one layer and step, cut into items, for as long as its segments stay the same. */
typedef struct akv_cuda_plan akv_cuda_plan;

/* Device bytes of the workspace for this batch. Errors as akv_cuda_plan_create. */
AKV_API akv_status akv_cuda_workspace_bytes(const akv_cuda_batch *batch, size_t *bytes, akv_diag *diag);

/*
 * akv_cuda_plan_create() - check everything, cut the work into items, put their list into the workspace.
 *
 *   workspace  in   device memory, AKV_CUDA_ALIGN aligned, the plan's until it is destroyed
 *   stream     in   copies are enqueued here
 *
 * Segments must outlive the plan. Items depend on shapes only, so results do not depend on the device's load.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_UNSUPPORTED (shape, or a device older than sm_80 or with too little
 * shared memory), AKV_E_MISMATCH (a segment of another shape), AKV_E_NO_SPACE, AKV_E_NO_MEMORY, AKV_E_DEVICE.
 */
AKV_API akv_status akv_cuda_plan_create(const akv_cuda_batch *batch, void *workspace, size_t workspace_bytes,
                                        akv_cuda_stream stream, akv_cuda_plan **out, akv_diag *diag);
AKV_API void akv_cuda_plan_destroy(akv_cuda_plan *plan); /* NULL is fine */

/*
 * akv_cuda_plan_bytes() - the workspace in two parts: `own` bytes that a plan keeps, `scratch` bytes that hold something
 * during a step only. Errors as akv_cuda_plan_create.
 */
AKV_API akv_status akv_cuda_plan_bytes(const akv_cuda_batch *batch, size_t *own, size_t *scratch, akv_diag *diag);

/*
 * akv_cuda_plan_create_shared() - akv_cuda_plan_create with the two parts apart, so that plans may share `scratch`: those
 * of a model's layers, whose steps follow one another on one stream. Both are device memory, AKV_CUDA_ALIGN aligned;
 * scratch must be the plan's alone while one of its steps runs. Errors as akv_cuda_plan_create.
 */
AKV_API akv_status akv_cuda_plan_create_shared(const akv_cuda_batch *batch, void *own, size_t own_bytes, void *scratch,
                                               size_t scratch_bytes, akv_cuda_stream stream, akv_cuda_plan **out,
                                               akv_diag *diag);

/*
 * akv_cuda_attend() - one decode step of one layer for the whole batch; the formula of akv_attend.
 *
 * Enqueues kernels on `stream` and returns. Outputs are written for every row; a row that sees nothing gives zeros.
 * Arithmetic: fp32 sums; segments in the private form multiply in fp16 and int8 on the tensor cores (docs/numerics.md).
 * Deterministic: same plan and inputs, same bits.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_DEVICE.   Method: docs/method.md "attention from the compressed form".
 */
AKV_API akv_status akv_cuda_attend(const akv_cuda_plan *plan, const akv_cuda_step *step, akv_cuda_stream stream,
                                   akv_diag *diag);

/* A new token of every sequence. Device memory; inner dims are contiguous, strides in elements; keys, values. */
typedef struct akv_cuda_token {
    size_t struct_size;
    const void *keys;   /* [B, H, d_k] post-RoPE, of the batch's tail_dtype */
    const void *values; /* [B, H, d_v], likewise */
    int64_t stride_sequence[2]; /* from one sequence to the next */
    int64_t stride_head[2];     /* from one KV head to the next */
} akv_cuda_token;

AKV_API void akv_cuda_token_init(akv_cuda_token *token);

/*
 * akv_cuda_append() - put a token into the tail of every sequence, as the last of the batch's tail_lengths: write those
 * first, then append, then attend. Where a length is 0, or more than tail_tokens, nothing is written.
 *
 * Enqueues one kernel on `stream` and returns; lengths are read there, so a CUDA graph of it can be launched again when
 * they have grown. It does what two copies by the caller would do, in less of the processor's time.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT (also for a batch without tail_lengths), AKV_E_DEVICE.
 */
AKV_API akv_status akv_cuda_append(const akv_cuda_plan *plan, const akv_cuda_token *token, akv_cuda_stream stream,
                                   akv_diag *diag);

/* ------------------------------------------------------------------------------------------------- compress a layer */

/*
 * A cache in pages: token t lies at table[t / page_tokens] * stride_page + (t % page_tokens) * stride_token of its
 * tensor, instead of at t * stride_token.
 */
typedef struct akv_cuda_pages {
    size_t struct_size;
    const int32_t *table;   /* device, [ceil(S / page_tokens)] */
    uint32_t page_tokens;   /* >= 1 */
    int64_t stride_page[2]; /* elements from one page to the next; keys, values */
} akv_cuda_pages;

AKV_API void akv_cuda_pages_init(akv_cuda_pages *pages);

/* Device bytes of the workspace for such a layer; tensors are not read. Errors as akv_cuda_compress. */
AKV_API akv_status akv_cuda_compress_workspace_bytes(const akv_layer *layer, const akv_config *config, size_t *bytes,
                                                     akv_diag *diag);

/*
 * akv_cuda_compress() - akv_compress for a layer whose keys and values lie on the current device.
 *
 *   layer      in   as akv_compress takes it, but the data of keys, values, queries and sampled are device memory (any
 *                   dtype, any strides); positions, sampled_positions and rope.inv_freq are host memory
 *   pages      in   how keys and values are paged, or NULL
 *   workspace  in   device memory, AKV_CUDA_ALIGN aligned, >= akv_cuda_compress_workspace_bytes
 *   stream     in   all work is enqueued here
 *   out        out  a segment in host memory, as akv_compress makes it
 *
 * Synchronises the stream twice: this is not for the decode path. No dense copy goes to the host: spectra come down
 * (129 doubles a head and side), tables go up, the finished sections come down; with an allocator of pinned memory in
 * config they do so at the bus's speed. The executor is not used.
 *
 * The same plan as akv_compress: kind, anchors, levels, sections, total bytes. The method is the same, the arithmetic
 * is not (tf32 and fp16 products, sums in another order), so that nearly equal choices fall otherwise: other drawn
 * anchors, other codes, a few more or fewer residuals in the same bytes. docs/numerics.md says which. Same
 * input, seed and device type, same bytes.
 *
 * Covered: profile default, head_dim up to 128 on both sides, compute capability 9.0 and newer; a layer that would
 * stay dense is refused (akv_plan says so beforehand).
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT (host memory among them), AKV_E_UNSUPPORTED, AKV_E_INFEASIBLE,
 * AKV_E_NON_FINITE, AKV_E_NO_SPACE, AKV_E_NO_MEMORY, AKV_E_DEVICE.   Method: docs/method.md.
 */
AKV_API akv_status akv_cuda_compress(const akv_layer *layer, const akv_cuda_pages *pages, const akv_config *config,
                                     void *workspace, size_t workspace_bytes, akv_cuda_stream stream, akv_segment **out,
                                     akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
