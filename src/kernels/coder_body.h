/* SPDX-License-Identifier: Apache-2.0 */
/* coder_body.h - the loops of coder.h, compiled once per instruction set by the files that include it with AKV_ISA(name) defined. */
#include "core/ladder.h"
#include "kernels/coder.h"
#include "kernels/lanes.h"

typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
#define PLANES 8u /* doubles at a time */
#define MOST_SPREAD 512u

INLINE f64x8 load_f64(const double *p)
{
    f64x8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE f64x8 load_wide(const float *p)
{
    f32x8 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, f64x8);
}

#define STORE_NARROW(p, v)                                                                                             \
    do {                                                                                                               \
        f32x8 narrow_ = __builtin_convertvector(v, f32x8);                                                             \
        memcpy((p), &narrow_, sizeof narrow_);                                                                         \
    } while (0)

/* The larger and the smaller of two; a where b is NaN. */
#define MAX_F32(a, b)                                                                                                  \
    __extension__({                                                                                                    \
        const f32x16 a_ = (a), b_ = (b);                                                                               \
        const i32x16 more_ = b_ > a_;                                                                                  \
        (f32x16)((more_ & (i32x16)b_) | (~more_ & (i32x16)a_));                                                        \
    })
#define MIN_F32(a, b)                                                                                                  \
    __extension__({                                                                                                    \
        const f32x16 low_ = (a), than_ = (b);                                                                          \
        const i32x16 less_ = than_ < low_;                                                                             \
        (f32x16)((less_ & (i32x16)than_) | (~less_ & (i32x16)low_));                                                   \
    })

/* The first n < 16 of p, zeros behind. */
INLINE f32x16 load_some(const float *p, uint32_t n)
{
    float some[LANES] = {0};
    memcpy(some, p, n * sizeof *p);
    return load_f32(some);
}

#define STORE_SOME(p, n, v)                                                                                            \
    do {                                                                                                               \
        f32x16 some_ = (v);                                                                                            \
        memcpy((p), &some_, (n) * sizeof(float));                                                                      \
    } while (0)

/* body for whole lanes, then once more for the last `count` < 16: LOAD and SAVE know which. */
#define LOAD(p) (count == LANES ? load_f32((p) + i) : load_some((p) + i, count))
#define SAVE(p, v)                                                                                                     \
    do {                                                                                                               \
        if (count == LANES)                                                                                            \
            store_f32((p) + i, v);                                                                                     \
        else                                                                                                           \
            STORE_SOME((p) + i, count, v);                                                                             \
    } while (0)
#define FOR_LANES(n, body)                                                                                             \
    do {                                                                                                               \
        uint32_t i = 0;                                                                                                \
        for (; i + LANES <= (n); i += LANES) {                                                                         \
            const uint32_t count = LANES;                                                                              \
            body                                                                                                       \
        }                                                                                                              \
        if (i < (n)) {                                                                                                 \
            const uint32_t count = (n) - i;                                                                            \
            body                                                                                                       \
        }                                                                                                              \
    } while (0)

static void turn(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style, const double *base, const double *offset,
                 int direction, double magnitude, float *out)
{
    const uint32_t r = rotary_dim / 2;
    const double sign = direction;
    uint32_t j = 0;
    if (style == AKV_ROPE_HALF_SPLIT)
        for (; j + PLANES <= r; j += PLANES) {
            const f64x8 bc = load_f64(base + j), bs = load_f64(base + r + j), oc = load_f64(offset + j), os = load_f64(offset + r + j);
            const f64x8 c = bc * oc - bs * os, s = sign * (bs * oc + bc * os);
            const f64x8 x0 = load_wide(x + j), x1 = load_wide(x + j + r);
            const f64x8 y0 = (x0 * c - x1 * s) * magnitude, y1 = (x0 * s + x1 * c) * magnitude;
            STORE_NARROW(out + j, y0);
            STORE_NARROW(out + j + r, y1);
        }
    for (; j < r; j++) {
        const uint32_t a = style == AKV_ROPE_HALF_SPLIT ? j : 2 * j, b = style == AKV_ROPE_HALF_SPLIT ? j + r : 2 * j + 1;
        const double c = base[j] * offset[j] - base[r + j] * offset[r + j];
        const double s = sign * (base[r + j] * offset[j] + base[j] * offset[r + j]), x0 = x[a], x1 = x[b];
        out[a] = (float)((x0 * c - x1 * s) * magnitude);
        out[b] = (float)((x0 * s + x1 * c) * magnitude);
    }
    if (out != x)
        memcpy(out + rotary_dim, x + rotary_dim, (dim - rotary_dim) * sizeof *out);
}

