/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress.c - compression of a layer that lies on the device: checks and plan by the codec's own functions, the
 * workspace, the order of the kernels, and the one decision the host makes in between, the tables of bits (spectra
 * come down, 16 KB a layer of 8 heads; tables go up, 40 KB).
 */
#include "codec/ladder.h"
#include "cuda/compress.h"
#include "cuda/host.h"

/*
 * Everything on the device in one buffer; with base NULL only counted. What is of use early and what is of use late
 * share their memory where they are large.
 */
static void carve(akv_comp *c, akv_arena *arena)
{
    const uint64_t H = c->H, S = c->S, D = AKV_COMP_MAX_DIM, rows = c->rows, k = c->k;
    size_t begin = arena->used, end = 0;
#define AGAIN (end = end > arena->used ? end : arena->used, arena->used = begin)
#define DONE (arena->used = end > arena->used ? end : arena->used)
    c->stat_part = AKV_TAKE(arena, double, 2 * H * c->stat_chunks * 2 * D); /* first looks */
    AGAIN;
    c->part_max = AKV_TAKE(arena, float, H * c->num_parts * rows); /* observation */
    c->part_sum = AKV_TAKE(arena, float, H * c->num_parts * rows);
    c->part_out = AKV_TAKE(arena, float, H * c->num_parts * rows * D);
    AGAIN;
    for (int side = 0; side < AKV_SIDES; side++) { /* projection and bases */
        c->moment_part[side] = AKV_TAKE(arena, float, H * c->num_ranges * D * D);
        c->direction[side] = c->moment_part[side];
    }
    AGAIN;
    c->codes = AKV_TAKE(arena, uint8_t, c->code_bytes);
    DONE;
    begin = arena->used;
    c->phase = (float2 *)akv_arena_take(arena, S * c->planes, 8); /* up to the projection */
    AGAIN;
    c->rotation = (float2 *)akv_arena_take(arena, 2 * H * AKV_COMP_ROUNDS * (D / 2), 8);
    DONE;
#undef AGAIN
#undef DONE
    c->blob = AKV_TAKE(arena, uint8_t, c->blob_bytes);
    c->found = AKV_TAKE(arena, akv_comp_found, 1);
    c->inv_freq = AKV_TAKE(arena, double, D / 2);
    c->order = AKV_TAKE(arena, uint16_t, 2 * D);
    c->positions = AKV_TAKE(arena, int32_t, c->positions != NULL ? S : 0);
    c->sampled_positions = AKV_TAKE(arena, int32_t, c->num_sampled);
    c->deviation = AKV_TAKE(arena, float, H *S);
    c->value_sq = AKV_TAKE(arena, float, H *S);
    c->query = AKV_TAKE(arena, float, H *rows *D);
    c->query16 = AKV_TAKE(arena, uint16_t, H * rows * D);
    c->output16 = AKV_TAKE(arena, uint16_t, H * rows * D);
    c->row_sq = AKV_TAKE(arena, float, H *rows);
    c->query_sq = AKV_TAKE(arena, double, H);
    c->late = AKV_TAKE(arena, float, H *D * c->late_rows);
    c->max = AKV_TAKE(arena, float, H *rows);
    c->inverse = AKV_TAKE(arena, float, H *rows);
    c->output_sq = AKV_TAKE(arena, float, H *rows);
    c->mask = AKV_TAKE(arena, uint8_t, H * S);
    c->given = AKV_TAKE(arena, uint32_t, H * k);
    c->cover = AKV_TAKE(arena, akv_comp_cover, H);
    c->cumulated = AKV_TAKE(arena, double, H * AKV_COMP_GROUPS * c->cover_tiles);
    c->own = AKV_TAKE(arena, uint16_t, H * S);
    c->fixed = AKV_TAKE(arena, uint8_t, H * k);
    c->anchor_token = AKV_TAKE(arena, uint32_t, H * k);
    c->sums = AKV_TAKE(arena, double, 4 * H * c->blocks + 1);
    c->num_rounds = AKV_TAKE(arena, uint32_t, 2 * H);
    c->levels = AKV_TAKE(arena, akv_comp_levels, H * 2);
    c->bisection = AKV_TAKE(arena, akv_comp_bisection, 1);
    c->block_bytes = AKV_TAKE(arena, uint32_t, H * c->blocks * 2);
    double *weights = AKV_TAKE(arena, double, 2 * H * (D + 1)); /* of both sides: one copy */
    for (int side = 0; side < AKV_SIDES; side++) {
        c->weight[side] = weights == NULL ? NULL : weights + (uint64_t)side * H * (D + 1);
        c->mean[side] = AKV_TAKE(arena, float, H *D);
        c->unit_of[side] = AKV_TAKE(arena, float, H *D);
        c->rows16[side] = AKV_TAKE(arena, uint16_t, H * S * c->pad[side]);
        c->energy[side] = AKV_TAKE(arena, float, H *S);
        c->left[side] = AKV_TAKE(arena, float, H *S);
        c->tile_left[side] = AKV_TAKE(arena, float, H * c->cover_tiles);
        c->anchor[side] = AKV_TAKE(arena, float, H *k *D);
        c->unit16[side] = AKV_TAKE(arena, uint16_t, H * c->k_rows * c->pad[side]);
        c->anchor_sq[side] = AKV_TAKE(arena, float, H *k);
        c->nearest[side] = AKV_TAKE(arena, uint16_t, H * S);
        c->first_member[side] = AKV_TAKE(arena, uint32_t, H * (k + 1));
        c->coeff[side] = AKV_TAKE(arena, int8_t, H * S);
        c->eigenvalue[side] = AKV_TAKE(arena, float, H *D);
        c->moment[side] = AKV_TAKE(arena, float, H *D *D);
        c->rank[side] = AKV_TAKE(arena, float, H *S);
        c->cosine[side] = c->rank[side]; /* until utilities are found */
        c->sorted[side] = AKV_TAKE(arena, float, H *S);
        c->basis[side] = AKV_TAKE(arena, float, H *D *D);
        c->sigma[side] = AKV_TAKE(arena, float, H *D);
        c->level[side] = AKV_TAKE(arena, uint8_t, H * S);
    }
    c->score = c->sorted[0]; /* until anchors are chosen */
    c->pooled = c->sorted[1];
}

