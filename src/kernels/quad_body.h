/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quad_body.h - the contract of quad.h in plain C, included by the file of each variant that has something of its own only for some
 * kernels (AKV_QUAD_OWN_ANCHORS, AKV_QUAD_OWN_CODES, AKV_QUAD_OWN_BYTES_SUM). Defines AKV_ISA(akv_quad).
 */
#include "kernels/quad.h"

static void unpack_anchors(const uint8_t *index, uint32_t index_bits, const uint8_t *coeff, const float *scales, uint32_t n,
                           uint32_t *out_anchor, float *out_weight)
{
    for (uint32_t t = n; t < akv_round_up(n, 16); t++) {
        out_anchor[t] = 0;
        out_weight[t] = 0.0f;
    }
    for (uint32_t t = 0; t < n; t++) {
        const uint32_t first = t * index_bits, last = first + index_bits - 1;
        uint32_t word = 0;
        for (uint32_t b = first / 8; b <= last / 8; b++)
            word |= (uint32_t)index[b] << (b - first / 8) * 8;
        const int code = (int)((coeff[t / 2] >> (t & 1) * 4 & 15u) ^ 8u) - 8;
        out_anchor[t] = word >> (first & 7) & ((1u << index_bits) - 1u);
        out_weight[t] = (code == AKV_COEFF_SELF ? 1.0f : (float)code * AKV_COEFF_STEP) * scales[out_anchor[t]];
    }
}

static void turn_rows(const float *rows, double *cosine, double *sine, const double *step, uint32_t padded_planes, int16_t *query16,
                      float *mean_rows)
{
    for (uint32_t r = 0; r < 2 * AKV_QUAD_ROWS; r++)
        for (uint32_t j = 0; j < padded_planes; j++) {
            const float x0 = rows[r * padded_planes + j], x1 = rows[(2 * AKV_QUAD_ROWS + r) * padded_planes + j];
            const float c = (float)cosine[j], s = (float)sine[j], y0 = x0 * c + x1 * s, y1 = x1 * c - x0 * s;
            if (r < AKV_QUAD_ROWS) {
                int16_t *out = query16 + (size_t)j / 32 * 256 + j % 32 / 8 * 32 + r * 8 + j % 8;
                out[0] = (int16_t)rintf(y0);
                out[128] = (int16_t)rintf(y1);
            } else {
                mean_rows[(r - AKV_QUAD_ROWS) * padded_planes + j] = y0;
                mean_rows[r * padded_planes + j] = y1;
            }
        }
    for (uint32_t j = 0; j < padded_planes; j++) {
        const double co = cosine[j];
        cosine[j] = co * step[j] - sine[j] * step[padded_planes + j];
        sine[j] = sine[j] * step[j] + co * step[padded_planes + j];
    }
}

static void mean_logits(const float *mean_rows, uint32_t padded_planes, const float *table, uint32_t fast, const float *moments,
                        const float *rest, float *logits)
{
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        float even[32], odd[32], series[6] = {0};
        for (uint32_t k = 0; k < 6; k++)
            for (uint32_t j = fast; j < padded_planes; j++)
                series[k] += moments[k * padded_planes + j] * mean_rows[((k < 3 ? 0 : AKV_QUAD_ROWS) + r) * padded_planes + j];
        for (uint32_t i = 0; i < 32; i++) {
            const float d = ((float)i + 0.5f) / 32.0f;
            even[i] = rest[r] + series[0] + d * d * (series[1] + d * d * series[2]);
            odd[i] = d * (series[3] + d * d * (series[4] + d * d * series[5]));
        }
        for (uint32_t j = 0; j < fast; j++) {
            const float a = mean_rows[r * padded_planes + j], b = mean_rows[(AKV_QUAD_ROWS + r) * padded_planes + j];
            const float *t = table + (size_t)j * 64;
            for (uint32_t i = 0; i < 32; i++) {
                even[i] += a * t[i];
                odd[i] += b * t[32 + i];
            }
        }
        for (uint32_t i = 0; i < 32; i++) {
            logits[akv_quad_slot(32 + i) * 4 + r] = even[i] + odd[i];
            logits[akv_quad_slot(31 - i) * 4 + r] = even[i] - odd[i];
        }
    }
}

