/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c - a small pthread pool behind the executor hook; started only by akv_threads_create. */
#include "core/base.h"
#include "core/slots.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/*
 * Work that takes a tenth of a millisecond is worth some looking around before a thread sleeps: waking one takes that long on an idle
 * machine. A helper looks for about 10 us for the next call, the caller for about 50 us whether the helpers are done.
 */
#define HELPER_LOOKS 200
#define CALLER_LOOKS 1000

struct akv_threads {
    akv_executor executor;
    uint32_t num_helpers; /* threads besides the caller's */
    pthread_t *helpers;
    pthread_mutex_t turn; /* held by the caller whom the helpers serve */
    pthread_mutex_t mutex;
    pthread_cond_t work_ready;
    pthread_cond_t work_done;
    /* under the mutex */
    bool open; /* a call has tasks: helpers may join */
    bool stop;
    void (*fn)(void *arg, size_t task);
    void *arg;
    size_t num_tasks;
    /* written under the mutex, looked at without it */
    atomic_uint_fast64_t generation; /* of the call */
    atomic_uint active;              /* helpers that have joined */
    /* shared without it */
    atomic_size_t next_task;
};

static void run_tasks(akv_threads *t, void (*fn)(void *, size_t), void *arg, size_t num_tasks)
{
    for (;;) {
        size_t task = atomic_fetch_add_explicit(&t->next_task, 1, memory_order_relaxed);
        if (task >= num_tasks)
            return;
        fn(arg, task);
    }
}

static void *helper_main(void *opaque)
{
    akv_threads *t = opaque;
    uint64_t seen = 0;
    pthread_mutex_lock(&t->mutex);
    for (;;) {
        while (!t->stop && !(t->open && atomic_load_explicit(&t->generation, memory_order_relaxed) != seen))
            pthread_cond_wait(&t->work_ready, &t->mutex);
        if (t->stop)
            break;
        seen = atomic_load_explicit(&t->generation, memory_order_relaxed);
        atomic_fetch_add_explicit(&t->active, 1, memory_order_relaxed);
        void (*fn)(void *, size_t) = t->fn;
        void *arg = t->arg;
        size_t num_tasks = t->num_tasks;
        pthread_mutex_unlock(&t->mutex);
        run_tasks(t, fn, arg, num_tasks);
        pthread_mutex_lock(&t->mutex);
        if (atomic_fetch_sub_explicit(&t->active, 1, memory_order_relaxed) == 1 && !t->open)
            pthread_cond_signal(&t->work_done);
        pthread_mutex_unlock(&t->mutex);
        for (int i = 0; i < HELPER_LOOKS && atomic_load_explicit(&t->generation, memory_order_relaxed) == seen; i++)
            akv_relax();
        pthread_mutex_lock(&t->mutex);
    }
    pthread_mutex_unlock(&t->mutex);
    return NULL;
}

static void parallel_for(void *opaque, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks)
{
    akv_threads *t = opaque;
    /* Somebody else has the helpers (readers of one cache share its executor): the same tasks on this thread, without waiting. */
    if (pthread_mutex_trylock(&t->turn) != 0) {
        for (size_t task = 0; task < num_tasks; task++)
            fn(arg, task);
        return;
    }
    pthread_mutex_lock(&t->mutex);
    t->fn = fn;
    t->arg = arg;
    t->num_tasks = num_tasks;
    atomic_store_explicit(&t->next_task, 0, memory_order_relaxed);
    t->open = true;
    atomic_fetch_add_explicit(&t->generation, 1, memory_order_relaxed);
    pthread_mutex_unlock(&t->mutex);
    pthread_cond_broadcast(&t->work_ready);

    run_tasks(t, fn, arg, num_tasks);

    /* Helpers that are still waking up are not waited for: closed, nobody joins any more. */
    pthread_mutex_lock(&t->mutex);
    t->open = false;
    pthread_mutex_unlock(&t->mutex);
    for (int i = 0; i < CALLER_LOOKS && atomic_load_explicit(&t->active, memory_order_relaxed) != 0; i++)
        akv_relax();
    pthread_mutex_lock(&t->mutex); /* what the helpers wrote comes with it */
    while (atomic_load_explicit(&t->active, memory_order_relaxed) != 0)
        pthread_cond_wait(&t->work_done, &t->mutex);
    pthread_mutex_unlock(&t->mutex);
    pthread_mutex_unlock(&t->turn);
}

akv_status akv_threads_create(uint32_t num_threads, akv_threads **out, akv_diag *diag)
{
    if (out == NULL || num_threads == 0 || num_threads > 4096)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_threads is %u; it must be 1..4096, and out not NULL", num_threads);
    akv_threads *t = calloc(1, sizeof *t);
    if (t == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a pool of %u threads", num_threads);
    t->helpers = calloc(num_threads, sizeof *t->helpers);
    if (t->helpers == NULL) {
        free(t);
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a pool of %u threads", num_threads);
    }
    pthread_mutex_init(&t->turn, NULL);
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->work_ready, NULL);
    pthread_cond_init(&t->work_done, NULL);
    atomic_init(&t->next_task, 0);
    atomic_init(&t->generation, 0);
    atomic_init(&t->active, 0);
    t->executor.opaque = t;
    t->executor.parallel_for = parallel_for;
    t->executor.max_workers = num_threads;
    while (t->num_helpers + 1 < num_threads) {
        if (pthread_create(&t->helpers[t->num_helpers], NULL, helper_main, t) != 0) {
            akv_status status = akv_fail(diag, AKV_E_NO_MEMORY, "the system allows only %u of the %u threads asked for",
                                         t->num_helpers + 1, num_threads);
            akv_threads_destroy(t);
            return status;
        }
        t->num_helpers++;
    }
    *out = t;
    return AKV_OK;
}

const akv_executor *akv_threads_executor(akv_threads *threads)
{
    return threads == NULL ? NULL : &threads->executor;
}

void akv_threads_destroy(akv_threads *t)
{
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->mutex);
    t->stop = true;
    pthread_cond_broadcast(&t->work_ready);
    pthread_mutex_unlock(&t->mutex);
    for (uint32_t i = 0; i < t->num_helpers; i++)
        pthread_join(t->helpers[i], NULL);
    pthread_cond_destroy(&t->work_done);
    pthread_cond_destroy(&t->work_ready);
    pthread_mutex_destroy(&t->mutex);
    pthread_mutex_destroy(&t->turn);
    free(t->helpers);
    free(t);
}
