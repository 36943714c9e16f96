/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewrite.c - a LADDER segment written again from its own bytes: lower levels, or only its first tokens. See ladder.h.
 */
#include "codec/ladder.h"
#include "core/slots.h"

/* Scratch of one running task. */
typedef struct rewrite_scratch {
    akv_level_list lists[AKV_MAX_LEVELS];
    float x[AKV_MAX_HEAD_DIM];     /* one residual in units of sigma, by coordinate */
    float below[AKV_MAX_HEAD_DIM]; /* the same in the order of the new level's list */
    float sigma_sq[AKV_MAX_HEAD_DIM];
} rewrite_scratch;

typedef struct rewrite_call {
    akv_rewrite *rewrite;
    akv_segment writing; /* its blob is the result's */
    uint8_t *blob;
    const uint16_t *renumber[AKV_SIDES]; /* [H, k] new number of each anchor, or NULL: all stay */
    uint32_t num_slots;
    atomic_flag *slots;
    rewrite_scratch *scratch;
    double *sums; /* [tasks][2] energy, lost */
} rewrite_call;

/* Where the residuals of one (head, block, side) lie. */
typedef struct akv_runs {
    const uint8_t *run[AKV_MAX_LEVELS + 1];
    uint32_t count[AKV_MAX_LEVELS + 1];
    uint8_t level[AKV_BLOCK_TOKENS];
    uint16_t place[AKV_BLOCK_TOKENS]; /* of each token within its run */
    uint16_t tokens[AKV_BLOCK_TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 2];
} akv_runs;

static void find_runs(const akv_ladder_view *v, const akv_level_list *lists, uint64_t block, uint32_t n, akv_runs *r)
{
    const uint8_t *at = v->codes + v->offsets[block * 2];
    akv_ladder_sort(v, block, n, r->tokens, r->first);
    for (uint32_t l = 0; l <= v->num_levels; l++) {
        r->count[l] = r->first[l + 1] - r->first[l];
        r->run[l] = at;
        for (uint32_t i = 0; i < r->count[l]; i++) {
            r->level[r->tokens[r->first[l] + i]] = (uint8_t)l;
            r->place[r->tokens[r->first[l] + i]] = (uint16_t)i;
        }
        if (l > 0 && r->count[l] > 0)
            at += akv_run_bytes(r->count[l], lists[l - 1].bits);
    }
}

/* Residual `place` of a run of count: where its group begins, and how large that is. */
static uint64_t group_of(uint32_t place, uint32_t count, uint32_t bits, uint32_t *g)
{
    const uint32_t at = place / AKV_GROUP_LANES * AKV_GROUP_LANES;
    *g = count - at < AKV_GROUP_LANES ? count - at : AKV_GROUP_LANES;
    return (count + 1) / 2 + (uint64_t)(place / AKV_GROUP_LANES) * 2 * bits;
}

static uint32_t number_at(const uint8_t *group, uint64_t bit, uint32_t width)
{
    uint32_t number = group[bit >> 3] >> (bit & 7);
    if ((bit & 7) + width > 8)
        number |= (uint32_t)group[(bit >> 3) + 1] << (8 - (bit & 7));
    return number & ((1u << width) - 1u);
}

static uint32_t gain_at(const uint8_t *run, uint32_t place)
{
    return (run[place / 2] >> (place % 2 * 4)) & 15u;
}

/* One vector at a time: what falls a level is little beside a compression, so this does without the coder's kernels. */

/* Number of the nearest level of an n-bit Lloyd-Max quantiser, ascending, and the level itself. */
static uint32_t quantise(float x, uint32_t width, float *level)
{
    const uint32_t half = width == 2 ? 2 : 8;
    const float m = fabsf(x);
    uint32_t i = 0;
    if (width == 1) {
        *level = akv_level_value(x < 0.0f ? 0 : 1, 1);
        return x < 0.0f ? 0 : 1;
    }
    while (i + 1 < half && m >= 0.5f * (akv_level_value(half + i, width) + akv_level_value(half + i + 1, width)))
        i++;
    const uint32_t number = x < 0.0f ? half - 1 - i : half + i;
    *level = akv_level_value(number, width);
    return number;
}

/*
 * Squared error of the vector x [count] (in units of sigma) coded with a gain; *best = the gain that fits its codes
 * best.
 */
