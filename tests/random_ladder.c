/* SPDX-License-Identifier: Apache-2.0 */
/* random_ladder.c - a segment of the LADDER coding with random valid bytes; see cases.h. Needs no codec. */
#include "cases.h"

#include <stdlib.h>

/* Sizes that are not the shape's: how many levels, how wide the bases. */
typedef struct dims {
    uint32_t basis[2], cols[2], coords[2], levels, planes, index_bits;
} dims;

static void draw_dims(const spec *s, uint32_t num_anchors, akv_rng *rng, dims *d)
{
    const uint32_t levels[] = {7, 1, 15, 3, 8};
    d->levels = levels[akv_rng_below(rng, 5)];
    d->planes = d->levels == 1 ? 1 : d->levels == 3 ? 2 : d->levels == 7 ? 3 : 4;
    d->index_bits = 1;
    while (num_anchors > 1u << d->index_bits)
        d->index_bits++;
    d->basis[0] = 2 * (uint32_t)akv_rng_below(rng, s->dk / 2 + 1);
    d->basis[1] = akv_rng_below(rng, 4) == 0 ? 0 : s->dv;
    for (int side = 0; side < 2; side++) {
        uint32_t dim = side == 0 ? s->dk : s->dv;
        d->cols[side] = akv_rng_below(rng, 2) ? d->basis[side] : (uint32_t)akv_rng_below(rng, d->basis[side] + 1);
        d->coords[side] = d->cols[side] + dim - d->basis[side];
    }
}

/* Tables of one head and side: nested, so that higher levels have at least the bits of lower ones; row_bits [levels]. */
static void draw_tables(uint8_t *table, uint32_t coords, uint32_t levels, akv_rng *rng, uint32_t *row_bits)
{
    static const uint32_t bits[4] = {0, 1, 2, 4};
    uint32_t row = (coords + 3) / 4;
    uint8_t entry[1024] = {0};
    for (uint32_t l = 0; l < levels; l++) {
        row_bits[l] = 0;
        for (uint32_t c = 0; c < coords; c++) {
            if (entry[c] < 3 && akv_rng_below(rng, 4) == 0)
                entry[c]++;
            table[l * row + c / 4] |= (uint8_t)(entry[c] << (c % 4 * 2));
            row_bits[l] += bits[entry[c]];
        }
    }
}

static void put(uint8_t *bytes, uint64_t bit, uint32_t x, uint32_t width)
{
    for (uint32_t i = 0; i < width; i++)
        bytes[(bit + i) / 8] |= (uint8_t)(((x >> i) & 1u) << ((bit + i) % 8));
}

/* Bytes of a run of n residuals of `bits` bits. */
static uint64_t run_bytes(uint64_t n, uint32_t bits)
{
    uint64_t bytes = (n + 1) / 2;
    for (; n >= 16; n -= 16)
        bytes += (16 * (uint64_t)bits + 7) / 8;
    return bytes + (n * bits + 7) / 8;
}

static void draw_run(uint8_t *run, uint64_t n, uint32_t bits, akv_rng *rng)
{
    uint64_t at = (n + 1) / 2;
    for (uint64_t i = 0; i < n; i++)
        put(run, i * 4, (uint32_t)akv_rng_below(rng, 16), 4);
    for (uint64_t first = 0; first < n; first += 16) {
        uint64_t g = n - first < 16 ? n - first : 16;
        for (uint64_t bit = 0; bit < g * bits; bit++)
            put(run + at, bit, (uint32_t)akv_rng_below(rng, 2), 1);
        at += (g * bits + 7) / 8;
    }
}

static int8_t random_byte(akv_rng *rng, double size)
{
    double x = rint(size * random_gauss(rng));
    return (int8_t)(x > 127 ? 127 : x < -127 ? -127 : x);
}

