/* SPDX-License-Identifier: Apache-2.0 */
/* cases.c - see cases.h. */
#include "cases.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

void *must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "the test itself ran out of memory\n");
        exit(2);
    }
    return p;
}

double random_unit(akv_rng *rng)
{
    return (double)(akv_rng_next(rng) >> 11) * 0x1p-53;
}

double random_gauss(akv_rng *rng)
{
    double u = random_unit(rng), v = random_unit(rng);
    return sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v);
}

akv_tensor tensor_make(uint64_t heads, uint64_t tokens, uint32_t dim, akv_dtype dtype, int layout, void **memory)
{
    akv_tensor t = {NULL, dtype, 0, 0, 1};
    uint64_t elements = 0, offset = 0;
    switch (layout) {
    case LAY_CONTIGUOUS:
        t = akv_tensor_contiguous(NULL, dtype, tokens, dim);
        elements = heads * tokens * dim;
        break;
    case LAY_PADDED:
        t.stride_token = (int64_t)dim + 3;
        t.stride_head = (int64_t)tokens * t.stride_token + 5;
        elements = heads * (uint64_t)t.stride_head;
        break;
    case LAY_TRANSPOSED:
        t.stride_token = 1;
        t.stride_dim = (int64_t)tokens + 1;
        t.stride_head = (int64_t)dim * t.stride_dim;
        elements = heads * (uint64_t)t.stride_head;
        break;
    case LAY_TOKEN_MAJOR:
        t.stride_head = dim;
        t.stride_token = (int64_t)heads * dim;
        elements = heads * tokens * dim;
        break;
    default: /* LAY_REVERSED */
        t.stride_dim = -2;
        t.stride_token = -2 * (int64_t)dim - 1;
        t.stride_head = (int64_t)tokens * t.stride_token;
        elements = heads * (uint64_t)-t.stride_head;
        offset = elements - 1;
        break;
    }
    *memory = must(calloc(elements + 1, akv_dtype_bytes(dtype)));
    t.data = (uint8_t *)*memory + offset * akv_dtype_bytes(dtype);
    t.dtype = dtype;
    return t;
}

void tensor_set(const akv_tensor *t, uint64_t head, uint64_t token, uint64_t dim, double x)
{
    int64_t at = (int64_t)head * t->stride_head + (int64_t)token * t->stride_token + (int64_t)dim * t->stride_dim;
    if (t->dtype == AKV_F32) {
        ((float *)(uintptr_t)t->data)[at] = (float)x;
        return;
    }
    uint16_t h;
    if (isfinite(x))
        h = t->dtype == AKV_F16 ? akv_f32_to_f16((float)x) : akv_f32_to_bf16((float)x);
    else /* the narrowing functions take finite input only */
        h = t->dtype == AKV_F16 ? (uint16_t)(isnan(x) ? 0x7e00 : x > 0 ? 0x7c00 : 0xfc00)
                                : (uint16_t)(isnan(x) ? 0x7fc0 : x > 0 ? 0x7f80 : 0xff80);
    ((uint16_t *)(uintptr_t)t->data)[at] = h;
}

double cases_rope_base = 10000;

/* inv_freq over the rotary part. */
static double *frequencies(uint32_t rotary)
{
    double *f = must(malloc((rotary / 2 + 1) * sizeof *f));
    for (uint32_t j = 0; j < rotary / 2; j++)
        f[j] = pow(cases_rope_base, -2.0 * j / rotary);
    return f;
}

