/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_pack.c - the private form of a segment against the reference's reading of the canonical bytes. Needs no
 * GPU: every code, gain, index, coefficient and anchor is read back from the packed bytes as the kernels read them.
 */
#include "akv_test.h"
#include "cases.h"
#include "cuda/pack.h"
#include "cuda/pack_paper.h"
#include "core/ladder.h"
#include "core/view.h"

#define AT(type, offset) ((const type *)(const void *)(bytes + (offset)))

static double gain_of(uint16_t entry)
{
    return exp2(((entry & 15) - 8.0) / 3);
}

/* Magnitude and sign of a 4-bit code, as the kernels' look-ups give it. */
static double step4_of(const akv_packed *p, uint32_t code)
{
    const double step = (double)((p->steps4[(code & 7) / 4] >> ((code & 3) * 8)) & 255u);
    return code & 8 ? -step : step;
}

/* Bit of a plane of one token of a group, where the tensor core's byte permutations find it (packed.h). */
static uint32_t plane_bit(const uint8_t *code, uint32_t units, uint32_t plane, uint32_t token)
{
    const uint32_t words = units / 4, u = plane / 16, lane = token % 8 * 4 + plane % 16 / 4, nibble = plane % 4;
    uint32_t sixteen;
    if (u < words * 4)
        sixteen = ((const uint16_t *)(const void *)code)[(u / 4 * 32 + lane) * 2 + u / 2 % 2];
    else if (u < words * 4 + (units & 2))
        sixteen = ((const uint16_t *)(const void *)(code + words * 128))[lane];
    else {
        const uint32_t byte = code[words * 128 + (units & 2) * 32 + lane];
        sixteen = byte | byte << 6; /* as the kernel spreads it */
    }
    return sixteen >> (4 * nibble + 2 * (u % 2) + token / 8) & 1u;
}

static void key_group(const uint8_t *bytes, const akv_packed *p, uint32_t head, uint32_t level, const uint8_t *code,
                      const uint16_t *entries, uint64_t begin, double *got)
{
    const uint32_t C = p->coords[0];
    const akv_key_level k = AT(akv_key_level, p->key_levels)[head * p->num_levels + level];
    const akv_key_plane *planes = AT(akv_key_plane, p->key_planes) + (uint64_t)head * p->key_tiles * 32 + k.first_plane;
    const float *offsets = AT(float, p->key_offsets) + ((uint64_t)head * p->num_levels + level) * C;
    CHECK(k.group_bytes == k.units * 32u + k.four * 256u && k.first_plane == k.first_tile * 32u);
    for (uint32_t token = 0; token < 16; token++) {
        const uint32_t t = entries[token] >> 4;
        if (t >= p->span_tokens)
            continue;
        double *row = got + (begin + t) * C;
        for (uint32_t c = 0; c < C; c++)
            row[c] += gain_of(entries[token]) * (double)offsets[c];
        for (uint32_t i = 0; i < k.units * 16u; i++)
            row[planes[i].coord] +=
                gain_of(entries[token]) * (double)planes[i].weight * plane_bit(code, k.units, i, token);
        for (uint32_t i = 0; i < k.four * 32u; i++) {
            const uint32_t lane = token % 8 * 4 + i % 16 / 4, nibble = token / 8 * 4 + i % 4;
            const uint32_t byte = code[k.units * 32u + i / 32 * 256 + lane * 8 + i % 32 / 16 * 4 + nibble / 2];
            const akv_key_plane plane = planes[(k.units + 1u) / 2 * 32 + i];
            row[plane.coord] +=
                gain_of(entries[token]) * (double)plane.weight * step4_of(p, byte >> (nibble % 2 * 4) & 15u);
        }
    }
}

/* Bit of row `row` (tile by tile) of a value group, where the kernel's "and" finds it (packed.h). */
static uint32_t value_bit(const uint8_t *code, uint32_t tiles, uint32_t row, uint32_t token)
{
    const uint32_t tile = row / 16, lane = row % 8 * 4 + token % 8 / 2;
    uint32_t sixteen;
    if (tile / 4 < tiles / 4 || tiles % 4 == 3)
        sixteen = ((const uint16_t *)(const void *)code)[(tile / 4 * 32 + lane) * 2 + tile / 2 % 2];
    else
        sixteen = ((const uint16_t *)(const void *)(code + tiles / 4 * 128))[lane];
    return sixteen >> (token % 2 * 8 + tile % 2 * 4 + token / 8 * 2 + row % 16 / 8) & 1u;
}

