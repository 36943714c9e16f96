/* SPDX-License-Identifier: Apache-2.0 */
/* quad_generic.c - the quad kernels for any machine. */
#define AKV_ISA(name) name##_generic
#define AKV_ISA_NAME "generic"
#include "kernels/quad_body.h"
