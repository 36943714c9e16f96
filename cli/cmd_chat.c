/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_chat.c - `akv chat`: a conversation whose old part is compressed as it grows, and which survives the program. */
#include "chat.h"
#include "chat_line.h"
#include "settings.h"

#include <cjson/cJSON.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Small, so that little is exact at a time: what waits in the engine's cells counts for the budget. */
#define CELLS 256

/* ------------------------------------------------------------------------------------------------------------ commands */

static void stats(const cli_chat *c)
{
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    if (akv_llama_get_memory(c->session.host, &m, NULL) != AKV_OK)
        return;
    const uint64_t total = m.segments.total + m.cell_bytes;
    cli_note("turns        %" PRIu32 ", %" PRId32 " tokens in all", c->num_turns,
             akv_llama_next_position(c->session.host));
    cli_note("cache        %s in %" PRIu32 " segments, %s in the engine's cells: %.1f %% of the %s uncompressed",
             cli_bytes(m.segments.total), m.num_segments, cli_bytes(m.cell_bytes),
             m.dense_bytes != 0 ? 100.0 * (double)total / (double)m.dense_bytes : 0.0, cli_bytes(m.dense_bytes));
    if (c->settings.goal.budget_bytes != 0)
        cli_note("budget       %s", cli_bytes(c->settings.goal.budget_bytes));
    cli_print_bytes_by_kind(stderr, &m.segments);
    cli_note("compressed   %" PRIu32 " times, older parts made smaller %" PRIu32 " times", m.rolls, m.retargets);
    if (c->answer_seconds > 0.0)
        cli_note("answers      %" PRIu64 " tokens, %.1f tokens/s", c->answer_tokens,
                 (double)c->answer_tokens / c->answer_seconds);
}

static const char chat_help[] = "/undo        take back the last turn\n"
                                "/save FILE   write the conversation to a .akv file\n"
                                "/load FILE   go on from such a file, or from a packed document\n"
                                "/stats       tokens and bytes\n"
                                "/help        this\n"
                                "/quit        end (so does Ctrl-D)\n"
                                "A line that begins with two slashes is said with one.\n";

/* *quit is set by /quit. Only what makes going on impossible is an error. */
static int command(cli_chat *c, char *line, bool *quit)
{
    char *word = strtok(line, " \t"), *argument = strtok(NULL, "");
    while (argument != NULL && (*argument == ' ' || *argument == '\t'))
        argument++;
    uint64_t bytes = 0;
    if (strcmp(word, "/quit") == 0 || strcmp(word, "/exit") == 0) {
        *quit = true;
    } else if (strcmp(word, "/undo") == 0) {
        return cli_chat_undo(c);
    } else if (strcmp(word, "/stats") == 0) {
        stats(c);
    } else if (strcmp(word, "/help") == 0) {
        fputs(chat_help, stderr);
    } else if (strcmp(word, "/save") == 0 || strcmp(word, "/load") == 0) {
        if (argument == NULL || *argument == '\0') {
            cli_note("which file? %s FILE.akv", word);
        } else if (word[1] == 's') {
            if (cli_chat_save(c, argument, &bytes) == CLI_OK)
                cli_note("%s: %" PRIu32 " turns, %s", argument, c->num_turns, cli_bytes(bytes));
        } else {
            const int code = cli_chat_load(c, argument);
            if (code != CLI_OK) { /* what cannot be opened does not cost the conversation */
                if (c->session.store == NULL)
                    return code;
                cli_note("the conversation is as it was");
                return CLI_OK;
            }
            cli_note("%" PRIu32 " turns, %" PRId32 " tokens", c->num_turns, akv_llama_next_position(c->session.host));
            cli_chat_autosave(c);
        }
    } else {
        cli_note("there is no command %s; /help lists them", cli_printable(word));
    }
    return CLI_OK;
}

