/* SPDX-License-Identifier: Apache-2.0 */
/* ref_ladder.c - canonical bytes of the LADDER coding to doubles, straight from layout.h. The bytes are trusted. */
#include "core/base.h"
#include "ref/ref.h"

#include <stdlib.h>

/*
 * Lloyd-Max quantisers of the unit Gaussian, ascending, as multiples of 0.7979, 0.15104 and 0.02622 (test_ref checks
 * them).
 */
const double ref_levels_1bit[2] = {-0.7979, 0.7979};
const double ref_levels_2bit[4] = {-1.5104, -0.45312, 0.45312, 1.5104};
const double ref_levels_4bit[16] = {-2.72688, -2.07138, -1.62564, -1.25856, -0.94392, -0.6555, -0.3933, -0.1311,
                                    0.1311,   0.3933,   0.6555,   0.94392,  1.25856,  1.62564, 2.07138, 2.72688};

static const void *section(const ref_view *view, int id)
{
    return view->bytes + view->header->sections[id].offset;
}

static uint32_t bit_at(const uint8_t *bytes, uint64_t bit)
{
    return (bytes[bit / 8] >> (bit % 8)) & 1u;
}

/* A little-endian number of `width` bits, least significant bit first. */
static uint32_t number_at(const uint8_t *bytes, uint64_t bit, uint32_t width)
{
    uint32_t x = 0;
    for (uint32_t i = 0; i < width; i++)
        x |= bit_at(bytes, bit + i) << i;
    return x;
}

uint32_t ref_ladder_coords(const ref_view *view, int side)
{
    const akv_header *h = view->header;
    return h->basis_cols[side] + h->head_dim[side] - h->basis_dim[side];
}

uint32_t ref_ladder_index(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    const akv_header *h = view->header;
    uint64_t row = (h->num_tokens * h->index_bits + 7) / 8;
    const uint8_t *index = (const uint8_t *)section(view, AKV_SEC_INDEX + side) + head * row;
    return number_at(index, token * h->index_bits, h->index_bits);
}

int ref_ladder_coeff_code(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    uint64_t row = (view->header->num_tokens + 1) / 2;
    const uint8_t *coeff = (const uint8_t *)section(view, AKV_SEC_COEFF + side) + head * row;
    int nibble = (coeff[token / 2] >> (token % 2 * 4)) & 15;
    return nibble < 8 ? nibble : nibble - 16;
}

double ref_ladder_coeff(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    int code = ref_ladder_coeff_code(view, side, head, token);
    return code == -8 ? 1 : code * 2 / 7.0;
}

uint32_t ref_ladder_level(const ref_view *view, int side, uint32_t head, uint64_t token)
{
    uint32_t planes = 0, level = 0;
    while (view->header->num_levels >> planes != 0)
        planes++;
    uint64_t row = (view->header->num_tokens + 7) / 8;
    const uint8_t *maps = (const uint8_t *)section(view, AKV_SEC_LEVELS + side) + (uint64_t)head * planes * row;
    for (uint32_t p = 0; p < planes; p++)
        level |= bit_at(maps + p * row, token) << p;
    return level;
}

void ref_ladder_anchor(const ref_view *view, int side, uint32_t head, uint32_t anchor, double *out)
{
    const akv_header *h = view->header;
    uint32_t dim = h->head_dim[side];
    uint64_t row = (uint64_t)head * h->num_anchors + anchor;
    const int8_t *bytes = (const int8_t *)section(view, AKV_SEC_ANCHORS + side) + row * dim;
    const uint16_t *scales = section(view, AKV_SEC_ANCHOR_SCALES + side);
    const uint16_t *units = (const uint16_t *)section(view, AKV_SEC_UNITS + side) + (uint64_t)head * dim;
    for (uint32_t i = 0; i < dim; i++)
        out[i] = (double)akv_f16_to_f32(scales[row]) * akv_bf16_to_f32(units[i]) * bytes[i];
}

void ref_ladder_mean(const ref_view *view, uint32_t head, double *out)
{
    uint32_t dim = view->header->head_dim[AKV_SIDE_K];
    const uint16_t *mean = (const uint16_t *)section(view, AKV_SEC_MEAN) + (uint64_t)head * dim;
    for (uint32_t i = 0; i < dim; i++)
        out[i] = akv_bf16_to_f32(mean[i]);
}

