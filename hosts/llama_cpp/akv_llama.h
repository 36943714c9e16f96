/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_llama.h - AnchorKV on an unmodified libllama: prefill a document once, compress its key/value cache, free the
 * dense cache, and decode questions against the compressed form.
 *
 *   akv_llama_open(&options, &host, &diag);
 *   akv_llama_render_document(host, AKV_LLAMA_CHAT, NULL, text, text_bytes, &tokens, &n, &diag);
 *   akv_llama_prefill(host, tokens, n, 0, &diag);                           // context A: stock llama.cpp, dense cache
 *   akv_llama_compress(host, AKV_LLAMA_ANCHOR, &config, &store, &diag);     // straight from A's buffers
 *   akv_llama_free_dense(host, &diag);                                      // A and its dense cache are gone
 *   akv_llama_attach(host, store, &diag);                                   // context B: small, its cells are the tail
 *   for each question {
 *       akv_llama_rewind(host, &diag);                                      // back to "just after the document"
 *       akv_llama_render_question(host, AKV_LLAMA_CHAT, NULL, question, bytes, &q, &nq, &diag);
 *       akv_llama_decode(host, q, nq, AKV_LLAMA_LOGITS_LAST, &diag);
 *       while (...) { pick from akv_llama_logits(host, -1); akv_llama_decode(host, &token, 1, ...); }
 *   }
 *
 * The dense peer needs neither compress nor attach: prefill with reserve_cells, then the same rewind and decode.
 * Which layers are compressed is decided by what the model's graph says, never by its name: docs/hosting-llama-cpp.md.
 *
 * Peers to compare with: akv_llama_prefill_cache and akv_llama_compress_with.
 *
 * A host is used by one thread at a time; what takes a const host and returns texts or tokens may run beside it. Outputs are
 * untouched on failure; the host stays usable. The one piece of process-wide state is libllama's own log hook, which akv_llama_open
 * sets.
 */
#ifndef AKV_LLAMA_H
#define AKV_LLAMA_H

#include <anchorkv/anchorkv.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct akv_llama akv_llama;             /* one loaded model and at most two contexts */
typedef struct akv_llama_store akv_llama_store; /* one compressed document; immutable, reference-counted (atomic) */
typedef struct akv_llama_conversation akv_llama_conversation; /* one of several on a host, see akv_llama_switch */

/* ----------------------------------------------------------------------------------------- open and describe */

typedef enum akv_llama_stage {
    AKV_LLAMA_STAGE_LOAD = 0,     /* done / total in thousandths */
    AKV_LLAMA_STAGE_PREFILL = 1,  /* tokens */
    AKV_LLAMA_STAGE_COMPRESS = 2, /* layers */
    AKV_LLAMA_STAGE_DECODE = 3    /* tokens of one akv_llama_decode call */
} akv_llama_stage;

/* Called on the caller's thread, also inside long steps (about 20 times a second); nonzero asks to stop: the running
 * call returns AKV_E_CANCELLED. */
typedef int (*akv_llama_progress_fn)(void *opaque, akv_llama_stage stage, uint64_t done, uint64_t total);

/* One line of libllama's log, without its level. */
typedef void (*akv_llama_log_fn)(void *opaque, const char *text);

typedef enum akv_llama_log_level {
    AKV_LLAMA_LOG_NONE = 0,
    AKV_LLAMA_LOG_ERRORS = 1,
    AKV_LLAMA_LOG_WARNINGS = 2,
    AKV_LLAMA_LOG_INFO = 3,
    AKV_LLAMA_LOG_DEBUG = 4
} akv_llama_log_level;

