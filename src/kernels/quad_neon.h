/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_neon.h - what the two NEON variants of quad.h share: key anchors. They include it after AKV_ISA; what they do not
 * have of their own is quad_body.h, which the compiler turns into NEON by itself, as every 64-bit ARM has it.
 */
#define AKV_QUAD_OWN_ANCHORS 1
#define AKV_QUAD_OWN_CODES 1
#define AKV_QUAD_OWN_BYTES_SUM 1
#include "kernels/quad.h"

#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes);
static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits);
static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums);
static void bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out);
#include "kernels/quad_body.h"

/* 8 bytes at p; those at and beyond `count` as 0. */
INLINE int8x8_t eight_bytes(const int8_t *p, uint32_t count)
{
    if (count >= 8)
        return vld1_s8(p);
    int8_t some[8] = {0};
    memcpy(some, p, count);
    return vld1_s8(some);
}

/* Bytes times 256. */
INLINE int16x8_t times_256(int8x8_t x)
{
    return vreinterpretq_s16_s8(vzip1q_s8(vdupq_n_s8(0), vcombine_s8(x, x)));
}

/* The first and the second coordinates of 8 planes from plane j on, times 256. */
INLINE void eight_planes(const int8_t *a, uint32_t j, const akv_quad_shape *shape, bool eights, int16x8_t *x0, int16x8_t *x1)
{
    const uint32_t left = eights ? 8 : shape->planes - j;
    if (shape->style == AKV_ROPE_HALF_SPLIT) {
        *x0 = times_256(eight_bytes(a + j, left));
        *x1 = times_256(eight_bytes(a + shape->planes + j, left));
        return;
    }
    int16x8_t pairs;
    if (left >= 8) {
        pairs = vreinterpretq_s16_s8(vld1q_s8(a + 2 * j));
    } else {
        int8_t some[16] = {0};
        memcpy(some, a + 2 * j, 2 * left);
        pairs = vreinterpretq_s16_s8(vld1q_s8(some));
    }
    *x0 = vshlq_n_s16(pairs, 8);
    *x1 = vandq_s16(pairs, vdupq_n_s16((int16_t)0xff00));
}

/* Sums of the products of eight coordinates, apart for the low and the high four: of each alone only the sum modulo 2^32 matters. */
typedef struct two_sums {
    int32x4_t low, high;
} two_sums;

INLINE two_sums add_eight(two_sums s, int16x8_t x, int16x8_t q)
{
    const two_sums next = {vmlal_s16(s.low, vget_low_s16(x), vget_low_s16(q)), vmlal_high_s16(s.high, x, q)};
    return next;
}

/* The contract's four sums of a row, pairs of coordinates by their place among eight, which do stay within 32 bits. */
INLINE float32x4_t four_sums(two_sums s)
{
    return vcvtq_f32_s32(vpaddq_s32(s.low, s.high));
}

/*
 * Two tokens at a time share the loads of the queries; what lies behind the last token is anchor 0 with weight 0. eights: planes and
 * rest are multiples of 8 (a call of memcpy anywhere in the loop would send all sums to memory and back).
 */
INLINE void logits_of_anchors(const int8_t *anchors, const akv_quad_shape *shape, bool eights, const int16_t *turn16,
                              const int16_t *query16, const uint32_t *anchor, const float *weight, const float *scale, uint32_t n,
                              float *logits)
{
    const uint32_t P = shape->planes, PP = shape->padded_planes;
    const float32x4_t scales = vld1q_f32(scale);
    for (uint32_t t = 0; t < n; t += 2) {
        const int8_t *a[2] = {anchors + (size_t)anchor[t] * shape->dim, anchors + (size_t)anchor[t + 1] * shape->dim};
        two_sums sum[2][4]; /* [token][row] */
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            sum[i / 4][i % 4].low = sum[i / 4][i % 4].high = vdupq_n_s32(0);
        for (uint32_t j = 0; j < P; j += 8) {
            const int16_t *q = query16 + j / 32 * 256 + j % 32 / 8 * 32;
            int16x8_t y0[2], y1[2];
#pragma GCC unroll 2
            for (uint32_t k = 0; k < 2; k++) {
                const int16_t *turn = turn16 + (size_t)(t + k) * 2 * PP + j / 32 * 64 + j % 32;
                const int16x8_t c = vld1q_s16(turn), s = vld1q_s16(turn + 32);
                int16x8_t x0, x1;
                eight_planes(a[k], j, shape, eights, &x0, &x1);
                /* vqrdmulh is mulr of the contract, since cosine and sine are never -1 in 2^-15 */
                y0[k] = vsubq_s16(vqrdmulhq_s16(x0, c), vqrdmulhq_s16(x1, s));
                y1[k] = vaddq_s16(vqrdmulhq_s16(x0, s), vqrdmulhq_s16(x1, c));
            }
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++) {
                const int16x8_t q0 = vld1q_s16(q + 8 * r), q1 = vld1q_s16(q + 128 + 8 * r);
#pragma GCC unroll 2
                for (uint32_t k = 0; k < 2; k++)
                    sum[k][r] = add_eight(add_eight(sum[k][r], y0[k], q0), y1[k], q1);
            }
        }
        for (uint32_t i = 0; i < shape->rest; i += 8)
#pragma GCC unroll 2
            for (uint32_t k = 0; k < 2; k++) {
                const int16x8_t x = vshll_n_s8(eight_bytes(a[k] + 2 * P + i, eights ? 8 : shape->rest - i), 7);
#pragma GCC unroll 4
                for (uint32_t r = 0; r < 4; r++)
                    sum[k][r] = add_eight(sum[k][r], x, vld1q_s16(query16 + (size_t)PP * 8 + i * 4 + 8 * r));
            }
#pragma GCC unroll 2
        for (uint32_t k = 0; k < 2; k++) {
            const float32x4_t s01 = vpaddq_f32(four_sums(sum[k][0]), four_sums(sum[k][1]));
            const float32x4_t s23 = vpaddq_f32(four_sums(sum[k][2]), four_sums(sum[k][3]));
            float *out = logits + (size_t)akv_quad_slot(t + k) * 4;
            vst1q_f32(out, vfmaq_f32(vld1q_f32(out), vmulq_n_f32(scales, weight[t + k]), vpaddq_f32(s01, s23)));
        }
    }
}

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes)
{
    akv_quad_fetch(ahead, ahead_bytes);
    if ((shape->planes | shape->rest) % 8 == 0)
        logits_of_anchors(anchors, shape, true, turn16, query16, anchor, weight, scale, n, logits);
    else
        logits_of_anchors(anchors, shape, false, turn16, query16, anchor, weight, scale, n, logits);
}

