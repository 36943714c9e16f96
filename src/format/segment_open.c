/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment_open.c - a segment from canonical bytes that may come from anywhere. Nothing is believed: the header's fields
 * are checked against their ranges, the section table against the one layout those fields imply, then every index,
 * count and number inside the sections. What passes can be attended to without any further check.
 */
#include "format/segment_check.h"
#include "core/sizes.h"

static const char *const side_name[AKV_SIDES] = {"key", "value"};

static const char *section_name(int id)
{
    static const char *const names[AKV_SEC_COUNT] = {
        "INV_FREQ", "POSITIONS", "ANCHOR_TOKENS", "ANCHORS(k)", "ANCHORS(v)", "INDEX(k)", "INDEX(v)",
        "COEFF(k)", "COEFF(v)",  "LEVELS(k)",     "LEVELS(v)",  "GAINS(k)",   "GAINS(v)", "CODES(k)",
        "CODES(v)", "DENSE(k)",  "DENSE(v)",      "RANKS(k)",   "RANKS(v)",
        "MEAN",     "ANCHOR_SCALES(k)", "ANCHOR_SCALES(v)", "COORDS", "BASIS(k)", "BASIS(v)", "BASIS_SCALES(k)",
        "BASIS_SCALES(v)", "SIGMAS(k)", "SIGMAS(v)", "TABLES(k)", "TABLES(v)", "UNITS(k)", "UNITS(v)"};
    return id < AKV_SEC_COUNT ? names[id] : "of a newer version";
}

/* ---------------------------------------------------------------------------------------------- header and table */

static akv_status check_version(const akv_header *h, akv_diag *diag)
{
    if (h->magic == __builtin_bswap32(AKV_SEGMENT_MAGIC))
        return akv_fail(diag, AKV_E_VERSION,
                        "segment bytes are in the other byte order; this reader needs a little-endian "
                        "file on a little-endian machine");
    if (h->magic != AKV_SEGMENT_MAGIC)
        return CORRUPT("not a segment: it begins with 0x%08x instead of 0x%08x (\"AKVS\")", h->magic,
                       AKV_SEGMENT_MAGIC);
    if (h->major != AKV_SEGMENT_MAJOR)
        return akv_fail(diag, AKV_E_VERSION, "segment format %u.%u is unknown; this library reads version %u.x",
                        h->major, h->minor, AKV_SEGMENT_MAJOR);
    if (h->required != 0)
        return akv_fail(diag, AKV_E_VERSION, "segment needs feature bits 0x%x, which this library does not know",
                        h->required);
    return AKV_OK;
}

static akv_status check_shape(const akv_header *h, akv_diag *diag)
{
    akv_shape shape;
    akv_shape_init(&shape);
    shape.num_tokens = h->num_tokens;
    shape.num_kv_heads = h->num_kv_heads;
    shape.gqa_group = h->gqa_group;
    shape.head_dim_k = h->head_dim[AKV_SIDE_K];
    shape.head_dim_v = h->head_dim[AKV_SIDE_V];
    shape.rotary_dim = h->rotary_dim;
    if (h->num_queries != 0 || h->kind != AKV_SEGMENT_DENSE) /* dense segments need no window */
        shape.num_queries = h->num_queries;
    akv_diag inner;
    if (akv_check_shape(&shape, &inner) != AKV_OK)
        return CORRUPT("segment header: %.480s", inner.message);
    if (h->rope_style > AKV_ROPE_INTERLEAVED)
        return CORRUPT("rope_style is %u; 0 and 1 exist", h->rope_style);
    if (!isfinite(h->magnitude) || h->magnitude <= 0.0)
        return CORRUPT("the magnitude of the rotary embedding is not a positive finite number");
    if (!isfinite(h->sm_scale) || !isfinite(h->logit_softcap) || h->logit_softcap < 0.0)
        return CORRUPT("softmax scale and logit soft-cap must be finite, the soft-cap not negative");
    if (h->dense_dtype > AKV_BF16)
        return CORRUPT("dense_dtype is %u; 0, 1 and 2 exist", h->dense_dtype);
    int64_t span = (int64_t)h->last_position - h->first_position;
    if (span < 0 || (uint64_t)span + 1 < h->num_tokens)
        return CORRUPT("positions %d..%d cannot hold %llu tokens in ascending order", h->first_position,
                       h->last_position, (unsigned long long)h->num_tokens);
    return AKV_OK;
}

