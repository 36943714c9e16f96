/* SPDX-License-Identifier: Apache-2.0 */
/* random.h - repeatable random numbers; the state is the seed. */
#ifndef AKV_CLI_RANDOM_H
#define AKV_CLI_RANDOM_H

#include <stdint.h>

/* SplitMix64. */
static inline uint64_t cli_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* In [0, 1). */
static inline double cli_random_unit(uint64_t *state)
{
    return (double)(cli_random(state) >> 11) * 0x1p-53;
}

/* In [0, n), n >= 1; n is small next to 2^64, so the bias of the remainder does not matter. */
static inline uint64_t cli_random_below(uint64_t *state, uint64_t n)
{
    return cli_random(state) % n;
}

#endif
