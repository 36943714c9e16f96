/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_setup.c - data, calls and clocks of `akv bench`: random keys and values with the low-rank structure that real caches have (64
 * directions plus noise); speed depends on it only through which tokens own residuals.
 */
#include "bench.h"
#include "cli.h"

#include <ggml-cpu.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WINDOW = 32, BANDWIDTH_MIB = 256 };

const bench_peer bench_peers[BENCH_NUM_PEERS] = {{"ggml f16", GGML_TYPE_F16},
                                                 {"ggml q8_0", GGML_TYPE_Q8_0},
                                                 {"ggml q4_0", GGML_TYPE_Q4_0},
                                                 {"akv dense f16", GGML_TYPE_COUNT}};

static uint64_t state;

static float gauss(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) / (float)(1 << 24) - 0.5f;
    }
    return sum * 1.7320508f;
}

static void fill(ggml_fp16_t *out, size_t rows, uint32_t d)
{
    static float dir[64][512];
    for (int i = 0; i < 64; i++)
        for (uint32_t j = 0; j < d; j++)
            dir[i][j] = gauss();
    for (size_t r = 0; r < rows; r++) {
        const size_t pick = ((r * 2654435761u) >> 7) & 63;
        const float gain = 0.5f + fabsf(gauss());
        for (uint32_t j = 0; j < d; j++)
            out[r * d + j] = ggml_fp32_to_fp16(gain * dir[pick][j] + 0.5f * gauss());
    }
}

/* A quantised copy of an f16 tensor. */
static struct ggml_tensor *quantised(struct ggml_context *ggml, const struct ggml_tensor *from, enum ggml_type type, float *row)
{
    struct ggml_tensor *to = ggml_new_tensor(ggml, type, 4, from->ne);
    for (int64_t i = 0; i < ggml_nrows(from); i++) {
        ggml_fp16_to_fp32_row((const ggml_fp16_t *)from->data + i * from->ne[0], row, from->ne[0]);
        ggml_quantize_chunk(type, row, (char *)to->data + (size_t)i * ggml_row_size(type, from->ne[0]), 0, 1, from->ne[0], NULL);
    }
    return to;
}

bool bench_setup_make(bench_setup *s, const bench_case *c, bool with_peers, akv_diag *diag)
{
    const uint32_t d = c->head_dim, H = c->kv_heads, S = c->tokens, QH = H * c->group, T = c->queries;
    const size_t n = (size_t)H * S * d;
    const struct ggml_init_params init = {n * 8 + (size_t)T * S * 2 + (size_t)QH * T * d * 4 * (2 + BENCH_NUM_PEERS) + ((size_t)64 << 20), NULL, false};
    memset(s, 0, sizeof *s);
    s->c = c;
    s->ggml = ggml_init(init);
    s->inv_freq = malloc(d / 2 * sizeof *s->inv_freq);
    s->observed = malloc((size_t)QH * WINDOW * d * sizeof *s->observed);
    s->out = malloc((size_t)QH * T * d * sizeof *s->out);
    if (s->ggml == NULL || s->inv_freq == NULL || s->observed == NULL || s->out == NULL)
        return false;
    s->q = ggml_new_tensor_4d(s->ggml, GGML_TYPE_F32, d, T, QH, 1);
    s->k = ggml_new_tensor_4d(s->ggml, GGML_TYPE_F16, d, S, H, 1);
    s->v = ggml_new_tensor_4d(s->ggml, GGML_TYPE_F16, d, S, H, 1);
    struct ggml_tensor *mask = ggml_new_tensor_4d(s->ggml, GGML_TYPE_F16, S, T < 64 ? 64 : T, 1, 1); /* ggml wants padding */
    state = 1;
    fill(s->k->data, (size_t)H * S, d);
    fill(s->v->data, (size_t)H * S, d);
    memset(mask->data, 0, ggml_nbytes(mask));
    for (size_t i = 0; i < (size_t)QH * T * d; i++)
        ((float *)s->q->data)[i] = gauss();
    for (size_t i = 0; i < (size_t)QH * WINDOW * d; i++)
        s->observed[i] = gauss();
    for (uint32_t j = 0; j < d / 2; j++)
        s->inv_freq[j] = pow(1e6, -2.0 * j / d);
    for (int p = 0; with_peers && p < BENCH_NUM_PEERS && bench_peers[p].type != GGML_TYPE_COUNT; p++) {
        struct ggml_tensor *k = s->k, *v = s->v;
        if (bench_peers[p].type != GGML_TYPE_F16) {
            k = quantised(s->ggml, s->k, bench_peers[p].type, s->out);
            v = quantised(s->ggml, s->v, bench_peers[p].type, s->out);
        }
        s->peer_bytes[p] = ggml_nbytes(k) + ggml_nbytes(v);
        s->graph[p] = ggml_new_graph(s->ggml);
        ggml_build_forward_expand(s->graph[p], ggml_flash_attn_ext(s->ggml, s->q, k, v, mask, 1.0f / sqrtf((float)d), 0.0f, 0.0f));
    }
    akv_layer_init(&s->layer);
    s->layer.shape.num_tokens = S;
    s->layer.shape.num_kv_heads = H;
    s->layer.shape.gqa_group = c->group;
    s->layer.shape.head_dim_k = s->layer.shape.head_dim_v = s->layer.shape.rotary_dim = d;
    s->layer.shape.dtype = AKV_F16;
    s->layer.keys = akv_tensor_contiguous(s->k->data, AKV_F16, S, d);
    s->layer.values = akv_tensor_contiguous(s->v->data, AKV_F16, S, d);
    s->layer.queries = akv_tensor_contiguous(s->observed, AKV_F32, WINDOW, d);
    s->layer.rope.rotary_dim = d;
    s->layer.rope.inv_freq = s->inv_freq;
    s->layer.sm_scale = 1.0 / sqrt((double)d);
    s->peer_bytes[BENCH_NUM_PEERS - 1] = s->peer_bytes[0];
    return !with_peers || akv_segment_create_dense(&s->layer, NULL, &s->dense, diag) == AKV_OK;
}

