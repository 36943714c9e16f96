/* SPDX-License-Identifier: Apache-2.0 */
/* segment.c - life of a segment object: create, retain, release, describe. */
#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#  define _DEFAULT_SOURCE 1 /* madvise, where only POSIX was asked for. NOLINT(bugprone-reserved-identifier,cert-*) */
#endif
#include "core/segment.h"
#include "core/sizes.h"

#if defined(__linux__)
#  include <sys/mman.h>
#endif

#define HUGE_PAGE ((size_t)2 << 20)

/*
 * Attention reads a dozen places of a segment side by side and waits for page tables where it is large: about 5 % at 13 MB. So whole
 * 2 MB pages inside it are asked for, which takes no byte more. A hint: a system without them stays as it is.
 */
static void hint_huge_pages(uint8_t *memory, size_t bytes)
{
#if defined(MADV_HUGEPAGE)
    const size_t skip = (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE;
    if (bytes >= 2 * HUGE_PAGE)
        (void)madvise(memory + skip, (bytes - skip) / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

akv_segment *akv_segment_new(const akv_allocator *allocator, size_t blob_bytes)
{
    size_t bytes = AKV_SEGMENT_OBJECT_BYTES + blob_bytes;
    uint8_t *memory = akv_alloc(allocator, bytes);
    if (memory == NULL)
        return NULL;
    if (allocator == NULL || allocator->alloc == NULL)
        hint_huge_pages(memory, bytes);
    memset(memory, 0, bytes);
    akv_segment *segment = (akv_segment *)(void *)memory;
    atomic_init(&segment->refs, 1);
    segment->blob = memory + AKV_SEGMENT_OBJECT_BYTES;
    segment->blob_bytes = blob_bytes;
    segment->allocated_bytes = bytes;
    if (allocator != NULL)
        segment->allocator = *allocator;
    return segment;
}

akv_segment *akv_segment_retain(akv_segment *segment)
{
    if (segment != NULL)
        atomic_fetch_add_explicit(&segment->refs, 1, memory_order_relaxed);
    return segment;
}

void akv_segment_release(akv_segment *segment)
{
    if (segment == NULL || atomic_fetch_sub_explicit(&segment->refs, 1, memory_order_acq_rel) != 1)
        return;
    akv_allocator allocator = segment->allocator;
    akv_free(&allocator, segment, segment->allocated_bytes);
}

const void *akv_segment_data(const akv_segment *segment, size_t *bytes)
{
    if (bytes != NULL)
        *bytes = segment == NULL ? 0 : segment->blob_bytes;
    return segment == NULL ? NULL : segment->blob;
}

void akv_header_bytes(const akv_header *h, akv_bytes *b)
{
    const akv_section *s = h->sections;
    memset(b, 0, sizeof *b);
    b->object = AKV_SEGMENT_OBJECT_BYTES;
    b->total = b->object + h->total_bytes;
    b->anchors = s[AKV_SEC_ANCHORS].bytes + s[AKV_SEC_ANCHORS + 1].bytes + s[AKV_SEC_ANCHOR_SCALES].bytes +
                 s[AKV_SEC_ANCHOR_SCALES + 1].bytes;
    b->positions = s[AKV_SEC_POSITIONS].bytes + s[AKV_SEC_ANCHOR_TOKENS].bytes;
    b->index = s[AKV_SEC_INDEX].bytes + s[AKV_SEC_INDEX + 1].bytes;
    b->coefficients = s[AKV_SEC_COEFF].bytes + s[AKV_SEC_COEFF + 1].bytes;
    b->level_maps =
        s[AKV_SEC_LEVELS].bytes + s[AKV_SEC_LEVELS + 1].bytes + s[AKV_SEC_RANKS].bytes + s[AKV_SEC_RANKS + 1].bytes;
    b->residuals =
        s[AKV_SEC_GAINS].bytes + s[AKV_SEC_GAINS + 1].bytes + s[AKV_SEC_CODES].bytes + s[AKV_SEC_CODES + 1].bytes;
    b->dense = s[AKV_SEC_DENSE].bytes + s[AKV_SEC_DENSE + 1].bytes;
    b->model = s[AKV_SEC_MEAN].bytes + s[AKV_SEC_COORDS].bytes;
    for (int side = 0; side < AKV_SIDES; side++)
        b->model += s[AKV_SEC_BASIS + side].bytes + s[AKV_SEC_BASIS_SCALES + side].bytes +
                    s[AKV_SEC_SIGMAS + side].bytes + s[AKV_SEC_TABLES + side].bytes + s[AKV_SEC_UNITS + side].bytes;
    b->header = h->total_bytes - (b->anchors + b->positions + b->index + b->coefficients + b->level_maps +
                                  b->residuals + b->model + b->dense);
}

akv_status akv_segment_get_info(const akv_segment *segment, akv_segment_info *out, akv_diag *diag)
{
    if (segment == NULL || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment and out must not be NULL");
    if (out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "akv_segment_info has struct_size %zu; call akv_segment_info_init first", out->struct_size);
    const akv_header *h = akv_header_of(segment);
    akv_segment_info_init(out);
    out->kind = (akv_segment_kind)h->kind;
    out->dense_reason = (akv_dense_reason)h->dense_reason;
    out->profile = h->profile;
    out->shape.num_tokens = h->num_tokens;
    out->shape.num_kv_heads = h->num_kv_heads;
    out->shape.gqa_group = h->gqa_group;
    out->shape.head_dim_k = h->head_dim[AKV_SIDE_K];
    out->shape.head_dim_v = h->head_dim[AKV_SIDE_V];
    out->shape.rotary_dim = h->rotary_dim;
    out->shape.num_queries = h->num_queries;
    out->shape.has_positions = h->sections[AKV_SEC_POSITIONS].offset != 0;
    out->first_position = h->first_position;
    out->last_position = h->last_position;
    out->dense_bytes = akv_dense_bytes(h->num_tokens, h->num_kv_heads, h->head_dim[0], h->head_dim[1]);
    out->budget_bytes = h->budget_bytes;
    out->num_anchors = h->num_anchors;
    out->residuals_k = h->num_residuals[AKV_SIDE_K];
    out->residuals_v = h->num_residuals[AKV_SIDE_V];
    out->sm_scale = h->sm_scale;
    out->logit_softcap = h->logit_softcap;
    out->seed = h->seed;
    out->dense_dtype = (akv_dtype)h->dense_dtype;

    akv_header_bytes(h, &out->bytes);
    return AKV_OK;
}
