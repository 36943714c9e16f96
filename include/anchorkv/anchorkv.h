/* SPDX-License-Identifier: Apache-2.0 */
/*
 * anchorkv.h - shrink a transformer's key/value cache without dropping a token, and attend to the compressed form.
 *
 *   akv_config cfg;  akv_config_init(&cfg);  cfg.keep_ratio = 0.1;              // a tenth of the bytes
 *   akv_compress(&layer, &cfg, &segment, &diag);                                // once per layer, after the prefill
 *   akv_attend_workspace_bytes(&att, &bytes, &diag);
 *   akv_attend(&att, workspace, bytes, &diag);                                  // every decode step
 *
 * The method is that of "AnchorKV: Anchor-Residual KV Cache Compression" (arXiv 2608.02901): a few tokens per KV head
 * are kept as anchors, every other key and value is coefficient x nearest anchor, and a quantised residual is stored
 * only where the attention output would feel its absence. docs/method.md derives it, docs/format.md defines the bytes.
 *
 * Rules that hold for every function here:
 *   - Nothing prints, exits, aborts, touches errno or keeps global state. Every failure is an akv_status; when the
 *     caller passes an akv_diag it also holds a sentence saying what is wrong and what would be right.
 *   - On failure outputs are untouched and the caller's data stays usable.
 *   - Structs that begin with struct_size are filled by their _init function, then edited by the caller.
 *   - Strides are in elements and may be negative or zero where that makes sense; sizes are in tokens or bytes,
 *     as named.
 *   - Shapes are written [outer, ..., inner]; H = num_kv_heads, G = gqa_group, S = num_tokens.
 */
#ifndef ANCHORKV_H
#define ANCHORKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#  define AKV_API
#elif defined(__GNUC__)
#  define AKV_API __attribute__((visibility("default")))
#else
#  define AKV_API
#endif

#define AKV_VERSION_MAJOR 0
#define AKV_VERSION_MINOR 1
#define AKV_VERSION_PATCH 0

/* "0.1.0"; static text. */
AKV_API const char *akv_version(void);

/* ---------------------------------------------------------------------------------------------- status and messages */

/* Values are fixed for ever; new ones are only appended inside their family. */
typedef enum akv_status {
    AKV_OK = 0,
    AKV_E_INVALID_ARGUMENT = -1, /* the caller broke the contract of the function */
    AKV_E_UNSUPPORTED = -2,      /* legal, but this library has no path for it */
    AKV_E_BAD_STATE = -3,        /* the object cannot do this now */
    AKV_E_NO_MEMORY = -10,       /* the allocator returned NULL */
    AKV_E_NO_SPACE = -11,        /* a caller's buffer is too small; the message says what suffices */
    AKV_E_INFEASIBLE = -20,      /* the byte budget cannot hold even the fixed part; the message names the smallest */
    AKV_E_NON_FINITE = -21,      /* NaN or infinity in the input; the message names side, head, token, dim */
    AKV_E_CORRUPT = -30,         /* bytes that no writer of this format produces */
    AKV_E_VERSION = -31,         /* a format version this reader does not know */
    AKV_E_CHECKSUM = -32,        /* bytes that changed after they were written */
    AKV_E_MISMATCH = -33,        /* well-formed, but made for another model or shape */
    AKV_E_IO = -50,              /* the operating system refused; used by programs and hosts, never by the core */
    AKV_E_CANCELLED = -51,       /* the caller's own callback asked to stop; used by hosts */
    AKV_E_DEVICE = -60           /* the GPU or its driver reported an error; used by libanchorkv_cuda */
} akv_status;

/* Static English text for a status, never NULL. */
AKV_API const char *akv_status_str(akv_status status);

/* Caller-owned; every `diag` parameter may be NULL. On success it is left untouched. */
typedef struct akv_diag {
    akv_status status; /* what the function returned */
    char message[508]; /* zero-terminated, one sentence */
} akv_diag;

