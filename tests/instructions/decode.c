/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - one decode step over a made-up segment (2048 tokens, one KV head, four query heads, 128 dimensions), so that its
 * instructions can be counted.
 *
 *   decode FILE RATIO    writes the segment (bytes are the same from every machine)
 *   decode FILE          attends to it once
 */
#include "cases.h"

#include <stdio.h>
#include <stdlib.h>

static int stop(const char *what)
{
    fprintf(stderr, "decode: %s\n", what);
    return 1;
}

static int make(const char *path, double ratio)
{
    const spec s = {.name = "decode", .S = 2048, .H = 1, .G = 4, .dk = 128, .dv = 128, .W = 32, .rotary = 128, .dtype = AKV_F16, .seed = 1};
    fixture f;
    akv_segment *segment = NULL;
    akv_diag diag = {AKV_OK, ""};
    size_t bytes = 0;
    fixture_make(&s, &f);
    f.config.profile = AKV_PROFILE_DEFAULT;
    f.config.keep_ratio = 1 / ratio;
    if (akv_compress(&f.layer, &f.config, &segment, &diag) != AKV_OK)
        return stop(diag.message);
    const void *data = akv_segment_data(segment, &bytes);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        return stop("the segment cannot be written");
    akv_segment_release(segment);
    fixture_free(&f);
    return 0;
}

static int attend(const char *path)
{
    static float queries[4][128], out[4][128];
    akv_rng rng = {5};
    akv_diag diag = {AKV_OK, ""};
    akv_segment *segment = NULL;
    FILE *file = fopen(path, "rb");
    const size_t room = 4u << 20;
    void *data = must(aligned_alloc(64, room));
    const size_t bytes = file != NULL ? fread(data, 1, room, file) : 0;
    if (file == NULL || fclose(file) != 0 || akv_segment_open(data, bytes, 0, NULL, &segment, &diag) != AKV_OK)
        return stop(diag.message);
    for (int i = 0; i < 512; i++)
        queries[i / 128][i % 128] = (float)random_gauss(&rng);
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = 1;
    p.gqa_group = 4;
    p.head_dim_k = p.head_dim_v = 128;
    p.num_queries = 1;
    p.queries = akv_tensor_contiguous(queries, AKV_F32, 1, 128);
    p.segments = (const akv_segment *const *)&segment;
    p.num_segments = 1;
    p.sm_scale = 0.08838834764831845;
    p.out = out[0];
    p.out_stride_token = p.out_stride_head = 128;
    size_t workspace_bytes = 0;
    if (akv_attend_workspace_bytes(&p, &workspace_bytes, &diag) != AKV_OK)
        return stop(diag.message);
    void *workspace = must(aligned_alloc(64, (workspace_bytes + 64) / 64 * 64));
    if (akv_attend(&p, workspace, workspace_bytes, &diag) != AKV_OK)
        return stop(diag.message);
    printf("%.6f %.6f\n", out[0][0], out[3][127]);
    free(workspace);
    akv_segment_release(segment);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3)
        return make(argv[1], atof(argv[2]));
    return argc == 2 ? attend(argv[1]) : stop("FILE [RATIO]");
}