typedef struct akv_llama_options {
    size_t struct_size;
    const char *model_path;        /* GGUF; read during akv_llama_open only */
    uint32_t num_threads;          /* of libllama's own operators; 0 = 1 */
    uint32_t tail_cells;           /* cells of context B; 1024. Rounded up by libllama to a multiple of 256 */
    uint32_t batch_tokens;         /* tokens per graph, at least 64; 512 */
    uint32_t observation_queries;  /* W; 32 */
    uint32_t use_amx;              /* 0: a libllama built with AMX is kept from using it (and from repacking weights),
                                      because AMX ends the process in many virtual machines; 1: it may */
    akv_llama_log_level log_level; /* NONE: libllama is silenced */
    akv_llama_log_fn log;          /* receives what log_level lets through; NULL silences too */
    void *log_opaque;
    akv_llama_progress_fn progress; /* NULL is fine */
    void *progress_opaque;
    const akv_executor *executor; /* for compression; NULL = serial; must outlive the host. Attention runs on
                                     libllama's own threads */
} akv_llama_options;

void akv_llama_options_init(akv_llama_options *options);

/*
 * akv_llama_open() - load a model. No context is made yet.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_IO (no such file, or libllama cannot load it), AKV_E_UNSUPPORTED
 * (recurrent, encoder-decoder and diffusion models), AKV_E_NO_MEMORY, AKV_E_CANCELLED.
 */
akv_status akv_llama_open(const akv_llama_options *options, akv_llama **out, akv_diag *diag);
void akv_llama_close(akv_llama *host); /* NULL is fine */
/* Nonzero: this libllama was built with AMX, which the host keeps it from using unless use_amx is set. */
int akv_llama_has_amx_buffers(void);

/*
 * akv_llama_open_beside() - another host on a model that is loaded already: it has contexts of its own and may be used by another
 * thread at the same time. options->model_path is not read; the log stays as the first host set it. The model lives until the last
 * of its hosts is closed. Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY.
 */
akv_status akv_llama_open_beside(akv_llama *host, const akv_llama_options *options, akv_llama **out, akv_diag *diag);

/*
 * What must agree between the model that made a store and the model that answers from it. Fixed-width fields in one
 * order without padding: little-endian programs may write the struct as it is (96 bytes).
 */
typedef struct akv_llama_fingerprint {
    uint32_t num_layers;
    uint32_t num_heads; /* of the first layer that has any */
    uint32_t num_kv_heads;
    uint32_t embedding_dim;
    uint32_t vocab_tokens;
    int32_t rope_type; /* llama_model_rope_type */
    uint64_t weight_bytes;
    uint64_t hash[2];     /* 128 bits over metadata, token texts and samples of every tensor's data */
    char description[48]; /* llama_model_desc, zero-padded; for messages, not compared */
} akv_llama_fingerprint;

typedef struct akv_llama_model_info {
    size_t struct_size;
    char architecture[64]; /* general.architecture */
    char name[128];        /* general.name, or empty */
    char description[128]; /* e.g. "llama 135M Q4_1" */
    char library[64];      /* version of libllama */
    uint32_t num_layers;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t sliding_window; /* tokens, 0 = none */
    uint32_t train_context;  /* tokens */
    uint32_t vocab_tokens;
    uint32_t has_chat_template;
    uint64_t weight_bytes;
    akv_llama_fingerprint fingerprint;
} akv_llama_model_info;

void akv_llama_model_info_init(akv_llama_model_info *info);
akv_status akv_llama_get_model_info(const akv_llama *host, akv_llama_model_info *out, akv_diag *diag);

/*
 * AKV_OK when a store with fingerprint `made_with` can be used with this host's model, else AKV_E_MISMATCH and the
 * first field that differs. akv_llama_attach does this itself.
 */
akv_status akv_llama_check_fingerprint(const akv_llama *host, const akv_llama_fingerprint *made_with, akv_diag *diag);

/* -------------------------------------------------------------------------------------------- text and tokens */

/* Token arrays come from malloc; release them with akv_llama_free_tokens (NULL is fine). */
void akv_llama_free_tokens(int32_t *tokens);

/* Plain tokenisation. add_special: let the model add its BOS; parse_special: turn texts like <|im_end|> into tokens. */
akv_status akv_llama_tokenize(const akv_llama *host, const char *text, size_t text_bytes, int add_special,
                              int parse_special, int32_t **tokens, size_t *num_tokens, akv_diag *diag);