void fixture_make(const spec *s, fixture *f)
{
    enum { CENTRES = 10 };
    akv_rng rng = akv_rng_stream(s->seed, 1000, 0);
    memset(f, 0, sizeof *f);
    akv_layer *l = &f->layer;
    akv_layer_init(l);
    akv_config_init(&f->config);
    f->config.profile = AKV_PROFILE_PAPER;
    f->config.keep_ratio = s->keep;
    f->config.seed = s->seed;
    l->shape.num_tokens = s->S;
    l->shape.num_kv_heads = s->H;
    l->shape.gqa_group = s->G;
    l->shape.head_dim_k = s->dk;
    l->shape.head_dim_v = s->dv;
    l->shape.rotary_dim = s->rotary;
    l->shape.num_queries = s->W;
    l->shape.has_positions = s->gaps != 0;
    l->shape.dtype = s->dtype;
    l->layer_index = 3;
    l->first_position = s->first_position;
    f->inv_freq = frequencies(s->rotary);
    l->rope = (akv_rope){s->rotary, s->style, s->magnitude > 0 ? s->magnitude : 1.0, f->inv_freq};
    l->sm_scale = 1 / sqrt((double)s->dk);
    l->logit_softcap = s->softcap;
    f->positions = must(malloc(s->S * sizeof *f->positions));
    int32_t at = s->first_position;
    for (uint64_t p = 0; p < s->S; p++) {
        f->positions[p] = at;
        at += 1 + (s->gaps ? (int32_t)akv_rng_below(&rng, 4) : 0);
    }
    if (s->gaps)
        l->positions = f->positions;

    l->keys = tensor_make(s->H, s->S, s->dk, s->dtype, s->layout_k, &f->memory[0]);
    l->values = tensor_make(s->H, s->S, s->dv, s->dtype, s->layout_v, &f->memory[1]);
    l->queries = tensor_make((uint64_t)s->H * s->G, s->W, s->dk, s->dtype, s->layout_q, &f->memory[2]);

    uint32_t most = s->dk > s->dv ? s->dk : s->dv;
    double *centre = must(malloc((uint64_t)(CENTRES + 1) * most * sizeof *centre));
    double *x = must(malloc(most * sizeof *x));
    for (uint32_t h = 0; h < s->H; h++)
        for (int side = 0; side < 2; side++) {
            uint32_t dim = side == 0 ? s->dk : s->dv;
            for (uint64_t i = 0; i < (uint64_t)(CENTRES + 1) * dim; i++)
                centre[i] = random_gauss(&rng);
            for (uint64_t p = 0; p < s->S; p++) {
                const double *c = centre + akv_rng_below(&rng, CENTRES) * dim;
                const double *bias = centre + (uint64_t)CENTRES * dim;
                double length = 0.5 + random_unit(&rng);
                for (uint32_t i = 0; i < dim; i++)
                    x[i] = length * (c[i] + (side == 0 ? 0.7 * bias[i] : 0) + 0.5 * random_gauss(&rng));
                if (side == 0)
                    ref_rope_rotate(&l->rope, f->positions[p], x);
                for (uint32_t i = 0; i < dim; i++)
                    tensor_set(side == 0 ? &l->keys : &l->values, h, p, i, x[i]);
            }
        }
    /* each query points partly at some key, so that attention has peaks */
    for (uint32_t qh = 0; qh < s->H * s->G; qh++)
        for (uint32_t r = 0; r < s->W; r++) {
            uint64_t target = akv_rng_below(&rng, s->S);
            for (uint32_t i = 0; i < s->dk; i++)
                tensor_set(&l->queries, qh, r, i,
                           0.5 * akv_tensor_at(&l->keys, qh / s->G, (int64_t)target, i) + random_gauss(&rng));
        }
    free(centre);
    free(x);
}

void fixture_free(fixture *f)
{
    for (int i = 0; i < 3; i++)
        free(f->memory[i]);
    free(f->positions);
    free(f->inv_freq);
    memset(f, 0, sizeof *f);
}

/* ------------------------------------------------------------------------------------------------- random segment */

