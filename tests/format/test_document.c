/* SPDX-License-Identifier: Apache-2.0 */
/* test_document.c - the document container: round trip, every truncation, every bit flip, versions, unknown sections.
 */
#include "check.h"
#include "format/document_layout.h"
#include "handmade.h"

enum { LAYERS = 4, TOKENS = 37 };

typedef struct sink {
    uint8_t *data;
    size_t bytes;
    size_t capacity;
    size_t fail_after; /* refuse when more bytes than this would be held; 0 = never */
} sink;

static akv_status sink_write(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    sink *s = opaque;
    if (s->fail_after != 0 && s->bytes + bytes > s->fail_after) {
        if (diag != NULL)
            snprintf(diag->message, sizeof diag->message, "the sink is full");
        return AKV_E_IO;
    }
    if (s->bytes + bytes > s->capacity)
        exit(2);
    memcpy(s->data + s->bytes, data, bytes);
    s->bytes += bytes;
    return AKV_OK;
}

/* Layers: compressed, window, compressed + dense, no cache. */
typedef struct fixture {
    uint8_t *blobs[3];
    akv_segment *segments[3];
    akv_document_layer layers[LAYERS];
    int32_t tokens[TOKENS];
    akv_document_property properties[4];
    akv_document_parts parts;
    uint8_t *bytes; /* the document, 64-byte aligned */
    size_t num_bytes;
} fixture;

static void set_layer(akv_document_layer *layer, uint32_t first, uint32_t n)
{
    memset(layer, 0, sizeof *layer);
    layer->num_kv_heads = HAND_H;
    layer->gqa_group = 3;
    layer->head_dim_k = 8;
    layer->head_dim_v = 6;
    layer->rotary_dim = 8;
    layer->rope_magnitude = 1.0;
    layer->sm_scale = 0.35;
    layer->rope_hash = 0x1234;
    layer->first_segment = first;
    layer->num_segments = n;
}

static void setup(fixture *f)
{
    memset(f, 0, sizeof *f);
    size_t sizes[3];
    f->blobs[0] = hand_compressed(false, &sizes[0]);
    f->blobs[1] = hand_compressed(true, &sizes[1]);
    f->blobs[2] = hand_dense(AKV_F16, &sizes[2]);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(akv_segment_open(f->blobs[i], sizes[i], 0, NULL, &f->segments[i], &diag), AKV_OK, "");
    set_layer(&f->layers[0], 0, 1);
    f->layers[1].kind = AKV_DOCUMENT_LAYER_WINDOW;
    set_layer(&f->layers[2], 1, 2);
    f->layers[3].kind = AKV_DOCUMENT_LAYER_NO_CACHE;
    for (int i = 0; i < TOKENS; i++)
        f->tokens[i] = i * 3;
    f->properties[0] = (akv_document_property){"source", "first.txt"};
    f->properties[1] = (akv_document_property){"source", "second \xc3\xa9.txt"};
    f->properties[2] = (akv_document_property){"keep_ratio", "0.1"};
    f->properties[3] = (akv_document_property){"system", ""};
    akv_document_parts *p = &f->parts;
    akv_document_parts_init(p);
    p->model.num_layers = LAYERS;
    p->model.hash[0] = 0xabcdef;
    strcpy(p->model.description, "handmade");
    p->tokens = f->tokens;
    p->num_tokens = TOKENS;
    p->next_position = TOKENS;
    p->layers = f->layers;
    p->num_layers = LAYERS;
    p->segments = f->segments;
    p->num_segments = 3;
    p->properties = f->properties;
    p->num_properties = 4;
    p->native_state = "native bytes";
    p->native_state_bytes = 13;

    f->num_bytes = akv_document_bytes(p);
    f->bytes = aligned_alloc(64, f->num_bytes);
    if (f->bytes == NULL)
        exit(2);
    sink s = {f->bytes, 0, f->num_bytes, 0};
    CHECK_STATUS(akv_document_write(p, sink_write, &s, NULL, &diag), AKV_OK, "");
    CHECK(s.bytes == f->num_bytes);
}

