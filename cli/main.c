/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - `akv`: finds the subcommand. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const cli_command *const commands[] = {
    &cli_cmd_ask,  &cli_cmd_chat, &cli_cmd_serve, &cli_cmd_pack, &cli_cmd_repack,    &cli_cmd_info,
    &cli_cmd_verify, &cli_cmd_plan, &cli_cmd_eval, &cli_cmd_calibrate, &cli_cmd_bench};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static const char general_help[] =
    "usage: akv COMMAND [options]\n"
    "\n"
    "Reads a long document once, shrinks the model's key/value cache without dropping a token, frees the dense cache\n"
    "and answers questions from the compressed form.\n"
    "\n"
    "commands:\n";

static const char general_end[] =
    "  help       this text, or `akv help COMMAND`\n"
    "  version    version of akv and its file format\n"
    "\n"
    "example:\n"
    "  akv ask -m model.gguf -f book.txt --ratio 10 \"Who opened the letter?\"\n"
    "\n"
    "exit codes: 0 ok, 1 usage, 2 unusable input, 3 budget too small, 4 damaged or unknown .akv file, 5 other model,\n"
    "6 input/output, 7 out of memory, 8 not supported by this model or build, 9 internal, 128 + n ended by signal n\n"
    "(130 after Ctrl-C)\n";

static const cli_command *find(const char *name)
{
    for (size_t i = 0; i < NUM_COMMANDS; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static int print_general(FILE *stream)
{
    fputs(general_help, stream);
    for (size_t i = 0; i < NUM_COMMANDS; i++)
        fprintf(stream, "  %-9s  %s\n", commands[i]->name, commands[i]->summary);
    fputs(general_end, stream);
    return fflush(stream) == 0 ? CLI_OK : CLI_IO;
}

int cli_help(const cli_command *command)
{
    return fputs(command->help, stdout) >= 0 && fflush(stdout) == 0 ? CLI_OK : CLI_IO;
}

int cli_usage(const cli_command *command)
{
    fprintf(stderr, "akv: try `akv %s --help`\n", command->name);
    return CLI_USAGE;
}

static int help(int argc, char **argv)
{
    if (argc < 2)
        return print_general(stdout);
    const cli_command *command = find(argv[1]);
    if (command == NULL)
        return cli_fail(CLI_USAGE, "there is no command \"%s\"; `akv help` lists them", argv[1]);
    return cli_help(command);
}

static int version(void)
{
    return printf("akv %s\n", akv_version()) > 0 && fflush(stdout) == 0 ? CLI_OK : CLI_IO;
}

/* The library prints nothing and takes a name it does not know for no cap: a misspelt one must not pass for a measurement. */
static bool cap_is_known(const char *cap)
{
#ifdef __aarch64__
    static const char *const names[] = {"generic", "neon", "neondot"};
#else
    static const char *const names[] = {"generic", "avx2", "avxvnni", "avx512", "avx512vnni"};
#endif
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(cap, names[i]) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_general(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        return help(argc - 1, argv + 1);
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0)
        return version();
    const cli_command *command = find(name);
    if (command == NULL)
        return cli_fail(CLI_USAGE, "there is no command \"%s\"; `akv help` lists them", name);
    const char *cap = getenv("AKV_CPU");
    if (cap != NULL && !cap_is_known(cap))
        return cli_fail(CLI_USAGE, "AKV_CPU is \"%s\"; generic, avx2, avxvnni, avx512 and avx512vnni are possible, on ARM generic, neon and neondot",
                        cap);
    cli_signals_install();
    return command->run(argc - 1, argv + 1);
}
