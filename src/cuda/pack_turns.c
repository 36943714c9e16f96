/* SPDX-License-Identifier: Apache-2.0 */
/* pack_turns.c - planes of the rotary embedding and tables of turns for the private forms; see pack_turns.h. */
#include "cuda/pack_turns.h"
#include "core/rope.h"
#include "cuda/packed.h"

#include <math.h>
#include <stdlib.h>

/*
 * Long spans cost less (groups filled up, barriers, what a warp does once a span), short ones give a single sequence's
 * blocks something to do. A short segment fills a GPU in large batches only, whatever its spans are. Large heads need
 * the shared memory for themselves.
 */
uint32_t akv_span_tokens(uint64_t tokens, uint32_t dim)
{
    return tokens <= 32768 && (tokens > 4096 || dim > 128) ? 1024 : AKV_PACK_MAX_SPAN;
}

static int faster(const void *a, const void *b)
{
    const akv_plane *p = a, *q = b;
    const double x = fabs(p->speed), y = fabs(q->speed);
    return x != y ? (x < y) - (x > y) : (p->x > q->x) - (p->x < q->x);
}

/* Planes by falling speed; returns how many steps of eight planes are fast. */
uint32_t akv_sort_planes(const akv_header *h, const double *inv_freq, akv_plane *planes)
{
    const uint32_t n = h->rotary_dim / 2, all = h->head_dim[0] / 2;
    for (uint32_t j = 0; j < all; j++) {
        const bool turns = j < n;
        planes[j].turns = turns;
        planes[j].speed = turns ? inv_freq[j] : 0.0;
        planes[j].x = (uint16_t)(turns ? akv_plane_first((akv_rope_style)h->rope_style, j) : 2 * j);
        planes[j].y = (uint16_t)(turns ? akv_plane_second((akv_rope_style)h->rope_style, h->rotary_dim, j) : 2 * j + 1);
    }
    qsort(planes, all, sizeof *planes, faster);
    uint32_t fast = 0;
    while (fast < all / 8 && fabs(planes[fast * 8].speed) * (AKV_PACK_WINDOW / 2.0) > AKV_PACK_SLOW_TURN)
        fast++;
    return fast <= all / 16 ? all / 16 : all / 8;
}

void akv_put_half(uint8_t *out, uint64_t i, double x)
{
    ((uint16_t *)(void *)out)[i] = akv_f32_to_f16((float)x);
}

/* cos, sin of `tokens` for the two planes of lane column c in a step: half2 cos, half2 sin. */
void akv_put_turn(uint8_t *out, uint64_t at, const akv_plane *step, uint32_t c, double tokens)
{
    for (uint32_t i = 0; i < 2; i++) {
        const double angle = tokens * step[2 * c + i].speed;
        akv_put_half(out, at * 4 + i, cos(angle));
        akv_put_half(out, at * 4 + 2 + i, sin(angle));
    }
}
