/* SPDX-License-Identifier: Apache-2.0 */
/*
 * document.c - reading a document's bytes in place. Everything that is handed out has been checked: the table against
 * the one layout a writer produces, then the small sections with their checksums. Segments are checked when opened.
 */
#include "format/document_layout.h"

#include <stdio.h>

struct akv_document {
    akv_allocator allocator; /* functions NULL when libc */
    const uint8_t *data;
    const akv_document_header *header;
    const akv_document_entry *entries;
    akv_document_parts parts;
    akv_document_property *properties;
    size_t properties_alloc;
    uint32_t first_segment_entry; /* segments are consecutive in the table */
};

#define CORRUPT(...) akv_fail(diag, AKV_E_CORRUPT, __VA_ARGS__)

static const char *type_name(uint32_t type)
{
    static const char *const names[AKV_DOC_TYPE_COUNT] = {"unknown", "model",   "properties",  "tokens",
                                                          "layers",  "segment", "native state"};
    return type < AKV_DOC_TYPE_COUNT ? names[type] : names[0];
}

static const char *section_name(const akv_document_entry *e, char *buffer, size_t capacity)
{
    if (e->type == AKV_DOC_SEGMENT)
        snprintf(buffer, capacity, "segment of layer %d", e->layer);
    else
        snprintf(buffer, capacity, "section \"%s\"", type_name(e->type));
    return buffer;
}

/* ---------------------------------------------------------------------------------------------- header and table */

static akv_status check_version(const akv_document_header *h, akv_diag *diag)
{
    if (h->magic == __builtin_bswap32(AKV_DOCUMENT_MAGIC))
        return akv_fail(diag, AKV_E_VERSION,
                        "the document is in the other byte order; this reader needs a little-endian file on a "
                        "little-endian machine");
    if (h->magic != AKV_DOCUMENT_MAGIC)
        return CORRUPT("not a compressed document: it does not begin with \"AKVD\"");
    if (h->major != AKV_DOCUMENT_MAJOR)
        return akv_fail(diag, AKV_E_VERSION, "document format %u.%u is unknown; this library reads version %u.x",
                        h->major, h->minor, AKV_DOCUMENT_MAJOR);
    if (h->required != 0)
        return akv_fail(diag, AKV_E_VERSION, "the document needs feature bits 0x%x, which this library does not know",
                        h->required);
    return AKV_OK;
}

static akv_status check_header(const akv_document_header *h, size_t bytes, akv_diag *diag)
{
    AKV_TRY(check_version(h, diag));
    if (h->total_bytes != bytes)
        return CORRUPT("the document should have %llu bytes, but %zu are here (truncated or padded)",
                       (unsigned long long)h->total_bytes, bytes);
    if (h->header_bytes != sizeof *h || h->table_offset != sizeof *h || h->entry_bytes != sizeof(akv_document_entry))
        return CORRUPT("the document's header or table entries have sizes that version %u.x does not use", h->major);
    if (h->num_sections == 0 || h->num_sections > AKV_DOCUMENT_MAX_SECTIONS ||
        h->num_sections > (bytes - sizeof *h) / sizeof(akv_document_entry))
        return CORRUPT("a table of %u sections does not fit the document", h->num_sections);
    const akv_document_entry *entries = (const akv_document_entry *)(const void *)(h + 1);
    if (akv_document_header_checksum(h, entries) != h->checksum)
        return akv_fail(diag, AKV_E_CHECKSUM, "the document's header or section table changed after it was written");
    if (h->minor > AKV_DOCUMENT_MINOR)
        return AKV_OK;
    bool clean = h->optional == 0;
    for (size_t i = 0; i < sizeof h->reserved / sizeof h->reserved[0]; i++)
        clean = clean && h->reserved[i] == 0;
    return clean ? AKV_OK : CORRUPT("a header field that version %u.%u leaves 0 is not 0", h->major, h->minor);
}

