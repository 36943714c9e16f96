/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_plan.c - how the GPU back end cuts a batch into items, without a GPU: drawn batches on a device that is none
 * (fake_device.c). What a step would launch is looked at as the kernels read it: every token of every head belongs to one item,
 * every item lies inside its segment, slots are nobody else's, the buffers are as large as what is put into them (exact
 * allocations, which a memory checker watches). Then every call of CUDA and every allocation fails once.
 */
#include "akv_test.h"
#include "cases.h"
#include "cuda/host.h"
#include "fake_device.h"

/* ------------------------------------------------------------------------------------------------------ libc's memory */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);

static uint64_t allocations, fail_allocation; /* 0: never */

static bool fails(void)
{
    return fail_allocation != 0 && ++allocations == fail_allocation;
}
void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}
void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}
void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(align, bytes);
}

/* -------------------------------------------------------------------------------------------------------- a batch */

enum { SEGMENTS = 8, SEQUENCES = 6, LIST = 4 };

typedef struct shape {
    uint32_t H, G, D;
} shape;

typedef struct world {
    shape of;
    akv_segment *segments[SEGMENTS];
    akv_cuda_segment *handles[SEGMENTS];
    void *memory[SEGMENTS]; /* of the device */
    const akv_cuda_segment *lists[SEQUENCES][LIST];
    akv_cuda_sequence sequences[SEQUENCES];
    akv_cuda_batch batch;
    akv_cuda_step step;
    char tail[64];
    int32_t lengths[SEQUENCES];
} world;

/* Device memory ends where it ends: a multiple of the alignment, as the interface asks for. */
static void *buffer(size_t bytes)
{
    return must(aligned_alloc(AKV_CUDA_ALIGN, (bytes + AKV_CUDA_ALIGN - 1) / AKV_CUDA_ALIGN * AKV_CUDA_ALIGN));
}

/* Segments 0 to 3 are of the ladder, 4 to 6 of profile paper, the last has gaps: no private form. */
static void world_make(world *w, shape of)
{
    static const uint64_t tokens[SEGMENTS] = {1, 700, 2100, 9000, 17, 1025, 5000, 300};
    akv_diag diag = {0};
    memset(w, 0, sizeof *w);
    w->of = of;
    for (int i = 0; i < SEGMENTS; i++) {
        const spec s = {.name = "plan", .S = tokens[i], .H = of.H, .G = of.G, .dk = of.D, .dv = of.D, .W = 1, .rotary = of.D,
                        .gaps = i == SEGMENTS - 1};
        const uint32_t anchors = s.S < 40 ? (uint32_t)s.S : i == 3 ? 300 : 40;
        size_t bytes = 0;
        w->segments[i] = i < 4 || i == SEGMENTS - 1 ? random_ladder_segment(&s, anchors, 0.3, (uint64_t)i)
                                                    : random_segment(&s, anchors, 0.3, 0, (uint64_t)i);
        CHECK_STATUS(akv_cuda_upload_bytes(w->segments[i], &bytes, &diag), AKV_OK, &diag);
        w->memory[i] = buffer(bytes);
        CHECK_STATUS(akv_cuda_upload(w->segments[i], w->memory[i], bytes, NULL, &w->handles[i], &diag), AKV_OK, &diag);
    }
    akv_cuda_batch_init(&w->batch);
    w->batch.num_kv_heads = of.H;
    w->batch.gqa_group = of.G;
    w->batch.head_dim_k = w->batch.head_dim_v = of.D;
    w->batch.sequences = w->sequences;
    w->batch.sm_scale = 0.125;
    akv_cuda_step_init(&w->step);
    w->step.queries = w->step.out = w->tail;
}

static void world_free(world *w)
{
    for (int i = 0; i < SEGMENTS; i++) {
        akv_cuda_segment_release(w->handles[i]);
        akv_segment_release(w->segments[i]);
        free(w->memory[i]);
    }
}

