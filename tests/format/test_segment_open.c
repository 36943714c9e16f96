/* SPDX-License-Identifier: Apache-2.0 */
/* test_segment_open.c - akv_segment_open against handmade bytes: what is right opens, every single lie is refused. */
#include "anchorkv/akv_experimental.h"
#include "check.h"
#include "handmade.h"

static akv_status try_open(const void *blob, size_t bytes, int copy, akv_diag *diag)
{
    akv_segment *segment = NULL;
    akv_status status = akv_segment_open(blob, bytes, copy, NULL, &segment, diag);
    if (status == AKV_OK)
        akv_segment_release(segment);
    return status;
}

static void test_opens(void)
{
    for (int kind = 0; kind < 5; kind++) {
        size_t bytes;
        uint8_t *blob = kind < 2 ? hand_compressed(kind == 1, &bytes) : hand_dense((akv_dtype)(kind - 2), &bytes);
        for (int copy = 0; copy < 2; copy++) {
            akv_segment *segment = NULL;
            CHECK_STATUS(akv_segment_open(blob, bytes, copy, NULL, &segment, &diag), AKV_OK, "");
            if (segment == NULL)
                continue;
            size_t got_bytes = 0;
            const void *got = akv_segment_data(segment, &got_bytes);
            CHECK(got_bytes == bytes && memcmp(got, blob, bytes) == 0);
            CHECK((got == blob) == !copy);
            akv_segment_info info;
            akv_segment_info_init(&info);
            CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, "");
            CHECK(info.shape.num_tokens == HAND_S && info.shape.num_kv_heads == HAND_H && info.shape.gqa_group == 3);
            CHECK(info.bytes.total == info.bytes.object + bytes);
            CHECK(info.num_anchors == (kind < 2 ? HAND_K : 0));
            CHECK(info.residuals_k == (kind < 2 ? 16 : 0) && info.residuals_v == (kind < 2 ? 20 : 0));
            akv_segment_release(segment);
        }
        free(blob);
    }
}

static void test_arguments(void)
{
    size_t bytes;
    uint8_t *blob = hand_compressed(false, &bytes);
    akv_segment *segment = NULL;
    CHECK_STATUS(akv_segment_open(NULL, bytes, 1, NULL, &segment, &diag), AKV_E_INVALID_ARGUMENT, "NULL");
    CHECK_STATUS(akv_segment_open(blob, bytes, 1, NULL, NULL, &diag), AKV_E_INVALID_ARGUMENT, "NULL");
    uint8_t *shifted = malloc(bytes + 72);
    if (shifted == NULL)
        exit(2);
    uint8_t *odd = shifted + (64 - (uintptr_t)shifted % 64) % 64 + 8;
    memcpy(odd, blob, bytes);
    CHECK_STATUS(try_open(odd, bytes, 0, &diag), AKV_E_INVALID_ARGUMENT, "aligned");
    CHECK_STATUS(try_open(odd, bytes, 1, &diag), AKV_OK, "");
    free(shifted);
    free(blob);
}

static void *no_memory(void *opaque, size_t bytes, size_t align)
{
    (void)opaque, (void)bytes, (void)align;
    return NULL;
}

static void no_free(void *opaque, void *ptr, size_t bytes)
{
    (void)opaque, (void)ptr, (void)bytes;
}

static void test_no_memory(void)
{
    size_t bytes;
    uint8_t *blob = hand_compressed(false, &bytes);
    akv_segment *segment = NULL;
    const akv_allocator none = {NULL, no_memory, no_free};
    CHECK_STATUS(akv_segment_open(blob, bytes, 1, &none, &segment, &diag), AKV_E_NO_MEMORY, "memory");
    CHECK(segment == NULL);
    free(blob);
}

/* One lie each: a header field (written as `value` at `offset`) or bytes of a section. */
typedef struct header_lie {
    size_t offset;
    size_t bytes;
    uint64_t value;
    akv_status status;
    const char *text;
} header_lie;

#define FIELD(name) offsetof(akv_header, name), sizeof(((akv_header *)0)->name)
#define ELEMENT(name, i) \
    (offsetof(akv_header, name) + (i) * sizeof(((akv_header *)0)->name[0])), sizeof(((akv_header *)0)->name[0])
#define F64_NAN 0x7ff8000000000000u
#define F64_INF 0x7ff0000000000000u

