/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c - which token comes next: the likeliest, or a seeded draw from softmax(logits / temperature). */
#include "sample.h"

#include <math.h>

/* SplitMix64, as a number in [0, 1). */
static double uniform(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

int64_t cli_sample(cli_sampler *sampler, const float *logits, uint32_t n)
{
    int64_t best = -1;
    for (uint32_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return -1;
        if (logits[i] != -INFINITY && (best < 0 || logits[i] > logits[best]))
            best = i;
    }
    if (best < 0 || sampler->temperature <= 0.0)
        return best;

    const double top = logits[best], scale = 1.0 / sampler->temperature;
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(((double)logits[i] - top) * scale);
    double left = uniform(&sampler->state) * sum;
    for (uint32_t i = 0; i < n; i++) {
        left -= exp(((double)logits[i] - top) * scale);
        if (left < 0.0)
            return i;
    }
    return best; /* rounding left a hair of the sum */
}
