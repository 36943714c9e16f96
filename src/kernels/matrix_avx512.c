/* SPDX-License-Identifier: Apache-2.0 */
/* matrix_avx512.c - matrix.h for AVX-512 F, BW, DQ, VL. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#  endif
#  include "core/base.h"
#  include <immintrin.h>

typedef __m512 vec;
typedef int32_t ivec __attribute__((vector_size(64)));
#  define VL 16
#  define ROWS 8
#  define SPLAT(x) _mm512_set1_ps(x)
#  define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#  define SQUARE 16

static inline void transpose_square(const float *x, size_t ldx, float *out, size_t ldo)
{
    __m512 r[16], t[16];
    for (size_t i = 0; i < 16; i++)
        r[i] = _mm512_loadu_ps(x + i * ldx);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* r[i + c]: column c of every lane, rows i to i + 3 */
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (size_t c = 0; c < 4; c++) {
        const __m512 low = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), high = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const __m512 low2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const __m512 high2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_ps(out + c * ldo, _mm512_shuffle_f32x4(low, low2, 0x88));
        _mm512_storeu_ps(out + (8 + c) * ldo, _mm512_shuffle_f32x4(low, low2, 0xdd));
        _mm512_storeu_ps(out + (4 + c) * ldo, _mm512_shuffle_f32x4(high, high2, 0x88));
        _mm512_storeu_ps(out + (12 + c) * ldo, _mm512_shuffle_f32x4(high, high2, 0xdd));
    }
}

#  define AKV_ISA(name) name##_avx512
#  define AKV_ISA_NAME "avx512"
#  include "kernels/matrix_body.h"
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_matrix_avx512; /* a translation unit must not be empty */
#endif
