/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h - what the measurements of `akv bench` share: data of one shape, one timed call, one row of the report. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include <anchorkv/anchorkv.h>
#include <cjson/cJSON.h>
#include <ggml.h>

enum { BENCH_MOST_ROUNDS = 101, BENCH_NUM_PEERS = 4 };

typedef struct bench_case {
    const char *name;
    uint32_t head_dim, kv_heads, group, tokens, queries;
} bench_case;

typedef struct bench_peer {
    const char *name;
    enum ggml_type type; /* GGML_TYPE_COUNT: our own dense attention */
} bench_peer;
extern const bench_peer bench_peers[BENCH_NUM_PEERS];

/* What one shape needs: dense tensors, queries, one segment a time. */
typedef struct bench_setup {
    const bench_case *c;
    struct ggml_context *ggml;
    struct ggml_cgraph *graph[BENCH_NUM_PEERS];
    struct ggml_tensor *q, *k, *v;
    uint64_t peer_bytes[BENCH_NUM_PEERS];
    double *inv_freq;
    float *observed, *out;
    akv_layer layer;
    akv_segment *dense; /* NULL without peers */
} bench_setup;

/* False: no memory. Free it in any case. */
bool bench_setup_make(bench_setup *s, const bench_case *c, bool with_peers, akv_diag *diag);
void bench_setup_free(bench_setup *s);

/* One attention call over one segment; workspace made before. */
typedef struct bench_call {
    akv_attend_params params;
    const akv_segment *segment;
    void *workspace;
    size_t bytes;
} bench_call;

/* s and executor must outlive the call; free(workspace) is the caller's. */
bool bench_call_make(bench_call *a, const bench_setup *s, const akv_segment *segment, const akv_executor *executor, akv_diag *diag);

/* One thread: its own processor time, which a busy machine disturbs less; else the clock. */
double bench_seconds_now(uint32_t threads);

/* Seconds of one call; NaN when it failed. */
double bench_attend_seconds(bench_call *a, uint32_t threads, akv_diag *diag);

double bench_median(double *x, size_t n);

/* Bytes per second of reading a buffer that no cache holds, the best of some passes; also empties the caches. NaN: no memory. */
double bench_read_bandwidth(const akv_executor *executor, uint32_t threads, int passes);

/* One measurement: ours against a peer, nanoseconds per token and KV head. */
typedef struct bench_row {
    const bench_case *c;
    const char *peer;
    double ratio, ns, peer_ns;
    uint32_t threads, peer_tokens;
    uint64_t bytes, peer_bytes;
    double bandwidth;
} bench_row;
void bench_report(cJSON *rows, const bench_row *row);

/* `akv bench --flat`: cost per token from 2048 tokens to longest. */
int bench_flat(cJSON *rows, uint64_t longest, uint64_t threads, uint64_t rounds);

#endif