static akv_comp_source source_of(const akv_tensor *t, uint32_t dim, int64_t stride_page)
{
    akv_comp_source s = {t->data, (int)t->dtype, 0, t->stride_head, t->stride_token, t->stride_dim, stride_page};
    s.vectors = t->dtype != AKV_F32 && t->stride_dim == 1 && dim % 8 == 0 && (uintptr_t)t->data % 16 == 0 &&
                t->stride_head % 8 == 0 && t->stride_token % 8 == 0 && stride_page % 8 == 0;
    return s;
}

/* What is known from the plan; device arrays are not set yet. */
static void describe(akv_comp *c, const akv_layer *layer, const akv_cuda_pages *pages, const akv_compress_planned *p)
{
    const akv_header *h = &p->header;
    const akv_experiment *x = p->experiment;
    memset(c, 0, sizeof *c);
    c->S = h->num_tokens;
    c->H = h->num_kv_heads;
    c->G = h->gqa_group;
    c->W = h->num_queries;
    c->rows = c->G * c->W;
    c->earlier = c->S - c->W;
    c->k = h->num_anchors;
    c->k_rows = (uint32_t)akv_round_up(c->k, 64);
    c->planes = h->rotary_dim / 2;
    c->rotary = h->rotary_dim;
    c->style = h->rope_style;
    c->num_sampled = layer->sampled.data != NULL ? layer->num_sampled : 0;
    c->late_rows = c->G * (c->num_sampled > 0 ? c->num_sampled : c->W);
    c->num_levels = h->num_levels;
    c->index_bits = h->index_bits;
    for (int side = 0; side < AKV_SIDES; side++) {
        c->dim[side] = h->head_dim[side];
        c->pad[side] = h->head_dim[side] <= 64 ? 64 : AKV_COMP_MAX_DIM;
        c->under[side] = h->basis_dim[side];
        c->cols[side] = h->basis_cols[side];
        c->coords[side] = akv_num_coords(h, side);
        c->source[side] = source_of(side == AKV_SIDE_K ? &layer->keys : &layer->values, c->dim[side],
                                    pages != NULL ? pages->stride_page[side] : 0);
    }
    c->queries = source_of(&layer->queries, c->dim[0], 0);
    c->sampled = source_of(&layer->sampled, c->dim[0], 0);
    c->pages = pages != NULL ? pages->table : NULL;
    c->page_tokens = pages != NULL ? pages->page_tokens : 1;
    c->scale = (float)h->sm_scale;
    c->cap = (float)h->logit_softcap;
    c->magnitude = (float)h->magnitude;
    c->inverse_magnitude = (float)(1.0 / h->magnitude);
    c->first_position = h->first_position;
    c->last_position = h->last_position;
    c->positions = p->shape.has_positions ? layer->positions : NULL;
    c->range_tokens = akv_round_up(akv_div_up(c->S, AKV_COMP_RANGES), AKV_COMP_TILE);
    c->num_ranges = (uint32_t)akv_div_up(c->S, c->range_tokens);
    c->part_tokens = akv_round_up(akv_div_up(c->S, AKV_COMP_PARTS), AKV_COMP_TILE);
    c->num_parts = (uint32_t)akv_div_up(c->S, c->part_tokens);
    c->stat_chunks = (uint32_t)akv_div_up(c->S, 256);
    /*
     * Long contexts: anchors for coverage are drawn from every second or fourth tile only; the centroids that they
     * become see all tokens.
     */
    const uint64_t tiles = akv_div_up(c->earlier, AKV_COMP_COVER_TILE);
    c->cover_step = (uint64_t)c->k * 16 > c->earlier ? 1 : c->S >= 16384 ? 4 : c->S >= 4096 ? 2 : 1;
    c->cover_tiles = (uint32_t)akv_div_up(tiles, c->cover_step);
    const uint64_t last_tile = (uint64_t)(c->cover_tiles - 1) * c->cover_step * AKV_COMP_COVER_TILE;
    const uint64_t covered =
        (uint64_t)(c->cover_tiles - 1) * AKV_COMP_COVER_TILE +
        (c->earlier - last_tile < AKV_COMP_COVER_TILE ? c->earlier - last_tile : AKV_COMP_COVER_TILE);
    c->blocks = (uint32_t)akv_div_up(c->S, AKV_BLOCK_TOKENS);
    const uint64_t most_judges = c->S >= 16384 ? AKV_COMP_JUDGES / 2 : AKV_COMP_JUDGES; /* other ones every round */
    c->judge_stride = (uint32_t)akv_div_up(covered, most_judges);
    c->judges = (uint32_t)(covered / c->judge_stride);
    c->judge_rows = (uint32_t)akv_round_up(c->judges, 128);
    /* anchors.c: the most attended, the sinks among them in any case */
    const uint64_t free_anchors = c->k - c->W;
    uint64_t top = x->no_random_anchors ? free_anchors : (uint64_t)(x->rho * (double)free_anchors);
    if (x->most_attended > 0 && top > x->most_attended)
        top = x->most_attended;
    top = top < c->earlier ? top : c->earlier;
    uint64_t sinks = x->sinks < c->earlier ? x->sinks : c->earlier;
    sinks = sinks < free_anchors ? sinks : free_anchors;
    c->top_sinks = (uint32_t)sinks;
    c->top = (uint32_t)(top < sinks ? sinks : top);
    c->num_given = c->top + c->W;
    c->all_fixed = x->anchor_rounds == 0;
    c->sinks = x->sinks;
    c->pool_width = x->pool_width;
    c->pooled_tokens = x->pool_tokens;
    c->decay = x->pool_tokens > 0 ? 1.0f - 1.0f / (float)x->pool_tokens : 0.0f;
    c->pool_weight = (float)x->pool_weight;
    c->incoherent = (float)x->incoherent;
    c->query_mix = x->query_mix;
    c->floor = x->floor;
    c->value_boost = x->value_boost;
    c->code_bytes = h->code_bytes;
    /* The segment without its codes, which have a place of their own. */
    const akv_section *codes = &h->sections[AKV_SEC_CODES];
    const uint64_t out = akv_round_up(codes->bytes, AKV_ALIGN);
    c->blob_bytes = h->total_bytes - out;
    for (int i = 0; i < AKV_SEC_COUNT; i++)
        c->section[i] = h->sections[i].offset - (h->sections[i].offset > codes->offset ? out : 0);
}