static akv_status check_kind(const akv_header *h, akv_diag *diag)
{
    if (h->kind == AKV_SEGMENT_DENSE) {
        if (h->dense_reason == AKV_DENSE_NONE || h->dense_reason > AKV_DENSE_EVICTED)
            return CORRUPT("dense_reason is %u; a dense segment has 1..%d", h->dense_reason, AKV_DENSE_EVICTED);
        if (h->num_anchors != 0 || h->num_residuals[0] != 0 || h->num_residuals[1] != 0 || h->flags != 0)
            return CORRUPT("a dense segment has no anchors, residuals or codec flags, but the header counts some");
        return AKV_OK;
    }
    if (h->kind != AKV_SEGMENT_COMPRESSED)
        return CORRUPT("segment kind is %u; 0 and 1 exist", h->kind);
    if (h->dense_reason != AKV_DENSE_NONE)
        return CORRUPT("dense_reason is %u in a compressed segment; it must be 0", h->dense_reason);
    if (h->coding > AKV_CODING_LADDER)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "segment uses coding %u (profile %u); this library decodes 0 and 1", h->coding,
                        h->profile);
    if ((h->flags & ~AKV_FLAGS_KNOWN) != 0)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "segment uses codec flags 0x%x; this library knows 0x%x", h->flags,
                        AKV_FLAGS_KNOWN);
    if (h->profile != AKV_PROFILE_PAPER && h->profile != AKV_PROFILE_DEFAULT)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "segment uses codec profile %u; this library decodes profiles %d and %d",
                        h->profile, AKV_PROFILE_PAPER, AKV_PROFILE_DEFAULT);
    if (h->profile != (h->coding == AKV_CODING_LADDER ? AKV_PROFILE_DEFAULT : AKV_PROFILE_PAPER))
        return CORRUPT("profile %u does not go with coding %u", h->profile, h->coding);
    if (h->num_queries == 0)
        return CORRUPT("num_queries is 0; a compressed segment has a window of at least 1");
    if (h->num_anchors == 0 || h->num_anchors > h->num_tokens || h->num_anchors > AKV_MAX_ANCHORS)
        return CORRUPT("num_anchors is %u; 1..min(num_tokens, %u) is possible", h->num_anchors, AKV_MAX_ANCHORS);
    /* PLAIN: every anchor is a token and owns none. LADDER: an anchor may be no token; the levels are checked later. */
    const uint64_t owners = h->num_tokens - (h->coding == AKV_CODING_LADDER ? 0 : h->num_anchors);
    for (int side = 0; side < AKV_SIDES; side++)
        if (h->num_residuals[side] > owners * h->num_kv_heads)
            return CORRUPT("%llu %s residuals are more than there are tokens without an anchor",
                           (unsigned long long)h->num_residuals[side], side_name[side]);
    return AKV_OK;
}

/* The table must be the one layout that the fields imply; sections that a newer minor appended only have to lie inside.
 */
static akv_status check_table(const akv_header *h, akv_diag *diag)
{
    bool newer = h->minor > AKV_SEGMENT_MINOR;
    if (h->header_bytes != sizeof *h)
        return CORRUPT("header_bytes is %u; version %u.x has %zu", h->header_bytes, h->major, sizeof *h);
    if (newer ? h->num_sections < AKV_SEC_COUNT || h->num_sections > AKV_SEC_ROOM : h->num_sections != AKV_SEC_COUNT)
        return CORRUPT("num_sections is %u; version %u.%u has %d", h->num_sections, h->major, h->minor, AKV_SEC_COUNT);
    uint32_t reserved = h->optional;
    for (size_t i = 0; i < sizeof h->reserved / sizeof *h->reserved; i++)
        reserved |= h->reserved[i];
    if (!newer && reserved != 0)
        return CORRUPT("a header field that version %u.%u leaves 0 is not 0", h->major, h->minor);

    akv_header want = *h; /* the same shape, laid out anew */
    bool has_positions = h->sections[AKV_SEC_POSITIONS].offset != 0;
    akv_layout_sections(&want, has_positions);
    uint64_t end = want.total_bytes;
    for (int id = 0; id < AKV_SEC_COUNT; id++) {
        const akv_section *s = &h->sections[id], *w = &want.sections[id];
        if (s->bytes != w->bytes || s->offset != w->offset)
            return CORRUPT("section %s is %llu bytes at %llu; the header's shape puts %llu bytes at %llu",
                           section_name(id), (unsigned long long)s->bytes, (unsigned long long)s->offset,
                           (unsigned long long)w->bytes, (unsigned long long)w->offset);
    }
    for (int id = AKV_SEC_COUNT; id < AKV_SEC_ROOM; id++) {
        const akv_section *s = &h->sections[id];
        if (s->offset == 0 && s->bytes == 0)
            continue;
        if (!newer || (uint32_t)id >= h->num_sections || end > h->total_bytes || s->offset != end || s->bytes == 0 ||
            s->bytes > h->total_bytes - end)
            return CORRUPT("section %d does not belong into version %u.%u or lies outside the segment", id, h->major,
                           h->minor);
        end += akv_round_up(s->bytes, AKV_ALIGN);
        if (end > h->total_bytes)
            return CORRUPT("section %d ends beyond the segment", id);
    }
    if (end != h->total_bytes)
        return CORRUPT("total_bytes is %llu; the sections end at %llu", (unsigned long long)h->total_bytes,
                       (unsigned long long)end);
    if (h->kind == AKV_SEGMENT_COMPRESSED && !has_positions &&
        (uint64_t)((int64_t)h->last_position - h->first_position) + 1 != h->num_tokens)
        return CORRUPT("positions %d..%d are not consecutive for %llu tokens, but no positions are stored",
                       h->first_position, h->last_position, (unsigned long long)h->num_tokens);
    return AKV_OK;
}