static void world_draw(world *w, akv_rng *rng)
{
    static const uint32_t queries[] = {1, 1, 1, 2, 5, 64};
    static const uint64_t tails[] = {0, 1, 40, 1024, 1025, 5000};
    w->batch.num_queries = queries[akv_rng_below(rng, 6)];
    w->batch.num_sequences = 1 + (uint32_t)akv_rng_below(rng, SEQUENCES);
    w->batch.tail_lengths = akv_rng_below(rng, 2) ? w->lengths : NULL;
    for (uint32_t q = 0; q < w->batch.num_sequences; q++) {
        akv_cuda_sequence *s = &w->sequences[q];
        memset(s, 0, sizeof *s);
        s->num_segments = (uint32_t)akv_rng_below(rng, LIST + 1);
        for (uint32_t i = 0; i < s->num_segments; i++)
            w->lists[q][i] = w->handles[akv_rng_below(rng, SEGMENTS)];
        s->segments = w->lists[q];
        s->tail_tokens = tails[akv_rng_below(rng, 6)];
        s->tail_keys = s->tail_values = w->tail;
        for (int side = 0; side < 2; side++) {
            s->tail_stride_head[side] = (int64_t)(s->tail_tokens * w->of.D);
            s->tail_stride_token[side] = w->of.D;
        }
    }
}

/* -------------------------------------------------------------------------------------------- what a step launches */

static unsigned long items_seen[3]; /* plain, span, paper */

/* Items of the plain kernel and of profile paper, spans of the ladder, of one source and head: each token once. */
typedef struct cover {
    const world *w;
    uint8_t *slots; /* [slots, H]: taken */
    uint64_t num_slots;
    const akv_cuda_call *c;
} cover;

static void take_slot(const cover *v, uint32_t sequence, uint64_t slot, uint32_t head)
{
    const bool inside = slot >= v->c->first_slot[sequence] && slot < v->c->first_slot[sequence + 1];
    if (CHECK_MSG(inside, "slot %llu of sequence %u is not in [%u, %u)", (unsigned long long)slot, sequence,
                  v->c->first_slot[sequence], v->c->first_slot[sequence + 1]))
        CHECK_MSG(v->slots[slot * v->w->of.H + head]++ == 0, "slot %llu has two owners", (unsigned long long)slot);
}

/* Sources lie behind one another as sequences list them; `next` runs through the items in the order they were cut in. */
static void check_plain(const cover *v, const akv_cuda_segment *segment, uint32_t sequence, uint64_t tokens, uint32_t *next)
{
    for (uint64_t t = 0; t < tokens; (*next)++) {
        if (!CHECK_MSG(*next < v->c->num_items, "tokens from %llu of sequence %u have no item", (unsigned long long)t, sequence))
            return;
        const akv_item *i = &v->c->items[*next];
        CHECK(i->sequence == sequence && i->begin == t && i->count > 0);
        CHECK(i->count <= (segment != NULL ? AKV_CUDA_PART_TOKENS : AKV_CUDA_TAIL_TOKENS));
        CHECK(i->data == (segment != NULL ? segment->device : NULL) && i->kind == (segment != NULL ? segment->kind : AKV_ITEM_TAIL));
        for (uint32_t head = 0; head < v->w->of.H; head++)
            take_slot(v, sequence, i->part, head);
        t += i->count;
        items_seen[0]++;
        if (!CHECK_MSG(t <= tokens && i->count > 0, "an item ends behind its source"))
            return;
    }
}

static void check_spans(const cover *v, const akv_cuda_segment *segment, uint32_t sequence, uint32_t *next, uint32_t *pool)
{
    const akv_cuda_call *c = v->c;
    if (!CHECK(*pool < c->num_pools))
        return;
    CHECK(c->pools[*pool].packed == segment->device && c->pools[*pool].sequence == sequence);
    for (uint32_t head = 0; head < v->w->of.H; head++)
        for (uint32_t span = 0; span < segment->packed.num_spans; (*next)++) {
            if (!CHECK(*next < c->num_span_items))
                return;
            const akv_span_item *i = &c->span_items[*next];
            CHECK(i->packed == segment->device && i->head == head && i->first_span == span && i->pool == *pool);
            CHECK(memcmp(&i->head_of_packed, segment->device, sizeof i->head_of_packed) == 0);
            take_slot(v, sequence, i->part, head);
            if (!CHECK(i->num_spans > 0 && span + i->num_spans <= segment->packed.num_spans))
                return;
            span += i->num_spans;
            items_seen[1]++;
        }
    (*pool)++;
}

static void check_paper(const cover *v, const akv_cuda_segment *segment, uint32_t sequence, uint32_t *next)
{
    const akv_cuda_paper *p = &v->c->paper;
    for (uint32_t head = 0; head < v->w->of.H; head++)
        for (uint32_t span = 0; span < segment->paper.num_spans; (*next)++) {
            if (!CHECK(*next < p->num_items))
                return;
            const akv_paper_item *i = &p->items[*next];
            CHECK(i->packed == segment->device && i->head == head && i->first_span == span && i->sequence == sequence);
            CHECK(memcmp(&i->paper, segment->device, sizeof i->paper) == 0); /* the head of the packed bytes */
            CHECK(i->shares > 0 && i->share < i->shares);
            take_slot(v, sequence, i->part, head);
            if (!CHECK(i->num_spans > 0 && span + i->num_spans <= segment->paper.num_spans))
                return;
            span += i->num_spans;
            items_seen[2]++;
        }
}

