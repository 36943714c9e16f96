/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.cu - the plain path: any dense range, tail, or block of canonical bytes in either coding, on CUDA cores in fp32.
 *
 * One thread block = (item of at most 1024 tokens, KV head, at most 8 query rows). It covers every shape and option of
 * the format; where a kernel of the tensor-core path covers a segment too, that one runs instead (segments in the
 * private form). A reader of canonical bytes: layout.h is the specification.
 */
#include "cuda/device.cuh"

#define ROWS ((int)AKV_CUDA_PART_ROWS)
#define TOKENS ((int)AKV_CUDA_PART_TOKENS)
#define DIM ((int)AKV_CUDA_MAX_HEAD_DIM)
#define THREADS 256
#define WARPS (THREADS / 32)

struct part_shared {
    float logits[ROWS][TOKENS]; /* then weights */
    float query[ROWS][DIM];
    float coded[ROWS][DIM];     /* queries in the key transform's coordinates, then value sums in the values' */
    float mean[DIM];
    float max[ROWS], sum[ROWS];
    uint32_t bits[DIM];         /* of a level's list: bits of one residual before this entry */
    uint16_t coord[DIM];
    uint8_t width[DIM];
    uint16_t order[TOKENS];     /* tokens by level, ascending inside */
    uint8_t level[TOKENS];
    uint32_t first[AKV_MAX_LEVELS + 3];
    uint32_t list_count, list_bits;
};

/* One item as its block sees it. */
struct part {
    const akv_header *h;
    const uint8_t *blob;
    uint32_t head, count, block;
    uint64_t begin;
};

template <class T>
static __device__ __forceinline__ const T *section(const part &p, int id)
{
    return (const T *)(p.blob + p.h->sections[id].offset);
}

static __device__ bool ladder(const part &p)
{
    return p.h->coding == AKV_CODING_LADDER;
}

static __device__ uint32_t anchor_of(const part &p, int side, uint64_t token)
{
    const uint64_t S = p.h->num_tokens;
    if (!ladder(p)) {
        if (p.h->num_anchors <= 256)
            return section<uint8_t>(p, AKV_SEC_INDEX + side)[p.head * S + token];
        return section<uint16_t>(p, AKV_SEC_INDEX + side)[p.head * S + token];
    }
    const uint8_t *row = section<uint8_t>(p, AKV_SEC_INDEX + side) + p.head * ((S * p.h->index_bits + 7) / 8);
    const uint64_t bit = token * p.h->index_bits;
    const uint8_t *at = row + (bit >> 3);
    const uint32_t word = at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
    return (word >> (bit & 7)) & ((1u << p.h->index_bits) - 1u);
}

/* Coefficient, with the anchor's scale where anchors have one. */
static __device__ float weight_of(const part &p, const akv_code_values &v, int side, uint64_t token, uint32_t anchor)
{
    const uint64_t S = p.h->num_tokens;
    if (!ladder(p))
        return akv_f16(section<uint16_t>(p, AKV_SEC_COEFF + side)[p.head * S + token]);
    const uint8_t byte = section<uint8_t>(p, AKV_SEC_COEFF + side)[p.head * ((S + 1) / 2) + (token >> 1)];
    const int code = (int)(((byte >> ((token & 1) * 4)) & 15u) ^ 8u) - 8;
    const float gamma = code == v.coeff_self ? 1.0f : (float)code * v.coeff_step;
    return gamma * akv_f16(section<uint16_t>(p, AKV_SEC_ANCHOR_SCALES + side)[(uint64_t)p.head * p.h->num_anchors + anchor]);
}

/* Coordinate i of an anchor, without the scale that weight_of carries. */
static __device__ float anchor_at(const part &p, int side, uint32_t anchor, uint32_t i)
{
    const uint32_t dim = p.h->head_dim[side];
    const uint64_t at = ((uint64_t)p.head * p.h->num_anchors + anchor) * dim + i;
    if (!ladder(p))
        return akv_bf16(section<uint16_t>(p, AKV_SEC_ANCHORS + side)[at]);
    return (float)section<int8_t>(p, AKV_SEC_ANCHORS + side)[at] *
           akv_bf16(section<uint16_t>(p, AKV_SEC_UNITS + side)[(uint64_t)p.head * dim + i]);
}

