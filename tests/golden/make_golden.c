/* SPDX-License-Identifier: Apache-2.0 */
/*
 * make_golden.c - writes the golden files of format 1 and the list of what is expected of them.
 *
 *   make_golden FOLDER          files and list: once per format version; released files are never made again, since
 *                               the encoder may get better while old files stay readable
 *   make_golden --list FOLDER   only the list, from the files that are there: after a sentence was reworded. Read the
 *                               diff.
 *
 * A good file that does not open, or a bad one that does, ends the program, whatever the list says.
 */
#include "golden.h"

#include "format/document_layout.h"

#include <dirent.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *g_folder;

static void stop(const char *name, const char *why)
{
    fprintf(stderr, "make_golden: %s: %s\n", name, why);
    exit(1);
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", g_folder, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        stop(path, "cannot be written");
}

/* --------------------------------------------------------------------------------------------------- good segments */

static akv_segment *compress(const spec *s, akv_profile profile, bool evict)
{
    fixture f;
    akv_segment *segment = NULL;
    akv_diag diag = {AKV_OK, ""};
    fixture_make(s, &f);
    f.config.profile = profile;
    akv_status status = AKV_E_INFEASIBLE;
    for (; status == AKV_E_INFEASIBLE;
         f.config.keep_ratio += 0.03) /* small layers need a large share of their few bytes */
        status = evict ? akv_evict_snapkv(&f.layer, &f.config, &segment, &diag)
                       : akv_compress(&f.layer, &f.config, &segment, &diag);
    if (status != AKV_OK)
        stop(s->name, diag.message);
    fixture_free(&f);
    return segment;
}

static void write_segment(const char *name, akv_segment *segment)
{
    size_t bytes = 0;
    const void *data = akv_segment_data(segment, &bytes);
    write_file(name, data, bytes);
    akv_segment_release(segment);
}

static const spec gaps = {.name = "gaps",
                          .S = 75,
                          .H = 2,
                          .G = 2,
                          .dk = 8,
                          .dv = 6,
                          .W = 4,
                          .rotary = 8,
                          .keep = 0.4,
                          .gaps = 1,
                          .dtype = AKV_F16};

static void write_segments(void)
{
    static const spec specs[] = {
        {.name = "blocks",
         .S = 1030,
         .H = 1,
         .G = 2,
         .dk = 8,
         .dv = 6,
         .W = 8,
         .rotary = 6,
         .keep = 0.2,
         .dtype = AKV_F16},
        {.name = "yarn",
         .S = 70,
         .H = 2,
         .G = 1,
         .dk = 16,
         .dv = 16,
         .W = 4,
         .rotary = 16,
         .keep = 0.4,
         .magnitude = 1.25,
         .style = AKV_ROPE_INTERLEAVED,
         .softcap = 30,
         .first_position = 1000,
         .dtype = AKV_BF16},
        {.name = "no-rope", .S = 60, .H = 1, .G = 3, .dk = 10, .dv = 14, .W = 4, .keep = 0.5, .dtype = AKV_F32},
    };
    char name[64];
    for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++) {
        for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
            snprintf(name, sizeof name, "open-%s-%s.akvs", profile == AKV_PROFILE_PAPER ? "paper" : "default",
                     specs[i].name);
            write_segment(name, compress(&specs[i], (akv_profile)profile, false));
        }
        snprintf(name, sizeof name, "open-%s-gaps.akvs", profile == AKV_PROFILE_PAPER ? "paper" : "default");
        write_segment(name, compress(&gaps, (akv_profile)profile, false));
    }
    for (int dtype = 0; dtype < 3; dtype++) {
        static const char *const names[] = {"open-dense-f32.akvs", "open-dense-f16.akvs", "open-dense-bf16.akvs"};
        spec s = {.name = "dense",
                  .S = 9,
                  .H = 2,
                  .G = 1,
                  .dk = 6,
                  .dv = 10,
                  .W = 4,
                  .rotary = 4,
                  .keep = 1,
                  .dtype = (akv_dtype)dtype};
        write_segment(names[dtype], compress(&s, AKV_PROFILE_PAPER, false));
    }
    spec s = {.name = "evicted",
              .S = 60,
              .H = 2,
              .G = 1,
              .dk = 8,
              .dv = 8,
              .W = 4,
              .rotary = 8,
              .keep = 0.6,
              .dtype = AKV_F16};
    write_segment("open-evicted.akvs", compress(&s, AKV_PROFILE_PAPER, true));
    for (uint64_t i = 0; i < 3;
         i++) { /* what the encoder does not draw: 1, 7 and 15 levels, any order of coordinates */
        snprintf(name, sizeof name, "open-ladder-drawn-%llu.akvs", (unsigned long long)i);
        spec r = {.name = "drawn", .S = 45, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = 8, .gaps = i % 2};
        write_segment(name, random_ladder_segment(&r, i == 1 ? 1 : 5, 0.6, i));
    }
    for (uint32_t flags = 1; flags <= AKV_FLAGS_KNOWN; flags++) {
        snprintf(name, sizeof name, "open-plain-flags-%u.akvs", flags);
        spec r = {.name = "flags", .S = 40, .H = 1, .G = 1, .dk = 8, .dv = 6, .W = 2, .rotary = 8};
        write_segment(name, random_segment(&r, 5, 0, flags, flags));
    }
}