static akv_status check_header(const akv_header *h, size_t bytes, akv_diag *diag)
{
    AKV_TRY(check_version(h, diag));
    if (h->total_bytes != bytes)
        return CORRUPT("the header says %llu bytes, but %zu are here (truncated or padded)",
                       (unsigned long long)h->total_bytes, bytes);
    AKV_TRY(check_shape(h, diag));
    AKV_TRY(check_kind(h, diag));
    if (h->kind == AKV_SEGMENT_COMPRESSED && h->coding == AKV_CODING_LADDER)
        AKV_TRY(akv_check_ladder_header(h, bytes, diag));
    else if (h->coding != 0 || h->code_bytes != 0 || h->num_levels != 0 || h->index_bits != 0 || h->basis_dim[0] != 0 ||
             h->basis_dim[1] != 0 || h->basis_cols[0] != 0 || h->basis_cols[1] != 0)
        return CORRUPT("header fields of the ladder coding are set in a segment without it");
    return check_table(h, diag);
}

/* -------------------------------------------------------------------------------------------------------- contents */

/* Index of the first 16-bit float whose exponent bits are all ones, or n. */
static uint64_t find_non_finite16(const uint16_t *x, uint64_t n, uint16_t exponent)
{
    /* Whole blocks first, without a branch inside, so that compilers use vectors; the search is for the bad one only.
     */
    enum { BLOCK = 4096 };
    for (uint64_t at = 0; at < n; at += BLOCK) {
        uint64_t end = n - at < BLOCK ? n : at + BLOCK;
        uint32_t bad = 0;
        for (uint64_t i = at; i < end; i++)
            bad |= (x[i] & exponent) == exponent;
        for (uint64_t i = at; bad && i < end; i++)
            if ((x[i] & exponent) == exponent)
                return i;
    }
    return n;
}

akv_status akv_check_finite16(const akv_segment *segment, int id, uint16_t exponent, akv_diag *diag)
{
    uint64_t n = akv_header_of(segment)->sections[id].bytes / 2;
    uint64_t at = find_non_finite16(akv_section_of(segment, id), n, exponent);
    if (at != n)
        return CORRUPT("section %s holds NaN or infinity at element %llu", section_name(id), (unsigned long long)at);
    return AKV_OK;
}

static akv_status check_padding(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    for (int id = 0; id < AKV_SEC_COUNT; id++) {
        uint64_t end = h->sections[id].offset + h->sections[id].bytes;
        for (uint64_t at = end; at % AKV_ALIGN != 0; at++)
            if (segment->blob[at] != 0)
                return CORRUPT("the padding after section %s is not zero", section_name(id));
    }
    return AKV_OK;
}

