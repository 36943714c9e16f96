/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_pack.c - `akv pack`: read and compress a document today, ask tomorrow. */
#include "session.h"
#include "settings.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(const cli_settings *s, const char *output)
{
    if (s->model == NULL)
        return cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
    if (s->num_files == 0)
        return cli_fail(CLI_USAGE, "which document? give a text file with -f");
    if (output == NULL)
        return cli_fail(CLI_USAGE, "where to? give the file to write with -o");
    if (s->method == CLI_METHOD_DENSE)
        return cli_fail(CLI_USAGE, "--method dense keeps the engine's own cache, which cannot be packed; exact can");
    return CLI_OK;
}

static int parse(int argc, char **argv, cli_settings *s, const char **output)
{
    static const struct option options[] = {
        {"output", required_argument, NULL, 'o'}, CLI_SETTINGS_LONG, {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "o:" CLI_SETTINGS_SHORT, options, NULL)) != -1) {
        if (option == 'h')
            return -1;
        if (option == 'o')
            *output = optarg;
        else if (!cli_settings_option(s, option, optarg))
            return cli_usage(&cli_cmd_pack);
    }
    for (int i = optind; i < argc; i++) /* `-f *.txt`: the shell puts the rest of the files here */
        if (s->num_files == 0 || !cli_settings_option(s, 'f', argv[i])) {
            cli_fail(CLI_USAGE, "\"%s\" stands where no argument belongs; give text files with -f", argv[i]);
            return cli_usage(&cli_cmd_pack);
        }
    int code = check(s, *output);
    return code == CLI_USAGE ? cli_usage(&cli_cmd_pack) : code;
}

/* The facts that are kept beside the segments; docs/format.md lists the keys. */
typedef struct property_list {
    akv_document_property *items;
    uint32_t count;
    char keep[32], seed[24], bytes[24];
} property_list;

static void put(property_list *list, const char *key, const char *value)
{
    list->items[list->count].key = key;
    list->items[list->count].value = value;
    list->count++;
}

static bool make_properties(const cli_session *s, const cli_report *report, property_list *list)
{
    const cli_settings *settings = s->settings;
    memset(list, 0, sizeof *list);
    list->items = calloc(settings->num_files + 16, sizeof *list->items);
    if (list->items == NULL)
        return false;
    snprintf(list->keep, sizeof list->keep, "%.9g", report->keep_ratio);
    snprintf(list->seed, sizeof list->seed, "%" PRIu64, settings->seed);
    snprintf(list->bytes, sizeof list->bytes, "%" PRIu64, s->document_bytes);
    for (size_t i = 0; i < settings->num_files; i++) {
        const char *name = settings->files[i];
        bool text = cli_utf8_prefix(name, strlen(name)) == strlen(name);
        put(list, "source", text ? name : "(name is not UTF-8)");
    }
    put(list, "source_bytes", list->bytes);
    put(list, "method", report->method);
    if (report->profile[0] != '\0')
        put(list, "profile", report->profile);
    put(list, "keep_ratio", list->keep);
    if (report->shares != NULL && cli_utf8_prefix(report->shares, strlen(report->shares)) == strlen(report->shares))
        put(list, "shares", report->shares);
    put(list, "seed", list->seed);
    put(list, "form", s->form == AKV_LLAMA_RAW ? "raw" : "chat");
    if (s->system != NULL)
        put(list, "system", s->system);
    if (s->model.name[0] != '\0')
        put(list, "model", s->model.name);
    put(list, "architecture", s->model.architecture);
    put(list, "creator", "akv");
    put(list, "creator_version", akv_version());
    return true;
}

static int write_document(const cli_session *s, const char *path, const cli_report *report, uint64_t *file_bytes)
{
    property_list properties;
    if (!make_properties(s, report, &properties))
        return cli_fail(CLI_NO_MEMORY, "no memory for the document's tables");
    const int code = cli_store_write(s->store, properties.items, properties.count, path, file_bytes);
    free(properties.items);
    return code;
}

static int pack(cli_session *s, const cli_settings *settings, const char *output)
{
    cli_report report;
    int code = cli_session_open(s, settings);
    if (code == CLI_OK)
        code = cli_session_read(s, 0);
    if (code == CLI_OK)
        code = cli_session_prefill(s, 0);
    if (code == CLI_OK)
        code = cli_session_report(s, &report);
    if (code != CLI_OK)
        return code;
    cli_progress_end(&s->progress);
    report.command = "pack";
    report.document_path = output;
    code = write_document(s, output, &report, &report.file_bytes);
    if (code == CLI_OK && !settings->quiet)
        cli_report_print(&report);
    if (code == CLI_OK && settings->json != NULL)
        code = cli_report_json(&report, settings->json);
    free((void *)(uintptr_t)report.layers);
    return code;
}

static int run(int argc, char **argv)
{
    cli_settings settings;
    cli_session session;
    const char *output = NULL;
    memset(&session, 0, sizeof session);
    cli_settings_init(&settings);
    int code = parse(argc, argv, &settings, &output);
    if (code < 0) {
        cli_settings_free(&settings);
        return cli_help(&cli_cmd_pack);
    }
    if (code == CLI_OK)
        code = cli_check_writable(output);
    if (code == CLI_OK && settings.json != NULL)
        code = cli_check_writable(settings.json);
    if (code == CLI_OK)
        code = pack(&session, &settings, output);
    cli_session_close(&session);
    cli_settings_free(&settings);
    return code;
}

const cli_command cli_cmd_pack = {
    "pack", "compress a document into a .akv file", run,
    "usage: akv pack -m MODEL -f FILE... -o DOC.akv [options]\n"
    "\n"
    "Reads the document once and writes its compressed cache to a file, from which `akv ask --from` answers without\n"
    "reading the document again. The file appears under its name only when it is complete.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "  -f, --file FILE      text to read, UTF-8; \"-\" is standard input; several are joined\n"
    "  -o, --output FILE    the .akv file to write; an old one is replaced\n" CLI_SETTINGS_HELP "\n"
    "examples:\n"
    "  akv pack -m model.gguf -f book.txt --ratio 10 -o book.akv\n"
    "  akv pack -m model.gguf -f chapter1.txt -f chapter2.txt --keep 0.05 -o book.akv\n"};
