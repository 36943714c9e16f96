/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiny_models.c - see tiny_models.h.
 */
#include "tiny_models.h"

#include "common.h"

#include <ggml.h>
#include <gguf.h>
#include <math.h>
#include <string.h>

static const tiny_model MODELS[] = {
    {.name = "llama", .architecture = "llama", .layers = 4, .heads = 4, .kv_heads = 2, .head_dim = 64, .seed = 1},
    {.name = "llama3",
     .architecture = "llama",
     .layers = 3,
     .heads = 6,
     .kv_heads = 2,
     .head_dim = 64,
     .rope_factors = 1,
     .seed = 2},
    {.name = "yarn",
     .architecture = "llama",
     .layers = 3,
     .heads = 4,
     .kv_heads = 4,
     .head_dim = 64,
     .scaling = "yarn",
     .scaling_factor = 8.0f,
     .original_context = 256,
     .seed = 3},
    {.name = "linear",
     .architecture = "qwen2",
     .layers = 3,
     .heads = 4,
     .kv_heads = 1,
     .head_dim = 64,
     .scaling = "linear",
     .scaling_factor = 4.0f,
     .seed = 4},
    {.name = "qwen2",
     .architecture = "qwen2",
     .layers = 3,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .qkv_bias = 2.0f,
     .seed = 5},
    {.name = "qwen3",
     .architecture = "qwen3",
     .layers = 3,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 128,
     .qk_norm = 1,
     .seed = 6},
    {.name = "gemma2",
     .architecture = "gemma2",
     .layers = 4,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .window = 48,
     .softcap = 5.0f,
     .post_norms = 1,
     .embedding = 0.0625f,
     .seed = 7},
    {.name = "gemma3",
     .architecture = "gemma3",
     .layers = 6,
     .heads = 4,
     .kv_heads = 1,
     .head_dim = 128,
     .window = 48,
     .qk_norm = 1,
     .post_norms = 1,
     .embedding = 0.0625f,
     .seed = 8},
    {.name = "phi3",
     .architecture = "phi3",
     .layers = 3,
     .heads = 4,
     .kv_heads = 4,
     .head_dim = 64,
     .rotary_dim = 48,
     .fused_qkv = 1,
     .seed = 9},
    {.name = "sinks",
     .architecture = "gpt-oss",
     .layers = 4,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .window = 48,
     .qkv_bias = 0.5f,
     .sinks = 1,
     .experts = 4,
     .seed = 10},
    {.name = "hybrid",
     .architecture = "lfm2",
     .layers = 4,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .qk_norm = 1,
     .recurrent_every = 2,
     .seed = 11},
    /* refused */
    {.name = "longrope",
     .architecture = "phi3",
     .layers = 2,
     .heads = 4,
     .kv_heads = 4,
     .head_dim = 64,
     .fused_qkv = 1,
     .scaling = "longrope",
     .scaling_factor = 4.0f,
     .original_context = 1280,
     .rope_factors = 2,
     .seed = 12},
    {.name = "alibi",
     .architecture = "bloom",
     .layers = 2,
     .heads = 4,
     .kv_heads = 4,
     .head_dim = 64,
     .fused_qkv = 1,
     .seed = 13},
    {.name = "long",
     .architecture = "llama",
     .layers = 4,
     .heads = 9,
     .kv_heads = 3,
     .head_dim = 64,
     .context = 40960,
     .seed = 21},
    {.name = "latent", .architecture = "deepseek2", .layers = 2, .heads = 4, .kv_heads = 1, .head_dim = 64, .seed = 14},
    {.name = "recurrent", .architecture = "mamba", .layers = 2, .heads = 0, .kv_heads = 0, .head_dim = 0, .seed = 15},
    {.name = "axes",
     .architecture = "qwen2vl",
     .layers = 2,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .sections = 1,
     .seed = 16},
    {.name = "windows",
     .architecture = "gpt-oss",
     .layers = 1,
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .window = 48,
     .qkv_bias = 0.5f,
     .sinks = 1,
     .experts = 4,
     .seed = 17},
};

const tiny_model *tiny_model_at(int index)
{
    return index >= 0 && (size_t)index < sizeof MODELS / sizeof MODELS[0] ? &MODELS[index] : NULL;
}

