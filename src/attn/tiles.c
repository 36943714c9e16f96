/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiles.c - attention for many query rows at once (a question over a document, a batch of prompt tokens): 64 tokens are brought
 * to f32 keys and values once and used for all rows, as two small matrix products. Taken when a KV head has enough rows
 * (AKV_TILE_ROWS, AKV_TILE_LADDER_ROWS); below that, rebuilding costs more than it saves.
 *
 * Compressed segments go through products in whole numbers where the machine has them (kernels/tile.h).
 *
 * LADDER: the residuals of a block are laid out tile by tile as [coordinates][64 tokens], so that a tile's are one product of the
 * basis with them. The other way round, tokens times basis, streams the basis from the second-level cache for every six
 * tokens: twice the time.
 */
#include "attn/attend.h"
#include "core/ladder.h"
#include "core/rope.h"
#include "kernels/matrix.h"
#include "kernels/quad.h"
#include "kernels/tile.h"

#define TILE AKV_QUAD_TILE
#define ROWS AKV_TILE_MOST_WEIGHED

void akv_tiles_take(akv_arena *arena, uint32_t rows, uint32_t dk, uint32_t dv, bool ladder, akv_tile_scratch *s)
{
    s->keys = AKV_TAKE(arena, float, TILE * (uint64_t)(dk > dv ? dk : dv)); /* residuals of values too */
    s->turned_keys = AKV_TAKE(arena, float, TILE * (uint64_t)dk);
    s->values = AKV_TAKE(arena, float, TILE * (uint64_t)dv);
    s->logits = AKV_TAKE(arena, float, TILE * (uint64_t)rows);
    s->shrink = AKV_TAKE(arena, float, rows);
    s->residual = AKV_TAKE(arena, float, ladder ? TILE * (uint64_t)(dk > dv ? dk : dv) : 0);
    s->turned_values = AKV_TAKE(arena, float, ladder ? TILE * (uint64_t)dv : 0);
    s->phase = AKV_TAKE(arena, double, 4 * (uint64_t)(dk / 2));
    s->packed_queries = AKV_TAKE(arena, int16_t, ladder ? rows * (uint64_t)(dk + 1) : 0);
    s->packed_keys = AKV_TAKE(arena, int16_t, ladder ? TILE * (uint64_t)((dk > dv ? dk : dv) + 1) : 0);
    s->packed_values = AKV_TAKE(arena, int16_t, ladder ? TILE * (uint64_t)dv : 0);
    s->query_scale = AKV_TAKE(arena, float, ladder ? rows : 0);
    s->turns = AKV_TAKE(arena, float, ladder ? TILE * (uint64_t)dk : 0);
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t dim = side == AKV_SIDE_K ? dk : dv;
        s->coded[side] = AKV_TAKE(arena, float, ladder ? AKV_BLOCK_TOKENS * dim : 0);
        s->basis[side] = AKV_TAKE(arena, float, ladder ? dim * dim : 0);
        s->token_scale[side] = AKV_TAKE(arena, float, ladder ? TILE : 0);
        s->packed_basis[side] = AKV_TAKE(arena, int16_t, ladder ? dim * (dim + 1) : 0);
        s->basis_scale[side] = AKV_TAKE(arena, float, ladder ? dim : 0);
    }
}

/* [64][dim], tokens from n on 0, -> [dim][64]. */
static void turn_over(const float *x, uint32_t n, uint32_t dim, float *out)
{
    if (n < TILE)
        memset(out, 0, TILE * (size_t)dim * sizeof *out);
    akv_matrix_best()->transpose(x, dim, n, dim, out, TILE);
}

