/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - exact bytes before anything is done: number of anchors, number of residual slots, feasibility. */
#include "codec/ladder.h"

const akv_experiment *akv_experiment_of(const akv_config *config, akv_experiment *defaults)
{
    if (config->profile == AKV_PROFILE_DEFAULT)
        akv_experiment_init_default(defaults);
    else
        akv_experiment_init(defaults);
    return config->experiment != NULL ? config->experiment : defaults;
}

static akv_status check_ladder_options(const akv_experiment *x, akv_diag *diag)
{
    bool rising = x->num_levels >= 1 && x->num_levels <= AKV_MAX_LEVELS;
    for (uint32_t l = 0; rising && l < x->num_levels; l++)
        rising = x->level_bits[l] > (l == 0 ? 0 : x->level_bits[l - 1]) && x->level_bits[l] <= 4096;
    if (!rising)
        return akv_fail(
            diag, AKV_E_INVALID_ARGUMENT,
            "akv_experiment: the profile default needs 1..%u levels of rising bits (akv_experiment_init_default sets them)",
            AKV_MAX_LEVELS);
    if (!(x->incoherent >= 0.0 && x->incoherent <= 1.0) || !(x->query_mix >= 0.0 && x->query_mix <= 1.0) ||
        !(x->floor >= 0.0) || !isfinite(x->floor) || !(x->value_boost > 0.0) || !isfinite(x->value_boost) ||
        !(x->slow_angle >= 0.0) || x->pool_tokens > 1024 || x->basis_cols > AKV_MAX_HEAD_DIM || x->anchor_rounds > 64 ||
        !(x->pool_weight >= 0.0 && x->pool_weight <= 1.0))
        return akv_fail(
            diag, AKV_E_INVALID_ARGUMENT,
            "akv_experiment: incoherent, query_mix and pool_weight must be 0..1, floor and slow_angle >= 0, value_boost > 0, "
            "pool_tokens <= 1024, anchor_rounds <= 64, basis_cols <= %u",
            AKV_MAX_HEAD_DIM);
    if (x->rank != AKV_RANK_UTILITY || x->code_rule != AKV_CODE_ROTATED_LLOYD_MAX ||
        x->anchor_space != AKV_ANCHOR_PRE_ROPE || x->equal_head_budgets)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "akv_experiment: the paper's ablations belong to AKV_PROFILE_PAPER");
    return AKV_OK;
}

akv_status akv_check_config(const akv_config *config, akv_diag *diag)
{
    if (config == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "config must not be NULL");
    if (config->struct_size < sizeof *config)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_config has struct_size %zu; call akv_config_init first",
                        config->struct_size);
    if (config->profile != AKV_PROFILE_PAPER && config->profile != AKV_PROFILE_DEFAULT)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "profile %d is not known; use AKV_PROFILE_DEFAULT or AKV_PROFILE_PAPER", (int)config->profile);
    if (config->budget_bytes == 0 && !(config->keep_ratio > 0.0 && config->keep_ratio <= 1.0))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "keep_ratio is %g; it must be above 0 and at most 1 (0.1 keeps a tenth)", config->keep_ratio);
    const akv_experiment *x = config->experiment;
    if (x == NULL)
        return AKV_OK;
    if (x->struct_size < sizeof *x)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "akv_experiment has struct_size %zu; call akv_experiment_init first", x->struct_size);
    if ((unsigned)x->rank > AKV_RANK_RANDOM || (unsigned)x->scale_rule > AKV_SCALE_LEAST_SQUARES ||
        (unsigned)x->code_rule > AKV_CODE_PLAIN_UNIFORM || (unsigned)x->anchor_space > AKV_ANCHOR_POST_ROPE)
        return akv_fail(
            diag, AKV_E_INVALID_ARGUMENT,
            "akv_experiment: rank is %d (0..%d exist), scale_rule %d (0..%d), code_rule %d (0..%d), anchor_space %d (0..%d)",
            (int)x->rank, AKV_RANK_RANDOM, (int)x->scale_rule, AKV_SCALE_LEAST_SQUARES, (int)x->code_rule,
            AKV_CODE_PLAIN_UNIFORM, (int)x->anchor_space, AKV_ANCHOR_POST_ROPE);
    if (!(x->rho >= 0.0 && x->rho <= 1.0) || x->pool_width % 2 == 0 || x->pool_width > 1023 ||
        x->tokens_per_anchor == 0)
        return akv_fail(
            diag, AKV_E_INVALID_ARGUMENT,
            "akv_experiment: rho must be 0..1 (is %g), pool_width odd and below 1024 (is %u), tokens_per_anchor >= 1",
            x->rho, x->pool_width);
    if (config->profile == AKV_PROFILE_DEFAULT)
        return check_ladder_options(x, diag);
    return AKV_OK;
}