static int converse(cli_chat *c)
{
    int code = CLI_OK;
    bool quit = false;
    while (code == CLI_OK && !quit) {
        char *line = NULL;
        code = chat_line_read(&line);
        const int signal = cli_interrupted();
        if (signal == SIGINT)
            cli_interruption_over();
        else if (signal != 0)
            code = CLI_SIGNAL + signal;
        if (code != CLI_OK || line == NULL) {
            free(line);
            break;
        }
        if (line[0] == '/' && line[1] != '/')
            code = command(c, line, &quit);
        else if (line[0] != '\0' && strspn(line, " \t") != strlen(line))
            code = cli_chat_say(c, line[0] == '/' ? line + 1 : line);
        free(line);
        if (cli_interrupted() == SIGINT)
            cli_interruption_over(); /* it ended the answer, not the program */
        else if (cli_interrupted() != 0)
            code = CLI_SIGNAL + cli_interrupted();
    }
    return code;
}

static int write_json(const cli_chat *c)
{
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    akv_status status = akv_llama_get_memory(c->session.host, &m, NULL);
    cJSON *root = cJSON_CreateObject();
    if (status != AKV_OK || root == NULL)
        return cli_fail(CLI_INTERNAL, "no figures for the report");
    cJSON_AddStringToObject(root, "version", akv_version());
    cJSON_AddStringToObject(root, "command", "chat");
    cJSON_AddNumberToObject(root, "turns", c->num_turns);
    cJSON_AddNumberToObject(root, "tokens", akv_llama_next_position(c->session.host));
    cJSON_AddNumberToObject(root, "answer_tokens", (double)c->answer_tokens);
    cJSON_AddNumberToObject(root, "answer_seconds", c->answer_seconds);
    cJSON_AddNumberToObject(root, "dense_bytes", (double)m.dense_bytes);
    cJSON_AddNumberToObject(root, "segment_bytes", (double)m.segments.total);
    cJSON_AddNumberToObject(root, "cell_bytes", (double)m.cell_bytes);
    cJSON_AddNumberToObject(root, "budget_bytes", (double)c->settings.goal.budget_bytes);
    cJSON_AddNumberToObject(root, "rolls", m.rolls);
    cJSON_AddNumberToObject(root, "retargets", m.retargets);
    cJSON_AddItemToObject(root, "bytes", cli_bytes_json(&m.segments));
    return cli_json_write(root, c->settings.json);
}

/* -------------------------------------------------------------------------------------------------------------- options */

enum { OPT_FROM = 300, OPT_TEMP, OPT_SESSION };

static int parse(int argc, char **argv, cli_chat *c)
{
    static const struct option own[] = {{"from", required_argument, NULL, OPT_FROM},
                                        {"session", required_argument, NULL, OPT_SESSION},
                                        {"predict", required_argument, NULL, 'n'},
                                        {"temp", required_argument, NULL, OPT_TEMP},
                                        {"model", required_argument, NULL, 'm'},
                                        {"keep", required_argument, NULL, 'k'},
                                        {"ratio", required_argument, NULL, 'r'},
                                        {"budget", required_argument, NULL, 'b'},
                                        {"shares", required_argument, NULL, OPT_SHARES},
                                        {"seed", required_argument, NULL, OPT_SEED},
                                        {"threads", required_argument, NULL, 't'},
                                        {"system", required_argument, NULL, OPT_SYSTEM},
                                        {"json", required_argument, NULL, OPT_JSON},
                                        {"quiet", no_argument, NULL, 'q'},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "m:n:t:qh", own, NULL)) != -1) {
        bool ok = true;
        switch (option) {
        case 'h':
            return -1;
        case OPT_FROM:
            c->from = optarg;
            break;
        case OPT_SESSION:
            c->file = optarg;
            break;
        case 'n':
            ok = cli_parse_u64("-n", optarg, 1, 1000000, &c->max_tokens);
            break;
        case OPT_TEMP:
            ok = cli_parse_double("--temp", optarg, 0.0, 100.0, &c->temperature);
            break;
        case 'b':
            ok = cli_parse_bytes("--budget", optarg, &c->settings.goal.budget_bytes);
            break; /* goes with --ratio here */
        default:
            ok = cli_settings_option(&c->settings, option, optarg);
        }
        if (!ok)
            return cli_usage(&cli_cmd_chat);
    }
    int code = CLI_OK;
    if (optind != argc)
        code = cli_fail(CLI_USAGE, "\"%s\" stands where no argument belongs; lines are read from standard input",
                        argv[optind]);
    else if (c->settings.model == NULL)
        code = cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
    else if (c->from != NULL && c->settings.system != NULL)
        code = cli_fail(CLI_USAGE, "--system belongs to a chat without --from: the document brings its own");
    return code == CLI_OK ? CLI_OK : cli_usage(&cli_cmd_chat);
}