static akv_status plan(const akv_layer *layer, const akv_cuda_pages *pages, const akv_config *config,
                       akv_compress_planned *p, akv_comp *c, akv_diag *diag)
{
    AKV_TRY(akv_compress_plan(layer, config, p, diag));
    if (config->profile != AKV_PROFILE_DEFAULT)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "compression on the GPU covers the profile default only");
    if (p->info.kind == AKV_SEGMENT_DENSE)
        return akv_fail(
            diag, AKV_E_UNSUPPORTED,
            "this layer would stay dense (akv_dense_reason %d; akv_plan says so beforehand): keep it as it is",
            (int)p->info.dense_reason);
    const akv_header *h = &p->header;
    for (int side = 0; side < AKV_SIDES; side++)
        if (h->head_dim[side] > AKV_COMP_MAX_DIM)
            return akv_fail(diag, AKV_E_UNSUPPORTED, "head_dim_%c is %u; compression on the GPU covers at most %u",
                            side ? 'v' : 'k', h->head_dim[side], AKV_COMP_MAX_DIM);
    if (p->experiment->uniform_anchors)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "akv_experiment.uniform_anchors is not covered by compression on the GPU");
    if (h->num_kv_heads > 128 || h->num_tokens > UINT32_MAX - AKV_BLOCK_TOKENS ||
        (uint64_t)h->gqa_group * h->num_queries > 65535)
        return akv_fail(diag, AKV_E_UNSUPPORTED,
                        "%u KV heads, %llu tokens, %u x %u observation rows: the GPU covers 128, 2^32 - 1025 and 65535",
                        h->num_kv_heads, (unsigned long long)h->num_tokens, h->gqa_group, h->num_queries);
    if (pages != NULL && (pages->struct_size < sizeof *pages || pages->table == NULL || pages->page_tokens == 0))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "pages: call akv_cuda_pages_init, then set table (device memory) and page_tokens (at least 1)");
    describe(c, layer, pages, p);
    return AKV_OK;
}

