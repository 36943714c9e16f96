/* SPDX-License-Identifier: Apache-2.0 */
/* tile_body.h - what of tile.h compilers make vectors of themselves, compiled once per instruction set by the files that include it. */
#include "kernels/tile.h"

static void anchor_row(const int8_t *a, float weight, const float *units, const float *mean, uint32_t dim, float *out)
{
    if (mean != NULL)
        for (uint32_t i = 0; i < dim; i++)
            out[i] = mean[i] + weight * units[i] * (float)a[i];
    else
        for (uint32_t i = 0; i < dim; i++)
            out[i] = weight * units[i] * (float)a[i];
}

static void turn(float *keys, uint32_t planes, const uint16_t *first, const uint16_t *second, const float *base_cosine,
                 const float *base_sine, const float *table)
{
    for (uint32_t j = 0; j < planes; j++) {
        float *restrict x = keys + (size_t)first[j] * AKV_TILE_WIDTH, *restrict y = keys + (size_t)second[j] * AKV_TILE_WIDTH;
        const float *restrict cosine = table + (size_t)j * 2 * AKV_TILE_WIDTH, *restrict sine = cosine + AKV_TILE_WIDTH;
        const float c0 = base_cosine[j], s0 = base_sine[j];
        for (uint32_t t = 0; t < AKV_TILE_WIDTH; t++) {
            const float c = c0 * cosine[t] - s0 * sine[t], s = s0 * cosine[t] + c0 * sine[t], a = x[t], b = y[t];
            x[t] = a * c - b * s;
            y[t] = a * s + b * c;
        }
    }
}