static void value_group(const uint8_t *bytes, const akv_packed *p, uint32_t head, uint32_t level, const uint8_t *code,
                        const uint16_t *entries, uint64_t begin, double *got)
{
    const akv_value_level v = AT(akv_value_level, p->value_levels)[head * p->num_levels + level];
    const akv_value_plane *planes =
        AT(akv_value_plane, p->value_planes) + ((uint64_t)head * p->value_tiles + v.first_tile) * 16;
    CHECK(v.group_bytes == (v.tiles + 1u) / 2 * 64 + v.four * 128u);
    for (uint32_t token = 0; token < 16; token++) {
        if (entries[token] >> 4 >= p->span_tokens)
            continue;
        double *row = got + (begin + (entries[token] >> 4)) * p->coords[1];
        const double gain = gain_of(entries[token]);
        for (uint32_t i = 0; i < v.tiles * 16u; i++) {
            const double bit = ldexp(value_bit(code, v.tiles, i, token),
                                     (int)(i / 16 % 2 * 4 + i % 16 / 8) - 24); /* as fp16 reads it */
            row[planes[i].coord] += gain * (bit * (double)planes[i].weight + (double)planes[i].offset);
        }
        for (uint32_t i = 0; i < v.four * 16u; i++) {
            const uint32_t lane = i % 8 * 4 + token % 8 / 2, nibble = token / 8 * 4 + i % 16 / 8 * 2 + token % 2;
            const uint32_t byte = code[(v.tiles + 1u) / 2 * 64 + i / 16 * 128 + lane * 4 + nibble / 2];
            const akv_value_plane plane = planes[v.tiles * 16 + i];
            row[plane.coord] += gain * (double)plane.weight * step4_of(p, byte >> (nibble % 2 * 4) & 15u);
        }
    }
}

/* As a thread of the kernels counts: a lane has span / 32 tokens, begins one further on than the lane before, and wraps. */
static uint32_t value_place(uint32_t token, uint32_t span_tokens)
{
    const uint32_t each = span_tokens / 32, lane = token / each;
    for (uint32_t u = 0; u < each; u++)
        if (lane * each + ((u + lane) & (each - 1)) == token)
            return u * 32 + lane;
    return UINT32_MAX;
}

static uint32_t check_side(const uint8_t *bytes, const akv_packed *p, const ref_view *view, int side, uint32_t head)
{
    const uint32_t C = p->coords[side], L = p->num_levels;
    double *want = must(malloc((p->num_tokens * C + 1) * sizeof *want)),
           *got = must(calloc(p->num_tokens * C + 1, sizeof *got));
    must(ref_ladder_coded(view, side, head, want) ? want : NULL);
    uint32_t residuals = 0;
    for (uint32_t s = 0; s < p->num_spans; s++) {
        const akv_packed_span *span = AT(akv_packed_span, p->spans) + (uint64_t)head * p->num_spans + s;
        const uint16_t *entries = AT(uint16_t, span->entries[side]);
        const uint8_t *code = bytes + span->codes[side];
        const uint64_t begin = (uint64_t)s * p->span_tokens;
        CHECK(span->warp[0] == 0 && span->warp[AKV_PACK_WARPS] == span->groups[AKV_SIDE_V][L]);
        for (uint32_t w = 0; w < AKV_PACK_WARPS; w++)
            CHECK(span->warp[w] <= span->warp[w + 1]);
        for (uint32_t l = 0, g = 0; l < L; l++) {
            const uint32_t each = side ? AT(akv_value_level, p->value_levels)[head * L + l].group_bytes
                                       : AT(akv_key_level, p->key_levels)[head * L + l].group_bytes;
            if (side == AKV_SIDE_K)
                CHECK(bytes + span->codes[side] + span->key_codes[l] == code);
            for (; g < span->groups[side][l + 1]; g++, entries += 16, code += each) {
                for (uint32_t w = 0; w < AKV_PACK_WARPS && side == AKV_SIDE_V; w++)
                    if (span->warp[w] == g && span->warp[w + 1] > g)
                        CHECK(bytes + span->codes[side] + span->warp_codes[w] == code);
                for (uint32_t j = 0; j < 16; j++) {
                    residuals += entries[j] >> 4 < p->span_tokens;
                    CHECK(entries[j] >> 4 <= p->span_tokens);
                }
                if (side)
                    value_group(bytes, p, head, l, code, entries, begin, got);
                else
                    key_group(bytes, p, head, l, code, entries, begin, got);
            }
        }
        const uint16_t *words = AT(uint16_t, span->words) + side * p->span_tokens;
        for (uint32_t i = 0; i < p->span_tokens; i++) {
            const uint64_t token = begin + i;
            const uint16_t word = words[side ? value_place(i, p->span_tokens) : i];
            if (token >= p->num_tokens) {
                CHECK(word == 0);
                continue;
            }
            CHECK((word & 4095u) == ref_ladder_index(view, side, head, token));
            CHECK(((int16_t)word >> 12) == ref_ladder_coeff_code(view, side, head, token));
        }
    }
    double worst = 0, size = 0;
    for (uint64_t e = 0; e < p->num_tokens * C; e++) {
        worst = fmax(worst, fabs(got[e] - want[e]));
        size = fmax(size, fabs(want[e]));
    }
    CHECK_NEAR(worst, 0, 1e-6 * size, "head %u side %d: residuals", head, side);
    free(want);
    free(got);
    return residuals;
}

