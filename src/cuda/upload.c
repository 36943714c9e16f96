/* SPDX-License-Identifier: Apache-2.0 */
/* upload.c - segments on the device, and the one place that turns CUDA's errors into statuses. */
#include "cuda/host.h"
#include "core/segment.h"
#include "cuda/pack.h"
#include "cuda/pack_paper.h"

#include <stdlib.h>

akv_status akv_cuda_fail(akv_diag *diag, cudaError_t error, const char *doing)
{
    (void)cudaGetLastError(); /* what is not sticky must not haunt the caller's next call */
    return akv_fail(diag, AKV_E_DEVICE, "%s: CUDA says \"%s\" (%s)", doing, cudaGetErrorString(error), cudaGetErrorName(error));
}

static akv_status check(const akv_segment *segment, akv_diag *diag)
{
    if (segment == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment must not be NULL");
    const akv_header *h = akv_header_of(segment);
    for (int side = 0; side < AKV_SIDES; side++)
        if (h->head_dim[side] > AKV_CUDA_MAX_HEAD_DIM)
            return akv_fail(diag, AKV_E_UNSUPPORTED, "head_dim_%c is %u; the GPU kernels cover at most %u", side ? 'v' : 'k',
                            h->head_dim[side], AKV_CUDA_MAX_HEAD_DIM);
    if (h->gqa_group > AKV_CUDA_MAX_GROUP)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "gqa_group is %u; the GPU kernels cover at most %u", h->gqa_group,
                        AKV_CUDA_MAX_GROUP);
    if (h->num_kv_heads > 65535)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "num_kv_heads is %u; the GPU kernels cover at most 65535", h->num_kv_heads);
    return AKV_OK;
}

/* In which private form this segment goes up, if any; that form's head. */
typedef struct form {
    akv_packed packed;
    akv_paper paper;
} form;

static akv_status choose_form(const akv_segment *segment, form *out, akv_diag *diag)
{
    memset(out, 0, sizeof *out);
    if (akv_pack_covers(segment)) {
        AKV_TRY(akv_pack_plan(segment, &out->packed, diag));
        if (!akv_cuda_span_covers(out->packed.dim[0], 4, out->packed.fast_steps) &&
            !akv_cuda_span_covers(out->packed.dim[0], 8, out->packed.fast_steps))
            memset(out, 0, sizeof *out); /* no such kernel in this build */
    } else if (akv_paper_covers(segment)) {
        akv_paper_plan(segment, &out->paper);
        if (!akv_cuda_paper_covers(out->paper.dim, 4, out->paper.fast_steps) &&
            !akv_cuda_paper_covers(out->paper.dim, 8, out->paper.fast_steps))
            memset(out, 0, sizeof *out);
    }
    return AKV_OK;
}

/* Its bytes; 0 when the canonical bytes go up. */
static uint64_t bytes_of(const form *f)
{
    return f->packed.total_bytes + f->paper.total_bytes;
}

akv_status akv_cuda_upload_bytes(const akv_segment *segment, size_t *bytes, akv_diag *diag)
{
    if (bytes == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "bytes must not be NULL");
    AKV_TRY(check(segment, diag));
    form f;
    AKV_TRY(choose_form(segment, &f, diag));
    *bytes = (size_t)akv_round_up(bytes_of(&f) > 0 ? bytes_of(&f) : segment->blob_bytes, AKV_CUDA_ALIGN);
    return AKV_OK;
}

akv_status akv_cuda_upload(const akv_segment *segment, void *device, size_t bytes, akv_cuda_stream stream, akv_cuda_segment **out,
                           akv_diag *diag)
{
    size_t need = 0;
    AKV_TRY(akv_cuda_upload_bytes(segment, &need, diag));
    if (out == NULL || device == NULL || (uintptr_t)device % AKV_CUDA_ALIGN != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "device must be a buffer aligned to %u bytes, out must not be NULL", AKV_CUDA_ALIGN);
    if (bytes < need)
        return akv_fail(diag, AKV_E_NO_SPACE, "the device buffer has %zu bytes; this segment needs %zu (akv_cuda_upload_bytes)", bytes, need);
    akv_cuda_segment *s = calloc(1, sizeof *s);
    if (s == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a handle of %zu bytes", sizeof *s);
    s->header = *akv_header_of(segment);
    s->device = device;
    s->kind = s->header.kind == AKV_SEGMENT_DENSE     ? AKV_ITEM_DENSE
              : s->header.coding == AKV_CODING_LADDER ? AKV_ITEM_LADDER
                                                      : AKV_ITEM_PLAIN;
    const uint8_t *bytes_to_send = segment->blob;
    size_t count = segment->blob_bytes;
    uint8_t *packed = NULL;
    form f;
    akv_status status = choose_form(segment, &f, diag);
    s->packed = f.packed;
    s->paper = f.paper;
    if (status == AKV_OK && bytes_of(&f) > 0) {
        count = bytes_of(&f);
        bytes_to_send = packed = akv_alloc(NULL, count);
        if (packed == NULL)
            status = akv_fail(diag, AKV_E_NO_MEMORY, "no memory for packing a segment into %zu bytes", count);
        else if (f.packed.total_bytes > 0)
            status = akv_pack_write(segment, &f.packed, packed, diag);
        else
            akv_paper_write(segment, &f.paper, packed);
    }
    cudaError_t error = status == AKV_OK ? cudaGetDevice(&s->ordinal) : cudaSuccess;
    if (status == AKV_OK && error == cudaSuccess)
        error = cudaMemcpyAsync(device, bytes_to_send, count, cudaMemcpyHostToDevice, stream);
    if (status == AKV_OK && error == cudaSuccess) /* the source may be pinned memory, which is read later */
        error = cudaStreamSynchronize(stream);
    akv_free(NULL, packed, count);
    if (status != AKV_OK || error != cudaSuccess) {
        free(s);
        return status != AKV_OK ? status : akv_cuda_fail(diag, error, "copying a segment to the device");
    }
    *out = s;
    return AKV_OK;
}

void akv_cuda_segment_release(akv_cuda_segment *segment)
{
    free(segment);
}
