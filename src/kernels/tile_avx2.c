/* SPDX-License-Identifier: Apache-2.0 */
/* tile_avx2.c - tile.h for AVX2. Products of 16 bits (vpmaddwd, vpaddd) take as many instructions as those in f32, so there are none. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#  else
#    pragma GCC target("avx2,fma")
#  endif
#  include "kernels/tile_body.h"

const akv_tile_kernels akv_tile_avx2 = {"avx2", anchor_row, turn, NULL};
#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_tile_avx2; /* a translation unit must not be empty */
#endif
