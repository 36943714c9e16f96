/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - a fuzz target without a fuzzing engine: every file given, then random changes of them.
 *
 * usage: TARGET [--changes N] [--seed S] FILE|FOLDER...
 *
 * Inputs that once failed lie in tests/fuzz/found and run with every `make check`. AKV_TEST_THIN=N in the environment: an
 * N-th of the changes (akv_test.h).
 */
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

enum { MAX_INPUTS = 512, MAX_BYTES = 1 << 18 };

static struct input {
    uint8_t *data;
    size_t size;
} inputs[MAX_INPUTS];
static size_t num_inputs;

static void add_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    HOLDS(file && num_inputs < MAX_INPUTS, "cannot read %s, or too many inputs", path);
    uint8_t *data = malloc(MAX_BYTES);
    HOLDS(data, "no memory");
    const size_t size = fread(data, 1, MAX_BYTES, file);
    HOLDS(!ferror(file) && size < MAX_BYTES, "%s cannot be read, or is too large", path);
    fclose(file);
    inputs[num_inputs++] = (struct input){data, size};
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static void add(const char *path)
{
    struct stat st;
    HOLDS(stat(path, &st) == 0, "%s does not exist", path);
    if (!S_ISDIR(st.st_mode)) {
        add_file(path);
        return;
    }
    struct dirent **list = NULL;
    const int n = scandir(path, &list, NULL, by_name);
    HOLDS(n >= 0, "cannot read %s", path);
    for (int i = 0; i < n; i++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, list[i]->d_name);
        if (list[i]->d_name[0] != '.')
            add_file(name);
        free(list[i]);
    }
    free(list);
}

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* A few bytes flipped, set to edge values, copied from elsewhere, or cut off; near the front more often than not. */
static size_t change(uint8_t *data, size_t size, uint64_t *state)
{
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, 0x40, 2, 0xfe};
    for (uint64_t n = 1 + next(state) % 6; n > 0 && size > 8; n--) {
        const size_t front = size < 1024 ? size : 1024, at = next(state) % (next(state) % 3 != 0 ? front : size);
        switch (next(state) % 6) {
        case 0: data[at] ^= (uint8_t)(1u << next(state) % 8); break;
        case 1: data[at] = edges[next(state) % sizeof edges]; break;
        case 2: data[at] = (uint8_t)next(state); break;
        case 3: data[at] = (uint8_t)(data[at] + (next(state) % 2 ? 1 : -1)); break;
        case 4: memmove(data + at, data + next(state) % (size - 8), at + 8 <= size ? 8 : 1); break;
        default:
            if (next(state) % 8 == 0)
                size = 8 + next(state) % (size - 8);
        }
    }
    return size;
}

int main(int argc, char **argv)
{
    uint64_t changes = 0, state = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--changes") == 0 && i + 1 < argc)
            changes = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            state = strtoull(argv[++i], NULL, 10);
        else
            add(argv[i]);
    }
    const char *thin = getenv("AKV_TEST_THIN");
    if (thin != NULL && strtoull(thin, NULL, 10) > 1)
        changes /= strtoull(thin, NULL, 10);
    HOLDS(num_inputs != 0, "usage: %s [--changes N] [--seed S] FILE|FOLDER...", argv[0]);
    for (size_t i = 0; i < num_inputs; i++)
        LLVMFuzzerTestOneInput(inputs[i].data, inputs[i].size);
    uint8_t *work = malloc(MAX_BYTES);
    HOLDS(work, "no memory");
    for (uint64_t n = 0; n < changes; n++) {
        const struct input *from = &inputs[next(&state) % num_inputs];
        memcpy(work, from->data, from->size);
        const size_t size = change(work, from->size, &state);
        LLVMFuzzerTestOneInput(work, size);
    }
    printf("%zu inputs and %llu random changes of them: nothing found\n", num_inputs, (unsigned long long)changes);
    for (size_t i = 0; i < num_inputs; i++)
        free(inputs[i].data);
    free(work);
    return 0;
}