/* Anchors in the order of the tensor core's steps, times unit and scale: what the reference decodes. */
static void check_anchors(const uint8_t *bytes, const akv_packed *p, const akv_segment *segment, const ref_view *view,
                          uint32_t head)
{
    const uint32_t D = p->dim[0], vec = p->steps % 4 == 0 ? 4 : 2;
    double want[256];
    for (uint32_t a = 0; a < p->num_anchors; a++) {
        const uint64_t row = (uint64_t)head * p->num_anchors + a;
        ref_ladder_anchor(view, 0, head, a, want);
        for (uint32_t slot = 0; slot < D; slot++) {
            const uint32_t step = slot / 16, y = slot / 8 % 2, i = slot % 8;
            const uint32_t at = ((step / vec * 4 + i / 2) * vec + step % vec) * 4 + y * 2 + i % 2;
            const uint16_t dim = AT(uint16_t, p->slots)[slot];
            const double turns = AT(double, p->inv_freq)[step * 8 + i] != 0 ? akv_header_of(segment)->magnitude : 1;
            const double got = (double)(bytes[p->anchors[0] + row * D + at] - 128) *
                               (double)AT(float, p->units[0])[head * D + slot] / turns *
                               (double)AT(float, p->anchor_scales[0])[row];
            CHECK_NEAR(got, want[dim], 1e-6 * fabs(want[dim]), "key anchor %u dim %u", a, dim);
        }
        ref_ladder_anchor(view, 1, head, a, want);
        for (uint32_t i = 0; i < p->dim[1]; i++)
            CHECK_NEAR((double)(bytes[p->anchors[1] + (uint64_t)head * ((p->num_anchors + 15) / 16 * 16) * D +
                                      akv_value_operand(D, a, i)] -
                                128) *
                           (double)AT(float, p->units[1])[head * D + i] * (double)AT(float, p->anchor_scales[1])[row],
                       want[i], 1e-6 * fabs(want[i]), "value anchor %u dim %u", a, i);
    }
    /* the transforms: operands of bytes, the values' with dims as rows, the keys' with columns as rows */
    for (int side = 0; side < 2; side++) {
        const uint32_t cols = p->basis_cols[side], n = p->basis_dim[side],
                       rows = side == 0 ? (cols + 31) / 32 * 32 : D, columns = ((side == 0 ? n : cols) + 15) / 16 * 16;
        const int8_t *basis = (const int8_t *)akv_section_of(segment, AKV_SEC_BASIS + side) + (uint64_t)head * cols * n;
        const uint8_t *operands = bytes + p->basis[side] + (uint64_t)head * rows * columns;
        uint64_t wrong = 0;
        for (uint32_t i = 0; i < rows; i++)
            for (uint32_t a = 0; a < columns; a++) {
                const uint32_t column = side == 0 ? i : a, dim = side == 0 ? a : i;
                const int want_byte = column < cols && dim < n ? basis[(uint64_t)column * n + dim] : 0;
                wrong += operands[akv_value_operand(rows, a, i)] - 128 != want_byte;
            }
        CHECK_MSG(wrong == 0, "%llu bytes of the transform of side %d differ", (unsigned long long)wrong, side);
    }
}

