/* SPDX-License-Identifier: Apache-2.0 */
/* matrix_neon.c - matrix.h with fused multiply-adds, which every 64-bit ARM has: the bits are those of AVX2 and AVX-512. */
#if defined(__aarch64__) && defined(__ARM_NEON)
#  include "core/base.h"
#  include <arm_neon.h>

typedef float32x4_t vec;
typedef int32_t ivec __attribute__((vector_size(16)));
#  define VL 4
#  define ROWS 8
#  define SPLAT(x) vdupq_n_f32(x)
#  define FMA(a, b, c) vfmaq_f32(c, a, b)
#  define SQUARE 4

static inline void transpose_square(const float *x, size_t ldx, float *out, size_t ldo)
{
    const float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + ldx), c = vld1q_f32(x + 2 * ldx), d = vld1q_f32(x + 3 * ldx);
    const float32x4_t ac = vzip1q_f32(a, c), bd = vzip1q_f32(b, d), AC = vzip2q_f32(a, c), BD = vzip2q_f32(b, d);
    vst1q_f32(out, vzip1q_f32(ac, bd));
    vst1q_f32(out + ldo, vzip2q_f32(ac, bd));
    vst1q_f32(out + 2 * ldo, vzip1q_f32(AC, BD));
    vst1q_f32(out + 3 * ldo, vzip2q_f32(AC, BD));
}

#  define AKV_ISA(name) name##_neon
#  define AKV_ISA_NAME "neon"
#  include "kernels/matrix_body.h"
#else
typedef int akv_no_matrix_neon; /* a translation unit must not be empty */
#endif
