/* SPDX-License-Identifier: Apache-2.0 */
/* pack_turns.h - what the private forms of both profiles share: planes by speed, tables of turns in fp16. */
#ifndef AKV_CUDA_PACK_TURNS_H
#define AKV_CUDA_PACK_TURNS_H

#include "core/base.h"
#include "core/layout.h"

typedef struct akv_plane {
    double speed;  /* rad per position; 0 when it does not turn */
    uint16_t x, y; /* head coordinates */
    bool turns;
} akv_plane;

/* Tokens of a span: short segments need short spans to fill a GPU, long ones waste fewer filled-up groups. */
uint32_t akv_span_tokens(uint64_t tokens, uint32_t dim);

/* Planes by falling speed; returns how many steps of eight planes are fast: half of them, or all. */
uint32_t akv_sort_planes(const akv_header *h, const double *inv_freq, akv_plane *planes);

void akv_put_half(uint8_t *out, uint64_t i, double x);

/* cos, sin of `tokens` for the two planes of lane column c in a step: half2 cos, half2 sin. */
void akv_put_turn(uint8_t *out, uint64_t at, const akv_plane *step, uint32_t c, double tokens);

#endif
