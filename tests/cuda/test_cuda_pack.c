/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_pack.c - the private form of a segment against the reference's reading of the canonical bytes. Needs no GPU: every code,
 * gain, index, coefficient and anchor is read back from the packed bytes as the kernels read them.
 */
#include "akv_test.h"
#include "cases.h"
#include "cuda/pack.h"
#include "core/ladder.h"

#define AT(type, offset) ((const type *)(const void *)(bytes + (offset)))

/* Step of a stored code, as the kernels' look-ups give it. */
static double step_of(const akv_packed *p, uint32_t tile_bits, uint32_t code)
{
    if (tile_bits == 4) {
        double step = (double)((p->steps4[(code & 7) / 4] >> ((code & 3) * 8)) & 255u);
        return code & 8 ? -step : step;
    }
    return (double)(int8_t)((tile_bits == 2 ? p->steps2 : p->steps1) >> (code * 8));
}

/* Code i of quad of a lane's word of a tile (packed.h). */
static uint32_t code_of(uint32_t word, uint32_t bits, bool half, uint32_t quad, uint32_t i)
{
    static const uint8_t one_bit[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
    if (half)
        return i < 2 ? word >> (4 * (2 * quad + i)) & 15u : 0;
    if (bits == 4)
        return word >> (16 * quad + 4 * i) & 15u;
    return bits == 2 ? word >> (4 * i + 2 * quad) & 3u : word >> one_bit[quad][i] & 1u;
}

static uint32_t check_side(const uint8_t *bytes, const akv_packed *p, const ref_view *view, int side, uint32_t head)
{
    const uint32_t C = p->coords[side], L = p->num_levels;
    double *want = must(malloc((p->num_tokens * C + 1) * sizeof *want)), *got = must(calloc(p->num_tokens * C + 1, sizeof *got));
    must(ref_ladder_coded(view, side, head, want) ? want : NULL);
    uint32_t residuals = 0;
    for (uint32_t s = 0; s < p->num_spans; s++) {
        const akv_packed_span *span = AT(akv_packed_span, p->spans) + (uint64_t)head * p->num_spans + s;
        const uint16_t *entries = AT(uint16_t, span->entries[side]);
        const uint8_t *code = bytes + span->codes[side];
        CHECK(span->warp[side][0] == 0 && span->warp[side][AKV_PACK_WARPS] == span->groups[side][L]);
        for (uint32_t w = 0; w < AKV_PACK_WARPS; w++)
            CHECK(span->warp[side][w] <= span->warp[side][w + 1]);
        for (uint32_t l = 0, g = 0; l < L; l++) {
            const akv_level_tiles t = AT(akv_level_tiles, p->levels[side])[head * L + l];
            const uint64_t row = ((uint64_t)head * L + l) * AKV_PACK_MAX_TILES * 16;
            for (; g < span->groups[side][l + 1]; g++, entries += 16, code += t.group_bytes) {
                for (uint32_t w = 0; w < AKV_PACK_WARPS; w++)
                    if (span->warp[side][w] == g && span->warp[side][w + 1] > g)
                        CHECK(bytes + span->codes[side] + span->warp_codes[side][w] == code);
                for (uint32_t j = 0; j < 16; j++)
                    residuals += entries[j] >> 15;
                const uint8_t *at = code;
                for (uint32_t tile = 0; tile < (uint32_t)(t.four + t.half + t.two + t.one); tile++) {
                    const uint32_t bits = tile < (uint32_t)(t.four + t.half) ? 4 : tile < (uint32_t)(t.four + t.half + t.two) ? 2 : 1;
                    const bool half = t.half && tile == t.four;
                    const uint32_t size = half ? 2 : bits;
                    for (uint32_t lane = 0; lane < 32; lane++)
                        for (uint32_t k = 0; k < 8; k++) {
                            const uint32_t quad = k / 4, i = k % 4, r = lane / 4, c = lane % 4;
                            uint32_t word = 0;
                            for (uint32_t b = 0; b < size; b++)
                                word |= (uint32_t)at[lane * size + b] << (8 * b);
                            const uint32_t token = side ? 2 * c + i % 2 + 8 * quad : r + 8 * quad, place = side ? r + i / 2 * 8 : 4 * c + i;
                            uint32_t number = code_of(word, bits, half, quad, side && half ? i % 2 + i / 2 * 4 : i);
                            if (half && side)
                                number = i < 2 ? word >> (4 * (2 * quad + i)) & 15u : 0;
                            const float scale = AT(float, p->tile_scales[side])[row + tile * 16 + place];
                            const uint16_t coord = AT(uint16_t, p->tile_coords[side])[row + tile * 16 + place], entry = entries[token];
                            CHECK_MSG((coord == 0xffff) == (scale == 0), "a place without a coordinate has a scale");
                            if (coord == 0xffff || !(entry & 0x8000u))
                                continue;
                            const uint64_t at_token = (uint64_t)s * p->span_tokens + (entry & 2047u);
                            got[at_token * C + coord] += exp2(((entry >> 11 & 15) - 8.0) / 3) * scale * step_of(p, bits, number);
                        }
                    at += 32 * size;
                }
                CHECK(at == code + t.group_bytes);
            }
        }
        const uint16_t *index = AT(uint16_t, span->index[side]);
        for (uint32_t i = 0; i < p->span_tokens && (uint64_t)s * p->span_tokens + i < p->num_tokens; i++) {
            const uint64_t token = (uint64_t)s * p->span_tokens + i;
            CHECK(index[i] == ref_ladder_index(view, side, head, token));
            CHECK(((int)((uint32_t)(bytes[span->coeff + i] >> (4 * side)) << 28) >> 28) == ref_ladder_coeff_code(view, side, head, token));
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
static void check_anchors(const uint8_t *bytes, const akv_packed *p, const akv_segment *segment, const ref_view *view, uint32_t head)
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
            const double got = (double)(bytes[p->anchors[0] + row * D + at] - 128) * (double)AT(float, p->units[0])[head * D + slot] / turns *
                               (double)AT(float, p->anchor_scales[0])[row];
            CHECK_NEAR(got, want[dim], 1e-6 * fabs(want[dim]), "key anchor %u dim %u", a, dim);
        }
        ref_ladder_anchor(view, 1, head, a, want);
        for (uint32_t i = 0; i < p->dim[1]; i++)
            CHECK_NEAR((double)(bytes[p->anchors[1] + row * D + i] - 128) * (double)AT(float, p->units[1])[head * D + i] *
                           (double)AT(float, p->anchor_scales[1])[row], want[i], 1e-6 * fabs(want[i]), "value anchor %u dim %u", a, i);
    }
}

static void packed_as_reference_reads(void)
{
    static const uint32_t dims[] = {64, 96, 128, 192, 256};
    static const uint64_t lengths[] = {1, 17, 512, 513, 1500, 17000, 33000};
    for (uint64_t i = 0; i < 21; i++) {
        spec sp = {.name = "pack", .S = lengths[i % 7], .H = 1 + (uint32_t)(i % 2), .G = 4, .dk = dims[i % 5], .dv = dims[i % 5], .W = 1,
                   .rotary = i % 4 == 3 ? dims[i % 5] / 2 : dims[i % 5], .style = (akv_rope_style)(i % 2), .magnitude = i % 3 ? 1 : 1.2};
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

static void what_has_no_private_form(void)
{
    spec sp = {.name = "none", .S = 100, .H = 1, .G = 1, .dk = 64, .dv = 64, .W = 1, .rotary = 64, .gaps = 1};
    akv_segment *gaps = random_ladder_segment(&sp, 10, 0.5, 1);
    sp.gaps = 0;
    akv_segment *plain = random_segment(&sp, 10, 0.5, 0, 1);
    sp.dk = sp.dv = sp.rotary = 80;
    akv_segment *eighty = random_ladder_segment(&sp, 10, 0.5, 1);
    CHECK(!akv_pack_covers(gaps) && !akv_pack_covers(plain) && !akv_pack_covers(eighty));
    akv_segment_release(gaps);
    akv_segment_release(plain);
    akv_segment_release(eighty);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(packed_as_reference_reads);
    TEST(what_has_no_private_form);
    return TEST_DONE();
}