/* --------------------------------------------------------------------------------------------------- caller's hooks */

/*
 * Memory hooks. alloc returns `bytes` bytes aligned to `align` (a power of two, at most 64) or NULL; free gets the same
 * `bytes` back. Both may be called from executor threads at once. NULL hooks mean libc.
 */
typedef struct akv_allocator {
    void *opaque;                                             /* handed to every call */
    void *(*alloc)(void *opaque, size_t bytes, size_t align); /* NULL when there is no memory */
    void (*free)(void *opaque, void *ptr, size_t bytes);      /* never called with NULL */
} akv_allocator;

/*
 * Work hook. parallel_for calls fn(arg, task) exactly once for each task in [0, num_tasks), in any order, on any
 * threads, and returns when all have returned. NULL means: one after the other on the calling thread. Task boundaries
 * depend on shapes only, so results are bit-identical for every executor.
 */
typedef struct akv_executor {
    void *opaque;
    /* returns when fn has returned for every task */
    void (*parallel_for)(void *opaque, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks);
    uint32_t max_workers; /* how many tasks may run at once, >= 1; bounds scratch memory */
} akv_executor;

/*
 * A small pthread pool as a ready-made executor. num_threads counts the caller's thread. From several threads at once: one of them
 * gets the helpers, the others do their tasks themselves.
 */
typedef struct akv_threads akv_threads;
AKV_API akv_status akv_threads_create(uint32_t num_threads, akv_threads **out, akv_diag *diag);
AKV_API const akv_executor *akv_threads_executor(akv_threads *threads);
AKV_API void akv_threads_destroy(akv_threads *threads); /* NULL is fine */

/* ----------------------------------------------------------------------------------------------------- tensor views */

/* Number types of tensors: IEEE binary32, IEEE binary16, and the upper half of a binary32. */
typedef enum akv_dtype { AKV_F32 = 0, AKV_F16 = 1, AKV_BF16 = 2 } akv_dtype;

/*
 * A borrowed view of a [head, token, dim] tensor. Strides in elements. Alignment of the element type is enough.
 */
typedef struct akv_tensor {
    const void *data;     /* of element [0, 0, 0]; NULL where a tensor may be left out */
    akv_dtype dtype;      /* of its elements */
    int64_t stride_head;  /* elements from one head to the next */
    int64_t stride_token; /* from one token to the next */
    int64_t stride_dim;   /* from one coordinate to the next */
} akv_tensor;

/* Contiguous [heads, tokens, dim]. */
AKV_API akv_tensor akv_tensor_contiguous(const void *data, akv_dtype dtype, uint64_t num_tokens, uint32_t head_dim);

typedef enum akv_rope_style {
    AKV_ROPE_HALF_SPLIT = 0, /* plane j turns coordinates j and j + rotary_dim/2 (GPT-NeoX, Qwen, Gemma) */
    AKV_ROPE_INTERLEAVED = 1 /* plane j turns coordinates 2j and 2j + 1 (original Llama layout in GGUF) */
} akv_rope_style;

/*
 * The rotary embedding that the host applied to keys and queries: plane j of a token at position p is turned by
 * p * inv_freq[j] radians and multiplied by magnitude (1 except for YaRN). Coordinates >= rotary_dim are left alone.
 * Linear, NTK, Llama-3 and YaRN scaling are all expressed through inv_freq and magnitude.
 */
typedef struct akv_rope {
    uint32_t rotary_dim;    /* even, <= head_dim_k; 0 = keys carry no rotation */
    akv_rope_style style;   /* which two coordinates a plane turns */
    double magnitude;       /* > 0 */
    const double *inv_freq; /* [rotary_dim / 2], radians per position; borrowed during the call */
} akv_rope;

/* ----------------------------------------------------------------------------------------------- planning and bytes */

