/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spans.cuh - attention over spans of a packed LADDER segment on the tensor cores: the fast path of decode.
 *
 * One block of eight warps = (run of spans, KV head, chunk of at most NR query rows). Per span, with a barrier between:
 *   1. key residuals   int8 codes x queries in the transform's coordinates (split into two bytes), one level a group
 *   2. key anchors     16 gathered anchors as one tile, turned in registers; queries turned back once a window
 *   3. softmax         weights over the whole span at once, so nothing is rescaled inside a span
 *   4. values          anchors as a histogram in whole numbers, residuals per level on the tensor cores
 * Anchors and transforms of values are applied once for all items of a segment (pools.cu).
 *
 * Operands are fp16, sums fp32; key residuals are exact integers. At 20x the bytes are few, so issue slots and latency
 * decide, not bandwidth: docs/speed.md has the figures, bench/cuda/log.md what was tried.
 */
#ifndef AKV_CUDA_SPANS_CUH
#define AKV_CUDA_SPANS_CUH

#include "cuda/device.cuh"
#include "cuda/packed.h"

#define SPAN_THREADS 256
#define SPAN_WARPS 8
#define WEIGHT_SCALE 1024.0f /* lifts small weights out of fp16's subnormals */
#define ANCHOR_BIAS 1152.0f  /* a byte under 0x64 is 1024 + 128 + anchor in fp16 */

/* Codes pass through shared memory in rounds of whole groups; a group of D coordinates has at most 8 D + 128 bytes. */
#define STAGE_BYTES(D) (8 * (D) + 256)

/* Where things lie in a block's shared memory, in bytes; the host asks for the total. */
struct span_layout {
    uint32_t logits, hist, slabs, stage, span, key_tiles, value_scales, value_coords, key_scales, queries, turned, mean_rows, mean_slow, row_turns, phase, reduce, levels, total;
    uint32_t stride; /* floats of a row of logits */
};

template <int D, int NR, int NF>
static __host__ __device__ __forceinline__ span_layout lay_out_span(uint32_t anchors, uint32_t span, uint32_t tiles, uint32_t levels)
{
    constexpr int STEPS = D / 16, NT = NR / 4;
    span_layout l;
    uint32_t at = 0;
    l.stride = span + 8; /* rows of a warp's four heads fall into different banks */
    l.logits = at, at += NR * l.stride * 4;
    l.hist = at, at += (NR * anchors * 4 + 15) / 16 * 16;
    l.slabs = at, at += SPAN_WARPS * D * NR * 4;
    l.stage = at, at += SPAN_WARPS * 2 * STAGE_BYTES(D);
    l.span = at, at += (sizeof(akv_packed_span) + 15) / 16 * 16;
    l.key_tiles = at, at += (tiles + 1) * NT * 128;
    l.value_scales = at, at += (tiles + 1) * 64;
    l.value_coords = at, at += (tiles + 1) * 32;
    l.queries = at, at += NR * D * 4;
    l.turned = at, at += STEPS * NT * 32 * 8;
    l.mean_rows = at, at += NF * 16 * 4 * 8;
    l.mean_slow = at, at += (STEPS - NF + 1) * 4 * 8;
    l.row_turns = at, at += NF * 16 * 4 * 8;
    l.phase = at, at += D / 2 * 8;
    l.key_scales = at, at += (levels * NR * 4 + 15) / 16 * 16;
    l.reduce = at, at += (2 * SPAN_WARPS * NR + 8 * NR) * 4;
    l.levels = at, at += 2 * levels * 16;
    l.total = at;
    return l;
}

static __device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

