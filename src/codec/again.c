/* SPDX-License-Identifier: Apache-2.0 */
/*
 * again.c - what the tokens of a segment are worth to queries that came later. Utilities are not stored; guessing them
 * from the levels (retarget.c) is good for one step, but the errors of many small steps add up, until tokens that
 * matter have fallen by chance. Here they are measured as in compression, with the tokens as they decode.
 */
#include "codec/ladder.h"

typedef struct akv_again {
    const akv_segment *from;
    const akv_header *h;
    akv_layer layer;
    akv_config config;
    akv_experiment defaults;
    akv_header header; /* the segment's, without codes */
    akv_ladder ladder;
    akv_job job;
    akv_arena arena;
    uint32_t head, heads;     /* those of now */
    float *tokens[AKV_SIDES]; /* [heads, S, dim] as they decode */
    float *prior[AKV_SIDES];  /* [H, S] */
    size_t bytes;             /* of these four */
} akv_again;

/* The tokens of the heads of now as a layer. */
static void describe(akv_again *a, const akv_tensor *queries, uint32_t num_queries)
{
    const akv_header *h = a->h;
    akv_layer *layer = &a->layer;
    akv_layer_init(layer);
    layer->shape.num_tokens = h->num_tokens;
    layer->shape.num_kv_heads = a->heads;
    layer->shape.gqa_group = h->gqa_group;
    layer->shape.head_dim_k = h->head_dim[AKV_SIDE_K];
    layer->shape.head_dim_v = h->head_dim[AKV_SIDE_V];
    layer->shape.rotary_dim = layer->rope.rotary_dim = h->rotary_dim;
    layer->shape.num_queries = num_queries;
    layer->rope.style = (akv_rope_style)h->rope_style;
    layer->rope.magnitude = h->magnitude;
    layer->rope.inv_freq = h->rotary_dim != 0 ? akv_section_of(a->from, AKV_SEC_INV_FREQ) : NULL;
    layer->sm_scale = h->sm_scale;
    layer->logit_softcap = h->logit_softcap;
    layer->positions = h->sections[AKV_SEC_POSITIONS].bytes != 0 ? akv_section_of(a->from, AKV_SEC_POSITIONS) : NULL;
    layer->first_position = h->first_position;
    layer->queries = *queries;
    const int64_t skipped = (int64_t)a->head * h->gqa_group * queries->stride_head;
    layer->queries.data = (const char *)queries->data + skipped * (queries->dtype == AKV_F32 ? 4 : 2);
    layer->keys = akv_tensor_contiguous(a->tokens[AKV_SIDE_K], AKV_F32, h->num_tokens, h->head_dim[AKV_SIDE_K]);
    layer->values = akv_tensor_contiguous(a->tokens[AKV_SIDE_V], AKV_F32, h->num_tokens, h->head_dim[AKV_SIDE_V]);
}

/* Task = head * blocks + block. */
static void decode_task(void *opaque, size_t task)
{
    const akv_again *a = opaque;
    const uint64_t S = a->h->num_tokens, blocks = akv_div_up(S, AKV_BLOCK_TOKENS), head = task / blocks,
                   t0 = task % blocks * AKV_BLOCK_TOKENS, n = S - t0 < AKV_BLOCK_TOKENS ? S - t0 : AKV_BLOCK_TOKENS;
    akv_segment_decode(a->from, a->head + (uint32_t)head, t0, n,
                       a->tokens[AKV_SIDE_K] + (head * S + t0) * a->h->head_dim[AKV_SIDE_K],
                       a->tokens[AKV_SIDE_V] + (head * S + t0) * a->h->head_dim[AKV_SIDE_V], NULL);
}

/* Everything of the segment but its tokens -> the job. */
static void take_over(akv_again *a)
{
    akv_job *job = &a->job;
    akv_ladder *ladder = &a->ladder;
    memset(job->anchor_of, 0, (size_t)(job->H * job->S) * sizeof *job->anchor_of);
    memset(ladder->fixed, 1, (size_t)job->H * job->k);
    const uint16_t *mean = (const uint16_t *)akv_section_of(a->from, AKV_SEC_MEAN) + (size_t)a->head * job->dk;
    for (uint64_t i = 0; i < (uint64_t)job->H * job->dk; i++)
        job->mean[AKV_SIDE_K][i] = akv_bf16_to_f32(mean[i]);
    for (uint32_t head = 0; head < job->H; head++)
        for (int side = 0; side < AKV_SIDES; side++) {
            const akv_ladder_view v = akv_view_ladder(a->from, side, a->head + head);
            const size_t coords = v.num_coords;
            for (uint32_t i = 0; i < job->k; i++)
                for (uint32_t d = 0; d < v.dim; d++)
                    job->anchor[side][((size_t)head * job->k + i) * v.dim + d] =
                        (float)v.anchors[(size_t)i * v.dim + d] * akv_f16_to_f32(v.anchor_scales[i]) *
                        akv_bf16_to_f32(v.units[d]);
            for (uint32_t c = 0; c < v.basis_cols; c++)
                for (uint32_t i = 0; i < v.basis_dim; i++)
                    ladder->basis[side][((size_t)head * v.basis_cols + c) * v.basis_dim + i] =
                        (float)v.basis[(size_t)c * v.basis_dim + i] * v.basis_scales[c];
            for (size_t c = 0; c < coords; c++)
                ladder->sigma[side][head * coords + c] = akv_bf16_to_f32(v.sigmas[c]);
            for (uint32_t l = 0; l < v.num_levels; l++)
                for (size_t c = 0; c < coords; c++)
                    ladder->entries[side][(head * (size_t)v.num_levels + l) * coords + c] =
                        (uint8_t)((akv_level_table(&v, l + 1)[c / 4] >> (c % 4 * 2)) & 3u);
            akv_ladder_bits(a->from, side, a->head + head, ladder->level_bits[side] + (size_t)head * v.num_levels);
        }
}

