/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend.c - the driver of attention: check, cut into parts, run them on the executor, merge in a fixed order.
 *
 * Parts depend on shapes only, so the merge order and every bit of the result are the same for any number of threads.
 */
#include "attn/attend.h"
#include "core/ladder.h"
#include "core/maths.h"
#include "core/rope.h"
#include "core/sizes.h"
#include "core/slots.h"
#include "kernels/quad.h"

/* A part is about this many tokens, and a segment has at most MOST_PARTS: the k x d_v product that ends each part of a
 * compressed segment then stays small beside the part itself. Few heads alone would leave threads idle: three parts
 * on two threads take as long as four. */
#define PART_TOKENS 8192u
#define PART_TOKENS_FEW_HEADS 4096u
#define FEW_HEADS 4u
#define MOST_PARTS 4u

typedef struct akv_call {
    const akv_attend_params *params;
    const akv_kernels *kernels;
    uint32_t rows;       /* of this chunk */
    uint32_t row0;
    uint32_t chunk_rows; /* the most rows of any chunk */
    size_t num_parts;
    uint32_t num_slots;
    atomic_flag *slots; /* one per scratch: taken by a running task */
    akv_scratch *scratch;
    akv_partial *partials;  /* [H, parts] */
    akv_tables tables;
} akv_call;

/* Parts are equal but for whole blocks. */
uint64_t akv_part_tokens(uint64_t tokens, uint32_t heads)
{
    uint64_t parts = akv_div_up(tokens, heads < FEW_HEADS ? PART_TOKENS_FEW_HEADS : PART_TOKENS);
    parts = parts > MOST_PARTS ? MOST_PARTS : parts;
    return akv_round_up(akv_div_up(tokens, parts), AKV_BLOCK_TOKENS);
}

size_t akv_parts_of(uint64_t tokens, uint32_t heads)
{
    return tokens == 0 ? 0 : (size_t)akv_div_up(tokens, akv_part_tokens(tokens, heads));
}

static akv_status check_tensor(const akv_tensor *t, const char *name, akv_diag *diag)
{
    if (t->data == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s has no data; it must not be NULL here", name);
    if ((unsigned)t->dtype > AKV_BF16)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s has dtype %d; it must be AKV_F32, AKV_F16 or AKV_BF16", name, (int)t->dtype);
    return AKV_OK;
}

static akv_status check_segment(const akv_attend_params *p, uint32_t index, akv_diag *diag)
{
    if (p->segments == NULL || p->segments[index] == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment %u is NULL", index);
    const akv_header *h = akv_header_of(p->segments[index]);
    if (h->num_kv_heads != p->num_kv_heads || h->gqa_group != p->gqa_group || h->head_dim[0] != p->head_dim_k ||
        h->head_dim[1] != p->head_dim_v)
        return akv_fail(diag, AKV_E_MISMATCH,
                        "segment %u holds %u KV heads x group %u, head_dim %u/%u; the call has %u x %u, %u/%u", index,
                        h->num_kv_heads, h->gqa_group, h->head_dim[0], h->head_dim[1], p->num_kv_heads, p->gqa_group,
                        p->head_dim_k, p->head_dim_v);
    return AKV_OK;
}

static akv_status check_params(const akv_attend_params *p, akv_diag *diag)
{
    if (p == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "params must not be NULL");
    if (p->struct_size < sizeof *p)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_attend_params has struct_size %zu; call akv_attend_params_init first",
                        p->struct_size);
    akv_shape shape;
    akv_shape_init(&shape);
    shape.num_tokens = 1;
    shape.num_kv_heads = p->num_kv_heads;
    shape.gqa_group = p->gqa_group;
    shape.head_dim_k = p->head_dim_k;
    shape.head_dim_v = p->head_dim_v;
    AKV_TRY(akv_check_shape(&shape, diag));
    if (p->num_queries == 0 || p->num_queries > (1u << 20))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_queries is %u; it must be 1..2^20", p->num_queries);
    if (p->tail_tokens > AKV_MAX_TOKENS)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "tail_tokens is %llu; at most 2^40 are possible",
                        (unsigned long long)p->tail_tokens);
    for (uint32_t i = 0; i < p->num_segments; i++)
        AKV_TRY(check_segment(p, i, diag));
    return AKV_OK;
}