/*
 * The bytes of one token (may be part of a UTF-8 character). *bytes is set to the length; AKV_E_NO_SPACE when capacity
 * is smaller (64 is plenty for real vocabularies). Control tokens give no bytes unless special != 0.
 */
akv_status akv_llama_token_text(const akv_llama *host, int32_t token, int special, char *text, size_t capacity,
                                size_t *bytes, akv_diag *diag);
int akv_llama_is_end(const akv_llama *host, int32_t token); /* nonzero: the token ends an answer */

typedef enum akv_llama_prompt {
    AKV_LLAMA_CHAT = 0, /* the model's chat template: one user turn, document first, question last */
    AKV_LLAMA_RAW = 1   /* BOS, document, then the question's text as it is */
} akv_llama_prompt;

/*
 * akv_llama_render_document() / akv_llama_render_question() - the two halves of one prompt.
 *
 * The document's half is everything up to and including the document; the question's half is a separator, the question,
 * the end of the turn and the assistant's header (AKV_LLAMA_RAW: only the question's text). Concatenated they are the
 * whole prompt. Neither document nor question is ever read as control tokens. Give the same system text (NULL = none)
 * to both. In the chat form a model without template, or with one outside the list that libllama can render, is
 * AKV_E_UNSUPPORTED with a sentence that names raw mode. An empty document or question is AKV_E_INVALID_ARGUMENT.
 */
akv_status akv_llama_render_document(const akv_llama *host, akv_llama_prompt form, const char *system,
                                     const char *document, size_t document_bytes, int32_t **tokens, size_t *num_tokens,
                                     akv_diag *diag);
akv_status akv_llama_render_question(const akv_llama *host, akv_llama_prompt form, const char *system,
                                     const char *question, size_t question_bytes, int32_t **tokens, size_t *num_tokens,
                                     akv_diag *diag);

/*
 * Pieces of a chat of several turns, in the chat form. The opening is what stands before the first user's text (it is read as the
 * document of a chat that has none); a turn is the user's text with what the template puts around it: after the opening, or
 * after an answer that has not been closed yet. Behind a document the first turn is akv_llama_render_question.
 */
typedef enum akv_llama_turn { AKV_LLAMA_TURN_FIRST = 0, AKV_LLAMA_TURN_LATER = 1 } akv_llama_turn;

akv_status akv_llama_render_opening(const akv_llama *host, const char *system, int32_t **tokens, size_t *num_tokens,
                                    akv_diag *diag);
akv_status akv_llama_render_turn(const akv_llama *host, akv_llama_turn turn, const char *system, const char *text,
                                 size_t text_bytes, int32_t **tokens, size_t *num_tokens, akv_diag *diag);

/* --------------------------------------------------------------------------------------- prefill and compress */

/*
 * akv_llama_prefill() - read the document densely in context A (stock llama.cpp with flash attention, f16 cache).
 *
 *   tokens         in  [num_tokens], positions 0, 1, ...; num_tokens >= 1 and at most the model's context
 *   reserve_cells  in  cells kept free for decoding densely afterwards; 0 when the cache will be compressed
 *
 * Before the long run the graph is examined on a few tokens; a model that cannot be hosted is AKV_E_UNSUPPORTED with
 * the reason. Afterwards akv_llama_logits(host, -1) are those of the last token, and akv_llama_decode goes on densely.
 * Also AKV_E_NO_MEMORY, AKV_E_CANCELLED (nothing is kept then). A former dense cache of this host is freed first.
 */
akv_status akv_llama_prefill(akv_llama *host, const int32_t *tokens, size_t num_tokens, size_t reserve_cells,
                             akv_diag *diag);

