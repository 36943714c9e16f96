/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ladder_hostile.c - untrusted bytes in the ladder coding. Every header bit and every seventh body byte flipped, every
 * kind of truncation: refused with a sentence, or opened - and then decoding and attention read nothing beyond the bytes
 * (they lie at the end of an exact allocation, which a memory checker watches). Single lies are refused by name.
 */
#include "akv_test.h"
#include "cases.h"

#include <stddef.h>

/* The whole life of a segment that opened: decode all, attend to all. Results may be anything. */
static void use(const akv_segment *segment)
{
    akv_diag diag = {0};
    akv_segment_info info;
    akv_segment_info_init(&info);
    CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
    const akv_shape *s = &info.shape;
    float *k = must(malloc(s->num_tokens * s->head_dim_k * sizeof *k)),
          *v = must(malloc(s->num_tokens * s->head_dim_v * sizeof *v));
    for (uint32_t head = 0; head < s->num_kv_heads; head++)
        CHECK_STATUS(akv_segment_decode(segment, head, 0, s->num_tokens, k, v, &diag), AKV_OK, &diag);
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = 1; /* a segment of any group serves any group */
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = 1;
    p.sm_scale = 0.125;
    float *q = must(calloc((size_t)s->num_kv_heads * s->head_dim_k, sizeof *q));
    for (size_t i = 0; i < (size_t)s->num_kv_heads * s->head_dim_k; i++)
        q[i] = (float)(i % 7) - 3;
    p.queries = akv_tensor_contiguous(q, AKV_F32, 1, s->head_dim_k);
    p.segments = &segment;
    p.num_segments = 1;
    p.out = must(malloc((size_t)s->num_kv_heads * s->head_dim_v * sizeof *p.out));
    p.out_stride_head = p.out_stride_token = s->head_dim_v;
    size_t bytes = 0;
    akv_status status = akv_attend_workspace_bytes(&p, &bytes, &diag);
    if (status == AKV_E_MISMATCH) { /* the group does count */
        p.gqa_group = s->gqa_group;
        float *more = must(calloc((size_t)s->num_kv_heads * s->gqa_group * s->head_dim_k, sizeof *more));
        float *out = must(calloc((size_t)s->num_kv_heads * s->gqa_group * s->head_dim_v, sizeof *out));
        free(q);
        free(p.out);
        q = more;
        p.out = out;
        p.queries = akv_tensor_contiguous(q, AKV_F32, 1, s->head_dim_k);
        status = akv_attend_workspace_bytes(&p, &bytes, &diag);
    }
    CHECK_MSG(status == AKV_OK, "workspace: %s", diag.message);
    if (status == AKV_OK) {
        void *ws = must(aligned_alloc(64, (bytes + 63) / 64 * 64));
        CHECK_STATUS(akv_attend(&p, ws, bytes, &diag), AKV_OK, &diag);
        free(ws);
    }
    free(p.out);
    free(q);
    free(k);
    free(v);
}

/* Opens and uses; true when it opened. */
static bool try_bytes(const void *data, size_t bytes, const char *what, size_t at)
{
    akv_segment *segment = NULL;
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_segment_open(data, bytes, 0, NULL, &segment, &diag);
    if (status == AKV_OK) {
        use(segment);
        akv_segment_release(segment);
        return true;
    }
    CHECK_MSG((status == AKV_E_CORRUPT || status == AKV_E_VERSION || status == AKV_E_UNSUPPORTED) &&
                  strlen(diag.message) > 10,
              "%s %zu: %s, \"%s\"", what, at, akv_status_str(status), diag.message);
    return false;
}

/* A copy that ends where the allocation ends; blob sizes are multiples of 64. */
static uint8_t *exact_copy(const akv_segment *segment, size_t *bytes)
{
    const void *data = akv_segment_data(segment, bytes);
    uint8_t *copy = must(aligned_alloc(64, *bytes));
    memcpy(copy, data, *bytes);
    return copy;
}

