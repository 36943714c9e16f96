/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda_batch.c - what only the GPU's interface has: batches of sequences of different lengths, tails whose length is read
 * on the device, CUDA graphs, 16-bit outputs, and every refusal with its status and sentence.
 */
#include "device.h"
#include "akv_test.h"

enum { H = 2, G = 4, D = 64, SEQUENCES = 5, TAIL = 40 };

static const uint64_t lengths[SEQUENCES][2] = {{0, 0}, {700, 0}, {2100, 90}, {64, 0}, {20, 1500}}; /* of two segments */
static const uint64_t tails[SEQUENCES] = {TAIL, 0, 7, 1, TAIL};

typedef struct world {
    akv_segment *segments[SEQUENCES][2];
    akv_cuda_segment *handles[SEQUENCES][2];
    void *memory[SEQUENCES][2], *keys, *values, *queries, *ws;
    akv_cuda_sequence sequences[SEQUENCES];
    akv_cuda_batch batch;
    akv_cuda_step step;
    akv_cuda_plan *plan;
    size_t ws_bytes;
    float *out; /* device */
} world;

static uint16_t *random_bf16(uint64_t n, uint64_t seed)
{
    akv_rng rng = akv_rng_stream(seed, 5, 5);
    uint16_t *x = must(malloc(n * sizeof *x));
    for (uint64_t i = 0; i < n; i++)
        x[i] = akv_f32_to_bf16((float)random_gauss(&rng));
    return x;
}

static void *device_random(uint64_t n, uint64_t seed)
{
    uint16_t *x = random_bf16(n, seed);
    void *memory = device_copy(x, n * sizeof *x);
    free(x);
    return memory;
}

static void world_make(world *w)
{
    memset(w, 0, sizeof *w);
    akv_diag diag = {0};
    w->keys = device_random(SEQUENCES * H * TAIL * D, 1);
    w->values = device_random(SEQUENCES * H * TAIL * D, 2);
    w->queries = device_random(SEQUENCES * H * G * D, 3);
    for (int q = 0; q < SEQUENCES; q++) {
        akv_cuda_sequence *s = &w->sequences[q];
        int32_t at = 0;
        for (int i = 0; i < 2 && lengths[q][i] > 0; i++) {
            spec sp = {.name = "batch", .S = lengths[q][i], .H = H, .G = G, .dk = D, .dv = D, .W = 1, .rotary = D, .first_position = at};
            at += (int32_t)sp.S;
            uint32_t anchors = sp.S < 40 ? (uint32_t)sp.S : 40;
            w->segments[q][i] = q % 2 ? random_ladder_segment(&sp, anchors, 0.5, 10 * (uint64_t)q + (uint64_t)i)
                                      : random_segment(&sp, anchors, 0.5, 0, 10 * (uint64_t)q + (uint64_t)i);
            size_t bytes = 0;
            CHECK_STATUS(akv_cuda_upload_bytes(w->segments[q][i], &bytes, &diag), AKV_OK, &diag);
            w->memory[q][i] = device_new(bytes);
            CHECK_STATUS(akv_cuda_upload(w->segments[q][i], w->memory[q][i], bytes, NULL, &w->handles[q][i], &diag), AKV_OK, &diag);
            s->num_segments++;
        }
        s->segments = (const akv_cuda_segment *const *)w->handles[q];
        s->tail_tokens = tails[q];
        s->tail_keys = (const uint16_t *)w->keys + (size_t)q * H * TAIL * D;
        s->tail_values = (const uint16_t *)w->values + (size_t)q * H * TAIL * D;
        s->tail_stride_head[0] = s->tail_stride_head[1] = TAIL * D;
        s->tail_stride_token[0] = s->tail_stride_token[1] = D;
    }
    akv_cuda_batch_init(&w->batch);
    w->batch.num_kv_heads = H;
    w->batch.gqa_group = G;
    w->batch.head_dim_k = w->batch.head_dim_v = D;
    w->batch.num_sequences = SEQUENCES;
    w->batch.sequences = w->sequences;
    w->batch.out_dtype = AKV_F32;
    w->batch.sm_scale = 0.125;
    w->out = device_new(SEQUENCES * H * G * D * sizeof(float));
    akv_cuda_step_init(&w->step);
    w->step.queries = w->queries;
    w->step.query_stride_sequence = H * G * D;
    w->step.query_stride_head = w->step.query_stride_token = D;
    w->step.out = w->out;
    w->step.out_stride_sequence = H * G * D;
    w->step.out_stride_head = w->step.out_stride_token = D;
}