/*
 * akv_llama_extend() - replace what follows the prefilled document by num_tokens >= 1 tokens, which become part of the
 * document: for question-aware compression of many questions without reading the document again for each.
 *
 * A second call starts from the prefilled document again. Room comes from reserve_cells. Then as after a prefill: logits of
 * the last token are there, akv_llama_rewind returns to the end of the longer document, akv_llama_compress takes it whole,
 * with the queries of its last W tokens. The queries sampled on the way are those of the prefilled document.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_BAD_STATE (no dense cache, or a store is attached), AKV_E_NO_SPACE,
 * AKV_E_UNSUPPORTED (sliding-window or recurrent layers, which cannot go back; a document no longer than W: prefill the
 * longer document instead), AKV_E_NO_MEMORY, AKV_E_CANCELLED. A failure while reading frees the dense cache.
 */
akv_status akv_llama_extend(akv_llama *host, const int32_t *tokens, size_t num_tokens, akv_diag *diag);

/* libllama's own types of key/value cache. */
typedef enum akv_llama_cache_type {
    AKV_LLAMA_CACHE_F16 = 0,
    AKV_LLAMA_CACHE_Q8_0 = 1,
    AKV_LLAMA_CACHE_Q5_1 = 2,
    AKV_LLAMA_CACHE_Q5_0 = 3,
    AKV_LLAMA_CACHE_Q4_1 = 4,
    AKV_LLAMA_CACHE_Q4_0 = 5,
    AKV_LLAMA_CACHE_IQ4_NL = 6
} akv_llama_cache_type;

/*
 * akv_llama_prefill_cache() - akv_llama_prefill with both halves of the cache in a type of libllama's: a peer to compare
 * with, stock llama.cpp throughout, where even the prefill attends to the quantised cache. It can be asked
 * (akv_llama_rewind, akv_llama_decode) but not compressed, unless the type is F16.
 * Errors as akv_llama_prefill; AKV_E_UNSUPPORTED when libllama cannot keep this model's cache in that type.
 */
akv_status akv_llama_prefill_cache(akv_llama *host, akv_llama_cache_type type, const int32_t *tokens, size_t num_tokens,
                                   size_t reserve_cells, akv_diag *diag);

/* Bytes of a cache of this type where f16 takes f16_bytes; 0 for an unknown type. Rows of whole blocks are assumed. */
uint64_t akv_llama_cache_bytes(akv_llama_cache_type type, uint64_t f16_bytes);

typedef enum akv_llama_method {
    AKV_LLAMA_ANCHOR = 0, /* akv_compress */
    AKV_LLAMA_SNAPKV = 1, /* akv_evict_snapkv at the same byte budget */
    AKV_LLAMA_EXACT = 2,  /* akv_segment_create_dense: everything kept, for control */
    AKV_LLAMA_CUSTOM = 3  /* the caller's own segments: akv_llama_compress_with only, never in a file */
} akv_llama_method;

/*
 * akv_llama_compress() - every full-attention layer of the dense cache -> one segment each; the other layers' state is
 * copied as it is. config->executor NULL means the host's. config->budget_bytes, if given, is for ONE layer.
 * After a dense decode, rewind first (else AKV_E_BAD_STATE). The dense cache stays, so a failure or a second method
 * costs no second prefill. Errors of akv_compress pass through with the layer named.
 */
akv_status akv_llama_compress(akv_llama *host, akv_llama_method method, const akv_config *config, akv_llama_store **out,
                              akv_diag *diag);

/*
 * akv_llama_set_layer_shares() - from now on akv_llama_compress with AKV_LLAMA_ANCHOR gives layer i shares[i] times the budget
 * of the mean layer; the sum over the layers stays what config says. Only proportions matter: they are brought to a mean of 1
 * over the dense bytes of the layers that are compressed. Where the smallest would not hold what every segment needs, all are
 * mixed with equal shares as far as necessary (stats.share_strength says how far).
 *
 *   shares  in  [num_layers], all > 0 and finite, copied; NULL: equal shares again. Of layers without segments: not read
 *
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_MISMATCH (another number of layers than the model's), AKV_E_NO_MEMORY.
 */