static __device__ uint32_t level_of(const part &p, int side, uint64_t token)
{
    const uint64_t plane_bytes = (p.h->num_tokens + 7) / 8;
    const uint32_t planes = ladder(p) ? 32 - __clz(p.h->num_levels) : 1;
    const uint8_t *maps = section<uint8_t>(p, AKV_SEC_LEVELS + side) + p.head * planes * plane_bytes;
    uint32_t level = 0;
    for (uint32_t i = 0; i < planes; i++)
        level |= (uint32_t)((maps[i * plane_bytes + (token >> 3)] >> (token & 7)) & 1) << i;
    return level;
}

/* Sign flips of the PLAIN coding, base.c's akv_signs. */
static __device__ uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static __device__ float sign_of(const part &p, int side, uint32_t i)
{
    uint64_t state = mix64(mix64(mix64(p.h->seed + 0x9e3779b97f4a7c15ull) ^ (side == AKV_SIDE_K ? 1u : 2u)));
    state += 0x9e3779b97f4a7c15ull * (i / 64 + 1);
    return (mix64(state) >> (i % 64)) & 1 ? -1.0f : 1.0f;
}

/* Entry (c, i) of the orthonormal Walsh-Hadamard transform over greedy power-of-two blocks of dim. */
static __device__ float hadamard(uint32_t dim, uint32_t c, uint32_t i)
{
    uint32_t base = 0;
    for (;;) {
        const uint32_t n = 1u << (31 - __clz(dim - base));
        if (c < base + n)
            return i < base || i >= base + n ? 0.0f : (__popc((c - base) & (i - base)) & 1 ? -1.0f : 1.0f) * rsqrtf((float)n);
        base += n;
    }
}

/* Coordinates of the transform, and what coordinate c of it takes from head coordinate i. */
static __device__ uint32_t num_coords(const part &p, int side)
{
    return ladder(p) ? p.h->basis_cols[side] + p.h->head_dim[side] - p.h->basis_dim[side] : p.h->head_dim[side];
}

static __device__ float transform_at(const part &p, int side, uint32_t c, uint32_t i)
{
    if (!ladder(p)) {
        if (p.h->flags & AKV_FLAG_PLAIN_CODES)
            return c == i ? 1.0f : 0.0f;
        return hadamard(p.h->head_dim[side], c, i) * sign_of(p, side, i);
    }
    const uint32_t n = p.h->basis_dim[side], cols = p.h->basis_cols[side];
    if (c >= cols)
        return i == n + c - cols ? 1.0f : 0.0f;
    const uint64_t row = (uint64_t)p.head * cols + c;
    return i < n ? section<float>(p, AKV_SEC_BASIS_SCALES + side)[row] * (float)section<int8_t>(p, AKV_SEC_BASIS + side)[row * n + i]
                 : 0.0f;
}

/* Head coordinate that stands at place i of the transform's input. */
static __device__ uint32_t place(const part &p, int side, uint32_t i)
{
    return ladder(p) && side == AKV_SIDE_K ? section<uint16_t>(p, AKV_SEC_COORDS)[i] : i;
}

static __device__ float sigma_of(const part &p, int side, uint32_t c)
{
    return ladder(p) ? akv_bf16(section<uint16_t>(p, AKV_SEC_SIGMAS + side)[(uint64_t)p.head * num_coords(p, side) + c]) : 1.0f;
}

/* ---------------------------------------------------------------------------------------------------------- logits */

