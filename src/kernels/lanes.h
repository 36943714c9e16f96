/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lanes.h - 16 floats at a time in the compiler's generic vectors, for files compiled once per instruction set. A wider machine
 * uses fewer registers for the same lanes, so every instruction set gives the same bits.
 */
#ifndef AKV_LANES_H
#define AKV_LANES_H

#include "core/base.h"

#if defined(__AVX512F__) || defined(__F16C__)
#  include <immintrin.h> /* included by files that have asked for the instruction set before */
#elif defined(__aarch64__) && defined(__ARM_NEON)
#  include <arm_neon.h>
#endif

#ifdef __GNUC__
#  pragma GCC diagnostic ignored "-Wpsabi" /* returned vectors never cross a function that is not inlined */
#endif

#define LANES 16
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
#define INLINE static inline __attribute__((always_inline))

INLINE f32x16 load_f32(const float *p)
{
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Macros and pointers where a vector goes in: passing one by value has no stable ABI without the matching target. */
#define store_f32(p, v)                                                                                                \
    do {                                                                                                               \
        f32x16 stored_ = (v);                                                                                          \
        memcpy((p), &stored_, sizeof stored_);                                                                         \
    } while (0)

INLINE f32x16 load_bf16(const uint16_t *p)
{
    u16x16 h;
    memcpy(&h, p, sizeof h);
    return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

INLINE f32x16 load_f16(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__F16C__)
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)));
    f32x16 v;
    memcpy(&v, &low, sizeof low);
    memcpy((char *)&v + sizeof low, &high, sizeof high);
    return v;
#elif defined(__aarch64__) && defined(__ARM_NEON)
    f32x16 v;
    for (int i = 0; i < 4; i++) {
        const float32x4_t four = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
        memcpy((char *)&v + sizeof four * (size_t)i, &four, sizeof four);
    }
    return v;
#else
    u16x16 h;
    memcpy(&h, p, sizeof h);
    u32x16 x = __builtin_convertvector(h, u32x16), mag = x & 0x7fffu;
    f32x16 v = (f32x16)(mag << 13) * 0x1p112f; /* exponent bias repaired exactly, subnormals included */
    u32x16 special = (u32x16)(mag >= 0x7c00u) & 0x7f800000u;
    return (f32x16)((u32x16)v | special | ((x & 0x8000u) << 16));
#endif
}

INLINE float sum_lanes(const f32x16 *v)
{
    float a[LANES];
    memcpy(a, v, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            a[l] += a[l + half];
    return a[0];
}

INLINE float dot(const float *a, const float *b, uint32_t n)
{
    f32x16 acc = {0};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        acc += load_f32(a + i) * load_f32(b + i);
    if (i < n) {
        float x[LANES] = {0}, y[LANES] = {0};
        memcpy(x, a + i, (n - i) * sizeof *x);
        memcpy(y, b + i, (n - i) * sizeof *y);
        acc += load_f32(x) * load_f32(y);
    }
    return sum_lanes(&acc);
}

INLINE void axpy(float w, const float *x, float *y, uint32_t n)
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_f32(y + i, load_f32(y + i) + w * load_f32(x + i));
    for (; i < n; i++)
        y[i] += w * x[i];
}

/*
 * The vector DENSE_AHEAD further on towards the caches: dense attention waits for memory, and what the hardware fetches ahead ends
 * at each page.
 */
#define DENSE_AHEAD 24
INLINE void fetch_ahead(const uint16_t *x, int64_t x_stride, uint32_t dim)
{
#ifdef __GNUC__
    const char *at = (const char *)(x + DENSE_AHEAD * x_stride);
    for (uint32_t i = 0; i < dim * 2; i += 64)
        __builtin_prefetch(at + i, 0, 3);
#else
    (void)x, (void)x_stride, (void)dim;
#endif
}

#endif