akv_status akv_llama_set_layer_shares(akv_llama *host, const double *shares, uint32_t num_layers, akv_diag *diag);

/*
 * akv_llama_solve_shares() - the split of a budget that minimises the sum of the layers' relative squared errors.
 *
 *   ratios      in   [num_ratios] ascending, > 1: how many times smaller the layers were made
 *   errors      in   [num_ratios][num_layers] relative squared error of the layer's attention output, >= 0 and finite; a negative
 *                    number in every row: this layer has no segments
 *   keep_ratio  in   of all layers together
 *   shares      out  [num_layers], mean 1 over the layers with segments, each 1/4..4; 1 for the others
 *
 * Between the measured ratios the curves are straight in log-log, beyond them they go on as at the end. Returns AKV_OK,
 * AKV_E_INVALID_ARGUMENT. Derivation: docs/method.md "one budget for all layers".
 */
akv_status akv_llama_solve_shares(const double *ratios, const double *errors, uint32_t num_ratios, uint32_t num_layers,
                                  double keep_ratio, double *shares, akv_diag *diag);

/*
 * One layer's cache -> one segment with one reference, all of the layer's tokens in it. Called on the caller's thread for
 * each full-attention layer in turn. `layer` and `config` (its executor is the host's unless the caller gave one) are
 * borrowed. Any status but AKV_OK ends akv_llama_compress_with with it.
 */
typedef akv_status (*akv_llama_segment_fn)(void *opaque, const akv_layer *layer, const akv_config *config,
                                           akv_segment **out, akv_diag *diag);

/*
 * akv_llama_compress_with() - akv_llama_compress with the caller's own codec, for comparisons: what another method would
 * hand back of the cache goes into segments and is attended to by the same code. The stats count the segments' bytes; what
 * that method would have stored is the caller's to count. Errors as akv_llama_compress, and those of `make`.
 */
akv_status akv_llama_compress_with(akv_llama *host, akv_llama_segment_fn make, void *opaque, const akv_config *config,
                                   akv_llama_store **out, akv_diag *diag);

/* Free context A and its dense cache; notes the resident bytes before and after. AKV_OK when there is none. */
akv_status akv_llama_free_dense(akv_llama *host, akv_diag *diag);

/* ----------------------------------------------------------------------------------------------------- stores */

typedef enum akv_llama_layer_kind {
    AKV_LLAMA_LAYER_HOSTED = 0,  /* its cache lives in segments */
    AKV_LLAMA_LAYER_WINDOW = 1,  /* sliding window, left to libllama; its cells are in native_state */
    AKV_LLAMA_LAYER_NO_CACHE = 2 /* recurrent (its state is in native_state), or it reads another layer's cache */
} akv_llama_layer_kind;

/*
 * How one layer attends and rotates; learnt from the graph, compared on attach. Fixed-width fields without padding (72
 * bytes).
 */
typedef struct akv_llama_layer {
    uint32_t kind;         /* akv_llama_layer_kind */
    uint32_t num_kv_heads; /* this and the rest: 0 unless HOSTED */
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t rotary_dim;
    uint32_t rope_style; /* akv_rope_style */
    uint32_t has_sinks;
    double rope_magnitude;
    double sm_scale;
    double logit_softcap;
    uint64_t rope_hash;     /* of the rotary parameters and frequency factors as the model gives them */
    uint32_t num_segments;  /* HOSTED: >= 1, in order of position */
    uint32_t first_segment; /* index into akv_llama_store_parts.segments */
} akv_llama_layer;

/* A store taken apart, for writing it to a file and making it again. All arrays are borrowed. */
typedef struct akv_llama_store_parts {
    size_t struct_size;
    akv_llama_fingerprint fingerprint;
    const int32_t *tokens; /* [num_tokens] the document's token ids */
    uint64_t num_tokens;
    int32_t next_position; /* of the first token after the document */
    uint32_t method;       /* akv_llama_method */
    uint32_t num_layers;
    const akv_llama_layer *layers; /* [num_layers] */
    uint32_t num_segments;         /* of all layers together, in layer order */
    akv_segment *const *segments;  /* [num_segments] */
    const void *native_state;      /* libllama's bytes for window and recurrent layers, or NULL */
    uint64_t native_state_bytes;
} akv_llama_store_parts;