void akv_cuda_pages_init(akv_cuda_pages *pages)
{
    memset(pages, 0, sizeof *pages);
    pages->struct_size = sizeof *pages;
}

akv_status akv_cuda_compress_workspace_bytes(const akv_layer *layer, const akv_config *config, size_t *bytes,
                                             akv_diag *diag)
{
    if (bytes == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "bytes must not be NULL");
    akv_compress_planned p;
    akv_comp c;
    AKV_TRY(plan(layer, NULL, config, &p, &c, diag));
    akv_arena arena;
    memset(&arena, 0, sizeof arena);
    carve(&c, &arena);
    if (arena.overflow)
        return akv_fail(diag, AKV_E_NO_MEMORY, "the workspace of this shape does not fit into memory");
    *bytes = (size_t)akv_round_up(arena.used, AKV_CUDA_ALIGN);
    return AKV_OK;
}

static akv_status must_be_device(const void *pointer, const char *name, int device, akv_diag *diag)
{
    struct cudaPointerAttributes at;
    AKV_CUDA_TRY(cudaPointerGetAttributes(&at, pointer), "looking at a pointer");
    if (at.type != cudaMemoryTypeDevice && at.type != cudaMemoryTypeManaged)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "%s is no device memory; akv_compress is for caches in host memory", name);
    if (at.type == cudaMemoryTypeDevice && at.device != device)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s lies on device %d, but device %d is current", name, at.device,
                        device);
    return AKV_OK;
}