/* Blocks own neighbouring items, all of them. */
static void check_blocks(const uint32_t *first_item, uint32_t blocks, uint32_t items)
{
    CHECK(items == 0 || (blocks >= 1 && blocks <= AKV_CUDA_BLOCKS));
    CHECK(first_item[0] == 0);
    for (uint32_t b = 0; b < blocks; b++)
        CHECK_MSG(first_item[b] <= first_item[b + 1], "block %u begins at item %u and ends at %u", b, first_item[b], first_item[b + 1]);
    CHECK_MSG(first_item[blocks] == items, "blocks end at item %u of %u", first_item[blocks], items);
}

/* Writes a region of the scratch memory as the kernels may, and remembers whose it is. */
static void own(uint8_t *scratch, size_t bytes, const void *begin, uint64_t count, size_t size, uint8_t name)
{
    const uint64_t at = (uint64_t)((const uint8_t *)begin - scratch);
    if (!CHECK_MSG(count == 0 || at + count * size <= bytes, "part %u: %llu bytes at %llu of %zu", name,
                   (unsigned long long)(count * size), (unsigned long long)at, bytes))
        return;
    uint64_t taken = 0;
    for (uint64_t i = 0; i < count * size; i++) {
        taken += scratch[at + i] != 0;
        scratch[at + i] = name;
    }
    CHECK_MSG(taken == 0, "%llu bytes of part %u are another's", (unsigned long long)taken, name);
}

static void check_call(const world *w, const akv_cuda_call *c, uint8_t *scratch, size_t scratch_bytes)
{
    const uint64_t slots = c->first_slot[c->num_sequences], H = w->of.H, rows = (uint64_t)w->of.G * w->batch.num_queries, D = w->of.D;
    cover v = {w, must(calloc(slots * H + 1, 1)), slots, c};
    uint32_t item = 0, span = 0, pool = 0, paper = 0;
    CHECK(c->H == H && c->G == w->of.G && c->T == w->batch.num_queries && c->rows == rows && c->first_slot[0] == 0);
    for (uint32_t q = 0; q < c->num_sequences; q++) {
        const akv_cuda_sequence *s = &w->sequences[q];
        for (uint32_t i = 0; i < s->num_segments; i++) {
            const akv_cuda_segment *segment = s->segments[i];
            if (segment->packed.total_bytes > 0)
                check_spans(&v, segment, q, &span, &pool);
            else if (segment->paper.total_bytes > 0)
                check_paper(&v, segment, q, &paper);
            else
                check_plain(&v, segment, q, segment->header.num_tokens, &item);
        }
        check_plain(&v, NULL, q, s->tail_tokens, &item);
        const akv_tail *t = &c->tails[q];
        CHECK(t->keys == s->tail_keys && t->tokens == s->tail_tokens && t->stride_head[1] == s->tail_stride_head[1]);
    }
    CHECK(item == c->num_items && span == c->num_span_items && pool == c->num_pools && paper == c->paper.num_items);
    check_blocks(c->first_item, c->num_span_blocks, c->num_span_items);
    check_blocks(c->paper.first_item, c->paper.num_blocks, c->paper.num_items);
    /* states of slots that nobody writes are empty */
    uint64_t full = 0;
    for (uint64_t i = 0; i < slots * H * rows; i++)
        full += !(c->partials.max[i] == -INFINITY) || c->partials.sum[i] != 0;
    CHECK_MSG(full == 0, "%llu partial states do not begin empty", (unsigned long long)full);
    memset(scratch, 0, scratch_bytes);
    own(scratch, scratch_bytes, c->partials.acc, slots * H * rows * D, 4, 1);
    if (c->num_pools > 0) {
        CHECK(c->row_chunk == 4 || c->row_chunk == 8);
        own(scratch, scratch_bytes, c->prepared, c->num_pools * H * ((rows + c->row_chunk - 1) / c->row_chunk), c->prepared_bytes, 2);
    }
    free(v.slots);
}

