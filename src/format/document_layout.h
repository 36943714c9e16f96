/* SPDX-License-Identifier: Apache-2.0 */
/* document_layout.h - the fixed records of a document's bytes; docs/format.md says the same with byte rulers. */
#ifndef AKV_DOCUMENT_LAYOUT_H
#define AKV_DOCUMENT_LAYOUT_H

#include "anchorkv/akv_document.h"
#include "core/base.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#define AKV_DOCUMENT_MAGIC 0x44564b41u /* "AKVD" */
#define AKV_DOCUMENT_MAJOR 1u
#define AKV_DOCUMENT_MINOR 0u
#define AKV_DOCUMENT_ALIGN 64u
#define AKV_DOCUMENT_MAX_SECTIONS (1u << 20)

enum akv_document_section_type {
    AKV_DOC_MODEL = 1,
    AKV_DOC_PROPERTIES = 2,
    AKV_DOC_TOKENS = 3,
    AKV_DOC_LAYERS = 4,
    AKV_DOC_SEGMENT = 5,
    AKV_DOC_NATIVE_STATE = 6,
    AKV_DOC_TYPE_COUNT = 7
};

/* akv_document_entry.flags */
#define AKV_DOC_FLAG_SKIPPABLE 1u /* a reader that does not know the type may skip the section */

typedef struct akv_document_header {
    uint32_t magic;
    uint16_t major;
    uint16_t minor;
    uint32_t header_bytes; /* 128 */
    uint32_t required;     /* feature bits a reader must know; 0 in 1.0 */
    uint32_t optional;     /* feature bits a reader may ignore */
    uint32_t num_sections;
    uint64_t total_bytes;  /* a multiple of 64 */
    uint64_t table_offset; /* 128 */
    uint32_t entry_bytes;  /* 48 */
    uint32_t num_layers;
    uint64_t num_tokens;
    int32_t next_position;
    uint32_t method;
    uint32_t num_segments;
    uint32_t reserved[13]; /* 0 */
    uint64_t checksum;     /* XXH3-64 of the 120 bytes before this field, then of the section table */
} akv_document_header;

typedef struct akv_document_entry {
    uint32_t type;
    int32_t layer; /* -1 unless type is SEGMENT */
    uint32_t flags;
    uint32_t reserved;  /* 0 */
    uint64_t offset;    /* from the document's start, a multiple of 64 */
    uint64_t bytes;     /* without padding, >= 1 */
    uint64_t checksum;  /* XXH3-64 of the bytes */
    uint64_t reserved2; /* 0 */
} akv_document_entry;

_Static_assert(sizeof(akv_document_header) == 128, "part of the format");
_Static_assert(offsetof(akv_document_header, checksum) == 120, "part of the format");
_Static_assert(sizeof(akv_document_entry) == 48, "part of the format");
_Static_assert(sizeof(akv_document_model) == 96, "part of the format");
_Static_assert(sizeof(akv_document_layer) == 72, "part of the format");

static inline uint64_t akv_document_header_checksum(const akv_document_header *header,
                                                    const akv_document_entry *entries)
{
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, header, offsetof(akv_document_header, checksum));
    XXH3_64bits_update(&state, entries, header->num_sections * sizeof *entries);
    return XXH3_64bits_digest(&state);
}

/*
 * What reader and writer demand alike of layers, tokens and model. `status` is what a violation is called:
 * AKV_E_CORRUPT when reading, AKV_E_INVALID_ARGUMENT when writing. parts->segments is not read.
 */
akv_status akv_document_check_parts(const akv_document_parts *parts, akv_status status, akv_diag *diag);

/* The segment's shape must be its layer's. */
akv_status akv_document_check_segment(const akv_document_parts *parts, uint32_t layer, const akv_segment *segment,
                                      akv_status status, akv_diag *diag);

#endif