static __device__ void anchor_logits(const part &p, const akv_cuda_call &c, int rows, part_shared *s)
{
    const uint32_t dim = p.h->head_dim[AKV_SIDE_K], planes = p.h->rotary_dim / 2, lane = threadIdx.x % 32;
    const bool turn = !(p.h->flags & AKV_FLAG_ANCHORS_POST_ROPE);
    const double *inv_freq = section<double>(p, AKV_SEC_INV_FREQ);
    const float magnitude = turn ? (float)p.h->magnitude : 1.0f;
    for (uint32_t t = threadIdx.x / 32; t < p.count; t += WARPS) {
        const uint64_t token = p.begin + t;
        const uint32_t a = anchor_of(p, AKV_SIDE_K, token);
        const float weight = weight_of(p, c.values, AKV_SIDE_K, token, a);
        const int64_t position = p.h->sections[AKV_SEC_POSITIONS].offset ? section<int32_t>(p, AKV_SEC_POSITIONS)[token]
                                                                         : (int64_t)p.h->first_position + (int64_t)token;
        float sum[ROWS] = {};
        for (uint32_t j = lane; j < planes; j += 32) {
            const bool half = p.h->rope_style == AKV_ROPE_HALF_SPLIT;
            const uint32_t i0 = half ? j : 2 * j, i1 = half ? j + planes : 2 * j + 1;
            const float x = s->mean[i0] + weight * anchor_at(p, AKV_SIDE_K, a, i0);
            const float y = s->mean[i1] + weight * anchor_at(p, AKV_SIDE_K, a, i1);
            float co = 1.0f, si = 0.0f;
            if (turn)
                akv_phase(position, inv_freq[j], &co, &si);
            const float k0 = (x * co - y * si) * magnitude, k1 = (x * si + y * co) * magnitude;
            for (int r = 0; r < ROWS; r++)
                sum[r] += k0 * s->query[r][i0] + k1 * s->query[r][i1];
        }
        for (uint32_t i = 2 * planes + lane; i < dim; i += 32) {
            const float k = s->mean[i] + weight * anchor_at(p, AKV_SIDE_K, a, i);
            for (int r = 0; r < ROWS; r++)
                sum[r] += k * s->query[r][i];
        }
        for (int r = 0; r < rows; r++) {
            const float total = akv_warp_sum(sum[r]);
            if (lane == 0)
                s->logits[r][t] = total;
        }
    }
}

/* Tokens of the item sorted by level: as akv_ladder_sort. */
static __device__ void sort_levels(const part &p, int side, part_shared *s)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, levels = ladder(p) ? p.h->num_levels : 1;
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < TOKENS; t += THREADS)
        s->level[t] = t < p.count ? (uint8_t)level_of(p, side, p.begin + t) : 255;
    __syncthreads();
    for (uint32_t l = warp; l <= levels; l += WARPS) {
        uint32_t n = 0;
        for (uint32_t t0 = 0; t0 < p.count; t0 += 32)
            n += __popc(__ballot_sync(0xffffffffu, s->level[t0 + lane] == l));
        if (lane == 0)
            s->first[l + 1] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s->first[0] = 0;
        for (uint32_t l = 0; l <= levels; l++)
            s->first[l + 1] += s->first[l];
    }
    __syncthreads();
    for (uint32_t l = warp; l <= levels; l += WARPS) {
        uint32_t at = s->first[l];
        for (uint32_t t0 = 0; t0 < p.count; t0 += 32) {
            const bool mine = s->level[t0 + lane] == l;
            const uint32_t same = __ballot_sync(0xffffffffu, mine);
            if (mine)
                s->order[at + __popc(same & ((1u << lane) - 1u))] = (uint16_t)(t0 + lane);
            at += __popc(same);
        }
    }
    __syncthreads();
}

/* The coordinates of a level in code order, by one thread. */
static __device__ void make_list(const part &p, int side, uint32_t level, part_shared *s)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t coords = num_coords(p, side);
        uint32_t n = 0, bits = 0;
        if (!ladder(p)) {
            for (uint32_t c = 0; c < coords; c++, n++, bits += 2) {
                s->coord[n] = (uint16_t)c;
                s->width[n] = 2;
                s->bits[n] = bits;
            }
            bits = (coords * 2 + 7) / 8 * 8;
        } else {
            const uint32_t row = (coords + 3) / 4;
            const uint8_t *table = section<uint8_t>(p, AKV_SEC_TABLES + side) + ((uint64_t)p.head * p.h->num_levels + level - 1) * row;
            for (uint32_t entry = 3; entry >= 1; entry--)
                for (uint32_t c = 0; c < coords; c++)
                    if (((table[c / 4] >> (c % 4 * 2)) & 3u) == entry) {
                        s->coord[n] = (uint16_t)c;
                        s->width[n] = (uint8_t)(entry == 3 ? 4 : entry);
                        s->bits[n++] = bits;
                        bits += entry == 3 ? 4 : entry;
                    }
        }
        s->list_count = n;
        s->list_bits = bits;
    }
    __syncthreads();
}

/* A run: the residuals of one level of one block. */
struct run {
    const uint8_t *gains, *codes;
    uint32_t n, bits;
    const uint16_t *order;
};

static __device__ float run_gain(const part &p, const run &r, const akv_code_values &v, uint32_t i)
{
    if (!ladder(p))
        return akv_f16(((const uint16_t *)r.gains)[i]);
    return v.gain[(r.gains[i / 2] >> (i % 2 * 4)) & 15u];
}