/* Plans, steps, checks; buffers are exactly as large as asked for. */
static akv_status run(world *w, bool check, akv_diag *diag)
{
    size_t own_bytes = 0, scratch_bytes = 0;
    akv_cuda_plan *plan = NULL;
    akv_status status = akv_cuda_plan_bytes(&w->batch, &own_bytes, &scratch_bytes, diag);
    if (status != AKV_OK)
        return status;
    const uint64_t kept = fail_allocation; /* the device's memory is the test's */
    fail_allocation = 0;
    uint8_t *mine = buffer(own_bytes + 1), *scratch = buffer(scratch_bytes + 1);
    fail_allocation = kept;
    status = akv_cuda_plan_create_shared(&w->batch, mine, own_bytes, scratch, scratch_bytes, NULL, &plan, diag);
    if (status == AKV_OK) {
        const unsigned long before = fake.launches;
        status = akv_cuda_attend(plan, &w->step, NULL, diag);
        if (status == AKV_OK && check) {
            CHECK(fake.launches == before + 5);
            check_call(w, &fake.call, scratch, scratch_bytes);
        }
        if (status == AKV_OK && w->batch.tail_lengths != NULL) {
            akv_cuda_token token;
            akv_cuda_token_init(&token);
            token.keys = token.values = w->step.queries;
            status = akv_cuda_append(plan, &token, NULL, diag);
            CHECK(status != AKV_OK || fake.launches == before + 6);
        }
    }
    akv_cuda_plan_destroy(plan);
    free(mine);
    free(scratch);
    return status;
}

static void batches(void)
{
    static const shape shapes[] = {{8, 1, 64}, {2, 4, 128}, {1, 16, 64}, {2, 5, 96}, {3, 2, 80}, {1, 4, 256}};
    unsigned long plans = 0;
    akv_rng rng = {7};
    memset(items_seen, 0, sizeof items_seen);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        world w;
        fake_device_reset();
        world_make(&w, shapes[i]);
        for (int round = 0; round < 40; round++, plans++) {
            akv_diag diag = {AKV_OK, ""};
            fake.rows = round % 3 == 0 ? 12 : round % 3 == 1 ? 4 : 8; /* kernels of the build */
            fake.paper_shared = round % 2 ? 200000 : 300000;         /* anchors of profile paper fit, or not */
            world_draw(&w, &rng);
            CHECK_STATUS(run(&w, true, &diag), AKV_OK, &diag);
        }
        world_free(&w);
    }
    printf("  %lu plans: %lu items of the plain kernel, %lu of spans, %lu of profile paper\n", plans, items_seen[0], items_seen[1], items_seen[2]);
    CHECK(items_seen[0] > 100 && items_seen[1] > 100 && items_seen[2] > 100);
}

/* ---------------------------------------------------------------------------------------------------------- failures */

/* A batch with something of everything. */
static void world_mixed(world *w)
{
    fake_device_reset();
    world_make(w, (shape){2, 4, 64});
    w->batch.num_sequences = 2;
    for (uint32_t q = 0; q < 2; q++) {
        w->lists[q][0] = w->handles[q == 0 ? 2 : 7];
        w->lists[q][1] = w->handles[5];
        w->sequences[q] = (akv_cuda_sequence){.segments = w->lists[q], .num_segments = 2, .tail_tokens = 10, .tail_keys = w->tail,
                                              .tail_values = w->tail, .tail_stride_head = {640, 640}, .tail_stride_token = {64, 64}};
    }
}

static akv_status upload_again(world *w, int segment, akv_diag *diag)
{
    size_t bytes = 0;
    akv_cuda_segment *handle = NULL;
    akv_status status = akv_cuda_upload_bytes(w->segments[segment], &bytes, diag);
    if (status == AKV_OK)
        status = akv_cuda_upload(w->segments[segment], w->memory[segment], bytes, NULL, &handle, diag);
    akv_cuda_segment_release(handle);
    return status;
}