typedef enum akv_profile {
    AKV_PROFILE_PAPER = 1,  /* the paper's method, byte for byte: docs/method.md */
    AKV_PROFILE_DEFAULT = 2 /* our codec on the same frame: more and cheaper anchors, a basis per head, a ladder of
                               levels */
} akv_profile;

struct akv_experiment; /* akv_experimental.h */

/* How to compress one layer. */
typedef struct akv_config {
    size_t struct_size;
    akv_profile profile;   /* the method and its choices */
    double keep_ratio;     /* theta in (0, 1]: stored bytes / dense 16-bit bytes, everything counted. 1 = keep dense */
    uint64_t budget_bytes; /* for this layer; 0 = derive from keep_ratio, else it replaces keep_ratio */
    uint64_t seed;         /* of the random anchors and sign flips; same input and seed, same bytes */
    const akv_allocator *allocator;           /* NULL = libc */
    const akv_executor *executor;             /* NULL = serial */
    const struct akv_experiment *experiment;  /* NULL = the profile as published */
} akv_config;

AKV_API void akv_config_init(akv_config *config); /* profile default, keep_ratio 0.1, seed 0 */

/* The shape of one layer; enough to plan. */
typedef struct akv_shape {
    size_t struct_size;
    uint64_t num_tokens;   /* S >= 1 */
    uint32_t num_kv_heads; /* H >= 1 */
    uint32_t gqa_group;    /* G >= 1: query heads per KV head; query head h reads KV head h / G */
    uint32_t head_dim_k;   /* even, 2..1024 */
    uint32_t head_dim_v;   /* even, 2..1024 */
    uint32_t rotary_dim;   /* as in akv_rope */
    uint32_t num_queries;  /* W: observation queries that will be given = the recency window; 1..1024, 32 is usual */
    uint32_t has_positions;/* nonzero when positions are not consecutive: 4 bytes a token are then stored; taken from
                              the data by akv_compress */
    akv_dtype dtype;       /* of the cache: decides the bytes where a segment stays dense; taken from the tensors by
                              akv_compress (f32 when keys and values differ) */
} akv_shape;

AKV_API void akv_shape_init(akv_shape *shape);

typedef enum akv_segment_kind {
    AKV_SEGMENT_DENSE = 0,     /* every key and value as given */
    AKV_SEGMENT_COMPRESSED = 1 /* anchors, coefficients, residuals */
} akv_segment_kind;

typedef enum akv_dense_reason {
    AKV_DENSE_NONE = 0,       /* not dense */
    AKV_DENSE_REQUESTED = 1,  /* akv_segment_create_dense, or keep_ratio == 1 */
    AKV_DENSE_FITS = 2,       /* dense is within the byte budget */
    AKV_DENSE_WITHIN_WINDOW = 3, /* S <= W: every token belongs to the window, which is always exact */
    AKV_DENSE_EVICTED = 4     /* a subset chosen by an eviction baseline (akv_experimental.h) */
} akv_dense_reason;

/* Bytes by kind. The sum over all fields is total_bytes: headers, padding and the runtime object included. */
typedef struct akv_bytes {
    uint64_t total;        /* the sum of all below */
    uint64_t object;       /* the in-memory object around the canonical bytes (not written to files) */
    uint64_t header;       /* segment header, RoPE table, section padding */
    uint64_t anchors;      /* anchor vectors of both sides */
    uint64_t positions;    /* anchor positions, and token positions where stored */
    uint64_t index;        /* anchor index of every token, both sides */
    uint64_t coefficients; /* coefficient of every token, both sides */
    uint64_t level_maps;   /* which token owns which residual level */
    uint64_t residuals;    /* residual codes and their scales */
    uint64_t model;        /* means, bases, spectra, level tables of profiles that have them */
    uint64_t dense;        /* key and value payload of a dense segment */
} akv_bytes;