static akv_status check_shifts(const akv_attend_params *p, akv_diag *diag)
{
    for (uint32_t i = 0; p->segment_shifts != NULL && i < p->num_segments; i++) {
        if (p->segment_shifts[i] == 0)
            continue;
        const akv_header *h = akv_header_of(p->segments[i]);
        if (p->rope == NULL || (p->rope->rotary_dim != 0 && p->rope->inv_freq == NULL))
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment %u is shifted; rope must say how keys are turned", i);
        if (p->rope->rotary_dim != h->rotary_dim || (p->rope->rotary_dim != 0 && (uint32_t)p->rope->style != h->rope_style))
            return akv_fail(diag, AKV_E_MISMATCH, "segment %u turns %u coordinates in style %u; rope says %u in style %d", i,
                            h->rotary_dim, h->rope_style, p->rope->rotary_dim, (int)p->rope->style);
    }
    return AKV_OK;
}

static akv_status check_data(const akv_attend_params *p, akv_diag *diag)
{
    AKV_TRY(check_shifts(p, diag));
    if (p->out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    if (!isfinite(p->sm_scale) || !(p->logit_softcap >= 0) || !isfinite(p->logit_softcap))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sm_scale is %g and logit_softcap %g; both must be finite, the cap >= 0",
                        p->sm_scale, p->logit_softcap);
    AKV_TRY(check_tensor(&p->queries, "queries", diag));
    if (p->tail_tokens > 0) {
        AKV_TRY(check_tensor(&p->tail_keys, "tail_keys", diag));
        AKV_TRY(check_tensor(&p->tail_values, "tail_values", diag));
        if (p->tail_mask.data != NULL)
            AKV_TRY(check_tensor(&p->tail_mask, "tail_mask", diag));
    }
    return AKV_OK;
}

static bool has_gaps(const akv_header *h)
{
    return h->sections[AKV_SEC_POSITIONS].offset != 0;
}

/* The first segment that turns as segment i does, both for the kernels of quad.h: its tables serve. */
static uint32_t same_turn(const akv_attend_params *p, uint32_t i)
{
    const akv_header *h = akv_header_of(p->segments[i]);
    const double *inv_freq = akv_section_of(p->segments[i], AKV_SEC_INV_FREQ);
    for (uint32_t j = 0; j < i; j++) {
        const akv_header *other = akv_header_of(p->segments[j]);
        if (akv_quad_fits(p->segments[j]) && other->rotary_dim == h->rotary_dim && has_gaps(other) == has_gaps(h) &&
            memcmp(akv_section_of(p->segments[j], AKV_SEC_INV_FREQ), inv_freq, h->rotary_dim / 2 * sizeof *inv_freq) == 0)
            return j;
    }
    return i;
}