static akv_segment *compressed(uint64_t S, int gaps, double keep)
{
    spec s = {.name = "hostile", .S = S, .H = 2, .G = 2, .dk = 16, .dv = 12, .W = 8, .rotary = 12, .keep = keep,
              .dtype = AKV_F16, .gaps = gaps, .seed = 3};
    fixture f;
    fixture_make(&s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    fixture_free(&f);
    return must(segment);
}

static akv_segment *sample(int number)
{
    if (number < 2) {
        akv_segment *segment = compressed(number == 0 ? 150 : 1100, number, 0.5);
        CHECK(((const akv_header *)akv_segment_data(segment, NULL))->coding == AKV_CODING_LADDER);
        return segment;
    }
    spec s = {.name = "hostile", .S = 77, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = 8, .gaps = number % 2};
    return random_ladder_segment(&s, number == 2 ? 5 : 1, 0.6, (uint64_t)number);
}
enum { SAMPLES = 5 };

static void flips(void)
{
    const size_t thin = test_thin();
    for (int number = 0; number < SAMPLES; number++) {
        akv_segment *segment = sample(number);
        size_t bytes;
        uint8_t *blob = exact_copy(segment, &bytes);
        unsigned long opened = 0, refused = 0;
        CHECK(try_bytes(blob, bytes, "unharmed", 0));
        /* every bit of the header and whole bytes; of the body the lowest and the highest bit */
        const uint8_t masks[] = {0x01, 0x80, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0xff};
        for (size_t at = 0; at < bytes; at += at < sizeof(akv_header) ? 1 : 7 * thin)
            for (size_t m = 0; m < (at < sizeof(akv_header) ? sizeof masks : 2u); m++) {
                blob[at] ^= masks[m];
                if (try_bytes(blob, bytes, "flip", at))
                    opened++;
                else
                    refused++;
                blob[at] ^= masks[m];
            }
        CHECK_MSG(opened > 0 && refused > 0, "%lu opened, %lu refused", opened, refused);
        printf("  sample %d: %zu bytes, %lu flips opened, %lu refused\n", number, bytes, opened, refused);
        free(blob);
        akv_segment_release(segment);
    }
}

/* Several random bytes at once, mostly in the metadata: where two lies could agree with each other. */
static void random_damage(void)
{
    akv_rng rng = {9};
    for (int number = 0; number < SAMPLES; number++) {
        akv_segment *segment = sample(number);
        size_t bytes;
        uint8_t *blob = exact_copy(segment, &bytes), *saved = exact_copy(segment, &bytes);
        for (int round = 0; round < 3000 / (int)test_thin(); round++) {
            int count = 1 + (int)akv_rng_below(&rng, 4);
            for (int i = 0; i < count; i++)
                blob[akv_rng_below(&rng, akv_rng_below(&rng, 2) ? sizeof(akv_header) : bytes)] = (uint8_t)akv_rng_next(&rng);
            try_bytes(blob, bytes, "damage", (size_t)round);
            memcpy(blob, saved, bytes);
        }
        free(blob);
        free(saved);
        akv_segment_release(segment);
    }
}

static void truncations(void)
{
    const size_t thin = test_thin();
    for (int number = 0; number < SAMPLES; number++) {
        akv_segment *segment = sample(number);
        size_t bytes;
        uint8_t *blob = exact_copy(segment, &bytes);
        for (size_t n = 0; n < bytes; n += n < sizeof(akv_header) ? 1 : 63 * thin) {
            uint8_t *part = must(malloc(n + (n == 0))); /* exact, so that a read beyond it shows */
            memcpy(part, blob, n);
            akv_segment *out = NULL;
            akv_diag diag = {0};
            CHECK_STATUS(akv_segment_open(part, n, 1, NULL, &out, &diag), AKV_E_CORRUPT, &diag);
            free(part);
        }
        /* shortened, and the header says so */
        for (size_t n = sizeof(akv_header); n < bytes; n += 64 * thin) {
            uint8_t *part = must(aligned_alloc(64, n));
            memcpy(part, blob, n);
            ((akv_header *)(void *)part)->total_bytes = n;
            CHECK_MSG(!try_bytes(part, n, "shortened", n), "a segment cut to %zu of %zu bytes opens", n, bytes);
            free(part);
        }
        free(blob);
        akv_segment_release(segment);
    }
}

/* One lie each, refused with a word of what is wrong. offset inside a section, or of the header for section -1. */
typedef struct lie {
    int section;
    size_t offset, bytes;
    uint64_t value;
    const char *word;
} lie;

#define FIELD(name) -1, offsetof(akv_header, name), sizeof(((akv_header *)0)->name)

static void lies(void)
{
    spec s = {.name = "lies", .S = 77, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = 8};
    akv_segment *segment = NULL;
    const akv_header *h = NULL;
    /* a draw with bases on both sides, 7 levels (so that level 8 needs a further plane) and codes left over */
    for (uint64_t seed = 0; seed < 1000; seed++) {
        segment = random_ladder_segment(&s, 5, 0.6, seed);
        h = akv_segment_data(segment, NULL);
        const uint64_t *offset = (const uint64_t *)((const uint8_t *)h + h->sections[AKV_SEC_RANKS].offset);
        if (h->basis_cols[0] > 0 && h->basis_cols[1] > 0 && h->num_levels == 8 && h->code_bytes > offset[4])
            break;
        akv_segment_release(segment);
        segment = NULL;
    }
    if (!CHECK(segment != NULL))
        return;
    size_t bytes;
    uint8_t *blob = exact_copy(segment, &bytes), *saved = exact_copy(segment, &bytes);
    const lie list[] = {
        {FIELD(coding), 2, "coding"},
        {FIELD(coding), 0, "coding"},
        {FIELD(profile), AKV_PROFILE_PAPER, "profile"},
        {FIELD(flags), AKV_FLAG_PLAIN_CODES, "flags"},
        {FIELD(num_levels), 0, "num_levels"},
        {FIELD(num_levels), 16, "num_levels"},
        {FIELD(num_levels), UINT32_MAX, "num_levels"},
        {FIELD(num_levels), 9, "section"},
        {FIELD(index_bits), 0, "index_bits"},
        {FIELD(index_bits), 4, "index_bits"},
        {FIELD(index_bits), 40, "index_bits"},
        {FIELD(basis_dim), 1000, "basis"},
        {FIELD(basis_cols), 1000, "basis"},
        {FIELD(code_bytes), UINT64_MAX, "code_bytes"},
        {FIELD(code_bytes), 1, "section"},
        {FIELD(num_residuals), 1, "residuals"},
        {FIELD(num_anchors), 9, "index_bits"},
        {FIELD(num_anchors), 6, "section"},
        {AKV_SEC_MEAN, 2, 2, 0x7f80, "MEAN"},
        {AKV_SEC_ANCHOR_SCALES, 2, 2, 0x7c00, "ANCHOR_SCALES(k)"},
        {AKV_SEC_ANCHOR_SCALES + 1, 2, 2, 0x7e00, "ANCHOR_SCALES(v)"},
        {AKV_SEC_UNITS, 2, 2, 0x7fc0, "UNITS(k)"},
        {AKV_SEC_UNITS + 1, 2, 2, 0, "unit"},
        {AKV_SEC_UNITS, 0, 2, 0x8000, "unit"},
        {AKV_SEC_UNITS, 0, 2, 0xbf80, "unit"},
        {AKV_SEC_SIGMAS, 2, 2, 0x7f80, "SIGMAS(k)"},
        {AKV_SEC_SIGMAS + 1, 0, 2, 0xffff, "SIGMAS(v)"},
        {AKV_SEC_BASIS_SCALES, 0, 4, 0x7f800000, "scale"},
        {AKV_SEC_BASIS_SCALES + 1, 4, 4, 0x7fc00000, "scale"},
        {AKV_SEC_COORDS, 0, 2, 10, "coordinate"},
        {AKV_SEC_COORDS, 0, 2, 0xffff, "coordinate"},
        {AKV_SEC_INDEX, 0, 1, 0x07, "anchor 7"},
        {AKV_SEC_INDEX + 1, 0, 1, 0x05, "anchor 5"},
        {AKV_SEC_RANKS, 0, 8, 1, "begin"},
        {AKV_SEC_RANKS, 8, 8, UINT64_MAX, "begin"},
        {AKV_SEC_RANKS, 32, 8, 0, "end"},
        {AKV_SEC_CODES, h->code_bytes - 1, 1, 1, "not zero"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        uint8_t *at = blob + list[i].offset + (list[i].section < 0 ? 0 : h->sections[list[i].section].offset);
        memcpy(at, &list[i].value, list[i].bytes);
        akv_segment *out = NULL;
        akv_diag diag = {AKV_OK, ""};
        akv_status status = akv_segment_open(blob, bytes, (int)(i % 2), NULL, &out, &diag);
        CHECK_MSG((status == AKV_E_CORRUPT || status == AKV_E_UNSUPPORTED) && strstr(diag.message, list[i].word) != NULL,
                  "lie %zu: %s, \"%s\" instead of something about \"%s\"", i, akv_status_str(status), diag.message,
                  list[i].word);
        akv_segment_release(out);
        memcpy(blob, saved, bytes);
    }
    /* nothing but zeros where no token and no coordinate is: 77 tokens, 3 bits an index, 2 heads */
    const uint64_t index_row = (77 * 3 + 7) / 8, coeff_row = 39;
    const struct { int section; uint64_t offset; uint8_t bit; const char *word; } slack[] = {
        {AKV_SEC_INDEX, index_row - 1, 0x80, "last key index of head 0"},
        {AKV_SEC_INDEX + 1, 2 * index_row - 1, 0x80, "last value index of head 1"},
        {AKV_SEC_INDEX, 2 * index_row + 3, 0x10, "behind the key indices"},
        {AKV_SEC_INDEX + 1, 2 * index_row, 0x01, "behind the value indices"},
        {AKV_SEC_COEFF, coeff_row - 1, 0x10, "last key coefficient of head 0"},
        {AKV_SEC_COEFF + 1, 2 * coeff_row - 1, 0x80, "last value coefficient of head 1"},
        {AKV_SEC_UNITS, 0, 0x01, "turn together"},
    };
    for (size_t i = 0; i < sizeof slack / sizeof slack[0]; i++) {
        blob[h->sections[slack[i].section].offset + slack[i].offset] ^= slack[i].bit;
        akv_segment *out = NULL;
        akv_diag diag = {AKV_OK, ""};
        CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_E_CORRUPT, &diag);
        CHECK_MSG(strstr(diag.message, slack[i].word) != NULL, "slack %zu: \"%s\"", i, diag.message);
        memcpy(blob, saved, bytes);
    }
    /* a level that does not exist: all planes of token 0 set is 15 of 8 */
    const uint64_t row = (s.S + 7) / 8;
    for (int p = 0; p < 4; p++)
        blob[h->sections[AKV_SEC_LEVELS].offset + (uint64_t)p * row] |= 1;
    akv_segment *out = NULL;
    akv_diag diag = {AKV_OK, ""};
    CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_E_CORRUPT, &diag);
    CHECK_MSG(strstr(diag.message, "level 15 of 8") != NULL, "%s", diag.message);
    memcpy(blob, saved, bytes);
    blob[h->sections[AKV_SEC_LEVELS].offset + row - 1] |= 0x80; /* token 79 of 77 */
    CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_E_CORRUPT, &diag);
    memcpy(blob, saved, bytes);
    CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_OK, &diag);
    akv_segment_release(out);
    free(blob);
    free(saved);
    akv_segment_release(segment);
}

