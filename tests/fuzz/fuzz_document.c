/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_document.c - a .akv file from nowhere. Checksums are put right first, wherever the section table lets them, so
 * that changes reach the code behind them; every 16th input keeps its own. With FUZZ_LOOK (fuzz_document_open) only a
 * few tokens of each segment are decoded.
 */
#include "fuzz.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { HEADER = 128, ENTRY = 48, CHECKSUM = 120, MAX_SECTIONS = 512 };

static uint64_t get(const uint8_t *at, size_t bytes)
{
    uint64_t x = 0;
    memcpy(&x, at, bytes);
    return x;
}

static void mend(uint8_t *file, size_t size)
{
    if (size < HEADER)
        return;
    const uint64_t sections = get(file + 20, 4), table = get(file + 32, 8);
    if (sections > MAX_SECTIONS || table != HEADER || HEADER + sections * ENTRY > size)
        return;
    for (uint64_t i = 0; i < sections; i++) {
        uint8_t *entry = file + HEADER + i * ENTRY;
        const uint64_t offset = get(entry + 16, 8), bytes = get(entry + 24, 8);
        if (offset > size || bytes > size - offset)
            continue;
        const uint64_t hash = XXH3_64bits(file + offset, (size_t)bytes);
        memcpy(entry + 32, &hash, sizeof hash);
    }
    XXH3_state_t *state = XXH3_createState();
    HOLDS(state, "no memory");
    XXH3_64bits_reset(state);
    XXH3_64bits_update(state, file, CHECKSUM);
    XXH3_64bits_update(state, file + HEADER, (size_t)(sections * ENTRY));
    const uint64_t hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    memcpy(file + CHECKSUM, &hash, sizeof hash);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    akv_diag diag = {AKV_OK, ""};
    akv_document *document = NULL;
    if (size > 1u << 18)
        return 0;
    uint8_t *copy = fuzz_copy(data, size);
    if (size == 0 || data[size - 1] % 16 != 15)
        mend(copy, size);
    akv_status status = akv_document_open(copy, size, NULL, &document, &diag);
    SAYS_WHY(status, diag);
    if (status == AKV_OK) {
        akv_document_parts parts;
        akv_document_info info;
        akv_document_parts_init(&parts);
        akv_document_info_init(&info);
        HOLDS(akv_document_get_parts(document, &parts, &diag) == AKV_OK, "parts: %s", diag.message);
        HOLDS(akv_document_get_info(document, &info, &diag) == AKV_OK, "info: %s", diag.message);
        for (uint32_t i = 0; i < info.num_sections; i++) {
            akv_document_section_info section;
            akv_document_section_info_init(&section);
            HOLDS(akv_document_get_section(document, i, &section, &diag) == AKV_OK, "section: %s", diag.message);
        }
        size_t text = 0;
        for (uint32_t i = 0; i < parts.num_properties; i++)
            text += strlen(parts.properties[i].key) + strlen(parts.properties[i].value);
        HOLDS(text <= size, "properties beyond the file");
        int64_t sum = 0;
        for (uint64_t i = 0; i < parts.num_tokens; i++)
            sum += parts.tokens[i];
        HOLDS(sum >= 0, "negative tokens");
        akv_document_property_value(document, "source", 0);
        akv_diag said = {AKV_OK, ""};
        const akv_status whole = akv_document_verify(document, &said);
        SAYS_WHY(whole, said);
        for (uint32_t i = 0; i < parts.num_segments; i++) {
            akv_segment *segment = NULL;
            akv_diag one = {AKV_OK, ""};
            status = akv_document_open_segment(document, i, (int)(i % 2), NULL, &segment, &one);
            SAYS_WHY(status, one);
            HOLDS(whole != AKV_OK || status == AKV_OK, "verified, but segment %u does not open: %s", i, one.message);
            if (status == AKV_OK) {
#ifdef FUZZ_LOOK
                fuzz_look_at_segment(segment);
#else
                fuzz_use_segment(segment);
#endif
                akv_segment_release(segment);
            }
        }
        akv_document_close(document);
    }
    free(copy);
    return 0;
}
