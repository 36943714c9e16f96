/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope.c - the host's rotary table against ggml's own operator: both pairings, partial rotation, linear scaling, YaRN,
 * and frequency factors. And what the graph says about tiny models must be what their files say.
 */
#include "common.h"

#include "host.h"

#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <string.h>

enum { DIM = 128, POSITIONS = 6 };

typedef struct rope_case {
    const char *name;
    int mode;
    akvl_rope_params p;
    int factors;
} rope_case;

static void check_case(const rope_case *c)
{
    static const int32_t positions[POSITIONS] = {0, 1, 37, 1000, 8191, 100000};
    const struct ggml_init_params init = {.mem_size = (size_t)4 << 20};
    struct ggml_context *ctx = ggml_init(init);
    CHECK(ctx, "no memory");
    struct ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, DIM, 1, POSITIONS);
    struct ggml_tensor *pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, POSITIONS);
    struct ggml_tensor *ff = c->factors ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c->p.n_dims / 2) : NULL;
    memcpy(pos->data, positions, sizeof positions);
    float *in = x->data;
    for (int i = 0; i < DIM * POSITIONS; i++)
        in[i] = (float)sin(1.0 + 0.7 * i) + 0.25f;
    for (int i = 0; ff && i < c->p.n_dims / 2; i++)
        ((float *)ff->data)[i] = 1.0f + 7.0f * (float)i / (float)c->p.n_dims;
    struct ggml_tensor *y =
        ggml_rope_ext(ctx, x, pos, ff, c->p.n_dims, c->mode, c->p.n_ctx_orig, c->p.freq_base, c->p.freq_scale,
                      c->p.ext_factor, c->p.attn_factor, c->p.beta_fast, c->p.beta_slow);
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, y);
    CHECK(ggml_graph_compute_with_ctx(ctx, graph, 1) == GGML_STATUS_SUCCESS, "ggml");

    double inv_freq[DIM / 2];
    const double magnitude = akvl_rope_table(&c->p, ff ? ff->data : NULL, inv_freq);
    const int planes = c->p.n_dims / 2;
    double worst = 0.0;
    for (int t = 0; t < POSITIONS; t++) {
        const float *got = (const float *)y->data + t * DIM, *from = in + t * DIM;
        for (int j = 0; j < planes; j++) {
            const int a = c->mode == GGML_ROPE_TYPE_NEOX ? j : 2 * j,
                      b = c->mode == GGML_ROPE_TYPE_NEOX ? j + planes : 2 * j + 1;
            const double angle = positions[t] * inv_freq[j];
            const double want_a = magnitude * (from[a] * cos(angle) - from[b] * sin(angle));
            const double want_b = magnitude * (from[a] * sin(angle) + from[b] * cos(angle));
            /* ggml multiplies its angle up to plane j in float: j + 4 roundings of the angle, and a few of the result
             */
            const double length = magnitude * hypot(from[a], from[b]);
            const double allowed = length * ldexp((j + 4) * fabs(angle) + 8.0, -24);
            const double error = fmax(fabs(got[a] - want_a), fabs(got[b] - want_b));
            CHECK(error <= allowed, "%s: position %d plane %d: error %g, allowed %g", c->name, positions[t], j, error,
                  allowed);
            if (t <= 3)
                worst = fmax(worst, error / length);
        }
        for (int i = c->p.n_dims; i < DIM; i++)
            CHECK(got[i] == from[i], "%s: coordinate %d is not rotated", c->name, i);
    }
    printf("%-32s largest relative error up to position 1000: %.1e\n", c->name, worst);
    ggml_free(ctx);
}

int main(void)
{
    const akvl_rope_params plain = {.n_dims = DIM,
                                    .n_ctx_orig = 4096,
                                    .freq_base = 10000.0f,
                                    .freq_scale = 1.0f,
                                    .attn_factor = 1.0f,
                                    .beta_fast = 32.0f,
                                    .beta_slow = 1.0f};
    akvl_rope_params partial = plain, linear = plain, yarn = plain, yarn_mixed = plain, wide = plain;
    partial.n_dims = 96;
    linear.freq_scale = 0.25f;
    yarn.ext_factor = 1.0f;
    yarn.freq_scale = 0.125f;
    yarn.freq_base = 1e6f;
    yarn_mixed.ext_factor = 0.5f;
    yarn_mixed.freq_scale = 0.25f;
    yarn_mixed.attn_factor = 0.87f;
    yarn_mixed.beta_fast = 24.0f;
    yarn_mixed.n_dims = 64;
    wide.freq_base = 500000.0f;
    const struct {
        const char *name;
        const akvl_rope_params *p;
        int factors;
    } kinds[] = {{"plain", &plain, 0},
                 {"partial", &partial, 0},
                 {"linear", &linear, 0},
                 {"yarn", &yarn, 0},
                 {"yarn, mixed", &yarn_mixed, 0},
                 {"frequency factors", &wide, 1},
                 {"yarn with factors", &yarn, 1}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        for (int neox = 0; neox < 2; neox++) {
            char name[64];
            snprintf(name, sizeof name, "%s, %s", kinds[i].name, neox ? "half-split" : "interleaved");
            const rope_case c = {name, neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, *kinds[i].p,
                                 kinds[i].factors};
            check_case(&c);
        }
    }
    return 0;
}