/* The tile's turned keys and values in s -> every row's state. b0 = first token of the tile in its part's tensor. */
static void attend_tile(const akv_task *task, akv_scratch *scratch, uint64_t b0, uint32_t n, bool masked, const akv_quad_kernels *quads,
                        akv_partial *out)
{
    akv_tile_scratch *s = &scratch->tile;
    const uint32_t dk = task->params->head_dim_k, dv = task->params->head_dim_v, rows = task->rows;
    quads->tile_dots(scratch->query, rows, dk, s->turned_keys, s->logits);
    akv_softmax_block(task, s->logits, TILE, b0, n, masked, out->max, out->sum, s->shrink);
    akv_shrink_rows(out->acc, rows, dv, s->shrink);
    quads->tile_sums(s->logits, TILE, rows, s->values, n, dv, out->acc);
}

/* The same in whole numbers of 16 bits, as many rows at a time as the first-level cache holds beside keys and values. */
static void attend_whole_tile(const akv_task *task, akv_scratch *scratch, uint32_t n, const akv_tile_products *products, akv_partial *out)
{
    akv_tile_scratch *s = &scratch->tile;
    const uint32_t dk = task->params->head_dim_k, dv = task->params->head_dim_v;
    products->pack_keys(s->turned_keys, dk, s->packed_keys, s->token_scale[AKV_SIDE_K]);
    products->pack_values(s->values, n, dv, s->packed_values, s->token_scale[AKV_SIDE_V]);
    for (uint32_t r0 = 0; r0 < task->rows; r0 += ROWS) {
        const uint32_t rows = task->rows - r0 < ROWS ? task->rows - r0 : ROWS;
        float max[ROWS], sum[ROWS], shrink[ROWS], scale[ROWS];
        products->dots(s->packed_queries + (size_t)r0 * akv_round_up(dk, 2), s->query_scale + r0, rows, dk, s->packed_keys,
                       s->token_scale[AKV_SIDE_K], s->logits);
        for (uint32_t r = 0; r < rows; r++) {
            const float m = akv_softmax_logits(task, r0 + r, s->logits + (size_t)r * TILE, 0, n, false, out->max[r0 + r]);
            const bool none = m == -INFINITY; /* no logit is a number: weights are 0, or NaN, which must not get lost */
            shrink[r] = none ? 1.0f : akv_softmax_shrink(out->max[r0 + r], m);
            max[r] = none ? 0.0f : m;
            out->max[r0 + r] = m;
        }
        products->weigh(s->logits, rows, n, max, s->token_scale[AKV_SIDE_V], sum, scale);
        for (uint32_t r = 0; r < rows; r++)
            out->sum[r0 + r] = out->sum[r0 + r] * shrink[r] + sum[r];
        products->sums(s->logits, scale, shrink, rows, s->packed_values, dv, out->acc + (size_t)r0 * dv);
    }
}

void akv_attend_dense_tiles(const akv_task *task, const akv_tensor *keys, const akv_tensor *values, bool masked, akv_scratch *scratch,
                            akv_partial *out)
{
    const uint32_t dk = task->params->head_dim_k, dv = task->params->head_dim_v;
    const akv_quad_kernels *quads = akv_quad_best();
    akv_load_queries(task, scratch);
    for (uint64_t b0 = task->begin; b0 < task->end; b0 += TILE) {
        const uint32_t n = (uint32_t)(task->end - b0 < TILE ? task->end - b0 : TILE);
        for (uint32_t t = 0; t < n; t++) {
            akv_dense_row(task->kernels, keys, task->kv_head, b0 + t, dk, scratch->tile.keys + (size_t)t * dk);
            akv_dense_row(task->kernels, values, task->kv_head, b0 + t, dv, scratch->tile.values + (size_t)t * dv);
        }
        turn_over(scratch->tile.keys, n, dk, scratch->tile.turned_keys);
        attend_tile(task, scratch, b0, n, masked, quads, out);
    }
}