/* The floor for short prompts: half a window of free anchors. */
static uint32_t least_anchors_of(const akv_shape *s)
{
    uint64_t least = (uint64_t)s->num_queries + s->num_queries / 2;
    return least < s->num_tokens ? (uint32_t)least : (uint32_t)s->num_tokens;
}

/* k of design section 2 within that floor and what an index can name. */
static uint32_t anchors_of(const akv_shape *s, const akv_experiment *x)
{
    uint64_t k = s->num_tokens / x->tokens_per_anchor, least = least_anchors_of(s);
    if (k < least)
        k = least;
    if (k > s->num_tokens)
        k = s->num_tokens;
    return k > AKV_MAX_ANCHORS ? AKV_MAX_ANCHORS : (uint32_t)k;
}

/*
 * Share N slots: half to the keys, the rest to the values (paper); what a side cannot use (every token that is no
 * anchor owns one already) goes to the other.
 */
static void split_slots(uint64_t n, uint64_t capacity, bool equal_heads, uint64_t heads, uint64_t out[AKV_SIDES])
{
    uint64_t k = n / 2 < capacity ? n / 2 : capacity;
    uint64_t v = n - k < capacity ? n - k : capacity;
    k = n - v < capacity ? n - v : capacity;
    out[AKV_SIDE_K] = equal_heads ? k / heads * heads : k;
    out[AKV_SIDE_V] = equal_heads ? v / heads * heads : v;
}

static uint64_t total_with(akv_header *h, bool has_positions, uint64_t slots, uint64_t capacity, bool equal_heads)
{
    split_slots(slots, capacity, equal_heads, h->num_kv_heads, h->num_residuals);
    akv_layout_sections(h, has_positions);
    return AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
}

/* The smallest theta with floor(theta * dense) >= bytes. */
static double ratio_for(uint64_t bytes, uint64_t dense)
{
    if (bytes >= dense)
        return 1.0;
    double ratio = (double)bytes / (double)dense;
    while ((uint64_t)(ratio * (double)dense) < bytes)
        ratio = nextafter(ratio, 2.0);
    return ratio;
}

/* Rounded up in the last printed digit, so that the number in a message works when it is typed back. */
static double printable_ratio(double ratio)
{
    double up = ceil(ratio * 1e6) * 1e-6;
    return up > 1.0 ? 1.0 : up;
}

