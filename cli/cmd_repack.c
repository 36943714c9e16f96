/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_repack.c - `akv repack`: a packed document made smaller, without the model. */
#include "cli.h"
#include "document_report.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct repack {
    const char *input, *output, *json;
    cli_size_goal goal;
    uint32_t threads;
    bool quiet;

    akv_document_parts parts;
    akv_segment **segments;  /* [num_segments] the result; retained or new */
    double lost[2], weights; /* sums over segments, weighted by their dense bytes */
} repack;

static uint64_t dense_bytes(const akv_segment *segment, akv_segment_info *info)
{
    akv_segment_info_init(info);
    akv_segment_get_info(segment, info, NULL);
    return info->dense_bytes;
}

/*
 * The keep ratio for the segments that can shrink: what is kept dense (a stretch within the window, say) stays and is
 * paid for by the others.
 */
static double keep_ratio(const repack *r, uint64_t *dense, uint64_t *budget)
{
    uint64_t fixed = 0, rest = 0;
    akv_segment_info info;
    *dense = 0;
    for (uint32_t i = 0; i < r->parts.num_segments; i++) {
        const uint64_t bytes = dense_bytes(r->segments[i], &info);
        *dense += bytes;
        if (info.kind == AKV_SEGMENT_DENSE)
            fixed += info.bytes.total;
        else
            rest += bytes;
    }
    *budget = r->goal.budget_bytes != 0 ? r->goal.budget_bytes : (uint64_t)(r->goal.keep_ratio * (double)*dense);
    if (rest == 0)
        return fixed <= *budget ? 1.0 : 0.0;
    return *budget > fixed ? (double)(*budget - fixed) / (double)rest : 0.0;
}

static int shrink(repack *r, const akv_config *config)
{
    akv_diag diag = {AKV_OK, ""};
    uint64_t dense, budget, least = 0;
    const double keep = keep_ratio(r, &dense, &budget);
    bool possible = true;
    for (uint32_t i = 0; i < r->parts.num_segments; i++) { /* all of it first: nothing is done by halves */
        akv_segment_info info;
        akv_retarget_info plan;
        akv_retarget_info_init(&plan);
        const uint64_t bytes = dense_bytes(r->segments[i], &info);
        if (info.kind == AKV_SEGMENT_DENSE) {
            least += info.bytes.total;
            continue;
        }
        akv_status status = akv_segment_retarget_plan(r->segments[i], (uint64_t)(keep * (double)bytes), &plan, &diag);
        if (status != AKV_OK && status != AKV_E_INFEASIBLE)
            return cli_fail_diag(status, &diag, r->input);
        possible = possible && status == AKV_OK;
        least += plan.min_bytes;
    }
    if (!possible || keep == 0.0)
        return cli_fail(CLI_INFEASIBLE,
                        "%s cannot be repacked into %" PRIu64 " bytes in memory: about %" PRIu64
                        " (a ratio of %.2f) are needed even without "
                        "residuals; pack the text anew for less",
                        r->input, budget, least, (double)dense / (double)least);
    for (uint32_t i = 0; i < r->parts.num_segments; i++) {
        akv_segment *small = NULL;
        akv_segment_info info;
        akv_retarget_info done;
        akv_retarget_info_init(&done);
        const uint64_t bytes = dense_bytes(r->segments[i], &info);
        if (cli_interrupted())
            return CLI_SIGNAL + cli_interrupted();
        if (info.kind == AKV_SEGMENT_DENSE)
            continue;
        akv_status status =
            akv_segment_retarget(r->segments[i], (uint64_t)(keep * (double)bytes), config, &small, &done, &diag);
        if (status != AKV_OK)
            return cli_fail_diag(status, &diag, r->input);
        akv_segment_release(r->segments[i]);
        r->segments[i] = small;
        r->lost[0] += done.lost_k * (double)bytes;
        r->lost[1] += done.lost_v * (double)bytes;
        r->weights += (double)bytes;
    }
    return CLI_OK;
}

