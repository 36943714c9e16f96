/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dequantise.c - any GGUF model -> the same model with F32 weights, for tests that must not see the noise of quantised
 * products. Does nothing when the output exists.
 *
 * usage: dequantise IN.gguf OUT.gguf
 */
#include <llama.h>

#include <stdio.h>

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: dequantise IN.gguf OUT.gguf\n");
        return 2;
    }
    FILE *existing = fopen(argv[2], "rb");
    if (existing) {
        fclose(existing);
        return 0;
    }
    char temporary[4096];
    if (snprintf(temporary, sizeof temporary, "%s.part", argv[2]) >= (int)sizeof temporary)
        return 2;
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    params.nthread = 2;
    if (llama_model_quantize(argv[1], temporary, &params) != 0 || rename(temporary, argv[2]) != 0) {
        fprintf(stderr, "cannot write %s\n", argv[2]);
        return 1;
    }
    return 0;
}
