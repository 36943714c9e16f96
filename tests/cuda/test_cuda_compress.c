/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_compress.c - akv_cuda_compress against akv_compress: the same plan and bytes, numbers that do not hang on
 * near-ties equal up to their rounding, attention from the segment as near to dense as from the CPU's, the same bytes
 * twice, refusals.
 */
#include "akv_test.h"
#include "cuda/host.h"
#include "device.h"

#include <stdlib.h>

#define BASE                                                                                                           \
    .S = 2048, .H = 2, .G = 4, .dk = 128, .dv = 128, .W = 32, .rotary = 128, .style = AKV_ROPE_HALF_SPLIT,             \
    .dtype = AKV_BF16, .keep = 0.1, .seed = 1

static const spec cases[] = {
    {.name = "d 128", BASE},
    {.name = "d 128 at 5x", BASE, .keep = 0.2, .seed = 2},
    {.name = "d 64, G 1", BASE, .dk = 64, .dv = 64, .rotary = 64, .G = 1, .H = 3, .seed = 3},
    {.name = "d 64, G 8, 20x", BASE, .dk = 64, .dv = 64, .rotary = 64, .G = 8, .S = 4096, .keep = 0.05, .seed = 4},
    {.name = "odd S", BASE, .S = 3001, .seed = 5},
    {.name = "odd S, long", BASE, .S = 9473, .H = 1, .keep = 0.05, .seed = 6},
    {.name = "f16", BASE, .dtype = AKV_F16, .seed = 7},
    {.name = "f32", BASE, .dtype = AKV_F32, .seed = 8},
    {.name = "dims 96 and 80, half of the keys turned", BASE, .dk = 96, .dv = 80, .rotary = 48, .seed = 9},
    {.name = "no rotation", BASE, .rotary = 0, .seed = 10},
    {.name = "interleaved, magnitude, late positions",
     BASE,
     .style = AKV_ROPE_INTERLEAVED,
     .magnitude = 1.2,
     .first_position = 70001,
     .seed = 11},
    {.name = "gaps in positions", BASE, .gaps = 1, .seed = 12},
    {.name = "soft-cap", BASE, .softcap = 20, .seed = 13},
    {.name = "padded, transposed, token-major",
     BASE,
     .layout_k = LAY_PADDED,
     .layout_v = LAY_TRANSPOSED,
     .layout_q = LAY_TOKEN_MAJOR,
     .seed = 14},
    {.name = "reversed",
     BASE,
     .layout_k = LAY_REVERSED,
     .layout_v = LAY_REVERSED,
     .layout_q = LAY_REVERSED,
     .S = 1100,
     .keep = 0.2,
     .seed = 15},
    {.name = "W 8, G 3", BASE, .W = 8, .G = 3, .seed = 16},
    {.name = "W 64, G 5", BASE, .W = 64, .G = 5, .seed = 17},
    {.name = "short, no basis", BASE, .S = 300, .keep = 0.25, .seed = 18},
};
#define CASES (sizeof cases / sizeof cases[0])

/* A tensor's memory on the device, laid out as it is. */
static akv_tensor send_tensor(const akv_tensor *t, uint64_t heads, uint64_t tokens, uint64_t dim, void **memory)
{
    const int64_t strides[3] = {t->stride_head, t->stride_token, t->stride_dim},
                  counts[3] = {(int64_t)heads, (int64_t)tokens, (int64_t)dim};
    int64_t low = 0, high = 0;
    for (int i = 0; i < 3; i++)
        *(strides[i] < 0 ? &low : &high) += strides[i] * (counts[i] - 1);
    const size_t size = akv_dtype_bytes(t->dtype);
    const uint8_t *from = (const uint8_t *)t->data + low * (int64_t)size;
    *memory = device_copy(from, (size_t)(high - low + 1) * size);
    akv_tensor out = *t;
    out.data = (uint8_t *)*memory - low * (int64_t)size;
    return out;
}

typedef struct on_device {
    akv_layer layer;
    void *memory[3];
    void *workspace;
    size_t bytes;
} on_device;

