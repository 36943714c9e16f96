/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_document.h - a compressed document as one block of bytes (a `.akv` file): which model read it, its token ids, one
 * compressed segment or more per layer, and where it came from. docs/format.md specifies the bytes.
 *
 *   akv_document_write(&parts, write_to_file, file, NULL, &diag);         // the caller's function does the file work
 *
 *   akv_document_open(data, bytes, NULL, &document, &diag);               // cheap: structure and small sections
 *   akv_document_verify(document, &diag);                                 // every byte
 *   akv_document_get_parts(document, &parts, &diag);
 *   akv_document_open_segment(document, i, 0, NULL, &segment, &diag);     // in place, nothing is copied
 *
 * Works on memory only; files are the caller's. Bytes given to akv_document_open are treated as hostile. Little-endian
 * machines only (elsewhere every file is refused as byte-swapped).
 */
#ifndef ANCHORKV_DOCUMENT_H
#define ANCHORKV_DOCUMENT_H

#include "anchorkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The model that read the document. Fixed-width fields without padding; 96 bytes, written as they are. */
typedef struct akv_document_model {
    uint32_t num_layers;    /* all of them, with a cache or without */
    uint32_t num_heads;     /* query heads */
    uint32_t num_kv_heads;
    uint32_t embedding_dim; /* of the residual stream */
    uint32_t vocab_tokens;  /* token ids are below it */
    int32_t rope_type;     /* of the host engine */
    uint64_t weight_bytes;  /* of all tensors */
    uint64_t hash[2];      /* of the host's choice; equal hashes = the same model */
    char description[48];  /* UTF-8, zero-padded; for messages only */
} akv_document_model;

/* Where the cache of a layer is. */
typedef enum akv_document_layer_kind {
    AKV_DOCUMENT_LAYER_SEGMENTS = 0, /* its cache lives in the document's segments */
    AKV_DOCUMENT_LAYER_WINDOW = 1,   /* sliding window: its cells are in the native state */
    AKV_DOCUMENT_LAYER_NO_CACHE = 2  /* no attention cache of its own */
} akv_document_layer_kind;

/* How one layer attends and rotates. Fixed-width fields without padding; 72 bytes, written as they are. */
typedef struct akv_document_layer {
    uint32_t kind;          /* akv_document_layer_kind */
    uint32_t num_kv_heads;  /* this and the rest: 0 unless SEGMENTS */
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t rotary_dim;
    uint32_t rope_style;    /* akv_rope_style */
    uint32_t has_sinks;     /* nonzero: it attends with sinks */
    double rope_magnitude;  /* as akv_rope.magnitude */
    double sm_scale;
    double logit_softcap;
    uint64_t rope_hash;     /* of inv_freq, of the host's choice */
    uint32_t num_segments;  /* >= 1 for SEGMENTS */
    uint32_t first_segment; /* segments are numbered through in layer order */
} akv_document_layer;

/* Free-form facts, e.g. {"source", "book.txt"}. Keys in use are listed in docs/format.md; keys may repeat. */
typedef struct akv_document_property {
    const char *key;   /* zero-terminated, not empty */
    const char *value; /* zero-terminated */
} akv_document_property;

/* A document taken apart. All pointers are borrowed. */
typedef struct akv_document_parts {
    size_t struct_size;
    akv_document_model model;                /* the model that read it */
    const int32_t *tokens;                   /* [num_tokens] token ids, >= 0 */
    uint64_t num_tokens;                     /* >= 1 */
    int32_t next_position;                   /* of the first token after the document */
    uint32_t method;                         /* 0 anchor-residual coding, 1 SnapKV eviction, 2 exact */
    const akv_document_layer *layers;        /* [num_layers] */
    uint32_t num_layers;                     /* model.num_layers */
    uint32_t num_segments;                   /* of all layers together */
    akv_segment *const *segments;            /* [num_segments]; for writing. NULL after akv_document_get_parts */
    const akv_document_property *properties; /* [num_properties] */
    uint32_t num_properties;                 /* 0 is fine */
    const void *native_state;                /* the host's bytes for layers without segments, or NULL */
    uint64_t native_state_bytes;             /* 0 is fine */
} akv_document_parts;

