/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_neon_dot.c - the quad kernels for 64-bit ARM with dot products of bytes (ARMv8.2 dotprod: Cortex-A76, Neoverse N1 and later).
 * One instruction multiplies four bytes in each of four lanes, so codes are taken four coordinates of 16 residuals at a time.
 */
#include "kernels/cpu.h"
#if AKV_HAVE_NEON_DOT
#  ifndef __ARM_FEATURE_DOTPROD
#    pragma GCC target("arch=armv8.2-a+dotprod")
#  endif
#define AKV_ISA(name) name##_neon_dot
#define AKV_ISA_NAME "neondot"
#include "kernels/quad_neon.h"

/*
 * Residual 4 g + f of a group is byte g of vector f, as half-bytes of codes come out of memory: all of a lane are of one coordinate.
 * SQUARE makes the lane the g and the byte the coordinate instead.
 */
static const uint8_t square[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
/* Half-byte g of coordinate c from its two bytes: the byte, and how far it is moved. */
static const uint8_t byte_of1[2][16] = {{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7},
                                        {0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7}};
static const int8_t shift_of1[2][16] = {{0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4},
                                        {0, 0, 0, 0, -4, -4, -4, -4, 0, 0, 0, 0, -4, -4, -4, -4}};

/*
 * Half-bytes of four coordinates (32, 16 or 8 bytes of codes) that hold vectors 2 half and 2 half + 1: those of four bits each
 * have their own, narrower ones share one. squared: lane and byte exchanged.
 */
INLINE void half_bytes(const uint8_t *codes, int w, int half, int squared, uint8x16_t out[2])
{
    if (w == 2) {
        const uint8x8_t v = vld1_u8(codes);
        const uint8x16_t each = vqtbl1q_u8(vcombine_u8(v, v), vld1q_u8(byte_of1[squared]));
        out[0] = out[1] = vandq_u8(vshlq_u8(each, vld1q_s8(shift_of1[squared])), vdupq_n_u8(15));
        return;
    }
    uint8x16_t v = vld1q_u8(codes);
    if (w == 0) {
        const uint8x16_t more = vld1q_u8(codes + 16);
        v = half == 0 ? vuzp1q_u8(v, more) : vuzp2q_u8(v, more);
    }
    if (squared)
        v = vqtbl1q_u8(v, vld1q_u8(square));
    const uint8x16_t low = vandq_u8(v, vdupq_n_u8(15)), high = vshrq_n_u8(v, 4);
    out[0] = w == 0 || half == 0 ? low : high;
    out[1] = w == 0 || half == 1 ? high : low;
}

/* Steps by half-byte: [width][vector f]. */
static const int8_t step_of[3][4][16] = {
    {{-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104},
     {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104},
     {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104},
     {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104}},
    {{-10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10},
     {-10, -10, -10, -10, -3, -3, -3, -3, 3, 3, 3, 3, 10, 10, 10, 10},
     {-10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10, -10, -3, 3, 10},
     {-10, -10, -10, -10, -3, -3, -3, -3, 3, 3, 3, 3, 10, 10, 10, 10}},
    {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
     {-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1},
     {-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1},
     {-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1}},
};
/* Minus the least step of a width: steps plus it are unsigned. */
static const uint8_t raise_of[3] = {104, 10, 1};

/* Half of a group's residuals, those of vectors 2 half and 2 half + 1: out[vector][g][row]. All of them at once want 32 sums. */
INLINE void half_dots(const uint8_t *codes, const akv_quad_level *level, const int8_t *query, const float *scale, int half,
                      float out[2][4][4])
{
    uint8_t last[32];
    int32x4_t first[4][2], second[4][2]; /* [row][vector] */
    for (uint32_t i = 0; i < 8; i++)
        first[i / 2][i % 2] = second[i / 2][i % 2] = vdupq_n_s32(0);
#pragma GCC unroll 3
    for (int w = 0; w < 3; w++) {
        const uint32_t bytes = 8u >> w, count = level->by_width[w];
        const int8x16_t table[2] = {vld1q_s8(step_of[w][2 * half]), vld1q_s8(step_of[w][2 * half + 1])};
        for (uint32_t i = 0; i < count; i += 4, query += 32) {
            const uint32_t some = count - i < 4 ? count - i : 4;
            const int8x16_t q = vld1q_s8(query), p = vld1q_s8(query + 16); /* lane: row */
            uint8x16_t number[2];
            half_bytes(four_codes(codes, some, bytes, last), w, half, 1, number);
            codes += some * bytes;
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                const int8x16_t step = vqtbl1q_s8(table[v], number[v]);
                first[0][v] = vdotq_laneq_s32(first[0][v], step, q, 0);
                first[1][v] = vdotq_laneq_s32(first[1][v], step, q, 1);
                first[2][v] = vdotq_laneq_s32(first[2][v], step, q, 2);
                first[3][v] = vdotq_laneq_s32(first[3][v], step, q, 3);
                second[0][v] = vdotq_laneq_s32(second[0][v], step, p, 0);
                second[1][v] = vdotq_laneq_s32(second[1][v], step, p, 1);
                second[2][v] = vdotq_laneq_s32(second[2][v], step, p, 2);
                second[3][v] = vdotq_laneq_s32(second[3][v], step, p, 3);
            }
        }
    }
    for (int v = 0; v < 2; v++) {
        float32x4x4_t rows;
        for (uint32_t r = 0; r < 4; r++) /* 512 coordinates of step 104 and query 32639 stay below 2^31 */
            rows.val[r] = vmulq_n_f32(vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(first[r][v], 8), second[r][v])), scale[r]);
        vst4q_f32(out[v][0], rows);
    }
}

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits)
{
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint32_t g = n - at < AKV_GROUP_LANES ? n - at : AKV_GROUP_LANES;
        const uint8_t *codes = run + (n + 1) / 2 + (size_t)(at / AKV_GROUP_LANES) * 2 * level->bits;
        if (g < AKV_GROUP_LANES) {
            fill_group(codes, g, level, room);
            codes = room;
        }
        float sum[4][4][4]; /* residual 4 g + f: [f][g][row] */
        half_dots(codes, level, query, scale, 0, sum);
        half_dots(codes, level, query, scale, 1, sum + 2);
        for (uint32_t l = 0; l < g; l++) {
            float *out = logits + (size_t)slots[at + l] * 4;
            vst1q_f32(out, vfmaq_n_f32(vld1q_f32(out), vld1q_f32(sum[l % 4][l / 4]), gain_at(run, at + l)));
        }
    }
    (void)bias; /* for variants whose levels are unsigned */
}

