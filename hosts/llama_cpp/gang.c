/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gang.c - attention as one of libllama's own operators. Before a graph runs, the attention nodes of compressed layers become
 * custom operators (ggml_custom_4d) that call akvl_replace. So the graph is not cut in pieces, libllama's flash
 * attention is not computed for nothing, and its threads, which are there anyway, do the tasks of akv_attend: another pool
 * would compete with them for the processors while they wait at the next barrier.
 */
#include "host.h"

#include <string.h>
#include <time.h>

/* How often to look again before going to sleep for a while: about as long as waking up takes. */
enum { SPINS = 2000, SLEEP_NS = 50000 };

static void wait_a_little(uint32_t *spins)
{
    if (++*spins < SPINS) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        return;
    }
    nanosleep(&(struct timespec){0, SLEEP_NS}, NULL); /* somebody else needs this processor, perhaps thread 0 */
}

struct akvl_gang {
    akv_executor executor;
    akv_llama *host;
    struct akvl_seat *seats; /* [num_layers] */
    uint32_t *calls;         /* [max_workers] operators that this thread has entered in this run; its own */
    /* the job that is open to all; written by thread 0 while `generation` is even and nobody is inside */
    void (*fn)(void *arg, size_t task);
    void *arg;
    size_t num_tasks;
    atomic_size_t next_task;
    atomic_uint generation; /* odd: a job is open */
    atomic_uint inside;     /* helpers that may be looking at the job */
    atomic_uint operators_done;
};

/* What a node of one layer is told, and the parameters that make it ours. */
struct akvl_seat {
    akvl_gang *gang;
    int number;
    char op_params[GGML_MAX_OP_PARAMS];
};

static void run_tasks(akvl_gang *g, void (*fn)(void *, size_t), void *arg, size_t num_tasks)
{
    for (;;) {
        const size_t task = atomic_fetch_add_explicit(&g->next_task, 1, memory_order_relaxed);
        if (task >= num_tasks)
            return;
        fn(arg, task);
    }
}

/* Thread 0. Whoever of the others is there helps; nobody is waited for who has not begun. */
static void parallel_for(void *opaque, void (*fn)(void *arg, size_t task), void *arg, size_t num_tasks)
{
    akvl_gang *g = opaque;
    g->fn = fn;
    g->arg = arg;
    g->num_tasks = num_tasks;
    atomic_store(&g->next_task, 0);
    atomic_fetch_add(&g->generation, 1);
    run_tasks(g, fn, arg, num_tasks);
    atomic_fetch_add(&g->generation, 1);
    /* A helper announces itself, then looks at the generation; here it is the other way round. So either it sees the job
     * closed, or it is seen inside. */
    for (uint32_t spins = 0; atomic_load(&g->inside) != 0;)
        wait_a_little(&spins);
}

static void help_until(akvl_gang *g, uint32_t operator_index)
{
    for (uint32_t spins = 0, last = 0; atomic_load(&g->operators_done) <= operator_index;) {
        const uint32_t now = atomic_load_explicit(&g->generation, memory_order_relaxed);
        if (now & 1 && now != last) {
            atomic_fetch_add(&g->inside, 1);
            if (atomic_load(&g->generation) == now)
                run_tasks(g, g->fn, g->arg, g->num_tasks);
            atomic_fetch_sub(&g->inside, 1);
            last = now;
            spins = 0;
        } else {
            wait_a_little(&spins);
        }
    }
}

/* The operator, on each of libllama's threads. All of them leave one operator before any enters the next. */
static void attend(struct ggml_tensor *node, int thread, int num_threads, void *user)
{
    const struct akvl_seat *seat = user;
    akvl_gang *g = seat->gang;
    (void)num_threads;
    if (thread == 0) {
        if (g->host->tail_hook.failure.status == AKV_OK)
            akvl_replace(&g->host->tail_hook, seat->number, node);
        atomic_fetch_add(&g->operators_done, 1);
    } else if ((uint32_t)thread < g->executor.max_workers) {
        help_until(g, g->calls[thread]++);
    }
}

const akv_executor *akvl_gang_executor(const akvl_gang *gang)
{
    return gang ? &gang->executor : NULL;
}

void akvl_gang_begin(akvl_gang *g)
{
    atomic_store(&g->operators_done, 0);
    memset(g->calls, 0, g->executor.max_workers * sizeof *g->calls);
}

void akvl_gang_take(akvl_gang *g, int number, struct ggml_tensor *node)
{
    memcpy(node->op_params, g->seats[number].op_params, sizeof node->op_params);
    node->op = GGML_OP_CUSTOM;
}

akv_status akvl_gang_create(akv_llama *host, akvl_gang **out, akv_diag *diag)
{
    akvl_gang *g = akvl_new(1, sizeof *g);
    struct ggml_init_params init = {ggml_tensor_overhead() + 1024, NULL, true};
    struct ggml_context *context = NULL;
    if (g) {
        g->host = host;
        g->executor.opaque = g;
        g->executor.parallel_for = parallel_for;
        g->executor.max_workers = host->options.num_threads;
        g->seats = akvl_new(host->num_layers, sizeof *g->seats);
        g->calls = akvl_new(g->executor.max_workers, sizeof *g->calls);
    }
    bool ok = g && g->seats && g->calls;
    /* ggml's own constructor makes the parameters, whose layout is not public */
    for (uint32_t i = 0; ok && i < host->num_layers; i++) {
        g->seats[i].gang = g;
        g->seats[i].number = (int)i;
        context = ggml_init(init);
        ok = context != NULL;
        if (!ok)
            break;
        const struct ggml_tensor *node =
            ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, NULL, 0, attend, GGML_N_TASKS_MAX, &g->seats[i]);
        memcpy(g->seats[i].op_params, node->op_params, sizeof g->seats[i].op_params);
        ggml_free(context);
    }
    if (!ok) {
        akvl_gang_free(g);
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the operators of %u layers", host->num_layers);
    }
    *out = g;
    return AKV_OK;
}

void akvl_gang_free(akvl_gang *g)
{
    if (!g)
        return;
    free(g->seats);
    free(g->calls);
    free(g);
}
