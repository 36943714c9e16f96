/* SPDX-License-Identifier: Apache-2.0 */
/*
 * retarget_plain.c - a segment of profile paper made smaller: residuals are dropped, those of the smallest gain first.
 */
#include "codec/retarget.h"
#include "core/view.h"

/* Sizes for n residuals in all, shared between the sides as they are now. */
static uint64_t lay_out(akv_header *h, const uint64_t have[AKV_SIDES], uint64_t n)
{
    const uint64_t all = have[0] + have[1];
    h->num_residuals[AKV_SIDE_K] = all == 0 ? 0 : (uint64_t)((double)have[AKV_SIDE_K] / (double)all * (double)n);
    h->num_residuals[AKV_SIDE_V] = n - h->num_residuals[AKV_SIDE_K];
    for (int side = 0; side < AKV_SIDES; side++)
        if (h->num_residuals[side] > have[side])
            h->num_residuals[side] = have[side];
    akv_layout_sections(h, h->sections[AKV_SEC_POSITIONS].bytes != 0);
    return AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
}

akv_status akv_plan_plain_retarget(const akv_segment *segment, uint64_t budget, akv_header *out, uint64_t *min_bytes)
{
    const akv_header *h = akv_header_of(segment);
    *out = *h;
    out->budget_bytes = budget;
    *min_bytes = lay_out(out, h->num_residuals, 0);
    if (budget < *min_bytes)
        return AKV_E_INFEASIBLE;
    uint64_t low = 0, high = h->num_residuals[0] + h->num_residuals[1];
    while (low < high) {
        const uint64_t mid = low + (high - low + 1) / 2;
        if (lay_out(out, h->num_residuals, mid) <= budget)
            low = mid;
        else
            high = mid - 1;
    }
    lay_out(out, h->num_residuals, low);
    return AKV_OK;
}

/*
 * One head and block of one side: the owners that stay, written one after the other. first/next: their place within the
 * side.
 */
static uint64_t write_block(const akv_side_view *v, uint64_t block, uint32_t n, const uint8_t *keep, uint64_t next,
                            uint8_t *levels, uint16_t *gains, uint8_t *codes)
{
    uint16_t owners[AKV_BLOCK_TOKENS], stay[AKV_BLOCK_TOKENS];
    const uint64_t first = v->ranks[block];
    const uint32_t count = akv_view_owners(v, block, n, owners);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++)
        if (keep[first + i])
            stay[kept++] = (uint16_t)i;
    for (uint32_t j = 0; j < kept; j++) {
        const uint32_t i = stay[j], t = owners[i], old_at = i / AKV_GROUP_LANES * AKV_GROUP_LANES,
                       at = j / AKV_GROUP_LANES * AKV_GROUP_LANES;
        const uint32_t old_g = count - old_at < AKV_GROUP_LANES ? count - old_at : AKV_GROUP_LANES;
        const uint32_t g = kept - at < AKV_GROUP_LANES ? kept - at : AKV_GROUP_LANES;
        const uint8_t *from = v->codes + (first + old_at) * v->code_bytes;
        uint8_t *to = codes + (next + at) * v->code_bytes;
        levels[block * (AKV_BLOCK_TOKENS / 8) + t / 8] |= (uint8_t)(1u << (t % 8));
        gains[next + j] = v->gains[first + i];
        for (uint32_t d = 0; d < v->dim; d++) {
            const uint32_t old_bit = (d * old_g + i - old_at) * 2, bit = (d * g + j - at) * 2;
            to[bit / 8] |= (uint8_t)(((from[old_bit / 8] >> (old_bit % 8)) & 3u) << (bit % 8));
        }
    }
    return next + kept;
}

static void write_side(const akv_segment *segment, const akv_header *h, int side, const uint8_t *keep, uint8_t *blob)
{
    const akv_header *old = akv_header_of(segment);
    const uint64_t S = h->num_tokens, blocks = akv_div_up(S, AKV_BLOCK_TOKENS);
    uint64_t *ranks = (uint64_t *)(void *)(blob + h->sections[AKV_SEC_RANKS + side].offset), next = 0;
    uint16_t *gains = (uint16_t *)(void *)(blob + h->sections[AKV_SEC_GAINS + side].offset);
    for (uint32_t head = 0; head < h->num_kv_heads; head++) {
        const akv_side_view v = akv_view_side(segment, side, head);
        uint8_t *levels = blob + h->sections[AKV_SEC_LEVELS + side].offset + head * akv_div_up(S, 8);
        for (uint64_t b = 0; b < blocks; b++) {
            const uint64_t rest = S - b * AKV_BLOCK_TOKENS;
            *ranks++ = next;
            if (old->num_residuals[side] > 0)
                next = write_block(&v, b, rest < AKV_BLOCK_TOKENS ? (uint32_t)rest : AKV_BLOCK_TOKENS, keep, next,
                                   levels, gains, blob + h->sections[AKV_SEC_CODES + side].offset);
        }
    }
    *ranks = next;
}

akv_status akv_run_plain_retarget(const akv_segment *segment, const akv_header *planned, const akv_config *config,
                                  akv_segment **out, akv_retarget_info *info, akv_diag *diag)
{
    static const int copied[] = {AKV_SEC_INV_FREQ,  AKV_SEC_POSITIONS,   AKV_SEC_ANCHOR_TOKENS,
                                 AKV_SEC_ANCHORS,   AKV_SEC_ANCHORS + 1, AKV_SEC_INDEX,
                                 AKV_SEC_INDEX + 1, AKV_SEC_COEFF,       AKV_SEC_COEFF + 1};
    const akv_allocator *allocator = config != NULL ? config->allocator : NULL;
    const akv_header *old = akv_header_of(segment);
    const uint64_t most = old->num_residuals[0] > old->num_residuals[1] ? old->num_residuals[0] : old->num_residuals[1];
    const size_t bytes = (size_t)most * (sizeof(float) + 1) + 64;
    float *size = akv_alloc(allocator, bytes);
    akv_segment *segment_out = size == NULL ? NULL : akv_segment_new(allocator, planned->total_bytes);
    if (segment_out == NULL) {
        if (size != NULL)
            akv_free(allocator, size, bytes);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %llu bytes",
                        (unsigned long long)planned->total_bytes);
    }
    uint8_t *blob = (uint8_t *)segment_out + AKV_SEGMENT_OBJECT_BYTES, *keep = (uint8_t *)(size + most);
    memcpy(blob, planned, sizeof *planned);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        memcpy(blob + planned->sections[copied[i]].offset, akv_section_of(segment, copied[i]),
               planned->sections[copied[i]].bytes);
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint16_t *gains = akv_section_of(segment, AKV_SEC_GAINS + side);
        double all = 0.0,
               kept =
                   0.0; /* coordinates of a coded residual are alike in size: its energy goes with the gain squared */
        for (uint64_t i = 0; i < old->num_residuals[side]; i++) {
            size[i] = fabsf(akv_f16_to_f32(gains[i]));
            all += (double)size[i] * size[i];
        }
        memset(keep, 0, (size_t)most);
        akv_take_largest(size, old->num_residuals[side], planned->num_residuals[side], keep);
        for (uint64_t i = 0; i < old->num_residuals[side]; i++)
            kept += keep[i] ? (double)size[i] * size[i] : 0.0;
        if (info != NULL)
            *(side == AKV_SIDE_K ? &info->lost_k : &info->lost_v) = all > 0.0 ? 1.0 - kept / all : 0.0;
        write_side(segment, planned, side, keep, blob);
    }
    akv_free(allocator, size, bytes);
    *out = segment_out;
    return AKV_OK;
}