/* What a segment will cost, before it is made. */
typedef struct akv_plan_info {
    size_t struct_size;
    akv_segment_kind kind;  /* compressed, or dense where that is no larger */
    akv_dense_reason dense_reason; /* why, when kind is dense */
    uint64_t dense_bytes;   /* H * S * (d_k + d_v) * 2: what the cache costs uncompressed in 16 bit */
    uint64_t budget_bytes;  /* what the segment may cost */
    akv_bytes bytes;        /* what it will cost: bytes.total <= budget_bytes when kind is compressed */
    uint32_t num_anchors;   /* k, per KV head */
    uint64_t residuals_k;   /* residual slots of the key side, all heads together; 0 for profile default, which decides
                               them by the data */
    uint64_t residuals_v;   /* of the value side */
    uint64_t min_bytes;     /* the smallest feasible budget for this shape */
    double min_keep_ratio;  /* the same as a keep ratio */
} akv_plan_info;

AKV_API void akv_plan_info_init(akv_plan_info *info);

/*
 * akv_plan() - exact bytes of a segment before making it. No data needed, no allocation.
 *
 *   shape, config  in   see above
 *   out            out  filled on AKV_OK; on AKV_E_INFEASIBLE dense_bytes, budget_bytes, min_bytes and min_keep_ratio
 *                       are filled
 *
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_UNSUPPORTED, AKV_E_INFEASIBLE (the message names the smallest keep
 * ratio). Error class: exact - akv_compress allocates exactly bytes.total. Threads: any. Method: docs/method.md
 * "bytes".
 */
AKV_API akv_status akv_plan(const akv_shape *shape, const akv_config *config, akv_plan_info *out, akv_diag *diag);

/* ------------------------------------------------------------------------------------------------- compress a layer */

/*
 * One layer's cache at the end of a prefill, as engines keep it: keys AFTER the rotary embedding. All pointers are
 * borrowed during the call and never written.
 */
typedef struct akv_layer {
    size_t struct_size;
    akv_shape shape;          /* of the tensors below; dtype and has_positions are found from the data */
    int32_t layer_index;      /* for messages, and mixed into the seed; any value */
    akv_tensor keys;          /* [H, S, d_k] post-RoPE */
    akv_tensor values;        /* [H, S, d_v] */
    akv_tensor queries;       /* [H*G, W, d_k] post-RoPE queries of the last W tokens (W = shape.num_queries; only the
                                 last min(W, S) rows are read, NULL data is fine when S <= W) */
    akv_tensor sampled;       /* [H*G, M, d_k] further post-RoPE queries of the prompt, or NULL data; they weight the
                                 key coordinates (profile default) */
    uint32_t num_sampled;     /* M; 0 = none */
    const int32_t *sampled_positions; /* [M] where each was asked; needed when num_sampled > 0 */
    const int32_t *positions; /* [S], strictly increasing, or NULL: first_position, first_position + 1, ... */
    int32_t first_position;   /* of token 0, when positions is NULL */
    akv_rope rope;            /* how keys and queries were rotated */
    double sm_scale;          /* softmax scale, usually 1/sqrt(d_k) */
    double logit_softcap;     /* 0 = none, else c: logit = c * tanh(logit / c) */
} akv_layer;

AKV_API void akv_layer_init(akv_layer *layer);

/* An immutable, reference-counted compressed (or dense) stretch of one layer's cache. */
typedef struct akv_segment akv_segment;

/*
 * akv_compress() - one layer's keys and values -> one segment.
 *
 *   layer   in   borrowed
 *   config  in   the byte budget, profile, seed and hooks
 *   out     out  a segment with one reference; release with akv_segment_release
 *
 * One allocation for the segment, of exactly akv_plan's bytes.total; scratch is allocated through the same hooks and
 * freed before the return. Deterministic: same input, config and library build, same bytes, whatever the executor.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_UNSUPPORTED, AKV_E_INFEASIBLE, AKV_E_NON_FINITE, AKV_E_NO_MEMORY.
 * Threads: concurrent calls are fine.   Cost: O(H S d (k + 3 G W)).   Method: docs/method.md; paper sections 3.1-3.4.
 */