static akv_status check_device(const akv_layer *layer, const akv_cuda_pages *pages, const void *workspace,
                               akv_diag *diag)
{
    int device = 0, shared = 0;
    AKV_CUDA_TRY(cudaGetDevice(&device), "asking for the device");
    AKV_CUDA_TRY(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "asking the device");
    if (shared < AKV_COMP_LEAST_SHARED)
        return akv_fail(
            diag, AKV_E_UNSUPPORTED,
            "this device has %d bytes of shared memory a block; compression needs %d (compute capability 9.0)", shared,
            AKV_COMP_LEAST_SHARED);
    AKV_TRY(must_be_device(layer->keys.data, "keys", device, diag));
    AKV_TRY(must_be_device(layer->values.data, "values", device, diag));
    AKV_TRY(must_be_device(layer->queries.data, "queries", device, diag));
    if (layer->sampled.data != NULL && layer->num_sampled > 0)
        AKV_TRY(must_be_device(layer->sampled.data, "sampled", device, diag));
    if (pages != NULL)
        AKV_TRY(must_be_device(pages->table, "pages.table", device, diag));
    return must_be_device(workspace, "workspace", device, diag);
}

static akv_status check_finite(const akv_comp *c, const akv_layer *layer, const akv_comp_found *found, akv_diag *diag)
{
    static const char *const names[4] = {"keys", "values", "sampled", "queries"};
    const uint64_t tokens[4] = {c->S, c->S, c->num_sampled, c->W};
    const uint32_t dims[4] = {c->dim[0], c->dim[1], c->dim[0], c->dim[0]};
    for (int i = 0; i < 4; i++)
        if (found->bad[i] != UINT64_MAX) {
            const uint64_t row = found->bad[i] / dims[i];
            return akv_fail(diag, AKV_E_NON_FINITE,
                            "layer %d: %s hold NaN or infinity at head %llu, token %llu, dim %llu", layer->layer_index,
                            names[i], (unsigned long long)(row / tokens[i]), (unsigned long long)(row % tokens[i]),
                            (unsigned long long)(found->bad[i] % dims[i]));
        }
    return AKV_OK;
}

/* What the host keeps while the device works. */
typedef struct akv_comp_host {
    akv_comp_found found;
    double inv_freq[AKV_COMP_MAX_DIM / 2];
    uint16_t order[AKV_SIDES][AKV_COMP_MAX_DIM];
} akv_comp_host;

/* Tables of bits from the spectra: into the segment, and as lists for the kernels. */
static void make_levels(const akv_comp *c, const akv_compress_planned *p, const double *weights, uint8_t *blob,
                        akv_comp_levels *levels)
{
    const uint32_t n = c->num_levels;
    for (uint32_t head = 0; head < c->H; head++)
        for (int side = 0; side < AKV_SIDES; side++) {
            akv_comp_levels *out = &levels[head * 2 + (uint32_t)side];
            const double *w = weights + ((uint64_t)side * c->H + head) * (AKV_COMP_MAX_DIM + 1);
            const uint32_t coords = c->coords[side];
            const uint64_t row_bytes = akv_div_up(coords, 4);
            uint8_t entries[AKV_MAX_LEVELS * AKV_COMP_MAX_DIM];
            double distortion[AKV_MAX_LEVELS + 1];
            uint8_t *tables = blob + p->header.sections[AKV_SEC_TABLES + side].offset + (uint64_t)head * n * row_bytes;
            memset(out, 0, sizeof *out);
            akv_water_fill(p->experiment->level_bits, n, w, coords, w[AKV_COMP_MAX_DIM], entries, out->bits,
                           distortion);
            akv_pack_tables(entries, n, coords, tables);
            for (uint32_t l = 0; l < n; l++) {
                akv_level_list list;
                akv_level_list_of(tables + l * row_bytes, coords, &list);
                memcpy(out->by_width[l], list.by_width, sizeof list.by_width);
                for (uint32_t i = 0; i < list.count; i++)
                    out->coord[l][i] = (uint8_t)list.coord[i];
            }
            const akv_hull hull = akv_ladder_hull(distortion, out->bits, n);
            out->hull_count = hull.count;
            memcpy(out->hull_level, hull.level, sizeof hull.level);
            memcpy(out->hull_slope, hull.slope, sizeof hull.slope);
        }
}

