/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_bench.c - `akv bench`: attention of one layer from the compressed form against ggml's flash attention on f16, q8_0 and
 * q4_0 caches and against the library's own dense f16 attention, on the same machine in the same run, taking turns.
 *
 * Data: random keys and values with the low-rank structure that real caches have (64 directions plus noise); speed depends
 * on it only through which tokens own residuals.
 */
#include "bench.h"
#include "bench_model.h"
#include "cli.h"

#include <getopt.h>
#include <ggml-cpu.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const bench_case all_cases[] = {
    {"decode", 128, 8, 4, 2048, 1},  {"decode", 128, 8, 4, 8192, 1},       {"decode", 128, 8, 4, 32768, 1},
    {"decode", 64, 3, 3, 8192, 1},   {"question", 128, 8, 4, 32768, 128},
};
static const double ratios[] = {10, 20};

typedef struct bench_options {
    const char *json;
    uint64_t tokens; /* 0 = all cases */
    uint64_t head_dim;
    uint64_t group, queries; /* of a shape of the caller's own; 0 = as the table has it */
    uint64_t threads; /* 0 = 1 and 2 */
    uint64_t rounds;
    bool questions;
    bool flat;
    bench_model_options whole; /* of a model, when one is given */
} bench_options;

enum { LAYER_ROUNDS = 21, MODEL_ROUNDS = 5 };

void bench_report(cJSON *rows, const bench_row *r)
{
    const bench_case *c = r->c;
    const double per = r->bandwidth * 1e-9 * c->kv_heads; /* bytes per (nanosecond per token and KV head) and token */
    const double share = (double)r->bytes / c->tokens / r->ns / per;
    printf("%-8s d %3u, %u x %u, %6u tokens, %u queries, %2gx, %u threads: %7.1f ns, %-13s %8.1f ns, %6.2fx (%4.1f %% / %4.1f %% of read "
           "bandwidth)\n",
           c->name, c->head_dim, c->kv_heads, c->group, c->tokens, c->queries, r->ratio, r->threads, r->ns, r->peer, r->peer_ns,
           r->peer_ns / r->ns, 100 * share, 100 * (double)r->peer_bytes / r->peer_tokens / r->peer_ns / per);
    fflush(stdout);
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "case", c->name);
    cJSON_AddNumberToObject(row, "head_dim", c->head_dim);
    cJSON_AddNumberToObject(row, "kv_heads", c->kv_heads);
    cJSON_AddNumberToObject(row, "gqa_group", c->group);
    cJSON_AddNumberToObject(row, "tokens", c->tokens);
    cJSON_AddNumberToObject(row, "queries", c->queries);
    cJSON_AddNumberToObject(row, "ratio", r->ratio);
    cJSON_AddNumberToObject(row, "threads", r->threads);
    cJSON_AddStringToObject(row, "peer", r->peer);
    cJSON_AddNumberToObject(row, "ns_per_token", r->ns);
    cJSON_AddNumberToObject(row, "peer_ns_per_token", r->peer_ns);
    cJSON_AddNumberToObject(row, "speedup", r->peer_ns / r->ns);
    cJSON_AddNumberToObject(row, "bytes", (double)r->bytes);
    cJSON_AddNumberToObject(row, "peer_bytes", (double)r->peer_bytes);
    cJSON_AddNumberToObject(row, "read_share", share);
    cJSON_AddItemToArray(rows, row);
}

