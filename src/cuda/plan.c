/* SPDX-License-Identifier: Apache-2.0 */
/* plan.c - a batch checked and cut into items on the host; a step is then only launches. */
#include "cuda/host.h"
#include "core/ladder.h"
#include "core/sizes.h"

#include <stdlib.h>

struct akv_cuda_plan {
    akv_cuda_call call;
    int ordinal;
};

/* Where things lie in the workspace. */
typedef struct places {
    size_t items, span_items, first_item, pools, tails, first_slot, max, sum, acc, prepared, total;
    size_t paper_items;
    uint64_t num_items, num_slots, num_span_items, num_pools, num_paper_items;
    uint32_t num_span_blocks, row_chunk, fast_steps, prepared_bytes;
    uint32_t num_paper_blocks, paper_row_chunk, paper_fast_steps, paper_shared_anchors;
    size_t span_shared, queries_shared, paper_shared;
} places;

/* Blocks that fill a GPU: one on each of an H200's 132 processors. Fixed, so that items depend on shapes only. */
#define SPAN_BLOCKS AKV_CUDA_BLOCKS

static bool is_packed(const akv_cuda_segment *segment)
{
    return segment != NULL && segment->packed.total_bytes > 0;
}

static bool is_paper(const akv_cuda_segment *segment)
{
    return segment != NULL && segment->paper.total_bytes > 0;
}

void akv_cuda_batch_init(akv_cuda_batch *batch)
{
    memset(batch, 0, sizeof *batch);
    batch->struct_size = sizeof *batch;
    batch->gqa_group = 1;
    batch->num_queries = 1;
    batch->tail_dtype = batch->query_dtype = batch->out_dtype = AKV_BF16;
}

void akv_cuda_step_init(akv_cuda_step *step)
{
    memset(step, 0, sizeof *step);
    step->struct_size = sizeof *step;
}

void akv_cuda_token_init(akv_cuda_token *token)
{
    memset(token, 0, sizeof *token);
    token->struct_size = sizeof *token;
}

static akv_status check_segment(const akv_cuda_batch *b, uint32_t index, const akv_cuda_segment *s, akv_diag *diag)
{
    if (s == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "a segment of sequence %u is NULL", index);
    const akv_header *h = &s->header;
    if (h->num_kv_heads != b->num_kv_heads || h->gqa_group != b->gqa_group || h->head_dim[0] != b->head_dim_k ||
        h->head_dim[1] != b->head_dim_v)
        return akv_fail(diag, AKV_E_MISMATCH,
                        "a segment of sequence %u holds %u KV heads x group %u, head_dim %u/%u; the batch has %u x %u, %u/%u", index,
                        h->num_kv_heads, h->gqa_group, h->head_dim[0], h->head_dim[1], b->num_kv_heads, b->gqa_group,
                        b->head_dim_k, b->head_dim_v);
    return AKV_OK;
}

static akv_status check_batch(const akv_cuda_batch *b, akv_diag *diag)
{
    if (b == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "batch must not be NULL");
    if (b->struct_size < sizeof *b)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_cuda_batch has struct_size %zu; call akv_cuda_batch_init first", b->struct_size);
    akv_shape shape;
    akv_shape_init(&shape);
    shape.num_tokens = 1;
    shape.num_kv_heads = b->num_kv_heads;
    shape.gqa_group = b->gqa_group;
    shape.head_dim_k = b->head_dim_k;
    shape.head_dim_v = b->head_dim_v;
    AKV_TRY(akv_check_shape(&shape, diag));
    if (b->head_dim_k > AKV_CUDA_MAX_HEAD_DIM || b->head_dim_v > AKV_CUDA_MAX_HEAD_DIM)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "head_dim is %u/%u; the GPU kernels cover at most %u", b->head_dim_k, b->head_dim_v,
                        AKV_CUDA_MAX_HEAD_DIM);
    if (b->gqa_group > AKV_CUDA_MAX_GROUP)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "gqa_group is %u; the GPU kernels cover at most %u", b->gqa_group, AKV_CUDA_MAX_GROUP);
    if (b->num_kv_heads > 65535)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "num_kv_heads is %u; the GPU kernels cover at most 65535", b->num_kv_heads);
    if (b->num_queries == 0 || b->num_queries > 4096)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_queries is %u; it must be 1..4096", b->num_queries);
    if (b->num_sequences == 0 || b->num_sequences > 65535)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "num_sequences is %u; it must be 1..65535", b->num_sequences);
    if (b->sequences == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sequences must not be NULL");
    if ((unsigned)b->tail_dtype > AKV_BF16 || (unsigned)b->query_dtype > AKV_BF16 || (unsigned)b->out_dtype > AKV_BF16)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "dtypes are %d, %d, %d; they must be AKV_F32, AKV_F16 or AKV_BF16",
                        (int)b->tail_dtype, (int)b->query_dtype, (int)b->out_dtype);
    if (!isfinite(b->sm_scale) || !(b->logit_softcap >= 0) || !isfinite(b->logit_softcap))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sm_scale is %g and logit_softcap %g; both must be finite, the cap >= 0",
                        b->sm_scale, b->logit_softcap);
    for (uint32_t i = 0; i < b->num_sequences; i++) {
        const akv_cuda_sequence *q = &b->sequences[i];
        if (q->num_segments > 0 && q->segments == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sequence %u has %u segments and no list of them", i, q->num_segments);
        for (uint32_t s = 0; s < q->num_segments; s++)
            AKV_TRY(check_segment(b, i, q->segments[s], diag));
        if (q->tail_tokens > (1u << 30))
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sequence %u has a tail of %llu tokens; at most 2^30 are possible", i,
                            (unsigned long long)q->tail_tokens);
        if (q->tail_tokens > 0 && (q->tail_keys == NULL || q->tail_values == NULL))
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "sequence %u has a tail of %llu tokens without keys or values", i,
                            (unsigned long long)q->tail_tokens);
    }
    return AKV_OK;
}

