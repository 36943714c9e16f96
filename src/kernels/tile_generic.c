/* SPDX-License-Identifier: Apache-2.0 */
/* tile_generic.c - tile.h for any machine. */
#include "kernels/tile_body.h"

const akv_tile_kernels akv_tile_generic = {"generic", anchor_row, turn, NULL};