static __device__ __forceinline__ void mma_i8(int acc[4], uint32_t a0, uint32_t a1, uint32_t b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

static __device__ __forceinline__ void mma_f16(float acc[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ __half2 as_half2(uint32_t x)
{
    return *reinterpret_cast<__half2 *>(&x);
}

static __device__ __forceinline__ uint32_t as_u32(__half2 x)
{
    return *reinterpret_cast<uint32_t *>(&x);
}

static __device__ __forceinline__ uint32_t pack_halves(float x, float y)
{
    return as_u32(__floats2half2_rn(x, y));
}

/* (x, y) turned back by the angle of (cos, sin): x cos + y sin, y cos - x sin. */
static __device__ __forceinline__ void turn_back(uint2 q, uint2 turn, uint32_t *x, uint32_t *y)
{
    const __half2 c = as_half2(turn.x), s = as_half2(turn.y), a = as_half2(q.x), b = as_half2(q.y);
    *x = as_u32(__hfma2(a, c, __hmul2(b, s)));
    *y = as_u32(__hfma2(b, c, __hneg2(__hmul2(a, s))));
}

/* The other way round. */
static __device__ __forceinline__ void turn_on(__half2 a, __half2 b, uint2 turn, uint32_t *x, uint32_t *y)
{
    const __half2 c = as_half2(turn.x), s = as_half2(turn.y);
    *x = as_u32(__hfma2(a, c, __hneg2(__hmul2(b, s))));
    *y = as_u32(__hfma2(b, c, __hmul2(a, s)));
}

static __device__ __forceinline__ float gain_of(uint32_t entry)
{
    return akv_exp2((float)((entry >> 11) & 15u) * (1.0f / 3.0f) - 8.0f / 3.0f);
}

/* Levels of a side in shared memory: tiles by width, and where the level's query tiles begin. */
struct level_info {
    uint32_t counts; /* four, half, two, one in its bytes */
    uint32_t group_bytes;
    uint32_t first_tile;
    uint32_t unused;
};

template <int D, int NR, int NF>
struct span_block {
    static constexpr int STEPS = D / 16, NT = NR / 4, VEC = STEPS % 4 == 0 ? 4 : 2, LOADS = STEPS / VEC, MOST = D / 16 + 2;

    /* Where a warp's stream of codes stands: next group to fetch, its level, where its bytes are. */
    struct cursor {
        uint32_t g, l, end;
        const uint8_t *from;
    };

    const akv_cuda_call &c;
    const akv_packed *p;
    const uint8_t *base;
    uint8_t *shared;
    span_layout at;
    uint32_t head, row0, rows, sequence;
    int warp, lane;

    __device__ __forceinline__ float *logits() { return (float *)(shared + at.logits); }
    __device__ __forceinline__ int *hist() { return (int *)(shared + at.hist); }
    __device__ __forceinline__ float *slab(int w) { return (float *)(shared + at.slabs) + w * D * NR; }
    __device__ __forceinline__ uint8_t *stage(uint32_t round) { return shared + at.stage + (warp * 2 + (round & 1)) * STAGE_BYTES(D); }
    __device__ __forceinline__ akv_packed_span *span_copy() { return (akv_packed_span *)(shared + at.span); }
    __device__ __forceinline__ uint32_t *key_tiles() { return (uint32_t *)(shared + at.key_tiles); }
    __device__ __forceinline__ float *value_scales() { return (float *)(shared + at.value_scales); }
    __device__ __forceinline__ uint16_t *value_coords() { return (uint16_t *)(shared + at.value_coords); }
    __device__ __forceinline__ float *key_scales() { return (float *)(shared + at.key_scales); }
    __device__ __forceinline__ float *queries() { return (float *)(shared + at.queries); }
    __device__ __forceinline__ uint2 *turned() { return (uint2 *)(shared + at.turned); }
    __device__ __forceinline__ uint2 *mean_rows() { return (uint2 *)(shared + at.mean_rows); }
    __device__ __forceinline__ uint2 *mean_slow() { return (uint2 *)(shared + at.mean_slow); }
    __device__ __forceinline__ uint2 *row_turns() { return (uint2 *)(shared + at.row_turns); }
    __device__ __forceinline__ float2 *phase() { return (float2 *)(shared + at.phase); }
    __device__ __forceinline__ float *reduce() { return (float *)(shared + at.reduce); }
    __device__ __forceinline__ level_info *levels(int side) { return (level_info *)(shared + at.levels) + side * p->num_levels; }
    /* behind the two arrays that warps reduce over: [NR] each */
    __device__ __forceinline__ float *row_value(int i) { return reduce() + 2 * SPAN_WARPS * NR + i * NR; }
    enum { MAX, SUM, NORM, SHRINK, EXPONENT };

    /* ------------------------------------------------------------------------------------------- once for all spans */

    static __device__ __forceinline__ void fetch_lines(const uint8_t *from, uint64_t bytes, uint32_t first, uint32_t step)
    {
        for (uint64_t at_byte = (uint64_t)first * 128; at_byte < bytes; at_byte += (uint64_t)step * 128)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at_byte));
    }

    /* Ask for all that a span will read, long before: with a cold L2 the chain of dependent loads costs more than the work. */
    __device__ void fetch_span(uint32_t span)
    {
        const akv_packed_span *sp = (const akv_packed_span *)(base + p->spans) + (size_t)head * p->num_spans + span;
        const uint64_t begin = sp->index[0];
        fetch_lines(base + begin, sp->end - begin, threadIdx.x, SPAN_THREADS);
    }

    /* This block's share of its head's anchors. */
    __device__ void fetch_anchors(uint32_t share, uint32_t shares)
    {
        const uint64_t anchor_bytes = (uint64_t)p->num_anchors * D, lines = (anchor_bytes + 127) / 128;
        const uint64_t mine = (lines + shares - 1) / shares * 128, from = mine * share;
        if (from < anchor_bytes)
            fetch_lines(base + p->anchors[0] + head * anchor_bytes + from, anchor_bytes - from < mine ? anchor_bytes - from : mine, threadIdx.x, SPAN_THREADS);
    }

    /*
     * A table to shared memory if there is room, all tables at once: read one after the other where they are needed, they cost
     * 18 us of latency before the first token. The bytes are there after the wait in prepare().
     */
    template <class T>
    __device__ __forceinline__ const T *bring(const T *from, uint32_t bytes, uint32_t *room, uint32_t end)
    {
        const uint32_t padded = (bytes + 15) / 16 * 16, to = *room;
        if (to + padded > end || ((uintptr_t)from & 15) != 0)
            return from;
        *room = to + padded;
        const uint32_t s = (uint32_t)__cvta_generic_to_shared(shared + to);
        for (uint32_t e = threadIdx.x * 16; e < padded; e += SPAN_THREADS * 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s + e), "l"((const uint8_t *)from + e) : "memory");
        return (const T *)(shared + to);
    }

    __device__ __forceinline__ void zero(uint32_t from, uint32_t bytes)
    {
        for (uint32_t e = threadIdx.x * 16; e < bytes; e += SPAN_THREADS * 16)
            *(uint4 *)(shared + from + e) = make_uint4(0, 0, 0, 0);
    }

    __device__ void prepare(uint32_t first_span, uint32_t share, uint32_t shares)
    {
        const int tid = threadIdx.x;
        float *natural = logits(), *ordered = natural + NR * D, *z = ordered + NR * D; /* the room of the logits, before them */
        const uint32_t L = p->num_levels, tables = L * AKV_PACK_MAX_TILES * 16, cols = p->basis_cols[0], n_basis = p->basis_dim[0];
        uint32_t room = at.slabs, rest = at.logits + (3 * NR * D + 16 * NR) * 4;
        const uint32_t room_end = at.span, rest_end = at.hist; /* slabs and stage, and the rest of the logits' room */
        const uint16_t *slots = bring((const uint16_t *)(base + p->slots), D * 2, &room, room_end);
        const uint16_t *order = bring((const uint16_t *)(base + p->coords_order), D * 2, &room, room_end);
        const float *units = bring((const float *)(base + p->units[0]) + (size_t)head * D, D * 4, &room, room_end);
        const float *mean = bring((const float *)(base + p->mean) + (size_t)head * D, D * 4, &room, room_end);
        const double *inv_freq = bring((const double *)(base + p->inv_freq), D / 2 * 8, &room, room_end);
        const float *tile_scales = bring((const float *)(base + p->tile_scales[0]) + (size_t)head * tables, tables * 4, &room, room_end);
        const uint16_t *tile_coords = bring((const uint16_t *)(base + p->tile_coords[0]) + (size_t)head * tables, tables * 2, &room, room_end);
        const int8_t *basis = bring((const int8_t *)(base + p->basis[0]) + (size_t)head * cols * n_basis, cols * n_basis, &rest, rest_end);
        const float *basis_scales = (const float *)(base + p->basis_scales[0]) + (size_t)head * cols;
        asm volatile("cp.async.commit_group;" ::: "memory");
        fetch_span(first_span);
        fetch_anchors(share, shares);
        for (int e = tid; e < NR * D; e += SPAN_THREADS) {
            const int r = e / D, i = e % D;
            natural[e] = r < (int)rows ? akv_load(c.step.queries, c.query_dtype, akv_query_at(c, sequence, head, row0 + r) + i) : 0.0f;
        }
        for (int e = tid; e < 2 * (int)p->num_levels; e += SPAN_THREADS) {
            const int side = e / p->num_levels, l = e % p->num_levels;
            const akv_level_tiles t = ((const akv_level_tiles *)(base + p->levels[side]))[head * p->num_levels + l];
            level_info info = {t.four | (uint32_t)t.half << 8 | (uint32_t)t.two << 16 | (uint32_t)t.one << 24, t.group_bytes, 0, 0};
            levels(side)[l] = info;
        }
        for (int e = tid; e < NF * 64; e += SPAN_THREADS)
            row_turns()[e] = ((const uint2 *)(base + p->row_turns))[e];
        zero(at.hist, at.slabs - at.hist);
        if (tid < NR) {
            row_value(MAX)[tid] = -INFINITY;
            row_value(SUM)[tid] = 0.0f;
            row_value(EXPONENT)[tid] = 0.0f;
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (tid % 32 == 0 && tid < 64) {
            const int side = tid / 32;
            for (uint32_t l = 0, at_tile = 0; l < L; l++) {
                const uint32_t n = levels(side)[l].counts;
                levels(side)[l].first_tile = at_tile;
                at_tile += (n & 255) + (n >> 8 & 255) + (n >> 16 & 255) + (n >> 24);
            }
        }
        for (int e = tid; e < NR * D; e += SPAN_THREADS) {
            const int r = e / D, i = e % D;
            ordered[e] = natural[r * D + order[i]];
            queries()[e] = natural[r * D + slots[i]] * units[i];
        }
        prepare_mean(mean, inv_freq);
        __syncthreads();
        for (int r = warp; r < NR; r += SPAN_WARPS) { /* rows to about 16 at most: fp16 then has all its bits */
            float most = 0.0f;
            for (int i = lane; i < D; i += 32)
                most = fmaxf(most, fabsf(queries()[r * D + i]));
            most = akv_warp_max(most);
            const float norm = most > 0.0f && most < INFINITY ? exp2f(4.0f - ceilf(log2f(most))) : 1.0f;
            for (int i = lane; i < D; i += 32)
                queries()[r * D + i] *= norm;
            if (lane == 0)
                row_value(NORM)[r] = c.sm_scale / norm;
        }
        prepare_coordinates(ordered, z, basis, basis_scales);
        __syncthreads();
        prepare_tiles(z, tile_coords, tile_scales);
        prepare_flush();
        __syncthreads();
        zero(at.slabs, at.stage - at.slabs);
    }

    /* Mean keys as operands: turned by 0..15 tokens for fast steps, as they are for slow ones. */
    __device__ void prepare_mean(const float *mean, const double *inv_freq)
    {
        for (int e = threadIdx.x; e < STEPS * 64; e += SPAN_THREADS) {
            const int s = e / 64, r = e / 4 % 16, col = e % 4;
            float x[2], y[2];
            for (int i = 0; i < 2; i++) {
                const float mx = mean[s * 16 + 2 * col + i], my = mean[s * 16 + 8 + 2 * col + i];
                float co = 1.0f, si = 0.0f;
                if (s < NF)
                    sincosf((float)r * (float)inv_freq[s * 8 + 2 * col + i], &si, &co);
                x[i] = mx * co - my * si;
                y[i] = mx * si + my * co;
            }
            const uint2 v = make_uint2(pack_halves(x[0], x[1]), pack_halves(y[0], y[1]));
            if (s < NF)
                mean_rows()[e] = v;
            else if (r == 0)
                mean_slow()[(s - NF) * 4 + col] = v;
        }
    }

    /* Queries in the coordinates of the key residuals: z [NR, D]. */
    __device__ void prepare_coordinates(const float *ordered, float *z, const int8_t *all, const float *scales)
    {
        const uint32_t n = p->basis_dim[0], cols = p->basis_cols[0];
        const uint32_t split = n % 16 == 0 && cols * 4 <= SPAN_THREADS ? 4 : n % 8 == 0 ? 2 : 1; /* threads a column, four bytes at a time */
        for (uint32_t e0 = threadIdx.x - lane; e0 < cols * split; e0 += SPAN_THREADS) {
            const uint32_t e = e0 + lane, col = e / split < cols ? e / split : cols - 1, piece = e % split, length = n / split;
            const int8_t *basis = all + col * n + piece * length;
            const float *q = ordered + piece * length;
            float sum[NR] = {};
            if (split > 1) {
#pragma unroll 4
                for (uint32_t i = 0; i < length; i += 4) {
                    const char4 u = *(const char4 *)(basis + i);
#pragma unroll
                    for (int r = 0; r < NR; r++)
                        sum[r] += (float)u.x * q[r * D + i] + (float)u.y * q[r * D + i + 1] + (float)u.z * q[r * D + i + 2] + (float)u.w * q[r * D + i + 3];
                }
            } else
                for (uint32_t i = 0; i < length; i++)
#pragma unroll
                    for (int r = 0; r < NR; r++)
                        sum[r] += (float)basis[i] * q[r * D + i];
#pragma unroll
            for (int r = 0; r < NR; r++) {
                for (uint32_t o = 1; o < split; o <<= 1)
                    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], o);
                if (piece == 0 && e < cols * split)
                    z[r * D + col] = sum[r] * scales[col];
            }
        }
        for (uint32_t e = threadIdx.x; e < NR * (D - n); e += SPAN_THREADS) {
            const uint32_t r = e / (D - n), i = e % (D - n);
            z[r * D + cols + i] = ordered[r * D + n + i];
        }
    }

    /* Query operands of every level's tiles: 16-bit whole numbers in two bytes, columns 2g and 2g + 1 of head g. */
    __device__ void prepare_tiles(const float *z, const uint16_t *coords, const float *scales)
    {
        float *row_factor = logits() + 3 * NR * D; /* [levels, NR], behind z */
        for (uint32_t l = warp; l < p->num_levels; l += SPAN_WARPS) {
            const uint32_t n = levels(0)[l].counts, tiles = (n & 255) + (n >> 8 & 255) + (n >> 16 & 255) + (n >> 24);
            const uint16_t *tc = coords + l * AKV_PACK_MAX_TILES * 16;
            const float *ts = scales + l * AKV_PACK_MAX_TILES * 16;
            float most[NR] = {};
            for (uint32_t i = lane; i < tiles * 16; i += 32)
                if (tc[i] != 0xffff) {
#pragma unroll
                    for (int r = 0; r < NR; r++)
                        most[r] = fmaxf(most[r], fabsf(z[r * D + tc[i]] * ts[i]));
                }
            float factor[NR];
#pragma unroll
            for (int r = 0; r < NR; r++) {
                most[r] = akv_warp_max(most[r]);
                factor[r] = most[r] > 0.0f && most[r] < INFINITY ? 32512.0f / most[r] : 0.0f;
                if (lane == 0)
                    key_scales()[l * NR + r] = most[r] / 32512.0f * c.sm_scale;
            }
            if (lane == 0)
#pragma unroll
                for (int r = 0; r < NR; r++)
                    row_factor[l * NR + r] = factor[r];
        }
        __syncthreads();
        const int column = lane / 4;
        const uint32_t levels_k = p->num_levels, last = levels(0)[levels_k - 1].counts;
        const uint32_t total = levels(0)[levels_k - 1].first_tile + (last & 255) + (last >> 8 & 255) + (last >> 16 & 255) + (last >> 24);
        uint32_t l = 0;
        for (uint32_t all = warp; all < total; all += SPAN_WARPS) { /* tiles of all levels, shared out to the warps */
            while (l + 1 < levels_k && all >= levels(0)[l + 1].first_tile)
                l++;
            const uint32_t tile = all - levels(0)[l].first_tile;
            const uint32_t k = (l * AKV_PACK_MAX_TILES + tile) * 16 + lane % 4 * 4;
            const ushort4 tc = *(const ushort4 *)(coords + k);
            const float4 ts = *(const float4 *)(scales + k);
            const uint16_t c4[4] = {tc.x, tc.y, tc.z, tc.w};
            const float s4[4] = {ts.x, ts.y, ts.z, ts.w}; /* 0 where there is no coordinate */
#pragma unroll
            for (int t = 0; t < NT; t++) {
                const int g = column / 2 + 4 * t;
                const float f = row_factor[l * NR + g];
                uint32_t word = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int x = __float2int_rn(z[g * D + (c4[i] < D ? c4[i] : 0)] * s4[i] * f), hi = (x + 128) >> 8;
                    word |= ((column % 2 == 0 ? hi : x - hi * 256) & 255) << (8 * i);
                }
                key_tiles()[(all * NT + t) * 32 + lane] = word;
            }
        }
    }

    /* Coordinates and scales of the value tiles, where flush() finds them at once. */
    __device__ void prepare_flush()
    {
        const uint32_t tables = p->num_levels * AKV_PACK_MAX_TILES * 16;
        const uint16_t *coords = (const uint16_t *)(base + p->tile_coords[1]) + (size_t)head * tables;
        const float *scales = (const float *)(base + p->tile_scales[1]) + (size_t)head * tables;
        for (uint32_t e = threadIdx.x; e < tables; e += SPAN_THREADS) {
            const uint32_t l = e / (AKV_PACK_MAX_TILES * 16), n = levels(1)[l].counts, in = e % (AKV_PACK_MAX_TILES * 16);
            const uint16_t coord = coords[e];
            const float scale = scales[e];
            if (in < ((n & 255) + (n >> 8 & 255) + (n >> 16 & 255) + (n >> 24)) * 16) {
                value_coords()[levels(1)[l].first_tile * 16 + in] = coord < D ? coord : 0; /* scale 0 where there is none */
                value_scales()[levels(1)[l].first_tile * 16 + in] = scale * (1.0f / WEIGHT_SCALE);
            }
        }
    }

    /* ------------------------------------------------------------------------------------------------- once for a span */

    /* Queries turned back to the span's first token, as operands; logits begin at 0. */
    __device__ cursor begin_span(uint32_t span)
    {
        const int64_t position = (int64_t)p->first_position + (int64_t)span * p->span_tokens;
        const double *inv_freq = (const double *)(base + p->inv_freq);
        for (int j = threadIdx.x; j < D / 2; j += SPAN_THREADS) {
            float2 v;
            akv_phase(position, inv_freq[j], &v.x, &v.y);
            phase()[j] = v;
        }
        zero(at.logits, NR * at.stride * 4);
        const akv_packed_span *sp = (const akv_packed_span *)(base + p->spans) + (size_t)head * p->num_spans + span;
        for (uint32_t e = threadIdx.x; e < sizeof *sp / 4; e += SPAN_THREADS)
            ((uint32_t *)span_copy())[e] = ((const uint32_t *)sp)[e];
        __syncthreads();
        cursor keys = begin_stream(0);
        fetch_round(0, &keys, 0);
        for (int e = threadIdx.x; e < STEPS * NT * 32; e += SPAN_THREADS) {
            const int s = e / (NT * 32), t = e / 32 % NT, column = e % 32 / 4, col = e % 4;
            float x[2], y[2];
            for (int i = 0; i < 2; i++) {
                const int slot = s * 16 + 2 * col + i;
                const float *q = queries() + (column / 2 + 4 * t) * D;
                const float2 v = phase()[s * 8 + 2 * col + i];
                x[i] = q[slot] * v.x + q[slot + 8] * v.y;
                y[i] = q[slot + 8] * v.x - q[slot] * v.y;
                if (column % 2 == 1) { /* fast steps: nothing; slow ones: the derivative by position */
                    const float w = s < NF ? 0.0f : (float)inv_freq[s * 8 + 2 * col + i] * 1024.0f, x0 = x[i];
                    x[i] = w * y[i];
                    y[i] = -w * x0;
                }
            }
            turned()[e] = make_uint2(pack_halves(x[0], x[1]), pack_halves(y[0], y[1]));
        }
        __syncthreads();
        return keys;
    }

    __device__ __forceinline__ cursor begin_stream(int side)
    {
        const akv_packed_span *sp = span_copy();
        cursor at_group = {sp->warp[side][warp], 0, sp->warp[side][warp + 1], base + sp->codes[side] + sp->warp_codes[side][warp]};
        return at_group;
    }

    /* Fetch as many groups as fit into a round's room; they are there after the next wait. */
    __device__ __forceinline__ void fetch_round(int side, cursor *f, uint32_t round)
    {
        const akv_packed_span *sp = span_copy();
        uint32_t bytes = 0;
        while (f->g < f->end) {
            while (f->g >= sp->groups[side][f->l + 1])
                f->l++;
            const uint32_t last = sp->groups[side][f->l + 1] < f->end ? sp->groups[side][f->l + 1] : f->end;
            const uint32_t each = levels(side)[f->l].group_bytes, n = last - f->g;
            const uint32_t fit = each == 0 ? n : (STAGE_BYTES(D) - bytes) / each, take = fit < n ? fit : n;
            f->g += take;
            bytes += take * each;
            if (take < n)
                break;
        }
        const uint32_t to = (uint32_t)__cvta_generic_to_shared(stage(round));
        for (uint32_t o = lane * 16; o < bytes; o += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + o), "l"(f->from + o) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        f->from += bytes;
    }

    /* The round before the one fetched last is there. */
    __device__ __forceinline__ void await_round(bool last)
    {
        if (last)
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        else
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
    }

    __device__ void key_residuals(cursor fetched)
    {
        const akv_packed_span *sp = span_copy();
        const uint32_t end = fetched.end;
        uint32_t g = sp->warp[0][warp], l = 0, round = 0;
        const uint16_t *entries = (const uint16_t *)(base + sp->entries[0]);
        const uint32_t s4a = p->steps4[0], s4b = p->steps4[1], s2 = p->steps2, s1 = p->steps1;
        const int row = lane / 4, col = lane % 4;
        uint32_t e0 = g < end ? entries[g * 16 + row] : 0, e1 = g < end ? entries[g * 16 + row + 8] : 0;
        while (g < end) {
            const uint32_t until = fetched.g;
            __syncwarp(); /* the round to come takes the room of the one before */
            if (until < end)
                fetch_round(0, &fetched, round + 1);
            await_round(until >= end);
            const uint8_t *code = stage(round++);
            for (; g < until; g++) {
                while (g >= sp->groups[0][l + 1])
                    l++;
                const level_info info = levels(0)[l];
                const uint32_t n0 = g + 1 < end ? entries[g * 16 + 16 + row] : 0, n1 = g + 1 < end ? entries[g * 16 + 24 + row] : 0; /* of the next group */
                const uint32_t *tile = key_tiles() + info.first_tile * NT * 32 + lane;
                int acc[NT][4] = {}, minus[NT][4] = {};
                for (uint32_t i = 0; i < (info.counts & 255); i++, code += 128, tile += NT * 32) {
                    const uint32_t w = ((const uint32_t *)code)[lane], x = w ^ 0x88888888u;
                    const uint32_t a0 = prmt(s4a, s4b, w), a1 = prmt(s4a, s4b, w >> 16), m0 = prmt(s4a, s4b, x), m1 = prmt(s4a, s4b, x >> 16);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        mma_i8(acc[t], a0, a1, tile[t * 32]);
                        mma_i8(minus[t], m0, m1, tile[t * 32]);
                    }
                }
                if (info.counts >> 8 & 255) {
                    const uint32_t w = ((const uint16_t *)code)[lane];
                    const uint32_t a = prmt(s4a, s4b, w), n = prmt(s4a, s4b, w ^ 0x8888u);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        mma_i8(acc[t], a, a >> 16, tile[t * 32]);
                        mma_i8(minus[t], n, n >> 16, tile[t * 32]);
                    }
                    code += 64;
                    tile += NT * 32;
                }
#pragma unroll 4
                for (uint32_t i = 0; i < (info.counts >> 16 & 255); i++, code += 64, tile += NT * 32) {
                    const uint32_t w = ((const uint16_t *)code)[lane];
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma_i8(acc[t], prmt(s2, 0, w & 0x3333u), prmt(s2, 0, w >> 2 & 0x3333u), tile[t * 32]);
                }
#pragma unroll 4
                for (uint32_t i = 0; i < info.counts >> 24; i++, code += 32, tile += NT * 32) {
                    const uint32_t w = code[lane], v = w | w << 7;
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma_i8(acc[t], prmt(s1, 0, v & 0x1111u), prmt(s1, 0, v >> 2 & 0x1111u), tile[t * 32]);
                }
                const float gain0 = gain_of(e0), gain1 = gain_of(e1);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const float scale = key_scales()[l * NR + 4 * t + col];
                    float *out = logits() + (4 * t + col) * at.stride;
                    const int x0 = (acc[t][0] - minus[t][0]) * 256 + acc[t][1] - minus[t][1];
                    const int x1 = (acc[t][2] - minus[t][2]) * 256 + acc[t][3] - minus[t][3];
                    if (e0 & 0x8000u)
                        out[e0 & 2047u] = (float)x0 * scale * gain0;
                    if (e1 & 0x8000u)
                        out[e1 & 2047u] = (float)x1 * scale * gain1;
                }
                e0 = n0;
                e1 = n1;
            }
        }
    }

    __device__ __forceinline__ static float coefficient(const akv_code_values &v, uint32_t nibble)
    {
        const int code = (int)(nibble << 28) >> 28;
        return code == v.coeff_self ? 1.0f : (float)code * v.coeff_step;
    }

    /* The steps of one gathered anchor that this lane feeds: [x, x, y, y] bytes of each step. */
    __device__ __forceinline__ void gather(const uint8_t *row, int col, uint32_t raw[STEPS])
    {
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            if constexpr (VEC == 4) {
                const uint4 v = __ldg((const uint4 *)(row + i * 64) + col);
                raw[4 * i] = v.x, raw[4 * i + 1] = v.y, raw[4 * i + 2] = v.z, raw[4 * i + 3] = v.w;
            } else {
                const uint2 v = __ldg((const uint2 *)(row + i * 32) + col);
                raw[2 * i] = v.x, raw[2 * i + 1] = v.y;
            }
    }

    __device__ void key_anchors(const akv_packed_span *sp, uint32_t count)
    {
        const uint32_t fast_windows = p->span_tokens / 16, slow_windows = p->span_tokens / AKV_PACK_WINDOW;
        const uint2 *fast_turns = (const uint2 *)(base + p->fast_turns), *slow_turns = (const uint2 *)(base + p->slow_turns);
        const uint16_t *index = (const uint16_t *)(base + sp->index[0]);
        const uint8_t *coeff = base + sp->coeff, *anchors = base + p->anchors[0] + (size_t)head * p->num_anchors * D;
        const float *scales = (const float *)(base + p->anchor_scales[0]) + (size_t)head * p->num_anchors;
        const int row = lane / 4, col = lane % 4;
        const __half2 bias = __float2half2_rn(-ANCHOR_BIAS);
        float most[NT];
#pragma unroll
        for (int t = 0; t < NT; t++)
            most[t] = -INFINITY;
        /* The group after the one at t: four to a window, then the warp's next window; past the end it stays where it is safe. */
        const auto after = [&](uint32_t t) {
            const uint32_t next = (t + 16) % AKV_PACK_WINDOW == 0 ? t + 16 + (SPAN_WARPS - 1) * AKV_PACK_WINDOW : t + 16;
            return next < p->span_tokens ? next : t;
        };
        uint32_t next0[STEPS], next1[STEPS], t1 = warp * AKV_PACK_WINDOW;
        uint32_t i0 = index[t1 + row], i1 = index[t1 + row + 8], c0 = coeff[t1 + row], c1 = coeff[t1 + row + 8];
        gather(anchors + (size_t)i0 * D, col, next0);
        gather(anchors + (size_t)i1 * D, col, next1);
        float next_w0 = coefficient(c.values, c0) * scales[i0], next_w1 = coefficient(c.values, c1) * scales[i1];
        uint2 next_turns[NF];
#pragma unroll
        for (int s = 0; s < NF; s++)
            next_turns[s] = __ldg(&fast_turns[(s * fast_windows + t1 / 16) * 4 + col]);
        t1 = after(t1);
        i0 = index[t1 + row], i1 = index[t1 + row + 8];
        c0 = coeff[t1 + row], c1 = coeff[t1 + row + 8];
        for (uint32_t window = warp; window * AKV_PACK_WINDOW < count; window += SPAN_WARPS) {
            /* slow steps: queries at the window's centre, what the bias of the bytes adds, and the mean's part */
            uint32_t slow[NT][STEPS - NF + 1][2];
            float start[NT][4] = {}, mean_start[NT][4] = {};
#pragma unroll
            for (int s = NF; s < STEPS; s++) {
                const uint2 turn = __ldg(&slow_turns[((s - NF) * slow_windows + window) * 4 + col]);
                const uint2 m = mean_slow()[(s - NF) * 4 + col];
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    turn_back(turned()[(s * NT + t) * 32 + lane], turn, &slow[t][s - NF][0], &slow[t][s - NF][1]);
                    const uint32_t b = as_u32(bias);
                    mma_f16(start[t], b, b, b, b, slow[t][s - NF][0], slow[t][s - NF][1]);
                    mma_f16(mean_start[t], m.x, m.x, m.y, m.y, slow[t][s - NF][0], slow[t][s - NF][1]);
                }
            }
#pragma unroll 2
            for (uint32_t part = 0; part < AKV_PACK_WINDOW / 16; part++) {
                const uint32_t t0 = window * AKV_PACK_WINDOW + part * 16;
                if (t0 >= count)
                    break;
                const float w0 = next_w0, w1 = next_w1;
                uint32_t raw0[STEPS], raw1[STEPS];
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    raw0[s] = next0[s];
                    raw1[s] = next1[s];
                }
                uint2 turns[NF];
#pragma unroll
                for (int s = 0; s < NF; s++) {
                    turns[s] = next_turns[s];
                    next_turns[s] = __ldg(&fast_turns[(s * fast_windows + t1 / 16) * 4 + col]);
                }
                /* the group after this one, and the indices of the one after that */
                const uint32_t t2 = after(t1);
                gather(anchors + (size_t)i0 * D, col, next0);
                gather(anchors + (size_t)i1 * D, col, next1);
                next_w0 = coefficient(c.values, c0) * scales[i0];
                next_w1 = coefficient(c.values, c1) * scales[i1];
                i0 = index[t2 + row], i1 = index[t2 + row + 8];
                c0 = coeff[t2 + row], c1 = coeff[t2 + row + 8];
                t1 = t2;
                float acc[NT][4], mean[NT][4];
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        acc[t][i] = start[t][i];
                        mean[t][i] = mean_start[t][i];
                    }