static akv_status check_entry(const akv_document_header *h, const akv_document_entry *e, uint32_t i, uint64_t at,
                              akv_diag *diag)
{
    if (e->offset != at || e->bytes == 0 || e->bytes > h->total_bytes - at)
        return CORRUPT("section %u has %llu bytes at %llu, which is outside the document or not at %llu", i,
                       (unsigned long long)e->bytes, (unsigned long long)e->offset, (unsigned long long)at);
    bool known = e->type > 0 && e->type < AKV_DOC_TYPE_COUNT;
    if (!known && (e->flags & AKV_DOC_FLAG_SKIPPABLE) == 0)
        return akv_fail(diag, AKV_E_VERSION,
                        "section %u has type %u, which this library does not know and must not skip", i, e->type);
    if (known && h->minor <= AKV_DOCUMENT_MINOR && (e->flags != 0 || e->reserved != 0 || e->reserved2 != 0))
        return CORRUPT("section %u has a field set that version %u.%u leaves 0", i, h->major, h->minor);
    if (known && (e->type == AKV_DOC_SEGMENT ? e->layer < 0 : e->layer != -1))
        return CORRUPT("section %u names layer %d", i, e->layer);
    return AKV_OK;
}

/* Positions of all sections, and the entry of each single one in single[type]. */
static akv_status check_table(akv_document *d, const akv_document_entry **single, akv_diag *diag)
{
    const akv_document_header *h = d->header;
    uint64_t at = akv_round_up(sizeof *h + h->num_sections * sizeof *d->entries, AKV_DOCUMENT_ALIGN);
    uint32_t segments = 0, last_segment = 0;
    if (at > h->total_bytes)
        return CORRUPT("the section table ends beyond the document");
    for (uint32_t i = 0; i < h->num_sections; i++) {
        const akv_document_entry *e = &d->entries[i];
        AKV_TRY(check_entry(h, e, i, at, diag));
        at += akv_round_up(e->bytes, AKV_DOCUMENT_ALIGN);
        if (at > h->total_bytes)
            return CORRUPT("section %u ends beyond the document", i);
        if (e->type == AKV_DOC_SEGMENT) {
            if (segments == 0)
                d->first_segment_entry = i;
            else if (last_segment + 1 != i || e->layer < d->entries[last_segment].layer)
                return CORRUPT("segments must follow each other in layer order, section %u does not", i);
            last_segment = i;
            segments++;
        } else if (e->type < AKV_DOC_TYPE_COUNT) {
            if (single[e->type] != NULL)
                return CORRUPT("section \"%s\" is there twice", type_name(e->type));
            single[e->type] = e;
        }
    }
    if (at != h->total_bytes)
        return CORRUPT("the document has %llu bytes, its sections end at %llu", (unsigned long long)h->total_bytes,
                       (unsigned long long)at);
    if (segments != h->num_segments)
        return CORRUPT("the header counts %u segments, the table has %u", h->num_segments, segments);
    return AKV_OK;
}

static akv_status check_sum(const akv_document *d, const akv_document_entry *e, akv_diag *diag)
{
    char name[48];
    if (XXH3_64bits(d->data + e->offset, (size_t)e->bytes) != e->checksum)
        return akv_fail(diag, AKV_E_CHECKSUM, "%s changed after it was written (checksum differs)",
                        section_name(e, name, sizeof name));
    return AKV_OK;
}

/* Data of a section that must be there with exactly that size. */
static akv_status need(const akv_document *d, const akv_document_entry *const *single, uint32_t type, uint64_t bytes,
                       const void **out, akv_diag *diag)
{
    const akv_document_entry *e = single[type];
    if (e == NULL)
        return CORRUPT("section \"%s\" is missing", type_name(type));
    if (e->bytes != bytes)
        return CORRUPT("section \"%s\" has %llu bytes instead of %llu", type_name(type), (unsigned long long)e->bytes,
                       (unsigned long long)bytes);
    AKV_TRY(check_sum(d, e, diag));
    *out = d->data + e->offset;
    return AKV_OK;
}

/* -------------------------------------------------------------------------------------------------------- contents */

