/* SPDX-License-Identifier: Apache-2.0 */
/* chat_line.h - one line from the user of `akv chat`. */
#ifndef AKV_CLI_CHAT_LINE_H
#define AKV_CLI_CHAT_LINE_H

#include "cli.h"

/* True on a terminal: lines are edited and there is a prompt. */
bool chat_line_is_interactive(void);

/*
 * The next line without its end -> *line, from malloc; NULL at the end of input. Returns an exit code: CLI_OK, CLI_IO,
 * CLI_NO_MEMORY. A signal at the prompt gives an empty line; cli_interrupted tells.
 */
int chat_line_read(char **line);

#endif
