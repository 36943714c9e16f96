/* SPDX-License-Identifier: Apache-2.0 */
/* compress.c - one layer in, one segment out: the steps of the method in their order. */
#include "codec/ladder.h"
#include "core/slots.h"

uint64_t akv_layer_seed(const akv_layer *layer, const akv_config *config)
{
    return akv_mix64(config->seed ^ akv_mix64((uint64_t)(int64_t)layer->layer_index));
}

/* Carve all scratch of a job (or count it when the arena has no base). */
static void carve(akv_job *job, akv_arena *arena, uint8_t **mask)
{
    const uint64_t H = job->H, S = job->S, rows = job->rows, k = job->k, dk = job->dk, dv = job->dv;
    const uint64_t planes = job->header->rotary_dim / 2;
    const uint64_t parts = H * job->num_ranges;
    job->num_slots = akv_num_slots(job->config->executor, UINT64_MAX);
    job->queries = AKV_TAKE(arena, float, H * rows * dk);
    job->part_max = AKV_TAKE(arena, float, parts * rows);
    job->part_sum = AKV_TAKE(arena, float, parts * rows);
    job->part_out = AKV_TAKE(arena, float, parts * rows * dv);
    job->max = AKV_TAKE(arena, float, H * rows);
    job->inverse = AKV_TAKE(arena, float, H * rows);
    job->output = AKV_TAKE(arena, float, H * rows * dv);
    job->output_sq = AKV_TAKE(arena, float, H * rows);
    job->score = AKV_TAKE(arena, float, H * S);
    job->pooled = AKV_TAKE(arena, float, H * S);
    job->rank[AKV_SIDE_K] = AKV_TAKE(arena, float, H * S);
    job->rank[AKV_SIDE_V] = AKV_TAKE(arena, float, H * S);
    job->anchor_of = AKV_TAKE(arena, uint32_t, H * S);
    job->anchor[AKV_SIDE_K] = AKV_TAKE(arena, float, H * k * dk);
    job->anchor[AKV_SIDE_V] = AKV_TAKE(arena, float, H * k * dv);
    job->unit[AKV_SIDE_K] = AKV_TAKE(arena, float, H * k * dk);
    job->unit[AKV_SIDE_V] = AKV_TAKE(arena, float, H * k * dv);
    *mask = AKV_TAKE(arena, uint8_t, H * S);
    job->slots = AKV_TAKE(arena, atomic_flag, job->num_slots);
    job->scratch = AKV_TAKE(arena, akv_codec_scratch, job->num_slots);
    for (uint32_t i = 0; i < job->num_slots; i++) {
        akv_codec_scratch s;
        s.post = AKV_TAKE(arena, float, AKV_TILE_STRIDE * dk);
        s.pre = AKV_TAKE(arena, float, AKV_TILE_TOKENS * dk);
        s.value = AKV_TAKE(arena, float, AKV_TILE_TOKENS * dv);
        s.logits = AKV_TAKE(arena, float, rows * AKV_TILE_STRIDE);
        s.errors = AKV_TAKE(arena, float, rows * AKV_TILE_STRIDE);
        s.cross = AKV_TAKE(arena, float, rows * AKV_TILE_STRIDE);
        s.sims = AKV_TAKE(arena, float, (uint64_t)AKV_TILE_TOKENS * AKV_SIMS_STRIDE);
        s.best = AKV_TAKE(arena, float, AKV_TILE_TOKENS);
        s.vector = AKV_TAKE(arena, float, AKV_MAX_HEAD_DIM);
        s.phase = AKV_TAKE(arena, double, 2 * planes);
        if (arena->base != NULL) {
            job->scratch[i] = s;
            atomic_flag_clear(&job->slots[i]);
        }
    }
    akv_turn_carve(job, arena);
    if (job->ladder != NULL)
        akv_ladder_carve(job, arena);
}

