/* SPDX-License-Identifier: Apache-2.0 */
/*
 * retarget.c - a compressed segment made smaller without the model. Utilities are not stored, but the level that a
 * token got tells between which two thresholds its utility lay (allocate.c); within the bracket it is guessed from what
 * goes along with it: the other side of the same token, and the tokens around it. docs/method.md "Smaller later" says
 * what the guess costs. Where queries were asked since, what they say joins it (again.c).
 */
#include "codec/retarget.h"

/*
 * How far to trust the two signs that a token stands high or low in its bracket, in half brackets per octave of
 * difference: a linear fit to the true utilities of 30 layers of SmolLM2-135M at 10x (4,000 tokens). It explains 11 %
 * of the variance; a half bracket is only 0.3 to 0.8 octaves.
 */
#define FROM_OTHER_SIDE 0.15
#define FROM_NEIGHBOURS 0.10
#define NEIGHBOURS 8

/*
 * What the latest queries say against what the levels tell, in which earlier ones are kept: 0.1, 0.3 and 1 gave a
 * conversation of 7,400 tokens on two texts a divergence of 0.0031 and 0.0039, 0.0036 and 0.0032, 0.0045 and 0.0033.
 */
#define SEEN_SHARE 0.3

/* Heads whose decoded tokens take more than this together are looked at one after the other. */
#define OBSERVED_BYTES ((uint64_t)1 << 26)