/* The lists of a batch in order; where a pointer is NULL they are only counted. */
typedef struct lists {
    akv_item *items;
    akv_span_item *span_items;
    uint32_t *first_item;
    akv_pool *pools;
    uint32_t *first_slot;
    akv_paper_item *paper_items;
    uint32_t *paper_first_item;
} lists;

/*
 * The spans of all packed segments and heads, one after the other, cut into equal shares: one for each block. A share ends where
 * its part of all tokens ends, to half a span; a head that two blocks share becomes two items.
 */
typedef struct shares {
    uint64_t tokens, done; /* of all spans; of those dealt out */
    uint32_t blocks, block;
} shares;

/* Spans of one head of a segment and their tokens; 0 when the segment is not of this kind. */
static uint32_t spans_of(const akv_cuda_segment *segment, bool paper, uint32_t *tokens)
{
    if (paper ? !is_paper(segment) : !is_packed(segment))
        return 0;
    *tokens = paper ? segment->paper.span_tokens : segment->packed.span_tokens;
    return paper ? segment->paper.num_spans : segment->packed.num_spans;
}

/*
 * What an item costs besides its spans, in tokens: tables, queries, anchors, and what it leaves. A block whose share crosses
 * from one head to the next pays it twice, and the slowest block is what a step takes.
 */
#define ITEM_TOKENS 1024u
#define MOST_SPANS_WEIGHED 16384u

/* The next spans of a head for one block, from `span` of `num_spans`; says whether the block's share is full then. */
static uint32_t take_spans(shares *share, uint32_t span, uint32_t num_spans, uint32_t tokens, bool *full)
{
    uint32_t n = 0;
    while (span + n < num_spans && (share->block == share->blocks || n == 0 ||
                                    (2 * share->done + tokens) * share->blocks <= 2 * share->tokens * share->block)) {
        share->done += tokens;
        n++;
    }
    *full = share->block < share->blocks &&
            (2 * share->done + tokens) * share->blocks > 2 * share->tokens * share->block;
    return n;
}

/* Cost of the slowest of `blocks` blocks. */
static uint64_t slowest(const akv_cuda_batch *b, bool paper, uint64_t all_tokens, uint32_t blocks)
{
    shares share = {all_tokens, 0, blocks, 1};
    uint64_t cost = 0, most = 0;
    for (uint32_t q = 0; q < b->num_sequences; q++)
        for (uint32_t s = 0; s < b->sequences[q].num_segments; s++) {
            uint32_t tokens = 0;
            const uint32_t num_spans = spans_of(b->sequences[q].segments[s], paper, &tokens);
            for (uint32_t head = 0; head < b->num_kv_heads; head++)
                for (uint32_t span = 0, n; span < num_spans; span += n) {
                    bool full = false;
                    n = take_spans(&share, span, num_spans, tokens, &full);
                    cost += ITEM_TOKENS + (uint64_t)n * tokens;
                    most = cost > most ? cost : most;
                    if (full) {
                        share.block++;
                        cost = 0;
                    }
                }
        }
    return most;
}

