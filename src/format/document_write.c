/* SPDX-License-Identifier: Apache-2.0 */
/* document_write.c - a document's parts -> bytes, through the caller's write function. */
#include "format/document_layout.h"

/* One contiguous allocation: table, then the data pointer of each section, then the properties' bytes. */
typedef struct plan {
    akv_document_header header;
    akv_document_entry *entries;
    const void **data;
    uint8_t *properties;
    uint64_t properties_bytes;
    void *memory;
    size_t memory_bytes;
} plan;

static uint64_t property_bytes(const akv_document_property *p)
{
    return akv_round_up(8 + strlen(p->key) + 1 + strlen(p->value) + 1, 4);
}

static uint64_t properties_bytes(const akv_document_parts *parts)
{
    uint64_t bytes = 8;
    for (uint32_t i = 0; i < parts->num_properties; i++)
        bytes += property_bytes(&parts->properties[i]);
    return bytes;
}

/* `out` is zeroed. */
static void put_properties(const akv_document_parts *parts, uint8_t *out)
{
    memcpy(out, &parts->num_properties, 4);
    out += 8;
    for (uint32_t i = 0; i < parts->num_properties; i++) {
        const akv_document_property *p = &parts->properties[i];
        uint32_t length[2] = {(uint32_t)strlen(p->key), (uint32_t)strlen(p->value)};
        memcpy(out, length, 8);
        memcpy(out + 8, p->key, length[0]);
        memcpy(out + 8 + length[0] + 1, p->value, length[1]);
        out += property_bytes(p);
    }
}

static uint32_t count_sections(const akv_document_parts *parts)
{
    return 4 + parts->num_segments + (parts->native_state_bytes != 0);
}

static akv_status check_writable(const akv_document_parts *parts, akv_diag *diag)
{
    const akv_status bad = AKV_E_INVALID_ARGUMENT;
    if (parts == NULL)
        return akv_fail(diag, bad, "parts must not be NULL");
    if (parts->struct_size < sizeof *parts)
        return akv_fail(diag, bad, "akv_document_parts has struct_size %zu; call akv_document_parts_init first",
                        parts->struct_size);
    if (parts->num_segments > AKV_DOCUMENT_MAX_SECTIONS - 16 || (parts->num_segments != 0 && parts->segments == NULL))
        return akv_fail(diag, bad, "%u segments cannot be written", parts->num_segments);
    AKV_TRY(akv_document_check_parts(parts, bad, diag));
    for (uint32_t layer = 0; layer < parts->num_layers; layer++)
        for (uint32_t i = 0; i < parts->layers[layer].num_segments; i++) {
            const akv_segment *segment = parts->segments[parts->layers[layer].first_segment + i];
            if (segment == NULL)
                return akv_fail(diag, bad, "segment %u of layer %u is NULL", i, layer);
            AKV_TRY(akv_document_check_segment(parts, layer, segment, bad, diag));
        }
    if (parts->num_properties != 0 && parts->properties == NULL)
        return akv_fail(diag, bad, "properties must not be NULL when num_properties is %u", parts->num_properties);
    for (uint32_t i = 0; i < parts->num_properties; i++) {
        const akv_document_property *p = &parts->properties[i];
        if (p->key == NULL || p->value == NULL || p->key[0] == '\0' || strlen(p->key) > INT32_MAX ||
            strlen(p->value) > INT32_MAX)
            return akv_fail(diag, bad, "property %u needs a key that is not empty and a value", i);
    }
    if ((parts->native_state_bytes != 0) != (parts->native_state != NULL))
        return akv_fail(diag, bad, "native_state and native_state_bytes must both be given or neither");
    return AKV_OK;
}

static void add_section(plan *p, uint32_t type, int32_t layer, const void *data, uint64_t bytes)
{
    akv_document_entry *e = &p->entries[p->header.num_sections];
    memset(e, 0, sizeof *e);
    e->type = type;
    e->layer = layer;
    e->offset = p->header.total_bytes;
    e->bytes = bytes;
    e->checksum = XXH3_64bits(data, (size_t)bytes);
    p->data[p->header.num_sections++] = data;
    p->header.total_bytes += akv_round_up(bytes, AKV_DOCUMENT_ALIGN);
}

static void fill_header(plan *p, const akv_document_parts *parts)
{
    akv_document_header *h = &p->header;
    memset(h, 0, sizeof *h);
    h->magic = AKV_DOCUMENT_MAGIC;
    h->major = AKV_DOCUMENT_MAJOR;
    h->minor = AKV_DOCUMENT_MINOR;
    h->header_bytes = sizeof *h;
    h->table_offset = sizeof *h;
    h->entry_bytes = sizeof(akv_document_entry);
    h->num_layers = parts->num_layers;
    h->num_tokens = parts->num_tokens;
    h->next_position = parts->next_position;
    h->method = parts->method;
    h->num_segments = parts->num_segments;
    h->total_bytes = akv_round_up(sizeof *h + count_sections(parts) * sizeof(akv_document_entry), AKV_DOCUMENT_ALIGN);
}