uint32_t ref_ladder_bits(const ref_view *view, int side, uint32_t head, uint32_t level, uint32_t coord)
{
    static const uint32_t bits[4] = {0, 1, 2, 4};
    uint64_t row = (ref_ladder_coords(view, side) + 3) / 4;
    const uint8_t *table = section(view, AKV_SEC_TABLES + side);
    table += ((uint64_t)head * view->header->num_levels + level - 1) * row;
    return bits[(table[coord / 4] >> (coord % 4 * 2)) & 3];
}

uint32_t ref_ladder_level_bits(const ref_view *view, int side, uint32_t head, uint32_t level)
{
    uint32_t sum = 0;
    for (uint32_t c = 0; c < ref_ladder_coords(view, side); c++)
        sum += ref_ladder_bits(view, side, head, level, c);
    return sum;
}

void ref_ladder_direction(const ref_view *view, int side, uint32_t head, uint32_t coord, double *out)
{
    const akv_header *h = view->header;
    uint32_t dim = h->head_dim[side], n = h->basis_dim[side], cols = h->basis_cols[side];
    const uint16_t *order = side == AKV_SIDE_K ? section(view, AKV_SEC_COORDS) : NULL; /* values: their own order */
    for (uint32_t i = 0; i < dim; i++)
        out[i] = 0;
    if (coord >= cols) { /* a coordinate as it is */
        uint32_t i = n + coord - cols;
        out[order != NULL ? order[i] : i] = 1;
        return;
    }
    uint64_t row = (uint64_t)head * cols + coord;
    const int8_t *basis = (const int8_t *)section(view, AKV_SEC_BASIS + side) + row * n;
    double scale = ((const float *)section(view, AKV_SEC_BASIS_SCALES + side))[row];
    for (uint32_t i = 0; i < n; i++)
        out[order != NULL ? order[i] : i] = scale * basis[i];
}

double ref_ladder_sigma(const ref_view *view, int side, uint32_t head, uint32_t coord)
{
    const uint16_t *sigmas = section(view, AKV_SEC_SIGMAS + side);
    return akv_bf16_to_f32(sigmas[(uint64_t)head * ref_ladder_coords(view, side) + coord]);
}

double ref_ladder_value(uint32_t number, uint32_t width)
{
    return width == 1 ? ref_levels_1bit[number] : width == 2 ? ref_levels_2bit[number] : ref_levels_4bit[number];
}

/* The codes of one run of n residuals of a level -> z [n, coords]; returns the bytes of the run. */
static uint64_t read_run(const ref_view *view, int side, uint32_t head, uint32_t level, const uint8_t *run, uint64_t n,
                         double *z)
{
    uint32_t coords = ref_ladder_coords(view, side), bits = ref_ladder_level_bits(view, side, head, level);
    uint64_t at = (n + 1) / 2; /* behind the gains */
    for (uint64_t first = 0; first < n; first += AKV_GROUP_LANES) {
        uint64_t g = n - first < AKV_GROUP_LANES ? n - first : AKV_GROUP_LANES, bit = 0;
        for (uint64_t i = first * coords; i < (first + g) * coords; i++)
            z[i] = 0;
        for (uint32_t width = 4; width >= 1; width /= 2) /* the widest coordinates come first */
            for (uint32_t c = 0; c < coords; c++) {
                if (ref_ladder_bits(view, side, head, level, c) != width)
                    continue;
                for (uint64_t r = 0; r < g; r++, bit += width) {
                    double gain = exp2((number_at(run, (first + r) * 4, 4) - 8.0) / 3);
                    z[(first + r) * coords + c] = gain * ref_ladder_sigma(view, side, head, c) *
                                                  ref_ladder_value(number_at(run + at, bit, width), width);
                }
            }
        at += (g * bits + 7) / 8;
    }
    return at;
}