/*
 * Unused bits of tables and runs, wherever a draw has some: each set alone, each refused by name. The bits are found by counting
 * levels through the reference.
 */
static void unused_bits(void)
{
    unsigned long tables = 0, gains = 0, groups = 0;
    for (uint64_t seed = 0; seed < 30; seed++) {
        spec s = {.name = "unused", .S = 45, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = seed % 2 ? 8 : 6,
                  .style = seed % 3 == 0 ? AKV_ROPE_INTERLEAVED : AKV_ROPE_HALF_SPLIT};
        akv_segment *segment = random_ladder_segment(&s, 5, 0.6, seed);
        size_t bytes;
        uint8_t *blob = exact_copy(segment, &bytes);
        const akv_header *h = (const akv_header *)(const void *)blob;
        const ref_view view = ref_view_of(blob);
        akv_segment *out = NULL;
        akv_diag diag = {AKV_OK, ""};
#define REFUSED(at, bit, word, counter)                                                        \
    do {                                                                                       \
        blob[at] ^= (uint8_t)(bit);                                                            \
        CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_E_CORRUPT, &diag); \
        CHECK_MSG(strstr(diag.message, word) != NULL, "\"%s\"", diag.message);                 \
        blob[at] ^= (uint8_t)(bit);                                                            \
        counter++;                                                                             \
    } while (0)
        const uint64_t *offset = (const uint64_t *)(const void *)(blob + h->sections[AKV_SEC_RANKS].offset);
        for (uint32_t head = 0; head < 2; head++)
            for (int side = 0; side < 2; side++, offset++) {
                const uint32_t coords = ref_ladder_coords(&view, side), row = (coords + 3) / 4;
                for (uint32_t l = 0; l < h->num_levels && coords % 4 != 0; l++)
                    REFUSED(h->sections[AKV_SEC_TABLES + side].offset + ((uint64_t)head * h->num_levels + l + 1) * row - 1, 0x80,
                            "behind the last coordinate", tables);
                uint64_t at = h->sections[AKV_SEC_CODES].offset + *offset;
                for (uint32_t l = 1; l <= h->num_levels; l++) {
                    uint64_t n = 0, bits = ref_ladder_level_bits(&view, side, head, l);
                    for (uint64_t t = 0; t < s.S; t++)
                        n += ref_ladder_level(&view, side, head, t) == l;
                    if (n % 2 != 0)
                        REFUSED(at + n / 2, 0x10, "unused bits", gains);
                    at += (n + 1) / 2 + n / 16 * 2 * bits + (n % 16 * bits + 7) / 8;
                    if (n % 16 * bits % 8 != 0)
                        REFUSED(at - 1, 0x80, "unused bits", groups);
                }
            }
        free(blob);
        akv_segment_release(segment);
    }
    CHECK_MSG(tables > 50 && gains > 50 && groups > 50, "%lu tables, %lu gains, %lu groups", tables, gains, groups);
}

