/* SPDX-License-Identifier: Apache-2.0 */
/* no_serve.c - stands in for `akv serve` when akv is built without libllama or libmicrohttpd. */
#include "cli.h"

#ifdef AKV_HAVE_LLAMA
#    define MISSING "libmicrohttpd"
#else
#    define MISSING "libllama"
#endif

static int run(int argc, char **argv)
{
    (void)argc, (void)argv;
    return cli_fail(CLI_UNSUPPORTED, "this akv was built without " MISSING ", which `akv serve` needs");
}

const cli_command cli_cmd_serve = {"serve", "answer over HTTP (not in this build: no " MISSING ")", run,
                                   "akv serve is not in this build: it needs " MISSING "\n"};
