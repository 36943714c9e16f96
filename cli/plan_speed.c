/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_speed.c - a table of measurements (docs/speed.md, "When it loses"), looked up by kernels, head_dim, query rows and
 * length: the first shape with as many rows, the longest that is no longer. Of two measurements the worse one stands there.
 */
#include "plan_speed.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum kernel_set { PLAIN, AVX2, VNNI, NEON, GAPS, SLOW, NUM_SETS } kernel_set;

static const char *const set_names[NUM_SETS] = {"plain C", "AVX2", "AVX-512 VNNI", "NEON", "AVX-512 VNNI, positions with gaps",
                                                "token by token"};

typedef struct measured {
    kernel_set set;
    uint32_t head_dim, rows, tokens; /* class, at most, at least; rows = query heads of a group x query tokens */
    float times_dense, times_ggml;
} measured;

/* Rows of one set and head_dim rise; within equal rows tokens fall. Measured at 8192 tokens, which stands for 4096 and more,
 * and at 1024; where one entry stands for both lengths it is the worse of them. Gaps: one token kept of nine, the worst but
 * for one of twelve and fewer. ggml is built for the same instruction set, but for plain C, where it is the one with
 * AVX-512. */
static const measured table[] = {
    {VNNI, 64, 1, 4096, 1.14f, 3.57f}, {VNNI, 64, 1, 1024, 0.38f, 2.81f}, {VNNI, 64, 2, 4096, 1.18f, 7.17f},
    {VNNI, 64, 2, 1024, 0.50f, 4.04f}, {VNNI, 64, 4, 4096, 1.49f, 11.70f}, {VNNI, 64, 4, 1024, 0.92f, 9.92f},
    {VNNI, 64, 8, 4096, 1.08f, 13.30f}, {VNNI, 64, 8, 1024, 1.29f, 11.37f}, {VNNI, 64, 32, 1024, 0.94f, 15.75f},
    {VNNI, 64, 128, 1024, 0.62f, 16.31f}, {VNNI, 64, 512, 1024, 1.12f, 2.40f}, {VNNI, 128, 1, 4096, 1.65f, 1.48f},
    {VNNI, 128, 1, 1024, 1.40f, 1.12f}, {VNNI, 128, 2, 4096, 2.74f, 3.87f}, {VNNI, 128, 2, 1024, 1.43f, 1.92f},
    {VNNI, 128, 4, 4096, 1.86f, 3.92f}, {VNNI, 128, 4, 1024, 1.49f, 2.18f}, {VNNI, 128, 8, 4096, 1.67f, 4.11f},
    {VNNI, 128, 8, 1024, 0.97f, 2.21f}, {VNNI, 128, 32, 1024, 1.26f, 4.41f}, {VNNI, 128, 128, 1024, 0.70f, 3.79f},
    {VNNI, 128, 512, 1024, 1.06f, 1.83f}, {AVX2, 64, 1, 4096, 0.83f, 1.31f}, {AVX2, 64, 1, 1024, 0.37f, 0.70f},
    {AVX2, 64, 2, 4096, 1.05f, 1.77f}, {AVX2, 64, 2, 1024, 0.61f, 1.16f}, {AVX2, 64, 4, 4096, 0.91f, 2.40f},
    {AVX2, 64, 4, 1024, 1.01f, 3.10f}, {AVX2, 64, 8, 1024, 1.02f, 3.15f}, {AVX2, 64, 32, 1024, 0.89f, 2.98f},
    {AVX2, 64, 128, 1024, 0.67f, 2.94f}, {AVX2, 64, 512, 1024, 0.86f, 1.31f}, {AVX2, 128, 1, 4096, 1.18f, 1.45f},
    {AVX2, 128, 1, 1024, 0.83f, 0.81f}, {AVX2, 128, 2, 4096, 1.23f, 2.45f}, {AVX2, 128, 2, 1024, 1.20f, 1.83f},
    {AVX2, 128, 4, 4096, 1.44f, 3.79f}, {AVX2, 128, 4, 1024, 1.20f, 2.54f}, {AVX2, 128, 8, 4096, 1.20f, 3.46f},
    {AVX2, 128, 8, 1024, 1.00f, 2.54f}, {AVX2, 128, 32, 1024, 0.96f, 2.59f}, {AVX2, 128, 128, 1024, 0.71f, 2.61f},
    {AVX2, 128, 512, 1024, 0.79f, 1.18f}, {PLAIN, 64, 1, 1024, 0.34f, 0.19f}, {PLAIN, 64, 2, 1024, 0.39f, 0.44f},
    {PLAIN, 64, 8, 1024, 0.39f, 0.70f}, {PLAIN, 128, 1, 1024, 0.34f, 0.09f}, {PLAIN, 128, 2, 1024, 0.40f, 0.14f},
    {PLAIN, 128, 8, 1024, 0.37f, 0.11f}, {GAPS, 128, 4, 1024, 0.56f, 1.28f}, {SLOW, 128, 4, 1024, 0.30f, 0.39f},
};