static void send_layer(const akv_layer *layer, const akv_config *config, on_device *d)
{
    const akv_shape *s = &layer->shape;
    akv_diag diag = {AKV_OK, ""};
    d->layer = *layer;
    d->layer.keys = send_tensor(&layer->keys, s->num_kv_heads, s->num_tokens, s->head_dim_k, &d->memory[0]);
    d->layer.values = send_tensor(&layer->values, s->num_kv_heads, s->num_tokens, s->head_dim_v, &d->memory[1]);
    d->layer.queries = send_tensor(&layer->queries, (uint64_t)s->num_kv_heads * s->gqa_group, s->num_queries,
                                   s->head_dim_k, &d->memory[2]);
    CHECK_STATUS(akv_cuda_compress_workspace_bytes(&d->layer, config, &d->bytes, &diag), AKV_OK, &diag);
    d->workspace = device_new(d->bytes);
}

static void free_layer(on_device *d)
{
    for (int i = 0; i < 3; i++)
        device_free(d->memory[i]);
    device_free(d->workspace);
}

static akv_segment *compress(on_device *d, const akv_config *config)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment *segment = NULL;
    CHECK_STATUS(akv_cuda_compress(&d->layer, NULL, config, d->workspace, d->bytes, NULL, &segment, &diag), AKV_OK,
                 &diag);
    return segment;
}

/* Outputs of T queries that lean on keys anywhere. */
#define T 48
static float *attend(const akv_segment *segment, const akv_layer *layer, const float *queries)
{
    const akv_shape *s = &layer->shape;
    const uint64_t heads = (uint64_t)s->num_kv_heads * s->gqa_group;
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = s->gqa_group;
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = T;
    p.queries = akv_tensor_contiguous(queries, AKV_F32, T, s->head_dim_k);
    p.segments = &segment;
    p.num_segments = 1;
    p.sm_scale = layer->sm_scale;
    p.logit_softcap = layer->logit_softcap;
    p.out = must(malloc(heads * T * s->head_dim_v * sizeof *p.out));
    p.out_stride_head = (int64_t)T * s->head_dim_v;
    p.out_stride_token = s->head_dim_v;
    akv_diag diag = {AKV_OK, ""};
    size_t bytes = 0;
    CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
    void *workspace = akv_alloc(NULL, bytes);
    CHECK_STATUS(akv_attend(&p, must(workspace), bytes, &diag), AKV_OK, &diag);
    akv_free(NULL, workspace, bytes);
    return p.out;
}

static double error_of(const akv_segment *segment, const akv_segment *dense, const akv_layer *layer, uint64_t seed)
{
    const akv_shape *s = &layer->shape;
    const uint64_t heads = (uint64_t)s->num_kv_heads * s->gqa_group;
    akv_rng rng = akv_rng_stream(seed, 77, 0);
    float *queries = must(malloc(heads * T * s->head_dim_k * sizeof *queries));
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t t = 0; t < T; t++) {
            const int64_t target = (int64_t)akv_rng_below(&rng, s->num_tokens);
            for (uint32_t i = 0; i < s->head_dim_k; i++)
                queries[(h * T + t) * s->head_dim_k + i] =
                    0.5f * akv_tensor_at(&layer->keys, (int64_t)(h / s->gqa_group), target, i) +
                    (float)random_gauss(&rng);
        }
    float *a = attend(segment, layer, queries), *b = attend(dense, layer, queries);
    double error = 0, size = 0;
    for (uint64_t i = 0; i < heads * T * s->head_dim_v; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    free(queries);
    free(a);
    free(b);
    return sqrt(error / size);
}

/* Share of 16-bit numbers (bf16 or f16 bits) of a section that differ by more than one step. */
static double differ16(const akv_segment *a, const akv_segment *b, int id)
{
    const uint64_t n = akv_header_of(a)->sections[id].bytes / 2;
    const uint16_t *x = akv_section_of(a, id), *y = akv_section_of(b, id);
    uint64_t far = 0;
    for (uint64_t i = 0; i < n; i++)
        far += abs((int)x[i] - (int)y[i]) > 1;
    return n > 0 ? (double)far / (double)n : 0;
}