/* acc[row][low, high byte of weights] += raised steps of vector f of four coordinates (lanes) * weights of the residuals. */
#define ADD_VECTOR(f)                                                                                                  \
    do {                                                                                                               \
        const uint8x16_t step = vqtbl1q_u8(table[f], number[(f) / 2][(f) % 2]);                                        \
        for (uint32_t r = 0; r < 4; r++) {                                                                             \
            acc[r][0] = vdotq_laneq_u32(acc[r][0], step, low[r], f);                                                   \
            acc[r][1] = vdotq_laneq_u32(acc[r][1], step, high[r], f);                                                  \
        }                                                                                                              \
    } while (0)

/* Weights as coordinates of one bit take them, 257 times a byte: low and high byte are that one. */
INLINE void round_weights(uint8_t *whole, uint32_t groups, uint32x4_t bytes_of[4][2])
{
    for (uint32_t r = 0; r < 4; r++)
        bytes_of[r][0] = vdupq_n_u32(0);
    for (uint32_t k = 0; k < 4 * groups; k++) {
        uint8_t *row = whole + (size_t)k * 32;
        for (uint32_t t = 0; t < 16; t++)
            row[t] = row[16 + t] = (uint8_t)akv_quad_weight8(256u * row[16 + t] + row[t]);
        bytes_of[k % 4][0] = vdotq_u32(bytes_of[k % 4][0], vld1q_u8(row), vdupq_n_u8(1));
    }
    for (uint32_t r = 0; r < 4; r++)
        bytes_of[r][1] = bytes_of[r][0];
}