static akv_status read_properties(akv_document *d, const akv_document_entry *e, akv_diag *diag)
{
    if (e == NULL)
        return AKV_OK;
    AKV_TRY(check_sum(d, e, diag));
    const uint8_t *data = d->data + e->offset;
    uint32_t head[2] = {0, 0};
    if (e->bytes >= 8)
        memcpy(head, data, 8);
    if (e->bytes < 8 || head[1] != 0 || head[0] > (e->bytes - 8) / 12)
        return CORRUPT("the property list does not fit its section");
    d->properties_alloc = head[0] * sizeof *d->properties;
    d->properties = akv_alloc(&d->allocator, d->properties_alloc);
    if (d->properties == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %u properties", head[0]);
    uint64_t at = 8;
    for (uint32_t i = 0; i < head[0]; i++) {
        uint32_t length[2];
        if (e->bytes - at < 12)
            return CORRUPT("property %u lies outside its section", i);
        memcpy(length, data + at, 8);
        uint64_t used = akv_round_up(8 + (uint64_t)length[0] + 1 + length[1] + 1, 4);
        if (length[0] == 0 || used > e->bytes - at)
            return CORRUPT("property %u has no key or lies outside its section", i);
        const char *key = (const char *)data + at + 8, *value = key + length[0] + 1;
        if (memchr(key, 0, (size_t)length[0] + 1) != key + length[0] ||
            memchr(value, 0, (size_t)length[1] + 1) != value + length[1])
            return CORRUPT("property %u is not zero-terminated where it should be", i);
        d->properties[i].key = key;
        d->properties[i].value = value;
        at += used;
    }
    if (at != e->bytes)
        return CORRUPT("the property list ends at %llu of %llu bytes", (unsigned long long)at,
                       (unsigned long long)e->bytes);
    d->parts.properties = d->properties;
    d->parts.num_properties = head[0];
    return AKV_OK;
}

static akv_status check_segment_layers(const akv_document *d, akv_diag *diag)
{
    for (uint32_t l = 0; l < d->parts.num_layers; l++)
        for (uint32_t i = 0; i < d->parts.layers[l].num_segments; i++)
            if ((uint32_t)d->entries[d->first_segment_entry + d->parts.layers[l].first_segment + i].layer != l)
                return CORRUPT("the section table and the layer table disagree about the segments of layer %u", l);
    return AKV_OK;
}

static akv_status read_document(akv_document *d, akv_diag *diag)
{
    const akv_document_entry *single[AKV_DOC_TYPE_COUNT] = {NULL};
    const akv_document_header *h = d->header;
    akv_document_parts *p = &d->parts;
    const void *model = NULL, *tokens = NULL, *layers = NULL;
    AKV_TRY(check_table(d, single, diag));
    if (h->num_tokens > INT32_MAX || h->num_layers > AKV_DOCUMENT_MAX_SECTIONS)
        return CORRUPT("%llu tokens and %u layers are more than a document can have", (unsigned long long)h->num_tokens,
                       h->num_layers);
    AKV_TRY(need(d, single, AKV_DOC_MODEL, sizeof(akv_document_model), &model, diag));
    AKV_TRY(need(d, single, AKV_DOC_TOKENS, h->num_tokens * 4, &tokens, diag));
    AKV_TRY(need(d, single, AKV_DOC_LAYERS, h->num_layers * sizeof(akv_document_layer), &layers, diag));
    akv_document_parts_init(p);
    memcpy(&p->model, model, sizeof p->model);
    p->tokens = tokens;
    p->num_tokens = h->num_tokens;
    p->next_position = h->next_position;
    p->method = h->method;
    p->layers = layers;
    p->num_layers = h->num_layers;
    p->num_segments = h->num_segments;
    if (single[AKV_DOC_NATIVE_STATE] != NULL) {
        p->native_state = d->data + single[AKV_DOC_NATIVE_STATE]->offset;
        p->native_state_bytes = single[AKV_DOC_NATIVE_STATE]->bytes;
    }
    AKV_TRY(read_properties(d, single[AKV_DOC_PROPERTIES], diag));
    AKV_TRY(akv_document_check_parts(p, AKV_E_CORRUPT, diag));
    return check_segment_layers(d, diag);
}

akv_status akv_document_open(const void *data, size_t bytes, const akv_allocator *allocator, akv_document **out,
                             akv_diag *diag)
{
    if (data == NULL || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "data and out must not be NULL");
    if ((uintptr_t)data % AKV_DOCUMENT_ALIGN != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the document's bytes must be %u-byte aligned",
                        AKV_DOCUMENT_ALIGN);
    if (bytes < sizeof(akv_document_header))
        return CORRUPT("%zu bytes are too few for a compressed document; its header alone takes %zu", bytes,
                       sizeof(akv_document_header));
    AKV_TRY(check_header(data, bytes, diag));

    akv_document *d = akv_alloc(allocator, sizeof *d);
    if (d == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a document object of %zu bytes", sizeof *d);
    memset(d, 0, sizeof *d);
    if (allocator != NULL)
        d->allocator = *allocator;
    d->data = data;
    d->header = data;
    d->entries = (const akv_document_entry *)(const void *)(d->header + 1);
    akv_status status = read_document(d, diag);
    if (status != AKV_OK) {
        akv_document_close(d);
        return status;
    }
    *out = d;
    return AKV_OK;
}

void akv_document_close(akv_document *document)
{
    if (document == NULL)
        return;
    akv_allocator allocator = document->allocator;
    if (document->properties != NULL)
        akv_free(&allocator, document->properties, document->properties_alloc);
    akv_free(&allocator, document, sizeof *document);
}

/* ---------------------------------------------------------------------------------------------------------- access */

akv_status akv_document_open_segment(const akv_document *document, uint32_t i, int copy, const akv_allocator *allocator,
                                     akv_segment **out, akv_diag *diag)
{
    if (document == NULL || out == NULL || i >= document->parts.num_segments)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "there is no segment %u in this document", i);
    const akv_document_entry *e = &document->entries[document->first_segment_entry + i];
    AKV_TRY(check_sum(document, e, diag));
    akv_segment *segment = NULL;
    akv_diag inner;
    akv_status status =
        akv_segment_open(document->data + e->offset, (size_t)e->bytes, copy, allocator, &segment, &inner);
    if (status != AKV_OK)
        return akv_fail(diag, status, "segment of layer %d: %.450s", e->layer, inner.message);
    status = akv_document_check_segment(&document->parts, (uint32_t)e->layer, segment, AKV_E_CORRUPT, diag);
    if (status != AKV_OK) {
        akv_segment_release(segment);
        return status;
    }
    *out = segment;
    return AKV_OK;
}

static akv_status check_zeros(const akv_document *d, uint64_t at, akv_diag *diag)
{
    for (; at % AKV_DOCUMENT_ALIGN != 0; at++)
        if (d->data[at] != 0)
            return CORRUPT("padding byte at %llu is not zero", (unsigned long long)at);
    return AKV_OK;
}

akv_status akv_document_verify(const akv_document *document, akv_diag *diag)
{
    if (document == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "document must not be NULL");
    const akv_document_header *h = document->header;
    AKV_TRY(check_zeros(document, sizeof *h + h->num_sections * sizeof *document->entries, diag));
    for (uint32_t i = 0; i < h->num_sections; i++) {
        AKV_TRY(check_sum(document, &document->entries[i], diag));
        AKV_TRY(check_zeros(document, document->entries[i].offset + document->entries[i].bytes, diag));
    }
    for (uint32_t i = 0; i < document->parts.num_segments; i++) {
        akv_segment *segment = NULL;
        AKV_TRY(akv_document_open_segment(document, i, 0, &document->allocator, &segment, diag));
        akv_segment_release(segment);
    }
    return AKV_OK;
}

akv_status akv_document_get_parts(const akv_document *document, akv_document_parts *out, akv_diag *diag)
{
    if (document == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "document and out must not be NULL, and out initialised");
    *out = document->parts;
    return AKV_OK;
}

const char *akv_document_property_value(const akv_document *document, const char *key, uint32_t n)
{
    if (document == NULL || key == NULL)
        return NULL;
    for (uint32_t i = 0; i < document->parts.num_properties; i++)
        if (strcmp(document->properties[i].key, key) == 0 && n-- == 0)
            return document->properties[i].value;
    return NULL;
}

void akv_document_info_init(akv_document_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

void akv_document_section_info_init(akv_document_section_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

akv_status akv_document_get_info(const akv_document *document, akv_document_info *out, akv_diag *diag)
{
    if (document == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "document and out must not be NULL, and out initialised");
    out->major = document->header->major;
    out->minor = document->header->minor;
    out->num_sections = document->header->num_sections;
    out->total_bytes = document->header->total_bytes;
    return AKV_OK;
}

akv_status akv_document_get_section(const akv_document *document, uint32_t i, akv_document_section_info *out,
                                    akv_diag *diag)
{
    if (document == NULL || out == NULL || out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "document and out must not be NULL, and out initialised");
    if (i >= document->header->num_sections)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "there is no section %u; the document has %u", i,
                        document->header->num_sections);
    const akv_document_entry *e = &document->entries[i];
    out->type = e->type;
    out->layer = e->layer;
    out->flags = e->flags;
    out->offset = e->offset;
    out->bytes = e->bytes;
    out->checksum = e->checksum;
    out->type_name = type_name(e->type);
    return AKV_OK;
}
