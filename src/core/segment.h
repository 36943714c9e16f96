/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h - the in-memory object around a segment's canonical bytes, and typed views of its sections. */
#ifndef AKV_SEGMENT_H
#define AKV_SEGMENT_H

#include "core/base.h"
#include "core/layout.h"

#include <stdatomic.h>

/*
 * One allocation: this struct, padded to AKV_SEGMENT_OBJECT_BYTES, then the blob. When the bytes are borrowed the
 * allocation is the object alone.
 */
struct akv_segment {
    atomic_uint refs;
    uint32_t borrowed;
    const uint8_t *blob;
    size_t blob_bytes;
    size_t allocated_bytes;
    akv_allocator allocator; /* functions NULL when libc */
};

#define AKV_SEGMENT_OBJECT_BYTES 64u
_Static_assert(sizeof(akv_segment) <= AKV_SEGMENT_OBJECT_BYTES, "the object's size is charged to every budget");

static inline const akv_header *akv_header_of(const akv_segment *segment)
{
    return (const akv_header *)(const void *)segment->blob;
}

static inline const void *akv_section_of(const akv_segment *segment, int id)
{
    return segment->blob + akv_header_of(segment)->sections[id].offset;
}

/* Object and zeroed, header-less blob of blob_bytes (a multiple of 64) in one allocation; NULL when out of memory. */
akv_segment *akv_segment_new(const akv_allocator *allocator, size_t blob_bytes);

/* Bytes by kind of a laid-out header, the object included. */
void akv_header_bytes(const akv_header *header, akv_bytes *out);

#endif
