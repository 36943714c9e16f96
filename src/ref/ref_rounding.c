/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_rounding.c - how far attention over the LADDER coding may be off because it rounds queries, turned anchors and
 * softmax weights to 16 bits before it sums whole numbers (docs/numerics.md, "whole numbers"). Roundings are taken as
 * independent and uniform, half a step either way, so a sum's deviation is known; six of them are allowed.
 */
#include "core/base.h"
#include "ref/ref.h"

#include <stdlib.h>

#define SIX 6.0

struct ref_rounding {
    ref_view view;
    uint32_t head;
    double *z[2]; /* [S, coords] */
};

static const void *section(const ref_view *view, int id)
{
    return view->bytes + view->header->sections[id].offset;
}

void ref_rounding_free(ref_rounding *r)
{
    if (r == NULL)
        return;
    free(r->z[0]);
    free(r->z[1]);
    free(r);
}

ref_rounding *ref_rounding_of(const void *blob, uint32_t head)
{
    ref_rounding *r = calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    r->view = ref_view_of(blob);
    r->head = head;
    for (int side = 0; side < 2; side++) {
        r->z[side] = malloc((r->view.header->num_tokens * ref_ladder_coords(&r->view, side) + 1) * sizeof *r->z[side]);
        if (r->z[side] == NULL || !ref_ladder_coded(&r->view, side, head, r->z[side])) {
            ref_rounding_free(r);
            return NULL;
        }
    }
    return r;
}

/* What one step of a number stands for before gain and sigma. */
static double unit_of(uint32_t width)
{
    return width == 1 ? 0.7979 : width == 2 ? 0.15104 : 0.02622;
}

/*
 * Queries in a level's coordinates: the step is the largest / 32639, 256 times that in coordinates of one bit; z / (sigma unit) is
 * gain * number, summed in squares.
 */
static void residual_logits(const ref_rounding *r, const double *q, double *off)
{
    const ref_view *view = &r->view;
    const uint32_t coords = ref_ladder_coords(view, AKV_SIDE_K), dim = view->header->head_dim[AKV_SIDE_K];
    double u[1024], projected[1024], largest[16] = {0};
    for (uint32_t c = 0; c < coords; c++) {
        ref_ladder_direction(view, AKV_SIDE_K, r->head, c, u);
        projected[c] = 0;
        for (uint32_t i = 0; i < dim; i++)
            projected[c] += u[i] * q[i];
        for (uint32_t l = 1; l <= view->header->num_levels; l++) {
            uint32_t width = ref_ladder_bits(view, AKV_SIDE_K, r->head, l, c);
            if (width != 0)
                largest[l] = fmax(largest[l],
                                  fabs(projected[c] * ref_ladder_sigma(view, AKV_SIDE_K, r->head, c) * unit_of(width)));
        }
    }
    for (uint64_t t = 0; t < view->header->num_tokens; t++) {
        uint32_t level = ref_ladder_level(view, AKV_SIDE_K, r->head, t);
        double square = 0;
        for (uint32_t c = 0; level != 0 && c < coords; c++) {
            uint32_t width = ref_ladder_bits(view, AKV_SIDE_K, r->head, level, c);
            double number = width == 0 ? 0
                                       : r->z[0][t * coords + c] /
                                             (ref_ladder_sigma(view, AKV_SIDE_K, r->head, c) * unit_of(width));
            square += pow(number * (width == 1 ? 256 : 1), 2);
        }
        off[t] += square * pow(largest[level] / 32639, 2) / 12;
    }
}

/*
 * Anchors: coordinates turned in steps of 1/128 byte, two roundings each and a cosine and sine rounded to 2^-14; the
 * query rounded to a step of the longest plane / 32700, or of an eighth of the planes' (pairs of coordinates by place)
 * sum / 92600.
 */