static void world_plan(world *w)
{
    akv_diag diag = {0};
    CHECK_STATUS(akv_cuda_workspace_bytes(&w->batch, &w->ws_bytes, &diag), AKV_OK, &diag);
    w->ws = device_new(w->ws_bytes);
    CHECK_STATUS(akv_cuda_plan_create(&w->batch, w->ws, w->ws_bytes, NULL, &w->plan, &diag), AKV_OK, &diag);
}

static void world_free(world *w)
{
    akv_cuda_plan_destroy(w->plan);
    for (int q = 0; q < SEQUENCES; q++)
        for (int i = 0; i < 2; i++) {
            akv_cuda_segment_release(w->handles[q][i]);
            akv_segment_release(w->segments[q][i]);
            device_free(w->memory[q][i]);
        }
    device_free(w->keys);
    device_free(w->values);
    device_free(w->queries);
    device_free(w->ws);
    device_free(w->out);
}

static void run_step(world *w, float *host)
{
    akv_diag diag = {0};
    MUST_CUDA(cudaMemset(w->out, 0xff, SEQUENCES * H * G * D * sizeof(float)));
    CHECK_STATUS(akv_cuda_attend(w->plan, &w->step, NULL, &diag), AKV_OK, &diag);
    MUST_CUDA(cudaMemcpy(host, w->out, SEQUENCES * H * G * D * sizeof(float), cudaMemcpyDeviceToHost));
}

/* A sequence's rows do not depend on its neighbours: the CPU, one sequence at a time, gives the same. */
static void ragged_with(double softcap)
{
    world w;
    world_make(&w);
    w.batch.logit_softcap = softcap;
    world_plan(&w);
    float *got = must(malloc(SEQUENCES * H * G * D * sizeof *got)), want[H * G * D];
    run_step(&w, got);
    uint16_t *keys = random_bf16(SEQUENCES * H * TAIL * D, 1), *values = random_bf16(SEQUENCES * H * TAIL * D, 2),
             *queries = random_bf16(SEQUENCES * H * G * D, 3);
    for (int q = 0; q < SEQUENCES; q++) {
        akv_attend_params p;
        akv_attend_params_init(&p);
        p.num_kv_heads = H;
        p.gqa_group = G;
        p.head_dim_k = p.head_dim_v = D;
        p.queries = akv_tensor_contiguous(queries + (size_t)q * H * G * D, AKV_BF16, 1, D);
        p.segments = (const akv_segment *const *)w.segments[q];
        p.num_segments = w.sequences[q].num_segments;
        p.tail_tokens = tails[q];
        p.tail_keys = akv_tensor_contiguous(keys + (size_t)q * H * TAIL * D, AKV_BF16, TAIL, D);
        p.tail_values = akv_tensor_contiguous(values + (size_t)q * H * TAIL * D, AKV_BF16, TAIL, D);
        p.sm_scale = 0.125;
        p.logit_softcap = softcap;
        p.out = want;
        p.out_stride_head = p.out_stride_token = D;
        size_t bytes = 0;
        akv_diag diag = {0};
        CHECK_STATUS(akv_attend_workspace_bytes(&p, &bytes, &diag), AKV_OK, &diag);
        void *ws = must(aligned_alloc(64, (bytes + 63) / 64 * 64));
        CHECK_STATUS(akv_attend(&p, ws, bytes, &diag), AKV_OK, &diag);
        free(ws);
        for (int r = 0; r < H * G; r++) {
            double off = 0, size = 0;
            for (int i = 0; i < D; i++) {
                off += pow(got[(q * H * G + r) * D + i] - want[r * D + i], 2);
                size += pow(want[r * D + i], 2);
            }
            /* operands of 11 bits: a logit may be off by 1e-3 of its norms' product (about 64 / 8), a weight by as much */
            CHECK_NEAR(sqrt(off), 0, 8e-3 * sqrt(size), "softcap %g sequence %d row %d", softcap, q, r);
        }
    }
    free(keys);
    free(values);
    free(queries);
    free(got);
    world_free(&w);
}

/* What compute-sanitizer is run on: capped too, where other threads cap than weigh. */
static void ragged(void)
{
    ragged_with(0);
    ragged_with(5);
}

