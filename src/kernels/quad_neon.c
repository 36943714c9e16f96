/* SPDX-License-Identifier: Apache-2.0 */
/* quad_neon.c - the quad kernels for every 64-bit ARM. Products of codes are 16 bits wide; quad_neon_dot.c has wider ones. */
#if defined(__aarch64__) && defined(__ARM_NEON)
#define AKV_ISA(name) name##_neon
#define AKV_ISA_NAME "neon"
#include "kernels/quad_neon.h"

/* Steps of one coordinate of 16 residuals, from 8, 4 or 2 bytes of codes, as bytes. */
INLINE int8x16_t steps16(const uint8_t *codes, int w)
{
    static const int8_t even2[16] = {-10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10};
    static const int8_t odd2[16] = {-10, -10, -10, -10, -3, -3, -3, -3, 3, 3, 3, 3, 10, 10, 10, 10};
    static const uint8_t bit_of1[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    if (w == 2) {
        const uint8x16_t set = vtstq_u8(vcombine_u8(vdup_n_u8(codes[0]), vdup_n_u8(codes[1])), vld1q_u8(bit_of1));
        return vsubq_s8(vdupq_n_s8(-1), vreinterpretq_s8_u8(vaddq_u8(set, set))); /* set is -1 */
    }
    if (w == 1) {
        uint32_t word;
        memcpy(&word, codes, 4);
        const uint8x16_t v = vreinterpretq_u8_u32(vdupq_n_u32(word));
        const uint8x16_t two = vzip1q_u8(vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8(v, 4)); /* two residuals each */
        return vzip1q_s8(vqtbl1q_s8(vld1q_s8(even2), two), vqtbl1q_s8(vld1q_s8(odd2), two));
    }
    const uint8x8_t v = vld1_u8(codes);
    const uint8x8_t low = vand_u8(v, vdup_n_u8(15)), high = vshr_n_u8(v, 4);
    return vqtbl1q_s8(vld1q_s8(akv_level_steps4), vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
}

/* acc[row][4 residuals each] += steps of coordinate c of a four * query: [rows 0, 1][4 coordinates], [rows 2, 3][4]. */
#define ADD_ROW(r, q, lane)                                                                                            \
    do {                                                                                                               \
        acc[r][0] = vmlal_laneq_s16(acc[r][0], vget_low_s16(low), q, lane);                                            \
        acc[r][1] = vmlal_high_laneq_s16(acc[r][1], low, q, lane);                                                     \
        acc[r][2] = vmlal_laneq_s16(acc[r][2], vget_low_s16(high), q, lane);                                           \
        acc[r][3] = vmlal_high_laneq_s16(acc[r][3], high, q, lane);                                                    \
    } while (0)
#define ADD_COORDINATE(c)                                                                                              \
    do {                                                                                                               \
        const int8x16_t s = steps16(four + (c) * bytes, w);                                                            \
        const int16x8_t low = vmovl_s8(vget_low_s8(s)), high = vmovl_high_s8(s);                                       \
        ADD_ROW(0, q01, c);                                                                                            \
        ADD_ROW(1, q01, (c) + 4);                                                                                      \
        ADD_ROW(2, q23, c);                                                                                            \
        ADD_ROW(3, q23, (c) + 4);                                                                                      \
    } while (0)

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *all_query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits)
{
    uint8_t room[AKV_QUAD_MAX_DIM * 8], last[32];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES;
        const uint8_t *codes = run + (n + 1) / 2 + (size_t)(at / AKV_GROUP_LANES) * 2 * level->bits;
        if (g < AKV_GROUP_LANES) {
            fill_group(codes, g, level, room);
            codes = room;
        }
        const int8_t *query = all_query;
        int32x4_t acc[4][4]; /* [row][4 residuals each] */
        for (uint32_t i = 0; i < 16; i++)
            acc[i / 4][i % 4] = vdupq_n_s32(0);
#pragma GCC unroll 3
        for (int w = 0; w < 3; w++) {
            const uint32_t bytes = 8u >> w, count = level->by_width[w];
            for (uint32_t i = 0; i < count; i += 4, query += 32) {
                /* query = 256 * first + second fits 16 bits; padding is 0 */
                const int8x16_t first = vld1q_s8(query), second = vld1q_s8(query + 16);
                const int16x8_t q01 = vaddw_s8(times_256(vget_low_s8(first)), vget_low_s8(second));
                const int16x8_t q23 = vaddw_high_s8(times_256(vget_high_s8(first)), second);
                const uint32_t some = count - i < 4 ? count - i : 4;
                const uint8_t *four = four_codes(codes, some, bytes, last);
                ADD_COORDINATE(0);
                ADD_COORDINATE(1);
                ADD_COORDINATE(2);
                ADD_COORDINATE(3);
                codes += some * bytes;
            }
        }
        float sum[16][4]; /* [residual][row] */
        for (uint32_t k = 0; k < 4; k++) {
            float32x4x4_t rows;
            for (uint32_t r = 0; r < 4; r++)
                rows.val[r] = vmulq_n_f32(vcvtq_f32_s32(acc[r][k]), scale[r]);
            vst4q_f32(sum[4 * k], rows);
        }
        for (uint32_t l = 0; l < g; l++) {
            float *out = logits + (size_t)slots[at + l] * 4;
            vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), vld1q_f32(sum[l]), gain_at(run, at + l)));
        }
    }
    (void)bias; /* for variants whose levels are unsigned */
}

