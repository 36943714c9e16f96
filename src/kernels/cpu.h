/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h - what this machine can run, and the cap that tests set. */
#ifndef AKV_CPU_H
#define AKV_CPU_H

typedef enum akv_cpu_level {
    AKV_CPU_GENERIC = 0,
    AKV_CPU_AVX2 = 1,        /* with FMA, F16C, BMI 1 and 2 */
    AKV_CPU_AVX512 = 2,      /* F, BW, DQ, VL */
    AKV_CPU_AVX512_VNNI = 3, /* with VBMI, VBMI2, VNNI too */
    AKV_CPU_LEVELS = 4
} akv_cpu_level;

/* The machine's level. */
akv_cpu_level akv_cpu_machine(void);

/*
 * The machine's level, or less when the environment variable AKV_CPU says so: generic, avx2, avx512, avx512vnni. Anything else in
 * it is ignored. Read once; results differ by rounding only.
 */
akv_cpu_level akv_cpu(void);

#endif