void akv_llama_store_parts_init(akv_llama_store_parts *parts);
/* Borrowed views, valid while the store lives. */
akv_status akv_llama_store_get_parts(const akv_llama_store *store, akv_llama_store_parts *out, akv_diag *diag);
/*
 * Copies the arrays and retains the segments. Checks that everything fits together (counts, shapes, positions, layer
 * order): AKV_E_CORRUPT with the part that does not. Whether the model fits is checked by akv_llama_attach.
 */
akv_status akv_llama_store_create(const akv_llama_store_parts *parts, akv_llama_store **out, akv_diag *diag);
akv_llama_store *akv_llama_store_retain(akv_llama_store *store);
void akv_llama_store_release(akv_llama_store *store); /* NULL is fine */

/* ----------------------------------------------------------------------------------------------------- decode */

/*
 * akv_llama_attach() - make context B and answer from `store` (retained) from now on.
 * Returns AKV_OK, AKV_E_MISMATCH (another model, or its graph rotates or attends differently; the message names the
 * field and layer), AKV_E_UNSUPPORTED, AKV_E_CORRUPT (native state), AKV_E_NO_MEMORY.
 */
akv_status akv_llama_attach(akv_llama *host, akv_llama_store *store, akv_diag *diag);
/* Free context B; decoding goes on densely if the dense cache is still there. AKV_OK when nothing is attached. */
akv_status akv_llama_detach(akv_llama *host, akv_diag *diag);

/* Forget everything after the document: the next token decoded stands right behind it. Works densely and attached. */
akv_status akv_llama_rewind(akv_llama *host, akv_diag *diag);

typedef enum akv_llama_logits_mode { AKV_LLAMA_LOGITS_LAST = 0, AKV_LLAMA_LOGITS_ALL = 1 } akv_llama_logits_mode;

/*
 * akv_llama_decode() - append num_tokens >= 1 tokens to the conversation.
 *
 * When B's cells run out they move, exactly, into dense segments of the running conversation, and decoding goes on.
 * After an error (AKV_E_CANCELLED included) the conversation is undefined until akv_llama_rewind.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT (no such token), AKV_E_BAD_STATE (neither prefilled nor attached),
 * AKV_E_NO_SPACE (the model's context, or densely the reserved cells, are used up), AKV_E_NO_MEMORY, AKV_E_CANCELLED.
 */
akv_status akv_llama_decode(akv_llama *host, const int32_t *tokens, size_t num_tokens, akv_llama_logits_mode mode,
                            akv_diag *diag);

/*
 * akv_llama_compare() - akv_llama_decode on the attached store (logits of the last token), while every layer attends with the
 * same queries to other stores of the same document too: how far would its output be off? Errors do not add up from layer
 * to layer, since all queries are the attached store's.
 *
 *   others         in      [num_others], num_others >= 1
 *   squared_error  in/out  [num_others][num_layers] sum over tokens, heads and dimensions of the squared difference is added
 *   energy         in/out  [num_layers] the same sum of the squared outputs of the attached store is added
 *
 * Layers without segments are left alone. The tokens must fit the free tail cells. Errors as akv_llama_decode, and
 * AKV_E_MISMATCH (a store of another document or model).
 */
akv_status akv_llama_compare(akv_llama *host, akv_llama_store *const *others, size_t num_others, const int32_t *tokens,
                             size_t num_tokens, double *squared_error, double *energy, akv_diag *diag);

/*
 * Logits [vocab_tokens] of token `index` of the last decode; -1 = its last token, the only one in LAST mode. NULL when
 * there are none. Valid until the next call that decodes, rewinds, attaches, detaches or frees.
 */
const float *akv_llama_logits(const akv_llama *host, int64_t index);