static void anchor_logits(const ref_rounding *r, const double *q, double *off)
{
    const ref_view *view = &r->view;
    const akv_header *h = view->header;
    const uint32_t dim = h->head_dim[AKV_SIDE_K], planes = h->rotary_dim / 2;
    const uint16_t *units = (const uint16_t *)section(view, AKV_SEC_UNITS) + (uint64_t)r->head * dim;
    const uint16_t *scales =
        (const uint16_t *)section(view, AKV_SEC_ANCHOR_SCALES) + (uint64_t)r->head * h->num_anchors;
    const int8_t *anchors = (const int8_t *)section(view, AKV_SEC_ANCHORS) + (uint64_t)r->head * h->num_anchors * dim;
    double x[1024], sum[4] = {0}, longest = 0;
    uint32_t first[1024], second[1024];
    for (uint32_t j = 0; j < planes; j++) {
        first[j] = h->rope_style == AKV_ROPE_HALF_SPLIT ? j : 2 * j;
        second[j] = h->rope_style == AKV_ROPE_HALF_SPLIT ? j + planes : 2 * j + 1;
    }
    for (uint32_t i = 0; i < dim; i++)
        x[i] = q[i] * akv_bf16_to_f32(units[i]) * (i < h->rotary_dim ? h->magnitude : 1);
    for (uint32_t j = 0; j < planes; j++) {
        double length = hypot(x[first[j]], x[second[j]]);
        sum[j % 8 / 2] += length;
        longest = fmax(longest, length);
    }
    for (uint32_t i = h->rotary_dim; i < dim; i++) {
        sum[(i - h->rotary_dim) % 8 / 2] += fabs(x[i]);
        longest = fmax(longest, fabs(x[i]));
    }
    double step = longest / 32700;
    for (int e = 0; e < 4; e++)
        step = fmax(step, sum[e] / (92600 - (dim / 4 + 8)));
    for (uint64_t t = 0; t < h->num_tokens; t++) {
        uint32_t anchor = ref_ladder_index(view, AKV_SIDE_K, r->head, t);
        const int8_t *a = anchors + (uint64_t)anchor * dim;
        double weight = ref_ladder_coeff(view, AKV_SIDE_K, r->head, t) * akv_f16_to_f32(scales[anchor]), square = 0;
        for (uint32_t i = 0; i < dim; i++)
            square += pow(step * a[i], 2) / 12;
        for (uint32_t j = 0; j < planes; j++) {
            double length = pow(a[first[j]], 2) + pow(a[second[j]], 2);
            square +=
                (pow(x[first[j]], 2) + pow(x[second[j]], 2)) * (2.0 / 12 / (128 * 128) + length / 12 / pow(2, 28));
        }
        off[t] += weight * weight * square;
    }
}

void ref_rounding_logits(const ref_rounding *r, const double *q, double *off)
{
    const uint64_t S = r->view.header->num_tokens;
    for (uint64_t t = 0; t < S; t++)
        off[t] = 0; /* variances */
    residual_logits(r, q, off);
    anchor_logits(r, q, off);
    for (uint64_t t = 0; t < S; t++)
        off[t] = SIX * sqrt(off[t]);
}

double ref_rounding_out(const ref_rounding *r, const double *weights)
{
    const ref_view *view = &r->view;
    const uint32_t coords = ref_ladder_coords(view, AKV_SIDE_V), dim = view->header->head_dim[AKV_SIDE_V];
    const uint64_t S = view->header->num_tokens;
    double worst = 0, *square = calloc(dim, sizeof *square), *share = calloc(coords + 1, sizeof *share), u[1024];
    double *gain = malloc((S + 1) * sizeof *gain);
    bool ok = square != NULL && share != NULL && gain != NULL && ref_ladder_gains(view, AKV_SIDE_V, r->head, gain);
    for (uint64_t b = 0; ok && b < S; b += AKV_BLOCK_TOKENS) {
        double largest[16] = {0};
        uint64_t end = b + AKV_BLOCK_TOKENS < S ? b + AKV_BLOCK_TOKENS : S;
        for (uint64_t t = b; t < end; t++) {
            uint32_t level = ref_ladder_level(view, AKV_SIDE_V, r->head, t);
            if (level != 0)
                largest[level] = fmax(largest[level], weights[t] * gain[t]);
        }
        for (uint64_t t = b; t < end; t++) { /* the weight of token t is off by up to half of largest / 65535 (255 where
                                                the coordinate has one bit), over its gain */
            uint32_t level = ref_ladder_level(view, AKV_SIDE_V, r->head, t);
            for (uint32_t c = 0; level != 0 && c < coords; c++) {
                double steps = ref_ladder_bits(view, AKV_SIDE_V, r->head, level, c) == 1 ? 255 : 65535;
                share[c] += pow(largest[level] / steps * r->z[1][t * coords + c] / gain[t], 2) / 12;
            }
        }
    }
    for (uint32_t c = 0; ok && c < coords; c++) { /* the deviations of coordinates are taken to add up, not to cancel */
        ref_ladder_direction(view, AKV_SIDE_V, r->head, c, u);
        for (uint32_t i = 0; i < dim; i++)
            square[i] += sqrt(share[c]) * fabs(u[i]);
    }
    for (uint32_t i = 0; ok && i < dim; i++)
        worst = fmax(worst, SIX * square[i]);
    free(square);
    free(share);
    free(gain);
    return ok ? worst : INFINITY;
}
