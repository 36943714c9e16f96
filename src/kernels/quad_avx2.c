/* SPDX-License-Identifier: Apache-2.0 */
/* quad_avx2.c - quad.h for AVX2 with FMA. */
#if defined(__x86_64__) && defined(__GNUC__)
#  ifdef __clang__
#    pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#  else
#    pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt")
#  endif
#include "kernels/quad_avx2.h"
#include "kernels/quad_avx2_keys.h"
#include "kernels/quad_avx2_codes.h"
#include "kernels/quad_avx2_values.h"
#include "kernels/quad_avx2_sums.h"

const akv_quad_kernels akv_quad_avx2 = {
    "avx2",     unpack_anchors, turn_rows, mean_logits, anchor_logits, sort_levels,
    list_level, quantise_level, code_dots, code_sums,   place_sums,    row_max,
    exp_sum,    histogram,      bytes_sum, bytes_dot,   tile_dots,     tile_sums,
    NULL,
};

#  ifdef __clang__
#    pragma clang attribute pop
#  endif
#else
typedef int akv_no_quad_avx2; /* a translation unit must not be empty */
#endif
