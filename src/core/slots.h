/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slots.h - scratch for tasks that do not know their worker: as many slots as may run at once, claimed without a lock; and how to wait
 * a moment.
 */
#ifndef AKV_SLOTS_H
#define AKV_SLOTS_H

#include "core/base.h"

#include <stdatomic.h>

#define AKV_MOST_WORKERS 4096u

/* Between two looks at what another thread will write. */
static inline void akv_relax(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("isb");
#endif
}

/* How many slots num_tasks tasks on this executor need. */
static inline uint32_t akv_num_slots(const akv_executor *executor, uint64_t num_tasks)
{
    uint32_t workers = executor != NULL && executor->parallel_for != NULL ? executor->max_workers : 1;
    workers = workers < 1 ? 1 : workers > AKV_MOST_WORKERS ? AKV_MOST_WORKERS : workers;
    return num_tasks < workers ? (num_tasks == 0 ? 1 : (uint32_t)num_tasks) : workers;
}

/* At most max_workers tasks run at once, so a free slot is always there or about to be. */
static inline uint32_t akv_claim_slot(atomic_flag *slots, uint32_t num_slots)
{
    for (;;)
        for (uint32_t i = 0; i < num_slots; i++)
            if (!atomic_flag_test_and_set_explicit(&slots[i], memory_order_acquire))
                return i;
}

static inline void akv_return_slot(atomic_flag *slots, uint32_t slot)
{
    atomic_flag_clear_explicit(&slots[slot], memory_order_release);
}

#endif