/* ---------------------------------------------------------------------------------------------------- bad segments */

enum base { PLAIN, LADDER, DENSE, BASES };

typedef struct lie {
    const char *name;
    enum base base;
    int section; /* -1: header */
    size_t offset;
    size_t bytes;
    uint64_t value;
} lie;

#define FIELD(name) -1, offsetof(akv_header, name), sizeof(((akv_header *)0)->name)

static const lie segment_lies[] = {
    {"magic", DENSE, FIELD(magic), 0x46465352},
    {"byte-order", DENSE, FIELD(magic), 0x414b5653},
    {"major-2", DENSE, FIELD(major), 2},
    {"major-0", DENSE, FIELD(major), 0},
    {"major-2-ladder", LADDER, FIELD(major), 2},
    {"required-bit", DENSE, FIELD(required), 4},
    {"optional-bit", DENSE, FIELD(optional), 4},
    {"reserved", DENSE, FIELD(reserved), 1},
    {"header-bytes", DENSE, FIELD(header_bytes), 512},
    {"total-bytes", DENSE, FIELD(total_bytes), 64},
    {"no-tokens", DENSE, FIELD(num_tokens), 0},
    {"tokens", PLAIN, FIELD(num_tokens), 74},
    {"positions-too-few", DENSE, FIELD(last_position), 2},
    {"head-dim-odd", DENSE, FIELD(head_dim), 7},
    {"rotary-dim", DENSE, FIELD(rotary_dim), 10},
    {"rope-style", DENSE, FIELD(rope_style), 2},
    {"magnitude", DENSE, FIELD(magnitude), 0},
    {"sm-scale-nan", DENSE, FIELD(sm_scale), 0x7ff8000000000000},
    {"dense-dtype", DENSE, FIELD(dense_dtype), 3},
    {"dense-reason", DENSE, FIELD(dense_reason), 5},
    {"kind", DENSE, FIELD(kind), 2},
    {"coding", PLAIN, FIELD(coding), 2},
    {"codec-flags", PLAIN, FIELD(flags), 8},
    {"profile", PLAIN, FIELD(profile), 3},
    {"profile-of-other-coding", LADDER, FIELD(profile), 1},
    {"no-anchors", PLAIN, FIELD(num_anchors), 0},
    {"residuals", PLAIN, FIELD(num_residuals), 1000},
    {"num-sections", DENSE, FIELD(num_sections), 34},
    {"section-offset", PLAIN, FIELD(sections[AKV_SEC_INDEX].offset), 64},
    {"section-33-in-minor-0", DENSE, FIELD(sections[33].offset), 896},
    {"inv-freq-infinite", PLAIN, AKV_SEC_INV_FREQ, 8, 8, 0x7ff0000000000000},
    {"positions-descend", PLAIN, AKV_SEC_POSITIONS, 8, 4, 0},
    {"anchor-token-beyond", PLAIN, AKV_SEC_ANCHOR_TOKENS, 4, 4, 75},
    {"anchor-infinite", PLAIN, AKV_SEC_ANCHORS, 6, 2, 0x7f80},
    {"index-beyond", PLAIN, AKV_SEC_INDEX + 1, 3, 1, 0xff},
    {"coefficient-nan", PLAIN, AKV_SEC_COEFF, 2, 2, 0x7e00},
    {"levels-beyond-end", PLAIN, AKV_SEC_LEVELS, 9, 1, 0x80},
    {"rank", PLAIN, AKV_SEC_RANKS, 0, 8, 1},
    {"gain-infinite", PLAIN, AKV_SEC_GAINS + 1, 0, 2, 0xfc00},
    {"dense-nan", DENSE, AKV_SEC_DENSE, 4, 2, 0x7e01},
    {"num-levels", LADDER, FIELD(num_levels), 16},
    {"index-bits", LADDER, FIELD(index_bits), 4},
    {"basis", LADDER, FIELD(basis_cols), 1000},
    {"code-bytes", LADDER, FIELD(code_bytes), UINT64_MAX},
    {"ladder-fields-in-plain", PLAIN, FIELD(num_levels), 1},
    {"mean-infinite", LADDER, AKV_SEC_MEAN, 2, 2, 0x7f80},
    {"unit-zero", LADDER, AKV_SEC_UNITS + 1, 2, 2, 0},
    {"units-of-a-plane", LADDER, AKV_SEC_UNITS, 0, 2, 0x4000},
    {"basis-scale-nan", LADDER, AKV_SEC_BASIS_SCALES, 0, 4, 0x7fc00000},
    {"coordinate-twice", LADDER, AKV_SEC_COORDS, 0, 2, 10},
    {"ladder-index-beyond", LADDER, AKV_SEC_INDEX, 0, 1, 0x07},
    {"ladder-index-slack", LADDER, AKV_SEC_INDEX, 28, 1, 0x80},
    {"ladder-coefficient-slack", LADDER, AKV_SEC_COEFF, 38, 1, 0x80},
    {"ladder-levels-beyond-end", LADDER, AKV_SEC_LEVELS, 9, 1, 0x80},
    {"ladder-rank", LADDER, AKV_SEC_RANKS, 0, 8, 1},
};