AKV_API akv_status akv_compress(const akv_layer *layer, const akv_config *config, akv_segment **out, akv_diag *diag);

/*
 * akv_segment_create_dense() - the same tokens kept exactly. f16 and bf16 stay as they are; f32 (or a
 * mixture) is stored as f32.
 * Of config only allocator and executor are used (NULL config is fine); queries are not read.
 * Errors as akv_compress, without AKV_E_INFEASIBLE.
 */
AKV_API akv_status akv_segment_create_dense(const akv_layer *layer, const akv_config *config, akv_segment **out,
                                            akv_diag *diag);

/* References are atomic. The last release frees. NULL is fine for both. */
AKV_API akv_segment *akv_segment_retain(akv_segment *segment);
AKV_API void akv_segment_release(akv_segment *segment);

/* What a segment is and what it costs. */
typedef struct akv_segment_info {
    size_t struct_size;
    akv_segment_kind kind;  /* compressed or dense */
    akv_dense_reason dense_reason;
    uint32_t profile;       /* akv_profile; 0 for dense */
    akv_shape shape;        /* of the tokens it holds */
    int32_t first_position; /* of its first token */
    int32_t last_position;  /* of its last token */
    uint64_t dense_bytes;   /* as in akv_plan_info, for the tokens that are here: after an eviction (AKV_DENSE_EVICTED)
                               those that were kept, since a segment does not know how many there were */
    uint64_t budget_bytes;  /* what it was allowed to cost */
    akv_bytes bytes;        /* as allocated */
    uint32_t num_anchors;
    uint64_t residuals_k;
    uint64_t residuals_v;
    double sm_scale;
    double logit_softcap;
    uint64_t seed;
    akv_dtype dense_dtype;  /* of a dense segment's payload */
} akv_segment_info;

AKV_API void akv_segment_info_init(akv_segment_info *info);

/* Returns AKV_OK, AKV_E_INVALID_ARGUMENT. Threads: concurrent calls are fine. */
AKV_API akv_status akv_segment_get_info(const akv_segment *segment, akv_segment_info *out, akv_diag *diag);

/*
 * akv_segment_data() - the canonical bytes (docs/format.md): little-endian, position-independent, 64-byte aligned.
 * Borrowed; valid while the segment lives. *bytes == info.bytes.total - info.bytes.object.
 */
AKV_API const void *akv_segment_data(const akv_segment *segment, size_t *bytes);

/*
 * akv_segment_open() - a segment from canonical bytes, which are treated as hostile: every field, offset, index and
 * count is checked before it is used. With copy == 0 the bytes are borrowed (64-byte aligned, unchanged and alive until
 * the last release; a mapped file only if nobody can change or shorten it); otherwise they are copied.
 * Returns AKV_OK, AKV_E_CORRUPT, AKV_E_VERSION, AKV_E_UNSUPPORTED, AKV_E_INVALID_ARGUMENT, AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_segment_open(const void *data, size_t bytes, int copy, const akv_allocator *allocator,
                                    akv_segment **out, akv_diag *diag);

/*
 * akv_segment_decode() - reconstruct tokens [tok0, tok0 + n) of one KV head, for tests and tools (attention never
 * does).
 *
 *   keys    out  [n, head_dim_k] f32, contiguous, post-RoPE; NULL to skip
 *   values  out  [n, head_dim_v] f32, contiguous; NULL to skip
 *
 * n == 0 is a no-op. Returns AKV_OK, AKV_E_INVALID_ARGUMENT. Threads: concurrent calls are fine. No allocation.
 */
AKV_API akv_status akv_segment_decode(const akv_segment *segment, uint32_t kv_head, uint64_t tok0, uint64_t n,
                                      float *keys, float *values, akv_diag *diag);