/* The basis as f32, times sigma: row i of [basis_dim][basis_cols] is what ordered coordinate i takes from each coded one. */
static void unfold_basis(const akv_ladder_view *v, float *out)
{
    for (uint32_t c = 0; c < v->basis_cols; c++) {
        const float scale = akv_bf16_to_f32(v->sigmas[c]) * v->basis_scales[c];
        for (uint32_t i = 0; i < v->basis_dim; i++)
            out[(size_t)i * v->basis_cols + c] = scale * (float)v->basis[(size_t)c * v->basis_dim + i];
    }
}

/* Coded residuals of a block in units of sigma: [tiles][coords][64 tokens], 0 where there is none. */
static void unpack_block(const akv_task *task, const akv_ladder_view *v, const akv_level_list *lists, uint64_t block, uint32_t n,
                         float *group, float *out)
{
    uint16_t tokens[AKV_BLOCK_TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 2];
    const uint8_t *run = v->codes + v->offsets[block * 2];
    memset(out, 0, (size_t)akv_round_up(n, TILE) * v->num_coords * sizeof *out);
    akv_ladder_sort(v, block, n, tokens, first);
    for (uint32_t l = 0; l < v->num_levels; l++) {
        const uint32_t count = first[l + 2] - first[l + 1];
        const akv_level_list *list = &lists[l];
        if (count == 0)
            continue;
        const uint8_t *codes = run + (count + 1) / 2;
        for (uint32_t at = 0; at < count; at += AKV_GROUP_LANES) {
            const uint32_t g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
            task->kernels->unpack_level(codes + (size_t)(at / AKV_GROUP_LANES) * 2 * list->bits, g, list->width, list->count, group);
            float gains[AKV_GROUP_LANES];
            size_t place[AKV_GROUP_LANES];
            for (uint32_t i = 0; i < g; i++) {
                const uint32_t token = tokens[first[l + 1] + at + i];
                gains[i] = akv_gain_value((run[(at + i) / 2] >> ((at + i) % 2 * 4)) & 15u);
                place[i] = (size_t)(token / TILE) * TILE * v->num_coords + token % TILE;
            }
            for (uint32_t c = 0; c < list->count; c++) {
                float *z = out + (size_t)list->coord[c] * TILE;
                for (uint32_t i = 0; i < g; i++)
                    z[place[i]] = gains[i] * group[c * AKV_GROUP_LANES + i];
            }
        }
        run += akv_run_bytes(count, list->bits);
    }
}

/* Cosines and sines of the angles that the planes turn in 0 to 63 positions: one complex product each, from the exact step. */
static void make_turns(const double *inv_freq, uint32_t planes, float *out)
{
    for (uint32_t j = 0; j < planes; j++) {
        double step_cosine, step_sine, c = 1.0, s = 0.0;
        akv_sincos(inv_freq[j], &step_sine, &step_cosine);
        float *cosine = out + (size_t)j * 2 * TILE, *sine = cosine + TILE;
        for (uint32_t t = 0; t < TILE; t++) {
            cosine[t] = (float)c;
            sine[t] = (float)s;
            const double next = c * step_cosine - s * step_sine;
            s = s * step_cosine + c * step_sine;
            c = next;
        }
    }
}

/* What the tiles of a task have in common. */
typedef struct ladder_tiles {
    const akv_header *header;
    const akv_tile_kernels *kernels;
    const akv_quad_kernels *quads;
    const int32_t *positions; /* NULL: consecutive */
    const double *inv_freq;
    const uint16_t *coords;
    akv_ladder_view side[AKV_SIDES];
    akv_rope_walk walk;
    uint32_t planes;
    uint16_t first[AKV_MAX_HEAD_DIM / 2], second[AKV_MAX_HEAD_DIM / 2]; /* coordinates of each plane */
    float units[AKV_SIDES][AKV_MAX_HEAD_DIM], mean[AKV_MAX_HEAD_DIM];
} ladder_tiles;