akv_status akv_plan_header(const akv_shape *shape, const akv_config *config, uint32_t slow_dims, akv_header *h,
                           akv_plan_info *info, akv_diag *diag)
{
    AKV_TRY(akv_check_config(config, diag));
    AKV_TRY(akv_check_shape(shape, diag));
    akv_experiment defaults;
    const akv_experiment *x = akv_experiment_of(config, &defaults);
    /* akv_check_shape refuses NULL. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    const bool has_positions = shape->has_positions != 0;

    h->num_tokens = shape->num_tokens;
    h->num_kv_heads = shape->num_kv_heads;
    h->gqa_group = shape->gqa_group;
    h->head_dim[AKV_SIDE_K] = shape->head_dim_k;
    h->head_dim[AKV_SIDE_V] = shape->head_dim_v;
    h->rotary_dim = shape->rotary_dim;
    h->num_queries = shape->num_queries;
    h->dense_dtype = (uint32_t)shape->dtype;

    akv_plan_info_init(info);
    info->dense_bytes = akv_dense_bytes(shape->num_tokens, shape->num_kv_heads, shape->head_dim_k, shape->head_dim_v);
    info->budget_bytes =
        config->budget_bytes != 0 ? config->budget_bytes : (uint64_t)(config->keep_ratio * (double)info->dense_bytes);

    /* What dense would cost, and what the fixed part of the compressed form costs. */
    h->kind = AKV_SEGMENT_DENSE;
    akv_layout_sections(h, false);
    uint64_t dense_total = AKV_SEGMENT_OBJECT_BYTES + h->total_bytes;
    h->kind = AKV_SEGMENT_COMPRESSED;
    h->num_anchors = anchors_of(shape, x);
    uint64_t capacity = (shape->num_tokens - h->num_anchors) * shape->num_kv_heads;
    bool equal = x->equal_head_budgets != 0;
    const bool ladder = config->profile == AKV_PROFILE_DEFAULT;
    uint64_t fixed_total;
    if (ladder) {
        fixed_total = akv_ladder_least_bytes(h, x, least_anchors_of(shape), has_positions);
    } else {
        fixed_total = total_with(h, has_positions, 0, capacity, equal);
    }

    bool within_window = shape->num_tokens <= shape->num_queries;
    info->min_bytes = within_window ? 1 : fixed_total < dense_total ? fixed_total : dense_total;
    info->min_keep_ratio =
        within_window ? ratio_for(1, info->dense_bytes) : ratio_for(info->min_bytes, info->dense_bytes);

    if (within_window)
        info->dense_reason = AKV_DENSE_WITHIN_WINDOW;
    else if (config->budget_bytes == 0 && config->keep_ratio == 1.0)
        info->dense_reason = AKV_DENSE_REQUESTED;
    else if (info->budget_bytes >= dense_total)
        info->dense_reason = AKV_DENSE_FITS;
    else if (info->budget_bytes < fixed_total)
        return akv_fail(
            diag, AKV_E_INFEASIBLE,
            "a budget of %llu bytes cannot hold %llu tokens x %u KV heads: the fixed part (anchors, coefficients) needs "
            "%llu bytes; the smallest feasible keep ratio is %.6f (a ratio of %.4fx)",
            (unsigned long long)info->budget_bytes, (unsigned long long)shape->num_tokens, shape->num_kv_heads,
            (unsigned long long)info->min_bytes, printable_ratio(info->min_keep_ratio),
            floor(1e4 / info->min_keep_ratio) * 1e-4);

    if (info->dense_reason != AKV_DENSE_NONE) {
        h->kind = AKV_SEGMENT_DENSE;
        h->num_anchors = 0;
        h->num_residuals[0] = h->num_residuals[1] = 0;
        h->coding = AKV_CODING_PLAIN;
        h->code_bytes = 0;
        h->num_levels = h->index_bits = 0;
        memset(h->basis_dim, 0, sizeof h->basis_dim);
        memset(h->basis_cols, 0, sizeof h->basis_cols);
        akv_layout_sections(h, false);
    } else if (ladder) {
        akv_ladder_layout(h, x, least_anchors_of(shape), anchors_of(shape, x), slow_dims, has_positions,
                          info->budget_bytes);
    } else {
        uint64_t low = 0, high = x->anchors_only ? 0 : 2 * capacity; /* total is monotone in the slots: bisect */
        while (low < high) {
            uint64_t mid = low + (high - low + 1) / 2;
            if (total_with(h, has_positions, mid, capacity, equal) <= info->budget_bytes)
                low = mid;
            else
                high = mid - 1;
        }
        total_with(h, has_positions, low, capacity, equal);
    }
    h->dense_reason = (uint32_t)info->dense_reason;
    h->budget_bytes = info->budget_bytes;
    info->kind = (akv_segment_kind)h->kind;
    info->num_anchors = h->num_anchors;
    info->residuals_k = h->num_residuals[AKV_SIDE_K];
    info->residuals_v = h->num_residuals[AKV_SIDE_V];
    akv_header_bytes(h, &info->bytes);
    return AKV_OK;
}

akv_status akv_plan(const akv_shape *shape, const akv_config *config, akv_plan_info *out, akv_diag *diag)
{
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    if (out->struct_size < sizeof *out)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "akv_plan_info has struct_size %zu; call akv_plan_info_init first", out->struct_size);
    akv_header header;
    akv_plan_info info;
    memset(&header, 0, sizeof header);
    akv_status status = akv_plan_header(shape, config, shape != NULL ? shape->head_dim_k : 0, &header, &info, diag);
    if (status == AKV_OK || status == AKV_E_INFEASIBLE)
        *out = info;
    return status;
}