static void count_shares(const akv_cuda_batch *b, bool paper, uint32_t row_chunk, shares *out)
{
    uint64_t spans = 0;
    memset(out, 0, sizeof *out);
    for (uint32_t q = 0; q < b->num_sequences; q++)
        for (uint32_t s = 0; s < b->sequences[q].num_segments; s++) {
            uint32_t tokens = 0;
            const uint64_t n = (uint64_t)spans_of(b->sequences[q].segments[s], paper, &tokens) * b->num_kv_heads;
            spans += n;
            out->tokens += n * tokens;
        }
    const uint64_t chunks = row_chunk == 0 ? 1 : akv_div_up((uint64_t)b->gqa_group * b->num_queries, row_chunk);
    const uint64_t blocks = akv_div_up(SPAN_BLOCKS, chunks);
    out->blocks = (uint32_t)(spans < blocks ? spans : blocks);
    if (spans > MOST_SPANS_WEIGHED)
        return; /* a share has many heads then: one more or less does not matter */
    /* a few blocks less may mean that no share crosses a head's end */
    uint64_t best = out->blocks > 1 ? slowest(b, paper, out->tokens, out->blocks) : 0;
    for (uint32_t n = out->blocks, least = n - n / 4; n-- > least && n > 0;) {
        const uint64_t cost = slowest(b, paper, out->tokens, n);
        if (cost < best) {
            best = cost;
            out->blocks = n;
        }
    }
}

static void next_block(shares *at, uint32_t *first_item, uint64_t item)
{
    if (first_item != NULL)
        first_item[at->block] = (uint32_t)item;
    at->block++;
}

/* Items of a packed segment; returns the slots that they take. */
static uint64_t cut_spans(const akv_cuda_segment *segment, uint32_t sequence, uint32_t heads, uint64_t slots, const lists *l,
                          shares *share, places *at)
{
    const akv_packed *p = &segment->packed;
    uint64_t most = 0;
    if (l->pools != NULL) {
        const akv_pool pool = {segment->device, sequence, 0, *p};
        l->pools[at->num_pools] = pool;
    }
    for (uint32_t head = 0; head < heads; head++) {
        uint64_t part = 0;
        for (uint32_t span = 0, n; span < p->num_spans; span += n, part++) {
            bool full = false;
            n = take_spans(share, span, p->num_spans, p->span_tokens, &full);
            if (l->span_items != NULL) {
                const akv_span_item item = {segment->device, head, span, n, (uint32_t)(slots + part), (uint32_t)at->num_pools, 0, *p};
                l->span_items[at->num_span_items] = item;
            }
            at->num_span_items++;
            if (full)
                next_block(share, l->first_item, at->num_span_items);
        }
        most = part > most ? part : most;
    }
    at->num_pools++;
    return most;
}

/* The same for profile paper. */
static uint64_t cut_paper(const akv_cuda_segment *segment, uint32_t sequence, uint32_t heads, uint64_t slots, const lists *l,
                          shares *share, places *at)
{
    const akv_paper *p = &segment->paper;
    uint64_t most = 0;
    for (uint32_t head = 0; head < heads; head++) {
        uint64_t part = 0;
        for (uint32_t span = 0, n; span < p->num_spans; span += n, part++) {
            bool full = false;
            n = take_spans(share, span, p->num_spans, p->span_tokens, &full);
            if (l->paper_items != NULL) {
                const akv_paper_item item = {segment->device, head, span, n, sequence, (uint32_t)(slots + part), span / n,
                                             (p->num_spans + n - 1) / n, 0, *p};
                l->paper_items[at->num_paper_items] = item;
            }
            at->num_paper_items++;
            if (full)
                next_block(share, l->paper_first_item, at->num_paper_items);
        }
        most = part > most ? part : most;
    }
    return most;
}