void akv_retarget_info_init(akv_retarget_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

/*
 * Thresholds of each level -> middle of its bracket as log2 of the utility, relative to the multiplier that was used.
 */
static void brackets(const akv_hull *hull, uint32_t levels, float *middle, float *half)
{
    double low[AKV_MAX_LEVELS + 1], high[AKV_MAX_LEVELS + 1];
    for (uint32_t l = 0; l <= levels; l++) {
        uint32_t i = 0; /* the last point of the hull that is not above l */
        while (i + 1 < hull->count && hull->level[i + 1] <= l)
            i++;
        low[l] = i > 0 && hull->slope[i] > 0.0 ? -akv_log2(hull->slope[i]) : NAN;
        high[l] = i + 1 < hull->count && hull->slope[i + 1] > 0.0 ? -akv_log2(hull->slope[i + 1]) : NAN;
        if (isnan(low[l])) /* no residual: few have much less than what would have paid */
            low[l] = isnan(high[l]) ? 0.0 : high[l] - 3.0;
        if (isnan(high[l]))
            high[l] = low[l] + 3.2;
        middle[l] = (float)(0.5 * (low[l] + high[l]));
        half[l] = (float)(0.5 * (high[l] - low[l]));
    }
}

typedef struct akv_retarget {
    const akv_segment *from;
    const akv_header *h;
    uint8_t *old[AKV_SIDES];   /* [H, S] */
    uint8_t *level[AKV_SIDES]; /* [H, S] */
    float *utility[AKV_SIDES]; /* [H, S] log2, guessed */
    float *middle[AKV_SIDES];  /* [S] of one head */
    float *seen[AKV_SIDES];    /* [H, S] log2 of what the queries of now say */
    akv_hull *hulls;           /* [H, sides] */
    bool observed;             /* seen and the hulls are of queries that came later */
} akv_retarget;

static void carve(akv_retarget *r, akv_arena *arena)
{
    const uint64_t H = r->h->num_kv_heads, S = r->h->num_tokens;
    for (int side = 0; side < AKV_SIDES; side++) {
        r->old[side] = AKV_TAKE(arena, uint8_t, H * S);
        r->level[side] = AKV_TAKE(arena, uint8_t, H * S);
        r->utility[side] = AKV_TAKE(arena, float, H *S);
        r->middle[side] = AKV_TAKE(arena, float, S);
        r->seen[side] = AKV_TAKE(arena, float, r->observed ? H * S : 0);
    }
    r->hulls = AKV_TAKE(arena, akv_hull, H * AKV_SIDES);
}

/* Distortion of each level from the stored deviations; the weights of the queries are not known any more. */
static akv_hull hull_of(const akv_segment *segment, int side, uint32_t head)
{
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    double distortion[AKV_MAX_LEVELS + 1], total = 0.0;
    uint32_t bits[AKV_MAX_LEVELS];
    for (uint32_t c = 0; c < v.num_coords; c++)
        total += (double)akv_bf16_to_f32(v.sigmas[c]) * akv_bf16_to_f32(v.sigmas[c]);
    distortion[0] = 1.0;
    for (uint32_t l = 1; l <= v.num_levels; l++) {
        const uint8_t *row = v.tables + (l - 1) * akv_div_up(v.num_coords, 4);
        double left = 0.0;
        bits[l - 1] = 0;
        for (uint32_t c = 0; c < v.num_coords; c++) {
            const uint32_t entry = (row[c / 4] >> (c % 4 * 2)) & 3u;
            const double sigma = akv_bf16_to_f32(v.sigmas[c]);
            left += sigma * sigma * akv_entry_distortion[entry];
            bits[l - 1] += akv_entry_bits[entry];
        }
        distortion[l] = total > 0.0 ? left / total : 0.0;
    }
    return akv_ladder_hull(distortion, bits, v.num_levels);
}

/* Levels and guessed utilities of one head; its hulls unless they are there already. */
static void guess_head(akv_retarget *r, uint32_t head)
{
    const uint64_t S = r->h->num_tokens;
    float middle[AKV_SIDES][AKV_MAX_LEVELS + 1], half[AKV_SIDES][AKV_MAX_LEVELS + 1];
    for (int side = 0; side < AKV_SIDES; side++) {
        uint8_t *old = r->old[side] + head * S;
        if (!r->observed)
            r->hulls[head * AKV_SIDES + side] = hull_of(r->from, side, head);
        brackets(&r->hulls[head * AKV_SIDES + side], r->h->num_levels, middle[side], half[side]);
        akv_ladder_levels(r->from, side, head, S, old);
        for (uint64_t t = 0; t < S; t++)
            r->middle[side][t] = middle[side][old[t]];
    }
    for (int side = 0; side < AKV_SIDES; side++) {
        const float *mine = r->middle[side], *other = r->middle[1 - side];
        double between = 0.0; /* how far the sides stand apart on average */
        for (uint64_t t = 0; t < S; t++)
            between += other[t] - mine[t];
        between /= (double)S;
        for (uint64_t t = 0; t < S; t++) {
            const uint64_t first = t < NEIGHBOURS ? 0 : t - NEIGHBOURS,
                           last = S - 1 - t < NEIGHBOURS ? S - 1 : t + NEIGHBOURS;
            double around = 0.0;
            for (uint64_t n = first; n <= last; n++)
                around += mine[n];
            around = around / (double)(last - first + 1) - mine[t];
            const double lean = FROM_OTHER_SIDE * (other[t] - mine[t] - between) + FROM_NEIGHBOURS * around;
            /* and a grain of chance, so that no two are alike: whole groups would move at once */
            const double grain =
                (double)(akv_mix64(t * 2 + (uint64_t)side + ((uint64_t)head << 42)) >> 40) * 0x1p-24 - 0.5;
            r->utility[side][head * S + t] =
                mine[t] + (float)(akv_tanh(lean) + 0.02 * grain) * half[side][r->old[side][head * S + t]];
        }
    }
}

/* Levels for a multiplier (log2), none above what it is unless they may rise; returns the bytes of all codes. */
static uint64_t assign(akv_retarget *r, float *const utility[AKV_SIDES], bool rise, double lambda)
{
    const uint64_t S = r->h->num_tokens;
    for (uint32_t head = 0; head < r->h->num_kv_heads; head++)
        for (int side = 0; side < AKV_SIDES; side++) {
            const akv_hull *hull = &r->hulls[head * AKV_SIDES + side];
            double threshold[AKV_MAX_LEVELS + 1];
            for (uint32_t i = 1; i < hull->count; i++)
                threshold[i] = lambda - akv_log2(hull->slope[i]);
            for (uint64_t t = 0; t < S; t++) {
                const uint8_t old = rise ? AKV_MAX_LEVELS + 1 : r->old[side][head * S + t];
                const float u = utility[side][head * S + t];
                uint32_t i = 0;
                while (i + 1 < hull->count && hull->level[i + 1] < old && u > threshold[i + 1])
                    i++;
                /* The level it has is as good as the next point of the hull, whether it lies on it or not. */
                const bool stays = old != 0 && i + 1 < hull->count ? hull->level[i + 1] >= old && u > threshold[i + 1]
                                                                   : old != 0 && hull->level[i] == old;
                r->level[side][head * S + t] = stays ? old : hull->level[i];
            }
        }
    return akv_ladder_code_bytes(r->from, S, r->level);
}

/*
 * Utilities: of what the levels tell, which earlier queries have left, and what the queries of now say. Both in units
 * of the multiplier that gives the bytes of now: the smallest, where many do because every token has the top level.
 * There the levels tell nothing apart, and what is seen counts nearly alone.
 */
static void mix_seen(akv_retarget *r, uint64_t bytes_now)
{
    double low = -400.0, high = 400.0;
    for (int round = 0; round < 40; round++) {
        const double mid = 0.5 * (low + high);
        if (assign(r, r->seen, true, mid) > bytes_now)
            low = mid;
        else
            high = mid;
    }
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint64_t i = 0; i < r->h->num_kv_heads * r->h->num_tokens; i++) {
            const double told = akv_exp2(r->utility[side][i]), seen = akv_exp2(fmin(r->seen[side][i] - high, 60.0));
            r->utility[side][i] = (float)akv_log2((1.0 - SEEN_SHARE) * told + SEEN_SHARE * seen);
        }
}