/* Small things the kernels read, up; everything that is added to, zeroed. */
static akv_status send(const akv_comp *c, const akv_layer *layer, const akv_compress_planned *p, akv_comp_host *host,
                       akv_comp_cover *cover, cudaStream_t stream, akv_diag *diag)
{
    memset(host, 0, sizeof *host);
    memset(host->found.bad, 0xff, sizeof host->found.bad);
    memcpy(host->inv_freq, layer->rope.inv_freq, c->planes * sizeof(double));
    for (int side = 0; side < AKV_SIDES; side++)
        memcpy(host->order[side], p->coords[side], c->dim[side] * sizeof(uint16_t));
    for (uint32_t head = 0; head < c->H; head++) {
        memset(&cover[head], 0, sizeof cover[head]);
        cover[head].rng = akv_rng_stream(p->header.seed, AKV_RNG_ANCHORS, head).state;
    }
    const struct {
        const void *to, *from;
        size_t bytes;
    } copies[] = {{c->found, &host->found, sizeof host->found},
                  {c->inv_freq, host->inv_freq, sizeof host->inv_freq},
                  {c->order, host->order, sizeof host->order},
                  {c->cover, cover, c->H * sizeof *cover},
                  {c->positions, layer->positions, p->shape.has_positions ? c->S * sizeof(int32_t) : 0},
                  {c->sampled_positions, layer->sampled_positions, c->num_sampled * sizeof(int32_t)}};
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++)
        if (copies[i].bytes > 0)
            AKV_CUDA_TRY(cudaMemcpyAsync((void *)(uintptr_t)copies[i].to, copies[i].from, copies[i].bytes,
                                         cudaMemcpyHostToDevice, stream),
                         "sending the layer's description");
    AKV_CUDA_TRY(cudaMemsetAsync(c->blob, 0, c->blob_bytes, stream), "clearing the segment");
    return AKV_OK;
}

static akv_status run(const akv_comp *c, const akv_layer *layer, const akv_config *config,
                      const akv_compress_planned *p, akv_comp_host *host, double *weights, akv_comp_levels *levels,
                      akv_comp_cover *cover, cudaStream_t stream, akv_segment **segment, akv_diag *diag)
{
    AKV_TRY(send(c, layer, p, host, cover, stream, diag));
    AKV_CUDA_TRY(akv_comp_rows(c, stream), "starting the statistics");
    AKV_CUDA_TRY(akv_comp_observe(c, stream), "starting the observation");
    AKV_CUDA_TRY(akv_comp_cover_all(c, stream), "starting the choice of anchors");
    AKV_CUDA_TRY(akv_comp_refine(c, p->experiment->anchor_rounds, stream), "starting the centroids");
    AKV_CUDA_TRY(akv_comp_project(c, stream), "starting the projection");
    AKV_CUDA_TRY(akv_comp_bases(c, stream), "starting the bases");
    const size_t weight_bytes = (size_t)2 * c->H * (AKV_COMP_MAX_DIM + 1) * sizeof(double);
    AKV_CUDA_TRY(cudaMemcpyAsync(weights, c->weight[0], weight_bytes, cudaMemcpyDeviceToHost, stream),
                 "fetching the spectra");
    AKV_CUDA_TRY(cudaMemcpyAsync(&host->found, c->found, sizeof host->found, cudaMemcpyDeviceToHost, stream),
                 "fetching the spectra");
    *segment = akv_compress_begin(layer, config, &p->header, diag); /* cleared by the host while the device works */
    if (*segment == NULL)
        return AKV_E_NO_MEMORY;
    uint8_t *blob = (uint8_t *)*segment + AKV_SEGMENT_OBJECT_BYTES;
    AKV_CUDA_TRY(cudaStreamSynchronize(stream), "compressing up to the spectra");
    AKV_TRY(check_finite(c, layer, &host->found, diag));

    make_levels(c, p, weights, blob, levels);
    AKV_CUDA_TRY(cudaMemcpyAsync(c->levels, levels, (size_t)c->H * 2 * sizeof *levels, cudaMemcpyHostToDevice, stream),
                 "sending the tables");
    AKV_CUDA_TRY(akv_comp_levels_of(c, stream), "starting the levels");
    AKV_CUDA_TRY(cudaMemsetAsync(c->codes, 0, c->code_bytes, stream), "clearing the codes");
    AKV_CUDA_TRY(akv_comp_code(c, stream), "starting the codes");
    AKV_CUDA_TRY(cudaMemcpyAsync(&host->found, c->found, sizeof host->found, cudaMemcpyDeviceToHost, stream),
                 "fetching the counts");
    /* All but what the host wrote: the tables, and what begin and the end copy from the layer. */
    for (int i = 0; i < AKV_SEC_COUNT; i++) {
        const akv_section *s = &p->header.sections[i];
        const bool here = i == AKV_SEC_INV_FREQ || i == AKV_SEC_POSITIONS || i == AKV_SEC_COORDS ||
                          i == AKV_SEC_TABLES || i == AKV_SEC_TABLES + 1;
        if (s->bytes > 0 && !here)
            AKV_CUDA_TRY(cudaMemcpyAsync(blob + s->offset, i == AKV_SEC_CODES ? c->codes : c->blob + c->section[i],
                                         s->bytes, cudaMemcpyDeviceToHost, stream),
                         "fetching the segment");
    }
    AKV_CUDA_TRY(cudaStreamSynchronize(stream), "compressing");
    akv_header *h = (akv_header *)(void *)blob;
    for (int side = 0; side < AKV_SIDES; side++)
        h->num_residuals[side] = host->found.num_residuals[side];
    memcpy(blob + h->sections[AKV_SEC_COORDS].offset, p->coords[AKV_SIDE_K], c->dim[AKV_SIDE_K] * sizeof(uint16_t));
    return AKV_OK;
}

