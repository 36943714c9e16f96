/* SPDX-License-Identifier: Apache-2.0 */
/*
 * maths.h - exponentials, logarithms and phases that are the same bits everywhere. C libraries differ in the last bit of
 * these functions, even one library from processor to processor, and a last bit can decide which token is stored how: with
 * these, the same input gives the same segment on every machine. Only +, -, *, / and square roots, which IEEE 754 rounds
 * exactly; nothing may be contracted (see -ffp-contract in CMakeLists.txt). Errors: tests/unit/test_maths.c.
 */
#ifndef AKV_MATHS_H
#define AKV_MATHS_H

#include "core/base.h"

/* Relative error below 2^-51; 0 below -745.2, infinity above 709.7; NaN stays NaN. */
double akv_exp(double x);
double akv_exp2(double x); /* the same in powers of two, -1074 to 1024 */

/* Within half a unit in the last place and 2^-30 of one. */
float akv_expf(float x);

/* x >= 0 or NaN. Absolute error below 2^-51 (1 + abs(result)). */
double akv_log2(double x);

/* Relative error below 2^-50 and, rounded to float, below 1.01 halves of a unit in its last place. */
double akv_tanh(double x);
float akv_tanhf(float x);

/* Absolute error below 2^-52 up to 2^31 rad, which positions of 32 bits reach; beyond, the C library's. */
void akv_sincos(double x, double *sine, double *cosine);

/* sqrt(x x + y y), where neither square nor sum overflows or vanishes; otherwise by scaling. Relative error below 2^-51. */
double akv_hypot(double x, double y);

#endif