/* ------------------------------------------------------------------------------------------------- conversations */

/* How a conversation behind an attached store is kept small. */
typedef struct akv_llama_rolling {
    size_t struct_size;
    akv_config config;       /* of the segments; keep_ratio is that of the whole conversation, cells and exact tokens
                                included: older tokens keep less than newer ones. budget_bytes must be 0. executor NULL
                                means the host's */
    uint32_t segment_tokens; /* how many old tokens become one segment; fewer when the older ones would suffer; 512 */
    uint32_t keep_tokens;    /* how many of the latest stay exact besides B's cells, at least; 0 */
    uint32_t from_token;     /* the tokens before this one stay as they are unless the budget asks for more: a document;
                                UINT32_MAX (as initialised): all that is there already */
    uint64_t budget_bytes;   /* most that all segments and B's cells may take together, hosted layers; 0 = no limit */
    uint32_t full_tokens;    /* the conversation may always take as many bytes as so many tokens uncompressed; 2048 */
} akv_llama_rolling;

void akv_llama_rolling_init(akv_llama_rolling *rolling); /* config as akv_config_init */

/*
 * akv_llama_set_rolling() - from now on the conversation takes at most keep_ratio of its bytes, or what full_tokens of
 * them take; whenever B's cells move, and now. Nothing is compressed before it has to be. Then older segments are made
 * smaller, or exact tokens become a segment, the queries asked last telling what is worth its bytes; old neighbours of
 * which little but the fixed part would be left become one. What cannot shrink that far becomes as small as it can.
 * Layer shares (akv_llama_set_layer_shares) hold here too. Compressed segments (the document's too) are made smaller
 * when the budget would not hold. NULL ends it. Ends with akv_llama_detach.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_BAD_STATE (nothing attached), AKV_E_INFEASIBLE (the budget is below what
 * the exact tokens take at most beside the document; the message says what is needed. akv_llama_decode returns it when
 * the compressed segments cannot shrink any more), AKV_E_NO_MEMORY, AKV_E_NON_FINITE (a query asked last).
 */
akv_status akv_llama_set_rolling(akv_llama *host, const akv_llama_rolling *rolling, akv_diag *diag);

/*
 * akv_llama_truncate() - forget every token from `position` on, 1 <= position <= akv_llama_next_position: in B's cells, in the
 * conversation's segments (one met in the middle is cut, exactly) and in the attached document. There are no logits afterwards.
 * akv_llama_rewind leads back to the whole document. Also mends a conversation that a failed or cancelled decode left undefined.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_BAD_STATE (nothing attached), AKV_E_UNSUPPORTED (sliding-window or recurrent
 * layers, which cannot go back; a segment that cannot be cut), AKV_E_NO_MEMORY.
 */
akv_status akv_llama_truncate(akv_llama *host, int32_t position, akv_diag *diag);

/*
 * akv_llama_snapshot() - document and conversation as one store; B's cells become a dense segment of it. The host goes on unchanged;
 * segments are shared, not copied. Attached again it continues after the last token.
 */
akv_status akv_llama_snapshot(akv_llama *host, akv_llama_store **out, akv_diag *diag);

/* Token ids [akv_llama_next_position] of document and conversation; borrowed until the next decode. NULL when nothing is attached. */
const int32_t *akv_llama_history(const akv_llama *host);