/* Level value of list entry e of residual i. */
static __device__ float run_value(const part &p, const run &r, const akv_code_values &v, uint32_t i, uint32_t width, uint32_t before)
{
    const uint32_t lanes = AKV_GROUP_LANES, group = i / lanes, lane = i % lanes;
    const uint32_t g = r.n - group * lanes < lanes ? r.n - group * lanes : lanes;
    const uint32_t bit = before * g + lane * width;
    const uint8_t *codes = r.codes + (uint64_t)group * (lanes * r.bits / 8);
    const uint32_t number = (codes[bit >> 3] >> (bit & 7)) & ((1u << width) - 1u);
    if (!ladder(p))
        return p.h->flags & AKV_FLAG_PLAIN_CODES ? v.uniform[number] : v.plain[number];
    return width == 1 ? v.level1[number] : width == 2 ? v.level2[number] : v.level4[number];
}

/* Walk over the runs of this item's block: body(run) is called by all threads with the list of the level in s. */
template <class Body>
static __device__ void each_run(const part &p, int side, part_shared *s, Body body)
{
    sort_levels(p, side, s);
    const uint32_t blocks = (uint32_t)((p.h->num_tokens + AKV_BLOCK_TOKENS - 1) / AKV_BLOCK_TOKENS);
    if (!ladder(p)) {
        const uint64_t rank = section<uint64_t>(p, AKV_SEC_RANKS + side)[(uint64_t)p.head * blocks + p.block];
        const uint32_t code_bytes = (p.h->head_dim[side] * 2 + 7) / 8;
        const run r = {section<uint8_t>(p, AKV_SEC_GAINS + side) + rank * 2, section<uint8_t>(p, AKV_SEC_CODES + side) + rank * code_bytes,
                       s->first[2] - s->first[1], code_bytes * 8, s->order + s->first[1]};
        make_list(p, side, 1, s);
        if (r.n > 0)
            body(r);
        return;
    }
    const uint8_t *at = section<uint8_t>(p, AKV_SEC_CODES) + section<uint64_t>(p, AKV_SEC_RANKS)[((uint64_t)p.head * blocks + p.block) * 2 + side];
    for (uint32_t l = 1; l <= p.h->num_levels; l++) {
        const uint32_t n = s->first[l + 1] - s->first[l];
        if (n == 0)
            continue;
        make_list(p, side, l, s);
        const run r = {at, at + (n + 1) / 2, n, s->list_bits, s->order + s->first[l]};
        body(r);
        const uint32_t full = n / AKV_GROUP_LANES, rest = n % AKV_GROUP_LANES;
        at += (n + 1) / 2 + (uint64_t)full * (2 * s->list_bits) + (rest * s->list_bits + 7) / 8;
    }
}

static __device__ void key_residuals(const part &p, const akv_cuda_call &c, int rows, part_shared *s)
{
    const uint32_t dim = p.h->head_dim[AKV_SIDE_K], coords = num_coords(p, AKV_SIDE_K);
    for (uint32_t e = threadIdx.x; e < coords * rows; e += THREADS) {
        const uint32_t r = e / coords, k = e % coords;
        float z = 0.0f;
        for (uint32_t i = 0; i < dim; i++)
            z += transform_at(p, AKV_SIDE_K, k, i) * s->query[r][place(p, AKV_SIDE_K, i)];
        s->coded[r][k] = z * sigma_of(p, AKV_SIDE_K, k);
    }
    const akv_code_values &values = c.values;
    each_run(p, AKV_SIDE_K, s, [&](const run &u) {
        const uint32_t lane = threadIdx.x % 32;
        for (uint32_t i = threadIdx.x / 32; i < u.n; i += WARPS) {
            float sum[ROWS] = {};
            for (uint32_t e = lane; e < s->list_count; e += 32) {
                const float x = run_value(p, u, values, i, s->width[e], s->bits[e]);
                for (int r = 0; r < ROWS; r++)
                    sum[r] += x * s->coded[r][s->coord[e]];
            }
            const float gain = run_gain(p, u, values, i);
            for (int r = 0; r < rows; r++) {
                const float total = akv_warp_sum(sum[r]);
                if (lane == 0)
                    s->logits[r][u.order[i]] += gain * total;
            }
        }
    });
    __syncthreads();
}

