/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - carve typed arrays out of one caller-provided buffer. With base == NULL it only counts, so that sizing a
 * workspace and carving it run the same code and cannot drift apart.
 */
#ifndef AKV_ARENA_H
#define AKV_ARENA_H

#include "core/base.h"
#include "core/layout.h"

typedef struct akv_arena {
    uint8_t *base; /* 64-byte aligned, or NULL to count */
    size_t used;
    bool overflow; /* a request did not fit into size_t */
} akv_arena;

static inline void *akv_arena_take(akv_arena *arena, uint64_t count, uint64_t element_bytes)
{
    uint64_t bytes, end;
    if (!akv_mul_u64(count, element_bytes, &bytes) || bytes > SIZE_MAX - AKV_ALIGN ||
        !akv_add_u64(arena->used, akv_round_up(bytes, AKV_ALIGN), &end) || end > SIZE_MAX) {
        arena->overflow = true;
        return NULL;
    }
    uint8_t *at = arena->base == NULL ? NULL : arena->base + arena->used;
    arena->used = (size_t)end;
    return at;
}

#define AKV_TAKE(arena, type, count) ((type *)akv_arena_take((arena), (count), sizeof(type)))

#endif