static void begin_tiles(const akv_task *task, const akv_segment *segment, akv_scratch *scratch, ladder_tiles *l)
{
    const akv_header *h = akv_header_of(segment);
    akv_tile_scratch *s = &scratch->tile;
    const uint16_t *mean = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (size_t)task->kv_head * h->head_dim[AKV_SIDE_K];
    l->header = h;
    l->kernels = akv_tile_best();
    l->quads = akv_quad_best();
    l->positions = h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    l->inv_freq = akv_section_of(segment, AKV_SEC_INV_FREQ);
    l->coords = akv_section_of(segment, AKV_SEC_COORDS);
    l->planes = h->rotary_dim / 2;
    l->walk = akv_rope_walk_begin(l->inv_freq, l->planes, s->phase);
    for (int i = 0; i < AKV_SIDES; i++) {
        l->side[i] = akv_view_ladder(segment, i, task->kv_head);
        unfold_basis(&l->side[i], s->basis[i]);
        if (l->kernels->products != NULL)
            l->kernels->products->pack_queries(s->basis[i], l->side[i].basis_dim, l->side[i].basis_cols, s->packed_basis[i],
                                               s->basis_scale[i]);
        for (uint32_t level = 0; level < h->num_levels; level++)
            akv_ladder_list(&l->side[i], level + 1, &scratch->lists[i][level]);
        for (uint32_t c = 0; c < l->side[i].dim; c++)
            l->units[i][c] = akv_bf16_to_f32(l->side[i].units[c]);
    }
    for (uint32_t i = 0; i < h->head_dim[AKV_SIDE_K]; i++)
        l->mean[i] = akv_bf16_to_f32(mean[i]);
    for (uint32_t j = 0; j < l->planes; j++) {
        l->first[j] = (uint16_t)akv_plane_first((akv_rope_style)h->rope_style, j);
        l->second[j] = (uint16_t)akv_plane_second((akv_rope_style)h->rope_style, h->rotary_dim, j);
    }
    if (l->positions == NULL)
        make_turns(l->inv_freq, l->planes, s->turns);
}

/* Residuals of a tile, from its coded ones z [coords][64], added to out [dim][64]. */
static void add_residuals(const ladder_tiles *l, int side, akv_tile_scratch *s, const float *z, float *out)
{
    const akv_ladder_view *v = &l->side[side];
    const uint16_t *coords = side == AKV_SIDE_K ? l->coords : NULL;
    const akv_tile_products *products = l->kernels->products;
    float *room = s->residual;
    if (products != NULL) {
        products->pack_keys(z, v->basis_cols, s->packed_keys, s->token_scale[side]);
        products->dots(s->packed_basis[side], s->basis_scale[side], v->basis_dim, v->basis_cols, s->packed_keys, s->token_scale[side], room);
    } else {
        l->quads->tile_dots(s->basis[side], v->basis_dim, v->basis_cols, z, room);
    }
    for (uint32_t i = 0; i < v->dim; i++) {
        const uint32_t c = v->basis_cols + i - v->basis_dim; /* of a coordinate without a basis */
        const float *from = i < v->basis_dim ? room + (size_t)i * TILE : z + (size_t)c * TILE;
        const float scale = i < v->basis_dim ? 1.0f : akv_bf16_to_f32(v->sigmas[c]);
        float *to = out + (size_t)(coords != NULL ? coords[i] : i) * TILE;
        for (uint32_t t = 0; t < TILE; t++)
            to[t] += scale * from[t];
    }
}

