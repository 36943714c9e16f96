/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiles.c - attention for many query rows at once (a question over a document, a batch of prompt tokens): 64 tokens are brought
 * to f32 keys and values once and used for all rows, as two small matrix products. Taken when a KV head has enough rows
 * (AKV_TILE_ROWS, AKV_TILE_LADDER_ROWS); below that, rebuilding costs more than it saves.
 *
 * LADDER: the residuals of a block are laid out tile by tile as [coordinates][64 tokens], so that a tile's are one product of the
 * basis with them. The other way round, tokens times basis, streams the basis from the second-level cache for every six
 * tokens: twice the time.
 */
#include "attn/attend.h"
#include "core/ladder.h"
#include "core/rope.h"
#include "kernels/quad.h"

#define TILE AKV_QUAD_TILE

void akv_tiles_take(akv_arena *arena, uint32_t rows, uint32_t dk, uint32_t dv, bool ladder, akv_tile_scratch *s)
{
    s->keys = AKV_TAKE(arena, float, TILE * (uint64_t)dk);
    s->turned_keys = AKV_TAKE(arena, float, TILE * (uint64_t)dk);
    s->values = AKV_TAKE(arena, float, TILE * (uint64_t)dv);
    s->logits = AKV_TAKE(arena, float, TILE * (uint64_t)rows);
    s->shrink = AKV_TAKE(arena, float, rows);
    s->residual = AKV_TAKE(arena, float, ladder ? TILE * (uint64_t)(dk > dv ? dk : dv) : 0);
    s->turned_values = AKV_TAKE(arena, float, ladder ? TILE * (uint64_t)dv : 0);
    s->phase = AKV_TAKE(arena, double, 4 * (uint64_t)(dk / 2));
    for (int side = 0; side < AKV_SIDES; side++) {
        const uint64_t dim = side == AKV_SIDE_K ? dk : dv;
        s->coded[side] = AKV_TAKE(arena, float, ladder ? AKV_BLOCK_TOKENS * dim : 0);
        s->basis[side] = AKV_TAKE(arena, float, ladder ? dim * dim : 0);
    }
}

/* [64][dim], tokens from n on 0, -> [dim][64]. */
static void turn_over(const float *x, uint32_t n, uint32_t dim, float *out)
{
    if (n < TILE)
        memset(out, 0, TILE * (size_t)dim * sizeof *out);
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t t = 0; t < n; t++)
            out[(size_t)i * TILE + t] = x[(size_t)t * dim + i];
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

/*
 * Residuals of a tile, from its coded ones z [coords][64], added to out [dim][64]. room: [basis_dim][64]. coords: the order of the
 * basis, or NULL where it is the vector's own.
 */
static void add_residuals(const akv_quad_kernels *quads, const akv_ladder_view *v, const uint16_t *coords, const float *basis,
                          const float *z, float *room, float *out)
{
    quads->tile_dots(basis, v->basis_dim, v->basis_cols, z, room);
    for (uint32_t i = 0; i < v->dim; i++) {
        const uint32_t c = v->basis_cols + i - v->basis_dim; /* of a coordinate without a basis */
        const float *from = i < v->basis_dim ? room + (size_t)i * TILE : z + (size_t)c * TILE;
        const float scale = i < v->basis_dim ? 1.0f : akv_bf16_to_f32(v->sigmas[c]);
        float *to = out + (size_t)(coords != NULL ? coords[i] : i) * TILE;
        for (uint32_t t = 0; t < TILE; t++)
            to[t] += scale * from[t];
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
            for (uint32_t i = 0; i < g; i++) {
                const float gain = akv_gain_value((run[(at + i) / 2] >> ((at + i) % 2 * 4)) & 15u);
                const uint32_t token = tokens[first[l + 1] + at + i];
                float *z = out + (size_t)(token / TILE) * TILE * v->num_coords + token % TILE;
                for (uint32_t c = 0; c < list->count; c++)
                    z[(size_t)list->coord[c] * TILE] = gain * group[c * AKV_GROUP_LANES + i];
            }
        }
        run += akv_run_bytes(count, list->bits);
    }
}

