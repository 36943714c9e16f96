/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.c - the choice of kernels at run time. */
#include "kernels/cpu.h"

#include "kernels/coder.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"
#include "kernels/quad.h"
#include "kernels/tile.h"

#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

/* clang 14 has no name for it in __builtin_cpu_supports. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int has_avx_vnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#ifdef __linux__
#include <sys/auxv.h>

static int has_dot_products(void)
{
    return (getauxval(AT_HWCAP) & 1ul << 20) != 0; /* HWCAP_ASIMDDP */
}
#else
static int has_dot_products(void) /* asked of the compiler where there is nobody else to ask */
{
#ifdef __ARM_FEATURE_DOTPROD
    return 1;
#else
    return 0;
#endif
}
#endif
#endif

akv_cpu_level akv_cpu_machine(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
        !__builtin_cpu_supports("bmi2") || !has_f16c())
        return AKV_CPU_GENERIC;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return has_avx_vnni() ? AKV_CPU_AVX_VNNI : AKV_CPU_AVX2;
    if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vbmi2") || !__builtin_cpu_supports("avx512vnni"))
        return AKV_CPU_AVX512;
    return AKV_CPU_AVX512_VNNI;
#elif defined(__aarch64__) && defined(__ARM_NEON)
    return has_dot_products() ? AKV_CPU_NEON_DOT : AKV_CPU_NEON;
#else
    return AKV_CPU_GENERIC;
#endif
}

/* AVX-VNNI where a level implies it and the machine of a higher one may lack it. Asked once: in a virtual machine that takes microseconds. */
static bool lacks(akv_cpu_level level)
{
#if defined(__x86_64__) && defined(__GNUC__)
    static atomic_int known = -1;
    int there = atomic_load_explicit(&known, memory_order_relaxed);
    if (level != AKV_CPU_AVX_VNNI)
        return false;
    if (there < 0) {
        there = has_avx_vnni();
        atomic_store_explicit(&known, there, memory_order_relaxed);
    }
    return !there;
#else
    (void)level;
    return false;
#endif
}

bool akv_cpu_runs(akv_cpu_level level)
{
    return level <= akv_cpu_machine() && !lacks(level);
}

static int capped(void)
{
#ifdef __aarch64__
    static const char *const names[] = {"generic", "neon", "neondot"};
#else
    static const char *const names[] = {"generic", "avx2", "avxvnni", "avx512", "avx512vnni"};
#endif
    const int machine = (int)akv_cpu_machine();
    const char *wish = getenv("AKV_CPU");
    for (int level = 0; wish != NULL && level < machine; level++)
        if (strcmp(wish, names[level]) == 0)
            return level;
    return machine;
}

akv_cpu_level akv_cpu(void)
{
    static atomic_int known = -1; /* every thread that finds it unknown stores the same */
    int level = atomic_load_explicit(&known, memory_order_acquire);
    if (level < 0) {
        level = capped();
        atomic_store_explicit(&known, level, memory_order_release);
    }
    return (akv_cpu_level)level;
}

#define TAKE(table, level) best = cpu >= level && !lacks(level) ? &table : best;

const akv_kernels *akv_kernels_best(void)
{
    const akv_cpu_level cpu = akv_cpu();
    const akv_kernels *best = NULL;
#define AKV_KERNELS(isa, level) TAKE(akv_kernels_##isa, level)
#include "kernels/kernels.def"
    return best;
}

const akv_quad_kernels *akv_quad_best(void)
{
    const akv_cpu_level cpu = akv_cpu();
    const akv_quad_kernels *best = NULL;
#define AKV_QUADS(isa, level) TAKE(akv_quad_##isa, level)
#include "kernels/kernels.def"
    return best;
}

const akv_matrix_kernels *akv_matrix_best(void)
{
    const akv_cpu_level cpu = akv_cpu();
    const akv_matrix_kernels *best = NULL;
#define AKV_MATRICES(isa, level) TAKE(akv_matrix_##isa, level)
#include "kernels/kernels.def"
    return best;
}

const akv_coder_kernels *akv_coder_best(void)
{
    const akv_cpu_level cpu = akv_cpu();
    const akv_coder_kernels *best = NULL;
#define AKV_CODERS(isa, level) TAKE(akv_coder_##isa, level)
#include "kernels/kernels.def"
    return best;
}

const akv_tile_kernels *akv_tile_best(void)
{
    const akv_cpu_level cpu = akv_cpu();
    const akv_tile_kernels *best = NULL;
#define AKV_TILES(isa, level) TAKE(akv_tile_##isa, level)
#include "kernels/kernels.def"
    return best;
}
