/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graph.c - what a model does in attention, read off the nodes of its compute graph: which caches there are, their
 * shapes, the softmax, and the rotation of the keys. Decides what can be hosted; never looks at a model's name.
 */
#include "host.h"

#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

akv_status akvl_graph_create(uint32_t num_layers, akvl_graph **out, akv_diag *diag)
{
    akvl_graph *graph = akvl_new(1, sizeof *graph);
    akvl_layer *layers = akvl_new(num_layers, sizeof *layers);
    if (!graph || !layers) {
        free(graph);
        free(layers);
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the description of %u layers", num_layers);
    }
    graph->num_layers = num_layers;
    graph->layers = layers;
    *out = graph;
    return AKV_OK;
}

void akvl_graph_free(akvl_graph *graph)
{
    if (!graph)
        return;
    for (uint32_t i = 0; i < graph->num_layers; i++)
        free(graph->layers[i].inv_freq);
    free(graph->layers);
    free(graph);
}

#define PROBLEM(graph, ...) \
    do { \
        if ((graph)->problem.status == AKV_OK) \
            akvl_fail(&(graph)->problem, AKV_E_UNSUPPORTED, __VA_ARGS__); \
    } while (0)

/* Number behind a cache root's name, or -1. */
static int root_number(const struct ggml_tensor *root, const char *prefix)
{
    const size_t length = strlen(prefix);
    int number = -1;
    if (!root || strncmp(root->name, prefix, length) != 0 || sscanf(root->name + length, "%d", &number) != 1)
        return -1;
    return number;
}

int akvl_node_layer(const akvl_graph *graph, const struct ggml_tensor *node)
{
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !node->src[1])
        return -1;
    const int number = root_number(node->src[1]->view_src, "cache_k_l");
    return number >= 0 && (uint32_t)number < graph->num_layers ? number : -1;
}

static float op_float(const struct ggml_tensor *node, int i)
{
    float value;
    memcpy(&value, (const char *)node->op_params + sizeof(float) * (size_t)i, sizeof value);
    return value;
}

static int32_t op_int(const struct ggml_tensor *node, int i)
{
    int32_t value;
    memcpy(&value, (const char *)node->op_params + sizeof(int32_t) * (size_t)i, sizeof value);
    return value;
}

static bool is_host(const struct ggml_tensor *tensor)
{
    const struct ggml_tensor *root = tensor->view_src ? tensor->view_src : tensor;
    return root->buffer && ggml_backend_buffer_is_host(root->buffer);
}

static void learn_attention(akvl_graph *graph, const struct ggml_tensor *node)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
    graph->num_nodes++;
    const int number = root_number(k->view_src, "cache_k_l");
    if (number < 0 || (uint32_t)number >= graph->num_layers) {
        PROBLEM(graph,
                "attention node \"%s\" does not read its keys from a key/value cache, so there is nothing to compress",
                node->name);
        return;
    }
    if (root_number(v->view_src, "cache_v_l") != number) {
        graph->problem.status = AKV_OK; /* such keys were already found odd; this says why */
        PROBLEM(graph, "layer %d keeps no values of its own (latent attention, MLA); such models are not supported",
                number);
        return;
    }
    struct ggml_tensor *k_root = k->view_src, *v_root = v->view_src;
    if (op_float(node, 1) != 0.0f) {
        PROBLEM(graph, "layer %d adds an ALiBi bias to its logits; only rotary and position-free models are supported",
                number);
        return;
    }
    if (k_root->type != GGML_TYPE_F16 || v_root->type != GGML_TYPE_F16) {
        PROBLEM(graph, "the cache of layer %d is %s/%s; only an f16 cache can be compressed", number,
                ggml_type_name(k_root->type), ggml_type_name(v_root->type));
        return;
    }
    if (!is_host(k_root) || !is_host(v_root) || !is_host(node)) {
        PROBLEM(graph,
                "the cache of layer %d is not in the computer's own memory; keep the model's attention on the CPU",
                number);
        return;
    }
    if (!mask || mask->type != GGML_TYPE_F16 || q->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32 ||
        k->data != k_root->data || v->data != v_root->data || k->nb[0] != sizeof(uint16_t) ||
        v->nb[0] != sizeof(uint16_t) || q->nb[0] != sizeof(float) || q->ne[3] != 1 || k->ne[3] != 1 || v->ne[3] != 1) {
        PROBLEM(graph,
                "layer %d lays out its attention in a way this host does not know; this libllama is too new or too old",
                number);
        return;
    }
    const int64_t heads = q->ne[2], kv_heads = k->ne[2];
    if (kv_heads < 1 || heads % kv_heads != 0 || v->ne[2] != kv_heads || k->ne[0] * kv_heads != k_root->ne[0] ||
        v->ne[0] * kv_heads != v_root->ne[0] || k->ne[0] != q->ne[0]) {
        PROBLEM(graph,
                "layer %d has %lld query heads of %lld dimensions over %lld key and %lld value heads, which is not "
                "grouped"
                " attention",
                number, (long long)heads, (long long)q->ne[0], (long long)kv_heads, (long long)v->ne[2]);
        return;
    }
    if (k->ne[0] % 2 != 0 || v->ne[0] % 2 != 0 || k->ne[0] > 1024 || v->ne[0] > 1024) {
        PROBLEM(graph, "layer %d has head dimensions %lld and %lld; even ones up to 1024 are supported", number,
                (long long)k->ne[0], (long long)v->ne[0]);
        return;
    }
    akvl_layer *layer = &graph->layers[number];
    const akvl_layer before = *layer;
    layer->seen = true;
    layer->num_kv_heads = (uint32_t)kv_heads;
    layer->gqa_group = (uint32_t)(heads / kv_heads);
    layer->head_dim_k = (uint32_t)k->ne[0];
    layer->head_dim_v = (uint32_t)v->ne[0];
    layer->cells = k_root->ne[1];
    layer->sm_scale = op_float(node, 0);
    layer->logit_softcap = op_float(node, 2);
    layer->has_sinks = node->src[4] != NULL;
    layer->k_root = k_root;
    layer->v_root = v_root;
    if (before.seen && (before.gqa_group != layer->gqa_group || before.sm_scale != layer->sm_scale ||
                        before.logit_softcap != layer->logit_softcap))
        PROBLEM(graph, "the cache of layer %d is read by layers that attend differently", number);
}

