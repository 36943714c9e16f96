/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h - what this machine can run, and the cap that tests set. */
#ifndef AKV_CPU_H
#define AKV_CPU_H

#include <stdbool.h>

/* Levels of x86-64 and of 64-bit ARM, each architecture's counted from 1. */
typedef enum akv_cpu_level {
    AKV_CPU_GENERIC = 0,
    AKV_CPU_AVX2 = 1,        /* with FMA, F16C, BMI 1 and 2 */
    AKV_CPU_AVX_VNNI = 2,    /* with AVX-VNNI too, which machines of the next level may lack: akv_cpu_runs */
    AKV_CPU_AVX512 = 3,      /* F, BW, DQ, VL */
    AKV_CPU_AVX512_VNNI = 4, /* with VBMI, VBMI2, VNNI too */
    AKV_CPU_NEON = 1,        /* every 64-bit ARM */
    AKV_CPU_NEON_DOT = 2     /* with dot products of bytes (ARMv8.2 dotprod) */
} akv_cpu_level;

/* clang below 16 has the intrinsics of dotprod only in files compiled for it as a whole. */
#if defined(__aarch64__) && defined(__ARM_NEON) && \
    (defined(__ARM_FEATURE_DOTPROD) || (defined(__GNUC__) && !defined(__clang__)))
#  define AKV_HAVE_NEON_DOT 1
#else
#  define AKV_HAVE_NEON_DOT 0
#endif

/* Older compilers do not know AVX-VNNI. */
#if defined(__x86_64__) && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11))
#  define AKV_HAVE_AVX_VNNI 1
#else
#  define AKV_HAVE_AVX_VNNI 0
#endif

/* The machine's level. */
akv_cpu_level akv_cpu_machine(void);

/* Whether this machine runs what asks for that level. */
bool akv_cpu_runs(akv_cpu_level level);

/*
 * The machine's level, or less when the environment variable AKV_CPU says so: generic, avx2, avxvnni, avx512, avx512vnni; on
 * ARM generic, neon, neondot. Anything else in it is ignored. Read once; results differ by rounding only.
 */
akv_cpu_level akv_cpu(void);

#endif
