/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.c - the kernels compiled for AVX-512 F, BW, DQ, VL. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#  else
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#  endif
#  define AKV_ISA(name) name##_avx512
#  define AKV_ISA_NAME "avx512"
#  define AKV_OWN_SUMS 1 /* body_avx2.h */
#  include <immintrin.h>
#  include "kernels/body.h"
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_avx512; /* a translation unit must not be empty */
#endif