static int run(int argc, char **argv)
{
    cli_chat c;
    memset(&c, 0, sizeof c);
    cli_settings_init(&c.settings);
    c.settings.tail_cells = CELLS;
    c.max_tokens = 512;
    int code = parse(argc, argv, &c);
    if (code < 0)
        return cli_help(&cli_cmd_chat);
    c.sampler = (cli_sampler){c.temperature, c.settings.seed};
    if (code == CLI_OK && c.file != NULL)
        code = cli_check_writable(c.file);
    if (code == CLI_OK && c.settings.json != NULL)
        code = cli_check_writable(c.settings.json);
    if (code == CLI_OK)
        code = cli_session_open(&c.session, &c.settings);
    if (code == CLI_OK)
        code = cli_chat_begin(&c);
    c.session.label = "reading";
    if (code == CLI_OK && c.num_turns > 0 && !c.settings.quiet)
        cli_note("going on after %" PRIu32 " turns, %" PRId32 " tokens", c.num_turns,
                 akv_llama_next_position(c.session.host));
    if (code == CLI_OK)
        code = converse(&c);
    if (code == CLI_OK && c.settings.json != NULL)
        code = write_json(&c);
    if (code == CLI_OK && c.unsaved != CLI_OK)
        code = cli_fail(c.unsaved, "%s does not hold the whole conversation", c.file);
    cli_session_close(&c.session);
    cli_settings_free(&c.settings);
    free(c.starts);
    return code;
}

const cli_command cli_cmd_chat = {
    "chat", "converse, optionally about a packed document", run,
    "usage: akv chat -m MODEL [--from DOC.akv] [--session FILE.akv] [options]\n"
    "\n"
    "A conversation of many turns: lines come from standard input, answers go to standard output as they are made. "
    "What has become\n"
    "old is compressed as the conversation grows. Ctrl-C ends an answer, not the program; /help lists the commands.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "      --from DOC.akv   about this packed document\n"
    "      --session FILE   go on from this file if it is there, and write it after every answer; it is whole at any "
    "moment\n"
    "      --ratio X        the whole conversation takes X times less than uncompressed (10), the oldest turns least; 2048 tokens' "
    "bytes\n"
    "                       it may always take, so what is shorter stays exact\n"
    "      --keep R         the same the other way round\n"
    "      --budget BYTES   most that the cache may take, the document's and the exact tokens included: what was "
    "compressed is made\n"
    "                       smaller again when it has to; K, M, G are powers of 1024\n"
    "      --shares FILE    made by `akv calibrate`: the same bytes, split unevenly over the layers\n"
    "  -n, --predict N      at most N tokens an answer (512)\n"
    "      --temp T         sampling temperature; 0 (default) takes the likeliest token\n"
    "      --seed S         of the random anchors, and of --temp (0)\n"
    "      --system TEXT    system message of a chat without --from\n"
    "  -t, --threads N      (all processors)\n"
    "      --json FILE      write figures for programs at the end\n"
    "  -q, --quiet          no progress\n"
    "  -h, --help           this text\n"
    "\n"
    "examples:\n"
    "  akv chat -m model.gguf --from book.akv --session talk.akv\n"
    "  akv chat -m model.gguf --budget 64M\n"};