static void test_header_lies(void)
{
    static const header_lie lies[] = {
        {FIELD(magic), 0x31323334, AKV_E_CORRUPT, "not a segment"},
        {FIELD(magic), 0x414b5653, AKV_E_VERSION, "other byte order"},
        {FIELD(major), 2, AKV_E_VERSION, "format 2.0 is unknown"},
        {FIELD(major), 0, AKV_E_VERSION, "format 0.0 is unknown"},
        {FIELD(required), 4, AKV_E_VERSION, "feature bits 0x4"},
        {FIELD(header_bytes), 448, AKV_E_CORRUPT, "header_bytes"},
        {FIELD(total_bytes), 64, AKV_E_CORRUPT, "truncated"},
        {FIELD(num_tokens), 0, AKV_E_CORRUPT, "num_tokens"},
        {FIELD(num_tokens), HAND_S + 1, AKV_E_CORRUPT, "positions"},
        {FIELD(num_tokens), HAND_S - 1, AKV_E_CORRUPT, "section"},
        {FIELD(num_tokens), UINT64_MAX, AKV_E_CORRUPT, "num_tokens"},
        {ELEMENT(num_residuals, 0), UINT64_MAX, AKV_E_CORRUPT, "residuals"},
        {ELEMENT(num_residuals, 0), 17, AKV_E_CORRUPT, "section"},
        {FIELD(sm_scale), F64_NAN, AKV_E_CORRUPT, "finite"},
        {FIELD(sm_scale), F64_INF, AKV_E_CORRUPT, "finite"},
        {FIELD(logit_softcap), F64_INF, AKV_E_CORRUPT, "finite"},
        {FIELD(logit_softcap), 0xbff0000000000000u, AKV_E_CORRUPT, "negative"},
        {FIELD(magnitude), F64_NAN, AKV_E_CORRUPT, "magnitude"},
        {FIELD(magnitude), 0, AKV_E_CORRUPT, "magnitude"},
        {FIELD(kind), 2, AKV_E_CORRUPT, "kind"},
        {FIELD(kind), 0, AKV_E_CORRUPT, "dense_reason"},
        {FIELD(dense_reason), 1, AKV_E_CORRUPT, "dense_reason"},
        {FIELD(profile), 99, AKV_E_UNSUPPORTED, "profile 99"},
        {FIELD(flags), 0x80000000, AKV_E_UNSUPPORTED, "codec flags"},
        {FIELD(num_kv_heads), 0, AKV_E_CORRUPT, "num_kv_heads"},
        {FIELD(num_kv_heads), UINT32_MAX, AKV_E_CORRUPT, "num_kv_heads"},
        {FIELD(num_kv_heads), 3, AKV_E_CORRUPT, "section"},
        {FIELD(gqa_group), 0, AKV_E_CORRUPT, "gqa_group"},
        {FIELD(gqa_group), UINT32_MAX, AKV_E_CORRUPT, "gqa_group"},
        {ELEMENT(head_dim, 0), 7, AKV_E_CORRUPT, "head_dim_k"},
        {ELEMENT(head_dim, 1), 2048, AKV_E_CORRUPT, "head_dim_v"},
        {ELEMENT(head_dim, 1), 8, AKV_E_CORRUPT, "section"},
        {FIELD(rotary_dim), 10, AKV_E_CORRUPT, "rotary_dim"},
        {FIELD(rotary_dim), 3, AKV_E_CORRUPT, "rotary_dim"},
        {FIELD(rope_style), 2, AKV_E_CORRUPT, "rope_style"},
        {FIELD(num_anchors), 0, AKV_E_CORRUPT, "num_anchors"},
        {FIELD(num_anchors), HAND_S + 1, AKV_E_CORRUPT, "num_anchors"},
        {FIELD(num_anchors), 6, AKV_E_CORRUPT, "section"},
        {FIELD(num_queries), 0, AKV_E_CORRUPT, "num_queries"},
        {FIELD(num_queries), 4096, AKV_E_CORRUPT, "num_queries"},
        {FIELD(first_position), 11, AKV_E_CORRUPT, "positions"},
        {FIELD(first_position), 9, AKV_E_CORRUPT, "consecutive"},
        {FIELD(last_position), 0x80000000, AKV_E_CORRUPT, "positions"},
        {FIELD(dense_dtype), 3, AKV_E_CORRUPT, "dense_dtype"},
        {FIELD(num_sections), AKV_SEC_COUNT + 1, AKV_E_CORRUPT, "num_sections"},
        {FIELD(optional), 1, AKV_E_CORRUPT, "leaves 0"},
        {ELEMENT(reserved, 0), 1, AKV_E_CORRUPT, "leaves 0"},
        {ELEMENT(reserved, 7), 1, AKV_E_CORRUPT, "leaves 0"},
    };
    size_t bytes;
    uint8_t *blob = hand_compressed(false, &bytes), saved[sizeof(akv_header)];
    memcpy(saved, blob, sizeof saved);
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        check_count++;
        if (lies[i].bytes > sizeof lies[i].value) { /* a field that became an array needs ELEMENT */
            fprintf(stderr, "header lie %zu: the field has %zu bytes, a lie at most 8\n", i, (size_t)lies[i].bytes);
            check_failures++;
            continue;
        }
        memcpy(blob + lies[i].offset, &lies[i].value, lies[i].bytes);
        for (int copy = 0; copy < 2; copy++) {
            akv_diag diag = {AKV_OK, ""};
            akv_status got = try_open(blob, bytes, copy, &diag);
            check_count++;
            if (got != lies[i].status || strstr(diag.message, lies[i].text) == NULL) {
                fprintf(stderr, "header lie %zu: got %d \"%s\", wanted %d \"%s\"\n", i, (int)got, diag.message,
                        (int)lies[i].status, lies[i].text);
                check_failures++;
            }
        }
        memcpy(blob, saved, sizeof saved);
    }
    for (int id = 0; id < AKV_SEC_ROOM; id++)
        for (int what = 0; what < 4; what++) {
            akv_section *s = &((akv_header *)(void *)blob)->sections[id];
            uint64_t *field = what % 2 ? &s->offset : &s->bytes;
            *field = what < 2 ? *field + 64 : UINT64_MAX - 63;
            CHECK_STATUS(try_open(blob, bytes, 0, &diag), AKV_E_CORRUPT, "");
            memcpy(blob, saved, sizeof saved);
        }
    CHECK_STATUS(try_open(blob, bytes, 0, &diag), AKV_OK, "");
    free(blob);
}

