/* SPDX-License-Identifier: Apache-2.0 */
/* eval_options.h - the options of `akv eval`. */
#ifndef AKV_CLI_EVAL_OPTIONS_H
#define AKV_CLI_EVAL_OPTIONS_H

#include "eval.h"
#include "settings.h"

extern const char eval_help[];

/* Exit code; the reason was printed. -1: the help text is wanted. *options can be freed whatever happens. */
int eval_parse(int argc, char **argv, eval_options *options);

#endif