/* One shape, ratio and number of threads: ours and every peer in turn, bench_median of the rounds. */
static int run_case(cJSON *rows, bench_setup *s, const akv_segment *segment, double ratio, uint32_t threads, uint64_t rounds, akv_diag *diag)
{
    akv_threads *pool = NULL;
    bench_call ours, dense;
    static double times[1 + BENCH_NUM_PEERS][BENCH_MOST_ROUNDS];
    if (threads > 1 && akv_threads_create(threads, &pool, diag) != AKV_OK)
        return cli_fail_diag(diag->status, diag, NULL);
    const akv_executor *executor = threads > 1 ? akv_threads_executor(pool) : NULL;
    if (!bench_call_make(&ours, s, segment, executor, diag) || !bench_call_make(&dense, s, s->dense, executor, diag))
        return cli_fail(CLI_NO_MEMORY, "no memory for the workspace");
    if (s->c->queries > 1)
        rounds = 3;
    int code = CLI_OK;
    for (uint64_t i = 0; i < rounds && code == CLI_OK; i++) {
        times[0][i] = bench_attend_seconds(&ours, threads, diag);
        for (int p = 0; p < BENCH_NUM_PEERS; p++) {
            const double start = bench_seconds_now(threads);
            if (s->graph[p] != NULL)
                ggml_graph_compute_with_ctx(s->ggml, s->graph[p], (int)threads);
            times[1 + p][i] = s->graph[p] != NULL ? bench_seconds_now(threads) - start : bench_attend_seconds(&dense, threads, diag);
        }
        if (isnan(times[0][i]) || isnan(times[BENCH_NUM_PEERS][i]))
            code = cli_fail_diag(diag->status, diag, NULL);
        if (cli_interrupted())
            code = CLI_SIGNAL + cli_interrupted();
    }
    akv_segment_info info;
    akv_segment_info_init(&info);
    if (code == CLI_OK && akv_segment_get_info(segment, &info, diag) == AKV_OK) {
        const double bandwidth = bench_read_bandwidth(executor, threads, 5), per = 1e9 / s->c->tokens / s->c->kv_heads;
        const double mine = bench_median(times[0], rounds) * per;
        for (int p = 0; p < BENCH_NUM_PEERS; p++) {
            const bench_row row = {s->c, bench_peers[p].name, ratio, mine, bench_median(times[1 + p], rounds) * per, threads, s->c->tokens,
                                   info.bytes.total, s->peer_bytes[p], bandwidth};
            bench_report(rows, &row);
        }
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
    akv_threads *pool = NULL; /* compresses; every measurement has its own */
    if (akv_threads_create(2, &pool, &diag) != AKV_OK)
        return cli_fail_diag(diag.status, &diag, NULL);
    int code = bench_setup_make(&s, c, true, &diag) ? CLI_OK : cli_fail(CLI_NO_MEMORY, "no memory for %u tokens", c->tokens);
    for (size_t r = 0; r < sizeof ratios / sizeof ratios[0] && code == CLI_OK; r++) {
        akv_config config;
        akv_segment *segment = NULL;
        akv_config_init(&config);
        config.keep_ratio = 1.0 / ratios[r];
        config.executor = akv_threads_executor(pool);
        if (akv_compress(&s.layer, &config, &segment, &diag) != AKV_OK)
            code = cli_fail_diag(diag.status, &diag, NULL);
        for (uint32_t threads = 1; threads <= 2 && code == CLI_OK; threads++)
            if (o->threads == 0 || o->threads == threads)
                code = run_case(rows, &s, segment, ratios[r], threads, o->rounds, &diag);
        if (o->threads > 2 && code == CLI_OK)
            code = run_case(rows, &s, segment, ratios[r], (uint32_t)o->threads, o->rounds, &diag);
        akv_segment_release(segment);
    }
    bench_setup_free(&s);
    akv_threads_destroy(pool);
    return code;
}

static bool add_document(bench_options *o, const char *path)
{
    const char **grown = realloc((void *)(uintptr_t)o->whole.documents, (o->whole.num_documents + 1) * sizeof *grown);
    if (grown == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory"), false;
    grown[o->whole.num_documents++] = path;
    o->whole.documents = grown;
    return true;
}

/* Options that fit together, or an exit code. */
static int check(const bench_options *o)
{
    const bool shape = o->tokens != 0 || o->head_dim != 0 || o->group != 0 || o->queries != 0;
    if ((o->whole.model != NULL) != (o->whole.num_documents != 0))
        return cli_fail(CLI_USAGE, "--model and --from belong together: a GGUF file and documents that `akv pack` made with it");
    if (o->whole.model != NULL && (shape || o->flat))
        return cli_fail(CLI_USAGE, "with --model, the documents say how many tokens there are, and the model its shape");
    return CLI_OK;
}

static int parse(int argc, char **argv, bench_options *o)
{
    static const struct option options[] = {{"json", required_argument, NULL, 'j'},    {"tokens", required_argument, NULL, 't'},
                                            {"head-dim", required_argument, NULL, 'd'}, {"threads", required_argument, NULL, 'n'},
                                            {"rounds", required_argument, NULL, 'r'},  {"decode-only", no_argument, NULL, 'o'},
                                            {"flat", no_argument, NULL, 'f'},          {"gqa-group", required_argument, NULL, 'g'},
                                            {"queries", required_argument, NULL, 'q'}, {"model", required_argument, NULL, 'm'},
                                            {"from", required_argument, NULL, 'a'},
                                            {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "m:h", options, NULL)) != -1) {
        bool ok = true;
        switch (option) {
        case 'h': return -1;
        case 'j': o->json = optarg; break;
        case 't': ok = cli_parse_u64("--tokens", optarg, 64, 1 << 20, &o->tokens); break;
        case 'd': ok = cli_parse_u64("--head-dim", optarg, 32, 512, &o->head_dim); break;
        case 'n': ok = cli_parse_u64("--threads", optarg, 1, 64, &o->threads); break;
        case 'r': ok = cli_parse_u64("--rounds", optarg, 1, BENCH_MOST_ROUNDS, &o->rounds); break;
        case 'o': o->questions = false; break;
        case 'f': o->flat = true; break;
        case 'g': ok = cli_parse_u64("--gqa-group", optarg, 1, 64, &o->group); break;
        case 'q': ok = cli_parse_u64("--queries", optarg, 1, 1024, &o->queries); break;
        case 'm': o->whole.model = optarg; break;
        case 'a': ok = add_document(o, optarg); break;
        default: return cli_usage(&cli_cmd_bench);
        }
        if (!ok)
            return cli_usage(&cli_cmd_bench);
    }
    if (optind < argc)
        cli_fail(CLI_USAGE, "\"%s\" is one argument too many", argv[optind]);
    else if (check(o) == CLI_OK)
        return CLI_OK;
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

static int run_model(bench_options *o, cJSON *rows)
{
    o->whole.threads = (uint32_t)o->threads;
    o->whole.rounds = o->rounds != 0 ? (uint32_t)o->rounds : MODEL_ROUNDS;
    return bench_model_run(&o->whole, rows);
}

static int run_layers(bench_options *o, cJSON *rows)
{
    const bool own_shape = o->group != 0 || o->queries != 0;
    int code = CLI_OK;
    bool any = false;
    for (size_t i = 0; !own_shape && i < sizeof all_cases / sizeof all_cases[0] && code == CLI_OK; i++) {
        const bench_case *c = &all_cases[i];
        if ((o->tokens != 0 && o->tokens != c->tokens) || (o->head_dim != 0 && o->head_dim != c->head_dim) ||
            (!o->questions && c->queries > 1))
            continue;
        any = true;
        code = run_shape(rows, o, c);
    }
    if (any || code != CLI_OK)
        return code;
    bench_case own = all_cases[0]; /* a shape of the caller's own: the first one of that head_dim, changed */
    for (size_t i = 0; i < sizeof all_cases / sizeof all_cases[0]; i++)
        if (o->head_dim == all_cases[i].head_dim) {
            own = all_cases[i];
            break;
        }
    own.tokens = o->tokens != 0 ? (uint32_t)o->tokens : own.tokens;
    own.head_dim = o->head_dim != 0 ? (uint32_t)o->head_dim : own.head_dim;
    own.group = o->group != 0 ? (uint32_t)o->group : own.group;
    own.queries = o->queries != 0 ? (uint32_t)o->queries : own.queries;
    return run_shape(rows, o, &own);
}

static int run(int argc, char **argv)
{
    bench_options o = {.questions = true};
    int code = parse(argc, argv, &o);
    cJSON *rows = cJSON_CreateArray();
    if (code == CLI_OK && o.whole.model != NULL) {
        code = run_model(&o, rows);
    } else if (code == CLI_OK) {
        o.rounds = o.rounds != 0 ? o.rounds : LAYER_ROUNDS;
        code = o.flat ? bench_flat(rows, o.tokens, o.threads, o.rounds) : run_layers(&o, rows);
    }
    if (code == CLI_OK && o.json != NULL)
        code = write_rows(o.json, rows);
    cJSON_Delete(rows);
    free((void *)(uintptr_t)o.whole.documents);
    return code < 0 ? cli_help(&cli_cmd_bench) : code;
}

const cli_command cli_cmd_bench = {
    "bench", "measure attention against ggml's on this machine", run,
    "usage: akv bench [options]\n"
    "       akv bench --model MODEL --from DOC.akv... [--threads N] [--rounds N] [--json FILE]\n"
    "\n"
    "Times attention of one layer over random data: from the compressed form at 10x and 20x, and in the same run ggml's\n"
    "flash attention on f16, q8_0 and q4_0 caches and the library's own dense f16 attention. Prints nanoseconds per token\n"
    "and KV head, medians of rounds that take turns; on one thread processor time, otherwise the clock.\n"
    "With a model: tokens per second of the whole model behind packed documents, and of libllama on its own with as many\n"
    "tokens in an f16 (with and without flash attention), q8_0 and q4_0 cache. More than one thread: on an idle machine.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "      --from DOC.akv   made by `akv pack`, once per ratio; may be given again\n"
    "      --tokens N       one length only (2048, 8192 and 32768)\n"
    "      --head-dim D     one head_dim only (128 with 8 heads x 4, 64 with 3 x 3)\n"
    "      --gqa-group G    query heads per KV head; with it, or --queries, only this one shape\n"
    "      --queries T      query tokens (1)\n"
    "      --threads N      this many threads (1, then 2)\n"
    "      --rounds N       repetitions (21; 3 for questions; with a model 5 of 4 tokens)\n"
    "      --flat           instead: cost per token of the compressed form at 2048, 8192, 32768 and 131072 tokens (2 heads x 4,\n"
    "                       d 128; --tokens N: none longer), caches emptied before each call\n"
    "      --decode-only    leave out the question of 128 tokens\n"
    "      --json FILE      write the rows as JSON too (\"-\": to standard output)\n"
    "  -h, --help           this text\n"};
