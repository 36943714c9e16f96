/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c - which token comes next: the likeliest, or a seeded draw from softmax(logits / temperature). */
#include "sample.h"
#include "random.h"

#include <math.h>

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
    double left = cli_random_unit(&sampler->state) * sum;
    for (uint32_t i = 0; i < n; i++) {
        left -= exp(((double)logits[i] - top) * scale);
        if (left < 0.0)
            return i;
    }
    return best; /* rounding left a hair of the sum */
}