#ifndef AKV_QUAD_OWN_ANCHORS
static int32_t mulr(int32_t a, int32_t b)
{
    return (a * b + 0x4000) >> 15;
}

static void anchor_logits(const int8_t *anchors, const akv_quad_shape *shape, const int16_t *turn16, const int16_t *query16,
                          const uint32_t *anchor, const float *weight, const float *scale, uint32_t n, float *logits,
                          const void *ahead, uint32_t ahead_bytes)
{
    akv_quad_fetch(ahead, ahead_bytes);
    const uint32_t P = shape->planes, width = akv_quad_width(shape);
    const bool half = shape->style == AKV_ROPE_HALF_SPLIT;
    for (uint32_t t = 0; t < n; t++) {
        const int8_t *a = anchors + (size_t)anchor[t] * shape->dim;
        const int16_t *turn = turn16 + (size_t)t * 2 * shape->padded_planes;
        int32_t x[AKV_QUAD_MAX_DIM * 2] = {0}, sum[AKV_QUAD_ROWS] = {0};
        for (uint32_t j = 0; j < P; j++) {
            const int32_t x0 = a[half ? j : 2 * j] * 256, x1 = a[half ? j + P : 2 * j + 1] * 256;
            const int32_t c = turn[j / 32 * 64 + j % 32], s = turn[j / 32 * 64 + 32 + j % 32];
            x[j / 32 * 64 + j % 32] = mulr(x0, c) - mulr(x1, s);
            x[j / 32 * 64 + 32 + j % 32] = mulr(x0, s) + mulr(x1, c);
        }
        for (uint32_t i = 0; i < shape->rest; i++)
            x[2 * shape->padded_planes + i] = a[2 * P + i] * 128;
        /* four partial sums per row, each within 32 bits: pairs of coordinates by their place among eight */
        float *out = logits + (size_t)akv_quad_slot(t) * 4;
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
            float part[4];
            for (uint32_t e = 0; e < 4; e++) {
                sum[e] = 0;
                for (uint32_t i = 2 * e; i < width; i += 8)
                    sum[e] += x[i] * query16[i / 8 * 32 + r * 8 + i % 8] + x[i + 1] * query16[i / 8 * 32 + r * 8 + i % 8 + 1];
                part[e] = (float)sum[e];
            }
            out[r] += scale[r] * weight[t] * ((part[0] + part[1]) + (part[2] + part[3]));
        }
    }
}
#endif

static void sort_levels(const uint8_t *levels, uint64_t plane_bytes, uint32_t planes, uint32_t n, uint32_t num_levels,
                        uint16_t *slots, uint32_t *first)
{
    uint8_t level[AKV_BLOCK_TOKENS];
    uint32_t count[1u << 8] = {0}, at[1u << 8], sum = 0;
    for (uint32_t t = 0; t < n; t++) {
        uint32_t l = 0;
        for (uint32_t p = 0; p < planes; p++)
            l |= (uint32_t)(levels[p * plane_bytes + t / 8] >> (t & 7) & 1) << p;
        level[t] = (uint8_t)l;
        count[l]++;
    }
    first[0] = 0;
    for (uint32_t l = 1; l <= num_levels; l++) {
        first[l] = at[l] = sum;
        sum += count[l];
    }
    first[num_levels + 1] = sum;
    for (uint32_t t = 0; t < n; t++)
        if (level[t] != 0)
            slots[at[level[t]]++] = (uint16_t)akv_quad_slot(t);
}

/* The last group of a run, g < 16 residuals, as a full group whose other residuals are 0 bits. */
static void fill_group(const uint8_t *codes, uint32_t g, const akv_quad_level *level, uint8_t *out)
{
    uint64_t bit = 0;
    memset(out, 0, 2 * (size_t)level->bits);
    for (uint32_t w = 0; w < 3; w++) {
        const uint32_t width = 4u >> w;
        for (uint32_t i = 0; i < level->by_width[w]; i++, out += 2 * width)
            for (uint32_t b = 0; b < g * width; b++, bit++)
                out[b / 8] |= (uint8_t)((codes[bit / 8] >> (bit & 7) & 1) << (b & 7));
    }
}

