/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiny_models.h - GGUF files with small random F32 weights, one for each kind of attention that the host has to know or
 * to refuse. Real head dimensions, everything else small.
 */
#ifndef AKV_TESTS_HOST_TINY_MODELS_H
#define AKV_TESTS_HOST_TINY_MODELS_H

#include <stdint.h>

typedef struct tiny_model {
    const char *name;
    const char *architecture;
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t rotary_dim; /* 0 = head_dim */
    uint32_t window;     /* sliding window, 0 = none */
    float softcap;       /* of attention logits, 0 = none */
    float qkv_bias;      /* size of the biases, 0 = none */
    int qk_norm;
    int post_norms;
    int fused_qkv;
    int sinks;
    int experts;         /* mixture of experts instead of one feed-forward block */
    const char *scaling; /* rope.scaling.type or NULL */
    float scaling_factor;
    uint32_t original_context;
    int rope_factors;    /* 1: one list (Llama 3), 2: a long and a short one (LongRoPE) */
    int recurrent_every; /* layers i with i % n != 0 are short convolutions */
    int sections;        /* multi-axis positions */
    float embedding;     /* size of the token embeddings; 0 = 1 */
    uint32_t context;    /* tokens; 0 = TINY_CONTEXT */
    uint64_t seed;
} tiny_model;

enum { TINY_EMBEDDING = 256, TINY_FORWARD = 128, TINY_VOCAB = 320, TINY_CONTEXT = 4096 };

/* NULL when there is no model of that name. */
const tiny_model *tiny_model_find(const char *name);
/* Index 0, 1, ...; NULL behind the last. */
const tiny_model *tiny_model_at(int index);
void tiny_model_write(const tiny_model *model, const char *path);

#endif
