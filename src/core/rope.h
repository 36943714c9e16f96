/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope.h - exact rotation phases. position * inv_freq is formed in double and only then reduced, so that a position of
 * a million costs 1e-10 rad, not the 0.1 rad of single precision.
 */
#ifndef AKV_ROPE_H
#define AKV_ROPE_H

#include "core/maths.h"

/* cos/sin of position * inv_freq[j]; position may be negative (turns back). */
static inline void akv_rope_phase(const double *inv_freq, uint32_t planes, int64_t position, double *cos_out,
                                  double *sin_out)
{
    for (uint32_t j = 0; j < planes; j++)
        akv_sincos((double)position * inv_freq[j], &sin_out[j], &cos_out[j]);
}

/* The two coordinates of plane j. */
static inline uint32_t akv_plane_first(akv_rope_style style, uint32_t j)
{
    return style == AKV_ROPE_HALF_SPLIT ? j : 2 * j;
}

static inline uint32_t akv_plane_second(akv_rope_style style, uint32_t rotary_dim, uint32_t j)
{
    return style == AKV_ROPE_HALF_SPLIT ? j + rotary_dim / 2 : 2 * j + 1;
}

/*
 * out = magnitude x rotation of x by the phase, in the style's own coordinate order, the rest of dim copied. In-place
 * is fine. direction -1 turns back.
 */
static inline void akv_rope_turn(const float *x, uint32_t dim, uint32_t rotary_dim, akv_rope_style style,
                                 const double *cosine, const double *sine, int direction, double magnitude, float *out)
{
    for (uint32_t j = 0; j < rotary_dim / 2; j++) {
        uint32_t a = akv_plane_first(style, j), b = akv_plane_second(style, rotary_dim, j);
        double s = direction * sine[j], x0 = x[a], x1 = x[b];
        out[a] = (float)((x0 * cosine[j] - x1 * s) * magnitude);
        out[b] = (float)((x0 * s + x1 * cosine[j]) * magnitude);
    }
    for (uint32_t i = rotary_dim; i < dim; i++)
        out[i] = x[i];
}

/*
 * Walks over rising positions: one complex product per plane and step, the exact phase again every 128 positions (drift
 * below 1e-13) and after every jump. phase holds 4 * planes doubles of the caller.
 */
typedef struct akv_rope_walk {
    const double *inv_freq;
    uint32_t planes;
    bool started;
    int64_t position;
    double *cosine; /* current phase */
    double *sine;
    double *step_cosine;
    double *step_sine;
} akv_rope_walk;

static inline akv_rope_walk akv_rope_walk_begin(const double *inv_freq, uint32_t planes, double *phase)
{
    akv_rope_walk w = {
        inv_freq, planes, false, 0, phase, phase + planes, phase + 2 * (size_t)planes, phase + 3 * (size_t)planes};
    akv_rope_phase(inv_freq, planes, 1, w.step_cosine, w.step_sine);
    return w;
}

static inline void akv_rope_walk_to(akv_rope_walk *w, int64_t position)
{
    if (w->started && position == w->position + 1 && (position & 127) != 0)
        for (uint32_t j = 0; j < w->planes; j++) {
            double c = w->cosine[j];
            w->cosine[j] = c * w->step_cosine[j] - w->sine[j] * w->step_sine[j];
            w->sine[j] = w->sine[j] * w->step_cosine[j] + c * w->step_sine[j];
        }
    else if (!w->started || position != w->position)
        akv_rope_phase(w->inv_freq, w->planes, position, w->cosine, w->sine);
    w->started = true;
    w->position = position;
}

#endif