/* Carve the workspace (or count it when arena->base is NULL). */
static void carve(akv_call *c, akv_arena *arena)
{
    const akv_attend_params *p = c->params;
    uint64_t rows = (uint64_t)p->gqa_group * p->num_queries;
    const bool tiles = rows > AKV_TILE_ROWS;
    const uint32_t most_rows = tiles ? AKV_TILE_MOST_ROWS : AKV_ATTEND_ROWS;
    c->chunk_rows = rows < most_rows ? (uint32_t)rows : most_rows;
    c->num_parts = akv_parts_of(p->tail_tokens, p->num_kv_heads);
    uint32_t most_anchors = 0, most_planes = 0, most_levels = 0;
    uint64_t table_floats = 0;
    akv_quad_sizes quad = {0};
    quad.dim = (uint32_t)akv_round_up(p->head_dim_k > p->head_dim_v ? p->head_dim_k : p->head_dim_v, 4);
    for (uint32_t i = 0; i < p->num_segments; i++) {
        const akv_header *h = akv_header_of(p->segments[i]);
        c->num_parts += akv_parts_of(h->num_tokens, p->num_kv_heads);
        if (h->kind != AKV_SEGMENT_COMPRESSED)
            continue;
        if (akv_quad_fits(p->segments[i])) {
            const akv_quad_shape shape = akv_quad_shape_of(h->head_dim[0], h->rotary_dim, (akv_rope_style)h->rope_style);
            quad.padded_planes = shape.padded_planes > quad.padded_planes ? shape.padded_planes : quad.padded_planes;
            if (has_gaps(h))
                quad.gap_planes = shape.padded_planes > quad.gap_planes ? shape.padded_planes : quad.gap_planes;
            quad.padded_rest = shape.padded_rest > quad.padded_rest ? shape.padded_rest : quad.padded_rest;
            quad.anchors = h->num_anchors > quad.anchors ? h->num_anchors : quad.anchors;
            quad.levels = h->num_levels > quad.levels ? h->num_levels : quad.levels;
            if (akv_slow_window(p->segments[i]) != 0)
                quad.slow_anchors = h->num_anchors > quad.slow_anchors ? h->num_anchors : quad.slow_anchors;
        }
        uint32_t planes = h->rotary_dim / 2;
        most_anchors = h->num_anchors > most_anchors ? h->num_anchors : most_anchors;
        most_planes = planes > most_planes ? planes : most_planes;
        most_levels = h->num_levels > most_levels ? h->num_levels : most_levels;
        table_floats += (uint64_t)planes * AKV_TURN_SPAN * 2;
    }
    uint64_t tasks = (uint64_t)p->num_kv_heads * c->num_parts;
    c->num_slots = akv_num_slots(p->executor, tasks);

    bool ladder = false;
    for (uint32_t i = 0; i < p->num_segments; i++)
        ladder |= akv_header_of(p->segments[i])->coding == AKV_CODING_LADDER && akv_header_of(p->segments[i])->kind == AKV_SEGMENT_COMPRESSED;
    uint64_t r = c->chunk_rows, few = r < AKV_ATTEND_ROWS ? r : AKV_ATTEND_ROWS, dk = p->head_dim_k, dv = p->head_dim_v, dim = dk > dv ? dk : dv;
    c->slots = AKV_TAKE(arena, atomic_flag, c->num_slots);
    c->scratch = AKV_TAKE(arena, akv_scratch, c->num_slots);
    c->partials = AKV_TAKE(arena, akv_partial, tasks);
    c->tables.table = AKV_TAKE(arena, akv_turn_table, p->num_segments);
    c->tables.floats = AKV_TAKE(arena, float, table_floats);
    c->tables.plain = AKV_TAKE(arena, float *, p->num_segments);
    c->tables.room = AKV_TAKE(arena, akv_quad_table_room, p->num_segments);
    for (uint32_t i = 0; i < p->num_segments; i++) {
        const akv_header *h = akv_header_of(p->segments[i]);
        if (!akv_quad_fits(p->segments[i]))
            continue;
        const uint64_t PP = akv_quad_shape_of(h->head_dim[0], h->rotary_dim, (akv_rope_style)h->rope_style).padded_planes;
        akv_quad_table_room room;
        room.from = same_turn(p, i);
        const bool own = room.from == i;
        room.turn16 = AKV_TAKE(arena, int16_t, own ? AKV_QUAD_TILE * 2 * PP : 0);
        room.mean = AKV_TAKE(arena, float, own ? 64 * PP : 0);
        room.moments = AKV_TAKE(arena, float, own ? 6 * PP : 0);
        room.fast = 0;
        room.middle = AKV_TAKE(arena, float, own ? 2 * PP : 0);
        room.step = AKV_TAKE(arena, double, own ? 2 * PP : 0);
        room.begin = AKV_TAKE(arena, double, has_gaps(h) ? 0 : 2 * PP * akv_parts_of(h->num_tokens, p->num_kv_heads));
        room.turns = AKV_TAKE(arena, double, own && has_gaps(h) ? 32 * PP : 0);
        if (!has_gaps(h))
            room.turns = NULL;
        room.window = akv_slow_window(p->segments[i]);
        room.slow = AKV_TAKE(arena, float, akv_slow_floats(p->segments[i], room.window, p->num_kv_heads));
        room.lower_step = AKV_TAKE(arena, double, room.window != 0 ? 2 * AKV_QUAD_SLOW_PLANES : 0);
        room.upper_turns = false;
        if (arena->base != NULL)
            c->tables.room[i] = room;
    }
    for (uint32_t i = 0; i < c->num_slots; i++) {
        akv_scratch s;
        s.query = AKV_TAKE(arena, float, r * dk);
        s.turned = AKV_TAKE(arena, float, few * dk);
        s.rotated = AKV_TAKE(arena, float, few * dk);
        s.logits = AKV_TAKE(arena, float, few * AKV_BLOCK_TOKENS);
        s.hist = AKV_TAKE(arena, float, few * most_anchors);
        s.coded = AKV_TAKE(arena, float, few * dv);
        s.group = AKV_TAKE(arena, float, dim * AKV_GROUP_LANES);
        s.vector = AKV_TAKE(arena, float, dim);
        s.phase = AKV_TAKE(arena, double, (uint64_t)most_planes * 4);
        s.mean = AKV_TAKE(arena, float, dk);
        for (int side = 0; side < AKV_SIDES; side++) {
            s.levels[side] = AKV_TAKE(arena, float, most_levels * few * (side == AKV_SIDE_K ? dk : dv));
            s.lists[side] = AKV_TAKE(arena, akv_level_list, most_levels);
        }
        if (quad.levels != 0)
            akv_quad_take(arena, &quad, &s.quad);
        s.quad.dim = quad.dim;
        memset(&s.tile, 0, sizeof s.tile);
        if (tiles)
            akv_tiles_take(arena, c->chunk_rows, p->head_dim_k, p->head_dim_v, ladder && r > AKV_TILE_LADDER_ROWS, &s.tile);
        if (arena->base != NULL) {
            c->scratch[i] = s;
            atomic_flag_clear(&c->slots[i]);
        }
    }
    float *max = AKV_TAKE(arena, float, tasks * r);
    float *sum = AKV_TAKE(arena, float, tasks * r);
    float *acc = AKV_TAKE(arena, float, tasks * r * dv);
    if (arena->base != NULL)
        for (uint64_t t = 0; t < tasks; t++) {
            akv_partial partial = {max + t * r, sum + t * r, acc + t * r * dv};
            c->partials[t] = partial;
        }
}

