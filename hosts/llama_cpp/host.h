/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.h - what the files of the llama.cpp host share: the host object, what is learnt from a graph, and the steps that
 * cross files. Not installed.
 */
#ifndef AKVL_HOST_H
#define AKVL_HOST_H

#include "akv_llama.h"

#include <llama.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

/* ----------------------------------------------------------------------------------------- learnt from a graph */

/* One attention cache, named by libllama's layer number; several layers of a model may read the same cache. */
typedef struct akvl_layer {
    bool seen; /* a flash-attention node reads it */
    uint32_t num_kv_heads;
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    int64_t cells; /* rows of the cache root */
    float sm_scale;
    float logit_softcap;
    bool has_sinks;
    bool has_rope;
    uint32_t rotary_dim;
    akv_rope_style rope_style;
    double magnitude;
    double *inv_freq; /* [rotary_dim / 2], owned */
    uint64_t rope_hash;
    struct ggml_tensor *k_root; /* the cache itself; lives as long as its context */
    struct ggml_tensor *v_root;
} akvl_layer;

typedef struct akvl_graph {
    uint32_t num_layers;
    akvl_layer *layers; /* [num_layers] */
    uint32_t num_nodes; /* flash-attention nodes met */
    akv_diag problem;   /* the first reason not to host this graph; status 0 = none */
} akvl_graph;

akv_status akvl_graph_create(uint32_t num_layers, akvl_graph **out, akv_diag *diag);
void akvl_graph_free(akvl_graph *graph);
/* Look at one node, without its data; problems are noted in graph->problem. */
void akvl_graph_learn(akvl_graph *graph, struct ggml_tensor *node);
/* Cache number of a flash-attention node, or -1. */
int akvl_node_layer(const akvl_graph *graph, const struct ggml_tensor *node);
/* AKV_OK when at least one layer could be hosted and nothing forbids it. full_cells: rows of a full-attention cache. */
akv_status akvl_graph_check(const akvl_graph *graph, int64_t full_cells, akv_diag *diag);
/* AKV_OK when both rotate and attend alike in every layer that is_hosted marks. */
akv_status akvl_graph_compare(const akvl_graph *a, const akvl_graph *b, const bool *is_hosted, akv_diag *diag);
/* The same for what a store remembers of one layer; AKV_E_MISMATCH otherwise. */
akv_status akvl_signature_compare(const akv_llama_layer *a, const akv_llama_layer *b, uint32_t layer, akv_diag *diag);
/* Fills what a store keeps of a hosted layer, except the segment counts. */
void akvl_layer_signature(const akvl_layer *layer, akv_llama_layer *out);

/*
 * The rotation that ggml's RoPE operator applies. inv_freq has n_dims / 2 entries; the result turns position p of plane
 * j by p * inv_freq[j] and multiplies by the returned magnitude.
 */
typedef struct akvl_rope_params {
    int32_t n_dims;
    int32_t mode;
    int32_t n_ctx_orig;
    float freq_base;
    float freq_scale;
    float ext_factor;
    float attn_factor;
    float beta_fast;
    float beta_slow;
} akvl_rope_params;

double akvl_rope_table(const akvl_rope_params *params, const float *freq_factors, double *inv_freq);

/* ------------------------------------------------------------------------------------------------------- store */

struct akv_llama_store {
    atomic_uint references;
    akv_llama_store_parts parts; /* points into the arrays below */
    int32_t *tokens;
    akv_llama_layer *layers;
    akv_segment **segments;
    void *native_state;
};

/* -------------------------------------------------------------------------------------------------------- host */

typedef enum akvl_mode {
    AKVL_IDLE = 0,    /* libllama runs on its own */
    AKVL_LEARN = 1,   /* look at every node, break nowhere */
    AKVL_SAMPLE = 2,  /* break after attention of hosted layers and take the sampled queries of this batch */
    AKVL_CAPTURE = 3, /* the same, and the last queries too */
    AKVL_REPLACE = 4  /* make attention of hosted layers an operator of ours; break nowhere */
} akvl_mode;

