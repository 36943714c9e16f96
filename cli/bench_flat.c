/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_flat.c - `akv bench --flat`: what a token costs as the segment grows. All lengths take turns within a round, so that a machine
 * that slows down slows them all; before each call a buffer larger than the caches is read.
 */
#include "bench.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTHS = 4, KV_HEADS = 2, GROUP = 4, HEAD_DIM = 128 };
static const uint32_t lengths[LENGTHS] = {2048, 8192, 32768, 131072};
static const double ratios[] = {10, 20};

/* The segments of one ratio, shortest first; NULL where there is none. */
typedef struct flat_set {
    bench_case c[LENGTHS];
    bench_setup setup[LENGTHS];
    akv_segment *segment[LENGTHS];
    uint32_t count;
} flat_set;

static int compress_all(flat_set *set, double ratio, akv_diag *diag)
{
    akv_threads *pool = NULL;
    if (akv_threads_create(2, &pool, diag) != AKV_OK)
        return cli_fail_diag(diag->status, diag, NULL);
    int code = CLI_OK;
    for (uint32_t i = 0; i < set->count && code == CLI_OK; i++) {
        akv_config config;
        akv_config_init(&config);
        config.keep_ratio = 1.0 / ratio;
        config.executor = akv_threads_executor(pool);
        akv_segment_release(set->segment[i]);
        set->segment[i] = NULL;
        if (akv_compress(&set->setup[i].layer, &config, &set->segment[i], diag) != AKV_OK)
            code = cli_fail_diag(diag->status, diag, NULL);
        else if (cli_interrupted())
            code = CLI_SIGNAL + cli_interrupted();
    }
    akv_threads_destroy(pool);
    return code;
}

static int measure(cJSON *rows, flat_set *set, double ratio, uint32_t threads, uint64_t rounds, akv_diag *diag)
{
    static double times[LENGTHS][BENCH_MOST_ROUNDS];
    bench_call calls[LENGTHS] = {0};
    akv_threads *pool = NULL;
    double bandwidth = 0;
    int code = CLI_OK;
    if (threads > 1 && akv_threads_create(threads, &pool, diag) != AKV_OK)
        return cli_fail_diag(diag->status, diag, NULL);
    const akv_executor *executor = threads > 1 ? akv_threads_executor(pool) : NULL;
    for (uint32_t i = 0; i < set->count && code == CLI_OK; i++)
        if (!bench_call_make(&calls[i], &set->setup[i], set->segment[i], executor, diag))
            code = cli_fail(CLI_NO_MEMORY, "no memory for the workspace");
    for (uint64_t round = 0; round < rounds && code == CLI_OK; round++)
        for (uint32_t i = 0; i < set->count && code == CLI_OK; i++) {
            bandwidth = fmax(bandwidth, bench_read_bandwidth(executor, threads, 1));
            times[i][round] = bench_attend_seconds(&calls[i], threads, diag);
            if (isnan(times[i][round]))
                code = cli_fail_diag(diag->status, diag, NULL);
            else if (cli_interrupted())
                code = CLI_SIGNAL + cli_interrupted();
        }
    uint64_t bytes[LENGTHS] = {0};
    double ns[LENGTHS] = {0};
    for (uint32_t i = 0; i < set->count && code == CLI_OK; i++) {
        akv_segment_info info;
        akv_segment_info_init(&info);
        if (akv_segment_get_info(set->segment[i], &info, diag) != AKV_OK)
            code = cli_fail_diag(diag->status, diag, NULL);
        bytes[i] = info.bytes.total;
        ns[i] = bench_median(times[i], rounds) * 1e9 / lengths[i] / KV_HEADS;
        const bench_row row = {&set->c[i], "akv at 2048", ratio, ns[i], ns[0], threads, lengths[0], bytes[i], bytes[0], bandwidth};
        bench_report(rows, &row);
    }
    for (uint32_t i = 0; i < set->count; i++)
        free(calls[i].workspace);
    akv_threads_destroy(pool);
    return code;
}

int bench_flat(cJSON *rows, uint64_t longest, uint64_t threads, uint64_t rounds)
{
    static flat_set set;
    akv_diag diag = {AKV_OK, ""};
    int code = CLI_OK;
    for (uint32_t i = 0; i < LENGTHS && (i == 0 || longest == 0 || lengths[i] <= longest) && code == CLI_OK; i++) {
        const bench_case c = {"flat", HEAD_DIM, KV_HEADS, GROUP, lengths[i], 1};
        set.c[i] = c;
        set.count = i + 1;
        if (!bench_setup_make(&set.setup[i], &set.c[i], false, &diag))
            code = cli_fail(CLI_NO_MEMORY, "no memory for %u tokens", c.tokens);
    }
    for (size_t r = 0; r < sizeof ratios / sizeof ratios[0] && code == CLI_OK; r++) {
        code = compress_all(&set, ratios[r], &diag);
        for (uint32_t n = 1; n <= 2 && code == CLI_OK; n++)
            if (threads == 0 || threads == n)
                code = measure(rows, &set, ratios[r], n, rounds, &diag);
        if (threads > 2 && code == CLI_OK)
            code = measure(rows, &set, ratios[r], (uint32_t)threads, rounds, &diag);
    }
    for (uint32_t i = 0; i < set.count; i++) {
        akv_segment_release(set.segment[i]);
        bench_setup_free(&set.setup[i]);
    }
    return code;
}
