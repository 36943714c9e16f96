/* SPDX-License-Identifier: Apache-2.0 */
/* chat_line.c - lines for `akv chat`: with libedit on a terminal, plain otherwise. */
#include "chat_line.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef AKV_HAVE_EDIT
#    include <editline/readline.h>
#endif

static const char prompt[] = "> ";

bool chat_line_is_interactive(void)
{
    return isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
}

static int read_plain(char **line)
{
    size_t capacity = 0;
    errno = 0;
    ssize_t got = getline(line, &capacity, stdin);
    if (got >= 0) {
        while (got > 0 && ((*line)[got - 1] == '\n' || (*line)[got - 1] == '\r'))
            (*line)[--got] = '\0';
        if (strlen(*line) != (size_t)got) /* a NUL inside: what follows must not get lost unseen */
            return cli_fail(CLI_BAD_INPUT, "the input holds a NUL byte; it must be UTF-8 text");
        return CLI_OK;
    }
    const int error = errno;
    free(*line);
    *line = NULL;
    if (cli_interrupted()) {
        clearerr(stdin);
        *line = calloc(1, 1);
        return *line != NULL ? CLI_OK : cli_fail(CLI_NO_MEMORY, "no memory");
    }
    if (feof(stdin) || error == 0)
        return CLI_OK;
    return cli_fail(error == ENOMEM ? CLI_NO_MEMORY : CLI_IO, "cannot read standard input: %s", strerror(error));
}

int chat_line_read(char **line)
{
    *line = NULL;
    if (!chat_line_is_interactive())
        return read_plain(line);
#ifdef AKV_HAVE_EDIT
    static bool ready; /* libedit drops every character that the locale does not know; lines are UTF-8 whatever it is */
    if (!ready && (setlocale(LC_CTYPE, "") == NULL || MB_CUR_MAX == 1))
        setlocale(LC_CTYPE, "C.UTF-8");
    ready = true;
    *line = readline(prompt);
    if (*line != NULL && **line != '\0')
        add_history(*line);
    if (*line == NULL && cli_interrupted())
        *line = calloc(1, 1);
    return CLI_OK;
#else
    fputs(prompt, stdout);
    fflush(stdout);
    return read_plain(line);
#endif
}
