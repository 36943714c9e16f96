/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_attend.c - the case table of akv_attend, run by the GPU against the same double reference, and what only the
 * GPU's interface has: batches, tails whose length is read on the device, graphs, refusals.
 */
#include "device.h"

#include "cuda/pack.h"

/*
 * Everything runs in fp32 but segments in the private form, whose operands are fp16 (11 bits, three roundings) and whose slow
 * planes turn to first order within a window. Such a case may be off by FP16_FACTOR times what fp32 loops may be off by
 * (2^13 coarser roundings, fewer of them), and a logit by LOGIT_SHARE of the norms' product.
 */
#define FP16_FACTOR 1024
#define LOGIT_SHARE 1e-3
static double tolerance_factor(const akv_attend_params *p)
{
    for (uint32_t i = 0; i < p->num_segments; i++)
        if (akv_pack_covers(p->segments[i]))
            return FP16_FACTOR;
    return 1;
}
#define ATTEND_TOLERANCE(params, row, plain) fmin((row)->tol_out * 1024, tolerance_factor(params) * (PLAIN_FACTOR * (plain) + 4 * REF_U))
#define ATTEND_LOGIT_TOLERANCE(params, row)                                                                            \
    ((row)->tol_logit * (tolerance_factor(params) > 1 ? LOGIT_SHARE / ref_gamma((params)->head_dim_k) : 1))
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