const tiny_model *tiny_model_find(const char *name)
{
    for (int i = 0; tiny_model_at(i); i++)
        if (strcmp(MODELS[i].name, name) == 0)
            return &MODELS[i];
    return NULL;
}

typedef struct writer {
    const tiny_model *model;
    struct gguf_context *gguf;
    struct ggml_context *tensors;
    uint64_t state;
} writer;

static double uniform(writer *w)
{
    w->state ^= w->state << 13;
    w->state ^= w->state >> 7;
    w->state ^= w->state << 17;
    return ((double)(w->state >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(writer *w)
{
    const double radius = sqrt(-2.0 * log(uniform(w)));
    return radius * cos(6.283185307179586 * uniform(w));
}

/* mean + deviation * normal; the deviation of matrices is given per square root of the rows they sum over. */
static void add(writer *w, const char *name, int64_t ne0, int64_t ne1, int64_t ne2, double mean, double deviation)
{
    struct ggml_tensor *tensor = ne2   ? ggml_new_tensor_3d(w->tensors, GGML_TYPE_F32, ne0, ne1, ne2)
                                 : ne1 ? ggml_new_tensor_2d(w->tensors, GGML_TYPE_F32, ne0, ne1)
                                       : ggml_new_tensor_1d(w->tensors, GGML_TYPE_F32, ne0);
    ggml_set_name(tensor, name);
    float *data = tensor->data;
    for (int64_t i = 0; i < ggml_nelements(tensor); i++)
        data[i] = (float)(mean + deviation * normal(w));
    gguf_add_tensor(w->gguf, tensor);
}

static void matrix(writer *w, const char *name, int64_t in, int64_t out, double gain)
{
    add(w, name, in, out, 0, 0.0, gain / sqrt((double)in));
}

static void vector(writer *w, const char *name, int64_t n, double mean, double deviation)
{
    add(w, name, n, 0, 0, mean, deviation);
}

/* "blk.<layer>.<suffix>"; valid until the next call. */
static const char *block(uint32_t layer, const char *suffix)
{
    static char name[96];
    snprintf(name, sizeof name, "blk.%u.%s", layer, suffix);
    return name;
}

static const char *key(const writer *w, const char *suffix)
{
    static char name[96];
    snprintf(name, sizeof name, "%s.%s", w->model->architecture, suffix);
    return name;
}

static int is(const tiny_model *m, const char *architecture)
{
    return strcmp(m->architecture, architecture) == 0;
}

static int is_recurrent(const tiny_model *m, uint32_t layer)
{
    return m->recurrent_every && layer % (uint32_t)m->recurrent_every != 0;
}

static void write_metadata(writer *w)
{
    const tiny_model *m = w->model;
    const uint32_t rotary = m->rotary_dim ? m->rotary_dim : m->head_dim;
    gguf_set_val_str(w->gguf, "general.architecture", m->architecture);
    gguf_set_val_str(w->gguf, "general.name", m->name);
    gguf_set_val_str(w->gguf, "tokenizer.ggml.model", "no_vocab");
    gguf_set_val_u32(w->gguf, key(w, "vocab_size"), TINY_VOCAB);
    gguf_set_val_u32(w->gguf, key(w, "context_length"), m->context ? m->context : TINY_CONTEXT);
    gguf_set_val_u32(w->gguf, key(w, "embedding_length"), TINY_EMBEDDING);
    gguf_set_val_u32(w->gguf, key(w, "block_count"), m->layers);
    gguf_set_val_u32(w->gguf, key(w, "feed_forward_length"), TINY_FORWARD);
    gguf_set_val_u32(w->gguf, key(w, "attention.head_count"), m->heads);
    if (m->recurrent_every) {
        int32_t counts[16];
        for (uint32_t i = 0; i < m->layers; i++)
            counts[i] = is_recurrent(m, i) ? 0 : (int32_t)m->kv_heads;
        gguf_set_arr_data(w->gguf, key(w, "attention.head_count_kv"), GGUF_TYPE_INT32, counts, m->layers);
        gguf_set_val_u32(w->gguf, key(w, "shortconv.l_cache"), 3);
    } else {
        gguf_set_val_u32(w->gguf, key(w, "attention.head_count_kv"), m->kv_heads);
    }
    gguf_set_val_f32(w->gguf, key(w, "attention.layer_norm_rms_epsilon"), 1e-6f);
    gguf_set_val_f32(w->gguf, key(w, "attention.layer_norm_epsilon"), 1e-6f);
    if (m->head_dim && !is(m, "deepseek2")) {
        gguf_set_val_u32(w->gguf, key(w, "attention.key_length"), m->head_dim);
        gguf_set_val_u32(w->gguf, key(w, "attention.value_length"), m->head_dim);
        gguf_set_val_u32(w->gguf, key(w, "rope.dimension_count"), rotary);
        gguf_set_val_f32(w->gguf, key(w, "rope.freq_base"), 10000.0f);
    }
    if (m->window)
        gguf_set_val_u32(w->gguf, key(w, "attention.sliding_window"), m->window);
    if (m->softcap != 0.0f)
        gguf_set_val_f32(w->gguf, key(w, "attn_logit_softcapping"), m->softcap);
    if (m->scaling) {
        gguf_set_val_str(w->gguf, key(w, "rope.scaling.type"), m->scaling);
        gguf_set_val_f32(w->gguf, key(w, "rope.scaling.factor"), m->scaling_factor);
        if (m->original_context)
            gguf_set_val_u32(w->gguf, key(w, "rope.scaling.original_context_length"), m->original_context);
    }
    if (m->experts) {
        gguf_set_val_u32(w->gguf, key(w, "expert_count"), (uint32_t)m->experts);
        gguf_set_val_u32(w->gguf, key(w, "expert_used_count"), 2);
        gguf_set_val_u32(w->gguf, key(w, "expert_feed_forward_length"), TINY_FORWARD);
    }
    if (m->sections) {
        const int32_t sections[4] = {8, 12, 12, 0};
        gguf_set_arr_data(w->gguf, key(w, "rope.dimension_sections"), GGUF_TYPE_INT32, sections, 4);
    }
    if (is(m, "deepseek2")) {
        gguf_set_val_u32(w->gguf, key(w, "attention.key_length"), 64 + 32);
        gguf_set_val_u32(w->gguf, key(w, "attention.value_length"), 64);
        gguf_set_val_u32(w->gguf, key(w, "attention.key_length_mla"), 64);
        gguf_set_val_u32(w->gguf, key(w, "attention.value_length_mla"), 64);
        gguf_set_val_u32(w->gguf, key(w, "attention.q_lora_rank"), 64);
        gguf_set_val_u32(w->gguf, key(w, "attention.kv_lora_rank"), 64);
        gguf_set_val_u32(w->gguf, key(w, "rope.dimension_count"), 32);
        gguf_set_val_u32(w->gguf, key(w, "expert_feed_forward_length"), TINY_FORWARD);
        gguf_set_val_u32(w->gguf, key(w, "expert_shared_count"), 1);
        gguf_set_val_u32(w->gguf, key(w, "leading_dense_block_count"), m->layers);
    }
    if (is(m, "mamba")) {
        gguf_set_val_u32(w->gguf, key(w, "ssm.conv_kernel"), 4);
        gguf_set_val_u32(w->gguf, key(w, "ssm.inner_size"), 2 * TINY_EMBEDDING);
        gguf_set_val_u32(w->gguf, key(w, "ssm.state_size"), 16);
        gguf_set_val_u32(w->gguf, key(w, "ssm.time_step_rank"), 16);
    }
}

static void write_attention(writer *w, uint32_t i)
{
    const tiny_model *m = w->model;
    const int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    const double sharp = 1.4; /* of queries and keys: attention that picks some tokens, as trained models do */
    if (m->fused_qkv) {
        matrix(w, block(i, "attn_qkv.weight"), TINY_EMBEDDING, q + 2 * kv, sharp);
        if (is(m, "bloom"))
            vector(w, block(i, "attn_qkv.bias"), q + 2 * kv, 0.0, 0.1);
    } else {
        matrix(w, block(i, "attn_q.weight"), TINY_EMBEDDING, q, sharp);
        matrix(w, block(i, "attn_k.weight"), TINY_EMBEDDING, kv, sharp);
        matrix(w, block(i, "attn_v.weight"), TINY_EMBEDDING, kv, 1.0);
    }
    if (m->qkv_bias != 0.0f || is(m, "qwen2") || is(m, "qwen2vl")) {
        vector(w, block(i, "attn_q.bias"), q, 0.0, 0.5 * m->qkv_bias);
        vector(w, block(i, "attn_k.bias"), kv, 0.0, m->qkv_bias);
        vector(w, block(i, "attn_v.bias"), kv, 0.0, 0.25 * m->qkv_bias);
    }
    if (m->qk_norm) {
        vector(w, block(i, "attn_q_norm.weight"), m->head_dim, 1.4, 0.2);
        vector(w, block(i, "attn_k_norm.weight"), m->head_dim, 1.4, 0.2);
    }
    matrix(w, block(i, "attn_output.weight"), q, TINY_EMBEDDING, 2.0);
    if (is(m, "gpt-oss") || is(m, "bloom"))
        vector(w, block(i, "attn_output.bias"), TINY_EMBEDDING, 0.0, 0.1);
    if (m->sinks)
        vector(w, block(i, "attn_sinks.weight"), m->heads, 4.0, 1.0);
}

static void write_forward(writer *w, uint32_t i)
{
    const tiny_model *m = w->model;
    const int64_t experts = m->experts;
    if (experts) {
        matrix(w, block(i, "ffn_gate_inp.weight"), TINY_EMBEDDING, experts, 1.0);
        vector(w, block(i, "ffn_gate_inp.bias"), experts, 0.0, 0.1);
        const char *names[3] = {"gate", "down", "up"};
        for (int n = 0; n < 3; n++) {
            char suffix[48];
            const int64_t in = n == 1 ? TINY_FORWARD : TINY_EMBEDDING, out = n == 1 ? TINY_EMBEDDING : TINY_FORWARD;
            snprintf(suffix, sizeof suffix, "ffn_%s_exps.weight", names[n]);
            add(w, block(i, suffix), in, out, experts, 0.0, 1.0 / sqrt((double)in));
            snprintf(suffix, sizeof suffix, "ffn_%s_exps.bias", names[n]);
            add(w, block(i, suffix), out, experts, 0, 0.0, 0.1);
        }
        return;
    }
    if (is(m, "phi3")) {
        matrix(w, block(i, "ffn_up.weight"), TINY_EMBEDDING, 2 * TINY_FORWARD, 1.0);
    } else {
        matrix(w, block(i, "ffn_up.weight"), TINY_EMBEDDING, TINY_FORWARD, 1.0);
        if (!is(m, "bloom"))
            matrix(w, block(i, "ffn_gate.weight"), TINY_EMBEDDING, TINY_FORWARD, 1.0);
    }
    matrix(w, block(i, "ffn_down.weight"), TINY_FORWARD, TINY_EMBEDDING, 1.0);
    if (is(m, "bloom")) {
        vector(w, block(i, "ffn_up.bias"), TINY_FORWARD, 0.0, 0.1);
        vector(w, block(i, "ffn_down.bias"), TINY_EMBEDDING, 0.0, 0.1);
    }
}

static void write_latent_attention(writer *w, uint32_t i)
{
    const int64_t heads = w->model->heads;
    matrix(w, block(i, "attn_q_a.weight"), TINY_EMBEDDING, 64, 1.0);
    vector(w, block(i, "attn_q_a_norm.weight"), 64, 1.0, 0.1);
    matrix(w, block(i, "attn_q_b.weight"), 64, heads * 64, 1.0);
    matrix(w, block(i, "attn_kv_a_mqa.weight"), TINY_EMBEDDING, 64 + 32, 1.0);
    vector(w, block(i, "attn_kv_a_norm.weight"), 64, 1.0, 0.1);
    add(w, block(i, "attn_k_b.weight"), 32, 64, heads, 0.0, 0.2);
    add(w, block(i, "attn_v_b.weight"), 64, 64, heads, 0.0, 0.2);
    matrix(w, block(i, "attn_output.weight"), heads * 64, TINY_EMBEDDING, 1.0);
}

static void write_state_space(writer *w, uint32_t i)
{
    const int64_t inner = 2 * TINY_EMBEDDING;
    matrix(w, block(i, "ssm_in.weight"), TINY_EMBEDDING, 2 * inner, 1.0);
    matrix(w, block(i, "ssm_conv1d.weight"), 4, inner, 1.0);
    vector(w, block(i, "ssm_conv1d.bias"), inner, 0.0, 0.1);
    matrix(w, block(i, "ssm_x.weight"), inner, 16 + 2 * 16, 1.0);
    matrix(w, block(i, "ssm_dt.weight"), 16, inner, 1.0);
    vector(w, block(i, "ssm_dt.bias"), inner, 0.0, 0.1);
    add(w, block(i, "ssm_a"), 16, inner, 0, -1.0, 0.1);
    vector(w, block(i, "ssm_d"), inner, 1.0, 0.1);
    matrix(w, block(i, "ssm_out.weight"), inner, TINY_EMBEDDING, 1.0);
}

static void write_block(writer *w, uint32_t i)
{
    const tiny_model *m = w->model;
    vector(w, block(i, "attn_norm.weight"), TINY_EMBEDDING, 1.0, 0.1);
    if (is(m, "mamba")) {
        write_state_space(w, i);
        return;
    }
    if (is(m, "bloom"))
        vector(w, block(i, "attn_norm.bias"), TINY_EMBEDDING, 0.0, 0.1);
    if (is(m, "deepseek2")) {
        write_latent_attention(w, i);
    } else if (is_recurrent(m, i)) {
        matrix(w, block(i, "shortconv.conv.weight"), 3, TINY_EMBEDDING, 1.0);
        matrix(w, block(i, "shortconv.in_proj.weight"), TINY_EMBEDDING, 3 * TINY_EMBEDDING, 1.0);
        matrix(w, block(i, "shortconv.out_proj.weight"), TINY_EMBEDDING, TINY_EMBEDDING, 1.0);
    } else {
        write_attention(w, i);
    }
    if (m->post_norms) {
        vector(w, block(i, "post_attention_norm.weight"), TINY_EMBEDDING, 1.0, 0.1);
        vector(w, block(i, "post_ffw_norm.weight"), TINY_EMBEDDING, 0.5, 0.1);
    }
    if (is(m, "gpt-oss"))
        vector(w, block(i, "post_attention_norm.weight"), TINY_EMBEDDING, 1.0, 0.1);
    else
        vector(w, block(i, "ffn_norm.weight"), TINY_EMBEDDING, 1.0, 0.1);
    if (is(m, "bloom"))
        vector(w, block(i, "ffn_norm.bias"), TINY_EMBEDDING, 0.0, 0.1);
    write_forward(w, i);
}

static void write_rope_factors(writer *w)
{
    const uint32_t planes = (w->model->rotary_dim ? w->model->rotary_dim : w->model->head_dim) / 2;
    if (w->model->rope_factors == 1) {
        vector(w, "rope_freqs.weight", planes, 3.0, 0.5);
    } else if (w->model->rope_factors == 2) {
        vector(w, "rope_factors_long.weight", planes, 4.0, 0.5);
        vector(w, "rope_factors_short.weight", planes, 1.2, 0.1);
    }
}

void tiny_model_write(const tiny_model *m, const char *path)
{
    const struct ggml_init_params params = {.mem_size = (size_t)64 << 20};
    writer w = {.model = m,
                .gguf = gguf_init_empty(),
                .tensors = ggml_init(params),
                .state = m->seed * 0x9e3779b97f4a7c15u + 1};
    CHECK(w.gguf && w.tensors, "no memory");
    write_metadata(&w);
    add(&w, "token_embd.weight", TINY_EMBEDDING, TINY_VOCAB, 0, 0.0, m->embedding != 0.0f ? m->embedding : 1.0);
    if (is(m, "bloom")) {
        vector(&w, "token_embd_norm.weight", TINY_EMBEDDING, 1.0, 0.1);
        vector(&w, "token_embd_norm.bias", TINY_EMBEDDING, 0.0, 0.1);
        vector(&w, "output_norm.bias", TINY_EMBEDDING, 0.0, 0.1);
    }
    vector(&w, is(m, "lfm2") ? "token_embd_norm.weight" : "output_norm.weight", TINY_EMBEDDING, 1.0, 0.1);
    if (!is(m, "gemma2")) /* its head is the embedding */
        matrix(&w, "output.weight", TINY_EMBEDDING, TINY_VOCAB, 3.0);
    write_rope_factors(&w);
    for (uint32_t i = 0; i < m->layers; i++)
        write_block(&w, i);
    CHECK(gguf_write_to_file(w.gguf, path, false), "cannot write %s", path);
    gguf_free(w.gguf);
    ggml_free(w.tensors);
}