static akv_status check_rope_and_positions(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const double *inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    for (uint64_t j = 0; j < h->sections[AKV_SEC_INV_FREQ].bytes / 8; j++)
        if (!isfinite(inv_freq[j]))
            return CORRUPT("inv_freq[%llu] is NaN or infinite", (unsigned long long)j);
    if (h->sections[AKV_SEC_POSITIONS].offset == 0)
        return AKV_OK;
    const int32_t *pos = akv_section_of(segment, AKV_SEC_POSITIONS);
    for (uint64_t p = 1; p < h->num_tokens; p++)
        if (pos[p] <= pos[p - 1])
            return CORRUPT("positions must ascend, but position %d of token %llu follows %d", pos[p],
                           (unsigned long long)p, pos[p - 1]);
    if (pos[0] != h->first_position || pos[h->num_tokens - 1] != h->last_position)
        return CORRUPT("the stored positions span %d..%d, the header says %d..%d", pos[0], pos[h->num_tokens - 1],
                       h->first_position, h->last_position);
    return AKV_OK;
}

static akv_status check_dense(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    for (int side = 0; side < AKV_SIDES; side++) {
        int id = AKV_SEC_DENSE + side;
        if (h->dense_dtype != AKV_F32) {
            AKV_TRY(akv_check_finite16(segment, id, h->dense_dtype == AKV_F16 ? F16_EXPONENT : BF16_EXPONENT, diag));
            continue;
        }
        const float *x = akv_section_of(segment, id);
        for (uint64_t i = 0; i < h->sections[id].bytes / 4; i++)
            if (!isfinite(x[i]))
                return CORRUPT("section %s holds NaN or infinity at element %llu", section_name(id),
                               (unsigned long long)i);
    }
    return AKV_OK;
}

static akv_status check_anchor_tokens(const akv_segment *segment, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t *token = akv_section_of(segment, AKV_SEC_ANCHOR_TOKENS);
    for (uint64_t head = 0; head < h->num_kv_heads; head++, token += h->num_anchors)
        for (uint32_t c = 0; c < h->num_anchors; c++)
            if (token[c] >= h->num_tokens || (c > 0 && token[c] <= token[c - 1]))
                return CORRUPT("anchor %u of head %llu is token %u; anchor tokens must ascend and be below %llu", c,
                               (unsigned long long)head, token[c], (unsigned long long)h->num_tokens);
    return AKV_OK;
}

static akv_status check_index(const akv_segment *segment, int side, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const void *index = akv_section_of(segment, AKV_SEC_INDEX + side);
    bool wide = h->num_anchors > 256;
    for (uint64_t i = 0; i < h->num_kv_heads * h->num_tokens; i++) {
        uint32_t c = wide ? ((const uint16_t *)index)[i] : ((const uint8_t *)index)[i];
        if (c >= h->num_anchors)
            return CORRUPT("%s token %llu of head %llu refers to anchor %u of %u", side_name[side],
                           (unsigned long long)(i % h->num_tokens), (unsigned long long)(i / h->num_tokens), c,
                           h->num_anchors);
    }
    return AKV_OK;
}

/* Residuals that a head's bitmap gives to tokens [first, first + n); first is a multiple of 8. */
static uint64_t count_residuals(const uint8_t *map, uint64_t first, uint64_t n)
{
    uint64_t count = 0;
    for (uint64_t byte = first / 8; byte < akv_div_up(first + n, 8); byte++)
        count += akv_popcount8(map[byte]);
    return count;
}

/* The bitmaps against the anchors, and the ranks (residuals before each block) against the bitmaps. */
static akv_status check_levels(const akv_segment *segment, int side, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    const uint8_t *map = akv_section_of(segment, AKV_SEC_LEVELS + side);
    const uint64_t *rank = akv_section_of(segment, AKV_SEC_RANKS + side);
    const uint32_t *token = akv_section_of(segment, AKV_SEC_ANCHOR_TOKENS);
    uint64_t S = h->num_tokens, map_bytes = akv_div_up(S, 8), count = 0;
    for (uint64_t head = 0; head < h->num_kv_heads; head++, map += map_bytes, token += h->num_anchors) {
        if (S % 8 != 0 && map[map_bytes - 1] >> (S % 8) != 0)
            return CORRUPT("the %s level map of head %llu marks tokens beyond the last one", side_name[side],
                           (unsigned long long)head);
        for (uint32_t c = 0; c < h->num_anchors; c++)
            if (map[token[c] >> 3] >> (token[c] & 7) & 1)
                return CORRUPT("anchor token %u of head %llu owns a %s residual; anchors are exact and own none",
                               token[c], (unsigned long long)head, side_name[side]);
        for (uint64_t first = 0; first < S; first += AKV_BLOCK_TOKENS) {
            if (*rank++ != count)
                return CORRUPT("the %s rank of head %llu, token %llu is not the number of residuals before it",
                               side_name[side], (unsigned long long)head, (unsigned long long)first);
            count += count_residuals(map, first, S - first < AKV_BLOCK_TOKENS ? S - first : AKV_BLOCK_TOKENS);
        }
    }
    if (count != h->num_residuals[side] || *rank != count)
        return CORRUPT("the %s level maps mark %llu residuals, the header says %llu, the last rank %llu",
                       side_name[side], (unsigned long long)count, (unsigned long long)h->num_residuals[side],
                       (unsigned long long)*rank);
    return AKV_OK;
}

