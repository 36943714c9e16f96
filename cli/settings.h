/* SPDX-License-Identifier: Apache-2.0 */
/* settings.h - the options that `akv ask` and `akv pack` have in common. */
#ifndef AKV_CLI_SETTINGS_H
#define AKV_CLI_SETTINGS_H

#include "session.h"

enum { OPT_PROFILE = 400, OPT_METHOD, OPT_SEED, OPT_SHARES, OPT_RAW, OPT_SYSTEM, OPT_JSON };

#define CLI_SETTINGS_SHORT "m:f:t:qh"
#define CLI_SETTINGS_LONG                                                                                              \
    {"model", required_argument, NULL, 'm'}, {"file", required_argument, NULL, 'f'},                                   \
        {"keep", required_argument, NULL, 'k'}, {"ratio", required_argument, NULL, 'r'},                               \
        {"budget", required_argument, NULL, 'b'}, {"profile", required_argument, NULL, OPT_PROFILE},                   \
        {"method", required_argument, NULL, OPT_METHOD}, {"seed", required_argument, NULL, OPT_SEED},                  \
        {"shares", required_argument, NULL, OPT_SHARES},                                                               \
        {"threads", required_argument, NULL, 't'}, {"raw", no_argument, NULL, OPT_RAW},                                \
        {"system", required_argument, NULL, OPT_SYSTEM}, {"json", required_argument, NULL, OPT_JSON},                  \
        {"quiet", no_argument, NULL, 'q'}, {"help", no_argument, NULL, 'h'}
#define CLI_SETTINGS_HELP                                                                                              \
    "      --keep R         keep ratio: bytes to keep / dense bytes (0.1)\n"                                           \
    "      --ratio X        the same the other way round: X times smaller\n"                                           \
    "      --budget BYTES   the same in bytes, all layers together; K, M, G are powers of 1024\n"                      \
    "      --profile NAME   default; paper: the method exactly as published\n"                                         \
    "      --method NAME    akv; for comparison: snapkv (eviction at the same bytes), exact (every token kept,\n"      \
    "                       through the same path), dense (the engine's own cache; not for pack)\n"                    \
    "      --shares FILE    made by `akv calibrate`: the same bytes, split unevenly over the layers\n"                 \
    "      --seed S         of the random anchors, and of --temp (0)\n"                                                \
    "  -t, --threads N      (all processors)\n"                                                                        \
    "      --raw            no chat template: the model continues document and question as plain text\n"               \
    "      --system TEXT    system message of the chat\n"                                                              \
    "      --json FILE      write the report for programs\n"                                                           \
    "  -q, --quiet          no progress, no report\n"                                                                  \
    "  -h, --help           this text\n"

/* One option; prints what is wrong and returns false. */
bool cli_settings_option(cli_settings *settings, int option, const char *value);
/* Whether the option says how a document is read or compressed. */
bool cli_settings_is_document(int option);
void cli_settings_free(cli_settings *settings);

#endif