static double coded_error(const float *x, const float *sigma_sq, const akv_level_list *list, double gain, double *best)
{
    double xc = 0.0, cc = 0.0, xx = 0.0;
    const float inverse = (float)(1.0 / gain);
    for (uint32_t i = 0; i < list->count; i++) {
        float level;
        quantise(x[i] * inverse, list->width[i], &level);
        xx += (double)x[i] * x[i] * sigma_sq[i];
        xc += (double)x[i] * level * sigma_sq[i];
        cc += (double)level * level * sigma_sq[i];
    }
    *best = cc > 0.0 ? xc / cc : 1.0;
    return xx - gain * (2.0 * xc - gain * cc);
}

static uint32_t nearest_gain(double gain)
{
    double code = rint(3.0 * akv_log2(gain > 1e-9 ? gain : 1e-9)) + 8.0;
    return code < 0.0 ? 0 : code > AKV_GAIN_CODES - 1 ? AKV_GAIN_CODES - 1 : (uint32_t)code;
}

/*
 * The one nearest to the best gain of the codes that the root mean square gives, or a neighbour if that codes the
 * vector better. Without the neighbours alternating between codes and gains stops beside the best of the grid (0.4 to 4
 * % more squared error).
 */
static uint32_t gain_of(const float *x, const float *sigma_sq, const akv_level_list *list)
{
    double square = 0.0, gain, least;
    for (uint32_t i = 0; i < list->count; i++)
        square += (double)x[i] * x[i];
    coded_error(x, sigma_sq, list, akv_gain_value(nearest_gain(list->count > 0 ? sqrt(square / list->count) : 1.0)),
                &gain);
    const uint32_t middle = nearest_gain(gain);
    uint32_t code = middle;
    least = coded_error(x, sigma_sq, list, akv_gain_value(middle), &gain);
    for (int step = -1; step <= 1; step += 2)
        for (uint32_t next = middle + (uint32_t)step; next < AKV_GAIN_CODES; next += (uint32_t)step) {
            double error = coded_error(x, sigma_sq, list, akv_gain_value(next), &gain);
            if (!(error < least))
                break;
            least = error;
            code = next;
        }
    return code;
}

/* Decode one residual into s->x, by coordinate; returns its energy. */
static double read_residual(const uint8_t *run, uint32_t place, uint32_t count, const akv_level_list *list,
                            rewrite_scratch *s)
{
    uint32_t g;
    const uint8_t *group = run + group_of(place, count, list->bits, &g);
    const float gain = akv_gain_value(gain_at(run, place));
    uint64_t bit = 0;
    double energy = 0.0;
    for (uint32_t i = 0; i < list->count; i++) {
        const uint32_t c = list->coord[i], width = list->width[i];
        s->x[c] =
            gain * akv_level_value(number_at(group, bit + (uint64_t)(place % AKV_GROUP_LANES) * width, width), width);
        energy += (double)s->x[c] * s->x[c] * s->sigma_sq[c];
        bit += (uint64_t)g * list->width[i];
    }
    return energy;
}

/* Code s->x at a lower level; returns the energy of what changes. */
static double recode(uint8_t *run, uint32_t place, uint32_t count, const akv_level_list *list, double energy,
                     rewrite_scratch *s)
{
    float sigma_sq[AKV_MAX_HEAD_DIM];
    uint32_t g;
    uint8_t *group = run + group_of(place, count, list->bits, &g);
    for (uint32_t i = 0; i < list->count; i++) {
        s->below[i] = s->x[list->coord[i]];
        sigma_sq[i] = s->sigma_sq[list->coord[i]];
    }
    const uint32_t code = gain_of(s->below, sigma_sq, list);
    const float gain = akv_gain_value(code), inverse = 1.0f / gain;
    run[place / 2] |= (uint8_t)(code << (place % 2 * 4));
    uint64_t bit = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        float level;
        const uint32_t number = quantise(s->below[i] * inverse, list->width[i], &level);
        const double off = (double)s->below[i] - gain * level;
        akv_put_bits(group, bit + (uint64_t)(place % AKV_GROUP_LANES) * list->width[i], number);
        energy += (off * off - (double)s->below[i] * s->below[i]) * sigma_sq[i];
        bit += (uint64_t)g * list->width[i];
    }
    return energy;
}