/* Keys that the tile's anchors make, turned to their positions -> turned_keys. */
static void rebuild_keys(ladder_tiles *l, uint64_t b0, uint32_t n, akv_tile_scratch *s)
{
    const akv_header *h = l->header;
    const akv_ladder_view *v = &l->side[AKV_SIDE_K];
    const uint32_t dim = v->dim;
    for (uint32_t t = 0; t < n; t++) {
        const uint32_t a = akv_ladder_index(v, b0 + t);
        float *key = s->keys + (size_t)t * dim;
        l->kernels->anchor_row(v->anchors + (size_t)a * dim, akv_ladder_weight(v, b0 + t, a), l->units[AKV_SIDE_K], l->mean, dim, key);
        if (l->positions != NULL && l->planes != 0) {
            akv_rope_walk_to(&l->walk, akv_token_position(h, l->positions, b0 + t));
            akv_rope_turn(key, dim, h->rotary_dim, (akv_rope_style)h->rope_style, l->walk.cosine, l->walk.sine, 1, h->magnitude, key);
        }
    }
    turn_over(s->keys, n, dim, s->turned_keys);
    if (l->positions == NULL && l->planes != 0) {
        float cosine[AKV_MAX_HEAD_DIM / 2], sine[AKV_MAX_HEAD_DIM / 2];
        akv_rope_phase(l->inv_freq, l->planes, akv_token_position(h, NULL, b0), l->walk.cosine, l->walk.sine);
        for (uint32_t j = 0; j < l->planes; j++) {
            cosine[j] = (float)(l->walk.cosine[j] * h->magnitude);
            sine[j] = (float)(l->walk.sine[j] * h->magnitude);
        }
        l->kernels->turn(s->turned_keys, l->planes, l->first, l->second, cosine, sine, s->turns);
    }
}

static void rebuild_values(const ladder_tiles *l, uint64_t b0, uint32_t n, akv_tile_scratch *s)
{
    const akv_ladder_view *v = &l->side[AKV_SIDE_V];
    for (uint32_t t = 0; t < n; t++) {
        const uint32_t a = akv_ladder_index(v, b0 + t);
        l->kernels->anchor_row(v->anchors + (size_t)a * v->dim, akv_ladder_weight(v, b0 + t, a), l->units[AKV_SIDE_V], NULL, v->dim,
                               s->values + (size_t)t * v->dim);
    }
}

void akv_attend_ladder_tiles(const akv_task *task, const akv_segment *segment, akv_scratch *scratch, akv_partial *out)
{
    akv_tile_scratch *s = &scratch->tile;
    ladder_tiles l;
    begin_tiles(task, segment, scratch, &l);
    const uint32_t dv = l.side[AKV_SIDE_V].dim;
    akv_load_queries(task, scratch);
    if (l.kernels->products != NULL)
        l.kernels->products->pack_queries(scratch->query, task->rows, task->params->head_dim_k, s->packed_queries, s->query_scale);
    for (uint64_t b0 = task->begin; b0 < task->end; b0 += TILE) {
        const uint32_t n = (uint32_t)(task->end - b0 < TILE ? task->end - b0 : TILE);
        const size_t place = b0 % AKV_BLOCK_TOKENS;
        if (place == 0) {
            const uint32_t m = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
            for (int i = 0; i < AKV_SIDES; i++)
                unpack_block(task, &l.side[i], scratch->lists[i], b0 / AKV_BLOCK_TOKENS, m, scratch->group, s->coded[i]);
        }
        rebuild_keys(&l, b0, n, s);
        rebuild_values(&l, b0, n, s);
        add_residuals(&l, AKV_SIDE_K, s, s->coded[0] + place * l.side[0].num_coords, s->turned_keys);
        memset(s->turned_values, 0, TILE * (size_t)dv * sizeof(float));
        add_residuals(&l, AKV_SIDE_V, s, s->coded[1] + place * l.side[1].num_coords, s->turned_values);
        akv_matrix_best()->transpose(s->turned_values, TILE, dv, TILE, s->keys, dv);
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t i = 0; i < dv; i++)
                s->values[(size_t)t * dv + i] += s->keys[(size_t)t * dv + i];
        if (l.kernels->products != NULL)
            attend_whole_tile(task, scratch, n, l.kernels->products, out);
        else
            attend_tile(task, scratch, 0, n, false, l.quads, out);
    }
}
