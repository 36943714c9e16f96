/* SPDX-License-Identifier: Apache-2.0 */
/* model_shape.h - the one question that `akv plan` has for the llama.cpp host. */
#ifndef AKV_CLI_MODEL_SHAPE_H
#define AKV_CLI_MODEL_SHAPE_H

#include <anchorkv/anchorkv.h>

#include <stdint.h>

/* Heads, dimensions and number of layers of a GGUF model. Returns an exit code and prints the reason. */
int cli_model_shape(const char *model_path, akv_shape *shape, uint32_t *num_layers);

#endif
