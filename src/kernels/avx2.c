/* SPDX-License-Identifier: Apache-2.0 */
/* avx2.c - the kernels compiled for AVX2 (no FMA: contraction would change bits between variants). */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#  else
#    pragma GCC target("avx2,f16c")
#  endif
#  define AKV_ISA(name) name##_avx2
#  define AKV_ISA_NAME "avx2"
#  define AKV_OWN_SUMS 1 /* body_avx2.h */
#  define AKV_OWN_LOOPS 1
#  include <immintrin.h>
#  include "kernels/body.h"
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_avx2; /* a translation unit must not be empty */
#endif
