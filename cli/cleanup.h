/* SPDX-License-Identifier: Apache-2.0 */
/* cleanup.h - between files.c and the signal handler in common.c. */
#ifndef AKV_CLI_CLEANUP_H
#define AKV_CLI_CLEANUP_H

#include <stdbool.h>

/* The file to remove if the program has to end at once; NULL = none. False when the path is too long to remember. */
bool cli_doom_path(const char *path);

#endif
