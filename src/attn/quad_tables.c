/* SPDX-License-Identifier: Apache-2.0 */
/* quad_tables.c - what the offsets 0 to 63 of a tile turn by, in the forms that the kernels of quad.h want; once per RoPE and call. */
#include "attn/attend.h"
#include "core/maths.h"
#include "kernels/quad.h"

/* (x, y)[l] = (a, b)[l] times (c, s)[l], lanes side by side so that compilers vectorise them. */
static void turn_lanes(const double *a, const double *b, const double *c, const double *s, double *x, double *y)
{
    for (uint32_t l = 0; l < AKV_QUAD_LANES; l++) {
        const double co = a[l] * c[l] - b[l] * s[l], si = b[l] * c[l] + a[l] * s[l];
        x[l] = co;
        y[l] = si;
    }
}

/*
 * The tables of 32 planes from j0 on. Offset o = 8 a + b turns by eights[a] times ones[b], both exact to 1e-15: made in every call, and a
 * call over 2000 tokens is short. turn16 is rounded from products in fp32, which are off by 5e-3 of its steps at most.
 */
static void lane_tables(const double *inv_freq, uint32_t n, uint32_t j0, uint32_t PP, const akv_quad_table_room *room)
{
    enum { L = AKV_QUAD_LANES };
    double half[2][L], ones[9][2][L], eights[9][2][L];
    float one[8][2][L], eight[8][2][L];
    for (uint32_t l = 0; l < L; l++) { /* padding: no turn */
        half[0][l] = 1.0;
        half[1][l] = 0.0;
        if (l < n)
            akv_sincos(0.5 * inv_freq[l], &half[1][l], &half[0][l]);
        ones[0][0][l] = eights[0][0][l] = 1.0;
        ones[0][1][l] = eights[0][1][l] = 0.0;
    }
    turn_lanes(half[0], half[1], half[0], half[1], ones[1][0], ones[1][1]);
    for (uint32_t b = 2; b <= 8; b++)
        turn_lanes(ones[b - 1][0], ones[b - 1][1], ones[1][0], ones[1][1], ones[b][0], ones[b][1]);
    for (uint32_t a = 1; a <= 8; a++)
        turn_lanes(eights[a - 1][0], eights[a - 1][1], ones[8][0], ones[8][1], eights[a][0], eights[a][1]);
    for (uint32_t i = 0; room->turns != NULL && i < 8; i++)
        for (uint32_t k = 0; k < 2; k++) {
            memcpy(room->turns + ((size_t)i * 2 + k) * PP + j0, ones[i][k], sizeof ones[i][k]);
            memcpy(room->turns + ((size_t)(8 + i) * 2 + k) * PP + j0, eights[i][k], sizeof eights[i][k]);
        }
    memcpy(room->step + j0, eights[8][0], sizeof eights[8][0]);
    memcpy(room->step + PP + j0, eights[8][1], sizeof eights[8][1]);
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t l = 0; l < L; l++) {
            one[i][0][l] = (float)ones[i][0][l];
            one[i][1][l] = (float)ones[i][1][l];
            eight[i][0][l] = (float)eights[i][0][l] * (float)(1 << AKV_QUAD_TURN_BITS);
            eight[i][1][l] = (float)eights[i][1][l] * (float)(1 << AKV_QUAD_TURN_BITS);
        }
    const float whole = 0x1.8p23f; /* adding and taking it away rounds to a whole number */
    for (uint32_t o = 0; o < AKV_QUAD_TILE; o++) {
        int16_t *turn = room->turn16 + ((size_t)o * PP + j0) * 2;
        const float *c = eight[o / 8][0], *s = eight[o / 8][1], *x = one[o % 8][0], *y = one[o % 8][1];
        for (uint32_t l = 0; l < L; l++)
            turn[l] = (int16_t)(int32_t)((c[l] * x[l] - s[l] * y[l] + whole) - whole);
        for (uint32_t l = 0; l < L; l++)
            turn[L + l] = (int16_t)(int32_t)((s[l] * x[l] + c[l] * y[l] + whole) - whole);
    }
    for (uint32_t l = 0; l < L && j0 + l < room->fast; l++) { /* (8 a + b + 1/2) theta */
        float *mean = room->mean + (size_t)(j0 + l) * 64;
        double x[8], y[8];
        for (uint32_t b = 0; b < 8; b++) {
            x[b] = ones[b][0][l];
            y[b] = ones[b][1][l];
        }
        for (uint32_t a = 0; a < 4; a++) {
            const double co = eights[a][0][l] * half[0][l] - eights[a][1][l] * half[1][l];
            const double si = eights[a][1][l] * half[0][l] + eights[a][0][l] * half[1][l];
            for (uint32_t b = 0; b < 8; b++) {
                mean[8 * a + b] = (float)(co * x[b] - si * y[b]);
                mean[32 + 8 * a + b] = (float)(si * x[b] + co * y[b]);
            }
        }
    }
    double co[L], si[L]; /* 31.5 theta */
    turn_lanes(eights[3][0], eights[3][1], ones[7][0], ones[7][1], co, si);
    turn_lanes(co, si, half[0], half[1], co, si);
    for (uint32_t l = 0; l < L; l++) {
        room->middle[j0 + l] = (float)co[l];
        room->middle[PP + j0 + l] = (float)si[l];
    }
}

void akv_quad_tables(const double *inv_freq, uint32_t planes, uint32_t padded_planes, akv_quad_table_room *room)
{
    const uint32_t PP = padded_planes;
    memset(room->moments, 0, 6 * (size_t)PP * sizeof *room->moments);
    room->fast = planes;
    while (room->fast > 0 && 31.5 * fabs(inv_freq[room->fast - 1]) <= AKV_QUAD_SLOW)
        room->fast--;
    for (uint32_t j = room->fast; j < planes; j++) {
        const double x = 32 * inv_freq[j];
        const double moment[6] = {1.0, -x * x / 2, x * x * x * x / 24, x, -x * x * x / 6, x * x * x * x * x / 120};
        for (uint32_t k = 0; k < 6; k++)
            room->moments[k * PP + j] = (float)moment[k];
    }
    for (uint32_t j0 = 0; j0 < PP; j0 += AKV_QUAD_LANES)
        lane_tables(inv_freq + j0, planes - j0 < AKV_QUAD_LANES ? planes - j0 : AKV_QUAD_LANES, j0, PP, room);
}
