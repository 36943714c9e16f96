/* SPDX-License-Identifier: Apache-2.0 */
/* check_segment.c - see check_segment.h; the tolerances are derived in docs/numerics.md. */
#include "check_segment.h"

#include "akv_test.h"
#include "npz.h"

typedef struct ctx {
    const char *name;
    const akv_layer *in;
    const akv_experiment *experiment; /* NULL = the paper's */
    ref_layer layer;
    ref_view view;
    check_stats *stats;
    uint32_t k;
    /* per head, [S] each, all heads one after the other */
    bool *is_anchor;
    double *score[2], *score_tol[2]; /* what ranks the tokens of a side */
} ctx;

static double norm(const double *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* Anchor set: ascending, distinct, the window, the top scores. */
static void check_anchor_set(ctx *c, uint32_t head)
{
    uint64_t S = c->layer.tokens, n = S - c->layer.window;
    bool *is_anchor = c->is_anchor + head * S;
    uint32_t previous = 0, in_window = 0;
    for (uint32_t a = 0; a < c->k; a++) {
        uint32_t token = ref_view_anchor_token(&c->view, head, a);
        CHECK_MSG(token < S && (a == 0 || token > previous), "%s: head %u anchor %u is token %u after %u", c->name,
                  head, a, token, previous);
        previous = token;
        if (token < S)
            is_anchor[token] = true;
        in_window += token >= n;
    }
    CHECK_MSG(in_window == c->layer.window, "%s: head %u has %u of %u window tokens as anchors", c->name, head,
              in_window, c->layer.window);

    double rho = c->experiment == NULL ? 0.7 : c->experiment->no_random_anchors ? 1.0 : c->experiment->rho;
    uint32_t width = c->experiment == NULL ? 7 : c->experiment->pool_width;
    uint32_t top = ref_num_top(c->k, c->layer.window, rho);
    double *score = must(malloc((n + 1) * sizeof *score));
    double *tol = must(malloc((n + 1) * sizeof *tol));
    bool *chosen = must(malloc(n + 1));
    must(ref_anchor_scores(&c->layer, head, width, score, tol) ? score : NULL);
    ref_top(score, n, top, chosen);
    double cut = INFINITY, cut_tol = 0; /* the lowest score that is in */
    for (uint64_t p = 0; p < n; p++)
        if (chosen[p] && score[p] < cut) {
            cut = score[p];
            cut_tol = tol[p];
        }
    for (uint64_t p = 0; p < n; p++)
        if (chosen[p] && score[p] - tol[p] > cut + cut_tol)
            CHECK_MSG(is_anchor[p], "%s: head %u token %llu scores %.9g, above the cut %.9g, and is no anchor", c->name,
                      head, (unsigned long long)p, score[p], cut);
    free(score);
    free(tol);
    free(chosen);
}

/* Anchor vectors: bf16 of the un-rotated key, of the value. */
static void check_anchor_vectors(ctx *c, uint32_t head, int side, bool post)
{
    uint32_t dim = c->layer.dim[side];
    double x[1024], a[1024];
    for (uint32_t j = 0; j < c->k; j++) {
        uint32_t token = ref_view_anchor_token(&c->view, head, j);
        if (post && side == AKV_SIDE_K)
            memcpy(x, c->layer.keys + (head * c->layer.tokens + token) * dim, dim * sizeof *x);
        else
            ref_layer_row(&c->layer, side, head, token, x);
        ref_view_anchor(&c->view, side, head, j, a);
        /* 4 u |x|: the turn back is two products and a sum by a rounded sine and cosine; values are not turned */
        double turn = side == AKV_SIDE_K && !post && c->layer.rope.rotary_dim > 0 ? 4 * REF_U * norm(x, dim) : 0;
        for (uint32_t i = 0; i < dim; i++) {
            double half = ref_half_ulp_bf16(fabs(x[i]) + turn);
            CHECK_NEAR(a[i], turn > 0 ? x[i] : ref_round_bf16(x[i]), turn > 0 ? half + turn : 0,
                       "%s: anchor %u side %d head %u dim %u", c->name, j, side, head, i);
        }
    }
}

/* Which score ranks this token's residual when the experiment says so; utilities are filled elsewhere. */
static void rank_otherwise(ctx *c, uint32_t head, int side, uint64_t p, double cosine, double residual, double size)
{
    uint64_t at = head * c->layer.tokens + p;
    if (c->experiment->rank == AKV_RANK_COSINE) {
        c->score[side][at] = -cosine;
        c->score_tol[side][at] = 2 * ref_gamma(c->layer.dim[side]);
    } else if (c->experiment->rank == AKV_RANK_NORM) {
        c->score[side][at] = residual;
        c->score_tol[side][at] = 8 * REF_U * size + ref_gamma(c->layer.dim[side]) * residual;
    }
}

/*
 * Nearest anchor and coefficient of every token; leaves the residuals that follow from what is stored.
 *   residual  out  [S, dim] of the rotated key or of the value;  size  out  [S] what it was subtracted from
 */
static void check_projection(ctx *c, uint32_t head, int side, bool post, double *residual, double *size)
{
    uint64_t S = c->layer.tokens;
    uint32_t dim = c->layer.dim[side];
    double *anchors = must(malloc((uint64_t)c->k * dim * sizeof *anchors));
    for (uint32_t j = 0; j < c->k; j++)
        ref_view_anchor(&c->view, side, head, j, anchors + (uint64_t)j * dim);
    uint32_t own = 0; /* anchors come in ascending token order */
    double x[1024], a[1024];
    for (uint64_t p = 0; p < S; p++) {
        uint32_t index = ref_view_index(&c->view, side, head, p);
        double gamma = ref_view_coeff(&c->view, side, head, p);
        if (post && side == AKV_SIDE_K)
            memcpy(x, c->layer.keys + (head * S + p) * dim, dim * sizeof *x);
        else
            ref_layer_row(&c->layer, side, head, p, x);
        if (!CHECK_MSG(index < c->k, "%s: side %d head %u token %llu names anchor %u", c->name, side, head,
                       (unsigned long long)p, index))
            continue;
        memcpy(a, anchors + (uint64_t)index * dim, dim * sizeof *a);
        double x_norm = norm(x, dim), a_norm = norm(a, dim);
        double cosine = ref_abs_cosine(x, a, dim);
        if (c->is_anchor[head * S + p]) {
            CHECK_MSG(index == own && gamma == 1,
                      "%s: side %d head %u: anchor token %llu has index %u (own %u), coefficient %g", c->name, side,
                      head, (unsigned long long)p, index, own, gamma);
            own++;
        } else {
            ref_projection best = ref_project(x, anchors, c->k, dim);
            c->stats->tokens++;
            c->stats->other_anchor += index != best.index;
            if (best.cosine > 0) {
                /* a cosine is a sum of dim products over two norms, for each of the two anchors compared */
                CHECK_NEAR(cosine, best.cosine, 4 * ref_gamma(dim),
                           "%s: |cosine| of side %d head %u token %llu, anchor %u against %u", c->name, side, head,
                           (unsigned long long)p, index, best.index);
                double dot = 0;
                for (uint32_t i = 0; i < dim; i++)
                    dot += x[i] * a[i];
                double want = a_norm > 0 ? dot / (a_norm * a_norm) : 0;
                double rounding = 2 * ref_gamma(dim) * x_norm / (a_norm > 0 ? a_norm : 1);
                double clamped = want > 65504 ? 65504 : want < -65504 ? -65504 : want;
                CHECK_NEAR(gamma, clamped, ref_half_ulp_f16(fabs(clamped) + rounding) + rounding,
                           "%s: gamma of side %d head %u token %llu", c->name, side, head, (unsigned long long)p);
            } else
                CHECK_MSG(gamma == 0 || a_norm == 0 || x_norm == 0,
                          "%s: side %d head %u token %llu: gamma %g on a token without direction", c->name, side, head,
                          (unsigned long long)p, gamma);
        }
        /* the residual in the domain where it is stored */
        if (side == AKV_SIDE_K && !post)
            ref_rope_rotate(&c->layer.rope, c->layer.positions[p], a);
        const double *full = (side == AKV_SIDE_K ? c->layer.keys : c->layer.values) + (head * S + p) * dim;
        double *r = residual + p * dim;
        for (uint32_t i = 0; i < dim; i++)
            r[i] = c->is_anchor[head * S + p] ? 0 : full[i] - gamma * a[i];
        size[p] = norm(full, dim) + fabs(gamma) * norm(a, dim);
        if (c->experiment != NULL)
            rank_otherwise(c, head, side, p, cosine, norm(r, dim), size[p]);
    }
    free(anchors);
}

/* Scale and codes of every residual of a head. */
static void check_codes(ctx *c, uint32_t head, int side, const double *residual, const double *size)
{
    uint32_t dim = c->layer.dim[side];
    bool plain = (c->view.header->flags & AKV_FLAG_PLAIN_CODES) != 0;
    bool least_squares = c->experiment != NULL && c->experiment->scale_rule == AKV_SCALE_LEAST_SQUARES;
    const double *level = plain ? ref_levels_plain : ref_levels;
    const double *boundary = plain ? ref_boundaries_plain : ref_boundaries;
    uint64_t number = ref_view_first_residual(&c->view, side, head);
    double x[1024];
    uint8_t codes[1024];
    for (uint64_t p = 0; p < c->layer.tokens; p++) {
        if (!ref_view_owns(&c->view, side, head, p))
            continue;
        double scale = ref_view_gain(&c->view, side, number++);
        ref_view_codes(&c->view, side, head, p, codes);
        memcpy(x, residual + p * dim, dim * sizeof *x);
        if (!plain)
            ref_transform(x, dim, c->view.header->seed, side);
        double largest = 0, error = 0, error_absmax = 0;
        for (uint32_t i = 0; i < dim; i++)
            largest = fmax(largest, fabs(x[i]));
        /* the subtraction and its turn: 8 u of what was subtracted; the transform adds log2(dim) roundings, 12 in all
         * at most */
        double tol = 20 * REF_U * size[p];
        double absmax = ref_round_f16(largest / level[3]);
        if (!least_squares)
            CHECK_NEAR(scale, largest / level[3] > 65504 ? 65504 : largest / level[3],
                       ref_half_ulp_f16(largest / level[3] + tol) + tol / level[3],
                       "%s: scale of side %d head %u token %llu", c->name, side, head, (unsigned long long)p);
        CHECK_MSG(scale >= 0 && isfinite(scale), "%s: scale %g", c->name, scale);
        for (uint32_t i = 0; i < dim; i++) {
            c->stats->codes++;
            if (scale == 0)
                continue;
            double z = x[i] / scale;
            error += (x[i] - scale * level[codes[i]]) * (x[i] - scale * level[codes[i]]);
            double b = x[i] - absmax * level[ref_code(x[i], absmax, plain)];
            error_absmax += b * b;
            if (codes[i] == ref_code(x[i], scale, plain))
                continue;
            c->stats->other_code++;
            double nearest = INFINITY;
            for (int j = 0; j < 3; j++)
                nearest = fmin(nearest, fabs(z - boundary[j]));
            CHECK_MSG(nearest <= tol / scale + 4 * REF_U * fabs(z),
                      "%s: side %d head %u token %llu dim %u: %.9g has code %u, %.3g from a boundary", c->name, side,
                      head, (unsigned long long)p, i, z, codes[i], nearest);
        }
        /* 1.002: both scales are rounded to f16 (2^-11), after which neither is exactly optimal */
        if (least_squares)
            CHECK_MSG(sqrt(error) <= 1.002 * sqrt(error_absmax) + tol, "%s: least squares leaves %.6g, absmax %.6g",
                      c->name, sqrt(error), sqrt(error_absmax));
        c->stats->residuals++;
    }
}

/* Who owns a residual: within a side, nobody outside beats anybody inside by more than rounding. */
static void check_selection(ctx *c)
{
    uint64_t S = c->layer.tokens;
    bool equal = c->experiment != NULL && c->experiment->equal_head_budgets;
    for (int side = 0; side < 2; side++) {
        uint64_t count = 0, fewest = UINT64_MAX, most = 0;
        double weakest_in = INFINITY, strongest_out = -INFINITY;
        for (uint32_t h = 0; h < c->layer.heads; h++) {
            uint64_t of_head = 0;
            for (uint64_t p = 0; p < S; p++) {
                uint64_t at = h * S + p;
                bool owns = ref_view_owns(&c->view, side, h, p);
                of_head += owns;
                CHECK_MSG(!owns || !c->is_anchor[at], "%s: anchor token %llu owns a residual", c->name,
                          (unsigned long long)p);
                if (c->is_anchor[at])
                    continue;
                if (owns)
                    weakest_in = fmin(weakest_in, c->score[side][at] + c->score_tol[side][at]);
                else
                    strongest_out = fmax(strongest_out, c->score[side][at] - c->score_tol[side][at]);
            }
            count += of_head;
            fewest = of_head < fewest ? of_head : fewest;
            most = of_head > most ? of_head : most;
            if (equal || h + 1 == c->layer.heads) {
                if (c->experiment == NULL || c->experiment->rank != AKV_RANK_RANDOM)
                    CHECK_MSG(weakest_in >= strongest_out,
                              "%s: side %d: a token with at least %.9g has no residual, one with at most %.9g has",
                              c->name, side, strongest_out, weakest_in);
                weakest_in = INFINITY;
                strongest_out = -INFINITY;
            }
        }
        if (getenv("AKV_TEST_VERBOSE") != NULL && !equal) {
            double cut = INFINITY;
            for (uint64_t at = 0; at < S * c->layer.heads; at++)
                if (!c->is_anchor[at] && ref_view_owns(&c->view, side, (uint32_t)(at / S), at % S))
                    cut = fmin(cut, c->score[side][at]);
            unsigned open = 0;
            double rel = 0;
            for (uint64_t at = 0; at < S * c->layer.heads; at++)
                if (!c->is_anchor[at] && fabs(c->score[side][at] - cut) <= c->score_tol[side][at]) {
                    open++;
                    rel = fmax(rel, c->score_tol[side][at] / c->score[side][at]);
                }
            printf("  %s: side %d: %llu chosen, %u within rounding of the cut %.3g, tolerance up to %.3g of it\n",
                   c->name, side, (unsigned long long)count, open, cut, rel);
        }
        CHECK_MSG(count == c->view.header->num_residuals[side], "%s: side %d: %llu bits set, header says %llu", c->name,
                  side, (unsigned long long)count, (unsigned long long)c->view.header->num_residuals[side]);
        if (equal)
            CHECK_MSG(most == fewest, "%s: side %d: heads own %llu to %llu residuals", c->name, side,
                      (unsigned long long)fewest, (unsigned long long)most);
    }
}

static void rank_by_attention(ctx *c, uint32_t head)
{
    uint64_t S = c->layer.tokens;
    double *a = must(malloc(S * sizeof *a));
    for (uint32_t g = 0; g < c->layer.group; g++)
        for (uint32_t r = 0; r < c->layer.window; r++) {
            ref_attention_row(&c->layer, head * c->layer.group + g, r, a, NULL);
            for (int side = 0; side < 2; side++)
                for (uint64_t p = 0; p < S; p++) {
                    c->score[side][head * S + p] += a[p];
                    /* 1e-3: fp32 softmax weights of logits up to a few tens; the order is what matters here */
                    c->score_tol[side][head * S + p] = 1e-3 * c->score[side][head * S + p];
                }
        }
    free(a);
}

/* The counts before each block are those of the bitmap. */
static void check_ranks(ctx *c)
{
    uint64_t S = c->layer.tokens;
    for (int side = 0; side < 2; side++) {
        const akv_section *section = &c->view.header->sections[AKV_SEC_RANKS + side];
        const uint64_t *ranks = (const uint64_t *)(const void *)(c->view.bytes + section->offset);
        uint64_t before = 0, at = 0;
        CHECK(section->bytes == 8 * (c->layer.heads * ((S + AKV_BLOCK_TOKENS - 1) / AKV_BLOCK_TOKENS) + 1));
        for (uint32_t h = 0; h < c->layer.heads; h++)
            for (uint64_t p = 0; p < S; p++) {
                if (p % AKV_BLOCK_TOKENS == 0)
                    CHECK_MSG(ranks[at++] == before, "%s: side %d: rank of head %u token %llu", c->name, side, h,
                              (unsigned long long)p);
                before += ref_view_owns(&c->view, side, h, p);
            }
        CHECK(ranks[at] == before);
    }
}

static void check_header(ctx *c, const akv_config *config, const akv_segment *segment)
{
    const akv_header *h = c->view.header;
    const akv_shape *s = &c->in->shape;
    ref_plan plan = ref_make_plan(s, config->keep_ratio, config->budget_bytes, config->experiment);
    size_t blob_bytes;
    akv_segment_data(segment, &blob_bytes);
    CHECK(h->magic == AKV_SEGMENT_MAGIC && h->major == AKV_SEGMENT_MAJOR && h->header_bytes == 768);
    CHECK(h->total_bytes == blob_bytes && blob_bytes % 64 == 0);
    CHECK_MSG(plan.total == blob_bytes + 64, "%s: %llu bytes, the reference plans %llu", c->name,
              (unsigned long long)blob_bytes + 64, (unsigned long long)plan.total);
    CHECK(h->kind == AKV_SEGMENT_COMPRESSED && h->dense_reason == AKV_DENSE_NONE && h->profile == AKV_PROFILE_PAPER);
    CHECK(h->num_tokens == s->num_tokens && h->num_kv_heads == s->num_kv_heads && h->gqa_group == s->gqa_group);
    CHECK(h->head_dim[0] == s->head_dim_k && h->head_dim[1] == s->head_dim_v && h->rotary_dim == s->rotary_dim);
    CHECK(h->rope_style == (uint32_t)c->in->rope.style || s->rotary_dim == 0);
    CHECK(h->magnitude == c->in->rope.magnitude && h->sm_scale == c->in->sm_scale &&
          h->logit_softcap == c->in->logit_softcap);
    CHECK((double)h->first_position == c->layer.positions[0] &&
          (double)h->last_position == c->layer.positions[s->num_tokens - 1]);
    CHECK(h->num_anchors == plan.num_anchors && h->budget_bytes == plan.budget);
    CHECK_MSG(h->num_residuals[0] == plan.residuals[0] && h->num_residuals[1] == plan.residuals[1],
              "%s: residuals %llu + %llu, the reference plans %llu + %llu", c->name,
              (unsigned long long)h->num_residuals[0], (unsigned long long)h->num_residuals[1],
              (unsigned long long)plan.residuals[0], (unsigned long long)plan.residuals[1]);
    for (uint64_t p = 0; p < s->num_tokens; p++)
        if (ref_view_position(&c->view, p) != c->layer.positions[p]) {
            CHECK_MSG(0, "%s: position of token %llu", c->name, (unsigned long long)p);
            break;
        }
}

void check_compressed(const char *name, const akv_layer *layer, const akv_config *config, const akv_segment *segment,
                      check_stats *stats)
{
    ctx c = {0};
    c.name = name;
    c.in = layer;
    c.experiment = config->experiment;
    c.stats = stats;
    must(ref_layer_load(layer, &c.layer) ? &c : NULL);
    c.view = ref_view_of(akv_segment_data(segment, NULL));
    c.k = c.view.header->num_anchors;
    bool post = config->experiment != NULL && config->experiment->anchor_space == AKV_ANCHOR_POST_ROPE;
    CHECK(post == ((c.view.header->flags & AKV_FLAG_ANCHORS_POST_ROPE) != 0));
    uint64_t S = c.layer.tokens, all = S * c.layer.heads;
    c.is_anchor = must(calloc(all, sizeof *c.is_anchor));
    double *residual[2], *size[2];
    for (int side = 0; side < 2; side++) {
        c.score[side] = must(calloc(all, sizeof(double)));
        c.score_tol[side] = must(calloc(all, sizeof(double)));
        residual[side] = must(malloc(S * c.layer.dim[side] * sizeof(double)));
        size[side] = must(malloc(S * sizeof(double)));
    }
    check_header(&c, config, segment);
    check_ranks(&c);
    akv_rank rank = config->experiment != NULL ? config->experiment->rank : AKV_RANK_UTILITY;
    for (uint32_t h = 0; h < c.layer.heads; h++) {
        check_anchor_set(&c, h);
        for (int side = 0; side < 2; side++) {
            check_anchor_vectors(&c, h, side, post);
            check_projection(&c, h, side, post, residual[side], size[side]);
            check_codes(&c, h, side, residual[side], size[side]);
        }
        if (rank == AKV_RANK_UTILITY) {
            double *u[2] = {c.score[0] + h * S, c.score[1] + h * S},
                   *t[2] = {c.score_tol[0] + h * S, c.score_tol[1] + h * S};
            must(ref_utilities(&c.layer, h, residual[0], residual[1], size[0], size[1], u, t) ? &c : NULL);
        } else if (rank == AKV_RANK_ATTENTION)
            rank_by_attention(&c, h);
    }
    check_selection(&c);
    for (int side = 0; side < 2; side++) {
        free(c.score[side]);
        free(c.score_tol[side]);
        free(residual[side]);
        free(size[side]);
    }
    free(c.is_anchor);
    ref_layer_free(&c.layer);
}

void check_decode(const char *name, const akv_segment *segment)
{
    const void *blob = akv_segment_data(segment, NULL);
    const akv_header *h = blob;
    uint64_t S = h->num_tokens;
    akv_diag diag = {0};
    for (uint32_t head = 0; head < h->num_kv_heads; head++) {
        double *want[2], *size[2];
        float *got[2];
        for (int side = 0; side < 2; side++) {
            want[side] = must(malloc(S * h->head_dim[side] * sizeof(double)));
            size[side] = must(malloc(S * sizeof(double)));
            got[side] = must(malloc(S * h->head_dim[side] * sizeof(float)));
            must(ref_decode(blob, side, head, want[side], size[side]) ? &diag : NULL);
        }
        /* everything at once, then pieces that begin and end inside blocks and groups */
        const uint64_t ranges[][2] = {
            {0, S}, {S / 3, (S + 1) / 2}, {S - 1, 1}, {S > 1030 ? 1017 : 0, S > 1030 ? 13 : S}, {S, 0}};
        for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
            uint64_t first = ranges[i][0], n = ranges[i][1];
            CHECK_STATUS(akv_segment_decode(segment, head, first, n, got[0], i == 1 ? NULL : got[1], &diag), AKV_OK,
                         &diag);
            for (int side = 0; side < (i == 1 ? 1 : 2); side++)
                for (uint64_t p = 0; p < n; p++) {
                    uint32_t dim = h->head_dim[side];
                    /* 16 u of the parts' norms: turn, product, transform (log2 dim sums of halving size), sum; dense is
                     * exact */
                    double tol = h->kind == AKV_SEGMENT_DENSE ? 0 : 16 * REF_U * size[side][first + p];
                    double worst = 0;
                    for (uint32_t d = 0; d < dim; d++) {
                        double off = fabs((double)got[side][p * dim + d] - want[side][(first + p) * dim + d]);
                        worst = off > worst || isnan(off) ? off : worst;
                    }
                    CHECK_NEAR(worst, 0, tol, "%s: decode side %d head %u token %llu", name, side, head,
                               (unsigned long long)(first + p));
                }
        }
        for (int side = 0; side < 2; side++) {
            free(want[side]);
            free(size[side]);
            free(got[side]);
        }
    }
}

