/* SPDX-License-Identifier: Apache-2.0 */
/* coder_generic.c - coder.h for any machine. */
#define AKV_ISA(name) name##_generic
#define AKV_ISA_NAME "generic"
#include "kernels/coder_body.h"
