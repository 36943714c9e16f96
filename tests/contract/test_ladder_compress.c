/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ladder_compress.c - the choices of the profile default, each judged from the segment's bytes and the input in double
 * precision, given the choices before it: means, units, anchors, nearest anchor, coefficient, basis, spectra, level tables,
 * codes, and how the budget is used. Utilities are not part of the bytes, so which token got which level is not judged here
 * (beyond: levels lie on the convex hull, and the budget is spent).
 */
#include "akv_test.h"
#include "cases.h"
#include "check_segment.h"

typedef struct ctx {
    const char *name;
    const akv_layer *in;
    const akv_experiment *options;
    ref_layer layer;
    ref_view view;
    const akv_header *h;
    double *x;        /* [S, dim] of a head and side: centred keys before the rotation, or values */
    double *r;        /* [S, dim] residuals as the queries meet them, 0 for anchors */
    double *size;     /* [S] |x| as given + |gamma a|: scales rounding */
    unsigned long other_anchor, other_code, codes;
    double coded_error, best_error; /* squared error of all coded coordinates: as stored, with the best gain of the grid */
    double residual_energy;         /* of all tokens and both sides, before codes */
} ctx;

static double dot(const double *a, const double *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static bool is_anchor(const ctx *c, uint32_t head, uint64_t t)
{
    return ref_ladder_coeff_code(&c->view, AKV_SIDE_K, head, t) == -8;
}

/* Means: bf16 of the mean key before the rotation. Rows of the head and side -> c->x. */
static void load_rows(ctx *c, int side, uint32_t head)
{
    uint32_t dim = c->h->head_dim[side];
    uint64_t S = c->layer.tokens;
    double mean[1024] = {0}, stored[1024], most = 0;
    for (uint64_t t = 0; t < S; t++) {
        ref_layer_row(&c->layer, side, head, t, c->x + t * dim);
        for (uint32_t i = 0; i < dim; i++) {
            mean[i] += c->x[t * dim + i] / (double)S;
            most = fmax(most, fabs(c->x[t * dim + i]));
        }
        c->size[t] = sqrt(dot(c->x + t * dim, c->x + t * dim, dim));
    }
    if (side == AKV_SIDE_V)
        return;
    ref_ladder_mean(&c->view, head, stored);
    for (uint32_t i = 0; i < dim; i++) /* rows are un-rotated in fp32 */
        CHECK_NEAR(stored[i], mean[i], ref_half_ulp_bf16(mean[i]) * 1.001 + 8 * REF_U * most, "%s: mean %u of head %u", c->name,
                   i, head);
    for (uint64_t t = 0; t < S; t++)
        for (uint32_t i = 0; i < dim; i++)
            c->x[t * dim + i] -= stored[i];
}

/*
 * Anchors that are tokens: the window, the sinks, at most k in all, the same on both sides, in token order; vectors within half
 * a step. Without refinement all k are tokens; with it only the attended ones.
 */
static void check_anchors(ctx *c, int side, uint32_t head)
{
    uint32_t dim = c->h->head_dim[side], count = 0, next = 0;
    uint64_t S = c->layer.tokens;
    double a[1024];
    const uint8_t *bytes = c->view.bytes;
    const uint16_t *scale = (const uint16_t *)(bytes + c->h->sections[AKV_SEC_ANCHOR_SCALES + side].offset) +
                            (uint64_t)head * c->h->num_anchors;
    const uint16_t *unit = (const uint16_t *)(bytes + c->h->sections[AKV_SEC_UNITS + side].offset) + (uint64_t)head * dim;
    for (uint64_t t = 0; t < S; t++) {
        bool own = ref_ladder_coeff_code(&c->view, side, head, t) == -8;
        CHECK_MSG(own == is_anchor(c, head, t), "%s: token %llu is an anchor on one side only", c->name, (unsigned long long)t);
        if (t >= S - c->layer.window || (t < c->options->sinks && c->h->num_anchors >= c->layer.window + c->options->sinks))
            CHECK_MSG(own, "%s: token %llu of the window or the sinks is no anchor", c->name, (unsigned long long)t);
        if (!own)
            continue;
        uint32_t index = ref_ladder_index(&c->view, side, head, t);
        CHECK_MSG(index >= next, "%s: anchor %u of head %u is number %u", c->name, count, head, index);
        next = index + 1;
        CHECK_MSG(ref_ladder_level(&c->view, side, head, t) == 0, "%s: anchor %u owns a residual", c->name, count);
        count++;
        ref_ladder_anchor(&c->view, side, head, index, a);
        for (uint32_t i = 0; i < dim; i++) { /* 0.07: 127 steps of a scale that f16 rounded down by 2^-11 */
            double step = (double)akv_f16_to_f32(scale[index]) * akv_bf16_to_f32(unit[i]);
            CHECK_NEAR(a[i], c->x[t * dim + i], 0.57 * step + 8 * REF_U * c->size[t], "%s: side %d anchor %u coordinate %u",
                       c->name, side, index, i);
        }
    }
    const uint32_t k = c->h->num_anchors, rest = k - c->layer.window;
    uint32_t least = k, most = k;
    if (c->options->anchor_rounds > 0) { /* floor(rho * free) attended ones; a sink takes the place of one, or comes on top */
        least = c->layer.window + (uint32_t)(c->options->rho * rest);
        most = least + (c->options->sinks < rest ? c->options->sinks : rest);
        most = most < k ? most : k;
    }
    CHECK_MSG(count >= least && count <= most, "%s: head %u has %u tokens as anchors, expected are %u to %u of %u", c->name, head,
              count, least, most, k);
    for (uint32_t j = 0; side == AKV_SIDE_K && j < c->h->rotary_dim / 2; j++) {
        uint32_t p = c->h->rope_style == AKV_ROPE_HALF_SPLIT ? j : 2 * j;
        uint32_t q = c->h->rope_style == AKV_ROPE_HALF_SPLIT ? j + c->h->rotary_dim / 2 : 2 * j + 1;
        CHECK_MSG(unit[p] == unit[q], "%s: units of plane %u differ", c->name, j);
    }
}

/* Nearest anchor and nearest coefficient; residuals -> c->r. */
static void check_projection(ctx *c, int side, uint32_t head)
{
    uint32_t dim = c->h->head_dim[side], k = c->h->num_anchors;
    double *anchors = must(malloc((size_t)k * dim * sizeof *anchors)), *norms = must(malloc(k * sizeof *norms));
    for (uint32_t a = 0; a < k; a++) {
        ref_ladder_anchor(&c->view, side, head, a, anchors + (size_t)a * dim);
        norms[a] = sqrt(dot(anchors + (size_t)a * dim, anchors + (size_t)a * dim, dim));
    }
    for (uint64_t t = 0; t < c->layer.tokens; t++) {
        const double *x = c->x + t * dim;
        double *r = c->r + t * dim, norm = sqrt(dot(x, x, dim));
        memset(r, 0, dim * sizeof *r);
        if (is_anchor(c, head, t))
            continue;
        uint32_t index = ref_ladder_index(&c->view, side, head, t), best = 0;
        double most = -1, have = 0;
        for (uint32_t a = 0; a < k; a++) {
            double cosine = norm > 0 && norms[a] > 0 ? fabs(dot(x, anchors + (size_t)a * dim, dim)) / (norm * norms[a]) : 0;
            if (cosine > most) {
                most = cosine;
                best = a;
            }
            if (a == index)
                have = cosine;
        }
        c->other_anchor += index != best;
        /* cosines are off by g(d) each; x by what un-rotating and centring rounds, relative to the key as given */
        double tol = norm > 0 ? 4 * ref_gamma(dim) + 16 * REF_U * c->size[t] / norm : 2;
        CHECK_NEAR(have, most, tol, "%s: side %d head %u token %llu is at anchor %u, nearest %u", c->name, side, head,
                   (unsigned long long)t, index, best);
        const double *a = anchors + (size_t)index * dim;
        int code = ref_ladder_coeff_code(&c->view, side, head, t);
        double gamma = norms[index] > 0 ? dot(x, a, dim) / (norms[index] * norms[index]) : 0, steps = gamma * 3.5;
        double want = steps > 7 ? 7 : steps < -7 ? -7 : steps;
        double off = norms[index] > 0 ? 3.5 * (2 * ref_gamma(dim) * norm + 16 * REF_U * c->size[t]) / norms[index] : 0;
        CHECK_NEAR(code, want, 0.5 + off + 1e-6, "%s: side %d head %u token %llu coefficient", c->name, side, head,
                   (unsigned long long)t);
        double stored = ref_ladder_coeff(&c->view, side, head, t);
        for (uint32_t i = 0; i < dim; i++)
            r[i] = x[i] - stored * a[i];
        c->residual_energy += dot(r, r, dim);
        if (side == AKV_SIDE_K)
            ref_rope_rotate(&c->view.rope, ref_view_position(&c->view, t), r);
        c->size[t] += fabs(stored) * norms[index];
    }
    free(anchors);
    free(norms);
}

/* Which key coordinates are under the basis: planes that turn less than slow_angle over the segment, and unrotated ones. */
static void check_coords(const ctx *c)
{
    const uint16_t *order = (const uint16_t *)(c->view.bytes + c->h->sections[AKV_SEC_COORDS].offset);
    double span = (double)c->h->last_position - c->h->first_position + 1;
    for (uint32_t i = 0; i < c->h->head_dim[0] && c->h->basis_dim[0] > 0; i++) {
        uint32_t d = order[i], half = c->h->rotary_dim / 2;
        double angle = 0;
        if (d < c->h->rotary_dim)
            angle = span * c->in->rope.inv_freq[c->h->rope_style == AKV_ROPE_HALF_SPLIT ? d % half : d / 2];
        CHECK_MSG((i < c->h->basis_dim[0]) == (angle < c->options->slow_angle), "%s: coordinate %u turns %.3g and is %s the basis",
                  c->name, d, angle, i < c->h->basis_dim[0] ? "under" : "outside");
    }
}

/* Basis orthonormal up to 8 bits; sigma the root mean square of each coordinate; tables nested and within the level's bits. */
static void check_model(ctx *c, int side, uint32_t head, double *u)
{
    uint32_t dim = c->h->head_dim[side], coords = ref_ladder_coords(&c->view, side);
    uint64_t S = c->layer.tokens;
    double total = 0, n = 0; /* tokens that are no anchors */
    for (uint64_t t = 0; t < S; t++)
        n += !is_anchor(c, head, t);
    for (uint64_t i = 0; i < S * dim; i++)
        total += c->r[i] * c->r[i] / fmax(1, n);
    for (uint32_t a = 0; a < coords; a++)
        ref_ladder_direction(&c->view, side, head, a, u + (size_t)a * dim);
    for (uint32_t a = 0; a < coords; a++)
        for (uint32_t b = 0; b <= a; b++) {
            /* each coordinate rounds by at most 1/254 of the column's largest: sums of 2 such errors against unit vectors */
            double tol = a < c->h->basis_cols[side] ? 2.0 / 254 * sqrt(dim) * 0.75 : 1e-12;
            CHECK_NEAR(dot(u + (size_t)a * dim, u + (size_t)b * dim, dim), a == b, tol, "%s: side %d head %u columns %u %u",
                       c->name, side, head, a, b);
        }
    for (uint32_t a = 0; a < coords; a++) {
        double square = 0;
        for (uint64_t t = 0; t < S && n > 0; t++) {
            double z = dot(u + (size_t)a * dim, c->r + t * dim, dim);
            square += z * z / n;
        }
        double sigma = ref_ladder_sigma(&c->view, side, head, a);
        /* bf16 keeps 8 bits of sigma; second moments are summed in fp32 */
        CHECK_NEAR(sigma * sigma, square, 0.01 * square + 2e-6 * total, "%s: side %d head %u variance of coordinate %u", c->name,
                   side, head, a);
    }
    for (uint32_t l = 1; l <= c->h->num_levels; l++) {
        CHECK_MSG(ref_ladder_level_bits(&c->view, side, head, l) <= c->options->level_bits[l - 1],
                  "%s: level %u has %u bits, at most %u are meant", c->name, l, ref_ladder_level_bits(&c->view, side, head, l),
                  c->options->level_bits[l - 1]);
        for (uint32_t a = 0; a < coords && l > 1; a++)
            CHECK_MSG(ref_ladder_bits(&c->view, side, head, l, a) >= ref_ladder_bits(&c->view, side, head, l - 1, a),
                      "%s: side %d head %u coordinate %u loses bits at level %u", c->name, side, head, a, l);
    }
}

/*
 * Water-filling, values (whose weight is their variance alone): moving the last bits of one coordinate to another must
 * not save more. Distortions left by the Lloyd-Max quantisers of 0, 1, 2, 4 bits: as published.
 */
static void check_water(const ctx *c, uint32_t head)
{
    static const double left[5] = {1, 0.3634, 0.1175, 0, 0.009497};
    uint32_t coords = ref_ladder_coords(&c->view, AKV_SIDE_V);
    for (uint32_t l = 1; l <= c->h->num_levels; l++) {
        double lowest = INFINITY, highest = 0; /* of the last bits given, of the next bits not given; per bit */
        for (uint32_t a = 0; a < coords; a++) {
            double s = ref_ladder_sigma(&c->view, AKV_SIDE_V, head, a), w = s * s;
            switch (ref_ladder_bits(&c->view, AKV_SIDE_V, head, l, a)) {
            case 0: highest = fmax(highest, w * (left[0] - left[1])); break;
            case 1:
                lowest = fmin(lowest, w * (left[0] - left[1]));
                highest = fmax(highest, w * (left[1] - left[2]));
                break;
            case 2:
                lowest = fmin(lowest, w * (left[1] - left[2]));
                highest = fmax(highest, w * (left[2] - left[4]) / 2);
                break;
            default: lowest = fmin(lowest, w * (left[2] - left[4]) / 2);
            }
        }
        /* sigma in bf16: its square is off by 2^-8 on either side */
        CHECK_MSG(highest <= lowest * 1.01, "%s: head %u level %u: a coordinate without bits would save %.4g, one with saves %.4g",
                  c->name, head, l, highest, lowest);
    }
}

/*
 * The gain is sought from the one of the vector's size outwards and stops at the first that is no better. Room for what that
 * misses: 1.005 is seen at 20 coordinates, whose few numbers decide alone. A gain rounded the wrong way is beyond.
 */
static double gain_room(const spec *s)
{
    return s->dk < 16 ? 1.1 : 1.01;
}

/* Smallest squared error of x over the gains of the grid, each with its nearest numbers; coordinates with bits only. */
static double best_gain_error(const ctx *c, int side, uint32_t head, uint32_t level, const double *x)
{
    uint32_t coords = ref_ladder_coords(&c->view, side);
    double best = INFINITY;
    for (int g = 0; g < 16; g++) {
        double gain = exp2((g - 8) / 3.0), error = 0;
        for (uint32_t a = 0; a < coords; a++) {
            uint32_t width = ref_ladder_bits(&c->view, side, head, level, a);
            double unit = gain * ref_ladder_sigma(&c->view, side, head, a), nearest = INFINITY;
            for (uint32_t n = 0; width > 0 && n < 1u << width; n++)
                nearest = fmin(nearest, fabs(unit * ref_ladder_value(n, width) - x[a]));
            error += width > 0 ? nearest * nearest : 0;
        }
        best = fmin(best, error);
    }
    return best;
}

/* Codes: the nearest number given the stored gain; the error of each level against no residual at all. */
static void check_codes(ctx *c, int side, uint32_t head, const double *u, double *energy, double *error)
{
    uint32_t dim = c->h->head_dim[side], coords = ref_ladder_coords(&c->view, side);
    uint64_t S = c->layer.tokens;
    double *z = must(malloc((S * coords + 1) * sizeof *z));
    must(ref_ladder_coded(&c->view, side, head, z) ? z : NULL);
    for (uint64_t t = 0; t < S; t++) {
        uint32_t l = ref_ladder_level(&c->view, side, head, t);
        if (l == 0)
            continue;
        double r[1024], scaled[1024];
        memcpy(r, c->r + t * dim, dim * sizeof *r);
        energy[l] += dot(r, r, dim);
        for (uint32_t a = 0; a < coords; a++) {
            double coded = z[t * coords + a];
            for (uint32_t i = 0; i < dim; i++)
                r[i] -= coded * u[(size_t)a * dim + i];
            scaled[a] = dot(u + (size_t)a * dim, c->r + t * dim, dim);
        }
        error[l] += dot(r, r, dim);
        for (uint32_t a = 0; a < coords; a++)
            if (ref_ladder_bits(&c->view, side, head, l, a) > 0)
                c->coded_error += pow(z[t * coords + a] - scaled[a], 2);
        c->best_error += best_gain_error(c, side, head, l, scaled);
        /* the gain: the one of the grid with which every coordinate lies on a level */
        for (int g = 0; g < 16; g++) {
            double gain = exp2((g - 8) / 3.0);
            bool fits = true;
            for (uint32_t a = 0; a < coords && fits; a++) {
                uint32_t width = ref_ladder_bits(&c->view, side, head, l, a);
                double sigma = ref_ladder_sigma(&c->view, side, head, a), best = INFINITY;
                for (uint32_t n = 0; width > 0 && n < 1u << width; n++)
                    best = fmin(best, fabs(gain * sigma * ref_ladder_value(n, width) - z[t * coords + a]));
                fits = width == 0 || best < 1e-9 * gain * sigma;
            }
            if (!fits)
                continue;
            for (uint32_t a = 0; a < coords; a++) {
                uint32_t width = ref_ladder_bits(&c->view, side, head, l, a);
                double sigma = ref_ladder_sigma(&c->view, side, head, a), best = INFINITY;
                if (width == 0)
                    continue;
                for (uint32_t n = 0; n < 1u << width; n++)
                    best = fmin(best, fabs(gain * sigma * ref_ladder_value(n, width) - scaled[a]));
                double have = fabs(z[t * coords + a] - scaled[a]);
                c->codes++;
                /* 40 u of the parts: residual, turn, and a dot product with a column; decision boundaries are rounded to
                   four decimals like the levels */
                double tol = 40 * REF_U * c->size[t] + 2e-4 * gain * sigma;
                c->other_code += have > best * (1 + 1e-12);
                CHECK_MSG(have <= best + tol, "%s: side %d head %u token %llu coordinate %u: %.6g is coded as %.6g", c->name, side,
                          head, (unsigned long long)t, a, scaled[a], z[t * coords + a]);
            }
            break;
        }
    }
    free(z);
}

/* Value levels in use lie on the upper hull of (bits, energy saved): a mixture of two others must not save more. */
static void check_hull(const ctx *c, uint32_t head, const unsigned long *used)
{
    static const double left[5] = {1, 0.3634, 0.1175, 0, 0.009497};
    uint32_t coords = ref_ladder_coords(&c->view, AKV_SIDE_V), L = c->h->num_levels;
    double cost[16] = {0}, saved[16] = {0};
    for (uint32_t l = 1; l <= L; l++) {
        cost[l] = 4 + ref_ladder_level_bits(&c->view, AKV_SIDE_V, head, l); /* 4 of the gain */
        for (uint32_t a = 0; a < coords; a++) {
            double s = ref_ladder_sigma(&c->view, AKV_SIDE_V, head, a);
            saved[l] += s * s * (1 - left[ref_ladder_bits(&c->view, AKV_SIDE_V, head, l, a)]);
        }
    }
    for (uint32_t m = 1; m < L; m++)
        for (uint32_t a = 0; a < m && used[m] > 0; a++)
            for (uint32_t b = m + 1; b <= L; b++) {
                double share = cost[b] > cost[a] ? (cost[m] - cost[a]) / (cost[b] - cost[a]) : 0;
                double mixed = saved[a] + share * (saved[b] - saved[a]);
                CHECK_MSG(saved[m] >= mixed - 0.005 * saved[L], "%s: head %u level %u is used, levels %u and %u save more",
                          c->name, head, m, a, b);
            }
}

/* Returns the energy that anchors leave. */
static double run(const spec *s, const akv_experiment *experiment)
{
    fixture f;
    fixture_make(s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    f.config.experiment = experiment;
    akv_experiment defaults;
    akv_experiment_init_default(&defaults);
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
    if (segment == NULL) {
        fixture_free(&f);
        return 0;
    }
    ctx c = {.name = s->name, .in = &f.layer, .options = experiment != NULL ? experiment : &defaults};
    c.h = akv_segment_data(segment, NULL);
    c.view = ref_view_of(c.h);
    CHECK_MSG(c.options->basis_cols > 0 || (c.h->basis_dim[0] == 0 && c.h->basis_dim[1] == 0), "%s: bases of %u and %u",
              s->name, c.h->basis_dim[0], c.h->basis_dim[1]);
    if (!CHECK_MSG(c.h->kind == AKV_SEGMENT_COMPRESSED && c.h->coding == AKV_CODING_LADDER, "%s: not compressed", s->name)) {
        akv_segment_release(segment);
        fixture_free(&f);
        return 0;
    }
    must(ref_layer_load(&f.layer, &c.layer) ? &c : NULL);
    uint32_t most = s->dk > s->dv ? s->dk : s->dv;
    c.x = must(malloc(s->S * most * sizeof(double)));
    c.r = must(malloc(s->S * most * sizeof(double)));
    c.size = must(malloc(s->S * sizeof(double)));
    double *u = must(malloc((size_t)most * most * sizeof *u)), energy[2][16] = {{0}}, error[2][16] = {{0}};
    unsigned long used[2][16] = {{0}}, residuals[2] = {0, 0};
    bool all_at_top = true;
    check_coords(&c);
    for (uint32_t head = 0; head < s->H; head++)
        for (int side = 0; side < 2; side++) {
            unsigned long here[16] = {0};
            uint32_t row_bits[16] = {0}; /* upper levels may be equal: 4 bits a coordinate is the most */
            for (uint32_t l = 1; l <= c.h->num_levels; l++)
                row_bits[l] = ref_ladder_level_bits(&c.view, side, head, l);
            load_rows(&c, side, head);
            check_anchors(&c, side, head);
            check_projection(&c, side, head);
            check_model(&c, side, head, u);
            check_codes(&c, side, head, u, energy[side], error[side]);
            for (uint64_t t = 0; t < s->S; t++) {
                uint32_t l = ref_ladder_level(&c.view, side, head, t);
                here[l]++;
                residuals[side] += l > 0;
                all_at_top &= is_anchor(&c, head, t) || (l > 0 && row_bits[l] == row_bits[c.h->num_levels]);
            }
            if (side == AKV_SIDE_V) {
                check_water(&c, head);
                check_hull(&c, head, here);
            }
            for (int l = 0; l < 16; l++)
                used[side][l] += here[l];
        }
    for (int side = 0; side < 2; side++) {
        CHECK(residuals[side] == c.h->num_residuals[side]);
        for (uint32_t l = 1; l <= c.h->num_levels; l++)
            CHECK_MSG(error[side][l] <= energy[side][l], "%s: side %d level %u: %.4g of residual energy becomes %.4g", s->name, side,
                      l, energy[side][l], error[side][l]);
        if (getenv("AKV_TEST_VERBOSE") != NULL)
            for (uint32_t l = 1; l <= c.h->num_levels; l++)
                printf("  %s side %d level %u: %lu residuals, %.3f of the energy left\n", s->name, side, l, used[side][l],
                       error[side][l] / energy[side][l]);
    }
    /* the budget is spent: one more step of one token (top level, its gain, rounding of two runs) would not fit */
    const uint64_t *offsets = (const uint64_t *)(c.view.bytes + c.h->sections[AKV_SEC_RANKS].offset);
    uint64_t spent = offsets[s->H * ((s->S + 1023) / 1024) * 2];
    CHECK_MSG(spent <= c.h->code_bytes, "%s: %llu bytes of codes in %llu", s->name, (unsigned long long)spent,
              (unsigned long long)c.h->code_bytes);
    CHECK_MSG(all_at_top || c.options->anchors_only || c.h->code_bytes - spent <= c.options->level_bits[c.h->num_levels - 1] / 8u + 4,
              "%s: %llu of %llu code bytes are unused", s->name, (unsigned long long)(c.h->code_bytes - spent),
              (unsigned long long)c.h->code_bytes);
    CHECK_MSG(c.coded_error <= gain_room(s) * c.best_error, "%s: the stored gains leave %.5g, the best of the grid %.5g", s->name,
              c.coded_error, c.best_error);
    if (getenv("AKV_TEST_VERBOSE") != NULL)
        printf("  %s: %.4f times the error of the best gains\n", s->name, c.coded_error / c.best_error);
    if (getenv("AKV_TEST_VERBOSE") != NULL)
        printf("  %s: %llu of %llu code bytes, %lu near-ties of anchors, %lu of %lu codes\n", s->name, (unsigned long long)spent,
               (unsigned long long)c.h->code_bytes, c.other_anchor, c.other_code, c.codes);
    check_decode(s->name, segment);
    free(u);
    free(c.x);
    free(c.r);
    free(c.size);
    ref_layer_free(&c.layer);
    akv_segment_release(segment);
    fixture_free(&f);
    return c.residual_energy;
}

#define CASE(...)                                                                                                        \
    run(&(spec){.S = 500, .H = 2, .G = 2, .dk = 64, .dv = 64, .W = 16, .rotary = 64, .keep = 0.2, .dtype = AKV_F16, __VA_ARGS__}, \
        NULL)

static void head_dims(void)
{
    const uint32_t dims[][2] = {{64, 64}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {192, 128}, {256, 256}, {64, 128}, {10, 6}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "dk %u dv %u", dims[i][0], dims[i][1]);
        CASE(.name = name, .dk = dims[i][0], .dv = dims[i][1], .rotary = dims[i][0], .H = 1, .S = 700,
             .keep = dims[i][0] < 16 ? 0.6 : 0.25, .style = (akv_rope_style)(i % 2), .seed = i);
    }
}

static void variants(void)
{
    CASE(.name = "partial rotary", .rotary = 24, .seed = 1);
    CASE(.name = "no rotation", .rotary = 0, .seed = 2);
    CASE(.name = "YaRN", .magnitude = 1.2, .style = AKV_ROPE_INTERLEAVED, .seed = 3);
    CASE(.name = "soft-cap", .softcap = 20, .seed = 4);
    CASE(.name = "gaps", .gaps = 1, .first_position = 77, .seed = 5);
    CASE(.name = "negative", .first_position = -300, .seed = 6);
    CASE(.name = "late", .first_position = 100000, .seed = 7);
    CASE(.name = "f32, padded", .dtype = AKV_F32, .layout_k = LAY_PADDED, .layout_v = LAY_REVERSED, .seed = 8);
    CASE(.name = "bf16, transposed", .dtype = AKV_BF16, .layout_k = LAY_TRANSPOSED, .layout_q = LAY_TOKEN_MAJOR, .seed = 9);
    const uint32_t groups[] = {1, 3, 4, 6, 8};
    for (uint32_t i = 0; i < 5; i++)
        CASE(.name = "group", .G = groups[i], .H = 1 + i % 3, .seed = 10 + i);
    const double keep[] = {0.1, 0.4, 0.6, 0.8};
    for (int i = 0; i < 4; i++)
        CASE(.name = "keep", .keep = keep[i], .S = 900, .seed = 20 + (uint64_t)i);
    const uint64_t lengths[] = {150, 1023, 1024, 1025, 2049};
    for (int i = 0; i < 5; i++)
        CASE(.name = "length", .S = lengths[i], .H = 1, .keep = 0.2, .seed = 30 + (uint64_t)i);
}

static void settings(void)
{
    akv_experiment e;
    spec s = {.name = "settings", .S = 600, .H = 2, .G = 2, .dk = 64, .dv = 48, .W = 16, .rotary = 64, .keep = 0.3, .seed = 40};
    akv_experiment_init_default(&e);
    e.anchors_only = 1;
    run(&s, &e);
    akv_experiment_init_default(&e);
    e.basis_cols = 20;
    run(&s, &e);
    akv_experiment_init_default(&e);
    e.basis_cols = 0;
    run(&s, &e);
    akv_experiment_init_default(&e);
    e.slow_angle = 0;
    run(&s, &e);
    akv_experiment_init_default(&e);
    e.num_levels = 1;
    e.level_bits[0] = 100;
    run(&s, &e);
    akv_experiment_init_default(&e);
    e.num_levels = 15;
    for (uint16_t l = 0; l < 15; l++)
        e.level_bits[l] = (uint16_t)(10 + 17 * l);
    e.uniform_anchors = 1;
    e.sinks = 0;
    run(&s, &e);
}

/* Free anchors as directions of many tokens explain more than the tokens they came from; and every round explains more. */
static void centroids(void)
{
    spec s = {.name = "centroids", .S = 2000, .H = 2, .G = 2, .dk = 64, .dv = 64, .W = 16, .rotary = 64, .keep = 0.2, .seed = 50};
    akv_experiment e;
    const uint32_t rounds[] = {0, 1, 4};
    double energy[3];
    for (int i = 0; i < 3; i++) {
        akv_experiment_init_default(&e);
        e.anchor_rounds = rounds[i];
        energy[i] = run(&s, &e);
        if (getenv("AKV_TEST_VERBOSE") != NULL)
            printf("  %u rounds leave %.6g\n", rounds[i], energy[i]);
    }
    CHECK_MSG(energy[1] < 0.98 * energy[0], "one round leaves %.6g, tokens %.6g", energy[1], energy[0]);
    CHECK_MSG(energy[2] < energy[1], "four rounds leave %.6g, one %.6g", energy[2], energy[1]);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(head_dims);
    TEST(variants);
    TEST(settings);
    TEST(centroids);
    return TEST_DONE();
}