static void run_task(void *opaque, size_t index)
{
    akv_call *c = opaque;
    const akv_attend_params *p = c->params;
    akv_partial *out = &c->partials[index];
    akv_task task = {p, c->kernels, (uint32_t)(index / c->num_parts), c->row0, c->rows, 0, 0, 0, 0, &c->tables};
    size_t part = index % c->num_parts;
    uint32_t slot = akv_claim_slot(c->slots, c->num_slots);
    akv_scratch *scratch = &c->scratch[slot];

    for (uint32_t r = 0; r < c->rows; r++) {
        out->max[r] = -INFINITY;
        out->sum[r] = 0.0f;
    }
    memset(out->acc, 0, (size_t)c->rows * p->head_dim_v * sizeof(float));

    uint64_t tokens = p->tail_tokens;
    uint32_t i = 0;
    for (; i < p->num_segments; i++) {
        size_t parts = akv_parts_of(akv_header_of(p->segments[i])->num_tokens, p->num_kv_heads);
        if (part < parts) {
            tokens = akv_header_of(p->segments[i])->num_tokens;
            break;
        }
        part -= parts;
    }
    uint64_t size = akv_part_tokens(tokens, p->num_kv_heads);
    task.part = part;
    task.begin = part * size;
    task.end = tokens - task.begin < size ? tokens : task.begin + size;
    const akv_segment *segment = i == p->num_segments ? NULL : p->segments[i];
    const akv_header *h = segment == NULL ? NULL : akv_header_of(segment);
    task.shift = segment == NULL || p->segment_shifts == NULL ? 0 : p->segment_shifts[i];
    if (h == NULL || h->kind != AKV_SEGMENT_COMPRESSED) {
        akv_tensor k = p->tail_keys, v = p->tail_values;
        if (h != NULL) {
            k = akv_tensor_contiguous(akv_section_of(segment, AKV_SEC_DENSE), (akv_dtype)h->dense_dtype, tokens, p->head_dim_k);
            v = akv_tensor_contiguous(akv_section_of(segment, AKV_SEC_DENSE + 1), (akv_dtype)h->dense_dtype, tokens, p->head_dim_v);
        }
        if (c->rows > AKV_TILE_ROWS)
            akv_attend_dense_tiles(&task, &k, &v, h == NULL, scratch, out);
        else
            akv_attend_dense(&task, &k, &v, h == NULL, scratch, out);
    } else if (h->coding == AKV_CODING_LADDER && c->rows > AKV_TILE_LADDER_ROWS) {
        akv_attend_ladder_tiles(&task, segment, scratch, out);
    } else {
        akv_tables_help(task.tables);
        if (!akv_quad_fits(segment))
            akv_tables_wait(task.tables);
        const akv_turn_table *table = &c->tables.table[i];
        for (uint32_t r = 0; r < c->rows; r += AKV_ATTEND_ROWS) {
            akv_task some = task;
            akv_partial at = {out->max + r, out->sum + r, out->acc + (size_t)r * p->head_dim_v};
            some.row0 += r;
            some.rows = c->rows - r < AKV_ATTEND_ROWS ? c->rows - r : AKV_ATTEND_ROWS;
            if (akv_quad_fits(segment))
                akv_attend_ladder_quads(&some, segment, table, scratch, &at);
            else if (h->coding == AKV_CODING_LADDER)
                akv_attend_ladder(&some, segment, table, scratch, &at);
            else
                akv_attend_compressed(&some, segment, table, scratch, &at);
        }
    }
    akv_return_slot(c->slots, slot);
}