static akv_segment *ladder_base(void)
{
    /* as in test_ladder_hostile: bases on both sides, codes left over */
    const spec s = {.name = "ladder", .S = 77, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = 8};
    for (uint64_t seed = 0; seed < 1000; seed++) {
        akv_segment *segment = random_ladder_segment(&s, 5, 0.6, seed);
        const akv_header *h = akv_header_of(segment);
        const uint64_t *offset = akv_section_of(segment, AKV_SEC_RANKS);
        if (h->basis_cols[0] > 0 && h->basis_cols[1] > 0 && h->num_levels == 8 && h->code_bytes > offset[4])
            return segment;
        akv_segment_release(segment);
    }
    stop("ladder base", "no draw fits");
    return NULL;
}

static akv_segment *dense_base(void)
{
    const spec s = {
        .name = "dense", .S = 4, .H = 1, .G = 1, .dk = 4, .dv = 4, .W = 1, .rotary = 4, .keep = 1, .dtype = AKV_F16};
    return compress(&s, AKV_PROFILE_PAPER, false);
}

static uint8_t *copy_of(const akv_segment *segment, size_t room, size_t *bytes)
{
    const void *data = akv_segment_data(segment, bytes);
    uint8_t *copy = must(aligned_alloc(64, *bytes + room));
    memcpy(copy, data, *bytes);
    memset(copy + *bytes, 0, room);
    return copy;
}

static void write_bad_segments(void)
{
    akv_segment *bases[BASES] = {compress(&gaps, AKV_PROFILE_PAPER, false), ladder_base(), dense_base()};
    char name[64];
    for (size_t i = 0; i < sizeof segment_lies / sizeof segment_lies[0]; i++) {
        const lie *l = &segment_lies[i];
        size_t bytes = 0;
        uint8_t *blob = copy_of(bases[l->base], 0, &bytes);
        const akv_header *h = (const akv_header *)(const void *)blob;
        const size_t width = l->bytes > 8 ? 4 : l->bytes; /* arrays: their first entry */
        memcpy(blob + l->offset + (l->section < 0 ? 0 : h->sections[l->section].offset), &l->value, width);
        snprintf(name, sizeof name, "bad-%s.akvs", l->name);
        write_file(name, blob, bytes);
        free(blob);
    }
    size_t bytes = 0;
    uint8_t *blob = copy_of(bases[DENSE], 0, &bytes);
    write_file("bad-empty.akvs", blob, 0);
    write_file("bad-header-cut.akvs", blob, 767);
    write_file("bad-cut.akvs", blob, bytes - 1);
    blob[bytes - 1] = 1;
    write_file("bad-padding.akvs", blob, bytes);
    free(blob);
    for (int i = 0; i < BASES; i++)
        akv_segment_release(bases[i]);
}

