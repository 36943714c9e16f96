/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder_check.c - untrusted bytes in the LADDER coding: what attention reads without looking is looked at here, and
 * bits that nothing reads must be 0, so that equal contents are equal bytes.
 */
#include "format/segment_check.h"
#include "core/ladder.h"

static const char *const side_name[AKV_SIDES] = {"key", "value"};

akv_status akv_check_ladder_header(const akv_header *h, uint64_t bytes, akv_diag *diag)
{
    if (h->flags != 0)
        return CORRUPT("codec flags 0x%x belong to another coding", h->flags);
    if (h->num_levels < 1 || h->num_levels > AKV_MAX_LEVELS)
        return CORRUPT("num_levels is %u; 1..%u are possible", h->num_levels, AKV_MAX_LEVELS);
    uint32_t index_bits = 1;
    while ((h->num_anchors - 1) >> index_bits != 0)
        index_bits++;
    if (h->index_bits != index_bits)
        return CORRUPT("index_bits is %u; %u anchors take %u", h->index_bits, h->num_anchors, index_bits);
    for (int side = 0; side < AKV_SIDES; side++)
        if (h->basis_dim[side] > h->head_dim[side] || h->basis_cols[side] > h->basis_dim[side])
            return CORRUPT("the %s basis is %u x %u for head_dim %u", side_name[side], h->basis_cols[side],
                           h->basis_dim[side], h->head_dim[side]);
    if (h->basis_dim[AKV_SIDE_V] != h->head_dim[AKV_SIDE_V] && h->basis_dim[AKV_SIDE_V] != 0)
        return CORRUPT("the value basis covers %u of %u coordinates; it must cover all or none",
                       h->basis_dim[AKV_SIDE_V], h->head_dim[AKV_SIDE_V]);
    if (h->code_bytes > bytes)
        return CORRUPT("code_bytes is %llu in a segment of %llu bytes", (unsigned long long)h->code_bytes,
                       (unsigned long long)bytes);
    return AKV_OK;
}

static akv_status check_numbers(const akv_segment *segment, int side, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    AKV_TRY(akv_check_finite16(segment, AKV_SEC_ANCHOR_SCALES + side, F16_EXPONENT, diag));
    AKV_TRY(akv_check_finite16(segment, AKV_SEC_UNITS + side, BF16_EXPONENT, diag));
    AKV_TRY(akv_check_finite16(segment, AKV_SEC_SIGMAS + side, BF16_EXPONENT, diag));
    const uint16_t *unit = akv_section_of(segment, AKV_SEC_UNITS + side);
    for (uint64_t i = 0; i < h->sections[AKV_SEC_UNITS + side].bytes / 2; i++)
        if (!(akv_bf16_to_f32(unit[i]) > 0.0f))
            return CORRUPT("unit %llu of the %s anchors is not positive", (unsigned long long)i, side_name[side]);
    const float *scale = akv_section_of(segment, AKV_SEC_BASIS_SCALES + side);
    for (uint64_t i = 0; i < h->sections[AKV_SEC_BASIS_SCALES + side].bytes / 4; i++)
        if (!isfinite(scale[i]))
            return CORRUPT("scale %llu of the %s basis is NaN or infinite", (unsigned long long)i, side_name[side]);
    return AKV_OK;
}

static akv_status check_coords(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint16_t *coords = akv_section_of(segment, AKV_SEC_COORDS);
    uint8_t seen[AKV_MAX_HEAD_DIM] = {0};
    for (uint32_t i = 0; i < h->head_dim[AKV_SIDE_K]; i++)
        if (coords[i] >= h->head_dim[AKV_SIDE_K] || seen[coords[i]]++ != 0)
            return CORRUPT("key coordinate %u of the basis order is %u: out of range or there twice", i, coords[i]);
    return AKV_OK;
}

static akv_status check_index(const akv_segment *segment, int side, uint32_t head, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    for (uint64_t t = 0; t < h->num_tokens; t++)
        if (akv_ladder_index(&v, t) >= h->num_anchors)
            return CORRUPT("%s token %llu of head %u refers to anchor %u of %u", side_name[side], (unsigned long long)t,
                           head, akv_ladder_index(&v, t), h->num_anchors);
    return AKV_OK;
}

/* Bits of the last byte of a row of `used` bits that lie behind them. */
static bool slack_set(const uint8_t *row, uint64_t used)
{
    return used % 8 != 0 && row[used / 8] >> (used % 8) != 0;
}

/* Attention applies the units to a query that it has turned already, decoding to an anchor before it turns it: the
 * same only when the two coordinates of a plane share their unit. */
static akv_status check_planes(const akv_segment *segment, uint32_t head, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint16_t *unit = akv_view_ladder(segment, AKV_SIDE_K, head).units;
    for (uint32_t j = 0; j < h->rotary_dim / 2; j++) {
        const uint32_t a = h->rope_style == AKV_ROPE_INTERLEAVED ? 2 * j : j,
                       b = h->rope_style == AKV_ROPE_INTERLEAVED ? 2 * j + 1 : j + h->rotary_dim / 2;
        if (unit[a] != unit[b])
            return CORRUPT("key coordinates %u and %u of head %u turn together, but their units differ", a, b, head);
    }
    return AKV_OK;
}

