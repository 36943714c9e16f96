/* SPDX-License-Identifier: Apache-2.0 */
/*
 * made_layer.h - a made-up layer of realistic statistics for the GPU's measurements: topics that come and go, decaying
 * spectra, biased keys, queries that lean on a topic each.
 */
#ifndef AKV_BENCH_MADE_LAYER_H
#define AKV_BENCH_MADE_LAYER_H

#include <anchorkv/anchorkv.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MADE_QUERIES 32
#define TOPICS 96
#define ROPE_BASE 500000.0

static uint64_t state = 1;

static double uniform(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
}

static float gauss(void) /* twelve uniforms less six: fast and near enough */
{
    double x = -6;
    for (int i = 0; i < 12; i++)
        x += uniform();
    return (float)x;
}

static uint16_t bf16(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static void turn(float *x, int dim, const double *inv_freq, double position)
{
    for (int j = 0; j < dim / 2; j++) {
        double a = position * inv_freq[j], c = cos(a), s = sin(a), x0 = x[j], x1 = x[j + dim / 2];
        x[j] = (float)(x0 * c - x1 * s);
        x[j + dim / 2] = (float)(x0 * s + x1 * c);
    }
}

/*
 * Keys and values in bf16 [H, S, d], queries in f32 [H * G, 32, d], frequencies; all from malloc. Returns 0 without
 * memory.
 */
static int make_layer(uint64_t S, int H, int G, int d, akv_layer *layer)
{
    const int W = MADE_QUERIES;
    uint16_t *k = malloc((size_t)H * S * d * 2), *v = malloc((size_t)H * S * d * 2);
    float *q = malloc((size_t)H * G * W * d * sizeof *q), *topic = malloc((size_t)2 * TOPICS * d * sizeof *topic);
    double *inv_freq = malloc((size_t)d / 2 * sizeof *inv_freq);
    float *mean = malloc((size_t)d * sizeof *mean), *row = malloc((size_t)d * sizeof *row),
          *size = malloc((size_t)d * sizeof *size);
    uint8_t *topic_of = malloc(S);
    if (!k || !v || !q || !topic || !inv_freq || !mean || !row || !size || !topic_of)
        return 0;
    for (int j = 0; j < d / 2; j++)
        inv_freq[j] = pow(ROPE_BASE, -2.0 * j / d);
    for (uint64_t t = 0, left = 0; t < S; t++, left--) { /* a topic lasts some 40 tokens */
        if (left == 0)
            left = 1 + (uint64_t)(80 * uniform());
        topic_of[t] = left == 1 || t == 0 ? (uint8_t)(TOPICS * uniform()) : topic_of[t - 1];
    }
    for (int h = 0; h < H; h++) {
        for (int i = 0; i < d; i++) {
            size[i] = expf(-2.0f * (float)((i * 37) % d) / (float)d); /* spectrum, scattered over the coordinates */
            mean[i] = 1.5f * gauss();
        }
        for (int i = 0; i < 2 * TOPICS * d; i++)
            topic[i] = 1.3f * gauss() * size[i % d];
        for (uint64_t t = 0; t < S; t++) {
            const float *c = topic + (size_t)topic_of[t] * d;
            for (int i = 0; i < d; i++)
                row[i] = mean[i] + c[i] + 1.3f * gauss() * size[i];
            turn(row, d, inv_freq, (double)t);
            for (int i = 0; i < d; i++)
                k[((size_t)h * S + t) * d + i] = bf16(row[i]);
            c += TOPICS * d;
            for (int i = 0; i < d; i++)
                v[((size_t)h * S + t) * d + i] = bf16(c[i] + 0.45f * gauss() * size[i]);
        }
        for (int r = 0; r < G * W; r++) { /* leans on one topic, at the end of the segment */
            float *x = q + ((size_t)h * G * W + r) * d;
            const float *c = topic + (size_t)(TOPICS * uniform()) * d;
            for (int i = 0; i < d; i++)
                x[i] = 1.2f * gauss() + 1.2f * c[i];
            turn(x, d, inv_freq, (double)(S - W + r % W));
        }
    }
    free(topic);
    free(mean);
    free(row);
    free(size);
    free(topic_of);
    akv_layer_init(layer);
    layer->shape.num_tokens = S;
    layer->shape.num_kv_heads = (uint32_t)H;
    layer->shape.gqa_group = (uint32_t)G;
    layer->shape.head_dim_k = layer->shape.head_dim_v = layer->shape.rotary_dim = (uint32_t)d;
    layer->shape.num_queries = (uint32_t)W;
    layer->keys = akv_tensor_contiguous(k, AKV_BF16, S, (uint32_t)d);
    layer->values = akv_tensor_contiguous(v, AKV_BF16, S, (uint32_t)d);
    layer->queries = akv_tensor_contiguous(q, AKV_F32, (uint64_t)W, (uint32_t)d);
    layer->rope.rotary_dim = (uint32_t)d;
    layer->rope.inv_freq = inv_freq;
    layer->sm_scale = 1 / sqrt(d);
    return 1;
}

#endif