typedef struct section_lie {
    int section;
    size_t offset;
    size_t bytes;
    uint32_t value;
    const char *text;
} section_lie;

static void test_section_lies(void)
{
    static const section_lie lies[] = {
        {AKV_SEC_INV_FREQ, 4, 4, 0x7ff00000, "inv_freq[0]"},
        {AKV_SEC_INV_FREQ, 40, 1, 1, "padding"},
        {AKV_SEC_POSITIONS, 8, 4, 12, "must ascend"},
        {AKV_SEC_POSITIONS, 0, 4, 11, "span"},
        {AKV_SEC_POSITIONS, 4 * (HAND_S - 1), 4, 83, "span"},
        {AKV_SEC_ANCHOR_TOKENS, 4, 4, 0, "must ascend"},
        {AKV_SEC_ANCHOR_TOKENS, 4 * (HAND_K - 1), 4, HAND_S, "below 37"},
        {AKV_SEC_ANCHOR_TOKENS, 4, 4, 8, "owns a key residual"},
        {AKV_SEC_ANCHORS, 2, 2, 0x7f80, "ANCHORS(k)"},
        {AKV_SEC_ANCHORS + 1, 2, 2, 0xffc0, "ANCHORS(v)"},
        {AKV_SEC_INDEX, 3, 1, HAND_K, "refers to anchor 5 of 5"},
        {AKV_SEC_INDEX + 1, HAND_S + 3, 1, 255, "value token 3 of head 1"},
        {AKV_SEC_COEFF, 2, 2, 0x7c00, "COEFF(k)"},
        {AKV_SEC_COEFF + 1, 2, 2, 0xfe00, "COEFF(v)"},
        {AKV_SEC_LEVELS, 4, 1, 0x20, "beyond the last"},
        {AKV_SEC_LEVELS, 0, 1, 0x11, "owns a key residual"},
        {AKV_SEC_LEVELS + 1, HAND_S / 8 + 1, 1, 0, "mark 16"},
        {AKV_SEC_RANKS, 0, 4, 1, "key rank of head 0"},
        {AKV_SEC_RANKS + 1, 8, 4, 9, "value rank of head 1"},
        {AKV_SEC_RANKS, 16, 4, 17, "last rank"},
        {AKV_SEC_GAINS, 0, 2, 0x7c01, "GAINS(k)"},
        {AKV_SEC_GAINS + 1, 6, 2, 0xfc00, "GAINS(v)"},
        {AKV_SEC_CODES + 1, 19, 1, 0x80, "unused bits"},
    };
    size_t bytes;
    uint8_t *blob = hand_compressed(true, &bytes), saved[4];
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        uint8_t *at = (uint8_t *)hand_section(blob, lies[i].section) + lies[i].offset;
        memcpy(saved, at, 4);
        memcpy(at, &lies[i].value, lies[i].bytes);
        CHECK_STATUS(try_open(blob, bytes, (int)(i % 2), &diag), AKV_E_CORRUPT, lies[i].text);
        memcpy(at, saved, 4);
    }
    CHECK_STATUS(try_open(blob, bytes, 0, &diag), AKV_OK, "");
    free(blob);

    for (int dtype = 0; dtype < 3; dtype++) {
        static const uint32_t infinity[3] = {0x7f800000, 0x7c00, 0x7f80};
        blob = hand_dense((akv_dtype)dtype, &bytes);
        uint32_t size = akv_dtype_bytes((akv_dtype)dtype);
        memcpy((uint8_t *)hand_section(blob, AKV_SEC_DENSE + 1) + 5 * size, &infinity[dtype], size);
        CHECK_STATUS(try_open(blob, bytes, 0, &diag), AKV_E_CORRUPT, "DENSE(v) holds NaN or infinity at element 5");
        free(blob);
    }
}

