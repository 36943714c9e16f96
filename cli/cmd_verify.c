/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_verify.c - `akv verify`: every byte of a .akv file checked. */
#include "cli.h"

#include <getopt.h>
#include <stdio.h>

static int verify_file(const char *path, bool quiet)
{
    cli_image image = {NULL, 0};
    akv_document *document = NULL;
    akv_diag diag = {AKV_OK, ""};
    int code = cli_image_read(path, &image);
    if (code != CLI_OK)
        return code;
    akv_status status = akv_document_open(image.data, image.bytes, NULL, &document, &diag);
    if (status == AKV_OK)
        status = akv_document_verify(document, &diag);
    if (status != AKV_OK) {
        code = cli_fail_diag(status, &diag, path);
    } else if (!quiet) {
        akv_document_parts parts;
        akv_document_parts_init(&parts);
        akv_document_get_parts(document, &parts, NULL);
        const char *profile = akv_document_property_value(document, "profile", 0);
        if (printf("%s: ok, %llu tokens, %u segments%s%s, %zu bytes\n", path, (unsigned long long)parts.num_tokens,
                   parts.num_segments, profile != NULL ? ", profile " : "",
                   profile != NULL ? cli_printable(profile) : "", image.bytes) < 0 ||
            fflush(stdout) != 0)
            code = cli_fail(CLI_IO, "cannot write to standard output");
    }
    akv_document_close(document);
    cli_image_free(&image);
    return code;
}

static int run(int argc, char **argv)
{
    static const struct option options[] = {
        {"help", no_argument, NULL, 'h'}, {"quiet", no_argument, NULL, 'q'}, {NULL, 0, NULL, 0}};
    bool quiet = false;
    int option;
    while ((option = getopt_long(argc, argv, "hq", options, NULL)) != -1) {
        if (option == 'h')
            return cli_help(&cli_cmd_verify);
        if (option != 'q')
            return cli_usage(&cli_cmd_verify);
        quiet = true;
    }
    if (optind == argc) {
        cli_fail(CLI_USAGE, "which file? give at least one .akv file");
        return cli_usage(&cli_cmd_verify);
    }
    int worst = CLI_OK;
    for (int i = optind; i < argc; i++) {
        int code = verify_file(argv[i], quiet);
        if (worst == CLI_OK)
            worst = code;
    }
    return worst;
}

const cli_command cli_cmd_verify = {
    "verify", "check every byte of a .akv file", run,
    "usage: akv verify [-q] DOC.akv...\n"
    "\n"
    "Checks structure, version, all checksums and the contents of every segment. Needs no model.\n"
    "Ends with 0 when all files are good, otherwise with the exit code of the first bad one (4 = damaged).\n"
    "\n"
    "  -q, --quiet   print nothing for good files\n"
    "  -h, --help    this text\n"
    "\n"
    "example:\n"
    "  akv verify book.akv\n"};