static void packed_as_reference_reads(void)
{
    static const uint32_t dims[] = {64, 96, 128, 192, 256};
    static const uint64_t lengths[] = {1, 17, 512, 513, 1500, 17000, 33000};
    for (uint64_t i = 0; i < 21; i++) {
        spec sp = {.name = "pack",
                   .S = lengths[i % 7],
                   .H = 1 + (uint32_t)(i % 2),
                   .G = 4,
                   .dk = dims[i % 5],
                   .dv = dims[i % 5],
                   .W = 1,
                   .rotary = i % 4 == 3 ? dims[i % 5] / 2 : dims[i % 5],
                   .style = (akv_rope_style)(i % 2),
                   .magnitude = i % 3 ? 1 : 1.2};
        if (sp.S > 2000 && i >= 14)
            continue; /* long ones once each */
        const uint32_t anchors = sp.S < 40 ? (uint32_t)sp.S : 40;
        akv_segment *segment = random_ladder_segment(&sp, anchors, i % 3 == 0 ? 0.9 : 0.4, i);
        akv_diag diag = {0};
        akv_packed plan;
        CHECK(akv_pack_covers(segment));
        CHECK_STATUS(akv_pack_plan(segment, &plan, &diag), AKV_OK, &diag);
        uint8_t *bytes = must(aligned_alloc(256, plan.total_bytes + 256));
        memset(bytes, 0xa5, plan.total_bytes + 256);
        CHECK_STATUS(akv_pack_write(segment, &plan, bytes, &diag), AKV_OK, &diag);
        int intact = 1;
        for (uint32_t j = 0; j < 256; j++)
            intact &= bytes[plan.total_bytes + j] == 0xa5;
        CHECK_MSG(intact, "packing wrote beyond its end");
        const akv_header *h = akv_header_of(segment);
        ref_view view = {.bytes = segment->blob, .header = h};
        for (int side = 0; side < 2; side++) {
            uint64_t residuals = 0;
            for (uint32_t head = 0; head < sp.H; head++)
                residuals += check_side(bytes, AT(akv_packed, 0), &view, side, head);
            CHECK_MSG(residuals == h->num_residuals[side], "%llu residuals of side %d packed, there are %llu",
                      (unsigned long long)residuals, side, (unsigned long long)h->num_residuals[side]);
        }
        for (uint32_t head = 0; head < sp.H; head++)
            check_anchors(bytes, AT(akv_packed, 0), segment, &view, head);
        free(bytes);
        akv_segment_release(segment);
    }
}

/* ------------------------------------------------------------------------------------------------------ profile paper */

/* Element (row, column) of a tile of operands, lane by lane as the tensor core reads it. */
static double operand(const uint8_t *bytes, uint64_t at, uint64_t tile, uint32_t row, uint32_t column)
{
    const uint32_t lane = row % 8 * 4 + column % 8 / 2, reg = column / 8 * 2 + row / 8;
    return akv_f16_to_f32(AT(uint16_t, at)[tile * 256 + lane * 8 + reg * 2 + column % 2]);
}

static double word_value(uint32_t word)
{
    return akv_f16_to_f32((uint16_t)(word >> 16));
}