/*
 * Every 2-bit code is legal; only a head_dim that is not a multiple of 4 leaves unused bits, the last 4 g bits of each
 * group of g, which must be 0.
 */
static akv_status check_codes(const akv_segment *segment, int side, akv_diag *diag)
{
    const akv_header *h = akv_header_of(segment);
    uint64_t S = h->num_tokens, map_bytes = akv_div_up(S, 8);
    uint32_t dim = h->head_dim[side], code_bytes = akv_code_bytes(dim);
    if (dim % 4 == 0)
        return AKV_OK;
    const uint8_t *map = akv_section_of(segment, AKV_SEC_LEVELS + side);
    const uint8_t *group = akv_section_of(segment, AKV_SEC_CODES + side);
    for (uint64_t head = 0; head < h->num_kv_heads; head++, map += map_bytes)
        for (uint64_t first = 0; first < S; first += AKV_BLOCK_TOKENS) {
            uint64_t n = count_residuals(map, first, S - first < AKV_BLOCK_TOKENS ? S - first : AKV_BLOCK_TOKENS);
            while (n > 0) {
                uint32_t g = n < AKV_GROUP_LANES ? (uint32_t)n : AKV_GROUP_LANES;
                for (uint32_t bit = g * dim * 2; bit < g * code_bytes * 8; bit++)
                    if (group[bit / 8] >> (bit % 8) & 1)
                        return CORRUPT("unused bits of the %s codes of head %llu are not zero", side_name[side],
                                       (unsigned long long)head);
                group += (size_t)g * code_bytes;
                n -= g;
            }
        }
    return AKV_OK;
}

static akv_status check_contents(const akv_segment *segment, akv_diag *diag)
{
    AKV_TRY(check_padding(segment, diag));
    AKV_TRY(check_rope_and_positions(segment, diag));
    if (akv_header_of(segment)->kind == AKV_SEGMENT_DENSE)
        return check_dense(segment, diag);
    if (akv_header_of(segment)->coding == AKV_CODING_LADDER)
        return akv_check_ladder(segment, diag);
    AKV_TRY(check_anchor_tokens(segment, diag));
    for (int side = 0; side < AKV_SIDES; side++) {
        AKV_TRY(akv_check_finite16(segment, AKV_SEC_ANCHORS + side, BF16_EXPONENT, diag));
        AKV_TRY(check_index(segment, side, diag));
        AKV_TRY(akv_check_finite16(segment, AKV_SEC_COEFF + side, F16_EXPONENT, diag));
        AKV_TRY(check_levels(segment, side, diag));
        AKV_TRY(akv_check_finite16(segment, AKV_SEC_GAINS + side, F16_EXPONENT, diag));
        AKV_TRY(check_codes(segment, side, diag));
    }
    return AKV_OK;
}

/* ------------------------------------------------------------------------------------------------------------ open */

akv_status akv_segment_open(const void *data, size_t bytes, int copy, const akv_allocator *allocator, akv_segment **out,
                            akv_diag *diag)
{
    if (data == NULL || out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "data and out must not be NULL");
    if (!copy && (uintptr_t)data % AKV_ALIGN != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "borrowed segment bytes must be %u-byte aligned; align them or pass copy = 1", AKV_ALIGN);
    akv_header header;
    if (bytes < sizeof header)
        return CORRUPT("%zu bytes are too few for a segment; its header alone takes %zu", bytes, sizeof header);
    memcpy(&header, data, sizeof header);
    AKV_TRY(check_header(&header, bytes, diag));

    akv_segment *segment = akv_segment_new(allocator, copy ? bytes : 0);
    if (segment == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %zu bytes", bytes);
    if (copy) {
        memcpy((uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES, data, bytes);
    } else {
        segment->borrowed = 1;
        segment->blob = data;
        segment->blob_bytes = bytes;
    }
    akv_status status = check_contents(segment, diag);
    if (status != AKV_OK) {
        akv_segment_release(segment);
        return status;
    }
    *out = segment;
    return AKV_OK;
}