/* A writer of 1.7: reserved fields set, an optional feature, a section more. */
static void write_newer_segments(void)
{
    akv_segment *bases[] = {compress(&gaps, AKV_PROFILE_PAPER, false), compress(&gaps, AKV_PROFILE_DEFAULT, false),
                            dense_base()};
    static const char *const names[] = {"open-newer-minor-paper.akvs", "open-newer-minor-default.akvs",
                                        "open-newer-minor-dense.akvs"};
    for (int i = 0; i < 3; i++) {
        size_t bytes = 0;
        uint8_t *blob = copy_of(bases[i], 64, &bytes);
        akv_header *h = (akv_header *)(void *)blob;
        h->minor = 7;
        h->optional = 0x80000001u;
        h->reserved[0] = h->reserved[7] = 5;
        h->num_sections = 34;
        h->sections[33] = (akv_section){bytes, 5};
        memcpy(blob + bytes, "extra", 5);
        h->total_bytes = bytes + 64;
        write_file(names[i], blob, bytes + 64);
        free(blob);
        akv_segment_release(bases[i]);
    }
}

/* ------------------------------------------------------------------------------------------------------- documents */

typedef struct sink {
    uint8_t *data;
    size_t bytes;
} sink;

static akv_status to_sink(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    sink *s = opaque;
    (void)diag;
    memcpy(s->data + s->bytes, data, bytes);
    s->bytes += bytes;
    return AKV_OK;
}

static akv_document_layer layer_of(const akv_segment *segment, uint32_t first)
{
    akv_segment_info info;
    akv_document_layer layer;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    memset(&layer, 0, sizeof layer);
    layer.num_kv_heads = info.shape.num_kv_heads;
    layer.gqa_group = info.shape.gqa_group;
    layer.head_dim_k = info.shape.head_dim_k;
    layer.head_dim_v = info.shape.head_dim_v;
    layer.rotary_dim = info.shape.rotary_dim;
    layer.rope_magnitude = 1.0;
    layer.sm_scale = info.sm_scale;
    layer.rope_hash = 0x1234;
    layer.num_segments = 1;
    layer.first_segment = first;
    return layer;
}

/* 64 bytes of room behind the document and, zeroed, inside the table's padding or not at all. */
static uint8_t *make_document(akv_segment *const *segments, uint32_t num_segments, bool full, size_t *bytes)
{
    akv_document_layer layers[4];
    int32_t tokens[16];
    akv_document_parts parts;
    akv_diag diag = {AKV_OK, ""};
    static const akv_document_property properties[] = {{"source", "first.txt"},
                                                       {"source", "second \xc3\xa9.txt"},
                                                       {"system", ""},
                                                       {"a key of tomorrow", "is ignored"}};
    memset(layers, 0, sizeof layers);
    for (uint32_t i = 0; i < num_segments; i++)
        layers[i] = layer_of(segments[i], i);
    layers[num_segments].kind = full ? AKV_DOCUMENT_LAYER_WINDOW : AKV_DOCUMENT_LAYER_NO_CACHE;
    layers[num_segments + 1].kind = AKV_DOCUMENT_LAYER_NO_CACHE;
    for (int i = 0; i < 16; i++)
        tokens[i] = 7 * i;
    akv_document_parts_init(&parts);
    parts.num_layers = parts.model.num_layers = num_segments + (full ? 2 : 1);
    parts.model.hash[0] = 0xabcdef;
    strcpy(parts.model.description, "golden");
    parts.tokens = tokens;
    parts.num_tokens = 16;
    parts.next_position = 16;
    parts.layers = layers;
    parts.segments = segments;
    parts.num_segments = num_segments;
    parts.properties = properties;
    parts.num_properties = full ? 4 : 1;
    if (full) {
        parts.native_state = "native bytes";
        parts.native_state_bytes = 13;
    }
    const size_t room = akv_document_bytes(&parts);
    sink s = {must(aligned_alloc(64, room + 256)), 0};
    memset(s.data, 0, room + 256);
    if (room == 0 || akv_document_write(&parts, to_sink, &s, NULL, &diag) != AKV_OK)
        stop("document", diag.message);
    *bytes = s.bytes;
    return s.data;
}

static akv_document_header *header_in(uint8_t *data)
{
    return (akv_document_header *)(void *)data;
}
static akv_document_entry *entries_in(uint8_t *data)
{
    return (akv_document_entry *)(void *)(header_in(data) + 1);
}

static akv_document_entry *entry_in(uint8_t *data, uint32_t type)
{
    for (uint32_t i = 0; i < header_in(data)->num_sections; i++)
        if (entries_in(data)[i].type == type)
            return &entries_in(data)[i];
    stop("document", "a section is missing");
    return NULL;
}