akv_status akv_cuda_compress(const akv_layer *layer, const akv_cuda_pages *pages, const akv_config *config,
                             void *workspace, size_t workspace_bytes, akv_cuda_stream stream, akv_segment **out,
                             akv_diag *diag)
{
    if (out == NULL || workspace == NULL || (uintptr_t)workspace % AKV_CUDA_ALIGN != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "workspace must be a buffer aligned to %u bytes, out must not be NULL", AKV_CUDA_ALIGN);
    akv_compress_planned p;
    akv_comp c;
    AKV_TRY(plan(layer, pages, config, &p, &c, diag));
    akv_arena arena;
    memset(&arena, 0, sizeof arena);
    arena.base = workspace;
    carve(&c, &arena);
    if (!p.shape.has_positions)
        c.positions = NULL;
    if (arena.overflow || arena.used > workspace_bytes)
        return akv_fail(diag, AKV_E_NO_SPACE,
                        "the workspace has %zu bytes; this layer needs %zu (akv_cuda_compress_workspace_bytes)",
                        workspace_bytes, (size_t)akv_round_up(arena.used, AKV_CUDA_ALIGN));
    AKV_TRY(check_device(layer, pages, workspace, diag));

    akv_segment *segment = NULL;
    /* Host memory of the small copies: from the caller's allocator too, so that it may be pinned. */
    const size_t weight_bytes = (size_t)2 * c.H * (AKV_COMP_MAX_DIM + 1) * sizeof(double);
    akv_arena small;
    akv_comp_host *host = NULL;
    double *weights = NULL;
    akv_comp_levels *levels = NULL;
    akv_comp_cover *cover = NULL;
    memset(&small, 0, sizeof small);
    for (int turn = 0; turn < 2; turn++) {
        host = AKV_TAKE(&small, akv_comp_host, 1);
        weights = (double *)akv_arena_take(&small, 1, weight_bytes);
        levels = AKV_TAKE(&small, akv_comp_levels, (uint64_t)c.H * 2);
        cover = AKV_TAKE(&small, akv_comp_cover, c.H);
        if (turn == 0) {
            small.base = akv_alloc(config->allocator, small.used);
            if (small.base == NULL)
                break;
            small.used = 0;
        }
    }
    akv_status status = small.base == NULL
                            ? akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", small.used)
                            : run(&c, layer, config, &p, host, weights, levels, cover, stream, &segment, diag);
    if (status != AKV_OK && small.base != NULL)
        (void)cudaStreamSynchronize(stream); /* copies may still be on their way into this memory */
    if (small.base != NULL)
        akv_free(config->allocator, small.base, small.used);
    if (status != AKV_OK) {
        akv_segment_release(segment);
        return status;
    }
    *out = segment;
    return AKV_OK;
}
