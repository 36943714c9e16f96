/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_attend.c - the case table of akv_attend, run by the GPU against the same double reference, and what only the
 * GPU's interface has: batches, tails whose length is read on the device, graphs, refusals.
 */
#include "device.h"

#include "cuda/pack.h"
#include "cuda/pack_paper.h"

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
        if (akv_pack_covers(p->segments[i]) || akv_paper_covers(p->segments[i]))
            return FP16_FACTOR;
    return 1;
}
#define ATTEND_TOLERANCE(params, row, plain) fmin((row)->tol_out * 1024, tolerance_factor(params) * (PLAIN_FACTOR * (plain) + 4 * REF_U))
#define ATTEND_LOGIT_TOLERANCE(params, row)                                                                            \
    ((row)->tol_logit * (tolerance_factor(params) > 1 ? LOGIT_SHARE / ref_gamma((params)->head_dim_k) : 1))
#define ATTEND_MAX_HEAD_DIM AKV_CUDA_MAX_HEAD_DIM
#define ATTEND_TABLE_ONLY
#define akv_attend gpu_attend
#define akv_attend_workspace_bytes gpu_attend_workspace_bytes
#include "../contract/test_attend.c"
#undef akv_attend
#undef akv_attend_workspace_bytes

/* Rotary embeddings of long-context models, half of whose planes hardly turn: other kernels than those of base 10000. */
static void slow_planes(void)
{
    static const uint32_t dims[] = {64, 96, 128, 192, 256}, groups[] = {1, 4, 5, 8, 16};
    static const uint64_t lengths[] = {40, 1100, 2049, 5000, 33000};
    cases_rope_base = 5e5;
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t j = 0; j < 5; j++) {
            char name[64];
            snprintf(name, sizeof name, "slow planes dk %u G %u", dims[i], groups[j]);
            for (int kind = 0; kind < 2; kind++)
                CASE(.name = name, .G = groups[j], .H = 1 + j % 2, .dk = dims[i], .dv = dims[i], .rotary = dims[i],
                     .segment_tokens = {lengths[(i + j) % 5] < 33000 || j == 1 ? lengths[(i + j) % 5] : 700},
                     .segment_kind = {"cl"[kind]}, .anchors = 12 + 140 * (j % 3), .density = 0.2 + 0.2 * j, .tail = j % 2 ? 20 : 0,
                     .softcap = j == 3 ? 20 : 0, .sinks = j == 4, .first_position = j == 2 ? 100000 : 0, .seed = i * 5 + j);
        }
    cases_rope_base = 10000;
}

/* Many anchors: more than shared memory takes beside the rest, and about as many as a plan takes at all. */
static void many_anchors(void)
{
    cases_rope_base = 5e5;
    for (int kind = 0; kind < 2; kind++)
        for (uint32_t anchors = 700; anchors <= 2100; anchors += 1400)
            CASE(.name = "many anchors", .G = 4, .H = 1, .dk = 128, .dv = 128, .rotary = 128, .segment_tokens = {3000},
                 .segment_kind = {"cl"[kind]}, .anchors = anchors, .density = 0.3, .seed = anchors);
    cases_rope_base = 10000;
}

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
    TEST(slow_planes);
    TEST(many_anchors);
    printf("largest error of an output coordinate: %.3f of its tolerance\n", worst_ratio);
    return TEST_DONE();
}