/* The same level: the same numbers, at another place perhaps. */
static void copy_residual(const uint8_t *from, uint32_t old_place, uint32_t old_count, uint8_t *to, uint32_t place,
                          uint32_t count, const akv_level_list *list)
{
    uint32_t old_g, g;
    const uint8_t *old_group = from + group_of(old_place, old_count, list->bits, &old_g);
    uint8_t *group = to + group_of(place, count, list->bits, &g);
    to[place / 2] |= (uint8_t)(gain_at(from, old_place) << (place % 2 * 4));
    uint64_t old_bit = 0, bit = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const uint32_t width = list->width[i];
        akv_put_bits(group, bit + (uint64_t)(place % AKV_GROUP_LANES) * width,
                 number_at(old_group, old_bit + (uint64_t)(old_place % AKV_GROUP_LANES) * width, width));
        old_bit += (uint64_t)old_g * width;
        bit += (uint64_t)g * width;
    }
}

/* Task = (head * blocks + block) * 2 + side. */
static void rewrite_task(void *opaque, size_t task)
{
    rewrite_call *c = opaque;
    akv_rewrite *w = c->rewrite;
    const akv_header *old = akv_header_of(w->from);
    const uint64_t S = w->header.num_tokens, blocks = akv_div_up(S, AKV_BLOCK_TOKENS), block = task / 2 % blocks;
    const uint64_t t0 = block * AKV_BLOCK_TOKENS;
    const uint32_t head = (uint32_t)(task / 2 / blocks);
    const int side = (int)(task % 2);
    const uint32_t n_old =
        (uint32_t)(old->num_tokens - t0 < AKV_BLOCK_TOKENS ? old->num_tokens - t0 : AKV_BLOCK_TOKENS);
    const uint32_t n = (uint32_t)(S - t0 < AKV_BLOCK_TOKENS ? S - t0 : AKV_BLOCK_TOKENS);
    const uint32_t slot = akv_claim_slot(c->slots, c->num_slots);
    rewrite_scratch *s = &c->scratch[slot];
    const akv_ladder_view from = akv_view_ladder(w->from, side, head), to = akv_view_ladder(&c->writing, side, head);
    akv_runs before, after;
    double energy = 0.0, lost = 0.0;

    for (uint32_t l = 0; l < from.num_levels; l++)
        akv_ladder_list(&from, l + 1, &s->lists[l]);
    for (uint32_t i = 0; i < from.num_coords; i++)
        s->sigma_sq[i] = akv_bf16_to_f32(from.sigmas[i]) * akv_bf16_to_f32(from.sigmas[i]);
    find_runs(&from, s->lists, block, n_old, &before);
    find_runs(&to, s->lists, block, n, &after);
    for (uint32_t t = 0; t < n; t++) {
        const uint32_t l = before.level[t], m = after.level[t];
        if (l == 0)
            continue;
        memset(s->x, 0, from.num_coords * sizeof *s->x);
        const double stored = read_residual(before.run[l], before.place[t], before.count[l], &s->lists[l - 1], s);
        energy += stored;
        uint8_t *run = c->blob + (after.run[m] - c->blob);
        if (m == l)
            copy_residual(before.run[l], before.place[t], before.count[l], run, after.place[t], after.count[m],
                          &s->lists[l - 1]);
        else
            lost += m == 0 ? stored : recode(run, after.place[t], after.count[m], &s->lists[m - 1], stored, s);
    }
    c->sums[task * 2] = energy;
    c->sums[task * 2 + 1] = lost;
    akv_return_slot(c->slots, slot);
}

void akv_ladder_levels(const akv_segment *segment, int side, uint32_t head, uint64_t tokens, uint8_t *out)
{
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    for (uint64_t t = 0; t < tokens; t++) {
        out[t] = 0;
        for (uint32_t p = 0; p < v.planes; p++)
            out[t] |= (uint8_t)(((v.levels[p * v.plane_bytes + t / 8] >> (t % 8)) & 1u) << p);
    }
}

void akv_ladder_bits(const akv_segment *segment, int side, uint32_t head, uint32_t *bits)
{
    const akv_ladder_view v = akv_view_ladder(segment, side, head);
    akv_level_list list;
    for (uint32_t l = 0; l < v.num_levels; l++) {
        akv_ladder_list(&v, l + 1, &list);
        bits[l] = list.bits;
    }
}

/* Bytes of the codes of tokens [t0, end) of one head and side. */
static uint64_t run_bytes(const uint8_t *level, uint64_t t0, uint64_t end, const uint32_t *bits, uint32_t levels)
{
    uint64_t count[AKV_MAX_LEVELS + 1] = {0}, bytes = 0;
    for (uint64_t t = t0; t < end; t++)
        count[level[t]]++;
    for (uint32_t l = 1; l <= levels; l++)
        if (count[l] > 0)
            bytes += akv_run_bytes(count[l], bits[l - 1]);
    return bytes;
}