/* Puts all checksums right. */
static void seal(uint8_t *data)
{
    for (uint32_t i = 0; i < header_in(data)->num_sections; i++) {
        akv_document_entry *e = &entries_in(data)[i];
        e->checksum = XXH3_64bits(data + e->offset, (size_t)e->bytes);
    }
    header_in(data)->checksum = akv_document_header_checksum(header_in(data), entries_in(data));
}

/* One section of an unknown type more, at the end; the table had room for its entry or moves everything by 64 bytes. */
static size_t add_section(uint8_t *data, size_t bytes, uint32_t type, uint32_t flags)
{
    akv_document_header *h = header_in(data);
    const uint64_t old_start = entries_in(data)[0].offset,
                   start = akv_round_up(sizeof *h + (h->num_sections + 1) * sizeof(akv_document_entry), 64);
    memmove(data + start, data + old_start, bytes - old_start);
    for (uint32_t i = 0; i < h->num_sections; i++)
        entries_in(data)[i].offset += start - old_start;
    bytes += start - old_start;
    memset(entries_in(data) + h->num_sections, 0, start - sizeof *h - h->num_sections * sizeof(akv_document_entry));
    entries_in(data)[h->num_sections++] = (akv_document_entry){type, -1, flags, 0, bytes, 4, 0, 0};
    memset(data + bytes, 0, 64);
    memcpy(data + bytes, "news", 4);
    h->total_bytes = bytes + 64;
    return bytes + 64;
}

static void write_documents(void)
{
    akv_segment *segments[] = {compress(&gaps, AKV_PROFILE_PAPER, false), compress(&gaps, AKV_PROFILE_DEFAULT, false)};
    size_t bytes = 0;
    uint8_t *data = make_document(segments, 2, true, &bytes);
    write_file("open-document.akv", data, bytes);
    bytes = add_section(data, bytes, 77, AKV_DOC_FLAG_SKIPPABLE);
    seal(data);
    write_file("open-document-unknown-section.akv", data, bytes);
    header_in(data)->minor = 3;
    header_in(data)->optional = 9;
    header_in(data)->reserved[12] = 1;
    entry_in(data, AKV_DOC_TOKENS)->reserved = 6;
    entry_in(data, AKV_DOC_TOKENS)->flags = 2;
    seal(data);
    write_file("open-document-newer-minor.akv", data, bytes);
    free(data);
    for (int i = 0; i < 2; i++)
        akv_segment_release(segments[i]);
}

#define BAD(name, sealed, ...)                                                                                         \
    do {                                                                                                               \
        size_t n = 0;                                                                                                  \
        uint8_t *data = make_document(&segment, 1, false, &n);                                                         \
        akv_document_header *h = header_in(data);                                                                      \
        (void)h;                                                                                                       \
        __VA_ARGS__;                                                                                                   \
        if (sealed)                                                                                                    \
            seal(data);                                                                                                \
        write_file("bad-document-" name ".akv", data, n);                                                              \
        free(data);                                                                                                    \
    } while (0)
#define PART(type) (data + entry_in(data, type)->offset)