static void teardown(fixture *f)
{
    for (int i = 0; i < 3; i++) {
        akv_segment_release(f->segments[i]);
        free(f->blobs[i]);
    }
    free(f->bytes);
}

/* Open and verify; what a careful reader does. */
static akv_status accept(const void *data, size_t bytes, akv_diag *diag)
{
    akv_document *document = NULL;
    akv_status status = akv_document_open(data, bytes, NULL, &document, diag);
    if (status == AKV_OK)
        status = akv_document_verify(document, diag);
    akv_document_close(document);
    return status;
}

static void seal(uint8_t *bytes)
{
    akv_document_header *h = (akv_document_header *)(void *)bytes;
    akv_document_entry *e = (akv_document_entry *)(void *)(h + 1);
    h->checksum = akv_document_header_checksum(h, e);
}

/* Released bytes stay what they are. A change here needs a new version in docs/format.md, or is a fault. */
static void test_bytes_are_frozen(const fixture *f)
{
    const uint64_t golden = UINT64_C(0xa4899d38c9bced0a);
    uint64_t got = XXH3_64bits(f->bytes, f->num_bytes);
    CHECK(got == golden);
    if (got != golden)
        fprintf(stderr, "document bytes hash to %016llx\n", (unsigned long long)got);
}

static void test_round_trip(fixture *f)
{
    akv_document *d = NULL;
    CHECK_STATUS(akv_document_open(f->bytes, f->num_bytes, NULL, &d, &diag), AKV_OK, "");
    if (d == NULL)
        return;
    CHECK_STATUS(akv_document_verify(d, &diag), AKV_OK, "");
    akv_document_parts p;
    akv_document_parts_init(&p);
    CHECK_STATUS(akv_document_get_parts(d, &p, &diag), AKV_OK, "");
    CHECK(p.num_tokens == TOKENS && memcmp(p.tokens, f->tokens, sizeof f->tokens) == 0);
    CHECK(p.num_layers == LAYERS && memcmp(p.layers, f->layers, sizeof f->layers) == 0);
    CHECK(memcmp(&p.model, &f->parts.model, sizeof p.model) == 0);
    CHECK(p.next_position == TOKENS && p.method == 0 && p.num_segments == 3);
    CHECK(p.native_state_bytes == 13 && memcmp(p.native_state, "native bytes", 13) == 0);
    CHECK(p.num_properties == 4 && strcmp(p.properties[3].key, "system") == 0 && p.properties[3].value[0] == '\0');
    CHECK(strcmp(akv_document_property_value(d, "source", 1), f->properties[1].value) == 0);
    CHECK(akv_document_property_value(d, "source", 2) == NULL);
    CHECK(akv_document_property_value(d, "sourc", 0) == NULL);
    for (uint32_t i = 0; i < 3; i++) {
        akv_segment *segment = NULL;
        size_t want = 0, got = 0;
        const void *data = akv_segment_data(f->segments[i], &want);
        CHECK_STATUS(akv_document_open_segment(d, i, 0, NULL, &segment, &diag), AKV_OK, "");
        const void *in_place = akv_segment_data(segment, &got);
        CHECK(got == want && memcmp(in_place, data, want) == 0);
        CHECK((const uint8_t *)in_place > f->bytes && (const uint8_t *)in_place < f->bytes + f->num_bytes);
        akv_segment_release(segment);
    }
    akv_segment *none = NULL;
    CHECK_STATUS(akv_document_open_segment(d, 3, 0, NULL, &none, &diag), AKV_E_INVALID_ARGUMENT, "no segment 3");
    akv_document_section_info info;
    akv_document_section_info_init(&info);
    CHECK_STATUS(akv_document_get_section(d, 4, &info, &diag), AKV_OK, "");
    CHECK(info.layer == 0 && strcmp(info.type_name, "segment") == 0 && info.offset % 64 == 0);
    CHECK_STATUS(akv_document_get_section(d, 99, &info, &diag), AKV_E_INVALID_ARGUMENT, "no section 99");
    akv_document_close(d);
}