/* Per-side sections but LEVELS, RANKS, CODES. */
static void draw_side(const spec *s, const akv_header *h, uint8_t *blob, int side, const dims *d, akv_rng *rng)
{
    uint64_t H = s->H, S = s->S, k = h->num_anchors, dim = h->head_dim[side];
#define AT(id) (blob + h->sections[(id) + side].offset)
    int8_t *anchors = (int8_t *)AT(AKV_SEC_ANCHORS), *basis = (int8_t *)AT(AKV_SEC_BASIS);
    uint16_t *anchor_scales = (uint16_t *)(void *)AT(AKV_SEC_ANCHOR_SCALES), *units = (uint16_t *)(void *)AT(AKV_SEC_UNITS);
    float *basis_scales = (float *)(void *)AT(AKV_SEC_BASIS_SCALES);
    uint16_t *sigmas = (uint16_t *)(void *)AT(AKV_SEC_SIGMAS);
    for (uint64_t i = 0; i < H * k * dim; i++)
        anchors[i] = random_byte(rng, 45);
    for (uint64_t i = 0; i < H * k; i++)
        anchor_scales[i] = akv_f32_to_f16((float)((0.5 + random_unit(rng)) / 45));
    for (uint64_t head = 0; head < H; head++) {
        uint16_t *u = units + head * dim;
        for (uint64_t i = 0; i < dim; i++)
            u[i] = akv_f32_to_bf16((float)exp2(2 * random_unit(rng) - 1));
        for (uint32_t j = 0; side == 0 && j < s->rotary / 2; j++) { /* both coordinates of a plane alike */
            if (s->style == AKV_ROPE_INTERLEAVED)
                u[2 * j + 1] = u[2 * j];
            else
                u[j + s->rotary / 2] = u[j];
        }
        for (uint64_t t = 0; t < S; t++) {
            put(AT(AKV_SEC_INDEX) + head * ((S * d->index_bits + 7) / 8), t * d->index_bits,
                (uint32_t)akv_rng_below(rng, k), d->index_bits);
            put(AT(AKV_SEC_COEFF) + head * ((S + 1) / 2), t * 4, (uint32_t)akv_rng_below(rng, 16), 4);
        }
    }
    uint64_t n = d->basis[side], cols = d->cols[side]; /* columns of about unit length */
    for (uint64_t i = 0; i < H * cols * n; i++)
        basis[i] = random_byte(rng, 45);
    for (uint64_t i = 0; i < H * cols; i++)
        basis_scales[i] = (float)(1 / (45 * sqrt((double)n)));
    for (uint64_t i = 0; i < H * d->coords[side]; i++)
        sigmas[i] = akv_f32_to_bf16((float)(0.05 + random_unit(rng)));
}

/* Positions: every second (1); runs, short gaps and long ones (2); few and far between (3). */
static int32_t gap_after(int gaps, uint64_t p)
{
    if (gaps == 1)
        return 2;
    if (gaps == 3)
        return 40 + (int32_t)(p % 7);
    return p % 311 == 310 ? 700 : p % 97 == 96 ? 70 : p % 23 == 22 ? 3 : 1;
}