/* Tail lengths on the device cut the tail as a shorter tail_tokens does; and a captured graph reads them anew. */
static void lengths_on_device_and_graph(void)
{
    world w, shorter;
    world_make(&w);
    int32_t said[SEQUENCES] = {3, 0, 7, 0, 17};
    int32_t *on_device = device_copy(said, sizeof said);
    w.batch.tail_lengths = on_device;
    world_plan(&w);
    world_make(&shorter);
    for (int q = 0; q < SEQUENCES; q++)
        shorter.sequences[q].tail_tokens = (uint64_t)said[q];
    world_plan(&shorter);
    size_t n = SEQUENCES * H * G * D;
    float *got = must(malloc(n * sizeof *got)), *want = must(malloc(n * sizeof *want));
    run_step(&w, got);
    run_step(&shorter, want);
    double worst = 0;
    for (size_t i = 0; i < n; i++)
        worst = fmax(worst, fabs(got[i] - want[i]));
    CHECK_NEAR(worst, 0, 1e-6, "lengths read on the device");

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    akv_diag diag = {0};
    MUST_CUDA(cudaStreamCreate(&stream));
    MUST_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK_STATUS(akv_cuda_attend(w.plan, &w.step, stream, &diag), AKV_OK, &diag);
    MUST_CUDA(cudaStreamEndCapture(stream, &graph));
    MUST_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int turn = 0; turn < 2; turn++) {
        for (int q = 0; q < SEQUENCES; q++) {
            said[q] = turn == 0 ? said[q] : (int32_t)tails[q];
            shorter.sequences[q].tail_tokens = (uint64_t)said[q];
        }
        MUST_CUDA(cudaMemcpy(on_device, said, sizeof said, cudaMemcpyHostToDevice));
        akv_cuda_plan_destroy(shorter.plan);
        device_free(shorter.ws);
        world_plan(&shorter);
        run_step(&shorter, want);
        MUST_CUDA(cudaMemset(w.out, 0xff, n * sizeof(float)));
        MUST_CUDA(cudaGraphLaunch(exec, stream));
        MUST_CUDA(cudaStreamSynchronize(stream));
        MUST_CUDA(cudaMemcpy(got, w.out, n * sizeof(float), cudaMemcpyDeviceToHost));
        worst = 0;
        for (size_t i = 0; i < n; i++)
            worst = fmax(worst, fabs(got[i] - want[i]));
        CHECK_NEAR(worst, 0, 1e-6, "graph replay %d", turn);
    }
    MUST_CUDA(cudaGraphExecDestroy(exec));
    MUST_CUDA(cudaGraphDestroy(graph));
    MUST_CUDA(cudaStreamDestroy(stream));
    free(got);
    free(want);
    device_free(on_device);
    world_free(&w);
    world_free(&shorter);
}

/* A token goes to the last place of its sequence's length, and nowhere else; where that is, is read when a graph is run. */
static void appended(void)
{
    world w;
    world_make(&w);
    const int32_t said[2][SEQUENCES] = {{3, 0, 7, 1, 17}, {4, 1, 8, 0, TAIL}}; /* the 1 and the 8 are more than those tails hold */
    int32_t *on_device = device_copy(said[0], sizeof said[0]);
    w.batch.tail_lengths = on_device;
    world_plan(&w);
    const size_t places = SEQUENCES * H * TAIL * D, bytes = places * sizeof(uint16_t);
    uint16_t *want[2], *tokens[2], *got = must(malloc(bytes));
    void *memory[2] = {w.keys, w.values}, *given[2];
    akv_diag diag = {0};
    for (int side = 0; side < 2; side++) {
        want[side] = random_bf16(places, 1 + (uint64_t)side);
        tokens[side] = random_bf16(SEQUENCES * H * 2 * D, 11 + (uint64_t)side);
        given[side] = device_copy(tokens[side], SEQUENCES * H * 2 * D * sizeof(uint16_t));
    }
    akv_cuda_token token;
    akv_cuda_token_init(&token);
    token.keys = given[0];
    token.values = given[1];
    for (int side = 0; side < 2; side++) {
        token.stride_sequence[side] = H * 2 * D;
        token.stride_head[side] = side == 0 ? 2 * D : D; /* keys with a gap between heads, values without */
    }
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    MUST_CUDA(cudaStreamCreate(&stream));
    MUST_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK_STATUS(akv_cuda_append(w.plan, &token, stream, &diag), AKV_OK, &diag);
    MUST_CUDA(cudaStreamEndCapture(stream, &graph));
    MUST_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int turn = 0; turn < 2; turn++) {
        MUST_CUDA(cudaMemcpy(on_device, said[turn], sizeof said[turn], cudaMemcpyHostToDevice));
        if (turn == 0)
            CHECK_STATUS(akv_cuda_append(w.plan, &token, stream, &diag), AKV_OK, &diag);
        else
            MUST_CUDA(cudaGraphLaunch(exec, stream));
        MUST_CUDA(cudaStreamSynchronize(stream));
        for (int side = 0; side < 2; side++) {
            for (int q = 0; q < SEQUENCES; q++)
                for (int h = 0; h < H && said[turn][q] > 0 && (uint64_t)said[turn][q] <= tails[q]; h++)
                    memcpy(want[side] + ((size_t)(q * H + h) * TAIL + (size_t)said[turn][q] - 1) * D,
                           tokens[side] + q * token.stride_sequence[side] + h * token.stride_head[side], D * sizeof(uint16_t));
            MUST_CUDA(cudaMemcpy(got, memory[side], bytes, cudaMemcpyDeviceToHost));
            CHECK_MSG(memcmp(got, want[side], bytes) == 0, "side %d, turn %d: the tails are not as appended to", side, turn);
        }
    }
    MUST_CUDA(cudaGraphExecDestroy(exec));
    MUST_CUDA(cudaGraphDestroy(graph));
    MUST_CUDA(cudaStreamDestroy(stream));
    for (int side = 0; side < 2; side++) {
        free(want[side]);
        free(tokens[side]);
        device_free(given[side]);
    }
    free(got);
    device_free(on_device);
    world_free(&w);
}

