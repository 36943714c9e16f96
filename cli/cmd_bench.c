/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_bench.c - `akv bench`: attention of one layer from the compressed form against ggml's flash attention on f16, q8_0 and
 * q4_0 caches and against the library's own dense f16 attention, on the same machine in the same run, taking turns.
 *
 * Data: random keys and values with the low-rank structure that real caches have (64 directions plus noise); speed depends
 * on it only through which tokens own residuals.
 */
#include "cli.h"

#include <anchorkv/anchorkv.h>
#include <cjson/cJSON.h>
#include <getopt.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WINDOW = 32, MOST_ROUNDS = 101, NUM_PEERS = 4, BANDWIDTH_MIB = 256 };

typedef struct bench_case {
    const char *name;
    uint32_t head_dim, kv_heads, group, tokens, queries;
} bench_case;

static const bench_case all_cases[] = {
    {"decode", 128, 8, 4, 2048, 1},  {"decode", 128, 8, 4, 8192, 1},       {"decode", 128, 8, 4, 32768, 1},
    {"decode", 64, 3, 3, 8192, 1},   {"question", 128, 8, 4, 32768, 128},
};
static const double ratios[] = {10, 20};
static const struct {
    const char *name;
    enum ggml_type type; /* GGML_TYPE_COUNT: our own dense attention */
} peers[NUM_PEERS] = {{"ggml f16", GGML_TYPE_F16}, {"ggml q8_0", GGML_TYPE_Q8_0}, {"ggml q4_0", GGML_TYPE_Q4_0}, {"akv dense f16", GGML_TYPE_COUNT}};

typedef struct bench_options {
    const char *json;
    uint64_t tokens; /* 0 = all cases */
    uint64_t head_dim;
    uint64_t threads; /* 0 = 1 and 2 */
    uint64_t rounds;
    bool questions;
} bench_options;

/* What one shape needs: dense tensors, queries, one segment a time. */
typedef struct bench_setup {
    const bench_case *c;
    struct ggml_context *ggml;
    struct ggml_cgraph *graph[NUM_PEERS];
    struct ggml_tensor *q, *k, *v;
    uint64_t peer_bytes[NUM_PEERS];
    double *inv_freq;
    float *observed, *out;
    akv_layer layer;
    akv_segment *dense;
} bench_setup;

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

static bool setup_make(bench_setup *s, const bench_case *c, akv_diag *diag)
{
    const uint32_t d = c->head_dim, H = c->kv_heads, S = c->tokens, QH = H * c->group, T = c->queries;
    const size_t n = (size_t)H * S * d;
    const struct ggml_init_params init = {n * 8 + (size_t)T * S * 2 + (size_t)QH * T * d * 4 * (2 + NUM_PEERS) + ((size_t)64 << 20), NULL, false};
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
    for (int p = 0; p < NUM_PEERS && peers[p].type != GGML_TYPE_COUNT; p++) {
        struct ggml_tensor *k = s->k, *v = s->v;
        if (peers[p].type != GGML_TYPE_F16) {
            k = quantised(s->ggml, s->k, peers[p].type, s->out);
            v = quantised(s->ggml, s->v, peers[p].type, s->out);
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
    s->peer_bytes[NUM_PEERS - 1] = s->peer_bytes[0];
    return akv_segment_create_dense(&s->layer, NULL, &s->dense, diag) == AKV_OK;
}

static void setup_free(bench_setup *s)
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

static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, compare);
    return x[n / 2];
}

/* One attention call over one segment; workspace made before. */
typedef struct attend_call {
    akv_attend_params params;
    const akv_segment *segment;
    void *workspace;
    size_t bytes;
} attend_call;

static bool call_make(attend_call *a, const bench_setup *s, const akv_segment *segment, const akv_executor *executor, akv_diag *diag)
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