static void squares(const float *x, uint32_t n, uint32_t dim, const float *mean, float *out)
{
    for (uint32_t t = 0; t < n; t++) {
        const float *row = x + (size_t)t * dim;
        f32x16 sum = {0};
        if (mean == NULL)
            FOR_LANES(dim, {
                const f32x16 v = LOAD(row);
                sum += v * v;
            });
        else
            FOR_LANES(dim, {
                const f32x16 v = LOAD(row) - LOAD(mean);
                sum += v * v;
            });
        out[t] = sum_lanes(&sum);
    }
}

static void moments_add(const float *x, uint32_t n, double *sum, double *square)
{
    uint32_t i = 0;
    for (; i + PLANES <= n; i += PLANES) {
        const f64x8 v = load_wide(x + i), s = load_f64(sum + i) + v, q = load_f64(square + i) + v * v;
        memcpy(sum + i, &s, sizeof s);
        memcpy(square + i, &q, sizeof q);
    }
    for (; i < n; i++) {
        sum[i] += x[i];
        square[i] += (double)x[i] * x[i];
    }
}

static void scale_add(float *x, uint32_t n, float scale, float *to)
{
    FOR_LANES(n, {
        const f32x16 v = LOAD(x) * scale;
        SAVE(x, v);
        SAVE(to, LOAD(to) + v);
    });
}

static void shrink_left(const float *products, size_t stride, uint32_t rows, uint32_t n, const float *energy, float *left)
{
    FOR_LANES(n, {
        f32x16 best = {0};
        for (uint32_t r = 0; r < rows; r++) {
            const f32x16 p = LOAD(products + r * stride);
            best = MAX_F32(best, p * p);
        }
        SAVE(left, MAX_F32((f32x16){0}, MIN_F32(LOAD(left), LOAD(energy) - best)));
    });
}

static void leaves(float *x, const float *energy, uint32_t n)
{
    FOR_LANES(n, {
        const f32x16 v = LOAD(x);
        SAVE(x, MAX_F32((f32x16){0}, LOAD(energy) - v * v));
    });
}

static float coverage_gain(const float *now, const float *leave, uint32_t n)
{
    f32x16 sum = {0};
    FOR_LANES(n, { sum += MAX_F32((f32x16){0}, LOAD(now) - LOAD(leave)); });
    return sum_lanes(&sum);
}

static void coverage_take(float *now, const float *leave, uint32_t n)
{
    FOR_LANES(n, { SAVE(now, MIN_F32(LOAD(now), LOAD(leave))); });
}

/* Lanes moved up by 1, 2, 4, 8; zeros come in. */
#define UP1(v) __builtin_shufflevector((f32x16){0}, v, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
#define UP2(v) __builtin_shufflevector((f32x16){0}, v, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29)
#define UP4(v) __builtin_shufflevector((f32x16){0}, v, 0, 0, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27)
#define UP8(v) __builtin_shufflevector((f32x16){0}, v, 0, 0, 0, 0, 0, 0, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23)

