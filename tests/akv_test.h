/* SPDX-License-Identifier: Apache-2.0 */
/*
 * akv_test.h - the test harness: checks that count, named cases, one closing line.
 *
 *   static void sums(void) { CHECK(1 + 1 == 2); CHECK_NEAR(0.1 + 0.2, 0.3, 1e-15, "sum of %d terms", 2); }
 *   int main(int argc, char **argv) { TEST_INIT(argc, argv); TEST(sums); return TEST_DONE(); }
 *
 * A case passes when no check in it fails. `program NAME...` runs only the cases whose names contain one of the words.
 *
 * AKV_TEST_THIN=N in the environment lets long loops (random cases, damaged bytes) do an N-th of their rounds, for emulators
 * and valgrind; each program says so in its first line, and make check runs without it.
 */
#ifndef AKV_TEST_H
#define AKV_TEST_H

#include "anchorkv/anchorkv.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_state {
    int argc;
    char **argv;
    const char *name;
    unsigned long checks, failures; /* of the case that runs */
    unsigned long passed, failed;   /* cases */
} test_state;

extern test_state test_;

/* Counts a check; prints the first 20 failures of a case. Returns ok. */
int test_check(int ok, const char *file, int line, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 4, 5)))
#endif
    ;
void test_init(int argc, char **argv);
unsigned test_thin(void); /* N of AKV_TEST_THIN, else 1 */
void test_run(const char *name, void (*fn)(void));
int test_done(void);

#define CHECK(cond) test_check((cond) ? 1 : 0, __FILE__, __LINE__, "%s", #cond)
#define CHECK_MSG(cond, ...) test_check((cond) ? 1 : 0, __FILE__, __LINE__, __VA_ARGS__)
/* NaN fails, since it is not <= anything. Formats only on failure: there are millions of checks. */
#define CHECK_NEAR(a, b, tol, ...)                                                                                     \
    do {                                                                                                               \
        double a_ = (a), b_ = (b), tol_ = (tol);                                                                       \
        if (fabs(a_ - b_) <= tol_ || a_ == b_) {                                                                       \
            test_.checks++;                                                                                            \
        } else {                                                                                                       \
            char what_[160];                                                                                           \
            snprintf(what_, sizeof what_, __VA_ARGS__);                                                                \
            test_check(0, __FILE__, __LINE__, "%s: %.9g against %.9g, off by %.3g, allowed %.3g", what_, a_, b_,       \
                       fabs(a_ - b_), tol_);                                                                           \
        }                                                                                                              \
    } while (0)
#define CHECK_STATUS(expr, want, diag)                                                                                 \
    do {                                                                                                               \
        akv_status got_ = (expr), want_ = (want);                                                                      \
        test_check(got_ == want_, __FILE__, __LINE__, "%s gives \"%s\" instead of \"%s\"; message: %s", #expr,         \
                   akv_status_str(got_), akv_status_str(want_), (diag)->message);                                      \
    } while (0)

#define TEST_INIT(argc, argv) test_init(argc, argv)
#define TEST(fn) test_run(#fn, fn)
#define TEST_DONE() test_done()

#endif