static __device__ void dense_logits(const void *keys, int dtype, int64_t stride, uint32_t dim, uint32_t n, int rows, part_shared *s)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t t = threadIdx.x / 32; t < n; t += WARPS) {
        float sum[ROWS] = {};
        for (uint32_t i = lane; i < dim; i += 32) {
            const float k = akv_load(keys, dtype, (int64_t)t * stride + i);
            for (int r = 0; r < ROWS; r++)
                sum[r] += k * s->query[r][i];
        }
        for (int r = 0; r < rows; r++) {
            const float total = akv_warp_sum(sum[r]);
            if (lane == 0)
                s->logits[r][t] = total;
        }
    }
}

/* ------------------------------------------------------------------------------------------------- softmax and values */

/* Logits to weights; max and sum of each row. NaN among the logits makes the sum NaN. */
static __device__ void soften(uint32_t n, int rows, part_shared *s)
{
    const int lane = threadIdx.x % 32;
    __syncthreads();
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float max = -INFINITY, sum = 0.0f;
        for (uint32_t t = lane; t < n; t += 32)
            max = fmaxf(max, s->logits[r][t]);
        max = akv_warp_max(max);
        const float origin = max == -INFINITY ? 0.0f : max;
        for (uint32_t t = lane; t < n; t += 32) {
            const float w = expf(s->logits[r][t] - origin);
            s->logits[r][t] = w;
            sum += w;
        }
        sum = akv_warp_sum(sum);
        if (lane == 0) {
            s->max[r] = max;
            s->sum[r] = sum;
        }
    }
    __syncthreads();
}

static __device__ void coded_values(const part &p, const akv_cuda_call &c, int rows, part_shared *s, float *acc)
{
    const uint32_t dim = p.h->head_dim[AKV_SIDE_V], coords = num_coords(p, AKV_SIDE_V), i = threadIdx.x;
    const akv_code_values &values = c.values;
    /* anchors: thread i owns coordinate i */
    for (uint32_t t = 0; i < dim && t < p.count; t++) {
        const uint32_t a = anchor_of(p, AKV_SIDE_V, p.begin + t);
        const float v = weight_of(p, values, AKV_SIDE_V, p.begin + t, a) * anchor_at(p, AKV_SIDE_V, a, i);
        for (int r = 0; r < ROWS; r++)
            acc[r] += v * s->logits[r][t];
    }
    for (uint32_t e = threadIdx.x; e < ROWS * DIM; e += THREADS)
        s->coded[e / DIM][e % DIM] = 0.0f;
    each_run(p, AKV_SIDE_V, s, [&](const run &u) {
        for (uint32_t e = threadIdx.x; e < s->list_count; e += THREADS) {
            float sum[ROWS] = {};
            for (uint32_t k = 0; k < u.n; k++) {
                const float x = run_gain(p, u, values, k) * run_value(p, u, values, k, s->width[e], s->bits[e]);
                for (int r = 0; r < ROWS; r++)
                    sum[r] += x * s->logits[r][u.order[k]];
            }
            const float sigma = sigma_of(p, AKV_SIDE_V, s->coord[e]);
            for (int r = 0; r < ROWS; r++)
                s->coded[r][s->coord[e]] += sum[r] * sigma;
        }
    });
    __syncthreads();
    for (uint32_t k = 0; i < dim && k < coords; k++) {
        const float u = transform_at(p, AKV_SIDE_V, k, i);
        for (int r = 0; r < ROWS; r++)
            acc[r] += u * s->coded[r][k];
    }
}

static __device__ void dense_values(const void *values, int dtype, int64_t stride, uint32_t dim, uint32_t n, part_shared *s, float *acc)
{
    for (uint32_t t = 0; threadIdx.x < dim && t < n; t++) {
        const float v = akv_load(values, dtype, (int64_t)t * stride + threadIdx.x);
        for (int r = 0; r < ROWS; r++) /* a hidden token must not spread the NaN it may hold */
            acc[r] += s->logits[r][t] == 0.0f ? 0.0f : v * s->logits[r][t];
    }
}

