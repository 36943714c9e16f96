/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_same_bytes.c - the same input gives the same bytes on every machine, with every compiler and every C library: checksums
 * of segments, of a document and of attention outputs, of the generic kernels (AKV_CPU=generic is set here), compared with
 * data/same_bytes.tsv. Inputs are made of whole numbers and of the library's own phases, not of the C library's.
 *
 * With the word "fused": of the machine's best kernels, where these have fused multiply-adds, in data/same_bytes_fused.tsv;
 * without attention, whose floats depend on the kernels.
 *
 *   test_same_bytes [fused]                 compares
 *   test_same_bytes [fused] --write FILE    writes the table anew, after a change of the codec that is meant to change bytes
 */
#include "akv_test.h"
#include "cases.h"
#include "core/rope.h"
#include "kernels/cpu.h"
#include "npz.h"

#include <anchorkv/akv_document.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MOST_ROWS = 64 };

typedef struct row {
    char name[64];
    unsigned long long bytes, checksum;
} row;

static row rows[MOST_ROWS];
static int num_rows;
static bool fused;

static void add_row(const char *name, const char *what, const void *data, size_t bytes)
{
    row *r = &rows[num_rows++];
    must(num_rows <= MOST_ROWS ? r : NULL);
    snprintf(r->name, sizeof r->name, "%s %s", name, what);
    r->bytes = bytes;
    r->checksum = XXH64(data, bytes, 0);
}

static void add_segment(const char *name, const char *what, const akv_segment *segment)
{
    size_t bytes = 0;
    const void *data = akv_segment_data(segment, &bytes);
    add_row(name, what, data, bytes);
}

/* ---------------------------------------------------------------------------------------------------------- inputs */

/* Nearly gaussian, mean 0: twelve draws of 16 bits; exact in double. */
static double bell(akv_rng *rng)
{
    int64_t sum = 0;
    for (int i = 0; i < 3; i++)
        for (uint64_t x = akv_rng_next(rng), j = 0; j < 4; j++, x >>= 16)
            sum += (int64_t)(x & 0xffff) - 0x8000;
    return (double)sum * 0x1p-16;
}

/* From 1 down to about 1/base, by products alone. */
static void set_frequencies(double *inv_freq, uint32_t planes, double step)
{
    double f = 1.0;
    for (uint32_t j = 0; j < planes; j++, f *= step)
        inv_freq[j] = f;
}

/* The fixture's shapes with clusters of bell-shaped numbers in them; keys are turned to their positions. */
static void refill(const spec *s, fixture *f)
{
    enum { CENTRES = 12 };
    akv_rng rng = akv_rng_stream(s->seed, 2000, 0);
    const akv_layer *l = &f->layer;
    double centre[CENTRES][256], cosine[128], sine[128];
    float x[256];
    set_frequencies(f->inv_freq, s->rotary / 2, 0.8125);
    for (uint32_t h = 0; h < s->H; h++)
        for (int side = 0; side < 2; side++) {
            const uint32_t dim = side == 0 ? s->dk : s->dv;
            for (uint32_t c = 0; c < CENTRES; c++)
                for (uint32_t i = 0; i < dim; i++)
                    centre[c][i] = bell(&rng) + (side == 0 && i % 7 == 3 ? 2.5 : 0);
            for (uint64_t p = 0; p < s->S; p++) {
                const double *c = centre[akv_rng_below(&rng, CENTRES)];
                const double length = 0.5 + (double)akv_rng_below(&rng, 1024) / 1024;
                for (uint32_t i = 0; i < dim; i++)
                    x[i] = (float)(length * (c[i] + 0.5 * bell(&rng)));
                if (side == 0) {
                    akv_rope_phase(f->inv_freq, s->rotary / 2, f->positions[p], cosine, sine);
                    akv_rope_turn(x, dim, s->rotary, s->style, cosine, sine, 1, l->rope.magnitude, x);
                }
                for (uint32_t i = 0; i < dim; i++)
                    tensor_set(side == 0 ? &l->keys : &l->values, h, p, i, x[i]);
            }
        }
    for (uint32_t qh = 0; qh < s->H * s->G; qh++)
        for (uint32_t r = 0; r < s->W; r++) {
            const int64_t target = (int64_t)akv_rng_below(&rng, s->S);
            for (uint32_t i = 0; i < s->dk; i++)
                tensor_set(&l->queries, qh, r, i, 0.5 * akv_tensor_at(&l->keys, qh / s->G, target, i) + bell(&rng));
        }
}