/*
 * Weights w of 0..65535 meet steps as w - 32768, which is 16 bits signed; 32768 times the sum of the steps is added afterwards. A sum
 * of the at most 256 tokens of a lane stays within 32 bits.
 */
static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    const uint32_t groups = (n + 15) / 16, full = n / 16;
    float *products = (float *)(void *)scratch;                    /* 16 KiB */
    int16_t *whole = (int16_t *)(void *)(scratch + 16 * 1024); /* [groups][4 rows][16 tokens], 8 KiB */
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    float top[4], unit[4], inverse[4];
    vst1q_f32(top, weight_products(run, n, slots, weights, products));
    for (uint32_t r = 0; r < 4; r++) {
        unit[r] = top[r] * (1.0f / 65535.0f);
        inverse[r] = top[r] > 1e-30f ? 65535.0f / top[r] : 0.0f;
    }
    for (uint32_t k = 0; k < groups; k++) {
        const float *from = products + (size_t)k * 64;
        const float32x4x4_t fours[4] = {vld4q_f32(from), vld4q_f32(from + 16), vld4q_f32(from + 32), vld4q_f32(from + 48)};
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            uint16x8_t places[2];
            row_weights(fours, r, inverse[r], places);
            /* places back into the order of the tokens: 4 x 4 transposed */
            const uint16x8_t a = vzip1q_u16(places[0], places[1]), b = vzip2q_u16(places[0], places[1]);
            const uint16x8_t sign = vdupq_n_u16(0x8000);
            vst1q_s16(whole + k * 64 + r * 16, vreinterpretq_s16_u16(veorq_u16(vzip1q_u16(a, b), sign)));
            vst1q_s16(whole + k * 64 + r * 16 + 8, vreinterpretq_s16_u16(veorq_u16(vzip2q_u16(a, b), sign)));
        }
    }
    const uint8_t *codes = run + (n + 1) / 2;
    if (full < groups)
        fill_group(codes + (size_t)full * 2 * level->bits, n % 16, level, room);
    uint32_t offset = 0;
#pragma GCC unroll 3
    for (int w = 0; w < 3; w++) {
        const uint32_t bytes = 8u >> w, count = level->by_width[w];
        for (uint32_t i = 0; w == 2 && count != 0 && i < groups * 64; i++) /* kept less 2^15 */
            whole[i] = (int16_t)(257 * (int32_t)akv_quad_weight8((uint32_t)(whole[i] + 32768)) - 32768);
        for (uint32_t i = 0; i < count; i++, offset += bytes) {
            int32x4_t sum[4], steps = vdupq_n_s32(0);
            for (uint32_t r = 0; r < 4; r++)
                sum[r] = vdupq_n_s32(0);
            for (uint32_t k = 0; k < groups; k++) {
                const int8x16_t s = steps16((k < full ? codes + (size_t)k * 2 * level->bits : room) + offset, w);
                const int16x8_t s0 = vmovl_s8(vget_low_s8(s)), s1 = vmovl_high_s8(s), both = vaddq_s16(s0, s1);
                const int16_t *u = whole + k * 64;
                steps = vaddw_high_s16(vaddw_s16(steps, vget_low_s16(both)), both);
#pragma GCC unroll 4
                for (uint32_t r = 0; r < 4; r++) {
                    const int16x8_t u0 = vld1q_s16(u + r * 16), u1 = vld1q_s16(u + r * 16 + 8);
                    sum[r] = vmlal_high_s16(vmlal_s16(sum[r], vget_low_s16(s0), vget_low_s16(u0)), s0, u0);
                    sum[r] = vmlal_high_s16(vmlal_s16(sum[r], vget_low_s16(s1), vget_low_s16(u1)), s1, u1);
                }
            }
            for (uint32_t r = 0; r < 4; r++) {
                float *out = sums + (size_t)(i / 4) * 64 + r * 16 + i % 4 * 4;
                const int32x4_t all = vaddq_s32(sum[r], vshlq_n_s32(steps, 15));
                vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), vcvtq_f32_s32(all), unit[r]));
            }
        }
        sums += (size_t)((count + 3) / 4) * 64;
    }
}
#else
typedef int akv_no_quad_neon; /* a translation unit must not be empty */
#endif
