/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - the few checks that the format tests need. A failed check prints where and what, and the program ends
 * with 1. */
#ifndef AKV_TEST_CHECK_H
#define AKV_TEST_CHECK_H

#include "anchorkv/anchorkv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check_failures;
static int check_count;

#define CHECK(condition)                                                    \
    do {                                                                    \
        check_count++;                                                      \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            check_failures++;                                               \
        }                                                                   \
    } while (0)

/* The call must give this status and, on failure, a message that contains `text`. */
#define CHECK_STATUS(call, wanted, text)                                                                          \
    do {                                                                                                          \
        akv_diag diag = {AKV_OK, ""};                                                                             \
        akv_status got_ = (call);                                                                                 \
        check_count++;                                                                                            \
        if (got_ != (wanted) || (got_ != AKV_OK && strstr(diag.message, (text)) == NULL)) {                       \
            fprintf(stderr, "%s:%d: %s gave %d \"%s\", wanted %d \"%s\"\n", __FILE__, __LINE__, #call, (int)got_, \
                    diag.message, (int)(wanted), (text));                                                         \
            check_failures++;                                                                                     \
        }                                                                                                         \
    } while (0)

static inline int check_report(const char *name)
{
    if (check_failures != 0)
        fprintf(stderr, "%s: %d of %d checks failed\n", name, check_failures, check_count);
    else
        printf("%s: %d checks passed\n", name, check_count);
    return check_failures != 0;
}

#endif
