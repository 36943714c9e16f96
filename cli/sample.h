/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h - which token comes next. */
#ifndef AKV_CLI_SAMPLE_H
#define AKV_CLI_SAMPLE_H

#include <stdint.h>

typedef struct cli_sampler {
    double temperature; /* 0 = always the likeliest token */
    uint64_t state;     /* of the random numbers; start with the seed */
} cli_sampler;

/* -1 when a logit is NaN or no logit is finite. At temperature 0 the lowest index wins a tie. */
int64_t cli_sample(cli_sampler *sampler, const float *logits, uint32_t n);

#endif