static float gain_at(const uint8_t *run, uint32_t i)
{
    return akv_gain_value(run[i / 2] >> i % 2 * 4 & 15u);
}

static void quantise_level(const float *z, const akv_level_list *list, int8_t *query, int32_t *bias, float *scale)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    static const int32_t raise_of[3] = {104, 10, 1};
    memset(query, 0, (size_t)akv_quad_fours(list->by_width) * 32);
    memset(bias, 0, 8 * sizeof *bias);
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        float largest = 0.0f, all = 0.0f;
        for (uint32_t w = 0, i = 0; w < 3; w++)
            for (uint32_t n = 0; n < list->by_width[w]; n++, i++) {
                const float x = fabsf(z[list->coord[i] * 4 + r] * unit_of[w]);
                largest = x > largest ? x : largest;
                all += x;
            }
        const float inverse = largest > 1e-30f && isfinite(all) ? (float)AKV_QUAD_CODE_MAX / largest : 0.0f;
        scale[r] = !isfinite(all) ? NAN : inverse == 0.0f ? 0.0f : largest / (float)AKV_QUAD_CODE_MAX;
        int8_t *at = query;
        for (uint32_t w = 0, i = 0; w < 3; w++) {
            for (uint32_t n = 0; n < list->by_width[w] && inverse != 0.0f; n++) {
                const float x = z[list->coord[i + n] * 4 + r] * unit_of[w] * inverse;
                const int32_t whole = w == 2 ? 256 * (int32_t)rintf(x * (1.0f / 256.0f)) : (int32_t)rintf(x);
                const int32_t high = (whole + 128 + 65536) / 256 - 256, low = whole - 256 * high;
                at[n / 4 * 32 + r * 4 + n % 4] = (int8_t)high;
                at[n / 4 * 32 + 16 + r * 4 + n % 4] = (int8_t)low;
                bias[r] -= high * raise_of[w];
                bias[4 + r] -= low * raise_of[w];
            }
            i += list->by_width[w];
            at += (list->by_width[w] + 3) / 4 * 32;
        }
    }
}

#ifndef AKV_QUAD_OWN_CODES
static int level_step(uint32_t number, uint32_t w)
{
    return w == 0 ? akv_level_steps4[number] : w == 1 ? akv_level_steps2[number] : akv_level_steps1[number];
}

static uint32_t group_number(const uint8_t *group, uint32_t width, uint32_t lane)
{
    return (uint32_t)group[lane * width / 8] >> (lane * width & 7) & ((1u << width) - 1u);
}

/* Group `at / 16` of a run as a full group: itself, or rebuilt in `room`. */
static const uint8_t *full_group(const uint8_t *run, uint32_t n, uint32_t at, const akv_quad_level *level, uint8_t *room)
{
    const uint8_t *codes = run + (n + 1) / 2 + (size_t)(at / AKV_GROUP_LANES) * 2 * level->bits;
    if (n - at >= AKV_GROUP_LANES)
        return codes;
    fill_group(codes, n - at, level, room);
    return room;
}

