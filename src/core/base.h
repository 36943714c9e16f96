/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - what every folder of the core needs: failing with a sentence, checked arithmetic, 16-bit floats, reading a
 * tensor element, rounding up, seeded random numbers. No codec maths.
 */
#ifndef AKV_BASE_H
#define AKV_BASE_H

/*
 * Sizes of caches do not fit into 32 bits, and the bytes of a segment are used where they lie. A compiler that does not
 * tell its byte order is taken at its user's word; a file read in the wrong one is refused by its magic number.
 */
#if defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ < 8
#  error "AnchorKV needs a 64-bit target: key/value caches are larger than 32-bit sizes can say"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#  error "AnchorKV needs a little-endian target: segments and files are little-endian and used in place"
#endif

#include "anchorkv/anchorkv.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

_Static_assert(sizeof(void *) >= 8 && sizeof(size_t) >= 8, "AnchorKV needs a 64-bit target");

#if defined(__GNUC__)
#  define AKV_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#  define AKV_PRINTF(a, b)
#endif

/* Write the message (if diag is not NULL) and return status, so that callers can `return akv_fail(...)`. */
akv_status akv_fail(akv_diag *diag, akv_status status, const char *format, ...) AKV_PRINTF(3, 4);
#ifdef __clang_analyzer__ /* it does not see into the other file that what is given is what is returned */
#  define akv_fail(diag, status, ...) (akv_fail(diag, status, __VA_ARGS__), (status))
#endif

#define AKV_TRY(expr)                                                                                                  \
    do {                                                                                                               \
        akv_status try_status_ = (expr);                                                                               \
        if (try_status_ != AKV_OK)                                                                                     \
            return try_status_;                                                                                        \
    } while (0)

/* Hooks with NULL resolved to libc. akv_alloc returns 64-byte aligned memory or NULL; bytes == 0 gives 1 byte. */
void *akv_alloc(const akv_allocator *allocator, size_t bytes);
void akv_free(const akv_allocator *allocator, void *ptr, size_t bytes);

/* Hook with NULL resolved to a serial loop. */
void akv_parallel_for(const akv_executor *executor, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks);

static inline bool akv_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (a != 0 && b > UINT64_MAX / a)
        return false;
    *out = a * b;
    return true;
}

static inline bool akv_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (b > UINT64_MAX - a)
        return false;
    *out = a + b;
    return true;
}

static inline uint64_t akv_round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

static inline uint64_t akv_div_up(uint64_t n, uint64_t by)
{
    return (n + by - 1) / by;
}

static inline uint32_t akv_popcount8(uint8_t x)
{
    uint32_t v = x;
    v = v - ((v >> 1) & 0x55u);
    v = (v & 0x33u) + ((v >> 2) & 0x33u);
    return (v + (v >> 4)) & 0x0fu;
}

/* ------------------------------------------------------------------------------------------------- 16-bit floats */

static inline uint32_t akv_bits_f32(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float akv_f32_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline float akv_bf16_to_f32(uint16_t h)
{
    return akv_f32_bits((uint32_t)h << 16);
}

/* Round to nearest even; the input is finite. Values that would round to infinity saturate. */
static inline uint16_t akv_f32_to_bf16(float x)
{
    uint32_t u = akv_bits_f32(x);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    if ((r & 0x7f80u) == 0x7f80u && (u & 0x7f800000u) != 0x7f800000u)
        r = (r & 0x8000u) | 0x7f7fu;
    return (uint16_t)r;
}

static inline float akv_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t mag = h & 0x7fffu;
    if (mag >= 0x7c00u) /* infinity, NaN */
        return akv_f32_bits(sign | 0x7f800000u | ((mag & 0x3ffu) << 13));
    /* Shift the fields into place and repair the exponent bias by an exact multiplication, subnormals included. */
    return akv_f32_bits(sign | akv_bits_f32(akv_f32_bits(mag << 13) * 0x1p112f));
}

/* Round to nearest even; the input is finite. Magnitudes above 65504 saturate. */
static inline uint16_t akv_f32_to_f16(float x)
{
    uint32_t u = akv_bits_f32(x);
    uint16_t sign = (uint16_t)((u >> 16) & 0x8000u);
    float mag = akv_f32_bits(u & 0x7fffffffu);
    if (mag >= 65520.0f)
        return (uint16_t)(sign | 0x7bffu);
    if (mag < 0x1p-14f) /* subnormal: add a constant whose ulp is 2^-24, so the hardware rounds */
        return (uint16_t)(sign | (akv_bits_f32(mag + 0.5f) - akv_bits_f32(0.5f)));
    u = akv_bits_f32(mag);
    u += 0xfffu + ((u >> 13) & 1u);
    return (uint16_t)(sign | ((u - (112u << 23)) >> 13));
}

static inline uint32_t akv_dtype_bytes(akv_dtype dtype)
{
    return dtype == AKV_F32 ? 4u : 2u;
}

/* Element [head, token, dim] of a view as f32 (exact for every dtype). */
static inline float akv_tensor_at(const akv_tensor *t, int64_t head, int64_t token, int64_t dim)
{
    int64_t at = head * t->stride_head + token * t->stride_token + dim * t->stride_dim;
    if (t->dtype == AKV_F32)
        return ((const float *)t->data)[at];
    uint16_t h = ((const uint16_t *)t->data)[at];
    return t->dtype == AKV_F16 ? akv_f16_to_f32(h) : akv_bf16_to_f32(h);
}

/* Row [head, token, 0..dim) of a view as f32. */
void akv_tensor_row(const akv_tensor *t, int64_t head, int64_t token, uint32_t dim, float *out);

/* ------------------------------------------------------------------------------------------------ seeded random */

/* SplitMix64: small, fast, the same everywhere. */
typedef struct akv_rng {
    uint64_t state;
} akv_rng;

static inline uint64_t akv_mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t akv_rng_next(akv_rng *rng)
{
    rng->state += 0x9e3779b97f4a7c15u;
    return akv_mix64(rng->state);
}

/* Unbiased in [0, n), n >= 1 (rejection). */
static inline uint64_t akv_rng_below(akv_rng *rng, uint64_t n)
{
    uint64_t limit = UINT64_MAX - UINT64_MAX % n;
    uint64_t x;
    do
        x = akv_rng_next(rng);
    while (x >= limit);
    return x % n;
}

/* An independent stream for each (seed, purpose, index). */
static inline akv_rng akv_rng_stream(uint64_t seed, uint64_t purpose, uint64_t index)
{
    akv_rng rng = {akv_mix64(akv_mix64(akv_mix64(seed + 0x9e3779b97f4a7c15u) ^ purpose) + index)};
    return rng;
}

enum { AKV_RNG_SIGNS_K = 1, AKV_RNG_SIGNS_V = 2, AKV_RNG_ANCHORS = 3, AKV_RNG_RANK = 4 };

/* The sign flips of a side, +1 or -1 per coordinate, from bit 0 upwards of successive draws of its stream. */
void akv_signs(uint64_t seed, int side, uint32_t dim, float *out);

#endif