void akv_attend_ladder_tiles(const akv_task *task, const akv_segment *segment, akv_scratch *scratch, akv_partial *out)
{
    const akv_header *h = akv_header_of(segment);
    const uint32_t dk = h->head_dim[AKV_SIDE_K], dv = h->head_dim[AKV_SIDE_V], planes = h->rotary_dim / 2;
    const akv_quad_kernels *quads = akv_quad_best();
    const int32_t *positions = h->sections[AKV_SEC_POSITIONS].offset ? akv_section_of(segment, AKV_SEC_POSITIONS) : NULL;
    const uint16_t *mean16 = (const uint16_t *)akv_section_of(segment, AKV_SEC_MEAN) + (size_t)task->kv_head * dk;
    akv_tile_scratch *s = &scratch->tile;
    akv_rope_walk walk = akv_rope_walk_begin(akv_section_of(segment, AKV_SEC_INV_FREQ), planes, s->phase);
    akv_ladder_view side[AKV_SIDES];
    float units[AKV_SIDES][AKV_MAX_HEAD_DIM], mean[AKV_MAX_HEAD_DIM];

    akv_load_queries(task, scratch);
    for (int i = 0; i < AKV_SIDES; i++) {
        side[i] = akv_view_ladder(segment, i, task->kv_head);
        unfold_basis(&side[i], s->basis[i]);
        for (uint32_t l = 0; l < h->num_levels; l++)
            akv_ladder_list(&side[i], l + 1, &scratch->lists[i][l]);
        for (uint32_t c = 0; c < side[i].dim; c++)
            units[i][c] = akv_bf16_to_f32(side[i].units[c]);
    }
    for (uint32_t i = 0; i < dk; i++)
        mean[i] = akv_bf16_to_f32(mean16[i]);

    for (uint64_t b0 = task->begin; b0 < task->end; b0 += TILE) {
        const uint32_t n = (uint32_t)(task->end - b0 < TILE ? task->end - b0 : TILE);
        const uint64_t block = b0 / AKV_BLOCK_TOKENS;
        if (b0 % AKV_BLOCK_TOKENS == 0) {
            const uint32_t m = (uint32_t)(task->end - b0 < AKV_BLOCK_TOKENS ? task->end - b0 : AKV_BLOCK_TOKENS);
            for (int i = 0; i < AKV_SIDES; i++)
                unpack_block(task, &side[i], scratch->lists[i], block, m, scratch->group, s->coded[i]);
        }
        for (uint32_t t = 0; t < n; t++) {
            const uint32_t a = akv_ladder_index(&side[0], b0 + t), b = akv_ladder_index(&side[1], b0 + t);
            const float wk = akv_ladder_weight(&side[0], b0 + t, a), wv = akv_ladder_weight(&side[1], b0 + t, b);
            const int8_t *ka = side[0].anchors + (size_t)a * dk, *va = side[1].anchors + (size_t)b * dv;
            float *key = s->keys + (size_t)t * dk, *value = s->values + (size_t)t * dv;
            for (uint32_t i = 0; i < dk; i++)
                key[i] = mean[i] + wk * units[0][i] * (float)ka[i];
            for (uint32_t i = 0; i < dv; i++)
                value[i] = wv * units[1][i] * (float)va[i];
            if (planes != 0) {
                akv_rope_walk_to(&walk, akv_token_position(h, positions, b0 + t));
                akv_rope_turn(key, dk, h->rotary_dim, (akv_rope_style)h->rope_style, walk.cosine, walk.sine, 1, h->magnitude, key);
            }
        }
        const size_t place = b0 % AKV_BLOCK_TOKENS;
        turn_over(s->keys, n, dk, s->turned_keys);
        add_residuals(quads, &side[0], akv_section_of(segment, AKV_SEC_COORDS), s->basis[0], s->coded[0] + place * side[0].num_coords,
                      s->residual, s->turned_keys);
        memset(s->turned_values, 0, TILE * (size_t)dv * sizeof(float));
        add_residuals(quads, &side[1], NULL, s->basis[1], s->coded[1] + place * side[1].num_coords, s->residual, s->turned_values);
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t i = 0; i < dv; i++)
                s->values[(size_t)t * dv + i] += s->turned_values[(size_t)i * TILE + t];
        attend_tile(task, scratch, 0, n, false, quads, out);
    }
}