/* -------------------------------------------------------------------------------------------- smaller, or shorter */

/* What making a segment smaller costs and loses. */
typedef struct akv_retarget_info {
    size_t struct_size;
    uint64_t budget_bytes; /* what the result may cost */
    uint64_t min_bytes;  /* the smallest budget for this segment: nothing but its fixed part */
    akv_bytes bytes;     /* what the result costs: bytes.total <= budget_bytes */
    double lost_k;       /* share of the energy of the stored residuals that is gone, keys and values, 0..1: by
                            akv_segment_retarget only; an estimate from the gains for profile paper */
    double lost_v;       /* likewise of the values */
} akv_retarget_info;

AKV_API void akv_retarget_info_init(akv_retarget_info *info);

/*
 * akv_segment_retarget() - a compressed segment -> a smaller one, without the model: residuals get fewer bits or go.
 * Tokens, positions and anchors stay. Utilities are not stored, so the order of dropping is inferred from the levels:
 * the result is worse than compressing anew for the same bytes (docs/sessions.md has figures).
 *
 *   segment       in   stays as it is
 *   budget_bytes  in   of the result, the in-memory object included
 *   config        in   only allocator and executor are used; NULL = libc, serial
 *   out           out  a segment with one reference: the same one (retained) when it fits already
 *   info          out  may be NULL
 *
 * Deterministic. Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_INFEASIBLE (info, if given, has min_bytes),
 * AKV_E_UNSUPPORTED (a dense segment that does not fit), AKV_E_NO_MEMORY. Threads: concurrent calls are fine.
 */
AKV_API akv_status akv_segment_retarget(akv_segment *segment, uint64_t budget_bytes, const akv_config *config,
                                        akv_segment **out, akv_retarget_info *info, akv_diag *diag);

/* Exact bytes before making it, in constant time; lost_k and lost_v stay 0. Errors as akv_segment_retarget. */
AKV_API akv_status akv_segment_retarget_plan(const akv_segment *segment, uint64_t budget_bytes, akv_retarget_info *info,
                                             akv_diag *diag);

/*
 * akv_segment_retarget_observed() - the same with queries that were asked since: what each token is worth is measured
 * again with them instead of guessed from its level. For a segment that is made smaller little by little, like those of
 * a conversation: guesses add up from step to step (docs/sessions.md has figures).
 *
 *   segment       in   profile default; stays as it is
 *   queries       in   [H * G, num_queries, d_k] after the rotary embedding, of tokens behind the segment, at positions
 *                      counted as the segment's are
 *   num_queries   in   1..1024; a few of the latest are enough
 *   config        in   allocator, executor and experiment are used; NULL = libc, serial, the profile's own
 *
 * The rest as akv_segment_retarget; also AKV_E_NON_FINITE, and AKV_E_UNSUPPORTED for profile paper. Cost: decoding the
 * segment and one attention of the queries over it; scratch for the keys and values, in f32, of as many heads as take
 * 64 MiB, or of one.
 */
AKV_API akv_status akv_segment_retarget_observed(akv_segment *segment, uint64_t budget_bytes, const akv_tensor *queries,
                                                 uint32_t num_queries, const akv_config *config, akv_segment **out,
                                                 akv_retarget_info *info, akv_diag *diag);

/*
 * akv_segment_cut() - the first num_tokens tokens as a segment of their own: they decode to the same keys and values,
 * bit by bit. Anchors that none of them uses go. out: the same segment, retained, when num_tokens is all of it. config
 * as above.
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT (0 tokens, or more than there are), AKV_E_UNSUPPORTED (profile paper, whose
 * tokens may lean on later anchors; a segment after an eviction; a dense one with gaps between positions),
 * AKV_E_NO_MEMORY.
 */