static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    static const uint32_t lanes_of[4][4] = {{~0u, ~0u, ~0u, ~0u}, {~0u, 0, 0, 0}, {~0u, ~0u, 0, 0}, {~0u, ~0u, ~0u, 0}};
    const uint32_t groups = (n + 15) / 16, full = n / 16;
    float *products = (float *)(void *)scratch;  /* 16 KiB */
    uint8_t *whole = scratch + 16 * 1024;        /* [groups][4 rows][low, high bytes][16 places], 8 KiB */
    uint8_t room[AKV_QUAD_MAX_DIM * 8], last[32];
    float top[4], unit[4], inverse[4];
    vst1q_f32(top, weight_products(run, n, slots, weights, products));
    for (uint32_t r = 0; r < 4; r++) {
        unit[r] = top[r] * (1.0f / 65535.0f);
        inverse[r] = top[r] > 1e-30f ? 65535.0f / top[r] : 0.0f;
    }
    uint32x4_t bytes_of[4][2]; /* [row][low, high], four parts of the sum of the weights */
    for (uint32_t i = 0; i < 8; i++)
        bytes_of[i / 2][i % 2] = vdupq_n_u32(0);
    for (uint32_t k = 0; k < groups; k++) {
        const float *from = products + (size_t)k * 64;
        const float32x4x4_t fours[4] = {vld4q_f32(from), vld4q_f32(from + 16), vld4q_f32(from + 32), vld4q_f32(from + 48)};
#pragma GCC unroll 4
        for (uint32_t r = 0; r < 4; r++) {
            uint16x8_t places[2];
            row_weights(fours, r, inverse[r], places);
            const uint8x16_t a = vreinterpretq_u8_u16(places[0]), b = vreinterpretq_u8_u16(places[1]);
            const uint8x16_t low = vuzp1q_u8(a, b), high = vuzp2q_u8(a, b);
            vst1q_u8(whole + k * 128 + r * 32, low);
            vst1q_u8(whole + k * 128 + r * 32 + 16, high);
            bytes_of[r][0] = vdotq_u32(bytes_of[r][0], low, vdupq_n_u8(1));
            bytes_of[r][1] = vdotq_u32(bytes_of[r][1], high, vdupq_n_u8(1));
        }
    }
    const uint8_t *codes = run + (n + 1) / 2;
    if (full < groups)
        fill_group(codes + (size_t)full * 2 * level->bits, n % 16, level, room);
    uint32_t offset = 0;
#pragma GCC unroll 3
    for (int w = 0; w < 3; w++) {
        const uint32_t bytes = 8u >> w, count = level->by_width[w];
        uint8x16_t table[4];
        for (uint32_t f = 0; f < 4; f++)
            table[f] = vreinterpretq_u8_s8(vaddq_s8(vld1q_s8(step_of[w][f]), vdupq_n_s8((int8_t)raise_of[w])));
        if (w == 2 && count != 0)
            round_weights(whole, groups, bytes_of);
        for (uint32_t i = 0; i < count; i += 4, sums += 64) {
            const uint32_t some = count - i < 4 ? count - i : 4;
            uint32x4_t acc[4][2]; /* lane: coordinate */
            for (uint32_t r = 0; r < 4; r++)
                acc[r][0] = acc[r][1] = vdupq_n_u32(0);
            for (uint32_t k = 0; k < groups; k++) {
                const uint8_t *at = (k < full ? codes + (size_t)k * 2 * level->bits : room) + offset;
                const uint8_t *u = whole + k * 128;
                uint8x16_t number[2][2], low[4], high[4];
                at = four_codes(at, some, bytes, last);
                half_bytes(at, w, 0, 0, number[0]);
                half_bytes(at, w, 1, 0, number[1]);
                for (uint32_t r = 0; r < 4; r++) {
                    low[r] = vld1q_u8(u + r * 32);
                    high[r] = vld1q_u8(u + r * 32 + 16);
                }
                ADD_VECTOR(0);
                ADD_VECTOR(1);
                ADD_VECTOR(2);
                ADD_VECTOR(3);
            }
            for (uint32_t r = 0; r < 4; r++) {
                float32x4_t part[2];
                for (uint32_t h = 0; h < 2; h++) {
                    const uint32x4_t raised = vdupq_n_u32(vaddvq_u32(bytes_of[r][h]) * raise_of[w]);
                    part[h] = vcvtq_f32_s32(vreinterpretq_s32_u32(vsubq_u32(acc[r][h], raised)));
                }
                const float32x4_t sum = vmulq_n_f32(vfmaq_n_f32(part[0], part[1], 256.0f), unit[r]);
                float32x4x4_t out = vld4q_f32(sums + r * 16); /* p = 0 takes all */
                out.val[0] = vaddq_f32(out.val[0], vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(sum), vld1q_u32(lanes_of[some % 4]))));
                vst4q_f32(sums + r * 16, out);
            }
            offset += some * bytes;
        }
    }
}
#else
typedef int akv_no_quad_neon_dot; /* a translation unit must not be empty */
#endif