/* Merge the parts of every row in order, add the sink, normalise, write out. */
static void merge_rows(const akv_call *c)
{
    const akv_attend_params *p = c->params;
    const uint32_t dv = p->head_dim_v, T = p->num_queries;
    for (uint32_t head = 0; head < p->num_kv_heads; head++)
        for (uint32_t r = 0; r < c->rows; r++) {
            uint32_t row = c->row0 + r, q = head * p->gqa_group + row / T, t = row % T;
            float *out = p->out + (int64_t)q * p->out_stride_head + (int64_t)t * p->out_stride_token;
            const akv_partial *partial = c->partials + (size_t)head * c->num_parts;
            float max = p->sinks != NULL ? p->sinks[q] : -INFINITY, sum = 0.0f;
            bool nan = false;
            for (size_t i = 0; i < c->num_parts; i++) {
                max = partial[i].max[r] > max ? partial[i].max[r] : max;
                nan |= partial[i].sum[r] != partial[i].sum[r];
            }
            for (uint32_t d = 0; d < dv; d++)
                out[d] = 0.0f;
            if (max != -INFINITY || nan) {
                if (p->sinks != NULL)
                    sum += akv_expf(p->sinks[q] - max);
                for (size_t i = 0; i < c->num_parts; i++) {
                    if (partial[i].max[r] == -INFINITY && partial[i].sum[r] == 0.0f)
                        continue;
                    float w = nan ? NAN : akv_expf(partial[i].max[r] - max);
                    sum += w * partial[i].sum[r];
                    akv_axpy_f32(w, partial[i].acc + (size_t)r * dv, out, dv);
                }
                float inverse = 1.0f / sum;
                for (uint32_t d = 0; d < dv; d++)
                    out[d] *= inverse;
            }
            if (p->state_max != NULL)
                p->state_max[(size_t)q * T + t] = max;
            if (p->state_sum != NULL)
                p->state_sum[(size_t)q * T + t] = sum;
        }
}

akv_status akv_attend_workspace_bytes(const akv_attend_params *params, size_t *bytes, akv_diag *diag)
{
    if (bytes == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "bytes must not be NULL");
    AKV_TRY(check_params(params, diag));
    akv_call call;
    memset(&call, 0, sizeof call);
    call.params = params;
    akv_arena arena = {NULL, 0, false};
    carve(&call, &arena);
    if (arena.overflow)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the workspace of this shape does not fit into memory");
    *bytes = arena.used;
    return AKV_OK;
}

akv_status akv_attend(const akv_attend_params *params, void *workspace, size_t workspace_bytes, akv_diag *diag)
{
    size_t need = 0;
    AKV_TRY(akv_attend_workspace_bytes(params, &need, diag));
    AKV_TRY(check_data(params, diag));
    if (workspace == NULL || (uintptr_t)workspace % AKV_ALIGN != 0)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the workspace must be a 64-byte aligned buffer");
    if (workspace_bytes < need)
        return akv_fail(diag, AKV_E_NO_SPACE, "the workspace has %zu bytes; this call needs %zu (akv_attend_workspace_bytes)",
                        workspace_bytes, need);
    akv_call call;
    memset(&call, 0, sizeof call);
    call.params = params;
    call.kernels = akv_kernels_best();
    akv_arena arena = {workspace, 0, false};
    carve(&call, &arena);
    akv_tables_begin(&call.tables, params);

    uint64_t rows = (uint64_t)params->gqa_group * params->num_queries;
    for (uint64_t row0 = 0; row0 < rows; row0 += call.chunk_rows) {
        call.row0 = (uint32_t)row0;
        call.rows = rows - row0 < call.chunk_rows ? (uint32_t)(rows - row0) : call.chunk_rows;
        if (call.num_parts > 0)
            akv_parallel_for(params->executor, run_task, &call, params->num_kv_heads * call.num_parts);
        merge_rows(&call);
    }
    return AKV_OK;
}