bool captured_layer(fixture *f, ref_layer *layer)
{
    const char *path = getenv("AKV_LAYER");
    return CHECK_MSG(fixture_from_npz(path != NULL ? path : AKV_TEST_DATA "/layer12_tail.npz", f),
                     "the captured layer is missing") &&
           must(ref_layer_load(&f->layer, layer) ? layer : NULL) != NULL;
}

double output_error(const ref_layer *l, const akv_segment *segment, uint32_t first)
{
    const uint32_t d = l->dim[0], dv = l->dim[1];
    const uint64_t S = l->tokens;
    double *k = must(malloc(S * d * sizeof *k)), *v = must(malloc(S * dv * sizeof *v)),
           *w = must(malloc(S * sizeof *w));
    double off = 0, all = 0, y[1024], z[1024];
    for (uint32_t h = 0; h < l->heads; h++) {
        must(ref_decode(akv_segment_data(segment, NULL), 0, h, k, NULL) &&
                     ref_decode(akv_segment_data(segment, NULL), 1, h, v, NULL)
                 ? k
                 : NULL);
        ref_layer other = *l;
        other.keys = k - (size_t)h * S * d; /* only head h is read */
        for (uint32_t g = 0; g < l->group; g++)
            for (uint32_t r = first; r < l->window; r += 4) {
                memset(y, 0, sizeof y);
                memset(z, 0, sizeof z);
                ref_attention_row(l, h * l->group + g, r, w, NULL);
                for (uint64_t p = 0; p < S; p++)
                    for (uint32_t i = 0; i < dv; i++)
                        y[i] += w[p] * l->values[(h * S + p) * dv + i];
                ref_attention_row(&other, h * l->group + g, r, w, NULL);
                for (uint64_t p = 0; p < S; p++)
                    for (uint32_t i = 0; i < dv; i++)
                        z[i] += w[p] * v[p * dv + i];
                for (uint32_t i = 0; i < dv; i++) {
                    off += (y[i] - z[i]) * (y[i] - z[i]);
                    all += y[i] * y[i];
                }
            }
    }
    free(k);
    free(v);
    free(w);
    return sqrt(off / all);
}