#pragma unroll
                for (int s = 0; s < NF; s++) {
                    const uint2 turn = turns[s];
                    const uint2 turn0 = row_turns()[(s * 16 + row) * 4 + col], turn1 = row_turns()[(s * 16 + row + 8) * 4 + col];
                    const uint2 m0 = mean_rows()[(s * 16 + row) * 4 + col], m1 = mean_rows()[(s * 16 + row + 8) * 4 + col];
                    const __half2 x0 = __hadd2(as_half2(prmt(raw0[s], 0x64646464u, 0x4140u)), bias);
                    const __half2 y0 = __hadd2(as_half2(prmt(raw0[s], 0x64646464u, 0x4342u)), bias);
                    const __half2 x1 = __hadd2(as_half2(prmt(raw1[s], 0x64646464u, 0x4140u)), bias);
                    const __half2 y1 = __hadd2(as_half2(prmt(raw1[s], 0x64646464u, 0x4342u)), bias);
                    uint32_t a0, a1, a2, a3;
                    turn_on(x0, y0, turn0, &a0, &a2);
                    turn_on(x1, y1, turn1, &a1, &a3);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        uint32_t b0, b1;
                        turn_back(turned()[(s * NT + t) * 32 + lane], turn, &b0, &b1);
                        mma_f16(acc[t], a0, a1, a2, a3, b0, b1);
                        mma_f16(mean[t], m0.x, m1.x, m0.y, m1.y, b0, b1);
                    }
                }
