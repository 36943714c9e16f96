/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - what an inference engine does with the library, for one layer: compress the cache after the prefill, go on
 * with a dense tail of new tokens, attend to both in one softmax, save the segment, open it again. docs/tutorial.md
 * walks through it.
 *
 *   cc engine.c $(pkg-config --cflags --libs anchorkv) -lm && ./a.out
 */
#include <anchorkv/anchorkv.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 2, G = 3, D = 64, S = 3000, TAIL = 40, W = 32, ALL = S + TAIL }; /* KV heads, group, dim, prompt, new tokens,
                                                                               window */
static double inv_freq[D / 2];

#define TRY(call) ((call) == AKV_OK ? (void)0 : (fprintf(stderr, "%s\n", diag.message), exit(1)))

/* Stands in for the model: rows near a few directions, as keys and values are; turned by their position where asked. */
static void make_rows(float *out, int heads, int first, int rows, uint32_t seed, int rope)
{
    for (int r = 0; r < heads * rows; r++) {
        uint32_t topic = (uint32_t)(r * 7919) % 20 + 1, own = seed + 977u * (uint32_t)r;
        float *x = out + (size_t)r * D;
        for (int i = 0; i < D; i++) {
            topic = topic * 1664525u + 1013904223u, own = own * 1664525u + 1013904223u;
            x[i] = (float)(int32_t)topic * 0x1p-31f + 0.3f * (float)(int32_t)own * 0x1p-31f;
        }
        for (int j = 0; rope && j < D / 2; j++) { /* half-split: coordinates j and j + D/2 */
            double angle = (first + r % rows) * inv_freq[j], a = x[j], b = x[j + D / 2];
            x[j] = (float)(a * cos(angle) - b * sin(angle));
            x[j + D / 2] = (float)(a * sin(angle) + b * cos(angle));
        }
    }
}

/* The plain way, in double: one query of head h over all keys. */
static void attend_dense(const float *q, const float *keys, const float *values, int kv_head, double *out)
{
    static double weight[ALL];
    double sum = 0.0;
    memset(out, 0, D * sizeof *out);
    for (int p = 0; p < ALL; p++) {
        double logit = 0.0;
        for (int i = 0; i < D; i++)
            logit += (double)q[i] * keys[((size_t)kv_head * ALL + p) * D + i];
        sum += weight[p] = exp(logit / sqrt(D)); /* small logits here; an engine takes the largest off first */
    }
    for (int p = 0; p < ALL; p++)
        for (int i = 0; i < D; i++)
            out[i] += weight[p] / sum * values[((size_t)kv_head * ALL + p) * D + i];
}

int main(void)
{
    static float keys[H * ALL * D], values[H * ALL * D], queries[H * G * W * D], query[H * G * D];
    akv_diag diag = {AKV_OK, ""};
    for (int j = 0; j < D / 2; j++)
        inv_freq[j] = pow(10000.0, -2.0 * j / D);
    make_rows(keys, H, 0, ALL, 1, 1);            /* the engine's buffers: room for ALL tokens a head */
    make_rows(values, H, 0, ALL, 2, 0);
    make_rows(queries, H * G, S - W, W, 3, 1);   /* of the last W tokens of the prompt */
    make_rows(query, H * G, ALL - 1, 1, 4, 1);   /* of the newest token */

    /*
     * 1. Describe the cache where it lies; nothing is copied. The strides say that each head has room for ALL tokens.
     */
    akv_layer layer;
    akv_layer_init(&layer);
    layer.shape.num_tokens = S;
    layer.shape.num_kv_heads = H;
    layer.shape.gqa_group = G;
    layer.shape.head_dim_k = layer.shape.head_dim_v = D;
    layer.shape.rotary_dim = layer.rope.rotary_dim = D;
    layer.shape.num_queries = W;
    layer.keys = akv_tensor_contiguous(keys, AKV_F32, ALL, D);
    layer.values = akv_tensor_contiguous(values, AKV_F32, ALL, D);
    layer.queries = akv_tensor_contiguous(queries, AKV_F32, W, D);
    layer.rope.style = AKV_ROPE_HALF_SPLIT;
    layer.rope.magnitude = 1.0;
    layer.rope.inv_freq = inv_freq;
    layer.sm_scale = 1.0 / sqrt(D);

    /* 2. Compress it. From here on the first S tokens of keys and values are not needed any more. */
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = 0.1;
    akv_segment *segment = NULL;
    TRY(akv_compress(&layer, &config, &segment, &diag));
    akv_segment_info info;
    akv_segment_info_init(&info);
    TRY(akv_segment_get_info(segment, &info, &diag));

    /* 3. A decode step: the newest token's queries over the segment and the dense tail behind it, in one softmax. */
    static float out[2][H * G * D];
    akv_attend_params step;
    akv_attend_params_init(&step);
    step.num_kv_heads = H;
    step.gqa_group = G;
    step.head_dim_k = step.head_dim_v = D;
    step.num_queries = 1;
    step.queries = akv_tensor_contiguous(query, AKV_F32, 1, D);
    step.num_segments = 1;
    step.tail_tokens = TAIL;
    step.tail_keys = akv_tensor_contiguous(keys + (size_t)S * D, AKV_F32, ALL, D);
    step.tail_values = akv_tensor_contiguous(values + (size_t)S * D, AKV_F32, ALL, D);
    step.sm_scale = layer.sm_scale;
    step.out_stride_head = step.out_stride_token = D;
    const akv_segment *list = segment;
    step.segments = &list;
    step.out = out[0];
    size_t bytes = 0;
    TRY(akv_attend_workspace_bytes(&step, &bytes, &diag)); /* once per shape; attending itself allocates nothing */
    void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (workspace == NULL)
        return 1;
    TRY(akv_attend(&step, workspace, bytes, &diag));

    /*
     * 4. Save and open: the bytes are the same in memory and on disk, and are checked as a stranger's when they come
     * back.
     */
    size_t size = 0;
    const void *data = akv_segment_data(segment, &size);
    FILE *file = tmpfile();
    void *back = malloc(size);
    if (file == NULL || back == NULL || fwrite(data, 1, size, file) != size || fseek(file, 0, SEEK_SET) != 0 ||
        fread(back, 1, size, file) != size || fclose(file) != 0)
        return 1;
    akv_segment_release(segment);
    TRY(akv_segment_open(back, size, 1, NULL, &segment, &diag));
    free(back); /* opened as a copy; a mapped file would be used in place (copy = 0) */
    list = segment;
    step.out = out[1];
    TRY(akv_attend(&step, workspace, bytes, &diag));

    /* 5. How far off is it? */
    double error = 0.0, energy = 0.0, exact[D];
    for (int h = 0; h < H * G; h++) {
        attend_dense(query + (size_t)h * D, keys, values, h / G, exact);
        for (int i = 0; i < D; i++) {
            error += pow(out[0][h * D + i] - exact[i], 2.0);
            energy += exact[i] * exact[i];
        }
    }
    int same = memcmp(out[0], out[1], sizeof out[0]) == 0;
    printf("%d tokens: %llu -> %llu bytes (%.1fx), %d more dense; relative error of the output %.3f; reopened: %s\n", S,
           (unsigned long long)info.dense_bytes, (unsigned long long)info.bytes.total,
           (double)info.dense_bytes / (double)info.bytes.total, TAIL, sqrt(error / energy),
           same ? "the same bits" : "DIFFERENT");
    akv_segment_release(segment);
    free(workspace);
    return same && error < 0.01 * energy ? 0 : 1; /* 3.4 % were measured, 10 % are allowed */
}