/* As src/kernels/cpu.c chooses: the kernels of the default profile need VNNI and VBMI for their AVX-512 form. */
static kernel_set machine(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    static const char *const names[] = {"generic", "avx2", "avxvnni", "avx512"};
    static const kernel_set sets[] = {PLAIN, AVX2, AVX2, AVX2};
    const char *cap = getenv("AKV_CPU");
    kernel_set set = PLAIN;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        set = AVX2;
    if (set == AVX2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni"))
        set = VNNI;
    for (size_t i = 0; cap != NULL && i < sizeof names / sizeof names[0]; i++)
        if (strcmp(cap, names[i]) == 0 && sets[i] < set)
            set = sets[i];
    return set;
#elif defined(__aarch64__)
    return NEON; /* no figure in the table: no such machine was there to measure */
#else
    return PLAIN;
#endif
}

plan_speed plan_speed_of(const akv_shape *shape, const akv_plan_info *info, akv_profile profile, uint64_t queries, bool gaps)
{
    const uint32_t dim = shape->head_dim_k > shape->head_dim_v ? shape->head_dim_k : shape->head_dim_v;
    const uint64_t rows = (uint64_t)shape->gqa_group * queries;
    const kernel_set here = machine();
    const kernel_set set = here == NEON ? NEON : dim > 512 ? SLOW : gaps && here == VNNI ? GAPS : here;
    plan_speed speed = {set_names[set], 0, 0, NULL};
    if (info->kind != AKV_SEGMENT_COMPRESSED)
        return speed;
    if (here == NEON)
        speed.why = "ARM was not measured";
    else if (dim > 512)
        speed.why = "head_dim above 512 has no fast kernels";
    else if (gaps && here == VNNI)
        speed.why = "positions with gaps take up to three times as long, with one token of twelve or fewer ten times";
    else if (gaps) {
        speed.why = "positions with gaps were measured on AVX-512 VNNI only";
        return speed;
    }
    if (profile != AKV_PROFILE_DEFAULT || shape->num_tokens < 1024) {
        speed.why = profile != AKV_PROFILE_DEFAULT ? "only profile default was measured" : "less than 1024 tokens were not measured";
        return speed;
    }
    const measured *best = NULL;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const measured *m = &table[i];
        const uint32_t class = dim <= 96 ? 64 : 128;
        if (m->set != set || (set < GAPS && m->head_dim != class) || shape->num_tokens < m->tokens)
            continue;
        /* the first that has as many rows; beyond the last, the last */
        if (best == NULL || (best->rows < rows && m->rows > best->rows))
            best = m;
    }
    if (best != NULL) {
        speed.times_dense = best->times_dense;
        speed.times_ggml = best->times_ggml;
    }
    return speed;
}

const char *plan_speed_verdict(const plan_speed *s, const akv_plan_info *info)
{
    if (info->kind != AKV_SEGMENT_COMPRESSED)
        return "dense";
    if (s->times_dense == 0)
        return "unmeasured";
    const double worse = s->times_dense < s->times_ggml ? s->times_dense : s->times_ggml;
    return worse < 0.95 ? "slower" : worse <= 1.05 ? "even" : "faster";
}
