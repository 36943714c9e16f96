/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_vs_ggml.c - one decode step of one layer: attention from the compressed form against ggml's flash_attn_ext on an
 * f16 cache, same shape, same machine, same run, one thread, alternating. Prints nanoseconds per token and KV head.
 *
 *   attend_vs_ggml [head_dim] [kv_heads] [group] [tokens]
 *
 * Data: random keys and values with the low-rank structure that real caches have (64 directions plus noise); speed does
 * not depend on it beyond which tokens own residuals.
 */
#include "anchorkv/anchorkv.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t state = 1;

static float gauss(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) / (float)(1 << 24) - 0.5f;
    }
    return sum * 1.7320508f;
}

static void fill(ggml_fp16_t *out, size_t rows, int d)
{
    static float dir[64][1024];
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < d; j++)
            dir[i][j] = gauss();
    for (size_t r = 0; r < rows; r++) {
        int pick = (int)((r * 2654435761u) >> 7) & 63;
        float gain = 0.5f + fabsf(gauss());
        for (int j = 0; j < d; j++)
            out[r * (size_t)d + (size_t)j] = ggml_fp32_to_fp16(gain * dir[pick][j] + 0.5f * gauss());
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const int d = argc > 1 ? atoi(argv[1]) : 128, H = argc > 2 ? atoi(argv[2]) : 8, G = argc > 3 ? atoi(argv[3]) : 4;
    const int S = argc > 4 ? atoi(argv[4]) : 8192, W = 32, rounds = 21;
    if (d < 2 || d > 512 || H < 1 || G < 1 || S < 64) {
        fprintf(stderr, "usage: attend_vs_ggml [head_dim] [kv_heads] [group] [tokens]\n");
        return 1;
    }
    size_t n = (size_t)H * (size_t)S * (size_t)d;
    struct ggml_init_params init = {n * 4 + ((size_t)64 << 20), NULL, false};
    struct ggml_context *ctx = ggml_init(init);
    struct ggml_tensor *q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, d, 1, H * G, 1);
    struct ggml_tensor *k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, d, S, H, 1);
    struct ggml_tensor *v = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, d, S, H, 1);
    struct ggml_tensor *mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, S, 64, 1, 1);
    fill(k->data, (size_t)H * (size_t)S, d);
    fill(v->data, (size_t)H * (size_t)S, d);
    memset(mask->data, 0, ggml_nbytes(mask));
    for (int i = 0; i < d * H * G; i++)
        ((float *)q->data)[i] = gauss();
    struct ggml_tensor *out = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f / sqrtf((float)d), 0.0f, 0.0f);
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);

    double *inv_freq = malloc((size_t)d / 2 * sizeof *inv_freq);
    float *observed = malloc((size_t)(H * G * W * d) * sizeof *observed), *result = malloc((size_t)(H * G * d) * sizeof *result);
    for (int j = 0; j < d / 2; j++)
        inv_freq[j] = pow(1e6, -2.0 * j / d);
    for (int i = 0; i < H * G * W * d; i++)
        observed[i] = gauss();
    akv_diag diag;
    const double ratios[] = {10, 20};
    for (int ri = 0; ri < 2; ri++) {
        akv_layer layer;
        akv_layer_init(&layer);
        layer.shape.num_tokens = (uint64_t)S;
        layer.shape.num_kv_heads = (uint32_t)H;
        layer.shape.gqa_group = (uint32_t)G;
        layer.shape.head_dim_k = layer.shape.head_dim_v = layer.shape.rotary_dim = (uint32_t)d;
        layer.keys = akv_tensor_contiguous(k->data, AKV_F16, (uint64_t)S, (uint32_t)d);
        layer.values = akv_tensor_contiguous(v->data, AKV_F16, (uint64_t)S, (uint32_t)d);
        layer.queries = akv_tensor_contiguous(observed, AKV_F32, (uint64_t)W, (uint32_t)d);
        layer.rope.rotary_dim = (uint32_t)d;
        layer.rope.inv_freq = inv_freq;
        layer.sm_scale = 1.0 / sqrt((double)d);
        akv_config config;
        akv_config_init(&config);
        config.keep_ratio = 1.0 / ratios[ri];
        akv_segment *segment = NULL;
        double t0 = now();
        if (akv_compress(&layer, &config, &segment, &diag) != AKV_OK) {
            fprintf(stderr, "%s\n", diag.message);
            return 1;
        }
        double compress_s = now() - t0;
        const akv_segment *segments[] = {segment};
        akv_attend_params p;
        akv_attend_params_init(&p);
        p.num_kv_heads = (uint32_t)H;
        p.gqa_group = (uint32_t)G;
        p.head_dim_k = p.head_dim_v = (uint32_t)d;
        p.queries = akv_tensor_contiguous(q->data, AKV_F32, 1, (uint32_t)d);
        p.segments = segments;
        p.num_segments = 1;
        p.sm_scale = layer.sm_scale;
        p.out = result;
        p.out_stride_head = d;
        p.out_stride_token = d;
        size_t bytes = 0;
        akv_attend_workspace_bytes(&p, &bytes, &diag);
        void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
        double ours[64], theirs[64];
        for (int i = 0; i < rounds; i++) {
            t0 = now();
            if (akv_attend(&p, workspace, bytes, &diag) != AKV_OK) {
                fprintf(stderr, "%s\n", diag.message);
                return 1;
            }
            ours[i] = now() - t0;
            t0 = now();
            ggml_graph_compute_with_ctx(ctx, graph, 1);
            theirs[i] = now() - t0;
        }
        qsort(ours, (size_t)rounds, sizeof *ours, compare);
        qsort(theirs, (size_t)rounds, sizeof *theirs, compare);
        double per = 1e9 / S / H, a = ours[rounds / 2] * per, b = theirs[rounds / 2] * per;
        printf("d %d, H %d, G %d, %d tokens, %gx, 1 thread: compressed %.0f ns, ggml f16 %.0f ns per token and KV head; "
               "compressed / ggml = %.2f (fastest of each %.0f / %.0f); compression %.2f s\n",
               d, H, G, S, ratios[ri], a, b, a / b, ours[0] * per, theirs[0] * per, compress_s);
        fflush(stdout);
        akv_segment_release(segment);
        free(workspace);
    }
    free(observed);
    free(result);
    free(inv_freq);
    ggml_free(ctx);
    return 0;
}
