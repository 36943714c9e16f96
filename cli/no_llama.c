/* SPDX-License-Identifier: Apache-2.0 */
/* no_llama.c - stands in for everything that needs a model when akv is built without libllama. */
#include "cli.h"
#include "model_shape.h"

int cli_model_shape(const char *model_path, akv_shape *shape, uint32_t *num_layers)
{
    (void)shape, (void)num_layers;
    return cli_fail(CLI_UNSUPPORTED,
                    "this akv was built without libllama and cannot read %s; give the shape with --layers, "
                    "--kv-heads and --head-dim",
                    model_path);
}

static int run(int argc, char **argv)
{
    (void)argc;
    return cli_fail(CLI_UNSUPPORTED, "this akv was built without libllama, which `akv %s` needs", argv[0]);
}

const cli_command cli_cmd_ask = {"ask", "answer questions about a document (not in this build: no libllama)", run,
                                 "akv ask is not in this build: it needs libllama\n"};
const cli_command cli_cmd_chat = {"chat", "converse with a model (not in this build: no libllama)", run,
                                  "akv chat is not in this build: it needs libllama\n"};
const cli_command cli_cmd_pack = {"pack", "compress a document into a .akv file (not in this build: no libllama)", run,
                                  "akv pack is not in this build: it needs libllama\n"};
const cli_command cli_cmd_eval = {"eval", "measure what compression costs (not in this build: no libllama)", run,
                                  "akv eval is not in this build: it needs libllama\n"};
const cli_command cli_cmd_calibrate = {"calibrate",
                                       "measure how layers share a budget (not in this build: no libllama)", run,
                                       "akv calibrate is not in this build: it needs libllama\n"};
const cli_command cli_cmd_bench = {"bench", "measure attention against ggml's (not in this build: no libllama)", run,
                                   "akv bench is not in this build: it needs libllama\n"};