AKV_API void akv_document_parts_init(akv_document_parts *parts);

/* ------------------------------------------------------------------------------------------------------------ write */

/* Receives the document from front to back. Anything but AKV_OK stops the writing and is returned as it is. */
typedef akv_status (*akv_document_write_fn)(void *opaque, const void *data, size_t bytes, akv_diag *diag);

/*
 * akv_document_write() - serialise. The parts are checked as the reader would check them (AKV_E_INVALID_ARGUMENT), so
 * that nothing is written that cannot be read.
 *
 *   parts      in   borrowed
 *   write      in   called with pieces of any size
 *   allocator  in   for the section table; NULL = libc
 *
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY, or what `write` returned.
 */
AKV_API akv_status akv_document_write(const akv_document_parts *parts, akv_document_write_fn write, void *opaque,
                                      const akv_allocator *allocator, akv_diag *diag);

/* Bytes that akv_document_write will produce; 0 when the parts cannot be written. */
AKV_API uint64_t akv_document_bytes(const akv_document_parts *parts);

/* ------------------------------------------------------------------------------------------------------------- read */

/* A document that is open. */
typedef struct akv_document akv_document;

/*
 * akv_document_open() - structure, versions, header checksum, and the checksums of everything but segments and native
 * state.
 *
 *   data   in   64-byte aligned, unchanged and alive until akv_document_close and until the last release of segments
 *               opened from it without a copy. A mapped file that another program may change or shorten is not that:
 *               read it into memory
 *
 * Returns AKV_OK, AKV_E_CORRUPT, AKV_E_VERSION (newer major, other byte order, unknown required feature or section),
 * AKV_E_CHECKSUM, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY. Cost: O(sections + tokens).
 */
AKV_API akv_status akv_document_open(const void *data, size_t bytes, const akv_allocator *allocator, akv_document **out,
                                     akv_diag *diag);
AKV_API void akv_document_close(akv_document *document); /* NULL is fine */

/* Every checksum, every padding byte, and every segment as akv_segment_open checks it. */
AKV_API akv_status akv_document_verify(const akv_document *document, akv_diag *diag);

/* Borrowed views, valid while the document is open; segments is NULL. */
AKV_API akv_status akv_document_get_parts(const akv_document *document, akv_document_parts *out, akv_diag *diag);

/* Value of the n-th property with that key (n from 0), or NULL. */
AKV_API const char *akv_document_property_value(const akv_document *document, const char *key, uint32_t n);

/*
 * Segment i, checksum and contents checked, and its shape compared with its layer's. copy as in akv_segment_open.
 * Errors as akv_segment_open, and AKV_E_CHECKSUM.
 */
AKV_API akv_status akv_document_open_segment(const akv_document *document, uint32_t i, int copy,
                                             const akv_allocator *allocator, akv_segment **out, akv_diag *diag);

/* One section of a document, as its table says. */
typedef struct akv_document_section_info {
    size_t struct_size;
    uint32_t type;         /* docs/format.md */
    int32_t layer;         /* -1 unless a segment */
    uint32_t flags;        /* docs/format.md */
    uint64_t offset;       /* from the start of the document */
    uint64_t bytes;        /* its length, padding not included */
    uint64_t checksum;     /* XXH3, 64 bits */
    const char *type_name; /* static; "unknown" for types that this reader skips */
} akv_document_section_info;

/* A document as its header says. */
typedef struct akv_document_info {
    size_t struct_size;
    uint16_t major;        /* of the format; a reader refuses newer ones */
    uint16_t minor;        /* of the format; a reader takes newer ones */
    uint32_t num_sections; /* of the table */
    uint64_t total_bytes;  /* of the document */
} akv_document_info;

AKV_API void akv_document_info_init(akv_document_info *info);
AKV_API void akv_document_section_info_init(akv_document_section_info *info);

/* Both return AKV_OK, AKV_E_INVALID_ARGUMENT (also for i beyond the last section). */
AKV_API akv_status akv_document_get_info(const akv_document *document, akv_document_info *out, akv_diag *diag);
AKV_API akv_status akv_document_get_section(const akv_document *document, uint32_t i, akv_document_section_info *out,
                                            akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