/* Queries sampled from the whole document, per layer: they tell the codec where later questions look. Fewer when the
 * document is shorter. */
enum { AKVL_SAMPLED_QUERIES = 64 };

/* Handed to libllama when a context is made; what it does is switched by mode. */
typedef struct akvl_hook {
    akv_llama *host;
    akvl_mode mode;
    akvl_graph *graph; /* LEARN: filled */
    akv_diag failure;  /* the first error inside the callback; status 0 = none */
    int32_t batch_first;  /* position of the first token of the running batch */
    uint32_t batch_count; /* its tokens */
    /* SAMPLE, CAPTURE */
    bool *taken;          /* [num_layers] in this batch */
    float **sampled;      /* [num_layers] -> [H*G, M, d_k] or NULL */
    int32_t *sampled_positions; /* [M] ascending, spread evenly over the document */
    uint32_t num_sampled; /* M; 0 = none */
    /* CAPTURE */
    float **queries;      /* [num_layers] -> [H*G, W, d_k] or NULL */
    uint32_t num_queries; /* W rows wanted */
    uint64_t visible;     /* cells the last token must see: the whole document */
    bool masked;          /* some layer hid cells from the last token */
    /* abort hook */
    akv_llama_stage stage;
    uint64_t done;
    uint64_t total;
    int64_t next_poll_us;
    bool cancelled;
} akvl_hook;

/* What a hosted layer attends to besides B's cells: the store's segments, then those of the conversation. All are retained. */
typedef struct akvl_running {
    akv_segment ***lists; /* [num_layers] -> [capacity] */
    uint32_t *counts;     /* [num_layers] */
    uint32_t *capacities; /* [num_layers] */
} akvl_running;

/* Rolling compression (rolling.c). */
typedef struct akvl_rolling {
    bool on;
    akv_llama_rolling options;
    float **queries;  /* [num_layers] -> [H*G, W, d_k] the latest, a ring; NULL where nothing is hosted */
    uint64_t *seen;   /* [num_layers] since attach or the last truncation */
} akvl_rolling;

/* A loaded model; several hosts may use it. */
typedef struct akvl_model {
    atomic_uint references;
    struct llama_model *llama;
} akvl_model;

/* A conversation that is not the one in context B (switch.c). While it is there, the host has these fields. */
struct akv_llama_conversation {
    akv_llama *host; /* whose B it is in; NULL while it is set aside */
    bool begun;      /* false: it stands right behind the document and has nothing but the store */
    bool lost;       /* there was no memory to set it aside */
    akv_llama_store *store;
    akvl_running running;
    akvl_rolling rolling;
    int32_t *history;
    size_t history_capacity;
    uint32_t rolls;
    uint32_t retargets;
    uint32_t tail_used;
    int32_t tail_position;
    int32_t tail_first;
    void *state; /* libllama's bytes of B's cells, as many as were used */
    size_t state_bytes;
};

/* gang.c: attention as an operator that all of libllama's threads run */
typedef struct akvl_gang akvl_gang;

struct akv_llama {
    akv_llama_options options;
    akvl_model *shared;
    struct llama_model *model; /* shared->llama */
    const struct llama_vocab *vocab;
    akv_llama_model_info info;
    uint32_t num_layers;
    struct llama_batch batch; /* room for options.batch_tokens */

    /* context A: the dense cache */
    struct llama_context *dense;
    akvl_hook dense_hook;
    akvl_graph *dense_graph;
    akv_diag not_hostable; /* why the prefilled model cannot be compressed; status 0 = it can */
    bool *is_hosted;       /* [num_layers] */
    int32_t *tokens;       /* [num_tokens] the document */
    uint64_t num_tokens;
    uint64_t base_tokens;    /* of them prefilled; the others came by akv_llama_extend */
    uint64_t dense_position; /* next */
    uint64_t dense_cells;
    void *dense_state; /* window and recurrent layers just after the document, or NULL */
    size_t dense_state_bytes;