__global__ void __launch_bounds__(THREADS) akv_parts_kernel(const __grid_constant__ akv_cuda_call c)
{
    extern __shared__ uint8_t memory[];
    akv_let_next_start();
    part_shared *s = (part_shared *)memory;
    const akv_item item = c.items[blockIdx.x];
    const uint32_t head = blockIdx.y, row0 = blockIdx.z * ROWS, dv = c.dim_v;
    const int rows = (int)(c.rows - row0 < (uint32_t)ROWS ? c.rows - row0 : (uint32_t)ROWS);
    const bool is_tail = item.kind == AKV_ITEM_TAIL, is_dense = item.kind == AKV_ITEM_DENSE;
    part p = {(const akv_header *)item.data, item.data, head, item.count, (uint32_t)(item.begin / AKV_BLOCK_TOKENS), item.begin};
    akv_tail tail = {};
    uint64_t tail_tokens = 0;
    uint32_t n = item.count;
    if (is_tail) {
        tail = c.tails[item.sequence];
        tail_tokens = tail.tokens;
        if (c.tail_lengths != NULL) {
            const int32_t said = c.tail_lengths[item.sequence];
            tail_tokens = said < 0 ? 0 : (uint64_t)said < tail.tokens ? (uint64_t)said : tail.tokens;
        }
        n = item.begin >= tail_tokens ? 0 : tail_tokens - item.begin < n ? (uint32_t)(tail_tokens - item.begin) : n;
    }

    for (uint32_t e = threadIdx.x; e < ROWS * DIM; e += THREADS) {
        const uint32_t r = e / DIM, i = e % DIM;
        s->query[r][i] = (int)r < rows && i < c.dim_k ? akv_load(c.step.queries, c.query_dtype, akv_query_at(c, item.sequence, head, row0 + r) + i) : 0.0f;
        if (r == 0)
            s->mean[i] = item.kind == AKV_ITEM_LADDER && i < c.dim_k ? akv_bf16(section<uint16_t>(p, AKV_SEC_MEAN)[(uint64_t)head * c.dim_k + i]) : 0.0f;
    }
    for (uint32_t e = threadIdx.x; e < ROWS * TOKENS; e += THREADS)
        s->logits[e / TOKENS][e % TOKENS] = 0.0f;
    __syncthreads();

    const void *keys = NULL, *values = NULL;
    int dtype = c.tail_dtype;
    int64_t stride_k = 0, stride_v = 0;
    if (is_tail) {
        const int size = dtype == AKV_F32 ? 4 : 2;
        stride_k = tail.stride_token[0];
        stride_v = tail.stride_token[1];
        keys = (const uint8_t *)tail.keys + (head * tail.stride_head[0] + (int64_t)item.begin * stride_k) * size;
        values = (const uint8_t *)tail.values + (head * tail.stride_head[1] + (int64_t)item.begin * stride_v) * size;
    } else if (is_dense) {
        dtype = (int)p.h->dense_dtype;
        const int size = dtype == AKV_F32 ? 4 : 2;
        stride_k = c.dim_k;
        stride_v = dv;
        keys = section<uint8_t>(p, AKV_SEC_DENSE) + (head * p.h->num_tokens + item.begin) * stride_k * size;
        values = section<uint8_t>(p, AKV_SEC_DENSE + 1) + (head * p.h->num_tokens + item.begin) * stride_v * size;
    }
    if (is_tail || is_dense)
        dense_logits(keys, dtype, stride_k, c.dim_k, n, rows, s);
    else {
        anchor_logits(p, c, rows, s);
        key_residuals(p, c, rows, s);
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < (uint32_t)rows * n; e += THREADS) {
        const uint32_t r = e / n, t = e % n;
        float l = akv_cap(s->logits[r][t] * c.sm_scale, c.softcap);
        if (is_tail) {
            const uint64_t q = (row0 + r) % c.T, j = item.begin + t;
            if (tail.mask != NULL)
                l += tail.mask[(int64_t)q * tail.mask_stride + (int64_t)j];
            else if (j + c.T > tail_tokens + q)
                l = -INFINITY;
        }
        s->logits[r][t] = l;
    }
    soften(n, rows, s);

    float acc[ROWS] = {};
    if (is_tail || is_dense)
        dense_values(values, dtype, stride_v, dv, n, s, acc);
    else
        coded_values(p, c, rows, s, acc);
    for (int r = 0; r < rows; r++) {
        const size_t slot = akv_slot(c, item.part, head, row0 + r);
        if (threadIdx.x < dv)
            c.partials.acc[slot * dv + threadIdx.x] = acc[r];
        if (threadIdx.x == 0) {
            c.partials.max[slot] = s->max[r];
            c.partials.sum[slot] = s->sum[r];
        }
    }
    akv_wait_for_previous(); /* nothing here needs the span items, but who waits for this kernel needs both */
}