static void cut(const akv_cuda_batch *b, const lists *l, places *at)
{
    uint64_t n = 0, slots = 0;
    shares share, paper_share;
    count_shares(b, false, at->row_chunk, &share);
    count_shares(b, true, at->paper_row_chunk, &paper_share);
    at->num_span_blocks = share.blocks;
    at->num_paper_blocks = paper_share.blocks;
    at->num_span_items = at->num_pools = at->num_paper_items = 0;
    next_block(&share, l->first_item, 0);
    next_block(&paper_share, l->paper_first_item, 0);
    for (uint32_t q = 0; q < b->num_sequences; q++) {
        const akv_cuda_sequence *seq = &b->sequences[q];
        if (l->first_slot != NULL)
            l->first_slot[q] = (uint32_t)slots;
        for (uint32_t s = 0; s <= seq->num_segments; s++) {
            const akv_cuda_segment *segment = s < seq->num_segments ? seq->segments[s] : NULL;
            if (is_packed(segment)) {
                slots += cut_spans(segment, q, b->num_kv_heads, slots, l, &share, at);
                continue;
            }
            if (is_paper(segment)) {
                slots += cut_paper(segment, q, b->num_kv_heads, slots, l, &paper_share, at);
                continue;
            }
            const uint64_t tokens = segment != NULL ? segment->header.num_tokens : seq->tail_tokens;
            const uint64_t most = segment != NULL ? AKV_CUDA_PART_TOKENS : AKV_CUDA_TAIL_TOKENS;
            for (uint64_t t = 0; t < tokens; t += most, n++, slots++)
                if (l->items != NULL) {
                    const akv_item item = {segment != NULL ? segment->device : NULL, t, (uint32_t)(tokens - t < most ? tokens - t : most),
                                           segment != NULL ? segment->kind : AKV_ITEM_TAIL, q, (uint32_t)slots};
                    l->items[n] = item;
                }
        }
    }
    if (l->first_slot != NULL)
        l->first_slot[b->num_sequences] = (uint32_t)slots;
    for (; share.block <= share.blocks;)
        next_block(&share, l->first_item, at->num_span_items);
    for (; paper_share.block <= paper_share.blocks;)
        next_block(&paper_share, l->paper_first_item, at->num_paper_items);
    at->num_items = n;
    at->num_slots = slots;
}

/* The same for profile paper: anchors in shared memory if they fit in any way. */
static akv_status choose_paper_kernel(const akv_cuda_batch *b, int most, places *at, akv_diag *diag)
{
    uint32_t anchors = 0, span = 0;
    for (uint32_t q = 0; q < b->num_sequences; q++)
        for (uint32_t s = 0; s < b->sequences[q].num_segments; s++) {
            if (!is_paper(b->sequences[q].segments[s]))
                continue;
            const akv_paper *p = &b->sequences[q].segments[s]->paper;
            if (at->paper_fast_steps != 0 && at->paper_fast_steps != p->fast_steps)
                return akv_fail(diag, AKV_E_UNSUPPORTED, "segments of one batch with rotary embeddings of very different speeds are not covered");
            at->paper_fast_steps = p->fast_steps;
            anchors = p->num_anchors > anchors ? p->num_anchors : anchors;
            span = p->span_tokens > span ? p->span_tokens : span;
        }
    if (at->paper_fast_steps == 0)
        return AKV_OK;
    const uint32_t first = b->gqa_group * b->num_queries <= 4 ? 4 : 8;
    for (uint32_t turn = 0; turn < 4; turn++) {
        at->paper_row_chunk = turn % 2 == 0 ? first : 12 - first;
        at->paper_shared_anchors = turn < 2;
        if (!akv_cuda_paper_covers(b->head_dim_k, at->paper_row_chunk, at->paper_fast_steps))
            continue;
        at->paper_shared = akv_cuda_paper_shared(b->head_dim_k, at->paper_row_chunk, at->paper_fast_steps, anchors, span,
                                                 turn < 2);
        if (at->paper_shared + AKV_PAPER_STATIC <= (size_t)most)
            return AKV_OK;
    }
    return akv_fail(diag, AKV_E_UNSUPPORTED, "%u anchors a head of %u take %zu bytes of shared memory; a block of this device has %d",
                    anchors, b->head_dim_k, at->paper_shared, most);
}