static void test_truncation(const fixture *f)
{
    for (size_t n = 0; n < f->num_bytes; n++) {
        uint8_t *part = aligned_alloc(64, akv_round_up(n + 1, 64));
        if (part == NULL)
            exit(2);
        memcpy(part, f->bytes, n);
        CHECK_STATUS(accept(part, n, &diag), AKV_E_CORRUPT, "");
        free(part);
    }
}

static void test_bit_flips(const fixture *f)
{
    for (size_t bit = 0; bit < f->num_bytes * 8; bit++) {
        f->bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        akv_diag diag = {AKV_OK, ""};
        akv_status status = accept(f->bytes, f->num_bytes, &diag);
        f->bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        check_count++;
        if ((status != AKV_E_CORRUPT && status != AKV_E_CHECKSUM && status != AKV_E_VERSION) ||
            diag.message[0] == '\0') {
            fprintf(stderr, "flip of bit %zu was not refused as it should: %d \"%s\"\n", bit, (int)status,
                    diag.message);
            check_failures++;
        }
    }
}

/* The same flips with all checksums repaired: nothing hides behind a checksum, the structure itself is checked. */
static void test_resealed_flips(const fixture *f)
{
    uint8_t *copy = aligned_alloc(64, f->num_bytes);
    if (copy == NULL)
        exit(2);
    for (size_t bit = 0; bit < f->num_bytes * 8; bit += bit < 8192 ? 1 : 13) {
        memcpy(copy, f->bytes, f->num_bytes);
        copy[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        akv_document_header *h = (akv_document_header *)(void *)copy;
        akv_document_entry *e = (akv_document_entry *)(void *)(h + 1);
        uint64_t room = (f->num_bytes - sizeof *h) / sizeof *e;
        for (uint32_t i = 0; i < h->num_sections && i < room; i++)
            if (e[i].offset <= f->num_bytes && e[i].bytes <= f->num_bytes - e[i].offset)
                e[i].checksum = XXH3_64bits(copy + e[i].offset, e[i].bytes);
        if (h->num_sections <= room)
            seal(copy);
        (void)accept(copy, f->num_bytes, NULL); /* may be legal; must not crash or read outside */
    }
    free(copy);
}

static void test_versions(const fixture *f)
{
    uint8_t *copy = aligned_alloc(64, f->num_bytes);
    if (copy == NULL)
        exit(2);
    akv_document_header *h = (akv_document_header *)(void *)copy;
#define FRESH() memcpy(copy, f->bytes, f->num_bytes)
    FRESH();
    h->major = 2;
    seal(copy);
    CHECK_STATUS(accept(copy, f->num_bytes, &diag), AKV_E_VERSION, "format 2.0 is unknown");
    FRESH();
    h->magic = __builtin_bswap32(h->magic);
    CHECK_STATUS(accept(copy, f->num_bytes, &diag), AKV_E_VERSION, "other byte order");
    FRESH();
    h->required = 8;
    seal(copy);
    CHECK_STATUS(accept(copy, f->num_bytes, &diag), AKV_E_VERSION, "feature bits 0x8");
    FRESH();
    h->minor = 9;
    h->optional = 0x55;
    h->reserved[3] = 1;
    seal(copy);
    CHECK_STATUS(accept(copy, f->num_bytes, &diag), AKV_OK, "");
    FRESH();
    h->reserved[3] = 1;
    seal(copy);
    CHECK_STATUS(accept(copy, f->num_bytes, &diag), AKV_E_CORRUPT, "leaves 0");
    free(copy);
}

/* Appends a section of an unknown type: the table grows by one entry, which moves all sections by 64 bytes or none. */
static void test_unknown_section(const fixture *f)
{
    const akv_document_header *old = (const akv_document_header *)(const void *)f->bytes;
    uint64_t old_start = ((const akv_document_entry *)(const void *)(old + 1))[0].offset;
    uint64_t new_start = akv_round_up(sizeof *old + (old->num_sections + 1) * sizeof(akv_document_entry), 64);
    size_t bytes = f->num_bytes + (new_start - old_start) + 64;
    for (int skippable = 0; skippable < 2; skippable++) {
        uint8_t *copy = aligned_alloc(64, bytes);
        if (copy == NULL)
            exit(2);
        memset(copy, 0, bytes);
        memcpy(copy, f->bytes, sizeof *old + old->num_sections * sizeof(akv_document_entry));
        memcpy(copy + new_start, f->bytes + old_start, f->num_bytes - old_start);
        memcpy(copy + bytes - 64, "news", 4);
        akv_document_header *h = (akv_document_header *)(void *)copy;
        akv_document_entry *e = (akv_document_entry *)(void *)(h + 1);
        for (uint32_t i = 0; i < h->num_sections; i++)
            e[i].offset += new_start - old_start;
        e[h->num_sections] =
            (akv_document_entry){77, -1, (uint32_t)skippable, 0, bytes - 64, 4, XXH3_64bits("news", 4), 0};
        h->num_sections++;
        h->minor = 1;
        h->total_bytes = bytes;
        seal(copy);
        if (skippable)
            CHECK_STATUS(accept(copy, bytes, &diag), AKV_OK, "");
        else
            CHECK_STATUS(accept(copy, bytes, &diag), AKV_E_VERSION, "type 77");
        copy[bytes - 61] ^= 1; /* verify covers skipped sections as well */
        if (skippable)
            CHECK_STATUS(accept(copy, bytes, &diag), AKV_E_CHECKSUM, "changed");
        free(copy);
    }
}

static void test_writer_refuses(fixture *f)
{
    akv_document_parts good = f->parts;
    sink s = {f->bytes, 0, f->num_bytes, 1000};
    uint8_t *scratch = malloc(f->num_bytes);
    if (scratch == NULL)
        exit(2);
    s.data = scratch;
    CHECK_STATUS(akv_document_write(&good, sink_write, &s, NULL, &diag), AKV_E_IO, "sink is full");
    CHECK_STATUS(akv_document_write(&good, NULL, &s, NULL, &diag), AKV_E_INVALID_ARGUMENT, "write");
    CHECK_STATUS(akv_document_write(NULL, sink_write, &s, NULL, &diag), AKV_E_INVALID_ARGUMENT, "NULL");
#define REFUSED(statement, text)                                                                         \
    do {                                                                                                 \
        akv_document_parts p = good;                                                                     \
        akv_document_layer layers[LAYERS];                                                               \
        memcpy(layers, good.layers, sizeof layers);                                                      \
        p.layers = layers;                                                                               \
        statement;                                                                                       \
        CHECK_STATUS(akv_document_write(&p, sink_write, &s, NULL, &diag), AKV_E_INVALID_ARGUMENT, text); \
        CHECK(akv_document_bytes(&p) == 0);                                                              \
    } while (0)
    REFUSED(p.num_tokens = 0, "tokens");
    REFUSED(p.num_layers = 0, "layers");
    REFUSED(p.num_layers = 3; p.num_segments = 2, "add up");
    REFUSED(p.method = 3, "method");
    REFUSED(p.next_position = -1, "next_position");
    REFUSED(layers[0].num_segments = 0, "at least 1");
    REFUSED(layers[2].first_segment = 0, "from number");
    REFUSED(layers[1].head_dim_k = 8, "must be 0");
    REFUSED(layers[0].head_dim_k = 16, "its layer has");
    REFUSED(layers[0].sm_scale = NAN, "NaN");
    REFUSED(p.native_state = NULL, "native_state");
    REFUSED(p.segments = NULL, "segments");
    free(scratch);
}

int main(void)
{
    fixture f;
    setup(&f);
    test_bytes_are_frozen(&f);
    test_round_trip(&f);
    test_truncation(&f);
    test_bit_flips(&f);
    test_resealed_flips(&f);
    test_versions(&f);
    test_unknown_section(&f);
    test_writer_refuses(&f);
    teardown(&f);
    return check_report("document");
}