static void code_dots(const uint8_t *run, uint32_t n, const akv_quad_level *level, const int8_t *query, const int32_t *bias,
                      const float *scale, const uint16_t *slots, float *logits)
{
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    for (uint32_t at = 0; at < n; at += AKV_GROUP_LANES) {
        const uint8_t *group = full_group(run, n, at, level, room);
        int32_t high[AKV_QUAD_ROWS][AKV_GROUP_LANES] = {{0}}, low[AKV_QUAD_ROWS][AKV_GROUP_LANES] = {{0}};
        const int8_t *q = query;
        for (uint32_t w = 0; w < 3; w++) {
            const uint32_t width = 4u >> w;
            for (uint32_t i = 0; i < level->by_width[w]; i++, group += 2 * width) {
                for (uint32_t l = 0; l < AKV_GROUP_LANES; l++) {
                    const int step = level_step(group_number(group, width, l), w);
                    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
                        high[r][l] += step * q[i / 4 * 32 + r * 4 + i % 4];
                        low[r][l] += step * q[i / 4 * 32 + 16 + r * 4 + i % 4];
                    }
                }
            }
            q += (level->by_width[w] + 3) / 4 * 32;
        }
        for (uint32_t l = 0; l < AKV_GROUP_LANES && at + l < n; l++)
            for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
                logits[(size_t)slots[at + l] * 4 + r] +=
                    gain_at(run, at + l) * scale[r] * ((float)high[r][l] * 256.0f + (float)low[r][l]);
    }
    (void)bias; /* for variants whose levels are unsigned */
}

static void code_sums(const uint8_t *run, uint32_t n, const akv_quad_level *level, const uint16_t *slots, const float *weights,
                      uint8_t *scratch, float *sums)
{
    float largest[AKV_QUAD_ROWS] = {0};
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
            const float w = gain_at(run, i) * weights[(size_t)slots[i] * 4 + r];
            largest[r] = w > largest[r] ? w : largest[r];
        }
    uint16_t *whole = (uint16_t *)(void *)scratch; /* [1024][4] */
    float unit[AKV_QUAD_ROWS];
    for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
        unit[r] = largest[r] * (1.0f / 65535.0f);
        const float inverse = largest[r] > 1e-30f ? 65535.0f / largest[r] : 0.0f;
        for (uint32_t i = 0; i < n; i++)
            whole[i * 4 + r] = (uint16_t)rintf(gain_at(run, i) * weights[(size_t)slots[i] * 4 + r] * inverse);
    }
    const uint8_t *groups = run + (n + 1) / 2;
    const uint32_t full = n / AKV_GROUP_LANES;
    uint8_t room[AKV_QUAD_MAX_DIM * 8];
    if (n % AKV_GROUP_LANES != 0)
        fill_group(groups + (size_t)full * 2 * level->bits, n % AKV_GROUP_LANES, level, room);
    uint32_t offset = 0, four = 0;
    for (uint32_t w = 0; w < 3; w++) {
        const uint32_t width = 4u >> w;
        for (uint32_t i = 0; w == 2 && i < n * 4; i++)
            whole[i] = (uint16_t)(257 * akv_quad_weight8(whole[i]));
        for (uint32_t i = 0; i < level->by_width[w]; i++, offset += 2 * width) {
            float *out = sums + (size_t)(four + i / 4) * 64;
            int64_t sum[AKV_QUAD_ROWS][4] = {{0}};
            for (uint32_t t = 0; t < n; t++) {
                const uint8_t *group = t / AKV_GROUP_LANES < full ? groups + (size_t)(t / AKV_GROUP_LANES) * 2 * level->bits : room;
                const int step = level_step(group_number(group + offset, width, t % 16), w);
                for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
                    sum[r][t % 16 / 4] += step * (int32_t)whole[t * 4 + r];
            }
            for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
                for (uint32_t p = 0; p < 4; p++)
                    out[r * 16 + i % 4 * 4 + p] += unit[r] * (float)sum[r][p];
        }
        four += (level->by_width[w] + 3) / 4;
    }
}
#endif

static void place_sums(const float *sums, const akv_level_list *list, float *z)
{
    static const float unit_of[3] = {AKV_LEVEL_UNIT4, AKV_LEVEL_UNIT2, AKV_LEVEL_UNIT1};
    const uint16_t *coord = list->coord;
    for (uint32_t w = 0; w < 3; w++) {
        for (uint32_t i = 0; i < list->by_width[w]; i++, coord++)
            for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++) {
                const float *p = sums + (size_t)(i / 4) * 64 + r * 16 + i % 4 * 4;
                z[(size_t)*coord * 4 + r] += unit_of[w] * ((p[0] + p[1]) + (p[2] + p[3]));
            }
        sums += (size_t)((list->by_width[w] + 3) / 4) * 64;
    }
}