/* Row chunk and shared memory of the span kernel for this batch; refused when nothing fits. */
static akv_status choose_kernel(const akv_cuda_batch *b, places *at, akv_diag *diag)
{
    akv_span_shape shape = {b->head_dim_k, 0, 0, 0, 0, 0, 0, 0};
    for (uint32_t q = 0; q < b->num_sequences; q++)
        for (uint32_t s = 0; s < b->sequences[q].num_segments; s++) {
            const akv_cuda_segment *segment = b->sequences[q].segments[s];
            if (!is_packed(segment))
                continue;
            const akv_packed *p = &segment->packed;
            if (shape.fast_steps != 0 && shape.fast_steps != p->fast_steps)
                return akv_fail(diag, AKV_E_UNSUPPORTED, "segments of one batch with rotary embeddings of very different speeds are not covered");
            shape.fast_steps = p->fast_steps;
            shape.num_anchors = p->num_anchors > shape.num_anchors ? p->num_anchors : shape.num_anchors;
            shape.span_tokens = p->span_tokens > shape.span_tokens ? p->span_tokens : shape.span_tokens;
            shape.key_tiles = p->key_tiles > shape.key_tiles ? p->key_tiles : shape.key_tiles;
            shape.value_tiles = p->value_tiles > shape.value_tiles ? p->value_tiles : shape.value_tiles;
            shape.num_levels = p->num_levels > shape.num_levels ? p->num_levels : shape.num_levels;
        }
    at->fast_steps = shape.fast_steps;
    int ordinal = 0, most = 0;
    AKV_CUDA_TRY(cudaGetDevice(&ordinal), "asking for the current device");
    AKV_CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal), "asking for the device's shared memory");
    AKV_TRY(choose_paper_kernel(b, most, at, diag));
    if (shape.fast_steps == 0)
        return AKV_OK;
    const uint32_t first = b->gqa_group * b->num_queries <= 4 ? 4 : 8; /* the other one where the build lacks it or it does not fit */
    for (uint32_t turn = 0; turn < 2; turn++) {
        shape.row_chunk = turn == 0 ? first : 12 - first;
        if (!akv_cuda_span_covers(shape.dim, shape.row_chunk, shape.fast_steps))
            continue;
        at->row_chunk = shape.row_chunk;
        at->span_shared = akv_cuda_span_shared(&shape);
        at->queries_shared = akv_cuda_queries_shared(&shape);
        at->prepared_bytes = akv_lay_out_queries(shape.dim, shape.row_chunk, shape.num_levels, shape.key_tiles).total;
        at->prepared_bytes = (uint32_t)akv_round_up(at->prepared_bytes, AKV_CUDA_ALIGN);
        if (at->span_shared + AKV_SPAN_STATIC <= (size_t)most)
            return AKV_OK;
    }
    return akv_fail(diag, AKV_E_UNSUPPORTED, "%u anchors a head of %u take %zu bytes of shared memory; a block of device %d has %d",
                    shape.num_anchors, shape.dim, at->span_shared, ordinal, most);
}

static size_t take(size_t *used, uint64_t count, size_t size)
{
    size_t at = *used;
    *used += (size_t)akv_round_up(count * size, AKV_CUDA_ALIGN);
    return at;
}

static akv_status measure(const akv_cuda_batch *b, places *at, akv_diag *diag)
{
    const lists none = {NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    memset(at, 0, sizeof *at);
    AKV_TRY(choose_kernel(b, at, diag));
    cut(b, &none, at);
    const uint64_t each = (uint64_t)b->num_kv_heads * b->gqa_group * b->num_queries;
    const uint64_t rows = (uint64_t)b->gqa_group * b->num_queries, states = at->num_slots * each;
    if (at->num_items > INT32_MAX || at->num_span_items + at->num_paper_items > INT32_MAX || at->num_pools > 65535 || states > (UINT64_C(1) << 40))
        return akv_fail(diag, AKV_E_UNSUPPORTED, "the batch makes %llu items of %llu segments; that is too many for one launch",
                        (unsigned long long)(at->num_items + at->num_span_items + at->num_paper_items), (unsigned long long)at->num_pools);
    at->items = take(&at->total, at->num_items, sizeof(akv_item));
    at->span_items = take(&at->total, at->num_span_items, sizeof(akv_span_item));
    at->first_item = take(&at->total, at->num_span_blocks + 2, sizeof(uint32_t)); /* first_item[0], then one a block */
    at->pools = take(&at->total, at->num_pools, sizeof(akv_pool));
    at->paper_items = take(&at->total, at->num_paper_items, sizeof(akv_paper_item));
    at->tails = take(&at->total, b->num_sequences, sizeof(akv_tail));
    at->first_slot = take(&at->total, b->num_sequences + 1, sizeof(uint32_t));
    at->max = take(&at->total, states, sizeof(float));
    at->sum = take(&at->total, states, sizeof(float));
    at->acc = take(&at->total, states * b->head_dim_v, sizeof(float));
    at->prepared = take(&at->total, at->row_chunk == 0 ? 0 : at->num_pools * b->num_kv_heads * akv_div_up(rows, at->row_chunk), at->prepared_bytes);
    return AKV_OK;
}

akv_status akv_cuda_workspace_bytes(const akv_cuda_batch *batch, size_t *bytes, akv_diag *diag)
{
    if (bytes == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "bytes must not be NULL");
    AKV_TRY(check_batch(batch, diag));
    places at;
    AKV_TRY(measure(batch, &at, diag));
    *bytes = at.total;
    return AKV_OK;
}

static akv_status check_device(const akv_cuda_batch *b, const places *at, int *ordinal, int *major_out, akv_diag *diag)
{
    int major = 0, minor = 0;
    AKV_CUDA_TRY(cudaGetDevice(ordinal), "asking for the current device");
    AKV_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *ordinal), "asking for the device's kind");
    AKV_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, *ordinal), "asking for the device's kind");
    if (major < 8)
        return akv_fail(diag, AKV_E_UNSUPPORTED, "device %d has compute capability %d.%d; 8.0 or newer is needed", *ordinal, major, minor);
    cudaError_t error = akv_cuda_prepare_parts();
    if (error == cudaSuccess && at->num_span_items > 0) {
        const akv_span_shape shape = {b->head_dim_k, at->row_chunk, at->fast_steps, 0, 0, 0, 0, 0};
        error = akv_cuda_prepare_spans(&shape, at->span_shared);
        if (error == cudaSuccess)
            error = akv_cuda_prepare_queries(at->row_chunk, at->queries_shared);
    }
    if (error == cudaSuccess && at->num_paper_items > 0)
        error = akv_cuda_prepare_paper(b->head_dim_k, at->paper_row_chunk, at->paper_fast_steps, at->paper_shared);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        (void)cudaGetLastError();
        return akv_fail(diag, AKV_E_UNSUPPORTED, "this build has no kernels for compute capability %d.%d (CMake: CMAKE_CUDA_ARCHITECTURES)",
                        major, minor);
    }
    if (error == cudaErrorInvalidValue) {
        (void)cudaGetLastError();
        return akv_fail(diag, AKV_E_UNSUPPORTED, "device %d has too little shared memory for these kernels", *ordinal);
    }
    AKV_CUDA_TRY(error, "preparing the kernels");
    *major_out = major;
    return AKV_OK;
}