#pragma unroll
                for (int s = NF; s < STEPS; s++)
#pragma unroll
                    for (int t = 0; t < NT; t++)
                        mma_f16(acc[t], prmt(raw0[s], 0x64646464u, 0x4140u), prmt(raw1[s], 0x64646464u, 0x4140u),
                                prmt(raw0[s], 0x64646464u, 0x4342u), prmt(raw1[s], 0x64646464u, 0x4342u), slow[t][s - NF][0], slow[t][s - NF][1]);
                const float d0 = ((float)(part * 16 + row) - AKV_PACK_WINDOW / 2) * (1.0f / 1024.0f), d1 = d0 + 8.0f / 1024.0f;
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const int g = 4 * t + col;
                    float *out = logits() + g * at.stride + t0 + row;
                    const float norm = row_value(NORM)[g];
                    float l0 = ((acc[t][0] + d0 * acc[t][1]) * w0 + mean[t][0] + d0 * mean[t][1]) * norm + out[0];
                    float l1 = ((acc[t][2] + d1 * acc[t][3]) * w1 + mean[t][2] + d1 * mean[t][3]) * norm + out[8];
                    l0 = akv_cap(l0, c.softcap);
                    l1 = akv_cap(l1, c.softcap);
                    if (t0 + row >= count)
                        l0 = -INFINITY;
                    if (t0 + row + 8 >= count)
                        l1 = -INFINITY;
                    out[0] = l0;
                    out[8] = l1;
                    most[t] = fmaxf(most[t], fmaxf(l0, l1));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            for (int o = 4; o < 32; o <<= 1)
                most[t] = fmaxf(most[t], __shfl_xor_sync(0xffffffffu, most[t], o));
            if (lane < 4)
                reduce()[warp * NR + 4 * t + lane] = most[t];
        }
    }

    /* Logits to weights, relative to the largest logit so far; what earlier spans left shrinks with it. */
    __device__ void soften(uint32_t count, bool first)
    {
        float sum[NR], max[NR];
#pragma unroll
        for (int r = 0; r < NR; r++) {
            max[r] = row_value(MAX)[r];
            for (int w = 0; w < SPAN_WARPS; w++)
                max[r] = fmaxf(max[r], reduce()[w * NR + r]);
            const float origin = (max[r] == -INFINITY ? 0.0f : max[r]) * 1.44269504f;
            sum[r] = 0.0f;
            for (uint32_t t = threadIdx.x; t < count; t += SPAN_THREADS) {
                float *l = logits() + r * at.stride + t;
                const float w = akv_exp2(*l * 1.44269504f - origin);
                *l = w;
                sum[r] += w;
            }
            sum[r] = akv_warp_sum(sum[r]);
            if (lane == 0)
                reduce()[(SPAN_WARPS + warp) * NR + r] = sum[r];
        }
        __syncthreads();
        if (threadIdx.x < NR) {
            const int r = threadIdx.x;
            float old = row_value(MAX)[r], now = old, total = 0.0f;
            for (int w = 0; w < SPAN_WARPS; w++) {
                now = fmaxf(now, reduce()[w * NR + r]);
                total += reduce()[(SPAN_WARPS + w) * NR + r];
            }
            const float shrink = now == -INFINITY || old == now ? 1.0f : exp2f((old - now) * 1.44269504f);
            total += row_value(SUM)[r] * shrink;
            /* a coefficient is at most 2, so sums of the histogram stay below 2 total: 2^30 leaves them room */
            const float exponent = total > 0.0f && total < INFINITY ? fminf(28.0f - ceilf(log2f(total)), 60.0f) : 0.0f;
            row_value(SHRINK)[r] = shrink * exp2f(exponent - row_value(EXPONENT)[r]); /* of the histogram; residual sums below */
            row_value(SHRINK + 2)[r] = shrink;
            row_value(EXPONENT)[r] = exponent;
            row_value(MAX)[r] = now;
            row_value(SUM)[r] = total;
        }
        __syncthreads();
        if (first)
            return;
        for (int r = 0; r < NR; r++) {
            const float by = row_value(SHRINK)[r], shrink = row_value(SHRINK + 2)[r];
            if (by != 1.0f)
                for (uint32_t a = threadIdx.x; a < p->num_anchors; a += SPAN_THREADS)
                    hist()[r * p->num_anchors + a] = __float2int_rn((float)hist()[r * p->num_anchors + a] * by);
            if (shrink != 1.0f)
                for (uint32_t e = threadIdx.x; e < SPAN_WARPS * D; e += SPAN_THREADS)
                    slab(0)[e * NR + r] *= shrink;
        }
        __syncthreads();
    }

    __device__ void value_anchors(const akv_packed_span *sp, uint32_t count)
    {
        const uint16_t *index = (const uint16_t *)(base + sp->index[1]);
        const uint8_t *coeff = base + sp->coeff;
        float unit[NR];
#pragma unroll
        for (int r = 0; r < NR; r++)
            unit[r] = exp2f(row_value(EXPONENT)[r]);
        constexpr int AHEAD = 4; /* tokens whose loads are in flight together */
        for (uint32_t t0 = threadIdx.x; t0 < count; t0 += AHEAD * SPAN_THREADS) {
            uint32_t which[AHEAD], nibbles[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const uint32_t t = t0 + i * SPAN_THREADS;
                which[i] = t < count ? index[t] : 0;
                nibbles[i] = t < count ? coeff[t] : 0;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const uint32_t t = t0 + i * SPAN_THREADS;
                if (t >= count)
                    break;
                const float gamma = coefficient(c.values, nibbles[i] >> 4);
#pragma unroll
                for (int r = 0; r < NR; r++)
                    atomicAdd(hist() + r * p->num_anchors + which[i], __float2int_rn(logits()[r * at.stride + t] * gamma * unit[r]));
            }
        }
    }

    /* Sums of one level so far, to the warp's slab in the transform's coordinates. */
    __device__ __forceinline__ void flush(uint32_t l, uint32_t tiles, float acc[MOST][4])
    {
        const uint16_t *coords = value_coords() + levels(1)[l].first_tile * 16;
        const float *scales = value_scales() + levels(1)[l].first_tile * 16;
        const int row = lane / 4, col = lane % 4;
        float *mine = slab(warp);
        __syncwarp(); /* another level gave these coordinates to other lanes */
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if (i < (int)tiles && 2 * col < NR) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t coord = coords[i * 16 + row + 8 * half];
                    const float scale = scales[i * 16 + row + 8 * half];
                    if (scale != 0.0f) { /* filled-up places share coordinate 0 */
                        float2 *sum = (float2 *)(mine + coord * NR + 2 * col);
                        *sum = make_float2(sum->x + acc[i][2 * half] * scale, sum->y + acc[i][2 * half + 1] * scale);
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                acc[i][j] = 0.0f;
        }
    }

    __device__ __forceinline__ float weight_of(uint32_t entry, int r)
    {
        const float gain = entry & 0x8000u ? gain_of(entry) * WEIGHT_SCALE : 0.0f;
        return logits()[r * at.stride + (entry & 2047u)] * gain;
    }

    __device__ void value_residuals(cursor fetched)
    {
        const akv_packed_span *sp = span_copy();
        const uint32_t end = fetched.end;
        uint32_t g = sp->warp[1][warp], l = 0, tiles = 0, round = 0;
        const uint16_t *entries = (const uint16_t *)(base + sp->entries[1]);
        const uint32_t s4a = p->steps4[0], s4b = p->steps4[1], h2 = p->halves2, h1 = p->halves1;
        const int row = lane / 4, col = lane % 4;
        float acc[MOST][4] = {};
        const bool has_row = NR == 8 || row < NR;
        const uint32_t *pairs = (const uint32_t *)entries + col;
        uint32_t ea = has_row && g < end ? pairs[g * 8] : 0, eb = has_row && g < end ? pairs[g * 8 + 4] : 0;
        while (g < end) {
            const uint32_t until = fetched.g;
            __syncwarp(); /* the round to come takes the room of the one before */
            if (until < end)
                fetch_round(1, &fetched, round + 1);
            await_round(until >= end);
            const uint8_t *code = stage(round++);
            for (; g < until; g++) {
                if (g >= sp->groups[1][l + 1]) {
                    if (tiles > 0)
                        flush(l, tiles, acc);
                    while (g >= sp->groups[1][l + 1])
                        l++;
                }
                const level_info info = levels(1)[l];
                const uint32_t four = info.counts & 255, half = four + (info.counts >> 8 & 255), two = half + (info.counts >> 16 & 255);
                tiles = two + (info.counts >> 24);
                uint32_t b0 = 0, b1 = 0;
                if (has_row) {
                    b0 = pack_halves(weight_of(ea & 0xffffu, row), weight_of(ea >> 16, row));
                    b1 = pack_halves(weight_of(eb & 0xffffu, row), weight_of(eb >> 16, row));
                    ea = g + 1 < end ? pairs[g * 8 + 8] : 0; /* of the next group */
                    eb = g + 1 < end ? pairs[g * 8 + 12] : 0;
                }
#pragma unroll
                for (int i = 0; i < MOST; i++) {
                    if (i >= (int)tiles)
                        break;
                    uint32_t a0, a1, a2, a3;
                    if (i >= (int)half) { /* 1 and 2 bits: upper bytes of fp16 */
                        uint32_t q0, q1;
                        if (i < (int)two) {
                            const uint32_t w = ((const uint16_t *)code)[lane];
                            code += 64;
                            q0 = prmt(h2, 0, w & 0x3333u);
                            q1 = prmt(h2, 0, w >> 2 & 0x3333u);
                        } else {
                            const uint32_t w = code[lane], v = w | w << 7;
                            code += 32;
                            q0 = prmt(h1, 0, v & 0x1111u);
                            q1 = prmt(h1, 0, v >> 2 & 0x1111u);
                        }
                        a0 = prmt(q0, 0, 0x1404u);
                        a1 = prmt(q0, 0, 0x3424u);
                        a2 = prmt(q1, 0, 0x1404u);
                        a3 = prmt(q1, 0, 0x3424u);
                    } else { /* 4 bits: magnitudes of the positive ones less those of the negative ones */
                        uint32_t w;
                        if (i < (int)four) {
                            w = ((const uint32_t *)code)[lane];
                            code += 128;
                        } else {
                            w = ((const uint16_t *)code)[lane];
                            code += 64;
                        }
                        const uint32_t x = w ^ 0x88888888u, p0 = prmt(s4a, s4b, w), n0 = prmt(s4a, s4b, x);
                        const uint32_t lo = as_u32(__hsub2(as_half2(prmt(p0, 0x64646464u, 0x4140u)), as_half2(prmt(n0, 0x64646464u, 0x4140u))));
                        const uint32_t hi = as_u32(__hsub2(as_half2(prmt(p0, 0x64646464u, 0x4342u)), as_half2(prmt(n0, 0x64646464u, 0x4342u))));
                        if (i < (int)four) {
                            const uint32_t p1 = prmt(s4a, s4b, w >> 16), n1 = prmt(s4a, s4b, x >> 16);
                            a0 = lo;
                            a1 = hi;
                            a2 = as_u32(__hsub2(as_half2(prmt(p1, 0x64646464u, 0x4140u)), as_half2(prmt(n1, 0x64646464u, 0x4140u))));
                            a3 = as_u32(__hsub2(as_half2(prmt(p1, 0x64646464u, 0x4342u)), as_half2(prmt(n1, 0x64646464u, 0x4342u))));
                        } else {
                            a0 = lo;
                            a2 = hi;
                            a1 = a3 = 0;
                        }
                    }
                    mma_f16(acc[i], a0, a1, a2, a3, b0, b1);
                }
            }
        }
        if (tiles > 0)
            flush(l, tiles, acc);
    }

    __device__ void write_states(uint32_t part)
    {
        const uint32_t k = p->num_anchors, coords = p->coords[1];
#pragma unroll
        for (uint32_t r = 0; r < NR; r++) {
            if (r >= rows)
                break;
            const size_t slot = akv_slot(c, part, head, row0 + r);
            if (threadIdx.x == 0) {
                c.states.max[slot] = row_value(MAX)[r];
                c.states.sum[slot] = row_value(SUM)[r];
            }
            for (uint32_t e = threadIdx.x; e < coords; e += SPAN_THREADS) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < SPAN_WARPS; w++)
                    sum += slab(w)[e * NR + r];
                c.states.sums[slot * D + e] = sum;
            }
            const float unit = exp2f(-row_value(EXPONENT)[r]);
            const int *from = hist() + r * k;
            float *to = c.states.hist + slot * c.most_anchors;
