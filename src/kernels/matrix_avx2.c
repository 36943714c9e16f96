/* SPDX-License-Identifier: Apache-2.0 */
/* matrix_avx2.c - matrix.h for AVX2 with FMA. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#  else
#    pragma GCC target("avx2,fma")
#  endif
#  include "core/base.h"
#  include <immintrin.h>

typedef __m256 vec;
typedef int32_t ivec __attribute__((vector_size(32)));
#  define VL 8
#  define ROWS 4
#  define SPLAT(x) _mm256_set1_ps(x)
#  define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#  define SQUARE 8

static inline void transpose_square(const float *x, size_t ldx, float *out, size_t ldo)
{
    __m256 r[8], t[8];
    for (size_t i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps(x + i * ldx);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (size_t i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * ldo, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * ldo, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

#  define AKV_ISA(name) name##_avx2
#  define AKV_ISA_NAME "avx2"
#  include "kernels/matrix_body.h"
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_matrix_avx2; /* a translation unit must not be empty */
#endif