static void fill_values(akv_code_values *v)
{
    for (uint32_t i = 0; i < 2; i++)
        v->level1[i] = AKV_LEVEL_UNIT1 * (float)akv_level_steps1[i];
    for (uint32_t i = 0; i < 4; i++) {
        v->level2[i] = AKV_LEVEL_UNIT2 * (float)akv_level_steps2[i];
        v->plain[i] = akv_levels_lloyd_max[i];
        v->uniform[i] = akv_levels_uniform[i];
    }
    for (uint32_t i = 0; i < 16; i++) {
        v->level4[i] = AKV_LEVEL_UNIT4 * (float)akv_level_steps4[i];
        v->gain[i] = akv_gain_value(i);
    }
    v->coeff_step = AKV_COEFF_STEP;
    v->coeff_self = AKV_COEFF_SELF;
}

/*
 * Items, tails and slots into the front of the workspace, by one copy; with maxima and sums of the partial states, since
 * heads may have fewer items than slots: those stay empty.
 */
static akv_status send(const akv_cuda_batch *b, places *at, uint8_t *workspace, uint32_t *paper_first_item,
                       akv_pool *first_pool, cudaStream_t stream, akv_diag *diag)
{
    const size_t bytes = at->acc;
    uint8_t *host = calloc(1, bytes + 1);
    if (host == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a list of %zu bytes", bytes);
    const lists l = {(akv_item *)(void *)(host + at->items), (akv_span_item *)(void *)(host + at->span_items),
                     (uint32_t *)(void *)(host + at->first_item),
                     (akv_pool *)(void *)(host + at->pools), (uint32_t *)(void *)(host + at->first_slot),
                     (akv_paper_item *)(void *)(host + at->paper_items), paper_first_item};
    cut(b, &l, at);
    if (at->num_pools > 0)
        *first_pool = l.pools[0];
    for (size_t i = 0; i < (at->sum - at->max) / sizeof(float); i++)
        ((float *)(void *)(host + at->max))[i] = -INFINITY;
    akv_tail *tails = (akv_tail *)(void *)(host + at->tails);
    for (uint32_t q = 0; q < b->num_sequences; q++) {
        const akv_cuda_sequence *s = &b->sequences[q];
        const akv_tail tail = {s->tail_keys, s->tail_values, {s->tail_stride_head[0], s->tail_stride_head[1]},
                               {s->tail_stride_token[0], s->tail_stride_token[1]}, s->tail_mask, s->tail_mask_stride, s->tail_tokens};
        tails[q] = tail;
    }
    cudaError_t error = cudaMemcpyAsync(workspace, host, bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(stream);
    free(host);
    AKV_CUDA_TRY(error, "copying the plan to the device");
    return AKV_OK;
}

akv_status akv_cuda_plan_bytes(const akv_cuda_batch *batch, size_t *own, size_t *scratch, akv_diag *diag)
{
    if (own == NULL || scratch == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "own and scratch must not be NULL");
    AKV_TRY(check_batch(batch, diag));
    places at;
    AKV_TRY(measure(batch, &at, diag));
    *own = at.acc;
    *scratch = at.total - at.acc;
    return AKV_OK;
}

static bool is_buffer(const void *memory)
{
    return memory != NULL && (uintptr_t)memory % AKV_CUDA_ALIGN == 0;
}

static akv_status create(const akv_cuda_batch *batch, const places *where, uint8_t *ws, uint8_t *scratch, akv_cuda_stream stream,
                         akv_cuda_plan **out, akv_diag *diag);

akv_status akv_cuda_plan_create(const akv_cuda_batch *batch, void *workspace, size_t workspace_bytes, akv_cuda_stream stream,
                                akv_cuda_plan **out, akv_diag *diag)
{
    AKV_TRY(check_batch(batch, diag));
    places at;
    AKV_TRY(measure(batch, &at, diag));
    if (out == NULL || !is_buffer(workspace))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the workspace must be device memory aligned to %u bytes, out must not be NULL",
                        AKV_CUDA_ALIGN);
    if (workspace_bytes < at.total)
        return akv_fail(diag, AKV_E_NO_SPACE, "the workspace has %zu bytes; this batch needs %zu (akv_cuda_workspace_bytes)",
                        workspace_bytes, at.total);
    return create(batch, &at, workspace, (uint8_t *)workspace + at.acc, stream, out, diag);
}

akv_status akv_cuda_plan_create_shared(const akv_cuda_batch *batch, void *own, size_t own_bytes, void *scratch, size_t scratch_bytes,
                                       akv_cuda_stream stream, akv_cuda_plan **out, akv_diag *diag)
{
    AKV_TRY(check_batch(batch, diag));
    places at;
    AKV_TRY(measure(batch, &at, diag));
    if (out == NULL || !is_buffer(own) || !is_buffer(scratch))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "own and scratch must be device memory aligned to %u bytes, out must not be NULL",
                        AKV_CUDA_ALIGN);
    if (own_bytes < at.acc || scratch_bytes < at.total - at.acc)
        return akv_fail(diag, AKV_E_NO_SPACE, "own has %zu bytes and scratch %zu; this batch needs %zu and %zu (akv_cuda_plan_bytes)",
                        own_bytes, scratch_bytes, at.acc, at.total - at.acc);
    return create(batch, &at, own, scratch, stream, out, diag);
}

