/* SPDX-License-Identifier: Apache-2.0 */
/*
 * make_document.c - a small but complete .akv file from random keys and values, to test the program without a model.
 *
 * usage: make_document FILE [paper]
 */
#include <anchorkv/akv_document.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, TOKENS = 400, HEADS = 2, GROUP = 2, DIM = 32, WINDOW = 16 };

static akv_status to_file(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    (void)diag;
    return fwrite(data, 1, bytes, opaque) == bytes ? AKV_OK : AKV_E_IO;
}

static float noise(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) / (float)(1u << 23) - 1.0f;
}

static int stop(const akv_diag *diag)
{
    fprintf(stderr, "make_document: %s\n", diag->message);
    return 1;
}

int main(int argc, char **argv)
{
    static float keys[HEADS * TOKENS * DIM], values[HEADS * TOKENS * DIM], queries[HEADS * GROUP * WINDOW * DIM];
    double inv_freq[DIM / 2];
    int32_t tokens[TOKENS];
    akv_segment *segments[LAYERS];
    akv_document_layer layers[LAYERS];
    akv_diag diag = {AKV_OK, ""};
    uint64_t state = 1;
    if (argc != 2 && (argc != 3 || strcmp(argv[2], "paper") != 0))
        return 1;
    const akv_profile profile = argc == 3 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
    memset(layers, 0, sizeof layers);
    for (int i = 0; i < TOKENS; i++)
        tokens[i] = i;
    for (int j = 0; j < DIM / 2; j++)
        inv_freq[j] = 1.0 / (1 + j);
    for (uint32_t l = 0; l < LAYERS; l++) {
        akv_layer layer;
        akv_config config;
        akv_layer_init(&layer);
        akv_config_init(&config);
        config.profile = profile;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            keys[i] = noise(&state);
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
            values[i] = noise(&state);
        for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++)
            queries[i] = noise(&state);
        layer.layer_index = (int32_t)l;
        layer.shape.num_tokens = TOKENS;
        layer.shape.num_kv_heads = HEADS;
        layer.shape.gqa_group = GROUP;
        layer.shape.head_dim_k = layer.shape.head_dim_v = layer.shape.rotary_dim = DIM;
        layer.shape.num_queries = WINDOW;
        layer.keys = akv_tensor_contiguous(keys, AKV_F32, TOKENS, DIM);
        layer.values = akv_tensor_contiguous(values, AKV_F32, TOKENS, DIM);
        layer.queries = akv_tensor_contiguous(queries, AKV_F32, WINDOW, DIM);
        layer.rope.rotary_dim = DIM;
        layer.rope.inv_freq = inv_freq;
        layer.sm_scale = 0.18;
        config.keep_ratio = 0.3;
        if (akv_compress(&layer, &config, &segments[l], &diag) != AKV_OK)
            return stop(&diag);
        layers[l].num_kv_heads = HEADS;
        layers[l].gqa_group = GROUP;
        layers[l].head_dim_k = layers[l].head_dim_v = layers[l].rotary_dim = DIM;
        layers[l].rope_magnitude = 1.0;
        layers[l].sm_scale = 0.18;
        layers[l].num_segments = 1;
        layers[l].first_segment = l;
    }
    const akv_document_property properties[] = {
        {"source", "noise.txt"}, {"profile", argc == 3 ? "paper" : "default"}, {"keep_ratio", "0.3"}};
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    parts.model.num_layers = LAYERS;
    strcpy(parts.model.description, "noise");
    parts.tokens = tokens;
    parts.num_tokens = TOKENS;
    parts.next_position = TOKENS;
    parts.layers = layers;
    parts.num_layers = LAYERS;
    parts.segments = segments;
    parts.num_segments = LAYERS;
    parts.properties = properties;
    parts.num_properties = 3;
    FILE *file = fopen(argv[1], "wb");
    if (file == NULL)
        return 1;
    akv_status status = akv_document_write(&parts, to_file, file, NULL, &diag);
    for (int l = 0; l < LAYERS; l++)
        akv_segment_release(segments[l]);
    if (fclose(file) != 0 || status != AKV_OK)
        return stop(&diag);
    return 0;
}