/* Walks over (head, block, side) in the order of CODES; fills offsets unless they are NULL. */
static uint64_t place_codes(const akv_segment *segment, uint64_t S, uint8_t *const level[AKV_SIDES], uint64_t *offsets)
{
    const akv_header *h = akv_header_of(segment);
    uint64_t at = 0;
    for (uint32_t head = 0; head < h->num_kv_heads; head++) {
        uint32_t bits[AKV_SIDES][AKV_MAX_LEVELS];
        for (int side = 0; side < AKV_SIDES; side++)
            akv_ladder_bits(segment, side, head, bits[side]);
        for (uint64_t t0 = 0; t0 < S; t0 += AKV_BLOCK_TOKENS)
            for (int side = 0; side < AKV_SIDES; side++) {
                const uint64_t end = S - t0 < AKV_BLOCK_TOKENS ? S : t0 + AKV_BLOCK_TOKENS;
                if (offsets != NULL)
                    *offsets++ = at;
                at += run_bytes(level[side] + head * S, t0, end, bits[side], h->num_levels);
            }
    }
    if (offsets != NULL)
        *offsets = at;
    return at;
}

uint64_t akv_ladder_code_bytes(const akv_segment *segment, uint64_t tokens, uint8_t *const level[AKV_SIDES])
{
    return place_codes(segment, tokens, level, NULL);
}

/* Anchors that the first S tokens of a head use, old number -> new; returns how many. */
static uint32_t renumber_anchors(const akv_ladder_view *v, uint64_t S, uint16_t *number)
{
    uint32_t count = 0;
    memset(number, 0, v->num_anchors * sizeof *number);
    for (uint64_t t = 0; t < S; t++)
        number[akv_ladder_index(v, t)] = 1;
    for (uint32_t a = 0; a < v->num_anchors; a++)
        if (number[a] != 0)
            number[a] = (uint16_t)count++;
        else
            number[a] = UINT16_MAX;
    return count;
}

/* Sections that depend on the tokens or on the anchors' numbers. */
static void write_tokens(rewrite_call *c, int side, uint32_t head)
{
    const akv_header *h = &c->rewrite->header;
    const uint64_t S = h->num_tokens, k = akv_header_of(c->rewrite->from)->num_anchors;
    const akv_ladder_view from = akv_view_ladder(c->rewrite->from, side, head),
                          to = akv_view_ladder(&c->writing, side, head);
    const uint16_t *number = c->renumber[side] != NULL ? c->renumber[side] + head * k : NULL;
    const uint8_t *level = c->rewrite->level[side] + head * S;
#define WRITABLE(p) (c->blob + ((const uint8_t *)(p)-c->blob))
    uint8_t *index = WRITABLE(to.index), *coeff = WRITABLE(to.coeff), *levels = WRITABLE(to.levels);
    for (uint64_t a = 0; a < k; a++) {
        const uint64_t b = number != NULL ? number[a] : a;
        if (b == UINT16_MAX && number != NULL)
            continue;
        memcpy(WRITABLE(to.anchors) + b * to.dim, from.anchors + a * from.dim, to.dim);
        memcpy(WRITABLE(to.anchor_scales) + b * 2, from.anchor_scales + a, 2);
    }
    for (uint64_t t = 0; t < S; t++) {
        const uint32_t old = akv_ladder_index(&from, t), a = number != NULL ? number[old] : old;
        for (uint32_t i = 0; i < to.index_bits; i++) {
            const uint64_t bit = t * to.index_bits + i;
            index[bit / 8] |= (uint8_t)(((a >> i) & 1u) << (bit % 8));
        }
        coeff[t / 2] |= (uint8_t)((akv_ladder_coeff(&from, t) & 15) << (t % 2 * 4));
        for (uint32_t p = 0; p < to.planes; p++)
            levels[p * to.plane_bytes + t / 8] |= (uint8_t)(((level[t] >> p) & 1u) << (t % 8));
        c->rewrite->header.num_residuals[side] += level[t] != 0;
    }
}

