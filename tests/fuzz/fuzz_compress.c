/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_compress.c - any shape, setting and data through akv_compress: refused with a sentence, or within the budget, planned
 * exactly, finite, and opening again from its own bytes.
 */
#include "fuzz.h"

#include <math.h>

typedef struct source {
    const uint8_t *data;
    size_t size, at;
} source;

static uint32_t take(source *s, uint32_t below)
{
    uint32_t x = 0;
    for (int i = 0; i < 2 && s->at < s->size; i++)
        x = x << 8 | s->data[s->at++];
    return x % below;
}

/* Cheap noise, rough on purpose: constants, zeros, huge and tiny numbers, now and then no number. */
static void fill(source *s, float *out, size_t n)
{
    uint32_t kind = take(s, 12), state = take(s, 65536) * 2654435761u + 1;
    const float scale = kind == 1 ? 1e30f : kind == 2 ? 1e-30f : kind == 3 ? 6e4f : 1.0f;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        const float x = (float)(int32_t)state / 2147483648.0f;
        out[i] = kind == 4 ? 0.0f : kind == 5 ? 1.0f : kind == 6 ? (float)(i % 3) : scale * x * (1.0f + (float)(i % 5));
    }
    if (kind == 7 && n != 0)
        out[state % n] = NAN;
    if (kind == 8 && n != 0)
        out[state % n] = INFINITY;
}

static float *floats(source *s, size_t n)
{
    float *out = malloc((n + 1) * sizeof *out);
    HOLDS(out, "no memory");
    fill(s, out, n);
    return out;
}

static void check_result(akv_segment *segment, const akv_config *config, const akv_layer *layer, uint64_t planned)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment_info info;
    akv_segment_info_init(&info);
    HOLDS(akv_segment_get_info(segment, &info, &diag) == AKV_OK, "info: %s", diag.message);
    HOLDS(info.kind == AKV_SEGMENT_DENSE || info.bytes.total <= info.budget_bytes, "%llu bytes of %llu (keep %g)",
          (unsigned long long)info.bytes.total, (unsigned long long)info.budget_bytes, config->keep_ratio);
    HOLDS(info.bytes.total == planned, "%llu bytes, planned %llu", (unsigned long long)info.bytes.total,
          (unsigned long long)planned);
    const akv_shape *s = &layer->shape;
    float *k = malloc(s->num_tokens * s->head_dim_k * sizeof *k), *v = malloc(s->num_tokens * s->head_dim_v * sizeof *v);
    HOLDS(k && v, "no memory");
    for (uint32_t head = 0; head < s->num_kv_heads; head++) {
        HOLDS(akv_segment_decode(segment, head, 0, s->num_tokens, k, v, &diag) == AKV_OK, "decode: %s", diag.message);
        for (size_t i = 0; i < s->num_tokens * s->head_dim_k; i++)
            HOLDS(isfinite(k[i]), "key %zu of head %u is no number", i, head);
        for (size_t i = 0; i < s->num_tokens * s->head_dim_v; i++)
            HOLDS(isfinite(v[i]), "value %zu of head %u is no number", i, head);
    }
    free(k);
    free(v);
    size_t bytes = 0;
    const void *data = akv_segment_data(segment, &bytes);
    akv_segment *again = NULL;
    const akv_status status = akv_segment_open(data, bytes, 1, NULL, &again, &diag);
    HOLDS(status == AKV_OK, "its own bytes do not open: %s", diag.message);
    fuzz_use_segment(again);
    fuzz_rewrite_segment(again, planned);
    akv_segment_release(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    source s = {data, size, 0};
    akv_layer layer;
    akv_config config;
    akv_layer_init(&layer);
    akv_config_init(&config);
    config.profile = take(&s, 3) == 0 ? AKV_PROFILE_PAPER : AKV_PROFILE_DEFAULT;
    config.keep_ratio = (1.0 + take(&s, 200)) / 200.0;
    config.seed = take(&s, 7);
    if (take(&s, 8) == 0)
        config.budget_bytes = take(&s, 65536);
    akv_shape *shape = &layer.shape;
    shape->num_tokens = 1 + take(&s, take(&s, 4) == 0 ? 700 : 150);
    shape->num_kv_heads = 1 + take(&s, 3);
    shape->gqa_group = 1 + take(&s, 3);
    shape->head_dim_k = 1 + take(&s, 40);
    shape->head_dim_v = 1 + take(&s, 40);
    shape->rotary_dim = take(&s, shape->head_dim_k + 2);
    shape->num_queries = 1 + take(&s, 40);
    if (take(&s, 4) != 0) { /* odd dimensions are refused: not every time */
        shape->head_dim_k += shape->head_dim_k % 2;
        shape->head_dim_v += shape->head_dim_v % 2;
        shape->rotary_dim -= shape->rotary_dim % 2;
    }
    const uint64_t tokens = shape->num_tokens, heads = (uint64_t)shape->num_kv_heads * shape->gqa_group;
    float *k = floats(&s, shape->num_kv_heads * tokens * shape->head_dim_k);
    float *v = floats(&s, shape->num_kv_heads * tokens * shape->head_dim_v);
    float *q = floats(&s, heads * shape->num_queries * shape->head_dim_k);
    double inv_freq[64];
    for (int i = 0; i < 64; i++)
        inv_freq[i] = 1.0 / (1.0 + i * (1 + (int)take(&s, 50)));
    int32_t *positions = NULL;
    if (take(&s, 4) == 0) {
        positions = malloc(tokens * sizeof *positions);
        HOLDS(positions, "no memory");
        for (uint64_t i = 0; i < tokens; i++)
            positions[i] = (i != 0 ? positions[i - 1] : 0) + 1 + (int32_t)take(&s, 3);
    }
    layer.keys = akv_tensor_contiguous(k, AKV_F32, tokens, shape->head_dim_k);
    layer.values = akv_tensor_contiguous(v, AKV_F32, tokens, shape->head_dim_v);
    layer.queries = akv_tensor_contiguous(q, AKV_F32, shape->num_queries, shape->head_dim_k);
    layer.positions = positions;
    layer.rope.rotary_dim = shape->rotary_dim;
    layer.rope.inv_freq = inv_freq;
    layer.sm_scale = 0.2;
    for (uint64_t i = 1; positions && i < tokens; i++) /* consecutive ones are not stored */
        shape->has_positions |= positions[i] != positions[i - 1] + 1;
    shape->dtype = AKV_F32;
    akv_diag diag = {AKV_OK, ""};
    akv_plan_info plan;
    akv_plan_info_init(&plan);
    akv_segment *segment = NULL;
    const akv_status planned = akv_plan(shape, &config, &plan, &diag);
    SAYS_WHY(planned, diag);
    diag = (akv_diag){AKV_OK, ""};
    const akv_status status = akv_compress(&layer, &config, &segment, &diag);
    SAYS_WHY(status, diag);
    HOLDS(planned == AKV_OK || status != AKV_OK, "compressed what could not be planned");
    if (status == AKV_OK) {
        check_result(segment, &config, &layer, plan.bytes.total);
        akv_segment_release(segment);
    }
    free(k);
    free(v);
    free(q);
    free(positions);
    return 0;
}
