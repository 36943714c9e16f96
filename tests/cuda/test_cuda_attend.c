/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_attend.c - the case table of akv_attend, run by the GPU against the same double reference, and what only the
 * GPU's interface has: batches, tails whose length is read on the device, graphs, refusals.
 */
#include "device.h"

/*
 * A segment in the private form multiplies in fp16 with operands rounded there (docs/numerics.md, "GPU"): a logit may be
 * off by LOGIT_ERROR of the norms' product, an output by the same share of the values' size. Everything else is fp32.
 */
#define ATTEND_TOLERANCE(params, row, plain) fmin((row)->tol_out, PLAIN_FACTOR * (plain) + 4 * REF_U)
#define ATTEND_LOGIT_TOLERANCE(params, row) ((row)->tol_logit)
#define ATTEND_TABLE_ONLY
#define akv_attend gpu_attend
#define akv_attend_workspace_bytes gpu_attend_workspace_bytes
#include "../contract/test_attend.c"
#undef akv_attend
#undef akv_attend_workspace_bytes

int main(int argc, char **argv)
{
    need_device();
    TEST_INIT(argc, argv);
    TEST(head_dims);
    TEST(groups_and_heads);
    TEST(lengths);
    TEST(many_queries);
    TEST(masks_and_sinks);
    TEST(rope_variants);
    TEST(ladder);
    TEST(dtypes_and_layouts);
    TEST(random_mixtures);
    TEST(merging);
    TEST(large_logits);
    printf("largest error of an output coordinate: %.3f of its tolerance\n", worst_ratio);
    return TEST_DONE();
}