static akv_status make_plan(const akv_document_parts *parts, const akv_allocator *allocator, plan *p, akv_diag *diag)
{
    uint32_t n = count_sections(parts);
    p->properties_bytes = properties_bytes(parts);
    p->memory_bytes = n * (sizeof(akv_document_entry) + sizeof(void *)) + (size_t)p->properties_bytes;
    p->memory = akv_alloc(allocator, p->memory_bytes);
    if (p->memory == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a table of %u sections", n);
    memset(p->memory, 0, p->memory_bytes);
    p->entries = p->memory;
    p->data = (const void **)(void *)(p->entries + n);
    p->properties = (uint8_t *)(p->data + n);
    put_properties(parts, p->properties);

    fill_header(p, parts);
    add_section(p, AKV_DOC_MODEL, -1, &parts->model, sizeof parts->model);
    add_section(p, AKV_DOC_PROPERTIES, -1, p->properties, p->properties_bytes);
    add_section(p, AKV_DOC_TOKENS, -1, parts->tokens, parts->num_tokens * 4);
    add_section(p, AKV_DOC_LAYERS, -1, parts->layers, parts->num_layers * sizeof *parts->layers);
    for (uint32_t layer = 0; layer < parts->num_layers; layer++)
        for (uint32_t i = 0; i < parts->layers[layer].num_segments; i++) {
            size_t bytes = 0;
            const void *data = akv_segment_data(parts->segments[parts->layers[layer].first_segment + i], &bytes);
            add_section(p, AKV_DOC_SEGMENT, (int32_t)layer, data, bytes);
        }
    if (parts->native_state_bytes != 0)
        add_section(p, AKV_DOC_NATIVE_STATE, -1, parts->native_state, parts->native_state_bytes);
    p->header.checksum = akv_document_header_checksum(&p->header, p->entries);
    return AKV_OK;
}

/* The bytes, then zeros up to the next multiple of 64 after `end`. */
static akv_status put(akv_document_write_fn write, void *opaque, const void *data, uint64_t bytes, uint64_t end,
                      akv_diag *diag)
{
    static const uint8_t zeros[AKV_DOCUMENT_ALIGN];
    size_t padding = (size_t)(akv_round_up(end, AKV_DOCUMENT_ALIGN) - end);
    AKV_TRY(write(opaque, data, (size_t)bytes, diag));
    return padding == 0 ? AKV_OK : write(opaque, zeros, padding, diag);
}

static akv_status put_all(const plan *p, akv_document_write_fn write, void *opaque, akv_diag *diag)
{
    uint64_t table_bytes = p->header.num_sections * sizeof *p->entries;
    AKV_TRY(write(opaque, &p->header, sizeof p->header, diag));
    AKV_TRY(put(write, opaque, p->entries, table_bytes, sizeof p->header + table_bytes, diag));
    for (uint32_t i = 0; i < p->header.num_sections; i++)
        AKV_TRY(put(write, opaque, p->data[i], p->entries[i].bytes, p->entries[i].offset + p->entries[i].bytes, diag));
    return AKV_OK;
}

akv_status akv_document_write(const akv_document_parts *parts, akv_document_write_fn write, void *opaque,
                              const akv_allocator *allocator, akv_diag *diag)
{
    if (write == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "write must not be NULL");
    AKV_TRY(check_writable(parts, diag));
    plan p;
    AKV_TRY(make_plan(parts, allocator, &p, diag));
    akv_status status = put_all(&p, write, opaque, diag);
    akv_free(allocator, p.memory, p.memory_bytes);
    return status;
}

uint64_t akv_document_bytes(const akv_document_parts *parts)
{
    if (check_writable(parts, NULL) != AKV_OK)
        return 0;
    uint64_t bytes = akv_round_up(sizeof(akv_document_header) + count_sections(parts) * sizeof(akv_document_entry),
                                  AKV_DOCUMENT_ALIGN);
    bytes += akv_round_up(sizeof parts->model, AKV_DOCUMENT_ALIGN);
    bytes += akv_round_up(properties_bytes(parts), AKV_DOCUMENT_ALIGN);
    bytes += akv_round_up(parts->num_tokens * 4, AKV_DOCUMENT_ALIGN);
    bytes += akv_round_up(parts->num_layers * sizeof *parts->layers, AKV_DOCUMENT_ALIGN);
    for (uint32_t i = 0; i < parts->num_segments; i++) {
        size_t segment_bytes = 0;
        akv_segment_data(parts->segments[i], &segment_bytes);
        bytes += akv_round_up(segment_bytes, AKV_DOCUMENT_ALIGN);
    }
    return bytes + akv_round_up(parts->native_state_bytes, AKV_DOCUMENT_ALIGN);
}