/* What no token and no coordinate owns in the rows of one head. */
static akv_status check_slack(const akv_segment *segment, int side, uint32_t head, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    if (slack_set(v.index, h->num_tokens * v.index_bits))
        return CORRUPT("bits behind the last %s index of head %u are not zero", side_name[side], head);
    if (slack_set(v.coeff, h->num_tokens * 4))
        return CORRUPT("bits behind the last %s coefficient of head %u are not zero", side_name[side], head);
    for (uint32_t p = 0; p < v.planes; p++)
        if (slack_set(v.levels + p * v.plane_bytes, h->num_tokens))
            return CORRUPT("the %s levels of head %u mark tokens beyond the last one", side_name[side], head);
    for (uint32_t l = 0; l < v.num_levels; l++)
        if (slack_set(v.tables + (uint64_t)l * akv_div_up(v.num_coords, 4), (uint64_t)v.num_coords * 2))
            return CORRUPT("entries behind the last coordinate of %s level %u of head %u are not zero", side_name[side],
                           l + 1, head);
    return AKV_OK;
}

/* The 4 bytes behind the indices, which are there to be read, not to hold anything. */
static akv_status check_index_end(const akv_segment *segment, int side, akv_diag *diag)
{
    const akv_section *s = &akv_header_of(segment)->sections[AKV_SEC_INDEX + side];
    for (uint64_t at = s->offset + s->bytes - 4; at < s->offset + s->bytes; at++)
        if (segment->blob[at] != 0)
            return CORRUPT("the bytes behind the %s indices are not zero", side_name[side]);
    return AKV_OK;
}

/* The half byte behind an odd number of gains, and the bits behind the last group. `bits` per residual. */
static bool run_slack_set(const uint8_t *run, uint64_t n, uint32_t bits)
{
    const uint64_t full = n / AKV_GROUP_LANES, rest = n % AKV_GROUP_LANES;
    return slack_set(run, n * 4) || slack_set(run + (n + 1) / 2 + full * (2 * (uint64_t)bits), rest * bits);
}

/* Levels in range, runs where the offsets say. */
static akv_status check_runs(const akv_segment *segment, uint64_t residuals[AKV_SIDES], akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint64_t *offset = akv_section_of(segment, AKV_SEC_RANKS),
                   blocks = akv_div_up(h->num_tokens, AKV_BLOCK_TOKENS);
    const uint8_t *codes = akv_section_of(segment, AKV_SEC_CODES);
    uint64_t at = 0;
    for (uint32_t head = 0; head < h->num_kv_heads; head++) {
        const akv_ladder_view view[AKV_SIDES] = {akv_view_ladder(segment, 0, head), akv_view_ladder(segment, 1, head)};
        uint32_t bits[AKV_SIDES][AKV_MAX_LEVELS + 1] = {{0}};
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint32_t l = 1; l <= h->num_levels; l++) {
                akv_level_list list;
                akv_ladder_list(&view[side], l, &list);
                bits[side][l] = list.bits;
            }
        for (uint64_t block = 0; block < blocks; block++)
            for (int side = 0; side < AKV_SIDES; side++) {
                const akv_ladder_view *v = &view[side];
                const uint64_t t0 = block * AKV_BLOCK_TOKENS, rest = h->num_tokens - t0;
                uint64_t count[1u << 4] = {0};
                if (*offset++ != at)
                    return CORRUPT("the %s codes of head %u, block %llu do not begin where the ones before end",
                                   side_name[side], head, (unsigned long long)block);
                for (uint64_t i = 0; i < (rest < AKV_BLOCK_TOKENS ? rest : AKV_BLOCK_TOKENS); i++) {
                    uint32_t l = 0;
                    for (uint32_t p = 0; p < v->planes; p++)
                        l |= ((uint32_t)(v->levels[p * v->plane_bytes + (t0 + i) / 8] >> (i % 8)) & 1u) << p;
                    if (l > h->num_levels)
                        return CORRUPT("%s token %llu of head %u has level %u of %u", side_name[side],
                                       (unsigned long long)(t0 + i), head, l, h->num_levels);
                    count[l]++;
                }
                for (uint32_t l = 1; l <= h->num_levels; l++) {
                    if (count[l] == 0)
                        continue;
                    const uint8_t *run = codes + at;
                    at += akv_run_bytes(count[l], bits[side][l]);
                    residuals[side] += count[l];
                    if (at > h->code_bytes)
                        return CORRUPT("the codes of head %u, block %llu end beyond the section", head,
                                       (unsigned long long)block);
                    if (run_slack_set(run, count[l], bits[side][l]))
                        return CORRUPT("unused bits of the %s codes of head %u, block %llu, level %u are not zero",
                                       side_name[side], head, (unsigned long long)block, l);
                }
            }
    }
    if (*offset != at)
        return CORRUPT("the codes end at byte %llu, the offsets say %llu", (unsigned long long)at,
                       (unsigned long long)*offset);
    for (; at < h->code_bytes; at++)
        if (codes[at] != 0)
            return CORRUPT("byte %llu behind the last code is not zero", (unsigned long long)at);
    return AKV_OK;
}

akv_status akv_check_ladder(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    uint64_t residuals[AKV_SIDES] = {0, 0};
    AKV_TRY(akv_check_finite16(segment, AKV_SEC_MEAN, BF16_EXPONENT, diag));
    AKV_TRY(check_coords(segment, diag));
    for (int side = 0; side < AKV_SIDES; side++) {
        AKV_TRY(check_numbers(segment, side, diag));
        for (uint32_t head = 0; head < h->num_kv_heads; head++) {
            AKV_TRY(check_index(segment, side, head, diag));
            AKV_TRY(check_slack(segment, side, head, diag));
            if (side == AKV_SIDE_K)
                AKV_TRY(check_planes(segment, head, diag));
        }
        AKV_TRY(check_index_end(segment, side, diag));
    }
    AKV_TRY(check_runs(segment, residuals, diag));
    for (int side = 0; side < AKV_SIDES; side++)
        if (residuals[side] != h->num_residuals[side])
            return CORRUPT("the %s levels mark %llu residuals, the header says %llu", side_name[side],
                           (unsigned long long)residuals[side], (unsigned long long)h->num_residuals[side]);
    return AKV_OK;
}