static void test_truncation(void)
{
    size_t bytes;
    uint8_t *blob = hand_compressed(true, &bytes);
    for (size_t n = 0; n < bytes; n++) {
        uint8_t *part = malloc(n + 1); /* exact size, so that a read beyond it is seen by a memory checker */
        if (part == NULL)
            exit(2);
        memcpy(part, blob, n);
        CHECK_STATUS(try_open(part, n, 1, &diag), AKV_E_CORRUPT, "");
        free(part);
    }
    free(blob);
}

/* A flipped bit may give another legal segment, but never a crash, and what opens must decode. */
static void test_bit_flips(void)
{
    size_t bytes;
    uint8_t *blob = hand_compressed(true, &bytes);
    uint64_t opened = 0, refused = 0;
    for (size_t bit = 0; bit < bytes * 8; bit++) {
        blob[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        akv_segment *segment = NULL;
        if (akv_segment_open(blob, bytes, 0, NULL, &segment, NULL) == AKV_OK) {
            float keys[HAND_S * 8], values[HAND_S * 6];
            opened++;
            for (uint32_t head = 0; head < HAND_H; head++)
                CHECK_STATUS(akv_segment_decode(segment, head, 0, HAND_S, keys, values, &diag), AKV_OK, "");
            akv_segment_release(segment);
        } else {
            refused++;
        }
        blob[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    CHECK(opened > 0 &&
          refused > opened); /* payload bits open, structure bits do not; both happen in this small segment */
    free(blob);
}

static void test_newer_minor(void)
{
    size_t bytes;
    uint8_t *old = hand_compressed(false, &bytes);
    akv_header *h = (akv_header *)(void *)old;
    h->minor = AKV_SEGMENT_MINOR + 1;
    h->optional = 0x10;
    CHECK_STATUS(try_open(old, bytes, 1, &diag), AKV_OK, "");

    h->num_sections = AKV_SEC_COUNT + 1;
    h->sections[AKV_SEC_COUNT].offset = bytes;
    h->sections[AKV_SEC_COUNT].bytes = 40;
    h->total_bytes = bytes + 64;
    uint8_t *larger = aligned_alloc(64, bytes + 64);
    if (larger == NULL)
        exit(2);
    memset(larger, 0xee, bytes + 64);
    memcpy(larger, old, bytes);
    CHECK_STATUS(try_open(larger, bytes + 64, 0, &diag), AKV_OK, "");
    ((akv_header *)(void *)larger)->sections[AKV_SEC_COUNT].bytes = 65;
    CHECK_STATUS(try_open(larger, bytes + 64, 0, &diag), AKV_E_CORRUPT, "section");
    free(larger);
    free(old);
}

/* What the library itself writes: several blocks, wide indices, stored positions, every method. */
static void test_library_segments(void)
{
    enum { H = 2, G = 2, W = 8, DK = 20, DV = 14, MAX_S = 2600 };
    static const uint64_t lengths[] = {40, 1024, 1025, 2600};
    float *keys = malloc(sizeof(float) * H * MAX_S * DK), *values = malloc(sizeof(float) * H * MAX_S * DV);
    int32_t *positions = malloc(sizeof(int32_t) * MAX_S);
    float queries[H * G * W * DK];
    double inv_freq[DK / 2];
    if (keys == NULL || values == NULL || positions == NULL)
        exit(2);
    akv_rng rng = {5};
    for (size_t i = 0; i < (size_t)H * MAX_S * DK; i++)
        keys[i] = (float)(akv_rng_below(&rng, 2001)) / 1000.0f - 1.0f;
    for (size_t i = 0; i < (size_t)H * MAX_S * DV; i++)
        values[i] = (float)(akv_rng_below(&rng, 2001)) / 1000.0f - 1.0f;
    for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++)
        queries[i] = (float)(akv_rng_below(&rng, 2001)) / 1000.0f - 1.0f;
    for (int32_t p = 0; p < MAX_S; p++)
        positions[p] = 3 * p + 1;
    for (int j = 0; j < DK / 2; j++)
        inv_freq[j] = 1.0 / (1.0 + j);
    for (size_t n = 0; n < sizeof lengths / sizeof lengths[0]; n++)
        for (int variant = 0; variant < 5; variant++) {
            akv_layer layer;
            akv_config config;
            akv_experiment experiment;
            akv_layer_init(&layer);
            akv_config_init(&config);
            config.profile = AKV_PROFILE_PAPER;
            akv_experiment_init(&experiment);
            layer.shape.num_tokens = lengths[n];
            layer.shape.num_kv_heads = H;
            layer.shape.gqa_group = G;
            layer.shape.head_dim_k = DK;
            layer.shape.head_dim_v = DV;
            layer.shape.rotary_dim = DK;
            layer.shape.num_queries = W;
            layer.shape.has_positions = variant == 1;
            layer.positions = variant == 1 ? positions : NULL;
            layer.keys = akv_tensor_contiguous(keys, AKV_F32, lengths[n], DK);
            layer.values = akv_tensor_contiguous(values, AKV_F32, lengths[n], DV);
            layer.queries = akv_tensor_contiguous(queries, AKV_F32, W, DK);
            layer.rope.rotary_dim = DK;
            layer.rope.inv_freq = inv_freq;
            layer.sm_scale = 0.2;
            config.keep_ratio = 0.8;
            experiment.tokens_per_anchor = variant == 2 ? 4 : 128; /* more than 256 anchors: two-byte indices */
            config.experiment = &experiment;
            akv_segment *made = NULL, *opened = NULL;
            if (variant == 3)
                CHECK_STATUS(akv_segment_create_dense(&layer, &config, &made, &diag), AKV_OK, "");
            else if (variant == 4)
                CHECK_STATUS(akv_evict_snapkv(&layer, &config, &made, &diag), AKV_OK, "");
            else
                CHECK_STATUS(akv_compress(&layer, &config, &made, &diag), AKV_OK, "");
            size_t bytes = 0;
            const void *data = akv_segment_data(made, &bytes);
            for (int copy = 0; copy < 2 && made != NULL; copy++) {
                CHECK_STATUS(akv_segment_open(data, bytes, copy, NULL, &opened, &diag), AKV_OK, "");
                akv_segment_info a, b;
                akv_segment_info_init(&a);
                akv_segment_info_init(&b);
                CHECK_STATUS(akv_segment_get_info(made, &a, &diag), AKV_OK, "");
                CHECK_STATUS(akv_segment_get_info(opened, &b, &diag), AKV_OK, "");
                CHECK(memcmp(&a, &b, sizeof a) == 0);
                akv_segment_release(opened);
                opened = NULL;
            }
            akv_segment_release(made);
        }
    free(keys);
    free(values);
    free(positions);
}

int main(void)
{
    test_opens();
    test_arguments();
    test_no_memory();
    test_header_lies();
    test_section_lies();
    test_truncation();
    test_bit_flips();
    test_newer_minor();
    test_library_segments();
    return check_report("segment_open");
}