static void paper_side(const uint8_t *bytes, const akv_paper *p, const akv_segment *segment, uint32_t head, int side)
{
    const akv_side_view v = akv_view_side(segment, side, head);
    const akv_paper_head *unit = AT(akv_paper_head, p->heads) + head;
    const double size = side == AKV_SIDE_V ? (double)unit->gain_unit : 1;
    for (uint32_t s = 0; s < p->num_spans; s++) {
        const akv_paper_span *span = AT(akv_paper_span, p->spans) + (uint64_t)head * p->num_spans + s;
        const uint32_t *words = AT(uint32_t, span->words) + side * p->span_tokens,
                       *entries = AT(uint32_t, span->entries[side]), *codes = AT(uint32_t, span->codes[side]);
        const uint64_t begin = (uint64_t)s * p->span_tokens;
        uint32_t at = 0;
        for (uint32_t i = 0; i < p->span_tokens; i++) {
            const uint64_t token = begin + i;
            const uint32_t word = words[side ? value_place(i, p->span_tokens) : i];
            if (token >= p->num_tokens) {
                CHECK(word == 0);
                continue;
            }
            CHECK((word & 0xffffu) == akv_view_index(&v, token) && word >> 16 == v.coeff[token]);
            if (!akv_view_owns(&v, token))
                continue;
            /* where the residual is in the canonical bytes */
            const uint64_t block = token / AKV_BLOCK_TOKENS, rest = p->num_tokens - block * AKV_BLOCK_TOKENS;
            uint16_t owner[AKV_BLOCK_TOKENS];
            const uint32_t n = akv_view_owners(&v, block, rest < AKV_BLOCK_TOKENS ? (uint32_t)rest : AKV_BLOCK_TOKENS, owner);
            uint32_t r = 0;
            while (owner[r] != token % AKV_BLOCK_TOKENS)
                r++;
            const uint32_t first = r / 16 * 16, lanes = n - first < 16 ? n - first : 16;
            const uint8_t *group = v.codes + (v.ranks[block] + first) * v.code_bytes;
            CHECK((entries[at] & 0xffffu) == i);
            CHECK(word_value(entries[at]) * size == (double)akv_f16_to_f32(v.gains[v.ranks[block] + r]));
            int same = 1;
            for (uint32_t c = 0; c < p->dim; c++) {
                const uint32_t bit = (c * lanes + r - first) * 2, want = group[bit / 8] >> (bit % 8) & 3u;
                const uint8_t *mine = (const uint8_t *)(codes + (uint64_t)(at / 16) * p->dim);
                const uint32_t got = side == AKV_SIDE_K
                                         ? plane_bit(mine, p->dim / 8, c / 16 * 32 + c % 16, at % 16) * 2 +
                                               plane_bit(mine, p->dim / 8, c / 16 * 32 + 16 + c % 16, at % 16)
                                         : value_bit(mine, p->dim / 8, c / 8 * 16 + c % 8, at % 16) * 2 +
                                               value_bit(mine, p->dim / 8, c / 8 * 16 + 8 + c % 8, at % 16);
                same &= got == want;
            }
            CHECK_MSG(same, "codes of token %llu", (unsigned long long)token);
            at++;
        }
        CHECK(span->groups[side] == (at + 15) / 16);
        for (; at < span->groups[side] * 16; at++)
            CHECK(entries[at] == p->span_tokens);
    }
}

static void paper_anchors(const uint8_t *bytes, const akv_paper *p, const akv_segment *segment, uint32_t head)
{
    const akv_side_view k = akv_view_side(segment, 0, head), v = akv_view_side(segment, 1, head);
    const akv_paper_head *unit = AT(akv_paper_head, p->heads) + head;
    for (uint32_t a = 0; a < p->num_anchors; a++)
        for (uint32_t i = 0; i < p->dim; i++) {
            const uint32_t step = i / 16, c = i % 8 / 2, dim = AT(uint16_t, p->slots)[i];
            const uint64_t row = ((uint64_t)head * p->num_anchors + a) * p->dim;
            const double key = akv_f16_to_f32(AT(uint16_t, p->keys)[row + step / 2 * 32 + c * 8 + step % 2 * 4 +
                                                                    i % 16 / 8 * 2 + i % 2]);
            CHECK_NEAR(key * (double)unit->key_unit, (double)akv_bf16_to_f32(k.anchors[a * p->dim + dim]),
                       0x1p-25 * (double)unit->key_unit, "key anchor %u dim %u", a, dim);
            const uint64_t tile = ((uint64_t)head * p->padded_anchors / 16 + a / 16) * (p->dim / 16) + i / 16;
            CHECK_NEAR(operand(bytes, p->values, tile, i % 16, a % 16) * (double)unit->value_unit,
                       (double)akv_bf16_to_f32(v.anchors[a * p->dim + i]), 0x1p-25 * (double)unit->value_unit,
                       "value anchor %u dim %u", a, i); /* exact but for the smallest, which fp16 rounds */
        }
    double most = 0;
    for (uint64_t t = 0; t < p->num_tokens; t++)
        most = fmax(most, fabs((double)akv_f16_to_f32(v.coeff[t])));
    CHECK(ldexp(1, unit->coeff_log) >= most);
}