static void outputs_of_16_bits(void)
{
    world w;
    world_make(&w);
    world_plan(&w);
    size_t n = SEQUENCES * H * G * D;
    float *want = must(malloc(n * sizeof *want));
    uint16_t *got = must(malloc(n * sizeof *got));
    run_step(&w, want);
    for (int dtype = AKV_F16; dtype <= AKV_BF16; dtype++) {
        akv_cuda_plan_destroy(w.plan);
        device_free(w.ws);
        w.batch.out_dtype = (akv_dtype)dtype;
        world_plan(&w);
        akv_diag diag = {0};
        CHECK_STATUS(akv_cuda_attend(w.plan, &w.step, NULL, &diag), AKV_OK, &diag);
        MUST_CUDA(cudaMemcpy(got, w.out, n * sizeof *got, cudaMemcpyDeviceToHost));
        size_t differ = 0;
        for (size_t i = 0; i < n; i++)
            differ += got[i] != (dtype == AKV_F16 ? akv_f32_to_f16(want[i]) : akv_f32_to_bf16(want[i]));
        CHECK_MSG(differ == 0, "%zu outputs of dtype %d are not the rounded f32 ones", differ, dtype);
    }
    free(want);
    free(got);
    world_free(&w);
}

/* Two plans that share their scratch memory, step by step in turn, give what plans of their own give. */
static void shared_scratch(void)
{
    world w, other;
    world_make(&w);
    world_plan(&w);
    world_make(&other);
    other.batch.sm_scale = 0.25; /* so that what one leaves behind is of no use to the other */
    world_plan(&other);
    size_t own = 0, scratch = 0, n = SEQUENCES * H * G * D;
    akv_diag diag = {0};
    CHECK_STATUS(akv_cuda_plan_bytes(&w.batch, &own, &scratch, &diag), AKV_OK, &diag);
    CHECK_MSG(own > 0 && scratch > 0 && own + scratch == w.ws_bytes, "%zu + %zu bytes, %zu together", own, scratch, w.ws_bytes);
    float *want[2] = {must(malloc(n * sizeof(float))), must(malloc(n * sizeof(float)))}, *got = must(malloc(n * sizeof *got));
    run_step(&w, want[0]);
    run_step(&other, want[1]);
    void *mine[2] = {device_new(own), device_new(own)}, *both = device_new(scratch);
    world *worlds[2] = {&w, &other};
    akv_cuda_plan *refused = NULL;
    CHECK_STATUS(akv_cuda_plan_create_shared(&w.batch, mine[0], own - 1, both, scratch, NULL, &refused, &diag), AKV_E_NO_SPACE, &diag);
    CHECK_STATUS(akv_cuda_plan_create_shared(&w.batch, mine[0], own, both, scratch - 1, NULL, &refused, &diag), AKV_E_NO_SPACE, &diag);
    CHECK_STATUS(akv_cuda_plan_create_shared(&w.batch, mine[0], own, NULL, scratch, NULL, &refused, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    CHECK_STATUS(akv_cuda_plan_bytes(&w.batch, &own, NULL, &diag), AKV_E_INVALID_ARGUMENT, &diag);
    for (int i = 0; i < 2; i++) {
        akv_cuda_plan_destroy(worlds[i]->plan);
        worlds[i]->plan = NULL;
        CHECK_STATUS(akv_cuda_plan_create_shared(&worlds[i]->batch, mine[i], own, both, scratch, NULL, &worlds[i]->plan, &diag), AKV_OK,
                     &diag);
    }
    for (int turn = 0; turn < 4; turn++) {
        run_step(worlds[turn % 2], got);
        CHECK_MSG(memcmp(got, want[turn % 2], n * sizeof *got) == 0, "turn %d differs", turn);
    }
    for (int i = 0; i < 2; i++) {
        free(want[i]);
        world_free(worlds[i]);
        device_free(mine[i]);
    }
    free(got);
    device_free(both);
}

/* Kernels keep the shared memory that an earlier plan of more anchors takes when a smaller plan is made after it. */
static void smaller_plan_later(void)
{
    enum { LARGE = 1200, SMALL = 20 };
    float *first = must(malloc(H * G * D * sizeof *first)), *again = must(malloc(H * G * D * sizeof *again));
    akv_cuda_plan *plans[2] = {NULL, NULL};
    void *memory[2], *ws[2], *queries = device_random(H * G * D, 3), *out = device_new(H * G * D * sizeof(float));
    akv_segment *segments[2];
    akv_cuda_segment *handles[2];
    akv_diag diag = {0};
    akv_cuda_step step;
    akv_cuda_step_init(&step);
    step.queries = queries;
    step.query_stride_sequence = step.out_stride_sequence = H * G * D;
    step.query_stride_head = step.query_stride_token = step.out_stride_head = step.out_stride_token = D;
    step.out = out;
    for (int i = 0; i < 2; i++) {
        spec sp = {.name = "shared", .S = 5000, .H = H, .G = G, .dk = D, .dv = D, .W = 1, .rotary = D};
        segments[i] = random_ladder_segment(&sp, i == 0 ? LARGE : SMALL, 0.5, 77 + (uint64_t)i);
        size_t bytes = 0;
        CHECK_STATUS(akv_cuda_upload_bytes(segments[i], &bytes, &diag), AKV_OK, &diag);
        memory[i] = device_new(bytes);
        CHECK_STATUS(akv_cuda_upload(segments[i], memory[i], bytes, NULL, &handles[i], &diag), AKV_OK, &diag);
        const akv_cuda_segment *const list[1] = {handles[i]};
        akv_cuda_sequence sequence = {.segments = list, .num_segments = 1};
        akv_cuda_batch batch;
        akv_cuda_batch_init(&batch);
        batch.num_kv_heads = H;
        batch.gqa_group = G;
        batch.head_dim_k = batch.head_dim_v = D;
        batch.num_sequences = 1;
        batch.sequences = &sequence;
        batch.out_dtype = AKV_F32;
        batch.sm_scale = 0.125;
        CHECK_STATUS(akv_cuda_workspace_bytes(&batch, &bytes, &diag), AKV_OK, &diag);
        ws[i] = device_new(bytes);
        CHECK_STATUS(akv_cuda_plan_create(&batch, ws[i], bytes, NULL, &plans[i], &diag), AKV_OK, &diag);
        CHECK_STATUS(akv_cuda_attend(plans[0], &step, NULL, &diag), AKV_OK, &diag);
        MUST_CUDA(cudaMemcpy(i == 0 ? first : again, out, H * G * D * sizeof(float), cudaMemcpyDeviceToHost));
    }
    CHECK(memcmp(first, again, H * G * D * sizeof *first) == 0);
    for (int i = 0; i < 2; i++) {
        akv_cuda_plan_destroy(plans[i]);
        akv_cuda_segment_release(handles[i]);
        akv_segment_release(segments[i]);
        device_free(memory[i]);
        device_free(ws[i]);
    }
    device_free(queries);
    device_free(out);
    free(first);
    free(again);
}

static void refusals(void)
{
    world w;
    world_make(&w);
    world_plan(&w);
    akv_diag diag = {0};
    size_t bytes = 0;
    akv_cuda_plan *plan = NULL;
    akv_cuda_segment *segment = NULL;
#define REFUSED(want, expr)                                                                                            \
    do {                                                                                                               \
        diag.message[0] = 0;                                                                                           \
        CHECK_STATUS(expr, want, &diag);                                                                               \
        CHECK_MSG(diag.message[0] != 0, "no message after %s", #expr);                                                 \
    } while (0)
#define BAD_BATCH(want, edit)                                                                                          \
    do {                                                                                                               \
        akv_cuda_batch batch = w.batch;                                                                                \
        edit;                                                                                                          \
        REFUSED(want, akv_cuda_plan_create(&batch, w.ws, w.ws_bytes, NULL, &plan, &diag));                             \
    } while (0)
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.struct_size = 0);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.num_kv_heads = 0);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.num_queries = 0);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.num_sequences = 0);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.sequences = NULL);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.sm_scale = NAN);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.logit_softcap = -1);
    BAD_BATCH(AKV_E_INVALID_ARGUMENT, batch.query_dtype = (akv_dtype)9);
    BAD_BATCH(AKV_E_UNSUPPORTED, batch.gqa_group = 17);
    BAD_BATCH(AKV_E_UNSUPPORTED, batch.head_dim_k = 258);
    BAD_BATCH(AKV_E_MISMATCH, batch.head_dim_v = 32);
    BAD_BATCH(AKV_E_MISMATCH, batch.gqa_group = 2);
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_plan_create(NULL, w.ws, w.ws_bytes, NULL, &plan, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_plan_create(&w.batch, NULL, w.ws_bytes, NULL, &plan, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_plan_create(&w.batch, (uint8_t *)w.ws + 16, w.ws_bytes, NULL, &plan, &diag));
    REFUSED(AKV_E_NO_SPACE, akv_cuda_plan_create(&w.batch, w.ws, w.ws_bytes - 1, NULL, &plan, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_workspace_bytes(&w.batch, NULL, &diag));
    const void *keys = w.sequences[0].tail_keys;
    w.sequences[0].tail_keys = NULL;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_workspace_bytes(&w.batch, &bytes, &diag));
    w.sequences[0].tail_keys = keys;
    w.sequences[0].num_segments = 1; /* a NULL handle */
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_workspace_bytes(&w.batch, &bytes, &diag));
    w.sequences[0].num_segments = 0;
    CHECK_MSG(plan == NULL, "a refused call gave a plan");

    akv_cuda_step step = w.step;
    step.queries = NULL;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_attend(w.plan, &step, NULL, &diag));
    step = w.step;
    step.struct_size = 0;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_attend(w.plan, &step, NULL, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_attend(NULL, &w.step, NULL, &diag));

    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_upload_bytes(NULL, &bytes, &diag));
    CHECK_STATUS(akv_cuda_upload_bytes(w.segments[1][0], &bytes, &diag), AKV_OK, &diag);
    REFUSED(AKV_E_NO_SPACE, akv_cuda_upload(w.segments[1][0], w.memory[1][0], bytes - 1, NULL, &segment, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_upload(w.segments[1][0], NULL, bytes, NULL, &segment, &diag));
    akv_cuda_token token;
    akv_cuda_token_init(&token);
    token.keys = token.values = w.queries;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_append(w.plan, &token, NULL, &diag)); /* no lengths to go by */
    CHECK(strstr(diag.message, "tail_lengths") != NULL);
    token.values = NULL;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_append(w.plan, &token, NULL, &diag));
    token.struct_size = 0;
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_append(w.plan, &token, NULL, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_append(NULL, &token, NULL, &diag));
    REFUSED(AKV_E_INVALID_ARGUMENT, akv_cuda_append(w.plan, NULL, NULL, &diag));
    spec wide = {.name = "wide", .S = 50, .H = 1, .G = 1, .dk = 320, .dv = 320, .W = 1, .rotary = 320};
    akv_segment *too_wide = random_segment(&wide, 10, 0.5, 0, 1);
    REFUSED(AKV_E_UNSUPPORTED, akv_cuda_upload_bytes(too_wide, &bytes, &diag));
    akv_segment_release(too_wide);
    CHECK_MSG(segment == NULL, "a refused upload gave a handle");

    float *out = must(malloc(SEQUENCES * H * G * D * sizeof *out));
    run_step(&w, out); /* and everything still works */
    CHECK(isfinite(out[0]));
    free(out);
    world_free(&w);
}

int main(int argc, char **argv)
{
    need_device();
    TEST_INIT(argc, argv);
    TEST(ragged);
    TEST(lengths_on_device_and_graph);
    TEST(appended);
    TEST(outputs_of_16_bits);
    TEST(shared_scratch);
    TEST(smaller_plan_later);
    TEST(refusals);
    return TEST_DONE();
}
