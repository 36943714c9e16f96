/* SPDX-License-Identifier: Apache-2.0 */
/*
 * minimal.c - the library in one page: make one layer's cache, compress it to a tenth of its bytes, attend to it, and
 * compare with attention over the dense cache. The numbers are synthetic: keys and values lie near a few directions, as
 * those of real models do, and carry no rotary embedding.
 *
 *   cc minimal.c $(pkg-config --cflags --libs anchorkv) -lm && ./a.out
 */
#include <anchorkv/anchorkv.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2, GROUP = 2, TOKENS = 4096, DIM = 64, QUERIES = 32, TOPICS = 24 };

static float noise(uint64_t *state) /* uniform in [-1, 1) */
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

static float *make_rows(size_t rows, float spread, uint64_t seed) /* [rows, DIM] */
{
    float *out = malloc(rows * DIM * sizeof(float));
    if (out == NULL)
        exit(1);
    for (size_t r = 0; r < rows; r++) {
        uint64_t topic = r * 2654435761u % TOPICS + 1, own = seed + r;
        for (size_t i = 0; i < DIM; i++)
            out[r * DIM + i] = noise(&topic) + spread * noise(&own);
    }
    return out;
}

/* One attention step over a segment, or over the dense cache when segment is NULL. */
static float *attend(const akv_layer *layer, const akv_segment *segment, akv_diag *diag)
{
    akv_attend_params params;
    akv_attend_params_init(&params);
    params.num_kv_heads = HEADS;
    params.gqa_group = GROUP;
    params.head_dim_k = params.head_dim_v = DIM;
    params.num_queries = QUERIES;
    params.queries = layer->queries;
    params.segments = &segment;
    params.num_segments = segment != NULL;
    if (segment == NULL) { /* everything in the dense tail, visible to every query */
        static const float visible[TOKENS];
        params.tail_tokens = TOKENS;
        params.tail_keys = layer->keys;
        params.tail_values = layer->values;
        params.tail_mask = (akv_tensor){visible, AKV_F32, 0, 0, 1};
    }
    params.sm_scale = layer->sm_scale;
    params.out = malloc(sizeof(float) * HEADS * GROUP * QUERIES * DIM);
    params.out_stride_head = QUERIES * DIM;
    params.out_stride_token = DIM;

    size_t bytes = 0;
    void *workspace = NULL;
    if (params.out == NULL || akv_attend_workspace_bytes(&params, &bytes, diag) != AKV_OK ||
        (workspace = aligned_alloc(64, (bytes + 64) / 64 * 64)) == NULL ||
        akv_attend(&params, workspace, bytes, diag) != AKV_OK) {
        fprintf(stderr, "attend: %s\n", diag->message);
        exit(1);
    }
    free(workspace);
    return params.out;
}

int main(void)
{
    float *keys = make_rows((size_t)HEADS * TOKENS, 0.3f, 1), *values = make_rows((size_t)HEADS * TOKENS, 0.3f, 2);
    float *queries = make_rows((size_t)HEADS * GROUP * QUERIES, 0.3f, 3);

    akv_layer layer;
    akv_layer_init(&layer);
    layer.shape.num_tokens = TOKENS;
    layer.shape.num_kv_heads = HEADS;
    layer.shape.gqa_group = GROUP;
    layer.shape.head_dim_k = layer.shape.head_dim_v = DIM;
    layer.shape.num_queries = QUERIES;
    layer.keys = akv_tensor_contiguous(keys, AKV_F32, TOKENS, DIM);
    layer.values = akv_tensor_contiguous(values, AKV_F32, TOKENS, DIM);
    layer.queries = akv_tensor_contiguous(queries, AKV_F32, QUERIES, DIM);
    layer.rope.magnitude = 1.0; /* rope.rotary_dim stays 0: no rotation */
    layer.sm_scale = 1.0 / sqrt(DIM);

    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = 0.1;

    akv_diag diag = {AKV_OK, ""};
    akv_segment *segment = NULL;
    if (akv_compress(&layer, &config, &segment, &diag) != AKV_OK) {
        fprintf(stderr, "compress: %s\n", diag.message);
        return 1;
    }
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, &diag);

    float *exact = attend(&layer, NULL, &diag), *compressed = attend(&layer, segment, &diag);
    double error = 0.0, energy = 0.0;
    for (size_t i = 0; i < (size_t)HEADS * GROUP * QUERIES * DIM; i++) {
        error += pow((double)compressed[i] - exact[i], 2.0);
        energy += (double)exact[i] * exact[i];
    }
    printf("%d tokens: %llu -> %llu bytes, ratio %.2f, relative error of the attention output %.4f\n", TOKENS,
           (unsigned long long)info.dense_bytes, (unsigned long long)info.bytes.total,
           (double)info.dense_bytes / (double)info.bytes.total, sqrt(error / energy));

    akv_segment_release(segment);
    free(keys), free(values), free(queries), free(exact), free(compressed);
    /* What a caller may rely on: the budget holds, and the output is recognisably the exact one. */
    return (double)info.bytes.total <= 0.1 * (double)info.dense_bytes && error < 0.25 * energy ? 0 : 1;
}