static double log_ratio;
static int ratios;

static void check_case(const spec *s)
{
    fixture f;
    on_device d;
    akv_diag diag = {AKV_OK, ""};
    akv_segment *cpu = NULL, *dense = NULL, *opened = NULL;
    fixture_make(s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    send_layer(&f.layer, &f.config, &d);
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &cpu, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_segment_create_dense(&f.layer, &f.config, &dense, &diag), AKV_OK, &diag);
    akv_segment *gpu = compress(&d, &f.config), *again = compress(&d, &f.config);
    if (cpu == NULL || gpu == NULL || again == NULL || dense == NULL) {
        free_layer(&d);
        return;
    }
    akv_header a = *akv_header_of(cpu), b = *akv_header_of(gpu);
    const uint64_t residuals[2] = {b.num_residuals[0], b.num_residuals[1]};
    b.num_residuals[0] = a.num_residuals[0];
    b.num_residuals[1] = a.num_residuals[1];
    CHECK_MSG(memcmp(&a, &b, sizeof a) == 0, "%s: another plan", s->name);
    CHECK_MSG(cpu->blob_bytes == gpu->blob_bytes, "%s: %zu bytes, the CPU's %zu", s->name, gpu->blob_bytes,
              cpu->blob_bytes);
    CHECK_MSG(memcmp(gpu->blob, again->blob, gpu->blob_bytes) == 0, "%s: two runs give other bytes", s->name);
    CHECK_STATUS(akv_segment_open(gpu->blob, gpu->blob_bytes, 1, NULL, &opened, &diag), AKV_OK, &diag);
    const double mean = differ16(cpu, gpu, AKV_SEC_MEAN),
                 units = fmax(differ16(cpu, gpu, AKV_SEC_UNITS), differ16(cpu, gpu, AKV_SEC_UNITS + 1));
    CHECK_MSG(mean == 0 && units == 0, "%s: %.3f of the means and %.3f of the units differ by more than a rounding",
              s->name, mean, units);
    const double sigmas = fmax(differ16(cpu, gpu, AKV_SEC_SIGMAS), differ16(cpu, gpu, AKV_SEC_SIGMAS + 1));
    const double by_cpu = error_of(cpu, dense, &f.layer, s->seed), by_gpu = error_of(gpu, dense, &f.layer, s->seed);
    printf("%-42s error %.5f, the CPU's %.5f (%+.1f %%); residuals %llu + %llu, the CPU's %llu + %llu; sigmas %.2f\n",
           s->name, by_gpu, by_cpu, 100 * (by_gpu / by_cpu - 1), (unsigned long long)residuals[0],
           (unsigned long long)residuals[1], (unsigned long long)a.num_residuals[0],
           (unsigned long long)a.num_residuals[1], sigmas);
    fflush(stdout);
    /* One draw of anchors against another: single layers scatter; what must not happen is that one is broken. */
    CHECK_MSG(by_gpu <= 1.25 * by_cpu + 1e-4, "%s: attention is off by %.5f, the CPU's by %.5f", s->name, by_gpu,
              by_cpu);
    log_ratio += log(by_gpu / by_cpu);
    ratios++;
    akv_segment_release(cpu);
    akv_segment_release(gpu);
    akv_segment_release(again);
    akv_segment_release(dense);
    akv_segment_release(opened);
    free_layer(&d);
    fixture_free(&f);
}

static const spec *this_case;

static void against_the_cpu(void)
{
    check_case(this_case);
}

/* Every case by itself, so that one can be asked for: compute-sanitizer takes long. */
static void test_cases(void)
{
    for (size_t i = 0; i < CASES; i++) {
        char name[96];
        snprintf(name, sizeof name, "case %zu: %s", i, cases[i].name);
        this_case = &cases[i];
        test_run(name, against_the_cpu);
    }
}