    /* context B: the tail */
    struct llama_context *tail;
    akvl_hook tail_hook;
    akvl_graph *tail_graph;
    akv_llama_store *store;
    akvl_gang *gang; /* as long as the host, since nodes of B's graph point into it */
    akvl_running running;
    akvl_rolling rolling;
    int32_t *history;      /* [tail_position] token ids: the document's, then the conversation's */
    size_t history_capacity;
    uint32_t rolls; /* since attach */
    uint32_t retargets;
    uint32_t tail_limit; /* cells that may be used before they move */
    uint32_t tail_used;
    int32_t tail_position; /* next */
    int32_t tail_first;    /* position of B's cell 0 */
    void *workspace;
    size_t workspace_bytes;
    akv_llama_conversation *current;   /* the one in B, or NULL */
    struct llama_context *spare_tail;  /* B and what was learnt of it while no conversation is in it */
    akvl_graph *spare_graph;

    /* outcome of the last decode or prefill */
    float *logits;
    size_t logits_capacity; /* rows */
    size_t logits_rows;

    struct akvl_comparison *comparison; /* while akv_llama_compare runs, else NULL */
    double *shares; /* [num_layers] of akv_llama_set_layer_shares, or NULL */

    akv_llama_stats stats;
    akv_llama_layer_stats *layer_stats; /* [num_layers] */
};

