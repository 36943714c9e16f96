/* SPDX-License-Identifier: Apache-2.0 */
/* coder_avx2.c - coder.h compiled for AVX2 (no FMA: contraction would change bits between variants). */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#  else
#    pragma GCC target("avx2,f16c")
#  endif
#  define AKV_ISA(name) name##_avx2
#  define AKV_ISA_NAME "avx2"
#  include "kernels/coder_body.h"
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_coder_avx2; /* a translation unit must not be empty */
#endif