/* Tables that give every coordinate 4 bits, with offsets that agree: the last run ends behind the section. */
static void codes_beyond_the_section(void)
{
    akv_segment *segment = compressed(600, 0, 0.25);
    size_t bytes;
    uint8_t *blob = exact_copy(segment, &bytes);
    const akv_header *h = (const akv_header *)(const void *)blob;
    ref_view view = ref_view_of(blob);
    for (int side = 0; side < 2; side++)
        memset(blob + h->sections[AKV_SEC_TABLES + side].offset, 0xff, h->sections[AKV_SEC_TABLES + side].bytes);
    memset(blob + h->sections[AKV_SEC_CODES].offset, 0, h->code_bytes);
    uint64_t *offset = (uint64_t *)(void *)(blob + h->sections[AKV_SEC_RANKS].offset), at = 0;
    CHECK(h->num_tokens <= AKV_BLOCK_TOKENS); /* one block a head: runs are counted over all tokens */
    for (uint32_t head = 0; head < h->num_kv_heads; head++)
        for (int side = 0; side < 2; side++) {
            uint64_t count[16] = {0};
            for (uint64_t t = 0; t < h->num_tokens; t++)
                count[ref_ladder_level(&view, side, head, t)]++;
            *offset++ = at;
            for (uint32_t l = 1; l <= h->num_levels; l++) {
                at += (count[l] + 1) / 2;
                for (uint64_t n = count[l]; n > 0; n -= n < 16 ? n : 16)
                    at += ((n < 16 ? n : 16) * 4 * h->head_dim[side] + 7) / 8;
            }
        }
    *offset = at;
    CHECK_MSG(at > h->code_bytes, "%llu bytes of codes fit into %llu", (unsigned long long)at, (unsigned long long)h->code_bytes);
    akv_segment *out = NULL;
    akv_diag diag = {AKV_OK, ""};
    CHECK_STATUS(akv_segment_open(blob, bytes, 0, NULL, &out, &diag), AKV_E_CORRUPT, &diag);
    CHECK_MSG(strstr(diag.message, "beyond the section") != NULL, "%s", diag.message);
    free(blob);
    akv_segment_release(segment);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(flips);
    TEST(random_damage);
    TEST(truncations);
    TEST(lies);
    TEST(unused_bits);
    TEST(codes_beyond_the_section);
    return TEST_DONE();
}