/* That of the values is not stored. */
static void value_means(akv_again *a)
{
    const uint32_t dim = a->job.dv;
    for (uint32_t head = 0; head < a->job.H; head++) {
        double sum[AKV_MAX_HEAD_DIM] = {0};
        for (uint64_t t = 0; t < a->job.S; t++)
            for (uint32_t i = 0; i < dim; i++)
                sum[i] += a->tokens[AKV_SIDE_V][(head * a->job.S + t) * dim + i];
        for (uint32_t i = 0; i < dim; i++)
            a->job.mean[AKV_SIDE_V][(size_t)head * dim + i] = (float)(sum[i] / (double)a->job.S);
    }
}

/* Utilities of the heads of now, without the prior. */
static akv_status observe(akv_again *a, float *const utility[AKV_SIDES], akv_hull *hulls, akv_diag *diag)
{
    akv_job *job = &a->job;
    const akv_experiment *experiment = akv_experiment_of(&a->config, &a->defaults);
    uint8_t *mask = NULL;
    a->ladder.options = experiment;
    memcpy(a->ladder.coords[AKV_SIDE_K], akv_section_of(a->from, AKV_SEC_COORDS),
           a->h->head_dim[AKV_SIDE_K] * sizeof(uint16_t));
    for (uint32_t i = 0; i < a->h->head_dim[AKV_SIDE_V]; i++)
        a->ladder.coords[AKV_SIDE_V][i] = (uint16_t)i;
    AKV_TRY(akv_job_begin(job, &a->layer, &a->config, experiment, &a->header, &a->ladder, &mask, &a->arena, diag));
    job->again = a->from;
    job->again_head = a->head;
    take_over(a);
    value_means(a);
    akv_observe(job);
    akv_ladder_queries(job);
    akv_project(job);
    akv_ladder_weigh(job);
    akv_ladder_hulls(job, hulls + (size_t)a->head * AKV_SIDES);
    for (int side = 0; side < AKV_SIDES; side++) {
        const size_t first = (size_t)(a->head * job->S), n = (size_t)(job->H * job->S);
        memcpy(utility[side] + first, job->rank[side], n * sizeof(float));
        memcpy(a->prior[side] + first, a->ladder.prior[side], n * sizeof(float));
    }
    akv_job_end(job, &a->arena);
    return AKV_OK;
}

akv_status akv_observe_again(const akv_segment *segment, const akv_tensor *queries, uint32_t num_queries,
                             const akv_config *config, uint64_t most_bytes, float *const utility[AKV_SIDES],
                             akv_hull *hulls, akv_diag *diag)
{
    akv_again a;
    memset(&a, 0, sizeof a);
    a.from = segment;
    a.h = akv_header_of(segment);
    a.header = *a.h;
    akv_config_init(&a.config);
    if (config != NULL)
        a.config = *config;
    if (a.config.profile != AKV_PROFILE_DEFAULT)
        a.config.experiment = NULL;
    a.config.profile = AKV_PROFILE_DEFAULT;
    a.config.budget_bytes = 1; /* neither this nor keep_ratio is used */
    AKV_TRY(akv_check_config(&a.config, diag));
    const uint64_t H = a.h->num_kv_heads, S = a.h->num_tokens,
                   head_bytes = S * (a.h->head_dim[AKV_SIDE_K] + a.h->head_dim[AKV_SIDE_V]) * sizeof(float);
    const uint64_t most = head_bytes < most_bytes ? most_bytes / head_bytes : 1;
    akv_arena arena = {NULL, 0, false};
    for (int pass = 0; pass < 2; pass++) {
        arena.used = 0;
        for (int side = 0; side < AKV_SIDES; side++) {
            a.tokens[side] = AKV_TAKE(&arena, float, (most < H ? most : H) * S *a.h->head_dim[side]);
            a.prior[side] = AKV_TAKE(&arena, float, H *S);
        }
        if (pass == 1)
            break;
        a.bytes = arena.used;
        arena.base = arena.overflow ? NULL : akv_alloc(a.config.allocator, a.bytes);
        if (arena.base == NULL)
            return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", a.bytes);
    }
    a.heads = (uint32_t)H;
    describe(&a, queries, num_queries);
    akv_status status = akv_check_finite(&a.layer, queries, "queries", (uint32_t)H * a.h->gqa_group, num_queries,
                                         a.h->head_dim[AKV_SIDE_K], &a.config, diag);
    for (; status == AKV_OK && a.head < H; a.head += a.heads) {
        a.heads = (uint32_t)(H - a.head < most ? H - a.head : most);
        a.header.num_kv_heads = a.heads;
        describe(&a, queries, num_queries);
        akv_parallel_for(a.config.executor, decode_task, &a, (size_t)(a.heads * akv_div_up(S, AKV_BLOCK_TOKENS)));
        status = observe(&a, utility, hulls, diag);
    }
    if (status == AKV_OK) {
        const float *const seen[AKV_SIDES] = {utility[0], utility[1]},
                           *const prior[AKV_SIDES] = {a.prior[0], a.prior[1]};
        akv_ladder_add_prior(akv_experiment_of(&a.config, &a.defaults),
                             akv_ladder_sum_worth(seen, prior, H * S, (akv_worth){0.0, 0.0}), utility, prior, H * S);
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint64_t i = 0; i < H * S; i++)
                utility[side][i] = utility[side][i] > 1e-37f ? (float)akv_log2(utility[side][i]) : -123.0f;
    }
    akv_free(a.config.allocator, arena.base, a.bytes);
    return status;
}