akv_segment *random_segment(const spec *s, uint32_t num_anchors, double density, uint32_t flags, uint64_t seed)
{
    akv_rng rng = akv_rng_stream(seed, 1001, 0);
    uint64_t S = s->S, H = s->H, map_bytes = (S + 7) / 8;
    uint32_t dim[2] = {s->dk, s->dv};

    /* which tokens own a residual */
    uint8_t *maps[2];
    uint64_t n[2] = {0, 0};
    for (int side = 0; side < 2; side++) {
        maps[side] = must(calloc(H * map_bytes + 1, 1));
        for (uint64_t h = 0; h < H; h++)
            for (uint64_t p = 0; p < S; p++)
                if (random_unit(&rng) < density) {
                    maps[side][h * map_bytes + p / 8] |= (uint8_t)(1u << (p % 8));
                    n[side]++;
                }
    }

    akv_header h = {0};
    h.magic = AKV_SEGMENT_MAGIC;
    h.major = AKV_SEGMENT_MAJOR;
    h.minor = AKV_SEGMENT_MINOR;
    h.header_bytes = sizeof h;
    h.num_tokens = S;
    h.seed = seed;
    h.sm_scale = 1 / sqrt((double)s->dk);
    h.logit_softcap = s->softcap;
    h.magnitude = s->magnitude > 0 ? s->magnitude : 1;
    h.kind = AKV_SEGMENT_COMPRESSED;
    h.profile = AKV_PROFILE_PAPER;
    h.flags = flags;
    h.num_kv_heads = s->H;
    h.gqa_group = s->G;
    h.rotary_dim = s->rotary;
    h.rope_style = (uint32_t)s->style;
    h.num_anchors = num_anchors;
    h.num_queries = s->W;
    h.first_position = s->first_position;
    h.last_position = s->first_position + (int32_t)S - 1 + (s->gaps ? (int32_t)S : 0);
    h.num_sections = AKV_SEC_COUNT;
    uint64_t bytes[AKV_SEC_COUNT] = {0};
    bytes[AKV_SEC_INV_FREQ] = s->rotary / 2 * 8;
    bytes[AKV_SEC_POSITIONS] = s->gaps ? S * 4 : 0;
    bytes[AKV_SEC_ANCHOR_TOKENS] = H * num_anchors * 4;
    for (int side = 0; side < 2; side++) {
        h.head_dim[side] = dim[side];
        h.num_residuals[side] = n[side];
        bytes[AKV_SEC_ANCHORS + side] = H * num_anchors * dim[side] * 2;
        bytes[AKV_SEC_INDEX + side] = H * S * (num_anchors <= 256 ? 1 : 2);
        bytes[AKV_SEC_COEFF + side] = H * S * 2;
        bytes[AKV_SEC_LEVELS + side] = H * map_bytes;
        bytes[AKV_SEC_RANKS + side] = (H * ((S + AKV_BLOCK_TOKENS - 1) / AKV_BLOCK_TOKENS) + 1) * 8;
        bytes[AKV_SEC_GAINS + side] = n[side] * 2;
        bytes[AKV_SEC_CODES + side] = n[side] * ((dim[side] * 2 + 7) / 8);
    }
    uint64_t at = sizeof h;
    for (int id = 0; id < AKV_SEC_COUNT; id++) {
        h.sections[id].offset = bytes[id] > 0 ? at : 0;
        h.sections[id].bytes = bytes[id];
        at += (bytes[id] + 63) / 64 * 64;
    }
    h.total_bytes = h.budget_bytes = at;

    akv_segment *segment = must(akv_segment_new(NULL, at));
    uint8_t *blob = (uint8_t *)(uintptr_t)segment->blob;
    memcpy(blob, &h, sizeof h);
    double *freq = frequencies(s->rotary);
    if (bytes[AKV_SEC_INV_FREQ] > 0)
        memcpy(blob + h.sections[AKV_SEC_INV_FREQ].offset, freq, bytes[AKV_SEC_INV_FREQ]);
    free(freq);
    if (s->gaps) { /* every second position */
        int32_t *pos = (int32_t *)(void *)(blob + h.sections[AKV_SEC_POSITIONS].offset);
        for (uint64_t p = 0; p < S; p++)
            pos[p] = s->first_position + 2 * (int32_t)p + (p + 1 == S);
        ((akv_header *)(void *)blob)->last_position = pos[S - 1];
    }
    uint32_t *tokens = (uint32_t *)(void *)(blob + h.sections[AKV_SEC_ANCHOR_TOKENS].offset);
    for (uint64_t i = 0; i < H * num_anchors; i++)
        tokens[i] = (uint32_t)((i % num_anchors) * S / num_anchors);
    for (int side = 0; side < 2; side++) {
        uint16_t *anchors = (uint16_t *)(void *)(blob + h.sections[AKV_SEC_ANCHORS + side].offset);
        for (uint64_t i = 0; i < H * num_anchors * dim[side]; i++)
            anchors[i] = akv_f32_to_bf16((float)random_gauss(&rng));
        uint8_t *index = blob + h.sections[AKV_SEC_INDEX + side].offset;
        uint16_t *coeff = (uint16_t *)(void *)(blob + h.sections[AKV_SEC_COEFF + side].offset);
        for (uint64_t i = 0; i < H * S; i++) {
            uint64_t c = akv_rng_below(&rng, num_anchors);
            if (num_anchors <= 256)
                index[i] = (uint8_t)c;
            else
                ((uint16_t *)(void *)index)[i] = (uint16_t)c;
            coeff[i] = akv_f32_to_f16((float)(random_gauss(&rng)));
        }
        uint64_t *ranks = (uint64_t *)(void *)(blob + h.sections[AKV_SEC_RANKS + side].offset), before = 0;
        for (uint64_t head = 0; head < H; head++)
            for (uint64_t p = 0; p < S; p++) {
                if (p % AKV_BLOCK_TOKENS == 0)
                    *ranks++ = before;
                before += (maps[side][head * map_bytes + p / 8] >> (p % 8)) & 1u;
            }
        *ranks = before;
        if (n[side] > 0) {
            memcpy(blob + h.sections[AKV_SEC_LEVELS + side].offset, maps[side], H * map_bytes);
            uint16_t *gains = (uint16_t *)(void *)(blob + h.sections[AKV_SEC_GAINS + side].offset);
            for (uint64_t i = 0; i < n[side]; i++)
                gains[i] = akv_f32_to_f16((float)(0.1 + random_unit(&rng)));
            /* codes: a whole number of bytes a residual when dim is a multiple of 4; odd halves need their padding 0 */
            uint8_t *codes = blob + h.sections[AKV_SEC_CODES + side].offset;
            uint32_t code_bytes = (dim[side] * 2 + 7) / 8;
            uint64_t done = 0;
            for (uint64_t head = 0; head < H; head++)
                for (uint64_t block = 0; block < S; block += AKV_BLOCK_TOKENS) {
                    uint64_t run = 0;
                    for (uint64_t p = block; p < S && p < block + AKV_BLOCK_TOKENS; p++)
                        run += (maps[side][head * map_bytes + p / 8] >> (p % 8)) & 1u;
                    for (uint64_t r = 0; r < run; r += AKV_GROUP_LANES) {
                        uint64_t g = run - r < AKV_GROUP_LANES ? run - r : AKV_GROUP_LANES;
                        for (uint64_t c = 0; c < g * dim[side]; c++)
                            codes[(done + r) * code_bytes + c / 4] |= (uint8_t)(akv_rng_below(&rng, 4) << (c % 4 * 2));
                    }
                    done += run;
                }
        }
        free(maps[side]);
    }
    return segment;
}