/*
 * A plan whose lists, and maxima and sums of the partial states (of which some stay empty for good), [0, places.acc), lie
 * in `ws` and whose intermediate results, the rest, in `scratch`.
 */
static akv_status create(const akv_cuda_batch *batch, const places *where, uint8_t *ws, uint8_t *scratch, akv_cuda_stream stream,
                         akv_cuda_plan **out, akv_diag *diag)
{
    places at = *where;
    int ordinal = 0, major = 0;
    AKV_TRY(check_device(batch, &at, &ordinal, &major, diag));
    for (uint32_t q = 0; q < batch->num_sequences; q++)
        for (uint32_t s = 0; s < batch->sequences[q].num_segments; s++)
            if (batch->sequences[q].segments[s]->ordinal != ordinal)
                return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "segment %u of sequence %u lies on device %d; device %d is current", s, q,
                                batch->sequences[q].segments[s]->ordinal, ordinal);
    akv_cuda_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a plan of %zu bytes", sizeof *plan);
    akv_cuda_call *c = &plan->call;
    uint32_t paper_first_item[AKV_CUDA_BLOCKS + 2]; /* first_item[0], then one a block */
    akv_status status = send(batch, &at, ws, paper_first_item, &c->first_pool, stream, diag);
    if (status != AKV_OK) {
        free(plan);
        return status;
    }
    memcpy(c->paper.first_item, paper_first_item, (at.num_paper_blocks + 1) * sizeof paper_first_item[0]);
    plan->ordinal = ordinal;
    c->H = batch->num_kv_heads;
    c->G = batch->gqa_group;
    c->T = batch->num_queries;
    c->rows = c->G * c->T;
    c->dim_k = batch->head_dim_k;
    c->dim_v = batch->head_dim_v;
    c->num_sequences = batch->num_sequences;
    c->num_items = (uint32_t)at.num_items;
    c->query_dtype = (int)batch->query_dtype;
    c->out_dtype = (int)batch->out_dtype;
    c->tail_dtype = (int)batch->tail_dtype;
    c->sm_scale = (float)batch->sm_scale;
    c->softcap = (float)batch->logit_softcap;
    c->items = (const akv_item *)(const void *)(ws + at.items);
    c->tails = (const akv_tail *)(const void *)(ws + at.tails);
    c->first_slot = (const uint32_t *)(const void *)(ws + at.first_slot);
    c->tail_lengths = batch->tail_lengths;
    c->partials.max = (float *)(void *)(ws + at.max);
    c->partials.sum = (float *)(void *)(ws + at.sum);
    c->partials.acc = (float *)(void *)scratch;
    c->num_span_blocks = at.num_span_blocks;
    c->num_span_items = (uint32_t)at.num_span_items;
    c->num_pools = (uint32_t)at.num_pools;
    c->row_chunk = at.row_chunk;
    c->early_launch = major >= 9;
    c->fast_steps = at.fast_steps;
    c->span_shared_bytes = (uint32_t)at.span_shared;
    c->prepare_shared_bytes = (uint32_t)at.queries_shared;
    c->prepared_bytes = at.prepared_bytes;
    c->first_item = (const uint32_t *)(const void *)(ws + at.first_item);
    c->prepared = scratch + (at.prepared - at.acc);
    c->span_items = (const akv_span_item *)(const void *)(ws + at.span_items);
    c->pools = (const akv_pool *)(const void *)(ws + at.pools);
    c->paper.num_blocks = at.num_paper_blocks;
    c->paper.num_items = (uint32_t)at.num_paper_items;
    c->paper.row_chunk = at.paper_row_chunk;
    c->paper.fast_steps = at.paper_fast_steps;
    c->paper.shared_bytes = (uint32_t)at.paper_shared;
    c->paper.shared_anchors = at.paper_shared_anchors;
    c->paper.items = (const akv_paper_item *)(const void *)(ws + at.paper_items);
    fill_values(&c->values);
    *out = plan;
    return AKV_OK;
}