akv_segment *random_ladder_segment(const spec *s, uint32_t num_anchors, double density, uint64_t seed)
{
    akv_rng rng = akv_rng_stream(seed, 1003, 0);
    uint64_t S = s->S, H = s->H, blocks = (S + 1023) / 1024;
    uint32_t dim[2] = {s->dk, s->dv};
    dims d;
    draw_dims(s, num_anchors, &rng, &d);

    uint8_t *levels = must(calloc(2 * H * S, 1)); /* [side, head, token] */
    uint8_t *tables[2];
    uint32_t *row_bits = must(malloc(2 * H * d.levels * sizeof *row_bits)); /* [side, head, level - 1] */
    uint64_t code_bytes = 0, residuals[2] = {0, 0};
    for (uint64_t side = 0; side < 2; side++) {
        uint64_t table_bytes = d.levels * ((d.coords[side] + 3) / 4);
        tables[side] = must(calloc(H * table_bytes + 1, 1));
        for (uint64_t head = 0; head < H; head++) {
            draw_tables(tables[side] + head * table_bytes, d.coords[side], d.levels, &rng,
                        row_bits + (side * H + head) * d.levels);
            uint64_t owners = 0; /* a residual count above S - k is refused by akv_segment_open */
            for (uint64_t t = 0; t < S && owners < S - num_anchors; t++)
                if (random_unit(&rng) < density) {
                    levels[(side * H + head) * S + t] = (uint8_t)(1 + akv_rng_below(&rng, d.levels));
                    owners++;
                }
            residuals[side] += owners;
        }
    }
    uint64_t *offsets = must(malloc((H * blocks * 2 + 1) * sizeof *offsets)), *offset = offsets;
    for (uint64_t head = 0; head < H; head++)
        for (uint64_t b = 0; b < blocks; b++)
            for (uint64_t side = 0; side < 2; side++) {
                *offset++ = code_bytes;
                for (uint32_t l = 1; l <= d.levels; l++) {
                    uint64_t n = 0;
                    for (uint64_t t = b * 1024; t < S && t < (b + 1) * 1024; t++)
                        n += levels[(side * H + head) * S + t] == l;
                    if (n > 0)
                        code_bytes += run_bytes(n, row_bits[(side * H + head) * d.levels + l - 1]);
                }
            }
    *offset = code_bytes;

    akv_header h = {0};
    h.magic = AKV_SEGMENT_MAGIC;
    h.major = AKV_SEGMENT_MAJOR;
    h.minor = AKV_SEGMENT_MINOR;
    h.header_bytes = sizeof h;
    h.num_tokens = S;
    h.seed = seed;
    h.sm_scale = 1 / sqrt((double)s->dk);
    h.logit_softcap = s->softcap;
    h.magnitude = s->magnitude > 0 ? s->magnitude : 1;
    h.kind = AKV_SEGMENT_COMPRESSED;
    h.profile = AKV_PROFILE_DEFAULT;
    h.coding = AKV_CODING_LADDER;
    h.num_kv_heads = s->H;
    h.gqa_group = s->G;
    h.rotary_dim = s->rotary;
    h.rope_style = (uint32_t)s->style;
    h.num_anchors = num_anchors;
    h.num_queries = s->W;
    h.first_position = s->first_position;
    h.last_position = s->first_position + (int32_t)S - 1 + (s->gaps ? (int32_t)S : 0);
    h.num_sections = AKV_SEC_COUNT;
    h.num_levels = d.levels;
    h.index_bits = d.index_bits;
    h.code_bytes = code_bytes + akv_rng_below(&rng, 3) * 40; /* room left over is zeros */
    uint64_t bytes[AKV_SEC_COUNT] = {0};
    bytes[AKV_SEC_INV_FREQ] = s->rotary / 2 * 8;
    bytes[AKV_SEC_POSITIONS] = s->gaps ? S * 4 : 0;
    bytes[AKV_SEC_MEAN] = H * s->dk * 2;
    bytes[AKV_SEC_COORDS] = s->dk * 2;
    bytes[AKV_SEC_RANKS] = (H * blocks * 2 + 1) * 8;
    bytes[AKV_SEC_CODES] = h.code_bytes;
    for (int side = 0; side < 2; side++) {
        h.head_dim[side] = dim[side];
        h.num_residuals[side] = residuals[side];
        h.basis_dim[side] = d.basis[side];
        h.basis_cols[side] = d.cols[side];
        bytes[AKV_SEC_ANCHORS + side] = H * num_anchors * dim[side];
        bytes[AKV_SEC_ANCHOR_SCALES + side] = H * num_anchors * 2;
        bytes[AKV_SEC_UNITS + side] = H * dim[side] * 2;
        bytes[AKV_SEC_INDEX + side] = H * ((S * d.index_bits + 7) / 8) + 4;
        bytes[AKV_SEC_COEFF + side] = H * ((S + 1) / 2);
        bytes[AKV_SEC_BASIS + side] = H * d.cols[side] * d.basis[side];
        bytes[AKV_SEC_BASIS_SCALES + side] = H * d.cols[side] * 4;
        bytes[AKV_SEC_SIGMAS + side] = H * d.coords[side] * 2;
        bytes[AKV_SEC_TABLES + side] = H * d.levels * ((d.coords[side] + 3) / 4);
        bytes[AKV_SEC_LEVELS + side] = H * d.planes * ((S + 7) / 8);
    }
    uint64_t at = sizeof h;
    for (int id = 0; id < AKV_SEC_COUNT; id++) {
        h.sections[id].offset = bytes[id] > 0 ? at : 0;
        h.sections[id].bytes = bytes[id];
        at += (bytes[id] + 63) / 64 * 64;
    }
    h.total_bytes = h.budget_bytes = at;

    akv_segment *segment = must(akv_segment_new(NULL, at));
    uint8_t *blob = (uint8_t *)(uintptr_t)segment->blob;
    if (s->gaps) {
        int32_t *pos = (int32_t *)(void *)(blob + h.sections[AKV_SEC_POSITIONS].offset), next = s->first_position;
        for (uint64_t p = 0; p < S; p++, next += gap_after(s->gaps, p))
            pos[p] = next + (s->gaps == 1 && p > 0 && p + 1 == S);
        h.last_position = pos[S - 1];
    }
    memcpy(blob, &h, sizeof h);
    double *freq = (double *)(void *)(blob + h.sections[AKV_SEC_INV_FREQ].offset);
    for (uint32_t j = 0; j < s->rotary / 2; j++)
        freq[j] = pow(cases_rope_base, -2.0 * j / s->rotary);
    uint16_t *mean = (uint16_t *)(void *)(blob + h.sections[AKV_SEC_MEAN].offset);
    for (uint64_t i = 0; i < H * s->dk; i++)
        mean[i] = akv_f32_to_bf16((float)random_gauss(&rng));
    uint16_t *order = (uint16_t *)(void *)(blob + h.sections[AKV_SEC_COORDS].offset);
    for (uint32_t i = 0; i < s->dk; i++) { /* a random permutation, built by insertion */
        uint32_t j = (uint32_t)akv_rng_below(&rng, i + 1);
        order[i] = order[j];
        order[j] = (uint16_t)i;
    }
    memcpy(blob + h.sections[AKV_SEC_RANKS].offset, offsets, bytes[AKV_SEC_RANKS]);
    offset = offsets;
    for (uint64_t head = 0; head < H; head++)
        for (uint64_t b = 0; b < blocks; b++)
            for (uint64_t side = 0; side < 2; side++) {
                uint8_t *run = blob + h.sections[AKV_SEC_CODES].offset + *offset++;
                for (uint32_t l = 1; l <= d.levels; l++) {
                    uint64_t n = 0;
                    uint32_t bits = row_bits[(side * H + head) * d.levels + l - 1];
                    for (uint64_t t = b * 1024; t < S && t < (b + 1) * 1024; t++)
                        n += levels[(side * H + head) * S + t] == l;
                    if (n == 0)
                        continue;
                    draw_run(run, n, bits, &rng);
                    run += run_bytes(n, bits);
                }
            }
    for (int side = 0; side < 2; side++) {
        draw_side(s, &h, blob, side, &d, &rng);
        if (bytes[AKV_SEC_TABLES + side] > 0)
            memcpy(blob + h.sections[AKV_SEC_TABLES + side].offset, tables[side], bytes[AKV_SEC_TABLES + side]);
        uint8_t *maps = blob + h.sections[AKV_SEC_LEVELS + side].offset;
        for (uint64_t head = 0; head < H; head++)
            for (uint64_t t = 0; t < S; t++)
                for (uint32_t p = 0; p < d.planes; p++)
                    put(maps + (head * d.planes + p) * ((S + 7) / 8), t, levels[((uint64_t)side * H + head) * S + t] >> p & 1u, 1);
        free(tables[side]);
    }
    free(levels);
    free(row_bits);
    free(offsets);
    return segment;
}