/*
 * Several conversations in turn on one host, in one context B: the one that has to wait is set aside with as many of B's cells as it
 * uses, byte for byte. They may stand behind one store (its segments are shared) or behind different ones.
 *
 * akv_llama_conversation_create() - one that stands right behind `store`'s document (retained). Nothing is computed or copied yet.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_MISMATCH (a store of another model), AKV_E_NO_MEMORY.
 *
 * akv_llama_switch() - `to` goes into B, the one that was there is set aside; what akv_llama_attach put there is dropped. Then the host is
 * as after akv_llama_attach and whatever was done to `to` since (its rolling compression included); there are no logits. The first
 * call makes B. akv_llama_attach, _detach and _prefill set the conversation in B aside too.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_MISMATCH, AKV_E_NO_MEMORY (each leaves the one in B there, or sets it aside),
 * AKV_E_BAD_STATE (`to` is in another host's B, or was lost when there was no memory to set it aside), AKV_E_CORRUPT (libllama does
 * not take its cells back: `to` goes on waiting, and nothing is in B).
 *
 * akv_llama_conversation_free() - from B too. Only on the thread that uses the host, and before the host is closed if it is in its B.
 * akv_llama_conversation_bytes() - of B's cells, while it is set aside; 0 in B, and before its first token.
 * akv_llama_conversation_segment_bytes() - of its own segments, those of the document not counted.
 */
akv_status akv_llama_conversation_create(const akv_llama *host, akv_llama_store *store, akv_llama_conversation **out,
                                         akv_diag *diag);
akv_status akv_llama_switch(akv_llama *host, akv_llama_conversation *to, akv_diag *diag);
void akv_llama_conversation_free(akv_llama_conversation *conversation); /* NULL is fine */
uint64_t akv_llama_conversation_bytes(const akv_llama_conversation *conversation);
uint64_t akv_llama_conversation_segment_bytes(const akv_llama_conversation *conversation);

/* The bytes that count for the budget: all segments attended to, and B's cells as they are allocated. */
typedef struct akv_llama_memory {
    size_t struct_size;
    akv_bytes segments;     /* by kind */
    uint64_t cell_bytes;    /* of B's cells, hosted layers */
    uint64_t dense_bytes;   /* what all tokens would take uncompressed in 16 bit, hosted layers */
    uint32_t num_segments;  /* all layers together */
    uint32_t rolls;         /* how often old tokens were compressed since attach */
    uint32_t retargets;     /* how often older segments were made smaller */
} akv_llama_memory;

void akv_llama_memory_init(akv_llama_memory *memory);
akv_status akv_llama_get_memory(const akv_llama *host, akv_llama_memory *out, akv_diag *diag);

int32_t akv_llama_next_position(const akv_llama *host); /* of the next token; -1 when neither prefilled nor attached */

/* ------------------------------------------------------------------------------------------------------ stats */

typedef struct akv_llama_layer_stats {
    uint32_t kind;            /* akv_llama_layer_kind */
    double seconds;           /* spent compressing */
    akv_segment_info segment; /* HOSTED: its first segment */
} akv_llama_layer_stats;

typedef struct akv_llama_stats {
    size_t struct_size;
    double load_seconds;
    uint64_t prefill_tokens;
    double prefill_seconds;
    double compress_seconds;
    uint64_t decode_tokens; /* since attach (attached) or since prefill (densely) */
    double decode_seconds;
    double attend_seconds;      /* the part of decode_seconds spent in akv_attend */
    double share_strength;      /* of the last compression: 0 = the layers' budgets were equal; 1 = as akv_llama_set_layer_shares
                                   asked; between: nearer to equal, because the smallest could not be held */
    uint64_t tail_moves;        /* how often B's cells moved into dense segments */
    uint64_t dense_cache_bytes; /* hosted layers, prefix tokens only, 16 bit */
    uint64_t compressed_bytes;  /* the segments that replace them, objects included */
    uint64_t native_bytes;      /* state of layers left to libllama */
    uint64_t context_a_cells;   /* cells that context A had (padding included); 0 if there was no prefill */
    uint64_t rss_before;        /* resident bytes just before and after context A was freed; 0 = not measured */
    uint64_t rss_after;
    uint32_t hosted_layers;
    uint32_t native_layers; /* WINDOW and NO_CACHE */
    uint32_t num_layers;
    const akv_llama_layer_stats
        *layers; /* [num_layers] of the last compress or attach, or NULL; valid until the next */
} akv_llama_stats;

void akv_llama_stats_init(akv_llama_stats *stats);
akv_status akv_llama_get_stats(const akv_llama *host, akv_llama_stats *out, akv_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
