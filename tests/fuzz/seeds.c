/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seeds.c - the inputs to begin with: segments of both profiles, dense ones, with gaps; small documents; and bytes that
 * fuzz_compress turns into layers.
 *
 * usage: seeds FOLDER        makes FOLDER/segment, FOLDER/document, FOLDER/compress
 */
#include "cases.h"

#include <anchorkv/akv_document.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *g_folder;

static FILE *create(const char *kind, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", g_folder, kind);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s/%s", g_folder, kind, name);
    FILE *file = fopen(path, "wb");
    if (!file) {
        perror(path);
        exit(1);
    }
    return file;
}

static akv_status to_file(void *opaque, const void *data, size_t bytes, akv_diag *diag)
{
    (void)diag;
    return fwrite(data, 1, bytes, opaque) == bytes ? AKV_OK : AKV_E_IO;
}

static void write_document(const char *name, akv_segment *segment)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    akv_document_layer layers[2];
    memset(layers, 0, sizeof layers);
    layers[0].num_kv_heads = info.shape.num_kv_heads;
    layers[0].gqa_group = info.shape.gqa_group;
    layers[0].head_dim_k = info.shape.head_dim_k;
    layers[0].head_dim_v = info.shape.head_dim_v;
    layers[0].rotary_dim = info.shape.rotary_dim;
    layers[0].rope_magnitude = 1.0;
    layers[0].sm_scale = 0.25;
    layers[0].num_segments = 1;
    layers[1].kind = AKV_DOCUMENT_LAYER_NO_CACHE;
    int32_t tokens[2048];
    const akv_document_property properties[] = {{"source", "seed"}, {"profile", "any"}};
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    for (int i = 0; i < 2048; i++)
        tokens[i] = i;
    parts.model.num_layers = parts.num_layers = 2;
    strcpy(parts.model.description, "none");
    parts.tokens = tokens;
    parts.num_tokens = info.shape.num_tokens;
    parts.next_position = (int32_t)info.shape.num_tokens * 4;
    parts.layers = layers;
    parts.segments = &segment;
    parts.num_segments = 1;
    parts.properties = properties;
    parts.num_properties = 2;
    FILE *file = create("document", name);
    const akv_status status = akv_document_write(&parts, to_file, file, NULL, &diag);
    if (status != AKV_OK || fclose(file) != 0) {
        fprintf(stderr, "seeds: %s: %s\n", name, diag.message);
        exit(1);
    }
}

static void write_segment(const char *name, akv_segment *segment, bool document)
{
    size_t bytes = 0;
    const void *data = akv_segment_data(segment, &bytes);
    FILE *file = create("segment", name);
    if (fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        exit(1);
    if (document)
        write_document(name, segment);
    akv_segment_release(segment);
}

static void write_layers(void)
{
    static const spec specs[] = {
        {.name = "plain", .S = 90, .H = 2, .G = 2, .dk = 16, .dv = 12, .W = 8, .rotary = 12, .keep = 0.4, .dtype = AKV_F16},
        {.name = "gaps", .S = 120, .H = 1, .G = 3, .dk = 8, .dv = 8, .W = 4, .rotary = 8, .keep = 0.5, .gaps = 1},
        {.name = "tight", .S = 300, .H = 2, .G = 1, .dk = 16, .dv = 16, .W = 4, .rotary = 16, .keep = 0.25, .dtype = AKV_BF16},
        {.name = "dense", .S = 20, .H = 1, .G = 1, .dk = 6, .dv = 10, .W = 4, .keep = 1.0, .dtype = AKV_F32},
    };
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++) {
        for (int profile = AKV_PROFILE_PAPER; profile <= AKV_PROFILE_DEFAULT; profile++) {
            fixture f;
            char name[64];
            akv_segment *segment = NULL;
            akv_diag diag = {AKV_OK, ""};
            fixture_make(&specs[i], &f);
            f.config.profile = (akv_profile)profile;
            snprintf(name, sizeof name, "%s-%d", specs[i].name, profile);
            akv_status status = akv_compress(&f.layer, &f.config, &segment, &diag);
            while (status == AKV_E_INFEASIBLE) { /* small layers need a large share of their few bytes */
                f.config.keep_ratio += 0.1;
                status = akv_compress(&f.layer, &f.config, &segment, &diag);
            }
            if (status != AKV_OK) {
                fprintf(stderr, "seeds: %s: %s\n", name, diag.message);
                exit(1);
            }
            write_segment(name, segment, true);
            fixture_free(&f);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 1;
    g_folder = argv[1];
    mkdir(g_folder, 0777);
    write_layers();
    for (int i = 0; i < 6; i++) {
        spec s = {.name = "random", .S = 40, .H = 2, .G = 1, .dk = 10, .dv = 14, .W = 2, .rotary = 8, .gaps = i % 2};
        char name[64];
        snprintf(name, sizeof name, "random-%d", i);
        write_segment(name, random_ladder_segment(&s, i < 3 ? 5 : 1, 0.6, (uint64_t)i), i == 0);
    }
    akv_rng rng = {1};
    for (int i = 0; i < 40; i++) {
        char name[64];
        snprintf(name, sizeof name, "layer-%d", i);
        FILE *file = create("compress", name);
        for (int byte = 0; byte < 200; byte++)
            fputc((int)akv_rng_below(&rng, 256), file);
        if (fclose(file) != 0)
            return 1;
    }
    return 0;
}
