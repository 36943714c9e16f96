/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz.h - what the fuzz targets share. Each target is one function over untrusted bytes, LLVMFuzzerTestOneInput, as libFuzzer
 * wants it; driver.c runs the same function over files and random changes of them, without a fuzzing engine.
 *
 *   fuzz_segment        akv_segment_open, then decode, attend, retarget, cut
 *   fuzz_segment_open   akv_segment_open, then a few tokens: fast
 *   fuzz_document       akv_document_open with checksums put right, verify, every segment
 *   fuzz_document_open  the same, of each segment a few tokens: fast
 *   fuzz_compress       shapes, settings and data drawn from the bytes through akv_compress and back
 *   fuzz_request        bodies of requests to akv serve, and what its answers would look like
 *   fuzz_http           requests to akv serve, method, path, headers and body, behind a stand-in for libmicrohttpd
 */
#ifndef AKV_FUZZ_H
#define AKV_FUZZ_H

#include <anchorkv/akv_document.h>
#include <anchorkv/anchorkv.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A promise of the library that did not hold; ends the program, so that every engine notices. */
#define HOLDS(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A refusal must carry a sentence. */
#define SAYS_WHY(got, diag)                                                                                            \
    HOLDS((got) == AKV_OK || ((diag).status == (got) && strlen((diag).message) > 10), "status %d, \"%s\"",              \
          (int)(got), (diag).message)

/* Decode and attend to all of it; values may be anything. */
void fuzz_use_segment(const akv_segment *segment);
/* Decode a few tokens at its ends. */
void fuzz_look_at_segment(const akv_segment *segment);
/* Made smaller, and cut; `pick` chooses how. */
void fuzz_rewrite_segment(akv_segment *segment, uint64_t pick);
/* A 64-byte aligned copy that ends where its allocation ends, as far as an alignment allows. */
uint8_t *fuzz_copy(const uint8_t *data, size_t size);

#endif