void bench_setup_free(bench_setup *s)
{
    akv_segment_release(s->dense);
    free(s->inv_freq);
    free(s->observed);
    free(s->out);
    if (s->ggml != NULL)
        ggml_free(s->ggml);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, compare);
    return x[n / 2];
}

bool bench_call_make(bench_call *a, const bench_setup *s, const akv_segment *segment, const akv_executor *executor, akv_diag *diag)
{
    akv_attend_params_init(&a->params);
    a->segment = segment;
    a->params.num_kv_heads = s->c->kv_heads;
    a->params.gqa_group = s->c->group;
    a->params.head_dim_k = a->params.head_dim_v = s->c->head_dim;
    a->params.num_queries = s->c->queries;
    a->params.queries = akv_tensor_contiguous(s->q->data, AKV_F32, s->c->queries, s->c->head_dim);
    a->params.segments = &a->segment;
    a->params.num_segments = 1;
    a->params.sm_scale = s->layer.sm_scale;
    a->params.executor = executor;
    a->params.out = s->out;
    a->params.out_stride_head = (int64_t)s->c->head_dim * s->c->queries;
    a->params.out_stride_token = s->c->head_dim;
    if (akv_attend_workspace_bytes(&a->params, &a->bytes, diag) != AKV_OK)
        return false;
    a->workspace = aligned_alloc(64, (a->bytes + 63) / 64 * 64);
    return a->workspace != NULL;
}

double bench_seconds_now(uint32_t threads)
{
    struct timespec t;
    if (threads > 1 || clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0)
        return cli_now();
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double bench_attend_seconds(bench_call *a, uint32_t threads, akv_diag *diag)
{
    const double start = bench_seconds_now(threads);
    return akv_attend(&a->params, a->workspace, a->bytes, diag) == AKV_OK ? bench_seconds_now(threads) - start : NAN;
}

/* Summing a buffer that no cache holds, in as many tasks as threads. */
typedef struct read_job {
    const uint64_t *data;
    size_t words;
    uint64_t sum[64];
} read_job;

static void read_part(void *arg, size_t task)
{
    read_job *job = arg;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= job->words; i += 8)
        for (int l = 0; l < 8; l++)
            sum[l] += job->data[task * job->words + i + (size_t)l];
    for (int l = 0; l < 8; l++)
        job->sum[task] += sum[l];
}

double bench_read_bandwidth(const akv_executor *executor, uint32_t threads, int passes)
{
    const size_t words = (size_t)BANDWIDTH_MIB << 17;
    uint64_t *data = malloc(words * sizeof *data);
    double best = INFINITY;
    if (data == NULL)
        return NAN;
    memset(data, 1, words * sizeof *data);
    read_job job = {data, words / threads, {0}};
    for (int i = 0; i < passes; i++) {
        const double start = cli_now();
        if (executor != NULL)
            executor->parallel_for(executor->opaque, read_part, &job, threads);
        else
            read_part(&job, 0);
        best = fmin(best, cli_now() - start);
    }
    if (job.sum[0] == 1) /* never: keeps the loads */
        cli_note("%llu", (unsigned long long)job.sum[0]);
    free(data);
    return (double)(words / threads * threads) * sizeof *data / best;
}
