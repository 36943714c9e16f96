/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_chat.c - `akv chat`: a conversation whose old part is compressed as it grows, and which survives the program. */
#include "chat_line.h"
#include "sample.h"
#include "session.h"
#include "settings.h"
#include "shares.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Small, so that little is exact at a time: what waits in the engine's cells counts for the budget. */
#define CELLS 256

typedef struct chat {
    cli_settings settings;
    const char *from, *file; /* a document; the session's file */
    uint64_t max_tokens;
    double temperature;

    cli_session session;
    cli_sampler sampler;
    int32_t *starts; /* [num_turns] position where each turn began */
    uint32_t num_turns;
    int unsaved; /* why the session's file does not hold all that was said, or CLI_OK */
    bool behind_document; /* the first turn asks about a document, else it opens the chat */
    uint64_t answer_tokens;
    double answer_seconds;
} chat;

static bool add_turn(chat *c, int32_t start)
{
    int32_t *grown = realloc(c->starts, (c->num_turns + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    c->starts = grown;
    c->starts[c->num_turns++] = start;
    return true;
}

/* ------------------------------------------------------------------------------------------------------ save and load */

/* The conversation so far as a .akv file: the same as a packed document, with a "turn" for the position where each began. */
static int save(chat *c, const char *path, uint64_t *bytes)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store *store = NULL;
    const cli_session *s = &c->session;
    akv_document_property *list = calloc(c->num_turns + 8, sizeof *list);
    char(*numbers)[16] = calloc(c->num_turns + 1, sizeof *numbers);
    uint32_t n = 0;
    if (list == NULL || numbers == NULL) {
        free(list);
        free(numbers);
        return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    }
    list[n++] = (akv_document_property){"form", "chat"};
    list[n++] = (akv_document_property){"chat", c->behind_document ? "document" : "plain"};
    if (s->system != NULL)
        list[n++] = (akv_document_property){"system", s->system};
    if (s->model.name[0] != '\0')
        list[n++] = (akv_document_property){"model", s->model.name};
    list[n++] = (akv_document_property){"creator", "akv"};
    list[n++] = (akv_document_property){"creator_version", akv_version()};
    for (uint32_t i = 0; i < c->num_turns; i++) {
        snprintf(numbers[i], sizeof *numbers, "%" PRId32, c->starts[i]);
        list[n++] = (akv_document_property){"turn", numbers[i]};
    }
    akv_status status = akv_llama_snapshot(s->host, &store, &diag);
    int code = status == AKV_OK ? cli_store_write(store, list, n, path, bytes) : cli_fail_diag(status, &diag, NULL);
    akv_llama_store_release(store);
    free(list);
    free(numbers);
    return code;
}

/* After every change, when there is a session file. Failing to save does not end a conversation; it is said, and in the
 * end the exit code says it too, unless a later save went well. */
static void autosave(chat *c)
{
    uint64_t bytes = 0;
    if (c->file == NULL)
        return;
    c->unsaved = save(c, c->file, &bytes);
    if (c->unsaved != CLI_OK)
        cli_warn("%s was not written; the conversation goes on", c->file);
    else if (!c->settings.quiet && !chat_line_is_interactive())
        cli_note("%" PRIu32 " turns saved, %" PRIu64 " bytes", c->num_turns, bytes);
}

static int set_rolling(chat *c)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_rolling rolling;
    akv_llama_rolling_init(&rolling);
    rolling.config.keep_ratio = c->settings.goal.keep_ratio;
    rolling.config.profile = c->settings.profile;
    rolling.config.seed = c->settings.seed;
    rolling.budget_bytes = c->settings.goal.budget_bytes;
    rolling.from_token = !c->behind_document ? 0 : c->num_turns > 0 ? (uint32_t)c->starts[0] : UINT32_MAX;
    akv_status status = cli_shares_apply(&c->session.shares, c->session.host, &rolling.config, &diag);
    if (status == AKV_OK)
        status = akv_llama_set_rolling(c->session.host, &rolling, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

/* A document or an earlier conversation. */
static int load(chat *c, const char *path)
{
    int code = cli_session_load(&c->session, path);
    if (code != CLI_OK)
        return code;
    if (c->session.form != AKV_LLAMA_CHAT)
        return cli_fail(CLI_BAD_INPUT, "%s was packed with --raw; a conversation needs the chat form", path);
    const char *kind = akv_document_property_value(c->session.document, "chat", 0), *turn;
    c->behind_document = kind == NULL || strcmp(kind, "plain") != 0;
    c->num_turns = 0;
    int32_t last = 0;
    for (uint32_t i = 0; (turn = akv_document_property_value(c->session.document, "turn", i)) != NULL; i++) {
        char *end = NULL;
        errno = 0;
        const long start = strtol(turn, &end, 10);
        if (errno != 0 || end == turn || *end != '\0' || start <= last ||
            start >= akv_llama_next_position(c->session.host))
            return cli_fail(CLI_CORRUPT,
                            "%s: turn %" PRIu32 " begins at \"%s\", which is no position of the conversation", path, i,
                            cli_printable(turn));
        last = (int32_t)start;
        if (!add_turn(c, last))
            return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    }
    return set_rolling(c);
}

/* A chat without a document: what stands before the first user's text is read and kept as it is. */
static int begin_plain(chat *c)
{
    cli_session *s = &c->session;
    akv_diag diag = {AKV_OK, ""};
    akv_config config;
    size_t n = 0;
    akv_config_init(&config);
    cli_progress_end(&s->progress);
    akv_status status = akv_llama_render_opening(s->host, s->system, &s->tokens, &n, &diag);
    if (status == AKV_OK)
        status = akv_llama_prefill(s->host, s->tokens, n, 0, &diag);
    if (status == AKV_OK)
        status = akv_llama_compress(s->host, AKV_LLAMA_EXACT, &config, &s->store, &diag);
    if (status == AKV_OK)
        status = akv_llama_free_dense(s->host, &diag);
    if (status == AKV_OK)
        status = akv_llama_attach(s->host, s->store, &diag);
    cli_progress_end(&s->progress);
    return status == AKV_OK ? set_rolling(c) : cli_fail_diag(status, &diag, NULL);
}

static int begin(chat *c)
{
    if (c->file != NULL && access(c->file, F_OK) == 0)
        return load(c, c->file);
    if (c->from != NULL)
        return load(c, c->from);
    return begin_plain(c);
}

/* --------------------------------------------------------------------------------------------------------------- turns */

/* Back to where the turn began: nothing half-said stays. An error here ends the program: the conversation is undefined. */
static int take_back(chat *c, int32_t start)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_truncate(c->session.host, start, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

/* Says the answer token by token and puts each into the conversation. Ctrl-C ends it; what was said stays. */
static int answer_tokens(chat *c, bool *failed)
{
    cli_session *s = &c->session;
    const double begun = cli_now();
    for (uint64_t n = 0; n < c->max_tokens && !cli_interrupted(); n++) {
        const float *logits = akv_llama_logits(s->host, -1);
        const int64_t token = logits == NULL ? -1 : cli_sample(&c->sampler, logits, s->model.vocab_tokens);
        if (token < 0)
            return cli_fail(CLI_INTERNAL, "the model gave logits that are no numbers");
        if (akv_llama_is_end(s->host, (int32_t)token))
            break;
        char piece[512];
        size_t bytes = 0;
        akv_diag diag = {AKV_OK, ""};
        akv_status status = akv_llama_token_text(s->host, (int32_t)token, 0, piece, sizeof piece, &bytes, &diag);
        if (status != AKV_OK)
            return cli_fail_diag(status, &diag, NULL);
        if (fwrite(piece, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
            return cli_fail(CLI_IO, "cannot write the answer to standard output: %s", strerror(errno));
        const int32_t before = akv_llama_next_position(s->host), next = (int32_t)token;
        status = akv_llama_decode(s->host, &next, 1, AKV_LLAMA_LOGITS_LAST, &diag);
        if (status != AKV_OK) {
            if (status != AKV_E_CANCELLED) {
                fputc('\n', stdout);
                cli_fail_diag(status, &diag, NULL);
                *failed = status != AKV_E_NO_SPACE; /* an answer cut short by the context is still one */
            }
            const int code = take_back(c, before);
            if (code != CLI_OK)
                return code;
            break;
        }
        c->answer_tokens++;
    }
    c->answer_seconds += cli_now() - begun;
    fputc('\n', stdout);
    return fflush(stdout) == 0 ? CLI_OK
                               : cli_fail(CLI_IO, "cannot write the answer to standard output: %s", strerror(errno));
}

/* Without progress: its bar would wipe the line that the answer stands in. */
static int answer(chat *c, bool *failed)
{
    bool *quiet = &c->session.progress.quiet;
    const bool before = *quiet;
    *quiet = true;
    const int code = answer_tokens(c, failed);
    *quiet = before;
    return code;
}

static int say(chat *c, const char *text)
{
    cli_session *s = &c->session;
    akv_diag diag = {AKV_OK, ""};
    const int32_t start = akv_llama_next_position(s->host);
    const size_t bytes = strlen(text);
    int32_t *tokens = NULL;
    size_t n = 0;
    if (cli_utf8_prefix(text, bytes) != bytes) {
        cli_fail(CLI_BAD_INPUT, "the line is not UTF-8; nothing was said");
        return CLI_OK;
    }
    akv_status status =
        c->num_turns == 0 && c->behind_document
            ? akv_llama_render_question(s->host, AKV_LLAMA_CHAT, s->system, text, bytes, &tokens, &n, &diag)
            : akv_llama_render_turn(s->host, c->num_turns == 0 ? AKV_LLAMA_TURN_FIRST : AKV_LLAMA_TURN_LATER, s->system,
                                    text, bytes, &tokens, &n, &diag);
    if (status == AKV_OK)
        status = akv_llama_decode(s->host, tokens, n, AKV_LLAMA_LOGITS_LAST, &diag);
    akv_llama_free_tokens(tokens);
    cli_progress_end(&s->progress);
    bool failed = status != AKV_OK;
    int code = CLI_OK;
    if (failed && status != AKV_E_CANCELLED)
        cli_fail_diag(status, &diag, NULL);
    if (!failed)
        code = answer(c, &failed);
    if (code != CLI_OK)
        return code;
    if (failed) /* the conversation is as it was before this turn */
        return take_back(c, start);
    if (!add_turn(c, start))
        return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    if (cli_interrupted() == SIGINT)
        cli_interruption_over(); /* it has ended the answer, and must not end the writing of the file */
    autosave(c);
    return CLI_OK;
}

/* ------------------------------------------------------------------------------------------------------------ commands */

static int undo(chat *c)
{
    akv_diag diag = {AKV_OK, ""};
    if (c->num_turns == 0) {
        cli_note("there is nothing to take back");
        return CLI_OK;
    }
    akv_status status = akv_llama_truncate(c->session.host, c->starts[c->num_turns - 1], &diag);
    if (status != AKV_OK) {
        cli_fail_diag(status, &diag, NULL);
        return CLI_OK;
    }
    c->num_turns--;
    cli_note("the last turn is taken back; %" PRIu32 " are left", c->num_turns);
    autosave(c);
    return CLI_OK;
}

static void stats(const chat *c)
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
static int command(chat *c, char *line, bool *quit)
{
    char *word = strtok(line, " \t"), *argument = strtok(NULL, "");
    while (argument != NULL && (*argument == ' ' || *argument == '\t'))
        argument++;
    uint64_t bytes = 0;
    if (strcmp(word, "/quit") == 0 || strcmp(word, "/exit") == 0) {
        *quit = true;
    } else if (strcmp(word, "/undo") == 0) {
        return undo(c);
    } else if (strcmp(word, "/stats") == 0) {
        stats(c);
    } else if (strcmp(word, "/help") == 0) {
        fputs(chat_help, stderr);
    } else if (strcmp(word, "/save") == 0 || strcmp(word, "/load") == 0) {
        if (argument == NULL || *argument == '\0') {
            cli_note("which file? %s FILE.akv", word);
        } else if (word[1] == 's') {
            if (save(c, argument, &bytes) == CLI_OK)
                cli_note("%s: %" PRIu32 " turns, %s", argument, c->num_turns, cli_bytes(bytes));
        } else {
            const akv_document *before = c->session.document;
            const akv_llama_store *store = c->session.store;
            const int code = load(c, argument);
            if (code != CLI_OK) /* what cannot be opened does not cost the conversation */
                return c->session.document == before && c->session.store == store ? CLI_OK : code;
            cli_note("%" PRIu32 " turns, %" PRId32 " tokens", c->num_turns, akv_llama_next_position(c->session.host));
            autosave(c);
        }
    } else {
        cli_note("there is no command %s; /help lists them", cli_printable(word));
    }
    return CLI_OK;
}

static int converse(chat *c)
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
            code = say(c, line[0] == '/' ? line + 1 : line);
        free(line);
        if (cli_interrupted() == SIGINT)
            cli_interruption_over(); /* it ended the answer, not the program */
        else if (cli_interrupted() != 0)
            code = CLI_SIGNAL + cli_interrupted();
    }
    return code;
}

static int write_json(const chat *c)
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

static int parse(int argc, char **argv, chat *c)
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
    chat c;
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
        code = begin(&c);
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