/* ----------------------------------------------------------------------------------------------- counting allocator */

static pthread_mutex_t counter_lock = PTHREAD_MUTEX_INITIALIZER;

enum { COUNTER_ROOM = 64 }; /* before each block: its size */

static void *counter_alloc(void *opaque, size_t bytes, size_t align)
{
    counter *c = opaque;
    pthread_mutex_lock(&counter_lock);
    c->total++;
    int fail = c->fail_at != 0 && (c->once ? c->total == c->fail_at : c->total >= c->fail_at);
    if (align == 0 || align > 64 || (align & (align - 1)) != 0)
        c->misaligned_ask++;
    if (!fail) {
        c->live++;
        c->live_bytes += bytes;
        c->peak_bytes = c->live_bytes > c->peak_bytes ? c->live_bytes : c->peak_bytes;
    }
    pthread_mutex_unlock(&counter_lock);
    if (fail)
        return NULL;
    uint8_t *p = must(aligned_alloc(64, COUNTER_ROOM + (bytes + 63) / 64 * 64));
    memcpy(p, &bytes, sizeof bytes);
    memset(p + COUNTER_ROOM, c->fill, bytes);
    return p + COUNTER_ROOM;
}

static void counter_free(void *opaque, void *ptr, size_t bytes)
{
    counter *c = opaque;
    uint8_t *p = (uint8_t *)ptr - COUNTER_ROOM;
    size_t was;
    memcpy(&was, p, sizeof was);
    pthread_mutex_lock(&counter_lock);
    c->bad_free += was != bytes;
    c->live--;
    c->live_bytes -= was;
    pthread_mutex_unlock(&counter_lock);
    free(p);
}

void counter_init(counter *c)
{
    memset(c, 0, sizeof *c);
    c->hooks = (akv_allocator){c, counter_alloc, counter_free};
    c->fill = 0xa5;
}

/* ---------------------------------------------------------------------------------------------------- executors */

static void backwards(void *opaque, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks)
{
    (void)opaque;
    for (size_t task = num_tasks; task-- > 0;)
        fn(arg, task);
}

const akv_executor reversed_executor = {NULL, backwards, 1};