static void row_max(const float *x, uint32_t n, float *max)
{
    for (uint32_t i = 0; i < n * 4; i++)
        max[i & 3] = x[i] > max[i & 3] ? x[i] : max[i & 3];
}

/* exp as akv_kernels.exp_sum has it: ln 2 in two parts, Taylor to degree 7. */
static float exp_of(float v)
{
    const float x = v < -87.0f ? -87.0f : v; /* NaN compares false and goes on */
    const float shifted = x * 0x1.715476p+0f + 0x1.8p23f, k = shifted - 0x1.8p23f;
    const float r = x - k * 0x1.62e4p-1f - k * 0x1.7f7d1cp-20f;
    float p = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    p *= akv_f32_bits((akv_bits_f32(shifted) << 23) + 0x3f800000u);
    return v < -87.0f ? 0.0f : p;
}

static void exp_sum(float *x, uint32_t n, const float *max, float *sum)
{
    float m[16], s[16] = {0};
    for (uint32_t l = 0; l < 16; l++)
        m[l] = max[l & 3];
    for (uint32_t i = 0; i < n * 4; i += 16)
        for (uint32_t l = 0; l < 16; l++) {
            x[i + l] = exp_of(x[i + l] - m[l]);
            s[l] += x[i + l];
        }
    for (uint32_t l = 0; l < 16; l++)
        sum[l & 3] += s[l];
}

static void histogram(const uint32_t *anchor, const float *weight, uint32_t n, const float *weights, float *hist)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            hist[(size_t)anchor[t] * 4 + r] += weight[t] * weights[akv_quad_slot(t) * 4 + r];
}

#ifndef AKV_QUAD_OWN_BYTES_SUM
static void bytes_sum(const float *w, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    for (uint32_t a = 0; a < n; a++)
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            if (w[a * 4 + r] != 0.0f)
                for (uint32_t i = 0; i < dim; i++)
                    out[r * dim + i] += w[a * 4 + r] * (float)rows[(size_t)a * dim + i];
}
#endif

static float dot16(const float *a, const float *b, uint32_t n)
{
    float s[16] = {0}, sum = 0.0f;
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (uint32_t l = 0; l < 16; l++)
            s[l] += a[i + l] * b[i + l];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (uint32_t l = 0; l < 16; l++)
        sum += s[l];
    return sum;
}

static void bytes_dot(const float *x, const int8_t *rows, uint32_t n, uint32_t dim, float *out)
{
    float row[AKV_QUAD_MAX_DIM];
    for (uint32_t a = 0; a < n; a++) {
        for (uint32_t i = 0; i < dim; i++)
            row[i] = (float)rows[(size_t)a * dim + i];
        for (uint32_t r = 0; r < AKV_QUAD_ROWS; r++)
            out[a * 4 + r] = dot16(x + (size_t)r * dim, row, dim);
    }
}

static void tile_dots(const float *x, uint32_t rows, uint32_t dim, const float *columns, float *out)
{
    for (uint32_t r = 0; r < rows; r++) {
        float sum[64] = {0};
        for (uint32_t i = 0; i < dim; i++)
            for (uint32_t t = 0; t < 64; t++)
                sum[t] += x[(size_t)r * dim + i] * columns[(size_t)i * 64 + t];
        memcpy(out + (size_t)r * 64, sum, sizeof sum);
    }
}

static void tile_sums(const float *w, size_t stride, uint32_t rows, const float *x, uint32_t n, uint32_t dim, float *out)
{
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t i = 0; i < dim; i++)
                out[(size_t)r * dim + i] += w[r * stride + t] * x[(size_t)t * dim + i];
}

const akv_quad_kernels AKV_ISA(akv_quad) = {
    AKV_ISA_NAME, unpack_anchors, turn_rows, mean_logits, anchor_logits, sort_levels, akv_level_list_of, quantise_level, code_dots,
    code_sums,    place_sums,     row_max,   exp_sum,     histogram,     bytes_sum,   bytes_dot,
    tile_dots,    tile_sums,      NULL,
};