void akv_cuda_plan_destroy(akv_cuda_plan *plan)
{
    free(plan);
}

/* Is the plan's device the current one, and without a fault? */
static akv_status check_current(const akv_cuda_plan *plan, akv_diag *diag)
{
    int ordinal = 0;
    AKV_CUDA_TRY(cudaGetDevice(&ordinal), "asking for the current device");
    if (ordinal != plan->ordinal)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the plan was made for device %d; device %d is current", plan->ordinal, ordinal);
    AKV_CUDA_TRY(cudaPeekAtLastError(), "an earlier call on this device failed");
    return AKV_OK;
}

akv_status akv_cuda_append(const akv_cuda_plan *plan, const akv_cuda_token *token, akv_cuda_stream stream, akv_diag *diag)
{
    if (plan == NULL || token == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "plan and token must not be NULL");
    if (token->struct_size < sizeof *token)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_cuda_token has struct_size %zu; call akv_cuda_token_init first",
                        token->struct_size);
    if (token->keys == NULL || token->values == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "keys and values must not be NULL");
    if (plan->call.tail_lengths == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the plan's batch has no tail_lengths, which say where a token goes");
    AKV_TRY(check_current(plan, diag));
    AKV_CUDA_TRY(akv_cuda_launch_append(&plan->call, token, stream), "launching the append");
    return AKV_OK;
}

akv_status akv_cuda_attend(const akv_cuda_plan *plan, const akv_cuda_step *step, akv_cuda_stream stream, akv_diag *diag)
{
    if (plan == NULL || step == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "plan and step must not be NULL");
    if (step->struct_size < sizeof *step)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_cuda_step has struct_size %zu; call akv_cuda_step_init first", step->struct_size);
    if (step->queries == NULL || step->out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "queries and out must not be NULL");
    AKV_TRY(check_current(plan, diag));
    akv_cuda_call call = plan->call;
    call.step = *step;
    AKV_CUDA_TRY(akv_cuda_launch_paper(&call, stream), "launching the attention of profile paper");
    AKV_CUDA_TRY(akv_cuda_launch_queries(&call, stream), "launching the preparation of queries");
    AKV_CUDA_TRY(akv_cuda_launch_spans(&call, stream), "launching the attention of packed segments");
    AKV_CUDA_TRY(akv_cuda_launch_parts(&call, stream), "launching the attention of items");
    AKV_CUDA_TRY(akv_cuda_launch_combine(&call, stream), "launching the merge");
    return AKV_OK;
}