AKV_API akv_status akv_segment_cut(akv_segment *segment, uint64_t num_tokens, const akv_config *config,
                                   akv_segment **out, akv_diag *diag);

/* ----------------------------------------------------------------------------------------------------------- attend */

/*
 * One attention step of one layer: num_queries query tokens over compressed segments (all of whose tokens precede
 * every query) and a dense tail, in one softmax.
 *
 *   out[h, t] = sum_p softmax_p(cap(sm_scale * q[h, t] . k[h / G, p]) + mask[t, p]) v[h / G, p]
 *
 * A sink adds exp(sinks[h]) to the softmax's denominator and nothing to its numerator.
 */
typedef struct akv_attend_params {
    size_t struct_size;
    uint32_t num_kv_heads;
    uint32_t gqa_group;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t num_queries;             /* T >= 1 */
    akv_tensor queries;               /* [H*G, T, d_k] post-RoPE */
    const akv_segment *const *segments; /* [num_segments], in any order */
    uint32_t num_segments;            /* 0 is fine */
    uint64_t tail_tokens;             /* n, 0 is fine */
    akv_tensor tail_keys;             /* [H, n, d_k] post-RoPE */
    akv_tensor tail_values;           /* [H, n, d_v] */
    akv_tensor tail_mask;             /* added to the logits, [1, T, n] as (head, token = query, dim = tail token), -inf
                                         hides; NULL data: causal - query t sees tail tokens j <= n - T + t */
    double sm_scale;
    double logit_softcap;             /* 0 = none */
    const float *sinks;               /* [H*G] or NULL */
    float *out;                       /* [H*G, T, d_v] with the two strides below, inner dim contiguous */
    int64_t out_stride_head;          /* floats from one query head to the next */
    int64_t out_stride_token;         /* floats from one query to the next */
    float *state_max;                 /* [H*G, T] contiguous or NULL: largest logit (natural log), -inf if no token
                                         visible */
    float *state_sum;                 /* [H*G, T] contiguous or NULL: sum of exp(logit - max), sinks included */
    const akv_executor *executor;     /* NULL = serial */
    const int64_t *segment_shifts;    /* [num_segments] or NULL: how many positions further on than it was made for each
                                         segment stands, exactly: the queries are turned back by as much */
    const akv_rope *rope;             /* of the keys; needed when a shift is not 0, else not read */
} akv_attend_params;

AKV_API void akv_attend_params_init(akv_attend_params *params);

/*
 * akv_attend_workspace_bytes() - scratch that akv_attend needs for these params (only shapes, segments and the
 * executor's max_workers are read, not tensor data). The workspace must be 64-byte aligned.
 */
AKV_API akv_status akv_attend_workspace_bytes(const akv_attend_params *params, size_t *bytes, akv_diag *diag);

/*
 * akv_attend() - run it. No allocation, no lock; dense keys and values are never materialised.
 *
 * fp32 accumulation. A query that sees no token at all gives zeros, state_max = -inf, state_sum = 0 (sinks aside).
 * Returns AKV_OK, AKV_E_INVALID_ARGUMENT, AKV_E_MISMATCH (a segment of another shape), AKV_E_NO_SPACE.
 * Non-finite queries give non-finite outputs. Threads: concurrent calls with separate workspaces are fine.
 * Method: docs/method.md "attention from the compressed form"; paper section 3.5.
 */
AKV_API akv_status akv_attend(const akv_attend_params *params, void *workspace, size_t workspace_bytes, akv_diag *diag);

/*
 * akv_attend_merge() - fold partial result b into a (both normalised outputs with their state), in place. Exact up to
 * rounding: a then holds what one softmax over both token sets would give. n rows of dim floats; arrays contiguous.
 */
AKV_API void akv_attend_merge(uint64_t n, uint32_t dim, float *out_a, float *max_a, float *sum_a, const float *out_b,
                              const float *max_b, const float *sum_b);

#ifdef __cplusplus
}
#endif
#endif
