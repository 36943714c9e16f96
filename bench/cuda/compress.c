/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress.c - time and memory of compressing all layers of a cache that lies on the GPU (akv_cuda_compress), several
 * layers in flight, each with a stream, a workspace and pinned host memory of its own.
 *
 * usage: cuda_compress [TOKENS [RATIO [LAYERS [IN_FLIGHT [HEADS [GROUP [DIM [CHECK]]]]]]]]       CHECK n: compare a
 * layer with the CPU's, with n draws of anchors
 */
#include "made_layer.h"

#include <anchorkv/akv_cuda.h>

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define REPEATS 5
#define MOST_FLIGHT 16
#define POOL_BLOCKS 8

static void must(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
    exit(1);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* Pinned memory that is used again: page-locking costs more than a layer. */
typedef struct pool {
    void *block[POOL_BLOCKS];
    size_t bytes[POOL_BLOCKS];
    int used[POOL_BLOCKS];
} pool;

static void *pool_alloc(void *opaque, size_t bytes, size_t align)
{
    pool *p = opaque;
    (void)align; /* page-locked memory begins on a page */
    for (int i = 0; i < POOL_BLOCKS; i++) {
        if (p->block[i] == NULL) {
            must(cudaHostAlloc(&p->block[i], bytes, cudaHostAllocDefault));
            p->bytes[i] = bytes;
        }
        if (!p->used[i] && p->bytes[i] == bytes) {
            p->used[i] = 1;
            return p->block[i];
        }
    }
    return NULL;
}

static void pool_free(void *opaque, void *ptr, size_t bytes)
{
    pool *p = opaque;
    (void)bytes;
    for (int i = 0; i < POOL_BLOCKS; i++)
        if (p->block[i] == ptr)
            p->used[i] = 0;
}

typedef struct worker {
    akv_layer layer;
    akv_config config;
    akv_allocator allocator;
    pool memory;
    void *const *keys, *const *values;
    void *workspace;
    size_t workspace_bytes, segment_bytes;
    cudaStream_t stream;
    int first, step, layers;
} worker;

static void *work(void *opaque)
{
    worker *w = opaque;
    for (int l = w->first; l < w->layers; l += w->step) {
        akv_diag diag = {AKV_OK, ""};
        akv_segment *segment = NULL;
        w->layer.layer_index = l;
        w->layer.keys.data = w->keys[l];
        w->layer.values.data = w->values[l];
        if (akv_cuda_compress(&w->layer, NULL, &w->config, w->workspace, w->workspace_bytes, w->stream, &segment,
                              &diag) != AKV_OK) {
            fprintf(stderr, "%s\n", diag.message);
            exit(1);
        }
        akv_segment_data(segment, &w->segment_bytes);
        akv_segment_release(segment);
    }
    return NULL;
}

static double run(worker *w, int flight)
{
    pthread_t threads[MOST_FLIGHT];
    must(cudaDeviceSynchronize());
    const double start = now_ms();
    for (int i = 0; i < flight; i++)
        if (pthread_create(&threads[i], NULL, work, &w[i]) != 0)
            exit(1);
    for (int i = 0; i < flight; i++)
        pthread_join(threads[i], NULL);
    return now_ms() - start;
}

/* Relative error of the attention output of the observation queries against the dense layer's. */
static void attend(const akv_layer *layer, const akv_segment *segment, const akv_executor *executor, float *out)
{
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = layer->shape.num_kv_heads;
    p.gqa_group = layer->shape.gqa_group;
    p.head_dim_k = p.head_dim_v = layer->shape.head_dim_k;
    p.num_queries = MADE_QUERIES;
    p.queries = layer->queries;
    p.segments = &segment;
    p.num_segments = 1;
    p.sm_scale = layer->sm_scale;
    p.out = out;
    p.out_stride_head = (int64_t)MADE_QUERIES * p.head_dim_v;
    p.out_stride_token = p.head_dim_v;
    p.executor = executor;
    size_t bytes = 0;
    akv_diag diag = {AKV_OK, ""};
    void *workspace = NULL;
    if (akv_attend_workspace_bytes(&p, &bytes, &diag) != AKV_OK || posix_memalign(&workspace, 64, bytes) != 0 ||
        akv_attend(&p, workspace, bytes, &diag) != AKV_OK) {
        fprintf(stderr, "%s\n", diag.message);
        exit(1);
    }
    free(workspace);
}

static double error_of(const float *x, const float *dense, size_t n)
{
    double sum = 0, size = 0;
    for (size_t j = 0; j < n; j++) {
        sum += ((double)x[j] - dense[j]) * ((double)x[j] - dense[j]);
        size += (double)dense[j] * dense[j];
    }
    return sqrt(sum / size);
}

static void check(const akv_layer *host, worker *w, int draws)
{
    const akv_shape *s = &host->shape;
    const size_t n = (size_t)s->num_kv_heads * s->gqa_group * MADE_QUERIES * s->head_dim_v;
    akv_segment *dense = NULL;
    akv_diag diag = {AKV_OK, ""};
    akv_threads *threads = NULL;
    akv_config config = w->config;
    float *exact = malloc(n * sizeof *exact), *out = malloc(n * sizeof *out);
    config.allocator = NULL;
    if (akv_threads_create(16, &threads, &diag) == AKV_OK)
        config.executor = akv_threads_executor(threads);
    w->layer.layer_index = host->layer_index;
    w->layer.keys.data = w->keys[0];
    w->layer.values.data = w->values[0];
    if (exact == NULL || out == NULL || akv_segment_create_dense(host, &config, &dense, &diag) != AKV_OK)
        exit(1);
    attend(host, dense, config.executor, exact);
    double error[2] = {0, 0}, cpu_ms = 0;
    for (int i = 0; i < draws; i++) {
        akv_segment *segment[2] = {NULL, NULL};
        config.seed = w->config.seed = (uint64_t)i;
        const double start = now_ms();
        if (akv_compress(host, &config, &segment[0], &diag) != AKV_OK)
            exit(1);
        cpu_ms += now_ms() - start;
        if (akv_cuda_compress(&w->layer, NULL, &w->config, w->workspace, w->workspace_bytes, w->stream, &segment[1],
                              &diag) != AKV_OK)
            exit(1);
        printf("draw %d:", i);
        for (int j = 0; j < 2; j++) {
            attend(host, segment[j], config.executor, out);
            const double e = error_of(out, exact, n);
            printf(" %s %.5f", j == 0 ? "CPU" : "GPU", e);
            error[j] += e / draws;
            akv_segment_release(segment[j]);
        }
        printf("\n");
    }
    printf("error of the attention output: %.5f, the CPU's %.5f; a layer on the CPU, 16 threads: %.0f ms\n", error[1],
           error[0], cpu_ms / draws);
    free(exact);
    free(out);
    akv_segment_release(dense);
    akv_threads_destroy(threads);
}

static int larger(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const uint64_t S = argc > 1 ? strtoull(argv[1], NULL, 10) : 32768;
    const double ratio = argc > 2 ? atof(argv[2]) : 10;
    const int layers = argc > 3 ? atoi(argv[3]) : 32, flight = argc > 4 ? atoi(argv[4]) : 1;
    const int H = argc > 5 ? atoi(argv[5]) : 8, G = argc > 6 ? atoi(argv[6]) : 4, d = argc > 7 ? atoi(argv[7]) : 128;
    akv_layer host;
    if (flight < 1 || flight > MOST_FLIGHT || !make_layer(S, H, G, d, &host))
        return 1;
    const size_t side = (size_t)H * S * (size_t)d * 2,
                 query_bytes = (size_t)H * (size_t)G * MADE_QUERIES * (size_t)d * sizeof(float);
    void **keys = calloc((size_t)layers, sizeof *keys), **values = calloc((size_t)layers, sizeof *values),
         *queries = NULL;
    worker *w = calloc((size_t)flight, sizeof *w);
    if (keys == NULL || values == NULL || w == NULL)
        return 1;
    must(cudaMalloc(&queries, query_bytes));
    must(cudaMemcpy(queries, host.queries.data, query_bytes, cudaMemcpyHostToDevice));
    for (int l = 0; l < layers; l++) {
        must(cudaMalloc(&keys[l], side));
        must(cudaMalloc(&values[l], side));
        must(cudaMemcpy(keys[l], host.keys.data, side, cudaMemcpyHostToDevice));
        must(cudaMemcpy(values[l], host.values.data, side, cudaMemcpyHostToDevice));
    }
    size_t free_before, free_after, all, extra = 0;
    must(cudaMemGetInfo(&free_before, &all));
    for (int i = 0; i < flight; i++) {
        akv_diag diag = {AKV_OK, ""};
        w[i].layer = host;
        w[i].layer.queries.data = queries;
        akv_config_init(&w[i].config);
        w[i].config.keep_ratio = 1 / ratio;
        w[i].allocator = (akv_allocator){&w[i].memory, pool_alloc, pool_free};
        w[i].config.allocator = &w[i].allocator;
        w[i].keys = keys;
        w[i].values = values;
        w[i].first = i;
        w[i].step = flight;
        w[i].layers = layers;
        must(cudaStreamCreateWithFlags(&w[i].stream, cudaStreamNonBlocking));
        if (akv_cuda_compress_workspace_bytes(&w[i].layer, &w[i].config, &w[i].workspace_bytes, &diag) != AKV_OK) {
            fprintf(stderr, "%s\n", diag.message);
            return 1;
        }
        must(cudaMalloc(&w[i].workspace, w[i].workspace_bytes));
        extra += w[i].workspace_bytes;
    }
    run(w, flight); /* warm: modules, page-locked memory */
    must(cudaMemGetInfo(&free_after, &all));
    double ms[REPEATS];
    for (int i = 0; i < REPEATS; i++)
        ms[i] = run(w, flight);
    qsort(ms, REPEATS, sizeof *ms, larger);
    const double mib = 1024 * 1024;
    printf(
        "%llu tokens, %d KV heads x %d, d %d, ratio %g, %d layers, %d in flight: %.2f ms (%.2f .. %.2f), "
        "%.3f ms a layer; "
        "workspaces %.0f MiB, device memory taken %.0f MiB; a layer's dense K/V %.0f MiB, its segment %.2f MiB\n",
        (unsigned long long)S, H, G, d, ratio, layers, flight, ms[REPEATS / 2], ms[0], ms[REPEATS - 1],
        ms[REPEATS / 2] / layers, (double)extra / mib, ((double)free_before - (double)free_after) / mib,
        2 * (double)side / mib, (double)w[0].segment_bytes / mib);
    if (argc > 8 && atoi(argv[8]) > 0)
        check(&host, &w[0], atoi(argv[8]));
    return 0;
}
