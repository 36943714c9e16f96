/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope.c - the angles that ggml's rotary operator turns by, as a table: linear, YaRN and per-plane frequency factors.
 */
#include "host.h"

#include <math.h>

/* Plane at which a full turn over the original context happens `turns` times. */
static double turns_plane(const akvl_rope_params *p, double turns)
{
    const double two_pi = 6.283185307179586;
    return p->n_dims * log(p->n_ctx_orig / (turns * two_pi)) / (2.0 * log((double)p->freq_base));
}

double akvl_rope_table(const akvl_rope_params *p, const float *freq_factors, double *inv_freq)
{
    /* ggml steps from plane to plane with a float ratio; starting from the same float keeps the angles together at
     * large positions, where a difference of one rounding would be multiplied by the position. */
    const double ratio = (double)powf(p->freq_base, -2.0f / (float)p->n_dims);
    double low = 0.0, high = 0.0;
    if (p->ext_factor != 0.0f) {
        low = fmax(0.0, floor(turns_plane(p, p->beta_fast)));
        high = fmin(p->n_dims - 1.0, ceil(turns_plane(p, p->beta_slow)));
    }
    for (int32_t j = 0; j < p->n_dims / 2; j++) {
        const double extrapolated = pow(ratio, j) / (freq_factors ? (double)freq_factors[j] : 1.0);
        const double interpolated = extrapolated * (double)p->freq_scale;
        double mix = 0.0;
        if (p->ext_factor != 0.0f) {
            const double ramp = (j - low) / fmax(0.001, high - low);
            mix = (1.0 - fmin(1.0, fmax(0.0, ramp))) * (double)p->ext_factor;
        }
        inv_freq[j] = interpolated * (1.0 - mix) + extrapolated * mix;
    }
    double magnitude = p->attn_factor;
    if (p->ext_factor != 0.0f)
        magnitude *= 1.0 + 0.1 * log(1.0 / (double)p->freq_scale);
    return magnitude;
}