static void spread(const float *a, uint32_t before, uint32_t n, uint32_t total, uint32_t sinks, uint32_t window, float decay,
                   float weight, float *out)
{
    /* What tokens give (0 for sinks and beyond the end), and its geometric sums from the first on. */
    float gives[MOST_SPREAD + 2 * LANES], sums[MOST_SPREAD + LANES];
    float powers[LANES], last = 1.0f;
    const float d2 = decay * decay, d4 = d2 * d2, d8 = d4 * d4;
    for (uint32_t l = 0; l < LANES; l++)
        powers[l] = l == 0 ? decay : powers[l - 1] * decay;
    for (uint32_t j = 0; j < window; j++)
        last *= decay;
    memcpy(gives, a, total * sizeof *a);
    memset(gives, 0, (sinks < total ? sinks : total) * sizeof *gives);
    memset(gives + total, 0, 2 * LANES * sizeof *gives);
    float carry = 0.0f;
    for (uint32_t i = 0; i < before + n; i += LANES) {
        f32x16 v = load_f32(gives + i);
        v += decay * UP1(v);
        v += d2 * UP2(v);
        v += d4 * UP4(v);
        v += d8 * UP8(v);
        v += carry * load_f32(powers);
        store_f32(sums + i, v);
        carry = sums[i + LANES - 1];
    }
    for (uint32_t i = before; i < before + n; i += LANES) {
        const f32x16 own = load_f32(gives + i);
        f32x16 others = load_f32(sums + i) - own, gone = {0};
        if (i >= window)
            gone = load_f32(sums + i - window);
        else if (i + LANES > window) { /* the first tokens that have a window's length behind them */
            float some[LANES] = {0};
            memcpy(some + (window - i), sums, (LANES - (window - i)) * sizeof *some);
            gone = load_f32(some);
        }
        others = MAX_F32((f32x16){0}, others - last * gone); /* cancellation may leave less */
        others += 0.5f * load_f32(gives + i + 1);
        others += 0.25f * load_f32(gives + i + 2);
        others += 0.1f * load_f32(gives + i + 3);
        const f32x16 all = load_f32(a + i) + weight * others;
        store_f32(out + (i - before), all);
    }
}

static void utility_add(const akv_coder_query *q, uint32_t n, const float *w, const float *logits, const float *errors,
                        const float *cross, const float *value_sq, const float *key_residual_sq, const float *value_residual_sq,
                        float *u_k, float *u_v)
{
    FOR_LANES(n, {
        const f32x16 weights = LOAD(w);
        const f32x16 x = LOAD(errors) * q->scale;
        const f32x16 deviation = MAX_F32((f32x16){0}, LOAD(value_sq) - 2.0f * LOAD(cross) + q->output_sq);
        f32x16 error = q->observed * x * x + q->incoherent * LOAD(key_residual_sq);
        if (q->cap != 0.0f) {
            const f32x16 l = LOAD(logits);
            const i32x16 masked = l < -3e38f; /* minus infinity: weight 0 */
            const f32x16 part = (f32x16)(~masked & (i32x16)(l / q->cap));
            const f32x16 slope = 1.0f - part * part;
            error *= slope * slope;
        }
        SAVE(u_k, LOAD(u_k) + weights * deviation * error);
        SAVE(u_v, LOAD(u_v) + weights * LOAD(value_residual_sq));
    });
}

static void count_above(const float *x, uint32_t n, const float *thresholds, uint32_t num_thresholds, uint32_t *counts)
{
    for (uint32_t j = 0; j < num_thresholds; j++) {
        const float threshold = thresholds[j];
        i32x16 sum = {0};
        uint32_t i = 0, total = 0;
        for (; i + LANES <= n; i += LANES)
            sum -= load_f32(x + i) > threshold;
        for (; i < n; i++)
            total += x[i] > threshold;
        int32_t lanes[LANES];
        memcpy(lanes, &sum, sizeof lanes);
        for (uint32_t l = 0; l < LANES; l++)
            total += (uint32_t)lanes[l];
        counts[j] += total;
    }
}

/* How many levels above the innermost of its half x lies, as a vector of whole numbers; and the level's steps, unsigned. */
#define STEP(boundary, from, to)                                                                                       \
    do {                                                                                                               \
        const i32x16 above = m >= (boundary);                                                                          \
        rank -= above;                                                                                                 \
        steps += above & ((to) - (from));                                                                              \
    } while (0)