/* One thread: its own processor time, which a busy machine disturbs less (both sides then run in the caller); else the clock. */
static double seconds_now(uint32_t threads)
{
    struct timespec t;
    if (threads > 1 || clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) != 0)
        return cli_now();
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double attend_seconds(attend_call *a, uint32_t threads, akv_diag *diag)
{
    const double start = seconds_now(threads);
    return akv_attend(&a->params, a->workspace, a->bytes, diag) == AKV_OK ? seconds_now(threads) - start : NAN;
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

static double read_bandwidth(const akv_executor *executor, uint32_t threads)
{
    const size_t words = (size_t)BANDWIDTH_MIB << 17;
    uint64_t *data = malloc(words * sizeof *data);
    double best = INFINITY;
    if (data == NULL)
        return NAN;
    memset(data, 1, words * sizeof *data);
    read_job job = {data, words / threads, {0}};
    for (int i = 0; i < 5; i++) {
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

static void report_row(cJSON *rows, const bench_setup *s, double ratio, uint32_t threads, int peer, double ours, double theirs,
                       uint64_t bytes, double bandwidth)
{
    const double per = 1e9 / s->c->tokens / s->c->kv_heads, share = (double)bytes / ours / bandwidth;
    printf("%-8s d %3u, %u x %u, %6u tokens, %u queries, %2gx, %u threads: %7.1f ns, %-13s %8.1f ns, %6.2fx (%4.1f %% / %4.1f %% of read "
           "bandwidth)\n",
           s->c->name, s->c->head_dim, s->c->kv_heads, s->c->group, s->c->tokens, s->c->queries, ratio, threads, ours * per,
           peers[peer].name, theirs * per, theirs / ours, 100 * share, 100 * (double)s->peer_bytes[peer] / theirs / bandwidth);
    fflush(stdout);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "case", s->c->name);
    cJSON_AddNumberToObject(row, "head_dim", s->c->head_dim);
    cJSON_AddNumberToObject(row, "kv_heads", s->c->kv_heads);
    cJSON_AddNumberToObject(row, "gqa_group", s->c->group);
    cJSON_AddNumberToObject(row, "tokens", s->c->tokens);
    cJSON_AddNumberToObject(row, "queries", s->c->queries);
    cJSON_AddNumberToObject(row, "ratio", ratio);
    cJSON_AddNumberToObject(row, "threads", threads);
    cJSON_AddStringToObject(row, "peer", peers[peer].name);
    cJSON_AddNumberToObject(row, "ns_per_token", ours * per);
    cJSON_AddNumberToObject(row, "peer_ns_per_token", theirs * per);
    cJSON_AddNumberToObject(row, "speedup", theirs / ours);
    cJSON_AddNumberToObject(row, "bytes", (double)bytes);
    cJSON_AddNumberToObject(row, "peer_bytes", (double)s->peer_bytes[peer]);
    cJSON_AddNumberToObject(row, "read_share", share);
    cJSON_AddItemToArray(rows, row);
}

/* One shape, ratio and number of threads: ours and every peer in turn, median of the rounds. */
static int run_case(cJSON *rows, bench_setup *s, const akv_segment *segment, double ratio, uint32_t threads, uint64_t rounds, akv_diag *diag)
{
    akv_threads *pool = NULL;
    attend_call ours, dense;
    static double times[1 + NUM_PEERS][MOST_ROUNDS];
    if (threads > 1 && akv_threads_create(threads, &pool, diag) != AKV_OK)
        return cli_fail_diag(diag->status, diag, NULL);
    const akv_executor *executor = threads > 1 ? akv_threads_executor(pool) : NULL;
    if (!call_make(&ours, s, segment, executor, diag) || !call_make(&dense, s, s->dense, executor, diag))
        return cli_fail(CLI_NO_MEMORY, "no memory for the workspace");
    if (s->c->queries > 1)
        rounds = 3;
    int code = CLI_OK;
    for (uint64_t i = 0; i < rounds && code == CLI_OK; i++) {
        times[0][i] = attend_seconds(&ours, threads, diag);
        for (int p = 0; p < NUM_PEERS; p++) {
            const double start = seconds_now(threads);
            if (s->graph[p] != NULL)
                ggml_graph_compute_with_ctx(s->ggml, s->graph[p], (int)threads);
            times[1 + p][i] = s->graph[p] != NULL ? seconds_now(threads) - start : attend_seconds(&dense, threads, diag);
        }
        if (isnan(times[0][i]) || isnan(times[NUM_PEERS][i]))
            code = cli_fail_diag(diag->status, diag, NULL);
        if (cli_interrupted())
            code = CLI_SIGNAL + cli_interrupted();
    }
    akv_segment_info info;
    akv_segment_info_init(&info);
    if (code == CLI_OK && akv_segment_get_info(segment, &info, diag) == AKV_OK) {
        const double bandwidth = read_bandwidth(executor, threads), mine = median(times[0], rounds);
        for (int p = 0; p < NUM_PEERS; p++)
            report_row(rows, s, ratio, threads, p, mine, median(times[1 + p], rounds), info.bytes.total, bandwidth);
    }
    free(ours.workspace);
    free(dense.workspace);
    akv_threads_destroy(pool);
    return code;
}

static int run_shape(cJSON *rows, const bench_options *o, const bench_case *c)
{
    akv_diag diag = {AKV_OK, ""};
    bench_setup s;
    int code = setup_make(&s, c, &diag) ? CLI_OK : cli_fail(CLI_NO_MEMORY, "no memory for %u tokens", c->tokens);
    for (size_t r = 0; r < sizeof ratios / sizeof ratios[0] && code == CLI_OK; r++) {
        akv_config config;
        akv_segment *segment = NULL;
        akv_config_init(&config);
        config.keep_ratio = 1.0 / ratios[r];
        if (akv_compress(&s.layer, &config, &segment, &diag) != AKV_OK)
            code = cli_fail_diag(diag.status, &diag, NULL);
        for (uint32_t threads = 1; threads <= 2 && code == CLI_OK; threads++)
            if (o->threads == 0 || o->threads == threads)
                code = run_case(rows, &s, segment, ratios[r], threads, o->rounds, &diag);
        if (o->threads > 2 && code == CLI_OK)
            code = run_case(rows, &s, segment, ratios[r], (uint32_t)o->threads, o->rounds, &diag);
        akv_segment_release(segment);
    }
    setup_free(&s);
    return code;
}

static int parse(int argc, char **argv, bench_options *o)
{
    static const struct option options[] = {{"json", required_argument, NULL, 'j'},    {"tokens", required_argument, NULL, 't'},
                                            {"head-dim", required_argument, NULL, 'd'}, {"threads", required_argument, NULL, 'n'},
                                            {"rounds", required_argument, NULL, 'r'},  {"decode-only", no_argument, NULL, 'o'},
                                            {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        bool ok = true;
        switch (option) {
        case 'h': return -1;
        case 'j': o->json = optarg; break;
        case 't': ok = cli_parse_u64("--tokens", optarg, 64, 1 << 20, &o->tokens); break;
        case 'd': ok = cli_parse_u64("--head-dim", optarg, 32, 512, &o->head_dim); break;
        case 'n': ok = cli_parse_u64("--threads", optarg, 1, 64, &o->threads); break;
        case 'r': ok = cli_parse_u64("--rounds", optarg, 1, MOST_ROUNDS, &o->rounds); break;
        case 'o': o->questions = false; break;
        default: return cli_usage(&cli_cmd_bench);
        }
        if (!ok)
            return cli_usage(&cli_cmd_bench);
    }
    if (optind == argc)
        return CLI_OK;
    cli_fail(CLI_USAGE, "\"%s\" is one argument too many", argv[optind]);
    return cli_usage(&cli_cmd_bench);
}

static int write_rows(const char *path, cJSON *rows)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", akv_version());
    cJSON_AddStringToObject(root, "command", "bench");
    cJSON_AddItemReferenceToObject(root, "rows", rows);
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the JSON report");
    const size_t bytes = strlen(text);
    text[bytes] = '\n';
    const int code = cli_write_file(path, text, bytes + 1);
    cJSON_free(text);
    return code;
}

static int run(int argc, char **argv)
{
    bench_options o = {NULL, 0, 0, 0, 21, true};
    int code = parse(argc, argv, &o);
    if (code != CLI_OK)
        return code < 0 ? cli_help(&cli_cmd_bench) : code;
    cJSON *rows = cJSON_CreateArray();
    bool any = false;
    for (size_t i = 0; i < sizeof all_cases / sizeof all_cases[0] && code == CLI_OK; i++) {
        const bench_case *c = &all_cases[i];
        if ((o.tokens != 0 && o.tokens != c->tokens) || (o.head_dim != 0 && o.head_dim != c->head_dim) || (!o.questions && c->queries > 1))
            continue;
        any = true;
        code = run_shape(rows, &o, c);
    }
    if (!any && code == CLI_OK) { /* a length of the caller's own, in the first shape of that head_dim */
        bench_case own = all_cases[0];
        for (size_t i = 0; i < sizeof all_cases / sizeof all_cases[0]; i++)
            if (o.head_dim == all_cases[i].head_dim) {
                own = all_cases[i];
                break;
            }
        own.tokens = o.tokens != 0 ? (uint32_t)o.tokens : own.tokens;
        own.head_dim = o.head_dim != 0 ? (uint32_t)o.head_dim : own.head_dim;
        code = run_shape(rows, &o, &own);
    }
    if (code == CLI_OK && o.json != NULL)
        code = write_rows(o.json, rows);
    cJSON_Delete(rows);
    return code;
}

const cli_command cli_cmd_bench = {
    "bench", "measure attention against ggml's on this machine", run,
    "usage: akv bench [options]\n"
    "\n"
    "Times attention of one layer over random data: from the compressed form at 10x and 20x, and in the same run ggml's\n"
    "flash attention on f16, q8_0 and q4_0 caches and the library's own dense f16 attention. Prints nanoseconds per token\n"
    "and KV head, medians of rounds that take turns; on one thread processor time, otherwise the clock.\n"
    "\n"
    "      --tokens N       one length only (2048, 8192 and 32768)\n"
    "      --head-dim D     one head_dim only (128 with 8 heads x 4, 64 with 3 x 3)\n"
    "      --threads N      this many threads (1, then 2)\n"
    "      --rounds N       repetitions (21; 3 for questions)\n"
    "      --decode-only    leave out the question of 128 tokens\n"
    "      --json FILE      write the rows as JSON too (\"-\": to standard output)\n"
    "  -h, --help           this text\n"};
