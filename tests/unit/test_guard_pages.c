/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_guard_pages.c - every kernel of every variant that this machine can run, each of its buffers exactly as large as the contract
 * says and lying directly before, then directly behind, a page that must not be touched. A touch ends the program with the kernel's
 * name. What lies between a buffer and the other end of its pages must stay as it was. Values are other tests' business, but the
 * place of a buffer must not change them.
 */
#include "akv_test.h"
#include "cases.h"
#include "kernels/coder.h"
#include "kernels/cpu.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"
#include "kernels/quad.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_BUFFERS = 16, CANARY = 0x5a };

typedef struct buffer {
    uint8_t *map, *data;
    size_t map_bytes, bytes;
} buffer;

static buffer buffers[MOST_BUFFERS];
static int num_buffers;
static bool behind; /* the guard page lies before the buffer: the buffer lies behind it */
static size_t page;
static char now[128]; /* variant and kernel that runs */
static unsigned long calls;

static void touched(int signal_number)
{
    static const char text[] = " touches a page beside its buffers\n";
    (void)signal_number;
    if (write(STDOUT_FILENO, now, strlen(now)) < 0 || write(STDOUT_FILENO, text, sizeof text - 1) < 0)
        _exit(2);
    _exit(1);
}

/* Exactly `bytes`, the guard on one side; the same contents for the same call number, wherever it lies. */
static void *place(size_t bytes)
{
    const size_t room = (bytes + page - 1) / page * page;
    buffer *b = &buffers[num_buffers++];
    if (num_buffers == MOST_BUFFERS)
        exit(2);
    b->map_bytes = room + 2 * page;
    b->map = mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->map == MAP_FAILED || (room > 0 && mprotect(b->map + page, room, PROT_READ | PROT_WRITE) != 0)) {
        perror("mmap");
        exit(2);
    }
    memset(b->map + page, CANARY, room);
    b->data = b->map + page + (behind ? 0 : room - bytes);
    b->bytes = bytes;
    return b->data;
}

static void *bytes_of(size_t n, akv_rng *rng)
{
    uint8_t *x = place(n);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint8_t)akv_rng_next(rng);
    return x;
}

static float *floats(size_t n, akv_rng *rng)
{
    float *x = place(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)random_unit(rng) - 0.25f;
    return x;
}

