/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_segment.c - a segment's bytes from nowhere: refused with a sentence, or usable without reading beyond them. With
 * FUZZ_LOOK (fuzz_segment_open) only a few tokens of what opened are decoded: many times more inputs for the checks of
 * akv_segment_open.
 */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment *segment = NULL;
    if (size > 1u << 17)
        return 0;
    uint8_t *copy = fuzz_copy(data, size);
    const akv_status status = akv_segment_open(copy, size, 0, NULL, &segment, &diag);
    SAYS_WHY(status, diag);
    if (status == AKV_OK) {
#ifdef FUZZ_LOOK
        fuzz_look_at_segment(segment);
#else
        fuzz_use_segment(segment);
        fuzz_rewrite_segment(segment, size >= 8 ? (uint64_t)data[size - 1] << 8 | data[size / 2] : 0);
#endif
        akv_segment_release(segment);
    }
    free(copy);
    return 0;
}
