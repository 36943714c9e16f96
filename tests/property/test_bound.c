/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bound.c - the method's error bounds on keys and values of a real model. No token leaves the softmax, so
 *
 *   value side: |sum_p a_p (v'_p - v_p)| <= (sum over non-anchors of a_p |v_p|) * max_p |v'_p - v_p| / |v_p|, that
 * factor <= 1; key side:   with e = max_p |l'_p - l_p| every weight changes by a factor within exp(+-2e), so the output
 * moves by at most (exp(2e) - 1) * sum_p a_p |v'_p|.
 *
 * Uses the full captured layers where they are (AKV_LAYER_DATA or ../shared/data beside the checkout), else the extract
 * in tests/data; the output says which.
 */
#include "akv_test.h"
#include "check_segment.h"
#include "npz.h"

static double norm_diff(const double *a, const double *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (a[i] - (b != NULL ? b[i] : 0)) * (a[i] - (b != NULL ? b[i] : 0));
    return sqrt(sum);
}

/* A path under the data folder, or NULL when there is no such file. */
static const char *full_layer(int number)
{
    static char path[4096];
    const char *folder = getenv("AKV_LAYER_DATA");
    snprintf(path, sizeof path, "%s/layer%d.npz", folder != NULL ? folder : AKV_TEST_SHARED_DATA, number);
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return NULL;
    fclose(f);
    return path;
}

/* Both bounds for every `stride`-th observation query of every head. */
static void check_bounds(const char *name, fixture *f, double keep, uint32_t stride)
{
    akv_segment *segment = NULL;
    akv_diag diag = {0};
    f->config.keep_ratio = keep;
    CHECK_STATUS(akv_compress(&f->layer, &f->config, &segment, &diag), AKV_OK, &diag);
    if (segment == NULL)
        return;
    const void *blob = akv_segment_data(segment, NULL);
    ref_view view = ref_view_of(blob);
    ref_layer l;
    must(ref_layer_load(&f->layer, &l) ? f : NULL);
    uint64_t S = l.tokens;
    uint32_t d = l.dim[0], dv = l.dim[1];
    double *k2 = must(malloc(S * d * sizeof *k2)), *v2 = must(malloc(S * dv * sizeof *v2));
    double *a = must(malloc(S * sizeof *a)), *logit = must(malloc(S * sizeof *logit));
    double *y = must(malloc(dv * sizeof *y)), *yv = must(malloc(dv * sizeof *yv)),
           *ykv = must(malloc(dv * sizeof *ykv));
    bool *anchor = must(malloc(S));
    double sum_error = 0, sum_norm = 0, worst_use = 0, worst_factor = 0, worst_with_residual = 0;
    for (uint32_t h = 0; h < l.heads; h++) {
        must(ref_decode(blob, AKV_SIDE_K, h, k2, NULL) && ref_decode(blob, AKV_SIDE_V, h, v2, NULL) ? f : NULL);
        memset(anchor, 0, S);
        for (uint32_t j = 0; j < view.header->num_anchors; j++)
            anchor[ref_view_anchor_token(&view, h, j)] = true;
        const double *v = l.values + h * S * dv, *k = l.keys + h * S * d;
        double factor = 0; /* largest remaining relative error of a value */
        for (uint64_t p = 0; p < S; p++) {
            double v_norm = norm_diff(v + p * dv, NULL, dv), off = norm_diff(v2 + p * dv, v + p * dv, dv);
            if (anchor[p]) {
                /* exact but for bf16: 2^-9 of each coordinate, or half of the smallest subnormal */
                CHECK_MSG(off <= 0x1p-9 * v_norm + 1e-30, "%s: anchor %llu is off by %g of %g", name,
                          (unsigned long long)p, off, v_norm);
                continue;
            }
            if (v_norm == 0)
                continue;
            factor = fmax(factor, off / v_norm);
            if (!ref_view_owns(&view, AKV_SIDE_V, h, p))
                /* sin of the angle to the anchor, and gamma's rounding: 2^-11 of the projection, second order in the
                 * square */
                CHECK_MSG(off <= v_norm * (1 + 0x1p-20), "%s: head %u token %llu: relative projection error %.9g", name,
                          h, (unsigned long long)p, off / v_norm);
            else
                worst_with_residual = fmax(worst_with_residual, off / v_norm);
        }
        CHECK_MSG(factor <= 1 + 0x1p-20, "%s: head %u: the bound's factor is %.9g", name, h, factor);
        worst_factor = fmax(worst_factor, factor);
        for (uint32_t g = 0; g < l.group; g++)
            for (uint32_t r = 0; r < l.window; r += stride) {
                uint32_t qh = h * l.group + g;
                const double *q = l.queries + ((uint64_t)qh * l.window + r) * d;
                uint64_t seen = S - l.window + r + 1;
                ref_attention_row(&l, qh, r, a, logit);
                memset(y, 0, dv * sizeof *y);
                memset(yv, 0, dv * sizeof *yv);
                double outside = 0, inside = 0, shift = 0, moved_mass = 0;
                for (uint64_t p = 0; p < seen; p++) {
                    double dot = 0, v_norm = norm_diff(v + p * dv, NULL, dv);
                    for (uint32_t i = 0; i < d; i++)
                        dot += q[i] * (k2[p * d + i] - k[p * d + i]);
                    shift = fmax(shift, fabs(l.scale * dot)); /* no soft-cap in these models */
                    for (uint32_t i = 0; i < dv; i++) {
                        y[i] += a[p] * v[p * dv + i];
                        yv[i] += a[p] * v2[p * dv + i];
                    }
                    *(anchor[p] ? &inside : &outside) += a[p] * v_norm;
                    moved_mass += a[p] * norm_diff(v2 + p * dv, NULL, dv);
                }
                double value_error = norm_diff(yv, y, dv);
                double value_bound =
                    outside * factor + 0x1p-9 * inside + 1e-12; /* anchors are exact to bf16; 1e-12: doubles */
                CHECK_MSG(value_error <= value_bound, "%s: query head %u row %u: value error %.6g, bound %.6g", name,
                          qh, r, value_error, value_bound);
                worst_use = fmax(worst_use, value_error / value_bound);
                ref_row_result row;
                must(ref_attend_row(q, seen, k2, NULL, d, v2, NULL, dv, NULL, l.scale, l.cap, NULL, ykv, &row) ? f
                                                                                                               : NULL);
                double error = norm_diff(ykv, y, dv), key_bound = expm1(2 * shift) * moved_mass;
                CHECK_MSG(error <= value_bound + key_bound, "%s: query head %u row %u: error %.6g, bound %.6g + %.6g",
                          name, qh, r, error, value_bound, key_bound);
                sum_error += error * error;
                double n = norm_diff(y, NULL, dv);
                sum_norm += n * n;
            }
    }
    printf("  %s keep %g: relative output error %.4f, value error at most %.3f of its bound, factor %.4f (%.4f with "
           "residuals)\n",
           name, keep, sqrt(sum_error / sum_norm), worst_use, worst_factor, worst_with_residual);
    free(k2);
    free(v2);
    free(a);
    free(logit);
    free(y);
    free(yv);
    free(ykv);
    free(anchor);
    ref_layer_free(&l);
    akv_segment_release(segment);
}

static void extract(void)
{
    fixture f;
    if (!CHECK_MSG(fixture_from_npz(AKV_TEST_DATA "/layer12_tail.npz", &f),
                   "tests/data/layer12_tail.npz cannot be read"))
        return;
    check_bounds("extract of layer 12", &f, 0.2, 1);
    check_bounds("extract of layer 12", &f, 0.4, 1);
    fixture_free(&f);
}

/* Every choice of the compressor on real keys and values. */
static void extract_against_reference(void)
{
    fixture f;
    if (!CHECK_MSG(fixture_from_npz(AKV_TEST_DATA "/layer12_tail.npz", &f),
                   "tests/data/layer12_tail.npz cannot be read"))
        return;
    check_stats stats = {0};
    for (int i = 0; i < 2; i++) {
        akv_segment *segment = NULL;
        akv_diag diag = {0};
        f.config.keep_ratio = i == 0 ? 0.2 : 0.35;
        CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
        if (segment != NULL) {
            check_compressed("extract", &f.layer, &f.config, segment, &stats);
            check_decode("extract", segment);
        }
        akv_segment_release(segment);
    }
    printf("  %lu tokens, %lu to another anchor (near-ties); %lu codes, %lu of them other\n", stats.tokens,
           stats.other_anchor, stats.codes, stats.other_code);
    fixture_free(&f);
}

static void full_layers(void)
{
    const int layers[] = {2, 12, 17, 22, 27};
    int found = 0;
    for (size_t i = 0; i < 5; i++) {
        const char *path = full_layer(layers[i]);
        fixture f;
        if (path == NULL || !fixture_from_npz(path, &f))
            continue;
        char name[32];
        snprintf(name, sizeof name, "layer %d", layers[i]);
        found++;
        check_bounds(name, &f, 0.1, 4);
        check_bounds(name, &f, 0.05, 4);
        if (layers[i] == 12) { /* every choice of one full layer: the double-precision pass takes seconds */
            akv_segment *segment = NULL;
            akv_diag diag = {0};
            check_stats stats = {0};
            CHECK_STATUS(akv_compress(&f.layer, &f.config, &segment, &diag), AKV_OK, &diag);
            if (segment != NULL)
                check_compressed(name, &f.layer, &f.config, segment, &stats);
            akv_segment_release(segment);
            printf("  %s: %lu tokens, %lu to another anchor (near-ties); %lu codes, %lu of them other\n", name,
                   stats.tokens, stats.other_anchor, stats.codes, stats.other_code);
        }
        fixture_free(&f);
    }
    printf(found > 0 ? "  used the %d full captured layers\n"
                     : "  the full captured layers are not here (%d found): used the extract alone\n",
           found);
    CHECK(found == 0 || found == 5);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(extract);
    TEST(extract_against_reference);
    TEST(full_layers);
    return TEST_DONE();
}
