/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tables.c - what the offsets 0 to 63 of a tile turn by, above all in the forms that the kernels of quad.h want; once per
 * RoPE and call, in pieces that the tasks of the call take.
 */
#include "attn/attend.h"
#include "core/maths.h"
#include "core/rope.h"
#include "core/slots.h"
#include "kernels/quad.h"

#include <sched.h>

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
    for (uint32_t o = 0; o < AKV_QUAD_TILE && (j0 == 0 || room->upper_turns); o++) {
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

/* Planes from `fast` on hardly turn within half a tile. */
static uint32_t fast_planes(const double *inv_freq, uint32_t planes)
{
    while (planes > 0 && 31.5 * fabs(inv_freq[planes - 1]) <= AKV_QUAD_SLOW)
        planes--;
    return planes;
}

static void plane_moments(const double *inv_freq, uint32_t n, uint32_t j0, uint32_t PP, const akv_quad_table_room *room)
{
    for (uint32_t k = 0; k < 6; k++)
        memset(room->moments + k * PP + j0, 0, AKV_QUAD_LANES * sizeof *room->moments);
    for (uint32_t l = 0; l < n; l++) {
        const double x = 32 * inv_freq[l];
        const double moment[6] = {1.0, -x * x / 2, x * x * x * x / 24, x, -x * x * x / 6, x * x * x * x * x / 120};
        for (uint32_t k = 0; k < 6 && j0 + l >= room->fast; k++)
            room->moments[k * PP + j0 + l] = (float)moment[k];
    }
}

/* akv_rope_phase; most segments begin at position 0, and a sine costs 20 ns. */
static void phases(const double *inv_freq, uint32_t planes, int64_t position, double *cosine, double *sine)
{
    for (uint32_t j = 0; j < planes && position == 0; j++) {
        cosine[j] = 1.0;
        sine[j] = 0.0;
    }
    if (position != 0)
        akv_rope_phase(inv_freq, planes, position, cosine, sine);
}

static uint32_t padded_planes(const akv_header *h)
{
    return (uint32_t)akv_round_up(h->rotary_dim / 2, AKV_QUAD_LANES);
}

/* Rad over half a window: the polynomials of degree 6 and 7 are off by 4e-6 of a plane at its ends. */
#define SLOW_TURN 1.25
/* So many tokens of a window to an anchor make up for the anchor's polynomials. */
#define SLOW_TOKENS 5u
#define SLOW_LEAST_TOKENS 256u
#define SLOW_LONGEST 4096u
#define UPPER AKV_QUAD_SLOW_PLANES /* the upper half of 64 planes */

uint32_t akv_slow_window(const akv_segment *segment)
{
    const akv_header *h = akv_header_of(segment);
    if (akv_quad_best()->slow == NULL || !akv_quad_fits(segment) || h->head_dim[0] != 4 * UPPER || h->rotary_dim != 4 * UPPER ||
        h->rope_style != AKV_ROPE_HALF_SPLIT || h->sections[AKV_SEC_POSITIONS].offset != 0 ||
        h->num_tokens < SLOW_LEAST_TOKENS)
        return 0;
    const double *inv_freq = (const double *)akv_section_of(segment, AKV_SEC_INV_FREQ) + UPPER;
    double most = 0.0;
    for (uint32_t j = 0; j < UPPER; j++)
        most = fabs(inv_freq[j]) > most ? fabs(inv_freq[j]) : most;
    uint32_t window = SLOW_LONGEST;
    while (window >= AKV_BLOCK_TOKENS && most * (window / 2) > SLOW_TURN)
        window /= 2;
    const uint64_t tokens = h->num_tokens < window ? h->num_tokens : window;
    return window >= AKV_BLOCK_TOKENS && (uint64_t)h->num_anchors * SLOW_TOKENS <= tokens ? window : 0;
}

static uint64_t windows_of_part(uint64_t tokens, uint32_t window, uint32_t heads)
{
    return akv_div_up(akv_part_tokens(tokens, heads), window);
}

uint64_t akv_slow_floats(const akv_segment *segment, uint32_t window, uint32_t heads)
{
    const uint64_t tokens = akv_header_of(segment)->num_tokens;
    if (window == 0)
        return 0;
    return (UPPER + 1) * AKV_QUAD_SLOW_TERMS + akv_parts_of(tokens, heads) * windows_of_part(tokens, window, heads) * 2 * UPPER;
}

/*
 * The series up to the seventh power, the next term brought down by the Chebyshev polynomial
 * T4*(v) = 128 v^4 - 256 v^3 + 160 v^2 - 32 v + 1 of v = u^2, which leaves 1/128 of it.
 */
void akv_slow_series(double x, float *out)
{
    double term = 1.0, powers[AKV_QUAD_SLOW_TERMS + 2];
    for (uint32_t k = 0; k < AKV_QUAD_SLOW_TERMS + 2; k++) {
        powers[k] = k % 4 < 2 ? term : -term;
        term *= x / (k + 1);
    }
    for (uint32_t odd = 0; odd < 2; odd++) {
        const double next = powers[AKV_QUAD_SLOW_TERMS + odd];
        powers[odd] -= next / 128;
        powers[2 + odd] += next / 4;
        powers[4 + odd] -= next * 1.25;
        powers[6 + odd] += next * 2;
    }
    for (uint32_t k = 0; k < AKV_QUAD_SLOW_TERMS; k++)
        out[k] = (float)powers[k];
}

/* The polynomials of the upper planes, and the phases of the windows' middles. */
static void slow_piece(const akv_tables *t, uint32_t i)
{
    const akv_segment *segment = t->params->segments[i];
    const akv_header *h = akv_header_of(segment);
    const double *inv_freq = (const double *)akv_section_of(segment, AKV_SEC_INV_FREQ) + UPPER;
    const uint32_t window = t->room[i].window, heads = t->params->num_kv_heads;
    float *series = t->room[i].slow, *largest = series + UPPER * AKV_QUAD_SLOW_TERMS, *middle = largest + AKV_QUAD_SLOW_TERMS;
    memset(largest, 0, AKV_QUAD_SLOW_TERMS * sizeof *largest);
    for (uint32_t j = 0; j < UPPER; j++) {
        akv_slow_series(inv_freq[j] * (window / 2), series + j * AKV_QUAD_SLOW_TERMS);
        for (uint32_t k = 0; k < AKV_QUAD_SLOW_TERMS; k++)
            largest[k] = fmaxf(largest[k], fabsf(series[j * AKV_QUAD_SLOW_TERMS + k]));
    }
    for (uint64_t part = 0; part < akv_parts_of(h->num_tokens, heads); part++)
        for (uint64_t w = 0; w < windows_of_part(h->num_tokens, window, heads); w++, middle += 2 * UPPER) {
            const uint64_t token = part * akv_part_tokens(h->num_tokens, heads) + w * window + window / 2;
            double cosine[UPPER], sine[UPPER];
            akv_rope_phase(inv_freq, UPPER, (int64_t)h->first_position + (int64_t)token, cosine, sine);
            for (uint32_t j = 0; j < UPPER; j++) {
                middle[j] = (float)cosine[j];
                middle[UPPER + j] = (float)sine[j];
            }
        }
}

/* Planes j0 .. j0 + 31 of a segment's tables, and of its parts' first phases. */
static void quad_piece(const akv_tables *t, uint32_t i, uint32_t j0)
{
    const akv_segment *segment = t->params->segments[i];
    const akv_header *h = akv_header_of(segment);
    const akv_quad_table_room *room = &t->room[i];
    const double *inv_freq = (const double *)akv_section_of(segment, AKV_SEC_INV_FREQ) + j0;
    const uint32_t left = h->rotary_dim / 2 - j0, n = left < AKV_QUAD_LANES ? left : AKV_QUAD_LANES, PP = padded_planes(h);
    const uint32_t heads = t->params->num_kv_heads;
    if (room->from == i) {
        plane_moments(inv_freq, n, j0, PP, room);
        lane_tables(inv_freq, n, j0, PP, room);
    }
    if (room->window != 0 && j0 != 0)
        slow_piece(t, i);
    if (room->window != 0 && j0 == 0 && room->from == i) {
        memcpy(room->lower_step, room->step, UPPER * sizeof *room->step);
        memcpy(room->lower_step + UPPER, room->step + PP, UPPER * sizeof *room->step);
    } else if (room->window != 0 && j0 == 0) { /* whose tables serve may be another piece */
        phases(inv_freq, UPPER, AKV_QUAD_TILE, room->lower_step, room->lower_step + UPPER);
    }
    if (h->sections[AKV_SEC_POSITIONS].offset != 0)
        return;
    for (size_t part = 0; part < akv_parts_of(h->num_tokens, heads); part++) {
        double *at = room->begin + 2 * (size_t)PP * part + j0;
        memset(at, 0, AKV_QUAD_LANES * sizeof *at);
        memset(at + PP, 0, AKV_QUAD_LANES * sizeof *at);
        const int64_t position = (int64_t)h->first_position + (int64_t)(part * akv_part_tokens(h->num_tokens, heads));
        phases(inv_freq, n, position, at, at + PP);
    }
}

/* Cosines and sines of the offsets, for segments that do not go through kernels/quad.h. */
static void plain_piece(const akv_tables *t, uint32_t i)
{
    const akv_segment *segment = t->params->segments[i];
    const uint32_t planes = akv_header_of(segment)->rotary_dim / 2;
    const double *inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    float *cosine = t->plain[i], *sine = cosine + (size_t)planes * AKV_TURN_SPAN;
    for (uint32_t j = 0; j < planes; j++) {
        /* Powers of one rotation: 63 complex products in double lose less than 1e-14. */
        double co, si, x = 1.0, y = 0.0;
        akv_sincos(inv_freq[j], &si, &co);
        for (uint32_t o = 0; o < AKV_TURN_SPAN; o++) {
            cosine[(size_t)o * planes + j] = (float)x;
            sine[(size_t)o * planes + j] = (float)y;
            double next = x * co - y * si;
            y = x * si + y * co;
            x = next;
        }
    }
}

/* How many pieces the tables of segment i are made in. */
static uint32_t pieces_of(const akv_tables *t, uint32_t i)
{
    const akv_segment *segment = t->params->segments[i];
    if (akv_quad_fits(segment))
        return padded_planes(akv_header_of(segment)) / AKV_QUAD_LANES;
    return t->plain[i] != NULL;
}

/* The first segment that turns as segment i does and has a table of this kind. */
static const akv_turn_table *plain_table(const akv_tables *t, uint32_t i)
{
    const akv_header *h = akv_header_of(t->params->segments[i]);
    const double *inv_freq = akv_section_of(t->params->segments[i], AKV_SEC_INV_FREQ);
    for (uint32_t j = 0; j < i; j++) {
        const akv_header *other = akv_header_of(t->params->segments[j]);
        if (t->table[j].cos != NULL && other->rotary_dim == h->rotary_dim &&
            memcmp(akv_section_of(t->params->segments[j], AKV_SEC_INV_FREQ), inv_freq, h->rotary_dim / 2 * sizeof *inv_freq) == 0)
            return &t->table[j];
    }
    return NULL;
}

void akv_tables_begin(akv_tables *t, const akv_attend_params *params)
{
    float *at = t->floats;
    t->params = params;
    t->pieces = 0;
    atomic_init(&t->next, 0);
    atomic_init(&t->done, 0);
    for (uint32_t i = 0; i < params->num_segments; i++) {
        const akv_segment *segment = params->segments[i];
        const akv_header *h = akv_header_of(segment);
        const uint32_t planes = h->rotary_dim / 2;
        const akv_turn_table none = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL};
        t->table[i] = none;
        t->plain[i] = NULL;
        if (akv_quad_fits(segment)) {
            akv_quad_table_room *room = &t->room[i];
            room->fast = fast_planes(akv_section_of(segment, AKV_SEC_INV_FREQ), planes);
            const akv_quad_table_room *from = &t->room[room->from];
            const akv_turn_table table = {NULL, NULL, from->turn16, from->mean, from->moments, from->middle, from->step,
                                          room->begin, from->turns, from->fast, room->window, room->slow,
                                          room->slow + UPPER * AKV_QUAD_SLOW_TERMS,
                                          room->slow + (UPPER + 1) * AKV_QUAD_SLOW_TERMS, room->lower_step};
            t->room[room->from].upper_turns |= room->window == 0;
            t->table[i] = table;
        } else if (h->kind == AKV_SEGMENT_COMPRESSED && planes != 0) {
            const akv_turn_table *same = plain_table(t, i);
            if (same != NULL) {
                t->table[i] = *same;
            } else {
                t->plain[i] = at;
                t->table[i].cos = at;
                t->table[i].sin = at + (size_t)planes * AKV_TURN_SPAN;
                at += (size_t)planes * AKV_TURN_SPAN * 2;
            }
        }
        t->pieces += pieces_of(t, i);
    }
}

void akv_tables_help(akv_tables *t)
{
    for (;;) {
        uint32_t piece = atomic_load_explicit(&t->next, memory_order_relaxed) < t->pieces
                             ? atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed)
                             : t->pieces;
        if (piece >= t->pieces)
            return;
        for (uint32_t i = 0;; i++) {
            const uint32_t mine = pieces_of(t, i);
            if (piece >= mine) {
                piece -= mine;
                continue;
            }
            if (t->plain[i] != NULL)
                plain_piece(t, i);
            else
                quad_piece(t, i, piece * AKV_QUAD_LANES);
            break;
        }
        atomic_fetch_add_explicit(&t->done, 1, memory_order_release);
    }
}

void akv_tables_wait(akv_tables *t)
{
    for (uint32_t looks = 0; atomic_load_explicit(&t->done, memory_order_acquire) < t->pieces; looks++)
        if (looks < 1000)
            akv_relax();
        else
            sched_yield(); /* who makes the last piece may want this processor */
}
