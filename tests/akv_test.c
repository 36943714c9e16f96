/* SPDX-License-Identifier: Apache-2.0 */
/* akv_test.c - the harness behind akv_test.h. */
#include "akv_test.h"

test_state test_;

int test_check(int ok, const char *file, int line, const char *format, ...)
{
    test_.checks++;
    if (ok)
        return 1;
    if (++test_.failures <= 20) {
        const char *base = strrchr(file, '/');
        va_list args;
        va_start(args, format);
        fprintf(stdout, "  %s:%d: ", base != NULL ? base + 1 : file, line);
        vfprintf(stdout, format, args);
        fprintf(stdout, "\n");
        va_end(args);
    }
    return 0;
}

unsigned test_thin(void)
{
    const char *text = getenv("AKV_TEST_THIN");
    const unsigned long n = text != NULL ? strtoul(text, NULL, 10) : 1;
    return n >= 1 && n <= 1000 ? (unsigned)n : 1;
}

void test_init(int argc, char **argv)
{
    memset(&test_, 0, sizeof test_);
    test_.argc = argc;
    test_.argv = argv;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (test_thin() != 1)
        printf("thinned: long loops do 1 of %u of their rounds (AKV_TEST_THIN)\n", test_thin());
}

void test_run(const char *name, void (*fn)(void))
{
    int wanted = test_.argc <= 1;
    for (int i = 1; i < test_.argc; i++)
        wanted |= strstr(name, test_.argv[i]) != NULL;
    if (!wanted)
        return;
    test_.name = name;
    test_.checks = test_.failures = 0;
    fn();
    /* a case that checked nothing shows nothing */
    int ok = test_.failures == 0 && test_.checks > 0;
    if (ok)
        test_.passed++;
    else
        test_.failed++;
    printf("%s %s: %lu checks, %lu failed\n", ok ? "ok  " : "FAIL", name, test_.checks, test_.failures);
}

int test_done(void)
{
    printf("%lu passed, %lu failed\n", test_.passed, test_.failed);
    return test_.failed == 0 && test_.passed > 0 ? 0 : 1;
}