/* What a report says of each layer: its segments added up. */
static int write_report(repack *r, const akv_document *document, double keep, uint64_t file_bytes)
{
    cli_report report;
    cli_report_of_properties(r->output, document, &report);
    cli_layer_report *layers = calloc(r->parts.num_layers + 1, sizeof *layers);
    if (layers == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the report");
    for (uint32_t l = 0; l < r->parts.num_layers; l++) {
        const akv_document_layer *layer = &r->parts.layers[l];
        layers[l].hosted = layer->kind == AKV_DOCUMENT_LAYER_SEGMENTS;
        layers[l].native_kind = layer->kind == AKV_DOCUMENT_LAYER_WINDOW ? "sliding window" : "no cache of its own";
        cli_layer_of_segments(r->segments + layer->first_segment, layer->num_segments, &layers[l]);
    }
    report.command = "repack";
    report.layers = layers;
    report.keep_ratio = keep;
    report.file_bytes = file_bytes;
    report.threads = r->threads;
    report.residual_energy_lost[0] = r->weights > 0.0 ? r->lost[0] / r->weights : 0.0;
    report.residual_energy_lost[1] = r->weights > 0.0 ? r->lost[1] / r->weights : 0.0;
    cli_report_sum(&report);
    if (!r->quiet) {
        cli_report_print(&report);
        fprintf(stderr, "lost         %.1f %% of the energy of the key residuals, %.1f %% of the values'\n",
                100.0 * report.residual_energy_lost[0], 100.0 * report.residual_energy_lost[1]);
    }
    const int code = r->json != NULL ? cli_report_json(&report, r->json) : CLI_OK;
    free(layers);
    return code;
}

/*
 * The properties of the input with another keep ratio, and the one that they had: from "repacked_from" if it was
 * repacked before.
 */
static akv_document_property *new_properties(const akv_document *document, const akv_document_parts *parts,
                                             const char *keep, uint32_t *count)
{
    akv_document_property *list = calloc(parts->num_properties + 2, sizeof *list);
    const char *before = akv_document_property_value(document, "repacked_from", 0);
    *count = 0;
    for (uint32_t i = 0; list != NULL && i < parts->num_properties; i++) {
        const akv_document_property *p = &parts->properties[i];
        if (strcmp(p->key, "repacked_from") == 0)
            continue;
        list[*count] = *p;
        if (strcmp(p->key, "keep_ratio") == 0) {
            if (before == NULL)
                before = p->value;
            list[*count].value = keep;
        }
        ++*count;
    }
    if (list != NULL && before != NULL) {
        list[*count].key = "repacked_from";
        list[(*count)++].value = before;
    }
    return list;
}

static int write_document(repack *r, const akv_document *document, double keep)
{
    akv_diag diag = {AKV_OK, ""};
    akv_document_parts parts = r->parts;
    cli_output *output = NULL;
    char text[32];
    uint32_t count;
    snprintf(text, sizeof text, "%.9g", keep);
    akv_document_property *properties = new_properties(document, &parts, text, &count);
    if (properties == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    parts.properties = properties;
    parts.num_properties = count;
    parts.segments = r->segments;
    const uint64_t file_bytes = akv_document_bytes(&parts);
    int code = cli_output_open(r->output, &output);
    if (code == CLI_OK) {
        akv_status status = akv_document_write(&parts, cli_output_write, output, NULL, &diag);
        if (status == AKV_OK) {
            code = cli_output_commit(output);
        } else {
            cli_output_abort(output);
            code = cli_fail_diag(status, &diag, r->output);
        }
    }
    free(properties);
    return code == CLI_OK ? write_report(r, document, keep, file_bytes) : code;
}

static int work(repack *r, const akv_document *document)
{
    akv_diag diag = {AKV_OK, ""};
    akv_threads *threads = NULL;
    akv_document_parts_init(&r->parts);
    akv_status status = akv_document_get_parts(document, &r->parts, &diag);
    if (status == AKV_OK)
        status = akv_threads_create(r->threads, &threads, &diag);
    if (status == AKV_OK && (r->segments = calloc(r->parts.num_segments + 1, sizeof(akv_segment *))) == NULL) {
        akv_threads_destroy(threads);
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    }
    for (uint32_t i = 0; i < r->parts.num_segments && status == AKV_OK; i++)
        status = akv_document_open_segment(document, i, 0, NULL, &r->segments[i], &diag);
    int code = status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, r->input);
    if (code == CLI_OK) {
        akv_config config;
        uint64_t dense, budget;
        akv_config_init(&config);
        config.executor = akv_threads_executor(threads);
        keep_ratio(r, &dense, &budget);
        code = shrink(r, &config);
        if (code == CLI_OK)
            code = write_document(r, document, dense != 0 ? (double)budget / (double)dense : 1.0);
    }
    for (uint32_t i = 0; r->segments != NULL && i < r->parts.num_segments; i++)
        akv_segment_release(r->segments[i]);
    free(r->segments);
    akv_threads_destroy(threads);
    return code;
}

static int parse(int argc, char **argv, repack *r)
{
    static const struct option options[] = {{"output", required_argument, NULL, 'o'},
                                            {"keep", required_argument, NULL, 'k'},
                                            {"ratio", required_argument, NULL, 'r'},
                                            {"budget", required_argument, NULL, 'b'},
                                            {"threads", required_argument, NULL, 't'},
                                            {"json", required_argument, NULL, 'j'},
                                            {"quiet", no_argument, NULL, 'q'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    uint64_t number;
    int option;
    while ((option = getopt_long(argc, argv, "o:t:qh", options, NULL)) != -1) {
        switch (option) {
        case 'h':
            return -1;
        case 'o':
            r->output = optarg;
            break;
        case 'j':
            r->json = optarg;
            break;
        case 'q':
            r->quiet = true;
            break;
        case 't':
            if (!cli_parse_u64("--threads", optarg, 1, 1024, &number))
                return cli_usage(&cli_cmd_repack);
            r->threads = (uint32_t)number;
            break;
        case 'k':
        case 'r':
        case 'b':
            if (cli_size_goal_set(&r->goal, option, optarg))
                break;
            return cli_usage(&cli_cmd_repack);
        default:
            return cli_usage(&cli_cmd_repack);
        }
    }
    int code = CLI_OK;
    if (optind + 1 != argc)
        code = cli_fail(CLI_USAGE, "give one .akv file to repack");
    else if (r->output == NULL)
        code = cli_fail(CLI_USAGE, "where to? give the file to write with -o");
    else if (r->goal.given == 0)
        code = cli_fail(CLI_USAGE, "how small? give --ratio, --keep or --budget");
    r->input = argv[optind];
    return code == CLI_OK ? CLI_OK : cli_usage(&cli_cmd_repack);
}

static int run(int argc, char **argv)
{
    repack r;
    cli_image image = {NULL, 0};
    akv_document *document = NULL;
    akv_diag diag = {AKV_OK, ""};
    memset(&r, 0, sizeof r);
    cli_size_goal_init(&r.goal);
    r.threads = cli_default_threads();
    int code = parse(argc, argv, &r);
    if (code < 0)
        return cli_help(&cli_cmd_repack);
    if (code == CLI_OK)
        code = cli_check_writable(r.output);
    if (code == CLI_OK && r.json != NULL)
        code = cli_check_writable(r.json);
    if (code == CLI_OK)
        code = cli_image_read(r.input, &image);
    if (code == CLI_OK) {
        akv_status status = akv_document_open(image.data, image.bytes, NULL, &document, &diag);
        if (status == AKV_OK)
            status = akv_document_verify(document, &diag);
        code = status == AKV_OK ? work(&r, document) : cli_fail_diag(status, &diag, r.input);
    }
    akv_document_close(document);
    cli_image_free(&image);
    return code;
}

const cli_command cli_cmd_repack = {
    "repack", "make a .akv file smaller, without the model", run,
    "usage: akv repack DOC.akv --ratio X -o SMALL.akv [options]\n"
    "\n"
    "Residuals get fewer bits or go, layer by layer, until the document fits; no text is read and no model is needed.\n"
    "Packing the text anew for the same bytes keeps more. A document that fits already is copied.\n"
    "\n"
    "  -o, --output FILE    the .akv file to write; an old one is replaced, DOC.akv itself too\n"
    "      --ratio X        X times smaller than the uncompressed cache\n"
    "      --keep R         the same the other way round: 0.05 is --ratio 20\n"
    "      --budget BYTES   the same in bytes, all layers together; K, M, G are powers of 1024\n"
    "  -t, --threads N      (all processors)\n"
    "      --json FILE      write the report for programs\n"
    "  -q, --quiet          no report\n"
    "  -h, --help           this text\n"
    "\n"
    "example:\n"
    "  akv repack book.akv --ratio 20 -o small.akv\n"};
