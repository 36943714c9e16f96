/* SPDX-License-Identifier: Apache-2.0 */
/*
 * make_segment.c - a segment of realistic statistics for the GPU's measurements: a made-up layer (topics that come and
 * go, decaying spectra, biased keys, a few tokens that every query attends to) compressed by the CPU library.
 *
 * usage: make_segment FILE TOKENS RATIO [HEADS [GROUP [DIM [PROFILE [THREADS]]]]]      PROFILE: default, paper or dense
 */
#include "made_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: %s FILE TOKENS RATIO [HEADS [GROUP [DIM [PROFILE [THREADS]]]]]\n", argv[0]);
        return 1;
    }
    const uint64_t S = strtoull(argv[2], NULL, 10);
    const int H = argc > 4 ? atoi(argv[4]) : 8, G = argc > 5 ? atoi(argv[5]) : 4, d = argc > 6 ? atoi(argv[6]) : 128;
    const char *profile = argc > 7 ? argv[7] : "default";
    akv_layer layer;
    if (!make_layer(S, H, G, d, &layer))
        return 1;
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = 1 / atof(argv[3]);
    config.profile = strcmp(profile, "paper") == 0 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
    akv_threads *threads = NULL;
    akv_diag diag = {AKV_OK, ""};
    if (argc > 8 && akv_threads_create((uint32_t)atoi(argv[8]), &threads, &diag) == AKV_OK)
        config.executor = akv_threads_executor(threads);
    akv_segment *segment = NULL;
    akv_status status = strcmp(profile, "dense") == 0 ? akv_segment_create_dense(&layer, &config, &segment, &diag)
                                                      : akv_compress(&layer, &config, &segment, &diag);
    if (status != AKV_OK) {
        fprintf(stderr, "%s\n", diag.message);
        return 1;
    }
    size_t bytes = 0;
    const void *data = akv_segment_data(segment, &bytes);
    akv_segment_info info;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, &diag);
    printf("%s: %zu bytes, %.2f a token and KV head, ratio %.2f, %u anchors, residuals %.3f / %.3f of the tokens\n",
           argv[1], bytes, (double)bytes / (double)S / H, (double)info.dense_bytes / (double)bytes, info.num_anchors,
           (double)info.residuals_k / (double)S / H, (double)info.residuals_v / (double)S / H);
    FILE *f = fopen(argv[1], "wb");
    return f == NULL || fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0;
}