/* 16 dimensions at a time stay in registers over all rows. A row whose weights are all 0 is skipped. */
static void bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    uint32_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        float32x4_t sum[4][4]; /* [row][4 dimensions each] */
#pragma GCC unroll 16
        for (uint32_t k = 0; k < 16; k++)
            sum[k / 4][k % 4] = vld1q_f32(out + k / 4 * dim + i + k % 4 * 4);
        for (uint32_t a = 0; a < n; a++) {
            const float32x4_t weight = vld1q_f32(w + (size_t)a * 4);
            if (vmaxvq_u32(vmvnq_u32(vceqzq_f32(weight))) == 0)
                continue;
            const int8x16_t x = vld1q_s8(rows + (size_t)a * dim + i);
            const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
            const float32x4_t f[4] = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                                      vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
#pragma GCC unroll 4
            for (uint32_t k = 0; k < 4; k++) {
                sum[0][k] = vfmaq_laneq_f32(sum[0][k], f[k], weight, 0);
                sum[1][k] = vfmaq_laneq_f32(sum[1][k], f[k], weight, 1);
                sum[2][k] = vfmaq_laneq_f32(sum[2][k], f[k], weight, 2);
                sum[3][k] = vfmaq_laneq_f32(sum[3][k], f[k], weight, 3);
            }
        }
#pragma GCC unroll 16
        for (uint32_t k = 0; k < 16; k++)
            vst1q_f32(out + k / 4 * dim + i + k % 4 * 4, sum[k / 4][k % 4]);
    }
    for (; i < dim; i++)
        for (uint32_t a = 0; a < n; a++)
            for (uint32_t r = 0; r < 4; r++)
                out[r * dim + i] += w[a * 4 + r] * (float)rows[(size_t)a * dim + i];
}

/* The next codes: of four coordinates where there are four, else copied to `room`, so that nothing is read behind them. */
INLINE const uint8_t *four_codes(const uint8_t *codes, uint32_t some, uint32_t bytes, uint8_t room[32])
{
    if (some >= 4)
        return codes;
    memset(room, 0, 32);
    memcpy(room, codes, (size_t)some * bytes);
    return room;
}

/*
 * Weights times gains of a run -> products [groups][16 places][4 rows] at the start of scratch, token t of a group at place
 * 4 (t mod 4) + t / 4, places without a token 0; the largest of each row.
 */
INLINE float32x4_t weight_products(const uint8_t *run, uint32_t n, const uint16_t *slots, const float *weights, float *products)
{
    float32x4_t largest = vdupq_n_f32(0.0f);
    if (n % 16 != 0)
        memset(products + (size_t)(n / 16) * 64, 0, 256);
    for (uint32_t i = 0; i < n; i++) {
        const float32x4_t w = vmulq_n_f32(vld1q_f32(weights + (size_t)slots[i] * 4), gain_at(run, i));
        largest = vmaxnmq_f32(w, largest);
        vst1q_f32(products + (size_t)akv_quad_slot(i) * 4, w);
    }
    return largest;
}

/* Places 4 k .. 4 k + 3 of a group, one row: whole numbers up to 65535. */
INLINE uint32x4_t whole_weights(float32x4_t products, float inverse)
{
    return vcvtnq_u32_f32(vmulq_n_f32(products, inverse));
}

/* One row of a group, its 16 places in order. */
INLINE void row_weights(const float32x4x4_t fours[4], uint32_t row, float inverse, uint16x8_t out[2])
{
    out[0] = vcombine_u16(vmovn_u32(whole_weights(fours[0].val[row], inverse)), vmovn_u32(whole_weights(fours[1].val[row], inverse)));
    out[1] = vcombine_u16(vmovn_u32(whole_weights(fours[2].val[row], inverse)), vmovn_u32(whole_weights(fours[3].val[row], inverse)));
}