/* ------------------------------------------------------------------------------------------------------------ combine */

#define MERGE_WARPS 8

/*
 * One block per (query head, query token) and sequence: merge its partial states, add the sink, normalise. Warp w takes every eighth
 * slot, a lane every 32nd coordinate, so that all loads are in flight together.
 */
__global__ void __launch_bounds__(MERGE_WARPS * 32) akv_combine_kernel(const __grid_constant__ akv_cuda_call c)
{
    __shared__ float sums[MERGE_WARPS][DIM + 1];
    const uint32_t sequence = blockIdx.y, head = blockIdx.x / c.rows, row = blockIdx.x % c.rows;
    const uint32_t q = head * c.G + row / c.T, t = row % c.T;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t first = c.first_slot[sequence], end = c.first_slot[sequence + 1]; /* the plan's: there before any kernel */
    akv_wait_for_previous();
    const float sink = c.step.sinks != NULL ? c.step.sinks[q] : -INFINITY;
    float max = sink;
    bool nan = false;
    for (uint32_t i = first + lane; i < end; i += 32) {
        const size_t slot = akv_slot(c, i, head, row);
        max = fmaxf(max, c.partials.max[slot]);
        nan |= c.partials.sum[slot] != c.partials.sum[slot];
    }
    max = akv_warp_max(max);
    nan = __any_sync(0xffffffffu, nan);
    const float origin = max == -INFINITY ? 0.0f : max;
    float acc[DIM / 32] = {}, sum = c.step.sinks != NULL && warp == 0 ? expf(sink - origin) : 0.0f;
#pragma unroll 4
    for (uint32_t i = first + warp; i < end; i += MERGE_WARPS) {
        const size_t slot = akv_slot(c, i, head, row);
        const float w = expf(c.partials.max[slot] - origin);
        sum += w * c.partials.sum[slot];
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            const float x = j * 32 + lane < (int)c.dim_v ? c.partials.acc[slot * c.dim_v + j * 32 + lane] : 0.0f;
            acc[j] += w != 0.0f ? w * x : 0.0f;
        }
    }
#pragma unroll
    for (int j = 0; j < DIM / 32; j++)
        sums[warp][j * 32 + lane] = acc[j];
    if (lane == 0)
        sums[warp][DIM] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < MERGE_WARPS; w++)
        total += sums[w][DIM];
    if (threadIdx.x < c.dim_v) {
        float x = 0.0f;
        for (int w = 0; w < MERGE_WARPS; w++)
            x += sums[w][threadIdx.x];
        akv_store(c.step.out, c.out_dtype, sequence * c.step.out_stride_sequence + q * c.step.out_stride_head +
                                               t * c.step.out_stride_token + threadIdx.x,
                  nan ? NAN : total == 0.0f ? 0.0f : x / total);
    }
    const size_t state = ((size_t)sequence * c.H * c.G + q) * c.T + t;
    if (threadIdx.x == 0 && c.step.state_max != NULL)
        c.step.state_max[state] = max;
    if (threadIdx.x == 0 && c.step.state_sum != NULL)
        c.step.state_sum[state] = nan ? NAN : total;
}

extern "C" cudaError_t akv_cuda_prepare_parts(void)
{
    return cudaFuncSetAttribute(akv_parts_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(part_shared));
}

extern "C" cudaError_t akv_cuda_launch_parts(const akv_cuda_call *call, cudaStream_t stream)
{
    const dim3 grid(call->num_items, call->H, (call->rows + ROWS - 1) / ROWS);
    if (call->num_items == 0)
        return cudaSuccess;
    return akv_launch((const void *)akv_parts_kernel, grid, THREADS, sizeof(part_shared), stream, call,
                      call->early_launch != 0 && (call->num_span_items > 0 || call->paper.num_items > 0));
}

extern "C" cudaError_t akv_cuda_launch_combine(const akv_cuda_call *call, cudaStream_t stream)
{
    const dim3 grid(call->H * call->rows, call->num_sequences);
    return akv_launch((const void *)akv_combine_kernel, grid, MERGE_WARPS * 32, 0, stream, call,
                      call->early_launch != 0 && (call->num_items > 0 || call->num_span_items > 0 || call->paper.num_items > 0));
}