/* Header of the result; *min_bytes = the smallest budget. */
static akv_status plan_ladder(const akv_segment *segment, uint64_t budget, akv_header *out, uint64_t *min_bytes)
{
    const akv_header *h = akv_header_of(segment);
    const bool positions = h->sections[AKV_SEC_POSITIONS].bytes != 0;
    const uint64_t *offsets = akv_section_of(segment, AKV_SEC_RANKS);
    const uint64_t used = offsets[h->num_kv_heads * akv_div_up(h->num_tokens, AKV_BLOCK_TOKENS) * 2];
    *out = *h;
    out->budget_bytes = budget;
    out->code_bytes = 0;
    akv_layout_sections(out, positions);
    *min_bytes = AKV_SEGMENT_OBJECT_BYTES + out->total_bytes;
    if (budget < *min_bytes)
        return AKV_E_INFEASIBLE;
    const uint64_t room = (budget - *min_bytes) / AKV_ALIGN * AKV_ALIGN;
    out->code_bytes = room < used ? room : used;
    akv_layout_sections(out, positions);
    return AKV_OK;
}

static akv_status run_ladder(akv_segment *segment, const akv_header *planned, const akv_config *config,
                             const akv_tensor *queries, uint32_t num_queries, akv_segment **out,
                             akv_retarget_info *info, akv_diag *diag)
{
    const akv_allocator *allocator = config != NULL ? config->allocator : NULL;
    akv_retarget r;
    akv_arena arena = {NULL, 0, false};
    memset(&r, 0, sizeof r);
    r.from = segment;
    r.h = akv_header_of(segment);
    r.observed = queries != NULL;
    carve(&r, &arena);
    const size_t bytes = arena.used;
    arena.base = arena.overflow ? NULL : akv_alloc(allocator, bytes);
    if (arena.base == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", bytes);
    arena.used = 0;
    carve(&r, &arena);
    if (queries != NULL) {
        const akv_status status =
            akv_observe_again(segment, queries, num_queries, config, OBSERVED_BYTES, r.seen, r.hulls, diag);
        if (status != AKV_OK) {
            akv_free(allocator, arena.base, bytes);
            return status;
        }
    }
    for (uint32_t head = 0; head < r.h->num_kv_heads; head++)
        guess_head(&r, head);
    if (queries != NULL)
        mix_seen(&r, akv_ladder_code_bytes(segment, r.h->num_tokens, r.old));
    double low = -400.0, high = 400.0; /* high always fits: nothing is coded */
    for (int round = 0; round < 50; round++) {
        const double mid = 0.5 * (low + high);
        if (assign(&r, r.utility, false, mid) > planned->code_bytes)
            low = mid;
        else
            high = mid;
    }
    akv_rewrite w = {.from = segment, .allocator = allocator, .header = *planned};
    w.executor = config != NULL ? config->executor : NULL;
    memcpy(w.level, r.level, sizeof w.level);
    akv_status status = AKV_OK;
    if (assign(&r, r.utility, false, high) > planned->code_bytes)
        status = akv_fail(diag, AKV_E_CORRUPT, "the segment's level tables cannot be used to make it smaller");
    if (status == AKV_OK)
        status = akv_rewrite_run(&w, out, diag);
    akv_free(allocator, arena.base, bytes);
    if (status == AKV_OK && info != NULL) {
        info->lost_k = w.energy[0] > 0.0 ? w.lost[0] / w.energy[0] : 0.0;
        info->lost_v = w.energy[1] > 0.0 ? w.lost[1] / w.energy[1] : 0.0;
    }
    return status;
}

/* What both public functions begin with. *fits: nothing has to be done. */
static akv_status plan(const akv_segment *segment, uint64_t budget, akv_retarget_info *info, akv_header *header,
                       bool *fits, akv_diag *diag)
{
    if (segment == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment must not be NULL");
    if (info != NULL && info->struct_size < sizeof *info)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "akv_retarget_info has struct_size %zu; call akv_retarget_info_init first", info->struct_size);
    const akv_header *h = akv_header_of(segment);
    const uint64_t total = AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
    uint64_t min_bytes = total;
    akv_status status = AKV_OK;
    *fits = budget >= total;
    *header = *h;
    if (h->kind == AKV_SEGMENT_COMPRESSED)
        status = h->coding == AKV_CODING_LADDER
                     ? plan_ladder(segment, *fits ? total : budget, header, &min_bytes)
                     : akv_plan_plain_retarget(segment, *fits ? total : budget, header, &min_bytes);
    else if (!*fits)
        return akv_fail(
            diag, AKV_E_UNSUPPORTED,
            "a dense segment of %llu bytes cannot be made smaller without the queries; compress it with akv_compress",
            (unsigned long long)total);
    if (*fits)
        *header = *h;
    if (info != NULL) {
        akv_retarget_info_init(info);
        info->budget_bytes = budget;
        info->min_bytes = min_bytes;
        if (status == AKV_OK)
            akv_header_bytes(header, &info->bytes);
    }
    if (status == AKV_E_INFEASIBLE)
        return akv_fail(
            diag, status,
            "a budget of %llu bytes cannot hold this segment even without residuals: %llu bytes are needed (a ratio of "
            "%.2fx); for less the document has to be compressed anew",
            (unsigned long long)budget, (unsigned long long)min_bytes,
            (double)akv_dense_bytes(h->num_tokens, h->num_kv_heads, h->head_dim[0], h->head_dim[1]) /
                (double)min_bytes);
    return status;
}

akv_status akv_segment_retarget_plan(const akv_segment *segment, uint64_t budget_bytes, akv_retarget_info *info,
                                     akv_diag *diag)
{
    akv_header header;
    bool fits = false;
    if (info == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "info must not be NULL");
    return plan(segment, budget_bytes, info, &header, &fits, diag);
}

/* queries: NULL to guess */
static akv_status retarget(akv_segment *segment, uint64_t budget_bytes, const akv_tensor *queries, uint32_t num_queries,
                           const akv_config *config, akv_segment **out, akv_retarget_info *info, akv_diag *diag)
{
    akv_header header;
    bool fits = false;
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    if (config != NULL && config->struct_size < sizeof *config)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_config has struct_size %zu; call akv_config_init first",
                        config->struct_size);
    AKV_TRY(plan(segment, budget_bytes, info, &header, &fits, diag));
    if (fits) {
        *out = akv_segment_retain(segment);
        return AKV_OK;
    }
    if (header.coding == AKV_CODING_LADDER)
        return run_ladder(segment, &header, config, queries, num_queries, out, info, diag);
    if (queries != NULL)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "a segment of profile paper has no levels that queries could judge: use akv_segment_retarget");
    return akv_run_plain_retarget(segment, &header, config, out, info, diag);
}

akv_status akv_segment_retarget(akv_segment *segment, uint64_t budget_bytes, const akv_config *config,
                                akv_segment **out, akv_retarget_info *info, akv_diag *diag)
{
    return retarget(segment, budget_bytes, NULL, 0, config, out, info, diag);
}

akv_status akv_segment_retarget_observed(akv_segment *segment, uint64_t budget_bytes, const akv_tensor *queries,
                                         uint32_t num_queries, const akv_config *config, akv_segment **out,
                                         akv_retarget_info *info, akv_diag *diag)
{
    if (queries == NULL || queries->data == NULL || (unsigned)queries->dtype > AKV_BF16 || num_queries == 0 ||
        num_queries > AKV_MAX_QUERIES)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "queries must have data of a known dtype, and there must be 1 to %u of them, not %u",
                        AKV_MAX_QUERIES, num_queries);
    return retarget(segment, budget_bytes, queries, num_queries, config, out, info, diag);
}
