/* SPDX-License-Identifier: Apache-2.0 */
/* npz.h - reads float16 and int32 arrays out of an uncompressed .npz, and makes a layer of one. */
#ifndef AKV_TEST_NPZ_H
#define AKV_TEST_NPZ_H

#include "cases.h"

typedef struct npz_array {
    uint64_t shape[4];
    uint32_t rank;
    char kind;        /* 'f' float16, 'i' int32 */
    const void *data; /* inside the file's bytes, 2-byte aligned at least */
} npz_array;

typedef struct npz {
    uint8_t *bytes;
    uint64_t size;
} npz;

bool npz_open(const char *path, npz *out);
bool npz_find(const npz *file, const char *name, npz_array *out);
void npz_close(npz *file);

/*
 * The captured layer as a fixture: keys rotated and rounded to f16 as an engine caches them. Qwen2.5's table:
 * half-split, base 1e6, scale 1/sqrt(d). `group` query heads per KV head follow from the shapes. False when the file is
 * not there.
 */
bool fixture_from_npz(const char *path, fixture *f);

#endif