/* Both transforms against the reference's. */
static void paper_transforms(const uint8_t *bytes, const akv_paper *p, uint64_t seed)
{
    double x[256], want[256];
    float sign[256];
    const uint32_t tiles = p->dim / 16;
    for (int side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < p->dim; i++)
            x[i] = sin(0.7 * i + side);
        akv_signs(seed, side, p->dim, sign);
        for (uint32_t i = 0; i < p->dim; i++)
            want[i] = x[i] * (double)sign[i];
        ref_hadamard(want, p->dim);
        for (uint32_t c = 0; c < p->dim; c++) {
            double got = 0;
            for (uint32_t i = 0; i < p->dim; i++) {
                const uint32_t row = side ? i : c, column = side ? c : i;
                got += x[i] * operand(bytes, p->transform[side], (uint64_t)(row / 16) * tiles + column / 16, row % 16, column % 16);
            }
            CHECK_NEAR(got * (double)AT(float, p->norms)[c], want[c], 1e-6, "transform %d coordinate %u", side, c);
        }
    }
}

static void paper_as_reference_reads(void)
{
    static const uint32_t dims[] = {64, 96, 128, 192, 256};
    static const uint64_t lengths[] = {1, 17, 1024, 1025, 2500, 33000};
    for (uint64_t i = 0; i < 12; i++) {
        spec sp = {.name = "paper", .S = lengths[i % 6], .H = 1 + (uint32_t)(i % 2), .G = 4, .dk = dims[i % 5], .dv = dims[i % 5],
                   .W = 1, .rotary = i % 4 == 3 ? dims[i % 5] / 2 : dims[i % 5], .style = (akv_rope_style)(i % 2),
                   .magnitude = i % 3 ? 1 : 1.2};
        const uint32_t anchors = sp.S < 300 ? (uint32_t)sp.S : i % 2 ? 300 : 40;
        akv_segment *segment = random_segment(&sp, anchors, i % 3 == 0 ? 0.9 : 0.3, 0, i);
        akv_paper plan;
        CHECK(akv_paper_covers(segment) && !akv_pack_covers(segment));
        akv_paper_plan(segment, &plan);
        uint8_t *bytes = must(aligned_alloc(256, plan.total_bytes + 256));
        memset(bytes, 0xa5, plan.total_bytes + 256);
        akv_paper_write(segment, &plan, bytes);
        int intact = 1;
        for (uint32_t j = 0; j < 256; j++)
            intact &= bytes[plan.total_bytes + j] == 0xa5;
        CHECK_MSG(intact, "packing wrote beyond its end");
        const akv_paper *p = AT(akv_paper, 0);
        for (uint32_t head = 0; head < sp.H; head++) {
            for (int side = 0; side < 2; side++)
                paper_side(bytes, p, segment, head, side);
            paper_anchors(bytes, p, segment, head);
        }
        paper_transforms(bytes, p, akv_header_of(segment)->seed);
        free(bytes);
        akv_segment_release(segment);
    }
}

static void what_has_no_private_form(void)
{
    spec sp = {.name = "none", .S = 100, .H = 1, .G = 1, .dk = 64, .dv = 64, .W = 1, .rotary = 64, .gaps = 1};
    akv_segment *gaps = random_ladder_segment(&sp, 10, 0.5, 1);
    sp.gaps = 0;
    akv_segment *plain = random_segment(&sp, 10, 0.5, 0, 1);
    sp.dk = sp.dv = sp.rotary = 80;
    akv_segment *eighty = random_ladder_segment(&sp, 10, 0.5, 1);
    CHECK(!akv_pack_covers(gaps) && !akv_pack_covers(plain) && !akv_pack_covers(eighty));
    akv_segment *eighty_plain = random_segment(&sp, 10, 0.5, 0, 1);
    CHECK(akv_paper_covers(plain) && !akv_paper_covers(eighty_plain) && !akv_paper_covers(eighty));
    akv_segment_release(eighty_plain);
    sp.dk = sp.dv = sp.rotary = 64;
    akv_segment *after = random_segment(&sp, 10, 0.5, AKV_FLAG_ANCHORS_POST_ROPE, 1);
    sp.gaps = 1;
    akv_segment *gaps_plain = random_segment(&sp, 10, 0.5, 0, 1);
    CHECK(!akv_paper_covers(after) && !akv_paper_covers(gaps_plain));
    akv_segment_release(after);
    akv_segment_release(gaps_plain);
    akv_segment_release(gaps);
    akv_segment_release(plain);
    akv_segment_release(eighty);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(packed_as_reference_reads);
    TEST(paper_as_reference_reads);
    TEST(what_has_no_private_form);
    return TEST_DONE();
}