static void all_cases(void)
{
    const double mean = exp(log_ratio / (ratios > 0 ? ratios : 1)) - 1;
    printf("error against the CPU's, %d cases: %+.2f %%\n", ratios, 100 * mean);
    CHECK_MSG(ratios < (int)CASES || mean <= 0.01, "segments made on the GPU are worse by %.2f %%", 100 * mean);
}

/* Zero keys, zero values, one direction only: nothing to cover, nothing to code. */
static void nothing_to_say(void)
{
    for (int kind = 0; kind < 3; kind++) {
        const spec s = {.name = "zeros", BASE, .S = 1500, .dk = 64, .dv = 64, .rotary = 64};
        fixture f;
        on_device d;
        akv_diag diag = {AKV_OK, ""};
        akv_segment *opened = NULL;
        fixture_make(&s, &f);
        f.config.profile = AKV_PROFILE_DEFAULT;
        for (uint32_t h = 0; h < s.H; h++)
            for (uint64_t t = 0; t < s.S; t++)
                for (uint32_t i = 0; i < s.dk; i++) {
                    if (kind != 1)
                        tensor_set(&f.layer.keys, h, t, i, kind == 2 ? 0.5 : 0.0);
                    if (kind != 0)
                        tensor_set(&f.layer.values, h, t, i, kind == 2 && i == 3 ? 1.0 : 0.0);
                }
        send_layer(&f.layer, &f.config, &d);
        akv_segment *gpu = compress(&d, &f.config);
        if (gpu != NULL)
            CHECK_STATUS(akv_segment_open(gpu->blob, gpu->blob_bytes, 1, NULL, &opened, &diag), AKV_OK, &diag);
        akv_segment_release(gpu);
        akv_segment_release(opened);
        free_layer(&d);
        fixture_free(&f);
    }
}