static void write_bad_documents(void)
{
    akv_segment *segment = dense_base();
    BAD("magic", 0, h->magic++);
    BAD("byte-order", 0, h->magic = 0x414b5644);
    BAD("major-2", 1, h->major = 2);
    BAD("major-0", 1, h->major = 0);
    BAD("required-bit", 1, h->required = 8);
    BAD("optional-bit", 1, h->optional = 8);
    BAD("reserved", 1, h->reserved[3] = 1);
    BAD("cut", 0, n -= 1);
    BAD("header-cut", 0, n = 127);
    BAD("longer", 0, n += 64);
    BAD("header-changed", 0, h->next_position++);
    BAD("table-changed", 0, entries_in(data)[1].flags = 1);
    BAD("entry-bytes", 0, h->entry_bytes = 40);
    BAD("no-sections", 0, h->num_sections = 0);
    BAD("too-many-sections", 0, h->num_sections = 1000);
    BAD("unknown-section", 1, n = add_section(data, n, 77, 0));
    BAD("section-twice", 1, n = add_section(data, n, AKV_DOC_PROPERTIES, 0));
    BAD("section-missing", 1, entry_in(data, AKV_DOC_TOKENS)->type = AKV_DOC_NATIVE_STATE);
    BAD("section-elsewhere", 1, entry_in(data, AKV_DOC_TOKENS)->offset += 64);
    BAD("section-flags", 1, entry_in(data, AKV_DOC_TOKENS)->flags = 1);
    BAD("section-layer", 1, entry_in(data, AKV_DOC_TOKENS)->layer = 0);
    BAD("tokens-changed", 0, PART(AKV_DOC_TOKENS)[0] ^= 1);
    BAD("token-negative", 1, PART(AKV_DOC_TOKENS)[3] = 0x80);
    BAD("segment-changed", 0, PART(AKV_DOC_SEGMENT)[800] ^= 1);
    BAD("segment-major-2", 1, PART(AKV_DOC_SEGMENT)[4] = 2);
    BAD("segment-other-layer", 1, entry_in(data, AKV_DOC_SEGMENT)->layer = 1);
    BAD("segment-other-shape", 1, ((akv_document_layer *)(void *)PART(AKV_DOC_LAYERS))->head_dim_v = 6);
    BAD("layer-kind", 1, ((akv_document_layer *)(void *)PART(AKV_DOC_LAYERS))->kind = 3);
    BAD("layer-segments", 1, ((akv_document_layer *)(void *)PART(AKV_DOC_LAYERS))->num_segments = 2);
    BAD("layer-scale-nan", 1, ((akv_document_layer *)(void *)PART(AKV_DOC_LAYERS))->sm_scale = NAN);
    BAD("layer-not-blank", 1, ((akv_document_layer *)(void *)PART(AKV_DOC_LAYERS))[1].head_dim_k = 8);
    BAD("num-tokens", 1, h->num_tokens++);
    BAD("num-layers", 1, h->num_layers++);
    BAD("num-segments", 1, h->num_segments++);
    BAD("next-position", 1, h->next_position = -1);
    BAD("method", 1, h->method = 3);
    BAD("description", 1, memset(((akv_document_model *)(void *)PART(AKV_DOC_MODEL))->description, 'x', 48));
    BAD("properties-count", 1, PART(AKV_DOC_PROPERTIES)[0] = 200);
    BAD("properties-length", 1, PART(AKV_DOC_PROPERTIES)[8] = 200);
    BAD("properties-terminator", 1, PART(AKV_DOC_PROPERTIES)[8] = 5);
    BAD("padding", 0, PART(AKV_DOC_MODEL)[100] = 1);
    akv_segment_release(segment);
}

/* ------------------------------------------------------------------------------------------------------------ list */

static void add_figures(const char *name, const akv_segment *segment, void *opaque)
{
    (void)name;
    golden_add(segment, opaque);
}

static void write_list(void)
{
    char path[4096];
    struct dirent **names = NULL;
    const int n = scandir(g_folder, &names, NULL, alphasort);
    snprintf(path, sizeof path, "%s/" GOLDEN_EXPECTED, g_folder);
    FILE *list = fopen(path, "w");
    if (n < 0 || list == NULL)
        stop(path, "cannot be written");
    fprintf(list, "# written by make_golden; tests/golden/golden.h says what the fields are\n");
    for (int i = 0; i < n; i++) {
        const char *name = names[i]->d_name;
        if (strstr(name, ".akv") != NULL) {
            akv_diag diag = {AKV_OK, ""};
            golden_figures figures = {0, 0, 0};
            size_t bytes = 0;
            snprintf(path, sizeof path, "%s/%s", g_folder, name);
            uint8_t *data = golden_read(path, &bytes);
            const akv_status status = golden_open(name, data, bytes, add_figures, &figures, &diag);
            free(data);
            if ((strncmp(name, "open-", 5) == 0) != (status == AKV_OK))
                stop(name, status == AKV_OK ? "opens" : diag.message);
            if (status == AKV_OK)
                fprintf(list, "%s\t0\t%.12g %.12g %.12g\n", name, figures.keys, figures.values, figures.attend);
            else
                fprintf(list, "%s\t%d\t%s\n", name, (int)status, diag.message);
        }
        free(names[i]);
    }
    free(names);
    if (fclose(list) != 0)
        stop(path, "cannot be written");
}

int main(int argc, char **argv)
{
    const bool only_list = argc == 3 && strcmp(argv[1], "--list") == 0;
    if (argc != 2 && !only_list) {
        fprintf(stderr, "usage: make_golden [--list] FOLDER\n");
        return 2;
    }
    g_folder = argv[argc - 1];
    if (!only_list) {
        write_segments();
        write_bad_segments();
        write_newer_segments();
        write_documents();
        write_bad_documents();
    }
    write_list();
    return 0;
}
