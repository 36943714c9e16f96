/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_info.c - `akv info`: what a .akv file holds, without a model. */
#include "cli.h"
#include "document_report.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_sections(const akv_document *document, uint32_t num_sections)
{
    printf("sections\n");
    for (uint32_t i = 0; i < num_sections; i++) {
        akv_document_section_info s;
        akv_document_section_info_init(&s);
        akv_document_get_section(document, i, &s, NULL);
        printf("  %4u  %-12s", i, s.type_name);
        if (s.layer >= 0)
            printf(" layer %-4d", s.layer);
        else
            printf("           ");
        printf(" %12llu bytes at %12llu  xxh3 %016llx\n", (unsigned long long)s.bytes, (unsigned long long)s.offset,
               (unsigned long long)s.checksum);
    }
}

static void print_layers(const cli_report *r)
{
    printf("layers\n");
    for (uint32_t i = 0; i < r->num_layers; i++) {
        const cli_layer_report *l = &r->layers[i];
        const akv_segment_info *s = &l->segment;
        if (!l->hosted)
            printf("  %4u  %s, left to the engine\n", i, l->native_kind);
        else
            printf("  %4u  %-10s %u x %u heads, head_dim %u/%u, %u anchors, %llu + %llu residuals, %s of %s\n", i,
                   s->kind == AKV_SEGMENT_DENSE ? "dense" : "compressed", s->shape.num_kv_heads, s->shape.gqa_group,
                   s->shape.head_dim_k, s->shape.head_dim_v, s->num_anchors, (unsigned long long)s->residuals_k,
                   (unsigned long long)s->residuals_v, cli_bytes(s->bytes.total),
                   cli_bytes(cli_layer_dense_bytes(r, l)));
    }
}

static void print_info(const char *path, const akv_document *document, const cli_report *r)
{
    akv_document_info info;
    akv_document_parts parts;
    akv_document_info_init(&info);
    akv_document_parts_init(&parts);
    akv_document_get_info(document, &info, NULL);
    akv_document_get_parts(document, &parts, NULL);
    printf("file         %s, %s (%llu bytes), format %u.%u, %u sections\n", path, cli_bytes(info.total_bytes),
           (unsigned long long)info.total_bytes, info.major, info.minor, info.num_sections);
    printf("model        %s, %u layers, fingerprint %016llx%016llx\n", cli_printable(parts.model.description),
           parts.model.num_layers, (unsigned long long)parts.model.hash[0], (unsigned long long)parts.model.hash[1]);
    printf("document     %llu tokens\n", (unsigned long long)parts.num_tokens);
    printf("method       %s%s%s, %u layers compressed, %u native\n", r->method,
           r->profile[0] != '\0' ? ", profile " : "", r->profile, r->hosted_layers, r->num_layers - r->hosted_layers);
    printf("dense cache  %s\n", cli_bytes(r->dense_bytes));
    if (r->bytes.total != 0)
        printf("compressed   %s in memory: %.2fx smaller\n", cli_bytes(r->bytes.total),
               (double)r->dense_bytes / (double)r->bytes.total);
    cli_print_bytes_by_kind(stdout, &r->bytes);
    if (r->native_bytes != 0)
        printf("native state %s\n", cli_bytes(r->native_bytes));
    for (uint32_t i = 0; i < parts.num_properties; i++) {
        printf("%-12s ", cli_printable(parts.properties[i].key));
        printf("%s\n", cli_printable(parts.properties[i].value));
    }
}

static int info_file(const char *path, const char *json, bool layers, bool sections)
{
    cli_image image = {NULL, 0};
    akv_document *document = NULL;
    akv_diag diag = {AKV_OK, ""};
    cli_report report;
    int code = cli_image_read(path, &image);
    if (code != CLI_OK)
        return code;
    akv_status status = akv_document_open(image.data, image.bytes, NULL, &document, &diag);
    code = status != AKV_OK ? cli_fail_diag(status, &diag, path) : cli_report_of_document(path, document, &report);
    if (code == CLI_OK) {
        report.command = "info";
        if (json != NULL)
            code = cli_report_json(&report, json);
        if (code == CLI_OK && (json == NULL || strcmp(json, "-") != 0)) {
            print_info(path, document, &report);
            if (layers)
                print_layers(&report);
            akv_document_info info;
            akv_document_info_init(&info);
            akv_document_get_info(document, &info, NULL);
            if (sections)
                print_sections(document, info.num_sections);
            if (fflush(stdout) != 0 || ferror(stdout))
                code = cli_fail(CLI_IO, "cannot write to standard output");
        }
        free((void *)(uintptr_t)report.layers);
    }
    akv_document_close(document);
    cli_image_free(&image);
    return code;
}

static int run(int argc, char **argv)
{
    static const struct option options[] = {{"help", no_argument, NULL, 'h'},
                                            {"layers", no_argument, NULL, 'l'},
                                            {"sections", no_argument, NULL, 's'},
                                            {"json", required_argument, NULL, 'j'},
                                            {NULL, 0, NULL, 0}};
    bool layers = false, sections = false;
    const char *json = NULL;
    int option;
    while ((option = getopt_long(argc, argv, "hls", options, NULL)) != -1) {
        switch (option) {
        case 'h': return cli_help(&cli_cmd_info);
        case 'l': layers = true; break;
        case 's': sections = true; break;
        case 'j': json = optarg; break;
        default: return cli_usage(&cli_cmd_info);
        }
    }
    if (optind + 1 != argc) {
        cli_fail(CLI_USAGE, "give one .akv file");
        return cli_usage(&cli_cmd_info);
    }
    return info_file(argv[optind], json, layers, sections);
}

const cli_command cli_cmd_info = {
    "info", "show what a .akv file holds", run,
    "usage: akv info [options] DOC.akv\n"
    "\n"
    "Shows model, document, method and bytes by kind. Needs no model. Damage is reported (exit code 4).\n"
    "\n"
    "  -l, --layers      also a line for each layer\n"
    "  -s, --sections    also the section table with checksums\n"
    "      --json FILE   the same for programs (\"-\": to standard output, instead of the text)\n"
    "  -h, --help        this text\n"
    "\n"
    "example:\n"
    "  akv info --layers book.akv\n"};