/* The rotary node that made `tensor`, or NULL when its values carry no rotation. *clean: nothing but a reordering, or a
 * scaling of whole heads, which commutes with the rotation, stands between the two. */
static const struct ggml_tensor *find_rope(const struct ggml_tensor *tensor, bool *clean)
{
    int64_t norm_dim = 0;
    *clean = true;
    for (int steps = 0; tensor && steps < 64; steps++) {
        switch (tensor->op) {
        case GGML_OP_ROPE:
            if (norm_dim != 0 && norm_dim != tensor->ne[0])
                *clean = false; /* a norm across heads is no scaling of one head */
            return tensor;
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_SCALE:
            break;
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
            norm_dim = tensor->ne[0];
            break;
        case GGML_OP_MUL_MAT:
        case GGML_OP_GET_ROWS:
            return NULL; /* the projection itself: everything before it belongs to the residual stream */
        case GGML_OP_CONCAT: {
            bool ignored;
            const struct ggml_tensor *second = find_rope(tensor->src[1], &ignored);
            if (second) {
                *clean = false;
                return second;
            }
            *clean = false;
            break;
        }
        default:
            *clean = false;
        }
        tensor = tensor->src[0];
    }
    return NULL;
}

static void learn_rope(akvl_graph *graph, const struct ggml_tensor *store)
{
    const int number = root_number(store->view_src, "cache_k_l");
    if (number < 0 || (uint32_t)number >= graph->num_layers)
        return;
    akvl_layer *layer = &graph->layers[number];
    bool clean;
    const struct ggml_tensor *rope = find_rope(store->src[0], &clean);
    layer->has_rope = false;
    layer->rotary_dim = 0;
    layer->magnitude = 1.0;
    layer->rope_style = AKV_ROPE_HALF_SPLIT;
    layer->rope_hash = 0;
    if (!rope)
        return;
    if (!clean) {
        PROBLEM(graph, "the keys of layer %d are changed after their rotation, so it cannot be undone", number);
        return;
    }
    akvl_rope_params p = {
        .n_dims = op_int(rope, 1),
        .mode = op_int(rope, 2),
        .n_ctx_orig = op_int(rope, 4),
        .freq_base = op_float(rope, 5),
        .freq_scale = op_float(rope, 6),
        .ext_factor = op_float(rope, 7),
        .attn_factor = op_float(rope, 8),
        .beta_fast = op_float(rope, 9),
        .beta_slow = op_float(rope, 10),
    };
    if (p.mode != GGML_ROPE_TYPE_NORMAL && p.mode != GGML_ROPE_TYPE_NEOX) {
        PROBLEM(graph,
                "layer %d rotates its keys by several positions at once (M-RoPE, mode %d); only one position per token "
                "is"
                " supported",
                number, (int)p.mode);
        return;
    }
    if (op_int(rope, 15) != 0 || p.n_dims < 2 || p.n_dims % 2 != 0 || p.n_dims > rope->ne[0]) {
        PROBLEM(graph, "layer %d rotates %d dimensions from dimension %d on; only leading ones are supported", number,
                (int)p.n_dims, (int)op_int(rope, 15));
        return;
    }
    const struct ggml_tensor *factors = rope->src[2];
    if (factors && (!is_host(factors) || factors->type != GGML_TYPE_F32 || !factors->data)) {
        PROBLEM(graph, "the frequency factors of layer %d are not readable from the computer's own memory", number);
        return;
    }
    const size_t planes = (size_t)p.n_dims / 2;
    double *inv_freq = akvl_new(planes, sizeof *inv_freq);
    if (!inv_freq) {
        if (graph->problem.status == AKV_OK)
            akvl_fail(&graph->problem, AKV_E_NO_MEMORY, "no memory for the rotary table of layer %d", number);
        return;
    }
    layer->magnitude = akvl_rope_table(&p, factors ? (const float *)factors->data : NULL, inv_freq);
    free(layer->inv_freq);
    layer->inv_freq = inv_freq;
    layer->has_rope = true;
    layer->rotary_dim = (uint32_t)p.n_dims;
    layer->rope_style = p.mode == GGML_ROPE_TYPE_NEOX ? AKV_ROPE_HALF_SPLIT : AKV_ROPE_INTERLEAVED;
    /* the parameters as the model gives them, not the table: two computers may round pow() differently */
    XXH64_hash_t hash = XXH3_64bits(&p, sizeof p);
    if (factors)
        hash = XXH3_64bits_withSeed(factors->data, planes * sizeof(float), hash);
    layer->rope_hash = hash;
}