akv_status akvl_fail(akv_diag *diag, akv_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
#ifdef __clang_analyzer__ /* it does not see into the other file that what is given is what is returned */
#  define akvl_fail(diag, status, ...) (akvl_fail(diag, status, __VA_ARGS__), (status))
#endif
/* The first error line that libllama logged since it was last told to forget; a sentence's tail, never NULL. */
void akvl_forget_errors(void);
const char *akvl_first_error(void);
double akvl_seconds(void);
uint64_t akvl_resident_bytes(void);
/* Zeroed memory for n elements; NULL when that overflows or there is none. n == 0 gives one element. */
void *akvl_new(size_t n, size_t element_bytes);

akv_status akvl_fingerprint(akv_llama *host, akv_diag *diag);

/* Context with the callback in place; cells as libllama rounds them; type of the cache's keys and values. */
struct llama_context *akvl_make_context(akv_llama *host, uint32_t cells, enum ggml_type type, akvl_hook *hook);
/* Cells that context B needs. */
uint32_t akvl_tail_cells(const akv_llama *host);
/* Cells that context A needs for this many tokens. */
uint32_t akvl_dense_cells(const akv_llama *host, uint64_t tokens);
/* The first num_tokens cells of a layer's cache as the core takes them; queries are left out. */
void akvl_describe_layer(const akvl_layer *from, int32_t number, uint64_t num_tokens, int32_t first_position,
                         akv_layer *out);
/*
 * What each layer's budget is multiplied by: the shares, brought to a mean of 1 over the hosted layers' dense bytes, so that
 * the sum of the budgets stays; mixed with equal shares as far as the smallest layer's fixed part asks. *strength: 1 = as
 * they are, 0 = equal. host->shares must be there.
 */
void akvl_layer_factors(const akv_llama *host, const akv_config *config, double *factors, double *strength);
/* The configuration of one layer, whose budget is `factor` times that of the mean layer. */
void akvl_share_config(const akv_config *whole, double factor, akv_config *one);
/* Run a throwaway context of B's size over a few tokens and learn its graph. */
akv_status akvl_probe(akv_llama *host, const int32_t *tokens, size_t num_tokens, akvl_graph **out, akv_diag *diag);
/* One llama_decode; logits of the last (or all) tokens are wanted when asked for. */
akv_status akvl_run(akv_llama *host, struct llama_context *context, akvl_hook *hook, const int32_t *tokens,
                    size_t num_tokens, int32_t position, bool want_last, bool want_all, akv_diag *diag);
akv_status akvl_keep_logits(akv_llama *host, struct llama_context *context, size_t num_rows, size_t first_row,
                            akv_diag *diag);
bool akvl_eval(struct ggml_tensor *node, bool ask, void *user);
/* The modes that break: called with a computed node. */
void akvl_capture(akvl_hook *hook, int layer, const struct ggml_tensor *node);
/* Attention of one layer in place of libllama's: reads the node's sources, writes its data. */
void akvl_replace(akvl_hook *hook, int layer, struct ggml_tensor *node);

akv_status akvl_gang_create(akv_llama *host, akvl_gang **out, akv_diag *diag);
void akvl_gang_free(akvl_gang *gang); /* after the contexts whose nodes it took; NULL is fine */
/* Tasks of an operator that is running, on all threads that run it; NULL of NULL. */
const akv_executor *akvl_gang_executor(const akvl_gang *gang);
void akvl_gang_begin(akvl_gang *gang); /* before every llama_decode */
/* An attention node that has not run becomes ours, for as long as its graph lives. */
void akvl_gang_take(akvl_gang *gang, int layer, struct ggml_tensor *node);

/* Attention of one layer over the running segments and the tail: everything but the tensors, enough for the workspace. */
void akvl_fill_params(const akv_llama *host, uint32_t number, uint32_t num_queries, uint64_t tail_tokens,
                      akv_attend_params *out);
/* One layer of akv_llama_compare; `attached` is the call whose result is there. Allocates nothing. */
akv_status akvl_compare_layer(akv_llama *host, uint32_t number, const akv_attend_params *attached, akv_diag *diag);

/* decode.c: the segment lists of host->store, and B right behind its document. */
akv_status akvl_running_create(akv_llama *host, akv_diag *diag);
void akvl_running_free(akv_llama *host);
akv_status akvl_rewind_tail(akv_llama *host, akv_diag *diag);
/* Whether B's graph attends as a store's layers were learnt. */
akv_status akvl_check_store(const akvl_graph *graph, const akv_llama_store_parts *parts, akv_diag *diag);
/* switch.c: the conversation in B is set aside, B is free. */
akv_status akvl_set_aside(akv_llama *host, akv_diag *diag);

/* State of window and recurrent layers of sequence 0. */
akv_status akvl_save_native(struct llama_context *context, void **out, size_t *bytes, akv_diag *diag);
akv_status akvl_load_native(struct llama_context *context, const void *state, size_t bytes, akv_diag *diag);

/* Room for one more segment of each hosted layer, and putting it there. */
akv_status akvl_running_reserve(akv_llama *host, uint32_t layer, akv_diag *diag);
/* B's empty memory right behind `position` - 1, with the state of the layers that libllama keeps. */
akv_status akvl_reset_tail(akv_llama *host, const void *native_state, size_t native_bytes, int32_t position, akv_diag *diag);
/* B's cells as one dense segment of a hosted layer. */
akv_status akvl_tail_segment(akv_llama *host, uint32_t layer, akv_segment **out, akv_diag *diag);
/* conversation.c */
bool akvl_is_hosted(const akv_llama *host, uint32_t layer);
akv_segment_info akvl_info_of(const akv_segment *segment);
/* 16-bit bytes of one token in all hosted layers. */
uint64_t akvl_token_bytes(const akv_llama *host);
/* rolling.c: the latest queries of a layer; compress what has become old; free what belongs to it. */
void akvl_rolling_observe(akv_llama *host, uint32_t layer, const struct ggml_tensor *q);
akv_status akvl_roll(akv_llama *host, akv_diag *diag);
uint32_t akvl_rolling_observing(const akv_llama *host); /* rows of the ring of queries */
void akvl_rolling_forget(akv_llama *host);
void akvl_rolling_free(akv_llama *host);

void akvl_drop_dense(akv_llama *host);
void akvl_drop_tail(akv_llama *host);
/* Fills host->layer_stats from a store; seconds are left as they are. */
void akvl_note_store(akv_llama *host, const akv_llama_store *store);

#endif