/* Pages in another order than the tokens give the bytes of the tokens in a row. */
static void pages(void)
{
    const spec s = {.name = "pages", BASE, .S = 1000};
    enum { PAGE = 16 };
    fixture f;
    on_device d;
    akv_diag diag = {AKV_OK, ""};
    fixture_make(&s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    send_layer(&f.layer, &f.config, &d);
    akv_segment *plain = compress(&d, &f.config), *paged = NULL;
    const uint64_t num_pages = (s.S + PAGE - 1) / PAGE, page_elements = (uint64_t)PAGE * s.H * s.dk;
    int32_t *table = must(malloc(num_pages * sizeof *table));
    for (uint64_t i = 0; i < num_pages; i++)
        table[i] = (int32_t)((i * 5 + 3) % num_pages);
    akv_cuda_pages p;
    akv_cuda_pages_init(&p);
    p.page_tokens = PAGE;
    p.table = device_copy(table, num_pages * sizeof *table);
    void *memory[2];
    on_device other = d;
    for (int side = 0; side < 2; side++) {
        const akv_tensor *from = side == 0 ? &f.layer.keys : &f.layer.values;
        uint16_t *pool = must(calloc(num_pages * page_elements, sizeof *pool)); /* [page, token, head, dim] */
        for (uint64_t t = 0; t < s.S; t++)
            for (uint32_t h = 0; h < s.H; h++)
                for (uint32_t i = 0; i < s.dk; i++)
                    pool[(uint64_t)table[t / PAGE] * page_elements + (t % PAGE * s.H + h) * s.dk + i] =
                        ((const uint16_t *)
                             from->data)[(int64_t)h * from->stride_head + (int64_t)t * from->stride_token + i];
        memory[side] = device_copy(pool, num_pages * page_elements * sizeof *pool);
        free(pool);
        akv_tensor *to = side == 0 ? &other.layer.keys : &other.layer.values;
        *to = (akv_tensor){memory[side], AKV_BF16, s.dk, (int64_t)s.H * s.dk, 1};
        p.stride_page[side] = (int64_t)page_elements;
    }
    CHECK_STATUS(akv_cuda_compress(&other.layer, &p, &f.config, d.workspace, d.bytes, NULL, &paged, &diag), AKV_OK,
                 &diag);
    if (plain != NULL && paged != NULL)
        CHECK_MSG(memcmp(plain->blob, paged->blob, plain->blob_bytes) == 0, "pages give other bytes");
    device_free(memory[0]);
    device_free(memory[1]);
    device_free((void *)(uintptr_t)p.table);
    free(table);
    akv_segment_release(plain);
    akv_segment_release(paged);
    free_layer(&d);
    fixture_free(&f);
}

static void refusals(void)
{
    const spec s = {.name = "refusals", BASE, .S = 1024, .dtype = AKV_F32};
    fixture f;
    on_device d;
    akv_diag diag = {AKV_OK, ""};
    akv_segment *out = NULL;
    fixture_make(&s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    send_layer(&f.layer, &f.config, &d);
    const akv_layer good = d.layer;
    akv_config config = f.config;
#define REFUSED(status, words)                                                                                         \
    do {                                                                                                               \
        CHECK_STATUS(akv_cuda_compress(&d.layer, NULL, &config, d.workspace, d.bytes, NULL, &out, &diag), status,      \
                     &diag);                                                                                           \
        CHECK_MSG(out == NULL && strstr(diag.message, words) != NULL, "\"%s\" does not say \"%s\"", diag.message,      \
                  words);                                                                                              \
        d.layer = good;                                                                                                \
        config = f.config;                                                                                             \
    } while (0)
    config.profile = AKV_PROFILE_PAPER;
    REFUSED(AKV_E_UNSUPPORTED, "profile default");
    config.keep_ratio = 1;
    REFUSED(AKV_E_UNSUPPORTED, "dense");
    config.keep_ratio = 1e-4;
    REFUSED(AKV_E_INFEASIBLE, "feasible");
    d.layer.shape.head_dim_v = 192;
    REFUSED(AKV_E_UNSUPPORTED, "head_dim_v");
    d.layer.keys = f.layer.keys; /* host memory */
    REFUSED(AKV_E_INVALID_ARGUMENT, "no device memory");
    CHECK_STATUS(akv_cuda_compress(&d.layer, NULL, &config, d.workspace, d.bytes / 2, NULL, &out, &diag),
                 AKV_E_NO_SPACE, &diag);
    static const char *const names[3] = {"keys", "values", "queries"};
    const akv_tensor *tensors[3] = {&d.layer.keys, &d.layer.values, &d.layer.queries};
    for (int i = 0; i < 3; i++) {
        float *at = (float *)(uintptr_t)tensors[i]->data +
                    (i < 2 ? tensors[i]->stride_head + 700 * tensors[i]->stride_token : 0) + 5,
              old;
        const float bad = i == 1 ? INFINITY : NAN;
        MUST_CUDA(cudaMemcpy(&old, at, sizeof old, cudaMemcpyDeviceToHost));
        MUST_CUDA(cudaMemcpy(at, &bad, sizeof bad, cudaMemcpyHostToDevice));
        REFUSED(AKV_E_NON_FINITE, names[i]);
        CHECK_MSG(strstr(diag.message, i < 2 ? "head 1, token 700, dim 5" : "head 0, token 0, dim 5") != NULL, "%s",
                  diag.message);
        MUST_CUDA(cudaMemcpy(at, &old, sizeof old, cudaMemcpyHostToDevice));
    }
    counter c; /* no memory: nothing leaks, and the next call works */
    counter_init(&c);
    config.allocator = &c.hooks;
    for (uint64_t n = 1; n <= 2; n++) {
        c.fail_at = c.total + n;
        config.allocator = &c.hooks;
        REFUSED(AKV_E_NO_MEMORY, "memory");
        CHECK(c.live == 0 && c.bad_free == 0);
        c.fail_at = 0;
    }
    akv_segment_release(compress(&d, &f.config));
    free_layer(&d);
    fixture_free(&f);
}

int main(int argc, char **argv)
{
    need_device();
    TEST_INIT(argc, argv);
    test_cases();
    TEST(all_cases);
    TEST(nothing_to_say);
    TEST(pages);
    TEST(refusals);
    return TEST_DONE();
}