#pragma unroll 4
            for (uint32_t a = threadIdx.x; a < k; a += SPAN_THREADS)
                to[a] = (float)from[a] * unit;
        }
    }

    __device__ void run(const akv_span_item &item)
    {
        prepare(item.first_span, item.first_span / item.num_spans, (p->num_spans + item.num_spans - 1) / item.num_spans);
        __syncthreads();
        for (uint32_t i = 0; i < item.num_spans; i++) {
            const uint32_t span = item.first_span + i;
            const uint64_t begin = (uint64_t)span * p->span_tokens, rest = p->num_tokens - begin;
            const uint32_t count = rest < p->span_tokens ? (uint32_t)rest : p->span_tokens;
            cursor codes = begin_span(span);
            if (i + 1 < item.num_spans)
                fetch_span(span + 1);
            key_residuals(codes);
            __syncwarp();
            codes = begin_stream(1); /* the first value codes come while anchors are worked on */
            fetch_round(1, &codes, 0);
            __syncthreads();
            key_anchors(span_copy(), count);
            __syncthreads();
            soften(count, i == 0);
            value_anchors(span_copy(), count);
            value_residuals(codes);
            __syncthreads();
        }
        write_states(item.part);
    }
};

template <int D, int NR, int NF>
__global__ void __launch_bounds__(SPAN_THREADS, NR == 4 && D <= 128 ? 2 : 1) akv_span_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ __align__(16) uint8_t memory[];
    akv_let_next_start();
    const akv_span_item item = c.span_items[blockIdx.x];
    __builtin_assume(__isGlobal(item.packed)); /* loads then need no look at the address's kind */
    const akv_packed *p = (const akv_packed *)item.packed;
    const uint32_t row0 = blockIdx.z * NR, rows = c.rows - row0 < (uint32_t)NR ? c.rows - row0 : (uint32_t)NR;
    span_block<D, NR, NF> block = {c, p, item.packed, memory, lay_out_span<D, NR, NF>(p->num_anchors, p->span_tokens, p->most_tiles, p->num_levels),
                                   blockIdx.y, row0, rows, item.sequence, __shfl_sync(0xffffffffu, (int)(threadIdx.x / 32), 0), (int)(threadIdx.x % 32)};
    block.run(item);
}

/* What one instance file defines; spans.cu lists them. */
typedef struct akv_span_kernel_entry {
    uint32_t dim, row_chunk, fast_steps;
    const void *kernel;
    uint32_t (*shared)(uint32_t anchors, uint32_t span, uint32_t tiles, uint32_t levels);
} akv_span_kernel_entry;

#define AKV_SPAN_INSTANCE(D, NR, NF)                                                                                   \
    static uint32_t shared_##D##_##NR##_##NF(uint32_t anchors, uint32_t span, uint32_t tiles, uint32_t levels)        \
    {                                                                                                                  \
        return lay_out_span<D, NR, NF>(anchors, span, tiles, levels).total;                                            \
    }                                                                                                                  \
    extern const akv_span_kernel_entry akv_span_##D##_##NR##_##NF;                                                     \
    const akv_span_kernel_entry akv_span_##D##_##NR##_##NF = {D, NR, NF, (const void *)akv_span_kernel<D, NR, NF>, shared_##D##_##NR##_##NF};

#endif