#define MIDDLE(unit, a, b) (0.5f * ((unit) * (float)(a) + (unit) * (float)(b)))

INLINE void nearest4(const f32x16 *in, i32x16 *rank_out, i32x16 *steps_out)
{
    const f32x16 m = *in;
    i32x16 rank = {0}, steps = (i32x16){0} + 5;
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 5, 15), 5, 15);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 15, 25), 15, 25);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 25, 36), 25, 36);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 36, 48), 36, 48);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 48, 62), 48, 62);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 62, 79), 62, 79);
    STEP(MIDDLE(AKV_LEVEL_UNIT4, 79, 104), 79, 104);
    *rank_out = rank;
    *steps_out = steps;
}

INLINE void nearest2(const f32x16 *in, i32x16 *rank_out, i32x16 *steps_out)
{
    const f32x16 m = *in;
    i32x16 rank = {0}, steps = (i32x16){0} + 3;
    STEP(MIDDLE(AKV_LEVEL_UNIT2, 3, 10), 3, 10);
    *rank_out = rank;
    *steps_out = steps;
}

/* Unsigned levels of one vector of coordinates of 4 >> kind bits, and the rank. */
INLINE f32x16 nearest_level(const f32x16 *m, int kind, i32x16 *rank)
{
    i32x16 steps = {0};
    if (kind == 0) {
        nearest4(m, rank, &steps);
        return AKV_LEVEL_UNIT4 * __builtin_convertvector(steps, f32x16);
    }
    if (kind == 1) {
        nearest2(m, rank, &steps);
        return AKV_LEVEL_UNIT2 * __builtin_convertvector(steps, f32x16);
    }
    *rank = steps;
    return (f32x16){0} + AKV_LEVEL_UNIT1;
}

static void coded_sums(const float *x, const float *sigma_sq, const akv_coder_lanes *lanes, float inverse, float sums[3])
{
    f32x16 xx = {0}, xc = {0}, cc = {0};
    for (int kind = 0; kind < 3; kind++)
        for (uint32_t v = 0; v < lanes->by_width[kind]; v++, x += LANES, sigma_sq += LANES) {
            /* the level has the sign of x, so products need sizes only */
            const f32x16 m = (f32x16)((i32x16)load_f32(x) & 0x7fffffff), scaled = m * inverse, s = load_f32(sigma_sq);
            i32x16 rank;
            const f32x16 level = nearest_level(&scaled, kind, &rank);
            xx += m * m * s;
            xc += m * level * s;
            cc += level * level * s;
        }
    sums[0] = sum_lanes(&xx);
    sums[1] = sum_lanes(&xc);
    sums[2] = sum_lanes(&cc);
}

static void code_numbers(const float *x, const akv_coder_lanes *lanes, float inverse, uint8_t *numbers, size_t stride)
{
    static const int32_t half[3] = {8, 2, 1};
    for (int kind = 0; kind < 3; kind++)
        for (uint32_t v = 0; v < lanes->by_width[kind]; v++, x += LANES, numbers += LANES * stride) {
            const f32x16 scaled = load_f32(x) * inverse, m = (f32x16)((i32x16)scaled & 0x7fffffff);
            const i32x16 negative = scaled < 0.0f;
            i32x16 rank;
            (void)nearest_level(&m, kind, &rank);
            const i32x16 number = (negative & (half[kind] - 1 - rank)) | (~negative & (half[kind] + rank));
            const u8x16 bytes = __builtin_convertvector(number, u8x16);
            uint8_t out[LANES];
            memcpy(out, &bytes, sizeof out);
            for (uint32_t l = 0; l < LANES; l++)
                numbers[l * stride] = out[l];
        }
}

const akv_coder_kernels AKV_ISA(akv_coder) = {
    AKV_ISA_NAME,  turn,          squares,     moments_add, scale_add,  shrink_left,  leaves, coverage_gain,
    coverage_take, spread,        utility_add, count_above, coded_sums, code_numbers,
};