void akvl_graph_learn(akvl_graph *graph, struct ggml_tensor *node)
{
    if (node->op == GGML_OP_FLASH_ATTN_EXT)
        learn_attention(graph, node);
    else if (node->op == GGML_OP_SET_ROWS)
        learn_rope(graph, node);
}

akv_status akvl_graph_check(const akvl_graph *graph, int64_t full_cells, akv_diag *diag)
{
    if (graph->problem.status != AKV_OK)
        return akvl_fail(diag, graph->problem.status, "%s", graph->problem.message);
    if (graph->num_nodes == 0)
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "this model's graph has no flash-attention node, so its attention cannot be"
                         " replaced");
    for (uint32_t i = 0; i < graph->num_layers; i++)
        if (graph->layers[i].seen && graph->layers[i].cells >= full_cells)
            return AKV_OK;
    return akvl_fail(diag, AKV_E_UNSUPPORTED,
                     "every attention layer of this model has a sliding window, so its cache does not grow"
                     " with the document and there is nothing to compress");
}

/* Name of the first difference, or NULL. */
static const char *difference(const akv_llama_layer *a, const akv_llama_layer *b)
{
    if (a->num_kv_heads != b->num_kv_heads || a->gqa_group != b->gqa_group)
        return "number of heads";
    if (a->head_dim_k != b->head_dim_k || a->head_dim_v != b->head_dim_v)
        return "head dimension";
    if (a->rotary_dim != b->rotary_dim || a->rope_style != b->rope_style || a->rope_hash != b->rope_hash)
        return "rotary embedding";
    if (a->sm_scale != b->sm_scale)
        return "softmax scale";
    if (a->logit_softcap != b->logit_softcap)
        return "logit soft-cap";
    if (a->has_sinks != b->has_sinks)
        return "attention sinks";
    return NULL;
}

akv_status akvl_signature_compare(const akv_llama_layer *a, const akv_llama_layer *b, uint32_t layer, akv_diag *diag)
{
    const char *what = difference(a, b);
    return what ? akvl_fail(diag, AKV_E_MISMATCH,
                            "layer %u: the %s differs between the context that read the document and the"
                            " one that answers",
                            layer, what)
                : AKV_OK;
}

akv_status akvl_graph_compare(const akvl_graph *a, const akvl_graph *b, const bool *is_hosted, akv_diag *diag)
{
    for (uint32_t i = 0; i < a->num_layers; i++) {
        if (!is_hosted[i])
            continue;
        akv_llama_layer left, right;
        akvl_layer_signature(&a->layers[i], &left);
        akvl_layer_signature(&b->layers[i], &right);
        const char *what = difference(&left, &right);
        if (what)
            return akvl_fail(diag, AKV_E_UNSUPPORTED,
                             "layer %u: the %s depends on the size of the context (as LongRoPE does), so a"
                             " small context cannot go on from a large one's cache",
                             i, what);
    }
    return AKV_OK;
}

void akvl_layer_signature(const akvl_layer *layer, akv_llama_layer *out)
{
    memset(out, 0, sizeof *out);
    out->kind = AKV_LLAMA_LAYER_HOSTED;
    out->num_kv_heads = layer->num_kv_heads;
    out->gqa_group = layer->gqa_group;
    out->head_dim_k = layer->head_dim_k;
    out->head_dim_v = layer->head_dim_v;
    out->rotary_dim = layer->rotary_dim;
    out->rope_style = (uint32_t)layer->rope_style;
    out->has_sinks = layer->has_sinks;
    out->rope_magnitude = layer->magnitude;
    out->sm_scale = layer->sm_scale;
    out->logit_softcap = layer->logit_softcap;
    out->rope_hash = layer->rope_hash;
}