akv_status akv_job_begin(akv_job *job, const akv_layer *layer, const akv_config *config,
                         const akv_experiment *experiment, akv_header *header, akv_ladder *ladder, uint8_t **mask,
                         akv_arena *arena, akv_diag *diag)
{
    const akv_shape *s = &layer->shape;
    memset(job, 0, sizeof *job);
    job->layer = layer;
    job->config = config;
    job->experiment = experiment;
    job->header = header;
    job->ladder = ladder;
    job->S = s->num_tokens;
    job->H = s->num_kv_heads;
    job->G = s->gqa_group;
    job->W = s->num_queries;
    job->k = header->num_anchors;
    job->rows = job->G * job->W;
    job->dk = s->head_dim_k;
    job->dv = s->head_dim_v;
    job->range_tokens = akv_round_up(akv_div_up(job->S, AKV_MOST_RANGES), AKV_RANGE_TOKENS);
    job->num_ranges = akv_div_up(job->S, job->range_tokens);
    job->seed = akv_layer_seed(layer, config);
    memset(arena, 0, sizeof *arena);
    carve(job, arena, mask);
    if (arena->overflow)
        return akv_fail(diag, AKV_E_NO_MEMORY, "the scratch of this shape does not fit into memory");
    size_t bytes = arena->used;
    uint8_t *memory = akv_alloc(config->allocator, bytes);
    if (memory == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", bytes);
    arena->base = memory;
    arena->used = 0;
    carve(job, arena, mask);
    akv_turn_begin(job);
    return AKV_OK;
}

void akv_job_end(akv_job *job, akv_arena *arena)
{
    akv_free(job->config->allocator, arena->base, arena->used);
}

akv_status akv_check_input(const akv_layer *layer, const akv_config *config, akv_diag *diag)
{
    const akv_shape *s = &layer->shape;
    AKV_TRY(akv_check_finite(layer, &layer->keys, "keys", s->num_kv_heads, s->num_tokens, s->head_dim_k, config, diag));
    AKV_TRY(
        akv_check_finite(layer, &layer->values, "values", s->num_kv_heads, s->num_tokens, s->head_dim_v, config, diag));
    if (layer->sampled.data != NULL && layer->num_sampled > 0)
        AKV_TRY(akv_check_finite(layer, &layer->sampled, "sampled", s->num_kv_heads * s->gqa_group, layer->num_sampled,
                                 s->head_dim_k, config, diag));
    return akv_check_finite(layer, &layer->queries, "queries", s->num_kv_heads * s->gqa_group, s->num_queries,
                            s->head_dim_k, config, diag);
}

akv_status akv_compress_plan(const akv_layer *layer, const akv_config *config, akv_compress_planned *out,
                             akv_diag *diag)
{
    AKV_TRY(akv_check_config(config, diag));
    if (layer == NULL || layer->struct_size < sizeof *layer)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer must come from akv_layer_init");
    AKV_TRY(akv_check_layer(layer, layer->shape.num_tokens > layer->shape.num_queries, diag));

    memset(out, 0, sizeof *out);
    akv_shape *shape = &out->shape;
    *shape = layer->shape;
    shape->has_positions = !akv_positions_consecutive(layer);
    shape->dtype = akv_layer_dtype(layer);
    const akv_experiment *experiment = akv_experiment_of(config, &out->defaults);
    out->experiment = experiment;
    akv_header *header = &out->header, planned;
    akv_header_from_layer(header, layer);
    memset(&planned, 0, sizeof planned);
    uint32_t slow_dims =
        akv_slow_coords(&layer->rope, shape->head_dim_k, (int64_t)header->last_position - header->first_position + 1,
                        experiment->slow_angle, out->coords[AKV_SIDE_K]);
    for (uint32_t i = 0; i < shape->head_dim_v; i++)
        out->coords[AKV_SIDE_V][i] = (uint16_t)i;
    AKV_TRY(akv_plan_header(shape, config, slow_dims, &planned, &out->info, diag));
    if (out->info.kind == AKV_SEGMENT_DENSE)
        return AKV_OK;

    header->kind = planned.kind;
    header->profile = (uint32_t)config->profile;
    header->budget_bytes = planned.budget_bytes;
    header->num_anchors = planned.num_anchors;
    header->total_bytes = planned.total_bytes;
    header->coding = planned.coding;
    header->code_bytes = planned.code_bytes;
    header->num_levels = planned.num_levels;
    header->index_bits = planned.index_bits;
    memcpy(header->basis_dim, planned.basis_dim, sizeof header->basis_dim);
    memcpy(header->basis_cols, planned.basis_cols, sizeof header->basis_cols);
    memcpy(header->num_residuals, planned.num_residuals, sizeof header->num_residuals);
    memcpy(header->sections, planned.sections, sizeof header->sections);
    header->flags = (experiment->anchor_space == AKV_ANCHOR_POST_ROPE ? AKV_FLAG_ANCHORS_POST_ROPE : 0u) |
                    (experiment->code_rule == AKV_CODE_PLAIN_UNIFORM ? AKV_FLAG_PLAIN_CODES : 0u);
    header->seed = akv_layer_seed(layer, config);
    return AKV_OK;
}

akv_segment *akv_compress_begin(const akv_layer *layer, const akv_config *config, const akv_header *header,
                                akv_diag *diag)
{
    akv_segment *segment = akv_segment_new(config->allocator, header->total_bytes);
    if (segment == NULL) {
        akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %llu bytes",
                 (unsigned long long)header->total_bytes);
        return NULL;
    }
    akv_compress_head(layer, header, (uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES);
    return segment;
}

void akv_compress_head(const akv_layer *layer, const akv_header *header, uint8_t *blob)
{
    memcpy(blob, header, sizeof *header); /* views of the segment being written need it; counts follow at the end */
    if (header->rotary_dim != 0)
        memcpy(blob + header->sections[AKV_SEC_INV_FREQ].offset, layer->rope.inv_freq,
               header->rotary_dim / 2 * sizeof(double));
    if (header->sections[AKV_SEC_POSITIONS].bytes != 0)
        memcpy(blob + header->sections[AKV_SEC_POSITIONS].offset, layer->positions,
               header->num_tokens * sizeof(int32_t));
}

akv_status akv_compress(const akv_layer *layer, const akv_config *config, akv_segment **out, akv_diag *diag)
{
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    akv_compress_planned planned;
    AKV_TRY(akv_compress_plan(layer, config, &planned, diag));
    if (planned.info.kind == AKV_SEGMENT_DENSE)
        return akv_make_dense(layer, config, planned.info.dense_reason, NULL, 0, planned.info.budget_bytes, out, diag);
    AKV_TRY(akv_check_input(layer, config, diag));
    akv_header *header = &planned.header;
    akv_ladder ladder;
    memset(&ladder, 0, sizeof ladder);
    ladder.options = planned.experiment;
    memcpy(ladder.coords, planned.coords, sizeof ladder.coords);

    akv_segment *segment = akv_compress_begin(layer, config, header, diag);
    if (segment == NULL)
        return AKV_E_NO_MEMORY;
    const bool is_ladder = header->coding == AKV_CODING_LADDER;
    akv_job job;
    akv_arena arena;
    uint8_t *mask = NULL;
    akv_status status = akv_job_begin(&job, layer, config, planned.experiment, header, is_ladder ? &ladder : NULL,
                                      &mask, &arena, diag);
    if (status != AKV_OK) {
        akv_segment_release(segment);
        return status;
    }
    job.blob = (uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES;

    akv_observe(&job);
    if (is_ladder)
        akv_ladder_begin(&job);
    akv_choose_anchors(&job);
    if (is_ladder)
        akv_refine_anchors(&job);
    akv_project(&job);
    if (is_ladder) {
        akv_ladder_finish(&job);
    } else {
        akv_select_owners(&job, mask);
        akv_code_residuals(&job);
    }
    memcpy(job.blob, header, sizeof *header);

    akv_job_end(&job, &arena);
    *out = segment;
    return AKV_OK;
}