/* The captured layer of the repository, turned to its positions as above. */
static bool captured(fixture *f)
{
    npz file;
    npz_array K;
    double cosine[128], sine[128];
    if (!fixture_from_npz(AKV_TEST_DATA "/layer12_tail.npz", f) || !npz_open(AKV_TEST_DATA "/layer12_tail.npz", &file))
        return false;
    const akv_shape *s = &f->layer.shape;
    set_frequencies(f->inv_freq, s->rotary_dim / 2, 0.8125);
    if (npz_find(&file, "K", &K))
        for (uint32_t h = 0; h < s->num_kv_heads; h++)
            for (uint64_t p = 0; p < s->num_tokens; p++) {
                float x[256];
                for (uint32_t i = 0; i < s->head_dim_k; i++) {
                    uint16_t half;
                    memcpy(&half, (const uint8_t *)K.data + ((h * s->num_tokens + p) * s->head_dim_k + i) * 2, 2);
                    x[i] = akv_f16_to_f32(half);
                }
                akv_rope_phase(f->inv_freq, s->rotary_dim / 2, f->layer.first_position + (int64_t)p, cosine, sine);
                akv_rope_turn(x, s->head_dim_k, s->rotary_dim, AKV_ROPE_HALF_SPLIT, cosine, sine, 1, 1.0, x);
                for (uint32_t i = 0; i < s->head_dim_k; i++)
                    tensor_set(&f->layer.keys, h, p, i, x[i]);
            }
    npz_close(&file);
    return true;
}

/* --------------------------------------------------------------------------------------------------------- outputs */

/* One attention step of the layer's own queries; NaN has many patterns, so there must be none. */
static void add_attention(const char *name, const char *what, const fixture *f, const akv_segment *segment)
{
    if (fused)
        return;
    const akv_shape *s = &f->layer.shape;
    const size_t numbers = (size_t)s->num_kv_heads * s->gqa_group * s->num_queries * s->head_dim_v;
    float *out = must(malloc(numbers * sizeof *out));
    size_t bytes = 0;
    akv_diag diag = {AKV_OK, ""};
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = s->gqa_group;
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = s->num_queries;
    p.queries = f->layer.queries;
    p.segments = &segment;
    p.num_segments = 1;
    p.sm_scale = f->layer.sm_scale;
    p.logit_softcap = f->layer.logit_softcap;
    p.out = out;
    p.out_stride_token = s->head_dim_v;
    p.out_stride_head = (int64_t)s->num_queries * s->head_dim_v;
    CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
    void *workspace = must(aligned_alloc(64, (bytes + 64) / 64 * 64));
    CHECK_STATUS(akv_attend(&p, workspace, bytes, &diag), AKV_OK, &diag);
    for (size_t i = 0; i < numbers; i++)
        CHECK(isfinite(out[i]));
    add_row(name, what, out, numbers * sizeof *out);
    free(workspace);
    free(out);
}

static akv_status into_memory(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    XXH64_state_t *state = opaque;
    (void)diag;
    return XXH64_update(state, data, bytes) == XXH_OK ? AKV_OK : AKV_E_NO_MEMORY;
}

/* The segment as the only layer of a document. */
static void add_document(const char *name, const fixture *f, akv_segment *segment)
{
    static const akv_document_property property = {"source", "test_same_bytes"};
    const akv_shape *s = &f->layer.shape;
    akv_diag diag = {AKV_OK, ""};
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    parts.model.num_layers = 1;
    parts.model.vocab_tokens = 1000;
    strcpy(parts.model.description, "made up");
    int32_t *tokens = must(malloc(s->num_tokens * sizeof *tokens));
    for (uint64_t p = 0; p < s->num_tokens; p++)
        tokens[p] = (int32_t)(p * 7 % 1000);
    akv_document_layer layer = {.kind = AKV_DOCUMENT_LAYER_SEGMENTS,
                                .num_kv_heads = s->num_kv_heads,
                                .gqa_group = s->gqa_group,
                                .head_dim_k = s->head_dim_k,
                                .head_dim_v = s->head_dim_v,
                                .rotary_dim = s->rotary_dim,
                                .rope_style = (uint32_t)f->layer.rope.style,
                                .rope_magnitude = f->layer.rope.magnitude,
                                .sm_scale = f->layer.sm_scale,
                                .logit_softcap = f->layer.logit_softcap,
                                .num_segments = 1};
    parts.tokens = tokens;
    parts.num_tokens = s->num_tokens;
    parts.next_position = f->layer.first_position + (int32_t)s->num_tokens;
    parts.layers = &layer;
    parts.num_layers = 1;
    parts.segments = &segment;
    parts.num_segments = 1;
    parts.properties = &property;
    parts.num_properties = 1;
    XXH64_state_t *state = must(XXH64_createState());
    XXH64_reset(state, 0);
    CHECK_STATUS(akv_document_write(&parts, into_memory, state, NULL, &diag), AKV_OK, &diag);
    add_row(name, "document", "", 0);
    rows[num_rows - 1].bytes = akv_document_bytes(&parts);
    rows[num_rows - 1].checksum = XXH64_digest(state);
    XXH64_freeState(state);
    free(tokens);
}