/* Every call of CUDA fails once, with each kind of error: the status, CUDA's words, nothing left (leak checker). */
static void cuda_fails(void)
{
    static const cudaError_t errors[] = {cudaErrorUnknown, cudaErrorInvalidValue, cudaErrorNoKernelImageForDevice};
    unsigned long failed = 0;
    world w;
    world_mixed(&w);
    for (int e = 0; e < 3; e++)
        for (int what = 0; what < 4; what++) /* a plan and a step; uploads in both private forms and in none */
            for (unsigned long n = 1; n < 100; n++) {
                akv_diag diag = {AKV_OK, ""};
                fake.error = errors[e];
                fake.fail_at = n;
                fake.calls = 0;
                const akv_status status = what == 0 ? run(&w, false, &diag) : upload_again(&w, what == 1 ? 2 : what == 2 ? 5 : 7, &diag);
                fake.fail_at = 0;
                if (status == AKV_OK) {
                    CHECK_MSG(n > 2 && fake.calls < n, "call %lu of %lu failed and nobody noticed", n, fake.calls);
                    break;
                }
                const bool kernels = strstr(diag.message, "no kernels for compute capability") != NULL ||
                                     strstr(diag.message, "too little shared memory") != NULL;
                CHECK_MSG(status == AKV_E_DEVICE ? strstr(diag.message, "CUDA says") != NULL
                                                 : status == AKV_E_UNSUPPORTED && kernels && e > 0,
                          "call %lu: %s, \"%s\"", n, akv_status_str(status), diag.message);
                failed++;
            }
    printf("  %lu calls of CUDA failed\n", failed);
    CHECK(failed > 60);
    world_free(&w);
}

static void memory_fails(void)
{
    unsigned long failed = 0;
    world w;
    world_mixed(&w);
    for (int what = 0; what < 4; what++)
        for (uint64_t n = 1; n < 100; n++) {
            akv_diag diag = {AKV_OK, ""};
            allocations = 0;
            fail_allocation = n;
            const akv_status status = what == 0 ? run(&w, false, &diag) : upload_again(&w, what == 1 ? 2 : what == 2 ? 5 : 7, &diag);
            fail_allocation = 0;
            if (status == AKV_OK)
                break;
            CHECK_MSG(status == AKV_E_NO_MEMORY && strlen(diag.message) > 10, "allocation %llu: %s, \"%s\"", (unsigned long long)n,
                      akv_status_str(status), diag.message);
            failed++;
        }
    printf("  %lu allocations failed\n", failed);
    CHECK(failed >= 6);
    world_free(&w);
}

/* Devices that cannot do it, and buffers that are too small. */
static void refusals(void)
{
    akv_diag diag = {AKV_OK, ""};
    world w;
    world_mixed(&w);
    fake.major = 7;
    CHECK_STATUS(run(&w, false, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK(strstr(diag.message, "compute capability 7.0") != NULL);
    fake.major = 9;
    fake.span_shared = 232449;
    CHECK_STATUS(run(&w, false, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK(strstr(diag.message, "232449 bytes of shared memory") != NULL);
    fake.span_shared = 200000;
    fake.paper_shared = 400000;
    CHECK_STATUS(run(&w, false, &diag), AKV_E_UNSUPPORTED, &diag);
    CHECK(strstr(diag.message, "shared memory") != NULL);
    fake.paper_shared = 200000;
    fake.ordinal = 1;
    CHECK_STATUS(run(&w, false, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK(strstr(diag.message, "lies on device 0; device 1 is current") != NULL);
    fake.ordinal = 0;

    size_t own_bytes = 0, scratch_bytes = 0, all = 0;
    akv_cuda_plan *plan = NULL;
    CHECK_STATUS(akv_cuda_plan_bytes(&w.batch, &own_bytes, &scratch_bytes, &diag), AKV_OK, &diag);
    CHECK_STATUS(akv_cuda_workspace_bytes(&w.batch, &all, &diag), AKV_OK, &diag);
    CHECK(all == own_bytes + scratch_bytes);
    uint8_t *memory = buffer(all);
    CHECK_STATUS(akv_cuda_plan_create(&w.batch, memory, all - 1, NULL, &plan, &diag), AKV_E_NO_SPACE, &diag);
    CHECK_STATUS(akv_cuda_plan_create(&w.batch, memory + 64, all, NULL, &plan, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cuda_plan_create_shared(&w.batch, memory, own_bytes - 1, memory, scratch_bytes, NULL, &plan, &diag), AKV_E_NO_SPACE,
                 &diag);
    CHECK_STATUS(akv_cuda_plan_create_shared(&w.batch, memory, own_bytes, memory, scratch_bytes - 1, NULL, &plan, &diag), AKV_E_NO_SPACE,
                 &diag);
    CHECK(plan == NULL);
    CHECK_STATUS(akv_cuda_plan_create(&w.batch, memory, all, NULL, &plan, &diag), AKV_OK, &diag);
    akv_cuda_plan_destroy(plan);
    free(memory);
    world_free(&w);
}

int main(int argc, char **argv)
{
    TEST_INIT(argc, argv);
    TEST(batches);
    TEST(cuda_fails);
    TEST(memory_fails);
    TEST(refusals);
    return TEST_DONE();
}