static void write_all(rewrite_call *c)
{
    static const int copied[] = {AKV_SEC_INV_FREQ,   AKV_SEC_MEAN,         AKV_SEC_COORDS,           AKV_SEC_BASIS,
                                 AKV_SEC_BASIS + 1,  AKV_SEC_BASIS_SCALES, AKV_SEC_BASIS_SCALES + 1, AKV_SEC_SIGMAS,
                                 AKV_SEC_SIGMAS + 1, AKV_SEC_TABLES,       AKV_SEC_TABLES + 1,       AKV_SEC_UNITS,
                                 AKV_SEC_UNITS + 1,  AKV_SEC_POSITIONS};
    akv_rewrite *w = c->rewrite;
    akv_header *h = &w->header;
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        memcpy(c->blob + h->sections[copied[i]].offset, akv_section_of(w->from, copied[i]),
               h->sections[copied[i]].bytes);
    memcpy(c->blob, h, sizeof *h); /* the views read it; residuals are counted below */
    h->num_residuals[0] = h->num_residuals[1] = 0;
    for (int side = 0; side < AKV_SIDES; side++)
        for (uint32_t head = 0; head < h->num_kv_heads; head++)
            write_tokens(c, side, head);
    place_codes(w->from, h->num_tokens, w->level, (uint64_t *)(void *)(c->blob + h->sections[AKV_SEC_RANKS].offset));
    const size_t tasks = (size_t)(h->num_kv_heads * akv_div_up(h->num_tokens, AKV_BLOCK_TOKENS)) * 2;
    akv_parallel_for(w->executor, rewrite_task, c, tasks);
    memcpy(c->blob, h, sizeof *h);
    for (size_t t = 0; t < tasks; t++) {
        w->energy[t % 2] += c->sums[2 * t];
        w->lost[t % 2] += c->sums[2 * t + 1];
    }
}

static void carve(rewrite_call *c, akv_arena *arena, bool cut)
{
    const akv_header *h = akv_header_of(c->rewrite->from);
    const uint64_t tasks = h->num_kv_heads * akv_div_up(c->rewrite->header.num_tokens, AKV_BLOCK_TOKENS) * 2;
    c->num_slots = akv_num_slots(c->rewrite->executor, tasks);
    c->slots = AKV_TAKE(arena, atomic_flag, c->num_slots);
    c->scratch = AKV_TAKE(arena, rewrite_scratch, c->num_slots);
    c->sums = AKV_TAKE(arena, double, tasks * 2);
    for (int side = 0; cut && side < AKV_SIDES; side++)
        c->renumber[side] = AKV_TAKE(arena, uint16_t, (uint64_t)h->num_kv_heads * h->num_anchors);
}

akv_status akv_rewrite_run(akv_rewrite *w, akv_segment **out, akv_diag *diag)
{
    const akv_header *old = akv_header_of(w->from);
    akv_header *h = &w->header;
    const bool cut = h->num_tokens != old->num_tokens;
    rewrite_call c;
    akv_arena arena = {NULL, 0, false};
    memset(&c, 0, sizeof c);
    c.rewrite = w;
    carve(&c, &arena, cut);
    const size_t bytes = arena.used;
    arena.base = arena.overflow ? NULL : akv_alloc(w->allocator, bytes);
    if (arena.base == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", bytes);
    arena.used = 0;
    carve(&c, &arena, cut);
    for (uint32_t i = 0; i < c.num_slots; i++)
        atomic_flag_clear(&c.slots[i]);
    if (cut) { /* anchors that nobody uses any more go; k is the same for every head and side */
        uint32_t most = 1;
        for (int side = 0; side < AKV_SIDES; side++)
            for (uint32_t head = 0; head < h->num_kv_heads; head++) {
                const akv_ladder_view v = akv_view_ladder(w->from, side, head);
                uint16_t *number = (uint16_t *)(uintptr_t)c.renumber[side] + (size_t)head * old->num_anchors;
                const uint32_t used = renumber_anchors(&v, h->num_tokens, number);
                most = used > most ? used : most;
            }
        h->num_anchors = most;
        h->index_bits = 1;
        while ((h->num_anchors - 1) >> h->index_bits != 0)
            h->index_bits++;
    }
    akv_layout_sections(h, h->sections[AKV_SEC_POSITIONS].bytes != 0);
    akv_segment *segment = akv_segment_new(w->allocator, h->total_bytes);
    akv_status status = AKV_OK;
    if (segment == NULL) {
        status = akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %llu bytes",
                          (unsigned long long)h->total_bytes);
    } else {
        c.blob = (uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES;
        c.writing.blob = c.blob;
        write_all(&c);
        *out = segment;
    }
    akv_free(w->allocator, arena.base, bytes);
    return status;
}