static void add_layer(const char *name, fixture *f, double keep, bool document)
{
    static const char *const what[2][3] = {{"paper", "paper smaller", "paper attention"},
                                           {"default", "default smaller", "default attention"}};
    akv_diag diag = {AKV_OK, ""};
    f->config.keep_ratio = keep;
    for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++) {
        const char *const *words = what[profile == AKV_PROFILE_DEFAULT];
        akv_segment *segment = NULL, *smaller = NULL;
        akv_segment_info info;
        akv_segment_info_init(&info);
        f->config.profile = (akv_profile)profile;
        const akv_status status = akv_compress(&f->layer, &f->config, &segment, &diag);
        if (!CHECK_MSG(status == AKV_OK, "%s, %s: %s", name, words[0], diag.message))
            continue;
        add_segment(name, words[0], segment);
        add_attention(name, words[2], f, segment);
        CHECK_STATUS(akv_segment_get_info(segment, &info, &diag), AKV_OK, &diag);
        if (akv_segment_retarget(segment, info.bytes.total * 4 / 5, NULL, &smaller, NULL, &diag) == AKV_OK)
            add_segment(name, words[1], smaller);
        if (document)
            add_document(name, f, segment);
        akv_segment_release(smaller);
        akv_segment_release(segment);
    }
}

static void measure(void)
{
    static const spec specs[] = {
        {.name = "half-split f16", .S = 700, .H = 2, .G = 3, .dk = 64, .dv = 64, .W = 16, .rotary = 64, .keep = 0.15, .dtype = AKV_F16, .seed = 1},
        {.name = "interleaved bf16", .S = 1100, .H = 1, .G = 4, .dk = 128, .dv = 128, .W = 8, .rotary = 128, .keep = 0.1, .dtype = AKV_BF16,
         .style = AKV_ROPE_INTERLEAVED, .magnitude = 1.25, .first_position = 100000, .seed = 2},
        {.name = "capped f32", .S = 530, .H = 2, .G = 1, .dk = 80, .dv = 48, .W = 8, .rotary = 40, .keep = 0.2, .dtype = AKV_F32,
         .softcap = 30, .gaps = 1, .seed = 3},
    };
    fixture f;
    akv_segment *segment = NULL;
    akv_diag diag = {AKV_OK, ""};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        fixture_make(&specs[i], &f);
        refill(&specs[i], &f);
        add_layer(specs[i].name, &f, specs[i].keep, i == 0);
        if (i == 0) {
            CHECK_STATUS(akv_evict_snapkv(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
            add_segment(specs[i].name, "evicted", segment);
            akv_segment_release(segment);
            CHECK_STATUS(akv_segment_create_dense(&f.layer, NULL, &segment, &diag), AKV_OK, &diag);
            add_segment(specs[i].name, "dense", segment);
            add_attention(specs[i].name, "dense attention", &f, segment);
            akv_segment_release(segment);
        }
        fixture_free(&f);
    }
    if (CHECK_MSG(captured(&f), "tests/data/layer12_tail.npz cannot be read")) {
        add_layer("captured", &f, 0.1, false);
        fixture_free(&f);
    }
}

static void compare(void)
{
    const char *name = fused ? AKV_TEST_DATA "/same_bytes_fused.tsv" : AKV_TEST_DATA "/same_bytes.tsv";
    FILE *file = fopen(name, "r");
    char line[256];
    int at = 0;
    if (!CHECK_MSG(file != NULL, "%s is missing", name))
        return;
    measure();
    while (fgets(line, sizeof line, file) != NULL) {
        row want;
        if (sscanf(line, "%63[^\t]\t%llu\t%llx", want.name, &want.bytes, &want.checksum) != 3)
            continue; /* its head */
        if (!CHECK_MSG(at < num_rows && strcmp(rows[at].name, want.name) == 0, "row \"%s\" was not made here", want.name))
            break;
        CHECK_MSG(rows[at].bytes == want.bytes && rows[at].checksum == want.checksum,
                  "%s: %llu bytes %016llx, the table has %llu bytes %016llx", want.name, rows[at].bytes, rows[at].checksum,
                  want.bytes, want.checksum);
        at++;
    }
    fclose(file);
    CHECK_MSG(at == num_rows && at >= 15, "%d rows made, %d in the table", num_rows, at);
}

int main(int argc, char **argv)
{
    fused = argc > 1 && strcmp(argv[1], "fused") == 0;
    argc -= fused;
    argv += fused;
    if (!fused)
        setenv("AKV_CPU", "generic", 1); /* before anything asks */
    else if (akv_cpu() == AKV_CPU_GENERIC) {
        printf("this machine has no fused multiply-adds, or AKV_CPU is generic: nothing compared\n");
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        measure();
        FILE *file = fopen(argv[2], "w");
        if (file == NULL || test_.failures != 0)
            return 1;
        fprintf(file, "layer and what of it\tbytes\tXXH64\n");
        for (int i = 0; i < num_rows; i++)
            fprintf(file, "%s\t%llu\t%016llx\n", rows[i].name, rows[i].bytes, rows[i].checksum);
        return fclose(file) != 0;
    }
    TEST_INIT(1, argv);
    TEST(compare);
    return TEST_DONE();
}
