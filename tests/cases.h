/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cases.h - what the tests share: layers with realistic random content in every memory layout, segments with random
 * valid bytes, counting allocators, executors.
 */
#ifndef AKV_TEST_CASES_H
#define AKV_TEST_CASES_H

#include "anchorkv/akv_experimental.h"
#include "anchorkv/anchorkv.h"
#include "core/base.h"
#include "core/segment.h"
#include "ref/ref.h"

/* How a tensor lies in memory. */
enum layout {
    LAY_CONTIGUOUS,
    LAY_PADDED,     /* odd gaps between rows and heads */
    LAY_TRANSPOSED, /* [head, dim, token]: stride_token 1 */
    LAY_TOKEN_MAJOR,/* [token, head, dim]: how many engines keep queries */
    LAY_REVERSED,   /* negative strides, two elements apart */
    LAY_COUNT
};

/* Base of the rotary embeddings that fixtures and random segments have; 10000 unless a test says otherwise. */
extern double cases_rope_base;

typedef struct spec {
    const char *name;
    uint64_t S;
    uint32_t H, G, dk, dv, W;
    uint32_t rotary;
    akv_rope_style style;
    double magnitude; /* 0 = 1 */
    double softcap;
    akv_dtype dtype;
    int layout_k, layout_v, layout_q;
    int32_t first_position;
    int gaps;         /* positions with random gaps */
    double keep;
    uint64_t seed;
} spec;

typedef struct fixture {
    akv_layer layer;
    akv_config config;
    void *memory[3];
    int32_t *positions;
    double *inv_freq;
} fixture;

/* A layer of gaussian clusters (keys biased, clustered before the rotation; queries lean on some keys), never fails:
 * exits. */
void fixture_make(const spec *s, fixture *f);
void fixture_free(fixture *f);

double random_unit(akv_rng *rng);  /* [0, 1) */
double random_gauss(akv_rng *rng); /* mean 0, variance 1 */

/* A tensor of zeros; *memory is to be freed. */
akv_tensor tensor_make(uint64_t heads, uint64_t tokens, uint32_t dim, akv_dtype dtype, int layout, void **memory);
void tensor_set(const akv_tensor *t, uint64_t head, uint64_t token, uint64_t dim, double x); /* rounds to the dtype */

/*
 * A segment whose bytes are random but valid: anchors, indices, coefficients, codes drawn blindly; `density` of the
 * tokens own a residual. Needs no codec. flags as in layout.h.
 */
akv_segment *random_segment(const spec *s, uint32_t num_anchors, double density, uint32_t flags, uint64_t seed);

/*
 * The same in the LADDER coding: number of levels, widths of the bases, tables, order of the key coordinates drawn too.
 * akv_segment_open takes it.
 */
akv_segment *random_ladder_segment(const spec *s, uint32_t num_anchors, double density, uint64_t seed);

/* An allocator that counts, fills new memory with a pattern, and can be told to fail. */
typedef struct counter {
    akv_allocator hooks;
    uint64_t live_bytes, live, total, peak_bytes;
    uint64_t fail_at;                          /* allocation number n (from 1) and later ones fail; 0 = never */
    uint8_t once;                              /* only allocation number fail_at fails */
    uint64_t bad_free;                         /* frees whose size differs from the allocation's */
    uint64_t misaligned_ask;                   /* asks for more than 64 or no power of two */
    uint8_t fill;
} counter;
void counter_init(counter *c);

/* Executors: the library's pool, and one that runs the tasks backwards on the calling thread. */
extern const akv_executor reversed_executor;

void *must(void *p); /* exits with a message when p is NULL: tests do not run out of memory */

#endif
