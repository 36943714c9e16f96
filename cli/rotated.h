/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rotated.h - a peer of `akv eval`: every token but the last ones in 2, 3 or 4 bits a coordinate after a random
 * rotation, as the TurboQuant family does it. Not part of the library; it only has to be fair.
 */
#ifndef AKV_CLI_ROTATED_H
#define AKV_CLI_ROTATED_H

#include <akv_llama.h>

enum { CLI_ROTATED_WINDOW = 128 }; /* last tokens, kept exactly */

typedef struct cli_rotated {
    uint32_t bits;  /* 2, 3 or 4 */
    uint64_t seed;  /* of the sign flips */
    uint64_t bytes; /* added up over the layers: codes, 16-bit scales, the exact window; the rotation is a seed */
} cli_rotated;

/* Bytes of one layer's keys and values. */
uint64_t cli_rotated_bytes(uint64_t tokens, uint32_t kv_heads, uint32_t dim_k, uint32_t dim_v, uint32_t bits);

/*
 * An akv_llama_segment_fn, opaque a cli_rotated: what reading the quantised cache back would give, as a dense f32
 * segment.
 *
 * Post-RoPE vectors; a signed orthonormal Hadamard rotation in blocks of the largest power of two that divides the head
 * dimension; Lloyd-Max levels of a unit Gaussian; one 16-bit scale a vector, the least-squares one for the chosen codes
 * after three alternations, which is kinder to this peer than the vector's norm.
 */
akv_status cli_rotated_make(void *opaque, const akv_layer *layer, const akv_config *config, akv_segment **out,
                            akv_diag *diag);

/* One vector, in place; for tests. `signs` holds dim numbers of +-1. */
void cli_rotated_vector(float *x, uint32_t dim, uint32_t bits, const float *signs, float *scratch);

#endif