/* z [S, coords] and gain [S], either may be NULL. */
static bool read_codes(const ref_view *view, int side, uint32_t head, double *z, double *gain)
{
    const akv_header *h = view->header;
    uint32_t coords = ref_ladder_coords(view, side);
    uint64_t S = h->num_tokens, blocks = (S + AKV_BLOCK_TOKENS - 1) / AKV_BLOCK_TOKENS;
    const uint64_t *offsets = section(view, AKV_SEC_RANKS);
    double *run_z = malloc((AKV_BLOCK_TOKENS * (uint64_t)coords + 1) * sizeof *run_z);
    if (run_z == NULL)
        return false;
    for (uint64_t i = 0; z != NULL && i < S * coords; i++)
        z[i] = 0;
    for (uint64_t b = 0; b < blocks; b++) {
        const uint8_t *run = section(view, AKV_SEC_CODES);
        run += offsets[(head * blocks + b) * 2 + (uint64_t)side];
        uint64_t t0 = b * AKV_BLOCK_TOKENS, end = t0 + AKV_BLOCK_TOKENS < S ? t0 + AKV_BLOCK_TOKENS : S;
        for (uint64_t t = t0; gain != NULL && t < end; t++)
            gain[t] = 0;
        for (uint32_t l = 1; l <= h->num_levels; l++) {
            uint64_t n = 0;
            for (uint64_t t = t0; t < end; t++)
                n += ref_ladder_level(view, side, head, t) == l;
            if (n == 0)
                continue;
            const uint8_t *gains = run;
            run += read_run(view, side, head, l, run, n, run_z);
            uint64_t i = 0;
            for (uint64_t t = t0; t < end; t++) {
                if (ref_ladder_level(view, side, head, t) != l)
                    continue;
                if (z != NULL)
                    memcpy(z + t * coords, run_z + i * coords, coords * sizeof *z);
                if (gain != NULL)
                    gain[t] = exp2((number_at(gains, i * 4, 4) - 8.0) / 3);
                i++;
            }
        }
    }
    free(run_z);
    return true;
}

bool ref_ladder_coded(const ref_view *view, int side, uint32_t head, double *z)
{
    return read_codes(view, side, head, z, NULL);
}

bool ref_ladder_gains(const ref_view *view, int side, uint32_t head, double *gain)
{
    return read_codes(view, side, head, NULL, gain);
}

static double norm(const double *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

bool ref_decode_ladder(const ref_view *view, int side, uint32_t head, double *out, double *size)
{
    const akv_header *h = view->header;
    uint32_t dim = h->head_dim[side], coords = ref_ladder_coords(view, side);
    double *z = malloc((h->num_tokens * coords + 1) * sizeof *z), *u = malloc(((uint64_t)coords * dim + 1) * sizeof *u);
    double *anchor = malloc(dim * sizeof *anchor), *mean = calloc(dim, sizeof *mean);
    bool ok = z != NULL && u != NULL && anchor != NULL && mean != NULL && ref_ladder_coded(view, side, head, z);
    for (uint32_t c = 0; ok && c < coords; c++)
        ref_ladder_direction(view, side, head, c, u + (uint64_t)c * dim);
    if (ok && side == AKV_SIDE_K)
        ref_ladder_mean(view, head, mean);
    for (uint64_t t = 0; ok && t < h->num_tokens; t++) {
        double *x = out + t * dim, gamma = ref_ladder_coeff(view, side, head, t), parts;
        ref_ladder_anchor(view, side, head, ref_ladder_index(view, side, head, t), anchor);
        parts = fabs(gamma) * norm(anchor, dim) + norm(mean, dim);
        for (uint32_t i = 0; i < dim; i++)
            x[i] = mean[i] + gamma * anchor[i];
        if (side == AKV_SIDE_K) {
            parts *= fmax(1, view->rope.magnitude);
            ref_rope_rotate(&view->rope, ref_view_position(view, t), x);
        }
        for (uint32_t c = 0; c < coords; c++)
            if (z[t * coords + c] != 0) {
                for (uint32_t i = 0; i < dim; i++)
                    x[i] += z[t * coords + c] * u[(uint64_t)c * dim + i];
                parts += fabs(z[t * coords + c]) * norm(u + (uint64_t)c * dim, dim);
            }
        if (size != NULL)
            size[t] = parts;
    }
    free(z);
    free(u);
    free(anchor);
    free(mean);
    return ok;
}