static double *doubles(size_t n, akv_rng *rng)
{
    double *x = place(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_unit(rng);
    return x;
}

static uint16_t *halves(size_t n, akv_rng *rng)
{
    uint16_t *x = place(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint16_t)(akv_rng_next(rng) & 0xbfff); /* finite, as f16 and as bf16 */
    return x;
}

static uint32_t *below(size_t n, uint32_t limit, akv_rng *rng)
{
    uint32_t *x = place(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint32_t)akv_rng_below(rng, limit);
    return x;
}

/* Whether the gaps are whole; a digest of all buffers, so that both places can be compared. */
static uint64_t collect(void)
{
    uint64_t digest = 0;
    int whole = 1;
    for (int i = 0; i < num_buffers; i++) {
        const buffer *b = &buffers[i];
        for (const uint8_t *p = b->map + page; p < b->data; p++)
            whole &= *p == CANARY;
        for (const uint8_t *p = b->data + b->bytes; p < b->map + b->map_bytes - page; p++)
            whole &= *p == CANARY;
        for (size_t at = 0; at < b->bytes; at++)
            digest = (digest ^ b->data[at]) * 0x100000001b3u;
        munmap(b->map, b->map_bytes);
    }
    num_buffers = 0;
    CHECK_MSG(whole, "%s writes beside a buffer", now);
    return digest;
}

/* The statements run with buffers before and behind a guard, from the same state of `rng`, and leave the same bytes. */
#define BOTH(isa, kernel, ...)                                                             \
    do {                                                                                   \
        uint64_t digest_[2];                                                               \
        const akv_rng start_ = rng;                                                        \
        snprintf(now, sizeof now, "%s %s", isa, kernel);                                   \
        for (int side_ = 0; side_ < 2; side_++) {                                          \
            behind = side_ != 0;                                                           \
            rng = start_;                                                                  \
            __VA_ARGS__;                                                                   \
            digest_[side_] = collect();                                                    \
            calls++;                                                                       \
        }                                                                                  \
        CHECK_MSG(digest_[0] == digest_[1], "%s depends on where its buffers lie", now);   \
    } while (0)

static const uint32_t dims[] = {2, 6, 10, 14, 16, 18, 30, 34, 64, 66, 80, 96, 112, 130, 256};
enum { DIMS = sizeof dims / sizeof dims[0] };

static void row_kernels(const akv_kernels *k)
{
    akv_rng rng = {1};
    for (uint32_t n = 0; n <= 70; n++) {
        BOTH(k->isa, "row_f32 f16", uint16_t *x = halves(n, &rng); k->row_f32(x, AKV_F16, n, floats(n, &rng)));
        BOTH(k->isa, "row_f32 bf16", uint16_t *x = halves(n, &rng); k->row_f32(x, AKV_BF16, n, floats(n, &rng)));
        BOTH(k->isa, "row_i8", int8_t *x = bytes_of(n, &rng); k->row_i8(x, n, floats(n, &rng)));
        BOTH(k->isa, "exp_sum", k->exp_sum(floats(n, &rng), n, 1.0f));
        BOTH(k->isa, "scale_max", k->scale_max(floats(n, &rng), n, 0.5f, -1.0f));
    }
    for (int d = 0; d < DIMS; d++)
        for (uint32_t rows = 1; rows <= 9; rows += rows < 5 ? 1 : 4) {
            const uint32_t dim = dims[d], n = 1 + (uint32_t)akv_rng_below(&rng, 40), stride = 1 + rows % 3;
            const akv_dtype dtype = d % 2 ? AKV_F16 : AKV_BF16;
            BOTH(k->isa, "rows_dot", float *q = floats((size_t)rows * dim, &rng), *x = floats(dim, &rng);
                 k->rows_dot(q, rows, x, dim, 0.5f, floats((rows - 1) * stride + 1, &rng), stride));
            BOTH(k->isa, "rows_axpy", float *w = floats((rows - 1) * stride + 1, &rng), *x = floats(dim, &rng);
                 k->rows_axpy(w, stride, rows, x, dim, floats((size_t)rows * dim, &rng)));
            for (int sign = -1; sign <= 1; sign += 2) {
                const int64_t xs = sign * (int64_t)(dim + rows % 2 * 3), first = sign < 0 ? -xs * (int64_t)(n - 1) : 0;
                const size_t numbers = (size_t)(n - 1) * (dim + rows % 2 * 3) + dim;
                BOTH(k->isa, "dense_dots", float *q = floats((size_t)rows * dim, &rng); uint16_t *x = halves(numbers, &rng);
                     k->dense_dots(q, rows, x + first, xs, dtype, n, dim, floats((rows - 1) * (n + 2) + n, &rng), n + 2));
                BOTH(k->isa, "dense_sums", float *w = floats((rows - 1) * (n + 2) + n, &rng); uint16_t *x = halves(numbers, &rng);
                     k->dense_sums(w, n + 2, rows, x + first, xs, dtype, n, dim, floats((size_t)rows * dim, &rng)));
            }
        }
}

static void turning_kernels(const akv_kernels *k)
{
    akv_rng rng = {2};
    for (int d = 0; d < DIMS; d++)
        for (int part = 0; part < 3; part++)
            for (int s = 0; s < 2; s++)
                for (uint32_t rows = 1; rows <= 5; rows += 2) {
                    const uint32_t dim = dims[d], rotary = part == 0 ? 0 : part == 1 ? dim : dim / 4 * 2, out = (rows - 1) * 3 + 1;
                    const akv_rope_style style = (akv_rope_style)s;
                    BOTH(k->isa, "turn_bf16", uint16_t *a = halves(dim, &rng);
                         float *c = floats(rotary / 2, &rng), *sine = floats(rotary / 2, &rng);
                         k->turn_bf16(a, dim, rotary, style, c, sine, floats(dim, &rng)));
                    BOTH(k->isa, "anchor_logits", uint16_t *a = halves(dim, &rng);
                         float *c = floats(rotary / 2, &rng), *sine = floats(rotary / 2, &rng), *q = floats((size_t)rows * dim, &rng);
                         k->anchor_logits(a, dim, rotary, style, c, sine, 0.5f, q, rows, floats(out, &rng), 3));
                    BOTH(k->isa, "centred_logits", int8_t *a = bytes_of(dim, &rng);
                         float *mean = floats(dim, &rng), *c = floats(rotary / 2, &rng), *sine = floats(rotary / 2, &rng);
                         float *q = floats((size_t)rows * dim, &rng);
                         k->centred_logits(a, 0.5f, mean, dim, rotary, style, c, sine, q, rows, floats(out, &rng), 3));
                }
}

static void group_kernels(const akv_kernels *k)
{
    akv_rng rng = {3};
    for (int d = 0; d < DIMS; d++)
        for (uint32_t g = 1; g <= AKV_GROUP_LANES; g++) {
            const uint32_t dim = dims[d], rows = 1 + g % 9;
            BOTH(k->isa, "unpack_group", uint8_t *x = bytes_of((size_t)g * ((dim * 2 + 7) / 8), &rng);
                 k->unpack_group(x, g, dim, 0.5f, 1.5f, floats((size_t)dim * AKV_GROUP_LANES, &rng)));
            for (uint32_t mix = 0; mix < 4; mix++) {
                static const uint8_t some[3] = {1, 2, 4};
                BOTH(k->isa, "unpack_level", uint8_t *widths = place(dim); uint32_t bits = 0;
                     for (uint32_t i = 0; i < dim; i++) bits += widths[i] = some[mix < 3 ? mix : (uint32_t)akv_rng_below(&rng, 3)];
                     uint8_t *x = bytes_of(((size_t)g * bits + 7) / 8, &rng);
                     k->unpack_level(x, g, widths, dim, floats((size_t)dim * AKV_GROUP_LANES, &rng)));
            }
            BOTH(k->isa, "group_dot", float *q = floats((size_t)rows * dim, &rng), *x = floats((size_t)dim * AKV_GROUP_LANES, &rng);
                 k->group_dot(q, rows, x, dim, floats((size_t)rows * AKV_GROUP_LANES, &rng)));
            BOTH(k->isa, "group_accumulate",
                 float *w = floats((size_t)rows * AKV_GROUP_LANES, &rng), *x = floats((size_t)dim * AKV_GROUP_LANES, &rng);
                 k->group_accumulate(w, rows, x, dim, floats((size_t)rows * dim, &rng)));
        }
}

static void kernels(void)
{
#define AKV_KERNELS(isa, level)                  \
    if (akv_cpu_runs(level)) {                   \
        row_kernels(&akv_kernels_##isa);         \
        turning_kernels(&akv_kernels_##isa);     \
        group_kernels(&akv_kernels_##isa);       \
    }
#include "kernels/kernels.def"
}

static void matrix_kernels(const akv_matrix_kernels *k)
{
    akv_rng rng = {4};
    for (int round = 0; round < 150; round++) {
        const size_t m = 1 + akv_rng_below(&rng, 40), n = 1 + akv_rng_below(&rng, 80), l = 1 + akv_rng_below(&rng, 50);
        const size_t more = akv_rng_below(&rng, 5);
        const bool add = round % 3 != 0;
        BOTH(k->isa, "multiply", float *a = floats((m - 1) * (l + more) + l, &rng), *b = floats((l - 1) * (n + more) + n, &rng);
             k->multiply(m, n, l, a, l + more, 1, b, n + more, add, floats((m - 1) * (n + more) + n, &rng), n + more));
        BOTH(k->isa, "multiply, a turned", float *a = floats((l - 1) * (m + more) + m, &rng), *b = floats((l - 1) * n + n, &rng);
             k->multiply(m, n, l, a, 1, m + more, b, n, add, floats((m - 1) * n + n, &rng), n));
        BOTH(k->isa, "transpose", float *x = floats((n - 1) * (l + more) + l, &rng);
             k->transpose(x, l + more, (uint32_t)n, (uint32_t)l, floats((l - 1) * (n + more) + n, &rng), n + more));
        BOTH(k->isa, "nearest", float *u = floats(m * l, &rng), *x = floats((l - 1) * (n + more) + n, &rng);
             uint32_t *nearest = below(n, 9, &rng);
             k->nearest(u, (uint32_t)m, (uint32_t)l, x, n + more, (uint32_t)n, nearest, floats(n, &rng)));
    }
}

static void matrices(void)
{
#define AKV_MATRICES(isa, level)    \
    if (akv_cpu_runs(level))        \
        matrix_kernels(&akv_matrix_##isa);
#include "kernels/kernels.def"
}

static void coder_kernels(const akv_coder_kernels *k)
{
    akv_rng rng = {5};
    for (uint32_t n = 0; n <= 70; n++) {
        const size_t stride = n + n % 3;
        BOTH(k->isa, "squares", float *x = floats(5 * (size_t)n, &rng), *mean = floats(n, &rng);
             k->squares(x, 5, n, n % 2 ? mean : NULL, floats(5, &rng)));
        BOTH(k->isa, "moments_add", float *x = floats(n, &rng); double *sum = doubles(n, &rng);
             k->moments_add(x, n, sum, doubles(n, &rng)));
        BOTH(k->isa, "scale_add", float *x = floats(n, &rng); k->scale_add(x, n, 0.5f, floats(n, &rng)));
        BOTH(k->isa, "shrink_left", float *x = floats(2 * stride + n, &rng), *energy = floats(n, &rng);
             k->shrink_left(x, stride, 3, n, energy, floats(n, &rng)));
        BOTH(k->isa, "leaves", float *energy = floats(n, &rng); k->leaves(floats(n, &rng), energy, n));
        BOTH(k->isa, "coverage_gain", float *x = floats(n, &rng); k->coverage_gain(x, floats(n, &rng), n));
        BOTH(k->isa, "coverage_take", float *x = floats(n, &rng); k->coverage_take(floats(n, &rng), x, n));
        BOTH(k->isa, "count_above", float *x = floats(n, &rng), *t = floats(3, &rng); k->count_above(x, n, t, 3, below(3, 9, &rng)));
        const akv_coder_query q = {0.5f, 0.125f, 0.4f, 0.6f, n % 2 ? 3.0f : 0.0f};
        BOTH(k->isa, "utility_add", const float *in[7]; for (int i = 0; i < 7; i++) in[i] = floats(n, &rng);
             float *u = floats(n, &rng); k->utility_add(&q, n, in[0], in[1], in[2], in[3], in[4], in[5], in[6], u, floats(n, &rng)));
    }
    for (int round = 0; round < 60; round++) {
        const uint32_t planes = (uint32_t)akv_rng_below(&rng, 65), dim = 2 * planes + (uint32_t)akv_rng_below(&rng, 20);
        const akv_rope_style style = round % 2 ? AKV_ROPE_HALF_SPLIT : AKV_ROPE_INTERLEAVED;
        BOTH(k->isa, "turn", float *x = floats(dim, &rng); double *a = doubles(2 * planes, &rng), *b = doubles(2 * planes, &rng);
             k->turn(x, dim, 2 * planes, style, a, b, round % 3 ? 1 : -1, 1.25, floats(dim, &rng)));
        /* whole lanes, as the contract allows, counted from the first token of each */
        const uint32_t before = round % 4 * 16, n = 1 + (uint32_t)akv_rng_below(&rng, 200), total = before + n + (uint32_t)round % 4;
        BOTH(k->isa, "spread", float *a = floats((total + 15) / 16 * 16, &rng);
             k->spread(a, before, n, total, round % 5 ? 0 : 4, 64, 0.9f, 0.3f, floats((n + 15) / 16 * 16, &rng));
             /* lanes beyond the end may hold anything */
             memset(buffers[1].data + n * sizeof(float), 0, buffers[1].bytes - n * sizeof(float)));
        const akv_coder_lanes lanes = {{(uint32_t)round % 4, (uint32_t)round / 4 % 4, (uint32_t)round / 16 % 4}};
        const uint32_t numbers = 16 * (lanes.by_width[0] + lanes.by_width[1] + lanes.by_width[2]);
        const size_t apart = 1 + (size_t)round % 17;
        BOTH(k->isa, "coded_sums", float *x = floats(numbers, &rng), *sigma = floats(numbers, &rng);
             k->coded_sums(x, sigma, &lanes, 1.5f, floats(3, &rng)));
        BOTH(k->isa, "code_numbers", float *x = floats(numbers, &rng);
             k->code_numbers(x, &lanes, 1.5f, bytes_of(numbers > 0 ? (numbers - 1) * apart + 1 : 0, &rng), apart));
    }
}

static void coders(void)
{
#define AKV_CODERS(isa, level)      \
    if (akv_cpu_runs(level))        \
        coder_kernels(&akv_coder_##isa);
#include "kernels/kernels.def"
}

/* --------------------------------------------------------------------------------------------------------------- quads */

static uint32_t whole(uint32_t n) { return (n + 15) / 16 * 16; }

static void quad_anchors(const akv_quad_kernels *k)
{
    akv_rng rng = {6};
    for (uint32_t bits = 1; bits <= 16; bits += bits < 8 ? 1 : 4)
        for (uint32_t n = 1; n <= 64; n += n < 18 ? 1 : 23)
            BOTH(k->isa, "unpack_anchors", uint8_t *index = bytes_of((n * bits + 7) / 8, &rng), *coeff = bytes_of((n + 1) / 2, &rng);
                 float *scales = floats((size_t)1 << bits, &rng); uint32_t *anchor = below(whole(n), 2, &rng);
                 k->unpack_anchors(index, bits, coeff, scales, n, anchor, floats(whole(n), &rng)));
    for (uint32_t pp = 32; pp <= 128; pp += 32)
        for (uint32_t fast = 0; fast <= pp; fast += pp / 4) {
            BOTH(k->isa, "turn_rows", float *rows = floats(16 * pp, &rng); double *c = doubles(pp, &rng), *s = doubles(pp, &rng);
                 double *step = doubles(2 * pp, &rng); int16_t *query = (int16_t *)halves(8 * pp, &rng);
                 k->turn_rows(rows, c, s, step, pp, query, floats(8 * pp, &rng)));
            BOTH(k->isa, "mean_logits", float *mean = floats(8 * pp, &rng), *table = floats(64 * fast, &rng);
                 float *moments = floats(6 * pp, &rng), *rest = floats(4, &rng);
                 k->mean_logits(mean, pp, table, fast, moments, rest, floats(256, &rng)));
        }
    static const uint32_t shapes[][2] = {{128, 128}, {64, 64}, {80, 80}, {96, 48}, {112, 112}, {256, 256},
                                         {192, 64},  {6, 6},   {2, 2},   {64, 0},  {10, 4},    {130, 66}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int style = 0; style < 2; style++)
            for (uint32_t n = 1; n <= 64; n += n < 17 ? 3 : 15) {
                const akv_quad_shape shape = akv_quad_shape_of(shapes[i][0], shapes[i][1], (akv_rope_style)style);
                const uint32_t width = akv_quad_width(&shape), count = 3;
                BOTH(k->isa, "anchor_logits", int8_t *a = bytes_of((size_t)count * shape.dim, &rng);
                     int16_t *turn = (int16_t *)halves((size_t)128 * shape.padded_planes, &rng);
                     int16_t *query = place((size_t)width * 8); memset(query, 1, (size_t)width * 8);
                     uint32_t *anchor = below(whole(n), count, &rng); float *weight = floats(whole(n), &rng), *scale = floats(4, &rng);
                     for (uint32_t t = n; t < whole(n); t++) anchor[t] = 0, weight[t] = 0;
                     for (size_t e = 0; e < (size_t)128 * shape.padded_planes; e++) turn[e] = (int16_t)(turn[e] / 2);
                     k->anchor_logits(a, &shape, turn, query, anchor, weight, scale, n, floats(whole(n) * 4, &rng), a, 64));
            }
}

static void quad_codes(const akv_quad_kernels *k)
{
    static const uint32_t widths[][3] = {{4, 4, 4}, {1, 2, 3}, {0, 0, 5}, {0, 7, 0}, {9, 0, 0}, {3, 21, 41}, {128, 0, 0}, {0, 0, 1}, {0, 0, 0}};
    static const uint32_t counts[] = {1, 2, 3, 15, 16, 17, 31, 33, 200, 1024};
    akv_rng rng = {7};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            const uint32_t n = counts[c], *w = widths[i];
            akv_quad_level level = {{w[0], w[1], w[2]}, 4 * w[0] + 2 * w[1] + w[2], 0};
            akv_level_list list = {0};
            level.fours = akv_quad_fours(level.by_width);
            for (uint32_t part = 0; part < 3; part++)
                for (uint32_t m = 0; m < w[part]; m++) {
                    list.coord[list.count] = (uint16_t)list.count;
                    list.width[list.count++] = (uint8_t)(4 >> part);
                }
            memcpy(list.by_width, w, sizeof list.by_width);
            list.bits = level.bits;
            const size_t run_bytes = akv_run_bytes(n, level.bits);
            BOTH(k->isa, "quantise_level", float *z = floats(list.count * 4, &rng); int8_t *query = bytes_of(level.fours * 32, &rng);
                 int32_t *bias = (int32_t *)below(8, 9, &rng); k->quantise_level(z, &list, query, bias, floats(4, &rng)));
            BOTH(k->isa, "code_dots", uint8_t *run = bytes_of(run_bytes, &rng); int8_t *query = bytes_of(level.fours * 32, &rng);
                 int32_t *bias = (int32_t *)below(8, 9, &rng); float *scale = floats(4, &rng); uint16_t *slots = halves(n, &rng);
                 for (uint32_t t = 0; t < n; t++) slots[t] = (uint16_t)((t * 77 + 5) % 1024);
                 k->code_dots(run, n, &level, query, bias, scale, slots, floats(4096, &rng)));
            BOTH(k->isa, "code_sums", uint8_t *run = bytes_of(run_bytes, &rng); uint16_t *slots = halves(n, &rng);
                 float *weights = floats(4096, &rng); uint8_t *scratch = place(24576);
                 for (uint32_t t = 0; t < n; t++) slots[t] = (uint16_t)((t * 77 + 5) % 1024);
                 k->code_sums(run, n, &level, slots, weights, scratch, floats(level.fours * 64, &rng)); memset(scratch, 0, 24576));
            BOTH(k->isa, "place_sums", float *sums = floats(level.fours * 64, &rng);
                 k->place_sums(sums, &list, floats(list.count * 4, &rng)));
        }
    for (uint32_t levels = 1; levels <= 15; levels += 2)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            const uint32_t n = counts[c], planes = akv_level_planes(levels), row = (n + 7) / 8 + levels % 2 * 5;
            BOTH(k->isa, "sort_levels", uint8_t *bits = place((planes - 1) * row + (n + 7) / 8);
                 memset(bits, levels == 1 ? 0x11 : 0, (planes - 1) * row + (n + 7) / 8);
                 const uint32_t room = (1024 + AKV_QUAD_SPARE_SLOTS) * 2; uint16_t *slots = place(room);
                 uint32_t *first = below(levels + 2, 9, &rng);
                 k->sort_levels(bits, row, planes, n, levels, slots, first); memset(slots, 0, room));
        }
    for (uint32_t coords = 1; coords <= AKV_QUAD_MAX_DIM; coords += coords < 70 ? 1 : 17)
        BOTH(k->isa, "list_level", uint8_t *row = bytes_of((coords + 3) / 4, &rng); akv_level_list *list = place(sizeof *list);
             k->list_level(row, coords, list); memset(list, 0, sizeof *list));
}

static void quad_sums(const akv_quad_kernels *k)
{
    akv_rng rng = {8};
    for (uint32_t n = 16; n <= 1024; n *= 2) {
        BOTH(k->isa, "row_max", float *x = floats(n * 4, &rng); k->row_max(x, n, floats(4, &rng)));
        BOTH(k->isa, "exp_sum", float *x = floats(n * 4, &rng), *max = place(16);
             for (int r = 0; r < 4; r++) max[r] = 1; k->exp_sum(x, n, max, floats(4, &rng)));
    }
    for (uint32_t n = 1; n <= 64; n++)
        BOTH(k->isa, "histogram", uint32_t *anchor = below(n, 7, &rng); float *weight = floats(n, &rng);
             float *weights = floats(whole(n) * 4, &rng); k->histogram(anchor, weight, n, weights, floats(7 * 4, &rng)));
    for (int d = 0; d < DIMS; d++)
        for (uint32_t n = 1; n <= 20; n += n < 5 ? 1 : 5) {
            const uint32_t dim = dims[d], rows = 1 + n % 9;
            BOTH(k->isa, "bytes_sum", float *w = floats(n * 4, &rng); int8_t *x = bytes_of((size_t)n * dim, &rng);
                 k->bytes_sum(w, x, n, dim, floats(4 * dim, &rng)));
            BOTH(k->isa, "bytes_dot", float *q = floats(4 * dim, &rng); int8_t *x = bytes_of((size_t)n * dim, &rng);
                 k->bytes_dot(q, x, n, dim, floats(n * 4, &rng)));
            BOTH(k->isa, "tile_dots", float *x = floats((size_t)rows * dim, &rng), *columns = floats((size_t)dim * 64, &rng);
                 k->tile_dots(x, rows, dim, columns, floats(rows * 64, &rng)));
            BOTH(k->isa, "tile_sums", float *w = floats((rows - 1) * (n + 3) + n, &rng), *x = floats((size_t)n * dim, &rng);
                 k->tile_sums(w, n + 3, rows, x, n, dim, floats((size_t)rows * dim, &rng)));
        }
}

static void quads(void)
{
#define AKV_QUADS(isa, level)            \
    if (akv_cpu_runs(level)) {           \
        quad_anchors(&akv_quad_##isa);   \
        quad_codes(&akv_quad_##isa);     \
        quad_sums(&akv_quad_##isa);      \
    }
#include "kernels/kernels.def"
}

static void shared(void)
{
    akv_rng rng = {9};
    for (uint32_t n = 0; n <= 70; n++) {
        BOTH("any", "akv_dot_f32", float *x = floats(n, &rng); CHECK(isfinite(akv_dot_f32(x, floats(n, &rng), n))));
        BOTH("any", "akv_axpy_f32", float *x = floats(n, &rng); akv_axpy_f32(0.5f, x, floats(n, &rng), n));
        BOTH("any", "akv_hadamard_f32", akv_hadamard_f32(floats(2 * n, &rng), 2 * n));
        BOTH("any", "akv_turn_f32", float *x = floats(2 * n + 4, &rng); double *c = doubles(n, &rng), *s = doubles(n, &rng);
             akv_turn_f32(x, 2 * n + 4, 2 * n, n % 2 ? AKV_ROPE_HALF_SPLIT : AKV_ROPE_INTERLEAVED, c, s, 1.5, floats(2 * n + 4, &rng)));
    }
}

/* A whole step: the segment's bytes, the dense tail, queries, output and workspace, each beside a guard. */
static void attention(void)
{
    akv_rng rng = {10};
    for (int kind = 0; kind < 6; kind++)
        for (uint32_t tail = 0; tail <= 33; tail += 11) {
            const akv_dtype dtype = (akv_dtype)(kind % 3);
            spec s = {.name = "guards", .S = kind % 2 ? 90 : 1050, .H = 2, .G = 3, .dk = 22, .dv = 14, .W = 4, .rotary = 12, .keep = 1};
            akv_segment *made = kind < 3 ? random_ladder_segment(&s, 9, 0.4, (uint64_t)kind) : random_segment(&s, 9, 0, 0, (uint64_t)kind);
            size_t bytes = 0, ws_bytes = 0;
            const void *blob = akv_segment_data(made, &bytes);
            BOTH("any", "akv_attend", void *data = place(bytes); memcpy(data, blob, bytes); akv_segment *segment = NULL;
                 akv_diag diag = {0}; akv_attend_params p; akv_attend_params_init(&p);
                 CHECK_STATUS(akv_segment_open(data, bytes, 0, NULL, &segment, &diag), AKV_OK, &diag);
                 const akv_segment *list[1] = {segment};
                 p.num_kv_heads = 2; p.gqa_group = 3; p.head_dim_k = 22; p.head_dim_v = 14; p.num_queries = 2; p.sm_scale = 0.2;
                 p.segments = list; p.num_segments = 1; p.tail_tokens = tail;
                 p.queries = akv_tensor_contiguous(floats(6 * 2 * 22, &rng), AKV_F32, 2, 22);
                 p.tail_keys = akv_tensor_contiguous(dtype == AKV_F32 ? (void *)floats(2 * tail * 22, &rng) : halves(2 * tail * 22, &rng),
                                                     dtype, tail, 22);
                 p.tail_values = akv_tensor_contiguous(dtype == AKV_F32 ? (void *)floats(2 * tail * 14, &rng) : halves(2 * tail * 14, &rng),
                                                       dtype, tail, 14);
                 p.out = floats(6 * 2 * 14, &rng); p.out_stride_head = 2 * 14; p.out_stride_token = 14;
                 p.state_max = floats(12, &rng); p.state_sum = floats(12, &rng);
                 CHECK_STATUS(akv_attend_workspace_bytes(&p, &ws_bytes, &diag), AKV_OK, &diag);
                 ws_bytes = (ws_bytes + 63) / 64 * 64; /* its end is as aligned as its beginning must be */
                 void *ws = place(ws_bytes); CHECK_STATUS(akv_attend(&p, ws, ws_bytes, &diag), AKV_OK, &diag);
                 memset(ws, 0, ws_bytes); akv_segment_release(segment));
            akv_segment_release(made);
        }
}

int main(int argc, char **argv)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    signal(SIGSEGV, touched);
    signal(SIGBUS, touched);
    TEST_INIT(argc, argv);
    TEST(kernels);
    TEST(matrices);
    TEST(coders);
    TEST(quads);
    TEST(shared);
    TEST(attention);
    printf("  %lu calls beside guard pages\n", calls);
    return TEST_DONE();
}
